import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lib.data.prompts import build_dataset, carry_on, encode_prompts, split_of, take_prompts
from grpo_lib.data.schemas import DATASET, PROMPTS
from grpo_lib.errors import DataError, ModelError
from grpo_lib.models import make_tokenizer
from grpo_lib.types import Problem

FEW = settings(deadline=None, max_examples=30)
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def problem_table(rows: list[tuple[str, str]], **more: list[str | None]) -> pa.Table:
    columns: dict[str, Any] = {
        "prompt_id": [name for name, _ in rows],
        "prompt": [text for _, text in rows],
        "reference": [f"answer {name}" for name, _ in rows],
        "data_source": ["toy"] * len(rows),
    }
    return pa.table(columns | more, schema=None if rows else pa.schema(dict.fromkeys(columns, pa.string())))


def toy(train: pa.Table, heldout: pa.Table) -> Problem:
    tables = {"train": train, "heldout": heldout}
    return Problem(
        name="toy", load=lambda options, split, seed: tables[split], make_reward=lambda *_: lambda sample: 0.0
    )


def settings_of(limit: int = 8, prompt_format: str = "plain", system: str | None = None, long: str = "refuse") -> Any:
    return SimpleNamespace(
        data=None,
        seed=0,
        model=SimpleNamespace(prompt_format=prompt_format, system_prompt=system),
        rollout=SimpleNamespace(max_prompt_tokens=limit, long_prompts=long),
    )


@pytest.fixture
def tokenizer() -> Any:
    return make_tokenizer([], "abcdefghijklmnopqrstuvwxyz<>? ")


def train_table(rows: int) -> pa.Table:
    columns = {
        "prompt_id": [f"p{row}" for row in range(rows)],
        "split": ["train"] * rows,
        "prompt": [f"text {row}" for row in range(rows)],
        "prompt_ids": [[row, row + 1] for row in range(rows)],
        "reference": [str(row) for row in range(rows)],
        "data_source": ["toy"] * rows,
        "metadata": [None] * rows,
        "demonstration": [None] * rows,
    }
    return pa.table(columns, schema=DATASET)


def taken(rows: int, batches: range, count: int, seed: int = 0) -> list[int]:
    table = train_table(rows)
    parts = [take_prompts(table, first=k * count, count=count, seed=seed) for k in batches]
    return [row for part in parts for row in part.column("dataset_row").to_pylist()]


@FEW
@given(rows=st.integers(1, 12), count=st.integers(1, 15), seed=st.integers(0, 99))
def test_an_epoch_takes_every_prompt_exactly_once(rows: int, count: int, seed: int) -> None:
    sequence = taken(rows, range(3 * rows), count, seed)
    for start in range(0, len(sequence) - rows + 1, rows):
        assert sorted(sequence[start : start + rows]) == list(range(rows))


def test_every_epoch_has_an_order_of_its_own() -> None:
    sequence = taken(20, range(3), 20)
    orders = {tuple(sequence[start : start + 20]) for start in (0, 20, 40)}
    assert len(orders) == 3 and tuple(range(20)) not in orders


def test_a_batch_that_crosses_the_end_of_an_epoch_says_so_row_by_row() -> None:
    batch = take_prompts(train_table(5), first=3, count=3, seed=0)
    assert batch.column("epoch").to_pylist() == [0, 0, 1]
    sequence = taken(5, range(4), 3)
    assert batch.column("dataset_row").to_pylist() == sequence[3:6]
    assert sorted(sequence[:5]) == sorted(sequence[5:10]) == [0, 1, 2, 3, 4]


def test_a_batch_may_be_longer_than_an_epoch() -> None:
    batch = take_prompts(train_table(2), first=0, count=5, seed=0)
    assert batch.column("epoch").to_pylist() == [0, 0, 1, 1, 2]


def test_the_prompts_of_a_batch_follow_from_its_number_and_the_seed_alone() -> None:
    table = train_table(30)
    later = take_prompts(table, first=32, count=8, seed=3)
    for batch in range(4):
        take_prompts(table, first=8 * batch, count=8, seed=3)
    assert take_prompts(table, first=32, count=8, seed=3).equals(later)
    assert not take_prompts(table, first=32, count=8, seed=4).equals(later)


