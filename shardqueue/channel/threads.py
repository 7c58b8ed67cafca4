"""Ends for the threads of one process: the counted queue under a mutex, and a bell for each end.

Whoever changes the queue gives the answer to the ends that waited for it and rings their bells: nobody wakes in vain,
and nothing is polled. The garbage collector may drop an end at any moment, even inside the mutex; it only notes it,
and whoever leaves the mutex next looks.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
import weakref
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

from shardqueue.channel import forks
from shardqueue.channel.ends import Receiver, Sender, checked_seconds
from shardqueue.channel.forwarding import forwardable, raised_by
from shardqueue.channel.handoff import END, FAILED, REFUSED, TAKEN, WAIT, Answer, End, Handoff
from shardqueue.channel.report import ChannelReport, Side, State
from shardqueue.errors import (
    ChannelEmptyError,
    ChannelEndedError,
    ChannelFullError,
    ClosedError,
    ReceiversGoneError,
    SenderError,
    ShardQueueWarning,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardqueue.channel.watch import Watch

T = TypeVar("T")
_LONGEST = threading.TIMEOUT_MAX
_NOTHING = object()


class Lock(Protocol):
    """What is used of `threading.Lock`."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take it."""
        ...

    def release(self) -> None:
        """Let go of it."""
        ...

    def __enter__(self) -> bool: ...

    def __exit__(self, *_: object) -> None: ...


class _Seat:
    """Where an end waits: a bell, and the answer that is there once it rang."""

    __slots__ = ("answer", "bell")

    def __init__(self, bell: Lock) -> None:
        self.bell = bell
        self.answer: Any = _NOTHING
        bell.acquire()


