"""What given speeds come to on paper: the limit, and the makespans of splits made up front.

Work is in seconds of a node of speed 1, times are in seconds from the start. Nothing here is measured, and nothing
that is measured is computed here. A split is taken to be infinitely fine: real ones are of whole batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from shardqueue.simulate import Node

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


class Slowdown(TypedDict):
    """From second `at` on, `node` has this `speed`."""

    node: str
    at: float
    speed: float


def paces(speeds: Mapping[str, float], slowdown: Slowdown | None) -> dict[str, Node]:
    """Return each node's speed as it changes in time."""
    return {
        node: Node(speed, changes=((slowdown["at"], slowdown["speed"]),))
        if slowdown is not None and slowdown["node"] == node
        else Node(speed)
        for node, speed in speeds.items()
    }


def limit(nodes: Collection[Node], work: float) -> float:
    """When `work` is done if nobody ever idles: where the integral of all speeds reaches it."""
    at, rate = 0.0, sum(node.speed for node in nodes)
    for change in sorted(change for node in nodes for change, _ in node.changes):
        if _done(nodes, change) >= work:
            break
        at, rate = change, sum(_speed(node, change) for node in nodes)
    return at + (work - _done(nodes, at)) / rate


def equal_split(nodes: Collection[Node], work: float) -> float:
    """When the last node is done if each gets an equal slice."""
    return max(node.finish(0.0, work / len(nodes)) for node in nodes)


def early_split(nodes: Collection[Node], work: float) -> float:
    """When the last node is done if each gets a slice by the speed it has at the start."""
    total = sum(node.speed for node in nodes)
    return max(node.finish(0.0, work * node.speed / total) for node in nodes)


def slowest(nodes: Collection[Node]) -> float:
    """Return the lowest speed that any of them ever has."""
    return min(speed for node in nodes for speed in (node.speed, *(speed for _, speed in node.changes)))


def _done(nodes: Collection[Node], until: float) -> float:
    return sum(node.done(until) for node in nodes)


def _speed(node: Node, at: float) -> float:
    return [node.speed, *(speed for change, speed in node.changes if change <= at)][-1]
