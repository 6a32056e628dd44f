"""A model's days: better on new prompts, worse on poisoned ones, rolled back; killed, asked for approval, held up.

The policies really are better and worse. Over seeds 0 to 4 the gain was at least 0.22 on day 1 and 0.09 on day 2, and
at most -0.15 on day 3, each with the smallest p-value that 9,999 resamples can give.
"""

import json
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import yaml
from mlflow import MlflowClient
from typer.testing import CliRunner

from grpo_lib.config_retrain import RetrainConfig
from grpo_lib.errors import ConfigError, DataError, LeaseHeldError, RunError
from grpo_lib.retraining.ledger import Ledger
from grpo_lib.retraining.planning import champion_of
from grpo_lib.retraining.promotion import conclude
from grpo_lib.retraining.records import Judged, Plan
from grpo_lib.run import load_run
from grpo_lib.storage.lease import holding
from grpo_lib.storage.manifests import Manifest
from grpo_lib.tracking.registry import Registry
from tests.flow_processes import FlowProcess
from tests.flows.letters import retraining, write_model, write_prompts
from tests.flows.runs import fresh_process, of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
KILL_SECONDS = 180


@dataclass(kw_only=True)
class Story:
    """What happened, day by day."""

    folder: Path
    config: RetrainConfig
    day: dict[int, Any] = field(default_factory=dict)
    """Reports."""
    waiting: Any = None
    aliases: dict[str, dict[str, str]] = field(default_factory=dict)
    """After each event."""
    before_kill: list[Manifest] = field(default_factory=list)
    after_kill: list[Manifest] = field(default_factory=list)
    idle: Any = None
    rolled_back: Any = None

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.config.train.store, "letters")

    @property
    def registry(self) -> Registry:
        return Registry(self.config.train)

    @property
    def mlflow(self) -> MlflowClient:
        return MlflowClient(self.registry.uri, self.registry.uri)

    def manifests(self, run: str) -> list[Manifest]:
        return load_run(self.config.train.store, run).manifests()

    def note_aliases(self, event: str) -> None:
        self.aliases[event] = self.registry.aliases("letters")


def command(*arguments: str) -> Any:
    """What `grpo` prints with --json."""
    from flows.cli.main import app

    done = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def story(
    tmp_path_factory: pytest.TempPathFactory, prefect_here: str, prefect_server: dict[str, str]
) -> Iterator[Story]:
    from flows.retrain import RetrainReport, retrain

    folder = tmp_path_factory.mktemp("letters")
    values = retraining(folder, write_model(folder / "model"))
    (folder / "retrain.yaml").write_text(yaml.safe_dump(values))
    write_prompts(folder / "heldout.jsonl", 128, 9)
    story = Story(folder=folder, config=RetrainConfig.model_validate(values))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in prefect_server.items():
            patch.setenv(name, value)

        write_prompts(folder / "inbox" / "day1.jsonl", 200, 1)
        story.day[1] = command("retrain", str(folder / "retrain.yaml"))
        story.note_aliases("day 1")

        write_prompts(folder / "inbox" / "day2.jsonl", 200, 2)
        story.before_kill = killed_half_way(story, values | {"approval": "manual"})
        story.note_aliases("killed")
        write_prompts(folder / "inbox" / "day3.jsonl", 200, 3, poisoned=True)  # arrives while nobody works
        (folder / "inbox" / "day2.jsonl").unlink()  # what a round has taken is in the store
        fresh_process()
        careful = story.config.model_copy(update={"approval": "manual"})
        story.waiting = retrain(careful)
        story.note_aliases("asked")
        words = ("approval=manual", "--yes", "2", "--reason", "seen the rollouts")
        story.day[2] = RetrainReport.model_validate(command("retrain", str(folder / "retrain.yaml"), *words))
        story.after_kill = story.manifests("letters-000002")
        story.note_aliases("day 2")

        story.day[3] = retrain(story.config)
        story.note_aliases("day 3")
        story.idle = retrain(story.config, return_state=True)

        story.rolled_back = command(
            "rollback", "letters", "--store", story.config.train.store.uri, "--reason", "users complain"
        )
        story.note_aliases("rollback")
        yield story


