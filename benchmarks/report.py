"""What a benchmark found: rows, a table for people, and one JSON object as the last line for programs.

A row holds a value beside the reach promised for it (None: reported only) and what it was measured against in the
same run. A missed reach is marked and fails only a strict run, because a busy machine can cause it. A broken
promise about the data (a batch trained twice or never) is `wrong`, and always fails. What was not measured, because
something is not installed here, is `skipped`, and never fails.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any


def options(name: str, description: str, quick: str, cases: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return a parser with what every benchmark takes: `--quick`, `--strict`, and `--only` where it has cases."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--strict", action="store_true", help="exit with 1 when a reach is missed")
    if cases:
        parser.add_argument("--only", nargs="+", choices=cases, action="extend", help="these cases")
    return parser


@dataclass(frozen=True, slots=True)
class Row:
    """One measured value.

    Attributes:
        case: what was measured.
        value: how much of it.
        unit: of the value and the reach.
        reach: the value promised, or None.
        against: the peer or the limit, measured or computed in the same run.
        at_least: the reach is a lower bound, not an upper one.
    """

    case: str
    value: float
    unit: str
    reach: float | None = None
    against: str = ""
    at_least: bool = False

    @property
    def missed(self) -> bool:
        """Whether the value is on the wrong side of its reach, as both are printed."""
        if self.reach is None:
            return False
        value = float(self.shown)
        return value < self.reach if self.at_least else value > self.reach

    @property
    def shown(self) -> str:
        """The value with as many digits as it is compared with."""
        return f"{self.value:.4f}" if abs(self.value) < 10 else f"{self.value:.1f}"

    @property
    def bound(self) -> str:
        """The reach as a person writes it."""
        if self.reach is None:
            return "-"
        return f"{'>=' if self.at_least else '<='} {self.reach:g}"


@dataclass(slots=True)
class Report:
    """The rows of one benchmark, in the order they were measured.

    Attributes:
        benchmark: its name.
        wrong: what must never happen and did.
        skipped: what was not measured, each with the reason.
    """

    benchmark: str
    rows: list[Row] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Report:
        """Read what `as_json` wrote.

        Raises:
            KeyError, TypeError: it is not the JSON of a report.
        """
        at_least = told.get("at_least", ())
        rows = [Row(**row, at_least=place in at_least) for place, row in enumerate(told["rows"])]
        return cls(told["benchmark"], rows, list(told.get("wrong", ())), list(told.get("skipped", ())))

    def add(self, row: Row) -> None:
        """Keep a row, and say on standard error that it was measured."""
        self.rows.append(row)
        print(f"{self.benchmark}: {row.case}: {row.shown} {row.unit}", file=sys.stderr, flush=True)

    def finish(self, strict: bool = False) -> int:
        """Print everything; return the exit code: 1 when something is wrong or, if `strict`, a reach is missed."""
        print(self.table())
        for what in self.wrong:
            print(f"WRONG: {what}")
        for what in self.skipped:
            print(f"SKIPPED: {what}")
        print(self.as_json(), flush=True)
        missed = any(row.missed for row in self.rows)
        return 1 if self.wrong or (strict and missed) else 0

    def table(self) -> str:
        """The rows in columns as wide as they need to be."""
        cells = [("case", "value", "unit", "reach", "", "against")]
        for row in self.rows:
            mark = "MISSED" if row.missed else ""
            cells.append((row.case, row.shown, row.unit, row.bound, mark, row.against))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = (
            "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) for line in cells
        )
        return "\n".join(line.rstrip() for line in lines)

    def as_json(self) -> str:
        """One line: the name, the rows, which of them have a lower bound for a reach, what was wrong and skipped."""
        keys = ("case", "value", "unit", "reach", "against")
        told = {
            "benchmark": self.benchmark,
            "rows": [{key: getattr(row, key) for key in keys} for row in self.rows],
            "at_least": [place for place, row in enumerate(self.rows) if row.at_least],
            "wrong": self.wrong,
            "skipped": self.skipped,
        }
        return json.dumps(told)
