"""Rewards through the runner against the bare functions: `python tests/benchmarks/rewards.py [gsm8k] [own] [judge]`.

``gsm8k``: 100,000 samples through the built-in function, which runs in the runner's process. ``own``: through a like
function in a file of the user's, which runs in a process of its own, its start included. Each against the function
called in a loop over the same samples, whose results are kept; both take turns. Seconds of ``gsm8k`` are those of the
processor, so that others on the machine disturb little. ``judge``: 100,000 samples through an async function that waits
20 ms, against the time that waiting alone takes: n x 20 ms / concurrency.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from grpo_lib.config_reward import RewardConfig
from grpo_lib.plugins import load_function
from grpo_lib.rewards.builtin import gsm8k
from grpo_lib.rewards.judges import Reward, make_judges
from grpo_lib.rewards.runner import score
from grpo_lib.types import RewardResult, Sample

COUNT = 100_000
ROUNDS = 3
WAIT_SECONDS = 0.02
CONCURRENCY = (256, 1024)
FUNCTIONS = f"""
import asyncio, re
from fractions import Fraction
from grpo_lib.types import RewardResult

NUMBER = re.compile(r"#### *([-+]?[0-9][0-9,]*(?:[.][0-9]+)?)")

def number(text):
    found = NUMBER.findall(text)
    return Fraction(found[-1].replace(",", "")) if found else None

def own(sample):
    right = number(sample.response) == number("#### " + sample.reference)
    return RewardResult(value=float(right), components={{"correct": float(right)}})

async def judge(sample):
    await asyncio.sleep({WAIT_SECONDS})
    return 1.0
"""
QUESTION = "Natalia sold clips to {n} of her friends in April, and then she sold half as many clips in May. " * 2
ANSWER = "In May she sold {n}/2 = <<{n}/2={half}>>{half} clips.\nIn all she sold {n}+{half} = {all} clips.\n#### {all}"


def samples(count: int = COUNT) -> list[Sample]:
    """Every third is wrong."""
    ids = np.arange(60, dtype=np.int32)
    return [
        Sample(
            prompt=QUESTION.format(n=2 * n), response=ANSWER.format(n=2 * n, half=n, all=3 * n + (n % 3 == 0)),
            reference=str(3 * n), data_source="gsm8k", response_tokens=60, finish_reason="stop", prompt_id=f"p{n}",
            response_ids=ids,
        )
        for n in range(count)
    ]  # fmt: skip


def reward_of(function: dict[str, Any], **settings: Any) -> Reward:
    config = RewardConfig.model_validate({"functions": [function]} | settings)
    return Reward(judges=make_judges(config.functions, []), settings=config)


def seconds(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    began = clock()
    call()
    return clock() - began


def against_a_loop(
    what: str,
    function: Callable[[Sample], RewardResult],
    reward: Reward,
    given: list[Sample],
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    def ours() -> object:
        return score(given, reward)

    def loop() -> object:
        return [function(sample) for sample in given]

    assert score(given, reward).values == [function(sample).value for sample in given]
    pairs = [(seconds(ours, clock), seconds(loop, clock)) for _ in range(ROUNDS)]
    mine, theirs = (statistics.median(each) for each in zip(*pairs, strict=True))
    ratio = statistics.median(a / b for a, b in pairs)
    print(f"| {what} | {mine:.2f} | {1e6 * mine / len(given):.1f} | {theirs:.2f} | {ratio:.2f} |", flush=True)


def against_waiting(path: str, given: list[Sample]) -> None:
    rewards = {each: reward_of({"name": "judge", "path": path}, runner={"concurrency": each}) for each in CONCURRENCY}
    taken = [{each: seconds(lambda r=r: score(given, r)) for each, r in rewards.items()} for _ in range(ROUNDS)]
    for each in CONCURRENCY:
        bound, mine = len(given) * WAIT_SECONDS / each, statistics.median(one[each] for one in taken)
        what = f"async, {1000 * WAIT_SECONDS:.0f} ms, {each:,} at a time"
        print(f"| {what} | {mine:.2f} | {1e6 * mine / len(given):.1f} | {bound:.2f} | {mine / bound:.2f} |", flush=True)


def rewards(names: list[str] | None = None) -> None:
    chosen, given = names or ["gsm8k", "own", "judge"], samples()
    print(f"rewards: {len(given):,} samples; the loop's seconds, or those of waiting alone\n")
    print("| function | seconds | us a sample | against (s) | ratio |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "bench_rewards.py")
        Path(path).write_text(FUNCTIONS)
        if "gsm8k" in chosen:
            what, reward = "gsm8k, in the runner's process", reward_of({"name": "gsm8k"})
            against_a_loop(what, gsm8k, reward, given, time.process_time)
        if "own" in chosen:
            function = load_function(f"{path}:own", "benchmark")
            against_a_loop("of a file, in a process", function, reward_of({"name": "own", "path": path}), given)
        if "judge" in chosen:
            against_waiting(path, given)


if __name__ == "__main__":
    rewards(sys.argv[1:])
