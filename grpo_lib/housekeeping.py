"""Removing what nobody needs from a store, with everybody asked who may need it: lease holders, and MLflow."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from grpo_lib.config import StoreConfig
from grpo_lib.config_files import make_config
from grpo_lib.errors import CorruptError, GrpoError, LeaseHeldError
from grpo_lib.progress import progress
from grpo_lib.run import run_names, stored_values
from grpo_lib.storage import paths
from grpo_lib.storage.claims import Beat, is_gone, newest_epoch, parsed, read_claim, read_if_there
from grpo_lib.storage.gc import Garbage, Rules, garbage, remove
from grpo_lib.storage.lease import Held, holding
from grpo_lib.storage.objects import ObjectStore, open_store

QUIET_SECONDS = 600
"""A lease without a heartbeat for so long is no reason to spare a run; to remove something it is taken all the same."""


def find_garbage(
    store: StoreConfig, runs: Sequence[str], *, older_than_days: float, keep_weights: int
) -> list[Garbage]:
    """What `grpo gc` would remove; of ``runs``, or of the whole store.

    Raises:
        TrackingError: MLflow does not say what it refers to.
    """
    objects = open_store(store)
    rules = Rules(
        older_than=older_than_days * 86_400,
        keep_weights=keep_weights,
        now=time.time(),
        runs=runs or None,
        busy={name for name in _all_runs(objects) if _is_busy(objects, name)},
    )
    things = garbage(objects, rules)
    if not any(thing.kind in ("attempt", "weights") for thing in things):
        return things
    pinned = {place for uri in _tracking(store, objects) for place in _in_mlflow(uri)}
    return [thing for thing in things if _folder(thing) not in pinned]


def remove_garbage(store: StoreConfig, things: Iterable[Garbage], removed: Callable[[Garbage], None]) -> list[str]:
    """Removes what was found; attempts of a run only while it is held, so that no flow works on it.

    Returns:
        Why something was left, a line a run.
    """
    objects, left = open_store(store), []
    by_run: dict[str, list[Garbage]] = {}
    free = []
    for thing in things:
        if thing.kind == "attempt" and thing.run is not None:
            by_run.setdefault(thing.run, []).append(thing)
        else:
            free.append(thing)
    for run, attempts in by_run.items():
        try:
            with holding(Held(objects=objects, name=run)):
                remove(objects, attempts, removed)
        except LeaseHeldError as error:
            left.append(str(error))
    remove(objects, free, removed)
    return left


def _all_runs(objects: ObjectStore) -> set[str]:
    found = (paths.run_of(info.path) for info in objects.list(paths.RUNS))
    return {name for name in found if name is not None}


def _is_busy(objects: ObjectStore, run: str) -> bool:
    epoch = newest_epoch(objects, run)
    if epoch == 0:
        return False
    claim = read_claim(objects, run, epoch)
    beat = parsed(Beat, read_if_there(objects, paths.beat_file(run, epoch)))
    if (claim is not None and is_gone(claim)) or (beat is not None and beat.released):
        return False
    files = objects.list(paths.leases_folder(run))
    return time.time() - max(info.modified for info in files) < QUIET_SECONDS


def _tracking(store: StoreConfig, objects: ObjectStore) -> Iterator[str]:
    """Where the runs of the store log to."""
    from grpo_lib.tracking.address import default_uri, tracking_uri

    seen = {default_uri(store)}
    for name in run_names(objects):
        try:
            values = stored_values(objects, name)
            seen.add(tracking_uri(make_config(values | {"store": values["store"] | {"uri": store.uri}})))
        except (CorruptError, GrpoError) as error:
            progress().note(f"run {name!r}: where it logs to can't be read ({error})")
    yield from sorted(seen)


def _in_mlflow(uri: str) -> set[str]:
    """Folders of the store that MLflow refers to; the store may have been moved since."""
    from grpo_lib.tracking.mlflow import places_in_use

    found = set()
    for place in places_in_use(uri):
        steps = place.rstrip("/").split("/")
        found |= {"/".join(steps[start:]) for start, step in enumerate(steps) if step == paths.RUNS}
    return found


def _folder(thing: Garbage) -> str:
    """Of its files."""
    if thing.manifest is not None and thing.manifest.parts:
        return paths.parent(thing.manifest.parts[0].path)
    return thing.path
