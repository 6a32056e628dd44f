import pytest

from grpo_lib.algorithms.advantages import ADVANTAGES
from grpo_lib.algorithms.aggregation import AGGREGATIONS
from grpo_lib.algorithms.kl import KL_ESTIMATORS
from grpo_lib.algorithms.losses import LOSSES
from grpo_lib.algorithms.registry import Registry
from grpo_lib.config import AlgorithmConfig, KlConfig
from grpo_lib.errors import ConfigError


def test_a_function_is_found_under_its_name() -> None:
    registry: Registry = Registry("greeting")

    @registry.register("hello")
    def hello() -> str:
        return "hello"

    assert registry["hello"] is hello
    assert registry.names() == ["hello"]


def test_a_name_that_is_nearly_right_is_answered_with_the_right_one() -> None:
    with pytest.raises(ConfigError, match=r"unknown advantage estimator 'drgrpo'; did you mean dr_grpo"):
        ADVANTAGES["drgrpo"]


def test_a_name_far_off_is_answered_with_all_names() -> None:
    with pytest.raises(ConfigError, match=r"unknown KL estimator 'zzz'; known: k1, k2, k3"):
        KL_ESTIMATORS["zzz"]


def test_a_name_is_given_once() -> None:
    registry: Registry = Registry("greeting")
    registry.register("hello")(lambda: 1)
    with pytest.raises(AssertionError, match="greeting 'hello' is registered twice"):
        registry.register("hello")(lambda: 2)
    assert registry["hello"]() == 1


@pytest.mark.parametrize(
    ("registry", "section", "field"),
    [
        (ADVANTAGES, AlgorithmConfig, "advantage"),
        (LOSSES, AlgorithmConfig, "loss"),
        (AGGREGATIONS, AlgorithmConfig, "aggregation"),
        (KL_ESTIMATORS, KlConfig, "estimator"),
    ],
)
def test_the_configuration_takes_just_the_names_that_are_registered(
    registry: Registry, section: type[AlgorithmConfig | KlConfig], field: str
) -> None:
    assert sorted(section.model_json_schema()["properties"][field].get("enum", [LOSSES.names()[0]])) == registry.names()
