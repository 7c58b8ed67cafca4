"""Who takes the next micro-batch of an elastic step, in virtual time: all of it repeats exactly.

The figures are `reached`: the best integer split with perfect knowledge over what the steps took.
"""

from __future__ import annotations

from math import inf
from random import Random
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardqueue.errors import InvalidInputError
from shardqueue.simulate.steps import Course, equal_split, greedy, reached, simulate_steps
from shardqueue.turns import HASTE, PATIENCE, TRIALS, Speeds, shares, turn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardqueue.simulate.steps import Policy, Step

PAIR = (20.0, 80.0)
FOUR = (20.0, 20.0, 40.0, 80.0)
EIGHT = (10.0, 15.0, 15.0, 20.0, 20.0, 30.0, 40.0, 80.0)
LEARNT = 10
"""Steps after which the averages are settled."""


def settled(
    seconds: Sequence[float],
    need: int,
    noise: float,
    policy: Policy = turn,
    steps: int = 100,
    groups: Sequence[int] | None = None,
    seed: int = 0,
) -> float:
    """What is reached once the speeds are known."""
    outcome = simulate_steps(
        lambda _: Course(seconds), need, steps, noise=noise, policy=policy, groups=groups, seed=seed
    )
    return reached(outcome[LEARNT:])


def known(seconds: Sequence[float]) -> Speeds:
    return Speeds.unknown(len(seconds)).after([1] * len(seconds), seconds).after([1] * len(seconds), seconds)


class TestTheStepTime:
    @pytest.mark.parametrize(
        ("seconds", "need", "noise", "least"),
        [
            (PAIR, 10, 0.05, 0.97),
            (PAIR, 10, 0.2, 0.92),
            (FOUR, 10, 0.05, 0.96),
            (FOUR, 32, 0.2, 0.95),
            (EIGHT, 64, 0.0, 0.99),
            (EIGHT, 64, 0.05, 0.98),
            (EIGHT, 24, 0.0, 0.98),
            (EIGHT, 24, 0.05, 0.97),
            ((20.0, 21.0, 22.0, 23.0), 16, 0.2, 0.94),
        ],
    )
    def test_near_the_best_split_and_never_worse_than_greedy(
        self, seconds: Sequence[float], need: int, noise: float, least: float
    ) -> None:
        ours = settled(seconds, need, noise)
        assert ours >= least
        assert ours >= 0.97 * settled(seconds, need, noise, greedy)

    def test_what_the_others_reach(self) -> None:
        assert settled(EIGHT, 24, 0.05, equal_split) == pytest.approx(0.29, abs=0.01)
        assert settled(EIGHT, 24, 0.05, greedy) == pytest.approx(0.85, abs=0.02)

    def test_any_ranks(self) -> None:
        draws = Random(5)
        ours, others = [], []
        for seed in range(30):
            ranks = draws.choice([2, 3, 4, 8, 12])
            ratio = draws.choice([1.3, 4.0, 10.0])
            seconds = [10 * ratio ** draws.random() for _ in range(ranks)]
            need, noise = ranks * draws.choice([1, 2, 3, 6]), draws.choice([0.02, 0.05, 0.1, 0.2])
            ours.append(settled(seconds, need, noise, steps=60, seed=seed))
            others.append(settled(seconds, need, noise, greedy, steps=60, seed=seed))
        assert sum(ours) / len(ours) >= 0.97
        assert min(mine / theirs for mine, theirs in zip(ours, others, strict=True)) >= 0.95

    def test_ranks_that_are_ready_late(self) -> None:
        def late(policy: Policy) -> float:
            draws = Random(3)
            starts = [[20 * draws.random() for _ in EIGHT] for _ in range(100)]
            outcome = simulate_steps(
                lambda step: Course(EIGHT, starts[step]), 24, 100, noise=0.05, policy=policy
            )
            return reached(outcome[LEARNT:])

        assert late(turn) >= 0.96
        assert late(turn) > 1.1 * late(greedy)

    @pytest.mark.parametrize(
        "groups", [(4, 1, 1, 1, 1, 1, 1, 1), (4, 2, 2, 2, 2, 1, 1, 1), (1, 1, 1, 1, 1, 1, 1, 4), (4,) * 8]
    )
    def test_ranks_that_take_several_at_once(self, groups: tuple[int, ...]) -> None:
        """Near the end of the step a rank takes fewer than its memory allows."""
        assert settled(EIGHT, 24, 0.05, groups=groups) >= 0.96
        assert settled(EIGHT, 24, 0.05, groups=groups) >= 1.1 * settled(
            EIGHT, 24, 0.05, greedy, groups=groups
        )


