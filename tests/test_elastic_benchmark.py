"""The benchmarks of elastic steps: what programs read of them, and that they see what must not happen."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from test_benchmarks import rows_of
from torch.nn import functional

from benchmarks import gpu_elastic
from benchmarks.elastic import best, steps_until_close
from benchmarks.elastic_ranks import EXACT, Work, alone, check, distance, model_of

WORK = Work(micro_batches=3, steps=2)
STEPS = [[[4, 0], [2, 11], [5, 3]], [[6, 7], [10, 1], [8, 9]]]
"""All rows of that work, in some order."""


@pytest.mark.full
def test_the_policy_is_as_good_as_promised() -> None:
    """In virtual time, so the same numbers on every machine: a reach that is missed fails."""
    (row,) = rows_of("elastic", "--only", "policy", "--strict")
    assert row["case"].startswith("policy, virtual time")
    assert row["value"] >= row["reach"] == 0.97


@pytest.mark.full
def test_every_case_ends_with_rows_of_one_form() -> None:
    rows = rows_of("elastic")
    reaches = {row["case"].partition(",")[0]: row["reach"] for row in rows if row["reach"] is not None}
    assert reaches == {
        "policy": 0.97,
        "engine": 2.3,
        "Trainer": 2.25,
        "4 ranks 40/40/80/160 ms": 0.92,
        "2 equal ranks of 20 ms": 0.97,
    }
    cases = [row["case"] for row in rows]
    for reported in ("requests to the store", "mailbox", "steps until within", "hidden in backward"):
        assert any(reported in case for case in cases), reported


def test_the_right_steps_are_right() -> None:
    assert check(WORK, STEPS, {"one"}, 0.1 * EXACT) == []


@pytest.mark.parametrize(
    ("steps", "digests", "far", "said"),
    [
        ([[[4, 0], [2, 11], [5, 5]], STEPS[1]], {"one"}, 0.0, "of 12 rows 1 came too often, 1 never"),
        ([STEPS[0][:2], [STEPS[0][2], *STEPS[1]]], {"one"}, 0.0, "2 steps had [2, 4] micro-batches, not 2 3"),
        (STEPS, {"one", "other"}, 0.0, "the ranks' parameters differ"),
        (STEPS, {"one"}, 1e-11, "parameters are 1.0e-11 from those of one process, more than 1e-12"),
        (STEPS, {"one"}, math.nan, "parameters are nan from those of one process, more than 1e-12"),
    ],
)
def test_what_must_not_happen_is_wrong(steps: Any, digests: set[str], far: float, said: str) -> None:
    assert check(WORK, steps, digests, far) == [said]


def test_one_process_goes_through_the_same_micro_batches() -> None:
    """Its parameters after a step are those of that step's rows in one batch, and not of one micro-batch fewer."""
    model, rows = model_of(WORK), torch.tensor(STEPS[0]).flatten()
    data = torch.randn(WORK.rows, 6, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    loss = functional.mse_loss(model(data[rows]), data[rows][:, :1].sin())
    loss.backward()  # type: ignore[no-untyped-call]
    torch.optim.SGD(model.parameters(), lr=0.01).step()
    assert distance(model, alone(WORK, STEPS[:1])) < EXACT
    assert distance(model, alone(WORK, [STEPS[0][:2]])) > 1e-6


def test_the_limit_is_the_best_whole_split() -> None:
    assert best((0.04, 0.04, 0.08, 0.16), 18) == pytest.approx(0.28)
    assert best((0.02,) * 4, 16) == pytest.approx(0.08)


def test_steps_count_until_they_stay_close() -> None:
    assert steps_until_close([1.6, 1.1, 1.3, 1.1, 1.0, 1.1, 2.0], 1.0) == 3
    assert steps_until_close([1.6, 1.1, 1.3, 1.1], 1.0) == 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_without_a_gpu_that_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_elastic.main([]) == 2
    assert "there is no CUDA device here" in capsys.readouterr().err


@pytest.mark.full
def test_the_gpu_benchmark_runs_on_the_cpu() -> None:
    rows = rows_of("gpu_elastic", "--device", "cpu")
    assert [row["unit"] for row in rows] == ["x", "x", "1e-6", "1e-6", "x DDP", "x DDP"]
