"""Several equal engines that share the rows: data parallelism."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Lock
from typing import TypeVar

import torch
from torch import Tensor

from grpo_lib.data.ragged import Ragged, lengths_to_offsets
from grpo_lib.errors import ParityError
from grpo_lib.generation.base import Budget, Engine, Generated, Progress, Request

Result = TypeVar("Result")


class Replicas:
    """An `Engine` that gives each of ``engines`` an equal part of the prompts.

    Rows come out as from one engine: they depend on their seeds alone.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = list(engines)
        self.name, self.version = engines[0].name, engines[0].version

    @property
    def alive(self) -> bool:
        return all(each.alive for each in self._engines)

    def generate(self, request: Request, on_progress: Progress | None = None) -> Generated:
        parts = torch.arange(request.prompts.rows).tensor_split(len(self._engines))
        busy = [(engine, part) for engine, part in zip(self._engines, parts, strict=True) if len(part)]
        states, lock = [(0, 0, 0)] * len(busy), Lock()

        def run(place: int) -> Generated:
            def show(*state: int) -> None:
                with lock:
                    states[place] = state[0], state[1], state[2]
                    if on_progress is not None:
                        done, tokens = (sum(each[which] for each in states) for which in (0, 2))
                        on_progress(done, len(request.seeds), tokens)

            engine, part = busy[place]
            return engine.generate(_part(request, part, len(busy)), show)

        return _joined(self._each(range(len(busy)), run))

    def load(self, state: Mapping[str, Tensor]) -> None:
        self._each(self._engines, lambda engine: engine.load(state))

    def digest(self) -> str:
        found = {each.digest() for each in self._engines}
        if len(found) > 1:
            raise ParityError(f"the {len(self._engines)} {self.name} engines hold different weights: {sorted(found)}")
        return found.pop()

    def sleep(self) -> None:
        self._each(self._engines, lambda engine: engine.sleep())

    def wake(self) -> None:
        self._each(self._engines, lambda engine: engine.wake())

    def close(self) -> None:
        self._each(self._engines, lambda engine: engine.close())

    def _each(self, what: Sequence[Result] | range, call: Callable[..., Generated] | Callable[..., None]) -> list:
        """Side by side; all have ended before the first error is raised."""
        with ThreadPoolExecutor(max_workers=len(self._engines)) as pool:
            futures = [pool.submit(call, each) for each in what]
        return [future.result() for future in futures]


def _part(request: Request, prompts: Tensor, parts: int) -> Request:
    """The rows of some neighbouring prompts, with their share of the budget's tokens."""
    rows = slice(int(prompts[0]) * request.n, (int(prompts[-1]) + 1) * request.n)
    budget = request.budget
    if budget is not None and budget.tokens is not None:
        budget = Budget(seconds=budget.seconds, tokens=max(1, budget.tokens // parts))
    return replace(
        request,
        prompts=request.prompts.gather(prompts),
        seeds=request.seeds[rows],
        limits=None if request.limits is None else request.limits[rows],
        budget=budget,
    )


def _joined(parts: Sequence[Generated]) -> Generated:
    lengths = torch.cat([each.responses.lengths for each in parts])
    return Generated(
        responses=Ragged(
            values=torch.cat([each.responses.values for each in parts]), offsets=lengths_to_offsets(lengths)
        ),
        logprobs=torch.cat([each.logprobs for each in parts]),
        finish=torch.cat([each.finish for each in parts]),
    )
