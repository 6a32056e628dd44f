"""A headless browser, and the servers whose pages it looks at."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests.browser.services import Services, services
from tests.programs import chromium, missing

SCREENSHOTS = "GRPO_SCREENSHOTS"
"""Names a folder for pictures of the pages; `make screenshots` sets it, and has the runs learn something to look at."""
ROOT = Path(__file__).parents[2]
SIZE = {"width": 1400, "height": 900}
SECONDS = 60_000

TINY = (
    "iterations=3", "data={problem: countdown, train_prompts: 200, heldout_prompts: 8}",
    "warm_start={steps: 3, warmup_steps: 1, batch_size: 4, demonstrations: 16}",
    "model.small={hidden_size: 32, layers: 1, heads: 2, kv_heads: 2, mlp_size: 32}",
    "rollout={prompts: 4, samples: 2, max_prompt_tokens: 24, max_new_tokens: 12}", "trainer.optimizer.warmup_steps=0",
    "evaluation={every: 3, prompts: 8, samples: 2}", "checkpoint.every=3", "tracking.registered_model=shown",
    "tracking.system_seconds=1",
)  # fmt: skip
SHOWN = (
    str(ROOT / "deployments/configs/expressions.yaml"), "iterations=40", "evaluation.every=10",
    "evaluation.prompts=256", "checkpoint.every=20", "trainer.optimizer.warmup_steps=2",
    "tracking.registered_model=expressions",
)  # fmt: skip


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    """Prefect and MLflow with their pages, and somebody who carries out what is started there."""
    settings = SHOWN if SCREENSHOTS in os.environ else TINY
    with services(tmp_path_factory.mktemp("pages"), *settings) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Of a module: as long as Playwright is there, an event loop runs in this thread; other tests want their own."""
    path = chromium()
    if path is None:
        missing("Chromium")
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    context = browser.new_context(viewport=SIZE, color_scheme="light")
    context.add_init_script("localStorage.setItem('color-scheme', '\"light\"')")  # Prefect's pages are dark else
    made = context.new_page()
    made.set_default_timeout(SECONDS)
    yield made
    context.close()


@pytest.fixture
def picture(page: Page, tmp_path: Path) -> Callable[[str], None]:
    """Takes a picture of what the browser shows."""
    folder = Path(os.environ.get(SCREENSHOTS, tmp_path))

    def take(name: str) -> None:
        page.screenshot(path=folder / f"{name}.png", animations="disabled")

    return take
