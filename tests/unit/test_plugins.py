"""Functions of the user's own: found, loaded, used like ours, and part of the key of what they compute."""

import hashlib
import importlib
import math
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from grpo_lib.algorithms.advantages import ADVANTAGES
from grpo_lib.algorithms.filters import FILTERS
from grpo_lib.algorithms.groupings import GROUPINGS
from grpo_lib.algorithms.metrics import METRICS
from grpo_lib.config import RunConfig
from grpo_lib.config_files import make_config
from grpo_lib.data.advantages import AdvantagePlan, Overlong, advantage_table
from grpo_lib.data.iteration import Iteration
from grpo_lib.data.schemas import FLOATS, MASK, REWARDS, TOKENS
from grpo_lib.data.selection import Filter, selection_table
from grpo_lib.errors import ConfigError
from grpo_lib.plugins import GROUP, load_plugins, source_digests
from grpo_lib.recipe import REGISTRIES, check_algorithm, plugin_digests
from grpo_lib.storage.keys import ConfigView
from grpo_lib.training.updates import UPDATE, objective

Write = Callable[..., Path]
ESTIMATOR = """
from grpo_lib.algorithms.advantages import ADVANTAGES

@ADVANTAGES.register("own_half")
def own_half(rewards, *, part: float = 2.0):
    return rewards / part
"""
EVERYTHING = f"""
from dataclasses import replace
from functools import wraps
import numpy as np
import torch
from grpo_lib.algorithms.aggregation import AGGREGATIONS
from grpo_lib.algorithms.filters import FILTERS
from grpo_lib.algorithms.groupings import GROUPINGS
from grpo_lib.algorithms.kl import KL_ESTIMATORS
from grpo_lib.algorithms.losses import LOSSES, reinforce
from grpo_lib.algorithms.metrics import METRICS
{ESTIMATOR}
def first_token(draws, *, many: int = 1):
    return draws < draws.sort().values[many]

def twice(function):
    @wraps(function)
    def doubled(*arguments):
        return 2 * function(*arguments)
    return doubled

@LOSSES.register("own_loss", helper=first_token, aggregation="own_sum")
def own_loss(logprobs, old_logprobs, advantages, selected, *, scale: float = 1.0):
    loss = reinforce(logprobs, old_logprobs, advantages)
    return replace(loss, values=scale * loss.values * selected)

@AGGREGATIONS.register("own_sum")
def own_sum(mask):
    return 10 * mask.double()

@KL_ESTIMATORS.register("own_kl")
@twice
def own_kl(logprobs, ref_logprobs):
    return logprobs - ref_logprobs

@GROUPINGS.register("own_parity")
def own_parity(dataset_row):
    return dataset_row % 2

@FILTERS.register("own_first")
def own_first(rewards, group_ids):
    return torch.arange(len(rewards)) != 0

@METRICS.register("own_number")
def own_number(advantages, mask):
    return 100 * float(advantages[mask].sum())
"""


