"""A chart as a PNG or an SVG, where matplotlib is installed (the extra `plots`).

A band a lane, a bar a stretch, all over one time axis. The yellow share of a bar at its bottom, and before it, was
waited; what of a band is not covered stood idle. What was taken over is an arrow, who was gone a cross, and the tail
is shaded.

matplotlib is imported when a picture is made, and used by its objects: no window opens, and pyplot is left alone.
Names that others wrote are drawn as they are, never as formulas, and in an SVG they are shapes, not text.
"""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from typing import TYPE_CHECKING

from shardqueue.errors import InvalidInputError
from shardqueue.simulate.show import seconds_shown
from shardqueue.terminal import visible
from shardqueue.timeline.words import names

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from shardqueue.timeline.chart import Chart

    _Corners = list[tuple[float, float]]

FORMATS = (".png", ".svg")
COLOURS = ("#2b8a5f", "#3b6fb6", "#8a5fb0", "#c08a2b", "#4f9ea7", "#a0522d")
"""Of passes, in turn."""
IDLE, WAITING, ALARM = "#f3c9c3", "#f4e4a8", "#b3261e"
LEGEND, ARROWS = 6, 200
"""Passes in the legend, and arrows, at most."""
LONGEST_NAME = 40
SEAM = 0.0006
"""Of the chart's width, what is left free between two bars, so that they can be told apart."""
_LANE_INCHES, _HIGHEST = 0.36, 60.0


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def check(file: Path) -> None:
    """Raise `InvalidInputError` unless a picture can be drawn in the format that the file's ending names."""
    if file.suffix.lower() not in FORMATS:
        raise InvalidInputError(
            "image", str(file), f"a file that ends in {' or '.join(FORMATS)}", "name it so"
        )
    if not can_draw():
        remedy = 'pip install "shardqueue[plots]", or leave --image out'
        raise InvalidInputError("image", str(file), "drawn by matplotlib, which is not installed", remedy)


