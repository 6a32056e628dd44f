"""The warm worker without Ray: it runs one stage after another, and answers meanwhile."""

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import grpo_lib.progress as progress_module
from flows.cli.doctor_checks import differences
from grpo_lib.config_files import make_config
from grpo_lib.placement import local, ray_worker
from grpo_lib.placement.calls import StageCall
from grpo_lib.placement.code_version import module_digests
from grpo_lib.placement.ray_worker import KEPT_JOBS, StageWorker
from grpo_lib.placement.worker_status import WorkerStatus
from grpo_lib.run import Run
from tests.flows.tiny import TINY
from tests.unit.placement import worker_tasks
from tests.unit.placement.worker_tasks import SECONDS, Script, foreign, logger

Message = dict[str, Any]


@pytest.fixture
def worker() -> Iterator[StageWorker]:
    """A worker in this process, which afterwards is as it was."""
    sink, handlers, level = progress_module.progress(), list(logging.getLogger().handlers), logger.level
    threads = torch.get_num_threads()
    logger.setLevel(logging.INFO)
    worker_tasks.scripts.clear()
    worker_tasks.order.clear()
    assert local, "imported: a worker does so before its first stage"
    yield StageWorker("grpo-rollout-0", "score", 0.0)
    for script in worker_tasks.scripts.values():
        script.go.set()
    logging.getLogger().handlers[:] = handlers
    logger.setLevel(level)
    progress_module.show_progress_on(sink)
    torch.set_num_threads(threads)


def test_doctor_finds_nothing_in_a_worker_of_this_code_and_these_packages(worker: StageWorker) -> None:
    status = WorkerStatus.model_validate_json(worker.status())
    assert {"torch", "transformers"} <= status.versions.keys() and differences(status) == []


def call(key: str, *, epoch: int | None = None, store: str = "store", plugins: dict[str, str] | None = None) -> str:
    run = Run(make_config(TINY | {"store": {"uri": store}}))
    return StageCall(
        task="tests.unit.placement.worker_tasks:task",
        run=run.to_json(),
        stage="rollout",
        iteration=3,
        inputs=[],
        shard=1,
        key=key * 64,
        external={},
        folder=os.getcwd(),
        plugins=plugins or {},
        epoch=epoch,
    ).model_dump_json()


def script(key: str, body: Callable[[Script], None] = Script.until_told) -> Script:
    made = worker_tasks.scripts[key * 64] = Script(body)
    return made


def start(worker: StageWorker, text: str) -> str:
    return str(json.loads(worker.start(text))["id"])


def all_messages(worker: StageWorker, job: str) -> list[Message]:
    """Until the stage has ended."""
    messages: list[Message] = []
    until = time.monotonic() + SECONDS
    while not messages or messages[-1]["kind"] not in ("done", "failed"):
        messages += json.loads(worker.poll(job, len(messages), 1.0))
        assert time.monotonic() < until
    return messages


def status(worker: StageWorker) -> WorkerStatus:
    return WorkerStatus.model_validate_json(worker.status())


def test_what_a_stage_says_comes_in_order_and_once_and_its_result_last(worker: StageWorker) -> None:
    def body(_: Script) -> None:
        progress_module.progress().note("warming up")
        logger.info("loaded %d rows", 8)
        foreign.info("not ours, and no warning")
        foreign.warning("trouble")
        _.advance(10, 10)

    script("a", body)
    messages = all_messages(worker, start(worker, call("a")))
    assert [each["kind"] for each in messages] == ["note", "log", "log", "progress", "done"]
    assert messages[0]["text"] == "warming up"
    assert (messages[1]["text"], messages[1]["level"], messages[1]["source"]) == (
        "loaded 8 rows", logging.INFO, "grpo_lib.tests",
    )  # fmt: skip
    assert messages[2]["text"] == "trouble"
    expected = {"kind": "progress", "stage": "rollout", "iteration": 3, "done": 10, "total": 10, "tokens": 20}
    assert messages[3] == expected
    assert messages[4]["ref"]["key"] == "a" * 64


def test_a_poll_waits_for_news_but_not_longer_than_it_was_told(worker: StageWorker) -> None:
    made = script("a")
    job = start(worker, call("a"))
    assert made.begun.wait(SECONDS)
    seen = len(json.loads(worker.poll(job, 0, 1.0)))
    before = time.monotonic()
    assert json.loads(worker.poll(job, seen + 10**6, 0.2)) == []
    assert 0.15 < time.monotonic() - before < SECONDS / 2
    made.go.set()
    before = time.monotonic()
    all_messages(worker, job)
    assert time.monotonic() - before < SECONDS / 2
    assert json.loads(worker.poll("unknown", 0, 1.0)) is None


