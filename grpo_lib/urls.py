"""URLs in messages."""

import re

_USER = re.compile(r"(?<=://)\S*@")
_PASSWORD = re.compile(r"(?<=password=)[^&\s]*")
_QUERY = re.compile(r"(://[^\s?#]*[?#])\S+")


def without_secrets(text: str) -> str:
    """The text with its URLs, but without user names, passwords and queries: messages end up in logs.

    >>> without_secrets("url=http://me:s3cr/t@host/v1?api_key=sk-1 is refused")
    'url=http://host/v1?... is refused'
    """
    return _PASSWORD.sub("", _QUERY.sub(r"\1...", _USER.sub("", text)))


def shown(value: object) -> str:
    """A value as Python writes it, without secrets of URLs in it.

    >>> shown("http://me:secret@host"), shown({"urls": ["http://me:secret@host"]})
    ("'http://host'", "{'urls': ['http://host']}")
    """
    return repr(without_secrets(value)) if isinstance(value, str) else without_secrets(repr(value))
