"""The algorithms' cost an iteration: `python tests/benchmarks/algorithms.py [--rows N] [--observations F] [PART...]`.

Time is a ratio to *one pass*, which sums every column that the function reads, as fast as we know: float and integer
columns with `torch.sum`; bool columns read as int64, eight tokens at a time (four times as fast as numpy's sum). Both
on one thread, in CPU seconds, so that others on the machine disturb little. Function and pass alternate; medians of
three rounds, after one that does not count. A function that returns columns also has to write them into fresh memory,
which costs more than to read: the second ratio is to a pass that reads the same and fills a fresh column of that size.

Memory is the peak over the inputs' size, inputs counted: each part runs in a process of its own that makes the inputs,
resets the kernel's high-water mark of resident memory (`/proc/self/clear_refs`), calls the function, and reads it
(`VmHWM`); this sees what torch and numpy allocate alike. Where the peak would not fit the budget there are fewer rows.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from grpo_lib.algorithms.advantages import ADVANTAGES, TokenAdvantages
from grpo_lib.algorithms.losses import LOSSES, PolicyLoss, value_loss
from grpo_lib.algorithms.rollout_correction import Importance, Rejection, correct
from grpo_lib.data.ragged import lengths_to_offsets, repeat_rows, row_blocks, segment_sum, spread_rows

ROWS, GROUP, MEAN_LENGTH, LONGEST = 1_000_000, 8, 256, 2048
BUDGET = 12 * 2**30
"""Bytes of resident memory that a part may take."""
OBSERVATIONS = 0.05
"""Fraction of tokens with mask 0."""
ROUNDS = 3
Column = Tensor | tuple[str, ...] | None


@dataclass(frozen=True, kw_only=True)
class Part:
    """One measured function."""

    name: str
    reads: tuple[str, ...]
    """Its columns, by name."""
    make: Callable[[dict[str, Column]], Callable[[], object]]
    """Of the columns: the call."""
    writes: int = 0
    """Bytes of fresh columns a token."""


@dataclass(frozen=True, kw_only=True)
class Result:
    name: str
    rows: int
    tokens: int
    nanoseconds: float
    """A token."""
    ratio: float
    """To one pass."""
    write_ratio: float
    """To one pass that also fills columns of the result's size."""
    memory: float
    """Peak over the inputs, inputs counted."""
    peak: float
    """Bytes a token."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="substrings of names; default: all")
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--observations", type=float, default=OBSERVATIONS, help="fraction of tokens with mask 0")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        torch.set_num_threads(1)
        (part,) = (each for each in parts() if each.name == arguments.parts[0])
        print(json.dumps(asdict(measured(part, arguments.rows, arguments.observations))))
    else:
        algorithms(arguments.rows, arguments.observations, arguments.parts)


def algorithms(rows: int = ROWS, observations: float = OBSERVATIONS, chosen: Sequence[str] = ()) -> None:
    """Prints the table, a line a part; with ``chosen`` those whose names hold one of them."""
    print(
        f"algorithms: {rows:,} rows of {MEAN_LENGTH} tokens on average (log-normal, at most {LONGEST}), groups of "
        f"{GROUP}, {observations:.0%} of tokens masked\n\n"
        "| function | rows | ns a token | passes | passes that write | peak / inputs | peak bytes a token |\n"
        "|---|---|---|---|---|---|---|"
    )
    for part in parts():
        if not chosen or any(each in part.name for each in chosen):
            result = run(part.name, min(rows, 20_000), observations)
            fits = int(BUDGET / (result.peak * MEAN_LENGTH))
            if rows > result.rows:
                result = run(part.name, min(rows, fits), observations)
            print(
                f"| {result.name} | {result.rows:,} | {result.nanoseconds:.2f} | {result.ratio:.1f} | "
                f"{result.write_ratio:.1f} | {result.memory:.1f} | {result.peak:.0f} |",
                flush=True,
            )


def run(name: str, rows: int, observations: float) -> Result:
    """In a process of its own."""
    command = [sys.executable, __file__, "--child", name, f"--rows={rows}", f"--observations={observations}"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True, check=True)
    return Result(**json.loads(done.stdout.splitlines()[-1]))


def measured(part: Part, rows: int, observations: float) -> Result:
    columns = make_columns(part.reads, rows, observations)
    tensors = [each for each in columns.values() if isinstance(each, Tensor)]
    tokens = int(lengths_of(rows).sum())
    call = part.make(columns)

    def reads() -> float:
        return sum(one_pass(each) for each in tensors)

    def reads_and_writes() -> object:
        fresh = np.empty(part.writes * tokens, dtype=np.uint8)  # numpy's: huge pages, half of torch's time
        fresh.fill(1)
        return reads(), fresh

    peak = peak_bytes(call)
    inputs = sum(each.nbytes for each in tensors)
    contenders = (call, reads, reads_and_writes)
    for each in contenders:
        each()
    times = [[seconds(each) for each in contenders] for _ in range(ROUNDS)]
    ours, least, least_written = (statistics.median(column) for column in zip(*times, strict=True))
    return Result(
        name=part.name,
        rows=rows,
        tokens=tokens,
        nanoseconds=1e9 * ours / tokens,
        ratio=ours / least,
        write_ratio=ours / least_written,
        memory=(inputs + peak) / inputs,
        peak=(inputs + peak) / tokens,
    )


def one_pass(column: Tensor) -> float:
    if column.dtype == torch.bool:
        whole = len(column) // 8 * 8
        return float(column[:whole].view(torch.int64).sum() + column[whole:].sum())
    return float(column.sum())


def seconds(call: Callable[[], object]) -> float:
    """Of the processor, with what the kernel does for it."""
    began = time.process_time()
    call()
    return time.process_time() - began


def peak_bytes(call: Callable[[], object]) -> int:
    """Most resident memory during the call, over what there was before."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    call()
    return max(0, _status("VmHWM") - before)


