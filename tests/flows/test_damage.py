"""A byte that changed anywhere is noticed where it is read; what can be made again is, and nothing else is touched."""

import json
import random
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli.main import app
from grpo_lib.config import RunConfig
from grpo_lib.config_branch import ORDER
from grpo_lib.errors import CorruptError
from grpo_lib.mending import Verdict, mend, note_damage, verdicts
from grpo_lib.run import Run
from grpo_lib.storage import paths
from grpo_lib.storage.manifests import Manifest
from grpo_lib.storage.verify import verify_run
from tests.flows.runs import Tiny, fresh_process, of, train

pytestmark = pytest.mark.usefixtures("prefect_here")

FLIPS = 200
RESUMED = 10


def flip(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= draw.randrange(1, 256)
    path.write_bytes(data)


def stored(config: RunConfig) -> list[str]:
    """Manifests and parts of the run: what is not empty of it."""
    run = Run(config)
    files = [info for info in run.objects.list(paths.iteration_folder(run.name, None).rpartition("/")[0]) if info.size]
    names = ("run.json", "continued.json", "curve.png")
    return [info.path for info in files if "/leases/" not in info.path and paths.file_name(info.path) not in names]


def digests(config: RunConfig) -> dict[str, tuple[str, str]]:
    return {each.path: (each.manifest_sha256, each.digest) for each in Run(config).stages.manifests()}


def contents(config: RunConfig) -> dict[str, str]:
    """Content digests; but for `publish`, in whose points are seconds."""
    return {path: digest for path, (_, digest) in digests(config).items() if "/publish/" not in path}


def read_like_a_stage(run: Run, manifest: Manifest, folder: Path) -> None:
    """As the stages read an artifact: by its manifest, its tables, or as a folder of files."""
    ref = run.stages.manifest(manifest.to_ref(reused=True)).to_ref(reused=True)
    if any(part.rows is None for part in manifest.parts):
        run.stages.download(ref, folder)
        shutil.rmtree(folder)
    elif manifest.parts:
        run.stages.table(ref)


def judged(config: RunConfig) -> list[Verdict]:
    run = Run(config)
    return verdicts(run, verify_run(run.objects, run.name))


def train_after_damage(config: RunConfig) -> None:
    assert CliRunner().invoke(app, ["verify", "tiny", "--store", config.store.uri]).exit_code == 2
    fresh_process()
    train(config)


def test_every_flipped_byte_is_noticed_by_who_reads_the_file_and_by_verify(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny()
    manifests = train(config)
    run, root, draw = Run(config), Path(config.store.uri), random.Random(0)
    by_file = {path: each for each in manifests for path in [each.path, *(part.path for part in each.parts)]}
    files = stored(config)
    assert set(files) <= set(by_file), "everything of a run belongs to an artifact"
    assert judged(config) == []
    for number in range(FLIPS):
        path = draw.choice(files)
        before = (root / path).read_bytes()
        flip(root / path, draw)
        with pytest.raises(CorruptError) as caught:
            read_like_a_stage(run, by_file[path], tmp_path / "copy")
        assert path in str(caught.value), f"flip {number}"
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        (found,) = (each.damage for each in judged(config)) if number % 20 == 0 else [None]
        assert found is None or found.path == path
        (root / path).write_bytes(before)
    assert judged(config) == []


@pytest.mark.slow
def test_resume_makes_damaged_files_again_and_the_run_is_what_it_was(tiny: Tiny) -> None:
    config = tiny("checkpoint.every=1")
    train(config)
    before, draw, root = contents(config), random.Random(1), Path(config.store.uri)
    files = stored(config)
    stages = set()
    for path in draw.sample(files, RESUMED):
        damaged = root / path
        flip(damaged, draw)
        bytes_of_it = damaged.read_bytes()
        train_after_damage(config)
        assert contents(config) == before, path
        assert judged(config) == []
        kept = [each for each in (root / "damaged").rglob("*") if each.is_file() and each.read_bytes() == bytes_of_it]
        assert kept, f"{path} was destroyed"
        stages.add(next(step for step in path.split("/") if step in ORDER))
    assert len(stages) >= 4, stages
    saved = {
        each.path: (root / each.path).read_bytes() for each in of(Run(config).stages.manifests(), "checkpoint")[0].parts
    }
    for path in saved:
        flip(root / path, draw)
    train_after_damage(config)
    assert {path: (root / path).read_bytes() for path in saved} == saved
    for publication in of(Run(config).stages.manifests(), "publish"):
        flip(root / publication.path, draw)
    train_after_damage(config)
    with sqlite3.connect(root / "mlflow.db") as database:
        points = database.execute("select key, step, count(*) from metrics group by key, step").fetchall()
    assert len(points) > 100 and {count for _, _, count in points} == {1}
    assert not list(root.rglob("remake.json")) and not list(root.rglob("damage.json"))


def test_a_stage_that_comes_upon_damage_has_the_next_resume_mend_it(tiny: Tiny) -> None:
    config = tiny()
    manifests = train(config)
    before, root = digests(config), Path(config.store.uri)
    rollout, lost = of(manifests, "rollout", 0)[0], of(manifests, "advantage", 0)[0]
    sound = (root / rollout.parts[0].path).read_bytes()
    flip(root / rollout.parts[0].path, random.Random(0))
    shutil.rmtree((root / lost.path).parent)
    fresh_process()
    with pytest.raises(CorruptError, match=rf"{rollout.parts[0].path} .*`grpo verify tiny`"):
        train(config)
    fresh_process()
    train(config)
    after = digests(config)
    assert after.keys() == before.keys()
    assert {path for path in before if before[path] != after[path]} == {lost.path}
    assert (root / rollout.parts[0].path).read_bytes() == sound, "in its place: others refer to it"
    assert (root / "damaged" / rollout.parts[0].path).exists()


def test_paid_data_is_left_alone_with_all_that_can_only_be_made_from_it(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny()
    manifests = train(config)
    root, draw = Path(config.store.uri), random.Random(0)
    rollout = next(each for each in of(manifests, "rollout", 1) if each.shard == 0)
    reward = next(each for each in of(manifests, "reward", 1) if each.shard == 0)
    dataset = of(manifests, "dataset")[0]
    for each in (rollout, reward, dataset):
        flip(root / each.parts[0].path, draw)
    files = {path: (root / path).read_bytes() for path in stored(config)}
    monkeypatch.setattr("grpo_lib.mending.draws_the_same_again", lambda config: False)
    found = {each.damage.manifest: each for each in judged(config)}
    assert {path: each.again for path, each in found.items()} == {
        rollout.path: False, reward.path: False, dataset.path: True
    }  # fmt: skip
    assert "paid data" in found[rollout.path].remedy
    assert "`grpo rerun tiny --iteration 1 --from rollout`" in found[rollout.path].remedy
    assert f"made from {rollout.path}" in found[reward.path].remedy
    note_damage(Run(config).objects, "tiny", "test")
    mend(Run(config))
    gone = {path for path, data in files.items() if not (root / path).exists() or (root / path).read_bytes() != data}
    assert gone == {dataset.path}


def test_what_comes_out_differently_the_second_time_is_not_committed(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny()
    manifests = train(config)
    reward, root = of(manifests, "reward", 1)[0], Path(config.store.uri)
    flip(root / reward.parts[0].path, random.Random(0))
    assert CliRunner().invoke(app, ["verify", "tiny", "--store", str(root)]).exit_code == 2
    import tasks.reward

    class Other:
        make_reward = staticmethod(lambda options, settings: lambda sample: 0.25)

    with monkeypatch.context() as patch:
        patch.setattr(tasks.reward, "get_problem", lambda name: Other)
        fresh_process()
        with pytest.raises(
            CorruptError, match=r"damaged and set aside. Made again, .*grpo rerun tiny --iteration 1 --from"
        ):
            train(config)
    assert not (root / reward.path).exists()
    fresh_process()
    train(config)  # with the reward as it was
    assert judged(config) == []


def test_a_damaged_artifact_of_another_run_is_made_anew_or_taken_again_from_there(tiny: Tiny) -> None:
    donor, heir = tiny("name=donor"), tiny("name=heir", "reward.correct=2")
    train(donor)
    shared = next(each for each in of(train(heir), "rollout", 0) if each.adopted_from)
    root, part = Path(donor.store.uri), shared.parts[0].path
    flip(root / part, random.Random(0))
    assert [each.again for each in judged(heir)] == [True]
    for name in ("donor", "heir"):
        assert CliRunner().invoke(app, ["verify", name, "--store", str(root)]).exit_code == 2
    fresh_process()
    own = next(each for each in of(train(heir), "rollout", 0) if each.shard == shared.shard)
    assert own.adopted_from is None and own.digest == shared.digest and judged(heir) == []
    fresh_process()
    train(donor)
    assert judged(donor) == []


def test_verify_lists_damage_and_remedy_for_people_and_machines(tiny: Tiny) -> None:
    config = tiny()
    manifests = train(config)
    root = Path(config.store.uri)
    call = ["verify", "tiny", "--store", str(root)]
    sound = CliRunner().invoke(app, call)
    assert sound.exit_code == 0 and "all as they were committed" in sound.output
    update, checkpoint = of(manifests, "update", 0)[0], of(manifests, "checkpoint")[0]
    flip(root / update.path, random.Random(0))
    (root / checkpoint.parts[0].path).unlink()
    (root / paths.index_path(update.key)).write_bytes(b"{")
    shown = CliRunner().invoke(app, call)
    assert shown.exit_code == 2 and "2 damaged, 2 of them can be made again" in shown.output
    assert f"{update.path}\n  update of iteration 0: " in shown.output
    found = CliRunner().invoke(app, [*call, "--json"])
    values = json.loads(found.output)
    assert {each["path"]: each["problem"] for each in values["damages"]}[checkpoint.parts[0].path] == "does not exist"
    assert all(each["again"] and "grpo resume tiny" in each["remedy"] for each in values["damages"])
    everything = CliRunner().invoke(app, ["verify", "--all", "--store", str(root), "--json"])
    assert [each["run"] for each in json.loads(everything.output)] == ["tiny"]


@pytest.fixture(autouse=True)
def warm_engines_of_another_run_are_let_go() -> Iterator[None]:
    yield
    fresh_process()
