"""Prefect's server refuses URLs with secrets by the form's schema, as the configuration does."""

import jsonschema
import pytest
from pydantic import TypeAdapter, ValidationError

from grpo_lib.config import RunConfig
from grpo_lib.config_base import UrlWithoutSecrets

PLAIN = [
    "grpo-store", "/data/a:b@c", "s3://bucket/prefix", "sqlite:////tmp/mlflow.db", "http://mlflow:5000", "https://host/a?b=c",
    "postgresql://mlflow@host/db", "http://host/v1?monkey=1", "http://host?tokens=3", "http://host#part",
]  # fmt: skip
SECRET = [
    "http://user:pass@host", "https://key@host:80/v1", "http://me:s3cr/t@host", "postgresql://mlflow:pass@host/db",
    "http://host/v1?api_key=1", "http://host/?a=b&accessToken=1", "https://host/?X-Amz-Signature=1", "http://host#token=1",
    "http://host?password=1", "postgresql://host/db?password=1",
]  # fmt: skip
SCHEMA = TypeAdapter(UrlWithoutSecrets | None)


@pytest.mark.parametrize("url", PLAIN)
def test_a_url_without_secrets_is_taken_by_both(url: str) -> None:
    assert SCHEMA.validate_python(url) == url
    jsonschema.validate(url, SCHEMA.json_schema())


@pytest.mark.parametrize("url", SECRET)
def test_a_url_with_a_secret_is_refused_by_both(url: str) -> None:
    with pytest.raises(ValidationError):
        SCHEMA.validate_python(url)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(url, SCHEMA.json_schema())


def test_the_form_of_a_run_refuses_it_in_every_place() -> None:
    schema = RunConfig.model_json_schema()
    for place in (
        {"tracking": {"uri": SECRET[0]}},
        {"store": {"uri": SECRET[0]}},
        {"store": {"endpoint_url": SECRET[0]}},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(place, schema)
