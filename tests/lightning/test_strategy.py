"""`ElasticStrategy`: an unmodified LightningModule in elastic steps, with all that a Trainer offers."""

from __future__ import annotations

import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from jobs import Job, rows_of, run_all
from lightning.pytorch.cli import LightningCLI
from models import Numbered, Recorder

from shardqueue.lightning import ElasticStrategy

if TYPE_CHECKING:
    from pathlib import Path

    from jobs import Up

ROWS, BATCH, EACH = 46, 2, 5
"""23 micro-batches in steps of 5: the last has 3."""


def numbered(*stages: str, **settings: Any) -> dict[str, Any]:
    return {**dict.fromkeys(stages, Numbered(ROWS)), "batch_size": BATCH, "unit_batches": 2, **settings}


def elastic(**settings: Any) -> dict[str, Any]:
    return {"strategy": ElasticStrategy(EACH), **settings}


def test_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LightningCLI gives a strategy what it finds in its signature, defaults included."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning's use of it
    monkeypatch.setattr(sys, "argv", ["train.py"])
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # set by the command
        monkeypatch.setenv(name, "0")
    strategy = {
        "class_path": "shardqueue.lightning.ElasticStrategy",
        "init_args": {"micro_batches": EACH, "group": 2},
    }
    config = {"trainer": {"accelerator": "cpu", "devices": 1, "logger": False, "strategy": strategy}}
    cli = LightningCLI(Recorder, run=False, args=config, save_config_callback=None)
    made = cli.trainer.strategy
    assert isinstance(made, ElasticStrategy)
    assert (made.micro_batches, made.group) == (EACH, 2)


@pytest.mark.parametrize(
    ("size", "workers"),
    [
        (1, 0),
        (2, 2),
        (3, 0),
        *(pytest.param(*one, marks=pytest.mark.full) for one in ((1, 2), (2, 0), (3, 2))),
    ],
)
def test_fit(ranks: Up, tmp_path: Path, size: int, workers: int) -> None:
    settings = {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}
    job = Job(str(tmp_path), numbered("train", "val", **settings), elastic(max_epochs=2))
    every = run_all(ranks, size, job)
    for epoch in range(2):
        assert rows_of(every, f"train{epoch}") == Counter(range(ROWS))
    assert {one.optimizer_steps for one in every} == {10}
    assert {one.length for one in every} == {5}
    assert rows_of(every, "val") == Counter(2 * list(range(ROWS)))
    assert all(one.parameters == every[0].parameters for one in every)
    means = [one.metrics["val_rows"] for one in every]
    assert means == pytest.approx([(ROWS - 1) / 2] * size), [one.seen for one in every]
