"""What the ranks of the elastic benchmarks do: the same work in elastic steps and by DistributedDataParallel (DDP).

Both sides run in the same processes, which stay up, in turns. Each notes when its steps began, what the sum of the
gradients took and which rows each micro-batch had. After every turn the ranks compare: no row came twice or never,
the replicas are identical by their bytes, and the parameters are those of one process that went through the same
micro-batches.

The store is a TCPStore that rank 0 serves, as `init_process_group` makes it.
"""

from __future__ import annotations

import gc
import hashlib
import math
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import chain, pairwise
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from shardqueue import Session, SharedQueueDataset, open_mailbox
from shardqueue.elastic import Elastic
from shardqueue.mailbox.faults import Counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

FEATURES = 6
TAPER = 16
"""Learners that the end of a pass is cut for; by the default, all of a pass as short as these would be its end."""
EXACT, SINGLE = 1e-12, 1e-6
"""How far parameters may be from those of one process, in float64 and in float32."""


# -- one side's turn -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Work:
    """What is trained in one turn, by either side.

    Attributes:
        micro_batches: of a step, on all ranks together.
        steps: how many.
        pauses: seconds for which a micro-batch sleeps, by rank; none if not given.
        later: the same from the middle of the steps on, where they change.
        extra: forward passes that a rank adds to a micro-batch, by rank; none if not given.
        batch: rows of a micro-batch.
        repeat: how often each of them is computed, where that is to take longer than loading it.
        layers, width: of the model; without layers it is a tiny one in float64.
        device: where it is.
        autocast: compute in bfloat16, with parameters in float32.
        tolerance: how far parameters may be from those of one process; None where that is not computed.
    """

    micro_batches: int
    steps: int
    pauses: tuple[float, ...] = ()
    later: tuple[float, ...] = ()
    extra: tuple[int, ...] = ()
    batch: int = 2
    repeat: int = 1
    layers: int = 0
    width: int = FEATURES
    device: str = "cpu"
    autocast: bool = False
    tolerance: float | None = EXACT

    @property
    def rows(self) -> int:
        """Of the data."""
        return self.steps * self.micro_batches * self.batch

    def pause(self, rank: int, step: int) -> float:
        """Seconds for which a micro-batch of that step sleeps."""
        pauses = self.later if self.later and step >= self.steps // 2 else self.pauses
        return pauses[rank] if pauses else 0.0

    def share(self, rank: int, size: int) -> int:
        """Micro-batches a step where all ranks get as many, the first ones one more if they do not divide."""
        return self.micro_batches // size + (rank < self.micro_batches % size)


@dataclass(slots=True)
class Run:
    """What a rank did: when its steps began and the last one ended, and the rows of each micro-batch by step."""

    began: list[float] = field(default_factory=list)
    batches: list[list[list[int]]] = field(default_factory=list)
    reduces: list[float] = field(default_factory=list)
    requests: Counter[str] = field(default_factory=Counter)

    def begin(self) -> None:
        """A step begins, or the last one is over."""
        self.began.append(time.perf_counter())
        self.batches.append([])

    def take(self, numbers: torch.Tensor) -> None:
        """A micro-batch begins."""
        self.batches[-1].append(numbers.tolist())


@dataclass(slots=True)
class Turn:
    """What all ranks did in one turn of a side.

    Attributes:
        steps: seconds of each.
        reduces: seconds of each step's sum for the rank that came last to it, so that nobody is waited for.
        counts: micro-batches of each step by rank.
        requests: of all ranks, to the store that has the tokens and to the mailbox.
        far: how far parameters are from those of one process; not a number where that was not computed.
    """

    steps: list[float]
    reduces: list[float]
    counts: list[list[int]]
    requests: Counter[str]
    far: float = math.nan


class Rows(Dataset[Any]):
    """Row n: its number, features, and what is to be learnt of them."""

    def __init__(self, work: Work) -> None:
        generator = torch.Generator().manual_seed(7)
        dtype = torch.float32 if work.layers else torch.float64
        self.inputs = torch.randn(work.rows, work.width, generator=generator, dtype=dtype)
        self.targets = self.inputs[:, :1].sin()

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, row: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        return row, self.inputs[row], self.targets[row]


