"""Ranks that step together, as DistributedDataParallel needs it (*lockstep*): each gets as many batches.

Of the N batches of a pass each of W ranks is allowed N // W, and the first N mod W of them one more. It claims them
from the queue like any learner, and gives back what it claimed beyond that (see `allowance`), for others to take. So
all come to the last step, where up to W - 1 ranks have none and get their last batch again. The ranks agree, a step
ahead, that everyone has its batch, or on who has not; an agreement covers as many steps as every rank is certain of a
batch for. Where a rank cannot tell yet that it will have one, as long as others have to give back what they may not
take, the ranks go round until it has.

The same numbers say how far everybody is, which sets the learning rate (`Agreed.progress`), and who is how fast. A
rank that is gone is named from its log in the mailbox.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import warnings
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from shardqueue.agreement import Ranks, Row, batch_samples
from shardqueue.allowance import UNLIMITED, Allowance
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
from shardqueue.supply import Supply

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence

    from shardqueue.agreement import Agreement
    from shardqueue.dataset import SharedQueueDataset
    from shardqueue.peers import Gone
    from shardqueue.plan import Plan
    from shardqueue.session import Session
    from shardqueue.state import State

T = TypeVar("T")

logger = logging.getLogger("shardqueue")

NAMING = 15.0
"""Seconds for which a rank tries to tell who is gone, once the group is broken."""
NAMED = 8
"""Ranks that are named, at most."""
SHARING = 10.0
"""Seconds for which a run that rank 0 opened may take to be seen through another rank's mailbox."""
SOON, LATER = 0.001, 0.05
"""Seconds between two rounds: at first, and at most."""
SIGNS = ("gloo", "nccl", "connection closed by peer", "connection reset", "timed out")
"""What the message of a broken collective holds, where its type does not tell."""
HORIZON = 16
"""Steps that one agreement may cover, at most."""
SIZES_DIFFER = 1.5
"""Ratio of the largest to the smallest batch of a step from which averaging by rank is misleading."""


