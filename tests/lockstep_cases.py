"""What the ranks of `test_lockstep` do: train over a shared queue in step, and tell by value what each was given."""

from __future__ import annotations

import gc
import hashlib
from collections import Counter
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.utils.data import DataLoader

from shardqueue import Session, SharedQueueDataset, Unit, unit_grid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

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
