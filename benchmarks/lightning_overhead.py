"""What lockstep costs a step of training beside plain DistributedDataParallel (DDP), on gloo ranks of one machine.

- `trainer`: a Lightning Trainer with `SharedQueueDataModule`, alone and with `SharedQueueCallback`, over the same
  Trainer with a plain `DataLoader`, to which Lightning gives a `DistributedSampler`.
- `loop`: a DDP loop over `session.track(loader, group=...)`, over the bare loop with a `DistributedSampler`.
- `idle`: the same loops without a model, which do nothing with a batch: what ours computes a step, none of it hidden.
- `agreement`: one agreement by 2 and 4 ranks that is awaited at once, and what calling it costs where it is begun a
  step ahead, as training does. Beside an all-reduce of one float that is awaited at once.

A step of the first two computes next to nothing and then sleeps for 20 ms, so that two cores suffice. A step's time
is that from its begin to the next one's. The sides take turns in ranks that stay up; of a run the median step counts,
of the runs the median of what they differ by from the plain run of the same turn. Processor time is of all threads of
a rank, and tells more where others keep the machine busy.

All train the same rows, which divide evenly, in units of 16 batches: not tapered, because the claims of an epoch as
short as these would be measured instead. That each row came exactly once is checked by value, and if not, the exit
code is 1. A missed reach alone is marked, and fails only with `--strict`.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain, pairwise
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.gloo_ranks import in_ranks
from benchmarks.loader import Numbers, make_loader
from benchmarks.report import Report, Row, options
from shardqueue import Session, SharedQueueDataset
from shardqueue.agreement import Ranks
from shardqueue.agreement import Row as RankRow
from shardqueue.lightning import SharedQueueCallback, SharedQueueDataModule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

STEP = 0.02
"""Seconds of a training step."""
BATCH_ROWS = 8
RATIO = 1.03
WARM = 5
"""Steps of a run that are not timed."""


# -- one run -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Work:
    """What a rank trains in a run: so many steps of `pause` seconds, from a loader with so many workers."""

    steps: int
    workers: int
    pause: float

    @property
    def rows(self) -> int:
        """Of the dataset, for all ranks."""
        return self.steps * BATCH_ROWS * dist.get_world_size()


@dataclass(slots=True)
class Run:
    """What a rank did in a run: when its steps began, by the clock and in its processor time, and their rows."""

    began: list[float] = field(default_factory=list)
    used: list[float] = field(default_factory=list)
    seen: list[int] = field(default_factory=list)

    def step(self, batch: torch.Tensor) -> None:
        """A step begins."""
        self.began.append(time.perf_counter())
        self.used.append(time.process_time())
        self.seen += batch.flatten().tolist()

    @property
    def seconds(self) -> list[float]:
        """Of each timed step."""
        return [after - before for before, after in pairwise(self.began[WARM:])]

    @property
    def processor(self) -> float:
        """Seconds of processor time of a step, all threads of the rank together, its loader's workers not."""
        return (self.used[-1] - self.used[WARM]) / len(self.seconds)


def loss(model: torch.nn.Module, batch: torch.Tensor, pause: float) -> torch.Tensor:
    """A training step's work."""
    time.sleep(pause)
    result: torch.Tensor = model(batch * 1e-6).square().mean()
    return result


class Model(LightningModule):
    """A linear model that takes its time."""

    def __init__(self, run: Run, pause: float) -> None:
        super().__init__()
        self._run, self._pause = run, pause
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        """Note when it begins."""
        self._run.step(batch)
        return loss(self.layer, batch, self._pause)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(work: Work, run: Run, callbacks: list[Any], **data: Any) -> None:
    trainer = Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy="ddp",
        max_epochs=1,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(run, work.pause), **data)


def fit_plain(work: Work, run: Run, folder: str) -> None:  # noqa: ARG001
    loader = make_loader(Numbers(work.rows), work.workers, batch_size=BATCH_ROWS, shuffle=True)
    fit(work, run, [], train_dataloaders=loader)


def fit_module(work: Work, run: Run, folder: str) -> None:
    fit(work, run, [], datamodule=data_module(work, folder))


def fit_callback(work: Work, run: Run, folder: str) -> None:
    callback = SharedQueueCallback(lambda progress: 0.01 / (1 + progress))
    fit(work, run, [callback], datamodule=data_module(work, folder))


