"""From the ``algorithm`` section to functions: what is refused, what presets stand for."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from grpo_lib.algorithms.aggregation import AGGREGATIONS
from grpo_lib.algorithms.kl import KL_ESTIMATORS
from grpo_lib.algorithms.losses import LOSSES
from grpo_lib.algorithms.registry import Registry
from grpo_lib.algorithms.rollout_correction import REJECTION_KINDS, Importance, Rejection
from grpo_lib.config import RunConfig
from grpo_lib.config_algorithm import PRESETS, AlgorithmConfig, KlConfig, RejectionConfig, RolloutCorrectionConfig
from grpo_lib.config_files import make_config
from grpo_lib.errors import ConfigError
from grpo_lib.recipe import REGISTRIES, aggregation_of, check_algorithm, correction_of, full_kl, wanted
from grpo_lib.storage.keys import ConfigView
from grpo_lib.training.base import Objective
from grpo_lib.training.updates import UPDATE, objective

SMALLEST = {"data": {"problem": "countdown"}, "warm_start": {}}


def config_of(*overrides: str, **algorithm: Any) -> RunConfig:
    return make_config({**SMALLEST, "algorithm": algorithm}, overrides)


def objective_of(config: RunConfig) -> Objective:
    return objective(ConfigView(config, UPDATE))


def refused(*overrides: str, **algorithm: Any) -> str:
    """The message; the configuration itself is fine, what it names is not."""
    config = config_of(*overrides, **algorithm)
    with pytest.raises(ConfigError) as caught:
        check_algorithm(config)
    return str(caught.value)


def refused_by_the_config(*overrides: str, **algorithm: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        config_of(*overrides, **algorithm)
    return str(caught.value)


# --- names and options ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "parts"),
    [
        ({"advantage": "grop"}, ["advantage estimator 'grop'", "did you mean grpo"]),
        ({"loss": "ppo_clp"}, ["policy loss 'ppo_clp'", "did you mean ppo_clip"]),
        ({"aggregation": "token_mean"}, ["aggregation 'token_mean'", "token-mean"]),
        ({"kl": {"estimator": "k4"}}, ["KL estimator 'k4'", "known: abs, full, k1, k2, k3"]),
        ({"kl": {"estimator": "k4+"}}, ["KL estimator 'k4+'", "known: abs, full, k1, k2, k3"]),
        ({"kl": {"estimator": "k3++"}}, ["KL estimator 'k3++'", "did you mean k3"]),
        ({"grouping": "promt"}, ["grouping 'promt'", "did you mean prompt?"]),
        ({"filters": ["dynamic_sampling", "pf_pop"]}, ["filter 'pf_pop'", "did you mean pf_ppo?"]),
        ({"metrics": ["group_sdt"]}, ["metric 'group_sdt'", "did you mean group_std?"]),
        ({"advantage": "zzz"}, ["known: dr_grpo, gae, gdpo"]),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(algorithm: dict[str, Any], parts: list[str]) -> None:
    message = refused(**algorithm)
    for part in parts:
        assert part in message, message


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (
            {"loss_options": {"clip_lo": 0.1}},
            "algorithm.loss_options.clip_lo: policy loss 'ppo_clip' has no such option; did you mean clip_low",
        ),
        ({"loss_options": {"clip_low": 1.5}}, "algorithm.loss_options.clip_low=1.5: Input should be less than 1"),
        ({"loss_options": {"dual_clip": 1}}, "algorithm.loss_options.dual_clip=1: Input should be greater than 1"),
        (
            {"loss": "reinforce", "loss_options": {"clip_low": 0.1}},
            "algorithm.loss_options.clip_low: policy loss 'reinforce' has no such option; it has none",
        ),
        (
            {"loss": "kl_cov", "loss_options": {"kl_cov_ratio": 0}},  # of the loss's helper
            "algorithm.loss_options.kl_cov_ratio=0: Input should be greater than 0",
        ),
        ({"advantage_options": {"gamma": 1}}, "algorithm.advantage_options.gamma: advantage estimator 'grpo' has no"),
        (
            {"advantage": "reinforce_plus_plus", "advantage_options": {"gamma": 2}},
            "algorithm.advantage_options.gamma=2: Input should be less than or equal to 1",
        ),
        (
            {"filters": [{"name": "pf_ppo", "options": {"pwoer": 1}}]},
            "algorithm.filters.pwoer: filter 'pf_ppo' has no such option; did you mean power?",
        ),
        (
            {"filters": [{"name": "pf_ppo", "options": {"power": -1}}]},
            "algorithm.filters.power=-1: Input should be greater than or equal to 0",
        ),
    ],
)
def test_a_wrong_option_is_refused_by_the_setting_and_the_value(algorithm: dict[str, Any], message: str) -> None:
    assert refused(**algorithm).startswith(message)


@pytest.mark.parametrize("setting", REGISTRIES)
def test_every_registered_name_and_alias_passes(setting: str) -> None:
    registry: Registry[Any] = REGISTRIES[setting]
    for name in registry.names():
        algorithm: dict[str, Any] = {setting: [name] if setting in ("filters", "metrics") else name}
        if setting == "kl.estimator":
            algorithm = {"kl": {"estimator": name}}
        critic = ["critic={}"] if name == "gae" else []
        check_algorithm(config_of(*critic, **algorithm))


# --- what does not fit together ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opo", "grpo_passk", "gpg", "gdpo", "otb"])
def test_groups_of_one_response_are_refused_where_responses_are_compared(name: str) -> None:
    message = refused("rollout.samples=1", advantage=name)
    assert message.startswith(f"rollout.samples=1: {name} compares the responses of a group and needs at least 2")
    check_algorithm(config_of("rollout.samples=2", advantage=name))
    check_algorithm(config_of("rollout.samples=1", advantage=name, grouping="data_source"))


def test_groups_of_one_response_are_refused_where_a_filter_would_drop_them_all() -> None:
    settings: dict[str, Any] = {"advantage": "remax", "filters": ["pf_ppo", "dynamic_sampling"]}
    message = refused("rollout.samples=1", **settings)
    assert message.startswith("rollout.samples=1: dynamic_sampling compares the responses of a group")
    check_algorithm(config_of("rollout.samples=1", advantage="remax", filters=["pf_ppo"]))
    check_algorithm(config_of("rollout.samples=1", grouping="data_source", **settings))


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "remax", "gae"])
def test_one_response_a_prompt_is_enough_where_nothing_is_compared(name: str) -> None:
    check_algorithm(config_of("rollout.samples=1", *(["critic={}"] if name == "gae" else []), advantage=name))


@pytest.mark.parametrize("name", ["optimal_token_baseline", "otb"])
def test_a_baseline_of_the_old_policy_s_distribution_is_refused_in_bypass_mode(name: str) -> None:
    message = refused(advantage=name, old_logprobs="bypass")
    assert message.startswith(f"algorithm.advantage={name} needs the old policy's distribution")
    assert "algorithm.old_logprobs=decoupled" in message
    check_algorithm(config_of(advantage=name))


def test_values_and_critic_need_each_other() -> None:
    assert "needs a critic's values; add a section `critic: {}`" in refused(advantage="gae")
    message = refused("critic={}", advantage="rloo")
    assert "critic is configured, but algorithm.advantage=rloo uses no values" in message
    check_algorithm(config_of("critic={}", advantage="gae"))


def test_the_exact_kl_is_refused_in_the_reward_by_the_configuration() -> None:
    for name in ("full", "full+"):
        message = refused_by_the_config(kl={"estimator": name, "coef": 0.1, "place": "reward"})
        assert "algorithm.kl: estimator=full needs the logits, so it works in the loss only" in message


# --- what follows from the names --------------------------------------------------------------------------------------


def test_the_exact_kl_is_told_from_those_of_the_sampled_token() -> None:
    told = {name: full_kl(AlgorithmConfig(kl=KlConfig(estimator=name))) for name in ("k3", "k3+", "full", "full+")}
    assert told == {"k3": False, "k3+": False, "full": True, "full+": True}
    for name in told:
        check_algorithm(config_of(kl={"estimator": name, "coef": 0.1}))


def test_columns_that_cost_something_are_wanted_by_the_estimators_that_name_them() -> None:
    costly = {"greedy_rewards", "sum_squared_probs", "values"}
    found = {name: wanted(AlgorithmConfig(advantage=name)) & costly for name in ("grpo", "remax", "otb", "gae")}
    assert found == {"grpo": set(), "remax": {"greedy_rewards"}, "otb": {"sum_squared_probs"}, "gae": {"values"}}


@pytest.mark.parametrize("name", [entry.name for entry in LOSSES])
def test_without_an_aggregation_a_loss_has_its_own(name: str) -> None:
    by_row = {"gspo", "geo_mean"}
    assert aggregation_of(AlgorithmConfig(loss=name)) == ("seq-mean-token-mean" if name in by_row else "token-mean")
    for chosen in AGGREGATIONS.names():
        assert aggregation_of(AlgorithmConfig(loss=name, aggregation=chosen)) == chosen


def test_an_alias_of_a_loss_has_the_aggregation_of_the_loss() -> None:
    assert aggregation_of(AlgorithmConfig(loss="gmpo")) == "seq-mean-token-mean"


def test_the_correction_is_that_of_the_settings() -> None:
    config = RolloutCorrectionConfig(
        rollout_is="sequence",
        is_upper=4.0,
        is_lower=0.25,
        batch_normalize=True,
        rejection=[RejectionConfig(kind="geometric", upper=1.01), RejectionConfig(kind="seq_max_k3", upper=2.0)],
        token_veto_threshold=1e-3,
    )
    assert config.active
    assert correction_of(config) == {
        "importance": Importance(level="sequence", upper=4.0, lower=0.25, batch_normalize=True),
        "rejections": [Rejection(kind="geometric", upper=1.01), Rejection(kind="seq_max_k3", upper=2.0)],
        "veto": 1e-3,
    }
    assert correction_of(RolloutCorrectionConfig()) == {"importance": None, "rejections": [], "veto": None}
    assert not RolloutCorrectionConfig().active


def test_every_kind_of_rejection_can_be_configured() -> None:
    for kind in REJECTION_KINDS:
        (rule,) = correction_of(RolloutCorrectionConfig(rejection=[RejectionConfig(kind=kind, upper=2.0)]))[
            "rejections"
        ]
        assert rule == Rejection(kind=kind, upper=2.0)


# --- presets ----------------------------------------------------------------------------------------------------------

GEOMETRIC = {"rejection": [{"kind": "geometric", "lower": 0.999, "upper": 1.001}], "token_veto_threshold": 1e-4}
BY_HAND: dict[str, dict[str, Any]] = {
    "decoupled_token_is": {"rollout_correction": {"rollout_is": "token"}},
    "decoupled_seq_is": {"rollout_correction": {"rollout_is": "sequence"}},
    "decoupled_seq_is_rs": {
        "rollout_correction": {
            "rollout_is": "sequence",
            "rejection": [{"kind": "sequence", "lower": 0.5, "upper": 2.0}],
        }
    },
    "decoupled_geo_rs": {"rollout_correction": GEOMETRIC},
    "ppo_is_bypass": {"old_logprobs": "bypass"},
    "pg_is": {"old_logprobs": "bypass", "loss": "reinforce", "rollout_correction": {"rollout_is": "sequence"}},
    "pg_rs": {"old_logprobs": "bypass", "loss": "reinforce", "rollout_correction": GEOMETRIC},
    "disabled": {},
}


def without_preset(config: RunConfig) -> dict[str, Any]:
    values = config.model_dump(mode="json")
    del values["algorithm"]["rollout_correction"]["preset"]
    return values


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_the_combination_that_one_would_write_by_hand(name: str) -> None:
    assert BY_HAND.keys() == PRESETS.keys()
    preset, by_hand = config_of(rollout_correction={"preset": name}), config_of(**BY_HAND[name])
    check_algorithm(preset)
    assert without_preset(preset) == without_preset(by_hand)
    assert correction_of(preset.algorithm.rollout_correction) == correction_of(by_hand.algorithm.rollout_correction)
    ours, theirs = objective_of(preset), objective_of(by_hand)
    assert described(ours.policy_loss) == described(theirs.policy_loss)
    assert described(ours.correction) == described(theirs.correction)
    in_bypass = preset.algorithm.old_logprobs == "bypass"
    assert (ours.correction is not None) == (in_bypass and name != "ppo_is_bypass")


def described(function: Any) -> Any:
    return (function.func, function.args, function.keywords) if isinstance(function, partial) else function


@pytest.mark.parametrize("name", PRESETS)
def test_a_dumped_preset_validates_again_to_the_same(name: str) -> None:
    config = config_of(rollout_correction={"preset": name, "is_upper": 3.0})
    assert RunConfig.model_validate(config.model_dump(mode="json")) == config
    assert make_config(config.model_dump(mode="json")) == config


def test_bounds_may_be_set_beside_a_preset() -> None:
    config = config_of(
        rollout_correction={
            "preset": "decoupled_seq_is_rs",
            "is_upper": 5.0,
            "is_lower": 0.1,
            "rejection": [{"kind": "sequence", "upper": 9.0}],
        }
    )
    assert correction_of(config.algorithm.rollout_correction) == {
        "importance": Importance(level="sequence", upper=5.0, lower=0.1),
        "rejections": [Rejection(kind="sequence", upper=9.0)],
        "veto": None,
    }
    tighter = config_of(rollout_correction={"preset": "pg_rs", "token_veto_threshold": 0.01})
    assert correction_of(tighter.algorithm.rollout_correction)["veto"] == 0.01


def test_a_decoupled_preset_goes_with_any_loss_and_what_it_sets_may_be_said_again() -> None:
    assert config_of(loss="gspo", rollout_correction={"preset": "decoupled_seq_is"}).algorithm.loss == "gspo"
    said = config_of(old_logprobs="bypass", loss="reinforce", rollout_correction={"preset": "pg_is"})
    assert said == config_of(rollout_correction={"preset": "pg_is"})


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (
            {"old_logprobs": "bypass", "rollout_correction": {"preset": "decoupled_token_is"}},
            "preset decoupled_token_is is for old_logprobs=decoupled; remove old_logprobs=bypass",
        ),
        (
            {"old_logprobs": "decoupled", "rollout_correction": {"preset": "pg_is"}},
            "preset pg_is is for old_logprobs=bypass; remove old_logprobs=decoupled",
        ),
        (
            {"loss": "ppo_clip", "rollout_correction": {"preset": "pg_rs"}},
            "preset pg_rs is for loss=reinforce; remove loss=ppo_clip, or take another preset",
        ),
        (
            {"rollout_correction": {"preset": "decoupled_token_is", "rollout_is": "sequence"}},
            "rollout_correction contradicts preset decoupled_token_is",
        ),
        ({"rollout_correction": {"preset": "pg_is", "rollout_is": None}}, "contradicts preset pg_is"),
        ({"rollout_correction": {"preset": "disabled", "rollout_is": "token"}}, "contradicts preset disabled"),
        ({"rollout_correction": {"preset": "pg_rs", "rejection": []}}, "contradicts preset pg_rs"),
        ({"rollout_correction": {"preset": "pg_rs", "rejection": None}}, "contradicts preset pg_rs"),
        (
            {"rollout_correction": {"preset": "pg_rs", "rejection": [{"kind": "token", "upper": 2}]}},
            "contradicts preset pg_rs",
        ),
        ({"rollout_correction": {"preset": "decoupled_geo_rs", "token_veto_threshold": None}}, "contradicts preset"),
        ({"rollout_correction": {"preset": "pg_rs", "rejection": 5}}, "contradicts preset pg_rs"),
        ({"rollout_correction": {"preset": "decoupled"}}, "algorithm.rollout_correction.preset='decoupled'"),
        ({"rollout_correction": {"preset": ["pg_is"]}}, "algorithm.rollout_correction.preset=['pg_is']"),
        ({"rollout_correction": "pg_is"}, "algorithm.rollout_correction is a section with settings of its own"),
    ],
)
def test_what_contradicts_a_preset_is_refused(algorithm: dict[str, Any], message: str) -> None:
    assert message in refused_by_the_config(**algorithm)


def test_a_preset_in_an_object_is_expanded_like_one_in_a_file() -> None:
    made = AlgorithmConfig(rollout_correction=RolloutCorrectionConfig(preset="pg_is", is_upper=3.0))
    assert made == config_of(rollout_correction={"preset": "pg_is", "is_upper": 3.0}).algorithm
    assert made.loss == "reinforce"


# --- validators -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"kind": "token_k2", "upper": 1.0, "lower": 0.5}, "kind=token_k2 has no lower bound"),
        ({"kind": "sequence", "upper": 0.9}, "upper=0.9 of a ratio is below 1; set lower too, or upper to at least 1"),
        ({"kind": "token", "upper": 2.0, "lower": 2.0}, "lower=2.0 is not below upper=2.0"),
        ({"kind": "token", "upper": 0.0}, "rejection.0.upper=0.0: Input should be greater than 0"),
        ({"kind": "tokens", "upper": 2.0}, "rejection.0.kind='tokens'"),
        ({"kind": "token"}, "rejection.0.upper: must be given"),
    ],
)
def test_a_rejection_rule_that_can_t_be_is_refused(rule: dict[str, Any], message: str) -> None:
    assert message in refused_by_the_config(rollout_correction={"rejection": [rule]})


def test_a_ratio_may_be_bounded_below_1_with_a_lower_bound_and_a_divergence_may_be_small() -> None:
    rules = [{"kind": "token", "upper": 0.9, "lower": 0.1}, {"kind": "seq_mean_k3", "upper": 1e-3}]
    assert len(config_of(rollout_correction={"rejection": rules}).algorithm.rollout_correction.rejection) == 2


@pytest.mark.parametrize(
    ("kl", "message"),
    [
        ({"controller": "adaptive", "coef": 0.1}, "controller=adaptive steers a KL in the reward; set place=reward"),
        ({"place": "reward", "importance": True}, "importance=true corrects a KL in the loss; set place=loss"),
        ({"place": "reward", "controller": "adaptive"}, "controller=adaptive starts from `coef`, which is 0"),
        ({"coef": -0.1}, "algorithm.kl.coef=-0.1: Input should be greater than or equal to 0"),
        ({"place": "rewards"}, "algorithm.kl.place='rewards'"),
        ({"horizon": 0}, "algorithm.kl.horizon=0: Input should be greater than 0"),
    ],
)
def test_a_kl_that_can_t_be_is_refused(kl: dict[str, Any], message: str) -> None:
    assert message in refused_by_the_config(kl=kl)


@pytest.mark.parametrize(
    ("correction", "message"),
    [
        ({"rollout_is": "token", "is_lower": 2.0}, "is_lower=2.0 is not below is_upper=2.0"),
        ({"is_lower": 0.5}, "batch_normalize and is_lower shape importance weights; set rollout_is"),
        ({"batch_normalize": True}, "batch_normalize and is_lower shape importance weights; set rollout_is"),
        ({"rollout_is": "tokens"}, "algorithm.rollout_correction.rollout_is='tokens'"),
        ({"token_veto_threshold": 1.0}, "token_veto_threshold=1.0: Input should be less than 1"),
    ],
)
def test_a_correction_that_can_t_be_is_refused(correction: dict[str, Any], message: str) -> None:
    assert message in refused_by_the_config(rollout_correction=correction)


def test_bypass_mode_refuses_a_weight_on_top_of_the_ratio() -> None:
    weights = {"rollout_is": "token"}
    message = refused_by_the_config(old_logprobs="bypass", rollout_correction=weights)
    assert "old_logprobs=bypass with loss=ppo_clip" in message and "loss=reinforce" in message
    for name in ("reinforce", "gpg"):
        check_algorithm(config_of(old_logprobs="bypass", loss=name, rollout_correction=weights))


def test_bypass_mode_refuses_weights_over_the_mean_of_the_batch() -> None:
    weights = {"rollout_is": "token", "batch_normalize": True}
    message = refused_by_the_config(old_logprobs="bypass", loss="reinforce", rollout_correction=weights)
    assert "the batch's mean is not known; remove rollout_correction.batch_normalize" in message


# --- a KL of the user's own that could not be called right ------------------------------------------------------------


@pytest.fixture
def own_kl() -> Iterator[None]:
    yield
    KL_ESTIMATORS._entries.pop("own", None)


@pytest.mark.parametrize(
    ("function", "traits"),
    [
        (lambda logits, ref_logits: logits.sum(-1), {"from_logits": True}),  # the exact one would be computed instead
        (lambda logits, ref_logits: logits.sum(-1), {}),  # would get log-probs
        (lambda ref_logprobs, logprobs: logprobs - ref_logprobs, {}),  # would get them the wrong way round
        (lambda logprobs: logprobs, {}),
    ],
)
@pytest.mark.usefixtures("own_kl")
def test_a_kl_estimator_that_takes_other_columns_is_refused(function: Any, traits: dict[str, Any]) -> None:
    KL_ESTIMATORS.register("own", **traits)(function)
    for name in ("own", "own+"):
        message = refused(kl={"estimator": name, "coef": 0.1})
        assert message.startswith(f"algorithm.kl.estimator={name}: KL estimator 'own' takes ")
        assert message.endswith("one of your own takes logprobs, ref_logprobs")


# --- what would do nothing, or harm -----------------------------------------------------------------------------------


def test_what_an_estimator_does_not_read_is_refused_rather_than_ignored() -> None:
    in_reward = {"coef": 0.1, "place": "reward"}
    assert "gdpo does not read the reward, so algorithm.kl.place=reward" in refused(advantage="gdpo", kl=in_reward)
    message = refused(advantage="gdpo", overlong={"buffer_tokens": 8})
    assert "gdpo does not read the reward, so algorithm.overlong.buffer_tokens" in message
    check_algorithm(config_of(advantage="gdpo", kl={"coef": 0.1}))
    check_algorithm(config_of(advantage="reinforce_plus_plus", kl=in_reward, overlong={"buffer_tokens": 8}))


def test_a_horizon_shorter_than_an_iteration_would_turn_the_coefficient_s_sign() -> None:
    adaptive = {"coef": 0.1, "place": "reward", "controller": "adaptive", "horizon": 31}
    message = refused_by_the_config("rollout.prompts=4", "rollout.samples=8", kl=adaptive)
    assert "algorithm.kl.horizon=31" in message and "32 rows" in message
    config_of("rollout.prompts=4", "rollout.samples=8", kl=adaptive | {"horizon": 32})


def test_other_names_of_a_loss_stand_for_it_beside_presets_too() -> None:
    assert config_of(loss="vanilla").algorithm.loss == "ppo_clip"
    beside = config_of(loss="gpg", rollout_correction={"preset": "pg_is"})
    assert (beside.algorithm.loss, beside.algorithm.old_logprobs) == ("reinforce", "bypass")
    assert config_of(loss="vanilla", rollout_correction={"preset": "ppo_is_bypass"}).algorithm.loss == "ppo_clip"


def test_weights_of_no_component_are_refused_before_the_run() -> None:
    assert "at least 1 item" in refused(advantage="gdpo", advantage_options={"weights": {}})


def test_a_loss_that_wants_chosen_tokens_needs_a_helper_that_chooses() -> None:
    @LOSSES.register("chosen", formula="0", paper="-", use="a test")
    def chosen(logprobs: Any, selected: Any) -> Any:
        raise AssertionError("never called")

    try:
        assert "`selected`, but was registered without a helper" in refused(loss="chosen")
    finally:
        del LOSSES._entries["chosen"]
