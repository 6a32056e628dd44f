"""The ``algorithm`` section: names of functions with their options. `grpo show algorithms` lists what there is.

A name is a string, not a choice, because a user's own module may register more. What names and options mean is
checked by ``grpo_lib.recipe`` before anything expensive starts.
"""

from typing import Any, Literal

from pydantic import Field, JsonValue, model_validator

from grpo_lib.config_base import Section

Options = dict[str, JsonValue]


class KlConfig(Section):
    """KL penalty against the reference policy (the policy that the run started from)."""

    estimator: str = Field("k3", description="k1, abs, k2, k3, full or a plugin's; with + the gradient is that of k2.")
    coef: float = Field(0.0, ge=0, description="0 switches the penalty and the ref_logprobs stage off.")
    place: Literal["loss", "reward"] = Field(
        "loss", description="A term of the loss (GRPO), or taken off the reward of each token (PPO)."
    )
    controller: Literal["fixed", "adaptive"] = Field(
        "fixed", description="adaptive (place=reward only): the coefficient follows the KL to `target`."
    )
    target: float = Field(0.1, gt=0, description="Adaptive: the KL aimed at, in nats a token.")
    horizon: float = Field(10_000, gt=0, description="Adaptive: rows in which the coefficient may change by a fifth.")
    importance: bool = Field(
        False, description="Multiply the penalty by the ratio to the old policy (place=loss; off-policy batches)."
    )

    @model_validator(mode="after")
    def _fits(self) -> "KlConfig":
        if self.place == "loss" and self.controller == "adaptive":
            raise ValueError("controller=adaptive steers a KL in the reward; set place=reward, or controller=fixed")
        if self.place == "reward" and self.importance:
            raise ValueError("importance=true corrects a KL in the loss; set place=loss, or importance=false")
        if self.place == "reward" and self.estimator.removesuffix("+") == "full":
            raise ValueError("estimator=full needs the logits, so it works in the loss only; set place=loss or take k1")
        if self.controller == "adaptive" and self.coef == 0:
            raise ValueError("controller=adaptive starts from `coef`, which is 0; give it a first value, e.g. 0.05")
        return self


class RejectionConfig(Section):
    """A rule that leaves out tokens or rows whose probability differs too much between engine and trainer."""

    kind: Literal[
        "token", "sequence", "geometric",
        "token_k2", "seq_sum_k2", "seq_mean_k2", "seq_max_k2",
        "token_k3", "seq_sum_k3", "seq_mean_k3", "seq_max_k3",
    ] = Field(description="What is bounded: a ratio (the first three) or a divergence.")  # fmt: skip
    upper: float = Field(gt=0, description="Upper bound.")
    lower: float | None = Field(None, ge=0, description="Lower bound of a ratio; null: 1 / upper.")

    @model_validator(mode="after")
    def _bounds_fit(self) -> "RejectionConfig":
        ratio = self.kind in ("token", "sequence", "geometric")
        if not ratio and self.lower is not None:
            raise ValueError(f"kind={self.kind} has no lower bound: a divergence of 0 is as it should be; remove lower")
        if ratio and self.lower is None and self.upper < 1:
            raise ValueError(f"upper={self.upper} of a ratio is below 1; set lower too, or upper to at least 1")
        if self.lower is not None and self.lower >= self.upper:
            raise ValueError(f"lower={self.lower} is not below upper={self.upper}")
        return self


class RolloutCorrectionConfig(Section):
    """What is done where engine and trainer differ. Without any of it their mismatch is only measured."""

    preset: (
        Literal[
            "decoupled_token_is", "decoupled_seq_is", "decoupled_seq_is_rs", "decoupled_geo_rs",
            "ppo_is_bypass", "pg_is", "pg_rs", "disabled",
        ]
        | None
    ) = Field(None, description="A known combination; sets old_logprobs, loss and the settings below.")  # fmt: skip
    rollout_is: Literal["token", "sequence"] | None = Field(None, description="Importance weights; null: none.")
    is_upper: float = Field(2.0, gt=0, description="Weights are cut to it.")
    is_lower: float | None = Field(
        None, ge=0, description="IcePop: weights outside [is_lower, is_upper] are 0 instead of cut."
    )
    batch_normalize: bool = Field(False, description="Divide the weights by their mean.")
    rejection: list[RejectionConfig] = Field([], description="Rules that a token or row must pass, all of them.")
    token_veto_threshold: float | None = Field(
        None, gt=0, lt=1, description="A row with a token of a smaller ratio is dropped, e.g. 1e-4."
    )

    @model_validator(mode="after")
    def _fits(self) -> "RolloutCorrectionConfig":
        if self.is_lower is not None and self.is_lower >= self.is_upper:
            raise ValueError(f"is_lower={self.is_lower} is not below is_upper={self.is_upper}")
        if self.rollout_is is None and (self.batch_normalize or self.is_lower is not None):
            raise ValueError(
                "batch_normalize and is_lower shape importance weights; set rollout_is to token or sequence"
            )
        return self

    @property
    def active(self) -> bool:
        """Whether anything is done, not only measured."""
        return bool(self.rollout_is or self.rejection or self.token_veto_threshold)


