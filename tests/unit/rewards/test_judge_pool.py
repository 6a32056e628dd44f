"""Reward functions in processes: whatever one does costs its own sample, and nothing else."""

import logging
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from grpo_lib.config_reward import RewardConfig, RewardFunctionConfig
from grpo_lib.errors import ConfigError, RewardError
from grpo_lib.rewards.judges import Reward, make_judges
from grpo_lib.rewards.runner import NOT_JUDGED, Scores, check_failures, score
from grpo_lib.types import Sample

HOSTILE = str(Path(__file__).parent / "hostile.py")


def samples(*responses: str) -> list[Sample]:
    return [
        Sample(
            prompt="p", response=each, reference="r", data_source="d", response_tokens=1, finish_reason="stop",
            prompt_id=f"p{place}",
        )
        for place, each in enumerate(responses)
    ]  # fmt: skip


def judged(name: str, *responses: str, kwargs: dict[str, Any] | None = None, **settings: Any) -> Scores:
    """Scores of a function of the hostile file."""
    function = RewardFunctionConfig(name=name, path=HOSTILE, kwargs=kwargs or {})
    values = {"timeout_seconds": 1.0, "max_failed": 1.0, "functions": [function]} | settings
    config = RewardConfig.model_validate(values)
    return score(samples(*responses), Reward(judges=make_judges(config.functions, []), settings=config))


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("loop", "TookTooLongError: took longer than reward.timeout_seconds=1"),
        ("stubborn", "took longer than reward.timeout_seconds=1 and was killed"),
        ("memory", "MemoryError"),
        ("exit", "the process of the reward function ended with code 0"),
        ("signal", "the process of the reward function ended by signal 9"),
        ("string", "TypeError: reward must be a number, found str"),
        ("nan", "ValueError: reward is nan"),
        ("none", "TypeError: reward must be a number, found None"),
        ("stack", "RecursionError"),
    ],
)
def test_one_bad_sample_is_null_with_the_reason_and_the_others_have_their_values(what: str, reason: str) -> None:
    scores = judged("reward", "a", what, "ccc", "dddd")
    assert scores.values == [1.0, None, 3.0, 4.0]
    assert scores.reasons[1] is not None and reason in scores.reasons[1]
    assert [scores.reasons[0], *scores.reasons[2:]] == [None] * 3


def test_a_gigabyte_of_output_goes_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        scores = judged("reward", "a", "print", "ccc", timeout_seconds=60.0)
    assert scores.values == [1.0, 5.0, 3.0]
    assert sum(len(record.getMessage()) for record in caplog.records) < 100_000


def test_all_kinds_of_failure_together_are_counted_exactly() -> None:
    kinds = ["exit", "fine", "string", "nan", "fine", "signal", "loop", "fine"]
    scores = judged("reward", *kinds * 4)
    assert [value for value in scores.values if value is not None] == [4.0] * 12
    assert sum(reason is not None for reason in scores.reasons) == 20


def test_every_sample_is_judged_once() -> None:
    scores = judged("every_third", *["x"] * 200)
    assert [place for place, value in enumerate(scores.values, start=1) if value is None] == list(range(3, 201, 3))


def test_nothing_is_left_behind() -> None:
    before = {each.pid for each in psutil.Process().children(recursive=True)}
    judged("reward", "exit", "loop", "a", runner={"processes": 2})
    assert {each.pid for each in psutil.Process().children(recursive=True)} <= before


def test_several_processes_keep_the_order() -> None:
    responses = ["x" * (1 + place % 7) for place in range(500)]
    scores = judged("reward", *responses, runner={"processes": 3})
    assert scores.values == [float(len(each)) for each in responses]


def test_slow_samples_are_shared_out_one_by_one() -> None:
    scores = judged("process", *["x"] * 6, runner={"processes": 2}, timeout_seconds=20.0)
    assert sorted(scores.values.count(each) for each in set(scores.values)) in ([3, 3], [2, 4])


