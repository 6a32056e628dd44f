"""From a problem to the data set of a run, and from that to the prompts of an iteration."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from grpo_lib.data.schemas import DATASET, PROMPT_EXTRAS, PROMPTS
from grpo_lib.errors import DataError, ModelError
from grpo_lib.seeds import derive_seed
from grpo_lib.types import Problem


def build_dataset(problem: Problem, config: Any, tokenizer: Any) -> tuple[pa.Table, dict[str, int]]:
    """All prompts of both splits, rendered and tokenised, and how many of each were too long.

    Args:
        config: with ``data``, ``model.prompt_format``, ``model.system_prompt``, ``rollout.max_prompt_tokens``,
            ``rollout.long_prompts`` and ``seed``.

    Raises:
        DataError: no prompts, a prompt without tokens, one longer than allowed, or one in both splits.
    """
    splits, long = [], {}
    for split in ("train", "heldout"):
        table = problem.load(config.data, split, config.seed)
        if table.num_rows == 0:
            raise DataError(f"the {split} split of {problem.name} is empty; look at the data settings")
        ids = encode_prompts(tokenizer, conversations(table), config.model.prompt_format, config.model.system_prompt)
        table, ids, count = _within(table, ids, config.rollout.max_prompt_tokens, config.rollout.long_prompts, split)
        long[f"{split}_long_prompts"] = count
        splits.append(_dataset(table, split, ids))
    dataset = pa.concat_tables(splits).combine_chunks()
    doubled = dataset.num_rows - pc.count_distinct(dataset.column("prompt_id")).as_py()
    if doubled:
        raise DataError(f"{doubled} prompt ids occur twice in {problem.name}; every prompt needs its own")
    return dataset, long


def stand_in(table: pa.Table, split: str) -> pa.Table:
    """A split as the data set will have it, before there is a tokenizer: with a token 0 for each word of a prompt."""
    words = [[0] * len(prompt.split()) for prompt in table.column("prompt").to_pylist()]
    return _dataset(table, split, pa.array(words, type=pa.list_(pa.int32())))


def _dataset(table: pa.Table, split: str, ids: pa.Array) -> pa.Table:
    """A problem's rows in the schema of data sets."""
    columns = {
        "prompt_id": table.column("prompt_id"),
        "split": pa.repeat(split, table.num_rows),
        "prompt": table.column("prompt"),
        "prompt_ids": ids,
        "reference": table.column("reference"),
        "data_source": table.column("data_source"),
    }
    for name in ("demonstration", "metadata"):
        there = name in table.column_names
        columns[name] = table.column(name) if there else pa.nulls(table.num_rows, pa.string())
    return pa.table(columns, schema=DATASET)


def conversations(table: pa.Table) -> list[str | list[dict[str, str]]]:
    """Every prompt as text, or as chat messages where the data set brings them."""
    texts = table.column("prompt").to_pylist()
    if "messages" not in table.column_names:
        return texts
    messages = table.column("messages").to_pylist()
    return [text if each is None else json.loads(each) for text, each in zip(texts, messages, strict=True)]


def encode_prompts(
    tokenizer: Any, prompts: Sequence[str | list[dict[str, str]]], prompt_format: str, system_prompt: str | None
) -> pa.Array:
    """Token ids of every prompt, ``list<int32>``; with ``chat`` through the tokenizer's template, which brings BOS.

    A prompt that brings a BOS of its own does not get a second one. Messages that begin with a system message keep it.
    """
    if prompt_format == "chat":
        if not tokenizer.chat_template:
            raise ModelError(
                "model.prompt_format=chat, but the tokenizer has no chat template; "
                "use an instruct model, or model.prompt_format=plain"
            )
        system = [{"role": "system", "content": system_prompt}] if system_prompt else []
        chats = [[{"role": "user", "content": each}] if isinstance(each, str) else each for each in prompts]
        chats = [each if each[0]["role"] == "system" else [*system, *each] for each in chats]
        texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
        encoded = tokenizer(texts, add_special_tokens=False)
    else:
        if not all(isinstance(each, str) for each in prompts):
            raise ModelError("the prompts are chat messages; set model.prompt_format=chat, with an instruct model")
        encoded = tokenizer(list(prompts))
    bos = tokenizer.bos_token_id
    rows = [ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids for ids in encoded["input_ids"]]
    return pa.array(rows, type=pa.list_(pa.int32()))


