"""A training process's stay in a run, under a Trainer."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING

from shardqueue.agreement import Ranks, world
from shardqueue.lightning.leftovers import Leftovers
from shardqueue.lockstep import Lockstep
from shardqueue.session import Session

if TYPE_CHECKING:
    from shardqueue.mailbox import Mailbox


class Stay:
    """A training process's stay in one run: from the first batch to the Trainer's end, or its error.

    Attributes:
        trial: why the run is deleted afterwards, so that it has a name of its own; "" for one that stays.
        marks: coming back for the next batch makes the last one trained, for want of a callback that says so.
        pending: samples of the batch that coming back would make trained.
        calm: what is switched off in the model until an evaluation is over. That is when training goes on: Lightning
            may fetch a batch ahead, so the last step comes after the loader's end.
    """

    def __init__(self, mailbox: Mailbox, learner_id: str, trial: str, marks: bool) -> None:
        self.trial, self.marks = trial, marks
        self.name = f"{trial}-{os.urandom(6).hex()}" if trial else None
        self.pending: int | None = None
        self.calm = ExitStack()
        self.session = Session(mailbox, learner_id)
        self._ranks = Ranks(world())
        self.lockstep = self.session.lockstep = Lockstep(self.session, self._ranks, closes=False)
        self._leftovers = Leftovers(mailbox)
        self._validated: list[str] = []
        self.session.leave_it_to_step()
        self.session.__enter__()

    def settle(self) -> None:
        """The Trainer asks for another batch: it is done with the last one."""
        if self.pending is not None:
            samples, self.pending = self.pending, None
            self.session.step(samples=samples)

    def validate(self, pass_: str) -> None:
        """A validation begins; what is left over of those before, whose loops all ranks have left, is deleted."""
        self.session.unbook(pass_)
        self._remove_validated()
        self._validated.append(pass_)

    def _remove_validated(self) -> None:
        if self._ranks.rank == 0 and self.session.joined is not None:
            for pass_ in self._validated:
                self._leftovers.remove(self.session.joined.keys.pass_keys(pass_).folder)
        self._validated = []

    def leave(self, error: BaseException | None) -> None:
        """Give back what was not trained, and delete what nobody needs."""
        self.calm.close()
        if error is None:
            self.settle()
            self.session.__exit__(None, None, None)
            self._ranks.gather({})  # so that nobody writes any more
            if self.trial and self._ranks.rank == 0 and self.session.joined is not None:
                self._leftovers.remove_run(self.session.joined.keys)
            self._remove_validated()
            self._ranks.close()
        else:
            self.session.__exit__(type(error), error, error.__traceback__)
        self._leftovers.close()
