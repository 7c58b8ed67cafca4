"""When to ask for more, and for what: pure arithmetic, time is a number."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardqueue.pace import MARGIN, REFILL, STICKY, Pace
from shardqueue.plan import Plan
from shardqueue.units import Unit, unit_grid
from shardqueue.window import DEPTH, DRIFT, LEAST_DEPTH, LEAST_UNEVEN, Window, home_weights, share_out

if TYPE_CHECKING:
    from collections.abc import Mapping


def paced(batch: float = 1.0, claim: float = 0.0, load: float = 0.0, ahead: float = 0.0) -> Pace:
    """A pace that has timed a batch, a claim and a loader's start; no batch is running."""
    pace = Pace()
    pace.handed(0.0)
    pace.asked(batch)
    pace.claimed(claim)
    pace.opened(load)
    pace.ahead = ahead
    return pace


class TestPaceBeforeAnythingIsKnown:
    def test_one_batch_beyond_the_running_one_is_wanted(self) -> None:
        pace = Pace()
        assert pace.batch(0.0) is None
        assert pace.wanted(0.0, False) == 1.0
        pace.ahead = 1.0
        assert pace.wanted(0.0, False) == 0.0
        pace.ahead = 0.0
        pace.handed(0.0)
        assert pace.wanted(5.0, False) == 1.0

    def test_only_an_event_can_change_that(self) -> None:
        pace = Pace()
        pace.ahead = 1.0
        assert pace.wake(0.0, False) is None
        pace.handed(0.0)
        assert pace.wake(1.0, False) is None

    def test_the_grade_is_unknown(self) -> None:
        assert Pace().grade is None


class TestPaceBatches:
    def test_the_newest_counts_for_half(self) -> None:
        pace = paced(batch=1.0)
        pace.handed(10.0)
        pace.asked(13.0)
        assert pace.batch(13.0) == 2.0

    def test_a_running_one_that_takes_longer_counts_at_once(self) -> None:
        pace = paced(batch=1.0)
        pace.handed(10.0)
        assert pace.batch(10.5) == 1.0
        assert pace.batch(14.0) == 4.0

    def test_coming_back_twice_changes_nothing(self) -> None:
        pace = paced(batch=1.0)
        pace.asked(50.0)
        assert pace.batch(50.0) == 1.0

    def test_a_loader_slower_than_training_sets_the_pace(self) -> None:
        pace = paced(batch=1.0)
        for _ in range(40):
            pace.loaded(3.0)
        assert pace.batch(1.0) == pytest.approx(3.0)

    def test_no_time_at_all_is_still_positive(self) -> None:
        assert (paced(batch=0.0).batch(0.0) or 0.0) > 0.0


class TestPaceLowWater:
    def test_is_a_claims_time_with_a_margin_and_a_third_of_a_batch(self) -> None:
        pace = paced(batch=3.0, claim=2.0, load=0.5)
        assert pace.low_water(3.0, False) == pytest.approx(MARGIN * 2.5 + 1.0)

    def test_in_the_tail_the_third_is_dropped(self) -> None:
        pace = paced(batch=3.0, claim=2.0, load=0.5)
        assert pace.low_water(3.0, True) == pytest.approx(MARGIN * 2.5)

    def test_remembers_the_slowest_claim_and_forgets_slowly(self) -> None:
        pace = paced(claim=1.0)
        pace.claimed(5.0)
        assert pace.claim_seconds == 5.0
        pace.claimed(1.0)
        assert pace.claim_seconds == pytest.approx(4.6)
        for _ in range(200):
            pace.claimed(1.0)
        assert pace.claim_seconds == pytest.approx(1.0, abs=1e-6)


