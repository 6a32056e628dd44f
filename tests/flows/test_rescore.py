"""`grpo rescore`: another reward over what a run has generated; the run is not touched, and nothing is loaded."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import polars
import pytest
from typer.testing import CliRunner

from flows.cli.main import app
from grpo_lib.config import RunConfig
from grpo_lib.config_files import make_config
from grpo_lib.errors import ConfigError, NotFoundError
from grpo_lib.rewards.judges import own_reward
from grpo_lib.rewards.rescore import rescore, stored_rollouts
from grpo_lib.run import Run
from grpo_lib.types import RewardResult
from tests.flows.runs import train
from tests.flows.tiny import TINY, use_easy_reward

pytestmark = pytest.mark.usefixtures("prefect_here")

REWARDS = """
from grpo_lib.types import RewardResult

def same(sample):
    digits = sum(character.isdigit() for character in sample.response)
    return RewardResult(value=1.0 * digits, components={"correct": float(digits > 4)})

def short(sample):
    if not sample.response:
        raise ValueError("nothing was said")
    return 1.0 if sample.response_tokens < 12 else None
"""


@pytest.fixture(scope="module")
def trained(prefect_here: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunConfig]:
    import tasks.reward

    folder = tmp_path_factory.mktemp("rescore")
    (folder / "other_rewards.py").write_text(REWARDS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks.reward, "get_problem", use_easy_reward)
        config = make_config(TINY | {"iterations": 3, "store": {"uri": str(folder / "store")}})
        train(config)
        yield config


def rewards_of(config: RunConfig) -> Path:
    return Path(config.store.uri).parent / "other_rewards.py"


def command(config: RunConfig, *words: str) -> dict[str, object]:
    result = CliRunner().invoke(app, ["rescore", "tiny", *words, "--json", "--store", config.store.uri])
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def stored(config: RunConfig) -> dict[str, bytes]:
    root = Path(config.store.uri)
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_the_reward_of_the_run_again_agrees_with_itself_everywhere(trained: RunConfig) -> None:
    before = stored(trained)
    found = command(trained, "--reward", f"{rewards_of(trained)}:same")
    everything = found["all"]
    assert (everything["rollouts"], everything["compared"], everything["equal_fraction"]) == (24, 24, 1.0)
    assert everything["old"] == everything["new"] and everything["mean_change"] == 0.0
    assert everything["correlation"] == pytest.approx(1.0)
    assert everything["only_old_right"] == everything["only_new_right"] == 0
    assert set(found["iteration"]) == {"0", "1", "2"} and len(found["data_source"]) == 1
    assert stored(trained) == before


def test_another_reward_is_reported_beside_the_old_one_with_reasons_where_there_is_none(
    trained: RunConfig, tmp_path: Path
) -> None:
    output, picture = tmp_path / "both.parquet", tmp_path / "both.png"
    found = command(
        trained, "--reward", f"{rewards_of(trained)}:short", "--iterations", "1-2", "--output", str(output), "--plot",
        str(picture),
    )  # fmt: skip
    rows = polars.read_parquet(output)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert rows["iteration"].unique().sort().to_list() == [1, 2] and len(rows) == 16
    run = Run(trained)
    for k in (1, 2):
        made = [each for each in run.manifests(k) if each.stage in ("rollout", "reward")]
        tables = {
            stage: run.stages.table([each.to_ref(reused=True) for each in made if each.stage == stage])
            for stage in ("rollout", "reward")
        }
        mine = rows.filter(polars.col("iteration") == k)
        by_id = {row["rollout_id"]: row["value"] for row in tables["reward"].to_pylist()}
        assert {row["rollout_id"]: row["old_value"] for row in mine.iter_rows(named=True)} == by_id
        lengths = {row["rollout_id"]: len(row["response_ids"]) for row in tables["rollout"].to_pylist()}
        for row in mine.filter(polars.col("new_reason").is_null()).iter_rows(named=True):
            assert row["new_value"] == 1.0 and lengths[row["rollout_id"]] < 12
    known = rows["new_value"].drop_nulls()
    assert found["all"]["new"]["scored"] == len(known) < 16
    assert found["all"]["new"]["null"] == sum(found["null_reasons"]["new"].values())
    assert any("reward must be a number, found None" in each for each in found["null_reasons"]["new"])


def test_it_is_read_by_people_too(trained: RunConfig) -> None:
    words = ["rescore", "tiny", "--reward", f"{rewards_of(trained)}:short", "--store", trained.store.uri]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0, shown.output
    assert "without a new reward" in shown.output and "right by both" in shown.output and "█" in shown.output


def test_only_what_was_judged_from_exactly_these_rollouts_is_their_old_reward(trained: RunConfig) -> None:
    run = Run(trained)
    (first, *_) = stored_rollouts(run)
    assert [each is not None for each in first.rewards] == [True, True]
    bare = type(first)(iteration=0, prompts=first.prompts, rollouts=first.rollouts, rewards=[first.rewards[0], None])
    table = rescore(run, [bare], own_reward(lambda sample: RewardResult(value=0.5)))
    assert table.column("judged").to_pylist() == [True] * 4 + [False] * 4
    assert table.column("old_value").to_pylist()[4:] == [None] * 4


def test_iterations_that_are_not_there_are_named(trained: RunConfig) -> None:
    with pytest.raises(NotFoundError, match="no rollouts from iteration 7 on; it has some of iterations 0 to 2"):
        stored_rollouts(Run(trained), 7)


@pytest.mark.parametrize("text", ["2-1", "x", "-3", "1-2-3"])
def test_iterations_that_make_no_sense_are_refused(trained: RunConfig, text: str) -> None:
    from flows.cli.rescore import _range

    with pytest.raises(ConfigError, match="--iterations"):
        _range(text)


def test_neither_a_model_nor_prefect_is_loaded(trained: RunConfig) -> None:
    words = ["rescore", "tiny", "--reward", f"{rewards_of(trained)}:same", "--store", trained.store.uri, "--json"]
    code = (
        f"import sys; from flows.cli.main import app; app({words!r}, standalone_mode=False); "
        "print(sorted({'transformers', 'prefect', 'vllm', 'mlflow'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
