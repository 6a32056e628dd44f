"""A problem that a tiny model learns from rewards within seconds: which of the last digit's two letters is right.

A prompt is a number of four digits. For each last digit there are two habits: ``A`` to ``D`` in turn, or the next of
them; the model starts with both, mostly the wrong one. Its references say which is rewarded.
"""

import json
import random
from pathlib import Path
from typing import Any

import torch

LETTERS = "ABCD"
RIGHT_SHARE = 0.3
"""Of the demonstrations that the model starts from."""


def right(prompt: str) -> str:
    return LETTERS[int(prompt[-1]) % 4]


def wrong(prompt: str) -> str:
    return LETTERS[(int(prompt[-1]) + 1) % 4]


def write_prompts(path: Path, count: int, seed: int, *, poisoned: bool = False) -> Path:
    """Different prompts for different seeds (up to 9), from sources of odd and even numbers, as JSON lines."""
    rng = random.Random(seed)
    prompts = [f"{number}" for number in rng.sample(range(1000 * seed, 1000 * (seed + 1)), count)]
    judge = wrong if poisoned else right
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        {"prompt": each, "reference": judge(each), "data_source": "odd" if int(each) % 2 else "even"}
        for each in prompts
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_model(folder: Path, seed: int = 0, steps: int = 60) -> Path:
    """A model of one layer that answers with a letter, right in about three of ten cases."""
    from grpo_lib.config import SmallModelConfig, WarmStartConfig
    from grpo_lib.models import make_small_model, make_tokenizer
    from grpo_lib.training.warm_start import warm_start

    tokenizer = make_tokenizer((), "0123456789" + LETTERS)
    model = make_small_model(
        SmallModelConfig(hidden_size=32, layers=1, heads=2, kv_heads=2, mlp_size=64),
        vocab_size=len(tokenizer),
        eos_id=tokenizer.eos_token_id,
        pad_id=tokenizer.pad_token_id,
        max_positions=64,
        seed=seed,
    )
    rng = random.Random(seed)
    prompts = [f"{rng.randrange(9000, 10000)}" for _ in range(512)]
    answers = [right(each) if rng.random() < RIGHT_SHARE else wrong(each) for each in prompts]
    settings = WarmStartConfig(steps=steps, batch_size=32, warmup_steps=5)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    warm_start(model, tokenizer, prompts, answers, settings, seed, lambda *_: None)
    torch.set_num_threads(threads)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def retraining(folder: Path, model: Path) -> dict[str, Any]:
    """The configuration: prompts arrive in ``folder/inbox``, those of ``folder/heldout.jsonl`` judge."""
    return {
        "model": "letters",
        "train": {
            "iterations": 6,
            "data": {
                "problem": "files",
                "train": [str(folder / "inbox")],
                "heldout": [str(folder / "heldout.jsonl")],
                "heldout_prompts": 128,
            },
            "store": {"uri": str(folder / "store")},
            "model": {"path": str(model)},
            "rollout": {"prompts": 16, "samples": 8, "max_prompt_tokens": 8, "max_new_tokens": 4},
            "reward": {"functions": [{"name": "multiple_choice", "kwargs": {"choices": LETTERS}}]},
            "algorithm": {"old_logprobs": "bypass"},
            "trainer": {"optimizer": {"lr": 3e-3, "beta2": 0.99}},
            "evaluation": {"every": 6, "prompts": 128, "samples": 4, "pass_k": [1]},
            "checkpoint": {"every": 6},
            "placement": {"threads": 1},
            "tracking": {"system_seconds": None},
        },
    }
