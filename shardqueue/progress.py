"""How far the ranks are that step together, as all of them know it alike."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankState:
    """What a rank has done in this run; seconds by its monotonic clock.

    Attributes:
        batches, samples: trained.
        waited: for data.
        elapsed: since its first batch was asked for.
        units: of this pass, claimed by it first.
    """

    rank: int
    learner: str
    batches: int
    samples: int
    waited: float
    elapsed: float
    units: int


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all ranks know alike before a step.

    Attributes:
        epoch: number of the pass.
        step, steps: of the pass: this one from 0, and how many there are.
        batches, total: of the pass, on all ranks: handed out before this step, and in all.
        progress: dataset steps before this one, over all epochs; the same on every rank, and it never goes back.
        repeated: batches handed out again so far in the run, on all ranks.
        units: in the plan.
        ranks: as of the last agreement, at most 16 steps before.
        each: batches of a step, on all ranks.
    """

    epoch: int
    step: int
    steps: int
    batches: int
    total: int
    progress: int
    repeated: int
    units: int
    ranks: tuple[RankState, ...]
    each: int
