"""How many steps of how many micro-batches the ranks train, and at what pace.

A rank at speed `s` takes `batch_seconds / s` for a micro-batch. What DDP and elastic steps come to on paper follows:
in DDP the slowest rank computes as many as any other, and a step cannot be shorter than its best split into whole
micro-batches, in which the last rank ends soonest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from shardqueue.turns import shares

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardqueue.demo.arithmetic import Slowdown

DDP: Literal["DDP"] = "DDP"
ELASTIC: Literal["elastic steps"] = "elastic steps"
PHASES = (DDP, ELASTIC)


@dataclass(frozen=True, slots=True)
class ElasticOptions:
    """One demo.

    Attributes:
        steps: optimizer steps of a phase.
        per_rank: micro-batches of a step that each rank computes in DDP.
        speeds: one rank each, relative to one that takes `batch_seconds` for a micro-batch.
        batch_seconds: seconds.
        batch_size: rows of a micro-batch.
        unit_batches: micro-batches that are claimed at once, at most.
    """

    steps: int
    per_rank: int = 9
    speeds: tuple[float, ...] = (1.0, 0.5, 0.5, 0.25)
    batch_seconds: float = 0.02
    batch_size: int = 8
    unit_batches: int = 8

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the ranks: A, B, C, ..."""
        return tuple(chr(ord("A") + rank) for rank in range(len(self.speeds)))

    @property
    def by_node(self) -> dict[str, float]:
        """Each rank's speed."""
        return dict(zip(self.nodes, self.speeds, strict=True))

    @property
    def slowdown(self) -> Slowdown | None:
        """Nobody slows down."""
        return None

    @property
    def micro_batches(self) -> int:
        """Of a step, on all ranks together."""
        return self.per_rank * len(self.speeds)

    @property
    def batches(self) -> int:
        """Micro-batches of a phase."""
        return self.steps * self.micro_batches

    @property
    def rows(self) -> int:
        """Samples of a phase."""
        return self.batches * self.batch_size

    def room(self, phase: str) -> int:
        """Micro-batches of the rank that has most of a phase."""
        return self.steps * max(self.split(phase))

    def seconds(self, phase: str) -> float:
        """Seconds that a phase takes on paper."""
        return self.steps * step_seconds(self.speeds, self.split(phase), self.batch_seconds)

    def split(self, phase: str) -> tuple[int, ...]:
        """Micro-batches of a step by rank, on paper."""
        if phase == DDP:
            return (self.per_rank,) * len(self.speeds)
        return best_split(self.speeds, self.micro_batches)


def best_split(speeds: Sequence[float], micro_batches: int) -> tuple[int, ...]:
    """Return how many micro-batches each rank computes if the last is to end soonest."""
    return shares(tuple(1.0 / speed for speed in speeds), micro_batches)


def step_seconds(speeds: Sequence[float], split: Sequence[int], batch_seconds: float) -> float:
    """Return when the last rank has computed its part of a step."""
    return max(count * batch_seconds / speed for count, speed in zip(split, speeds, strict=True))


FULL = ElasticOptions(steps=36)
QUICK = ElasticOptions(steps=8)
