"""GRPO by TRL's trainer, in an environment of its own: `python trl_side.py ASKED.json` writes ASKED.result.json.

Rewards are the project's own function, so that both sides judge alike.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from grpo_lib.config_data import CountdownData
from grpo_lib.config_reward import RewardConfig
from grpo_lib.problems import get_problem
from grpo_lib.types import Sample


class Ends(TrainerCallback):
    """When each step ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.times.append(time.time())


def sample(prompt: str, response: str, reference: str, ids: list[int]) -> Sample:
    return Sample(
        prompt=prompt, response=response, reference=reference, data_source="countdown", response_tokens=len(ids),
        finish_reason="stop",
    )  # fmt: skip


def main(path: Path) -> None:
    asked = json.loads(path.read_text())
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("medium")
    judge = get_problem("countdown").make_reward(CountdownData(), RewardConfig())
    tokens: list[int] = []

    def countdown(
        prompts: list[str], completions: list[str], completion_ids: list[list[int]], reference: list[str], **_: Any
    ) -> list[float]:
        tokens.append(sum(map(len, completion_ids)))
        return [judge(sample(*row)).value for row in zip(prompts, completions, reference, completion_ids, strict=True)]

    ends = Ends()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(
            asked["model"], dtype=torch.float32, attn_implementation=asked["attention"]
        ),
        processing_class=AutoTokenizer.from_pretrained(asked["model"], padding_side="left"),
        reward_funcs=countdown,
        train_dataset=Dataset.from_list(json.loads(Path(asked["prompts"]).read_text())),
        args=GRPOConfig(
            output_dir=asked["folder"],
            seed=asked["seed"],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to=[],
            logging_steps=asked["settings"]["max_steps"],
            disable_tqdm=True,
            **asked["settings"],
        ),
        callbacks=[ends],
    )
    trainer.train()
    trainer.save_model(asked["folder"])
    path.with_suffix(".result.json").write_text(json.dumps({"ends": ends.times, "tokens": tokens}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