class TestSpeedsThatChange:
    @pytest.mark.parametrize("factor", [4.0, 1.9, 0.52, 0.25])
    @pytest.mark.parametrize(
        ("seconds", "need"), [(PAIR, 10), (FOUR, 32), (EIGHT[:7], 24), (EIGHT, 64), ((20.0,) * 4, 16)]
    )
    def test_three_steps_later_the_split_is_the_new_one(
        self, seconds: Sequence[float], need: int, factor: float
    ) -> None:
        """The mean of two runs, since a single step also has the noise of its last micro-batch."""
        for changed in range(len(seconds)):
            took = [self.after(seconds, need, factor, changed, seed) for seed in range(2)]
            assert sum(took) / len(took) <= 1.15

    def after(self, seconds: Sequence[float], need: int, factor: float, changed: int, seed: int) -> float:
        now = [one * factor if rank == changed else one for rank, one in enumerate(seconds)]
        outcome = simulate_steps(
            lambda step: Course(now if step >= LEARNT else seconds), need, LEARNT + 4, noise=0.05, seed=seed
        )
        last = outcome[LEARNT + 3]
        return last.seconds / last.best

    def test_a_hiccup_excludes_nobody(self) -> None:
        for rank in range(4):
            hiccup = [one * 100 if other == rank else one for other, one in enumerate(FOUR)]
            courses = [Course(hiccup if step == LEARNT else FOUR) for step in range(14)]
            outcome = simulate_steps(courses.__getitem__, 32, 14, noise=0.05)
            assert all(step.seconds <= 1.1 * step.best for step in outcome[LEARNT + 1 :])
            assert outcome[LEARNT + 1].counts[rank] > 0

    def test_a_first_step_that_compiles_excludes_nobody(self) -> None:
        first = [one * factor for one, factor in zip(FOUR, (1000, 100, 10, 1), strict=True)]
        outcome = simulate_steps(lambda step: Course(FOUR if step else first), 32, 8, noise=0.05)
        assert all(step.seconds <= 1.1 * step.best for step in outcome[2:])

    def test_an_idle_rank_that_got_faster_is_found(self) -> None:
        """The eighth gets nothing of 24 at 80; at 20 it should get three."""
        outcome = simulate_steps(
            lambda step: Course(EIGHT if step < LEARNT else (*EIGHT[:7], 20.0)), 24, 60, noise=0.05
        )
        found = next(number for number, step in enumerate(outcome) if number >= LEARNT and step.counts[7])
        assert found - LEARNT <= 20
        assert outcome[found + 1].counts[7] >= 2

    @pytest.mark.parametrize("hopeless", [(90.0,), (200.0, 210.0), (120.0,) * 4])
    def test_trying_hopeless_ranks_costs_what_is_allowed(self, hopeless: tuple[float, ...]) -> None:
        """With no noise the steps are perfect, but for the trials."""
        outcome = simulate_steps(lambda _: Course((10.0, 15.0, 15.0, 20.0, *hopeless)), 16, 600)
        late = outcome[LEARNT:]
        tried = sum(sum(step.counts[4:]) for step in late)
        assert tried >= 1
        best = min(step.seconds for step in late)
        assert sum(step.seconds - best for step in late) <= 1.5 * TRIALS * sum(step.seconds for step in late)


