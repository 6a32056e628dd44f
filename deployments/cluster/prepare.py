"""What a fresh cluster needs once: buckets, and MLflow's user for runs. Run again, it only sets that user's password.

Reads the S3 credentials, AWS_ENDPOINT_URL_S3 (none: AWS), GRPO_BUCKETS (names, spaces between), MLFLOW_TRACKING_URI,
MLFLOW_AUTH_ADMIN_USERNAME, MLFLOW_AUTH_ADMIN_PASSWORD, GRPO_MLFLOW_USER and GRPO_MLFLOW_PASSWORD.
"""

import os
from collections.abc import Callable
from typing import Any

import boto3
import httpx
from botocore.exceptions import ClientError, EndpointConnectionError
from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_fixed

PATIENCE_SECONDS = 120
MINE = ("BucketAlreadyOwnedByYou", "BucketAlreadyExists")
patiently: Callable[..., Any] = retry(
    retry=retry_if_exception_type((EndpointConnectionError, httpx.TransportError)),
    stop=stop_after_delay(PATIENCE_SECONDS),
    wait=wait_fixed(1),
    reraise=True,
)


@patiently
def make_bucket(name: str) -> str:
    client = boto3.client("s3")
    try:
        client.create_bucket(Bucket=name)
    except ClientError as error:
        if error.response["Error"]["Code"] not in MINE:
            raise SystemExit(f"bucket {name}: {error}; check the S3 credentials and their rights") from None
        return f"bucket {name}: is there"
    return f"bucket {name}: made"


@patiently
def make_user(name: str, password: str) -> str:
    """A user of MLflow who is no administrator: owns what it makes, reads what others make."""
    server = httpx.Client(
        base_url=f"{os.environ['MLFLOW_TRACKING_URI']}/api/2.0/mlflow/users/",
        auth=(os.environ["MLFLOW_AUTH_ADMIN_USERNAME"], os.environ["MLFLOW_AUTH_ADMIN_PASSWORD"]),
    )
    user = {"username": name, "password": password}
    there = server.get("get", params={"username": name}).status_code == 200
    answer = server.patch("update-password", json=user) if there else server.post("create", json=user)
    if answer.status_code != 200:
        raise SystemExit(f"MLflow's user {name}: the server answers {answer.status_code}: {answer.text[:500]}")
    return f"MLflow's user {name}: {'is there' if there else 'made'}"


if __name__ == "__main__":
    for bucket in os.environ["GRPO_BUCKETS"].split():
        print(make_bucket(bucket))
    print(make_user(os.environ["GRPO_MLFLOW_USER"], os.environ["GRPO_MLFLOW_PASSWORD"]))
