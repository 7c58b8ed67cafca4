"""One log as a lane: where its bars lie, and how long its process trained and waited. No I/O.

A span's `waited` holds the wait for its first batch too, which was over before the span began. So much of it as fits
between the end of what was trained before and the span's beginning is taken for that one; the rest lies within. Spans
of loader workers overlap: what they cover counts once. All of it is summed up before bars are merged, so that a
coarser picture has the same numbers.

Clocks and logs are not trusted: a span that cannot be is left out and counted, and a learner's beginning before
anything that can be is moved.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace
from itertools import groupby
from math import isfinite
from typing import TYPE_CHECKING

from shardqueue.timeline.chart import Bar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardqueue.ledger import Log
    from shardqueue.records import TrainedSpan

Key = tuple[str, str, int]
"""An attempt: the pass as keys call it, the unit, and the attempt's number."""

ROWS = 16
"""Rows of a lane, at most; of more spans at once some are drawn over others."""
DAY = 86_400.0
LARGEST = 2**53
"""What counts batches or samples, at most: a float still holds it exactly."""
LONGEST_NAME = 200
"""Characters of a name that others wrote, at most."""


def named(text: str) -> str:
    """A name that others wrote, cut where it is out of all proportion."""
    return text if len(text) <= LONGEST_NAME else f"{text[: LONGEST_NAME - 1]}…"


def counted(number: int) -> int:
    """A number that others wrote, as far as anything can be counted."""
    return max(0, min(number, LARGEST))


def shown_pass(name: str) -> str:
    """What a pass is called on the command line: the first one has no name in keys."""
    return named(name) or "e0"


@dataclass(frozen=True, slots=True)
class Clocks:
    """The times that can be: from a day before the run was opened until a day from now, in wall-clock seconds."""

    opened: float
    low: float
    high: float

    @classmethod
    def around(cls, opened: float, now: float) -> Clocks:
        """From when the run was opened, if that can be, until now."""
        high = now + DAY
        known = 0.0 < opened <= high  # not for NaN, either
        return cls(opened if known else now, opened - DAY if known else 0.0, high)

    def can_show(self, moment: float) -> bool:
        """Whether a clock that is somewhere near the others can show this."""
        return self.low <= moment <= self.high  # not for NaN, either


@dataclass(slots=True)
class Extent:
    """When a process was in one pass, in wall-clock seconds, and what it trained of it."""

    start: float
    stop: float
    batches: int = 0


@dataclass(slots=True)
class Part:
    """What a process trained of an attempt: up to which batch, and when, in wall-clock seconds."""

    start: float
    stop: float
    end: int


@dataclass(slots=True)
class Folded:
    """What a log comes to. Times are wall-clock seconds by the process's own clock.

    Attributes:
        since: when it asked for its first batch, as far as that can be.
        seen: when it wrote its log last, None when its clock cannot be believed.
        bars: in the order of their starts, with times as they are.
        rows: how many rows they need.
        busy, waited: seconds.
        unplaced: seconds more that were waited, of which nobody knows between which batches; of elastic steps.
        batches, samples, spans: trained.
        extents: by pass, as keys call it, those that are not shown too.
        parts: of attempts that are not the first one or not whole, and so may have to do with another process.
        odd: spans that cannot be.
        blurred: seconds between bars of one row that are drawn as one, at most.
    """

    since: float
    seen: float | None
    bars: list[Bar] = field(default_factory=list)
    rows: int = 0
    busy: float = 0.0
    waited: float = 0.0
    unplaced: float = 0.0
    batches: int = 0
    samples: int = 0
    spans: int = 0
    extents: dict[str, Extent] = field(default_factory=dict)
    parts: dict[Key, Part] = field(default_factory=dict)
    odd: int = 0
    blurred: float = 0.0


def fold(log: Log, clocks: Clocks, wanted: frozenset[str], most: int) -> Folded:
    """Fold a log.

    Args:
        log: all pages of it.
        clocks: the times that can be.
        wanted: the passes that are meant, as keys call them; all where it is empty.
        most: how many bars it may become.
    """
    page = log.newest
    good = [span for span in log.spans.values() if _can_be(span, clocks)]
    spans = sorted((span for span in good if span.end > span.begin), key=lambda span: span.start)
    seen = page.wall if clocks.can_show(page.wall) else None
    folded = Folded(_since(page.wall, page.totals.elapsed, seen, spans, clocks), seen)
    folded.odd = len(log.spans) - len(good)
    for span in spans:
        extent = folded.extents.setdefault(span.pass_, Extent(span.start, span.stop))
        extent.stop = max(extent.stop, span.stop)
        extent.batches += span.end - span.begin
    folded.parts = _parts(spans)
    if wanted:
        spans = [span for span in spans if span.pass_ in wanted]
    elif isfinite(page.totals.waited):
        placed = sum(max(0.0, span.waited) for span in spans if isfinite(span.waited))
        folded.unplaced = max(0.0, page.totals.waited - placed)
    folded.spans = len(spans)
    folded.batches = sum(span.end - span.begin for span in spans)
    folded.samples = sum(counted(span.samples) for span in spans)
    waits = _measure(folded, spans)
    rows = _rows(spans, min(ROWS, most))
    folded.rows = max(rows, default=-1) + 1
    folded.bars, folded.blurred = _bars(spans, waits, rows, most)
    return folded


