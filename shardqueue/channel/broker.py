"""The broker: one thread in the process that made the channel, one line to each end, no lock shared between ends.

An end begins as a *ticket*, one side of a socket pair whose other side is the broker's. A process that an end was
passed to opens a *line* of its own, another socket pair, and sends the broker's side over the ticket. So a line
belongs to exactly one process, and ends with it. Several processes may be passed the same end
(`torch.multiprocessing.spawn` gives all of them the same arguments): the first to use it has it. An end that nobody
can use any more, because those it was passed to are gone or use another one, counts as closed.

The thread sleeps in `select` while nothing moves. It ends when every end is closed; if it fails, or its process dies,
all lines are cut and the ends say so.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import selectors
import socket
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from shardqueue.channel import forks
from shardqueue.channel.line import HELLO
from shardqueue.channel.packing import close_all
from shardqueue.channel.processes import ProcessReceiver, ProcessSender
from shardqueue.channel.report import ChannelReport, Side
from shardqueue.channel.watch import Watch, warn
from shardqueue.channel.wire import Frame, Frames, Kind, encode, receive

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardqueue.channel.exchange import Exchange, Out, Port
    from shardqueue.channel.handoff import Handoff

T = TypeVar("T")
_log = logging.getLogger("shardqueue")
_CHUNK = 1 << 18
_DESCRIPTORS = 128
"""File descriptors the items of a full queue may hold open in this process, besides those in receivers' hands; an
eighth of what it may open, where that is less."""
_LOOK = 0.005
"""Seconds between two looks at a process that is just being started; nothing else is ever looked at twice."""
_LOOKS = 12_000


@dataclass(eq=False, slots=True)
class _Line:
    """The broker's side of a line."""

    ticket: _Ticket
    pid: int
    socket: socket.socket
    frames: Frames = field(default_factory=Frames)
    unsent: deque[tuple[bytes | memoryview, tuple[int, ...]]] = field(default_factory=deque)
    is_blocked: bool = False


@dataclass(eq=False, slots=True)
class _Ticket:
    """The broker's side of a ticket.

    Attributes:
        port: the end.
        socket: None once no process holds the other side.
        lines: of the processes that have the end and may use it, by pid.
        line: of the one that uses it.
        expected: sentinels of processes it was passed to which have not opened a line yet.
        passed: pids of all processes it was ever passed to.
    """

    port: Port
    socket: socket.socket | None
    lines: dict[int, _Line] = field(default_factory=dict)
    line: _Line | None = None
    expected: dict[int, int] = field(default_factory=dict)
    passed: set[int] = field(default_factory=set)

    @property
    def is_with_nobody(self) -> bool:
        """Whether no process uses the end, or has it and may."""
        return self.line is None and not self.lines and not self.expected


@dataclass(slots=True)
class _Launch:
    """A process that is being started with an end among its arguments."""

    ticket: _Ticket
    popen: weakref.ref[Any]
    looks: int = 0


