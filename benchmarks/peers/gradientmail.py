"""GradientMail's `SharedQueue` (gradientmail 0.0.2, Python 3.12 and newer): claims through a store, like ours.

Its queue alone is measured, as its `Session.run` goes through it: a `Feed` over an `Exchange`. Finding and joining a
run is left out. Consumers are threads; the store is its own memory mailbox, every call of which is slowed as ours is.

In which order a consumer goes through the units is up to its user. Two are measured, and the better one counts: the
same on every consumer, and each from another quarter of the units on, as its documentation suggests.
"""

from __future__ import annotations

import importlib.metadata
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from gradientmail.clock import MonotonicClock
from gradientmail.mailbox.memory import MemoryMailbox
from gradientmail.protocol import Exchange
from gradientmail.queue import Feed, SharedQueue

from benchmarks.peers.work import PATIENCE, Outcome, Stay, Work, consume, gather, serve

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterable, Iterator


class SlowMailbox:
    """A mailbox as GradientMail knows it, around its own one, that counts calls and makes each take longer.

    It waits by blocking its event loop, which nothing else uses and whose timers round up to milliseconds.
    """

    def __init__(self, seconds: float) -> None:
        self.calls = 0
        self._mailbox, self._seconds, self._lock = MemoryMailbox(), seconds, threading.Lock()

    async def put_if_absent(self, key: str, data: bytes) -> Any:
        """Create a key."""
        return await self._slowly(self._mailbox.put_if_absent(key, data))

    async def get(self, key: str) -> Any:
        """Read a key."""
        return await self._slowly(self._mailbox.get(key))

    async def list(self, prefix: str, *, after: str = "") -> Any:
        """List keys."""
        return await self._slowly(self._mailbox.list(prefix, after=after))

    async def delete(self, keys: Iterable[str]) -> None:
        """Remove keys."""
        await self._slowly(self._mailbox.delete(keys))

    def clock(self) -> Any:
        """The store's time."""
        return self._mailbox.clock()

    async def _slowly(self, call: Awaitable[Any]) -> Any:
        with self._lock:
            self.calls += 1
        time.sleep(self._seconds / 2)
        answer = await call
        time.sleep(self._seconds / 2)
        return answer


def in_same_order(work: Work) -> Outcome:
    """Let consumers in threads train the units."""
    return _measure(work, [0] * len(work.speeds))


def in_own_orders(work: Work) -> Outcome:
    """The same, each consumer from another place on."""
    size = len(work.speeds)
    return _measure(work, [consumer * work.units // size for consumer in range(size)])


def _measure(work: Work, starts: list[int]) -> Outcome:
    mailbox, barrier = SlowMailbox(work.latency), threading.Barrier(len(starts))

    def run(consumer: int) -> Stay:
        order = [*range(starts[consumer], work.units), *range(starts[consumer])]
        queue = SharedQueue({f"unit-{unit}": unit for unit in order}, load=_load, prefetch=work.prefetch)
        exchange = Exchange(mailbox, clock=MonotonicClock())
        barrier.wait(PATIENCE)
        return consume(work, consumer, _batches(Feed(queue, exchange=exchange, node_id=f"node-{consumer}")))

    with ThreadPoolExecutor(len(starts)) as pool:
        return gather(work, list(pool.map(run, range(len(starts)))), mailbox.calls)


def _load(unit: int) -> Iterator[int]:
    yield unit


def _batches(feed: Any) -> Iterator[int]:
    with feed:
        for _, batch in feed:
            yield batch


if __name__ == "__main__":
    serve(importlib.metadata.version("gradientmail"), in_same_order, in_own_orders)
