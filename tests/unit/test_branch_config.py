"""Where a branch leaves its base: which data is shared, and whose settings apply to which stage."""

from pathlib import Path

import pytest

from grpo_lib.branches import branch_config, branch_differences, default_name
from grpo_lib.config import RunConfig
from grpo_lib.config_branch import FORKS, ORDER, BranchConfig
from grpo_lib.config_files import make_config
from grpo_lib.errors import ConfigError, RunError
from grpo_lib.run import Run, open_run
from grpo_lib.storage.stages import StageSpec, stage_key

SETTINGS = {"name": "demo", "data": {"problem": "countdown"}, "warm_start": {}, "rollout": {"shards": 2}}
UPDATE = StageSpec(name="update", version=1, reads=("trainer.optimizer.lr",))


@pytest.fixture
def base(tmp_path: Path) -> Run:
    return open_run(make_config(SETTINGS | {"store": {"uri": str(tmp_path)}}))


def branch(base: Run, k: int, stage: str, *overrides: str, name: str | None = None) -> Run:
    return open_run(branch_config(base, k, stage, overrides, name))


def test_stages_are_in_one_order_and_every_fork_is_one_of_them() -> None:
    assert len(set(ORDER)) == len(ORDER)
    assert [each for each in ORDER if each in FORKS] == list(FORKS)


def shared(point: BranchConfig, *places: tuple[str, int | None, int]) -> list[bool]:
    return [point.shares(*place) for place in places]


def test_what_comes_into_being_before_the_fork_is_shared() -> None:
    point = BranchConfig(run="demo", iteration=7, stage="advantage")
    before = [("warm_start", None, 0), ("rollout", 7, 0), ("values", 7, 0), ("update", 6, 0), ("evaluate", 7, 0)]
    after = [("advantage", 7, 0), ("update", 7, 0), ("weights", 7, 0), ("prompts", 8, 0), ("evaluate", 8, 0)]
    assert shared(point, *before) == [True] * 5
    assert shared(point, *after) == [False] * 5


def test_further_batches_of_prompts_come_after_the_first_one_s_filter() -> None:
    point = BranchConfig(run="demo", iteration=7, stage="filter")
    assert shared(point, ("reward", 7, 0), ("filter", 7, 0), ("prompts", 7, 1), ("rollout", 7, 1)) == [
        True, False, False, False,
    ]  # fmt: skip
    later = BranchConfig(run="demo", iteration=7, stage="old_logprobs")
    assert shared(later, ("rollout", 7, 3), ("filter", 7, 3), ("greedy_reward", 7, 0)) == [True] * 3


def test_an_evaluation_is_of_the_policy_before_the_iteration() -> None:
    point = BranchConfig(run="demo", iteration=0, stage="prompts")
    assert shared(point, ("evaluate", 0, 0), ("dataset", None, 0), ("evaluate", 1, 0)) == [True, True, False]
    judged = BranchConfig(run="demo", iteration=4, stage="evaluate")
    assert shared(judged, ("update", 3, 0), ("checkpoint", 3, 0), ("evaluate", 4, 0), ("prompts", 4, 0)) == [
        True, True, False, False,
    ]  # fmt: skip


def test_before_the_fork_the_settings_of_the_base_apply_and_from_it_on_those_of_the_branch(base: Run) -> None:
    run = branch(base, 3, "reward", "rollout.temperature=1", "trainer.optimizer.lr=1e-4", "reward.correct=2")
    for stage, iteration, shard in (("update", 2, 0), ("rollout", 3, 1), ("dataset", None, 0)):
        assert run.at(stage, iteration, shard).config == base.config
    for stage, iteration, shard in (("reward", 3, 0), ("rollout", 3, 2), ("update", 3, 0), ("publish", 0, 0)):
        assert run.at(stage, iteration, shard) is run


def test_keys_before_the_fork_are_those_of_the_base_and_the_first_stage_has_one_of_its_own(base: Run) -> None:
    run = branch(base, 3, "update", "trainer.optimizer.lr=1e-4")
    assert run.key(UPDATE, [], 2) == base.key(UPDATE, [], 2)
    assert run.key(UPDATE, [], 4) == stage_key(UPDATE, run.config, [], 4) != base.key(UPDATE, [], 4)
    same = branch(base, 3, "update")
    assert same.key(UPDATE, [], 4) == base.key(UPDATE, [], 4)
    assert len({each.key(UPDATE, [], 3) for each in (base, run, same)}) == 3
    assert same.external("update", 3, {"a": "b"}) == {"a": "b", "branch": "demo-3-update"}
    assert same.external("update", 4, None) == {}


def test_a_branch_of_a_branch_asks_both(base: Run) -> None:
    first = branch(base, 2, "update", "trainer.optimizer.lr=1e-4")
    second = branch(first, 5, "advantage", "trainer.optimizer.lr=1e-5", name="second")
    rates = [second.at("update", k).config.trainer.optimizer.lr for k in (1, 2, 4, 5)]
    assert rates == [1e-6, 1e-4, 1e-4, 1e-5]
    assert [each.name for each in second.lineage] == ["second", "demo-2-update-" + first.name[-4:], "demo"]
    assert second.key(UPDATE, [], 2) == first.key(UPDATE, [], 2), "with what makes it the first of that branch"
    with pytest.raises(ConfigError, match=r"advantage of iteration 2 of 'demo-2-.*is that of 'demo'.*branch of 'demo'"):
        branch_config(first, 2, "advantage")


def test_a_branch_makes_nothing_itself_of_what_it_shares_but_copies_of_policies(base: Run) -> None:
    run = branch(base, 3, "update")
    with pytest.raises(RunError, match="'demo-3-update' shares reward of iteration 3 with 'demo', which has none"):
        run.check_may_make("reward", 3, 0)
    for place in (("checkpoint", 2), ("weights", 2), ("update", 3), ("publish", 1)):
        run.check_may_make(*place, 0)


def test_the_same_branch_has_the_same_name_and_another_another() -> None:
    names = {
        default_name("demo", 7, "reward", []),
        default_name("demo", 7, "reward", ["reward.correct=2"]),
        default_name("demo", 7, "reward", ["reward.correct=3"]),
    }
    assert len(names) == 3
    both = ["b=1", "a=2"]
    assert default_name("demo", 7, "reward", both) == default_name("demo", 7, "reward", both[::-1])


def test_differences_are_settings_and_not_names_or_places(base: Run) -> None:
    config = branch_config(base, 3, "update", ["trainer.optimizer.lr=1e-4", "placement.threads=1"])
    found = [str(each) for each in branch_differences(base.config, config)]
    assert sorted(found) == ["placement.threads: None -> 1", "trainer.optimizer.lr: 1e-06 -> 0.0001"]


def config_of(**branch: object) -> RunConfig:
    return make_config(SETTINGS | {"branch": {"run": "base", "iteration": 1, "stage": "update"} | branch})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"run": "demo"}, "needs a name of its own"),
        ({"stage": "checkpoint"}, "branch.stage='checkpoint'"),
        ({"iteration": -1}, "branch.iteration=-1"),
        ({"run": "../x"}, "branch.run='../x'"),
    ],
)
def test_a_branch_that_can_t_be_is_refused_in_the_configuration(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(**values)
    assert message in str(caught.value)
