"""All stores, behind the same fixtures: a folder, S3 as moto's server speaks it, and the same over a bad network."""

import uuid
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import boto3
import pyarrow as pa
import pytest

from grpo_lib.config import RunConfig
from grpo_lib.config_files import make_config
from grpo_lib.storage.local import LocalStore
from grpo_lib.storage.objects import ObjectStore
from grpo_lib.storage.s3 import S3Store
from grpo_lib.storage.stages import ArtifactRef, StageSpec, StageStore, stage_key
from tests.faulty_proxy import FaultyProxy

FAULT_RATE = 0.2
"""Of the requests to S3 over a bad network."""
REWARD = StageSpec(name="reward", version=1, reads=("reward", "rollout.samples"))


@pytest.fixture
def s3_store(s3_endpoint: str) -> S3Store:
    """A store in a bucket of its own."""
    return S3Store(new_bucket(s3_endpoint), "team/grpo", s3_endpoint, "us-east-1")


@pytest.fixture
def faulty_s3_store(s3_endpoint: str, request: pytest.FixtureRequest) -> Iterator[S3Store]:
    """The same over a network and with a service that fail by a seed that is the test's own."""
    proxy = FaultyProxy(s3_endpoint, seed=zlib.crc32(request.node.name.encode()), rate=FAULT_RATE, stall_seconds=1.5)
    bucket = new_bucket(s3_endpoint)
    yield S3Store(bucket, "team/grpo", proxy.url, "us-east-1", patience_seconds=60, timeout_seconds=1)
    proxy.close()


def new_bucket(endpoint: str) -> str:
    bucket = f"bucket-{uuid.uuid4().hex}"
    boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1").create_bucket(Bucket=bucket)
    return bucket


@pytest.fixture
def local_store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


@pytest.fixture(params=["local_store", "s3_store", "faulty_s3_store"])
def objects(request: pytest.FixtureRequest) -> ObjectStore:
    """Each store in turn."""
    store: ObjectStore = request.getfixturevalue(request.param)
    return store


@pytest.fixture
def stages(objects: ObjectStore) -> StageStore:
    return StageStore(objects, "demo")


@pytest.fixture
def config() -> RunConfig:
    scheduled = {"optimizer": {"schedule": "linear"}}
    return make_config({"data": {"problem": "countdown"}, "warm_start": {}, "trainer": scheduled})


@pytest.fixture
def spec() -> StageSpec:
    return REWARD


@pytest.fixture
def rewards() -> pa.Table:
    return pa.table({"rollout_id": [3, 1, 2], "reward": [1.0, 0.1, 0.0], "token_ids": [[1, 2], [], [3]]})


@pytest.fixture
def commit(config: RunConfig, spec: StageSpec, rewards: pa.Table) -> Callable[..., ArtifactRef]:
    """Commits a reward stage with two tables and a text file."""

    def commit_to(stages: StageStore, iteration: int | None = 7, inputs: tuple[ArtifactRef, ...] = ()) -> ArtifactRef:
        key = stage_key(spec, config, inputs, iteration)
        with stages.attempt(spec, config, key, inputs, iteration) as attempt:
            attempt.write_table(rewards)
            attempt.write_table(rewards.slice(0, 1))
            attempt.write_file("notes.txt", b"three rewards")
            return attempt.commit(tokens=3, summary={"reward_mean": 0.5, "failed": 0})

    return commit_to
