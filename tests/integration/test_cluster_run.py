"""The cluster of deployments/compose with its real services, as processes: what people do with it, and what it tells.

PostgreSQL, Prefect and MLflow with passwords, S3, Ray with token and encryption, a work pool with a worker;
commands and environments are those of compose.yaml.
"""

import base64
import json
import logging
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import boto3
import httpx
import psutil
import pytest
import yaml
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterName,
    FlowRunFilter,
    FlowRunFilterDeploymentId,
    LogFilter,
    LogFilterFlowRunId,
)
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.schedules import IntervalSchedule
from prefect.events import Event, Resource
from prefect.events.actions import RunDeployment
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.exceptions import PrefectHTTPStatusError

from tests.cluster_set import ClusterSet, cluster_set
from tests.compose_files import ROOT
from tests.flows.letters import retraining, write_model, write_prompts
from tests.flows.tiny import TINY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
RUN_SECONDS = 240
FIRES_SECONDS = 240


@pytest.fixture(scope="module")
def cluster() -> Iterator[ClusterSet]:
    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # the S3 server's line a request
    with cluster_set() as made:
        yield made


@pytest.fixture(scope="module")
def prefect(cluster: ClusterSet) -> Iterator[SyncPrefectClient]:
    with SyncPrefectClient(cluster.prefect_url, auth_string=cluster.secrets["PREFECT_AUTH"]) as client:
        yield client


@pytest.fixture(scope="module")
def asked(cluster: ClusterSet) -> dict[str, "subprocess.Popen[str]"]:
    """Who asks the Ray cluster for its machines; a stranger waits for long, while others train."""
    base = cluster.environment("ray-train")
    probe = [sys.executable, "-m", "grpo_lib.placement.ray_probe", cluster.ray_address]
    encrypted = [str(ROOT / "deployments" / "cluster" / "ray-tls.sh"), "run", *probe]

    def ask(words: list[str], **changes: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(words, env=base | changes, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    return {
        "friend": ask(encrypted),
        "other token": ask(encrypted, RAY_AUTH_TOKEN="0" * 64),
        "no encryption": ask(probe),
    }


@pytest.fixture(scope="module")
def trained(cluster: ClusterSet, prefect: SyncPrefectClient, asked: Any) -> FlowRun:
    """A training run that was started from the deployment's form and has ended."""
    made = start(prefect, "train", {"config": config(cluster)})
    return ended(prefect, made)


def store(cluster: ClusterSet) -> dict[str, str]:
    return {"uri": "s3://grpo/store", "endpoint_url": cluster.s3_url, "patience_seconds": 5}


def config(cluster: ClusterSet, **changes: Any) -> dict[str, Any]:
    """A tiny run on the cluster's workers."""
    placement = {"kind": "ray", "threads": 1, "ray": {"address": cluster.ray_address, "rollout_workers": 0}}
    places = {"store": store(cluster), "tracking": {"uri": cluster.mlflow_url, "system_seconds": None}}
    return TINY | places | {"placement": placement} | changes


def deployment(prefect: SyncPrefectClient, name: str) -> Any:
    (found,) = prefect.read_deployments(deployment_filter=DeploymentFilter(name=DeploymentFilterName(any_=[name])))
    return found


def start(prefect: SyncPrefectClient, name: str, parameters: dict[str, Any]) -> FlowRun:
    return prefect.create_flow_run_from_deployment(deployment(prefect, name).id, parameters=parameters)


def until(happens: Callable[[], Any], seconds: float) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := happens()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.5)
    return found


def ended(prefect: SyncPrefectClient, run: FlowRun, state: str = "COMPLETED") -> FlowRun:
    """The flow run, when it has ended as it should."""

    def final() -> FlowRun | None:
        now = prefect.read_flow_run(run.id)
        return now if now.state is not None and now.state.is_final() else None

    now: FlowRun = until(final, RUN_SECONDS)
    assert now.state_type is not None and now.state_type.value == state, f"{now.state}: {logs(prefect, run)[-3000:]}"
    return now


def processes_of(run: FlowRun) -> list[psutil.Process]:
    def its(process: psutil.Process) -> bool:
        try:
            return process.environ().get("PREFECT__FLOW_RUN_ID") == str(run.id)
        except psutil.Error:
            return False

    return [each for each in psutil.process_iter() if its(each)]


def logs(prefect: SyncPrefectClient, run: FlowRun, awaited: str = "") -> str:
    """The log of a run, when it says what is awaited: the last lines come after the state they explain."""

    def said() -> str | None:
        found = prefect.read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run.id])), limit=200)
        text = "\n".join(each.message for each in found)
        return text if awaited in text else None

    said_at_last: str = until(said, 60) if awaited else said() or ""
    return said_at_last


