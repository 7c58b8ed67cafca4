"""Going on from a checkpoint with any number of processes: relative to it, every batch is trained once, by value."""

from __future__ import annotations

import json
import re
import signal
from collections import Counter
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self
from unittest.mock import patch

import pytest
from learners import Gate, Task, last_page, together, until
from learners import load as pairs
from lockstep_cases import load
from resume_cases import (
    Stint,
    Told,
    Value,
    end_workers,
    in_step,
    killed_later,
    on_its_own,
    units_of,
    with_a_death,
    with_another_state,
)
from torch.utils.data import DataLoader

from shardqueue import Session, SharedQueueDataset, open_mailbox, shared_queue, unit_grid
from shardqueue import session as session_module
from shardqueue.errors import ClosedError, PlanMismatchError, StateMismatchError
from shardqueue.mailbox.memory import MemoryMailbox
from shardqueue.plan import Plan
from shardqueue.records import Manifest, RunKeys
from shardqueue.run import new_manifest
from shardqueue.state import State

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from ranks import Ranks

    from shardqueue import Mailbox

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


def test_ranks_in_step_stop_again_and_again_in_the_same_units(ranks: Up, tmp_path: Path) -> None:
    """So that of what was left of a unit a part is left."""
    stint = Stint()
    stops = [(2, 33), (3, 2), (2, 1), (3, 2), (2, 30)]
    told = chain(
        ranks, tmp_path, [*((size, replace(stint, steps=steps)) for size, steps in stops), (1, stint)]
    )
    assert values(told) == whole(stint)


def test_what_others_trained_after_the_step_is_not_in_the_state(ranks: Up, tmp_path: Path) -> None:
    stint = Stint()
    told = chain(ranks, tmp_path, [(3, replace(stint, steps=17, when="ahead")), (2, stint)])
    assert values(told) == whole(stint)


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


# -- which run, and what of it ------------------------------------------------------------------------------

UNITS = unit_grid(40, 4, 3, taper=False)
"""120 batches: more than one learner claims before another one has begun."""


class Learner:
    """An independent learner in this process, on a mailbox in memory, that trains batch by batch."""

    def __init__(
        self,
        mailbox: Mailbox,
        name: str,
        *states: dict[str, Any],
        units: Mapping[str, Any] = UNITS,
        run: str | None = None,
        reclaim_after: float | None = None,
    ) -> None:
        self.session = Session(mailbox, name, log_every=1.0)
        self.session.load_state_dict(*states)
        self.queue = shared_queue(units, mailbox, name, pairs, 2, run, reclaim_after)
        self.values: list[Value] = []

    def __enter__(self) -> Self:
        self.session.__enter__()
        self.queue.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.queue.__exit__(*error)
        self.session.__exit__(*error)

    def train(self, most: int | None = None) -> list[Value]:
        """Train so many batches more, or until nothing is left."""
        for number, (_, value) in enumerate(self.queue, 1):
            self.session.step(samples=1)
            self.values.append(value)
            if number == most:
                break
        return self.values


EVERYTHING = Counter((step, unit.lane) for unit in UNITS.values() for step in unit.steps)


@pytest.fixture
def memory() -> Mailbox:
    return MemoryMailbox()


def broken_off(memory: Mailbox, batches: int = 14) -> tuple[list[Value], dict[str, Any]]:
    """Run 1 is left by its one learner; what is in its state."""
    with Learner(memory, "a") as learner:
        values = list(learner.train(batches))
        return values, learner.session.state_dict()


def manifest(memory: Mailbox, run: str) -> Manifest:
    data = memory.get(RunKeys(run).manifest)
    assert data is not None
    return Manifest.decode(data, run)


def test_who_loads_equal_states_joins_one_run_and_who_comes_late_needs_none(memory: Mailbox) -> None:
    values, state = broken_off(memory)
    with Learner(memory, "b", state) as b, Learner(memory, "c", json.loads(json.dumps(state))) as c:
        b.train(2)
        c.train(2)
        with Learner(memory, "late") as late:
            late.train(2)
            assert [one.session.run for one in (b, c, late)] == ["2", "2", "2"]
            for one in (late, b, c):
                one.train()
            told = [*values, *b.values, *c.values, *late.values]
            union = State.union([State.of(one.session.state_dict()) for one in (b, c, late)])
    assert Counter(told) == EVERYTHING
    assert union.passes[""].batches == 120
    assert union.passes[""].before == 14
    assert list(union.passes[""].whole.spans()) == [(0, 30)]


