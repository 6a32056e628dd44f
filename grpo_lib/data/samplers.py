"""Curricula: which prompts come next, by what the run has learned of them.

A sampler is a class of two methods. What it knows is a table that a stage commits in every iteration, so that it is
made anew wherever it is asked, and a rerun or a branch draws as the run did. To add one, put
``@SAMPLERS.register("name")`` above it, or name its file (``rollout.sampler: {path: my_sampler.py, name: MySampler}``).
Options are keyword-only parameters of its ``__init__``.
"""

from collections.abc import Callable
from typing import Annotated, Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from grpo_lib.algorithms.registry import Entry, Option, Registry
from grpo_lib.config_rollout import SamplerConfig
from grpo_lib.data.columns import flat_column, same_rows
from grpo_lib.data.iteration import component_matrix
from grpo_lib.errors import ConfigError, DataError
from grpo_lib.plugins import load_function, load_plugins, source_digests
from grpo_lib.types import CORRECT


class Sampler(Protocol):
    """Weighs prompts."""

    def weights(self, state: pa.Table | None, prompts: pa.Table) -> NDArray[np.float64]:
        """How likely each prompt is to be drawn next, relative to the others; 0: never.

        Args:
            state: what `learn` returned last; None before anything was learned.
            prompts: the training split (`grpo_lib.data.schemas.DATASET`).

        Returns:
            ``float64[prompts]``, finite and not negative.
        """
        ...

    def learn(self, state: pa.Table | None, outcomes: pa.Table) -> pa.Table:
        """What is known after one more iteration.

        Args:
            outcomes: see `outcomes_of`; no rows where nothing of the iteration has a reward.
        """
        ...


SAMPLERS: Registry[Callable[..., Sampler]] = Registry("sampler", columns={})


@SAMPLERS.register(
    "pass_rate",
    formula="w = floor + (1 - floor) 4 p (1 - p), p <- memory p + (1 - memory) passed; w = 1 where p is unknown",
    use="prompts that are sometimes solved: neither those that always are nor those that never are",
)
class PassRate:
    """By the recent pass rate of each prompt. The variance of a pass, p (1 - p), is what groups learn from."""

    def __init__(
        self,
        *,
        memory: Annotated[
            float, Option(ge=0, lt=1, description="Of earlier pass rates; 0: the last alone counts.")
        ] = 0.5,
        floor: Annotated[float, Option(gt=0, le=1, description="Smallest weight: what was learned may be lost.")] = 0.1,
        passes: Annotated[
            float, Option(description="A reward so high is a pass, where reward functions give no `correct`.")
        ] = 0.5,
    ) -> None:
        self._memory, self._floor, self._passes = memory, floor, passes

    def weights(self, state: pa.Table | None, prompts: pa.Table) -> NDArray[np.float64]:
        weights = np.ones(prompts.num_rows)
        if state is not None:
            rate = flat_column(state, "pass_rate").numpy()
            weights[flat_column(state, "dataset_row").numpy()] = self._floor + (1 - self._floor) * 4 * rate * (1 - rate)
        return weights

    def learn(self, state: pa.Table | None, outcomes: pa.Table) -> pa.Table:
        """
        >>> sampler = PassRate()
        >>> solved = pa.table({"dataset_row": [4, 4], "reward": [1.0, 1.0], "correct": [1.0, 1.0]})
        >>> halved = pa.table({"dataset_row": [4, 4], "reward": [1.0, 0.0], "correct": [1.0, 0.0]})
        >>> sampler.learn(sampler.learn(None, solved), halved).to_pylist()
        [{'dataset_row': 4, 'pass_rate': 0.75}]
        """
        passed = pc.coalesce(outcomes["correct"], pc.cast(pc.greater_equal(outcomes["reward"], self._passes), "double"))
        rows = pa.table({"dataset_row": outcomes["dataset_row"], "now": passed})
        now = rows.group_by("dataset_row", use_threads=False).aggregate([("now", "mean")])
        if state is None:
            state = pa.table({"dataset_row": pa.array([], pa.int64()), "pass_rate": pa.array([], pa.float64())})
        both = state.join(now, "dataset_row", join_type="full outer", use_threads=False).sort_by("dataset_row")
        known, fresh = both["pass_rate"], both["now_mean"]
        mixed = pc.add(pc.multiply(known, self._memory), pc.multiply(fresh, 1 - self._memory))
        return pa.table({"dataset_row": both["dataset_row"], "pass_rate": pc.coalesce(mixed, fresh, known)})


