"""Ranks that step together: as many steps each, every batch once, and an error on every rank instead of a hang."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest
from lockstep_cases import Case, Epoch, all_trained, whole

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ranks import Ranks

    Up = Callable[[int], Ranks]

SHAPES = ["equal", "tapered", "listed", "unknown"]


def check(case: Case, size: int, told: list[Epoch]) -> None:
    """What the ranks were given in one epoch is what lockstep promises."""
    drop = case.uneven == "drop"
    steps = case.total // size if drop else -(-case.total // size)
    assert [len(epoch.values) for epoch in told] == [steps] * size, case
    fresh = Counter(value for epoch in told for value in epoch.fresh)
    if drop:
        assert fresh.total() == steps * size, case
        assert fresh <= whole(case), case
    else:
        assert fresh == whole(case), case
    for epoch in told:
        assert not any(epoch.repeats[:-1]), case
        if epoch.repeats[-1] and steps > 1:
            assert epoch.values[-1] == epoch.values[-2], case
    assert all(epoch.progress == told[0].progress for epoch in told), case


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_batch_once_and_as_many_steps_on_every_rank(
    ranks: Up, size: int, workers: int, tmp_path: Path
) -> None:
    """Also with one batch more than divides, where only one rank has one at the last step."""
    cases = [Case(shape, 22, workers=workers) for shape in SHAPES]
    cases += [Case("tapered", 23, "drop", workers), Case("unknown", 18, "drop", workers)]
    told = ranks(size).run(all_trained, cases, str(tmp_path))
    for number, case in enumerate(cases):
        check(case, size, [rank[number][0] for rank in told])


@pytest.mark.parametrize("workers", [0, 2])
def test_few_batches(ranks: Up, workers: int, tmp_path: Path) -> None:
    """Fewer than ranks; one unit of everything, larger than anybody's share; as many as ranks."""
    cases = [Case(shape, total, workers=workers) for shape in ("one", "unknown") for total in (1, 2, 3, 7)]
    told = ranks(3).run(all_trained, cases, str(tmp_path))
    for number, case in enumerate(cases):
        check(case, 3, [rank[number][0] for rank in told])
