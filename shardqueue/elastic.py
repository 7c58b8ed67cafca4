"""Ranks that share out the micro-batches of each optimizer step (*elastic steps*), for any training loop.

A step has as many micro-batches for all ranks together as ever, and each rank takes the next one when it is ready. So
a step costs total work over total speed, and its gradients are those of one process that went through all of it:

    elastic = Elastic(session, model, micro_batches=32)
    for step in elastic.steps(loader):
        optimizer.zero_grad()
        for _, (inputs, targets) in step:
            loss(model(inputs), targets).backward()
        step.reduce()
        optimizer.step()
        session.step(samples=step.samples)

Which data a rank holds (claimed from the queue and loaded ahead) and how many micro-batches of the step it computes
(tokens, see `tokens`) are two things: any data makes a step. Data comes first: a rank with nothing in hand takes no
token. Who takes the next one is a policy (`turns`) that knows how fast everybody was. A rank that leaves it to
others, or has no data, looks again until all tokens of the step are taken, and only then adds up: nothing is lost.

What is added up is a header, the ranks' counts and speeds, on a group of our own, and the gradients in buckets (see
`gradients`), which begin to travel during the last micro-batch. The counts decide what to divide by, and are compared
with what the plan says.

Which micro-batches make a step differs from run to run, since it follows the ranks' speeds; the learners' logs say at
which step each was trained.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

import torch

from shardqueue.agreement import PATIENCE, SUMS, TURN, Row, world
from shardqueue.assembly import is_of_a_group
from shardqueue.batches import batch_of, batch_samples, joined, known_samples
from shardqueue.errors import AgreementError, ClosedError, InvalidInputError
from shardqueue.flags import Flags
from shardqueue.flat import broadcast_module
from shardqueue.gradients import Gradients
from shardqueue.lockstep import course_of, lockstep_of, shares
from shardqueue.replicas import refuse_model, signature
from shardqueue.stock import Stock
from shardqueue.tokens import Tokens
from shardqueue.tracking import dataset_of
from shardqueue.turns import Speeds, is_sure, turn
from shardqueue.units import check_flag, check_int

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping

    from shardqueue.dataset import SharedQueueDataset
    from shardqueue.lockstep import Course, Lockstep
    from shardqueue.progress import Agreed
    from shardqueue.session import Session

__all__ = ["Elastic", "ElasticStep"]

SOON, LATER = 0.0002, 0.005
"""Seconds between two looks of a rank that has nothing to do: at first, and at most."""


class Elastic:
    """A training process's part in elastic steps.

    Every rank of the process group makes one, with the same model; the parameters and buffers of rank 0 become
    everybody's. The model is not to be wrapped by DistributedDataParallel. The loader is a
    `DataLoader(batch_size=None)` over a `SharedQueueDataset`, whose items are the micro-batches.

    A step's gradients are those of the mean over its samples, if the loss of a micro-batch is the mean over its own:
    sum(weight x gradient) / sum(weight), with `weight` samples by default. Floating buffers become the mean over the
    micro-batches, integer ones add up.

    Args:
        session: entered; of this process.
        model: what is trained.
        micro_batches: of a step, on all ranks together; at least one a rank.
        process_group: of the ranks; None for all of `torch.distributed`'s, or for this process alone without it.
        group: micro-batches that this rank takes at once, joined into one batch, where it has the memory.
        weight: from a batch to what it counts, where that is not its number of samples: tokens, for one. Needed where
            a batch does not show its samples by the first dimension of its first tensor.
        join: from a list of batches to one, for `group`; by default tensors are put together along their first
            dimension.
        overlap: begin to add up during a rank's last backward of a step. False where a micro-batch has several.

    Raises:
        InvalidInputError: an argument is out of range, or the model communicates by itself.
        AgreementError: the ranks have other models or other settings.
    """

    session: Session

    def __init__(
        self,
        session: Session,
        model: torch.nn.Module,
        micro_batches: int,
        *,
        process_group: Any = None,
        group: int = 1,
        weight: Callable[[Any], float] | None = None,
        join: Callable[[list[Any]], Any] | None = None,
        overlap: bool = True,
    ) -> None:
        self.group: int = check_int("group", group, 1)
        self.micro_batches: int = check_int("micro_batches", micro_batches, 1)
        check_function("weight", weight)
        check_function("join", join)
        check_flag("overlap", overlap)
        refuse_model(model)
        process_group = world() if process_group is None else process_group
        self.session, self._weight, self._join = session, weight, join
        self.lockstep: Lockstep = lockstep_of(session, process_group)
        self._ranks = self.lockstep.ranks
        check_micro_batches(micro_batches, self._ranks.size)
        self.lockstep.agree({"micro_batches": micro_batches, "model": signature(model)})
        if self._ranks.size > 1:
            broadcast_module(model, process_group)
        self.gradients: Gradients = Gradients(model, process_group if self._ranks.size > 1 else None)
        if overlap:
            self.gradients.last = self._is_last
        self.tokens: Tokens | None = None
        self._step_now: ElasticStep | None = None
        self._device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self._speeds = Speeds.unknown(self._ranks.size)
        self._groups = [group] * self._ranks.size
        self._rows: list[Row] = []
        self._meanwhile = math.inf
        self._flags = Flags()

    def steps(self, loader: Iterable[Any], limit: int | None = None) -> Generator[ElasticStep]:
        """The steps of one pass over a loader's dataset. Every rank must iterate them, to the same step.

        Args:
            loader: a `DataLoader(batch_size=None)` over a `SharedQueueDataset`.
            limit: steps, at most.

        Raises:
            InvalidInputError: the number of batches is not known, or too small to give each rank one.
            AgreementError: the ranks do not agree, or one is gone.
            ClosedError: `ElasticStep.reduce` was not called for a step.
        """
        dataset = cast("SharedQueueDataset", dataset_of(loader, self.session))
        yield from self.train(dataset, loader, limit=limit)

    def train(
        self,
        dataset: SharedQueueDataset,
        loader: Iterable[Any],
        *,
        uneven: str = "repeat",
        limit: int | None = None,
        done: int = 0,
        run: str | None = None,
        settings: Mapping[str, object] | None = None,
    ) -> Generator[ElasticStep]:
        """The steps of one pass; for the arguments see `Lockstep.train`.

        With `uneven` "repeat" the last step has what is left, and nothing is repeated; "drop" leaves that out.
        """
        dataset.refuse_to_reclaim()
        each, lockstep, session = self.micro_batches, self.lockstep, self.session
        total, steps = shares(dataset, each, uneven, limit)
        own = {
            "uneven": uneven,
            "micro_batches": each,
            "limit": limit,
            "done": done,
            "total": total,
            "steps": steps,
        }
        pass_ = lockstep.begin(dataset, {**(settings or {}), **own}, run)
        course = course_of(dataset, session, each, uneven=uneven, limit=limit, done=done)
        if lockstep.is_over(dataset, pass_, course):
            return
        assert session.joined is not None
        if self.tokens is None:
            self.tokens = Tokens(self._ranks, session.joined.manifest.run_id)
        first = self._first_share(dataset, pass_, course)
        stock = Stock(session, dataset, loader, pass_, self.group)
        if not first:
            stock.go_without()  # there are fewer batches left than ranks: nobody asks for a first one
        with dataset.together():
            try:
                session.at(pass_, course.steps.start)
                begun, rows = lockstep.begin_by_speed(stock, first)
                self._rows = rows or self._ranks.begin(lockstep.row(stock)).rows()
                for number in course.steps:
                    reserved = self._ranks.size if first and number == course.steps.start else 0
                    yield from self._one_step(dataset, stock, course, number, reserved, begun)
                    begun = None
                    lockstep.check_alone(stock)
                    session.came_back()
            finally:
                stock.close()

    def close(self) -> None:
        """Take the hooks off the model."""
        self.gradients.close()

    def _first_share(self, dataset: SharedQueueDataset, pass_: str, course: Course) -> int:
        """Batches that each rank may take until every one has its first; 0 where not every rank can have one.

        Every rank has a micro-batch of a pass's first step for itself, and so knows what a step logs.
        """
        assert self.session.joined is not None
        size, plan = self._ranks.size, self.session.joined.left(dataset.plan, pass_)
        sized = plan.total is not None
        parts = course.left if sized else len(plan)
        if min(parts, course.needed(course.steps.start)) >= size:
            return max(1, course.left // size) if sized else 1
        if not course.begun:
            name = "batches" if sized else "units"
            remedy = f"make {name} smaller, so that there are more, or use fewer ranks"
            raise InvalidInputError(name, parts, f"at least {size}, one a rank", remedy)
        return 0

    def _one_step(
        self,
        dataset: SharedQueueDataset,
        stock: Stock,
        course: Course,
        number: int,
        reserved: int,
        begun: Any,
    ) -> Generator[ElasticStep]:
        lockstep, session = self.lockstep, self.session
        batches = dataset.batches or course.total
        last, whole = number == course.steps.stop - 1, course.total == batches
        stock.at_end = last and whole
        session.at(stock.pass_, number)
        states = lockstep.states(self._rows)
        agreed = lockstep.agreed = lockstep.as_agreed(dataset, stock.number, number, course, states)
        session.gave(stock.pass_, number, last)
        needed = course.needed(number)
        after = batches - course.before(number) - needed
        stock.balance(self._ranks.rank, self._speeds.seconds, needed + after)
        assert self.tokens is not None
        self.tokens.begin(stock.pass_, number, needed - reserved)
        self._meanwhile = self._most_meanwhile()
        step = self._step_now = ElasticStep(self, stock, agreed, needed, after)
        step.reserved, step.begun = bool(reserved), begun
        self.gradients.begin()
        try:
            yield step
        finally:
            self._step_now = None
        step.check_reduced()
        if last:
            lockstep.check_units(dataset, stock, course.total, self._rows)

    def _is_last(self) -> bool:
        """Whether nothing follows for this rank in the step; the store is asked only where that can be."""
        if self._step_now is None or self.tokens is None or self.tokens.seen > self._meanwhile:
            return False
        return not self.tokens.left()

    def _most_meanwhile(self) -> float:
        """Tokens that the others may take, at most, while this rank computes what it has taken."""
        seconds = self._speeds.seconds
        own = seconds[self._ranks.rank]
        others = [
            (group, one)
            for rank, (group, one) in enumerate(zip(self._groups, seconds, strict=True))
            if rank != self._ranks.rank
        ]
        if own is None or any(one is None for _, one in others):
            return math.inf
        return sum(group * (self.group * own / (one or own) + 2) for group, one in others)

    # -- for a step --------------------------------------------------------------------------------------

    def take(self, step: ElasticStep, wait: bool = True) -> list[Any]:
        """The next items of this rank, as soon as it is its turn; empty once all tokens are taken, or if not now."""
        assert self.tokens is not None
        stock, clock = step.stock, self.session.clock
        if step.reserved:
            step.reserved = False
            return [step.begun if step.begun is not None else stock.fetch_promised()]
        began = looked = clock.monotonic()
        waited, known, since, pause = 0.0, -1, began, SOON
        while self.tokens.seen:
            now, ready = clock.monotonic(), stock.in_hand
            wanted = self._wanted(step, self.tokens.seen - self._meanwhile, now) if ready else 0
            if not wanted:  # that depends on how many are left
                left = self.tokens.left()
                if not left:
                    break
                if left != known:
                    known, since = left, now
                wanted = self._wanted(step, left, now, now - since) if ready else 0
            got = self.tokens.take(min(wanted, ready))
            if got:
                self._note_wait(step, waited, now - began)
                return [stock.fetch_promised() for _ in range(got)]
            if not wait:
                break
            if wanted and ready:
                continue
            if now - began > PATIENCE and now - looked > TURN:
                looked = now
                gone = self._ranks.gone(None)
                if gone is not None:
                    raise gone
            stock.wait(pause)
            waited += 0.0 if ready else clock.monotonic() - now
            pause = min(LATER, 2 * pause)
        self._note_wait(step, waited, clock.monotonic() - began)
        return []

    def _wanted(self, step: ElasticStep, left: float, now: float, stale: float = 0.0) -> int:
        """How many tokens to take if so many are left; of a number below 1, if so many may be."""
        scarce = step.stock.assured > step.after  # then the data may end within this step
        seconds = self._speeds.seconds
        if is_sure(self._ranks.rank, seconds, self.group, scarce):
            return self.group
        if left < 1:
            return 0
        return turn(
            self._ranks.rank,
            int(left),
            seconds,
            need=step.needed,
            own=step.micro_batches,
            elapsed=now - step.began,
            stale=stale,
            groups=self._groups,
        )

    def _note_wait(self, step: ElasticStep, waited: float, idle: float) -> None:
        self.session.waited(waited)
        step.waited += waited
        step.idle += idle - waited

    def join(self, items: list[Any]) -> Any:
        """One item of those that were taken at once."""
        if len(items) == 1:
            return items[0]
        if self._join is None:
            return joined(items)
        batch = self._join([batch_of(item) for item in items])
        return batch if batch_of(items[0]) is items[0] else (items[0][0], batch)

    def weigh(self, batch: Any) -> float:
        """What a micro-batch counts, told to the gradients."""
        given = known_samples(batch) if self._weight is None else self._weight(batch)
        if given is None:
            bound = "given where a batch has no tensor to count samples by"
            raise InvalidInputError(
                "weight", type(batch).__name__, bound, "pass weight=, a function of the batch"
            )
        weight = float(given)
        self.gradients.weigh(weight)
        return weight

    def ready(self) -> None:
        """Wait until the device is done with what it was given: else the CPU would take tokens at launch speed."""
        if self._device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
            event.synchronize()

    def reduce(self, step: ElasticStep, said: Mapping[str, object]) -> list[Row]:
        """Add up the step over all ranks; leaves in `step.said` what they said."""
        ranks = self._ranks
        row = self.lockstep.row(step.stock)
        row.kind, row.step, row.group = SUMS, float(step.number), float(self.group)
        row.micro, row.weight = float(step.micro_batches), step.weight
        row.seconds = (step.seconds + step.waited) / max(1, step.micro_batches)
        row.size = float(bool(said))
        flags = self.gradients.flags
        row.flags = self._flags.digest(flags)
        header = ranks.begin(row)
        try:
            self.gradients.launch()
            rows = header.rows()
            self._check(step, rows)
            counts = [int(row.micro) for row in rows]
            weight = sum(row.weight for row in rows)
            total = self._flags.total(ranks, flags, rows)
            self.gradients.finish(total, weight, step.micro_batches, sum(counts))
        except RuntimeError as error:
            if not is_of_a_group(error):
                raise
            raise ranks.lost(error) from error
        if any(row.size for row in rows):
            step.said = ranks.gather(said)
        self._rows, self._groups = rows, [int(row.group) for row in rows]
        self._speeds = self._speeds.after(counts, [row.seconds if row.micro else None for row in rows])
        assert self.tokens is not None
        self.tokens.forget()
        self._step_now = None
        return rows

    def _check(self, step: ElasticStep, rows: list[Row]) -> None:
        """Planned and trained must agree."""
        numbers = {int(row.step) for row in rows}
        if len(numbers) > 1:
            raise AgreementError(
                f"ranks add up different steps: {sorted(numbers)}; iterate the same steps on all"
            )
        trained = sum(int(row.micro) for row in rows)
        if trained != step.needed:
            raise AgreementError(
                f"step {step.number} has {step.needed} micro-batches and {trained} were trained; "
                "take every micro-batch of a step before you call reduce"
            )


class ElasticStep:
    """One optimizer step: iterate this rank's micro-batches, then call `reduce`.

    Attributes:
        number: of the step in its pass, from 0.
        agreed: what all ranks know alike before it: `agreed.progress` sets a learning rate.
        needed, after: micro-batches of the step, and of the pass after it, on all ranks.
        micro_batches, samples, weight: of this rank, so far.
        counts: after `reduce`, the micro-batches of every rank.
        seconds: of computing, on this rank.
        waited: seconds of waiting for data while the step had something to do.
        idle: seconds in which there was nothing to do for this rank, before it could add up.
        said: after `reduce`, what each rank said; empty where nobody said anything.
    """

    stock: Stock
    agreed: Agreed
    number: int
    needed: int
    after: int
    micro_batches: int
    samples: int
    weight: float
    seconds: float
    waited: float
    idle: float

    def __init__(self, elastic: Elastic, stock: Stock, agreed: Agreed, needed: int, after: int) -> None:
        self._elastic, self.stock, self.agreed = elastic, stock, agreed
        self.number, self.needed, self.after = agreed.step, needed, after
        self.micro_batches = self.samples = 0
        self.weight = self.seconds = self.waited = self.idle = 0.0
        self.counts: list[int] = []
        self.said: list[dict[str, Any]] = []
        self.reserved = False
        self.begun: Any = None
        self.began: float = elastic.session.clock.monotonic()
        self._since: float | None = None
        self._over = self._reduced = False

    def __iter__(self) -> ElasticStep:
        return self

    def __next__(self) -> Any:
        """The next micro-batch of this rank, as its loader gives it; with `group`, up to so many of them joined.

        Raises:
            StopIteration: all micro-batches of the step are taken.
        """
        elastic = self._elastic
        if self._since is not None:
            elastic.ready()
            self.seconds += elastic.session.clock.monotonic() - self._since
            self._since = None
        if not (self.micro_batches or self._over):
            elastic.gradients.check_zeroed()
        items = [] if self._over else elastic.take(self)
        if not items:
            self._over = True
            raise StopIteration
        return self._given(items)

    def first(self) -> Any:
        """The first micro-batch of this rank, if it can have one without waiting for other ranks; else None."""
        items = self._elastic.take(self, wait=False)
        return self._given(items) if items else None

    def _given(self, items: list[Any]) -> Any:
        elastic = self._elastic
        item = elastic.join(items)
        self.micro_batches += len(items)
        self.samples += batch_samples(item)
        self.weight += elastic.weigh(batch_of(item))
        self._since = elastic.session.clock.monotonic()
        return item

    def reduce(self, said: Mapping[str, object] | None = None) -> None:
        """Give every rank the gradients of the whole step, in `.grad`. Every rank must call it.

        Args:
            said: what all ranks are to be told, JSON; then in `ElasticStep.said`.

        Raises:
            ClosedError: the step's micro-batches are not all taken, or it was called before.
            AgreementError: the ranks are at different steps, or one is gone.
        """
        if not self._over or self._reduced:
            why = "a second time" if self._reduced else "before all its micro-batches were taken"
            raise ClosedError(
                f"reduce of step {self.number} was called {why}; call it once, after that loop's end"
            )
        rows = self._elastic.reduce(self, said or {})
        self._reduced = True
        self.counts = [int(row.micro) for row in rows]

    def check_reduced(self) -> None:
        """Refuse to go on from a step whose gradients nobody has added up.

        Raises:
            ClosedError: `reduce` was not called.
        """
        if not self._reduced:
            raise ClosedError(
                f"step {self.number} is over and its gradients were not added up; call step.reduce() after the "
                "loop over its micro-batches, and before optimizer.step()"
            )


def check_micro_batches(micro_batches: int, ranks: int) -> None:
    """Refuse steps in which some rank would have nothing to do.

    Raises:
        InvalidInputError: there are fewer micro-batches than ranks.
    """
    if micro_batches < ranks:
        bound = f"at least {ranks}, one a rank; several times as many divide well among unequal ranks"
        remedy = "make batches smaller, so that a step has more of them"
        raise InvalidInputError("micro_batches", micro_batches, bound, remedy)


def check_function(name: str, function: object) -> None:
    """Refuse what cannot be called.

    Raises:
        InvalidInputError: it is neither None nor a function.
    """
    if function is not None and not callable(function):
        raise InvalidInputError(name, function, "a function of the batch, or None", "leave it out")
