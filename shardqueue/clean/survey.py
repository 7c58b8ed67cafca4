"""What is under a prefix: runs, how many keys each has, its state, and who was seen there last. Removes nothing.

Only what `ownership` says is a run's. Anything else is somebody else's: it is counted, and stays. The state is what a
learner that came now would make of the run (`run.decide`), so logs that may be alive are watched for up to `SILENCE`
seconds. All keys are held in memory, some hundred bytes each: a listing cut in pages is not exact on every store.
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from shardqueue.clean.ownership import READERS, Ownership, others, place, read_manifest
from shardqueue.errors import RecordError
from shardqueue.learner import SILENCE, Life, judge, seen_here
from shardqueue.records import LogPage, RunKeys
from shardqueue.run import LOOK_EVERY, Next, decide

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardqueue.clock import Clock
    from shardqueue.mailbox import Mailbox

_Process = tuple[str, str, str]


class State(Enum):
    """What is known of a run."""

    FINISHED = "finished"
    HALF_REMOVED = "half removed"
    BROKEN_OFF = "broken off"
    ALIVE = "alive"
    UNKNOWN = "not known"


@dataclass(slots=True)
class Run:
    """A run under the prefix.

    Attributes:
        name: of the run.
        ownership: tells which keys are its.
        state: what is known of it.
        keys: how many of each kind (see `ownership.place`).
        learners: (learner, instance) of everybody who has a log.
        ends: keys of the log pages by which the run reads as finished.
        last: the newest write of any log, in wall-clock seconds, and the label of its learner.
        manifest: what its manifest holds, None when there is none.
    """

    name: str
    ownership: Ownership
    state: State = State.UNKNOWN
    keys: Counter[str] = field(default_factory=Counter)
    learners: set[tuple[str, str]] = field(default_factory=set)
    ends: set[str] = field(default_factory=set)
    last: tuple[float, str] | None = None
    manifest: bytes | None = None


@dataclass(slots=True)
class Survey:
    """What is under a prefix: runs by name, in the order of their names, and how many keys are of no run."""

    runs: dict[str, Run]
    foreign: int


def survey(mailbox: Mailbox, clock: Clock, sleep: Callable[[float], object]) -> Survey:
    """Look at everything under the prefix.

    Args:
        mailbox: the prefix.
        clock: measures how long a log was watched.
        sleep: waits for some seconds.

    Raises:
        MailboxError: the mailbox cannot be read, or did not answer.
    """
    keys = mailbox.list("")
    elsewhere = others(keys)
    by_run: dict[str, list[str]] = {}
    for key in keys:
        where = None if key.startswith(elsewhere) else place(key)
        if where is not None:
            by_run.setdefault(where[0], []).append(key)
    found = Survey({}, len(keys))
    for name, named in by_run.items():
        manifest = mailbox.get(RunKeys(name).manifest)
        run = Run(name, Ownership(mailbox, name, manifest, elsewhere), manifest=manifest)
        run.keys.update(run.ownership.of(named).values())
        found.foreign -= run.keys.total()
        if run.keys:
            found.runs[name] = run
            run.state = _state(mailbox, run, clock, sleep)
    found.runs = {name: found.runs[name] for name in sorted(found.runs, key=_natural)}
    return found


def is_closed(manifest: bytes | None) -> bool:
    """Whether a removal of the run with this manifest was begun: it has no plan any more."""
    read = read_manifest(manifest)
    return read is not None and not read.plans


def _state(mailbox: Mailbox, run: Run, clock: Clock, sleep: Callable[[float], object]) -> State:
    first: dict[_Process, tuple[str, int]] = {}
    watched, before = 0.0, clock.monotonic()
    while True:
        now = clock.monotonic()
        # As for a learner that joins: a store that is slow is nobody's silence.
        watched, before = watched + min(now - before, 2 * LOOK_EVERY), now
        newest = _newest_keys(mailbox, RunKeys(run.name))
        run.learners = {process[:2] for process in newest}
        pages = _pages(mailbox, newest)
        if pages is None:
            return State.UNKNOWN
        lives = []
        for process, (key, page) in pages.items():
            changed = first.setdefault(process, (key, page.write)) != (key, page.write)
            lives.append(judge(page, seen_here(page.where), changed, watched))
            run.last = max(run.last or (0.0, ""), (page.wall, page.learner))
        run.ends = {key for key, page in pages.values() if page.left == "end"}
        claimed = run.keys["claim"] > 0 or any(page.totals.claimed > 0 for _, page in pages.values())
        if not lives and claimed and watched < SILENCE:
            lives = [Life.UNSURE]  # a first claim may land before its owner's log does
        step = decide(lives, claimed, bool(run.ends))
        if step is not Next.WAIT:
            return _named(step, Life.ALIVE in lives, run.manifest)
        sleep(LOOK_EVERY)


def _named(step: Next, alive: bool, manifest: bytes | None) -> State:
    if alive:
        return State.ALIVE
    if read_manifest(manifest) is None:
        return State.UNKNOWN  # perhaps another mailbox's, or of another version
    if is_closed(manifest):
        return State.HALF_REMOVED
    return {Next.FINISHED: State.FINISHED, Next.OPEN_NEXT: State.BROKEN_OFF}.get(step, State.UNKNOWN)


def _newest_keys(mailbox: Mailbox, keys: RunKeys) -> dict[_Process, str]:
    """The key of each process's newest page."""
    return {log[:3]: key for key in mailbox.list(keys.learners) if (log := keys.parse_log(key)) is not None}


def _pages(mailbox: Mailbox, newest: dict[_Process, str]) -> dict[_Process, tuple[str, LogPage]] | None:
    """The key and content of each process's newest page; None when one cannot be understood."""
    with ThreadPoolExecutor(READERS, thread_name_prefix="shardqueue-clean") as readers:
        bodies = list(readers.map(mailbox.get, newest.values()))
    try:
        return {
            process: (key, LogPage.decode(body, key))
            for (process, key), body in zip(newest.items(), bodies, strict=True)
            if body is not None
        }
    except RecordError:
        return None


def _natural(name: str) -> tuple[int, int, str]:
    """Numbered runs by number, then the named ones."""
    return (0, int(name), name) if name.isascii() and name.isdecimal() else (1, 0, name)
