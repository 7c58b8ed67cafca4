"""Claiming and loading ahead of one consumer: threads and I/O around `Opening` and `Claims`.

A driving thread polls the protocol's machine and sleeps until something happens; a few threads make its mailbox
calls. Loading is done by one more thread, at most `prefetch` loaded batches ahead of the consumer; or, `inline`, by
the consumer itself when it comes for a batch (a `DataLoader` worker, whose consumer is ahead of training already).
Nothing reaches the consumer before the run's manifest is agreed on and the read-back of its claim agreed. Then:

- nothing left to claim: the threads end, the consumer drains what waits, the iteration ends;
- an error of the loader or the mailbox reaches the consumer after the batches that were loaded before it;
- leaving stops the threads, waits for calls and loads in progress, and gives back what was claimed and not trained.

One lock guards all state; conditions on it wake the driver and the loader, a bell the consumer. A feed reports to its
`Host` also while it holds that lock, so a host never calls a feed while it holds a lock of its own.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections import deque
from random import Random
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from shardqueue.bell import Bell
from shardqueue.callers import Callers
from shardqueue.claim import Claim, Owner, State
from shardqueue.claims import Claims
from shardqueue.errors import ClosedError, LoadError
from shardqueue.farewell import Returned, offer, say
from shardqueue.host import MAIN, Place
from shardqueue.learner import TAIL, seat, seen_here
from shardqueue.loading import Loaded, Reader
from shardqueue.run import Opening, check_joined, new_manifest
from shardqueue.session import FIRST_LOG, warn_twin

if TYPE_CHECKING:
    from shardqueue.asks import Ask, Asks
    from shardqueue.host import Host
    from shardqueue.loading import Load
    from shardqueue.mailbox.calls import Answer
    from shardqueue.plan import Plan
    from shardqueue.recovery import Recovery
    from shardqueue.run import Joined
    from shardqueue.units import Step

logger = logging.getLogger("shardqueue")

CALLERS = 16
"""Mailbox calls under way at once, at most."""
END = 5.0
"""Seconds for which the end of the interpreter waits for a thread."""
OUTAGE = 10.0
"""Seconds of silence of the mailbox after which that is said."""


class Feed:
    """One pass of one learner over a plan, batch by batch.

    `plan`: the units, also those trained before the run. `tracked`: what its consumer takes is reported by
    `Session.track`, further out. `manned`: somebody works for it.

    Args:
        plan: the units.
        host: the entered session it belongs to, or the loader worker.
        load: given a unit's value, yields `(step, batch)` pairs.
        prefetch: loaded batches that may wait.
        run: name of a run to join whatever its state.
        place: which pass, and where among the learner's feeds.
    """

    def __init__(
        self, plan: Plan, host: Host, load: Load, prefetch: int, run: str | None, place: Place = MAIN
    ) -> None:
        self.returned: tuple[Returned, ...] = ()
        self._pid = os.getpid()
        self.tracked, self.manned = False, True
        self.plan = self._plan = plan
        self._host, self._load = host, load
        self._prefetch = 1 if place.inline else prefetch
        self._run, self._place, self._pass = run, place, place.pass_
        self._seat = seat(place.pass_, place.worker)
        self._mailbox, self._clock = host.mailbox, host.clock
        self._owner = Owner(host.learner_id, host.instance, place.worker)
        self._random = Random(os.urandom(16))
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)
        self._room = threading.Condition(self._lock)
        self._ready = Bell()
        self._opening: Opening | None = None
        self._claims: Claims | None = None
        self._to_load: deque[Claim] = deque()
        self._reader: Reader | None = None
        self._buffer: deque[Loaded] = deque()
        self._error: BaseException | None = None
        self.over = False
        self._closing = self._closed = self._exiting = False
        self._closing_since = 0.0
        self._twin = self._warned_twin = False
        self._logged = False
        self._log_by = 0.0
        self._next_outage = OUTAGE
        self._told_empty = self._waits = False
        self._next_waits = 0.0
        self._told_reclaimed = 0
        self._left_why = "this queue was left; its iteration is over"
        self._handed_out = 0
        self._sleeps_until = 0.0
        self._pool = Callers(CALLERS, "shardqueue-mailbox")
        self._threads = [
            threading.Thread(target=self._drive, name="shardqueue-claims", daemon=True),
        ]
        if not place.inline:
            self._threads.append(threading.Thread(target=self._load_all, name="shardqueue-load", daemon=True))

    # -- the consumer's side -----------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to claim and load."""
        self._host.admit(self, self._seat)
        _running.add(self)
        for thread in self._threads:
            thread.start()

    def poke(self) -> None:
        """Something that the driver looks at has changed."""
        with self._lock:
            self._news.notify()

    @property
    def committed(self) -> int:
        """Batches that are certainly ours: handed out, in hand, or of claims whose size is known."""
        with self._lock:
            return 0 if self._claims is None else self._claims.committed

    @property
    def settled(self) -> bool:
        """Whether nothing that others may be waiting for is under way."""
        with self._lock:
            return self._claims is not None and self._claims.settled

    @property
    def ends_known(self) -> bool:
        """Whether it is known of every claim in hand where it ends, so that no surplus can come of it."""
        with self._lock:
            return self._claims is not None and self._claims.ends_known

    @property
    def events(self) -> int:
        """Grows with every claim that is asked for, and every surplus given back."""
        with self._lock:
            return 0 if self._claims is None else self._claims.events

    @property
    def empty_looks(self) -> int:
        """How often it looked for something to claim, and there was nothing."""
        with self._lock:
            return 0 if self._claims is None else self._claims.empty_looks

    def wait_no_more(self) -> None:
        """Where nothing is left to claim, end."""
        with self._lock:
            if self._claims is not None:
                self._claims.waits = False
            self._news.notify()

    @property
    def waiting(self) -> int:
        """Batches that can be taken without waiting.

        Raises:
            Exception: what ended this feed, of the loader or of the mailbox.
        """
        with self._lock:
            if self._error is not None and not self._head_may_come():
                raise self._error
            return sum(loaded.claim.state is State.OURS for loaded in self._buffer)

    def take_if_ready(self) -> tuple[Step, Any] | None:
        """Take the next batch if it waits already.

        Raises:
            StopIteration: nothing is left.
        """
        head = self._head()
        return None if head is None else (head.step, head.batch)

    def take(self) -> tuple[Step, Any]:
        """Wait for the next batch and take it.

        Raises:
            StopIteration: nothing is left.
        """
        began = self._clock.monotonic()
        if not self.tracked:
            self._host.came_back()
        with self._lock:
            if self._claims is not None:
                self._claims.pace.asked(began)
        while True:
            head = self._head()
            if head is not None and (self.tracked or self._host.still_ours(head.step)):
                break
            if head is not None:
                self.revoke(head.step)
            elif self._place.inline and self._loadable():
                self._advance()
            else:
                self._ready.wait()
        if not self.tracked:
            self._host.handed(head.step, self._clock.monotonic() - began)
        if self._twin and not self._warned_twin:
            self._warned_twin = True
            warn_twin(self._owner.learner)
        return head.step, head.batch

    def _head(self) -> Loaded | None:
        """Take the next batch, or None when it has still to come."""
        with self._lock:
            if self._closing:
                if self._exiting and threading.current_thread().daemon:
                    return None  # the end of the interpreter ends this thread
                raise ClosedError(self._left_why)
            if self._claims is not None and self._buffer and self._buffer[0].claim.state is State.OURS:
                return self._hand_out(self._claims)
            if self._error is not None and not self._head_may_come():
                raise self._error
            if self._exhausted():
                self._end()
                raise StopIteration
            self._nudge(self._clock.monotonic())
            return None

    def _end(self) -> None:
        allowed = self._host.allowance(self._seat).batches
        rest = self._place.worker == TAIL
        if not (self.over or self._handed_out or rest) and allowed is None:
            quiet = self._place.reclaim_after is not None or not len(self._plan)
            level = logging.INFO if quiet else self._host.loudness
            logger.log(level, "%s: nothing was left to claim in run %s", self._owner.learner, self._host.run)
        self.over = True

    def _hand_out(self, claims: Claims) -> Loaded:
        head = self._buffer.popleft()
        self._handed_out += 1
        now = self._clock.monotonic()
        claims.handed(head.claim, now)
        self._room.notify()
        self._nudge(now)
        return head

    def _nudge(self, now: float) -> None:
        """Wake the driver if there is something for it to do, or it sleeps too long now."""
        claims = self._claims
        if claims is None or claims.exhausted or claims.due(now):
            self._news.notify()
            return
        wake = claims.wake(now)
        if wake is not None and wake < self._sleeps_until:
            self._news.notify()

    def _head_may_come(self) -> bool:
        claims = self._claims
        return bool(self._buffer) and claims is not None and claims.asks.error is None

    def _exhausted(self) -> bool:
        claims = self._claims
        nothing_waits = not (self._buffer or self._to_load or self._reader)
        return claims is not None and claims.exhausted and nothing_waits and not claims.owes

    def took(self, step: Step, now: float, each: float | None) -> None:
        """A tracked loop took a batch; it was timed when it was handed out."""

    def trained(self, step: Step) -> None:
        """One batch that was handed out is trained."""
        with self._lock:
            claims = self._claims
            claim = None if claims is None else _claim_of(claims, step)
            if claims is not None and claim is not None:
                claim.trained = max(claim.trained, step.index + 1 - claim.begin)
                self._settle(claims, claim)

    def revoke(self, step: Step) -> None:
        """Others have taken over this batch and what follows it in its unit: we had been silent for too long."""
        with self._lock:
            claims = self._claims
            claim = None if claims is None else _claim_of(claims, step)
            if claims is None or claim is None:
                return
            claims.revoke(claim)
            self._buffer = deque(loaded for loaded in self._buffer if loaded.claim is not claim)
            self._to_load = deque(other for other in self._to_load if other is not claim)
            self._host.released(self._pass, claim)
            self._room.notify()
            self._news.notify()

    def _settle(self, claims: Claims, claim: Claim) -> None:
        if claim.finished:
            claims.settle(claim)
            whole_at = claim.begin + int(claim.size) if claim.end is None else None
            self._host.released(self._pass, claim, whole_at)

    # -- leaving -----------------------------------------------------------------------------------------

    def replace(self) -> None:
        """Another queue of this learner begins in this process."""
        self._left_why = (
            f"this queue was left: a later queue of learner id {self._owner.learner!r} in this process closed it; "
            "give queues that are to run side by side their own learner_id"
        )
        self.close(failed=False)

    def close(self, failed: bool) -> None:
        """Stop, wait for what is in progress, and give back what was claimed and not trained.

        `failed`: the consumer left by an exception.
        """
        self._host.settle(failed, ended=self.over)
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._stop()
        try:
            for thread in self._threads:
                if thread.ident is not None:  # a signal may have come before it was started
                    thread.join()
            self._leave_unit()
            if self._place.offers:
                self._give_back("error" if failed else "early")
        finally:
            self._pool.shutdown(wait=True)
            self._host.dismiss(self, self._seat, ended=self.over)

    def stop(self) -> None:
        """Claim and load no more; what that leaves is settled by `close`."""
        with self._lock:
            self._stop()

    def exit(self) -> None:
        """The interpreter ends: stop, and wait for the threads of this process; nothing is given back.

        A consumer in a daemon thread hears nothing of it: it ends with the interpreter.
        """
        if self._pid == os.getpid():
            self._exiting = True
            self.stop()
            for thread in self._threads:
                if thread.ident is not None:
                    thread.join(END)

    def _stop(self) -> None:
        if not self._closing:
            self._closing = True
            self._closing_since = self._clock.monotonic()
        if self._claims is not None:
            self._claims.stop()
        self._room.notify_all()
        self._news.notify_all()
        self._ready.ring()

    def _give_back(self, why: str) -> None:
        claims = self._claims
        if claims is None:
            return
        self._withhold_unclear(claims)
        calls, kept = claims.give_back(why), claims.returnable
        deadline = self._closing_since + self._host.farewell
        wrote = offer(calls, self._mailbox, deadline, self._clock)
        self.returned = tuple(
            Returned(claim.identifier, claim.attempt, claim.begin + claim.trained, claim.unclear, done)
            for claim, done in zip(kept, wrote, strict=True)
        )
        self.returned += tuple(
            Returned(claim.identifier, claim.attempt, claim.begin, 0, offered=False, ours=False)
            for claim in claims.unclear
        )
        for claim in kept:
            self._host.released(self._pass, claim)
        if self.returned:
            logger.log(self._host.loudness, "%s left early: %s", self._owner.learner, say(self.returned))

    def _withhold_unclear(self, claims: Claims) -> None:
        """Batches in the consumer's hands that only coming back would have made trained are not offered again.

        They may be trained already: every batch at most once.
        """
        steps = self._host.in_hand(self._seat) if self._host.counts_coming_back else []
        for step in steps:
            claim = _claim_of(claims, step)
            if claim is not None:
                claim.unclear += 1
                claim.trained = max(claim.trained, step.index + 1 - claim.begin)

    # -- the driving thread ------------------------------------------------------------------------------

    def _drive(self) -> None:
        with self._lock:
            try:
                self._opening = self._open()
                while not self._finished_driving():
                    self._turn()
            except BaseException as error:  # the consumer must hear of it, whatever it is
                self._fail(error)
            finally:
                self._ready.ring()
                self._room.notify_all()
                claims = self._claims
                ended = claims is not None and claims.exhausted
                yielded = claims is not None and claims.yielded
                promised = 0 if claims is None else int(claims.promised)
        self._host.quiet(ended, yielded, promised)

    def _open(self) -> Opening | None:
        joined = self._host.joined
        if joined is not None:
            check_joined(joined, self._plan, self._run, self._place.stage, self._place.reclaim_after)
            self._begin(joined, late=joined.late or not self._place.fresh)
            return None
        stage, state = self._place.stage, self._host.start
        wall, after = self._clock.wall(), self._place.reclaim_after
        manifest = new_manifest(self._plan, self._owner.learner, wall, stage, after, state)
        return Opening(
            *(self._plan, manifest, self._owner, self._run),
            seen=seen_here,
            random=self._random,
            pass_=self._pass,
            stage=stage,
            state=state,
        )

    def _finished_driving(self) -> bool:
        machine = self._machine()
        if self._closing:
            return self._settled(machine)
        if machine.asks.error is not None:
            self._fail(machine.asks.error)
        return self._claims is not None and self._claims.exhausted and self._claims.asks.idle

    def _settled(self, machine: Opening | Claims) -> bool:
        """Once leaving: whether every claim asked for is known to be ours or not, or it took too long."""
        if machine.asks.in_flight:
            return False
        if machine is self._opening or machine.asks.idle or machine.asks.error is not None:
            return True
        return self._clock.monotonic() - self._closing_since > self._host.farewell

    def _machine(self) -> Opening | Claims:
        machine = self._claims or self._opening
        assert machine is not None
        return machine

    def _turn(self) -> None:
        now = self._clock.monotonic()
        machine = self._machine()
        why = self._host.over()
        if why and not self._closing:
            self._left_why = why
            self._stop()
        if self._claims is not None:
            self._claims.allow(self._host.allowance(self._seat))
            self._claims.on_hold = self._host.late
        may_claim = machine is self._opening or self._logged or now >= self._log_by
        taken = self._host.taken()
        if self._claims is not None and taken is not None:
            self._claims.observe(*taken)
        if may_claim:
            asks = machine.poll(now)
            for claim in self._claims.take_asked() if self._claims is not None else ():
                self._host.asked(self._pass, claim)
            for ask in asks:
                self._pool.submit(self._perform, machine, ask)
        if self._opening is not None and self._claims is None and self._opening.joined is not None:
            for notice in self._opening.joined.notices:
                logger.warning("%s", notice)
            self._begin(self._opening.joined, late=self._opening.joined.late)
            return
        if self._claims is not None:
            won = self._claims.take_won()
            if won:
                self._to_load.extend(won)
                self._room.notify_all()
            if self._claims.recovery is not None:
                self._recover(self._claims.recovery, now)
        if self._finished_driving():
            return
        wake = machine.wake(now) if may_claim else self._log_by
        on_hold = self._claims is not None and self._claims.on_hold
        look = 0.5 if self._closing or on_hold else self._host.patrol
        if look is not None:
            wake = now + look if wake is None else min(wake, now + look)
        self._sleeps_until = float("inf") if wake is None else wake
        self._news.wait(None if wake is None else max(0.0, wake - now))
        self._sleeps_until = 0.0

    def _recover(self, recovery: Recovery, now: float) -> None:
        """Say whom we wait for, and whose units are handed out again."""
        if recovery.began is None:
            return
        if not self._waits:
            self._waits, self._next_waits = True, now + OUTAGE
            self._host.waits()
        fresh = recovery.reclaimed[self._told_reclaimed :]
        for unit, attempt, begin, learner in fresh:
            self._told_reclaimed += 1
            logger.warning(
                "%s: %s is gone; unit %s (attempt %d) is handed out again from batch %d",
                *(self._owner.learner, learner, unit, attempt, begin),
            )
        if fresh:
            self._host.reclaimed(len(fresh))
        if now >= self._next_waits and recovery.waits_for:
            self._next_waits = now + 60.0
            most = recovery.waits_for.most_common(8)
            logger.info(
                "%s waits for others' units: %s",
                *(self._owner.learner, ", ".join(f"{learner} ({units})" for learner, units in most)),
            )

    def _begin(self, joined: Joined, late: bool) -> None:
        self._twin = joined.twin
        self._plan = joined.left(self.plan, self._pass)
        self._claims = Claims(
            self._plan,
            joined.keys,
            joined.keys.pass_keys(self._pass),
            self._owner,
            nonce=lambda: os.urandom(12).hex(),
            random=self._random,
            joined_late=late,
            scans=getattr(self._mailbox, "listing", "page") == "scan",
            part=self._place.part,
            parts=self._place.parts,
            waits=self._place.waits,
            reclaim_after=None if self._place.inline else self._place.reclaim_after,
            seen=seen_here,
        )
        self._claims.allow(self._host.allowance(self._seat))
        self._claims.pace.inline = self._place.inline
        self._claims.met(set(joined.peers))
        # A claim without a log in sight would look like the claim of somebody dead.
        self._log_by = self._clock.monotonic() + FIRST_LOG
        self._logged = self._host.attach(joined, self._log_is_written)

    def _log_is_written(self) -> None:
        with self._lock:
            self._logged = True
            self._news.notify()

    def _perform(self, machine: Opening | Claims, ask: Ask) -> None:
        answer: Answer = None
        error: Exception | None = None
        try:
            answer = ask.call.perform(self._mailbox)
        except Exception as raised:  # reported to the machine, which decides
            error = raised
        with self._lock:
            try:
                now = self._clock.monotonic()
                if error is None:
                    machine.asks.answered(ask, answer, now)
                else:
                    machine.asks.failed(ask, error, now)
                self._hear(machine)
                self._say_outage(machine.asks)
            except BaseException as wrong:  # the consumer must hear of it, whatever it is
                self._fail(wrong)

    def _hear(self, machine: Opening | Claims) -> None:
        if isinstance(machine, Claims):
            for claim in machine.take_lost():
                self._host.lost(self._pass, claim)
            for claim in machine.take_proven():
                self._host.claimed(self._pass, claim)
                self._settle(machine, claim)
            for claim in machine.take_cut():
                self._host.cut(self._pass, claim)
            for claim in machine.take_given():
                self._host.given(self._pass, claim)
            for twin in machine.take_twins():
                self._twin |= twin.left is None and seen_here(twin.where) is not False
        self._news.notify()
        self._ready.ring()

    def _say_outage(self, asks: Asks) -> None:
        """Say that the mailbox is silent, after `OUTAGE` seconds and then every minute."""
        if asks.silent < self._next_outage:
            self._next_outage = OUTAGE if asks.silent == 0.0 else self._next_outage
            return
        self._next_outage = asks.silent + 60.0
        logger.warning(
            "%s: the mailbox has not answered for %.0f s; trying for %.0f s in all; last: %s",
            *(self._owner.learner, asks.silent, asks.patience, asks.last_error),
        )

    def _fail(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error
        if self._claims is not None:
            self._claims.stop()
        self._ready.ring()
        self._news.notify()

    # -- loading -----------------------------------------------------------------------------------------

    def _load_all(self) -> None:
        """The loading thread."""
        try:
            self._load_on()
        except BaseException as error:  # the consumer must hear of it, whatever it is
            with self._lock:
                self._fail(error)

    def _load_on(self) -> None:
        while True:
            with self._lock:
                while not (self._closing or self._error) and self._must_wait():
                    self._room.wait()
                if self._closing or self._error or not (self._reader or self._to_load):
                    break
            self._advance()
        self._leave_unit()

    def _must_wait(self) -> bool:
        if self._reader or self._to_load:
            return len(self._buffer) >= self._prefetch
        return self._claims is None or not (self._claims.exhausted and self._claims.asks.idle)

    def _loadable(self) -> bool:
        """Whether the consumer should load a batch itself, before it waits for anything."""
        with self._lock:
            work = bool(self._reader or self._to_load)
            return work and not (self._buffer or self._closing or self._error)

    def _advance(self) -> None:
        """Load one more batch, or find that its unit has no more. One thread alone does this."""
        with self._lock:
            if self._reader is None:
                self._reader = Reader(
                    self._load, self._plan, self._to_load.popleft(), self._pass, self._place.worker
                )
            reader = self._reader
        began = self._clock.monotonic()
        try:
            loaded = reader.read()
        except BaseException as error:  # the consumer must hear of it, whatever it is
            with self._lock:
                self._reader = None
                self._fail(error)
            return
        seconds = self._clock.monotonic() - began
        with self._lock:
            lost = reader.claim.state is State.LOST
            if lost:
                pass
            elif loaded is None or reader.claim.is_over(loaded.step.index):
                self._reader = None
                self._loaded(reader.claim)
            else:
                reader.claim.read += 1
                self._note_load(reader.claim.read, seconds)
                self._buffer.append(loaded)
            self._nudge(began + seconds)
            self._ready.ring()
        if lost:
            self._leave_unit()

    def _leave_unit(self) -> None:
        """Let the loader of a unit that is left half-way close what it has open, in the thread that opened it."""
        reader, self._reader = self._reader, None
        if reader is None:
            return
        try:
            reader.close()
        except Exception as error:
            logger.warning("load of unit %s failed while it was left: %r", reader.claim.identifier, error)

    def _loaded(self, claim: Claim) -> None:
        assert self._claims is not None
        count = claim.read
        self._check_size(claim)
        if count == 0 and claim.begin == 0 and not self._told_empty:
            self._told_empty = True
            logger.warning("load gave no batch for unit %s; said once", claim.identifier)
        self._claims.loaded(claim, count)
        self._host.sized(self._pass, claim)
        self._settle(self._claims, claim)
        self._news.notify()

    def _check_size(self, claim: Claim) -> None:
        """Ranks that step together count on what the plan says of a unit."""
        planned = self._plan.batches(claim.position)
        if planned is None or self._host.allowance(self._seat).batches is None:
            return
        came, due = claim.begin + claim.read, planned if claim.end is None else claim.end
        if came != due:
            raise LoadError(
                f"load gave {came} batches for unit {claim.identifier}, the plan says {due}; ranks that step "
                "together count on it: make load and plan agree (for row ranges, unit_ranges(..., batch_rows=))"
            )

    def _note_load(self, count: int, seconds: float) -> None:
        assert self._claims is not None
        if count == 1:
            self._claims.pace.opened(seconds)
        else:
            self._claims.pace.loaded(seconds)


_running: WeakSet[Feed] = WeakSet()


@atexit.register
def _stop_all() -> None:
    """A thread that the end of the interpreter finds in a loader's C++ aborts the process."""
    for feed in list(_running):
        feed.exit()


def _claim_of(claims: Claims, step: Step) -> Claim | None:
    for claim in claims.hand:
        if claim.identifier == step.unit and claim.attempt == step.attempt:
            return claim
    return None
