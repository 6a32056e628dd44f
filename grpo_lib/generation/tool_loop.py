"""The built-in agent loop: a turn that ends in a call, what the tool says, the next turn."""

from collections.abc import Sequence
from typing import Annotated, Any

from grpo_lib.algorithms.registry import Option
from grpo_lib.config_rollout import AgentConfig
from grpo_lib.errors import DataError
from grpo_lib.generation.agent_loop import LOOPS, RolloutFailedError
from grpo_lib.generation.base import LENGTH, MAX_TURNS
from grpo_lib.generation.episodes import Episode
from grpo_lib.generation.model_turns import Model
from grpo_lib.generation.toolbox import Toolbox
from grpo_lib.generation.tools import Tool


class ToolLoop:
    """Goes on while turns end in calls: ``<calc>12+7</calc>`` is followed by ``<result>19</result>``.

    Args:
        tools: told apart by their tags.
        opening: what stands before a tool's answer; our own text, so it may be a control token.
        closing: what stands behind it.
    """

    def __init__(
        self, tools: Sequence[Tool], settings: AgentConfig, tokenizer: Any, opening: str, closing: str
    ) -> None:
        self.stops = [tool.closing for tool in tools]
        self._tools, self._settings, self._tokenizer = tools, settings, tokenizer
        self._before, self._behind = self._encode(opening), self._encode(closing)
        self._control = control_ids(tokenizer)

    async def play(self, episode: Episode, model: Model, toolbox: Toolbox) -> int:
        """See `AgentLoop.play`."""
        while True:
            turn = await model.turn(episode)
            found = call_in(turn.text, self._tools)
            if turn.finish == LENGTH or found is None:
                return turn.finish
            if episode.turns == self._settings.max_turns:
                return MAX_TURNS
            tool, text = found
            answer = await toolbox.call(episode, tool, text)
            if answer.failed and self._settings.on_tool_error == "fail":
                raise RolloutFailedError(f"{tool.name}: {answer.text}")
            observation = self._observation(f"error: {answer.text}" if answer.failed else answer.text)
            if len(observation) >= episode.remaining:
                return LENGTH
            episode.observe(observation)

    def _observation(self, text: str) -> list[int]:
        """Tokens of a tool's answer; control tokens that it spells are left out: it must not end or begin anything."""
        ids = [token for token in self._encode(text) if token not in self._control]
        return [*self._before, *ids[: self._settings.max_observation_tokens], *self._behind]

    def _encode(self, text: str) -> list[int]:
        try:
            return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        except Exception as error:  # what the tokenizers package raises has no type of its own
            raise DataError(
                f"a tool said {text[:100]!r}, for which the tokenizer has no tokens ({error}); take a problem whose "
                "small tokenizer knows all bytes (alphabet=None), or let the tool use its characters only"
            ) from error


def call_in(text: str, tools: Sequence[Tool]) -> tuple[Tool, str] | None:
    """The call that ends a turn: the tool, and what stands between its tags.

    >>> from grpo_lib.generation.tools import make_tools
    >>> call_in("<think>so <calc>1+1</calc>", make_tools(["calculator"]))[1]
    '1+1'
    """
    for tool in tools:
        before, closed, _ = text.partition(tool.closing)
        _, opened, inside = before.rpartition(tool.opening)
        if closed and opened:
            return tool, inside
    return None


def control_ids(tokenizer: Any) -> frozenset[int]:
    """Tokens that mean something to the model or the engine beside text: end of sequence, padding, turns of a chat."""
    added = {token for token, each in tokenizer.added_tokens_decoder.items() if each.special}
    return frozenset(added | set(tokenizer.all_special_ids))


@LOOPS.register("tools", use="tools between the turns, each called by its tags")
def tool_loop(
    tools: list[Tool],
    settings: AgentConfig,
    tokenizer: Any,
    *,
    opening: Annotated[str, Option(min_length=1, description="Stands before a tool's answer.")] = "<result>",
    closing: Annotated[str, Option(min_length=1, description="Stands behind it.")] = "</result>",
) -> ToolLoop:
    """See `ToolLoop`."""
    return ToolLoop(tools, settings, tokenizer, opening, closing)
