"""Who was busy when, as rows of characters: each stands for an equal piece of time.

A cell's value is the fraction of its piece of time in which somebody was training, from the records alone. All rows
share one scale, so what took less time is a shorter row. `Scale` has the lengths, `busy` the values, `Glyphs` the
characters.

Times are in seconds from the start of what is shown.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass(frozen=True, slots=True)
class Glyphs:
    """The characters of a timeline.

    Attributes:
        shades: from idle to busy; each stands for an equal share of the fractions around its own.
        line: a moment that crosses all rows.
        corners: the end of that line, with its name before and after it.
    """

    shades: str
    line: str
    corners: str

    def shade(self, fraction: float) -> str:
        """Return the character of a fraction, the nearest one."""
        return self.shades[math.floor(fraction * (len(self.shades) - 1) + 0.5)]


BLOCKS = Glyphs(shades="·░▒▓█", line="│", corners="┘└")
ASCII = Glyphs(shades=".-+*#", line="|", corners="''")


def glyphs(encoding: str) -> Glyphs:
    """Return the best characters that this encoding has."""
    try:
        (BLOCKS.shades + BLOCKS.line + BLOCKS.corners).encode(encoding)
    except (UnicodeError, LookupError):
        return ASCII
    return BLOCKS


@dataclass(frozen=True, slots=True)
class Scale:
    """`cells` cells for `seconds` seconds."""

    seconds: float
    cells: int

    @property
    def cell(self) -> float:
        """Seconds of one cell."""
        return self.seconds / self.cells

    def cells_until(self, end: float) -> int:
        """Return how many cells have begun before `end`."""
        return min(self.cells, math.ceil(end / self.cell - 1e-9))

    def border(self, moment: float) -> int:
        """Return the border of cells that is nearest to a moment: 0 is before the first cell."""
        return min(self.cells, max(0, math.floor(moment / self.cell + 0.5)))


def busy(spans: Iterable[tuple[float, float]], scale: Scale) -> list[float]:
    """Return for each cell the fraction of it that the (start, end) spans cover; they do not overlap."""
    covered = [0.0] * scale.cells
    for start, end in spans:
        for cell in range(int(start / scale.cell), scale.cells_until(end)):
            low, high = cell * scale.cell, (cell + 1) * scale.cell
            covered[cell] += max(0.0, min(end, high) - max(start, low))
    return [min(1.0, seconds / scale.cell) for seconds in covered]


def row(spans: Iterable[tuple[float, float]], makespan: float, scale: Scale, shades: Glyphs) -> str:
    """Return one row, which ends with the makespan."""
    fractions = busy(spans, scale)[: scale.cells_until(makespan)]
    return "".join(map(shades.shade, fractions))


def crossed(line: str, border: int, mark: str) -> str:
    """Return a row with a line drawn between two of its cells; no cell is lost."""
    return f"{line[:border]:<{border}}{mark}{line[border:]}"


@dataclass(frozen=True, slots=True)
class Label:
    """The name of a column of an axis, counted from 0.

    Attributes:
        column: where.
        before: the text to end there.
        after: the text to begin there instead, if there is no room before it.
    """

    column: int
    before: str
    after: str


def axis(labels: Sequence[Label], width: int) -> str:
    """Return one line of labels; what finds no room is left out, the last ones first."""
    line = " " * width
    for label in labels:
        for first, text in (
            (label.column + 1 - len(label.before), label.before),
            (label.column, label.after),
        ):
            end = first + len(text)
            if first >= 0 and end <= width and not line[max(0, first - 1) : end + 1].strip():
                line = line[:first] + text + line[end:]
                break
    return line.rstrip()
