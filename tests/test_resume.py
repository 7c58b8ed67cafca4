"""Going on from a checkpoint with any number of processes: relative to it, every batch is trained once, by value."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from lockstep_cases import load
from resume_cases import Stint, Told, Value, in_step, on_its_own, units_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

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


@pytest.mark.parametrize(
    "stint",
    [
        pytest.param(Stint("unknown", 60, workers=2), id="sizes unknown"),
        pytest.param(Stint("listed", 60), id="listed"),
        pytest.param(Stint("tapered", 120, workers=2, persistent=True), id="tapered, persistent workers"),
        pytest.param(Stint(workers=2, context="spawn"), id="spawned", marks=pytest.mark.full),
    ],
)
def test_plans_and_loaders_of_all_kinds(ranks: Up, stint: Stint, tmp_path: Path) -> None:
    third = stint.total // 6
    told = chain(
        ranks, tmp_path, [(2, replace(stint, steps=third)), (3, replace(stint, steps=third // 2)), (1, stint)]
    )
    assert values(told) == whole(stint)


def test_only_one_rank_asks_for_the_state(ranks: Up, tmp_path: Path) -> None:
    """The others' logs come as far by themselves."""
    stint = Stint()
    told = chain(ranks, tmp_path, [(3, replace(stint, steps=33, alone=True)), (2, stint)])
    assert values(told) == whole(stint)


def test_what_was_dropped_stays_so(ranks: Up, tmp_path: Path) -> None:
    """7 batches over 3 ranks leave one out; the epoch is over, so that the next job begins the next."""
    stint = Stint("equal", 7, uneven="drop", epochs=1)
    told = chain(ranks, tmp_path, [(3, stint), (1, stint)])
    assert [len(rank.values) for rank in told[0]] == [2, 2, 2]
    assert {name for rank in told[0] for name in rank.passes} == {""}
    assert set(told[1][0].passes) == {"e1"}
    assert Counter(told[1][0].values) == whole(stint)


def test_dropping_goes_by_what_is_left(ranks: Up, tmp_path: Path) -> None:
    stint = Stint("equal", 23, uneven="drop")
    told = chain(ranks, tmp_path, [(2, replace(stint, steps=4)), (3, stint)])
    assert [len(rank.values) for rank in told[1]] == [5, 5, 5]
    assert values(told) == whole(stint)


def test_epochs_are_counted_on_from_the_checkpoint(ranks: Up, tmp_path: Path) -> None:
    """Two whole ones and a part of the third; then its rest and a fourth."""
    stint = Stint("equal", 24, workers=2)
    first = chain(ranks, tmp_path, [(2, replace(stint, epochs=2))])
    states = [first[0][0].state]
    second = ranks(2).run(in_step, replace(stint, steps=5), str(tmp_path / "queue"), states)
    third = ranks(3).run(in_step, replace(stint, epochs=2), str(tmp_path / "queue"), [second[0].state])
    passes = Counter(name for rank in (*first[0], *second, *third) for name in rank.passes)
    assert passes == {"": 24, "e1": 24, "e2": 24, "e3": 24}
    told = Counter(value for rank in (*second, *third) for value in rank.values)
    assert told == Counter(dict.fromkeys(whole(stint), 2))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "stint",
    [
        pytest.param(Stint(queue=True), id="queue"),
        pytest.param(Stint(), id="no workers"),
        pytest.param(Stint(workers=2), id="workers"),
        pytest.param(Stint("unknown", 60, queue=True), id="sizes unknown"),
        pytest.param(Stint("listed", 60, workers=2, persistent=True), id="persistent workers"),
        pytest.param(Stint(workers=2, context="spawn"), id="spawned", marks=pytest.mark.full),
    ],
)
def test_independent_learners_go_on_with_two_then_three_then_one(
    ranks: Up, stint: Stint, when: str, tmp_path: Path
) -> None:
    told: list[list[Told]] = []
    states: list[dict[str, Any]] = []
    for size, steps in ((2, stint.total // 6), (3, stint.total // 8), (1, None)):
        part = replace(stint, when=when, steps=steps)
        told.append(ranks(size).run(on_its_own, part, size, str(tmp_path / "queue"), states))
        states = [rank.state for rank in told[-1]]
    assert values(told) == whole(stint)
    assert all(sum(len(rank.values) for rank in job) for job in told)
