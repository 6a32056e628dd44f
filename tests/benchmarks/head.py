"""The head against full logits, time and memory: `python tests/benchmarks/head.py`.

A vocabulary of 151,936, hidden states of 256, 4,096 tokens, one thread. Ours is `token_scores`; the other makes the
logits, their log-softmax and the entropy in whole. Time is CPU seconds in a process of its own, so that others on the
machine disturb little; the processes alternate, and medians of three are printed. Memory is the most that is resident
during the call over what there was before (`algorithms.py`).
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from algorithms import peak_bytes
from torch import Tensor

from grpo_lib.training.logprobs import Head, token_scores

VOCABULARY, WIDTH, TOKENS, TEMPERATURE = 151_936, 256, 4_096, 0.8
ROUNDS = 3
Scores = tuple[Tensor, Tensor]


def ours(hidden: Tensor, weight: Tensor, targets: Tensor) -> Scores:
    scores = token_scores(hidden, Head(weight=weight), targets, TEMPERATURE)
    return scores.logprobs, scores.entropy


def full(hidden: Tensor, weight: Tensor, targets: Tensor) -> Scores:
    log_p = torch.log_softmax(hidden @ weight.T / TEMPERATURE, dim=-1)
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


SIDES: dict[str, Callable[[Tensor, Tensor, Tensor], Scores]] = {"ours": ours, "full": full}


def head() -> None:
    print(f"head: vocabulary {VOCABULARY:,}, hidden {WIDTH}, {TOKENS:,} tokens, one thread, against full logits:")
    for what in ("forward", "both"):
        rounds = [{side: run(side, what) for side in SIDES} for _ in range(ROUNDS)]
        (a, mine), (b, theirs) = (
            tuple(statistics.median(each[side][i] for each in rounds) for i in (0, 1)) for side in SIDES
        )
        print(
            f"  {'forward' if what == 'forward' else 'forward and backward'}: {a:.2f} s, {mine / 2**20:,.0f} MiB; full "
            f"{b:.2f} s, {theirs / 2**20:,.0f} MiB: {a / b:.2f}x the time, 1/{theirs / mine:.1f} of the memory",
            flush=True,
        )


def run(side: str, what: str) -> tuple[float, int]:
    """CPU seconds and bytes, in a process of its own."""
    command = [sys.executable, __file__, side, what]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True, check=True)
    taken, peak = json.loads(done.stdout.splitlines()[-1])
    return taken, peak


def measured(side: str, what: str) -> tuple[float, int]:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).mul_(0.1).requires_grad_()
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    call(side, what, hidden[:8], weight, targets[:8])  # libraries load
    weight.grad = hidden.grad = None
    taken: list[float] = []

    def timed() -> None:
        began = time.process_time()
        call(side, what, hidden, weight, targets)
        taken.append(time.process_time() - began)

    peak = peak_bytes(timed)
    return taken[0], peak


def call(side: str, what: str, hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    with torch.set_grad_enabled(what == "both"):
        logprobs, entropy = SIDES[side](hidden, weight, targets)
        if what == "both":
            (logprobs.sum() + 0.1 * entropy.sum()).backward()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measured(sys.argv[1], sys.argv[2])))
    else:
        head()
