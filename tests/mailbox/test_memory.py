from __future__ import annotations

import copy
import pickle
import sys
from functools import partial
from typing import TYPE_CHECKING

import pytest
from mailbox_contract import MailboxContract, in_child, race

from shardqueue.errors import MailboxRefusedError
from shardqueue.mailbox import Mailbox, open_mailbox
from shardqueue.mailbox.memory import MemoryMailbox

if TYPE_CHECKING:
    from collections.abc import Iterator


class TestMemory(MailboxContract):
    store = "one process"
    many = 3000

    @pytest.fixture
    def mailbox(self) -> Mailbox:
        return MemoryMailbox()

    def test_refuses_to_be_pickled(self, mailbox: Mailbox) -> None:
        with pytest.raises(MailboxRefusedError, match="open a folder or a bucket"):
            pickle.dumps(mailbox)

    @pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
    def test_refuses_a_forked_process(self, mailbox: Mailbox) -> None:
        error = in_child("fork", mailbox)
        assert isinstance(error, MailboxRefusedError)
        assert "open a folder or a bucket" in str(error)

    def test_a_copy_is_the_same_mailbox(self, mailbox: Mailbox) -> None:
        assert copy.deepcopy({"mailbox": mailbox})["mailbox"] is mailbox


@pytest.fixture
def eager_threads() -> Iterator[None]:
    """Let threads change over as often as they can, so that a missing lock shows."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


def test_threads_race(eager_threads: None) -> None:
    mailbox = MemoryMailbox()

    def claim_all(learner: int) -> int:
        body = f"learner {learner}".encode()
        return sum(mailbox.put_if_absent(f"{unit * 7919 % 3000:04d}", body) for unit in range(3000))

    won = race([partial(claim_all, learner) for learner in range(8)])
    assert sum(won) == 3000
    assert mailbox.list("") == [f"{unit:04d}" for unit in range(3000)]


def test_one_name_is_one_mailbox() -> None:
    one = open_mailbox("memory://test_memory/one")
    assert open_mailbox("memory://test_memory/one") is one
    assert open_mailbox("memory://test_memory/other") is not one
    assert open_mailbox("memory://") is open_mailbox("memory://")
    assert repr(one) == "MemoryMailbox('test_memory/one')"


def test_mailboxes_made_by_hand_are_their_own() -> None:
    one, other = MemoryMailbox("a"), MemoryMailbox("a")
    one.put("k", b"1")
    assert other.get("k") is None
    assert repr(MemoryMailbox()) == "MemoryMailbox()"


def test_keys_stay_sorted_through_splits_and_removals() -> None:
    mailbox = MemoryMailbox()
    keys = [f"{number * 7919 % 10_000:05d}" for number in range(10_000)]
    for key in keys:
        mailbox.put_if_absent(key, b"1")
    assert mailbox.list("") == sorted(keys)
    mailbox.delete(keys[::3])
    left = sorted(set(keys) - set(keys[::3]))
    assert mailbox.list("") == left
    for place in (0, 1, 999, 3000, len(left) - 1):
        assert mailbox.list("", after=left[place], limit=5) == left[place + 1 : place + 6]
    mailbox.delete(keys)
    assert mailbox.list("") == []
    mailbox.put("again", b"1")
    assert mailbox.list("") == ["again"]
