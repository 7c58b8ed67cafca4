"""Claiming and loading ahead of one consumer: threads and I/O around `Opening` and `Claims`.

A driving thread polls the protocol's machine and sleeps until something happens; a few threads make its mailbox
calls; one thread runs the user's loader. At most `prefetch` loaded batches wait, and the loader is not asked for
another before there is room. Nothing reaches the consumer before the run's manifest is agreed on and the read-back
of its claim agreed. Then:

- nothing left to claim: the threads end, the consumer drains what waits, the iteration ends;
- an error of the loader or the mailbox reaches the consumer after the batches that were loaded before it;
- leaving stops the threads, waits for calls and loads in progress, and gives back what was claimed and not trained.

One lock guards all state; conditions on it wake the driver and the loader, a bell the consumer.
"""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, Self

from shardqueue.claims import Claim, Claims, Owner, State
from shardqueue.errors import (
    ClosedError,
    InvalidInputError,
    LoadError,
    MailboxUnavailableError,
    PassFinishedError,
    RunError,
    ShardQueueWarning,
)
from shardqueue.learner import learner_label, seen_here
from shardqueue.mailbox import open_mailbox
from shardqueue.plan import Plan, check_identifier
from shardqueue.records import PROTOCOL, Manifest
from shardqueue.run import TRAIN, Opening, check_manifest
from shardqueue.session import FAREWELL, Session, find_session, session_of_this_thread
from shardqueue.units import Step, check_int

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
    from types import TracebackType

    from shardqueue.asks import Ask, Asks
    from shardqueue.mailbox import Mailbox
    from shardqueue.mailbox.calls import Answer, PutIfAbsent
    from shardqueue.run import Joined

    Load = Callable[[Any], Iterable[tuple[Any, Any]]]

logger = logging.getLogger("shardqueue")

CALLERS = 16
"""Mailbox calls under way at once, at most."""


FIRST_LOG = 2.0
"""Seconds for which the first claim waits until the log says that we are here."""
OUTAGE = 10.0
"""Seconds of silence of the mailbox after which that is said."""
TURN = 1.0
"""Seconds after which a waiting consumer looks whether a signal has come."""
NAMED = 8
"""Units that a line of the log names, at most."""


class _Bell:
    """Wakes one waiting thread, at least once a ring.

    A signal may end `wait` by an exception at any moment. In `Condition.wait` that can leave the lock released that
    its caller believes to hold; here there is none.
    """

    def __init__(self) -> None:
        self._silent = threading.Lock()
        self._silent.acquire()

    def ring(self) -> None:
        with suppress(RuntimeError):  # it is ringing already
            self._silent.release()

    def wait(self) -> None:
        # In turns, because a signal that comes just before a call into the lock is only seen after it.
        while not self._silent.acquire(timeout=TURN):
            pass


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


@dataclass(slots=True)
class _Loaded:
    claim: Claim
    step: Step
    batch: Any


