"""What `SharedQueueDataModule` is given: units and datasets, other strategies, and what it refuses at once."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
import torch
from jobs import Job, rows_of, run, run_all, steps_of
from models import Numbered, Recorder, quiet_trainer
from torch import distributed
from torch.utils.data import Dataset, IterableDataset

from shardqueue import Unit, unit_grid
from shardqueue.errors import InvalidInputError
from shardqueue.lightning import SharedQueueDataModule
from shardqueue.mailbox import open_mailbox
from shardqueue.mailbox.faults import Wrapper

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jobs import Up

T = TypeVar("T")

ROWS, BATCH = 22, 2


def numbered(*stages: str, **settings: Any) -> dict[str, Any]:
    return {**dict.fromkeys(stages, Numbered(ROWS)), "batch_size": BATCH, "unit_batches": 2, **settings}


def rows_of_step(step: int) -> torch.Tensor:
    return torch.stack([Numbered(ROWS)[row] for row in range(BATCH * step, BATCH * step + BATCH)])


def load(unit: Unit) -> Iterator[tuple[int, torch.Tensor]]:
    for step in unit.steps:
        yield step, rows_of_step(step)


def load_range(steps: range) -> Iterator[tuple[int, torch.Tensor]]:
    for step in steps:
        yield step, rows_of_step(step)


UNSIZED = {f"part-{first}": range(first, min(first + 3, 11)) for first in range(0, 11, 3)}
"""11 batches in 4 units that do not say how many they have."""


# -- units ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3])
def test_units(ranks: Up, tmp_path: Path, size: int) -> None:
    units = unit_grid(11, 3)
    data = {"train": units, "val": units, "test": units, "predict": units, "load": load}
    every = run_all(ranks, size, Job(str(tmp_path), data, verbs=("fit", "test", "predict")))
    assert set(rows_of(every, "train0")) == set(range(ROWS))
    assert steps_of(every, "train0") == [-(-11 // size)] * size
    for stage in ("val", "test", "predict"):
        assert rows_of(every, stage) == Counter(range(ROWS))
    assert all(one.ordered == [[row, row + 1] for row in range(0, ROWS, BATCH)] for one in every)


@pytest.mark.parametrize(
    ("size", "workers"),
    [
        *((1, 0), (1, 2), (2, 0), (3, 2)),
        *(pytest.param(*both, marks=pytest.mark.full) for both in ((2, 2), (3, 0))),
    ],
)
def test_units_of_unknown_size(ranks: Up, tmp_path: Path, size: int, workers: int) -> None:
    data = {
        **{
            "train": UNSIZED,
            "val": UNSIZED,
            "predict": UNSIZED,
            "load": load_range,
            "batches": {"train": 11, "val": 11},
        },
        **{"num_workers": workers, "multiprocessing_context": "fork" if workers else None},
    }
    every = run_all(
        ranks, size, Job(str(tmp_path), data, {"num_sanity_val_steps": 0}, verbs=("fit", "predict"))
    )
    assert set(rows_of(every, "train0")) == set(range(ROWS))
    assert steps_of(every, "train0") == [-(-11 // size)] * size
    for stage in ("val", "predict"):
        assert rows_of(every, stage) == Counter(range(ROWS))
    assert all(one.ordered == [[row, row + 1] for row in range(0, ROWS, BATCH)] for one in every)


@pytest.mark.parametrize("limit", [2, 1])
def test_a_limit_where_nobody_knows_the_size(ranks: Up, tmp_path: Path, limit: int) -> None:
    data = {"val": UNSIZED, "load": load_range}
    every = run_all(ranks, 2, Job(str(tmp_path), data, {"limit_val_batches": limit}, verbs=("validate",)))
    assert steps_of(every, "val") == [limit, limit]
    assert set(rows_of(every, "val").values()) == {1}


def test_more_batches_said_than_there_are(ranks: Up, tmp_path: Path) -> None:
    data = {"train": UNSIZED, "load": load_range, "batches": 15}
    outcomes = ranks(2).outcomes(run, 2, Job(str(tmp_path), data, {"limit_val_batches": 0}))
    assert [one.error for one in outcomes] == ["AgreementError", "AgreementError"]
    assert all("check batches=" in one.text for one in outcomes)


def test_fewer_batches_said_than_there_are(ranks: Up, tmp_path: Path) -> None:
    data = {"train": UNSIZED, "load": load_range, "batches": 8}
    every = run_all(ranks, 2, Job(str(tmp_path), data, {"limit_val_batches": 0}))
    assert steps_of(every, "train0") == [4, 4]
    assert set(rows_of(every, "train0").values()) == {1}


# -- datasets that come late ---------------------------------------------------------------------------------


class Late(SharedQueueDataModule):
    """Makes its datasets where Lightning says so."""

    def setup(self, stage: str) -> None:
        self.train, self.val = Numbered(ROWS), Numbered(6)


def test_set_in_setup(ranks: Up, tmp_path: Path) -> None:
    every = run_all(ranks, 2, Job(str(tmp_path), {"batch_size": BATCH}, module=Late))
    assert set(rows_of(every, "train0")) == set(range(ROWS))
    assert rows_of(every, "val") == Counter(range(6))


# -- a rank that is late -------------------------------------------------------------------------------------


class Tardy(Recorder):
    """Rank 1 begins its validation when rank 0 could have done all of it, and leaves when that could be long gone."""

    def on_validation_start(self) -> None:
        self._be_late()

    def on_validation_end(self) -> None:
        self._be_late()

    def _be_late(self) -> None:
        if self.global_rank == 1:
            time.sleep(0.7)


@pytest.mark.parametrize("source", ["dataset", "units"])
def test_a_late_rank(ranks: Up, tmp_path: Path, source: str) -> None:
    data = numbered("val") if source == "dataset" else {"val": UNSIZED, "load": load_range}
    every = run_all(ranks, 2, Job(str(tmp_path), data, verbs=("validate",), model=Tardy))
    assert rows_of(every, "val") == Counter(range(ROWS))
    assert 0 not in steps_of(every, "val")
    assert [one.metrics["val_rows"] for one in every] == pytest.approx([(ROWS - 1) / 2] * 2)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


class SlowClaims(Wrapper):
    """Whose claims arrive when another rank could have made all of them."""

    def _around(self, verb: str, name: str, forward: Callable[[], T]) -> T:
        if "/units/" in name:
            time.sleep(0.7)
        return forward()


def far_away(mailbox: str, **settings: Any) -> SharedQueueDataModule:
    """Rank 1 is far from the store."""
    store = open_mailbox(mailbox)
    return SharedQueueDataModule(SlowClaims(store) if os.environ["RANK"] == "1" else store, **settings)


def test_a_slow_rank_has_its_first_batch(ranks: Up, tmp_path: Path) -> None:
    job = Job(str(tmp_path), numbered("val"), verbs=("validate",), module=far_away)
    every = run_all(ranks, 2, job)
    assert rows_of(every, "val") == Counter(range(ROWS))
    assert 0 not in steps_of(every, "val")
    assert [one.metrics["val_rows"] for one in every] == pytest.approx([(ROWS - 1) / 2] * 2)


# -- by configuration ----------------------------------------------------------------------------------------


def configured(rank: int, folder: str, data: dict[str, Any]) -> dict[str, list[list[int]]]:
    """Fit as a file of settings says."""
    from lightning.pytorch.cli import LightningCLI

    settings = {
        "model": {"class_path": "models.Recorder", "init_args": {"lr": 0.01}},
        "data": {
            "class_path": "shardqueue.lightning.SharedQueueDataModule",
            "init_args": {"mailbox": f"{folder}/mailbox", **data},
        },
        "trainer": {
            **{"accelerator": "cpu", "devices": 1, "max_epochs": 1, "limit_val_batches": 0, "logger": False},
            **{"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False},
        },
    }
    file = Path(folder) / "settings.json"  # which is YAML, too
    file.write_text(json.dumps(settings))
    sys.argv = ["train", "fit", "--config", str(file)]
    os.environ["JSONARGPARSE_DEPRECATION_WARNINGS"] = "off"  # Lightning 2.6 uses what 4.5x deprecates
    cli = LightningCLI(save_config_callback=None, seed_everything_default=False)
    seen: dict[str, list[list[int]]] = cli.model.seen
    return seen


@pytest.mark.parametrize(
    "data",
    [
        {"train": {"class_path": "models.Numbered", "init_args": {"rows": ROWS}}, "batch_size": BATCH},
        {
            "train": {"class_path": "shardqueue.unit_grid", "init_args": {"steps": 11, "unit_steps": 3}},
            "load": "test_datamodule_sources.load",
        },
    ],
    ids=["dataset", "units"],
)
def test_from_settings(ranks: Up, tmp_path: Path, data: dict[str, Any]) -> None:
    pytest.importorskip("jsonargparse")
    (seen,) = ranks(1).run(configured, str(tmp_path), data)
    assert Counter(row for batch in seen["train0"] for row in batch) == Counter(range(ROWS))


# -- strategies ----------------------------------------------------------------------------------------------


class Summing(Recorder):
    """Asks all ranks in each forward of an evaluation, and remembers what they said."""

    def _note(self, stage: str, batch: torch.Tensor) -> torch.Tensor:
        if stage in ("val", "test", "predict") and distributed.is_initialized():
            distributed.all_reduce(torch.ones(1))
        return super()._note(stage, batch)


@pytest.mark.parametrize("size", [2, 3])
def test_even_evaluation(ranks: Up, tmp_path: Path, size: int) -> None:
    data = numbered("val", "test", "predict", even_evaluation=True)
    verbs = ("validate", "test", "predict")
    every = run_all(ranks, size, Job(str(tmp_path), data, verbs=verbs, model=Summing))
    for name in ("val_rows", "test_rows"):
        assert [one.metrics[name] for one in every] == pytest.approx([(ROWS - 1) / 2] * size)
    assert all(one.ordered == [[row, row + 1] for row in range(0, ROWS, BATCH)] for one in every)


def with_buffers() -> Recorder:
    return Recorder(buffers=True)


@pytest.mark.parametrize("size", [2, 3])
def test_buffers_and_validation_in_fit(ranks: Up, tmp_path: Path, size: int) -> None:
    trainer = {"val_check_interval": 2, "max_epochs": 2}
    every = run_all(ranks, size, Job(str(tmp_path), numbered("train", "val"), trainer, model=with_buffers))
    validations = 2 * (-(-11 // size) // 2)
    assert rows_of(every, "val") == Counter(validations * list(range(ROWS)))
    assert len({tuple(one.parameters) for one in every}) == 1


class Writing(Recorder):
    """Says in a file what it saw: what a spawned rank remembers is lost."""

    def on_train_end(self) -> None:
        with open(f"seen-{self.global_rank}", "w") as file:  # noqa: PTH123
            file.write(repr(self.seen))


def started(rank: int, strategy: str, folder: str) -> None:
    """A process that no launcher started."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK"):
        os.environ.pop(name)
    os.environ.pop("TORCHELASTIC_RUN_ID")
    os.chdir(folder)
    data = SharedQueueDataModule(f"{folder}/mailbox", **numbered("train", "val"))
    quiet_trainer(2, strategy=strategy).fit(Writing(), datamodule=data)


