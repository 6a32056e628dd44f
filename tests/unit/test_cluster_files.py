"""The files of deployments/compose and deployments/kubernetes: by the official schemas, and against each other.

`docker compose config` and `kubectl kustomize` are asked too where they are installed.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import kubernetes_validate
import pytest
import typer
import yaml

from flows.cli.main import app
from grpo_lib.config_files import load_config
from tests.compose_files import COMPOSE, ROOT, VARIABLE, make_env, read_env, services

DEPLOYMENTS = ROOT / "deployments"
BASE = DEPLOYMENTS / "kubernetes" / "base"
EXAMPLE = read_env(DEPLOYMENTS / "compose" / ".env.example")
DOCKERFILE = (DEPLOYMENTS / "Dockerfile").read_text()
PORTS = {"postgres": 5432, "s3": 9000, "prefect-server": 4200, "mlflow": 5000, "ray-head": 6379}
SAME = ("prefect-server", "mlflow", "prepare", "ray-head", "ray-rollout", "ray-train")
"""Services that both compose and Kubernetes have."""
IMAGES_READ = {
    "postgres": {"POSTGRES_PASSWORD", "PGDATA", "PREFECT_DB_PASSWORD", "MLFLOW_DB_PASSWORD"},
    "s3": {"MINIO_ROOT_USER", "MINIO_ROOT_PASSWORD", "MINIO_BROWSER"},
}
"""What images of others read, and databases.sh in PostgreSQL's."""
BOTO = {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL_S3"}
LIBPQ = {"PGHOST", "PGPORT", "PGUSER", "PGPASSWORD"}


@pytest.fixture(scope="module")
def compose() -> dict[str, dict[str, Any]]:
    return services(dict.fromkeys(EXAMPLE, "x"))


@pytest.fixture(scope="module")
def objects() -> list[dict[str, Any]]:
    """Of Kubernetes, as they stand in the files."""
    names = yaml.safe_load((BASE / "kustomization.yaml").read_text())["resources"]
    return [each for name in names for each in yaml.safe_load_all((BASE / name).read_text())]


@pytest.fixture(scope="module")
def pods(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Templates of pods by the name of what makes them; the work pool's jobs are ``run``."""
    made = {
        each["metadata"]["name"]: each["spec"]["template"] for each in objects if "template" in each.get("spec", {})
    }
    return made | {"run": job_of_a_run()["spec"]["template"]}


def job_of_a_run() -> dict[str, Any]:
    """What Prefect's Kubernetes worker makes of the work pool's template."""
    from prefect.client.schemas.objects import FlowRun
    from prefect.utilities.templating import apply_values
    from prefect_kubernetes.worker import KubernetesWorkerJobConfiguration as Configuration

    template = json.loads((BASE / "work-pool.json").read_text())
    defaults = Configuration._get_base_config_defaults(template["variables"]["properties"])
    made = Configuration(**apply_values(template["job_configuration"], defaults))
    made.prepare_for_flow_run(FlowRun(id=uuid4(), flow_id=uuid4(), name="train tiny"))
    manifest: dict[str, Any] = made.job_manifest
    return manifest


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def test_compose_files_are_valid(tmp_path: Path) -> None:
    """By the schema of the specification, and by Docker itself where it is."""
    files = [str(COMPOSE), str(COMPOSE.with_name("compose.gpu.yaml"))]
    words = ["-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", *files]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    asked = ["docker", "compose", "version"]
    if shutil.which("docker") is None or subprocess.run(asked, capture_output=True, check=False).returncode:
        return
    make_env(tmp_path / ".env")
    command = ["docker", "compose", "--env-file", str(tmp_path / ".env")]
    command += [word for file in files for word in ("-f", file)]
    done = subprocess.run([*command, "config", "--quiet"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_kubernetes_objects_are_valid(objects: list[dict[str, Any]]) -> None:
    version = kubernetes_validate.latest_version()
    for each in [*objects, job_of_a_run()]:
        kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize("overlay", ["base", "gpu"])
def test_kustomize_builds_it(overlay: str, tmp_path: Path) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("there is no kubectl; the schema is tested above")
    copy = tmp_path / "kubernetes"
    shutil.copytree(BASE.parent, copy)
    make_env(copy / "base" / "secrets.env")
    tls = [str(DEPLOYMENTS / "cluster" / "ray-tls.sh"), "ca"]
    subprocess.run(tls, env=os.environ | {"RAY_CA_FOLDER": str(copy / "base")}, check=True)
    done = subprocess.run(["kubectl", "kustomize", str(copy / overlay)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    built = list(yaml.safe_load_all(done.stdout))
    for each in built:
        kubernetes_validate.validate(each, kubernetes_validate.latest_version(), strict=True)
    assert all(each["metadata"]["namespace"] == "grpo" for each in built if each["kind"] != "Namespace")
    limits = {
        each["metadata"]["name"]: each["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
        for each in built
        if each["kind"] == "Deployment"
    }
    with_gpu = {name for name, limit in limits.items() if limit.get("nvidia.com/gpu") == 1}
    assert with_gpu == ({"ray-rollout", "ray-train"} if overlay == "gpu" else set())


def test_the_example_holds_what_the_compose_file_asks_for_and_no_secret() -> None:
    used = {match["name"]: match["kind"] for match in VARIABLE.finditer(COMPOSE.read_text())}
    assert {name for name, kind in used.items() if kind == "?"} <= EXAMPLE.keys()
    assert EXAMPLE.keys() <= used.keys()
    secret = re.compile(r"(PASSWORD|SECRET_KEY|TOKEN|AUTH)$")
    assert all(value.endswith("CHANGE_ME") == bool(secret.search(name)) for name, value in EXAMPLE.items())


def test_make_env_writes_other_secrets_each_time_and_never_over_them(tmp_path: Path) -> None:
    first, second = make_env(tmp_path / "one"), make_env(tmp_path / "two")
    secrets = [name for name, value in EXAMPLE.items() if value.endswith("CHANGE_ME")]
    made = [each[name] for each in (first, second) for name in secrets]
    assert len(set(made)) == 2 * len(secrets) and all(len(each) >= 48 for each in made)
    assert first.keys() == EXAMPLE.keys()
    assert (tmp_path / "one").stat().st_mode & 0o077 == 0
    with pytest.raises(subprocess.CalledProcessError):
        make_env(tmp_path / "one")


def test_every_variable_that_is_set_is_read(compose: dict[str, Any], pods: dict[str, Any]) -> None:
    template = (BASE / "work-pool.json").read_text()
    set_somewhere = {(name, each) for name, service in compose.items() for each in service.get("environment", {})}
    set_somewhere |= {(n, e["name"]) for n, pod in pods.items() for c in containers(pod) for e in c.get("env", [])}
    set_somewhere -= {
        each for each in set_somewhere if each[0] == "run" and f'"name": "{each[1]}"' not in template
    }  # by Prefect
    known = set(readers())
    unread = {(where, name) for where, name in set_somewhere if name not in known | IMAGES_READ.get(where, set())}
    assert unread == set()


def readers() -> Iterator[str]:
    """Names of variables that somebody reads."""
    import mlflow.environment_variables
    from mlflow.cli import server
    from prefect.settings.legacy import _get_valid_setting_names
    from prefect_kubernetes.settings import KubernetesSettings

    yield from BOTO | LIBPQ
    yield from _get_valid_setting_names(__import__("prefect.settings").settings.Settings)
    for section in ("worker", "observer"):
        fields = KubernetesSettings.model_fields[section].annotation.model_fields
        yield from (f"PREFECT_INTEGRATIONS_KUBERNETES_{section}_{each}".upper() for each in fields)
    yield "PREFECT_INTEGRATIONS_KUBERNETES_CLUSTER_UID"
    yield from vars(mlflow.environment_variables)
    yield from (str(each.envvar) for each in server.params if isinstance(each, __import__("click").Option))
    for script in ("ray-tls.sh", "prepare.py"):
        yield from re.findall(r"[A-Z][A-Z0-9_]{3,}", (DEPLOYMENTS / "cluster" / script).read_text())
    yield from re.findall(r"RAY_\w+", (ROOT / "grpo_lib" / "services" / "checks.py").read_text())


def test_hosts_are_services_at_their_ports_and_in_reach(compose: dict[str, Any]) -> None:
    def networks(name: str) -> set[str]:
        return set(compose[name].get("networks", []))

    found = set()
    for name, service in compose.items():
        text = json.dumps([service.get("environment", {}), service.get("command", [])])
        for host, port in re.findall(r"(?:http://|\")([a-z][a-z0-9-]+):(\d+)", text):
            assert PORTS[host] == int(port), f"{name}: {host}:{port}"
            assert host == name or networks(host) & networks(name), f"{name} and {host} share no network"
            found.add(host)
        for key, host in service.get("environment", {}).items():
            if key in ("PGHOST", "PREFECT_SERVER_DATABASE_HOST"):
                assert networks(host) & networks(name)
    assert found == {"s3", "prefect-server", "mlflow", "ray-head"}
    for name in ("prefect-server", "mlflow", "ray-head"):
        command = [str(each) for each in compose[name]["command"]]
        assert command[command.index("--port") + 1] == str(PORTS[name])


def test_only_the_pages_are_published_and_on_this_machine_alone(compose: dict[str, Any]) -> None:
    ports = services(EXAMPLE)
    published = {name: each["ports"] for name, each in ports.items() if "ports" in each}
    assert published == {"prefect-server": ["127.0.0.1:4200:4200"], "mlflow": ["127.0.0.1:5000:5000"]}
    assert yaml.safe_load(COMPOSE.read_text())["networks"]["data"]["internal"] is True
    assert {name for name, each in compose.items() if "data" in each.get("networks", [])} == {
        "postgres", "prefect-server", "mlflow",
    }  # fmt: skip


def test_what_compose_services_refer_to_is_there(compose: dict[str, Any]) -> None:
    whole = yaml.safe_load(COMPOSE.read_text())
    used = set()
    for name, service in compose.items():
        assert set(service.get("depends_on", {})) <= compose.keys()
        assert set(service.get("networks", [])) <= whole["networks"].keys()
        for each in service.get("volumes", []):
            source = each.split(":")[0]
            assert source in whole["volumes"] or (COMPOSE.parent / source).is_file(), f"{name}: {each}"
            used.add(source)
        for word in [*service.get("entrypoint", []), *service.get("command", [])]:
            if str(word).startswith("/app/"):
                assert (ROOT / word.removeprefix("/app/")).is_file(), word
        for condition in service.get("depends_on", {}).items():
            if condition[1]["condition"] == "service_healthy":
                assert "healthcheck" in compose[condition[0]]
    assert whole["volumes"].keys() <= used


def test_images_have_a_version_and_the_projects_has_those_of_pyproject(
    compose: dict[str, Any], pods: dict[str, Any]
) -> None:
    images = {each["image"] for each in services({**EXAMPLE}).values()}
    images |= {each["image"] for pod in pods.values() for each in containers(pod)}
    images |= set(re.findall(r"^(?:ARG PYTHON_IMAGE=|FROM )([a-z]\S+)", DOCKERFILE, re.M))
    assert {each.partition(":")[0] for each in images} == {"grpo-pipeline", "postgres", "minio/minio", "python"}
    for image in images:
        tag = image.partition(":")[2]
        assert tag in ("cpu", "gpu") or re.search(r"\d+\.\d+|\d{4}-\d\d-\d\d", tag), image
    assert "python:3.11." in DOCKERFILE
    assert not re.search(r"(prefect|mlflow|ray|torch)\W{0,2}[=<>~]=", DOCKERFILE), "pyproject.toml says which"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"--extra (\S+?)[\s\"]", DOCKERFILE)) <= extras.keys()
    for source in re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.M):
        assert all((ROOT / each).exists() for each in source.split())


def test_commands_of_grpo_have_the_options_that_files_give_them(compose: dict[str, Any], pods: dict[str, Any]) -> None:
    commands = [[str(word) for word in each.get("command", [])] for each in compose.values()]
    commands += [[*each.get("command", []), *each.get("args", [])] for pod in pods.values() for each in containers(pod)]
    group = typer.main.get_command(app)
    seen = set()
    for words in commands:
        words = words[words.index("run") + 1 :] if "run" in words else words  # of ray-tls.sh
        if words[:1] != ["grpo"]:
            continue
        _, name, *rest = words
        command = group.commands[name]  # type: ignore[attr-defined]
        command.make_context(name, rest, parent=typer.Context(group))  # refuses what it does not know
        seen.add(name)
    assert seen == {"head", "worker", "join", "deploy"}


def test_compose_and_kubernetes_run_the_same(compose: dict[str, Any], pods: dict[str, Any]) -> None:
    for name in SAME:
        service, container = compose[name], pods[name]["spec"]["containers"][0]
        assert [*container.get("command", []), *container["args"]] == [
            *service.get("entrypoint", []), *(str(each) for each in service["command"]),
        ], name  # fmt: skip
        assert {each["name"] for each in container["env"]} - {"RAY_TLS_NAMES"} == set(service["environment"]), name
    run = {each["name"] for each in pods["run"]["spec"]["containers"][0]["env"]}
    worker = {name for name in compose["prefect-worker"]["environment"] if name != "PREFECT_WORKER_QUERY_SECONDS"}
    # The worker adds those by itself: the pods that are made here have what this process's Prefect has.
    assert worker - run <= {"PREFECT_API_URL", "PREFECT_API_AUTH_STRING"}
    ours, theirs = (
        load_config(DEPLOYMENTS / "configs" / "cluster.yaml"),
        yaml.safe_load((BASE / "cluster.yaml").read_text()),
    )
    assert theirs["extends"] == "/app/deployments/configs/demo.yaml"
    assert ours.tracking.uri == theirs["tracking"]["uri"] and ours.store.endpoint_url == theirs["store"]["endpoint_url"]
    assert ours.placement.ray.address == theirs["placement"]["ray"]["address"] == "ray-head:6379"


def test_what_pods_refer_to_is_there(objects: list[dict[str, Any]], pods: dict[str, Any]) -> None:
    kustomization = yaml.safe_load((BASE / "kustomization.yaml").read_text())
    maps = {each["name"]: each for each in kustomization["configMapGenerator"]}
    literals = {each.partition("=")[0] for each in maps["s3"]["literals"]}
    secrets = {each["name"] for each in kustomization["secretGenerator"]}
    accounts = {each["metadata"]["name"] for each in objects if each["kind"] == "ServiceAccount"}
    for name, pod in pods.items():
        assert pod["spec"]["serviceAccountName"] in accounts
        claims = next(
            (
                o["spec"].get("volumeClaimTemplates", [])
                for o in objects
                if o["metadata"]["name"] == name and o["kind"] == "StatefulSet"
            ),
            [],
        )
        volumes = {each["name"] for each in pod["spec"].get("volumes", [])} | {e["metadata"]["name"] for e in claims}
        for volume in pod["spec"].get("volumes", []):
            assert volume.get("configMap", {}).get("name", "s3") in maps
            assert volume.get("secret", {}).get("secretName", "grpo") in secrets
        mounted = set()
        for container in containers(pod):
            mounted |= {each["name"] for each in container.get("volumeMounts", [])}
            for each in container.get("env", []):
                source = each.get("valueFrom", {})
                if key := source.get("secretKeyRef"):
                    assert key["name"] == "grpo" and key["key"] in EXAMPLE, each
                elif key := source.get("configMapKeyRef"):
                    assert key["name"] == "s3" and key["key"] in literals, each
                else:
                    assert "value" in each and not re.search(
                        r"PASSWORD$|ACCESS_KEY$|TOKEN$|AUTH_STRING$", each["name"]
                    ), each
        assert mounted == volumes, name


def test_services_and_policies_find_their_pods_and_ports(objects: list[dict[str, Any]], pods: dict[str, Any]) -> None:
    labels = {name: pod["metadata"]["labels"] for name, pod in pods.items()}
    for each in objects:
        if each["kind"] == "Service":
            (name,) = [n for n, own in labels.items() if each["spec"]["selector"].items() <= own.items()]
            opened = [p["containerPort"] for c in pods[name]["spec"]["containers"] for p in c.get("ports", [])]
            assert [port["port"] for port in each["spec"]["ports"]] == opened == [PORTS[each["metadata"]["name"]]]
        if each["kind"] == "NetworkPolicy":
            selectors = [each["spec"]["podSelector"]]
            selectors += [source["podSelector"] for rule in each["spec"].get("ingress", []) for source in rule["from"]]
            for selector in selectors:
                assert any(selected(selector, own) for own in labels.values()), selector
    run = {"grpo/run": "true"}
    for name, pod in pods.items():  # who speaks to Prefect or MLflow may
        urls = {
            e.get("value") for c in containers(pod) for e in c.get("env", []) if e["name"].endswith(("_URL", "_URI"))
        }
        if urls & {"http://prefect-server:4200/api", "http://mlflow:5000"}:
            assert run.items() <= labels[name].items(), name
    for pod in pods.values():
        for container in pod["spec"]["containers"]:
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                for kind in ("httpGet", "tcpSocket"):
                    if kind in container.get(probe, {}):
                        assert container[probe][kind]["port"] in [each["containerPort"] for each in container["ports"]]


def selected(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    if not selector.get("matchLabels", {}).items() <= labels.items():
        return False
    return all(labels.get(each["key"]) in each["values"] for each in selector.get("matchExpressions", []))


def test_pods_may_do_little(objects: list[dict[str, Any]], pods: dict[str, Any]) -> None:
    for name, pod in pods.items():
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert name == "prefect-worker" or pod["spec"]["automountServiceAccountToken"] is False
        for container in containers(pod):
            context = container["securityContext"]
            assert context == {
                "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
            }  # fmt: skip
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
            assert "memory" in container["resources"]["limits"]
    rules = [rule for each in objects if each["kind"] == "Role" for rule in each["rules"]]
    assert all("*" not in json.dumps(rule) and "secrets" not in rule["resources"] for rule in rules)


def test_the_password_of_prefect_is_a_reference_in_the_jobs_of_runs(pods: dict[str, Any]) -> None:
    (worker,) = pods["prefect-worker"]["spec"]["containers"]
    given = {each["name"]: each.get("value") for each in worker["env"]}
    prefix = "PREFECT_INTEGRATIONS_KUBERNETES_WORKER_API_AUTH_STRING_SECRET"
    assert (given[f"{prefix}_NAME"], given[f"{prefix}_KEY"]) == ("grpo", "PREFECT_AUTH")
