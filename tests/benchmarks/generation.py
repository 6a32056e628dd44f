"""Engines side by side: `python tests/benchmarks/generation.py [demo] [36M] [endings]`. One thread, float32.

``demo``: the demo's model, 64 prompts x 8 x 64 tokens. ``36M``: a model of 36 million parameters, 16 prompts x 8 x 64.
In both no row ends early, so that all make the same number of tokens. ``endings``: the demo's model where rows end by
themselves too, so that they have 22 tokens on average; only tokens up to a row's end count. The engines take turns,
after one turn that does not count. Seconds are those of the processor, so that others on the machine disturb little; of
each engine the median is printed, and of ratios to `model.generate` of the same turn.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel
from vllm_process import STEM, start

from grpo_lib.config import SmallModelConfig
from grpo_lib.config_data import CountdownData
from grpo_lib.data.ragged import Ragged, lengths_to_offsets
from grpo_lib.generation.base import Request, Sampling
from grpo_lib.generation.local import LocalEngine
from grpo_lib.models import make_small_model, make_tokenizer
from grpo_lib.placement.ranks import RankGroup
from grpo_lib.problems import get_problem
from grpo_lib.seeds import row_seeds
from grpo_lib.training.tensors import save_tensors

ROUNDS = 5
SAMPLES = 8
THE_36M = SmallModelConfig(hidden_size=512, layers=8, heads=8, kv_heads=4, head_dim=64, mlp_size=2048)
Turn = Callable[[], tuple[float, int]]
"""Generates once; returns the seconds that it took and the number of tokens."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What the engines do."""

    shape: SmallModelConfig
    prompts: int
    longest: int
    """Tokens that a row has at most."""
    vocabulary: int | None = None
    """None: that of the tokenizer."""
    end_every: int | None = None
    """About one token in so many ends a row; None: no row ends before it is ``longest``."""

    @cached_property
    def prompt_ids(self) -> list[list[int]]:
        problem = get_problem("countdown")
        tokenizer = make_tokenizer(problem.tags, problem.alphabet)
        texts = problem.load(CountdownData(), "heldout", 0).column("prompt").to_pylist()[: self.prompts]
        return [tokenizer(text)["input_ids"] for text in texts]

    @cached_property
    def size(self) -> int:
        """Of the vocabulary."""
        problem = get_problem("countdown")
        return self.vocabulary or len(make_tokenizer(problem.tags, problem.alphabet))

    @cached_property
    def eos(self) -> list[int]:
        """Tokens that end a row; one that does not exist where none shall."""
        return [self.size] if self.end_every is None else list(range(1, self.size, self.end_every))

    def make_model(self) -> PreTrainedModel:
        return make_small_model(self.shape, self.size, eos_id=1, pad_id=0, max_positions=4096, seed=0)


def timed(call: Callable[[], int]) -> Turn:
    def turn() -> tuple[float, int]:
        began = time.process_time()
        tokens = call()
        return time.process_time() - began, tokens

    return turn


def local(work: Work) -> Turn:
    engine = LocalEngine(work.make_model(), eos_token_ids=work.eos)
    lengths = torch.tensor([len(ids) for ids in work.prompt_ids])
    prompts = Ragged(
        values=torch.tensor([token for ids in work.prompt_ids for token in ids]), offsets=lengths_to_offsets(lengths)
    )
    request = Request(
        prompts=prompts,
        seeds=torch.from_numpy(row_seeds(0, 0, work.prompts * SAMPLES)),
        n=SAMPLES,
        sampling=Sampling(temperature=1.0, max_new_tokens=work.longest),
    )
    return timed(lambda: len(engine.generate(request).responses.values))


def transformers(work: Work) -> Turn:
    """`model.generate`."""
    model = work.make_model()
    width = max(map(len, work.prompt_ids))
    ids = torch.tensor([[0] * (width - len(ids)) + ids for ids in work.prompt_ids])
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in work.prompt_ids])
    eos = torch.tensor(work.eos)

    def call() -> int:
        made = generate(model, ids, mask, work)[:, width:]
        return int((torch.isin(made, eos).cumsum(1).cumsum(1) <= 1).sum())  # up to the first that ends its row

    return timed(call)


