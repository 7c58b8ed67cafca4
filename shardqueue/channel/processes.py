"""Ends for processes: a socket to the broker, and what `links` knows around it.

A call may be interrupted by a signal's handler that raises. An end that was waiting takes its wish back at the next
call, and hears from the broker whether it was granted in the meantime. An end that was interrupted in the middle of a
read or a write says so and is of no more use.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress
from functools import partial
from multiprocessing import util
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from shardqueue.channel import forks
from shardqueue.channel.ends import Receiver, Sender, checked_seconds
from shardqueue.channel.forwarding import dump_error, forwardable, load_error
from shardqueue.channel.line import Line
from shardqueue.channel.links import ReceiverLink, SenderLink
from shardqueue.channel.packing import Packed, close_all, dumps, loads
from shardqueue.channel.wire import BY_REFERENCE, IN_FILE, MAX_BODY, Kind, encode
from shardqueue.errors import (
    BrokerGoneError,
    ChannelEmptyError,
    ChannelEndedError,
    ChannelFullError,
    ClosedError,
    InvalidInputError,
    ReceiversGoneError,
    SenderError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
_DROP, _LINGER = 6, 5
"""Priorities at the end of a process: ends nobody closed are dropped, then what they sent is waited for."""


class _Seat:
    """What outlives an end that was dropped: its line, and what is known of it."""

    def __init__(self, link: SenderLink | ReceiverLink) -> None:
        self.link = link
        self.line: Line | None = None
        self.is_used = False
        self.is_closed = False

    def read(self, deadline: float | None) -> bool:
        """Take in what the broker says, and do what it asks for; return False when the time is over."""
        assert self.line is not None
        is_in_time = self.line.read(deadline, self.link.told)
        self.repeat()
        return is_in_time

    def repeat(self) -> None:
        """Send again what is asked for again."""
        link = self.link
        while isinstance(link, SenderLink) and link.again and self.line is not None:
            number = link.again.pop()
            if number in link.kept:
                packed = dumps(link.kept[number])
                self.line.write(link.repeated(number, packed.body, packed.flags))

    def drop(self) -> None:
        """Nobody closed the end; the memory of what it sent is kept until the process ends."""
        if self.line is None or self.is_closed:
            return
        self.is_closed = True
        if self.is_used and not self.line.is_in_doubt:  # else others may have been passed the same end
            self.line.write(self.link.close(is_dropped=True))
            if isinstance(self.link, SenderLink) and self.link.kept:
                _lingering.append(self)
                return
        self.hang_up()

    def linger(self) -> None:
        """Wait until the memory of what was sent is no longer needed, and hang up."""
        assert self.line is not None
        try:
            while isinstance(self.link, SenderLink) and self.link.kept and not self.link.is_released:
                self.read(None)
        finally:
            self.hang_up()

    def hang_up(self) -> None:
        """Close the line, and let go of items that came and were not handed out: they are another receiver's."""
        if isinstance(self.link, ReceiverLink):
            while self.link.ready:
                close_all(self.link.ready.popleft().descriptors)
        if self.line is not None:
            self.line.close()


_lingering: list[_Seat] = []


def _linger_all() -> None:
    while _lingering:
        with suppress(BrokerGoneError):
            _lingering.pop().linger()


class _LingersAtExit:
    """Once in each process: before it ends, what was dropped with memory in others' hands is waited for."""

    pid = 0

    @classmethod
    def arrange(cls) -> None:
        if cls.pid != os.getpid():
            cls.pid = os.getpid()
            _lingering.clear()
            util.Finalize(None, _linger_all, exitpriority=_LINGER)


