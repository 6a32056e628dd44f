"""Runs of the real flow in this process, against the session's Prefect server."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from grpo_lib.config import RunConfig
from grpo_lib.config_files import make_config
from tests.flows.tiny import TINY, use_easy_reward


@contextmanager
def talking_to(server: dict[str, str]) -> Iterator[str]:
    from prefect.settings import PREFECT_API_URL, PREFECT_HOME, temporary_settings

    with temporary_settings({PREFECT_API_URL: server["PREFECT_API_URL"], PREFECT_HOME: Path(server["PREFECT_HOME"])}):
        yield server["PREFECT_API_URL"]


@pytest.fixture(scope="session")
def prefect_here(prefect_server: dict[str, str]) -> Iterator[str]:
    """This process talks to the session's Prefect server; the fixture's value is its address."""
    with talking_to(prefect_server) as address:
        yield address


@pytest.fixture(scope="module")
def own_prefect_here(own_prefect_server: dict[str, str]) -> Iterator[str]:
    """The same with a server of the module's own."""
    with talking_to(own_prefect_server) as address:
        yield address


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunConfig]:
    """Makes the smallest configuration that has every stage, with ``key=value`` overrides."""

    import tasks.reward

    monkeypatch.setattr(tasks.reward, "get_problem", use_easy_reward)

    def make(*overrides: str) -> RunConfig:
        return make_config(TINY | {"store": {"uri": str(tmp_path / "store")}}, overrides)

    return make
