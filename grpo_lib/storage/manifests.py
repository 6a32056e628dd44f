"""Manifests: what a stage committed, made from what, and how to tell that it is still that.

A manifest is stored as canonical JSON that holds its own sha256, so that any changed byte of it is noticed; it holds
the sha256 of every part, so that any changed byte of those is noticed too.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, ValidationError

from grpo_lib.errors import CorruptError
from grpo_lib.storage import paths
from grpo_lib.storage.objects import checked_path

FIRST_POLICIES = ("warm_start", "pretrained", "inherited")
"""Stages that make the policy that a run starts from."""
FORMAT = 1
"""Layout of the manifests that this version writes and reads."""

Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
ObjectPath = Annotated[str, AfterValidator(checked_path)]
Count = Annotated[int, Field(ge=0)]


class Record(BaseModel):
    """Base of what is stored or handed between stages: never changes, knows all of its fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class ArtifactRef(Record):
    """What stages hand to each other instead of data: small, and JSON only."""

    stage: str
    run: str
    iteration: int | None
    shard: int
    key: Sha256
    manifest: ObjectPath
    """Path of the manifest in the store."""
    digest: Sha256
    """Of the content; see ``content_digest``."""
    rows: Count
    tokens: Count
    reused: bool = False
    """Whether it was there already, and the stage did not have to run for it."""
    seconds: float
    """That the stage took when it ran."""


class Part(Record):
    """One file of an artifact."""

    path: ObjectPath
    """Relative to the store's root; an adopted artifact's parts lie in another run."""
    size: Count
    """Bytes."""
    sha256: Sha256
    rows: Count | None
    """Of a table; None for any other file."""

    @property
    def name(self) -> str:
        """File name."""
        return paths.file_name(self.path)


class IndexEntry(Record):
    """What the store-wide index holds for a key."""

    manifest: ObjectPath


class Remake(Record):
    """What is to come out when a damaged artifact is made again, so that what was made from it stays true."""

    digest: Sha256 | None
    """None: whatever comes out, nothing is made from it."""
    manifest: ObjectPath | None
    """Where its manifest was set aside, if that could still be read and the parts are this run's own."""


class InputRef(Record):
    """An artifact that a stage read."""

    stage: str
    manifest: ObjectPath
    digest: Sha256


class Manifest(Record):
    """What a stage committed."""

    format: int = FORMAT
    stage: str
    stage_version: int
    key: Sha256
    digest: Sha256
    run: str
    iteration: Count | None
    shard: Count
    rows: Count
    tokens: Count
    parts: list[Part]
    inputs: list[InputRef]
    config: dict[str, JsonValue]
    """The declared slice of the configuration: dotted path to value."""
    external: dict[str, str] | None = None
    """What else the key depends on, by name, such as digests of files; None: written before this was recorded."""
    seed: int
    summary: dict[str, JsonValue]
    """Small results: metrics, the policy's digest, counts."""
    created_ms: int
    """Milliseconds since 1970; an adopted manifest keeps the original's."""
    seconds: float
    host: str
    code_version: str
    packages: dict[str, str]
    adopted_from: ObjectPath | None
    """The other run's manifest whose parts these are."""
    manifest_sha256: str = ""
    """Of the canonical JSON without this field; set by ``sealed``."""

    @property
    def path(self) -> str:
        """Where in the store this manifest belongs."""
        return paths.manifest_path(self.run, self.iteration, self.stage, self.key)

    def sealed(self) -> "Manifest":
        """The same manifest with its own sha256 in it."""
        return self.model_copy(update={"manifest_sha256": self._own_sha256()})

    def to_bytes(self) -> bytes:
        """Canonical JSON; ``read_manifest`` accepts that and nothing else."""
        return canonical_json(self._values())

    def to_ref(self, *, reused: bool) -> ArtifactRef:
        """The reference to hand to other stages."""
        return ArtifactRef(
            stage=self.stage,
            run=self.run,
            iteration=self.iteration,
            shard=self.shard,
            key=self.key,
            manifest=self.path,
            digest=self.digest,
            rows=self.rows,
            tokens=self.tokens,
            reused=reused,
            seconds=self.seconds,
        )

    def _own_sha256(self) -> str:
        return hashlib.sha256(canonical_json(self._values("manifest_sha256"))).hexdigest()

    def _values(self, *left_out: str) -> dict[str, Any]:
        """As stored: a field that came later is left out where an older version wrote the manifest."""
        older = ("external",) if self.external is None else ()
        return self.model_dump(mode="json", exclude={*left_out, *older})

    def fits(self, data: bytes) -> bool:
        """Whether these are exactly its bytes, and its own sha256 is right."""
        try:
            return data == self.to_bytes() and self.manifest_sha256 == self._own_sha256()
        except ValueError:
            return False  # an infinity, such as 1e999: nothing that was ever written


def read_manifest(path: str, data: bytes) -> Manifest:
    """Reads and checks the bytes that are stored at ``path``.

    Raises:
        CorruptError: when any byte differs from what was committed there, with the path.
    """
    try:
        manifest = Manifest.model_validate_json(data)
    except ValidationError as error:
        problem = error.errors(include_input=False, include_url=False)[0]
        raise CorruptError(f"{path} is not a manifest: {problem['msg']} at {problem['loc']}") from error
    if manifest.format != FORMAT:
        raise CorruptError(f"{path} has manifest format {manifest.format}; this version reads format {FORMAT}")
    if not manifest.fits(data):
        raise CorruptError(f"{path} was changed after its commit: its sha256 does not fit; restore it, or delete it")
    if manifest.path != path:
        raise CorruptError(f"{path} holds the manifest of {manifest.path}; restore it, or delete it")
    return manifest


def latest(manifests: Sequence[Manifest], stage: str) -> list[Manifest]:
    """The newest artifact of a stage for each iteration and shard, by iteration."""
    newest: dict[tuple[int, int], Manifest] = {}
    for manifest in manifests:  # sorted by iteration, then time
        if manifest.stage == stage:
            newest[manifest.iteration or 0, manifest.shard] = manifest
    return [newest[place] for place in sorted(newest)]


RESULTS = ("policy_digest", "critic_digest", "next_prompt", "next_kl_coef")
"""Results that a stage has in its summary and that later stages go on from."""


def content_digest(stage: str, version: int, parts: Sequence[Part], summary: dict[str, Any]) -> str:
    """sha256 of what was computed: stage, version, the parts' names and sha256s, and ``RESULTS`` of the summary.

    When, where, by which run and how fast is not in it: the same result has the same digest.
    """
    content: dict[str, Any] = {
        "stage": stage,
        "version": version,
        "parts": [[part.name, part.sha256] for part in parts],
    }
    content |= {name: summary[name] for name in RESULTS if name in summary}
    return hashlib.sha256(canonical_json(content)).hexdigest()


def canonical_json(value: Any) -> bytes:
    """The one way in which a value is written: sorted keys, no spaces, UTF-8.

    Raises:
        ValueError: for NaN and infinities, which JSON does not know.

    >>> canonical_json({"b": [1, 2.5], "a": "ü"})
    b'{"a":"\\xc3\\xbc","b":[1,2.5]}'
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()
