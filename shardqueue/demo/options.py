"""What the demo trains, on how many nodes, and at what pace.

A node at speed `s` takes `batch_seconds / s` for a batch. Every process builds the plan from these values, as
the nodes of a real run would; nothing but the values travels.

Whatever the mix, `mixed` keeps the time that the work takes if nobody idles. The fastest node takes as long for
a batch as in the demo's own mix, or longer, so that all nodes together train at most `BATCHES_A_SECOND`: two cores
can compute those.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING

from shardqueue.demo import arithmetic
from shardqueue.errors import InvalidInputError
from shardqueue.units import unit_grid

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardqueue.demo.arithmetic import Slowdown
    from shardqueue.simulate import Node
    from shardqueue.units import Unit

MOST_NODES = 26
MOST_SPREAD = 100
LEAST_SPEED, MOST_SPEED = 1e-9, 1e9
BATCHES_A_SECOND = 60
SLOWED = 4
_EXAMPLE = "pass 1,0.5,0.5,0.25"


@dataclass(frozen=True, slots=True)
class Options:
    """One demo.

    Attributes:
        steps: dataset steps; each has one local batch a node.
        unit_steps: batches of the largest unit.
        speeds: one node each, relative to a node that takes `batch_seconds` for a batch.
        slows: whether the fastest node becomes `SLOWED` times slower half-way.
        batch_seconds: seconds.
        sequences: rows of a local batch.
        context: bytes a row predicts.

    Raises:
        InvalidInputError: there are too few or too many nodes, a speed is not positive or out of all range, or
            the slowest node is over `MOST_SPREAD` times slower than the fastest.
    """

    steps: int
    unit_steps: int
    speeds: tuple[float, ...] = (1.0, 0.5, 0.5, 0.25)
    slows: bool = False
    batch_seconds: float = 0.0375
    sequences: int = 4
    context: int = 64

    def __post_init__(self) -> None:
        if not 1 <= len(self.speeds) <= MOST_NODES:
            raise InvalidInputError("nodes", self.speeds, f"1 to {MOST_NODES} speeds", _EXAMPLE)
        for speed in self.speeds:
            if not LEAST_SPEED <= speed <= MOST_SPEED:
                bound = f"speeds above 0, from {LEAST_SPEED:g} to {MOST_SPEED:g}"
                raise InvalidInputError("nodes", speed, bound, _EXAMPLE)
        if min(self.speeds) * MOST_SPREAD < max(self.speeds):
            bound = (
                f"speeds of which none is over {MOST_SPREAD} times another: a fixed split would take too long"
            )
            raise InvalidInputError("nodes", self.speeds, bound, "leave the slowest out")

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes: A, B, C, ..."""
        return tuple(chr(ord("A") + node) for node in range(len(self.speeds)))

    @property
    def batches(self) -> int:
        """Local batches in the whole plan."""
        return self.steps * len(self.speeds)

    @property
    def work(self) -> float:
        """All batches, in seconds of a node of speed 1."""
        return self.batches * self.batch_seconds

    @property
    def slowdown(self) -> Slowdown | None:
        """Who slows down, when half of the time has passed that the work would take without it; or None."""
        if not self.slows:
            return None
        fastest = max(self.speeds)
        node = self.nodes[self.speeds.index(fastest)]
        return {"node": node, "at": self.work / sum(self.speeds) / 2, "speed": fastest / SLOWED}

    @property
    def by_node(self) -> dict[str, float]:
        """Each node's speed at the start."""
        return dict(zip(self.nodes, self.speeds, strict=True))

    @property
    def paces(self) -> dict[str, Node]:
        """Each node's speed as it changes in time."""
        return arithmetic.paces(self.by_node, self.slowdown)

    @property
    def limit(self) -> float:
        """Seconds that the work takes if nobody ever idles."""
        return arithmetic.limit(self.paces.values(), self.work)

    @property
    def equal_split(self) -> float:
        """Seconds that the work takes in equal slices."""
        return arithmetic.equal_split(self.paces.values(), self.work)

    def room(self, phase: str) -> int:
        """Batches of the node that trains most of a phase, if nobody idles where the queue is shared."""
        if phase == "fixed split":
            return self.steps
        most = max(node.done(self.limit) for node in self.paces.values())
        return max(1, round(most / self.batch_seconds))

    def seconds(self, phase: str) -> float:
        """Seconds that a phase takes on paper."""
        return self.equal_split if phase == "fixed split" else self.limit

    def plan(self) -> Mapping[str, Unit]:
        """Return the units both phases train: as many lanes as nodes, cut finer near the end."""
        nodes = len(self.speeds)
        return unit_grid(self.steps, self.unit_steps, nodes, taper=nodes)


FULL = Options(steps=224, unit_steps=8)
LARGEST_SHARE = 3
"""The slowest node must be able to train so many of the largest units while all train everything."""
QUICK = Options(steps=56, unit_steps=8)


def mixed(options: Options, speeds: tuple[float, ...], slows: bool = False) -> Options:
    """Return these options for nodes of other speeds.

    Raises:
        InvalidInputError: as for `Options`.
    """
    checked = replace(options, speeds=speeds, slows=slows)
    fastest = options.batch_seconds / max(options.speeds) * max(speeds)
    seconds = max(fastest, sum(speeds) / BATCHES_A_SECOND)
    work = options.work / sum(options.speeds) * sum(speeds)
    steps = round(work / seconds) // len(speeds)
    limit = steps * len(speeds) * seconds / sum(speeds)
    few = max(1, int(limit * min(speeds) / seconds / LARGEST_SHARE))
    return replace(checked, steps=steps, unit_steps=min(options.unit_steps, few), batch_seconds=seconds)


def read_speeds(text: str) -> tuple[float, ...]:
    """Read "1,0.5,1/4".

    Raises:
        InvalidInputError: a part is not a number.
    """
    return tuple(_read_speed(part.strip()) for part in text.split(","))


def _read_speed(part: str) -> float:
    try:
        return float(Fraction(part)) if "/" in part else float(part)
    except (ValueError, ZeroDivisionError, OverflowError):
        raise InvalidInputError("nodes", part, "numbers with commas between", _EXAMPLE) from None


def shown_speed(speed: float) -> str:
    """Return a speed as people write it: 2, 1, 0.75, 1/2, 1/3."""
    near = Fraction(speed).limit_denominator(64)
    exact = math.isclose(near, speed, rel_tol=1e-9)
    return str(near) if exact and 1 in (near.numerator, near.denominator) else f"{speed:.3g}"


def shown_speeds(speeds: Mapping[str, float], slowdown: Slowdown | None) -> dict[str, str]:
    """Return each node's speed as people write it; of one that slows down, both: `1 -> 1/4`."""
    shown = {node: shown_speed(speed) for node, speed in speeds.items()}
    if slowdown is not None:
        shown[slowdown["node"]] += f" -> {shown_speed(slowdown['speed'])}"
    return shown


def labels(speeds: Mapping[str, float], slowdown: Slowdown | None) -> dict[str, str]:
    """Return a label for each node, all of one length: `A 1  `, `B 1/2`."""
    made = {node: f"{node} {shown}" for node, shown in shown_speeds(speeds, slowdown).items()}
    longest = max(map(len, made.values()))
    return {node: label.ljust(longest) for node, label in made.items()}
