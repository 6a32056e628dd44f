"""From a run and a point in it to the configuration of a branch, and what a branch can't be."""

import hashlib
from collections.abc import Sequence
from difflib import get_close_matches

from grpo_lib.config import RunConfig
from grpo_lib.config_branch import FORKS, ORDER, BranchConfig
from grpo_lib.config_files import make_config
from grpo_lib.errors import ConfigError, NotFoundError
from grpo_lib.run import Run
from grpo_lib.storage.explain import Difference, setting_differences

FIXED = (
    "data.", "model.path", "model.start", "model.small.", "model.prompt_format", "model.system_prompt", "warm_start",
    "reference.path", "rollout.max_prompt_tokens", "rollout.long_prompts",
)  # fmt: skip
"""Read once, before the first iteration: a branch that changed one would be no branch of this run."""
FREE = ("data.extraction",)
"""Of those, what rewards read as well."""
PLACES = ("name", "store", "branch")
"""Say where a run is."""


def branch_config(
    base: Run, iteration: int, stage: str, overrides: Sequence[str] = (), name: str | None = None
) -> RunConfig:
    """The configuration of a run that shares with ``base`` everything before ``stage`` of ``iteration``.

    Raises:
        ConfigError: the point or the changed settings can't be those of a branch; naming value, bound and remedy.
    """
    given = [override.partition("=")[0].strip() for override in overrides]
    for key in given:
        if key.split(".")[0] in PLACES:
            raise ConfigError(f"{key} can't be set for a branch: it lies beside its base; --name gives it a name")
    before = base.config.model_dump(mode="json")
    point = {"run": base.name, "iteration": iteration, "stage": stage}
    chosen = name or default_name(base.name, iteration, stage, overrides)
    config = make_config(before | {"name": chosen, "branch": point}, tuple(overrides), origin=f"branch of {base.name}")
    assert config.branch is not None
    if base.shares(stage, iteration):
        owner = base.at(stage, iteration)
        raise ConfigError(
            f"{stage} of iteration {iteration} of {base.name!r} is that of {owner.name!r}, which it branched off at "
            f"{_point(base.config.branch)}; make a branch of {owner.name!r}"
        )
    last = iteration - (stage == "evaluate")
    if config.iterations <= last:
        raise ConfigError(
            f"iterations={config.iterations} leaves a branch at iteration {iteration} nothing to do; set iterations to "
            f"at least {last + 1}"
        )
    _check_settings(base.config, config, config.branch)
    return config


def check_point(base: Run, iteration: int, stage: str) -> None:
    """There is such a stage, and the run has come so far.

    Raises:
        ConfigError, NotFoundError: naming what there is.
    """
    _check_stage(stage)
    last = last_iteration(base)
    if iteration > last + (stage == "evaluate"):
        raise NotFoundError(f"iteration {iteration}: run {base.name!r} has iterations 0 to {last}")


def last_iteration(run: Run) -> int:
    """The last that has begun; of a branch at least that of its fork.

    Raises:
        NotFoundError: none has.
    """
    sound, _ = run.stages.survey()  # one that is damaged must not keep anybody from branching off
    begun = [each.iteration for each in sound if each.stage == "prompts" and each.iteration is not None]
    if run.config.branch is not None:
        begun.append(run.config.branch.iteration)
    if not begun:
        raise NotFoundError(f"run {run.name!r} has no iteration yet; `grpo resume {run.name}` goes on with it")
    return max(begun)


def default_name(base: str, iteration: int, stage: str, overrides: Sequence[str]) -> str:
    """The same for the same branch, so that making it again goes on with it.

    >>> default_name("demo", 7, "reward", [])
    'demo-7-reward'
    >>> default_name("demo", 7, "reward", ["reward.correct=2"])
    'demo-7-reward-581c'
    """
    digest = hashlib.sha256("\n".join(sorted(overrides)).encode()).hexdigest()[:4]
    return f"{base}-{iteration}-{stage}" + (f"-{digest}" if overrides else "")


