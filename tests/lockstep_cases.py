"""What the ranks of `test_lockstep` do: train over a shared queue in step, and tell by value what each was given."""

from __future__ import annotations

import gc
import hashlib
import os
import signal
import threading
import traceback
import warnings
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from learners import until
from torch import distributed
from torch.utils.data import DataLoader

from shardqueue import Session, SharedQueueDataset, Unit, agreement, assembly, open_mailbox, unit_grid
from shardqueue.errors import MailboxUnavailableError, ShardQueueWarning
from shardqueue.mailbox.faults import Outage, Wrapper
from shardqueue.records import RunKeys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from shardqueue import Mailbox

Value = tuple[int, int]
UNKNOWN = 5
"""A unit whose size no plan knows has up to so many batches, and some have none."""


@dataclass(frozen=True)
class Case:
    """One job: what is shared out, and how.

    Attributes:
        shape: of the plan, see `plan`.
        total: batches of it.
        uneven: as for `Session.track`.
        workers: of each rank's loader, forked unless `context` says otherwise.
        accumulate: batches to each `Session.step`.
        breaks: batches after which the loop of the first epoch is left.
    """

    shape: str = "equal"
    total: int = 23
    uneven: str = "repeat"
    workers: int = 0
    context: str = "fork"
    epochs: int = 1
    set_epoch: bool = False
    persistent: bool = False
    in_order: bool = True
    accumulate: int = 1
    breaks: int | None = None


@dataclass
class Epoch:
    """What one rank was given: values, which of them repeat, and `Agreed.progress` before each."""

    values: list[Value] = field(default_factory=list)
    repeats: list[bool] = field(default_factory=list)
    progress: list[int] = field(default_factory=list)

    @property
    def fresh(self) -> list[Value]:
        return [value for value, again in zip(self.values, self.repeats, strict=True) if not again]


def size_of(number: int) -> int:
    """Batches of the unknown unit of that number."""
    return number * 7 % (UNKNOWN + 1)


def plan(shape: str, total: int) -> tuple[Mapping[str, object], int | None]:
    """Units with so many batches in all, and what `batches=` has to say of them."""
    if shape == "equal":
        return unit_grid(total, 4, 1, taper=False), None
    if shape == "tapered":
        return unit_grid(total, 6, 1, taper=3), None
    if shape == "one":
        return unit_grid(total, total, 1, taper=False), None
    if shape == "one unknown":
        return {"part": (0, total)}, total
    if shape == "listed":
        ends = [min(end, total) for end in accumulate(1 + n % 5 for n in range(total))]
        spans = zip([0, *ends], ends, strict=False)
        return {f"u{first:03d}": Unit(first, end - first, 0, 1) for first, end in spans if end > first}, None
    units: dict[str, object] = {}
    left = total
    while left:
        number = len(units)
        units[f"part-{number:03d}"] = (number, min(left, size_of(number)))
        left -= min(left, size_of(number))
    return units, total


def load(unit: Any) -> Iterator[tuple[int, torch.Tensor]]:
    """One batch a step of the unit, or as many as the unknown unit has; each is its own value."""
    if isinstance(unit, Unit):
        for step in unit.steps:
            yield step, torch.tensor([step, unit.lane])
        return
    number, count = unit
    for index in range(count):
        yield index, torch.tensor([number, index])


def whole(case: Case) -> Counter[Value]:
    """Every batch of a pass once."""
    units, _ = plan(case.shape, case.total)
    return Counter((int(batch[0]), int(batch[1])) for unit in units.values() for _, batch in load(unit))


def joined(rank: int) -> None:
    """Be a rank of the world."""
    if not distributed.is_initialized():
        distributed.init_process_group("gloo")


def loader_of(dataset: Any, case: Case) -> Any:
    options: dict[str, Any] = {}
    if case.workers:
        options = {
            "multiprocessing_context": case.context,
            "persistent_workers": case.persistent,
            "in_order": case.in_order,
        }
    return DataLoader(dataset, batch_size=None, num_workers=case.workers, **options)


