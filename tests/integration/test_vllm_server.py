"""The server engine against a real vLLM server on the CPU, started here. One server serves all tests of the file."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from grpo_lib.config_rollout import ServerConfig
from grpo_lib.errors import ConfigError, ServerLostError
from grpo_lib.generation.base import UNFINISHED, Budget, Sampling
from grpo_lib.generation.server import ServerEngine
from tests.unit.generation.contract import (
    AT_1,
    CONTEXT,
    EOS,
    PROMPTS,
    TOKENIZER,
    EngineContract,
    distributions,
    make_model,
    request,
    rows_of,
)

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
START_SECONDS = 400


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
def served(server: Running) -> Iterator[ServerEngine]:
    """With the policy of seed 0."""
    made = make_engine(server)
    made.load(make_model(0).state_dict())
    yield made
    made.close()


def make_engine(server: Running, **settings: Any) -> ServerEngine:
    config = ServerConfig(urls=[server.url], weights_folder=str(server.shared), recovery_seconds=5, **settings)
    return ServerEngine(
        config, model_folder=server.model_folder, eos_token_ids=[EOS], dtype=torch.float32, tokenizer=TOKENIZER
    )


class TestServer(EngineContract):
    repeat_tolerance = 1e-5
    no_bound = Budget(tokens=10**6)
    draws = 300
    test_closing_frees_memory = None  # type: ignore[assignment]  # the memory is the server's

    @pytest.fixture(scope="class")
    def started(self, server: Running) -> Iterator[ServerEngine]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("grpo_lib.generation.server_rows.SLICE", 8)  # where there is a budget
            engine = make_engine(server)
            yield engine
            engine.close()


def test_rows_in_slices_have_the_logprobs_of_the_whole(served: ServerEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_lib.generation.server_rows.SLICE", 5)
    whole = served.generate(request(n=4, budget=Budget(tokens=10_000)))
    expected = [
        distributions(PROMPTS[row // 4], ids, AT_1).gather(1, torch.tensor(ids)[:, None])[:, 0]
        for row, ids in enumerate(rows_of(whole))
    ]
    torch.testing.assert_close(whole.logprobs, torch.cat(expected).float(), atol=1e-4, rtol=0)
    part = served.generate(request(n=4, budget=Budget(tokens=40)))
    assert UNFINISHED in part.finish.tolist() and UNFINISHED not in whole.finish.tolist()
    assert all(ids == all_ids[: len(ids)] for ids, all_ids in zip(rows_of(part), rows_of(whole), strict=True))


def test_a_server_that_holds_other_weights_gets_the_policy_before_it_generates(
    served: ServerEngine, server: Running
) -> None:
    before = rows_of(served.generate(request()))
    other = make_engine(server)
    other.load(make_model(2).state_dict())
    assert rows_of(other.generate(request())) != before
    assert rows_of(served.generate(request())) == before
    other.close()


def test_requests_that_vllm_refuses_are_errors_with_its_message(served: ServerEngine, server: Running) -> None:
    with pytest.raises(ConfigError, match=r"refuses a request.*400.*max_model_len=128"):
        served.generate(request(n=1, sampling=Sampling(temperature=1.0, max_new_tokens=500)))
    nobody = make_engine(server, model="nobody")
    nobody.load(make_model(0).state_dict())
    with pytest.raises(ConfigError, match=r"refuses a request.*404.*nobody.*rollout.server.kind and model"):
        nobody.generate(request(n=1))
    nobody.close()


def test_a_folder_that_vllm_does_not_see_is_an_error_that_says_so(
    served: ServerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "_write", lambda state, policy: None)
    with pytest.raises(ConfigError, match=r"failed at load_policy.*rollout.server.weights_folder"):
        served.load(make_model(1).state_dict())


def test_a_server_that_is_killed_during_a_batch_is_an_error_that_names_it(
    served: ServerEngine, server: Running
) -> None:
    """The last test: there is no server after it."""
    killer: list[threading.Timer] = []

    def kill_soon(done: int, total: int, tokens: int) -> None:
        if done and not killer:
            killer.append(threading.Timer(0.05, server.kill))
            killer[0].start()

    with pytest.raises(ServerLostError, match=rf"no generation server is left \({server.url}: .*rows were finished"):
        served.generate(request(n=512, sampling=Sampling(temperature=0.7, max_new_tokens=60)), kill_soon)
    killer[0].join()
