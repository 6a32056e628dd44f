"""Runs tools for agent loops: so many calls at a time, each for so long."""

import asyncio
import inspect
import threading
from dataclasses import dataclass

from grpo_lib.generation.episodes import Episode
from grpo_lib.generation.model_turns import Model
from grpo_lib.generation.tools import Tool, ToolError, ToolFunction

MAX_REASON_CHARS = 200


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What came of a call."""

    text: str
    failed: bool
    """``text`` says what went wrong."""


class Toolbox:
    """Calls tools for the rollouts of one run.

    Args:
        concurrency: calls at a time; a sync tool that took too long goes on in its thread and is not counted any more.
        timeout_seconds: a call that takes longer has failed.
    """

    def __init__(self, model: Model, *, concurrency: int, timeout_seconds: float) -> None:
        self._model, self._timeout_seconds = model, timeout_seconds
        self._places = asyncio.Semaphore(concurrency)

    async def call(self, episode: Episode, tool: Tool, text: str) -> Answer:
        """What the tool says; one that raises or takes too long gives an answer too."""
        answer = await self._model.meanwhile(self._call(tool, text))
        episode.tool_calls += 1
        episode.tool_errors += answer.failed
        return answer

    async def _call(self, tool: Tool, text: str) -> Answer:
        async with self._places:
            limit = asyncio.timeout(self._timeout_seconds)
            try:
                async with limit:
                    result = await _result(tool.function, text)
            except ToolError as error:
                return _failed(str(error))
            except Exception as error:
                if limit.expired():
                    return _failed(f"no answer in {self._timeout_seconds:g} seconds")
                return _failed(f"{type(error).__name__}: {error}")
        if not isinstance(result, str):
            return _failed(f"the tool gave {type(result).__name__}, not text")
        return Answer(text=result, failed=False)


def _failed(text: str) -> Answer:
    return Answer(text=" ".join(text.split())[:MAX_REASON_CHARS], failed=True)


async def _result(function: ToolFunction, text: str) -> object:
    if inspect.iscoroutinefunction(function):
        return await function(text)
    result = await _in_thread(function, text)
    return await result if inspect.isawaitable(result) else result


def _in_thread(function: ToolFunction, text: str) -> "asyncio.Future[object]":
    """Runs a function in a daemon thread of its own: one that hangs keeps neither others waiting nor the process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[object] = loop.create_future()

    def settle(result: object, error: Exception | None) -> None:
        if future.done():  # too late
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def work() -> None:
        result: object = None
        problem: Exception | None = None
        try:
            result = function(text)
        except BaseException as error:  # an exit ends the call and not the run; a future takes no StopIteration
            if isinstance(error, Exception) and not isinstance(error, StopIteration):
                problem = error
            else:
                problem = ToolError(f"{type(error).__name__}: {error}")
        try:
            loop.call_soon_threadsafe(settle, result, problem)
        except RuntimeError:  # the run is over
            pass

    threading.Thread(target=work, name="tool", daemon=True).start()
    return future