def runs_of(prefect: SyncPrefectClient, name: str) -> list[FlowRun]:
    wanted = FlowRunFilter(deployment_id=FlowRunFilterDeploymentId(any_=[deployment(prefect, name).id]))
    return prefect.read_flow_runs(flow_run_filter=wanted)


def s3(cluster: ClusterSet) -> Any:
    keys = {"aws_access_key_id": "x", "aws_secret_access_key": "x"}
    return boto3.client("s3", endpoint_url=cluster.s3_url, region_name="us-east-1", **keys)


def objects(cluster: ClusterSet) -> dict[str, bytes]:
    """Everything in S3, by bucket and key."""
    client = s3(cluster)
    found = {}
    for bucket in ("grpo", "mlflow"):
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket):
            for each in page.get("Contents", []):
                body = client.get_object(Bucket=bucket, Key=each["Key"])["Body"]
                found[f"{bucket}/{each['Key']}"] = body.read()
    return found


def dump(cluster: ClusterSet, database: str) -> str:
    done = cluster.postgres("pg_dump", "--username=postgres", f"--dbname={database}")
    assert done.returncode == 0, done.stderr
    return done.stdout


def query(cluster: ClusterSet, database: str, sql: str) -> list[str]:
    done = cluster.postgres("psql", "--username=postgres", f"--dbname={database}", "-XAt", "-c", sql)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_run_started_from_its_deployment_ends_with_data_in_s3_and_metrics_in_postgresql(
    cluster: ClusterSet, trained: FlowRun
) -> None:
    manifests = [key for key in objects(cluster) if key.startswith("grpo/store/runs/tiny/") and "manifest" in key]
    assert sum("/update/" in key for key in manifests) == TINY["iterations"]
    assert sum("/rollout" in key and "/iterations/" in key for key in manifests) == 2 * TINY["iterations"]
    statuses = query(cluster, "mlflow", "select status from runs")
    assert statuses == ["FINISHED"]
    assert "reward/mean" in query(cluster, "mlflow", "select distinct key from metrics")
    assert str(trained.id) in query(cluster, "prefect", "select id from flow_run where state_type = 'COMPLETED'")
    assert any(key.startswith("mlflow/") and key.endswith("config.yaml") for key in objects(cluster)), "by the proxy"


def test_whoever_has_no_password_or_token_gets_nothing(cluster: ClusterSet) -> None:
    assert httpx.get(f"{cluster.prefect_url}/admin/version").status_code == 401
    asked = {"limit": 1}
    assert httpx.post(f"{cluster.prefect_url}/flow_runs/filter", json=asked, auth=("grpo", "wrong")).status_code == 401
    search = f"{cluster.mlflow_url}/api/2.0/mlflow/experiments/search"
    assert httpx.get(search, params={"max_results": 1}).status_code == 401
    user = (cluster.secrets["MLFLOW_USER"], cluster.secrets["MLFLOW_PASSWORD"])
    assert httpx.get(search, params={"max_results": 1}, auth=user).status_code == 200
    new = {"username": "eve", "password": "a-long-password"}
    made = httpx.post(f"{cluster.mlflow_url}/api/2.0/mlflow/users/create", json=new, auth=user)
    assert made.status_code == 403, "runs are no administrators"
    for password in ({}, {"PGPASSWORD": "wrong"}, {"PGPASSWORD": cluster.secrets["MLFLOW_DB_PASSWORD"]}):
        done = cluster.postgres("psql", "--username=prefect", "-c", "select 1", PGDATABASE="prefect", **password)
        assert done.returncode != 0 and "authentication failed" in done.stderr
    own = {"PGPASSWORD": cluster.secrets["MLFLOW_DB_PASSWORD"], "PGDATABASE": "prefect"}
    done = cluster.postgres("psql", "--username=mlflow", "-c", "select 1", **own)
    assert "permission denied" in done.stderr, "each role sees its own databases"


