"""What `shared_queue` does when all goes well: every batch once, in order, no further ahead than allowed."""

from __future__ import annotations

import pickle
import random
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from learners import (
    PATIENCE,
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
    share,
    train,
)

from shardqueue import Mailbox, Step, Unit, open_mailbox, shared_queue, unit_files, unit_grid, unit_ranges
from shardqueue.errors import ClosedError, PassFinishedError
from shardqueue.mailbox.faults import Counted, Delayed
from shardqueue.mailbox.memory import MemoryMailbox

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(params=["memory", "folder"])
def mailbox(request: pytest.FixtureRequest, tmp_path: Path) -> Mailbox:
    return MemoryMailbox() if request.param == "memory" else open_mailbox(tmp_path / "box")


@pytest.fixture
def memory() -> Mailbox:
    return MemoryMailbox()


# -- every batch once --------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [1, 2, 8, 1000])
def test_one_learner_gets_every_batch_once(mailbox: Mailbox, prefetch: int) -> None:
    units = unit_grid(20, 3, lanes=2, taper=4)
    assert Counter(train(units, mailbox, "a", prefetch=prefetch)) == dataset(units)
    assert set(credited(mailbox).values()) == {1}
    assert last_page(mailbox, "a").left == "end"
    assert given_back(mailbox) == {}


@pytest.mark.parametrize("learners", [2, 5])
def test_learners_share_the_plan_exactly_once(mailbox: Mailbox, learners: int) -> None:
    units = unit_grid(60, 4, lanes=2, taper=False)
    shares = share(units, mailbox, "abcde"[:learners])
    assert sum(map(Counter, shares), Counter()) == dataset(units)
    assert sum(credited(mailbox).values()) == 120
    assert [page.left for page in pages(mailbox)] == ["end"] * learners
    assert all(page.held == [] for page in pages(mailbox))


def test_hundreds_of_small_units(memory: Mailbox) -> None:
    units = unit_grid(700, 1, taper=False)
    shares = share(units, memory, "abc", prefetch=2)
    assert sum(map(Counter, shares), Counter()) == dataset(units)


def test_slow_calls_change_nothing(memory: Mailbox) -> None:
    units = unit_grid(30, 2, taper=False)
    slow = Delayed(
        memory, random.Random(1).random, sleep=lambda seconds: threading.Event().wait(seconds / 50)
    )
    shares = share(units, slow, "ab")
    assert sum(map(Counter, shares), Counter()) == dataset(units)


def test_a_url_and_a_path_are_mailboxes_too(tmp_path: Path) -> None:
    units = unit_grid(6, 2)
    first = train(units, str(tmp_path / "box"), "a", run="x")
    assert Counter(first) == dataset(units)
    assert train(units, tmp_path / "box", "b", run="x") == []
    assert train(units, (tmp_path / "box").as_uri(), "c", run="x") == []


def test_without_a_learner_id_there_is_one(memory: Mailbox) -> None:
    units = unit_grid(4, 2)
    with shared_queue(units, memory, None, load) as queue:
        assert len(list(queue)) == 4
    assert len(pages(memory)) == 1


# -- plans -------------------------------------------------------------------------------------------------


def test_each_node_may_prefer_another_order(memory: Mailbox) -> None:
    names = [f"u{number:03}" for number in range(60)]
    plan = {name: Unit(3 * place, 3, 0, 1) for place, name in enumerate(names)}
    orders = [
        names,
        names[::-1],
        names[20:40] + names[:20] + names[40:],  # its own slice first
        random.Random(2).sample(names, len(names)),
    ]
    shares = share(({name: plan[name] for name in order} for order in orders), memory, "abcd", prefetch=1)
    assert sum(map(Counter, shares), Counter()) == dataset(plan)
    assert sum(credited(memory).values()) == 180


@pytest.mark.parametrize("length", [1, 2, 3, 17, 40])
def test_a_reversed_dict_alone_is_used_up(memory: Mailbox, length: int) -> None:
    plan = {f"u{number:03}": Unit(number, 1, 0, 1) for number in reversed(range(length))}
    assert Counter(train(plan, memory, "a", prefetch=2)) == dataset(plan)


def test_a_learner_alone_begins_near_the_front_of_its_own_order(memory: Mailbox) -> None:
    plan = {f"u{number:03}": Unit(number, 1, 0, 1) for number in reversed(range(100))}
    firsts = train(plan, memory, "a", most=3, prefetch=1)
    assert all(step >= 50 for step, _ in firsts)