class TestPaceWork:
    def test_the_running_batch_counts_by_what_is_left_of_it(self) -> None:
        pace = paced(batch=4.0, ahead=2.0)
        assert pace.work(4.0) == 8.0
        pace.handed(10.0)
        assert pace.work(10.0) == 12.0
        assert pace.work(13.0) == 9.0

    def test_one_that_takes_too_long_has_nothing_left_but_makes_the_rest_dearer(self) -> None:
        pace = paced(batch=4.0, ahead=2.0)
        pace.handed(10.0)
        assert pace.work(18.0) == 16.0

    def test_nothing_is_wanted_above_the_mark(self) -> None:
        assert paced(batch=1.0, claim=1.0, ahead=1.7).wanted(1.0, False) == 0.0

    def test_one_go_fills_up_to_several_marks(self) -> None:
        pace = paced(batch=1.0, claim=1.0, ahead=1.0)
        mark = MARGIN + 1 / 3
        assert pace.wanted(1.0, False) == pytest.approx(REFILL * mark - 1.0)

    def test_in_the_tail_one_is_wanted_and_later(self) -> None:
        pace = paced(batch=1.0, claim=1.0, ahead=1.5)
        assert pace.wanted(1.0, False) > 0.0
        assert pace.wanted(1.0, True) == 0.0
        pace.ahead = 1.0
        assert pace.wanted(1.0, True) == 1.0


class TestPaceWake:
    def test_is_when_the_work_reaches_the_mark(self) -> None:
        pace = paced(batch=8.0, claim=1.0)
        pace.handed(100.0)
        mark = MARGIN + 8.0 / 3
        when = pace.wake(100.0, False)
        assert when == pytest.approx(108.0 - mark)
        assert when is not None
        assert pace.wanted(when - 0.1, False) == 0.0
        assert pace.wanted(when, False) > 0.0

    @given(st.floats(0.01, 100), st.floats(0, 100), st.integers(0, 5), st.floats(0, 1), st.booleans())
    def test_waking_then_is_never_in_vain(
        self, batch: float, claim: float, ahead: int, part: float, tail: bool
    ) -> None:
        pace = paced(batch=batch, claim=claim, ahead=float(ahead))
        pace.handed(1000.0)
        now = 1000.0 + part * batch
        when = pace.wake(now, tail)
        if when is not None:
            assert pace.wanted(when, tail) > 0.0
        elif not pace.wanted(now, tail):
            for later in (1000.0 + batch, 1000.0 + 10 * batch, 1000.0 + 1e6 * batch):
                assert not pace.wanted(later, tail), "an overdue batch makes the others look longer too"

    def test_nothing_changes_by_itself_while_no_batch_runs(self) -> None:
        assert paced(batch=8.0, claim=1.0, ahead=5.0).wake(8.0, False) is None


class TestGrade:
    @pytest.mark.parametrize(
        ("seconds", "grade"), [(1.0, 0), (0.25, 4), (0.5, 2), (4.0, -4), (1.1, 0), (0.72, 1)]
    )
    def test_is_batches_a_second_in_half_octaves(self, seconds: float, grade: int) -> None:
        assert paced(batch=seconds).grade == grade

    def test_sticks_until_the_speed_is_well_outside(self) -> None:
        pace = paced(batch=1.0)
        inside, outside = 2 ** ((STICKY - 0.1) / 2), 2 ** ((STICKY + 0.1) / 2)
        for _ in range(60):
            pace.handed(0.0)
            pace.asked(inside)
        assert pace.grade == 0
        for _ in range(60):
            pace.handed(0.0)
            pace.asked(outside)
        assert pace.grade == -1


class TestHomes:
    @given(st.lists(st.integers(1, 300), min_size=1, max_size=12))
    def test_are_in_proportion_to_weight(self, weights: list[int]) -> None:
        assert Counter(share_out(tuple(weights))) == dict(enumerate(weights))

    @given(st.lists(st.integers(1, 40), min_size=1, max_size=8))
    def test_are_evenly_spread(self, weights: list[int]) -> None:
        table = share_out(tuple(weights))
        for learner, weight in enumerate(weights):
            for stop in range(len(table) + 1):
                due = weight * stop / len(table)
                assert abs(table[:stop].count(learner) - due) <= len(weights) / 2 + 1

    def test_of_equal_learners_take_turns(self) -> None:
        assert share_out((1, 1, 1)) == [0, 1, 2]
        assert share_out((4, 4)) == [0, 1] * 4

    def test_are_the_same_for_everybody(self) -> None:
        assert share_out((16, 8, 8, 4)) == share_out((16, 8, 8, 4))

    def test_weights_follow_the_grades(self) -> None:
        assert home_weights([4, 2, 2, 0]) == [4, 2, 2, 1]
        assert home_weights([1, 0]) == [3, 2]
        assert home_weights([-3, -5]) == [2, 1]

    def test_equal_speeds_are_equal_to_unknown_ones(self) -> None:
        assert home_weights([7, 7]) == home_weights([None, None])

    def test_unknown_speeds_are_equal_or_the_slowest(self) -> None:
        assert home_weights([None, None]) == [1, 1]
        assert home_weights([]) == []
        assert home_weights([4, None, 0]) == [4, 1, 1]

    def test_beyond_64_times_the_slowest_nobody_is_faster(self) -> None:
        assert home_weights([40, 12, 0]) == [64, 64, 1]