def test_ray_answers_nobody_without_the_token_or_without_encryption(asked: dict[str, "subprocess.Popen[str]"]) -> None:
    said = {name: json.loads(each.communicate(timeout=120)[0]) for name, each in asked.items()}
    assert len([each for each in said["friend"]["nodes"] if each["alive"]]) == 3
    assert "refuses the token" in said["other token"]["refused"]
    assert "does not answer" in said["no encryption"]["refused"], "it knows the token"


def test_a_schedule_fires(cluster: ClusterSet, prefect: SyncPrefectClient, trained: FlowRun) -> None:
    scheduled = deployment(prefect, "evaluate")
    parameters = {"run": "tiny", "store": store(cluster)}
    every = IntervalSchedule(interval=timedelta(seconds=20))
    (made,) = prefect.create_deployment_schedules(
        scheduled.id, [(every, True)], parameters=parameters, max_scheduled_runs=1
    )
    try:
        begun = until(lambda: [each for each in runs_of(prefect, "evaluate") if each.start_time], FIRES_SECONDS)
    finally:
        prefect.delete_deployment_schedule(scheduled.id, made.id)
    assert all(each.auto_scheduled and each.parameters["run"] == "tiny" for each in begun)
    ended(prefect, begun[0])


def test_an_event_reruns_a_stage_that_it_names(
    cluster: ClusterSet, prefect: SyncPrefectClient, trained: FlowRun
) -> None:
    wanted = {
        "run": "tiny", "iteration": 1, "only_this_stage": True, "store": store(cluster),
        "stage": {"__prefect_kind": "jinja", "template": "{{ event.payload.stage }}"},
        "name": {"__prefect_kind": "jinja", "template": "{{ event.payload.name }}"},
    }  # fmt: skip
    trigger = EventTrigger(
        expect={"grpo.rewards.changed"}, posture=Posture.Reactive, threshold=1, within=timedelta(seconds=10)
    )
    action = RunDeployment(source="selected", deployment_id=deployment(prefect, "rerun-stage").id, parameters=wanted)
    automation = prefect.create_automation(AutomationCore(name="rerun", trigger=trigger, actions=[action]))
    event = Event(
        event="grpo.rewards.changed", resource=Resource({"prefect.resource.id": "grpo.reward.tiny"}),
        payload={"stage": "reward", "name": "again"},
    )  # fmt: skip

    def fired() -> list[FlowRun]:
        sent = event.model_copy(update={"id": uuid.uuid4()})  # the server hears of a new automation after a moment
        prefect._client.post("/events", json=[sent.model_dump(mode="json")]).raise_for_status()
        time.sleep(2)
        return runs_of(prefect, "rerun-stage")

    try:
        (run, *_) = until(fired, FIRES_SECONDS)
    finally:
        prefect.delete_automation(automation)
    assert ended(prefect, run).parameters["stage"] == "reward"
    made = [key for key in objects(cluster) if key.startswith("grpo/store/runs/again/")]
    assert any(key.endswith("run.json") for key in made), "the branch is there"


def test_a_person_approves_a_retraining(cluster: ClusterSet, prefect: SyncPrefectClient, tmp_path: Path) -> None:
    for name, count, seed in (("inbox/monday.jsonl", 64, 1), ("heldout.jsonl", 32, 9)):
        s3(cluster).upload_file(str(write_prompts(tmp_path / name, count, seed)), "grpo", name)
    values = retraining(tmp_path, write_model(tmp_path / "model"))
    files = {"problem": "files", "train": ["s3://grpo/inbox"], "heldout": ["s3://grpo/heldout.jsonl"]}
    values["train"] |= {each: config(cluster)[each] for each in ("store", "tracking", "placement")} | {
        "data": files | {"heldout_prompts": 32, "endpoint_url": cluster.s3_url},
        "evaluation": {"every": 1, "prompts": 32, "samples": 1, "pass_k": [1]}, "iterations": 1,
    }  # fmt: skip
    values |= {"approval": "manual", "first_champion": "always"}
    run = start(prefect, "retrain", {"config": values})
    until(lambda: (state := prefect.read_flow_run(run.id).state) and state.is_paused(), RUN_SECONDS)
    assert query(cluster, "mlflow", "select alias from registered_model_aliases") == ["challenger"]
    until(lambda: not processes_of(run), RUN_SECONDS)  # Prefect's worker mixes up two of one run
    prefect.resume_flow_run(run.id, run_input={"promote": True, "by": "a person", "reason": "read the rollouts"})
    assert ended(prefect, run).state_name == "Promoted"
    assert query(cluster, "mlflow", "select alias || version from registered_model_aliases") == ["champion1"]


