"""Who takes the next micro-batch of an elastic step.

The micro-batches of one optimizer step are tokens that the ranks take as they are ready. Taking greedily wastes time
at the end: a slow rank takes the last token although a fast one, still busy, would have finished it earlier. So a
rank asks `turn` first. It schedules what is left by the averages of earlier steps, and declines when the faster
ranks would finish all of that sooner than it finishes one.

Where the others stand is not communicated but replayed: since the step began, a rank of s seconds a micro-batch
has taken one every s seconds, until it had its share of the best split. The number of tokens really taken corrects
this: if more (or fewer) are left than by the replay, those are behind (ahead) who took theirs last (will take next).
The longer the replay, the less is known of a phase, and half-way through a micro-batch is the better guess. Where the
others are further behind than that (some may have no data), they are counted on for less.

Only faster ranks count, so the fastest never declines. A decline is never final: the rank asks again while it
waits, with the time for which nobody took a token, and who took none for too long no longer counts. So every token
is taken as long as one rank that may take it is alive, even if all the faster ones have no data.

`Speeds` holds the averages. They are folded from what all ranks measured, so that every rank has the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heapreplace
from math import floor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

RECENT = 0.35
"""Weight of the newest step in a rank's average."""
ALIKE = 2.0
"""How many times longer or shorter than the average a measurement may be to count as noise."""
TRIALS = 0.01
"""Share of all time that may go into trying ranks again that are too slow to take anything."""
DRIFT = 0.1
"""How fast a replayed phase loses its worth, per micro-batch."""
PATIENCE = 1.25
"""How much longer than usual a rank may have taken no token, before the others stop counting on it,"""
HASTE = 0.25
"""and this much of what one of their own would take: a pause of a fast rank must not have a slow one begin."""
LEAST = 1e-9
"""Seconds below which no micro-batch is thought to take."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Moving seconds a micro-batch of every rank; a value, to be replaced after each step.

    A measurement like the average moves it. A much shorter one replaces it: nothing runs fast by accident. A much
    longer one may be a hiccup, and is believed when the next is long too; then the shorter of the two counts. The
    first of all is judged in the same way, since it may hold a compilation: until there are two, a rank is unknown.

    A rank that takes nothing is not measured. What it is thought to take falls slowly, until it is tried again. It
    falls with the time spent in steps and not with their number, at a rate at which the trials of all such ranks
    together cost at most `TRIALS` of that time, however slow they are.

    Attributes:
        averages: measured seconds a micro-batch by rank, None while unknown.
        doubts: the newest measurement of a rank that was too long to be believed, or None.
        discounts: seconds by which an average counts less because the rank took nothing lately.
    """

    averages: tuple[float | None, ...]
    doubts: tuple[float | None, ...]
    discounts: tuple[float, ...]

    @classmethod
    def unknown(cls, ranks: int) -> Speeds:
        """Return what is known of so many ranks before the first step."""
        return cls((None,) * ranks, (None,) * ranks, (0.0,) * ranks)

    @property
    def seconds(self) -> tuple[float | None, ...]:
        """Seconds a micro-batch to count with, by rank; None for a rank that is still unknown."""
        pairs = zip(self.averages, self.discounts, strict=True)
        return tuple(None if average is None else max(average - less, LEAST) for average, less in pairs)

    def after(self, counts: Sequence[int], measured: Sequence[float | None]) -> Speeds:
        """Return the speeds after one more step.

        Args:
            counts: micro-batches by rank in that step.
            measured: mean seconds of one by rank; None from a rank that took none.
        """
        spent = max(count * (one or 0.0) for count, one in zip(counts, measured, strict=True))
        idle = sum(one is None for one in measured)
        ranks = zip(self.averages, self.doubts, self.discounts, measured, strict=True)
        folded = [
            (average, doubt, less + TRIALS * spent / idle)
            if one is None
            else (*_judged(average, doubt, less > 0.0, max(one, LEAST)), 0.0)
            for average, doubt, less, one in ranks
        ]
        averages, doubts, discounts = zip(*folded, strict=True)
        return Speeds(averages, doubts, discounts)


