"""The same work (see `elastic_ranks`) by a Lightning Trainer: an unmodified module, and two strategies."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

from benchmarks.elastic_ranks import TAPER, Rows, loss_of, model_of, optimizer_of
from shardqueue.lightning import ElasticStrategy, SharedQueueDataModule

if TYPE_CHECKING:
    from benchmarks.elastic_ranks import Run, Side, Work


class Model(LightningModule):
    """Takes its time, and notes when its optimizer steps."""

    def __init__(self, work: Work, run: Run) -> None:
        super().__init__()
        self._work, self._run = work, run
        self.inner = model_of(work)

    def on_train_start(self) -> None:
        """The first step begins."""
        self._run.begin()

    def training_step(self, batch: Any) -> torch.Tensor:
        """One micro-batch."""
        self._run.take(batch[0])
        time.sleep(self._work.pause(dist.get_rank(), self.global_step))
        return loss_of(self._work, self.inner, batch)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """The next step begins."""
        super().optimizer_step(*args, **kwargs)
        self._run.begin()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD."""
        return optimizer_of(self.inner)


def fit_elastic(work: Work, run: Run, folder: str) -> Any:
    """By `ElasticStrategy`; the model."""
    data = SharedQueueDataModule(folder, train=Rows(work), batch_size=work.batch, taper=TAPER)
    return fit(work, run, {"datamodule": data}, strategy=ElasticStrategy(work.micro_batches))


def fit_plain(work: Work, run: Run, folder: str) -> Any:  # noqa: ARG001
    """By `DDPStrategy`, with as many micro-batches a rank; the model."""
    data = {"train_dataloaders": DataLoader(Rows(work), work.batch)}
    each = work.micro_batches // dist.get_world_size()
    return fit(work, run, data, strategy="ddp", accumulate_grad_batches=each)


def fit(work: Work, run: Run, data: dict[str, Any], **settings: Any) -> Any:
    """Train one epoch; the model."""
    trainer = Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    model = Model(work, run)
    trainer.fit(model, **data)
    return model.inner


SIDES: tuple[Side, ...] = (("DDP", fit_plain), ("elastic", fit_elastic))
