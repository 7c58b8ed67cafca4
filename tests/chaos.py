"""Training processes that are killed, stopped, cut off and joined late, and what each of them trained.

A `Stage` starts them, does things to them, and afterwards holds what they wrote against what the mailbox says. Each
appends a line to a file of its own after every batch it trained; what a process did is what its file says, whatever
the library believes. Events come at points of progress, not of time, so that a slow machine changes nothing.

Run as a program, this module is one such process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import shardqueue.learner
from shardqueue import Session, Unit, open_mailbox, shared_queue, unit_grid
from shardqueue.errors import MailboxUnavailableError, RunFinishedError
from shardqueue.ledger import Ledger
from shardqueue.mailbox.faults import Wrapper
from shardqueue.records import BackRecord, ClaimRecord, LogPage, RunKeys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import TracebackType

    from shardqueue import Mailbox

T = TypeVar("T")
Batch = tuple[str, int]
"""A unit, and the place of a batch in it."""

PATIENCE = 120.0
"""Seconds after which what does not come about counts as a hang."""
UNIT_STEPS = 20
SLICES = 10
"""Naps in which a batch is trained: one nap would be over with a pause, however much of the batch was left."""
MACHINE = "SHARDQUEUE_CHAOS_MACHINE"
"""Set for processes that are each on a machine of its own, as far as the library can see."""
KINDS = ("queue", "stepped", "loader", "forked", "spawned")
"""`shared_queue`, the same with a session, and `Session.track` around a DataLoader without workers or with two."""

if MACHINE in os.environ:  # here and below: also in spawned workers, which import this
    shardqueue.learner._boot = lambda: os.environ[MACHINE]
if __name__ in ("__main__", "__mp_main__"):
    faulthandler.register(signal.SIGUSR1)


@dataclass(frozen=True)
class Course:
    """What all processes of a run have in common.

    Attributes:
        folder: where their files go.
        url, options: the mailbox.
        batches: batches of the plan, each a dataset step, in units of 20.
        reclaim_after: see `shared_queue`.
        seconds: that a batch takes.
        machines: whether each process is on a machine of its own.
    """

    folder: str
    url: str
    options: Mapping[str, Any] = field(default_factory=dict)
    batches: int = 300
    reclaim_after: float = 3.0
    seconds: float = 0.02
    machines: bool = False

    @property
    def units(self) -> Mapping[str, Unit]:
        """The plan."""
        return unit_grid(self.batches, UNIT_STEPS, taper=False)

    @property
    def cut(self) -> Path:
        """While this file exists, nobody reaches the mailbox."""
        return Path(self.folder, "cut")

    @property
    def go(self) -> Path:
        """Once this file exists, the first batches are trained."""
        return Path(self.folder, "go")

    def begun(self, pid: int) -> Path:
        """This file exists once a process has its first batch in hand, and waits for the others."""
        return Path(self.folder, f"begun.{pid}")

    def mailbox(self) -> Mailbox:
        """The mailbox, as a process sees it that may be cut off."""
        return Severed(open_mailbox(self.url, prove=False, **self.options), self.cut)


class Severed(Wrapper):
    """While the file `cut` exists, no call reaches the store, and no answer comes from it."""

    def __init__(self, mailbox: Mailbox, cut: Path) -> None:
        super().__init__(mailbox)
        self._cut = cut

    def _around(self, verb: str, name: str, forward: Callable[[], T]) -> T:
        self._check(verb, name)
        result = forward()
        self._check(verb, name)
        return result

    def _check(self, verb: str, name: str) -> None:
        if self._cut.exists():
            raise MailboxUnavailableError(f"{verb}({name!r}): cut off; remove {self._cut.name} to go on")


# -- a training process ----------------------------------------------------------------------------------


def load(unit: Unit) -> Iterator[tuple[int, int]]:
    """The batch of a step is its place in the dataset."""
    for step in unit.steps:
        yield step, step


def train(course: Course, name: str, kind: str, seconds: float) -> None:
    """Train until nothing is left, and write a line after each batch."""
    path = Path(course.folder, f"{name}.{os.getpid()}")
    written = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def trained(step: Any, value: Any) -> None:
        while not course.go.exists():
            course.begun(os.getpid()).touch()
            time.sleep(0.01)
        for _ in range(SLICES):
            time.sleep(seconds / SLICES)
        line = f"{time.monotonic()} {step.unit} {step.attempt} {step.index} {int(value)}\n"
        os.write(written, line.encode())

    units, mailbox, after = course.units, course.mailbox(), course.reclaim_after
    if kind == "queue":
        with shared_queue(units, mailbox, name, load, reclaim_after=after) as queue:
            for step, value in queue:
                trained(step, value)
        return
    with Session(mailbox, name, log_every=after / 3) as session, contextlib.ExitStack() as stack:
        batches: Any
        if kind == "stepped":
            batches = stack.enter_context(shared_queue(units, mailbox, name, load, reclaim_after=after))
        else:
            batches = session.track(_loader(units, mailbox, name, kind, after))
        for step, value in batches:
            trained(step, value)
            session.step(samples=1)


def _loader(units: Mapping[str, Unit], mailbox: Mailbox, name: str, kind: str, after: float) -> Any:
    from torch.utils.data import DataLoader

    from shardqueue import SharedQueueDataset

    dataset = SharedQueueDataset(units, mailbox, load, name, reclaim_after=after)
    if kind == "loader":
        return DataLoader(dataset, batch_size=None)
    start = "fork" if kind == "forked" else "spawn"
    return DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context=start)


def main(argument: str) -> None:
    """Be one training process; one that comes when all is trained has nothing to do."""
    given = json.loads(argument)
    course = Course(**given.pop("course"))
    with contextlib.suppress(RunFinishedError):
        train(course, **given)


# -- the stage -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """A batch that was trained, as its process wrote it down.

    Attributes:
        when: by the monotonic clock, which all processes of a machine share.
        pid: whose line it is.
        attempt: at the batch's unit.
        batch: which.
        value: what the batch held.
    """

    when: float
    pid: int
    attempt: int
    batch: Batch
    value: int


@dataclass(eq=False)
class Learner:
    """A training process that was started.

    Attributes:
        killed, told: whether it was sent SIGKILL, or SIGTERM.
        stopped: whether it was ever stopped.
        paused: whether it is now.
        known: at each time it went on, the attempts that had been ended by then.
    """

    name: str
    kind: str
    process: subprocess.Popen[bytes]
    path: Path
    said: Path
    killed: bool = False
    told: bool = False
    stopped: bool = False
    paused: bool = False
    known: list[tuple[float, dict[tuple[str, int], BackRecord]]] = field(default_factory=list)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def runs(self) -> bool:
        """Whether it has not ended yet."""
        return self.process.poll() is None

    def lines(self) -> list[Line]:
        """What it trained so far."""
        text = self.path.read_text() if self.path.exists() else ""
        found = []
        for line in text[: text.rfind("\n") + 1].splitlines():  # the last one may still be being written
            when, unit, attempt, index, value = line.split()
            found.append(Line(float(when), self.pid, int(attempt), (unit, int(index)), int(value)))
        return found

    def send(self, number: int, all_of_it: bool) -> None:
        """Send a signal to the process, or to it and its loader's workers."""
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if all_of_it else os.kill)(self.pid, number)


