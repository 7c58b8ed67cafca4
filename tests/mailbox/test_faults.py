from __future__ import annotations

import threading
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from learners import Task, Value, dataset, load, together, train, until
from mailbox_contract import MailboxContract, race

from shardqueue import Session, shared_queue, unit_grid
from shardqueue.errors import (
    InvalidInputError,
    MailboxRefusedError,
    MailboxUnavailableError,
    RecordError,
    ShardQueueError,
)
from shardqueue.mailbox.faults import Counted, Delayed, LostResponse, Outage, StaleListing, TornRead
from shardqueue.mailbox.files import FileMailbox
from shardqueue.mailbox.memory import MemoryMailbox
from shardqueue.records import ClaimRecord

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shardqueue.mailbox import Mailbox


class TestWrapped(MailboxContract):
    """All faults stacked, none active: still a mailbox."""

    @pytest.fixture
    def mailbox(self) -> Mailbox:
        store = StaleListing(MemoryMailbox(), every=1)
        quiet = TornRead(LostResponse(store, when=lambda verb, key: False), when=lambda verb, key: False)
        return Delayed(Counted(Outage(quiet)), 0.0)


CALLS: list[tuple[str, Callable[[Mailbox], Any]]] = [
    ("put_if_absent", lambda mailbox: mailbox.put_if_absent("a", b"1")),
    ("get", lambda mailbox: mailbox.get("a")),
    ("list", lambda mailbox: mailbox.list("")),
    ("put", lambda mailbox: mailbox.put("a", b"1")),
    ("delete", lambda mailbox: mailbox.delete(["a"])),
]
each_verb = pytest.mark.parametrize(("verb", "call"), CALLS, ids=[verb for verb, _ in CALLS])


@each_verb
def test_the_effect_comes_half_way(verb: str, call: Callable[[Mailbox], Any]) -> None:
    inner = Counted(MemoryMailbox())
    seen: list[tuple[float, int]] = []
    seconds = iter([4.0])
    mailbox = Delayed(inner, lambda: next(seconds), sleep=lambda half: seen.append((half, inner.total)))
    call(mailbox)
    assert seen == [(2.0, 0), (2.0, 1)]
    assert inner.counts[verb] == 1


def test_an_error_is_delayed_too() -> None:
    down = Outage(MemoryMailbox())
    down.down()
    slept: list[float] = []
    with pytest.raises(MailboxUnavailableError):
        Delayed(down, 1.0, sleep=slept.append).get("a")
    assert slept == [0.5, 0.5]


@each_verb
def test_counts_by_verb(verb: str, call: Callable[[Mailbox], Any]) -> None:
    mailbox = Counted(MemoryMailbox())
    race([lambda: [call(mailbox) for _ in range(50)]] * 4)
    assert mailbox.counts == {verb: 200}
    assert mailbox.counts["another"] == 0
    assert mailbox.total == 200


@each_verb
def test_an_outage_begins_and_ends(verb: str, call: Callable[[Mailbox], Any]) -> None:
    inner = Counted(MemoryMailbox())
    mailbox = Outage(inner)
    call(mailbox)
    mailbox.down()
    with pytest.raises(MailboxUnavailableError, match=verb):
        call(mailbox)
    assert inner.total == 1
    mailbox.up()
    call(mailbox)
    assert inner.total == 2


@pytest.mark.parametrize("verb", ["put", "put_if_absent"])
def test_a_write_lands_and_its_answer_is_lost(verb: str) -> None:
    mailbox = LostResponse(MemoryMailbox(), every=2)
    write = getattr(mailbox, verb)
    write("a", b"1")
    with pytest.raises(MailboxUnavailableError, match="landed"):
        write("b", b"1")
    write("c", b"1")
    assert mailbox.list("") == ["a", "b", "c"]
    mailbox.delete(["a"])


def test_a_lost_create_is_won_by_trying_again() -> None:
    mailbox = LostResponse(MemoryMailbox(), every=2)
    mailbox.put("other", b"1")
    with pytest.raises(MailboxUnavailableError):
        mailbox.put_if_absent("a", b"mine")
    assert mailbox.put_if_absent("a", b"mine") is True


