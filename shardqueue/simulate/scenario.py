"""What is simulated, and what it comes to on paper: the limit and the fixed split.

Work is in seconds of a node of speed 1, times are in seconds from the start. A node that dies or leaves counts until
then. So the limit of what was trained is a bound from below whatever happened: nobody can train more than the speeds
of those who were there allow.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING

from shardqueue.simulate.driver import limit

if TYPE_CHECKING:
    from shardqueue.simulate import Node
    from shardqueue.units import LazyUnits

LETTERS = 26


@dataclass(frozen=True, slots=True)
class FixedSplit:
    """An equal, infinitely fine split made up front.

    Attributes:
        makespan: seconds until the last node is done, or gone.
        lost: batches that nobody trains, because their node is gone.
    """

    makespan: float
    lost: float


@dataclass(frozen=True, slots=True)
class Scenario:
    """Nodes and their work.

    Attributes:
        units: the plan.
        nodes: who trains.
        batch_seconds: what a batch takes a node of speed 1.
        latency: seconds a mailbox call takes, from and to; each is drawn evenly from between.
        log_every: seconds between two writes of a node's log.
        seed: of everything that is drawn.
    """

    units: LazyUnits
    nodes: tuple[Node, ...]
    batch_seconds: float
    latency: tuple[float, float]
    log_every: float
    seed: int

    @property
    def batches(self) -> int:
        """Batches in the whole plan."""
        return self.units.steps * self.units.value(0).lanes

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the nodes: A, B, C, ..., or numbers from 1 where letters do not suffice."""
        return tuple(node_name(number, len(self.nodes)) for number in range(len(self.nodes)))

    def limit(self, batches: int) -> float:
        """When so many batches are done if no node ever idles; infinity when the nodes are gone before."""
        return limit([while_there(node) for node in self.nodes], batches * self.batch_seconds)

    def fixed_split(self) -> FixedSplit:
        """What an equal split made up front comes to."""
        share = self.batches * self.batch_seconds / len(self.nodes)
        makespan = lost = 0.0
        for node in self.nodes:
            finish, end = node.finish(node.joins, share), gone(node)
            makespan = max(makespan, min(finish, end))
            lost += 0.0 if finish <= end else share - while_there(node).done(end)
        return FixedSplit(makespan, lost / self.batch_seconds)


def node_name(number: int, nodes: int) -> str:
    """Return what the `number`-th node of so many is called, from 0."""
    return chr(ord("A") + number) if nodes <= LETTERS else str(number + 1)


def gone(node: Node) -> float:
    """When a node dies or leaves; infinity if it stays."""
    return min(inf if end is None else end for end in (node.dies, node.leaves))


def while_there(node: Node) -> Node:
    """Return the same node with its end as a change to speed 0."""
    end = gone(node)
    if end == inf:
        return node
    changes = (*(change for change in node.changes if change[0] < end), (end, 0.0))
    return replace(node, changes=changes, dies=None, leaves=None)
