"""What the demo trains, on how many nodes, and at what pace.

A node at speed `s` takes `batch_seconds / s` for a batch. Every process builds the plan from these values, as
the nodes of a real run would; nothing but the values travels.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from shardqueue.units import unit_grid

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardqueue.units import Unit


@dataclass(frozen=True, slots=True)
class Options:
    """One demo.

    Attributes:
        steps: dataset steps; each has one local batch a node.
        unit_steps: batches of the largest unit.
        speeds: one node each, relative to a node that takes `batch_seconds` for a batch.
        batch_seconds: seconds.
        sequences: rows of a local batch.
        context: bytes a row predicts.
    """

    steps: int
    unit_steps: int
    speeds: tuple[float, ...] = (1.0, 0.5, 0.5, 0.25)
    batch_seconds: float = 0.025
    sequences: int = 4
    context: int = 64

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes: A, B, C, ..."""
        return tuple(chr(ord("A") + node) for node in range(len(self.speeds)))

    @property
    def batches(self) -> int:
        """Local batches in the whole plan."""
        return self.steps * len(self.speeds)

    def plan(self) -> Mapping[str, Unit]:
        """Return the units both phases train: as many lanes as nodes, cut finer near the end."""
        nodes = len(self.speeds)
        return unit_grid(self.steps, self.unit_steps, nodes, taper=nodes)


FULL = Options(steps=320, unit_steps=8)
QUICK = Options(steps=80, unit_steps=4)


def shown_speed(speed: float) -> str:
    """Return a speed as people write it: 1, 1/2, 1/4."""
    return str(Fraction(speed).limit_denominator(64))
