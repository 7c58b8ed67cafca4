"""Intervals against a plain set."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardqueue.intervals import Intervals

LIMIT = 40
spans = st.tuples(st.integers(-5, LIMIT), st.none() | st.integers(-5, LIMIT))


def members(start: int, stop: int | None) -> set[int]:
    return {start} if stop is None else set(range(start, stop))


class TestAgainstASet:
    @given(st.lists(spans, max_size=25))
    def test_adding(self, added: list[tuple[int, int | None]]) -> None:
        intervals, model = Intervals(), set[int]()
        for start, stop in added:
            new = members(start, stop) - model
            assert intervals.add(start, stop) == len(new)
            model |= new
            assert len(intervals) == len(model)
        assert [number for number in range(-8, LIMIT + 3) if number in intervals] == sorted(model)

    @given(st.lists(spans, max_size=25))
    def test_spans_are_sorted_disjoint_and_never_touch(self, added: list[tuple[int, int | None]]) -> None:
        intervals, model = Intervals(), set[int]()
        for start, stop in added:
            intervals.add(start, stop)
            model |= members(start, stop)
        found = list(intervals.spans())
        assert {number for span in found for number in range(*span)} == model
        assert all(start < stop for start, stop in found)
        assert all(before[1] < after[0] for before, after in pairwise(found))

    @given(st.lists(spans, max_size=15), st.integers(-8, LIMIT + 3), st.integers(-8, LIMIT + 3))
    def test_gaps(self, added: list[tuple[int, int | None]], start: int, stop: int) -> None:
        intervals, model = Intervals(), set[int]()
        for span in added:
            intervals.add(*span)
            model |= members(*span)
        assert intervals.gap(start) == next(n for n in range(start, LIMIT + 5) if n not in model)
        gaps = list(intervals.gaps(start, stop))
        assert [n for gap in gaps for n in range(*gap)] == [n for n in range(start, stop) if n not in model]
        assert all(before[1] < after[0] for before, after in pairwise(gaps))

    @given(st.lists(spans, max_size=12), st.randoms(use_true_random=False))
    def test_the_order_of_adding_does_not_matter(
        self, added: list[tuple[int, int | None]], random: object
    ) -> None:
        shuffled = list(added)
        random.shuffle(shuffled)  # type: ignore[attr-defined]
        one, other = Intervals(), Intervals()
        for span in added:
            one.add(*span)
        for span in shuffled:
            other.add(*span)
        assert one == other
        assert list(one.spans()) == list(other.spans())


def test_made_from_spans() -> None:
    intervals = Intervals([(5, 7), (0, 2), (2, 3), (9, 9)])
    assert repr(intervals) == "Intervals([(0, 3), (5, 7)])"
    assert len(intervals) == 5


def test_memory_is_by_runs() -> None:
    intervals = Intervals()
    assert intervals.add(0, 10**12) == 10**12
    assert intervals.add(5, 10**6) == 0
    assert len(intervals) == 10**12
    assert intervals.gap(3) == 10**12


def test_is_mutable_so_not_hashable_and_only_equal_to_its_kind() -> None:
    assert Intervals([(0, 1)]) != {0}
    with pytest.raises(TypeError):
        hash(Intervals())
