"""What each rank of the imbalance benchmark does: four regimes in the same processes, on the same model and data.

- fixed split: a DistributedSampler gives each rank as many samples, and DistributedDataParallel (DDP) adds up.
- lockstep: the same loop over the shared queue; each rank again gets as many micro-batches, whichever they are.
- elastic: `Elastic`; a step's micro-batches go to who is ready.
- independent: each rank claims and steps for itself, without gradients of others.

A step has `per_rank` micro-batches for each rank, in elastic steps on average, and all regimes have as many samples.
Every rank has its data in memory and uses no loader workers.

The ranks agree over gloo, on the CPU; the model's gradients go over NCCL where each rank has a GPU of its own, and
over gloo elsewhere.
"""

from __future__ import annotations

import gc
import socket
import time
from contextlib import nullcontext
from dataclasses import asdict, replace
from datetime import timedelta
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Sampler

from benchmarks.imbalance.device import ComputeDevice
from benchmarks.imbalance.mailbox import mailbox_for_all, say, to_all
from benchmarks.imbalance.model import Decoder, Sequences, optimizer_of
from benchmarks.imbalance.results import (
    ELASTIC,
    FIXED,
    INDEPENDENT,
    LOCKSTEP,
    Device,
    Measurement,
    Part,
    gathered,
)
from benchmarks.imbalance.settings import check_speeds, fitting_batch_size
from shardqueue import Session, SharedQueueDataset
from shardqueue.elastic import Elastic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from benchmarks.imbalance.settings import Settings, Sizes

PATIENCE = timedelta(minutes=10)
"""Longest a rank waits for the others."""
WARM, TIMED = 2, 5
"""Micro-batches before a device is timed, and of which the median counts."""
ALONE = 1.0
"""Seconds of steps, at least, in which a rank's speed is measured."""
UNIT_BATCHES = 8
"""Micro-batches that are claimed at once, at most."""


def run(settings: Settings) -> Measurement | None:
    """In a process that torchrun started: take part in all regimes; what was measured, in rank 0.

    Raises:
        InvalidInputError: a setting does not go with the ranks.
        MailboxError: the mailbox is not one for all ranks.
    """
    dist.init_process_group("gloo", timeout=PATIENCE)
    check_speeds(settings.speeds, dist.get_world_size())
    rank = Rank(settings)
    with mailbox_for_all(settings.mailbox) as url:
        rank.prepare()
        parts = [
            (regime, rank.train(regime, f"{url}/{regime.replace(' ', '-')}")) for regime in settings.regimes
        ]
    devices, measured = to_all(rank.described()), None
    if dist.get_rank() == 0:
        results = [gathered(regime, told, rank.samples) for regime, told in parts]
        asked = {**asdict(settings), **asdict(rank.sizes), "samples": rank.samples}
        measured = Measurement(tuple(devices), tuple(results), asked)
    dist.barrier()
    dist.destroy_process_group()
    return measured


