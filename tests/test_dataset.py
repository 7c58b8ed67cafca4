"""One training process and its loader: steps, passes, faults, wrong use. Workers are real, forked or spawned."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import threading
import traceback
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest
import torch
from learners import Clock, given_back, last_page, pages, until
from learners import dataset as whole
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info

from shardqueue import Session, SharedQueueDataset, Step, Unit, open_mailbox, unit_grid
from shardqueue.block import Doing
from shardqueue.errors import (
    ClosedError,
    InvalidInputError,
    LoadError,
    MailboxRefusedError,
    PassFinishedError,
    PlanMismatchError,
    RunFinishedError,
    ShardQueueWarning,
)
from shardqueue.records import ClaimRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

Value = tuple[int, int]
WORKERS = [0, 2]
FAILING_WORKERS = [0, 1]
"""Where a worker raises, one is enough."""


def load(unit: Unit) -> Iterator[tuple[int, torch.Tensor]]:
    for step in unit.steps:
        yield step, torch.tensor([step, unit.lane])


def value(batch: torch.Tensor) -> Value:
    return int(batch[0]), int(batch[1])


class Killable(DataLoader[Any]):
    """A loader one of whose workers can be killed at any moment but one.

    Killed while it asks whether the loader is at its end, it would take that event's lock along, and torch would
    wait for it for ever.
    """

    def _get_iterator(self) -> Any:
        iterator: Any = super()._get_iterator()
        self._at_its_end: Any = getattr(iterator, "_workers_done_event", None)
        return iterator

    def kill(self, worker: int) -> None:
        """Kill a worker, and let torch raise: anywhere else that would blur what was trained."""
        with self._at_its_end._cond:
            os.kill(worker, signal.SIGKILL)
            threading.Event().wait(10)


def loader_of(dataset: Any, workers: int = 0, context: str = "fork", **options: Any) -> Any:
    if workers:
        options = {"multiprocessing_context": context, **options}
    return Killable(dataset, batch_size=None, num_workers=workers, **options)


def drain(loader: Any, session: Session | None = None, most: int | None = None) -> list[Value]:
    """Train until the end, or break after `most` batches; what was trained."""
    trained: list[Value] = []
    for _, batch in session.track(loader) if session else loader:
        trained.append(value(batch))
        if session:
            session.step()
        if len(trained) == most:
            break
    return trained


@contextmanager
def raises(error: type[Exception], match: str) -> Iterator[None]:
    """As `pytest.raises`, and let go of the loader that the error holds.

    A loader that is collected with its queues, in one cycle, cannot tell its workers to end, and waits 5 s for each.
    """
    with pytest.raises(error, match=match) as caught:
        yield
    traceback.clear_frames(caught.tb)


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """A loader that an error's traceback holds keeps its workers."""
    yield
    gc.collect()


@pytest.fixture
def queue(tmp_path: Path) -> str:
    return str(tmp_path / "queue")


# -- what arrives ------------------------------------------------------------------------------------------


@dataclass
class Pair:
    inputs: torch.Tensor
    name: str


def load_nested(unit: Unit) -> Iterator[tuple[int, Any]]:
    for step in unit.steps:
        yield step, {"pair": Pair(torch.full((2,), step), f"s{step}"), "lane": torch.tensor(unit.lane)}


@pytest.mark.parametrize("context", [None, "fork", "spawn"])
def test_the_step_is_an_int_that_knows_its_unit(queue: str, context: str | None) -> None:
    units = unit_grid(6, 3, 2, taper=False)
    loader = loader_of(SharedQueueDataset(units, queue, load_nested), 2 if context else 0, context or "")
    with Session(queue) as session:
        items = [item for item in session.track(loader) if session.step() is None]  # type: ignore[func-returns-value]
    assert len(items) == 12
    for step, batch in items:
        assert isinstance(step, Step)
        unit = units[step.unit]
        assert (step.index, step.attempt, step.pass_) == (step - unit.first, 0, "")
        assert batch["pair"].inputs.tolist() == [step, step]
        assert (batch["pair"].name, int(batch["lane"])) == (f"s{step}", unit.lane)
    assert Counter((int(step), units[step.unit].lane) for step, _ in items) == whole(units)


