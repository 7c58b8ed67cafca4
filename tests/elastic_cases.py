"""What the ranks of `test_elastic` do: share out the micro-batches of each step, and tell by value what each had."""

from __future__ import annotations

import gc
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from lockstep_cases import digest, joined
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from shardqueue import Session, SharedQueueDataset
from shardqueue.elastic import Elastic

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

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


def model_of(case: Case, seed: int = 0) -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
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


def tokens_of(item: Any) -> float:
    """As if the first feature said how many tokens a row has."""
    return float(1 + (item[1][0] % 5).sum())


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
                    loss_of(model, batch).backward()
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
        weights, losses = [], []
        for batch in batches:
            numbers = torch.tensor(batch)
            item = numbers, rows.inputs[numbers], rows.targets[numbers]
            weights.append(len(batch) if case.weigh == "samples" else tokens_of((0, item)))
            losses.append(loss_of(model, item) * weights[-1])
        torch.autograd.backward(sum(losses) / sum(weights))
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def steps_of(told: list[Told]) -> Iterator[list[list[int]]]:
    """The micro-batches of each step, of all ranks, as rows."""
    for parts in zip(*(rank.batches for rank in told), strict=True):
        yield [batch for part in parts for batch in part]
