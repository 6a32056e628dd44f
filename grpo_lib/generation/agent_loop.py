"""What an agent loop is: it plays one rollout of several turns, in the order in which things happen.

A loop comes by name, as tools do:

    class SecondThought:
        stops = ("<over>",)  # texts that end a turn, beside rollout.stop

        def __init__(self, question):
            self._question = question

        async def play(self, episode, model, toolbox):
            first = await model.turn(episode)
            if first.finish == LENGTH or episode.remaining <= len(self._question):
                return LENGTH
            episode.observe(self._question)
            return (await model.turn(episode)).finish

    @LOOPS.register("second_thought", use="asks once whether the policy is sure")
    def second_thought(tokenizer):
        return SecondThought(tokenizer("Sure?", add_special_tokens=False)["input_ids"])
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from grpo_lib.algorithms.registry import Registry
from grpo_lib.generation.episodes import Episode
from grpo_lib.generation.model_turns import Model
from grpo_lib.generation.toolbox import Toolbox


class RolloutFailedError(Exception):
    """Ends a rollout without a reward, for a reason; raised by a loop, and never leaves `run_agents`."""


class AgentLoop(Protocol):
    """What happens in a rollout."""

    stops: Sequence[str]
    """Texts that end a turn of the policy, beside those of the sampling; they stay in the response."""

    async def play(self, episode: Episode, model: Model, toolbox: Toolbox) -> int:
        """Plays one rollout to its end and returns how it ended: ``STOP``, ``LENGTH`` or ``MAX_TURNS``.

        It takes at least one turn. What it waits for beside turns and tools goes through ``model.meanwhile``.

        Raises:
            RolloutFailedError: the rollout has no reward, and why.
        """
        ...


LOOPS: Registry[Callable[..., AgentLoop]] = Registry(
    "agent loop",
    {
        "tools": "`list[Tool]`: the configured ones",
        "settings": "the section `rollout.agent`",
        "tokenizer": "of the policy",
    },
)
