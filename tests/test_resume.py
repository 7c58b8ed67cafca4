"""Going on from a checkpoint with any number of processes: relative to it, every batch is trained once, by value."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from lockstep_cases import load
from resume_cases import Stint, Told, Value, in_step, units_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from ranks import Ranks

    Up = Callable[[int], Ranks]


def whole(stint: Stint) -> Counter[Value]:
    """Every batch of the plan once."""
    units, _ = units_of(stint)
    return Counter((int(batch[0]), int(batch[1])) for unit in units.values() for _, batch in load(unit))


def chain(ranks: Up, folder: Path, stints: list[tuple[int, Stint]]) -> list[list[Told]]:
    """Jobs of so many ranks, one after another, each from the last one's checkpoint by rank 0."""
    told: list[list[Told]] = []
    states: list[dict[str, Any]] = []
    for size, stint in stints:
        told.append(ranks(size).run(in_step, stint, str(folder / "queue"), states))
        states = [told[-1][0].state]
    return told


def values(told: list[list[Told]]) -> Counter[Value]:
    return Counter(value for job in told for rank in job for value in rank.values)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_in_step_go_on_with_two_then_three_then_one(
    ranks: Up, workers: int, when: str, tmp_path: Path
) -> None:
    """In the middle of a unit on every rank."""
    stint = Stint(workers=workers, when=when)
    told = chain(ranks, tmp_path, [(2, replace(stint, steps=33)), (3, replace(stint, steps=21)), (1, stint)])
    assert values(told) == whole(stint)
    assert all(rank.state["missing"] == {} for job in told for rank in job)
    progress = [step for job in told for step in job[0].progress]
    assert progress == sorted(progress)
    assert progress[-1] == 79
