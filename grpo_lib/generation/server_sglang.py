"""SGLang's servers.

SGLang has no package for machines without an accelerator. What is here follows its sources (``python/sglang/srt``:
``entrypoints/http_server.py``, ``managers/io_struct.py``, ``sampling/sampling_params.py``,
``managers/schedule_batch.py``) and is tested against a fake that speaks the same, not against SGLang itself.
"""

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from grpo_lib.errors import ConfigError
from grpo_lib.generation.server_dialects import NOT_FOUND, Ask, Reply, numbers, other_weights
from grpo_lib.generation.server_http import CONTROL_SECONDS, Connection, Refused, Unwell
from grpo_lib.training.digest import HEAD
from grpo_lib.training.export import Description, export_model

START = "start it with --enable-deterministic-inference, without which it ignores seeds"


class SglangDialect:
    """``/generate`` for rows; ``/update_weights_from_disk`` for weights, with their digest as ``weight_version``.

    - Seeds only count with ``--enable-deterministic-inference``. Some versions keep them in 32 bits: 31 of ours are
      used.
    - ``ignore_eos`` would ignore ``stop_token_ids`` too, so the end-of-sequence tokens of the server's own files always
      end a row, besides those asked for.
    - The update itself drops the cache of prompts, after the running requests, which it aborts: they are nobody's.
    - Log-probs are those after the temperature and before any truncation; the configuration refuses truncation.
    """

    async def generate(self, server: Connection, ask: Ask, digest: str) -> Reply:
        sampling = ask.sampling
        params = {
            "max_new_tokens": ask.limit,
            "sampling_seed": (ask.seed ^ (ask.seed >> 32)) & 0x7FFF_FFFF,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "stop": list(sampling.stop),
            "stop_token_ids": list(ask.stop_ids),
            "no_stop_trim": True,
            "skip_special_tokens": False,
        }
        body = {"input_ids": ask.ids, "sampling_params": params, "return_logprob": True}
        about = (await server.call("POST", "/generate", body))["meta_info"]
        reason = about["finish_reason"]["type"]
        if reason not in ("stop", "length"):
            raise Unwell(f"a row ended with {reason!r} ({about['finish_reason'].get('message', 'no message')})")
        if about.get("weight_version", digest) != digest:
            raise Unwell(f"a row came from other weights ({str(about['weight_version'])[:16]})")
        drawn = about["output_token_logprobs"]  # log-prob, id, text of each
        return Reply(
            ids=[each[1] for each in drawn], logprobs=numbers([each[0] for each in drawn]), stopped=reason == "stop"
        )

    def write(self, model: Description, weights: Mapping[str, Tensor], dtype: torch.dtype, folder: Path) -> None:
        export_model(model, _with_head(model, weights), dtype, folder)

    async def introduce(self, server: Connection) -> str:
        about = await self._ask(server, "/server_info", "/get_server_info")
        if about.get("enable_deterministic_inference") is not True:
            raise ConfigError(
                f"the server {server.url} is no SGLang server that generates by seed: {START}, or set "
                "rollout.server.kind"
            )
        return f"sglang {about['version']}"

    async def held(self, server: Connection) -> str | None:
        version = (await self._ask(server, "/model_info", "/get_model_info")).get("weight_version")
        return None if version is None else str(version)

    async def load(self, server: Connection, folder: Path, digest: str) -> None:
        body = {
            "model_path": str(folder),
            "weight_version": digest,
            "abort_all_requests": True,
            "flush_cache": True,
        }
        try:
            answer = await server.call("POST", "/update_weights_from_disk", body)
        except Refused as error:
            raise ConfigError(
                f"{error}. rollout.server.weights_folder must be a folder that the server sees by the same path"
            ) from None
        if not answer["success"]:
            raise ConfigError(f"the server {server.url} did not take the weights in {folder}: {answer['message']}")
        if (found := await self.held(server)) != digest:
            raise other_weights(server, digest, str(found)[:16])

    async def _ask(self, server: Connection, path: str, older: str) -> Any:
        """By the path of today or the one of before."""
        try:
            return await server.call("GET", path, seconds=CONTROL_SECONDS)
        except Refused as error:
            if error.status != NOT_FOUND:
                raise
            return await server.call("GET", older, seconds=CONTROL_SECONDS)


def _with_head(model: Description, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """A tied head that is not listed is the embedding."""
    if HEAD in weights or HEAD not in model.shapes:
        return weights
    with torch.device("meta"):
        twin = AutoModelForCausalLM.from_config(deepcopy(model.config))
    embedding = twin.get_input_embeddings().weight
    (name,) = (name for name, each in twin.named_parameters() if each is embedding)
    return {**weights, HEAD: weights[name]}
