"""What every process of the demo does: it answers its pipe, and goes when nobody needs it.

Told the name of a phase and a mailbox, it makes ready and says so; told the common start, it trains and sends what
it recorded. An error is sent as the text of its traceback. The process ends when the pipe does, and at once, whatever
it is doing, when the process that started it is gone.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    Ready = Callable[[], float]
    """Says that this process is ready, and returns the common start, of `time.monotonic`."""
    Train = Callable[[Any, str, Ready], list[Any]]


def serve(pipe: Connection, begin: Callable[[], Train]) -> None:
    """Train one phase after another until the pipe ends.

    Args:
        pipe: to the fleet.
        begin: makes what trains a phase, told its name, a mailbox's URL and how to say "ready".
    """
    watch_parent()
    torch.set_num_threads(1)

    def ready() -> float:
        pipe.send(("ready", None))
        start: float = pipe.recv()
        return start

    try:
        train = begin()
        while True:
            phase, mailbox = pipe.recv()
            pipe.send(("done", train(phase, mailbox, ready)))
    except EOFError:
        return
    except BaseException:
        with suppress(OSError):
            pipe.send(("failed", traceback.format_exc()))


def watch_parent(worker: int = 0) -> None:  # noqa: ARG001
    """Leave as soon as the parent is gone; also for the workers of a DataLoader."""
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
