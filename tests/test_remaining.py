"""What is left of a plan against a plain list of batches, and what a reader makes of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardqueue import Unit, unit_files, unit_grid, unit_ranges
from shardqueue.claim import Claim
from shardqueue.intervals import Intervals
from shardqueue.loading import Reader
from shardqueue.plan import Plan
from shardqueue.remaining import remaining
from shardqueue.trained import Trained, untrained

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

UNKNOWN = 6
"""A unit whose size no plan knows has so many batches here."""


def listed(count: int) -> dict[str, object]:
    """Units of several sizes, in an order of the caller's own."""
    names = [f"u{number:03d}" for number in range(count)]
    Random(count).shuffle(names)
    return {name: Unit(3 * int(name[1:]), 1 + int(name[1:]) % 4, 0, 1 + int(name[1:]) % 2) for name in names}


PLANS: dict[str, Mapping[str, object]] = {
    "lazy": unit_grid(37, 5, 3, taper=4),
    "equal": unit_grid(40, 20, 2, taper=False),
    "ranges": unit_ranges(101, 12, 4, taper=3),
    "listed": listed(17),
    "unknown": unit_files([f"file:///{number}.tar" for number in range(13)]),
}


def size_of(plan: Plan, position: int) -> int:
    batches = plan.batches(position)
    return UNKNOWN if batches is None else batches


@dataclass
class Model:
    """A plan as what is left of it, batch by batch: by position in the original plan, the batches not trained."""

    plan: Plan
    left: dict[int, list[int]]

    def remaining(self) -> list[tuple[str, list[int]]]:
        known = self.plan.batches
        return [
            (self.plan.identifier(position), left)
            for position, left in sorted(self.left.items())
            if left or known(position) is None
        ]


@st.composite
def trainings(draw: st.DrawFn) -> tuple[Plan, Trained, Model]:
    """A plan, and what was trained of it: some units whole, of some a few batches."""
    plan = Plan(PLANS[draw(st.sampled_from(sorted(PLANS)))])
    trained = Trained()
    left = {position: list(range(size_of(plan, position))) for position in range(len(plan))}
    for position in draw(st.lists(st.integers(0, len(plan) - 1), max_size=len(plan))):
        size = size_of(plan, position)
        if position in left and draw(st.booleans()):
            trained.add(position, 0, size, size)
            del left[position]
        elif position in left:
            begin = draw(st.integers(0, size))
            end = draw(st.integers(begin, size))
            trained.add(position, begin, end)
            left[position] = [index for index in left[position] if not begin <= index < end]
    return plan, trained, Model(plan, left)


@given(trainings())
def test_against_a_list_of_batches(case: tuple[Plan, Trained, Model]) -> None:
    plan, trained, model = case
    left, expected = remaining(plan, trained), model.remaining()
    assert len(left) == len(expected)
    known = [plan.batches(plan.position(name)) for name, _ in expected]
    for position, (name, batches) in enumerate(expected):
        assert left.identifier(position) == name
        assert left.position(name) == left.find(name) == position
        assert left.value(position) == plan.value(plan.position(name))
        assert left.batches(position) == (None if known[position] is None else len(batches))
        whole = plan.weight(plan.position(name))
        share = 1.0 if known[position] is None else len(batches) / size_of(plan, plan.position(name))
        assert left.weight(position) == pytest.approx(whole * share)
    gone = {plan.identifier(position) for position in range(len(plan))} - {name for name, _ in expected}
    assert left.find_all([*gone, "no-such-unit"]) == [None] * (len(gone) + 1)
    own = [plan.identifier(plan.order(place)) for place in range(len(plan))]
    order = [left.identifier(left.order(place)) for place in range(len(left))]
    assert order == [name for name in own if name not in gone]
    assert left.natural is plan.natural
    spans = [left.span(place) for place in range(len(left) + 1)]
    weights = [left.weight(left.order(place)) for place in range(len(left))]
    assert spans == pytest.approx([sum(weights[:place]) for place in range(len(left) + 1)])
    assert left.steps == pytest.approx(sum(weights))
    sizes = [left.batches(position) for position in range(len(left))]
    assert left.total == (None if plan.total is None else sum(size or 0 for size in sizes))
    for position in (-1, len(left)):
        with pytest.raises(IndexError):
            left.identifier(position)
        with pytest.raises(IndexError):
            left.order(position)


@given(trainings())
def test_it_is_the_same_plan_to_others(case: tuple[Plan, Trained, Model]) -> None:
    plan, trained, _ = case
    left = remaining(plan, trained)
    assert left.signature() == plan.signature()
    assert left.matches(plan.signature())
    assert plan.matches(left.signature())
    assert left.origin is plan
    assert left.fingerprint() == plan.fingerprint()
    assert left.arguments == plan.arguments


