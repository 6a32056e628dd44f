"""What an older version wrote is read as it is; what it did not record stays unknown."""

import hashlib
import json

import pytest

from grpo_lib.config_files import make_config
from grpo_lib.errors import CorruptError
from grpo_lib.storage.keys import StageSpec
from grpo_lib.storage.local import LocalStore
from grpo_lib.storage.manifests import Manifest, canonical_json, read_manifest
from grpo_lib.storage.stages import StageStore

SPEC = StageSpec(name="reward", version=1, reads=("reward",))


def older(manifest: Manifest) -> bytes:
    """As it was written before the field ``external`` was there."""
    values = json.loads(manifest.to_bytes())
    del values["external"], values["manifest_sha256"]
    values["manifest_sha256"] = hashlib.sha256(canonical_json(values)).hexdigest()
    return canonical_json(values)


@pytest.fixture
def stages(local_store: LocalStore) -> StageStore:
    return StageStore(local_store, "demo")


def committed(stages: StageStore) -> Manifest:
    config = make_config({"data": {"problem": "countdown"}, "warm_start": {}})
    with stages.attempt(SPEC, config, "a" * 64, [], 3, 0, {"data": "x"}) as attempt:
        return stages.manifest(attempt.commit(rows=0))


def test_a_manifest_records_what_its_key_depends_on_outside_the_store(stages: StageStore) -> None:
    manifest = committed(stages)
    assert manifest.external == {"data": "x"}
    assert json.loads(stages.objects.get(manifest.path))["external"] == {"data": "x"}


def test_a_manifest_from_before_that_is_sound_and_written_back_as_it_was(stages: StageStore) -> None:
    manifest = committed(stages)
    data = older(manifest)
    found = read_manifest(manifest.path, data)
    assert found.external is None and found.digest == manifest.digest
    assert found.to_bytes() == data
    adopted = found.model_copy(update={"run": "other", "adopted_from": found.path}).sealed()
    assert read_manifest(adopted.path, adopted.to_bytes()).external is None


def test_taking_the_field_out_of_a_manifest_that_has_it_is_noticed(stages: StageStore) -> None:
    manifest = committed(stages)
    values = json.loads(manifest.to_bytes())
    del values["external"]
    with pytest.raises(CorruptError, match="changed after its commit"):
        read_manifest(manifest.path, canonical_json(values))
