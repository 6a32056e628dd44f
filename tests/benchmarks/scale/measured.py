"""A finished run of this project as `check` wants it."""

import pyarrow.compute as pc

from grpo_lib.config import StoreConfig
from grpo_lib.models import run_tokenizer
from grpo_lib.problems import get_problem
from grpo_lib.run import Run, load_run
from tests.benchmarks.scale.check import MeasuredRun
from tests.benchmarks.scale.model import Model


def measured_run(store: str, name: str) -> MeasuredRun:
    """Its sizes come from its configuration, its prompts' length from the prompts of one iteration.

    Raises:
        NotFoundError: naming the runs that are there.
        ValueError: it did not start from a small model, or generated ahead.
    """
    run = load_run(StoreConfig(uri=store), name)
    config = run.config
    if config.model.path is not None or config.pipeline.max_staleness:
        raise ValueError(f"run {name!r}: only runs of small models without overlap are checked")
    manifests = run.manifests()
    prompts = [each.to_ref(reused=True) for each in manifests if each.stage == "prompts"][-1]
    lengths = pc.list_value_length(run.stages.table(prompts, ["prompt_ids"]).column("prompt_ids"))
    return MeasuredRun(
        name=name,
        model=small_model(run),
        prompt_tokens=float(pc.mean(lengths).as_py()),
        group=config.rollout.samples,
        batch_rows=config.rollout.max_batch_rows,
        manifests=[each for each in manifests if each.adopted_from is None],
    )


def small_model(run: Run) -> Model:
    small = run.config.model.small
    return Model(
        name=run.name,
        layers=small.layers,
        hidden=small.hidden_size,
        heads=small.heads,
        kv_heads=small.kv_heads,
        head_dim=small.head_dim,
        mlp=small.mlp_size,
        vocabulary=len(run_tokenizer(None, get_problem(run.config.data.problem))),
        tied=True,
    )
