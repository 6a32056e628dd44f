"""A changed, missing or cut byte anywhere is reported with the path of the file that it is in."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lib.errors import CorruptError
from grpo_lib.storage.manifests import InputRef, Manifest, Part, canonical_json, read_manifest
from grpo_lib.storage.stages import ArtifactRef, StageSpec, StageStore

Commit = Callable[..., ArtifactRef]
DIGEST = "0123456789abcdef" * 4

MANIFEST = Manifest(
    stage="reward",
    stage_version=1,
    key=DIGEST,
    digest=DIGEST,
    run="demo",
    iteration=7,
    shard=0,
    rows=3,
    tokens=12,
    parts=[Part(path="runs/demo/a/part-00000.arrow", size=1024, sha256=DIGEST, rows=3)],
    inputs=[InputRef(stage="rollout", manifest="runs/demo/b/manifest.json", digest=DIGEST)],
    config={"reward": {"correct": 1.0, "format_only": 0.1}, "rollout.samples": 8},
    seed=0,
    summary={"reward_mean": 1e-07, "note": "größer", "none": None, "big": 1e22},
    created_ms=1_700_000_000_000,
    seconds=1.5,
    host="host",
    code_version="0.1.0",
    packages={"pyarrow": "25.0.1"},
    adopted_from=None,
).sealed()


def flipped(data: bytes, position: int, mask: int = 1) -> bytes:
    return data[:position] + bytes([data[position] ^ mask]) + data[position + 1 :]


def test_a_manifest_reads_back_as_it_was_written() -> None:
    assert read_manifest(MANIFEST.path, MANIFEST.to_bytes()) == MANIFEST


@given(position=st.integers(0, len(MANIFEST.to_bytes()) - 1), mask=st.integers(1, 255))
@settings(max_examples=500, deadline=None)
def test_any_changed_byte_of_a_manifest_is_noticed(position: int, mask: int) -> None:
    with pytest.raises(CorruptError, match=MANIFEST.path):
        read_manifest(MANIFEST.path, flipped(MANIFEST.to_bytes(), position, mask))


@given(length=st.integers(0, len(MANIFEST.to_bytes()) - 1))
@settings(max_examples=50, deadline=None)
def test_a_cut_manifest_is_noticed(length: int) -> None:
    with pytest.raises(CorruptError, match=MANIFEST.path):
        read_manifest(MANIFEST.path, MANIFEST.to_bytes()[:length])


@pytest.mark.parametrize(
    ("old", "new"),
    [(b'"rows":3', b'"rows": 3'), (b"1e+22", b"1e999"), (b"1e+22", b"NaN"), (b'"seed":0', b'"seed":0,"seed":0')],
)
def test_a_manifest_that_is_not_in_the_canonical_form_is_refused(old: bytes, new: bytes) -> None:
    data = MANIFEST.to_bytes()
    assert old in data
    with pytest.raises(CorruptError, match=MANIFEST.path):
        read_manifest(MANIFEST.path, data.replace(old, new, 1))


def test_a_manifest_of_a_later_format_is_refused_with_both_numbers() -> None:
    later = MANIFEST.model_copy(update={"format": 2}).sealed()
    with pytest.raises(CorruptError, match="format 2; this version reads format 1"):
        read_manifest(later.path, later.to_bytes())


def test_a_manifest_in_another_place_is_refused() -> None:
    with pytest.raises(CorruptError, match="holds the manifest of runs/demo"):
        read_manifest("runs/other/manifest.json", MANIFEST.to_bytes())


def test_canonical_json_has_one_form() -> None:
    assert canonical_json({"b": 1.0, "a": [None, "ü"]}) == '{"a":[null,"ü"],"b":1.0}'.encode()
    with pytest.raises(ValueError):
        canonical_json(float("inf"))


def test_a_damaged_manifest_of_ones_own_run_is_an_error(stages: StageStore, commit: Commit, spec: StageSpec) -> None:
    ref = commit(stages)
    data = stages.objects.get(ref.manifest)
    stages.objects.put_bytes(ref.manifest, flipped(data, len(data) // 2))
    with pytest.raises(CorruptError, match=ref.manifest):
        stages.find(spec, ref.key, 7)
    with pytest.raises(CorruptError, match=ref.manifest):
        stages.manifests()


def test_a_changed_byte_in_any_region_of_any_part_is_reported_with_its_path(stages: StageStore, commit: Commit) -> None:
    ref = commit(stages)
    for part in stages.manifest(ref).parts:
        data = stages.objects.get(part.path)
        for position in (0, len(data) // 3, len(data) // 2, len(data) - 1):
            stages.objects.put_bytes(part.path, flipped(data, position))
            with pytest.raises(CorruptError, match=part.path):
                stages.verify(ref)
            with pytest.raises(CorruptError, match=part.path):
                stages.files(ref)
            if part.rows is not None:
                with pytest.raises(CorruptError, match=part.path):
                    stages.table(ref)
        stages.objects.put_bytes(part.path, data)
    stages.verify(ref)


def test_a_cut_part_is_reported_with_its_path_and_both_sizes(stages: StageStore, commit: Commit) -> None:
    ref = commit(stages)
    part = stages.manifest(ref).parts[0]
    stages.objects.put_bytes(part.path, stages.objects.get(part.path)[:-8])
    with pytest.raises(CorruptError, match=rf"{part.path} has {part.size - 8} bytes and not the {part.size}"):
        stages.table(ref)


def test_a_missing_part_is_reported_with_its_path(stages: StageStore, commit: Commit) -> None:
    ref = commit(stages)
    part = stages.manifest(ref).parts[1]
    stages.objects.delete([part.path])
    with pytest.raises(CorruptError, match=f"{part.path} does not exist"):
        stages.table(ref)