def window(units: Mapping[str, object], learners: int = 1, me: int = 0, seed: int = 0) -> Window:
    found = Window(Plan(units), Random(seed))
    found.meet([1] * learners, me)
    return found


def ones(count: int) -> Mapping[str, object]:
    return unit_grid(count, 1, 1, False)


class TestFront:
    def test_is_the_first_unit_not_known_to_be_claimed(self) -> None:
        seen = window(ones(100))
        assert (seen.front, seen.left) == (0, 100)
        seen.claimed(1)
        assert (seen.front, seen.left) == (0, 99)
        seen.claimed(0)
        assert seen.front == 2
        seen.claimed(2, 50)
        assert (seen.front, seen.left) == (50, 50)
        seen.claimed(50, 100)
        assert seen.front == 100
        assert seen.home() is None
        assert seen.steal(unlisted=True) is None

    @given(st.lists(st.integers(0, 59)), st.permutations(range(60)))
    def test_follows_the_callers_own_order(self, claimed: list[int], order: list[int]) -> None:
        names = sorted(f"u{number:02d}" for number in range(60))
        seen = window({names[position]: 0 for position in order})
        for position in claimed:
            seen.claimed(position)
            free = [place for place, one in enumerate(order) if one not in seen.known]
            assert seen.front == (free[0] if free else 60)


class TestDepth:
    def test_is_a_number_of_units_a_learner_where_that_is_little_of_the_plan(self) -> None:
        seen = window(ones(10_000), learners=4)
        assert seen.stop == DEPTH * 4
        seen.claimed(0, 500)
        assert seen.stop == 500 + DEPTH * 4

    def test_is_a_share_of_the_steps_where_units_are_large(self) -> None:
        seen = window(ones(400), learners=4)
        assert seen.stop == DRIFT * 400

    def test_is_some_units_a_learner_at_least(self) -> None:
        assert window(ones(100), learners=16).stop == LEAST_DEPTH * 16
        assert window({**ones(100), "z": Unit(0, 9, 0, 1)}, learners=16).stop == LEAST_UNEVEN * 16

    def test_ends_with_the_plan(self) -> None:
        seen = window(ones(50), learners=16)
        seen.claimed(0, 40)
        assert seen.stop == 50

    @given(st.integers(1, 3000), st.integers(1, 40), st.integers(1, 40), st.integers(0, 3000))
    def test_is_between_its_bounds(self, steps: int, unit_steps: int, learners: int, front: int) -> None:
        plan = Plan(unit_grid(steps, unit_steps, 2, 8))
        seen = window(plan.units, learners)
        seen.claimed(0, min(front, len(plan)))
        if seen.front == len(plan):
            return
        least = LEAST_UNEVEN if seen.uneven else LEAST_DEPTH
        depth, least = seen.stop - seen.front, min(least * learners, len(plan) - seen.front)
        assert least <= depth <= DEPTH * learners
        drift = plan.span(seen.stop) - plan.span(seen.front)
        assert depth == least or drift <= DRIFT * plan.steps + 1e-9
        if seen.stop < len(plan) and depth < DEPTH * learners:
            assert plan.span(seen.stop + 1) - plan.span(seen.front) > DRIFT * plan.steps - 1e-9


