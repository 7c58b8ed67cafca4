"""Ranks that train one model together, whichever way they share out a step: in one run, and aware of each other.

Rank 0 opens the run and each rank finds it through its own mailbox; what all must have alike is compared then. A rank
that is gone is named from its log in the mailbox. A state is completed by what the others have logged.
"""

from __future__ import annotations

import json
import socket
import threading
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from shardqueue.errors import (
    AgreementError,
    ClosedError,
    InvalidInputError,
    PeerGoneError,
    RunError,
    ShardQueueError,
    ShardQueueWarning,
)
from shardqueue.gathering import Gathering
from shardqueue.learner import LOG_EVERY
from shardqueue.peers import Peer, Peers
from shardqueue.progress import Agreed, RankState
from shardqueue.records import Manifest, RunKeys
from shardqueue.run import Joined, check_manifest, check_state

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardqueue.agreement import Ranks, Row
    from shardqueue.dataset import SharedQueueDataset
    from shardqueue.peers import Gone
    from shardqueue.plan import Plan
    from shardqueue.session import Session
    from shardqueue.state import State
    from shardqueue.supply import Supply

NAMING = 15.0
"""Seconds for which a rank tries to tell who is gone, once the group is broken."""
NAMED = 8
"""Ranks that are named, at most."""
SHARING = 10.0
"""Seconds for which a run that rank 0 opened may take to be seen through another rank's mailbox."""
LOOK_AGAIN = 0.05
"""Seconds between two looks for it."""
SIGNS = ("gloo", "nccl", "connection closed by peer", "connection reset", "timed out")
"""What the message of a broken collective holds, where its type does not tell."""


