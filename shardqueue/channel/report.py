"""What a channel did, as values: depth over time, items a second, and how long every end waited.

A wait before an end's first item is start-up (a model is being built) and a wait for the end of the stream is the
end: both are kept apart from the waits in between, which alone say who starves.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

STARVED_FRACTION = 0.1
"""A receiver that waits more than this share of its time starves."""
STARVED_SECONDS = 10.0
"""Seconds after its first item from which a receiver is judged."""
_SAMPLES = 512


class Side(StrEnum):
    """Which end of the channel."""

    SENDER = "sender"
    RECEIVER = "receiver"


class State(StrEnum):
    """What became of an end."""

    OPEN = "open"
    CLOSED = "closed"
    FAILED = "failed"
    """Closed with an error."""
    DROPPED = "dropped"
    """Lost to the garbage collector, or to the end of its process, before it was closed."""
    KILLED = "killed"
    """Its process died."""


@dataclass(frozen=True, slots=True)
class EndReport:
    """What one end did.

    A receiver between processes measures itself: what it waited includes fetching and unpickling the item.

    Attributes:
        name: the end as a person calls it, "receiver 0", after the channel's name if it has one.
        side: sender or receiver.
        number: which, from 0; clones are numbered on.
        state: open, closed, failed, dropped or killed.
        items: items it sent or received.
        seconds: from its first item to its last, or to now while it is open.
        waited: of those, seconds it waited: a sender for room, a receiver for an item.
        lead: seconds it waited for its first item.
        lost: items that were lost with it.
    """

    name: str
    side: Side
    number: int
    state: State
    items: int
    seconds: float
    waited: float
    lead: float
    lost: int

    @property
    def wait_fraction(self) -> float:
        """Share of its time between its first item and its last that it waited, 0 to 1."""
        return self.waited / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class ChannelReport:
    """What a channel did so far.

    Attributes:
        capacity: items the queue holds.
        depth: items it holds now.
        mean_depth: its mean over time, from the first item on.
        depths: pairs (seconds since the channel was made, depth), at most 512 of them, evenly thinned.
        sent: items accepted from senders.
        received: items handed to receivers (again counted when delivered again).
        lost: items accepted and never received, or in the hands of a receiver that was killed.
        redelivered: items handed out again after their receiver was killed.
        seconds: from the first item to the last, or to now while the channel is in use.
        senders: a report for each, by number.
        receivers: the same.
    """

    capacity: int
    depth: int
    mean_depth: float
    depths: tuple[tuple[float, int], ...] = field(repr=False)
    sent: int
    received: int
    lost: int
    redelivered: int
    seconds: float
    senders: tuple[EndReport, ...]
    receivers: tuple[EndReport, ...]

    @property
    def items_per_second(self) -> float:
        """Items received a second, from the first item to the last."""
        return self.received / self.seconds if self.seconds > 0 else 0.0

    def summary(self) -> str:
        """Return one line for a log."""
        parts = [
            f"{self.received} items, {self.items_per_second:.1f}/s",
            f"depth {self.mean_depth:.1f} of {self.capacity} on average",
            f"consumers waited {_fractions(self.receivers)}",
            f"producers waited {_fractions(self.senders)}",
        ]
        if self.lost:
            parts.append(f"{self.lost} LOST")
        if self.redelivered:
            parts.append(f"{self.redelivered} delivered again")
        return "; ".join(parts)

    def metrics(self, prefix: str = "channel/") -> dict[str, float]:
        """Return the numbers under flat names, as loggers take them (`logger.log_metrics(report.metrics())`).

        Args:
            prefix: what each name begins with.
        """
        numbers: dict[str, float] = {
            "depth": float(self.depth),
            "mean_depth": self.mean_depth,
            "items_per_second": self.items_per_second,
            "received": float(self.received),
            "lost": float(self.lost),
        }
        for end in (*self.senders, *self.receivers):
            numbers[f"{end.side}{end.number}/items"] = float(end.items)
            numbers[f"{end.side}{end.number}/wait_fraction"] = end.wait_fraction
        return {prefix + name: value for name, value in numbers.items()}


def _fractions(ends: tuple[EndReport, ...]) -> str:
    return ", ".join(f"{end.wait_fraction * 100:.1f} %" for end in ends) or "-"


def starving(report: ChannelReport) -> str:
    """Return what to warn of when receivers starve, or ""."""
    hungry = [
        end
        for end in report.receivers
        if end.seconds >= STARVED_SECONDS and end.wait_fraction > STARVED_FRACTION
    ]
    if not hungry:
        return ""
    named = ", ".join(
        f"{end.name} waited {end.wait_fraction * 100:.0f} % of {end.seconds:.0f} s" for end in hungry
    )
    return (
        f"{named}: all receivers waited {_fractions(report.receivers)}, all senders {_fractions(report.senders)}, "
        f"and the queue held {report.mean_depth:.1f} of {report.capacity} items on average. The senders are slower "
        "than the receivers: more or faster senders, or fewer receivers, would keep all of them busy"
    )


class Depth:
    """Depth over time in bounded memory: samples, of which every second one goes when there are too many.

    A sample is the depth that was there before an event; events less than `due` seconds apart share one.
    """

    __slots__ = ("_every", "due", "samples")

    def __init__(self) -> None:
        self.samples: list[tuple[float, int]] = []
        self.due = float("-inf")
        self._every = 0.01

    def sample(self, now: float, depth: int) -> None:
        """The queue held `depth` items until now."""
        self.samples.append((now, depth))
        self.due = now + self._every
        if len(self.samples) > _SAMPLES:
            del self.samples[1::2]
            self._every *= 2
