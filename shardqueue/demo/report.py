"""What the visitor sees at the end: every node's time as a timeline, then the numbers.

Numbers come from `document`, cells from `strips`; nothing is computed here. In a pipe the same text comes
without colours, and where the encoding has no blocks, in ASCII.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from shardqueue.demo.document import SHARED_BELOW, spans
from shardqueue.demo.live import PHASE_STYLES
from shardqueue.demo.options import labels, shown_speed, shown_speeds
from shardqueue.timeline import strips

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from shardqueue.demo.document import Computed, Document, Outcome
    from shardqueue.timeline.strips import Glyphs, Scale

WIDEST = 100


def show(
    console: Console, document: Document, outcomes: list[Outcome], paper: Computed, wrong: Sequence[str]
) -> None:
    """Print the result."""
    console.print(_headline(document), highlight=False)
    width = min(WIDEST, console.width)
    for line in timelines(document, outcomes, width, strips.glyphs(console.encoding)):
        console.print(line, no_wrap=True, overflow="crop", crop=True)
    console.print(table(document, outcomes))
    console.print(_explained(document, outcomes, paper), highlight=False)
    for reason in wrong:
        console.print(f"[bold red]Not as it should be:[/] {reason}", highlight=False)


def written(console: Console, what: str, where: object) -> None:
    """Print where something was written, on one line however long."""
    console.print(f"{what}: {where}", highlight=False, markup=False, soft_wrap=True)


def timelines(document: Document, outcomes: list[Outcome], width: int, glyphs: Glyphs) -> list[Text]:
    """Return both phases' timelines over one axis, in lines of at most `width`."""
    named = labels(document["speeds"], document["slowdown"])
    indent = len(next(iter(named.values()))) + 2
    longest = max(outcomes[0].limit, *(outcome.makespan for outcome in outcomes))
    scale = strips.Scale(longest, max(10, width - indent - 1))
    lines = []
    for phase, outcome in zip(document["phases"], outcomes, strict=True):
        title = f"{outcome.name}: {outcome.makespan:.2f} s, {outcome.ratio:.2f} times the limit"
        lines.append(Text(title, style="bold"))
        for node, label in named.items():
            row = strips.row(spans(phase, node), outcome.makespan, scale, glyphs)
            crossed = strips.crossed(row, scale.border(outcome.limit), glyphs.line)
            lines.append(Text(f" {label} ") + painted(crossed, PHASE_STYLES[outcome.name], glyphs))
    lines.append(Text(" " * indent + _axis(document, outcomes[0].limit, scale, glyphs)))
    return lines


def painted(row: str, style: str, glyphs: Glyphs) -> Text:
    """Return a timeline's row with its busy cells in a style."""
    text = Text()
    for character in row:
        dim = character == glyphs.shades[0]
        text.append(character, style="dim" if dim else "bold" if character == glyphs.line else style)
    return text


def _axis(document: Document, limit: float, scale: Scale, glyphs: Glyphs) -> str:
    named = f"limit {limit:.2f} s"
    marks = [
        strips.Label(scale.border(limit), f"{named} {glyphs.corners[0]}", f"{glyphs.corners[1]} {named}")
    ]
    slowdown = document["slowdown"]
    if slowdown is not None:
        named = f"{slowdown['node']} slows"
        marks.append(strips.Label(scale.border(slowdown["at"]), f"{named} ^", f"^ {named}"))
    marks += [strips.Label(0, "0", "0"), strips.Label(scale.cells, f"{scale.seconds:.2f} s", "")]
    return strips.axis(marks, scale.cells + 1)


def table(document: Document, outcomes: list[Outcome]) -> Table:
    """Return the result as a table: one row a node, then what the phase came to."""
    made = Table(box=SIMPLE_HEAD, pad_edge=False)
    made.add_column("node")
    made.add_column("speed")
    for outcome in outcomes:
        made.add_column(f"[bold]{outcome.name}[/]\nunits   busy   idle", justify="right")
    shown = shown_speeds(document["speeds"], document["slowdown"])
    for number, (node, speed) in enumerate(shown.items()):
        shares = [outcome.shares[number] for outcome in outcomes]
        made.add_row(node, speed, *(_share(share.units, share.busy, share.idle) for share in shares))
    made.add_section()
    made.add_row("makespan", "", *(f"{outcome.makespan:.2f} s" for outcome in outcomes))
    made.add_row("makespan / limit", "", *(f"[bold]{outcome.ratio:.2f}[/]" for outcome in outcomes))
    before = document["loss_before"]
    made.add_row(
        "held-out loss", "", *(f"{before:.2f} -> {phase['loss']:.2f}" for phase in document["phases"])
    )
    return made


def _share(units: int, busy: float, idle: float) -> str:
    whole = max(busy + idle, 1e-9)
    return f"{units:5d}  {busy / whole:5.0%}  {idle / whole:5.0%}"


def _headline(document: Document) -> str:
    count = len(document["speeds"])
    processes = "1 process" if count == 1 else f"{count} processes"
    return f"{processes} trained one small transformer twice, on the same {len(document['units'])} units."


def _explained(document: Document, outcomes: list[Outcome], paper: Computed) -> str:
    parts = _slowdown(document, paper), _coarse(outcomes), [_meaning(), _pace(document, outcomes)]
    return "\n".join(line for lines in parts for line in lines)


def _slowdown(document: Document, paper: Computed) -> list[str]:
    slowdown = document["slowdown"]
    if slowdown is None:
        return []
    early = paper.early_split / paper.limit
    return [
        f"{slowdown['node']} slows to {shown_speed(slowdown['speed'])} at {slowdown['at']:.2f} s. A split by the"
        f" early speeds would have cost {early:.2f} times the limit (computed, not run)."
    ]


def _coarse(outcomes: list[Outcome]) -> list[str]:
    below = max(outcome.below for outcome in outcomes if outcome.name == "shared queue")
    if below <= SHARED_BELOW:
        return []
    return [f"Batches are long here: the queue may come to {below:.2f} times the limit."]


def _meaning() -> str:
    return "The limit is all work over all speeds. The queue is told no speeds."


def _pace(document: Document, outcomes: list[Outcome]) -> str:
    batches = sum(len(phase["batches"]) for phase in document["phases"])
    overran = sum(outcome.overran for outcome in outcomes)
    return (
        f"[dim]Batches are paced ({document['batch_seconds'] * 1000:.4g} ms / speed), so two cores suffice;"
        f" {overran} of {batches} overran.[/]"
    )
