"""vLLM's servers; tested against a real one of version 0.32."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_lib.errors import ConfigError
from grpo_lib.generation.server_dialects import INTERNAL, NOT_FOUND, Ask, Reply, numbers, other_weights
from grpo_lib.generation.server_http import CONTROL_SECONDS, Connection, Refused, Unwell
from grpo_lib.generation.vllm_extension import STEM, PolicyExtension
from grpo_lib.training.export import Description
from grpo_lib.training.tensors import save_tensors

EXTENSION = f"{PolicyExtension.__module__}.{PolicyExtension.__qualname__}"
START = f"start it with VLLM_SERVER_DEV_MODE=1, PYTHONPATH=<folder of grpo_lib> and --worker-extension-cls {EXTENSION}"
LOGPROBS = "processed_logprobs"
INFO_SECONDS = 60.0
"""vLLM looks around on its machine before it first answers, for seconds."""


class VllmDialect:
    """``/v1/completions`` for rows; ``/collective_rpc`` to `PolicyExtension`, and ``/reset_prefix_cache``, for weights.

    Args:
        model: its name at the server; None: the one that it serves.
    """

    def __init__(self, model: str | None = None) -> None:
        self._model = {} if model is None else {"model": model}

    async def generate(self, server: Connection, ask: Ask, digest: str) -> Reply:
        sampling = ask.sampling
        body = {
            **self._model,
            "prompt": ask.ids,
            "max_tokens": ask.limit,
            "seed": ask.seed,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "stop": list(sampling.stop),
            "stop_token_ids": list(ask.stop_ids),
            "ignore_eos": True,  # what ends a row is said above, not in the server's files
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "add_special_tokens": False,
            "logprobs": 0,  # of the token itself
            "return_token_ids": True,
        }
        answer = await server.call("POST", "/v1/completions", body)
        choice = answer["choices"][0]
        if choice.get("token_ids") is None:
            raise ConfigError(f"the server {server.url} returns no token ids; it needs a newer vLLM (0.32 is tested)")
        reason = choice["finish_reason"]
        if reason not in ("stop", "length"):
            raise Unwell(f"a row ended with {reason!r}")
        logprobs = choice["logprobs"]["token_logprobs"]
        return Reply(ids=choice["token_ids"], logprobs=numbers(logprobs), stopped=reason == "stop")

    def write(self, model: Description, weights: Mapping[str, Tensor], dtype: torch.dtype, folder: Path) -> None:
        save_tensors(_converted(weights, dtype), folder, STEM)

    async def introduce(self, server: Connection) -> str:
        version = (await server.call("GET", "/version", seconds=CONTROL_SECONDS))["version"]
        try:
            about = await server.call("GET", "/server_info?config_format=json", seconds=INFO_SECONDS)
        except Refused as error:
            if error.status != NOT_FOUND:
                raise
            raise self._not_as_needed(server) from None
        config = about["vllm_config"]  # older versions give a text; there the parity gate finds it out
        if isinstance(config, dict) and (mode := config["model_config"]["logprobs_mode"]) != LOGPROBS:
            raise ConfigError(
                f"the server {server.url} reports {mode}, which leave out temperature, penalty and truncation; start "
                f"it with --logprobs-mode {LOGPROBS}"
            )
        return f"vllm {version}"

    async def held(self, server: Connection) -> str | None:
        digests = set(await self._command(server, "policy_digest", CONTROL_SECONDS))
        return digests.pop() if len(digests) == 1 else None  # workers that differ hold nothing of use

    async def load(self, server: Connection, folder: Path, digest: str) -> None:
        found = await self._command(server, "load_policy", None, folder=str(folder))
        if set(found) != {digest}:
            raise other_weights(server, digest, ", ".join(str(each)[:16] for each in found))
        # Rows that nobody waits for any more may still run and hold on to their blocks: they start over.
        answer = await server.call("POST", "/reset_prefix_cache?reset_running_requests=true")
        if answer is not None and not answer.get("success", True):
            raise Unwell("its prefix cache could not be reset")

    async def _command(self, server: Connection, method: str, seconds: float | None, **arguments: str) -> list[Any]:
        """The answers of all workers."""
        body = {"method": method, "kwargs": arguments}
        try:
            answer = await server.call("POST", "/collective_rpc", body, seconds)
        except Refused as error:
            if error.status == NOT_FOUND:
                raise self._not_as_needed(server) from None
            raise
        except Unwell as error:
            if error.status != INTERNAL:
                raise
            await server.health()  # it lives: the command itself failed, and would again
            raise ConfigError(
                f"the server {server.url} failed at {method}: {error}. If it knows no such method, {START}; if it "
                "finds no file, rollout.server.weights_folder must be a folder that it sees by the same path"
            ) from None
        return list(answer["results"])

    def _not_as_needed(self, server: Connection) -> ConfigError:
        return ConfigError(f"the server {server.url} takes no weights; {START}")


def _converted(weights: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """In the precision, where tied weights stay one tensor."""
    made: dict[tuple[int, torch.Size], Tensor] = {}
    for value in weights.values():
        made.setdefault((value.data_ptr(), value.shape), value.detach().to("cpu", dtype))
    return {name: made[value.data_ptr(), value.shape] for name, value in weights.items()}
