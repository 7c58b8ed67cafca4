"""Elastic steps: the ranks share out each step's micro-batches, with the gradients of one process."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest
import torch
from elastic_cases import Case, Told, all_trained, alone

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ranks import Ranks

    Up = Callable[[int], Ranks]

EXACT = 1e-12
SINGLE = 1e-6


def check(case: Case, told: list[Told]) -> None:
    """Every row once an epoch; as many micro-batches as planned; the parameters of one process; equal replicas."""
    steps = len(told[0].steps) // case.epochs
    total = -(-case.rows // case.batch)
    limited = total if case.limit is None else min(total, case.limit * case.micro_batches)
    assert steps == -(-limited // case.micro_batches), case
    for epoch in range(case.epochs):
        span = slice(epoch * steps, (epoch + 1) * steps)
        rows = Counter(row for rank in told for step in rank.steps[span] for row in step)
        if case.limit is None:
            assert rows == Counter(range(case.rows)), case
        else:
            assert set(rows.values()) == {1}, case
        counts = [sum(counts) for counts in told[0].counts[span]]
        assert sum(counts) == limited, case
        assert set(counts[:-1]) <= {case.micro_batches}, case
    assert all(rank.counts == told[0].counts for rank in told), case
    assert all(rank.progress == told[0].progress for rank in told), case
    assert len({rank.digest for rank in told}) == 1, case
    atol = EXACT if case.dtype == "float64" else SINGLE
    for got, expected in zip(told[0].parameters, alone(case, told), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=atol, msg=str(case))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_parameters_of_one_process(ranks: Up, size: int, tmp_path: Path) -> None:
    """Twenty steps and more, with a tail step, sizes that differ, a slow rank, and rates that change half-way."""
    slow = (0.0,) * (size - 1) + (0.004,)
    cases = [
        Case(rows=330, micro_batches=8, epochs=1),
        Case(rows=331, micro_batches=8, pauses=slow),
        Case(rows=331, micro_batches=8, pauses=slow, later=slow[::-1], dtype="float32"),
        Case(rows=100, batch=3, micro_batches=5, epochs=2, weigh="tokens"),
        Case(rows=331, micro_batches=8, limit=7),
    ]
    told = ranks(size).run(all_trained, cases, str(tmp_path))
    for number, case in enumerate(cases):
        check(case, [rank[number] for rank in told])
