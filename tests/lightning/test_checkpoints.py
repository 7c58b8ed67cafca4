"""A Trainer goes on from a checkpoint: relative to it each batch trains once, by value, on any number of ranks.

The judge is the model: it knows which rows went into an optimizer step. Those of the checkpoint's model, and those of
the legs after it, must be all rows, each once in every epoch.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import pytest
import torch
from lightning.pytorch import Callback
from models import Numbered, Recorder, quiet_trainer

from shardqueue.lightning import SharedQueueCallback, SharedQueueDataModule

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from jobs import Up

QUIET = {"limit_val_batches": 0, "max_epochs": 2}


class Counting(Recorder):
    """Knows which rows of which epoch are in the model, and at which batch it validated."""

    def __init__(self, early: bool = False) -> None:
        super().__init__()
        self.early = early
        self.inside: list[tuple[int, int]] = []
        self.accumulated: list[tuple[int, int]] = []
        self.validated: list[int] = []
        self.estimated: float | None = None

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        if not data.repeating:
            self.accumulated += [(self.current_epoch, int(row)) for row in batch[:, 0]]
        return super().training_step(batch, index)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.inside += self.accumulated
        self.accumulated = []

    def on_validation_epoch_end(self) -> None:
        self.validated.append(self.trainer.fit_loop.epoch_loop.batch_progress.current.ready)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.early:
            self.estimated = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


class StoppedError(Exception):
    """The job ends, on all ranks."""


class Save(Callback):
    """Saves the checkpoint at the n-th call of a hook, and ends the job."""

    def __init__(self, hook: str, count: int, path: str) -> None:
        self.count, self.path = count, path
        self.inside: list[tuple[int, int]] | None = None
        setattr(self, hook, self._save)

    def _save(self, trainer: Any, module: Any, *_: Any) -> None:
        self.count -= not trainer.sanity_checking
        if self.count == 0:
            trainer.save_checkpoint(self.path)
            self.inside = list(module.inside)
            raise StoppedError


class Notes(Callback):
    """Notes the agreed progress of each step, and each epoch's length."""

    def __init__(self) -> None:
        self.progress: list[int] = []
        self.lengths: list[tuple[int, float]] = []

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.progress.append(trainer.datamodule.agreed.progress)
        length = trainer.current_epoch, trainer.num_training_batches
        if length not in self.lengths:
            self.lengths.append(length)


class Manual(Counting):
    """Steps its optimizer itself."""

    def __init__(self, early: bool = False) -> None:
        super().__init__(early)
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = super().training_step(batch, index)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.inside += self.accumulated
        self.accumulated = []
        return loss


class Scheduled(Counting):
    """Saves after the optimizer step, when no callback has heard of it yet, as a signal's handler may."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        super().lr_scheduler_step(scheduler, metric)
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if hasattr(callback, "after_optimizer_step"):
                callback.after_optimizer_step(self.trainer, self)


class Stepping(Counting):
    """Says in `validated` after how many optimizer steps it ended."""

    def on_train_end(self) -> None:
        self.validated.append(self.trainer.global_step)


class Look(Callback):
    """Takes a batch of the train loader before training starts."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        next(iter(trainer.datamodule.train_dataloader()))


@dataclass(frozen=True)
class Leg:
    """One job, from a checkpoint or from the beginning, to a checkpoint or to the end.

    Attributes:
        folder: of the mailbox and the checkpoints.
        load: number of the checkpoint to go on from; 0 for none.
        save: number of the checkpoint to save, `at` the n-th call of a hook; 0 for none.
        rows: of the dataset.
        data, trainer: settings.
        callback: whether there is a `SharedQueueCallback`.
        early: whether the model asks for the number of steps when it makes its optimizer.
        model: what makes it.
        looks: whether somebody looks at the loader first.
    """

    folder: str
    load: int = 0
    save: int = 0
    at: tuple[str, int] = ("on_train_batch_end", 0)
    rows: int = 100
    data: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    callback: bool = True
    early: bool = False
    model: Callable[[bool], Counting] = Counting
    looks: bool = False

    def path(self, number: int) -> str:
        return f"{self.folder}/{number}.ckpt"


@dataclass(frozen=True)
class Went:
    """What a rank has to say about a leg: rows in the model that is saved, or at the end."""

    inside: list[tuple[int, int]]
    validated: list[int]
    progress: list[int]
    lengths: list[tuple[int, float]]
    estimated: float | None


