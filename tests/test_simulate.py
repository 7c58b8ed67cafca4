"""The claiming code in virtual time: what is asserted here is arithmetic and repeats exactly."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardqueue.errors import InvalidInputError, RunFinishedError
from shardqueue.mailbox.faults import LostResponse, Outage
from shardqueue.mailbox.memory import MemoryMailbox
from shardqueue.simulate import Node, Outcome, simulate
from shardqueue.units import unit_grid

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shardqueue.mailbox import Mailbox
    from shardqueue.units import Unit

T = TypeVar("T")

SPEEDS = (1.0, 0.5, 0.5, 0.25)


def nodes(times: int = 1) -> list[Node]:
    return [Node(speed) for speed in SPEEDS * times]


def once(outcome: Outcome, units: Mapping[str, Unit]) -> bool:
    """Whether every batch was trained exactly once, and nobody ended by an error."""
    whole = {(name, index): 1 for name, unit in units.items() for index in range(unit.count)}
    return outcome.trained == whole and not outcome.errors


class TestTheWorkedExample:
    """24 one-batch units over speeds 1, 1/2, 1/2, 1/4: section 1 of the design."""

    units = unit_grid(24, 1, 1, taper=False)

    def test_a_fixed_split_takes_24_and_the_shared_queue_12(self) -> None:
        outcome = simulate(self.units, nodes())
        assert outcome.fixed == 24.0
        assert outcome.makespan == 12.0
        assert outcome.batches == outcome.units == (11, 5, 5, 3)
        assert outcome.limit == pytest.approx(24 / 2.25)
        assert outcome.ratio == pytest.approx(1.125, abs=1e-4)
        assert once(outcome, self.units)

    def test_whatever_the_seed(self) -> None:
        """At 10, A, B and C are ready at once and one unit is left: whoever gets it, D ends last, at 12."""
        for seed in range(30):
            outcome = simulate(self.units, nodes(), latency=1e-6, seed=seed)
            assert once(outcome, self.units)
            assert outcome.makespan == pytest.approx(12.0, abs=1e-4)
            assert outcome.batches in {(11, 5, 5, 3), (10, 6, 5, 3), (10, 5, 6, 3)}

    def test_with_no_latency_at_all(self) -> None:
        outcome = simulate(self.units, nodes(), latency=0.0)
        assert outcome.makespan == 12.0
        assert once(outcome, self.units)

    def test_idle_and_busy_make_up_the_makespan(self) -> None:
        outcome = simulate(self.units, nodes(), latency=1e-6)
        busy = [batches / speed for batches, speed in zip(outcome.batches, SPEEDS, strict=True)]
        assert outcome.idle == pytest.approx([outcome.makespan - one for one in busy])


class TestNearTheLimit:
    units = unit_grid(4000, 20, 4)

    @pytest.mark.parametrize(("times", "bound"), [(1, 1.005), (16, 1.01)])
    def test_4_and_64_nodes(self, times: int, bound: float) -> None:
        outcome = simulate(self.units, nodes(times), latency=0.05)
        assert outcome.ratio <= bound
        assert once(outcome, self.units)

    def test_a_node_that_becomes_four_times_slower_half_way(self) -> None:
        half = 16_000 / sum(SPEEDS) / 2
        fleet = [Node(1.0, changes=((half, 0.25),)), *nodes()[1:]]
        outcome = simulate(self.units, fleet, latency=0.05)
        shares = [16_000 * speed / sum(SPEEDS) for speed in SPEEDS]
        split = max(node.finish(0.0, share) for node, share in zip(fleet, shares, strict=True))
        assert split / outcome.limit >= 1.5
        assert outcome.ratio <= 1.05
        assert once(outcome, self.units)

    def test_requests_are_counted_by_verb(self) -> None:
        outcome = simulate(self.units, nodes(), latency=0.05)
        others = sum(outcome.requests.values()) - outcome.requests["Put"] - outcome.claim_requests
        assert 4 * 4 <= others <= 4 * 8, "each finds the run in a few calls"
        assert sum(outcome.units) == len(self.units)
        assert outcome.claim_requests / len(self.units) <= 2.4

    def test_more_nodes_than_units(self) -> None:
        units = unit_grid(3, 2, 1, taper=False)
        assert once(simulate(units, nodes(3), latency=0.05), units)


class TestNodesThatComeAndGo:
    units = unit_grid(400, 10, 2)

    def test_a_death_loses_only_what_the_dead_held(self) -> None:
        outcome = simulate(self.units, [Node(), Node(dies=100.3), Node(0.5)], latency=0.05)
        lost = [key for key in self.keys() if not outcome.trained[key]]
        assert 0 < len(lost) < 40
        assert max(outcome.trained.values()) == 1
        assert len({name for name, _ in lost}) <= 4
        assert not outcome.errors

    def test_leaving_gives_back(self) -> None:
        fleet = [Node(), Node(leaves=100.3), Node(0.5), Node(0.25, leaves=0.0)]
        outcome = simulate(self.units, fleet, latency=0.05)
        assert once(outcome, self.units)
        assert outcome.batches[1] < 110

    def test_late_joiners_share_the_rest(self) -> None:
        fleet = [Node(), Node(joins=100.0), Node(joins=250.0)]
        outcome = simulate(self.units, fleet, latency=0.05, log_every=5.0)
        assert once(outcome, self.units)
        assert outcome.ratio <= 1.05
        assert outcome.batches[0] > outcome.batches[1] > outcome.batches[2] > 0

    def test_a_pause(self) -> None:
        fleet = [Node(), Node(changes=((50.0, 0.0), (150.0, 1.0)))]
        outcome = simulate(self.units, fleet, latency=0.05)
        assert once(outcome, self.units)
        assert outcome.ratio <= 1.05

    def test_a_pause_for_ever_keeps_what_it_held(self) -> None:
        outcome = simulate(self.units, [Node(), Node(changes=((50.0, 0.0),))], latency=0.05)
        assert max(outcome.trained.values()) == 1
        assert 0 < len(self.keys()) - len(outcome.trained) < 60

    def keys(self) -> list[tuple[str, int]]:
        return [(name, index) for name, unit in self.units.items() for index in range(unit.count)]


class Stretch(Outage):
    """Down from one call to another: a stretch of the run, as the repeated calls see it."""

    def __init__(self, mailbox: Mailbox, begin: int, end: int) -> None:
        super().__init__(mailbox)
        self._calls, self._stretch = count(), range(begin, end)

    def _around(self, verb: str, name: str, forward: Callable[[], T]) -> T:
        if verb != "put":
            (self.down if next(self._calls) in self._stretch else self.up)()
        else:
            self.up()
        return super()._around(verb, name, forward)


class TestFaults:
    units = unit_grid(300, 5, 2, taper=4)

    @pytest.mark.parametrize("begin", [0, 10, 200])
    def test_an_outage_loses_nothing(self, begin: int) -> None:
        for seed in range(5):
            mailbox = Stretch(MemoryMailbox(), begin, begin + 60)
            outcome = simulate(self.units, nodes(), latency=0.05, log_every=2.0, seed=seed, mailbox=mailbox)
            assert once(outcome, self.units)

    def test_lost_answers_lose_nothing(self) -> None:
        for seed in range(5):
            calls = count()

            def every_third(verb: str, key: str, calls: count[int] = calls) -> bool:
                return verb == "put_if_absent" and next(calls) % 3 == 0

            mailbox = LostResponse(MemoryMailbox(), when=every_third)
            assert once(simulate(self.units, nodes(), latency=0.05, seed=seed, mailbox=mailbox), self.units)


class TestOneSeedOneOutcome:
    units = unit_grid(400, 10, 2, taper=8)

    def run(self, seed: int) -> Outcome:
        fleet = [Node(), Node(0.5, leaves=90.0), Node(0.25, joins=33.0), Node(0.5, dies=120.0)]
        draws = count(seed)
        return simulate(
            self.units, fleet, latency=lambda: 0.02 + next(draws) % 7 / 50, log_every=5.0, seed=seed
        )

    def test_again(self) -> None:
        assert self.run(5) == self.run(5)

    def test_another(self) -> None:
        assert self.run(5) != self.run(6)


speeds = st.floats(0.01, 100.0)
changes = st.lists(st.tuples(st.floats(0.0, 100.0), speeds), max_size=4).map(lambda all_: tuple(sorted(all_)))


class TestNode:
    @given(speeds, changes, st.floats(0.0, 120.0), st.floats(0.001, 1000.0))
    def test_done_and_finish_are_inverse(
        self, speed: float, changed: tuple[tuple[float, float], ...], start: float, work: float
    ) -> None:
        node = Node(speed, changes=changed)
        end = node.finish(start, work)
        assert end > start
        assert node.done(end) - node.done(start) == pytest.approx(work, rel=1e-6, abs=1e-6)

    @given(speeds, changes, st.floats(0.0, 50.0), st.lists(st.floats(0.0, 200.0), min_size=2, max_size=2))
    def test_work_done_grows_from_the_start_on(
        self, speed: float, changed: tuple[tuple[float, float], ...], joins: float, times: list[float]
    ) -> None:
        node = Node(speed, joins=joins, changes=changed)
        early, late = sorted(times)
        assert 0.0 <= node.done(early) <= node.done(late) + 1e-9
        assert node.done(joins) == 0.0

    def test_by_hand(self) -> None:
        node = Node(1.0, changes=((10.0, 0.5), (20.0, 0.0), (30.0, 2.0)))
        assert [node.done(until) for until in (5, 10, 20, 25, 30, 31)] == [5, 10, 15, 15, 15, 17]
        assert [node.finish(0.0, work) for work in (5, 10, 15, 17)] == [5, 10, 20, 31]
        assert Node(1.0, changes=((10.0, 0.0),)).finish(0.0, 11.0) == float("inf")
        assert Node(1.0, joins=10.0, changes=((5.0, 0.5),)).done(14.0) == 2.0

    @pytest.mark.parametrize("speed", [0.0, -1.0, float("nan")])
    def test_a_speed_is_positive(self, speed: float) -> None:
        with pytest.raises(InvalidInputError, match="speed must be more than 0"):
            Node(speed)


class TestArguments:
    def test_somebody_must_work(self) -> None:
        with pytest.raises(InvalidInputError, match="at least one node"):
            simulate(unit_grid(4, 2), [])

    @pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
    def test_a_batch_takes_time(self, seconds: float) -> None:
        with pytest.raises(InvalidInputError, match="batch_seconds"):
            simulate(unit_grid(4, 2), [Node()], batch_seconds=seconds)

    def test_a_batch_takes_as_long_as_it_is_said_to(self) -> None:
        units = unit_grid(24, 1, 1, taper=False)
        assert simulate(units, nodes(), batch_seconds=3.0).makespan == 36.0


class TooLongError(Exception):
    """Instead of a loop without end."""


def fuse(latency: float, calls: int) -> Callable[[], float]:
    """A latency that is drawn at most so often."""
    draws = count()

    def draw() -> float:
        if next(draws) >= calls:
            raise TooLongError
        return latency

    return draw


class TestFaultsOfTheDriver:
    """What once ended, misled or never ended a simulation."""

    units = unit_grid(40, 2, 1, taper=False)

    def test_a_late_joiner_without_logs(self) -> None:
        assert once(simulate(self.units, [Node(), Node(joins=20.0)], latency=0.05), self.units)

    def test_joining_after_the_end(self) -> None:
        outcome = simulate(self.units, [Node(), Node(joins=500.0)], latency=0.05, log_every=5.0)
        assert [type(error) for error in outcome.errors] == [RunFinishedError]
        assert max(outcome.trained.values()) == 1

    def test_a_pause_for_ever_with_logs(self) -> None:
        fleet = [Node(), Node(changes=((5.5, 0.0),))]
        simulate(self.units, fleet, latency=fuse(0.05, 20_000), log_every=5.0)

    def test_leaving_in_a_pause_for_ever(self) -> None:
        fleet = [Node(), Node(changes=((5.5, 0.0),), leaves=10.0)]
        assert once(simulate(self.units, fleet, latency=fuse(0.05, 20_000)), self.units)

    def test_an_outage_while_logs_are_written(self) -> None:
        mailbox = LostResponse(MemoryMailbox(), every=3)
        assert once(simulate(self.units, nodes(), latency=0.05, mailbox=mailbox), self.units)

    def test_an_outage_while_leaving(self) -> None:
        mailbox = LostResponse(MemoryMailbox(), when=lambda verb, key: key.startswith("back/"))
        simulate(unit_grid(80, 10, 1, False), [Node(), Node(leaves=5.5)], latency=0.05, mailbox=mailbox)


# -- giving up the silent ----------------------------------------------------------------------------------


class TestReclaiming:
    """What a node held that died is trained all the same, where that is asked for."""

    units = unit_grid(400, 10, 1)

    @pytest.mark.parametrize("after", [6.0, 30.0])
    @pytest.mark.parametrize("dies", [0.02, 3.0, 11.0, 17.0])
    def test_all_is_trained_though_a_node_dies(self, after: float, dies: float) -> None:
        nodes = [Node(1.0), Node(0.5, dies=dies), Node(0.5)]
        found = simulate(
            self.units, nodes, batch_seconds=0.1, latency=0.03, reclaim_after=after, log_every=after / 3
        )
        assert not found.errors
        assert len(found.trained) == 400
        # What the dead one trained since its last log, and the batch that was running.
        since = after / 3 + 0.2
        assert found.trained.total() - 400 <= since * 0.5 / 0.1 + 1

    def test_nothing_is_trained_twice_while_all_live(self) -> None:
        three = [Node(1.0), Node(0.5), Node(0.25)]
        found = simulate(self.units, three, batch_seconds=0.1, latency=0.5, reclaim_after=3.0, log_every=1.0)
        assert set(found.trained.values()) == {1}
        assert len(found.trained) == 400

    def test_who_dies_last_is_not_waited_for_where_nobody_asked(self) -> None:
        nodes = [Node(1.0), Node(0.5, dies=11.0), Node(0.5)]
        found = simulate(self.units, nodes, batch_seconds=0.1, latency=0.03)
        assert len(found.trained) < 400

    def test_of_many_that_wait_a_few_read_the_logs(self) -> None:
        """All of them reading all logs would cost more requests than claiming."""
        nodes = [Node(1.0)] * 48
        asked = {
            after: simulate(
                unit_grid(9600, 10, 1), nodes, batch_seconds=0.1, latency=0.03, reclaim_after=after
            )
            for after in (None, 60.0)
        }
        assert all(len(found.trained) == 9600 for found in asked.values())
        more = asked[60.0].requests["Get"] - asked[None].requests["Get"]
        assert 48 <= more < 48 * 47 / 2

    def test_a_node_that_pauses_for_ever_is_refused(self) -> None:
        with pytest.raises(InvalidInputError, match="reclaim_after"):
            simulate(self.units, [Node(1.0), Node(1.0, changes=((1.0, 0.0),))], reclaim_after=60.0)
