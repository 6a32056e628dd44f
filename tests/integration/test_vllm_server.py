"""The server engine against a real vLLM server on the CPU, started here. One server serves all tests of the file."""

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from grpo_lib.config import SmallModelConfig
from grpo_lib.config_rollout import ServerConfig
from grpo_lib.data.ragged import Ragged, lengths_to_offsets
from grpo_lib.errors import ConfigError, ServerLostError
from grpo_lib.generation.base import LENGTH, STOP, UNFINISHED, Budget, Generated, Request, Sampling
from grpo_lib.generation.server import ServerEngine
from grpo_lib.models import make_small_model, make_tokenizer
from grpo_lib.training.digest import weights_digest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

ROOT = Path(__file__).parents[2]
START_SECONDS = 400
EOS = 1
CONTEXT = 128
TOKENIZER = make_tokenizer(["<a>"], "0123456789+-= bcd")
SHAPE = SmallModelConfig(hidden_size=32, layers=2, heads=2, kv_heads=1, head_dim=32, mlp_size=64, initializer_range=0.2)
PROMPTS = [[5, 6, 7, 8, 9], [3], [4, 4], [10, 11, 12, 13, 14, 15, 16]]
SAMPLING = Sampling(temperature=0.7, max_new_tokens=24)


def make_model(seed: int) -> Any:
    return make_small_model(SHAPE, len(TOKENIZER), eos_id=EOS, pad_id=0, max_positions=CONTEXT, seed=seed)


