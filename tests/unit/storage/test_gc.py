"""What `grpo gc` removes, and what it never does."""

import time
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lib.config import StoreConfig
from grpo_lib.config_files import make_config
from grpo_lib.errors import CorruptError
from grpo_lib.housekeeping import find_garbage, remove_garbage
from grpo_lib.mending import set_aside
from grpo_lib.storage import paths
from grpo_lib.storage.gc import Garbage, Rules, garbage, remove
from grpo_lib.storage.lease import Pace, holding
from grpo_lib.storage.objects import ObjectStore
from grpo_lib.storage.remake import part_problem
from grpo_lib.storage.s3 import S3Store
from grpo_lib.storage.stages import ArtifactRef, StageSpec, StageStore, stage_key
from grpo_lib.storage.verify import verify_run
from tests.memory_store import MemoryStore

DAY = 86_400.0
WEIGHTS = StageSpec(name="weights", version=1, reads=("model.dtype",))
UPDATE = StageSpec(name="update", version=1, reads=("seed",))
CONFIG = make_config({"data": {"problem": "countdown"}, "warm_start": {}})


def commit(
    stages: StageStore, spec: StageSpec, iteration: int, inputs: tuple[ArtifactRef, ...] = (), content: bytes = b"w"
) -> ArtifactRef:
    key = stage_key(spec, CONFIG, inputs, iteration)
    with stages.attempt(spec, CONFIG, key, inputs, iteration) as attempt:
        attempt.write_file("model.safetensors", b"%s of %d" % (content, iteration))
        return attempt.commit(rows=0, summary={"policy_version": iteration + 1})


def abandoned(stages: StageStore, iteration: int, key: str = "a" * 64) -> str:
    """Files of an attempt that was killed before its commit; their folder."""
    attempt = stages.attempt(UPDATE, CONFIG, key, [], iteration)
    attempt.write_table(pa.table({"a": [1, 2, 3]}))
    attempt.write_file("more.txt", b"more")
    return attempt._folder


def rules(**changes: Any) -> Rules:
    return Rules(**({"older_than": DAY, "keep_weights": 2, "now": time.time() + 2 * DAY} | changes))


def gc(objects: ObjectStore, **changes: Any) -> list[Garbage]:
    things = garbage(objects, rules(**changes))
    gone: list[Garbage] = []
    remove(objects, things, gone.append)
    assert sorted(each.path for each in gone) == sorted(each.path for each in things)
    return things


def assert_sound(objects: ObjectStore) -> None:
    """Every manifest in the store has its parts, as they were."""
    names = {paths.run_of(info.path) for info in objects.list("runs")}
    for name in filter(None, names):
        assert verify_run(objects, name).damages == [], name


def stored(objects: ObjectStore) -> set[str]:
    return {info.path for info in objects.list("")}


def test_an_attempt_without_a_manifest_goes_when_it_is_old_enough(objects: ObjectStore) -> None:
    stages = StageStore(objects, "demo")
    kept, folder = commit(stages, UPDATE, 0), abandoned(stages, 1)
    beside = abandoned(stages, 0, key=kept.key)
    before = stored(objects)
    assert gc(objects, now=time.time()) == []
    (first, second) = gc(objects)
    assert {first.path, second.path} == {folder, beside}
    assert first.bytes > 4 and len(first.files) == 2 and first.why == "no manifest refers to it"
    assert stored(objects) == {path for path in before if not path.startswith((folder, beside))}
    stages.verify(kept)
    assert gc(objects) == []


def test_an_attempt_of_which_one_file_is_young_is_left_alone(objects: ObjectStore) -> None:
    memory = MemoryStore()
    attempt = StageStore(memory, "demo").attempt(UPDATE, CONFIG, "a" * 64, [], 0)
    attempt.write_file("first", b"1")
    memory.modified = 2 * DAY
    attempt.write_file("second", b"2")
    assert garbage(memory, rules(now=2 * DAY + 5)) == []
    assert len(garbage(memory, rules(now=3 * DAY + 5))) == 1


def test_an_attempt_that_was_committed_after_the_look_stays(objects: ObjectStore) -> None:
    stages = StageStore(objects, "demo")
    attempt = stages.attempt(UPDATE, CONFIG, "a" * 64, [], 0)
    attempt.write_file("late", b"1")
    things = garbage(objects, rules())
    ref = attempt.commit()
    remove(objects, things, lambda thing: None)
    stages.verify(ref)


def test_the_last_weights_of_a_run_stay(objects: ObjectStore) -> None:
    stages = StageStore(objects, "demo")
    refs = [commit(stages, WEIGHTS, k) for k in range(5)]
    other = commit(StageStore(objects, "other"), WEIGHTS, 9)
    gone = gc(objects, runs=["demo"])
    assert [each.path for each in gone] == [refs[2].manifest, refs[1].manifest, refs[0].manifest]
    assert all(len(each.files) == 2 for each in gone)
    assert [each.iteration for each in stages.manifests()] == [3, 4]
    assert not objects.exists(paths.index_path(refs[0].key)) and objects.exists(paths.index_path(refs[4].key))
    StageStore(objects, "other").verify(other)
    assert_sound(objects)


