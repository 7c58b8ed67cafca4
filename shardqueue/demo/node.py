"""One node: a process that trains at its own pace.

It answers its pipe: told the name of a phase and a mailbox, it says "ready"; told the common start, it trains and
sends one record a batch. Each batch is paced: its gradient is computed at once, and added when the time a node of
this speed takes has passed since the batch began. Waiting for the next batch is no part of that time.

An error is sent as the text of its traceback. The process ends when the pipe does, and at once, whatever it
is doing, when the process that started it is gone.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
import traceback
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from shardqueue.demo.model import Replica, learning_rate
from shardqueue.demo.text import loader
from shardqueue.errors import RunFinishedError
from shardqueue.feed import shared_queue
from shardqueue.session import Session

if TYPE_CHECKING:
    from collections.abc import Generator
    from multiprocessing.connection import Connection

    from shardqueue.demo.document import Record
    from shardqueue.demo.options import Options

    Item = tuple[str, int, int, Tensor]
    Phase = Literal["fixed split", "shared queue"]


@dataclass(frozen=True, slots=True)
class Shared:
    """Tensors in memory that all processes see: parameters, the text, batches done by node."""

    parameters: Tensor
    text: Tensor
    done: Tensor


def main(number: int, options: Options, shared: Shared, pipe: Connection) -> None:
    """Be node `number` until the pipe ends."""
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    try:
        node = Node(number, options, shared)
        while True:
            phase, mailbox = pipe.recv()
            pipe.send(("ready", None))
            pipe.send(("done", node.run(phase, mailbox, start=pipe.recv())))
    except EOFError:
        return
    except BaseException:
        with suppress(OSError):
            pipe.send(("failed", traceback.format_exc()))


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


class Node:
    """The training loop of one node."""

    def __init__(self, number: int, options: Options, shared: Shared) -> None:
        self._number, self._options, self._shared = number, options, shared
        self._name = options.nodes[number]
        self._seconds = options.batch_seconds / options.speeds[number]
        self._units = options.plan()
        self._load = loader(shared.text, options.sequences, options.context)
        self._replica = Replica(options.context)
        self._replica.compute(torch.zeros(options.sequences, options.context + 1, dtype=torch.long))

    def run(self, phase: Phase, mailbox: str, start: float) -> list[Record]:
        """Train one phase from the common `start` (of `time.monotonic`, one clock for all processes)."""
        time.sleep(max(0.0, start - time.monotonic()))
        items = self._fixed() if phase == "fixed split" else self._queued(mailbox)
        with closing(items):
            return [self._train(start, *item) for item in items]

    def _fixed(self) -> Generator[Item]:
        for unit in list(self._units)[self._number :: len(self._options.nodes)]:
            for index, (step, rows) in enumerate(self._load(self._units[unit])):
                yield unit, index, step, rows

    def _queued(self, mailbox: str) -> Generator[Item]:
        with (
            suppress(RunFinishedError),  # all was handed out before this node arrived
            Session(mailbox, self._name) as session,
            shared_queue(self._units, mailbox, self._name, self._load, prefetch=8) as queue,
        ):
            for step, rows in queue:
                yield step.unit, step.index, int(step), rows
                session.step(samples=len(rows))

    def _train(self, start: float, unit: str, index: int, step: int, rows: Tensor) -> Record:
        began = time.monotonic()
        self._replica.copy_in(self._shared.parameters)
        self._replica.compute(rows)
        time.sleep(max(0.0, began + self._seconds - time.monotonic()))
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
