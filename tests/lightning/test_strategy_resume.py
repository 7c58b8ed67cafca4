"""A checkpoint of elastic steps, resumed by other numbers of ranks and in other steps: every sample exactly once."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from strategy_cases import Case, Learner, Told, all_told, rows_of, scaled
from torchmetrics import MeanMetric

from shardqueue.lightning import SharedQueueCallback

if TYPE_CHECKING:
    from pathlib import Path

    from jobs import Up

ROWS = 100
"""50 micro-batches: eight steps of 6, and one of 2."""
TRAINED = {3: 36, 8: 96, 9: 100, 12: 136}
"""Rows that are trained after so many steps."""


class Logging(Learner):
    """Reduces what it logs over all ranks."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.mean = MeanMetric()
        warnings.filterwarnings("ignore", "It is recommended to use")
        warnings.filterwarnings("ignore", "Be aware that when using `ckpt_path`")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        rows = batch[0].double()
        self.log("rows", rows.mean(), on_step=True, on_epoch=True, sync_dist=True)
        self.log("own", rows.mean(), on_step=False, on_epoch=True)
        self.mean(rows)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        metrics = self.trainer.callback_metrics
        self.notes.append(
            (self.global_step, {name: float(metrics[name]) for name in ("rows_epoch", "mean", "own")})
        )


def saved(folder: str) -> ModelCheckpoint:
    return ModelCheckpoint(
        folder, "{step}", save_top_k=-1, every_n_train_steps=1, auto_insert_metric_name=False, monitor=None
    )


def before(every: list[Told], step: int) -> Counter[int]:
    """What was trained before a step."""
    return Counter(
        row for one in every for n, batches in one.steps.items() if n < step for b in batches for row in b
    )


@pytest.mark.parametrize(
    ("size", "each", "steps", "counting"),
    [
        (3, 4, (3, 8, 9, 12), ()),
        pytest.param(1, 6, (3, 9), (SharedQueueCallback,), marks=pytest.mark.full),
    ],
)
def test_every_sample_once(
    ranks: Up, tmp_path: Path, size: int, each: int, steps: tuple[int, ...], counting: tuple[Any, ...]
) -> None:
    folder = str(tmp_path / "checkpoints")
    case = Case(
        rows=ROWS,
        model=Logging,
        dtype="float32",
        plugins=(scaled,),
        pauses=(0.0, 0.004),
        epochs=2,
        trainer={"enable_checkpointing": True},
        callbacks=(partial(saved, folder), *counting),
    )
    first = [told[0] for told in ranks(2).run(all_told, 2, [case], str(tmp_path / "first"))]
    assert rows_of(first) == Counter(2 * list(range(ROWS)))
    cases = [
        replace(
            case,
            each=each,
            epochs=3,
            ckpt_path=f"{folder}/{step}.ckpt",
            pauses=(0.0, 0.0, 0.02),
            callbacks=(partial(EarlyStopping, "own", patience=9), *counting),
            trainer={},
        )
        for step in steps
    ]
    told = ranks(size).run(all_told, size, cases, str(tmp_path / "second"))
    for number, step in enumerate(steps):
        every = [rank[number] for rank in told]
        trained = before(first, step)
        assert trained.total() == TRAINED[step]
        assert len({one.digest for one in every}) == 1
        assert trained + rows_of(every) == Counter(3 * list(range(ROWS))), step
        epochs = [(3 * ROWS - TRAINED[step]) // ROWS, (3 * ROWS - TRAINED[step]) % ROWS]
        left = [epochs[1]] * bool(epochs[1]) + [ROWS] * epochs[0]
        ends = [step + sum(math.ceil(rows / 2 / each) for rows in left[: n + 1]) for n in range(len(left))]
        assert {one.global_step for one in every} == {ends[-1]}
        assert [n for n, _ in every[0].notes] == ends
        begin = step
        for end in ends:
            rows = [
                r for one in every for n, bs in one.steps.items() if begin <= n < end for b in bs for r in b
            ]
            mean = pytest.approx(sum(rows) / len(rows), rel=1e-6)
            for one in every:
                said = dict(one.notes)[end]
                assert (said["rows_epoch"], said["mean"]) == (mean, mean), (step, end)
                assert math.isfinite(said["own"])
            begin = end
