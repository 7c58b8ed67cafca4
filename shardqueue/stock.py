"""What a rank of elastic steps has in hand, and how much it holds.

Ranks take micro-batches by their speed, so at the end of a pass a slow rank that holds many would have to train them
all while the others wait. A loader claims and loads ahead as if there were no end; so a rank that holds much more
than its share of what is left gives it all back (*sheds*), for others to claim. From then on, and after its loader's
end, the training process claims for itself, with a feed that waits for what others give back, and holds no more than
its share: one batch at the very end.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, cast

from shardqueue.ahead import Ahead
from shardqueue.allowance import Allowance
from shardqueue.errors import LoadError
from shardqueue.supply import Supply

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from shardqueue.dataset import SharedQueueDataset
    from shardqueue.session import Session

TOO_MUCH = 1.5
"""Times what is left would take, if all ranks shared it, that a rank's own batches may take it."""
WORTH = 0.2
"""Seconds beyond that from which it gives them back: others must claim and load them."""


class Stock(Supply):
    """One rank's micro-batches of one pass.

    Args:
        session, dataset, loader, pass_: as for `Supply`.
        ahead: items of the loader that are to be in hand.
    """

    def __init__(
        self, session: Session, dataset: SharedQueueDataset, loader: Iterable[Any], pass_: str, ahead: int
    ) -> None:
        self._ahead = Ahead(loader, ahead)
        self._hold = ahead
        super().__init__(session, dataset, loader, pass_, None)

    def _walk(self, loader: Iterable[Any]) -> Iterator[Any]:  # noqa: ARG002
        return super()._walk(self._ahead)

    def lift(self) -> None:
        """From here on everything may be taken, as it is needed."""

    @property
    def in_hand(self) -> int:
        """Items that can be fetched without waiting.

        Raises:
            Exception: of the loader, or of the mailbox.
        """
        if self._items is not None and self._ahead.over:
            for _ in self._items:
                raise LoadError("the loader gave an item after its end")
            self._begin_own()
        if self._items is not None:
            return self._ahead.count
        return 0 if self._tail is None else self._tail.waiting

    def wait(self, seconds: float) -> None:
        """Until there may be one more in hand, at most so long."""
        if self._items is None:
            threading.Event().wait(seconds)
        else:
            self._ahead.wait(seconds)

    def fetch(self, wait: bool) -> Any:
        """See `Supply.fetch`."""
        item = super().fetch(wait)
        if self._tail is not None:
            self._session.allow(self._tail_key, self._tail_allowance())
        return item

    def balance(self, rank: int, seconds: Sequence[float | None], left: int) -> None:
        """A step begins: hold no more than our share of what is left, if that is known.

        Args:
            rank: ours.
            seconds: a micro-batch by rank, None where unknown.
            left: micro-batches of the pass, on all ranks.
        """
        known = [one for one in seconds if one is not None]
        own = seconds[rank]
        if own is None or len(known) < len(seconds):
            return
        shared = left / sum(1.0 / one for one in known)
        held = self.assured
        self._hold = max(1, int(shared / own))
        if held > 1 and held * own > TOO_MUCH * shared + WORTH and not self._in_use:
            self._shed()
        elif self._tail is not None:
            self._session.allow(self._tail_key, self._tail_allowance())

    @property
    def _in_use(self) -> bool:
        """Whether the loop has a batch that is not known to be trained: it must not go to others too."""
        return any(self._session.in_hand(key) for key in (self.pass_, self._tail_key))

    def close(self) -> None:
        """The loop is done with the pass: at its end, or before."""
        if not self._closed and self._items is not None and not self.at_end:
            self._stop_loader()
        super().close()
        self._ahead.close()

    def _shed(self) -> None:
        if self._items is not None:
            self._stop_loader()
            source = self._session.source_on(self.pass_)
            if source is not None:
                source.close(failed=False)
        elif self._tail is not None:
            self._tail.close(failed=False)
        self._begin_own()

    def _stop_loader(self) -> None:
        """Have the loader end before its end."""
        cast("Any", self._items).close()
        source = self._session.source_on(self.pass_)
        if source is not None:
            source.stop()
        self._ahead.close()

    def go_without(self) -> None:
        """Leave the loader alone, before it has begun: this process claims all of the pass for itself."""
        self._dataset.pass_over()
        self._begin_own()

    def _begin_own(self) -> None:
        """From here on this process claims for itself."""
        self._items = None
        self._from_loader = self._taken
        self._begin_tail()

    def _tail_allowance(self) -> Allowance:
        own = self._taken - self._from_loader
        return (
            Allowance(own, final=True)
            if self.at_end and self._closed
            else Allowance(own + self._hold, final=False)
        )

    def _end_tail(self, tail: Any) -> None:
        self._session.allow(self._tail_key, self._tail_allowance())
        super()._end_tail(tail)