class Stage:
    """Runs training processes, and does things to them; at the end none of them is left.

    Attributes:
        course: what they train.
        learners: all that were ever started.
    """

    def __init__(self, course: Course) -> None:
        self.course = course
        self.learners: list[Learner] = []
        self.mailbox = open_mailbox(course.url, **course.options)
        self.keys = RunKeys("1")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for learner in self.learners:
            learner.send(signal.SIGKILL, all_of_it=True)
            learner.process.wait()

    # -- events ------------------------------------------------------------------------------------------

    def start(self, name: str, kind: str = "queue", seconds: float | None = None) -> Learner:
        """A learner joins; its batches take `seconds`, or as long as everybody's."""
        number = len(self.learners)
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        if self.course.machines:
            environment[MACHINE] = f"machine-{number}"
        given: dict[str, Any] = {"course": asdict(self.course), "name": name, "kind": kind}
        given["seconds"] = self.course.seconds if seconds is None else seconds
        said = Path(self.course.folder, f"{number}.{name}.said")
        command = [sys.executable, "-W", "ignore::DeprecationWarning", __file__, json.dumps(given)]
        with said.open("wb") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        path = Path(self.course.folder, f"{name}.{process.pid}")
        learner = Learner(name, kind, process, path, said)
        self.learners.append(learner)
        return learner

    def go(self) -> None:
        """Once everybody has a first batch in hand, let them train."""
        self.until(
            lambda: all(self.course.begun(one.pid).exists() or not one.runs for one in self.learners),
            "everybody had a batch",
        )
        self.course.go.touch()

    def kill(self, learner: Learner, all_of_it: bool = False) -> None:
        """End it without a word; its loader's workers are left to themselves, or go with it."""
        learner.killed = learner.runs
        learner.send(signal.SIGKILL, all_of_it)
        learner.process.wait()

    def tell(self, learner: Learner) -> None:
        """Give it notice."""
        learner.told = True
        learner.send(signal.SIGTERM, all_of_it=False)

    def stop(self, learner: Learner, all_of_it: bool = False) -> None:
        """Pause it, with its loader's workers or without."""
        learner.stopped = learner.paused = True
        learner.send(signal.SIGSTOP, all_of_it)

    def go_on(self, learner: Learner) -> None:
        """End a pause."""
        learner.known.append((time.monotonic(), self.ended()))
        learner.paused = False
        learner.send(signal.SIGCONT, all_of_it=True)

    def cut_off(self) -> None:
        """From now on nobody reaches the mailbox."""
        self.course.cut.touch()

    def restore(self) -> None:
        """The mailbox answers again."""
        self.course.cut.unlink()

    # -- waiting -----------------------------------------------------------------------------------------

    def until(self, holds: Callable[[], object], what: str) -> None:
        """Wait until something holds; when it does not come about, say what everybody is doing.

        Raises:
            AssertionError: it did not.
        """
        end = time.monotonic() + PATIENCE
        while not holds():
            if time.monotonic() > end:
                raise AssertionError(f"in {PATIENCE:g} s it did not happen that {what}\n{self.tell_all()}")
            time.sleep(0.01)

    def until_trained(self, batches: int) -> None:
        """Wait until so many batches are trained, or nobody is left who trains."""
        self.until(
            lambda: len(self.lines()) >= batches or not any(learner.runs for learner in self.learners),
            f"{batches} batches were trained",
        )

    def until_over(self) -> None:
        """Wait until every learner has ended by itself, and its workers."""
        self.until(lambda: not any(learner.runs for learner in self.learners), "all ended")
        pids = {learner.pid for learner in self.learners}
        self.until(lambda: not _in_sessions(pids), "all workers ended")

    def tell_all(self) -> str:
        """What all have said, with what those that hang are doing."""
        for learner in self.learners:
            if learner.runs:
                learner.send(signal.SIGUSR1, all_of_it=True)
        time.sleep(1.0)
        texts = [f"--- {one.name} {one.kind} {one.pid}\n{one.said.read_text()}" for one in self.learners]
        return "\n".join([*texts, *self.mailbox.list("")])

    # -- what happened -----------------------------------------------------------------------------------

    def lines(self) -> list[Line]:
        """Every batch that was trained, as often as it was."""
        return [line for learner in self.learners for line in learner.lines()]

    def repeated(self) -> dict[Batch, list[Line]]:
        """Batches trained more than once, first attempts first."""
        found: dict[Batch, list[Line]] = defaultdict(list)
        for line in self.lines():
            found[line.batch].append(line)
        return {
            batch: sorted(lines, key=lambda line: (line.attempt, line.when))
            for batch, lines in found.items()
            if len(lines) > 1
        }

    def values(self) -> Counter[int]:
        """How often each value of the dataset was trained."""
        return Counter(line.value for line in self.lines())

    def ledger(self) -> Ledger:
        """What the logs say."""
        ledger = Ledger()
        for key in self.mailbox.list(self.keys.learners):
            if self.keys.parse_log(key) is not None:
                ledger.read(LogPage.decode(self._get(key), key))
        return ledger

    def ended(self) -> dict[tuple[str, int], BackRecord]:
        """The attempts that were ended."""
        keys = self.keys.pass_keys()
        parsed = {key: keys.parse_back(key) for key in self.mailbox.list(keys.backs)}
        return {
            attempt: BackRecord.decode(self._get(key), key)
            for key, attempt in parsed.items()
            if attempt is not None
        }

    def claims(self) -> dict[tuple[str, int], ClaimRecord]:
        """The attempts that were claimed."""
        keys = self.keys.pass_keys()
        parsed = {key: keys.parse_claim(key) for key in self.mailbox.list(keys.units)}
        return {
            attempt: ClaimRecord.decode(self._get(key), key)
            for key, attempt in parsed.items()
            if attempt is not None
        }

    def _get(self, key: str) -> bytes:
        data = self.mailbox.get(key)
        assert data is not None, key
        return data


def _in_sessions(pids: set[int]) -> list[int]:
    """Processes of these sessions that still run. A learner's loader workers are in its session."""
    found = []
    for pid in filter(str.isdecimal, (entry.name for entry in Path("/proc").iterdir())):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) in pids and fields[0] not in "ZX":
                found.append(int(pid))
    return found


if __name__ == "__main__":
    main(sys.argv[1])