class Lockstep:
    """A training process's place among the ranks that step together.

    Args:
        session: entered; of this process.
        ranks: all of them.
        closes: with the session, the ranks' group is done with.

    Attributes:
        agreed: what is agreed on for the step whose batch was handed out last; None before the first.
        repeating: whether that batch is one this rank had before.
        repeated: batches handed out again so far, on all ranks.
    """

    def __init__(self, session: Session, ranks: Ranks, closes: bool = True) -> None:
        self.session, self.ranks, self._closes = session, ranks, closes
        self.agreed: Agreed | None = None
        self.repeating, self.repeated = False, 0
        self._peers: Peers | None = None
        self._gathering: Gathering | None = None
        self._learners: list[str] = [session.learner_id]
        self._supplies: dict[str, Supply] = {}
        self._told_sizes = False
        self._sizes: Counter[int] = Counter()
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
                threading.Event().wait(LATER)
            manifest = Manifest.decode(data, keys.manifest)
            if manifest.run_id != run_id:
                return None, f"{keys.manifest} there is of another run, opened by {manifest.opened_by}"
            check_manifest(keys, manifest, plan, stage)
        except ShardQueueError as error:
            return None, str(error)
        return Joined(keys, manifest, together=True), ""

    def _agree(self, settings: Mapping[str, object]) -> None:
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
        for supply in self._supplies.values():
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
        supply = self._supplies.get(stage)
        return supply is not None and supply.at_end

    # -- a pass ------------------------------------------------------------------------------------------

    def train(
        self,
        dataset: SharedQueueDataset,
        loader: Iterable[T],
        *,
        uneven: str = "repeat",
        limit: int | None = None,
        done: int = 0,
        run: str | None = None,
        settings: Mapping[str, object] | None = None,
    ) -> Generator[T]:
        """The items of one pass, as many on every rank. What is a repeat says `repeating`.

        Args:
            dataset: whose batches they are.
            loader: the `DataLoader` over it.
            uneven: "repeat" or "drop", what to do about N mod W.
            limit: steps, at most.
            done: steps of the pass that were done in another run. As many fewer are left, unless the run began from
                a state that says what is left; then they only count for `limit`, and for the numbers of the steps.
            run: name of a run to be opened, where none is yet.
            settings: what else all ranks must have alike; JSON.

        Raises:
            InvalidInputError: the number of batches is not known, or too small.
            AgreementError: the ranks do not agree, or one is gone.
            ClosedError: another loop over the same stage has begun.
        """
        size = self.ranks.size
        total, steps = shares(dataset, size, uneven, limit)
        own = {"uneven": uneven, "limit": limit, "done": done, "total": total, "steps": steps}
        pass_ = self._begin(dataset, {**(settings or {}), **own}, run)
        before = dataset.trained_before(self.session, dataset.next_pass)
        if before:
            rest = None if limit is None else max(0, limit - done)
            left, steps = shares(dataset, size, uneven, rest, before)
            course = Course(size, before, left, range(done, done + steps))
        else:
            left = max(0, total - done * size)
            course = Course(size, done * size, left, range(done, steps))
        if not course.steps:
            logger.info("pass %s: nothing is left of it", pass_ or "0")
            dataset.pass_over()
            return
        share = Allowance(left).part(self.ranks.rank, size)
        self.session.allow(pass_, share)
        supply = self._supplies[dataset.stage] = Supply(self.session, dataset, loader, pass_, share.batches)
        with dataset.together():
            yield from self._steps(supply, dataset, course)

    def _steps(self, supply: Supply, dataset: SharedQueueDataset, course: Course) -> Iterator[Any]:
        size, steps, last = self.ranks.size, course.steps, None
        if not dataset.stage:
            self._sizes.clear()
        asked = steps.start
        try:
            agreement = self.ranks.begin(self._row(supply))
            for step in steps:
                supply.at_end = step == steps.stop - 1
                needed = min(size, course.total - course.before(step))
                if not dataset.stage:
                    self.session.at(supply.pass_, step)
                if step == asked:
                    item, rows = self._next(supply, agreement, needed)
                    asked = step + _certain(rows, steps.stop - 1 - step)
                    states = self._states(rows)
                    self._look_at(dataset, supply, course.total, rows)
                else:
                    item = supply.fetch_promised()
                self.repeating = item is None
                if item is None:
                    item = supply.sample() if last is None else last
                last = item
                if not dataset.stage:
                    self._sizes[batch_samples(item)] += not self.repeating
                    self.repeated += size - needed
                    self.agreed = self._as_agreed(dataset, supply.number, step, course, states)
                    self.session.gave(supply.pass_, step, supply.at_end)
                if supply.at_end:
                    self._tell_repeats(supply, size - needed)
                elif step + 1 == asked:
                    agreement = self.ranks.begin(self._row(supply))
                yield item
                self._check_alone(supply)
                self.session.came_back()
        finally:
            supply.close()

    def _look_at(self, dataset: SharedQueueDataset, supply: Supply, total: int, rows: list[Row]) -> None:
        """Say what the numbers of a step of training show."""
        if not dataset.stage:
            self._compare_sizes(rows)
            self._check_units(dataset, supply, total, rows)

    def _check_alone(self, supply: Supply) -> None:
        """Two loops over one stage would take each other's batches, and wait for each other."""
        if self._supplies.get(supply.stage) is not supply:
            raise ClosedError(
                f"another loop over {supply.stage or 'train'} batches has begun, and took over from this one; "
                "iterate one loader of a stage at a time"
            )

    def _tell_repeats(self, supply: Supply, repeats: int) -> None:
        if repeats and self.ranks.rank == 0:
            logger.info(
                "pass %s: %d of %d ranks repeat a batch at the last step",
                *(supply.pass_ or "0", repeats, self.ranks.size),
            )

    def _next(self, supply: Supply, agreement: Agreement, needed: int) -> tuple[Any, list[Row]]:
        """Our item of the step that was agreed on, None if others have the last ones."""
        rows = agreement.rows()
        if sum(row.has > 0 for row in rows) < needed:
            return self._go_round(supply, needed)
        return (supply.fetch_promised() if rows[self.ranks.rank].has else None), rows

    def _go_round(self, supply: Supply, needed: int, settled: bool = False) -> tuple[Any, list[Row]]:
        """Ask round after round until enough ranks have a batch (and, `settled`, nothing is under way)."""
        item, pause = None, SOON
        mark: tuple[float, int] | None = None
        gave_up = False
        while True:
            if item is None:
                item = supply.fetch(wait=False)
            row = self._row(supply)
            row.has, row.gave_up = float(item is not None), float(gave_up)
            row.starves = float(item is None and supply.empty_looks > 0)
            row.settled, row.events = float(supply.settled), supply.events
            rows = self.ranks.begin(row).rows()
            if sum(row.has > 0 for row in rows) >= needed and (
                not settled or all(row.settled for row in rows)
            ):
                return item, rows
            if any(row.gave_up for row in rows):
                self._raise_missing(needed, rows)
            if any(row.starves for row in rows):
                supply.cut()
            events = sum(row.events for row in rows)
            if item is None and all(row.settled for row in rows):
                if mark is None or mark[0] != events:
                    mark = events, supply.empty_looks
                gave_up = supply.empty_looks >= mark[1] + 2
            else:
                mark = None
            threading.Event().wait(pause)
            pause = min(LATER, 2 * pause)

    def _raise_missing(self, needed: int, rows: list[Row]) -> None:
        has = int(sum(row.has for row in rows))
        raise AgreementError(
            f"{needed} ranks need a batch for this step and only {has} have one, yet nothing is left to claim: the "
            "plan promises more batches than its units have, or somebody else claims in this run; check batches=, "
            "and that load yields what the plan says"
        )

    def _begin(self, dataset: SharedQueueDataset, settings: Mapping[str, object], run: str | None) -> str:
        """Agree on what is to come, and be in one run."""
        older = self._supplies.pop(dataset.stage, None)
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
        self._agree({"state": state, **settings, "pass": dataset.pass_name(number), "plan": signature})
        if self.session.joined is None:
            self.open(dataset.plan, dataset.stage, run)
        return dataset.pass_name(number)

    def _row(self, supply: Supply) -> Row:
        rates, largest = self.session.rates, max(self._sizes, default=0)
        return Row(
            has=supply.assured,
            size=largest,
            small=sum(count for size, count in self._sizes.items() if largest >= SIZES_DIFFER * size),
            had=self._sizes.total(),
            batches=rates.batches,
            samples=rates.samples,
            waited=rates.waited,
            elapsed=rates.elapsed,
            units=self.session.units_of(supply.pass_),
        )

    def _states(self, rows: list[Row]) -> tuple[RankState, ...]:
        return tuple(
            RankState(
                *(rank, self._learners[rank], int(row.batches), int(row.samples)),
                *(row.waited, row.elapsed, int(row.units)),
            )
            for rank, row in enumerate(rows)
        )

    def _as_agreed(
        self,
        dataset: SharedQueueDataset,
        number: int,
        step: int,
        course: Course,
        states: tuple[RankState, ...],
    ) -> Agreed:
        before, per_pass, total = course.before(step), dataset.steps, dataset.batches or 1
        return Agreed(
            epoch=number,
            step=step,
            steps=course.steps.stop,
            batches=before,
            total=min(course.total, course.before(course.steps.stop)),
            progress=number * per_pass + before * per_pass // total,
            repeated=self.repeated,
            units=len(dataset.plan),
            ranks=states,
        )

    def _check_units(self, dataset: SharedQueueDataset, supply: Supply, total: int, rows: list[Row]) -> None:
        """Where only the caller says how many batches there are: whether some may have been left out."""
        if not supply.at_end or dataset.plan.total is not None or total != dataset.batches:
            return
        assert self.session.joined is not None
        units = len(self.session.joined.left(dataset.plan, supply.pass_))
        left = units - int(sum(row.units for row in rows))
        if left > 0:
            logger.warning(
                "%d of %d units were not claimed in pass %s: batches=%d was reached before; if they have batches, "
                "these are not trained",
                *(left, units, supply.pass_ or "0", total),
            )

    def _compare_sizes(self, rows: list[Row]) -> None:
        """Say once that batches differ in size; the short one that an epoch may end with is no reason."""
        largest = max(row.size for row in rows)
        small = sum(row.had if largest >= SIZES_DIFFER * row.size else row.small for row in rows)
        if self._told_sizes or small < 2 or self.ranks.size == 1:
            return
        self._told_sizes = True
        if self.ranks.rank == 0:
            warnings.warn(
                f"of the batches of this epoch {small:.0f} had much fewer samples than the largest, {largest:.0f}: "
                "gradients are averaged by rank, so a sample of the small one counts for more; make batches "
                "alike, or weight the loss by the number of samples",
                ShardQueueWarning,
                stacklevel=4,
            )

    # -- evaluation --------------------------------------------------------------------------------------

    def evaluate(
        self,
        dataset: SharedQueueDataset,
        loader: Iterable[T],
        *,
        even: bool = False,
        limit: int | None = None,
        run: str | None = None,
        settings: Mapping[str, object] | None = None,
    ) -> Generator[T]:
        """The items of one pass, each on one rank, and more of them on the fast ones.

        Args:
            dataset, loader: as for `train`.
            even: as many on every rank; the surplus ones say `repeating`.
            limit: batches a rank, at most; then the ranks have as many, and nothing is repeated unless `even`.
            run: name of a run to be opened, where none is yet.
            settings: what else all ranks must have alike; JSON.

        Raises:
            InvalidInputError: there are fewer batches than ranks.
            AgreementError: the ranks do not agree, or one is gone.
        """
        if even or limit is not None:
            for item in self.train(dataset, loader, limit=limit, run=run, settings=settings):
                if even or not self.repeating:
                    yield item
            return
        pass_ = self._begin(dataset, {**(settings or {}), "total": dataset.batches}, run)
        first = first_share(dataset, self.ranks.size) if self.ranks.size > 1 else 0
        self.session.allow(pass_, Allowance(first, final=False) if first else UNLIMITED)
        supply = self._supplies[dataset.stage] = Supply(self.session, dataset, loader, pass_, None)
        self.repeating = False
        with dataset.together():
            try:
                if not first:
                    supply.lift()
                else:
                    begun, _ = self._go_round(supply, self.ranks.size, settled=True)
                    self.session.allow(pass_, UNLIMITED)
                    supply.lift()
                    yield begun
                    self._check_alone(supply)
                    self.session.came_back()
                while (following := supply.fetch(wait=True)) is not None:
                    yield following
                    self._check_alone(supply)
                    self.session.came_back()
                supply.at_end = True
            finally:
                supply.close()


