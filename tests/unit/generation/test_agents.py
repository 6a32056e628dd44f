"""Rollouts of several turns: with an engine that says what the test wants, and with the local one."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
import torch

from grpo_lib.config import SmallModelConfig
from grpo_lib.config_rollout import AgentConfig
from grpo_lib.data.ragged import Ragged, lengths_to_offsets
from grpo_lib.data.schemas import PROMPTS, ROLLOUT_EXTRAS, ROLLOUTS
from grpo_lib.errors import DataError
from grpo_lib.evaluation import evaluate_mode
from grpo_lib.generation import model_turns
from grpo_lib.generation.agent_loop import LOOPS, RolloutFailedError
from grpo_lib.generation.agents import make_agent, run_agents
from grpo_lib.generation.base import FAILED, LENGTH, MAX_TURNS, STOP, Generated, Progress, Request, Sampling
from grpo_lib.generation.episodes import Played
from grpo_lib.generation.local import LocalEngine
from grpo_lib.generation.rollouts import generate_rollouts, rollout_summary
from grpo_lib.generation.tools import TOOLS, ToolError, register_tool
from grpo_lib.models import make_small_model, make_tokenizer
from grpo_lib.problems.countdown_calculator import PROBLEM
from grpo_lib.rewards.judges import own_reward
from grpo_lib.rewards.scoring import reward_table

TOKENIZER = make_tokenizer(PROBLEM.tags, PROBLEM.alphabet)
EOS = TOKENIZER.eos_token_id
Script = dict[int, list[str]]


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """Whatever a test registers is gone after it."""
    entries = [(registry, dict(registry._entries)) for registry in (TOOLS, LOOPS)]
    yield
    for registry, before in entries:
        registry._entries.clear()
        registry._entries.update(before)


def encode(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def ragged(rows: Sequence[Sequence[int]]) -> Ragged:
    return Ragged(
        values=torch.tensor([token for row in rows for token in row], dtype=torch.int32),
        offsets=lengths_to_offsets(torch.tensor([len(row) for row in rows])),
    )


def split(rows: Ragged, values: torch.Tensor | None = None) -> list[list[Any]]:
    flat = rows.values if values is None else values
    return [flat[start:end].tolist() for start, end in pairwise(rows.offsets.tolist())]


class Scripted:
    """Writes the next text of a row, whose prompt is its number; a turn that calls no tool ends with <eos>."""

    name, version, alive = "scripted", "1", True

    def __init__(self, script: Script) -> None:
        self._script = script
        self.requests: list[Request] = []
        self.turns: Counter[int] = Counter()
        self.threads: set[int] = set()

    def generate(self, request: Request, on_progress: Progress | None = None) -> Generated:
        self.requests.append(request)
        self.threads.add(threading.get_ident())
        made, logprobs, finish = [], [], []
        limits = [request.sampling.max_new_tokens] * len(request.seeds)
        limits = limits if request.limits is None else request.limits.tolist()
        for prompt, limit in zip(split(request.prompts), limits, strict=True):
            row = prompt[0]
            text = self._script[row][self.turns[row]]
            ids = encode(text) + ([] if text.endswith(request.sampling.stop) else [EOS])
            made.append(ids[:limit])
            logprobs += [-(self.turns[row] + 1 + place / 100) for place in range(len(made[-1]))]
            finish.append(STOP if len(ids) <= limit else LENGTH)
            self.turns[row] += 1
        if on_progress is not None:
            on_progress(len(made), len(made), len(logprobs))
        return Generated(responses=ragged(made), logprobs=torch.tensor(logprobs), finish=torch.tensor(finish).byte())

    def digest(self) -> str:
        return "d"


def play(
    script: Script | list[str], *, limit: int = 200, on_progress: Progress | None = None, **settings: Any
) -> tuple[Played, Scripted]:
    script = script if isinstance(script, dict) else {0: script}
    engine = Scripted(script)
    request = Request(
        prompts=ragged([[row] for row in script]),
        seeds=torch.arange(len(script)) + 100,
        sampling=Sampling(temperature=1.0, max_new_tokens=limit),
    )
    agent = make_agent(AgentConfig(**settings), TOKENIZER)
    assert agent is not None
    return run_agents(engine, request, agent, on_progress), engine  # type: ignore[arg-type]


def texts(made: Generated) -> list[str]:
    return [TOKENIZER.decode(row) for row in split(made.responses)]


def tool(function: Callable[[str], Any], name: str = "own") -> str:
    register_tool(name)(function)
    return name


# One rollout


def test_a_turn_that_ends_in_a_call_is_followed_by_the_result_and_the_next_turn() -> None:
    made, engine = play(["<think><calc>12+7</calc>", "<calc>19*2</calc>", "</think>38"])
    assert texts(made) == [
        "<think><calc>12+7</calc><result>19</result><calc>19*2</calc><result>38</result></think>38<eos>"
    ]
    assert made.finish.tolist() == [STOP] and made.failures is None
    assert (made.turns.tolist(), made.tool_calls.tolist(), made.tool_errors.tolist()) == ([3], [2], [0])
    assert made.turns.dtype == torch.int32 and made.responses.values.dtype == torch.int32
    assert [each.sampling.stop for each in engine.requests] == [("</calc>",)] * 3


def test_observations_have_mask_and_logprob_0_and_the_policys_tokens_keep_theirs() -> None:
    made, _ = play(["<calc>1+1</calc>", "2"])
    assert made.mask is not None
    first, observed, second = 5, 3, 2
    assert made.mask.tolist() == [True] * first + [False] * observed + [True] * second
    expected = [-1.0, -1.01, -1.02, -1.03, -1.04, 0.0, 0.0, 0.0, -2.0, -2.01]
    torch.testing.assert_close(made.logprobs, torch.tensor(expected))
    assert made.logprobs.dtype == torch.float32


def test_ids_are_only_appended_each_turn_reads_exactly_what_was_written() -> None:
    turns = ["<calc>12+7</calc>", "xx<calc>1/3</calc>", "<calc>2-1</calc>", "end"]
    made, engine = play(turns)
    (whole,) = split(made.responses)
    for request in engine.requests:
        seen = request.prompts.values.tolist()
        assert seen == [0, *whole][: len(seen)]
    lengths = [len(request.prompts.values) for request in engine.requests]
    assert lengths == sorted(set(lengths)) and len(lengths) == 4


def test_a_text_that_would_be_tokenised_otherwise_as_a_whole_keeps_its_ids() -> None:
    spelled = [token for character in "<calc>" for token in encode(character)]

    class Spelling(Scripted):
        def generate(self, request: Request, on_progress: Progress | None = None) -> Generated:
            made = super().generate(request)
            if len(self.requests) > 1:
                return made
            ids = spelled + encode("1+1</calc>")
            return Generated(responses=ragged([ids]), logprobs=torch.zeros(len(ids)), finish=made.finish)

    agent = make_agent(AgentConfig(), TOKENIZER)
    assert agent is not None
    request = Request(
        prompts=ragged([[0]]), seeds=torch.tensor([1]), sampling=Sampling(temperature=1.0, max_new_tokens=50)
    )
    made = run_agents(Spelling({0: ["<calc>1+1</calc>", "2"]}), request, agent)  # type: ignore[arg-type]
    assert split(made.responses)[0][: len(spelled)] == spelled
    assert texts(made) == ["<calc>1+1</calc><result>2</result>2<eos>"]


def test_a_closing_tag_without_an_opening_one_is_no_call() -> None:
    made, _ = play(["12+7</calc>"])
    assert texts(made) == ["12+7</calc>"] and made.finish.tolist() == [STOP] and made.turns.tolist() == [1]


def test_an_opening_tag_of_an_earlier_turn_does_not_count() -> None:
    made, _ = play(["<calc><calc>1+1</calc>", "2</calc>"])
    assert made.turns.tolist() == [2] and made.tool_calls.tolist() == [1]


def test_the_last_turn_allowed_calls_no_tool() -> None:
    calls: list[str] = []
    own = tool(lambda text: calls.append(text) or "r")
    made, _ = play(["<own>1</own>", "<own>2</own>", "never"], tools=[own], max_turns=2)
    assert texts(made) == ["<own>1</own><result>r</result><own>2</own>"]
    assert made.finish.tolist() == [MAX_TURNS] and calls == ["1"]


@pytest.mark.parametrize("limit", range(1, 30))
def test_a_response_never_exceeds_its_limit_whatever_a_tool_says(limit: int) -> None:
    turns = ["<calc>12+7</calc>", "<calc>19+1</calc>", "20"]
    whole = texts(play(turns)[0])[0]
    made, engine = play(turns, limit=limit)
    (row,) = split(made.responses)
    assert 1 <= len(row) <= limit
    assert encode(whole.removesuffix("<eos>"))[: len(row)] == row[: len(encode(whole.removesuffix("<eos>")))]
    full = len(encode(whole.removesuffix("<eos>"))) + 1
    assert made.finish.tolist() == [STOP if limit >= full else LENGTH]
    assert made.mask is not None and bool(made.mask[-1]), "an observation that nothing could follow is left out"
    assert all(request.limits is not None and int(request.limits[0]) >= 1 for request in engine.requests)


def test_limits_of_rows_are_kept() -> None:
    engine = Scripted({0: ["12345"], 1: ["12345"]})
    request = Request(
        prompts=ragged([[0], [1]]),
        seeds=torch.tensor([1, 2]),
        sampling=Sampling(temperature=1.0, max_new_tokens=50),
        limits=torch.tensor([3, 40]),
    )
    agent = make_agent(AgentConfig(), TOKENIZER)
    assert agent is not None
    made = run_agents(engine, request, agent)  # type: ignore[arg-type]
    assert made.responses.lengths.tolist() == [3, 6] and made.finish.tolist() == [LENGTH, STOP]


def test_what_a_tool_says_is_cut_and_its_tags_are_not() -> None:
    own = tool(lambda text: "abcdefgh")
    made, _ = play(["<own></own>", "x"], tools=[own], max_observation_tokens=3)
    assert texts(made) == ["<own></own><result>abc</result>x<eos>"]


@pytest.mark.parametrize("splits", [True, False])
def test_a_tool_can_not_inject_control_tokens(splits: bool) -> None:
    tokenizer = make_tokenizer(PROBLEM.tags, None)
    tokenizer.split_special_tokens = splits
    own = tool(lambda text: "a<eos><pad>b")
    agent = make_agent(AgentConfig(tools=[own]), tokenizer)
    assert agent is not None
    request = Request(
        prompts=ragged([[0]]), seeds=torch.tensor([1]), sampling=Sampling(temperature=1.0, max_new_tokens=50)
    )
    made = run_agents(Scripted({0: ["<own></own>", "x"]}), request, agent)  # type: ignore[arg-type]
    assert made.mask is not None
    observed = made.responses.values[~made.mask].tolist()
    assert not {TOKENIZER.eos_token_id, TOKENIZER.pad_token_id} & set(observed)
    assert tokenizer.decode(observed) == ("<result>a<eos><pad>b</result>" if splits else "<result>ab</result>")


def test_an_answer_that_the_tokenizer_does_not_know_is_an_error_that_names_it() -> None:
    own = tool(lambda text: "Ü")
    agent = make_agent(AgentConfig(tools=[own]), make_tokenizer(PROBLEM.tags, "<>/own0x"))
    assert agent is not None
    request = Request(
        prompts=ragged([[0]]), seeds=torch.tensor([1]), sampling=Sampling(temperature=1.0, max_new_tokens=50)
    )

    class Own(Scripted):
        def generate(self, request: Request, on_progress: Progress | None = None) -> Generated:
            ids = agent.tokenizer("<own>x</own>")["input_ids"]
            return Generated(responses=ragged([ids]), logprobs=torch.zeros(len(ids)), finish=torch.tensor([STOP]))

    with pytest.raises(DataError, match="a tool said 'Ü', for which the tokenizer has no tokens"):
        run_agents(Own({}), request, agent)  # type: ignore[arg-type]


def test_the_tags_of_results_are_an_option_of_the_loop() -> None:
    made, _ = play(["<calc>1+1</calc>", "x"], loop_options={"opening": " = ", "closing": ";"})
    assert texts(made) == ["<calc>1+1</calc> = 2;x<eos>"]


# Tools that fail


def hanging(text: str) -> str:
    threading.Event().wait(60)
    return "late"


def raising(text: str) -> str:
    raise KeyError("no\nsuch entry")


def refusing(text: str) -> str:
    raise ToolError("not today")


def leaving(text: str) -> str:
    raise SystemExit(3)


def stopping(text: str) -> str:
    raise StopIteration


def giving_a_number(text: str) -> Any:
    return 7


async def late(text: str) -> str:
    await asyncio.sleep(60)
    return "late"


async def quick(text: str) -> str:
    await asyncio.sleep(0)
    return f"async {text}"


FAILING: list[tuple[Callable[[str], Any], str]] = [
    (raising, r"KeyError: 'no\nsuch entry'"),
    (refusing, "not today"),
    (leaving, "SystemExit: 3"),
    (stopping, "StopIteration: "),
    (giving_a_number, "the tool gave int, not text"),
    (hanging, "no answer in 0.1 seconds"),
    (late, "no answer in 0.1 seconds"),
]


@pytest.mark.parametrize(("function", "problem"), FAILING)
def test_a_tool_that_raises_or_takes_too_long_becomes_an_observation(
    function: Callable[[str], Any], problem: str
) -> None:
    made, _ = play(["<own></own>", "x"], tools=[tool(function)], tool_timeout_seconds=0.1)
    problem = problem.rstrip()
    assert [text.replace(" <", "<") for text in texts(made)] == [f"<own></own><result>error: {problem}</result>x<eos>"]
    assert made.finish.tolist() == [STOP] and made.failures is None and made.tool_errors.tolist() == [1]


@pytest.mark.parametrize(("function", "problem"), FAILING)
def test_or_ends_the_rollout_with_a_reason(function: Callable[[str], Any], problem: str) -> None:
    script = {0: ["<own></own>", "x"], 1: ["fine"]}
    made, _ = play(script, tools=[tool(function)], tool_timeout_seconds=0.1, on_tool_error="fail")
    assert texts(made) == ["<own></own>", "fine<eos>"]
    assert made.finish.tolist() == [FAILED, STOP]
    assert made.failures == [f"own: {problem.rstrip()}", None]
    assert (made.tool_calls.tolist(), made.tool_errors.tolist()) == ([1, 0], [1, 0])


def test_an_async_tool_is_awaited() -> None:
    made, _ = play(["<own>1</own>", "x"], tools=[tool(quick)])
    assert texts(made) == ["<own>1</own><result>async 1</result>x<eos>"]


def test_a_long_reason_is_cut() -> None:
    def verbose(text: str) -> str:
        raise ToolError("x" * 1000)

    made, _ = play(["<own></own>"], tools=[tool(verbose)], on_tool_error="fail")
    assert made.failures == ["own: " + "x" * 200]


# Many at once


def test_turns_asked_for_together_are_one_batch_and_seeds_follow_from_row_and_turn() -> None:
    script = {row: ["<calc>1+1</calc>"] * (row % 3) + ["x"] for row in range(12)}
    made, engine = play(script)
    assert [len(each.seeds) for each in engine.requests] == [12, 8, 4]
    assert made.turns.tolist() == [1, 2, 3] * 4
    assert engine.requests[0].seeds.tolist() == list(range(100, 112)), "a first turn is what it is without an agent"
    assert [prompt[0] for prompt in split(engine.requests[1].prompts)] == [1, 2, 4, 5, 7, 8, 10, 11]
    later = torch.cat([each.seeds for each in engine.requests[1:]]).tolist()
    assert len(set(later)) == 12 and not set(later) & set(range(100, 112))
    again, _ = play(script)
    assert again.responses.values.equal(made.responses.values) and again.logprobs.equal(made.logprobs)


def test_the_engine_stays_in_the_calling_thread_where_progress_is_reported() -> None:
    told: list[tuple[int, int, int]] = []
    threads: set[int] = set()

    def on_progress(rows: int, total: int, tokens: int) -> None:
        threads.add(threading.get_ident())
        told.append((rows, total, tokens))

    made, engine = play({0: ["<calc>1+1</calc>", "x"], 1: ["x"]}, on_progress=on_progress)
    assert engine.threads == threads == {threading.get_ident()}
    policy = int(made.mask.sum()) if made.mask is not None else 0
    assert told[-1] == (2, 2, policy) and told == sorted(told)


def test_at_most_so_many_tools_run_at_a_time() -> None:
    lock, running, most = threading.Lock(), 0, 0

    def busy(text: str) -> str:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.02)
        with lock:
            running -= 1
        return "r"

    made, _ = play({row: ["<own></own>", "x"] for row in range(20)}, tools=[tool(busy)], concurrency=3)
    assert most == 3 and made.turns.tolist() == [2] * 20


def test_tools_that_hang_keep_nobody_waiting_and_not_the_process_either() -> None:
    daemon: list[bool] = []

    def sometimes(text: str) -> str:
        daemon.append(threading.current_thread().daemon)
        return hanging(text) if text == "hang" else "r"

    script = {row: [f"<own>{'hang' if row % 2 else 'go'}</own>", "x"] for row in range(6)}
    before = time.perf_counter()
    made, _ = play(script, tools=[tool(sometimes)], concurrency=1, tool_timeout_seconds=0.1)
    assert time.perf_counter() - before < 10
    assert made.tool_errors.tolist() == [0, 1] * 3 and made.turns.tolist() == [2] * 6
    assert all(daemon)


def test_rollouts_go_on_while_a_slow_tool_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_turns, "PATIENCE_SECONDS", 0.01)
    go = threading.Event()

    def slow(text: str) -> str:
        assert go.wait(30)
        return "slow"

    class Watching(Scripted):
        def generate(self, request: Request, on_progress: Progress | None = None) -> Generated:
            made = super().generate(request)
            if self.turns[1] == 4:  # the other rollout is through, and only then the tool answers
                go.set()
            return made

    tool(slow)
    engine = Watching({0: ["<own></own>", "x"], 1: ["<calc>1+1</calc>"] * 3 + ["x"]})
    request = Request(
        prompts=ragged([[0], [1]]), seeds=torch.tensor([1, 2]), sampling=Sampling(temperature=1.0, max_new_tokens=90)
    )
    agent = make_agent(AgentConfig(tools=["own", "calculator"]), TOKENIZER)
    assert agent is not None
    made = run_agents(engine, request, agent)  # type: ignore[arg-type]
    assert made.turns.tolist() == [2, 4]
    assert [len(each.seeds) for each in engine.requests] == [2, 1, 1, 1, 1]


def test_tools_run_while_the_engine_generates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_turns, "PATIENCE_SECONDS", 0.01)
    generating, answered = threading.Event(), threading.Event()

    def waits_for_the_engine(text: str) -> str:
        assert generating.wait(30)
        answered.set()
        return "r"

    class Waiting(Scripted):
        def generate(self, request: Request, on_progress: Progress | None = None) -> Generated:
            if self.requests:
                generating.set()
                assert answered.wait(30)
            return super().generate(request)

    tool(waits_for_the_engine)
    engine = Waiting({0: ["<own></own>", "x"], 1: ["<calc>1+1</calc>", "x"]})
    request = Request(
        prompts=ragged([[0], [1]]), seeds=torch.tensor([1, 2]), sampling=Sampling(temperature=1.0, max_new_tokens=90)
    )
    agent = make_agent(AgentConfig(tools=["own", "calculator"]), TOKENIZER)
    assert agent is not None
    assert run_agents(engine, request, agent).turns.tolist() == [2, 2]  # type: ignore[arg-type]


# Loops of one's own


class Loop:
    stops = ("<answer>",)

    def __init__(self, play: Callable[..., Any]) -> None:
        self.play = play


def use(play_: Callable[..., Any]) -> str:
    @LOOPS.register("own_loop")
    def own_loop(tokenizer):  # type: ignore[no-untyped-def]
        return Loop(play_)

    return "own_loop"


def test_a_loop_decides_what_a_rollout_is() -> None:
    async def asks_back(episode, model, toolbox):  # type: ignore[no-untyped-def]
        first = await model.turn(episode)
        assert first.text == "<think><answer>" and first.ids == encode(first.text)
        episode.observe(encode("sure?"))
        second = await model.turn(episode)
        return second.finish

    made, engine = play(["<think><answer>", "1"], loop=use(asks_back))
    assert texts(made) == ["<think><answer>sure?1<eos>"] and made.turns.tolist() == [2]
    assert engine.requests[0].sampling.stop == ("<answer>",)


def test_a_loop_may_begin_with_an_observation_and_wait_for_what_it_wants() -> None:
    async def begins(episode, model, toolbox):  # type: ignore[no-untyped-def]
        await model.meanwhile(asyncio.sleep(0.01 if episode.row else 0))
        episode.observe(encode("go"))
        return (await model.turn(episode)).finish

    made, engine = play({0: ["1"], 1: ["2"]}, loop=use(begins))
    assert texts(made) == ["go1<eos>", "go2<eos>"] and len(engine.requests) == 1


@pytest.mark.parametrize("turns", [0, 1])
def test_a_rollout_that_fails_holds_a_turn_all_the_same(turns: int) -> None:
    async def gives_up(episode, model, toolbox):  # type: ignore[no-untyped-def]
        for _ in range(turns):
            await model.turn(episode)
        raise RolloutFailedError("the game\nis lost")

    made, _ = play(["x"], loop=use(gives_up))
    assert texts(made) == ["x<eos>"]
    assert made.failures == ["the game is lost"] and made.finish.tolist() == [FAILED]


def test_an_error_of_the_loop_or_the_engine_ends_the_call() -> None:
    async def broken(episode, model, toolbox):  # type: ignore[no-untyped-def]
        if episode.row == 1:
            raise ZeroDivisionError("a mistake")
        return (await model.turn(episode)).finish

    with pytest.raises(ZeroDivisionError, match="a mistake"):
        play({0: ["x"], 1: ["x"]}, loop=use(broken))
    with pytest.raises(IndexError):
        play({0: ["<calc>1</calc>"]})  # the script has no second turn
    for _ in range(100):
        if not [each for each in threading.enumerate() if each.name == "agents"]:
            return
        time.sleep(0.05)
    raise AssertionError("the loops' thread goes on")


@pytest.mark.parametrize(("result", "turns"), [(7, 1), (None, 1), (STOP, 0)])
def test_a_loop_says_how_a_rollout_ended_after_a_turn_at_least(result: Any, turns: int) -> None:
    async def wrong(episode, model, toolbox):  # type: ignore[no-untyped-def]
        for _ in range(turns):
            await model.turn(episode)
        return result

    with pytest.raises(ValueError, match="takes at least one turn and returns STOP, LENGTH or MAX_TURNS"):
        play(["x"], loop=use(wrong))


def test_an_observation_that_leaves_nothing_and_a_turn_too_many_are_refused() -> None:
    async def long(episode, model, toolbox):  # type: ignore[no-untyped-def]
        episode.observe([5] * episode.remaining)

    with pytest.raises(ValueError, match="an observation of 4 tokens leaves nothing of the 4 that remain"):
        play(["x"], loop=use(long), limit=4)

    async def many(episode, model, toolbox):  # type: ignore[no-untyped-def]
        await model.turn(episode)
        await model.turn(episode)

    LOOPS._entries.pop("own_loop")
    with pytest.raises(ValueError, match="has all its 1 tokens"):
        play(["x", "x"], loop=use(many), limit=1)


def test_a_rollout_takes_one_turn_after_the_other() -> None:
    async def both(episode, model, toolbox):  # type: ignore[no-untyped-def]
        await asyncio.gather(model.turn(episode), model.turn(episode))

    with pytest.raises(ValueError, match="one turn after the other"):
        play({0: ["x", "x"], 1: ["x"]}, loop=use(both))


# The local engine

LETTERS = "0123456789+- abcdefghijklmnopqrstuvwxyz:"
SMALL = SmallModelConfig(hidden_size=32, layers=2, heads=2, kv_heads=1, head_dim=16, mlp_size=32)


def local(temperature: float = 0.9) -> tuple[LocalEngine, Any, Any, Request]:
    tokenizer = make_tokenizer(("<calc>", "</calc>", "<result>", "</result>"), LETTERS)
    model = make_small_model(SMALL, len(tokenizer), eos_id=1, pad_id=0, max_positions=256, seed=3)
    with torch.no_grad():
        model.get_input_embeddings().weight[1] = 0  # ends seldom, so that there are many turns
    engine = LocalEngine(model, eos_token_ids=[1], tokenizer=tokenizer)
    prompts = [tokenizer(text)["input_ids"] for text in ("12", "3+4", "<calc>", "9")]
    request = Request(
        prompts=ragged(prompts),
        seeds=torch.arange(128),
        n=32,
        sampling=Sampling(temperature=temperature, max_new_tokens=100),
    )
    return engine, model, tokenizer, request


def test_logprobs_of_every_turn_equal_a_plain_forward_pass_over_the_whole_rollout() -> None:
    engine, model, tokenizer, request = local()
    agent = make_agent(AgentConfig(max_turns=5), tokenizer)
    assert agent is not None
    made = run_agents(engine, request, agent)
    assert made.mask is not None
    assert int((made.turns > 1).sum()) > 10, "the model must call now and then"
    assert int(made.responses.lengths.max()) <= 100
    rows = zip(
        split(made.responses), split(made.responses, made.logprobs), split(made.responses, made.mask), strict=True
    )
    for row, (ids, logprobs, mask) in enumerate(rows):
        prompt = split(request.prompts)[row // 32]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *ids]]), use_cache=False).logits[0]
        plain = (logits / 0.9).log_softmax(-1)[len(prompt) - 1 : -1].gather(1, torch.tensor(ids)[:, None]).squeeze(1)
        own = torch.tensor(mask)
        torch.testing.assert_close(torch.tensor(logprobs)[own], plain[own], atol=1e-5, rtol=0)
        assert not torch.tensor(logprobs)[~own].any()
        assert int((own[1:] & ~own[:-1]).sum()) == made.turns[row] - 1


def test_rollouts_are_the_same_each_time_and_those_of_one_turn_the_same_as_without_an_agent() -> None:
    engine, _, tokenizer, request = local()
    agent = make_agent(AgentConfig(max_turns=5), tokenizer)
    assert agent is not None
    first, second = run_agents(engine, request, agent), run_agents(engine, request, agent)
    assert first.responses.values.equal(second.responses.values) and first.logprobs.equal(second.logprobs)
    plain = engine.generate(request)
    for row, turns in enumerate(first.turns.tolist()):
        if turns == 1 and int(first.finish[row]) != MAX_TURNS:
            mine, theirs = split(first.responses)[row], split(plain.responses)[row]
            assert mine == theirs[: len(mine)]


# Datasets


def prompts_table(count: int) -> pa.Table:
    rows = [
        {
            "prompt_id": str(row),
            "dataset_row": row,
            "epoch": 0,
            "prompt": str(row),
            "prompt_ids": [row],
            "reference": "r",
            "data_source": "d",
        }
        for row in range(count)
    ]
    return pa.Table.from_pylist(rows, schema=PROMPTS)


def test_the_rollout_dataset_says_turns_calls_and_failures_and_a_failed_row_has_no_reward() -> None:
    script = {0: ["<own>1</own>", "x"], 1: ["<own>bad</own>"], 2: ["y"]}

    def picky(text: str) -> str:
        if text == "bad":
            raise ToolError("bad text")
        return "fine"

    agent = make_agent(AgentConfig(tools=[tool(picky)], on_tool_error="fail"), TOKENIZER)
    prompts = prompts_table(3)
    table = generate_rollouts(
        Scripted(script),  # type: ignore[arg-type]
        prompts,
        TOKENIZER,
        first_prompt=0,
        samples=1,
        sampling=Sampling(temperature=1.0, max_new_tokens=60),
        seed=1,
        iteration=0,
        policy_version=0,
        agent=agent,
    )
    assert table.schema.equals(pa.schema([*ROLLOUTS, *ROLLOUT_EXTRAS]))
    assert table.column("turns").to_pylist() == [2, 1, 1]
    assert table.column("failure").to_pylist() == [None, "own: bad text", None]
    assert table.column("finish_reason").to_pylist() == ["stop", "failed", "stop"]
    assert table.column("text").to_pylist() == ["<own>1</own><result>fine</result>x", "<own>bad</own>", "y"]
    masks = table.column("response_mask").to_pylist()
    assert masks[0].count(0) == len(encode("<result>fine</result>"))

    summary = rollout_summary(table)
    tokens = sum(map(len, masks))
    assert summary["turns_mean"] == pytest.approx(4 / 3) and summary["tool_calls_mean"] == pytest.approx(2 / 3)
    assert summary["tool_errors_fraction"] == 0.5 and summary["failed_fraction"] == pytest.approx(1 / 3)
    assert summary["observation_fraction"] == pytest.approx(masks[0].count(0) / tokens)
    own = [
        logprob
        for logprobs, mask in zip(table.column("rollout_logprobs").to_pylist(), masks, strict=True)
        for logprob, taken in zip(logprobs, mask, strict=True)
        if taken
    ]
    assert summary["surprise"] == pytest.approx(-sum(own) / len(own))

    judged: list[str] = []
    rewards, scores = reward_table(prompts, table, own_reward(lambda sample: judged.append(sample.response) or 1.0))
    assert rewards.column("value").to_pylist() == [1.0, None, 1.0]
    assert rewards.column("reason").to_pylist() == [None, "own: bad text", None]
    assert len(judged) == 2 and scores.judged == [True, False, True]


def test_without_an_agent_the_dataset_has_the_columns_it_always_had() -> None:
    table = generate_rollouts(
        Scripted({0: ["x"], 1: ["y"]}),  # type: ignore[arg-type]
        prompts_table(2),
        TOKENIZER,
        first_prompt=0,
        samples=1,
        sampling=Sampling(temperature=1.0, max_new_tokens=60),
        seed=1,
        iteration=0,
        policy_version=0,
    )
    assert table.schema.equals(ROLLOUTS) and "turns_mean" not in rollout_summary(table)


def test_evaluation_plays_with_the_agent_and_leaves_failed_rollouts_out() -> None:
    agent = make_agent(AgentConfig(on_tool_error="fail"), TOKENIZER)
    table = evaluate_mode(
        Scripted({0: ["<calc>1+1</calc>", "2"], 1: ["<calc>1/0</calc>"]}),  # type: ignore[arg-type]
        prompts_table(2),
        TOKENIZER,
        own_reward(lambda sample: float("<result>2</result>" in sample.response)),
        mode="sampled",
        samples=1,
        sampling=Sampling(temperature=1.0, max_new_tokens=60),
        seed=1,
        agent=agent,
    )
    assert table.column("correct").to_pylist() == [True, None]
    assert table.column("reason").to_pylist() == [None, "calculator: division by zero"]
    assert table.column("finish_reason").to_pylist() == ["stop", "failed"]