def test_values_of_any_kind(memory: Mailbox) -> None:
    plan: dict[str, object] = {
        "numbers": {"rows": [1, 2, 3]},
        "text": "four five",
        "folder/inside": 6,
        "a name with ünïcode": ("seven", object()),
        "nothing": None,
    }

    def load_any(value: object) -> list[tuple[int, str]]:
        match value:
            case {"rows": list(rows)}:
                return [(index, f"row {row}") for index, row in enumerate(rows)]
            case str(text):
                return list(enumerate(text.split()))
            case int(number):
                return [(index, f"{index} of {number}") for index in range(number)]
            case None:
                return [(0, "none")]
        return [(0, "tuple")]

    shares = share(plan, memory, "a", loader=load_any, prefetch=1)
    wanted = ["row 1", "row 2", "row 3", "four", "five", *(f"{index} of 6" for index in range(6))]
    assert Counter(shares[0]) == Counter([*wanted, "none", "tuple"])


def test_units_whose_size_the_plan_does_not_know(memory: Mailbox) -> None:
    sizes = {f"part-{number}": 1 + number * 7 % 23 for number in range(30)}

    def load_sized(size: int) -> Iterator[tuple[int, tuple[int, int]]]:
        yield from ((index, (size, index)) for index in range(size))

    shares = share(sizes, memory, "abc", loader=load_sized, prefetch=2)
    assert sum(map(Counter, shares), Counter()) == Counter(
        (size, index) for size in sizes.values() for index in range(size)
    )


