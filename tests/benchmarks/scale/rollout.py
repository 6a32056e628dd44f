"""Seconds of a rollout: prompts read once, then decoding bound by memory, with rows that end at different times."""

import heapq
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tests.benchmarks.scale.hardware import Efficiency, Gpu
from tests.benchmarks.scale.model import HALF, Model
from tests.benchmarks.scale.workload import Workload

MAX_ROWS = 512
"""Rows an engine decodes at a time: the default of `rollout.vllm.max_rows`."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One copy of a model over ``tensor_parallel`` GPUs."""

    model: Model
    gpu: Gpu
    efficiency: Efficiency
    tensor_parallel: int
    reserved: float = 0.0
    """Bytes of each GPU that a trainer keeps while the engine works."""

    def fixed_seconds(self, rows: int) -> float:
        """Of a step, whatever the rows' context: all weights are read, each row is multiplied with them."""
        model, gpu, reached, shares = self.model, self.gpu, self.efficiency, self.tensor_parallel
        read = model.weight_bytes / shares / (gpu.bandwidth * reached.bandwidth)
        compute = rows * model.weight_bytes / shares / (gpu.flops * reached.matmul)  # 2 operations a weight of 2 bytes
        exchange = 0.0
        if shares > 1:
            moved = 2 * (shares - 1) / shares * rows * model.hidden * HALF
            exchange = 2 * model.layers * (reached.all_reduce_seconds + moved / (gpu.link * reached.link))
        return max(read, compute) + exchange + reached.step_seconds

    @property
    def token_seconds(self) -> float:
        """Of a step, for each token in the cache: its keys and values are read."""
        return self.model.kv_bytes(self.tensor_parallel) / (self.gpu.bandwidth * self.efficiency.bandwidth)

    @property
    def cache_tokens(self) -> int:
        """That fit beside the weights; below 0 if these don't."""
        weights = HALF * self.model.parameters / self.tensor_parallel
        free = self.gpu.memory * self.efficiency.memory - weights - self.reserved
        return int(free / self.model.kv_bytes(self.tensor_parallel))

    def rows_at_a_time(self, prompt_tokens: int, lengths: NDArray[np.int64]) -> int:
        """By the mean context of a row that is being decoded, long rows being there longer; 0: not even one fits."""
        if self.cache_tokens < prompt_tokens + int(lengths.max()):
            return 0
        context = prompt_tokens + float((lengths.astype(np.float64) ** 2).sum()) / (2 * float(lengths.sum()))
        return max(1, min(MAX_ROWS, int(self.cache_tokens / context)))

    def prefill_seconds(self, prompts: float, prompt_tokens: int) -> float:
        """Prompts are read once a group."""
        tokens = prompts * prompt_tokens
        return 2 * self.model.body * tokens / (self.tensor_parallel * self.gpu.flops * self.efficiency.matmul)

    def decode_seconds(self, prompt_tokens: int, lengths: NDArray[np.int64]) -> float:
        """Until the last row ends; a row that ends makes room for one that waits. Infinite if a row does not fit.

        Between two endings the number of rows is constant and the context grows by one token a row and step.
        """
        room = self.rows_at_a_time(prompt_tokens, lengths)
        if room == 0:
            return float("inf")
        waiting = list(np.random.default_rng(0).permutation(lengths))  # nobody knows beforehand which are long
        running: list[tuple[int, int]] = []  # step of the end, context then
        step, context, seconds = 0, 0, 0.0
        while running or waiting:
            while waiting and len(running) < room:
                length = int(waiting.pop())
                heapq.heappush(running, (step + length, prompt_tokens + length))
                context += prompt_tokens
            rows, steps = len(running), running[0][0] - step
            read = steps * context + rows * steps * (steps - 1) / 2
            seconds += steps * self.fixed_seconds(rows) + read * self.token_seconds
            step, context = step + steps, context + rows * steps
            while running and running[0][0] == step:
                context -= heapq.heappop(running)[1]
        return seconds


@lru_cache(maxsize=65_536)
def interrupted_seconds(engine: Engine, workload: Workload, engines: int, ahead: float) -> float:
    """In the steady state where nobody waits for the longest row: each new policy goes on with what is unfinished.

    An engine always has its part of ``1 + ahead`` batches in work, or as many rows as fit; their contexts are read
    again with each new policy.
    """
    rows = workload.rows / engines
    lengths = workload.lengths(workload.rows)
    room = engine.rows_at_a_time(workload.prompt_tokens, lengths)
    if room == 0:
        return float("inf")
    running = max(1, min(room, round((1 + ahead) * rows)))
    mean_context = workload.prompt_tokens + float((lengths.astype(np.float64) ** 2).sum()) / (2 * float(lengths.sum()))
    steps = rows * workload.mean_tokens / running
    step = engine.fixed_seconds(running) + running * mean_context * engine.token_seconds
    again = engine.prefill_seconds(running, round(mean_context))
    return engine.prefill_seconds(rows / workload.samples, workload.prompt_tokens) + again + steps * step


@lru_cache(maxsize=65_536)
def rollout_seconds(engine: Engine, workload: Workload, engines: int) -> float:
    """Of the engine with the longest row; rows are dealt out evenly, as shards of a stage are."""
    rows = -(-workload.rows // engines)
    prefill = engine.prefill_seconds(max(1.0, rows / workload.samples), workload.prompt_tokens)
    return prefill + engine.decode_seconds(workload.prompt_tokens, workload.lengths(rows))
