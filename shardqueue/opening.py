"""Finding or opening a run while the caller waits: threads and I/O around `Opening`."""

from __future__ import annotations

import threading
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING

from shardqueue.callers import Callers

if TYPE_CHECKING:
    from shardqueue.asks import Ask
    from shardqueue.clock import Clock
    from shardqueue.mailbox import Mailbox
    from shardqueue.mailbox.calls import Answer
    from shardqueue.run import Joined, Opening

CALLERS = 8


def open_run(machine: Opening, mailbox: Mailbox, clock: Clock) -> Joined:
    """Make the machine's calls, several at once, until the run is agreed on.

    Raises:
        RunError: the run cannot be joined.
        MailboxError: the mailbox cannot be used, or did not answer for too long.
    """
    running: dict[Future[Answer], Ask] = {}
    with Callers(CALLERS, "shardqueue-opening") as pool:
        while machine.joined is None:
            now = clock.monotonic()
            running |= {pool.submit(ask.call.perform, mailbox): ask for ask in machine.poll(now)}
            if machine.asks.error is not None:
                raise machine.asks.error
            wake = machine.wake(now)
            pause = None if wake is None else max(0.0, wake - now)
            if not running:
                threading.Event().wait(pause)
                continue
            done, _ = wait(running, pause, FIRST_COMPLETED)
            for future in done:
                _report(machine, running.pop(future), future, clock.monotonic())
    return machine.joined


def _report(machine: Opening, ask: Ask, future: Future[Answer], now: float) -> None:
    error = future.exception()
    if error is None:
        machine.asks.answered(ask, future.result(), now)
    elif isinstance(error, Exception):
        machine.asks.failed(ask, error, now)
    else:
        raise error