def go(rank: int, size: int, leg: Leg) -> Went:
    """Do a leg, in one rank."""
    settings = {"batch_size": 1, "unit_batches": 20, "taper": False, **leg.data}
    data = SharedQueueDataModule(
        f"{leg.folder}/mailbox", train=Numbered(leg.rows), val=Numbered(8), **settings
    )
    model, notes, save = leg.model(leg.early), Notes(), Save(*leg.at, leg.path(leg.save))
    callbacks = [*([SharedQueueCallback()] if leg.callback else []), notes, *([save] if leg.save else [])]
    callbacks += [Look()] if leg.looks else []
    trainer = quiet_trainer(
        size, callbacks=callbacks, num_sanity_val_steps=0, log_every_n_steps=1, **{**QUIET, **leg.trainer}
    )
    try:
        trainer.fit(model, datamodule=data, ckpt_path=leg.path(leg.load) if leg.load else None)
    except StoppedError:
        assert save.inside is not None
    inside = model.inside if save.inside is None else save.inside
    return Went(inside, model.validated, notes.progress, notes.lengths, model.estimated)


def travel(ranks: Up, leg: Leg, sizes: list[int], stops: list[tuple[str, int]]) -> list[list[Went]]:
    """One leg after the other, on so many ranks; each goes on from where the one before stopped."""
    legs = []
    for number, size in enumerate(sizes):
        last = number == len(stops)
        at = leg.at if last else stops[number]
        part = replace(leg, load=number, save=0 if last else number + 1, at=at)
        legs.append(ranks(size).run(go, size, part))
    return legs


def once(legs: list[list[Went]], rows: int, epochs: int = 2) -> None:
    """Every row is in the model once in every epoch."""
    inside = Counter(chain.from_iterable(one.inside for leg in legs for one in leg))
    wrong = {key: count for key, count in inside.items() if count != 1}
    assert not wrong
    assert set(inside) == {(epoch, row) for epoch in range(epochs) for row in range(rows)}


def state(path: Path, number: int = 1) -> dict[str, Any]:
    """The data module's part of a checkpoint."""
    kept: dict[str, Any] = torch.load(path / f"{number}.ckpt", weights_only=False)["SharedQueueDataModule"]
    return kept


@pytest.mark.parametrize("callback", [True, False], ids=["callback", "coming-back"])
def test_two_ranks_then_three_then_one(ranks: Up, tmp_path: Path, callback: bool) -> None:
    leg = Leg(
        str(tmp_path),
        data={"num_workers": 2, "multiprocessing_context": "fork"},
        callback=callback,
    )
    stops = [("on_train_batch_end", 13), ("on_train_batch_end", 11)]
    legs = travel(ranks, leg, [2, 3, 1], stops)
    once(legs, 100)
    for number, batches in ((1, 26), (2, 59)):
        kept = state(tmp_path, number)
        assert kept["passes"][""]["batches"] == batches
        assert not kept["missing"]
        assert len(json.dumps(kept)) < 2000
    assert [one.lengths for one in legs[1]] == [[(0, 13 + 25)]] * 3
    assert legs[2][0].lengths == [(0, 24 + 41), (1, 100)]
    assert legs[1][0].progress[0] == 26
    assert legs[2][0].progress == [*range(59, 100), *range(100, 200)]


MOMENTS = {
    "before a batch": ("on_train_batch_start", 4),
    "after a batch": ("on_train_batch_end", 4),
    "after an epoch's last batch": ("on_train_batch_end", 10),
    "in the middle of an epoch, validated": ("on_validation_end", 1),
    "at its end, validated": ("on_validation_end", 2),
    "when it is over": ("on_train_epoch_end", 1),
    "when the next begins": ("on_train_epoch_start", 2),
}


