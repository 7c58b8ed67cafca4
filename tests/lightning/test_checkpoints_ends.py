"""Checkpoints that are saved as a job ends: by one rank on its error, on a signal, after the last step."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.connectors import signal_connector
from lightning.pytorch.utilities.exceptions import SIGTERMException
from models import Numbered, quiet_trainer
from test_checkpoints import QUIET, Counting, Leg, Went, go, once, state

from shardqueue.errors import PeerGoneError, PlanMismatchError, ShardQueueWarning
from shardqueue.lightning import SharedQueueCallback, SharedQueueDataModule

if TYPE_CHECKING:
    from jobs import Up


PATIENCE = 12.0


class Breaks(Callback):
    """An error on some ranks, before a batch is trained."""

    def __init__(self, ranks: set[int], index: int, error: type[BaseException] = ZeroDivisionError) -> None:
        self.ranks, self.index, self.error = ranks, index, error

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if index == self.index and trainer.global_rank in self.ranks:
            raise self.error


class Alone(Callback):
    """Rank 0 saves on its error, as OnExceptionCheckpoint does, but does not wait for the others then."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_exception(self, trainer: Any, *_: Any) -> None:
        if trainer.is_global_zero:
            trainer.strategy.save_checkpoint(trainer._checkpoint_connector.dump_checkpoint(), self.path)


class Ends(Callback):
    """The process of a rank is gone, at once."""

    def __init__(self, rank: int, index: int) -> None:
        self.rank, self.index = rank, index

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if index == self.index and trainer.global_rank == self.rank:
            os._exit(1)


def fit(
    folder: str, size: int, callbacks: list[Any], path: str | None = None, **settings: Any
) -> list[tuple[int, int]]:
    """Fit; what is in the model, also where it ends with an error, is in a file by rank."""
    data = SharedQueueDataModule(
        f"{folder}/mailbox", train=Numbered(100), batch_size=1, unit_batches=20, taper=False
    )
    model = Counting()
    trainer = quiet_trainer(size, callbacks=callbacks, **{**QUIET, "log_every_n_steps": 1, **settings})
    try:
        trainer.fit(model, datamodule=data, ckpt_path=path)
    finally:
        Path(folder, f"{trainer.global_rank}.json").write_text(json.dumps(model.inside))
    return model.inside


def by_rank(folder: Path, size: int) -> list[Went]:
    """What the ranks that were in such a fit have to say."""
    told = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]
    return [Went([(epoch, row) for epoch, row in rows], [], [], [], None) for rows in told]


def alone(rank: int, size: int, folder: str, failing: set[int]) -> None:
    """Some ranks fail, and their processes end; rank 0 saves on its exception."""
    try:
        fit(folder, size, [SharedQueueCallback(), Alone(f"{folder}/1.ckpt"), Breaks(failing, 13)])
    except ZeroDivisionError:
        os._exit(1)


@pytest.mark.parametrize(
    "failing",
    [
        pytest.param({0}, id="rank 0"),
        pytest.param({1}, id="rank 1", marks=pytest.mark.full),
        pytest.param({0, 1}, id="both"),
    ],
)
def test_rank_0_saves_alone(ranks: Up, tmp_path: Path, failing: set[int]) -> None:
    outcomes = ranks(2).outcomes(alone, 2, str(tmp_path), failing, patience=PATIENCE)
    kinds = {rank: outcome.kind for rank, outcome in enumerate(outcomes)}
    assert kinds == {rank: "died" if rank in failing else "raised" for rank in range(2)}
    kept = state(tmp_path)
    assert kept["passes"][""]["batches"] == 26
    assert not kept["missing"]
    once([by_rank(tmp_path, 2), ranks(3).run(go, 3, Leg(str(tmp_path), load=1))], 100)


def orphaned(rank: int, folder: str) -> list[str]:
    """Rank 1 is gone; rank 0 saves."""
    with warnings.catch_warnings(record=True) as caught, contextlib.suppress(PeerGoneError, RuntimeError):
        warnings.simplefilter("always")
        fit(folder, 2, [SharedQueueCallback(), Alone(f"{folder}/1.ckpt"), Ends(1, 13)])
    return [str(one.message) for one in caught if one.category is ShardQueueWarning]


