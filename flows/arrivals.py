"""Telling Prefect that prompt files arrived: an automation starts the retraining."""

import uuid
from collections.abc import Sequence

from prefect.events import emit_event
from prefect.events.worker import EventsWorker

from grpo_lib.errors import RunError

EVENT = "grpo.prompts.arrived"
SHOWN = 100
"""Paths that an event names."""

_told: set[uuid.UUID] = set()


def announce_arrivals(model: str, store: str, new: Sequence[tuple[str, str]]) -> bool:
    """Emits the event for these files, once; its id follows from their content, so that Prefect counts it once too.

    Args:
        model: that is to be retrained.
        store: its address.
        new: path and sha256 of each file.

    Returns:
        False: this process has told of exactly these.

    Raises:
        RunError: the event could not be sent.
    """
    digests = sorted(digest for _, digest in new)
    which = uuid.uuid5(uuid.NAMESPACE_URL, "/".join(["grpo", store, model, *digests]))
    if which in _told:
        return False
    event = emit_event(
        event=EVENT,
        resource={
            "prefect.resource.id": f"grpo.retraining.{model}",
            "prefect.resource.name": model,
            "grpo.store": store,
        },
        payload={"model": model, "files": [path for path, _ in new][:SHOWN], "count": len(new)},
        id=which,
    )
    if event is None:
        raise RunError("Prefect did not take the event; check PREFECT_API_URL and the server's log")
    EventsWorker.instance().wait_until_empty()
    _told.add(which)
    return True
