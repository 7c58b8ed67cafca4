"""What the visitor sees at the end: the last steps as timelines, the numbers, and both losses.

Numbers come from `document`; nothing is computed here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from shardqueue.demo.elastic import document as documents
from shardqueue.demo.live import PHASE_STYLES
from shardqueue.demo.options import labels, shown_speeds
from shardqueue.demo.report import WIDEST, painted
from shardqueue.timeline import strips

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from shardqueue.demo.elastic.document import Computed, Document, Outcome
    from shardqueue.timeline.strips import Glyphs

SHOWN_STEPS = 2
"""Steps of a timeline."""
SHOWN_LOSSES = 8


def show(
    console: Console, document: Document, found: list[Outcome], paper: Computed, wrong: Sequence[str]
) -> None:
    """Print the result."""
    console.print(_headline(document), highlight=False)
    for row in timelines(document, min(WIDEST, console.width), strips.glyphs(console.encoding)):
        console.print(row, no_wrap=True, overflow="crop", crop=True)
    console.print(table(document, found, paper))
    for line in _explained(document, found):
        console.print(line, highlight=False)
    for reason in wrong:
        console.print(f"[bold red]Not as it should be:[/] {reason}", highlight=False)


def timelines(document: Document, width: int, glyphs: Glyphs) -> list[Text]:
    """Return the last steps of both phases over one axis, in lines of at most `width`; none if steps are missing."""
    named, steps = labels(document["speeds"], None), document["steps"]
    first = max(1, steps - SHOWN_STEPS)
    ended = [documents.ends(phase) for phase in document["phases"]]
    if min(map(len, ended)) < steps:
        return []
    spans = [(times[first - 1], times[steps - 1]) for times in ended]
    cells = width - len(next(iter(named.values()))) - 2
    scale = strips.Scale(max(end - start for start, end in spans), max(10, cells))
    lines = []
    for phase, (start, end) in zip(document["phases"], spans, strict=True):
        title = f"{phase['name']}, the last {steps - first} steps: {end - start:.2f} s"
        lines.append(Text(title, style="bold"))
        for node, label in named.items():
            busy = [(left - start, right - start) for left, right in documents.spans(phase, node, first)]
            row = strips.row(busy, end - start, scale, glyphs)
            lines.append(Text(f" {label} ") + painted(row, PHASE_STYLES[phase["name"]], glyphs))
    return lines


def table(document: Document, found: list[Outcome], paper: Computed) -> Table:
    """Return the result as a table: one row a rank, then what the phase came to."""
    made = Table(box=SIMPLE_HEAD, pad_edge=False)
    made.add_column("rank")
    made.add_column("speed")
    for outcome in found:
        made.add_column(f"[bold]{outcome.name}[/]\na step   idle", justify="right")
    made.add_column("[bold]best split[/]\na step", justify="right")
    for number, (node, speed) in enumerate(shown_speeds(document["speeds"], None).items()):
        shares = [outcome.shares[number] for outcome in found]
        idle = [share.idle / max(share.busy + share.idle, 1e-9) for share in shares]
        cells = [f"{share.a_step:.2f}  {part:5.0%}" for share, part in zip(shares, idle, strict=True)]
        made.add_row(node, speed, *cells, str(paper.split[number]))
    made.add_section()
    steps = [f"{outcome.step * 1000:.0f} ms" for outcome in found]
    made.add_row("step time, median", "", *steps, f"{paper.best * 1000:.0f} ms")
    made.add_row("all steps", "", *(f"{outcome.seconds:.2f} s" for outcome in found), "")
    made.add_row("samples/s", "", *(f"{outcome.samples_per_second:.0f}" for outcome in found), "")
    made.add_row("speed-up", "", "1", f"[bold]{documents.speed_up(found):.2f}[/]", f"{paper.limit:.2f}")
    return made


def _headline(document: Document) -> str:
    return (
        f"{len(document['speeds'])} ranks trained one module twice: {document['steps']} steps of "
        f"{document['micro_batches']} micro-batches."
    )


def _explained(document: Document, found: list[Outcome]) -> list[str]:
    plain, elastic = found
    shown = range(0, document["steps"], -(-document["steps"] // SHOWN_LOSSES))
    width = max(len(outcome.name) for outcome in found)
    rows = [("step", [f"{step + 1}" for step in shown])]
    rows += [(one.name, [f"{one.losses[step]:.2f}" for step in shown]) for one in found]
    curves = [f"loss {name:{width}} " + " ".join(f"{cell:>5}" for cell in cells) for name, cells in rows]
    apart, noise = abs(plain.loss - elastic.loss), documents.noise(found)
    return [
        *curves,
        f"last third: {plain.loss:.3f} and {elastic.loss:.3f}, {apart:.3f} apart; noise explains {noise:.3f}",
        *(f"{outcome.name}: {_records(document, outcome)}" for outcome in found),
        "The best split knows the speeds; the ranks are told none.",
        f"[dim]Micro-batches are paced ({document['batch_seconds'] * 1000:.4g} ms / speed), so two cores suffice.[/]",
    ]


def _records(document: Document, outcome: Outcome) -> str:
    if outcome.faults:
        return "not as it should be."
    return f"each of the {document['rows']} samples trained once; replicas bit-identical."