def test_a_learner_goes_on_in_the_run_in_which_its_state_was_taken(memory: Mailbox) -> None:
    with Learner(memory, "stays") as stays:
        stays.train(3)
        values, state = broken_off(memory, 5)
        with Learner(memory, "b", state) as b:
            b.train()
            stays.train()
            assert (stays.session.run, b.session.run) == ("1", "1")
            union = State.union([State.of(one.session.state_dict()) for one in (b, stays)])
        assert Counter([*values, *b.values, *stays.values]) == EVERYTHING
    assert union.passes[""].batches == 120


def test_a_run_that_goes_on_has_nothing_to_do_with_the_state(memory: Mailbox) -> None:
    _, state = broken_off(memory)
    other = deepcopy(state)
    other["run_id"] = "another"
    with Learner(memory, "b", state) as b:
        b.train(1)
        text = (
            f"(?s){State.of(other).identity}.*belongs to another run than run 2.*{State.of(state).identity}"
        )
        with Learner(memory, "c", other) as c, pytest.raises(StateMismatchError, match=text):
            c.train(1)
        b.train()


def test_of_two_that_begin_at_once_with_different_states_one_is_refused(memory: Mailbox) -> None:
    """As where each loads its own state alone, not those of all."""
    with Learner(memory, "a") as a:
        states = [a.session.state_dict() for batches in (10, 4) if a.train(batches)]

    def go_on(name: str, state: dict[str, Any]) -> str:
        with Learner(memory, name, state) as learner:
            try:
                learner.train(1)
                until(lambda: len(refused) == 1)
                learner.train()
            except StateMismatchError:
                refused.append(name)
        return learner.session.run or ""

    refused: list[str] = []
    runs = together([partial(go_on, "a", states[0]), partial(go_on, "b", states[1])])
    assert len(refused) == 1
    assert sorted(runs) == ["", "2"]


def test_a_run_just_opened_from_another_state_may_have_learners_soon(memory: Mailbox) -> None:
    """Its manifest is there, and no log yet."""
    with Learner(memory, "a") as a:
        states = [a.session.state_dict() for batches in (10, 4) if a.train(batches)]
    opened = new_manifest(Plan(UNITS), "b", 0.0, state=State.of(states[0]))
    memory.put_if_absent(RunKeys("2").manifest, opened.encode())

    gate = Gate(memory, lambda verb, key: verb == "get" and key == RunKeys("2").manifest)

    def refused() -> None:
        with Learner(gate, "c", states[1]) as c, pytest.raises(StateMismatchError):
            c.train(1)

    task = Task(refused)
    assert gate.reached.wait(40)
    gate.open()
    with Learner(memory, "b", states[0]) as b:
        b.train(1)
        task.result()
        b.train()
        assert b.session.run == "2"


def test_a_finished_run_is_followed_by_one_that_goes_on_from_the_state(memory: Mailbox) -> None:
    """Somebody finished run 1 after the checkpoint; the model of that is lost."""
    with Learner(memory, "a") as a:
        values = list(a.train(14))
        state = a.session.state_dict()
        a.train()
    with Learner(memory, "b", state) as b:
        assert Counter([*values, *b.train()]) == EVERYTHING
        assert b.session.run == "2"


def test_a_new_prefix_goes_on_as_well(memory: Mailbox) -> None:
    values, state = broken_off(memory)
    with Learner(MemoryMailbox(), "b", state) as b:
        assert Counter([*values, *b.train()]) == EVERYTHING
        assert b.session.run == "1"


def test_a_named_run_is_opened_and_joined_and_refused(memory: Mailbox) -> None:
    values, state = broken_off(memory)
    other = deepcopy(state)
    other["run_id"] = "another"
    with Learner(memory, "b", state, run="x") as b, Learner(memory, "c", state, run="x") as c:
        told = [*values, *b.train(3), *c.train(), *b.train()[3:]]
        assert Counter(told) == EVERYTHING
        assert manifest(memory, "x").state == state
        with Learner(memory, "d", other, run="x") as d, pytest.raises(StateMismatchError):
            d.train(1)


