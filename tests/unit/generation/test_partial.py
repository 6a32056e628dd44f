"""Rollouts that are cut by a budget and go on."""

from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from grpo_lib.config import SmallModelConfig
from grpo_lib.data.columns import ragged_column
from grpo_lib.data.ragged import Ragged
from grpo_lib.data.schemas import TOKENS
from grpo_lib.generation.base import Budget, Sampling
from grpo_lib.generation.local import LocalEngine
from grpo_lib.generation.rollouts import generate_rollouts
from grpo_lib.models import make_small_model, make_tokenizer

ALPHABET = "abcdefghij"
SAMPLES, LONGEST = 2, 12
SAMPLING = Sampling(temperature=0.7, max_new_tokens=LONGEST)
PROMPTS = [[2, 3], [4], [5, 6, 7], [8]]


@pytest.fixture
def tokenizer() -> Any:
    return make_tokenizer([], ALPHABET)


def make_model(seed: int) -> Any:
    shape = SmallModelConfig(
        hidden_size=16, layers=1, heads=2, kv_heads=1, head_dim=8, mlp_size=16, initializer_range=0.3
    )
    return make_small_model(shape, len(ALPHABET) + 2, eos_id=1, pad_id=0, max_positions=64, seed=seed)


def rollouts(
    tokenizer: Any, prompts: pa.Table, version: int, tokens: int, earlier: pa.Table | None = None, batch: int = 3
) -> pa.Table:
    engine = LocalEngine(make_model(version), eos_token_ids=[1], tokenizer=tokenizer, max_batch_rows=batch)
    return generate_rollouts(
        engine,
        prompts,
        tokenizer,
        first_prompt=0,
        samples=SAMPLES,
        sampling=SAMPLING,
        seed=version,
        iteration=version,
        policy_version=version,
        budget=Budget(tokens=tokens),
        earlier=earlier,
    )


def prompt_table(prompts: list[list[int]], carried: list[int | None] | None = None) -> pa.Table:
    columns = {"prompt_ids": pa.array(prompts, TOKENS)}
    return pa.table(columns if carried is None else columns | {"carried_from": pa.array(carried, pa.int32())})


def rows_of(column: Ragged) -> list[list[Any]]:
    return [column.values[start:end].tolist() for start, end in pairwise(column.offsets.tolist())]


@torch.no_grad()
def plain(model: Any, prompt: list[int], response: list[int]) -> list[float]:
    logits = model(input_ids=torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
    return (logits / 0.7).log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0].tolist()


def test_what_was_cut_goes_on_under_the_next_policy_token_by_token(tokenizer: Any) -> None:
    first = rollouts(tokenizer, prompt_table(PROMPTS), 0, tokens=40)
    reasons = first.column("finish_reason").to_pylist()
    going = sorted({row // SAMPLES for row, reason in enumerate(reasons) if reason == "unfinished"})
    assert 0 < len(going) < len(PROMPTS), reasons
    assert first.column("failure").to_pylist() == ["unfinished" if each == "unfinished" else None for each in reasons]
    fresh = [[9, 2], [3, 3, 3]]
    prompts = [PROMPTS[row] for row in going] + fresh
    second = rollouts(tokenizer, prompt_table(prompts, [*going, None, None]), 1, tokens=10_000, earlier=first)
    names = ("response_ids", "rollout_logprobs", "token_versions")
    old, new = ({name: rows_of(ragged_column(table, name)) for name in names} for table in (first, second))
    for at, source in enumerate(going):
        for sample in range(SAMPLES):
            mine, theirs = at * SAMPLES + sample, source * SAMPLES + sample
            begun = len(old["response_ids"][theirs])
            for name in names:
                assert new[name][mine][:begun] == old[name][theirs], name
            if reasons[theirs] != "unfinished":
                assert len(new["response_ids"][mine]) == begun
    for row, (ids, logprobs, versions) in enumerate(zip(*(new[name] for name in names), strict=True)):
        assert 0 < len(ids) <= LONGEST and versions == sorted(versions)
        expected = [plain(make_model(version), prompts[row // SAMPLES], ids) for version in (0, 1)]
        picked = [expected[version][place] for place, version in enumerate(versions)]
        np.testing.assert_allclose(logprobs, picked, atol=1e-5)
    assert set(second.column("finish_reason").to_pylist()) <= {"stop", "length"}
    assert second.column("policy_version").to_pylist() == [min(versions) for versions in new["token_versions"]]


def test_rows_that_were_not_begun_are_empty_and_go_on_as_fresh_ones(tokenizer: Any) -> None:
    first = rollouts(tokenizer, prompt_table(PROMPTS), 0, tokens=1, batch=2)
    lengths = [len(ids) for ids in first.column("response_ids").to_pylist()]
    assert 0 in lengths
    second = rollouts(tokenizer, prompt_table(PROMPTS, [0, 1, 2, 3]), 1, tokens=10_000, earlier=first)
    assert min(len(ids) for ids in second.column("response_ids").to_pylist()) > 0
    assert "unfinished" not in second.column("finish_reason").to_pylist()
