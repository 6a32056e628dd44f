"""What `grpo verify` reads, compares and reports."""

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from grpo_lib.config import RunConfig
from grpo_lib.storage import paths
from grpo_lib.storage.manifests import IndexEntry, Remake
from grpo_lib.storage.objects import ObjectStore
from grpo_lib.storage.stages import ArtifactRef, StageSpec, StageStore, stage_key
from grpo_lib.storage.verify import Damage, verify_run
from tests.memory_store import MemoryStore

PRETRAINED = StageSpec(name="pretrained", version=1, reads=("model.path",))
UPDATE = StageSpec(name="update", version=1, reads=())
CHECKPOINT = StageSpec(name="checkpoint", version=1, reads=())
WEIGHTS = StageSpec(name="weights", version=1, reads=())


@pytest.fixture
def memory() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def make(memory: MemoryStore, config: RunConfig) -> Callable[..., ArtifactRef]:
    """Commits an artifact with one table."""

    def make_it(
        spec: StageSpec,
        iteration: int | None,
        *inputs: ArtifactRef,
        run: str = "demo",
        content: int = 1,
        **summary: Any,
    ) -> ArtifactRef:
        key = stage_key(spec, config, inputs, iteration)
        with StageStore(memory, run).attempt(spec, config, key, inputs, iteration) as attempt:
            attempt.write_table(pa.table({"a": [content]}))
            return attempt.commit(summary=summary)

    return make_it


def damages(objects: ObjectStore, run: str = "demo") -> list[Damage]:
    return verify_run(objects, run).damages


def policies(make: Callable[..., ArtifactRef], versions: tuple[int, ...] = (0, 1, 2)) -> list[ArtifactRef]:
    made = [make(PRETRAINED, None, policy_version=versions[0], policy_digest="p0")]
    for k, version in enumerate(versions[1:]):
        made.append(make(UPDATE, k, made[-1], policy_version=version, policy_digest=f"p{version}"))
    return made


def test_a_sound_run_is_read_whole(objects: ObjectStore, commit: Callable[..., ArtifactRef]) -> None:
    stages = StageStore(objects, "demo")
    first = commit(stages, 7)
    commit(stages, 8, (first,))
    told: list[tuple[int, int]] = []
    survey = verify_run(objects, "demo", lambda done, total: told.append((done, total)))
    assert survey.damages == [] and len(survey.manifests) == 2
    assert (survey.files, told[-1]) == (8, (6, 6))
    assert survey.bytes == sum(part.size for each in survey.manifests.values() for part in each.parts)


def test_each_damaged_file_is_reported_once_with_what_is_wrong(
    objects: ObjectStore, commit: Callable[..., ArtifactRef]
) -> None:
    stages = StageStore(objects, "demo")
    ref, other = commit(stages, 7), commit(stages, 8)
    one, two, three = (part.path for part in stages.manifest(ref).parts)
    objects.delete([one])
    objects.put_bytes(two, b"short")
    objects.put_bytes(three, objects.get(three)[:-1] + b"!")
    objects.put_bytes(other.manifest, b"not json")
    found = {each.path: each for each in damages(objects)}
    assert found[one].problem == "does not exist"
    assert found[two].problem.startswith("has 5 bytes and not ")
    assert found[three].problem == "has another sha256 than its manifest says"
    assert found[other.manifest].problem.startswith("is not a manifest: Invalid JSON")
    assert {each.kind for each in found.values()} == {"part", "manifest"} and len(found) == 4
    assert [found[path].place for path in (one, other.manifest)] == [("reward", 7), ("reward", 8)]


def test_an_input_that_is_gone_is_reported_with_the_digest_that_it_had(memory: MemoryStore, make: Any) -> None:
    first, second, _ = policies(make)
    memory.delete([second.manifest])
    (found,) = damages(memory)
    assert (found.kind, found.path, found.expected) == ("missing", second.manifest, second.digest)
    memory.delete([first.manifest])
    assert {each.path for each in damages(memory)} == {second.manifest}, "nobody is left who was made from it"


