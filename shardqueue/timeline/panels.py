"""What the page shows without a script: title, totals, notes, and tables of the lanes and of what was handed on.

Elements are built as elements and written by `ElementTree`, never put together from strings.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING
from xml.etree import ElementTree as Markup

from shardqueue.timeline.words import count, duration, labels, name, rate, share

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shardqueue.timeline.chart import Chart, Handover, Lane

LISTED_HANDOVERS = 500
"""Rows in the table of units that were handed on; the lanes show all of them."""
SHARES = ("busy", "waiting", "idle")
RATES = ("batches/s when busy", "samples/s when busy")


def markup(elements: Sequence[Markup.Element]) -> str:
    """Return elements as HTML."""
    return "\n".join(Markup.tostring(element, encoding="unicode", method="html") for element in elements)


def title(chart: Chart) -> list[Markup.Element]:
    """Return the title of the window."""
    return [_element("title", f"Run {name(chart.run)}: timeline")]


def header(chart: Chart) -> list[Markup.Element]:
    """Return what run it is, where it lies, when it began and how long it is."""
    begun = datetime.fromtimestamp(chart.origin, UTC)
    when = _element("time", f"{begun:%Y-%m-%d %H:%M:%S} UTC", id="when", datetime=begun.isoformat())
    where = _element("code", name(chart.url))
    return [
        _element("h1", f"Run {name(chart.run)}"),
        _element("p", where, " ", when, " ", _element("span", duration(chart.seconds)), kind="where"),
    ]


def totals(chart: Chart) -> list[Markup.Element]:
    """Return what the lanes come to; shares are of the time in which the learners were there."""
    lanes = chart.lanes
    if not lanes:
        return [_element("p", "No learner has recorded anything here yet.", kind="empty")]
    seconds = _seconds(lanes)
    batches, samples = sum(lane.batches for lane in lanes), sum(lane.samples for lane in lanes)
    learners = len({(lane.learner, lane.instance) for lane in lanes})
    reclaimed = sum(handover.reclaimed for handover in chart.handovers)
    legend = [
        _tile(kind, share(part, sum(seconds)), "", kind) for kind, part in zip(SHARES, seconds, strict=True)
    ]
    tiles = [
        _tile("learners", count(learners), f"{count(len(lanes))} processes" if len(lanes) > learners else ""),
        _tile("batches", count(batches), f"{rate(batches, chart.seconds)} a second"),
    ]
    if samples:
        tiles.append(_tile("samples a second", rate(samples, chart.seconds), f"{count(samples)} in all"))
    tiles += _tail(chart)
    tiles.append(
        _tile("units taken over", count(reclaimed), f"{count(len(chart.handovers))} handed on in all")
    )
    return [
        _element("div", _element("dl", *legend), _strip(seconds), kind="shares"),
        _element("dl", *tiles, kind="tiles"),
    ]


def _tail(chart: Chart) -> list[Markup.Element]:
    if not chart.tails:
        return []
    tails, idle = sum(t.stop - t.start for t in chart.tails), sum(t.idle for t in chart.tails)
    passes = f" of {len(chart.tails)} passes" if len(chart.tails) > 1 else ""
    return [_tile("tail", duration(tails), f"{duration(idle)} idle in the end{passes}")]


def _tile(title: str, value: str, detail: str, kind: str = "tile") -> Markup.Element:
    more = [_element("dd", detail, kind="detail")] if detail else []
    return _element("div", _element("dt", title), _element("dd", value), *more, kind=kind)


def _strip(seconds: tuple[float, float, float]) -> Markup.Element:
    """Busy, waiting and idle as parts of one line; by attributes, since the policy allows no inline style."""
    strip = _element("svg", viewBox="0 0 100 1", preserveAspectRatio="none", kind="strip")
    strip.set("aria-hidden", "true")
    left, whole = 0.0, sum(seconds) or 1.0
    for kind, part in zip(SHARES, seconds, strict=True):
        width = 100 * part / whole
        strip.append(_element("rect", x=f"{left:.3f}", width=f"{width:.3f}", height="1", kind=kind))
        left += width
    return strip


def _seconds(lanes: Iterable[Lane]) -> tuple[float, float, float]:
    """Busy, waiting and idle, of all these lanes together."""
    parts = [(lane.busy, lane.waited, lane.idle) for lane in lanes]
    return sum(p[0] for p in parts), sum(p[1] for p in parts), sum(p[2] for p in parts)


def notes(chart: Chart) -> list[Markup.Element]:
    """Return what a reader should know before believing it."""
    if not chart.notes:
        return []
    return [_element("ul", *(_element("li", name(note)) for note in chart.notes), kind="notes")]


def tables(chart: Chart) -> list[Markup.Element]:
    """Return the lanes and the units that were handed on as tables, folded up."""
    found, called = [], labels(chart)
    if chart.lanes:
        columns = ["learner", "host", "pid", *SHARES, "batches", *RATES, "left"]
        rows = [_row(lane, label) for lane, label in zip(chart.lanes, called, strict=True)]
        found.append(_table("The lanes in numbers", columns, rows))
    if chart.handovers:
        columns = ["pass", "unit", "attempt", "from", "to", "next batch", "why"]
        rows = [_handed(handover, called) for handover in chart.handovers[:LISTED_HANDOVERS]]
        first = f", the first {LISTED_HANDOVERS}" if len(rows) < len(chart.handovers) else ""
        found.append(_table(f"Units handed on: {count(len(chart.handovers))}{first}", columns, rows))
    return found


def _row(lane: Lane, label: str) -> list[str]:
    parts = _seconds([lane])
    shares = (share(part, lane.there) for part in parts)
    rates = (rate(lane.batches, lane.busy), rate(lane.samples, lane.busy) if lane.samples else "")
    left = "gone" if lane.gone else lane.left or ""
    return [label, name(lane.host), str(lane.pid), *shares, count(lane.batches), *rates, name(left)]


def _handed(handover: Handover, labels: Sequence[str]) -> list[str]:
    owner = "a learner without a log" if handover.owner is None else labels[handover.owner]
    taker = "nobody yet" if handover.taker is None else labels[handover.taker]
    return [
        name(handover.pass_),
        name(handover.unit),
        str(handover.attempt),
        owner,
        taker,
        count(handover.begin),
        name(handover.why),
    ]


def _table(caption: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Markup.Element:
    head = _element("tr", *(_element("th", column, scope="col") for column in columns))
    body = (_element("tr", *(_element("td", cell) for cell in row)) for row in rows)
    table = _element("table", _element("thead", head), _element("tbody", *body))
    return _element("details", _element("summary", caption), _element("div", table, kind="scrolls"))


def _element(tag: str, *content: str | Markup.Element, **attributes: str) -> Markup.Element:
    """An element with text and elements in it, in this order; `kind` is its class."""
    named = {{"kind": "class"}.get(key, key): value for key, value in attributes.items()}
    element = Markup.Element(tag, named)
    for part in content:
        if isinstance(part, Markup.Element):
            element.append(part)
        elif len(element):
            element[-1].tail = (element[-1].tail or "") + part
        else:
            element.text = (element.text or "") + part
    return element
