"""Producers and consumers in virtual time: what is asserted here is arithmetic and repeats exactly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardqueue.errors import InvalidInputError
from shardqueue.pipeline import Outcome, Pipeline, Seconds, noisy, round_robin, through_channel

CAPACITIES = (4, 8, 16)
SPEEDS = (1.0, 0.5, 0.5, 0.25)


def five_to_three(items: int = 1000, capacity: int = 8, spread: float = 0.0, seed: int = 0) -> Pipeline:
    """Producers whose total rate is 1.05 times the consumers'."""
    producer, consumer = 5 / (1.05 * 3), 1.0
    return Pipeline(
        [noisy(producer, spread, 10 * seed + number) for number in range(5)],
        [noisy(consumer, spread, 10 * seed + 5 + number) for number in range(3)],
        items,
        capacity,
    )


def once(outcome: Outcome, items: int) -> bool:
    """Whether every item was consumed exactly once."""
    return sorted(number for numbers in outcome.consumed for number in numbers) == list(range(items))


class TestStarvation:
    """5 producers, 3 consumers: round robin gives them [2, 2, 1]."""

    @pytest.mark.parametrize("capacity", CAPACITIES)
    @pytest.mark.parametrize("spread", [0.0, 0.05, 0.2, 0.5])
    def test_nobody_starves_in_the_channel(self, capacity: int, spread: float) -> None:
        for seed in range(4):
            outcome = through_channel(five_to_three(1000, capacity, spread, seed))
            assert max(outcome.idle) <= 0.02
            assert once(outcome, 1000)

    @pytest.mark.parametrize("capacity", CAPACITIES)
    @pytest.mark.parametrize("spread", [0.0, 0.05, 0.2, 0.5])
    def test_round_robin_starves_the_third(self, capacity: int, spread: float) -> None:
        for seed in range(4):
            outcome = round_robin(five_to_three(1000, capacity, spread, seed))
            assert outcome.idle[2] >= 0.25
            assert max(outcome.idle[:2]) <= 0.02
            assert once(outcome, 1000)

    def test_its_queues_read_full_full_empty(self) -> None:
        first, second, third = round_robin(five_to_three(capacity=24)).depths
        assert first > 7.5
        assert second > 7.5
        assert third == 0.0

    def test_the_idle_third_costs_time(self) -> None:
        pipeline = five_to_three()
        assert round_robin(pipeline).makespan > 1.13 * through_channel(pipeline).makespan


class TestAnyNumberOfEnds:
    @pytest.mark.parametrize("producers", range(1, 7))
    @pytest.mark.parametrize("consumers", range(1, 7))
    def test_equal_ones(self, producers: int, consumers: int) -> None:
        """The channel is never later than round robin, and as fast as its slower side."""
        for rate in (0.7, 1.0, 1.05, 2.0):
            seconds = producers / (rate * consumers)
            pipeline = Pipeline([seconds] * producers, [1.0] * consumers, 120)
            channel, robin = through_channel(pipeline), round_robin(pipeline)
            assert once(channel, 120)
            assert once(robin, 120)
            assert channel.makespan <= robin.makespan + 1e-9
            limit = 120 * max(seconds / producers, 1.0 / consumers)
            assert limit <= channel.makespan + 1e-9
            assert channel.makespan <= limit + 2 * (seconds + 1.0)

    @given(
        st.lists(st.sampled_from((0.25, 0.5, 1.0, 2.0, 4.0)), min_size=1, max_size=6),
        st.lists(st.sampled_from((0.25, 0.5, 1.0, 2.0, 4.0)), min_size=1, max_size=6),
        st.integers(0, 200),
        st.sampled_from((1, 2, *CAPACITIES)),
    )
    def test_unequal_ones(
        self, producers: list[float], consumers: list[float], items: int, capacity: int
    ) -> None:
        """At most the last item is late: it may be made by the slowest, or fall to the slowest.

        Both hold as many items: round robin has room for one in each of its queues at least.
        """
        pipeline = Pipeline(producers, consumers, items, max(capacity, len(consumers)))
        channel, robin = through_channel(pipeline), round_robin(pipeline)
        assert once(channel, items)
        assert once(robin, items)
        assert channel.makespan <= robin.makespan + max(producers) + max(consumers)

    @given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 16), st.integers(0, 10**6))
    def test_noisy_ones(self, producers: int, consumers: int, capacity: int, seed: int) -> None:
        pipeline = Pipeline(
            [noisy(1.0, 0.3, seed + number) for number in range(producers)],
            [noisy(1.0, 0.3, seed + 100 + number) for number in range(consumers)],
            60,
            capacity,
        )
        channel = through_channel(pipeline)
        assert once(channel, 60)
        assert channel == through_channel(pipeline)
        assert all(0.0 <= share <= 1.0 for share in channel.idle)
        assert 0.0 <= channel.depths[0] <= capacity


