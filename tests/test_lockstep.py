"""Ranks that step together: as many steps each, every batch once, and an error on every rank instead of a hang."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from learners import Task, until
from lockstep_cases import (
    Case,
    Epoch,
    Fault,
    all_trained,
    beside_a_stranger,
    fit,
    joined,
    late,
    load,
    outside,
    over,
    plan,
    progressing,
    sized,
    stopping,
    subgroups,
    through_an_outage,
    trained,
    whole,
    with_a_fault,
)

from shardqueue import Session, open_mailbox, shared_queue, unit_grid

if TYPE_CHECKING:
    from collections.abc import Callable

    from ranks import Outcome, Ranks

    Up = Callable[[int], Ranks]

SHAPES = ["equal", "tapered", "listed", "unknown"]
SOON = 40.0
"""Seconds in which a fault must have become an error on every rank."""


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


@pytest.mark.parametrize(
    ("size", "workers"),
    [
        *((1, 0), (1, 2), (2, 0), (3, 2)),
        *(pytest.param(*both, marks=pytest.mark.full) for both in ((2, 2), (3, 0))),
    ],
)
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
    cases = [Case(shape, total, workers=workers) for shape in ("one", "unknown") for total in (1, 3, 7)]
    cases.append(Case("one unknown", 33, workers=workers))
    told = ranks(3).run(all_trained, cases, str(tmp_path))
    for number, case in enumerate(cases):
        check(case, 3, [rank[number][0] for rank in told])


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case("tapered", 22, epochs=3), id="no workers"),
        pytest.param(Case("listed", 22, workers=2, epochs=3, set_epoch=True), id="set_epoch"),
        pytest.param(Case("unknown", 22, workers=2, epochs=3, persistent=True), id="persistent, unknown"),
        pytest.param(Case("equal", 22, workers=3, epochs=2, in_order=False), id="out of order"),
        pytest.param(Case("equal", 22, workers=2, epochs=2, accumulate=3), id="gradient accumulation"),
        pytest.param(
            Case("tapered", 22, workers=2, epochs=2, context="spawn", persistent=True),
            id="spawned",
            marks=pytest.mark.full,
        ),
    ],
)
def test_epoch_after_epoch(ranks: Up, case: Case, tmp_path: Path) -> None:
    told = ranks(2).run(trained, case, str(tmp_path / "queue"))
    for epoch in range(case.epochs):
        check(case, 2, [rank[epoch] for rank in told])
    for rank in told:
        progress = [steps for epoch in rank for steps in epoch.progress]
        assert progress == sorted(progress)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_epoch_after_a_break_is_whole(ranks: Up, workers: int, tmp_path: Path) -> None:
    case = Case("tapered", 22, workers=workers, epochs=2, breaks=4)
    told = ranks(2).run(trained, case, str(tmp_path / "queue"))
    broken = Counter(value for rank in told for value in rank[0].values)
    assert [len(rank[0].values) for rank in told] == [4, 4]
    assert broken <= whole(case)
    check(case, 2, [rank[1] for rank in told])


def test_two_groups_are_two_jobs(ranks: Up, tmp_path: Path) -> None:
    case = Case("tapered", 23, workers=2, epochs=2)
    told = ranks(4).run(subgroups, str(tmp_path), case)
    for group in (told[:2], told[2:]):
        for epoch in range(case.epochs):
            check(case, 2, [rank[epoch] for rank in group])


@pytest.mark.parametrize("size", [2, 3])
def test_parameters_are_the_same_on_all_ranks(ranks: Up, size: int, tmp_path: Path) -> None:
    case = Case("tapered", 22, workers=2, epochs=2)
    told = ranks(size).run(fit, case, str(tmp_path / "queue"))
    assert all(one == told[0] for one in told)
    digests, steps = told[0]
    assert steps == case.epochs * -(-case.total // size)
    assert len(set(digests)) == case.epochs


# -- a mailbox that is slow, or away ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        ("slow", Case("one", 13)),
        ("slow", Case("unknown", 13)),
        ("failing", Case("one", 3, workers=2)),  # its worker has all it may have, and ends
    ],
    ids=["slow", "slow, unknown", "failing"],
)
def test_surplus_that_is_given_back_late_is_waited_for(
    ranks: Up, kind: str, case: Case, tmp_path: Path
) -> None:
    told = ranks(3).run(over, kind, case, str(tmp_path / "queue"), patience=SOON)
    check(case, 3, [rank[0] for rank in told])


def test_an_outage_in_the_middle_is_sat_out(ranks: Up, tmp_path: Path) -> None:
    told = ranks(2).run(through_an_outage, str(tmp_path / "queue"))
    check(Case("equal", 40), 2, [rank[0] for rank in told])


# -- faults -------------------------------------------------------------------------------------------------


def said(outcomes: list[Outcome]) -> list[tuple[str, str]]:
    """How each rank's call ended: by which error, saying what."""
    return [(outcome.error or outcome.kind, outcome.text or str(outcome)) for outcome in outcomes]