def dataset_of(case: Case, mailbox: str | Mailbox, name: str, read: Callable[[Any], Any] = load) -> Any:
    units, batches = plan(case.shape, case.total)
    return SharedQueueDataset(units, mailbox, read, name, batches=batches)


def trained(rank: int, case: Case, mailbox: str | Mailbox) -> list[Epoch]:
    """Train all epochs of a case with the world's ranks."""
    joined(rank)
    name = f"rank-{rank}"
    dataset = dataset_of(case, mailbox, name)
    loader, epochs = loader_of(dataset, case), []
    with Session(mailbox, name) as session:
        for epoch in range(case.epochs):
            if case.set_epoch:
                dataset.set_epoch(2 * epoch)
            epochs.append(one_epoch(session, loader, case, distributed.group.WORLD, first=not epoch))
    if case.persistent:
        loader._iterator._shutdown_workers()  # collected in a cycle, it would wait 5 s for each
    del loader
    gc.collect()
    return epochs


def one_epoch(session: Session, loader: Any, case: Case, group: Any, first: bool = True) -> Epoch:
    seen, pending = Epoch(), 0
    for step, batch in session.track(loader, group=group, uneven=case.uneven):  # type: ignore[arg-type]
        lockstep: Any = session.lockstep
        assert isinstance(int(step), int)
        seen.values.append((int(batch[0]), int(batch[1])))
        seen.repeats.append(lockstep.repeating)
        seen.progress.append(lockstep.agreed.progress)
        pending += 1
        if pending == case.accumulate:
            session.step(samples=pending)
            pending = 0
        if first and len(seen.values) == case.breaks:
            break
    if pending:
        session.step(samples=pending)
    return seen


def all_trained(rank: int, cases: list[Case], folder: str) -> list[list[Epoch]]:
    """Several jobs one after another, each in a prefix of its own."""
    return [trained(rank, case, f"{folder}/{number}") for number, case in enumerate(cases)]


def digest(model: torch.nn.Module) -> str:
    """The same for the same parameters, to the bit."""
    data = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    return hashlib.blake2b(data).hexdigest()


# -- faults ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """What is wrong on one rank, the last one."""

    kind: str
    workers: int = 0


def load_short(unit: Any) -> Iterator[tuple[int, torch.Tensor]]:
    """One batch less than the plan says."""
    yield from list(load(unit))[:-1]


def load_long(unit: Any) -> Iterator[tuple[int, torch.Tensor]]:
    """One batch more than the plan says."""
    yield from load(unit)
    yield 0, torch.tensor([0, 0])


def load_broken(unit: Any) -> Iterator[tuple[int, torch.Tensor]]:
    yield from list(load(unit))[:1]
    raise LookupError("no such file")


@contextmanager
def letting_go() -> Iterator[None]:
    """Free the loader that an error's traceback holds: collected in a cycle, it waits 5 s for each worker."""
    try:
        yield
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)
        raise


@contextmanager
def impatient() -> Iterator[None]:
    """Look after a second, not several, who is gone or has another prefix."""
    with patch.object(assembly, "SHARING", 1.0), patch.object(agreement, "PATIENCE", 1.0):
        yield


def with_a_fault(rank: int, fault: Fault, folder: str, size: int) -> list[Epoch]:
    """Train with something amiss on the last rank, or with all."""
    joined(rank)
    case, name = Case("equal", 22, workers=fault.workers), f"rank-{rank}"
    last, mailbox, read = rank == size - 1, f"{folder}/queue", load
    if fault.kind == "short":
        read = load_short
    elif fault.kind == "long":
        read = load_long
    elif fault.kind.startswith("too many"):
        case = replace(case, shape="unknown")
    elif last:
        if fault.kind == "uneven":
            case = replace(case, uneven="drop")
        elif fault.kind == "units":
            case = replace(case, total=21)
        elif fault.kind in ("prefix", "other run"):
            mailbox = f"{folder}/elsewhere"
        elif fault.kind == "broken":
            read = load_broken
    units, batches = plan(case.shape, case.total)
    if fault.kind.startswith("too many"):
        batches = case.total + size
    store: Any = Sluggish(open_mailbox(mailbox)) if fault.kind.endswith("slowly") else mailbox
    dataset: Any = SharedQueueDataset(units, store, read, name, batches=batches)
    if fault.kind == "seed":
        rows = torch.arange(44).reshape(22, 2)
        dataset = SharedQueueDataset.from_dataset(
            rows, store, 1, shuffle=True, seed=int(last), with_step=True, learner_id=name
        )
    if fault.kind == "epoch" and last:
        dataset.set_epoch(1)
    loader = loader_of(dataset, case)
    with letting_go(), impatient(), Session(store, name) as session:
        return [one_epoch(session, loader, case, distributed.group.WORLD)]


