"""A learner: what it is called, what its processes log, and whether it is alive.

A learner is one training process; its loader workers claim in its name. Its id is a label; an instance is drawn
anew each time, so that two processes with one label stay two learners. A process keeps a `Book`: what it
claimed and what was trained. Its pages are what the mailbox holds; a page is overwritten by its owner while it
is the last one, and a new one begins when it is full or when a write ended unclear, because a late older write
must not replace a newer page.

Whether another learner is alive is judged from what it wrote, whether its process is seen on this machine, and
whether its log changes while it is watched; never from wall clocks, which are for display.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from shardqueue.plan import check_identifier
from shardqueue.records import Current, HeldClaim, LogPage, Process, Totals, TrainedSpan

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from shardqueue.records import Left
    from shardqueue.units import Step

LOG_EVERY = 5.0
"""Seconds between two writes of a log; at the start it is written more often, so that others soon see it change."""
SILENCE = 10.0
"""Seconds without a change after which a log's owner is taken for dead."""
TAIL = "tail"
"""The worker that claims last in a pass, in the training process, where ranks step together."""
CURRENT_PASSES = 8
"""Passes of which a process remembers how far it is, at most: training may be interrupted by others."""
PAGE_SPANS = 2000
"""Spans of trained batches a page holds at most."""


def learner_label(learner_id: str | None) -> str:
    """Check a learner's id, or make the default one: host, rank (where a launcher set one) and pid.

    Raises:
        InvalidInputError: it is outside the grammar of `check_identifier`, or holds a "/".
    """
    if learner_id is None:
        host = "".join(
            c if c.isascii() and (c.isalnum() or c in "-_.") else "-" for c in socket.gethostname()
        )
        return f"{host[:60] or 'host'}-{os.environ.get('RANK', '0')}-{os.getpid()}"
    return check_identifier(learner_id, "learner_id", folders=False)


def seat(pass_: str, worker: str) -> str:
    """What tells the sources of a learner apart: one a pass, and one more for its tail."""
    return f"{pass_}~{TAIL}" if worker == TAIL else pass_


def new_instance() -> str:
    """Draw what tells one learner from any other; never from a generator that can be seeded."""
    return os.urandom(6).hex()


def log_pauses(every: float) -> Iterator[float]:
    """Seconds to wait before each write of a log after the first: short at first, then `every`."""
    pause = every / 8
    while True:
        yield pause
        pause = min(every, 2 * pause)


def this_process() -> Process:
    """Who we are on this machine."""
    return _process(os.getpid())


def training_process() -> Process:
    """The process whose loader worker this is."""
    parent = multiprocessing.parent_process()
    return this_process() if parent is None or parent.pid is None else _process(parent.pid)


def _process(pid: int) -> Process:
    return Process(host=socket.gethostname(), boot=_boot(), pid=pid, started=_started(pid) or "?")


def is_ours(where: Process) -> bool:
    """Whether that is this process, or the training process of this loader worker."""
    parent = multiprocessing.parent_process()
    pids = {os.getpid(), None if parent is None else parent.pid}
    return where.boot == _boot() and where.pid in pids


def seen_here(where: Process) -> bool | None:
    """Whether that process runs on this machine; None when it belongs to another, so that we cannot see it."""
    if where.boot != _boot() or where.started == "?":
        return None
    return _started(where.pid) == where.started


def is_running(pid: int) -> bool:
    """Whether a process of this machine runs; one that ended and was not waited for does not."""
    if Path("/proc/self/stat").exists():
        return _started(pid) is not None
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def _boot() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return f"{socket.gethostname()}/?"
    return f"{boot}/{namespace}"


def _started(pid: int) -> str | None:
    """When a process began, in clock ticks since boot; None when there is no such process."""
    try:
        # The name, in parentheses, may itself hold spaces and parentheses.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


class Life(Enum):
    """What is known of a learner."""

    ALIVE = "alive"
    LEFT = "left"
    DEAD = "dead"
    UNSURE = "unsure"


