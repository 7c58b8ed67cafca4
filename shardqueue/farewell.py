"""Giving back: what is said, in the mailbox and to people, of claims that were not trained whole.

Whoever leaves writes one record an attempt; the record that is there first counts, so writing it again is harmless.
A mailbox that does not answer is tried until the time is up, and what could not be offered is named all the same.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from shardqueue.callers import Callers
from shardqueue.errors import MailboxUnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardqueue.clock import Clock
    from shardqueue.mailbox import Mailbox
    from shardqueue.mailbox.calls import PutIfAbsent

NAMED = 8
"""Units that a line of the log names, at most."""
AT_ONCE = 16
PAUSE = 0.2
"""Seconds between two tries."""


@dataclass(frozen=True, slots=True)
class Returned:
    """A claim that was not trained whole when its feed was left.

    Attributes:
        unit: its identifier.
        attempt: which claim of the unit it was.
        begin: the batch at which whoever claims it next begins.
        unclear: batches just before `begin` that were handed out and may or may not have been trained.
        offered: whether the record that lets others claim it was written.
        ours: whether it was proven to be ours; if not, it may be nobody's.
    """

    unit: str
    attempt: int
    begin: int
    unclear: int
    offered: bool
    ours: bool = True


def offer(calls: Sequence[PutIfAbsent], mailbox: Mailbox, by: float, clock: Clock) -> list[bool]:
    """Write the records, several at once, each until it is there or the clock says `by`; say which are there."""
    if not calls:
        return []
    insist = partial(_insist, mailbox=mailbox, by=by, clock=clock)
    try:
        with Callers(min(AT_ONCE, len(calls)), "shardqueue-farewell") as pool:
            return list(pool.map(insist, calls))
    except RuntimeError:  # no thread can be started any more: see `callers`
        return list(map(insist, calls))


def _insist(call: PutIfAbsent, mailbox: Mailbox, by: float, clock: Clock) -> bool:
    while True:
        try:
            call.perform(mailbox)
        except MailboxUnavailableError:
            if clock.monotonic() >= by:
                return False
            threading.Event().wait(PAUSE)
        except Exception:  # named in what is returned; leaving goes on
            return False
        else:
            return True


def say(returned: Sequence[Returned]) -> str:
    """All in one line, the first few by name."""
    names = [_say_one(claim) for claim in returned[:NAMED]]
    more = len(returned) - len(names)
    return "; ".join(names) + (f"; and {more} more units" if more else "")


def _say_one(returned: Returned) -> str:
    what = "given back" if returned.offered else "could not be given back, so nobody will train it"
    if not returned.ours:
        what = "was asked for and never answered: it may or may not be ours"
    unclear = f", {returned.unclear} before it perhaps not trained" if returned.unclear else ""
    return f"{returned.unit} from batch {returned.begin} {what}{unclear}"
