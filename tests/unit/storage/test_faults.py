"""A store that fails for a while costs time and nothing else; one that refuses says so at once."""

import random
import time
from pathlib import Path

import pytest
from botocore.exceptions import ClientError

from grpo_lib.errors import NotFoundError, StoreDownError, StoreUnreachableError
from grpo_lib.patience import impatient
from grpo_lib.progress import Silent, show_progress_on
from grpo_lib.storage.local import LocalStore
from grpo_lib.storage.objects import ObjectStore
from grpo_lib.storage.s3 import MULTIPART_FROM, S3Store
from tests.faulty_proxy import FAULTS, FaultyProxy
from tests.unit.storage.conftest import new_bucket


class Notebook(Silent):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def notes() -> "list[str]":
    book = Notebook()
    show_progress_on(book)
    yield book.notes
    show_progress_on(Silent())


@pytest.fixture
def proxy(s3_endpoint: str) -> FaultyProxy:
    proxy = FaultyProxy(s3_endpoint, stall_seconds=1)
    yield proxy
    proxy.close()


def store_behind(proxy: FaultyProxy, endpoint: str, patience_seconds: float = 60) -> S3Store:
    bucket = new_bucket(endpoint)
    return S3Store(bucket, "p", proxy.url, "us-east-1", patience_seconds=patience_seconds, timeout_seconds=0.7)


def test_whatever_fails_on_the_way_the_store_does_what_a_dictionary_does(s3_endpoint: str) -> None:
    proxy = FaultyProxy(s3_endpoint, seed=1, rate=0.25, stall_seconds=1)
    store, model, draw = store_behind(proxy, s3_endpoint), dict[str, bytes](), random.Random(0)
    for step in range(150):
        path, data = f"d{draw.randrange(3)}/{draw.randrange(4)}", b"%d" % step
        what = draw.choice(["put", "create", "get", "exists", "list", "delete"])
        if what == "put":
            store.put_bytes(path, data)
            model[path] = data
        elif what == "create":
            assert store.create(path, data) == (path not in model)
            model.setdefault(path, data)
        elif what == "get" and path in model:
            assert store.get(path) == model[path]
        elif what == "get":
            with pytest.raises(NotFoundError):
                store.get(path)
        elif what == "exists":
            assert store.exists(path) == (path in model)
        elif what == "list":
            assert [info.path for info in store.list("")] == sorted(model)
        else:
            store.delete([path])
            model.pop(path, None)
    proxy.close()
    assert proxy.happened.keys() == set(FAULTS), proxy.happened
    assert proxy.happened.total() > 30


def test_a_store_that_is_gone_for_a_while_is_waited_for_and_people_are_told_twice(
    proxy: FaultyProxy, s3_endpoint: str, notes: list[str]
) -> None:
    store = store_behind(proxy, s3_endpoint)
    store.put_bytes("a", b"1")
    began = time.monotonic()
    with proxy.gone_for(5):
        assert store.get("a") == b"1"
    assert 5 < time.monotonic() - began < 20
    assert len(notes) == 2, notes
    assert "no answer for s3://" in notes[0] and "tried again for 60 s (store.patience_seconds)" in notes[0]
    assert "answers again, after" in notes[1]


def test_patience_ends(proxy: FaultyProxy, s3_endpoint: str) -> None:
    store = store_behind(proxy, s3_endpoint, patience_seconds=3)
    proxy.away()
    began = time.monotonic()
    with pytest.raises(StoreDownError, match=r"no answer for s3://.*/p/a .*check that the service runs"):
        store.put_bytes("a", b"1")
    assert 3 <= time.monotonic() - began < 15


def test_a_check_does_not_wait(proxy: FaultyProxy, s3_endpoint: str) -> None:
    store = store_behind(proxy, s3_endpoint)
    proxy.away()
    began = time.monotonic()
    with pytest.raises(StoreDownError), impatient():
        store.exists("a")
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("code", ["AccessDenied", "InvalidAccessKeyId", "NoSuchBucket", "NotImplemented"])
def test_what_does_not_pass_by_itself_fails_at_once(
    s3_endpoint: str, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    store = store_behind(proxy, s3_endpoint)
    status = {"NoSuchBucket": 404, "NotImplemented": 501}.get(code, 403)
    calls = []

    def refuse(**_: object) -> None:
        calls.append(1)
        raise ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "PutObject")

    monkeypatch.setattr(store._client, "put_object", refuse)
    with pytest.raises(StoreUnreachableError, match=code) as caught:
        store.put_bytes("a", b"1")
    assert not isinstance(caught.value, StoreDownError)
    assert len(calls) == 1


@pytest.mark.parametrize("lost", [1, 5], ids=["once", "longer than the client tries by itself"])
def test_a_create_whose_answer_is_lost_is_known_for_ones_own(proxy: FaultyProxy, s3_endpoint: str, lost: int) -> None:
    store = store_behind(proxy, s3_endpoint)
    proxy.script = ["lost"] * lost
    assert store.create("once", b"mine")
    assert proxy.script == []
    proxy.script = ["lost", "error after"]
    assert not store.create("once", b"another's")
    assert store.get("once") == b"mine"


def test_a_large_upload_survives_whatever_happens_and_leaves_no_parts_behind(
    proxy: FaultyProxy, s3_endpoint: str, tmp_path: Path
) -> None:
    store = store_behind(proxy, s3_endpoint)
    content = bytes(range(256)) * (2 * MULTIPART_FROM // 256) + b"and some more"
    (tmp_path / "large").write_bytes(content)
    for seed, completed in [(1, None), (2, "lost")]:
        proxy.seed, proxy.rate, proxy.faults = seed, 0.25, ("error", "reset", "lost", "truncated")
        if completed:  # the last of create, three parts, complete
            proxy.rate, proxy.script = 0.0, [None] * 4 + [completed]
        store.put_file(f"large{seed}", tmp_path / "large")
        assert store.buffer(f"large{seed}").to_pybytes() == content
    proxy.rate = 0.0
    for write in store.unfinished():
        store.discard(write)
    assert list(store.unfinished()) == []


def test_what_a_killed_writer_leaves_is_listed_apart_and_can_be_discarded(
    local_store: LocalStore, s3_store: S3Store
) -> None:
    local_store.put_bytes("runs/a/part", b"whole")
    (local_store.root / "runs/a/.part.0123456789abcdef0123456789abcdef.tmp").write_bytes(b"half")
    begun = s3_store._client.create_multipart_upload(Bucket=s3_store.bucket, Key="team/grpo/runs/a/part")
    s3_store._client.upload_part(
        Bucket=s3_store.bucket, Key="team/grpo/runs/a/part", UploadId=begun["UploadId"], PartNumber=1, Body=b"half"
    )
    store: ObjectStore
    for store in (local_store, s3_store):
        (left,) = store.unfinished()
        assert (left.path, left.size) == ("runs/a/part", 4)
        if store is local_store:  # moto's uploads all begin in 2010
            assert time.time() - 60 < left.modified < time.time() + 5
        store.discard(left)
        store.discard(left)
        assert list(store.unfinished()) == []
    assert [info.path for info in local_store.list("")] == ["runs/a/part"]
