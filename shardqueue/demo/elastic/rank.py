"""One rank: a process that trains both phases. What it needs of Lightning is imported when it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardqueue.demo.service import serve

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from torch import Tensor

    from shardqueue.demo.elastic.options import ElasticOptions
    from shardqueue.demo.service import Train

PRELOADED = "shardqueue.demo.elastic.training"
"""What takes seconds to import."""


@dataclass(frozen=True, slots=True)
class Shared:
    """Of all ranks.

    Attributes:
        done: micro-batches trained by rank, in memory that all see.
        port: of the store on loopback, where the ranks meet.
    """

    done: Tensor
    port: int


def main(number: int, options: ElasticOptions, shared: Shared, pipe: Connection) -> None:
    """Be rank `number` until the pipe ends."""

    def begin() -> Train:
        from shardqueue.demo.elastic.training import Rank

        return Rank(number, options, shared).train

    serve(pipe, begin)
