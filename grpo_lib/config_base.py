"""What every section of the configuration is made of."""

from typing import Annotated, Any
from urllib.parse import parse_qs, urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, field_validator


class Section(BaseModel):
    """Base of every section: unknown keys are refused and values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _fits_int32(cls, value: Any) -> Any:
        if isinstance(value, int) and abs(value) >= 2**31:
            raise ValueError(f"{value} is too large; stay below {2**31}")
        return value


def _no_credentials(url: str) -> str:
    try:
        parts = urlsplit(url)
        int(parts.port or 0) if "@" in url else 0  # a password with a slash in it looks like a port
    except ValueError:  # its message repeats the URL
        raise ValueError("this URL can't be read; write / as %2F and @ as %40 before the host's name") from None
    if parts.password is not None or "password" in parse_qs(parts.query):
        raise ValueError(
            f"the URL of {parts.hostname} holds a password, which would end up in manifests and MLflow; "
            "take it out and set it in the environment (MLFLOW_TRACKING_PASSWORD, PGPASSWORD, AWS_SECRET_ACCESS_KEY)"
        )
    return url


UrlWithoutSecrets = Annotated[str, AfterValidator(_no_credentials)]
