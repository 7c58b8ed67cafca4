"""The demo's JSON file, and everything that is computed from it.

The file holds what was measured (who trained which batch, from when to when) and what was asked for (units,
speeds, the pace). `ratios` derives every number of the table from those two, and checks them: each batch of
each unit must have been trained exactly once in each phase. `computed` has what the speeds come to on paper.
`verdict` says what keeps the demo from passing.

Times are in seconds from the common start of the phase, when each node holds its first batch. A node is busy while
it trains a batch and idle for the rest of the makespan, which ends with the last batch of all. The limit is all
work divided by all speeds, as they change in time.

The fixed split's ratio must be what it is on paper, within `FIXED_WITHIN` (a busy machine makes it more). The shared
queue's must stay below `SHARED_BELOW`, or, where batches are so long that nobody could promise that, below
`SHARED_OVER` and two of the longest: who claims a batch while training one ends it at most two after the limit.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

from shardqueue.demo import arithmetic
from shardqueue.demo.lines import Lines

if TYPE_CHECKING:
    from shardqueue.demo.arithmetic import Slowdown
    from shardqueue.simulate import Node

FIXED_WITHIN = 0.85, 1.25
SHARED_BELOW = 1.15
SHARED_OVER = 1.05
OVERRUN = 1.05


class Record(TypedDict):
    """One trained batch: batch `index` of `unit`, which is dataset step `step`."""

    pid: int
    node: str
    unit: str
    index: int
    step: int
    start: float
    end: float


class UnitEntry(TypedDict):
    """A unit of the plan."""

    first: int
    count: int
    lane: int
    lanes: int


class PhaseEntry(TypedDict):
    """One way of handing out the units."""

    name: str
    loss: float
    batches: list[Record]


class Document(TypedDict):
    """The whole file, but for `results` and `computed`, which follow from the rest."""

    format: str
    arguments: dict[str, object]
    machine: dict[str, object]
    batch_seconds: float
    speeds: dict[str, float]
    slowdown: Slowdown | None
    mailbox: str | None
    units: dict[str, UnitEntry]
    loss_before: float
    phases: list[PhaseEntry]


@dataclass(frozen=True, slots=True)
class Share:
    """What one node did in a phase; `busy` and `idle` are seconds."""

    node: str
    units: int
    batches: int
    busy: float
    idle: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """One phase, from its records.

    Attributes:
        name: of the phase.
        makespan: seconds until the last batch was trained.
        limit: seconds if nobody ever idled.
        ratio: makespan over limit.
        above: the ratio must be more than this.
        below: the ratio must be less than this.
        overran: batches that took over 5 % longer than their pace.
        shares: what each node did.
        faults: what is wrong with the records.
    """

    name: str
    makespan: float
    limit: float
    ratio: float
    above: float
    below: float
    overran: int
    shares: tuple[Share, ...]
    faults: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Computed:
    """What the speeds come to on paper, in seconds: not run.

    Attributes:
        limit: all work, if nobody ever idles.
        equal_split: each node gets the same number of batches.
        early_split: each node gets batches by its speed at the start.
    """

    limit: float
    equal_split: float
    early_split: float


def computed(document: Document) -> Computed:
    """Compute what the speeds come to on paper."""
    nodes, work = _paces(document).values(), _work(document)
    return Computed(
        arithmetic.limit(nodes, work),
        arithmetic.equal_split(nodes, work),
        arithmetic.early_split(nodes, work),
    )


def ratios(document: Document) -> list[Outcome]:
    """Compute each phase's outcome from its records."""
    return [_outcome(document, phase) for phase in document["phases"]]


def _paces(document: Document) -> dict[str, Node]:
    return arithmetic.paces(document["speeds"], document["slowdown"])


def _work(document: Document) -> float:
    return sum(unit["count"] for unit in document["units"].values()) * document["batch_seconds"]


