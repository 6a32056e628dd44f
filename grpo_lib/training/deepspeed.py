"""The ``deepspeed`` backend: ZeRO stages 0 to 3, with optimizer state and parameters on the CPU as an option.

Weights stay float32 and passes are autocast, as in the other backends. The optimizer is PyTorch's own AdamW, so that
nothing is compiled; state is read and set by parameter name, so that any number of ranks restores what any other saved.
"""

import math
import os
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from grpo_lib.errors import MissingPackageError
from grpo_lib.training.learner import (
    MOMENTS,
    STEP,
    AdamWSettings,
    adamw,
    clipped_step,
    set_lr,
    trainable,
    whole_weights,
)
from grpo_lib.training.world import World


def import_deepspeed(device: str) -> Any:
    """The package, told which device it is for.

    Raises:
        MissingPackageError: with the command that installs it.
    """
    if device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    try:
        import deepspeed
    except ImportError as error:
        raise MissingPackageError(
            f"trainer.backend=deepspeed needs DeepSpeed, which can't be imported ({error}): "
            "pip install 'grpo-pipeline[deepspeed]'"
        ) from error
    # Its shared-memory collectives would be compiled at start, which takes a minute and a compiler; gloo does without.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.utils.logger.setLevel("WARNING")
    # It calls collectives by names of before, and would say so in the log hundreds of times.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    return deepspeed


class _Piece(NamedTuple):
    """A rank's share of a parameter: ``length`` values from ``first``, in a flat tensor from ``start``."""

    flat: int
    start: int
    first: int
    length: int


