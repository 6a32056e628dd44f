"""One response in the making: what is asked for next, and where it ends."""

from collections.abc import Callable
from dataclasses import dataclass, field

from grpo_lib.errors import ConfigError
from grpo_lib.generation.base import LENGTH, STOP, UNFINISHED, Budget, Sampling
from grpo_lib.generation.server_dialects import Ask, Reply
from grpo_lib.seeds import derive_seed

SLICE = 64
"""With a budget: tokens of a request, after which it is looked at."""

Decode = Callable[[list[int]], str]


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What holds for all rows of a call."""

    sampling: Sampling
    stop_ids: frozenset[int]
    """Tokens that end a row."""
    decode: Decode | None
    """Tokens to text; needed with stop strings."""
    budget: Budget | None
    max_in_flight: int
    retries: int
    recovery_seconds: float


@dataclass(kw_only=True)
class Row:
    """One response in the making."""

    prompt: list[int]
    seed: int
    limit: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: int = UNFINISHED
    failures: int = 0

    def ask(self, terms: Terms) -> Ask:
        """For the rest of it, or its next slice. Slices are the same whatever the budget, and so are the rows."""
        left = self.limit - len(self.ids)
        return Ask(
            ids=self.prompt + self.ids,
            seed=derive_seed(self.seed, "slice", len(self.ids)) if self.ids else self.seed,
            limit=left if terms.budget is None else min(left, SLICE),
            sampling=terms.sampling,
            stop_ids=sorted(terms.stop_ids),
        )

    def add(self, reply: Reply, terms: Terms) -> None:
        """Servers look for stop strings in what they generated themselves, here they may begin in an earlier slice."""
        before = len(self.ids)
        self.ids += reply.ids
        self.logprobs += reply.logprobs
        if terms.sampling.stop:
            self._stop_at_strings(before, terms)
        if reply.stopped or self.ids[-1] in terms.stop_ids:
            self.finish = STOP
        elif self.finish == UNFINISHED and len(self.ids) == self.limit:
            self.finish = LENGTH

    def _stop_at_strings(self, before: int, terms: Terms) -> None:
        """Cuts behind the first token that completes one."""
        assert terms.decode is not None

        def reached(length: int) -> bool:
            text = terms.decode(self.ids[:length])  # type: ignore[misc]
            return any(stop in text for stop in terms.sampling.stop)

        length = len(self.ids)
        if not reached(length):
            return
        while length - 1 > before and reached(length - 1):
            length -= 1
        del self.ids[length:], self.logprobs[length:]
        self.finish = STOP


def check_reply(url: str, ask: Ask, reply: Reply) -> None:
    """
    Raises:
        ConfigError: it is not what was asked for.
    """
    found = len(reply.ids)
    if not 0 < found <= ask.limit or found != len(reply.logprobs):
        raise ConfigError(
            f"the server {url} returned {found} tokens with {len(reply.logprobs)} log-probs where 1 to "
            f"{ask.limit} were asked for; is rollout.server.kind right?"
        )
    if not reply.stopped and found < ask.limit and reply.ids[-1] not in ask.stop_ids:
        raise ConfigError(
            f"the server {url} cut a row after {found} of {ask.limit} tokens, behind {len(ask.ids)} of the "
            "prompt; start it with a longer context (--max-model-len, or --context-length of SGLang)"
        )