def killed_half_way(story: Story, values: dict[str, Any]) -> list[Manifest]:
    """Kills a retraining when three of six updates are committed; returns what is."""
    process = FlowProcess("retrain", values, story.folder / "killed.log")
    updates = Path(story.config.train.store.uri) / "runs" / "letters-000002" / "iterations" / "000002" / "update"
    deadline = time.monotonic() + KILL_SECONDS
    while not list(updates.glob("*/manifest.json")):
        assert process.code is None, (story.folder / "killed.log").read_text()[-3000:]
        assert time.monotonic() < deadline, "it came to no third update"
        time.sleep(0.02)
    process.kill()
    return story.manifests("letters-000002")


def test_the_first_champion_is_better_than_what_it_started_from(story: Story) -> None:
    report = story.day[1]
    row = report["comparison"]["all"]
    assert (report["status"], report["version"], report["before"], row["prompts"]) == ("promoted", "1", None, 128)
    assert row["gain"] == pytest.approx(row["challenger"] - row["champion"]) and row["gain"] > 0.1
    assert row["p_better"] < 0.001 and row["low"] > 0.05
    assert set(report["comparison"]["sources"]) == {"even", "odd"}
    assert story.aliases["day 1"] == {"champion": "1"}


def test_a_better_policy_that_starts_from_the_champion_takes_its_place(story: Story) -> None:
    report = story.day[2]
    assert (report.status, report.version, report.before) == ("promoted", "2", "1")
    before = story.day[1]["comparison"]["all"]["challenger"]
    assert report.comparison.all.champion == pytest.approx(before), "the same policy, prompts and seeds as yesterday"
    assert report.comparison.all.gain > 0.03
    assert story.aliases["day 2"] == {"champion": "2"}
    (first,) = of(story.after_kill, "inherited")
    assert first.summary["policy_digest"] == story.ledger.rounds()[0].judged.policy_digest  # type: ignore[union-attr]
    assert first.summary["run"] == "letters-000001"


def test_a_policy_that_learned_from_poisoned_references_is_refused_and_the_champion_stays(story: Story) -> None:
    report = story.day[3]
    assert report.status == "refused"
    assert report.comparison.all.gain < -0.05
    assert any(each.startswith("source odd loses 0.") for each in report.reasons)
    assert story.aliases["day 3"] == {"champion": "2"}
    tags = story.mlflow.get_model_version("letters", report.version).tags
    assert tags["grpo.decision"] == "refused"
    assert "promotion.min_gain" in tags["grpo.decision.reasons"]


def test_a_killed_retraining_goes_on_with_what_it_had_taken_and_committed(story: Story) -> None:
    before = {each.path: each.digest for each in story.before_kill}
    after = {each.path: each.digest for each in story.after_kill}
    assert len(of(story.before_kill, "update")) >= 3
    assert len(of(story.before_kill, "update")) < 6, "it was killed in its middle"
    assert before.items() <= after.items(), "nothing was made again"
    assert story.aliases["killed"] == {"champion": "1"}
    assert [each.iteration for each in of(story.after_kill, "update")] == list(range(6))
    plan = story.ledger.rounds()[1].plan
    assert plan is not None
    assert [Path(each.path).name for each in plan.files] == ["day2.jsonl"], "what came later is for the next"
    third = story.ledger.rounds()[2].plan
    assert third is not None
    assert [Path(each.path).name for each in third.files] == ["day3.jsonl"]


def test_with_manual_approval_the_challenger_waits_for_a_person(story: Story) -> None:
    assert (story.waiting.status, story.waiting.version) == ("waiting", "2")
    assert story.aliases["asked"] == {"champion": "1", "challenger": "2"}
    decision = story.ledger.rounds()[1].decision
    assert decision is not None
    assert decision.reasons[-1] == "seen the rollouts"
    assert decision.by == story.mlflow.get_model_version("letters", "2").tags["grpo.decision.by"]


