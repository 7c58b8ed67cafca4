from __future__ import annotations

import threading

import pytest

from shardqueue.errors import MailboxError, MailboxRefusedError
from shardqueue.mailbox.faults import Counted, Outage
from shardqueue.mailbox.memory import MemoryMailbox
from shardqueue.mailbox.probe import prove_exclusive, prove_races


class Overwrites(MemoryMailbox):
    """Ignores the condition, as s3rver does."""

    def put_if_absent(self, key: str, data: bytes) -> bool:
        self.put(key, data)
        return True


class OverwritesAndDenies(MemoryMailbox):
    """Overwrites, and says that it did not."""

    def put_if_absent(self, key: str, data: bytes) -> bool:
        fresh = self.get(key) is None
        self.put(key, data)
        return fresh


class NeverCreates(MemoryMailbox):
    def put_if_absent(self, key: str, data: bytes) -> bool:
        return False


class Forgets(MemoryMailbox):
    def get(self, key: str) -> bytes | None:
        return None


@pytest.mark.parametrize("store", [Overwrites, OverwritesAndDenies, NeverCreates, Forgets])
def test_a_store_that_is_not_exclusive_is_refused(store: type[MemoryMailbox]) -> None:
    mailbox = store("lying")
    with pytest.raises(MailboxRefusedError, match=r"lying.*create is not exclusive.*folder"):
        prove_exclusive(mailbox)
    assert mailbox.list("") == []


class ChecksThenActs(MemoryMailbox):
    """Whoever has checked waits until all have, then writes: the widest gap there can be."""

    def __init__(self, contenders: int) -> None:
        super().__init__("hasty")
        self._all_checked = threading.Barrier(contenders)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        absent = self.get(key) is None
        self._all_checked.wait()
        if absent:
            self.put(key, data)
        return absent


def test_a_race_finds_what_the_proof_in_turn_cannot() -> None:
    prove_exclusive(ChecksThenActs(1))
    mailbox = ChecksThenActs(8)
    with pytest.raises(MailboxRefusedError, match=r"hasty.*let 8 of 8 threads create one key.*not exclusive"):
        prove_races(mailbox)
    assert mailbox.list("") == []


class TellsTheWrongOne(MemoryMailbox):
    """One wins, and the bytes of another stand."""

    def put_if_absent(self, key: str, data: bytes) -> bool:
        won = super().put_if_absent(key, data)
        if not won:
            self.put(key, data)
        return won


def test_a_race_looks_at_what_stands() -> None:
    with pytest.raises(MailboxRefusedError, match="did not keep the bytes of the one that created a key"):
        prove_races(TellsTheWrongOne("wrong"))


def test_races_are_won_by_one_and_leave_nothing() -> None:
    mailbox = Counted(MemoryMailbox())
    prove_races(mailbox, races=3, contenders=4)
    assert mailbox.counts == {"put_if_absent": 12, "get": 3, "delete": 1}
    assert mailbox.list("") == []


def test_an_outage_in_a_race_passes_through() -> None:
    mailbox = Outage(MemoryMailbox())
    mailbox.down()
    with pytest.raises(MailboxError, match="is down"):
        prove_races(mailbox)


def test_costs_two_creates_a_read_and_a_delete() -> None:
    mailbox = Counted(MemoryMailbox())
    prove_exclusive(mailbox)
    assert mailbox.counts == {"put_if_absent": 2, "get": 1, "delete": 1}


def test_never_uses_a_key_twice() -> None:
    class KeepsAll(MemoryMailbox):
        def delete(self, keys: object) -> None:
            raise MailboxError("may not delete")

    mailbox = KeepsAll()
    for _ in range(3):
        prove_exclusive(mailbox, key_prefix="run-2/probe/")
    assert len(mailbox.list("run-2/probe/")) == 3


def test_an_outage_passes_through() -> None:
    mailbox = Outage(MemoryMailbox())
    mailbox.down()
    with pytest.raises(MailboxError, match="is down"):
        prove_exclusive(mailbox)