class Feed:
    """One pass of one learner over a plan, batch by batch.

    `tracked`: what its consumer takes is reported by `Session.track`, further out.

    Args:
        plan: the units.
        session: the entered session it belongs to.
        load: given a unit's value, yields `(step, batch)` pairs.
        prefetch: loaded batches that may wait.
        run: name of a run to join whatever its state.
    """

    def __init__(self, plan: Plan, session: Session, load: Load, prefetch: int, run: str | None) -> None:
        self.returned: tuple[Returned, ...] = ()
        self.tracked = False
        self._plan, self._session, self._load, self._prefetch = plan, session, load, prefetch
        self._run = run
        self._pass = ""
        self._mailbox, self._clock = session.mailbox, session.clock
        self._owner = Owner(session.learner_id, session.instance)
        self._random = Random(os.urandom(16))
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)
        self._room = threading.Condition(self._lock)
        self._ready = _Bell()
        self._opening: Opening | None = None
        self._claims: Claims | None = None
        self._to_load: deque[Claim] = deque()
        self._loading: Claim | None = None
        self._buffer: deque[_Loaded] = deque()
        self._error: BaseException | None = None
        self.over = False
        self._closing = False
        self._closing_since = 0.0
        self._twin = self._warned_twin = False
        self._logged = False
        self._log_by = 0.0
        self._next_outage = OUTAGE
        self._told_empty = False
        self._left_why = "this queue was left; its iteration is over"
        self._handed_out = 0
        self._sleeps_until = 0.0
        self._pool = ThreadPoolExecutor(CALLERS, thread_name_prefix="shardqueue-mailbox")
        self._threads = [
            threading.Thread(target=self._drive, name="shardqueue-claims", daemon=True),
            threading.Thread(target=self._load_all, name="shardqueue-load", daemon=True),
        ]

    # -- the consumer's side -----------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to claim and load."""
        self._session.admit(self, self._pass)
        for thread in self._threads:
            thread.start()

    def take(self) -> tuple[Step, Any]:
        """Wait for the next batch and take it.

        Raises:
            StopIteration: nothing is left.
        """
        began = self._clock.monotonic()
        if not self.tracked:
            self._session.came_back()
        with self._lock:
            if self._claims is not None:
                self._claims.pace.asked(began)
        while (head := self._head()) is None:
            self._ready.wait()
        if not self.tracked:
            self._session.handed(head.step, self._clock.monotonic() - began)
        if self._twin and not self._warned_twin:
            self._warned_twin = True
            _warn_twin(self._owner.learner)
        return head.step, head.batch

    def _head(self) -> _Loaded | None:
        """Take the next batch, or None when it has still to come."""
        with self._lock:
            if self._closing:
                raise ClosedError(self._left_why)
            if self._claims is not None and self._buffer and self._buffer[0].claim.state is State.OURS:
                return self._hand_out(self._claims)
            if self._error is not None and not self._head_may_come():
                raise self._error
            if self._exhausted():
                self._end()
                raise StopIteration
            self._news.notify()
            return None

    def _end(self) -> None:
        if not self.over and not self._handed_out:
            logger.warning("%s: nothing was left to claim in run %s", self._owner.learner, self._session.run)
        self.over = True

    def _hand_out(self, claims: Claims) -> _Loaded:
        head = self._buffer.popleft()
        self._handed_out += 1
        now = self._clock.monotonic()
        claims.handed(head.claim, now)
        self._room.notify()
        wake = claims.wake(now)
        if claims.due(now) or (wake is not None and wake < self._sleeps_until):
            self._news.notify()
        return head

    def _head_may_come(self) -> bool:
        claims = self._claims
        return bool(self._buffer) and claims is not None and claims.asks.error is None

    def _exhausted(self) -> bool:
        claims = self._claims
        nothing_waits = not (self._buffer or self._to_load or self._loading)
        return claims is not None and claims.exhausted and nothing_waits

    @property
    def grade(self) -> int | None:
        """How fast the consumer is, for the log."""
        with self._lock:
            return None if self._claims is None else self._claims.pace.grade

    def trained(self, step: Step) -> None:
        """One batch that was handed out is trained."""
        with self._lock:
            claims = self._claims
            claim = None if claims is None else _claim_of(claims, step)
            if claims is not None and claim is not None:
                claim.trained = max(claim.trained, step.index + 1 - claim.begin)
                self._settle(claims, claim)

    def _settle(self, claims: Claims, claim: Claim) -> None:
        if claim.finished:
            claims.settle(claim)
            self._session.released((self._pass, claim.identifier, claim.attempt))

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
        self._session.settle(failed, ended=self.over)
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._closing_since = self._clock.monotonic()
            if self._claims is not None:
                self._claims.stop()
            self._room.notify_all()
            self._news.notify_all()
            self._ready.ring()
        try:
            for thread in self._threads:
                if thread.ident is not None:  # a signal may have come before it was started
                    thread.join()
            self._give_back("error" if failed else "early")
        finally:
            self._pool.shutdown(wait=True)
            self._session.dismiss(self, self._pass, ended=self.over)

    def _give_back(self, why: str) -> None:
        claims = self._claims
        if claims is None:
            return
        self._withhold_unclear(claims)
        calls = claims.give_back(why)
        kept = [claim for claim in claims.hand if claim.state is State.OURS and not claim.finished]
        deadline = self._closing_since + FAREWELL
        wrote = list(self._pool.map(lambda call: self._insist(call, deadline), calls))
        self.returned = tuple(
            Returned(claim.identifier, claim.attempt, claim.begin + claim.trained, claim.unclear, done)
            for claim, done in zip(kept, wrote, strict=True)
        )
        self.returned += tuple(
            Returned(claim.identifier, claim.attempt, claim.begin, 0, offered=False, ours=False)
            for claim in claims.unclear
        )
        for claim in kept:
            self._session.released((self._pass, claim.identifier, claim.attempt))
        if self.returned:
            logger.warning("%s left early: %s", self._owner.learner, _say(self.returned))

    def _withhold_unclear(self, claims: Claims) -> None:
        """Batches in the consumer's hands that only coming back would have made trained are not offered again.

        They may be trained already: every batch at most once.
        """
        steps = self._session.in_hand(self._pass) if self._session.counts_coming_back else []
        for step in steps:
            claim = _claim_of(claims, step)
            if claim is not None:
                claim.unclear += 1
                claim.trained = max(claim.trained, step.index + 1 - claim.begin)

    def _insist(self, call: PutIfAbsent, deadline: float) -> bool:
        while True:
            try:
                call.perform(self._mailbox)
            except MailboxUnavailableError:
                if self._clock.monotonic() >= deadline:
                    return False
                threading.Event().wait(0.2)
            except Exception:  # named in what is returned; leaving goes on
                return False
            else:
                return True

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

    def _open(self) -> Opening | None:
        joined = self._session.joined
        if joined is not None:
            if self._run not in (None, joined.keys.run):
                raise RunError(
                    f"run={self._run!r}: the entered session of {self._owner.learner!r} is in run "
                    f"{joined.keys.run!r}; leave it, and enter a new Session for another run"
                )
            check_manifest(joined.keys, joined.manifest, self._plan)
            self._begin(joined, late=True)
            return None
        manifest = Manifest(
            protocol=PROTOCOL,
            run_id=os.urandom(8).hex(),
            plans={TRAIN: self._plan.signature()},
            opened_by=self._owner.learner,
            wall=self._clock.wall(),
        )
        return Opening(self._plan, manifest, self._owner, self._run, seen=seen_here, random=self._random)

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
        return self._clock.monotonic() - self._closing_since > FAREWELL

    def _machine(self) -> Opening | Claims:
        machine = self._claims or self._opening
        assert machine is not None
        return machine

    def _turn(self) -> None:
        now = self._clock.monotonic()
        machine = self._machine()
        may_claim = machine is self._opening or self._logged or now >= self._log_by
        if may_claim:
            for ask in machine.poll(now):
                self._pool.submit(self._perform, machine, ask)
        if self._opening is not None and self._claims is None and self._opening.joined is not None:
            self._begin(self._opening.joined, late=self._opening.joined.late)
            return
        if self._claims is not None:
            won = self._claims.take_won()
            if won:
                self._to_load.extend(won)
                self._room.notify_all()
        if self._finished_driving():
            return
        wake = machine.wake(now) if may_claim else self._log_by
        if self._closing:
            wake = now + 0.5 if wake is None else min(wake, now + 0.5)
        self._sleeps_until = float("inf") if wake is None else wake
        self._news.wait(None if wake is None else max(0.0, wake - now))
        self._sleeps_until = 0.0

    def _begin(self, joined: Joined, late: bool) -> None:
        self._twin = joined.twin
        for notice in joined.notices:
            logger.warning("%s", notice)
        self._claims = Claims(
            self._plan,
            joined.keys,
            joined.keys.pass_keys(self._pass),
            self._owner,
            nonce=lambda: os.urandom(12).hex(),
            random=self._random,
            joined_late=late,
            scans=getattr(self._mailbox, "listing", "page") == "scan",
        )
        self._claims.met(set(joined.peers))
        # A claim without a log in sight would look like the claim of somebody dead.
        self._log_by = self._clock.monotonic() + FIRST_LOG
        self._logged = self._session.attach(joined, self._log_is_written)

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
            for claim in machine.take_proven():
                self._session.claimed((self._pass, claim.identifier, claim.attempt))
                self._settle(machine, claim)
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

    # -- the loading thread ------------------------------------------------------------------------------

    def _load_all(self) -> None:
        while True:
            with self._lock:
                while not (self._to_load or self._closing or self._error or self._no_more_to_load()):
                    self._room.wait()
                if self._closing or self._error or not self._to_load:
                    return
                claim = self._loading = self._to_load.popleft()
            try:
                count = self._load_one(claim)
            except BaseException as error:  # the consumer must hear of it, whatever it is
                error.add_note(f"raised by load for unit {claim.identifier!r}")
                with self._lock:
                    self._loading = None
                    self._fail(error)
                return
            with self._lock:
                self._loading = None
                if count is not None:
                    self._loaded(claim, count)
                self._news.notify()
                self._ready.ring()

    def _no_more_to_load(self) -> bool:
        return self._claims is not None and self._claims.exhausted and self._claims.asks.idle

    def _loaded(self, claim: Claim, count: int) -> None:
        assert self._claims is not None
        if count == 0 and claim.begin == 0 and not self._told_empty:
            self._told_empty = True
            logger.warning("load gave no batch for unit %s; said once", claim.identifier)
        self._claims.loaded(claim, count)
        self._settle(self._claims, claim)

    def _load_one(self, claim: Claim) -> int | None:
        """Load a unit into the buffer; return how many batches it gave, or None when told to stop."""
        began = self._clock.monotonic()
        pairs = _pairs(self._load, self._plan.value(claim.position), claim.identifier)
        count = 0
        try:
            for index, (step, batch) in enumerate(pairs):
                if index < claim.begin:
                    continue
                now = self._clock.monotonic()
                place = Step(step, claim.identifier, claim.attempt, index, self._pass)
                with self._lock:
                    assert self._claims is not None
                    self._note_load(self._claims, now - began, first=count == 0)
                    self._buffer.append(_Loaded(claim, place, batch))
                    count += 1
                    self._ready.ring()
                    while len(self._buffer) >= self._prefetch and not (self._closing or self._error):
                        self._room.wait()
                    if self._closing or self._error:
                        return None
                began = self._clock.monotonic()
        finally:
            pairs.close()
        return count

    @staticmethod
    def _note_load(claims: Claims, seconds: float, first: bool) -> None:
        if first:
            claims.pace.opened(seconds)
        else:
            claims.pace.loaded(seconds)


