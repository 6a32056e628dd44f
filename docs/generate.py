"""Writes the reference pages that come from the code: `python docs/generate.py`. A test holds them to it."""

from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic_core import PydanticUndefined

from grpo_lib.config import CountdownData, ExpressionsData, Gsm8kData, RunConfig, Section
from grpo_lib.tracking.metrics import DESCRIPTIONS

HERE = Path(__file__).parent


def configuration() -> str:
    """Every setting with type, default, bounds and meaning."""
    lines = ["# Configuration", "", "Generated from `grpo_lib/config.py`. Unknown keys are refused.", ""]
    for section, title in _sections(RunConfig, ""):
        lines += [f"## {title or 'The run'}", "", (section.__doc__ or "").strip(), ""]
        lines += ["| setting | default | values | meaning |", "|---|---|---|---|"]
        for name, field in section.model_fields.items():
            if _section_of(field.annotation) or name == "data":
                continue
            default = "required" if field.default is PydanticUndefined else f"`{field.default}`"
            values = [_type(field.annotation), *(_bound(each) for each in field.metadata)]
            meaning = (field.description or "").replace("|", "\\|")
            lines.append(f"| `{name}` | {default} | {', '.join(filter(None, values))} | {meaning} |")
        lines.append("")
    return "\n".join(lines)


def metrics() -> str:
    """Every metric."""
    lines = ["# Metrics", "", "Generated from `grpo_lib/tracking/metrics.py`. The step is the iteration.", ""]
    lines += ["| metric | meaning |", "|---|---|"]
    lines += [f"| `{name}` | {text} |" for name, text in sorted(DESCRIPTIONS.items())]
    return "\n".join([*lines, ""])


def _sections(section: type[Section], title: str) -> list[tuple[type[Section], str]]:
    found = [(section, title)]
    for name, field in section.model_fields.items():
        path = f"{title}.{name}" if title else name
        if name == "data":
            for data in (CountdownData, ExpressionsData, Gsm8kData):
                found.append((data, f"data (problem: {data.model_fields['problem'].default})"))
        child = _section_of(field.annotation)
        if child is not None:
            found += _sections(child, path)
    return found


def _section_of(annotation: Any) -> type[Section] | None:
    for each in (annotation, *get_args(annotation)):
        if isinstance(each, type) and issubclass(each, Section):
            return each
    return None


def _type(annotation: Any) -> str:
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(_type(each) for each in get_args(annotation))
    if get_origin(annotation) is Annotated:
        return _type(get_args(annotation)[0])
    if annotation is type(None):
        return "null"
    if get_args(annotation) and get_origin(annotation) is not list:
        return ", ".join(f"`{each}`" for each in get_args(annotation))
    return f"list of {_type(get_args(annotation)[0])}" if get_args(annotation) else annotation.__name__


def _bound(constraint: Any) -> str:
    for name, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<")):
        if hasattr(constraint, name):
            return f"{sign} {getattr(constraint, name)}"
    return ""


PAGES = {"configuration.md": configuration, "metrics.md": metrics}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (HERE / name).write_text(page(), encoding="utf-8")
