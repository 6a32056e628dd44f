"""Where MLflow is: a database file beside the store, or a server. Free of MLflow itself."""

import base64
import io
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from grpo_lib.config import StoreConfig, TrackingConfig
from grpo_lib.errors import TrackingDownError, TrackingError

SQLITE = b"SQLite format 3"  # how such a file begins
SQLITE_URI = "sqlite:///"


class Tracked(Protocol):
    """What says where MLflow is: the configuration of a run, or what has these two sections of it."""

    @property
    def store(self) -> StoreConfig: ...

    @property
    def tracking(self) -> TrackingConfig: ...


def tracking_uri(config: Tracked) -> str:
    """The configured tracking URI, or SQLite in the store's folder (in the working folder for S3)."""
    return config.tracking.uri or default_uri(config.store)


def default_uri(store: StoreConfig) -> str:
    """SQLite in the store's folder, or in the working folder when the store is on S3."""
    folder = Path.cwd() if "://" in store.uri else Path(store.uri).expanduser().resolve()
    return f"sqlite:///{folder}/mlflow.db"


def check_tracking(uri: str, timeout: float = 5.0) -> None:
    """Asks an MLflow server whether it is there, and a database file's folder whether it can be written.

    Raises:
        TrackingError: with the remedy; TrackingDownError when it may pass by itself.
    """
    if uri.startswith(("http://", "https://")):
        try:
            with urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=timeout):
                return
        except urllib.error.HTTPError as error:
            kind = TrackingDownError if error.code in (429, 500, 502, 503, 504) else TrackingError
            raise kind(f"the MLflow server {public(uri)} answers {error.code}; check tracking.uri") from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise TrackingDownError(
                f"no MLflow server answers at {public(uri)} ({reason}); start it with `mlflow server`, "
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
            f"tracking.uri={public(uri)!r} is no MLflow tracking URI; use sqlite:///FILE, http(s)://HOST:PORT, "
            "postgresql://... or leave it out"
        )


def safe(text: str) -> str:
    """What a server says, without the credentials that MLflow's client sends it: some proxies repeat what they got."""
    user, password, token = (os.environ.get(f"MLFLOW_TRACKING_{each}") for each in ("USERNAME", "PASSWORD", "TOKEN"))
    basic = base64.b64encode(f"{user}:{password}".encode()).decode() if user and password else None
    for secret in (password, token, basic):
        text = text.replace(secret, "***") if secret else text
    return text


def public(uri: str) -> str:
    """The URI without user name and password."""
    parts = urlsplit(uri)
    return uri.replace(f"{parts.netloc}", parts.netloc.rpartition("@")[2]) if "@" in parts.netloc else uri