class _ProcessEnd:
    """What both ends do: pass from process to process until they are used, then belong to one.

    Args:
        name: of the end.
        ticket: with which a line is opened.
        room: file descriptors that may go with an item.
        tell: called with the process that is being started when the end is among its arguments; None where the
            broker is not in this process.
    """

    name: str

    def __init__(
        self,
        name: str,
        ticket: socket.socket,
        link: SenderLink | ReceiverLink,
        room: int,
        tell: Callable[[Any], None] | None,
    ) -> None:
        self.name = name
        self._ticket: socket.socket | None = ticket
        self._tell = tell
        self._room = room
        self._seat = _Seat(link)
        self._why = ""
        self._mutex = threading.RLock()
        self._is_leaving = False
        self._drops: Any = None
        forks.ends.add(self)

    # from process to process

    def passed(self) -> None:
        """See `forks.Passable`."""
        if self._ticket is not None:
            try:
                self._open()
            except BrokerGoneError as error:
                self._why = str(error)

    def not_passed(self) -> None:
        """See `forks.Passable`."""
        if self._ticket is not None:
            self._ticket.close()
            self._ticket = None
            self._why = f"{self.name} was not passed to this process; pass it among the arguments of Process"

    def forked(self) -> None:
        """See `forks.Inherited`."""
        self._mutex = threading.RLock()
        self._tell = None
        self._seat.hang_up()
        if self._seat.line is not None and not self._seat.is_closed:
            self._seat.line = None
            self._why = (
                f"{self.name} was opened before this process was forked and belongs to its parent; clone() it"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        popen = get_spawning_popen()
        if popen is None:
            raise ClosedError(
                f"{self.name} travels only in the arguments of a process that is being started: pass it to Process, "
                "or in the initargs of a pool"
            )
        if self._ticket is None:
            raise ClosedError(
                self._why or f"{self.name} is in use, or was passed to this process; pass a clone() of it on"
            )
        if self._tell is not None:
            self._tell(popen)
        return _arrived, (type(self), self.name, self._room, DupFd(self._ticket.fileno()))

    def _open(self) -> None:
        assert self._ticket is not None
        ticket, self._ticket = self._ticket, None
        self._seat.line = Line.open(ticket)
        _LingersAtExit.arrange()
        self._drops = util.Finalize(self, self._seat.drop, exitpriority=_DROP)

    # in one process

    def _use(self) -> Line:
        """Return the line, which is this process's from now on; under the mutex."""
        line = self._seat.line
        if self._seat.is_closed:
            raise ClosedError(
                self._why or f"{self.name} is closed; an end is used, or cloned, while it is open"
            )
        if line is not None and line.is_in_doubt:
            self._why = _IN_DOUBT.format(self.name)
            self._hang_up()
            raise ClosedError(self._why)
        if self._seat.is_used and line is not None:
            return line
        if line is None and self._ticket is not None:
            self._open()
            line = self._seat.line
        if line is None:
            raise ClosedError(self._why or f"{self.name} was interrupted while it was opened")
        self._say(line, lambda: encode(Kind.ATTACH))
        self._seat.is_used = True
        return line

    @staticmethod
    def _say(line: Line, make: Callable[[], bytes]) -> None:
        """Write a frame whose making changes what is known of the line: both, or the line is in doubt."""
        line.is_in_doubt = True
        line.put(make())
        line.is_in_doubt = False
        line.flush()

    def _turned_away(self) -> ClosedError:
        """The broker says that the end is somebody else's."""
        self._why = self._seat.link.refusal
        self._hang_up()
        return ClosedError(self._why)

    def _hang_up(self) -> None:
        self._seat.is_closed = True
        if self._drops is not None:
            self._drops.cancel()
        self._seat.hang_up()

    def _hear(self, deadline: float | None) -> bool:
        """Take in what comes next; return False when the time is over."""
        try:
            is_in_time = self._seat.read(deadline)
        except OSError:
            if self._is_leaving or self._seat.is_closed:
                raise ClosedError(f"{self.name} was closed while it waited") from None
            self._hang_up()
            raise
        if self._seat.link.refusal:
            raise self._turned_away()
        return is_in_time

    def _hear_why(self) -> None:
        """The broker no longer reads: say why."""
        while True:
            self._hear(None)

    def _enter(self) -> None:
        """Take the mutex to close; a thread that waits inside is told."""
        if not self._mutex.acquire(blocking=False):
            self._is_leaving = True
            if self._seat.line is not None:
                self._seat.line.wake()
            self._mutex.acquire()

    def _clone(self) -> socket.socket:
        """Return the ticket of a new end."""
        with self._mutex:
            line = self._use()
            with forks.making:
                here, there = socket.socketpair()
            line.write(encode(Kind.CLONE, count=1), (there.detach(),))
            return here

    def __del__(self) -> None:
        if getattr(self, "_ticket", None) is not None:
            self._ticket.close()  # type: ignore[union-attr]


def _arrived(
    kind: Callable[[str, socket.socket, int], _ProcessEnd], name: str, room: int, ticket: Any
) -> _ProcessEnd:
    """An end in the process it was passed to."""
    with forks.making:
        end = kind(name, socket.socket(fileno=ticket.detach()), room)
    end.passed()
    return end


_IN_DOUBT = (
    "{} was interrupted in the middle of reading or writing, and nobody knows how much of it was done; it cannot go "
    "on and counts as killed. Go on with another end, such as a clone() made before"
)


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + checked_seconds("timeout", timeout)


class ProcessSender(_ProcessEnd, Sender[T]):
    """A sending end of a channel between processes."""

    def __init__(
        self, name: str, ticket: socket.socket, room: int, tell: Callable[[Any], None] | None = None
    ) -> None:
        self._link = SenderLink()
        self._is_waiting = False
        super().__init__(name, ticket, self._link, room, tell)

    def send(self, item: T, timeout: float | None = None) -> None:
        """See `Sender.send`."""
        deadline = _deadline(timeout)
        with self._mutex:
            line = self._use()
            if self._is_waiting:
                self._take_back(line)
            packed = dumps(item, self._room)
            try:
                self._check(line, packed)
            except BaseException:
                close_all(packed.descriptors)
                raise
            self._say_item(line, item, packed)
            if line.is_cut:
                self._hear_why()
            if self._is_waiting:
                self._wait(line, deadline, timeout)

    def _check(self, line: Line, packed: Packed) -> None:
        """Raise when the item must not be sent."""
        if len(packed.body) > MAX_BODY:
            size = f"{len(packed.body)} bytes pickled"
            raise InvalidInputError("item", size, f"at most {MAX_BODY}", "send it in parts, or as a tensor")
        if self._link.kept:
            line.poll(self._link.told)
            self._seat.repeat()
        if self._link.gone is not None:
            raise self._refused()

    def _say_item(self, line: Line, item: T, packed: Packed) -> None:
        link = self._link
        line.is_in_doubt = True
        frame = link.item(packed.body, packed.is_by_reference, len(packed.descriptors), packed.flags)
        line.put(frame, packed.descriptors)
        link.count(item, packed.is_by_reference)
        self._is_waiting = not link.is_taken
        line.is_in_doubt = False
        line.flush()

    def _wait(self, line: Line, deadline: float | None, timeout: float | None) -> None:
        link = self._link
        is_in_time = True
        while is_in_time and not link.is_answered:
            is_in_time = self._hear(deadline)
        if is_in_time:
            self._is_waiting = False
            is_taken = link.settle()
        else:
            is_taken = self._take_back(line)
        if is_taken:
            return
        if link.gone is not None:
            raise self._refused()
        raise ChannelFullError(
            f"no room for the item within {timeout} s: the channel is full, and the receivers are slower or not "
            "there yet; it was not sent"
        )

    def _take_back(self, line: Line) -> bool:
        """The last item is no longer offered; return whether it has been taken in the meantime."""
        link = self._link
        self._say(line, link.withdraw)
        while not (link.is_refused or link.is_answered):
            self._hear(None)
        self._is_waiting = False
        return link.settle()

    def _refused(self) -> Exception:
        assert self._link.gone is not None
        error = load_error(self._link.gone)
        if isinstance(error, ReceiversGoneError):
            return error
        refusal = SenderError(f"nothing more can be sent: {error}")
        refusal.__cause__ = error
        return refusal

    def clone(self) -> ProcessSender[T]:
        """See `Sender.clone`."""
        return ProcessSender(f"a clone of {self.name}", self._clone(), self._room)

    def close(self, error: BaseException | None = None) -> None:
        """See `Sender.close`."""
        self._enter()
        try:
            self._close(error)
        finally:
            self._mutex.release()

    def _close(self, error: BaseException | None) -> None:
        if self._seat.is_closed or self._why:
            return
        body = b"" if error is None else dump_error(forwardable(error, self.name), self.name)
        line = self._use()
        self._say(line, lambda: self._link.close(body))
        self._seat.is_closed = True
        self._drops.cancel()
        if line.is_cut:
            self._hear_why()
        with suppress(*([BrokerGoneError] if self._is_leaving else [])):
            self._seat.linger()

    def __enter__(self) -> Self:
        with self._mutex:
            self._use()
        return self


class ProcessReceiver(_ProcessEnd, Receiver[T]):
    """A receiving end of a channel between processes."""

    def __init__(
        self, name: str, ticket: socket.socket, room: int, tell: Callable[[Any], None] | None = None
    ) -> None:
        self._link = ReceiverLink()
        super().__init__(name, ticket, self._link, room, tell)

    def receive(self, timeout: float | None = None) -> T:
        """See `Receiver.receive`."""
        began = time.monotonic()
        deadline = None if timeout is None else began + checked_seconds("timeout", timeout)
        with self._mutex:
            item = self._next(self._use(), deadline)
            if item is _NOTHING:
                raise ChannelEmptyError(f"no item within {timeout} s; the channel has not ended")
            if self._link.handed > 1:
                self._link.waited += time.monotonic() - began
            return cast("T", item)

    def _next(self, line: Line, deadline: float | None) -> object:
        link = self._link
        while link.ready or link.over is not None or self._await(line, deadline):
            if not link.ready:
                raise self._over(link.over or b"")
            frame = link.take()
            try:
                return loads(frame.body, frame.descriptors, bool(frame.flags & IN_FILE))
            except Exception as error:
                self._say(line, partial(encode, Kind.UNREADABLE, frame.number))
                if not (frame.flags & BY_REFERENCE and isinstance(error, _DEAD_SENDER)):
                    raise
        return _NOTHING

    def _await(self, line: Line, deadline: float | None) -> bool:
        """Wait for an answer; return False when the time is over and nothing will come."""
        link = self._link
        while True:
            if not link.is_asked:
                self._say(line, link.ask)
            is_in_time = True
            while link.is_asked:
                if is_in_time and not self._hear(deadline):
                    is_in_time = False
                    self._say(line, link.withdraw)
                elif not is_in_time:
                    self._hear(None)
            if not (link.is_refused and is_in_time):
                return not link.is_refused
            # The answer to a wish that was taken back before, in a call that was interrupted: ask again.

    def _over(self, body: bytes) -> Exception:
        if body:
            return load_error(body)
        return ChannelEndedError("the stream is over: every sender is closed and every item was handed out")

    def clone(self) -> ProcessReceiver[T]:
        """See `Receiver.clone`."""
        return ProcessReceiver(f"a clone of {self.name}", self._clone(), self._room)

    def close(self) -> None:
        """See `Receiver.close`."""
        self._enter()
        try:
            if not (self._seat.is_closed or self._why):
                self._say(self._use(), self._link.close)
                self._hang_up()
        finally:
            self._mutex.release()

    def __enter__(self) -> Self:
        with self._mutex:
            self._use()
        return self


_NOTHING = object()
_DEAD_SENDER = (ConnectionError, FileNotFoundError, EOFError)
"""What fetching a tensor's memory raises when its sender is gone."""
