"""The frames between the ends of a channel and its broker, and how items become bytes.

A frame is a head and a body. The head is its length, a kind, flags, a count and a number; what the number and the
body mean stands beside the kind. The count is of file descriptors that travel with the frame, beside the stream: the
shared memory of tensors, which needs nobody to keep it alive then. Each line is a stream between one end and the
broker, read and written by nobody else.
"""

from __future__ import annotations

import array
import ctypes
import errno
import io
import mmap
import os
import pickle
import socket
import struct
import threading
import traceback
from collections import deque
from enum import IntEnum
from multiprocessing.context import set_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from shardqueue.channel.forwarding import raised_by
from shardqueue.errors import SenderError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

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


IN_FILE = 16
"""Flag of an item: its body says where in one of its files it is."""
ANSWER = 8
"""Flag of an item: with it the answer to ASK is complete; items without it are followed by another."""
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


def receive(sock: socket.socket, size: int, flags: int = 0) -> tuple[bytes, list[int]]:
    """Return what comes over a socket: bytes, and file descriptors.

    Raises:
        OSError: the process has too many files open to take the descriptors, or the socket failed.
    """
    space = socket.CMSG_SPACE(_AT_ONCE * 4)
    data, extra, came, _ = sock.recvmsg(size, space, flags | getattr(socket, "MSG_CMSG_CLOEXEC", 0))
    descriptors = array.array("i")
    for level, kind, body in extra:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(body[: len(body) - len(body) % descriptors.itemsize])
    if came & socket.MSG_CTRUNC:
        raise OSError(
            errno.EMFILE,
            "a tensor's memory could not be received: this process has too many files open; raise the limit "
            "(ulimit -n), hold fewer tensors, or call torch.multiprocessing.set_sharing_strategy('file_system')",
        )
    return data, list(descriptors)


_AT_ONCE = 256
"""File descriptors that one message may bring; the kernel sends 253 at most."""
_PLAIN = (int, float, str, bytes, bool, type(None))
"""Types that need no reducer of anybody's."""


class _Place:
    """A file descriptor in a pickled item: which of those that travel with it."""

    def __init__(self, place: int) -> None:
        self.place = place

    def detach(self) -> int:
        """Return the descriptor, which is now the caller's."""
        return os.dup(_arriving.descriptors[self.place])


class _Collector:
    """Takes file descriptors from reducers, as a process does that is being started."""

    DupFd = _Place

    def __init__(self) -> None:
        self.descriptors: list[int] = []

    def duplicate_for_child(self, descriptor: int) -> int:
        """Return the place of a descriptor. It is duplicated: its tensor may be gone before it is sent."""
        self.descriptors.append(os.dup(descriptor))
        return len(self.descriptors) - 1


_arriving = threading.local()