@dataclass(frozen=True, slots=True)
class Course:
    """What ranks have before them in a pass.

    Attributes:
        ranks: how many they are.
        begun: batches of the pass that were trained before.
        left: batches to come.
        steps: their numbers.
    """

    ranks: int
    begun: int
    left: int
    steps: range

    @property
    def total(self) -> int:
        """Batches of the pass."""
        return self.begun + self.left

    def before(self, step: int) -> int:
        """Batches before a step."""
        return self.begun + (step - self.steps.start) * self.ranks


def _certain(rows: list[Row], most: int) -> int:
    """For how many steps from this one every rank is certain of a batch: so long nobody need ask. At least 1."""
    return max(1, min(most, HORIZON, int(min(row.has for row in rows))))


def check_uneven(uneven: str) -> str:
    """Refuse what is no way to end a pass.

    Raises:
        InvalidInputError: it is neither "repeat" nor "drop".
    """
    if uneven not in ("repeat", "drop"):
        raise InvalidInputError("uneven", uneven, '"repeat" or "drop"', 'pass uneven="repeat"')
    return uneven


def shares(
    dataset: SharedQueueDataset, ranks: int, uneven: str, limit: int | None = None, before: int = 0
) -> tuple[int, int]:
    """(batches, steps) that are left of a pass, of which `before` batches were trained, for ranks to go through.

    Raises:
        InvalidInputError: the number of batches is not known, or there is none for every rank.
    """
    check_uneven(uneven)
    batches = dataset.batches
    if batches is None:
        raise InvalidInputError(
            "batches",
            None,
            "the number of batches of all units, where ranks step together and the units do not say",
            "pass batches=",
        )
    batches -= before
    steps = batches // ranks if uneven == "drop" else -(-batches // ranks)
    if not steps and not before:
        remedy = 'make batches smaller, or pass uneven="repeat"'
        raise InvalidInputError(
            "batches", batches, f'at least {ranks}, one a rank, with uneven="drop"', remedy
        )
    if limit is not None:
        steps = min(steps, limit)
    return min(batches, steps * ranks), steps