def test_files_and_row_ranges(memory: Mailbox, tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.txt" for number in range(5)]
    for path in paths:
        path.write_text(f"{path.name} one\n{path.name} two\n")

    def lines(path: str) -> Iterator[tuple[int, str]]:
        with Path(path).open() as file:
            yield from enumerate(file)

    assert len(set(train(unit_files(map(str, paths)), memory, "a", loader=lines))) == 10

    def rows(unit: Unit) -> Iterator[tuple[int, list[int]]]:
        for row in range(unit.first, unit.first + unit.count, 4):
            yield row // 4, list(range(row, min(row + 4, unit.first + unit.count)))

    ranges = unit_ranges(rows=101, rows_per_unit=12, batch_rows=4)
    seen = train(ranges, MemoryMailbox(), "a", loader=rows)
    assert sorted(row for batch in seen for row in batch) == list(range(101))


# -- what load may give ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [iter, list, tuple, lambda pairs: dict(pairs).items()])
def test_load_may_give_any_iterable(memory: Mailbox, kind: Callable[[Iterator[Any]], Any]) -> None:
    units = unit_grid(9, 2)
    assert Counter(train(units, memory, "a", loader=lambda unit: kind(load(unit)))) == dataset(units)


@pytest.mark.parametrize("integer", [np.int64, np.int32, np.uint8, int])
def test_the_step_may_be_any_integer(memory: Mailbox, integer: Callable[[int], Any]) -> None:
    units = unit_grid(9, 2, taper=False)
    with shared_queue(
        units, memory, "a", lambda unit: ((integer(step), step) for step in unit.steps)
    ) as queue:
        got = list(queue)
    assert all(type(step) is Step and step == batch for step, batch in got)
    assert len(got) == 9


def test_an_iterator_is_closed_when_the_queue_is_left(memory: Mailbox) -> None:
    closed = threading.Event()

    def holding(unit: Unit) -> Iterator[tuple[int, Value]]:
        try:
            yield from load(unit)
        finally:
            closed.set()

    with shared_queue(unit_grid(50, 50, taper=False), memory, "a", holding, prefetch=2) as queue:
        next(queue)
        assert not closed.is_set()
    assert closed.is_set()


def test_a_file_stays_open_only_while_its_unit_is_read(memory: Mailbox, tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("a\nb\nc\n")
    opened = []

    def lines(path: str) -> Any:
        opened.append(Path(path).open())  # noqa: SIM115 - the iterator closes it
        return enumerate(opened[-1])

    class Closing:
        def __init__(self, path: str) -> None:
            self._inner = lines(path)

        def __iter__(self) -> Closing:
            return self

        def __next__(self) -> tuple[int, str]:
            pair: tuple[int, str] = next(self._inner)
            return pair

        def close(self) -> None:
            opened[-1].close()

    assert train({"u": str(tmp_path / "lines")}, memory, "a", loader=Closing) == ["a\n", "b\n", "c\n"]
    assert opened[0].closed


# -- the step ----------------------------------------------------------------------------------------------


def test_a_step_is_an_int_that_knows_its_place(memory: Mailbox) -> None:
    units = unit_grid(7, 3, lanes=2, taper=False)
    with shared_queue(units, memory, "a", load) as queue:
        for step, (wanted, lane) in queue:
            assert step == wanted
            assert f"{step:03d}" == f"{wanted:03d}"
            assert type(step + 1) is int
            assert units[step.unit].lane == lane
            assert units[step.unit].first + step.index == step
            assert (step.attempt, step.pass_) == (0, "")
            copy = pickle.loads(pickle.dumps(step))
            assert (copy, copy.unit, copy.index) == (step, step.unit, step.index)


def test_batches_of_a_unit_come_in_the_order_of_load(memory: Mailbox) -> None:
    units = unit_grid(40, 5, lanes=3, taper=False)
    seen: dict[str, list[int]] = {}
    with shared_queue(units, memory, "a", load, prefetch=3) as queue:
        for step, _ in queue:
            seen.setdefault(step.unit, []).append(step.index)
    assert all(indexes == list(range(len(indexes))) for indexes in seen.values())


def test_the_users_random_state_is_left_alone(memory: Mailbox) -> None:
    random.seed(5)
    np.random.seed(5)
    before = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    train(unit_grid(20, 2), memory, "a")
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # type: ignore[index]


# -- how far ahead -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [1, 2, 5])
@pytest.mark.parametrize("unit_steps", [1, 40])
def test_at_most_prefetch_loaded_batches_wait(memory: Mailbox, prefetch: int, unit_steps: int) -> None:
    units, loader = unit_grid(40, unit_steps, taper=False), CountingLoader()
    with shared_queue(units, memory, "a", loader, prefetch=prefetch) as queue:
        taken = 0
        for _ in queue:
            taken += 1
            assert loader.given <= taken + prefetch
    assert taken == 40


def test_a_consumer_that_stops_stops_loading_and_claiming(memory: Mailbox) -> None:
    counted, loader = Counted(memory), CountingLoader()
    units = unit_grid(400, 1, taper=False)
    with shared_queue(units, counted, "a", loader, prefetch=3) as queue:
        for _ in range(10):
            next(queue)
        loader.wait_for(13)  # the buffer is full now, and the thread waits
        claimed, bound = len(memory.list("units/")), 10 + 3 + 64
        assert claimed <= bound
        # A stalled consumer: give claiming every chance to run away.
        for _ in range(50):
            threading.Event().wait(0.002)
        assert loader.given == 13
        assert len(memory.list("units/")) <= bound
    assert counted.counts["put_if_absent"] <= 2 * bound


def test_nothing_is_handed_out_before_the_read_back(memory: Mailbox) -> None:
    gate = Gate(memory, lambda verb, key: verb == "get" and key.startswith("units/"))
    loader = CountingLoader()
    with shared_queue(unit_grid(4, 2), gate, "a", loader) as queue:
        first = Task(lambda: next(queue))
        loader.wait_for(1)  # loading has gone ahead, and the read-back waits
        assert gate.reached.wait(PATIENCE)
        assert first.is_alive()
        gate.open()
        first.result()


@pytest.mark.parametrize("verb", ["put_if_absent", "list"])
def test_nothing_is_claimed_before_the_run_is_agreed_on(memory: Mailbox, verb: str) -> None:
    gate = Gate(memory, lambda called, key: called == verb and key.startswith("runs/"))
    loader = CountingLoader()
    with shared_queue(unit_grid(4, 2), gate, "a", loader) as queue:
        first = Task(lambda: next(queue))
        assert gate.reached.wait(PATIENCE)
        assert first.is_alive()
        assert memory.list("units/") == []
        assert loader.given == 0
        gate.open()
        first.result()


def test_the_loop_ends_while_another_node_is_still_busy(memory: Mailbox) -> None:
    units = unit_grid(6, 3, taper=False)
    with shared_queue(units, memory, "slow", load, prefetch=1) as slow:
        first = next(slow)[1]
        others = Task(lambda: train(units, memory, "fast")).result()
        assert len(others) in (0, 3)
        assert last_page(memory, "fast").left == "end"
        rest = [batch for _, batch in slow]
    assert Counter([first, *rest, *others]) == dataset(units)


# -- what counts as trained --------------------------------------------------------------------------------


def test_coming_back_makes_the_last_batch_trained_and_nothing_else(memory: Mailbox) -> None:
    units = unit_grid(10, 10, taper=False)
    error = KeyError("in the third batch")
    queue = shared_queue(units, memory, "a", load)
    with pytest.raises(KeyError), queue:
        for _ in range(3):
            next(queue)
        raise error
    # Two are trained; of the third nobody knows, so it is not offered again.
    assert credited(memory) == Counter({("000000-0.json", 0): 1, ("000000-0.json", 1): 1})
    assert given_back(memory) == {("000000-0.json", 0): 3}
    (returned,) = queue.returned
    assert (returned.unit, returned.attempt, returned.begin) == ("000000-0.json", 0, 3)
    assert (returned.unclear, returned.offered) == (1, True)


def test_leaving_in_order_makes_the_last_batch_trained(memory: Mailbox) -> None:
    units = unit_grid(10, 10, taper=False)
    with shared_queue(units, memory, "a", load) as queue:
        for step, _ in queue:
            if step == 2:
                break
    assert sum(credited(memory).values()) == 3
    assert given_back(memory) == {("000000-0.json", 0): 3}
    assert [(r.begin, r.unclear) for r in queue.returned] == [(3, 0)]


@pytest.mark.parametrize("most", [0, 1, 3, 7])
def test_another_learner_trains_exactly_the_rest(mailbox: Mailbox, most: int) -> None:
    units = unit_grid(24, 4, lanes=2, taper=False)
    here, go_on = threading.Event(), threading.Event()

    def staying() -> list[Any]:
        """It lives on, so that the run does too."""
        trained = []
        with shared_queue(units, mailbox, "b", load, prefetch=1) as queue:
            for _, batch in queue:
                here.set()
                assert go_on.wait(PATIENCE)
                trained.append(batch)
        return trained

    other = Task(staying)
    assert here.wait(PATIENCE)
    first = train(units, mailbox, "a", most=most)
    go_on.set()
    assert Counter(first) + Counter(other.result()) == dataset(units)
    assert sum(credited(mailbox).values()) == 48


def test_attempts_pass_from_hand_to_hand(memory: Mailbox) -> None:
    units = unit_grid(12, 12, taper=False)
    trained = []
    for number in range(6):
        # A named run is joined although nobody is alive in it.
        trained += train(units, memory, f"n{number}", most=2, run="x")
    assert Counter(trained) == dataset(units)
    assert given_back(memory, "x") == {("000000-0.json", n): 2 * n + 2 for n in range(5)}


def test_attempts_and_places_show_in_the_step(memory: Mailbox) -> None:
    units = unit_grid(6, 6, taper=False)
    train(units, memory, "a", most=4, run="x")
    with shared_queue(units, memory, "b", load, run="x") as queue:
        got = [(int(step), step.attempt, step.index) for step, _ in queue]
    assert got == [(4, 1, 4), (5, 1, 5)]


# -- its life ----------------------------------------------------------------------------------------------


def test_a_finished_queue_says_so_when_iterated_again(memory: Mailbox) -> None:
    with shared_queue(unit_grid(5, 2), memory, "a", load) as queue:
        assert len(list(queue)) == 5
        assert next(queue, None) is None
        with pytest.raises(PassFinishedError, match=r"'a'.*run="):
            list(queue)
    with pytest.raises(ClosedError, match="left"):
        next(queue)
    assert queue.returned == ()
    assert last_page(memory, "a").left == "end"


def test_a_queue_is_entered_once(memory: Mailbox) -> None:
    queue = shared_queue(unit_grid(5, 2), memory, "a", load)
    with queue, pytest.raises(ClosedError, match="entered before"):
        queue.__enter__()
    with pytest.raises(ClosedError, match="entered before"), queue:
        pass


def test_outside_its_block_a_queue_gives_nothing(memory: Mailbox) -> None:
    queue = shared_queue(unit_grid(5, 2), memory, "a", load)
    with pytest.raises(ClosedError, match="with shared_queue"):
        next(queue)
    assert queue.returned == ()
    assert memory.list("") == []
    with queue:
        next(queue)
    with pytest.raises(ClosedError, match="left"):
        next(queue)


def test_entering_and_leaving_at_once_leaves_nothing_claimed_for_ever(memory: Mailbox) -> None:
    units = unit_grid(9, 3, taper=False)
    for number in range(20):
        with shared_queue(units, memory, f"n{number}", load, run="x"):
            pass
    assert Counter(train(units, memory, "last", run="x")) == dataset(units)


def test_a_wrapper_in_between_sees_plain_verbs(memory: Mailbox) -> None:
    """Any object with the five verbs will do: it needs no `listing` and no base class."""

    class Five:
        put_if_absent, get, list = memory.put_if_absent, memory.get, memory.list
        put, delete = memory.put, memory.delete

    units = unit_grid(9, 3)
    assert Counter(train(units, Five(), "a")) == dataset(units)