def data_module(work: Work, folder: str) -> SharedQueueDataModule:
    context = "fork" if work.workers else None
    return SharedQueueDataModule(
        folder,
        train=Numbers(work.rows),
        batch_size=BATCH_ROWS,
        taper=False,
        num_workers=work.workers,
        multiprocessing_context=context,
    )


def loop_plain(work: Work, run: Run, folder: str) -> None:  # noqa: ARG001
    train(work, run, plain_loader(work), lambda: None)


def loop_tracked(work: Work, run: Run, folder: str) -> None:
    with Session(folder) as session:
        items = session.track(queue_loader(work, folder), group=dist.group.WORLD)
        train(work, run, (batch for _, batch in items), lambda: session.step(samples=BATCH_ROWS))


def train(work: Work, run: Run, batches: Iterable[torch.Tensor], stepped: Callable[[], None]) -> None:
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in batches:
        run.step(batch)
        optimizer.zero_grad()
        loss(model, batch, work.pause).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        stepped()


def idle_plain(work: Work, run: Run, folder: str) -> None:  # noqa: ARG001
    for batch in plain_loader(work):
        run.step(batch)


def idle_tracked(work: Work, run: Run, folder: str) -> None:
    with Session(folder) as session:
        for _, batch in session.track(queue_loader(work, folder), group=dist.group.WORLD):
            run.step(batch)
            session.step(samples=BATCH_ROWS)


def plain_loader(work: Work) -> DataLoader[Any]:
    rows = Numbers(work.rows)
    return make_loader(rows, work.workers, batch_size=BATCH_ROWS, sampler=DistributedSampler(rows))


def queue_loader(work: Work, folder: str) -> DataLoader[Any]:
    dataset = SharedQueueDataset.from_dataset(
        Numbers(work.rows), folder, BATCH_ROWS, shuffle=True, with_step=True, taper=False
    )
    return make_loader(dataset, work.workers, batch_size=None)


Side = tuple[str, "Callable[[Work, Run, str], None]"]
TRAINER: tuple[Side, ...] = (
    ("plain", fit_plain),
    ("data module", fit_module),
    ("data module and callback", fit_callback),
)
LOOP: tuple[Side, ...] = (("plain", loop_plain), ("tracked", loop_tracked))
IDLE: tuple[Side, ...] = (("plain", idle_plain), ("tracked", idle_tracked))


# -- one agreement -------------------------------------------------------------------------------------------


