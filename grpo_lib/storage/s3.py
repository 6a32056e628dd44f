"""The store in an S3 bucket: the only door to boto3.

Credentials come from the environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or the machine's role)
and never appear in a message.
"""

import io
import itertools
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import urlsplit

import boto3
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, PartialCredentialsError

from grpo_lib.errors import ConfigError, NotFoundError, StoreUnreachableError
from grpo_lib.storage.local import disk_errors
from grpo_lib.storage.objects import ObjectInfo, checked_path

if TYPE_CHECKING:
    import pyarrow as pa

MULTIPART_FROM = 16 << 20
"""Bytes from which an object is sent and fetched in several parts at once."""
CONFLICT_PAUSES = (0.1, 0.2, 0.4, 0.8, 1.6)
"""Seconds between tries when S3 reports another conditional write in progress."""


class S3Store:
    """Objects below ``s3://bucket/prefix``, of AWS or of any service that honours ``If-None-Match: *``."""

    compression: str | None = "zstd"

    def __init__(self, bucket: str, prefix: str, endpoint_url: str | None, region: str | None) -> None:
        if not bucket:
            raise ConfigError("store.uri names no bucket; use s3://bucket/prefix")
        if endpoint_url is not None:
            _check_endpoint(endpoint_url)
        self.bucket, self.prefix, self.endpoint = bucket, prefix.strip("/"), endpoint_url or "AWS"
        self.uri = f"s3://{bucket}/{self.prefix}".rstrip("/")
        self._client: Any = _client(endpoint_url, region)
        # boto3's other client, for bare IP addresses among others, fails: see its `preferred_transfer_client`
        self._transfer = TransferConfig(
            multipart_threshold=MULTIPART_FROM, multipart_chunksize=MULTIPART_FROM, preferred_transfer_client="classic"
        )

    def put_file(self, path: str, source: Path) -> None:
        """Uploads a local file, a large one in parts; a failed upload is aborted."""
        with disk_errors(source), self._errors(path), open(source, "rb") as file:
            self._client.upload_fileobj(file, self.bucket, self._key(path), Config=self._transfer)

    def put_bytes(self, path: str, data: bytes) -> None:
        """Uploads bytes."""
        with self._errors(path):
            self._client.put_object(Bucket=self.bucket, Key=self._key(path), Body=data)

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
        with self._errors(path):
            for pause in CONFLICT_PAUSES:
                try:
                    return self._create_once(path, data)
                except ClientError as error:
                    if _status(error) != 409:
                        raise
                time.sleep(pause)
            return self._create_once(path, data)

    def get(self, path: str) -> bytes:
        """The bytes of an object."""
        with self._errors(path):
            data: bytes = self._client.get_object(Bucket=self.bucket, Key=self._key(path))["Body"].read()
            return data

    def buffer(self, path: str) -> "pa.Buffer":
        """The object, downloaded into memory, a large one in parts at once."""
        import pyarrow as pa

        memory = io.BytesIO()
        with self._errors(path):
            self._client.download_fileobj(self.bucket, self._key(path), memory, Config=self._transfer)
        return pa.py_buffer(memory.getbuffer())

    def fetch(self, path: str, target: Path) -> None:
        """Downloads an object to a local file."""
        with disk_errors(target), self._errors(path):
            target.parent.mkdir(parents=True, exist_ok=True)
            with open(target, "wb") as file:
                self._client.download_fileobj(self.bucket, self._key(path), file, Config=self._transfer)

    def exists(self, path: str) -> bool:
        """Whether there is such an object."""
        try:
            with self._errors(path):
                self._client.head_object(Bucket=self.bucket, Key=self._key(path))
        except NotFoundError:
            return False
        return True

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """All objects below a folder, in the order of their paths."""
        folder = self._key(prefix.rstrip("/")) if prefix else self.prefix
        start = len(self.prefix) + 1 if self.prefix else 0
        with self._errors(prefix):
            pages = self._client.get_paginator("list_objects_v2")
            for page in pages.paginate(Bucket=self.bucket, Prefix=f"{folder}/" if folder else ""):
                for entry in page.get("Contents", ()):
                    modified = entry["LastModified"].timestamp()
                    yield ObjectInfo(path=entry["Key"][start:], size=entry["Size"], modified=modified)

    def delete(self, paths: Iterable[str]) -> None:
        """Deletes objects, a thousand a request."""
        keys = iter([self._key(path) for path in paths])
        while batch := [{"Key": key} for key in itertools.islice(keys, 1000)]:
            with self._errors(""):
                answer = self._client.delete_objects(Bucket=self.bucket, Delete={"Objects": batch, "Quiet": True})
            for failed in answer.get("Errors", ()):
                raise StoreUnreachableError(
                    f"can't delete s3://{self.bucket}/{failed['Key']} at {self.endpoint}: {failed['Code']}; "
                    "grant the right to delete objects (s3:DeleteObject)"
                )

    def location(self, path: str) -> str:
        """The s3:// address of an object or folder."""
        return f"s3://{self.bucket}/{self._key(path.rstrip('/'))}"

    def _key(self, path: str) -> str:
        return f"{self.prefix}/{checked_path(path)}" if self.prefix else checked_path(path)

    def _create_once(self, path: str, data: bytes) -> bool:
        try:
            self._client.put_object(Bucket=self.bucket, Key=self._key(path), Body=data, IfNoneMatch="*")
        except ClientError as error:
            if _status(error) != 412:
                raise
            # After a retry inside botocore, the object in the way may be our own, of a try whose answer was lost.
            retried = error.response.get("ResponseMetadata", {}).get("RetryAttempts", 0) > 0
            return retried and self.get(path) == data
        return True

    @contextmanager
    def _errors(self, path: str) -> Iterator[None]:
        """Turns botocore's errors into the store's, with the place and what to do about it."""
        place = f"s3://{self.bucket}/{self.prefix}/{path}" if self.prefix else f"s3://{self.bucket}/{path}"
        try:
            yield
        except ClientError as error:
            code = str(error.response.get("Error", {}).get("Code", "unknown"))
            if code in ("NoSuchKey", "NotFound", "404"):
                raise NotFoundError(f"nothing is stored at {place} (endpoint {self.endpoint})") from error
            raise StoreUnreachableError(
                f"{place} at {self.endpoint} answered {code}; {_remedy(code, self.bucket)}"
            ) from error
        except (NoCredentialsError, PartialCredentialsError) as error:
            raise StoreUnreachableError(
                f"no complete credentials for {place} at {self.endpoint}; set AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY in the environment"
            ) from error
        except BotoCoreError as error:
            raise StoreUnreachableError(
                f"no answer for {place} from {self.endpoint} ({type(error).__name__}); check that the service runs, "
                "store.endpoint_url, store.region and the network"
            ) from error


