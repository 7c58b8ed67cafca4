"""Ranks that step together, as DistributedDataParallel needs it (*lockstep*): each gets as many batches.

Of the N batches of a pass each of W ranks is allowed ceil(N / W). It claims them from the queue like any learner, and
gives back what it claimed beyond that (see `allowance`); so all come to the last step, where up to W - 1 ranks have
none and get their last batch again. Before each step the ranks agree that everyone has its batch, or on who has not.
That is a sum over a few numbers a rank, started while the step before is computed, on a gloo group of our own: it
costs no CPU-GPU synchronisation, and nobody's collectives are mixed up with it. Where a rank cannot tell yet that it
will have a batch, because others have still to give back what they may not take, the ranks go round until it has.

The same numbers say how far everybody is, which sets the learning rate (`Agreed.progress`), and who is how fast.
A rank that is gone is named from its log in the mailbox. Everything here runs in the training processes' main thread.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import warnings
from dataclasses import dataclass, fields, is_dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

from shardqueue.allowance import UNLIMITED, Allowance
from shardqueue.errors import (
    AgreementError,
    InvalidInputError,
    LoadError,
    PeerGoneError,
    RunError,
    ShardQueueError,
    ShardQueueWarning,
)
from shardqueue.feed import Feed, Place
from shardqueue.learner import TAIL, seat
from shardqueue.peers import Peer, Peers
from shardqueue.records import Manifest, RunKeys
from shardqueue.run import Joined, check_manifest

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping

    from shardqueue.dataset import SharedQueueDataset
    from shardqueue.plan import Plan
    from shardqueue.session import Session

T = TypeVar("T")

logger = logging.getLogger("shardqueue")

TURN = 1.0
"""Seconds after which a rank that waits for others looks up."""
PATIENCE = 5.0
"""Seconds of waiting after which it looks whether somebody is gone."""
NAMING = 15.0
"""Seconds for which it tries to tell who is gone, once the group is broken."""
SHARING = 10.0
"""Seconds for which a run that rank 0 opened may take to be seen through another rank's mailbox."""
SOON, LATER = 0.001, 0.05
"""Seconds between two rounds: at first, and at most."""
TAIL_PREFETCH = 2
SIZES_DIFFER = 1.5
"""Ratio of the largest to the smallest batch of a step from which averaging by rank is misleading."""


@dataclass(frozen=True, slots=True)
class RankState:
    """What a rank has done in this run; seconds by its monotonic clock.

    Attributes:
        batches, samples: trained.
        waited: for data.
        elapsed: since its first batch was asked for.
        units: of this pass, claimed by it first.
    """

    rank: int
    learner: str
    batches: int
    samples: int
    waited: float
    elapsed: float
    units: int


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all ranks know alike before a step.

    Attributes:
        epoch: number of the pass.
        step, steps: of the pass: this one from 0, and how many there are.
        batches, total: of the pass, on all ranks: handed out before this step, and in all.
        progress: dataset steps before this one, over all epochs; the same on every rank, and it never goes back.
        repeated: batches handed out again so far in the run, on all ranks.
        units: in the plan.
        ranks: as of the step before.
    """

    epoch: int
    step: int
    steps: int
    batches: int
    total: int
    progress: int
    repeated: int
    units: int
    ranks: tuple[RankState, ...]


@dataclass(slots=True)
class _Row:
    """One rank's numbers in an agreement."""

    has: float = 0.0
    settled: float = 0.0
    events: float = 0.0
    gave_up: float = 0.0
    size: float = 0.0
    batches: float = 0.0
    samples: float = 0.0
    waited: float = 0.0
    elapsed: float = 0.0
    units: float = 0.0

    def numbers(self) -> list[float]:
        return [float(getattr(self, field.name)) for field in fields(self)]


_COLUMNS = len(fields(_Row))