def time_agreements(times: int) -> dict[str, float]:
    """Median microseconds of an all-reduce, of an agreement, and of the calls of one that is begun a step ahead."""
    ranks = Ranks(dist.group.WORLD)
    one = torch.zeros(1)

    def reduce() -> None:
        dist.all_reduce(one)

    def agree() -> None:
        ranks.begin(RankRow()).rows()

    found = {}
    for name, once in (("all-reduce", reduce), ("at once", agree)):
        seconds = []
        for _ in range(times):
            began = time.perf_counter()
            once()
            seconds.append(time.perf_counter() - began)
        found[name] = median(seconds) * 1e6
    seconds = []
    for _ in range(times // 10):
        began = time.perf_counter()
        agreement = ranks.begin(RankRow())
        begun = time.perf_counter()
        time.sleep(STEP)
        slept = time.perf_counter()
        agreement.rows()
        seconds.append(begun - began + time.perf_counter() - slept)
    found["ahead"] = median(seconds) * 1e6
    ranks.close()
    return found


# -- in ranks ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Turn:
    """What all ranks did when it was one side's turn: as in `Run`, the rows sorted."""

    seconds: list[float]
    processor: float
    seen: list[int]


def take_turns(sides: Sequence[Side], work: Work, turns: int, folder: str) -> dict[str, list[Turn]]:
    """Run the sides in turn, there and back again, so that noise and drift hit all alike; in each rank."""
    found: dict[str, list[Turn]] = {name: [] for name, _ in sides}
    for turn in range(turns):
        for name, side in sides[:: 1 if turn % 2 else -1]:
            run = Run()
            dist.barrier()
            side(work, run, f"{folder}/{name}-{turn}")
            parts: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(parts, (run.seconds, run.processor, run.seen))
            seconds, processor, seen = zip(*parts, strict=True)
            found[name].append(Turn([*chain(*seconds)], fmean(processor), sorted(chain(*seen))))
            gc.collect()  # loaders hold their workers
    return found


# -- the rows ------------------------------------------------------------------------------------------------


class Overhead:
    """Runs the cases and reports them."""

    def __init__(self, report: Report, quick: bool, folder: str) -> None:
        self.report, self.quick, self._folder = report, quick, folder

    def trainer(self) -> None:
        """Lightning over Lightning."""
        self._compare("Trainer", TRAINER, STEP)

    def loop(self) -> None:
        """A DDP loop over a DDP loop."""
        self._compare("DDP loop", LOOP, STEP)

    def idle(self) -> None:
        """A loop that does nothing over another."""
        self._compare("idle loop", IDLE, 0.0)

    def agreement(self) -> None:
        """What the ranks tell each other before a step."""
        for size in (2, 4):
            found = in_ranks(size, time_agreements, 200 if self.quick else 1000)
            against = f"all-reduce of one float {found['all-reduce']:.0f}"
            for name, what in (("at once", "awaited at once"), ("ahead", "begun a step ahead")):
                self.report.add(
                    Row(f"agreement of {size} ranks, {what}", found[name], "us/step", None, against)
                )

    def _compare(self, name: str, sides: tuple[Side, ...], pause: float) -> None:
        turns = 3 if self.quick else 4
        for workers in (0,) if self.quick else (0, 2):
            steps = (48 if self.quick else 96) * (1 if pause else 4)
            work = Work(steps, workers, pause)
            title = f"{name}, {steps} steps of {pause * 1e3:.0f} ms, {workers} workers"
            folder = tempfile.mkdtemp(dir=self._folder)
            found = in_ranks(2, take_turns, sides, work, turns, folder)
            rows = list(range(2 * steps * BATCH_ROWS))
            for side, each in found.items():
                self._count(f"{title}, {side}", each, rows)
            plain = found.pop("plain")
            for side, each in found.items():
                self._tell(f"{title}: {side}", each, plain, pause, None if self.quick else RATIO)

    def _count(self, name: str, turns: list[Turn], rows: list[int]) -> None:
        """Report what was seen too often, or not at all."""
        for turn in turns:
            if turn.seen != rows:
                found, wanted = Counter(turn.seen), Counter(rows)
                twice, never = (found - wanted).total(), (wanted - found).total()
                self.report.wrong.append(f"{name}: of {len(rows)} rows {twice} came too often, {never} never")

    def _tell(
        self, name: str, ours: list[Turn], plain: list[Turn], pause: float, reach: float | None
    ) -> None:
        pairs = list(zip(ours, plain, strict=True))
        steps = [(median(our.seconds) * 1e6, median(their.seconds) * 1e6) for our, their in pairs]
        means = [(fmean(our.seconds) * 1e6, fmean(their.seconds) * 1e6) for our, their in pairs]
        processor = [(our.processor * 1e6, their.processor * 1e6) for our, their in pairs]
        if pause:
            ratios = [our / their for our, their in steps]
            against = f"{len(ratios)} turns {min(ratios):.3f} to {max(ratios):.3f}"
            self.report.add(Row(f"{name}, median step over plain", median(ratios), "x plain", reach, against))
        self._tell_more(f"{name}, more a median step", steps)
        self._tell_more(f"{name}, more a mean step", means)
        self._tell_more(f"{name}, more processor time", processor)

    def _tell_more(self, name: str, pairs: list[tuple[float, float]]) -> None:
        more = [our - their for our, their in pairs]
        plain = median(their for _, their in pairs)
        against = f"plain {plain:.0f}; {len(more)} turns {min(more):.0f} to {max(more):.0f}"
        self.report.add(Row(name, median(more), "us/step", None, against))


CASES = ("trainer", "loop", "idle", "agreement")


def main(arguments: list[str] | None = None) -> int:
    given = options(
        "lightning_overhead",
        "Ranks in lockstep over the shared queue, beside plain DistributedDataParallel.",
        "fewer steps and turns, without loader workers",
        CASES,
    ).parse_args(arguments)
    report = Report("lightning_overhead")
    with tempfile.TemporaryDirectory() as folder:
        overhead = Overhead(report, given.quick, folder)
        for name in given.only or CASES:
            getattr(overhead, name)()
    return report.finish(given.strict)


if __name__ == "__main__":
    sys.exit(main())
