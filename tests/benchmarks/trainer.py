"""The trainer: `python tests/benchmarks/trainer.py [update] [shared] [scoring] [mfu]`. One thread, CPU seconds on CPUs.

``update``: an optimizer step over rows with a long-tailed length distribution, against the same trainer on shuffled
micro-batches of 8 rows, each padded to its longest. ``shared``: with prompts that 8 rows share, against the same
trainer with a prompt for each row. ``scoring``: what `old_logprobs` and `ref_logprobs` cost on top of the bare forward
pass of the same packed tokens. ``mfu``: model FLOPs utilisation of an update with a model of 0.5 billion parameters; on
a GPU only. Runs with torch, transformers and pyarrow alone.
"""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from grpo_lib.algorithms.aggregation import AGGREGATIONS
from grpo_lib.algorithms.losses import ppo_clip
from grpo_lib.data.ragged import Ragged, lengths_to_offsets
from grpo_lib.models import make_small_model
from grpo_lib.training import trainer as trainer_module
from grpo_lib.training.backends import make_reference_for, make_trainer
from grpo_lib.training.base import Batching, Objective, UpdateBatch
from grpo_lib.training.flops import peak_tflops
from grpo_lib.training.microbatches import Sequences, micro_batch, plan, plan_sequences
from grpo_lib.training.trainer import Trainer
from grpo_lib.training.world import World

ROWS, MEDIAN, P99, PROMPT = 512, 60, 1_000, 16
MAX_TOKENS = 16_384
ROUNDS = 3
SMALL = {"hidden_size": 128, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 32, "mlp_size": 384}
HALF_BILLION = {"hidden_size": 896, "layers": 24, "heads": 14, "kv_heads": 2, "head_dim": 64, "mlp_size": 4864}
"""The shape of Qwen2.5-0.5B."""


def make(shape: dict[str, int], vocabulary: int, layout: str, dtype: torch.dtype = torch.float32) -> Trainer:
    device = torch.device("cuda" if dtype == torch.bfloat16 else "cpu")
    small = SimpleNamespace(**shape, rope_theta=1e4, initializer_range=0.02)
    optimizer = SimpleNamespace(
        lr=1e-5,
        beta1=0.9,
        beta2=0.999,
        eps=1e-8,
        weight_decay=0.0,
        max_grad_norm=1.0,
        schedule="constant",
        warmup_steps=0,
        final_lr_fraction=1.0,
    )
    settings: Any = SimpleNamespace(
        backend="torch",
        layout=layout,
        gradient_checkpointing=False,
        lora=None,
        max_tokens=MAX_TOKENS,
        optimizer=optimizer,
    )

    def load() -> Any:
        return make_small_model(small, vocabulary, eos_id=1, pad_id=0, max_positions=4096, seed=0).to(device)  # type: ignore[arg-type]

    world = World.alone(device)
    trainer = make_trainer(load, settings, decay_steps=None, dtype=dtype, world=world)
    trainer.reference = make_reference_for(trainer, settings, dtype, load)
    return trainer


def rows(lengths: Tensor, vocabulary: int) -> Sequences:
    """Prompts of ``PROMPT`` tokens and responses of the given lengths."""
    generator = torch.Generator().manual_seed(0)

    def tokens(each: Tensor) -> Ragged:
        offsets = lengths_to_offsets(each)
        ids = torch.randint(2, vocabulary, (int(offsets[-1]),), generator=generator, dtype=torch.int32)
        return Ragged(values=ids, offsets=offsets)

    return Sequences(prompts=tokens(torch.full_like(lengths, PROMPT)), responses=tokens(lengths))


def long_tailed() -> Tensor:
    """Lengths with the median and 99th percentile of a log-normal distribution; the longest 2,000."""
    generator = torch.Generator().manual_seed(1)
    sigma = torch.tensor(P99 / MEDIAN).log() / 2.3263
    return (MEDIAN * (sigma * torch.randn(ROWS, generator=generator)).exp()).round().clamp(1, 2_000).long()


def make_batch(sequences: Sequences) -> UpdateBatch:
    like, count = sequences.responses, len(sequences.responses.values)
    generator = torch.Generator().manual_seed(2)
    return UpdateBatch(
        sequences=sequences,
        mask=like.with_values(torch.ones(count, dtype=torch.uint8)),
        old_logprobs=like.with_values(torch.full((count,), -5.0)),
        advantages=like.with_values(torch.randn(count, generator=generator)),
        ref_logprobs=None,
        group_ids=torch.arange(like.rows) // 8,
        row_seeds=torch.arange(like.rows),
    )


OBJECTIVE = Objective(
    policy_loss=partial(ppo_clip, clip_low=0.2, clip_high=0.2, dual_clip=None),
    aggregation=lambda mask, offsets: AGGREGATIONS["token-mean"].function(mask, offsets, 2_000),
    temperature=1.0,
)


def step(trainer: Trainer, batch: UpdateBatch) -> dict[str, float]:
    batching = Batching(epochs=1, mini_batch_groups=None, max_tokens=MAX_TOKENS, seed=0, max_skipped=0)
    (done,) = trainer.update(batch, OBJECTIVE, batching)
    return dict(done.values)


def eights(sequences: Sequences, max_tokens: int, layout: str, ranks: int, rows: Tensor) -> list[list[Tensor]]:
    """Takes the place of ``plan_sequences``: shuffled rows, 8 at a time."""
    return [list(rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(3))].split(8))]


