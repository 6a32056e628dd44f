"""What is new, what is open, and what earlier rounds say."""

import json
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest

from grpo_lib.config import StoreConfig
from grpo_lib.config_data import FilesData
from grpo_lib.errors import CorruptError, DataError, LeaseLostError, RunError
from grpo_lib.retraining import promotion
from grpo_lib.retraining.arrivals import Watch, arrived, heldout_lines, replayed, snapshot
from grpo_lib.retraining.ledger import Ledger
from grpo_lib.retraining.promotion import conclude
from grpo_lib.retraining.records import Champion, Comparison, Decision, File, Judged, Plan, Row, Snapshot
from grpo_lib.tracking.registry import Registry

DIGEST = "0" * 64


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(StoreConfig(uri=str(tmp_path / "store")), "demo")


@pytest.fixture
def inbox(tmp_path: Path) -> Path:
    (tmp_path / "inbox").mkdir()
    return tmp_path / "inbox"


def data(inbox: Path) -> FilesData:
    return FilesData(train=[str(inbox)], heldout=["unused.jsonl"])


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def planned(ledger: Ledger, number: int, files: list[File], lines: list[bytes], champion: str | None = None) -> Plan:
    stored = snapshot(ledger, number, "prompts", lines)
    start = champion and Champion(version=champion, run="r", policy_version=1, policy_digest="", checkpoint="")
    plan = Plan(
        model="demo", round=number, run=f"demo-{number:06d}", champion=start or None, files=files, new=stored,
        replay=None, heldout=stored, config={}, rules={}, by="", at="", at_ms=0, code="",
    )  # fmt: skip
    return ledger.create(number, "plan.json", plan)


def judged(ledger: Ledger, plan: Plan, version: str) -> Judged:
    row = Row(prompts=1, champion=0, challenger=1, gain=1, low=0, high=1, p_better=0.01, p_worse=1)
    comparison = Comparison(
        mode="greedy", left_out=0, all=row, sources={}, champion="", challenger="", digests=[DIGEST] * 2
    )
    record = Judged(
        version=version, policy_version=1, policy_digest="", checkpoint="", comparison=comparison, against=[],
        flow_run=None, mlflow="", at="", at_ms=0,
    )  # fmt: skip
    return ledger.create(plan.round, "judged.json", record)


def decided(ledger: Ledger, number: int, outcome: Any, version: str | None = None, before: str | None = None) -> None:
    decision = Decision(
        model="demo", round=number, outcome=outcome, version=version, before=before, reasons=[], rule=None, by="",
        at="", at_ms=0,
    )  # fmt: skip
    ledger.create(number, "decision.json", decision)


def test_a_file_is_new_by_its_content_and_not_by_its_name(inbox: Path) -> None:
    write(inbox / "a.jsonl", {"prompt": "1", "reference": "x"})
    write(inbox / "b.jsonl", {"prompt": "2", "reference": "x"})
    first = arrived(data(inbox), set())
    assert [Path(each.file.path).name for each in first] == ["a.jsonl", "b.jsonl"]
    taken = {each.file.sha256 for each in first}
    (inbox / "a.jsonl").rename(inbox / "c.jsonl")
    write(inbox / "copy.jsonl", {"prompt": "2", "reference": "x"})
    assert arrived(data(inbox), taken) == []
    write(inbox / "b.jsonl", {"prompt": "3", "reference": "y"})
    (again,) = arrived(data(inbox), taken)
    assert again.lines == [b'{"prompt": "3", "reference": "y"}']
    write(inbox / "twin.jsonl", {"prompt": "3", "reference": "y"})
    assert len(arrived(data(inbox), taken)) == 1, "the same content counts once"


def test_an_empty_inbox_is_nothing_new_and_a_missing_one_is_an_error(inbox: Path) -> None:
    assert arrived(data(inbox), set()) == []
    with pytest.raises(DataError, match=r"there is no .*/elsewhere; name the folder in which prompt files arrive"):
        arrived(data(inbox / "elsewhere"), set())


def test_a_watch_reads_a_file_again_only_when_it_changed(inbox: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, reads = write(inbox / "a.jsonl", {"prompt": "1"}), []
    real = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda each: reads.append(each) or real(each))
    watch = Watch(data(inbox))
    ((name, digest),) = watch.new(set())
    assert (name, watch.new({digest}), watch.new(set())) == (str(path), [], [(name, digest)])
    assert len(reads) == 1
    write(path, {"prompt": "another"})
    ((_, other),) = watch.new({digest})
    assert other != digest
    assert len(reads) == 2


