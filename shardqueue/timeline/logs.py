"""Reading all logs of a run, a few at a time, whatever some of them are like.

Logs that are read together are dropped together, so that memory goes by the largest. What cannot be read is left
out, a page at a time, and said.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardqueue import logreader
from shardqueue.errors import InvalidInputError
from shardqueue.logreader import LogReader

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from shardqueue.ledger import Log
    from shardqueue.mailbox import Mailbox
    from shardqueue.records import RunKeys

PAGES_AT_ONCE = 64
UNREADABLE = (*logreader.UNREADABLE, InvalidInputError)
"""The same, or that it is no key of a mailbox."""

_Process = tuple[str, str, str]


class Logs:
    """The logs of a run, as a listing found them.

    Args:
        mailbox: where they lie.
        keys: of the run.
        run_id: of the run.

    Attributes:
        whole: passes of which somebody noted that every unit is trained, as keys call them.
        unreadable: what is wrong with each page that cannot be read.
        strangers: the learners under whose names logs of others lie, or of another run.
    """

    def __init__(self, mailbox: Mailbox, keys: RunKeys, run_id: str) -> None:
        self.unreadable: list[str] = []
        self.strangers: list[str] = []
        self._mailbox, self._keys, self._run_id = mailbox, keys, run_id
        listed = mailbox.list(keys.learners)
        self.whole = {note[2] for key in listed if (note := keys.parse_whole(key)) is not None}
        self._pages: dict[_Process, list[str]] = {}
        for key in listed:
            parsed = keys.parse_log(key)
            if parsed is not None:
                self._pages.setdefault(parsed[:3], []).append(key)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._pages)

    def __iter__(self) -> Iterator[Log]:
        """Read one after the other, by their names.

        Raises:
            MailboxError: the mailbox did not answer.
        """
        for processes in self._together():
            keys = [key for process in processes for key in self._pages[process]]
            reader = LogReader(self._mailbox, self._keys)
            try:
                reader.read(listed=keys)
            except UNREADABLE:
                reader = self._page_by_page(keys)
            for process, log in sorted(reader.ledger.logs.items()):
                if process in processes and log.newest.run_id in ("", self._run_id):
                    yield log
                else:
                    self.strangers.append(process[0])

    def _together(self) -> Iterator[list[_Process]]:
        """Processes whose pages are read at once."""
        some: list[_Process] = []
        pages = 0
        for process in sorted(self._pages):
            some.append(process)
            pages += len(self._pages[process])
            if pages >= PAGES_AT_ONCE:
                yield some
                some, pages = [], 0
        if some:
            yield some

    def _page_by_page(self, keys: Collection[str]) -> LogReader:
        reader = LogReader(self._mailbox, self._keys)
        for key in keys:
            try:
                reader.read(listed=[key])
            except UNREADABLE as error:
                self.unreadable.append(str(error))
        return reader
