"""A reward model scores responses, or their steps."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from grpo_lib.algorithms.registry import Option
from grpo_lib.errors import ConfigError
from grpo_lib.rewards.registry import REWARDS
from grpo_lib.types import RewardResult, Sample

if TYPE_CHECKING:  # torch takes seconds, and whoever only looks for a reward function by name needs none
    from torch import Tensor

    from grpo_lib.rewards.classifier import Classifier

AGGREGATES: dict[str, Callable[[Sequence[float]], float]] = {
    "none": lambda scores: 0.0,
    "last": lambda scores: scores[-1],
    "min": min,
    "mean": lambda scores: sum(scores) / len(scores),
    "product": math.prod,
}
"""What the value is, of the scores of steps."""


@REWARDS.register(
    "model",
    use="a trained reward model, of responses or of steps",
    files=["path"],
    modules=["grpo_lib.rewards.classifier"],
)
def model(
    samples: Sequence[Sample],
    *,
    path: Annotated[str, Option(min_length=1, description="Folder that save_pretrained wrote, or a hub name.")],
    kind: Annotated[
        Literal["outcome", "steps"], Option(description="steps: a score for each step, at the step's last token.")
    ] = "outcome",
    label: Annotated[
        int | str | None, Option(description="Of a model with several labels: the one that counts.")
    ] = None,
    activation: Annotated[
        Literal["none", "sigmoid", "softmax"], Option(description="Of the logit; softmax: over the labels.")
    ] = "none",
    system: Annotated[str | None, Option(description="System prompt for its chat template; null: none.")] = None,
    step_separator: Annotated[str, Option(min_length=1, description="What stands between steps.")] = "\n\n",
    step_token: Annotated[
        str | None, Option(description="Token at which the model scores the step before; null: the separator.")
    ] = None,
    aggregate: Annotated[
        Literal["none", "last", "min", "mean", "product"],
        Option(description="Of the steps' scores, as the value beside them; none: 0."),
    ] = "none",
    max_length: Annotated[
        int | None, Option(ge=1, description="Tokens of a row; null: as many as it has positions.")
    ] = None,
    truncate: Annotated[
        bool, Option(description="Longer rows lose their beginning; else they have no reward.")
    ] = False,
    micro_batch_tokens: Annotated[
        int, Option(ge=1, description="Padded tokens that the model reads at a time.")
    ] = 16384,
    device: Annotated[Literal["auto", "cpu", "cuda"], Option(description="auto: a GPU if there is one.")] = "auto",
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], Option(description="auto: bfloat16 on a GPU, else float32.")
    ] = "auto",
) -> list[RewardResult | Exception]:
    """Scores of a sequence classifier (of steps: on every prefix that ends with one), or of a token classifier.

    A row that can't be scored gets the exception that says why; the others are scored.
    """
    from grpo_lib.rewards.classifier import ALONE, load_classifier

    with ALONE:
        scorer = load_classifier(path, dtype, device)
        if kind == "outcome" and scorer.of_tokens:
            raise ConfigError(f"{path!r} scores tokens: set kind=steps")
        column = _column(scorer, label, activation)
        limit = _limit(scorer, max_length)
        marker = _marker(scorer.tokenizer, step_separator, step_token)
        texts = _Texts(scorer.tokenizer, system)
        rows: list[Row] = []
        failed: dict[int, Exception] = {}
        for number, sample in enumerate(samples):
            try:
                if kind == "outcome":
                    mine = [Row(number, texts.conversation(sample, len(sample.response)), [len(sample.response)])]
                else:
                    spans = step_spans(sample.response, step_separator)
                    if not spans:
                        raise ValueError("the response has no step")
                    if scorer.of_tokens:
                        mine = [Row(number, *texts.marked(sample, spans, marker))]
                    else:
                        mine = [Row(number, texts.conversation(sample, end), [end]) for _, end in spans]
                rows += [_fitting(row, limit, truncate) for row in mine]
            except Exception as error:
                failed[number] = error
        found = scorer.logits([row.ids for row in rows], micro_batch_tokens)
    scores: dict[int, list[tuple[int, float]]] = {}
    for row, logits in zip(rows, found, strict=True):
        read = logits[row.tokens] if scorer.of_tokens else logits[None]
        scores.setdefault(row.sample, []).extend(zip(row.ends, _scores(read, column, activation), strict=True))
    return [
        failed[number] if number in failed else _result(scores[number], kind, aggregate)
        for number in range(len(samples))
    ]


class Row(NamedTuple):
    """What the model reads once, and where scores are read off."""

    sample: int
    ids: list[int]
    ends: list[int]
    """Of each score: the characters of the response that it is about."""
    tokens: list[int] = []  # noqa: RUF012
    """Of each score: its place in the row, where the model scores tokens."""


def step_spans(text: str, separator: str) -> list[tuple[int, int]]:
    """Where each step begins and ends, in characters; separators belong to none, and blank steps are left out.

    >>> step_spans("a b;; ;cd;", ";")
    [(0, 3), (7, 9)]
    """
    spans, start = [], 0
    for piece in text.split(separator):
        if piece.strip():
            spans.append((start, start + len(piece)))
        start += len(piece) + len(separator)
    return spans


class _Texts:
    """Samples as tokens, by the reward model's own tokenizer and chat template.

    A special token that a response spells is read as text: a policy must not end its own turn and praise itself.
    """

    def __init__(self, tokenizer: Any, system: str | None) -> None:
        self._tokenizer = tokenizer
        self._special = [each.content for each in tokenizer.added_tokens_decoder.values() if each.special]
        self._system = [{"role": "system", "content": system}] if system else []
        if system and not tokenizer.chat_template:
            raise ConfigError("system: the reward model has no chat template, so it takes no system prompt")

    def conversation(self, sample: Sample, end: int) -> list[int]:
        """Prompt and the first characters of the response."""
        response = sample.response[:end]
        if not self._tokenizer.chat_template:
            return list(self._tokenizer(sample.prompt + response)["input_ids"])
        turns = [{"role": "user", "content": sample.prompt}, {"role": "assistant", "content": response}]
        text = self._tokenizer.apply_chat_template([*self._system, *turns], tokenize=False)
        if not any(token in response for token in self._special):
            return self._encoded(text)
        before, found, after = text.rpartition(response.strip())
        if not found:
            raise ValueError("the response spells special tokens, and the chat template changes it")
        return self._encoded(before) + self._encoded(found, spelt=True) + self._encoded(after)

    def marked(
        self, sample: Sample, spans: Sequence[tuple[int, int]], marker: list[int]
    ) -> tuple[list[int], list[int], list[int]]:
        """Prompt and steps with the marker after each; ends in characters; places of the markers' last tokens.

        Steps and markers are encoded apart, as process reward models are trained.
        """
        if self._tokenizer.chat_template:
            turns = [*self._system, {"role": "user", "content": sample.prompt}]
            text = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
            ids = self._encoded(text)
        else:
            first = self._tokenizer.bos_token_id
            ids = ([] if first is None else [first]) + self._encoded(sample.prompt)
        places = []
        for start, end in spans:
            ids += [*self._encoded(sample.response[start:end], spelt=True), *marker]
            places.append(len(ids) - 1)
        return ids, [end for _, end in spans], places

    def _encoded(self, text: str, *, spelt: bool | None = None) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, split_special_tokens=spelt)["input_ids"])


def _marker(tokenizer: Any, step_separator: str, step_token: str | None) -> list[int]:
    if step_token is None:
        return list(tokenizer(step_separator, add_special_tokens=False)["input_ids"])
    place = tokenizer.get_vocab().get(step_token)
    if place is None:
        raise ConfigError(f"step_token={step_token!r} is no token of the reward model; look at its tokenizer.json")
    return [place]


def _fitting(row: Row, limit: int | None, truncate: bool) -> Row:
    over = 0 if limit is None else len(row.ids) - limit
    if not row.ids:
        raise ValueError("prompt and response have no token")
    if over <= 0:
        return row
    if not truncate:
        raise ValueError(
            f"{len(row.ids)} tokens, the reward model takes max_length={limit}: raise it, or cut by truncate"
        )
    tokens = [place - over for place in row.tokens]
    if tokens and tokens[0] < 0:
        raise ValueError(f"{len(row.ids)} tokens, and within the last max_length={limit} is not every step")
    return row._replace(ids=row.ids[over:], tokens=tokens)


def _limit(scorer: "Classifier", max_length: int | None) -> int | None:
    if max_length is not None and scorer.positions is not None and max_length > scorer.positions:
        raise ConfigError(f"max_length={max_length} is above the {scorer.positions} positions of {scorer.path!r}")
    return max_length or scorer.positions


def _column(scorer: "Classifier", label: int | str | None, activation: str) -> int:
    """The label whose logit counts."""
    labels = scorer.labels
    if len(labels) == 1:
        if activation == "softmax":
            raise ConfigError(f"activation=softmax: {scorer.path!r} has one label, its share is always 1; use sigmoid")
        if label is None:
            return next(iter(labels))
    found = [place for place, name in labels.items() if label in (place, name)]
    if not found:
        raise ConfigError(f"label={label!r}: {scorer.path!r} has {labels}; choose one by its number or name")
    return found[0]


def _scores(logits: "Tensor", column: int, activation: str) -> list[float]:
    if activation == "softmax":
        logits = logits.softmax(-1)
    elif activation == "sigmoid":
        logits = logits.sigmoid()
    return [float(each) for each in logits[:, column]]


def _result(scores: list[tuple[int, float]], kind: str, aggregate: str) -> RewardResult:
    if kind == "outcome":
        return RewardResult(value=scores[0][1])
    return RewardResult(value=AGGREGATES[aggregate]([score for _, score in scores]), step_scores=scores)
