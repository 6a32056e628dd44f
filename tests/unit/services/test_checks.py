"""What is refused before a service is started."""

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli.cluster import usage
from flows.cli.main import app
from grpo_lib.errors import ConfigError, MissingPackageError
from grpo_lib.services import checks, local_set, ray_nodes
from grpo_lib.services.local_set import SetOptions, check_set, services
from grpo_lib.services.ray_nodes import current_cluster, forget


@pytest.fixture
def busy() -> Iterator[int]:
    """A port where somebody listens."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


@pytest.fixture(autouse=True)
def _no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "secrets" / "token"))


def asked(folder: Path, **changes: object) -> SetOptions:
    ports = {name: checks.free_port() for name in ("prefect_port", "mlflow_port", "ray_port")}
    defaults = {
        "folder": folder,
        "host": "127.0.0.1",
        "dashboard_port": None,
        "workers": {"rollout": 2, "train": 1},
        "runs": 0,
    }
    return SetOptions(**(defaults | ports | changes))


def test_a_port_in_use_is_refused_with_the_option_and_the_process(busy: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"--mlflow-port {busy}: .* in use, process {os.getpid()} .*another port"):
        check_set(asked(tmp_path, mlflow_port=busy))
    with pytest.raises(ConfigError, match=rf"--ray-port {busy}"):  # Ray listens on every interface
        check_set(asked(tmp_path, ray_port=busy))


def test_two_services_at_one_port_are_refused(tmp_path: Path) -> None:
    port = checks.free_port()
    with pytest.raises(ConfigError, match=f"--ray-port {port}: --prefect-port has the same port"):
        check_set(asked(tmp_path, prefect_port=port, ray_port=port))


@pytest.mark.parametrize(("host", "why"), [("192.0.2.77", "can't listen"), ("no.such.host.invalid", "give an address")])
def test_an_address_that_is_not_this_machines_is_refused(host: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why):
        check_set(asked(tmp_path, host=host))


def test_without_ray_nothing_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"pip install 'grpo-pipeline\[ray\]'"):
        check_set(asked(tmp_path))
    done = CliRunner().invoke(app, ["up", "--folder", str(tmp_path / "set")])
    assert isinstance(done.exception, MissingPackageError) and not (tmp_path / "set" / "up.json").exists()


def test_a_token_is_made_once_and_is_its_owners_alone(tmp_path: Path) -> None:
    file = Path(checks.make_token())
    assert file == tmp_path / "secrets" / "token" and stat.S_IMODE(file.stat().st_mode) == 0o600
    token = file.read_text()
    assert len(token) == 64 and int(token, 16)
    file.chmod(0o644)
    assert checks.make_token() == str(file) and file.read_text() == token
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_machine_without_the_token_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"no token: copy the file that `grpo up` named"):
        checks.check_token()
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    checks.check_token()
    assert checks.make_token() == "the environment variable RAY_AUTH_TOKEN"
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(ConfigError, match="RAY_AUTH_MODE=disabled: whoever reaches"):
        checks.check_token()


@pytest.mark.parametrize("address", ["6379", "host:", "host:0", "host:70000", ":6379", "host:port"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="is not HOST:PORT"):
        checks.split_address(address)


def test_the_services_listen_at_home_unless_asked_and_mlflow_then_knows_its_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = services(asked(tmp_path, mlflow_port=5001))
    assert ["127.0.0.1" in each.command for each in home[2:]] == [True, True]
    assert "--allowed-hosts" not in home[3].command
    monkeypatch.setattr(local_set, "own_address", lambda: "192.168.7.7")
    wide = services(asked(tmp_path, host="0.0.0.0", mlflow_port=5001))
    head, node, prefect, mlflow = wide
    assert "ask for no password" in usage(asked(tmp_path, host="0.0.0.0"), "the token")
    assert "password" not in usage(asked(tmp_path), "the token")
    allowed = mlflow.command[mlflow.command.index("--allowed-hosts") + 1].split(",")
    assert {"192.168.7.7", "192.168.7.7:5001", "localhost:5001", socket.gethostname()} <= set(allowed)
    assert prefect.env["PREFECT_SERVER_UI_API_URL"].startswith("http://192.168.7.7:")
    assert head.env["RAY_AUTH_MODE"] == node.env["RAY_AUTH_MODE"] == "token"
    assert '{"ROLLOUT": 2, "TRAIN": 1}' in node.command and "--resources" not in head.command


def test_the_note_of_the_current_cluster_is_removed_with_its_cluster_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert current_cluster() is None
    note = tmp_path / "ray" / "ray_current_cluster"
    note.parent.mkdir()
    note.write_text("10.0.0.1:6379")
    forget(tmp_path / "set", "10.0.0.1:6380")
    assert current_cluster() == "10.0.0.1:6379"
    forget(tmp_path / "set", "10.0.0.1:6379")
    assert current_cluster() is None


def test_a_cluster_that_nobody_runs_is_refused_at_once() -> None:
    address = f"127.0.0.1:{checks.free_port()}"
    with pytest.raises(ConfigError, match=f"no Ray cluster answers at {address}"):
        ray_nodes.nodes(address)


def test_down_and_status_say_that_nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    done = CliRunner().invoke(app, ["down", "--folder", str(tmp_path)])
    assert done.exit_code == 0 and f"nothing runs in {tmp_path}" in done.output
    done = CliRunner().invoke(app, ["status", "--folder", str(tmp_path)])
    assert done.exit_code == 1 and f"no `grpo up` runs in {tmp_path}" in done.output
