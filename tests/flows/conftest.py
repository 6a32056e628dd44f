"""Runs of the real flow in this process, against the session's Prefect server."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_lib.config import RunConfig, make_config

TINY: dict[str, Any] = {
    "name": "tiny",
    "iterations": 2,
    "data": {"problem": "countdown", "train_prompts": 200, "heldout_prompts": 8},
    "model": {"small": {"hidden_size": 32, "layers": 1, "heads": 2, "kv_heads": 2, "mlp_size": 32}},
    "warm_start": {"steps": 3, "warmup_steps": 1, "batch_size": 4, "demonstrations": 16},
    "rollout": {"prompts": 4, "samples": 2, "shards": 2, "max_prompt_tokens": 24, "max_new_tokens": 12},
    "algorithm": {"kl": {"coef": 0.01}},
    "trainer": {"optimizer": {"lr": 1e-3}},
    "evaluation": {"every": 2, "prompts": 4, "samples": 2},
    "checkpoint": {"every": 2},
    "placement": {"threads": 1},
}


@pytest.fixture(scope="session")
def prefect_here(prefect_server: dict[str, str]) -> Iterator[str]:
    """This process talks to the session's Prefect server; the fixture's value is its address."""
    from prefect.settings import PREFECT_API_URL, PREFECT_HOME, temporary_settings

    with temporary_settings(
        {PREFECT_API_URL: prefect_server["PREFECT_API_URL"], PREFECT_HOME: Path(prefect_server["PREFECT_HOME"])}
    ):
        yield prefect_server["PREFECT_API_URL"]


@pytest.fixture()
def tiny(tmp_path: Path) -> Callable[..., RunConfig]:
    """Makes the smallest configuration that has every stage, with ``key=value`` overrides."""

    def make(*overrides: str) -> RunConfig:
        return make_config(TINY | {"store": {"uri": str(tmp_path / "store")}}, overrides)

    return make
