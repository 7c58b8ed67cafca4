"""How an item becomes bytes and file descriptors, and an item again.

Small things are pickled. The memory of CPU tensors, and a large pickle, are copied into one file an item, without a
name, whose descriptor travels with the item: nobody needs to keep it alive. What cannot travel so stays its sender's:
CUDA tensors, memory that torch shares under names, and whatever else has a reducer of its own (a connection, a lock).
"""

from __future__ import annotations

import ctypes
import functools
import io
import mmap
import os
import pickle
import struct
import threading
import types
from multiprocessing.context import set_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from shardqueue.channel.wire import BY_REFERENCE, IN_FILE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

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
            self.by_reference = self.by_reference or kind not in _HARMLESS
            return NotImplemented
        if kind.__name__ == "Tensor":
            self.by_reference = self.by_reference or obj.device.type != "cpu"
            return reducer(_alone(obj))
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


_HARMLESS = frozenset({functools.partial, types.MethodType, type(list.append), type(int.__add__)})
"""Types that have a reducer and no memory."""
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
        # A private map: what one receiver writes is not seen by the next one, nor by its own children.
        _arriving.maps[place] = mmap.mmap(_arriving.descriptors[place], 0, access=mmap.ACCESS_COPY)
    found: mmap.mmap = _arriving.maps[place]
    return found


def _alone(tensor: Any) -> Any:
    """Return a tensor, or a copy of it when its memory is not what it shows, or mostly somebody else's."""
    import torch

    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_quantized:
        return tensor
    if tensor.requires_grad and not tensor.is_leaf:
        return tensor  # torch's reducer says why it cannot go
    storage = tensor.untyped_storage()
    is_small_part = storage.nbytes() > max(_LITTLE, 2 * tensor.numel() * tensor.element_size())
    if not (tensor.is_conj() or tensor.is_neg() or (is_small_part and not storage.is_shared())):
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().clone().requires_grad_(tensor.requires_grad)


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
