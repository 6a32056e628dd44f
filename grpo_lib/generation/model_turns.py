"""The policy as agent loops see it: each asks for its own turn, and the engine gets whole batches."""

import asyncio
import queue
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from grpo_lib.data.ragged import Ragged, lengths_to_offsets
from grpo_lib.generation.base import LENGTH, STOP, Generated, Request, Sampling
from grpo_lib.generation.episodes import Episode, Turn
from grpo_lib.seeds import derive_seed

PATIENCE_SECONDS = 0.25
"""How long rollouts that want a turn wait for tools that still run: those that answer sooner don't shape the batches,
and one that takes long holds nobody up for longer."""

T = TypeVar("T")


def turn_seed(seed: int, turn: int) -> int:
    """The first turn has the row's seed: a rollout of one turn is what it is without an agent."""
    return seed if turn == 0 else derive_seed(seed, "turn", turn)


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A turn as the engine gave it."""

    ids: Tensor
    logprobs: Tensor
    finish: int


Asking = tuple[Episode, "asyncio.Future[_Part]"]


class Batch:
    """Turns that are generated together, by row."""

    def __init__(self, asking: Sequence[Asking], sampling: Sampling) -> None:
        episodes, self._futures = zip(*asking, strict=True)
        ids = [each.ids for each in episodes]
        limits = torch.tensor([each.remaining for each in episodes])
        self.request = Request(
            prompts=Ragged(
                values=torch.cat(ids), offsets=lengths_to_offsets(torch.tensor([len(each) for each in ids]))
            ),
            seeds=torch.tensor([turn_seed(each.seed, each.turns) for each in episodes]),
            sampling=replace(sampling, max_new_tokens=int(limits.max())),
            limits=limits,
        )

    def answer(self, made: Generated) -> None:
        """Hands out the turns, in the event loop's thread."""
        offsets, finish = made.responses.offsets.tolist(), made.finish.tolist()
        for row, future in enumerate(self._futures):
            tokens = slice(offsets[row], offsets[row + 1])
            part = _Part(ids=made.responses.values[tokens], logprobs=made.logprobs[tokens], finish=finish[row])
            if not future.done():  # cancelled
                future.set_result(part)


class Model:
    """The policy, for the rollouts of one run.

    Turns are generated when every rollout waits, for a turn or for something else: the turns asked for until then are
    one batch. While the engine works, tools do too.

    Args:
        sampling: with all texts that end a turn.
        rollouts: how many there are.
    """

    def __init__(self, sampling: Sampling, tokenizer: Any, rollouts: int) -> None:
        self._sampling, self._tokenizer = sampling, tokenizer
        self._asking: dict[int, Asking] = {}
        self._taking_turns: set[int] = set()
        self._away = 0
        self._patience: asyncio.TimerHandle | None = None
        self._patience_lost = False
        self.live = rollouts
        """Rollouts that have not ended."""
        self.batches: queue.SimpleQueue[Batch | BaseException | None] = queue.SimpleQueue()
        """For the thread that has the engine; None: all rollouts have ended."""

    async def turn(self, episode: Episode) -> Turn:
        """The policy goes on where the episode ends; what it writes is appended.

        Raises:
            ValueError: the response has all its tokens, or a turn of it is being generated.
        """
        if episode.row in self._taking_turns:
            raise ValueError("a rollout takes one turn after the other; await model.turn before the next")
        if episode.remaining < 1:
            raise ValueError(f"the response has all its {episode.limit} tokens; end the rollout with LENGTH")
        future: asyncio.Future[_Part] = asyncio.get_running_loop().create_future()
        self._asking[episode.row] = (episode, future)
        self._taking_turns.add(episode.row)
        self._consider()
        part = await future
        self._taking_turns.remove(episode.row)
        assert part.finish in (STOP, LENGTH), f"the engine left a turn unfinished: {part.finish}"
        episode.append_turn(part.ids, part.logprobs)
        ids = part.ids.tolist()
        return Turn(ids=ids, text=self._tokenizer.decode(ids, skip_special_tokens=False), finish=part.finish)

    async def meanwhile(self, awaitable: Awaitable[T]) -> T:
        """Waits for something else than the policy; the other rollouts don't wait with it."""
        self._away += 1
        self._consider()
        try:
            return await awaitable
        finally:
            self._away -= 1

    def ended(self) -> None:
        """A rollout asks for nothing more."""
        self.live -= 1
        self._consider()

    def _consider(self) -> None:
        """Makes a batch when nothing more can be asked for; rollouts inside the engine neither ask nor are away."""
        if not self._asking or len(self._asking) + self._away < self.live:
            return
        if self._away and not self._patience_lost:
            if self._patience is None:
                self._patience = asyncio.get_running_loop().call_later(PATIENCE_SECONDS, self._lose_patience)
            return
        if self._patience is not None:
            self._patience.cancel()
        self._patience, self._patience_lost = None, False
        asking, self._asking = [self._asking[row] for row in sorted(self._asking)], {}
        self.batches.put(Batch(asking, self._sampling))

    def _lose_patience(self) -> None:
        self._patience_lost = True
        self._consider()
