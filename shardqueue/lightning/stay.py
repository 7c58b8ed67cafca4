"""A training process's stay in a run, under a Trainer."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

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
        marks: samples are counted here, for want of a callback that does.
        calm: what is switched off in the model until an evaluation is over. That is when training goes on: Lightning
            may fetch a batch ahead, so the last step comes after the loader's end.
    """

    trial: str
    marks: bool
    lockstep: Lockstep

    def __init__(
        self, mailbox: Mailbox, learner_id: str, trial: str, marks: bool, start: dict[str, Any]
    ) -> None:
        self.trial, self.marks = trial, marks
        self.name: str | None = f"{trial}-{os.urandom(6).hex()}" if trial else None
        self._handed, self._samples = False, 0
        self._optimized: int | None = None
        self.calm: ExitStack[bool | None] = ExitStack()
        self.session: Session = Session(mailbox, learner_id)
        self._ranks = Ranks(world())
        self.lockstep = self.session.lockstep = Lockstep(self.session, self._ranks, closes=False)
        self._leftovers = Leftovers(mailbox)
        self._validated: list[str] = []
        self.session.leave_it_to_step()
        if start:
            self.session.load_state_dict(start)
        self.session.__enter__()

    def hand(self, samples: int) -> None:
        """The Trainer is given a batch."""
        self._handed, self._samples = True, self._samples + samples

    def settle(self, global_step: int | None) -> None:
        """The Trainer is done with what it was given, unless an optimizer step that would have used it is to come."""
        if global_step is not None and global_step == self._optimized:
            return
        self._optimized = global_step
        if self._handed:
            samples, self._handed, self._samples = self._samples, False, 0
            self.session.step(samples, global_step=global_step)

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
            self.session.__exit__(None, None, None)
            self._ranks.gather({})  # so that nobody writes any more
            if self.trial and self._ranks.rank == 0 and self.session.joined is not None:
                self._leftovers.remove_run(self.session.joined.keys)
            self._remove_validated()
            self._ranks.close()
        else:
            self.session.__exit__(type(error), error, error.__traceback__)
        self._leftovers.close()
