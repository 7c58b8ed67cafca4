"""The loader workers of one tracked iteration, as the training process sees them.

The workers claim; what is trained is known here. So this side keeps account of every claim they tell of, and gives
back what was not trained when the loop is left: first the workers are stopped, then the records are written. A worker
that was killed is given back for like the others; what it had just asked for is looked up in the mailbox.

It is a `session.Source`. A thread of its own reads the pipe and gives back, because the main thread may be
interrupted anywhere: by Ctrl-C, and by torch, which raises there at the moment a worker dies.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardqueue.block import Doing, Told
from shardqueue.errors import ClosedError, ShardQueueError
from shardqueue.farewell import Returned, offer, say
from shardqueue.learner import is_running
from shardqueue.mailbox.calls import PutIfAbsent
from shardqueue.records import BackRecord, ClaimRecord

if TYPE_CHECKING:
    from shardqueue.block import Block, Message, Pipe
    from shardqueue.plan import Plan
    from shardqueue.records import PassKeys
    from shardqueue.session import Session
    from shardqueue.units import Step

logger = logging.getLogger("shardqueue")

HEAR_EVERY = 0.05
"""Seconds between two readings of the pipe."""
INTERRUPTIONS = 16
"""How often leaving is taken up again."""
LOOK_EVERY = 0.005
"""Seconds between two looks whether the workers have stopped."""


@dataclass(slots=True)
class Held:
    """A claim of ours that is not known to be trained whole. Batches count from the unit's first.

    `end` is where it ended, once it was loaded whole; until then `cut` or `due` say where it will, if they do.
    """

    identifier: str
    attempt: int
    begin: int = 0
    end: int | None = None
    done: int = 0
    unclear: int = 0
    due: int | None = None
    cut: int | None = None
    given: bool = False

    @property
    def sure(self) -> int:
        """Batches that are certainly ours."""
        end = self.end
        if end is None and self.due is not None:  # a unit of unknown size may end before it is cut
            end = self.due if self.cut is None else self.cut
        return (self.done if end is None else end) - self.begin

    @property
    def finished(self) -> bool:
        """Whether every batch of the attempt is trained."""
        return self.end is not None and max(self.begin, self.done) >= self.end and not self.unclear


class Crew:
    """The workers of the iteration `word`, in the pass of that iteration, of whose plan `plan` is left.

    Attributes:
        plan: the units, also those trained before the run.
        drained: the loop came to the loader's end.
        returned: after closing, the claims that were not trained whole.
    """

    plan: Plan

    def __init__(self, plan: Plan, session: Session, block: Block, pipe: Pipe, word: int, pass_: str) -> None:
        self.tracked = True
        self.drained = False
        self.returned: tuple[Returned, ...] = ()
        self.plan, self._session = plan.origin, session
        self._plan = plan
        self._block, self._pipe, self._word = block, pipe, word
        self._pass = pass_
        self._held: dict[tuple[str, int], Held] = {}
        self._asked: dict[tuple[int, str, int], int] = {}
        self._revoked: set[tuple[str, int]] = set()
        self._finished = self._heard = 0
        self._lock = threading.RLock()
        self._closed = self._manned = False
        self._failed = self._over = self._dismissed = False
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._work, name="shardqueue-crew", daemon=True)

    @property
    def manned(self) -> bool:
        """Whether a worker has taken part."""
        self._manned = self._manned or bool(self._block.workers(self._word))
        return self._manned

    def took(self, step: Step, now: float, each: float | None) -> None:
        """A batch reached the loop: its worker learns how far ahead it is."""
        self._listen()
        if step.worker != "main":
            self._block.took(int(step.worker), now, each)

    def trained(self, step: Step) -> None:
        """One batch that reached the loop is trained."""
        with self._lock:
            held = self._find(step.unit, step.attempt)
            held.done = max(held.done, step.index + 1)
            self._settle(held)

    def revoke(self, step: Step) -> None:
        """Others have taken over this batch and what follows it in its unit: we had been silent for too long."""
        with self._lock:
            self._revoked.add((step.unit, step.attempt))
            held = self._held.pop((step.unit, step.attempt), None)
        if held is not None:
            self._session.released(self._pass, held)

    def poke(self) -> None:
        """What the session allows has changed."""
        self._block.allowance = self._session.allowance(self._pass)

    @property
    def committed(self) -> int:
        """Batches that are certainly ours: handed out, in hand, or of claims whose size is known."""
        self._hear()
        with self._lock:
            return self._finished + sum(held.sure for held in self._held.values())

    @property
    def settled(self) -> bool:
        """Whether every claim that was asked for is decided, and every surplus can be taken by others."""
        self._hear()
        with self._lock:
            return not self._asked and all(held.cut is None or held.given for held in self._held.values())

    @property
    def ends_known(self) -> bool:
        """Whether it is known of every claim in hand where it ends, so that no surplus can come of it."""
        self._hear()
        with self._lock:
            return all((held.end, held.due, held.cut) != (None, None, None) for held in self._held.values())

    @property
    def events(self) -> int:
        """Grows with every claim that is asked for, and every surplus given back."""
        self._hear()
        return self._heard

    def stop(self) -> None:
        """The loop was left: the workers are to claim no more."""
        self._block.leave(self._word)

    def replace(self) -> None:
        """Another source of this learner begins on the same pass."""
        self.close(failed=False)

    def close(self, failed: bool) -> None:
        """Stop the workers, and give back what was claimed and not trained.

        torch raises in the main thread when a worker dies, be it while we leave; that must not cut leaving short, nor
        replace the reason for which the loop is left.
        """
        for _ in range(INTERRUPTIONS):
            try:
                self._close(failed)
                return
            except RuntimeError as error:
                if type(error) is not RuntimeError:
                    raise
                logger.warning("%s, leaving: %s", self._session.learner_id, error)

    def _close(self, failed: bool) -> None:
        if self._dismissed:
            return
        self._failed = failed
        self.stop()
        if not self._closed:
            self._closed = True
            self._session.settle(failed, self._ended)
        self._listen()
        self._leaving.set()
        while not self._over:  # no join: interrupted once, it takes a running thread for ended
            time.sleep(LOOK_EVERY)
        if self._ended:
            self._block.finish(self._word)
        self._dismissed = True
        self._session.dismiss(self, self._pass, self._ended)

    def _listen(self) -> None:
        """Begin to read the pipe: when the workers are started, so that they are not forked beside this thread."""
        if self._thread.ident is None:
            with suppress(RuntimeError):  # started already, by a call that was interrupted
                self._thread.start()

    # -- inside ------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while not self._leaving.wait(HEAR_EVERY):
                self._block.landed = self._session.landed
                self._hear()
            by = self._session.clock.monotonic() + self._session.farewell
            self._wait(by)
            self._give_back("error" if self._failed else "early", by)
        finally:
            self._over = True

    def _hear(self) -> None:
        with self._lock:
            for message in self._pipe.receive():
                if message.word == self._word:
                    self._note(message)

    def _note(self, message: Message) -> None:
        self._heard += 1
        claim = self._plan.identifier(message.position), message.attempt
        if claim in self._revoked:
            return
        if message.told is Told.ASKED:
            self._asked[message.worker, *claim] = message.value
        elif message.told is Told.LOST:
            self._asked.pop((message.worker, *claim), None)
        elif message.told is Told.CLAIMED:
            held = self._find(*claim)
            held.begin = self._asked.pop((message.worker, *claim), message.value)
            held.due = self._plan.batches(message.position)
            self._session.claimed(self._pass, held)
        elif message.told is Told.CUT:
            self._find(*claim).cut = message.value
        elif message.told is Told.GIVEN:
            self._given(self._find(*claim))
        else:
            held = self._find(*claim)
            held.end = held.begin + message.value
            self._settle(held)

    def _find(self, identifier: str, attempt: int) -> Held:
        return self._held.setdefault((identifier, attempt), Held(identifier, attempt))

    def _settle(self, held: Held) -> None:
        if held.finished and (held.cut is None or held.given):
            del self._held[held.identifier, held.attempt]
            self._finished += held.sure
            self._session.released(self._pass, held, held.end if held.cut is None else None)

    def _given(self, held: Held) -> None:
        held.given = True
        self._settle(held)

    @property
    def _ended(self) -> bool:
        doing = {doing for _, _, doing in self._block.workers(self._word)}
        return self.drained and Doing.ENDED in doing and doing <= {Doing.ENDED, Doing.YIELDED}

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
            keys = session.joined.keys.pass_keys(self._pass)
            self._find_claims_of_the_dead(keys)
            kept: list[Held] = []
            cut: list[Held] = []
            for held in self._held.values():
                (kept if held.cut is None else cut).append(held)
            self._held = {}
        begins = [max(held.begin, held.done) for held in kept]
        calls = [
            PutIfAbsent(keys.back(held.identifier, held.attempt), self._record(begin, why))
            for held, begin in zip(kept, begins, strict=True)
        ]
        wrote = offer(calls, session.mailbox, by, session.clock)
        self.returned = tuple(
            Returned(held.identifier, held.attempt, begin, held.unclear, done)
            for held, begin, done in zip(kept, begins, wrote, strict=True)
        )
        for held in (*kept, *cut):
            session.released(self._pass, held)
        if self.returned:
            logger.log(session.loudness, "%s left early: %s", session.learner_id, say(self.returned))

    def _find_claims_of_the_dead(self, keys: PassKeys) -> None:
        """A worker that was killed may have made a claim before it could say so."""
        for (worker, identifier, attempt), begin in self._asked.items():
            key = keys.claim(identifier, attempt)
            try:
                data = self._session.mailbox.get(key)
                record = None if data is None else ClaimRecord.decode(data, key)
            except ShardQueueError as error:
                logger.warning("%s may be ours, and is not given back: %s", key, error)
                continue
            if record and (record.instance, record.worker) == (self._session.instance, str(worker)):
                self._find(identifier, attempt).begin = begin
        self._asked = {}

    def _record(self, begin: int, why: str) -> bytes:
        session = self._session
        return BackRecord(
            begin=begin, learner=session.learner_id, instance=session.instance, why=why
        ).encode()
