"""Every row once: a Trainer's four loops over `SharedQueueDataModule`, by value, on 1, 2 and 3 ranks."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from jobs import Job, rows_of, run_all, steps_of
from models import Numbered

if TYPE_CHECKING:
    from pathlib import Path

    from jobs import Up

ROWS, BATCH = 22, 2
"""11 batches: no number of ranks divides them."""


sizes_and_workers = pytest.mark.parametrize(
    ("size", "workers"),
    [
        *((1, 0), (1, 2), (2, 0), (3, 2)),
        *(pytest.param(*both, marks=pytest.mark.full) for both in ((2, 2), (3, 0))),
    ],
)


def numbered(*stages: str, **settings: Any) -> dict[str, Any]:
    return {**dict.fromkeys(stages, Numbered(ROWS)), "batch_size": BATCH, "unit_batches": 2, **settings}


@sizes_and_workers
def test_fit(ranks: Up, tmp_path: Path, size: int, workers: int) -> None:
    settings = {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}
    job = Job(str(tmp_path), numbered("train", "val", **settings), {"max_epochs": 2})
    every = run_all(ranks, size, job)
    for epoch in range(2):
        rows = rows_of(every, f"train{epoch}")
        assert set(rows) == set(range(ROWS))
        assert rows.total() - ROWS <= BATCH * (size - 1)
        assert steps_of(every, f"train{epoch}") == [-(-ROWS // BATCH // size)] * size
    assert rows_of(every, "val") == Counter(2 * list(range(ROWS)))
    assert all(one.parameters == every[0].parameters for one in every)
    means = [one.metrics["val_rows"] for one in every]
    assert means == pytest.approx([(ROWS - 1) / 2] * size), [one.seen for one in every]


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
@sizes_and_workers
def test_evaluation(ranks: Up, tmp_path: Path, size: int, workers: int, verb: str) -> None:
    stage = {"validate": "val"}.get(verb, verb)
    settings = {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}
    every = run_all(ranks, size, Job(str(tmp_path), numbered(stage, **settings), verbs=(verb,)))
    assert rows_of(every, stage) == Counter(range(ROWS))
    assert 0 not in steps_of(every, stage)
    if verb == "predict":
        in_order = [[row, row + 1] for row in range(0, ROWS, BATCH)]
        assert all(one.ordered == in_order for one in every)
    else:
        assert all(one.metrics[f"{stage}_rows"] == pytest.approx((ROWS - 1) / 2) for one in every)
