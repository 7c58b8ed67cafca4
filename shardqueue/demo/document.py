"""The demo's JSON file, and everything that is computed from it.

The file holds what was measured (who trained which batch, from when to when) and what was asked for (units,
speeds, the pace). `ratios` derives every number of the table from those two, and checks them: each batch of
each unit must have been trained exactly once in each phase. `verdict` says what keeps the demo from passing.

Times are in seconds from the common start of the phase. A node is busy while it trains a batch and idle for the
rest of the makespan, which ends with the last batch of all. The limit is all work divided by all speeds.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TypedDict

FIXED_ABOVE = 1.9
SHARED_BELOW = 1.15
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
    """The whole file, but for `results`, which is computed from the rest."""

    format: str
    arguments: dict[str, object]
    machine: dict[str, object]
    batch_seconds: float
    speeds: dict[str, float]
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
    """One phase, from its records; `overran` counts batches that took over 5 % longer than their pace."""

    name: str
    makespan: float
    limit: float
    ratio: float
    overran: int
    shares: tuple[Share, ...]
    faults: tuple[str, ...]


def ratios(document: Document) -> list[Outcome]:
    """Compute each phase's outcome from its records."""
    return [_outcome(document, phase) for phase in document["phases"]]


def _outcome(document: Document, phase: PhaseEntry) -> Outcome:
    speeds, seconds, batches = document["speeds"], document["batch_seconds"], phase["batches"]
    makespan = max((record["end"] for record in batches), default=0.0)
    limit = sum(unit["count"] for unit in document["units"].values()) * seconds / sum(speeds.values())
    overran = sum(
        record["end"] - record["start"] > OVERRUN * seconds / speeds[record["node"]] for record in batches
    )
    return Outcome(
        name=phase["name"],
        makespan=makespan,
        limit=limit,
        ratio=makespan / limit,
        overran=overran,
        shares=tuple(_share(node, batches, makespan) for node in speeds),
        faults=tuple(_faults(document["units"], batches)),
    )


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
    fixed, shared = outcomes
    if fixed.ratio <= FIXED_ABOVE:
        wrong.append(f"{fixed.name}: {fixed.ratio:.2f} times the limit, not above {FIXED_ABOVE}. {_BUSY}")
    if shared.ratio >= SHARED_BELOW:
        wrong.append(f"{shared.name}: {shared.ratio:.2f} times the limit, not below {SHARED_BELOW}. {_BUSY}")
    return wrong


_BUSY = "A machine busy with other work does that; run the demo again when it is quiet."


def encode(document: Document, results: object) -> str:
    """Return the file's text: indented, but for units and batches, one a line."""
    holes: list[str] = []

    def hole(line: object) -> str:
        holes.append(json.dumps(line))
        return f"<{len(holes) - 1}>"

    phases = [
        {**phase, "batches": [hole(record) for record in phase["batches"]]} for phase in document["phases"]
    ]
    units = {name: hole(unit) for name, unit in document["units"].items()}
    text = json.dumps({**document, "units": units, "phases": phases, "results": results}, indent=1)
    return re.sub(r'"<(\d+)>"', lambda match: holes[int(match[1])], text) + "\n"
