"""MLflow's model registry: versions that point at checkpoints in the store, and the names that they go by.

    registry = Registry(config)
    version = registry.register("countdown", checkpoint)
    registry.set_alias("countdown", CHAMPION, version)
    registry.at("countdown", CHAMPION).place

Weights stay in the store. Nothing is deleted. `grpo_lib/retraining` moves the champion, and rolls it back.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_lib.errors import NotFoundError
from grpo_lib.tracking.mlflow import CHECKPOINT, MAX_TAG_LENGTH, MlflowServer, all_pages, mlflow_call

CHAMPION = "champion"
"""Alias of the version that is in use."""
CHALLENGER = "challenger"
"""Alias of the version that might take its place."""
TAGS = {CHECKPOINT, "grpo.run", "grpo.policy_version", "grpo.policy_digest", "grpo.model_id"}
"""Of a version that is a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Registered:
    """A checkpoint as it goes into the registry."""

    place: str
    """Folder or s3:// address of the checkpoint."""
    run: str
    """Name of the training run."""
    policy_version: int
    policy_digest: str
    run_id: str
    """Of MLflow."""
    model_id: str
    """Of MLflow's logged model."""


class Registry(MlflowServer):
    """Registered models of an MLflow server.

    Raises:
        TrackingError: from every method, when MLflow refuses, or TrackingDownError when it can't be reached.
    """

    @mlflow_call
    def register(self, name: str, checkpoint: Registered) -> str:
        """The version of the registered model ``name`` that is that checkpoint; made if there is none."""
        for each in self._versions(name):
            if each.tags.get(CHECKPOINT) == checkpoint.place:
                return str(each.version)
        self._make(name)
        tags = {
            CHECKPOINT: checkpoint.place,
            "grpo.run": checkpoint.run,
            "grpo.policy_version": str(checkpoint.policy_version),
            "grpo.policy_digest": checkpoint.policy_digest,
            "grpo.model_id": checkpoint.model_id,
        }
        source = checkpoint.place
        if self.uri.startswith("http") and "://" not in source:
            source = f"models:/{checkpoint.model_id}"  # a server takes no folder that is not its own; the tag says it
        made = self._client.create_model_version(
            name,
            source,
            run_id=checkpoint.run_id,
            tags=tags,
            description=f"Policy {checkpoint.policy_version} of run {checkpoint.run}",
            model_id=checkpoint.model_id,
        )
        return str(made.version)

    @mlflow_call
    def set_alias(self, name: str, alias: str, version: str) -> None:
        """From now on ``alias`` is that version, and no other."""
        self._client.set_registered_model_alias(name, alias, version)

    @mlflow_call
    def remove_alias(self, name: str, alias: str, version: str | None = None) -> None:
        """No version goes by that alias any more; with ``version``: unless another has it now."""
        if version in (None, self.aliases(name).get(alias)):
            self._client.delete_registered_model_alias(name, alias)

    @mlflow_call
    def aliases(self, name: str) -> dict[str, str]:
        """Version by alias; empty: there is no such model, or nothing goes by an alias."""
        return {alias: str(version) for alias, version in self._aliases(name).items()}

    @mlflow_call
    def tag(self, name: str, version: str, tags: Mapping[str, str]) -> None:
        """Sets tags of a version."""
        for key, value in tags.items():
            self._client.set_model_version_tag(name, version, key, value[:MAX_TAG_LENGTH])

    @mlflow_call
    def describe(self, name: str, version: str, text: str) -> None:
        """Sets the text on a version's page, in Markdown."""
        self._client.update_model_version(name, version, description=text)

    @mlflow_call
    def at(self, name: str, alias: str) -> Registered | None:
        """The checkpoint that goes by an alias; None: there is none.

        Raises:
            NotFoundError: that version was made elsewhere.
        """
        version = self._aliases(name).get(alias)
        return None if version is None else _registered(self._client.get_model_version(name, str(version)))

    @mlflow_call
    def version(self, name: str, version: str) -> Registered:
        """The checkpoint that a version is.

        Raises:
            NotFoundError: it was made elsewhere.
        """
        return _registered(self._client.get_model_version(name, version))

    @mlflow_call
    def versions(self, name: str) -> dict[str, Registered]:
        """All of a registered model that are checkpoints, by version, newest first."""
        found = sorted(self._versions(name), key=lambda each: -int(each.version))
        return {str(each.version): _registered(each) for each in found if each.tags.keys() >= TAGS}

    @mlflow_call
    def tags(self, name: str) -> dict[str, dict[str, str]]:
        """Tags of all versions, by version, newest first."""
        found = sorted(self._versions(name), key=lambda each: -int(each.version))
        return {str(each.version): dict(each.tags) for each in found}

    def _make(self, name: str) -> None:
        if self._client.search_registered_models(f"name = '{name}'"):
            return
        try:
            self._client.create_registered_model(name, description="Policies of grpo-pipeline; weights in the store.")
        except Exception:
            if not self._client.search_registered_models(f"name = '{name}'"):
                raise
            # else another process was faster

    def _aliases(self, name: str) -> dict[str, Any]:
        return next((each.aliases for each in self._client.search_registered_models(f"name = '{name}'")), {})

    def _versions(self, name: str) -> list[Any]:
        return all_pages(lambda token: self._client.search_model_versions(f"name = '{name}'", page_token=token))


def _registered(version: Any) -> Registered:
    tags = version.tags
    if missing := TAGS - tags.keys():
        raise NotFoundError(
            f"version {version.version} of model {version.name!r} has no tag {min(missing)}: it was made by hand, and "
            f"nothing says which checkpoint it is; `grpo rollback {version.name} --to VERSION` takes one that "
            "`grpo retrain` made"
        )
    return Registered(
        place=tags[CHECKPOINT],
        run=tags["grpo.run"],
        policy_version=int(tags["grpo.policy_version"]),
        policy_digest=tags["grpo.policy_digest"],
        run_id=version.run_id,
        model_id=tags["grpo.model_id"],
    )
