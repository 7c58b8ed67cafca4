"""What the ranks of `test_gradients` do: train small models on micro-batches given out by a table."""

from __future__ import annotations

import copy
import hashlib
import io
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor, distributed, nn
from torch.utils.checkpoint import checkpoint

from shardqueue.errors import ShardQueueError
from shardqueue.flat import broadcast_module
from shardqueue.gradients import Gradients

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Micro = tuple[int, int]
"""A micro-batch: the rank that trains it, and its samples."""
WIDTH = 6

UNEVEN: list[list[Micro]] = [
    [(0, 4), (1, 4), (0, 3), (1, 8)],
    [(0, 2), (0, 5), (0, 2)],
    [(1, 1), (1, 7)],
    [(1, 3), (0, 3), (1, 3)],
    [(0, 4), (1, 5), (1, 2), (0, 4)],
]
"""Steps for two ranks or more: of several weights, one with nothing for rank 1, one with nothing for rank 0."""


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        model: its name in `MODELS`.
        steps: the micro-batches of each.
        bucket_bytes: small, so that there are many.
        overlap: whether sums begin within the last backward.
        zero: how gradients are reset: "unset", "zeros", or "late", as Lightning does: after the first `weigh`.
    """

    model: str = "plain"
    dtype: torch.dtype = torch.float64
    steps: Sequence[Sequence[Micro]] = field(default_factory=lambda: UNEVEN)
    bucket_bytes: int = 200
    overlap: bool = True
    zero: str = "unset"


@dataclass
class Told:
    """What a training came to: the parameters, names without a gradient by step, and a digest of every step."""

    parameters: list[Tensor] = field(default_factory=list)
    without: list[list[str]] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)


class Plain(nn.Module):
    """Three layers; `number` is the micro-batch's place in its step, which some models depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, rows: Tensor, number: int, rank: int) -> Tensor:
        for layer in self.layers:
            rows = torch.tanh(layer(rows))
        return rows


class Tied(Plain):
    """The last layer has the first one's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].weight = self.layers[0].weight


class Unused(Plain):
    """A layer for every other micro-batch, one for the second alone, and one for none."""

    def __init__(self) -> None:
        super().__init__()
        self.odd, self.second, self.never = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, rows: Tensor, number: int, rank: int) -> Tensor:
        rows = super().forward(rows, number, rank)
        if number % 2:
            rows = rows + self.odd(rows)
        if number == 1:
            rows = rows + self.second(rows)
        return rows


class Freezing(Plain):
    """Of which `thaw` leaves another layer to be trained in each step."""

    def thaw(self, step: int) -> None:
        for place, layer in enumerate(self.layers):
            layer.requires_grad_(place == 0 or place <= step)


class Branches(Plain):
    """Gradients arrive in another order on each rank."""

    def forward(self, rows: Tensor, number: int, rank: int) -> Tensor:
        order = [self.layers[(place + rank) % 3] for place in range(3)]
        return torch.stack([torch.tanh(layer(rows)) for layer in order]).sum(dim=0)


class Checkpointed(Plain):
    """Each layer is recomputed in the backward."""

    reentrant = False

    def forward(self, rows: Tensor, number: int, rank: int) -> Tensor:
        for layer in self.layers:
            rows = checkpoint(layer, rows.requires_grad_(), use_reentrant=self.reentrant).tanh()
        return rows


class Reentrant(Checkpointed):
    reentrant = True


class ReentrantShared(Reentrant):
    """A layer that is recomputed three times: its gradient comes in three parts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.layers[0]] * 3)


