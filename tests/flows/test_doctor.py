"""`grpo doctor` on a machine that is in order, and on ones where something is not."""

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import boto3
import pytest
import torch
import yaml
from typer.testing import CliRunner

from flows.cli import doctor_checks
from flows.cli.doctor import check_prefect, examine
from flows.cli.main import app
from grpo_lib.models import make_tokenizer
from grpo_lib.placement.code_version import code_digest
from grpo_lib.services.checks import free_port
from grpo_lib.storage.attempts import package_versions
from tests.faulty_proxy import FaultyProxy
from tests.flows.tiny import TINY
from tests.tiny_models import tiny_model

CHECKS = ["python", "packages", "extras", "device", "disk", "store", "mlflow", "prefect", "ray"]


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No server and no cluster of the machine that tests run on."""
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)


def doctor(*words: str, code: int) -> dict[str, dict[str, Any]]:
    result = CliRunner().invoke(app, ["doctor", *words, "--json"])
    assert result.exit_code == code, result.output
    return {each["check"]: each for each in json.loads(result.output)}


def wrong(found: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {name: each["found"] for name, each in found.items() if each["state"] == "wrong"}


def test_a_machine_in_order_passes_every_check_and_nothing_is_left_in_the_store(tmp_path: Path) -> None:
    found = doctor("--store", str(tmp_path / "store"), code=0)
    assert list(found) == CHECKS and wrong(found) == {}
    assert "creates an object only once, writes" in found["store"]["found"]
    assert [each for each in (tmp_path / "store").rglob("*") if each.is_file()] == []
    assert found["ray"]["found"].endswith("no cluster on this machine (`grpo up` starts one)")


@pytest.mark.slow
def test_a_tiny_run_is_trained_with_the_server_that_is_named(prefect_server: dict[str, str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli.main", "doctor", "--run", "--json", "--store", str(tmp_path / "store")],
        env=os.environ | prefect_server, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = {each["check"]: each["found"] for each in json.loads(done.stdout)}
    assert found["prefect"].startswith(f"{prefect_server['PREFECT_API_URL']}, version 3.7.")
    assert found["run"].startswith("2 iterations of a tiny model, ") and "verified" in found["run"]


def test_a_run_is_not_tried_where_it_can_not_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{free_port()}/api")
    found = doctor("--run", "--store", str(tmp_path), code=1)
    assert list(wrong(found)) == ["prefect"] and "unset PREFECT_API_URL" in found["prefect"]["found"]
    assert found["run"]["state"] == "warning" and "prefect must be mended first" in found["run"]["found"]


def test_a_file_in_the_place_of_the_store_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = wrong(doctor("--store", str(tmp_path / "file" / "below"), code=1))
    assert list(found) == ["store", "mlflow"]
    assert "set store.uri to an empty or new folder" in found["store"]


@pytest.mark.skipif(sys.platform != "linux", reason="needs a file system that nobody may write to")
def test_a_folder_that_can_not_be_written_is_wrong() -> None:
    found = wrong(doctor("--store", "/sys/kernel/grpo", code=1))
    assert list(found) == ["store", "mlflow"]
    assert "/sys/kernel/grpo" in found["store"] and "set store.uri to another folder" in found["store"]


def test_a_store_that_does_not_answer_is_wrong(s3_endpoint: str, tmp_path: Path) -> None:
    address = f"http://127.0.0.1:{free_port()}"
    found = wrong(
        doctor(
            "--store",
            "s3://bucket/runs",
            "--endpoint-url",
            address,
            "--mlflow",
            f"sqlite:///{tmp_path}/mlflow.db",
            code=1,
        )
    )
    assert list(found) == ["store"] and "no answer for s3://bucket/runs/" in found["store"]
    assert address in found["store"] and "check that the service runs" in found["store"]


def test_a_store_without_conditional_writes_is_wrong_and_is_left_clean(
    s3_endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    client = boto3.client("s3", endpoint_url=s3_endpoint)
    client.create_bucket(Bucket="doctor")
    where = ["--store", "s3://doctor/runs", "--mlflow", f"sqlite:///{tmp_path}/mlflow.db", "--endpoint-url"]
    proxy = FaultyProxy(s3_endpoint, ignores=["If-None-Match"])
    try:
        found = wrong(doctor(*where, proxy.url, code=1))
    finally:
        proxy.close()
    assert list(found) == ["store"] and "use a store that honours 'If-None-Match: *'" in found["store"]
    assert "writes" in doctor(*where, s3_endpoint, code=0)["store"]["found"]
    assert client.list_objects_v2(Bucket="doctor")["KeyCount"] == 0


def test_a_dead_mlflow_server_and_a_locked_or_foreign_database_are_wrong(tmp_path: Path) -> None:
    dead = wrong(doctor("--store", str(tmp_path), "--mlflow", f"http://127.0.0.1:{free_port()}", code=1))
    assert list(dead) == ["mlflow"] and "start it with `mlflow server`" in dead["mlflow"]
    database = tmp_path / "mlflow.db"
    holder = sqlite3.connect(database)
    holder.execute("create table experiments (name text)")
    assert wrong(doctor("--store", str(tmp_path), code=0)) == {}
    holder.execute("begin exclusive")
    locked = wrong(doctor("--store", str(tmp_path), code=1))
    assert list(locked) == ["mlflow"] and "database is locked" in locked["mlflow"]
    holder.close()
    database.write_text("not a database")
    assert "is no SQLite database" in wrong(doctor("--store", str(tmp_path), code=1))["mlflow"]


@contextmanager
def answering(codes: dict[str, int], body: object) -> Iterator[str]:
    """A server that answers so at these paths, and 404 elsewhere."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(codes.get(self.path, 404))
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("code", "version", "state", "says"),
    [
        (401, "", "wrong", "PREFECT_API_AUTH_STRING (user:password) is not set"),
        (404, "", "wrong", "PREFECT_API_URL should end in /api"),
        (200, "3.2.1", "warning", "runs Prefect 3.2.1, here is 3.7."),
    ],
)
def test_what_a_prefect_server_says_is_understood(
    code: int, version: str, state: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with answering({"/api/health": 200, "/api/admin/version": code}, version) as url:
        monkeypatch.setenv("PREFECT_API_URL", f"{url}/api")
        found = examine("prefect", doctor_checks.prefect)
    assert found["state"] == state and says in found["found"]


def test_an_mlflow_server_that_wants_a_password_is_wrong(tmp_path: Path) -> None:
    with answering({"/health": 200, "/api/2.0/mlflow/experiments/search": 401}, {"message": "no"}) as url:
        found = wrong(doctor("--store", str(tmp_path), "--mlflow", url, code=1))
    assert list(found) == ["mlflow"]
    assert "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD" in found["mlflow"]


def test_a_cluster_that_does_not_answer_is_wrong(tmp_path: Path) -> None:
    found = wrong(doctor("--store", str(tmp_path), "--address", f"127.0.0.1:{free_port()}", code=1))
    assert list(found) == ["ray"] and "start one with `grpo up`" in found["ray"]


def test_workers_of_other_code_or_packages_are_found() -> None:
    here = {"name": "grpo-rollout-0", "host": "gpu-7", "code": code_digest(), "versions": package_versions()}
    assert doctor_checks.differences(SimpleNamespace(**here)) == []
    old = here | {"code": "0" * 16, "versions": package_versions() | {"torch": "2.12.0"}}
    code, package = doctor_checks.differences(SimpleNamespace(**old))
    assert code == "grpo-rollout-0 on gpu-7 has other code of grpo-pipeline"
    assert package == f"grpo-rollout-0 on gpu-7 has torch 2.12.0, here is {package_versions()['torch']}"


def test_packages_that_are_missing_or_too_new_are_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, others = doctor_checks.installed, {"fastapi": "0.140.0", "duckdb": None}
    monkeypatch.setattr(doctor_checks, "installed", lambda name: others[name] if name in others else real(name))
    found = wrong(doctor("--store", str(tmp_path), code=1))
    assert list(found) == ["packages"]
    assert "duckdb is not installed; fastapi 0.140.0 does not fit, fastapi<0.137,>=0.115 does" in found["packages"]
    assert found["packages"].endswith("pip install -e .")


def test_little_room_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks, "LEAST_FREE_GIB", 1e9)
    found = doctor("--store", str(tmp_path / "store"), code=0)
    assert found["disk"]["state"] == "warning" and "`grpo gc` frees some" in found["disk"]["found"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with its tokenizer, as save_pretrained writes them."""
    made = tmp_path / "model"
    tiny_model().save_pretrained(made)
    make_tokenizer([], "0123456789").save_pretrained(made)
    return made


def test_a_model_is_loaded_and_measured(folder: Path, tmp_path: Path) -> None:
    parameters = sum(each.numel() for each in tiny_model().parameters())
    found = doctor("--store", str(tmp_path), "--model", str(folder), code=0)["model"]["found"]
    assert f"{parameters / 1e6:,.1f}M parameters, float32 on cpu" in found and "MiB are free" in found
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(TINY))
    assert (
        "M parameters" in doctor("--store", str(tmp_path), "--model", f"{tmp_path}/run.yaml", code=0)["model"]["found"]
    )


def test_a_model_that_does_not_fit_is_a_warning_that_names_what_does(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_checks, "BYTES_A_PARAMETER", 10**12)
    found = doctor("--store", str(tmp_path), "--model", str(folder), code=0)["model"]
    assert found["state"] == "warning" and "trainer.lora" in found["found"]


def test_a_damaged_model_is_wrong(folder: Path, tmp_path: Path) -> None:
    weights = folder / "model.safetensors"
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    model.save_pretrained(folder)
    assert "logits are not finite" in wrong(doctor("--store", str(tmp_path), "--model", str(folder), code=1))["model"]
    weights.write_bytes(weights.read_bytes()[:100])
    assert "can't be loaded" in wrong(doctor("--store", str(tmp_path), "--model", str(folder), code=1))["model"]
    weights.unlink()
    assert (
        "no *.safetensors weights" in wrong(doctor("--store", str(tmp_path), "--model", str(folder), code=1))["model"]
    )


def test_a_run_without_a_server_uses_its_own() -> None:
    assert "embedded" in check_prefect()
