"""A mailbox in an object store: single requests of a store, settled into the verbs of the seam.

A `Store` makes one request and raises what its client raises. `Settler` gives the requests their meaning:

- A create that ends in anything but success (refused, conflict, 5xx, time-out, reset) says nothing: retries
  inside clients turn a landed create into a refusal. The key is read back: our bytes, we won; other bytes, we
  lost; absent or unreadable, back off with jitter and try again with the same bytes until the deadline.
- Reads, listings and removals are tried again until the deadline. An overwrite is sent once: an older copy of it
  could land after a newer one.
- What trying again cannot mend (credentials, a missing bucket, a wrong region, a bad option) is `MailboxError`
  at once. At the deadline: `MailboxUnavailableError`, with the last answer.

`ObjectMailbox` keeps URL and options, and makes a store in each process that uses it; a pickle carries just
those two. Neither its `repr` nor any message holds a credential.
"""

from __future__ import annotations

import os
import random
import re
import time
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

from shardqueue.clock import SystemClock
from shardqueue.errors import InvalidInputError, MailboxError, MailboxRefusedError, MailboxUnavailableError
from shardqueue.mailbox.names import check_body, check_key, check_keys, check_listing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from shardqueue.clock import Clock

T = TypeVar("T")

# An S3 key has 1,024 bytes; `names.MAX_KEY` of them are the key's own.
_MAX_PREFIX = 200
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]")
_SECRET_NAMES = re.compile(r"key|secret|token|password|username|credential|sas", re.IGNORECASE)
_SECRET_TEXTS = re.compile(r"(?<=://)[^/\s@'\"]+@|\b(?:AKIA|ASIA)[A-Z0-9]{12,}")


class Store(Protocol):
    """Single requests, on keys below one prefix. Each raises whatever its client raises."""

    page_size: int

    def create(self, key: str, data: bytes) -> None:
        """Create `key` on the condition that it is absent; return only if that succeeded."""
        ...

    def read(self, key: str) -> bytes | None:
        """The bytes of `key`, or None when the store says that it is absent."""
        ...

    def write(self, key: str, data: bytes) -> None:
        """Create or overwrite `key`."""
        ...

    def page(self, prefix: str, after: str, more: str | None, limit: int) -> tuple[list[str], str | None]:
        """At most `limit` keys, and the token with which to go on (None at the end)."""
        ...

    def remove(self, keys: list[str]) -> None:
        """Remove up to `page_size` keys."""
        ...

    def remedy(self, error: Exception) -> str | None:
        """What the user must do, when trying again after `error` is useless; else None."""
        ...


