"""Servers with a policy: whether each is there, and holds the weights that rows shall come from."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from grpo_lib.errors import GrpoError, ServerLostError
from grpo_lib.generation.server_dialects import Dialect
from grpo_lib.generation.server_http import Access, Connection, Unwell

POLL_SECONDS = 1.0
"""Between two questions to a server that is lost."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Weights that servers can take."""

    folder: Path
    digest: str


@dataclass(kw_only=True)
class Server:
    """What is known of a server from one call to the next."""

    url: str
    version: str | None = None
    """Software and version; None: it was not asked yet."""
    ready: str | None = None
    """Digest of the policy that was put there, to the end; None: unknown."""


class State(Enum):
    ASKED = auto()
    """For the first time in this call; no answer yet."""
    WELL = auto()
    """It is there and holds the policy."""
    LOST = auto()
    """It failed; it is asked again and again."""
    REFUSED = auto()
    """It is there but can't take the policy: it is left out."""


class Peer:
    """A server during one call."""

    def __init__(self, server: Server, connection: Connection, dialect: Dialect) -> None:
        self.server, self.connection = server, connection
        self._dialect = dialect
        self.state = State.ASKED
        self.reason = "not asked yet"
        """Why it is lost or left out."""
        self.error: GrpoError | None = None
        """What it refuses with."""
        self.requests: set[asyncio.Task[None]] = set()
        """That it has not answered."""
        self.rows = 0
        """That it finished, or a slice of them."""

    async def admit(self, policy: Policy, *, anew: bool = False) -> None:
        """Asks whether it is well, gives it the policy unless it has it, and sets ``state``.

        Args:
            anew: it gets the policy in any case.
        """
        server, connection = self.server, self.connection
        try:
            await connection.health()
            if anew or server.ready != policy.digest or await self.holds_another(policy):
                server.ready = None  # until all steps are through
                server.version = await self._dialect.introduce(connection)
                await self._dialect.load(connection, policy.folder, policy.digest)
                server.ready = policy.digest
        except Unwell as error:
            self.lose(str(error))
        except GrpoError as error:
            self.state, self.reason, self.error = State.REFUSED, str(error), error
        else:
            self.state = State.WELL

    async def holds_another(self, policy: Policy) -> bool:
        """Whether it was restarted, or somebody else gave it other weights."""
        return await self._dialect.held(self.connection) != policy.digest

    def lose(self, reason: str) -> None:
        self.state, self.reason = State.LOST, reason


@asynccontextmanager
async def peers_of(
    servers: Sequence[Server], access: Access, dialect: Dialect, connections: int
) -> AsyncIterator[list[Peer]]:
    """The servers, with a connection to each for as long as the call takes."""
    async with AsyncExitStack() as stack:
        peers = []
        for server in servers:
            connection = access.connect(server.url, connections)
            stack.push_async_callback(connection.close)
            peers.append(Peer(server, connection, dialect))
        yield peers


async def place(policy: Policy, peers: Sequence[Peer], recovery_seconds: float) -> None:
    """Puts a policy into every server that is there. One is enough: others get it when they are back.

    Raises:
        GrpoError: what a server refuses it with.
        ServerLostError: none was there within ``recovery_seconds``.
    """
    began = asyncio.get_running_loop().time()
    while True:
        await asyncio.gather(*(peer.admit(policy, anew=True) for peer in peers))
        for peer in peers:
            if peer.error is not None:
                raise peer.error
        if any(peer.state is State.WELL for peer in peers):
            return
        if asyncio.get_running_loop().time() - began >= recovery_seconds:
            raise all_lost(peers, recovery_seconds, "no policy was loaded")
        await asyncio.sleep(POLL_SECONDS)


def all_lost(peers: Sequence[Peer], waited: float, so_far: str) -> ServerLostError:
    """The error when no server is left."""
    reasons = "; ".join(f"{peer.server.url}: {peer.reason}" for peer in peers)
    return ServerLostError(
        f"no generation server is left ({reasons}), and none came back within {waited:g} s; {so_far}. Start them again "
        "(a server that comes back gets the policy by itself), or raise rollout.server.recovery_seconds"
    )