def test_loses_when_told() -> None:
    mailbox = LostResponse(
        MemoryMailbox(), when=lambda verb, key: verb == "put_if_absent" and key.startswith("u/")
    )
    mailbox.put("u/a", b"1")
    mailbox.put_if_absent("v/a", b"1")
    with pytest.raises(MailboxUnavailableError):
        mailbox.put_if_absent("u/b", b"1")


@pytest.mark.parametrize("fault", [LostResponse, TornRead])
@pytest.mark.parametrize(
    "arguments", [{}, {"every": 0}, {"every": 1, "when": lambda verb, key: True}], ids=len
)
def test_what_happens_sometimes_wants_one_rule(fault: Any, arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError):
        fault(MemoryMailbox(), **arguments)


def test_listing_and_name_show_through(tmp_path: Path) -> None:
    mailbox = Delayed(Counted(FileMailbox(tmp_path)), 0)
    assert mailbox.listing == "scan"
    assert Outage(MemoryMailbox()).listing == "page"
    assert repr(mailbox) == f"Delayed(Counted(FileMailbox({str(tmp_path)!r})))"


def test_a_slow_mailbox_serves_threads_side_by_side() -> None:
    together = threading.Barrier(4)
    mailbox = Delayed(MemoryMailbox(), 1.0, sleep=lambda half: together.wait(60))
    race([lambda: mailbox.put_if_absent("a", b"1")] * 4)
    assert mailbox.listing == "page"


# -- stale listings ----------------------------------------------------------------------------------------


def test_listings_lag_and_nothing_else_does() -> None:
    inner = MemoryMailbox()
    mailbox = StaleListing(inner, every=3)
    mailbox.put("u/a", b"1")
    assert mailbox.list("u/") == ["u/a"]
    assert mailbox.put_if_absent("u/b", b"1") is True
    inner.delete(["u/a"])
    assert mailbox.list("") == mailbox.list("u/") == ["u/a"]
    assert (mailbox.get("u/a"), mailbox.get("u/b")) == (None, b"1")
    assert mailbox.put_if_absent("u/b", b"2") is False
    assert mailbox.list("u/") == ["u/b"]


@pytest.mark.parametrize("every", [0, -1])
def test_a_snapshot_needs_a_listing(every: int) -> None:
    with pytest.raises(InvalidInputError, match="every="):
        StaleListing(MemoryMailbox(), every)


@pytest.mark.parametrize("every", [2, 7, 10**6])
@pytest.mark.parametrize("folder", [False, True], ids=["page", "scan"])
def test_a_queue_over_stale_listings_gives_each_batch_once(tmp_path: Path, every: int, folder: bool) -> None:
    store = FileMailbox(tmp_path) if folder else MemoryMailbox()
    units = unit_grid(60, 2, lanes=2, taper=False)

    def all_joined() -> None:
        until(lambda: len(store.list("learners/")) >= 3)

    stale = StaleListing(store, every)
    shares = together(partial(train, units, stale, name, hold=all_joined, prefetch=2) for name in "abc")
    assert sum(map(Counter, shares), Counter()) == dataset(units)
    assert store.list("units/") == [f"units/{unit}" for unit in units]


def test_what_is_given_back_unseen_is_left_out_and_never_given_twice() -> None:
    """A listing that never learns of it hides what was given back; its owner has named it."""
    store, units = MemoryMailbox(), unit_grid(24, 3, taper=False)
    stale = StaleListing(store, every=10**6)
    stale.list("")
    queue = shared_queue(units, stale, "a", load, run="x")
    with queue:
        trained: list[Value] = [next(queue)[1] for _ in range(4)]
    trained += train(units, stale, "b", run="x")
    left = Counter((step, 0) for r in queue.returned for step in units[r.unit].steps[r.begin :])
    assert Counter(trained) + left == dataset(units)
    assert left
    assert Counter(train(units, store, "c", run="x")) == left


