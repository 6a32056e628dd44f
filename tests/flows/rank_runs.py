"""Tiny runs on two ranks. Trains one in this process:

python -m tests.flows.rank_runs STORE
"""

import sys
from pathlib import Path

from grpo_lib.config import RunConfig
from grpo_lib.config_files import make_config
from tests.flows.tiny import TINY, use_easy_reward

SETTINGS = [
    "trainer.backend=fsdp2",
    "placement.ranks=2",
    "placement.device=cpu",
    "trainer.mini_batch_prompts=2",  # two optimizer steps an iteration: as many calls of the loss in each rank
    "algorithm.plugins=[tests.flows.rank_losses]",
    "algorithm.loss=accident",
]


def on_ranks(store: Path, *settings: str) -> RunConfig:
    return make_config(TINY | {"store": {"uri": str(store)}}, [*SETTINGS, *settings])


if __name__ == "__main__":
    import tasks.reward
    from flows.train import train

    tasks.reward.get_problem = use_easy_reward  # type: ignore[assignment]
    train(on_ranks(Path(sys.argv[1])))
