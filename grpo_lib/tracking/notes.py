"""What a run's page in MLflow says: where its data is, and the commands to go on with it, change it, make it again."""

from grpo_lib.run import Run
from grpo_lib.storage.paths import run_file

CONFIG = "config.yaml"
"""The configuration, as a file of the MLflow run."""


def commands(run: Run, version: int | None = None) -> dict[str, str]:
    """By what they are for.

    Args:
        version: the policy that `export` is of; None: the last.
    """
    name, store = run.name, run.store_option
    of_version = "" if version is None else f" -k {version}"
    return {
        "resume": f"grpo resume {name} {store}",
        "show": f"grpo show {name} {store}",
        "rollouts": f"grpo rollouts {name} -k 0 {store}",
        "rerun": f"grpo rerun {name} -k 0 --from reward {store}",
        "export": f"grpo export {name} FOLDER{of_version} {store}",
        "reproduce": f"grpo run {CONFIG} " + ("store.uri=ANOTHER" if run.config.branch is None else "name=ANOTHER"),
    }


def note(run: Run) -> str:
    """In Markdown."""
    lines = commands(run)
    return f"""\
Data: `{run.place}` (configuration: `{run.objects.location(run_file(run.name))}`)

| to | command |
|---|---|
| go on with it | `{lines["resume"]}` |
| see its stages | `{lines["show"]}` |
| read rollouts | `{lines["rollouts"]}` |
| rerun a stage, in a branch | `{lines["rerun"]}` |
| get a policy as a model folder | `{lines["export"]}` |
| make it again, from nothing | `{lines["reproduce"]}` with `{CONFIG}` of this run's artifacts |
"""
