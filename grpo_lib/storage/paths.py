"""Where everything lies in the store. No other module puts a path together.

    runs/{run}/run.json
    runs/{run}/setup/{stage}/{key}/...                  stages before the first iteration
    runs/{run}/iterations/000007/{stage}/{key}/
        manifest.json                                   its existence is the commit
        {attempt}/part-00000.arrow                      garbage unless the manifest names it
    index/{first two digits of key}/{key}.json          which run holds a manifest with that key

An iteration's number has six digits, so that listings come in order.
"""

MANIFEST = "manifest.json"
RUNS = "runs"


def run_folder(run: str) -> str:
    """Everything that belongs to a run."""
    return f"{RUNS}/{_step(run)}"


def run_file(run: str) -> str:
    """The description of a run."""
    return f"{run_folder(run)}/run.json"


def continuation_file(run: str) -> str:
    """The settings with which a run was last continued, where they differ from those of its description."""
    return f"{run_folder(run)}/continued.json"


def iteration_folder(run: str, iteration: int | None) -> str:
    """All stages of an iteration; None: those before the first."""
    place = "setup" if iteration is None else f"iterations/{iteration:06d}"
    return f"{run_folder(run)}/{place}"


def stage_folder(run: str, iteration: int | None, stage: str, key: str) -> str:
    """A stage's manifest and attempts; ``iteration`` is None for stages before the first.

    >>> stage_folder("demo", 7, "reward", "c0ffee")
    'runs/demo/iterations/000007/reward/c0ffee'
    """
    return f"{iteration_folder(run, iteration)}/{_step(stage)}/{_step(key)}"


def manifest_path(run: str, iteration: int | None, stage: str, key: str) -> str:
    """The manifest of a stage; it exists when the stage is committed."""
    return f"{stage_folder(run, iteration, stage, key)}/{MANIFEST}"


def is_manifest(path: str) -> bool:
    """Whether a listed path is a manifest.

    >>> is_manifest("runs/demo/setup/warm_start/c0ffee/manifest.json")
    True
    """
    return path.rpartition("/")[2] == MANIFEST


def attempt_folder(folder: str, attempt: str) -> str:
    """Files of one attempt at a stage, below its stage folder."""
    return f"{folder}/{_step(attempt)}"


def part_file(number: int) -> str:
    """Name of an attempt's table file.

    >>> part_file(3)
    'part-00003.arrow'
    """
    return f"part-{number:05d}.arrow"


def file_in(folder: str, name: str) -> str:
    """A file directly in a folder."""
    return f"{folder}/{_step(name)}"


def file_name(path: str) -> str:
    """The last step of a path."""
    return path.rpartition("/")[2]


def parent(path: str) -> str:
    """The folder that a file is in."""
    return path.rpartition("/")[0]


def index_path(key: str) -> str:
    """The store-wide pointer to a manifest with that key.

    >>> index_path("c0ffee")
    'index/c0/c0ffee.json'
    """
    return f"index/{_step(key)[:2]}/{key}.json"


def _step(name: str) -> str:
    if not name or "/" in name or name.startswith("."):
        raise ValueError(f"{name!r} can't be a step of a path: it must not be empty, hold '/' or start with '.'")
    return name
