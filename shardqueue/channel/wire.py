"""The frames between the ends of a channel and its broker.

A frame is a head and a body. The head is its length, a kind, flags, a count and a number; what the number and the
body mean stands beside the kind. The count is of file descriptors that travel with the frame, beside the stream: the
shared memory of tensors, which needs nobody to keep it alive then. Each line is a stream between one end and the
broker, read and written by nobody else.
"""

from __future__ import annotations

import array
import errno
import socket
import struct
from collections import deque
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

HEAD = struct.Struct("<IBBBxQ")
MAX_BODY = (1 << 32) - 1
"""Bytes an item may have on the wire; tensors travel beside it."""


class Kind(IntEnum):
    """What a frame says: from an end to the broker, from the broker to an end."""

    ITEM = 1
    """Sender to broker to receiver. Number: of the item, counted by its sender or for its receiver."""
    WITHDRAW = 2
    """End to broker: it no longer waits. Answered by REFUSED, unless the answer is on its way already."""
    CLOSE = 3
    """End to broker. Number: items a receiver is done with. Body: a sender's pickled error, a receiver's seconds."""
    CLONE = 4
    """End to broker, with a file descriptor: the ticket of a new end."""
    ASK = 5
    """Receiver to broker: it wants an item. Number: items it is done with. Body: seconds it has waited so far."""
    UNREADABLE = 6
    """Receiver to broker. Number: the item that could not be unpickled, which is lost."""
    ATTACH = 7
    """End to broker: it is in use, so that its death is not an orderly end."""
    ROOM = 8
    """Broker to sender. Number: items it may have sent; an item with a lower number is taken."""
    DONE = 9
    """Broker to sender. Body: numbers of items whose memory is no longer needed."""
    AGAIN = 10
    """Broker to sender: send the item with this number again, it is to be delivered again."""
    GONE = 11
    """Broker to sender: nothing more is taken. Body: a pickled error."""
    BYE = 12
    """Broker to sender that is closed: nothing more is needed of it."""
    END = 13
    """Broker to receiver: the stream is over. Body: empty, or a pickled error."""
    REFUSED = 14
    """Broker to end. To WITHDRAW: it was still waiting. To a new line: this end is another process's, named in
    the body."""


BY_REFERENCE = 1
"""Flag of an item: its memory is its sender's (shared memory, CUDA IPC)."""
RETURNED = 2
"""Flag of an item: the answer to AGAIN."""
DROPPED = 4
"""Flag of CLOSE: nobody closed the end, its process ended or the garbage collector found it."""
ANSWER = 8
"""Flag of an item: with it the answer to ASK is complete; items without it are followed by another."""
IN_FILE = 16
"""Flag of an item: its body says where in one of its files it is."""
_NUMBERS = struct.Struct("<Q")


class Frame(NamedTuple):
    """One frame."""

    kind: int
    flags: int
    number: int
    body: bytes
    descriptors: tuple[int, ...] = ()


def encode(kind: Kind, number: int = 0, body: bytes = b"", flags: int = 0, count: int = 0) -> bytes:
    """Return a frame as bytes; `count` file descriptors are to travel with it."""
    return HEAD.pack(len(body), kind, flags, count, number) + body


def encode_numbers(numbers: list[int]) -> bytes:
    """Return the body of DONE."""
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def decode_numbers(body: bytes) -> list[int]:
    """Return what `encode_numbers` was given."""
    return [number for (number,) in _NUMBERS.iter_unpack(body)]


_SECONDS = struct.Struct("<d")


def encode_seconds(seconds: float) -> bytes:
    """Return the body of ASK."""
    return _SECONDS.pack(seconds)


def decode_seconds(body: bytes) -> float:
    """Return what `encode_seconds` was given."""
    seconds: float = _SECONDS.unpack(body)[0]
    return seconds


class Frames:
    """Bytes and file descriptors as they come, cut into frames."""

    __slots__ = ("_buffer", "_descriptors")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._descriptors: deque[int] = deque()

    def feed(self, data: bytes, descriptors: Iterable[int] = ()) -> Iterator[Frame]:
        """Give the frames that are complete with these bytes."""
        buffer = self._buffer
        buffer += data
        self._descriptors.extend(descriptors)
        at, end, size = 0, len(buffer), HEAD.size
        while end - at >= size:
            length, kind, flags, count, number = HEAD.unpack_from(buffer, at)
            if end - at < size + length:
                break
            with_it = tuple(self._descriptors.popleft() for _ in range(count)) if count else ()
            yield Frame(kind, flags, number, bytes(buffer[at + size : at + size + length]), with_it)
            at += size + length
        del buffer[:at]

    def rest(self) -> list[int]:
        """Return the descriptors that came and whose frame did not."""
        rest = list(self._descriptors)
        self._descriptors.clear()
        return rest


Received = tuple[bytes, list[tuple[int, int, bytes]], int, object]
"""What `recvmsg` returns."""


def receive(sock: socket.socket, size: int) -> tuple[bytes, list[int]]:
    """Return what comes over a socket: bytes, and file descriptors.

    Raises:
        OSError: the process has too many files open to take the descriptors, or the socket failed.
    """
    return received(sock.recvmsg(size, SPACE, FLAGS))


def received(came: Received) -> tuple[bytes, list[int]]:
    """Return what `recvmsg` returned as bytes and file descriptors.

    Raises:
        OSError: the process has too many files open to take the descriptors.
    """
    data, extra, flags, _ = came
    descriptors = array.array("i")
    for level, kind, body in extra:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(body[: len(body) - len(body) % descriptors.itemsize])
    if flags & socket.MSG_CTRUNC:
        raise OSError(
            errno.EMFILE,
            "a tensor's memory could not be received: this process has too many files open; raise the limit "
            "(ulimit -n), hold fewer tensors, or call torch.multiprocessing.set_sharing_strategy('file_system')",
        )
    return data, list(descriptors)


_AT_ONCE = 256
"""File descriptors that one message may bring; the kernel sends 253 at most."""
SPACE = socket.CMSG_SPACE(_AT_ONCE * 4)
FLAGS = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
"""Arguments of `recvmsg`, after the size."""
