"""One call of a mailbox verb, as a value.

The protocol floor decides which calls to make without making them: it returns these values, and whoever runs
it (threads around a real mailbox, a driver in virtual time, a model test) performs them and reports what came
back. `perform` is the only place where a value becomes I/O.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardqueue.mailbox import Mailbox


@dataclass(frozen=True, slots=True)
class PutIfAbsent:
    """Create `key`; answers whether we created it."""

    key: str
    data: bytes

    def perform(self, mailbox: Mailbox) -> bool:
        """Make the call."""
        return mailbox.put_if_absent(self.key, self.data)


@dataclass(frozen=True, slots=True)
class Get:
    """Read `key`; answers its bytes, or None when it is absent."""

    key: str

    def perform(self, mailbox: Mailbox) -> bytes | None:
        """Make the call."""
        return mailbox.get(self.key)


@dataclass(frozen=True, slots=True)
class List:
    """List keys that start with `prefix` and sort after `after`; answers at most `limit`, sorted."""

    prefix: str
    after: str = ""
    limit: int | None = None

    def perform(self, mailbox: Mailbox) -> list[str]:
        """Make the call."""
        return mailbox.list(self.prefix, self.after, self.limit)


@dataclass(frozen=True, slots=True)
class Put:
    """Overwrite `key`, which only its owner writes; answers None."""

    key: str
    data: bytes

    def perform(self, mailbox: Mailbox) -> None:
        """Make the call."""
        mailbox.put(self.key, self.data)


Call = PutIfAbsent | Get | List | Put
Answer = bool | bytes | list[str] | None
