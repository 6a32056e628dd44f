"""A sweep in MLflow: one run, whose children are the sweep's training runs."""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from grpo_lib.config import RunConfig
from grpo_lib.storage.claims import user_name
from grpo_lib.sweeps import SweepConfig
from grpo_lib.tracking.mlflow import SWEEP, MlflowServer, mlflow_call


class SweepTracker(MlflowServer):
    """The MLflow run of a sweep, made at first use and found again afterwards.

    Raises:
        TrackingError: from every method, when MLflow refuses, or TrackingDownError when it can't be reached.
    """

    def __init__(self, config: RunConfig, sweep: SweepConfig, place: str) -> None:
        super().__init__(config)
        self._sweep, self._place = sweep, place

    @cached_property
    def run_id(self) -> str:
        """Of the sweep's run."""
        tags = {SWEEP: self._sweep.name, "grpo.place": self._place}
        found = self._runs_with(tags)
        if found:
            return found[0].info.run_id
        shown = {"mlflow.user": user_name(), "mlflow.source.name": "grpo", "mlflow.note.content": self._note()}
        return self._client.create_run(self.experiment_id, tags=tags | shown, run_name=self._sweep.name).info.run_id

    @mlflow_call
    def begin(self) -> str:
        """The run is there, with what was asked for as its parameters; returns its id."""
        from mlflow.entities import Param

        asked = self._sweep.model_dump(mode="json")
        flat = {f"sweep.{name}": value for name, value in asked.items() if name not in ("grid", "random")}
        flat |= {f"sweep.{kind}.{key}": value for kind in ("grid", "random") for key, value in asked[kind].items()}
        values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in flat.items()}
        self._client.update_run(self.run_id, status="RUNNING")
        self._client.log_batch(self.run_id, params=[Param(key, value[:6000]) for key, value in values.items()])
        return self.run_id

    @mlflow_call
    def end(self, rows: Sequence[Mapping[str, Any]], best: str | None, value: float | None, status: str) -> None:
        """What came of it: a table of all runs, and the best one."""
        columns = list(dict.fromkeys(name for row in rows for name in row))
        table = {"columns": columns, "data": [[row.get(name) for name in columns] for row in rows]}
        self._client.log_text(self.run_id, json.dumps(table), "runs.json")
        listed = json.dumps([{"path": "runs.json", "type": "table"}])
        self._client.set_tag(self.run_id, "mlflow.loggedArtifacts", listed)
        if best is not None:
            self._client.set_tag(self.run_id, "grpo.best", best)
        if value is not None:
            self._client.log_metric(self.run_id, f"best/{self._sweep.metric}", value)
        self._client.set_terminated(self.run_id, status)

    def _note(self) -> str:
        return (
            f"Sweep `{self._sweep.name}` in `{self._place}`. Its runs are the children of this one: select them and "
            f"press Compare. `grpo compare {self._sweep.name}-00 {self._sweep.name}-01 --store {self._place}` does the "
            "same in a terminal."
        )
