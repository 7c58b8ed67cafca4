"""Shares of a pass under every order of events: what goes beyond one is given back, and reaches who waits for it.

Ranks in lockstep over one memory mailbox, one action at a time, chosen by a seed: a call takes effect, is answered or
loses its answer, a batch is loaded, handed on or trained, somebody looks for what is due, time passes. A rank is what
`supply` makes of it: the parts of a loader share its allowance through a real `Block`, the loader takes from each in
turn, and when they have nothing left the *tail* claims, and waits. Nobody begins a step before the one before it is
everybody's. Judged by value: every batch once, no rank beyond its share, and never does all of it stand still.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TYPE_CHECKING

import pytest

from shardqueue.allowance import UNLIMITED, Allowance
from shardqueue.block import WORDS, Block, Doing, iteration_key
from shardqueue.claim import Claim, Owner, State
from shardqueue.claims import Claims
from shardqueue.errors import MailboxUnavailableError
from shardqueue.mailbox.calls import PutIfAbsent
from shardqueue.mailbox.memory import MemoryMailbox
from shardqueue.plan import Plan
from shardqueue.records import RunKeys
from shardqueue.units import Unit

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardqueue.asks import Ask
    from shardqueue.mailbox.calls import Answer

STALLED = 6000
"""Events without progress that are taken for standing still."""
PREFETCH = 2
"""Batches that wait in a loader for each of its workers, and in a tail."""
PATROL = 0.02
"""Seconds between two looks of a loader's worker at the block."""


@dataclass(frozen=True)
class Job:
    """One schedule: everything follows from these values.

    Attributes:
        sizes: batches of each unit.
        known: whether the plan says them.
        shares: batches each rank may take.
        parts: workers of each rank's loader, 0 for none.
        faults: calls that lose their effect or their answer, at most.
    """

    seed: int
    sizes: tuple[int, ...]
    known: bool
    shares: tuple[int, ...]
    parts: int
    faults: int = 0

    @property
    def total(self) -> int:
        return sum(self.sizes)


def draw(seed: int, repeat: bool = True) -> Job:
    """A job of some kind; shares as `lockstep` makes them, which come to the total or, as with "drop", to less."""
    random = Random(seed)
    known = random.random() < 0.5
    sizes = [random.choice((1, 1, 2, 3, 5, 8, 13)) for _ in range(random.randint(1, 9))]
    if not known:
        sizes = [size if random.random() < 0.8 else 0 for size in sizes[1:]] + sizes[:1]
    ranks = random.randint(1, 4)
    share, more = divmod(sum(sizes), ranks)
    shares = tuple(share + (repeat and rank < more) for rank in range(ranks))
    return Job(seed, tuple(sizes), known, shares, random.randint(0, 3), random.choice((0, 0, 3, 8)))


