"""Mailboxes that misbehave on purpose: wrappers for tests, benchmarks and rehearsals.

Each is itself a mailbox around another one, so they stack. `Delayed` makes calls slow, `Counted` counts them,
`Outage` makes the store unreachable, `LostResponse` lets a write land and loses its answer, `StaleListing` lists what
was there a while ago, `TornRead` reads half a body. Errors raised here are the ones a real store raises; nothing else
is changed, and the wrapped mailbox's `listing` shows through.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from shardqueue.errors import InvalidInputError, MailboxUnavailableError
from shardqueue.mailbox.names import check_listing

if TYPE_CHECKING:
    import builtins
    from collections.abc import Callable, Iterable, Mapping

    from shardqueue.mailbox import Mailbox

T = TypeVar("T")


class Wrapper:
    """Forwards each verb through `_around`; a fault overrides that, or a verb."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox

    @property
    def listing(self) -> str:
        """The wrapped mailbox's `listing`."""
        return str(getattr(self._mailbox, "listing", "page"))

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """See `Mailbox.put_if_absent`."""
        return self._around("put_if_absent", key, lambda: self._mailbox.put_if_absent(key, data))

    def get(self, key: str) -> bytes | None:
        """See `Mailbox.get`."""
        return self._around("get", key, lambda: self._mailbox.get(key))

    def list(self, prefix: str, after: str = "", limit: int | None = None) -> builtins.list[str]:
        """See `Mailbox.list`."""
        return self._around("list", prefix, lambda: self._mailbox.list(prefix, after, limit))

    def put(self, key: str, data: bytes) -> None:
        """See `Mailbox.put`."""
        self._around("put", key, lambda: self._mailbox.put(key, data))

    def delete(self, keys: Iterable[str]) -> None:
        """See `Mailbox.delete`."""
        self._around("delete", "", lambda: self._mailbox.delete(keys))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._mailbox!r})"

    def _around(self, verb: str, name: str, forward: Callable[[], T]) -> T:  # noqa: ARG002
        """Make the call `verb` on key or prefix `name` by calling `forward`."""
        return forward()