# -- torn reads --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("keep", "read"), [(0, b""), (0.5, b"abc"), (0.99, b"abcdef")])
def test_tears_each_second_read(keep: float, read: bytes) -> None:
    mailbox = TornRead(MemoryMailbox(), every=2, keep=keep)
    mailbox.put("a", b"abcdefg")
    assert [mailbox.get("a") for _ in range(4)] == [b"abcdefg", read] * 2
    assert mailbox.get("absent") is None
    assert mailbox.get("a") == b"abcdefg", "what is absent is not counted"


@pytest.mark.parametrize("keep", [-0.1, 1, 2])
def test_a_torn_read_is_shorter(keep: float) -> None:
    with pytest.raises(InvalidInputError, match="keep="):
        TornRead(MemoryMailbox(), every=1, keep=keep)


KEEPS = pytest.mark.parametrize("keep", [0, 0.5, 0.999])


def torn_under(folder: str, store: Mailbox, keep: float) -> TornRead:
    return TornRead(store, when=lambda verb, key: folder in key, keep=keep)


@KEEPS
def test_half_a_claim_is_an_error_and_nobodys_batch(keep: float) -> None:
    """It is not trained; whoever comes after trains what is left, and no batch is trained twice."""
    store, units = MemoryMailbox(), unit_grid(24, 3, taper=False)
    queue = shared_queue(units, torn_under("units/", store, keep), "a", load, run="x")
    with pytest.raises(MailboxRefusedError, match=r"units/.*another claim"), queue:
        next(queue)
    trained = train(units, store, "b", run="x")
    assert set(Counter(trained).values()) == {1}


@KEEPS
def test_half_a_record_of_what_was_given_back_is_an_error(keep: float) -> None:
    """Where to begin is not guessed."""
    store, units = MemoryMailbox(), unit_grid(24, 12, taper=False)
    trained = train(units, store, "a", most=4, run="x")
    torn = torn_under("back/", store, keep)
    with (
        pytest.raises(RecordError, match=r"back/.*not a give-back record"),
        shared_queue(units, torn, "b", load, run="x") as queue,
    ):
        for _, batch in queue:
            trained.append(batch)
    trained += train(units, store, "c", run="x")
    assert Counter(trained) == dataset(units)


@KEEPS
@pytest.mark.parametrize("folder", ["runs/", "learners/"])
def test_half_a_manifest_or_log_is_an_error_before_anything_is_claimed(folder: str, keep: float) -> None:
    store, units = MemoryMailbox(), unit_grid(24, 3, taper=False)
    with shared_queue(units, store, "a", load) as queue:
        trained = [next(queue)[1]]
        with pytest.raises(RecordError, match=f"{folder}.*not a"):
            Task(partial(train, units, torn_under(folder, store, keep), "b")).result()
        trained += [batch for _, batch in queue]
    assert {ClaimRecord.decode(store.get(key) or b"", key).learner for key in store.list("units/")} == {"a"}
    assert Counter(trained) == dataset(units)


@pytest.mark.parametrize("every", range(2, 8))
def test_reads_torn_now_and_then_never_give_a_batch_twice(every: int) -> None:
    """Whoever met one stops with an error; the last, whose reads are whole, gets what nobody has claimed."""
    store, units = MemoryMailbox(), unit_grid(60, 3, taper=False)
    torn = TornRead(store, every=every)
    trained: list[Value] = []

    def until_an_error(name: str) -> ShardQueueError | None:
        try:
            with Session(torn, name) as session, shared_queue(units, torn, name, load, run="x") as queue:
                for _, batch in queue:
                    trained.append(batch)
                    session.step(samples=1)
        except ShardQueueError as error:
            return error
        return None

    errors = together(partial(until_an_error, name) for name in "abc")
    trained += train(units, store, "last", run="x")
    counts = Counter(trained)
    assert set(counts.values()) == {1}
    assert all(isinstance(error, RecordError | MailboxRefusedError) for error in errors if error is not None)
    assert any(errors)
