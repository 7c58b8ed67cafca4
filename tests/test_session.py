"""What a session counts as trained, how it measures, and the log that others read."""

from __future__ import annotations

import contextlib
import json
import queue as queues
import threading
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from learners import (
    PATIENCE,
    Clock,
    CountingLoader,
    Gate,
    Task,
    Value,
    credited,
    dataset,
    given_back,
    last_page,
    load,
    pages,
    together,
    train,
    until,
)

from shardqueue import Mailbox, Session, Step, Unit, open_mailbox, shared_queue, unit_grid
from shardqueue.errors import (
    ClosedError,
    InvalidInputError,
    LoadError,
    PassFinishedError,
    PlanMismatchError,
    ShardQueueError,
    ShardQueueWarning,
)
from shardqueue.mailbox.faults import Outage, Wrapper
from shardqueue.mailbox.memory import MemoryMailbox

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

ONE = "000000-0.json"


class Seen(Wrapper):
    """Says when logs were written, and keeps what was written."""

    def __init__(self, mailbox: Mailbox) -> None:
        super().__init__(mailbox)
        self.written: list[tuple[str, bytes]] = []
        self._changed = threading.Condition()

    def put(self, key: str, data: bytes) -> None:
        super().put(key, data)
        with self._changed:
            self.written.append((key, data))
            self._changed.notify_all()

    def wait(self, holds: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(holds, PATIENCE)

    def _around(self, verb: str, name: str, forward: Callable[[], Any]) -> Any:
        return forward()


class Ahead:
    """Iterates a loader on a thread that runs `depth` items ahead, as wrappers that move batches to a GPU do.

    `begun`: it starts when it is made, else when it is iterated.
    """

    def __init__(self, loader: Iterable[Any], depth: int, begun: bool = False) -> None:
        self._items: queues.Queue[Any] = queues.Queue()
        self._room = threading.Semaphore(depth)
        self.fetched = 0
        self._changed = threading.Condition()
        self._loader = loader
        self._task = self._begin() if begun else None

    def _begin(self) -> Task:
        return Task(lambda: self._fetch(iter(self._loader)))

    def _fetch(self, items: Iterator[Any]) -> None:
        try:
            while True:
                assert self._room.acquire(timeout=PATIENCE)
                item = next(items, self)
                self._items.put(item)
                if item is self:
                    return
                with self._changed:
                    self.fetched += 1
                    self._changed.notify_all()
        except ShardQueueError:
            self._items.put(self)  # the queue was left

    def wait_for(self, fetched: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.fetched >= fetched, PATIENCE)

    def __iter__(self) -> Iterator[Any]:
        self._task = self._task or self._begin()
        while True:
            item = self._items.get(timeout=PATIENCE)
            if item is self:
                return
            self._room.release()
            yield item

    def finish(self) -> None:
        self._room.release()
        assert self._task is not None
        self._task.result()


@pytest.fixture
def memory() -> Mailbox:
    return MemoryMailbox()


# -- step() ------------------------------------------------------------------------------------------------


def test_step_makes_every_batch_handed_out_so_far_trained(memory: Mailbox) -> None:
    units = unit_grid(10, 10, taper=False)
    with Session(memory, "a") as session:
        with shared_queue(units, memory, "a", load) as queue:
            for _ in range(3):
                next(queue)
            assert session.rates.batches == 0
            session.step(samples=30)
            assert (session.rates.batches, session.rates.samples) == (3, 30)
            next(queue)
            next(queue)
        assert given_back(memory) == {(ONE, 0): 3}
        assert [(r.begin, r.unclear, r.offered) for r in queue.returned] == [(3, 0, True)]
    assert credited(memory) == Counter({(ONE, index): 1 for index in range(3)})
    (span,) = last_page(memory, "a").trained
    assert (span.pass_, span.unit, span.attempt, span.begin, span.end, span.samples) == ("", ONE, 0, 0, 3, 30)


def test_the_global_step_is_logged(memory: Mailbox) -> None:
    with Session(memory, "a") as session, shared_queue(unit_grid(2, 2), memory, "a", load) as queue:
        for step, _ in queue:
            session.step(samples=1, global_step=int(step) + 100)
    assert max(span.global_step or 0 for span in last_page(memory, "a").trained) == 101


@pytest.mark.parametrize(
    ("every", "leave_after", "fails"),
    [
        (every, leave_after, fails)
        for every in (1, 3, 7)
        for leave_after in (2, 4, 9, 11)
        for fails in (False, True)
    ],
)
@pytest.mark.filterwarnings("ignore:.* never followed by session")
def test_gradient_accumulation_left_in_the_middle(
    memory: Mailbox, every: int, leave_after: int, fails: bool
) -> None:
    """The batches that no optimizer step followed are trained by another learner."""
    units = unit_grid(30, 4, taper=False)
    trained: list[Value] = []
    pending: list[Value] = []
    with contextlib.suppress(ZeroDivisionError), Session(memory, "a") as session:  # noqa: SIM117
        with shared_queue(units, memory, "a", load, run="x") as queue:
            for count, (_, batch) in enumerate(queue, 1):
                pending.append(batch)
                if count % every == 0:
                    session.step(samples=every)
                    trained += pending
                    pending.clear()
                if count == leave_after:
                    if fails:
                        raise ZeroDivisionError
                    break
    assert len(trained) == leave_after - leave_after % every
    rest = train(units, memory, "b", run="x")
    assert Counter(trained) + Counter(rest) == dataset(units)
    assert set(credited(memory, "x").values()) == {1}
    assert sum(credited(memory, "x").values()) == 30


def test_step_after_the_queue_was_left_trains_nothing_that_was_given_back(memory: Mailbox) -> None:
    units = unit_grid(10, 10, taper=False)
    with Session(memory, "a") as session:
        with shared_queue(units, memory, "a", load) as queue:
            next(queue)
            session.step(samples=1)
            next(queue)
        assert given_back(memory) == {(ONE, 0): 1}
        session.step(samples=1)
    assert credited(memory) == Counter({(ONE, 0): 1})


def test_a_second_queue_of_a_session_goes_on_where_the_first_was_left(memory: Mailbox) -> None:
    units = unit_grid(10, 10, taper=False)
    trained: list[Value] = []
    with Session(memory, "a") as session:
        with shared_queue(units, memory, "a", load) as queue:
            for _, batch in queue:
                trained.append(batch)
                session.step(samples=1)
                if len(trained) == 4:
                    next(queue)  # handed out, never trained
                    break
        with shared_queue(units, memory, "a", load) as queue:
            for _, batch in queue:
                trained.append(batch)
                session.step(samples=1)
    assert Counter(trained) == dataset(units)
    assert credited(memory) == Counter({(ONE, index): 1 for index in range(10)})
    assert last_page(memory, "a").left == "end"


@pytest.mark.parametrize("stepped", [False, True])
def test_a_second_queue_closes_one_that_was_not_left(memory: Mailbox, stepped: bool) -> None:
    units = unit_grid(10, 10, taper=False)
    with warnings.catch_warnings(), Session(memory, "a") as session:
        warnings.simplefilter("ignore", ShardQueueWarning)
        first = shared_queue(units, memory, "a", load).__enter__()
        next(first)
        if stepped:
            session.step(samples=1)
            next(first)
        with shared_queue(units, memory, "a", load) as second:
            with pytest.raises(ClosedError):
                next(first)
            for _ in second:
                session.step(samples=1)
    assert credited(memory) == Counter({(ONE, index): 1 for index in range(10)})


def test_a_pass_that_was_finished_is_not_begun_again(memory: Mailbox) -> None:
    units = unit_grid(4, 2)
    with Session(memory, "a") as session:
        with shared_queue(units, memory, "a", load) as queue:
            for _ in queue:
                session.step(samples=1)
        again = shared_queue(units, memory, "a", load)
        with pytest.raises(PassFinishedError, match=r"'a'.*run="), again:
            pass


def test_a_second_queue_with_another_plan_is_refused(memory: Mailbox) -> None:
    with Session(memory, "a") as session:
        with shared_queue(unit_grid(10, 2), memory, "a", load) as queue:
            next(queue)
            session.step(samples=1)
        other = shared_queue(unit_grid(12, 2), memory, "a", load)
        with pytest.raises(PlanMismatchError), other:
            next(other)


def test_a_second_queue_that_names_another_run_gets_it_or_is_refused(memory: Mailbox) -> None:
    with Session(memory, "a") as session:
        with shared_queue(unit_grid(10, 2), memory, "a", load) as queue:
            next(queue)
            session.step(samples=1)
        try:
            with shared_queue(unit_grid(10, 2), memory, "a", load, run="other") as queue:
                next(queue)
                session.step(samples=1)
        except ShardQueueError as error:
            assert "other" in str(error)
        else:
            assert memory.list("run-other/units/") != []


def test_batches_never_followed_by_step_are_named_once(memory: Mailbox) -> None:
    with pytest.warns(ShardQueueWarning, match=r"session\.step") as caught, Session(memory, "a") as session:  # noqa: SIM117
        with shared_queue(unit_grid(5, 5, taper=False), memory, "a", load) as queue:
            for index, _ in enumerate(queue):
                if index == 1:
                    session.step(samples=2)
    assert len(caught) == 1
    assert ONE in str(caught[0].message)
    assert [(r.unit, r.begin) for r in queue.returned] == [(ONE, 2)]


@pytest.mark.parametrize("batches", [5, 300, 700])
def test_step_never_called_warns_once_and_trains_nothing_twice(memory: Mailbox, batches: int) -> None:
    units = unit_grid(batches, 10, taper=False)
    with pytest.warns(ShardQueueWarning, match=r"session\.step\(\) was never called") as caught:  # noqa: SIM117
        with Session(memory, "a"), shared_queue(units, memory, "a", load) as queue:
            first = [batch for _, batch in queue]
    assert len(caught) == 1
    assert queue.returned == ()
    assert Counter(first) == dataset(units)
    assert sum(credited(memory).values()) == batches
    assert given_back(memory) == {}


@pytest.mark.parametrize("batches", [5, 300])
def test_step_never_called_with_warnings_as_errors_leaves_no_thread(memory: Mailbox, batches: int) -> None:
    units = unit_grid(batches, 10, taper=False)
    with (
        pytest.raises(ShardQueueWarning),
        Session(memory, "a"),
        shared_queue(units, memory, "a", load) as queue,
    ):
        for _ in queue:
            pass
    assert not [thread for thread in threading.enumerate() if thread.name == "shardqueue-load"]


def test_without_any_batch_step_counts_only_samples(memory: Mailbox) -> None:
    with Session(memory, "a") as session:
        session.step(samples=5)
        assert (session.rates.batches, session.rates.samples) == (0, 5)


@pytest.mark.parametrize("samples", [np.int64(4), np.int32(4), np.uint8(200)])
def test_samples_may_be_any_integer(memory: Mailbox, samples: Any) -> None:
    with Session(memory, "a") as session, shared_queue(unit_grid(2, 2), memory, "a", load) as queue:
        for _ in queue:
            session.step(samples=samples, global_step=samples)
        assert type(session.rates.samples) is int
    page = last_page(memory, "a")
    assert (page.left, page.totals.samples) == ("end", 2 * int(samples))


@pytest.mark.parametrize("samples", [-1, np.int64(-1), 1.5, "4", None, True, float("nan")])
def test_samples_that_are_no_count_are_refused(memory: Mailbox, samples: Any) -> None:
    """Whatever reached the log would stop every learner that reads it."""
    with Session(memory, "a") as session, shared_queue(unit_grid(2, 2), memory, "a", load) as queue:
        next(queue)
        with pytest.raises(InvalidInputError, match="samples"):
            session.step(samples=samples)
        session.step(samples=1)
    assert credited(memory).total() == 1


@pytest.mark.parametrize("global_step", [1.5, "4", True])
def test_a_global_step_that_is_no_int_is_refused(memory: Mailbox, global_step: Any) -> None:
    with Session(memory, "a") as session, shared_queue(unit_grid(2, 2), memory, "a", load) as queue:
        next(queue)
        with pytest.raises(InvalidInputError, match="global_step"):
            session.step(samples=1, global_step=global_step)
        session.step(samples=1)


# -- a session and its queue -------------------------------------------------------------------------------


def test_a_session_of_another_learner_is_not_used(memory: Mailbox) -> None:
    queue = shared_queue(unit_grid(4, 2), memory, "b", load)
    with Session(memory, "a") as session:
        with pytest.warns(ShardQueueWarning, match="learner id 'a', the queue of 'b'"):
            queue.__enter__()
        assert len(list(queue)) == 4
        assert session.rates.batches == 0
        assert session.run is None
        queue.__exit__(None, None, None)


def test_a_session_entered_after_its_queue_is_warned_of(memory: Mailbox) -> None:
    session = Session(memory, "a")
    with shared_queue(unit_grid(4, 2), memory, "a", load) as queue:
        with pytest.warns(ShardQueueWarning, match="enter the session first"):
            session.__enter__()
        assert len(list(queue)) == 4
        session.__exit__(None, None, None)
    assert session.rates.batches == 0


def test_learners_without_an_id_find_their_session(memory: Mailbox) -> None:
    with Session(memory) as session, shared_queue(unit_grid(4, 2), memory, None, load) as queue:
        for _ in queue:
            session.step(samples=1)
        assert session.rates.batches == 4
        assert session.run == "1"
    assert len(pages(memory)) == 1


def test_a_queue_and_a_session_of_one_learner_need_one_mailbox(memory: Mailbox, tmp_path: Path) -> None:
    other = MemoryMailbox()
    with Session(memory, "a"):
        queue = shared_queue(unit_grid(4, 2), other, "a", load)
        with pytest.raises(InvalidInputError, match="same mailbox"), queue:
            pass
    with Session(str(tmp_path / "one"), "a"):
        queue = shared_queue(unit_grid(4, 2), str(tmp_path / "two"), "a", load)
        with pytest.raises(InvalidInputError, match="same mailbox"), queue:
            pass
    assert other.list("") == []


def test_one_mailbox_may_be_written_in_several_ways(tmp_path: Path) -> None:
    folder = tmp_path / "box"
    ways: list[Any] = [folder, str(folder), f"{folder}/", folder.as_uri(), open_mailbox(folder)]
    for number, other in enumerate(ways):
        with Session(str(folder), "a") as session:  # noqa: SIM117
            with shared_queue(unit_grid(4, 2), other, "a", load, run=f"r{number}") as queue:
                for _ in queue:
                    session.step(samples=1)
        assert session.rates.batches == 4


def test_a_session_is_used_inside_its_block_and_once(memory: Mailbox) -> None:
    session = Session(memory, "a")
    with pytest.raises(ClosedError, match="with"):
        session.step(samples=1)
    with session, pytest.raises(ClosedError, match="entered before"):
        session.__enter__()
    with pytest.raises(ClosedError, match="with"):
        session.step(samples=1)
    with pytest.raises(ClosedError, match="with"):
        next(iter(session.track([])))
    with pytest.raises(ClosedError, match="entered before"), session:
        pass
    assert memory.list("") == []


@pytest.mark.parametrize("log_every", [0, -1, float("nan"), float("inf"), "5"])
def test_log_every_out_of_range(memory: Mailbox, log_every: Any) -> None:
    with pytest.raises(InvalidInputError, match="log_every"):
        Session(memory, "a", log_every=log_every)


def test_leaving_the_session_closes_a_queue_that_was_not_left(memory: Mailbox) -> None:
    units = unit_grid(10, 10, taper=False)
    with Session(memory, "a") as session:
        queue = shared_queue(units, memory, "a", load).__enter__()
        next(queue)
        session.step(samples=1)
    assert given_back(memory) == {(ONE, 0): 1}
    assert [(r.unit, r.begin) for r in queue.returned] == [(ONE, 1)]
    with pytest.raises(ClosedError):
        next(queue)
    queue.__exit__(None, None, None)
    assert last_page(memory, "a").left == "early"


# -- track() -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 4, 20])
@pytest.mark.parametrize("early", [False, True])
def test_track_counts_what_reached_the_loop_not_what_the_wrapper_holds(
    memory: Mailbox, depth: int, early: bool
) -> None:
    """Also where the wrapper has begun to fetch before the loop began (`early`)."""
    units = unit_grid(30, 6, taper=False)
    trained: list[Value] = []
    with Session(memory, "a") as session:
        with shared_queue(units, memory, "a", load, run="x") as queue:
            ahead = Ahead(queue, depth, begun=early)
            if early:
                ahead.wait_for(depth)
            for _, batch in session.track(ahead):
                trained.append(batch)
                session.step(samples=1)
                if len(trained) == 4:
                    ahead.wait_for(4 + depth)  # the wrapper holds `depth` more
                    break
        ahead.finish()
        assert session.rates.batches == 4
    rest = train(units, memory, "b", run="x")
    assert Counter(trained) + Counter(rest) == dataset(units)
    assert set(credited(memory, "x").values()) == {1}
    assert sum(credited(memory, "x").values()) == 30


@pytest.mark.parametrize("stepped", [False, True])
def test_a_wrapper_that_runs_on_after_the_loop_adds_nothing(memory: Mailbox, stepped: bool) -> None:
    """The last `step()` does not count what the wrapper took after the loop's last batch; without one, nothing."""
    units = unit_grid(30, 30, taper=False)
    with warnings.catch_warnings(), Session(memory, "a") as session:
        warnings.simplefilter("ignore", ShardQueueWarning)
        with shared_queue(units, memory, "a", load) as queue:
            ahead = Ahead(queue, 2)
            for step, _ in session.track(ahead):
                if step == 3:
                    break
            ahead.wait_for(6)
            if stepped:
                session.step(samples=4)
        ahead.finish()
    trained = 4 if stepped else 0
    assert credited(memory) == Counter({(ONE, index): 1 for index in range(trained)})
    assert given_back(memory) == {(ONE, 0): trained}


def test_a_wrapper_that_runs_ahead_does_not_claim_the_whole_plan(memory: Mailbox) -> None:
    """Its first batches are taken at once, which says nothing about how fast the loop trains."""
    units = unit_grid(400, 1, taper=False)
    with Session(memory, "a") as session:
        with shared_queue(units, memory, "a", load, prefetch=4) as queue:
            ahead = Ahead(queue, 16)
            for _ in session.track(ahead):
                ahead.wait_for(17)
                session.step(samples=1)
                break
            assert len(memory.list("units/")) <= 100
        ahead.finish()


def test_track_to_the_end_is_an_end(memory: Mailbox) -> None:
    units = unit_grid(30, 6, taper=False)
    with Session(memory, "a") as session, shared_queue(units, memory, "a", load) as queue:
        ahead = Ahead(queue, 3)
        seen = []
        for _, batch in session.track(ahead):
            seen.append(batch)
            session.step(samples=1)
        ahead.finish()
    assert Counter(seen) == dataset(units)
    assert last_page(memory, "a").left == "end"
    assert queue.returned == ()
    assert sum(credited(memory).values()) == 30


@pytest.mark.parametrize("batches", [12, 300])
def test_track_with_step_never_called(memory: Mailbox, batches: int) -> None:
    units = unit_grid(batches, 6, taper=False)
    with pytest.warns(ShardQueueWarning, match=r"never called") as caught, Session(memory, "a") as session:  # noqa: SIM117
        with shared_queue(units, memory, "a", load) as queue:
            ahead = Ahead(queue, 3)
            seen = [batch for _, batch in session.track(ahead)]
            ahead.finish()
    assert len(caught) == 1
    assert Counter(seen) == dataset(units)
    assert sum(credited(memory).values()) == batches


def test_track_finds_steps_inside_items(memory: Mailbox) -> None:
    units = unit_grid(12, 12, taper=False)

    def grouped(queue: Iterable[tuple[Step, Value]]) -> Iterator[dict[str, Any]]:
        items = iter(queue)
        for pair in items:
            yield {"meta": [pair[0], next(items)[0]], "data": pair[1]}

    with Session(memory, "a") as session, shared_queue(units, memory, "a", load) as queue:
        for item in session.track(grouped(queue)):
            session.step(samples=2)
            assert isinstance(item["meta"][0], Step)
            if item["meta"][1] == 5:
                break
    assert given_back(memory) == {(ONE, 0): 6}
    assert credited(memory) == Counter({(ONE, index): 1 for index in range(6)})


@pytest.mark.parametrize("item", [3, "x", (1, 2), [], {}, None, {"a": [1, (2,)]}, np.zeros(3)])
def test_track_refuses_items_without_a_step(memory: Mailbox, item: Any) -> None:
    with Session(memory, "a") as session, pytest.raises(LoadError, match=r"step"):
        next(iter(session.track([item])))


def test_a_tracked_loop_held_open_does_not_blind_the_next_queue(memory: Mailbox) -> None:
    units = unit_grid(10, 10, taper=False)
    with Session(memory, "a") as session:
        with shared_queue(units, memory, "a", load) as queue:
            tracked = session.track(queue)
            next(tracked)
            session.step(samples=1)
        with shared_queue(units, memory, "a", load) as queue:
            for _ in queue:
                session.step(samples=1)
        assert session.rates.batches == 10
        del tracked
    assert credited(memory) == Counter({(ONE, index): 1 for index in range(10)})


def test_an_error_of_the_loader_passes_through_track(memory: Mailbox) -> None:
    def failing(unit: Unit) -> Iterator[tuple[int, Value]]:
        yield from load(unit)
        raise OSError("disk")

    units = unit_grid(3, 3, taper=False)
    seen = []
    with pytest.raises(OSError, match="disk"), Session(memory, "a") as session:  # noqa: SIM117
        with shared_queue(units, memory, "a", failing) as queue:
            for _, batch in session.track(queue):
                seen.append(batch)
                session.step(samples=1)
    assert len(seen) == 3
    assert sum(credited(memory).values()) == 3
    assert last_page(memory, "a").left == "error"


# -- rates -------------------------------------------------------------------------------------------------


def test_rates_of_a_session_that_did_nothing(memory: Mailbox) -> None:
    with Session(memory, "a") as session:
        rates = session.rates
    assert (rates.batches, rates.samples, rates.elapsed, rates.waited) == (0, 0, 0.0, 0.0)
    assert (rates.samples_per_second, rates.recent_samples_per_second, rates.wait_fraction) == (0.0, 0.0, 0.0)


def test_rates_in_total_and_over_a_rolling_window(memory: Mailbox) -> None:
    clock = Clock()
    with Session(memory, "a", clock=clock) as session:  # noqa: SIM117
        with shared_queue(unit_grid(10, 10, taper=False), memory, "a", load) as queue:
            next(queue)
            clock.forward(1000)
            session.step(samples=1000)
            assert session.rates.elapsed >= 1000
            assert session.rates.samples_per_second == pytest.approx(1, rel=0.1)
            next(queue)
            clock.forward(1000)
            # What was done a thousand seconds ago is in the total, not in the window.
            assert session.rates.recent_samples_per_second == 0
            session.step(samples=600)
            rates = session.rates
            assert rates.recent_samples_per_second == pytest.approx(10, rel=0.1)
            assert rates.recent_batches_per_second == pytest.approx(1 / 60, rel=0.1)
            assert rates.samples_per_second == pytest.approx(0.8, rel=0.1)
    assert last_page(memory, "a").totals.samples == 1600


def test_only_waiting_for_data_counts_as_waited(memory: Mailbox) -> None:
    clock, go, asked = Clock(), threading.Event(), threading.Event()

    def waiting(unit: Unit) -> Iterator[tuple[int, Value]]:
        for pair in load(unit):
            if pair[0] == 1:
                asked.set()
                assert go.wait(PATIENCE)
            yield pair

    with Session(memory, "a", clock=clock) as session:  # noqa: SIM117
        with shared_queue(unit_grid(3, 3, taper=False), memory, "a", waiting) as queue:
            next(queue)
            clock.forward(10_000)  # training
            session.step(samples=1)
            assert asked.wait(PATIENCE)
            assert session.rates.waited < 5_000
            second = Task(lambda: next(queue))
            came_back = session.rates.elapsed
            assert came_back >= 10_000
            # The consumer is inside `next` when the clock goes forward, or soon will be: wait until it counts.
            while not second.is_alive():
                pass
            threading.Event().wait(0.1)
            clock.forward(20_000)
            go.set()
            second.result()
            session.step(samples=1)
            assert session.rates.waited >= 20_000
            assert session.rates.wait_fraction == pytest.approx(2 / 3, rel=0.1)
    page = last_page(memory, "a")
    assert page.totals.waited >= 20_000
    assert sum(span.waited for span in page.trained) == pytest.approx(page.totals.waited)


# -- the log -----------------------------------------------------------------------------------------------


def test_a_log_that_cannot_be_written_does_not_slow_the_loop(memory: Mailbox) -> None:
    gate = Gate(memory, lambda verb, key: verb == "put")
    units = unit_grid(50, 5, taper=False)
    seen = []
    with Session(gate, "a", log_every=0.001) as session, shared_queue(units, gate, "a", load) as queue:
        for _, batch in queue:
            seen.append(batch)
            session.step(samples=1)
            assert session.rates.batches == len(seen)
            if len(seen) == 1:
                assert gate.reached.wait(PATIENCE)  # the log's first write hangs from here on
        gate.open()
    assert Counter(seen) == dataset(units)
    assert sum(credited(memory).values()) == 50
    assert last_page(memory, "a").left == "end"


def test_what_is_trained_while_a_write_is_under_way_is_in_the_log(memory: Mailbox) -> None:
    """Also when the page, which was not full when it was written, is full when the write ends."""
    gate = Gate(memory, lambda verb, key: verb == "put")
    units = unit_grid(2200, 1, taper=False)
    with Session(gate, "a", log_every=0.001) as session, shared_queue(units, gate, "a", load) as queue:
        for index, _ in enumerate(queue):
            session.step(samples=1)
            if index == 0:
                assert gate.reached.wait(PATIENCE)
            if index == 2150:
                gate.open()
    assert sum(credited(memory).values()) == 2200
    assert sum(span.samples for page in pages(memory) for span in page.trained) >= 2200


def test_a_long_log_has_several_pages(memory: Mailbox) -> None:
    seen = Seen(memory)
    units = unit_grid(4500, 1, taper=False)
    with Session(seen, "a", log_every=0.1) as session, shared_queue(units, seen, "a", load) as queue:
        for index, _ in enumerate(queue):
            session.step(samples=1)
            if index in (2100, 4300):
                count = len(seen.written)
                seen.wait(lambda count=count: len(seen.written) >= count + 2)  # type: ignore[misc]
    found = pages(memory)
    assert len(found) >= 2
    assert credited(memory) == Counter(dict.fromkeys(((name, 0) for name in units), 1))
    assert found[-1].left == "end"
    assert all(page.left is None for page in found[:-1])
    assert found[-1].totals.batches == 4500


def test_log_pages_are_json_and_count_their_writes(memory: Mailbox) -> None:
    seen = Seen(memory)
    units = unit_grid(6, 3, taper=False)
    with Session(seen, "a", log_every=0.001) as session, shared_queue(units, seen, "a", load) as queue:
        for _ in queue:
            session.step(samples=2)
            count = len(seen.written)
            seen.wait(lambda count=count: len(seen.written) > count)  # type: ignore[misc]
    texts = [json.loads(data) for _, data in seen.written]
    writes = [text["write"] for text in texts]
    assert writes == sorted(set(writes))
    assert {text["learner"] for text in texts} == {"a"}
    assert {text["kind"] for text in texts} == {"shardqueue.log"}
    assert [text["left"] for text in texts[:-1]] == [None] * (len(texts) - 1)
    last = texts[-1]
    assert last["left"] == "end"
    assert last["totals"]["batches"] == 6
    assert last["totals"]["samples"] == 12
    assert last["totals"]["claimed"] == 2
    assert last["held"] == []
    assert {"host", "boot", "pid", "started"} <= last["where"].keys()


def test_a_page_says_what_is_held(memory: Mailbox) -> None:
    seen = Seen(memory)
    with Session(seen, "a", log_every=0.001) as session:  # noqa: SIM117
        with shared_queue(unit_grid(6, 3, taper=False), seen, "a", load) as queue:
            next(queue)
            count = len(seen.written)
            seen.wait(lambda: len(seen.written) > count + 2)
            held = {claim.unit for claim in last_page(memory, "a").held}
            assert next(iter(memory.list("units/"))).removeprefix("units/") in held
            session.step(samples=1)
    assert last_page(memory, "a").held == []


def test_units_without_a_batch_are_not_held_for_ever(memory: Mailbox) -> None:
    """Also when the loader is done before the claim is read back."""
    gate = Gate(memory, lambda verb, key: verb == "get" and key.startswith("units/"))
    loader_done = threading.Event()

    def nothing(unit: Unit) -> list[tuple[int, Value]]:
        if unit.first == 0:
            loader_done.set()
        return []

    with shared_queue(unit_grid(1, 1), gate, "a", nothing) as queue:
        end = Task(lambda: next(queue, None))
        assert loader_done.wait(PATIENCE)
        assert gate.reached.wait(PATIENCE)
        threading.Event().wait(0.05)
        gate.open()
        assert end.result() is None
    assert queue.returned == ()
    page = last_page(memory, "a")
    assert (page.left, page.held) == ("end", [])


@pytest.mark.parametrize("how", ["end", "early", "error"])
def test_the_last_page_says_how_the_learner_left(memory: Mailbox, how: str) -> None:
    units = unit_grid(5, 1, taper=False)
    try:
        with Session(memory, "a") as session, shared_queue(units, memory, "a", load) as queue:
            for _ in queue:
                session.step(samples=1)
                if how == "early":
                    break
                if how == "error":
                    raise KeyError("body")
    except KeyError:
        assert how == "error"
    assert last_page(memory, "a").left == how


def test_a_store_that_comes_back_gets_the_whole_log(memory: Mailbox) -> None:
    class LogOutage(Outage):
        def _around(self, verb: str, name: str, forward: Callable[[], Any]) -> Any:
            return super()._around(verb, name, forward) if verb == "put" else forward()

    outage = LogOutage(memory)
    units = unit_grid(20, 2, taper=False)
    with Session(outage, "a", log_every=0.001) as session, shared_queue(units, outage, "a", load) as queue:
        for index, _ in enumerate(queue):
            session.step(samples=1)
            if index == 3:
                outage.down()
            if index == 15:
                outage.up()
    assert sum(credited(memory).values()) == 20
    assert last_page(memory, "a").left == "end"


def test_a_mailbox_of_ones_own_may_raise_what_it_likes_for_the_log(memory: Mailbox) -> None:
    class Broken(Wrapper):
        def _around(self, verb: str, name: str, forward: Callable[[], Any]) -> Any:
            if verb == "put":
                raise RuntimeError("no logs here")
            return forward()

    units = unit_grid(8, 2, taper=False)
    assert Counter(train(units, Broken(memory), "a")) == dataset(units)


def test_sessions_in_threads_keep_apart(memory: Mailbox) -> None:
    units = unit_grid(60, 3, taper=False)

    def learn(name: str) -> int:
        with Session(memory, name) as session, shared_queue(units, memory, name, load) as queue:
            for _ in queue:
                until(lambda: len({key.split("/")[1] for key in memory.list("learners/")}) == 3)
                session.step(samples=1)
            return session.rates.batches

    counts = together(lambda name=name: learn(name) for name in "abc")  # type: ignore[misc]
    assert sum(counts) == 60
    assert {page.learner: page.totals.batches for page in pages(memory)} == dict(
        zip("abc", counts, strict=True)
    )


def test_step_may_be_called_from_another_thread(memory: Mailbox) -> None:
    with Session(memory, "a") as session:
        with shared_queue(unit_grid(5, 5, taper=False), memory, "a", CountingLoader()) as queue:
            for _ in queue:
                Task(lambda: session.step(samples=1)).result()
        assert session.rates.batches == 5