def test_an_input_that_was_made_again_differently_is_reported(memory: MemoryStore, make: Any) -> None:
    _, second, third = policies(make)
    memory.delete([second.manifest])
    key_of_second = second.key
    make(UPDATE, 0, make(PRETRAINED, None, policy_version=0, policy_digest="p0"), content=2, policy_version=1)
    (found,) = damages(memory)
    assert (found.kind, found.path) == ("lineage", third.manifest)
    assert f"was made from {second.manifest} when its digest was {second.digest[:12]}" in found.problem
    assert paths.manifest_place(second.manifest)[2] == key_of_second


def test_weights_that_gc_removed_are_no_damage(memory: MemoryStore, make: Any) -> None:
    weights = make(WEIGHTS, 0)
    make(CHECKPOINT, 0, weights)
    memory.delete([weights.manifest])
    assert damages(memory) == []


def test_policies_follow_one_another_and_checkpoints_hold_them(memory: MemoryStore, make: Any) -> None:
    *_, last = policies(make, (0, 1, 3))
    checkpoint = make(CHECKPOINT, 1, last, policy_digest="other", policy_version=3)
    found = {each.path: each.problem for each in damages(memory)}
    assert found == {
        last.manifest: "makes policy 3 of policy 1",
        checkpoint.manifest: f"holds policy other, {last.manifest} made p3",
    }


def test_what_was_adopted_needs_its_origin_only_for_the_parts(memory: MemoryStore, make: Any) -> None:
    given = make(PRETRAINED, None, run="donor", policy_version=0)
    heir = StageStore(memory, "heir")
    taken = heir.find(PRETRAINED, given.key, None)
    memory.delete([given.manifest])
    assert damages(memory, "heir") == []
    part = heir.manifest(taken).parts[0].path
    memory.content[part] = b"damaged"
    (found,) = damages(memory, "heir")
    assert (found.path, found.manifest) == (part, taken.manifest)


def test_an_index_entry_that_misleads_is_reported_and_one_that_is_gone_is_not(memory: MemoryStore, make: Any) -> None:
    one, two = make(WEIGHTS, 0), make(WEIGHTS, 1)
    memory.put_bytes(paths.index_path(one.key), IndexEntry(manifest=two.manifest).model_dump_json().encode())
    memory.delete([paths.index_path(two.key)])
    (found,) = damages(memory)
    assert (found.kind, found.path) == ("index", paths.index_path(one.key))
    memory.put_bytes(paths.index_path(one.key), b"\xff")
    assert [each.kind for each in damages(memory)] == ["index"]


def test_a_description_that_is_no_json_is_reported(memory: MemoryStore, make: Any) -> None:
    make(WEIGHTS, 0)
    memory.put_bytes(paths.run_file("demo"), b'{"name": "demo"')
    (found,) = damages(memory)
    assert (found.kind, found.path, found.manifest) == ("run", "runs/demo/run.json", None)


def test_an_artifact_that_is_made_again_takes_the_place_of_the_damaged_one(memory: MemoryStore, make: Any) -> None:
    ref = make(WEIGHTS, 0)
    before = dict(memory.content)
    part = StageStore(memory, "demo").manifest(ref).parts[0].path
    memory.content[part] = b"damaged"
    aside = paths.aside(ref.manifest, "0" * 64)
    memory.put_bytes(aside, memory.content.pop(ref.manifest))
    remake = Remake(digest=ref.digest, manifest=aside).model_dump_json().encode()
    memory.put_bytes(paths.remake_file(ref.manifest), remake)
    again = make(WEIGHTS, 0)
    assert again == ref
    kept = {aside: before[ref.manifest], paths.aside_part(part): b"damaged"}
    assert memory.content == before | kept
