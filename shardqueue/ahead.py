"""The next items of a loader, in hand before they are asked for.

Ranks that share out a step take a micro-batch only with its data in hand, and a loader does not say whether it has an
item ready. So a thread asks it, and keeps a few. The first item is fetched by whoever asks for it, as is the loader's
iterator: worker processes are started where the loop runs.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Self

from shardqueue.bell import Bell

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

END = 10.0
"""Seconds for which closing waits for an item that is being fetched."""


class Ahead:
    """Iterates a loader once, up to `most` items ahead.

    Args:
        loader: whatever can be iterated.
        most: items that may wait here.
    """

    def __init__(self, loader: Iterable[Any], most: int = 1) -> None:
        self._loader, self._most = loader, most
        self._items: deque[Any] = deque()
        self._error: BaseException | None = None
        self._closing = False
        self._wanted = threading.Semaphore(most)
        self._ready = Bell()
        self._thread: threading.Thread | None = None

    def __iter__(self) -> Self:
        self._iterator: Iterator[Any] = iter(self._loader)
        return self

    def __next__(self) -> Any:
        if self._thread is None:
            first = next(self._iterator)
            self._thread = threading.Thread(target=self._fetch, name="shardqueue-ahead", daemon=True)
            self._thread.start()
            return first
        while not self.count:
            if self._error is not None:
                raise self._error
            self._ready.wait()
        item = self._items.popleft()
        self._wanted.release()
        return item

    @property
    def count(self) -> int:
        """Items that wait."""
        return len(self._items)

    @property
    def over(self) -> bool:
        """Whether no item waits and none will come: `next` says why."""
        return self._error is not None and not self._items

    def wait(self, seconds: float) -> None:
        """Until something is ready that was not, at most so long."""
        self._ready.wait_for(seconds)

    def close(self) -> None:
        """Ask for no more; who closes has told the loader to end."""
        self._closing = True
        self._wanted.release()
        if self._thread is not None:
            self._thread.join(END)

    def _fetch(self) -> None:
        while True:
            self._wanted.acquire()
            if self._closing:
                return
            try:
                item = next(self._iterator)
            except BaseException as error:  # the loop must hear of it, whatever it is
                self._error = error
                self._ready.ring()
                return
            self._items.append(item)
            self._ready.ring()