def test_a_state_of_another_plan_is_refused(memory: Mailbox) -> None:
    _, state = broken_off(memory)
    text = r"(?s)another plan: unit_grid\(steps=40.*this learner has unit_grid\(steps=41"
    with (
        Learner(memory, "b", state, units=unit_grid(41, 4, 3)) as b,
        pytest.raises(PlanMismatchError, match=text),
    ):
        b.train(1)
    assert RunKeys("2").manifest not in memory.list("runs/")


def test_nothing_left_ends_at_once_and_claims_nothing(
    memory: Mailbox, caplog: pytest.LogCaptureFixture
) -> None:
    values, state = broken_off(memory, 120)
    with Learner(memory, "b", state) as b:
        assert b.train() == []
        assert b.session.run == "2"
    assert Counter(values) == EVERYTHING
    assert memory.list(RunKeys("2").pass_keys().units) == []
    assert "nothing was left to claim" not in caplog.text


def test_a_state_is_loaded_before_the_run(memory: Mailbox) -> None:
    _, state = broken_off(memory)
    session = Session(memory, "b")
    assert State.of(session.state_dict()).empty
    session.load_state_dict(session.state_dict())
    assert session.start is None
    session.load_state_dict(state)
    assert session.state_dict() == state
    with session, shared_queue(UNITS, memory, "b", pairs) as queue:
        with pytest.raises(ClosedError, match="before the first batch"):
            session.load_state_dict(state)
        for _ in queue:
            session.step()
    told = State.of(session.state_dict())
    assert (told.passes[""].batches, told.run) == (120, "2")


def test_a_signal_handler_takes_the_state_wherever_the_loop_is(memory: Mailbox) -> None:
    """Also while the session's own lock is held, as by `step`."""
    taken: list[dict[str, Any]] = []
    with Learner(memory, "a") as learner:
        learner.train(5)
        before = signal.signal(
            signal.SIGUSR1, lambda number, frame: taken.append(learner.session.state_dict())
        )
        try:
            with patch.object(session_module, "FLUSH", 0.05), learner.session.lock:
                signal.raise_signal(signal.SIGUSR1)
            taken.append(Task(learner.session.state_dict).result())
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert [State.of(state).passes[""].batches for state in taken] == [5, 5]
        learner.train()


def test_the_log_is_written_before_the_state_is_told(memory: Mailbox) -> None:
    """Who reads both finds in the log what is in the state."""
    with Learner(memory, "a") as learner:
        for batches in range(1, 9):
            learner.train(1)
            state = State.of(learner.session.state_dict())
            logged = sum(span.end - span.begin for span in last_page(memory, "a").trained)
            assert state.passes[""].batches == batches <= logged
        learner.train()


# -- who is gone --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [pytest.param(0, marks=pytest.mark.full), 3, 9])
def test_what_was_trained_after_the_state_is_trained_again(ranks: Up, more: int, tmp_path: Path) -> None:
    """A learner that was killed comes back with its state into the run in which another one goes on."""
    folder = open_mailbox(str(tmp_path / "queue"))
    with Learner(folder, "stays", reclaim_after=6.0) as stays:
        stays.train(2)
        (outcome,) = ranks(1).outcomes(killed_later, str(tmp_path), 6, more)
        assert outcome.kind == "died"
        told = json.loads((tmp_path / "told.json").read_text())
        with Learner(folder, "a", told["state"], reclaim_after=6.0) as again:
            again.train(1)
            assert again.session.run == "1"
            together([stays.train, again.train])  # who is done waits for the other
        union = State.union([State.of(again.session.state_dict()), State.of(stays.session.state_dict())])
    values = [*map(tuple, told["values"]), *again.values, *stays.values]
    assert Counter(values) == EVERYTHING
    assert union.passes[""].batches == 120


def test_what_was_given_back_after_the_state_is_said_to_be_lost(
    memory: Mailbox, caplog: pytest.LogCaptureFixture
) -> None:
    """The earlier instance left in order, so the batches after its state are others' no more."""
    with Learner(memory, "stays") as stays:
        stays.train(2)
        with Learner(memory, "a") as first:
            kept = list(first.train(5))
            state = first.session.state_dict()
            first.train(1)
        with Learner(memory, "a", state) as again:
            again.train()
            stays.train()
    assert EVERYTHING - Counter([*kept, *again.values, *stays.values]) == Counter(first.values[5:])
    assert "nobody trains it again: 1 batches of unit" in caplog.text


