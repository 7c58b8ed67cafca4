"""What a learner trained, in its run and before it: what its state is made of.

The log's spans are taken in as they are completed, so that a state costs no more at the end of a long run than at its
beginning.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardqueue.account import Account
from shardqueue.state import State
from shardqueue.trained import Trained

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardqueue.plan import Plan
    from shardqueue.records import TrainedSpan
    from shardqueue.run import Joined


@dataclass(slots=True)
class History:
    """What one learner trained. Not thread-safe: its owner locks.

    Attributes:
        loaded: the state that it goes on from, as it was loaded.
        plan: the training plan, also what of it was trained before the run.
        joined: the run.
        over: passes that ranks which step together came to the end of.
        global_step: the optimizer's, where the loop counts it.
    """

    loaded: State | None = None
    plan: Plan | None = None
    joined: Joined | None = None
    over: set[str] = field(default_factory=set)
    global_step: int | None = None
    _account: Account | None = None

    def keep(self, span: TrainedSpan) -> None:
        """A span of the log is complete."""
        if self.plan is not None and self.joined is not None:
            self._account = self._account or Account(self.plan, self.joined.start)
            self._account.add(span)

    def state(self, growing: Iterable[TrainedSpan], samples: int, writer: tuple[str, str]) -> State:
        """What the run began from, what was loaded beside it, and what this learner trained.

        Args:
            growing: spans of the log that are not complete.
            samples: trained by this learner.
            writer: the learner, and its instance.
        """
        joined, plan = self.joined, self.plan
        if joined is None or plan is None:
            return self.loaded or (None if joined is None else joined.start) or State()
        own = Account(plan, joined.start)
        if self._account is not None:
            own.passes = {name: trained.copy() for name, trained in self._account.passes.items()}
        for span in growing:
            own.add(span)
        start = joined.start
        before = State.union([] if start is None else [start])
        passes = before.passes
        if self.loaded is not None and self.loaded.run_id == joined.manifest.run_id:
            before = self.loaded
            for name, trained in before.passes.items():
                passes.setdefault(name, Trained()).update(trained)
        for trained in passes.values():
            trained.before = trained.batches
        own.onto(passes)
        for name in self.over:
            passes.setdefault(name, Trained()).over = True
        return State(
            plan=plan.signature(),
            run=joined.keys.run,
            run_id=joined.manifest.run_id,
            passes=passes,
            global_step=before.global_step if self.global_step is None else self.global_step,
            samples=before.samples + samples,
            writers=[writer],
            origins=[] if start is None else [*start.origins, start.run_id],
        )
