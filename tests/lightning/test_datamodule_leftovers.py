"""What a Trainer over `SharedQueueDataModule` leaves in the mailbox: the log and claims of training, and no more."""

from __future__ import annotations

import os
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from jobs import Job, rows_of, run, run_all, steps_of
from learners import credited, given_back, pages
from models import Numbered, Recorder

from shardqueue.lightning import SharedQueueCallback
from shardqueue.mailbox import open_mailbox
from shardqueue.records import RunKeys

if TYPE_CHECKING:
    from pathlib import Path

    from jobs import Up

ROWS, BATCH = 22, 2


def numbered(*stages: str, **settings: Any) -> dict[str, Any]:
    every = {"batch_size": BATCH, "unit_batches": 2, "taper": False}
    return {**dict.fromkeys(stages, Numbered(ROWS)), **every, **settings}


def keys(folder: Path) -> list[str]:
    return sorted(open_mailbox(folder).list(""))


def log_ends(folder: Path) -> list[str | None]:
    """How each rank left, by its log."""
    ends = {page.learner: page.left for page in pages(open_mailbox(folder))}
    return [ends[learner] for learner in sorted(ends)]


# -- loops that are only tried out ---------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("verb", ["fit", "validate", "test", "predict"])
def test_fast_dev_run(ranks: Up, tmp_path: Path, verb: str, size: int) -> None:
    data = numbered("train", "val", "test", "predict")
    every = run_all(ranks, size, Job(str(tmp_path), data, {"fast_dev_run": 2}, verbs=(verb,)))
    stage = {"fit": "train0", "validate": "val"}.get(verb, verb)
    assert steps_of(every, stage) == [2] * size
    assert set(rows_of(every, stage).values()) == {1}
    assert keys(tmp_path) == []


@pytest.mark.parametrize("workers", [0, 2])
def test_validation_alone(ranks: Up, tmp_path: Path, workers: int) -> None:
    method = "fork" if workers else None
    data = numbered("val", num_workers=workers, multiprocessing_context=method)
    every = run_all(ranks, 2, Job(str(tmp_path), data, verbs=("validate",)))
    assert rows_of(every, "val") == Counter(range(ROWS))
    assert keys(tmp_path) == []


@pytest.mark.parametrize(("few", "rows"), [(2, 8), (0.34, 8)])
def test_overfitting(ranks: Up, tmp_path: Path, few: float, rows: int) -> None:
    trainer = {"overfit_batches": few, "max_epochs": 3}
    every = run_all(ranks, 2, Job(str(tmp_path), numbered("train", "val"), trainer))
    for epoch in range(3):
        assert rows_of(every, f"train{epoch}") == Counter(range(rows))
        assert steps_of(every, f"train{epoch}") == [2, 2]
    assert keys(tmp_path) == []


def test_the_sanity_check(ranks: Up, tmp_path: Path) -> None:
    every = run_all(ranks, 2, Job(str(tmp_path), numbered("train", "val"), {"num_sanity_val_steps": 2}))
    assert steps_of(every, "sanity") == [2, 2]
    assert rows_of(every, "val") == Counter(range(ROWS))
    assert not [key for key in keys(tmp_path) if "val" in key or "sanity" in key]
    assert set(open_mailbox(tmp_path).list("runs/")) == {"runs/1.json"}


def test_many_validations(ranks: Up, tmp_path: Path) -> None:
    data = {"train": Numbered(50), "val": Numbered(8), "batch_size": 1}
    every = run_all(ranks, 2, Job(str(tmp_path), data, {"val_check_interval": 1, "max_epochs": 2}))
    assert rows_of(every, "val") == Counter(50 * list(range(8)))
    assert not [key for key in keys(tmp_path) if "val" in key]
    spans = [span for page in pages(open_mailbox(tmp_path)) for span in page.trained]
    assert {span.pass_ for span in spans} == {"", "e1"}


# -- training ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("callbacks", [(), (SharedQueueCallback,)], ids=["coming-back", "callback"])
@pytest.mark.parametrize("size", [1, 3])
def test_the_log_knows_each_batch_once(ranks: Up, tmp_path: Path, size: int, callbacks: Any) -> None:
    job = Job(str(tmp_path), numbered("train", "val"), {"log_every_n_steps": 1}, callbacks=callbacks)
    run_all(ranks, size, job)
    mailbox = open_mailbox(tmp_path)
    assert Counter(credited(mailbox).values()) == {1: 11}
    final = {page.learner: page for page in pages(mailbox)}.values()
    assert sum(page.totals.batches for page in final) == 11
    assert sum(page.totals.samples for page in final) == ROWS
    assert log_ends(tmp_path) == ["end"] * size