def _claim_of(claims: Claims, step: Step) -> Claim | None:
    for claim in claims.hand:
        if claim.identifier == step.unit and claim.attempt == step.attempt:
            return claim
    return None


def _pairs(load: Load, value: object, identifier: str) -> Generator[tuple[int, Any]]:
    """What `load` yields, checked to be pairs whose first is an int."""
    loaded: object = load(value)
    try:
        items = iter(loaded)  # type: ignore[call-overload]
    except TypeError:
        raise LoadError(
            f"load gave {type(loaded).__name__} for unit {identifier}; it must yield (step, batch) pairs"
        ) from None
    try:
        for item in items:
            pair = isinstance(item, tuple) and len(item) == 2
            if not pair or not hasattr(item[0], "__index__"):
                what = (
                    f"the step {item[0]!r:.80}, which is no int,"
                    if pair
                    else f"{type(item).__name__} {item!r:.80}"
                )
                raise LoadError(
                    f"load yielded {what} for unit {identifier}; it must yield (step, batch) pairs, the step an int"
                )
            yield item[0].__index__(), item[1]
    finally:
        close = getattr(items, "close", None)
        if close is not None:
            close()


def _say(returned: tuple[Returned, ...]) -> str:
    """All in one line, the first few by name."""
    names = [_say_one(claim) for claim in returned[:NAMED]]
    more = len(returned) - len(names)
    return "; ".join(names) + (f"; and {more} more units, see queue.returned" if more else "")