def _client(endpoint_url: str | None, region: str | None) -> Any:
    config = Config(
        connect_timeout=3,
        read_timeout=60,
        retries={"mode": "standard", "total_max_attempts": 4},
        max_pool_connections=32,
        # the manifests hold a sha256 of everything, and not every service knows S3's newer checksums
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    session = boto3.session.Session()  # its own: boto3's shared one is not safe to use from several threads
    try:
        return session.client("s3", endpoint_url=endpoint_url, region_name=region, config=config)
    except (BotoCoreError, ValueError) as error:
        raise ConfigError(
            f"store.endpoint_url={endpoint_url!r} or store.region={region!r} can't be used: {error}"
        ) from error


def _check_endpoint(endpoint_url: str) -> None:
    address = urlsplit(endpoint_url)
    if address.username is not None or address.password is not None:
        raise ConfigError(
            "store.endpoint_url holds credentials; remove them and set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY "
            "in the environment"
        )
    if address.scheme not in ("http", "https") or not address.hostname:
        raise ConfigError(f"store.endpoint_url={endpoint_url!r}: use a form like https://s3.example.com:9000")


def _status(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _remedy(code: str, bucket: str) -> str:
    if code == "NoSuchBucket":
        return f"make the bucket {bucket!r}, or correct store.uri"
    if code in ("AccessDenied", "403", "Forbidden", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken"):
        return "check the credentials in the environment and their rights on this bucket"
    if code in ("PermanentRedirect", "AuthorizationHeaderMalformed", "301", "400"):
        return "check store.region and store.endpoint_url"
    return "try again, and check the service's own log if it stays"
