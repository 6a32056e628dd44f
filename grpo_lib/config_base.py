"""What every section of the configuration is made of."""

import re
from typing import Annotated, Any
from urllib.parse import parse_qs, urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator

from grpo_lib.urls import without_secrets


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
    secret = _secret_word(parts.query) or _secret_word(parts.fragment)
    if parts.password is not None or secret == "password":
        held = "a password"
    elif secret is not None:
        held = f"a secret in its query (a name that ends in {secret})"
    elif parts.scheme in ("http", "https") and "@" in url:  # a key may stand there, with a slash in it too
        held = "a user or a key (before an @; one that means something else is written %40)"
    else:
        return url
    host = urlsplit(without_secrets(url)).hostname
    raise ValueError(
        f"the URL of {host} holds {held}, which would end up in manifests and MLflow; take it out "
        "and set it in the environment (MLFLOW_TRACKING_PASSWORD, PGPASSWORD, AWS_SECRET_ACCESS_KEY, or the variable "
        "that api_key_variable names)"
    )


_SECRET_WORDS = ("key", "token", "secret", "sig", "signature", "password", "passwd", "pwd", "credential")


def _secret_word(query: str) -> str | None:
    """The word at whose end a name in a query says that its value is secret: api_key, accessToken, X-Amz-Signature."""
    names = [name.casefold() for name in parse_qs(query.replace(";", "&"))]
    found = {word for name in names for word in _SECRET_WORDS if re.search(rf"(?:^|[^a-z]|api|access){word}$", name)}
    return "password" if "password" in found else min(found, default=None)


_WORDS = "|".join(f"[{word[0].upper()}{word[0]}]{word[1:]}" for word in _SECRET_WORDS)
NO_SECRETS = (
    r"^(?!https?://\S*@)(?!\S*://[^\s/?#]*:\S*@)"
    rf"(?!\S*[?&;#](?:[^=&;\s]*(?:[^A-Za-z=&;]|[Aa]pi|[Aa]ccess))?(?:{_WORDS})=)"
)
"""The same for forms: Prefect's server keeps what was entered, so it must refuse before a flow looks at it."""

UrlWithoutSecrets = Annotated[str, AfterValidator(_no_credentials), Field(json_schema_extra={"pattern": NO_SECRETS})]


RUN_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
RunName = Annotated[str, Field(pattern=RUN_NAME)]
"""Of a run, a branch, a sweep or a registered model."""


def _compiles(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"is no regular expression: {error}") from None
    return text


Pattern = Annotated[str, AfterValidator(_compiles)]
