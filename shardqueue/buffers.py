"""The buffers of a module of which each rank has a replica, brought together after a step.

Only those that changed on some rank are. Floating ones become their mean, by micro-batches; integer ones grow by what
all ranks added, as a counter of batches would; bool ones stay each rank's own.

Changes are seen by the tensor's version and place, which batch norm's statistics escape; so where one buffer of a
module changed, all of them count as changed. Not seen is what goes through `.data` or such a kernel in a module with
no other buffer that changes. A buffer that some rank has in another shape than at first, such as a table that grows
with the longest sequence, is left alone on all.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from shardqueue.flat import Flat, summed_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.nn import Module


class Buffers:
    """The buffers that a module has now, by name."""

    def __init__(self, module: Module, group: dist.ProcessGroup | None) -> None:
        self._module, self._group = module, group
        self._shapes = {name: buffer.shape for name, buffer in module.named_buffers()}
        self._seen: dict[str, Seen] = {}
        self._counters: dict[str, Tensor] = {}
        self._under_way: list[tuple[list[str], Flat, dist.Work | None]] = []

    def begin(self) -> None:
        """Remember what the buffers are before a step; of integer ones keep a copy, made anew when they change."""
        for name, buffer in self._now().items():
            if self._changed(name, buffer):
                self._seen[name] = Seen(buffer)
                if is_counter(buffer):
                    self._counters[name] = buffer.clone()

    def flags(self) -> list[float]:
        """For each buffer 1.0 if it changed in this step, 0.0 if not, infinity if it has not the shape it had."""
        now = self._now()
        changed = {owner(name) for name, buffer in now.items() if self._changed(name, buffer)}
        return [float(owner(name) in changed) if name in now else math.inf for name in self._shapes]

    @torch.no_grad()
    def start(self, flags: Sequence[float], count: int) -> None:
        """Begin to sum the buffers that changed on some rank, of which this one trained `count` micro-batches."""
        now = self._now()
        alike: dict[tuple[torch.device, torch.dtype], list[str]] = {}
        for name, flag in zip(self._shapes, flags, strict=True):
            if 0 < flag < math.inf and now[name].dtype is not torch.bool:
                alike.setdefault((now[name].device, summed_in(now[name].dtype)), []).append(name)
        for names in alike.values():
            flat = Flat([now[name] for name in names])
            torch._foreach_copy_(flat.parts, [now[name] for name in names])
            if is_counter(flat.whole):
                torch._foreach_sub_(flat.parts, [self._counters[name] for name in names])
            elif count:
                flat.whole.mul_(count)
            else:
                flat.whole.zero_()
            work = dist.all_reduce(flat.whole, group=self._group, async_op=True)
            self._under_way.append((names, flat, work))

    @torch.no_grad()
    def finish(self, counts: int) -> None:
        """Wait for the sums over `counts` micro-batches, and put what they say into the buffers."""
        now = self._now()
        for names, flat, work in self._under_way:
            if work is not None:
                work.wait()
            if is_counter(flat.whole):
                torch._foreach_add_(flat.parts, [self._counters[name] for name in names])
            else:
                flat.whole.div_(counts)
            torch._foreach_copy_([now[name] for name in names], flat.parts)
        self._under_way = []

    def forget(self) -> None:
        """Hold no buffer any more, nor a copy of one."""
        self._seen, self._counters, self._under_way = {}, {}, []

    def _changed(self, name: str, buffer: Tensor) -> bool:
        return name not in self._seen or not self._seen[name].is_still(buffer)

    def _now(self) -> dict[str, Tensor]:
        """The buffers as they are, but for those that have another shape than at first."""
        buffers = self._module.named_buffers()
        return {name: buffer for name, buffer in buffers if buffer.shape == self._shapes.get(name)}


class Seen:
    """A buffer as it was; holding it keeps its place in memory from being given to another."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer, self._place, self._version = buffer, buffer.data_ptr(), version(buffer)

    def is_still(self, buffer: Tensor) -> bool:
        """Whether the buffer is the same, and unchanged."""
        place = buffer.data_ptr()
        return buffer is self._buffer and place == self._place and version(buffer) == self._version


def version(tensor: Tensor) -> int:
    """How often it was changed in place; 0 for a tensor of inference mode, which does not count."""
    return 0 if tensor.is_inference() else tensor._version


def is_counter(buffer: Tensor) -> bool:
    """Whether it holds integers."""
    return summed_in(buffer.dtype) is torch.int64 and buffer.dtype is not torch.bool


def owner(name: str) -> str:
    """The name of the module that a buffer belongs to."""
    return name.rpartition(".")[0]
