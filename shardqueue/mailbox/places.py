"""Where a URL of an object store leads, and what of its options no message may show."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from shardqueue.errors import InvalidInputError, MailboxRefusedError

if TYPE_CHECKING:
    from collections.abc import Callable

# A key in S3, GCS or Azure has 1,024 bytes; `names.MAX_KEY` of them are the key's own.
_MAX_PREFIX = 200
_SHORTEST_SECRET = 8
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]")
_SECRET_NAMES = re.compile(
    r"key|secret|token|password|username|credential|sas|^sig|signature|connection_string", re.IGNORECASE
)
_SECRET_TEXTS = re.compile(
    r"(?<=://)[^/\s@'\"]+@|\b(?:AKIA|ASIA)[A-Z0-9]{12,}|\bya29\.[\w.-]+|(?<=[?&]sig=)[^&\s'\"]+|(?<=AccountKey=)[^;\s]+"
)


SCHEMES = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "az", "abfss": "az"}
_AZURE_HOST = re.compile(r"([a-z0-9$-]+)@([a-z0-9]+)\.(?:dfs|blob)\.core\.windows\.net")


class Place(NamedTuple):
    """A bucket and what comes before the keys in it; `scheme` is the one that stands for all names of a store."""

    scheme: str
    bucket: str
    prefix: str

    @property
    def shown(self) -> str:
        """The place as a URL, free of credentials."""
        url = f"{self.scheme}://{self.bucket}/{self.prefix}".rstrip("/")
        return re.sub(r"(?<=://)[^/@]*@", "***@", url)


def store_at(url: str) -> str:
    """The one name of the object store that a URL is of; "" for any other URL, and for a path."""
    scheme, separator, _ = url.partition("://")
    return SCHEMES.get(scheme.lower(), "") if separator else ""


def shown(url: str) -> str:
    """A URL as a message may show it that did not get so far as to be taken apart: no credentials, no query."""
    found = re.match(r"([A-Za-z][A-Za-z0-9+.-]*://)(.*)", url, re.DOTALL)
    if found is None or found[1].lower() in ("file://", "local://", "memory://"):
        return url
    before, at, rest = found[2].rpartition("@")
    path, mark, _ = (rest if at else found[2]).partition("?")
    return f"{found[1]}{'***@' if before else ''}{path}{'?***' if mark else ''}"


def parse(url: str) -> tuple[Place, dict[str, Any]]:
    """Where a URL leads, and the options that it implies."""
    scheme, _, rest = url.partition("://")
    public = shown(url)
    canonical = SCHEMES.get(scheme)
    if canonical is None:
        raise MailboxRefusedError(
            f"{public}: object stores are {', '.join(sorted(SCHEMES))}; correct the scheme"
        )
    bucket, _, prefix = rest.partition("/")
    options = {}
    account = _AZURE_HOST.fullmatch(bucket) if canonical == "az" else None
    if account:
        bucket, options["account_name"] = account[1], account[2]
    if "@" in bucket:
        remedy = "pass credentials as options, or by the environment"
        raise InvalidInputError("url", public, "free of credentials", remedy)
    if not _BUCKET.fullmatch(bucket):
        raise InvalidInputError(
            "url",
            public,
            f"{scheme}://bucket/prefix, the bucket's name at least 3 letters, digits and . _ -",
            "name the bucket",
        )
    prefix = prefix.rstrip("/")
    segments = prefix.split("/") if prefix else []
    if any(segment in ("", ".", "..") for segment in segments) or not prefix.isprintable() or "\\" in prefix:
        bound = "free of '//', '.', '..', backslashes and control characters"
        raise InvalidInputError("url", public, bound, "clean the prefix")
    size = len(prefix.encode())
    if size > _MAX_PREFIX:
        bound = f"of a prefix of at most {_MAX_PREFIX} bytes, not {size}"
        raise InvalidInputError("url", public, bound, "shorten the prefix")
    return Place(canonical, bucket, prefix), options


def hider(options: object) -> Callable[[str], str]:
    """Return what takes the credentials in `options`, and what looks like one, out of a text."""
    hidden = [*secrets_in(options), *_secrets_around()]

    def hide(text: str) -> str:
        for secret in hidden:
            text = text.replace(secret, "***")
        return _SECRET_TEXTS.sub("***", text)

    return hide


def _secrets_around() -> list[str]:
    """Credentials in the environment, where the clients look for them too."""
    ours = ("AWS_", "AZURE_", "GOOGLE_", "GCS")
    names = (name for name in os.environ if name.startswith(ours) and _SECRET_NAMES.search(name))
    return [value for value in map(os.environ.__getitem__, names) if len(value) >= _SHORTEST_SECRET]


def secrets_in(options: object, secret: bool = False) -> list[str]:
    """Texts in storage options that no message may show, the longest first."""
    found: set[str] = set()
    if isinstance(options, dict):
        for name, value in options.items():
            hidden = secret or (bool(_SECRET_NAMES.search(str(name))) and not str(name).endswith("kwargs"))
            found.update(secrets_in(value, hidden))
    elif secret and isinstance(options, str) and len(options) > 2:
        found.add(options)
        fields = (field.partition("=") for field in re.split("[?&;]", options))
        found.update(value for name, _, value in fields if _SECRET_NAMES.search(name) and len(value) > 2)
    return sorted(found, key=len, reverse=True)