def test_weights_that_another_run_has_adopted_stay_until_it_needs_them_no_more(objects: ObjectStore) -> None:
    donor, heir = StageStore(objects, "donor"), StageStore(objects, "heir")
    refs = [commit(donor, WEIGHTS, k) for k in range(3)]
    taken = heir.find(WEIGHTS, refs[0].key, 0)
    assert taken is not None
    assert [each.path for each in gc(objects, keep_weights=1)] == [refs[1].manifest]
    heir.verify(taken)
    commit(heir, WEIGHTS, 7)
    assert [each.path for each in gc(objects, keep_weights=1)] == [taken.manifest]
    donor.verify(refs[0])
    assert [each.path for each in gc(objects, keep_weights=1)] == [refs[0].manifest]
    assert_sound(objects)


def test_parts_of_a_manifest_that_cannot_be_read_or_was_set_aside_stay(objects: ObjectStore) -> None:
    donor, heir = StageStore(objects, "donor"), StageStore(objects, "heir")
    ref, kept = commit(donor, UPDATE, 0), commit(donor, UPDATE, 1)
    taken = heir.find(UPDATE, ref.key, 0)
    assert taken is not None
    objects.put_bytes(taken.manifest, b"{")
    objects.delete([ref.manifest])
    assert gc(objects) == []
    survey = verify_run(objects, "heir")
    set_aside(objects, survey, survey.damages[0])
    assert gc(objects) == [] and not objects.exists(taken.manifest)
    donor.verify(kept)


def test_probes_old_claims_and_writes_that_were_cut_off_go(local_store: ObjectStore) -> None:
    run = SimpleNamespace(objects=local_store, name="demo", place="demo")
    for _ in range(3):
        with holding(run, pace=Pace(beat=0.1)):
            pass
    local_store.put_bytes(f"{paths.PROBES}/1/written", b"probe")
    (local_store.root / "runs/demo/.part.0123456789abcdef0123456789abcdef.tmp").write_bytes(b"half")  # type: ignore[attr-defined]
    assert {each.kind for each in gc(local_store)} == {"lease", "probe", "unfinished"}
    left = sorted(stored(local_store))
    assert left == ["runs/demo/leases/000003.beat.json", "runs/demo/leases/000003.json"]
    assert list(local_store.unfinished()) == []
    with holding(run) as lease:
        assert lease.epoch == 4


@pytest.fixture
def store(local_store: Any) -> StoreConfig:
    return StoreConfig(uri=str(local_store.root))


def test_attempts_of_a_run_that_is_held_are_left_with_the_reason(local_store: ObjectStore, store: StoreConfig) -> None:
    folder = abandoned(StageStore(local_store, "demo"), 0)
    run = SimpleNamespace(objects=local_store, name="demo", place="demo")
    found = find_garbage(store, [], older_than_days=0, keep_weights=1)
    assert [each.path for each in found] == [folder]
    with holding(run):
        assert find_garbage(store, [], older_than_days=0, keep_weights=1) == []
        (left,) = remove_garbage(store, found, lambda thing: None)
        assert "held by process" in left and len(stored(local_store)) == 4
    assert remove_garbage(store, found, lambda thing: None) == []
    assert not [path for path in stored(local_store) if path.startswith(folder)]


def test_the_store_may_be_a_bucket(s3_store: S3Store) -> None:
    folder, kept = abandoned(StageStore(s3_store, "demo"), 0), commit(StageStore(s3_store, "demo"), UPDATE, 1)
    s3_store._client.create_multipart_upload(Bucket=s3_store.bucket, Key=f"{s3_store.prefix}/runs/demo/cut-off")
    config = StoreConfig(uri=s3_store.uri, endpoint_url=s3_store.endpoint, region="us-east-1")
    found = find_garbage(config, [], older_than_days=0, keep_weights=1)
    assert [(each.kind, each.path) for each in found] == [("attempt", folder), ("unfinished", "runs/demo/cut-off")]
    assert remove_garbage(config, found, lambda thing: None) == []
    assert list(s3_store.unfinished()) == []
    StageStore(s3_store, "demo").verify(kept)
    assert not [path for path in stored(s3_store) if path.startswith(folder)]


