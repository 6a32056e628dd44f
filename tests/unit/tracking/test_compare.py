"""`grpo compare`: runs side by side, from what they committed alone."""

import base64
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flows.cli.main import app
from grpo_lib.config import RunConfig
from grpo_lib.config_files import make_config
from grpo_lib.errors import ConfigError
from grpo_lib.run import Run, open_run
from grpo_lib.storage import attempts
from grpo_lib.storage.stages import StageSpec, stage_key
from grpo_lib.tracking.compare import compare
from grpo_lib.tracking.compare_report import page, picture, table_of

REWARDS = {"plain": [0.1, 0.3, 0.2], "bold": [0.2, 0.4, 0.6]}
ACCURACY = {"plain": [(0, 0.25, 0.02), (3, 0.5, 0.05)], "bold": [(0, 0.25, 0.02), (2, 0.75, 0.04), (3, 0.625, 0.03)]}


class Clock:
    """Time of commits, in seconds: one every two seconds."""

    def __init__(self) -> None:
        self.now = 1_000_000

    def time_ns(self) -> int:
        self.now += 2
        return self.now * 10**9

    def perf_counter(self) -> float:
        return float(self.now)


def make_run(folder: Path, name: str, *overrides: str) -> RunConfig:
    values: dict[str, Any] = {"name": name, "data": {"problem": "countdown"}, "warm_start": {}, "iterations": 3}
    config = make_config(values | {"store": {"uri": str(folder)}}, overrides)
    run = open_run(config)

    def commit(stage: str, iteration: int, tokens: int, seconds: float, **summary: float) -> None:
        spec = StageSpec(name=stage, version=1, reads=("run_name",))
        key = stage_key(spec, config, [], iteration)
        with run.stages.attempt(spec, config, key, [], iteration) as attempt:
            attempt.commit(rows=4, tokens=tokens, summary=summary, seconds=seconds)

    for k, mean in enumerate(REWARDS[name]):
        commit("rollout", k, 100, 0.5, length_mean=10.0 + k)
        commit("reward", k, 0, 0.25, mean=mean)
        commit("update", k, 100, 1.0, policy_version=k + 1)
    for done, value, error in ACCURACY[name]:
        commit("evaluate", done, 0, 3.0, sampled_accuracy=value, sampled_accuracy_se=error)
    return config


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(attempts, "time", Clock())
    make_run(tmp_path / "store", "plain")
    make_run(tmp_path / "store", "bold", "trainer.optimizer.lr=1e-3", "reward.correct=2", "tracking.experiment=other")
    return tmp_path / "store"


def runs(store: Path) -> list[Run]:
    from grpo_lib.config_files import make_store_config
    from grpo_lib.run import load_run

    return [load_run(make_store_config(str(store), None), name) for name in ("plain", "bold")]


def test_only_settings_that_differ_and_mean_something_are_told(store: Path) -> None:
    assert compare(runs(store)).settings == {"reward.correct": [1.0, 2.0], "trainer.optimizer.lr": [1e-6, 1e-3]}


def test_final_and_best_accuracy_come_with_their_errors_and_means_with_theirs(store: Path) -> None:
    plain, bold = compare(runs(store)).runs
    assert vars(plain.final["sampled"]) == {"value": 0.5, "error": 0.05, "iteration": 3}
    assert vars(bold.final["sampled"]) == {"value": 0.625, "error": 0.03, "iteration": 3}
    assert vars(bold.best["sampled"]) == {"value": 0.75, "error": 0.04, "iteration": 2}
    assert "greedy" not in plain.final
    assert bold.reward is not None and plain.length is not None
    assert bold.reward.value == pytest.approx(0.4)
    assert bold.reward.error == pytest.approx(0.2 / 3**0.5), "standard deviation 0.2 of 3"
    assert (plain.length.value, plain.length.iteration) == (11.0, 2)