def test_frequent_progress_is_told_now_and_then_and_at_its_end(worker: StageWorker) -> None:
    def body(_: Script) -> None:
        for step in range(1, 1001):
            _.advance(step, 1000)

    script("a", body)
    messages = all_messages(worker, start(worker, call("a")))
    told = [each["done"] for each in messages if each["kind"] == "progress"]
    assert len(told) < 200 and told[-1] == 1000 and told == sorted(told)


def test_it_answers_while_it_works_and_says_at_what(worker: StageWorker) -> None:
    assert (status(worker).state, status(worker).name, status(worker).pid) == ("idle", "grpo-rollout-0", os.getpid())
    made, second = script("a"), script("b")
    first_job, second_job = start(worker, call("a", epoch=2)), start(worker, call("b", epoch=2))
    assert made.begun.wait(SECONDS)
    time.sleep(0.05)
    seen = status(worker)
    assert (seen.state, seen.run, seen.stage, seen.iteration, seen.shard) == ("busy", "tiny", "rollout", 3, 1)
    assert (seen.total, seen.epoch) == (10**6, 2) and seen.since is not None and seen.memory_bytes > 10**6
    assert not second.begun.is_set(), "one stage at a time"
    made.go.set()
    assert second.begun.wait(SECONDS)
    second.go.set()
    all_messages(worker, first_job)
    all_messages(worker, second_job)
    assert worker_tasks.order == ["a" * 64, "b" * 64]
    until = time.monotonic() + SECONDS
    while status(worker).state != "idle" and time.monotonic() < until:
        time.sleep(0.01)
    assert status(worker).state == "idle"


def test_the_stage_of_a_flow_that_died_is_joined_and_not_run_again(worker: StageWorker) -> None:
    made = script("a")
    job = start(worker, call("a", epoch=1))
    assert made.begun.wait(SECONDS)
    assert start(worker, call("a", epoch=1)) == job, "asked again, since the first answer was lost"
    assert start(worker, call("a", epoch=2)) == job
    made.go.set()
    assert all_messages(worker, job)[-1]["kind"] == "done"
    assert made.runs == 1


def test_a_later_flow_that_asks_for_something_else_cancels_what_was_left(worker: StageWorker) -> None:
    made, waiting, wanted, elsewhere = (
        script("a"),
        script("b"),
        script("c", lambda _: None),
        script("d", lambda _: None),
    )
    job, queued = start(worker, call("a", epoch=1)), start(worker, call("b", epoch=1))
    other = start(worker, call("d", epoch=1, store="another"))
    assert made.begun.wait(SECONDS)
    assert all_messages(worker, start(worker, call("c", epoch=2)))[-1]["kind"] == "done"
    assert all_messages(worker, job)[-1]["error"] == "StageCancelledError"
    assert all_messages(worker, queued)[-1]["error"] == "StageCancelledError"
    assert all_messages(worker, other)[-1]["kind"] == "done", "another run's"
    assert (waiting.runs, wanted.runs, elsewhere.runs) == (0, 1, 1)
    assert start(worker, call("a", epoch=2)) != job, "a cancelled stage is not joined"


def test_a_flow_of_a_lower_epoch_is_refused(worker: StageWorker) -> None:
    script("a", lambda _: None)
    all_messages(worker, start(worker, call("a", epoch=5)))
    answer = json.loads(worker.start(call("a", epoch=4)))
    assert "later flow" in answer["refused"]
    assert "id" in json.loads(worker.start(call("a", epoch=4, store="another"))), "epochs are counted by run"
    assert "id" in json.loads(worker.start(call("a"))), "an evaluation is no training flow"


def test_a_cancelled_stage_ends_at_its_next_sign_of_life_or_never_begins(worker: StageWorker) -> None:
    made, waiting = script("a"), script("b")
    job, queued = start(worker, call("a")), start(worker, call("b"))
    assert made.begun.wait(SECONDS)
    worker.cancel(queued)
    worker.cancel(job)
    worker.cancel("unknown")
    assert made.ended.wait(SECONDS)
    last = all_messages(worker, job)[-1]
    assert last["error"] == "StageCancelledError" and "rollout 3.1 was cancelled at" in last["message"]
    assert "before it began" in all_messages(worker, queued)[-1]["message"]
    assert waiting.runs == 0