class _Pickler(ForkingPickler):
    """Pickles as `torch.multiprocessing` does, but for the memory of tensors on the CPU.

    Torch moves a tensor into shared memory and hands its descriptor to a thread of this process, which waits for the
    receiver to fetch it. Here the memory of all tensors of an item is copied into one file, which has no name and no
    limit but the machine's, and whose descriptor travels with the item; a little is pickled as it is, and everything
    where there is no room for a descriptor. What is shared memory already is not copied: its own descriptor goes,
    which torch's reducer gives to the collector.
    """

    def __init__(self, room: int) -> None:
        self.body = io.BytesIO()
        super().__init__(self.body, pickle.HIGHEST_PROTOCOL)
        self.collector = _Collector()
        self.by_reference = False
        self._room = room if hasattr(os, "memfd_create") else 0
        self._file: int | None = None
        self._place = 0
        self._size = 0

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        reducer = self._extra_reducers.get(kind)  # type: ignore[attr-defined]
        if reducer is None:
            return NotImplemented
        if not kind.__module__.startswith("torch"):
            self.by_reference = True
            return NotImplemented
        if kind.__name__ != "UntypedStorage":
            self.by_reference = self.by_reference or _is_on_device(obj)
            return reducer(obj)
        return self._storage(obj, reducer)

    def _storage(self, storage: Any, reducer: Callable[[Any], Any]) -> Any:
        is_on_cpu, size = storage.device.type == "cpu", storage.nbytes()
        if is_on_cpu and size == 0:
            return reducer(storage)
        if not is_on_cpu or _are_names_wanted():
            self.by_reference = True
            return reducer(storage)
        if not storage.is_shared():
            return self._copied(storage, size)
        if len(self.collector.descriptors) >= self._room:
            self.by_reference = True
            return reducer(storage)
        set_spawning_popen(cast("Any", self.collector))
        try:
            return reducer(storage)
        finally:
            set_spawning_popen(None)

    def _copied(self, storage: Any, size: int) -> Any:
        if size <= _LITTLE or (self._file is None and len(self.collector.descriptors) >= self._room):
            return _from_bytes, (ctypes.string_at(storage.data_ptr(), size),)
        at = self.write(memoryview((ctypes.c_char * size).from_address(storage.data_ptr())).cast("B"))
        return _from_file, (self._place, at, size)

    def write(self, memory: memoryview) -> int:
        """Append to the item's file; return where."""
        if self._file is None:
            self._file = os.memfd_create("shardqueue")
            self._place = len(self.collector.descriptors)
            self.collector.descriptors.append(self._file)
        at, done = self._size, 0
        while done < len(memory):
            done += os.pwrite(self._file, memory[done:], at + done)
        self._size = -(-(at + done) // _ALIGNED) * _ALIGNED
        return at

    def pack(self, item: object) -> Packed:
        """Return the item as it travels."""
        self.dump(item)
        with self.body.getbuffer() as body:
            if len(body) <= _LARGE or (self._file is None and len(self.collector.descriptors) >= self._room):
                return Packed(bytes(body), self.by_reference, tuple(self.collector.descriptors))
            where = _IN_FILE.pack(self.write(body), len(body), self._place)
        return Packed(where, self.by_reference, tuple(self.collector.descriptors), is_in_file=True)


_LITTLE, _LARGE = 4096, 1 << 16
"""Bytes of memory that are pickled as they are; bytes that go through a line and not into a file."""
_ALIGNED = 64
_IN_FILE = struct.Struct("<QQQ")
"""Where a pickled item is: offset, size, and which of its descriptors."""


def _from_bytes(memory: bytes) -> Any:
    """Return a storage of its own."""
    import torch

    return torch.frombuffer(bytearray(memory), dtype=torch.uint8).untyped_storage()


def _from_file(place: int, at: int, size: int) -> Any:
    """Return a storage in the item's file."""
    import torch

    return torch.frombuffer(_mapped(place), dtype=torch.uint8, count=size, offset=at).untyped_storage()


def _mapped(place: int) -> mmap.mmap:
    if place not in _arriving.maps:
        _arriving.maps[place] = mmap.mmap(_arriving.descriptors[place], 0)
    found: mmap.mmap = _arriving.maps[place]
    return found


def _is_on_device(obj: Any) -> bool:
    """Whether it is a tensor whose memory is not the host's."""
    import torch

    return isinstance(obj, torch.Tensor) and obj.device.type != "cpu"


def _are_names_wanted() -> bool:
    """Whether torch is to share memory under names, because descriptors are scarce."""
    import torch.multiprocessing

    strategy = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    return bool(strategy != "file_descriptor")


class Packed(NamedTuple):
    """An item as it travels.

    Attributes:
        body: pickled, or where it is in the file.
        is_by_reference: some of its memory stays its sender's.
        descriptors: that go with it; whoever has the item closes them.
        is_in_file: see body.
    """

    body: bytes
    is_by_reference: bool = False
    descriptors: tuple[int, ...] = ()
    is_in_file: bool = False

    @property
    def flags(self) -> int:
        """Of the frame."""
        return (BY_REFERENCE if self.is_by_reference else 0) | (IN_FILE if self.is_in_file else 0)


def dumps(item: object, room: int = 0) -> Packed:
    """Return an item as it travels, with `room` file descriptors at most."""
    if type(item) in _PLAIN and not (isinstance(item, str | bytes) and len(item) > _LARGE):
        return Packed(pickle.dumps(item, pickle.HIGHEST_PROTOCOL))
    pickler = _Pickler(room)
    try:
        return pickler.pack(item)
    except BaseException:
        close_all(pickler.collector.descriptors)
        raise


def close_all(descriptors: Iterable[int]) -> None:
    """Close file descriptors."""
    for descriptor in descriptors:
        os.close(descriptor)


def loads(body: bytes, descriptors: tuple[int, ...] = (), is_in_file: bool = False) -> Any:
    """Return the item; the descriptors are used up, whatever happens."""
    if not descriptors:
        return pickle.loads(body)
    _arriving.descriptors, _arriving.maps = descriptors, {}
    try:
        if not is_in_file:
            return pickle.loads(body)
        at, size, place = _IN_FILE.unpack(body)
        with memoryview(_mapped(place)) as whole, whole[at : at + size] as part:
            return pickle.loads(part)
    finally:
        close_all(descriptors)
        _arriving.descriptors, _arriving.maps = (), {}


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
