"""Telling Prefect that prompt files arrived: an automation starts the retraining."""

import uuid
from collections.abc import Sequence

import httpx
from prefect.client.orchestration import get_client
from prefect.events import Event

from grpo_lib.errors import RunError
from grpo_lib.retraining.records import ARRIVED

SHOWN = 100
"""Paths that an event names."""

_told: set[uuid.UUID] = set()


def announce_arrivals(model: str, store: str, new: Sequence[tuple[str, str]], decided: int, again: int) -> bool:
    """Sends the event for these files, once; its id follows from all that is given, so that Prefect counts it once too.

    Args:
        model: that is to be retrained.
        store: its address.
        new: path and sha256 of each file.
        decided: number of the last round that was decided: files that it did not take are told of again.
        again: number of the time by which files are told of again that nobody took, e.g. since a training failed.

    Returns:
        False: this process has told of exactly these.

    Raises:
        RunError: Prefect did not take it.
    """
    digests = sorted(digest for _, digest in new)
    which = uuid.uuid5(uuid.NAMESPACE_URL, "/".join(["grpo", store, model, str(decided), str(again), *digests]))
    if which in _told:
        return False
    event = Event(
        event=ARRIVED,
        resource={
            "prefect.resource.id": f"grpo.retraining.{model}",
            "prefect.resource.name": model,
            "grpo.store": store,
        },
        payload={"model": model, "files": [path for path, _ in new][:SHOWN], "count": len(new)},
        id=which,
    )
    try:
        with get_client(sync_client=True) as client:
            client.request("POST", "/events", json=[event.model_dump(mode="json")])
    except httpx.HTTPError as error:
        raise RunError(f"Prefect did not take the event {ARRIVED}: {error}; is PREFECT_API_URL right?") from error
    _told.add(which)
    return True
