"""Only the beginning of a run: prompts and the policy that it starts from."""

from prefect import flow

from flows.train import start
from grpo_lib.config import RunConfig
from grpo_lib.preflight import check_surroundings
from grpo_lib.run import open_run


@flow(name="warm-start")
def warm_start(config: RunConfig) -> dict[str, float | int | str]:
    """Makes the small model, or finds it made; `train` with the same settings goes on from it."""
    check_surroundings(config)
    run = open_run(config)
    _, initial = start(run)
    summary = run.stages.manifest(initial).summary
    numbers = {name: value for name, value in summary.items() if isinstance(value, int | float | str)}
    return numbers | {"folder": run.stages.folder(initial), "seconds": initial.seconds, "reused": initial.reused}
