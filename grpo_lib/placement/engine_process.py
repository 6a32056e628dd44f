"""A vLLM engine in a process of its own: what vLLM does to its process stays there.

The process is a rank without a group (`ranks.py`): it ends with its parent, its death or silence is the stage's error,
and the next attempt starts another. Tensors go through files in a private folder, which stay in the page cache.
"""

import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from pydantic import JsonValue
from torch import Tensor

from grpo_lib.data.ragged import Ragged
from grpo_lib.generation.base import Budget, Generated, Progress, Request, Sampling
from grpo_lib.generation.vllm import (
    AdapterOptions,
    VllmEngine,
    VllmOptions,
    check_head_size,
    check_installed,
    head_size,
)
from grpo_lib.generation.weights import check_weights
from grpo_lib.placement.rank_main import report
from grpo_lib.placement.ranks import RankGroup, row_progress
from grpo_lib.training.export import describe
from grpo_lib.training.tensors import load_tensors, save_tensors

STEM = "tensors"
VISIBLE = "CUDA_VISIBLE_DEVICES"


class EngineProcess:
    """An `Engine`: a `VllmEngine` in another process. After an error the process is gone: ``alive`` is false.

    Args:
        folder: model and tokenizer.
        gpus: which of the machine's GPUs it sees; None: all that this process sees.
        threads: of a CPU.
        start_seconds: within which it must be ready.
        generate_seconds: within which it must answer a request.
        adapter: see `VllmEngine`.

    Raises:
        MissingPackageError: vLLM is not installed.
        RankLostError: the process did not come up.
    """

    name = "vllm"

    def __init__(
        self,
        folder: str,
        *,
        eos_token_ids: Sequence[int],
        dtype: torch.dtype,
        device: str,
        options: VllmOptions,
        gpus: Sequence[int] | None,
        threads: int | None,
        start_seconds: float,
        generate_seconds: float,
        adapter: AdapterOptions | None = None,
    ) -> None:
        check_installed()
        if device == "cpu":
            check_head_size(head_size(folder), "choose another model")
        self._about = describe(folder) if adapter is None else None
        self._scratch = Path(tempfile.mkdtemp(prefix="grpo-engine-"))
        self._remove = weakref.finalize(self, shutil.rmtree, self._scratch, ignore_errors=True)
        setup: dict[str, JsonValue] = {
            "folder": folder,
            "eos_token_ids": list(eos_token_ids),
            "dtype": str(dtype).removeprefix("torch."),
            "device": device,
            "options": asdict(options),
            "adapter": None if adapter is None else asdict(adapter),
        }
        try:
            self._group = RankGroup(
                ranks=1,
                handler="grpo_lib.placement.engine_process:EngineHandler",
                setup=setup,
                device="cpu" if device == "cpu" else "cuda",
                threads=threads,
                start_seconds=start_seconds,
                command_seconds=generate_seconds,
                alone={} if gpus is None else {VISIBLE: visible(gpus, os.environ.get(VISIBLE))},
                name="the vLLM engine",
            )
            self.version = str(self._group.call("version"))
        except BaseException:
            self._remove()
            raise

    @property
    def alive(self) -> bool:
        return self._group.alive

    @property
    def pid(self) -> int:
        return self._group.pids[0]

    def generate(self, request: Request, on_progress: Progress | None = None) -> Generated:
        with tempfile.TemporaryDirectory(dir=self._scratch) as folder:
            asked = {"ids": request.prompts.values, "offsets": request.prompts.offsets, "seeds": request.seeds}
            if request.limits is not None:
                asked["limits"] = request.limits
            save_tensors(asked, Path(folder), STEM)
            budget = None if request.budget is None else asdict(request.budget)
            sampling = asdict(request.sampling)
            self._group.call(
                "generate", row_progress(on_progress), folder=folder, n=request.n, sampling=sampling, budget=budget
            )
            found = load_tensors(Path(folder) / "result", STEM)
        responses = Ragged(values=found["ids"], offsets=found["offsets"])
        return Generated(responses=responses, logprobs=found["logprobs"], finish=found["finish"])

    def load(self, state: Mapping[str, Tensor]) -> None:
        if self._about is not None:  # what the process refuses ends it
            check_weights(self._about.shapes, state, tied=self._about.tied)
        with tempfile.TemporaryDirectory(dir=self._scratch) as folder:
            save_tensors(state, Path(folder), STEM)
            self._group.call("load", folder=folder)

    def digest(self) -> str:
        return str(self._group.call("digest"))

    def sleep(self) -> None:
        self._group.call("sleep")

    def wake(self) -> None:
        self._group.call("wake")

    def close(self) -> None:
        self._group.close()
        self._remove()


def visible(gpus: Sequence[int], seen: str | None) -> str:
    """Names of GPUs for a child: ``gpus`` count those that this process sees.

    >>> visible([1, 2], "4,5,6"), visible([1, 2], None)
    ('5,6', '1,2')
    """
    names = seen.split(",") if seen else None
    return ",".join(str(gpu) if names is None else names[gpu] for gpu in gpus)


class EngineHandler:
    """The commands of the process."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self._engine = VllmEngine(
            setup["folder"],
            eos_token_ids=setup["eos_token_ids"],
            dtype=getattr(torch, setup["dtype"]),
            device=setup["device"],
            options=VllmOptions(**setup["options"]),
            adapter=None if setup["adapter"] is None else AdapterOptions(**setup["adapter"]),
        )

    def version(self) -> str:
        return self._engine.version

    def generate(self, folder: str, n: int, sampling: dict[str, Any], budget: dict[str, Any] | None) -> None:
        asked = load_tensors(Path(folder), STEM)
        request = Request(
            prompts=Ragged(values=asked["ids"], offsets=asked["offsets"]),
            seeds=asked["seeds"],
            n=n,
            sampling=Sampling.from_json(sampling),
            limits=asked.get("limits"),
            budget=None if budget is None else Budget(**budget),
        )
        made = self._engine.generate(request, lambda done, total, tokens: report(done=done, total=total, tokens=tokens))
        result = Path(folder) / "result"
        result.mkdir()
        responses = made.responses
        columns = {"ids": responses.values, "offsets": responses.offsets}
        save_tensors(columns | {"logprobs": made.logprobs, "finish": made.finish}, result, STEM)

    def load(self, folder: str) -> None:
        self._engine.load(load_tensors(Path(folder), STEM))

    def digest(self) -> str:
        return self._engine.digest()

    def sleep(self) -> None:
        self._engine.sleep()

    def wake(self) -> None:
        self._engine.wake()
