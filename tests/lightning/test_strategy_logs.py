"""What a module logs in elastic steps: values of whole steps and of whole epochs, by value."""

from __future__ import annotations

import warnings
from itertools import product
from statistics import fmean
from typing import TYPE_CHECKING, Any

import pytest
import torch
from strategy_cases import Case, Learner, Told, all_told, rows_of, steps_of
from torchmetrics import MaxMetric, MeanMetric, MetricCollection, SumMetric

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from jobs import Up

REDUCTIONS: dict[str, Callable[[Iterable[float]], float]] = {
    "mean": fmean,
    "sum": sum,
    "max": max,
    "min": min,
}
WHEN = [(True, True), (True, False), (False, True)]
SLOW = (0.0, 0.006, 0.02)


class Logging(Learner):
    """Logs row numbers, in every way that there is, and what only some micro-batches have."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.mean, self.most, self.seldom = MeanMetric(), MaxMetric(), SumMetric()
        self.several = MetricCollection({"several_mean": MeanMetric(), "several_sum": SumMetric()})

    def on_fit_start(self) -> None:
        warnings.filterwarnings("ignore", "It is recommended to use")  # as every second name here does not

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        rows = batch[0].double()
        for reduce, (on_step, on_epoch), together in product(REDUCTIONS, WHEN, (True, False)):
            name = name_of(reduce, on_step, on_epoch, together)
            value = getattr(torch, reduce)(rows)
            how: dict[str, Any] = {"on_step": on_step, "on_epoch": on_epoch, "sync_dist": together}
            self.log(name, value, reduce_fx=reduce, **how)
        self.mean(rows)
        self.most(rows)
        self.several(rows)
        self.log("metric_mean", self.mean, on_step=True, on_epoch=True)
        self.log("metric_most", self.most, on_step=False, on_epoch=True)
        self.log_dict(self.several, on_step=False, on_epoch=True)
        if batch_idx % 3 == 1:
            self.log("third", rows.mean(), on_step=True, on_epoch=True, sync_dist=True)
            self.seldom(rows)
            self.log("seldom", self.seldom, on_step=False, on_epoch=True)
        if batch_idx % 3 == 2:
            self.log("other_third", rows.mean(), on_step=False, on_epoch=True, sync_dist=True)
        for number in (13, 7):
            if (rows % number == 0).any():
                self.log(f"of_{number}", rows.mean(), on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_after_backward(self) -> None:
        self.log("count", 1.0, on_step=True, on_epoch=True, sync_dist=True, reduce_fx="sum")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("batch", float(batch_idx), on_step=True, on_epoch=True, sync_dist=True, reduce_fx="sum")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("stepping", 1.0, on_step=True, on_epoch=False, sync_dist=True, reduce_fx="sum")


def name_of(reduce: str, on_step: bool, on_epoch: bool, together: bool) -> str:
    return f"{reduce}_{on_step:d}{on_epoch:d}{together:d}"


def check(case: Case, every: list[Told]) -> None:
    size = len(every)
    steps = [[row for batch in batches for row in batch] for batches in steps_of(every)]
    batches = [batch for step in steps_of(every) for batch in step]
    rows = list(rows_of(every).elements())
    first = every[0]
    for reduce, (on_step, on_epoch) in product(REDUCTIONS, WHEN):
        name = name_of(reduce, on_step, on_epoch, True)
        of_step, of_epoch = (f"{name}_step", f"{name}_epoch") if on_step and on_epoch else (name, name)
        function = REDUCTIONS[reduce]
        if on_step:
            for rank in every:
                assert rank.values(of_step) == [
                    (number, pytest.approx(function(step), rel=1e-6)) for number, step in enumerate(steps)
                ], name
        if on_epoch:
            for rank in every:
                assert rank.metrics[of_epoch] == pytest.approx(function(rows), rel=1e-6), name
        if on_step:  # without the others: what this rank had in the step, or had last
            own = name_of(reduce, on_step, on_epoch, False)
            own = f"{own}_step" if on_epoch else own
            seen = dict(first.values(own))
            for number, batches_of_step in first.steps.items():
                mine = [row for batch in batches_of_step for row in batch]
                assert seen[number] == pytest.approx(function(mine), rel=1e-6), own
        if on_epoch:
            own = name_of(reduce, on_step, on_epoch, False)
            own = f"{own}_epoch" if on_step else own
            assert first.metrics[own] == pytest.approx(function(first.rows), rel=1e-6), own
    thirds = [row for number, step in enumerate(steps) if number % 3 == 1 for row in step]
    others = [row for number, step in enumerate(steps) if number % 3 == 2 for row in step]
    by_number = {
        n: [row for batch in batches if any(r % n == 0 for r in batch) for row in batch] for n in (13, 7)
    }
    expected = {
        "metric_mean_epoch": fmean(rows),
        "metric_most": max(rows),
        "several_mean": fmean(rows),
        "several_sum": sum(rows),
        "third_epoch": fmean(thirds),
        "seldom": sum(thirds),
        "other_third": fmean(others),
        "of_13": fmean(by_number[13]),
        "of_7": fmean(by_number[7]),
        "count_epoch": len(batches),
        "batch_epoch": size * sum(range(len(steps))),
        "stepping": size,
    }
    for name, value in expected.items():
        for rank in every:
            assert rank.metrics[name] == pytest.approx(value, rel=1e-6), name
    for rank in every:
        assert rank.values("count_step") == [(n, len(step)) for n, step in enumerate(steps_of(every))]
        assert rank.values("batch_step") == [(number, size * number) for number in range(len(steps))]
        assert [value for number, value in rank.values("third_step") if number % 3 == 1] == [
            pytest.approx(fmean(step), rel=1e-6) for number, step in enumerate(steps) if number % 3 == 1
        ]


@pytest.mark.parametrize("size", [1, 3])
def test_values_of_steps_and_epochs(ranks: Up, size: int, tmp_path: Path) -> None:
    cases = [
        Case(rows=111, each=5, pauses=SLOW, model=Logging),
        Case(rows=54, batch=3, each=3, pauses=SLOW, dtype="float32", model=Logging),
    ]
    told = ranks(size).run(all_told, size, cases, str(tmp_path))
    for number, case in enumerate(cases):
        check(case, [rank[number] for rank in told])
