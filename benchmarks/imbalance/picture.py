"""The picture of the imbalance benchmark: samples a second of each regime, and how long each rank idled in it.

matplotlib is imported when a picture is made, and used by its objects: no window opens, and pyplot is left alone.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from benchmarks.imbalance.results import Measurement

ENDINGS = (".png", ".svg", ".pdf")
_RATE, _BEST = "#2b8a5f", "#333333"
_LABELLED = 12
"""Ranks up to which each has its device in the legend; with more, its bars speak by their order."""


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def plot(measured: Measurement) -> Figure:
    """Draw a measurement.

    Raises:
        ImportError: matplotlib cannot be imported.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(2, 3))
    _draw_rates(left, measured)
    _draw_idle(right, measured)
    for axes in (left, right):
        axes.set_xticks(range(len(measured.results)), [result.regime for result in measured.results])
        axes.spines[["top", "right"]].set_visible(False)
    if len(measured.devices) <= _LABELLED:
        handles, names = right.get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    return figure


def save(measured: Measurement, file: Path) -> None:
    """Write the picture; the ending of `file` says in which format.

    Raises:
        OSError: `file` cannot be written.
        ImportError: matplotlib cannot be imported.
    """
    plot(measured).savefig(file)


def _draw_rates(axes: Axes, measured: Measurement) -> None:
    rates = [result.samples_per_second for result in measured.results]
    bars = axes.bar(range(len(rates)), rates, width=0.6, color=_RATE)
    axes.bar_label(bars, [f"{rate:.0f}" for rate in rates], label_type="center", color="white", fontsize=10)
    axes.axhline(measured.best, color=_BEST, linestyle="--", linewidth=1)
    axes.set_ylim(0, 1.18 * max(measured.best, *rates))
    axes.text(-0.3, 1.01 * measured.best, f"best possible {measured.best:.0f}", va="bottom", fontsize=9)
    axes.set_title("samples a second, all ranks", loc="left", fontsize=10)


def _draw_idle(axes: Axes, measured: Measurement) -> None:
    from matplotlib import colormaps

    ranks = len(measured.devices)
    width, tints = 0.8 / ranks, colormaps["viridis"].resampled(ranks + 1)
    fastest_first = sorted(measured.devices, key=lambda device: -device.speed)
    for place, device in enumerate(fastest_first):
        idle = [100 * result.idle(device.rank) for result in measured.results]
        where = [regime + (place - (ranks - 1) / 2) * width for regime in range(len(idle))]
        axes.bar(where, idle, width=0.9 * width, color=tints(place), label=f"{device.rank}: {device.name}")
    axes.set_ylim(0, 100)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0f} %")
    axes.set_title("idle, by rank, the fastest first", loc="left", fontsize=10)
