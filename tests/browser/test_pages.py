"""Prefect's and MLflow's real pages, as a person uses them."""

import re
from collections.abc import Callable

from playwright.sync_api import Locator, Page, expect

from grpo_lib.config import StoreConfig
from grpo_lib.run import load_run
from tests.browser.services import Services

Picture = Callable[[str], None]
GRADER = """
import os

def reward(sample):
    if sample.rollout_id.startswith("1-") and not os.path.exists({answers!r}):
        raise ValueError("the table of answers has no such row")
    return sum(each.isdigit() for each in sample.response) / 10
"""


def field(page: Page, name: str) -> Locator:
    """The field of a form with that label, the first one."""
    label = f"//span[contains(@class,'schema-form-property__label') and normalize-space()='{name}']"
    return page.locator(f"{label}/ancestor::div[contains(@class,'p-label ')][1]").first


def open_form(page: Page, pages: Services, deployment: str) -> None:
    page.goto(f"{pages.deployment(deployment)}/run")
    expect(page.get_by_role("button", name="Submit")).to_be_visible()


def open_tab(page: Page, name: str) -> None:
    page.locator(".p-tab, .p-tab-navigation__tab, button, a").get_by_text(name, exact=True).first.click()


def train_from_the_form(page: Page, pages: Services, name: str, picture: Picture | None = None, **fields: str) -> str:
    """Fills in the form of `train`, presses Submit, and returns the id of the flow run when it has ended well."""
    open_form(page, pages, "train")
    naming = field(page, "Name (Optional)")
    naming.get_by_text("str", exact=True).click()
    naming.locator("textarea").fill(name)
    for label, value in fields.items():
        field(page, label.replace("_", " ") + " (Optional)").locator("input").fill(value)
    if picture is not None:
        picture("prefect-form")
    page.get_by_role("button", name="Submit").click()
    return pages.until_state(f"train {name}", "COMPLETED", 600)["id"]


def test_the_form_of_train_starts_a_run_and_its_page_shows_graph_and_artifacts(
    page: Page, pages: Services, picture: Picture
) -> None:
    run = train_from_the_form(page, pages, "first", picture)
    page.goto(f"{pages.prefect}/runs/flow-run/{run}")
    expect(page.get_by_text("train first")).to_be_visible()
    expect(page.locator(".flow-run-graph canvas, .run-graph canvas").first).to_be_visible()
    page.wait_for_timeout(2000)  # the graph moves into place
    picture("prefect-run")
    open_tab(page, "Artifacts")
    for name in ("progress", "iterations", "curves", "rollouts", "report"):
        expect(page.get_by_text(f"first-{name}").last).to_be_visible()
    picture("prefect-artifacts")
    page.get_by_text("first-curves").last.click()
    expect(page.locator("img[alt='curves of the run']")).to_be_visible()
    picture("prefect-curves")
    page.go_back()
    open_tab(page, "Artifacts")
    page.get_by_text("first-rollouts").last.click()
    expect(page.get_by_text(re.compile("^best: reward"))).to_be_visible()
    picture("prefect-rollouts")


def test_a_wrong_value_is_refused_by_the_form(page: Page, pages: Services) -> None:
    before = len(pages.ask("/flow_runs/filter"))
    open_form(page, pages, "train")
    field(page, "Iterations (Optional)").locator("input").fill("0")
    page.get_by_role("button", name="Submit").click()
    expect(
        page.get_by_text(re.compile("less than the minimum|minimum of 1|must be at least", re.I)).first
    ).to_be_visible()
    assert page.url.endswith("/run") and len(pages.ask("/flow_runs/filter")) == before


def test_another_problem_can_be_chosen_in_the_form(page: Page, pages: Services) -> None:
    open_form(page, pages, "train")
    field(page, "Data").get_by_text("ExpressionsData", exact=True).click()
    field(page, "Data").get_by_text("Problem", exact=False).first.wait_for()
    name = field(page, "Name (Optional)")
    name.get_by_text("str", exact=True).click()
    name.locator("textarea").fill("other")
    page.get_by_role("button", name="Submit").click()
    pages.until_state("train other", "COMPLETED", 600)
    assert load_run(StoreConfig(uri=str(pages.folder / "grpo-store")), "other").config.data.problem == "expressions"


