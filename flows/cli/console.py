"""What people see: progress bars, tables, responses."""

import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from grpo_lib.config import RunConfig
from grpo_lib.progress import show_progress_on

if TYPE_CHECKING:
    from flows.report import RunReport

console = Console(highlight=False)
LOGGED_SECONDS = 15.0
"""Without a terminal: one line at most so often."""


class LiveProgress:
    """An iteration bar, and a line for the stage that runs with its rows a second."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._iterations: TaskID | None = None
        self._stage = bars.add_task("starting Prefect", total=None, rate="")
        self._started = time.monotonic()
        self.computed = 0
        self.reused = 0

    def stage_started(self, stage: str, iteration: int | None) -> None:
        self._started = time.monotonic()
        name = stage if iteration is None else f"{stage} {iteration}"
        self._bars.reset(self._stage, description=name, total=None, rate="")

    def stage_advanced(self, stage: str, iteration: int | None, done: int, total: int, tokens: int) -> None:
        if stage == "iteration":
            if self._iterations is None:
                self._iterations = self._bars.add_task("iterations", total=total, rate="")
            self._bars.update(self._iterations, completed=done, total=total)
            return
        seconds = max(1e-3, time.monotonic() - self._started)
        rate = f"{done / seconds:,.0f} rows/s" + (f", {tokens / seconds:,.0f} tokens/s" if tokens else "")
        self._bars.update(self._stage, completed=done, total=total, rate=rate)

    def stage_ended(
        self, stage: str, iteration: int | None, *, rows: int, tokens: int, seconds: float, reused: bool
    ) -> None:
        if reused:
            self.reused += 1
        else:
            self.computed += 1

    def note(self, text: str) -> None:
        self._bars.console.print(text, style="yellow")


class LoggedProgress:
    """Where there is no terminal: a line now and then."""

    def __init__(self) -> None:
        self._last = 0.0
        self._lock = threading.Lock()
        self.computed = 0
        self.reused = 0

    def stage_started(self, stage: str, iteration: int | None) -> None:
        pass

    def stage_advanced(self, stage: str, iteration: int | None, done: int, total: int, tokens: int) -> None:
        with self._lock:
            if time.monotonic() - self._last < LOGGED_SECONDS:
                return
            self._last = time.monotonic()
        place = "" if iteration is None else f" of iteration {iteration}"
        print(f"{stage}{place}: {done}/{total}", file=sys.stderr, flush=True)

    def stage_ended(
        self, stage: str, iteration: int | None, *, rows: int, tokens: int, seconds: float, reused: bool
    ) -> None:
        if reused:
            self.reused += 1
            return
        self.computed += 1
        if stage in ("warm_start", "evaluate", "checkpoint"):
            place = "" if iteration is None else f" {iteration}"
            print(f"{stage}{place}: {rows} rows in {seconds:.1f} s", file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


@contextmanager
def live_progress() -> Iterator[None]:
    """Shows progress while the body runs, and ends with what was computed and what reused."""
    began = time.monotonic()
    sink: LiveProgress | LoggedProgress
    if console.is_terminal:
        columns = (
            TextColumn("{task.description:<18}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[rate]}"),
        )
        with Progress(*columns, console=console, transient=True) as bars:
            sink = LiveProgress(bars)
            show_progress_on(sink)
            yield
    else:
        sink = LoggedProgress()
        show_progress_on(sink)
        yield
    seconds = time.monotonic() - began
    console.print(f"{sink.computed} stages computed, {sink.reused} reused, {seconds:.0f} s", style="dim")


def print_report(result: "RunReport", config: RunConfig) -> None:
    """Before and after, some responses, and where to look."""
    from grpo_lib.run import Run
    from grpo_lib.tracking.reports import telling_responses

    store = Run(config).store_option
    table = Table(title=f"{result.run}: held-out accuracy", title_justify="left")
    for name in ("", "before", f"after {result.iterations} iterations", "gain"):
        table.add_column(name, justify="left" if name == "" else "right")
    for each in result.accuracy:
        table.add_row(
            each.mode,
            f"{each.before:.3f} ± {each.before_se:.3f}",
            f"{each.after:.3f} ± {each.after_se:.3f}",
            f"{100 * (each.after - each.before):+.1f} points",
        )
    console.print(table)
    for label, response in telling_responses(Run(config)):
        print_response(label, response)
    if result.seconds_between_stages is not None:
        console.print(f"orchestration: {1000 * result.seconds_between_stages:.0f} ms an iteration outside stage bodies")
    console.print(f"curves:   {result.curve}")
    console.print(f"data:     {result.store}")
    console.print("next:")
    for line in (
        f"grpo show {result.run} {store}",
        f"grpo rollouts {result.run} -k {result.iterations - 1} --where 'value < 1' --limit 3 {store}",
        f"mlflow ui --backend-store-uri {result.mlflow_uri}",
    ):
        console.print(f"  {line}", soft_wrap=True)


def print_response(label: str, response: Mapping[str, Any]) -> None:
    """A prompt with its response."""
    text = Text()
    text.append(f"{label}\n", style="bold")
    text.append(f"  {response['prompt']}\n  ")
    text.append(str(response["text"]), style="green" if response.get("correct") else "red")
    console.print(text, soft_wrap=True)


def print_numbers(title: str, values: Mapping[str, Any]) -> None:
    """Names and values as a table."""
    table = Table(title=title, title_justify="left", show_header=False)
    for name, value in values.items():
        table.add_row(name, f"{value:.4f}" if isinstance(value, float) else str(value))
    console.print(table)
