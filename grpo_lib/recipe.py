"""From the names in the ``algorithm`` section to functions, and what the choice asks of a run."""

from collections.abc import Iterable
from typing import Any

from grpo_lib.algorithms.advantages import ADVANTAGES
from grpo_lib.algorithms.aggregation import AGGREGATIONS
from grpo_lib.algorithms.filters import FILTERS
from grpo_lib.algorithms.groupings import GROUPINGS
from grpo_lib.algorithms.kl import KL_ESTIMATORS, full, kl_estimator
from grpo_lib.algorithms.losses import LOSSES
from grpo_lib.algorithms.metrics import METRICS
from grpo_lib.algorithms.registry import Entry, Registry
from grpo_lib.algorithms.rollout_correction import Importance, Rejection
from grpo_lib.config import RunConfig
from grpo_lib.config_algorithm import AlgorithmConfig, RolloutCorrectionConfig
from grpo_lib.errors import ConfigError
from grpo_lib.plugins import load_plugins, source_digests

REGISTRIES: dict[str, Registry[Any]] = {
    "advantage": ADVANTAGES,
    "loss": LOSSES,
    "aggregation": AGGREGATIONS,
    "kl.estimator": KL_ESTIMATORS,
    "grouping": GROUPINGS,
    "filters": FILTERS,
    "metrics": METRICS,
}
"""Every kind of function that a configuration names, by its setting in ``algorithm``."""


def check_algorithm(config: RunConfig) -> None:
    """Every name is known, every option fits, and the parts fit each other.

    Raises:
        ConfigError: naming the setting, the value and the remedy.
    """
    algorithm = config.algorithm
    load_plugins(algorithm.plugins)
    for setting, name, options in _named(algorithm):
        registry = REGISTRIES[setting]
        if name.removesuffix("+" if setting == "kl.estimator" else "") not in registry:
            registry[name]  # raises, with the nearest names
        if setting != "kl.estimator":
            has_options = setting in ("advantage", "loss")
            registry[name].bind(options, f"algorithm.{setting}_options" if has_options else f"algorithm.{setting}")
    kl = KL_ESTIMATORS[algorithm.kl.estimator.removesuffix("+")]
    if kl.function is not full and kl.columns != ("logprobs", "ref_logprobs"):
        raise ConfigError(
            f"algorithm.kl.estimator={algorithm.kl.estimator}: KL estimator {kl.name!r} takes {', '.join(kl.columns)}; "
            "one of your own takes logprobs, ref_logprobs"
        )
    if not full_kl(algorithm):
        kl_estimator(algorithm.kl.estimator)
    estimator = ADVANTAGES[algorithm.advantage]
    columns = {algorithm.advantage: estimator.columns}
    columns |= {each.name: FILTERS[each.name].columns for each in algorithm.filters}
    for name, wants in columns.items():
        if "group_ids" in wants and algorithm.grouping == "prompt" and config.rollout.samples < 2:
            raise ConfigError(
                f"rollout.samples={config.rollout.samples}: {name} compares the responses of a group and "
                "needs at least 2 (8 is usual)"
            )
    shaped = algorithm.kl.place == "reward" and algorithm.kl.coef > 0, algorithm.overlong.buffer_tokens is not None
    if any(shaped) and not {"rewards", "token_rewards"} & set(estimator.columns):
        raise ConfigError(
            f"algorithm.advantage={algorithm.advantage} does not read the reward, so "
            f"{'algorithm.kl.place=reward' if shaped[0] else 'algorithm.overlong.buffer_tokens'} would do nothing; "
            "remove that, or take another estimator"
        )
    several = config.rollout.shaped or config.rollout.partial is not None
    weighted = LOSSES[algorithm.loss].traits.get("takes_ratio", True) or algorithm.rollout_correction.rollout_is
    if several and algorithm.old_logprobs == "bypass" and not weighted:
        raise ConfigError(
            f"algorithm.loss={algorithm.loss} takes no ratio to what responses were drawn from, and with top_p, top_k, "
            "min_p, a penalty or rollout.partial that is not the policy that is trained; set "
            "algorithm.rollout_correction.rollout_is=token, or take algorithm.loss=ppo_clip"
        )
    if "selected" in LOSSES[algorithm.loss].columns and LOSSES[algorithm.loss].helper is None:
        raise ConfigError(f"algorithm.loss={algorithm.loss} wants `selected`, but was registered without a helper")
    if "sum_squared_probs" in estimator.columns and algorithm.old_logprobs == "bypass":
        raise ConfigError(
            f"algorithm.advantage={algorithm.advantage} needs the old policy's distribution, which the trainer "
            "computes with algorithm.old_logprobs=decoupled; set that"
        )
    if "values" in estimator.columns and config.critic is None:
        raise ConfigError(
            f"algorithm.advantage={algorithm.advantage} needs a critic's values; add a section `critic: {{}}`"
        )
    if "values" not in estimator.columns and config.critic is not None:
        raise ConfigError(
            f"critic is configured, but algorithm.advantage={algorithm.advantage} uses no values; take gae, or remove "
            "the section critic"
        )


