"""What ranks that step together tell each other: a sum over a few numbers a rank.

It runs on a gloo group of its own, in the main thread, on CPU tensors: it costs no CPU-GPU synchronisation, and it is
not mixed up with anybody's collectives. A rank that waits for the others looks up now and then, and asks whether one
of them is known to be gone.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, fields
from datetime import timedelta
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from shardqueue.errors import AgreementError, InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

logger = logging.getLogger("shardqueue")

STEP, WORDS, SUMS = 1.0, 2.0, 3.0
DOING = {
    STEP: "asks for its next batch",
    WORDS: "begins a loop, or leaves the run",
    SUMS: "adds up the gradients of an elastic step",
}
"""What a rank does, by the kind of what it says."""
TURN = 1.0
"""Seconds after which a rank that waits for others looks up."""
LONG = 60.0
"""Seconds of waiting after which that is said."""
PATIENCE = 5.0
"""Seconds of waiting after which it looks whether somebody is gone."""


@dataclass(slots=True)
class Row:
    """One rank's numbers in an agreement; `kind` is STEP, WORDS (then `size` is how many bytes follow) or SUMS.

    `has` counts the batches it is certain to get; of the `had` ones of this pass the largest had `size` samples, and
    `small` ones had much fewer. Of elastic step `step` it trained `micro` micro-batches that weigh `weight` together,
    in `seconds` each; it takes `group` of them at once. `flags` is a digest, see there.
    """

    kind: float = STEP
    has: float = 0.0
    settled: float = 0.0
    events: float = 0.0
    starves: float = 0.0
    gave_up: float = 0.0
    size: float = 0.0
    small: float = 0.0
    had: float = 0.0
    batches: float = 0.0
    samples: float = 0.0
    waited: float = 0.0
    elapsed: float = 0.0
    units: float = 0.0
    step: float = 0.0
    micro: float = 0.0
    weight: float = 0.0
    seconds: float = 0.0
    group: float = 1.0
    flags: float = 0.0

    def numbers(self) -> tuple[float, ...]:
        """The row of the table."""
        return _numbers(self)


COLUMNS = len(fields(Row))
_numbers = attrgetter(*(field.name for field in fields(Row)))


class Ranks:
    """The training processes that step together.

    Args:
        group: their process group; None for a process on its own. Every rank of it must make the object.
    """

    rank: int
    size: int

    def __init__(self, group: Any = None) -> None:
        self.rank, self.size = 0, 1
        self.gone: Callable[[BaseException | None], BaseException | None] = lambda error: error
        self.group = group
        self._group: Any = None
        if group is None:
            return
        if not isinstance(group, dist.ProcessGroup):
            bound = "a process group of torch.distributed"
            raise InvalidInputError("group", group, bound, "pass torch.distributed.group.WORLD")
        if dist.get_rank(group) < 0:
            bound = "one that this process is in"
            raise InvalidInputError("group", group, bound, "call this in the ranks of the group alone")
        members = dist.get_process_group_ranks(group)
        self.rank, self.size = dist.get_rank(group), len(members)
        if self.size > 1:
            if "gloo" in dist.get_backend(group):
                dist.barrier(group)  # says at once that a rank is gone; making a group waits for it
            part = self.size < dist.get_world_size()
            self._group = dist.new_group(members, backend="gloo", use_local_synchronization=part)

    def close(self, broken: bool = False) -> None:
        """Forget the group; one that is `broken` is left to torch, since to destroy it may take for ever."""
        group, self._group = self._group, None
        if group is not None and not broken and dist.is_initialized():
            dist.destroy_process_group(group)

    def begin(self, row: Row) -> Agreement:
        """Start to agree."""
        table = np.zeros((self.size, COLUMNS))
        table[self.rank] = row.numbers()
        return Agreement(self, table, self._sum(table))

    def total(self, numbers: Sequence[float]) -> list[float]:
        """The sum of all ranks' numbers, as many on each; all must have agreed before that they will call it.

        Raises:
            PeerGoneError: one is gone.
        """
        summed = np.array(numbers, dtype=np.float64)
        self.wait(self._sum(summed))
        found: list[float] = summed.tolist()
        return found

    def gather(self, said: Mapping[str, object]) -> list[dict[str, Any]]:
        """What each rank said, by rank; JSON."""
        data = json.dumps(said).encode()
        sizes = [int(row.size) for row in self.begin(Row(kind=WORDS, size=len(data))).rows()]
        table = np.zeros((self.size, max(sizes)), np.uint8)
        table[self.rank, : len(data)] = np.frombuffer(data, np.uint8)
        self.wait(self._sum(table))
        return [json.loads(row[:size].tobytes()) for row, size in zip(table, sizes, strict=True)]

    def _sum(self, table: np.ndarray[Any, Any]) -> Any:
        if self._group is None:
            return None
        try:
            return dist.all_reduce(torch.from_numpy(table), group=self._group, async_op=True)
        except RuntimeError as error:
            raise self.lost(error) from error

    def wait(self, work: Any) -> None:
        """Until all ranks have taken part.

        Raises:
            PeerGoneError: one of them is gone.
        """
        waited = 0.0
        while work is not None:
            try:
                work.wait(timedelta(seconds=TURN))
                return
            except RuntimeError as error:
                if work.is_completed():
                    raise self.lost(error) from error
            waited += TURN
            if waited == LONG:
                logger.warning(
                    "rank %d has waited %.0f s for the others; all ranks that step together must iterate a loader, "
                    "or none of them",
                    *(self.rank, waited),
                )
            if waited >= PATIENCE:
                gone = self.gone(None)
                if gone is not None:
                    raise gone

    def lost(self, error: RuntimeError) -> BaseException:
        """What to raise for an error of the group, or of its store: who is gone, as far as that can be told."""
        return self.gone(error) or error


@dataclass(slots=True)
class Agreement:
    """One that is under way."""

    ranks: Ranks
    table: np.ndarray[Any, Any]
    work: Any

    def rows(self) -> list[Row]:
        """What each rank said, by rank, once all have.

        Raises:
            AgreementError: another rank is at another place in the program.
            PeerGoneError: one is gone.
        """
        self.ranks.wait(self.work)
        rows = [Row(*row) for row in self.table.tolist()]
        for rank, row in enumerate(rows):
            if row.kind != rows[0].kind:
                raise AgreementError(
                    f"rank 0 {DOING[rows[0].kind]}, rank {rank} {DOING[row.kind]}: all ranks must begin a loop "
                    "together, and leave it after the same batch"
                )
        return rows


def world() -> Any:
    """The process group of all ranks, None where there is none."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def world_size() -> int:
    """How many ranks there are, 1 without a process group."""
    return 1 if world() is None else dist.get_world_size()