def first_share(dataset: SharedQueueDataset, ranks: int) -> int:
    """Batches that each rank may take until every one has its first; 0 where not every rank can have one.

    A rank without a batch would miss the metrics that all ranks reduce at the end.

    Raises:
        InvalidInputError: metrics are reduced, and there are too few batches.
    """
    known = dataset.plan.total
    count = len(dataset.plan) if known is None else known
    if count >= ranks:
        return 1 if known is None else known // ranks
    if dataset.stage == "predict":
        return 0
    raise InvalidInputError(
        "units" if known is None else "batches",
        count,
        f"at least {ranks}, one a rank, so that every rank has metrics to reduce",
        "make batches smaller, or evaluate on fewer ranks",
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


def lockstep_of(session: Session, group: Any) -> Lockstep:
    """The session's place among the ranks of this process group."""
    place = session.lockstep
    if place is None:
        place = session.lockstep = Lockstep(session, Ranks(group))
    elif not isinstance(place, Lockstep) or place.ranks.group is not group:
        bound = "the one that this session's ranks have stepped together in"
        raise InvalidInputError("group", group, bound, "enter another Session for another group")
    return place


def is_of_a_group(error: BaseException | None) -> bool:
    """Whether this is the error of a collective that lost a rank, by its type or by what gloo and NCCL say."""
    if not isinstance(error, RuntimeError) or isinstance(error, ShardQueueError):
        return False
    said = str(error).lower()
    return isinstance(error, dist.DistError) or any(sign in said for sign in SIGNS)
