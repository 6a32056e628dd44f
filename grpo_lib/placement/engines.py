"""Which rollout engine a configuration means, and on which GPUs it runs."""

from pathlib import Path
from typing import Any

import torch

from grpo_lib.config import RunConfig
from grpo_lib.generation.base import Engine, Sampling
from grpo_lib.generation.local import LocalEngine
from grpo_lib.models import load_model
from grpo_lib.placement.train import DTYPES


def sampling_of(config: Any, *, greedy: bool = False) -> Sampling:
    """How a run's responses are sampled, or its greedy ones, which no truncation touches.

    Args:
        config: with ``rollout``.
    """
    rollout = config.rollout
    ends: dict[str, Any] = {"stop": tuple(rollout.stop), "stop_token_ids": tuple(rollout.stop_token_ids)}
    if greedy:
        return Sampling(temperature=0.0, max_new_tokens=rollout.max_new_tokens, **ends)
    return Sampling(
        temperature=rollout.temperature,
        max_new_tokens=rollout.max_new_tokens,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        repetition_penalty=rollout.repetition_penalty,
        **ends,
    )


SAMPLING = tuple(
    f"rollout.{name}"
    for name in (
        "engine", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop", "stop_token_ids",
        "max_new_tokens",
    )
)  # fmt: skip
"""Settings that `sampling_of` reads, and the engine: what responses depend on."""


def make_engine(config: RunConfig, folder: Path, tokenizer: Any, device: torch.device) -> Engine:
    """The engine of a run, with the model of a folder.

    Raises:
        MissingPackageError: it is not installed.
        ConfigError, ModelError: it can't run this model here.
    """
    rollout, dtype = config.rollout, DTYPES[config.model.dtype]
    eos = eos_token_ids(folder, tokenizer)
    if rollout.engine == "local":
        model = load_model(str(folder), dtype, str(device))
        return LocalEngine(model, eos_token_ids=eos, tokenizer=tokenizer, max_batch_rows=rollout.max_batch_rows)
    if rollout.engine == "server":
        from grpo_lib.generation.server import ServerEngine

        assert rollout.server is not None
        return ServerEngine(rollout.server, model_folder=folder, eos_token_ids=eos, dtype=dtype, tokenizer=tokenizer)
    return _vllm(config, folder, eos, device)


def _vllm(config: RunConfig, folder: Path, eos: list[int], device: torch.device) -> Engine:
    from grpo_lib.generation.replicas import Replicas
    from grpo_lib.generation.vllm import AdapterOptions, VllmEngine, VllmOptions
    from grpo_lib.placement.engine_process import EngineProcess

    settings, lora = config.rollout.vllm, config.trainer.lora
    options = VllmOptions(
        max_length=config.rollout.max_prompt_tokens + config.rollout.max_new_tokens,
        max_rows=settings.max_rows,
        max_tokens=settings.max_tokens,
        kv_cache_gib=settings.kv_cache_gib,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        tensor_parallel=settings.tensor_parallel,
        enforce_eager=settings.enforce_eager,
        sleeps=shares_gpu(config, device),
    )
    common: dict[str, Any] = {
        "eos_token_ids": eos,
        "dtype": DTYPES[config.model.dtype],
        "device": device.type,
        "options": options,
        "adapter": AdapterOptions(rank=lora.rank, alpha=lora.alpha) if lora is not None and settings.adapters else None,
    }
    if not settings.own_process:
        return VllmEngine(str(folder), **common)

    def start(gpus: list[int] | None) -> EngineProcess:
        return EngineProcess(
            str(folder),
            **common,
            gpus=gpus,
            threads=settings.threads or config.placement.threads,
            start_seconds=settings.start_seconds,
            generate_seconds=settings.generate_seconds,
        )

    if device.type == "cpu":
        places: list[list[int] | None] = [None] * settings.data_parallel
    else:
        places = [list(each) for each in engine_gpus(config, torch.cuda.device_count())]
    made: list[EngineProcess] = []
    try:
        for each in places:
            made.append(start(each))
    except BaseException:
        for engine in made:
            engine.close()
        raise
    return made[0] if len(made) == 1 else Replicas(made)


def is_outside(config: RunConfig) -> bool:
    """Whether the engine is no part of this process."""
    rollout = config.rollout
    return rollout.engine == "server" or (rollout.engine == "vllm" and rollout.vllm.own_process)


def engine_gpus(config: RunConfig, count: int) -> list[range]:
    """The GPUs of each vLLM engine, of ``count``: the last ones, so that the trainer has the first to itself.

    >>> from grpo_lib.config_files import make_config
    >>> made = make_config({"data": {"problem": "countdown"}, "warm_start": {}, "rollout": {"engine": "vllm",
    ...     "vllm": {"tensor_parallel": 2, "data_parallel": 3}}})
    >>> engine_gpus(made, 8)
    [range(2, 4), range(4, 6), range(6, 8)]
    """
    settings = config.rollout.vllm
    first = count - settings.data_parallel * settings.tensor_parallel
    return [range(start, start + settings.tensor_parallel) for start in range(first, count, settings.tensor_parallel)]


def shares_gpu(config: RunConfig, device: torch.device) -> bool:
    """Whether an engine of this run gives its GPU's memory back while the trainer works."""
    asked = config.rollout.vllm.sleep
    if config.rollout.engine != "vllm" or device.type != "cuda" or asked is not None:
        return bool(asked) and config.rollout.engine == "vllm" and device.type == "cuda"
    if config.trainer.backend == "torch":
        trainers = {device.index or 0}
    else:
        trainers = set(range(config.placement.ranks))
    engines = {gpu for gpus in engine_gpus(config, torch.cuda.device_count()) for gpu in gpus}
    return bool(trainers & engines) or not config.rollout.vllm.own_process


def eos_token_ids(folder: Path, tokenizer: Any) -> list[int]:
    """Tokens that end a response: those of the generation config and the tokenizer's own."""
    from grpo_lib.training.export import describe

    generation = describe(str(folder)).generation_config
    configured = None if generation is None else generation.eos_token_id
    ids = set(configured if isinstance(configured, list) else [configured]) | {tokenizer.eos_token_id}
    return sorted(each for each in ids if each is not None)
