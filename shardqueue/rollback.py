"""A learner comes back into a run that went on without it, from a state that is older than its last log.

What it trained after that state is gone with the model it had. So before it claims anything, it ends the attempts of
its earlier instance where the state says that training came to, and whoever claims them next trains the rest again.
Where such a record is there already and says more, because the earlier instance had left in order, the batches
between the two are trained by nobody, and that is said.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from shardqueue.errors import ShardQueueError
from shardqueue.farewell import offer
from shardqueue.learner import seen_here
from shardqueue.logreader import LogReader
from shardqueue.mailbox.calls import PutIfAbsent
from shardqueue.records import BackRecord, pass_number
from shardqueue.trained import untrained

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardqueue.claim import Owner
    from shardqueue.clock import Clock
    from shardqueue.ledger import Ledger
    from shardqueue.mailbox import Mailbox
    from shardqueue.plan import Plan
    from shardqueue.records import TrainedSpan
    from shardqueue.run import Joined
    from shardqueue.state import State

logger = logging.getLogger("shardqueue")

WITHIN = 30.0
"""Seconds for which a mailbox that does not answer is tried."""
RESUMED = "resumed"
"""Why an attempt is ended here."""
NAMED = 8

Attempt = tuple[str, str, int]


class Rollback:
    """Ends the attempts of the earlier instances of a learner, in a thread of its own.

    Args:
        joined: the run.
        state: what the learner goes on from, taken in this run.
        plan: the units, also those trained before the run.
        me: who we are.
    """

    def __init__(
        self, joined: Joined, state: State, plan: Plan, me: Owner, mailbox: Mailbox, clock: Clock
    ) -> None:
        self._joined, self._state, self._plan, self._me = joined, state, plan, me
        self._mailbox, self._clock = mailbox, clock
        self._earlier = {writer for writer in state.writers if writer[0] == me.learner}
        self._earlier.discard((me.learner, me.instance))
        self._lock = threading.Lock()
        self._waiting: list[Callable[[], None]] = []
        self._over = not self._earlier
        self._thread = threading.Thread(target=self._work, name="shardqueue-rollback", daemon=True)
        if not self._over:
            self._thread.start()

    def is_over(self, then: Callable[[], None]) -> bool:
        """Whether all is done; if not, `then` is called once it is, in another thread."""
        with self._lock:
            if not self._over:
                self._waiting.append(then)
            return self._over

    def finish(self) -> None:
        """Wait for it."""
        if self._thread.ident is not None:
            self._thread.join()

    def _work(self) -> None:
        try:
            self._give_back()
        except ShardQueueError as error:
            logger.warning("what %s trained after its state is not given back: %s", self._me.learner, error)
        finally:
            with self._lock:
                self._over, waiting = True, self._waiting
            for then in waiting:
                then()

    def _give_back(self) -> None:
        reader = LogReader(self._mailbox, self._joined.keys)
        ledger = reader.read(lambda process: process[:2] in self._earlier)
        for log in ledger.logs.values():
            if log.newest.left is None and seen_here(log.newest.where):
                logger.warning(
                    "%s goes on from a state whose writer, process %d, is alive: what that trained stays its own",
                    *(self._me.learner, log.newest.where.pid),
                )
                return
        begins = self._begins(ledger)
        calls = [self._record(attempt, begin) for attempt, begin in begins.items()]
        offered = offer(calls, self._mailbox, self._clock.monotonic() + WITHIN, self._clock)
        lost: dict[Attempt, int] = {}
        for (attempt, begin), call, done in zip(begins.items(), calls, offered, strict=True):
            data = self._mailbox.get(call.key) if done else None
            found = begin if data is None else BackRecord.decode(data, call.key).begin
            if found > begin:
                lost[attempt] = found - begin
        if begins:
            logger.info("%s: %d attempts of its earlier instance ended", self._me.learner, len(begins))
        if lost:
            self._warn(lost)

    def _begins(self, ledger: Ledger) -> dict[Attempt, int]:
        """Where each attempt is to end that was not trained to its end, or beyond the state."""
        begins: dict[Attempt, int] = {}
        for _, span in ledger.spans():
            begin = self._kept(span)
            if begin < span.end or not span.whole:
                attempt = span.pass_, span.unit, span.attempt
                begins[attempt] = min(begin, begins.get(attempt, begin))
        return begins

    def _kept(self, span: TrainedSpan) -> int:
        """The first batch of a span that is not in the state; its end if all are."""
        position = self._plan.find(span.unit)
        trained = self._state.passes.get(span.pass_)
        if position is None or pass_number(span.pass_) is None:
            return span.end
        start = self._joined.start
        before = None if start is None else start.passes.get(span.pass_)
        skipped = None if before is None else before.parts.get(position)
        for index in range(span.begin, span.end):
            (place, _), *_ = untrained(skipped, index, index + 1)
            if trained is None or not trained.has(position, place):
                return index
        return span.end

    def _record(self, attempt: Attempt, begin: int) -> PutIfAbsent:
        pass_, unit, number = attempt
        record = BackRecord(begin=begin, learner=self._me.learner, instance=self._me.instance, why=RESUMED)
        return PutIfAbsent(self._joined.keys.pass_keys(pass_).back(unit, number), record.encode())

    def _warn(self, lost: dict[Attempt, int]) -> None:
        names = [f"{batches} batches of unit {unit}" for (_, unit, _), batches in lost.items()]
        more = f", and of {len(names) - NAMED} more units" if len(names) > NAMED else ""
        logger.warning(
            "%s left in order, later than the state was taken that it goes on from; what it trained in between is "
            "lost with its model, and nobody trains it again: %s%s; take the state when the loop is left",
            *(self._me.learner, ", ".join(names[:NAMED]), more),
        )