@dataclass(frozen=True, kw_only=True)
class Running:
    """A server, and the folders that belong to it."""

    process: "subprocess.Popen[bytes]"
    url: str
    model_folder: Path
    shared: Path

    def kill(self) -> None:
        """With all its processes."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """It starts with other weights than those that tests load."""
    folder, log = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("log") / "vllm.log"
    make_model(seed=9).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = f"""
        --host 127.0.0.1 --port {port} --model {folder} --served-model-name policy --dtype float32 --enforce-eager
        --logprobs-mode processed_logprobs --no-enable-chunked-prefill --max-model-len {CONTEXT}
        --max-num-batched-tokens 512 --max-num-seqs 32 --generation-config vllm
        --worker-extension-cls grpo_lib.generation.vllm_extension.PolicyExtension
    """
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *options.split()],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a process group of its own, which ends with the tests
        )
    url = f"http://127.0.0.1:{port}"
    running = Running(process=process, url=url, model_folder=folder, shared=tmp_path_factory.mktemp("shared"))
    try:
        _wait_until_well(running, log)
        yield running
    finally:
        running.kill()


def _wait_until_well(running: Running, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and running.process.poll() is None:
        try:
            if httpx.get(running.url + "/health", timeout=5).is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    pytest.fail(f"vLLM did not start within {START_SECONDS} s:\n{log.read_text(errors='replace')[-4000:]}")


@pytest.fixture
def engine(server: Running) -> Iterator[ServerEngine]:
    """With the policy of seed 0."""
    made = make_engine(server)
    made.load(make_model(0).state_dict())
    yield made
    made.close()


def make_engine(server: Running, **settings: Any) -> ServerEngine:
    config = ServerConfig(urls=[server.url], weights_folder=str(server.shared), recovery_seconds=1, **settings)
    return ServerEngine(
        config, model_folder=server.model_folder, eos_token_ids=[EOS], dtype=torch.float32, tokenizer=TOKENIZER
    )


def request(n: int = 8, sampling: Sampling = SAMPLING, seed: int = 2**62, **options: Any) -> Request:
    ids = torch.tensor([token for prompt in PROMPTS for token in prompt], dtype=torch.int32)
    offsets = lengths_to_offsets(torch.tensor([len(prompt) for prompt in PROMPTS]))
    seeds = seed + 977 * torch.arange(len(PROMPTS) * n)
    return Request(prompts=Ragged(values=ids, offsets=offsets), seeds=seeds, n=n, sampling=sampling, **options)


def rows_of(made: Generated) -> list[list[int]]:
    return [made.responses.values[start:end].tolist() for start, end in pairwise(made.responses.offsets.tolist())]


@torch.no_grad()
def expected_logprobs(made: Generated, n: int, temperature: float, seed: int = 0) -> torch.Tensor:
    """One forward pass of Transformers for each row."""
    model, found = make_model(seed), []
    for row, ids in enumerate(rows_of(made)):
        prompt = PROMPTS[row // n]
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        found.append((logits / temperature).log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0])
    return torch.cat(found)


def test_logprobs_are_those_of_transformers_and_rows_end_as_they_say(engine: ServerEngine) -> None:
    made = engine.generate(request())
    torch.testing.assert_close(made.logprobs, expected_logprobs(made, 8, 0.7), atol=1e-4, rtol=0)
    assert set(made.finish.tolist()) == {STOP, LENGTH}
    for ids, finish in zip(rows_of(made), made.finish.tolist(), strict=True):
        assert EOS not in ids[:-1] and (ids[-1] == EOS) == (finish == STOP)
        assert finish == STOP or len(ids) == 24
    assert engine.version.startswith("vllm 0.")


def test_equal_seeds_give_equal_rows_and_others_give_others(engine: ServerEngine) -> None:
    first = engine.generate(request())
    assert rows_of(engine.generate(request())) == rows_of(first)
    assert rows_of(engine.generate(request(seed=5))) != rows_of(first)
    alone = engine.generate(request(n=1))  # its seeds are the first four of those above
    assert rows_of(alone)[0] == rows_of(first)[0]
    assert len({tuple(ids) for ids in rows_of(first)[:8]}) > 1


def test_the_largest_seed_is_taken(engine: ServerEngine) -> None:
    asked = request(n=1)
    largest = Request(prompts=asked.prompts, seeds=torch.full((4,), 2**63 - 1), sampling=SAMPLING)
    assert rows_of(engine.generate(largest)) == rows_of(engine.generate(largest))


def test_greedy_rows_are_the_most_likely_tokens(engine: ServerEngine) -> None:
    made = engine.generate(request(n=1, sampling=Sampling(temperature=0, max_new_tokens=8)))
    torch.testing.assert_close(made.logprobs, expected_logprobs(made, 1, 1.0), atol=1e-4, rtol=0)
    model = make_model(0)
    for prompt, ids in zip(PROMPTS, rows_of(made), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == ids


def test_stop_tokens_and_stop_strings_end_rows_and_stay_in_them(engine: ServerEngine) -> None:
    sampling = Sampling(temperature=1.0, max_new_tokens=24, stop=("1", "<a>2", "b3", "44"), stop_token_ids=(8, 9))
    made = engine.generate(request(n=16, sampling=sampling))
    endings = set()
    for ids, finish in zip(rows_of(made), made.finish.tolist(), strict=True):
        texts = [TOKENIZER.decode(ids[: at + 1]) for at in range(len(ids))]
        ends = [
            token in (EOS, 8, 9) or any(stop in text for stop in sampling.stop)
            for token, text in zip(ids, texts, strict=True)
        ]
        assert not any(ends[:-1]) and ends[-1] == (finish == STOP)
        endings.add("1" if texts[-1].endswith("1") else ids[-1])
    assert {"1", EOS, 8, 9} <= endings


def test_limits_are_each_row_s_own(engine: ServerEngine) -> None:
    made = engine.generate(request(n=2, limits=torch.arange(1, 9)))
    assert bool((made.responses.lengths <= torch.arange(1, 9)).all())
    assert LENGTH in made.finish.tolist()


def test_rows_in_slices_have_the_logprobs_of_the_whole(engine: ServerEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_lib.generation.server_rows.SLICE", 5)
    whole = engine.generate(request(n=4, budget=Budget(tokens=10_000)))
    torch.testing.assert_close(whole.logprobs, expected_logprobs(whole, 4, 0.7), atol=1e-4, rtol=0)
    part = engine.generate(request(n=4, budget=Budget(tokens=40)))
    assert UNFINISHED in part.finish.tolist() and UNFINISHED not in whole.finish.tolist()
    assert all(ids == all_ids[: len(ids)] for ids, all_ids in zip(rows_of(part), rows_of(whole), strict=True))


def test_loaded_weights_change_rows_logprobs_and_digest_also_of_the_tied_head(engine: ServerEngine) -> None:
    before, digest = engine.generate(request()), engine.digest()
    state = make_model(1).state_dict()
    engine.load(state)
    made = engine.generate(request())
    assert rows_of(made) != rows_of(before)
    torch.testing.assert_close(made.logprobs, expected_logprobs(made, 8, 0.7, seed=1), atol=1e-4, rtol=0)
    assert digest == weights_digest(make_model(0).state_dict()) != engine.digest() == weights_digest(state)
    engine.load(make_model(0).state_dict())
    assert rows_of(engine.generate(request())) == rows_of(before)


def test_a_server_that_holds_other_weights_gets_the_policy_before_it_generates(
    engine: ServerEngine, server: Running
) -> None:
    before = rows_of(engine.generate(request()))
    other = make_engine(server)
    other.load(make_model(2).state_dict())
    assert rows_of(other.generate(request())) != before
    assert rows_of(engine.generate(request())) == before
    other.close()


def test_requests_that_vllm_refuses_are_errors_with_its_message(engine: ServerEngine, server: Running) -> None:
    with pytest.raises(ConfigError, match=r"refuses a request.*400.*max_model_len=128"):
        engine.generate(request(n=1, sampling=Sampling(temperature=1.0, max_new_tokens=500)))
    nobody = make_engine(server, model="nobody")
    nobody.load(make_model(0).state_dict())
    with pytest.raises(ConfigError, match=r"refuses a request.*404.*nobody.*rollout.server.kind and model"):
        nobody.generate(request(n=1))
    nobody.close()


def test_a_folder_that_vllm_does_not_see_is_an_error_that_says_so(
    engine: ServerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_write", lambda state, policy: None)
    with pytest.raises(ConfigError, match=r"failed at load_policy.*rollout.server.weights_folder"):
        engine.load(make_model(1).state_dict())


def test_a_server_that_is_killed_during_a_batch_is_an_error_that_names_it(
    engine: ServerEngine, server: Running
) -> None:
    """The last test: there is no server after it."""
    killer: list[threading.Timer] = []

    def kill_soon(done: int, total: int, tokens: int) -> None:
        if done and not killer:
            killer.append(threading.Timer(0.05, server.kill))
            killer[0].start()

    with pytest.raises(ServerLostError, match=rf"no generation server is left \({server.url}: .*rows were finished"):
        engine.generate(request(n=512, sampling=Sampling(temperature=0.7, max_new_tokens=100)), kill_soon)
    killer[0].join()
