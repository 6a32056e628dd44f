"""The flow's side of a cluster, against workers that do what a test says."""

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError

from grpo_lib.config import RunConfig
from grpo_lib.config_files import make_config
from grpo_lib.errors import (
    ConfigError,
    NobodyOffersError,
    NonFiniteError,
    StageCancelledError,
    WorkerError,
    WorkerLostError,
)
from grpo_lib.placement import ray_cluster
from grpo_lib.placement.calls import StageCall
from grpo_lib.placement.code_version import code_digest
from grpo_lib.placement.failures import failure_of
from grpo_lib.placement.ray_cluster import Cluster
from grpo_lib.run import Run
from grpo_lib.storage.manifests import ArtifactRef
from tests.flows.tiny import TINY

REF = ArtifactRef(
    stage="rollout", run="tiny", iteration=3, shard=0, key="a" * 64, manifest="runs/m.json", digest="d" * 64, rows=8,
    tokens=80, seconds=0.5,
)  # fmt: skip
DONE = {"kind": "done", "ref": REF.model_dump(mode="json")}
NOTE = {"kind": "note", "text": "warming up"}
LOST = ActorUnavailableError("the worker process has died", None)
SILENT = GetTimeoutError("no answer within 10 s")


class Method:
    """Of an actor's handle: what ``remote`` gives is answered by `answer_of`."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    def remote(self, *arguments: Any) -> Callable[[], Any]:
        return lambda: self._method(*arguments)


class FakeWorker:
    """Answers calls of ``poll`` with the lists of ``says``, one after another; an exception there is raised."""

    def __init__(self, name: str, says: list[Any] | None = None, code: str | None = None) -> None:
        self.name, self.says, self.code = name, list(says if says is not None else [[DONE]]), code or code_digest()
        self.started: list[StageCall] = []
        self.answers: list[Any] = []
        """Of ``start``, before it takes anything."""
        self.asleep: list[Exception] = []
        """What ``status`` raises, before it answers."""
        self.cancelled = 0
        self.shows: dict[str, Any] = {}
        """Further fields of its status."""
        self.start, self.poll = Method(self._start), Method(self._poll)
        self.cancel, self.status = Method(self._cancel), Method(self._status)

    def _start(self, text: str) -> str:
        if self.answers:
            return json.dumps(self.answers.pop(0))
        self.started.append(StageCall.model_validate_json(text))
        return json.dumps({"id": "job"})

    def _poll(self, job: str, seen: int, seconds: float) -> str:
        said = self.says.pop(0) if self.says else []
        if isinstance(said, Exception):
            raise said
        return json.dumps(said)

    def _cancel(self, job: str) -> None:
        self.cancelled += 1

    def _status(self) -> str:
        if self.asleep:
            raise self.asleep.pop(0)
        shown = {"name": self.name, "role": "rollout", "host": "here", "pid": 1, "state": "idle", "code": self.code}
        return json.dumps(shown | self.shows)


class FakeRay:
    """What there is of Ray."""

    def __init__(self) -> None:
        self.workers: dict[str, list[FakeWorker]] = {}
        """By name: those that are made one after another."""
        self.restarted: list[FakeWorker] = []
        self.ended: list[FakeWorker] = []
        self.offers = 1.0

    def handle(self, role: str, place: int, gpus: float) -> FakeWorker:
        name = f"grpo-{role}-{place}"
        made = self.workers.setdefault(name, [FakeWorker(name)])
        return made.pop(0) if len(made) > 1 else made[0]


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr(ray_cluster, "connect", lambda address: None)
    monkeypatch.setattr(ray_cluster, "worker_handle", fake.handle)
    monkeypatch.setattr(ray_cluster, "answer_of", lambda call: call())
    monkeypatch.setattr(ray_cluster, "restart", fake.restarted.append)
    monkeypatch.setattr(ray_cluster, "end", fake.ended.append)
    monkeypatch.setattr(ray_cluster, "offered", lambda resource: fake.offers)
    monkeypatch.setattr(ray_cluster, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(ray_cluster, "CANCEL_SECONDS", 0.2)
    return fake


def config(*settings: str) -> RunConfig:
    return make_config(TINY, ["placement.kind=ray", "placement.ray.address=head:6379", "placement.wait=0.3", *settings])


def call() -> StageCall:
    return StageCall(
        task="tasks.rollout:rollout", run=Run(config()).to_json(), stage="rollout", iteration=3, inputs=[], shard=0,
        key="a" * 64, external={}, folder="/", plugins={},
    )  # fmt: skip


def run(cluster: Cluster, heard: list[Any] | None = None) -> ArtifactRef:
    return cluster.run("rollout", call(), ([] if heard is None else heard).append)


def test_a_stage_gives_its_result_and_what_it_says_on_the_way(ray: FakeRay) -> None:
    worker = FakeWorker("grpo-rollout-0", [[NOTE, NOTE], [], [NOTE, DONE]])
    ray.workers["grpo-rollout-0"] = [worker]
    cluster, heard = Cluster(config()), []
    cluster.epoch = 7
    assert run(cluster, heard) == REF
    assert heard == [NOTE] * 3
    assert [each.epoch for each in worker.started] == [7]


def test_errors_of_stages_are_raised_anew_and_the_worker_is_free_again(ray: FakeRay) -> None:
    errors = [NonFiniteError("loss is nan"), ZeroDivisionError("by zero")]
    failed = [{"kind": "failed"} | failure_of(error) for error in errors]
    worker = FakeWorker("grpo-rollout-0", [[failed[0]], [failed[1]], [DONE]])
    ray.workers["grpo-rollout-0"] = [worker]
    cluster = Cluster(config())
    with pytest.raises(NonFiniteError, match="loss is nan"):
        run(cluster)
    with pytest.raises(WorkerError, match=r"grpo-rollout-0 raised ZeroDivisionError: by zero"):
        run(cluster)
    assert run(cluster) == REF
    assert worker.cancelled == 0


def test_a_flow_that_was_followed_by_another_is_told_so(ray: FakeRay) -> None:
    worker = FakeWorker("grpo-rollout-0")
    worker.answers = [{"refused": "run tiny goes on in a later flow than this one"}]
    ray.workers["grpo-rollout-0"] = [worker]
    with pytest.raises(StageCancelledError, match="later flow"):
        run(Cluster(config()))


def test_a_worker_with_old_modules_of_the_user_starts_anew(ray: FakeRay) -> None:
    worker = FakeWorker("grpo-rollout-0")
    worker.answers = [{"stale": "mine changed since this worker imported it"}]
    ray.workers["grpo-rollout-0"] = [worker]
    assert run(Cluster(config())) == REF
    assert ray.restarted == [worker]


@pytest.mark.parametrize("said", [LOST, None])
def test_a_worker_that_is_killed_in_a_stage_is_a_loss_and_the_next_attempt_waits_for_it(
    ray: FakeRay, said: Any
) -> None:
    worker = FakeWorker("grpo-rollout-0", [[NOTE], said, [DONE]])
    ray.workers["grpo-rollout-0"] = [worker]
    cluster = Cluster(config())
    with pytest.raises(WorkerLostError, match=r"grpo-rollout-0 was .* while it ran rollout 3"):
        run(cluster)
    worker.asleep = [LOST] * 5
    assert run(cluster) == REF
    assert not worker.asleep and len(worker.started) == 2


def test_among_several_workers_the_lost_one_comes_last_and_the_warm_one_first(ray: FakeRay) -> None:
    first = FakeWorker("grpo-rollout-0", [[DONE], LOST])
    second = FakeWorker("grpo-rollout-1", [[DONE], [DONE]])
    ray.workers = {"grpo-rollout-0": [first], "grpo-rollout-1": [second]}
    cluster = Cluster(config("placement.ray.rollout_workers=2"))
    run(cluster)
    with pytest.raises(WorkerLostError):
        run(cluster)
    run(cluster)
    run(cluster)
    assert (len(first.started), len(second.started)) == (2, 2)


def test_a_stage_that_takes_too_long_is_cancelled_or_its_worker_killed(ray: FakeRay) -> None:
    heeds, hangs = FakeWorker("grpo-rollout-0"), FakeWorker("grpo-rollout-0", [])
    cancelled = {"kind": "failed"} | failure_of(StageCancelledError("cancelled"))

    def say(job: str, seen: int, seconds: float) -> str:
        return json.dumps([cancelled] if heeds.cancelled else [])

    heeds.poll = Method(say)
    for worker, killed in ((heeds, []), (hangs, [hangs])):
        ray.workers["grpo-rollout-0"] = [worker]
        with pytest.raises(WorkerError, match=r"rollout 3 on grpo-rollout-0 took longer than .*stage_seconds=0\.1 and"):
            run(Cluster(config("placement.ray.stage_seconds=0.1")))
        assert worker.cancelled == 1
        assert ray.restarted == killed


def test_a_worker_that_is_silent_for_a_while_is_not_lost_but_one_that_stays_silent_is(ray: FakeRay) -> None:
    worker = FakeWorker("grpo-rollout-0", [[NOTE], SILENT, SILENT, [DONE]])
    ray.workers["grpo-rollout-0"] = [worker]
    assert run(Cluster(config())) == REF
    worker.says = [SILENT] * 10**6
    with pytest.raises(WorkerLostError, match="no answer within 10 s"):
        run(Cluster(config()))
    assert ray.restarted == []


def test_a_worker_that_can_not_be_told_to_stop_is_killed(ray: FakeRay) -> None:
    worker = FakeWorker("grpo-rollout-0", [SILENT] * 10**6)
    ray.workers["grpo-rollout-0"] = [worker]
    with pytest.raises(WorkerError, match="stage_seconds"):
        run(Cluster(config("placement.ray.stage_seconds=0.1")))
    assert ray.restarted == [worker]


def test_the_end_of_the_flow_cancels_what_runs_and_what_waits(ray: FakeRay) -> None:
    worker = FakeWorker("grpo-rollout-0", [])
    ray.workers["grpo-rollout-0"] = [worker]
    cluster = Cluster(config())
    raised: list[BaseException] = []

    def ask() -> None:
        with pytest.raises(StageCancelledError) as caught:
            run(cluster)
        raised.append(caught.value)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for each in threads:
        each.start()
    while not worker.started:
        pass
    cluster.stop()
    for each in threads:
        each.join(10)
    assert sorted(str(each) for each in raised) == ["rollout 3 was cancelled: its flow ends", "the flow ends"]
    assert worker.cancelled == 1
    with pytest.raises(StageCancelledError):
        run(cluster)


def test_a_worker_with_other_code_is_replaced_and_refused_if_that_does_not_help(ray: FakeRay) -> None:
    old, new = FakeWorker("grpo-rollout-0", code="other"), FakeWorker("grpo-rollout-0")
    ray.workers["grpo-rollout-0"] = [old, new]
    assert run(Cluster(config())) == REF
    assert (ray.ended, len(old.started), len(new.started)) == ([old], 0, 1)

    ray.workers["grpo-rollout-0"] = [old]
    with pytest.raises(ConfigError, match=r"runs other code \(other\) than this flow .*install the same version there"):
        run(Cluster(config()))


def test_a_handle_whose_worker_never_comes_back_is_asked_for_again(ray: FakeRay) -> None:
    dead, new = FakeWorker("grpo-rollout-0"), FakeWorker("grpo-rollout-0")
    dead.asleep = [ActorDiedError()] * 1000
    ray.workers["grpo-rollout-0"] = [dead, new]
    assert run(Cluster(config())) == REF
    assert len(new.started) == 1


def test_what_nobody_offers_is_said_with_the_command_that_starts_it(ray: FakeRay) -> None:
    train, rollout = FakeWorker("grpo-train-0"), FakeWorker("grpo-rollout-0")
    rollout.asleep = [GetTimeoutError("no answer within 10 s")] * 10_000
    ray.workers = {"grpo-train-0": [train], "grpo-rollout-0": [rollout]}
    for offers, match in (
        (0.0, r"asks for 1 x ROLLOUT .* offers 0, .*`grpo worker --role rollout --address head:6379`, or all with"),
        (1.0, r"grpo-rollout-0 did not come up within placement\.wait=0\.3 s \(no answer within 10 s\)"),
    ):
        ray.offers = offers
        with pytest.raises(WorkerLostError, match=match):
            Cluster(config()).check()


def test_the_end_of_the_flow_wakes_everybody_who_waits_for_a_worker(ray: FakeRay) -> None:
    cluster, ended = Cluster(config("placement.ray.rollout_workers=2")), []

    def work() -> None:
        try:
            run(cluster)
        except StageCancelledError as error:
            ended.append(error)

    for place in range(2):
        ray.workers[f"grpo-rollout-{place}"] = [FakeWorker(f"grpo-rollout-{place}", [])]
    threads = [threading.Thread(target=work, daemon=True) for _ in range(8)]
    for each in threads:
        each.start()
    time.sleep(0.1)
    cluster.stop()
    for each in threads:
        each.join(5)
    assert len(ended) == 8


def test_a_stage_that_an_earlier_flow_left_running_is_joined_where_it_runs(ray: FakeRay) -> None:
    workers = [FakeWorker(f"grpo-rollout-{place}", [[DONE], [DONE]]) for place in range(3)]
    workers[2].shows = {"state": "busy", "run": "tiny", "key": call().key}
    workers[0].shows = {"state": "busy", "run": "tiny", "key": "c" * 64}
    ray.workers |= {each.name: [each] for each in workers}
    cluster = Cluster(config("placement.ray.rollout_workers=3"))
    cluster.check()
    run(cluster)
    assert [len(each.started) for each in workers] == [0, 0, 1]
    cluster.run("rollout", call().model_copy(update={"key": "e" * 64}), [].append)
    assert [len(each.started) for each in workers] == [0, 0, 2], (
        "the warm one; the first still works for an earlier flow"
    )


def test_a_worker_with_other_code_that_works_for_another_run_is_waited_for(ray: FakeRay) -> None:
    busy = FakeWorker("grpo-rollout-0", code="f" * 16)
    busy.shows = {"state": "busy", "run": "another", "key": "c" * 64}
    ray.workers["grpo-rollout-0"] = [busy]
    with pytest.raises(WorkerLostError, match="is busy with run another"):
        run(Cluster(config()))
    assert ray.ended == []


def test_a_worker_of_another_version_starts_anew(ray: FakeRay) -> None:
    other, new = FakeWorker("grpo-rollout-0"), FakeWorker("grpo-rollout-0")
    other.shows = {"something": "new"}
    ray.workers["grpo-rollout-0"] = [other, new]
    assert run(Cluster(config())) == REF
    assert ray.ended == [other]


def test_a_changed_module_waits_until_another_run_has_what_it_asked_for(ray: FakeRay) -> None:
    worker = FakeWorker("grpo-rollout-0")
    stale = {"stale": "my_module changed since this worker imported it"}
    worker.answers = [stale | {"busy": "another"}, stale | {"busy": "another"}, stale]
    ray.workers["grpo-rollout-0"] = [worker]
    assert run(Cluster(config())) == REF
    assert ray.restarted == [worker]


def test_what_nobody_offers_is_not_asked_for_again_at_once(ray: FakeRay) -> None:
    ray.offers = 0.0
    ray.workers["grpo-rollout-0"] = [FakeWorker("grpo-rollout-0")]
    ray.workers["grpo-rollout-0"][0].asleep = [LOST] * 1000
    with pytest.raises(NobodyOffersError, match="grpo worker --role rollout"):
        run(Cluster(config()))
