"""Threads that make mailbox calls for as long as anybody trains.

A `ThreadPoolExecutor` takes no more work once the main thread has ended, though a program may train in another one;
and it keeps the interpreter from ending until its calls do, which takes a minute when a store hangs. `Callers` takes
work as long as threads run, and its own are daemons: the end of the interpreter waits for none of them. From Python
3.12 on no thread can be started once the main thread has ended; those that were started before then share the work.
"""

from __future__ import annotations

import threading
from concurrent.futures import Executor, Future
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
P = ParamSpec("P")


class Callers(Executor):
    """Makes calls, at most `most` at once; threads are started as they are needed.

    Args:
        most: how many threads there are at most.
        name: what their names begin with.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Have `function` called. To be used by one thread.

        Raises:
            RuntimeError: no thread runs yet, and none can be started.
        """
        future: Future[T] = Future()
        self._calls.put((future, partial(function, *args, **kwargs)))
        if not self._idle.acquire(blocking=False) and len(self._threads) < self._most:
            self._start()
        return future

    def _start(self) -> None:
        name = f"{self._name}_{len(self._threads)}"
        thread = threading.Thread(target=self._work, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            if not self._threads:
                raise
        else:
            self._threads.append(thread)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002
        """End the threads once all that was submitted is done; `wait` for that."""
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads if wait else ():
            thread.join()

    def _work(self) -> None:
        while (work := self._calls.get()) is not None:
            future, call = work
            try:
                future.set_result(call())
            except BaseException as error:  # for whoever asks the future
                future.set_exception(error)
            del work, future, call
            self._idle.release()
