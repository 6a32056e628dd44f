"""The store in an S3 bucket."""

import hashlib
import io
import itertools
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from boto3.s3.transfer import TransferConfig
from botocore.exceptions import ClientError

from grpo_lib.errors import ConfigError, NotFoundError, StoreDownError, StoreUnreachableError
from grpo_lib.patience import Patience
from grpo_lib.storage.local import disk_errors
from grpo_lib.storage.objects import ObjectInfo, Unfinished, checked_path
from grpo_lib.storage.s3_client import code_of, connect, s3_errors, status_of

if TYPE_CHECKING:
    import pyarrow as pa

MULTIPART_FROM = 16 << 20
"""Bytes from which an object is sent and fetched in several parts at once."""

T = TypeVar("T")


class S3Store:
    """Objects below ``s3://bucket/prefix``, of AWS or of any service that honours ``If-None-Match: *``."""

    compression: str | None = "zstd"

    def __init__(
        self,
        bucket: str,
        prefix: str,
        endpoint_url: str | None,
        region: str | None,
        *,
        patience_seconds: float = 0,
        timeout_seconds: float = 60,
    ) -> None:
        if not bucket:
            raise ConfigError("store.uri names no bucket; use s3://bucket/prefix")
        self.bucket, self.prefix, self.endpoint = bucket, prefix.strip("/"), endpoint_url or "AWS"
        self.uri = f"s3://{bucket}/{self.prefix}".rstrip("/")
        self._client: Any = connect(endpoint_url, region, timeout_seconds)
        # boto3's other client, for bare IP addresses among others, fails: see its `preferred_transfer_client`
        self._transfer = TransferConfig(
            multipart_threshold=MULTIPART_FROM, multipart_chunksize=MULTIPART_FROM, preferred_transfer_client="classic"
        )
        self._patience = Patience(patience_seconds, f"the store at {self.endpoint}", "store.patience_seconds")

    def put_file(self, path: str, source: Path) -> None:
        """Uploads a local file, a large one in parts; a failed upload is aborted."""

        def upload() -> None:
            with disk_errors(source), open(source, "rb") as file:
                self._client.upload_fileobj(file, self.bucket, self._key(path), Config=self._transfer)

        self._call(path, upload)

    def put_bytes(self, path: str, data: bytes) -> None:
        """Uploads bytes."""
        self._call(path, lambda: self._client.put_object(Bucket=self.bucket, Key=self._key(path), Body=data))

    @contextmanager
    def writer(self, path: str) -> Iterator[BinaryIO]:
        """A temporary local file that is uploaded at the end of the block."""
        with tempfile.TemporaryDirectory(prefix="grpo-") as folder:
            name = Path(folder, "object")
            with disk_errors(name), open(name, "wb") as file:
                yield file
            self.put_file(path, name)

    def create(self, path: str, data: bytes) -> bool:
        """Uploads bytes only if nothing is there."""
        tries = 0

        def upload() -> bool:
            nonlocal tries
            tries += 1
            try:
                self._client.put_object(Bucket=self.bucket, Key=self._key(path), Body=data, IfNoneMatch="*")
            except ClientError as error:
                if status_of(error) != 412:
                    raise
                # The object in the way may be our own, of a try whose answer was lost.
                again = tries > 1 or error.response.get("ResponseMetadata", {}).get("RetryAttempts", 0) > 0
                return again and self.get(path) == data
            return True

        return self._call(path, upload)

    def get(self, path: str) -> bytes:
        """The bytes of an object."""

        def download() -> bytes:
            data: bytes = self._client.get_object(Bucket=self.bucket, Key=self._key(path))["Body"].read()
            return data

        return self._call(path, download)

    def buffer(self, path: str) -> "pa.Buffer":
        """The object, downloaded into memory, a large one in parts at once."""
        import pyarrow as pa

        def download() -> pa.Buffer:
            memory = io.BytesIO()
            self._client.download_fileobj(self.bucket, self._key(path), memory, Config=self._transfer)
            return pa.py_buffer(memory.getbuffer())

        return self._call(path, download)

    def fetch(self, path: str, target: Path) -> None:
        """Downloads an object to a local file."""

        def download() -> None:
            with disk_errors(target):
                target.parent.mkdir(parents=True, exist_ok=True)
                with open(target, "wb") as file:
                    self._client.download_fileobj(self.bucket, self._key(path), file, Config=self._transfer)

        self._call(path, download)

    def sha256(self, path: str) -> tuple[int, str]:
        """Size and sha256 of an object, streamed."""

        def download() -> tuple[int, str]:
            digest, size = hashlib.sha256(), 0
            for chunk in self._client.get_object(Bucket=self.bucket, Key=self._key(path))["Body"].iter_chunks(1 << 20):
                digest.update(chunk)
                size += len(chunk)
            return size, digest.hexdigest()

        return self._call(path, download)

    def exists(self, path: str) -> bool:
        """Whether there is such an object."""
        try:
            self._call(path, lambda: self._client.head_object(Bucket=self.bucket, Key=self._key(path)))
        except NotFoundError:
            return False
        return True

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """All objects below a folder, in the order of their paths."""
        folder = self._key(prefix.rstrip("/")) if prefix else self.prefix
        asked = {"Bucket": self.bucket, "Prefix": f"{folder}/" if folder else ""}
        for page in self._pages(prefix, "list_objects_v2", asked, {"NextContinuationToken": "ContinuationToken"}):
            for entry in page.get("Contents", ()):
                modified = entry["LastModified"].timestamp()
                yield ObjectInfo(path=self._path(entry["Key"]), size=entry["Size"], modified=modified)

    def delete(self, paths: Iterable[str]) -> None:
        """Deletes objects, a thousand a request."""
        keys = iter([self._key(path) for path in paths])
        while batch := [{"Key": key} for key in itertools.islice(keys, 1000)]:
            self._delete(batch)

    def unfinished(self) -> Iterator[Unfinished]:
        """Uploads in parts that were neither completed nor aborted; they cost what they hold."""
        asked = {"Bucket": self.bucket, "Prefix": f"{self.prefix}/" if self.prefix else ""}
        names = {"NextKeyMarker": "KeyMarker", "NextUploadIdMarker": "UploadIdMarker"}
        for page in self._pages("", "list_multipart_uploads", asked, names):
            for entry in page.get("Uploads", ()):
                begun, upload = entry["Initiated"].timestamp(), {"Key": entry["Key"], "UploadId": entry["UploadId"]}
                asked_parts = {"Bucket": self.bucket, **upload}
                pages = self._pages("", "list_parts", asked_parts, {"NextPartNumberMarker": "PartNumberMarker"})
                size = sum(part["Size"] for parts in pages for part in parts.get("Parts", ()))
                yield Unfinished(path=self._path(entry["Key"]), size=size, modified=begun, token=entry["UploadId"])

    def discard(self, write: Unfinished) -> None:
        """Aborts an upload."""
        try:
            self._call(
                write.path,
                lambda: self._client.abort_multipart_upload(
                    Bucket=self.bucket, Key=self._key(write.path), UploadId=write.token
                ),
            )
        except StoreDownError as error:
            cause = error.__cause__
            if not (isinstance(cause, ClientError) and code_of(cause) == "NoSuchUpload"):
                raise

    def location(self, path: str) -> str:
        """The s3:// address of an object or folder."""
        return f"s3://{self.bucket}/{self._key(path.rstrip('/'))}"

    def _key(self, path: str) -> str:
        return f"{self.prefix}/{checked_path(path)}" if self.prefix else checked_path(path)

    def _path(self, key: str) -> str:
        return key[len(self.prefix) + 1 :] if self.prefix else key

    def _delete(self, batch: Sequence[dict[str, str]]) -> None:
        answer = self._call(
            "", lambda: self._client.delete_objects(Bucket=self.bucket, Delete={"Objects": batch, "Quiet": True})
        )
        for failed in answer.get("Errors", ()):
            raise StoreUnreachableError(
                f"can't delete s3://{self.bucket}/{failed['Key']} at {self.endpoint}: {failed['Code']}; "
                "grant the right to delete objects (s3:DeleteObject)"
            )

    def _pages(self, path: str, method: str, asked: dict[str, Any], names: dict[str, str]) -> Iterator[dict[str, Any]]:
        """All pages of a listing; ``names``: what a page calls its end, and what the request for the next one does."""
        ask = getattr(self._client, method)
        while True:
            page = self._call(path, partial(ask, **asked))
            yield page
            if not page.get("IsTruncated"):
                return
            asked = asked | {name: page[end] for end, name in names.items()}

    def _call(self, path: str, work: Callable[[], T]) -> T:
        """Everything that goes over the network: with patience, and with the store's errors."""

        def once() -> T:
            with s3_errors(self.uri, path, self.endpoint):
                return work()

        return self._patience.call(once)
