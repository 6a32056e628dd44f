"""README and docs say what is true: their commands run, and what can't run here at least is something that there is."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

import pytest
import yaml
from typer.main import get_command

from flows.cli.main import app
from grpo_lib.config import RunConfig, Section
from grpo_lib.config_data import DATA_SECTIONS
from grpo_lib.config_files import load_config, load_retrain_config
from grpo_lib.errors import ConfigError
from grpo_lib.tracking.metrics import DESCRIPTIONS
from tests.docs_blocks import LANGUAGES, PAGES, ROOT, blocks, filled, grpo_lines, prose
from tests.warm_grpo import warm_grpo

CONFIGS = ROOT / "deployments" / "configs"
SMALL: dict[str, Any] = {
    "iterations": 10,
    "data": {"train_prompts": 200, "heldout_prompts": 8},
    "model": {"small": {"hidden_size": 32, "layers": 1, "heads": 2, "kv_heads": 2, "mlp_size": 32}},
    "warm_start": {"steps": 3, "warmup_steps": 1, "batch_size": 4, "demonstrations": 16},
    "rollout": {"prompts": 2, "samples": 2, "max_new_tokens": 16},
    "trainer": {"optimizer": {"warmup_steps": 0}},
    "evaluation": {"every": 10, "prompts": 4, "samples": 2},
    "checkpoint": {"every": 5},
    "tracking": {"system_seconds": None},
}
"""What makes the ready configurations small enough for a test; all else is as people run them."""
LEAST: dict[str, Any] = {"data": {"problem": "countdown"}, "warm_start": {}, "evaluation": {"prompts": 4}}
"""What settings that a page shows are laid over."""
FILES = {
    "responses.jsonl": '{"prompt": "1 + 1 = ?", "response": "It is $2$.", "reference": "2"}\n',
    "my_reward.py": "def reward(sample, *, bonus=0.1):\n    return float(sample.reference in sample.response)\n",
    "my_rewards.py": "def strict(sample):\n    return float(sample.reference in sample.response)\n",
}
"""What pages speak of without showing it."""
NO_SETTINGS = {"model.generate", "branch.json"}
BLOCK_SECONDS = 300
RUNNING = [page for page in PAGES if any(block.runs for block in blocks(page))]
METRICS = [re.compile(re.sub(r"<\w+>", r"[\\w/.-]+", re.sub(r"([.+])", r"\\\1", name))) for name in DESCRIPTIONS]
KINDS = {name.partition("/")[0] for name in DESCRIPTIONS} - {"system"}
INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(scope="module")
def environment(prefect_server: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Of a person's terminal, with the session's Prefect server and a `grpo` that starts quickly."""
    made = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "GRPO_"))}
    made |= prefect_server | {"RAY_TMPDIR": str(tmp_path_factory.mktemp("ray")), "COLUMNS": "100"}
    made |= {"PYTHONPATH": str(ROOT), "RUN": "demo", "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL"}
    with warm_grpo(made) as folder:
        path = [folder, sysconfig.get_path("scripts"), os.environ["PATH"]]
        yield made | {"PATH": os.pathsep.join(path)}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Path:
    """A checkout's configurations, made small, and a store with the runs `demo` and `other`."""
    folder = tmp_path_factory.mktemp("prepared")
    for file in CONFIGS.rglob("*.yaml"):
        copy = folder / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(yaml.safe_dump({"extends": str(file)} | SMALL))
    for name, text in FILES.items():
        (folder / name).write_text(text)
    demo = "grpo run deployments/configs/demo.yaml"
    execute(folder, environment, f"{demo} name=demo && {demo} name=other iterations=4 algorithm.advantage=rloo")
    return folder


def execute(folder: Path, environment: dict[str, str], script: str, code: int = 0, place: str = "") -> None:
    """Runs a script in the folder with bash; what it exports is there for the next one."""
    (folder / ".script").write_text(
        f"set -euo pipefail\n[ -f .exported ] && . ./.exported\ntrap 'export -p > .exported' EXIT\n{script}\n"
    )
    done = subprocess.run(
        ["bash", ".script"], cwd=folder, env=environment, capture_output=True, text=True, timeout=BLOCK_SECONDS,
        check=False,
    )  # fmt: skip
    said = f"{place}\n{script}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    assert done.returncode == code, said


