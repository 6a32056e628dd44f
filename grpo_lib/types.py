"""The plain records that cross module boundaries. Importing this needs no torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

    from grpo_lib.config_reward import RewardConfig


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What a reward function sees of one response."""

    prompt: str
    """The prompt as the problem wrote it (before any chat template)."""
    response: str
    """The decoded response, what tools said included, without the end-of-sequence token."""
    reference: str
    """What the problem stores to judge by: an answer, or JSON."""
    data_source: str
    """Name of the data set the prompt comes from."""
    response_tokens: int
    """Length of the response in tokens, end-of-sequence and what tools said included."""
    finish_reason: str
    """``stop`` when the policy ended the response itself, ``length`` when it was cut, ``max_turns`` when it called a
    tool in its last turn."""
    failure: str | None = None
    """Why the rollout failed; then it is not judged."""
    prompt_id: str = ""
    """Of the data set."""
    rollout_id: str = ""
    """Iteration, prompt and sample."""
    response_ids: "Sequence[int] | NDArray[Any]" = ()
    """Token ids of the response."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Further columns of the prompt, as the data set brings them."""


CORRECT = "correct"
"""Component (0 or 1) that evaluation counts."""


@dataclass(frozen=True, kw_only=True)
class RewardResult:
    """What a reward function says of one response."""

    value: float
    """The reward."""
    components: Mapping[str, float] = field(default_factory=dict)
    """Named parts, kept as data. ``correct`` (0 or 1) is what evaluation counts."""
    answer: str | None = field(default=None, compare=False)
    """What the response answers, in one spelling: samples that answer the same vote together in maj@k."""
    token_scores: Sequence[float] | None = None
    """A score for each token of the response, beside the value; estimators that look at tokens add it where it is."""
    step_scores: Sequence[tuple[int, float]] | None = None
    """Scores of steps: where each ends in the response's text (a number of characters), and its score. They come to
    the token that holds the step's last character."""
    text: str | None = None
    """A word to people who read the rollouts: what a judge said, why a test failed."""
    spent: Mapping[str, float] = field(default_factory=dict)
    """What judging took (tokens, money): components that are kept where the response gets no reward, too."""


class NoRewardError(Exception):
    """Raised by a reward function: the response gets no reward, for this reason.

    Any other exception does the same; this one says what was spent to find out.
    """

    def __init__(self, reason: str, spent: Mapping[str, float] | None = None) -> None:
        super().__init__(reason)
        self.spent = dict(spent or {})


RewardFunction = Callable[[Sample], "RewardResult | float | None"]
"""The plain kind."""
AnyRewardFunction = Callable[..., Any]
"""A `RewardFunction`; or an ``async`` one; or either of a parameter ``samples``, which gives a list."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A source of prompts together with the way to judge responses.

    ``load(options, split, seed)`` returns a table with the string columns ``prompt_id`` (unique over both
    splits), ``prompt``, ``reference``, ``data_source``; ``split`` is ``train`` or ``heldout``, and no prompt
    stands in both.
    """

    name: str
    load: "Callable[[Any, str, int], pa.Table]"
    make_reward: "Callable[[Any, RewardConfig], RewardFunction]"
    """``(options, reward settings)`` -> the function that judges one response."""
    demonstrate: "Callable[[Any, pa.Table, int], list[str]] | None" = None
    """``(options, train table, seed)`` -> one demonstration (response text) for each row."""
    tags: Sequence[str] = ()
    """Strings that the small tokenizer keeps as one token."""
    observed: tuple[str, str] | None = None
    """Tags between which demonstrations hold what a tool said: the warm start does not learn to write it."""
    alphabet: str | None = None
    """Characters of the small tokenizer; ``None``: all bytes."""