def test_what_a_killed_rank_trained_last_is_said(ranks: Up, tmp_path: Path) -> None:
    first, killed = ranks(2).outcomes(orphaned, str(tmp_path), patience=PATIENCE)
    assert killed.kind == "died", killed
    said = first.value
    inside = json.loads((tmp_path / "0.json").read_text())
    kept = state(tmp_path)
    known = kept["passes"][""]["batches"]
    assert 13 <= known <= 26
    if known < 26:
        assert kept["missing"]
        assert any("not known" in text or "not trained" in text for text in said), said
    (alone,) = ranks(1).run(go, 1, Leg(str(tmp_path), load=1))
    again = [row for epoch, row in alone.inside if epoch == 0]
    assert len(again) == len(set(again)) == 100 - known
    assert not set(again) & {row for _, row in inside}


# -- signals -------------------------------------------------------------------------------------------------


class Signals(Callback):
    """Sends a signal to its own process, in a batch or between two."""

    def __init__(self, hook: str, index: int, number: int) -> None:
        self.index, self.number = index, number
        setattr(self, hook, self._send)

    def _send(self, *args: Any) -> None:
        if args[-1] == self.index:
            os.kill(os.getpid(), self.number)


def requeued(rank: int, size: int, folder: str, hook: str) -> None:
    """SLURM's notice: Lightning saves in its handler, and asks for the job again."""
    os.environ |= {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": str(size),
        "SLURM_NTASKS_PER_NODE": str(size),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_NNODES": "1",
        "SLURM_JOB_NODELIST": "127.0.0.1",
    }
    callbacks = [SharedQueueCallback(), Signals(hook, 12, signal.SIGUSR1), Signals(hook, 12, signal.SIGTERM)]
    with (
        mock.patch.object(signal_connector, "call", return_value=0) as asked,
        pytest.raises(SIGTERMException),
    ):
        fit(folder, size, callbacks, default_root_dir=folder, plugins=[SLURMEnvironment()])
    assert asked.mock_calls == ([mock.call(["scontrol", "requeue", "7"])] if rank == 0 else [])


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_batch_end"])
def test_slurm_requeues(ranks: Up, tmp_path: Path, hook: str) -> None:
    ranks(2).run(requeued, 2, str(tmp_path), hook, patience=PATIENCE)
    trained = 12 + (hook == "on_train_batch_end")
    kept = torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=False)["SharedQueueDataModule"]
    assert kept["passes"][""]["batches"] == 2 * trained
    (tmp_path / "hpc_ckpt_1.ckpt").rename(tmp_path / "1.ckpt")
    legs = [[replace(one, inside=one.inside[:trained]) for one in by_rank(tmp_path, 2)]]
    legs.append(ranks(1).run(go, 1, Leg(str(tmp_path), load=1)))
    once(legs, 100)


# -- in order ------------------------------------------------------------------------------------------------