class Machine:
    """One `Claims` and what its feed does for it."""

    def __init__(self, rank: Rank, worker: str, part: int, parts: int, waits: bool = False) -> None:
        world, keys = rank.world, RunKeys("1")
        self.rank, self.world, self.worker = rank, world, worker
        self.claims = Claims(
            *(
                world.plan,
                keys,
                keys.pass_keys(),
                Owner(f"rank-{rank.number}", f"{rank.number:012x}", worker),
            ),
            nonce=lambda: str(world.random.random()),
            random=Random(world.random.random()),
            joined_late=waits,
            part=part,
            parts=parts,
            waits=waits,
        )
        self.claims.pace.inline = rank.job.parts > 0 and not waits
        self.claims.met({(f"rank-{n}", f"{n:012x}") for n in range(len(rank.job.shares))})
        self.to_load: deque[Claim] = deque()
        self.index = 0
        self.buffer: deque[tuple[Claim, int]] = deque()
        self.queue: deque[tuple[Claim, int]] = deque()
        self.wanted = PREFETCH
        self.dirty, self.wake = True, 0.0
        self.quiet = False
        self.handed = self.committed = 0
        self.allowance: Callable[[], Allowance] = lambda: UNLIMITED
        self.patrols = self.claims.pace.inline

    @property
    def ended(self) -> bool:
        """Whether it has handed on all it will ever have."""
        return self.quiet and not (self.to_load or self.buffer)

    @property
    def has(self) -> int:
        """Batches it handed on, or could."""
        sizes, hand = self.world.job.sizes, [c for c in self.claims.hand if c.state is State.OURS]
        ends = [sizes[c.position] if c.end is None else min(sizes[c.position], c.end) for c in hand]
        return self.handed + sum(end - c.begin - c.handed for end, c in zip(ends, hand, strict=True))

    def actions(self, found: list[Callable[[], object]]) -> None:
        if not self.quiet and (self.dirty or self.wake <= self.world.now):
            found.append(self.turn)
        may_load = self.wanted > 0 and not self.buffer if self.patrols else len(self.buffer) < PREFETCH
        if self.to_load and may_load:
            found.append(self.load)
        if self.buffer and self.buffer[0][0].state is State.OURS and self.patrols and self.wanted:
            found.append(self.queue_one)

    def turn(self) -> None:
        """As the feed's driving thread."""
        self.dirty, now = False, self.world.now
        self.claims.allow(self.allowance())
        for ask in self.claims.poll(now):
            self.world.flights.append((self, ask, False, None))
        self.to_load.extend(self.claims.take_won())
        assert self.claims.asks.error is None
        self.committed = max(self.committed, self.claims.committed)
        if self.claims.exhausted and self.claims.asks.idle:
            self.quiet = True
            self.rank.went_quiet(self)
            return
        wakes = [self.claims.wake(now), now + PATROL if self.patrols else None]
        self.wake = min((wake for wake in wakes if wake is not None), default=float("inf"))

    def load(self) -> None:
        """Read on: one batch, or the end of what may be read of the unit."""
        claim = self.to_load[0]
        self.index = max(self.index, claim.begin)
        bounded = claim.bound is not None and self.index >= claim.bound
        over = bounded or self.index >= self.world.job.sizes[claim.position] or claim.is_over(self.index)
        if over:
            self.to_load.popleft()
            self.claims.loaded(claim, claim.read)
            self.index = 0
        else:
            self.buffer.append((claim, self.index))
            claim.read += 1
            self.index += 1
        self.dirty = True

    def queue_one(self) -> None:
        """A loader's worker gives a batch to the loader; nobody can take it back from there."""
        self.queue.append(self.hand_out())
        self.wanted -= 1

    def hand_out(self) -> tuple[Claim, int]:
        claim, index = self.buffer.popleft()
        self.claims.handed(claim, self.world.now)
        claim.trained += 1
        self.handed += 1
        self.claims.settle(claim)
        self.claims.pace.asked(self.world.now)
        self.dirty = True
        return claim, index


class Rank:
    """A rank's loader, and then its tail."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.job, self.number = world, world.job, number
        self.share = self.job.shares[number]
        self.taken: list[tuple[int, int]] = []
        self.cut = False
        self.block = Block(memoryview(array("q", bytes(8 * WORDS))))
        self.block.own(f"{number:012x}")
        self.word = self.block.next_word(iteration_key(number))
        self.block.expect(self.word, fresh=True)
        self.allow()
        parts = max(1, self.job.parts)
        self.loader = [Machine(self, str(part), part, parts) for part in range(parts)]
        for part, machine in enumerate(self.loader):
            self.block.join(part, iteration_key(number))
            machine.allowance = partial(self.of_part, part)
        self.rotation = deque(self.loader)
        self.tail: Machine | None = None
        self.before_tail = 0

    def allow(self) -> None:
        self.block.allowance = Allowance(self.share, cut=self.cut)

    def of_part(self, part: int) -> Allowance:
        if not self.job.parts:
            return self.block.allowance
        return self.block.allowed(self.word, part, self.job.parts)

    def of_tail(self) -> Allowance:
        return Allowance(self.share - self.before_tail, cut=self.cut)

    @property
    def machines(self) -> list[Machine]:
        return [*self.loader, *([self.tail] if self.tail else [])]

    def went_quiet(self, machine: Machine) -> None:
        if machine in self.loader:
            part = self.loader.index(machine)
            self.block.promise(part, int(machine.claims.promised))
            self.block.note(part, self.word, Doing.YIELDED if machine.claims.yielded else Doing.ENDED)

    def actions(self, found: list[Callable[[], object]]) -> None:
        for machine in self.machines:
            machine.actions(found)
        if len(self.taken) >= min(self.share, self.world.steps + 1):
            return
        if self.tail is not None:
            buffer = self.tail.buffer
            if buffer and buffer[0][0].state is State.OURS:
                found.append(partial(self.take, self.tail))
            elif not self.cut:
                found.append(self.world.cut)
            return
        machine = self.rotation[0]
        if machine.patrols:
            if machine.queue:
                found.append(partial(self.take, machine))
            elif machine.ended:
                found.append(self.leave_part)
        elif machine.buffer and machine.buffer[0][0].state is State.OURS:
            found.append(partial(self.take, machine))
        elif machine.ended:
            found.append(self.leave_part)

    def leave_part(self) -> None:
        """This worker's iterator has ended; at the last one the tail begins."""
        self.rotation.popleft()
        if not self.rotation:
            self.before_tail = len(self.taken)
            self.tail = Machine(self, "tail", 0, 1, waits=True)
            self.tail.allowance = self.of_tail

    def take(self, machine: Machine) -> None:
        """The training loop takes a batch."""
        if machine.patrols:
            claim, index = machine.queue.popleft()
            machine.wanted += 1
            self.rotation.rotate(-1)
        else:
            claim, index = machine.hand_out()
        self.taken.append((claim.position, index))
        self.world.progress()