class TestUnequalConsumers:
    def test_items_go_in_proportion_to_speed(self) -> None:
        outcome = through_channel(Pipeline([0.1] * 2, [1 / speed for speed in SPEEDS], 900))
        assert [round(count / 100) for count in outcome.items] == [4, 2, 2, 1]
        assert outcome.items == pytest.approx([400, 200, 200, 100], abs=3)
        assert outcome.makespan == pytest.approx(900 / sum(SPEEDS), abs=5)

    def test_round_robin_gives_all_the_same_while_the_fast_one_waits(self) -> None:
        pipeline = Pipeline([1.0] * 4, [1 / (4 * speed) for speed in SPEEDS], 900)
        assert round_robin(pipeline).items == pytest.approx([225] * 4, abs=3)
        assert round_robin(pipeline).idle[0] >= 0.7

    def test_a_consumer_that_slows_down_gets_less_from_then_on(self) -> None:
        def slows_down(number: int) -> float:
            return 1.0 if number < 500 else 4.0

        steady: Seconds = 1.0
        numbers = through_channel(Pipeline([0.1], [steady, slows_down], 1000)).consumed[1]
        assert sum(number < 500 for number in numbers) == pytest.approx(250, abs=2)
        assert sum(number >= 500 for number in numbers) == pytest.approx(100, abs=2)


class TestWhatIsReported:
    def test_one_item_at_a_time(self) -> None:
        """Made from 0 to 2, 2 to 4 and 4 to 6, each worked on for 1 second: 1 of every 2 seconds is a wait."""
        outcome = through_channel(Pipeline([2.0], [1.0], 3))
        assert outcome == Outcome(makespan=7.0, consumed=((0, 1, 2),), idle=(0.5,), depths=(0.0,))
        assert outcome.items == (3,)

    def test_a_full_queue(self) -> None:
        """One item is worked on, one is queued, and one is in the producer's hands."""
        outcome = through_channel(Pipeline([1.0], [10.0], 100, capacity=1))
        assert outcome.makespan == 1001.0
        assert outcome.idle == (0.0,)
        assert outcome.depths[0] == pytest.approx(1.0, abs=0.05)

    def test_without_items_nothing_happens(self) -> None:
        outcome = through_channel(Pipeline([1.0], [1.0, 1.0], 0))
        assert outcome == Outcome(makespan=0.0, consumed=((), ()), idle=(0.0, 0.0), depths=(0.0,))

    def test_fewer_producers_than_consumers_leave_the_rest_without_a_queue(self) -> None:
        outcome = round_robin(Pipeline([1.0], [1.0, 1.0, 1.0], 9, capacity=8))
        assert outcome.items == (9, 0, 0)
        assert len(outcome.depths) == 1

    def test_noise_is_even_and_repeats(self) -> None:
        draw = noisy(2.0, 0.5, seed=7)
        seconds = [draw(number) for number in range(2000)]
        assert seconds == [noisy(2.0, 0.5, seed=7)(number) for number in range(2000)]
        assert 1.0 <= min(seconds) < 1.05
        assert 2.95 < max(seconds) <= 3.0
        assert sum(seconds) / len(seconds) == pytest.approx(2.0, abs=0.05)
        assert seconds != [noisy(2.0, 0.5, seed=8)(number) for number in range(2000)]

    @pytest.mark.parametrize(
        ("producers", "consumers", "items", "capacity", "name"),
        [
            ([], [1.0], 1, 8, "producers"),
            ([1.0], [], 1, 8, "consumers"),
            ([1.0], [1.0], -1, 8, "items"),
            ([1.0], [1.0], 1, 0, "capacity"),
        ],
    )
    def test_what_cannot_be(
        self, producers: list[Seconds], consumers: list[Seconds], items: int, capacity: int, name: str
    ) -> None:
        with pytest.raises(InvalidInputError, match=name):
            Pipeline(producers, consumers, items, capacity)
