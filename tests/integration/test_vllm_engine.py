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
from grpo_lib.generation.base import STOP, UNFINISHED, Budget, Generated, Request, Sampling
from grpo_lib.generation.vllm import AdapterOptions, VllmOptions
from grpo_lib.models import load_model, make_small_model, make_tokenizer
from grpo_lib.placement.engine_process import EngineProcess
from grpo_lib.training.digest import HEAD, weights_digest
from grpo_lib.training.lora import add_adapter

pytestmark = pytest.mark.slow
ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789"
MAX_LENGTH, STEP_TOKENS = 96, 128
SAMPLING = Sampling(temperature=0.7, max_new_tokens=24)


def make_model(seed: int, head_dim: int = 32) -> Any:
    shape = SmallModelConfig(
        hidden_size=32, layers=2, heads=2, kv_heads=1, head_dim=head_dim, mlp_size=64, initializer_range=0.3
    )
    return make_small_model(shape, len(ALPHABET) + 2, eos_id=1, pad_id=0, max_positions=256, seed=seed)


def write_model(folder: Path, seed: int = 0, head_dim: int = 32) -> str:
    make_model(seed, head_dim).save_pretrained(folder)
    make_tokenizer([], ALPHABET).save_pretrained(folder)
    return str(folder)


def start(folder: str, **more: Any) -> EngineProcess:
    return EngineProcess(
        folder,
        eos_token_ids=[1],
        dtype=torch.float32,
        device="cpu",
        options=VllmOptions(max_length=MAX_LENGTH, max_rows=64, max_tokens=STEP_TOKENS),
        gpus=None,
        threads=1,
        start_seconds=300,
        generate_seconds=300,
        **more,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(folder: str) -> Iterator[EngineProcess]:
    before = dict(os.environ)
    made = start(folder)
    assert dict(os.environ) == before  # what vLLM does to its process stays there
    yield made
    made.close()


def prompts_of(lengths: list[int], seed: int = 0) -> Ragged:
    offsets = lengths_to_offsets(torch.tensor(lengths))
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, len(ALPHABET) + 2, (int(offsets[-1]),), generator=generator, dtype=torch.int32)
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


def test_logprobs_are_those_of_the_policy_that_was_loaded_last_at_the_temperature(engine: EngineProcess) -> None:
    """Processed log-probs; and the head, which shares the embedding's weights, is packed anew with every load."""
    asked = request([1, 7, 30, 12])
    for seed in (1, 2):
        model = make_model(seed)
        state = model.state_dict()
        assert state[HEAD].data_ptr() == state["model.embed_tokens.weight"].data_ptr()
        engine.load(state)
        assert engine.digest() == weights_digest(state)
        assert worst_difference(model, asked, engine.generate(asked)) < 1e-4
    assert worst_difference(make_model(1), asked, engine.generate(asked)) > 0.1


def test_what_was_kept_of_prompts_is_forgotten_with_the_weights(engine: EngineProcess) -> None:
    asked = request([60, 60])  # long enough to fill blocks of the prefix cache
    for seed in (1, 2):
        engine.load(make_model(seed).state_dict())
        engine.generate(asked)
        assert worst_difference(make_model(seed), asked, engine.generate(asked)) < 1e-4


def test_neighbouring_seeds_make_independent_rows_and_each_can_be_asked_for_again(engine: EngineProcess) -> None:
    asked = Request(prompts=prompts_of([5]).gather(torch.tensor([0, 0])), seeds=torch.arange(8), n=4, sampling=SAMPLING)
    made = engine.generate(asked)
    rows = rows_of(made.responses)
    assert len(set(map(tuple, rows))) == 8
    for row in (0, 5):
        again = engine.generate(
            Request(prompts=asked.prompts.gather(torch.tensor([0])), seeds=torch.tensor([row]), sampling=SAMPLING)
        )
        assert rows_of(again.responses) == [rows[row]]


