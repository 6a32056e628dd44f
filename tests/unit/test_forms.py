"""What fills the form of `train` on Prefect's page."""

from pathlib import Path
from typing import Any

import pytest

from flows.cli.deploy import _values
from grpo_lib.config import RunConfig

CONFIGS = Path(__file__).parents[2] / "deployments" / "configs"
SCHEMA = RunConfig.model_json_schema()


def chosen(value: dict[str, Any]) -> str:
    """The problem that Prefect's form opens with: of most settings in common, the first."""
    names = [each["$ref"].rpartition("/")[2] for each in SCHEMA["properties"]["data"]["anyOf"]]
    return max(names, key=lambda name: len(value.keys() & SCHEMA["$defs"][name]["properties"].keys()))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("{problem: countdown}", "CountdownData"),
        ("{problem: expressions}", "ExpressionsData"),
        ("{problem: gsm8k, path: train.jsonl}", "Gsm8kData"),
        ("{problem: files, train: [train.jsonl]}", "FilesData"),
    ],
)
def test_the_form_opens_with_the_problem_of_the_configuration(data: str, expected: str) -> None:
    values = _values(CONFIGS / "demo.yaml", [f"data={data}", "evaluation.prompts=8"])
    assert values is not None and chosen(values["data"]) == expected
    assert RunConfig.model_validate(values).data.problem == values["data"]["problem"]


def test_other_settings_are_left_to_the_defaults_of_the_form() -> None:
    values = _values(CONFIGS / "demo.yaml", [])
    assert values is not None and values["warm_start"] == {} and "tracking" not in values
