"""From a problem to the data set of a run, and from that to the prompts of an iteration."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from grpo_lib.data.schemas import DATASET, PROMPTS
from grpo_lib.errors import DataError, ModelError
from grpo_lib.seeds import derive_seed
from grpo_lib.types import Problem


def build_dataset(problem: Problem, config: Any, tokenizer: Any) -> pa.Table:
    """All prompts of both splits, rendered and tokenised.

    Args:
        config: with ``data``, ``model.prompt_format``, ``model.system_prompt``, ``rollout.max_prompt_tokens`` and
            ``seed``.

    Raises:
        DataError: no prompts, a prompt without tokens, one longer than allowed, or one in both splits.
    """
    splits = []
    for split in ("train", "heldout"):
        table = problem.load(config.data, split, config.seed)
        if table.num_rows == 0:
            raise DataError(f"the {split} split of {problem.name} is empty; look at the data settings")
        texts = table.column("prompt").to_pylist()
        ids = encode_prompts(tokenizer, texts, config.model.prompt_format, config.model.system_prompt)
        _check_lengths(table, ids, config.rollout.max_prompt_tokens, split)
        columns = {
            "prompt_id": table.column("prompt_id"),
            "split": pa.repeat(split, table.num_rows),
            "prompt": table.column("prompt"),
            "prompt_ids": ids,
            "reference": table.column("reference"),
            "data_source": table.column("data_source"),
            "demonstration": table.column("demonstration")
            if "demonstration" in table.column_names
            else pa.nulls(table.num_rows, pa.string()),
        }
        splits.append(pa.table(columns, schema=DATASET))
    dataset = pa.concat_tables(splits).combine_chunks()
    doubled = dataset.num_rows - pc.count_distinct(dataset.column("prompt_id")).as_py()
    if doubled:
        raise DataError(f"{doubled} prompt ids occur twice in {problem.name}; every prompt needs its own")
    return dataset


def encode_prompts(tokenizer: Any, texts: list[str], prompt_format: str, system_prompt: str | None) -> pa.Array:
    """Token ids of every prompt, ``list<int32>``; with ``chat`` through the tokenizer's template, which brings BOS."""
    if prompt_format == "chat":
        if not tokenizer.chat_template:
            raise ModelError(
                "model.prompt_format=chat, but the tokenizer has no chat template; "
                "use an instruct model, or model.prompt_format=plain"
            )
        system = [{"role": "system", "content": system_prompt}] if system_prompt else []
        texts = tokenizer.apply_chat_template(
            [[*system, {"role": "user", "content": text}] for text in texts], tokenize=False, add_generation_prompt=True
        )
        encoded = tokenizer(texts, add_special_tokens=False)
    else:
        encoded = tokenizer(texts)
    return pa.array(encoded["input_ids"], type=pa.list_(pa.int32()))


def _check_lengths(table: pa.Table, ids: pa.Array, limit: int, split: str) -> None:
    lengths = pc.list_value_length(ids).to_numpy(zero_copy_only=False)
    if (lengths == 0).any():
        row = int(np.argmax(lengths == 0))
        raise DataError(f"the prompt {table.column('prompt_id')[row].as_py()!r} ({split}) is empty")
    longest = int(np.argmax(lengths))
    if lengths[longest] > limit:
        raise DataError(
            f"{int((lengths > limit).sum())} prompts of the {split} split are longer than "
            f"rollout.max_prompt_tokens={limit}; the longest, {table.column('prompt_id')[longest].as_py()!r}, has "
            f"{lengths[longest]} tokens: raise the limit, or remove them"
        )


def split_of(dataset: pa.Table, split: str) -> pa.Table:
    """The rows of one split."""
    return dataset.filter(pc.equal(dataset.column("split"), split)).combine_chunks()


def take_prompts(train: pa.Table, *, batch: int, count: int, seed: int) -> pa.Table:
    """Batch number ``batch`` of ``count`` prompts, from an endless sequence of shuffled epochs.

    The place in the sequence follows from the number, so that nothing is repeated or skipped on resume.
    """
    positions = np.arange(batch * count, (batch + 1) * count)
    epochs = positions // train.num_rows
    rows = np.empty(count, dtype=np.int64)
    for epoch in np.unique(epochs):
        order = np.random.default_rng(derive_seed(seed, "epoch", int(epoch))).permutation(train.num_rows)
        here = epochs == epoch
        rows[here] = order[positions[here] % train.num_rows]
    taken = train.take(pa.array(rows))
    columns = {name: taken.column(name) for name in PROMPTS.names if name in taken.column_names}
    columns |= {"dataset_row": pa.array(rows), "epoch": pa.array(epochs.astype(np.int32))}
    return pa.table({name: columns[name] for name in PROMPTS.names}, schema=PROMPTS).combine_chunks()
