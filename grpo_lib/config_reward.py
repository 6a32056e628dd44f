"""How responses are scored."""

from pydantic import Field, JsonValue, model_validator

from grpo_lib.config_base import Section


class RewardFunctionConfig(Section):
    """One function of the reward: built in, a plugin's, or of the user's own file."""

    name: str = Field(min_length=1, description="Of a built-in function, or of the function in `path`.")
    path: str | None = Field(
        None, min_length=1, description="The user's file (my_reward.py) or module; null: a function that is built in."
    )
    weight: float = Field(1.0, description="The reward is the sum of weight times value over the functions.")
    kwargs: dict[str, JsonValue] = Field({}, description="The function's options.")
    data_sources: list[str] | None = Field(
        None, min_length=1, description="Judges the responses to prompts of these alone; null: of all."
    )


class RewardRunnerConfig(Section):
    """How reward functions run; it changes no value, so it is in no key."""

    processes: int = Field(1, ge=1, le=1024, description="Processes for functions of the user's own.")
    concurrency: int = Field(
        64, ge=1, le=65536, description="Samples that an async function judges at a time (in each worker)."
    )
    rate: float | None = Field(
        None, gt=0, description="Calls of an async function a second, at most (in each worker); null: no bound."
    )
    memory_gib: float = Field(4.0, gt=0, description="That a process of functions may take; one that wants more fails.")
    cache: bool = Field(True, description="What the run has judged before by the same function is not judged again.")


class RewardConfig(Section):
    """How responses are scored."""

    correct: float = Field(1.0, description="Reward of a right answer.")
    format_only: float = Field(0.1, description="Reward of a wrong answer in the right format.")
    functions: list[RewardFunctionConfig] = Field([], description="Empty: the problem's own function.")
    timeout_seconds: float = Field(
        10.0, gt=0, description="For one sample (of a batched function: for all); then its reward is null."
    )
    max_failed: float = Field(
        0.05, ge=0, le=1, description="The run stops when a larger fraction of a shard's rewards fails."
    )
    runner: RewardRunnerConfig = RewardRunnerConfig()

    @model_validator(mode="after")
    def _right_beats_wrong(self) -> "RewardConfig":
        if self.correct <= self.format_only:
            raise ValueError(
                f"correct={self.correct} must be above format_only={self.format_only}, or nothing rewards being right"
            )
        return self

    @model_validator(mode="after")
    def _names_are_given_once(self) -> "RewardConfig":
        names = [each.name for each in self.functions]
        doubled = sorted({name for name in names if names.count(name) > 1})
        for name in doubled:
            theirs = [each.data_sources for each in self.functions if each.name == name]
            sources = [source for each in theirs for source in each or ["*"]]
            if "*" in sources or len(set(sources)) < len(sources):
                raise ValueError(
                    f"functions: {name!r} stands there twice for the same data; its values would be one column"
                )
        if "correct" in names and len(set(names)) > 1:
            raise ValueError(
                "functions: among several none can be named 'correct': its values would stand in the column that says "
                "which answers are right; rename the function"
            )
        return self