@torch.inference_mode()
def generate(model: PreTrainedModel, ids: Tensor, mask: Tensor, work: Work) -> Tensor:
    return model.generate(
        ids,
        attention_mask=mask,
        do_sample=True,
        top_k=0,
        num_return_sequences=SAMPLES,
        max_new_tokens=work.longest,
        eos_token_id=work.eos,
        pad_token_id=0,
    )


class Vllm:
    """vLLM in a process of its own: our engine and its own ``generate`` take turns on one model."""

    def __init__(self) -> None:
        self._group: RankGroup | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="grpo-bench-")

    def start(self, work: Work) -> RankGroup:
        """The process for a work; that of another is ended."""
        self.close()
        folder = Path(self._folder.name) / "model"
        work.make_model().save_pretrained(folder)
        lengths = torch.tensor([len(ids) for ids in work.prompt_ids])
        asked = {"ids": torch.tensor(list(chain(*work.prompt_ids))), "offsets": lengths_to_offsets(lengths)}
        seeds = torch.from_numpy(row_seeds(0, 0, work.prompts * SAMPLES))
        save_tensors(asked | {"seeds": seeds}, Path(self._folder.name), STEM)
        eos = [token for token in work.eos if token < work.size]
        self._group = start(folder, eos, int(lengths.max()) + work.longest, work.prompts * SAMPLES)
        return self._group

    def ours(self, work: Work) -> Turn:
        return self._turn("ours", self.start(work), work)

    def bare(self, work: Work) -> Turn:
        assert self._group is not None, "ours comes first"
        return self._turn("bare", self._group, work)

    def seeded(self, work: Work) -> Turn:
        assert self._group is not None, "ours comes first"
        return self._turn("seeded", self._group, work)

    def _turn(self, command: str, group: RankGroup, work: Work) -> Turn:
        def turn() -> tuple[float, int]:
            seconds, tokens = group.call(command, folder=self._folder.name, n=SAMPLES, longest=work.longest)
            return seconds, int(tokens)

        return turn

    def close(self) -> None:
        if self._group is not None:
            measured = self._group.call("weights", rounds=5)
            load, copy, digest = (1000 * statistics.median(measured[name]) for name in ("load", "copy", "digest"))
            print(
                f"  weights in place {load:.1f} ms, copied {copy:.1f} ms: {load / copy:.1f} x; digest {digest:.1f} ms"
            )
            self._group.close()
            self._group = None


VLLM = Vllm()
ENGINES: dict[str, Callable[[Work], Turn]] = {
    "local": local,
    "vllm": VLLM.ours,
    "LLM.generate": VLLM.bare,
    "with seeds": VLLM.seeded,
    "transformers": transformers,
}
"""Each makes its model from the work; a turn may run in another process and say what it took there."""
WORKS = {
    "demo": Work(shape=SmallModelConfig(), prompts=64, longest=64),
    "36M": Work(shape=THE_36M, vocabulary=8_000, prompts=16, longest=64),
    "endings": Work(shape=SmallModelConfig(), prompts=64, longest=64, end_every=32),
}


def compare(name: str, work: Work, rounds: int = ROUNDS) -> None:
    turns = {engine: make(work) for engine, make in ENGINES.items()}
    for turn in turns.values():
        turn()
    speeds: dict[str, list[float]] = {engine: [] for engine in turns}
    for _ in range(rounds):
        for engine, turn in turns.items():
            seconds, tokens = turn()
            speeds[engine].append(tokens / seconds)
    parameters = sum(parameter.numel() for parameter in work.make_model().parameters())
    print(
        f"generation, {name}: {parameters:,} parameters, {work.prompts * SAMPLES} rows of up to {work.longest} tokens:"
    )
    for engine, measured in speeds.items():
        ratios = [
            statistics.median(a / b for a, b in zip(measured, speeds[other], strict=True))
            for other in ("transformers", "LLM.generate")
        ]
        print(
            f"  {engine:<12} {statistics.median(measured):>8,.0f} tokens/s, {ratios[0]:.2f} x model.generate, "
            f"{ratios[1]:.2f} x LLM.generate"
        )


def generation(names: list[str] | None = None) -> None:
    for name in names or WORKS:
        compare(name, WORKS[name])
        VLLM.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    generation(sys.argv[1:])