class Delayed(Wrapper):
    """Every call takes `seconds` longer, and has its effect half-way through them.

    Args:
        mailbox: what to wrap.
        seconds: a number, or a callable asked once a call.
        sleep: how to wait.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        seconds: float | Callable[[], float],
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        super().__init__(mailbox)
        self._seconds, self._sleep = seconds, sleep

    def _around(self, verb: str, name: str, forward: Callable[[], T]) -> T:  # noqa: ARG002
        half = (self._seconds() if callable(self._seconds) else self._seconds) / 2
        self._sleep(half)
        try:
            return forward()
        finally:
            self._sleep(half)


class Counted(Wrapper):
    """Counts the calls of each verb, from any thread, before they are made.

    Args:
        mailbox: who makes the calls.
    """

    def __init__(self, mailbox: Mailbox) -> None:
        super().__init__(mailbox)
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    @property
    def counts(self) -> Mapping[str, int]:
        """Calls by verb so far; a verb never called counts 0."""
        with self._lock:
            return Counter(self._counts)

    @property
    def total(self) -> int:
        """Calls of all verbs so far."""
        with self._lock:
            return self._counts.total()

    def _around(self, verb: str, name: str, forward: Callable[[], T]) -> T:  # noqa: ARG002
        with self._lock:
            self._counts[verb] += 1
        return forward()


class Outage(Wrapper):
    """While `down`, no call reaches the store.

    Args:
        mailbox: who makes the calls.
    """

    def __init__(self, mailbox: Mailbox) -> None:
        super().__init__(mailbox)
        self._is_down = threading.Event()

    def down(self) -> None:
        """Make the store unreachable."""
        self._is_down.set()

    def up(self) -> None:
        """Let calls through again."""
        self._is_down.clear()

    def _around(self, verb: str, name: str, forward: Callable[[], T]) -> T:
        if self._is_down.is_set():
            raise MailboxUnavailableError(
                f"{self!r} is down: {verb}({name!r}) was not sent; call up() to end it"
            )
        return forward()


class Chosen(Wrapper):
    """Misbehaves in some of its calls: each n-th of those that can, or those a rule names."""

    def __init__(
        self,
        mailbox: Mailbox,
        every: int | None = None,
        when: Callable[[str, str], bool] | None = None,
    ) -> None:
        super().__init__(mailbox)
        if (every is None) == (when is None):
            raise InvalidInputError(
                "every, when", (every, when), "exactly one of them", "pass every=1 for all"
            )
        if every is not None:
            _check_every(every)
        self._every, self._when = every, when
        self._lock = threading.Lock()
        self._calls = 0

    def _chooses(self, verb: str, key: str) -> bool:
        if self._when is not None:
            return self._when(verb, key)
        with self._lock:
            self._calls += 1
            return self._calls % (self._every or 1) == 0


class LostResponse(Chosen):
    """A write lands, and its caller is told that the outcome is unknown.

    Args:
        mailbox: what to wrap.
        every: lose the answer of each n-th write (`put` and `put_if_absent` together); 1 loses all.
        when: or lose those for which `when(verb, key)` is true. One of the two must be given.
    """

    def _around(self, verb: str, name: str, forward: Callable[[], T]) -> T:
        answer = forward()
        if verb in ("put", "put_if_absent") and self._chooses(verb, name):
            raise MailboxUnavailableError(f"{self!r} lost the answer to {verb}({name!r}); the write landed")
        return answer


class TornRead(Chosen):
    """A `get` answers with only the beginning of what the key holds.

    No mailbox may do this: bodies appear whole. It is for seeing that nothing acts on part of a record.

    Args:
        mailbox: what to wrap.
        every: tear each n-th read; 1 tears all.
        when: or tear those for which `when("get", key)` is true. One of the two must be given.
        keep: the share of the body that is answered, from 0 (nothing of it) to less than 1; rounded down to bytes.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        every: int | None = None,
        when: Callable[[str, str], bool] | None = None,
        keep: float = 0.5,
    ) -> None:
        super().__init__(mailbox, every, when)
        if not 0 <= keep < 1:
            raise InvalidInputError("keep", keep, "from 0 to less than 1", "pass 0.5 for half of the body")
        self._keep = keep

    def get(self, key: str) -> bytes | None:
        """See `Mailbox.get`, of which this breaks the promise."""
        body = self._mailbox.get(key)
        if body is not None and self._chooses("get", key):
            return body[: int(len(body) * self._keep)]
        return body


class StaleListing(Wrapper):
    """Listings answer from a snapshot of all keys, which is taken anew at every n-th listing.

    In between they neither show what was created nor miss what was deleted. All other calls go to the store as it is,
    so a key may be read, or found to exist, that no listing shows yet. Who shares the wrapper shares the snapshot.

    Args:
        mailbox: what to wrap.
        every: listings to a snapshot; 1 lists the store each time.
    """

    def __init__(self, mailbox: Mailbox, every: int) -> None:
        super().__init__(mailbox)
        _check_every(every)
        self._every = every
        self._lock = threading.Lock()
        self._listings = 0
        self._snapshot: builtins.list[str] = []

    def list(self, prefix: str, after: str = "", limit: int | None = None) -> builtins.list[str]:
        """See `Mailbox.list`; of the keys in the snapshot."""
        check_listing(prefix, after, limit)
        with self._lock:
            if self._listings % self._every == 0:
                self._snapshot = self._mailbox.list("")
            self._listings += 1
            found = (key for key in self._snapshot if key.startswith(prefix) and key > after)
            return list(islice(found, limit))


def _check_every(every: int) -> None:
    if every < 1:
        raise InvalidInputError("every", every, "at least 1", "pass 1 for every call")