def kept_last(rank: int, size: int, folder: str, steps: int) -> None:
    """So many steps in all, from the last checkpoint on, if there is one."""
    keep = ModelCheckpoint(folder, every_n_train_steps=4, save_last=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*there is no last checkpoint available")
        warnings.filterwarnings("ignore", "Checkpoint directory")
        callbacks = [SharedQueueCallback(), keep]
        fit(folder, size, callbacks, "last", max_steps=steps, enable_checkpointing=True)


def test_the_last_checkpoint(ranks: Up, tmp_path: Path) -> None:
    legs = []
    for size, steps in ((2, 12), (3, 28), (1, 1000)):
        ranks(size).run(kept_last, size, str(tmp_path), steps)
        legs.append(by_rank(tmp_path, size))
    once(legs, 100)


class Afterwards(Callback):
    """Saves when training is over."""

    def __init__(self, hook: str, path: str) -> None:
        self.path = path
        setattr(self, hook, self._save)

    def _save(self, trainer: Any, *_: Any, **__: Any) -> None:
        trainer.save_checkpoint(self.path)


def stopped_early(rank: int, size: int, folder: str, hook: str) -> None:
    """`max_steps` is reached in the middle of an epoch, which the Trainer then takes for over."""
    fit(folder, size, [Afterwards(hook, f"{folder}/1.ckpt")], max_steps=13)


@pytest.mark.parametrize(
    ("hook", "steps"),
    [
        ("on_train_epoch_end", -1),
        ("on_train_epoch_end", 1000),
        ("on_train_end", 1000),
        ("teardown", -1),
        pytest.param("on_train_end", -1, marks=pytest.mark.full),
        pytest.param("teardown", 1000, marks=pytest.mark.full),
    ],
)
def test_an_epoch_cut_short_by_max_steps_goes_on(ranks: Up, tmp_path: Path, hook: str, steps: int) -> None:
    ranks(2).run(stopped_early, 2, str(tmp_path), hook)
    leg = Leg(str(tmp_path), load=1, trainer={"max_steps": steps})
    once([by_rank(tmp_path, 2), ranks(1).run(go, 1, leg)], 100)


def test_from_one_checkpoint_twice(ranks: Up, tmp_path: Path) -> None:
    leg = Leg(str(tmp_path), save=1, at=("on_train_batch_end", 13))
    first = ranks(2).run(go, 2, leg)
    for size in (1, 3):
        once([first, ranks(size).run(go, size, replace(leg, load=1, save=0))], 100)


class StopsHere(Callback):
    """Stops training after a batch, in the middle of what is accumulated."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        trainer.should_stop |= index == 12

    def on_train_end(self, trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(self.path)


def stopped(rank: int, size: int, folder: str) -> None:
    fit(folder, size, [StopsHere(f"{folder}/1.ckpt")], accumulate_grad_batches=4)


def test_an_epoch_that_a_callback_stopped_goes_on(ranks: Up, tmp_path: Path) -> None:
    ranks(2).run(stopped, 2, str(tmp_path))
    assert state(tmp_path)["passes"][""]["batches"] == 24
    once([by_rank(tmp_path, 2), ranks(1).run(go, 1, Leg(str(tmp_path), load=1))], 100)


def evaluated_first(rank: int, size: int, folder: str) -> list[tuple[int, int]]:
    """A checkpoint's weights are validated and tested; then training begins from the beginning."""
    data = SharedQueueDataModule(
        f"{folder}/mailbox", Numbered(100), Numbered(8), Numbered(8), batch_size=1, unit_batches=20
    )
    quiet_trainer(size).validate(Counting(), datamodule=data, ckpt_path=f"{folder}/1.ckpt")
    quiet_trainer(size).test(Counting(), datamodule=data, ckpt_path=f"{folder}/1.ckpt")
    model = Counting()
    quiet_trainer(size, **QUIET).fit(model, datamodule=data)
    return model.inside


def test_evaluation_takes_the_weights_alone(ranks: Up, tmp_path: Path) -> None:
    ranks(1).run(go, 1, Leg(str(tmp_path), save=1, at=("on_train_batch_end", 13)))
    (inside,) = ranks(1).run(evaluated_first, 1, str(tmp_path))
    once([[Went(inside, [], [], [], None)]], 100)


def other_plan(rank: int, size: int, folder: str) -> str:
    data = SharedQueueDataModule(f"{folder}/mailbox", train=Numbered(40), batch_size=1)
    trainer = quiet_trainer(size, max_epochs=2, limit_val_batches=0)
    with pytest.raises(PlanMismatchError) as caught:
        trainer.fit(Counting(), datamodule=data, ckpt_path=f"{folder}/1.ckpt")
    return str(caught.value)


def test_a_checkpoint_of_another_plan(ranks: Up, tmp_path: Path) -> None:
    ranks(1).run(go, 1, Leg(str(tmp_path), save=1, at=("on_train_batch_end", 60)))
    for said in ranks(2).run(other_plan, 2, str(tmp_path)):
        assert "100" in said
        assert "40" in said