def _can_be(span: TrainedSpan, clocks: Clocks) -> bool:
    in_time = clocks.can_show(span.start) and clocks.can_show(span.stop) and span.start <= span.stop
    return in_time and 0 <= span.begin <= span.end <= LARGEST and 0 <= span.attempt <= LARGEST


def _since(
    wall: float, elapsed: float, seen: float | None, spans: Sequence[TrainedSpan], clocks: Clocks
) -> float:
    told = wall - max(0.0, elapsed) if seen is not None and isfinite(elapsed) else None
    if told is None or not clocks.can_show(told):
        told = spans[0].start if spans else clocks.opened if seen is None else seen
    return min(told, spans[0].start) if spans else told


def _parts(spans: Sequence[TrainedSpan]) -> dict[Key, Part]:
    keys = {_key(span) for span in spans if span.attempt or not span.whole}
    found: dict[Key, Part] = {}
    for span in spans:
        key = _key(span)
        if key in keys:
            part = found.setdefault(key, Part(span.start, span.stop, span.end))
            part.stop, part.end = max(part.stop, span.stop), max(part.end, span.end)
    return found


def _key(span: TrainedSpan) -> Key:
    return span.pass_, span.unit, span.attempt


def _measure(folded: Folded, spans: Sequence[TrainedSpan]) -> list[tuple[float, float]]:
    """Add up what is busy and what waited; return of each span the seconds that were waited before it and within."""
    covered = before = inside = 0.0
    edge = folded.since
    waits = []
    for span in spans:
        waited = max(0.0, span.waited) if isfinite(span.waited) else 0.0
        first = min(waited, max(0.0, span.start - edge))
        rest = min(waited - first, span.stop - span.start)
        covered += max(0.0, span.stop - max(edge, span.start))
        before, inside, edge = before + first, inside + rest, max(edge, span.stop)
        waits.append((first, rest))
    inside = min(inside, covered)
    folded.busy, folded.waited = covered - inside, before + inside
    return waits


def _rows(spans: Sequence[TrainedSpan], most: int) -> list[int]:
    """The lowest row that is free, of each span in the order of their starts; `most` rows at most."""
    found: list[int] = []
    ends: list[tuple[float, int]] = []
    free: list[int] = []
    for span in spans:
        while ends and ends[0][0] <= span.start:
            heappush(free, heappop(ends)[1])
        if free:
            row = heappop(free)
            heappush(ends, (span.stop, row))
        elif len(ends) < most:
            row = len(ends)
            heappush(ends, (span.stop, row))
        else:
            stop, row = ends[0]
            heapreplace(ends, (max(stop, span.stop), row))
        found.append(row)
    return found


def _bars(
    spans: Sequence[TrainedSpan], waits: Sequence[tuple[float, float]], rows: Sequence[int], most: int
) -> tuple[list[Bar], float]:
    """The bars, `most` at most, and how long a gap between two that became one may be."""
    if len(spans) <= most:
        return [_bar(spans, waits, rows, [at]) for at in range(len(spans))], 0.0
    origin, end = spans[0].start, max(span.stop for span in spans)
    order = sorted(range(len(spans)), key=lambda at: (rows[at], spans[at].start))
    cells = max(1, most // (max(rows) + 1))
    by_pass = True
    while True:
        cell = (end - origin) / cells
        pieces = [list(piece) for _, piece in groupby(order, key=_place(spans, rows, origin, cell, by_pass))]
        if len(pieces) <= most:
            break
        by_pass = cells > 1
        cells = max(1, cells // 2)
    bars = [_bar(spans, waits, rows, piece) for piece in pieces]
    return sorted(bars, key=lambda bar: bar.start), cell


def _place(
    spans: Sequence[TrainedSpan], rows: Sequence[int], origin: float, cell: float, by_pass: bool
) -> Callable[[int], tuple[int, str, int]]:
    """What those spans have in common that become one bar."""

    def of(at: int) -> tuple[int, str, int]:
        span = spans[at]
        number = int((span.start - origin) / cell) if cell > 0.0 else 0
        return rows[at], span.pass_ if by_pass else "", number

    return of


def _bar(
    spans: Sequence[TrainedSpan],
    waits: Sequence[tuple[float, float]],
    rows: Sequence[int],
    piece: Sequence[int],
) -> Bar:
    first = spans[piece[0]]
    before = waits[piece[0]][0]
    return Bar(
        start=first.start,
        stop=max(spans[at].stop for at in piece),
        waited=sum(sum(waits[at]) for at in piece) - before,
        pass_=shown_pass(first.pass_),
        unit=named(first.unit),
        attempt=first.attempt,
        begin=first.begin,
        end=first.end,
        batches=sum(spans[at].end - spans[at].begin for at in piece),
        samples=sum(counted(spans[at].samples) for at in piece),
        row=rows[piece[0]],
        spans=len(piece),
        before=before,
    )
