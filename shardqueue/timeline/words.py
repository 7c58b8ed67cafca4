"""Names and numbers of a chart as they are shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardqueue.terminal import visible

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardqueue.timeline.chart import Chart, Lane

LONGEST_NAME = 300
"""Characters of a name that are kept: a page of 20,000 bars stays one that a browser can open."""

_UNITS = ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))
"""A unit of time in seconds, its name, and the next smaller one."""


def name(text: str) -> str:
    """Return a name that others wrote as it is shown.

    It is in one line, and nothing in it moves a cursor or turns the writing around.
    """
    shown = visible(text[: LONGEST_NAME + 1])
    return shown if len(shown) <= LONGEST_NAME else f"{shown[: LONGEST_NAME - 1]}…"


def names(lanes: Sequence[Lane]) -> list[str]:
    """What each lane is called: its learner, and what tells it from another lane of the same one."""
    instances: dict[str, set[str]] = {}
    for lane in lanes:
        instances.setdefault(lane.learner, set()).add(lane.instance)
    again = [f" ({lane.instance[:4]})" if len(instances[lane.learner]) > 1 else "" for lane in lanes]
    process = [f"/{lane.process}" if lane.process != "main" else "" for lane in lanes]
    return [f"{lane.learner}{p}{a}" for lane, p, a in zip(lanes, process, again, strict=True)]


def labels(chart: Chart) -> list[str]:
    """Return what each lane is called."""
    return [name(label) for label in names(chart.lanes)]


def share(part: float, whole: float) -> str:
    """Return a part of a whole in per cent, with one decimal below 10."""
    percent = 100 * part / whole if whole else 0.0
    return f"{percent:.0f}%" if percent >= 9.95 or percent == 0 else f"{percent:.1f}%"


def count(number: int) -> str:
    """Return a number with its thousands apart."""
    return f"{number:,}"


def rate(number: int, seconds: float) -> str:
    """Return so many a second, to three digits; a dash for nothing."""
    if not number or seconds <= 0.0:
        return "-"
    rate = number / seconds
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def duration(seconds: float) -> str:
    """Return seconds in two units at most: `0.4 ms`, `3.21 s`, `2 min 5 s`, `3 d 4 h`."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    size, called, below, lesser = next(unit for unit in _UNITS if seconds >= unit[0])
    many, rest = divmod(round(seconds / below), size // below)
    return f"{many} {called} {rest} {lesser}" if rest else f"{many} {called}"
