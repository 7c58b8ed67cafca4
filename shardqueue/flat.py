"""Tensors that are sent or summed in one piece.

Half precision is summed in float32, all else in its own precision.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from shardqueue.errors import AgreementError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import TypeVar

    from torch import Tensor
    from torch.nn import Module

    T = TypeVar("T", bound=Tensor)

BUCKET_BYTES = 25 * 2**20
"""Bytes of tensors, in their own type, from which a piece is full."""


class Flat:
    """One tensor with room for each of some tensors alike, in the type that they are summed in.

    Attributes:
        whole: real, of one dimension.
        parts: views of it, one for each tensor, in its shape; complex where the tensors are.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        device, dtype = tensors[0].device, tensors[0].dtype
        width = 2 if dtype.is_complex else 1
        sizes = [tensor.numel() * width for tensor in tensors]
        self.whole = torch.empty(sum(sizes), dtype=summed_in(dtype), device=device)
        parts = torch.split(self.whole, sizes)
        if dtype.is_complex:
            parts = tuple(torch.view_as_complex(part.view(-1, 2)) for part in parts)
        self.parts = [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def summed_in(dtype: torch.dtype) -> torch.dtype:
    """The real type in which tensors of a type are summed."""
    if not dtype.is_floating_point and not dtype.is_complex:
        return torch.int64
    return torch.float64 if dtype.to_real() is torch.float64 else torch.float32


def pieces(tensors: Iterable[T], size: int) -> Iterator[list[T]]:
    """Tensors of one device and type together, of `size` bytes or a little more, in the order of their last ones."""
    begun: dict[tuple[torch.device, torch.dtype], list[T]] = {}
    for tensor in tensors:
        key = tensor.device, tensor.dtype
        piece = [*begun.pop(key, ()), tensor]
        if sum(one.nbytes for one in piece) >= size:
            yield piece
        else:
            begun[key] = piece
    yield from begun.values()


def fingerprint(tensors: Iterable[tuple[Tensor, bool]]) -> int:
    """What differs where tensors differ in number, shape, type, or in what is said of each."""
    return zlib.crc32(repr([(tuple(one.shape), one.dtype, said) for one, said in tensors]).encode())


@torch.no_grad()
def broadcast_module(
    module: Module, group: dist.ProcessGroup | None, bucket_bytes: int = BUCKET_BYTES
) -> None:
    """Give the parameters and buffers of the group's rank 0 to all its ranks.

    Args:
        module: built alike on all ranks.
        group: the process group; None for a process on its own.
        bucket_bytes: sent at once, about.

    Raises:
        AgreementError: on all ranks, if their parameters and buffers differ in number, shape or type.
    """
    tensors: list[Tensor] = [*module.parameters(), *module.buffers()]
    if group is None or not tensors:
        return
    mark = fingerprint((tensor, False) for tensor in tensors)
    marks = torch.tensor([mark, -mark], device=tensors[0].device)
    dist.all_reduce(marks, dist.ReduceOp.MAX, group)
    if marks.sum() != 0:
        raise AgreementError(
            "the module's parameters or buffers differ between ranks, in number, shape or type: build the same "
            "module on all ranks"
        )
    source = dist.get_global_rank(group, 0)
    for piece in pieces(tensors, bucket_bytes):
        whole = torch.cat([tensor.reshape(-1) for tensor in piece])
        dist.broadcast(whole.view(torch.uint8), source, group)  # as bytes: no back end knows every type
        parts = torch.split(whole, [tensor.numel() for tensor in piece])
        torch._foreach_copy_(piece, [part.view(one.shape) for part, one in zip(parts, piece, strict=True)])
