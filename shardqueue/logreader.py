"""Reading the logs of a run from the mailbox, again and again, at the cost of what may have changed.

Of each process only the last page changes: a page with another one after it is final as far as its process is
concerned, and is read once. Several are read at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardqueue.callers import Callers
from shardqueue.errors import IncompleteError, RecordError
from shardqueue.ledger import Ledger
from shardqueue.records import LogPage

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from shardqueue.mailbox import Mailbox
    from shardqueue.records import RunKeys

READERS = 8
UNREADABLE = (RecordError, IncompleteError)
"""What says that a key holds no record of ours, or not all of one."""


class LogReader:
    """Reads the logs of one run into a `Ledger`.

    Attributes:
        ledger: what was read so far.
    """

    def __init__(self, mailbox: Mailbox, keys: RunKeys) -> None:
        self.ledger = Ledger()
        self._mailbox, self._keys = mailbox, keys
        self._final: set[str] = set()

    def read(
        self,
        which: Callable[[tuple[str, str, str]], bool] | None = None,
        listed: Collection[str] | None = None,
        newest_only: bool = False,
    ) -> Ledger:
        """Read what may have changed since the last time.

        Args:
            which: whether the log of a process, as (learner, instance, process), is wanted; None for all.
            listed: the keys below `keys.learners`, if they are known already.
            newest_only: leave out all but each process's last page.

        Raises:
            MailboxError: the mailbox did not answer.
            RecordError: what lies under a log's key is none.
        """
        listed = self._mailbox.list(self._keys.learners) if listed is None else listed
        pages: dict[tuple[str, str, str], list[tuple[int, str]]] = {}
        for key in listed:
            parsed = self._keys.parse_log(key)
            if parsed is not None and (which is None or which(parsed[:3])):
                pages.setdefault(parsed[:3], []).append((parsed[3], key))
        wanted: list[str] = []
        final: list[str] = []
        for numbered in pages.values():
            *before, last = [key for _, key in sorted(numbered)]
            final += [] if newest_only else [key for key in before if key not in self._final]
            wanted.append(last)
        with Callers(READERS, "shardqueue-logs") as pool:
            readings = [(key, pool.submit(self._mailbox.get, key)) for key in (*final, *wanted)]
            for key, reading in readings:
                data = reading.result()
                if data is not None:  # listed, and gone: somebody cleans this prefix
                    self.ledger.read(LogPage.decode(data, key))
        self._final.update(final)
        return self.ledger
