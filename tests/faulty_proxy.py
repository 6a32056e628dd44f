"""A small HTTP proxy that treats its clients badly: as a network and a busy service do, but by a seed.

What happens to a request depends on the seed, the request, and how often it was made; not on the order of threads.
"""

import hashlib
import http.client
import random
import re
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

FAULTS = ("error", "slow down", "reset", "stall", "truncated", "slow", "lost", "error after")
"""error, slow down: answers 500 and 503. reset: the connection breaks. stall: no answer for longer than anybody waits.

Those do nothing; the others happen after the service did what it was asked for. truncated: half of the answer comes.
slow: it comes in pieces. lost: none comes. error after: a 500 comes instead.
"""
HOP_BY_HOP = ("connection", "keep-alive", "transfer-encoding", "content-length", "date", "server")
ARBITRARY = re.compile("[0-9a-f]{32,}|uploadId=[^&]+")
"""What is another in each test run: names of buckets and attempts."""
SLOW_DOWN = (
    b'<?xml version="1.0"?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>'
)


class FaultyProxy:
    """Stands before the service at ``target``.

    ``happened`` counts the faults by kind. ``script`` is what happens to the next requests (None: nothing bad), before
    the seed decides again. ``ignores`` names headers of requests that the service does not know.
    """

    def __init__(
        self,
        target: str,
        *,
        seed: int = 0,
        rate: float = 0.0,
        faults: Sequence[str] = FAULTS,
        stall_seconds: float = 2,
        ignores: Sequence[str] = (),
    ) -> None:
        address = urlsplit(target)
        assert address.hostname is not None and address.port is not None
        self.target = (address.hostname, address.port)
        self.ignores = ("expect", "connection", *(each.lower() for each in ignores))
        self.seed, self.rate, self.faults, self.stall_seconds = seed, rate, faults, stall_seconds
        self.happened: Counter[str] = Counter()
        self.script: list[str | None] = []
        self._asked: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._clients: set[socket.socket] = set()
        self._server: ThreadingHTTPServer | None = None
        self._port = 0
        self.back()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def back(self) -> None:
        """Listens, on the same port as before."""
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._server = _Server(("127.0.0.1", self._port), Handler)
        self._port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def away(self) -> None:
        """As after a kill -9: open connections break, and new ones are refused."""
        assert self._server is not None
        self._server.shutdown()
        self._server.server_close()
        with self._lock:
            for client in self._clients:
                reset(client)
            self._clients.clear()

    @contextmanager
    def gone_for(self, seconds: float) -> Iterator[None]:
        """Away at once, back after a while: the block runs meanwhile."""
        self.away()
        timer = threading.Timer(seconds, self.back)
        timer.start()
        try:
            yield
        finally:
            timer.join()

    def close(self) -> None:
        self.away()

    def fault(self, method: str, path: str) -> str | None:
        """What happens to this request; None: nothing bad."""
        with self._lock:
            if self.script:
                chosen = self.script.pop(0)
                self.happened[str(chosen)] += 1
                return chosen
            request = f"{method} {ARBITRARY.sub('', path)}"
            self._asked[request] += 1
            material = f"{self.seed} {request} {self._asked[request]}".encode()
        draw = random.Random(hashlib.sha256(material).digest())
        if draw.random() >= self.rate:
            return None
        chosen = draw.choice(self.faults)
        with self._lock:
            self.happened[chosen] += 1
        return chosen

    def connected(self, client: socket.socket) -> None:
        with self._lock:
            self._clients.add(client)

    def left(self, client: socket.socket) -> None:
        with self._lock:
            self._clients.discard(client)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # broken connections are the purpose


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    owner: FaultyProxy
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.owner.connected(self.connection)

    def finish(self) -> None:
        self.owner.left(self.connection)
        super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = self.owner.fault(self.command, self.path)
        if fault == "error":
            self.answer(500, {}, b"")
        elif fault == "slow down":
            self.answer(503, {"Content-Type": "application/xml"}, SLOW_DOWN)
        elif fault == "reset":
            self.break_off()
        elif fault == "stall":
            time.sleep(self.owner.stall_seconds)
            self.break_off()
        else:
            status, headers, data = self.ask(body)
            if fault == "lost":
                self.break_off()
            elif fault == "error after":
                self.answer(500, {}, b"")
            elif fault == "truncated":
                self.answer(status, headers, data, send=len(data) // 2)
                self.break_off()
            else:
                self.answer(status, headers, data, pieces=5 if fault == "slow" else 1)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = do_PATCH = forward

    def ask(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        service = http.client.HTTPConnection(*self.owner.target, timeout=60)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in self.owner.ignores}
        service.request(self.command, self.path, body or None, headers)
        response = service.getresponse()
        data = response.read()
        found = {name: value for name, value in response.getheaders() if name.lower() not in HOP_BY_HOP}
        length = response.getheader("Content-Length")
        service.close()
        return response.status, found | ({} if length is None else {"Content-Length": length}), data

    def answer(
        self, status: int, headers: dict[str, str], data: bytes, *, send: int | None = None, pieces: int = 1
    ) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(data))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        data = data[:send]
        step = max(1, -(-len(data) // pieces))
        for start in range(0, len(data), step):
            self.wfile.write(data[start : start + step])
            self.wfile.flush()
            if pieces > 1:
                time.sleep(0.02)

    def break_off(self) -> None:
        self.close_connection = True
        reset(self.connection)


def reset(client: socket.socket) -> None:
    """Breaks a connection at once, as the kernel of a killed process does."""
    try:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.shutdown(socket.SHUT_RDWR)
        client.close()
    except OSError:
        pass  # it has gone already