def test_nothing_new_is_nothing_to_do(story: Story) -> None:
    assert (story.idle.type.value, story.idle.name) == ("COMPLETED", "NothingToDo")
    assert story.idle.result().status == "nothing to do"
    assert len(story.ledger.rounds()) == 4, "three retrainings and the rollback"


def test_a_rollback_goes_to_the_champion_before_and_is_recorded(story: Story) -> None:
    assert story.aliases["rollback"] == {"champion": "1"}
    assert (story.rolled_back["version"], story.rolled_back["before"]) == ("1", "2")
    decision = story.ledger.rounds()[3].decision
    assert decision is not None
    assert (decision.outcome, decision.reasons) == ("rolled back", ["users complain"])
    assert story.mlflow.get_model_version("letters", "2").tags["grpo.decision"] == "rolled back"
    listed = command("models", "letters", "--store", story.config.train.store.uri)["versions"]
    assert [(each["version"], each["aliases"], each["decision"]) for each in listed] == [
        ("3", [], "refused"),
        ("2", [], "rolled back"),
        ("1", ["champion"], "promoted"),
    ]
    note = story.mlflow.get_model_version("letters", "1").description
    assert "| all | 128 |" in note


def test_a_version_without_one_before_needs_a_name_to_roll_back_to(story: Story) -> None:
    from grpo_lib.retraining.promotion import roll_back

    with pytest.raises(LookupError, match="version 1 of model 'letters' took no champion's place; name one with --to"):
        roll_back(story.ledger, story.registry, None, "")
    with pytest.raises(LookupError, match="no version 9; it has 3, 2, 1"):
        roll_back(story.ledger, story.registry, "9", "")
    with pytest.raises(ConfigError, match="version 1 is the champion of model 'letters' already"):
        roll_back(story.ledger, story.registry, "1", "")


def test_a_challenger_whose_champion_was_replaced_meanwhile_is_not_promoted(story: Story) -> None:
    """Day 2's challenger started from version 1; that it may not take the place of another."""
    second = story.ledger.rounds()[1]
    assert second.plan is not None
    assert second.plan.champion is not None
    number = story.ledger.next_number()
    other = second.plan.champion.model_copy(update={"version": "3"})
    late: Plan = second.plan.model_copy(update={"round": number, "champion": other})
    story.ledger.create(number, "plan.json", late)
    judged: Judged | None = second.judged
    before = story.registry.aliases("letters")
    rule = story.config.promotion
    decision = conclude(story.ledger, story.registry, late, judged, "promoted", ["good"], by="the rule", rule=rule)
    assert decision.outcome == "superseded"
    assert decision.reasons == ["the champion is now version 1, the challenger started from 3", "good"]
    assert story.registry.aliases("letters") == before


def test_what_a_crash_left_untold_is_told_before_anything_else(story: Story) -> None:
    """The alias follows the committed decision, although whoever decided died before MLflow heard of it."""
    from flows.retrain import retrain

    last = story.ledger.rounds()[3]
    assert last.applied
    story.ledger.objects.delete([f"models/letters/rounds/{last.number:06d}/applied.json"])
    story.registry.set_alias("letters", "champion", "3")
    retrain(story.config)
    assert story.registry.aliases("letters")["champion"] == "1"
    assert story.ledger.unapplied() == []


def test_the_second_of_two_is_refused_or_waits_as_configured(story: Story) -> None:
    from flows.retrain import retrain

    busy, released = threading.Event(), []

    def first() -> None:
        with holding(story.ledger.retraining):
            busy.set()
            time.sleep(3)
        released.append(time.monotonic())

    thread = threading.Thread(target=first)
    thread.start()
    assert busy.wait(30)
    with pytest.raises(LeaseHeldError, match="retraining 'letters' is held by process"):
        retrain(story.config.model_copy(update={"when_busy": "refuse"}))
    assert not released
    assert retrain(story.config).status == "nothing to do"  # type: ignore[union-attr]
    assert released
    thread.join()


