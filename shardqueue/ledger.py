"""What the logs of a run say together, however many pages, processes and learners there are.

Pages are read in any order and more than once. A page may repeat what an earlier one of its process said, with more
in it, never with less; so the union of all is what is known. A process's newest page tells what it holds, how far it
is, and how it left.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardqueue.records import LogPage, TrainedSpan


@dataclass(slots=True, eq=False)
class Log:
    """The log of one process, as far as it was read.

    Attributes:
        newest: its last page.
        spans: what it trained, by (pass, unit, attempt, first batch).
    """

    newest: LogPage
    spans: dict[tuple[str, str, int, int], TrainedSpan] = field(default_factory=dict)

    @property
    def owner(self) -> tuple[str, str]:
        """(learner, instance)."""
        return self.newest.learner, self.newest.instance

    def read(self, page: LogPage) -> None:
        """Take in one more page, or a newer version of one."""
        if (page.page, page.write) >= (self.newest.page, self.newest.write):
            self.newest = page
        for span in page.trained:
            key = span.pass_, span.unit, span.attempt, span.begin
            known = self.spans.get(key)
            if known is None or (known.end, known.whole) < (span.end, span.whole):
                self.spans[key] = span


@dataclass(slots=True)
class Ledger:
    """The logs of one run, by (learner, instance, process)."""

    logs: dict[tuple[str, str, str], Log] = field(default_factory=dict)

    def read(self, page: LogPage) -> Log:
        """Take in one page, and return the log it belongs to."""
        process = page.learner, page.instance, page.process
        log = self.logs.setdefault(process, Log(page))
        log.read(page)
        return log

    def spans(self) -> Iterator[tuple[Log, TrainedSpan]]:
        """Everything that was trained, and by whom."""
        for log in self.logs.values():
            for span in log.spans.values():
                yield log, span


def index_at(span: TrainedSpan, tick: int) -> int:
    """The first batch of a span that came after step `tick`, its end if none did.

    Batches whose step is not known count as before it.
    """
    index = span.begin
    for at in range(0, len(span.ticks), 3):
        first, stride, count = span.ticks[at : at + 3]
        for number in range(count):
            if first + stride * number > tick:
                return index + number
        index += count
    return span.end