class Ranks:
    """The training processes that step together.

    Args:
        group: their process group; None for a process on its own. Every rank of it must make the object.
    """

    def __init__(self, group: Any = None) -> None:
        self.rank, self.size = 0, 1
        self.gone: Callable[[BaseException | None], BaseException | None] = lambda error: error
        self._group: Any = None
        if group is None:
            return
        members = dist.get_process_group_ranks(group)
        self.rank, self.size = dist.get_rank(group), len(members)
        if self.size > 1:
            part = self.size < dist.get_world_size()
            self._group = dist.new_group(members, backend="gloo", use_local_synchronization=part)

    def close(self) -> None:
        """Forget the group."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)

    def begin(self, row: _Row) -> _Agreement:
        """Start to agree."""
        table = torch.zeros(self.size, _COLUMNS, dtype=torch.float64)
        table[self.rank] = torch.tensor(row.numbers(), dtype=torch.float64)
        return _Agreement(self, table, self._sum(table))

    def gather(self, said: Mapping[str, object]) -> list[dict[str, Any]]:
        """What each rank said, by rank; JSON."""
        data = torch.frombuffer(bytearray(json.dumps(said).encode()), dtype=torch.uint8)
        sizes = torch.zeros(self.size, dtype=torch.int64)
        sizes[self.rank] = len(data)
        self.wait(self._sum(sizes))
        table = torch.zeros(self.size, int(sizes.max()), dtype=torch.uint8)
        table[self.rank, : len(data)] = data
        self.wait(self._sum(table))
        rows = zip(table, sizes.tolist(), strict=True)
        return [json.loads(bytes(row[:size].tolist())) for row, size in rows]

    def _sum(self, table: torch.Tensor) -> Any:
        if self._group is None:
            return None
        try:
            return dist.all_reduce(table, group=self._group, async_op=True)
        except RuntimeError as error:
            raise self._lost(error) from error

    def wait(self, work: Any) -> None:
        """Until all ranks have taken part.

        Raises:
            PeerGoneError: one of them is gone.
        """
        waited = 0.0
        while work is not None:
            try:
                work.wait(timedelta(seconds=TURN))
                return
            except RuntimeError as error:
                if work.is_completed():
                    raise self._lost(error) from error
            waited += TURN
            if waited >= PATIENCE:
                gone = self.gone(None)
                if gone is not None:
                    raise gone

    def _lost(self, error: RuntimeError) -> BaseException:
        return self.gone(error) or error


@dataclass(slots=True)
class _Agreement:
    """One that is under way."""

    ranks: Ranks
    table: torch.Tensor
    work: Any

    def rows(self) -> list[_Row]:
        """What each rank said, by rank, once all have."""
        self.ranks.wait(self.work)
        return [_Row(*row) for row in self.table.tolist()]


class Lockstep:
    """A training process's place among the ranks that step together.

    Attributes:
        agreed: what is agreed on for the step whose batch was handed out last; None before the first.
        repeating: whether that batch is one this rank had before.
        repeated: batches handed out again so far, on all ranks.
    """

    def __init__(self, session: Session, ranks: Ranks) -> None:
        self.session, self.ranks = session, ranks
        self.agreed: Agreed | None = None
        self.repeating, self.repeated = False, 0
        self._peers: Peers | None = None
        self._learners: list[str] = [session.learner_id]
        self._supplies: dict[str, _Supply] = {}
        self._told_sizes, self._uneven_steps = False, 0
        ranks.gone = self._name

    # -- agreeing on the run -----------------------------------------------------------------------------

    def open(self, plan: Plan, stage: str = "", run: str | None = None) -> None:
        """Be in one run together: rank 0 opens the next one, or the one named, and each finds it by its own mailbox.

        Raises:
            AgreementError: a rank does not see it.
            RunError, MailboxError: rank 0 could not open it.
        """
        session = self.session
        joined, error = None, None
        if self.ranks.rank == 0:
            try:
                joined = session.find_run(plan, run, stage=stage, fresh=run is None)
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
                    f"run {told[0]['run']}, which rank 0 opened in {told[0]['place']}, is not what rank {rank} finds "
                    f"in {told[rank]['place']}: {seen['error']}; give all ranks one prefix, in a store or folder that "
                    "all of them reach"
                )
        assert joined is not None
        session.enter_run(joined)
        self._learners = [said["learner"] for said in told]
        peers = [
            Peer(rank, said["learner"], said["instance"], said["host"]) for rank, said in enumerate(told)
        ]
        others = [peer for peer in peers if peer.rank != self.ranks.rank]
        self._peers = Peers(others, session.mailbox, joined.keys, session.clock) if others else None

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
        return Joined(keys, manifest), ""

    def _agree(self, settings: Mapping[str, object]) -> None:
        """Raise, on every rank, unless all have the same settings."""
        said = self.ranks.gather(settings)
        for rank, other in enumerate(said):
            for name in said[0]:
                if other.get(name) != said[0][name]:
                    raise AgreementError(
                        f"{name} differs between ranks: rank 0 has {said[0][name]!r}, rank {rank} "
                        f"{other.get(name)!r}; start all ranks with the same settings"
                    )

    def _name(self, error: BaseException | None) -> BaseException | None:
        """The error that names who is gone; without an `error` of the group, only if somebody is."""
        gone = (
            [] if self._peers is None else self._peers.look() if error is None else self._peers.watch(NAMING)
        )
        if gone and self._peers is not None:
            return PeerGoneError("; ".join(self._peers.describe(one) for one in gone))
        if error is None:
            return None
        return PeerGoneError(f"a rank that steps together with this one is gone, or left: {error}")

    def close(self) -> None:
        """Leave every pass that goes on: what was claimed of it and is not trained is given back by the session."""
        for supply in self._supplies.values():
            supply.close()

    def explain(self, error: BaseException) -> None:
        """Add to an error of another collective who is gone, if somebody is."""
        if self.ranks.size > 1 and isinstance(error, RuntimeError) and not isinstance(error, ShardQueueError):
            named = self._name(error)
            if self._peers is not None and named is not None:
                error.add_note(str(named))

    # -- a pass ------------------------------------------------------------------------------------------

    def train(
        self,
        dataset: SharedQueueDataset,
        loader: Iterable[T],
        *,
        uneven: str = "repeat",
        limit: int | None = None,
        run: str | None = None,
    ) -> Generator[T]:
        """The items of one pass, as many on every rank. What is a repeat says `repeating`.

        Args:
            dataset: whose batches they are.
            loader: the `DataLoader` over it.
            uneven: "repeat" or "drop", what to do about N mod W.
            limit: steps, at most.
            run: name of a run to be opened, where none is yet.

        Raises:
            InvalidInputError: the number of batches is not known, or too small.
            AgreementError: the ranks do not agree, or one is gone.
        """
        total, steps = shares(dataset, self.ranks.size, uneven, limit)
        pass_ = self._begin(dataset, {"total": total, "steps": steps, "uneven": uneven}, run)
        self.session.allow(pass_, Allowance(steps))
        supply = self._supplies[dataset.stage] = _Supply(self.session, dataset, loader, pass_, steps)
        with dataset.together():
            yield from self._steps(supply, dataset, total, steps)

    def _steps(self, supply: _Supply, dataset: SharedQueueDataset, total: int, steps: int) -> Iterator[Any]:
        size, last = self.ranks.size, None
        self._uneven_steps = 0
        try:
            agreement = self.ranks.begin(self._row(supply, None))
            for step in range(steps):
                supply.at_end = step == steps - 1
                needed = min(size, total - step * size)
                item, rows = self._next(supply, agreement, needed)
                self.repeating = item is None
                if item is None:
                    item = supply.sample() if last is None else last
                last = item
                if not dataset.stage:
                    self.repeated += size - needed
                    self._compare_sizes(rows)
                    self.agreed = self._as_agreed(dataset, supply.number, step, steps, total, rows)
                if not supply.at_end:
                    agreement = self.ranks.begin(self._row(supply, item))
                yield item
                self.session.came_back()
        finally:
            supply.close()

    def _next(self, supply: _Supply, agreement: _Agreement, needed: int) -> tuple[Any, list[_Row]]:
        """Our item of the step that was agreed on, None if others have the last ones."""
        rows = agreement.rows()
        if sum(row.has for row in rows) < needed:
            return self._go_round(supply, needed)
        return (supply.fetch_promised() if rows[self.ranks.rank].has else None), rows

    def _go_round(self, supply: _Supply, needed: int, settled: bool = False) -> tuple[Any, list[_Row]]:
        """Ask round after round until enough ranks have a batch (and, `settled`, nothing is under way)."""
        item, pause = None, SOON
        mark: tuple[float, int] | None = None
        gave_up = False
        while True:
            if item is None:
                item = supply.fetch(wait=False)
            row = self._row(supply, None)
            row.has, row.gave_up = float(item is not None), float(gave_up)
            rows = self.ranks.begin(row).rows()
            if sum(row.has for row in rows) >= needed and (not settled or all(row.settled for row in rows)):
                return item, rows
            if any(row.gave_up for row in rows):
                self._raise_missing(needed, rows)
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

    def _raise_missing(self, needed: int, rows: list[_Row]) -> None:
        has = int(sum(row.has for row in rows))
        raise AgreementError(
            f"{needed} ranks need a batch for this step and only {has} have one, yet nothing is left to claim: the "
            "plan promises more batches than its units have, or somebody else claims in this run; check batches=, and "
            "that load yields what the plan says"
        )

    def _begin(self, dataset: SharedQueueDataset, settings: Mapping[str, object], run: str | None) -> str:
        """Agree on what is to come, and be in one run."""
        older = self._supplies.pop(dataset.stage, None)
        if older is not None:
            self.session.count_remainder()
            older.dismiss()
        number = dataset.next_pass
        signature = json.loads(json.dumps(dataset.plan.signature()))
        self._agree({"pass": dataset.pass_name(number), "plan": signature, **settings})
        if self.session.joined is None:
            self.open(dataset.plan, dataset.stage, run)
        return dataset.pass_name(number)

    def _row(self, supply: _Supply, item: Any) -> _Row:
        rates = self.session.rates
        return _Row(
            has=float(supply.assured),
            settled=float(supply.settled),
            events=supply.events,
            size=0.0 if item is None or self.repeating else batch_samples(item),
            batches=rates.batches,
            samples=rates.samples,
            waited=rates.waited,
            elapsed=rates.elapsed,
            units=self.session.units_of(supply.pass_),
        )

    def _as_agreed(
        self, dataset: SharedQueueDataset, number: int, step: int, steps: int, total: int, rows: list[_Row]
    ) -> Agreed:
        before, per_pass = step * self.ranks.size, dataset.steps
        states = (
            RankState(
                *(rank, self._learners[rank], int(row.batches), int(row.samples)),
                *(row.waited, row.elapsed, int(row.units)),
            )
            for rank, row in enumerate(rows)
        )
        return Agreed(
            epoch=number,
            step=step,
            steps=steps,
            batches=before,
            total=total,
            progress=number * per_pass + before * per_pass // (dataset.batches or total),
            repeated=self.repeated,
            units=len(dataset.plan),
            ranks=tuple(states),
        )

    def _compare_sizes(self, rows: list[_Row]) -> None:
        """Say once that batches differ in size; the short one that an epoch may end with is no reason."""
        sizes = [row.size for row in rows if row.size]
        self._uneven_steps += len(sizes) > 1 and max(sizes) >= SIZES_DIFFER * min(sizes)
        if self._told_sizes or self._uneven_steps < 2:
            return
        self._told_sizes = True
        if self.ranks.rank == 0:
            warnings.warn(
                f"in one step a rank had a batch of {int(max(sizes))} samples and another one of {int(min(sizes))}: "
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
    ) -> Generator[T]:
        """The items of one pass, each on one rank, and more of them on the fast ones.

        Args:
            dataset, loader: as for `train`.
            even: as many on every rank; the surplus ones say `repeating`.
            limit: batches a rank, at most; then the ranks have as many, and nothing is repeated unless `even`.
            run: name of a run to be opened, where none is yet.

        Raises:
            InvalidInputError: there are fewer batches than ranks.
            AgreementError: the ranks do not agree, or one is gone.
        """
        if even or limit is not None:
            for item in self.train(dataset, loader, limit=limit, run=run):
                if even or not self.repeating:
                    yield item
            return
        pass_ = self._begin(dataset, {"total": dataset.batches}, run)
        first = first_share(dataset, self.ranks.size) if self.ranks.size > 1 else 0
        self.session.allow(pass_, Allowance(first, final=False) if first else UNLIMITED)
        supply = self._supplies[dataset.stage] = _Supply(self.session, dataset, loader, pass_, None)
        self.repeating = False
        with dataset.together():
            try:
                if first:
                    begun, _ = self._go_round(supply, self.ranks.size, settled=True)
                    self.session.allow(pass_, UNLIMITED)
                    supply.lift()
                    yield begun
                    self.session.came_back()
                while (following := supply.fetch(wait=True)) is not None:
                    yield following
                    self.session.came_back()
                supply.at_end = True
            finally:
                supply.close()


class _Supply:
    """One rank's batches of one pass: from its loader, and at the end, where others give back, from a feed of its own.

    Args:
        share: batches this rank is allowed; None for no limit.

    Attributes:
        number: of the pass.
        at_end: the loop has all it gets.
    """

    def __init__(
        self,
        session: Session,
        dataset: SharedQueueDataset,
        loader: Iterable[Any],
        pass_: str,
        share: int | None,
    ) -> None:
        self._session, self._dataset, self._loader = session, dataset, loader
        self.pass_, self._share = pass_, share
        self.number, self.at_end = dataset.next_pass, False
        self._taken = self._from_loader = 0
        self._tail_key = seat(pass_, TAIL)
        self._tail: Feed | None = None
        self._lifted = self._cut = False
        workers = getattr(loader, "num_workers", 0) > 0
        self._items: Iterator[Any] | None = session.walk(loader, [dataset] if workers else [])

    @property
    def assured(self) -> bool:
        """Whether another batch will come, for sure."""
        return self._taken < self._committed

    @property
    def _committed(self) -> int:
        if self._items is None:
            return self._from_loader + (0 if self._tail is None else self._tail.committed)
        source = self._session.source_on(self.pass_)
        return 0 if source is None else source.committed

    @property
    def settled(self) -> bool:
        """Whether nothing that other ranks may be waiting for is under way."""
        sources = [self._session.source_on(key) for key in (self.pass_, self._tail_key)]
        return all(source.settled for source in sources if source is not None)

    @property
    def events(self) -> float:
        """Grows with every claim."""
        sources = [self._session.source_on(key) for key in (self.pass_, self._tail_key)]
        return float(sum(source.events for source in sources if source is not None))

    @property
    def empty_looks(self) -> int:
        """How often there was nothing to claim."""
        return 0 if self._tail is None else self._tail.empty_looks

    def cut(self) -> None:
        """Others wait for what we may not take."""
        if not self._cut and self._share is not None:
            self._cut = True
            self._session.allow(self.pass_, Allowance(self._share, cut=True))
            if self._tail is not None:
                self._session.allow(self._tail_key, Allowance(self._share - self._from_loader, cut=True))

    def lift(self) -> None:
        """From here on everything may be taken."""
        self._lifted = True
        if self._tail is not None:
            self._session.allow(self._tail_key, UNLIMITED)
            self._tail.wait_no_more()

    def fetch(self, wait: bool) -> Any:
        """The next item; None when there is none, or (not `wait`) none yet past the loader."""
        if self._items is not None:
            for item in self._items:
                self._taken += 1
                return item
            self._items = None
            self._from_loader = self._taken
            if self._lifted or self._share == self._taken:
                return None
            self._begin_tail()
        return self._from_tail(wait)

    def fetch_promised(self) -> Any:
        """The next item, which the others count on.

        Raises:
            LoadError: the loader does not give it.
        """
        item = self.fetch(wait=True)
        if item is None:
            raise LoadError(
                f"the loader ended after {self._taken} batches, but this rank had claimed more; nothing between the "
                "dataset and track may drop batches"
            )
        return item

    def _begin_tail(self) -> None:
        session, dataset = self._session, self._dataset
        allowed = None if self._share is None else self._share - self._taken
        session.allow(self._tail_key, Allowance(allowed, cut=self._cut))
        place = Place(pass_=self.pass_, worker=TAIL, waits=True, stage=dataset.stage)
        self._tail = Feed(dataset.plan, session, dataset.load_of(self.number), TAIL_PREFETCH, None, place)
        self._tail.tracked = True
        self._tail.start()

    def _from_tail(self, wait: bool) -> Any:
        if self._tail is None:
            return None
        began = self._session.clock.monotonic()
        try:
            pair = self._tail.take() if wait else self._tail.take_if_ready()
        except StopIteration:
            return None
        if pair is None:
            return None
        self._taken += 1
        self._session.received(pair[0], self._session.clock.monotonic() - began)
        return self._as_item(pair)

    def sample(self) -> Any:
        """Any batch, for a rank that has had none."""
        plan = self._dataset.plan
        for step, batch in self._dataset.load_of(self.number)(plan.value(0)):
            return self._as_item((step, batch))
        raise InvalidInputError(
            "units", plan, "units that have batches", "check what load yields for the first one"
        )

    def _as_item(self, pair: tuple[Any, Any]) -> Any:
        """What the loader would have made of it."""
        loader = self._loader
        if not isinstance(loader, DataLoader):
            return pair
        collate: Callable[[Any], Any] = loader.collate_fn
        item = collate(pair if self._dataset.with_step else pair[1])
        pinned = loader.pin_memory and torch.cuda.is_available()
        return pin_memory(item) if pinned else item  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """The loop is done with the pass: at its end, or before."""
        items, self._items = self._items, None
        if items is not None:
            if self.at_end:
                next(items, None)
            cast("Any", items).close()
        if self._tail is not None and self.at_end:
            self._end_tail(self._tail)
        elif self._tail is not None:
            self._tail.stop()

    def _end_tail(self, tail: Feed) -> None:
        tail.wait_no_more()
        try:
            tail.take()
        except StopIteration:
            return

    def dismiss(self) -> None:
        """Another pass begins."""
        self.close()
        if self._tail is not None:
            self._tail.close(failed=False)
            self._tail = None


def shares(dataset: SharedQueueDataset, ranks: int, uneven: str, limit: int | None = None) -> tuple[int, int]:
    """(batches, steps) of a pass that ranks go through together.

    Raises:
        InvalidInputError: the number of batches is not known, or there is none for every rank.
    """
    if uneven not in ("repeat", "drop"):
        raise InvalidInputError("uneven", uneven, '"repeat" or "drop"', 'pass uneven="repeat"')
    batches = dataset.batches
    if batches is None:
        raise InvalidInputError(
            "batches",
            None,
            "the number of batches of all units, where ranks step together and the units do not say",
            "pass batches=",
        )
    steps = batches // ranks if uneven == "drop" else -(-batches // ranks)
    if not steps:
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
    known = dataset.batches
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


def batch_samples(batch: Any) -> int:
    """How many samples a batch has: the first dimension of the first tensor in it; 1 where there is none."""
    tensor = _first_tensor(batch)
    return 1 if tensor is None or tensor.dim() == 0 else int(tensor.shape[0])


def _first_tensor(batch: Any) -> torch.Tensor | None:
    if isinstance(batch, torch.Tensor):
        return batch
    if is_dataclass(batch) and not isinstance(batch, type):
        batch = [getattr(batch, field.name, None) for field in fields(batch)]
    parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, (list, tuple)) else ()
    return next((tensor for tensor in map(_first_tensor, parts) if tensor is not None), None)


def lockstep_of(session: Session, group: Any) -> Lockstep:
    """The session's place among the ranks of this process group."""
    place = session.lockstep
    if place is None:
        place = session.lockstep = Lockstep(session, Ranks(group))
    return cast("Lockstep", place)
