"""The loader workers of one tracked iteration, as the training process sees them.

The workers claim; what is trained is known here. So this side keeps account of every claim they tell of, and gives
back what was not trained when the loop is left: first the workers are stopped, then the records are written. A worker
that was killed is given back for like the others. What it had claimed and not told is lost.

It is a `session.Source`. Messages of the workers are read whenever something is asked of it; nothing here waits but
`close`.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardqueue.block import Doing, Told, pass_name, pass_of
from shardqueue.errors import ClosedError
from shardqueue.farewell import Returned, offer, say
from shardqueue.learner import is_running
from shardqueue.mailbox.calls import PutIfAbsent
from shardqueue.records import BackRecord

if TYPE_CHECKING:
    from shardqueue.block import Block, Message, Pipe
    from shardqueue.plan import Plan
    from shardqueue.session import Session
    from shardqueue.units import Step

logger = logging.getLogger("shardqueue")

LOOK_EVERY = 0.005
"""Seconds between two looks whether the workers have stopped."""


@dataclass(slots=True)
class Held:
    """A claim that is not known to be trained whole. Batches count from the unit's first."""

    identifier: str
    attempt: int
    begin: int | None = None
    end: int | None = None
    done: int = 0
    unclear: int = 0

    @property
    def finished(self) -> bool:
        """Whether every batch of the attempt is trained."""
        return self.end is not None and self.done >= self.end and not self.unclear


class Crew:
    """The workers of the iteration `word`, in the pass of that iteration.

    Attributes:
        drained: the loop came to the loader's end.
        returned: after closing, the claims that were not trained whole.
    """

    def __init__(self, plan: Plan, session: Session, block: Block, pipe: Pipe, word: int) -> None:
        self.tracked = True
        self.drained = False
        self.returned: tuple[Returned, ...] = ()
        self._plan, self._session = plan, session
        self._block, self._pipe, self._word = block, pipe, word
        self._pass = pass_name(pass_of(word))
        self._held: dict[tuple[str, int], Held] = {}
        self._lock = threading.RLock()
        self._closed = self._manned = False

    @property
    def manned(self) -> bool:
        """Whether a worker has taken part."""
        self._manned = self._manned or bool(self._block.workers(self._word))
        return self._manned

    @property
    def grade(self) -> int | None:
        """The session knows how fast its loop is; this is asked before each log, so it is a time to hear."""
        self._hear()
        return None

    def trained(self, step: Step) -> None:
        """One batch that reached the loop is trained."""
        self._hear()
        with self._lock:
            held = self._find(step.unit, step.attempt)
            held.done = max(held.done, step.index + 1)
            self._settle(held)

    def stop(self) -> None:
        """The loop was left: the workers are to claim no more."""
        self._block.leave(self._word)

    def replace(self) -> None:
        """Another source of this learner begins on the same pass."""
        self.close(failed=False)

    def close(self, failed: bool) -> None:
        """Stop the workers, and give back what was claimed and not trained."""
        if self._closed:
            return
        self._closed = True
        by = self._session.clock.monotonic() + self._session.farewell
        self.stop()
        ended = self.drained and self._ended()
        self._session.settle(failed, ended)
        try:
            self._wait(by)
            self._give_back("error" if failed else "early", by)
        finally:
            self._session.dismiss(self, self._pass, ended)

    # -- inside ------------------------------------------------------------------------------------------

    def _hear(self) -> None:
        with self._lock:
            for message in self._pipe.receive():
                if message.word == self._word:
                    self._note(message)

    def _note(self, message: Message) -> None:
        held = self._find(self._plan.identifier(message.position), message.attempt)
        if message.told is Told.CLAIMED:
            held.begin = message.value
            self._session.claimed(self._pass, held)
        elif held.begin is not None:
            held.end = held.begin + message.value
        self._settle(held)

    def _find(self, identifier: str, attempt: int) -> Held:
        return self._held.setdefault((identifier, attempt), Held(identifier, attempt))

    def _settle(self, held: Held) -> None:
        if held.finished:
            del self._held[held.identifier, held.attempt]
            self._session.released(self._pass, held)

    def _ended(self) -> bool:
        doing = {doing for _, _, doing in self._block.workers(self._word)}
        return Doing.ENDED in doing and doing <= {Doing.ENDED, Doing.YIELDED}

    def _wait(self, by: float) -> None:
        """Until no worker claims any more, and all have told what they had claimed."""
        while busy := self._busy():
            if self._session.clock.monotonic() >= by:
                names = ", ".join(map(str, busy))
                logger.warning(
                    "loader workers %s did not stop in time; what they claim is not given back", names
                )
                break
            self._hear()
            threading.Event().wait(LOOK_EVERY)
        self._hear()

    def _busy(self) -> list[int]:
        return [
            worker
            for worker, pid, doing in self._block.workers(self._word)
            if doing is Doing.CLAIMING and is_running(pid)
        ]

    def _give_back(self, why: str, by: float) -> None:
        session = self._session
        if session.joined is None:
            raise ClosedError("the run of this iteration was never agreed on")
        with self._lock:
            for step in session.in_hand(self._pass) if session.counts_coming_back else []:
                held = self._find(step.unit, step.attempt)
                held.unclear += 1
                held.done = max(held.done, step.index + 1)
            kept = [held for held in self._held.values() if held.begin is not None]
            self._held = {}
        keys = session.joined.keys.pass_keys(self._pass)
        begins = [max(held.begin or 0, held.done) for held in kept]
        calls = [
            PutIfAbsent(keys.back(held.identifier, held.attempt), self._record(begin, why))
            for held, begin in zip(kept, begins, strict=True)
        ]
        wrote = offer(calls, session.mailbox, by, session.clock)
        self.returned = tuple(
            Returned(held.identifier, held.attempt, begin, held.unclear, done)
            for held, begin, done in zip(kept, begins, wrote, strict=True)
        )
        for held in kept:
            session.released(self._pass, held)
        if self.returned:
            logger.warning("%s left early: %s", session.learner_id, say(self.returned))

    def _record(self, begin: int, why: str) -> bytes:
        session = self._session
        return BackRecord(
            begin=begin, learner=session.learner_id, instance=session.instance, why=why
        ).encode()
