"""What a Trainer does around elastic steps: validation, limits, trials, several verbs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
import torch
from strategy_cases import Case, Learner, all_told, alone, rows_of, steps_of

if TYPE_CHECKING:
    from pathlib import Path

    from jobs import Up

SLOW = (0.0, 0.004, 0.02)
BOTH = ("train", "val")
FORKED = {"num_workers": 2, "multiprocessing_context": "fork"}
ONCE = Counter(range(96))


@dataclass(frozen=True)
class Expected:
    """What comes of a case.

    Attributes:
        case: of 96 rows, in steps of six micro-batches of two.
        sizes: micro-batches of each optimizer step.
        often: how often a row is trained.
        evaluated: rows that are evaluated, by stage; each equally often if there are whole epochs of them.
    """

    case: Case
    sizes: list[int]
    often: set[int]
    evaluated: dict[str, int] = field(default_factory=dict)


CASES = {
    "mid-epoch": Expected(
        Case(
            stages=BOTH, trainer={"val_check_interval": 3, "num_sanity_val_steps": 2}, pauses=SLOW, epochs=2
        ),
        sizes=[6] * 16,
        often={2},
        evaluated={"val": 4 * 96, "sanity": 2 * 2 * 2},
    ),
    "fast_dev_run": Expected(
        Case(stages=BOTH, trainer={"fast_dev_run": 2}), [6] * 2, {0, 1}, {"val": 2 * 2 * 2}
    ),
    "overfit": Expected(
        Case(stages=BOTH, trainer={"overfit_batches": 2, "num_sanity_val_steps": 0}, epochs=2),
        sizes=[6] * 4,
        often={0, 2},
        evaluated={"val": 2 * 2 * 2 * 2},
    ),
    "max_steps": Expected(Case(trainer={"max_steps": 11}, epochs=-1, pauses=SLOW), [6] * 11, {1, 2}),
    "twice": Expected(Case(verbs=("fit", "fit"), pauses=SLOW), [6] * 16, {2}),
    "all verbs": Expected(
        Case(
            stages=("train", "val", "test", "predict"),
            verbs=("validate", "fit", "test", "predict"),
            trainer={"num_sanity_val_steps": 0},
            data=FORKED,
        ),
        sizes=[6] * 8,
        often={1},
        evaluated={"val": 2 * 96, "test": 96, "predict": 96},
    ),
}
LONG = {
    "every second": Expected(
        Case(stages=BOTH, trainer={"check_val_every_n_epoch": 2, "num_sanity_val_steps": 0}, epochs=2),
        sizes=[6] * 16,
        often={2},
        evaluated={"val": 96},
    ),
    "limited": Expected(Case(trainer={"limit_train_batches": 3}, epochs=2, pauses=SLOW), [6] * 6, {0, 1, 2}),
    "half": Expected(Case(trainer={"limit_train_batches": 0.5}, data=FORKED), [6] * 4, {0, 1}),
    "drop": Expected(Case(each=7, data={"uneven": "drop"}, epochs=2), [7] * 12, {0, 1, 2}),
}


def anew(model: Learner, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Each fit has an optimizer of its own."""
    if number == 8:
        optimizer.state.clear()


@pytest.mark.parametrize("cases", [CASES, pytest.param(LONG, marks=pytest.mark.full)], ids=["short", "long"])
def test_around_the_steps(ranks: Up, tmp_path: Path, cases: dict[str, Expected]) -> None:
    told = ranks(2).run(all_told, 2, [one.case for one in cases.values()], str(tmp_path))
    for number, (name, expected) in enumerate(cases.items()):
        every = [rank[number] for rank in told]
        assert len({one.digest for one in every}) == 1, name
        assert {one.global_step for one in every} == {len(expected.sizes)}, name
        assert [len(step) for step in steps_of(every)] == expected.sizes, name
        assert {rows_of(every)[row] for row in ONCE} <= expected.often, name
        evaluated: dict[str, Counter[int]] = {}
        for stage, rows in (noted for one in every for noted in one.evaluated):
            evaluated.setdefault(stage, Counter()).update(rows)
        assert {stage: rows.total() for stage, rows in evaluated.items()} == expected.evaluated, name
        for rows in evaluated.values():
            if rows.total() % 96 == 0:
                assert {rows[row] for row in ONCE} == {rows.total() // 96}, name
        if expected.case.verbs[-1] == "predict":
            assert all(Counter(row for batch in one.outputs for row in batch) == ONCE for one in every)
        parameters = alone(expected.case, every, anew if name == "twice" else None)
        for key, value in parameters.items():
            torch.testing.assert_close(every[0].parameters[key], value, rtol=0, atol=1e-12)