@given(trainings(), st.data())
def test_a_reader_gives_what_is_left_and_counts_it_from_0(
    case: tuple[Plan, Trained, Model], data: st.DataObject
) -> None:
    plan, trained, model = case
    left, expected = remaining(plan, trained), model.remaining()
    if not expected:
        return
    position = data.draw(st.integers(0, len(expected) - 1))
    name, batches = expected[position]
    begin = data.draw(st.integers(0, len(batches)))

    def load(value: object) -> Iterator[tuple[int, int]]:
        yield from ((100 + index, index) for index in range(size_of(plan, plan.position(name))))

    claim = Claim(position, name, 1, begin, "", b"", 0.0, 0.0, 0.0)
    reader = Reader(load, left, claim, "", "main")
    read = []
    while (loaded := reader.read()) is not None:
        read.append((int(loaded.step), loaded.step.index, loaded.batch))
    assert read == [(100 + index, place, index) for place, index in enumerate(batches)][begin:]
    reader.close()


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30))), st.integers(0, 20), st.integers(0, 20))
def test_batches_of_what_is_left_in_their_places(spans: list[tuple[int, int]], begin: int, end: int) -> None:
    trained = Intervals(spans)
    left = [index for index in range(100) if index not in trained]
    found = [index for span in untrained(trained, begin, end) for index in range(*span)]
    assert found == left[begin:end]


def test_nothing_trained_is_the_plan_itself() -> None:
    plan = Plan(PLANS["lazy"])
    assert remaining(plan, None) is plan
    assert remaining(plan, Trained()) is plan


def test_of_a_pass_that_is_over_nothing_is_left() -> None:
    trained = Trained()
    trained.add(3, 0, 2)
    trained.over = True
    left = remaining(Plan(PLANS["lazy"]), trained)
    assert (len(left), left.total, left.steps) == (0, 0, 0.0)


def test_a_lazy_plan_stays_lazy() -> None:
    """By intervals: a plan of 10**12 units, of which every second one of a thousand is trained."""
    plan, trained = Plan(unit_grid(10**12, 1, 1, taper=False)), Trained()
    trained.add(0, 0, 1, 1)
    trained.whole.add(1, 10**11)
    for position in range(10**11, 10**11 + 1000, 2):
        trained.add(position, 0, 1, 1)
    left = remaining(plan, trained)
    assert len(left) == left.total == 10**12 - 10**11 - 500
    assert left.identifier(0) == plan.identifier(10**11 + 1)
    assert left.span(3) == pytest.approx(3.0)


class TestTrained:
    @given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 6), st.integers(0, 6), st.booleans())))
    def test_against_a_set(self, added: list[tuple[int, int, int, bool]]) -> None:
        """Whatever the order, and whoever says that a unit has 6 batches."""
        trained, model, sized = Trained(), set[tuple[int, int]](), set[int]()
        for position, begin, end, knows in added:
            trained.add(position, begin, end, UNKNOWN if knows else None)
            model |= {(position, index) for index in range(begin, end)}
            sized |= {position} if knows else set()
        per_unit = Counter(position for position, _ in model)
        assert trained.batches == len(model)
        assert {at for span in trained.whole.spans() for at in range(*span)} == {
            position for position in sized if per_unit[position] == UNKNOWN
        }

    @given(
        st.lists(st.tuples(st.integers(0, 8), st.integers(0, 6), st.integers(0, 6), st.booleans())), st.data()
    )
    def test_the_union_of_two_halves_is_all(
        self, added: list[tuple[int, int, int, bool]], data: st.DataObject
    ) -> None:
        whole, halves = Trained(), [Trained(), Trained()]
        for position, begin, end, knows in added:
            half = data.draw(st.sampled_from(halves))
            for one in (whole, half):
                one.add(position, begin, end, UNKNOWN if knows else None)
        halves[0].update(halves[1])
        told, expected = halves[0].as_json(), whole.as_json()
        for either in (told, expected):
            del either["batches"]
        assert told == expected
        assert halves[0].holds(halves[1])

    def test_batches_of_two_learners_that_began_from_one_state(self) -> None:
        one, two = Trained(), Trained()
        for trained in (one, two):
            trained.add(0, 0, 4, 4)
            trained.before = 4
        one.add(1, 0, 3)
        two.add(2, 0, 5, 5)
        one.update(two)
        assert one.batches == 12
        one.update(two)
        assert one.batches == 12

    @given(trainings())
    def test_it_survives_json(self, case: tuple[Plan, Trained, Any]) -> None:
        _, trained, _ = case
        again = Trained.of(trained.as_json(), "passes")
        assert again.as_json() == trained.as_json()
