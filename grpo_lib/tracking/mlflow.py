"""MLflow's one door: one MLflow run for a training run, found again by its tags, with points that never double."""

import functools
import json
import logging
import os
import socket
import sqlite3
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from grpo_lib.branches import branch_differences
from grpo_lib.errors import TrackingDownError, TrackingError
from grpo_lib.patience import Patience
from grpo_lib.run import Run
from grpo_lib.storage.claims import user_name
from grpo_lib.tracking.address import SQLITE_URI, Tracked, check_tracking, public, safe, tracking_uri
from grpo_lib.tracking.notes import commands, note

MAX_PARAM_LENGTH = 6000  # MLflow's limits
MAX_TAG_LENGTH = 5000
MAX_DIGEST_LENGTH = 36
LAST_SAMPLE_SECONDS = 5.0
SWEEP = "grpo.sweep"
"""Tag of the MLflow run that is a sweep; ``SWEEP_OF`` is that of its runs."""
SWEEP_OF = "grpo.sweep_of"
TABLES = "mlflow.loggedArtifacts"
"""Tag that lists the files that MLflow's pages show as tables."""
CHECKPOINT = "grpo.checkpoint"
"""Tag of logged models and registered versions: where the weights are."""

Method = TypeVar("Method", bound=Callable[..., Any])


def mlflow_call(method: Method) -> Method:
    """One call at a time (publications run side by side), with patience, and MLflow's own exceptions as TrackingError.

    A call may be made again after its answer was lost: each method looks for what is there before it makes anything.
    """

    @functools.wraps(method)
    def call(self: "MlflowServer", *args: Any, **kwargs: Any) -> Any:
        from mlflow.exceptions import MlflowException

        def once() -> Any:
            try:
                return method(self, *args, **kwargs)
            except (MlflowException, OSError) as error:
                down = _may_pass(error)
                what = "does not answer" if down else "refused"
                raise (TrackingDownError if down else TrackingError)(
                    f"MLflow at {public(self.uri)} {what}: {safe(str(error))[:500]}. "
                    "Training data is safe in the store; `grpo resume` logs what is missing"
                ) from None  # its text may repeat the password

        with self._lock:
            return self._patience.call(once)

    return call  # type: ignore[return-value]


def _may_pass(error: Any) -> bool:
    """Whether the same call may work later: the server or the network failed, not what was asked for."""
    from requests import RequestException

    if isinstance(error, RequestException):
        status = 503 if error.response is None else error.response.status_code
    elif isinstance(error, OSError):
        return isinstance(error, ConnectionError | TimeoutError)
    else:
        status = error.get_http_status_code()
    return status == 429 or (status >= 500 and status != 501)


def _make_database(path: Path) -> None:
    """Makes MLflow's SQLite tables, all or none: a kill half-way through would leave a file that MLflow refuses."""
    from mlflow import MlflowClient

    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        MlflowClient(tracking_uri=f"sqlite:///{scratch}").search_experiments()
        os.link(scratch, path)
    except FileExistsError:
        pass  # another process was faster
    finally:
        scratch.unlink(missing_ok=True)


class MlflowServer:
    """An MLflow server, or a database file in its place, and how it is called."""

    def __init__(self, config: Tracked) -> None:
        self._experiment = config.tracking.experiment
        self.uri = tracking_uri(config)
        self._lock = threading.RLock()
        self._patience = Patience(
            config.tracking.patience_seconds, f"MLflow at {public(self.uri)}", "tracking.patience_seconds"
        )

    @cached_property
    def _client(self) -> Any:
        from mlflow import MlflowClient

        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        # Its own repeats would make a second run when the answer to `create_run` is lost.
        os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
        if self.uri.startswith(SQLITE_URI):
            _make_database(Path(self.uri.removeprefix(SQLITE_URI)))
        return MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)

    @cached_property
    def experiment_id(self) -> str:
        from mlflow.exceptions import MlflowException

        name = self._experiment
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return found.experiment_id
        location = None
        if self.uri.startswith(SQLITE_URI):
            folder = Path(self.uri.removeprefix(SQLITE_URI)).parent / "mlflow-artifacts"
            location = folder.resolve().as_uri()
        try:
            return self._client.create_experiment(name, artifact_location=location)
        except MlflowException:  # another process was faster
            found = self._client.get_experiment_by_name(name)
            if found is None:
                raise
            return found.experiment_id

    def _runs_with(self, tags: Mapping[str, str]) -> Any:
        """The oldest MLflow run with these tags, if there is one."""
        query = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
        return self._client.search_runs(
            [self.experiment_id], query, max_results=1, order_by=["attribute.start_time ASC"]
        )


