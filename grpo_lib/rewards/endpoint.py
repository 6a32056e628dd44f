"""A judge: another model reads the response and says what it is worth.

How many are asked at a time, how often and for how long are settings of the runner: ``reward.runner.concurrency``,
``reward.runner.rate`` and ``reward.timeout_seconds``, which bounds a sample with all its retries.
"""

import json
import math
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, JsonValue

from grpo_lib.algorithms.registry import Option
from grpo_lib.config_base import Pattern, UrlWithoutSecrets
from grpo_lib.errors import ConfigError
from grpo_lib.rewards.chat import SHOWN, Endpoint, api_key
from grpo_lib.rewards.registry import REWARDS
from grpo_lib.types import NoRewardError, RewardResult, Sample

_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


def _has_group(pattern: str) -> str:
    if not re.compile(pattern).groups:
        raise ValueError("has no group: put what the judge says into parentheses")
    return pattern


@REWARDS.register(
    "judge",
    use="what another model says of a response",
    files=["prompt_file"],
    imports=["httpx", "tenacity"],
    modules=["grpo_lib.rewards.chat"],
)
async def judge(
    sample: Sample,
    *,
    url: Annotated[UrlWithoutSecrets, Option(min_length=1, description="Of the API: http://host:8000/v1")],
    model: Annotated[str, Option(min_length=1, description="As the endpoint calls it.")],
    prompt: Annotated[str | None, Option(description="The question, with {prompt}, {response}, {reference}.")] = None,
    prompt_file: Annotated[str | None, Option(description="File that holds the question instead.")] = None,
    system: Annotated[str | None, Option(description="System prompt; null: none.")] = None,
    pattern: Annotated[
        Annotated[Pattern, AfterValidator(_has_group)] | None,
        Option(description="Where it matches last in the answer, its first group is a number or a word."),
    ] = None,
    field: Annotated[str | None, Option(description="Instead of it: place in an answer that is JSON (a.b.0).")] = None,
    values: Annotated[
        dict[str, float] | None, Option(description="Of words, capital or not; null: a number is expected.")
    ] = None,
    low: Annotated[float | None, Option(description="With high: the judge's scale, which becomes 0 to 1.")] = None,
    high: Annotated[float | None, Option(description="With low.")] = None,
    temperature: Annotated[float | None, Option(ge=0, description="null: the endpoint's.")] = 0.0,
    max_tokens: Annotated[int | None, Option(ge=1, description="Of the answer; null: the endpoint's.")] = 1024,
    extra: Annotated[dict[str, JsonValue], Option(description="Further fields of the request.")] = {},  # noqa: B006
    retries: Annotated[int, Option(ge=0, description="After 429, 5xx, silence, and half an answer.")] = 4,
    request_seconds: Annotated[float, Option(gt=0, description="For one request.")] = 60.0,
    api_key_variable: Annotated[str | None, Option(description="Environment variable that holds the key.")] = None,
    prompt_price: Annotated[float | None, Option(ge=0, description="Of a million tokens that the judge reads.")] = None,
    completion_price: Annotated[float | None, Option(ge=0, description="Of a million that it writes.")] = None,
) -> RewardResult:
    """The value that the judge's answer says; an answer that says none is no reward, and is paid for all the same."""
    question = filled_in(_template(prompt, prompt_file), sample)
    _check_rule(pattern, field, low, high)
    if (prompt_price is None) != (completion_price is None):
        raise ConfigError("prompt_price and completion_price: give both or neither")
    body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": question}]}
    if system is not None:
        body["messages"].insert(0, {"role": "system", "content": system})
    options = {"temperature": temperature, "max_tokens": max_tokens}
    body |= {name: value for name, value in options.items() if value is not None} | extra
    endpoint = Endpoint(url=url, key=api_key(api_key_variable), request_seconds=request_seconds, retries=retries)
    answer = await endpoint.ask(body)
    spent = {}
    if answer.prompt_tokens is not None and answer.completion_tokens is not None:
        read, written = float(answer.prompt_tokens), float(answer.completion_tokens)
        spent = {"prompt_tokens": read, "completion_tokens": written}
        if prompt_price is not None and completion_price is not None:
            spent["cost"] = (read * prompt_price + written * completion_price) / 1e6
    if answer.fault is not None:
        raise NoRewardError(answer.fault, spent)
    try:
        value = parsed(answer.text, pattern=pattern, field=field, values=values, low=low, high=high)
    except ValueError as error:
        raise NoRewardError(endpoint.safe(str(error)), spent) from None
    return RewardResult(value=value, spent=spent, text=endpoint.safe(answer.text))


def filled_in(template: str, sample: Sample) -> str:
    """The template with the sample's texts; other braces stay, and so do those in the texts."""
    return re.sub(r"\{(prompt|response|reference)\}", lambda name: str(getattr(sample, name[1])), template)


def parsed(
    answer: str,
    *,
    pattern: str | None = None,
    field: str | None = None,
    values: dict[str, float] | None = None,
    low: float | None = None,
    high: float | None = None,
) -> float:
    """The value that an answer says.

    Raises:
        ValueError: it says none, or one that is not on the scale.
    """
    word = _matched(answer, pattern) if pattern is not None else _at(answer, str(field))
    if word is None:
        raise ValueError(f"the judge's answer {answer[:SHOWN]!r} has no {pattern if field is None else field}")
    if values is None:
        number = float(word) if _NUMBER.fullmatch(word) else math.nan
        if not math.isfinite(number):
            raise ValueError(f"the judge says {word[:SHOWN]!r}, which is no number: say in values what it is")
    else:
        known = {each.casefold(): float(value) for each, value in values.items()}
        if word.casefold() not in known:
            raise ValueError(f"the judge says {word[:SHOWN]!r}; values knows {', '.join(values)}")
        number = known[word.casefold()]
    if low is None or high is None:
        return number
    if not low <= number <= high:
        raise ValueError(f"the judge says {number:g}, which is not from low={low:g} to high={high:g}")
    return (number - low) / (high - low)


def _template(prompt: str | None, prompt_file: str | None) -> str:
    if (prompt is None) == (prompt_file is None):
        raise ConfigError("prompt and prompt_file: give one of them")
    template = Path(prompt_file).read_text(encoding="utf-8") if prompt_file is not None else str(prompt)
    if "{response}" not in template:
        raise ConfigError("the judge's prompt has no {response}, so it would judge without reading it")
    return template


def _check_rule(pattern: str | None, field: str | None, low: float | None, high: float | None) -> None:
    if (pattern is None) == (field is None):
        raise ConfigError("pattern and field: give one of them, which finds the value in the judge's answer")
    if (low is None) != (high is None) or (low is not None and high is not None and low >= high):
        raise ConfigError(f"low={low}, high={high}: give both, low below high, or neither")


def _matched(answer: str, pattern: str) -> str | None:
    found = list(re.finditer(pattern, answer, re.DOTALL))
    if not found:
        return None
    word: str | None = found[-1][1]
    return None if word is None else word.strip()


def _at(answer: str, field: str) -> str | None:
    """What stands at a place in the JSON object that an answer holds, as a word."""
    try:
        found: Any = json.loads(answer[answer.find("{") : answer.rfind("}") + 1])
        for name in field.split("."):
            found = found[int(name)] if isinstance(found, list) else found[name]
    except (ValueError, KeyError, IndexError, TypeError):
        return None
    return found.strip() if isinstance(found, str) else json.dumps(found)