def test_tracked_items_may_be_dataclasses(queue: str) -> None:
    @dataclass
    class Item:
        step: int
        batch: torch.Tensor

    dataset = SharedQueueDataset(unit_grid(4, 2), queue, load)
    with Session(queue) as session:
        for _ in session.track(Item(step, batch) for step, batch in loader_of(dataset)):
            session.step()
        assert session.rates.batches == 4


def test_the_wait_for_the_first_batch_is_part_of_the_time_since_it_was_asked_for(queue: str) -> None:
    clock = Clock()

    def slow(unit: Unit) -> Iterator[tuple[int, torch.Tensor]]:
        clock.forward(1000)
        yield from load(unit)

    with Session(queue, clock=clock) as session:
        dataset = SharedQueueDataset(unit_grid(3, 3, taper=False), queue, slow)
        assert len(drain(loader_of(dataset), session)) == 3
        assert session.rates.waited >= 1000
        assert session.rates.wait_fraction <= 1


def test_every_worker_claims(queue: str) -> None:
    dataset = SharedQueueDataset(unit_grid(200, 2), queue, load)
    with Session(queue) as session:
        assert len(drain(loader_of(dataset, 3), session)) == 200
    mailbox = open_mailbox(queue)
    records = [ClaimRecord.decode(mailbox.get(key) or b"", key) for key in mailbox.list("units/")]
    assert {record.worker for record in records} == {"0", "1", "2"}
    assert {(record.learner, record.instance) for record in records} == {
        (session.learner_id, session.instance)
    }
    assert {page.process for page in pages(mailbox)} == {"main"}


def test_a_wrapped_loader_is_tracked(queue: str) -> None:
    class Ahead:
        """Keeps one batch in hand, as a mover to the GPU does."""

        def __init__(self, loader: Any) -> None:
            self._loader = loader

        def __iter__(self) -> Iterator[Any]:
            items = iter(self._loader)
            held = next(items)
            for item in items:
                yield held
                held = item
            yield held

    dataset = SharedQueueDataset(unit_grid(12, 3), queue, load)
    with Session(queue) as session:
        trained = drain(Ahead(loader_of(dataset, 2)), session, most=5)
    mailbox = open_mailbox(queue)
    assert sum(span.end - span.begin for span in last_page(mailbox, session.learner_id).trained) == 5
    rest = drain(loader_of(SharedQueueDataset(unit_grid(12, 3), queue, load, "other", run="1")))
    assert Counter(trained + rest) == whole(unit_grid(12, 3))


# -- leaving, and what others get --------------------------------------------------------------------------


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("persistent", [False, True])
def test_a_break_gives_back_what_was_not_trained(queue: str, workers: int, persistent: bool) -> None:
    if persistent and not workers:
        pytest.skip("nothing persists without workers")
    units = unit_grid(40, 8)
    options: dict[str, Any] = {"persistent_workers": True} if persistent else {}
    loader = loader_of(SharedQueueDataset(units, queue, load, "a"), workers, **options)
    with Session(queue, "a") as session:
        trained = drain(loader, session, most=7)
    assert given_back(open_mailbox(queue))
    with Session(queue, "b") as session:
        rest = drain(loader_of(SharedQueueDataset(units, queue, load, "b", run="1"), workers), session)
    assert Counter(trained + rest) == whole(units)


@pytest.mark.parametrize("workers", WORKERS)
def test_without_a_session_a_break_offers_no_batch_twice(queue: str, workers: int) -> None:
    units = unit_grid(60, 5)
    loader = loader_of(SharedQueueDataset(units, queue, load, "a"), workers)
    trained = drain(loader, most=7)
    del loader
    gc.collect()
    until(lambda: bool(given_back(open_mailbox(queue))))
    rest = drain(loader_of(SharedQueueDataset(units, queue, load, "b", run="1"), workers))
    together = Counter(trained + rest)
    assert set(together.values()) == {1}
    assert len(together) >= 60 - 2 * 2 - 1, "no more is missing than was under way to the loop"


