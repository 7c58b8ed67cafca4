"""What users do beside plain loops: they look at a loader, resume, start ranks that differ. None of it may hang."""

from __future__ import annotations

import os
import re
import warnings
from collections import Counter
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import pytest
from jobs import Job, rows_of, run, run_all, steps_of
from lightning.pytorch import Callback
from models import Numbered, Recorder, quiet_trainer
from torch import distributed

from shardqueue.agreement import Ranks as Group
from shardqueue.agreement import Row
from shardqueue.errors import InvalidInputError, ShardQueueWarning
from shardqueue.lightning import SharedQueueCallback, SharedQueueDataModule

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from jobs import Up

ROWS, BATCH = 22, 2
PATIENCE = 40.0


def numbered(*stages: str, **settings: Any) -> dict[str, Any]:
    return {**dict.fromkeys(stages, Numbered(ROWS)), "batch_size": BATCH, "unit_batches": 4, **settings}


class Look(Callback):
    """Takes one batch of a loader, on all ranks, at one of a Trainer's moments, once."""

    def __init__(self, moment: str, stage: str) -> None:
        self.stage, self.looked = stage, False
        setattr(self, moment, self._look)

    def _look(self, trainer: Any, *_: Any, **__: Any) -> None:
        if not self.looked:
            self.looked = True
            next(iter(getattr(trainer.datamodule, f"{self.stage}_dataloader")()))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("moment", "stage"),
    [
        ("on_fit_start", "val"),
        ("on_train_start", "val"),
        ("on_train_batch_end", "val"),
        ("on_fit_start", "train"),
        ("on_train_start", "train"),
        ("on_train_epoch_end", "train"),
    ],
)
def test_a_look_at_a_loader_changes_nothing(
    ranks: Up, tmp_path: Path, size: int, moment: str, stage: str
) -> None:
    job = Job(
        str(tmp_path),
        numbered("train", "val"),
        {"max_epochs": 2, "num_sanity_val_steps": 0},
        callbacks=(SharedQueueCallback, partial(Look, moment, stage)),
    )
    every = run_all(ranks, size, job)
    for epoch in ("train0", "train1"):
        assert set(rows_of(every, epoch)) == set(range(ROWS))
        assert steps_of(every, epoch) == [-(-11 // size)] * size
    assert rows_of(every, "val") == Counter(dict.fromkeys(range(ROWS), 2))


class TwoLoaders(SharedQueueDataModule):
    """Makes batches of two loaders of one stage."""

    def train_dataloader(self) -> Any:
        return {"a": super().train_dataloader(), "b": super().train_dataloader()}


@pytest.mark.parametrize("size", [1, 2])
def test_two_loops_over_one_stage_are_refused(ranks: Up, tmp_path: Path, size: int) -> None:
    job = Job(str(tmp_path), numbered("train"), {"limit_val_batches": 0}, module=TwoLoaders)
    with pytest.raises(AssertionError, match="one loader of a stage at a time"):
        run_all(ranks, size, job)


def test_a_look_in_the_middle_of_an_epoch_is_refused(ranks: Up, tmp_path: Path) -> None:
    look = partial(Look, "on_train_batch_end", "train")
    job = Job(str(tmp_path), numbered("train"), {"limit_val_batches": 0}, callbacks=(look,))
    with pytest.raises(AssertionError, match="one loader of a stage at a time"):
        run_all(ranks, 2, job)


# -- ranks that differ ---------------------------------------------------------------------------------------


def apart(rank: int, folder: str, started: int) -> list[str]:
    """Fit as one of the processes that torchrun started, with a Trainer of one device; what the library warns of."""
    os.environ |= {"TORCHELASTIC_RUN_ID": "job", "WORLD_SIZE": str(started)}
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            data = SharedQueueDataModule(folder, **numbered("train"))
            quiet_trainer(1, max_epochs=1).fit(Recorder(), datamodule=data)
    finally:
        del os.environ["TORCHELASTIC_RUN_ID"], os.environ["WORLD_SIZE"]
    return [str(one.message) for one in caught if issubclass(one.category, ShardQueueWarning)]


def test_processes_that_train_apart_are_warned(ranks: Up, tmp_path: Path) -> None:
    [[said]] = ranks(1).run(apart, str(tmp_path / "two"), 2)
    assert "torchrun started 2 processes" in said
    assert "Trainer(devices=2" in said
    assert ranks(1).run(apart, str(tmp_path / "one"), 1) == [[]]


def differing(rank: int, folder: str, name: str, values: list[Any]) -> None:
    """Fit, with a setting of the Trainer or of the data module by rank."""
    data = numbered("train", "val", seed=3)
    trainer: dict[str, Any] = {"max_epochs": 1}
    (trainer if name in ("max_epochs", "num_sanity_val_steps", "limit_train_batches") else data)[name] = (
        values[rank]
    )
    quiet_trainer(2, **trainer).fit(Recorder(), datamodule=SharedQueueDataModule(folder, **data))


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("max_epochs", [1, 2], "max_epochs differs"),
        ("num_sanity_val_steps", [0, 2], "num_sanity_val_steps differs"),
        ("limit_train_batches", [2, 3], "limit_train_batches differs"),
        ("even_evaluation", [False, True], "even_evaluation differs"),
        ("uneven", ["repeat", "drop"], "uneven differs"),
        ("seed", [3, 4], "seed.*4"),
    ],
)
def test_settings_that_differ_are_named(
    ranks: Up, tmp_path: Path, name: str, values: list[Any], said: str
) -> None:
    outcomes = ranks(2).outcomes(differing, str(tmp_path), name, values, patience=PATIENCE)
    texts = [one.text for one in outcomes]
    assert {one.error for one in outcomes} <= {"AgreementError", "PeerGoneError"}, texts
    assert any(re.search(said, text) for text in texts), texts


