"""The rounds of a registered model in the store, and what they say: what is new, what is open, what was decided."""

import time
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from pydantic import ValidationError

from grpo_lib.config import StoreConfig
from grpo_lib.config_files import make_config
from grpo_lib.errors import CorruptError
from grpo_lib.retraining.records import TAKEN, Applied, Decision, Judged, Plan
from grpo_lib.storage import paths
from grpo_lib.storage.claims import read_if_there, this_process
from grpo_lib.storage.lease import Held
from grpo_lib.storage.manifests import Record, canonical_json
from grpo_lib.storage.objects import ObjectStore, open_store

R = TypeVar("R", bound=Record)


@dataclass(frozen=True, kw_only=True)
class Round:
    """What is there of one."""

    number: int
    plan: Plan | None
    judged: Judged | None
    decision: Decision | None
    applied: bool


class Ledger:
    """Of one registered model."""

    def __init__(self, store: StoreConfig, model: str) -> None:
        self.store, self.model = store, model

    @cached_property
    def objects(self) -> ObjectStore:
        return open_store(self.store)

    @property
    def retraining(self) -> Held:
        """Held by who retrains the model."""
        return Held(objects=self.objects, name=f"retraining:{self.model}")

    @property
    def alias(self) -> Held:
        """Held, for a moment, by who moves the champion."""
        return Held(objects=self.objects, name=f"champion:{self.model}")

    def rounds(self) -> list[Round]:
        """All, oldest first.

        Raises:
            CorruptError: a record can't be read.
        """
        listed: dict[int, set[str]] = {}
        for info in self.objects.list(paths.rounds_folder(self.model)):
            number = paths.round_of(info.path)
            if number is not None:
                listed.setdefault(number, set()).add(paths.file_name(info.path))
        return [self._round(number, listed[number]) for number in sorted(listed)]

    def _round(self, number: int, names: set[str]) -> Round:
        def read(kind: type[R], name: str) -> R | None:
            return self.read(number, kind, name) if name in names else None

        return Round(
            number=number,
            plan=read(Plan, "plan.json"),
            judged=read(Judged, "judged.json"),
            decision=read(Decision, "decision.json"),
            applied="applied.json" in names,
        )

    def read(self, number: int, kind: type[R], name: str) -> R | None:
        """A record of a round; None: it is not there."""
        path = paths.round_file(self.model, number, name)
        content = read_if_there(self.objects, path)
        try:
            return None if content is None else kind.model_validate_json(content)
        except ValidationError as error:
            place = self.objects.location(path)
            raise CorruptError(f"{place} can't be read: {error.errors()[0]['msg']}; restore it from a backup") from None

    def create(self, number: int, name: str, record: R) -> R:
        """Writes a record unless there is one; returns what then is there."""
        path = paths.round_file(self.model, number, name)
        if self.objects.create(path, canonical_json(record.model_dump(mode="json"))):
            return record
        found = self.read(number, type(record), name)
        assert found is not None, f"{path} was there"
        return found

    def next_number(self) -> int:
        """After the last round of which there is a plan or a decision."""
        kept = [each.number for each in self.rounds() if each.plan is not None or each.decision is not None]
        return max(kept, default=0) + 1

    def open(self) -> Round | None:
        """The retraining that was planned and not decided: the same is run again."""
        return next((each for each in self.rounds() if each.plan is not None and each.decision is None), None)

    def taken(self) -> set[str]:
        """The watermark: sha256 of every file that a decided retraining has taken."""
        return {
            file.sha256
            for each in self.rounds()
            if each.plan is not None and each.decision is not None and each.decision.outcome in TAKEN
            for file in each.plan.files
        }

    def learned(self, version: str | None) -> list[Plan]:
        """Plans of the rounds that a version comes from, oldest first: its own, its champion's, and so on."""
        made: dict[str | None, Plan] = {
            each.judged.version: each.plan
            for each in self.rounds()
            if each.plan is not None and each.judged is not None
        }
        found: list[Plan] = []
        while plan := made.get(version):
            found.insert(0, plan)
            version = None if plan.champion is None else plan.champion.version
        return found

    def last_decided(self) -> int:
        """Number of the last round that was decided; 0: none was."""
        return max((each.number for each in self.rounds() if each.decision is not None), default=0)

    def unapplied(self) -> list[Round]:
        """Decisions of which MLflow may not know."""
        return [each for each in self.rounds() if each.decision is not None and not each.applied]

    def mark_applied(self, number: int, by: str, at: str) -> None:
        self.create(number, "applied.json", Applied(by=by, at=at))

    def tracking_uri(self) -> str | None:
        """Of the MLflow that the last retraining was told to log to; None: none was, or it has the default."""
        plans = [each.plan for each in self.rounds() if each.plan is not None]
        return make_config(dict(plans[-1].config)).tracking.uri if plans else None


def somebody() -> str:
    """Who this process belongs to, for records."""
    me = this_process()
    return f"{me.user} on {me.host}"


def now_ms() -> int:
    return time.time_ns() // 1_000_000
