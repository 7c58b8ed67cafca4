"""How long a Trainer's loops over `SharedQueueDataModule` are: by its limits, and by the lengths it is told."""

from __future__ import annotations

import multiprocessing
import warnings
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from jobs import Job, rows_of, run_all, steps_of
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, TQDMProgressBar
from models import Numbered, Recorder, quiet_trainer

from shardqueue.lightning import SharedQueueDataModule

if TYPE_CHECKING:
    from pathlib import Path

    from jobs import Ran, Up

ROWS, BATCH = 22, 2
"""11 batches, so 6 steps of 2 ranks, the last with one batch."""


def numbered(*stages: str, **settings: Any) -> dict[str, Any]:
    return {**dict.fromkeys(stages, Numbered(ROWS)), "batch_size": BATCH, "unit_batches": 2, **settings}


def fitted(ranks: Up, folder: Path, trainer: dict[str, Any], size: int = 2, **more: Any) -> list[Ran]:
    data = more.pop("data", numbered("train"))
    settings = {"num_sanity_val_steps": 0, "limit_val_batches": 1.0 if "val" in data else 0, **trainer}
    return run_all(ranks, size, Job(str(folder), data, settings, **more))


# -- training ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "steps"), [(4, 4), (0.5, 3), (1.0, 6), (1, 1), (100, 6)], ids=lambda value: str(value)
)
def test_limit_train_batches(ranks: Up, tmp_path: Path, limit: float, steps: int) -> None:
    every = fitted(ranks, tmp_path, {"limit_train_batches": limit, "max_epochs": 2})
    assert [one.length for one in every] == [steps, steps]
    for epoch in range(2):
        rows = rows_of(every, f"train{epoch}")
        assert steps_of(every, f"train{epoch}") == [steps, steps]
        assert len(rows) == min(ROWS, 2 * steps * BATCH)  # distinct


