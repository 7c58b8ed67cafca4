"""Naming the rank that is gone, when ranks that step together wait for one another.

A collective that one rank never joins ends in a time-out, or in an error that names nobody. But each rank is a
learner whose log changes every few seconds as long as its process lives, however slow its steps are. So the others
read the logs and say who is gone: who wrote that it left, whose process ended on this machine, whose log stays silent
for `SILENCE` seconds (see `watching`). What cannot be read proves nothing: neither a mailbox that does not answer,
which may have kept the others from writing as well, nor a log that is not understood.

A look costs a listing of the learners' logs and one reading a rank, several at once. Nothing is read between two
looks, so it costs nothing while nobody waits.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardqueue.callers import Callers
from shardqueue.errors import MailboxError, RecordError
from shardqueue.learner import SILENCE, Life, seen_here
from shardqueue.watching import Watched

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardqueue.clock import Clock
    from shardqueue.mailbox import Mailbox
    from shardqueue.records import Process, RunKeys

LOOK = 1.0
"""Seconds between two rounds of reading."""
READERS = 8


@dataclass(frozen=True, slots=True)
class Peer:
    """A rank that steps together with others.

    Attributes:
        rank: its number.
        learner: the label of its learner.
        instance: of its learner.
        host: where it runs, for people; may be empty.
    """

    rank: int
    learner: str
    instance: str
    host: str = ""


@dataclass(frozen=True, slots=True)
class Gone:
    """A rank that is gone, and how that is known.

    Attributes:
        peer: which.
        why: as in "its process 4711 ended".
    """

    peer: Peer
    why: str


class Peers:
    """Watches the logs of the ranks that step together. To be used by one thread.

    Args:
        peers: the ranks to watch.
        mailbox: where their logs are.
        keys: of the run they are in.
        clock: measures how long a log was silent.
        seen: tells whether a process is seen on this machine.
        sleep: waits for some seconds.
    """

    def __init__(
        self,
        peers: Sequence[Peer],
        mailbox: Mailbox,
        keys: RunKeys,
        clock: Clock,
        *,
        seen: Callable[[Process], bool | None] = seen_here,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._mailbox, self._keys, self._clock = mailbox, keys, clock
        self._seen, self._sleep = seen, sleep
        self._watched = {peer: Watched() for peer in peers}
        self._gone: dict[Peer, Gone] = {}

    def look(self) -> list[Gone]:
        """Read the logs once, and return those known to be gone so far, by rank.

        A process of this machine that ended is known at once, one of another machine after `SILENCE` seconds of
        looking every `LOOK` seconds; whose log changes again is not gone. No error of the mailbox comes from here:
        while it does not answer, this takes as long as a call does, and what was known before is returned.
        """
        self._round()
        if any(watched.unconfirmed for watched in self._watched.values()):
            self._round()
        return sorted(self._gone.values(), key=lambda gone: gone.peer.rank)

    def watch(self, seconds: float) -> list[Gone]:
        """Look every `LOOK` seconds until somebody is known to be gone, or `seconds` are over."""
        end = self._clock.monotonic() + seconds
        while not (gone := self.look()) and (left := end - self._clock.monotonic()) > 0:
            self._sleep(min(LOOK, left))
        return gone

    @staticmethod
    def describe(gone: Gone) -> str:
        """Say who is gone and why, as in "rank 2 (learner 'b-2' on host b) is gone: its process 4711 ended"."""
        peer = gone.peer
        host = f" on host {peer.host}" if peer.host else ""
        return f"rank {peer.rank} (learner {peer.learner!r}{host}) is gone: {gone.why}"

    def _round(self) -> None:
        self._read()
        for peer, watched in self._watched.items():
            life = self._life(watched)
            if life is Life.ALIVE:
                self._gone.pop(peer, None)
            elif life is not Life.UNSURE:
                self._gone[peer] = Gone(peer, self._why(watched))

    def _read(self) -> None:
        """Read the newest page of each rank's training process."""
        try:
            listed = self._mailbox.list(self._keys.learners)
        except MailboxError:
            for watched in self._watched.values():
                watched.unread()
            return
        newest = {log[:3]: key for key in listed if (log := self._keys.parse_log(key)) is not None}
        with Callers(READERS, "shardqueue-peers") as pool:
            readings = []
            for peer, watched in self._watched.items():
                key = newest.get((peer.learner, peer.instance, "main"))
                if key is None:
                    watched.read(None, self._clock.monotonic())
                else:
                    watched.key = key
                    readings.append((watched, pool.submit(self._mailbox.get, key)))
            for watched, reading in readings:
                try:
                    watched.read(reading.result(), self._clock.monotonic())
                except (MailboxError, RecordError):
                    watched.unread()

    def _life(self, watched: Watched) -> Life:
        if watched.page is None:
            return Life.DEAD if watched.silence.seconds >= SILENCE else Life.UNSURE
        life = watched.life(self._seen)
        if life is Life.LEFT and watched.page.rests and self._seen(watched.page.where) is None:
            return Life.UNSURE  # it may come back, and from here nobody sees whether its process lives
        return life

    def _why(self, watched: Watched) -> str:
        page, silent = watched.page, watched.silence.seconds
        if page is None:
            return f"it has written no log in {silent:.0f} s"
        if page.left is not None:
            return _LEFT[page.left]
        if self._seen(page.where) is False:
            return f"its process {page.where.pid} ended"
        written = time.strftime("%H:%M:%S", time.localtime(max(0.0, min(page.wall, 4e9))))
        return f"its log has not changed for {silent:.0f} s (last written {written})"


_LEFT = {"end": "it left at the end", "early": "it left early", "error": "it left with an error"}
