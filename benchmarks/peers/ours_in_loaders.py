"""shardqueue in a `DataLoader`, over a folder: `SharedQueueDataset` in place of the sampler, and `session.track`.

Consumers are processes that have imported torch before the common start, and every call to the folder is slowed. The
loader has no workers, as the plain one beside it; a thread claims and loads.
"""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING

from torch.utils.data import DataLoader

from benchmarks.peers.ours_in_threads import load
from benchmarks.peers.processes import in_processes
from benchmarks.peers.work import Outcome, Stay, Work, consume, gather, serve
from shardqueue import Session, SharedQueueDataset, __version__, unit_grid
from shardqueue.mailbox.faults import Counted, Delayed
from shardqueue.mailbox.files import FileMailbox

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardqueue.mailbox import Mailbox


def train(work: Work, consumer: int, folder: str) -> tuple[Stay, int]:
    """What one consumer gets."""
    mailbox = Counted(Delayed(FileMailbox(folder), work.latency))
    return consume(work, consumer, _units(work, mailbox, f"node-{consumer}")), mailbox.total


def _units(work: Work, mailbox: Mailbox, name: str) -> Iterator[int]:
    plan = unit_grid(work.units, 1, taper=False)
    dataset = SharedQueueDataset(plan, mailbox, load, learner_id=name)
    loader = DataLoader(dataset, batch_size=None)
    with Session(mailbox, name) as session:
        for _, batch in session.track(loader):
            yield int(batch)
            session.step(samples=1)


def measure(work: Work) -> Outcome:
    """Let consumers in processes train the units."""
    with tempfile.TemporaryDirectory() as folder:
        return gather(work, *in_processes(work, train, folder))


if __name__ == "__main__":
    serve(__version__, measure)
