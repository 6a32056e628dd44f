"""Of a model folder on held-out puzzles: `python accuracy.py FOLDER NEW_TOKENS` prints `[greedy, sampled]`.

One evaluation for both sides; sampled is at temperature 1.
"""

import json
import sys
from itertools import chain

import torch

from grpo_lib.config_data import CountdownData
from grpo_lib.config_reward import RewardConfig
from grpo_lib.data.ragged import Ragged, lengths_to_offsets
from grpo_lib.generation.base import Request, Sampling
from grpo_lib.generation.local import LocalEngine
from grpo_lib.models import load_model, load_tokenizer
from grpo_lib.problems import get_problem
from grpo_lib.seeds import row_seeds
from grpo_lib.types import RewardResult, Sample
from tests.benchmarks.peers.cases import SEED

HELD_OUT = 512


def main(folder: str, new_tokens: int) -> None:
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(folder)
    engine = LocalEngine(
        load_model(folder, torch.float32, "cpu"), eos_token_ids=[tokenizer.eos_token_id], tokenizer=tokenizer
    )
    problem = get_problem("countdown")
    puzzles = problem.load(CountdownData(), "heldout", SEED).slice(0, HELD_OUT).to_pylist()
    judge = problem.make_reward(CountdownData(), RewardConfig())
    ids = [tokenizer(each["prompt"])["input_ids"] for each in puzzles]
    prompts = Ragged(
        values=torch.tensor(list(chain(*ids))), offsets=lengths_to_offsets(torch.tensor(list(map(len, ids))))
    )
    seeds = torch.from_numpy(row_seeds(SEED, 0, HELD_OUT))
    reached = []
    for temperature in (0.0, 1.0):
        sampling = Sampling(temperature=temperature, max_new_tokens=new_tokens)
        made = engine.generate(Request(prompts=prompts, seeds=seeds, sampling=sampling)).responses
        right = 0.0
        rows = made.values.split(made.lengths.tolist())
        for puzzle, row in zip(puzzles, rows, strict=True):
            text = tokenizer.decode(row, skip_special_tokens=True)
            found = judge(
                Sample(
                    prompt=puzzle["prompt"], response=text, reference=puzzle["reference"], data_source="countdown",
                    response_tokens=len(row), finish_reason="stop",
                )
            )  # fmt: skip
            assert isinstance(found, RewardResult)
            right += found.components["correct"]
        reached.append(right / HELD_OUT)
    print(json.dumps(reached))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
