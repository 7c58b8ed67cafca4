"""The reference model: a mailbox that lives in one process.

Every other backend must answer as this one does. It serves threads (one lock) and refuses any other process:
after a fork it would silently become two mailboxes, each granting every claim.

`open_mailbox("memory://name")` gives one instance per name. That table is the only process-wide state of this
package; it lives until the process ends, because a name means "the same mailbox" also when nobody held it for
a moment. `MemoryMailbox()` is in no table.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left, bisect_right, insort
from itertools import islice
from typing import TYPE_CHECKING, NoReturn

from shardqueue.errors import MailboxRefusedError
from shardqueue.mailbox.names import check_body, check_key, check_keys, check_listing

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Self


class MemoryMailbox:
    """A mailbox in this process's memory.

    Args:
        name: shown in `repr` and messages; mailboxes made here with one name are still two.
    """

    listing = "page"

    def __init__(self, name: str | None = None) -> None:
        self._name = name
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._bodies: dict[str, bytes] = {}
        self._keys = _SortedKeys()

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """See `Mailbox.put_if_absent`."""
        check_key(key)
        check_body(data)
        self._check_process()
        with self._lock:
            held = self._bodies.get(key)
            if held is not None:
                return held == data
            self._bodies[key] = data
            self._keys.add(key)
            return True

    def get(self, key: str) -> bytes | None:
        """See `Mailbox.get`."""
        check_key(key)
        self._check_process()
        with self._lock:
            return self._bodies.get(key)

    def list(self, prefix: str, after: str = "", limit: int | None = None) -> list[str]:
        """See `Mailbox.list`; costs O(log n + result)."""
        check_listing(prefix, after, limit)
        self._check_process()
        with self._lock:
            return self._keys.between(prefix, after, limit)

    def put(self, key: str, data: bytes) -> None:
        """See `Mailbox.put`."""
        check_key(key)
        check_body(data)
        self._check_process()
        with self._lock:
            if key not in self._bodies:
                self._keys.add(key)
            self._bodies[key] = data

    def delete(self, keys: Iterable[str]) -> None:
        """See `Mailbox.delete`."""
        listed = check_keys(keys)
        self._check_process()
        with self._lock:
            for key in listed:
                if self._bodies.pop(key, None) is not None:
                    self._keys.remove(key)

    def __repr__(self) -> str:
        return f"MemoryMailbox({self._name!r})" if self._name is not None else "MemoryMailbox()"

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise MailboxRefusedError(f"{self!r} cannot be pickled: {_REMEDY}")

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise MailboxRefusedError(
                f"{self!r} was made in process {self._pid}, this is {os.getpid()}: {_REMEDY}"
            )


_REMEDY = "memory is reached by one process only; open a folder or a bucket instead"

_named: dict[str, MemoryMailbox] = {}
_named_lock = threading.Lock()


def named(name: str) -> MemoryMailbox:
    """Return this process's memory mailbox called `name`, making it at the first call."""
    with _named_lock:
        return _named.setdefault(name, MemoryMailbox(name))


class _SortedKeys:
    """Distinct strings in order, in chunks, so that an insertion moves thousands of references, not millions."""

    _CHUNK = 1_000

    def __init__(self) -> None:
        self._chunks: list[list[str]] = []
        self._lasts: list[str] = []

    def add(self, key: str) -> None:
        if not self._chunks:
            self._chunks, self._lasts = [[key]], [key]
            return
        at = min(bisect_left(self._lasts, key), len(self._chunks) - 1)
        chunk = self._chunks[at]
        insort(chunk, key)
        self._lasts[at] = chunk[-1]
        if len(chunk) > 2 * self._CHUNK:
            self._chunks[at : at + 1] = [chunk[: self._CHUNK], chunk[self._CHUNK :]]
            self._lasts.insert(at, chunk[self._CHUNK - 1])

    def remove(self, key: str) -> None:
        at = bisect_left(self._lasts, key)
        chunk = self._chunks[at]
        del chunk[bisect_left(chunk, key)]
        if chunk:
            self._lasts[at] = chunk[-1]
        else:
            del self._chunks[at], self._lasts[at]

    def between(self, prefix: str, after: str, limit: int | None) -> list[str]:
        """Those that start with `prefix` and are above `after`, the first `limit` of them."""
        find, begin = (bisect_right, after) if after >= prefix else (bisect_left, prefix)
        at = find(self._lasts, begin)
        first = find(self._chunks[at], begin) if at < len(self._chunks) else 0
        found: list[str] = []
        for chunk in islice(self._chunks, at, None):
            ends = not chunk[-1].startswith(prefix)
            stop = (
                bisect_left(chunk, True, first, key=lambda key: not key.startswith(prefix)) if ends else None
            )
            found += chunk[first:stop]
            first = 0
            if ends or (limit is not None and len(found) >= limit):
                break
        return found[:limit]
