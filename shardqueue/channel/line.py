"""An end's side of its line to the broker: a stream of frames each way, which may be interrupted anywhere."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from shardqueue.channel import forks
from shardqueue.channel.packing import close_all
from shardqueue.channel.wire import FLAGS, SPACE, Frame, Frames, Received, received
from shardqueue.errors import BrokerGoneError

if TYPE_CHECKING:
    from collections.abc import Callable

HELLO = struct.Struct("<I")
"""What goes over a ticket, beside the broker's side of a line: the pid of the process that opens it."""
_CHUNK = 1 << 18
_LONGEST = 86_400.0
"""Seconds to wait at a time; `poll` refuses to wait for a month."""
_GONE = "the process that made the channel is gone, or its broker failed; no item can be moved"


class Line:
    """A stream of frames to the broker and from it.

    A signal's handler may raise between any two steps of Python code. So what the system says it did is put away by
    the same call that did it (`list.extend` over a `map` has no steps), and waiting is done in `poll`, where an
    interruption does no harm. What is left, frames half taken in, leaves the line `is_in_doubt` and of no more use.

    Attributes:
        is_in_doubt: something was begun that must be finished, or was interrupted.
        is_cut: the broker no longer reads.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._frames = Frames()
        self._head: tuple[memoryview, tuple[int, ...]] = (memoryview(b""), ())
        self._pending: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        self._sent: list[int] = []
        self._got: list[Received] = []
        self.is_in_doubt = False
        self.is_cut = False

    @classmethod
    def open(cls, ticket: socket.socket) -> Line:
        """Open a line by a ticket, which is closed."""
        with forks.making:
            here, there = socket.socketpair()
        try:
            socket.send_fds(ticket, [HELLO.pack(os.getpid())], [there.fileno()])
        except OSError:
            here.close()
            raise BrokerGoneError(_GONE) from None
        finally:
            there.close()
            ticket.close()
        return cls(here)

    def write(self, data: bytes, descriptors: tuple[int, ...] = ()) -> None:
        """Write a frame, if it is one, with its file descriptors, which are closed then."""
        self.put(data, descriptors)
        self.flush()

    def put(self, data: bytes, descriptors: tuple[int, ...] = ()) -> None:
        """Have a frame written by the next `flush`."""
        if self._head[0] or self._pending:
            self._pending.append((memoryview(data), descriptors))
        else:
            self._head = (memoryview(data), descriptors)

    def flush(self) -> None:
        """Write what is to be written."""
        while not self.is_cut and (self._head[0] or self._pending):
            if not self._head[0]:
                self._head = self._pending[0]
                self._pending.popleft()
            try:
                self._write()
            except BlockingIOError:
                writable = select.poll()
                writable.register(self._socket, select.POLLOUT)
                writable.poll()
            except OSError:
                self.is_cut = True  # the broker may have said why, before it went

    def _write(self) -> None:
        data, descriptors = self._head
        if not self._sent and descriptors:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(descriptors)}i", *descriptors))
            self._sent.extend(map(self._socket.sendmsg, ([data],), ([rights],)))
        elif not self._sent:
            self._sent.extend(map(self._socket.send, (data,)))
        # From here to the new head no call is made, and so no handler runs.
        self._head, self._sent = (data[self._sent[0] :], ()), []
        if descriptors:
            close_all(descriptors)

    def read(self, deadline: float | None, take_in: Callable[[Frame], None]) -> bool:
        """Take in the frames that have come, waiting for some; return False when the time is over.

        Raises:
            BrokerGoneError: the broker is gone.
        """
        while not self.poll(take_in):
            left = _LONGEST if deadline is None else min(_LONGEST, deadline - time.monotonic())
            if left <= 0:
                return False
            self._poll.poll(left * 1000)
        return True

    def poll(self, take_in: Callable[[Frame], None]) -> bool:
        """Take in the frames that have come; return whether anything has.

        Raises:
            BrokerGoneError: the broker is gone.
        """
        try:
            if not self._got:
                self._got.extend(map(self._socket.recvmsg, (_CHUNK,), (SPACE,), (FLAGS,)))
            data, descriptors = received(self._got[0])
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno == errno.EMFILE:
                raise
            raise BrokerGoneError(_GONE) from None
        self._got, self.is_in_doubt = [], True
        for frame in self._frames.feed(data, descriptors):
            take_in(frame)
        self.is_in_doubt = False
        if not data:
            raise BrokerGoneError(_GONE)
        return True

    def wake(self) -> None:
        """Have a thread that reads find the end."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        """Hang up; what was written arrives."""
        self._socket.close()
        for _, descriptors in (self._head, *self._pending):
            close_all(descriptors)
        self._pending.clear()
        self._head = (memoryview(b""), ())
        close_all(self._frames.rest())
