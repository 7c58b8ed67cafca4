"""Real threads of which exactly one runs at any time, and a seeded choice which.

Whatever the threads share has to be guarded by locks of `Scheduler.lock`: taking and releasing one are the points at
which another thread may go on. A thread that waits for a lock is not chosen before that is free, but one that waits
with a time-out may be: its time is then over. Time is a counter. The same seed gives the same run.
"""

from __future__ import annotations

import sys
import threading
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

NET_SECONDS = 120.0
"""Real seconds after which a run is given up: something waits that the scheduler knows nothing of."""


class StuckError(AssertionError):
    """Nobody can go on, or nobody comes to an end."""


class InterruptedWaitError(BaseException):
    """What a signal handler may raise while a thread waits."""


class _StoppedError(BaseException):
    """Ends a thread of a run that has failed."""


class Task:
    """A thread under the scheduler.

    Attributes:
        name: for messages.
        awaits: the lock it waits for.
        seconds: until its time-out; None: it waits as long as it takes.
        interrupts: how many of its waits may yet be interrupted.
    """

    def __init__(self, name: str, scheduler: Scheduler, body: Callable[[], None]) -> None:
        self.name = name
        self.awaits: ControlledLock | None = None
        self.seconds: float | None = None
        self.interrupts = 0
        self.is_finished = False
        self._scheduler, self._body = scheduler, body
        self._baton = threading.Lock()
        self._baton.acquire()
        self.thread = threading.Thread(target=self._run, name=f"model {name}", daemon=True)

    def go(self) -> None:
        """Let it run; whoever calls this stops, or ends."""
        self._baton.release()

    def stop(self) -> None:
        """Wait until it is let go."""
        self._baton.acquire()

    @property
    def can_go(self) -> bool:
        """Whether it may be chosen."""
        lock = self.awaits
        if lock is None or not lock.is_taken or self.seconds is not None:
            return True
        return self.interrupts > 0 and lock.may_interrupt

    def _run(self) -> None:
        self.stop()
        scheduler = self._scheduler
        try:
            if not scheduler.is_stopping:
                self._body()
        except _StoppedError:
            pass
        except BaseException as error:
            scheduler.fail(error)
        self.is_finished = True
        del self._body
        scheduler.leave()