def test_an_unstepped_batch_is_given_back(queue: str) -> None:
    units = unit_grid(8, 4)
    loader = loader_of(SharedQueueDataset(units, queue, load, "a"), 2)
    trained = []
    with (
        pytest.warns(ShardQueueWarning, match=r"never followed by session.step\(\)"),
        Session(queue, "a") as session,
    ):
        for number, (_, batch) in enumerate(session.track(loader)):
            if number < 7:
                trained.append(value(batch))
                session.step()
    rest = drain(loader_of(SharedQueueDataset(units, queue, load, "b", run="1")))
    assert len(rest) == 1
    assert Counter(trained + rest) == whole(units)


@pytest.mark.parametrize("track", [True, False])
def test_a_killed_worker_takes_at_most_its_own_units(queue: str, track: bool) -> None:
    units = unit_grid(120, 3, taper=False)
    trained: list[Value] = []
    loader = loader_of(SharedQueueDataset(units, queue, load_with_pid, "a"), 2)
    session = Session(queue, "a")
    with pytest.raises(RuntimeError, match="killed by signal"):
        if track:
            with session:
                kill_one(loader, session.track(loader), session, trained)
        else:
            kill_one(loader, loader, None, trained)
    del loader
    gc.collect()
    rest = drain(loader_of(SharedQueueDataset(units, queue, load, "b", run="1"), 2))
    together = Counter(trained + rest)
    assert set(together.values()) == {1}, "at most once"
    if track:
        assert together == whole(units), "the session gave back for the dead"


def load_with_pid(unit: Unit) -> Iterator[tuple[int, tuple[int, int, int]]]:
    """No tensors: the memory of a killed worker's dies with it, and torch's error then depends on the moment."""
    for step in unit.steps:
        yield step, (step, unit.lane, os.getpid())


def kill_one(loader: Killable, items: Any, session: Session | None, trained: list[Value]) -> None:
    for _, batch in items:
        trained.append((batch[0], batch[1]))
        if session:
            session.step()
        if len(trained) == 10:
            loader.kill(int(batch[2]))


# -- epochs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", FAILING_WORKERS)
@pytest.mark.parametrize("track", [True, False])
def test_a_finished_epoch_is_not_iterated_again(queue: str, workers: int, track: bool) -> None:
    units = unit_grid(10, 2)
    dataset = SharedQueueDataset(units, queue, load, "a")
    loader = loader_of(dataset, workers)
    with Session(queue, "a") if track else nullcontext() as session:
        for epoch in (3, 5):
            dataset.set_epoch(epoch)
            assert Counter(drain(loader, session)) == whole(units)
        with raises(PassFinishedError, match="set_epoch"):
            drain(loader, session)


@pytest.mark.parametrize("workers", WORKERS)
def test_an_epoch_left_half_way_goes_on_when_it_is_set_again(queue: str, workers: int) -> None:
    units = unit_grid(30, 3)
    dataset = SharedQueueDataset(units, queue, load, "a")
    with Session(queue, "a") as session:
        trained: list[Value] = []
        for most in (4, 11, None):
            dataset.set_epoch(0)
            trained += drain(loader_of(dataset, workers), session, most)
        assert Counter(trained) == whole(units)