class Settler:
    """The verbs over a `Store`.

    Args:
        store: makes the requests.
        shown: what to call the store in messages.
        deadline: seconds after which a call is not tried again.
        hide: removes credentials from a text.
        clock: measures the deadline.
        sleep: waits between two tries.
    """

    def __init__(
        self,
        store: Store,
        shown: str,
        deadline: float,
        hide: Callable[[str], str],
        clock: Clock | None = None,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._store, self._shown, self._deadline, self._hide = store, shown, deadline, hide
        self._clock, self._sleep = clock or SystemClock(), sleep
        self._random = random.Random()

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """See `Mailbox.put_if_absent`."""
        return self._until_clear(f"put_if_absent({key!r})", lambda: self._create(key, data))

    def get(self, key: str) -> bytes | None:
        """See `Mailbox.get`."""
        return self._until_clear(f"get({key!r})", lambda: self._store.read(key))

    def list_keys(self, prefix: str, after: str, limit: int | None) -> list[str]:
        """See `Mailbox.list`."""
        if after > prefix and not after.startswith(prefix):
            return []
        if after < prefix:
            after = ""
        keys = self._pages(prefix, after, limit)
        if all(first < second for first, second in pairwise(keys)):
            return keys
        # This store sorts folder by folder: what it skipped and cut, it did by another order than ours.
        if after or limit is not None:
            keys = self._pages(prefix, "", None)
        return sorted(key for key in keys if key > after)[:limit]

    def put(self, key: str, data: bytes) -> None:
        """See `Mailbox.put`."""
        verb = f"put({key!r})"
        try:
            self._store.write(key, data)
        except Exception as error:
            self._refuse_if_useless(verb, error)
            self._give_up(verb, 1, error)

    def delete(self, keys: list[str]) -> None:
        """See `Mailbox.delete`."""
        size = self._store.page_size
        for first in range(0, len(keys), size):
            batch = keys[first : first + size]
            self._until_clear(f"delete of {len(batch)} keys", partial(self._store.remove, batch))

    def _create(self, key: str, data: bytes) -> bool:
        try:
            self._store.create(key, data)
        except Exception as error:
            self._refuse_if_useless(f"put_if_absent({key!r})", error)
            held = self._store.read(key)
            if held is None:
                raise
            return held == data
        return True

    def _pages(self, prefix: str, after: str, limit: int | None) -> list[str]:
        keys: list[str] = []
        more: str | None = None
        while limit is None or len(keys) < limit:
            wanted = self._store.page_size if limit is None else min(self._store.page_size, limit - len(keys))
            ask = partial(self._store.page, prefix, after, more, wanted)
            page, more = self._until_clear(f"list({prefix!r})", ask)
            keys += page
            if more is None:
                break
        return keys

    def _until_clear(self, verb: str, ask: Callable[[], T]) -> T:
        started, tries = self._clock.monotonic(), 0
        while True:
            try:
                return ask()
            except Exception as error:
                self._refuse_if_useless(verb, error)
                pause = min(0.05 * 2**tries, 5.0) * self._random.uniform(0.5, 1.0)
                tries += 1
                if self._clock.monotonic() - started + pause > self._deadline:
                    self._give_up(verb, tries, error)
            self._sleep(pause)

    def _refuse_if_useless(self, verb: str, error: Exception) -> None:
        if isinstance(error, MailboxError):
            raise error
        remedy = self._store.remedy(error)
        if remedy is not None:
            raise MailboxError(f"{self._shown}: {verb}: {said(error, self._hide)}; {remedy}") from None

    def _give_up(self, verb: str, tries: int, error: Exception) -> NoReturn:
        raise MailboxUnavailableError(
            f"{self._shown}: {verb} got no clear answer in {tries} tries (deadline {self._deadline:g} s); the last "
            f"was {said(error, self._hide)}; it may have taken effect, and trying again with the same bytes is right"
        ) from None


class ObjectMailbox:
    """A mailbox under `scheme://bucket/prefix`.

    Args:
        url: for now `s3://bucket` or `s3://bucket/prefix`.
        deadline: seconds after which one call is not tried again.
        storage_options: what the scheme's fsspec filesystem takes.
    """

    listing = "page"

    def __init__(self, url: str, *, deadline: float = 60.0, **storage_options: Any) -> None:
        self._bucket, self._prefix = _parsed(url)
        if not deadline > 0:
            raise InvalidInputError("deadline", deadline, "more than 0 seconds", "pass 60")
        self._deadline, self._options = deadline, storage_options
        self._settlers: dict[int, Settler] = {}
        self._settler()

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """See `Mailbox.put_if_absent`."""
        check_key(key)
        check_body(data)
        return self._settler().put_if_absent(key, data)

    def get(self, key: str) -> bytes | None:
        """See `Mailbox.get`."""
        check_key(key)
        return self._settler().get(key)

    def list(self, prefix: str, after: str = "", limit: int | None = None) -> list[str]:
        """See `Mailbox.list`; one request for each 1,000 keys returned.

        On a store that sorts folder by folder (SeaweedFS does, AWS does not), `after` is exact among keys of
        one folder, and so are whole listings. Across folders it may leave out keys of a folder whose name is the
        beginning of one in `after`.
        """
        check_listing(prefix, after, limit)
        return self._settler().list_keys(prefix, after, limit)

    def put(self, key: str, data: bytes) -> None:
        """See `Mailbox.put`."""
        check_key(key)
        check_body(data)
        self._settler().put(key, data)

    def delete(self, keys: Iterable[str]) -> None:
        """See `Mailbox.delete`."""
        self._settler().delete(check_keys(keys))

    def __repr__(self) -> str:
        return f"ObjectMailbox({self._shown!r})"

    def __eq__(self, other: object) -> bool:
        """Whether both lead to the same prefix with the same options."""
        if not isinstance(other, ObjectMailbox):
            return NotImplemented
        mine, theirs = ((m._bucket, m._prefix, m._options) for m in (self, other))
        return mine == theirs

    def __hash__(self) -> int:
        return hash((self._bucket, self._prefix))

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_settlers": {}}

    @property
    def _shown(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    def _settler(self) -> Settler:
        # A store made before a fork must not be used, nor finalised, after it: each process has its own entry.
        found = self._settlers.get(os.getpid())
        return found or self._settlers.setdefault(os.getpid(), self._connected())

    def _connected(self) -> Settler:
        hidden = _secrets(self._options)

        def hide(text: str) -> str:
            for secret in hidden:
                text = text.replace(secret, "***")
            return _SECRET_TEXTS.sub("***", text)

        try:
            from shardqueue.mailbox.s3 import S3Store

            store = S3Store(self._bucket, f"{self._prefix}/" if self._prefix else "", self._options)
        except MailboxError:
            raise
        except ImportError as error:
            raise MailboxRefusedError(f"{self._shown}: {error}; install 's3fs>=2026.2.0'") from error
        except Exception as error:
            remedy = "correct the options given to open_mailbox"
            raise MailboxError(f"{self._shown} cannot be opened: {said(error, hide)}; {remedy}") from None
        return Settler(store, self._shown, self._deadline, hide)


def said(error: Exception, hide: Callable[[str], str]) -> str:
    """An error in one line, without credentials."""
    text = " ".join(hide(str(error)).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def _parsed(url: str) -> tuple[str, str]:
    scheme, _, rest = url.partition("://")
    shown = re.sub(r"^[^/]*@", "***@", rest)
    if scheme not in ("s3", "s3a"):
        raise MailboxRefusedError(f"{scheme}://{shown}: only s3:// is supported among the object stores yet")
    bucket, _, prefix = rest.partition("/")
    if "@" in bucket:
        remedy = "pass credentials as key= and secret=, or by the environment"
        raise InvalidInputError("url", f"{scheme}://{shown}", "free of credentials", remedy)
    if not _BUCKET.fullmatch(bucket):
        raise InvalidInputError("url", url, "s3://bucket/prefix with a bucket's name", "name the bucket")
    prefix = prefix.strip("/")
    segments = prefix.split("/") if prefix else []
    if any(segment in ("", ".", "..") for segment in segments) or not prefix.isprintable():
        raise InvalidInputError(
            "url", url, "free of '//', '.', '..' and control characters", "clean the prefix"
        )
    if len(prefix.encode()) > _MAX_PREFIX:
        raise InvalidInputError(
            "url", url, f"of a prefix of at most {_MAX_PREFIX} bytes", "shorten the prefix"
        )
    return bucket, prefix


def _secrets(options: object, secret: bool = False) -> list[str]:
    """Texts in storage options that no message may show, the longest first."""
    found: set[str] = set()
    if isinstance(options, dict):
        for name, value in options.items():
            hidden = secret or (bool(_SECRET_NAMES.search(str(name))) and not str(name).endswith("kwargs"))
            found.update(_secrets(value, hidden))
    elif secret and isinstance(options, str) and len(options) > 2:
        found.add(options)
    return sorted(found, key=len, reverse=True)
