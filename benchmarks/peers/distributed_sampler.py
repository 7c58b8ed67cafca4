"""A plain `DataLoader` with a `DistributedSampler`: an equal share for each consumer, decided up front; no store.

Consumers are processes that have imported torch before the common start. The loader has no workers, whose start would
count, and there is nothing to load; and no all-reduce holds the fast consumers up, as DDP's would.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from benchmarks.peers.processes import in_processes
from benchmarks.peers.work import Outcome, Stay, Work, consume, gather, serve

if TYPE_CHECKING:
    from collections.abc import Iterator


class Numbers(Dataset[int]):
    """Rows that are their own number."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, row: int) -> int:
        return row


def train(work: Work, consumer: int, folder: str) -> tuple[Stay, int]:  # noqa: ARG001
    """One consumer's share."""
    return consume(work, consumer, _units(work, consumer)), 0


def _units(work: Work, consumer: int) -> Iterator[int]:
    rows = Numbers(work.units)
    sampler: DistributedSampler[int] = DistributedSampler(rows, len(work.speeds), consumer, shuffle=False)
    for batch in DataLoader(rows, batch_size=1, sampler=sampler):
        yield int(batch)


def measure(work: Work) -> Outcome:
    """Let consumers in processes train the units."""
    stays, _ = in_processes(work, train, "")
    return gather(work, stays)


if __name__ == "__main__":
    serve(str(torch.__version__), measure)
