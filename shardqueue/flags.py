"""What all ranks' flags come to, told in full only where they are not what they were.

Each rank has a flag for each parameter with a gradient and each buffer that changed (see `gradients`). To sum them
takes a round of messages, of which a step has two already. But from step to step they are the same: on ranks with a
micro-batch those of last time, on the others none. A digest, which travels with what the ranks say anyway, tells.
"""

from __future__ import annotations

import zlib
from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardqueue.agreement import Ranks, Row


class Flags:
    """The sums of flags, on one rank.

    Flags end with a number that all ranks have alike, or else their models differ.
    """

    def __init__(self) -> None:
        self._usual: list[float] = []
        self._digests = 0.0, 0.0

    @staticmethod
    def digest(flags: Sequence[float]) -> float:
        """What differs where flags differ."""
        return float(zlib.crc32(array("d", flags)))

    def total(self, ranks: Ranks, flags: list[float], rows: Sequence[Row]) -> list[float]:
        """The sum of all ranks' flags, whose digests are in `rows`. All ranks decide alike whether to ask for it.

        Raises:
            PeerGoneError: a rank is gone.
        """
        with_some = sum(row.micro > 0 for row in rows)
        usual, none = self._digests
        if self._usual and all(row.flags == (usual if row.micro else none) for row in rows):
            return [*(with_some * flag for flag in self._usual[:-1]), len(rows) * self._usual[-1]]
        total = ranks.total(flags)
        alike = len({row.flags for row in rows if row.micro}) == 1
        self._usual = [*(flag / with_some for flag in total[:-1]), flags[-1]] if alike else []
        nothing = [*(0.0 for _ in self._usual[1:]), *self._usual[-1:]]
        self._digests = self.digest(self._usual), self.digest(nothing)
        return total