def test_an_epoch_whose_workers_had_ended_goes_on_when_it_is_set_again(queue: str) -> None:
    """The workers have claimed and loaded everything; the loop has taken one batch."""
    units = unit_grid(6, 1)
    dataset = SharedQueueDataset(units, queue, load, "a")
    with Session(queue, "a") as session:
        items = session.track(loader_of(dataset, 2, prefetch_factor=8))
        trained = [value(next(items)[1])]
        session.step()
        word = dataset._block.current
        until(lambda: {doing for *_, doing in dataset._block.workers(word)} <= {Doing.ENDED, Doing.YIELDED})
        items.close()  # type: ignore[attr-defined]
        dataset.set_epoch(0)
        trained += drain(loader_of(dataset, 2), session)
    assert Counter(trained) == whole(units)


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("track", [True, False])
def test_counted_epochs_go_on_after_a_break(queue: str, workers: int, track: bool) -> None:
    units = unit_grid(10, 2)
    dataset = SharedQueueDataset(units, queue, load, "a")
    with Session(queue, "a") if track else nullcontext() as session:
        drain(loader_of(dataset, workers), session, most=2)
        gc.collect()
        assert Counter(drain(loader_of(dataset, workers), session)) == whole(units)
    assert open_mailbox(queue).list("e1/units/")


@pytest.mark.parametrize("workers", FAILING_WORKERS)
def test_a_finished_run_is_an_error_for_the_next_process(queue: str, workers: int) -> None:
    drain(loader_of(SharedQueueDataset(unit_grid(6, 2), queue, load, "a"), workers))
    with raises(RunFinishedError, match="finished"):
        drain(loader_of(SharedQueueDataset(unit_grid(6, 2), queue, load, "b"), workers))


@pytest.mark.parametrize("workers", FAILING_WORKERS)
def test_a_later_iteration_closes_the_one_before(queue: str, workers: int) -> None:
    dataset = SharedQueueDataset(unit_grid(400, 4), queue, load, "a")
    first = iter(loader_of(dataset, workers))
    next(first)
    second = iter(loader_of(dataset, workers))
    next(second)
    with pytest.raises(ClosedError, match=r"dataset|iteration"):
        for _ in range(400):
            next(first)
    assert len(list(second)) > 300


# -- from_dataset ------------------------------------------------------------------------------------------


class Squares(Dataset[dict[str, Any]]):
    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"row": row, "square": torch.tensor(float(row * row)), "name": f"r{row}"}


def batches_by_rows(loader: Any) -> dict[tuple[int, ...], Any]:
    return {tuple(batch["row"].tolist()): batch for batch in loader}


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("drop_last", [False, True])
def test_batches_are_those_of_the_loader_before(queue: str, workers: int, drop_last: bool) -> None:
    rows = Squares(103)
    dataset = SharedQueueDataset.from_dataset(rows, queue, 8, 3, shuffle=True, seed=5, drop_last=drop_last)
    for epoch in range(2):
        dataset.set_epoch(epoch)
        ours = batches_by_rows(loader_of(dataset, workers))
        indices = [list(index) for index in ours]
        theirs = batches_by_rows(DataLoader(rows, batch_sampler=indices, num_workers=0))
        assert len(ours) == (12 if drop_last else 13)
        assert sorted(row for index in indices for row in index) != list(range(103)) or not drop_last
        assert len({row for index in indices for row in index}) == (96 if drop_last else 103)
        for key, batch in theirs.items():
            assert ours[key].keys() == batch.keys()
            assert ours[key]["square"].equal(batch["square"])
            assert ours[key]["name"] == batch["name"]
        assert sorted(ours) != sorted(tuple(range(at, min(at + 8, 103))) for at in range(0, 103, 8))


def test_two_nodes_must_shuffle_alike(queue: str) -> None:
    make = partial(SharedQueueDataset.from_dataset, Squares(64), queue, 4, shuffle=True)
    first = iter(make(seed=1, learner_id="a"))
    next(first)
    with pytest.raises(PlanMismatchError, match=r"seed=1.*seed=2"):
        next(iter(make(seed=2, learner_id="b")))
    with pytest.raises(PlanMismatchError, match="shuffle=True"):
        next(iter(SharedQueueDataset.from_dataset(Squares(64), queue, 4, learner_id="c")))
    first.close()  # type: ignore[attr-defined]


