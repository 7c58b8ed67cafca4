"""What a module has learnt in elastic steps is what one process learns from the same global batches."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from strategy_cases import Case, Learner, Told, all_told, alone, rows_of, steps_of

if TYPE_CHECKING:
    from pathlib import Path

    from jobs import Up

EXACT = 1e-12
SINGLE = 1e-6
SLOW = (0.0, 0.006, 0.03)


def check(case: Case, every: list[Told]) -> None:
    """Every row once an epoch, in steps of the planned size, and equal replicas."""
    assert rows_of(every) == Counter(case.epochs * list(range(case.rows))), case
    total = -(-case.rows // case.batch)
    sizes = [case.each] * (total // case.each) + ([total % case.each] if total % case.each else [])
    assert [len(batches) for batches in steps_of(every)] == case.epochs * sizes, case
    assert len({one.digest for one in every}) == 1, case
    assert {one.global_step for one in every} == {case.epochs * case.steps}, case


def same(case: Case, every: list[Told], after: Any = None, atol: float | None = None) -> None:
    expected = alone(case, every, after)
    atol = atol or (EXACT if case.dtype == "float64" else SINGLE)
    assert every[0].parameters.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(every[0].parameters[name], value, rtol=0, atol=atol)


def by_norm(model: Learner, optimizer: torch.optim.Optimizer, number: int) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def by_value(model: Learner, optimizer: torch.optim.Optimizer, number: int) -> None:
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)


def decayed(model: Learner, optimizer: torch.optim.Optimizer, number: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.05 * 0.9**number


class Decaying(Learner):
    """With a scheduler that steps every step."""

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


PARITY: dict[str, tuple[Case, Any]] = {
    "tail": (Case(rows=331, each=8, pauses=SLOW), None),
    "single": (Case(rows=331, each=8, pauses=SLOW, dtype="float32"), None),
    "norm": (Case(rows=200, each=5, trainer={"gradient_clip_val": 0.1}), by_norm),
    "value": (
        Case(rows=200, each=5, trainer={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
        by_value,
    ),
    "decaying": (Case(rows=205, each=5, pauses=SLOW, model=Decaying), decayed),
}


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.full), 3])
def test_the_parameters_of_one_process(ranks: Up, size: int, tmp_path: Path) -> None:
    cases = [case for case, _ in PARITY.values()]
    told = ranks(size).run(all_told, size, cases, str(tmp_path))
    for number, (case, after) in enumerate(PARITY.values()):
        every = [rank[number] for rank in told]
        check(case, every)
        same(case, every, after)
    if size == 3:
        slowest = told[2][0]
        assert len(slowest.steps) < PARITY["tail"][0].steps - 2, "it was to get nothing in many steps"
