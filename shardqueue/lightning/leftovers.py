"""What a job deletes behind itself: the claims of past validations, and runs that were only tried out.

A thread of rank 0 deletes, one folder after the other, so that training waits for none of it. What cannot be deleted
costs storage and nothing else; it is said once.
"""

from __future__ import annotations

import logging
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING

from shardqueue.errors import ShardQueueError

if TYPE_CHECKING:
    from shardqueue.mailbox import Mailbox
    from shardqueue.records import RunKeys

logger = logging.getLogger("shardqueue")


class Leftovers:
    """Deletes what is behind prefixes of a mailbox, in the order given."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._prefixes: SimpleQueue[str | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._told = False

    def remove(self, prefix: str) -> None:
        """Delete everything whose key starts with `prefix`, soon. Nobody may use it any more."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="shardqueue-leftovers", daemon=True)
            self._thread.start()
        self._prefixes.put(prefix)

    def remove_run(self, keys: RunKeys) -> None:
        """Delete a run, its manifest last: what is left over half-way still tells whose it was."""
        self.remove(keys.folder)
        self.remove(keys.manifest)

    def close(self) -> None:
        """Wait until all is deleted."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._prefixes.put(None)
            thread.join()

    def _work(self) -> None:
        while (prefix := self._prefixes.get()) is not None:
            try:
                self._mailbox.delete(self._mailbox.list(prefix))
            except ShardQueueError as error:
                if not self._told:
                    self._told = True
                    logger.warning("%s is left over and cannot be deleted: %s", prefix, error)