def test_seeded_prompts_that_do_not_fit_into_one_step_together(engine: EngineProcess) -> None:
    """Read in pieces they would crash vLLM on a CPU."""
    lengths = [70] * 9
    assert sum(lengths) > 4 * STEP_TOKENS
    made = engine.generate(request(lengths, n=3))
    assert made.responses.rows == 27 and set(made.finish.tolist()) <= {0, 1}


def test_a_budget_gives_rows_back_that_are_beginnings_of_what_they_would_be(engine: EngineProcess) -> None:
    whole = engine.generate(request([5] * 8))
    part = engine.generate(request([5] * 8, budget=Budget(tokens=60)))
    cut = part.finish == UNFINISHED
    assert bool(cut.any()) and len(part.logprobs) < len(whole.logprobs)
    for mine, theirs in zip(rows_of(part.responses), rows_of(whole.responses), strict=True):
        assert mine == theirs[: len(mine)]
    assert rows_of(engine.generate(request([5] * 8)).responses) == rows_of(whole.responses)  # nothing is left over


def test_a_stop_string_ends_a_row_and_stays_in_it(engine: EngineProcess) -> None:
    tokenizer = make_tokenizer([], ALPHABET)
    sampling = Sampling(temperature=1.0, max_new_tokens=24, stop=("e",), stop_token_ids=(5,))
    made = engine.generate(request([5] * 16, sampling=sampling))
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in rows_of(made.responses)]
    stopped = [text for text, reason in zip(texts, made.finish.tolist(), strict=True) if text and reason == STOP]
    assert {"e", "d"} <= {text[-1] for text in stopped}  # by the string, and by token 5
    assert not any("e" in text[:-1] or "d" in text[:-1] for text in texts)


def test_progress_is_reported_in_the_callers_process(engine: EngineProcess) -> None:
    calls: list[tuple[int, int, int]] = []
    made = engine.generate(request([5] * 8), lambda *call: calls.append(call))
    assert calls[-1] == (16, 16, len(made.logprobs))


def test_sleeping_and_waking_changes_nothing(engine: EngineProcess) -> None:
    before = rows_of(engine.generate(request([5, 6])).responses)
    engine.sleep()
    engine.wake()
    assert rows_of(engine.generate(request([5, 6])).responses) == before


def test_adapters_alone_make_the_policy_that_the_trainer_has(folder: str) -> None:
    model = load_model(folder, torch.float32, "cpu")
    adapter = add_adapter(model, rank=4, alpha=8.0, targets="all-linear", seed=0)
    names = [name for name, _ in model.named_parameters()]
    engine = start(folder, adapter=AdapterOptions(rank=4, alpha=8.0))
    try:
        for seed in (1, 2):
            generator = torch.Generator().manual_seed(seed)
            weights = dict(model.named_parameters())
            with torch.no_grad():
                for name in adapter.first:
                    weights[name].normal_(0, 0.3, generator=generator)
            state = {name: value.detach() for name, value in adapter.alone(weights).items()}
            engine.load(state)
            assert engine.digest() == weights_digest(state)
            asked = request([5, 30])
            assert worst_difference(model, asked, engine.generate(asked)) < 1e-4
            with adapter.off():
                assert worst_difference(model, asked, engine.generate(asked)) > 0.05
        assert names == [name for name, _ in model.named_parameters()]
    finally:
        engine.close()


def test_a_head_size_without_a_kernel_is_refused_with_those_that_have_one(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"heads have size 16; vLLM on a CPU takes 32, 64, .*engine=local"):
        start(write_model(tmp_path, head_dim=16))


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


def test_an_engine_that_is_killed_is_lost_and_leaves_no_process(folder: str, engine: EngineProcess) -> None:
    """Last: it kills the engine of this file."""
    pid = engine.pid
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RankLostError, match=rf"vLLM engine 0 \(pid {pid}\) was killed.*next attempt starts another"):
        engine.generate(request([5]))
    assert not engine.alive
    until = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()