class Rank:
    """One process: its device, and how it trains in each regime.

    Attributes:
        sizes: of the model.
        samples: that each regime trains.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings, self._place = settings, ComputeDevice(settings)
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        place = self._place
        own = all(to_all(place.cuda and place.shared_by == 1))
        self._group = dist.new_group(backend="nccl", timeout=PATIENCE) if own else dist.group.WORLD
        if place.cuda and not own:
            say("ranks share a GPU, or some have none: their gradients go over gloo")
        self.sizes = settings.sizes(large=all(to_all(place.cuda)))
        self.samples, self._alone = 0, 0.0

    # -- before the regimes ------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Choose the batch size, set the pace, and see what this rank does alone; all at the same time."""
        if not self.sizes.batch_size:
            self.sizes = replace(self.sizes, batch_size=fitting_batch_size(self._attempt))
            say(f"{self.sizes.batch_size} samples a micro-batch")
        each = self._settings.per_rank
        self.samples = self._settings.steps * each * self._size * self.sizes.batch_size
        self._data = Sequences(self.samples, self.sizes)
        work = Work(self._place, self.sizes)
        self._place.slow_down(work.timed())
        self._place.forget_memory()
        dist.barrier()
        self._alone = work.alone(each)
        told = " + ".join(f"{speed:.0f}" for speed in to_all(self._alone))
        say(f"alone the ranks do {told} samples/s")

    def _attempt(self, batch_size: int) -> list[tuple[float, float]]:
        """What a micro-batch of so many samples takes each rank: seconds, and the part of its memory."""
        self._place.forget_memory()
        try:
            seconds = Work(self._place, replace(self.sizes, batch_size=batch_size)).timed()
            part = self._place.memory_part()
        except torch.OutOfMemoryError:
            seconds, part = 0.0, 2.0
        gc.collect()
        return to_all((seconds, part))

    def described(self) -> Device:
        """This rank's device."""
        place = self._place
        return Device(self._rank, place.name(), socket.gethostname(), self._alone, place.memory())

    # -- the regimes -------------------------------------------------------------------------------------

    def train(self, regime: str, mailbox: str) -> list[Part]:
        """Go through all samples in one regime; what each rank did."""
        say(regime)
        work = Work(self._place, self.sizes)
        how = {
            FIXED: self._fixed,
            LOCKSTEP: self._lockstep,
            ELASTIC: self._elastic,
            INDEPENDENT: self._independent,
        }
        how[regime](work, mailbox)
        parts = to_all(work.part())
        gc.collect()
        return parts

    def _fixed(self, work: Work, mailbox: str) -> None:  # noqa: ARG002
        model = DistributedDataParallel(work.model, process_group=self._group)
        mine: Sampler[int] = DistributedSampler(self._data, self._size, self._rank)
        batches = DataLoader(self._data, self.sizes.batch_size, sampler=mine, pin_memory=self._place.cuda)
        work.start()
        for _ in self._steps(work, model, batches, model.no_sync):
            pass
        work.stop()

    def _lockstep(self, work: Work, mailbox: str) -> None:
        model = DistributedDataParallel(work.model, process_group=self._group)
        with Session(mailbox, f"rank-{self._rank}") as session:
            loader = self._shared(mailbox)
            work.start()
            batches = (batch for _, batch in session.track(loader, group=self._group))
            for samples in self._steps(work, model, batches, model.no_sync):
                session.step(samples=samples)
            work.stop()

    def _independent(self, work: Work, mailbox: str) -> None:
        with Session(mailbox, f"rank-{self._rank}") as session:
            loader = self._shared(mailbox, independent=True)
            work.start()
            batches = (batch for _, batch in session.track(loader))
            for samples in self._steps(work, work.model, batches, nullcontext):
                session.step(samples=samples)
            work.stop()

    def _elastic(self, work: Work, mailbox: str) -> None:
        micro_batches = self._size * self._settings.per_rank
        with Session(mailbox, f"rank-{self._rank}") as session:
            loader = self._shared(mailbox)
            elastic = Elastic(session, work.model, micro_batches, process_group=self._group)
            work.start()
            for step in elastic.steps(loader):
                for _, batch in step:
                    work.micro_batch(work.model, batch)
                step.reduce()
                work.step()
                session.step(samples=step.samples)
            work.stop()
            elastic.close()

    def _steps(
        self, work: Work, model: torch.nn.Module, batches: Iterable[Any], alone: Callable[[], Any]
    ) -> Iterator[int]:
        """Train optimizer steps of `per_rank` micro-batches, of which only the last adds up; samples of each."""
        each, samples, number = self._settings.per_rank, 0, 0
        for number, batch in enumerate(batches, start=1):
            samples += len(batch[0])
            with nullcontext() if number % each == 0 else alone():
                work.micro_batch(model, batch, each)
            if number % each == 0:
                work.step()
                yield samples
                samples = 0
        if number % each:  # what is left of an independent rank's share
            work.step()
            yield samples

    def _shared(self, mailbox: str, independent: bool = False) -> DataLoader[Any]:
        dataset = SharedQueueDataset.from_dataset(
            *(self._data, mailbox, self.sizes.batch_size, UNIT_BATCHES),
            shuffle=True,
            with_step=True,
            taper=self._size,
            learner_id=f"rank-{self._rank}",
            independent=independent,
        )
        return DataLoader(dataset, batch_size=None, pin_memory=self._place.cuda)


class Work:
    """A model of a rank, and what the rank did with it since `start`."""

    def __init__(self, place: ComputeDevice, sizes: Sizes) -> None:
        self._place, self._pace, self._sizes = place, place.pace, sizes
        self.model = Decoder(sizes, self._pace.hold).to(place.device)
        self._optimizer = optimizer_of(self.model, sizes)
        self._trained: list[torch.Tensor] = []
        self._losses: list[list[torch.Tensor]] = [[]]
        self._started = self._seconds = 0.0

    def micro_batch(self, model: torch.nn.Module, batch: Any, of: int = 1) -> None:
        """Forward and backward, of so many micro-batches that the rank adds up."""
        numbers, tokens = batch
        tokens = tokens.to(self._place.device, non_blocking=True)
        self._pace.begin()
        with self._place.autocast():
            loss = model(tokens)
        (loss / of).backward()
        self._trained.append(numbers)
        self._losses[-1].append(loss.detach())

    def step(self) -> None:
        """The optimizer's step."""
        self._pace.begin()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._pace.end()
        self._losses.append([])

    def start(self) -> None:
        """All ranks are ready: the time runs."""
        self._pace.wait()
        self._pace.forget()
        dist.barrier()
        self._started = time.perf_counter()

    def stop(self) -> None:
        """This rank has done its last step."""
        self._pace.wait()
        self._seconds = time.perf_counter() - self._started

    def part(self) -> Part:
        """What it did."""
        trained = [number for numbers in self._trained for number in numbers.tolist()]
        losses = [[loss.item() for loss in step] for step in self._losses if step]
        return Part(self._seconds, self._pace.busy(), trained, losses)

    # -- alone -------------------------------------------------------------------------------------------

    def timed(self) -> float:
        """Seconds of a micro-batch without a pause, after some that nobody times, and a step."""
        seconds = []
        for number in range(WARM + TIMED):
            began = time.perf_counter()
            self._example()
            if number == 0:
                self.step()  # which makes the optimizer's state, and imports what it needs
            self._pace.wait()
            seconds.append(time.perf_counter() - began)
        return median(seconds[WARM:])

    def alone(self, micro_batches: int) -> float:
        """Samples a second in the fastest of some steps of so many micro-batches."""
        seconds: list[float] = []
        while sum(seconds) < ALONE:
            began = time.perf_counter()
            for _ in range(micro_batches):
                self._example()
            self.step()
            self._pace.wait()
            seconds.append(time.perf_counter() - began)
        return micro_batches * self._sizes.batch_size / min(seconds)

    def _example(self) -> None:
        size = self._sizes.batch_size
        tokens = torch.zeros(size, self._sizes.length + 1, dtype=torch.int64)
        self.micro_batch(self.model, (torch.arange(size), tokens))
