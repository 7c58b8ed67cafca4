"""Who is given up, when, and at which batch: one look after another, with time and answers put in place."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest

from shardqueue.asks import Asks
from shardqueue.learner import Book
from shardqueue.mailbox.calls import Get, List
from shardqueue.mailbox.memory import MemoryMailbox
from shardqueue.plan import Plan
from shardqueue.records import BackRecord, ClaimRecord, Process, RunKeys, WholeRecord
from shardqueue.recovery import OWN_WRITES, READERS, Recovery
from shardqueue.units import Step, unit_grid

if TYPE_CHECKING:
    from shardqueue.mailbox.calls import Call

AFTER = 12.0
"""Seconds of silence; two looks may be 4 seconds apart."""
RUN = RunKeys("1")
KEYS = RUN.pass_keys()
PLAN = Plan(unit_grid(8, 4, 1, False))
FIRST, SECOND = PLAN.identifier(0), PLAN.identifier(1)
ELSEWHERE = Process(host="elsewhere", boot="b", pid=7, started="1")


class Owner:
    """A learner that claims, trains and writes its log."""

    def __init__(self, mailbox: MemoryMailbox, name: str = "other", where: Process = ELSEWHERE) -> None:
        self.mailbox = mailbox
        self.book = Book(name, "0001", "main", where, every=AFTER / 3)
        self.nonces = 0

    def claim(self, unit: str, attempt: int = 0, *, held: bool = True) -> None:
        """Create the claim; `held`: the next log names it."""
        record = ClaimRecord(
            learner=self.book.learner,
            instance=self.book.instance,
            worker="main",
            nonce=f"{self.book.learner}-{self.nonces}",
            sequence=self.nonces,
        )
        self.nonces += 1
        assert self.mailbox.put_if_absent(KEYS.claim(unit, attempt), record.encode())
        if held:
            self.book.claim(("", unit, attempt))

    def train(self, unit: str, begin: int, end: int, attempt: int = 0) -> None:
        for index in range(begin, end):
            self.book.hand(Step(index, unit, attempt, index), 0.0, 0.0)
            self.book.train(1, 0.0)
        if end == 4:
            self.book.release(("", unit, attempt), whole_at=end)

    def finish(self, *units: str) -> None:
        for unit in units:
            self.claim(unit)
            self.train(unit, 0, 4)

    def log(self, *, clear: bool = True) -> None:
        for page in self.book.pages(0.0, 0.0, 0.0):
            key = RUN.log(page.learner, page.instance, page.process, page.page)
            self.mailbox.put(key, page.encode())
            self.book.wrote(page, clear)


class Waiting:
    """Somebody with nothing left to claim, whose calls are answered at once unless they are delayed."""

    def __init__(self, mailbox: MemoryMailbox, random: Random | None = None) -> None:
        self.mailbox, self.now = mailbox, 100.0
        self.asks = Asks(Random(0))
        self.held: set[tuple[str, int]] = set()
        self.hosts: dict[str, bool] = {}
        self.calls: list[Call] = []
        self.slow: dict[str, float] = {}
        self.ended: dict[str, int] | None = None
        self.recovery = Recovery(
            *(PLAN, RUN, KEYS, ("me", "0000"), self.asks, AFTER),
            holds=self.held.__contains__,
            seen=lambda where: self.hosts.get(where.host),
            random=random or Random(0),
        )

    def look(self, seconds: float = 2.0) -> list[str]:
        """Let time pass, look once, and return why attempts were ended."""
        self.now += seconds
        done: list[float] = []
        before = set(self.mailbox.list(KEYS.backs))
        ended = self.ends() if self.ended is None else self.ended
        self.recovery.look(ended, self.now, done.append)
        while not done:
            for ask in self.asks.poll(self.now):
                self.calls.append(ask.call)
                answer = ask.call.perform(self.mailbox)
                self.now += self.slow.get(getattr(ask.call, "key", ""), 0.0)
                self.asks.answered(ask, answer, self.now)
        assert self.asks.error is None
        new = sorted(set(self.mailbox.list(KEYS.backs)) - before)
        return [self.back(key).why for key in new]

    def looks(self, count: int, seconds: float = 2.0) -> list[str]:
        return [why for _ in range(count) for why in self.look(seconds)]

    def ends(self) -> dict[str, int]:
        parsed = [KEYS.parse_back(key) for key in self.mailbox.list(KEYS.backs)]
        return dict(found for found in parsed if found is not None)

    def back(self, key: str) -> BackRecord:
        return BackRecord.decode(self.mailbox.get(key) or b"", key)

    def begin(self, unit: str = FIRST, attempt: int = 0) -> int:
        return self.back(KEYS.back(unit, attempt)).begin


@pytest.fixture
def mailbox() -> MemoryMailbox:
    return MemoryMailbox()


@pytest.fixture
def other(mailbox: MemoryMailbox) -> Owner:
    """Holds the first unit, of which it trained two batches; the second is whole."""
    owner = Owner(mailbox)
    owner.finish(SECOND)
    owner.claim(FIRST)
    owner.train(FIRST, 0, 2)
    owner.log()
    return owner


def test_the_silent_are_given_up_after_that_time_where_their_log_came_to(
    mailbox: MemoryMailbox, other: Owner
) -> None:
    me = Waiting(mailbox)
    other.train(FIRST, 2, 3)  # since its last log
    assert me.looks(6) == []
    assert me.recovery.waits_for == {"other": 1}
    assert me.look() == ["silent"]
    assert me.begin() == 2
    assert me.recovery.reclaimed == [(FIRST, 0, 2, "other")]
    me.ended = {}
    me.look()
    assert me.recovery.asks_for_ends, "others may have claimed what comes next"


def test_who_writes_is_not_silent(mailbox: MemoryMailbox, other: Owner) -> None:
    me = Waiting(mailbox)
    for _ in range(10):
        assert me.looks(5) == []
        other.log()


def test_a_log_that_goes_on_under_another_key_is_found_in_time(mailbox: MemoryMailbox, other: Owner) -> None:
    me = Waiting(mailbox)
    for _ in range(6):
        assert me.looks(3) == []
        other.log(clear=False)
    other.train(FIRST, 2, 3)
    other.log()
    assert me.looks(6) == []
    assert me.looks(7) == ["silent"]
    assert me.begin() == 3


def test_an_outage_is_held_against_nobody(mailbox: MemoryMailbox, other: Owner) -> None:
    me = Waiting(mailbox)
    me.looks(6)
    assert me.look(100.0) == []
    assert me.looks(5) == []
    other.log()
    assert me.looks(6) == []
    assert me.look() == ["silent"]


@pytest.mark.parametrize(("slow", "why"), [(0.0, ["silent"]), (5.0, [])])
def test_what_was_read_too_long_ago_ends_nothing(
    mailbox: MemoryMailbox, other: Owner, slow: float, why: list[str]
) -> None:
    mailbox.put_if_absent(KEYS.back(FIRST, 0), given_back(2))
    other.claim(FIRST, 1)
    other.log()
    me = Waiting(mailbox)
    assert me.looks(6) == []
    me.slow = {KEYS.back(FIRST, 0): slow}
    assert me.look() == why


def given_back(begin: int, why: str = "early") -> bytes:
    return BackRecord(begin=begin, learner="other", instance="0001", why=why).encode()


def test_who_is_gone_from_this_host_is_given_up_after_one_more_reading(mailbox: MemoryMailbox) -> None:
    here = Owner(mailbox, where=Process(host="here", boot="b", pid=8, started="1"))
    here.finish(SECOND)
    here.claim(FIRST)
    here.train(FIRST, 0, 1)
    here.log()
    me = Waiting(mailbox)
    me.hosts["here"] = True
    assert me.looks(3, 0.1) == []
    me.hosts["here"] = False
    assert me.look(0.1) == []
    here.train(FIRST, 1, 2)
    here.log(clear=False)  # its last words, which it had under way
    assert me.look(0.1) == ["gone"]
    assert me.begin() == 2


def test_last_words_on_a_new_page_are_read_before_the_gone_are_given_up(mailbox: MemoryMailbox) -> None:
    here = Owner(mailbox, where=Process(host="here", boot="b", pid=8, started="1"))
    here.finish(SECOND)
    here.claim(FIRST)
    here.log(clear=False)
    me = Waiting(mailbox)
    me.hosts["here"] = True
    me.looks(3, 0.1)
    here.train(FIRST, 0, 3)
    here.log()
    me.hosts["here"] = False
    assert me.looks(2, 0.1) == ["gone"]
    assert me.begin() == 3


def test_who_left_and_could_not_give_back_is_given_up_at_once(mailbox: MemoryMailbox, other: Owner) -> None:
    other.book.left = "error"
    other.log()
    me = Waiting(mailbox)
    assert me.looks(2, 0.1) == ["left"]
    assert me.begin() == 2


def test_a_claim_that_lands_after_its_owner_left_is_given_up_like_any_other(
    mailbox: MemoryMailbox, other: Owner
) -> None:
    mailbox.put_if_absent(KEYS.back(FIRST, 0), given_back(2))
    other.book.release(("", FIRST, 0))
    other.book.left = "early"
    other.log()
    other.claim(FIRST, 1, held=False)
    me = Waiting(mailbox)
    assert me.looks(6) == []
    assert me.looks(2) == ["silent"]


def test_who_rests_between_two_passes_has_not_left(mailbox: MemoryMailbox, other: Owner) -> None:
    other.book.left, other.book.rests = "early", True
    other.log()
    me = Waiting(mailbox)
    assert me.looks(6) == []
    assert me.looks(2) == ["silent"]


def test_an_owner_without_any_log_is_watched_like_others(mailbox: MemoryMailbox) -> None:
    Owner(mailbox, "mute").claim(FIRST)
    me = Waiting(mailbox)
    assert me.looks(6) == []
    assert me.looks(2) == ["silent"]
    assert me.begin() == 0


def test_its_first_log_ends_the_silence(mailbox: MemoryMailbox) -> None:
    mute = Owner(mailbox, "mute")
    mute.claim(FIRST)
    me = Waiting(mailbox)
    assert me.looks(6) == []
    mute.log()
    assert me.looks(6) == []
    assert me.looks(2) == ["silent"]


def test_a_claim_in_no_log_is_its_owners(mailbox: MemoryMailbox, other: Owner) -> None:
    mailbox.put_if_absent(KEYS.back(FIRST, 0), given_back(2))
    mute = Owner(mailbox, "mute")
    mute.claim(FIRST, 1)
    me = Waiting(mailbox)
    assert me.looks(6) == []
    assert me.recovery.waits_for == {"mute": 1}
    assert me.looks(2) == ["silent"]
    assert me.begin(FIRST, 1) == 2, "where the attempt began"


def test_a_claim_after_its_owners_last_log_is_not_held_against_a_log_read_before(
    mailbox: MemoryMailbox, other: Owner
) -> None:
    mailbox.put_if_absent(KEYS.back(FIRST, 0), given_back(2))
    third = Owner(mailbox, "third")
    third.claim(FIRST, 1)
    third.log()
    me = Waiting(mailbox)
    me.looks(6)
    third.book.release(("", FIRST, 1))
    third.log()
    mailbox.put_if_absent(KEYS.back(FIRST, 1), given_back(2))
    third.claim(FIRST, 2, held=False)
    assert me.looks(6) == []
    assert me.looks(2) == ["silent"]


def test_a_note_that_all_is_trained_is_enough(mailbox: MemoryMailbox, other: Owner) -> None:
    mailbox.put_if_absent(RUN.whole("third", "0003", ""), WholeRecord(units=2).encode())
    me = Waiting(mailbox)
    me.look()
    assert me.recovery.over
    assert [type(call) for call in me.calls] == [List]


def test_what_earlier_pages_say_counts(mailbox: MemoryMailbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardqueue.learner.PAGE_SPANS", 1)
    owner = Owner(mailbox)
    for unit in (SECOND, FIRST):
        owner.finish(unit)
        owner.log()
    owner.log()
    assert len(mailbox.list(RUN.learners)) == 3
    me = Waiting(mailbox)
    me.look()
    assert me.recovery.over


def test_a_note_of_another_pass_says_nothing_of_this_one(mailbox: MemoryMailbox, other: Owner) -> None:
    mailbox.put_if_absent(RUN.whole("third", "0003", "e1"), WholeRecord(units=2).encode())
    me = Waiting(mailbox)
    me.look()
    assert not me.recovery.over


def test_who_sees_that_all_is_trained_leaves_a_note(mailbox: MemoryMailbox, other: Owner) -> None:
    other.train(FIRST, 2, 4)
    other.log()
    me = Waiting(mailbox)
    me.look()
    assert me.recovery.over
    assert mailbox.get(RUN.whole("me", "0000", "")) == WholeRecord(units=2).encode()


@pytest.mark.parametrize("rounds", range(4))
def test_of_many_who_wait_a_few_read_the_logs_and_more_as_time_passes(
    mailbox: MemoryMailbox, rounds: int
) -> None:
    learners = [Owner(mailbox, f"learner-{number:02d}") for number in range(64)]
    learners[0].finish(SECOND)
    learners[0].claim(FIRST)
    for learner in learners:
        learner.log()
    reading = 0
    for seed in range(200):
        me = Waiting(mailbox, Random(seed))
        me.recovery.began = me.now - rounds * AFTER
        me.look(0.5)
        reading += any(isinstance(call, Get) for call in me.calls)
    expected = 200 * READERS * 2**rounds / 64
    assert 0.5 * expected <= reading <= 1.6 * expected


def test_our_own_claim_that_could_not_be_given_back_is_ended(mailbox: MemoryMailbox) -> None:
    mine = Owner(mailbox, "me")
    mine.book.instance = "0000"
    mine.finish(SECOND)
    mine.claim(FIRST, held=False)
    me = Waiting(mailbox)
    me.held.add((FIRST, 0))
    for _ in range(20):
        mine.log()
        assert me.look() == [], "it is in our hands"
    me.held.clear()
    assert me.looks(20) == [], "our log may not say it yet"
    ended: list[str] = []
    for _ in range(OWN_WRITES):
        mine.log()
        assert not ended
        ended += me.look()
    assert ended == ["left"]


def test_our_own_claim_is_not_ended_by_a_log_read_long_before(mailbox: MemoryMailbox) -> None:
    mine = Owner(mailbox, "me")
    mine.book.instance = "0000"
    mine.finish(SECOND)
    mine.log()
    me = Waiting(mailbox)
    me.look()
    for _ in range(5):
        mine.log()
    mine.claim(FIRST)
    mine.train(FIRST, 0, 4)
    assert me.looks(5) == [], "trained, and our log does not say it yet"
    mine.log()
    me.look()
    assert me.recovery.over
