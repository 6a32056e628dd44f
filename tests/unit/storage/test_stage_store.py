"""Commit, find, race, adopt and read, on both stores."""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import duckdb
import polars
import pyarrow as pa
import pyarrow.dataset
import pytest

from grpo_lib.config import RunConfig
from grpo_lib.errors import CorruptError, NotFoundError, StoreUnreachableError
from grpo_lib.storage import paths
from grpo_lib.storage.local import LocalStore
from grpo_lib.storage.manifests import IndexEntry
from grpo_lib.storage.objects import ObjectStore
from grpo_lib.storage.stages import ArtifactRef, StageSpec, StageStore, stage_key

Commit = Callable[..., ArtifactRef]


def stored(objects: ObjectStore) -> list[str]:
    return [info.path for info in objects.list("")]


def test_a_committed_stage_is_found_and_read(
    stages: StageStore, commit: Commit, spec: StageSpec, rewards: pa.Table
) -> None:
    ref = commit(stages)
    assert (ref.rows, ref.tokens, ref.reused, ref.iteration) == (4, 3, False, 7)
    found = stages.find(spec, ref.key, 7)
    assert found == ref.model_copy(update={"reused": True})
    assert stages.table(ref) == pa.concat_tables([rewards, rewards.slice(0, 1)])
    assert stages.table([ref, ref]).num_rows == 8
    assert stages.files(ref)["notes.txt"].to_pybytes() == b"three rewards"
    stages.verify(ref)


def test_columns_come_in_the_order_they_are_asked_for(stages: StageStore, commit: Commit) -> None:
    table = stages.table(commit(stages), columns=["reward", "rollout_id"])
    assert table.to_pydict() == {"reward": [1.0, 0.1, 0.0, 1.0], "rollout_id": [3, 1, 2, 3]}


def test_a_column_that_is_not_there_is_a_bug(stages: StageStore, commit: Commit) -> None:
    with pytest.raises(AssertionError, match="no_such"):
        stages.table(commit(stages), columns=["no_such"])


def test_a_table_on_the_local_disk_is_a_view_of_the_mapped_file(local_store: LocalStore, commit: Commit) -> None:
    stages = StageStore(local_store, "demo")
    ref = commit(stages)
    before = pa.total_allocated_bytes()
    table = stages.table(ref)
    assert table.num_rows == 4
    assert pa.total_allocated_bytes() == before


def test_what_was_never_committed_is_not_found(stages: StageStore, spec: StageSpec, config: RunConfig) -> None:
    assert stages.find(spec, stage_key(spec, config, [], 7), 7) is None


def test_the_manifest_tells_what_was_made_from_what_by_what(
    stages: StageStore, commit: Commit, config: RunConfig
) -> None:
    first = commit(stages, 0)
    manifest = stages.manifest(commit(stages, 1, inputs=(first,)))
    (source,) = manifest.inputs
    assert (source.stage, source.manifest, source.digest) == ("reward", first.manifest, first.digest)
    assert manifest.config == {"reward": config.reward.model_dump(), "rollout.samples": 8}
    assert manifest.summary == {"reward_mean": 0.5, "failed": 0}
    assert manifest.packages["pyarrow"] == pa.__version__
    assert (manifest.seed, manifest.stage_version, manifest.adopted_from) == (0, 1, None)
    assert manifest.host and manifest.code_version and manifest.seconds > 0
    assert [part.rows for part in manifest.parts] == [3, 1, None]


def test_files_lie_where_the_documentation_says(stages: StageStore, commit: Commit) -> None:
    ref = commit(stages, None)
    folder = f"runs/demo/setup/reward/{ref.key}"
    assert ref.manifest == f"{folder}/manifest.json"
    assert commit(stages, 12).manifest.startswith("runs/demo/iterations/000012/reward/")
    names = [part.path.removeprefix(folder).split("/")[2] for part in stages.manifest(ref).parts]
    assert names == ["part-00000.arrow", "part-00001.arrow", "notes.txt"]
    assert stages.objects.exists(f"index/{ref.key[:2]}/{ref.key}.json")