def beside_a_stranger(rank: int, case: Case, mailbox: str, flag: Path) -> list[Epoch]:
    """Somebody outside the group claims in the run, and says by a file when that is done."""
    joined(rank)
    name = f"rank-{rank}"
    loader, seen = loader_of(dataset_of(case, mailbox, name), case), Epoch()
    with Session(mailbox, name) as session:
        for _, batch in session.track(loader, group=distributed.group.WORLD):
            seen.values.append((int(batch[0]), int(batch[1])))
            session.step(samples=1)
            until(flag.exists)
    return [seen]


def late(rank: int, mailbox: str, seconds: float) -> list[Epoch]:
    """The last rank comes to its loop late."""
    joined(rank)
    if rank:
        threading.Event().wait(seconds)
    return trained(rank, Case("tapered", 22), mailbox)


def stopping(rank: int, mailbox: str, how: str, at: int) -> list[Epoch]:
    """The last rank is killed, raises, or sleeps for a while at a batch."""
    joined(rank)
    case, name = Case("equal", 40), f"rank-{rank}"
    loader, seen = loader_of(dataset_of(case, mailbox, name), case), Epoch()
    with impatient(), Session(mailbox, name, log_every=0.5) as session:
        for count, (_, batch) in enumerate(session.track(loader, group=distributed.group.WORLD)):
            seen.values.append((int(batch[0]), int(batch[1])))
            if count == at and rank == distributed.get_world_size() - 1:
                if how == "raise":
                    raise LookupError("the model exploded")
                os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
            session.step(samples=1)
    return [seen]


# -- outside lockstep --------------------------------------------------------------------------------------


def outside(
    rank: int, mailbox: str, workers: int, context: str, track: bool, independent: bool
) -> list[Value]:
    """A plain DataLoader in a group of ranks; none is done before all have joined."""
    joined(rank)
    everybody = distributed.get_world_size() if independent else 0
    units, _ = plan("equal", 22)
    name = f"rank-{rank}"
    dataset = SharedQueueDataset(units, mailbox, load, name, independent=independent)
    loader = loader_of(dataset, Case(workers=workers, context=context))
    got: list[Value] = []
    session = Session(mailbox, name) if track else None
    box = open_mailbox(mailbox)
    with letting_go(), session or nullcontext():
        for _, batch in session.track(loader) if session else loader:
            got.append((int(batch[0]), int(batch[1])))
            until(lambda: len({key.split("/")[1] for key in box.list(RunKeys("1").learners)}) >= everybody)
            if session:
                session.step(samples=1)
    del loader
    gc.collect()
    return got


