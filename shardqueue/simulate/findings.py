"""What a simulated run came to: every number that is shown, and what keeps it from being a good one.

A batch that nobody trained was *lost* when its unit was claimed (its node died, or gave it back when nobody was left
to take it), else it was *left over*: all nodes were gone. A batch trained twice is a fault of the library, unless the
run broke off and a late node opened another one, which begins again.

The driver counts as idle all time before the makespan in which a node trains nothing. What of it lies before the node
came or after it went is *away* here.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from shardqueue.records import RUNS, RunKeys
from shardqueue.simulate.scenario import gone, while_there

if TYPE_CHECKING:
    from shardqueue.mailbox import Mailbox
    from shardqueue.simulate import Outcome
    from shardqueue.simulate.scenario import FixedSplit, Scenario


@dataclass(frozen=True, slots=True)
class Part:
    """One node's part in the run.

    Attributes:
        name: of the node.
        batches: trained.
        at_limit: batches it would have trained at the limit.
        units: claimed.
        busy: seconds in which it trained.
        idle: seconds of the makespan in which it was there and did not.
        away: seconds of the makespan before it joined and after it died or left.
    """

    name: str
    batches: int
    at_limit: float
    units: int
    busy: float
    idle: float
    away: float


@dataclass(frozen=True, slots=True)
class Findings:
    """What a run came to.

    Attributes:
        makespan: seconds until the last batch was trained.
        limit: seconds in which as many batches are trained if no node ever idles.
        fixed_split: what an equal split made up front comes to.
        trained: distinct batches.
        lost: batches that were claimed and never trained, by unit.
        left_over: batches that nobody claimed.
        repeated: how often a batch was trained that had been trained before.
        runs: how many were opened: more than 1 after the first broke off.
        requests: calls to the store by verb.
        claim_requests: of those, what claiming asked: neither finding the run nor writing logs.
        drift: the largest distance between two learners at one time, as a share of the plan.
        errors: with which a node ended.
        parts: each node's.
    """

    makespan: float
    limit: float
    fixed_split: FixedSplit
    trained: int
    lost: dict[str, int]
    left_over: int
    repeated: int
    runs: int
    requests: dict[str, int]
    claim_requests: int
    drift: float
    errors: tuple[str, ...]
    parts: tuple[Part, ...]

    @property
    def ratio(self) -> float | None:
        """Makespan over the limit; None when nothing was trained."""
        return self.makespan / self.limit if self.limit > 0 else None

    @property
    def faulty(self) -> bool:
        """Whether a batch was trained twice, or a node ended with an error."""
        return bool(self.repeated or self.errors)

    def as_json(self) -> dict[str, object]:
        """All of it, as JSON has it."""
        return {**asdict(self), "ratio": self.ratio}


def find(scenario: Scenario, outcome: Outcome, mailbox: Mailbox) -> Findings:
    """Work out what a run came to.

    Args:
        scenario: what was run.
        outcome: what the driver counted.
        mailbox: what the run was made in.
    """
    trained = len(outcome.trained)
    limit = scenario.limit(trained) if trained else 0.0
    runs = len(mailbox.list(RUNS))
    lost, left_over = _missing(scenario, outcome, mailbox, runs) if trained < scenario.batches else ({}, 0)
    return Findings(
        makespan=outcome.makespan,
        limit=limit,
        fixed_split=scenario.fixed_split(),
        trained=trained,
        lost=lost,
        left_over=left_over,
        repeated=sum(outcome.batches) - trained,
        runs=runs,
        requests=dict(outcome.requests),
        claim_requests=outcome.claim_requests,
        drift=outcome.drift,
        errors=tuple(f"{type(error).__name__}: {error}" for error in outcome.errors),
        parts=tuple(
            _part(scenario, outcome, number, name, limit) for number, name in enumerate(scenario.names)
        ),
    )


def _part(scenario: Scenario, outcome: Outcome, number: int, name: str, limit: float) -> Part:
    node, makespan, idle = scenario.nodes[number], outcome.makespan, outcome.idle[number]
    away = min(makespan, node.joins) + max(0.0, makespan - max(gone(node), node.joins))
    return Part(
        name=name,
        batches=outcome.batches[number],
        at_limit=while_there(node).done(limit) / scenario.batch_seconds,
        units=outcome.units[number],
        busy=makespan - idle,
        idle=max(0.0, idle - away),
        away=min(away, idle),
    )


def _missing(scenario: Scenario, outcome: Outcome, mailbox: Mailbox, runs: int) -> tuple[dict[str, int], int]:
    """Return what was lost, by unit, and how much was left over."""
    trained = Counter(unit for unit, _ in outcome.trained)
    passes = [RunKeys(str(run)).pass_keys() for run in range(1, runs + 1)]
    lost, left_over = {}, 0
    for position, unit in enumerate(scenario.units):
        missing = scenario.units.batches(position) - trained[unit]
        if not missing:
            continue
        if trained[unit] or any(mailbox.get(keys.claim(unit)) is not None for keys in passes):
            lost[unit] = missing
        else:
            left_over += missing
    return lost, left_over