def _status(name: str) -> int:
    (line,) = (each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith(name))
    return int(line.split()[1]) * 1024


def lengths_of(rows: int) -> Tensor:
    """``int64[B]``, log-normal."""
    generator = torch.Generator().manual_seed(0)
    raw = torch.randn(rows, generator=generator).mul_(0.8).exp_()
    return (raw * (MEAN_LENGTH / 1.36)).round_().long().clamp_(1, LONGEST)


def make_columns(names: tuple[str, ...], rows: int, observations: float) -> dict[str, Column]:
    """The columns with those names; equal for equal arguments."""
    lengths = lengths_of(rows)
    offsets = lengths_to_offsets(lengths)
    tokens = int(offsets[-1])

    def uniform(name: str, count: int = tokens) -> Tensor:
        seed = int.from_bytes(name.encode()[:6], "big")
        return torch.rand(count, generator=torch.Generator().manual_seed(seed))

    def mask() -> Tensor:
        return uniform("mask") >= observations

    def token_rewards() -> Tensor:
        column = torch.zeros(tokens, dtype=torch.float64)
        column[offsets[1:] - 1] = uniform("token_rewards", rows).round().double()
        return column

    def near(name: str) -> Tensor:
        """Like ``old_logprobs``, off by a little."""
        return uniform("old_logprobs").mul_(-4).add_(uniform(name).sub_(0.5).mul_(0.4))

    known: dict[str, Callable[[], Column]] = {
        "offsets": lambda: offsets,
        "lengths": lambda: lengths,
        "rewards": lambda: uniform("rewards", rows).mul_(3).round().double(),
        "group_ids": lambda: torch.arange(rows) // GROUP,
        "mask": mask,
        "valid_tokens": lambda: segment_sum(mask().long(), offsets),
        "token_rewards": token_rewards,
        "greedy_rewards": lambda: uniform("greedy_rewards", rows).round().double(),
        "components": lambda: uniform("components", 2 * rows).double().view(2, rows),
        "component_names": lambda: ("first", "second"),
        "values": lambda: uniform("values"),
        "old_values": lambda: uniform("old_values"),
        "returns": lambda: uniform("returns"),
        "old_logprobs": lambda: uniform("old_logprobs").mul_(-4),
        "rollout_logprobs": lambda: near("rollout_logprobs"),
        "logprobs": lambda: near("logprobs"),
        "sum_squared_probs": lambda: uniform("sum_squared_probs"),
        "is_weights": lambda: uniform("is_weights"),
        "advantages": lambda: repeat_rows(uniform("advantages", rows) - 0.5, offsets),
        "weights": lambda: torch.full((tokens,), 1 / tokens),
        "selected": lambda: uniform("selected") < 0.01,
    }
    return {name: known[name]() for name in names}


