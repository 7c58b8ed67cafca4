"""The work that every side gets, and the consumers that do it.

Training a unit is waiting, from the moment it is had until what the consumer's speed makes of its duration is over.
The makespan runs from the common start of all consumers, when everything is imported and set up, to the end of the
last unit: start-up of the hand-out counts, leaving does not. A side whose system needs seconds to get going may have
its clock start at the first unit that any consumer had; that favours it, and its row says so.

Only the standard library is imported here, because a side runs in the environment of its system.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

PATIENCE = 60.0
"""Seconds to wait for all consumers to be ready to start."""


@dataclass(frozen=True, slots=True)
class Work:
    """Units of one batch for consumers of unequal speed.

    Attributes:
        units: how many.
        seconds: what a unit takes a consumer of speed 1.
        latency: seconds that every call to a store takes longer.
        turns: how often it is done; the median counts.
        prefetch: units that may wait with a consumer, where the system has such a setting.
        speeds: of the consumers.
    """

    units: int
    seconds: float
    latency: float = 0.0
    turns: int = 1
    prefetch: int = 8
    speeds: tuple[float, ...] = (1.0, 0.5, 0.5, 0.25)

    @property
    def limit(self) -> float:
        """Seconds in which the work is done if nobody ever idles."""
        return self.units * self.seconds / sum(self.speeds)

    @property
    def name(self) -> str:
        """As a row shows it."""
        calls = f", {1000 * self.latency:g} ms a call" if self.latency else ""
        return f"{self.units} x {1000 * self.seconds:g} ms{calls}"


@dataclass(slots=True)
class Stay:
    """What one consumer did: when it began, had its first unit and ended its last one; and its units."""

    began: float
    first: float
    ended: float
    units: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a work.

    Attributes:
        ratio: makespan over the limit.
        start: seconds from the common start to the first unit that any consumer had.
        shares: units of each consumer.
        requests: calls to the store a unit, of all consumers; None where there is no store.
        faults: units that were trained more than once or never.
    """

    ratio: float
    start: float
    shares: tuple[int, ...]
    requests: float | None
    faults: int


def consume(work: Work, consumer: int, units: Iterable[int]) -> Stay:
    """Train what comes, as consumer number `consumer`, from now on."""
    now = time.monotonic()
    stay = Stay(now, 0.0, now)
    for unit in units:
        got = time.monotonic()
        stay.first = stay.first or got
        time.sleep(max(0.0, got + work.seconds / work.speeds[consumer] - time.monotonic()))
        stay.ended = time.monotonic()
        stay.units.append(unit)
    return stay


def gather(
    work: Work, stays: Sequence[Stay], calls: int | None = None, *, from_first: bool = False
) -> Outcome:
    """What the consumers' stays come to.

    Args:
        work: what there was to do.
        stays: one a consumer, in order.
        calls: to the store, of all consumers.
        from_first: the clock starts at the first unit that any consumer had.
    """
    began = min(stay.began for stay in stays)
    first = min((stay.first for stay in stays if stay.units), default=began)
    makespan = max(stay.ended for stay in stays) - (first if from_first else began)
    trained = Counter(unit for stay in stays for unit in stay.units)
    faults = sum(trained[unit] != 1 for unit in trained.keys() | set(range(work.units)))
    return Outcome(
        makespan / work.limit,
        first - began,
        tuple(len(stay.units) for stay in stays),
        None if calls is None else calls / work.units,
        faults,
    )


def serve(version: str, *ways: Callable[[Work], Outcome]) -> None:
    """Be a side: do each of the works on standard input, and print what came of all as one line of JSON.

    Args:
        version: of the system.
        ways: to use the system, where its user may choose; the one with the best outcome counts.
    """
    found = []
    for told in json.load(sys.stdin):
        work = Work(**{**told, "speeds": tuple(told["speeds"])})
        found.append(asdict(min((_median(way, work) for way in ways), key=_ratio)))
    print(json.dumps({"version": version, "outcomes": found}), flush=True)


def _median(way: Callable[[Work], Outcome], work: Work) -> Outcome:
    turns = sorted((way(work) for _ in range(work.turns)), key=_ratio)
    return next((turn for turn in turns if turn.faults), turns[len(turns) // 2])


def _ratio(outcome: Outcome) -> tuple[bool, float]:
    return not outcome.faults, outcome.ratio


def outcomes(told: dict[str, Any]) -> list[Outcome]:
    """Read what `serve` printed."""
    return [Outcome(**{**each, "shares": tuple(each["shares"])}) for each in told["outcomes"]]
