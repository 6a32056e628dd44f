"""From the end of an update to the first new token, with vLLM in a process of its own: `python .../handover.py`.

Wall-clock seconds, one thread on each side; medians after one round that does not count.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from generation import WORKS

from grpo_lib.data.ragged import Ragged, lengths_to_offsets
from grpo_lib.generation.base import Request, Sampling
from grpo_lib.generation.vllm import VllmOptions
from grpo_lib.placement.engine_process import EngineProcess
from grpo_lib.training.digest import weights_digest
from grpo_lib.training.tensors import load_tensors, save_tensors

ROUNDS = 5


def milliseconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - began)


def handover(name: str) -> None:
    work = WORKS[name]
    model = work.make_model()
    state = model.state_dict()
    prompt = torch.tensor(work.prompt_ids[0])
    first = Request(
        prompts=Ragged(values=prompt, offsets=lengths_to_offsets(torch.tensor([len(prompt)]))),
        seeds=torch.tensor([0]),
        sampling=Sampling(temperature=1.0, max_new_tokens=1),
    )
    with tempfile.TemporaryDirectory(prefix="grpo-bench-") as place:
        folder = Path(place)
        model.save_pretrained(folder)
        engine = EngineProcess(
            str(folder),
            eos_token_ids=[],
            dtype=torch.float32,
            device="cpu",
            options=VllmOptions(max_length=256, max_rows=128),
            gpus=None,
            threads=1,
            start_seconds=300,
            generate_seconds=300,
        )
        parts: dict[str, Callable[[], object]] = {
            "weights taken by the engine, in all": lambda: engine.load(state),
            "  of which written to a file": lambda: save_tensors(state, folder, "parts"),
            "  of which read from it": lambda: load_tensors(folder, "parts"),
            "  of which their digest, beside the loading": lambda: weights_digest(state),
            "first token of a prompt": lambda: engine.generate(first),
        }
        rounds = [{part: milliseconds(call) for part, call in parts.items()} for _ in range(ROUNDS + 1)][1:]
        engine.close()
    print(f"handover, {name}: {sum(p.numel() for p in model.parameters()):,} parameters, ms")
    for part in parts:
        print(f"  {part:<48} {statistics.median(each[part] for each in rounds):>8.1f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for each in ("demo", "36M"):
        handover(each)
