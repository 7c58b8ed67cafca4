"""What one rank does with a `SharedQueueDataModule` in a Trainer, and all that it has to say about it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from models import Recorder, quiet_trainer

from shardqueue.lightning import SharedQueueDataModule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from lightning.pytorch import LightningModule
    from ranks import Ranks

    Up = Callable[[int], Ranks]


@dataclass(frozen=True)
class Job:
    """Verbs of a Trainer, one after the other, with one model and one data module.

    Attributes:
        mailbox: a folder.
        data: arguments of the data module.
        trainer: arguments of the Trainer.
        verbs: what is called.
        model, module, callbacks: what makes the model, the data module and the callbacks, in each rank.
    """

    mailbox: str
    data: dict[str, Any]
    trainer: dict[str, Any] = field(default_factory=dict)
    verbs: tuple[str, ...] = ("fit",)
    model: Callable[[], LightningModule] = Recorder
    module: Callable[..., SharedQueueDataModule] = SharedQueueDataModule
    callbacks: tuple[Callable[[], Any], ...] = ()


@dataclass(frozen=True)
class Ran:
    """What became of it in one rank.

    Attributes:
        seen: rows of each batch, by stage (and epoch of training).
        parameters: of the model, afterwards.
        metrics: that the Trainer knew after each verb.
        optimizer_steps: `trainer.global_step`.
        length: `trainer.num_training_batches`.
        outputs: of the last verb.
        ordered: the same, put in order by the data module, after a prediction.
        notes: what the model has noted itself.
    """

    seen: dict[str, list[list[int]]]
    parameters: list[float]
    metrics: dict[str, float]
    optimizer_steps: int
    length: float
    outputs: Any
    ordered: list[Any]
    notes: Any


def run(rank: int, size: int, job: Job) -> Ran:
    """Do it, in this rank."""
    data, model = job.module(job.mailbox, **job.data), job.model()
    trainer = quiet_trainer(size, callbacks=[make() for make in job.callbacks], **job.trainer)
    outputs: Any = None
    metrics: dict[str, float] = {}
    for verb in job.verbs:
        outputs = getattr(trainer, verb)(model, datamodule=data)
        metrics |= {name: float(value) for name, value in trainer.callback_metrics.items()}
    ordered = data.in_order(outputs) if job.verbs[-1] == "predict" and outputs is not None else []
    parameters = [value.detach().reshape(-1) for value in model.parameters()]
    return Ran(
        seen=getattr(model, "seen", {}),
        parameters=torch.cat(parameters).tolist(),
        metrics=metrics,
        optimizer_steps=trainer.global_step,
        length=trainer.num_training_batches,
        outputs=outputs,
        ordered=ordered,
        notes=getattr(model, "notes", None),
    )


def run_all(ranks: Up, size: int, job: Job) -> list[Ran]:
    """Do it in `size` ranks together."""
    return ranks(size).run(run, size, job)


def rows_of(every: Iterable[Ran], stage: str) -> Counter[int]:
    """How often each row was seen in a stage, on all ranks."""
    return Counter(chain.from_iterable(chain.from_iterable(one.seen.get(stage, []) for one in every)))


def steps_of(every: Iterable[Ran], stage: str) -> list[int]:
    """Batches by rank."""
    return [len(one.seen.get(stage, [])) for one in every]
