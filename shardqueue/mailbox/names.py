"""The grammar of keys and the bounds of bodies: what every store can hold, whatever it is made of.

A key is segments joined by `/`. No segment is empty or starts with a dot (so neither `.` nor `..` is one, and
a folder's temporary, hidden and silly-renamed files can never be keys), none holds a control character or a
backslash; a segment is at most 200 bytes of UTF-8 and a key at most 800. A prefix is the beginning of a key:
it may be empty, end with `/`, or end inside a segment. A body is never empty, since an empty object is created
by overwriting on some stores and reads as "being written" on others.

Every check raises `InvalidInputError`. Keys that differ only in case, or where one is a folder of the other,
are allowed here but not by every file system.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from shardqueue.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_SEGMENT = 200
MAX_KEY = 800
MAX_BODY = 64 * 2**20

_NEVER = re.compile(r"[\x00-\x1f\x7f-\x9f\\\ud800-\udfff]")


def check_key(key: object) -> None:
    """Raise unless `key` is a key."""
    if not isinstance(key, str) or not key:
        raise InvalidInputError(
            "key", key, "a non-empty string", "name the object, as in 'units/000000-0.json'"
        )
    _check_text("key", key, key)


def check_keys(keys: Iterable[str]) -> list[str]:
    """Return `keys` as a list; raise unless each is a key."""
    if isinstance(keys, str):
        raise InvalidInputError("keys", keys, "an iterable of keys", "pass [key] for a single one")
    listed = list(keys)
    for key in listed:
        check_key(key)
    return listed


def check_body(data: bytes) -> None:
    """Raise unless `data` can be a body: bytes, not empty, not larger than `MAX_BODY`."""
    if not isinstance(data, bytes):
        raise InvalidInputError("data", type(data).__name__, "bytes", "encode it first")
    if not data:
        raise InvalidInputError("data", data, "at least one byte", "write a JSON value such as b'{}'")
    if len(data) > MAX_BODY:
        bound = f"at most {MAX_BODY} bytes"
        raise InvalidInputError("len(data)", len(data), bound, "keep large values outside the mailbox")


def check_listing(prefix: str, after: str, limit: int | None) -> None:
    """Raise unless these can be the arguments of a listing."""
    for name, value in (("prefix", prefix), ("after", after)):
        if not isinstance(value, str):
            raise InvalidInputError(name, value, "a string", "pass '' for everything")
        if value:
            _check_text(name, value, value.removesuffix("/"))
    if limit is not None and limit < 0:
        raise InvalidInputError("limit", limit, "None or at least 0", "pass None for all keys")


def is_segment(text: str) -> bool:
    """Whether `text` can be one segment of a key."""
    return bool(text) and text[0] != "." and not _NEVER.search(text) and len(text.encode()) <= MAX_SEGMENT


def _check_text(name: str, text: str, path: str) -> None:
    """Raise unless `path`, what `text` is without a slash that a prefix may end with, is made of segments."""
    wrong = _NEVER.search(text)
    if wrong:
        bound = f"free of {wrong[0]!r} (control characters, backslashes and half characters)"
        raise InvalidInputError(
            name, text, bound, "escape the identifier, for instance with urllib.parse.quote"
        )
    if path[:1] in ("", "/") or path[-1] == "/" or "//" in path:
        raise InvalidInputError(
            name, text, "without an empty segment", "remove the leading, trailing or doubled '/'"
        )
    if path[0] == "." or "/." in path:
        raise InvalidInputError(name, text, "without a segment that starts with '.'", "rename that segment")
    size = len(text.encode())
    if size > MAX_KEY:
        raise InvalidInputError(name, text, f"at most {MAX_KEY} bytes of UTF-8, not {size}", "shorten it")
    if size > MAX_SEGMENT and max(len(segment.encode()) for segment in path.split("/")) > MAX_SEGMENT:
        bound = f"of segments of at most {MAX_SEGMENT} bytes of UTF-8"
        raise InvalidInputError(name, text, bound, "shorten the identifier or split it with '/'")
