"""The generated pages say what the code says."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
assert spec is not None and spec.loader is not None
generate = importlib.util.module_from_spec(spec)
spec.loader.exec_module(generate)


@pytest.mark.parametrize("page", list(generate.PAGES))
def test_a_generated_page_is_up_to_date(page: str) -> None:
    stored = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert stored == generate.PAGES[page](), "run `python docs/generate.py`"


def test_every_setting_but_a_few_self_explaining_ones_is_in_the_reference_with_its_bounds() -> None:
    page = generate.configuration()
    assert "| `temperature` | `1.0` | float, > 0, ≤ 10 |" in page
    assert "## trainer.optimizer" in page and "## data (problem: gsm8k)" in page
