from __future__ import annotations

import pytest

from shardqueue.errors import MailboxError, MailboxRefusedError
from shardqueue.mailbox.faults import Counted, Outage
from shardqueue.mailbox.memory import MemoryMailbox
from shardqueue.mailbox.probe import prove_exclusive


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
