"""The client of S3, and what its errors mean: with s3.py the only door to boto3.

Credentials come from the environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or the machine's role)
and never appear in a message.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import boto3
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
)
from botocore.exceptions import ConnectionError as NotConnectedError
from botocore.parsers import ResponseParserError
from s3transfer.exceptions import RetriesExceededError

from grpo_lib.errors import ConfigError, NotFoundError, StoreDownError, StoreUnreachableError

SILENT = (NotConnectedError, HTTPClientError, IncompleteReadError, ResponseParserError, RetriesExceededError)
"""What the client raises when there is no answer, or half of one."""
NOT_NOW = ("SlowDown", "RequestTimeout", "IncompleteBody", "BadDigest", "NoSuchUpload", "ConditionalRequestConflict")
"""Answers that may be others the next time. NoSuchUpload: it was completed, and the answer to that was lost."""
QUICK_TRIES = 3
"""Of a request inside the client, within a second or two; beyond that the store's patience counts."""


def connect(endpoint_url: str | None, region: str | None, timeout_seconds: float) -> Any:
    """A client; safe to use from several threads."""
    if endpoint_url is not None:
        _check_endpoint(endpoint_url)
    config = Config(
        connect_timeout=3,
        read_timeout=timeout_seconds,
        retries={"mode": "standard", "total_max_attempts": QUICK_TRIES},
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


@contextmanager
def s3_errors(uri: str, path: str, endpoint: str) -> Iterator[None]:
    """Turns botocore's errors into the store's, with the place and what to do about it."""
    place = f"{uri}/{path}"
    try:
        yield
    except ClientError as error:
        code = code_of(error)
        if code in ("NoSuchKey", "NotFound", "404"):
            raise NotFoundError(f"nothing is stored at {place} (endpoint {endpoint})") from error
        kind = StoreDownError if _may_pass(error) else StoreUnreachableError
        raise kind(f"{place} at {endpoint} answered {code}; {_remedy(code, uri)}") from error
    except (NoCredentialsError, PartialCredentialsError) as error:
        raise StoreUnreachableError(
            f"no complete credentials for {place} at {endpoint}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in "
            "the environment"
        ) from error
    except (BotoCoreError, *SILENT) as error:
        kind = StoreDownError if isinstance(error, SILENT) else StoreUnreachableError
        raise kind(
            f"no answer for {place} from {endpoint} ({type(error).__name__}); check that the service runs, "
            "store.endpoint_url, store.region and the network"
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


def status_of(error: ClientError) -> int:
    """HTTP status of an answer."""
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def code_of(error: ClientError) -> str:
    """S3's name of what went wrong."""
    return str(error.response.get("Error", {}).get("Code", "unknown"))


def _may_pass(error: ClientError) -> bool:
    status = status_of(error)
    return code_of(error) in NOT_NOW or status in (409, 429) or (status >= 500 and status != 501)


def _remedy(code: str, uri: str) -> str:
    if code == "NoSuchBucket":
        return f"make the bucket {urlsplit(uri).netloc!r}, or correct store.uri"
    if code in ("AccessDenied", "403", "Forbidden", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken"):
        return "check the credentials in the environment and their rights on this bucket"
    if code in ("PermanentRedirect", "AuthorizationHeaderMalformed", "301", "400"):
        return "check store.region and store.endpoint_url"
    return "try again, and check the service's own log if it stays"