def test_prefect_takes_the_work_pool_of_kubernetes(cluster: ClusterSet, prefect: SyncPrefectClient) -> None:
    base = ROOT / "deployments" / "kubernetes" / "base"
    worker = yaml.safe_load((base / "prefect-worker.yaml").read_text())["spec"]["template"]["spec"]
    places = {"grpo": "pods", "/template/work-pool.json": str(base / "work-pool.json")}
    command = [places.get(word, word) for word in worker["initContainers"][0]["args"]]
    for _ in range(2):  # the pod may start again
        done = subprocess.run(command, env=cluster.environment("deploy"), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    pool = prefect.read_work_pool("pods")
    assert (pool.type, pool.base_job_template) == ("kubernetes", json.loads((base / "work-pool.json").read_text()))


def test_a_url_with_a_password_is_refused_by_the_form(cluster: ClusterSet, prefect: SyncPrefectClient) -> None:
    for planted in ("http://someone:planted-pass@mlflow:5000", "http://mlflow:5000?api_key=planted-pass"):
        with pytest.raises(PrefectHTTPStatusError, match=r"409|422"):
            start(prefect, "train", {"config": config(cluster, tracking={"uri": planted})})
    assert "planted-pass" not in dump(cluster, "prefect")


def test_a_run_that_fails_says_where_and_no_secret(
    cluster: ClusterSet, prefect: SyncPrefectClient, trained: FlowRun
) -> None:
    with echo() as url:  # answers with what it was asked, headers and all
        proxied = config(cluster, name="unreachable", tracking={"uri": url, "patience_seconds": 1})
        gone = config(cluster, name="gone", store=store(cluster) | {"endpoint_url": "http://127.0.0.1:9"})
        judge = {"url": f"{url}/v1", "model": "any", "prompt": "{response}", "api_key_variable": "JUDGE_API_KEY"}
        judge |= {"pattern": "([0-9])", "retries": 0}
        judged = config(cluster, name="judged", reward={"functions": [{"name": "judge", "kwargs": judge}]})
        begun = [start(prefect, "train", {"config": each}) for each in (proxied, judged, gone)]
        reasons = [f"MLflow at {url} refused", "the endpoint answers with 400", "127.0.0.1:9"]
        said = [
            logs(prefect, ended(prefect, run, "FAILED"), awaited=reason)
            for run, reason in zip(begun, reasons, strict=True)
        ]
    assert "Basic ***" in said[0], "the server did repeat the password"
    assert "Bearer ***" in said[1]


def test_no_secret_is_anywhere_afterwards(cluster: ClusterSet, trained: FlowRun) -> None:
    """Last in this file: of everything that was done above."""
    assert leaks(cluster) == []


def leaks(cluster: ClusterSet) -> list[str]:
    """Where a secret of the `.env` stands: as it is, in a URL, or in base64, as headers have it."""
    known = {name: value for name, value in cluster.secrets.items() if len(value) >= 40}
    assert len(known) == 10
    known["MLflow header"] = f"{cluster.secrets['MLFLOW_USER']}:{cluster.secrets['MLFLOW_PASSWORD']}"
    known["Prefect password"] = cluster.secrets["PREFECT_AUTH"].partition(":")[2]
    forms = {name: (value, quote(value), base64.b64encode(value.encode()).decode()) for name, value in known.items()}
    texts = {f"object {key}": body for key, body in objects(cluster).items()}
    for database in ("prefect", "mlflow", "mlflow_auth"):
        texts[f"database {database}"] = dump(cluster, database).encode()
    logged = [each for each in cluster.home.rglob("*") if each.is_file() and "logs" in each.parts]
    texts |= {f"log {each}": each.read_bytes() for each in logged}
    assert len(logged) > 20, "of the services, and of Ray's processes"
    return [
        f"{name} in {place}"
        for place, text in texts.items()
        for name, words in forms.items()
        if any(word.encode() in text for word in words)
    ]


@contextmanager
def echo() -> Iterator[str]:
    """A server that refuses everything but its health, and repeats the request's headers: some proxies do."""

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            refusal = f"{self.headers['Authorization']} is not welcome: {self.headers}"
            body = json.dumps({"error_code": "INVALID_PARAMETER_VALUE", "message": refusal}).encode()
            self.send_response(200 if self.path == "/health" else 400)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = _answer

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
