"""Where everything lies in the store. No other module puts a path together.

    runs/{run}/run.json
    runs/{run}/leases/000003.json                       who works on the run; see lease.py
    runs/{run}/damage.json                              the run has to be looked through before it goes on
    runs/{run}/setup/{stage}/{key}/...                  stages before the first iteration
    runs/{run}/iterations/000007/{stage}/{key}/
        manifest.json                                   its existence is the commit
        remake.json                                     what is to come out when a damaged artifact is made again
        {attempt}/part-00000.arrow                      garbage unless the manifest names it
        judged/{sha256}.arrow                           what an attempt that failed had judged; garbage as well
    index/{first two digits of key}/{key}.json          which run holds a manifest with that key
    models/{model}/rounds/000002/                       a registered model's retraining, or what was done with it
        prompts-{sha256}.jsonl                          what came with it, what was mixed in, what it is judged by
        plan.json  judged.json  decision.json           each made once
        applied.json                                    the registry knows of the decision
    damaged/runs/...                                    what was set aside, for people
    sweeps/{sweep}/sweep.json                           what a sweep was asked for
    sweeps/{sweep}/{run}.json                           how a run of it ended
    probe/...                                           what checks write and delete

An iteration's number has six digits, so that listings come in order.
"""

import re

MANIFEST = "manifest.json"
MODELS = "models"
RUNS = "runs"
INDEX = "index"
DAMAGED = "damaged"
PROBES = "probe"
SWEEPS = "sweeps"
JUDGED = "judged"
_IN_ATTEMPT = re.compile(r"(runs/[^/]+/(?:setup|iterations/\d+)/[^/]+/[^/]+/[^/]+)/[^/]+")


def run_folder(run: str) -> str:
    """Everything that belongs to a run."""
    return f"{RUNS}/{_step(run)}"


def run_file(run: str) -> str:
    """The description of a run."""
    return f"{run_folder(run)}/run.json"


def continuation_file(run: str) -> str:
    """The settings with which a run was last continued, where they differ from those of its description."""
    return f"{run_folder(run)}/continued.json"


def sweep_file(sweep: str) -> str:
    """The description of a sweep."""
    return f"{SWEEPS}/{_step(sweep)}/sweep.json"


def trial_file(sweep: str, run: str) -> str:
    """Exists when a run of a sweep has ended for good."""
    return f"{SWEEPS}/{_step(sweep)}/{_step(run)}.json"


def damage_file(run: str) -> str:
    """Exists when something of the run was found damaged."""
    return f"{run_folder(run)}/damage.json"


def remake_file(manifest: str) -> str:
    """What is to come out when the artifact of that manifest is made again.

    >>> remake_file("runs/demo/setup/dataset/c0ffee/manifest.json")
    'runs/demo/setup/dataset/c0ffee/remake.json'
    """
    return f"{parent(manifest)}/remake.json"


def aside(manifest: str, digest: str) -> str:
    """Where a damaged manifest is kept, by the sha256 of its bytes.

    >>> aside("runs/demo/setup/dataset/c0ffee/manifest.json", "0123456789abcdef")
    'damaged/runs/demo/setup/dataset/c0ffee/01234567.json'
    """
    return f"{DAMAGED}/{parent(manifest)}/{digest[:8]}.json"


def aside_part(part: str) -> str:
    """Where a damaged part is kept.

    >>> aside_part("runs/demo/setup/dataset/c0ffee/1/part-00000.arrow")
    'damaged/runs/demo/setup/dataset/c0ffee/1/part-00000.arrow'
    """
    return f"{DAMAGED}/{part}"


def leases_folder(run: str) -> str:
    """Who worked on a run, and who does."""
    return f"{run_folder(run)}/leases"


def claim_file(run: str, epoch: int) -> str:
    """A claim on a run.

    >>> claim_file("demo", 3)
    'runs/demo/leases/000003.json'
    """
    return f"{leases_folder(run)}/{epoch:06d}.json"


def beat_file(run: str, epoch: int) -> str:
    """The heartbeat of the process with that claim."""
    return f"{leases_folder(run)}/{epoch:06d}.beat.json"


def epoch_of(path: str) -> int | None:
    """The number of a claim; None: the path is of something else.

    >>> epoch_of("runs/demo/leases/000003.json"), epoch_of("runs/demo/leases/000003.beat.json")
    (3, None)
    """
    number = file_name(path).removesuffix(".json")
    return int(number) if number.isdigit() else None


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


def manifest_place(path: str) -> tuple[str, int | None, str]:
    """Stage, iteration and key of a manifest's path, the inverse of ``manifest_path``.

    >>> manifest_place("runs/demo/iterations/000007/reward/c0ffee/manifest.json")
    ('reward', 7, 'c0ffee')
    """
    *_, place, stage, key, _ = path.split("/")
    return stage, None if place == "setup" else int(place), key


def attempt_folder(folder: str, attempt: str) -> str:
    """Files of one attempt at a stage, below its stage folder."""
    return f"{folder}/{_step(attempt)}"


def judged_file(run: str, iteration: int | None, stage: str, key: str, digest: str) -> str:
    """What an attempt that failed had judged, by the sha256 of its bytes.

    >>> judged_file("demo", 7, "reward", "c0ffee", "01234567")
    'runs/demo/iterations/000007/reward/c0ffee/judged/01234567.arrow'
    """
    return f"{attempt_folder(stage_folder(run, iteration, stage, key), JUDGED)}/{_step(digest)}.arrow"


def judged_digest(path: str, stage: str) -> str | None:
    """The digest in the path of such a file of that stage; None: it is another file.

    >>> judged_digest("runs/demo/iterations/000007/reward/c0ffee/judged/01234567.arrow", "reward")
    '01234567'
    """
    *_, its_stage, _, folder, name = path.split("/")
    return name.removesuffix(".arrow") if (its_stage, folder) == (stage, JUDGED) else None


def attempt_of(path: str) -> str | None:
    """The attempt folder that a file lies in; None: it lies elsewhere.

    >>> attempt_of("runs/demo/setup/dataset/c0ffee/a1/part-00000.arrow")
    'runs/demo/setup/dataset/c0ffee/a1'
    """
    match = _IN_ATTEMPT.fullmatch(path)
    return None if match is None else match[1]


def run_of(path: str) -> str | None:
    """The run that an object belongs to; None: to none.

    >>> run_of("runs/demo/run.json")
    'demo'
    """
    steps = path.split("/")
    return steps[1] if steps[0] == RUNS and len(steps) > 2 else None


def rounds_folder(model: str) -> str:
    """All that was decided about a registered model, and from what."""
    return f"{MODELS}/{_step(model)}/rounds"


def round_file(model: str, number: int, name: str) -> str:
    """A file of a round.

    >>> round_file("demo", 2, "plan.json")
    'models/demo/rounds/000002/plan.json'
    """
    return f"{rounds_folder(model)}/{number:06d}/{_step(name)}"


def round_of(path: str) -> int | None:
    """The number of the round that a file belongs to; None: to none.

    >>> round_of("models/demo/rounds/000002/plan.json"), round_of("models/demo/rounds/.DS_Store")
    (2, None)
    """
    number = path.split("/")[-2]
    return int(number) if number.isdigit() else None


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
    return f"{INDEX}/{_step(key)[:2]}/{key}.json"


def _step(name: str) -> str:
    if not name or "/" in name or name.startswith("."):
        raise ValueError(f"{name!r} can't be a step of a path: it must not be empty, hold '/' or start with '.'")
    return name
