"""Elastic steps in virtual time: what the policy of `turns` makes of ranks of any speed.

It drives the policy itself and has no copy of it: ranks ask `turn` as the engine's do, one that declined asks again,
and the averages are those of `Speeds`. What a store and a reduction cost is left out. `greedy` and `equal_split` are
policies to compare with, and the limit of a step is the best split into whole micro-batches by somebody who knows
everything but the noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from math import exp, inf
from random import Random
from typing import TYPE_CHECKING, Protocol

from shardqueue.errors import InvalidInputError
from shardqueue.turns import Speeds, turn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LOOK = 0.125
"""Share of its own seconds a micro-batch after which a rank that declined asks again."""
FOREVER = 1000
"""Micro-batches of the slowest rank for which nobody may take a token before the step counts as stuck."""


class Policy(Protocol):
    """What decides: see `turns.turn`."""

    def __call__(
        self,
        rank: int,
        left: int,
        seconds: Sequence[float | None],
        *,
        need: int,
        own: int,
        elapsed: float,
        stale: float,
        groups: Sequence[int],
    ) -> int:
        """How many tokens the rank takes."""


def greedy(rank: int, left: int, *_: object, groups: Sequence[int], **__: object) -> int:
    """Take whatever there is."""
    return min(left, groups[rank])


def equal_split(
    rank: int, left: int, seconds: Sequence[float | None], *, need: int, own: int, **_: object
) -> int:
    """Take as many as everybody else, as plain data-parallel training does."""
    more, rest = divmod(need, len(seconds))
    return min(left, 1) if own < more + (rank < rest) else 0


@dataclass(frozen=True, slots=True)
class Step:
    """What became of one step.

    Attributes:
        seconds: until the last micro-batch was done.
        counts: micro-batches by rank.
        best: seconds of the best split with perfect knowledge, without noise.
    """

    seconds: float
    counts: tuple[int, ...]
    best: float


@dataclass(frozen=True, slots=True)
class Course:
    """What the ranks are like in one step.

    Attributes:
        seconds: a micro-batch by rank.
        starts: seconds into the step at which each rank is ready; all at once if not given.
        stock: micro-batches each rank has data for; any number if not given.
    """

    seconds: Sequence[float]
    starts: Sequence[float] | None = None
    stock: Sequence[float] | None = None


def simulate_steps(
    course: Callable[[int], Course],
    micro_batches: int,
    steps: int,
    *,
    noise: float = 0.0,
    groups: Sequence[int] | None = None,
    policy: Policy = turn,
    seed: int = 0,
) -> list[Step]:
    """Simulate steps one after the other, from a start at which no speed is known.

    Args:
        course: what the ranks are like in a step, by its number from 0.
        micro_batches: of each step.
        steps: how many.
        noise: standard deviation of the logarithm of what a micro-batch takes; 0.05 is about 5 %.
        groups: micro-batches each rank takes at once at most; one each if not given.
        policy: who takes.
        seed: of the noise, and of who comes first among ranks that are ready at once.

    Raises:
        InvalidInputError: nobody takes what is left of a step, for want of data or by the policy.
    """
    draws = Random(seed)
    speeds = Speeds.unknown(len(course(0).seconds))
    outcome = []
    for number in range(steps):
        one = _Step(course(number), micro_batches, speeds, groups, policy, noise, draws)
        step, busy = one.run()
        outcome.append(step)
        measured = [took / count if count else None for took, count in zip(busy, step.counts, strict=True)]
        speeds = speeds.after(step.counts, measured)
    return outcome


def reached(outcome: Sequence[Step]) -> float:
    """Return the best splits' time over the time the steps took: 1 is as good as knowing everything."""
    return sum(step.best for step in outcome) / sum(step.seconds for step in outcome)


class _Step:
    """One step: a queue of who asks when."""

    def __init__(
        self,
        course: Course,
        need: int,
        speeds: Speeds,
        groups: Sequence[int] | None,
        policy: Policy,
        noise: float,
        draws: Random,
    ) -> None:
        ranks = len(course.seconds)
        self._course, self._need, self._known = course, need, speeds.seconds
        self._groups = groups or (1,) * ranks
        self._policy, self._noise, self._draws = policy, noise, draws
        self._starts = course.starts or (0.0,) * ranks
        self._stock = list(course.stock or (inf,) * ranks)
        self._counts, self._busy = [0] * ranks, [0.0] * ranks
        self._seen: list[tuple[int, float] | None] = [None] * ranks

    def run(self) -> tuple[Step, list[float]]:
        """Return what became of the step, and each rank's seconds at work."""
        left, end, taken_at = self._need, 0.0, 0.0
        asks = [(start, self._draws.random(), rank) for rank, start in enumerate(self._starts) if start < inf]
        heapify(asks)
        while left:
            now, _, rank = heappop(asks) if asks else (inf, 0.0, 0)
            if now - taken_at > FOREVER * max(self._course.seconds):
                raise InvalidInputError(
                    "left",
                    left,
                    "taken by a rank that has data",
                    "give some rank more stock, or another policy",
                )
            take = self._asked(rank, left, now)
            if take:
                left -= take
                taken_at, soon = now, now + self._work(rank, take)
                end = max(end, soon)
                self._seen[rank] = None
            else:
                soon = now + LOOK * (self._known[rank] or self._course.seconds[rank])
            if self._stock[rank] > 0:
                heappush(asks, (soon, self._draws.random(), rank))
        return Step(end, tuple(self._counts), self._best()), self._busy

    def _asked(self, rank: int, left: int, now: float) -> int:
        if self._stock[rank] <= 0:
            return 0
        seen = self._seen[rank]
        if seen is None or seen[0] != left:
            self._seen[rank] = seen = (left, now)
        own, stale = self._counts[rank], now - seen[1]
        asked = self._policy(
            rank, left, self._known, need=self._need, own=own, elapsed=now, stale=stale, groups=self._groups
        )
        return int(min(asked, self._stock[rank]))

    def _work(self, rank: int, take: int) -> float:
        noise = self._noise
        took = sum(
            self._course.seconds[rank] * (exp(self._draws.gauss(-noise * noise / 2, noise)) if noise else 1.0)
            for _ in range(take)
        )
        self._counts[rank] += take
        self._busy[rank] += took
        self._stock[rank] -= take
        return took

    def _best(self) -> float:
        seconds, stock = self._course.seconds, list(self._course.stock or (inf,) * len(self._counts))
        ends = [(start + seconds[rank], rank) for rank, start in enumerate(self._starts) if stock[rank]]
        heapify(ends)
        last = 0.0
        for _ in range(self._need):
            end, rank = ends[0]
            last = max(last, end)
            stock[rank] -= 1
            heapreplace(ends, (end + seconds[rank] if stock[rank] > 0 else inf, rank))
        return last