@pytest.mark.slow
@pytest.mark.parametrize("page", RUNNING, ids=name_of)
def test_the_blocks_of_a_page_run_one_after_another(
    page: Path, prepared: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "checkout"
    shutil.copytree(prepared, folder)
    for block in (each for each in blocks(page) if each.runs):
        if block.file is not None:
            (folder / block.file).write_text(filled(block.text))
        if block.language == "sh":
            execute(folder, environment, f"{block.given}\n{filled(block.text)}", block.exits, block.place)
        elif block.language == "python":
            (folder / ".block.py").write_text(filled(f"{block.given}\n{block.text}"))
            execute(folder, environment, f"{sys.executable} .block.py", block.exits, block.place)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks_name_their_language_and_those_that_do_not_run_a_reason(page: Path) -> None:
    for block in blocks(page):
        assert block.language in LANGUAGES, f"{block.place}: name the language, one of {LANGUAGES}"
        assert block.not_run != "", f"{block.place}: say why it is not run"
        known = re.compile(r"not run: |given: |exits \d+$")
        assert all(known.match(each) for each in block.remarks), f"{block.place}: {block.remarks}"
    indented = re.findall(r"^    \$? ?(?:grpo|make|pip|python) .*", prose(page), re.MULTILINE)
    assert page.name == "cli.md" or indented == [], "commands belong into a fenced block with a language"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_options_and_settings_are_ones_that_there_are(page: Path) -> None:
    for block in blocks(page):
        if block.language == "sh":
            check_calls(block.text, block.place)
        if block.language == "text":  # what a terminal shows
            for line in re.findall(r"^\$ (grpo .*)", block.text, re.MULTILINE):
                check_calls(line, block.place)
    for code in INLINE.findall(prose(page)):
        if code.startswith("grpo "):
            check_calls(code.replace("\\|", "|").removesuffix("..."), f"{name_of(page)}: `{code}`", whole=False)


def check_calls(script: str, place: str, whole: bool = True) -> None:
    for words in grpo_lines(script):
        check_call(words, place, whole)


def check_call(words: list[str], place: str, whole: bool) -> None:
    """Parses the arguments as the command would, without running it.

    Args:
        whole: arguments may not be missing.
    """
    command: Any = get_command(app)
    while words and hasattr(command, "commands"):
        if words[0].startswith("-") or words[0] == "COMMAND":
            return
        assert words[0] in command.commands, f"{place}: there is no command {words[0]!r}"
        command, words = command.commands[words[0]], words[1:]
    try:
        given = command.make_context(command.name, list(words)).params
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        if type(error).__name__ in ("MissingParameter", "BadOptionUsage") and not whole:
            return
        pytest.fail(f"{place}: {error.format_message()}")
    file = given.get("config") or ""
    settings = list(given.get("overrides") or [])
    retraining = command.name in ("retrain", "watch")
    load, usual = (load_retrain_config, "retrain.yaml") if retraining else (load_config, "demo.yaml")
    load(ROOT / file if (ROOT / file).is_file() else CONFIGS / usual, settings)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("grpo rum CONFIG", "no command 'rum'"),
        ("grpo run CONFIG --sede 1", "No such option: --sede"),
        ("PYTHONPATH=. grpo run CONFIG rollout.sample=3 &", "rollout.sample: no such setting"),
        ("grpo show | grpo rerun RUN --from update", "Missing option '-k'"),
        ("grpo run CONFIG \\\n  trainer.epochs=none", "trainer.epochs"),
    ],
)
def test_a_line_that_is_wrong_is_found(line: str, says: str) -> None:
    with pytest.raises((AssertionError, ConfigError, pytest.fail.Exception), match=re.escape(says)):
        check_calls(line, "here")
    assert not exists(["rollout", "sample"]) and exists(["rollout", "samples"]) and exists(["data", "columns", "mine"])


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_yaml_blocks_are_settings_of_a_run(page: Path, tmp_path: Path) -> None:
    (tmp_path / "deployments").symlink_to(ROOT / "deployments")
    (tmp_path / "least.yaml").write_text(yaml.safe_dump(LEAST))
    for number, block in enumerate(blocks(page)):
        if block.language != "yaml":
            continue
        values = yaml.safe_load(block.text)
        if block.not_run is None:
            file = tmp_path / f"{number}.yaml"
            file.write_text(yaml.safe_dump({"extends": "least.yaml"} | values))
            load_config(file)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_settings_and_metrics_in_the_text_are_ones_that_there_are(page: Path) -> None:
    wrong = []
    for code in INLINE.findall(prose(page)):
        word = code.split()[0] if code.split() else ""
        setting = re.fullmatch(r"([a-z_]+(?:\.[a-z_]+)+)(?:[=:].*)?", word)
        if setting and setting[1].partition(".")[0] in RunConfig.model_fields:
            wrong += [] if word in NO_SETTINGS or exists(setting[1].split(".")) else [word]
        if re.fullmatch(r"[a-z_]+(/[a-z_0-9]+)+", word) and word.partition("/")[0] in KINDS:
            wrong += [] if any(each.fullmatch(word) for each in METRICS) else [word]
    assert wrong == []


def exists(steps: list[str]) -> bool:
    """Whether there is such a setting, or something in the free part of one."""
    return any(True for _ in leads_to([RunConfig], steps))


def leads_to(sections: list[type[Section]], steps: list[str]) -> Iterator[None]:
    if not steps:
        yield None
    for section in sections:
        field = section.model_fields.get(steps[0]) if steps else None
        if field is None:
            continue
        below = list(DATA_SECTIONS) if section is RunConfig and steps[0] == "data" else inside(field.annotation)
        if len(steps) == 1 or (not below and "dict" in str(field.annotation)):
            yield None
        elif below:
            yield from leads_to(below, steps[1:])


def inside(annotation: Any) -> list[type[Section]]:
    parts = [annotation, *(get_args(annotation) if get_origin(annotation) is not None else [])]
    found = [each for each in parts if isinstance(each, type) and each is not NoneType]
    return [each for each in found if get_origin(each) is None and issubclass(each, Section)]
