"""The store seam: a prefix that every learner reaches, and one atomic verb.

A mailbox holds small objects under keys. Everything rests on `put_if_absent`: of all callers that ever create
one key, exactly one gets True. Keys are relative to the prefix; nothing outside it is ever touched.

What each verb may do when things go wrong: return its answer, raise `MailboxUnavailableError` (outcome
unknown, try again with the same bytes), or raise another `MailboxError` (trying again is useless). An
unknown outcome is never rounded to True or False. `get` and `list` answer from the store, past every cache.

A mailbox is picklable as its URL and options, and opens its connection in the process that uses it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Mailbox"]


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

    def list(self, prefix: str, after: str = "", limit: int | None = None) -> list[str]:
        """Return the keys that start with `prefix` and sort after `after`, sorted, the first `limit` of them."""
        ...

    def put(self, key: str, data: bytes) -> None:
        """Write `key`, replacing what it held. For records that only their owner writes."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Remove `keys`; absent ones are no error."""
        ...