def branch_differences(base: RunConfig, branch: RunConfig) -> list[Difference]:
    """The settings in which a branch differs from its base."""
    values = [{k: v for k, v in each.model_dump(mode="json").items() if k not in PLACES} for each in (base, branch)]
    return setting_differences(*values)


def check_structure(base: Run, branch: Run) -> None:
    """The stages that the branch's algorithm asks for are the base's where they come before the fork.

    Raises:
        ConfigError: naming the point from which it can be had.
    """
    from grpo_lib.recipe import extra_stages

    point = branch.config.branch
    assert point is not None
    old, new = (extra_stages(each.config.algorithm) for each in (base, branch))
    k = point.iteration
    stages = {"sum_squared_probs": "old_logprobs", "exact_kl": "update"}
    early = sorted({stages.get(each, each) for each in new - old}, key=ORDER.index)
    missing = [each for each in early if branch.shares(each, k)]
    if missing:
        raise ConfigError(
            f"with these settings iteration {k} needs {', '.join(missing)}, which {base.name!r} did not make before "
            f"{point.stage}; branch off there: --from {missing[0]}"
        )
    if point.stage == "update" and old != new:
        changed = ", ".join(sorted(old ^ new))
        raise ConfigError(f"with these settings advantages are made of other data ({changed}); take --from advantage")


def _check_stage(stage: str) -> None:
    if stage in FORKS:
        return
    listing = f"a branch begins with one of {', '.join(FORKS)}"
    if stage in ORDER[: ORDER.index("prompts")]:
        raise ConfigError(f"{stage} is made before the first iteration: start a new run instead; {listing}")
    if stage in ORDER:
        raise ConfigError(f"nothing of the training follows from {stage}; {listing}")
    close = get_close_matches(stage, FORKS, n=1)
    raise ConfigError(f"there is no stage {stage!r}" + (f"; did you mean {close[0]}?" if close else f"; {listing}"))


def _check_settings(base: RunConfig, config: RunConfig, point: BranchConfig) -> None:
    """No setting changes that only earlier data could follow."""
    changed = [each.name for each in branch_differences(base, config)]
    for name in changed:
        if name.startswith(FIXED) and name not in FREE:
            raise ConfigError(
                f"{name} shapes what is made before the first iteration, which a branch shares; start a new run"
            )
    if base.pipeline.max_staleness != config.pipeline.max_staleness:
        raise ConfigError(
            "pipeline.max_staleness says which policy draws which rollouts, from the first iteration on; it can't "
            "change in a branch, start a new run"
        )
    if "rollout.shards" in changed and point.shares("rollout", point.iteration):
        raise ConfigError(
            f"rollout.shards numbers rollouts that are shared; leave it at {base.rollout.shards}, or go --from rollout"
        )
    if "rollout.temperature" in changed and point.shares("rollout", point.iteration):
        raise ConfigError(
            f"rollout.temperature={config.rollout.temperature:g}: the rollouts of iteration {point.iteration} that the "
            f"branch would learn from were drawn at {base.rollout.temperature:g}; take --from rollout"
        )
    if "rollout.samples" in changed and base.rollout.partial is not None and config.rollout.partial is not None:
        raise ConfigError("rollout.samples can't change while unfinished rollouts go on (rollout.partial)")
    learned = point.iteration > 0 or point.shares("update", 0)
    if learned and any(name.startswith("trainer.lora") for name in changed):
        raise ConfigError("trainer.lora: the policy at the fork has adapters as they were, or none; start a new run")
    if learned and base.critic is None and config.critic is not None:
        raise ConfigError("critic: the run has none at the fork; start a new run with it")


def _point(branch: BranchConfig | None) -> str:
    assert branch is not None
    return f"{branch.stage} of iteration {branch.iteration}"
