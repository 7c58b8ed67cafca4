"""Ray Data's `streaming_split` (`ray[data]`): one dataset, a stream of its blocks for each consumer.

Every unit is a block of one row. Before anything is timed the blocks are in the object store, which is bounded, and
the consumers, which are actors, are up. Even then the streams take seconds to get going, so the clock starts at the
first unit that any of them had; the row says what came before.

The cluster is local and of this process, lives in a folder of its own, and is gone when the process ends.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import ray.data

from benchmarks.peers.work import Outcome, Stay, Work, consume, gather, serve

if TYPE_CHECKING:
    from collections.abc import Iterator

STORE_BYTES = 200 * 2**20
"""Of the object store."""
LOGICAL_CPUS = 8
"""So that Ray's own tasks never wait for one; the consumers ask for none."""


class Consumer:
    """An actor that trains what its stream gives it."""

    def train(self, work: Work, consumer: int, stream: Any) -> Stay:
        """Train everything."""
        return consume(work, consumer, _units(work, stream))

    def ready(self) -> None:
        """Return when the actor is up."""


def _units(work: Work, stream: Any) -> Iterator[int]:
    for batch in stream.iter_batches(batch_size=1, prefetch_batches=work.prefetch):
        yield int(batch["id"][0])


def measure(work: Work) -> Outcome:
    """Let consumers in actors train the units."""
    actor = ray.remote(num_cpus=0)(Consumer)
    consumers = [actor.remote() for _ in work.speeds]
    ray.get([each.ready.remote() for each in consumers])
    blocks = ray.data.range(work.units, override_num_blocks=work.units).materialize()
    streams = blocks.streaming_split(len(consumers), equal=False)
    trained = [
        each.train.remote(work, consumer, stream)
        for consumer, (each, stream) in enumerate(zip(consumers, streams, strict=True))
    ]
    stays = ray.get(trained)
    for each in consumers:
        ray.kill(each)
    return gather(work, stays, from_first=True)


def main() -> None:
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])  # of the actors
    ray.init(
        address="local",
        num_cpus=LOGICAL_CPUS,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=STORE_BYTES,
        _temp_dir=os.environ["TMPDIR"],
    )
    logging.getLogger("ray.data").setLevel(logging.ERROR)  # which importing it sets
    try:
        serve(importlib.metadata.version("ray"), measure)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