class DeepSpeedLearner:
    """A `Learner` on every rank.

    Args:
        stage: of ZeRO: 0 everything on each rank, 1 optimizer state sharded, 2 gradients too, 3 weights too.
        offload_optimizer: its state and step are on the CPU (stages 1 to 3).
        offload_parameters: sharded weights wait on the CPU (stage 3).
    """

    def __init__(
        self,
        module: nn.Module,
        settings: AdamWSettings,
        world: World,
        *,
        stage: int,
        offload_optimizer: bool = False,
        offload_parameters: bool = False,
    ) -> None:
        self._deepspeed = import_deepspeed(world.device.type)
        self._world = world
        self._stage = stage
        self._max_norm = settings.max_grad_norm
        self._network = module
        self._parameters = trainable(module)
        self._shapes = {name: each.shape for name, each in self._parameters.items()}
        self._torch_optimizer = adamw(self._parameters, settings, fused=True)
        self._deepspeed.init_distributed(
            dist_backend=torch.distributed.get_backend(), auto_mpi_discovery=False, verbose=False
        )
        self.module, self._zero, _, _ = self._deepspeed.initialize(
            model=module,
            optimizer=self._torch_optimizer,
            config=engine_config(stage, settings.max_grad_norm, offload_optimizer, offload_parameters),
        )

    def backward(self, loss: Tensor) -> None:
        self.module.backward(loss * self._world.size)  # DeepSpeed averages over the ranks

    def step(self, lr: float) -> float:
        if self._stage == 0:  # there DeepSpeed reports no norm and steps with any gradient
            self.module.buffered_allreduce_fallback()
            return clipped_step(self._torch_optimizer, self._parameters, lr, self._max_norm)
        set_lr(self._zero, lr)
        self.module.step()
        return float(self.module.get_global_grad_norm()) if self.module.was_step_applied() else math.nan

    def discard(self) -> None:
        self.module.zero_grad()
        self._zero.zero_grad(set_to_none=True)
        if self._stage in (1, 2):  # what a skipped step clears
            self._zero.micro_step_id = -1
            for group in self._zero.averaged_gradients:
                self._zero.averaged_gradients[group] = self._zero.all_grad_tensors[group] = None
            if self._zero.cpu_offload:
                self._zero.reset_cpu_buffers()

    def weights(self) -> dict[str, Tensor]:
        return whole_weights(self._network, self._read, keep=self._world.rank == 0)

    def _read(self, value: Any) -> Tensor:
        with self._whole([value]) if hasattr(value, "ds_id") else nullcontext():
            return value.detach().cpu().clone()

    def moments(self) -> dict[str, Tensor]:
        state, kept = self._torch_optimizer.state, {}
        flats = self._flats()
        if any(flat not in state for flat in flats):
            return {}
        for name in self._parameters:
            piece = self._piece(name)
            for key in MOMENTS:
                whole = torch.zeros(self._shapes[name].numel(), device=self._world.device)
                if piece is not None:
                    there = slice(piece.first, piece.first + piece.length)
                    flat = state[flats[piece.flat]][key].flatten()
                    whole[there] = flat[piece.start : piece.start + piece.length]
                if self._stage > 0:
                    self._world.sum_(whole)
                if self._world.rank == 0:
                    kept[f"{name}/{key}"] = whole.reshape(self._shapes[name]).cpu()
            if self._world.rank == 0:
                kept[f"{name}/{STEP}"] = state[flats[0]][STEP].detach().cpu().float().clone()
        return kept

    def load(self, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> None:
        self.discard()
        self._fresh_moments()
        named = dict(self._network.named_parameters())
        together = dict(self._network.named_parameters(remove_duplicate=False))
        buffers = {name: each for name, each in self._network.state_dict().items() if name not in together}
        flats, state = self._flats(), self._torch_optimizer.state
        with torch.no_grad():
            for name, value in weights.items():
                if name in named:
                    with self._whole([named[name]], modifier=0):
                        if self._stage < 3 or self._world.rank == 0:
                            named[name].copy_(value)
                elif name in buffers:
                    buffers[name].copy_(value)
                if name in self._parameters and self._stage > 0:
                    self._set(flats, name, value)
            for name in self._parameters:
                if f"{name}/{STEP}" in moments:
                    for key in MOMENTS:
                        self._set([state[flat][key] for flat in flats], name, moments[f"{name}/{key}"])
                    for flat in flats:
                        state[flat][STEP].copy_(moments[f"{name}/{STEP}"])

    def gathered(self) -> AbstractContextManager[Any]:
        return gathered_head(self._network.model) if self._stage == 3 else nullcontext()

    def _whole(self, parameters: list[nn.Parameter], modifier: int | None = None) -> AbstractContextManager[Any]:
        if self._stage < 3:
            return nullcontext()
        whole: AbstractContextManager[Any] = self._deepspeed.zero.GatheredParameters(parameters, modifier_rank=modifier)
        return whole

    # ZeRO keeps float32 weights and moments in flat tensors, of which each rank has a part.

    def _flats(self) -> list[Tensor]:
        """This rank's weights as the optimizer knows them."""
        if self._stage == 0:
            return list(self._parameters.values())
        flats = (
            self._zero.fp32_partitioned_groups_flat if self._stage == 3 else self._zero.single_partition_of_fp32_groups
        )
        return list(flats)

    def _piece(self, name: str) -> _Piece | None:
        """Where this rank's share of a parameter lies; None: it has none."""
        parameter: Any = self._parameters[name]
        if self._stage == 0:
            return _Piece(flat=list(self._parameters).index(name), start=0, first=0, length=parameter.numel())
        if self._stage == 3:
            flat, start, length = self._zero.grad_position[self._zero.get_param_id(parameter)]
            first = length * self._world.rank
            return _Piece(flat=flat, start=start, first=first, length=min(length, parameter.ds_numel - first))
        mapping = parameter._hp_mapping
        if mapping is None:
            return None
        here, there = mapping.get_hp_fragment_address(), mapping.lp_fragment_address
        return _Piece(flat=mapping.param_group_index, start=here.start, first=there.start, length=here.numel)

    def _set(self, flats: list[Tensor], name: str, value: Tensor) -> None:
        """This rank's share of a whole tensor."""
        piece = self._piece(name)
        if piece is not None and piece.length > 0:
            share = value.flatten()[piece.first : piece.first + piece.length]
            flats[piece.flat].flatten()[piece.start : piece.start + piece.length].copy_(share)

    def _fresh_moments(self) -> None:
        """Zeros, as AdamW itself would start with."""
        state = self._torch_optimizer.state
        state.clear()
        for flat in self._flats():
            moments = {key: torch.zeros_like(flat) for key in MOMENTS}
            state[flat] = {STEP: torch.zeros((), device=flat.device), **moments}


def shard_frozen(module: nn.Module) -> Any:
    """A module without gradient whose weights are sharded over the ranks (stage 3)."""
    engine, *_ = import_deepspeed("").initialize(model=module, config=engine_config(3, 0.0, False, False))
    return engine


def gathered_head(model: Any) -> AbstractContextManager[Any]:
    """While open, the weights of the head are whole."""
    head = list(model.get_output_embeddings().parameters())
    whole: AbstractContextManager[Any] = import_deepspeed("").zero.GatheredParameters(head)
    return whole


def engine_config(stage: int, max_norm: float, offload_optimizer: bool, offload_parameters: bool) -> dict[str, Any]:
    """What DeepSpeed is told. Micro-batches are ours to count: an accumulation ends with ``step``."""
    zero: dict[str, Any] = {"stage": stage}
    if offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    if offload_parameters:
        zero["offload_param"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": max_norm if stage else 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }
