"""Questions to a model behind an OpenAI-compatible endpoint, one at a time, with retries."""

import asyncio
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from grpo_lib.errors import ConfigError, RewardError
from grpo_lib.rewards.pace import PACE
from grpo_lib.urls import without_secrets

if TYPE_CHECKING:
    import ssl

    import httpx
    from tenacity import RetryCallState

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds before the first retry, each time twice as long, and at most; a server's Retry-After comes on top."""
KEEP_SECONDS = 2.0
"""Servers close connections that are idle for 5 s; one that is used just then would look like a failure."""
BUSY = (408, 429)
"""Answers of the 4xx kind after which the same request may still go through."""
HINTS = {401: "; is api_key_variable right?", 403: "; is api_key_variable right?", 404: "; are url and model right?"}
SHOWN = 90
"""Characters of an answer that an error repeats: a reason has 200."""


def api_key(variable: str | None) -> str | None:
    """What an environment variable holds.

    Raises:
        ConfigError: nothing, or nothing that could be sent.
    """
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(f"the environment variable {variable} (api_key_variable) is not set; put the key into it")
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(f"the environment variable {variable} holds characters that no HTTP header may have")
    return key


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the judge said, and what was paid for."""

    text: str
    fault: str | None
    """Why it is no whole answer."""
    prompt_tokens: int | None
    """None: the endpoint does not tell; so the next."""
    completion_tokens: int | None


class NotNow(Exception):
    """The endpoint did not answer, or said that it can't: the same request may go through later."""

    def __init__(self, reason: str, after: float = 0.0) -> None:
        super().__init__(reason)
        self.after = after
        """Seconds that it asks to wait."""


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where the judge is, and how patiently it is asked."""

    url: str
    key: str | None
    request_seconds: float
    retries: int

    async def ask(self, body: dict[str, Any]) -> Answer:
        """The judge's answer.

        Raises:
            RewardError: there is none, or the endpoint refuses the request.
        """
        from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt

        said: list[str] = []

        async def attempt() -> Any:
            if said:
                await PACE.get().turn()
            return await self._post(body)

        tries = AsyncRetrying(
            retry=retry_if_exception_type(NotNow),
            wait=_pause,
            stop=stop_after_attempt(self.retries + 1),
            before_sleep=lambda state: said.append(str(state.outcome.exception() if state.outcome else "")),
            reraise=True,
        )
        try:
            return self._answer(await tries(attempt))
        except NotNow as error:
            raise RewardError(f"{error} (tried {self.retries + 1} times)") from None
        except asyncio.CancelledError as error:  # out of time: what for is worth knowing
            if said:
                error.add_note(f"{said[-1]} (tried {len(said)} times)")
            raise

    def safe(self, text: str) -> str:
        """Without the key, if somebody repeats it, and as text that can be stored."""
        text = text if not self.key else text.replace(self.key, "***")
        return text.encode("utf-8", "replace").decode("utf-8")

    async def _post(self, body: dict[str, Any]) -> Any:
        import httpx

        headers = {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
        try:
            with _client() as client:
                async with asyncio.timeout(self.request_seconds):
                    answer = await client.post(f"{self.url.rstrip('/')}/chat/completions", json=body, headers=headers)
        except TimeoutError:
            raise NotNow(f"no answer within request_seconds={self.request_seconds:g}") from None
        except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            raise ConfigError(without_secrets(f"url={self.url}: {error}")) from None
        except httpx.TransportError as error:
            said = f"no answer from {self.url}: {type(error).__name__}: {error}"
            raise NotNow(self.safe(without_secrets(said))) from None
        if answer.is_success:
            try:
                return answer.json()
            except ValueError:
                raise NotNow(f"the endpoint's answer is no JSON: {self._shown(answer.text)}") from None
        said = f"the endpoint answers with {answer.status_code}: {self._shown(answer.text)}"
        if answer.is_server_error or answer.status_code in BUSY:
            raise NotNow(said, after=retry_after(answer.headers.get("retry-after", "")))
        raise RewardError(f"{said}{HINTS.get(answer.status_code, '')}")

    def _answer(self, found: Any) -> Answer:
        try:
            choice, usage = found["choices"][0], found.get("usage") or {}
            text, finish = choice["message"]["content"], choice.get("finish_reason")
            read, written = usage.get("prompt_tokens"), usage.get("completion_tokens")
        except (KeyError, IndexError, TypeError, AttributeError):
            raise RewardError(f"no choices[0].message.content in {self._shown(json.dumps(found))}") from None
        text, fault = text if isinstance(text, str) else "", None
        if finish == "length":  # "Score: 1" may have been going to be "Score: 10"
            fault = f"the judge's answer was cut: raise max_tokens. {self._shown(text)}"
        elif not text.strip():
            fault = f"the judge's answer is empty (finish_reason={finish})"
        return Answer(text=text, fault=fault, prompt_tokens=read, completion_tokens=written)

    def _shown(self, text: str) -> str:
        return repr(" ".join(self.safe(text).split())[:SHOWN])


def retry_after(header: str) -> float:
    """Seconds that a Retry-After header asks to wait: a number, or a date."""
    if header.strip().isdigit():
        return float(header)
    try:
        return max(0.0, (parsedate_to_datetime(header) - datetime.now(UTC)).total_seconds())
    except (TypeError, ValueError):  # none, nonsense, or a date without a time zone
        return 0.0


_IDLE: "WeakKeyDictionary[asyncio.AbstractEventLoop, list[httpx.AsyncClient]]" = WeakKeyDictionary()


@contextmanager
def _client() -> "Iterator[httpx.AsyncClient]":
    """A client with a connection that was used before, if one is free.

    Each has one connection: httpx looks at all that a client has, several times for every request, which takes longer
    than the rest once there are dozens.
    """
    import httpx

    idle = _IDLE.setdefault(asyncio.get_running_loop(), [])
    if idle:
        client = idle.pop()
    else:
        limits = httpx.Limits(max_connections=1, keepalive_expiry=KEEP_SECONDS)
        # The whole request has a timeout, see `Endpoint`.
        client = httpx.AsyncClient(verify=_certificates(), timeout=None, limits=limits)
    try:
        yield client
    finally:
        idle.append(client)


@lru_cache(maxsize=1)
def _certificates() -> "ssl.SSLContext":
    """Reading them takes longer than a question."""
    import httpx

    return httpx.create_ssl_context()


def _pause(state: "RetryCallState") -> float:
    from tenacity import wait_exponential_jitter

    error = state.outcome.exception() if state.outcome else None
    asked = error.after if isinstance(error, NotNow) else 0.0
    return asked + wait_exponential_jitter(initial=FIRST_PAUSE, max=LONGEST_PAUSE, jitter=FIRST_PAUSE)(state)