def draw(chart: Chart, file: Path) -> None:
    """Write the picture.

    Raises:
        OSError: `file` cannot be written.
        ImportError: matplotlib cannot be imported.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    as_it_is = matplotlib.rc_context({"text.parse_math": False, "text.usetex": False, "svg.fonttype": "path"})
    with as_it_is, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)
        height = 1.6 + min(_HIGHEST, _LANE_INCHES * max(1, len(chart.lanes)))
        figure = Figure(figsize=(11, height), dpi=150, layout="constrained")
        FigureCanvasAgg(figure)
        _draw(figure.subplots(), chart)
        _draw_legend(figure, chart)
        kind = file.suffix.lower().removeprefix(".")
        figure.savefig(file, format=kind, metadata={"Date": None} if kind == "svg" else {})


def _draw(plot: Axes, chart: Chart) -> None:
    from matplotlib.collections import PolyCollection

    for tail in chart.tails:
        plot.axvspan(tail.start, tail.stop, color="#000000", alpha=0.06, linewidth=0)
    for colour, areas in _areas(chart).items():
        plot.add_collection(PolyCollection(areas, facecolors=colour, linewidths=0), autolim=False)
    for place, lane in enumerate(chart.lanes):
        if lane.parted is not None and (lane.gone or lane.left == "error"):
            plot.plot([lane.parted], [place], marker="x", color=ALARM, markersize=7, markeredgewidth=2)
    _draw_handovers(plot, chart)
    labels = [_cut(visible(name)) for name in names(chart.lanes)]
    crowded = max(1.0, _LANE_INCHES * len(labels) / _HIGHEST)
    plot.set_yticks(range(len(labels)), labels, fontsize=max(2.0, 9.0 / crowded))
    plot.set_ylim(len(labels) - 0.4, -0.6)
    plot.set_xlim(0.0, chart.seconds or 1.0)
    plot.set_xlabel("seconds")
    plot.set_title(_title(chart), loc="left", fontsize=10)
    plot.spines[["top", "right"]].set_visible(False)
    plot.tick_params(axis="y", length=0)


def _areas(chart: Chart) -> dict[str, list[_Corners]]:
    """What is to be filled in each colour, one over the other."""
    colours = _colours(chart)
    areas: dict[str, list[_Corners]] = {colour: [] for colour in (IDLE, *COLOURS, WAITING)}
    seam = SEAM * (chart.seconds or 1.0)
    for place, lane in enumerate(chart.lanes):
        end = chart.seconds if lane.parted is None else lane.parted
        areas[IDLE].append(_rectangle(max(0.0, lane.since), end, place - 0.4, place + 0.4))
        height = 0.8 / max(1, lane.rows)
        for bar in lane.bars:
            top = place - 0.4 + bar.row * height
            bottom = top + height
            stop = max(bar.stop - seam, (bar.start + bar.stop) / 2)
            areas[colours[bar.pass_]].append(_rectangle(bar.start, stop, top, bottom))
            if bar.before > 0.0:
                areas[WAITING].append(_rectangle(bar.start - bar.before, bar.start, top, bottom))
            if bar.waited > 0.0:
                share = bar.waited / max(bar.stop - bar.start, bar.waited)
                areas[WAITING].append(_rectangle(bar.start, stop, bottom - share * height, bottom))
    return areas


def _rectangle(start: float, stop: float, top: float, bottom: float) -> _Corners:
    return [(start, top), (start, bottom), (stop, bottom), (stop, top)]


def _draw_handovers(plot: Axes, chart: Chart) -> None:
    taken = [one for one in chart.handovers if one.reclaimed and one.at is not None and one.taker is not None]
    for one in taken[:ARROWS]:
        assert one.at is not None
        assert one.taker is not None
        if one.owner is None:
            plot.plot([one.at], [one.taker], marker=">", color=ALARM, markersize=4)
            continue
        parted = chart.lanes[one.owner].parted
        start = one.at if parted is None else min(parted, one.at)
        arrow = {
            "arrowstyle": "->,head_width=0.15,head_length=0.25",
            "color": ALARM,
            "linewidth": 0.9,
            "alpha": 0.7,
        }
        plot.annotate("", (one.at, one.taker), (start, one.owner), arrowprops=arrow)


def _title(chart: Chart) -> str:
    there = sum(lane.there for lane in chart.lanes)
    idle = sum(lane.idle for lane in chart.lanes)
    share = f", {idle / there:.0%} idle" if there > 0.0 else ""
    tails = [
        f"tail of {_cut(tail.pass_)} {seconds_shown(tail.stop - tail.start)}" for tail in chart.tails[-1:]
    ]
    parts = [f"run {_cut(chart.run)}: {seconds_shown(chart.seconds)}{share}", *tails]
    return visible("; ".join(parts))


def _colours(chart: Chart) -> dict[str, str]:
    return {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(chart.passes)}


def _draw_legend(figure: Figure, chart: Chart) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    colours = _colours(chart)
    shown: list[Patch | Line2D] = [
        Patch(color=colours[name], label=_cut(visible(name))) for name in chart.passes[:LEGEND]
    ]
    if len(chart.passes) > LEGEND:
        shown.append(Patch(color="none", label=f"and {len(chart.passes) - LEGEND:,} more passes"))
    shown.append(Patch(color=IDLE, label="idle"))
    shown.append(Patch(color=WAITING, label="waiting for data"))
    if chart.tails:
        shown.append(Patch(color="#000000", alpha=0.06, label="tail"))
    if any(lane.gone or lane.left == "error" for lane in chart.lanes):
        shown.append(Line2D([], [], color=ALARM, marker="x", linestyle="none", label="gone"))
    if any(one.reclaimed for one in chart.handovers):
        shown.append(Line2D([], [], color=ALARM, marker=">", linewidth=0.9, label="taken over"))
    figure.legend(handles=shown, loc="outside lower left", ncols=len(shown), fontsize=8, frameon=False)


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_NAME else f"{text[: LONGEST_NAME - 1]}…"
