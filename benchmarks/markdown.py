"""The suite's document as Markdown: the machine, what came of each benchmark, and tables of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.report import Row

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Rows = list[tuple[str, Row]]
SHORT = ("peers",)
"""Benchmarks of which the summary has all rows."""


def whole(told: Mapping[str, Any]) -> str:
    """Every row of every benchmark."""
    return "\n\n".join([_heading(told), _overview(told), *_sections(told["benchmarks"])]) + "\n"


def summary(told: Mapping[str, Any]) -> str:
    """What was promised, and the peers."""
    promised = [(name, row) for name, row in _rows(told["benchmarks"]) if row.reach is not None]
    short = _sections(each for each in told["benchmarks"] if each["name"] in SHORT)
    parts = [_heading(told), _overview(told), f"## What is promised\n\n{_table(promised)}", *short]
    return "\n\n".join(parts) + "\n"


def _sections(benchmarks: Iterable[Mapping[str, Any]]) -> list[str]:
    return [
        f"## {each['name']}\n\n{_table(_rows([each]), named=False)}" for each in benchmarks if each["rows"]
    ]


def _rows(benchmarks: Iterable[Mapping[str, Any]]) -> Rows:
    return [
        (each["name"], Row(**{key: value for key, value in row.items() if key != "missed"}))
        for each in benchmarks
        for row in each["rows"]
    ]


def _heading(told: Mapping[str, Any]) -> str:
    machine, versions = told["machine"], told["versions"]
    gpus = ", ".join(machine["gpus"]) or "no GPU"
    hardware = (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB, {gpus}"
    )
    software = ", ".join(f"{name} {found}" for name, found in versions.items() if found)
    return "\n".join(
        (
            f"# All benchmarks, {told['form']} form",
            "",
            f"- {told['started']}, {told['seconds']:.0f} s in all, load average at the start "
            f"{machine['load_average']:.2f}",
            f"- {hardware}; {machine['os']}",
            f"- {software}",
        )
    )


def _overview(told: Mapping[str, Any]) -> str:
    lines = ["| benchmark | outcome | seconds | rows | missed | not measured |", "|---|---|--:|--:|--:|---|"]
    for each in told["benchmarks"]:
        missed = sum(row["missed"] for row in each["rows"])
        outcome = f"**{each['outcome']}**" if each["outcome"] == "failed" else each["outcome"]
        why = "; ".join(filter(None, (each["reason"], *each["skipped"])))
        cells = (each["name"], outcome, f"{each['seconds']:.0f}", len(each["rows"]), missed or "", _cell(why))
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _table(rows: Rows, named: bool = True) -> str:
    first = "benchmark | " if named else ""
    lines = [
        f"| {first}case | value | unit | reach | | against |",
        f"|{'---|' if named else ''}---|--:|---|---|---|---|",
    ]
    for name, row in rows:
        mark = "MISSED" if row.missed else ""
        cells = (_cell(row.case), row.shown, _cell(row.unit), row.bound, mark, _cell(row.against))
        lines.append(f"| {f'{name} | ' if named else ''}{' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    """Text that stays in its cell, and is no markup."""
    flat = " ".join(text.split())
    return "".join(f"\\{each}" if each in r"\|*`<" else each for each in flat)
