"""Held-out accuracy of a policy of a run, with other evaluation settings if wanted."""

from prefect import flow

from flows.train import start
from grpo_lib.config import RunConfig
from grpo_lib.errors import NotFoundError
from grpo_lib.run import Run
from grpo_lib.storage.manifests import latest
from grpo_lib.storage.stages import ArtifactRef
from tasks.evaluate import evaluate as evaluate_policy


@flow(name="evaluate")
def evaluate(config: RunConfig, version: int | None = None) -> dict[str, float]:
    """Evaluates policy ``version`` (updates done; default the last) of the run that ``config`` names."""
    run = Run(config)
    data, initial = start(run)
    policy = initial if version == 0 else policy_of(run, version, initial)
    updates = run.stages.manifest(policy).summary["policy_version"]
    result = evaluate_policy(run, int(str(updates)), data, policy)
    summary = run.stages.manifest(result).summary
    return {name: float(value) for name, value in summary.items() if isinstance(value, int | float)}


def policy_of(run: Run, version: int | None, initial: ArtifactRef) -> ArtifactRef:
    """The policy after ``version`` updates, or the last one."""
    updates = latest(run.stages.manifests(), "update")
    if version is None:
        return updates[-1].to_ref(reused=True) if updates else initial
    found = [each for each in updates if each.summary["policy_version"] == version]
    if not found:
        raise NotFoundError(f"run {run.name!r} has policies 0..{len(updates)}, there is no version {version}")
    return found[0].to_ref(reused=True)