def test_a_batch_holds_the_columns_of_its_dataset_rows() -> None:
    batch = take_prompts(train_table(9), first=8, count=4, seed=1)
    assert batch.schema == PROMPTS
    for row in batch.to_pylist():
        number = row["dataset_row"]
        assert (row["prompt_id"], row["prompt"], row["reference"]) == (f"p{number}", f"text {number}", str(number))
        assert row["prompt_ids"] == [number, number + 1]


def test_a_dataset_holds_both_splits_tokenised(tokenizer: Any) -> None:
    heldout = problem_table([("h0", "c")], demonstration=["because"])
    dataset, _ = build_dataset(toy(problem_table([("t0", "ab"), ("t1", "ba?")]), heldout), settings_of(), tokenizer)
    assert dataset.schema == DATASET
    ids = dict(zip("abc?", tokenizer.convert_tokens_to_ids(list("abc?")), strict=True))
    assert dataset.column("prompt_ids").to_pylist() == [
        [ids["a"], ids["b"]],
        [ids["b"], ids["a"], ids["?"]],
        [ids["c"]],
    ]
    assert dataset.column("split").to_pylist() == ["train", "train", "heldout"]
    assert dataset.column("demonstration").to_pylist() == [None, None, "because"]
    assert dataset.column("reference").to_pylist() == ["answer t0", "answer t1", "answer h0"]
    assert split_of(dataset, "heldout").column("prompt_id").to_pylist() == ["h0"]
    assert split_of(dataset, "train").num_rows == 2


def test_a_prompt_that_is_too_long_is_named_with_its_length_and_the_limit(tokenizer: Any) -> None:
    train = problem_table([("t0", "ab"), ("t1", "abcdef"), ("t2", "abcde")])
    with pytest.raises(DataError) as caught:
        build_dataset(toy(train, problem_table([("h0", "a")])), settings_of(limit=4), tokenizer)
    message = str(caught.value)
    assert "2 prompts of the train split are longer than rollout.max_prompt_tokens=4" in message
    assert "'t1', has 6 tokens" in message


@pytest.mark.parametrize(
    ("long", "expected"),
    [
        ("drop", {"t0": "ab", "h0": "a"}),
        ("truncate_left", {"t0": "ab", "t1": "cdef", "h0": "a"}),
        ("truncate_right", {"t0": "ab", "t1": "abcd", "h0": "a"}),
    ],
)
def test_long_prompts_are_dropped_or_cut_as_configured_and_counted(
    tokenizer: Any, long: str, expected: dict[str, str]
) -> None:
    problem = toy(problem_table([("t0", "ab"), ("t1", "abcdef")]), problem_table([("h0", "a")]))
    dataset, counts = build_dataset(problem, settings_of(limit=4, long=long), tokenizer)
    texts = [tokenizer.decode(ids) for ids in dataset.column("prompt_ids").to_pylist()]
    assert dict(zip(dataset.column("prompt_id").to_pylist(), texts, strict=True)) == expected
    assert counts == {"train_long_prompts": 1, "heldout_long_prompts": 0}


def test_a_split_of_long_prompts_only_is_not_dropped_silently(tokenizer: Any) -> None:
    problem = toy(problem_table([("t0", "abcde")]), problem_table([("h0", "a")]))
    with pytest.raises(DataError, match=r"all 1 prompts of the train split.*max_prompt_tokens=4; raise it"):
        build_dataset(problem, settings_of(limit=4, long="drop"), tokenizer)


def test_bos_is_never_doubled(tokenizer: Any) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer.add_special_tokens({"bos_token": "<"})
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="< $A", special_tokens=[("<", bos)])
    tokenizer.split_special_tokens = False
    a, b = tokenizer.convert_tokens_to_ids(["a", "b"])
    assert encode_prompts(tokenizer, ["ab", "<ab"], "plain", None).to_pylist() == [[bos, a, b], [bos, a, b]]
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    assert encode_prompts(tokenizer, ["ab"], "chat", None).to_pylist() == [[bos, a, b]]


