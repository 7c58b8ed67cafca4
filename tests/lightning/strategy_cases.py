"""What ranks train under an `ElasticStrategy`, what they tell of it, and one process that does the same.

Each rank notes by value which rows it was given in which optimizer step. `alone` goes through the same steps in plain
PyTorch, each as one batch, so whatever a Trainer adds to a step is compared with what it means.
"""

from __future__ import annotations

import gc
import threading
from collections import Counter
from dataclasses import dataclass, field
from math import ceil
from typing import TYPE_CHECKING, Any

import torch
from elastic_cases import FEATURES, Rows
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import MixedPrecision
from lockstep_cases import digest
from models import quiet_trainer
from torch.nn import functional

from shardqueue.lightning import ElasticStrategy, SharedQueueDataModule

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


@dataclass(frozen=True)
class Case:
    """One job.

    Attributes:
        rows, batch: of the data, and of a micro-batch; the last may be short.
        each: micro-batches of a step.
        pauses: seconds that each rank adds to a micro-batch, by rank; the others none.
        dtype: of the parameters.
        data, trainer, strategy: further arguments of each.
        model: makes the module.
        callbacks: make what their name says.
        plugins: likewise.
        stages: that the data module has rows for.
        verbs: of the Trainer, one after the other.
        epochs: of each `fit`.
        ckpt_path: that `fit` goes on from.
    """

    rows: int = 96
    batch: int = 2
    each: int = 6
    pauses: tuple[float, ...] = ()
    dtype: str = "float64"
    data: Mapping[str, Any] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)
    strategy: Mapping[str, Any] = field(default_factory=dict)
    model: Callable[[Case], Learner] | None = None
    callbacks: tuple[Callable[[], Any], ...] = ()
    plugins: tuple[Callable[[], Any], ...] = ()
    stages: tuple[str, ...] = ("train",)
    verbs: tuple[str, ...] = ("fit",)
    epochs: int = 1
    ckpt_path: str | None = None

    def made(self) -> Learner:
        with torch.random.fork_rng():
            torch.manual_seed(5)
            model = (self.model or Learner)(self)
        return model.to(getattr(torch, self.dtype))

    @property
    def steps(self) -> int:
        """Of an epoch."""
        return ceil(ceil(self.rows / self.batch) / self.each)


