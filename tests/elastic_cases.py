"""What the ranks of `test_elastic` do: share out the micro-batches of each step, and tell by value what each had."""

from __future__ import annotations

import gc
import os
import signal
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import lockstep_cases
import torch
from learners import until
from lockstep_cases import digest, joined
from torch import distributed
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from shardqueue import Session, SharedQueueDataset, open_mailbox
from shardqueue.elastic import Elastic
from shardqueue.errors import MailboxUnavailableError
from shardqueue.mailbox.faults import Outage
from shardqueue.records import Manifest, RunKeys
from shardqueue.tokens import Tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

FEATURES = 6


@dataclass(frozen=True)
class Case:
    """One job.

    Attributes:
        rows, batch: of the data, and of a micro-batch; the last may be short.
        micro_batches: of a step.
        pauses: seconds that each rank adds to a micro-batch, by rank; the others none.
        later: the same from the middle of the first epoch on.
        group: micro-batches at once, by rank; the others one.
        norm, branches: the model has batch norm, or a parameter that only some micro-batches use.
        weigh: by what a batch counts: its samples, or the sum of its last feature, as if that were tokens.
        limit: steps of a pass, at most.
        options: of the engine.
    """

    rows: int = 96
    batch: int = 2
    micro_batches: int = 8
    unit_batches: int = 4
    epochs: int = 1
    workers: int = 0
    pauses: tuple[float, ...] = ()
    later: tuple[float, ...] | None = None
    group: tuple[int, ...] = ()
    dtype: str = "float64"
    norm: bool = False
    branches: bool = False
    weigh: str = "samples"
    limit: int | None = None
    context: str = "fork"
    options: Mapping[str, Any] = field(default_factory=dict)

    def pause(self, rank: int, half: bool) -> float:
        pauses = self.later if half and self.later is not None else self.pauses
        return pauses[rank] if rank < len(pauses) else 0.0


@dataclass
class Told:
    """What one rank trained: rows by step, over all epochs, and what it ended with."""

    steps: list[list[int]] = field(default_factory=list)
    counts: list[list[int]] = field(default_factory=list)
    progress: list[int] = field(default_factory=list)
    batches: list[list[list[int]]] = field(default_factory=list)
    parameters: list[torch.Tensor] = field(default_factory=list)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    digest: str = ""
    idle: float = 0.0


