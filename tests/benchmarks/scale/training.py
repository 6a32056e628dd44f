"""Seconds of passes of the trainer: computing, gathering sharded weights, the optimizer's step."""

from dataclasses import dataclass
from math import ceil

from tests.benchmarks.scale.hardware import Efficiency, Gpu
from tests.benchmarks.scale.model import HALF, STATE_BYTES, Model
from tests.benchmarks.scale.workload import Workload

FLOAT = 4
ADAM_BYTES = 28
"""Of a parameter in the optimizer's step: weight, gradient and two moments read; weight and moments written."""


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """A model that is sharded over all ``gpus``, as `fsdp2` does it: weights are gathered layer by layer in bfloat16,
    gradients reduced in float32, both while other layers compute."""

    model: Model
    gpu: Gpu
    efficiency: Efficiency
    gpus: int
    max_tokens: int = 16_384
    """Of a micro-batch of one GPU: the default of `trainer.max_tokens`."""
    recompute: bool = True
    row_gpus: int = 1
    """Over which a row is spread, by tensor, pipeline or sequence parallelism; this project has none."""

    @property
    def state_bytes(self) -> float:
        """Of each GPU."""
        return STATE_BYTES * self.model.parameters / self.gpus

    @property
    def fits(self) -> bool:
        return self.state_bytes <= self.gpu.memory * self.efficiency.training_memory

    def logprob_seconds(self, workload: Workload) -> float:
        """Of one forward pass over all rows."""
        flops = self.model.forward_flops(workload.prompt_tokens, workload.lengths(workload.rows))
        return self._pass_seconds(workload, workload.rows, flops, HALF)

    def update_seconds(self, workload: Workload) -> float:
        """Of all optimizer steps of an iteration."""
        rows = max(1, workload.rows // workload.optimizer_steps)
        flops = self.model.update_flops(workload.prompt_tokens, workload.lengths(workload.rows), self.recompute)
        step = self._pass_seconds(workload, rows, flops / workload.optimizer_steps, 2 * HALF + FLOAT)
        moved = ADAM_BYTES * self.model.parameters / self.gpus
        return workload.optimizer_steps * (step + moved / (self.gpu.bandwidth * self.efficiency.bandwidth))

    def _pass_seconds(self, workload: Workload, rows: int, flops: float, bytes_moved: int) -> float:
        """``flops`` on all GPUs together, ``bytes_moved`` of each parameter a micro-batch. A row stays on
        its ``row_gpus``."""
        share = workload.tokens / workload.rows * rows / self.gpus
        longest = (workload.prompt_tokens + int(workload.lengths(rows)[-1])) / min(self.row_gpus, self.gpus)
        uneven = max(1.0, longest / share)
        compute = uneven * flops / (self.gpus * self.gpu.flops * self.efficiency.matmul)
        if self.gpus == 1:
            return compute
        at = self.gpu.collective_bandwidth(self.gpus) * self.efficiency.link
        gather = bytes_moved * self.model.parameters * (self.gpus - 1) / self.gpus / at
        micro_batches = ceil(share * uneven / max(self.max_tokens, longest))
        return max(compute, micro_batches * gather)
