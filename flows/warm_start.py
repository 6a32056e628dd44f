"""Only the beginning of a run: prompts and the policy that it starts from."""

from prefect import flow

from flows.train import first_policy
from grpo_lib.config import RunConfig
from grpo_lib.placement.devices import use_threads
from grpo_lib.preflight import check_surroundings, data_digests
from grpo_lib.run import Run, open_run
from tasks.dataset import dataset


@flow(name="warm-start")
def warm_start(config: RunConfig) -> dict[str, float | int | str]:
    """Makes the small model, or finds it made; `train` with the same settings goes on from it."""
    check_surroundings(config)
    use_threads(config.placement.threads)
    data = dataset(Run(config), None, external=data_digests(config))
    run = open_run(config)
    initial = first_policy(run, data)
    summary = run.stages.manifest(initial).summary
    numbers = {name: value for name, value in summary.items() if isinstance(value, int | float | str)}
    return numbers | {"folder": run.stages.folder(initial), "seconds": initial.seconds, "reused": initial.reused}
