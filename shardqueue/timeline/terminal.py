"""A chart in a terminal: a row of characters a learner, its shares of the time beside it, and below what went wrong.

A cell is the darker the more of its time was trained; waiting for data leaves it nearly as light as idling. Rows are
as wide as the console; where there are many learners, those who stood idle most and least are shown. Where the
encoding has no blocks, all is ASCII. Whatever others wrote is made visible first.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from shardqueue.simulate.show import seconds_shown
from shardqueue.terminal import visible
from shardqueue.timeline import strips
from shardqueue.timeline.words import names, rate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shardqueue.timeline.chart import Bar, Chart, Handover, Lane, Tail
    from shardqueue.timeline.strips import Scale

PIPED = 100
"""Columns where there is no terminal."""
FEWEST_CELLS, ENOUGH_CELLS = 10, 20
KEPT = 2
"""Columns of numbers that the narrowest terminal has room for."""
WIDEST_NAME = 24
MANY, EACH = 32, 12
"""Of more lanes than `MANY`, `EACH` of the idlest and of the busiest are shown."""
LINES = 10
"""Lines of one kind, at most."""
REASONS = {
    "early": "in leaving early",
    "error": "by an error, an interrupt or SIGTERM",
    "surplus": "as surplus",
}
WAITING = 0.25
"""How dark a cell is in which a learner waited for data all the time: the first shade after idle."""
_LIGHT = 0.005
"""A share of less than this is not worth a column."""


@dataclass(frozen=True, slots=True)
class Signs:
    """What is drawn beside the shades: a unit taken over, a learner that was gone, and what was cut out of a name."""

    taken: str
    gone: str
    cut: str


SIGNS, ASCII_SIGNS = Signs("↪", "✗", "…"), Signs(">", "x", "~")


def new_console(width: int | None = None) -> Console:
    """A console of so many columns: the terminal's own, or `PIPED` in a pipe."""
    console = Console(width=width)
    return console if width or console.is_terminal else Console(width=PIPED)


def show(console: Console, chart: Chart, everybody: bool = False) -> None:
    """Print the chart; `everybody`: every learner and every unit that was taken over, however many there are."""
    for line in view(chart, console.width, console.encoding, everybody):
        console.print(line, no_wrap=True, overflow="ignore", crop=False, soft_wrap=True)


def view(chart: Chart, width: int, encoding: str, everybody: bool = False) -> Iterator[Text]:
    """The lines of which it consists."""
    yield Text(visible(_headline(chart)), style="bold")
    if chart.lanes:
        yield from _Rows(chart, width, encoding).lines(everybody)
    yield from (Text(visible(line)) for line in sentences(chart, everybody))
    yield from (Text(visible(f"! {note}"), style="yellow") for note in chart.notes)


def sentences(chart: Chart, everybody: bool = False) -> Iterator[str]:
    """What the chart comes to."""
    there = sum(lane.there for lane in chart.lanes)
    if there > 0.0:
        idle, waited = (sum(getattr(lane, what) for lane in chart.lanes) for what in ("idle", "waited"))
        line = (
            f"idle: {seconds_shown(idle)} of the {seconds_shown(there)} of all learners ({idle / there:.0%})"
        )
        yield line + (
            f"; {seconds_shown(waited)} more they waited for data" if waited / there > _LIGHT else ""
        )
    longest = sorted(chart.tails, key=lambda tail: tail.idle, reverse=True)[: None if everybody else LINES]
    yield from (_of_tail(tail) for tail in chart.tails if tail in longest)
    reclaimed = [one for one in chart.handovers if one.reclaimed]
    labels = names(chart.lanes)
    for one in reclaimed if everybody else reclaimed[:LINES]:
        yield handed_on(one, labels, several_passes=len(chart.passes) > 1)
    if len(reclaimed) > LINES and not everybody:
        yield f"and {len(reclaimed) - LINES:,} more that were taken over; --all names them"
    why = Counter(one.why for one in chart.handovers if not one.reclaimed)
    if why:
        reasons = ((count, REASONS.get(reason, reason)) for reason, count in why.most_common(LINES))
        yield "given back: " + ", ".join(f"{count:,} {reason}" for count, reason in reasons)


def handed_on(one: Handover, labels: Sequence[str], several_passes: bool = False) -> str:
    """Who had a unit, why no longer, and who went on with it."""
    unit = f"{one.pass_} {one.unit}" if several_passes else one.unit
    owner = "?" if one.owner is None else labels[one.owner]
    taker = "nobody yet" if one.taker is None else labels[one.taker]
    again = f"; {one.again:,} batches from there on were trained twice" if one.again else ""
    return f"{unit}: {owner} ({one.why}) -> {taker} at batch {one.begin:,}{again}"


