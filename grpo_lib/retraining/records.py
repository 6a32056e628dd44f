"""What is kept of a registered model's rounds, in the store: each record is made once and never changes.

    plan.json        what the retraining takes, and from which champion; from then on the same is run again
    judged.json      it is trained; how the challenger compares
    decision.json    what came of it: the watermark is what the decided rounds took
    applied.json     MLflow's aliases and tags say so

A rollback is a round of its own with a decision alone.
"""

from typing import Literal

from pydantic import JsonValue

from grpo_lib.storage.manifests import Record, Sha256

Outcome = Literal["promoted", "refused", "superseded", "abandoned", "rolled back"]
ARRIVED = "grpo.prompts.arrived"
"""The event that tells of new prompt files."""
TAKEN: tuple[Outcome, ...] = ("promoted", "refused")
"""Outcomes after which the files of a round are not new any more."""


class File(Record):
    """A prompt file as it was when it was read."""

    path: str
    sha256: Sha256
    bytes: int
    prompts: int


class Snapshot(Record):
    """Prompts in the store, as JSON a line with the columns of their files."""

    path: str
    """In the store."""
    sha256: Sha256
    prompts: int


class Champion(Record):
    """The version that was in use when the round began."""

    version: str
    """Of the registered model."""
    run: str
    policy_version: int
    policy_digest: str
    checkpoint: str
    """Path of its manifest in the store."""


class Plan(Record):
    """What a retraining takes."""

    format: int = 1
    model: str
    round: int
    run: str
    """Name of the training run."""
    champion: Champion | None
    files: list[File]
    """The new ones."""
    new: Snapshot
    replay: Snapshot | None
    heldout: Snapshot
    config: dict[str, JsonValue]
    """Of the training run."""
    rules: dict[str, JsonValue]
    """By which it is decided."""
    by: str
    at: str
    at_ms: int
    code: str
    """Digest of the source files of this project."""


class Row(Record):
    """Champion against challenger on the same prompts."""

    prompts: int
    champion: float
    """Accuracy: the mean over prompts of the part of the samples that is right."""
    challenger: float
    gain: float
    low: float
    """Of the gain's confidence interval."""
    high: float
    p_better: float
    """One-sided."""
    p_worse: float


class Comparison(Record):
    """Champion against challenger."""

    mode: str
    left_out: int
    """Prompts of which the reward could judge no sample of one of them."""
    all: Row
    sources: dict[str, Row]
    champion: str
    """Path of the evaluation's manifest in the store; of the policy that the run started from."""
    challenger: str
    digests: list[Sha256]
    """Of both evaluations."""


class Judged(Record):
    """A challenger that waits for a decision."""

    version: str
    """Of the registered model."""
    policy_version: int
    policy_digest: str
    checkpoint: str
    """Path of its manifest in the store."""
    comparison: Comparison
    against: list[str]
    """What of the rule does not hold; empty: it passes."""
    flow_run: str | None
    """Prefect's, of a deployment, which asks a person if that is wanted; None: it can't."""
    mlflow: str
    """Where the training run is shown."""
    at: str
    at_ms: int


class Decision(Record):
    """What came of a round."""

    format: int = 1
    model: str
    round: int
    outcome: Outcome
    version: str | None
    """Of the registered model: the challenger, or the version that was gone back to."""
    before: str | None
    """The champion's version until then."""
    reasons: list[str]
    rule: dict[str, JsonValue] | None
    by: str
    at: str
    at_ms: int


class Applied(Record):
    """MLflow knows of the decision."""

    by: str
    at: str