LOSS_ALIASES = {"vanilla": "ppo_clip", "gpg": "reinforce"}
"""Of the losses that presets name; the registry knows the same."""
GEOMETRIC: dict[str, Any] = {
    "rejection": [{"kind": "geometric", "lower": 0.999, "upper": 1.001}],
    "token_veto_threshold": 1e-4,
}
SEQUENCE: dict[str, Any] = {"rejection": [{"kind": "sequence", "lower": 0.5, "upper": 2.0}]}
PRESETS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "decoupled_token_is": ("decoupled", "ppo_clip", {"rollout_is": "token"}),
    "decoupled_seq_is": ("decoupled", "ppo_clip", {"rollout_is": "sequence"}),
    "decoupled_seq_is_rs": ("decoupled", "ppo_clip", {"rollout_is": "sequence", **SEQUENCE}),
    "decoupled_geo_rs": ("decoupled", "ppo_clip", GEOMETRIC),
    "ppo_is_bypass": ("bypass", "ppo_clip", {}),
    "pg_is": ("bypass", "reinforce", {"rollout_is": "sequence"}),
    "pg_rs": ("bypass", "reinforce", GEOMETRIC),
    "disabled": ("decoupled", "ppo_clip", {}),
}
"""Mode of the old log-probs, policy loss and correction of each preset. Bounds may be set beside a preset."""


class FilterConfig(Section):
    """A filter of an iteration's rows."""

    name: str = Field(description="Of the filter.")
    options: Options = Field({}, description="Its options.")

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value


class OverlongConfig(Section):
    """What becomes of responses that are too long."""

    buffer_tokens: int | None = Field(
        None, ge=1, description="The reward falls over the last so many tokens before max_new_tokens; null: not."
    )
    penalty: float = Field(1.0, ge=0, description="Taken off the reward of a response of max_new_tokens.")
    mask_truncated: bool = Field(
        False, description="Take responses that were cut out of the loss; they count as baseline."
    )


class AlgorithmConfig(Section):
    """The mathematics: names of functions (`grpo show algorithms`) and their options."""

    advantage: str = Field("grpo", description="Advantage estimator.")
    advantage_options: Options = Field({}, description="Its options, e.g. {gamma: 0.99}.")
    grouping: str = Field("prompt", description="Which responses are compared with each other.")
    loss: str = Field("ppo_clip", description="Policy loss.")
    loss_options: Options = Field({}, description="Its options, e.g. {clip_low: 0.2, clip_high: 0.28}.")
    aggregation: str | None = Field(
        None, description="From token losses to one number; null: the loss's own (mostly token-mean)."
    )
    kl: KlConfig = KlConfig()
    entropy_coef: float = Field(0.0, ge=0, description="Weight of the entropy bonus.")
    old_logprobs: Literal["decoupled", "bypass"] = Field(
        "decoupled", description="decoupled: the trainer recomputes them; bypass: the engine's are taken."
    )
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    filters: list[FilterConfig] = Field(
        [],
        description="Which rows are used, in order, e.g. [dynamic_sampling] or [{name: pf_ppo, options: {power: 3}}].",
    )
    overlong: OverlongConfig = OverlongConfig()
    metrics: list[str] = Field([], description="More numbers of the advantage stage, e.g. [group_std].")
    plugins: list[str] = Field(
        [], description="Modules that register functions of your own; the current folder is searched too."
    )

    @model_validator(mode="before")
    @classmethod
    def _expand_preset(cls, values: Any) -> Any:
        """A preset fills in what is not given; what contradicts it is refused."""
        if isinstance(values, dict) and values.get("loss") in LOSS_ALIASES:
            values = values | {"loss": LOSS_ALIASES[values["loss"]]}
        correction = values.get("rollout_correction") if isinstance(values, dict) else None
        if isinstance(correction, RolloutCorrectionConfig):
            correction = correction.model_dump(exclude_unset=True)
        name = correction.get("preset") if isinstance(correction, dict) else None
        if not isinstance(name, str) or name not in PRESETS or not isinstance(correction, dict):
            return values
        mode, loss, settings = PRESETS[name]
        if values.get("old_logprobs", mode) != mode:
            raise ValueError(f"preset {name} is for old_logprobs={mode}; remove old_logprobs={values['old_logprobs']}")
        if mode == "bypass" and values.get("loss", loss) != loss:
            raise ValueError(f"preset {name} is for loss={loss}; remove loss={values['loss']}, or take another preset")
        filled = settings | correction
        if _shape(filled) != _shape(settings):
            raise ValueError(
                f"rollout_correction contradicts preset {name}, which has {_shape(settings)}; beside a preset only "
                "bounds may be set: remove the preset, or what it does not have"
            )
        return {"old_logprobs": mode, "loss": loss} | values | {"rollout_correction": filled}

    @model_validator(mode="after")
    def _fits(self) -> "AlgorithmConfig":
        correction = self.rollout_correction
        if self.old_logprobs == "bypass":
            if correction.rollout_is and self.loss != "reinforce":
                raise ValueError(
                    f"old_logprobs=bypass with loss={self.loss}: its ratio is to the engine's policy already, a weight "
                    "on top would count the difference twice; remove rollout_correction.rollout_is, or take "
                    "old_logprobs=decoupled, or loss=reinforce"
                )
            if correction.batch_normalize:
                raise ValueError(
                    "old_logprobs=bypass computes weights in each micro-batch, where the batch's mean is not known; "
                    "remove rollout_correction.batch_normalize, or take old_logprobs=decoupled"
                )
        return self


def _shape(correction: dict[str, Any]) -> dict[str, Any]:
    """What of a correction a preset fixes."""
    rules = correction.get("rejection") or []
    if isinstance(rules, list):
        rules = [rule.get("kind") if isinstance(rule, dict) else rule for rule in rules]
    return {
        "rollout_is": correction.get("rollout_is"),
        "rejection": rules,
        "veto": correction.get("token_veto_threshold") is not None,
    }
