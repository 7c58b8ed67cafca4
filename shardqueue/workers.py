"""A loader worker, as the feed in it sees it: in whose name it claims, and to whom it tells what.

A tracked iteration belongs to a session in the training process: the run is agreed on before, claims are told through
the pipe, and the training process alone keeps the log, knows what is trained and gives back the rest. In any other
iteration a worker is on its own: it finds the run, keeps a log of its claims, and gives back what it did not hand out
when it is left. What it did hand out is with the loader, and nobody says whether it was trained; so it is not offered
to others. Every batch at most once, either way.
"""

from __future__ import annotations

import logging
import multiprocessing
import threading
from collections import deque
from typing import TYPE_CHECKING

from shardqueue.allowance import UNLIMITED
from shardqueue.block import Doing, Message, Told, pass_of
from shardqueue.claim import State
from shardqueue.clock import SystemClock
from shardqueue.errors import ClosedError, PassFinishedError, RunError
from shardqueue.learner import LOG_EVERY, Book, training_process
from shardqueue.logwriter import LogWriter
from shardqueue.records import pass_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardqueue.allowance import Allowance
    from shardqueue.block import Block, Pipe
    from shardqueue.claim import Claim
    from shardqueue.clock import Clock
    from shardqueue.mailbox import Mailbox
    from shardqueue.records import LogPage
    from shardqueue.run import Joined
    from shardqueue.source import Source
    from shardqueue.state import State as RunState
    from shardqueue.units import Step

logger = logging.getLogger("shardqueue")

FAREWELL = 4.0
"""Seconds for which a worker tries to leave in order: less than a loader gives it before it is terminated."""
SUPERSEDED = (
    "another iteration of this dataset has begun, and took over from this one; "
    "give each loader a SharedQueueDataset of its own"
)
LEFT = (
    "the loop for which session.track made this iteration was left, or begun anew; give track the loader itself, "
    "not enumerate(loader), map(..., loader) or iter(loader)"
)
PATROL = 0.1
"""Seconds between two looks at the block; a fifth of it where the loop's pace is to be read there."""


def finished_pass(learner_id: str, number: int) -> PassFinishedError:
    """Return the error of who iterates a finished pass again."""
    return PassFinishedError(
        f"learner {learner_id!r} has already iterated epoch {number} to its end; "
        "call dataset.set_epoch(...) with another number before each epoch, or never"
    )