def turn(
    rank: int,
    left: int,
    seconds: Sequence[float | None],
    *,
    need: int,
    own: int,
    elapsed: float,
    stale: float = 0.0,
    groups: Sequence[int] | None = None,
    scarce: bool = False,
) -> int:
    """How many of the tokens left in this step a rank takes that is ready, with data in hand.

    A rank that gets 0 goes on asking until no token is left, whenever it sees that the number left has changed and
    at least every eighth of its own seconds a micro-batch, with `left`, `elapsed` and `stale` as they then are.

    Args:
        rank: who asks.
        left: tokens not taken yet, as the store has it now.
        seconds: a micro-batch by rank (`Speeds.seconds`), the same on all ranks; None where unknown.
        need: tokens of the whole step.
        own: tokens of this step that this rank has taken.
        elapsed: seconds since the step began, that is, since the last reduction.
        stale: seconds for which this rank, while it waits, has seen `left` unchanged; 0 when it first asks.
        groups: micro-batches that each rank takes at once at most; one each if not given.
        scarce: the data may end within this step, so that nobody may decline.

    Returns:
        0 to decline, or 1 to the rank's group, and never more than `left`.
    """
    most = max(0, min(left, groups[rank] if groups else 1))
    mine = seconds[rank]
    if mine is None or is_sure(rank, seconds, most, scarce):
        return most
    slowest = max(one for one in seconds if one is not None)
    known = tuple(slowest if one is None else one for one in seconds)
    groups = groups or (1,) * len(known)
    waits, trust = _replayed(rank, left, known, need, own, elapsed, groups)
    others = [
        (one, wait)
        for other, (one, group, wait) in enumerate(zip(known, groups, waits, strict=True))
        if other != rank and stale <= PATIENCE * group * one + HASTE * mine
    ]
    for take in range(1, most + 1):
        done = take * mine
        theirs = sum(max(0, floor(done / one - wait)) for one, wait in others if one < done)
        if trust * theirs > left - take:
            return take - 1
    return most


def is_sure(rank: int, seconds: Sequence[float | None], most: int, scarce: bool = False) -> bool:
    """Whether a rank takes as many as it may, `most`, however many tokens are left; for the rest see `turn`."""
    mine = seconds[rank]
    if mine is None or scarce:
        return True
    return most == 1 and all(one is None or mine <= one for one in seconds)


@lru_cache(maxsize=64)
def shares(seconds: tuple[float, ...], need: int) -> tuple[int, ...]:
    """Return the best split of so many micro-batches: how many each rank computes if the last is to end soonest.

    Args:
        seconds: a micro-batch by rank.
        need: micro-batches to split.
    """
    counts = [0] * len(seconds)
    ends = [(one, rank) for rank, one in enumerate(seconds)]
    heapify(ends)
    for _ in range(need):
        end, rank = ends[0]
        counts[rank] += 1
        heapreplace(ends, (end + seconds[rank], rank))
    return tuple(counts)


def _judged(
    average: float | None, doubt: float | None, idle: bool, one: float
) -> tuple[float | None, float | None]:
    """Return average and doubt of a rank that measured `one`, and took nothing in the step before if `idle`."""
    if average is None or one > ALIKE * average:
        return (average if doubt is None else min(doubt, one)), one
    if idle or ALIKE * one < average:
        return one, None
    return average + RECENT * (one - average), None


def _replayed(
    rank: int,
    left: int,
    seconds: tuple[float, ...],
    need: int,
    own: int,
    elapsed: float,
    groups: Sequence[int],
) -> tuple[list[float], float]:
    """Replay the step until now.

    Returns:
        How far each rank is from its next token, in micro-batches of its own, and how much of what the others are
        expected to do to count on, 0 to 1: all, unless they are behind by more than a turn each.
    """
    waits, running = [0.5] * len(seconds), []
    taken, expected = need - left - own, 0
    for other, (one, group, share) in enumerate(zip(seconds, groups, shares(seconds, need), strict=True)):
        if other == rank:
            continue
        turns, phase = divmod(elapsed / (one * group), 1.0)
        if turns * group < share:
            expected += min((int(turns) + 1) * group, share)
            running.append((phase, other, turns + 1.0))
        else:
            expected += share
    behind = expected - taken
    turn_each = sum(groups[other] for _, other, _ in running)
    trust = min(1.0, (taken + turn_each) / expected) if expected else 1.0
    running.sort(reverse=behind < 0)
    for phase, other, turns in running:
        wait = 1.0 - phase
        if behind > 0:
            wait, behind = 0.0, max(0, behind - groups[other])
        elif behind < 0:
            wait, behind = wait + 1.0, min(0, behind + groups[other])
        wait += (0.5 - wait) * DRIFT * turns / (1.0 + DRIFT * turns)
        waits[other] = wait * groups[other]
    return waits, trust