def parts() -> list[Part]:
    """Every estimator, the correction, every loss."""
    found = []
    for estimator in ADVANTAGES:
        needs = dict.fromkeys([*estimator.columns, "mask", "offsets"])
        found.append(
            Part(
                name=f"advantage {estimator.name}",
                reads=tuple(needs),
                make=partial(_advantage, estimator.bind({}, ""), estimator.columns),
                writes=4,
            )
        )
    reads: tuple[str, ...] = ("old_logprobs", "rollout_logprobs", "mask", "offsets")
    found.append(Part(name="correction", reads=reads, make=_correction, writes=4 + 1))
    for loss in LOSSES:
        needs = dict.fromkeys(["logprobs", *loss.columns, "weights", "offsets"])
        found.append(
            Part(
                name=f"loss {loss.name}",
                reads=tuple(needs),
                make=partial(_loss, loss.bind({}, ""), loss.columns),
            )
        )
        helper = loss.bind_helper({}, "")
        if helper is not None:
            draws = ("values",) if loss.name == "clip_cov" else ()  # any uniform column
            reads = ("logprobs", "advantages", *draws)
            found.append(
                Part(name=f"selection of {loss.name}", reads=reads, make=partial(_selection, helper), writes=1)
            )
    reads = ("values", "old_values", "returns", "weights", "offsets")
    found.append(Part(name="loss of values", reads=reads, make=partial(_loss, _value_loss, reads[:3])))
    return found


def _advantage(estimator: Callable[..., object], names: tuple[str, ...], columns: dict[str, Column]) -> Callable:
    mask, offsets = columns["mask"], columns["offsets"]
    assert isinstance(mask, Tensor) and isinstance(offsets, Tensor)

    def call() -> Tensor:
        result = estimator(*(columns[name] for name in names))
        if isinstance(result, TokenAdvantages):
            return result.advantages.float()
        assert isinstance(result, Tensor)
        return spread_rows(result, mask, offsets)

    return call


def _correction(columns: dict[str, Column]) -> Callable[[], object]:
    return partial(
        correct,
        *columns.values(),  # type: ignore[arg-type]
        importance=Importance(level="token", upper=2.0),
        rejections=[Rejection(kind="geometric", upper=1.05)],
        veto=1e-4,
    )


def _loss(loss: Callable[..., PolicyLoss], names: tuple[str, ...], columns: dict[str, Column]) -> Callable[[], object]:
    """Forward and backward, a micro-batch at a time; the gradient is written into one column."""
    offsets, weights = columns["offsets"], columns["weights"]
    assert isinstance(offsets, Tensor) and isinstance(weights, Tensor)
    gradient = torch.zeros(len(weights))
    blocks = [(rows, slice(int(offsets[rows.start]), int(offsets[rows.stop]))) for rows in row_blocks(offsets)]

    def of_block(name: str, rows: slice, tokens: slice) -> Tensor:
        column = columns[name]
        assert isinstance(column, Tensor)
        return offsets[rows.start : rows.stop + 1] - tokens.start if name == "offsets" else column[tokens]

    def call() -> None:
        for rows, tokens in blocks:
            given = {name: of_block(name, rows, tokens) for name in names}
            leaf = given[names[0]] = given[names[0]].detach().requires_grad_()
            result = loss(*given.values())
            (weights[tokens] * result.values).sum().backward()
            assert leaf.grad is not None
            gradient[tokens] = leaf.grad

    return call


def _value_loss(values: Tensor, old_values: Tensor, returns: Tensor) -> PolicyLoss:
    none = torch.zeros(0)
    return PolicyLoss(
        values=value_loss(values, old_values, returns, clip=0.2), ratio=none, clipped_high=none, clipped_low=none
    )


def _selection(helper: Callable[..., Tensor], columns: dict[str, Column]) -> Callable[[], object]:
    return partial(helper, *columns.values())


if __name__ == "__main__":
    main()
