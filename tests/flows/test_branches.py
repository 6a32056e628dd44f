"""Branches of runs: what they share, what they make anew, and that the run they leave is not touched."""

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.branches import Rerun, plan_rerun, verdicts
from flows.cli.main import app
from flows.debug import debug
from grpo_lib.config import RunConfig
from grpo_lib.config_files import make_config
from grpo_lib.errors import ConfigError, NotFoundError, RunError
from grpo_lib.run import Run, load_run
from grpo_lib.storage.attempts import Attempt
from grpo_lib.storage.stages import Manifest
from tests.flows.runs import Tiny, fresh_process, of, train
from tests.flows.tiny import TINY, use_easy_reward

pytestmark = pytest.mark.usefixtures("prefect_here")

BASE = ("iterations=4", "checkpoint.every=3", "evaluation.every=2", "algorithm.kl.coef=0.05")


@pytest.fixture(scope="module")
def base(prefect_here: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunConfig]:
    """A run that the tests of this module branch off; at the end it is as it was."""
    import tasks.reward

    store = tmp_path_factory.mktemp("branches") / "store"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks.reward, "get_problem", use_easy_reward)
        config = make_config(TINY | {"store": {"uri": str(store)}}, BASE)
        train(config)
        before = files(config)
        yield config
        assert files(config) == before


def files(config: RunConfig) -> dict[str, bytes]:
    root = Path(config.store.uri) / "runs" / config.run_name
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def planned(config: RunConfig, iteration: int, stage: str, *overrides: str, name: str | None = None) -> Rerun:
    return plan_rerun(config.store, config.run_name, iteration, stage, list(overrides), name)


def branch_of(config: RunConfig, k: int, stage: str, *overrides: str, name: str | None = None) -> list[Manifest]:
    """Trains a branch in what is a new process, and returns what it has committed."""
    rerun = planned(config, k, stage, *overrides, name=name)
    fresh_process()
    return train(rerun.branch.config)


def digests(manifests: list[Manifest]) -> dict[tuple[str, int | None, int], str]:
    return {(each.stage, each.iteration, each.shard): each.digest for each in manifests if each.stage != "publish"}


def computed(manifests: list[Manifest]) -> Counter[tuple[str, int | None]]:
    """Stages whose body ran, with how many shards; whether a policy had to be saved depends on what others saved."""
    own = [each for each in manifests if each.adopted_from is None and each.stage not in ("publish", "checkpoint")]
    return Counter((each.stage, each.iteration) for each in own)


def test_a_branch_shares_what_is_before_it_and_computes_what_follows_from_it(base: RunConfig) -> None:
    made = branch_of(base, 2, "advantage", "algorithm.advantage=rloo")
    (saved,) = of(made, "checkpoint", 1)
    assert saved.adopted_from is None, "the policy that it goes on from, which its base had not saved"
    assert computed(made) == {
        ("advantage", 2): 1, ("update", 2): 1,
        ("rollout", 3): 2, ("reward", 3): 2, ("old_logprobs", 3): 1, ("ref_logprobs", 3): 1, ("advantage", 3): 1,
        ("update", 3): 1, ("evaluate", 4): 1,
    }  # fmt: skip
    theirs, ours = digests(Run(base).stages.manifests()), digests(made)
    own = [*computed(made), ("checkpoint", 2), ("checkpoint", 3)]
    assert all(ours[place] == theirs[place] for place in theirs if place[:2] not in own)
    for place in (("advantage", 2, 0), ("update", 2, 0), ("rollout", 3, 0), ("update", 3, 0), ("checkpoint", 3, 0)):
        assert ours[place] != theirs[place], place


def test_a_branch_with_the_same_settings_comes_out_the_same_and_runs_only_its_first_stage(base: RunConfig) -> None:
    made = branch_of(base, 2, "rollout", name="again")
    assert computed(made) == {("rollout", 2): 2}
    theirs, ours = digests(Run(base).stages.manifests()), digests(made)
    assert {place: ours[place] for place in theirs} == theirs


def test_the_trainer_goes_on_from_the_fork_with_its_own_settings_and_never_replays_with_them(base: RunConfig) -> None:
    made = branch_of(base, 2, "update", "trainer.optimizer.lr=5e-4", "trainer.epochs=2", name="faster")
    rates = {each.iteration: each.summary["lr"] for each in of(made, "update")}
    assert rates == {0: 1e-3, 1: 1e-3, 2: 5e-4, 3: 5e-4}
    steps = {each.iteration: each.summary["optimizer_step"] for each in of(made, "update")}
    assert steps == {0: 1, 1: 2, 2: 4, 3: 6}
    run = Run(load_run(base.store, "faster").config)
    assert debug(run, 2, "update", compare=True).equal, "from the saved policy of the fork, in a fresh trainer"


