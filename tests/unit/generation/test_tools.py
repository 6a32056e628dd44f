import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_lib.config_files import make_config
from grpo_lib.errors import ConfigError
from grpo_lib.generation.tool_loop import call_in
from grpo_lib.generation.tools import TOOLS, ToolError, calculator, make_tools, register_tool
from grpo_lib.preflight import check_agent

CALCULATOR = make_tools(["calculator"])


@pytest.fixture
def registered() -> Iterator[None]:
    """Whatever a test registers is gone after it."""
    entries = dict(TOOLS._entries)
    yield
    TOOLS._entries.clear()
    TOOLS._entries.update(entries)


@pytest.mark.parametrize(
    ("text", "result"),
    [("12+7", "19"), ("30-12+7", "25"), ("(30-12)/4", "9/2"), ("1/3*3", "1"), ("-5", "-5"), (" 2 * 3 ", "6")],
)
def test_the_calculator_is_exact(text: str, result: str) -> None:
    assert calculator(text) == result


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("1/0", "division by zero"),
        ("5/(3-3)", "division by zero"),
        ("", "not arithmetic"),
        ("2**9", "not arithmetic"),
        ("__import__('os')", "not arithmetic"),
        ("1+" * 100 + "1", "more than 200 characters"),
        ("*".join(["99999"] * 20), "the result is too long"),
    ],
)
def test_the_calculator_says_why_it_has_no_result(text: str, problem: str) -> None:
    with pytest.raises(ToolError, match=problem):
        calculator(text)


@given(st.text(alphabet="0123456789+-*/() ", max_size=60) | st.text(max_size=300))
def test_the_calculator_never_fails_otherwise_and_says_little(text: str) -> None:
    try:
        result = calculator(text)
    except ToolError:
        return
    assert len(result) <= 50


def test_a_call_is_what_stands_between_the_last_opening_tag_and_the_closing_one() -> None:
    found = call_in("<think>no: <calc>1+<calc>12+7</calc>", CALCULATOR)
    assert found is not None and (found[0].name, found[1]) == ("calculator", "12+7")
    assert call_in("12+7</calc>", CALCULATOR) is None
    assert call_in("<calc>12+7", CALCULATOR) is None
    assert call_in("</calc>12+7<calc>", CALCULATOR) is None


def test_each_of_several_tools_is_called_by_its_own_tags(registered: None) -> None:
    @register_tool("upper")
    def upper(text: str) -> str:
        return text.upper()

    tools = make_tools(["calculator", "upper"])
    found = call_in("<calc>1<upper>a</upper>", tools)
    assert found is not None and (found[0].name, found[1]) == ("upper", "a")
    assert (tools[1].opening, tools[1].closing) == ("<upper>", "</upper>")


def test_a_tool_that_is_not_registered_is_refused_with_the_names_of_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r"no tool 'browser'; registered are calculator.*algorithm\.plugins"):
        make_tools(["browser"])


def test_two_tools_with_one_tag_are_refused(registered: None) -> None:
    @register_tool("sums", opening="<calc>")
    def sums(text: str) -> str:
        return text

    with pytest.raises(ConfigError, match="'calculator' and 'sums' have the same tag"):
        make_tools(["calculator", "sums"])


def test_a_name_is_registered_once_and_a_tool_takes_a_text(registered: None) -> None:
    with pytest.raises(ConfigError, match=r"tool 'calculator' .* is registered already"):
        register_tool("calculator")(lambda text: text)
    with pytest.raises(ConfigError, match="wants a column 'query'"):

        @register_tool("search")
        def search(query: str) -> str:
            return query


def agent_config(problem: str = "countdown_calculator", **agent: object) -> None:
    check_agent(make_config({"data": {"problem": problem}, "warm_start": {}, "rollout": {"agent": agent}}, ()))


def test_tools_loops_and_options_are_checked_before_the_run() -> None:
    agent_config(tools=["calculator"], loop="tools", loop_options={"opening": "<result>"})
    with pytest.raises(ConfigError, match="no tool 'calc'"):
        agent_config(tools=["calc"])
    with pytest.raises(ConfigError, match="unknown agent loop 'tool'; did you mean tools"):
        agent_config(loop="tool")
    with pytest.raises(ConfigError, match=r"rollout\.agent\.loop_options\.opned: .* known: closing, opening"):
        agent_config(loop_options={"opned": "<r>"})
    with pytest.raises(ConfigError, match=r"tools names calculator twice"):
        agent_config(tools=["calculator", "calculator"])
    with pytest.raises(ConfigError, match=r"no token for '<calc>', so it could never call .*countdown_calculator"):
        agent_config("countdown")


def test_tools_of_a_plugin_are_loaded_by_the_check(
    registered: None, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pathlib import Path

    assert isinstance(tmp_path, Path)
    (tmp_path / "own_tools.py").write_text(
        "from grpo_lib.generation.tools import register_tool\n\n"
        "@register_tool('reverse')\ndef reverse(text):\n    return text[::-1]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = {
        "data": {"problem": "countdown_calculator"},
        "warm_start": {},
        "algorithm": {"plugins": ["own_tools"]},
        "rollout": {"agent": {"tools": ["reverse"]}},
    }
    config = make_config(settings, ())
    check_agent(config)
    from grpo_lib.generation.agents import agent_digests

    assert list(agent_digests(config.rollout.agent)) == ["plugin/own_tools"], "its file is part of the stages' keys"
    assert agent_digests(None) == {}
    sys.modules.pop("own_tools")


def test_tools_need_no_torch() -> None:
    code = "import sys, grpo_lib.generation.tools; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
