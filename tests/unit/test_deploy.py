"""What `grpo deploy` fills into the forms."""

from pathlib import Path
from typing import Any

import yaml

from flows.cli.deploy import _fill

FILE = Path(__file__).parents[2] / "deployments" / "prefect.yaml"


def retrain(retraining: dict[str, Any] | None, **own: Any) -> dict[str, Any]:
    """The deployment of that name, filled."""
    plan = yaml.safe_load(FILE.read_text())
    (found,) = (each for each in plan["deployments"] if each["name"] == "retrain")
    found |= own
    _fill(plan, {}, retraining)
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
