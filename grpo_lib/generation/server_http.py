"""One generation server over HTTP: a request, its answer, and the two ways in which it can go wrong."""

import asyncio
import json
import os
import ssl
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx

from grpo_lib.errors import ConfigError

CONNECT_SECONDS = 10.0
CONTROL_SECONDS = 10.0
"""For questions about health, version and weights."""
KEEP_SECONDS = 2.0
"""Servers close connections that are idle for 5 s; one that is used just then would look like a failure."""
BUSY = (408, 429)
"""Answers of the 4xx kind after which the same request may still go through."""
HINTS = {
    401: "; is rollout.server.api_key_variable right?",
    403: "; is rollout.server.api_key_variable right?",
    404: "; are rollout.server.kind and model right?",
}
SHOWN = 500
"""Characters of a server's message that an error repeats."""


class Unwell(Exception):
    """A server did not answer, or answered that it can't: the same request may go through on another."""

    def __init__(self, reason: str, status: int | None = None) -> None:
        super().__init__(reason)
        self.status = status


class Refused(ConfigError):
    """A server won't take a request, and neither would another; the message is the server's."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Access:
    """How servers are reached: the same for all of them, and for all calls.

    Args:
        key_variable: environment variable that holds the servers' API key.
        request_seconds: within which a request must be answered.

    Raises:
        ConfigError: a URL is none, or the variable is not set.
    """

    def __init__(self, urls: Sequence[str], *, key_variable: str | None, request_seconds: float) -> None:
        self.urls = list(dict.fromkeys(_base(url) for url in urls))
        self.request_seconds = request_seconds
        self._key = None
        if key_variable is not None:
            self._key = os.environ.get(key_variable)
            if not self._key:
                raise ConfigError(
                    f"the environment variable {key_variable} (rollout.server.api_key_variable) is not set; "
                    "put the servers' API key into it"
                )
        # Making one reads all certificates of the machine: once is enough, and none for plain HTTP.
        encrypted = any(url.startswith("https:") for url in self.urls)
        self._certificates: ssl.SSLContext | bool = httpx.create_ssl_context() if encrypted else False

    def connect(self, url: str, connections: int) -> "Connection":
        """For use within one event loop."""
        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        client = httpx.AsyncClient(
            base_url=url,
            headers=headers,
            verify=self._certificates,
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),  # the whole request has one, see `call`
            limits=httpx.Limits(max_keepalive_connections=connections, keepalive_expiry=KEEP_SECONDS),
        )
        return Connection(url, client, self.request_seconds, secret=self._key)


class Connection:
    """Requests to one server."""

    def __init__(self, url: str, client: httpx.AsyncClient, seconds: float, secret: str | None) -> None:
        self.url = url
        self._client, self._seconds, self._secret = client, seconds, secret

    async def call(self, method: str, path: str, body: Any = None, seconds: float | None = None) -> Any:
        """The answer's JSON; None where there is none.

        Args:
            seconds: within which the whole answer must be there; None: ``request_seconds``.

        Raises:
            Unwell: no connection, no answer in time, half an answer, or one of the 5xx kind.
            Refused: an answer of the 4xx kind.
        """
        limit = self._seconds if seconds is None else seconds
        try:
            async with asyncio.timeout(limit):
                answer = await self._client.request(method, path, json=body)
        except TimeoutError:
            raise Unwell(f"{method} {path} was not answered within {limit:g} s") from None
        except httpx.HTTPError as error:
            raise Unwell(f"{method} {path} failed ({type(error).__name__}: {str(error) or 'no answer'})") from None
        if answer.is_success:
            if not answer.content:
                return None
            try:
                return answer.json()
            except ValueError:
                raise Unwell(f"{method} {path} was answered with something that is not JSON") from None
        said = f"{method} {path} was answered with {answer.status_code}: {self._message(answer)}"
        if answer.is_server_error or answer.status_code in BUSY:
            raise Unwell(said, answer.status_code)
        hint = HINTS.get(answer.status_code, "")
        raise Refused(f"the server {self.url} refuses a request: {said}{hint}", answer.status_code)

    async def health(self) -> None:
        """
        Raises:
            Unwell: it says, by silence or in words, that it is not well.
        """
        await self.call("GET", "/health", seconds=CONTROL_SECONDS)

    async def close(self) -> None:
        await self._client.aclose()

    def _message(self, answer: httpx.Response) -> str:
        """What vLLM, SGLang and FastAPI say in an error, each at its own place."""
        text = answer.text
        try:
            found = json.loads(text)
            for key in ("error", "message", "detail"):
                found = found.get(key, found) if isinstance(found, dict) else found
            text = found if isinstance(found, str) else json.dumps(found)
        except ValueError:
            pass  # not JSON: shown as it is
        if self._secret is not None:
            text = text.replace(self._secret, "***")
        text = " ".join(text.split())
        return text[:SHOWN] or answer.reason_phrase


def _base(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{url!r} in rollout.server.urls is no URL of a server; write e.g. http://host:8000")
    return url.rstrip("/").removesuffix("/v1")