def judge(page: LogPage, here: bool | None, changed: bool, watched: float) -> Life:
    """Say whether the owner of `page`, the newest of its main process, is alive.

    Args:
        page: what it wrote last.
        here: what `seen_here` said of it.
        changed: whether its log was seen to change while it was watched.
        watched: seconds for which it was watched.
    """
    if page.left is not None:
        return Life.ALIVE if page.rests and here and not is_ours(page.where) else Life.LEFT
    if here is not None:
        return Life.ALIVE if here else Life.DEAD
    if changed:
        return Life.ALIVE
    return Life.DEAD if watched >= SILENCE else Life.UNSURE


@dataclass(slots=True)
class _Span:
    """A `TrainedSpan` that still grows."""

    key: tuple[str, str, int]
    begin: int
    end: int
    start: float
    stop: float
    samples: int = 0
    waited: float = 0.0
    global_step: int | None = None
    ticks: list[int] = field(default_factory=list)

    def at(self, tick: int) -> None:
        """Its last batch was at this step."""
        ticks = self.ticks
        if ticks and ticks[-1] == 1:
            ticks[-2:] = [tick - ticks[-3], 2]
        elif ticks and tick == ticks[-3] + ticks[-2] * ticks[-1]:
            ticks[-1] += 1
        else:
            ticks += [tick, 0, 1]

    def frozen(self, whole: bool = False) -> TrainedSpan:
        """As it is now; `whole`: the unit is trained to its end."""
        return TrainedSpan(
            *self.key,
            self.begin,
            self.end,
            self.samples,
            self.waited,
            self.start,
            self.stop,
            self.global_step,
            whole,
            list(self.ticks),
        )


@dataclass(slots=True)
class _Current:
    """A `Current` that still grows."""

    batches: int = 0
    samples: int = 0
    step: int = 0

    def frozen(self, pass_: str) -> Current:
        """As it is now."""
        return Current(pass_=pass_, batches=self.batches, samples=self.samples, step=self.step)


@dataclass(slots=True)
class _Handed:
    """A batch that is with the consumer."""

    step: Step
    waited: float
    wall: float
    tick: int | None


def _forget(span: TrainedSpan) -> None:
    """The log alone keeps what is trained."""


