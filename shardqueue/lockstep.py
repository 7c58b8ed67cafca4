"""Ranks that step together, as DistributedDataParallel needs it (*lockstep*): each gets as many batches.

Of the N batches of a pass each of W ranks is allowed N // W, and the first N mod W of them one more. It claims them
from the queue like any learner, and gives back what it claimed beyond that (see `allowance`), for others to take. So
all come to the last step, where up to W - 1 ranks have none and get their last batch again. The ranks agree, a step
ahead, that everyone has its batch, or on who has not; an agreement covers as many steps as every rank is certain of a
batch for. Where a rank cannot tell yet that it will have one, as long as others have to give back what they may not
take, the ranks go round until it has.

The same numbers say how far everybody is, which sets the learning rate (`Agreed.progress`), and who is how fast.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from shardqueue.agreement import Ranks, Row
from shardqueue.allowance import UNLIMITED, Allowance
from shardqueue.assembly import Assembly
from shardqueue.batches import batch_samples
from shardqueue.errors import AgreementError, InvalidInputError, ShardQueueWarning
from shardqueue.progress import Agreed, RankState
from shardqueue.supply import Supply

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Mapping

    from shardqueue.agreement import Agreement
    from shardqueue.dataset import SharedQueueDataset
    from shardqueue.session import Session

T = TypeVar("T")

logger = logging.getLogger("shardqueue")

SOON, LATER = 0.001, 0.05
"""Seconds between two rounds: at first, and at most."""
HORIZON = 16
"""Steps that one agreement may cover, at most."""
SIZES_DIFFER = 1.5
"""Ratio of the largest to the smallest batch of a step from which averaging by rank is misleading."""


class Lockstep(Assembly):
    """A training process's place among the ranks that step together.

    Attributes:
        repeating: whether that batch is one this rank had before.
        repeated: batches handed out again so far, on all ranks.
    """

    agreed: Agreed | None
    repeating: bool
    repeated: int

    def __init__(self, session: Session, ranks: Ranks, closes: bool = True) -> None:
        super().__init__(session, ranks, closes)
        self.repeating, self.repeated = False, 0
        self._told_sizes = False
        self._sizes: Counter[int] = Counter()

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
        pass_ = self.begin(dataset, {**(settings or {}), **own}, run)
        course = course_of(dataset, self.session, size, uneven=uneven, limit=limit, done=done)
        if self.is_over(dataset, pass_, course):
            return
        share = Allowance(course.left).part(self.ranks.rank, size)
        self.session.allow(pass_, share)
        supply = self.supplies[dataset.stage] = Supply(self.session, dataset, loader, pass_, share.batches)
        with dataset.together():
            yield from self._steps(supply, dataset, course)

    @staticmethod
    def is_over(dataset: SharedQueueDataset, pass_: str, course: Course) -> bool:
        """Whether nothing is left of the pass that would be iterated next; then it counts as iterated."""
        if not course.steps:
            logger.info("pass %s: nothing is left of it", pass_ or "0")
            dataset.pass_over()
        return not course.steps

    def _steps(self, supply: Supply, dataset: SharedQueueDataset, course: Course) -> Iterator[Any]:
        size, steps, last = self.ranks.size, course.steps, None
        if not dataset.stage:
            self._sizes.clear()
        asked = steps.start
        try:
            agreement = self.ranks.begin(self.row(supply))
            for step in steps:
                supply.at_end = step == steps.stop - 1
                needed = course.needed(step)
                if not dataset.stage:
                    self.session.at(supply.pass_, step)
                if step == asked:
                    item, rows = self._next(supply, agreement, needed)
                    asked = step + _certain(rows, steps.stop - 1 - step)
                    states = self.states(rows)
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
                    self.agreed = self.as_agreed(dataset, supply.number, step, course, states)
                    self.session.gave(supply.pass_, step, supply.at_end)
                if supply.at_end:
                    self._tell_repeats(supply, size - needed)
                elif step + 1 == asked:
                    agreement = self.ranks.begin(self.row(supply))
                yield item
                self.check_alone(supply)
                self.session.came_back()
        finally:
            supply.close()

    def _look_at(self, dataset: SharedQueueDataset, supply: Supply, total: int, rows: list[Row]) -> None:
        """Say what the numbers of a step of training show."""
        if not dataset.stage:
            self._compare_sizes(rows)
            self.check_units(dataset, supply, total, rows)

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
            return self.go_round(supply, needed)
        return (supply.fetch_promised() if rows[self.ranks.rank].has else None), rows

    def go_round(self, supply: Supply, needed: int, settled: bool = False) -> tuple[Any, list[Row]]:
        """Ask round after round until enough ranks have a batch (and, `settled`, nothing is under way)."""
        item, pause = None, SOON
        mark: tuple[float, int] | None = None
        gave_up = False
        while True:
            if item is None:
                item = supply.fetch(wait=False)
            row = self.row(supply)
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

    def row(self, supply: Supply) -> Row:
        """What this rank says of itself."""
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

    def as_agreed(
        self,
        dataset: SharedQueueDataset,
        number: int,
        step: int,
        course: Course,
        states: tuple[RankState, ...],
    ) -> Agreed:
        """What all ranks know alike before a step."""
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
            each=course.each,
        )

    def check_units(self, dataset: SharedQueueDataset, supply: Supply, total: int, rows: list[Row]) -> None:
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
        pass_ = self.begin(dataset, {**(settings or {}), "total": dataset.batches}, run)
        first = first_share(dataset, self.ranks.size) if self.ranks.size > 1 else 0
        supply = Supply(self.session, dataset, loader, pass_, None)
        self.repeating, given = False, 0
        with dataset.together():
            try:
                item, _ = self.begin_by_speed(supply, first)
                if item is None:
                    item = supply.fetch(wait=True)
                while item is not None:
                    given += 1
                    supply.at_end = given == dataset.batches  # who had all of them is not asked for more
                    yield item
                    self.check_alone(supply)
                    self.session.came_back()
                    item = supply.fetch(wait=True)
                supply.at_end = True
            finally:
                supply.close()

    def begin_by_speed(self, supply: Supply, first: int) -> tuple[Any, list[Row]]:
        """Our first item, once every rank has one, of at most `first` batches each; then all may be taken.

        None where `first` is 0: not every rank can have one.
        """
        self.session.allow(supply.pass_, Allowance(first, final=False) if first else UNLIMITED)
        self.supplies[supply.stage] = supply
        begun, rows = self.go_round(supply, self.ranks.size, settled=True) if first else (None, [])
        self.session.allow(supply.pass_, UNLIMITED)
        supply.lift()
        return begun, rows


@dataclass(frozen=True, slots=True)
class Course:
    """What ranks have before them in a pass.

    Attributes:
        each: batches of a step, on all ranks; the last one may have fewer.
        begun: batches of the pass that were trained before.
        left: batches to come.
        steps: their numbers.
    """

    each: int
    begun: int
    left: int
    steps: range

    @property
    def total(self) -> int:
        """Batches of the pass."""
        return self.begun + self.left

    def before(self, step: int) -> int:
        """Batches before a step."""
        return self.begun + (step - self.steps.start) * self.each

    def needed(self, step: int) -> int:
        """Batches of a step."""
        return min(self.each, self.total - self.before(step))


def course_of(
    dataset: SharedQueueDataset,
    session: Session,
    each: int,
    *,
    uneven: str = "repeat",
    limit: int | None = None,
    done: int = 0,
) -> Course:
    """What is left of a pass, in steps of `each` batches; see `Lockstep.train`."""
    before = dataset.trained_before(session, dataset.next_pass)
    if before:
        rest = None if limit is None else max(0, limit - done)
        left, steps = shares(dataset, each, uneven, rest, before)
        return Course(each, before, left, range(done, done + steps))
    total, steps = shares(dataset, each, uneven, limit)
    return Course(each, done * each, max(0, total - done * each), range(done, steps))


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
    dataset: SharedQueueDataset, each: int, uneven: str, limit: int | None = None, before: int = 0
) -> tuple[int, int]:
    """(batches, steps) that are left of a pass, of which `before` batches were trained, in steps of `each` batches.

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
    steps = batches // each if uneven == "drop" else -(-batches // each)
    if not steps and not before:
        remedy = 'make batches smaller, or pass uneven="repeat"'
        raise InvalidInputError(
            "batches", batches, f'at least {each}, one a rank, with uneven="drop"', remedy
        )
    if limit is not None:
        steps = min(steps, limit)
    return min(batches, steps * each), steps


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


def lockstep_of(session: Session, group: Any) -> Lockstep:
    """The session's place among the ranks of this process group."""
    place = session.lockstep
    if place is None:
        place = session.lockstep = Lockstep(session, Ranks(group))
    elif not isinstance(place, Lockstep) or place.ranks.group is not group:
        bound = "the one that this session's ranks have stepped together in"
        raise InvalidInputError("group", group, bound, "enter another Session for another group")
    return place
