"""The state of a run: small, plain, checked when it is read, and the same whoever took it."""

from __future__ import annotations

import io
import json
from copy import deepcopy
from random import Random
from typing import Any

import pytest
import torch

from shardqueue import unit_grid
from shardqueue.errors import InvalidInputError, PlanMismatchError, StateMismatchError
from shardqueue.learner import Life
from shardqueue.plan import Plan
from shardqueue.run import Next, decide
from shardqueue.state import State
from shardqueue.trained import Trained

PLAN = Plan(unit_grid(40, 4, 2, taper=False))


def taken(*units: int, run_id: str = "r1", learner: str = "a", pass_: str = "") -> State:
    """A state in which these units are trained, and two batches of the last one's neighbour."""
    trained = Trained()
    for position in units:
        trained.add(position, 0, 4, 4)
    trained.add(max(units) + 1, 1, 3)
    return State(
        PLAN.signature(), "1", run_id, {pass_: trained}, 7, 100, {"b": 3, "c": None}, [(learner, "i0")]
    )


def test_it_survives_json_and_torch() -> None:
    state = taken(0, 1, 5)
    file = io.BytesIO()
    torch.save(state.as_dict(), file)
    file.seek(0)
    for told in (json.loads(json.dumps(state.as_dict())), torch.load(file, weights_only=True)):
        assert State.of(told).as_dict() == state.as_dict()


def test_a_million_units_and_64_learners_take_a_few_kilobytes() -> None:
    """Each learner is in the middle of a unit, and the last thousand units are trained here and there."""
    plan, trained, random = Plan(unit_grid(20_000_000, 20, 1, taper=False)), Trained(), Random(0)
    trained.whole.add(0, 500_000)
    trained.batches = 10_000_000
    for position in range(500_000, 501_000):
        if random.random() < 0.5:
            trained.add(position, 0, 20, 20)
    for position in range(501_000, 501_064):
        trained.add(position, 0, random.randrange(1, 20))
    state = State(plan.signature(), "1", "r1", {"": trained})
    assert len(plan) == 1_000_000
    assert len(json.dumps(state.as_dict())) < 5_000


def without(state: dict[str, Any], *path: str) -> dict[str, Any]:
    state = deepcopy(state)
    inner = state
    for name in path[:-1]:
        inner = inner[name]
    del inner[path[-1]]
    return state


def changed(value: object, *path: str) -> dict[str, Any]:
    state = deepcopy(taken(0, 1).as_dict())
    inner = state
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    return state


