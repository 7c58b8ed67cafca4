"""What a rank trains: one LightningModule, which knows nothing of elastic steps, under one Trainer a phase.

The data are made: rows near one of ten prototypes, each with its number, so that what was trained can be counted by
value. The model is a small classifier. A layer in its middle holds the backward pass up until the time that a rank
of this speed takes has passed since the micro-batch began: this paces forward and backward together, and what is sent
between the ranks goes at its own speed.

The ranks' process group is made once, on loopback, and serves both Trainers.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from shardqueue.demo.elastic.options import DDP
from shardqueue.lightning import ElasticStrategy, SharedQueueDataModule

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardqueue.demo.elastic.document import MicroBatch, Part
    from shardqueue.demo.elastic.options import ElasticOptions
    from shardqueue.demo.elastic.rank import Shared
    from shardqueue.demo.service import Ready

FEATURES, CLASSES, WIDTH = 64, 10, 64
SPREAD = 2.0
"""Standard deviation of a row's features around those of its prototype; those of the prototypes have 1 around 0."""
RATE, MOMENTUM = 0.03, 0.9


def dataset(rows: int) -> TensorDataset:
    """Return so many rows: number, features, class; the same in every process."""
    generator = torch.Generator().manual_seed(0)
    prototypes = torch.randn(CLASSES, FEATURES, generator=generator)
    classes = torch.randint(CLASSES, (rows,), generator=generator)
    noise = torch.randn(rows, FEATURES, generator=generator)
    return TensorDataset(torch.arange(rows), prototypes[classes] + SPREAD * noise, classes)


class Hold(torch.autograd.Function):
    """Changes nothing, and holds the backward pass up."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, hold: Callable[[], None]) -> Tensor:
        """Pass `hidden` on."""
        ctx.hold = hold
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Pass the gradient on when `hold` returns."""
        ctx.hold()
        return gradients[0], None


class Pace:
    """How long a micro-batch takes on this rank, and what was trained when.

    Attributes:
        start: of the phase, on `time.monotonic`.
        batches: what was trained, in order.
    """

    def __init__(self, number: int, options: ElasticOptions, done: Tensor) -> None:
        self._number, self._node, self._done = number, options.nodes[number], done
        self._seconds = options.batch_seconds / options.speeds[number]
        self.start = 0.0
        self.batches: list[MicroBatch] = []

    def now(self) -> float:
        """Seconds since the start."""
        return round(time.monotonic() - self.start, 6)

    def begin(self, step: int, rows: Tensor) -> MicroBatch:
        """A micro-batch of an optimizer step begins."""
        now = self.now()
        record: MicroBatch = {
            "pid": os.getpid(),
            "node": self._node,
            "step": step,
            "rows": rows.tolist(),
            "loss": 0.0,
            "start": now,
            "end": now,
        }
        self.batches.append(record)
        return record

    def hold(self, record: MicroBatch) -> None:
        """Wait until a rank of this speed would be done with it."""
        time.sleep(max(0.0, record["start"] + self._seconds - self.now()))
        record["end"] = self.now()
        self._done[self._number] += 1


class Classifier(LightningModule):
    """A module as anybody writes it, but for its pace."""

    def __init__(self, pace: Pace) -> None:
        super().__init__()
        self._pace = pace
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        """The mean loss of a micro-batch."""
        rows, inputs, classes = batch
        record = self._pace.begin(self.global_step, rows)
        hidden: Tensor = Hold.apply(self.first(inputs), lambda: self._pace.hold(record))  # type: ignore[no-untyped-call]
        loss = functional.cross_entropy(self.last(hidden.relu()), classes)
        record["loss"] = round(loss.item(), 6)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD, in which a wrongly scaled gradient would show."""
        return torch.optim.SGD(self.parameters(), lr=RATE, momentum=MOMENTUM)


class Watch(Callback):
    """Begins a phase when all ranks hold their first batch, and notes when each optimizer step ends."""

    def __init__(self, pace: Pace, ready: Ready) -> None:
        self._pace, self._ready = pace, ready
        self.ends: list[float] = []

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, index: int) -> None:  # noqa: ARG002
        """See the class."""
        if index == 0:
            self._pace.start = self._ready()
            time.sleep(max(0.0, -self._pace.now()))

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """See the class."""
        if trainer.global_step > len(self.ends):
            self.ends.append(self._pace.now())


class Rank:
    """One of the ranks, in a process group that lasts for both phases."""

    def __init__(self, number: int, options: ElasticOptions, shared: Shared) -> None:
        self._number, self._options, self._done = number, options, shared.done
        self._data = dataset(options.rows)
        os.environ["LOCAL_RANK"] = str(number)
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        warnings.simplefilter("ignore", PossibleUserWarning)
        for known in (".*LeafSpec.* is deprecated", "You passed in a `val_dataloader`"):
            warnings.filterwarnings("ignore", message=known)
        store = dist.TCPStore("127.0.0.1", shared.port, is_master=False)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=number, world_size=len(options.speeds))

    def train(self, phase: str, mailbox: str, ready: Ready) -> list[Part]:
        """Train one phase, and return this rank's part of it."""
        pace = Pace(self._number, self._options, self._done)
        watch, model = Watch(pace, ready), Classifier(pace)
        if phase == DDP:
            loader = DataLoader(self._data, self._options.batch_size, shuffle=True)
            trainer = self._trainer(watch, strategy="ddp", accumulate_grad_batches=self._options.per_rank)
            trainer.fit(model, loader)
        else:
            trainer = self._trainer(watch, strategy=ElasticStrategy(self._options.micro_batches))
            trainer.fit(model, datamodule=self._queued(mailbox))
        return [{"ends": watch.ends, "digest": _digest(model), "batches": pace.batches}]

    def _queued(self, mailbox: str) -> SharedQueueDataModule:
        return SharedQueueDataModule(
            mailbox,
            train=self._data,
            batch_size=self._options.batch_size,
            unit_batches=self._options.unit_batches,
            learner_id=self._options.nodes[self._number],
        )

    def _trainer(self, watch: Watch, **how: Any) -> Trainer:
        return Trainer(
            accelerator="cpu",
            devices=len(self._options.speeds),
            plugins=[LightningEnvironment()],
            max_epochs=1,
            callbacks=[watch],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **how,
        )


def _digest(model: nn.Module) -> str:
    """The same for the same parameters, to the last bit."""
    values = nn.utils.parameters_to_vector(model.parameters()).detach()
    return hashlib.blake2b(values.numpy().tobytes(), digest_size=8).hexdigest()
