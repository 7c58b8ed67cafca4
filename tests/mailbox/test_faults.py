from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
from mailbox_contract import MailboxContract, race

from shardqueue.errors import InvalidInputError, MailboxUnavailableError
from shardqueue.mailbox.faults import Counted, Delayed, LostResponse, Outage
from shardqueue.mailbox.files import FileMailbox
from shardqueue.mailbox.memory import MemoryMailbox

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shardqueue.mailbox import Mailbox


class TestWrapped(MailboxContract):
    """All faults stacked, none active: still a mailbox."""

    @pytest.fixture
    def mailbox(self) -> Mailbox:
        return Delayed(Counted(Outage(LostResponse(MemoryMailbox(), when=lambda verb, key: False))), 0.0)


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


@pytest.mark.parametrize(
    "arguments", [{}, {"every": 0}, {"every": 1, "when": lambda verb, key: True}], ids=len
)
def test_lost_response_wants_one_rule(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError):
        LostResponse(MemoryMailbox(), **arguments)


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
