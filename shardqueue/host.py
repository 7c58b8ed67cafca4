"""Whom a feed works for, and where it stands among the feeds of its learner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardqueue.allowance import Allowance
    from shardqueue.claim import Claim
    from shardqueue.clock import Clock
    from shardqueue.mailbox import Mailbox
    from shardqueue.run import Joined
    from shardqueue.source import Source
    from shardqueue.state import State
    from shardqueue.units import Step


class Host(Protocol):
    """Whom a feed reports to, and in whose name it works: a session, or the worker of a loader.

    Attributes:
        farewell: seconds for which leaving tries to settle things with the mailbox.
        patrol: seconds between two looks at `over`; None where it never changes by itself.
    """

    mailbox: Mailbox
    clock: Clock
    learner_id: str
    instance: str
    joined: Joined | None
    farewell: float
    patrol: float | None

    @property
    def loudness(self) -> int:
        """Level of the log message about what is left untrained."""
        ...

    @property
    def start(self) -> State | None:
        """The state that the learner goes on from, if one was loaded."""
        ...

    @property
    def run(self) -> str | None:
        """Name of the run, once it is agreed on."""
        ...

    @property
    def counts_coming_back(self) -> bool:
        """Whether what the consumer holds may be trained already, though nobody said so."""
        ...

    def admit(self, source: Source, key: str) -> None:
        """A feed begins on a seat (see `learner.seat`)."""
        ...

    def attach(self, joined: Joined, logged: Callable[[], None]) -> bool:
        """The run is agreed on. Return whether the log is written already; if not, `logged` is called later."""
        ...

    def asked(self, pass_: str, claim: Claim) -> None:
        """An attempt at a unit is about to be asked for."""
        ...

    def lost(self, pass_: str, claim: Claim) -> None:
        """An attempt that was asked for is somebody else's."""
        ...

    def claimed(self, pass_: str, claim: Claim) -> None:
        """An attempt at a unit is ours."""
        ...

    def allowance(self, key: str) -> Allowance:
        """How many batches the feed on this seat may take, as of now."""
        ...

    def cut(self, pass_: str, claim: Claim) -> None:
        """An attempt of ours ends before its unit, at `claim.end`."""
        ...

    def given(self, pass_: str, claim: Claim) -> None:
        """What is behind that end can be taken by others."""
        ...

    def sized(self, pass_: str, claim: Claim) -> None:
        """The loader gave the whole unit: its size is known."""
        ...

    def released(self, pass_: str, claim: Claim, whole_at: int | None = None) -> None:
        """An attempt is over: given back, or trained up to the unit's end, its batch `whole_at`."""
        ...

    @property
    def late(self) -> bool:
        """Whether our log is so old that others may soon take us for silent: then nothing is claimed."""
        ...

    def still_ours(self, step: Step) -> bool:
        """Whether a batch that is about to be handed out is still ours; may read the mailbox."""
        ...

    def reclaimed(self, attempts: int) -> None:
        """We ended so many attempts of silent learners."""
        ...

    def waits(self) -> None:
        """Nothing is left to claim; from now on others wait for what our log says."""
        ...

    def handed(self, step: Step, waited: float) -> None:
        """A batch went to the consumer, who had waited for it."""
        ...

    def came_back(self) -> None:
        """The consumer asks for the next batch."""
        ...

    def settle(self, failed: bool, ended: bool) -> None:
        """The feed is being left, at its end or before."""
        ...

    def in_hand(self, key: str) -> list[Step]:
        """Batches of a seat that are with the consumer and not known to be trained."""
        ...

    def taken(self) -> tuple[int, int, float, float] | None:
        """Behind a loader, once known: batches handed to it, those of them the loop took, when it took its last of
        all, and its seconds a batch.
        """
        ...

    def over(self) -> str:
        """Why the feed must end though its consumer has not left it; "" while it need not."""
        ...

    def quiet(self, ended: bool, yielded: bool, promised: int) -> None:
        """The feed claims no more.

        `ended`: nothing is left to claim; `yielded`: another part claims what is left; `promised`: batches of our
        allowance that its claims count for.
        """
        ...

    def dismiss(self, source: Source, key: str, ended: bool) -> None:
        """The feed is over; `ended` because nothing was left to claim."""
        ...


@dataclass(frozen=True, slots=True)
class Place:
    """Where a feed stands among those of its learner.

    Attributes:
        pass_: name of the pass.
        worker: the process, "main" or a loader worker's number.
        part: which part of the learner's claiming it does, from 0.
        parts: how many there are.
        inline: the consumer loads for itself.
        offers: it offers to others what was not trained when it is left.
        fresh: nothing was claimed in the pass when the host last looked.
        waits: where nothing is left to claim, it looks again for what is given back, instead of ending.
        stage: of the dataset.
        reclaim_after: seconds of silence after which the run hands out a learner's units again; None for never. Where
            nothing is left to claim, who is not `inline` waits until all is trained, and ends what the silent hold.
    """

    pass_: str = ""
    worker: str = "main"
    part: int = 0
    parts: int = 1
    inline: bool = False
    offers: bool = True
    fresh: bool = False
    waits: bool = False
    stage: str = ""
    reclaim_after: float | None = None


MAIN = Place()
"""The first pass of training, in the training process, alone."""