def test_retry_after_a_failed_reward_runs_that_stage_and_what_follows(
    page: Page, pages: Services, picture: Picture
) -> None:
    answers = pages.folder / "answers"
    (pages.folder / "grader.py").write_text(GRADER.format(answers=str(answers)))  # fails in iteration 1
    found = pages.ask("/deployments/filter", deployments={"name": {"any_": ["train"]}})[0]
    config = found["parameters"]["config"] | {"name": "graded"}
    config["reward"] = {"functions": [{"path": "grader.py", "name": "reward"}]}
    pages.ask(f"/deployments/{found['id']}/create_flow_run", name="graded", parameters={"config": config})
    failed = pages.until_state("train graded", "FAILED", 300)
    pages.until_ended("graded")
    run = load_run(StoreConfig(uri=str(pages.folder / "grpo-store")), "graded")
    before = {each.path: each.created_ms for each in run.stages.manifests()}
    there = {each.stage for each in run.stages.manifests() if each.iteration == 1}
    assert "rollout" in there and not there & {"reward", "advantage", "update"}
    page.goto(f"{pages.prefect}/runs/flow-run/{failed['id']}")
    expect(page.get_by_text("no such row").first).to_be_visible()
    picture("prefect-failed")
    answers.touch()
    page.get_by_role("button", name="Retry").click()
    page.get_by_role("dialog").get_by_role("button", name="Retry").click()
    pages.until_state("train graded", "COMPLETED", 600)
    after = {each.path: each for each in run.stages.manifests()}
    assert before.items() <= {path: each.created_ms for path, each in after.items()}.items()
    new = [each for path, each in after.items() if path not in before]
    assert {each.stage for each in new if each.iteration == 1} >= {"reward", "advantage", "update"}
    assert not [each for each in new if each.iteration == 1 and each.stage in ("prompts", "rollout")]
    assert not [each for each in new if each.iteration == 0]
    page.reload()
    expect(page.get_by_text("Completed", exact=True).first).to_be_visible()
    picture("prefect-retried")
    logs = pages.ask("/logs/filter", logs={"flow_run_id": {"any_": [failed["id"]]}}, sort="TIMESTAMP_DESC", limit=200)
    said = [each["message"] for each in logs]
    assert any(line.startswith("reward of iteration 1: computed") for line in said)
    assert any(line.startswith("rollout of iteration 1: reused") for line in said)
    assert sum(line.startswith("rollout of iteration 1: computed") for line in said) <= 1, "that of the first time"


def test_mlflow_compares_runs_and_shows_rollouts_and_the_champion(
    page: Page, pages: Services, picture: Picture
) -> None:
    from mlflow import MlflowClient

    for name, seed in (("one", "1"), ("two", "2")):
        train_from_the_form(page, pages, name, Seed=seed)
    client = MlflowClient(pages.mlflow)
    experiment = client.get_experiment_by_name("grpo")
    assert experiment is not None
    runs = {each.info.run_name: each.info.run_id for each in client.search_runs([experiment.experiment_id])}
    home = f"{pages.mlflow}/#/experiments/{experiment.experiment_id}"
    page.goto(f"{home}/runs")
    page.get_by_role("button", name="Close").first.click()  # the assistant
    for name in ("one", "two"):
        page.locator(f"[row-id='{runs[name]}'] input[type=checkbox]").first.check()
    page.get_by_role("button", name="Compare").click()
    expect(page.get_by_text("Comparing 2 Runs", exact=False).first).to_be_visible()
    expect(page.get_by_text("seed", exact=True).locator("visible=true").first).to_be_visible()
    picture("mlflow-compare")
    page.goto(f"{home}/runs/{runs['one']}")
    expect(page.get_by_text("grpo resume one", exact=False).locator("visible=true").first).to_be_visible()
    expect(page.get_by_text("/train (", exact=False).first).to_be_visible()
    picture("mlflow-run")
    page.goto(f"{home}/runs/{runs['one']}/artifacts")
    page.get_by_text("evaluation", exact=True).first.click()
    page.get_by_text(re.compile(r"^0000\d\d\.json$")).last.click()
    expect(page.get_by_text("finish_reason").first).to_be_visible()
    picture("mlflow-rollouts")
    newest = max(client.search_model_versions("name = 'shown'"), key=lambda each: int(each.version))
    client.set_registered_model_alias("shown", "champion", newest.version)
    page.goto(f"{pages.mlflow}/#/models/shown")
    expect(page.get_by_text("champion").first).to_be_visible()
    picture("mlflow-champion")
