"""About what the requests of a run so far cost: its claims and its logs' writes, at the ratios of `doctor.costs`.

Who only looks sees neither lost races nor listings, so requests a unit are those the simulator counts for as many
learners, on a store that takes `LATENCY` seconds for a call.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from shardqueue.doctor.costs import MOST_NODES, MOST_SECONDS, Question, bill
from shardqueue.doctor.findings import Latency

if TYPE_CHECKING:
    from shardqueue.doctor.costs import Bill
    from shardqueue.prices import Price
    from shardqueue.status.standing import Standing

LATENCY = 0.05
_UNITS, _A_NODE = 2000, 20
_LEAST_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Spending:
    """What was spent, about.

    Attributes:
        requests: of all kinds.
        dollars: US dollars.
        prices: whose prices they are.
    """

    requests: int
    dollars: float
    prices: str


def spending(found: Standing, price: Price | None) -> Spending | None:
    """About what the run's requests cost so far; None where they have no price, or nothing was claimed."""
    if price is None or found.claimed <= 0:
        return None
    pages = [sighting.page for sighting in found.observation.sightings]
    a_unit = sum(page.totals.elapsed for page in pages) / found.claimed
    seconds = float(f"{min(max(a_unit, _LEAST_SECONDS), MOST_SECONDS):.1e}")
    counted = _counted(min(len(pages), MOST_NODES), seconds)
    scale = found.claimed / counted.question.units
    dollars = price.dollars(counted.writes, counted.reads, counted.listings)
    return Spending(round(counted.requests * scale), dollars * scale, price.store)


@cache
def _counted(nodes: int, unit_seconds: float) -> Bill:
    question = Question(max(_UNITS, _A_NODE * nodes), nodes, unit_seconds=unit_seconds)
    return bill(question, [Latency("any", (LATENCY,))], None)