def test_files_that_can_not_be_used_leave_no_round_behind(story: Story) -> None:
    from flows.retrain import retrain

    bad = story.folder / "inbox" / "bad.jsonl"
    bad.write_text('{"prompt": "12", "reference": "A"}\n' * 3 + '{"prompt": "13"}\n' * 20)
    rounds = len(story.ledger.rounds())
    try:
        with pytest.raises(DataError, match="20 of 23 rows have no reference"):
            retrain(story.config)
    finally:
        bad.unlink()
    assert story.ledger.open() is None
    assert story.ledger.next_number() == rounds + 1


def test_other_settings_do_not_go_on_with_an_open_round_and_it_can_be_abandoned(story: Story) -> None:
    from flows.retrain import retrain

    second = story.ledger.rounds()[1].plan
    assert second is not None
    number = story.ledger.next_number()
    files = [each.model_copy(update={"sha256": uuid4().hex * 2}) for each in second.files]
    story.ledger.create(number, "plan.json", second.model_copy(update={"round": number, "files": files}))
    changed = story.config.model_copy(update={"train": story.config.train.model_copy(update={"seed": 5})})
    differ = r"\(seed: 0 -> 5; approval: manual -> auto"
    with pytest.raises(ConfigError, match=rf"round {number} of model 'letters' began with other settings {differ}"):
        retrain(changed)
    said = command("retrain", str(story.folder / "retrain.yaml"), "--abandon", "wrong seed")
    assert (said["outcome"], said["reasons"]) == ("abandoned", ["wrong seed"])
    assert not {each.sha256 for each in files} & story.ledger.taken(), "they are new again"
    assert retrain(story.config).status == "nothing to do"  # type: ignore[union-attr]


def test_nobody_who_answers_in_time_is_a_refusal(story: Story) -> None:
    from flows.retrain import Answer, ask

    second = story.ledger.rounds()[1]
    assert second.plan is not None
    assert second.judged is not None
    late = second.judged.model_copy(update={"at_ms": second.judged.at_ms - 3 * 3_600_000})
    config = story.config.model_copy(update={"approval": "manual", "approval_hours": 2.0})
    assert ask(config, second.plan, second.judged, None) is None
    for answer in (None, Answer(version="2", promote=True)):
        said = ask(config, second.plan, late, answer)
        assert said is not None
        assert (said.promote, said.by) == (False, "the deadline")
        assert said.reason == "no approval within approval_hours=2"


def test_an_answer_is_to_the_version_that_waits_and_to_no_other(story: Story) -> None:
    from flows.retrain import Answer, decide, retrain

    rounds = len(story.ledger.rounds())
    with pytest.raises(ConfigError, match="to version 2 of model 'letters', which does not wait for one; none does"):
        retrain(story.config, Answer(version="2", promote=True))
    assert len(story.ledger.rounds()) == rounds, "nothing is begun"
    second = story.ledger.rounds()[1]
    assert second.plan is not None and second.judged is not None
    waits = second.judged.model_copy(update={"version": "7", "at_ms": second.judged.at_ms + 10**9})
    careful = story.config.model_copy(update={"approval": "manual"})
    late = Answer(version="2", promote=True)
    with pytest.raises(ConfigError, match="version 7 does: `grpo retrain CONFIG --yes 7` or --no"):
        decide(careful, story.ledger, story.registry, second.plan, waits, late)


def test_a_command_has_one_answer(story: Story) -> None:
    from flows.cli.main import app

    for words in (["--yes", "2", "--no", "2"], ["--no", "2", "--abandon", "wrong"]):
        done = CliRunner().invoke(app, ["retrain", str(story.folder / "retrain.yaml"), *words])
        assert done.exit_code == 2
        assert "exclude each other" in done.output