class Assembly:
    """A training process's place among the ranks that train together.

    Args:
        session: entered; of this process.
        ranks: all of them.
        closes: with the session, the ranks' group is done with.

    Attributes:
        agreed: what is agreed on for the step whose batch was handed out last; None before the first.
        supplies: where the batches of each stage come from, by stage.
    """

    session: Session
    ranks: Ranks

    def __init__(self, session: Session, ranks: Ranks, closes: bool = True) -> None:
        self.session, self.ranks, self._closes = session, ranks, closes
        self.agreed: Agreed | None = None
        self.supplies: dict[str, Supply] = {}
        self._peers: Peers | None = None
        self._gathering: Gathering | None = None
        self._learners: list[str] = [session.learner_id]
        ranks.gone = self._name

    # -- agreeing on the run -----------------------------------------------------------------------------

    def open(self, plan: Plan, stage: str = "", run: str | None = None) -> None:
        """Be in one run together: rank 0 opens the next one, or the one named, and each finds it by its own mailbox.

        Raises:
            AgreementError: a rank does not see it.
            RunError, MailboxError: rank 0 could not open it.
        """
        session = self.session
        if session.log_every > LOG_EVERY and self.ranks.size > 1:
            bound = f"at most {LOG_EVERY:g} seconds where ranks step together: their logs show that they are alive"
            raise InvalidInputError("log_every", session.log_every, bound, "leave it out")
        joined, error = None, None
        if self.ranks.rank == 0:
            try:
                found = session.find_run(plan, run, stage=stage, fresh=run is None)
                joined = replace(found, together=True)
            except ShardQueueError as raised:
                error = raised
        told = self._tell(joined, error)
        if error is not None:
            raise error
        if told[0]["error"]:
            raise RunError(f"rank 0 could not open the run: {told[0]['error']}")
        unseen = ""
        if joined is None:
            joined, unseen = self._find(RunKeys(told[0]["run"]), told[0]["run_id"], plan, stage)
        for rank, seen in enumerate(self.ranks.gather({"error": unseen})):
            if seen["error"]:
                raise AgreementError(
                    f"run {told[0]['run']}, which rank 0 opened in {told[0]['place']}, is not what rank {rank} "
                    f"finds in {told[rank]['place']}: {seen['error']}; give all ranks one prefix, in a store or "
                    "folder that all of them reach"
                )
        assert joined is not None
        session.enter_run(joined)
        self._learners = [said["learner"] for said in told]
        peers = [
            Peer(rank, said["learner"], said["instance"], said["host"]) for rank, said in enumerate(told)
        ]
        others = [peer for peer in peers if peer.rank != self.ranks.rank]
        if others:
            self._peers = Peers(others, session.mailbox, joined.keys, session.clock)
            self._gathering = Gathering(others, session.mailbox, joined.keys, session.clock)

    def _tell(self, joined: Joined | None, error: ShardQueueError | None) -> list[dict[str, Any]]:
        session = self.session
        return self.ranks.gather(
            {
                "run": None if joined is None else joined.keys.run,
                "run_id": None if joined is None else joined.manifest.run_id,
                "error": "" if error is None else str(error),
                "learner": session.learner_id,
                "instance": session.instance,
                "host": socket.gethostname(),
                "place": repr(session.mailbox),
            }
        )

    def _find(self, keys: RunKeys, run_id: str, plan: Plan, stage: str) -> tuple[Joined | None, str]:
        """The run that rank 0 opened, as we see it; or why we do not."""
        by = self.session.clock.monotonic() + SHARING
        try:
            while (data := self.session.mailbox.get(keys.manifest)) is None:
                if self.session.clock.monotonic() >= by:
                    return None, f"{keys.manifest} is not there"
                threading.Event().wait(LOOK_AGAIN)
            manifest = Manifest.decode(data, keys.manifest)
            if manifest.run_id != run_id:
                return None, f"{keys.manifest} there is of another run, opened by {manifest.opened_by}"
            check_manifest(keys, manifest, plan, stage)
        except ShardQueueError as error:
            return None, str(error)
        return Joined(keys, manifest, together=True), ""

    def agree(self, settings: Mapping[str, object]) -> None:
        """Raise, on every rank, unless all have the same settings."""
        check_alike(self.ranks.gather(settings))

    def complete(self, state: State, cut: tuple[str, int], plan: Plan) -> None:
        """Add to a state what the others trained up to step `cut[1]` of pass `cut[0]`; warn of what is not known."""
        if self._gathering is None or self.session.joined is None:
            return
        self._gathering.complete(state, cut, plan, self.session.joined.start)
        for learner, batches in state.missing.items():
            most = "its last batches" if batches is None else f"its last {batches} batches, at most"
            warnings.warn(
                f"the state lacks {most}, of learner {learner!r}, whose log does not come as far as step {cut[1]} of "
                f"pass {cut[0] or '0'}: they are stored as not trained, and are trained again by who loads the state",
                ShardQueueWarning,
                stacklevel=3,
            )

    def _name(self, error: BaseException | None) -> BaseException | None:
        """The error that names who is gone; without an `error` of the group, only if somebody is."""
        if self._peers is not None:
            gone = self._peers.look() if error is None else self._peers.watch(NAMING)
            if gone:
                return PeerGoneError(self._say(self._peers, gone))
        return error and PeerGoneError(f"a rank that steps together with this one is gone, or left: {error}")

    def leave(self, error: BaseException | None) -> None:
        """Leave every pass that goes on; the session gives back what of it was claimed and is not trained.

        To an error of another collective it is added who is gone, if somebody is.
        """
        for supply in self.supplies.values():
            supply.close()
        if self._peers is not None and is_of_a_group(error):
            gone = self._peers.watch(NAMING)
            if error is not None and gone:
                error.add_note(self._say(self._peers, gone))
        if self._closes or error is not None:
            self.ranks.close(broken=error is not None)

    @staticmethod
    def _say(peers: Peers, gone: Sequence[Gone]) -> str:
        more = f"; and {len(gone) - NAMED} more" if len(gone) > NAMED else ""
        return "; ".join(map(peers.describe, gone[:NAMED])) + more

    def is_at_end(self, stage: str) -> bool:
        """Whether the loop over a stage has all it gets, though it may not have come back for more."""
        supply = self.supplies.get(stage)
        return supply is not None and supply.at_end

    # -- a pass ------------------------------------------------------------------------------------------

    def begin(self, dataset: SharedQueueDataset, settings: Mapping[str, object], run: str | None) -> str:
        """Agree on what is to come, and be in one run."""
        older = self.supplies.pop(dataset.stage, None)
        if older is not None:
            self.session.count_remainder()
            older.dismiss()
        start = self.session.start
        if start is not None:
            check_state(start, dataset.plan, dataset.stage)
            dataset.start_from(self.session)
        number = dataset.next_pass
        signature = json.loads(json.dumps(dataset.plan.signature()))
        state = None if start is None else start.describe()
        self.agree({"state": state, **settings, "pass": dataset.pass_name(number), "plan": signature})
        if self.session.joined is None:
            self.open(dataset.plan, dataset.stage, run)
        self.session.asks()
        return dataset.pass_name(number)

    def check_alone(self, supply: Supply) -> None:
        """Two loops over one stage would take each other's batches, and wait for each other."""
        if self.supplies.get(supply.stage) is not supply:
            raise ClosedError(
                f"another loop over {supply.stage or 'train'} batches has begun, and took over from this one; "
                "iterate one loader of a stage at a time"
            )

    def states(self, rows: list[Row]) -> tuple[RankState, ...]:
        """What the ranks have done, by what they said."""
        return tuple(
            RankState(
                *(rank, self._learners[rank], int(row.batches), int(row.samples)),
                *(row.waited, row.elapsed, int(row.units)),
            )
            for rank, row in enumerate(rows)
        )


def check_alike(said: Sequence[Mapping[str, object]]) -> None:
    """Raise unless all ranks said the same.

    Raises:
        AgreementError: naming what differs, and on which rank.
    """
    first = said[0]
    for rank, other in enumerate(said):
        for name in {**first, **other}:
            if other.get(name) != first.get(name):
                raise AgreementError(
                    f"{name} differs between ranks: rank 0 has {first.get(name)!r}, rank {rank} {other.get(name)!r}; "
                    "start all ranks with the same settings"
                )


def is_of_a_group(error: BaseException | None) -> bool:
    """Whether this is the error of a collective that lost a rank, by its type or by what gloo and NCCL say."""
    if not isinstance(error, RuntimeError) or isinstance(error, ShardQueueError):
        return False
    said = str(error).lower()
    return isinstance(error, dist.DistError) or any(sign in said for sign in SIGNS)
