"""Where the chaos runs: what `grpo up` starts, an S3 server behind a proxy that can fail, and undisturbed runs."""

import logging
import os
import shutil
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lib.storage.manifests import Manifest
from tests.chaos.case import Place, copy
from tests.faulty_proxy import FaultyProxy
from tests.flow_processes import FlowProcess, flow_server
from tests.ray_set import RaySet
from tests.s3_server import CREDENTIALS, s3_server

BUCKET = "chaos"
FIRST_SECONDS = 300
Points = list[tuple[str, int]]


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What an undisturbed run comes to."""

    artifacts: dict[str, str]
    """Content digest by path; but for `publish`, whose metrics are seconds as well, and which so differs in every run.
    """
    published: list[tuple[int | None, int]]
    """Iteration and number of its points."""
    policy: str
    """Digest of the last policy."""
    points: Points
    """Key and step of each metric point, in order."""
    begun: int
    """Manifests that are there before anything happens."""


class World:
    """Everything that a run uses, and that scenarios kill."""

    def __init__(self, folder: Path, services: RaySet, s3: str) -> None:
        self.folder, self.services, self._s3 = folder, services, s3
        self.proxy = FaultyProxy(s3, stall_seconds=2)
        self._empty = folder / "empty.db"
        self._start: dict[str, Place] = {}
        self._expected: dict[tuple[str, str], Expected] = {}

    def prepare(self) -> None:
        """An empty MLflow database, to be copied: to make one takes seconds; and the bucket."""
        with sqlite3.connect(self.services.mlflow_database) as made, sqlite3.connect(self._empty) as empty:
            made.backup(empty)
        import boto3

        boto3.client("s3", endpoint_url=self._s3, region_name="us-east-1").create_bucket(Bucket=BUCKET)

    def place(self, name: str, store: str, tracking: str = "file", variant: str = "plain") -> Place:
        """A fresh place for a run."""
        folder = self.folder / name
        folder.mkdir()
        direct: dict[str, Any] = {"uri": str(folder / "store")}
        seen = direct
        if store == "s3":
            direct = {"uri": f"s3://{BUCKET}/{name}", "endpoint_url": self._s3, "region": "us-east-1"}
            seen = direct | {"endpoint_url": self.proxy.url}
        uri = f"sqlite:///{folder}/mlflow.db" if tracking == "file" else self.services.mlflow_url
        if tracking == "file":
            shutil.copy(self._empty, folder / "mlflow.db")
        return Place(
            folder=folder,
            store=seen,
            direct=direct,
            tracking={"uri": uri, "experiment": name, "system_seconds": None},  # points as in an undisturbed run
            placement={"ray": {"address": self.services.state.ray_address}},
            variant=variant,
        )

    def undisturbed(self, store: str = "folder", variant: str = "plain") -> Expected:
        """Of such a run; made when it is first asked for."""
        if (store, variant) not in self._expected:
            place = self.place(f"undisturbed-{store}-{variant}", store, variant=variant)
            begun = self.begin(place)
            _finish(FlowProcess("train", place.values, place.log), place)
            self._expected[store, variant] = self.found(place, begun)
        return self._expected[store, variant]

    def begin(self, place: Place) -> int:
        """Copies what every run begins with, the small model, into a fresh place; returns how many manifests."""
        store = "s3" if str(place.store["uri"]).startswith("s3:") else "folder"
        if store not in self._start:
            self._start[store] = self.place(f"start-{store}", store)
            _finish(FlowProcess("warm_start", self._start[store].values, self._start[store].log), self._start[store])
        copy(self._start[store].run(), place.run())
        return len(place.committed())

    def found(self, place: Place, begun: int) -> Expected:
        """What a run came to."""
        manifests = place.run().stages.manifests()
        updates = [each for each in manifests if each.stage == "update"]
        return Expected(
            artifacts={each.path: each.digest for each in manifests if each.stage != "publish"},
            published=sorted(((each.iteration, each.rows) for each in manifests if each.stage == "publish"), key=str),
            policy=str(updates[-1].summary["policy_digest"]) if updates else "none",
            points=self.points(place),
            begun=begun,
        )

    def points(self, place: Place) -> Points:
        """What MLflow's database holds of the run."""
        database = self.services.mlflow_database
        if str(place.tracking["uri"]).startswith("sqlite"):
            database = place.folder / "mlflow.db"
        query = (
            "select metrics.key, metrics.step from metrics join runs using (run_uuid) join experiments using"
            " (experiment_id) where experiments.name = ? order by metrics.key, metrics.step"
        )
        with sqlite3.connect(database) as connection:
            return [(str(key), int(step)) for key, step in connection.execute(query, [place.tracking["experiment"]])]

    def verify(self, place: Place) -> None:
        """Reads every part of every artifact and compares it with its manifest."""
        stages = place.run().stages
        for each in stages.manifests():
            stages.verify(each.to_ref(reused=True))


def differences(found: Expected, expected: Expected) -> list[str]:
    """Between a run that something happened to and an undisturbed one, for people; they have none."""
    told = []
    if found.policy != expected.policy:
        told.append(f"the last policy is {found.policy[:12]}, undisturbed it is {expected.policy[:12]}")
    if found.published != expected.published:
        told.append(f"published was {found.published}, undisturbed {expected.published}")
    paths = sorted(found.artifacts.keys() | expected.artifacts.keys())
    different = [path for path in paths if found.artifacts.get(path) != expected.artifacts.get(path)]
    if different:
        told.append(f"{len(different)} artifacts differ, the first is {different[0]}")
    if found.points != expected.points:
        doubled = sorted({each for each in found.points if found.points.count(each) > 1})
        missing = sorted(set(expected.points) - set(found.points))
        more = sorted(set(found.points) - set(expected.points))
        told.append(f"MLflow holds points twice {doubled[:5]}, misses {missing[:5]}, and has others {more[:5]}")
    return told


@contextmanager
def world(folder: Path, workers: Mapping[str, int]) -> Iterator[World]:
    """All is up, with places for ``workers``; afterwards nothing is left."""
    services = RaySet(workers)
    before = dict(os.environ)
    services.environment |= CREDENTIALS
    os.environ.clear()  # of what earlier tests set
    os.environ.update(services.environment)
    try:
        services.start()
        logging.getLogger("werkzeug").setLevel(logging.WARNING)
        with flow_server(), s3_server() as s3:
            made = World(folder, services, s3)
            made.prepare()
            yield made
            made.proxy.close()
    finally:
        left = services.stop()
        os.environ.clear()
        os.environ.update(before)
    assert not left, f"processes outlived their set: {[each.pid for each in left]}"


def rollouts(manifests: list[Manifest]) -> list[Manifest]:
    return [each for each in manifests if each.stage == "rollout"]


def _finish(flow: FlowProcess, place: Place) -> None:
    code = flow.wait(FIRST_SECONDS)
    if code != 0:
        flow.kill()
        raise RuntimeError(f"an undisturbed run ended with {code}: {place.log.read_text()[-3000:]}")
