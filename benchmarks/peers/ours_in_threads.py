"""shardqueue's own loop, `shared_queue`: consumers in threads over its memory mailbox, every call of which is slowed.

Finding the run counts, unlike where GradientMail is measured.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from benchmarks.peers.work import PATIENCE, Outcome, Stay, Work, consume, gather, serve
from shardqueue import __version__, shared_queue, unit_grid
from shardqueue.mailbox.faults import Counted, Delayed
from shardqueue.mailbox.memory import MemoryMailbox

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardqueue.mailbox import Mailbox
    from shardqueue.units import Unit


def load(unit: Unit) -> Iterator[tuple[int, int]]:
    """The unit's one batch: its number."""
    for step in unit.steps:
        yield step, step


def measure(work: Work) -> Outcome:
    """Let consumers in threads train the units."""
    mailbox, size = Counted(Delayed(MemoryMailbox(), work.latency)), len(work.speeds)
    barrier = threading.Barrier(size)

    def run(consumer: int) -> Stay:
        barrier.wait(PATIENCE)
        return consume(work, consumer, _units(work, mailbox, consumer))

    with ThreadPoolExecutor(size) as pool:
        return gather(work, list(pool.map(run, range(size))), mailbox.total)


def _units(work: Work, mailbox: Mailbox, consumer: int) -> Iterator[int]:
    plan = unit_grid(work.units, 1, taper=False)
    with shared_queue(plan, mailbox, f"node-{consumer}", load, prefetch=work.prefetch) as queue:
        for _, batch in queue:
            yield batch


if __name__ == "__main__":
    serve(__version__, measure)
