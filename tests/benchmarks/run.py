"""Benchmarks: ratios measured side by side in one run, one core. `make bench` or `python tests/benchmarks/run.py`.

The algorithms alone, with fewer rows: `python tests/benchmarks/algorithms.py --rows 50000 gae "loss ppo_clip"`.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import torch
from algorithms import algorithms
from head import head
from trainer import trainer

from grpo_lib.config import CountdownData, SmallModelConfig, StoreConfig
from grpo_lib.config_files import make_config
from grpo_lib.data.ragged import Ragged
from grpo_lib.generation.base import Request, Sampling
from grpo_lib.generation.local import LocalEngine
from grpo_lib.models import make_small_model, make_tokenizer
from grpo_lib.problems import get_problem
from grpo_lib.seeds import row_seeds
from grpo_lib.storage.objects import open_store
from grpo_lib.storage.stages import StageSpec, StageStore, stage_key

ROUNDS = 3


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def interleaved(first: Callable[[], object], second: Callable[[], object], rounds: int = ROUNDS) -> tuple[float, float]:
    """Medians of A B A B ..., after one round that does not count."""
    first(), second()
    pairs = [(seconds(first), seconds(second)) for _ in range(rounds)]
    return statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)


def generation() -> None:
    """64 prompts x 8 x 64 tokens on the demo's model: the local engine against `model.generate`."""
    problem = get_problem("countdown")
    tokenizer = make_tokenizer(problem.tags, problem.alphabet)
    sizes = {"vocab_size": len(tokenizer), "eos_id": tokenizer.eos_token_id, "pad_id": tokenizer.pad_token_id}
    model = make_small_model(SmallModelConfig(), **sizes, max_positions=4096, seed=0)
    twin = make_small_model(SmallModelConfig(), **sizes, max_positions=4096, seed=0)
    texts = problem.load(CountdownData(), "heldout", 0).column("prompt").to_pylist()[:64]
    encoded = [tokenizer(text)["input_ids"] for text in texts]
    offsets = torch.tensor([0, *torch.tensor([len(each) for each in encoded]).cumsum(0).tolist()])
    ids = torch.tensor([token for each in encoded for token in each])
    never = [len(tokenizer) + 1]  # no row ends early: both make the same number of tokens
    engine = LocalEngine(model, eos_token_ids=never)
    seeds = torch.from_numpy(row_seeds(0, 0, 64 * 8))
    padded = tokenizer(texts, return_tensors="pt", padding=True)

    def ours() -> None:
        sampling = Sampling(temperature=1.0, max_new_tokens=64)
        engine.generate(Request(prompts=Ragged(values=ids, offsets=offsets), seeds=seeds, n=8, sampling=sampling))

    def theirs() -> None:
        with torch.inference_mode():
            twin.generate(
                **padded, do_sample=True, top_k=0, num_return_sequences=8, min_new_tokens=64, max_new_tokens=64
            )

    a, b = interleaved(ours, theirs)
    tokens = 64 * 8 * 64
    print(f"generation, {sum(p.numel() for p in model.parameters()):,} parameters, 512 rows x 64 tokens:")
    print(f"  local engine {tokens / a:,.0f} tokens/s, model.generate {tokens / b:,.0f} tokens/s: {b / a:.2f}x")


def commits() -> None:
    """A stage commit of a small table (128 rows of 50 tokens) against writing the same file and nothing else."""
    with tempfile.TemporaryDirectory(dir=".") as folder:
        config = make_config({"data": {"problem": "countdown"}, "warm_start": {}, "store": {"uri": folder}})
        stages = StageStore(open_store(StoreConfig(uri=folder)), "bench")
        spec = StageSpec(name="rollout", version=1, reads=("rollout",))
        table = pa.table({"ids": pa.array([list(range(50))] * 128, type=pa.list_(pa.int32()))})
        counter = iter(range(10**6))

        def commit() -> None:
            iteration = next(counter)
            key = stage_key(spec, config, [], iteration)
            with stages.attempt(spec, config, key, [], iteration) as attempt:
                attempt.write_table(table)
                attempt.commit()

        def bare() -> None:
            with pa.ipc.new_file(str(Path(folder) / f"{next(counter)}.arrow"), table.schema) as writer:
                writer.write_table(table)

        a, b = interleaved(commit, bare, rounds=50)
        print(f"commit of a small stage: {1000 * a:.1f} ms (write, sha256, fsync, manifest, index); "
              f"the bare file {1000 * b:.1f} ms")  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    generation()
    commits()
    trainer()
    head()
    algorithms()
    print("seconds an iteration outside stage bodies: `make demo`, then `grpo show RUN`")


if __name__ == "__main__":
    main()