def _say_one(returned: Returned) -> str:
    what = "given back" if returned.offered else "could not be given back, so nobody will train it"
    if not returned.ours:
        what = "was asked for and never answered: it may or may not be ours"
    unclear = f", {returned.unclear} before it perhaps not trained" if returned.unclear else ""
    return f"{returned.unit} from batch {returned.begin} {what}{unclear}"


def _warn_of_another_session(learner: str) -> None:
    other = session_of_this_thread()
    if other is not None and other.learner_id != learner:
        warnings.warn(
            f"the entered session is of learner id {other.learner_id!r}, the queue of {learner!r}: the session will "
            "know nothing of its batches, and step() decides nothing; give both one learner_id",
            ShardQueueWarning,
            stacklevel=5,
        )


def _warn_twin(learner: str) -> None:
    warnings.warn(
        f"learner id {learner!r} is live twice; both work, and their logs stay apart, but reports will show one "
        "name for two: give each training process its own learner_id",
        ShardQueueWarning,
        stacklevel=4,
    )


class SharedQueue:
    """What `shared_queue` returns: a context manager, iterated once inside its block.

    Attributes:
        returned: after leaving, the claims that were not trained whole.
    """

    def __init__(
        self,
        units: Mapping[str, object],
        mailbox: str | os.PathLike[str] | Mailbox,
        learner_id: str | None,
        load: Load,
        prefetch: int,
        run: str | None,
    ) -> None:
        if not callable(load):
            raise InvalidInputError(
                "load", load, "callable", "pass a function that yields (step, batch) pairs"
            )
        check_int("prefetch", prefetch, 1, 2**20)
        if run is not None:
            check_identifier(run, "run", folders=False)
        self._plan = Plan(units)
        self._learner_id = learner_label(learner_id)
        self._mailbox, self._load, self._prefetch, self._run = mailbox, load, prefetch, run
        self._feed: Feed | None = None
        self._own: Session | None = None
        self._pid = os.getpid()

    @property
    def returned(self) -> tuple[Returned, ...]:
        """After leaving: the claims that were not trained whole."""
        return () if self._feed is None else self._feed.returned

    def __enter__(self) -> Self:
        if self._pid != os.getpid():
            raise ClosedError(
                f"this queue was made in process {self._pid}; call shared_queue in each process"
            )
        if self._feed is not None:
            raise ClosedError("this queue was entered before; call shared_queue(...) again")
        session = find_session(self._learner_id, own=False)
        if session is None:
            session = self._own = self._own_session()
        elif self._mailbox != session.source and open_mailbox(self._mailbox) != session.mailbox:
            remedy = "give the queue and the session the same mailbox, or different learner ids"
            bound = f"the mailbox of the entered session of {self._learner_id!r}"
            raise InvalidInputError("mailbox", self._mailbox, bound, remedy)
        self._feed = Feed(self._plan, session, self._load, self._prefetch, self._run)
        try:
            self._feed.start()
        except BaseException as error:
            if self._own is not None:
                self._own.__exit__(type(error), error, None)
            raise
        return self

    def _own_session(self) -> Session:
        mailbox = open_mailbox(self._mailbox)
        _warn_of_another_session(self._learner_id)
        older = find_session(self._learner_id, own=True)
        if older is not None and older.mailbox == mailbox:
            older.replace()
        return Session(mailbox, self._learner_id, _own=True).__enter__()

    def __iter__(self) -> Iterator[tuple[Step, Any]]:
        if self._feed is not None and self._feed.over:
            raise PassFinishedError(
                f"learner {self._learner_id!r} has already iterated this plan to its end; "
                'use another mailbox prefix, or run="a-name", to train it again'
            )
        return self

    def __next__(self) -> tuple[Step, Any]:
        if self._feed is None:
            raise ClosedError("enter the queue first: `with shared_queue(...) as queue:`")
        if self._pid != os.getpid():
            raise ClosedError(f"this queue belongs to process {self._pid}; call shared_queue in each process")
        return self._feed.take()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._feed is None or self._pid != os.getpid():
            return
        try:
            self._feed.close(failed=error is not None)
        finally:
            if self._own is not None:
                self._own.__exit__(kind, error, trace)


