"""Runs on workers of a real cluster, which are killed, hang, have other code, or are not there."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chaos.case import Place
from tests.chaos.world import World, differences, world
from tests.flow_processes import FlowProcess
from tests.ray_set import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SECONDS = 240
FEW_SECONDS = 30


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world(tmp_path_factory.mktemp("ray"), {"rollout": 2, "train": 1, "score": 1}) as made:
        made.undisturbed()
        yield made


@pytest.fixture
def place(where: World, request: pytest.FixtureRequest) -> Callable[..., Place]:
    """Makes a place where the small model is there already; ``key=value`` settings as in a configuration."""

    def make(name: str = "", **placement: Any) -> Place:
        made = where.place(f"{request.node.name[:40]}{name}", "folder")
        where.begin(made)
        made.placement.update(placement)
        return made

    return make


@pytest.fixture
def accident(where: World) -> Iterator["Accident"]:
    made = Accident(where.services.spy)
    yield made
    made.let_go()


class Accident:
    """What happens to a worker; see chaos/spy/sitecustomize.py."""

    def __init__(self, folder: Path) -> None:
        self._file, self._happened, self._over = (folder / name for name in ("accident", "happened", "over"))

    def plan(self, what: str, when: str, stage: str, iteration: int) -> None:
        self._happened.unlink(missing_ok=True)
        self._over.unlink(missing_ok=True)
        plan = self._file.with_suffix(".new")
        plan.write_text(json.dumps({"what": what, "when": when, "stage": stage, "iteration": iteration}))
        plan.rename(self._file)

    def wait(self, seconds: float = SECONDS) -> None:
        """Until it has happened."""
        until(self._happened.exists, seconds)

    def over(self, seconds: float = SECONDS) -> str:
        """How the stage that was held ended: the exception, or None."""
        until(self._over.exists, seconds)
        return self._over.read_text()

    def let_go(self) -> None:
        self._file.unlink(missing_ok=True)


def until(happens: Callable[[], Any], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.05)


def train(place: Place) -> FlowProcess:
    return FlowProcess("train", place.values, place.log)


def finish(flow: FlowProcess, place: Place, code: int = 0) -> str:
    """The flow's log, when it has ended."""
    ended = flow.wait(SECONDS)
    said = place.log.read_text()
    assert ended == code, said[-3000:]
    return said


def generated(where: World) -> list[dict[str, Any]]:
    """Shards that workers began to generate, of all runs so far."""
    file = where.services.spy / "generated"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def check(where: World, place: Place) -> None:
    """The run is the same as an undisturbed one."""
    expected = where.undisturbed()
    assert differences(where.found(place, expected.begun), expected) == []


def test_workers_killed_at_the_worst_moments_cost_nothing_but_time(
    where: World, place: Callable[..., Place], accident: Accident
) -> None:
    made = place()
    before = len(generated(where))
    accident.plan("kill", "parts", "update", 0)  # trained, written, and not committed
    flow = train(made)
    accident.wait()
    accident.plan("kill", "write", "checkpoint", 1)  # half of its files are there
    accident.wait()
    accident.plan("kill", "done", "rollout", 2)  # committed, and nobody was told
    accident.wait()
    said = finish(flow, made)
    assert said.count("was lost while it ran") == 3
    check(where, made)
    shards = [(each["iteration"], each["first"]) for each in generated(where)[before:]]
    assert len(shards) == len(set(shards)) == 8, "what was committed is not generated again"


def test_a_stage_of_a_dead_flow_goes_on_and_the_next_flow_joins_it(
    where: World, place: Callable[..., Place], accident: Accident
) -> None:
    made = place()
    before = len(generated(where))
    accident.plan("hold", "parts", "rollout", 1)  # generated, and not committed
    first = train(made)
    accident.wait()
    first.kill()
    second = train(made)
    until(lambda: "Task run 'chaos/000001/prompts' - Finished in state Cached" in made.log.read_text(), SECONDS)
    time.sleep(1)
    accident.let_go()
    finish(second, made)
    check(where, made)
    shards = [(each["iteration"], each["first"]) for each in generated(where)[before:]]
    assert len(shards) == len(set(shards)) == 8


def test_a_worker_that_was_killed_while_idle_or_has_other_code_is_there_again_with_this_code(
    where: World, place: Callable[..., Place]
) -> None:
    services, code = where.services, where.services.spy / "code"
    code.write_text("0123456789abcdef")
    old = services.worker("rollout")
    services.worker("train").kill()
    old.kill()
    until(lambda: services.worker("rollout").pid != old.pid, SECONDS)
    code.unlink()
    made = place()
    said = finish(train(made), made)
    assert "grpo-rollout-0 starts anew: it runs other code (0123456789abcdef)" in said
    check(where, made)


def test_a_stage_that_hangs_is_ended_with_its_worker_after_stage_seconds(
    where: World, place: Callable[..., Place], accident: Accident
) -> None:
    made = place(ray={"address": where.services.state.ray_address, "stage_seconds": 3})
    accident.plan("hold", "begin", "rollout", 1)
    flow = train(made)
    said = finish(flow, made, code=1)
    assert "rollout 1 on grpo-rollout-0 took longer than placement.ray.stage_seconds=3 and was cancelled" in said
    assert "StageCancelledError" in accident.over(FEW_SECONDS)

    accident.plan("hang", "begin", "rollout", 1)
    worker = where.services.worker("rollout")
    finish(train(made), made, code=1)
    until(lambda: not worker.is_running(), FEW_SECONDS)
    accident.let_go()
    made.placement["ray"]["stage_seconds"] = SECONDS
    finish(train(made), made)
    check(where, made)


