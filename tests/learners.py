"""Learners in tests: load, train and share plans through the public API, and read what the mailbox says of it."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from shardqueue import Mailbox, Unit, shared_queue
from shardqueue.mailbox.faults import Wrapper
from shardqueue.records import BackRecord, LogPage, RunKeys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

T = TypeVar("T")
Value = tuple[int, int]

PATIENCE = 60.0
"""Seconds after which a test that hangs fails."""


def load(unit: Unit) -> Iterator[tuple[int, Value]]:
    """The batch of a step is its place in the dataset: (step, lane)."""
    for step in unit.steps:
        yield step, (step, unit.lane)


def dataset(units: Mapping[str, Unit]) -> Counter[Value]:
    """Every batch of the plan once."""
    return Counter((step, unit.lane) for unit in units.values() for step in unit.steps)


class Task(threading.Thread):
    """A thread whose result, or exception, is waited for."""

    def __init__(self, function: Callable[[], object]) -> None:
        super().__init__(name="test-task", daemon=True)
        self._function = function
        self._result: Any = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._result = self._function()
        except BaseException as error:
            self._error = error

    def result(self) -> Any:
        self.join(PATIENCE)
        assert not self.is_alive(), "the task hangs"
        if self._error is not None:
            raise self._error
        return self._result


def together(functions: Iterable[Callable[[], T]]) -> list[T]:
    """Run all at once, each in a thread of its own."""
    tasks = [Task(function) for function in functions]
    return [task.result() for task in tasks]


class Gate(Wrapper):
    """Calls for which `which(verb, key)` holds wait at the gate until it is opened."""

    def __init__(self, mailbox: Mailbox, which: Callable[[str, str], bool]) -> None:
        super().__init__(mailbox)
        self._which = which
        self.reached = threading.Event()
        self._opened = threading.Event()

    def open(self) -> None:
        self._opened.set()

    def _around(self, verb: str, name: str, forward: Callable[[], T]) -> T:
        if self._which(verb, name):
            self.reached.set()
            assert self._opened.wait(PATIENCE), f"{verb} {name} waited for ever"
        return forward()


def train(
    units: Mapping[str, Any],
    mailbox: str | Path | Mailbox,
    learner: str,
    most: int | None = None,
    loader: Callable[[Any], Any] = load,
    hold: Callable[[], object] = bool,
    **options: Any,
) -> list[Any]:
    """Train until the end, or until `most` batches; what was trained. The first batch takes as long as `hold`."""
    trained: list[Any] = []
    with shared_queue(units, mailbox, learner, loader, **options) as queue:
        while most is None or len(trained) < most:
            pair = next(queue, None)
            if pair is None:
                break
            if not trained:
                hold()
            trained.append(pair[1])
    return trained


def until(holds: Callable[[], bool]) -> None:
    """Wait for something that nothing tells of."""
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, "it never came true"
        threading.Event().wait(0.002)


def share(
    units: Mapping[str, Any] | Iterable[Mapping[str, Any]],
    mailbox: Mailbox,
    names: str,
    run: str = "1",
    **options: Any,
) -> list[list[Any]]:
    """Learners of these one-letter names train in run `run`; none is done before all have joined."""
    plans = [units] * len(names) if isinstance(units, Mapping) else list(units)

    def all_joined() -> None:
        until(lambda: len({key.split("/")[-2] for key in mailbox.list(RunKeys(run).learners)}) >= len(names))

    return together(
        partial(train, plan, mailbox, name, hold=all_joined, **options)
        for plan, name in zip(plans, names, strict=True)
    )


def pages(mailbox: Mailbox, run: str = "1") -> list[LogPage]:
    """All pages of all logs of a run, oldest first in each log."""
    found = []
    for key in mailbox.list(RunKeys(run).learners):
        if RunKeys(run).parse_log(key) is None:
            continue
        body = mailbox.get(key)
        assert body is not None
        found.append(LogPage.decode(body, key))
    return found


def last_page(mailbox: Mailbox, learner: str, run: str = "1") -> LogPage:
    return [page for page in pages(mailbox, run) if page.learner == learner][-1]


def credited(mailbox: Mailbox, run: str = "1") -> Counter[tuple[str, int]]:
    """How often the logs credit each batch (unit, index) to some attempt of some learner."""
    once = {
        (page.instance, span.unit, span.attempt, index)
        for page in pages(mailbox, run)
        for span in page.trained
        for index in range(span.begin, span.end)
    }
    return Counter((unit, index) for _, unit, _, index in once)


def given_back(mailbox: Mailbox, run: str = "1") -> dict[tuple[str, int], int]:
    """(unit, attempt) of each attempt that was ended, and where the next one begins."""
    keys = RunKeys(run).pass_keys()
    found = {}
    for key in mailbox.list(keys.backs):
        body, parsed = mailbox.get(key), keys.parse_back(key)
        assert body is not None
        assert parsed is not None
        found[parsed] = BackRecord.decode(body, key).begin
    return found


class CountingLoader:
    """Counts the batches asked of it, and lets a test wait until so many were."""

    def __init__(self) -> None:
        self.given = 0
        self._changed = threading.Condition()

    def __call__(self, unit: Unit) -> Iterator[tuple[int, Value]]:
        for pair in load(unit):
            with self._changed:
                self.given += 1
                self._changed.notify_all()
            yield pair

    def wait_for(self, given: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.given >= given, PATIENCE), (
                f"only {self.given} asked for"
            )


class Clock:
    """The machine's clock, which a test may put forward, or let run `speed` times as fast from the start or later."""

    def __init__(self, speed: float = 1.0) -> None:
        now = time.monotonic()
        self._shows = (now, now, speed)

    def forward(self, seconds: float) -> None:
        shown, since, speed = self._shows
        self._shows = (shown + seconds, since, speed)

    def hurry(self, speed: float) -> None:
        self._shows = (self.monotonic(), time.monotonic(), speed)

    def monotonic(self) -> float:
        shown, since, speed = self._shows
        return shown + (time.monotonic() - since) * speed

    def wall(self) -> float:
        return time.time() + self.monotonic() - time.monotonic()