def model_of(work: Work) -> torch.nn.Module:
    """The same on all ranks."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if not work.layers:
            tiny = torch.nn.Linear(FEATURES, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
            return torch.nn.Sequential(*tiny).to(torch.float64)
        layers = [(torch.nn.Linear(work.width, work.width), torch.nn.Tanh()) for _ in range(work.layers)]
        model = torch.nn.Sequential(*chain(*layers), torch.nn.Linear(work.width, 1))
        return model.to(work.device)


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def loss_of(work: Work, model: torch.nn.Module, batch: Any, extra: int = 0) -> torch.Tensor:
    """The mean loss of a micro-batch."""
    _, inputs, targets = batch
    inputs, targets = (part.to(work.device).repeat(work.repeat, 1) for part in (inputs, targets))
    for _ in range(extra):
        with torch.no_grad(), torch.autocast(work.device, torch.bfloat16, enabled=work.autocast):
            model(inputs)
    with torch.autocast(work.device, torch.bfloat16, enabled=work.autocast):
        return functional.mse_loss(model(inputs).to(targets.dtype), targets)


def slow_loss(work: Work, model: torch.nn.Module, batch: Any, step: int) -> torch.Tensor:
    """The same by this rank, which takes its time."""
    rank = dist.get_rank()
    time.sleep(work.pause(rank, step))
    return loss_of(work, model, batch, work.extra[rank] if work.extra else 0)


def elastic(work: Work, run: Run, folder: str, engine: type[Elastic] = Elastic, overlap: bool = True) -> Any:
    """Elastic steps over the shared queue; the model."""
    mailbox, name = Counted(open_mailbox(folder)), f"rank-{dist.get_rank()}"
    dataset = SharedQueueDataset.from_dataset(
        *(Rows(work), mailbox, work.batch),
        shuffle=True,
        with_step=True,
        taper=TAPER,
        learner_id=name,
    )
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=None)
    model = model_of(work)
    optimizer = optimizer_of(model)
    with Session(mailbox, name) as session:
        elastic = engine(session, model, work.micro_batches, overlap=overlap)
        for step in elastic.steps(loader):
            run.begin()
            optimizer.zero_grad()
            for _, batch in step:
                run.take(batch[0])
                slow_loss(work, model, batch, step.number).backward()  # type: ignore[no-untyped-call]
            began = time.perf_counter()
            step.reduce()
            run.reduces.append(time.perf_counter() - began)
            optimizer.step()
            session.step(samples=step.samples)
        run.begin()
        elastic.close()
    assert elastic.tokens is not None
    run.requests.update(store=elastic.tokens.requests, mailbox=mailbox.total)
    run.requests["units"] = len(dataset.plan) if dist.get_rank() == 0 else 0
    return model


def plain(work: Work, run: Run, folder: str) -> Any:  # noqa: ARG001
    """DDP with `no_sync`, each rank as many micro-batches; the model."""
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = Rows(work)
    first = sum(work.share(other, size) for other in range(rank))
    share, whole = work.share(rank, size), range(len(rows))
    own = [
        row
        for step in range(work.steps)
        for row in whole[(step * work.micro_batches + first) * work.batch :][: share * work.batch]
    ]
    batches = iter(DataLoader(rows, work.batch, sampler=own))
    model = DistributedDataParallel(model_of(work))
    optimizer = optimizer_of(model)
    for step in range(work.steps):
        run.begin()
        optimizer.zero_grad()
        for number in range(share):
            batch = next(batches)
            run.take(batch[0])
            with model.no_sync() if number < share - 1 else nullcontext():
                loss = slow_loss(work, model, batch, step) * size / work.micro_batches
                loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    run.begin()
    return model.module


def compute_only(work: Work, run: Run, folder: str) -> Any:  # noqa: ARG001
    """What plain does, without a sum over ranks; for work without tolerance."""
    rank, size = dist.get_rank(), dist.get_world_size()
    batches = iter(DataLoader(Rows(work), work.batch))
    model = model_of(work)
    optimizer = optimizer_of(model)
    for step in range(work.steps):
        run.begin()
        optimizer.zero_grad()
        for _ in range(work.share(rank, size)):
            slow_loss(work, model, next(batches), step).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    run.begin()
    return model


# -- turns ---------------------------------------------------------------------------------------------------

Side = tuple[str, "Callable[[Work, Run, str], Any]"]
Found = tuple[dict[str, list[Turn]], list[str]]
"""The turns of each side, and what must never happen and did."""


def take_turns(sides: Sequence[Side], work: Work, turns: int, folder: str) -> Found:
    """Run the sides in turn, there and back again, so that noise and drift hit all alike; in each rank."""
    found: dict[str, list[Turn]] = {name: [] for name, _ in sides}
    wrong: list[str] = []
    for turn in range(turns):
        for name, side in sides[:: 1 if turn % 2 else -1]:
            run = Run()
            dist.barrier()
            model = side(work, run, f"{folder}/{name}-{turn}")
            parts: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(parts, (run, digest(model)))
            runs = [part[0] for part in parts]
            taken = _together(runs)
            found[name].append(taken)
            if side is not compute_only and dist.get_rank() == 0:
                steps = [[*chain(*each)] for each in zip(*(run.batches[:-1] for run in runs), strict=True)]
                if work.tolerance is not None:
                    taken.far = distance(model, alone(work, steps))
                told = check(work, steps, {part[1] for part in parts}, taken.far)
                wrong += [f"{name}, turn {turn}: {what}" for what in told]
            gc.collect()
    return found, wrong


def _together(runs: list[Run]) -> Turn:
    steps = [[after - before for before, after in pairwise(run.began)] for run in runs]
    return Turn(
        [fmean(each) for each in zip(*steps, strict=True)],
        [min(each) for each in zip(*(run.reduces for run in runs), strict=True)],
        [
            [len(batches) for batches in each]
            for each in zip(*(run.batches[:-1] for run in runs), strict=True)
        ],
        sum((run.requests for run in runs), Counter()),
    )


def check(work: Work, steps: Sequence[list[list[int]]], digests: set[str], far: float) -> list[str]:
    """What is wrong with what all ranks trained: the rows of each step's micro-batches, and their parameters."""
    wrong = []
    seen, wanted = Counter(chain(*chain(*steps))), Counter(range(work.rows))
    if seen != wanted:
        twice, never = (seen - wanted).total(), (wanted - seen).total()
        wrong.append(f"of {work.rows} rows {twice} came too often, {never} never")
    sizes = sorted({len(batches) for batches in steps})
    if sizes != [work.micro_batches] or len(steps) != work.steps:
        wrong.append(f"{len(steps)} steps had {sizes} micro-batches, not {work.steps} {work.micro_batches}")
    if len(digests) > 1:
        wrong.append("the ranks' parameters differ")
    if work.tolerance is not None and not far <= work.tolerance:
        wrong.append(f"parameters are {far:.1e} from those of one process, more than {work.tolerance:.0e}")
    return wrong