def seconds(call: Callable[[], object]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter() if torch.cuda.is_available() else time.process_time()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter() - began
    return time.process_time() - began


def update() -> None:
    lengths, vocabulary = long_tailed(), 4_096
    batch = make_batch(rows(lengths, vocabulary))
    tokens = int((lengths + PROMPT).sum())
    print(f"update: {ROWS} rows, {tokens:,} tokens, median {int(lengths.median())}, longest {int(lengths.max())}:")
    ours, padded = make(SMALL, vocabulary, "auto"), make(SMALL, vocabulary, "padded")
    found: dict[str, list[float]] = {"packed": [], "sorted": [], "eights": []}
    values = {}
    for _ in range(ROUNDS):
        found["packed"].append(seconds(lambda: values.update(packed=step(ours, batch))))
        found["sorted"].append(seconds(lambda: values.update(sorted=step(padded, batch))))
        trainer_module.plan_sequences = eights  # type: ignore[assignment]
        try:
            found["eights"].append(seconds(lambda: values.update(eights=step(padded, batch))))
        finally:
            trainer_module.plan_sequences = plan_sequences
    base = statistics.median(found["eights"])
    for name, label in (("packed", ours.layout), ("sorted", "padded, sorted by length"), ("eights", "padded, by 8")):
        taken = statistics.median(found[name])
        print(
            f"  {label}: {taken:.2f} s, {tokens / taken:,.0f} tokens/s, padding "
            f"{values[name]['padded_fraction']:.1%}: {base / taken:.2f}x as fast as padded by 8",
            flush=True,
        )


def shared() -> None:
    """Prompts as long as those of word problems, and as those of questions about a page."""
    vocabulary = 4_096
    trainer = make(SMALL, vocabulary, "auto")
    for prompt, count in ((100, 128), (1_000, 64)):
        prompts = rows(torch.full((count // 8,), prompt), vocabulary).responses
        responses = rows(long_tailed()[:count], vocabulary)
        together = replace(responses, prompts=prompts, prompt_of=torch.arange(count) // 8)
        apart = replace(together, prompts=prompts.gather(together.prompt_rows), prompt_of=None)
        batches = {"together": make_batch(together), "apart": make_batch(apart)}
        tokens = {name: int(step(trainer, each)["model_tokens"]) for name, each in batches.items()}
        rounds = [
            {name: seconds(partial(step, trainer, each)) for name, each in batches.items()} for _ in range(ROUNDS)
        ]
        taken = {name: statistics.median(each[name] for each in rounds) for name in batches}
        print(
            f"{count} rows, prompts of {prompt} tokens for 8 each: {taken['together']:.2f} s, {tokens['together']:,} "
            f"tokens; with a prompt for each row {taken['apart']:.2f} s, {tokens['apart']:,} tokens: "
            f"{taken['apart'] / taken['together']:.2f}x as fast",
            flush=True,
        )


def scoring() -> None:
    lengths, vocabulary = long_tailed(), 4_096
    sequences = rows(lengths, vocabulary)
    trainer = make(SMALL, vocabulary, "auto")
    model = trainer.model
    batches = [
        micro_batch(sequences, each, trainer.layout).to(trainer.world.device)
        for each in plan(lengths + PROMPT, MAX_TOKENS, trainer.layout)[0]
    ]

    @torch.no_grad()
    def bare(whole: bool) -> None:
        for batch in batches:
            hidden = model.base_model(**batch.model_inputs()).last_hidden_state.flatten(0, 1)
            for part in hidden[batch.predicts].split(1_024) if whole else ():
                (part @ model.get_output_embeddings().weight.T).logsumexp(-1)

    calls = {
        "backbone": lambda: bare(False),
        "bare": lambda: bare(True),
        "old": lambda: trainer.logprobs(sequences, 1.0),
        "ref": lambda: trainer.ref_logprobs(sequences, 1.0),
    }
    rounds = [{name: seconds(call) for name, call in calls.items()} for _ in range(ROUNDS + 1)][1:]
    backbone, plain, old, ref = (statistics.median(each[name] for each in rounds) for name in calls)
    print(
        f"scoring the same rows, vocabulary {vocabulary:,}: bare forward pass {plain:.2f} s (backbone {backbone:.2f})"
    )
    print(f"  old log-probs and entropy {old:.2f} s: {old / plain:.2f}x; reference {ref:.2f} s: {ref / plain:.2f}x")


def mfu() -> None:
    if not torch.cuda.is_available():
        print("model FLOPs utilisation: no GPU here, not measured")
        return
    vocabulary, length, count = 151_936, 2_048, 64
    trainer = make(HALF_BILLION, vocabulary, "auto", torch.bfloat16)
    batch = make_batch(rows(torch.full((count,), length - PROMPT), vocabulary))
    step(trainer, batch)
    values: dict[str, float] = {}
    taken = statistics.median(seconds(lambda: values.update(step(trainer, batch))) for _ in range(ROUNDS))
    name = torch.cuda.get_device_name()
    peak, tflops = peak_tflops(name), values["model_tflop"] / taken
    share = "the device's peak is not known" if peak is None else f"{tflops / peak:.1%} of its peak"
    memory = torch.cuda.max_memory_allocated() / 2**30
    print(
        f"update of a 0.5B model in bfloat16, {count} rows of {length} tokens, {trainer.layout}, on {name}: "
        f"{count * length / taken:,.0f} tokens/s, {tflops:.0f} TFLOP/s, {share}; peak memory {memory:.1f} GiB"
    )


PARTS = {"update": update, "shared": shared, "scoring": scoring, "mfu": mfu}


def trainer() -> None:
    for part in PARTS.values():
        part()


if __name__ == "__main__":
    torch.set_num_threads(1)
    for chosen in sys.argv[1:] or PARTS:
        PARTS[chosen]()