class TestRanksWithoutData:
    @pytest.mark.parametrize("dry", [(0,), (0, 1, 2), (0, 1, 2, 3, 4, 5, 6), (7,)])
    def test_the_others_take_what_is_left(self, dry: tuple[int, ...]) -> None:
        stock = [0 if rank in dry else inf for rank in range(8)]
        outcome = simulate_steps(
            lambda step: Course(EIGHT, stock=stock if step % 2 else None), 24, 40, noise=0.05
        )
        assert all(sum(step.counts) == 24 for step in outcome)
        assert all(not any(step.counts[rank] for rank in dry) for step in outcome[1::2])
        assert reached(outcome[LEARNT + 1 :: 2]) >= 0.8

    def test_the_fastest_runs_dry_in_the_middle(self) -> None:
        outcome = simulate_steps(lambda _: Course(EIGHT, stock=(2, *(inf,) * 7)), 24, 60, noise=0.05)
        assert {step.counts[0] for step in outcome} == {2}
        assert reached(outcome[LEARNT:]) >= 0.8

    def test_a_step_nobody_can_fill_is_an_error(self) -> None:
        with pytest.raises(InvalidInputError, match=r"left=3: left must be taken"):
            simulate_steps(lambda _: Course(PAIR, stock=(5, 2)), 10, 1)


class TestNothingIsLost:
    @given(
        st.lists(st.floats(0.01, 1000.0), min_size=1, max_size=6),
        st.integers(1, 40),
        st.sampled_from([0.0, 0.05, 0.5]),
        st.randoms(use_true_random=False),
    )
    def test_every_token_is_taken_once(
        self, seconds: list[float], need: int, noise: float, draws: Random
    ) -> None:
        groups = [draws.randint(1, 4) for _ in seconds]
        dry = [rank for rank in range(1, len(seconds)) if draws.random() < 0.3]

        def course(_: int) -> Course:
            factors = [draws.choice([1.0, 1.0, 4.0, 0.25]) for _ in seconds]
            stock = [0.0 if rank in dry and draws.random() < 0.5 else inf for rank in range(len(seconds))]
            starts = [draws.random() * max(seconds) for _ in seconds]
            return Course([one * by for one, by in zip(seconds, factors, strict=True)], starts, stock)

        outcome = simulate_steps(course, need, 6, noise=noise, groups=groups, seed=draws.randint(0, 9))
        assert [sum(step.counts) for step in outcome] == [need] * 6

    def test_one_seed_one_outcome(self) -> None:
        def run(seed: int) -> list[Step]:
            return simulate_steps(lambda _: Course(EIGHT), 24, 20, noise=0.05, seed=seed)

        assert run(1) == run(1)
        assert run(1) != run(2)


Case: TypeAlias = tuple[int, int, list[float | None], dict[str, Any]]


@st.composite
def asked(draw: st.DrawFn) -> Case:
    """A rank, tokens left, seconds by rank, and the other arguments of `turn`."""
    ranks = draw(st.integers(1, 8))
    speed = st.one_of(st.none(), st.floats(1e-6, 1e6))
    seconds = draw(st.lists(speed, min_size=ranks, max_size=ranks))
    need = draw(st.integers(1, 60))
    left = draw(st.integers(1, need))
    others: dict[str, Any] = {
        "need": need,
        "own": draw(st.integers(0, need - left)),
        "elapsed": draw(st.floats(0.0, 1e4)),
        "groups": draw(st.lists(st.integers(1, 6), min_size=ranks, max_size=ranks)),
    }
    return draw(st.integers(0, ranks - 1)), left, seconds, others