@pytest.mark.parametrize("steps", [pytest.param(-1, marks=pytest.mark.full), 1000], ids=["epochs", "steps"])
@pytest.mark.parametrize("at", MOMENTS.values(), ids=MOMENTS)
@pytest.mark.parametrize(
    ("size", "then"),
    [(2, 1), pytest.param(2, 3, marks=pytest.mark.full), pytest.param(1, 2, marks=pytest.mark.full)],
)
def test_any_moment_of_an_epoch(
    ranks: Up, tmp_path: Path, size: int, then: int, at: tuple[str, int], steps: int
) -> None:
    trainer = {"max_steps": steps, "limit_val_batches": 1.0, "val_check_interval": 0.5, "max_epochs": 3}
    leg = Leg(str(tmp_path), rows=10 * size, data={"unit_batches": 4}, trainer=trainer)
    legs = travel(ranks, leg, [size, then], [at])
    once(legs, 10 * size, epochs=3)
    length = -(-10 * size // then)
    assert legs[1][0].validated[-4:] == 2 * [length // 2, length // 2 * 2]
    assert legs[1][0].lengths[-1] == (2, length)


@pytest.mark.parametrize("callback", [True, False], ids=["callback", "coming-back"])
def test_accumulated_batches_are_not_trained(ranks: Up, tmp_path: Path, callback: bool) -> None:
    trainer = {"accumulate_grad_batches": 4}
    leg = Leg(str(tmp_path), trainer=trainer, callback=callback)
    legs = travel(ranks, leg, [2, 1], [("on_train_batch_end", 10)])
    once(legs, 100)
    assert state(tmp_path)["passes"][""]["batches"] == 16
    assert legs[1][0].lengths == [(0, 8 + 84), (1, 100)]


def test_a_window_of_accumulated_gradients_begins_anew(ranks: Up, tmp_path: Path) -> None:
    """An epoch has as many optimizer steps as without the stop, which is what a schedule was made for."""
    leg = Leg(str(tmp_path), trainer={"accumulate_grad_batches": 4}, early=True, model=Stepping)
    legs = travel(ranks, leg, [2, 2], [("on_train_batch_end", 10)])
    once(legs, 100)
    assert legs[1][0].lengths == [(0, 50), (1, 50)]
    assert legs[1][0].estimated == legs[1][0].validated[-1] == 2 * 13


@pytest.mark.parametrize("callback", [True, False], ids=["callback", "coming-back"])
def test_between_an_optimizer_step_and_its_callbacks(ranks: Up, tmp_path: Path, callback: bool) -> None:
    leg = Leg(str(tmp_path), callback=callback, model=Scheduled)
    once(travel(ranks, leg, [2, 1], [("after_optimizer_step", 13)]), 100)
    assert state(tmp_path)["passes"][""]["batches"] == 26


@pytest.mark.parametrize(("then", "stop", "validations"), [(3, 3, 2), (1, 5, 1)])
def test_steps_estimated_early(ranks: Up, tmp_path: Path, then: int, stop: int, validations: int) -> None:
    trainer = {"limit_val_batches": 1.0}
    leg = Leg(str(tmp_path), rows=10, data={"unit_batches": 4}, trainer=trainer, early=True)
    legs = travel(ranks, leg, [2, then], [("on_train_batch_end", stop)])
    once(legs, 10)
    assert {one.estimated for one in legs[1]} == {2 * -(-10 // then)}
    assert len(legs[1][0].validated) == validations


@pytest.mark.parametrize("then", [pytest.param(1, marks=pytest.mark.full), 3])
def test_limited_epochs(ranks: Up, tmp_path: Path, then: int) -> None:
    leg = Leg(str(tmp_path), rows=60, trainer={"limit_train_batches": 8})
    legs = travel(ranks, leg, [2, then], [("on_train_batch_end", 5)])
    inside = Counter(chain.from_iterable(one.inside for leg in legs for one in leg))
    assert set(inside.values()) == {1}
    steps = Counter(epoch for epoch, _ in inside)
    assert steps == {0: 5 * 2 + 3 * then, 1: 8 * then}


def test_the_last_batches_are_dropped(ranks: Up, tmp_path: Path) -> None:
    leg = Leg(str(tmp_path), rows=31, data={"uneven": "drop"})
    legs = travel(ranks, leg, [2, 3], [("on_train_batch_end", 5)])
    inside = Counter(chain.from_iterable(one.inside for leg in legs for one in leg))
    assert set(inside.values()) == {1}
    assert Counter(epoch for epoch, _ in inside) == {0: 31, 1: 30}


KEPT = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "fork"}


@pytest.mark.parametrize(
    "leg",
    [
        Leg("", model=Manual, callback=False),
        Leg("", model=Manual),
        Leg("", looks=True),
        Leg("", data=KEPT, trainer={"reload_dataloaders_every_n_epochs": 1}),
        Leg("", trainer={"check_val_every_n_epoch": None, "val_check_interval": 7, "limit_val_batches": 1.0}),
    ],
    ids=["manual, coming-back", "manual, callback", "a look", "reloading", "validating by steps"],
)
def test_habits(ranks: Up, tmp_path: Path, leg: Leg) -> None:
    once(travel(ranks, replace(leg, folder=str(tmp_path)), [2, 3], [("on_train_batch_end", 13)]), 100)