def test_no_training_at_all(ranks: Up, tmp_path: Path) -> None:
    every = fitted(ranks, tmp_path, {"limit_train_batches": 0})
    assert [one.optimizer_steps for one in every] == [0, 0]
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_drop_what_does_not_divide(ranks: Up, tmp_path: Path, size: int) -> None:
    data = numbered("train", uneven="drop")
    every = fitted(ranks, tmp_path, {}, size, data=data)
    assert steps_of(every, "train0") == [11 // size] * size
    assert set(rows_of(every, "train0").values()) == {1}
    assert [one.length for one in every] == [11 // size] * size


def test_drop_the_short_batch(ranks: Up, tmp_path: Path) -> None:
    data = numbered("train", "val", batch_size=4, drop_last=True)  # 5 batches of 4, and one of 2
    every = fitted(ranks, tmp_path, {}, data=data)
    assert {len(batch) for one in every for batch in one.seen["train0"]} == {4}
    assert len(rows_of(every, "train0")) == 20
    assert rows_of(every, "val") == Counter(range(ROWS))


@pytest.mark.parametrize("size", [2, 3])
def test_fewer_batches_than_ranks(ranks: Up, tmp_path: Path, size: int) -> None:
    few = dict.fromkeys(("train", "val", "test", "predict"), Numbered(2))
    job = Job(str(tmp_path), {**few, "batch_size": 2}, verbs=("fit", "validate", "test", "predict"))
    every = run_all(ranks, size, job)
    assert steps_of(every, "train0") == [1] * size
    assert all(one.seen["train0"][0] in ([0, 1], [1, 0]) for one in every)
    assert len({tuple(one.parameters) for one in every}) == 1
    assert [one.metrics["test_rows"] for one in every] == pytest.approx([0.5] * size)
    assert [one.ordered for one in every] == [[[0, 1]]] * size


def test_max_steps_stop_in_mid_epoch(ranks: Up, tmp_path: Path) -> None:
    every = fitted(ranks, tmp_path, {"max_steps": 8, "max_epochs": -1})
    assert [one.optimizer_steps for one in every] == [8, 8]
    assert (steps_of(every, "train0"), steps_of(every, "train1")) == ([6, 6], [2, 2])
    assert len(rows_of(every, "train1")) == 4 * BATCH


def test_epochs_have_orders_of_their_own(ranks: Up, tmp_path: Path) -> None:
    every = fitted(ranks, tmp_path, {"max_epochs": 3})
    assert [one.optimizer_steps for one in every] == [18, 18]
    sets = [{frozenset(batch) for one in every for batch in one.seen[f"train{epoch}"]} for epoch in range(3)]
    assert sets[0] != sets[1] != sets[2]
    assert all(set(rows_of(every, f"train{epoch}")) == set(range(ROWS)) for epoch in range(3))


def test_unshuffled(ranks: Up, tmp_path: Path) -> None:
    every = fitted(ranks, tmp_path, {"max_epochs": 2}, data=numbered("train", shuffle=False))
    batches = {(row, row + 1) for row in range(0, ROWS, BATCH)}
    assert {tuple(batch) for one in every for batch in one.seen["train1"]} == batches


def test_early_stopping(ranks: Up, tmp_path: Path) -> None:
    stopping = partial(EarlyStopping, "val_rows", patience=1)
    every = fitted(ranks, tmp_path, {"max_epochs": 5}, data=numbered("train", "val"), callbacks=(stopping,))
    assert [one.optimizer_steps for one in every] == [12, 12]


class Stops(Recorder):
    """Has had enough after 3 steps."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trainer.should_stop = batch_idx == 2


def test_a_stop_in_mid_epoch(ranks: Up, tmp_path: Path) -> None:
    every = fitted(ranks, tmp_path, {"max_epochs": 5}, data=numbered("train", "val"), model=Stops)
    assert steps_of(every, "train0") == [3, 3]
    assert len(rows_of(every, "train0")) == 6 * BATCH
    assert rows_of(every, "val") == Counter(range(ROWS))


def test_accumulated_gradients(ranks: Up, tmp_path: Path) -> None:
    every = fitted(ranks, tmp_path, {"accumulate_grad_batches": 4})
    assert [one.optimizer_steps for one in every] == [2, 2]
    assert steps_of(every, "train0") == [6, 6]
    assert every[0].parameters == every[1].parameters


class Manual(Recorder):
    """Steps by hand, and skips every third batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = super().training_step(batch, index)
        optimizer: Any = self.optimizers()
        self.manual_backward(loss)
        if index % 3:
            optimizer.step()
            optimizer.zero_grad()
        return loss


def test_manual_optimization(ranks: Up, tmp_path: Path) -> None:
    every = fitted(ranks, tmp_path, {}, model=Manual)
    assert [one.optimizer_steps for one in every] == [4, 4]
    assert steps_of(every, "train0") == [6, 6]
    assert every[0].parameters == every[1].parameters


def test_loaders_are_asked_for_anew_each_epoch(ranks: Up, tmp_path: Path) -> None:
    trainer = {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1}
    every = fitted(ranks, tmp_path, trainer, data=numbered("train", "val"))
    for epoch in range(3):
        assert set(rows_of(every, f"train{epoch}")) == set(range(ROWS))
        assert steps_of(every, f"train{epoch}") == [6, 6]
    assert rows_of(every, "val") == Counter(3 * list(range(ROWS)))


def forking(mailbox: str, **settings: Any) -> SharedQueueDataModule:
    """One whose workers, if there are any, are forked."""
    warnings.filterwarnings("ignore", "'pin_memory' argument is set as true but no accelerator is found")
    method = "fork" if "num_workers" in settings else None
    return SharedQueueDataModule(mailbox, multiprocessing_context=method, **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 3},
        {"num_workers": 2, "in_order": False},
        {"pin_memory": True},
    ],
    ids=["persistent", "any-order", "pinned"],
)
def test_loader_settings(ranks: Up, tmp_path: Path, settings: dict[str, Any]) -> None:
    data = numbered("train", "val", **settings)
    every = fitted(ranks, tmp_path, {"max_epochs": 3}, data=data, module=forking)
    for epoch in range(3):
        assert set(rows_of(every, f"train{epoch}")) == set(range(ROWS))
        assert steps_of(every, f"train{epoch}") == [6, 6]
    assert rows_of(every, "val") == Counter(3 * list(range(ROWS)))


