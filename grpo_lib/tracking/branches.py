"""A run and its branches side by side, from their manifests."""

from collections.abc import Sequence
from dataclasses import dataclass

from grpo_lib.branches import branch_differences
from grpo_lib.run import Run, load_run, run_names, stored_values
from grpo_lib.tracking.reports import curve

CURVES = {
    "sampled accuracy": ("evaluate", "sampled_accuracy"),
    "greedy accuracy": ("evaluate", "greedy_accuracy"),
    "reward": ("reward", "mean"),
}


@dataclass(frozen=True, kw_only=True)
class Side:
    """One run of a family."""

    run: str
    base: str | None
    """What it branched off; None: it is the first of the family."""
    iteration: int | None
    stage: str | None
    """The first that is its own."""
    settings: list[str]
    """In which it differs from its base."""
    iterations: int
    """Done."""
    shared: int
    """Artifacts that are its base's."""
    equal: int
    """Artifacts after the fork that came out the same, and were taken over."""
    own: int
    """Artifacts that it computed."""
    curves: dict[str, dict[int, float]]


def family(run: Run) -> list[Run]:
    """The run that all branched off, and every branch of it, in the order of the tree."""
    root = run.lineage[-1]
    bases = {}
    for name in run_names(root.objects):
        branch = stored_values(root.objects, name).get("branch")
        bases[name] = None if branch is None else branch["run"]
    found = [root.name]
    for name in found:  # grows on the way
        place = found.index(name) + 1
        found[place:place] = [each for each, base in bases.items() if base == name]
    return [load_run(root.config.store, name) for name in found]


def side_by_side(run: Run) -> list[Side]:
    """Every run of the family."""
    return [_side(each) for each in family(run)]


def common(sides: Sequence[Side], name: str) -> list[int]:
    """Iterations at which every side that trains has the curve ``name``, if it has any of it."""
    there = [set(side.curves[name]) for side in sides if side.iterations and side.curves[name]]
    return sorted(set.intersection(*there)) if there else []


def _side(run: Run) -> Side:
    branch, manifests = run.config.branch, [each for each in run.manifests() if each.stage != "publish"]
    own = [each for each in manifests if each.adopted_from is None]
    shared = [each for each in manifests if run.shares(each.stage, each.iteration, each.shard) and each not in own]
    found = {name: curve(manifests, *where) for name, where in CURVES.items()}
    updates, _ = curve(manifests, "update", "policy_version")
    settings = [str(each) for base in run.lineage[1:2] for each in branch_differences(base.config, run.config)]
    return Side(
        run=run.name,
        base=None if branch is None else branch.run,
        iteration=None if branch is None else branch.iteration,
        stage=None if branch is None else branch.stage,
        settings=settings,
        iterations=len(updates),
        shared=len(shared),
        equal=0 if branch is None else len(manifests) - len(own) - len(shared),
        own=len(own),
        curves={name: dict(zip(*points, strict=True)) for name, points in found.items()},
    )
