"""What a plan would cost on this store: the driver in virtual time counts its claims, a table has the prices.

Logs are written by the clock, one every five seconds of a node's training, so they are not counted but computed.

A large plan is counted on its first thousands of units, with as many nodes, and scaled: requests a unit hardly
depend on the number of units (they fall a little), so the answer errs to the dear side.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from shardqueue.errors import InvalidInputError
from shardqueue.learner import LOG_EVERY
from shardqueue.prices import AS_OF

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardqueue.doctor.findings import Latency
    from shardqueue.prices import Price

MOST_NODES = 512
MOST_SECONDS = 1e6
_NEVER = 1e12
"""Seconds between two logs of a simulated node: it writes a first and a last one."""
_SIMULATED, _A_NODE = 2_000, 20
"""Units that are simulated at least (where the plan has them), and a node."""
_BATCHES = 4
"""Batches of a simulated unit."""


@dataclass(frozen=True, slots=True)
class Question:
    """A plan to ask about.

    Attributes:
        units: of the plan.
        nodes: that train, alike.
        epochs: trips over the plan.
        unit_seconds: what training a unit takes one node.

    Raises:
        InvalidInputError: one of them is not positive, or there are more than `MOST_NODES` nodes.
    """

    units: int
    nodes: int = 8
    epochs: int = 1
    unit_seconds: float = 10.0

    def __post_init__(self) -> None:
        for name in ("units", "nodes", "epochs", "unit_seconds"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise InvalidInputError(name, value, "more than 0", f"pass --{name.replace('_', '-')} 10")
        if self.unit_seconds > MOST_SECONDS:
            bound = f"at most {MOST_SECONDS:,.0f}"
            raise InvalidInputError("unit_seconds", self.unit_seconds, bound, "cut the plan in smaller units")
        if self.nodes > MOST_NODES:
            bound = f"at most {MOST_NODES}"
            raise InvalidInputError(
                "nodes", self.nodes, bound, "ask about fewer: requests a unit hardly change"
            )

    @property
    def seconds(self) -> float:
        """Of training, all nodes together: while they train they write logs."""
        return self.units * self.epochs * self.unit_seconds


@dataclass(frozen=True, slots=True)
class Bill:
    """Requests and dollars of a plan.

    Attributes:
        question: the plan.
        simulated: units that were counted.
        writes: creates and overwrites.
        reads: of one object.
        listings: pages of keys.
        price: at what they are charged, None where there is no price.
    """

    question: Question
    simulated: int
    writes: int
    reads: int
    listings: int
    price: Price | None

    @property
    def requests(self) -> int:
        """Of all kinds."""
        return self.writes + self.reads + self.listings

    @property
    def dollars(self) -> float | None:
        """US dollars, or None where there is no price."""
        return None if self.price is None else self.price.dollars(self.writes, self.reads, self.listings)

    def shown(self) -> str:
        """All of it in a sentence."""
        asked = self.question
        plan = (
            f"{asked.units:,} units of {asked.unit_seconds:g} s, {asked.nodes} nodes, {_epochs(asked.epochs)}"
        )
        counted = f", counted on {self.simulated:,} units" if self.simulated < asked.units else ""
        a_unit = self.requests / (asked.units * asked.epochs)
        text = f"{self.requests:,} requests, {a_unit:.2f} a unit ({plan}{counted})"
        if self.price is None or self.dollars is None:
            return f"{text}; requests are free here, or their price is not known"
        return f"{text}; ${self.dollars:,.2f} at prices of {self.price.store}, {AS_OF}"


def _epochs(number: int) -> str:
    return "1 epoch" if number == 1 else f"{number} epochs"


def bill(question: Question, latencies: Sequence[Latency], price: Price | None, seed: int = 0) -> Bill:
    """Count the requests of a plan on a store of these latencies."""
    from shardqueue.simulate import Node, simulate
    from shardqueue.units import unit_grid

    simulated = min(question.units, max(_SIMULATED, _A_NODE * question.nodes))
    seen = [second for latency in latencies for second in latency.seconds] or [0.0]
    draw = Random(seed)
    outcome = simulate(
        unit_grid(simulated * _BATCHES, _BATCHES, taper=False),
        [Node()] * question.nodes,
        batch_seconds=question.unit_seconds / _BATCHES,
        latency=lambda: draw.choice(seen),
        log_every=_NEVER,
        seed=seed,
    )
    made = {name: outcome.requests.get(name, 0) for name in ("PutIfAbsent", "Get", "List")}
    scale = question.units / simulated * question.epochs
    return Bill(
        question,
        simulated,
        writes=round(made["PutIfAbsent"] * scale + question.seconds / LOG_EVERY) + 2 * question.nodes,
        reads=round(made["Get"] * scale),
        listings=round(made["List"] * scale),
        price=price,
    )