class Tracker(MlflowServer):
    """The MLflow run of one training run; made at first use, found again afterwards.

    Raises:
        TrackingError: from every method, when MLflow refuses, or TrackingDownError when it can't be reached.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run.config)
        self._run = run
        self._config, self._name, self._place = run.config, run.name, run.place
        self._base = run.lineage[1] if run.config.branch is not None else None
        self._monitor: Any = None

    @cached_property
    def run_id(self) -> str:
        """The MLflow run, made with the configuration as its parameters when there is none yet."""
        tags = {"grpo.run": self._name, "grpo.place": self._place}
        found = self._runs_with(tags)
        if found:
            run_id = found[0].info.run_id
            if found[0].info.status != "RUNNING":  # it ended or failed, and goes on now
                self._client.update_run(run_id, status="RUNNING")
            if not found[0].data.params:  # killed between making the run and this
                self._log_parameters(run_id)
            return run_id

        tags |= {
            "grpo.resume": commands(self._run)["resume"],
            "grpo.host": socket.gethostname(),
            "mlflow.note.content": note(self._run),
            "mlflow.user": user_name(),
            "mlflow.source.name": "grpo",
        }
        tags |= self._branch_tags() or self._sweep_tags()
        run_id = self._client.create_run(self.experiment_id, tags=tags, run_name=self._name).info.run_id
        self._log_parameters(run_id)
        return run_id

    def _branch_tags(self) -> dict[str, str]:
        """Of a branch: where it left which run, and that run as its parent, if it is in the same experiment."""
        branch = self._config.branch
        if branch is None or self._base is None:
            return {}
        changed = "; ".join(str(each) for each in branch_differences(self._base.config, self._config))
        tags = {"grpo.branch.run": branch.run, "grpo.branch.iteration": str(branch.iteration)}
        tags |= {"grpo.branch.stage": branch.stage, "grpo.branch.settings": changed[:MAX_TAG_LENGTH]}
        parent = self._runs_with({"grpo.run": self._base.name, "grpo.place": self._base.place})
        return tags | ({"mlflow.parentRunId": parent[0].info.run_id} if parent else {})

    def _sweep_tags(self) -> dict[str, str]:
        """Of a run of a sweep: the sweep's run as its parent."""
        sweep = self._config.tracking.sweep
        if sweep is None:
            return {}
        parent = self._runs_with({SWEEP: sweep, "grpo.place": self._run.objects.uri})
        return {SWEEP_OF: sweep} | ({"mlflow.parentRunId": parent[0].info.run_id} if parent else {})

    def _log_parameters(self, run_id: str) -> None:
        from mlflow.entities import Param

        parameters = flat_parameters(self._config.model_dump(mode="json"))
        self._client.log_batch(run_id, params=[Param(key, value) for key, value in parameters.items()])

    @mlflow_call
    def log_points(
        self, points: Sequence[Mapping[str, Any]], model_id: str | None = None, dataset: tuple[str, str] | None = None
    ) -> None:
        """Metric points (name, value, iteration, timestamp_ms). The same point twice is stored once.

        Args:
            model_id: the logged model that they belong to.
            dataset: name and digest of the dataset input that they were measured on.
        """
        from mlflow.entities import Metric

        name, digest = dataset or (None, None)
        belongs: dict[str, Any] = {}
        known = set()
        if model_id is not None:
            belongs = {"model_id": model_id, "dataset_name": name, "dataset_digest": digest and _short(digest)}
            metrics = self._client.get_logged_model(model_id).metrics or []
            known = {(each.key, each.step, each.timestamp) for each in metrics}
        metrics = []
        for each in points:
            point = each["name"], each["value"], each["timestamp_ms"], each["iteration"]
            is_known = (each["name"], each["iteration"], each["timestamp_ms"]) in known
            metrics.append(Metric(*point, **({} if is_known else belongs)))
        for start in range(0, len(metrics), 1000):  # MLflow's limit a call
            self._client.log_batch(self.run_id, metrics=metrics[start : start + 1000])

    @mlflow_call
    def as_logged(self, points: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The points with the values and times that MLflow has for their names and iterations, where it has some."""
        found = {}
        for name in {each["name"] for each in points}:
            for metric in self._client.get_metric_history(self.run_id, name):
                found[name, metric.step] = {"value": metric.value, "timestamp_ms": metric.timestamp}
        return [{**each, **found.get((each["name"], each["iteration"]), {})} for each in points]

    @mlflow_call
    def log_dataset(self, *, name: str, digest: str, uri: str, context: str, rows: int) -> None:
        """A dataset input by digest; its data stays in the store. Logging it again changes nothing."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        dataset = Dataset(
            name=name,
            digest=_short(digest),
            source_type="s3" if uri.startswith("s3://") else "local",
            source=json.dumps({"uri": uri}),
            profile=json.dumps({"num_rows": rows}),
        )
        self._client.log_inputs(self.run_id, [DatasetInput(dataset, [InputTag("mlflow.data.context", context)])])

    @mlflow_call
    def log_model(self, *, version: int, digest: str, uri: str) -> str:
        """One logged model for a checkpoint, found again when it is there; the weights stay in the store."""
        from mlflow.entities import LoggedModelOutput, LoggedModelStatus

        name = f"{self._name}-v{version}"
        query = f"name = '{name}' and tags.`grpo.policy_digest` = '{digest}'"
        found = self._client.search_logged_models([self.experiment_id], query)
        model = next((each for each in found if each.source_run_id == self.run_id), None)
        if model is None:
            model = self._client.create_logged_model(
                self.experiment_id,
                name=name,
                source_run_id=self.run_id,
                tags={
                    CHECKPOINT: uri,
                    "grpo.policy_digest": digest,
                    "grpo.export": commands(self._run, version)["export"],
                    "mlflow.model.isExternal": "true",
                },
                params={"policy_version": str(version)},
                model_type="policy",
            )
        if model.status != LoggedModelStatus.READY:  # new, or killed before this
            outputs = self._client.get_run(self.run_id).outputs
            known = [] if outputs is None else [each.model_id for each in outputs.model_outputs]
            if model.model_id not in known:  # MLflow refuses to log one twice
                self._client.log_outputs(self.run_id, [LoggedModelOutput(model.model_id, step=version)])
            self._client.finalize_logged_model(model.model_id, "READY")
        return model.model_id

    @mlflow_call
    def log_table(self, columns: Mapping[str, Sequence[Any]], file: str) -> None:
        """A table that MLflow shows; logging it again replaces it (MLflow's own call would append its rows)."""
        rows = list(zip(*columns.values(), strict=True))
        self._client.log_text(self.run_id, json.dumps({"columns": list(columns), "data": rows}), file)
        listed = json.loads(self._client.get_run(self.run_id).data.tags.get(TABLES, "[]"))
        entry = {"path": file, "type": "table"}
        if entry not in listed:
            kept = [*listed, entry]
            while len(json.dumps(kept)) > MAX_TAG_LENGTH:
                kept.pop(0)  # still a file of the run
            self._client.set_tag(self.run_id, TABLES, json.dumps(kept))

    @mlflow_call
    def log_file(self, path: Path, folder: str) -> None:
        self._client.log_artifact(self.run_id, str(path), folder)

    @mlflow_call
    def log_text(self, text: str, file: str) -> None:
        self._client.log_text(self.run_id, text, file)

    @mlflow_call
    def set_tag(self, name: str, value: str) -> None:
        self._client.set_tag(self.run_id, name, value[:MAX_TAG_LENGTH])

    @mlflow_call
    def page(self) -> str | None:
        """Address of the run's page; None: no server, `mlflow ui` shows it."""
        if not self.uri.startswith(("http://", "https://")):
            return None
        return f"{public(self.uri).rstrip('/')}/#/experiments/{self.experiment_id}/runs/{self.run_id}"

    @mlflow_call
    def measure_system(self) -> None:
        """Begins to log what CPU, memory, disk, network and GPUs of this machine do, until ``end_of_measuring``."""
        every = self._config.tracking.system_seconds
        if every is None or self._monitor is not None:
            return
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        self._client.update_run(self.run_id, status="RUNNING")  # else the monitor ends at once
        self._monitor = SystemMetricsMonitor(
            self.run_id, sampling_interval=every, resume_logging=True, tracking_uri=self.uri
        )
        self._monitor.start()

    def end_of_measuring(self) -> None:
        """Waits a moment for the last sample; a server that is away is not waited for."""
        monitor, self._monitor = self._monitor, None
        if monitor is not None:
            ending = threading.Thread(target=monitor.finish, daemon=True)
            ending.start()
            ending.join(LAST_SAMPLE_SECONDS)

    @mlflow_call
    def finish(self, status: str) -> None:
        """``FINISHED``, ``FAILED`` or ``KILLED``, now."""
        self._client.set_terminated(self.run_id, status)