@pytest.mark.parametrize("strategy", ["ddp_fork", pytest.param("ddp_spawn", marks=pytest.mark.full)])
def test_ranks_that_the_strategy_starts(ranks: Up, tmp_path: Path, strategy: str) -> None:
    ranks(1).run(started, strategy, str(tmp_path))
    seen = [eval((tmp_path / f"seen-{rank}").read_text()) for rank in range(2)]
    assert [len(one["train0"]) for one in seen] == [6, 6]
    assert {row for one in seen for batch in one["train0"] for row in batch} == set(range(ROWS))
    assert Counter(row for one in seen for batch in one["val"] for row in batch) == Counter(range(ROWS))


# -- refused -------------------------------------------------------------------------------------------------


class Endless(Dataset[int]):
    def __getitem__(self, row: int) -> int:
        return row


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"train": unit_grid(4, 2), "load": load, "batch_size": 2}, "batch_size"),
        ({"train": Numbered(4)}, "batch_size"),
        ({"train": unit_grid(4, 2)}, "load"),
        ({"val": Numbered(4), "batch_size": 0}, "batch_size"),
        ({"uneven": "pad"}, "uneven"),
        ({"batches": {"training": 4}}, "batches"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_arguments_that_do_not_go_together(tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        SharedQueueDataModule(tmp_path, **settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"train": Endless(), "batch_size": 2}, "__len__"),
        ({"train": Stream(), "batch_size": 2}, "map-style dataset"),
        ({"train": UNSIZED, "load": load_range}, "pass batches="),
        ({"val": Numbered(4), "batch_size": 2}, "pass train="),
        ({"train": unit_grid(4, 2), "load": load, "batches": 5}, "which is what the units say"),
        ({"train": Numbered(2), "batch_size": 2, "uneven": "drop"}, "one a rank"),
    ],
    ids=["no-length", "stream", "unsized", "no-train", "other-batches", "too-few"],
)
def test_refused_by_fit(ranks: Up, tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    outcomes = ranks(2).outcomes(run, 2, Job(str(tmp_path), settings, {"limit_val_batches": 0}))
    assert [one.error for one in outcomes] == ["InvalidInputError"] * 2
    assert all(said in one.text for one in outcomes), outcomes[0].text
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_stage_that_is_not_given(ranks: Up, tmp_path: Path) -> None:
    (outcome,) = ranks(1).outcomes(run, 1, Job(str(tmp_path), numbered("train"), verbs=("predict",)))
    assert outcome.error == "InvalidInputError"
    assert "pass predict=" in outcome.text


def test_ranks_that_share_a_replica(tmp_path: Path) -> None:
    data = SharedQueueDataModule(tmp_path, **numbered("train"))
    data.trainer = SimpleNamespace(  # type: ignore[assignment]
        distributed_sampler_kwargs={"num_replicas": 2, "rank": 0}, world_size=4
    )
    with pytest.raises(InvalidInputError, match="tensor or pipeline parallelism"):
        data.train_dataloader()


def test_outputs_of_another_prediction(tmp_path: Path) -> None:
    data = SharedQueueDataModule(tmp_path, **numbered("predict"))
    with pytest.raises(InvalidInputError, match=r"pass what trainer\.predict returned"):
        data.in_order([1, 2])
