"""What is left of a plan: the plan of a run that goes on from a state.

Units trained whole are gone, and positions count what is left. Of a unit trained in part the batches that are left
count from 0; `skipped` tells its reader which ones to pass over. A lazy plan stays lazy: memory and time go by the
number of intervals in the state, never by units. All that tells one plan from another is the original plan's.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from shardqueue.intervals import Intervals
from shardqueue.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardqueue.trained import Trained


def remaining(plan: Plan, trained: Trained | None) -> Plan:
    """What is left of `plan`; the plan itself where nothing is trained."""
    if trained is None or not (trained.whole or trained.parts or trained.over):
        return plan
    return _Remaining(plan, trained)


class _Remaining(Plan):
    """A plan without what is trained of it."""

    __slots__ = ("_origin", "_trained")

    def __init__(self, origin: Plan, trained: Trained) -> None:
        self._origin, self._trained = origin, trained
        self._units, self._found = origin.units, {}
        self._index = _Left(origin, trained)

    @property
    def origin(self) -> Plan:
        return self._origin

    @property
    def arguments(self) -> dict[str, Any] | None:
        return self._origin.arguments

    def skipped(self, position: int) -> Intervals | None:
        return self._trained.parts.get(self._origin.position(self.identifier(position)))

    def fingerprint(self) -> str:
        return self._origin.fingerprint()

    def signature(self) -> dict[str, Any]:
        return self._origin.signature()

    def matches(self, signature: Mapping[str, Any]) -> bool:
        return self._origin.matches(signature)

    def describe(self) -> str:
        return f"{len(self)} of {self._origin.describe()}"


class _Left:
    """What a plan looks up by position, for what is left of another one."""

    __slots__ = ("_before", "_cut_at", "_cuts", "_order", "_origin", "_parts", "_spans", "_starts")

    def __init__(self, origin: Plan, trained: Trained) -> None:
        self._origin, self._parts = origin, trained.parts
        count = len(origin)
        gone = Intervals([(0, count)]) if trained.over else Intervals(trained.whole.spans())
        for position, part in trained.parts.items():
            batches = origin.batches(position)
            if batches is not None and part.gap(0) >= batches:
                gone.add(position)
        gaps = list(gone.gaps(0, count))
        self._starts = array("q", [start for start, _ in gaps])
        self._before = array("q", accumulate((stop - start for start, stop in gaps), initial=0))
        self._order: array[int] | None = None
        self._spans: array[float] | None = None
        if origin.natural:
            cuts = [(start, origin.span(stop) - origin.span(start)) for start, stop in gone.spans()]
            cuts += [(at, origin.weight(at) - self._weight(at)) for at in self._parts if at not in gone]
            cuts.sort()
            self._cut_at = array("q", [at for at, _ in cuts])
            self._cuts = array("d", accumulate((weight for _, weight in cuts), initial=0.0))

    @property
    def natural(self) -> bool:
        return self._origin.natural

    @property
    def steps(self) -> float:
        return self.span(len(self))

    @property
    def total(self) -> int | None:
        if self._origin.total is None:
            return None
        if self._origin.arguments is not None and len(self):  # all of as many lanes
            lanes = (self._origin.batches(0) or 0) / self._origin.weight(0)
            return round(self.steps * lanes)
        return sum(self.batches(position) or 0 for position in range(len(self)))

    def place(self, position: int) -> int:
        """The position in the original plan."""
        if not 0 <= position < len(self):
            raise IndexError(f"position {position} is outside 0 .. {len(self) - 1}")
        gap = bisect_right(self._before, position) - 1
        return self._starts[gap] + position - self._before[gap]

    def identifier(self, position: int) -> str:
        return self._origin.identifier(self.place(position))

    def position(self, identifier: Any) -> int:
        position = self._rank(self._origin.position(identifier))
        if position is None:
            raise KeyError(identifier)
        return position

    def _rank(self, place: int) -> int | None:
        """The position of what is at `place` in the original plan; None if nothing of it is left."""
        gap = bisect_right(self._starts, place) - 1
        if gap < 0:
            return None
        position = self._before[gap] + place - self._starts[gap]
        return position if position < self._before[gap + 1] else None

    def order(self, place: int) -> int:
        if not 0 <= place < len(self):
            raise IndexError(f"place {place} is outside 0 .. {len(self) - 1}")
        if self.natural:
            return place
        if self._order is None:
            own = (self._rank(self._origin.order(place)) for place in range(len(self._origin)))
            self._order = array("q", (position for position in own if position is not None))
        return self._order[place]

    def value(self, position: int) -> object:
        return self._origin.value(self.place(position))

    def batches(self, position: int) -> int | None:
        place = self.place(position)
        batches, part = self._origin.batches(place), self._parts.get(place)
        return batches if batches is None or part is None else batches - len(part)

    def weight(self, position: int) -> float:
        return self._weight(self.place(position))

    def _weight(self, place: int) -> float:
        weight, batches = self._origin.weight(place), self._origin.batches(place)
        part = self._parts.get(place)
        return weight if part is None or batches is None else weight * (batches - len(part)) / batches

    def span(self, place: int) -> float:
        if not 0 <= place <= len(self):
            raise IndexError(f"place {place} is outside 0 .. {len(self)}")
        if self.natural:
            at = self.place(place) if place < len(self) else len(self._origin)
            return max(0.0, self._origin.span(at) - self._cuts[bisect_left(self._cut_at, at)])
        if self._spans is None:
            weights = (self.weight(self.order(before)) for before in range(len(self)))
            self._spans = array("d", accumulate(weights, initial=0.0))
        return self._spans[place]

    def __len__(self) -> int:
        return self._before[-1]