def test_large_samples_come_through() -> None:
    responses = [character * 3_000_000 for character in "abc"] + ["d"]
    assert judged("reward", *responses).values == [3e6, 3e6, 3e6, 1.0]


def test_a_function_sees_token_ids_as_a_list_and_metadata_as_they_are() -> None:
    function = RewardFunctionConfig(name="seen", path=HOSTILE)
    config = RewardConfig(functions=[function], max_failed=1.0)
    given = [
        replace(each, response_ids=np.array([5, 6, 7], np.int32), metadata={"day": date(2026, 11, 22)})
        for each in samples("a", "b")
    ]
    scores = score(given, Reward(judges=make_judges(config.functions, []), settings=config))
    assert scores.values == [date(2026, 11, 22).toordinal()] * 2, scores.reasons


def test_a_function_that_sets_alarms_of_its_own_is_ended_all_the_same() -> None:
    scores = judged("own_clock", "a", "loop", "a", "loop")
    assert scores.values == [1.0, None, 1.0, None]
    assert all("took longer than reward.timeout_seconds=1" in str(scores.reasons[place]) for place in (1, 3))


def test_what_was_spent_is_a_component_with_and_without_a_reward() -> None:
    scores = judged("paid", "a", "none", "bad", "a")
    assert scores.values == [1.0, None, None, 1.0]
    assert scores.reasons == [None, "nobody knows", "ValueError: component 'cost' is nan", None]
    assert scores.components == {"correct": [1.0, None, None, 1.0], "cost": [2.0, 3.0, None, 2.0]}


def test_too_many_failures_end_the_work_early_and_name_reasons_with_a_sample() -> None:
    began = time.monotonic()
    scores = judged("reward", *["loop"] * 50, max_failed=0.02)
    assert time.monotonic() - began < 20
    assert scores.reasons.count(NOT_JUDGED) > 40
    with pytest.raises(RewardError, match=r"took longer than reward.timeout_seconds=1"):
        check_failures(scores, 0.02, samples(*["loop"] * 50))


def test_an_async_function_judges_side_by_side() -> None:
    began = time.monotonic()
    scores = judged("slow", *["xx"] * 64, kwargs={"seconds": 0.5}, timeout_seconds=5.0)
    assert scores.values == [2.0] * 64
    assert time.monotonic() - began < 16  # one after another it would be 32 s


def test_an_async_function_fails_sample_by_sample() -> None:
    scores = judged("slow", "a", "sleep", "raise", "dddd")
    assert scores.values == [1.0, None, None, 4.0]
    assert scores.reasons[1] == "TookTooLongError: took longer than reward.timeout_seconds=1"
    assert scores.reasons[2] == "ValueError: no"


def test_an_async_function_judges_more_samples_than_a_process_gets_at_a_time() -> None:
    responses = ["x" * (1 + place % 5) for place in range(1500)]
    responses[700] = "raise"
    scores = judged("slow", *responses, kwargs={"seconds": 0.001}, timeout_seconds=20.0, runner={"concurrency": 300})
    assert scores.values == [None if each == "raise" else float(len(each)) for each in responses]


def test_a_timeout_of_the_functions_own_is_told_as_that() -> None:
    assert judged("own_timeout", "a").reasons == ["TimeoutError"]


def test_of_samples_side_by_side_only_the_one_that_blocks_is_lost() -> None:
    scores = judged("slow", "a", "bb", "block", "dddd", runner={"concurrency": 4})
    assert scores.values == [1.0, 2.0, None, 4.0]
    assert scores.reasons[2] == "took longer than reward.timeout_seconds=1 and was killed"


def test_an_async_function_of_all_samples_gives_a_list_or_no_reward_at_all() -> None:
    scores = judged("batched_slow", "a", "raise", "ccc")
    assert scores.values == [1.0, None, 3.0]
    assert scores.reasons[1] == "ValueError: no"
    late = judged("batched_slow", "a", "sleep")
    assert late.reasons == ["TookTooLongError: took longer than reward.timeout_seconds=1"] * 2
    stuck = judged("batched_slow", "a", "block")
    assert stuck.reasons == ["took longer than reward.timeout_seconds=1 and was killed"] * 2


