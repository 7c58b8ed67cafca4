"""How the findings are shown: a table with a remedy a line, and a JSON document."""

from __future__ import annotations

import json
from concurrent.futures import wait
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardqueue.terminal import visible

if TYPE_CHECKING:
    from concurrent.futures import Future

    from shardqueue.doctor.findings import Findings, Row

_MARKS = {True: ("yes", "green"), False: ("no", "bold red"), None: ("-", "dim")}


def watch(examining: Future[None], findings: Findings) -> None:
    """Say on a terminal what was looked at last, until the examination is done: a slow store takes minutes."""
    console = Console(stderr=True)
    if not console.is_terminal:
        return
    with console.status("examining") as status:
        while not examining.done():
            last = findings.rows[-1].check if findings.rows else "nothing yet"
            status.update(visible(f"examining; done: {last}"))
            wait([examining], timeout=0.2)


def show(console: Console, url: str, findings: Findings) -> None:
    """Print the table and the answer."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in ("check", "", "found"):
        table.add_column(name, overflow="fold")
    for row in findings.rows:
        mark, style = _MARKS[row.good]
        table.add_row(visible(row.check), Text(mark, style=style), _found(row))
    console.print(table)
    if findings.bill is not None:
        console.print(Text(f"\nThis plan: {findings.bill.shown()}."), soft_wrap=True)
    yes, no = f"Yes: {url} can hold a queue.", f"No: {url} cannot be used as it is."
    console.print(Text(f"\n{visible(yes if findings.answer else no)}", style="bold"), soft_wrap=True)


def document(url: str, findings: Findings) -> str:
    """The findings as JSON."""
    bill = findings.bill
    return json.dumps(
        {
            "format": "shardqueue-doctor/1",
            "url": url,
            "answer": "yes" if findings.answer else "no",
            "checks": [
                {"check": row.check, "good": row.good, "found": row.found, "remedy": row.remedy}
                for row in findings.rows
            ],
            "latency_seconds": {
                latency.verb: {
                    "calls": len(latency.seconds),
                    "p50": latency.quantile(0.5),
                    "p99": latency.quantile(0.99),
                }
                for latency in findings.latencies
            },
            "missing": findings.missing,
            "left": findings.left,
            "plan": None
            if bill is None
            else {
                "units": bill.question.units,
                "nodes": bill.question.nodes,
                "epochs": bill.question.epochs,
                "unit_seconds": bill.question.unit_seconds,
                "simulated_units": bill.simulated,
                "writes": bill.writes,
                "reads": bill.reads,
                "listings": bill.listings,
                "dollars": bill.dollars,
                "prices": None if bill.price is None else bill.price.store,
            },
        },
        indent=1,
    )


def _found(row: Row) -> Text:
    text = Text(visible(row.found))
    if row.remedy:
        text.append(f"\n-> {visible(row.remedy)}", style="yellow")
    return text
