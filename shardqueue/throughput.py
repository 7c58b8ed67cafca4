"""Rates over a rolling window and in total."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

WINDOW = 60.0
"""Seconds over which a recent rate is taken."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What a session did, and how fast.

    Attributes:
        batches: batches trained.
        samples: samples trained, as told to `Session.step`.
        elapsed: seconds since the first batch was asked for.
        waited: of those, seconds the consumer waited for data.
        samples_per_second: over `elapsed`.
        recent_samples_per_second: over the last minute, or since the start.
        recent_batches_per_second: the same for batches.
    """

    batches: int
    samples: int
    elapsed: float
    waited: float
    samples_per_second: float
    recent_samples_per_second: float
    recent_batches_per_second: float

    @property
    def wait_fraction(self) -> float:
        """Share of the time spent waiting for data, 0 to 1."""
        return self.waited / self.elapsed if self.elapsed > 0 else 0.0


class Rolling:
    """Batches and samples of the last minute, in buckets of a second: constant memory at any rate."""

    __slots__ = ("_buckets", "_started")

    def __init__(self) -> None:
        self._buckets: deque[list[float]] = deque()
        self._started: float | None = None

    def start(self, now: float) -> None:
        """The clock starts, once."""
        if self._started is None:
            self._started = now

    def add(self, now: float, batches: int, samples: int) -> None:
        """So much was trained by now."""
        if self._buckets and now - self._buckets[-1][0] < 1.0:
            self._buckets[-1][1] += batches
            self._buckets[-1][2] += samples
        else:
            self._buckets.append([now, batches, samples])
        while self._buckets and now - self._buckets[0][0] > WINDOW:
            self._buckets.popleft()

    def elapsed(self, now: float) -> float:
        """Seconds since the start."""
        return 0.0 if self._started is None else now - self._started

    def recent(self, now: float) -> tuple[float, float]:
        """Return batches and samples a second over the last minute, or since the start."""
        seconds = min(WINDOW, self.elapsed(now))
        if seconds <= 0:
            return 0.0, 0.0
        recent = [bucket for bucket in self._buckets if now - bucket[0] <= WINDOW]
        return sum(b[1] for b in recent) / seconds, sum(b[2] for b in recent) / seconds
