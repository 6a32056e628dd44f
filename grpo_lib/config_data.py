"""Where prompts come from: the problems and their options."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from grpo_lib.config_base import Section, UrlWithoutSecrets


class CountdownOptions(Section):
    """Which puzzles there are, and how they are demonstrated."""

    problem: str = Field(description="Name of the problem.")
    numbers: int = Field(3, ge=2, le=6, description="How many numbers a puzzle has.")
    max_number: int = Field(33, ge=2, le=999, description="Numbers are 1..max_number.")
    max_target: int = Field(99, ge=1, le=9999, description="Targets are 0..max_target.")
    operators: str = Field("+-", description="Of + - * /")
    train_prompts: int = Field(16_000, ge=1, le=10_000_000, description="Puzzles to train on.")
    heldout_prompts: int = Field(
        1024, ge=1, le=10_000_000, description="Puzzles to evaluate on, none of them in training."
    )
    persistence: float = Field(0.2, ge=0, le=1, description="Fraction of demonstrations that go on until a try passes.")

    @model_validator(mode="after")
    def _operators_known(self) -> "CountdownOptions":
        wrong = sorted(set(self.operators) - set("+-*/"))
        if wrong or not self.operators or len(set(self.operators)) < len(self.operators):
            raise ValueError(f"operators={self.operators!r}: use some of + - * /, each at most once")
        return self


class CountdownData(CountdownOptions):
    """Reach a target from given numbers, each used once; puzzles are made on the spot."""

    problem: Literal["countdown"] = Field("countdown", description="Name of the problem.")


class CountdownCalculatorData(CountdownOptions):
    """Countdown with a calculator that does the arithmetic; with rollout.agent."""

    problem: Literal["countdown_calculator"] = Field("countdown_calculator", description="Name of the problem.")


class ExpressionsData(Section):
    """The value of a short arithmetic expression in which precedence matters."""

    problem: Literal["expressions"] = Field("expressions", description="Name of the problem.")
    operands: int = Field(4, ge=3, le=6, description="Operands of an expression.")
    max_operand: int = Field(9, ge=2, le=99, description="Operands are 1..max_operand.")
    max_value: int = Field(99, ge=1, le=9999, description="Values are 0..max_value, in either reading.")
    train_prompts: int = Field(16_000, ge=1, le=10_000_000, description="Expressions to train on.")
    heldout_prompts: int = Field(
        1024, ge=1, le=10_000_000, description="Expressions to evaluate on, none of them in training."
    )
    precedence: float = Field(0.3, ge=0, le=1, description="Fraction of demonstrations that respect precedence.")


class Gsm8kData(Section):
    """Grade-school word problems: jsonl files with `question` and `answer`."""

    problem: Literal["gsm8k"] = Field("gsm8k", description="Name of the problem.")
    path: str = Field(min_length=1, description="Training jsonl.")
    heldout_path: str | None = Field(
        None, description="Held-out jsonl; null takes test.jsonl beside `path` if it is there, else the last rows."
    )
    heldout_prompts: int = Field(1319, ge=1, description="At most so many held-out rows.")
    extraction: Literal["strict", "flexible"] = Field(
        "strict", description="strict: the number after ####; flexible: that or the last number."
    )


class FilesData(Section):
    """Prompts of the user's own: jsonl, Parquet or Arrow files, or data sets that Hugging Face saved to disk."""

    problem: Literal["files"] = Field("files", description="Name of the problem.")
    train: list[UrlWithoutSecrets] = Field(
        min_length=1, description="Files, folders (all files in them), patterns (data/*.jsonl) or s3:// prefixes."
    )
    heldout: list[UrlWithoutSecrets] = Field(
        [], description="The same for evaluation; empty: the last rows of `train`."
    )
    heldout_prompts: int = Field(512, ge=1, description="At most so many held-out rows.")
    endpoint_url: UrlWithoutSecrets | None = Field(None, description="S3 endpoint, for services other than AWS.")
    columns: dict[Literal["prompt", "reference", "data_source", "prompt_id", "demonstration"], str] = Field(
        {}, description="Names of the files' columns where they are others, e.g. {prompt: question}."
    )
    name: str = Field("files", min_length=1, description="`data_source` of prompts without one.")
    needs_reference: bool = Field(True, description="A prompt without a reference is refused.")
    duplicates: Literal["drop", "refuse", "keep"] = Field(
        "drop", description="Prompts that stand there again; of both splits the held-out one stays."
    )


def _form(schema: dict[str, Any]) -> None:
    """Forms made from the schema offer the variants of ``anyOf`` one by one, those of ``oneOf`` as bare JSON."""
    schema["anyOf"] = schema.pop("oneOf")
    schema.pop("discriminator")


DataConfig = Annotated[
    CountdownData | CountdownCalculatorData | ExpressionsData | Gsm8kData | FilesData,
    Field(discriminator="problem", json_schema_extra=_form),
]
DATA_SECTIONS: tuple[type[Section], ...] = (
    CountdownData,
    CountdownCalculatorData,
    ExpressionsData,
    Gsm8kData,
    FilesData,
)
