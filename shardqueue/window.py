"""Which units are known to be claimed, and which of the others this learner would rather take.

Learners work in a window of the plan that moves forward as its first units become claimed, which bounds how far
they drift apart. Inside it, each learner has a *home*, a share of the positions in proportion to its speed as far
as that is known: claimed from the near end without asking anybody. What is left of others' homes is stolen from
the far end, at random, so that owner and thief meet only once. All of this is preference. A wrong number of
learners, a stale listing or another learner's own order costs a lost race, never correctness.

A position is a unit's place among the sorted identifiers, so that learners with orders of their own agree on it.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache
from math import gcd
from typing import TYPE_CHECKING

from shardqueue.intervals import Intervals

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from random import Random

    from shardqueue.plan import Plan


@lru_cache(maxsize=64)
def share_out(weights: tuple[int, ...]) -> list[int]:
    """Return a cycle of positions, each given to one learner, as often as its weight says and evenly spread."""
    turns = [
        ((turn + 0.5) / weight, learner) for learner, weight in enumerate(weights) for turn in range(weight)
    ]
    return [learner for _, learner in sorted(turns)]


def home_weights(grades: Sequence[int | None]) -> list[int]:
    """Return each learner's share of the positions, as small whole numbers in proportion to speed.

    `grades` are `Pace.grade`s; who has none counts as the slowest known. One half octave makes a
    difference; beyond 64 times the slowest, a learner is taken to be no faster.
    """
    known = [grade for grade in grades if grade is not None]
    if not known:
        return [1] * len(grades)
    slowest = min(known)
    weights = [
        round(4 * 2.0 ** (min(12, (slowest if grade is None else grade) - slowest) / 2)) for grade in grades
    ]
    common = gcd(*weights)
    return [weight // common for weight in weights]


DEPTH = 16
"""Window depth, in units a learner (8 costs more requests, see docs/design/002-claiming.md)."""
LEAST_DEPTH = 4
"""Window depth at least, however few units the plan has a learner."""
LEAST_UNEVEN = 2
"""The same where units differ in size: a deep window leaves the large ones behind for the end."""
DRIFT = 0.05
"""Share of the plan's steps a window may span."""