class Rows(Dataset[Any]):
    """Row n: its number, features, and what is to be learnt of them."""

    def __init__(self, rows: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(7)
        self.inputs = torch.randn(rows, FEATURES, generator=generator, dtype=torch.float64).to(dtype)
        self.targets = self.inputs.sum(1, keepdim=True).sin()

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, row: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        return row, self.inputs[row], self.targets[row]


class Branching(torch.nn.Module):
    """A parameter that only some micro-batches use: often no rank does, or not all do."""

    def __init__(self) -> None:
        super().__init__()
        self.always = torch.nn.Linear(FEATURES, 1)
        self.sometimes = torch.nn.Parameter(torch.ones(FEATURES))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.always(inputs)
        return found + (inputs * self.sometimes).sum(1, keepdim=True) if inputs[0, 0] > 1 else found


def model_of(case: Case, seed: int = 0) -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if case.branches:
            return Branching().to(getattr(torch, case.dtype))
        norm = [torch.nn.BatchNorm1d(8)] if case.norm else []
        model = torch.nn.Sequential(
            torch.nn.Linear(FEATURES, 8), *norm, torch.nn.Tanh(), torch.nn.Linear(8, 1)
        )
    return model.to(getattr(torch, case.dtype))


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def loss_of(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    _, inputs, targets = batch
    return functional.mse_loss(model(inputs), targets)


def tokens_of(batch: Any) -> float:
    """As if a row's number said how many tokens it has."""
    return float(1 + (batch[0] % 5).sum())


def trained(rank: int, case: Case, mailbox: str) -> Told:
    """Train all epochs of a case with the world's ranks."""
    joined(rank)
    name, told = f"rank-{rank}", Told()
    rows = Rows(case.rows, getattr(torch, case.dtype))
    dataset = SharedQueueDataset.from_dataset(
        rows, mailbox, case.batch, case.unit_batches, shuffle=True, with_step=True, learner_id=name
    )
    options: dict[str, Any] = {"multiprocessing_context": case.context} if case.workers else {}
    loader: Any = DataLoader(dataset, batch_size=None, num_workers=case.workers, **options)
    model = model_of(case, seed=rank)
    optimizer = optimizer_of(model)
    group = case.group[rank] if rank < len(case.group) else 1
    weight = tokens_of if case.weigh == "tokens" else None
    with Session(mailbox, name) as session:
        elastic = Elastic(session, model, case.micro_batches, group=group, weight=weight, **case.options)
        half = case.rows / case.batch / case.micro_batches / 2
        for epoch in range(case.epochs):
            for step in elastic.steps(loader, case.limit):
                optimizer.zero_grad()
                batches = []
                for _, batch in step:
                    torch.autograd.backward(loss_of(model, batch))
                    batches.append(batch[0].tolist())
                    threading.Event().wait(case.pause(rank, epoch > 0 or step.number >= half))
                step.reduce()
                optimizer.step()
                session.step(samples=step.samples)
                told.steps.append([row for batch in batches for row in batch])
                told.batches.append(batches)
                told.counts.append(step.counts)
                told.progress.append(step.agreed.progress)
                told.idle += step.idle
        elastic.close()
    told.parameters = [parameter.detach().clone() for parameter in model.parameters()]
    told.buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    told.digest = digest(model)
    del loader
    gc.collect()
    return told


def all_trained(rank: int, cases: list[Case], folder: str) -> list[Told]:
    """Several jobs one after another, each in a prefix of its own."""
    return [trained(rank, case, f"{folder}/{number}") for number, case in enumerate(cases)]


def alone(case: Case, told: list[Told]) -> list[torch.Tensor]:
    """The parameters after one process has gone through the same steps, each as one big batch."""
    rows = Rows(case.rows, getattr(torch, case.dtype))
    model = model_of(case)
    optimizer = optimizer_of(model)
    for batches in steps_of(told):
        optimizer.zero_grad()
        total, loss = 0.0, torch.zeros((), dtype=rows.inputs.dtype)
        for batch in batches:
            numbers = torch.tensor(batch)
            item = numbers, rows.inputs[numbers], rows.targets[numbers]
            weight = len(batch) if case.weigh == "samples" else tokens_of(item)
            total, loss = total + weight, loss + loss_of(model, item) * weight
        torch.autograd.backward(loss / total)
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def steps_of(told: list[Told]) -> Iterator[list[list[int]]]:
    """The micro-batches of each step, of all ranks, as rows."""
    for parts in zip(*(rank.batches for rank in told), strict=True):
        yield [batch for part in parts for batch in part]


# -- other data --------------------------------------------------------------------------------------------


class Anything(torch.nn.Module):
    """Takes the values of `lockstep_cases`, and learns nothing worth knowing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return (self.weight * value.double()).sum()


Shared = list[list[lockstep_cases.Value]]


def shared_out(
    rank: int, jobs: list[tuple[str, int, int, int]], folder: str, read: Any = lockstep_cases.load
) -> list[Shared]:
    """The values of each step of jobs over (plan, batches, micro-batches of a step, loader workers)."""
    joined(rank)
    return [share_out(rank, *job, f"{folder}/{number}", read) for number, job in enumerate(jobs)]


def share_out(
    rank: int, shape: str, total: int, micro_batches: int, workers: int, mailbox: str, read: Any
) -> Shared:
    case = lockstep_cases.Case(shape, total, workers=workers)
    dataset = lockstep_cases.dataset_of(case, mailbox, f"rank-{rank}", read)
    loader, model = lockstep_cases.loader_of(dataset, case), Anything()
    found = []
    with lockstep_cases.letting_go(), Session(mailbox, f"rank-{rank}") as session:
        elastic = Elastic(session, model, micro_batches)
        for step in elastic.steps(loader):
            found.append(one_step(step, model))
            session.step(samples=step.samples)
        elastic.close()
    del loader
    gc.collect()
    return found


def one_step(step: Any, model: Any) -> list[lockstep_cases.Value]:
    values = []
    model.zero_grad()
    for _, value in step:
        torch.autograd.backward(model(value))
        values.append((int(value[0]), int(value[1])))
    step.reduce()
    return values


class Held:
    """A loader of which one rank waits for a file before it reads any but its first few batches."""

    def __init__(self, flag: Path, after: int) -> None:
        self.flag, self.left = flag, after

    def __call__(self, unit: Any) -> Iterator[tuple[int, torch.Tensor]]:
        for pair in lockstep_cases.load(unit):
            if not self.left:
                until(self.flag.exists)
            self.left -= self.left > 0
            yield pair


def with_one_held(rank: int, mailbox: str, folder: Path, who: int, pauses: tuple[float, float]) -> list[int]:
    """Of two ranks one, `who`, gets no data until the other has gone through some steps alone; counts by step."""
    joined(rank)
    flag = folder / "flag"
    case = lockstep_cases.Case("equal", 60)
    read: Any = Held(flag, 8) if rank == who else lockstep_cases.load
    dataset = lockstep_cases.dataset_of(case, mailbox, f"rank-{rank}", read)
    loader, model, counts = lockstep_cases.loader_of(dataset, case), Anything(), []
    with Session(mailbox, f"rank-{rank}") as session:
        elastic = Elastic(session, model, 6)
        for step in elastic.steps(loader):
            model.zero_grad()
            for _, value in step:
                torch.autograd.backward(model(value))
                threading.Event().wait(pauses[rank])
            step.reduce()
            session.step(samples=step.samples)
            counts.append(step.micro_batches)
            if step.number == 4 and rank != who:
                flag.touch()
        elastic.close()
    return counts


# -- faults ------------------------------------------------------------------------------------------------


class Refusing(Outage):
    """Comes back by itself once it has refused a number of calls; `refused` counts them."""

    refused, patience = 0, 2

    def _around(self, verb: str, name: str, forward: Callable[[], Any]) -> Any:
        try:
            return super()._around(verb, name, forward)
        except MailboxUnavailableError:
            self.refused += 1
            if self.refused == self.patience:
                self.up()
            raise


def through_an_outage(rank: int, mailbox: str) -> tuple[list[lockstep_cases.Value], int]:
    """The mailbox of rank 1 is away in the middle of an epoch; what was trained, and calls that were refused."""
    joined(rank)
    store = Refusing(open_mailbox(mailbox))
    case = lockstep_cases.Case("equal", 120)
    dataset = lockstep_cases.dataset_of(case, store, f"rank-{rank}")
    loader, model, values = lockstep_cases.loader_of(dataset, case), Anything(), []
    with Session(store, f"rank-{rank}") as session:
        elastic = Elastic(session, model, 6)
        for step in elastic.steps(loader):
            values += one_step(step, model)
            session.step(samples=step.samples)
            if rank and step.number == 3:
                store.down()
        elastic.close()
    return values, store.refused


def load_objects(unit: Any) -> Iterator[tuple[int, object]]:
    """Batches of which nobody can tell how many samples they have."""
    for step, _ in lockstep_cases.load(unit):
        yield step, object()


def losing(take: Callable[[Tokens, int], int]) -> Callable[[Tokens, int], int]:
    """Take a token more than is trained, once."""

    def take_and_lose(tokens: Tokens, wanted: int) -> int:
        got = take(tokens, wanted)
        if got:
            Tokens.take = take  # type: ignore[method-assign,assignment]
            take(tokens, 1)
        return got

    return take_and_lose


def tokens_left(mailbox: str) -> list[int]:
    """Steps of the first pass whose counters the store still has."""
    found = open_mailbox(mailbox).get(RunKeys("1").manifest)
    assert found is not None
    run_id = Manifest.decode(found, "").run_id
    store: Any = distributed.distributed_c10d._get_default_store()
    return [step for step in range(5) if store.check([f"shardqueue/{run_id}//{step}"])]


def broken_off_and_again(rank: int, folder: str) -> tuple[list[int], list[Shared], list[int]]:
    """Leave a job in the middle of its second step, and begin another; what each leaves in the store."""
    joined(rank)
    case = lockstep_cases.Case("equal", 22)
    dataset = lockstep_cases.dataset_of(case, f"{folder}/first", f"rank-{rank}")
    with Session(f"{folder}/first", f"rank-{rank}") as session:
        elastic = Elastic(session, Anything(), 5)
        for step in elastic.steps(lockstep_cases.loader_of(dataset, case)):
            for _ in step:
                pass
            if step.number:
                break
            step.reduce()
            session.step(samples=step.samples)
        elastic.close()
    shared = shared_out(rank, [("equal", 22, 5, 0)], f"{folder}/second")
    distributed.barrier()
    return tokens_left(f"{folder}/first"), shared, tokens_left(f"{folder}/second/0")


def with_a_fault(rank: int, kind: str, mailbox: str, size: int) -> Any:
    """Something is amiss, on the last rank or on all."""
    joined(rank)
    last, name = rank == size - 1, f"rank-{rank}"
    case = lockstep_cases.Case("equal", 22)
    read: Any = lockstep_cases.load_broken if kind == "broken" and last else lockstep_cases.load
    read = load_objects if kind == "no samples" else read
    dataset = lockstep_cases.dataset_of(case, mailbox, name, read)
    loader: Any = lockstep_cases.loader_of(dataset, case)
    model: Any = Anything()
    if kind == "other model" and last:
        model = torch.nn.Linear(2, 2)
    wrapped: dict[str, Callable[[], Any]] = {
        "ddp": lambda: DistributedDataParallel(model),
        "syncbn": lambda: torch.nn.Sequential(model, torch.nn.SyncBatchNorm(1)),
    }
    if kind in wrapped:
        model = wrapped[kind]()
    if kind == "lost" and last:
        Tokens.take = losing(Tokens.take)  # type: ignore[method-assign,assignment]
    micro_batches = size - 1 if kind == "few" else 6 if kind == "other steps" and last else 5
    weights = {"weightless": lambda _: 0.0, "taken ahead": lambda value: 1.0 + float(value[0])}
    weight = weights.get(kind)
    with (
        lockstep_cases.letting_go(),
        lockstep_cases.impatient(),
        Session(mailbox, name, log_every=0.5) as session,
    ):
        elastic = Elastic(session, model, micro_batches, weight=weight)
        if kind == "one leaves" and last:
            for step in elastic.steps(loader, limit=None):
                one_step(step, model)
                break
        for step in elastic.steps([1] if kind == "loader" else loader):
            if kind != "not zeroed":
                model.zero_grad(set_to_none=False)
            if kind == "penalty before":
                torch.autograd.backward((model.weight + 1.0).square().sum())
            if kind == "taken ahead":
                list(step)
            for number, (_, value) in enumerate(step):
                torch.autograd.backward(model(value))
                threading.Event().wait(0.003)  # so that both ranks get some
                if kind == "kill" and last and step.number:
                    os.kill(os.getpid(), signal.SIGKILL)
                if kind == "raise" and last and step.number:
                    raise LookupError("the model exploded")
                if kind == "early" and not number:
                    step.reduce()
                if kind == "left":
                    break
            if kind != "forgotten":
                step.reduce()
            if kind == "twice":
                step.reduce()
            session.step(samples=step.samples)


# -- going on ----------------------------------------------------------------------------------------------


def in_part(
    rank: int, mailbox: str, states: list[dict[str, Any]], micro_batches: int, stop: int | None, epochs: int
) -> tuple[list[list[int]], dict[str, Any]]:
    """Rows by step of some epochs, up to a number of steps; and the state then."""
    joined(rank)
    name, rows = f"rank-{rank}", Rows(90, torch.float64)
    dataset = SharedQueueDataset.from_dataset(
        rows, mailbox, 2, 4, shuffle=True, with_step=True, learner_id=name
    )
    loader: Any = DataLoader(dataset, batch_size=None)
    model, found, state = model_of(Case()), [], {}
    with Session(mailbox, name) as session:
        if states:
            session.load_state_dict(*states)
        elastic = Elastic(session, model, micro_batches)
        for _ in range(epochs):
            for step in elastic.steps(loader):
                model.zero_grad()
                trained = []
                for _, batch in step:
                    torch.autograd.backward(loss_of(model, batch))
                    trained += batch[0].tolist()
                    threading.Event().wait(0.002 * rank)
                step.reduce()
                session.step(samples=step.samples)
                found.append(trained)
                if len(found) == stop:
                    state = session.state_dict()
                    break
        elastic.close()
    return found, state