def test_a_rate_is_kept() -> None:
    began = time.monotonic()
    judged("slow", *["x"] * 20, kwargs={"seconds": 0.0}, runner={"rate": 20.0})
    assert time.monotonic() - began >= 0.95


def test_a_batched_function_gives_a_list_of_the_same_length() -> None:
    assert judged("batched", "a", "none", "ccc").values == [1.0, None, 3.0]
    wrong = judged("batched", "a", "short")
    assert wrong.reasons == ["ValueError: gave 1 rewards for 2 samples"] * 2


def test_options_and_signature_are_checked_before_anything_runs() -> None:
    assert judged("needs_option", "ab", kwargs={"factor": 2.0}).values == [4.0]
    for name, kwargs, message in (
        ("needs_option", {}, "can't be called without kwargs: missing a required"),
        ("needs_option", {"factr": "s3cret", "key": "hidden"}, "can't be called with kwargs of factr, key: "),
        ("wrong_parameter", {}, "must take `sample` first"),
        ("nothing", {}, "there is no 'nothing' in it"),
    ):
        with pytest.raises(ConfigError, match=r"reward.functions\[0\]") as caught:
            make_judges([RewardFunctionConfig(name=name, path=HOSTILE, kwargs=kwargs)], [])
        assert message in str(caught.value)
        assert "s3cret" not in str(caught.value) and "hidden" not in str(caught.value)


def test_several_functions_add_up_with_a_column_each() -> None:
    functions = [
        {"name": "length", "kwargs": {"target": 1}, "weight": 0.5},
        {"name": "exact_match"},
        {"name": "regex", "kwargs": {"pattern": "z"}, "weight": -1.0, "data_sources": ["other"]},
    ]
    config = RewardConfig.model_validate({"functions": functions})
    given = samples("r", "q")
    scores = score(given, Reward(judges=make_judges(config.functions, []), settings=config))
    assert scores.values == [1.5, 0.5]
    assert scores.components["length"] == [1.0, 1.0]
    assert scores.components["exact_match"] == scores.components["correct"] == [1.0, 0.0]
    assert "regex" not in scores.components


@pytest.mark.parametrize("name", ["catches_everything", "swallows_everything", "swallows_its_end"])
def test_a_function_that_catches_its_own_end_still_has_no_reward(name: str) -> None:
    scores = judged(name, "a", "loop", "c")
    assert scores.values == [1.0, None, 1.0]
    assert "took longer than reward.timeout_seconds=1" in str(scores.reasons[1])


def test_an_async_function_that_goes_on_after_its_end_costs_only_its_own_sample() -> None:
    scores = judged("deaf", "x", "deaf", *["xxx"] * 8, runner={"concurrency": 2})
    assert scores.values == [1.0, None, *[3.0] * 8], scores.reasons
    assert scores.reasons[1] == "took longer than reward.timeout_seconds=1, and its end was swallowed"


def test_an_async_function_of_all_samples_that_goes_on_after_its_end_has_no_rewards() -> None:
    scores = judged("deaf_to_all", "deaf", "x")
    assert scores.reasons == ["took longer than reward.timeout_seconds=1, and its end was swallowed"] * 2


def test_what_an_async_function_hands_to_threads_goes_side_by_side() -> None:
    scores = judged("meets_others", *["x"] * 40, runner={"concurrency": 40}, timeout_seconds=30.0)
    assert scores.values == [1.0] * 40, scores.reasons


def test_shards_that_are_judged_side_by_side_keep_to_the_bounds_of_an_async_function_together() -> None:
    with ThreadPoolExecutor(2) as shards:
        asked = [shards.submit(judged, "clock", *["x"] * 3, runner={"concurrency": 1}) for _ in range(2)]
        first, second = sorted([float(str(value)) for value in each.result().values] for each in asked)
    assert max(first) < min(second)


