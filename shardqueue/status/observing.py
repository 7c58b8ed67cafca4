"""What the mailbox shows of its runs at one moment: manifests, each process's newest log page, notes, and `back/`.

A look is a listing of `runs/`, one of the run's `learners/`, a reading a process, and a page of a listing of `back/`
for each pass that somebody is in. An `Observer` that looks again also sees which logs have changed since, which no
clock can tell. `runs` says which run is meant.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from operator import eq
from typing import TYPE_CHECKING

from shardqueue.learner import seen_here
from shardqueue.logreader import UNREADABLE, LogReader
from shardqueue.records import PASS_NAME, RunKeys
from shardqueue.status.runs import Runs
from shardqueue.watching import Watched

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from shardqueue.clock import Clock
    from shardqueue.ledger import Ledger
    from shardqueue.mailbox import Mailbox
    from shardqueue.records import LogPage, Manifest, Process

BACKS = 1000
"""Keys of `back/` that are listed of a pass, at most: one request's worth."""
OTHER_RUNS = 4
"""Other runs whose logs are read too, at most: the ones opened last."""

_Key = tuple[str, str, str, str]


@dataclass(frozen=True, slots=True)
class Sighting:
    """What was seen of one process.

    Attributes:
        page: the newest of its log.
        here: whether it is seen on this machine, None when it belongs to another.
        changed: whether its log was seen to change.
        silent: seconds for which it was looked at, and its log did not change.
    """

    page: LogPage
    here: bool | None
    changed: bool = False
    silent: float = 0.0


@dataclass(frozen=True, slots=True)
class Observation:
    """One run as it was found.

    Attributes:
        run: its name.
        manifest: what it was opened with.
        wall: when it was looked at, in wall-clock seconds.
        sightings: one of each process that keeps a log.
        unreadable: what is wrong with each log that cannot be read.
        whole: passes of which some learner noted that every unit is trained.
        backs: attempts that were ended, in the passes somebody is in.
        more_backs: whether there are more than were counted.
    """

    run: str
    manifest: Manifest
    wall: float
    sightings: tuple[Sighting, ...]
    unreadable: tuple[str, ...] = ()
    whole: frozenset[str] = frozenset()
    backs: int = 0
    more_backs: bool = False


class Observer:
    """Looks at one run again and again, and writes nothing.

    Args:
        mailbox: where it lies.
        run: its name, None for the one that was opened last, which may be another one at each look.
        clock: measures silence, and dates what is seen.
        seen: tells whether a process is seen on this machine.

    Attributes:
        others: the other runs at the prefix, newest first, `OTHER_RUNS` at most, as they were at the first look.
        unread: the other runs whose logs were not read.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        run: str | None,
        clock: Clock,
        seen: Callable[[Process], bool | None] = seen_here,
    ) -> None:
        self.others: list[Observation] = []
        self.unread: list[str] = []
        self._mailbox, self._wanted, self._clock, self._seen_here = mailbox, run, clock, seen
        self._runs = Runs(mailbox)
        self._watched: dict[_Key, Watched] = {}
        self._looked = False

    def look(self) -> Observation | None:
        """What is there now; None for nothing at all.

        Raises:
            InvalidInputError: there is no run of the name that was asked for.
            RunError: there is something, and no run; or a run of another version of the protocol.
            RecordError: what should be a manifest is none.
            MailboxError: the mailbox cannot be read, or did not answer.
        """
        chosen = self._runs.choose(self._wanted)
        if chosen is None:
            return None
        if not self._looked:
            rest = [name for name in self._runs.newest_first if name != chosen]
            self.others = [self._observe(name, with_backs=False) for name in rest[:OTHER_RUNS]]
            self.unread = rest[OTHER_RUNS:]
            self._looked = True
        return self._observe(chosen)

    @property
    def strange(self) -> dict[str, str]:
        """What is wrong with each manifest that cannot be read."""
        return self._runs.strange

    def lost_sight(self) -> None:
        """The mailbox did not answer: silence begins anew, for learners may have been kept from writing just so."""
        for watched in self._watched.values():
            watched.unread()

    def _observe(self, run: str, with_backs: bool = True) -> Observation:
        keys = RunKeys(run)
        listed = self._mailbox.list(keys.learners)
        ledger, unreadable = self._newest_pages(keys, listed)
        sightings = tuple(
            self._sighting((run, *process), log.newest) for process, log in sorted(ledger.logs.items())
        )
        whole = frozenset(note[2] for key in listed if (note := keys.parse_whole(key)) is not None)
        passes = {one.page.current.pass_ for one in sightings if with_backs and one.page.current is not None}
        backs = [keys.pass_keys(name).backs for name in sorted(passes) if PASS_NAME.fullmatch(name)]
        counts = [len(self._mailbox.list(prefix, "", BACKS)) for prefix in backs]
        return Observation(
            run,
            self._runs.manifests[run],
            self._clock.wall(),
            sightings,
            unreadable,
            whole,
            backs=sum(counts),
            more_backs=BACKS in counts,
        )

    def _newest_pages(self, keys: RunKeys, listed: Collection[str]) -> tuple[Ledger, tuple[str, ...]]:
        """Each process's newest page. One that cannot be read costs a second reading of all, one by one."""
        reader = LogReader(self._mailbox, keys)
        try:
            return reader.read(listed=listed, newest_only=True), ()
        except UNREADABLE:
            wrong = []
        processes = {log[:3] for key in listed if (log := keys.parse_log(key)) is not None}
        for process in sorted(processes):
            try:
                reader.read(which=partial(eq, process), listed=listed, newest_only=True)
            except UNREADABLE as error:
                wrong.append(str(error))
        return reader.ledger, tuple(wrong)

    def _sighting(self, key: _Key, page: LogPage) -> Sighting:
        watched = self._watched.setdefault(key, Watched())
        watched.saw(page, self._clock.monotonic())
        return Sighting(page, self._seen_here(page.where), watched.changed, watched.silence.seconds)
