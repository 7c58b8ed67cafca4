"""The store seam: a prefix that every learner reaches, and one atomic verb.

A mailbox holds small objects under keys. Everything rests on `put_if_absent`: of all callers that ever create
one key, exactly one gets True. Keys are relative to the prefix; nothing outside it is ever touched. `names`
has the grammar of keys; a wrong one, and an empty body, is `InvalidInputError`.

What each verb may do when things go wrong: return its answer, raise `MailboxUnavailableError` (outcome
unknown, try again with the same bytes), or raise another `MailboxError` (trying again is useless). An
unknown outcome is never rounded to True or False. `get` and `list` answer from the store, past every cache.

A mailbox is picklable as its URL and options, and opens its connection in the process that uses it.

A mailbox may say what a listing costs in an attribute `listing`: "scan" (the whole folder is read, whatever
the limit) or "page" (as much as is returned). Read it with `getattr(mailbox, "listing", "page")`.
"""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from shardqueue.errors import (
    InvalidInputError,
    MailboxRefusedError,
    MailboxUnavailableError,
    ShardQueueWarning,
)

if TYPE_CHECKING:
    import builtins
    from collections.abc import Iterable

__all__ = ["Mailbox", "open_mailbox"]


@runtime_checkable
class Mailbox(Protocol):
    """Any object with these five verbs is a mailbox."""

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Create `key` holding `data`, appearing whole or not at all.

        Returns:
            True when this call, or an earlier call with the very same bytes, created the key. False when the
            key holds other bytes.

        Raises:
            MailboxUnavailableError: the outcome could not be learned in bounded time.
        """
        ...

    def get(self, key: str) -> bytes | None:
        """Return what `key` holds, or None when it does not exist."""
        ...

    def list(self, prefix: str, after: str = "", limit: int | None = None) -> builtins.list[str]:
        """Return the keys that start with `prefix` and sort after `after`, sorted, the first `limit` of them."""
        ...

    def put(self, key: str, data: bytes) -> None:
        """Write `data` to `key`, replacing what it held. For records that only their owner writes."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Remove `keys`; absent ones are no error."""
        ...


def open_mailbox(
    url: str | os.PathLike[str] | Mailbox,
    *,
    prove: bool = True,
    allow_unproven: bool = False,
    **storage_options: Any,
) -> Mailbox:
    """Open the mailbox at `url`.

    Args:
        url: a folder (`/data/run1`, `~/run1`, `file:///data/run1`), a bucket and prefix (`s3://bucket/run1`,
            `gs://bucket/run1`, `az://container/run1`), or `memory://name` (this process only). An object that already
            is a mailbox is returned as it is.
        prove: prove on an object store, and on a mailbox of a kind that is not ours, that its create is exclusive
            (five calls). False writes nothing: a folder must exist. It is for those who only look.
        allow_unproven: also take a URL of any other kind that fsspec knows (no cache), if its create passes that
            proof and thirty races of eight threads. It warns: a store that checks and then acts can pass, and then
            grant a unit twice.
        storage_options: for a bucket, what its filesystem of fsspec (s3fs, gcsfs, adlfs) takes: `key=`, `secret=`,
            `endpoint_url=`, `token=`, `account_name=`..., and `deadline=`, the seconds one call may go on trying
            (60).

    Raises:
        MailboxRefusedError: no exclusive create is known, or proven, for this store.
        MailboxError: the store cannot be used: credentials, a missing bucket, a path that is a file.
        MailboxUnavailableError: the store did not answer; after 5 seconds when no server can be there.
        InvalidInputError: `url` or an option is malformed.
    """
    if not isinstance(url, str | os.PathLike):
        return _checked(url, prove, storage_options)
    from shardqueue.mailbox.places import SCHEMES

    scheme, rest = _split(url)
    if scheme in SCHEMES:
        return _open_bucket(f"{scheme}://{rest}", prove, storage_options)
    if scheme not in ("file", "memory"):
        cached = not _CACHES.isdisjoint([scheme, *str(url).split("::")])
        if cached or not allow_unproven:
            reason = _CACHE if cached else _REASONS.get(scheme, _UNKNOWN)
            shown = scheme if scheme.endswith("::") else f"{scheme}://"
            raise MailboxRefusedError(f"{shown} is refused: {reason}; {_WORKS}")
        return _open_unproven(str(url), prove, storage_options)
    if storage_options:
        raise InvalidInputError(
            "storage_options",
            sorted(storage_options),
            "empty for this store",
            "pass them with a bucket's URL",
        )
    if scheme == "memory":
        from shardqueue.mailbox.memory import named

        return named(rest)
    from shardqueue.mailbox.files import FileMailbox

    return FileMailbox(Path(rest).expanduser(), create=prove)