def test_only_rounds_with_a_verdict_take_their_files(ledger: Ledger) -> None:
    digests = [f"{number}" * 64 for number in range(1, 5)]
    for number, digest in enumerate(digests, start=1):
        planned(ledger, number, [File(path="x", sha256=digest, bytes=1, prompts=1)], [b"{}"])
    for number, outcome in enumerate(("promoted", "refused", "superseded", "abandoned"), start=1):
        opened = ledger.open()
        assert opened is not None
        assert opened.number == number
        decided(ledger, number, outcome, str(number))
    assert ledger.open() is None
    assert ledger.taken() == set(digests[:2])


def test_a_rollback_is_a_round_of_its_own_and_leaves_the_open_one_open(ledger: Ledger) -> None:
    planned(ledger, 1, [], [b"{}"])
    assert ledger.next_number() == 2
    decided(ledger, 2, "rolled back", "1", "2")
    opened = ledger.open()
    assert opened is not None
    assert opened.number == 1
    assert ledger.next_number() == 3


def test_the_first_record_of_its_name_stays(ledger: Ledger) -> None:
    first = planned(ledger, 1, [], [b"one"])
    assert planned(ledger, 1, [], [b"two"]) == first


def test_a_record_that_can_not_be_read_says_where_it_is(ledger: Ledger) -> None:
    ledger.objects.put_bytes("models/demo/rounds/000001/plan.json", b"{}")
    with pytest.raises(
        CorruptError, match=r"models/demo/rounds/000001/plan.json can't be read: .*restore it from a backup"
    ):
        ledger.rounds()


def test_replay_draws_from_what_was_learned_and_is_still_in_use(ledger: Ledger) -> None:
    """Version 2 started from 1 and was rolled back; 3 started from 1 again, 4 from 3."""
    for number, version, champion in ((1, "1", None), (2, "2", "1"), (4, "3", "1"), (5, "4", "3")):
        lines = [f'{{"prompt": "{number}-{row}"}}'.encode() for row in range(10)]
        judged(ledger, planned(ledger, number, [], lines, champion), version)
        decided(ledger, number, "promoted", version, champion)
    decided(ledger, 3, "rolled back", "1", "2")
    chains = {version: [plan.round for plan in ledger.learned(version)] for version in (None, "1", "2", "3", "4", "9")}
    assert chains == {None: [], "1": [1], "2": [1, 2], "3": [1, 4], "4": [1, 4, 5], "9": []}
    decided(ledger, 6, "rolled back", "2", "4")
    assert [plan.round for plan in ledger.learned("2")] == [1, 2], "it was gone back to: it learned what it learned"
    learned = ledger.learned("3")
    some = replayed(ledger, learned, 0.4, 0, 5)
    assert len(some) == 8
    assert {line[:13] for line in some} == {b'{"prompt": "1', b'{"prompt": "4'}
    assert some == replayed(ledger, learned, 0.4, 0, 5) != replayed(ledger, learned, 0.4, 0, 6)
    assert replayed(ledger, learned, 0.0, 0, 5) == []


def test_what_was_decided_otherwise_meanwhile_stays_and_the_champion_does_not_move(ledger: Ledger) -> None:
    class Aliases:
        moved: ClassVar[list[str]] = []

        def aliases(self, name: str) -> dict[str, str]:
            return {}

        def set_alias(self, name: str, alias: str, version: str) -> None:
            self.moved.append(version)

    plan, registry = planned(ledger, 1, [], [b"{}"]), cast(Registry, Aliases())
    challenger = judged(ledger, plan, "1")
    decided(ledger, 1, "refused", "1")
    ledger.mark_applied(1, "", "")
    with pytest.raises(RunError, match=r"round 1 of model 'demo' was decided meanwhile by .*: refused, version 1"):
        conclude(ledger, registry, plan, challenger, "promoted", [], by="late", rule=None)
    assert Aliases.moved == []
    assert conclude(ledger, registry, plan, challenger, "refused", [], by="late", rule=None).by == "", "the first stays"


