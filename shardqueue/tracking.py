"""Finding the steps that an item of a loader carries."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardqueue.errors import LoadError
from shardqueue.units import Step

if TYPE_CHECKING:
    from collections.abc import Iterator

DEPTH = 3
"""How deep in tuples, lists and dicts a step is looked for."""


def steps_in(item: object) -> list[Step]:
    """Return the steps in `item`, looked for in tuples, lists and dicts.

    Raises:
        LoadError: there is none.
    """
    steps = list(_steps(item, DEPTH))
    if not steps:
        raise LoadError(
            f"an item of type {type(item).__name__} carries no step of a shared queue; "
            "let the loader yield (step, batch) pairs as they come from the queue"
        )
    return steps


def _steps(item: object, depth: int) -> Iterator[Step]:
    if isinstance(item, Step):
        yield item
    elif depth and isinstance(item, (tuple, list)):
        for part in item:
            yield from _steps(part, depth - 1)
    elif depth and isinstance(item, dict):
        for part in item.values():
            yield from _steps(part, depth - 1)
