"""The ``server`` engine: one or several OpenAI-compatible servers, which run elsewhere and are asked over HTTP.

A row is a request, with the row's own seed, so that it is the same whichever server makes it. Weights go through a
folder that all servers see. What servers of either kind say is in `server_vllm` and `server_sglang`, how rows are
spread and lost servers are got back in `server_batch`.
"""

import asyncio
import os
import secrets
import shutil
import socket
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_lib.config_rollout import ServerConfig
from grpo_lib.errors import ConfigError, ModelError
from grpo_lib.generation.base import Generated, Progress, Request, from_rows
from grpo_lib.generation.server_batch import Batch
from grpo_lib.generation.server_dialects import Dialect
from grpo_lib.generation.server_http import Access
from grpo_lib.generation.server_peers import Policy, Server, peers_of, place
from grpo_lib.generation.server_rows import Row, Terms
from grpo_lib.generation.server_sglang import SglangDialect
from grpo_lib.generation.server_vllm import VllmDialect
from grpo_lib.generation.weights import check_weights
from grpo_lib.training.digest import weights_digest
from grpo_lib.training.export import Description, describe

DIALECTS: dict[str, Callable[[ServerConfig], Dialect]] = {
    "vllm": lambda settings: VllmDialect(settings.model),
    "sglang": lambda settings: SglangDialect(),
}


def check_settings(settings: ServerConfig) -> None:
    """What can be seen without a server.

    Raises:
        ConfigError: a URL is none, the API key's variable is not set, or the folder of the weights can't be written.
    """
    Access(settings.urls, key_variable=settings.api_key_variable, request_seconds=settings.timeout_seconds)
    folder = Path(settings.weights_folder).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(
            f"rollout.server.weights_folder={settings.weights_folder!r} can't be written ({error.strerror}); name a "
            "folder that this machine and all servers see"
        ) from error


class ServerEngine:
    """An `Engine` on servers that were started by somebody else, and stay.

    With a budget, rows are asked for in slices; those that are under way when it is used up are waited for.

    Args:
        settings: ``rollout.server``.
        model_folder: configuration of the servers' model.
        eos_token_ids: tokens that end a response.
        dtype: of the servers' weights.
        tokenizer: for stop strings.

    Raises:
        ConfigError: a URL or the API key is missing.
    """

    name = "server"
    alive = True

    def __init__(
        self,
        settings: ServerConfig,
        *,
        model_folder: Path,
        eos_token_ids: Sequence[int],
        dtype: torch.dtype,
        tokenizer: Any = None,
    ) -> None:
        self._settings, self._model_folder = settings, model_folder
        self._eos, self._dtype, self._tokenizer = frozenset(eos_token_ids), dtype, tokenizer
        self._access = Access(
            settings.urls, key_variable=settings.api_key_variable, request_seconds=settings.timeout_seconds
        )
        self._dialect = DIALECTS[settings.kind](settings)
        self._servers = [Server(url=url) for url in self._access.urls]
        self._policy: Policy | None = None
        self._loads = 0
        # Several engines may share the folder, from several machines.
        mine = f"engine-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._folder = Path(settings.weights_folder).expanduser().absolute() / mine
        self._remove = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self.version = f"{settings.kind}, not asked yet"

    @cached_property
    def _model(self) -> Description:
        return describe(str(self._model_folder))

    def generate(self, request: Request, on_progress: Progress | None = None) -> Generated:
        """See `Engine.generate`. To be called from a thread without a running event loop.

        Raises:
            ServerLostError: no server is left, or a row failed too often.
            ConfigError: a server refuses a request or was not started as it must be.
        """
        sampling = request.sampling
        if sampling.stop and self._tokenizer is None:
            raise ConfigError(f"stop strings {list(sampling.stop)} need a tokenizer, and this engine was given none")
        terms = Terms(
            sampling=sampling,
            stop_ids=self._eos | frozenset(sampling.stop_token_ids),
            decode=lambda ids: str(self._tokenizer.decode(ids, skip_special_tokens=False)),
            budget=request.budget,
            max_in_flight=self._settings.max_in_flight,
            retries=self._settings.retries,
            recovery_seconds=self._settings.recovery_seconds,
        )
        rows = _rows(request)
        asyncio.run(self._generate(rows, terms, self._loaded(), on_progress))
        return from_rows([(row.ids, row.logprobs, row.finish) for row in rows])

    async def _generate(self, rows: Sequence[Row], terms: Terms, policy: Policy, on_progress: Progress | None) -> None:
        async with peers_of(self._servers, self._access, self._dialect, terms.max_in_flight) as peers:
            await Batch(rows, peers, policy, self._dialect, terms, on_progress).run()

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Writes weights into the shared folder, in the servers' precision, and has every server take them.

        A server that is not there gets them when it is back.

        Raises:
            ModelError: names or shapes are not those of the model.
            ParityError: a server holds other weights afterwards.
            ConfigError: a server can't take weights, or the folder can't be written.
            ServerLostError: no server is there.
        """
        check_weights(self._model.shapes, state, tied=self._model.tied)
        before, self._policy = self._policy, None  # unknown until all are through
        self._loads += 1
        policy = Policy(folder=self._folder / f"{self._loads:06d}", digest=weights_digest(state, self._dtype))
        try:
            self._write(state, policy)
            asyncio.run(self._place(policy))
        except BaseException:
            _delete(policy)
            raise
        finally:
            if before is not None:
                _delete(before)
        self._policy = policy
        self.version = ", ".join(dict.fromkeys(each.version for each in self._servers if each.version is not None))

    def _write(self, state: Mapping[str, Tensor], policy: Policy) -> None:
        try:
            policy.folder.mkdir(parents=True)
            self._dialect.write(self._model, state, self._dtype, policy.folder)
        except OSError as error:
            raise ConfigError(
                f"weights can't be written to {policy.folder} ({error.strerror or error}); "
                "rollout.server.weights_folder must be a folder with room that this machine can write and the servers "
                "can read"
            ) from error

    async def _place(self, policy: Policy) -> None:
        async with peers_of(self._servers, self._access, self._dialect, connections=1) as peers:
            await place(policy, peers, self._settings.recovery_seconds)

    def digest(self) -> str:
        """Of the weights that every server holds that makes rows: they are asked before and after each call."""
        return self._loaded().digest

    def _loaded(self) -> Policy:
        if self._policy is None:
            raise ModelError("no policy was loaded into the servers yet; call load first")
        return self._policy

    def sleep(self) -> None:
        """Nothing: the servers' accelerators are their own, nobody waits for the memory."""

    def wake(self) -> None:
        """Nothing, see ``sleep``."""

    def close(self) -> None:
        """Removes what was written for the servers, which go on with the last policy."""
        self.alive, self._policy = False, None
        self._remove()


def _rows(request: Request) -> list[Row]:
    values, offsets = request.prompts.values.tolist(), request.prompts.offsets.tolist()
    seeds, count = request.seeds.tolist(), len(request.seeds)
    limits = [request.sampling.max_new_tokens] * count if request.limits is None else request.limits.tolist()
    prompts = [values[start:end] for start, end in pairwise(offsets)]
    return [
        Row(prompt=prompts[row // request.n], seed=seed, limit=limit)
        for row, (seed, limit) in enumerate(zip(seeds, limits, strict=True))
    ]


def _delete(policy: Policy) -> None:
    """Folders on a network may be slow to go; what stays goes with the engine's own folder."""
    shutil.rmtree(policy.folder, ignore_errors=True)
