"""Prefect's and MLflow's real pages, as a person uses them."""

import re
from collections.abc import Callable
from io import BytesIO
from typing import Any
from urllib.parse import quote

import numpy as np
from matplotlib.image import imread
from playwright.sync_api import Locator, Page, expect
from scipy.ndimage import maximum_filter

from grpo_lib.config import StoreConfig
from grpo_lib.run import load_run
from tests.browser.services import BUSY, TRIES, Services

Picture = Callable[[str], None]
COLOURS = {"Completed": (0x21, 0x9D, 0x4B), "Failed": (0xDE, 0x05, 0x29)}
"""Of stages in Prefect's graph."""
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


def until_taken(page: Page, request: str, press: Callable[[], None]) -> dict[str, Any]:
    """Presses again, as a person does, while the page says that the server is busy; returns the server's answer."""
    for _ in range(TRIES):
        with page.expect_response(lambda each: each.request.method == "POST" and each.url.endswith(request)) as answer:
            press()
        if answer.value.status != BUSY:
            assert answer.value.ok, answer.value.text()
            return answer.value.json()
        page.wait_for_timeout(1000)
    raise AssertionError("Prefect is busy all the time")


def name_the_run(page: Page, name: str) -> None:
    naming = field(page, "Name (Optional)")
    naming.get_by_text("str", exact=True).click()
    naming.locator("textarea").fill(name)


def submit(page: Page, pages: Services) -> str:
    """Presses Submit, and returns the id of the flow run when it has ended well."""
    run = until_taken(page, "/create_flow_run", page.get_by_role("button", name="Submit").click)["id"]
    pages.until_state(run, "COMPLETED", 600)
    return run


def train_from_the_form(page: Page, pages: Services, name: str, picture: Picture | None = None, **fields: str) -> str:
    """Fills in the form of `train` and runs it."""
    open_form(page, pages, "train")
    name_the_run(page, name)
    for label, value in fields.items():
        field(page, label.replace("_", " ") + " (Optional)").locator("input").fill(value)
    if picture is not None:
        picture("prefect-form")
    return submit(page, pages)


def stage_in_graph(page: Page, state: str) -> Locator:
    """Clicks a stage in that state in the graph, which is a picture; what the page says of the stage then.

    Where stages are too small to be clicked, it turns the wheel over them first.
    """
    canvas = page.locator(".flow-run-graph canvas")
    before = None
    for _ in range(40):
        page.wait_for_timeout(500)
        pixels = imread(BytesIO(canvas.screenshot()), format="png")[20:-50, :, :3]  # without times and states
        moves, before = before is None or (pixels != before).any(), pixels
        if moves:
            continue
        far = maximum_filter(np.abs(255 * pixels - COLOURS[state]).sum(axis=2), size=3)
        row, column = np.unravel_index(far.argmin(), far.shape)
        place = {"x": int(column), "y": int(row) + 20}
        if far[row, column] < 6:
            canvas.click(position=place)
            return page.locator(".flow-run-graph-selection-panel")
        canvas.hover(position=place)
        page.mouse.wheel(0, -200)
    raise AssertionError(f"nothing in the graph is {state}")


def look_at_run(page: Page, pages: Services, flow_run: str, name: str) -> None:
    """At its page: the graph of its stages, and its artifacts."""
    page.goto(f"{pages.prefect}/runs/flow-run/{flow_run}")
    expect(page.get_by_text(f"train {name}")).to_be_visible()
    stage = stage_in_graph(page, "Completed")
    expect(stage.get_by_text(re.compile(rf"^{name}/(setup|\d{{6}})/[a-z_]+$"))).to_be_visible()
    expect(stage.get_by_text("Completed")).to_be_visible()
    stage.get_by_role("button").first.click()
    expect(stage).to_be_hidden()
    open_tab(page, "Artifacts")
    for artifact in ("progress", "iterations", "curves", "rollouts", "report"):
        expect(page.get_by_text(f"{name}-{artifact}", exact=True).last).to_be_visible()