def test_speed_is_that_of_rollouts_and_of_whole_iterations(store: Path) -> None:
    plain, _ = compare(runs(store)).runs
    assert (plain.tokens, plain.tokens_per_second) == (300, 200.0)
    assert plain.seconds == {"rollout": 1.5, "reward": 0.75, "update": 3.0, "evaluate": 6.0}
    assert plain.seconds_per_iteration == 6.0, "three commits an iteration, two seconds each"


def test_the_command_prints_a_table_and_writes_json(store: Path) -> None:
    words = ["compare", "plain", "bold", "--store", str(store)]
    shown = CliRunner().invoke(app, words, env={"COLUMNS": "120"})
    assert shown.exit_code == 0, shown.output
    lines = {" ".join(line.split()) for line in shown.output.replace("│", " ").splitlines()}
    assert "trainer.optimizer.lr 1e-06 0.001" in lines
    assert "final accuracy, sampled 0.500 ± 0.050 0.625 ± 0.030" in lines
    assert "best accuracy, sampled 0.500 ± 0.050 at 3 0.750 ± 0.040 at 2" in lines
    told = json.loads(CliRunner().invoke(app, [*words, "--json"]).output)
    assert [each["run"] for each in told["runs"]] == ["plain", "bold"]
    assert told["runs"][1]["curves"]["Mean reward of the rollouts"]["values"] == REWARDS["bold"]


def test_the_page_holds_tables_and_picture_and_asks_for_nothing_from_elsewhere(store: Path, tmp_path: Path) -> None:
    html, png = tmp_path / "report.html", tmp_path / "report.png"
    words = ["compare", "plain", "bold", "--store", str(store), "--html", str(html), "--png", str(png)]
    assert CliRunner().invoke(app, words).exit_code == 0
    addresses: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
            addresses.extend(value or "" for name, value in attributes if name in ("src", "href"))
            assert tag not in ("script", "link", "iframe"), tag

    text = html.read_text()
    Reader().feed(text)
    (address,) = addresses
    inside = base64.b64decode(address.removeprefix("data:image/png;base64,"))
    assert inside.startswith(b"\x89PNG") and png.read_bytes().startswith(b"\x89PNG") and len(inside) > 10_000
    assert "<td>0.750 ± 0.040 at 2</td>" in text and "http" not in text.replace(address, "")


def test_whatever_a_setting_holds_stays_text(tmp_path: Path) -> None:
    for name, prompt in (("plain", "a"), ("bold", "<script>[bold]</script>")):
        settings = ("model.path=hub/model", "warm_start=null", "model.prompt_format=chat")
        make_run(tmp_path, name, *settings, f"model.system_prompt={prompt}")
    html = page(compare(runs(tmp_path)))
    assert "<td>&lt;script&gt;[bold]&lt;/script&gt;</td>" in html and "<script>" not in html
    shown = CliRunner().invoke(app, ["compare", "plain", "bold", "--store", str(tmp_path)], env={"COLUMNS": "120"})
    assert "<script>[bold]</script>" in shown.output


def test_a_run_that_has_not_begun_is_compared_all_the_same(store: Path) -> None:
    values = {"name": "new", "data": {"problem": "countdown"}, "warm_start": {}, "store": {"uri": str(store)}}
    new = open_run(make_config(values))
    comparison = compare([*runs(store), new])
    rows = table_of(comparison)["results"]
    assert rows["iterations"] == ["3 of 3", "3 of 3", "0 of 120"]
    assert rows["final accuracy, sampled"][2] == rows["seconds an iteration"][2] == ""
    assert picture(comparison).startswith(b"\x89PNG") and picture(compare([new])).startswith(b"\x89PNG")


def test_a_file_in_a_folder_that_is_not_there_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["compare", "a", "b", "--html", str(tmp_path / "no" / "x.html")])
    assert isinstance(done.exception, ConfigError) and "there is no folder" in str(done.exception)
    wrong = CliRunner().invoke(app, ["compare", "a/b"])
    assert wrong.exit_code == 2 and "is no name of a run" in wrong.output