class Hub(Generic[T]):
    """What the ends of one channel share.

    Args:
        queue: the counted queue.
        watch: who is told how it goes.
        locks: makes a lock; the tests pass locks whose every turn they decide.
        now: the time in seconds.
    """

    def __init__(
        self,
        queue: Handoff[T],
        watch: Watch,
        locks: Callable[[], Lock] = threading.Lock,  # type: ignore[assignment]
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.queue, self.watch, self.now, self._locks = queue, watch, now, locks
        self.mutex = locks()
        self.due = watch.due
        self._pid = os.getpid()
        self.actions: deque[Callable[[float], object]] = deque()
        forks.hubs.add(self)
        self._seats: dict[End, _Seat] = {}

    def sender(self) -> ThreadSender[T] | None:
        """Return the next declared sender, or None when all are taken."""
        end = self._take(Side.SENDER)
        return None if end is None else ThreadSender(self, end)

    def receiver(self) -> ThreadReceiver[T] | None:
        """Return the next declared receiver, or None when all are taken."""
        end = self._take(Side.RECEIVER)
        return None if end is None else ThreadReceiver(self, end)

    def _take(self, side: Side) -> End | None:
        with self.inside():
            return self.queue.take(side)

    @property
    def is_ours(self) -> bool:
        """Whether this process made the channel."""
        return self._pid == os.getpid()

    def seat(self, end: End) -> _Seat:
        """Return the seat of a new end."""
        self._seats[end] = _Seat(self._locks())
        return self._seats[end]

    def wake(self) -> None:
        """Ring for those whose wait is over; under the mutex."""
        for end, answer in self.queue.wakes:
            seat = self._seats[end]
            seat.answer = answer
            seat.bell.release()
        self.queue.wakes.clear()

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Hold the mutex, and do on leaving what was put off meanwhile."""
        with self.mutex:
            yield
        if self.actions:
            self.act()

    def close(self, end: End, state: State = State.CLOSED, error: Exception | None = None) -> None:
        """An end is finished."""
        with self.inside():
            self._close(end, state, error, self.now())
        self.tidy()

    def drop(self, end: End) -> None:
        """Nobody has an end any more; from anywhere, even inside the mutex."""
        self.later(partial(self._close, end, State.DROPPED, None))

    def _close(self, end: End, state: State, error: Exception | None, now: float) -> None:
        self.queue.close(end, now, state, error)
        self.wake()
        self._seats.pop(end, None)

    def forgo(self, error: Exception | None = None) -> dict[Side, int]:
        """Close the declared ends that nobody took, senders with the error; return how many there were."""
        with self.inside():
            gone = self.queue.forgo(self.now(), error)
            self.wake()
        self.tidy()
        return gone

    def forget(self) -> None:
        """Nobody can make the ends that are missing: close them, from anywhere."""
        self.later(self.queue.forgo)

    def later(self, action: Callable[[float], object]) -> None:
        """Do it to the queue as soon as nobody is inside the mutex: now, or when whoever is inside leaves."""
        self.actions.append(action)
        self.act()

    def act(self) -> None:
        """Do what was put off, if nobody is inside; whoever is does it on leaving."""
        while self.mutex.acquire(blocking=False):
            try:
                while self.actions:
                    self.actions.popleft()(self.now())
                self.wake()
                left = self.queue.left[:]
                self.queue.left.clear()
            finally:
                self.mutex.release()
            del left  # outside: what items do when they go is not known
            if not self.actions:
                return

    def tidy(self) -> None:
        """Do what was put off, let go of what nobody will receive, report what is due; outside the mutex."""
        self.watch.look(self)
        self.due = self.watch.due
        self.act()

    def forked(self) -> None:
        """In the child nobody is at the other ends."""
        why = ClosedError(
            "a channel without context= is between the threads of one process, and this one was forked from it; make "
            "it with context=torch.multiprocessing.get_context(...) to reach other processes"
        )
        self.queue.refusal = self.queue.failure = why
        self.queue.queue.clear()
        with contextlib.suppress(RuntimeError):
            self.mutex.release()  # whoever was inside is not here

    def report(self) -> ChannelReport:
        """Return what happened so far."""
        with self.inside():
            return self.queue.report(self.now())


def _drop(hub: Hub[Any], end: End) -> None:
    """The garbage collector found an open end, perhaps inside the mutex."""
    if end.open:
        hub.drop(end)
        warnings.warn(
            f"{end.name} of a channel was dropped without close(); it counts as closed",
            ShardQueueWarning,
            stacklevel=3,
        )


class _ThreadEnd(Generic[T]):
    """What both ends have.

    How their two verbs begin is alike as well, and written out in both: one more call would cost a tenth of an item.
    """

    def __init__(self, hub: Hub[T], end: End) -> None:
        self._hub, self._end, self._seat = hub, end, hub.seat(end)
        self._mutex, self._wakes = hub.mutex, hub.queue.wakes
        self.name = end.name
        weakref.finalize(self, _drop, hub, end).atexit = False


class ThreadSender(_ThreadEnd[T], Sender[T]):
    """A sending end in a thread of this process."""

    def __init__(self, hub: Hub[T], end: End) -> None:
        super().__init__(hub, end)
        self._offer = hub.queue.offer

    def send(self, item: T, timeout: float | None = None) -> None:
        """See `Sender.send`."""
        if timeout is not None:
            checked_seconds("timeout", timeout)
        hub = self._hub
        if self._end.since is not None or self._seat.answer is not _NOTHING:  # an interruption left them so
            _clear(hub, self._end, self._seat)
        now = hub.now()
        if now >= hub.due:  # before anything is in hand that an interruption could lose
            hub.tidy()
        with self._mutex:
            answer = self._offer(self._end, item, now, timeout != 0)
            if self._wakes:
                hub.wake()
        if hub.actions:
            hub.act()
        if answer is not TAKEN:
            self._wait(answer, timeout)

    def _wait(self, answer: Answer, timeout: float | None) -> None:
        if answer is WAIT and timeout != 0:
            answer = cast("Answer", _wait(self._hub, self._end, self._seat, timeout))
        if answer is TAKEN:
            return
        if answer is WAIT:
            raise ChannelFullError(
                f"no room for the item within {timeout} s: the channel holds {self._hub.queue.capacity} items, and "
                "the receivers are slower; it was not sent"
            )
        if not self._end.open:
            raise ClosedError(
                f"{self.name} is closed; send before closing it, or clone() it while it is open"
            )
        refusal = self._hub.queue.refusal
        assert refusal is not None
        if isinstance(refusal, ReceiversGoneError | ClosedError):
            raise type(refusal)(*refusal.args)
        raise SenderError(f"nothing more can be sent: {raised_by(refusal)}") from refusal

    def clone(self) -> ThreadSender[T]:
        """See `Sender.clone`."""
        return ThreadSender(self._hub, _clone(self._hub, self._end))

    def close(self, error: BaseException | None = None) -> None:
        """See `Sender.close`."""
        if self._end.open:
            state = State.CLOSED if error is None else State.FAILED
            self._hub.close(self._end, state, None if error is None else forwardable(error, self.name))


class ThreadReceiver(_ThreadEnd[T], Receiver[T]):
    """A receiving end in a thread of this process."""

    def __init__(self, hub: Hub[T], end: End) -> None:
        super().__init__(hub, end)
        self._ask = hub.queue.ask

    def receive(self, timeout: float | None = None) -> T:
        """See `Receiver.receive`."""
        if timeout is not None:
            checked_seconds("timeout", timeout)
        hub = self._hub
        if self._end.since is not None or self._seat.answer is not _NOTHING:  # an interruption left them so
            _clear(hub, self._end, self._seat)
        now = hub.now()
        if now >= hub.due:  # before anything is in hand that an interruption could lose
            hub.tidy()
        with self._mutex:
            item = self._ask(self._end, now, timeout != 0)
            if self._wakes:
                hub.wake()
        if hub.actions:
            hub.act()
        if item.__class__ is not Answer:
            return cast("T", item)
        return self._wait(item, timeout)

    def _wait(self, answer: T | Answer, timeout: float | None) -> T:
        if answer is WAIT and timeout != 0:
            answer = _wait(self._hub, self._end, self._seat, timeout)
            if self._hub.queue.starved:
                self._hub.tidy()
        if answer is WAIT:
            raise ChannelEmptyError(f"no item within {timeout} s; the channel has not ended")
        if answer is END:
            raise ChannelEndedError(
                "the stream is over: every sender is closed and every item was handed out"
            )
        if answer is REFUSED:
            raise ClosedError(f"{self.name} is closed; it takes no more items")
        if answer is FAILED:
            assert self._hub.queue.failure is not None
            raise self._hub.queue.failure
        return cast("T", answer)

    def clone(self) -> ThreadReceiver[T]:
        """See `Receiver.clone`."""
        return ThreadReceiver(self._hub, _clone(self._hub, self._end))

    def close(self) -> None:
        """See `Receiver.close`."""
        if self._end.open:
            self._hub.close(self._end)


def _clone(hub: Hub[Any], end: End) -> End:
    with hub.inside():
        made = hub.queue.clone(end)
    if made is None:
        raise ClosedError(f"{end.name} is closed; clone an end that is open")
    return made


def _wait(hub: Hub[T], end: End, seat: _Seat, timeout: float | None) -> T | Answer:
    """Wait for the bell; an answer that comes while the wait is given up is not lost."""
    try:
        rang = seat.bell.acquire() if timeout is None else seat.bell.acquire(timeout=min(timeout, _LONGEST))
    except BaseException:
        _clear(hub, end, seat)
        raise
    if not rang:
        with hub.inside():
            if hub.queue.withdraw(end, hub.now()):
                return WAIT
        seat.bell.acquire()
    answer, seat.answer = seat.answer, _NOTHING
    return cast("T | Answer", answer)


def _clear(hub: Hub[Any], end: End, seat: _Seat) -> None:
    """A wait was interrupted: it is taken back, and an item that came meanwhile goes to the next one."""
    with hub.inside():
        if not hub.queue.withdraw(end, hub.now()):
            seat.bell.acquire(blocking=False)  # it has rung, and the interrupted wait may have heard it
            if (
                end.side is Side.RECEIVER
                and seat.answer is not _NOTHING
                and not isinstance(seat.answer, Answer)
            ):
                hub.queue.give_back([seat.answer], hub.now())
                hub.wake()
            seat.answer = _NOTHING