def open_artifact(page: Page, pages: Services, flow_run: str, name: str) -> None:
    page.goto(f"{pages.prefect}/runs/flow-run/{flow_run}")
    open_tab(page, "Artifacts")
    page.get_by_text(name, exact=True).last.click()
    expect(page.get_by_text("Show raw data")).to_be_visible()


def test_the_form_of_train_starts_a_run_and_its_page_shows_graph_and_artifacts(
    page: Page, pages: Services, picture: Picture
) -> None:
    run = train_from_the_form(page, pages, "first", picture)
    look_at_run(page, pages, run, "first")
    open_artifact(page, pages, run, "first-curves")
    expect(page.locator("img[alt='curves of the run']")).to_be_visible()
    picture("prefect-curves")
    open_artifact(page, pages, run, "first-iterations")
    expect(page.get_by_text("rollout s", exact=True)).to_be_visible()
    picture("prefect-iterations")
    open_artifact(page, pages, run, "first-rollouts")
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


def test_another_problem_can_be_chosen_in_the_form(page: Page, pages: Services, picture: Picture) -> None:
    open_form(page, pages, "train")
    chosen = field(page, "Data")
    chosen.get_by_text("ExpressionsData", exact=True).click()
    expect(chosen.get_by_text("Operands (Optional)")).to_be_visible()
    name_the_run(page, "other")
    field(page, "Iterations (Optional)").locator("input").fill("3")
    run = submit(page, pages)
    assert load_run(StoreConfig(uri=str(pages.folder / "grpo-store")), "other").config.data.problem == "expressions"
    look_at_run(page, pages, run, "other")
    page.get_by_title("Recenter graph (c)").click()
    page.wait_for_timeout(1000)  # the graph moves into place
    picture("prefect-run")


def test_retry_after_a_failed_reward_runs_that_stage_and_what_follows(
    page: Page, pages: Services, picture: Picture
) -> None:
    answers = pages.folder / "answers"
    (pages.folder / "grader.py").write_text(GRADER.format(answers=str(answers)))  # fails in iteration 1
    found = pages.ask("/deployments/filter", deployments={"name": {"any_": ["train"]}})[0]
    config = found["parameters"]["config"] | {"name": "graded", "iterations": 3}
    config["reward"] = {"functions": [{"path": "grader.py", "name": "reward"}]}
    made = pages.ask(f"/deployments/{found['id']}/create_flow_run", name="graded", parameters={"config": config})
    failed = made["id"]
    pages.until_state(failed, "FAILED", 600)
    pages.until_ended("graded")
    run = load_run(StoreConfig(uri=str(pages.folder / "grpo-store")), "graded")
    before = {each.path: each.created_ms for each in run.stages.manifests()}
    there = {each.stage for each in run.stages.manifests() if each.iteration == 1}
    assert "rollout" in there and not there & {"reward", "advantage", "update"}
    page.goto(f"{pages.prefect}/runs/flow-run/{failed}")
    expect(page.get_by_text("no such row").first).to_be_visible()
    stage = stage_in_graph(page, "Failed")
    expect(stage.get_by_text("graded/000001/reward")).to_be_visible()
    picture("prefect-failed")
    answers.touch()

    def retry() -> None:
        page.get_by_role("button", name="Retry").first.click()
        page.get_by_role("dialog").get_by_role("button", name="Retry").click()

    until_taken(page, "/set_state", retry)
    pages.until_state(failed, "COMPLETED", 600)
    after = {each.path: each for each in run.stages.manifests()}
    assert before.items() <= {path: each.created_ms for path, each in after.items()}.items()
    new = [each for path, each in after.items() if path not in before]
    assert {each.stage for each in new if each.iteration == 1} >= {"reward", "advantage", "update"}
    assert not [each for each in new if each.iteration == 1 and each.stage in ("prompts", "rollout")]
    assert not [each for each in new if each.iteration == 0]
    tasks = pages.ask("/task_runs/filter", flow_runs={"id": {"any_": [failed]}}, sort="EXPECTED_START_TIME_DESC")
    again = {each["name"]: each["state_name"] for each in tasks if each["flow_run_run_count"] == 2}
    assert {again[f"graded/000001/{stage}"] for stage in ("prompts", "rollout")} == {"Cached"}
    assert {again[f"graded/000001/{stage}"] for stage in ("reward", "advantage", "update")} == {"Completed"}
    page.reload()
    expect(page.get_by_text("Completed", exact=True).first).to_be_visible()
    open_tab(page, "Task Runs")
    page.get_by_placeholder("Search by run name").fill("000001/r")
    for name, state in (("rollout", "Cached"), ("reward", "Completed"), ("reward", "Failed")):
        found_run = page.locator(".state-list-item", has_text=f"graded/000001/{name}").filter(has_text=state)
        expect(found_run.first).to_be_visible()
    picture("prefect-retried")


