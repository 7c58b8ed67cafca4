"""A mailbox that remembers what was written through it, so that all of it can be taken away again."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, TypeVar

from shardqueue.errors import MailboxError, MailboxUnavailableError
from shardqueue.mailbox.faults import Wrapper

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from shardqueue.mailbox import Mailbox

T = TypeVar("T")
_TURNS = 3
"""Times that what is seen is removed."""


class StoppedError(Exception):
    """Nothing more is to be asked of the store."""


class Belongings:
    """Keys that may have been written, below one prefix that nobody else has. Safe for threads."""

    def __init__(self) -> None:
        self.prefix = f"doctor-{os.urandom(8).hex()}/"
        self._lock = threading.Lock()
        self._keys: set[str] = set()
        self._stopped = False

    def of(self, mailbox: Mailbox) -> Mailbox:
        """`mailbox`, with what is written through it remembered."""
        return _Remembering(mailbox, self)

    def stop(self) -> None:
        """Let no further call through to the mailboxes given out: each raises `StoppedError`."""
        self._stopped = True

    def check(self) -> None:
        """Raise if stopped."""
        if self._stopped:
            raise StoppedError

    def add(self, key: str) -> bool:
        """`key` is about to be written; say whether it is new."""
        with self._lock:
            is_new = key not in self._keys
            self._keys.add(key)
            return is_new

    def discard(self, keys: Iterable[str]) -> None:
        """`keys` are gone."""
        with self._lock:
            self._keys.difference_update(keys)

    def remove(self, mailbox: Mailbox) -> list[str]:
        """Remove everything; return the keys that may still be there, sorted.

        What is under the prefix afterwards is looked at, and removed again: a write may have landed late.
        """
        with self._lock:
            keys = sorted(self._keys)
        try:
            for _ in range(_TURNS if keys else 0):
                mailbox.delete(keys)
                keys = self._seen(mailbox)
                if not keys:
                    break
        except MailboxError:
            return keys
        return keys

    def _seen(self, mailbox: Mailbox) -> list[str]:
        """What a listing shows of them; nothing where listing is not allowed."""
        try:
            return mailbox.list(self.prefix)
        except MailboxUnavailableError:
            raise
        except MailboxError:
            return []


class _Remembering(Wrapper):
    def __init__(self, mailbox: Mailbox, belongings: Belongings) -> None:
        super().__init__(mailbox)
        self._belongings = belongings

    def delete(self, keys: Iterable[str]) -> None:
        self._belongings.check()
        listed = list(keys)
        super().delete(listed)
        self._belongings.discard(listed)

    def __repr__(self) -> str:
        return repr(self._mailbox)

    def _around(self, verb: str, name: str, forward: Callable[[], T]) -> T:
        self._belongings.check()
        if verb not in ("put", "put_if_absent"):
            return forward()
        is_new = self._belongings.add(name)
        try:
            return forward()
        except MailboxUnavailableError:
            raise
        except MailboxError:
            if is_new:
                self._belongings.discard([name])
            raise
