"""Consumers as processes that are up before their common start, for sides in this Python."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

from benchmarks.peers.work import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.peers.work import Stay, Work

    Consumer = Callable[[Work, int, str], tuple[Stay, int]]


def in_processes(work: Work, consumer: Consumer, folder: str) -> tuple[list[Stay], int]:
    """Call `consumer(work, number, folder)` in a process each; their stays, and their calls to a store together."""
    context, size = get_context("spawn"), len(work.speeds)
    barrier = context.Barrier(size)
    with ProcessPoolExecutor(size, context, _keep, (barrier,)) as pool:
        running = [pool.submit(_together, consumer, work, number, folder) for number in range(size)]
        ended = [each.result() for each in running]
    return [stay for stay, _ in ended], sum(calls for _, calls in ended)


_barrier: Any = None


def _keep(barrier: Any) -> None:
    global _barrier
    _barrier = barrier


def _together(consumer: Consumer, work: Work, number: int, folder: str) -> tuple[Stay, int]:
    _barrier.wait(PATIENCE)
    return consumer(work, number, folder)
