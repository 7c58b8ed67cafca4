"""Who is told how a channel goes: the program's report hook, and a warning when a receiver starves.

It is asked after items moved, never by a clock of its own: an idle channel reports nothing.
"""

from __future__ import annotations

import logging
import threading
import time
import warnings
from typing import TYPE_CHECKING, Protocol

from shardqueue.channel.report import ChannelReport, starving
from shardqueue.errors import ShardQueueWarning, StarvedWarning

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger("shardqueue")
FOREVER = float("inf")


class _Queue(Protocol):
    starved: bool

    @property
    def is_finished(self) -> bool: ...


class Reporting(Protocol):
    """A channel, as it is watched."""

    @property
    def queue(self) -> _Queue:
        """Its counted queue."""
        ...

    def report(self) -> ChannelReport:
        """Return what happened so far."""
        ...


class Watch:
    """Calls the hook every so often.

    Args:
        hook: takes a `ChannelReport`; None: no reports.
        every: seconds between two calls.
        now: the time in seconds.

    Attributes:
        due: when the next report is.
    """

    def __init__(
        self,
        hook: Callable[[ChannelReport], object] | None,
        every: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hook, self._every, self._now = hook, every, now
        self._reporting = threading.Lock()
        self.due = FOREVER if hook is None else now() + every

    def look(self, channel: Reporting) -> None:
        """Warn of starved receivers, and report if it is time or all is over."""
        if channel.queue.starved:
            channel.queue.starved = False
            if message := starving(channel.report()):
                warn(message, StarvedWarning)
        if self._hook is None or (self._now() < self.due and not channel.queue.is_finished):
            return
        if self.due == FOREVER or not self._reporting.acquire(blocking=False):
            return
        try:
            self.due = FOREVER if channel.queue.is_finished else self._now() + self._every
            self._hook(channel.report())
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the hook is the program's, and nothing may be lost for it
            self.due = FOREVER
            warn(f"on_report raised {type(error).__name__}: {error}; it is not called again")
        finally:
            self._reporting.release()


def warn(message: str, category: type[ShardQueueWarning] = ShardQueueWarning) -> None:
    """Warn from a thread that must survive warnings turned into errors."""
    try:
        warnings.warn(message, category, stacklevel=3)
    except ShardQueueWarning:
        _log.warning("%s", message)
