"""What is trained of one pass over a plan, whoever trained it.

Units count by *position*, their place among the sorted identifiers of the plan, batches by their place in the unit.
Both come in runs, so it is intervals that are kept: of the units trained whole, and beside them of the batches of the
few units that are trained in part. Nothing says who trained what, or how many learners there were.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Self

from shardqueue.errors import InvalidInputError
from shardqueue.intervals import Intervals

if TYPE_CHECKING:
    from collections.abc import Iterator

_LARGEST = 2**53
_REMEDY = "pass what Session.state_dict() gave, unchanged"


class Trained:
    """Units trained whole, and batches of units trained in part.

    Attributes:
        whole: positions of the units of which nothing is left.
        parts: of other units, by position: the batches that are trained.
        sizes: how many batches such a unit has, where that is known.
        batches: how many are trained.
        before: of these, how many were when the run began.
        over: the pass is over: what is not trained of it was left out.
    """

    batches: int
    before: int

    __slots__ = ("batches", "before", "over", "parts", "sizes", "whole")

    def __init__(self) -> None:
        self.whole: Intervals = Intervals()
        self.parts: dict[int, Intervals] = {}
        self.sizes: dict[int, int] = {}
        self.batches = self.before = 0
        self.over: bool = False

    def add(self, position: int, begin: int, end: int, size: int | None = None) -> None:
        """Batches `[begin, end)` of a unit are trained; it has `size` batches, if that is known."""
        if position in self.whole:
            return
        part = self.parts.setdefault(position, Intervals())
        self.batches += part.add(begin, end)
        if size is not None:
            self.sizes[position] = size
        known = self.sizes.get(position)
        if known is not None and part.gap(0) >= known:
            self._settle(position, position + 1)
        elif not part and known is None:
            del self.parts[position]

    def finish(self, position: int, size: int) -> None:
        """All batches of a unit are trained, `size` in all. What `add` does, quicker where nothing of it was."""
        if position in self.parts:
            self.add(position, 0, size, size)
        elif self.whole.add(position):
            self.batches += size

    def _settle(self, start: int, stop: int) -> None:
        """These units are trained whole."""
        self.whole.add(start, stop)
        for position in [position for position in self.parts if start <= position < stop]:
            del self.parts[position]
            self.sizes.pop(position, None)

    def has(self, position: int, batch: int) -> bool:
        """Whether a batch of a unit is trained."""
        return position in self.whole or batch in self.parts.get(position, ())

    def holds(self, other: Trained) -> bool:
        """Whether all that is trained in `other` is trained here."""
        whole = all(self.whole.gap(start) >= stop for start, stop in other.whole.spans())
        return whole and all(
            position in self.whole or (position in self.parts and self.parts[position].gap(start) >= stop)
            for position, part in other.parts.items()
            for start, stop in part.spans()
        )

    def update(self, other: Trained) -> None:
        """What is trained in `other`, of the same run, is trained here too.

        Where nobody knows the sizes of units, and the two have more in common than what was trained before the run,
        `batches` comes out too large, unless one holds the other.
        """
        apart = self.batches + other.batches - min(self.before, other.before)
        batches = other.batches if other.holds(self) else self.batches if self.holds(other) else apart
        for span in other.whole.spans():
            self._settle(*span)
        for position, part in other.parts.items():
            size = other.sizes.get(position)
            for span in part.spans():
                self.add(position, *span, size)
            if size is not None:
                self.add(position, 0, 0, size)
        self.batches, self.over = batches, self.over or other.over

    def copy(self) -> Trained:
        """Another one, to be added to."""
        return Trained.of(self.as_json(), "")

    def as_json(self) -> dict[str, Any]:
        """As JSON. Intervals are lengths, alternately of what is left and of what is trained, from 0 on."""
        return {
            "whole": _lengths(self.whole),
            "parts": {str(position): _lengths(part) for position, part in sorted(self.parts.items())},
            "sizes": {str(position): size for position, size in sorted(self.sizes.items())},
            "batches": self.batches,
            "before": self.before,
            "over": self.over,
        }

    @classmethod
    def of(cls, data: object, name: str, units: int = _LARGEST) -> Self:
        """Read what `as_json` gave.

        Args:
            data: that.
            name: what to call it in an error.
            units: how many the plan has.

        Raises:
            InvalidInputError: it is something else.
        """
        self = cls()
        if not isinstance(data, dict) or data.keys() != self.as_json().keys():
            raise InvalidInputError(name, data, f"a dict of {', '.join(self.as_json())}", _REMEDY)
        self.whole = _intervals(data["whole"], f"{name}.whole")
        for position, lengths in _items(data["parts"], f"{name}.parts"):
            self.parts[position] = _intervals(lengths, f"{name}.parts")
        for position, size in _items(data["sizes"], f"{name}.sizes"):
            self.sizes[position] = _count(size, f"{name}.sizes")
        self.batches = _count(data["batches"], f"{name}.batches")
        self.before = _count(data["before"], f"{name}.before")
        beyond = max(
            [0, *(position + 1 for position in self.parts), *(stop for _, stop in self.whole.spans())]
        )
        if beyond > units:
            raise InvalidInputError(f"{name}.units", beyond, f"at most {units}, as the plan has", _REMEDY)
        if self.batches and not (self.whole or self.parts):
            raise InvalidInputError(f"{name}.batches", self.batches, "0 where nothing is trained", _REMEDY)
        if not isinstance(data["over"], bool):
            raise InvalidInputError(f"{name}.over", data["over"], "True or False", _REMEDY)
        self.over = data["over"]
        return self


def untrained(trained: Intervals | None, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Batches `[begin, end)` of what is left of a unit, as the whole unit counts them; `trained` is not left."""
    passed = 0
    bounds = [(0, 0), *(trained.spans() if trained is not None else ())]
    for (_, start), (stop, _) in pairwise([*bounds, (_LARGEST, _LARGEST)]):
        first, last = max(begin, passed), min(end, passed + stop - start)
        if first < last:
            yield start + first - passed, start + last - passed
        passed += stop - start


def _lengths(intervals: Intervals) -> list[int]:
    bounds = [0, *(bound for span in intervals.spans() for bound in span)]
    return [stop - start for start, stop in pairwise(bounds)]


def _intervals(lengths: object, name: str) -> Intervals:
    if not isinstance(lengths, list) or len(lengths) % 2:
        raise InvalidInputError(name, lengths, "a list of pairs of lengths", _REMEDY)
    bounds = list(accumulate(_count(length, name) for length in lengths))
    return Intervals(zip(bounds[::2], bounds[1::2], strict=True))


def _items(data: object, name: str) -> Iterator[tuple[int, object]]:
    if not isinstance(data, dict):
        raise InvalidInputError(name, data, "a dict by position", _REMEDY)
    for position, value in data.items():
        if not isinstance(position, str) or not position.isascii() or not position.isdecimal():
            raise InvalidInputError(name, position, "a dict by position", _REMEDY)
        yield int(position), value


def _count(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _LARGEST:
        raise InvalidInputError(name, value, f"a whole number from 0 to {_LARGEST}", _REMEDY)
    return value
