"""One node: a process that trains at its own pace on what a DataLoader worker reads.

It is ready with the first batch read. Told the common start, it trains and records each batch. A batch is paced: its
gradient is computed at once, and added when the time a node of this speed takes has passed since the batch began.
Waiting for the next batch is no part of that time. The node's worker goes when the node does.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from shardqueue.dataset import SharedQueueDataset
from shardqueue.demo.model import Replica, learning_rate
from shardqueue.demo.service import serve, watch_parent
from shardqueue.demo.text import loader, rows_of
from shardqueue.errors import RunFinishedError
from shardqueue.mailbox import open_mailbox
from shardqueue.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping
    from multiprocessing.connection import Connection

    from shardqueue.demo.document import Record
    from shardqueue.demo.options import Options
    from shardqueue.demo.service import Ready
    from shardqueue.units import Unit

    Item = tuple[str, int, int, bytes]
    Phase = Literal["fixed split", "shared queue"]


@dataclass(frozen=True, slots=True)
class Shared:
    """Tensors in memory that all processes see: parameters, the text, batches done by node."""

    parameters: Tensor
    text: Tensor
    done: Tensor


def main(number: int, options: Options, shared: Shared, pipe: Connection) -> None:
    """Be node `number` until the pipe ends."""
    serve(pipe, lambda: Node(number, options, shared).train)


class Slice(IterableDataset[Any]):
    """The batches of some units, in order: `(unit, index of the batch in it, step, batch)`."""

    def __init__(
        self,
        units: Mapping[str, Unit],
        names: list[str],
        load: Callable[[Unit], Iterator[tuple[int, bytes]]],
    ) -> None:
        self._units, self._names, self._load = units, names, load

    def __iter__(self) -> Iterator[Item]:
        for name in self._names:
            for index, (step, batch) in enumerate(self._load(self._units[name])):
                yield name, index, step, batch


def reader(dataset: IterableDataset[Any]) -> DataLoader[Any]:
    """Read in one worker process, one batch ahead of the one in hand.

    It is forked where that is possible: it then need not import torch again.
    """
    context = "fork" if "fork" in multiprocessing.get_all_start_methods() else None
    return DataLoader(
        dataset,
        batch_size=None,
        num_workers=1,
        multiprocessing_context=context,
        worker_init_fn=watch_parent,
        prefetch_factor=1,
    )


def _chained(first: list[Item], rest: Generator[Item]) -> Generator[Item]:
    with closing(rest):
        yield from first
        yield from rest


class Node:
    """The training loop of one node."""

    def __init__(self, number: int, options: Options, shared: Shared) -> None:
        self._number, self._options, self._shared = number, options, shared
        self._name = options.nodes[number]
        self._seconds = options.batch_seconds
        self._pace = options.paces[self._name]
        self._units = options.plan()
        self._load = loader(shared.text, options.sequences, options.context)
        self._replica = Replica(options.context)
        self._replica.compute(torch.zeros(options.sequences, options.context + 1, dtype=torch.long))

    def train(self, phase: Phase, mailbox: str, ready: Ready) -> list[Record]:
        """Train what this node gets of a phase, from the common start on; it is ready with the first batch read."""
        items = self._items(phase, mailbox)
        first = list(islice(items, 1))
        start = ready()
        time.sleep(max(0.0, start - time.monotonic()))
        with closing(_chained(first, items)) as all_items:
            return [self._train(start, *item) for item in all_items]

    def _items(self, phase: Phase, mailbox: str) -> Generator[Item]:
        if phase == "fixed split":
            names = list(self._units)[self._number :: len(self._options.nodes)]
            return self._fixed(Slice(self._units, names, self._load))
        box = open_mailbox(mailbox, prove=False)
        dataset = SharedQueueDataset(self._units, box, self._load, learner_id=self._name)
        return self._queued(dataset, Session(box, self._name))

    def _fixed(self, dataset: Slice) -> Generator[Item]:
        yield from reader(dataset)

    def _queued(self, dataset: SharedQueueDataset, session: Session) -> Generator[Item]:
        with suppress(RunFinishedError), session:  # the error: all was handed out before this node arrived
            for step, batch in session.track(reader(dataset)):
                yield step.unit, step.index, int(step), batch
                session.step(samples=self._options.sequences)

    def _train(self, start: float, unit: str, index: int, step: int, batch: bytes) -> Record:
        began = time.monotonic()
        self._replica.copy_in(self._shared.parameters)
        self._replica.compute(rows_of(batch, self._options.context))
        time.sleep(max(0.0, start + self._pace.finish(began - start, self._seconds) - time.monotonic()))
        self._replica.add_out(self._shared.parameters, learning_rate(step, self._options.steps))
        self._shared.done[self._number] += 1
        ended = time.monotonic()
        return {
            "pid": os.getpid(),
            "node": self._name,
            "unit": unit,
            "index": index,
            "step": step,
            "start": round(began - start, 6),
            "end": round(ended - start, 6),
        }
