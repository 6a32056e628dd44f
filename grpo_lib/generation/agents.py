"""Rollouts of several turns: an agent loop plays each, and the turns that they ask for are generated together."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import grpo_lib.generation.tool_loop  # noqa: F401  it registers itself
from grpo_lib.algorithms.registry import call
from grpo_lib.config_rollout import AgentConfig
from grpo_lib.generation.agent_loop import LOOPS, AgentLoop, RolloutFailedError
from grpo_lib.generation.base import FAILED, LENGTH, MAX_TURNS, STOP, Engine, Generated, Progress, Request
from grpo_lib.generation.episodes import Episode, Played, collect
from grpo_lib.generation.model_turns import Batch, Model
from grpo_lib.generation.toolbox import Toolbox
from grpo_lib.generation.tools import TOOLS, Tool, make_tools
from grpo_lib.plugins import source_digests


@dataclass(frozen=True, kw_only=True)
class Agent:
    """A loop with what it needs: what ``rollout.agent`` asks for."""

    loop: AgentLoop
    tokenizer: Any
    concurrency: int
    timeout_seconds: float


@dataclass(frozen=True, kw_only=True)
class _Making:
    """Columns that a loop may name."""

    tools: list[Tool]
    settings: AgentConfig
    tokenizer: Any


def make_agent(settings: AgentConfig | None, tokenizer: Any) -> Agent | None:
    """The configured agent; None: rollouts have one turn.

    Raises:
        ConfigError: a tool or loop that is not registered, or an option that the loop does not have.
    """
    if settings is None:
        return None
    make = LOOPS[settings.loop].bind(settings.loop_options, "rollout.agent.loop_options")
    making = _Making(tools=make_tools(settings.tools), settings=settings, tokenizer=tokenizer)
    return Agent(
        loop=call(make, making),
        tokenizer=tokenizer,
        concurrency=settings.concurrency,
        timeout_seconds=settings.tool_timeout_seconds,
    )


def agent_digests(settings: AgentConfig | None) -> dict[str, str]:
    """Digests of the user's own loop and tools: part of the key of what they shape."""
    if settings is None:
        return {}
    return source_digests([LOOPS[settings.loop], *(TOOLS[name] for name in settings.tools)])


def respond(engine: Engine, request: Request, agent: Agent | None, on_progress: Progress | None = None) -> Generated:
    """Responses of one turn, or of as many as the agent makes of it."""
    return engine.generate(request, on_progress) if agent is None else run_agents(engine, request, agent, on_progress)


def run_agents(engine: Engine, request: Request, agent: Agent, on_progress: Progress | None = None) -> Played:
    """Plays all rollouts at once. The engine stays in the calling thread; loops and tools run beside it.

    The response of a row, observations included, has at most its limit of tokens.
    """
    assert request.budget is None, "a tool's state does not outlive a budget"
    episodes = _episodes(request)
    total, tokens = len(episodes), 0
    stop = tuple(dict.fromkeys((*request.sampling.stop, *agent.loop.stops)))
    model = Model(replace(request.sampling, stop=stop), agent.tokenizer, total)

    def report(_finished: int, _rows: int, new: int) -> None:
        if on_progress is not None:
            on_progress(total - model.live, total, tokens + new)

    players = _Players(episodes, model, agent)
    players.start()
    try:
        while (batch := model.batches.get()) is not None:
            if isinstance(batch, BaseException):
                raise batch
            made = engine.generate(batch.request, report)
            tokens += len(made.logprobs)
            players.answer(batch, made)
    finally:
        players.end()
    report(0, 0, 0)
    return collect(episodes)


def _episodes(request: Request) -> list[Episode]:
    """One a row."""
    prompts, limits = request.prompts, request.limits
    offsets, seeds = prompts.offsets.tolist(), request.seeds.tolist()
    return [
        Episode(
            row=row,
            prompt=prompts.values[offsets[row // request.n] : offsets[row // request.n + 1]],
            seed=seed,
            limit=request.sampling.max_new_tokens if limits is None else int(limits[row]),
        )
        for row, seed in enumerate(seeds)
    ]


class _Players:
    """A daemon thread with the event loop in which all rollouts are played."""

    def __init__(self, episodes: Sequence[Episode], model: Model, agent: Agent) -> None:
        self._episodes, self._model, self._agent = episodes, model, agent
        self._events: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._thread = threading.Thread(target=self._run, name="agents", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def answer(self, batch: Batch, made: Generated) -> None:
        self._tell(batch.answer, made)

    def end(self) -> None:
        """Cancels what still runs."""
        if self._task is not None:
            self._tell(self._task.cancel)

    def _tell(self, function: Callable[..., object], *arguments: object) -> None:
        """Calls the function in the thread; one that has ended, maybe by an error, hears nothing any more."""
        assert self._events is not None
        try:
            self._events.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            pass

    def _run(self) -> None:
        try:
            asyncio.run(self._play_all())
        except BaseException as error:
            self._model.batches.put(error)
        else:
            self._model.batches.put(None)

    async def _play_all(self) -> None:
        self._events, self._task = asyncio.get_running_loop(), asyncio.current_task()
        agent = self._agent
        toolbox = Toolbox(self._model, concurrency=agent.concurrency, timeout_seconds=agent.timeout_seconds)
        await asyncio.gather(*(self._play(each, toolbox) for each in self._episodes))

    async def _play(self, episode: Episode, toolbox: Toolbox) -> None:
        try:
            finish = await self._agent.loop.play(episode, self._model, toolbox)
            if finish not in (STOP, LENGTH, MAX_TURNS) or not episode.turns:
                raise ValueError(
                    f"{type(self._agent.loop).__name__}.play gave {finish!r} after {episode.turns} turns; it takes at "
                    "least one turn and returns STOP, LENGTH or MAX_TURNS"
                )
        except RolloutFailedError as error:
            episode.failure, finish = " ".join(str(error).split()) or "failed without a reason", FAILED
            if not episode.turns:  # a row holds a token of the policy
                await self._model.turn(episode)
        episode.finish = finish
        self._model.ended()
