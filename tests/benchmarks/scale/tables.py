"""Results as Markdown."""

from collections.abc import Sequence

from tests.benchmarks.scale.check import Error
from tests.benchmarks.scale.published import Comparison, steps, typical_ratio
from tests.benchmarks.scale.scenarios import Prediction, Sensitivity


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, each))} |" for each in lines)


def placement_text(prediction: Prediction) -> str:
    if prediction.best is None:
        return "does not fit"
    placed = prediction.best.placement
    split = "all both" if placed.colocated else f"{placed.rollout_gpus} + {placed.train_gpus}"
    return f"{split}, TP {placed.tensor_parallel}"


def predictions(found: Sequence[Prediction], scenario: str) -> str:
    """A row a model and number of GPUs: without and with overlap."""
    mine = [each for each in found if each.scenario == scenario]
    degrees = sorted({each.max_staleness for each in mine})
    cells: dict[tuple[str, int], list[str]] = {}
    for each in mine:
        cells.setdefault((each.model, each.gpus), []).extend((_seconds(each), placement_text(each)))
    header = [name for each in degrees for name in (f"max_staleness {each} (s)", "rollout + train GPUs")]
    return table(("model", "GPUs", *header), [(*sizes, *values) for sizes, values in cells.items()])


def _seconds(prediction: Prediction) -> str:
    return "-" if prediction.best is None else f"{prediction.best.iteration.seconds:.0f}"


def stages(found: Sequence[Prediction], scenario: str, max_staleness: int) -> str:
    """Seconds a stage."""
    mine = [
        each
        for each in found
        if each.scenario == scenario and each.max_staleness == max_staleness and each.best is not None
    ]
    names = list(mine[0].best.iteration.stages) if mine and mine[0].best else []
    rows = [
        (each.model, each.gpus, *(f"{each.best.iteration.stages[name]:.1f}" for name in names))
        for each in mine
        if each.best is not None
    ]
    return table(("model", "GPUs", *names), rows)


def comparisons(found: Sequence[Comparison]) -> str:
    rows = [
        (
            each.system,
            each.name,
            each.gpus,
            f"{each.mean_tokens:,.0f}",
            each.what,
            f"{each.published:.0f}",
            f"{each.simulated:.0f}",
            ("at most " if each.upper_end else "") + f"{each.ratio:.2f}",
        )
        for each in found
    ]
    counted = steps(found)
    mean, spread = typical_ratio(counted)
    worst = max(abs(each.ratio - 1) for each in counted)
    return (
        table(("system", "run", "GPUs", "mean response", "of", "published (s)", "simulated (s)", "ratio"), rows)
        + f"\n\nSteps without an upper end: {len(counted)} figures, geometric mean of the ratios {mean:.2f}, one "
        f"standard deviation a factor {spread:.2f}, largest error {worst:.0%}."
    )


def sensitivity(found: Sequence[Sensitivity]) -> str:
    rows = [
        (each.model, each.gpus, each.what, f"{each.low / each.base - 1:+.0%}", f"{each.high / each.base - 1:+.0%}")
        for each in found
    ]
    return table(("model", "GPUs", "assumption, from one end of its range to the other", "first", "second"), rows)


def errors(found: Sequence[Error]) -> str:
    rows = [
        (each.run, each.stage, f"{1000 * each.measured:.1f}", f"{1000 * each.predicted:.1f}", f"{each.relative:+.0%}")
        for each in found
    ]
    return table(("run, predicted from the others", "stage", "measured (ms)", "predicted (ms)", "error"), rows)