def make_sampler(config: SamplerConfig, plugins: list[str]) -> Sampler:
    """The configured sampler.

    Raises:
        ConfigError: there is no such class or option, or it lacks a method.
    """
    sampler = _entry(config, plugins).bind(config.kwargs, "rollout.sampler.kwargs")()
    for method in ("weights", "learn"):
        if not callable(getattr(sampler, method, None)):
            raise ConfigError(f"rollout.sampler: {config.name} has no method {method}; see docs/rewards.md")
    return sampler


def sampler_digests(config: SamplerConfig | None, plugins: list[str]) -> dict[str, str]:
    """Of the user's own class: part of the key of what it says."""
    return {} if config is None else source_digests([_entry(config, plugins)])


def outcomes_of(prompts: pa.Table, rollouts: pa.Table, rewards: pa.Table) -> pa.Table:
    """What samplers learn from: ``dataset_row``, ``reward`` and ``correct`` (null where reward functions don't give it)
    of every response with a reward.
    """
    same_rows(rollouts, rewards, "reward")
    names, values = component_matrix(rewards)
    correct = values[names.index(CORRECT)].numpy() if CORRECT in names else np.full(rewards.num_rows, np.nan)
    table = pa.table(
        {
            "dataset_row": prompts["dataset_row"].take(rollouts["prompt_row"].combine_chunks()),
            "reward": rewards["value"],
            "correct": pa.array(correct, from_pandas=True),
        }
    )
    return table.filter(pc.is_valid(table["reward"]))


def sampler_weights(sampler: Sampler, state: pa.Table | None, train: pa.Table) -> NDArray[np.float64]:
    """What the sampler says, checked.

    Raises:
        DataError: it raises, or is not a weight for each prompt.
    """
    name = type(sampler).__name__
    try:
        weights = np.asarray(sampler.weights(state, train), dtype=np.float64)
    except Exception as error:
        raise DataError(f"rollout.sampler: {name}.weights raised {type(error).__name__}: {error}") from error
    if weights.shape != (train.num_rows,):
        raise DataError(f"rollout.sampler: {name}.weights gave {weights.shape} numbers for {train.num_rows} prompts")
    wrong = ~np.isfinite(weights) | (weights < 0)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise DataError(
            f"rollout.sampler: {name}.weights gave prompt {train['prompt_id'][row].as_py()!r} {weights[row]}; a weight "
            "is finite, 0 or more"
        )
    return weights


def effective_fraction(weights: NDArray[np.float64]) -> float:
    """How many prompts a draw chooses from, of all: (sum w)^2 / (n sum w^2); 1 where all weigh the same."""
    return float(weights.sum() ** 2 / (len(weights) * np.square(weights).sum())) if weights.any() else 0.0


def draw(weights: NDArray[np.float64], *, first: int, count: int, seed: int) -> NDArray[np.int64]:
    """Places ``first .. first + count - 1`` of a weighted shuffle: no row twice, and none of weight 0.

    Efraimidis and Spirakis, Weighted random sampling with a reservoir, 2006: sort by log(u) / w.

    >>> sorted(draw(np.array([0.0, 1.0, 0.0, 1.0]), first=0, count=2, seed=1).tolist())
    [1, 3]

    Raises:
        DataError: too few are above 0.
    """
    able = np.flatnonzero(weights)
    if len(able) < first + count:
        raise DataError(
            f"rollout.sampler gives {len(able)} prompts a weight above 0, and {first + count} are asked for; lower "
            "rollout.prompts, or have it weigh more of them"
        )
    uniform = np.random.default_rng(seed).random(len(weights))[able]
    order = able[np.argsort(-np.log1p(-uniform) / weights[able], kind="stable")]
    return order[first : first + count]


def _entry(config: SamplerConfig, plugins: list[str]) -> Entry[Any]:
    load_plugins(plugins)
    if config.path is None:
        return SAMPLERS[config.name]
    registry: Registry[Any] = Registry("sampler", columns={})
    registry.register(config.name)(load_function(f"{config.path}:{config.name}", "rollout.sampler"))
    return registry[config.name]
