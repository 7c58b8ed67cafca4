"""Sets of whole numbers held as disjoint intervals.

Claimed positions and trained batches come in runs, so a set costs memory by its number of runs, not of
members. Intervals are half-open, `[start, stop)`, sorted, and never touch one another.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class Intervals:
    """A mutable set of ints as sorted, disjoint, non-touching half-open intervals."""

    __slots__ = ("_size", "_starts", "_stops")

    def __init__(self, spans: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._size = 0
        for start, stop in spans:
            self.add(start, stop)

    def __len__(self) -> int:
        """How many members."""
        return self._size

    def __contains__(self, member: int) -> bool:
        at = bisect_right(self._starts, member) - 1
        return at >= 0 and member < self._stops[at]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Intervals):
            return NotImplemented
        return self._starts == other._starts and self._stops == other._stops

    __hash__: ClassVar[None] = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        return f"Intervals({list(self.spans())})"

    def spans(self) -> Iterator[tuple[int, int]]:
        """The intervals in order."""
        return iter(zip(self._starts, self._stops, strict=True))

    def add(self, start: int, stop: int | None = None) -> int:
        """Add `[start, stop)`, or the single member `start`; return how many members were new."""
        stop = start + 1 if stop is None else stop
        if start >= stop:
            return 0
        first = bisect_left(self._stops, start)
        last = bisect_right(self._starts, stop)
        before = sum(self._stops[i] - self._starts[i] for i in range(first, last))
        if first < last:
            start = min(start, self._starts[first])
            stop = max(stop, self._stops[last - 1])
        self._starts[first:last] = [start]
        self._stops[first:last] = [stop]
        new = stop - start - before
        self._size += new
        return new

    def gap(self, start: int) -> int:
        """Return the smallest number at or after `start` that is not a member."""
        at = bisect_right(self._starts, start) - 1
        if at >= 0 and start < self._stops[at]:
            return self._stops[at]
        return start

    def gaps(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The intervals of `[start, stop)` that hold no member, in order."""
        while start < stop:
            start = self.gap(start)
            if start >= stop:
                return
            at = bisect_right(self._starts, start)
            end = min(stop, self._starts[at]) if at < len(self._starts) else stop
            yield start, end
            start = end
