"""What the other ranks trained up to a step, read from their logs.

A state of ranks that step together is what all of them have trained at one step. Whoever takes it knows its own part
and reads the others' logs, which come every few seconds, and at once from a rank that takes a state too. So it waits
until they have come as far; not for ever, and not for who is gone.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from shardqueue.account import Account
from shardqueue.errors import ShardQueueError
from shardqueue.ledger import index_at
from shardqueue.logreader import LogReader
from shardqueue.peers import Peers
from shardqueue.records import pass_number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardqueue.clock import Clock
    from shardqueue.ledger import Log
    from shardqueue.mailbox import Mailbox
    from shardqueue.peers import Peer
    from shardqueue.plan import Plan
    from shardqueue.records import RunKeys
    from shardqueue.state import State

WAIT = 10.0
"""Seconds for which the others' logs are waited for."""
SOON, LATER = 0.02, 0.5
"""Seconds between two readings: at first, and at most."""


class Gathering:
    """Reads the logs of the ranks that step together.

    Args:
        peers: the other ranks.
        mailbox: where their logs are.
        keys: of the run.
        clock: says how long they are waited for.
    """

    def __init__(self, peers: Sequence[Peer], mailbox: Mailbox, keys: RunKeys, clock: Clock) -> None:
        self._peers = {(peer.learner, peer.instance, "main"): peer for peer in peers}
        self._mailbox, self._keys, self._clock = mailbox, keys, clock
        self._reader = LogReader(mailbox, keys)

    def complete(self, state: State, cut: tuple[str, int], plan: Plan, start: State | None) -> None:
        """Add to a state what the others trained up to step `cut[1]` of pass `cut[0]`.

        Of whom that is not known, `state.missing` says so, and how many batches it may be.

        Args:
            state: holds what this rank trained up to there, and what was trained before the run.
            cut: the step.
            plan: the units, also those trained before the run.
            start: the state that the run began from.
        """
        state.missing = {
            self._peers[owner].learner: _steps_to(self._reader.ledger.logs.get(owner), cut)
            for owner in self._wait_for(cut)
        }
        account = Account(plan, start)
        for _, span in self._reader.ledger.spans():
            ahead = (pass_number(span.pass_) or 0) - (pass_number(cut[0]) or 0)
            if ahead <= 0:
                account.add(span, index_at(span, cut[1]) if ahead == 0 else None)
        account.onto(state.passes)
        logs = self._reader.ledger.logs.values()
        state.samples += sum(log.newest.totals.samples for log in logs)

    def _wait_for(self, cut: tuple[str, int]) -> list[tuple[str, str, str]]:
        """Read until all have come so far; return those who did not."""
        watch = Peers(list(self._peers.values()), self._mailbox, self._keys, self._clock)
        by, pause, last = self._clock.monotonic() + WAIT, SOON, False
        while True:
            with suppress(ShardQueueError):
                self._reader.read(self._peers.__contains__)
            logs = self._reader.ledger.logs
            behind = [owner for owner in self._peers if not _has_reached(logs.get(owner), cut)]
            if not behind or last or self._clock.monotonic() >= by:
                return behind
            gone = {gone.peer for gone in watch.look()}
            last = all(self._peers[owner] in gone for owner in behind)  # and then they are read once more
            threading.Event().wait(0.0 if last else pause)
            pause = min(LATER, 2 * pause)


def _has_reached(log: Log | None, cut: tuple[str, int]) -> bool:
    reached = None if log is None else log.newest.reached
    return reached is not None and _order(reached) >= _order(cut)


def _order(at: tuple[str, int]) -> tuple[int, int]:
    return pass_number(at[0]) or 0, at[1]


def _steps_to(log: Log | None, cut: tuple[str, int]) -> int | None:
    """How many batches a rank may have trained beyond its log; None where that spans more than a pass."""
    reached = None if log is None else log.newest.reached
    if reached is None:
        return cut[1] + 1 if pass_number(cut[0]) == 0 else None
    return cut[1] - reached[1] if reached[0] == cut[0] else None
