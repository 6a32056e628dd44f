"""The configuration of a retraining: what it learns from, and when its policy takes the champion's place."""

from typing import Literal

from pydantic import Field, model_validator

from grpo_lib.config import RunConfig
from grpo_lib.config_base import Section
from grpo_lib.config_data import FilesData

MODEL_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$"


class PromotionConfig(Section):
    """When the challenger takes the champion's place: all of it must hold, on the same held-out prompts."""

    mode: Literal["sampled", "greedy"] = Field("sampled", description="Which responses are compared.")
    min_gain: float = Field(
        0.01, ge=0, le=1, description="Accuracy that the challenger must gain, over all held-out prompts."
    )
    level: float = Field(
        0.05, gt=0, le=0.5, description="The one-sided p-value of the gain must be at most that (sign-flip test)."
    )
    max_regression: float = Field(
        0.02,
        ge=0,
        le=1,
        description="Accuracy that a source may lose; also within it a loss counts whose p-value is at most `level`.",
    )
    confidence: float = Field(0.95, gt=0.5, lt=1, description="Of the intervals that are shown.")


class RetrainConfig(Section):
    """A retraining of a registered model on the prompts that came since the last. Its section `train` is a run's
    configuration: prompt files arrive at `train.data.train`, those of `train.data.heldout` judge, and
    `train.model.path` is where the first champion starts."""

    model: str = Field(
        pattern=MODEL_NAME, description="MLflow's registered model; its alias `champion` is what is in use."
    )
    train: RunConfig = Field(
        description="The training. Prompt files arrive at data.train; data.heldout judges; model.path is where the "
        "first champion starts, and has the tokenizer."
    )
    replay: float = Field(
        0.0, ge=0, le=1, description="Share of the prompts that the champion has learned from that is trained on again."
    )
    min_prompts: int = Field(
        1, ge=1, description="With fewer new prompts, or fewer than train.rollout.prompts, there is nothing to do yet."
    )
    promotion: PromotionConfig = PromotionConfig()
    first_champion: Literal["better", "always"] = Field(
        "better",
        description="`better`: where there is no champion, the policy must be better than the one it started from, by "
        "the same rule; `always`: it is taken as it is.",
    )
    approval: Literal["auto", "manual"] = Field(
        "auto", description="`manual`: a person is asked before a challenger that passes the rule is promoted."
    )
    approval_hours: float = Field(
        72, gt=0, le=24 * 365, description="So long a person is waited for; then the challenger is refused."
    )
    when_busy: Literal["wait", "refuse"] = Field(
        "wait", description="What a second retraining of the model does while the first goes on."
    )
    wait_hours: float = Field(24, gt=0, le=24 * 365, description="So long the second waits; then it is refused.")

    @property
    def data(self) -> FilesData:
        """Where prompts arrive, and those that judge."""
        assert isinstance(self.train.data, FilesData)
        return self.train.data

    @property
    def prompts_needed(self) -> int:
        """New prompts with which there is something to do."""
        return max(self.min_prompts, self.train.rollout.prompts)

    @model_validator(mode="after")
    def _training_fits(self) -> "RetrainConfig":
        train, data = self.train, self.train.data
        if not isinstance(data, FilesData):
            raise ValueError(
                f"train.data.problem={data.problem}: new prompts come as files; set train.data.problem=files"
            )
        if not data.heldout:
            raise ValueError(
                "train.data.heldout is empty: champion and challenger need the same held-out prompts; name their files"
            )
        if train.model.path is None:
            raise ValueError(
                "train.model.path is null: prompts from files have no demonstrations for a warm start; name a model, "
                "e.g. the folder that `grpo export` writes"
            )
        taken = {
            "name": train.name,
            "branch": train.branch,
            "model.start": train.model.start,
            "tracking.registered_model": train.tracking.registered_model,
        }
        given = [f"train.{name}" for name, value in taken.items() if value is not None]
        if given:
            raise ValueError(f"{', '.join(given)}: a retraining sets that itself; leave it out")
        evaluation = train.evaluation
        if self.promotion.mode == "sampled" and evaluation.samples == 0:
            raise ValueError("promotion.mode=sampled, but train.evaluation.samples=0; raise it, or set mode=greedy")
        if self.promotion.mode == "greedy" and not evaluation.greedy:
            raise ValueError("promotion.mode=greedy, but train.evaluation.greedy=false; set it, or set mode=sampled")
        return self
