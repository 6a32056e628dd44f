"""Held-out accuracy of a policy of a run, with other evaluation settings if wanted."""

from typing import Annotated

from prefect import flow
from pydantic import Field

from flows.batches import evaluation
from grpo_lib.config import RunConfig, StoreConfig
from grpo_lib.config_base import RunName
from grpo_lib.errors import ConfigError, NotFoundError
from grpo_lib.placement.clusters import attach, stop_clusters
from grpo_lib.placement.devices import use_threads
from grpo_lib.placement.local import end_processes
from grpo_lib.preflight import check_agent, data_digests
from grpo_lib.run import Run, load_run
from grpo_lib.storage.manifests import FIRST_POLICIES, Manifest, latest
from tasks.dataset import dataset


def flow_run_name() -> str:
    from prefect.runtime import flow_run

    values = flow_run.get_parameters()
    return f"evaluate {values['run']} {'last' if values['version'] is None else values['version']}"


@flow(name="evaluate", flow_run_name=flow_run_name)
def evaluate(
    run: RunName,
    version: Annotated[int, Field(ge=0)] | None = None,
    settings: list[str] | None = None,
    store: StoreConfig = StoreConfig(),
) -> dict[str, float]:
    """Held-out accuracy of a policy of a run.

    Args:
        run: Name of the run.
        version: Policy after so many updates; left out, the last.
        settings: Settings of the evaluation that differ from the run's, as key=value, e.g. evaluation.samples=8.
        store: The store that holds the run.
    """
    config = load_run(store, run, settings or []).config
    try:
        return run_evaluation(config, version)
    except BaseException as error:
        if not isinstance(error, Exception):
            stop_clusters()
        raise
    finally:
        end_processes()


def run_evaluation(config: RunConfig, version: int | None) -> dict[str, float]:
    """Of one policy."""
    run = Run(config)
    check_agent(config)
    use_threads(config.placement.threads)
    attach(config)
    policy = policy_of(run, version)
    made = policy_version(policy)
    if run.shares("evaluate", made):
        owner = run.at("evaluate", made).name
        raise ConfigError(
            f"policy {made} of branch {run.name!r} is run {owner!r}'s; `grpo evaluate {owner} -k {made}` judges it"
        )
    data = dataset(run, None, external=data_digests(config))
    result = evaluation(run, policy_version(policy), data, policy.to_ref(reused=True))
    summary = run.stages.manifest(result).summary
    return {name: float(value) for name, value in summary.items() if isinstance(value, int | float)}


def policy_of(run: Run, version: int | None) -> Manifest:
    """The policy after ``version`` updates, or the last one.

    Raises:
        NotFoundError: there is none.
    """
    manifests = run.stages.manifests()
    policies = [policy for stage in (*FIRST_POLICIES, "update") for policy in latest(manifests, stage)]
    if not policies:
        raise NotFoundError(f"run {run.name!r} has no policy yet; `grpo resume {run.name}` goes on with it")
    if version is None:
        return policies[-1]
    found = [each for each in policies if policy_version(each) == version]
    if not found:
        last = policy_version(policies[-1])
        raise NotFoundError(f"run {run.name!r} has policies 0..{last}, there is no version {version}")
    return found[0]


def policy_version(policy: Manifest) -> int:
    return int(str(policy.summary["policy_version"]))
