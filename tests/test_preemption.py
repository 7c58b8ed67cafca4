"""SIGTERM comes at any moment: the batch with the loop is trained whole and known to be, then the block is left."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest
from learners import given_back, last_page, load
from torch.utils.data import DataLoader

from shardqueue import Session, SharedQueueDataset, open_mailbox, preemption, shared_queue, unit_grid
from shardqueue.logreader import LogReader
from shardqueue.records import RunKeys

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

UNITS = unit_grid(24, 8, 1, taper=False)


@pytest.fixture(autouse=True)
def _as_by_default() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def _held_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "HOLD", 1000.0)


def trained(place: Path) -> int:
    spans = LogReader(open_mailbox(place), RunKeys("1")).read().spans()
    return sum(span.end - span.begin for _, span in spans)


def begin_again(place: Path) -> int:
    """At which batches the units that were begun go on, added up."""
    return sum(given_back(open_mailbox(place)).values())


@pytest.mark.usefixtures("_held_for_long")
@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_stepped_after_it_is_trained(tmp_path: Path, workers: int) -> None:
    data = SharedQueueDataset(UNITS, str(tmp_path), load, "a")
    loader: DataLoader[Any] = DataLoader(data, batch_size=None, num_workers=workers)
    with pytest.raises(SystemExit, match="143"), Session(str(tmp_path), "a") as session:
        for number, _ in enumerate(session.track(loader)):
            if number == 2:
                signal.raise_signal(signal.SIGTERM)
            assert number <= 2
            session.step(samples=1)
    assert trained(tmp_path) == begin_again(tmp_path) == 3
    assert last_page(open_mailbox(tmp_path), "a").left == "early", "in order, which is no error"


@pytest.mark.usefixtures("_held_for_long")
def test_in_a_plain_queue_the_batch_in_hand_is_trained(tmp_path: Path) -> None:
    queue = shared_queue(UNITS, str(tmp_path), "a", load)
    with pytest.raises(SystemExit, match="143"), queue:
        for number, _ in enumerate(queue):
            assert number <= 2
            if number == 2:
                signal.raise_signal(signal.SIGTERM)
    assert trained(tmp_path) == begin_again(tmp_path) == 3
    assert not any(claim.unclear for claim in queue.returned)


@pytest.mark.usefixtures("_held_for_long")
def test_a_loop_that_is_left_before_it_comes_back_has_not_missed_it(tmp_path: Path) -> None:
    after: list[str] = []
    with pytest.raises(SystemExit, match="143"):
        with shared_queue(UNITS, str(tmp_path), "a", load) as queue:
            for _ in queue:
                signal.raise_signal(signal.SIGTERM)
                break
            after.append("the loop")
        after.append("the block")
    assert after == ["the loop"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_body_that_takes_long_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "HOLD", 0.2)
    with pytest.raises(SystemExit, match="143"), shared_queue(UNITS, str(tmp_path), "a", load) as queue:
        for _ in queue:
            signal.raise_signal(signal.SIGTERM)
            threading.Event().wait(60)
            pytest.fail("nothing interrupted it")


@pytest.mark.usefixtures("_held_for_long")
def test_a_second_one_does_not_wait(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="143"), shared_queue(UNITS, str(tmp_path), "a", load) as queue:
        for _ in queue:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            pytest.fail("nothing interrupted it")


@pytest.mark.usefixtures("_held_for_long")
def test_who_waits_for_a_batch_leaves_at_once(tmp_path: Path) -> None:
    main = threading.main_thread().ident
    assert main is not None
    asked = threading.Event()

    def load_slowly(unit: Any) -> Iterator[Any]:
        asked.set()
        threading.Event().wait(1.0)  # no longer: leaving waits for a load in progress
        yield from load(unit)

    def notify() -> None:
        asked.wait(20)
        signal.pthread_kill(main, signal.SIGTERM)

    threading.Thread(target=notify).start()
    with (
        pytest.raises(SystemExit, match="143"),
        shared_queue(UNITS, str(tmp_path), "a", load_slowly) as queue,
    ):
        for _ in queue:
            pytest.fail("a batch came before")
