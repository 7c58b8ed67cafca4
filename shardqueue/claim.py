"""One attempt at one unit, as the learner that claims it sees it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class Owner:
    """In whose name claims are made."""

    learner: str
    instance: str
    worker: str = "main"


class State(Enum):
    """How far a claim has come."""

    ASKED = "asked"
    WON = "won"
    OURS = "ours"
    LOST = "lost"


@dataclass(slots=True, eq=False)
class Claim:
    """One attempt at one unit by this learner.

    Attributes:
        begin: the unit's first batch that this attempt trains, from 0.
        size: batches this attempt is expected to have; exact once its loader ended.
        handed: batches handed to the consumer.
        trained: of those, how many are known to be trained, or will not be offered again.
        unclear: of those, how many may not have been trained.
        take: batches it counts for in the allowance.
        read: batches its loader has given so far.
        end: the unit's batch at which this attempt ends, None for the unit's own end.
        given: whether the record that gives back what is behind `end` is written.
        bound: the unit's batch at which the loader has to stop for now, None for none.
    """

    position: int
    identifier: str
    attempt: int
    begin: int
    key: str
    data: bytes
    decided: float
    size: float
    weight: float
    state: State = State.ASKED
    loaded: bool = False
    handed: int = 0
    trained: int = 0
    unclear: int = 0
    in_mind: float = 0.0
    take: float = 0.0
    read: int = 0
    end: int | None = None
    given: bool = False
    bound: int | None = None

    def is_over(self, index: int) -> bool:
        """Whether batch `index` of the unit was left to others."""
        return self.end is not None and index >= self.end

    @property
    def finished(self) -> bool:
        """Whether every batch is trained."""
        return self.loaded and self.trained >= self.size and not self.unclear
