"""What is under a prefix: runs, how many keys each has, its state, and who was seen there last. Removes nothing.

Only keys that `records` knows are a run's. Any other is somebody else's: it is counted, and stays. The state is
what a learner that came now would make of the run (`run.decide`), so logs that may be alive are watched for up to
`SILENCE` seconds. Keys are listed page by page: memory does not grow with the run.
"""

from __future__ import annotations

import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from shardqueue.errors import InvalidInputError, RecordError
from shardqueue.learner import SILENCE, Life, judge, seen_here
from shardqueue.plan import check_identifier
from shardqueue.records import RUNS, LogPage, Manifest, RunKeys
from shardqueue.run import LOOK_EVERY, Next, decide

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardqueue.clock import Clock
    from shardqueue.mailbox import Mailbox

PAGE = 1_000
"""Keys a listing asks for: one request on every object store."""
SCANNED = 100_000
"""The same where a listing reads the whole folder, whatever is asked for."""
_READERS = 8
_Process = tuple[str, str, str]
_PASS = re.compile(r"e[1-9][0-9]*|(val|test|predict)(0|[1-9][0-9]*)")


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
        state: what is known of it.
        keys: how many of each kind (see `place`).
        learners: (learner, instance) of everybody who has a log.
        ends: keys of the log pages by which the run reads as finished.
        last: the newest write of any log, in wall-clock seconds, and the label of its learner.
        manifest: what its manifest holds, None when there is none.
    """

    name: str
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
    found = Survey({}, 0)
    for key in keys_under(mailbox, ""):
        where = place(key)
        if where is None:
            found.foreign += 1
        else:
            found.runs.setdefault(where[0], Run(where[0])).keys[where[1]] += 1
    for run in found.runs.values():
        run.manifest = mailbox.get(RunKeys(run.name).manifest)
        run.state = _state(mailbox, run, clock, sleep)
    found.runs = {name: found.runs[name] for name in sorted(found.runs, key=_natural)}
    return found


def place(key: str) -> tuple[str, str] | None:
    """The run a key is of and its kind ("manifest", "log", "grade", "claim", "back"), or None when it is of none."""
    if key.startswith(RUNS):
        name = key.removeprefix(RUNS).removesuffix(".json")
        return (name, "manifest") if key == RunKeys(name).manifest and _is_name(name) else None
    head = key.partition("/")[0]
    name = head.removeprefix("run-") if head.startswith("run-") else "1"
    keys = RunKeys(name)
    if not _is_name(name) or not key.startswith(keys.folder):
        return None
    log, grade = keys.parse_log(key), keys.parse_grade(key)
    if log is not None:
        return (name, "log") if all(map(_is_name, log[:3])) else None
    if grade is not None:
        return (name, "grade") if all(map(_is_name, grade[:2])) else None
    first = key.removeprefix(keys.folder).partition("/")[0]
    pass_ = keys.pass_keys(first if _PASS.fullmatch(first) else "")
    for kind, parsed in (("claim", pass_.parse_claim(key)), ("back", pass_.parse_back(key))):
        if parsed is not None and _is_name(parsed[0], folders=True):
            return name, kind
    return None


def keys_under(mailbox: Mailbox, prefix: str) -> Iterator[str]:
    """Keys that start with `prefix`, read page by page.

    On a store that sorts folder by folder, keys in folders of which one's name begins another's may be left out.
    """
    size = SCANNED if getattr(mailbox, "listing", "page") == "scan" else PAGE
    after = ""
    while page := mailbox.list(prefix, after, size):
        yield from page
        if len(page) < size:
            return
        after = page[-1]


def is_closed(manifest: bytes | None) -> bool:
    """Whether a removal of the run with this manifest was begun: it has no plan any more."""
    try:
        return manifest is not None and not Manifest.decode(manifest, "manifest").plans
    except RecordError:
        return False


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
    if manifest is None:
        return State.UNKNOWN  # perhaps another mailbox, whose prefix lies within this one
    if is_closed(manifest):
        return State.HALF_REMOVED
    return {Next.FINISHED: State.FINISHED, Next.OPEN_NEXT: State.BROKEN_OFF}.get(step, State.UNKNOWN)


def _newest_keys(mailbox: Mailbox, keys: RunKeys) -> dict[_Process, str]:
    """The key of each process's newest page."""
    return {log[:3]: key for key in mailbox.list(keys.learners) if (log := keys.parse_log(key)) is not None}


def _pages(mailbox: Mailbox, newest: dict[_Process, str]) -> dict[_Process, tuple[str, LogPage]] | None:
    """The key and content of each process's newest page; None when one cannot be understood."""
    with ThreadPoolExecutor(_READERS, thread_name_prefix="shardqueue-clean") as readers:
        bodies = list(readers.map(mailbox.get, newest.values()))
    try:
        return {
            process: (key, LogPage.decode(body, key))
            for (process, key), body in zip(newest.items(), bodies, strict=True)
            if body is not None
        }
    except RecordError:
        return None


def _is_name(text: str, folders: bool = False) -> bool:
    try:
        check_identifier(text, folders=folders)
    except InvalidInputError:
        return False
    return True


def _natural(name: str) -> tuple[int, int, str]:
    """Numbered runs by number, then the named ones."""
    return (0, int(name), name) if name.isascii() and name.isdecimal() else (1, 0, name)