def _within(
    table: pa.Table, ids: pa.Array, limit: int, long_prompts: str, split: str
) -> tuple[pa.Table, pa.Array, int]:
    """Prompts and their ids after long ones were treated as asked, and how many those were."""
    lengths = pc.list_value_length(ids).to_numpy(zero_copy_only=False)
    if (lengths == 0).any():
        row = int(np.argmax(lengths == 0))
        raise DataError(f"the prompt {table.column('prompt_id')[row].as_py()!r} ({split}) is empty")
    long = lengths > limit
    count, longest = int(long.sum()), int(np.argmax(lengths))
    if count == 0:
        return table, ids, 0
    if long_prompts == "refuse":
        raise DataError(
            f"{count} prompts of the {split} split are longer than "
            f"rollout.max_prompt_tokens={limit}; the longest, {table.column('prompt_id')[longest].as_py()!r}, has "
            f"{lengths[longest]} tokens: raise the limit, remove them, or set rollout.long_prompts to drop or cut them"
        )
    if long_prompts == "drop":
        if count == table.num_rows:
            raise DataError(
                f"all {count} prompts of the {split} split are longer than rollout.max_prompt_tokens={limit}; raise it"
            )
        kept = pa.array(~long)
        return table.filter(kept), ids.filter(kept), count
    cut = slice(-limit, None) if long_prompts == "truncate_left" else slice(limit)
    return table, pa.array([row[cut] for row in ids.to_pylist()], type=ids.type), count


def split_of(dataset: pa.Table, split: str) -> pa.Table:
    """The rows of one split."""
    return dataset.filter(pc.equal(dataset.column("split"), split)).combine_chunks()


def take_prompts(train: pa.Table, *, first: int, count: int, seed: int) -> pa.Table:
    """``count`` prompts from place ``first`` on, of an endless sequence of shuffled epochs.

    Nothing is repeated or skipped on resume: what comes at a place follows from the place alone.
    """
    positions = np.arange(first, first + count)
    epochs = positions // train.num_rows
    rows = np.empty(count, dtype=np.int64)
    for epoch in np.unique(epochs):
        order = np.random.default_rng(derive_seed(seed, "epoch", int(epoch))).permutation(train.num_rows)
        here = epochs == epoch
        rows[here] = order[positions[here] % train.num_rows]
    return take_rows(train, rows, epochs)


def take_rows(train: pa.Table, rows: NDArray[np.int64], epochs: NDArray[np.int64] | None = None) -> pa.Table:
    """The prompts of an iteration; ``epochs`` where they were taken in turn."""
    taken = train.take(pa.array(rows))
    columns = {name: taken.column(name) for name in PROMPTS.names if name in taken.column_names}
    epoch = pa.nulls(len(rows), pa.int32()) if epochs is None else pa.array(epochs.astype(np.int32))
    columns |= {"dataset_row": pa.array(rows), "epoch": epoch}
    return pa.table({name: columns[name] for name in PROMPTS.names}, schema=PROMPTS).combine_chunks()


def carry_on(fresh: pa.Table, earlier: pa.Table, rows: NDArray[np.int64]) -> pa.Table:
    """Prompts whose rollouts go on, then fresh ones, as many as ``fresh`` has in all.

    Args:
        earlier: prompts of the iteration before.
        rows: those of them that go on.
    """
    schema = pa.schema([*PROMPTS, *PROMPT_EXTRAS])
    taken = earlier.select(PROMPTS.names).take(pa.array(rows))
    nothing = pa.nulls(fresh.num_rows - len(rows), pa.int32())
    parts = [
        taken.append_column(PROMPT_EXTRAS.field(0), pa.array(rows, pa.int32())),
        fresh.slice(0, len(nothing)).append_column(PROMPT_EXTRAS.field(0), nothing),
    ]
    return pa.concat_tables([part.cast(schema) for part in parts]).combine_chunks()