def _outcome(document: Document, phase: PhaseEntry) -> Outcome:
    nodes, batches = _paces(document), phase["batches"]
    makespan = max((record["end"] for record in batches), default=0.0)
    limit = computed(document).limit
    above, below = _bounds(document, phase["name"])
    return Outcome(
        name=phase["name"],
        makespan=makespan,
        limit=limit,
        ratio=makespan / limit,
        above=above,
        below=below,
        overran=sum(_overran(record, nodes, document["batch_seconds"]) for record in batches),
        shares=tuple(_share(node, batches, makespan) for node in nodes),
        faults=tuple(_faults(document["units"], batches)),
    )


def _bounds(document: Document, phase: str) -> tuple[float, float]:
    paper = computed(document)
    if phase == "fixed split":
        least, most = FIXED_WITHIN
        ratio = paper.equal_split / paper.limit
        return ratio * least, ratio * most
    longest = document["batch_seconds"] / arithmetic.slowest(_paces(document).values())
    return 0.0, max(SHARED_BELOW, SHARED_OVER + 2 * longest / paper.limit)


def _overran(record: Record, nodes: dict[str, Node], seconds: float) -> bool:
    start, end = record["start"], record["end"]
    return end - start > OVERRUN * (nodes[record["node"]].finish(start, seconds) - start)


def _share(node: str, batches: list[Record], makespan: float) -> Share:
    mine = [record for record in batches if record["node"] == node]
    busy = sum(record["end"] - record["start"] for record in mine)
    units = len({record["unit"] for record in mine})
    return Share(node, units, len(mine), busy=round(busy, 6), idle=round(makespan - busy, 6))


def _faults(units: dict[str, UnitEntry], batches: list[Record]) -> list[str]:
    expected = {
        (name, index, unit["first"] + index) for name, unit in units.items() for index in range(unit["count"])
    }
    trained = Counter((record["unit"], record["index"], record["step"]) for record in batches)
    pids = defaultdict(set)
    for record in batches:
        pids[record["node"]].add(record["pid"])
    kinds = {
        "not trained": sorted(expected - trained.keys()),
        "trained more than once": sorted(key for key, times in trained.items() if times > 1),
        "not in the plan": sorted(trained.keys() - expected),
    }
    found = [
        f"{len(keys)} of {len(expected)} batches {kind}, the first of them batch {keys[0][1]} of {keys[0][0]}"
        for kind, keys in kinds.items()
        if keys
    ]
    if len(set().union(*pids.values())) != sum(map(len, pids.values())):
        found.append("one process trained as two nodes")
    return found


def verdict(outcomes: list[Outcome]) -> list[str]:
    """Return why the demo did not show what it should; nothing when it did."""
    wrong = [f"{outcome.name}: {fault}" for outcome in outcomes for fault in outcome.faults]
    for outcome in outcomes:
        came_to = f"{outcome.name}: {outcome.ratio:.2f} times the limit"
        if outcome.ratio <= outcome.above:
            wrong.append(f"{came_to}, not above {_shown(outcome.above)}. {BUSY}")
        elif outcome.ratio >= outcome.below:
            wrong.append(f"{came_to}, not below {_shown(outcome.below)}. {BUSY}")
    return wrong


def _shown(bound: float) -> str:
    return f"{math.floor(bound * 1000 + 0.5) / 1000:g}"


BUSY = "A machine busy with other work does that; run the demo again when it is quiet."


def spans(phase: PhaseEntry, node: str) -> list[tuple[float, float]]:
    """Return when a node was busy in a phase: (start, end) of each batch."""
    return [(record["start"], record["end"]) for record in phase["batches"] if record["node"] == node]


def encode(document: Document, results: object, paper: object) -> str:
    """Return the file's text: indented, but for units and batches, one a line."""
    lines = Lines()
    phases = [
        {**phase, "batches": [lines.line(record) for record in phase["batches"]]}
        for phase in document["phases"]
    ]
    units = {name: lines.line(unit) for name, unit in document["units"].items()}
    return lines.text({**document, "units": units, "phases": phases, "results": results, "computed": paper})
