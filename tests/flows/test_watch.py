"""Files arrive: `grpo watch` tells, the deployment that `grpo serve` made starts, asks a person, and goes on."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import yaml
from prefect.client.orchestration import get_client

from grpo_lib.config_retrain import RetrainConfig
from grpo_lib.retraining.ledger import Ledger
from grpo_lib.tracking.registry import Registry
from tests.flows.letters import retraining, write_model, write_prompts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
SECONDS = 400


@contextmanager
def running(log: Path, environment: dict[str, str], *words: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A command of `grpo`, ended by Ctrl-C."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "flows.cli.main", *words], env=os.environ | environment, cwd=log.parent,
            stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def until(found: Callable[[], Any], *logs: Path) -> Any:
    deadline = time.monotonic() + SECONDS
    while not (result := found()):
        assert time.monotonic() < deadline, "\n".join(each.read_text()[-2000:] for each in logs)
        time.sleep(0.5)
    return result


def test_a_file_that_arrives_starts_a_round_that_a_person_ends(
    tmp_path: Path, own_prefect_here: str, own_prefect_server: dict[str, str]
) -> None:
    from flows.arrivals import announce_arrivals

    model = f"letters-{uuid4().hex[:8]}"
    values = retraining(tmp_path, write_model(tmp_path / "model")) | {"model": model, "approval": "manual"}
    (tmp_path / "retrain.yaml").write_text(yaml.safe_dump(values))
    write_prompts(tmp_path / "heldout.jsonl", 128, 9)
    (tmp_path / "inbox").mkdir()
    config = RetrainConfig.model_validate(values)
    ledger, registry = Ledger(config.train.store, model), Registry(config.train)
    served, watched = tmp_path / "serve.log", tmp_path / "watch.log"

    def ask(path: str, **body: Any) -> Any:
        with get_client(sync_client=True) as client:
            return client.request("POST", path, json=body).json()

    def flow_runs() -> list[dict[str, Any]]:
        wanted = {"name": {"any_": [f"retrain {model}"]}}
        found: list[dict[str, Any]] = ask("/flow_runs/filter", flow_runs=wanted, sort="START_TIME_ASC")
        return found

    def in_state(which: int, name: str) -> dict[str, Any]:
        runs = until(lambda: [each for each in flow_runs()[which:] if each["state"]["name"] == name], served, watched)
        return dict(runs[0])

    serve = ["serve", "--pool", model, "--retrain", "retrain.yaml", "--limit", "1"]
    with (
        running(served, own_prefect_server, *serve),
        running(watched, own_prefect_server, "watch", "retrain.yaml", "--every", "1") as watch,
    ):
        until(lambda: "started!" in served.read_text(), served)
        announce_arrivals(f"{model}-2", config.train.store.uri, [("elsewhere.jsonl", uuid4().hex * 2)], 0, 0)
        write_prompts(tmp_path / "day1.jsonl", 200, 1).rename(tmp_path / "inbox" / "day1.jsonl")
        until(lambda: "1 new files: told Prefect" in watched.read_text(), watched)
        asked = in_state(0, "Suspended")
        assert registry.aliases(model) == {"challenger": "1"}
        key = f"/flow_runs/{asked['id']}/input/suspended-round-1-schema"
        with get_client(sync_client=True) as client:
            form = client.request("GET", key).json()
        assert form["properties"]["version"]["default"] == "1"

        ask(f"/flow_runs/{asked['id']}/resume", run_input={"version": "9", "promote": True, "by": "Ada"})
        assert "which does not wait for one; version 1 does" in in_state(0, "Failed")["state"]["message"]
        assert registry.aliases(model) == {"challenger": "1"}, "it waits on"

        ask(f"/deployments/{asked['deployment_id']}/create_flow_run", name=f"retrain {model}")
        again = in_state(1, "Suspended")
        ask(f"/flow_runs/{again['id']}/resume", run_input={"version": "1", "promote": True, "by": "Ada"})
        in_state(1, "Promoted")
        assert registry.aliases(model) == {"champion": "1"}
        (decided,) = ledger.rounds()
        assert decided.decision is not None and decided.decision.by == "Ada"
        assert len(flow_runs()) == 2, "another model's prompts start nothing"
        assert watched.read_text().count("told Prefect") == 1, "what was taken is not new"
        assert watch.poll() is None
    assert "Traceback" not in watched.read_text()