def test_prompts_that_go_on_come_before_fresh_ones() -> None:
    train = train_table(9)
    earlier, fresh = (take_prompts(train, first=first, count=4, seed=1) for first in (0, 4))
    together = carry_on(fresh, earlier, np.array([1, 3]))
    ids, before, after = (each.column("prompt_id").to_pylist() for each in (together, earlier, fresh))
    assert ids == [before[1], before[3], after[0], after[1]]
    assert together.column("carried_from").to_pylist() == [1, 3, None, None]
    again = carry_on(fresh, together, np.array([0]))
    assert again.column("carried_from").to_pylist() == [0, None, None, None]
    assert again.column("prompt_ids").to_pylist()[0] == earlier.column("prompt_ids").to_pylist()[1]


def test_a_prompt_of_just_the_limit_is_taken(tokenizer: Any) -> None:
    problem = toy(problem_table([("t0", "abcd")]), problem_table([("h0", "a")]))
    assert build_dataset(problem, settings_of(limit=4), tokenizer)[0].num_rows == 2


def test_a_prompt_without_tokens_is_named(tokenizer: Any) -> None:
    heldout = problem_table([("h0", "a"), ("h1", "")])
    with pytest.raises(DataError, match=r"the prompt 'h1' \(heldout\) is empty"):
        build_dataset(toy(problem_table([("t0", "ab")]), heldout), settings_of(), tokenizer)


def test_a_prompt_id_of_both_splits_is_refused(tokenizer: Any) -> None:
    problem = toy(problem_table([("same", "ab"), ("t1", "b")]), problem_table([("same", "a")]))
    with pytest.raises(DataError, match="1 prompt ids occur twice in toy"):
        build_dataset(problem, settings_of(), tokenizer)


def test_an_empty_split_is_refused(tokenizer: Any) -> None:
    with pytest.raises(DataError, match="the heldout split of toy is empty"):
        build_dataset(toy(problem_table([("t0", "ab")]), problem_table([])), settings_of(), tokenizer)


def test_chat_without_a_template_names_the_remedy(tokenizer: Any) -> None:
    problem = toy(problem_table([("t0", "ab")]), problem_table([("h0", "a")]))
    with pytest.raises(ModelError, match=r"no chat template; use an instruct model, or model\.prompt_format=plain"):
        build_dataset(problem, settings_of(prompt_format="chat"), tokenizer)


@pytest.mark.parametrize(("system", "expected"), [(None, "<user>ab?<a>"), ("be brief", "<system>be brief<user>ab?<a>")])
def test_chat_goes_through_the_template(tokenizer: Any, system: str | None, expected: str) -> None:
    tokenizer.chat_template = TEMPLATE
    ids = encode_prompts(tokenizer, ["ab?"], "chat", system).to_pylist()
    assert tokenizer.decode(ids[0]) == expected


def test_prompts_in_chat_format_keep_the_text_of_the_problem(tokenizer: Any) -> None:
    tokenizer.chat_template = TEMPLATE
    problem = toy(problem_table([("t0", "ab")]), problem_table([("h0", "a")]))
    dataset, _ = build_dataset(problem, settings_of(limit=20, prompt_format="chat"), tokenizer)
    assert dataset.column("prompt").to_pylist() == ["ab", "a"]
    assert [tokenizer.decode(ids) for ids in dataset.column("prompt_ids").to_pylist()] == ["<user>ab<a>", "<user>a<a>"]


def test_messages_of_the_data_go_through_the_template_and_keep_their_system_message(tokenizer: Any) -> None:
    tokenizer.chat_template = TEMPLATE
    own = json.dumps([{"role": "system", "content": "x"}, {"role": "user", "content": "ab"}])
    plain = json.dumps([{"role": "user", "content": "c"}])
    train = problem_table([("t0", "x ab"), ("t1", "c"), ("t2", "d")], messages=[own, plain, None])
    problem = toy(train, problem_table([("h0", "a")]))
    dataset, _ = build_dataset(problem, settings_of(limit=60, prompt_format="chat", system="s"), tokenizer)
    assert [tokenizer.decode(ids) for ids in dataset.column("prompt_ids").to_pylist()] == [
        "<system>x<user>ab<a>",
        "<system>s<user>c<a>",
        "<system>s<user>d<a>",
        "<system>s<user>a<a>",
    ]
    with pytest.raises(ModelError, match=r"the prompts are chat messages; set model\.prompt_format=chat"):
        build_dataset(problem, settings_of(limit=60), tokenizer)
