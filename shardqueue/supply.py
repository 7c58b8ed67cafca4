"""Where a rank that steps together with others has its batches from.

From its loader, as long as that has any. Loader workers never wait for what others may give back; so at the end of a
pass the training process claims for itself, with a feed that does (the *tail*).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

from shardqueue.allowance import UNLIMITED, Allowance
from shardqueue.errors import InvalidInputError, LoadError
from shardqueue.feed import Feed
from shardqueue.host import Place
from shardqueue.learner import TAIL, seat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from shardqueue.dataset import SharedQueueDataset
    from shardqueue.session import Session
    from shardqueue.source import Source

PREFETCH = 2
"""Loaded batches that may wait in the tail."""


class Supply:
    """One rank's batches of one pass: from its loader, and at the end from a feed that waits for what is given back.

    Args:
        share: batches this rank is allowed; None for no limit.

    Attributes:
        stage, number: of the pass.
        at_end: the loop has all it gets.
    """

    pass_: str
    stage: str
    number: int
    at_end: bool

    def __init__(
        self,
        session: Session,
        dataset: SharedQueueDataset,
        loader: Iterable[Any],
        pass_: str,
        share: int | None,
    ) -> None:
        self._session, self._dataset, self._loader = session, dataset, loader
        self.pass_, self._share = pass_, share
        self.stage, self.number, self.at_end = dataset.stage, dataset.next_pass, False
        self._taken = self._from_loader = 0
        self._tail_key = seat(pass_, TAIL)
        self._tail: Feed | None = None
        self._lifted = self._cut = self._closed = False
        self._items: Iterator[Any] | None = self._walk(loader)

    def _walk(self, loader: Iterable[Any]) -> Iterator[Any]:
        workers = getattr(self._loader, "num_workers", 0) > 0
        return self._session.walk(loader, [self._dataset] if workers else [])

    @property
    def assured(self) -> int:
        """How many more batches will come, for sure."""
        return max(0, self._committed - self._taken)

    @property
    def _committed(self) -> int:
        if self._items is None:
            return self._from_loader + (0 if self._tail is None else self._tail.committed)
        source = self._session.source_on(self.pass_)
        return 0 if source is None else source.committed

    @property
    def settled(self) -> bool:
        """Whether nothing that other ranks may be waiting for is under way, or may still turn out to be theirs."""
        bounded = self._share is not None
        return all(source.settled and (source.ends_known or not bounded) for source in self._sources)

    @property
    def events(self) -> float:
        """Grows with every claim."""
        return float(sum(source.events for source in self._sources))

    @property
    def _sources(self) -> list[Source]:
        """Those of the loader and of the tail, as far as they have begun."""
        sources = (self._session.source_on(key) for key in (self.pass_, self._tail_key))
        return [source for source in sources if source is not None]

    @property
    def empty_looks(self) -> int:
        """How often there was nothing to claim."""
        return 0 if self._tail is None else self._tail.empty_looks

    def cut(self) -> None:
        """Others wait for what we may not take."""
        if not self._cut:
            self._cut = True
            for key in (self.pass_, *([] if self._tail is None else [self._tail_key])):
                self._session.allow(key, replace(self._session.allowance(key), cut=True))

    def lift(self) -> None:
        """From here on everything may be taken."""
        self._lifted = True
        if self._tail is not None:
            self._session.allow(self._tail_key, UNLIMITED)
            self._tail.wait_no_more()

    def fetch(self, wait: bool) -> Any:
        """The next item; None when there is none, or (not `wait`) none yet past the loader."""
        if self._items is not None:
            for item in self._items:
                self._taken += 1
                return item
            self._items = None
            self._from_loader = self._taken
            if self._lifted or self._share == self._taken:
                return None
            self._begin_tail()
        return self._from_tail(wait)

    def fetch_promised(self) -> Any:
        """The next item, which the others count on.

        Raises:
            LoadError: the loader does not give it.
        """
        item = self.fetch(wait=True)
        if item is None:
            raise LoadError(
                f"the loader ended after {self._taken} batches, but this rank had claimed more; nothing between the "
                "dataset and track may drop batches"
            )
        return item

    def _begin_tail(self) -> None:
        session, dataset = self._session, self._dataset
        session.allow(self._tail_key, self._tail_allowance())
        place = Place(pass_=self.pass_, worker=TAIL, waits=True, stage=dataset.stage)
        self._tail = Feed(dataset.plan, session, dataset.load_of(self.number), PREFETCH, None, place)
        self._tail.tracked = True
        self._tail.start()

    def _tail_allowance(self) -> Allowance:
        return Allowance(None if self._share is None else self._share - self._taken, cut=self._cut)

    def _from_tail(self, wait: bool) -> Any:
        if self._tail is None:
            return None
        began = self._session.clock.monotonic()
        try:
            pair = self._tail.take() if wait else self._tail.take_if_ready()
        except StopIteration:
            return None
        if pair is None:
            return None
        self._taken += 1
        self._session.received(pair[0], self._session.clock.monotonic() - began)
        return as_item(self._loader, pair if self._dataset.with_step else pair[1])

    def sample(self) -> Any:
        """Any batch, for a rank that has had none."""
        plan, load = self._dataset.plan, self._dataset.load_of(self.number)
        for position in range(len(plan)):
            for step, batch in load(plan.value(position)):
                return as_item(self._loader, (step, batch) if self._dataset.with_step else batch)
        raise InvalidInputError("units", plan, "units of which one has a batch", "check what load yields")

    def close(self) -> None:
        """The loop is done with the pass: at its end, or before."""
        if self._closed:
            return
        self._closed = True
        items, self._items = self._items, None
        if items is not None:
            if self.at_end:
                next(items, None)
            cast("Any", items).close()
        if self._tail is not None and self.at_end:
            self._end_tail(self._tail)
        elif self._tail is not None:
            self._tail.stop()

    def _end_tail(self, tail: Feed) -> None:
        tail.wait_no_more()
        try:
            tail.take()
        except StopIteration:
            return

    def dismiss(self) -> None:
        """Another pass begins."""
        self.close()
        if self._tail is not None:
            self._tail.close(failed=False)
            self._tail = None


def plain_loader(loader: object) -> DataLoader[Any] | None:
    """The loader, or the one that a progress bar shows; None where something might change its items."""
    inner = getattr(loader, "iterable", loader)
    if isinstance(inner, DataLoader) and type(inner).__iter__ is DataLoader.__iter__:
        return inner
    return None


def as_item(loader: object, given: Any) -> Any:
    """What a loader would have made of what its dataset gave."""
    if not isinstance(loader, DataLoader):
        return given
    collate: Callable[[Any], Any] = loader.collate_fn
    item = collate(given)
    pinned = loader.pin_memory and torch.cuda.is_available()
    return pin_memory(item) if pinned else item  # type: ignore[no-untyped-call]
