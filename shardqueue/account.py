"""What was trained in a run, in the terms of the whole plan.

A log speaks of what was left of a plan when its run began. Here its spans are put back in their places in the whole
plan, which is what a state says (see `state`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardqueue.records import pass_number
from shardqueue.trained import Trained, untrained

if TYPE_CHECKING:
    from shardqueue.plan import Plan
    from shardqueue.records import TrainedSpan
    from shardqueue.state import State


class Account:
    """Adds up spans of training passes; those of other passes are passed over.

    Args:
        plan: the units, also those trained before the run.
        start: the state that the run began from.

    Attributes:
        passes: what the spans say is trained, by name of the pass.
    """

    def __init__(self, plan: Plan, start: State | None) -> None:
        self.passes: dict[str, Trained] = {}
        self._plan, self._start = plan, start

    def add(self, span: TrainedSpan, end: int | None = None) -> None:
        """This was trained; `end`: only up to there."""
        end = span.end if end is None else end
        position = self._plan.find(span.unit)
        if position is None or pass_number(span.pass_) is None or end < span.begin:
            return
        before = None if self._start is None else self._start.passes.get(span.pass_)
        skipped = None if before is None else before.parts.get(position)
        whole = span.whole and end == span.end
        trained = self.passes.get(span.pass_)
        if trained is None:
            trained = self.passes[span.pass_] = Trained()
        if whole and skipped is None and not span.begin:
            trained.finish(position, end)
            return
        for first, last in untrained(skipped, span.begin, end):
            trained.add(position, first, last)
        if whole:
            trained.add(position, 0, 0, end + (0 if skipped is None else len(skipped)))

    def onto(self, passes: dict[str, Trained]) -> None:
        """Add it all to what was trained before."""
        for name, trained in self.passes.items():
            passes.setdefault(name, Trained()).update(trained)
