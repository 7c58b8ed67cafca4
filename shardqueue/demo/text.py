"""The corpus: the Python standard library's own top-level modules, which every machine has.

Files are read in sorted order; every sixteenth is held out, the rest is trained on. Row `r` of the dataset is
a window of bytes at a place that depends on `r` alone, so whoever loads a unit loads the same batches: step
`s`, lane `l` of `n` holds rows `(s * n + l) * sequences` and on.
"""

from __future__ import annotations

import sysconfig
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from shardqueue.errors import ShardQueueError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from shardqueue.units import Unit

HELD_OUT_EVERY = 16
STRIDE = 1_000_003


class Corpus(NamedTuple):
    """Two runs of bytes, as uint8 tensors of one dimension."""

    train: Tensor
    held_out: Tensor


def read_corpus(folder: Path | None = None, limit: int = 2_000_000, least: int = 10_000) -> Corpus:
    """Read up to about `limit` bytes of `folder/*.py`; the folder defaults to the standard library's.

    Raises:
        ShardQueueError: fewer than `least` bytes to train on or to hold out.
    """
    folder = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder
    parts = [bytearray(), bytearray()]
    for number, data in enumerate(_sources(folder)):
        parts[number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1].extend(data)
        if sum(map(len, parts)) >= limit:
            break
    if min(map(len, parts)) < least:
        raise ShardQueueError(
            f"the sources of this Python's standard library hold {sum(map(len, parts))} bytes, and the demo "
            f"trains on them: it needs at least {2 * least}; run it under a Python installed with its .py files"
        )
    return Corpus(*(torch.frombuffer(part, dtype=torch.uint8) for part in parts))


def _sources(folder: Path) -> Iterator[bytes]:
    for path in sorted(folder.glob("*.py")):
        try:
            data = path.read_bytes()
        except OSError:
            continue
        if data:
            yield data


def windows(text: Tensor, rows: Iterable[int], width: int) -> Tensor:
    """Return the windows of the given rows: int64, `[rows, width]`."""
    places = len(text) - width + 1
    starts = torch.tensor([row * STRIDE % places for row in rows])
    return text[starts[:, None] + torch.arange(width)].long()


def loader(text: Tensor, sequences: int, context: int) -> Callable[[Unit], Iterator[tuple[int, bytes]]]:
    """Return the `load` of this corpus: a unit's `(step, batch)` pairs, for `rows_of` to unpack.

    A batch is bytes, because a small one passes from a worker to the loop in a third of the time of a tensor.
    """
    return partial(_load, text, sequences, context)


def rows_of(batch: bytes, context: int) -> Tensor:
    """Return a batch as the model wants it: int64, `[sequences, context + 1]`."""
    return torch.frombuffer(bytearray(batch), dtype=torch.uint8).view(-1, context + 1).long()


def _load(text: Tensor, sequences: int, context: int, unit: Unit) -> Iterator[tuple[int, bytes]]:
    for step in range(unit.first, unit.first + unit.count):
        row = (step * unit.lanes + unit.lane) * sequences
        rows = windows(text, range(row, row + sequences), context + 1)
        yield step, rows.to(torch.uint8).numpy().tobytes()
