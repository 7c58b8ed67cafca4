"""A learner's stay in a run: what counts as trained, how fast, and the log others can read.

Owns the learner's `Book` and a thread that writes it to the mailbox every few seconds, so that neither a slow
store nor a dead one ever slows training. Feeds report what they hand out; `step()` alone makes it trained. A
feed without a session of the user's has one of its own, in which coming back for the next batch does.

The log is for others: losing a write loses nothing, since the next one holds the same and more. Only the last
one, which says how the learner left, is worth waiting for, and that not for long.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import warnings
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self, TypeVar

from shardqueue.clock import SystemClock
from shardqueue.errors import (
    ClosedError,
    InvalidInputError,
    MailboxUnavailableError,
    PassFinishedError,
    ShardQueueWarning,
)
from shardqueue.learner import LOG_EVERY, Book, learner_label, log_pauses, new_instance, this_process
from shardqueue.mailbox import open_mailbox
from shardqueue.throughput import Rates, Rolling
from shardqueue.units import check_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import FrameType, TracebackType

    from shardqueue.clock import Clock
    from shardqueue.feed import Feed
    from shardqueue.mailbox import Mailbox
    from shardqueue.records import Left, LogPage
    from shardqueue.run import Joined
    from shardqueue.units import Step

T = TypeVar("T")

logger = logging.getLogger("shardqueue")

STEPLESS = 256
"""Batches handed out without a single `step()` after which it is taken to have been forgotten."""
LONGEST_LOG_EVERY = 86400.0
FAREWELL = 10.0
"""Seconds for which leaving tries to say so in the mailbox."""


class Session:
    """What one training process does in one run.

    Use it as a context manager around the training loop; call `step` after each optimizer step:

        with Session(mailbox, "node-a") as session, shared_queue(units, mailbox, "node-a", load) as queue:
            for step, batch in queue:
                ...
                session.step(samples=len(batch))

    Args:
        mailbox: a URL, or any object with the verbs of `Mailbox`.
        learner_id: a label for people; by default host, rank and pid.
        log_every: seconds between two writes of the log.

    Raises:
        InvalidInputError: the learner id is out of grammar, or `log_every` is not positive.
        MailboxError: the mailbox cannot be opened or cannot hold a queue.
    """

    def __init__(
        self,
        mailbox: str | os.PathLike[str] | Mailbox,
        learner_id: str | None = None,
        *,
        log_every: float = LOG_EVERY,
        clock: Clock | None = None,
        _own: bool = False,
    ) -> None:
        seconds: object = log_every
        if not isinstance(seconds, int | float) or not 0 < seconds <= LONGEST_LOG_EVERY:
            bound = f"more than 0 and at most {LONGEST_LOG_EVERY:g} seconds"
            raise InvalidInputError("log_every", log_every, bound, f"pass {LOG_EVERY:g}")
        self.learner_id = learner_label(learner_id)
        self.instance = new_instance()
        self.source = mailbox
        self.mailbox = (
            open_mailbox(mailbox, prove=not _own) if not isinstance(mailbox, str) else open_mailbox(mailbox)
        )
        self.clock = clock or SystemClock()
        self.lock = threading.RLock()
        self.joined: Joined | None = None
        self._book = Book(self.learner_id, self.instance, "main", this_process())
        self._rolling = Rolling()
        self._untold: deque[Step] = deque()
        self._farewell_by = float("inf")
        self._thread = 0
        self._log_every = log_every
        self._implicit = _own
        self._own = _own
        self._stepped = False
        self._feeds: dict[str, Feed] = {}
        self._finished: set[str] = set()
        self._ended: Left = "early"
        self._entered = self._closed = False
        self._pid = os.getpid()
        self._writer: _LogWriter | None = None
        self._restore_signal: Any = None

    # -- for the user ------------------------------------------------------------------------------------

    def step(self, samples: int = 0, *, global_step: int | None = None) -> None:
        """Every batch handed out so far is trained.

        Args:
            samples: how many samples those batches held, for throughput.
            global_step: the optimizer step, if the loop counts them.

        Raises:
            InvalidInputError: `samples` or `global_step` is not a whole number, or negative.
            ClosedError: the session is not entered.
        """
        samples = check_count("samples", samples)
        global_step = None if global_step is None else check_count("global_step", global_step)
        self._check_open()
        with self.lock:
            self._stepped, self._implicit = True, False
            self._train(samples, global_step)
        self._tell()

    def track(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield what `loader` yields, noting what really reached the loop.

        Goes outermost, around whatever moves or prefetches batches. Then a batch counts as handed out when it leaves
        here, not when the queue gave it to the wrapper.

        Raises:
            LoadError: an item carries no step of a shared queue.
        """
        from shardqueue.tracking import steps_in  # only loops that track pay for it

        self._check_open()
        for pass_ in list(self._feeds):
            self._track(pass_)
        iterator = iter(loader)
        while True:
            began = self.clock.monotonic()
            try:
                item = next(iterator)
            except StopIteration:
                self.came_back()
                return
            self.came_back()
            waited = self.clock.monotonic() - began
            for step in steps_in(item):
                self._track(step.pass_)
                self.handed(step, waited)
                waited = 0.0
            yield item

    def _track(self, pass_: str) -> None:
        """From now on only `track` reports what the consumer of this pass has; a wrapper holds what was taken."""
        feed = self._feeds.get(pass_)
        if feed is not None and not feed.tracked:
            feed.tracked = True
            with self.lock:
                self._book.drop(pass_)

    @property
    def rates(self) -> Rates:
        """Batches, samples and seconds so far, and how fast."""
        with self.lock:
            now = self.clock.monotonic()
            elapsed = self._rolling.elapsed(now)
            batches, samples = self._rolling.recent(now)
            return Rates(
                batches=self._book.batches,
                samples=self._book.samples,
                elapsed=elapsed,
                waited=self._book.waited,
                samples_per_second=self._book.samples / elapsed if elapsed > 0 else 0.0,
                recent_samples_per_second=samples,
                recent_batches_per_second=batches,
            )

    @property
    def run(self) -> str | None:
        """Name of the run, once the first batch was asked for."""
        return None if self.joined is None else self.joined.keys.run

    def __enter__(self) -> Self:
        if self._pid != os.getpid():
            raise ClosedError(
                f"this session was made in process {self._pid}; make one in each training process"
            )
        if self._entered:
            raise ClosedError("this session was entered before; make a new Session for another stay")
        self._entered = True
        self._thread = threading.get_ident()
        if not self._own and find_session(self.learner_id, own=True) is not None:
            warnings.warn(
                f"a queue of learner id {self.learner_id!r} is entered already, without this session: step() will "
                "decide nothing for it; enter the session first: `with session, shared_queue(...) as queue`",
                ShardQueueWarning,
                stacklevel=2,
            )
        _entered.add(self)
        self._catch_sigterm()
        return self

    def replace(self) -> None:
        """Leave, because another queue of this learner begins in this process."""
        for feed in list(self._feeds.values()):
            feed.replace()
        self.__exit__(None, None, None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pid != os.getpid() or self._closed:
            return
        self._farewell_by = min(self._farewell_by, self.clock.monotonic() + FAREWELL)
        try:
            for feed in list(self._feeds.values()):
                feed.close(failed=error is not None)
        finally:
            self._closed = True
            _entered.remove(self)
            self._book.left = (
                "error" if error is not None and not isinstance(error, GeneratorExit) else self._ended
            )
            if self._writer is not None:
                self._writer.finish()
            self._release_sigterm()

    # -- for feeds ---------------------------------------------------------------------------------------

    def admit(self, feed: Feed, pass_: str) -> None:
        """A feed begins on a pass; an older one of ours on the same pass is closed."""
        self._check_open()
        older = self._feeds.get(pass_)
        if older is not None:
            older.replace()
        if pass_ in self._finished:
            raise PassFinishedError(
                f"learner {self.learner_id!r} has already iterated {pass_ or 'this pass'} of run {self.run} to "
                'its end; use another mailbox prefix, or run="a-name", to train the plan again'
            )
        self._feeds[pass_] = feed

    def dismiss(self, feed: Feed, pass_: str, ended: bool) -> None:
        """A feed is over; `ended` because nothing was left to claim."""
        if self._feeds.get(pass_) is feed:
            del self._feeds[pass_]
        with self.lock:
            self._book.drop(pass_)
        self._ended = "end" if ended else "early"
        if ended:
            self._finished.add(pass_)

    def attach(self, joined: Joined, logged: Callable[[], None]) -> bool:
        """The run is agreed on: the log begins.

        Returns:
            Whether the log is written already; if not, `logged` is called from another thread once it was tried.
        """
        with self.lock:
            if self._writer is None:
                self.joined = joined
                self._book.run_id = joined.manifest.run_id
                self._writer = _LogWriter(self)
            return self._writer.start(logged)

    def claimed(self, key: tuple[str, str, int]) -> None:
        """An attempt at a unit is ours."""
        with self.lock:
            self._book.claim(key)

    def released(self, key: tuple[str, str, int]) -> None:
        """An attempt is over."""
        with self.lock:
            self._book.release(key)

    def handed(self, step: Step, waited: float) -> None:
        """A batch reached the loop, which had waited for it."""
        with self.lock:
            self._book.hand(step, waited, self.clock.wall())

    def came_back(self) -> None:
        """The loop asks for the next batch."""
        forgotten = False
        with self.lock:
            self._rolling.start(self.clock.monotonic())
            if not self._implicit and not self._stepped and len(self._book.in_hand) >= STEPLESS:
                self._implicit = forgotten = True
            steps = self._train(0) if self._implicit else []
        self._tell()
        if forgotten:
            _warn_stepless(len(steps))

    def settle(self, failed: bool, ended: bool) -> None:
        """A feed is being left, at its end or before: decide about the batches still with its consumer.

        With `session.step()` it said what is trained. Without, leaving in order means that the loop's body is done;
        leaving by an exception means that nobody knows.
        """
        with self.lock:
            counts = not failed and (self._implicit or not self._stepped)
            steps = self._train(0) if counts else []
            forgotten = bool(steps) and not self._implicit
            left = self._book.in_hand if ended and not failed else []
        self._tell()
        if forgotten:
            _warn_stepless(len(steps))
        if left:
            _warn_unstepped(left)

    def in_hand(self, pass_: str) -> list[Step]:
        """Batches of a pass that are with the consumer and not known to be trained."""
        with self.lock:
            return [step for step in self._book.in_hand if step.pass_ == pass_]

    @property
    def counts_coming_back(self) -> bool:
        """Whether coming back for the next batch makes the last one trained."""
        return self._implicit

    def pages(self) -> list[LogPage]:
        """The log's pages that have to be written now, the current one last."""
        grades = [feed.grade for feed in list(self._feeds.values())]
        with self.lock:
            self._book.grade = next((grade for grade in grades if grade is not None), self._book.grade)
            now = self.clock.monotonic()
            return self._book.pages(
                self.clock.wall(), self._rolling.elapsed(now), self._rolling.recent(now)[1]
            )

    def wrote(self, page: LogPage, clear: bool) -> None:
        """The page was written, or it is not clear whether it was."""
        with self.lock:
            self._book.wrote(page, clear)

    # -- inside ------------------------------------------------------------------------------------------

    def _train(self, samples: int, global_step: int | None = None) -> list[Step]:
        """What is in hand is trained; to be told to the feeds once the lock is released.

        A feed holds its own lock while it reports to the session, so the session never calls one under its lock.
        """
        steps = self._book.train(samples, self.clock.wall(), global_step)
        self._untold += steps
        self._rolling.add(self.clock.monotonic(), len(steps), samples)
        return steps

    def _tell(self) -> None:
        while self._untold:  # what a signal interrupts here is told when the feed is left
            step = self._untold[0]
            feed = self._feeds.get(step.pass_)
            if feed is not None:
                feed.trained(step)
            self._untold.popleft()

    def _check_open(self) -> None:
        if self._pid != os.getpid():
            raise ClosedError(
                f"this session belongs to process {self._pid}; make one in each training process"
            )
        if not self._entered or self._closed:
            raise ClosedError("this session is not entered; use it in a `with` block")

    def _catch_sigterm(self) -> None:
        """A preemption notice ends the `with` block in order, where nobody else has plans for the signal."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._restore_signal = signal.signal(signal.SIGTERM, _leave)

    def _release_sigterm(self) -> None:
        here = threading.current_thread() is threading.main_thread()
        if (
            here
            and self._restore_signal is not None
            and signal.getsignal(signal.SIGTERM) in (_leave, _leaving)
        ):
            signal.signal(signal.SIGTERM, self._restore_signal)
        self._restore_signal = None


def _warn_stepless(batches: int) -> None:
    warnings.warn(
        f"session.step() was never called for {batches} batches: taking each as trained when the loop comes back; "
        "call session.step(samples=...) after each optimizer step",
        ShardQueueWarning,
        stacklevel=4,
    )


def _warn_unstepped(left: list[Step]) -> None:
    names = ", ".join(sorted({step.unit for step in left})[:8])
    warnings.warn(
        f"{len(left)} batches (of {names}) were handed out and never followed by session.step(): they count as not "
        "trained, and were given back; call it after the last optimizer step, before leaving the queue",
        ShardQueueWarning,
        stacklevel=4,
    )


def _leave(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    """End the `with` block; a second notice must not cut short what the first began."""
    signal.signal(number, _leaving)
    raise SystemExit(128 + number)


def _leaving(number: int, frame: FrameType | None) -> None:
    """We are on our way."""


class _Entered:
    """The sessions entered in this process, by label."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: list[Session] = []

    def add(self, session: Session) -> None:
        with self._lock:
            self._sessions.append(session)

    def remove(self, session: Session) -> None:
        with self._lock, suppress(ValueError):
            self._sessions.remove(session)

    def find(self, learner_id: str, own: bool) -> Session | None:
        """The latest session of that label: the user's, or (`own`) one a feed made for itself."""
        with self._lock:
            for session in reversed(self._sessions):
                mine = session._pid == os.getpid() and session.learner_id == learner_id
                if mine and session._own is own:
                    return session
        return None

    def here(self) -> Session | None:
        """The latest session that the user entered in this thread."""
        with self._lock:
            for session in reversed(self._sessions):
                mine = session._pid == os.getpid() and session._thread == threading.get_ident()
                if mine and not session._own:
                    return session
        return None


_entered = _Entered()
find_session = _entered.find
session_of_this_thread = _entered.here


class _LogWriter:
    """The thread that writes the log: at once, soon again, then every few seconds, and a last time."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._work, name="shardqueue-log", daemon=True)
        self._told = False
        self._lock = threading.Lock()
        self._waiting: list[Callable[[], None]] = []
        self._tried = False

    def start(self, logged: Callable[[], None]) -> bool:
        """Begin, if not begun. Return whether a first write was tried; if not, have `logged` called after it."""
        with self._lock:
            if not self._tried:
                self._waiting.append(logged)
            if self._thread.ident is None:
                self._thread.start()
            return self._tried

    def finish(self) -> None:
        self._leaving.set()
        self._thread.join()

    def _work(self) -> None:
        self._write()
        with self._lock:
            self._tried, waiting = True, self._waiting
        for logged in waiting:
            logged()
        for pause in log_pauses(self._session._log_every):
            if self._leaving.wait(pause):
                break
            self._write()
        while not self._write() and self._session.clock.monotonic() < self._session._farewell_by:
            threading.Event().wait(0.5)

    def _write(self) -> bool:
        session = self._session
        assert session.joined is not None
        keys = session.joined.keys
        for page in session.pages():
            key = keys.log(page.learner, page.instance, page.process, page.page)
            try:
                session.mailbox.put(key, page.encode())
            except Exception as error:
                session.wrote(page, clear=False)
                return self._give_up(error)
            session.wrote(page, clear=True)
        return True

    def _give_up(self, error: Exception) -> bool:
        """Say once what trying again will not mend; return whether there is no point in it."""
        passing = isinstance(error, MailboxUnavailableError)
        if not passing and not self._told:
            self._told = True
            logger.warning("the log of %s cannot be written: %s", self._session.learner_id, error)
        return not passing