class Complex(Plain):
    """A complex parameter whose gradient is a lazy conjugate."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))

    def forward(self, rows: Tensor, number: int, rank: int) -> Tensor:
        return super().forward(rows, number, rank) + (self.phase.conj() * self.phase.detach()).real


MODELS: dict[str, Callable[[], Any]] = {
    "plain": Plain,
    "tied": Tied,
    "unused": Unused,
    "freezing": Freezing,
    "branches": Branches,
    "checkpointed": Checkpointed,
    "reentrant": Reentrant,
    "reentrant, shared": ReentrantShared,
    "complex": Complex,
}


def built(case: Case) -> Any:
    torch.manual_seed(7)
    model = MODELS[case.model]()
    return model if case.dtype is torch.float32 else model.to(case.dtype)


def rows_of(step: int, number: int, samples: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + number)
    both = torch.randn(2, samples, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    return both[0], both[1]


def loss_of(model: Any, case: Case, step: int, number: int, samples: int, rank: int) -> Any:
    inputs, targets = rows_of(step, number, samples, case.dtype)
    return (model(inputs, number, rank) - targets).abs().square().mean()


def alone(case: Case) -> Told:
    """The same micro-batches in one process, by plain gradient accumulation."""
    model, told = built(case), Told()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step, micros in enumerate(case.steps):
        optimizer.zero_grad(set_to_none=case.zero != "zeros")
        if isinstance(model, Freezing):
            model.thaw(step)
        total = sum(samples for _, samples in micros)
        for number, (_, samples) in enumerate(micros):
            (loss_of(model, case, step, number, samples, 0) * samples / total).backward()
        note(told, model)
        optimizer.step()
    told.parameters = [parameter.detach().clone() for parameter in model.parameters()]
    return told


def note(told: Told, model: nn.Module) -> None:
    told.without.append([name for name, parameter in model.named_parameters() if parameter.grad is None])
    told.digests.append(digest([p.grad for p in model.parameters() if p.grad is not None]))


def digest(tensors: Sequence[Tensor]) -> str:
    parts = [
        tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for tensor in tensors
    ]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def joined(rank: int) -> Any:
    """Be a rank of the world; its group."""
    if not distributed.is_initialized():
        distributed.init_process_group("gloo")
    return distributed.group.WORLD


def reduce(gradients: Gradients, weight: float, count: int, group: Any = None) -> None:
    """End a step; the header is summed in the world's group, or another."""
    header = torch.tensor([*gradients.flags, weight, count], dtype=torch.float64)
    gradients.launch()
    if distributed.is_initialized():
        distributed.all_reduce(header, group=group)
    *flags, weights, counts = header.tolist()
    gradients.finish(flags, weights, count, int(counts))


def take(
    gradients: Gradients, model: Any, optimizer: Any, case: Case, step: int, rank: int
) -> list[tuple[int, int]]:
    """This rank's backwards of a step; the numbers and samples of its micro-batches."""
    mine = [(number, size) for number, (owner, size) in enumerate(case.steps[step]) if owner == rank]
    if isinstance(model, Freezing):
        model.thaw(step)
    if case.zero != "late":
        optimizer.zero_grad(set_to_none=case.zero == "unset")
    gradients.begin()
    for place, (number, samples) in enumerate(mine):
        is_last = case.overlap and place == len(mine) - 1
        gradients.last = lambda is_last=is_last: is_last  # type: ignore[misc]
        loss = loss_of(model, case, step, number, samples, rank)
        gradients.weigh(samples)
        if case.zero == "late" and place == 0:
            optimizer.zero_grad()
        loss.backward()
    return mine


def train(rank: int, case: Case, group: Any) -> Told:
    model, told = built(case), Told()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    gradients = Gradients(model, group, case.bucket_bytes)
    for step in range(len(case.steps)):
        mine = take(gradients, model, optimizer, case, step, rank)
        reduce(gradients, sum(samples for _, samples in mine), len(mine))
        note(told, model)
        optimizer.step()
    gradients.close()
    told.parameters = [parameter.detach().clone() for parameter in model.parameters()]
    return told


def trained(rank: int, cases: list[Case]) -> list[Told]:
    group = joined(rank)
    return [train(rank, case, group) for case in cases]


# -- one at a time -------------------------------------------------------------------------------------------


