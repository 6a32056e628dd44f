"""Writes the reference pages that come from the code: `python docs/generate.py`. A test holds them to it."""

from pathlib import Path
from typing import Any, get_args

from pydantic_core import PydanticUndefined
from typer.main import get_command

from flows.cli.main import app
from grpo_lib.catalogue import choices, listings, type_text
from grpo_lib.config import RunConfig, Section
from grpo_lib.config_algorithm import PRESETS
from grpo_lib.config_data import DATA_SECTIONS
from grpo_lib.config_retrain import PromotionConfig, RetrainConfig
from grpo_lib.tracking.metrics import DESCRIPTIONS

HERE = Path(__file__).parent


def configuration() -> str:
    """Every setting with type, default, bounds and meaning."""
    lines = ["# Configuration", "", "Generated from `grpo_lib/config*.py`. Unknown keys are refused.", ""]
    retraining = [(RetrainConfig, "A retraining"), (PromotionConfig, "promotion, of a retraining")]
    for section, title in [*_sections(RunConfig, ""), *retraining]:
        lines += [f"## {title or 'The run'}", "", (section.__doc__ or "").strip(), ""]
        lines += ["| setting | default | values | meaning |", "|---|---|---|---|"]
        for name, field in section.model_fields.items():
            if _section_of(field.annotation) or name == "data":
                continue
            default = "required" if field.default is PydanticUndefined else f"`{field.default}`"
            meaning = (field.description or "").replace("|", "\\|")
            lines.append(f"| `{name}` | {default} | {type_text(field.annotation, field.metadata)} | {meaning} |")
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
            for data in DATA_SECTIONS:
                found.append((data, f"data (problem: {data.model_fields['problem'].default})"))
        child = _section_of(field.annotation)
        if child is not None:
            found += _sections(child, path)
    return found


def _section_of(annotation: Any) -> type[Section] | None:
    """The section that a field holds, or of which it holds a list."""
    for each in (annotation, *get_args(annotation)):
        if isinstance(each, type) and issubclass(each, Section):
            return each
    return None


def algorithms() -> str:
    """Every function that a configuration can name, from the registries."""
    lines = [(HERE / "algorithms.head.md").read_text(encoding="utf-8").rstrip(), ""]
    for setting, registry in choices().items():
        known = [each for each in listings() if each.setting == setting]
        lines += [f"## `{setting}`: {registry.kind}s", "", ABOUT[setting.removeprefix("algorithm.")], ""]
        if registry.columns:
            lines += ["| column | what it is |", "|---|---|"]
            lines += [f"| `{name}` | {text} |" for name, text in registry.columns.items()]
        for each in known:
            also = f" (also {', '.join(f'`{alias}`' for alias in each.aliases)})" if each.aliases else ""
            lines += ["", f"### `{each.name}`{also}", ""]
            if each.formula:
                lines += [f"    {each.formula}", ""]
            lines += [f"{each.use[0].upper()}{each.use[1:].rstrip('.')}. {_source(each.paper)}".rstrip(), ""]
            lines += [f"- function: `{each.function}`"]
            if each.columns:
                lines += [f"- columns: {', '.join(f'`{name}`' for name in each.columns)}"]
            if each.aggregation is not None:
                lines += [f"- aggregation unless another is named: `{each.aggregation}`"]
            for option in each.options:
                lines += [f"- option `{option.name}` = `{option.default}` ({option.type}): {option.meaning}"]
        lines += [""]
    lines += ["## `algorithm.rollout_correction.preset`", "", "| preset | old log-probs | loss | correction |"]
    lines += ["|---|---|---|---|"]
    lines += [f"| `{name}` | {mode} | `{loss}` | {_correction(c)} |" for name, (mode, loss, c) in PRESETS.items()]
    return "\n".join([*lines, ""])


ABOUT = {
    "advantage": "Computed over the whole iteration, in float64, before any shuffling or splitting.",
    "loss": "Per token, of the tokens with mask 1; importance weights multiply them, an aggregation adds them up.",
    "aggregation": "Weights of the tokens over the whole mini-batch; micro-batches and ranks only add their terms.",
    "kl.estimator": "With `x = logprobs - ref_logprobs`. Any name with `+` has the gradient of `k2`, the unbiased one.",
    "grouping": "From columns of the prompts to group ids.",
    "filters": "Run in order; while too few prompts are left, more are drawn (`rollout.max_gen_batches`).",
    "rollout.sampler": "Curricula: classes that weigh prompts by what the run has learned of them; see "
    "[data](data.md#which-prompts-come-next).",
    "reward.functions": "Options go into `kwargs`; see [rewards](rewards.md).",
    "metrics": "More numbers of an iteration, logged as `advantage/metric/<name>`.",
}


def _source(paper: str) -> str:
    return "" if paper in ("", "-") else f"{paper}."


def _correction(settings: dict[str, Any]) -> str:
    parts = [f"weights by {settings['rollout_is']}"] if "rollout_is" in settings else []
    parts += [f"{rule['kind']} in [{rule['lower']}, {rule['upper']}]" for rule in settings.get("rejection", [])]
    parts += [f"veto below {settings['token_veto_threshold']}"] if "token_veto_threshold" in settings else []
    return ", ".join(parts) or "none, the mismatch is measured"


def cli() -> str:
    """Every command with its arguments and options."""
    root = get_command(app)
    lines = ["# Commands", "", "Generated from `flows/cli`; `grpo COMMAND --help` prints the same.", ""]
    lines += [str(root.epilog), ""]
    for name, command in _commands(root, "grpo"):
        shown = [each for each in command.params if not each.hidden]
        arguments = [each for each in shown if each.param_type_name == "argument"]
        usage = " ".join([name, *map(_argument, arguments), *(["[OPTIONS]"] if len(shown) > len(arguments) else [])])
        lines += [f"## {name}", "", f"    {usage}", "", str(command.help).strip(), ""]
        lines += ["| argument or option | default | meaning |", "|---|---|---|"]
        for each in shown:
            title = _argument(each) if each in arguments else ", ".join([*each.opts, *each.secondary_opts])
            meaning = (each.help or "").replace("|", "\\|") + (f" Environment: `{each.envvar}`." if each.envvar else "")
            lines.append(f"| `{title}` | {_default(each)} | {meaning} |")
        lines.append("")
    return "\n".join(lines)


def _commands(command: Any, path: str) -> list[tuple[str, Any]]:
    """Commands that can be run, by their full names; those of a group after it."""
    if not hasattr(command, "commands"):
        return [(path, command)]
    return [found for name, child in command.commands.items() for found in _commands(child, f"{path} {name}")]


def _argument(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    many = "..." if argument.nargs == -1 else ""
    return f"{name}{many}" if argument.required else f"[{name}]{many}"


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    given = parameter.default not in (None, False)
    return f"`{parameter.default}`" if given else ""


PAGES = {"configuration.md": configuration, "metrics.md": metrics, "algorithms.md": algorithms, "cli.md": cli}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (HERE / name).write_text(page(), encoding="utf-8")