def test_who_lost_the_lease_neither_decides_nor_moves_the_champion(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Untouched:
        def aliases(self, name: str) -> dict[str, str]:
            return {}

    def lost(place: object) -> None:
        raise LeaseLostError("another holds it")

    plan, registry = planned(ledger, 1, [], [b"{}"]), cast(Registry, Untouched())
    monkeypatch.setattr(promotion, "check_lease", lost)
    with pytest.raises(LeaseLostError):
        conclude(ledger, registry, plan, judged(ledger, plan, "1"), "promoted", [], by="paused", rule=None)
    assert ledger.rounds()[0].decision is None
    decided(ledger, 1, "promoted", "1")
    with pytest.raises(LeaseLostError), promotion.moving_champion(ledger, registry):
        raise AssertionError("an untold decision is told first")
    assert not ledger.rounds()[0].applied


def test_a_changed_snapshot_is_not_learned_from(ledger: Ledger) -> None:
    plan = planned(ledger, 1, [], [b'{"prompt": "1"}'])
    stored: Snapshot = plan.new
    ledger.objects.put_bytes(stored.path, b'{"prompt": "2"}\n')
    with pytest.raises(DataError, match="does not have the sha256 that was recorded"):
        replayed(ledger, [plan], 1.0, 0, 2)


def test_prompts_come_from_s3_and_are_read_again_from_the_store(s3_endpoint: str) -> None:
    import boto3

    from grpo_lib.config_retrain import RetrainConfig
    from grpo_lib.problems.files import load
    from grpo_lib.retraining.planning import training_config

    client = boto3.client("s3", endpoint_url=s3_endpoint, region_name="us-east-1")
    client.create_bucket(Bucket="retraining")
    put = {
        "inbox/a.jsonl": '{"question": "1+1", "reference": "2"}\n',
        "held.jsonl": '{"question": "9", "reference": "9"}\n',
    }
    for key, text in put.items():
        client.put_object(Bucket="retraining", Key=key, Body=text.encode())
    files = {"problem": "files", "columns": {"prompt": "question"}, "endpoint_url": s3_endpoint, "heldout_prompts": 1}
    files |= {"train": ["s3://retraining/inbox"], "heldout": ["s3://retraining/held.jsonl"]}
    train = {
        "data": files, "model": {"path": "model"}, "reward": {"functions": [{"name": "exact_match"}]},
        "store": {"uri": "s3://retraining/store", "endpoint_url": s3_endpoint}, "evaluation": {"prompts": 1},
    }  # fmt: skip
    config = RetrainConfig.model_validate({"model": "demo", "train": train})
    ledger = Ledger(config.train.store, "demo")
    (new,) = arrived(config.data, set())
    held = snapshot(ledger, 1, "heldout", heldout_lines(config.data))
    plan = planned(ledger, 1, [new.file], new.lines).model_copy(update={"heldout": held})
    client.delete_object(Bucket="retraining", Key="inbox/a.jsonl")
    made = training_config(config, ledger, plan).data
    rows = [load(made, split, 0).to_pylist()[0] for split in ("train", "heldout")]
    assert [(row["prompt"], row["reference"]) for row in rows] == [("1+1", "2"), ("9", "9")]
    assert arrived(config.data, {new.file.sha256}) == []


def test_columns_of_any_kind_come_through_the_store_as_they_would_from_their_file(inbox: Path, ledger: Ledger) -> None:
    import datetime
    from decimal import Decimal

    import pyarrow as pa
    import pyarrow.parquet

    from grpo_lib.problems.files import load

    turns = [[{"role": "system", "content": "short"}, {"role": "user", "content": "1+1"}]]
    columns = {
        "prompt": turns, "reference": pa.array([Decimal("2.50")]), "when": pa.array([datetime.date(2026, 11, 22)]),
        "weight": pa.array([0.1], type=pa.float32()), "prompt_id": ["one"], "note": pa.array([None], type=pa.string()),
    }  # fmt: skip
    pyarrow.parquet.write_table(pa.table(columns), inbox / "day.parquet")
    (new,) = arrived(data(inbox), set())
    stored = ledger.objects.location(snapshot(ledger, 1, "prompts", new.lines).path)
    held = write(inbox.parent / "held.jsonl", {"prompt": "9", "reference": "9"})
    rows = [
        load(FilesData(train=[place], heldout=[str(held)]), "train", 0).to_pylist()[0] for place in (str(inbox), stored)
    ]
    from_file, from_store = ({name: row[name] for name in row if name != "metadata"} for row in rows)
    assert from_file == from_store
    assert from_file["reference"] == "2.50"
    there = {name: value for name, value in json.loads(rows[0]["metadata"]).items() if value is not None}
    assert json.loads(rows[1]["metadata"]) == there == {"when": "2026-11-22", "weight": 0.1}