@dataclass(slots=True)
class Book:
    """What one process of a learner claimed, handed out and trained. Not thread-safe: its owner locks.

    `first_page`: where its log begins, because another process with its name has written the pages before.
    `keep`: given each span once it grows no more. The other public fields from `run_id` on are what its pages say,
    see `LogPage`.
    """

    learner: str
    instance: str
    process: str
    where: Process
    first_page: int = 0
    run_id: str = ""
    claimed: int = 0
    batches: int = 0
    samples: int = 0
    waited: float = 0.0
    repeated: int = 0
    reclaimed: int = 0
    reached: tuple[str, int] | None = None
    every: float | None = None
    left: Left | None = None
    rests: bool = False
    keep: Callable[[TrainedSpan], None] = _forget
    _currents: dict[str, _Current] = field(default_factory=dict)
    _current: str = ""
    _held: dict[tuple[str, str, int], None] = field(default_factory=dict)
    _handed: list[_Handed] = field(default_factory=list)
    _spans: list[TrainedSpan] = field(default_factory=list)
    _growing: dict[tuple[str, str, int], _Span] = field(default_factory=dict)
    _full: dict[int, list[TrainedSpan]] = field(default_factory=dict)
    _page: int = -1
    _write: int = 0

    def __post_init__(self) -> None:
        self._page = self.first_page

    @property
    def next_page(self) -> int:
        """The page after the last one: where another process of this name would begin."""
        return self._page + 1

    @property
    def growing(self) -> list[TrainedSpan]:
        """Spans of units that go on, as they are now."""
        return [span.frozen() for span in self._growing.values()]

    @property
    def in_hand(self) -> list[Step]:
        """Batches handed out and not known to be trained."""
        return [handed.step for handed in self._handed]

    @property
    def held(self) -> Collection[tuple[str, str, int]]:
        """The attempts that are ours and not over."""
        return self._held.keys()

    def claim(self, key: tuple[str, str, int]) -> None:
        """The attempt is ours."""
        self.claimed += 1
        self._held[key] = None

    def release(self, key: tuple[str, str, int], whole_at: int | None = None, wall: float = 0.0) -> None:
        """The attempt is over: given back, or trained to the unit's end, which is batch `whole_at`."""
        self._held.pop(key, None)
        whole = whole_at is not None
        span = self._growing.pop(key, None)
        if whole_at is not None and (span is None or span.end != whole_at):
            if span is not None:
                self._close(span)
            span = _Span(key, whole_at, whole_at, wall, wall)  # no batch is left to say it
        if span is not None:
            self._close(span, whole)

    def hand(self, step: Step, waited: float, wall: float, tick: int | None = None) -> None:
        """A batch went to the consumer, who had waited for it; `tick`: at which step, if ranks step together."""
        self._handed.append(_Handed(step, waited, wall, tick))
        self.waited += waited

    def train(self, samples: int, wall: float, global_step: int | None = None) -> list[Step]:
        """Every batch handed out so far is trained, `samples` in all; return them."""
        done, self._handed = self._handed, []
        for handed in done:
            span = self._extend(handed, wall, global_step)
            current = self._count(handed.step)
        if done:
            span.samples += samples
            current.samples += samples
        self.batches += len(done)
        self.samples += samples
        return [handed.step for handed in done]

    def drop(self, key: str) -> None:
        """What is in hand of a seat will not be trained by us, or nobody will ever know."""
        kept = [handed for handed in self._handed if seat(handed.step.pass_, handed.step.worker) != key]
        self._handed = kept

    def unhand(self, key: str) -> None:
        """What is in hand of a seat went to a wrapper, not to the loop, and so did the waiting for it."""
        self.waited -= sum(h.waited for h in self._handed if seat(h.step.pass_, h.step.worker) == key)
        self.drop(key)

    def pages(self, wall: float, elapsed: float, rate: float) -> list[LogPage]:
        """Return the pages that have to be written now: full ones, then the current one, which is the last."""
        if len(self._spans) >= PAGE_SPANS:
            self._full[self._page], self._spans = self._spans, []
            self._page += 1
        spans = {**self._full, self._page: [*self._spans, *self.growing]}
        totals = Totals(
            claimed=self.claimed,
            batches=self.batches,
            samples=self.samples,
            elapsed=elapsed,
            waited=self.waited,
            repeated=self.repeated,
            reclaimed=self.reclaimed,
        )
        return [self._as_page(number, trained, totals, wall, rate) for number, trained in spans.items()]

    def wrote(self, page: LogPage, clear: bool) -> None:
        """`page` was written. If that did not end clearly, its content goes on a new page: readers take the union."""
        full = self._full.pop(page.page, None)
        if clear:
            return
        self._page += 1
        if full is not None:
            self._full[self._page] = full
            self._page += 1

    def _as_page(
        self, number: int, trained: list[TrainedSpan], totals: Totals, wall: float, rate: float
    ) -> LogPage:
        self._write += 1
        return LogPage(
            learner=self.learner,
            instance=self.instance,
            process=self.process,
            page=number,
            write=self._write,
            run_id=self.run_id,
            where=self.where,
            wall=wall,
            totals=totals,
            rate=rate,
            trained=trained,
            held=[HeldClaim(*key) for key in self._held],
            current=self._currents[self._current].frozen(self._current) if self._currents else None,
            reached=self.reached,
            every=self.every,
            left=self.left,
            rests=self.rests,
        )

    def _extend(self, handed: _Handed, wall: float, global_step: int | None) -> _Span:
        step = handed.step
        key = (step.pass_, step.unit, step.attempt)
        span = self._growing.get(key)
        if span is None or span.end != step.index:
            if span is not None:
                self._close(span)
            span = self._growing[key] = _Span(key, step.index, step.index, handed.wall, wall)
        span.end += 1
        span.waited += handed.waited
        span.stop = wall
        span.global_step = global_step
        if handed.tick is not None:
            span.at(handed.tick)
        return span

    def _close(self, span: _Span, whole: bool = False) -> None:
        """Nothing more will be added to a span."""
        closed = span.frozen(whole)
        self._spans.append(closed)
        self.keep(closed)

    def _count(self, step: Step) -> _Current:
        if step.pass_ != self._current or not self._currents:
            self._current = step.pass_
            self._currents[step.pass_] = self._currents.pop(step.pass_, _Current())
            if len(self._currents) > CURRENT_PASSES:
                del self._currents[next(iter(self._currents))]
        current = self._currents[step.pass_]
        current.batches += 1
        current.step = int(step)
        return current