def test_what_max_steps_leaves_is_given_back(ranks: Up, tmp_path: Path) -> None:
    trainer = {"max_steps": 3, "limit_val_batches": 0}
    run_all(ranks, 2, Job(str(tmp_path), numbered("train"), trainer))
    mailbox = open_mailbox(tmp_path)
    trained = credited(mailbox)
    assert Counter(trained.values()) == {1: 6}
    assert not [claim for page in pages(mailbox) if page.left for claim in page.held]
    for (unit, attempt), begin in given_back(mailbox).items():
        assert not attempt
        assert not {(unit, index) for index in range(begin, 2)} & set(trained)


class Failing(Recorder):
    """Breaks at its third step, on the ranks that it is told of."""

    broken = frozenset({0, 1})

    def training_step(self, batch: Any, index: int) -> Any:
        if index == 2 and self.global_rank in self.broken:
            raise ZeroDivisionError("what the user did")
        return super().training_step(batch, index)


class FailingOnce(Failing):
    broken = frozenset({1})


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_in_training_step(ranks: Up, tmp_path: Path, workers: int) -> None:
    method = "fork" if workers else None
    data = numbered("train", num_workers=workers, multiprocessing_context=method)
    job = Job(str(tmp_path), data, {"limit_val_batches": 0}, model=Failing)
    outcomes = ranks(2).outcomes(run, 2, job)  # which also looks for threads and processes
    assert [(one.kind, one.error) for one in outcomes] == 2 * [("raised", "ZeroDivisionError")]
    assert log_ends(tmp_path) == ["error", "error"]
    mailbox = open_mailbox(tmp_path)
    assert len(credited(mailbox)) == 4
    keys = RunKeys("1").pass_keys()
    claimed = {parsed for parsed in map(keys.parse_claim, mailbox.list(keys.units)) if parsed is not None}
    whole = {unit for unit, count in Counter(unit for unit, _ in credited(mailbox)).items() if count == 2}
    back = set(given_back(mailbox))
    assert {claim for claim in claimed if claim[0] not in whole} <= back, (claimed, credited(mailbox), back)
    assert back <= claimed


def run_or_end(rank: int, size: int, job: Job) -> None:
    """As a training script does: the process ends with the error."""
    try:
        run(rank, size, job)
    except ZeroDivisionError:
        os._exit(1)


def test_an_error_on_one_rank_alone(ranks: Up, tmp_path: Path) -> None:
    job = Job(str(tmp_path), numbered("train"), {"limit_val_batches": 0}, model=FailingOnce)
    other, failed = ranks(2).outcomes(run_or_end, 2, job)
    assert failed.kind == "died"
    assert other.kind == "raised"
    assert "rank 1" in other.traceback
    assert log_ends(tmp_path) == ["error", "error"]


def progress(step: int) -> float:
    return 0.01 / (1 + step)


class Rates(Recorder):
    """Notes the progress that its data module tells, and its learning rate."""

    def training_step(self, batch: Any, index: int) -> Any:
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        self.notes = [*getattr(self, "notes", []), (data.agreed.progress, self.rate, int(data.step))]
        return super().training_step(batch, index)

    @property
    def rate(self) -> float:
        return float(self.trainer.optimizers[0].param_groups[0]["lr"])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_rate_is_that_of_agreed_progress(ranks: Up, tmp_path: Path, size: int) -> None:
    schedule = partial(SharedQueueCallback, progress)
    trainer = {"max_epochs": 2, "limit_val_batches": 0, "log_every_n_steps": 1}
    job = Job(str(tmp_path), numbered("train"), trainer, model=Rates, callbacks=(schedule,))
    every = run_all(ranks, size, job)
    expected = [11 * epoch + step for epoch in range(2) for step in range(0, 11, size)]
    for one in every:
        assert [step for step, _, _ in one.notes] == expected
        assert [rate for _, rate, _ in one.notes] == [progress(step) for step in expected]
    assert {step for one in every for _, _, step in one.notes} == set(range(11))
    assert len({tuple(one.parameters) for one in every}) == 1
