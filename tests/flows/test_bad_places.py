"""Runs on a network that fails and on a disk that is full: they take longer, or stop and go on, and end the same."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import boto3
import pytest

from grpo_lib.config import RunConfig
from grpo_lib.errors import StoreUnreachableError
from grpo_lib.run import Run
from grpo_lib.storage.verify import verify_run
from tests.faulty_proxy import FAULTS, FaultyProxy
from tests.flows.runs import Tiny, fresh_process, of, train

pytestmark = pytest.mark.usefixtures("prefect_here")


def policies(config: RunConfig) -> list[str]:
    fresh_process()
    return [str(each.summary["policy_digest"]) for each in of(train(config), "update")]


def test_a_run_over_a_bad_network_ends_with_the_same_weights(tiny: Tiny, s3_endpoint: str, tmp_path: Path) -> None:
    expected = policies(tiny("iterations=1"))
    boto3.client("s3", endpoint_url=s3_endpoint, region_name="us-east-1").create_bucket(Bucket="bad-network")
    faults = [each for each in FAULTS if each != "stall"]  # a minute each
    proxy = FaultyProxy(s3_endpoint, seed=3, rate=0.1, faults=faults)
    config = tiny(
        "iterations=1",
        "store.uri=s3://bad-network/grpo",
        f"store.endpoint_url={proxy.url}",
        "store.region=us-east-1",
        f"tracking.uri=sqlite:///{tmp_path}/mlflow.db",
    )
    try:
        with proxy.gone_for(8):
            found = policies(config)
        assert found == expected
        assert set(proxy.happened) == set(faults), proxy.happened
        assert verify_run(Run(config).objects, "tiny").damages == []
    finally:
        proxy.close()


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_stops_the_run_with_the_remedy_and_it_goes_on_when_there_is_room(
    tiny: Tiny, tmp_path: Path
) -> None:
    settings = ("model.small.hidden_size=128", "model.small.mlp_size=1024", "iterations=1")
    expected = policies(tiny(*settings, f"store.uri={tmp_path / 'other'}"))
    config = tiny(*settings)
    fresh_process()
    with largest_file(2_500_000), pytest.raises(StoreUnreachableError, match=r"free some space .*set TMPDIR"):
        train(config)
    manifests = Run(config).stages.manifests()
    assert len(of(manifests, "update")) == 1 and not of(manifests, "checkpoint")
    assert verify_run(Run(config).objects, "tiny").damages == []
    assert policies(config) == expected
    assert {each.path for each in manifests} <= {each.path for each in Run(config).stages.manifests()}