MALFORMED = {
    "nothing": None,
    "no dict": [1],
    "empty": {},
    "another version": changed(2, "version"),
    "a field too few": without(taken(0).as_dict(), "writers"),
    "a field too many": changed(1, "more"),
    "no plan": changed("grid", "plan"),
    "a plan of no units": changed({}, "plan"),
    "no name": changed(1, "run"),
    "no id": changed(None, "run_id"),
    "no passes": changed([], "passes"),
    "a pass too little": without(taken(0).as_dict(), "passes", "", "sizes"),
    "odd lengths": changed([1, 2, 3], "passes", "", "whole"),
    "a negative length": changed([1, -2], "passes", "", "whole"),
    "a length of no number": changed([1, True], "passes", "", "whole"),
    "no lengths": changed("0-5", "passes", "", "whole"),
    "parts of no position": changed({"x": [0, 1]}, "passes", "", "parts"),
    "no parts": changed([[0, 1]], "passes", "", "parts"),
    "a size of no number": changed({"2": "4"}, "passes", "", "sizes"),
    "no batches": changed(1.5, "passes", "", "batches"),
    "a unit too many": changed([0, 21], "passes", "", "whole"),
    "a part of a unit too many": changed({"20": [0, 1]}, "passes", "", "parts"),
    "over or not": changed(1, "passes", "", "over"),
    "batches of nothing": changed(
        {"whole": [], "parts": {}, "sizes": {}, "batches": 5, "before": 0, "over": False}, "passes", ""
    ),
    "a negative step": changed(-1, "global_step"),
    "samples of no number": changed("1", "samples"),
    "nobody is missing": changed(["b"], "missing"),
    "a negative loss": changed({"b": -1}, "missing"),
    "writers of no instance": changed([["a"]], "writers"),
    "no writers": changed("a", "writers"),
    "origins of no run": changed([1], "origins"),
    "no origins": changed("r0", "origins"),
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
def test_what_is_no_state_is_refused(data: object) -> None:
    with pytest.raises(InvalidInputError, match=r"state.*must be .*; (pass|load) "):
        State.of(data)


class TestUnion:
    def test_of_independent_learners(self) -> None:
        union = State.union([taken(0, 1, learner="a"), taken(4, 5, learner="b", pass_="e1"), State()])
        assert union.passes.keys() == {"", "e1"}
        assert list(union.passes[""].whole.spans()) == [(0, 2)]
        assert list(union.passes["e1"].whole.spans()) == [(4, 6)]
        assert union.writers == [("a", "i0"), ("b", "i0")]
        assert union.missing == {"b": 3, "c": None}

    def test_the_order_does_not_count(self) -> None:
        one, two = taken(0, 1, learner="a"), taken(2, 7, learner="b")
        two.global_step = 9
        for states in ([one, two], [two, one]):
            union = State.union(states)
            assert union.identity == State.union([one, two, one]).identity
            assert union.global_step == 9
        assert one.identity != two.identity
        assert union.identity not in (one.identity, two.identity)

    @pytest.mark.parametrize("first", [True, False])
    def test_one_that_another_went_on_from_does_not_count(self, first: bool) -> None:
        """Of learners that are started again together one has saved before another has read."""
        old, new = taken(0, 1), taken(0, 1, 2, 3, run_id="r2")
        new.passes[""].add(2, 0, 4, 4)
        new.origins = ["r0", "r1"]
        union = State.union([old, new] if first else [new, old])
        assert (union.run_id, union.identity, union.origins) == ("r2", new.identity, ["r0", "r1"])

    def test_one_of_an_earlier_run_with_more_in_it_is_refused(self) -> None:
        old, new = taken(0, 1, 9), taken(0, 1, 2, 3, run_id="r2")
        new.origins = ["r1"]
        with pytest.raises(StateMismatchError, match="different runs"):
            State.union([old, new])

    def test_it_leaves_them_as_they_were(self) -> None:
        one, two = taken(0, 1), taken(2, 7)
        before = one.as_dict(), two.as_dict()
        State.union([one, two])
        assert (one.as_dict(), two.as_dict()) == before

    def test_of_none_is_empty(self) -> None:
        assert State.union([]).empty
        assert State.union([State(), State.of(State().as_dict())]).empty

    def test_of_two_runs_or_two_plans_is_refused(self) -> None:
        other = taken(0, run_id="r2")
        with pytest.raises(StateMismatchError, match=f"(?s){other.identity}.*{taken(0).identity}"):
            State.union([taken(0), other])
        other = taken(0)
        other.plan = Plan(unit_grid(41, 4, 2)).signature()
        with pytest.raises(PlanMismatchError, match=r"(?s)41.*40"):
            State.union([taken(0), other])


def test_who_took_it_and_what_is_missing_do_not_tell_states_apart() -> None:
    one, two = taken(0, 1), taken(1, 0, learner="z")
    two.global_step, two.samples, two.missing, two.run = 1, 2, {}, "2"
    assert one.identity == two.identity
    two.passes[""].over = True
    assert one.identity != two.identity


def test_the_first_pass_of_which_something_is_left() -> None:
    state = taken(*range(19))
    assert state.first_pass(PLAN) == 0
    state.passes[""].add(19, 0, 4, 4)
    assert state.first_pass(PLAN) == 1
    state.passes["e1"] = Trained()
    state.passes["e1"].over = True
    assert state.first_pass(PLAN) == 2
    state.passes["e2"] = Trained()
    assert state.first_pass(PLAN) == 2
    assert taken(0, 1).first_pass(PLAN) == 0
    assert State().first_pass(PLAN) == 0


ALIVE, DEAD, UNSURE = [Life.LEFT, Life.ALIVE], [Life.LEFT, Life.DEAD], [Life.DEAD, Life.UNSURE]


@pytest.mark.parametrize(
    ("lives", "claimed", "ended", "belongs", "expected"),
    [
        pytest.param(ALIVE, True, False, True, Next.JOIN, id="its own run goes on"),
        pytest.param(ALIVE, True, True, True, Next.JOIN, id="its own run is about to end"),
        pytest.param(ALIVE, True, False, False, Next.REFUSE, id="another run goes on"),
        pytest.param(ALIVE, False, False, False, Next.REFUSE, id="another run begins"),
        pytest.param([], False, False, True, Next.JOIN, id="a run that begins from it"),
        pytest.param([], False, False, False, Next.OPEN_NEXT, id="an empty run of another start"),
        pytest.param(UNSURE, False, False, False, Next.WAIT, id="perhaps somebody is in another run"),
        pytest.param(UNSURE, True, False, True, Next.WAIT, id="perhaps somebody is in its own run"),
        pytest.param(DEAD, True, False, True, Next.OPEN_NEXT, id="its own run broke off"),
        pytest.param(DEAD, True, True, True, Next.OPEN_NEXT, id="its own run is finished"),
        pytest.param(DEAD, True, False, False, Next.OPEN_NEXT, id="another run broke off"),
        pytest.param(DEAD, True, True, False, Next.OPEN_NEXT, id="another run is finished"),
    ],
)
def test_what_a_learner_with_a_state_does_about_the_newest_run(
    lives: list[Life], claimed: bool, ended: bool, belongs: bool, expected: Next
) -> None:
    assert decide(lives, claimed, ended, True, belongs) is expected
