"""What `grpo deploy` fills into the forms."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.cli.deploy import _fill, _values, code_version
from grpo_lib.config import RunConfig

CONFIGS = Path(__file__).parents[2] / "deployments" / "configs"
SCHEMA = RunConfig.model_json_schema()
FILE = Path(__file__).parents[2] / "deployments" / "prefect.yaml"


def retrain(retraining: dict[str, Any] | None, **own: Any) -> dict[str, Any]:
    """The deployment of that name, filled."""
    plan = yaml.safe_load(FILE.read_text())
    (found,) = (each for each in plan["deployments"] if each["name"] == "retrain")
    found |= own
    _fill(plan, {}, None, [], retraining)
    return dict(found)


def test_arrivals_start_the_retraining_of_their_own_model_and_of_no_other() -> None:
    (trigger,) = retrain({"model": "letters"})["triggers"]
    assert trigger["match"] == {"prefect.resource.id": "grpo.retraining.letters"}
    assert trigger["expect"] == ["grpo.prompts.arrived"]


def test_without_settings_no_arrival_starts_a_retraining() -> None:
    assert "triggers" not in retrain(None)


def test_a_form_that_is_filled_in_the_file_has_the_last_word_and_other_triggers_stay() -> None:
    other = {"match": {"prefect.resource.id": "mine"}, "expect": ["mine"]}
    arrivals = {"match": {}, "expect": ["grpo.prompts.arrived"]}
    found = retrain({"model": "letters"}, parameters={"config": {"model": "digits"}}, triggers=[other, arrivals])
    assert found["parameters"] == {"config": {"model": "digits"}}
    assert [each["match"]["prefect.resource.id"] for each in found["triggers"]] == ["mine", "grpo.retraining.digits"]


def test_an_image_says_what_it_was_built_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_COMMIT", "0123456789ab")
    assert code_version() == "0123456789ab"
    monkeypatch.setenv("GRPO_COMMIT", "")  # an image without it
    assert code_version() not in ("", "0123456789ab")


def chosen(value: dict[str, Any]) -> str:
    """The problem that Prefect's form opens with: of most settings in common, the first."""
    names = [each["$ref"].rpartition("/")[2] for each in SCHEMA["properties"]["data"]["anyOf"]]
    return max(names, key=lambda name: len(value.keys() & SCHEMA["$defs"][name]["properties"].keys()))


@pytest.mark.parametrize(
    ("data", "more", "expected"),
    [
        ("{problem: countdown}", ["evaluation.prompts=8"], "CountdownData"),
        ("{problem: expressions}", ["evaluation.prompts=8"], "ExpressionsData"),
        ("{problem: gsm8k, path: train.jsonl}", ["evaluation.prompts=8"], "Gsm8kData"),
        (
            "{problem: files, train: [train.jsonl]}",
            ["evaluation.prompts=8", "reward.functions=[{name: exact_match}]"],
            "FilesData",
        ),
    ],
)
def test_the_form_opens_with_the_problem_of_the_configuration(data: str, more: list[str], expected: str) -> None:
    values = _values(None, str(CONFIGS / "demo.yaml"), [f"data={data}", *more])
    assert chosen(values["data"]) == expected
    assert RunConfig.model_validate(values).data.problem == values["data"]["problem"]


def test_other_settings_are_left_to_the_defaults_of_the_form() -> None:
    values = _values(None, str(CONFIGS / "demo.yaml"), [])
    assert values["warm_start"] == {} and "tracking" not in values


def test_a_first_setting_is_no_file_and_keeps_its_address() -> None:
    values = _values(None, "tracking.uri=http://127.0.0.1:5000", ["iterations=30"])
    assert values["tracking"] == {"uri": "http://127.0.0.1:5000"} and values["iterations"] == 30
