"""Which rank is gone: the policy in virtual time, on a mailbox in memory, and a real process that is killed."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, TypeVar

import pytest

from shardqueue import Session, shared_queue, unit_grid
from shardqueue.errors import (
    AgreementError,
    MailboxError,
    MailboxUnavailableError,
    PeerGoneError,
    ShardQueueError,
)
from shardqueue.learner import LOG_EVERY, PAGE_SPANS, SILENCE, Book, this_process
from shardqueue.mailbox.faults import Counted, Outage, TornRead, Wrapper
from shardqueue.mailbox.memory import MemoryMailbox
from shardqueue.peers import LOOK, Gone, Peer, Peers
from shardqueue.records import Process, RunKeys
from shardqueue.units import Step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from shardqueue import Mailbox

T = TypeVar("T")

KEYS = RunKeys("1")
LONG = 200.0
"""Seconds in which whoever is taken for gone would be."""
NOON = datetime(2026, 1, 1, 12, 0, 0).timestamp()


def elsewhere(pid: int) -> Process:
    return Process(host=f"host-{pid}", boot=f"another/{pid}", pid=pid, started="1")


@dataclass
class Rank:
    """A rank of another machine that keeps a log, as `LogWriter` does."""

    number: int
    mailbox: Mailbox
    process: str = "main"
    writes: bool = True
    due: float = 0.0
    book: Book = field(init=False)

    def __post_init__(self) -> None:
        self.book = Book(f"r-{self.number}", f"i{self.number}", self.process, elsewhere(4700 + self.number))

    @property
    def peer(self) -> Peer:
        return Peer(self.number, self.book.learner, self.book.instance, f"n{self.number}")

    def write(self, now: float) -> None:
        for page in self.book.pages(NOON + now, now, 0.0):
            key = KEYS.log(page.learner, page.instance, page.process, page.page)
            try:
                self.mailbox.put(key, page.encode())
            except MailboxUnavailableError:
                self.book.wrote(page, clear=False)
                return
            self.book.wrote(page, clear=True)

    def leave(self, now: float, left: str, rests: bool = False) -> None:
        self.book.left, self.book.rests = left, rests  # type: ignore[assignment]
        self.write(now)
        self.writes = False


class World:
    """Virtual time in which ranks write their logs: all that `Peers` sees of others."""

    def __init__(self, ranks: int = 3) -> None:
        self.now = 0.0
        self.store = MemoryMailbox()
        self.mailbox = Outage(self.store)
        self.ranks = [Rank(number, self.mailbox) for number in range(ranks)]
        self.events: dict[float, Callable[[], object]] = {}
        self.sleep(0.0)

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return NOON + self.now

    def at(self, when: float, event: Callable[[], object]) -> None:
        self.events[when] = event

    def sleep(self, seconds: float) -> None:
        end = self.now + seconds
        while True:
            due = {when: event for when, event in self.events.items() if when <= end}
            writers = [rank for rank in self.ranks if rank.writes and rank.due <= end]
            if not due and not writers:
                break
            self.now = max(self.now, min([*due, *(rank.due for rank in writers)]))
            for when in [when for when in due if when <= self.now]:
                self.events.pop(when)()
            for rank in writers:
                if rank.writes and rank.due <= self.now:
                    rank.write(self.now)
                    rank.due += LOG_EVERY
        self.now = end

    def peers(
        self, mailbox: Mailbox | None = None, seen: Callable[[Process], bool | None] | None = None
    ) -> Peers:
        ranks = [rank.peer for rank in self.ranks if rank.process == "main"]
        seen = seen or (lambda _: None)
        return Peers(ranks, mailbox or self.mailbox, KEYS, self, seen=seen, sleep=self.sleep)


@pytest.fixture
def world() -> World:
    return World()


def named(gone: list[Gone]) -> dict[int, str]:
    return {one.peer.rank: one.why for one in gone}


# -- silence -----------------------------------------------------------------------------------------------


def test_ranks_that_take_minutes_for_a_step_are_not_gone(world: World) -> None:
    assert world.peers().watch(LONG) == []
    assert world.now == LONG


def test_a_log_that_stays_silent_names_its_rank(world: World) -> None:
    peers = world.peers()
    world.at(67, lambda: setattr(world.ranks[2], "writes", False))
    assert named(peers.watch(LONG)) == {2: "its log has not changed for 10 s (last written 12:01:05)"}
    assert world.now <= 65 + SILENCE + LOOK


def test_a_shorter_silence_proves_nothing(world: World) -> None:
    world.ranks[1].writes = False
    peers = world.peers()
    assert peers.watch(SILENCE - LOOK) == []
    assert list(named(peers.watch(2 * LOOK))) == [1]


def test_silence_is_what_was_watched_not_what_passed_between_two_looks(world: World) -> None:
    """A rank that trains asks nobody for minutes."""
    peers = world.peers()
    peers.look()
    for _ in range(4):
        world.sleep(300)
        world.ranks[0].writes = False
        assert peers.look() == []


def test_a_log_that_changes_again_is_not_gone(world: World) -> None:
    peers = world.peers()
    world.ranks[0].writes = False
    assert list(named(peers.watch(60))) == [0]
    assert list(named(peers.look())) == [0]
    world.ranks[0].write(world.now)
    assert peers.look() == []
    assert list(named(peers.watch(60))) == [0]


def test_a_new_page_is_a_sign_of_life_and_the_newest_one_counts(world: World) -> None:
    """Pages turn when one is full, and when a write ended unclear; the older ones never change again."""
    rank, peers = world.ranks[0], world.peers()
    for turn in range(12):
        world.sleep(5)
        for index in range(0, 2 * PAGE_SPANS, 2):
            rank.book.hand(Step(index, "unit", 0, index, ""), 0.0, 0.0)
            rank.book.train(1, 0.0)
        assert peers.watch(4) == [], turn
    assert len(world.store.list("learners/r-0~i0/")) >= 12
    rank.writes = False
    assert list(named(peers.watch(60))) == [0]
    rank.leave(world.now, "early")
    assert named(peers.look()) == {0: "it left early"}


def test_the_logs_of_a_ranks_workers_and_of_others_do_not_speak_for_it(world: World) -> None:
    world.ranks[0].writes = False
    world.ranks.append(Rank(0, world.mailbox, "w1"))
    namesake = Rank(0, world.mailbox)
    namesake.book.instance = "i9"
    peers = world.peers()
    world.ranks.append(namesake)
    assert list(named(peers.watch(60))) == [0]


def test_a_rank_that_never_wrote_is_gone_after_the_same_silence(world: World) -> None:
    world.ranks.append(Rank(3, world.mailbox, writes=False))
    peers = world.peers()
    assert peers.watch(SILENCE - LOOK) == []
    assert named(peers.watch(60)) == {3: "it has written no log in 10 s"}


def test_a_first_write_is_a_sign_of_life(world: World) -> None:
    world.ranks.append(Rank(3, world.mailbox, due=9.5))
    assert world.peers().watch(LONG) == []


# -- a mailbox that does not answer ----------------------------------------------------------------------------


@pytest.mark.parametrize("began", [1.0, 4.5, 9.5])
def test_an_outage_is_nobodys_silence(world: World, began: float) -> None:
    """Neither while nobody can read, nor just after it, when the others have still to find out that it is over."""

    def resume() -> None:
        world.mailbox.up()
        for rank in world.ranks:
            rank.due = world.now + 8

    world.at(began, world.mailbox.down)
    world.at(65.5, resume)
    assert world.peers().watch(LONG) == []


def test_an_outage_of_some_readings_is_nobodys_silence(world: World) -> None:
    class Unread(Wrapper):
        def get(self, key: str) -> bytes | None:
            if "r-0" in key and 4 < world.now < 65.5:
                raise MailboxUnavailableError(key)
            return super().get(key)

    def resume() -> None:
        world.ranks[0].writes, world.ranks[0].due = True, world.now + 8

    world.at(4.5, lambda: setattr(world.ranks[0], "writes", False))
    world.at(66.0, resume)
    assert world.peers(Unread(world.mailbox)).watch(LONG) == []


def test_a_mailbox_that_hangs_is_nobodys_silence(world: World) -> None:
    """It keeps readings and writes alike for a minute, and then answers them."""

    hung: list[str] = []

    class Hanging(Wrapper):
        def _around(self, verb: str, name: str, forward: Callable[[], T]) -> T:
            if verb == "list" and world.now > 12 and not hung:
                hung.append(verb)
                world.now += 60
                for rank in world.ranks:
                    rank.due = world.now + 4
            return super()._around(verb, name, forward)

    assert world.peers(Hanging(world.mailbox)).watch(LONG) == []
    assert hung


def test_what_is_known_stays_known_in_an_outage(world: World) -> None:
    peers = world.peers()
    assert peers.watch(20) == []
    world.ranks[2].writes = False
    before = peers.watch(LONG)
    assert list(named(before)) == [2]
    world.mailbox.down()
    world.ranks[0].leave(world.now, "error")
    assert peers.look() == before
    world.mailbox.up()
    assert peers.look() == before
    world.ranks[0].write(world.now)
    assert named(peers.look()) == {0: "it left with an error"} | named(before)


@pytest.mark.parametrize("error", [MailboxUnavailableError, MailboxError])
def test_no_error_of_the_mailbox_hides_the_one_that_is_explained(
    world: World, error: type[MailboxError]
) -> None:
    class Failing(Wrapper):
        def _around(self, verb: str, name: str, forward: Callable[[], T]) -> T:
            raise error(verb)

    assert world.peers(Failing(world.mailbox)).watch(60) == []


def test_a_log_that_is_not_understood_says_nothing_and_hides_nobody(world: World) -> None:
    world.ranks[2].leave(world.now, "early")
    torn = TornRead(world.mailbox, when=lambda _, key: "r-0" in key)
    assert named(world.peers(torn).look()) == {2: "it left early"}
    assert named(world.peers(torn).watch(LONG)) == {2: "it left early"}


# -- how a rank left -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left", "why"),
    [("end", "it left at the end"), ("early", "it left early"), ("error", "it left with an error")],
)
def test_who_said_that_it_left_is_gone_at_once(world: World, left: str, why: str) -> None:
    peers = world.peers()
    assert peers.look() == []
    world.ranks[1].leave(world.now, left)
    assert named(peers.look()) == {1: why}


@pytest.mark.parametrize(("here", "gone"), [(True, False), (None, False), (False, True)])
def test_who_rests_may_come_back_unless_its_process_is_seen_gone(
    world: World, here: bool | None, gone: bool
) -> None:
    resting = world.ranks[1].book.where
    peers = world.peers(seen=lambda where: here if where == resting else None)
    world.ranks[1].leave(world.now, "end", rests=True)
    assert list(named(peers.watch(60))) == ([1] if gone else [])


# -- processes of this machine ---------------------------------------------------------------------------------


def test_an_ended_process_of_this_machine_is_gone_at_once(world: World) -> None:
    ended = world.ranks[1].book.where
    peers = world.peers(seen=lambda where: False if where == ended else None)
    assert named(peers.look()) == {1: "its process 4701 ended"}


def test_a_silent_process_of_this_machine_that_lives_is_not_gone(world: World) -> None:
    for rank in world.ranks:
        rank.writes = False
    assert world.peers(seen=lambda _: True).watch(LONG) == []


def test_last_words_written_between_the_reading_and_the_looking_count(world: World) -> None:
    """Wherever they are: here on a page that did not exist when the log was read."""
    rank = world.ranks[1]

    def seen(where: Process) -> bool | None:
        if where != rank.book.where:
            return None
        if rank.writes:
            rank.book.wrote(rank.book.pages(world.wall(), 0.0, 0.0)[-1], clear=False)
            rank.leave(world.now, "error")
        return False

    assert named(world.peers(seen=seen).look()) == {1: "it left with an error"}
    assert len(world.store.list("learners/r-1~i1/")) == 2


# -- what it costs, and what is said -----------------------------------------------------------------------------


def test_a_look_costs_one_listing_and_one_reading_a_rank() -> None:
    world = World(ranks=20)
    counted = Counted(world.mailbox)
    world.peers(counted).look()
    assert counted.counts == {"list": 1, "get": 20}


def test_the_gone_come_in_the_order_of_their_ranks_and_are_named() -> None:
    world = World(ranks=12)
    for rank in reversed(world.ranks):
        rank.leave(world.now, "early")
    peers = world.peers()
    gone = peers.look()
    assert [one.peer for one in gone] == [rank.peer for rank in world.ranks]
    assert peers.describe(gone[2]) == "rank 2 (learner 'r-2' on host n2) is gone: it left early"
    nowhere = Gone(Peer(0, "a", "i"), "it left early")
    assert peers.describe(nowhere) == "rank 0 (learner 'a') is gone: it left early"


def test_the_errors_are_of_the_one_tree() -> None:
    assert issubclass(PeerGoneError, AgreementError)
    assert issubclass(AgreementError, ShardQueueError)


# -- a real process ----------------------------------------------------------------------------------------------

UNITS = unit_grid(24, 3, taper=False)
SCRIPT = """
import sys
from shardqueue import Session, shared_queue, unit_grid

units = unit_grid(24, 3, taper=False)
with Session(sys.argv[1], "b") as session, shared_queue(units, sys.argv[1], "b", lambda unit: [(0, 0)] * 3) as queue:
    next(queue)
    print(session.instance, flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "box")]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        yield process
        process.kill()


def test_a_killed_rank_is_named_by_the_other(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    assert other.stdout is not None
    instance = other.stdout.readline().strip()
    box = str(tmp_path / "box")
    with Session(box, "a") as session, shared_queue(UNITS, box, "a", lambda _: [(0, 0)] * 3) as queue:
        next(queue)
        session.step(samples=1)
        assert session.joined is not None
        host = this_process().host
        ranks = [Peer(0, "a", session.instance, host), Peer(1, "b", instance, host)]
        peers = Peers(ranks, session.mailbox, session.joined.keys, session.clock)
        assert peers.look() == []
        other.kill()
        [gone] = peers.watch(60)
    why = f"its process {other.pid} ended"
    assert peers.describe(gone) == f"rank 1 (learner 'b' on host {host}) is gone: {why}"