class World:
    """All ranks, the mailbox, and the time."""

    def __init__(self, job: Job, claims: type[Claims] = Claims) -> None:
        self.job, self.random = job, Random(job.seed)
        units = {f"u{n:02d}": Unit(0, size, 0, 1) if job.known else n for n, size in enumerate(job.sizes)}
        self.plan = Plan(units)
        self.mailbox = MemoryMailbox()
        self.flights: list[tuple[Machine, Ask, bool, Answer]] = []
        self.now, self.events, self.last = 0.0, 0, 0
        self.faults = job.faults
        self.ranks = [Rank(self, number) for number in range(len(job.shares))]

    @property
    def steps(self) -> int:
        """Steps that every rank has had."""
        return min(len(rank.taken) for rank in self.ranks)

    @property
    def handed(self) -> int:
        return sum(len(rank.taken) for rank in self.ranks)

    def progress(self) -> None:
        self.last = self.events

    def cut(self) -> None:
        """A rank has nothing for this step: all are told."""
        for rank in self.ranks:
            rank.cut = True
            rank.allow()
            for machine in rank.machines:
                machine.dirty = True

    def run(self) -> World:
        due = min(self.job.total, sum(self.job.shares))
        while self.handed < due:
            found: list[Callable[[], object]] = []
            for rank in self.ranks:
                rank.actions(found)
            found += [partial(self.fly, at) for at in range(len(self.flights))]
            self.events += 1
            assert self.events - self.last < STALLED, f"{self.job} stands still: {self.state()}"
            wakes = [m.wake for rank in self.ranks for m in rank.machines if not m.quiet]
            later = min((wake for wake in wakes if self.now < wake < float("inf")), default=None)
            assert found or later is not None, f"{self.job} is stuck: {self.state()}"
            at = self.random.randrange(len(found) + (later is not None))
            if at < len(found):
                found[at]()
                self.now += self.random.choice((0.0, 0.0005, 0.01))
            else:
                assert later is not None
                self.now = later
        return self

    def fly(self, at: int) -> None:
        """A call takes effect, or its answer arrives; one of them may be lost."""
        machine, ask, done, answer = self.flights.pop(at)
        if self.faults and self.random.random() < 0.1:
            self.faults -= 1
            machine.claims.asks.failed(ask, MailboxUnavailableError("made up by the schedule"), self.now)
        elif not done:
            self.flights.append((machine, ask, True, ask.call.perform(self.mailbox)))
            return
        else:
            machine.claims.asks.answered(ask, answer, self.now)
            if isinstance(ask.call, PutIfAbsent):
                self.progress()
        machine.dirty = True

    def state(self) -> list[str]:
        return [
            f"rank {rank.number}: {len(rank.taken)} of {rank.share}, cut {rank.cut}, "
            + "; ".join(
                f"{m.worker}: quiet {m.quiet}, promised {m.claims.promised:g}, queue {len(m.queue)}, hand "
                + str([(c.position, c.attempt, c.begin, c.end, c.read, c.state.value) for c in m.claims.hand])
                for m in rank.machines
            )
            for rank in self.ranks
        ]


def play(job: Job) -> World:
    """Run a job, and judge it."""
    world = World(job).run()
    taken = Counter(batch for rank in world.ranks for batch in rank.taken)
    assert taken <= Counter((unit, index) for unit, size in enumerate(job.sizes) for index in range(size)), (
        job
    )
    assert taken.total() == min(job.total, sum(job.shares)), job
    for rank in world.ranks:
        assert len(rank.taken) <= rank.share, job
        for machine in rank.machines:
            assert machine.claims.promised <= rank.share, job
            assert machine.committed <= machine.has, f"{job}: batches were promised that do not exist"
    return world


def test_every_batch_once_within_the_shares_and_nothing_stands_still() -> None:
    for seed in range(200):
        play(draw(seed))


def test_with_shares_that_leave_some_out_nobody_gets_more() -> None:
    for seed in range(1000, 1050):
        play(draw(seed, repeat=False))


@pytest.mark.full
@pytest.mark.parametrize("part", range(10))
def test_many_more_jobs(part: int) -> None:
    for seed in range(10_000 * (part + 1), 10_000 * (part + 1) + 500):
        play(draw(seed, repeat=seed % 3 > 0))