def wanted(algorithm: AlgorithmConfig) -> frozenset[str]:
    """Columns that the estimator asks for by name."""
    return frozenset(ADVANTAGES[algorithm.advantage].columns)


def extra_stages(algorithm: AlgorithmConfig) -> frozenset[str]:
    """Stages of an iteration that not every algorithm asks for; ``sum_squared_probs`` is a column of `old_logprobs`,
    and ``exact_kl`` one that the update computes itself.
    """
    columns, kl = wanted(algorithm), algorithm.kl
    asked = {
        "old_logprobs": algorithm.old_logprobs == "decoupled",
        "sum_squared_probs": "sum_squared_probs" in columns,
        "ref_logprobs": kl.coef > 0 and not full_kl(algorithm),
        "exact_kl": kl.coef > 0 and full_kl(algorithm),
        "values": "values" in columns,
        "greedy_rollout": "greedy_rewards" in columns,
        "greedy_reward": "greedy_rewards" in columns,
    }
    return frozenset(name for name, is_asked in asked.items() if is_asked)


def full_kl(algorithm: AlgorithmConfig) -> bool:
    """Whether the KL is computed from the logits of both policies."""
    return bool(KL_ESTIMATORS[algorithm.kl.estimator.removesuffix("+")].traits.get("from_logits"))


def aggregation_of(algorithm: AlgorithmConfig) -> str:
    """The configured aggregation, or the one that the loss was made for."""
    return algorithm.aggregation or str(LOSSES[algorithm.loss].traits.get("aggregation", "token-mean"))


def correction_of(config: RolloutCorrectionConfig) -> dict[str, Any]:
    """Keyword arguments of ``rollout_correction.correct``."""
    importance = None
    if config.rollout_is is not None:
        importance = Importance(
            level=config.rollout_is,
            upper=config.is_upper,
            lower=config.is_lower,
            batch_normalize=config.batch_normalize,
        )
    rejections = [Rejection(kind=rule.kind, upper=rule.upper, lower=rule.lower) for rule in config.rejection]
    return {"importance": importance, "rejections": rejections, "veto": config.token_veto_threshold}


def plugin_digests(algorithm: AlgorithmConfig, *settings: str) -> dict[str, str]:
    """Digests of the user's own functions among those that the given settings name."""
    return source_digests(_entries(algorithm, settings))


def _entries(algorithm: AlgorithmConfig, settings: tuple[str, ...]) -> Iterable[Entry[Any]]:
    for setting, name, _ in _named(algorithm):
        if setting in settings:
            yield REGISTRIES[setting][name.removesuffix("+")]


def _named(algorithm: AlgorithmConfig) -> Iterable[tuple[str, str, dict[str, Any]]]:
    """Setting, name and options of every function of the configuration."""
    yield "advantage", algorithm.advantage, algorithm.advantage_options
    yield "loss", algorithm.loss, algorithm.loss_options
    yield "aggregation", aggregation_of(algorithm) if algorithm.loss in LOSSES else "token-mean", {}
    yield "kl.estimator", algorithm.kl.estimator, {}
    yield "grouping", algorithm.grouping, {}
    for each in algorithm.filters:
        yield "filters", each.name, each.options
    for name in algorithm.metrics:
        yield "metrics", name, {}
