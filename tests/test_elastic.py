"""Elastic steps: the ranks share out each step's micro-batches, with the gradients of one process."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter, UserDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch
from elastic_cases import (
    Case,
    Told,
    all_trained,
    alone,
    broken_off_and_again,
    in_part,
    shared_out,
    through_an_outage,
    trained,
    with_a_fault,
    with_one_held,
)
from lockstep_cases import Case as LockstepCase
from lockstep_cases import whole

from shardqueue import open_mailbox
from shardqueue.batches import batch_samples, joined, known_samples
from shardqueue.errors import InvalidInputError
from shardqueue.records import LogPage, RunKeys
from shardqueue.units import Step

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


def run(ranks: Up, size: int, cases: list[Case], folder: Path) -> list[list[Told]]:
    """Train the cases, one after another, and check each; what the ranks told, by case."""
    told = ranks(size).run(all_trained, cases, str(folder))
    found = [[rank[number] for rank in told] for number in range(len(cases))]
    for case, one in zip(cases, found, strict=True):
        check(case, one)
    return found


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.full), 2, 3])
def test_the_parameters_of_one_process(ranks: Up, size: int, tmp_path: Path) -> None:
    """Twenty steps and more, with a tail step, sizes that differ, a slow rank, and rates that change half-way."""
    slow = (0.0,) * (size - 1) + (0.004,)
    cases = [
        Case(rows=330, micro_batches=8),
        Case(rows=331, micro_batches=8, pauses=slow),
        Case(rows=331, micro_batches=8, pauses=slow, later=slow[::-1], dtype="float32"),
        Case(rows=100, batch=3, micro_batches=5, epochs=2, weigh="tokens"),
        Case(rows=331, micro_batches=8, limit=7),
        Case(rows=200, micro_batches=4, branches=True, pauses=slow),
    ]
    run(ranks, size, cases, tmp_path)


def test_a_rank_that_gets_nothing(ranks: Up, tmp_path: Path) -> None:
    """One is so slow that it gets its micro-batch of the first step, and no more; the gradients stay exact."""
    (told,) = run(ranks, 3, [Case(rows=160, micro_batches=8, pauses=(0.001, 0.001, 0.8))], tmp_path)
    counts = [counts[2] for counts in told[0].counts]
    assert counts[0] == 1
    assert counts.count(0) >= 2, counts
    assert max(counts) == 1, "it gives back what it loaded in the beginning, for the others"


def test_an_epoch_that_begins_with_known_speeds(ranks: Up, tmp_path: Path) -> None:
    """A rank that gives back what it holds too much of keeps what it has in hand, which it is about to train."""
    run(ranks, 2, [Case(rows=80, batch=1, micro_batches=8, epochs=3, pauses=(0.001, 0.12))], tmp_path)


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.full, id="spawn")])
def test_loader_workers(ranks: Up, context: str, tmp_path: Path) -> None:
    cases = [Case(rows=97, micro_batches=6, epochs=2, workers=2, context=context, pauses=(0.0, 0.003))]
    run(ranks, 2, cases, tmp_path)


def test_several_micro_batches_at_once(ranks: Up, tmp_path: Path) -> None:
    """A rank with more memory gets up to three, joined into one batch; the last may be short."""
    case = Case(rows=131, micro_batches=9, group=(3, 1))
    (told,) = run(ranks, 2, [case], tmp_path)
    sizes = [len(batch) for step in told[0].batches for batch in step]
    assert max(sizes) == 6
    assert max(len(batch) for step in told[1].batches for batch in step) == 2


def test_buffers_are_those_of_all(ranks: Up, tmp_path: Path) -> None:
    """Statistics are averaged over the micro-batches, their counter counts all of them, on every rank alike."""
    case = Case(rows=96, batch=4, micro_batches=6, norm=True, pauses=(0.0, 0.002), dtype="float64")
    told = ranks(2).run(trained, case, str(tmp_path))
    for name, buffer in told[0].buffers.items():
        assert torch.equal(buffer, told[1].buffers[name]), name
    assert int(told[0].buffers["1.num_batches_tracked"]) == 24
    assert told[0].digest == told[1].digest


@pytest.mark.parametrize(
    ("size", "workers"),
    [(3, 0), (2, 2), *(pytest.param(*one, marks=pytest.mark.full) for one in ((2, 0), (3, 2)))],
)
def test_any_plan(ranks: Up, size: int, workers: int, tmp_path: Path) -> None:
    """One unit of everything, units of which nobody knows the size, fewer batches than a step has, one a rank."""
    jobs = [("one", 14, 5, workers), ("unknown", 17, 4, workers), ("tapered", 9, 20, workers)]
    jobs += [("listed", size, size, workers)]
    told = ranks(size).run(shared_out, jobs, str(tmp_path))
    for number, (shape, total, each, _) in enumerate(jobs):
        steps = [rank[number] for rank in told]
        assert {len(rank) for rank in steps} == {-(-total // each)}
        values = Counter(value for rank in steps for step in rank for value in step)
        assert values == whole(LockstepCase(shape, total)), shape
        assert all(rank[0] for rank in steps), shape


@pytest.mark.parametrize("who", [0, 1])
def test_waiting_for_data_ends_with_the_step(ranks: Up, who: int, tmp_path: Path) -> None:
    """A rank whose data does not come holds up nobody; also where the others were slower, and left all to it."""
    pauses = (0.001, 0.02) if who == 0 else (0.02, 0.001)
    counts = ranks(2).run(with_one_held, str(tmp_path / "queue"), tmp_path, who, pauses)
    assert [sum(step) for step in zip(*counts, strict=True)] == [6] * 10
    assert counts[1 - who].count(6) >= 2, counts


def test_an_outage_in_the_middle_is_sat_out(ranks: Up, tmp_path: Path) -> None:
    told = ranks(2).run(through_an_outage, str(tmp_path / "queue"))
    assert Counter(value for values, _ in told for value in values) == whole(LockstepCase("equal", 120))
    assert [refused >= 2 for _, refused in told] == [False, True]


FAULTS = {
    "kill": ("PeerGoneError", "rank-1"),
    "raise": ("PeerGoneError", "rank-1"),
    "broken": ("PeerGoneError", "rank-1"),
    "forgotten": ("ClosedError", "call step.reduce()"),
    "early": ("ClosedError", "before all its micro-batches were taken"),
    "left": ("ClosedError", "before all its micro-batches were taken"),
    "twice": ("ClosedError", "a second time"),
    "one leaves": ("AgreementError", "rank 0 adds up the gradients of an elastic step, rank 1 begins a loop"),
    "not zeroed": ("ClosedError", "call optimizer.zero_grad()"),
    "penalty before": ("ClosedError", "add a penalty to the loss of each"),
    "taken ahead": ("ClosedError", "before the backward of the one before"),
    "few": ("InvalidInputError", "at least 2"),
    "other steps": ("AgreementError", "micro_batches differs between ranks"),
    "other model": ("AgreementError", "model differs between ranks"),
    "lost": ("AgreementError", "4 were trained"),
    "no samples": ("InvalidInputError", "pass weight="),
    "weightless": ("InvalidInputError", "weight"),
    "ddp": ("InvalidInputError", "DistributedDataParallel"),
    "syncbn": ("InvalidInputError", "SyncBatchNorm"),
    "loader": ("InvalidInputError", "DataLoader"),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_faults(ranks: Up, kind: str, tmp_path: Path) -> None:
    """Every rank ends with an error that says what is wrong, and no rank waits for ever."""
    outcomes = ranks(2).outcomes(with_a_fault, kind, str(tmp_path), 2)
    error, said = FAULTS[kind]
    assert (outcomes[0].error, said in outcomes[0].text) == (error, True), str(outcomes[0])
    own = {"kill": ("died", ""), "raise": ("raised", "LookupError"), "broken": ("raised", "LookupError")}
    assert (outcomes[1].kind, outcomes[1].error) == own.get(kind, ("raised", error)), str(outcomes[1])


def test_nothing_of_a_job_is_in_the_way_of_the_next(ranks: Up, tmp_path: Path) -> None:
    """In one world: one that was left in a step leaves its tokens behind, and one that ends leaves nothing."""
    told = ranks(2).run(broken_off_and_again, str(tmp_path))
    values = Counter(value for _, shared, _ in told for step in shared[0] for value in step)
    assert values == whole(LockstepCase("equal", 22))
    assert [(broken, ended) for broken, _, ended in told] == [([1], [])] * 2


def test_going_on_in_the_middle_with_others(ranks: Up, tmp_path: Path) -> None:
    """Two ranks, then three with steps of another size, then one: every row of both epochs once."""
    first = ranks(2).run(in_part, str(tmp_path), [], 7, 4, 1)
    state = first[0][1]
    second = ranks(3).run(in_part, str(tmp_path), [state], 4, 3, 1)
    third = ranks(1).run(in_part, str(tmp_path), [second[0][1]], 6, None, 2)
    assert [sum(map(len, rank[0])) for rank in third] == [2 * 90 - 4 * 14 - 3 * 8]
    rows = Counter(
        row for part in (first, second, third) for steps, _ in part for step in steps for row in step
    )
    assert rows == Counter(2 * list(range(90)))


def test_going_on_with_fewer_batches_than_ranks(ranks: Up, tmp_path: Path) -> None:
    """Two batches for three ranks, and the epoch after them whole."""
    first = ranks(2).run(in_part, str(tmp_path), [], 43, 1, 1)
    second = ranks(3).run(in_part, str(tmp_path), [first[0][1]], 4, None, 2)
    rows = Counter(row for part in (first, second) for steps, _ in part for step in steps for row in step)
    assert rows == Counter(2 * list(range(90)))


def test_the_log_tells_what_made_each_step(ranks: Up, tmp_path: Path) -> None:
    """Steps cannot be repeated from run to run: what they were made of is on record, and the audit agrees with it."""
    case = Case(rows=96, micro_batches=8, pauses=(0.0, 0.003))
    told = ranks(2).run(trained, case, str(tmp_path))
    mailbox = open_mailbox(str(tmp_path))
    by_step: Counter[tuple[str, int]] = Counter()
    for key in mailbox.list(RunKeys("1").learners):
        parsed = RunKeys("1").parse_log(key)
        if parsed is None:
            continue
        data = mailbox.get(key)
        assert data is not None
        for span in LogPage.decode(data, key).trained:
            for first, stride, count in zip(*[iter(span.ticks)] * 3, strict=True):
                by_step.update((parsed[0], first + stride * number) for number in range(count))
    expected = {
        (f"rank-{rank}", step): count
        for step, counts in enumerate(told[0].counts)
        for rank, count in enumerate(counts)
        if count
    }
    assert by_step == expected
    done = subprocess.run(
        [sys.executable, "-m", "shardqueue", "audit", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_joined_batches() -> None:
    first = (Step(3, "u", 0, 0), {"x": torch.zeros(2, 3), "names": ["a", "b"], "kind": "train"})
    second = (Step(4, "u", 0, 1), {"x": torch.ones(1, 3), "names": ["c"], "kind": "train"})
    step, batch = joined([first, second])
    assert (int(step), batch["names"], batch["kind"]) == (3, ["a", "b", "c"], "train")
    assert batch["x"].tolist() == [[0.0] * 3] * 2 + [[1.0] * 3]
    with pytest.raises(InvalidInputError, match="group"):
        joined([{"x": torch.zeros(2)}, {"y": torch.zeros(2)}])
    with pytest.raises(InvalidInputError, match="neither a tensor"):
        joined([{"x": 1}, {"x": 2}])
    with pytest.raises(InvalidInputError, match="join="):
        joined([[Step(0, "u"), object()], [Step(1, "u"), object()]])


@dataclass(frozen=True)
class Pair:
    left: torch.Tensor
    right: tuple[torch.Tensor, str]


def test_batches_of_other_kinds() -> None:
    """Mappings that are no dicts, dataclasses, lists of tensors by place; samples are counted, or unknown."""
    mapping = UserDict(x=torch.zeros(2, 3), y=torch.zeros(2))
    both = joined([[Step(0, "u"), mapping], [Step(1, "u"), UserDict(x=torch.ones(1, 3), y=torch.ones(1))]])
    assert (type(both[1]), both[1]["x"].shape, batch_samples(both)) == (UserDict, (3, 3), 3)
    assert mapping["x"].shape == (2, 3)
    pair = joined([Pair(torch.zeros(2), (torch.zeros(1), "a")), Pair(torch.zeros(3), (torch.zeros(1), "a"))])
    assert (pair.left.shape, pair.right[0].shape, pair.right[1]) == ((5,), (2,), "a")
    assert [part.shape for part in joined([[torch.zeros(2), torch.zeros(2, 1)]] * 2)] == [(4,), (4, 1)]
    assert known_samples((Step(0, "u"), mapping)) == 2
    assert known_samples((Step(0, "u"), ["a", "b", "c"])) == 3
    assert known_samples((Step(0, "u"), object())) is None
