"""Deployments on Prefect's server: forms are filled literally, and what people set there outlives the next deploy."""

from pathlib import Path

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentUpdate
from prefect.client.schemas.schedules import CronSchedule

from flows.cli.deploy import put
from flows.cli.forms import Form, read_forms
from grpo_lib.errors import ConfigError

POOL = "forms"
TEMPLATE = "{{ prompt }} costs {{ $HOME }}"
RETRAIN = Path(__file__).parents[2] / "deployments" / "configs" / "retrain.yaml"


@pytest.fixture
def client(
    own_prefect_server: dict[str, str], own_prefect_here: str, monkeypatch: pytest.MonkeyPatch
) -> SyncPrefectClient:
    for name, value in own_prefect_server.items():
        monkeypatch.setenv(name, value)
    return get_client(sync_client=True)


def deployed(*settings: str, config: Path | None = None, retrain: Path | None = None) -> dict[str, Form]:
    first = settings[0] if config is None and settings else config and str(config)
    rest = list(settings if config is not None else settings[1:])
    names = {each["name"].partition("/")[2] for each in put(first, rest, retrain, POOL, "process", None, None)}
    assert names == {"train", "evaluate", "retrain", "rerun-stage", "rescore", "sweep"}
    return read_forms(names, POOL)


def test_what_people_set_on_the_server_outlives_the_next_deploy(
    client: SyncPrefectClient, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forms = deployed()
    assert forms["train"].parameters["config"]["data"]["problem"] == "countdown"
    assert forms["train"].parameters == forms["sweep"].parameters
    assert forms["retrain"].parameters == {} and forms["retrain"].enabled is None, "nothing is told of prompts for it"
    assert [each["active"] for each in forms["retrain"].schedules] == [False]

    changed = forms["train"].parameters["config"] | {"name": "mine", "iterations": 7}
    client.update_deployment(forms["train"].id, DeploymentUpdate(parameters={"config": changed}))
    client.update_deployment(forms["evaluate"].id, DeploymentUpdate(parameters={"store": {"uri": "s3://other/place"}}))
    (schedule,) = client.read_deployment_schedules(forms["retrain"].id)
    weekly = CronSchedule(cron="0 6 * * 1", timezone="Europe/Berlin")
    client.update_deployment_schedule(forms["retrain"].id, schedule.id, active=True, schedule=weekly)
    client.create_deployment_schedules(forms["train"].id, [(CronSchedule(cron="5 4 * * *"), True)])

    forms = deployed("iterations=9", retrain=RETRAIN)
    assert forms["train"].parameters["config"] == changed | {"iterations": 9}
    assert forms["sweep"].parameters["config"]["name"] is None
    assert forms["evaluate"].parameters["store"] == {"uri": "s3://other/place"}
    assert forms["retrain"].parameters["config"]["model"] == "expressions" and forms["retrain"].enabled is True
    (kept,) = forms["retrain"].schedules
    assert kept["cron"] == "0 6 * * 1" and kept["timezone"] == "Europe/Berlin" and kept["active"] is True
    assert [each["cron"] for each in forms["train"].schedules] == ["5 4 * * *"]
    (trigger,) = client.read_resource_related_automations(f"prefect.deployment.{forms['retrain'].id}")
    assert trigger.trigger.match.root == {"prefect.resource.id": "grpo.retraining.expressions"}  # type: ignore[union-attr]

    client.pause_automation(trigger.id)
    config = tmp_path / "run.yaml"
    config.write_text(
        f"name: other\ndata: {{problem: countdown}}\nwarm_start: {{}}\ntracking: {{experiment: '{TEMPLATE}'}}\n"
    )
    again = deployed(config=config)
    filled = again["train"].parameters["config"]
    assert filled.pop("data")["problem"] == "countdown"
    assert filled == {"name": "other", "warm_start": {}, "tracking": {"experiment": TEMPLATE}}
    assert again["sweep"].parameters["config"]["name"] == "other"
    assert again["retrain"] == Form(
        id=forms["retrain"].id,
        label="retrain/retrain",
        parameters=forms["retrain"].parameters,
        schedules=forms["retrain"].schedules,
        enabled=False,
    )

    headless = {key: value for key, value in changed.items() if key != "warm_start"}
    client.update_deployment(forms["train"].id, DeploymentUpdate(parameters={"config": headless}))
    capsys.readouterr()
    kept = deployed("iterations=11")
    assert kept["train"].parameters == {"config": headless}, "it is a person's, and it stops nobody"
    assert kept["sweep"].parameters["config"]["iterations"] == 11
    assert capsys.readouterr().err.count("the form of train stays as it is, and can't be used: config: model.path") == 1
    with pytest.raises(ConfigError, match="the form of sweep: iterationz: no such setting"):
        deployed("iterationz=3")
