"""`shared_queue`: the queue for a loop of one's own, with a thread that claims and loads ahead.

A thin shell: it checks what the user gave, finds the entered session of the same learner id or makes one, and lets a
`Feed` do the work between entering and leaving the block.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Self

from shardqueue.entered import find_session, warn_of_another_session
from shardqueue.errors import ClosedError, InvalidInputError, PassFinishedError
from shardqueue.feed import Feed
from shardqueue.guard import check_log_pause, check_reclaim_after, log_pause
from shardqueue.host import Place
from shardqueue.learner import LOG_EVERY, learner_label
from shardqueue.loading import check_load
from shardqueue.mailbox import open_mailbox
from shardqueue.plan import Plan, check_identifier
from shardqueue.session import Session
from shardqueue.units import Step, check_int

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import TracebackType

    from shardqueue.farewell import Returned
    from shardqueue.loading import Load
    from shardqueue.mailbox import Mailbox


class SharedQueue:
    """What `shared_queue` returns: a context manager, iterated once inside its block.

    Attributes:
        returned: after leaving, the claims that were not trained whole.
    """

    def __init__(
        self,
        units: Mapping[str, object],
        mailbox: str | os.PathLike[str] | Mailbox,
        learner_id: str | None,
        load: Load,
        prefetch: int,
        run: str | None,
        reclaim_after: float | None,
    ) -> None:
        check_load(load)
        self._reclaim_after = check_reclaim_after(reclaim_after)
        check_int("prefetch", prefetch, 1, 2**20)
        if run is not None:
            check_identifier(run, "run", folders=False)
        self._plan = Plan(units)
        self._learner_id = learner_label(learner_id)
        self._mailbox, self._load, self._prefetch, self._run = mailbox, load, prefetch, run
        self._feed: Feed | None = None
        self._own: Session | None = None
        self._pid = os.getpid()

    @property
    def returned(self) -> tuple[Returned, ...]:
        """After leaving: the claims that were not trained whole."""
        return () if self._feed is None else self._feed.returned

    def __enter__(self) -> Self:
        if self._pid != os.getpid():
            raise ClosedError(
                f"this queue was made in process {self._pid}; call shared_queue in each process"
            )
        if self._feed is not None:
            raise ClosedError("this queue was entered before; call shared_queue(...) again")
        session = find_session(self._learner_id, own=False)
        if session is None:
            session = self._own = self._own_session()
        elif self._mailbox != session.source and open_mailbox(self._mailbox) != session.mailbox:
            remedy = "give the queue and the session the same mailbox, or different learner ids"
            bound = f"the mailbox of the entered session of {self._learner_id!r}"
            raise InvalidInputError("mailbox", self._mailbox, bound, remedy)
        check_log_pause(session.log_every, self._reclaim_after)
        place = Place(reclaim_after=self._reclaim_after)
        self._feed = Feed(self._plan, session, self._load, self._prefetch, self._run, place)
        try:
            self._feed.start()
        except BaseException as error:
            if self._own is not None:
                self._own.__exit__(type(error), error, None)
            raise
        return self

    def _own_session(self) -> Session:
        mailbox = open_mailbox(self._mailbox)
        warn_of_another_session(self._learner_id)
        older = find_session(self._learner_id, own=True)
        if older is not None and older.mailbox == mailbox:
            older.replace()
        pause = log_pause(LOG_EVERY, self._reclaim_after)
        return Session(mailbox, self._learner_id, log_every=pause, _own=True).__enter__()

    def __iter__(self) -> Iterator[tuple[Step, Any]]:
        if self._feed is not None and self._feed.over:
            raise PassFinishedError(
                f"learner {self._learner_id!r} has already iterated this plan to its end; "
                'use another mailbox prefix, or run="a-name", to train it again'
            )
        return self

    def __next__(self) -> tuple[Step, Any]:
        if self._feed is None:
            raise ClosedError("enter the queue first: `with shared_queue(...) as queue:`")
        if self._pid != os.getpid():
            raise ClosedError(f"this queue belongs to process {self._pid}; call shared_queue in each process")
        return self._feed.take()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._feed is None or self._pid != os.getpid():
            return
        try:
            self._feed.close(failed=error is not None)
        finally:
            if self._own is not None:
                self._own.__exit__(kind, error, trace)


def shared_queue(
    units: Mapping[str, object],
    mailbox: str | os.PathLike[str] | Mailbox,
    learner_id: str | None,
    load: Load,
    prefetch: int = 8,
    run: str | None = None,
    reclaim_after: float | None = None,
) -> SharedQueue:
    """Claim units of a plan and load them ahead of the consumer.

    Every learner that iterates the same plan over the same mailbox gets the units nobody else has claimed; together
    they get each batch once. Batches come in the order of `load` within a unit.

        with shared_queue(units, "s3://bucket/prefix", "node-a", load) as queue:
            for step, batch in queue:
                ...

    Coming back for the next batch makes the last one trained, unless a `Session` of the same learner id is entered:
    then its `step()` does.

    Args:
        units: the plan, a mapping from identifier to what `load` is given. Its order is this learner's preference.
        mailbox: a path, a URL, a `Mailbox` or any object with its verbs.
        learner_id: a label for this process; None for host, rank and pid.
        load: called with a unit's value on a background thread, yields `(step, batch)`: an int and anything.
        prefetch: at most so many loaded batches wait, 1 or more.
        run: a name, to join that run whatever its state; by default the newest run is joined if it is running, and
            the next opened if it broke off.
        reclaim_after: seconds, from 1: the queue ends when every batch is trained, and what a learner holds that was
            silent for so long (its log did not change) is handed out again, each batch at least once. The same for
            all learners of a run. None: what a dead learner held is lost, each batch at most once.

    Returns:
        A context manager that iterates `(step, batch)`, the step an int that knows its unit (`Step`).

    Raises:
        InvalidInputError: an argument is out of range or grammar.
        MailboxError: the mailbox cannot be opened, or (while iterating) stopped answering.
        RunFinishedError, PlanMismatchError: while iterating, when the run cannot be joined.
    """
    return SharedQueue(units, mailbox, learner_id, load, prefetch, run, reclaim_after)
