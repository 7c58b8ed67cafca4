"""How fast this learner works and how long a claim takes: when to ask for more, and for how much.

Pure arithmetic over observations; time is an argument. The rule: ask when the work in hand, in seconds,
falls below the low-water mark, and then fill up to `REFILL` times that mark in one go. The mark is the time a
claim takes from the decision to the first batch in hand, with a margin. Near the end of a plan the margin
for a misjudged batch is dropped: there a claim too early costs the makespan what it saves in idling.
"""

from __future__ import annotations

from math import log2

MARGIN = 1.3
"""Low-water mark over the measured latency of a claim."""
REFILL = 2.5
"""How far one go fills up, in low-water marks."""
FADE = 0.1
"""How fast a past maximum of a latency fades, per sample."""
RECENT = 0.5
"""Weight of the newest batch in the average seconds a batch."""
STICKY = 0.8
"""Half octaves by which the speed must differ from its grade before the grade follows."""
TRANSFER = 0.005
"""Seconds that a batch needs from a loader worker to the loop."""
CLOSE = 1e-6
"""Seconds that make no difference."""


LONGEST = 8.0
"""How much longer than before a batch may count to take."""


class Pace:
    """Moving estimates: seconds a batch, seconds a claim, batches in hand.

    Attributes:
        ahead: batches claimed, or asked for, and not handed out yet; its owner adds and takes away.
        inline: the consumer loads for itself, so that loading and what it does otherwise add up.
        observed: the training loop behind a loader is seen (`observe`), and its pace counts.
        queue: batches handed out that the training loop has still to take, where that is known.
        grade: batches a second in half octaves (0 is one a second, 4 is four), None until some were timed. It
            changes only when the speed is well outside the old one, so that all who read it agree for long.
    """

    __slots__ = (
        "_batch",
        "_load_batch",
        "ahead",
        "claim_seconds",
        "grade",
        "inline",
        "load_seconds",
        "observed",
        "queue",
        "started",
    )

    def __init__(self) -> None:
        self.ahead = 0.0
        self.inline = self.observed = False
        self.queue = 0
        self.started: float | None = None
        self.claim_seconds = 0.0
        self.load_seconds = 0.0
        self.grade: int | None = None
        self._batch: float | None = None
        self._load_batch = 0.0

    def observe(self, queue: int, started: float, batch: float) -> None:
        """What the training loop behind a loader does: from here on this counts, not when the loader asks.

        Args:
            queue: batches between here and the loop.
            started: when the loop took the running batch.
            batch: seconds in which it takes one from here.
        """
        self.observed = True
        self.queue, self.started, self._batch = queue, started, batch
        self._grade_by(batch)

    def handed(self, now: float) -> None:
        """The consumer got a batch."""
        if not self.observed:
            self.started = now

    def asked(self, now: float) -> None:
        """The consumer came back for the next batch: the running one took until now."""
        if self.started is not None and not self.observed:
            took = now - self.started
            if self._batch is not None:  # a pause of the process is not the time of a batch
                took = min(took, LONGEST * self._batch)
            self._batch = took if self._batch is None else self._batch + RECENT * (took - self._batch)
            self.started = None
            self._grade_by(self.batch(now))

    def claimed(self, seconds: float) -> None:
        """A claim took `seconds` from the decision until it was proven ours."""
        self.claim_seconds = _faded_maximum(self.claim_seconds, seconds)

    def opened(self, seconds: float) -> None:
        """The loader took `seconds` to give the first batch of a unit."""
        self.load_seconds = _faded_maximum(self.load_seconds, seconds)

    def loaded(self, seconds: float) -> None:
        """The loader took `seconds` for one more batch."""
        self._load_batch += RECENT * (seconds - self._load_batch)

    def batch(self, now: float) -> float | None:
        """Seconds a batch: of training or of loading, whichever is slower; None before anything is known."""
        seconds = self._batch
        if seconds is None:
            return None
        if not self.observed and self.started is not None and now - self.started > seconds:
            seconds = now - self.started
        if self.inline and not self.observed:
            seconds += self._load_batch
        elif self._load_batch > seconds:
            seconds = self._load_batch
        return seconds if seconds > 1e-9 else 1e-9

    def low_water(self, now: float, tail: bool) -> float:
        """Seconds of work in hand below which more must be asked for."""
        return self._mark(self.batch(now) or 0.0, tail)

    def work(self, now: float) -> float:
        """Seconds of work in hand: what waits, and what is left of the running batch."""
        return self._work(self.batch(now) or 0.0, now)

    def wanted(self, now: float, tail: bool) -> float:
        """Batches to ask for now; 0 when there is work enough.

        Before the first batch has been timed, one batch beyond the running one is enough.
        """
        batch = self.batch(now)
        if batch is None:
            return max(0.0, 1.0 - self.ahead)
        mark, work = self._mark(batch, tail), self._work(batch, now)
        if work > mark + CLOSE:
            return 0.0
        return max(1.0 if tail else (REFILL * mark - work) / batch, 1e-6)

    def wake(self, now: float, tail: bool) -> float | None:
        """When `wanted` becomes positive by itself; None when it is, or only an event can make it so."""
        batch = self.batch(now)
        if self.started is None or batch is None:
            return None
        surplus = self._work(batch, now) - self._mark(batch, tail)
        if self.observed:
            return now + surplus if surplus > CLOSE else None
        # Once the running batch is overdue, each second makes the others in hand look a second longer too.
        overdue = self.started + batch - now
        return now + surplus if CLOSE < surplus <= overdue + CLOSE else None

    def _mark(self, batch: float, tail: bool) -> float:
        mark = MARGIN * (self.claim_seconds + self.load_seconds)
        mark += TRANSFER if self.observed else 0.0
        return mark if tail else mark + batch / 3

    def _work(self, batch: float, now: float) -> float:
        running = 0.0 if self.started is None else max(0.0, batch - (now - self.started))
        return (self.ahead + self.queue) * batch + running

    def _grade_by(self, batch: float | None) -> None:
        exact = -2.0 * log2(max(batch or 1.0, CLOSE))
        if self.grade is None or abs(exact - self.grade) > STICKY:
            self.grade = round(exact)


def _faded_maximum(past: float, sample: float) -> float:
    return sample if sample > past else past + FADE * (sample - past)
