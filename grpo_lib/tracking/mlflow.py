"""MLflow's one door: one MLflow run for a training run, found again by its tags, with points that never double."""

import functools
import io
import json
import logging
import os
import socket
import threading
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from grpo_lib.config import RunConfig, StoreConfig
from grpo_lib.errors import TrackingError
from grpo_lib.run import Run

SQLITE = b"SQLite format 3"  # how such a file begins
SQLITE_URI = "sqlite:///"
MAX_PARAM_LENGTH = 6000  # MLflow's limit


def tracking_uri(config: RunConfig) -> str:
    """The configured tracking URI, or SQLite in the store's folder (in the working folder for S3)."""
    return config.tracking.uri or default_uri(config.store)


def default_uri(store: StoreConfig) -> str:
    """SQLite in the store's folder, or in the working folder when the store is on S3."""
    folder = Path.cwd() if "://" in store.uri else Path(store.uri).expanduser().resolve()
    return f"sqlite:///{folder}/mlflow.db"


def check_tracking(uri: str, timeout: float = 5.0) -> None:
    """Asks an MLflow server whether it is there, and a database file's folder whether it can be written.

    Raises:
        TrackingError: with the remedy.
    """
    if uri.startswith(("http://", "https://")):
        try:
            with urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=timeout):
                return
        except urllib.error.HTTPError as error:
            raise TrackingError(f"the MLflow server {_public(uri)} answers {error.code}; check tracking.uri") from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise TrackingError(
                f"no MLflow server answers at {_public(uri)} ({reason}); start it with `mlflow server`, "
                "or leave tracking.uri out to log into SQLite"
            ) from None
    if uri.startswith(SQLITE_URI):
        path = Path(uri.removeprefix(SQLITE_URI))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TrackingError(f"can't make the folder of the MLflow database {path}: {error.strerror}") from None
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise TrackingError(f"the MLflow database {path} can't be written; check tracking.uri and permissions")
        with path.open("rb") if path.is_file() else io.BytesIO() as file:
            head = file.read(len(SQLITE))
        if head not in (b"", SQLITE):
            raise TrackingError(f"{path} is no SQLite database; move it away, or set tracking.uri to another file")
        return
    known = ("postgresql", "mysql", "mssql", "file:", "databricks")
    if "://" not in uri or not uri.startswith(known):
        raise TrackingError(
            f"tracking.uri={_public(uri)!r} is no MLflow tracking URI; use sqlite:///FILE, http(s)://HOST:PORT, "
            "postgresql://... or leave it out"
        )


def _public(uri: str) -> str:
    """The URI without user name and password."""
    parts = urlsplit(uri)
    return uri.replace(f"{parts.netloc}", parts.netloc.rpartition("@")[2]) if "@" in parts.netloc else uri


Method = TypeVar("Method", bound=Callable[..., Any])


def _mlflow_call(method: Method) -> Method:
    """One call at a time (publications run side by side), and MLflow's own exceptions as TrackingError."""

    @functools.wraps(method)
    def call(self: "Tracker", *args: Any, **kwargs: Any) -> Any:
        from mlflow.exceptions import MlflowException

        try:
            with self._lock:
                return method(self, *args, **kwargs)
        except (MlflowException, OSError) as error:
            raise TrackingError(
                f"MLflow refused: {str(error)[:500]}. Training data is safe in the store; "
                "`grpo resume` logs what is missing"
            ) from error

    return call  # type: ignore[return-value]


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


