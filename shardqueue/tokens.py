"""How many micro-batches of a step are taken: a counter in the job's own torch.distributed store.

A token is one micro-batch of a step, whichever data it is. Each counter's key carries the run's random id, so that
nothing of an earlier launch is in the way, and is deleted when its step is over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardqueue.agreement import Ranks


class Tokens:
    """The tokens of one step after another.

    Args:
        ranks: those who take them.
        run_id: random, of the run.

    Attributes:
        requests: to the store, so far.
    """

    def __init__(self, ranks: Ranks, run_id: str) -> None:
        self._ranks, self._prefix = ranks, f"shardqueue/{run_id}"
        alone = ranks.size == 1
        store: Any = dist
        self._store = store.HashStore() if alone else store.distributed_c10d._get_default_store()
        self._key, self._count, self._taken = "", 0, 0
        self.requests: int = 0

    def begin(self, pass_: str, step: int, count: int) -> None:
        """A step begins that has `count` tokens."""
        self._key, self._count, self._taken = f"{self._prefix}/{pass_}/{step}", count, 0

    @property
    def seen(self) -> int:
        """How many nobody had taken when the store was last asked."""
        return max(0, self._count - self._taken)

    def left(self) -> int:
        """How many nobody has taken.

        Raises:
            PeerGoneError: the store is gone.
        """
        if self._taken < self._count:
            self._taken = self._add(0)
        return self.seen

    def take(self, wanted: int) -> int:
        """Take so many, or as many as are left; return how many.

        Raises:
            PeerGoneError: the store is gone.
        """
        if not wanted or self._taken >= self._count:
            return 0
        self._taken = self._add(wanted)
        return max(0, wanted - max(0, self._taken - self._count))

    def forget(self) -> None:
        """All ranks are done with the step."""
        if self._ranks.rank == 0 and self._count:
            self._ask(lambda: self._store.delete_key(self._key))

    def _add(self, number: int) -> int:
        return self._ask(lambda: self._store.add(self._key, number))

    def _ask(self, request: Callable[[], int]) -> int:
        self.requests += 1
        try:
            return request()
        except RuntimeError as error:
            raise self._ranks.lost(error) from error