def test_processes_end_with_a_parent_that_is_killed() -> None:
    text = (
        "import sys; sys.path.insert(0, 'tests/unit/rewards')\n"
        "from test_judge_pool import judged\n"
        "judged('reward', 'a', 'loop', timeout_seconds=600.0)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", text], cwd=Path(__file__).parents[3])
    try:
        until, children = time.monotonic() + 60, list[psutil.Process]()
        while not children and time.monotonic() < until:
            time.sleep(0.1)
            children = psutil.Process(parent.pid).children()
        assert len(children) == 1
        time.sleep(1.0)
    finally:
        parent.kill()
        parent.wait()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []


@pytest.mark.parametrize(
    "line",
    [
        "no JSON\n",
        "1, 2\n",
        "{}\n",
        "[null]\n",
        "[" * 100_000 + "\n",
        "[99, [1.0, {}, null, null, null, null, {}]]\n",
        "[0, [1.0, {}, null, null, null, null, {}]]\n",
        "[2, [NaN, {}, null, null, null, null, {}]]\n",
        '[2, ["x", {}, null, null, null, null, {}]]\n',
        "[2, [1.0, {}, null, [1.0, 2.0], null, null, {}]]\n",
        "[2, 5]\n",
        "half a line ",
    ],
)
def test_what_is_no_verdict_in_the_pipe_of_verdicts_costs_one_sample(line: str) -> None:
    scores = judged("scribbles", "a", "bb", "scribble", "dddd", "eeeee", kwargs={"line": line})
    assert scores.values == [1.0, 2.0, None, 4.0, 5.0]
    assert scores.reasons[2] == (
        "the process of the reward function broke the protocol: something else wrote to the pipe of its verdicts"
    )


def test_of_a_function_that_forks_one_of_the_two_judges() -> None:
    scores = judged("forks", "a", "fork", "ccc", "fork", "eeeee")
    assert scores.values == [1.0, 4.0, 3.0, 4.0, 5.0], scores.reasons


def test_a_file_that_changes_while_it_judges_is_not_followed_by_another_function(tmp_path: Path) -> None:
    file = tmp_path / "changing.py"
    shutil.copy(HOSTILE, file)
    functions = [RewardFunctionConfig(name="changes_itself", path=str(file))]
    config = RewardConfig(functions=functions, max_failed=1.0)
    reward = Reward(judges=make_judges(config.functions, []), settings=config)
    with pytest.raises(RewardError, match=r"changing.py was changed while the run was judging with it; resume the run"):
        score(samples("a", "change", "c"), reward)


def test_after_a_function_with_too_many_failures_no_other_one_is_asked() -> None:
    given = [{"name": "reward", "path": HOSTILE}, {"name": "paid", "path": HOSTILE}]
    config = RewardConfig.model_validate({"functions": given, "max_failed": 0.25})
    reward = Reward(judges=make_judges(config.functions, []), settings=config)
    scores = score(samples("a", "none", "string", "nan"), reward)
    assert [str(each) for each in scores.verdicts["paid"]] == [f"NoReward(reason={NOT_JUDGED!r}, spent={{}})"] * 4
    assert scores.components == {}
    with pytest.raises(RewardError, match=r"2 of 4 rewards failed \(50.0%\) and 2 were not judged any more"):
        check_failures(scores, 0.25)
    few = score(samples("a", "b", "string", "d"), reward)
    assert few.components["cost" if "cost" in few.components else "paid/cost"] == [2.0, 2.0, 2.0, 2.0]


def test_no_function_among_several_takes_the_column_of_right_answers() -> None:
    several = [{"name": "correct", "path": HOSTILE}, {"name": "reward", "path": HOSTILE}]
    with pytest.raises(ValueError, match="none can be named 'correct'"):
        RewardConfig.model_validate({"functions": several})
    assert RewardConfig.model_validate({"functions": several[:1]}).functions[0].name == "correct"