class ControlledLock:
    """A lock whose every turn the scheduler decides; like `threading.Lock` otherwise."""

    def __init__(self, scheduler: Scheduler, name: str, may_interrupt: bool) -> None:
        self.name, self.may_interrupt = name, may_interrupt
        self.is_taken = False
        self._scheduler = scheduler

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = self._scheduler
        if scheduler.is_stopping and scheduler.current is not None:
            if blocking:
                raise _StoppedError
            return False
        if blocking:
            scheduler.switch()
        else:
            with suppress(_StoppedError):  # it is called by finalizers, too
                scheduler.switch()
            if scheduler.is_stopping:
                return False
        if self.is_taken:
            if not blocking:
                return False
            if not scheduler.wait(self, None if timeout < 0 else timeout):
                return False
        self.is_taken = True
        with suppress(_StoppedError):
            scheduler.switch()
        return True

    def release(self) -> None:
        if not self.is_taken:
            raise RuntimeError(f"release of {self.name}, which nobody has")
        self.is_taken = False
        with suppress(_StoppedError):
            self._scheduler.switch()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Scheduler:
    """Runs tasks one at a time.

    Args:
        random: decides.
        max_turns: after so many turns of anybody the run has failed.
        interrupts_late: a wait may be interrupted when its lock is already taken for it.

    Attributes:
        current: whose turn it is; None before and after the run.
        time: seconds.
        between: called at every point where another thread may go on, by the thread that runs.
    """

    def __init__(self, random: Random, max_turns: int = 100_000, interrupts_late: bool = False) -> None:
        self.random = random
        self.current: Task | None = None
        self.time = 0.0
        self.is_stopping = False
        self.between: Callable[[], None] | None = None
        self._tasks: list[Task] = []
        self._turns_left, self._interrupts_late = max_turns, interrupts_late
        self._locks = 0
        self._failure: BaseException | None = None
        self._all_done = threading.Event()

    def now(self) -> float:
        """Return the time; it passes a little with every look at it."""
        self.time += 0.001
        return self.time

    def lock(self, may_interrupt: bool = True) -> ControlledLock:
        """Make a lock; see `Task.interrupts` for what may be interrupted."""
        self._locks += 1
        return ControlledLock(self, f"lock {self._locks - 1}", may_interrupt)

    def spawn(self, name: str, body: Callable[[], None]) -> Task:
        """Add a thread, before the run or in it."""
        task = Task(name, self, body)
        self._tasks.append(task)
        task.thread.start()
        return task

    def run(self) -> None:
        """Run all tasks to their ends.

        Raises:
            StuckError: nobody could go on.
            BaseException: what a task raised, if one did.
        """
        if self._tasks:
            self.current = self.random.choice(self._tasks)
            self.current.go()
            if not self._all_done.wait(NET_SECONDS):
                self.fail(StuckError(f"no turn ended within {NET_SECONDS} s"))
        # After a failure the others are ended one by one; the list may grow meanwhile.
        for task in self._tasks:
            if not task.is_finished:
                self.current = task
                task.go()
            task.thread.join(NET_SECONDS)
        self.current = None
        failure, self._failure = self._failure, None
        try:
            if failure is not None:
                raise failure
        finally:
            del failure

    # for locks and tasks

    def switch(self) -> None:
        """Whoever runs may have to stop here."""
        if self.current is None or self.is_stopping:
            return
        if self.between is not None:
            self.between()
        self._pass_on()

    def wait(self, lock: ControlledLock, seconds: float | None) -> bool:
        """Whoever runs waits for a lock; return whether that is free now, else the time is over."""
        task = self.current
        if task is None:
            raise StuckError(f"{lock.name} is taken, and nobody else runs")
        task.awaits, task.seconds = lock, seconds
        self._pass_on()
        task.awaits = task.seconds = None
        if not lock.is_taken:
            if self._interrupts_late and self._is_interrupted(task, lock):
                lock.is_taken = True
                raise InterruptedWaitError
            return True
        if seconds is None or self._is_interrupted(task, lock):
            raise InterruptedWaitError
        self.time += seconds
        return False

    def _is_interrupted(self, task: Task, lock: ControlledLock) -> bool:
        if not task.interrupts or not lock.may_interrupt or self.random.random() < 0.5:
            return False
        task.interrupts -= 1
        return True

    def _pass_on(self) -> None:
        """The next one goes on, perhaps the same."""
        task = self.current
        assert task is not None
        chosen = self._choose()
        if chosen is None:
            self.fail(StuckError("everybody waits: " + self._who_waits()))
            raise _StoppedError
        if chosen is not task:
            self.current = chosen
            chosen.go()
            task.stop()
            if self.is_stopping:
                raise _StoppedError

    def _choose(self) -> Task | None:
        ready = [task for task in self._tasks if not task.is_finished and task.can_go]
        if not ready:
            return None
        self._turns_left -= 1
        if self._turns_left < 0:
            self.fail(StuckError("nobody comes to an end"))
            raise _StoppedError
        # A time-out is as likely as somebody else's turn only now and then.
        prompt = [task for task in ready if task.awaits is None or not task.awaits.is_taken]
        return self.random.choice(prompt if prompt and self.random.random() < 0.7 else ready)

    def _who_waits(self) -> str:
        return "; ".join(
            f"{task.name} for {task.awaits.name}" + _where(task)
            for task in self._tasks
            if not task.is_finished and task.awaits is not None
        )

    def fail(self, error: BaseException) -> None:
        """The run has failed; the first failure is told."""
        if self._failure is None:
            self._failure = error
        self.is_stopping = True

    def leave(self) -> None:
        """Whoever runs has come to its end."""
        if self.is_stopping:
            self._all_done.set()
            return
        if all(task.is_finished for task in self._tasks):
            self._all_done.set()
            return
        try:
            chosen = self._choose()
        except _StoppedError:
            chosen = None
        if chosen is None:
            self.fail(StuckError("everybody waits: " + self._who_waits()))
            self._all_done.set()
            return
        self.current = chosen
        chosen.go()


def _where(task: Task) -> str:
    """The innermost lines of a task outside this module."""
    frame = sys._current_frames().get(task.thread.ident or 0)
    lines = [line for line in traceback.extract_stack(frame) if line.filename != __file__]
    return "".join(f" < {line.name}:{line.lineno}" for line in reversed(lines[-4:]))
