"""``python -m grpo_lib.placement.ray_probe HOST:PORT``: the machines of a cluster, as JSON, without joining it.

A process of its own: a client whose cluster is lost ends the process that it is in.
"""

import json
import sys
from typing import Any

from ray._raylet import GcsClient  # type: ignore[attr-defined]  # compiled, and left out of its stub
from ray.core.generated.gcs_pb2 import GcsNodeInfo
from ray.exceptions import AuthenticationError, RayError

ANSWER_SECONDS = 20.0


def probe(address: str) -> dict[str, Any]:
    """Nodes, or why there is no answer (``refused``)."""
    try:
        found = GcsClient(address=address).get_all_node_info(timeout=ANSWER_SECONDS)
    except AuthenticationError:
        return {"refused": "refuses the token of this machine; copy the one of the head's machine here"}
    except RayError as error:
        return {"refused": f"does not answer as a head of Ray should: {error}"}
    return {
        "nodes": [
            {
                "id": key.hex(),
                "host": info.node_manager_address,
                "alive": info.state == GcsNodeInfo.GcsNodeState.ALIVE,
                "head": info.is_head_node,
                "resources": dict(info.resources_total),
            }
            for key, info in found.items()
        ]
    }


if __name__ == "__main__":
    print(json.dumps(probe(sys.argv[1])))
