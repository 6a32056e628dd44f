"""Runs side by side as tables of text, as a picture, and as one HTML page that needs nothing else."""

import base64
import io
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from grpo_lib.tracking.compare import MODES, WINDOW, Comparison, Measured

STYLE = """
body { font-family: sans-serif; margin: 2em; color: #222; }
table { border-collapse: collapse; margin-bottom: 1.5em; }
th, td { text-align: left; padding: 0.25em 1em 0.25em 0; border-bottom: 1px solid #ddd; }
td { font-variant-numeric: tabular-nums; }
img { max-width: 100%; }
"""


def table_of(comparison: Comparison) -> dict[str, Mapping[str, Sequence[str]]]:
    """What people read: section to row to one text a run."""
    runs = comparison.runs
    results: dict[str, list[str]] = {"iterations": [f"{each.iterations} of {each.asked}" for each in runs]}
    for mode in MODES:
        if any(mode in each.final for each in runs):
            results[f"final accuracy, {mode}"] = [as_text(each.final.get(mode)) for each in runs]
            results[f"best accuracy, {mode}"] = [_best(each.best.get(mode)) for each in runs]
    results |= {
        f"reward, last {WINDOW}": [as_text(each.reward) for each in runs],
        f"response length, last {WINDOW}": [as_text(each.length, 1) for each in runs],
        "rollout tokens": [f"{each.tokens:,}" for each in runs],
        "rollout tokens/s": [
            "" if each.tokens_per_second is None else f"{each.tokens_per_second:,.0f}" for each in runs
        ],
        "seconds an iteration": [
            "" if each.seconds_per_iteration is None else f"{each.seconds_per_iteration:.2f}" for each in runs
        ],
    }
    stages = list(dict.fromkeys(stage for each in runs for stage in each.seconds))
    seconds = {
        stage: [f"{each.seconds[stage]:.1f}" if stage in each.seconds else "" for each in runs] for stage in stages
    }
    settings = {name: [_setting(value) for value in values] for name, values in comparison.settings.items()}
    return {"settings that differ": settings, "results": results, "seconds by stage": seconds}


def picture(comparison: Comparison) -> bytes:
    """The curves of all runs over one another, as PNG; a curve that no run has is left out."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    titles = list(dict.fromkeys(title for each in comparison.runs for title in each.curves))
    rows = max(1, -(-len(titles) // 2))
    figure, grid = plt.subplots(rows, 2, figsize=(11, 3.4 * rows), layout="constrained", squeeze=False)
    axes = list(grid.flat)
    for axis, title in zip(axes, titles, strict=False):
        for run in comparison.runs:
            line = run.curves.get(title)
            if line is None:
                continue
            if line.errors:
                axis.errorbar(line.iterations, line.values, yerr=line.errors, marker="o", capsize=3, label=run.run)
            else:
                axis.plot(line.iterations, line.values, linewidth=1, label=run.run)
        axis.set(title=title, xlabel="iteration")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    for axis in axes[len(titles) :]:
        axis.axis("off")
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=110, format="png")
    plt.close(figure)
    return drawn.getvalue()


def page(comparison: Comparison) -> str:
    """HTML with the tables and the picture in it."""
    names = [each.run for each in comparison.runs]
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    parts = []
    for section, rows in table_of(comparison).items():
        if not rows:
            continue
        lines = "".join(
            f"<tr><th>{escape(name)}</th>{''.join(f'<td>{escape(text)}</td>' for text in texts)}</tr>\n"
            for name, texts in rows.items()
        )
        parts.append(f"<h2>{escape(section)}</h2>\n<table><tr><th></th>{head}</tr>\n{lines}</table>\n")
    places = "".join(f"<li>{escape(each.run)}: <code>{escape(each.place)}</code></li>" for each in comparison.runs)
    drawn = base64.b64encode(picture(comparison)).decode()
    title = escape(" · ".join(names))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
        f'</head>\n<body><h1>{title}</h1>\n<p><img alt="curves" src="data:image/png;base64,{drawn}"></p>\n'
        f"{''.join(parts)}<ul>{places}</ul>\n</body></html>\n"
    )


def as_text(measured: Measured | None, digits: int = 3) -> str:
    """For people.

    >>> as_text(Measured(value=0.5, error=0.0125, iteration=3)), as_text(None)
    ('0.500 ± 0.013', '')
    """
    if measured is None:
        return ""
    error = f" ± {measured.error:.{digits}f}" if measured.error else ""
    return f"{measured.value:.{digits}f}{error}"


def _best(measured: Measured | None) -> str:
    return "" if measured is None else f"{as_text(measured)} at {measured.iteration}"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def _setting(value: Any) -> str:
    return "-" if value is None else str(value)
