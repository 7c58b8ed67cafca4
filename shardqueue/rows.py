"""Batches of a map-style dataset, read by ranges of places in the order of an epoch.

The order is 0, 1, 2, ... or, shuffled, a `Permutation` of it for each epoch. Batch `step` of an epoch has the
places `step * batch_size` and following; the last one may be short. Which rows it has depends on the arguments and
the epoch alone, never on who reads it or when.

A batch is fetched and collated as `torch.utils.data.DataLoader` does for a map-style dataset: one call of
`__getitems__` with the list of rows where the dataset has it, else one of `__getitem__` a row, always with plain
ints; then `collate_fn`. What `__getitems__` gives goes to `collate_fn` unseen, whatever its length, since a dataset
may give columns that a `collate_fn` of its own understands. What the dataset or `collate_fn` raises passes through.

Nothing here knows of queues: a loader takes a `Unit` and yields (step, batch).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset, IterableDataset, default_collate

from shardqueue.errors import InvalidInputError
from shardqueue.shuffle import LARGEST_SEED, Permutation
from shardqueue.units import check_int

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardqueue.units import Unit

_BLOCK_ROWS = 1024  # places whose rows are worked out at once: the first costs as much as the others together


def check_rows(dataset: Any) -> int:
    """Return how many rows a map-style dataset has, at least 1.

    Raises:
        InvalidInputError: it is not one (no rows to ask for, no length, a length that raises), or it is empty.
    """
    kind = f"{type(dataset).__module__}.{type(dataset).__qualname__}"
    bound = "a map-style dataset, with __len__ and __getitem__"
    if isinstance(dataset, IterableDataset) or not _has_rows(dataset):
        remedy = "for a stream pass units and a load function to SharedQueueDataset instead"
        raise InvalidInputError("dataset", kind, bound, remedy)
    try:
        rows = len(dataset)
    except Exception as error:
        remedy = f"give it a __len__ that works, len() said {type(error).__name__}: {error}"
        raise InvalidInputError("dataset", kind, bound, remedy) from error
    if rows == 0:
        raise InvalidInputError("dataset", kind, "at least one row long", "check what it was made from")
    return check_int("len(dataset)", rows, 1)


def _has_rows(dataset: Any) -> bool:
    """Whether rows can be asked for; that of torch's base class only says that it is missing."""
    own = getattr(type(dataset), "__getitem__", Dataset.__getitem__) is not Dataset.__getitem__
    return own or _getitems(dataset) is not None


def _getitems(dataset: Any) -> Callable[[list[int]], Any] | None:
    """The dataset's `__getitems__`, if it is one to use."""
    return getattr(dataset, "__getitems__", None) or None


class RowBatches:
    """The batches of a map-style dataset, epoch by epoch.

    Args:
        dataset: has `__getitem__` or `__getitems__`.
        rows: how many rows take part, the first ones of the dataset; at least 1.
        batch_size: rows a batch, at least 1; the last batch of an epoch may be short.
        shuffle: whether each epoch has an order of its own; else it is that of the dataset.
        seed: from 0 to 2**63 - 1, of the shuffle.
        collate_fn: makes a batch of a list of rows; None is `torch.utils.data.default_collate`.

    Attributes:
        rows: as given.
        batch_size: as given.
        steps: batches an epoch.

    Raises:
        InvalidInputError: `rows`, `batch_size` or `seed` is not an int, or out of range.
    """

    def __init__(
        self,
        dataset: Any,
        rows: int,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 0,
        collate_fn: Callable[[Any], Any] | None = None,
    ) -> None:
        self._dataset, self._shuffle = dataset, shuffle
        self.rows = check_int("rows", rows, 1)
        self.batch_size = check_int("batch_size", batch_size, 1)
        self._seed = check_int("seed", seed, 0, LARGEST_SEED)
        self._collate_fn = collate_fn
        self.steps = -(-self.rows // self.batch_size)

    def loader(self, epoch: int) -> EpochLoader:
        """What reads a unit of an epoch, counted from 0.

        Raises:
            InvalidInputError: the epoch is not an int of 0 or more.
        """
        epoch = check_int("epoch", epoch, 0)
        order = Permutation(self.rows, self._seed, epoch) if self._shuffle else None
        return EpochLoader(self._dataset, self.rows, self.batch_size, order, self._collate_fn)

    def indices(self, epoch: int, step: int) -> list[int]:
        """The rows of batch `step` of an epoch, both counted from 0, in order.

        Raises:
            InvalidInputError: the epoch or step is not an int, or out of range.
        """
        return self.loader(epoch).indices(step)


class EpochLoader:
    """Reads units of one epoch; made by `RowBatches.loader`. Pickles if the dataset and `collate_fn` do."""

    def __init__(
        self,
        dataset: Any,
        rows: int,
        batch_size: int,
        order: Permutation | None,
        collate_fn: Callable[[Any], Any] | None,
    ) -> None:
        self._dataset, self._rows, self._batch_size, self._order = dataset, rows, batch_size, order
        self._collate_fn = default_collate if collate_fn is None else collate_fn

    def __call__(self, unit: Unit) -> Iterator[tuple[int, Any]]:
        """Yield (step, batch) for places `unit.first` to `unit.first + unit.count - 1` of the epoch's order.

        Raises:
            InvalidInputError: at once, if the unit is not made of whole batches of this epoch, in one lane.
        """
        stop = unit.first + unit.count
        whole = unit.first % self._batch_size == 0 and (stop % self._batch_size == 0 or stop == self._rows)
        if unit.lanes != 1 or stop > self._rows or not whole:
            bound = f"whole batches of {self._batch_size} of {self._rows} rows, in one lane"
            raise InvalidInputError("unit", unit, bound, "take the units from unit_ranges with these numbers")
        return self._read(unit.first, stop)

    def indices(self, step: int) -> list[int]:
        """The rows of batch `step` of the epoch, counted from 0, in order.

        Raises:
            InvalidInputError: the step is not an int, or out of range.
        """
        first = check_int("step", step, 0, (self._rows - 1) // self._batch_size) * self._batch_size
        return self._places(first, min(first + self._batch_size, self._rows))

    def _read(self, first: int, stop: int) -> Iterator[tuple[int, Any]]:
        size = self._batch_size
        block = -(-_BLOCK_ROWS // size) * size
        for start in range(first, stop, block):
            rows = self._places(start, min(start + block, stop))
            for place in range(0, len(rows), size):
                yield (start + place) // size, self._batch(rows[place : place + size])

    def _places(self, start: int, stop: int) -> list[int]:
        """The rows at the places `start` to `stop - 1`, as plain ints."""
        if self._order is None:
            return list(range(start, stop))
        rows: list[int] = self._order.at(start, stop).tolist()
        return rows

    def _batch(self, rows: list[int]) -> Any:
        getitems = _getitems(self._dataset)
        fetched = getitems(rows) if getitems else [self._dataset[row] for row in rows]
        return self._collate_fn(fetched)
