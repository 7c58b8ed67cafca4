"""Watching a process through its log: is it alive, did it leave, or is it gone without a word?

Whoever watches reads the newest page of the log again and again and tells a `Watched` what was there; `Watched.life`
says what follows from it. Nothing here reads or waits by itself. Only seconds for which somebody really looked count
as silence, and a death is believed only after one more reading.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardqueue.learner import SILENCE, Life, judge
from shardqueue.records import LogPage

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardqueue.records import Process

LONGEST_GAP = 2.0
"""Seconds between two readings that count as silence, at most: two of the looks that are due each second."""


@dataclass(slots=True)
class Silence:
    """Seconds for which nothing changed while somebody looked.

    A mailbox may be slow, or the watcher suspended: of the time between two readings only `longest` seconds count, or
    (`lapses`) silence begins anew after more than that.
    """

    longest: float = LONGEST_GAP
    lapses: bool = False
    seconds: float = 0.0
    last: float | None = None

    def looked(self, now: float) -> None:
        """There was an answer at `now`, the same as before."""
        if self.last is not None:
            gap = now - self.last
            self.seconds = (
                0.0 if self.lapses and gap > self.longest else self.seconds + min(gap, self.longest)
            )
        self.last = now

    def restart(self, now: float | None = None) -> None:
        """Something changed at `now`; None: nobody knows, and the next answer counts as a first one."""
        self.seconds, self.last = 0.0, now


@dataclass(slots=True)
class Watched:
    """A process whose log is watched: the key of its newest page, what that held, and whether it was seen to change.

    A process may write how it left and be gone between our reading its log and looking for it. So its log is read
    once more after it was seen gone, and until then it is `unconfirmed`.
    """

    key: str = ""
    page: LogPage | None = None
    silence: Silence = field(default_factory=Silence)
    changed: bool = False
    _written: tuple[int, int] | None = None
    _gone: bool = False
    _read_since_gone: bool = False

    @property
    def unconfirmed(self) -> bool:
        """Whether it was seen gone, and its log has not been read since."""
        return self._gone and not self._read_since_gone

    def read(self, data: bytes | None, now: float) -> None:
        """`key` held `data` at `now`; None when there is no such page.

        Raises:
            RecordError: that is no log.
        """
        self.saw(None if data is None else LogPage.decode(data, self.key), now)

    def saw(self, page: LogPage | None, now: float) -> None:
        """Its newest page was `page` at `now`; None when there is none."""
        written = self._written or _NOTHING if page is None else (page.page, page.write)
        if self._written in (None, written):
            self.silence.looked(now)
        else:
            self.silence.restart(now)
            self.changed = True
        self._written, self.page = written, page or self.page
        self._read_since_gone = self._gone

    def unread(self) -> None:
        """It could not be read: silence begins anew, for its owner may have been kept from writing just so."""
        self.silence.restart()
        self.changed = False

    def life(self, seen: Callable[[Process], bool | None]) -> Life:
        """Say whether it is alive; `seen` tells whether its process is seen on this machine."""
        if self.page is None:
            return Life.UNSURE
        silent = self.silence.seconds
        life = judge(self.page, seen(self.page.where), self.changed and silent < SILENCE, silent)
        return Life.UNSURE if life is Life.DEAD and not self._confirmed() else life

    def is_gone(self, seen: Callable[[Process], bool | None]) -> bool:
        """Whether its process is gone from this machine, and its log was read after that was seen."""
        return self.page is not None and seen(self.page.where) is False and self._confirmed()

    def _confirmed(self) -> bool:
        """It is gone, as it seems: is that to be believed, or after one more reading?"""
        self._gone = True
        return self._read_since_gone


_NOTHING = (-1, 0)
"""What was written where there is no page yet: no page, no write."""
