"""The timeline as a PNG, where matplotlib is installed.

Drawn from the same document as everything else: a bar a batch, a row a node, both phases over one time axis.
matplotlib is imported when a picture is made, and used by its objects: no window opens, and pyplot is left alone.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from shardqueue.demo.document import spans
from shardqueue.demo.options import labels

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

    from shardqueue.demo.document import Computed, Document, Outcome, PhaseEntry

TINTS = {"fixed split": ("#d98032", "#e39a5a"), "shared queue": ("#2b8a5f", "#4fa47d")}
"""Of a phase's batches, in turn."""
_ROW_INCHES = 0.3


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw(document: Document, outcomes: list[Outcome], paper: Computed, file: Path) -> None:
    """Write the picture.

    Raises:
        OSError: `file` cannot be written.
        ImportError: matplotlib cannot be imported.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = len(document["speeds"])
    figure = Figure(figsize=(9, 2 + 2 * _ROW_INCHES * (rows + 1)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    plots = figure.subplots(len(outcomes), 1, sharex=True, squeeze=False)[:, 0]
    for plot, phase, outcome in zip(plots, document["phases"], outcomes, strict=True):
        _draw_phase(plot, document, phase, outcome)
    plots[-1].set_xlabel("seconds")
    plots[-1].set_xlim(0, 1.02 * max(paper.limit, *(outcome.makespan for outcome in outcomes)))
    figure.savefig(file, format="png")


def _draw_phase(plot: Axes, document: Document, phase: PhaseEntry, outcome: Outcome) -> None:
    slowdown = document["slowdown"]
    named = labels(document["speeds"], slowdown)
    for place, node in enumerate(named):
        bars = [(start, end - start) for start, end in spans(phase, node)]
        plot.broken_barh(bars, (place - 0.4, 0.8), facecolors=TINTS[phase["name"]], edgecolors="none")
        if slowdown is not None and slowdown["node"] == node:
            plot.plot([slowdown["at"]] * 2, [place - 0.4, place + 0.4], color="black", linewidth=2)
    plot.axvline(outcome.limit, color="black", linewidth=1, linestyle="--")
    plot.set_yticks(range(len(named)), [label.rstrip() for label in named.values()])
    plot.set_ylim(len(named) - 0.4, -0.6)
    title = f"{outcome.name}: {outcome.makespan:.2f} s, {outcome.ratio:.2f} times the limit (dashed)"
    plot.set_title(title, loc="left", fontsize=10)
    plot.spines[["top", "right"]].set_visible(False)
