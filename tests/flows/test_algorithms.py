"""What algorithms ask of the flow: more prompts, a critic's state, a coefficient that moves, functions of one's own."""

import importlib
import pkgutil
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import tasks
from grpo_lib.errors import AlgorithmError
from grpo_lib.recipe import REGISTRIES
from grpo_lib.run import Run
from grpo_lib.storage.manifests import Manifest
from grpo_lib.types import RewardFunction, Sample
from tests.flows.runs import Tiny, fresh_process, of, train

pytestmark = pytest.mark.usefixtures("prefect_here")


class RareReward:
    """Takes the place of a problem: prompts whose first number is odd earn nothing, whatever the response."""

    @staticmethod
    def make_reward(options: object, settings: object) -> RewardFunction:
        def reward(sample: Sample) -> float:
            number = re.search(r"\d+", sample.prompt)
            assert number is not None
            return float(len(sample.response)) if int(number[0]) % 2 == 0 else 0.0

        return reward


def test_dynamic_sampling_draws_prompts_until_the_batch_is_full_and_goes_on_from_there(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.reward.get_problem", lambda name: RareReward)
    settings = ["algorithm.filters=[dynamic_sampling]", "rollout.samples=4", "iterations=3"]
    config = tiny(*settings)
    manifests = train(config)
    stages = Run(config).stages

    def rows(stage: str, k: int) -> list[Manifest]:
        return sorted(of(manifests, stage, k), key=lambda each: each.shard)

    drawn = []
    for k in range(3):
        batches = rows("prompts", k)
        drawn += [
            row for each in batches for row in stages.table(each.to_ref(reused=True)).column("dataset_row").to_pylist()
        ]
        assert len(rows("filter", k)) == len(batches)
        last = rows("filter", k)[-1]
        assert last.summary["full"] == 1 and all(each.summary["full"] == 0 for each in rows("filter", k)[:-1])
        selection = stages.table(last.to_ref(reused=True))
        rollouts = stages.table([each.to_ref(reused=True) for each in rows("rollout", k)])
        rewards = stages.table([each.to_ref(reused=True) for each in rows("reward", k)])
        used = np.array(selection.column("used").to_pylist())
        prompt = np.array(rollouts.column("prompt_row").to_pylist())
        value = np.array(rewards.column("value").to_pylist())
        assert len(np.unique(prompt[used])) == config.rollout.prompts
        for each in np.unique(prompt):
            equal = len(np.unique(value[prompt == each])) == 1
            assert not (equal and used[prompt == each].any()), "a group of equal rewards takes no part"
        old = stages.table([each.to_ref(reused=True) for each in rows("old_logprobs", k)])
        lengths = old.column("old_logprobs").combine_chunks()
        assert all((np.array(each) != 0).all() == keep for each, keep in zip(lengths.to_pylist(), used, strict=True))
        (update,) = rows("update", k)
        assert update.summary["trained_rows"] == used.sum()
    assert len(drawn) > 3 * config.rollout.prompts, "some iteration needed more than one batch"
    assert len(set(drawn)) == len(drawn), "no prompt is drawn twice in the epoch, none is skipped"

    fresh_process()
    again = train(tiny(*settings, "iterations=4"))
    assert [each.digest for each in again if (each.iteration or 0) < 3 and each.stage in ("rollout", "update")] == [
        each.digest for each in manifests if each.stage in ("rollout", "update")
    ]


def test_a_batch_that_can_t_be_filled_stops_the_run_and_says_what_was_seen(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hopeless:
        @staticmethod
        def make_reward(options: object, settings: object) -> RewardFunction:
            return lambda sample: 0.0

    monkeypatch.setattr("tasks.reward.get_problem", lambda name: Hopeless)
    with pytest.raises(AlgorithmError) as error:
        train(tiny("algorithm.filters=[dynamic_sampling]", "rollout.max_gen_batches=2"))
    message = str(error.value)
    assert "after 2 batches of 4 prompts only 0 of 4 wanted" in message
    assert "16 rows by 'dynamic_sampling'" in message and "8 with every reward 0" in message
    assert "rollout.max_gen_batches" in message


PPO = ["algorithm.advantage=gae", "critic.lr=1e-2", "algorithm.kl={coef: 0.05, place: reward, controller: adaptive}"]


def test_policy_critic_and_kl_coefficient_are_replayed_exactly(tiny: Tiny, tmp_path: Path) -> None:
    straight = train(tiny(*PPO, "iterations=4", f"store.uri={tmp_path / 'straight'}"))
    train(tiny(*PPO, "iterations=3", "checkpoint.every=2"))
    fresh_process()  # the policy of iteration 3 is replayed from the checkpoint after 2 updates
    resumed = train(tiny(*PPO, "iterations=4", "checkpoint.every=2"))
    for stage in ("values", "advantage", "update"):
        assert [each.digest for each in of(straight, stage)] == [each.digest for each in of(resumed, stage)], stage
    assert of(resumed, "update", 3)[0].summary["critic_digest"] == of(straight, "update", 3)[0].summary["critic_digest"]
    coefs = [each.summary["kl_coef"] for each in of(resumed, "advantage")]
    following = [each.summary["next_kl_coef"] for each in of(resumed, "advantage")]
    assert coefs[0] == 0.05 and coefs[1:] == following[:-1] and len(set(coefs)) == 4
    assert any(float(str(each.summary["value"])) != 0 for each in of(resumed, "update")), "the critic learned"


def test_runs_that_share_a_store_never_take_each_other_s_critic(tiny: Tiny) -> None:
    slow = train(tiny(*PPO, "iterations=2", "name=slow", "critic.lr=1e-3"))
    fast = train(tiny(*PPO, "iterations=2", "name=fast"))
    assert of(slow, "update", 0)[0].summary["policy_digest"] == of(fast, "update", 0)[0].summary["policy_digest"]
    assert of(slow, "update", 0)[0].summary["critic_digest"] != of(fast, "update", 0)[0].summary["critic_digest"]
    assert of(fast, "values", 0)[0].adopted_from and not of(fast, "values", 1)[0].adopted_from
    assert not of(fast, "checkpoint")[0].adopted_from


def test_the_place_in_the_data_is_part_of_what_an_iteration_leaves_to_the_next() -> None:
    from grpo_lib.storage.manifests import content_digest

    def digest(**summary: object) -> str:
        return content_digest("filter", 1, (), summary)

    assert digest(next_prompt=1, full=1.0) != digest(next_prompt=2, full=1.0)
    assert digest(next_prompt=1, prompts_kept=4.0) == digest(next_prompt=1, prompts_kept=5.0)


def test_infinite_log_probs_of_the_engine_are_dropped_and_counted(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from grpo_lib.generation.local import LocalEngine

    generate = LocalEngine.generate

    def impossible(self: LocalEngine, *arguments: object, **options: object) -> object:
        made = generate(self, *arguments, **options)  # type: ignore[arg-type]
        logprobs = made.logprobs.clone()
        logprobs[::7] = -torch.inf
        return replace(made, logprobs=logprobs)

    monkeypatch.setattr(LocalEngine, "generate", impossible)
    for mode in ("decoupled", "bypass"):
        config = tiny("iterations=1", f"name={mode}", f"algorithm.old_logprobs={mode}")
        manifests = train(config)
        stages = Run(config).stages
        rollouts = stages.table([each.to_ref(reused=True) for each in of(manifests, "rollout")])
        infinite = np.isinf(rollouts.column("rollout_logprobs").combine_chunks().flatten().to_numpy())
        (advantage,) = of(manifests, "advantage")
        mask = stages.table(advantage.to_ref(reused=True)).column("response_mask").combine_chunks().flatten().to_numpy()
        assert infinite.any() and (mask[infinite] == 0).all() and (mask[~infinite] == 1).all()
        assert advantage.summary["mismatch/nonfinite_tokens"] == infinite.sum()
        assert of(manifests, "update")[0].summary["skipped"] == 0


def test_a_further_metric_is_computed_without_training_again(tiny: Tiny) -> None:
    train(tiny("iterations=2", "name=first"))
    second = train(tiny("iterations=2", "name=second", "algorithm.metrics=[group_std]"))
    computed = {each.stage for each in second if not each.adopted_from}
    assert computed == {"advantage", "publish"}
    assert all("metric/group_std" in each.summary for each in of(second, "advantage"))


def test_every_stage_is_in_the_summary_of_a_run() -> None:
    from grpo_lib.storage.keys import StageSpec
    from grpo_lib.tracking.reports import ORDER

    modules = [importlib.import_module(f"tasks.{each.name}") for each in pkgutil.iter_modules(tasks.__path__)]
    specs = {each.name for module in modules for each in vars(module).values() if isinstance(each, StageSpec)}
    assert specs == set(ORDER)


MODULE = """
from grpo_lib.algorithms.advantages import ADVANTAGES
from grpo_lib.algorithms.filters import FILTERS
from grpo_lib.algorithms.losses import LOSSES, reinforce
from grpo_lib.algorithms.metrics import METRICS
from grpo_lib.data.ragged import group_statistics

@ADVANTAGES.register("halved", formula="(R - mean_g) / 2", paper="-", use="a test")
def halved(rewards, group_ids, *, part: float = 2.0):
    return (rewards - group_statistics(rewards, group_ids).mean) / part

@LOSSES.register("own_loss", formula="-A lp", paper="-", use="a test")
def own_loss(logprobs, old_logprobs, advantages):
    return reinforce(logprobs, old_logprobs, advantages)

@FILTERS.register("all_rows", formula="1", paper="-", use="a test")
def all_rows(rewards):
    return (rewards == rewards).long()

@METRICS.register("rows", formula="B", paper="-", use="a test")
def rows(rewards):
    return len(rewards)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's module in the current folder; what it registers is taken out again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "my_estimators.py"
    path.write_text(MODULE)
    yield path
    forget()


def forget() -> None:
    sys.modules.pop("my_estimators", None)
    for registry, name in (("advantage", "halved"), ("metrics", "rows"), ("loss", "own_loss"), ("filters", "all_rows")):
        REGISTRIES[registry]._entries.pop(name, None)


def test_a_function_of_one_s_own_runs_and_a_change_in_it_computes_just_what_depends_on_it(
    tiny: Tiny, module: Path
) -> None:
    settings = [
        "algorithm.plugins=[my_estimators]", "algorithm.advantage=halved", "algorithm.advantage_options.part=4",
        "algorithm.metrics=[rows]", "iterations=1",
    ]  # fmt: skip
    first = train(tiny(*settings))
    (advantage,) = of(first, "advantage")
    assert advantage.summary["metric/rows"] == 8
    forget()
    module.write_text(MODULE.replace(") / part", ") / part * 2"))
    fresh_process()
    second = train(tiny(*settings, "name=second"))
    adopted = {each.stage for each in second if each.adopted_from}
    assert {"prompts", "rollout", "reward", "old_logprobs"} <= adopted
    assert not {"advantage", "update"} & adopted
    assert of(second, "advantage")[0].summary["max"] == 2 * float(str(advantage.summary["max"]))


def test_a_changed_file_computes_again_what_its_loss_and_its_filter_make(tiny: Tiny, module: Path) -> None:
    settings = ["algorithm.plugins=[my_estimators]", "algorithm.loss=own_loss", "iterations=1"]
    filtered = ["algorithm.filters=[all_rows]"]
    train(tiny(*settings))
    train(tiny(*settings, *filtered, "name=filtered"))
    forget()
    module.write_text(MODULE + "# another version")
    fresh_process()
    second = train(tiny(*settings, "name=second"))
    # The update comes to the same policy, so what follows from that is adopted.
    assert {each.stage for each in second if not each.adopted_from} == {"update", "publish"}
    third = train(tiny(*settings, *filtered, "name=third"))
    assert not of(third, "filter")[0].adopted_from and not of(third, "update")[0].adopted_from