def places_in_use(uri: str) -> set[str]:
    """Where MLflow's logged models and registered versions say that their weights are.

    Raises:
        TrackingError: MLflow does not answer.
    """
    if uri.startswith(SQLITE_URI) and not Path(uri.removeprefix(SQLITE_URI)).exists():
        return set()
    from mlflow import MlflowClient
    from mlflow.entities import ViewType
    from mlflow.exceptions import MlflowException

    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    try:
        experiments = all_pages(lambda token: client.search_experiments(ViewType.ALL, page_token=token))
        ids = [each.experiment_id for each in experiments]
        models = all_pages(lambda token: client.search_logged_models(ids, page_token=token))
        versions = all_pages(lambda token: client.search_model_versions(page_token=token))
    except (MlflowException, OSError) as error:
        said = safe(str(error))[:500]
        raise TrackingError(f"MLflow at {public(uri)} does not say which checkpoints it refers to: {said}") from None
    tagged = {each.tags[CHECKPOINT] for each in [*models, *versions] if CHECKPOINT in each.tags}
    return tagged | {each.source for each in versions}


def look_at(uri: str) -> str:
    """Whether MLflow can be used: a database file can be read, a server lets us in; returns its address.

    Raises:
        TrackingError: with the remedy.
    """
    check_tracking(uri)
    if uri.startswith(SQLITE_URI):
        path = Path(uri.removeprefix(SQLITE_URI))
        if not path.exists():
            return f"{uri} (made by the first run)"
        try:
            with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)) as database:
                database.execute("select count(*) from experiments").fetchone()
        except sqlite3.Error as error:
            raise TrackingError(
                f"{path} can't be read as MLflow's database ({error}); end what holds it, or move it away: "
                "`grpo resume` tells a new one everything"
            ) from None
        return uri
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
    try:
        MlflowClient(tracking_uri=uri).search_experiments(max_results=1)
    except (MlflowException, OSError) as error:
        raise TrackingError(
            f"MLflow at {public(uri)} refused: {safe(str(error))[:300]}. Where it asks for a password, set "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        ) from None
    return public(uri)


def all_pages(ask: Callable[[str | None], Any]) -> list[Any]:
    """Everything that a search finds; ``ask`` gets the token of a page."""
    found, page = [], ask(None)
    while True:
        found += page
        if not page.token:
            return found
        page = ask(page.token)


_LOCK = threading.Lock()
_trackers: dict[tuple[str, str], Tracker] = {}


def tracker_for(run: Run) -> Tracker:
    """The tracker of a run, one a process."""
    with _LOCK:
        key = (tracking_uri(run.config), run.place)
        if key not in _trackers:
            _trackers[key] = Tracker(run)
        return _trackers[key]


def _short(digest: str) -> str:
    return digest[:MAX_DIGEST_LENGTH]


def flat_parameters(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as MLflow parameters.

    >>> flat_parameters({"a": {"b": 1}, "c": None})
    {'a.b': '1', 'c': 'None'}
    """
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flat_parameters(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = str(value)[:MAX_PARAM_LENGTH]
    return flat
