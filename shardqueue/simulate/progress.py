"""What is shown while it runs: a bar of the units claimed, on a terminal, once it has run for a while.

The driver knows nothing of it. Its mailbox counts the claims it grants.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from shardqueue.mailbox.memory import MemoryMailbox

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

PATIENCE = 2.0
"""Seconds after which something is shown."""
STRIDE = 256
"""Writes between two looks at the clock."""


class WatchedMailbox(MemoryMailbox):
    """Says now and then how many claims it has granted.

    Args:
        tell: called with the number every `STRIDE` writes.
    """

    def __init__(self, tell: Callable[[int], object]) -> None:
        super().__init__()
        self._tell, self._claims, self._writes = tell, 0, 0

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """See `Mailbox.put_if_absent`."""
        won = super().put_if_absent(key, data)
        self._claims += won and "units/" in key
        self._wrote()
        return won

    def put(self, key: str, data: bytes) -> None:
        """See `Mailbox.put`."""
        super().put(key, data)
        self._wrote()

    def _wrote(self) -> None:
        self._writes += 1
        if self._writes % STRIDE == 0:
            self._tell(self._claims)


@contextmanager
def watched(
    console: Console, units: int, clock: Callable[[], float] = time.monotonic
) -> Iterator[MemoryMailbox]:
    """Give an empty mailbox, and show how many of `units` are claimed in it until the block is left."""
    if not console.is_terminal:
        yield MemoryMailbox()
        return
    columns = (
        TextColumn("simulating"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("units"),
        TimeElapsedColumn(),
    )
    progress = Progress(*columns, console=console, transient=True, refresh_per_second=4)
    task, begin = progress.add_task("", total=units), clock()

    def tell(claims: int) -> None:
        progress.update(task, completed=min(claims, units))
        if clock() - begin >= PATIENCE:
            progress.start()  # once more is nothing

    try:
        yield WatchedMailbox(tell)
    finally:
        progress.stop()
