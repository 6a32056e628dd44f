"""One line a stage in the logs of the Prefect flow run: what it did."""

from prefect import get_run_logger
from prefect.context import FlowRunContext, TaskRunContext

from grpo_lib.storage.manifests import ArtifactRef


def log_stage(ref: ArtifactRef) -> None:
    """Where a flow runs; else there are no such logs."""
    if TaskRunContext.get() is not None or FlowRunContext.get() is not None:
        get_run_logger().info(stage_line(ref))


def stage_line(ref: ArtifactRef) -> str:
    """For people.

    >>> from types import SimpleNamespace
    >>> ref = SimpleNamespace(stage="rollout", iteration=7, shard=1, rows=64, tokens=4096, seconds=2.0, reused=False)
    >>> stage_line(ref)
    'rollout.1 of iteration 7: computed in 2.00 s, 64 rows, 4,096 tokens (2,048 tokens/s)'
    >>> ref.reused, ref.tokens, ref.iteration, ref.shard = True, 0, None, 0
    >>> stage_line(ref)
    'rollout: reused, 64 rows (computed in 2.00 s)'
    """
    name = ref.stage + (f".{ref.shard}" if ref.shard else "")
    place = "" if ref.iteration is None else f" of iteration {ref.iteration}"
    amounts = f", {ref.rows:,} rows" + (f", {ref.tokens:,} tokens" if ref.tokens else "")
    if ref.reused:
        return f"{name}{place}: reused{amounts} (computed in {ref.seconds:.2f} s)"
    rate = f" ({ref.tokens / ref.seconds:,.0f} tokens/s)" if ref.tokens and ref.seconds > 0 else ""
    return f"{name}{place}: computed in {ref.seconds:.2f} s{amounts}{rate}"
