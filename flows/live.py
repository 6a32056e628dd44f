"""The run's page in Prefect while it goes on: progress, a table of iterations, curves, rollouts.

A thread of its own writes them, at most every ``tracking.page_seconds``, from what `publish` committed: the run waits
for none of it, and goes on when Prefect can't be reached. Each artifact is made once a flow run and brought up to date.
"""

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import Any
from uuid import UUID

from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.client.orchestration import get_client
from prefect.logging import get_logger, get_run_logger
from prefect.runtime import flow_run
from prefect.utilities.urls import url_for

from flows.cli.server import EMBEDDED
from flows.report import artifact_key
from grpo_lib.data.queries import telling_rollouts
from grpo_lib.errors import NotFoundError
from grpo_lib.patience import impatient
from grpo_lib.run import Run
from grpo_lib.tracking.history import History
from grpo_lib.tracking.mlflow import tracker_for
from grpo_lib.tracking.pages import curves_page, links_page, rollouts_page
from tasks.futures import StageFuture

ROWS = 10
"""Iterations in the table."""
SHARE = 50
"""One part in so many of the time is spent on the page, at most;"""
LONGEST_PAUSE = 120.0
"""but no pause is longer, in seconds."""
LAST_SECONDS = 20.0
"""So long the end of a run waits for the last update of its page."""

_page: ContextVar["RunPage | None"] = ContextVar("page", default=None)


@contextmanager
def live_page(run: Run) -> Iterator[None]:
    """Keeps the run's page up to date while the block runs, and brings it to its last state."""
    page = RunPage(run)
    token = _page.set(page)
    page.start()
    waits = True
    try:
        yield
    except BaseException as error:
        waits = isinstance(error, Exception)
        raise
    finally:
        _page.reset(token)
        page.close(wait=waits)
        tracker_for(run).end_of_measuring()


def show_on_page(published: StageFuture) -> StageFuture:
    """Has the page show these metrics when they are published; there may be no page."""
    page = _page.get()
    if page is not None:
        page.follow(published)
    return published


class RunPage:
    """Prefect's artifacts of one run of the flow."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._history = History()
        self._followed: list[StageFuture] = []
        self._artifacts: dict[str, UUID] = {}
        self._shown: dict[str, str] = {}
        self._links = {"store": run.place}
        self._ends = threading.Event()
        self._complained = False
        self._began = time.monotonic()
        self._began_at = 0
        self._thread = threading.Thread(target=copy_context().run, args=(self._keep_up,), name="page", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def follow(self, published: StageFuture) -> None:
        self._followed.append(published)

    def close(self, wait: bool) -> None:
        """Ends with an update, for which it waits if there is time."""
        self._ends.set()
        if wait:
            self._thread.join(LAST_SECONDS)

    def _keep_up(self) -> None:
        ends = False
        while not ends:
            ends, began = self._ends.is_set(), time.monotonic()
            try:
                with impatient():
                    self.update()
            except Exception as error:  # no page is worth a run
                self._complain(error)
            spent = time.monotonic() - began
            pause = max(self._run.config.tracking.page_seconds, min(SHARE * spent, LONGEST_PAUSE))
            if not ends:
                self._ends.wait(pause)

    def _complain(self, error: Exception) -> None:
        if self._complained:
            return
        self._complained = True
        try:
            logger: Any = get_run_logger()
        except Exception:
            logger = get_logger("page")
        logger.warning("The run's page can't be brought up to date, and the run goes on: %s", str(error)[:500])

    def update(self) -> None:
        """Reads what was published since the last time, and shows it."""
        new = self._read()
        done, total = self._history.done, self._run.config.iterations
        if not self._artifacts:
            self._began_at = done
        self._show_progress(100.0 * min(1.0, done / total), self._state(done, total))
        if not new:
            return
        if "MLflow" not in self._links:
            self._link()
        name = self._run.name
        if done:
            self._show("iterations", "table", self._history.rows(ROWS), f"Last iterations of {name}")
        curves = f"{curves_page(self._history, name)}\n\n{links_page(self._links)}"
        self._show("curves", "markdown", curves, f"Curves of {name}")
        try:
            samples = telling_rollouts(self._run.stages, max(0, done - 1))
        except NotFoundError:
            return  # the first iteration has not come so far
        if samples:
            self._show("rollouts", "markdown", rollouts_page(samples, max(0, done - 1)), f"Rollouts of {name}")

    def _read(self) -> bool:
        """Takes in what is published by now; whether there was anything."""
        ready = [each for each in list(self._followed) if each.done]
        for each in ready:
            self._followed.remove(each)
            try:
                ref = each.result()
            except Exception:
                continue  # the run stops because of it, and says so
            self._history.add(self._run.stages.table(ref).to_pylist())
        return bool(ready)

    def _state(self, done: int, total: int) -> str:
        parts = [f"{self._run.name}: {done} of {total} iterations"]
        accuracy = self._history.curve("evaluate/sampled_accuracy", "evaluate/greedy_accuracy")
        if accuracy:
            parts.append(f"held-out accuracy {accuracy[0][1]:.3f} → {accuracy[-1][1]:.3f}")
        computed = done - self._began_at
        if computed > 0 and done < total:
            seconds = (time.monotonic() - self._began) / computed * (total - done)
            parts.append(f"about {_duration(seconds)} left")
        return ", ".join(parts)

    def _link(self) -> None:
        """From Prefect to MLflow, and back."""
        tracker = tracker_for(self._run)
        self._links["MLflow"] = tracker.page() or f"mlflow ui --backend-store-uri {tracker.uri}"
        tracker.set_tag("grpo.prefect_flow_run", str(flow_run.get_id()))
        address = None if os.environ.get(EMBEDDED) else url_for("flow-run", flow_run.get_id())
        if address is not None:
            tracker.set_tag("grpo.prefect", address)

    def _show_progress(self, percent: float, state: str) -> None:
        if self._shown.get("progress") == state:
            return
        if "progress" not in self._artifacts:
            key = artifact_key(self._run.name, "progress")
            self._artifacts["progress"] = create_progress_artifact(percent, key, state)  # type: ignore[assignment]
        else:
            update_progress_artifact(self._artifacts["progress"], percent, state)
        self._shown["progress"] = state

    def _show(self, name: str, kind: str, content: Any, description: str) -> None:
        text = content if kind == "markdown" else json.dumps(content)
        if self._shown.get(name) == text:
            return
        if name not in self._artifacts:
            key = artifact_key(self._run.name, name)
            create: Any = create_markdown_artifact if kind == "markdown" else create_table_artifact
            self._artifacts[name] = create(content, key=key, description=description)
        else:  # `update_artifact` would send it all a second time, as an event that Prefect keeps
            place = {"id": self._artifacts[name]}
            get_client(sync_client=True).request("PATCH", "/artifacts/{id}", json={"data": text}, path_params=place)
        self._shown[name] = text


def _duration(seconds: float) -> str:
    """For people.

    >>> [_duration(each) for each in (50, 200, 9000)]
    ['1 min', '3 min', '2.5 h']
    """
    return f"{max(1, round(seconds / 60))} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
