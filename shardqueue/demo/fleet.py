"""The demo's processes: started once, led through the phases, gone when the block is left.

Every node has one pipe and waits on nothing else, so no node can hang another: a phase begins when all have
said "ready", at an instant that all are told, and a node whose pipe ends or that reports an error ends the demo with
`NodeFailedError`. Leaving the block ends the pipes; a node that does not go by itself is terminated.

Nodes ignore Ctrl-C, which a terminal sends to every process of the group: the process that leads them handles it.
"""

from __future__ import annotations

import signal
import threading
import time
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, Protocol

import torch.multiprocessing

from shardqueue.demo import node

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess
    from types import TracebackType


_LEAD = 0.05  # seconds between telling the common start and the start
_FAREWELL = 5.0  # seconds for which a node may go by itself


class NodeFailedError(Exception):
    """A node's process ended by an error, or was killed; the message holds its traceback."""


class Named(Protocol):
    """What says how many nodes there are."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """Their names."""


class Fleet:
    """One process a node. A context manager.

    Args:
        options: told to each node.
        shared: likewise; memory that all see.
        main: what a node runs, told its number, `options`, `shared` and its pipe.
        preloaded: a module that takes long to import. It is imported once and the nodes are forked from there, where
            the system can do that.
    """

    def __init__(
        self,
        options: Named,
        shared: object,
        main: Callable[..., None] = node.main,
        preloaded: str | None = None,
    ) -> None:
        self._options, self._shared, self._main, self._preloaded = options, shared, main, preloaded
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> Fleet:
        context = self._context()
        try:
            with _interrupts_ignored():
                for number in range(len(self._options.nodes)):
                    self._start(context, number)
        except BaseException:
            self._close(at_once=True)
            raise
        return self

    def _context(self) -> Any:
        if self._preloaded is None or "forkserver" not in torch.multiprocessing.get_all_start_methods():
            return torch.multiprocessing.get_context("spawn")
        context = torch.multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([self._preloaded])
        return context

    def _start(self, context: Any, number: int) -> None:
        ours, theirs = context.Pipe()
        arguments = (number, self._options, self._shared, theirs)
        process = context.Process(target=self._main, args=arguments)  # no daemon: it has a child
        self._pipes.append(ours)
        process.start()
        self._processes.append(process)
        theirs.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(at_once=error is not None)

    def run(self, phase: str, mailbox: str, tick: Callable[[], None]) -> list[Any]:
        """Run one phase on all nodes and return their records; `tick` is called a few times a second."""
        self._tell((phase, mailbox))
        self._gather(tick)
        self._tell(time.monotonic() + _LEAD)
        return [record for records in self._gather(tick) for record in records]

    def _tell(self, message: object) -> None:
        for number, pipe in enumerate(self._pipes):
            try:
                pipe.send(message)
            except OSError:
                self._receive(number)

    def _gather(self, tick: Callable[[], None]) -> list[Any]:
        answers: dict[int, Any] = {}
        while len(answers) < len(self._pipes):
            tick()
            waiting = {pipe: number for number, pipe in enumerate(self._pipes) if number not in answers}
            for ready in wait(list(waiting), timeout=0.25):
                number = waiting[ready]  # type: ignore[index]
                answers[number] = self._receive(number)
        return [answers[number] for number in sorted(answers)]

    def _receive(self, number: int) -> Any:
        name = self._options.nodes[number]
        try:
            kind, answer = self._pipes[number].recv()
        except (EOFError, OSError):
            process = self._processes[number]
            process.join(timeout=5)
            raise NodeFailedError(f"node {name} ended with exit code {process.exitcode}") from None
        if kind == "failed":
            raise NodeFailedError(f"node {name} failed\n{answer}")
        return answer

    def _close(self, at_once: bool) -> None:
        for pipe in self._pipes:
            pipe.close()
        if not at_once:
            self._join()
        for end in ("terminate", "kill"):
            for process in self._processes:
                getattr(process, end)()
            self._join()
        for process in self._processes:
            process.close()

    def _join(self) -> None:
        deadline = time.monotonic() + _FAREWELL
        for process in self._processes:
            process.join(timeout=max(0.0, deadline - time.monotonic()))


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Ignore SIGINT for a moment: a process started meanwhile ignores it for good."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