def _headline(chart: Chart) -> str:
    batches = sum(lane.batches for lane in chart.lanes)
    learners = len({(lane.learner, lane.instance) for lane in chart.lanes})
    passes = ", ".join(chart.passes[:LINES]) + (", ..." if len(chart.passes) > LINES else "")
    what = f"{batches:,} batches of {passes}" if passes else "nothing trained yet"
    people = f"{learners:,} learner{'' if learners == 1 else 's'}"
    return f"run {chart.run} at {chart.url}: {people}, {seconds_shown(chart.seconds)}, {what}"


def _of_tail(tail: Tail) -> str:
    seconds, idle = seconds_shown(tail.stop - tail.start), seconds_shown(tail.idle)
    return (
        f"tail of {tail.pass_}: {seconds} from the first learner's last batch to the last one's; {idle} idle"
    )


class _Rows:
    """Rows over one axis, with columns of numbers beside them."""

    def __init__(self, chart: Chart, width: int, encoding: str) -> None:
        self._chart, self._glyphs = chart, strips.glyphs(encoding)
        self._signs = SIGNS if _has(encoding, SIGNS) else ASCII_SIGNS
        self._names = [visible(name) for name in names(chart.lanes)]
        longest = max(map(cell_len, self._names))
        columns = self._columns_of(chart)
        while True:
            numbers = [[cell(lane) for _, cell in columns] for lane in chart.lanes]
            table = [[title for title, _ in columns], *numbers]
            widths = [max(map(len, column)) for column in zip(*table, strict=True)]
            beside = 3 + sum(2 + one for one in widths)
            if len(columns) <= KEPT or width - beside - min(longest, FEWEST_CELLS) >= ENOUGH_CELLS:
                break
            columns.pop(1 if len(columns) == KEPT + 1 else -1)  # busy and idle stay
        self._heads, *self._numbers = (
            "".join(f"  {n:>{w}}" for n, w in zip(row, widths, strict=True)) for row in table
        )
        self._width = width
        self._name = min(longest, WIDEST_NAME, max(FEWEST_CELLS, (width - beside) // 2))
        self._scale = strips.Scale(chart.seconds or 1.0, max(FEWEST_CELLS, width - beside - self._name))
        self._tail = chart.tails[-1] if chart.tails else None

    def lines(self, everybody: bool) -> Iterator[Text]:
        yield from (Text(f" {line}", style="dim") for line in self._legend())
        yield Text(" " * (self._name + self._scale.cells + 3) + self._heads, style="dim")
        lanes = range(len(self._chart.lanes))
        if everybody or len(lanes) <= MANY:
            yield from map(self._line, lanes)
        else:
            order = sorted(lanes, key=lambda at: self._chart.lanes[at].busy)
            yield from map(self._line, order[:EACH])
            least, most = (seconds_shown(self._chart.lanes[order[at]].busy) for at in (EACH, -EACH - 1))
            more = f"{len(order) - 2 * EACH:,} more, busy for {least} to {most}; --all shows them"
            yield Text(f" {more}", style="italic")
            yield from map(self._line, order[-EACH:])
        yield Text(" " * (self._name + 2) + self._axis())

    def _legend(self) -> list[str]:
        shades, lanes = self._glyphs.shades, self._chart.lanes
        parts = [f"{shades[-1]} busy", f"{shades[1]} waits", f"{shades[0]} idle"]
        parts += (
            [f"{self._signs.taken} taken over"] if any(one.reclaimed for one in self._chart.handovers) else []
        )
        lost = {"gone" if lane.gone else "failed" for lane in lanes if lane.gone or lane.left == "error"}
        parts += [f"{self._signs.gone} {' or '.join(sorted(lost, reverse=True))}"] if lost else []
        lines = [parts[0]]
        for part in parts[1:]:
            if 1 + len(lines[-1]) + 2 + len(part) <= self._width:
                lines[-1] += f"  {part}"
            else:
                lines.append(part)
        return lines

    def _columns_of(self, chart: Chart) -> list[tuple[str, Callable[[Lane], str]]]:
        samples = any(lane.samples for lane in chart.lanes)
        columns: list[tuple[str, Callable[[Lane], str]]] = [
            ("busy", lambda lane: _share(lane.busy, lane)),
            ("waits", lambda lane: _share(lane.waited, lane)),
            ("idle", lambda lane: _share(lane.idle, lane)),
        ]
        if any(lane.away > _LIGHT * chart.seconds for lane in chart.lanes):
            columns.append(("there", lambda lane: seconds_shown(lane.there)))
        columns.append(("batches", lambda lane: f"{lane.batches:,}"))
        if samples:
            columns.append(("samples/s", lambda lane: rate(lane.samples, lane.busy)))
        else:
            columns.append(("batches/s", lambda lane: rate(lane.batches, lane.busy)))
        return columns

    def _line(self, at: int) -> Text:
        text = Text(f" {_fitted(self._names[at], self._name, self._signs.cut)} ")
        row = self._marked(
            "".join(map(self._glyphs.shade, shades(self._chart.lanes[at].bars, self._scale))), at
        )
        if self._tail is not None:
            row = strips.crossed(row, self._scale.border(self._tail.start), self._glyphs.line)
        for character in row.ljust(self._scale.cells + 1):
            text.append(character, style=self._style(character))
        return text.append(self._numbers[at])

    def _style(self, character: str) -> str:
        if character == self._signs.gone:
            return "bold red"
        if character == self._signs.taken:
            return "bold yellow"
        return (
            "dim"
            if character == self._glyphs.shades[0]
            else "bold"
            if character == self._glyphs.line
            else "green"
        )

    def _marked(self, row: str, at: int) -> str:
        lane = self._chart.lanes[at]
        begin = self._cell(lane.since)
        end = self._scale.cells if lane.parted is None else self._cell(lane.parted) + 1
        cells = list(f"{' ' * begin}{row[begin:end]}".ljust(self._scale.cells))
        for one in self._chart.handovers:
            if one.reclaimed and one.taker == at and one.at is not None:
                cells[self._cell(one.at)] = self._signs.taken
        if lane.parted is not None and (lane.gone or lane.left == "error"):
            cells[self._cell(lane.parted)] = self._signs.gone
        return "".join(cells)

    def _cell(self, moment: float) -> int:
        return max(0, min(self._scale.cells - 1, int(moment / self._scale.cell)))

    def _axis(self) -> str:
        end = strips.Label(self._scale.cells, seconds_shown(self._chart.seconds), "")
        marks = [strips.Label(0, "0", "0")]
        if self._tail is not None:
            title = visible(f"tail of {self._tail.pass_}")
            corners, border = self._glyphs.corners, self._scale.border(self._tail.start)
            marks.append(strips.Label(border, f"{title} {corners[0]}", f"{corners[1]} {title}"))
        return strips.axis([*marks, end], self._scale.cells + 1)


def shades(bars: Sequence[Bar], scale: Scale) -> list[float]:
    """How dark each cell is: the share of it that was trained, and a part of that which was waited."""
    dark = strips.busy(_union(bars), scale)
    for bar in bars:
        _add(dark, scale, bar.start - bar.before, bar.start, WAITING)
        length = bar.stop - bar.start
        if bar.waited > 0.0 and length > 0.0:
            _add(dark, scale, bar.start, bar.stop, (WAITING - 1.0) * min(1.0, bar.waited / length))
    return [min(1.0, max(0.0, share)) for share in dark]


def _add(dark: list[float], scale: Scale, start: float, stop: float, shade: float) -> None:
    """Make the cells of a span darker, or lighter, by as much as it covers of them."""
    if stop > start:
        for cell in range(max(0, int(start / scale.cell)), scale.cells_until(stop)):
            low, high = cell * scale.cell, (cell + 1) * scale.cell
            dark[cell] += shade * max(0.0, min(stop, high) - max(start, low)) / scale.cell


def _union(bars: Sequence[Bar]) -> Iterator[tuple[float, float]]:
    """What bars cover, in the order of their starts, as spans that do not overlap."""
    start = stop = 0.0
    for bar in bars:
        if bar.start > stop:
            if stop > start:
                yield start, stop
            start = bar.start
        stop = max(stop, bar.stop)
    if stop > start:
        yield start, stop


def _fitted(name: str, width: int, cut: str) -> str:
    """A name in so many columns: where it is too long, its beginning and its end, by which others differ from it."""
    if cell_len(name) <= width:
        return set_cell_size(name, width)
    end = name[-1:]
    while cell_len(end) < width // 2 - 1:
        end = name[-len(end) - 1 :]
    return set_cell_size(name, width - 1 - cell_len(end)) + cut + end


def _share(part: float, lane: Lane) -> str:
    """A part of the time in which a learner was there."""
    return f"{part / lane.there:.0%}" if lane.there else "-"


def _has(encoding: str, signs: Signs) -> bool:
    try:
        f"{signs.taken}{signs.gone}{signs.cut}".encode(encoding)
    except (UnicodeError, LookupError):
        return False
    return True