class Tracker:
    """The MLflow run of one training run; made at first use, found again afterwards.

    Raises:
        TrackingError: from every method, when MLflow can't be reached or refuses.
    """

    def __init__(self, run: Run) -> None:
        self._config, self._name, self._place = run.config, run.name, run.place
        self._store_option = run.store_option
        self.uri = tracking_uri(run.config)
        self._lock = threading.RLock()

    @cached_property
    def _client(self) -> Any:
        from mlflow import MlflowClient

        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        if self.uri.startswith(SQLITE_URI):
            _make_database(Path(self.uri.removeprefix(SQLITE_URI)))
        return MlflowClient(tracking_uri=self.uri)

    @cached_property
    def experiment_id(self) -> str:
        from mlflow.exceptions import MlflowException

        name = self._config.tracking.experiment
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

    @cached_property
    def run_id(self) -> str:
        """The MLflow run, made with the configuration as its parameters when there is none yet."""
        tags = {"grpo.run": self._name, "grpo.place": self._place}
        query = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
        found = self._client.search_runs(
            [self.experiment_id], query, max_results=1, order_by=["attribute.start_time ASC"]
        )
        if found:
            run_id = found[0].info.run_id
            if found[0].info.status != "RUNNING":  # it ended or failed, and goes on now
                self._client.update_run(run_id, status="RUNNING")
            if not found[0].data.params:  # killed between making the run and this
                self._log_parameters(run_id)
            return run_id

        tags |= {
            "grpo.resume": f"grpo resume {self._name} {self._store_option}",
            "grpo.host": socket.gethostname(),
            "mlflow.note.content": f"Data: `{self._place}`\n\nContinue: `grpo resume {self._name} "
            f"{self._store_option}`\n\nRollouts: `grpo rollouts {self._name} -k 0 "
            f"{self._store_option}`",
        }
        run_id = self._client.create_run(self.experiment_id, tags=tags, run_name=self._name).info.run_id
        self._log_parameters(run_id)
        return run_id

    def _log_parameters(self, run_id: str) -> None:
        from mlflow.entities import Param

        parameters = flat_parameters(self._config.model_dump(mode="json"))
        self._client.log_batch(run_id, params=[Param(key, value) for key, value in parameters.items()])

    @_mlflow_call
    def log_points(self, points: Sequence[Mapping[str, Any]], model_id: str | None = None) -> None:
        """Metric points (name, value, iteration, timestamp_ms). The same point twice is stored once.

        Args:
            model_id: the logged model that they belong to.
        """
        from mlflow.entities import Metric

        metrics = [
            Metric(each["name"], each["value"], each["timestamp_ms"], each["iteration"], model_id=model_id)
            for each in points
        ]
        for start in range(0, len(metrics), 1000):  # MLflow's limit a call
            self._client.log_batch(self.run_id, metrics=metrics[start : start + 1000])

    @_mlflow_call
    def log_dataset(self, *, name: str, digest: str, uri: str, context: str) -> None:
        """A dataset input by digest; its data stays in the store. Logging it again changes nothing."""
        from mlflow.data.code_dataset_source import CodeDatasetSource
        from mlflow.data.meta_dataset import MetaDataset
        from mlflow.entities import DatasetInput, InputTag

        dataset = MetaDataset(source=CodeDatasetSource(tags={"store": uri}), name=name, digest=digest[:36])
        tags = [InputTag("mlflow.data.context", context)]
        self._client.log_inputs(self.run_id, [DatasetInput(dataset._to_mlflow_entity(), tags)])

    @_mlflow_call
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
                tags={"grpo.checkpoint": uri, "grpo.policy_digest": digest},
                params={"policy_version": str(version)},
                model_type="policy",
            )
        if model.status != LoggedModelStatus.READY:  # new, or killed before this
            self._client.log_outputs(self.run_id, [LoggedModelOutput(model.model_id, step=version)])
            self._client.finalize_logged_model(model.model_id, "READY")
        return model.model_id

    @_mlflow_call
    def log_table(self, columns: Mapping[str, Sequence[Any]], file: str) -> None:
        """A table that MLflow shows; logging it again replaces it."""
        rows = list(zip(*columns.values(), strict=True))
        self._client.log_text(self.run_id, json.dumps({"columns": list(columns), "data": rows}), file)

    @_mlflow_call
    def log_file(self, path: Path, folder: str) -> None:
        self._client.log_artifact(self.run_id, str(path), folder)

    @_mlflow_call
    def finish(self, status: str) -> None:
        """``FINISHED``, ``FAILED`` or ``RUNNING``."""
        self._client.update_run(self.run_id, status=status)


_LOCK = threading.Lock()
_trackers: dict[tuple[str, str], Tracker] = {}


def tracker_for(run: Run) -> Tracker:
    """The tracker of a run, one a process."""
    with _LOCK:
        key = (tracking_uri(run.config), run.place)
        if key not in _trackers:
            _trackers[key] = Tracker(run)
        return _trackers[key]


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