def test_track_wants_the_step(queue: str) -> None:
    rows = TensorDataset(torch.arange(10))
    dataset = SharedQueueDataset.from_dataset(rows, queue, 2)
    with pytest.raises(LoadError, match="with_step=True"), Session(queue) as session:
        next(iter(session.track(loader_of(dataset))))


# -- wrong use ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", FAILING_WORKERS)
def test_a_loader_that_batches_is_refused(queue: str, workers: int) -> None:
    dataset = SharedQueueDataset(unit_grid(4, 2), queue, load)
    for options in ({}, {"batch_size": 3}):
        loader: Any = DataLoader(dataset, num_workers=workers, **options)  # type: ignore[arg-type]
        with raises(InvalidInputError, match="batch_size=None"):
            next(iter(loader))
    assert open_mailbox(queue).list("") == [], "nothing was claimed"


def test_torch_refuses_samplers_itself(queue: str) -> None:
    dataset = SharedQueueDataset(unit_grid(4, 2), queue, load)
    with pytest.raises(ValueError, match="shuffle"):
        DataLoader(dataset, batch_size=None, shuffle=True)
    with pytest.raises(ValueError, match="sampler"):
        DataLoader(dataset, batch_size=None, sampler=[1, 2])


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield 1


@pytest.mark.parametrize("rows", [Endless(), (n for n in range(3)), 3, []], ids=str)
def test_a_dataset_must_have_a_length(queue: str, rows: Any) -> None:
    with pytest.raises(InvalidInputError, match="dataset"):
        SharedQueueDataset.from_dataset(rows, queue, 2)
    assert not os.path.exists(queue)  # noqa: PTH110


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("batch_size", 0),
        ("batch_size", 2.0),
        ("unit_batches", 0),
        ("shuffle", 1),
        ("seed", -1),
        ("seed", "a"),
        ("collate_fn", 3),
        ("drop_last", None),
        ("with_step", 2),
        ("learner_id", "a/b"),
        ("run", "a~b"),
    ],
)
def test_from_dataset_checks_its_arguments(queue: str, name: str, bad: Any) -> None:
    given = {"batch_size": 2, name: bad}
    with pytest.raises(InvalidInputError) as caught:
        SharedQueueDataset.from_dataset(TensorDataset(torch.arange(10)), queue, **given)
    assert caught.value.name == name
    assert not os.path.exists(queue)  # noqa: PTH110


def test_drop_last_must_leave_a_batch(queue: str) -> None:
    with pytest.raises(InvalidInputError, match="drop_last=False"):
        SharedQueueDataset.from_dataset(TensorDataset(torch.arange(3)), queue, 4, drop_last=True)


def test_load_must_be_callable_and_units_a_plan(queue: str) -> None:
    with pytest.raises(InvalidInputError, match="load"):
        SharedQueueDataset(unit_grid(2, 1), queue, 3)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="units"):
        SharedQueueDataset([1, 2], queue, load)  # type: ignore[arg-type]


@pytest.mark.parametrize("epoch", [-1, 1.5, True, "1", None, 10**9])
def test_set_epoch_checks_its_argument(queue: str, epoch: Any) -> None:
    with pytest.raises(InvalidInputError, match="epoch"):
        SharedQueueDataset(unit_grid(2, 1), queue, load).set_epoch(epoch)


def test_a_load_that_cannot_be_spawned_is_named(queue: str) -> None:
    def inner(unit: Unit) -> Iterator[tuple[int, torch.Tensor]]:
        yield from load(unit)

    dataset = SharedQueueDataset(unit_grid(2, 1), queue, inner)
    with pytest.raises(InvalidInputError, match=r"load=.*picklable.*fork"):
        iter(loader_of(dataset, 1, "spawn"))


def test_a_memory_mailbox_has_no_workers() -> None:
    dataset = SharedQueueDataset(unit_grid(4, 2), "memory://no-workers", load)
    with raises(MailboxRefusedError, match="one process only"):
        next(iter(loader_of(dataset, 1)))
    assert len(drain(loader_of(dataset))) == 4