def test_a_rank_that_was_killed_is_missing_in_the_state(ranks: Up, tmp_path: Path) -> None:
    """What it trained since its last log is stored as not trained, and trained again by who goes on."""
    survivor, victim = ranks(2).outcomes(with_a_death, str(tmp_path / "queue"), 7)
    assert (survivor.kind, victim.kind) == ("value", "died"), str(survivor)
    told, warned = survivor.value
    assert re.search(r"the state lacks its last \d+ batches, at most, of learner 'rank-1'", warned)
    assert told.state["missing"].keys() == {"rank-1"}
    stint = Stint("equal", 40)
    rest = ranks(1).run(in_step, stint, str(tmp_path / "queue"), [told.state])
    known = whole(stint) - Counter([*told.values, *rest[0].values])
    assert len(known) == 4  # what the victim trained before its last log
    assert Counter([*told.values, *rest[0].values, *known]) == whole(stint)


def test_ranks_with_different_states_are_told_so(ranks: Up, tmp_path: Path) -> None:
    stint = Stint("equal", 23, steps=3)
    told = chain(ranks, tmp_path, [(2, stint)])
    for outcome in ranks(2).outcomes(with_another_state, stint, str(tmp_path / "queue"), told[0][0].state):
        assert outcome.error == "AgreementError"
        assert outcome.text.startswith("state differs between ranks")


# -- datasets ------------------------------------------------------------------------------------------------


def test_workers_that_are_older_than_the_run(tmp_path: Path) -> None:
    """One loader whose workers persist, through a session, and another that goes on from the first one's state."""
    dataset = SharedQueueDataset(UNITS, str(tmp_path), pairs, "a")
    loader = DataLoader(dataset, batch_size=None, num_workers=1, persistent_workers=True)
    values: list[Any] = []
    state: dict[str, Any] = {}
    for most in (7, None):
        with Session(str(tmp_path), "a") as session:
            if state:
                session.load_state_dict(state)
            for number, (_, value) in enumerate(session.track(loader), 1):
                values.append(tuple(value))
                session.step(samples=1)
                if number == most:
                    break
            state = session.state_dict()
    end_workers(loader)
    assert Counter(values) == EVERYTHING
    assert state["run"] == "2"


def test_an_epoch_that_was_trained_whole_is_over_at_once(tmp_path: Path) -> None:
    """With `set_epoch`; without it, the epochs go on behind it."""
    values, state = broken_off(open_mailbox(str(tmp_path)), 120)
    assert Counter(values) == EVERYTHING
    for set_epoch, expected in ((True, [0, 120]), (False, [120, 120])):
        dataset = SharedQueueDataset(UNITS, str(tmp_path), pairs, "a")
        loader = DataLoader(dataset, batch_size=None)
        counts = []
        with Session(str(tmp_path), "a") as session:
            session.load_state_dict(state)
            for epoch in range(2):
                if set_epoch:
                    dataset.set_epoch(epoch)
                counts.append(sum(1 for _ in stepping(session, loader)))
        assert counts == expected


def stepping(session: Session, loader: Any) -> Iterator[Any]:
    """The items of a loader, each trained before the next one."""
    for item in session.track(loader):
        yield item
        session.step(samples=1)


def test_what_workers_hold_in_a_run_that_goes_on_is_given_back_to_others(tmp_path: Path) -> None:
    """One learner leaves it early, in the middle of units that were trained in part before; another takes over."""
    values, state = broken_off(open_mailbox(str(tmp_path)), 6)
    for most in (9, None):
        dataset = SharedQueueDataset(UNITS, str(tmp_path), pairs, "a", run="2")
        loader = DataLoader(dataset, batch_size=None, num_workers=2)
        with Session(str(tmp_path), "a") as session:
            if most:
                session.load_state_dict(state)
            for number, (_, value) in enumerate(session.track(loader), 1):
                values.append(tuple(value))
                session.step(samples=1)
                if number == most:
                    break
            assert session.run == "2"
    assert Counter(values) == EVERYTHING
