"""The frames between the ends of a channel and its broker, and how items become bytes.

A frame is a head and a body. The head is its length, a kind, flags and a number; what the number and the body mean
stands beside the kind. Each line is a stream between one end and the broker, read and written by nobody else.
"""

from __future__ import annotations

import io
import pickle
import struct
import traceback
from enum import IntEnum
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, NamedTuple

from shardqueue.channel.forwarding import raised_by
from shardqueue.errors import SenderError

if TYPE_CHECKING:
    from collections.abc import Iterator

HEAD = struct.Struct("<IBBxxQ")
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
_NUMBERS = struct.Struct("<Q")


class Frame(NamedTuple):
    """One frame."""

    kind: int
    flags: int
    number: int
    body: bytes


def encode(kind: Kind, number: int = 0, body: bytes = b"", flags: int = 0) -> bytes:
    """Return a frame as bytes."""
    return HEAD.pack(len(body), kind, flags, number) + body


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
    """Bytes as they come, cut into frames."""

    __slots__ = ("_buffer", "_wanted")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._wanted = HEAD.size

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Give the frames that are complete with these bytes."""
        buffer = self._buffer
        buffer += data
        at, end, size = 0, len(buffer), HEAD.size
        while end - at >= size:
            length, kind, flags, number = HEAD.unpack_from(buffer, at)
            if end - at < size + length:
                break
            yield Frame(kind, flags, number, bytes(buffer[at + size : at + size + length]))
            at += size + length
        del buffer[:at]


_PLAIN = (int, float, str, bytes, bool, type(None))
"""Types that need no reducer of anybody's."""


class _Pickler(ForkingPickler):
    """Pickles as `torch.multiprocessing` does, and notices what leaves memory behind in this process."""

    by_reference = False
    _reducers: frozenset[type] = frozenset()

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) in self._extra_reducers:  # type: ignore[attr-defined]
            self.by_reference = True
        return NotImplemented


def dumps(item: object) -> tuple[bytes, bool]:
    """Return an item as bytes, and whether its memory stays this process's."""
    if type(item) in _PLAIN:
        return pickle.dumps(item, pickle.HIGHEST_PROTOCOL), False
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, pickle.HIGHEST_PROTOCOL)
    pickler.dump(item)
    return buffer.getvalue(), pickler.by_reference


def loads(body: bytes) -> Any:
    """Return the item; a tensor's memory is fetched from its sender."""
    return pickle.loads(body)


class _Remote(Exception):  # noqa: N818 - shown as the cause of an error, never raised by itself
    """Where an error was raised in another process: its traceback as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def dump_error(error: Exception, sender: str) -> bytes:
    """Return an error as bytes: in one line, itself where it can be pickled, and its traceback as text."""
    line = raised_by(error)
    where = "".join(traceback.format_exception(error)) if error.__traceback__ else ""
    try:
        itself = pickle.dumps(error)
        pickle.loads(itself)
    except Exception:  # it has no way through a pipe, so its text goes
        itself = pickle.dumps(SenderError(f"{sender} ended with {line}", sender))
    return pickle.dumps((line, itself, where))


def error_line(body: bytes) -> str:
    """Return an error's type and message, without making the error."""
    line, _, _ = pickle.loads(body)
    return str(line)


def load_error(body: bytes) -> Exception:
    """Return an error from its bytes; its cause tells the traceback in the other process."""
    line, itself, where = pickle.loads(body)
    try:
        error = pickle.loads(itself)
    except Exception:  # a class this process cannot import
        error = SenderError(f"a sender ended with {line}")
    assert isinstance(error, Exception)
    if where:
        error.__cause__ = _Remote(where)
    return error
