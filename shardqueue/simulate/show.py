"""The result as a person reads it. Numbers come from `findings`; nothing is computed here but means.

Of more than `EACH` nodes those that are alike in all that happens to them share a row.
"""

from __future__ import annotations

from collections import defaultdict
from statistics import fmean
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

from shardqueue.demo.options import shown_speed
from shardqueue.simulate.scenario import gone

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import Console

    from shardqueue.simulate import Node
    from shardqueue.simulate.findings import Findings, Part
    from shardqueue.simulate.scenario import Scenario

EACH = 16
MOST_ROWS = 40
NAMED = 4
"""Units or nodes that are named in a sentence."""
VERBS = {"PutIfAbsent": "put_if_absent", "Get": "get", "List": "list", "Put": "put (logs)"}


def show(console: Console, scenario: Scenario, findings: Findings) -> None:
    """Print it."""
    console.print(_headline(scenario), highlight=False)
    console.print(times(findings))
    console.print(nodes(scenario, findings))
    console.print(requests(scenario, findings))
    for sentence in sentences(scenario, findings):
        console.print(sentence, highlight=False, markup=False, soft_wrap=True)


def _headline(scenario: Scenario) -> str:
    low, high = scenario.latency
    latency = _short(low) if low == high else f"{_short(low)} to {_short(high)}"
    units = len(scenario.units)
    return (
        f"{_counted(len(scenario.nodes), 'node')} and {_counted(units, 'unit')} of {scenario.batches:,} batches;"
        f" a call to the store takes {latency}."
    )


def times(findings: Findings) -> Table:
    """Return makespan, limit and fixed split."""
    made = _table("", "time", "of the limit")
    fixed, limit = findings.fixed_split, findings.limit

    def of_the_limit(seconds: float) -> str:
        return f"{seconds / limit:.3f}" if limit else "-"

    lost = round(fixed.lost)
    made.add_row("shared queue", seconds_shown(findings.makespan), of_the_limit(findings.makespan))
    made.add_row(
        "fixed split",
        seconds_shown(fixed.makespan),
        f"{_counted(lost, 'batch', 'es')} lost" if lost else of_the_limit(fixed.makespan),
    )
    made.add_row("limit", seconds_shown(limit), of_the_limit(limit))
    return made


def nodes(scenario: Scenario, findings: Findings) -> Table:
    """Return a row a node, or a row for all nodes that are alike."""
    away = any(part.away > 0 for part in findings.parts)
    columns = ["units", "batches", "at limit", "busy", "idle", *(["away"] if away else [])]
    whole = findings.makespan or 1.0
    cells: list[tuple[Callable[[Part], float], str]] = [
        (lambda part: part.units, ",.0f"),
        (lambda part: part.batches, ",.0f"),
        (lambda part: part.at_limit, ",.0f"),
        (lambda part: part.busy / whole, ".1%"),
        (lambda part: part.idle / whole, ".1%"),
    ]
    if away:
        cells.append((lambda part: part.away / whole, ".1%"))
    if len(scenario.nodes) <= EACH:
        made = _table("node", "speed", *columns, words=2)
        for node, part in zip(scenario.nodes, findings.parts, strict=True):
            made.add_row(part.name, course(node), *(format(value(part), form) for value, form in cells))
        return made
    alike: dict[Node, list[Part]] = defaultdict(list)
    for node, part in zip(scenario.nodes, findings.parts, strict=True):
        alike[node].append(part)
    made = _table("nodes", "speed", "", *columns, words=3)
    for node, parts in list(alike.items())[:MOST_ROWS]:
        for how, of in (("least", min), ("mean", fmean), ("most", max)):
            first = how == "least"
            made.add_row(
                f"{len(parts)}" if first else "",
                course(node) if first else "",
                how,
                *(format(of([value(part) for part in parts]), form) for value, form in cells),
            )
        made.add_section()
    if len(alike) > MOST_ROWS:
        made.caption = f"and {len(alike) - MOST_ROWS} more kinds of nodes: see --json"
    return made


