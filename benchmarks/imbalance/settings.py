"""What the imbalance benchmark is asked to do, and how large its model and batches are; without torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardqueue.demo.options import shown_speed
from shardqueue.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LEAST_SECONDS, MOST_MEMORY, MOST_SAMPLES = 0.02, 0.4, 4096
"""Of a micro-batch on a GPU: what the fastest takes at least, and how much it fills of the smallest at most."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The model and its micro-batches.

    Attributes:
        length: tokens of a sequence, which is a sample.
        width: features of a token.
        layers: blocks of attention and perceptron.
        vocabulary: tokens that the model knows.
        batch_size: samples of a micro-batch; 0 for as many as keep the devices busy.
        heads: of attention.
    """

    length: int
    width: int
    layers: int
    vocabulary: int
    batch_size: int = 0
    heads: int = 4


SMALL = Sizes(length=16, width=32, layers=1, vocabulary=256, batch_size=8)
"""For CPUs: a few milliseconds."""
LARGE = Sizes(length=256, width=768, layers=6, vocabulary=4096, heads=12)
"""For GPUs: 49 million parameters."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What is asked for.

    Attributes:
        regimes: which, in this order.
        steps: optimizer steps of all ranks together.
        per_rank: micro-batches of a step, for each rank.
        speeds: one a rank, at most 1, relative to its device; empty for GPUs as they are and CPUs as `paces` says.
        milliseconds: that a micro-batch takes a CPU of speed 1.
        batch_size, length, width, layers: see `Sizes`; 0 for what suits the devices.
        mailbox: a folder or a bucket that all ranks reach; "" for a temporary folder.
        cpu: leave GPUs alone.
    """

    regimes: tuple[str, ...]
    steps: int
    per_rank: int
    speeds: tuple[float, ...] = ()
    milliseconds: float = 20.0
    batch_size: int = 0
    length: int = 0
    width: int = 0
    layers: int = 0
    mailbox: str = ""
    cpu: bool = False

    def sizes(self, large: bool) -> Sizes:
        """The model's."""
        own = {name: getattr(self, name) for name in ("batch_size", "length", "width", "layers")}
        return replace(LARGE if large else SMALL, **{name: value for name, value in own.items() if value})


def paces(ranks: int) -> tuple[float, ...]:
    """Speeds of so many CPU ranks that are to be unequal: the first 1, the last 1/4, those between 1/2."""
    return (1.0, *[0.5] * (ranks - 2), 0.25)[:ranks]


def check_speeds(speeds: Sequence[float], ranks: int) -> None:
    """Refuse speeds for another number of ranks.

    Raises:
        InvalidInputError: there is not one for each.
    """
    if speeds and len(speeds) != ranks:
        shown = ",".join(map(shown_speed, speeds))
        raise InvalidInputError("speeds", shown, f"{ranks} numbers, one a rank", "pass one for each rank")


def fitting_batch_size(attempt: Callable[[int], list[tuple[float, float]]]) -> int:
    """As many samples, a power of two, as keep the fastest GPU busy and leave room on the smallest.

    Args:
        attempt: from a batch size to each rank's seconds of a micro-batch, and the part of its memory that it took;
            more than 1 where it did not fit.

    Raises:
        InvalidInputError: the smallest does not fit.
    """
    size = 4
    while size <= MOST_SAMPLES:
        told = attempt(size)
        fullest = max(part for _, part in told)
        if fullest > 1:
            if size == 4:
                remedy = "pass a smaller --width, --layers or --length"
                raise InvalidInputError("batch_size", size, "what fits into the smallest GPU", remedy)
            return size // 2
        if fullest > MOST_MEMORY or min(seconds for seconds, _ in told) >= LEAST_SECONDS:
            return size
        size *= 2
    return MOST_SAMPLES
