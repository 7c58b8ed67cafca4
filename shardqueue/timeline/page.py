"""A chart as one HTML file that opens from a disk, without a server and without a network.

Title, totals and tables are there without JavaScript, for a screen reader too (`panels`); `page_*.js` draw the lanes
from the same chart, which lies in the file as JSON. A name may be anything that somebody wrote to a mailbox, so three
walls stand between it and a reader: what cannot be printed becomes an escape, markup is made by `ElementTree` or by
the DOM's `textContent` and never from strings, and the file's own policy allows one script, one style sheet and no
address to load anything from.
"""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import asdict
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING, Any

from shardqueue.timeline.panels import header, markup, notes, tables, title, totals
from shardqueue.timeline.words import labels
from shardqueue.timeline.words import name as shown

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardqueue.timeline.chart import Bar, Chart, Handover, Lane

DECIMALS = 6
"""Of a second."""
COLUMNS = (
    "start",
    "stop",
    "waited",
    "before",
    "pass",
    "unit",
    "attempt",
    "begin",
    "end",
    "batches",
    "samples",
    "row",
    "spans",
)
"""Of a bar, as the script calls them; `pass` and `unit` are places in lists of names."""
SCRIPTS = ("page_run.js", "page_lanes.js", "page_hands.js")
"""In this order one script: the run, what is drawn of it, and what a person does to it."""


def document(chart: Chart) -> str:
    """Return the whole file as text, to be written as UTF-8.

    Args:
        chart: the run.

    Raises:
        ValueError: a time of it is no number, or is infinite.
    """
    data = _json(_data(chart))
    style, script = _read("page.css"), "\n".join(_read(name) for name in SCRIPTS)
    return Template(_read("page.html")).substitute(
        title=markup(title(chart)),
        header=markup(header(chart)),
        totals=markup(totals(chart)),
        notes=markup(notes(chart)),
        tables=markup(tables(chart)),
        data=data,
        style=style,
        style_hash=_hash(style),
        script=script,
        script_hash=_hash(script),
    )


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")


def _data(chart: Chart) -> dict[str, Any]:
    """What the script draws: names stand once in a list, bars are rows of numbers."""
    units = _Names()
    passes = _Names(chart.passes)
    return {
        "origin": round(chart.origin, DECIMALS),
        "seconds": round(chart.seconds, DECIMALS),
        "lanes": [
            _lane(lane, passes, units) | {"label": label}
            for lane, label in zip(chart.lanes, labels(chart), strict=True)
        ],
        "handovers": [_handover(handover, passes, units) for handover in chart.handovers],
        "tails": [_plain(asdict(tail)) | {"pass": passes.place(tail.pass_)} for tail in chart.tails],
        "columns": COLUMNS,
        "passes": passes.all(),
        "units": units.all(),
    }


class _Names:
    """A list of names in which each stands once."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._places: dict[str, int] = {}
        for name in names:
            self.place(name)

    def place(self, name: str) -> int:
        return self._places.setdefault(name, len(self._places))

    def all(self) -> list[str]:
        return [shown(name) for name in self._places]


def _lane(lane: Lane, passes: _Names, units: _Names) -> dict[str, Any]:
    values = {name: getattr(lane, name) for name in lane.__slots__ if name != "bars"}
    return _plain(values) | {"bars": [_bar(bar, passes, units) for bar in lane.bars]}


def _bar(bar: Bar, passes: _Names, units: _Names) -> list[object]:
    places = {"pass": passes.place(bar.pass_), "unit": units.place(bar.unit)}
    values = (places[name] if name in places else getattr(bar, name) for name in COLUMNS)
    return [_rounded(value) for value in values]


def _handover(handover: Handover, passes: _Names, units: _Names) -> dict[str, Any]:
    places = {"pass": passes.place(handover.pass_), "unit": units.place(handover.unit)}
    return _plain(asdict(handover)) | places


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Names as they are shown, times rounded."""
    return {key: shown(value) if isinstance(value, str) else _rounded(value) for key, value in values.items()}


def _rounded(value: object) -> object:
    return round(value, DECIMALS) if isinstance(value, float) else value


def _json(values: object) -> str:
    """JSON that ends no element it stands in: `<`, `>` and `&` are escapes, and so is all that is not ASCII."""
    text = json.dumps(values, allow_nan=False, separators=(",", ":"))
    return text.replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