# -- errors in workers -------------------------------------------------------------------------------------


class DiskError(Exception):
    pass


def failing(unit: Unit, at: int) -> Iterator[tuple[int, torch.Tensor]]:
    for step, batch in load(unit):
        if step == at:
            raise DiskError(f"no step {at}")
        yield step, batch


@pytest.mark.parametrize("workers", FAILING_WORKERS)
def test_an_error_of_load_comes_after_the_batches_before_it(queue: str, workers: int) -> None:
    units = unit_grid(30, 30, taper=False)
    loader = loader_of(SharedQueueDataset(units, queue, partial(failing, at=9), "a"), workers)
    trained: list[Value] = []
    with raises(DiskError, match="no step 9"), Session(queue, "a") as session:
        for _, batch in session.track(loader):
            trained.append(value(batch))
            session.step()
    assert trained == [(step, 0) for step in range(9)]
    assert given_back(open_mailbox(queue)) == {("000000-0.json", 0): 9}


@pytest.mark.parametrize("workers", FAILING_WORKERS)
def test_what_load_yields_is_checked(queue: str, workers: int) -> None:
    dataset = SharedQueueDataset(unit_grid(2, 1), queue, yields_no_pairs)
    with raises(LoadError, match=r"\(step, batch\) pairs"):
        next(iter(loader_of(dataset, workers)))


def yields_no_pairs(unit: Unit) -> Iterator[Any]:
    yield from unit.steps


# -- processes ---------------------------------------------------------------------------------------------


def test_workers_after_use_in_the_process_itself(queue: str) -> None:
    units = unit_grid(12, 2)
    dataset = SharedQueueDataset(units, queue, load)
    epochs = [drain(loader_of(dataset)), drain(loader_of(dataset, 2)), drain(loader_of(dataset))]
    assert [Counter(trained) for trained in epochs] == [whole(units)] * 3