class Broker:
    """Moves the items of one channel between processes.

    Args:
        exchange: what is to be done, without I/O.
        watch: who is told how it goes.
    """

    def __init__(self, exchange: Exchange, watch: Watch) -> None:
        self._exchange, self._watch = exchange, watch
        self._mutex = threading.Lock()
        self._actions: deque[Callable[[float], object]] = deque()
        self._tickets: dict[Port, _Ticket] = {}
        self._launches: list[_Launch] = []
        self._is_stirred = self._is_in_doubt = False
        self._children: set[int] = set()
        self._busy: set[int] = set()
        self._pid = os.getpid()
        with forks.making:
            self._selector = selectors.DefaultSelector()
            self._awake, self._alarm = socket.socketpair()
            forks.brokers.add(self)
        self._awake.setblocking(False)
        self._alarm.setblocking(False)
        self._selector.register(self._awake, selectors.EVENT_READ, self._roused)
        self._thread = threading.Thread(target=self._run, name="shardqueue-channel", daemon=True)
        self._thread.start()

    # for the program's threads

    @property
    def queue(self) -> Handoff[Any]:
        """The counted queue."""
        return self._exchange.queue

    @property
    def is_ours(self) -> bool:
        """Whether this process made the channel."""
        return self._pid == os.getpid()

    def sender(self) -> ProcessSender[Any] | None:
        """Return the next declared sender, or None when all are taken."""
        return cast("ProcessSender[Any] | None", self._take(Side.SENDER))

    def receiver(self) -> ProcessReceiver[Any] | None:
        """Return the next declared receiver, or None when all are taken."""
        return cast("ProcessReceiver[Any] | None", self._take(Side.RECEIVER))

    def _take(self, side: Side) -> ProcessSender[Any] | ProcessReceiver[Any] | None:
        with forks.making, self._mutex:
            port = self._exchange.take(side)
            if port is None:
                return None
            here, there = socket.socketpair()
            self._sell(port, here)
            kind = ProcessSender if side is Side.SENDER else ProcessReceiver
            room = _descriptors() // self.queue.capacity
            return kind(port.end.name, there, room, partial(_pass, weakref.ref(self), port))

    def later(self, action: Callable[[float], object]) -> None:
        """Have the thread do it; from anywhere, the garbage collector included."""
        self._actions.append(action)
        with contextlib.suppress(OSError):
            self._alarm.send(b"!")

    def expect(self, child: int) -> None:
        """See `forks.Making`."""
        self._children.add(child)
        self.later(lambda _: self._await(child))

    def forget(self) -> None:
        """Nobody can make the ends that are missing: close them, from anywhere."""
        self.later(self._exchange.forgo)

    def forgo(self, error: Exception | None = None) -> dict[Side, int]:
        """Close the declared ends that nobody took, senders with the error; return how many there were."""
        with self._mutex:
            gone = self._exchange.forgo(time.monotonic(), error)
        self.later(_nothing)
        return gone

    def report(self) -> ChannelReport:
        """Return what happened so far."""
        with self._mutex:
            return self._exchange.report(time.monotonic())

    def forked(self) -> None:
        """Close the child's copies; nothing here works in the child."""
        self._mutex = threading.Lock()
        self._cut()
        with contextlib.suppress(OSError):
            close_all(self._exchange.descriptors())

    # the thread

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except Exception:
            _log.exception("the broker of a channel failed; every end of it gets an error")
            raise
        finally:
            with forks.making, self._mutex:
                forks.brokers.discard(self)
                self._cut()

    def _turn(self) -> bool:
        """Do what there is to do; return whether there may be more."""
        wait = 0.0 if self._is_in_doubt else _LOOK if self._launches else None
        events = self._selector.select(wait)
        with forks.making, self._mutex:
            now = time.monotonic()
            for key, mask in events:
                key.data(mask, now)
            while self._actions:
                self._actions.popleft()(now)
            # A process that ends cuts several lines, and may have said something on others: all that comes first.
            if self._is_in_doubt and not self._is_stirred and not self._children:
                self._check(now)
            self._is_in_doubt, self._is_stirred = self._is_stirred, False
            if self._launches:
                self._look()
            self._flush()
            news, self._exchange.news = self._exchange.news, []
            goes_on = not self._exchange.is_finished or any(
                line.unsent for ticket in self._tickets.values() for line in ticket.lines.values()
            )
        for message in news:
            warn(message)
        self._watch.look(self)
        return goes_on

    def _roused(self, _mask: int, _now: float) -> None:
        with contextlib.suppress(BlockingIOError):
            self._awake.recv(4096)

    def _await(self, child: int) -> None:
        self._selector.register(child, selectors.EVENT_READ, partial(self._on_forked, child))

    def _on_forked(self, child: int, _mask: int, _now: float) -> None:
        """A forked child has opened lines for the ends it was passed, or is dead."""
        self._selector.unregister(child)
        os.close(child)
        self._children.discard(child)
        self._is_stirred = True

    # tickets

    def _sell(self, port: Port, here: socket.socket) -> None:
        """A new end: watch its ticket. Sockets are in the list before any fork, so that each child closes them."""
        here.setblocking(False)
        self._tickets[port] = _Ticket(port, here)
        self.later(lambda _: self._watch_ticket(self._tickets[port]))

    def _watch_ticket(self, ticket: _Ticket) -> None:
        if ticket.socket is not None:
            self._selector.register(ticket.socket, selectors.EVENT_READ, partial(self._on_ticket, ticket))

    def _on_ticket(self, ticket: _Ticket, _mask: int, _now: float) -> None:
        assert ticket.socket is not None
        try:
            data, descriptors = receive(ticket.socket, HELLO.size)
        except BlockingIOError:
            return
        if data:
            self._open(_Line(ticket, HELLO.unpack(data)[0], socket.socket(fileno=descriptors[0])))
            return
        self._selector.unregister(ticket.socket)
        ticket.socket.close()
        ticket.socket = None
        self._is_stirred = True

    def _open(self, line: _Line) -> None:
        ticket = line.ticket
        line.socket.setblocking(False)
        self._expect_no_more(ticket, line.pid)
        ticket.passed.add(line.pid)
        is_closed = not ticket.port.end.open and not self._exchange.reopen(ticket.port)
        if ticket.line is not None or is_closed or line.pid in ticket.lines:
            self._turn_away(line)
            return
        ticket.lines[line.pid] = line
        self._selector.register(line.socket, selectors.EVENT_READ, partial(self._on_line, line))
        self._revoke(ticket)
        self._is_stirred = True

    def _turn_away(self, line: _Line) -> None:
        ticket = line.ticket
        name = ticket.port.end.name
        if ticket.line is not None:
            why = f"{name} is in use in process {ticket.line.pid}"
        elif not ticket.port.end.open:
            why = f"{name} counts as closed already"
        else:
            why = (
                f"process {line.pid} uses another end of the channel, and {name} was passed to others as well"
            )
        why += "; an end is for one process, clone() one for another"
        with contextlib.suppress(OSError):
            line.socket.send(encode(Kind.REFUSED, body=why.encode()))
        line.socket.close()

    def _pass(self, port: Port, popen: weakref.ref[Any]) -> None:
        """An end goes into the arguments of a process that is being started."""
        self._launches.append(_Launch(self._tickets[port], popen))

    def _look(self) -> None:
        """Processes that were started: from now on their sentinels tell when they die."""
        waiting = []
        for launch in self._launches:
            popen = launch.popen()
            launch.looks += 1
            is_up = None not in (getattr(popen, "pid", None), getattr(popen, "sentinel", None))
            if popen is not None and is_up:
                self._expect(launch.ticket, popen)
            elif popen is not None and launch.looks < _LOOKS:
                waiting.append(launch)
        self._launches = waiting

    def _expect(self, ticket: _Ticket, popen: Any) -> None:
        if popen.pid in ticket.passed:
            return
        ticket.passed.add(popen.pid)
        try:
            sentinel = os.dup(popen.sentinel)
        except OSError:  # it has ended, and was waited for
            self._is_stirred = True
            return
        ticket.expected[popen.pid] = sentinel
        self._selector.register(sentinel, selectors.EVENT_READ, partial(self._on_death, ticket, popen.pid))

    def _on_death(self, ticket: _Ticket, pid: int, _mask: int, _now: float) -> None:
        self._expect_no_more(ticket, pid)
        self._is_stirred = True

    def _expect_no_more(self, ticket: _Ticket, pid: int) -> None:
        sentinel = ticket.expected.pop(pid, None)
        if sentinel is not None:
            self._selector.unregister(sentinel)
            os.close(sentinel)

    def _check(self, now: float) -> None:
        """An end that nobody uses counts as closed when those that it was passed to are gone.

        Of several ends that were passed to several processes, each process that is gone was meant for one: when there
        are no more ends without a process than such processes, these ends are theirs. A process that uses another end
        was not meant, it was passed this one by the way. The maker may still pass on what it has kept: an end that is
        used after all counts again.
        """
        idle = [ticket for ticket in self._tickets.values() if ticket.is_with_nobody and ticket.port.end.open]
        shared = [ticket for ticket in idle if len(ticket.passed) > 1]
        gone = {pid for ticket in shared for pid in ticket.passed} - self._busy
        for ticket in idle:
            is_gone = len(shared) <= len(gone) if ticket in shared else bool(ticket.passed)
            if ticket.socket is None or is_gone:
                self._exchange.hung_up(ticket.port, now)

    def _revoke(self, ticket: _Ticket) -> None:
        """Of several processes that were passed the same end, those that use another one are not meant."""
        if ticket.line is not None or len(ticket.passed) < 2:
            return
        for pid in self._busy & set(ticket.lines):
            line = ticket.lines.pop(pid)
            self._selector.unregister(line.socket)
            self._turn_away(line)
        for pid in self._busy & set(ticket.expected):
            self._expect_no_more(ticket, pid)

    # lines

    def _on_line(self, line: _Line, mask: int, now: float) -> None:
        if mask & selectors.EVENT_WRITE:
            self._write(line)
        if (
            mask & selectors.EVENT_READ and line.socket.fileno() >= 0
        ):  # it may have been revoked this very turn
            self._read(line, now)

    def _read(self, line: _Line, now: float) -> None:
        try:
            data, descriptors = receive(line.socket, _CHUNK)
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno == errno.EMFILE:
                self._exchange.news.append(f"{line.ticket.port.end.name}: {error.strerror}")
            data, descriptors = b"", []
        if not data:
            self._hang_up(line, now)
            return
        for frame in line.frames.feed(data, descriptors):
            if not self._told(line, frame, now):
                return

    def _told(self, line: _Line, frame: Frame, now: float) -> bool:
        """Take in a frame; return whether the line may go on."""
        ticket = line.ticket
        if ticket.line is not line:
            if ticket.line is not None:
                self._drop(line)
                self._turn_away(line)
                return False
            ticket.line = line
            ticket.port.pid = line.pid
            self._busy.add(line.pid)
            for other in self._tickets.values():
                self._revoke(other)
            self._is_stirred = True
        if frame.kind == Kind.CLONE:
            here = socket.socket(fileno=frame.descriptors[0])
            port = self._exchange.clone(ticket.port)
            if port is None:
                here.close()
            else:
                self._sell(port, here)
            return True
        self._exchange.told(ticket.port, frame, now)
        return True

    def _hang_up(self, line: _Line, now: float) -> None:
        self._drop(line)
        line.socket.close()
        for descriptor in line.frames.rest():
            os.close(descriptor)
        if line.ticket.line is line:
            self._exchange.hung_up(line.ticket.port, now)
        else:
            self._is_stirred = True

    def _drop(self, line: _Line) -> None:
        self._selector.unregister(line.socket)
        line.ticket.lines.pop(line.pid, None)

    def _flush(self) -> None:
        for port, ticket in self._tickets.items():
            line = ticket.line
            if port.out and line is not None:  # what is said to an end before it is used waits until it is
                line.unsent.extend(_merged(port.out))
                port.out.clear()
                if not line.is_blocked:
                    self._write(line)
        for descriptor in self._exchange.free:
            os.close(descriptor)
        self._exchange.free.clear()

    def _write(self, line: _Line) -> None:
        try:
            while line.unsent:
                data, descriptors = line.unsent[0]
                if descriptors:
                    sent = socket.send_fds(line.socket, [data], list(descriptors))
                else:
                    sent = line.socket.send(data)
                if sent < len(data):
                    line.unsent[0] = (memoryview(data)[sent:], ())
                else:
                    line.unsent.popleft()
        except BlockingIOError:
            pass
        except OSError:
            line.unsent.clear()  # the end of the line is read, too, and means more
        if bool(line.unsent) != line.is_blocked and line.socket.fileno() >= 0:
            line.is_blocked = not line.is_blocked
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if line.is_blocked else 0)
            with contextlib.suppress(KeyError):
                self._selector.modify(line.socket, events, partial(self._on_line, line))

    def _cut(self) -> None:
        """Close every socket."""
        self._selector.close()
        self._awake.close()
        self._alarm.close()
        close_all(self._children)
        self._children.clear()
        for ticket in self._tickets.values():
            if ticket.socket is not None:
                ticket.socket.close()
            for line in ticket.lines.values():
                line.socket.close()
            close_all(ticket.expected.values())
            ticket.expected.clear()


def _pass(broker: weakref.ref[Broker], port: Port, popen: Any) -> None:
    """An end of the broker is being pickled for a process that is being started."""
    if (found := broker()) is not None:
        process = weakref.ref(popen)
        found.later(lambda _: found._pass(port, process))


def _merged(out: list[Out]) -> list[Out]:
    """Frames that go without descriptors are written together."""
    merged: list[Out] = []
    together: list[bytes] = []
    for data, descriptors in out:
        if descriptors:
            merged += [(b"".join(together), ()), (data, descriptors)]
            together = []
        else:
            together.append(data)
    merged.append((b"".join(together), ()))
    return [entry for entry in merged if entry[0]]


def _descriptors() -> int:
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _DESCRIPTORS if allowed == resource.RLIM_INFINITY else min(_DESCRIPTORS, allowed // 8)


def _nothing(_: float) -> None:
    pass