def test_what_mlflow_refers_to_stays_even_without_a_manifest(
    local_store: ObjectStore, store: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = StageStore(local_store, "demo")
    pinned, free = abandoned(stages, 0), abandoned(stages, 1)
    weights = [commit(stages, WEIGHTS, k) for k in range(3)]
    served = paths.parent(stages.manifest(weights[0]).parts[0].path)
    places = {f"/mnt/moved/runs/of/us/{pinned}/", f"s3://bucket/{served}", ""}
    monkeypatch.setattr("grpo_lib.tracking.mlflow.places_in_use", lambda uri: places)
    found = find_garbage(store, [], older_than_days=0, keep_weights=1)
    assert {each.path for each in found} == {free, weights[1].manifest}


def test_mlflow_is_asked_for_logged_models_and_registered_versions(tmp_path: Any) -> None:
    from mlflow import MlflowClient

    from grpo_lib.tracking.mlflow import places_in_use

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    assert places_in_use(uri) == set() and not (tmp_path / "mlflow.db").exists()
    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    experiment = client.create_experiment("e")
    for number in range(3):
        client.create_logged_model(experiment, name=f"m{number}", tags={"grpo.checkpoint": f"/store/runs/{number}"})
    client.create_logged_model(experiment, name="another")
    client.create_registered_model("served")
    client.create_model_version("served", source="s3://bucket/runs/served")
    client.create_model_version("served", source="s3://elsewhere", tags={"grpo.checkpoint": "/store/runs/tagged"})
    runs = {"/store/runs/0", "/store/runs/1", "/store/runs/2", "/store/runs/tagged"}
    assert places_in_use(uri) == runs | {"s3://bucket/runs/served", "s3://elsewhere"}


Action = tuple[str, int, int]
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["weights", "weights", "update", "adopt", "abandon", "lose manifest", "damage", "time"]),
        st.integers(0, 1),
        st.integers(0, 2),
    ),
    max_size=12,
)


def act(memory: MemoryStore, action: Action) -> None:
    what, number, iteration = action
    stages = StageStore(memory, "ab"[number])
    spec = WEIGHTS if iteration % 2 else UPDATE
    key = stage_key(WEIGHTS, CONFIG, (), iteration)
    if what in ("weights", "update"):
        chosen = WEIGHTS if what == "weights" else UPDATE
        with suppress(CorruptError):  # what is there is damaged
            if stages.find(chosen, stage_key(chosen, CONFIG, (), iteration), iteration) is None:
                commit(stages, chosen, iteration)
    elif what == "adopt":
        with suppress(CorruptError):
            stages.find(WEIGHTS, key, iteration)
    elif what == "abandon":
        abandoned(stages, iteration, key)
    elif what == "lose manifest":
        memory.delete([paths.manifest_path(stages.run, iteration, spec.name, stage_key(spec, CONFIG, (), iteration))])
    elif what == "damage":
        path = paths.manifest_path(stages.run, iteration, "weights", key)
        if path in memory.content:
            memory.content[path] = b"{"
    else:
        memory.modified += 0.4 * DAY


@given(
    actions=ACTIONS,
    keep=st.integers(0, 2),
    runs=st.none() | st.sets(st.sampled_from("ab"), min_size=1),
    between=st.tuples(st.sampled_from(["adopt", "adopt", "weights", "abandon"]), st.integers(0, 1), st.integers(0, 2)),
    operation=st.integers(1, 30),
    inside=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_after_gc_every_manifest_that_is_left_verifies_whoever_adopts_meanwhile(
    actions: list[Action],
    keep: int,
    runs: set[str] | None,
    between: Action,
    operation: int,
    inside: bool,
) -> None:
    """Something happens before an operation of gc; or, ``inside``, gc before an operation of something."""
    memory, left = MemoryStore(), [1 + operation // 4 if inside else operation]
    for action in [*actions, ("time", 0, 0)]:
        act(memory, action)
    sound_before = sound(memory)

    def collect() -> None:
        things = garbage(memory, rules(now=memory.modified, older_than=0.3 * DAY, keep_weights=keep, runs=runs))
        remove(memory, things, lambda thing: None)

    def interrupt() -> None:
        left[0] -= 1
        if left[0] == 0:
            memory.before = lambda: None
            collect() if inside else act(memory, between)

    memory.before = interrupt
    act(memory, between) if inside else collect()
    memory.before = lambda: None
    after = sound(memory)
    assert not broken(memory) & sound_before
    for path in sound_before - after:
        assert "/weights/" in path, "only weights are ever removed"
        assert runs is None or paths.run_of(path) in runs
    new = {path for path in memory.content if paths.is_manifest(path)} - sound_before
    for path in new:
        if memory.content[path] != b"{":
            assert path in after, f"{path} was adopted while its parts were removed"
    for run in "ab":
        had = [path for path in sound_before if path.startswith(f"runs/{run}/") and "/weights/" in path]
        has = [path for path in after if path.startswith(f"runs/{run}/") and "/weights/" in path]
        assert len(has) >= min(keep, len(had))


def sound(memory: MemoryStore) -> set[str]:
    """Manifests that can be read and whose parts are there."""
    found = {each.path: each for run in "ab" for each in StageStore(memory, run).survey()[0]}
    return {path for path, each in found.items() if not any(part_problem(memory, part) for part in each.parts)}


def broken(memory: MemoryStore) -> set[str]:
    """Manifests that can be read and lack a part."""
    found = {each.path: each for run in "ab" for each in StageStore(memory, run).survey()[0]}
    return {path for path, each in found.items() if any(part_problem(memory, part) for part in each.parts)}