class LoaderWorker:
    """What worker `number` does in one iteration. See `feed.Host` for the methods.

    Args:
        block, pipe: shared with the training process.
        mailbox: opened in this process.
        learner_id: the training process's.
        number, count: which worker, from 0, and how many there are.
        key: of the iteration.
        stage: of the dataset.
        reclaim_after: of the run.

    Raises:
        PassFinishedError: the pass was iterated to its end before.
        ClosedError: another iteration has begun since.
    """

    def __init__(
        self,
        block: Block,
        pipe: Pipe,
        mailbox: Mailbox,
        learner_id: str,
        number: int,
        count: int,
        key: int,
        stage: str,
        reclaim_after: float | None = None,
    ) -> None:
        self.mailbox, self.learner_id, self.instance = mailbox, learner_id, block.instance
        self.clock: Clock = SystemClock()
        self.joined: Joined | None = None
        self.start: RunState | None = None
        self.farewell: float = FAREWELL
        self._block, self._pipe, self._number, self._count = block, pipe, number, count
        self._stage, self._reclaim_after = stage, reclaim_after
        self.word, self.tracked = block.join(number, key)
        self.patrol: float | None = PATROL / 5 if self.tracked else PATROL
        if block.is_over(self.word) and not self.left:
            raise ClosedError(SUPERSEDED)
        self._source: Source | None = None
        self._doing = Doing.CLAIMING
        self._unsent: deque[Message] = deque()
        self._sending = threading.Lock()
        self._yielded: list[Step] = []
        self._handed = 0
        self._book = Book(
            learner_id, self.instance, str(number), training_process(), first_page=block.page(number)
        )
        self._book.rests = True
        self._writer: LogWriter | None = None
        if block.finished_before(self.word):
            block.note(number, self.word, Doing.STOPPED)
            raise finished_pass(learner_id, pass_of(self.word))

    @property
    def pass_(self) -> str:
        """Name of the pass."""
        return pass_name(pass_of(self.word), self._stage)

    @property
    def run(self) -> str | None:
        """Name of the run, once it is agreed on."""
        return None if self.joined is None else self.joined.keys.run

    @property
    def left(self) -> bool:
        """Whether the training loop of this iteration was left, so that nobody waits for a batch."""
        return self._block.was_left(self.word)

    # -- for the feed ------------------------------------------------------------------------------------

    counts_coming_back = True
    loudness: int = logging.WARNING

    def admit(self, source: Source, key: str) -> None:  # noqa: ARG002
        """A feed begins."""
        self._source = source

    def attach(self, joined: Joined, logged: Callable[[], None]) -> bool:
        """The run is agreed on."""
        self.joined = joined
        if self.tracked:
            return True
        self._same_run(joined)
        self._book.run_id = joined.manifest.run_id
        self._writer = LogWriter(self, self.mailbox, joined.keys, LOG_EVERY, self.clock)
        return self._writer.start(logged)

    def _same_run(self, joined: Joined) -> None:
        known = self._block.run
        if known is not None and joined.keys.run != known:
            raise RunError(
                f"worker {self._number} found run {joined.keys.run}, another worker of this loader run {known}; "
                "start again"
            )
        self._block.run = joined.keys.run

    def asked(self, pass_: str, claim: Claim) -> None:  # noqa: ARG002
        """An attempt at a unit is about to be asked for: told before, so that it is known if we are killed."""
        self._tell(Told.ASKED, claim, claim.begin)

    def lost(self, pass_: str, claim: Claim) -> None:  # noqa: ARG002
        """An attempt that was asked for is somebody else's."""
        self._tell(Told.LOST, claim, 0)

    def claimed(self, pass_: str, claim: Claim) -> None:
        """An attempt at a unit is ours."""
        self._book.claim((pass_, claim.identifier, claim.attempt))
        self._tell(Told.CLAIMED, claim, claim.begin)
        if claim.loaded:
            self._tell(Told.SIZED, claim, int(claim.size))

    def allowance(self, key: str) -> Allowance:  # noqa: ARG002
        """How many batches this worker may take, as of now."""
        return self._block.allowed(self.word, self._number, self._count) if self.tracked else UNLIMITED

    @property
    def late(self) -> bool:
        """Whether the learner's log is so old that others may soon take it for silent."""
        landed = self._block.landed if self.tracked and self._reclaim_after is not None else None
        return landed is not None and self.clock.monotonic() - landed > (self._reclaim_after or 0.0) / 2

    def still_ours(self, step: Step) -> bool:  # noqa: ARG002
        """Whether a batch is still ours is asked where the loop takes it."""
        return True

    def reclaimed(self, attempts: int) -> None:
        """A worker ends nobody's attempts."""

    def waits(self) -> None:
        """A worker never waits for others."""

    def cut(self, pass_: str, claim: Claim) -> None:  # noqa: ARG002
        """An attempt of ours ends before its unit."""
        assert claim.end is not None
        self._tell(Told.CUT, claim, claim.end)

    def given(self, pass_: str, claim: Claim) -> None:  # noqa: ARG002
        """What is behind that end can be taken by others."""
        self._tell(Told.GIVEN, claim, 0)

    def sized(self, pass_: str, claim: Claim) -> None:  # noqa: ARG002
        """The loader gave the whole unit; of one that is not proven ours yet it is told then."""
        if claim.state is State.OURS:
            self._tell(Told.SIZED, claim, int(claim.size))

    def released(self, pass_: str, claim: Claim, whole_at: int | None = None) -> None:  # noqa: ARG002
        """All of an attempt was handed out, or given back."""
        self._book.release((pass_, claim.identifier, claim.attempt))
        done = claim.identifier, claim.attempt
        self._yielded = [step for step in self._yielded if (step.unit, step.attempt) != done]

    def handed(self, step: Step, waited: float) -> None:  # noqa: ARG002
        """A batch went to the loader: from here on it is never offered to anybody else by this worker."""
        self._handed += 1
        self._yielded.append(step)
        if self._source is not None:
            self._source.trained(step)

    def came_back(self) -> None:
        """The loader asks for the next batch; that says nothing of training."""

    def settle(self, failed: bool, ended: bool) -> None:
        """The feed is being left; nothing is decided here."""

    def in_hand(self, key: str) -> list[Step]:  # noqa: ARG002
        """Batches of unfinished claims that are with the loader, or beyond."""
        return list(self._yielded)

    def taken(self) -> tuple[int, int, float, float] | None:
        """What the loop took of ours, and how fast it is, where it is tracked."""
        taken = self._block.taken(self._number) if self.tracked else None
        return None if taken is None else (self._handed, *taken)

    def over(self) -> str:
        """Why the feed must end; also sends what had no room in the pipe."""
        self._send()
        if self._block.was_left(self.word):
            return LEFT
        if self._block.is_over(self.word):
            return SUPERSEDED
        parent = multiprocessing.parent_process()
        return "" if parent is None or parent.is_alive() else "the training process is gone"

    def quiet(self, ended: bool, yielded: bool, promised: int) -> None:
        """The feed claims no more."""
        while not self._send() and not self._block.is_over(self.word):
            threading.Event().wait(PATROL)
        self._block.promise(self._number, promised)
        self._doing = Doing.YIELDED if yielded else Doing.ENDED if ended else Doing.STOPPED
        self._block.note(self._number, self.word, self._doing)

    def dismiss(self, source: Source, key: str, ended: bool) -> None:  # noqa: ARG002
        """The feed is over."""
        self._book.left = "end" if ended and self._doing is Doing.ENDED else "early"
        if ended and not self.tracked:
            self._block.note(self._number, self.word, Doing.DONE)
            if {doing for _, _, doing in self._block.workers(self.word)} == {Doing.DONE}:
                self._block.finish(self.word)
        if self._writer is not None:
            self._writer.finish(self.clock.monotonic() + self.farewell)
            self._block.turn_to(self._number, self._book.next_page)

    # -- the log and the pipe ----------------------------------------------------------------------------

    def pages(self) -> list[LogPage]:
        """The log's pages that have to be written now."""
        return self._book.pages(self.clock.wall(), 0.0, 0.0)

    def wrote(self, page: LogPage, clear: bool) -> None:
        """The page was written, or it is not clear whether it was."""
        self._book.wrote(page, clear)

    def landed_after(self, gap: float) -> None:
        """Nobody hands out the units of a worker without a session again."""

    def _tell(self, told: Told, claim: Claim, value: int) -> None:
        if self.tracked:
            self._unsent.append(Message(self._number, self.word, told, claim.position, claim.attempt, value))
            self._send()

    def _send(self) -> bool:
        with self._sending:
            while self._unsent and self._pipe.send(self._unsent[0]):
                self._unsent.popleft()
            return not self._unsent
