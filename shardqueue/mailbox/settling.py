"""Single requests of a store, settled into the verbs of the seam.

A `Store` makes one request and raises what its client raises. `Settler` gives the requests their meaning:

- A create that ends in anything but success (refused, conflict, 5xx, time-out, reset) says nothing: retries
  inside clients turn a landed create into a refusal. The key is read back: our bytes, we won; other bytes, we
  lost; absent or unreadable, back off with jitter and try again with the same bytes until the deadline.
- Reads, listings and removals are tried again until the deadline. An overwrite is sent once: an older copy of it
  could land after a newer one.
- What trying again cannot mend (credentials, a missing bucket, a wrong region, a bad option) is `MailboxError`
  at once. At the deadline: `MailboxUnavailableError`, with the last answer.
- Until something has answered, a server that seems not to be there (nothing listens, an unknown name, no TLS where
  TLS is asked, a connection cut at once) may be given less than the deadline: at opening, it is likely a mistake.
"""

from __future__ import annotations

import random
import threading
import time
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, NoReturn, Protocol, TypeVar

from shardqueue.clock import SystemClock
from shardqueue.errors import MailboxError, MailboxUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardqueue.clock import Clock

T = TypeVar("T")


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
        self._patience, self._is_there = deadline, False

    def expect_answer(self, seconds: float) -> None:
        """Until a first answer came, give up after `seconds` on a server that seems not to be there."""
        self._patience = min(seconds, self._deadline)

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
            self._give_up(verb, 1, error, self._deadline)

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
                answer = ask()
            except Exception as error:
                self._refuse_if_useless(verb, error)
                self._is_there = self._is_there or unreachable(error) is None
                deadline = self._deadline if self._is_there else self._patience
                pause = min(0.05 * 2**tries, 5.0) * self._random.uniform(0.5, 1.0)
                tries += 1
                if self._clock.monotonic() - started + pause > deadline:
                    self._give_up(verb, tries, error, deadline)
            else:
                self._is_there = True
                return answer
            self._sleep(pause)

    def _refuse_if_useless(self, verb: str, error: Exception) -> None:
        if isinstance(error, MailboxError):
            raise error
        remedy = self._store.remedy(error)
        if _comes_of_exit(error):
            # A daemon thread pauses, and is stopped in that pause; any other would be waited for.
            remedy = None if threading.current_thread().daemon else "leave the queue before the program ends"
        if remedy is not None:
            raise MailboxError(f"{self._shown}: {verb}: {said(error, self._hide)}; {remedy}") from None

    def _give_up(self, verb: str, tries: int, error: Exception, deadline: float) -> NoReturn:
        absent = None if self._is_there else unreachable(error)
        remedy = absent or "it may have taken effect, and trying again with the same bytes is right"
        raise MailboxUnavailableError(
            f"{self._shown}: {verb} got no clear answer in {tries} tries (deadline {deadline:g} s); the last "
            f"was {said(error, self._hide)}; {remedy}"
        ) from None


def said(error: Exception, hide: Callable[[str], str]) -> str:
    """An error in one line, without credentials."""
    text = " ".join(hide(str(error)).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def _comes_of_exit(error: Exception) -> bool:
    """Whether the interpreter ends and has taken executors and sessions away from the client."""
    if not isinstance(error, RuntimeError):
        return False
    return "shutdown" in str(error) or not threading.main_thread().is_alive()


def unreachable(error: BaseException) -> str | None:
    """Why no server seems to be where `error` comes from, and what to do; None when one is there, or may be."""
    import socket
    import ssl

    for cause in _causes(error):
        text = str(cause)
        if isinstance(cause, socket.gaierror):
            return "no host of that name is known: check the name"
        if isinstance(cause, ssl.SSLCertVerificationError):
            return "its certificate is not trusted: check the name, or pass the authority's certificate"
        if "WRONG_VERSION_NUMBER" in text or "record layer failure" in text:
            return "it does not speak TLS: write http:// for https://"
        if "\\x15\\x03" in text:
            return "it speaks TLS: write https:// for http://"
        if isinstance(cause, ConnectionRefusedError) or "Connect call failed" in text:
            return "nothing listens there: check address and port"
        if isinstance(cause, ConnectionResetError) or type(cause).__name__ == "ServerDisconnectedError":
            return "it hangs up at once, as a port that speaks TLS does: write https:// for http://, if it is one"
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error and what lies under it, by the names that Python and the clients give it."""
    waiting: list[object] = [error]
    seen: set[int] = set()
    while waiting:
        cause = waiting.pop(0)
        if not isinstance(cause, BaseException) or id(cause) in seen:
            continue
        seen.add(id(cause))
        yield cause
        waiting += [
            cause.__cause__,
            getattr(cause, "os_error", None),
            getattr(cause, "inner_exception", None),
        ]
        waiting += (getattr(cause, "kwargs", None) or {}).values()
