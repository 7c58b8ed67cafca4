"""The thread that writes a process's log to the mailbox: at once, soon again, every few seconds, and a last time.

The log is for others. Losing a write loses nothing, since the next one holds the same and more. Only the last one,
which says how the learner left, is worth waiting for, and one that a state is made from; and that not for long.
"""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Protocol

from shardqueue.bell import Bell
from shardqueue.errors import MailboxUnavailableError
from shardqueue.learner import log_pauses

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardqueue.clock import Clock
    from shardqueue.mailbox import Mailbox
    from shardqueue.records import LogPage, RunKeys

logger = logging.getLogger("shardqueue")


class Author(Protocol):
    """Whose log is written."""

    def pages(self) -> list[LogPage]:
        """The pages that have to be written now, the current one last."""
        ...

    def wrote(self, page: LogPage, clear: bool) -> None:
        """The page was written, or it is not clear whether it was."""
        ...

    def landed_after(self, gap: float) -> None:
        """A page is written, `gap` seconds newer than what was known to be written before."""
        ...


class LogWriter:
    """Writes the log of one process in one run, from `start` to `finish`.

    Args:
        author: gives the pages.
        mailbox: where to.
        keys: of the run.
        every: seconds between two writes, once others have seen the log change.

    Attributes:
        landed: what was done until then, by the clock, is in the mailbox for sure; at first, when writing began.
    """

    def __init__(self, author: Author, mailbox: Mailbox, keys: RunKeys, every: float, clock: Clock) -> None:
        self._author, self._mailbox, self._keys = author, mailbox, keys
        self._every, self._clock = every, clock
        self.landed = clock.monotonic()
        self._stirred = Bell()
        self._requests: SimpleQueue[threading.Event] = SimpleQueue()
        self._leave_by: float | None = None
        self._thread = threading.Thread(target=self._work, name="shardqueue-log", daemon=True)
        self._told = False
        self._lock = threading.Lock()
        self._waiting: list[Callable[[], None]] = []
        self._tried = False

    def start(self, logged: Callable[[], None]) -> bool:
        """Begin, if not begun. Return whether a first write was tried; if not, have `logged` called after it."""
        with self._lock:
            if not self._tried:
                self._waiting.append(logged)
            if self._thread.ident is None:
                self._thread.start()
            return self._tried

    def wake(self) -> None:
        """Write now: somebody waits for it."""
        self._requests.put(threading.Event())
        self._stirred.ring()

    def write_now(self, within: float) -> bool:
        """Write at once; return whether that was tried `within` so many seconds. A signal handler may call it."""
        tried = threading.Event()
        self._requests.put(tried)
        self._stirred.ring()
        return tried.wait(within)

    def finish(self, by: float) -> None:
        """Write a last time, trying until the clock says `by`, and end."""
        self._leave_by = by
        self.wake()
        self._thread.join()

    def _work(self) -> None:
        self._write()
        with self._lock:
            self._tried, waiting = True, self._waiting
        for logged in waiting:
            logged()
        for pause in log_pauses(self._every):
            asked = self._wait(pause)
            if self._leave_by is not None:
                break
            self._write()
            for tried in asked:
                tried.set()
        while not self._write() and self._clock.monotonic() < (self._leave_by or 0.0):
            threading.Event().wait(0.5)

    def _wait(self, seconds: float) -> list[threading.Event]:
        """Until somebody asks for a write, or it is time for one; return whom to tell."""
        asked: list[threading.Event] = []
        self._stirred.wait_for(seconds)  # a SimpleQueue's own timeout may become "for ever" after a pause
        with suppress(Empty):
            while True:
                asked.append(self._requests.get_nowait())
        return asked

    def _write(self) -> bool:
        now = self._clock.monotonic()
        for page in self._author.pages():
            key = self._keys.log(page.learner, page.instance, page.process, page.page)
            try:
                self._mailbox.put(key, page.encode())
            except Exception as error:
                self._author.wrote(page, clear=False)
                return self._give_up(page.learner, error)
            self._author.wrote(page, clear=True)
        self._author.landed_after(now - self.landed)
        self.landed = now
        return True

    def _give_up(self, learner: str, error: Exception) -> bool:
        """Say once what trying again will not mend; return whether there is no point in it."""
        passing = isinstance(error, MailboxUnavailableError)
        if not passing and not self._told:
            self._told = True
            logger.warning("the log of %s cannot be written: %s", learner, error)
        return not passing