class Window:
    """What one learner knows of the claims on a plan.

    Attributes:
        known: positions known to be claimed, or being asked for by this learner.
        listed: positions `[0]..[1]-1` were listed: those not in `known` are free as far as the listing knew.
    """

    def __init__(self, plan: Plan, random: Random) -> None:
        self.plan = plan
        self._count = len(plan)
        self.known = Intervals()
        self.listed = (0, 0)
        self.learners = 1
        self._home, self._cycle = [0], 1
        self._parts = 1
        self.careful = False
        self._random = random
        self._base = 0
        self._front = self._stop = 0
        self._stale = True
        self._ahead = self._since = 0
        self._others = 0.0

    @property
    def share(self) -> float:
        """This learner's home as a share of all positions."""
        return len(self._home) / self._cycle

    def reserve(self, units: float) -> None:
        """This learner claims so many units ahead: the window must hold that of everybody, by the shares."""
        ahead = int(units / self.share)
        self._stale = self._stale or ahead != self._ahead
        self._ahead = ahead

    @property
    def left(self) -> int:
        """Units not known to be claimed."""
        return self._count - len(self.known)

    @property
    def likely_left(self) -> float:
        """Units not claimed, if since the last listing the others claimed as their homes say."""
        return self._count - len(self.known) - self._since * self._others

    @property
    def front(self) -> int:
        """The first place, in the plan's own order, that is not known to be claimed."""
        self._slide()
        return self._front

    @property
    def stop(self) -> int:
        """The place behind the window's last."""
        self._slide()
        return self._stop

    @property
    def uneven(self) -> bool:
        """Whether units ahead differ in size."""
        self._slide()
        return self._uneven_from(self._front)

    def meet(self, weights: list[int], me: int, part: int = 0, parts: int = 1) -> None:
        """The run has learners of these weights; this one is number `me` among them.

        Its home is shared out once more, in turns: this is part `part` of `parts`.
        """
        table = share_out(tuple(weights)) * parts
        self.learners, self._cycle = len(weights), len(table)
        home = [place for place, owner in enumerate(table) if owner == me]
        self._home = home[part::parts]
        self._others = 1.0 / self.share - 1.0
        self._parts = parts
        self._stale = True

    def start_at(self, place: int) -> None:
        """Presume everything before `place` claimed; it is looked at again before the end."""
        self._base = place
        self._stale = True

    def claimed(self, position: int, stop: int | None = None) -> None:
        """The unit at `position`, or those at `[position, stop)`, are claimed by somebody."""
        self._since += self.known.add(position, stop)
        self._stale = True

    def saw(self, positions: Iterable[int], start: int, stop: int) -> None:
        """A listing of `[start, stop)` showed that of these only `positions`, ascending, are claimed."""
        begin = end = -1
        for position in positions:
            if position != end:
                self.known.add(begin, end)
                begin = position
            end = position + 1
        self.known.add(begin, end)
        self.listed = (start, stop)
        self._stale, self._since = True, 0

    def home(self, presuming: bool = False) -> int | None:
        """The nearest position of this learner's home in the window that is not known to be claimed.

        `presuming`: in the window as it is if, since the last listing, the others claimed as their homes say.
        """
        self._slide()
        known, listed = self.known, self.listed
        start, stop = self._presumed() if presuming else (self._front, self._stop)
        for position in self._homes(start, stop):
            if position not in known and (not self.careful or listed[0] <= position < listed[1]):
                return position
        return None

    def steal(self, unlisted: bool = False) -> int | None:
        """A free position of the window's far half, at random; `unlisted`: also where no listing has looked."""
        free = self._free(unlisted)
        return self._random.choice(free[len(free) // 2 :]) if free else None

    def largest(self) -> int | None:
        """A free position in the window with the most batches, at random among equals."""
        free = self._free(False)
        if not free:
            return None
        weights = [self.plan.weight(position) for position in free]
        most = max(weights)
        return self._random.choice([p for p, weight in zip(free, weights, strict=True) if weight == most])

    def unknown_from(self) -> int:
        """The position from which a listing forward tells most."""
        self._slide()
        if self.plan.natural:
            return self._front
        window = map(self.plan.order, range(self._front, self._stop))
        return min((p for p in window if p not in self.known), default=0)

    def _presumed(self) -> tuple[int, int]:
        """Where this learner's home is to be looked through if all claimed in proportion since the last listing."""
        front = min(self._count, self._front + int(self._since * (1.0 + self._others)))
        return max(self._front, front - DEPTH * self.learners * self._parts), self._window_stop(front)

    def _homes(self, start: int, stop: int) -> Iterator[int]:
        home, cycle = self._home, self._cycle
        if not self.plan.natural:
            own, places = set(home), map(self.plan.order, range(start, stop))
            yield from (position for position in places if position % cycle in own)
            return
        turn = bisect_left(home, start % cycle)
        base = start - start % cycle
        while True:
            if turn == len(home):
                turn, base = 0, base + cycle
            if base + home[turn] >= stop:
                return
            yield base + home[turn]
            turn += 1

    def _free(self, unlisted: bool) -> list[int]:
        self._slide()
        start, stop = (0, self._count) if unlisted else self.listed
        if self.plan.natural:
            gaps = self.known.gaps(max(start, self._front), min(stop, self._stop))
            return [position for gap in gaps for position in range(*gap)]
        places = map(self.plan.order, range(self._front, self._stop))
        return [p for p in places if start <= p < stop and p not in self.known]

    def _slide(self) -> None:
        if not self._stale:
            return
        self._stale = False
        self._front = self._first_unknown(self._base)
        if self._front >= self._count and self._base:
            # The end is reached: what was only presumed claimed must be looked at.
            self._base, self.careful, self.listed = 0, True, (0, 0)
            self._front = self._first_unknown(0)
        self._stop = self._window_stop(self._front)

    def _first_unknown(self, base: int) -> int:
        if self.plan.natural:
            return min(self.known.gap(base), self._count)
        place = max(base, self._front)
        while place < self._count and self.plan.order(place) in self.known:
            place += 1
        return place

    def _uneven_from(self, front: int) -> bool:
        weight, order, count = self.plan.weight, self.plan.order, self._count
        return front < count and weight(order(front)) != weight(order(count - 1))

    def _window_stop(self, front: int) -> int:
        span, count = self.plan.span, self._count
        claimers = self.learners * self._parts
        least = LEAST_UNEVEN if self._uneven_from(front) else LEAST_DEPTH
        low = min(count, front + max(least * claimers, min(self._ahead, DEPTH * claimers)))
        high = min(count, front + DEPTH * claimers)
        bound = span(front) + DRIFT * self.plan.steps if front < count else 0.0
        if span(high) <= bound:
            return high
        # The last stop is near the new one.
        near = max(low, min(high, self._stop))
        step = 1
        while near < high and span(near) <= bound:
            low, near, step = near, min(high, near + step), 2 * step
        high = near
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if span(middle) <= bound else (low, middle - 1)
        return low