def test_an_error_comes_with_what_the_flow_needs_to_raise_it_anew_and_the_worker_goes_on(worker: StageWorker) -> None:
    from grpo_lib.errors import NonFiniteError

    def ours(_: Script) -> None:
        raise NonFiniteError("loss is nan")

    def foreign_error(_: Script) -> None:
        raise SystemExit("enough")

    script("a", ours)
    script("b", foreign_error)
    script("c", lambda _: None)
    first = all_messages(worker, start(worker, call("a")))[-1]
    assert (first["kind"], first["error"], first["message"]) == ("failed", "NonFiniteError", "loss is nan")
    second = all_messages(worker, start(worker, call("b")))[-1]
    assert second["error"] is None and second["summary"] == "SystemExit: enough"
    assert "in foreign_error" in second["traceback"]
    assert all_messages(worker, start(worker, call("c")))[-1]["kind"] == "done"


def test_a_changed_module_of_the_user_needs_a_new_process(worker: StageWorker) -> None:
    script("a", lambda _: None)
    all_messages(worker, start(worker, call("a", plugins={"mine": "1" * 64})))
    answer = json.loads(worker.start(call("a", plugins={"mine": "2" * 64, "more": "3" * 64})))
    assert answer == {"stale": "mine changed since this worker imported it"}
    assert "id" in json.loads(worker.start(call("a", plugins={"mine": "1" * 64, "more": "3" * 64})))


def test_what_ended_long_ago_is_forgotten_and_what_runs_never(
    worker: StageWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_worker, "KEPT_JOBS", 3)
    assert KEPT_JOBS > 3
    script("a", lambda _: None)
    ended = []
    for _ in range(6):
        ended.append(start(worker, call("a")))
        all_messages(worker, ended[-1])
    made = script("b")
    running = start(worker, call("b"))
    assert made.begun.wait(SECONDS)
    assert json.loads(worker.poll(ended[0], 0, 0)) is None
    assert json.loads(worker.poll(ended[-1], 0, 0))[-1]["kind"] == "done"
    assert json.loads(worker.poll(running, 0, 0)) is not None


def test_a_stage_that_waits_is_cancelled_without_waiting_for_the_one_before_it(worker: StageWorker) -> None:
    first = script("a")
    script("b")
    start(worker, call("a", store="one"))
    assert first.begun.wait(SECONDS)
    waiting = start(worker, call("b", store="two"))
    worker.cancel(waiting)
    (message,) = json.loads(worker.poll(waiting, 0, 0.0))
    assert (message["kind"], message["error"]) == ("failed", "StageCancelledError")
    first.go.set()
    script("c", lambda _: None)
    assert all_messages(worker, start(worker, call("c", store="two")))[-1]["kind"] == "done"
    assert worker_tasks.order == ["a" * 64, "c" * 64], "what was cancelled never began"


def test_what_is_no_training_flow_is_left_alone_by_one(worker: StageWorker) -> None:
    made = script("a")
    evaluation = start(worker, call("a"))
    assert made.begun.wait(SECONDS)
    script("b", lambda _: None)
    start(worker, call("b", epoch=5))
    made.go.set()
    assert all_messages(worker, evaluation)[-1]["kind"] == "done"


def test_a_changed_module_waits_for_the_stage_of_another_run(worker: StageWorker) -> None:
    name = "tests.unit.placement.worker_tasks"
    digests = module_digests([name])
    made = script("a")
    start(worker, call("a", store="one", plugins=digests))
    assert made.begun.wait(SECONDS)
    changed = {name: "0" * 64}
    assert json.loads(worker.start(call("b", store="two", plugins=changed)))["busy"] == "tiny"
    assert "busy" not in json.loads(worker.start(call("b", store="one", plugins=changed)))


def test_a_module_that_is_another_than_the_flow_s_is_refused(worker: StageWorker) -> None:
    script("a")
    job = start(worker, call("a", plugins={"tests.unit.placement.worker_tasks": "0" * 64}))
    last = all_messages(worker, job)[-1]
    assert last["error"] == "ConfigError"
    assert "is not what the flow has" in last["message"]


def test_a_folder_as_store_is_the_flow_s_wherever_the_worker_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        places.append(Run(make_config(TINY | {"store": {"uri": str(Path("store").resolve())}})).to_json())
        made = Run(make_config(TINY | {"store": {"uri": "store"}})).to_json()
        assert Path(made["config"]["store"]["uri"]).is_absolute()
    monkeypatch.chdir(tmp_path)
    found = [Run.from_json(each).place for each in places]
    assert [Path(each).is_relative_to(tmp_path / name) for each, name in zip(found, ("one", "two"), strict=True)] == [
        True, True,
    ]  # fmt: skip
