"""Plays a scenario: runs the case, has everything happen, goes on until the end, and looks at what is there."""

import json
import resource
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil

from tests.chaos.case import CASE, Place
from tests.chaos.scenario import Fault, Scenario
from tests.chaos.world import World, differences, rollouts
from tests.flow_processes import FlowProcess
from tests.ray_set import gone_within

LIMIT_SECONDS = 240
POLL_SECONDS = 0.02
LOOK_SECONDS = {"folder": 0.02, "s3": 0.2}
"""Between two looks at what is committed."""
STRAY_SECONDS = 15
QUOTA_BYTES = 1500
FAILING_RATE = 0.4
ENDS_THE_FLOW = ("flow", "quota")
"""All else a flow has to live through."""
WORKERS = {"generation": "rollout", "rollout worker": "rollout", "train worker": "train"}
SERVICES = ("ray head", "ray node", "prefect", "mlflow")


@dataclass(frozen=True)
class Begun:
    """A shard that a worker began to generate."""

    at: float
    pid: int
    rows: int
    iteration: int
    first: int

    @property
    def shard(self) -> int:
        return self.first * CASE["rollout"]["shards"] // CASE["rollout"]["prompts"]


@dataclass
class Outcome:
    """What came of a scenario."""

    scenario: Scenario
    happened: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    flows: int = 0
    seconds: float = 0.0
    generated: int = 0
    """Rollouts that workers began to generate."""
    committed: int = 0
    in_flight: int = 0
    """Rollouts that were being made when their worker was killed, or could not be stored."""