def alone(work: Work, steps: Iterable[list[list[int]]]) -> torch.nn.Module:
    """The model after one process has gone through the same micro-batches."""
    rows, model = Rows(work), model_of(work)
    optimizer = optimizer_of(model)
    for batches in steps:
        optimizer.zero_grad()
        for batch in batches:
            numbers = torch.tensor(batch)
            loss = loss_of(work, model, (numbers, rows.inputs[numbers], rows.targets[numbers]))
            loss.backward()  # type: ignore[no-untyped-call]
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= len(batches)  # not the loss, which half precision would round
        optimizer.step()
    return model


def distance(one: torch.nn.Module, other: torch.nn.Module) -> float:
    """The greatest difference between two parameters."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a.detach() - b.detach()).abs().max()) for a, b in pairs)


def digest(model: torch.nn.Module) -> str:
    """Of the bytes of all parameters."""
    found = hashlib.blake2b(digest_size=8)
    for parameter in model.parameters():
        found.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


# -- parts of a step on their own ----------------------------------------------------------------------------


def time_requests(times: int) -> float:
    """Median seconds of a request to the store, while all ranks ask at once."""
    store: Any = dist
    store = store.distributed_c10d._get_default_store()
    seconds = []
    dist.barrier()
    for _ in range(times):
        began = time.perf_counter()
        store.add("benchmark", 0)
        seconds.append(time.perf_counter() - began)
    return median(seconds)


def time_all_reduce(work: Work, bucket_bytes: int, times: int) -> float:
    """Median seconds of a sum over ranks of as much as the gradients are, in buckets, with nothing beside it."""
    left = sum(parameter.numel() for parameter in model_of(work).parameters())
    buckets = []
    while left:
        buckets.append(torch.zeros(min(left, bucket_bytes // 4), device=work.device))
        left -= len(buckets[-1])
    seconds = []
    for _ in range(times):
        dist.barrier()
        began = time.perf_counter()
        for under_way in [dist.all_reduce(bucket, async_op=True) for bucket in buckets]:
            under_way.wait()
        seconds.append(time.perf_counter() - began)
    return median(seconds)
