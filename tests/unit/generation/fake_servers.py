"""Servers that speak vLLM's and SGLang's language over real HTTP, generate with a `LocalEngine`, and fail on demand."""

import copy
import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from grpo_lib.data.ragged import Ragged
from grpo_lib.errors import ModelError
from grpo_lib.generation.base import STOP, Request, Sampling
from grpo_lib.generation.local import LocalEngine
from grpo_lib.models import load_model
from grpo_lib.training.digest import weights_digest
from grpo_lib.training.tensors import load_tensors

Answer = tuple[int, Any]
SAMPLING_FIELDS = ("temperature", "top_p", "min_p", "repetition_penalty")


class FakeServer:
    """What both kinds share. ``routes`` maps method and path to what answers."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any = None, *, key: str | None = None) -> None:
        self.key = key
        self.asked: list[dict[str, Any]] = []
        """Bodies of the requests for rows, in order of arrival."""
        self.answered = 0
        self.peak = 0
        """Most requests for rows at a time."""
        self.loads: list[Path] = []
        self.delay = 0.0
        """Seconds before a row is made."""
        self.gate = threading.Event()
        """Rows wait for it."""
        self.gate.set()
        self.failures: list[Answer] = []
        """What the next requests for rows are answered with."""
        self.dies_after: int | None = None
        """Answered requests for rows."""
        self.healthy = True
        self.on_answered: Any = None
        """Called with the number of rows answered."""
        self.routes: dict[tuple[str, str], Any] = {("GET", "/health"): self._health}
        self._lock, self._count_lock = threading.Lock(), threading.Lock()
        self._in_flight = 0
        self._connections: set[socket.socket] = set()
        self._tokenizer = tokenizer
        self._port = 0
        self.start(model)

    def start(self, model: PreTrainedModel) -> None:
        """With the weights of ``model``, on the same port as before."""
        self.engine = LocalEngine(copy.deepcopy(model), eos_token_ids=[], tokenizer=self._tokenizer)
        self.held: str | None = None
        self.dies_after = None
        self._dead = False
        self._gone = threading.Event()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def setup(self) -> None:
                super().setup()
                fake._connections.add(self.connection)

            def do_GET(self) -> None:
                self._answer("GET", None)

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self._answer("POST", json.loads(body) if body else None)

            def _answer(self, method: str, body: Any) -> None:
                self.close_connection = True
                if fake._dead:
                    return
                status, answer = fake._route(method, self.path.partition("?")[0], body, self.headers)
                if fake._dead:
                    return
                self.close_connection = False
                data = b"" if answer is None else json.dumps(answer).encode()
                try:
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)
                except OSError:
                    self.close_connection = True  # killed meanwhile, or nobody waits any more

            def log_message(self, *_: Any) -> None:
                pass

        class Listener(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, *_: Any) -> None:
                pass

        self._listener = Listener(("127.0.0.1", self._port), Handler)
        self._port = self._listener.server_address[1]
        threading.Thread(target=self._listener.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def kill(self) -> None:
        """As ``kill -9``: all connections are torn, nobody listens."""
        self._dead = True
        for connection in list(self._connections):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        self._connections.clear()
        self._listener.shutdown()
        self._listener.server_close()
        self._gone.set()

    def restart_once_dead(self, model: PreTrainedModel, after: float) -> None:
        """So many seconds later."""

        def restart() -> None:
            self._gone.wait()
            time.sleep(after)
            self.start(model)

        threading.Thread(target=restart, daemon=True).start()

    def _route(self, method: str, path: str, body: Any, headers: Any) -> Answer:
        if self.key is not None and path != "/health" and headers.get("Authorization") != f"Bearer {self.key}":
            return 401, {"error": f"Unauthorized: {headers.get('Authorization')}"}
        found = self.routes.get((method, path))
        return (404, {"detail": "Not Found"}) if found is None else found(body)

    def _health(self, _: Any) -> Answer:
        return (200, None) if self.healthy else (503, None)

    def _row(self, body: dict[str, Any]) -> Answer:
        """Counts, waits and fails as told, and makes the row."""
        with self._count_lock:
            self.asked.append(body)
            self._in_flight += 1
            self.peak = max(self.peak, self._in_flight)
            failure = self.failures.pop(0) if self.failures else None
            dies = self.dies_after is not None and self.answered >= self.dies_after
            if dies:
                self.dies_after = None
        try:
            if dies:
                self.kill()
            time.sleep(self.delay)
            self.gate.wait()
            answer = (200, self._make(body)) if failure is None else failure
        finally:
            with self._count_lock:
                self._in_flight -= 1
        with self._count_lock:
            self.answered += not self._dead
            if self.on_answered is not None:
                self.on_answered(self.answered)
        return answer

    def _make(self, body: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError

    def _generate(
        self, ids: list[int], seed: int, limit: int, values: dict[str, Any], top_k: int
    ) -> tuple[list[int], list[float], str]:
        sampling = Sampling(
            max_new_tokens=limit,
            top_k=top_k,
            stop=tuple(values["stop"]),
            stop_token_ids=tuple(values["stop_token_ids"]),
            **{name: values[name] for name in SAMPLING_FIELDS},
        )
        prompts = Ragged(values=torch.tensor(ids, dtype=torch.int32), offsets=torch.tensor([0, len(ids)]))
        with self._lock:
            made = self.engine.generate(Request(prompts=prompts, seeds=torch.tensor([seed]), sampling=sampling))
        reason = "stop" if int(made.finish[0]) == STOP else "length"
        return made.responses.values.tolist(), made.logprobs.tolist(), reason


class FakeVllm(FakeServer):
    """vLLM 0.32 with its development routes and our worker extension."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any = None, **options: Any) -> None:
        super().__init__(model, tokenizer, **options)
        self.logprobs_mode = "processed_logprobs"
        self.dtype = torch.float32
        self.context = 1_000
        self.resets = 0
        self.routes |= {
            ("GET", "/version"): lambda _: (200, {"version": "0.32.0"}),
            ("GET", "/server_info"): self._info,
            ("POST", "/collective_rpc"): self._command,
            ("POST", "/reset_prefix_cache"): self._reset,
            ("POST", "/v1/completions"): self._row,
        }

    def _info(self, _: Any) -> Answer:
        return 200, {"vllm_config": {"model_config": {"logprobs_mode": self.logprobs_mode}}}

    def _reset(self, _: Any) -> Answer:
        self.resets += 1
        return 200, {"success": True}

    def _command(self, body: dict[str, Any]) -> Answer:
        if body["method"] == "policy_digest":
            return 200, {"results": [self.held]}
        if body["method"] != "load_policy":
            return 500, {"error": {"message": f"no attribute {body['method']!r}", "code": 500}}
        self.loads.append(Path(body["kwargs"]["folder"]))
        state = load_tensors(self.loads[-1], "policy")
        with self._lock:
            self.engine.load(state)
        self.held = weights_digest(state, self.dtype)
        return 200, {"results": [self.held]}

    def _make(self, body: dict[str, Any]) -> dict[str, Any]:
        assert body["ignore_eos"] and body["return_token_ids"] and body["logprobs"] == 0
        ids, limit = body["prompt"], min(body["max_tokens"], self.context - len(body["prompt"]))
        made, logprobs, reason = self._generate(ids, body["seed"], limit, body, body["top_k"])
        choice = {"token_ids": made, "logprobs": {"token_logprobs": logprobs}, "finish_reason": reason}
        return {"choices": [{"index": 0, "text": ""} | choice]}