def shared_queue(
    units: Mapping[str, object],
    mailbox: str | os.PathLike[str] | Mailbox,
    learner_id: str | None,
    load: Load,
    prefetch: int = 8,
    run: str | None = None,
) -> SharedQueue:
    """Claim units of a plan and load them ahead of the consumer.

    Every learner that iterates the same plan over the same mailbox gets the units nobody else has claimed; together
    they get each batch once. Batches come in the order of `load` within a unit.

        with shared_queue(units, "s3://bucket/prefix", "node-a", load) as queue:
            for step, batch in queue:
                ...

    Coming back for the next batch makes the last one trained, unless a `Session` of the same learner id is entered:
    then its `step()` does.

    Args:
        units: the plan, a mapping from identifier to what `load` is given. Its order is this learner's preference.
        mailbox: a path, a URL, a `Mailbox` or any object with its verbs.
        learner_id: a label for this process; None for host, rank and pid.
        load: called with a unit's value on a background thread, yields `(step, batch)`: an int and anything.
        prefetch: at most so many loaded batches wait, 1 or more.
        run: a name, to join that run whatever its state; by default the newest run is joined if it is running, and
            the next opened if it broke off.

    Returns:
        A context manager that iterates `(step, batch)`, the step an int that knows its unit (`Step`).

    Raises:
        InvalidInputError: an argument is out of range or grammar.
        MailboxError: the mailbox cannot be opened, or (while iterating) stopped answering.
        RunFinishedError, PlanMismatchError: while iterating, when the run cannot be joined.
    """
    return SharedQueue(units, mailbox, learner_id, load, prefetch, run)