def test_the_same_content_has_the_same_digest_in_another_run_and_another_time(
    objects: ObjectStore, commit: Commit, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = commit(StageStore(objects, "one"))
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    second = commit(StageStore(objects, "two"))
    assert first.digest == second.digest
    assert first.manifest != second.manifest


def test_the_policy_digest_is_part_of_the_content(stages: StageStore, spec: StageSpec, config: RunConfig) -> None:
    def digest(run: str, **summary: str | float) -> str:
        with StageStore(stages.objects, run).attempt(spec, config, "a" * 64, [], 7) as attempt:
            return attempt.commit(summary=summary).digest

    assert digest("a", policy_digest="x", loss=1.0) == digest("b", policy_digest="x", loss=2.0)
    assert digest("c", policy_digest="x") != digest("d", policy_digest="y")


def test_a_stage_may_commit_a_summary_without_files(stages: StageStore, spec: StageSpec, config: RunConfig) -> None:
    with stages.attempt(spec, config, "a" * 64, [], None) as attempt:
        ref = attempt.commit(rows=5, summary={"note": None, "steps": [1, 2]}, seconds=2.5)
    assert (ref.rows, ref.seconds) == (5, 2.5)
    assert stages.manifest(ref).summary == {"note": None, "steps": [1, 2]}
    assert stages.files(ref) == {}
    with pytest.raises(NotFoundError, match="no parts"):
        stages.folder(ref)


def test_a_summary_with_nan_is_refused_and_nothing_is_committed(
    stages: StageStore, spec: StageSpec, config: RunConfig, rewards: pa.Table
) -> None:
    with stages.attempt(spec, config, "a" * 64, [], 7) as attempt:
        attempt.write_table(rewards)
        with pytest.raises(ValueError, match=r"summary\.reward_mean"):
            attempt.commit(summary={"reward_mean": float("nan")})
    assert stored(stages.objects) == []


def test_an_attempt_without_commit_leaves_nothing(
    stages: StageStore, spec: StageSpec, config: RunConfig, rewards: pa.Table
) -> None:
    def die_half_way() -> None:
        with stages.attempt(spec, config, "a" * 64, [], 7) as attempt:
            attempt.write_table(rewards)
            attempt.write_file("weights.bin", b"123")
            assert stages.find(spec, "a" * 64, 7) is None
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        die_half_way()
    assert stages.find(spec, "a" * 64, 7) is None
    assert stages.manifests() == []
    assert stored(stages.objects) == []


def test_an_attempt_that_cannot_be_cleaned_away_says_so_and_keeps_the_first_error(
    stages: StageStore,
    spec: StageSpec,
    config: RunConfig,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(_: object) -> None:
        raise StoreUnreachableError("read-only")

    monkeypatch.setattr(stages.objects, "delete", refuse)

    def fail() -> None:
        with stages.attempt(spec, config, "a" * 64, [], 7):
            raise RuntimeError("first")

    with caplog.at_level(logging.WARNING), pytest.raises(RuntimeError, match="first"):
        fail()
    assert "left behind" in caplog.text and "read-only" in caplog.text


def test_the_loser_of_a_race_reads_the_winner_and_leaves_nothing(
    stages: StageStore, spec: StageSpec, config: RunConfig, rewards: pa.Table
) -> None:
    with (
        stages.attempt(spec, config, "a" * 64, [], 7) as fast,
        stages.attempt(spec, config, "a" * 64, [], 7) as slow,
    ):
        slow.write_table(rewards.slice(0, 1))
        fast.write_table(rewards)
        won = fast.commit()
        lost = slow.commit()
    assert (won.reused, lost.reused) == (False, True)
    assert lost.digest == won.digest
    assert stages.table(lost).num_rows == 3
    assert len(stored(stages.objects)) == 3  # part, manifest, index


def test_of_many_attempts_at_once_one_wins_and_all_agree(
    stages: StageStore, spec: StageSpec, config: RunConfig, rewards: pa.Table
) -> None:
    ready = Barrier(6)

    def attempt_it(number: int) -> ArtifactRef:
        with stages.attempt(spec, config, "a" * 64, [], 7) as attempt:
            attempt.write_table(rewards.append_column("writer", pa.array([number] * 3)))
            ready.wait()
            return attempt.commit()

    with ThreadPoolExecutor(6) as pool:
        refs = list(pool.map(attempt_it, range(6)))
    assert sum(not ref.reused for ref in refs) == 1
    assert len({ref.digest for ref in refs}) == 1
    assert len(stored(stages.objects)) == 3


def test_parts_are_kept_when_the_answer_to_the_commit_is_lost(
    stages: StageStore, commit: Commit, spec: StageSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = stages.objects.create

    def create_and_lose_the_answer(path: str, data: bytes) -> bool:
        create(path, data)
        raise StoreUnreachableError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(stages.objects, "create", create_and_lose_the_answer)
        with pytest.raises(StoreUnreachableError, match="no answer"):
            commit(stages)
    (manifest,) = stages.manifests()
    found = stages.find(spec, manifest.key, 7)
    assert found is not None
    stages.verify(found)


def test_another_run_adopts_what_has_the_same_key(
    objects: ObjectStore, commit: Commit, spec: StageSpec, rewards: pa.Table
) -> None:
    donor, heir = StageStore(objects, "donor"), StageStore(objects, "heir")
    given = commit(donor)
    parts = len(stored(objects))
    taken = heir.find(spec, given.key, 7)
    assert taken is not None
    assert (taken.run, taken.reused, taken.digest) == ("heir", True, given.digest)
    assert heir.find(spec, given.key, 7) == taken
    old, new = donor.manifest(given), heir.manifest(taken)
    assert (new.adopted_from, new.created_ms, new.summary) == (given.manifest, old.created_ms, old.summary)
    assert new.parts == old.parts
    assert heir.table(taken) == donor.table(given)
    assert len(stored(objects)) == parts + 1
    assert [manifest.run for manifest in heir.manifests()] == ["heir"]
    assert [manifest.run for manifest in donor.manifests()] == ["donor"]


def test_adopting_twice_at_once_gives_the_same(objects: ObjectStore, commit: Commit, spec: StageSpec) -> None:
    given = commit(StageStore(objects, "donor"))
    heir = StageStore(objects, "heir")
    with ThreadPoolExecutor(4) as pool:
        refs = list(pool.map(lambda _: heir.find(spec, given.key, 7), range(4)))
    assert len(set(refs)) == 1


@pytest.mark.parametrize("what", ["manifest gone", "part gone", "manifest damaged", "index damaged", "wrong manifest"])
def test_an_index_entry_that_leads_nowhere_is_ignored(
    objects: ObjectStore, commit: Commit, spec: StageSpec, what: str
) -> None:
    donor, heir = StageStore(objects, "donor"), StageStore(objects, "heir")
    given = commit(donor)
    index = paths.index_path(given.key)
    if what == "manifest gone":
        objects.delete([given.manifest])
    elif what == "part gone":
        objects.delete([donor.manifest(given).parts[1].path])
    elif what == "manifest damaged":
        objects.put_bytes(given.manifest, b"{}")
    elif what == "index damaged":
        objects.put_bytes(index, b"\xff../../etc")
    else:
        objects.put_bytes(index, IndexEntry(manifest=commit(donor, 8).manifest).model_dump_json().encode())
    assert heir.find(spec, given.key, 7) is None
    assert not commit(heir).reused
    third = StageStore(objects, "third").find(spec, given.key, 7)
    assert third is not None and StageStore(objects, "third").manifest(third).parts[0].path.startswith("runs/heir/")


def test_manifests_come_by_iteration_and_time(stages: StageStore, commit: Commit) -> None:
    for iteration in (2, None, 10, 0):
        commit(stages, iteration)
    assert [manifest.iteration for manifest in stages.manifests()] == [None, 0, 2, 10]


def test_files_are_downloaded_and_verified(stages: StageStore, commit: Commit, tmp_path: Path) -> None:
    ref = commit(stages)
    stages.download(ref, tmp_path / "copy")
    assert (tmp_path / "copy" / "notes.txt").read_bytes() == b"three rewards"
    assert len(list((tmp_path / "copy").iterdir())) == 3
    part = stages.manifest(ref).parts[0]
    stages.objects.put_bytes(part.path, bytes(part.size))
    with pytest.raises(CorruptError, match=part.path):
        stages.download(ref, tmp_path / "again")
    assert list((tmp_path / "again").iterdir()) == []


def test_a_file_from_disk_is_stored_with_its_sha256(
    stages: StageStore, spec: StageSpec, config: RunConfig, tmp_path: Path
) -> None:
    (tmp_path / "weights").write_bytes(b"1234")
    with stages.attempt(spec, config, "a" * 64, [], 7) as attempt:
        attempt.write_file("weights.bin", tmp_path / "weights")
        ref = attempt.commit()
    (part,) = stages.manifest(ref).parts
    assert (part.name, part.size, part.rows) == ("weights.bin", 4, None)
    assert part.sha256 == "03ac674216f3e15c761ee1a5e255f067953623c8b388b4459e13f978d7c846f4"
    stages.verify(ref)


def test_a_manifest_that_was_made_again_differently_is_noticed(
    stages: StageStore, spec: StageSpec, config: RunConfig, commit: Commit
) -> None:
    ref = commit(stages)
    stages.objects.delete([ref.manifest])
    with stages.attempt(spec, config, ref.key, [], 7) as attempt:
        attempt.commit()
    with pytest.raises(CorruptError, match="made again"):
        stages.table(ref)


def test_the_folder_opens_with_other_readers(
    local_store: LocalStore, spec: StageSpec, config: RunConfig, rewards: pa.Table
) -> None:
    stages = StageStore(local_store, "demo")
    with stages.attempt(spec, config, "a" * 64, [], 7) as attempt:
        attempt.write_table(rewards)
        attempt.write_table(rewards)
        ref = attempt.commit()
    folder = stages.folder(ref)
    dataset = pyarrow.dataset.dataset(folder, format="ipc")
    assert dataset.to_table() == stages.table(ref)
    assert polars.read_ipc(f"{folder}/*.arrow", memory_map=False)["reward"].sum() == pytest.approx(2.2)
    assert duckdb.sql("select count(*), sum(len(token_ids)) from dataset").fetchone() == (6, 6)


def test_a_compressed_folder_opens_with_other_readers(
    s3_store: ObjectStore, commit: Commit, tmp_path: Path, rewards: pa.Table
) -> None:
    stages = StageStore(s3_store, "demo")
    ref = commit(stages)
    assert stages.folder(ref).startswith(f"{s3_store.uri}/runs/demo/iterations/000007/reward/")
    stages.download(ref, tmp_path)
    assert polars.read_ipc(tmp_path / "part-00000.arrow", memory_map=False)["rollout_id"].to_list() == [3, 1, 2]
    dataset = pyarrow.dataset.dataset(tmp_path / "part-00000.arrow", format="ipc")
    assert dataset.to_table() == rewards


def test_what_a_failed_attempt_keeps_is_found_unless_it_is_damaged(objects: ObjectStore, rewards: pa.Table) -> None:
    stages = StageStore(objects, "demo")
    assert list(stages.kept("reward", 7)) == []
    stages.keep("reward", 7, "c0ffee", rewards)
    stages.keep("reward", 7, "c0ffee", rewards.slice(0, 1))
    stages.keep("reward", 8, "c0ffee", rewards.slice(0, 1))
    stages.keep("greedy_reward", 7, "c0ffee", rewards.slice(0, 1))
    assert sorted(each.num_rows for each in stages.kept("reward", 7)) == sorted([rewards.num_rows, 1])
    assert stages.manifests(7) == []
    for info in list(objects.list("runs/demo/iterations/000007/reward")):
        assert info.path.startswith("runs/demo/iterations/000007/reward/c0ffee/judged/")
        objects.put_bytes(info.path, objects.get(info.path)[:-1] + b"x")
    assert list(stages.kept("reward", 7)) == []