class FakeSglang(FakeServer):
    """SGLang, whose older versions have other paths for the same."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any = None, *, old: bool = False, **options: Any) -> None:
        super().__init__(model, tokenizer, **options)
        self.deterministic = True
        self.row_version: str | None = None
        """What rows say they come from, if not what is held."""
        prefix = "/get_" if old else "/"
        self.routes |= {
            ("GET", f"{prefix}server_info"): self._info,
            ("GET", f"{prefix}model_info"): lambda _: (200, {"model_path": "x", "weight_version": self._version}),
            ("POST", "/update_weights_from_disk"): self._update,
            ("POST", "/generate"): self._row,
        }

    @property
    def _version(self) -> str:
        return self.held or "default"

    def _info(self, _: Any) -> Answer:
        return 200, {"version": "0.5.9", "enable_deterministic_inference": self.deterministic}

    def _update(self, body: dict[str, Any]) -> Answer:
        self.loads.append(Path(body["model_path"]))
        try:
            state = load_model(str(self.loads[-1]), torch.float32, "cpu").state_dict()
        except ModelError as error:
            return 400, {"success": False, "message": str(error), "num_paused_requests": 0}
        with self._lock:
            self.engine.load(state)
        self.held = body["weight_version"]
        return 200, {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    def _make(self, body: dict[str, Any]) -> dict[str, Any]:
        params = body["sampling_params"]
        assert body["return_logprob"] and params["no_stop_trim"] and "ignore_eos" not in params
        assert 0 <= params["sampling_seed"] < 2**31
        limit, top_k = params["max_new_tokens"], max(params["top_k"], 0)
        made, logprobs, reason = self._generate(body["input_ids"], params["sampling_seed"], limit, params, top_k)
        if len(made) == limit:
            reason = "length"  # looked at first
        finish = {"type": reason, "length": len(made)} if reason == "length" else {"type": reason, "matched": made[-1]}
        drawn = [[value, token, None] for value, token in zip(logprobs, made, strict=True)]
        version = self.row_version or self._version
        about = {"finish_reason": finish, "output_token_logprobs": drawn, "weight_version": version}
        return {"text": "", "output_ids": made, "meta_info": about}
