"""Waiting for the silent behind a `DataLoader`: what its workers may not do, the training process does."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from learners import load, until
from torch.utils.data import DataLoader

from shardqueue import Session, SharedQueueDataset, open_mailbox, shared_queue, unit_grid
from shardqueue.errors import InvalidInputError, RunError
from shardqueue.plan import Plan
from shardqueue.records import BackRecord, ClaimRecord, LogPage, RunKeys
from shardqueue.run import new_manifest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from shardqueue import Mailbox

UNITS = unit_grid(24, 4, 1, taper=False)
SOON = 2.0
"""`reclaim_after`, in seconds, where it is to come."""


def dataset(place: Path, name: str = "a", after: float | None = SOON, **options: Any) -> SharedQueueDataset:
    return SharedQueueDataset(UNITS, str(place), load, name, reclaim_after=after, **options)


def loader(data: SharedQueueDataset, workers: int) -> DataLoader[Any]:
    return DataLoader(data, batch_size=None, num_workers=workers)


class Bar:
    """As tqdm."""

    def __init__(self, iterable: Any) -> None:
        self.iterable = iterable

    def __iter__(self) -> Iterator[Any]:
        yield from self.iterable


def a_dead_claim(mailbox: Mailbox, unit: str, trained: int | None = None) -> None:
    """Somebody on another machine claimed a unit in run x, perhaps trained a part of it, and is gone."""
    keys = RunKeys("x")
    mailbox.put_if_absent(keys.manifest, new_manifest(Plan(UNITS), "z", 0.0, reclaim_after=SOON).encode())
    record = ClaimRecord(learner="z", instance="00zz", worker="main", nonce="n", sequence=1)
    assert mailbox.put_if_absent(keys.pass_keys().claim(unit), record.encode())
    if trained is not None:
        page = LogPage.decode(
            b'{"kind":"shardqueue.log","learner":"z","instance":"00zz","process":"main","page":0,"write":1,'
            b'"run_id":"?","where":{"host":"far","boot":"far","pid":1,"started":"1"},"wall":0,"totals":{},'
            b'"rate":0,"trained":[["","%s",0,0,%d,0,0,0,0]],"held":[["","%s",0]]}'
            % (unit.encode(), trained, unit.encode()),
            "",
        )
        mailbox.put(keys.log("z", "00zz", "main", 0), page.encode())


@pytest.mark.parametrize(
    ("workers", "trained"),
    [(0, None), (2, 0), (2, 3)],
    ids=["no log, no workers", "nothing trained", "3 of 4 trained"],
)
def test_what_a_dead_learner_held_comes_at_the_end(tmp_path: Path, workers: int, trained: int | None) -> None:
    mailbox = open_mailbox(tmp_path)
    unit = UNITS.identifier(2)
    a_dead_claim(mailbox, unit, trained)
    got: list[int] = []
    with Session(str(tmp_path), "a", log_every=SOON / 3) as session:
        for step, _ in session.track(loader(dataset(tmp_path, run="x"), workers)):
            got.append(int(step))
            session.step(samples=1)
    gone = range(8, 8 + (trained or 0))
    assert Counter(got) == Counter(step for step in range(24) if step not in gone)
    record = BackRecord.decode(mailbox.get(f"run-x/back/{unit}~0") or b"", "back")
    assert (record.begin, record.learner, record.why) == (trained or 0, "a", "silent")


def load_late(value: int) -> Iterator[tuple[int, int]]:
    """The first units are empty, and it takes long to find out."""
    if value < 2:
        threading.Event().wait(0.7)
    else:
        yield value, value


def test_workers_claim_until_the_first_batch_however_long_that_takes(tmp_path: Path) -> None:
    """Before it nobody tells them how old the log is: what was told in the epoch before is old by then."""
    units = {f"u{number}": number for number in range(6)}
    got: list[int] = []
    with Session(str(tmp_path), "a", log_every=0.3) as session:
        data = SharedQueueDataset(units, str(tmp_path), load_late, "a", reclaim_after=1.0)
        for _ in range(2):
            for step, _ in session.track(loader(data, 1)):
                got.append(int(step))
                session.step(samples=1)
                threading.Event().wait(0.1)
    assert Counter(got) == Counter([*range(2, 6), *range(2, 6)])


def test_a_loader_waits_for_who_lives(tmp_path: Path) -> None:
    """A learner that holds a unit and lives is waited for, and nothing is taken from it."""
    mailbox = open_mailbox(tmp_path)
    got: list[int] = []
    goes_on = threading.Event()

    def slowly() -> None:
        with shared_queue(UNITS, str(tmp_path), "b", load, prefetch=1, reclaim_after=SOON) as queue:
            for step, _ in queue:
                got.append(int(step))
                goes_on.wait(20)

    thread = threading.Thread(target=slowly)
    thread.start()
    until(lambda: bool(got))
    with Session(str(tmp_path), "a", log_every=SOON / 3) as session:
        for step, _ in session.track(loader(dataset(tmp_path), 2)):
            got.append(int(step))
            session.step(samples=1)
            if len(got) >= 18:
                threading.Timer(2 * SOON, goes_on.set).start()
    thread.join()
    assert Counter(got) == Counter(range(24))
    why = [BackRecord.decode(mailbox.get(key) or b"", key).why for key in mailbox.list("back/")]
    assert "silent" not in why


class TestArguments:
    def test_a_loader_in_a_wrapper_that_may_change_its_items(self, tmp_path: Path) -> None:
        """What comes at the end does not go through it: a batch would stay on the CPU."""
        plain = loader(dataset(tmp_path), 1)
        with (
            Session(str(tmp_path), "a", log_every=SOON / 3) as session,
            pytest.raises(InvalidInputError, match="wrap what track gives"),
        ):
            next(session.track(item for item in plain))

    def test_a_progress_bar_changes_nothing(self, tmp_path: Path) -> None:
        bar = Bar(loader(dataset(tmp_path), 1))
        with Session(str(tmp_path), "a", log_every=SOON / 3) as session:
            for _ in session.track(bar):
                session.step(samples=1)
            assert session.rates.batches == 24

    @pytest.mark.parametrize("after", [0.5, -1, float("nan"), 1e9, "60", True])
    def test_that_are_no_time_are_refused(self, tmp_path: Path, after: Any) -> None:
        with pytest.raises(InvalidInputError, match="reclaim_after"):
            dataset(tmp_path, after=after)
        with pytest.raises(InvalidInputError, match="reclaim_after"):
            shared_queue(UNITS, str(tmp_path), "a", load, reclaim_after=after)

    @pytest.mark.parametrize("workers", [0, 2])
    def test_a_log_that_is_written_too_seldom(self, tmp_path: Path, workers: int) -> None:
        data = dataset(tmp_path, after=10.0)
        with (
            Session(str(tmp_path), "a") as session,
            pytest.raises(InvalidInputError, match=r"log_every=3\.33"),
        ):
            next(session.track(loader(data, workers)))
        with (
            Session(str(tmp_path), "a"),
            pytest.raises(InvalidInputError, match=r"log_every=3\.33"),
            shared_queue(UNITS, str(tmp_path), "a", load, reclaim_after=10.0),
        ):
            pass

    def test_all_learners_of_a_run_have_the_same(self, tmp_path: Path) -> None:
        with shared_queue(UNITS, str(tmp_path), "a", load) as queue:
            next(queue)
            with (
                shared_queue(UNITS, str(tmp_path), "b", load, reclaim_after=60) as other,
                pytest.raises(RunError, match="reclaim_after=None, this learner has reclaim_after=60"),
            ):
                next(other)

    def test_workers_without_a_session_are_refused(self, tmp_path: Path) -> None:
        items: Any = iter(loader(dataset(tmp_path), 1))
        with pytest.raises(InvalidInputError, match=r"iterate session\.track"):
            next(items)
        items._shutdown_workers()  # collected with the error's traceback, it would wait for 5 s