@pytest.fixture
def write_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes a module into the current folder; whatever it registers is gone after the test."""
    entries = {name: dict(registry._entries) for name, registry in REGISTRIES.items()}
    modules = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(text: str, name: str = "own_module") -> Path:
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        importlib.invalidate_caches()
        return path

    yield write
    for name, registry in REGISTRIES.items():
        registry._entries.clear()
        registry._entries.update(entries[name])
    for name in set(sys.modules) - modules:
        if name.startswith("own_"):
            del sys.modules[name]


def config_of(*overrides: str, **algorithm: Any) -> RunConfig:
    settings = {"data": {"problem": "countdown"}, "warm_start": {}, "algorithm": algorithm}
    return make_config(settings, overrides)


def iteration() -> Iteration:
    """Three prompts with two rows each."""
    ids = [f"0-{row // 2}-{row % 2}" for row in range(6)]
    values = [1.0, 0.0, 3.0, 2.0, 5.0, 4.0]
    rollouts = {
        "rollout_id": ids,
        "prompt_row": pa.array([0, 0, 1, 1, 2, 2], pa.int32()),
        "response_ids": pa.array([[7]] * 6, TOKENS),
        "response_mask": pa.array([[1]] * 6, MASK),
        "rollout_logprobs": pa.array([[-1.0]] * 6, FLOATS),
        "finish_reason": ["stop"] * 6,
    }
    rewards = {
        "rollout_id": ids,
        "value": values,
        "reason": pa.nulls(6, pa.string()),
        "components": pa.array([[]] * 6, REWARDS.field("components").type),
    }
    return Iteration(
        prompts=pa.table({"dataset_row": pa.array([4, 9, 2], pa.int64())}),
        rollouts=pa.table(rollouts),
        rewards=pa.table(rewards, schema=REWARDS),
    )


def plan(config: RunConfig) -> AdvantagePlan:
    algorithm = config.algorithm
    return AdvantagePlan(
        estimator=ADVANTAGES[algorithm.advantage].bind(algorithm.advantage_options, "algorithm.advantage_options"),
        grouping=GROUPINGS[algorithm.grouping],
        correction={},
        overlong=Overlong(max_length=10, buffer=None, penalty=1.0, mask_truncated=False),
        metrics=[(name, METRICS[name].function) for name in algorithm.metrics],
    )


# --- loading and using ------------------------------------------------------------------------------------------------


def test_functions_of_every_kind_are_loaded_by_name_and_used_like_ours(write_module: Write) -> None:
    write_module(EVERYTHING)
    config = config_of(
        plugins=["own_module"],
        advantage="own_half",
        advantage_options={"part": 4.0},
        loss="own_loss",
        loss_options={"scale": 3.0, "many": 2},
        kl={"estimator": "own_kl+", "coef": 0.5},
        grouping="own_parity",
        filters=["own_first"],
        metrics=["own_number", "group_std"],
    )
    check_algorithm(config)

    table, summary = advantage_table(iteration(), plan(config))
    assert table.column("advantages").to_pylist() == [[0.25], [0.0], [0.75], [0.5], [1.25], [1.0]]
    assert summary["metric/own_number"] == 375.0
    # Prompts 4 and 2 are one group, of rewards 1, 0, 5, 4; prompt 9 is the other.
    assert summary["metric/group_std"] == pytest.approx((4 * math.sqrt(17 / 3) + 2 * math.sqrt(0.5)) / 6)

    entry = FILTERS["own_first"]
    first = Filter(name=entry.name, function=entry.bind({}, "test"), resamples=False)
    selection, _ = selection_table(iteration(), [first], GROUPINGS["own_parity"], prompts_wanted=3, seed=0)
    assert selection.column("used").to_pylist() == [False] + [True] * 5

    made = objective(ConfigView(config, UPDATE))
    assert made.select is not None and made.kl is not None and made.kl.estimator is not None
    assert made.select(torch.tensor([0.3, 0.1, 0.2])).tolist() == [False, True, True]
    logprobs, old, advantages = torch.tensor([-1.0, -2.0]), torch.zeros(2), torch.tensor([1.0, 2.0])
    loss = made.policy_loss(logprobs, old, advantages, torch.tensor([True, False]))
    assert loss.values.tolist() == [3.0, 0.0]
    assert made.aggregation(torch.tensor([1, 0, 1]), torch.tensor([0, 3])).tolist() == [10.0, 0.0, 10.0]
    lp = torch.tensor([-1.0], requires_grad=True)
    kl = made.kl.estimator(lp, torch.tensor([-4.0]))
    kl.sum().backward()
    assert kl.tolist() == [6.0] and lp.grad is not None and lp.grad.tolist() == [3.0]  # twice 3; the gradient of k2


def test_options_of_a_function_of_one_s_own_are_checked_like_ours(write_module: Write) -> None:
    write_module(ESTIMATOR)
    config = config_of(plugins=["own_module"], advantage="own_half", advantage_options={"prat": 4.0})
    with pytest.raises(
        ConfigError, match=r"advantage_options\.prat: .*'own_half' has no such option; did you mean part"
    ):
        check_algorithm(config)


def test_a_module_is_loaded_once_however_often_it_is_named(write_module: Write) -> None:
    write_module(ESTIMATOR)
    for _ in range(2):
        load_plugins(["own_module", "own_module"])
    assert "own_half" in ADVANTAGES


def test_a_module_in_a_package_is_named_with_dots(write_module: Write) -> None:
    write_module("", "own_package/__init__")
    write_module(ESTIMATOR, "own_package/estimators")
    load_plugins(["own_package.estimators"])
    assert "own_half" in ADVANTAGES


def test_without_plugins_nothing_is_imported_and_the_path_stays(write_module: Write) -> None:
    write_module(ESTIMATOR)
    before = list(sys.path)
    load_plugins([])
    assert sys.path == before and "own_half" not in ADVANTAGES


# --- installed packages -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["own_module", "own_module:own_half"])
def test_an_installed_plugin_is_loaded_unasked(
    write_module: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str
) -> None:
    write_module(ESTIMATOR)
    monkeypatch.syspath_prepend(tmp_path)
    installed(monkeypatch, value)
    check_algorithm(config_of(advantage="own_half"))
    assert ADVANTAGES["own_half"].columns == ("rewards",)


def test_an_installed_plugin_that_is_broken_is_named(write_module: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "own_missing")
    with pytest.raises(ConfigError, match="the installed plugin 'theirs': there is no such module"):
        load_plugins([])


def installed(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    points = {GROUP: [EntryPoint(name="theirs", value=value, group=GROUP)]}
    monkeypatch.setattr("grpo_lib.plugins.entry_points", lambda group: points[group])


# --- what can go wrong ------------------------------------------------------------------------------------------------


def test_a_module_that_is_not_there_is_refused_with_what_to_do(write_module: Write) -> None:
    with pytest.raises(
        ConfigError, match=r"algorithm\.plugins: 'own_moduel': there is no such module; start in its folder"
    ):
        check_algorithm(config_of(plugins=["own_moduel"]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import own_missing_package", "algorithm.plugins: 'own_module' needs the module 'own_missing_package'"),
        ("1 / 0", "algorithm.plugins: 'own_module' fails when it is imported: ZeroDivisionError: division by zero"),
        ("def (", "algorithm.plugins: 'own_module' fails when it is imported: SyntaxError"),
        ("import numpy\nnumpy.nothing", "fails when it is imported: AttributeError"),
        ("from grpo_lib.seeds import nothing", "fails when it is imported: ImportError"),
    ],
)
def test_a_module_that_fails_is_refused_with_its_error(write_module: Write, text: str, message: str) -> None:
    write_module(text)
    with pytest.raises(ConfigError) as caught:
        load_plugins(["own_module"])
    assert message in str(caught.value)


def test_a_name_that_is_taken_is_refused_with_both_places(write_module: Write) -> None:
    path = write_module(ESTIMATOR.replace('"own_half"', '"grpo"'))
    with pytest.raises(ConfigError, match=r"advantage estimator 'grpo'.*is registered already.*another name") as caught:
        load_plugins(["own_module"])
    assert str(path) in str(caught.value) and "grpo_lib/algorithms/advantages.py" in str(caught.value)


def test_a_column_that_there_is_not_is_refused_with_the_nearest(write_module: Write) -> None:
    write_module(ESTIMATOR.replace("own_half(rewards", "own_half(reward"))
    with pytest.raises(ConfigError, match=r"'own_half'.*wants a column 'reward'; did you mean rewards"):
        load_plugins(["own_module"])


# --- keys -------------------------------------------------------------------------------------------------------------


def test_the_digest_is_that_of_the_file_as_it_was_loaded_and_a_changed_file_is_refused(write_module: Write) -> None:
    path = write_module(ESTIMATOR)
    load_plugins(["own_module"])
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert source_digests([ADVANTAGES["own_half"]]) == {"plugin/own_module": digest}
    path.write_text(ESTIMATOR.replace("2.0", "3.0"))
    with pytest.raises(ConfigError, match=r"own_module\.py was changed after this process had loaded it; start"):
        source_digests([ADVANTAGES["own_half"]])


def test_functions_of_ours_have_no_digest() -> None:
    for registry in REGISTRIES.values():
        assert source_digests(registry) == {}


def test_digests_are_of_the_functions_that_the_given_settings_name(write_module: Write) -> None:
    write_module(EVERYTHING)
    write_module(ESTIMATOR.replace("own_half", "own_third"), "own_other")
    plugins = ["own_module", "own_other"]
    load_plugins(plugins)
    ours, other = {"plugin/own_module"}, {"plugin/own_other"}
    algorithm = config_of(
        plugins=plugins, advantage="own_third", kl={"estimator": "own_kl+"}, loss="own_loss"
    ).algorithm
    assert plugin_digests(algorithm, "advantage", "grouping").keys() == other
    assert plugin_digests(algorithm, "loss").keys() == ours
    assert plugin_digests(algorithm, "aggregation").keys() == ours  # that of the loss
    assert plugin_digests(algorithm, "kl.estimator").keys() == ours  # the file of the function, not of its decorator
    assert plugin_digests(algorithm, "advantage", "loss").keys() == ours | other
    assert plugin_digests(algorithm, "grouping", "metrics", "filters") == {}
    assert plugin_digests(config_of(plugins=plugins).algorithm, *REGISTRIES) == {}


def test_the_digest_of_a_decorated_function_is_that_of_its_own_file(write_module: Write) -> None:
    write_module(
        "from functools import wraps\n"
        "def same(function):\n    return wraps(function)(lambda *columns: function(*columns))\n",
        "own_decorators",
    )
    path = write_module(f"from own_decorators import same\n{ESTIMATOR}".replace("\ndef own", "\n@same\ndef own"))
    load_plugins(["own_module"])
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert source_digests([ADVANTAGES["own_half"]]) == {"plugin/own_module": digest}


def test_a_loss_of_ours_with_a_helper_of_one_s_own_has_the_helper_s_digest(write_module: Write) -> None:
    write_module(
        "from grpo_lib.algorithms.losses import LOSSES, clip_cov\n"
        "def own_choice(draws):\n    return draws < 0.5\n"
        "LOSSES.register('own_cov', helper=own_choice)(clip_cov)\n"
    )
    load_plugins(["own_module"])
    assert plugin_digests(config_of(loss="own_cov").algorithm, "loss").keys() == {"plugin/own_module"}


def test_nothing_of_a_test_is_left_behind() -> None:
    for registry in REGISTRIES.values():
        assert not [name for name in registry.names() if name.startswith("own_")]