def test_mlflow_compares_runs_and_shows_rollouts_and_the_champion(
    page: Page, pages: Services, picture: Picture
) -> None:
    from mlflow import MlflowClient

    for name, samples in (("four-samples", "4"), ("eight-samples", "8")):
        train_from_the_form(page, pages, name, Samples=samples)
    client = MlflowClient(pages.mlflow)
    experiment = client.get_experiment_by_name("grpo")
    assert experiment is not None
    runs = {each.info.run_name: each for each in client.search_runs([experiment.experiment_id])}
    home = f"{pages.mlflow}/#/experiments/{experiment.experiment_id}"
    page.goto(f"{home}/runs")
    page.get_by_role("button", name="Close").first.click()  # the assistant
    page.get_by_text("Model training", exact=True).first.click()
    page.goto(f"{home}/runs")
    for name in ("four-samples", "eight-samples"):
        page.locator(f"[row-id='{runs[name].info.run_id}'] input[type=checkbox]").first.check()
    page.get_by_role("button", name="Compare").click()
    expect(page.get_by_text("Comparing 2 Runs", exact=False).first).to_be_visible()
    expect(page.get_by_text("rollout.samples", exact=True).locator("visible=true").first).to_be_visible()

    both = quote("attributes.run_name ILIKE '%-samples'")
    page.goto(f"{home}/runs?compareRunsMode=CHART&searchFilter={both}")
    page.get_by_placeholder("Search metric charts").fill("_accuracy$|reward/mean|rollout/length_mean|entropy$")
    expect(page.get_by_text("eight-samples (evaluate/greedy_accuracy)").first).to_be_visible()
    expect(page.get_by_text("four-samples (evaluate/greedy_accuracy)").first).to_be_visible()
    picture("mlflow-compare")

    page.goto(f"{home}/runs/{runs['eight-samples'].info.run_id}")
    expect(page.get_by_text("grpo resume eight-samples", exact=False).locator("visible=true").first).to_be_visible()
    expect(page.get_by_text("/train (", exact=False).first).to_be_visible()
    page.goto(f"{home}/runs/{runs['eight-samples'].info.run_id}/artifacts")
    page.get_by_text("evaluation", exact=True).first.click()
    page.get_by_text(re.compile(r"^0000\d\d\.json$")).last.click()
    expect(page.get_by_text("response", exact=True).first).to_be_visible()
    picture("mlflow-rollouts")

    model = runs["eight-samples"].data.params["tracking.registered_model"]
    versions = sorted(client.search_model_versions(f"name = '{model}'"), key=lambda each: int(each.version))
    for alias, version in (("champion", versions[-2]), ("challenger", versions[-1])):
        client.set_registered_model_alias(model, alias, version.version)
    page.goto(f"{pages.mlflow}/#/models/{model}")
    for version, alias in ((versions[-2], "champion"), (versions[-1], "challenger")):
        row = page.get_by_role("row").filter(has=page.get_by_text(f"Version {version.version}", exact=True))
        expect(row.get_by_text(alias)).to_be_visible()
    picture("mlflow-model")