class TestHome:
    def test_goes_from_near_to_far(self) -> None:
        seen = window(ones(1000), learners=3, me=1)
        found = []
        for _ in range(4):
            position = seen.home()
            assert position is not None
            found.append(position)
            seen.claimed(position)
        assert found == [1, 4, 7, 10]

    def test_homes_of_all_cover_the_window_once(self) -> None:
        taken = []
        for me in range(4):
            seen = Window(Plan(ones(2000)), Random(0))
            seen.meet([16, 8, 8, 4], me)
            while (position := seen.home()) is not None and position < DEPTH * 4:
                taken.append(position)
                seen.known.add(position)
        assert sorted(taken) == list(range(DEPTH * 4))

    def test_ends_with_the_window(self) -> None:
        seen = window(ones(1000), learners=2, me=1)
        for position in range(1, seen.stop, 2):
            seen.known.add(position)
        assert seen.home() is None

    def test_in_an_own_order_is_by_position_and_advances_by_that_order(self) -> None:
        seen = window(dict(reversed(list(ones(1000).items()))), learners=4, me=3)
        assert seen.home() == 999
        seen.claimed(999)
        assert seen.home() == 995


class TestSteal:
    def test_takes_only_what_was_listed(self) -> None:
        seen = window(ones(1000), learners=4)
        assert seen.steal() is None
        assert seen.largest() is None
        seen.saw([0, 1, 2, 5], 0, 20)
        assert (seen.front, seen.stop) == (3, 3 + 50)
        assert {seen.steal() for _ in range(200)} == set(range(12, 20))

    def test_unlisted_takes_from_the_whole_window(self) -> None:
        seen = window(ones(1000), learners=4)
        assert {seen.steal(unlisted=True) for _ in range(800)} == set(range(25, 50))

    def test_takes_the_far_half_in_an_own_order_too(self) -> None:
        seen = window(dict(reversed(list(ones(100).items()))), learners=2)
        seen.saw([], 0, 100)
        assert {seen.steal() for _ in range(200)} == {92, 93, 94, 95}

    def test_a_listing_that_shows_less_takes_nothing_back(self) -> None:
        seen = window(ones(100))
        seen.claimed(7)
        seen.saw([0, 1], 0, 100)
        assert 7 in seen.known
        assert list(seen.known.spans()) == [(0, 2), (7, 8)]

    def test_the_largest_is_one_with_most_batches(self) -> None:
        sizes = [3, 1, 5, 5, 2, 5, 1, 1]
        seen = window({f"u{place}": Unit(0, size, 0, 1) for place, size in enumerate(sizes)}, learners=4)
        seen.saw([2], 0, len(sizes))
        assert {seen.largest() for _ in range(100)} == {3, 5}


class TestPresumed:
    def test_what_was_presumed_claimed_is_looked_at_before_the_end(self) -> None:
        seen = window(ones(1000), learners=2)
        seen.start_at(900)
        assert seen.front == 900
        assert seen.left == 1000
        seen.claimed(900, 1000)
        assert seen.front == 0
        assert seen.careful
        assert seen.home() is None
        seen.saw([*range(10), *range(12, 1000)], 0, 1000)
        assert (seen.front, seen.left) == (10, 2)
        assert seen.home() == 10
        seen.claimed(10, 12)
        assert seen.front == 1000

    def test_unless_everything_is_known_anyway(self) -> None:
        seen = window(ones(1000))
        seen.start_at(900)
        seen.claimed(0, 1000)
        assert seen.front == 1000

    def test_what_a_listing_forward_tells_most_from(self) -> None:
        seen = window(ones(1000))
        assert seen.unknown_from() == 0
        seen.claimed(0, 30)
        assert seen.unknown_from() == 30
        own = window(dict(reversed(list(ones(100).items()))), learners=2)
        assert own.unknown_from() == 100 - own.stop


@pytest.mark.parametrize(("claimed", "uneven"), [(0, True), (1, False), (2, False)])
def test_whether_units_ahead_differ_in_size(claimed: int, uneven: bool) -> None:
    seen = window({"a": Unit(0, 3, 0, 1), "b": Unit(3, 2, 0, 1)})
    seen.claimed(0, claimed)
    assert seen.uneven == uneven
    assert not window(ones(100)).uneven
