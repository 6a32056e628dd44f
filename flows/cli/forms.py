"""What Prefect's server has of the deployments: the values of their forms, their schedules, what starts them."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentUpdate, WorkPoolUpdate
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError

from grpo_lib.errors import ConfigError

if TYPE_CHECKING:
    from prefect.client.schemas.objects import DeploymentSchedule


@dataclass(frozen=True, kw_only=True)
class Form:
    """A deployment as it is on the server."""

    id: UUID
    label: str
    """FLOW/NAME."""
    parameters: dict[str, Any] = field(default_factory=dict)
    schedules: list[dict[str, Any]] = field(default_factory=list)
    """As prefect.yaml has them."""
    enabled: bool | None = None
    """Whether events start it; None: nothing is there that would."""


@contextmanager
def _prefect() -> Iterator[SyncPrefectClient]:
    try:
        with get_client(sync_client=True) as client:
            yield client
    except (PrefectHTTPStatusError, httpx.HTTPError) as error:
        raise ConfigError(
            f"Prefect's server did not take it: {str(error)[:1000]}; with a password it wants PREFECT_API_AUTH_STRING"
        ) from error


def read_forms(names: Iterable[str], pool: str) -> dict[str, Form]:
    """Those of a pool, by name; others may have such names."""
    with _prefect() as client:
        wanted = DeploymentFilter(name=DeploymentFilterName(any_=list(names)))
        found = [each for each in client.read_deployments(deployment_filter=wanted) if each.work_pool_name == pool]
        return {
            each.name: Form(
                id=each.id,
                label=f"{client.read_flow(each.flow_id).name}/{each.name}",
                parameters=each.parameters,
                schedules=[_schedule(one) for one in each.schedules],
                enabled=_enabled(client, each.id, each.name),
            )
            for each in found
        }


def fill_form(form: Form, parameters: dict[str, Any]) -> None:
    """Literally: `prefect deploy` takes ``{{ word }}`` in them for a template of its own."""
    with _prefect() as client:
        client.update_deployment(form.id, DeploymentUpdate(parameters=parameters))


def has_pool(name: str) -> bool:
    with _prefect() as client:
        try:
            client.read_work_pool(name)
        except ObjectNotFound:
            return False
    return True


def limit_pool(name: str, runs: int) -> None:
    """By the server: a worker with a limit of its own dies of a run that is retried before its process has ended."""
    with _prefect() as client:
        client.update_work_pool(name, WorkPoolUpdate(concurrency_limit=runs))


def _schedule(found: "DeploymentSchedule") -> dict[str, Any]:
    kind = found.schedule.model_dump(mode="json", exclude_none=True)
    if "interval" in kind:
        kind["interval"] = found.schedule.interval.total_seconds()  # type: ignore[union-attr]
    rest = {"active": found.active, "parameters": found.parameters, "slug": found.slug}
    return kind | {name: value for name, value in rest.items() if value not in (None, {})}


def _enabled(client: SyncPrefectClient, deployment: UUID, name: str) -> bool | None:
    """Of the automations that `prefect deploy` made for it, by their names; people may have others."""
    found = client.read_resource_related_automations(f"prefect.deployment.{deployment}")
    own = [each for each in found if each.name.startswith(f"{name}__automation_")]
    return any(each.enabled for each in own) if own else None
