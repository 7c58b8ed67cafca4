"""What became of each process of a run, and of its learners in each pass. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from shardqueue.timeline.chart import Tail
from shardqueue.timeline.lanes import shown_pass

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from shardqueue.records import LogPage
    from shardqueue.timeline.lanes import Folded


@dataclass(slots=True)
class Traced:
    """A process: the newest page of its log, and what all of it came to. Times are wall-clock seconds.

    Attributes:
        page: the newest.
        folded: what the log came to.
        gone: it is there no more, and did not say that it left.
    """

    page: LogPage
    folded: Folded
    gone: bool = False

    @property
    def owner(self) -> tuple[str, str]:
        """(learner, instance)."""
        return self.page.learner, self.page.instance

    @property
    def untracked(self) -> bool:
        """Whether it is a worker of a loader that no session tracks: only such a one logs by itself."""
        return self.page.process != "main" and not self.folded.extents

    @property
    def finished(self) -> float | None:
        """When it trained its last batch of the passes that are meant."""
        return max((bar.stop for bar in self.folded.bars), default=None)

    @property
    def last(self) -> float:
        """When something was known of it last."""
        stops = [extent.stop for extent in self.folded.extents.values()]
        return max([self.folded.since if self.folded.seen is None else self.folded.seen, *stops])

    @property
    def parted(self) -> float | None:
        """When it was there no more, although there may have been something to do."""
        return self.last if self.gone or self.page.left in ("early", "error") else None


def tails(processes: Sequence[Traced], whole: Collection[str], wanted: Collection[str]) -> Iterator[Tail]:
    """The tails of those passes that came to their end and in which several learners trained.

    Args:
        processes: all of them.
        whole: passes of which somebody noted that every unit is trained.
        wanted: the passes that are meant, as keys call them; all where it is empty.

    Returns:
        In the order in which the passes began; times are wall-clock seconds.
    """
    learners: dict[tuple[str, str], list[Traced]] = {}
    for one in processes:
        learners.setdefault(one.owner, []).append(one)
    trainers = [_Trainer.of(together) for together in learners.values()]
    starts = sorted(
        (extent.start, name)
        for one in processes
        for name, extent in one.folded.extents.items()
        if not wanted or name in wanted
    )
    for name in dict.fromkeys(name for _, name in starts):
        found = _tail(name, [one for one in trainers if name in one.extents], name in whole)
        if found is not None:
            yield found


@dataclass(frozen=True, slots=True)
class _Trainer:
    """A learner, all its processes together.

    Attributes:
        extents: by pass, when it began and when it trained its last batch.
        parted: it was there no more, although there may have been something to do.
        ended: there was nothing left to do.
    """

    extents: dict[str, tuple[float, float]]
    parted: bool
    ended: bool

    @classmethod
    def of(cls, processes: Sequence[Traced]) -> Self:
        extents: dict[str, tuple[float, float]] = {}
        for one in processes:
            for name, extent in one.folded.extents.items():
                start, stop = extents.get(name, (extent.start, extent.stop))
                extents[name] = min(start, extent.start), max(stop, extent.stop)
        ended = all(one.page.left == "end" for one in processes)
        return cls(extents, any(one.parted is not None for one in processes), ended)

    def stop(self, name: str) -> float:
        """When it trained its last batch of a pass."""
        return self.extents[name][1]

    def goes_on(self, name: str) -> float | None:
        """When it began with another pass after its last batch of this one; None if it did not."""
        return min((start for start, _ in self.extents.values() if start >= self.stop(name)), default=None)


def _tail(name: str, trainers: Sequence[_Trainer], whole: bool) -> Tail | None:
    later = [one.goes_on(name) for one in trainers]
    stayed = [
        (one, again)
        for one, again in zip(trainers, later, strict=True)
        if again is not None or not one.parted
    ]
    over = whole or all(one.ended or again is not None for one, again in stayed)
    if len(trainers) < 2 or not stayed or not over:
        return None
    stop = max(one.stop(name) for one in trainers)
    untils = [(one.stop(name), stop if again is None else min(stop, again)) for one, again in stayed]
    idle = sum(max(0.0, until - last) for last, until in untils)
    return Tail(shown_pass(name), min(last for last, _ in untils), stop, idle)