class Learner(LightningModule):
    """A small network; `steps` holds the rows of each of this rank's micro-batches, by optimizer step."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.body = self.build()
        self.steps: dict[int, list[list[int]]] = {}
        self.evaluated: list[tuple[str, list[int]]] = []
        self.notes: list[Any] = []

    def build(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(FEATURES, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(self.body(inputs), targets)

    def note(self, batch: Any) -> None:
        """This rank has a micro-batch, and takes its time."""
        self.steps.setdefault(self.global_step, []).append(batch[0].tolist())
        pauses = self.case.pauses
        threading.Event().wait(pauses[self.global_rank] if self.global_rank < len(pauses) else 0.0)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.note(batch)
        return self.loss(*batch[1:])

    def _evaluate(self, stage: str, batch: Any) -> torch.Tensor:
        stage = "sanity" if self.trainer.sanity_checking else stage
        self.evaluated.append((stage, batch[0].tolist()))
        loss = self.loss(*batch[1:])
        self.log(f"{stage}_rows", batch[0].double().mean(), sync_dist=True, batch_size=len(batch[0]))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate("val", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate("test", batch)

    def predict_step(self, batch: Any, batch_idx: int) -> list[int]:
        self.evaluated.append(("predict", batch[0].tolist()))
        return list(batch[0].tolist())

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def configure_optimizers(self) -> Any:
        return self.optimizer()


class Kept(Logger):
    """Keeps what is logged, on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[tuple[int, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "kept"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.kept.append((-1 if step is None else step, dict(metrics)))


def scaler_of() -> torch.amp.GradScaler:
    """One whose first steps overflow."""
    return torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=8)


def scaled() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", scaler_of())


@dataclass
class Told:
    """What one rank has to say afterwards.

    Attributes:
        steps: rows of its micro-batches, by optimizer step.
        evaluated: the same by stage, in order.
        logged: what reached its logger: the step, and the values.
        metrics: `callback_metrics`.
        digest: of parameters and buffers.
        outputs: of the last verb.
    """

    steps: dict[int, list[list[int]]] = field(default_factory=dict)
    evaluated: list[tuple[str, list[int]]] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    logged: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    digest: str = ""
    global_step: int = 0
    length: float = 0
    notes: list[Any] = field(default_factory=list)
    outputs: Any = None

    @property
    def rows(self) -> list[int]:
        return [row for batches in self.steps.values() for batch in batches for row in batch]

    def values(self, name: str) -> list[tuple[int, Any]]:
        """What reached the logger by this name: the step, and the value."""
        return [(step, metrics[name]) for step, metrics in self.logged if name in metrics]


def told(rank: int, size: int, case: Case, mailbox: str) -> Told:
    """Do what the case says, in this rank."""
    rows = Rows(case.rows, getattr(torch, case.dtype))
    of: dict[str, Any] = {**dict.fromkeys(case.stages, rows), "batch_size": case.batch, "unit_batches": 2}
    data = SharedQueueDataModule(mailbox, **{**of, **case.data})
    model, logger = case.made(), Kept()
    settings: dict[str, Any] = {"max_epochs": case.epochs, "logger": logger, "log_every_n_steps": 1}
    if "val" not in case.stages:
        settings["limit_val_batches"] = 0
    trainer = quiet_trainer(
        size,
        strategy=ElasticStrategy(case.each, **case.strategy),
        callbacks=[make() for make in case.callbacks],
        plugins=[make() for make in case.plugins],
        **{**settings, **case.trainer},
    )
    outputs: Any = None
    for number, verb in enumerate(case.verbs):
        if verb == "fit" and number and case.verbs[number - 1] == "fit":
            trainer.fit_loop.max_epochs = (number + 1) * case.epochs
        more = {"ckpt_path": case.ckpt_path} if verb == "fit" and case.ckpt_path else {}
        outputs = getattr(trainer, verb)(model, datamodule=data, **more)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    found = Told(
        steps=model.steps,
        evaluated=model.evaluated,
        parameters={name: value.detach().clone() for name, value in model.named_parameters()},
        buffers={name: value.clone() for name, value in model.named_buffers()},
        logged=logger.kept,
        metrics=metrics,
        digest=digest(model),
        global_step=trainer.global_step,
        length=trainer.num_training_batches,
        notes=model.notes,
        outputs=data.in_order(outputs) if case.verbs[-1] == "predict" else outputs,
    )
    del trainer, model, data
    gc.collect()
    return found


def all_told(rank: int, size: int, cases: Sequence[Case], folder: str) -> list[Told]:
    """Several jobs one after the other, each in a mailbox of its own."""
    return [told(rank, size, case, f"{folder}/{number}") for number, case in enumerate(cases)]


def all_refused(rank: int, size: int, cases: Sequence[Case], folder: str) -> list[tuple[str, str]]:
    """The error of each job."""
    errors = []
    for number, case in enumerate(cases):
        try:
            told(rank, size, case, f"{folder}/{number}")
        except Exception as error:
            errors.append((type(error).__name__, str(error)))
            del error
            gc.collect()
        else:
            errors.append(("", "nothing was raised"))
    return errors


def steps_of(every: Sequence[Told]) -> list[list[list[int]]]:
    """The micro-batches of each optimizer step, of all ranks."""
    numbers = sorted({step for one in every for step in one.steps})
    assert numbers == list(range(len(numbers)))
    return [[batch for one in every for batch in one.steps.get(step, [])] for step in numbers]


def rows_of(every: Sequence[Told]) -> Counter[int]:
    return Counter(row for one in every for row in one.rows)


def alone(
    case: Case,
    every: Sequence[Told],
    after: Callable[[Learner, torch.optim.Optimizer, int], None] | None = None,
) -> dict[str, torch.Tensor]:
    """The parameters of one process after the same steps; `after` the gradients, what a Trainer does besides."""
    rows = Rows(case.rows, getattr(torch, case.dtype))
    model = case.made()
    optimizer = model.optimizer()
    for number, batches in enumerate(steps_of(every)):
        optimizer.zero_grad()
        count = sum(map(len, batches))
        losses = [
            model.loss(rows.inputs[batch], rows.targets[batch]) * len(batch) / count for batch in batches
        ]
        torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
        if after is not None:
            after(model, optimizer, number)
        optimizer.step()
    return {name: value.detach() for name, value in model.named_parameters()}
