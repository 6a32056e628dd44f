"""The generated pages say what the code says."""

import importlib.util
from pathlib import Path

import pytest

from grpo_lib.config import Section

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


def test_every_setting_says_what_it_is() -> None:
    silent = [
        f"{section.__name__}.{name}"
        for section in all_sections(Section)
        for name, field in section.model_fields.items()
        if not field.description and generate._section_of(field.annotation) is None
    ]
    assert silent == []


def all_sections(base: type[Section]) -> list[type[Section]]:
    return [each for child in base.__subclasses__() for each in (child, *all_sections(child))]