def requests(scenario: Scenario, findings: Findings) -> Table:
    """Return the calls to the store by verb, in all and a unit."""
    made = _table("requests", "all", "a unit")
    units = len(scenario.units)
    for verb, count in sorted(findings.requests.items(), key=lambda item: [*VERBS, item[0]].index(item[0])):
        made.add_row(VERBS.get(verb, verb), f"{count:,}", f"{count / units:.2f}")
    made.add_section()
    every = sum(findings.requests.values())
    made.add_row("to claim", f"{findings.claim_requests:,}", f"{findings.claim_requests / units:.2f}")
    made.add_row("with logs", f"{every:,}", f"{every / units:.2f}")
    return made


def sentences(scenario: Scenario, findings: Findings) -> Iterator[str]:
    """Yield what the tables do not say."""
    if not (findings.lost or findings.left_over or findings.fixed_split.lost):
        gain = findings.fixed_split.makespan / findings.makespan
        yield f"The shared queue is {gain:.2f} times as fast as the fixed split."
    yield f"At most {findings.drift:.1%} of the plan lay between two learners at one time."
    lost = sum(findings.lost.values())
    if not (lost or findings.left_over or findings.repeated):
        yield "Every batch was trained exactly once."
    else:
        yield f"{findings.trained:,} of {_counted(scenario.batches, 'batch', 'es')} were trained."
    if lost:
        yield f"LOST: {_counted(lost, 'batch', 'es')} of {_listed(list(findings.lost), 'unit')}, {_held(scenario)}."
    if findings.left_over:
        yield f"LEFT OVER: {_counted(findings.left_over, 'batch', 'es')} that nobody claimed: all nodes were gone."
    if findings.repeated:
        broken = " The first run had broken off, and a later one began again." if findings.runs > 1 else ""
        yield f"WRONG: {_counted(findings.repeated, 'batch', 'es')} trained more than once.{broken}"
    for error in findings.errors:
        yield f"ERROR: a node ended with {error}"


def _held(scenario: Scenario) -> str:
    died = [name for name, node in zip(scenario.names, scenario.nodes, strict=True) if node.dies is not None]
    if not died:
        return "given back when nobody was left to take them"
    return f"held by {_listed(died, 'node')} when killed: nobody else may claim them"


def course(node: Node) -> str:
    """Return a node's speed, and what happens to it: `1, from 30 s 1/4, dies at 60 s`."""
    parts = [shown_speed(node.speed)]
    parts += [f"joins at {_time(node.joins)}"] if node.joins else []
    end = gone(node)
    parts += [f"from {_time(at)} {shown_speed(speed)}" for at, speed in node.changes if at < end]
    parts += [f"dies at {_time(node.dies)}"] if node.dies is not None else []
    parts += [f"leaves at {_time(node.leaves)}"] if node.leaves is not None else []
    return ", ".join(parts)


def seconds_shown(seconds: float) -> str:
    """Return a time as people write it: `71.9 s`, `12.1 min`, `5 h 12 min`, `7 d 3 h`."""
    if seconds < 600:
        return f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:.1f} min"
    hours, minutes = divmod(round(seconds / 60), 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    days, hours = divmod(round(seconds / 3600), 24)
    return f"{days:,} d {hours} h"


def _time(seconds: float) -> str:
    return f"{seconds:.4g} s" if seconds < 1e4 else f"{seconds:,.0f} s"


def _short(seconds: float) -> str:
    return f"{seconds * 1000:.4g} ms" if seconds < 1 else f"{seconds:.4g} s"


def _counted(count: int, what: str, plural: str = "s") -> str:
    return f"{count:,} {what}{'' if count == 1 else plural}"


def _listed(names: Sequence[str], what: str) -> str:
    """Return `units a, b and 3 more`."""
    shown = ", ".join(names[:NAMED])
    more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
    return f"{what}{'' if len(names) == 1 else 's'} {shown}{more}"


def _table(*columns: str, words: int = 1) -> Table:
    """Return an empty table, whose columns after the first `words` are numbers."""
    made = Table(box=SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        made.add_column(column, justify="left" if number < words else "right")
    return made
