"""Full disks, missing rights, silent endpoints: one error with the place and the remedy, and nothing half written."""

import errno
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_lib.errors import ConfigError, NotFoundError, StoreUnreachableError
from grpo_lib.storage.local import LocalStore
from grpo_lib.storage.objects import check_store
from grpo_lib.storage.s3 import S3Store
from grpo_lib.storage.stages import ArtifactRef, StageStore


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_leaves_no_manifest_and_no_temporary_file(
    local_store: LocalStore, commit: Callable[..., ArtifactRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = StageStore(local_store, "demo")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        local_store.root.mkdir()
        (local_store.root / "runs").mkdir()
        with pytest.raises(StoreUnreachableError, match=r"runs/demo/.*No space left.*free some space"):
            commit(stages)
    assert list(local_store.list("")) == []
    assert not commit(stages).reused


def test_a_disk_that_fills_up_at_the_commit_leaves_no_manifest(
    local_store: LocalStore, commit: Callable[..., ArtifactRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = StageStore(local_store, "demo")
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", full_disk)
        with pytest.raises(StoreUnreachableError, match=r"manifest\.json.*No space left"):
            commit(stages)
    assert stages.manifests() == []
    assert not commit(stages).reused


QUOTA = """
import resource, sys
from pathlib import Path
from grpo_lib.errors import StoreUnreachableError
from grpo_lib.storage.local import LocalStore
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
store = LocalStore(Path(sys.argv[1]))
store.put_bytes("a", b"small")
for write in (lambda: store.put_bytes("a", bytes(60_000)), lambda: store.put_file("b", Path(sys.argv[2]))):
    try:
        write()
    except StoreUnreachableError as error:
        print(error)
"""


def test_a_quota_that_is_used_up_is_an_error_with_the_remedy_and_loses_nothing(
    local_store: LocalStore, tmp_path: Path
) -> None:
    (tmp_path / "large").write_bytes(bytes(60_000))
    done = subprocess.run(
        [sys.executable, "-c", QUOTA, str(local_store.root), str(tmp_path / "large")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    first, second = done.stdout.splitlines()
    assert f"can't use {local_store.root}/a: File too large; free some space or raise the quota" in first
    assert f"can't use {local_store.root}/b: File too large" in second
    assert local_store.get("a") == b"small"
    assert [info.path for info in local_store.list("")] == ["a"]
    assert list(local_store.unfinished()) == []


def test_a_failed_write_keeps_what_was_there(local_store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    local_store.put_bytes("a", b"first")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        with pytest.raises(StoreUnreachableError):
            local_store.put_bytes("a", b"second")
    assert local_store.get("a") == b"first"
    assert [info.path for info in local_store.list("")] == ["a"]


def test_a_folder_without_rights_is_named_with_the_remedy(
    local_store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(StoreUnreachableError, match=r"Permission denied; give this user the right"):
        check_store(local_store)


def test_a_file_in_the_place_of_the_store_is_named(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("not a folder")
    with pytest.raises(StoreUnreachableError, match=r"set store\.uri"):
        LocalStore(tmp_path / "store").put_bytes("a/b", b"")


def test_importing_the_local_store_is_light() -> None:
    code = "import sys, grpo_lib.storage.local; print({'pyarrow', 'boto3', 'torch', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_a_silent_endpoint_is_reported_quickly_and_without_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDVERYSECRET")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "sesame-open")
    started = time.perf_counter()
    with pytest.raises(StoreUnreachableError, match=r"store\.endpoint_url") as caught:
        check_store(S3Store("bucket", "prefix", "http://127.0.0.1:9", "us-east-1"))
    assert time.perf_counter() - started < 20
    text = "".join(traceback.format_exception(caught.value))
    assert "http://127.0.0.1:9" in str(caught.value) and "s3://bucket/prefix" in str(caught.value)
    assert "AKIDVERYSECRET" not in text and "sesame-open" not in text


def test_missing_credentials_are_asked_for(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(StoreUnreachableError, match="set AWS_ACCESS_KEY_ID"):
        S3Store("bucket", "", s3_endpoint, "us-east-1").get("a")


def test_a_missing_bucket_is_a_problem_of_the_store_not_of_the_object(s3_endpoint: str) -> None:
    with pytest.raises(StoreUnreachableError, match="make the bucket 'no-such-bucket'"):
        check_store(S3Store("no-such-bucket", "", s3_endpoint, "us-east-1"))


def test_credentials_in_the_endpoint_are_refused_without_repeating_them() -> None:
    with pytest.raises(ConfigError) as caught:
        S3Store("bucket", "", "http://user:sesame@127.0.0.1:9", None)
    assert "sesame" not in str(caught.value)


def test_an_endpoint_that_is_no_url_is_refused() -> None:
    with pytest.raises(ConfigError, match="https://s3"):
        S3Store("bucket", "", "localhost:9000", None)


def test_a_failed_multipart_upload_is_aborted(
    s3_store: S3Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = s3_store._client

    def refuse(**_: object) -> None:
        raise client.exceptions.ClientError({"Error": {"Code": "InternalError"}}, "CompleteMultipartUpload")

    (tmp_path / "large").write_bytes(bytes(40 << 20))
    monkeypatch.setattr(client, "complete_multipart_upload", refuse)
    with pytest.raises(StoreUnreachableError, match="InternalError"):
        s3_store.put_file("large", tmp_path / "large")
    assert client.list_multipart_uploads(Bucket=s3_store.bucket).get("Uploads", []) == []
    assert not s3_store.exists("large")


def test_a_download_that_fails_is_not_taken_for_a_disk_error(s3_store: S3Store, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="team/grpo/no/such"):
        s3_store.fetch("no/such", tmp_path / "copy")
