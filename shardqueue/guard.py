"""A learner whose log is late may have been given up for dead, with its units handed to others. So it asks first.

Its log is *late* once what is known to have reached the mailbox is older than half of `reclaim_after`: the process
was paused, or the store is out, and others may soon count it as silent. From then on it claims nothing, and before
each batch it reads whether that batch's attempt was ended; until the store answers, it trains nothing.

When a process goes on after a pause, its log may be written before its loop comes for the next batch. So a gap
between two writes is remembered: of whatever was in hand then, or may have been asked for before, every batch is
asked about. As long as the log is in time, all this costs two comparisons a batch.
"""

from __future__ import annotations

import logging
import threading
from math import inf
from typing import TYPE_CHECKING

from shardqueue.asks import PATIENCE
from shardqueue.errors import InvalidInputError, MailboxUnavailableError
from shardqueue.records import BackRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from shardqueue.clock import Clock
    from shardqueue.mailbox import Mailbox
    from shardqueue.records import RunKeys
    from shardqueue.units import Step

    Attempt = tuple[str, str, int]
    """Pass, unit, and the number of an attempt at it."""

logger = logging.getLogger("shardqueue")

PAUSE = 0.5
"""Seconds between two questions to a store that does not answer."""
LEAST, MOST = 1.0, 7 * 86400.0
"""Seconds that `reclaim_after` may be."""
UNDER_WAY = 30.0
"""Seconds for which a call may be under way, or be repeated, once the mailbox answers."""
WRITES = 3
"""Writes of a log that must fit into `reclaim_after`."""


def check_reclaim_after(seconds: float | None) -> float | None:
    """Refuse what is no time of silence.

    Raises:
        InvalidInputError: it is not a number from 1 second to 7 days.
    """
    given: object = seconds
    if given is not None and (
        not isinstance(given, int | float) or isinstance(given, bool) or not LEAST <= given <= MOST
    ):
        bound = f"from {LEAST:g} to {MOST:g} seconds, or None for units that are never handed out again"
        raise InvalidInputError("reclaim_after", seconds, bound, "pass 60")
    return None if seconds is None else float(seconds)


def log_pause(every: float, reclaim_after: float | None) -> float:
    """Seconds between two writes of a log that `reclaim_after` leaves, at most `every`."""
    return every if reclaim_after is None else min(every, reclaim_after / WRITES)


def check_log_pause(every: float, reclaim_after: float | None) -> None:
    """Refuse a log that is written too seldom to show that its owner is alive.

    Raises:
        InvalidInputError: three writes do not fit into `reclaim_after`.
    """
    if reclaim_after is not None and every > reclaim_after / WRITES:
        bound = f"at least {WRITES * every:g} s, {WRITES} writes of the session's log"
        remedy = f"pass that, or Session(..., log_every={reclaim_after / WRITES:g})"
        raise InvalidInputError("reclaim_after", reclaim_after, bound, remedy)


class Guard:
    """Tells whether a batch is still ours.

    Args:
        learner: our label, for messages.
        mailbox: where attempts are ended.
        keys: of the run.
        after: `reclaim_after`.
        landed: until when, by the clock, our log is known to be in the mailbox.
        clock: the same clock.

    Attributes:
        repeated: batches that were trained by us and, since we had been given up, by others.
    """

    def __init__(
        self,
        learner: str,
        mailbox: Mailbox,
        keys: RunKeys,
        after: float,
        landed: Callable[[], float],
        clock: Clock,
    ) -> None:
        self.repeated = 0
        self._learner = learner
        self._mailbox, self._keys, self._after = mailbox, keys, after
        self._landed, self._clock = landed, clock
        self._lapsed = -inf
        self._doubtful: set[Attempt] = set()
        self._ended: set[Attempt] = set()

    @property
    def late(self) -> bool:
        """Whether our log is so old that others may soon take us for silent."""
        return self._clock.monotonic() - self._landed() > self._after / 2

    def landed_after(self, gap: float, held: Iterable[Attempt]) -> None:
        """Our log is in the mailbox again, `gap` seconds after it was there before; `held` is in hand."""
        if gap > self._after / 2:
            self._doubtful.update(held)
            self._lapsed = self._clock.monotonic()

    def claimed(self, attempt: Attempt) -> None:
        """An attempt is ours; it may have been asked for a while ago."""
        if self._lapsed_lately:
            self._doubtful.add(attempt)

    @property
    def _lapsed_lately(self) -> bool:
        """Whether there was a gap so lately that what comes may have been asked for before it."""
        return self._clock.monotonic() - self._lapsed < max(self._after, UNDER_WAY)

    def released(self, attempt: Attempt) -> None:
        """An attempt is over."""
        self._doubtful.discard(attempt)

    def owns(self, step: Step) -> bool:
        """Whether a batch is still ours; may read the mailbox.

        Raises:
            MailboxError: the mailbox cannot be read, or did not answer for too long.
        """
        key = step.pass_, step.unit, step.attempt
        if key in self._ended:
            return False
        # In this order: the log is late until what is in hand is in doubt.
        asks = self.late or self._lapsed_lately or key in self._doubtful
        record = self._read(step) if asks else None
        if record is None or step.index < record.begin:
            return True
        self._ended.add(key)
        self.repeated += step.index - record.begin
        logger.warning(
            "%s was silent for so long that others took over unit %s from batch %d; %d batches are trained twice",
            *(self._learner, step.unit, record.begin, step.index - record.begin),
        )
        return False

    def _read(self, step: Step) -> BackRecord | None:
        key = self._keys.pass_keys(step.pass_).back(step.unit, step.attempt)
        by = self._clock.monotonic() + PATIENCE
        while True:
            try:
                data = self._mailbox.get(key)
            except MailboxUnavailableError:
                if self._clock.monotonic() >= by:
                    raise
                threading.Event().wait(PAUSE)
            else:
                return None if data is None else BackRecord.decode(data, key)