def test_a_rollback_while_the_files_are_checked_is_what_the_round_starts_from(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    from grpo_lib.retraining import planning
    from grpo_lib.retraining.promotion import abandon, roll_back

    write_prompts(story.folder / "inbox" / "day4.jsonl", 20, 4)
    current, other = story.registry.aliases("letters")["champion"], "2"
    checked, rolled = planning.check_surroundings, []

    def slow(config: Any) -> None:
        checked(config)
        if not rolled:
            rolled.append(roll_back(story.ledger, story.registry, other, "meanwhile"))

    monkeypatch.setattr(planning, "check_surroundings", slow)
    try:
        plan = planning.next_plan(story.config, story.ledger, story.registry)
        assert plan is not None and plan.champion is not None
        assert (plan.round, plan.champion.version) == (rolled[0].round + 1, other)
        assert plan.config["model"]["start"]["run"] == "letters-000002"  # type: ignore[index, call-overload]
        opened = story.ledger.open()
        assert opened is not None and opened.plan == plan
        assert story.ledger.unapplied() == []
    finally:
        (story.folder / "inbox" / "day4.jsonl").unlink()
        abandon(story.ledger, story.registry, "it was a test")
        roll_back(story.ledger, story.registry, current, "it was a test")


def test_a_training_that_always_fails_leaves_the_champion_alone_until_the_form_ends_its_round(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    import flows.retrain

    def fails(*_: Any, **__: Any) -> None:
        raise RunError("no GPU is left")

    day = write_prompts(story.folder / "inbox" / "day5.jsonl", 20, 5)
    aliases = story.registry.aliases("letters")
    monkeypatch.setattr(flows.retrain, "train", fails)
    for _ in range(2):
        with pytest.raises(RunError, match="no GPU is left"):
            flows.retrain.retrain(story.config)
    opened = story.ledger.open()
    assert opened is not None
    ended = flows.retrain.retrain(story.config, abandon="no GPU", return_state=True)
    assert (ended.type.value, ended.name, ended.message) == ("COMPLETED", "Abandoned", "letters: no GPU")
    assert story.ledger.open() is None
    assert story.ledger.last_decided() == opened.number
    assert story.registry.aliases("letters") == aliases
    with pytest.raises(ConfigError, match="`answer` and `abandon` exclude each other"):
        flows.retrain.retrain(story.config, flows.retrain.Answer(version="2", promote=True), "both")
    assert not {each.sha256 for each in opened.plan.files} & story.ledger.taken()  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="has no open round; there is nothing to abandon"):
        flows.retrain.retrain(story.config, abandon="again")
    day.unlink()


def test_a_version_that_was_made_by_hand_is_named_and_never_gone_to(story: Story) -> None:
    from grpo_lib.retraining.promotion import roll_back

    hand = Ledger(story.config.train.store, "hand")
    story.mlflow.create_registered_model("hand")
    for _ in range(2):
        story.mlflow.create_model_version("hand", str(story.folder))
    story.registry.set_alias("hand", "champion", "2")
    with pytest.raises(LookupError, match=r"version 2 of model 'hand' has no tag grpo\.\w+: it was made by hand"):
        story.registry.at("hand", "champion")
    with pytest.raises(LookupError, match="version 1 of model 'hand' has no tag"):
        roll_back(hand, story.registry, "1", "")
    with pytest.raises(LookupError, match="version 2 of model 'hand' has no tag"):
        champion_of(story.config.model_copy(update={"model": "hand"}), story.registry)
    assert story.registry.versions("hand") == {}
    assert [each["version"] for each in command("models", "hand", "--store", story.config.train.store.uri)["versions"]]
    assert story.registry.aliases("hand") == {"champion": "2"} and hand.rounds() == []


def test_a_version_whose_weights_are_gone_is_not_gone_back_to(story: Story) -> None:
    from grpo_lib.retraining.promotion import roll_back

    before, rounds = story.registry.aliases("letters"), len(story.ledger.rounds())
    (weights,) = Path(story.registry.version("letters", "3").place).glob("model.safetensors")
    weights.rename(weights.with_suffix(".away"))
    try:
        with pytest.raises(LookupError, match=r"model.safetensors is gone; `grpo verify letters-000003`"):
            roll_back(story.ledger, story.registry, "3", "")
    finally:
        weights.with_suffix(".away").rename(weights)
    assert story.registry.aliases("letters") == before
    assert len(story.ledger.rounds()) == rounds


def test_a_kill_at_any_step_of_a_decision_moves_the_champion_once(story: Story, tmp_path: Path) -> None:
    """One round; each process dies one step further than the one before, the last finds nothing left to do."""
    values = retraining(tmp_path, story.folder / "model") | {"model": "killed"}
    write_prompts(tmp_path / "heldout.jsonl", 128, 9)
    write_prompts(tmp_path / "inbox" / "day1.jsonl", 200, 1)
    config = RetrainConfig.model_validate(values)
    ledger, registry = Ledger(config.train.store, "killed"), Registry(config.train)
    steps: list[tuple[str, set[str], dict[str, str]]] = [
        ("before judged.json", set(), {"challenger": "1"}),
        ("after judged.json", {"judged"}, {"challenger": "1"}),
        ("before decision.json", {"judged"}, {"challenger": "1"}),
        ("after decision.json", {"judged", "decision"}, {"challenger": "1"}),
        ("before applied.json", {"judged", "decision"}, {"champion": "1"}),
        ("after applied.json", {"judged", "decision", "applied"}, {"champion": "1"}),
    ]
    told: list[str] = []
    for point, there, aliases in steps:
        if point == "after applied.json":
            shown = registry.tags("killed")["1"]
        process = FlowProcess("retrain", values, tmp_path / "log", dies=point)
        assert process.wait(KILL_SECONDS) == -signal.SIGKILL, (point, (tmp_path / "log").read_text()[-3000:])
        (found,) = ledger.rounds()
        assert {each for each in ("judged", "decision", "applied") if getattr(found, each)} == there, point
        assert registry.aliases("killed") == aliases, point
        told += [found.decision.at] if found.decision else []
    assert FlowProcess("retrain", values, tmp_path / "log").wait(KILL_SECONDS) == 0
    assert registry.tags("killed") == {"1": shown}, "one version, decided once"
    assert len(set(told)) == 1
    assert [each.number for each in ledger.rounds()] == [1]
    assert registry.aliases("killed") == {"champion": "1"}


def test_an_arrival_is_told_once(story: Story) -> None:
    from prefect.client.orchestration import get_client

    from flows import arrivals
    from flows.arrivals import announce_arrivals

    new = [("inbox/a.jsonl", uuid4().hex * 2)]
    model = f"letters-{uuid4().hex[:8]}"
    assert announce_arrivals(model, "store", new, 3, 7)
    assert not announce_arrivals(model, "store", new, 3, 7)
    arrivals._told.clear()  # as another process would not know
    assert announce_arrivals(model, "store", new, 3, 7)
    wanted = {"filter": {"resource": {"id": [f"grpo.retraining.{model}"]}}}
    deadline = time.monotonic() + 30
    found: list[Any] = []
    with get_client(sync_client=True) as client:
        while not found and time.monotonic() < deadline:
            found = client.request("POST", "/events/filter", json=wanted).json()["events"]
            time.sleep(0.2)
        time.sleep(1)
        (event,) = client.request("POST", "/events/filter", json=wanted).json()["events"]
    assert event["event"] == "grpo.prompts.arrived"
    assert event["payload"] == {"model": model, "files": ["inbox/a.jsonl"], "count": 1}
    assert announce_arrivals(model, "store", new, 4, 7), "the round before took them not: they are told of again"
    assert announce_arrivals(model, "store", new, 4, 8), "nobody took them for long: they are told of again"
