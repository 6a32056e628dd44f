"""vLLM for the benchmarks, in a process of its own: our engine and vLLM's own `LLM.generate` on the same model.

Seconds are those of that process's processor.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from grpo_lib.data.ragged import Ragged
from grpo_lib.generation.base import Request, Sampling
from grpo_lib.generation.vllm import VllmEngine, VllmOptions
from grpo_lib.models import load_model
from grpo_lib.placement.ranks import RankGroup
from grpo_lib.training.digest import weights_digest
from grpo_lib.training.tensors import load_tensors

STEM = "tensors"


def start(folder: Path, eos: Sequence[int], max_length: int, rows: int) -> RankGroup:
    """The process; its commands are those of `Bench`."""
    here = Path(__file__).parent
    return RankGroup(
        ranks=1,
        handler="vllm_process:Bench",
        setup={"folder": str(folder), "eos": list(eos), "max_length": max_length, "rows": rows},
        device="cpu",
        threads=1,
        start_seconds=300,
        command_seconds=600,
        alone={"PYTHONPATH": os.pathsep.join([str(here), str(here.parents[1])])},
        name="vLLM of the benchmark",
    )


class Bench:
    """The commands."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self._folder, self._eos = setup["folder"], setup["eos"]
        self._engine = VllmEngine(
            setup["folder"],
            eos_token_ids=setup["eos"],
            dtype=torch.float32,
            device="cpu",
            options=VllmOptions(max_length=setup["max_length"], max_rows=setup["rows"]),
        )

    def ours(self, folder: str, n: int, longest: int) -> list[float]:
        asked = load_tensors(Path(folder), STEM)
        request = Request(
            prompts=Ragged(values=asked["ids"], offsets=asked["offsets"]),
            seeds=asked["seeds"],
            n=n,
            sampling=Sampling(temperature=1.0, max_new_tokens=longest),
        )
        return _timed(lambda: len(self._engine.generate(request).responses.values))

    def bare(self, folder: str, n: int, longest: int, **more: Any) -> list[float]:
        """With what RL needs: the log-prob of each token."""
        from vllm import SamplingParams

        asked = load_tensors(Path(folder), STEM)
        values, offsets = asked["ids"].tolist(), asked["offsets"].tolist()
        prompts = [{"prompt_token_ids": values[a:b]} for a, b in pairwise(offsets)]
        settings = SamplingParams(
            n=n, temperature=1.0, max_tokens=longest, logprobs=0, detokenize=False, ignore_eos=True,
            stop_token_ids=self._eos, **more,
        )  # fmt: skip

        def call() -> int:
            made = self._engine._llm.generate(prompts, settings, use_tqdm=False)
            return sum(len(each.token_ids) for row in made for each in row.outputs)

        return _timed(call)

    def seeded(self, folder: str, n: int, longest: int) -> list[float]:
        """As ``bare``, with generators of each row's own."""
        return self.bare(folder, n, longest, seed=0)

    def weights(self, rounds: int) -> dict[str, list[float]]:
        """Seconds to take weights in place, to copy them, and to make their digest."""
        state = load_model(self._folder, torch.float32, "cpu").state_dict()
        twin = {name: torch.empty_like(value) for name, value in state.items()}

        def copy() -> int:
            for name, value in state.items():
                twin[name].copy_(value)
            return 0

        def load() -> int:
            self._engine._llm.collective_rpc("take_weights", kwargs={"state": state})
            return 0

        def digest() -> int:
            weights_digest(state)
            return 0

        calls = {"load": load, "copy": copy, "digest": digest}
        found = {name: [_timed(call)[0] for _ in range(rounds + 1)][1:] for name, call in calls.items()}
        return found


def _timed(call: Callable[[], int]) -> list[float]:
    began = time.process_time()
    tokens = call()
    return [time.process_time() - began, tokens]