class Game:
    """One scenario."""

    def __init__(self, world: World, scenario: Scenario) -> None:
        self.world, self.scenario = world, scenario
        self.outcome = Outcome(scenario)
        self.expected = world.undisturbed(scenario.store, scenario.variant)
        self.place = world.place(f"seed-{scenario.seed}", scenario.store, scenario.tracking, scenario.variant)
        world.begin(self.place)
        self.seen = len(self.begun())
        self.began = time.monotonic()
        self.lost: set[Begun] = set()
        self.full: list[tuple[float, float]] = []
        self.passing: list[threading.Timer] = []

    def play(self) -> Outcome:
        """Raises nothing: what goes wrong is in the outcome."""
        try:
            self.flow = self.start()
            for fault in self.scenario.faults:
                self.meet(fault)
            while self.runs():
                time.sleep(POLL_SECONDS)
        except TimeoutError as error:
            self.problem(str(error))
        finally:
            for each in self.passing:
                each.join()
        if self.flow.code is None:
            self.flow.kill()
        self.outcome.seconds = time.monotonic() - self.began
        self.world.services.wait()
        self.check()
        return self.outcome

    def start(self) -> FlowProcess:
        self.outcome.flows += 1
        return FlowProcess("train", self.place.values, self.place.log)

    def runs(self) -> bool:
        """Whether the run has not ended; a flow that ended too early is followed by another."""
        if time.monotonic() - self.began > LIMIT_SECONDS:
            raise TimeoutError(f"the run did not end within {LIMIT_SECONDS} s")
        if self.flow.code is None:
            return True
        if self.flow.code == 0:
            return False
        if not any(fault.kind == "quota" for fault in self.scenario.faults):
            self.problem(f"the flow ended with {self.flow.code} by itself: {last_line(self.place)}")
        for each in self.passing:
            each.join()  # people make room, and resume
        self.flow = self.start()
        return True

    def meet(self, fault: Fault) -> None:
        """Waits for the fault's moment, and lets it happen."""
        whole = len(self.expected.artifacts) + len(self.expected.published) - self.expected.begun
        due = self.expected.begun + fault.after * whole
        while (running := self.runs()) and len(self.place.committed()) < due:
            time.sleep(LOOK_SECONDS[self.scenario.store])
        if fault.kind == "generation":
            count = len(self.begun())
            while (running := self.runs()) and len(self.begun()) == count:
                time.sleep(0.002)
        time.sleep(fault.delay)
        if not running or not self.strike(fault):
            self.outcome.happened.append(f"{fault} (too late)")
            return
        self.outcome.happened.append(str(fault))

    def strike(self, fault: Fault) -> bool:
        """Whether there was anything to strike."""
        kind, services = fault.kind, self.world.services
        if kind == "flow":
            if self.flow.code is not None:
                return False
            self.flow.kill()
            self.flow = self.start()
        elif kind in WORKERS:
            self.kill(services.worker(WORKERS[kind]))
        elif kind == "rank":
            ranks = self.ranks()
            if not ranks:
                return False
            ranks[0].kill()
        elif kind in SERVICES:
            rollout = services.worker("rollout")
            services.pause()
            services.kill(kind)
            self.later(fault.seconds, services.go_on)
            if kind == "ray node":
                rollout.wait(STRAY_SECONDS)
                self.count(rollout.pid)
        elif kind == "store gone":
            self.world.proxy.away()
            self.later(fault.seconds, self.world.proxy.back)
        elif kind == "store failing":
            self.world.proxy.rate = FAILING_RATE
            self.later(fault.seconds, lambda: setattr(self.world.proxy, "rate", 0.0))
        else:
            self.fill_the_disk(fault.seconds)
        return True

    def kill(self, process: psutil.Process) -> None:
        process.kill()
        gone_within(STRAY_SECONDS, lambda: [process] if process.is_running() and process.status() != "zombie" else [])
        self.count(process.pid)

    def count(self, pid: int) -> None:
        """What a process that was killed had begun and not committed."""
        committed = self.created()
        self.lost |= {
            each for each in self.begun() if each.pid == pid and (each.iteration, each.shard) not in committed
        }

    def ranks(self) -> list[psutil.Process]:
        """Of the trainer, as soon as they are there."""
        while self.runs():
            found = []
            for each in self.world.services.worker("train").children(recursive=True):
                command = " ".join(each.cmdline())
                if "grpo_lib.placement.rank_main" in command and "torch.distributed.run" not in command:
                    found.append(each)
            if found:
                return found
            time.sleep(POLL_SECONDS)
        return []

    def fill_the_disk(self, seconds: float) -> None:
        """Flow and workers can't write files of more than a few bytes, as beyond a quota, until people make room."""
        services = self.world.services
        pids = [self.flow.pid, services.worker("rollout").pid, services.worker("train").pid]
        limits = {pid: resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in pids}
        start = time.time()
        for pid, (_, hard) in limits.items():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (QUOTA_BYTES, hard))

        def make_room() -> None:
            for pid, limit in limits.items():
                try:
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)
                except ProcessLookupError:
                    pass  # the flow has ended
            self.full.append((start, time.time()))

        self.later(seconds, make_room)

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        timer = threading.Timer(seconds, action)
        timer.start()
        self.passing.append(timer)

    def begun(self) -> list[Begun]:
        """What workers began to generate in this scenario."""
        file = self.world.services.spy / "generated"
        lines = file.read_text().splitlines() if file.exists() else []
        return [Begun(**json.loads(line)) for line in lines[getattr(self, "seen", 0) :]]

    def created(self) -> dict[tuple[int | None, int], float]:
        """When each shard was committed."""
        manifests = rollouts(self.place.run().stages.manifests())
        return {(each.iteration, each.shard): each.created_ms / 1000 for each in manifests}

    def problem(self, text: str) -> None:
        self.outcome.problems.append(text)

    def check(self) -> None:
        """Compares everything with the undisturbed run."""
        found = self.world.found(self.place, begun=self.expected.begun)
        self.outcome.problems += differences(found, self.expected)
        try:
            self.world.verify(self.place)
        except Exception as error:
            self.problem(f"{type(error).__name__}: {error}")
        self.check_rollouts()
        strays = gone_within(STRAY_SECONDS, self.world.services.strays)
        if strays:
            self.problem(f"processes are left: {[' '.join(each.cmdline())[:80] for each in strays]}")

    def check_rollouts(self) -> None:
        """Generated is what was committed and what was in flight when something was killed; never after a commit."""
        begun, created = self.begun(), self.created()
        for each in begun:
            if each.at > created.get((each.iteration, each.shard), float("inf")):
                self.problem(f"{each.iteration}.{each.shard} was generated again after it was committed")
        for start, end in self.full:
            self.lost |= {each for each in begun if self.follower(each, begun, start, end)}
        outcome = self.outcome
        manifests = rollouts(self.place.run().stages.manifests())
        outcome.generated = sum(each.rows for each in begun)
        outcome.committed = sum(each.rows for each in manifests)
        outcome.in_flight = sum(each.rows for each in self.lost)
        if outcome.generated != outcome.committed + outcome.in_flight:
            self.problem(
                f"{outcome.generated} rollouts were generated, {outcome.committed} committed and {outcome.in_flight} "
                "in flight when something was killed"
            )

    def follower(self, lost: Begun, begun: list[Begun], start: float, end: float) -> bool:
        """Whether a shard was begun again after an attempt that could not be stored on the full disk."""
        again = [each.at for each in begun if (each.iteration, each.shard) == (lost.iteration, lost.shard)]
        later = [at for at in again if at > lost.at]
        return bool(later) and lost.at <= end and min(later) >= start


def last_line(place: Place) -> str:
    lines = [line for line in place.log.read_text().splitlines() if line.strip()]
    return lines[-1][:500] if lines else "(it said nothing)"