def events(rank: int, case: Case) -> list[str]:
    """In which order gradients arrived, sums began and backward ended, in the second of two steps alike."""
    group, seen = joined(rank), []
    model = built(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    gradients = Gradients(model, group, case.bucket_bytes)
    begin = distributed.all_reduce
    mine = take(gradients, model, optimizer, case, 0, rank)
    reduce(gradients, sum(samples for _, samples in mine), len(mine))
    seen.clear()

    def all_reduce(*args: Any, **options: Any) -> Any:
        seen.append("sum")
        return begin(*args, **options)

    with patch.object(distributed, "all_reduce", all_reduce):
        mine = take(gradients, model, optimizer, case, 0, rank)
        seen.append("backward ended")
        gradients.launch()
        seen.append("launched")
    reduce(gradients, sum(samples for _, samples in mine), len(mine))
    gradients.close()
    return seen


def extremes(rank: int, weights: tuple[float, float]) -> list[Tensor]:
    """Gradients of one element each: infinite, no number, too large to be summed in half precision, and as ever."""
    group = joined(rank)
    values = [[float("inf"), 1.0], [1.0, float("nan")], [40_000.0, 40_000.0], [3.0, 5.0]]
    module = nn.ParameterList(torch.zeros((), dtype=torch.float16) for _ in values)
    gradients = Gradients(module, group)
    gradients.begin()
    if rank < 2:
        gradients.weigh(weights[rank])
        sum(value[rank] * parameter for value, parameter in zip(values, module, strict=True)).backward()
    reduce(gradients, weights[rank] if rank < 2 else 0.0, int(rank < 2))
    gradients.close()
    return [parameter.grad for parameter in module]


class Buffered(nn.Module):
    """Batch norm, counters, a mask, and buffers that are replaced, grow or do not change."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.changed: Any = self.holding(
            low=torch.zeros(3, dtype=torch.float16),
            count=torch.tensor(100, dtype=torch.uint8),
            mask=torch.zeros(2, dtype=torch.bool),
        )
        self.grown: Any = self.holding(rows=torch.zeros(1))
        self.replaced: Any = self.holding(mean=torch.zeros(2, dtype=torch.complex128))
        self.least: Any = self.holding(value=torch.tensor(torch.inf))
        self.still: Any = self.holding(rows=torch.tensor([1.0, 2.0, 3.0]))

    def holding(self, **buffers: Tensor) -> nn.Module:
        module = nn.Module()
        for name, buffer in buffers.items():
            module.register_buffer(name, buffer)
        return module

    def forward(self, rows: Tensor, rank: int) -> Any:
        self.changed.low += 4000.0 * (rank + 1)
        self.changed.count += 1 + rank
        self.changed.mask |= rank == 0
        self.replaced.mean = self.replaced.mean + rank + 1j
        self.least.value.clamp_(max=float(10 - rank))
        if rank == 0:
            self.grown.rows = torch.arange(len(self.grown.rows) + 1.0)
        return (self.norm(rows) * self.weight).square().mean()


def buffered(rank: int, counts: list[list[int]]) -> list[dict[str, dict[str, Tensor]]]:
    """For each step the buffers "before" it, as this rank "made" them, and as they are "after" it."""
    group = joined(rank)
    model, told = Buffered(), []
    gradients = Gradients(model, group)
    for step, count in enumerate(counts):
        model.zero_grad()
        gradients.begin()
        one = {"before": snapshot(model)}
        for number in range(count[rank]):
            loss = model(rows_of(step, 10 * rank + number, 4, torch.float32)[0], rank)
            gradients.weigh(4)
            loss.backward()
        one["made"] = snapshot(model)
        reduce(gradients, 4 * count[rank], count[rank])
        told.append({**one, "after": snapshot(model)})
    gradients.close()
    return told


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def partly_frozen(rank: int, at: int) -> None:
    """The last rank freezes a layer before that step."""
    group, case = joined(rank), Case()
    header = distributed.new_group(backend="gloo")
    model = built(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients = Gradients(model, group, case.bucket_bytes)
    try:
        for step in range(at + 1):
            if step == at and rank == distributed.get_world_size() - 1:
                model.layers[1].requires_grad_(False)
            mine = take(gradients, model, optimizer, case, step, rank)
            reduce(gradients, sum(samples for _, samples in mine), len(mine), header)
    finally:
        gradients.close()


def broken_off(rank: int) -> tuple[str, int, list[float]]:
    """A step that is not finished: what the next `begin` says; hooks left after `close`; another's result."""
    group, case = joined(rank), Case()
    model = built(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients = Gradients(model, group, case.bucket_bytes)
    mine = take(gradients, model, optimizer, case, 0, rank)
    reduce(gradients, sum(samples for _, samples in mine), len(mine))
    take(gradients, model, optimizer, case, 0, rank)
    gradients.launch()
    said = ""
    try:
        gradients.begin()
    except ShardQueueError as error:
        said = str(error)
    gradients.close()
    hooks = sum(len(parameter._post_accumulate_grad_hooks or ()) for parameter in model.parameters())
    mean = train(rank, case, group).parameters[0].flatten().tolist()
    return said, hooks, mean


def copied(rank: int) -> bool:
    """Whether a module can be copied and saved in the middle of a step."""
    group, case = joined(rank), Case()
    model = built(case)
    gradients = Gradients(model, group)
    take(gradients, model, torch.optim.SGD(model.parameters()), case, 0, rank)
    twin = copy.deepcopy(model)
    torch.save(model.state_dict(), io.BytesIO())
    gradients.close()
    return digest(list(twin.parameters())) == digest(list(model.parameters()))


class Assorted(nn.Module):
    """Something of every type, in values of the rank's own."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(rank)
        for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.complex64):
            value = nn.Parameter(torch.randn(3, 2, generator=generator).to(dtype))
            self.register_parameter(f"p{len(list(self.parameters()))}", value)
        self.register_buffer("mask", torch.tensor([rank == 0, rank == 1]))
        self.register_buffer("short", torch.tensor(rank, dtype=torch.int16))
        self.register_buffer("none", torch.empty(0))
        self.register_buffer("turned", torch.randn(3, 4, generator=generator).t())


def broadcast(rank: int, bucket_bytes: int, differs: bool) -> dict[str, Tensor]:
    group = joined(rank)
    module = Assorted(rank)
    if differs and rank:
        module.register_buffer("more", torch.zeros(1))
    broadcast_module(module, group, bucket_bytes)
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}
