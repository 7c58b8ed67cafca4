"""What the visitor sees: a line of progress while it runs (on a terminal only), then the result.

Numbers come from `document.ratios`; nothing is computed here. In a pipe the same text comes without colours.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from shardqueue.demo.options import shown_speed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from rich.console import Console
    from torch import Tensor

    from shardqueue.demo.document import Document, Outcome
    from shardqueue.demo.options import Options


@contextmanager
def progress(console: Console, options: Options, done: Tensor) -> Iterator[Callable[[str], None]]:
    """Show who has trained how much, until the block is left; yields what to call, with the phase's name."""
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[by_node]}")
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        bar = bars.add_task("starting", total=options.batches, by_node="")

        def tick(phase: str) -> None:
            counts = done.tolist()
            by_node = "  ".join(f"{name} {n:3d}" for name, n in zip(options.nodes, counts, strict=True))
            bars.update(bar, description=phase, completed=sum(counts), by_node=by_node)

        yield tick


def table(document: Document, outcomes: list[Outcome]) -> Table:
    """Return the result as a table: one row a node, then what the phase came to."""
    made = Table(box=SIMPLE_HEAD, pad_edge=False)
    made.add_column("node")
    made.add_column("speed")
    for outcome in outcomes:
        made.add_column(f"[bold]{outcome.name}[/]\nunits   busy   idle", justify="right")
    for number, (node, speed) in enumerate(document["speeds"].items()):
        shares = [outcome.shares[number] for outcome in outcomes]
        made.add_row(
            node,
            shown_speed(speed),
            *(_share(share.units, share.busy, share.idle) for share in shares),
            end_section=number == len(document["speeds"]) - 1,
        )
    made.add_row("makespan", "", *(f"{outcome.makespan:.2f} s" for outcome in outcomes))
    made.add_row("limit", "", *(f"{outcome.limit:.2f} s" for outcome in outcomes))
    made.add_row("makespan / limit", "", *(f"[bold]{outcome.ratio:.2f}[/]" for outcome in outcomes))
    before = document["loss_before"]
    made.add_row(
        "held-out loss", "", *(f"{before:.2f} -> {phase['loss']:.2f}" for phase in document["phases"])
    )
    return made


def _share(units: int, busy: float, idle: float) -> str:
    whole = max(busy + idle, 1e-9)
    return f"{units:5d}  {busy / whole:5.0%}  {idle / whole:5.0%}"


def show(console: Console, document: Document, outcomes: list[Outcome], wrong: list[str], file: Path) -> None:
    """Print the result."""
    console.print(_headline(document), highlight=False)
    console.print(table(document, outcomes))
    console.print(_explained(document, outcomes), highlight=False)
    console.print(f"Every batch, with its process, start and end: {file}", highlight=False, soft_wrap=True)
    for reason in wrong:
        console.print(f"[bold red]Not as it should be:[/] {reason}", highlight=False)


def _headline(document: Document) -> str:
    count = len(document["speeds"])
    return (
        f"{count} processes trained one small transformer twice, on the same {len(document['units'])} units."
    )


def _explained(document: Document, outcomes: list[Outcome]) -> str:
    fixed, shared = outcomes
    batches = sum(len(phase["batches"]) for phase in document["phases"])
    return (
        f"Fixed split:  [bold]{fixed.ratio:.2f}[/] times the limit. Equal slices: all wait for the straggler.\n"
        f"Shared queue: [bold]{shared.ratio:.2f}[/] times the limit. Whoever is ready claims the next unit.\n"
        "The limit is all work over all speeds. The queue is told no speeds.\n\n"
        "[dim]The speeds are paced, so two cores suffice: a batch is computed at once, then\n"
        f"waits until {document['batch_seconds'] * 1000:g} ms / speed have passed. {fixed.overran + shared.overran}"
        f" of {batches} batches overran that.[/]"
    )
