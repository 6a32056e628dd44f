"""What every store promises, on a folder and over HTTP."""

import hashlib
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from grpo_lib.config import StoreConfig
from grpo_lib.errors import ConfigError, NotFoundError, StoreUnreachableError
from grpo_lib.storage.local import LocalStore
from grpo_lib.storage.objects import ObjectStore, check_store, open_store
from grpo_lib.storage.s3 import MULTIPART_FROM


def test_what_was_stored_comes_back_by_every_way_of_reading(objects: ObjectStore, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"from a file")
    objects.put_bytes("a/bytes", b"from bytes")
    objects.put_file("a/file", source)
    with objects.writer("a/written") as file:
        file.write(b"from ")
        file.write(b"a writer")
    for path, content in [("a/bytes", b"from bytes"), ("a/file", b"from a file"), ("a/written", b"from a writer")]:
        assert objects.get(path) == content
        assert objects.buffer(path).to_pybytes() == content
        assert objects.sha256(path) == (len(content), hashlib.sha256(content).hexdigest())
        objects.fetch(path, tmp_path / "new" / "copy")
        assert (tmp_path / "new" / "copy").read_bytes() == content
        assert objects.exists(path)


def test_an_empty_object_is_an_object(objects: ObjectStore) -> None:
    objects.put_bytes("empty", b"")
    assert objects.exists("empty")
    assert objects.buffer("empty").to_pybytes() == b""


def test_a_large_file_comes_back_the_same(objects: ObjectStore, tmp_path: Path) -> None:
    content = bytes(range(256)) * (MULTIPART_FROM // 256) + b"and some more"
    (tmp_path / "large").write_bytes(content)
    objects.put_file("large", tmp_path / "large")
    assert objects.buffer("large").to_pybytes() == content


def test_put_replaces_and_create_does_not(objects: ObjectStore) -> None:
    objects.put_bytes("a", b"first")
    objects.put_bytes("a", b"second")
    assert not objects.create("a", b"third")
    assert objects.get("a") == b"second"


def test_of_eight_racing_creators_exactly_one_wins(objects: ObjectStore) -> None:
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda number: objects.create("race/once", b"writer %d" % number), range(8)))
    assert sum(won) == 1
    assert objects.get("race/once") == b"writer %d" % won.index(True)
    assert [info.path for info in objects.list("")] == ["race/once"]


def test_a_listing_has_what_is_below_a_folder_in_order_with_size_and_time(objects: ObjectStore) -> None:
    before = time.time()
    for path in ("runs/b/2", "runs/a/1", "runs/ab/3", "other"):
        objects.put_bytes(path, path.encode())
    assert [info.path for info in objects.list("runs")] == ["runs/a/1", "runs/ab/3", "runs/b/2"]
    assert [info.path for info in objects.list("runs/a/")] == ["runs/a/1"]
    assert [info.path for info in objects.list("")] == ["other", "runs/a/1", "runs/ab/3", "runs/b/2"]
    assert list(objects.list("nothing")) == []
    (info,) = objects.list("runs/a")
    assert info.size == 8
    assert before - 2 < info.modified < time.time() + 2


def test_deleting_leaves_the_rest_and_does_not_mind_what_is_gone(objects: ObjectStore) -> None:
    objects.put_bytes("a/1", b"")
    objects.put_bytes("a/2", b"")
    objects.delete(["a/1", "a/1", "never/was"])
    assert [info.path for info in objects.list("")] == ["a/2"]


def test_reading_what_is_not_there_names_the_path(objects: ObjectStore, tmp_path: Path) -> None:
    assert not objects.exists("no/such")
    with pytest.raises(NotFoundError, match="no/such"):
        objects.get("no/such")
    with pytest.raises(NotFoundError, match="no/such"):
        objects.buffer("no/such")
    with pytest.raises(NotFoundError, match="no/such"):
        objects.sha256("no/such")
    with pytest.raises(NotFoundError, match="no/such"):
        objects.fetch("no/such", tmp_path / "copy")


@pytest.mark.parametrize("path", ["../a", "a/../b", "/a", "a//b", "./a", "a/", "", "a\\b"])
def test_paths_that_leave_the_store_are_refused(objects: ObjectStore, path: str) -> None:
    with pytest.raises(ValueError, match="must be relative"):
        objects.put_bytes(path, b"")
    with pytest.raises(ValueError, match="must be relative"):
        objects.get(path)


def test_a_writer_that_fails_stores_nothing(objects: ObjectStore) -> None:
    def write_half() -> None:
        with objects.writer("a") as file:
            file.write(b"half")
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        write_half()
    assert list(objects.list("")) == []


def test_the_check_passes_and_leaves_nothing(objects: ObjectStore) -> None:
    check_store(objects)
    assert list(objects.list("")) == []


def test_the_check_refuses_a_store_that_overwrites_on_create(
    objects: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overwrite(path: str, data: bytes) -> bool:
        objects.put_bytes(path, data)
        return True

    monkeypatch.setattr(objects, "create", overwrite)
    with pytest.raises(StoreUnreachableError, match="If-None-Match"):
        check_store(objects)


def test_locations_are_absolute(local_store: LocalStore, s3_store: ObjectStore) -> None:
    assert local_store.location("runs/demo/") == f"{local_store.root}/runs/demo"
    assert s3_store.location("runs/demo") == f"{s3_store.uri}/runs/demo"


def test_the_configuration_chooses_the_store(tmp_path: Path, s3_endpoint: str) -> None:
    assert open_store(StoreConfig.model_validate({"uri": str(tmp_path)})).uri == str(tmp_path)
    values = {"uri": "s3://bucket/a/b/", "endpoint_url": s3_endpoint, "region": "us-east-1"}
    s3 = open_store(StoreConfig.model_validate(values))
    assert (s3.uri, s3.compression) == ("s3://bucket/a/b", "zstd")
    with pytest.raises(ConfigError, match="gs://bucket"):
        open_store(StoreConfig.model_validate({"uri": "gs://bucket"}))