def _checked(mailbox: object, prove: bool, storage_options: dict[str, Any]) -> Mailbox:
    if not isinstance(mailbox, Mailbox):
        raise InvalidInputError("mailbox", mailbox, "a URL, a path or an object with the five verbs", _WORKS)
    if storage_options:
        remedy = "pass them where the mailbox is opened"
        raise InvalidInputError(
            "storage_options", sorted(storage_options), "empty for an open mailbox", remedy
        )
    ours = any(base.__module__.startswith(f"{__name__}.") for base in type(mailbox).__mro__)
    if prove and not ours:
        from shardqueue.mailbox.probe import prove_exclusive

        prove_exclusive(mailbox)
    return mailbox


def _split(url: str | os.PathLike[str]) -> tuple[str, str]:
    """The scheme and what follows it; a path is of the scheme `file`, a chain of its first link's name and `::`."""
    if not isinstance(url, str):
        return "file", os.fspath(url)
    if not url.strip():
        raise InvalidInputError("url", url, "not empty", _WORKS)
    found = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)(::|://)", url)
    if "::" in url:
        return f"{url.partition('::')[0].partition('://')[0].lower()}::", url
    if found is None:
        if re.match(r"[a-z][a-z0-9]+:/", url):
            raise InvalidInputError("url", url, "a path or scheme://...", "write both slashes")
        return "file", url
    scheme, rest = found[1].lower(), url[found.end() :]
    if scheme not in ("file", "local"):
        return scheme, rest
    if not rest.startswith("/"):
        raise InvalidInputError(
            "url", url, "file:/// and an absolute path", "write three slashes, or give a path"
        )
    return "file", rest


def _open_bucket(url: str, prove: bool, storage_options: dict[str, Any]) -> Mailbox:
    from shardqueue.mailbox.objects import ObjectMailbox
    from shardqueue.mailbox.probe import prove_exclusive

    mailbox = ObjectMailbox(url, **storage_options)
    mailbox.expect_answer(_FIRST_ANSWER_SECONDS)
    if prove:
        try:
            prove_exclusive(mailbox)
        except MailboxUnavailableError as error:
            hint = "nothing has answered there yet: check the URL, endpoint_url and the network"
            raise MailboxUnavailableError(f"{error}; {hint}") from None
    return mailbox


def _open_unproven(url: str, prove: bool, storage_options: dict[str, Any]) -> Mailbox:
    from shardqueue.mailbox.probe import prove_exclusive, prove_races
    from shardqueue.mailbox.unproven import UnprovenMailbox

    mailbox = UnprovenMailbox(url, **storage_options)
    if prove:
        prove_exclusive(mailbox)
        prove_races(mailbox)
    warnings.warn(
        f"{mailbox!r}: no exclusive create is known for this store. A store that checks and then acts can pass the "
        f"proof, and then grant a unit twice, or show half a record; {_WORKS}",
        ShardQueueWarning,
        stacklevel=3,
    )
    return mailbox


_FIRST_ANSWER_SECONDS = 5.0
_WORKS = (
    "give a folder that all learners reach, s3://bucket/prefix, gs://bucket/prefix, az://container/prefix, or "
    "memory://name within one process"
)
_UNKNOWN = "no exclusive create is known for it (allow_unproven=True puts it to the proof)"
_CACHES = frozenset(("simplecache", "filecache", "blockcache", "cached"))
_CACHE = "a cache would answer in place of the store, and it drops the condition of an exclusive create"
_REASONS = {
    "adl": "Data Lake Storage Gen1 is retired; use az:// or abfs://",
    **dict.fromkeys(
        ("sftp", "ssh"), "its create is check-then-act, and an exclusive open leaves an empty file"
    ),
    **dict.fromkeys(("http", "https", "hf"), "it cannot create objects exclusively"),
    **dict.fromkeys(
        ("smb", "hdfs", "arrow_hdfs", "webhdfs", "ftp"), "its create ignores the condition; mount it"
    ),
}
