"""Progress of long work, for whoever wants to show it: the command line shows bars, a server writes log lines."""

import sys
from typing import Protocol


class ProgressSink(Protocol):
    """Receives progress; called from several threads."""

    def stage_started(self, stage: str, iteration: int | None) -> None: ...

    def stage_advanced(self, stage: str, iteration: int | None, done: int, total: int, tokens: int) -> None:
        """``done`` of ``total`` rows (or steps); ``tokens`` so far, 0 where tokens mean nothing."""
        ...

    def stage_ended(
        self, stage: str, iteration: int | None, *, rows: int, tokens: int, seconds: float, reused: bool
    ) -> None: ...

    def note(self, text: str) -> None:
        """One line for people."""
        ...


class Silent:
    """Shows nothing."""

    def stage_started(self, stage: str, iteration: int | None) -> None: ...

    def stage_advanced(self, stage: str, iteration: int | None, done: int, total: int, tokens: int) -> None: ...

    def stage_ended(
        self, stage: str, iteration: int | None, *, rows: int, tokens: int, seconds: float, reused: bool
    ) -> None: ...

    def note(self, text: str) -> None: ...


class Notes(Silent):
    """Shows notes only, on stderr."""

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


_sink: ProgressSink = Silent()


def show_progress_on(sink: ProgressSink) -> None:
    """Sends all progress of this process to ``sink``."""
    global _sink
    _sink = sink


def progress() -> ProgressSink:
    return _sink
