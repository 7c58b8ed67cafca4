"""What is known of a user's batches, which may be anything: how many samples one has, and one batch of several."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch

from shardqueue.errors import InvalidInputError
from shardqueue.units import Step

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def batch_of(item: Any) -> Any:
    """The batch of a loader's (step, batch); any other item as it is."""
    pair = isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[0], Step)
    return item[1] if pair else item


def batch_samples(batch: Any) -> int:
    """How many samples a batch has, 1 where nobody knows; see `known_samples`."""
    known = known_samples(batch)
    return 1 if known is None else known


def known_samples(batch: Any) -> int | None:
    """How many samples a batch has: the first dimension of the first tensor in it, or the length of a list of others.

    Looked into are mappings, tuples, lists and dataclasses. None where there is neither.
    """
    tensor = _first_tensor(batch)
    if tensor is not None:
        return int(tensor.shape[0]) if tensor.dim() else 1
    batch = batch_of(batch)
    return len(batch) if isinstance(batch, list) else None


def _first_tensor(batch: Any) -> torch.Tensor | None:
    if isinstance(batch, torch.Tensor):
        return batch
    return next((tensor for tensor in map(_first_tensor, _parts(batch)) if tensor is not None), None)


def _parts(batch: Any) -> Iterable[Any]:
    if isinstance(batch, Mapping):
        return batch.values()
    if is_dataclass(batch) and not isinstance(batch, type):
        return [getattr(batch, field.name, None) for field in fields(batch)]
    return batch if isinstance(batch, list | tuple) else ()


def joined(items: Sequence[Any]) -> Any:
    """One item of several: tensors are put together along their first dimension, lists without any end to end.

    Mappings, tuples, dataclasses, and lists with tensors, are joined part by part, what is alike stays, and the step
    is that of the first.

    Raises:
        InvalidInputError: the items differ in structure, or in something that is neither.
    """
    first = items[0]
    try:
        if isinstance(first, torch.Tensor):
            return torch.cat(list(items)) if first.dim() else torch.stack(list(items))
        if isinstance(first, Step):
            return first
        if isinstance(first, Mapping):
            return _joined_mappings(items)
        if isinstance(first, list) and batch_of(first) is first and _first_tensor(first) is None:
            return [thing for item in items for thing in item]
        if isinstance(first, list | tuple):
            parts = [joined(part) for part in zip(*items, strict=True)]
            return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
        if is_dataclass(first):
            whole = copy.copy(first)
            for field in fields(first):
                object.__setattr__(whole, field.name, joined([getattr(item, field.name) for item in items]))
            return whole
        if all(item == first for item in items):
            return first
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, InvalidInputError):
            raise
        raise _unjoinable(items, str(error)) from error
    raise _unjoinable(items, f"{first!r} is neither a tensor nor the same in all of them")


def _joined_mappings(items: Sequence[Any]) -> Any:
    whole = copy.copy(items[0])
    if any(item.keys() != whole.keys() for item in items):
        raise KeyError(
            f"keys {sorted(set().union(*items) - set.intersection(*map(set, items)))} are not in all"
        )
    for name in list(whole):
        whole[name] = joined([item[name] for item in items])
    return whole


def _unjoinable(items: Sequence[Any], why: str) -> InvalidInputError:
    remedy = "pass join=, a function from a list of batches to one batch, or leave group out"
    return InvalidInputError(
        "group", len(items), f"1 for batches that cannot be put together ({why})", remedy
    )
