"""A few training processes that stay up over many cases: importing torch once each is enough."""

from __future__ import annotations

import multiprocessing
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

PATIENCE = 120.0


class Fleet:
    """`size` processes that call what they are told to, all at once."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, there))
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    @property
    def pids(self) -> set[int]:
        return {process.pid for process in self._processes if process.pid is not None}

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `function(rank, *args)` in each process; return the results by rank."""
        for pipe in self._pipes:
            pipe.send((function, args))
        answers = []
        for pipe in self._pipes:
            assert pipe.poll(PATIENCE), f"{function.__name__} hangs"
            answers.append(pipe.recv())
        for done, answer in answers:
            assert done, answer
        return [answer for _, answer in answers]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(15)
            if process.is_alive():
                process.kill()
                process.join()


def _serve(rank: int, pipe: Connection) -> None:
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(rank, *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