SETTINGS = {
    "uneven": "uneven|steps",
    "units": "plan|total",
    "seed": "plan differs between ranks: rank 0 has .*rank 1",
    "epoch": "pass differs between ranks: rank 0 has .*rank 1",
    "other run": "run 1, .*, is not what rank 1 finds in .*elsewhere.*another run, opened by old",
    "prefix": "run 1, .*queue.*, is not what rank 1 finds in .*elsewhere.*is not there",
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_settings_that_differ_are_named_on_every_rank(ranks: Up, kind: str, tmp_path: Path) -> None:
    if kind == "other run":
        units: Any = plan("equal", 22)[0]
        with shared_queue(units, tmp_path / "elsewhere", "old", load) as older:
            next(iter(older))
    outcomes = ranks(2).outcomes(with_a_fault, Fault(kind), str(tmp_path), 2, patience=SOON)
    assert [name for name, _ in said(outcomes)] == ["AgreementError"] * 2, said(outcomes)
    for _, text in said(outcomes):
        assert re.search(SETTINGS[kind], text)


LOADS = {
    "short": "LoadError: load gave 3 batches for unit .*, the plan says 4",
    "long": "LoadError: load gave 5 batches for unit .*, the plan says 4",
    "too many": "AgreementError: .*nothing is left to claim: the plan promises more batches",
    # Here the first unit, which is empty, is read before its claim is.
    "too many, slowly": "AgreementError: .*nothing is left to claim: the plan promises more batches",
    "broken": "LookupError: no such file",
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", LOADS)
def test_a_load_at_fault_is_an_error_on_every_rank(
    ranks: Up, kind: str, workers: int, tmp_path: Path
) -> None:
    outcomes = ranks(2).outcomes(with_a_fault, Fault(kind, workers), str(tmp_path), 2, patience=SOON)
    found = [f"{name}: {text}" for name, text in said(outcomes)]
    assert all(outcome.kind == "raised" for outcome in outcomes), found
    assert any(re.search(f"(?s){LOADS[kind]}", text) for text in found), found


def test_batches_that_somebody_else_has_are_missed_by_all(ranks: Up, tmp_path: Path) -> None:
    queue, flag = str(tmp_path / "queue"), tmp_path / "taken"
    case = Case("equal", 60)

    def take_some() -> None:
        mailbox = open_mailbox(queue)
        until(lambda: mailbox.get("runs/1.json") is not None)
        units: Any = plan(case.shape, case.total)[0]
        with Session(queue, "x") as session, shared_queue(units, queue, "x", load, run="1") as rest:
            for count, _ in enumerate(rest):
                session.step()
                if count == 5:
                    break
        flag.touch()

    stranger = Task(take_some)
    outcomes = ranks(2).outcomes(beside_a_stranger, case, queue, flag, patience=SOON)
    stranger.result()
    assert [name for name, _ in said(outcomes)] == ["AgreementError"] * 2, said(outcomes)
    assert all("somebody else claims in this run" in text for _, text in said(outcomes))


@pytest.mark.parametrize("seconds", [1.0, pytest.param(30.0, marks=pytest.mark.full)])
def test_a_rank_that_starts_late_is_waited_for(ranks: Up, seconds: float, tmp_path: Path) -> None:
    told = ranks(2).run(late, str(tmp_path / "queue"), seconds)
    check(Case("tapered", 22), 2, [rank[0] for rank in told])


@pytest.mark.parametrize("size", [2, 3])
def test_a_killed_rank_is_named_by_the_others(ranks: Up, size: int, tmp_path: Path) -> None:
    *others, victim = ranks(size).outcomes(stopping, str(tmp_path / "queue"), "kill", 3, patience=SOON)
    assert victim.kind == "died"
    for name, text in said(others):
        assert name == "PeerGoneError"
        assert re.search(
            rf"rank {size - 1} \(learner 'rank-{size - 1}'.*\) is gone: its process \d+ ended", text
        )


def test_a_rank_that_raises_is_named_by_the_others(ranks: Up, tmp_path: Path) -> None:
    *others, culprit = ranks(3).outcomes(stopping, str(tmp_path / "queue"), "raise", 3, patience=SOON)
    assert (culprit.error, culprit.text) == ("LookupError", "the model exploded")
    for name, text in said(others):
        assert name == "PeerGoneError"
        assert "rank 2 (learner 'rank-2'" in text
        assert "left with an error" in text


@pytest.mark.parametrize("seconds", [2.5, pytest.param(8.0, marks=pytest.mark.full)])
def test_a_rank_that_is_stopped_for_a_while_is_waited_for(ranks: Up, seconds: float, tmp_path: Path) -> None:
    """Also for longer than the others wait before they look who is gone."""
    group = ranks(2)
    group.run(joined)
    victim = group.pids[1]

    def wake() -> None:
        until(lambda: Path(f"/proc/{victim}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        threading.Event().wait(seconds)
        os.kill(victim, signal.SIGCONT)

    waker = Task(wake)
    told = group.run(stopping, str(tmp_path / "queue"), "stop", 3)
    waker.result()
    assert Counter(value for rank in told for value in rank[0].values) == whole(Case("equal", 40))


# -- outside lockstep ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("track", [False, True])
@pytest.mark.parametrize(("workers", "context"), [(0, ""), (2, "fork"), (1, "spawn")])
def test_a_plain_loader_in_a_group_is_refused_at_once(
    ranks: Up, workers: int, context: str, track: bool, tmp_path: Path
) -> None:
    arguments = str(tmp_path / "queue"), workers, context, track, False
    for name, text in said(ranks(2).outcomes(outside, *arguments, patience=SOON)):
        assert name == "InvalidInputError"
        assert re.search(
            r"world_size=2: .*iterate session.track\(loader, group=...\); pass independent=True", text
        )


@pytest.mark.parametrize("workers", [0, 2])
def test_independent_ranks_and_a_group_of_one_need_no_lockstep(
    ranks: Up, workers: int, tmp_path: Path
) -> None:
    both = ranks(2).run(outside, str(tmp_path / "two"), workers, "fork", True, True)
    (alone,) = ranks(1).run(outside, str(tmp_path / "one"), workers, "fork", True, False)
    everything = whole(Case("equal", 22))
    assert Counter(value for values in both for value in values) == everything
    assert Counter(alone) == everything


# -- what all know alike ------------------------------------------------------------------------------------


@pytest.mark.parametrize("lanes", [1, 4])
def test_progress_depends_on_the_batches_alone(ranks: Up, lanes: int, tmp_path: Path) -> None:
    units = unit_grid(12, 3, lanes, taper=False)
    found: dict[int, int] = {}
    for size in (1, 2, 3):
        told = ranks(size).run(progressing, units, 2, str(tmp_path / str(size)))
        assert all(one == told[0] for one in told)
        progress = [steps for _, steps in told[0]]
        assert progress == sorted(progress)
        for batches, steps in told[0]:
            assert found.setdefault(batches, steps) == steps
    assert found == {batches: batches // lanes for batches in found}


ONE_SHORT = [[4, 4, 4, 4], [4, 1, 4, 4]]
DIFFERENT = [[4, 4, 4, 4], [4, 1, 1, 1]]


@pytest.mark.parametrize(("epochs", "warned"), [([ONE_SHORT] * 3, 0), ([DIFFERENT] * 3, 1)])
def test_batches_that_differ_in_size_are_said_once(
    ranks: Up, epochs: list[list[list[int]]], warned: int, tmp_path: Path
) -> None:
    first, second = ranks(2).run(sized, epochs, str(tmp_path / "queue"))
    assert len(first) == warned
    assert second == []
    assert all("gradients are averaged by rank" in text for text in first)