def test_a_branch_that_was_interrupted_goes_on_and_ends_as_one_that_was_not(
    base: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ("algorithm.advantage=dr_grpo", "trainer.optimizer.lr=2e-3")
    undisturbed = branch_of(base, 1, "advantage", *settings, name="undisturbed")
    for path in Path(base.store.uri).glob("index/**/*.json"):
        if "undisturbed" in path.read_text():
            path.unlink()  # so that the other one computes
    commit = Attempt.commit

    def failing(self: Attempt, **kwargs: object) -> object:
        if (self._spec.name, self._iteration) == ("update", 2):
            raise RuntimeError("pulled the plug")
        return commit(self, **kwargs)  # type: ignore[arg-type]

    rerun = planned(base, 1, "advantage", *settings, name="interrupted")
    fresh_process()
    with monkeypatch.context() as patch:
        patch.setattr(Attempt, "commit", failing)
        with pytest.raises(RuntimeError):
            train(rerun.branch.config)
    fresh_process()
    made = train(load_run(base.store, "interrupted").config)
    assert computed(made)["update", 2] == 1
    assert digests(made) == digests(undisturbed)


def test_a_branch_of_a_branch_shares_with_both(base: RunConfig) -> None:
    first = branch_of(base, 1, "advantage", "algorithm.advantage=rloo", name="first")
    config = load_run(base.store, "first").config
    second = branch_of(config, 3, "update", "trainer.optimizer.lr=1e-4", name="second")
    assert computed(second) == {("update", 3): 1, ("evaluate", 4): 1}
    theirs, ours = digests(first), digests(second)
    assert all(ours[place] == theirs[place] for place in theirs if (place[1] or 0) < 3)
    with pytest.raises(ConfigError, match="is that of 'tiny', which it branched off at advantage of iteration 1"):
        planned(config, 1, "rollout")


def test_the_same_branch_again_goes_on_with_it_and_another_one_can_t_have_its_name(base: RunConfig) -> None:
    made = branch_of(base, 3, "update", "trainer.optimizer.lr=4e-4", name="named")
    again = branch_of(base, 3, "update", "trainer.optimizer.lr=4e-4", name="named")
    assert [each.manifest_sha256 for each in made] == [each.manifest_sha256 for each in again]
    with pytest.raises(ConfigError, match=r"'named' is taken.*trainer.optimizer.lr: 0.0004 -> 0.0003.*--name"):
        planned(base, 3, "update", "trainer.optimizer.lr=3e-4", name="named")
    with pytest.raises(ConfigError, match="'tiny'"):
        planned(base, 3, "update", name="tiny")


def test_mlflow_shows_a_child_run_with_the_whole_history_once(base: RunConfig) -> None:
    from mlflow import MlflowClient

    from grpo_lib.tracking.mlflow import tracker_for

    branch_of(base, 2, "update", "trainer.optimizer.lr=3e-3", name="child")
    parent, child = (tracker_for(load_run(base.store, name)) for name in ("tiny", "child"))
    client = MlflowClient(tracking_uri=parent.uri)
    tags = client.get_run(child.run_id).data.tags
    assert tags["mlflow.parentRunId"] == parent.run_id
    assert [tags[f"grpo.branch.{name}"] for name in ("run", "iteration", "stage")] == ["tiny", "2", "update"]
    assert tags["grpo.branch.settings"] == "trainer.optimizer.lr: 0.001 -> 0.003"
    theirs, ours = (client.get_metric_history(each.run_id, "update/lr") for each in (parent, child))
    assert [(each.step, each.value) for each in ours] == [(0, 1e-3), (1, 1e-3), (2, 3e-3), (3, 3e-3)]
    assert [each.timestamp for each in ours[:2]] == [each.timestamp for each in theirs[:2]]
    models = client.search_logged_models([child.experiment_id])
    own = [each.params["policy_version"] for each in models if each.source_run_id == child.run_id]
    assert sorted(own) == ["3", "4"], "not that of the fork, which is the parent's"


def test_show_puts_a_run_and_its_branches_side_by_side(base: RunConfig) -> None:
    branch_of(base, 2, "advantage", "algorithm.advantage=rloo", name="shown")
    answer = CliRunner().invoke(app, ["show", "shown", "--branch", "--json", "--store", base.store.uri])
    assert answer.exit_code == 0, answer.output
    shown = json.loads(answer.output)
    sides = {each["run"]: each for each in shown["runs"]}
    assert next(iter(sides)) == "tiny" and sides["tiny"]["shared"] == 0
    mine = sides["shown"]
    assert (mine["base"], mine["iteration"], mine["stage"]) == ("tiny", 2, "advantage")
    assert mine["settings"] == ["algorithm.advantage: 'grpo' -> 'rloo'"]
    manifests = [each for each in load_run(base.store, "shown").manifests() if each.stage != "publish"]
    assert mine["own"] == sum(each.adopted_from is None for each in manifests)
    assert mine["shared"] + mine["equal"] + mine["own"] == len(manifests)
    assert mine["curves"]["reward"]["1"] == sides["tiny"]["curves"]["reward"]["1"]
    assert shown["common_iterations"]["sampled accuracy"] == [0, 2, 4]
    text = CliRunner().invoke(app, ["show", "tiny", "--branch", "--store", base.store.uri]).output
    assert "shown: tiny from advantage of iteration 2 on" in text
    assert "algorithm.advantage: 'grpo' -> 'rloo'" in text


REFUSED = {
    "an iteration that is not there": ((9, "update"), "has iterations 0 to 3"),
    "a stage that is not there": ((1, "advantages"), "did you mean advantage?"),
    "a stage before the first iteration": ((0, "warm_start"), "start a new run"),
    "a stage that nothing follows from": ((1, "checkpoint"), "nothing of the training follows from checkpoint"),
    "data": ((1, "reward", "data.train_prompts=100"), "data.train_prompts shapes what is made before"),
    "the model": ((1, "rollout", "model.small.layers=2"), "model.small.layers shapes what is made before"),
    "another store": ((1, "rollout", "store.uri=elsewhere"), "store.uri can't be set for a branch"),
    "adapters": ((1, "update", "trainer.lora.rank=4"), "trainer.lora: the policy at the fork"),
    "a critic": ((2, "advantage", "critic={}", "algorithm.advantage=gae"), "critic: the run has none at the fork"),
    "overlap": (
        (1, "prompts", "pipeline.max_staleness=1", "algorithm.old_logprobs=bypass"),
        "pipeline.max_staleness says which policy draws",
    ),
    "temperature of shared rollouts": ((1, "reward", "rollout.temperature=0.5"), "drawn at 1; take --from rollout"),
    "a column that was not made": (
        (1, "advantage", "algorithm.advantage=optimal_token_baseline"),
        "needs old_logprobs, which 'tiny' did not make before advantage; branch off there: --from old_logprobs",
    ),
    "greedy rollouts": ((1, "old_logprobs", "algorithm.advantage=remax"), "--from greedy_rollout"),
    "other inputs of the update only": ((1, "update", "algorithm.old_logprobs=bypass"), "take --from advantage"),
    "nothing left to do": ((3, "update", "iterations=2"), "set iterations to at least 4"),
    "a setting that does not exist": ((1, "update", "trainer.lrr=1"), "no such setting"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_t_be_a_branch_is_refused_before_anything_is_made(base: RunConfig, case: str) -> None:
    (iteration, stage, *overrides), message = REFUSED[case]
    runs = sorted(path.name for path in (Path(base.store.uri) / "runs").iterdir())
    with pytest.raises((ConfigError, NotFoundError)) as caught:
        planned(base, iteration, stage, *overrides)
    assert message in str(caught.value)
    assert sorted(path.name for path in (Path(base.store.uri) / "runs").iterdir()) == runs


def test_an_unknown_run_is_named_with_those_that_there_are(base: RunConfig) -> None:
    with pytest.raises(NotFoundError, match=r"no run 'tiny2' in the store .* it holds: .*tiny"):
        plan_rerun(base.store, "tiny2", 1, "update", [])


def reasons(config: RunConfig, iteration: int, stage: str, *overrides: str) -> dict[str, tuple[str, list[str]]]:
    rerun = plan_rerun(config.store, config.run_name, iteration, stage, list(overrides), anew=False)
    return {
        each["stage"] + (f".{each['shard']}" if each["shard"] else ""): (each["verdict"], each["reasons"])
        for each in verdicts(rerun)
    }


def test_a_dry_run_says_what_would_run_and_which_part_of_its_key_differs(base: RunConfig) -> None:
    assert {verdict for verdict, _ in reasons(base, 2, "reward").values()} == {"reused"}
    found = reasons(base, 2, "reward", "reward.correct=2", "reward.max_failed=0.5")
    assert found["reward"] == ("runs", ["reward.correct: 1.0 -> 2.0", "reward.max_failed: 0.05 -> 0.5"])
    assert found["old_logprobs"] == found["ref_logprobs"] == ("reused", [])
    assert found["advantage"] == ("depends", ["made from reward, which may come out differently"])
    assert found["update"] == ("depends", ["made from advantage, which may come out differently"])
    forced = plan_rerun(base.store, "tiny", 2, "advantage", [])
    first, *rest = verdicts(forced)
    assert (first["verdict"], first["reasons"]) == ("runs", ["it is the first stage of a branch"])
    assert {each["verdict"] for each in rest} == {"depends"}


def test_a_dry_run_finds_what_is_damaged_missing_or_of_other_code(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny("iterations=1")
    manifests, store = train(config), Path(config.store.uri)
    (old,), reward = of(manifests, "old_logprobs"), next(each for each in of(manifests, "reward") if each.shard == 1)
    part = store / reward.parts[0].path
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    shutil.rmtree((store / old.path).parent)
    for path in store.glob("index/**/*.json"):
        if old.path in path.read_text():
            path.unlink()
    import tasks.advantage

    spec = tasks.advantage.ADVANTAGE
    monkeypatch.setattr(tasks.advantage.advantage, "spec", type(spec)(name=spec.name, version=9, reads=spec.reads))
    found = reasons(config, 0, "reward")
    assert found["reward"] == ("reused", [])
    assert found["reward.1"][0] == "runs" and reward.parts[0].path in found["reward.1"][1][0]
    assert found["old_logprobs"] == ("runs", ["the run has none"])
    assert found["advantage"][0] == "runs" and "stage version: 2 -> 9" in found["advantage"][1]


def test_data_that_would_come_out_differently_today_is_not_shared_silently(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny("iterations=2")
    manifests = train(config)
    import tasks.reward

    spec = tasks.reward.REWARD
    monkeypatch.setattr(tasks.reward.reward, "spec", type(spec)(name=spec.name, version=9, reads=spec.reads))
    with pytest.raises(NotFoundError, match=r"reward of iteration 0 can't be shared.*stage version: 2 -> 9"):
        planned(config, 1, "update")
    # Even by hand: a branch makes nothing itself of what it shares.
    point = {"run": "tiny", "iteration": 1, "stage": "update"}
    by_hand = make_config(config.model_dump(mode="json") | {"name": "by-hand", "branch": point})
    with pytest.raises(RunError, match=r"shares reward of iteration 0 with 'tiny', which has none"):
        train(by_hand)
    assert not [each for each in Run(by_hand).stages.manifests() if each.stage == "reward"]
    assert len(of(manifests, "reward")) == len(of(Run(config).stages.manifests(), "reward"))


def test_one_stage_alone_runs_in_a_branch_and_is_compared_and_what_is_missing_is_made_in_place(base: RunConfig) -> None:
    from flows.rerun import rerun

    fresh_process()
    same = rerun(run="tiny", iteration=2, stage="reward", only_this_stage=True, store=base.store, name="judged")
    found = [(each["shard"], each["same"], each["run"]) for each in same["stages"]]
    assert found == [(0, True, "judged"), (1, True, "judged")]
    other = rerun(
        run="tiny", iteration=2, stage="reward", settings=["reward.correct=3"], only_this_stage=True, store=base.store,
        name="judged-otherwise",
    )  # fmt: skip
    assert [each["same"] for each in other["stages"]] == [False, False]
    made = load_run(base.store, "judged-otherwise").stages.manifests()
    assert {each.stage for each in made} == {"reward", "checkpoint"}


def test_a_stage_that_a_run_has_not_made_yet_is_made_in_place(tiny: Tiny) -> None:
    from flows.rerun import rerun

    config = tiny("iterations=2")
    manifests = train(config)
    lost = [*of(manifests, "update", 1), *of(manifests, "checkpoint"), *of(manifests, "evaluate", 2)]
    for each in lost:
        shutil.rmtree((Path(config.store.uri) / each.path).parent)
    for path in Path(config.store.uri).glob("index/**/*.json"):
        path.unlink()
    fresh_process()
    (made,) = rerun(run="tiny", iteration=1, stage="update", only_this_stage=True, store=config.store)["stages"]
    assert (made["run"], made["committed_before"], made["digest"]) == ("tiny", None, lost[0].digest)


def test_the_form_of_the_flow_explains_every_field_and_offers_the_stages() -> None:
    from prefect.utilities.callables import parameter_schema

    from flows.rerun import rerun
    from grpo_lib.config_branch import FORKS

    schema = parameter_schema(rerun.fn).model_dump()
    assert rerun.name == "rerun-stage"
    assert all(each.get("description") for name, each in schema["properties"].items() if name != "store")
    assert tuple(schema["properties"]["stage"]["enum"]) == FORKS
    assert schema["properties"]["iteration"]["minimum"] == 0
    assert set(schema["required"]) == {"run", "iteration", "stage"}


OVERLAP = ("iterations=5", "pipeline.max_staleness=1", "algorithm.old_logprobs=bypass", "algorithm.kl.coef=0")


@pytest.mark.slow
def test_with_overlap_rollouts_after_the_fork_are_of_the_policies_that_drew_them_before(tiny: Tiny) -> None:
    config = tiny(*OVERLAP)
    manifests = train(config)
    before = files(config)
    other = branch_of(config, 3, "rollout", "rollout.top_k=5", "checkpoint.every=9", name="other-rollouts")
    assert computed(other)["rollout", 3] == 2 and ("rollout", 2) not in computed(other)
    later = branch_of(config, 2, "update", "trainer.optimizer.lr=5e-4", name="other-rate")
    assert {place for place in computed(later) if place[0] == "rollout"} == {("rollout", 4)}
    for made, run in ((other, "other-rollouts"), (later, "other-rate")):
        stages = load_run(config.store, run).stages
        for each in of(made, "rollout"):
            versions = stages.table(each.to_ref(reused=True), ["policy_version"]).column("policy_version")
            assert set(versions.to_pylist()) == {max(0, (each.iteration or 0) - 1)}
    # Rollouts of iteration 3 are of policy 2, from before the update that the branch changed: they are shared.
    assert digests(later)["rollout", 3, 0] == digests(manifests)["rollout", 3, 0]
    assert files(config) == before


@pytest.mark.slow
def test_with_filters_a_new_reward_draws_further_prompts_by_the_branch_s_settings(tiny: Tiny) -> None:
    config = tiny(
        "iterations=2", "algorithm.filters=[{name: dynamic_sampling}]", "rollout.max_gen_batches=12", "critic={}",
        "algorithm.advantage=gae", "reference.every=1", "reference.decay=0.5",
    )  # fmt: skip
    train(config)
    before = files(config)
    made = branch_of(config, 1, "reward", "reward.correct=2", "rollout.max_new_tokens=10", name="branch")
    run = load_run(config.store, "branch")
    for each in of(made, "rollout", 1):
        assert each.config["rollout.max_new_tokens"] == (12 if each.shard < 2 else 10)
    assert {each.config["reward.correct"] for each in of(made, "reward", 1)} == {2.0}
    assert {each.config["reward.correct"] for each in of(made, "reward", 0)} == {1.0}
    assert len(of(made, "update")) == 2 and run.shares("reference", 0) and not run.shares("reference", 1)
    assert files(config) == before


def test_an_edited_plugin_counts_from_the_fork_on_and_what_is_before_it_stays(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    import flows.train

    def of_today(text: str) -> None:
        monkeypatch.setattr(flows.train, "plugin_digests", lambda algorithm, *settings: {"plugin/mine": text})

    of_today("a" * 64)
    config = tiny("iterations=3")
    base = train(config)
    of_today("b" * 64)
    found = reasons(config, 1, "reward")
    assert found["reward"] == found["old_logprobs"] == ("reused", [])
    assert found["advantage"] == ("runs", [f"plugin/mine: {'a' * 12} -> {'b' * 12}"])
    assert found["update"][1][0] == f"plugin/mine: {'a' * 12} -> {'b' * 12}"
    before = files(config)
    made = branch_of(config, 1, "reward", name="mended")
    assert {place for place in computed(made) if place[1] in (None, 0)} == set()
    assert {("reward", 1), ("advantage", 1), ("update", 1), ("advantage", 2)} <= set(computed(made))
    assert {each.external["plugin/mine"] for each in of(made, "advantage", 0) if each.external} == {"a" * 64}
    assert digests(made) == digests(base) | digests(of(made, "checkpoint", 0)), "the same function in another file"
    again = train(load_run(config.store, "mended").config)
    assert [each.manifest_sha256 for each in again] == [each.manifest_sha256 for each in made]
    assert files(config) == before