def test_two_runs_share_the_workers_at_the_same_time(where: World, place: Callable[..., Place]) -> None:
    places = [place("-a"), place("-b")]
    flows = [train(each) for each in places]
    for flow, each in zip(flows, places, strict=True):
        finish(flow, each)
        check(where, each)


def test_several_workers_share_the_shards_and_one_that_is_killed_is_not_waited_for(
    where: World, place: Callable[..., Place], accident: Accident
) -> None:
    address = where.services.state.ray_address
    made = place(ray={"address": address, "rollout_workers": 2, "score_workers": 1})
    before = len(generated(where))
    finish(train(made), made)
    check(where, made)
    assert len({each["pid"] for each in generated(where)[before:]}) == 2


def test_a_run_goes_on_while_the_head_is_gone(where: World, place: Callable[..., Place], accident: Accident) -> None:
    made = place()
    accident.plan("hold", "begin", "rollout", 1)
    flow = train(made)
    accident.wait()
    where.services.pause()
    try:
        where.services.kill("ray head")
        time.sleep(2)
        accident.let_go()
        finish(flow, made)
        check(where, made)
    finally:
        where.services.go_on()
    where.services.wait()
    again = place("-again")
    finish(train(again), again)


def test_a_resource_that_nobody_offers_and_a_cluster_that_is_not_there_are_said_with_the_remedy(
    where: World, place: Callable[..., Place], tmp_path: Path
) -> None:
    address = where.services.state.ray_address
    cases = {
        "score": (
            {"address": address, "score_workers": 2},
            "the run asks for 2 x SCORE (placement.ray), the cluster offers 1, and nobody offered more within "
            f"placement.wait=4 s; start one with `grpo worker --role score --address {address}`",
        ),
        "nobody": (
            {"address": "127.0.0.1:9"},
            "no Ray cluster answers at 127.0.0.1:9",
        ),
    }
    running = {}
    for name, (ray, _) in cases.items():
        made = place(f"-{name}", ray=ray, wait=4)
        file = tmp_path / f"{name}.yaml"
        file.write_text(yaml.safe_dump(made.values))
        command = [sys.executable, "-m", "flows.cli.main", "run", str(file)]
        running[name] = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    for name, (_, message) in cases.items():
        _, said = running[name].communicate(timeout=SECONDS)
        assert message in said and "Traceback" not in said, said[-3000:]
        assert running[name].returncode in (1, 2), said[-3000:]


def test_a_run_is_watched_and_cancelled_from_prefect(
    where: World, place: Callable[..., Place], accident: Accident, tmp_path: Path
) -> None:
    made = place()
    accident.plan("hold", "parts", "rollout", 0)
    log = (tmp_path / "serve.log").open("wb")
    served = subprocess.Popen(
        [sys.executable, "-m", "flows.cli.main", "serve"],
        cwd=ROOT, stdout=log, stderr=log, start_new_session=True,
    )  # fmt: skip
    try:
        asyncio.run(_watch_and_cancel(made, accident))
        assert "StageCancelledError" in accident.over(FEW_SECONDS)
    finally:
        os.killpg(served.pid, signal.SIGTERM)
        try:
            served.wait(FEW_SECONDS)
        except subprocess.TimeoutExpired:  # Prefect's worker may lose one that meets it in a flow's hook; not a second
            os.killpg(served.pid, signal.SIGTERM)
            served.wait(FEW_SECONDS)
        log.close()
    accident.let_go()
    finish(train(made), made)
    check(where, made)


async def _watch_and_cancel(place: Place, accident: Accident) -> None:
    from prefect.client.orchestration import PrefectClient
    from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId
    from prefect.states import Cancelling

    # Not get_client: an earlier test may have Prefect think of another server.
    async with PrefectClient(os.environ["PREFECT_API_URL"]) as client:

        async def until_true(happens: Callable[[], Any], seconds: float) -> Any:
            deadline = time.monotonic() + seconds
            while not (found := await happens()):
                assert time.monotonic() < deadline, f"not within {seconds:g} s"
                await asyncio.sleep(0.2)
            return found

        async def deployment() -> Any:
            found = {each.name: each for each in await client.read_deployments()}
            return found if {"train", "rerun-stage"} <= found.keys() else None

        deployments = await until_true(deployment, SECONDS)
        served, form = deployments["train"], deployments["rerun-stage"].parameter_openapi_schema
        assert {"run", "iteration", "stage", "settings", "name", "only_this_stage"} <= form["properties"].keys()
        assert form["required"] == ["run", "iteration", "stage"]
        run = await client.create_flow_run_from_deployment(served.id, parameters={"config": place.values})
        await asyncio.to_thread(accident.wait)

        async def lines() -> list[Any]:
            """What the worker said, in the logs of its task run, while it works."""
            logs = await client.read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run.id])), limit=200)
            said = [each for each in logs if each.task_run_id is not None and each.message.startswith("rollout 0: ")]
            held = any("held at parts" in each.message for each in said)
            return said if held and any("of 1000000" in each.message for each in said) else []

        await until_true(lines, SECONDS)
        await client.set_flow_run_state(run.id, Cancelling())

        async def cancelled() -> bool:
            state = (await client.read_flow_run(run.id)).state
            return state is not None and state.is_cancelled()

        await until_true(cancelled, SECONDS)
