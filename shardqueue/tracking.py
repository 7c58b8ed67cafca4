"""Finding what `Session.track` needs to know: the datasets behind a loader, and the steps its items carry."""

from __future__ import annotations

import gc
from dataclasses import fields, is_dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet

from shardqueue.errors import InvalidInputError, LoadError
from shardqueue.units import Step

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from shardqueue.crew import Crew
    from shardqueue.session import Session

EAGER = (enumerate, map, zip, filter, islice)
"""Iterators that begin what they are given when they are made."""
DEPTH = 3
"""How deep in tuples, lists, dicts and dataclasses a step is looked for."""


class Trackable(Protocol):
    """A dataset whose loader workers claim in the name of a session."""

    learner_id: str

    def belongs_to(self, session: Session) -> bool:
        """Whether this is the session's learner, and its mailbox."""
        ...

    def begin(self, session: Session) -> Crew:
        """The session is about to iterate a loader of this dataset."""
        ...

    def check_rest(self, loader: object) -> None:
        """Refuse a loader of which nobody knows what it would make of `rest`."""
        ...

    def rest(self, session: Session, loader: object) -> Iterator[Any]:
        """What is left of the pass when the loader has ended, and the session is to wait for."""
        ...

    def in_step(self, session: Session, loader: Iterable[Any], group: object, uneven: str) -> Iterator[Any]:
        """The items of the loader, as many on each rank of a process group."""
        ...


_known: WeakSet[Trackable] = WeakSet()
register = _known.add


def datasets_of(loader: object, session: Session) -> list[Trackable]:
    """The datasets whose workers `loader` will start in the name of `session`.

    Of a `DataLoader` that is its own dataset, if it has workers. What else there may be, a wrapper of the loader or
    of the dataset, cannot be looked into: then it is every dataset of the session's learner in this process.

    Raises:
        InvalidInputError: the loader's dataset is another learner's, or in another mailbox.
    """
    own = _dataset_in(loader, session)
    if own is loader or getattr(loader, "num_workers", None) == 0:
        return []
    if own is not None:
        return [own]
    found = datasets_of_session(session)
    if len(found) > 1:
        gc.collect()  # a dataset that nothing but a traceback's cycle holds
        found = datasets_of_session(session)
    if found and isinstance(loader, EAGER):
        raise InvalidInputError(
            "loader",
            loader,
            "not iterated yet (this begins the loader's workers before the session knows)",
            f"write {type(loader).__name__}(session.track(loader)) the other way round, track innermost",
        )
    if len(found) > 1:
        raise InvalidInputError(
            "loader",
            loader,
            f"one whose dataset can be found: this process has {len(found)} of learner {session.learner_id!r}",
            "pass the DataLoader itself, or delete the older datasets",
        )
    return found


def dataset_of(loader: object, session: Session) -> Trackable:
    """The dataset of a loader that ranks iterate together.

    Raises:
        InvalidInputError: it is not the loader of a `SharedQueueDataset`, or of another session's.
    """
    own = _dataset_in(loader, session)
    if own is None or own is loader:
        raise InvalidInputError(
            "loader",
            loader,
            "a DataLoader over a SharedQueueDataset, where ranks step together",
            "pass track the DataLoader itself, and wrap what track gives",
        )
    return own


def _dataset_in(loader: object, session: Session) -> Trackable | None:
    inside = [getattr(part, "dataset", None) for part in _layers(loader)]
    own = next((k for k in list(_known) if k is loader or any(k is part for part in inside)), None)
    if own is not None and not own.belongs_to(session):
        raise InvalidInputError(
            "loader",
            loader,
            f"of the session's learner {session.learner_id!r} and mailbox (its dataset is of {own.learner_id!r})",
            "give the dataset and the session the same learner_id and mailbox",
        )
    return own


def _layers(loader: object) -> list[object]:
    """The loader, and what well-known wrappers (tqdm, accelerate) hold inside."""
    layers = [loader]
    for name in ("iterable", "dataloader", "loader"):
        inner = getattr(layers[-1], name, None)
        if inner is not None:
            layers.append(inner)
    return layers


def datasets_of_session(session: Session) -> list[Trackable]:
    """The datasets in this process that are the session's learner's."""
    return [dataset for dataset in list(_known) if dataset.belongs_to(session)]


def steps_in(item: object) -> list[Step]:
    """Return the steps in `item`, looked for in tuples, lists, dicts and dataclasses.

    Raises:
        LoadError: there is none.
    """
    steps = list(_steps(item, DEPTH))
    if not steps:
        raise LoadError(
            f"an item of type {type(item).__name__} carries no step of a shared queue; let the loader yield "
            "(step, batch) pairs as they come from the queue (from_dataset does with with_step=True)"
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
    elif depth and is_dataclass(item):
        for field in fields(item):
            yield from _steps(getattr(item, field.name, None), depth - 1)