class TestATurn:
    @given(asked(), st.floats(0.0, 100.0))
    def test_never_more_than_there_is_and_the_group(self, case: Case, stale: float) -> None:
        rank, left, seconds, others = case
        assert 0 <= turn(rank, left, seconds, stale=stale, **others) <= min(left, others["groups"][rank])
        assert turn(rank, 0, seconds, **others) == 0

    @given(asked(), st.floats(0.0, 100.0))
    def test_the_fastest_and_the_unknown_never_decline(self, case: Case, stale: float) -> None:
        _, left, seconds, others = case
        least = min((one for one in seconds if one is not None), default=0.0)
        for rank, one in enumerate(seconds):
            if one is None:
                assert turn(rank, left, seconds, stale=stale, **others) == min(left, others["groups"][rank])
            elif one == least:
                assert turn(rank, left, seconds, stale=stale, **others) >= 1

    @given(asked())
    def test_nobody_declines_for_long_or_when_data_is_scarce(self, case: Case) -> None:
        rank, left, seconds, others = case
        most = min(left, others["groups"][rank])
        slowest = max((one for one in seconds if one is not None), default=1.0)
        long = 1.001 * (PATIENCE * max(others["groups"]) + HASTE) * slowest
        assert turn(rank, left, seconds, stale=long, **others) == most
        assert turn(rank, left, seconds, scarce=True, **others) == most

    def test_a_pause_of_the_fast_has_no_slow_one_begin(self) -> None:
        """What the fast should have taken long ago is waited for, up to a part of what the slow one would take."""
        others: dict[str, Any] = {"need": 9, "own": 1, "elapsed": 60.0}
        assert turn(1, 3, (10.0, 400.0), stale=50.0, **others) == 0
        assert turn(1, 3, (10.0, 400.0), stale=150.0, **others) == 1

    def test_by_hand(self) -> None:
        """At 40 the fast rank has begun its fifth: by 80, when the slow one would be done, it has done three more."""
        assert turn(1, 3, (10.0, 40.0), need=9, own=1, elapsed=40.0) == 0
        assert turn(1, 4, (10.0, 40.0), need=10, own=1, elapsed=40.0) == 1
        assert turn(0, 1, (10.0, 40.0), need=9, own=5, elapsed=40.0) == 1

    def test_the_replay_is_corrected_by_what_was_taken(self) -> None:
        """At 45 the fast rank should have begun its third: if not, it will at once, and do two by 90.

        At 39 it should be about to begin it: if it has, it does just one more.
        """
        assert turn(1, 2, (20.0, 45.0), need=6, own=1, elapsed=45.0) == 1
        assert turn(1, 2, (20.0, 45.0), need=5, own=1, elapsed=45.0) == 0
        assert turn(1, 2, (20.0, 45.0), need=5, own=1, elapsed=39.0) == 0
        assert turn(1, 2, (20.0, 45.0), need=6, own=1, elapsed=39.0) == 1

    def test_a_long_replay_says_little(self) -> None:
        """By the replay the fast rank has just begun one. After twenty it is rather half-way through."""
        assert turn(1, 1, (20.0, 36.0), need=5, own=1, elapsed=40.0) == 1
        assert turn(1, 1, (20.0, 36.0), need=33, own=11, elapsed=400.0) == 0


class TestSpeeds:
    def test_unknown_until_measured_twice(self) -> None:
        speeds = Speeds.unknown(2)
        assert speeds.seconds == (None, None)
        speeds = speeds.after((3, 1), (30.0, 2.0))
        assert speeds.seconds == (None, None)
        assert speeds.after((3, 1), (1.0, 2.5)).seconds == (1.0, 2.0)

    def test_what_is_alike_moves_the_average(self) -> None:
        (one,) = known((1.0,)).after((1,), (1.5,)).seconds
        assert one is not None
        assert 1.1 < one < 1.4

    def test_shorter_is_believed_at_once_and_longer_when_it_lasts(self) -> None:
        assert known((1.0,)).after((4,), (0.25,)).seconds == (0.25,)
        speeds = known((1.0,)).after((4,), (100.0,))
        assert speeds.seconds == (1.0,)
        assert speeds.after((4,), (4.0,)).seconds == (4.0,)
        assert speeds.after((4,), (1.0,)).after((4,), (100.0,)).seconds == (1.0,)

    def test_who_takes_nothing_seems_faster_by_the_time_that_passes(self) -> None:
        speeds = known((1.0, 9.0, 8.0)).after((6, 0, 0), (1.0, None, None))
        assert speeds.seconds == pytest.approx((1.0, 9.0 - TRIALS * 3, 8.0 - TRIALS * 3))
        tried = speeds.after((6, 1, 0), (1.0, 9.0, None))
        assert tried.seconds == pytest.approx((1.0, 9.0, 8.0 - TRIALS * 3 - TRIALS * 9))

    def test_it_never_comes_to_nothing(self) -> None:
        speeds = known((1.0, 0.0))
        for _ in range(3):
            speeds = speeds.after((1000, 0), (1.0, None))
        assert all(one is not None and one > 0 for one in speeds.seconds)

    def test_the_split(self) -> None:
        assert shares(PAIR, 10) == (8, 2)
        assert shares(EIGHT, 24) == (7, 4, 4, 3, 3, 2, 1, 0)
        assert shares((1.0, 1.0), 0) == (0, 0)
