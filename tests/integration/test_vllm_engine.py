"""vLLM for real, on the CPU, in a process of its own; each of its traps has a test."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_lib.config import SmallModelConfig
from grpo_lib.data.ragged import Ragged, lengths_to_offsets
from grpo_lib.errors import ModelError, RankLostError
from grpo_lib.generation.base import Generated, Request, Sampling
from grpo_lib.generation.vllm import AdapterOptions, VllmOptions
from grpo_lib.models import load_model, make_small_model
from grpo_lib.placement.engine_process import EngineProcess
from grpo_lib.training.digest import weights_digest
from grpo_lib.training.lora import add_adapter
from tests.unit.generation.contract import CONTEXT, EOS, TOKENIZER, EngineContract, make_model, save_model

pytestmark = pytest.mark.slow
STEP_TOKENS = 128
SAMPLING = Sampling(temperature=0.7, max_new_tokens=24)


def start(folder: str, **more: Any) -> EngineProcess:
    return EngineProcess(
        folder,
        eos_token_ids=[EOS],
        dtype=torch.float32,
        device="cpu",
        options=VllmOptions(max_length=CONTEXT, max_rows=64, max_tokens=STEP_TOKENS),
        gpus=None,
        threads=1,
        start_seconds=300,
        generate_seconds=300,
        **more,
    )


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def process(model_folder: str) -> Iterator[EngineProcess]:
    before = dict(os.environ)
    made = start(model_folder)
    assert dict(os.environ) == before  # what vLLM does to its process stays there
    yield made
    made.close()


@pytest.fixture(scope="module")
def adapter_engine(model_folder: str) -> Iterator[EngineProcess]:
    made = start(model_folder, adapter=AdapterOptions(rank=4, alpha=8.0))
    yield made
    made.close()


class TestVllm(EngineContract):
    repeat_tolerance = 1e-5

    @pytest.fixture(scope="class")
    def started(self, process: EngineProcess) -> EngineProcess:
        return process

    # An interrupt ends its process, and so does closing: see below.
    test_an_exception_in_progress_reaches_the_caller_and_the_engine_goes_on = None  # type: ignore[assignment]
    test_closing_frees_memory = None  # type: ignore[assignment]


def prompts_of(lengths: list[int], seed: int = 0) -> Ragged:
    offsets = lengths_to_offsets(torch.tensor(lengths))
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, len(TOKENIZER), (int(offsets[-1]),), generator=generator, dtype=torch.int32)
    return Ragged(values=ids, offsets=offsets)


def rows_of(ragged: Ragged) -> list[list[int]]:
    return [ragged.values[start:end].tolist() for start, end in pairwise(ragged.offsets.tolist())]


def request(lengths: list[int], n: int = 2, sampling: Sampling = SAMPLING, **more: Any) -> Request:
    return Request(
        prompts=prompts_of(lengths), seeds=torch.arange(len(lengths) * n) + 2**40, n=n, sampling=sampling, **more
    )


@torch.no_grad()
def worst_difference(model: Any, asked: Request, made: Generated) -> float:
    """Of the engine's log-probs and those of one forward pass a row."""
    worst, prompts, temperature = 0.0, rows_of(asked.prompts), asked.sampling.temperature or 1.0
    logprobs = rows_of(made.responses.with_values(made.logprobs))
    for row, (ids, theirs) in enumerate(zip(rows_of(made.responses), logprobs, strict=True)):
        prompt = prompts[row // asked.n]
        logits = model(input_ids=torch.tensor([[*prompt, *ids]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        ours = (logits.double() / temperature).log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
        worst = max(worst, float((ours - torch.tensor(theirs)).abs().max()))
    return worst


def test_what_was_kept_of_prompts_is_forgotten_with_the_weights(process: EngineProcess) -> None:
    asked = request([60, 60])  # long enough to fill blocks of the prefix cache
    for seed in (1, 2):
        process.load(make_model(seed).state_dict())
        process.generate(asked)
        assert worst_difference(make_model(seed), asked, process.generate(asked)) < 1e-4


def test_seeded_prompts_that_do_not_fit_into_one_step_together(process: EngineProcess) -> None:
    """Read in pieces they would crash vLLM on a CPU."""
    lengths = [70] * 9
    assert sum(lengths) > 4 * STEP_TOKENS
    made = process.generate(request(lengths, n=3))
    assert made.responses.rows == 27 and set(made.finish.tolist()) <= {0, 1}


def test_adapters_alone_make_the_policy_that_the_trainer_has(model_folder: str, adapter_engine: EngineProcess) -> None:
    model = load_model(model_folder, torch.float32, "cpu")
    adapter = add_adapter(model, rank=4, alpha=8.0, targets="all-linear", seed=0)
    for seed in (1, 2):
        generator = torch.Generator().manual_seed(seed)
        weights = dict(model.named_parameters())
        with torch.no_grad():
            for name in adapter.first:
                weights[name].normal_(0, 0.3, generator=generator)
        state = {name: value.detach() for name, value in adapter.alone(weights).items()}
        adapter_engine.load(state)
        assert adapter_engine.digest() == weights_digest(state)
        asked = request([5, 30])
        assert worst_difference(model, asked, adapter_engine.generate(asked)) < 1e-4
        with adapter.off():
            assert worst_difference(model, asked, adapter_engine.generate(asked)) > 0.05


def test_a_head_size_without_a_kernel_is_refused_with_those_that_have_one(tmp_path: Path) -> None:
    shape = SmallModelConfig(hidden_size=32, layers=1, heads=2, kv_heads=1, head_dim=16, mlp_size=64)
    make_small_model(shape, len(TOKENIZER), eos_id=EOS, pad_id=0, max_positions=CONTEXT, seed=0).save_pretrained(
        tmp_path
    )
    with pytest.raises(ModelError, match=r"heads have size 16; vLLM on a CPU takes 32, 64, .*engine=local"):
        start(str(tmp_path))


def test_vllm_imports_without_the_vision_packages_that_break_text_models_and_has_the_kernels_we_know_of() -> None:
    code = """
import importlib.util
assert all(importlib.util.find_spec(name) is None for name in ("torchvision", "torchaudio", "torchcodec"))
import transformers, peft
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from grpo_lib.generation.vllm import CPU_HEAD_SIZES
assert CPUAttentionBackend.get_supported_head_sizes() == list(CPU_HEAD_SIZES)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_an_engine_that_is_killed_is_lost_and_leaves_no_process(adapter_engine: EngineProcess) -> None:
    """Last of that engine."""
    pid = adapter_engine.pid
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(
        RankLostError, match=rf"vLLM engine 0 \(pid {pid}\) was killed(.|\n)*next attempt starts another"
    ):
        adapter_engine.generate(request([5]))
    assert not adapter_engine.alive
    assert ends(pid)


def test_an_interrupt_ends_the_process_that_is_in_the_middle_of_something(process: EngineProcess) -> None:
    """Last of this process."""

    def interrupt(*call: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        process.generate(request([5] * 8), interrupt)
    assert not process.alive
    assert ends(process.pid)


def ends(pid: int) -> bool:
    """Whether the process is gone within ten seconds, and its memory with it."""
    until = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
        time.sleep(0.05)
    return not Path(f"/proc/{pid}").exists()