def in_fork(function: Callable[[], Any]) -> Any:
    """Run in a forked child; what it returned, or the error it raised."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            answer = function()
        except BaseException as error:
            answer = error
        os.write(writer, pickle.dumps(answer))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        answer = pickle.load(stream)
    os.waitpid(child, 0)
    return answer


def test_a_forked_training_process_is_a_learner_of_its_own(queue: str) -> None:
    units = unit_grid(20, 2)
    dataset = SharedQueueDataset(units, queue, load)
    items = iter(loader_of(dataset))
    mine = [value(next(items)[1])]
    theirs = in_fork(lambda: drain(loader_of(dataset)))
    mine += [value(batch) for _, batch in items]
    assert Counter(mine + theirs) == whole(units)
    labels = {page.learner for page in pages(open_mailbox(queue))}
    assert len(labels) == 2


def test_workers_of_a_process_that_never_used_the_dataset_are_refused(queue: str) -> None:
    dataset = SharedQueueDataset(unit_grid(20, 2), queue, load)
    error = in_fork(lambda: drain(loader_of(dataset, 1)))
    assert isinstance(error, ClosedError)
    assert "make the dataset in the process that iterates the loader" in str(error)

    def use_it_first() -> list[Value]:
        dataset.set_epoch(0)
        return drain(loader_of(dataset, 2))

    assert Counter(in_fork(use_it_first)) == whole(unit_grid(20, 2))


def test_a_pickled_dataset_is_a_learner_of_its_own(queue: str) -> None:
    units = unit_grid(20, 2)
    dataset = SharedQueueDataset(units, queue, load, "a")
    copy = pickle.loads(pickle.dumps(dataset))
    items = iter(loader_of(dataset))
    seen = [value(next(items)[1])]
    with pytest.warns(ShardQueueWarning, match="live twice"):
        seen += drain(loader_of(copy))
    seen += [value(batch) for _, batch in items]
    assert Counter(seen) == whole(units)


def test_a_loader_begun_before_track_is_said(queue: str) -> None:
    dataset = SharedQueueDataset(unit_grid(20, 2), queue, load)

    class Eager:
        def __init__(self, loader: Any) -> None:
            self._items = iter(loader)
            self._first = next(self._items)

        def __iter__(self) -> Iterator[Any]:
            yield self._first
            yield from self._items

    eager = Eager(loader_of(dataset, 1))
    with Session(queue) as session, pytest.warns(ShardQueueWarning, match="began before"):
        for _ in session.track(eager):
            session.step()


@pytest.mark.parametrize("workers", WORKERS)
def test_track_refuses_the_loader_of_another_learner(queue: str, tmp_path: Path, workers: int) -> None:
    units = unit_grid(4, 2)
    with Session(queue, "a") as session:
        for dataset in (
            SharedQueueDataset(units, queue, load, "b"),
            SharedQueueDataset(units, tmp_path / "other", load, "a"),
        ):
            with pytest.raises(InvalidInputError, match="same learner_id and mailbox"):
                next(iter(session.track(loader_of(dataset, workers))))


def test_a_step_without_track_is_said(queue: str) -> None:
    dataset = SharedQueueDataset(unit_grid(4, 2), queue, load)
    with Session(queue) as session, pytest.warns(ShardQueueWarning, match=r"session.track\(loader\)"):
        for _ in loader_of(dataset, 1):
            session.step()


@pytest.mark.parametrize("workers", WORKERS)
def test_accumulation_over_the_end_of_an_epoch_trains_nothing_twice(queue: str, workers: int) -> None:
    """The batches in hand when the next epoch begins are stepped in it: others must not get them."""
    units = unit_grid(20, 4)
    loader = loader_of(SharedQueueDataset(units, queue, load, "a"), workers)
    with Session(queue, "a") as session:
        for _ in range(2):
            for number, _ in enumerate(session.track(loader)):
                if number % 7 == 6:
                    session.step()
        session.step()
        assert session.rates.batches == 40
    assert given_back(open_mailbox(queue)) == {}


@pytest.mark.parametrize("workers", WORKERS)
def test_a_reordering_wrapper_is_refused(queue: str, workers: int) -> None:
    units = unit_grid(40, 4, taper=False)
    trained: list[Value] = []

    def swapped(items: Any) -> Iterator[Any]:
        while some := list(islice(items, 6)):
            yield from reversed(some)

    with pytest.raises(LoadError, match="reorders"), Session(queue, "a") as session:
        wrapped: Any = swapped(
            iter(session_items(loader_of(SharedQueueDataset(units, queue, load, "a"), workers)))
        )
        for _, batch in session.track(wrapped):
            trained.append(value(batch))
            session.step()
    rest = drain(loader_of(SharedQueueDataset(units, queue, load, "b", run="1")))
    assert max(Counter(trained + rest).values()) == 1, "at most once"


def session_items(loader: Any) -> Iterator[Any]:
    yield from loader


@pytest.mark.parametrize("workers", WORKERS)
def test_what_begins_the_loader_early_does_not_go_inside_track(queue: str, workers: int) -> None:
    loader = loader_of(SharedQueueDataset(unit_grid(20, 4), queue, load), workers)
    with (
        Session(queue) as session,
        pytest.raises(InvalidInputError, match=r"enumerate\(session.track\(loader\)\)"),
    ):
        next(iter(session.track(enumerate(loader))))
    gc.collect()


def test_a_wrapper_beside_two_datasets_is_refused(queue: str) -> None:
    units = unit_grid(20, 4)
    older, newer = (SharedQueueDataset(units, queue, load) for _ in range(2))
    with Session(queue) as session:
        with pytest.raises(InvalidInputError, match="2 of learner"):
            next(iter(session.track(item for item in loader_of(newer, 1))))
        assert older is not newer
        assert Counter(drain(loader_of(newer, 1), session)) == whole(units)


def test_more_claims_than_the_pipe_holds(queue: str) -> None:
    """No step() for a whole epoch: the pipe is read all the same."""
    units = unit_grid(1500, 1, taper=False)
    with Session(queue) as session:
        session.step()
        loader = loader_of(SharedQueueDataset(units, queue, load), 1)
        seen = Counter(value(batch) for _, batch in session.track(loader))
        session.step()
        assert session.rates.batches == 1500
    assert seen == whole(units)


@pytest.mark.parametrize("workers", WORKERS)
def test_between_two_epochs_the_run_goes_on(queue: str, workers: int) -> None:
    """Without a session nobody is in the run between two loops; the training process is alive all the same."""
    units = unit_grid(12, 2)
    dataset = SharedQueueDataset(units, queue, load, "a")
    drain(loader_of(dataset, workers), most=3)
    gc.collect()
    answer = in_fork(lambda: drain(loader_of(SharedQueueDataset(units, queue, load, "b"))))
    assert isinstance(answer, list), answer
    mailbox = open_mailbox(queue)
    assert mailbox.list("run-2/") == []
    assert mailbox.list("runs/") == ["runs/1.json"]


def test_a_forked_iteration_is_refused(queue: str) -> None:
    items = iter(loader_of(SharedQueueDataset(unit_grid(40, 4), queue, load)))
    next(items)
    error = in_fork(lambda: next(items))
    assert isinstance(error, ClosedError)
    assert given_back(open_mailbox(queue)) == {}, "the child gives nothing back in its parent's name"
    assert len(list(items)) == 39


class Doubled(IterableDataset[Any]):
    """A dataset around the dataset, as programs have them."""

    def __init__(self, inner: SharedQueueDataset) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[Any]:
        for step, batch in self.inner:
            yield step, batch * 2


@pytest.mark.parametrize("workers", WORKERS)
def test_a_wrapped_dataset_is_tracked(queue: str, workers: int) -> None:
    units = unit_grid(20, 4)
    loader = loader_of(Doubled(SharedQueueDataset(units, queue, load)), workers)
    with Session(queue) as session:
        trained = [(step // 2, lane // 2) for step, lane in drain(loader, session, most=6)]
    assert (
        sum(span.end - span.begin for span in last_page(open_mailbox(queue), session.learner_id).trained) == 6
    )
    rest = drain(loader_of(SharedQueueDataset(units, queue, load, "other", run="1")))
    assert Counter(trained + rest) == whole(units)


def random_state(unit: Unit) -> Iterator[tuple[int, torch.Tensor]]:
    info = get_worker_info()
    assert info is not None
    for step in unit.steps:
        yield step, torch.tensor([torch.initial_seed() - info.id, int(torch.randint(2**30, ()))])


def test_random_generators_of_workers_are_torchs(queue: str) -> None:
    torch.manual_seed(7)
    dataset = SharedQueueDataset(unit_grid(20, 2), queue, random_state)
    seeds = {int(batch[0]) for _, batch in loader_of(dataset, 2)}
    assert len(seeds) == 1


class Inherited:
    """Garbage that says in which process it was collected."""

    def __init__(self, told: Path) -> None:
        self.me, self.told = self, told

    def __del__(self) -> None:
        with self.told.open("a") as file:
            file.write(f"{os.getpid()}\n")


def test_a_forked_worker_finalises_nothing_it_inherited(tmp_path: Path) -> None:
    def load(unit: Unit) -> Iterator[tuple[int, int]]:
        gc.collect()
        for step in unit.steps:
            yield step, step

    dataset = SharedQueueDataset(unit_grid(4, 2), tmp_path / "queue", load)
    gc.collect()
    gc.disable()
    try:
        Inherited(tmp_path / "told")
        with Session(tmp_path / "queue", dataset.learner_id) as session:
            loader = DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="fork")
            assert len(list(session.track(loader))) == 4
            session.step()
        assert not (tmp_path / "told").exists()
    finally:
        gc.enable()
        gc.collect()
    assert (tmp_path / "told").read_text() == f"{os.getpid()}\n"
