"""Tools that a policy calls between its turns, by name.

To add one write one function and put ``@register_tool`` above it; a user's own module does the same and is named in
``algorithm.plugins``:

    @register_tool("weekday", use="the day of the week of a date")
    def weekday(text: str) -> str:
        try:
            return date.fromisoformat(text.strip()).strftime("%A")
        except ValueError as error:
            raise ToolError(str(error)) from None

The policy writes ``<weekday>2024-02-29</weekday>``, its turn ends there, and it reads ``<result>Thursday</result>``.
An ``async def`` is awaited; any other function runs in a thread of its own, several at a time. What it returns must
depend on the text alone, or a repeated rollout differs.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from grpo_lib.algorithms.registry import Registry
from grpo_lib.errors import ConfigError
from grpo_lib.problems.arithmetic import MAX_ANSWER_CHARS, parse_arithmetic

ToolFunction = Callable[[str], str | Awaitable[str]]

MAX_RESULT_CHARS = 50
"""Of the calculator: a longer number would be cut, and be another number then."""

TOOLS: Registry[ToolFunction] = Registry("tool", {"text": "what the policy wrote between the tags"})


class ToolError(Exception):
    """Why a call has no result, in words for the policy. Never leaves the rollout."""


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A tool with the tags of its calls."""

    name: str
    opening: str
    closing: str
    """It ends a turn of the policy."""
    function: ToolFunction


def register_tool(
    name: str, *, opening: str | None = None, closing: str | None = None, use: str = ""
) -> Callable[[ToolFunction], ToolFunction]:
    """Decorator that enters a function of one argument, ``text``, as a tool.

    Args:
        opening: what stands before the text of a call; None: ``<name>``.
        closing: what stands behind it; None: ``</name>``.
        use: what the tool is good for, in a sentence.

    Raises:
        ConfigError: the name is taken, or the argument is called otherwise.
    """
    return TOOLS.register(name, use=use, opening=opening or f"<{name}>", closing=closing or f"</{name}>")


def make_tools(names: Sequence[str]) -> list[Tool]:
    """The tools of those names.

    Raises:
        ConfigError: a name that is not registered, or two tools with one tag.
    """
    tools: list[Tool] = []
    for name in names:
        if name not in TOOLS:
            raise ConfigError(
                f"rollout.agent.tools: there is no tool {name!r}; registered are {', '.join(TOOLS.names())}. One of "
                "your own is registered by a module in algorithm.plugins"
            )
        entry = TOOLS[name]
        made = Tool(
            name=name,
            opening=str(entry.traits["opening"]),
            closing=str(entry.traits["closing"]),
            function=entry.function,
        )
        for other in tools:
            if {made.opening, made.closing} & {other.opening, other.closing}:
                raise ConfigError(f"rollout.agent.tools: {other.name!r} and {name!r} have the same tag; leave one out")
        tools.append(made)
    return tools


@register_tool("calculator", opening="<calc>", closing="</calc>", use="exact arithmetic with + - * / and parentheses")
def calculator(text: str) -> str:
    """The value of an expression, as a whole number or a fraction.

    >>> calculator("(30-12)/4")
    '9/2'
    """
    if len(text) > MAX_ANSWER_CHARS:
        raise ToolError(f"more than {MAX_ANSWER_CHARS} characters")
    read = parse_arithmetic(text)
    if read is None:
        raise ToolError("not arithmetic")
    if read.value is None:
        raise ToolError("division by zero")
    result = str(read.value)
    if len(result) > MAX_RESULT_CHARS:
        raise ToolError("the result is too long")
    return result