def parted(rank: int) -> None:
    """Rank 0 asks for its next batch when rank 1 begins a loop."""
    distributed.init_process_group("gloo", rank=rank, world_size=2)
    group = Group(distributed.group.WORLD)
    if rank:
        group.gather({"pass": "e1"})
    else:
        group.begin(Row()).rows()


def test_ranks_at_different_places_are_told(ranks: Up) -> None:
    outcomes = ranks(2).outcomes(parted, patience=PATIENCE)
    assert [one.error for one in outcomes] == ["AgreementError"] * 2
    assert all("leave it after the same batch" in one.text for one in outcomes)


class GoneBeforeItsFirstBatch(Callback):
    """Rank 1 ends when training starts."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_rank:
            raise KeyError("no more")


def test_a_rank_that_ends_before_its_first_batch(ranks: Up, tmp_path: Path) -> None:
    job = Job(
        str(tmp_path), numbered("train"), {"limit_val_batches": 0}, callbacks=(GoneBeforeItsFirstBatch,)
    )
    outcomes = ranks(2).outcomes(run, 2, job, patience=PATIENCE)
    assert [one.kind for one in outcomes] == ["raised", "raised"], [one.text for one in outcomes]


# -- going on from a checkpoint ------------------------------------------------------------------------------


class Keeps(Callback):
    """Saves a checkpoint, at the second step or at the end of the epoch."""

    def __init__(self, moment: str, path: str) -> None:
        self.path = path
        setattr(self, moment, self._keep)

    def _keep(
        self, trainer: Any, module: Any, outputs: Any = None, batch: Any = None, index: int = 1
    ) -> None:
        if index == 1:
            trainer.save_checkpoint(self.path)


class Forgetful(SharedQueueDataModule):
    """Has no part in checkpoints, like the data of a checkpoint that was saved without a shared queue."""

    def state_dict(self) -> dict[str, Any]:
        return {}


def resumed(rank: int, size: int, folder: str, moment: str) -> tuple[list[list[int]], list[int]]:
    """Rows of each batch after going on from a checkpoint, and the progress of each step."""
    data = partial(Forgetful, f"{folder}/mailbox", **numbered("train"))
    first: dict[str, Any] = {"limit_val_batches": 0, "max_epochs": 2}
    keep = Keeps(moment, f"{folder}/kept.ckpt")
    quiet_trainer(size, callbacks=[keep], **{**first, "max_epochs": 1}).fit(Recorder(), datamodule=data())
    progress: list[int] = []
    model = Recorder()
    noted = Noted(progress)
    trainer = quiet_trainer(size, callbacks=[noted], **first)
    trainer.fit(model, datamodule=data(), ckpt_path=f"{folder}/kept.ckpt")
    return list(chain.from_iterable(model.seen.values())), progress


class Noted(Callback):
    """Notes the agreed progress of each step."""

    def __init__(self, progress: list[int]) -> None:
        self.progress = progress

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.progress.append(trainer.datamodule.agreed.progress)


@pytest.mark.parametrize("size", [1, 2])
def test_an_epoch_that_goes_on_has_the_steps_left_and_says_so(ranks: Up, tmp_path: Path, size: int) -> None:
    every = ranks(size).run(resumed_loudly, size, str(tmp_path))
    steps = -(-11 // size)
    for warned, batches, progress in every:
        assert warned == 1
        assert len(batches) == 2 * steps - 2
        assert progress == [size * step for step in range(2, steps)] + [
            11 + size * step for step in range(steps)
        ]
    second = Counter(row for _, batches, _ in every for batch in batches[steps - 2 :] for row in batch)
    assert set(second) == set(range(ROWS))


def resumed_loudly(rank: int, size: int, folder: str) -> tuple[int, list[list[int]], list[int]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        batches, progress = resumed(rank, size, folder, "on_train_batch_end")
    said = [one for one in caught if issubclass(one.category, ShardQueueWarning)]
    return len([one for one in said if "after 2 steps of epoch 0" in str(one.message)]), batches, progress


@pytest.mark.parametrize("size", [1, 2])
def test_going_on_from_an_epochs_end_is_whole(ranks: Up, tmp_path: Path, size: int) -> None:
    every = ranks(size).run(resumed, size, str(tmp_path), "on_train_epoch_end")
    rows = Counter(row for batches, _ in every for batch in batches for row in batch)
    assert set(rows) == set(range(ROWS))
    assert [len(batches) for batches, _ in every] == [-(-11 // size)] * size
    assert all(progress[0] == 11 for _, progress in every)


# -- arguments -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"train": Numbered(4), "batch_size": 2, "batches": 7}, "a dataset, which has a length"),
        ({"train": Numbered(4), "batch_size": 2, "batches": {"train": -1}}, "batches of train"),
        ({"train": {"a": 1}, "load": print, "batches": 2.0}, "batches of train"),
        ({"train": [Numbered(4), Numbered(4)], "batch_size": 2}, "one dataset a stage"),
        ({"train": {"a": Numbered(4)}, "batch_size": 2}, "one dataset a stage"),
        ({"train": "abc", "batch_size": 2}, "not its name"),
        ({"train": Numbered(0), "batch_size": 2}, "at least one row"),
        ({"shuffle": "no"}, "shuffle"),
        ({"even_evaluation": "x"}, "even_evaluation"),
        ({"seed": -1}, "seed"),
        ({"load": 3}, "load"),
        ({"learner_id": "a/b"}, "learner_id"),
        ({"mailbox": ""}, "mailbox"),
    ],
)
def test_what_cannot_work_is_said_when_it_is_made(settings: dict[str, Any], said: str) -> None:
    make: Callable[..., Any] = SharedQueueDataModule
    with pytest.raises(InvalidInputError, match=said):
        make(**{"mailbox": "./queue", **settings})


def test_predictions_that_a_strategy_does_not_return() -> None:
    data: Any = SharedQueueDataModule("./queue", predict=Numbered(4), batch_size=2)
    with pytest.raises(InvalidInputError, match="spawns its ranks"):
        data.in_order(None)
