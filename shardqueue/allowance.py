"""How many batches of a pass a learner may take.

Ranks that step together need as many batches each. So a rank is allowed its share, and gives the rest of a unit back
when it claims it. Shares add up to all there is: nobody can take what another one needs. Loader workers divide the
share of their rank, since a loader takes from each worker in turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class Allowance:
    """What may be taken of a pass.

    Attributes:
        batches: at most so many; None for no limit.
        final: more will not be allowed, so that claiming ends with them; else it waits.
        cut: somebody waits for what we may not take: also a unit whose size is not known ends for us where our
            allowance does.
    """

    batches: int | None = None
    final: bool = True
    cut: bool = False

    @property
    def limit(self) -> float:
        """`batches`, or infinity."""
        return inf if self.batches is None else self.batches

    def part(self, number: int, parts: int) -> Allowance:
        """The share of one of `parts`, counted from 0: the first ones get what does not divide."""
        if self.batches is None:
            return self
        return Allowance((self.batches - number + parts - 1) // parts, self.final, self.cut)


UNLIMITED = Allowance()