def subgroups(rank: int, folder: str, case: Case) -> list[Epoch]:
    """Two groups of two, each a job of its own."""
    joined(rank)
    groups = [distributed.new_group([0, 1]), distributed.new_group([2, 3])]
    name, mailbox = f"rank-{rank}", f"{folder}/{rank // 2}"
    dataset = dataset_of(case, mailbox, name)
    loader = loader_of(dataset, case)
    with Session(mailbox, name) as session:
        return [one_epoch(session, loader, case, groups[rank // 2]) for _ in range(case.epochs)]


# -- a slow or silent mailbox ------------------------------------------------------------------------------


def over(rank: int, kind: str, case: Case, mailbox: str) -> list[Epoch]:
    """Train over a mailbox that is slow, or fails at first, above all where a part of a unit is given back."""
    store = {"slow": Sluggish, "failing": Unwilling}[kind](open_mailbox(mailbox))
    return trained(rank, case, store)


class Sluggish(Wrapper):
    """A mailbox in which each call takes 20 ms, and giving back ten times as long."""

    def _around(self, verb: str, name: str, forward: Callable[[], Any]) -> Any:
        threading.Event().wait(0.2 if verb == "put_if_absent" and "back/" in name else 0.02)
        return forward()


class Unwilling(Wrapper):
    """A mailbox that fails the first time that something is given back."""

    refused = False

    def _around(self, verb: str, name: str, forward: Callable[[], Any]) -> Any:
        if verb == "put_if_absent" and "back/" in name and not self.refused:
            self.refused = True
            raise MailboxUnavailableError("made up by the test")
        return forward()


def through_an_outage(rank: int, mailbox: str) -> list[Epoch]:
    """The mailbox of one rank is away for a second, in the middle."""
    joined(rank)
    store = Outage(open_mailbox(mailbox))
    case, name = Case("equal", 40), f"rank-{rank}"
    loader, seen = loader_of(dataset_of(case, store, name), case), Epoch()
    with Session(store, name) as session:
        for count, (_, batch) in enumerate(session.track(loader, group=distributed.group.WORLD)):
            seen.values.append((int(batch[0]), int(batch[1])))
            lockstep: Any = session.lockstep
            seen.repeats.append(lockstep.repeating)
            seen.progress.append(lockstep.agreed.progress)
            session.step(samples=1)
            if rank and count == 3:
                store.down()
                threading.Timer(1.0, store.up).start()
    return [seen]


# -- a model, and what the ranks know alike ----------------------------------------------------------------


def fit(rank: int, case: Case, mailbox: str) -> tuple[list[str], int]:
    """Train a DistributedDataParallel model; digests of its parameters after each epoch, and optimizer steps."""
    joined(rank)
    torch.manual_seed(rank)
    model: Any = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    name, digests, steps = f"rank-{rank}", [], 0
    loader = loader_of(dataset_of(case, mailbox, name), case)
    with Session(mailbox, name) as session:
        for _ in range(case.epochs):
            for _, batch in session.track(loader, group=distributed.group.WORLD):
                optimizer.zero_grad()
                model(batch.double() / 10).square().mean().backward()
                optimizer.step()
                session.step(samples=1)
                steps += 1
            digests.append(digest(model))
    del loader
    gc.collect()
    return digests, steps


class Sizes:
    """Collates to batches of so many samples, one after another."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = iter(sizes)

    def __call__(self, pair: Any) -> Any:
        return pair[0], torch.zeros(next(self.sizes))


def sized(rank: int, epochs: list[list[list[int]]], mailbox: str) -> list[str]:
    """Batches of so many samples, by epoch and rank; what was warned of."""
    joined(rank)
    name, case = f"rank-{rank}", Case("equal", 2 * len(epochs[0][0]))
    sizes = Sizes([size for epoch in epochs for size in epoch[rank]])
    loader: Any = DataLoader(dataset_of(case, mailbox, name), batch_size=None, collate_fn=sizes)
    with warnings.catch_warnings(record=True) as caught, Session(mailbox, name) as session:
        warnings.simplefilter("always")
        for _ in epochs:
            for _ in session.track(loader, group=distributed.group.WORLD):
                session.step(samples=1)
    return [str(warning.message) for warning in caught if issubclass(warning.category, ShardQueueWarning)]


def progressing(rank: int, units: Any, epochs: int, mailbox: str) -> list[tuple[int, int]]:
    """Batches handed out before each step, over all epochs, and what `Agreed.progress` says then."""
    joined(rank)
    name, told = f"rank-{rank}", []
    loader: Any = DataLoader(SharedQueueDataset(units, mailbox, load, name), batch_size=None)
    with Session(mailbox, name) as session:
        for _ in range(epochs):
            for _ in session.track(loader, group=distributed.group.WORLD):
                lockstep: Any = session.lockstep
                agreed = lockstep.agreed
                told.append((agreed.epoch * agreed.total + agreed.batches, agreed.progress))
                session.step(samples=1)
    return told