def workers_left(rank: int, folder: str) -> int:
    """Processes that a fit with persistent workers leaves."""
    data = forking(folder, num_workers=2, persistent_workers=True, **numbered("train"))
    quiet_trainer(1, limit_val_batches=0).fit(Recorder(), datamodule=data)
    return len(multiprocessing.active_children())


def test_persistent_workers_end_with_the_fit(ranks: Up, tmp_path: Path) -> None:
    assert ranks(1).run(workers_left, str(tmp_path)) == [0]


# -- validation in fit ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "validations"),
    [
        ({"val_check_interval": 2}, 3),
        ({"val_check_interval": 0.5}, 2),
        ({"val_check_interval": 4, "check_val_every_n_epoch": None, "max_epochs": 2}, 3),
        ({"check_val_every_n_epoch": 2, "max_epochs": 4}, 2),
    ],
    ids=["every-2", "half", "over-epochs", "epochs"],
)
def test_when_it_validates(ranks: Up, tmp_path: Path, settings: dict[str, Any], validations: int) -> None:
    every = fitted(ranks, tmp_path, settings, data=numbered("train", "val"))
    assert rows_of(every, "val") == Counter(validations * list(range(ROWS)))
    assert set(rows_of(every, "train0")) == set(range(ROWS))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
@pytest.mark.parametrize("limit", [0, 3, 0.5])
def test_limits_of_evaluation(ranks: Up, tmp_path: Path, verb: str, limit: float, size: int) -> None:
    stage = {"validate": "val"}.get(verb, verb)
    job = Job(str(tmp_path), numbered(stage), {f"limit_{stage}_batches": limit}, verbs=(verb,))
    every = run_all(ranks, size, job)
    most = limit if isinstance(limit, int) else -(-int(limit * 11) // size)
    rows = rows_of(every, stage)
    assert steps_of(every, stage) == [most] * size
    assert rows.total() == len(rows) == min(ROWS, most * size * BATCH)


# -- what Lightning is told ----------------------------------------------------------------------------------


class OneCycle(Recorder):
    """A schedule that must know how many steps there will be."""

    def configure_optimizers(self) -> Any:
        steps = self.trainer.estimated_stepping_batches
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=int(steps))
        self.notes = [steps]
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.notes.append(self.trainer.optimizers[0].param_groups[0]["lr"])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_one_cycle(ranks: Up, tmp_path: Path, size: int) -> None:
    every = fitted(ranks, tmp_path, {"max_epochs": 2}, size, model=OneCycle)
    steps = 2 * -(-11 // size)
    for one in every:
        told, *rates = one.notes
        assert told == steps == len(rates)
        assert max(rates) == pytest.approx(0.1, rel=0.2)
        assert rates[-2] < 0.01  # the last of the cycle; one more step would be one too many


class Bar(TQDMProgressBar):
    """Notes its totals in the model."""

    def __init__(self) -> None:
        super().__init__(refresh_rate=0)

    def on_train_epoch_start(self, trainer: Any, *args: Any) -> None:
        super().on_train_epoch_start(trainer, *args)
        trainer.lightning_module.notes = [self.total_train_batches]

    def on_validation_batch_end(self, trainer: Any, *args: Any) -> None:
        super().on_validation_batch_end(trainer, *args)
        trainer.lightning_module.notes.append(self.total_val_batches_current_dataloader)


def test_totals_of_the_progress_bar(ranks: Up, tmp_path: Path) -> None:
    trainer = {"enable_progress_bar": True}
    every = fitted(ranks, tmp_path, trainer, data=numbered("train", "val"), callbacks=(Bar,))
    for one in every:
        total, *most = one.notes
        assert total == 6
        assert set(most) == {11}  # all batches might be this rank's


class Counting(Callback):
    """Counts how often the Trainer says that an epoch of training is over."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.notes = getattr(pl_module, "notes", 0) + 1


def test_several_fits_with_one_data_module(ranks: Up, tmp_path: Path) -> None:
    job = Job(
        str(tmp_path), numbered("train", "val"), verbs=("fit", "validate", "fit"), callbacks=(Counting,)
    )
    every = run_all(ranks, 2, job)
    assert [one.notes for one in every] == [1, 1]  # the second is over: max_epochs is reached
    assert rows_of(every, "val") == Counter(2 * list(range(ROWS)))
