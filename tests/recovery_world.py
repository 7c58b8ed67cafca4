"""The world of `claims_world` where learners are paused, the store is out, and units are handed out again.

Here a log is written as the library does it: a page at a time, by calls that may fail or land late, while the learner
runs and the store answers. Before each batch a learner asks its guard. It may have a loader of two workers, whose
batches are taken in turn; they claim, and at the end the learner itself goes on claiming and waits for others.
Whoever left may come back under its name.

A batch may be trained twice only if others had ended the attempt, at what its owner's log showed in time. After an
attempt was ended its owner trains one more batch of it at most, the one in its hands.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from claims_world import PLANS, Flight, Learner, Rules, Scenario, ViolationError, World, batches_of

from shardqueue.claim import Claim, Owner
from shardqueue.errors import MailboxUnavailableError, RunFinishedError
from shardqueue.guard import Guard
from shardqueue.learner import log_pauses
from shardqueue.mailbox.calls import Get, PutIfAbsent
from shardqueue.mailbox.memory import MemoryMailbox
from shardqueue.records import BackRecord, ClaimRecord, LogPage
from shardqueue.recovery import Recovery
from shardqueue.units import Step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardqueue.claims import Claims
    from shardqueue.mailbox.calls import Call
    from shardqueue.run import Joined

    Action = Callable[[], object]

LANDS = 0.5
"""Seconds within which the write of a page ends that is due."""
ENDS = 1.0
"""Seconds within which any other call ends, and a learner that runs does what it was woken for."""
FAREWELL = 10.0
"""Seconds for which a learner tries to write its last log."""
LIVELOCK = 12000
"""Events without any progress that are taken for a livelock: a pause may be long."""
TROUBLE = 15.0
"""Seconds by which pauses and outages are measured, and of silence after which units are handed out again."""
GIVEN_UP = ("silent", "gone", "left")
"""Why attempts are ended by others than their owner."""


@dataclass(frozen=True)
class Ordeal(Scenario):
    """What else happens.

    Attributes:
        reclaim: seconds of silence after which a learner's units are handed out again; None for never.
        pauses, outages: how many there are, at most; each lasts from a fifth of `TROUBLE` to three times it.
        torn: how many writes of a log end unclear, at most; half of those that did not take effect do so later.
        slow: the share of batches that take their time, up to `longest` seconds.
        loaders: how many learners have a loader of two workers.
        returns: how many come back of those who left or were killed.
        named: everybody names the run, so that all are in one.
    """

    reclaim: float | None = TROUBLE
    pauses: int = 0
    outages: int = 0
    torn: int = 0
    slow: float = 0.1
    longest: float = 30.0
    loaders: int = 0
    returns: int = 0
    named: bool = True


@dataclass(frozen=True)
class RecoveryRules(Rules):
    """What further mutants replace.

    Attributes:
        recovery: the class of what finds out who is silent.
        guard: the class of what tells whether a batch is still ours.
        refreshes: the learner's own log is written while it trains.
        waits: whether workers wait for others' units.
    """

    recovery: type[Recovery] = Recovery
    guard: type[Guard] = Guard
    refreshes: bool = True
    waits: bool = False


@dataclass(eq=False)
class Writing:
    """The pages of one write of a log: the first is under way."""

    pages: deque[LogPage]
    snapshot: float
    sent: float
    landed: bool = False


@dataclass(eq=False)
class Trainer(Learner):
    """A learner with its log, its pauses and, maybe, its workers; or (`boss`) one of those workers."""

    boss: Trainer | None = None
    workers: list[Trainer] = field(default_factory=list)
    following: int = 0
    source: Trainer | None = None
    paused_until: float = 0.0
    busy_until: float = 0.0
    log_pauses: Iterator[float] = field(default_factory=lambda: iter(()))
    writing: Writing | None = None
    landed: float = 0.0
    guard: Guard | None = None
    leave_by: float | None = None

    @property
    def head(self) -> Trainer:
        """Who trains what this one claims."""
        return self.boss or self

    @property
    def over(self) -> bool:
        """Nothing will come from it any more."""
        return not (self.here or self.to_load or self.buffer)


class OutError(Exception):
    """The store is out; whoever needs it has to wait."""


class Reachable(MemoryMailbox):
    """The world's mailbox, while it is not out."""

    def __init__(self, world: RecoveryWorld) -> None:
        super().__init__()
        self._world = world

    def get(self, key: str) -> bytes | None:
        if self._world.out:
            raise OutError
        return self._world.mailbox.get(key)


@dataclass(frozen=True)
class Reclaim:
    """An attempt that was ended by others: why, whether its owner had any log, and whether one named the attempt."""

    why: str
    logged: bool
    named: bool


class RecoveryWorld(World):
    """All of `World`, and pauses, outages, logs that take time, and units that are handed out again."""

    learner = Trainer
    stalled = LIVELOCK
    scenario: Ordeal
    rules: RecoveryRules

    def __init__(self, scenario: Ordeal, rules: RecoveryRules) -> None:
        self.wanted = "1" if scenario.named else None
        self.every = TROUBLE / 3
        self.pauses, self.outages, self.torn = scenario.pauses, scenario.outages, scenario.torn
        self.loaders, self.returns = scenario.loaders, scenario.returns
        self.returning: str | None = None
        self.gone: list[Trainer] = []
        self.out_until = 0.0
        self.outs: list[tuple[float, float]] = []
        self.reclaims: list[Reclaim] = []
        self.repeated = 0
        self.trained_by: dict[tuple[str, str, int], list[tuple[int, Trainer]]] = {}
        self.ends: dict[tuple[str, str, int], int] = {}
        self.pages: dict[str, list[tuple[float, LogPage]]] = {}
        self.read_at: dict[tuple[Trainer, str], float] = {}
        self.blind: dict[str, int] = {}
        super().__init__(scenario, rules, PLANS[scenario.shape])

    # -- who is there ------------------------------------------------------------------------------------

    @property
    def heads(self) -> list[Trainer]:
        return [one for one in self.everybody if one.boss is None]

    @property
    def everybody(self) -> list[Trainer]:
        return [one for one in self.learners if isinstance(one, Trainer)]

    def monotonic(self) -> float:
        """The world is the clock of its guards."""
        return self.now

    def wall(self) -> float:
        return self.now

    def paused(self, one: Trainer) -> bool:
        return self.now < one.head.paused_until

    @property
    def out(self) -> bool:
        return self.now < self.out_until

    def name(self, number: int) -> Owner:
        owner = super().name(number)
        return owner if self.returning is None else Owner(self.returning, owner.instance)

    def come_back(self, one: Trainer) -> None:
        self.gone.remove(one)
        self.returns -= 1
        self.returning = one.owner.learner
        self.join()
        self.returning = None

    @property
    def waiting(self) -> dict[str, object]:
        """What makes a claiming machine wait for others."""
        return {"reclaim_after": self.scenario.reclaim, "seen": self.seen}

    def claiming(self, one: Learner, joined: Joined, **further: object) -> Claims:
        claims = super().claiming(one, joined, **further)
        if claims.recovery is not None and self.rules.recovery is not Recovery:
            claims.recovery.__class__ = self.rules.recovery
        return claims

    def begin(self, one: Learner) -> None:
        assert isinstance(one, Trainer)
        joined = one.opening.joined
        assert joined is not None
        one.book.run_id, one.book.every = joined.manifest.run_id, self.every
        one.phase, one.dirty, one.log_due, one.wake = "running", True, self.now, None
        one.log_pauses, one.landed = log_pauses(self.every), self.now
        if self.scenario.reclaim is not None:
            one.guard = self.rules.guard(
                one.owner.learner,
                Reachable(self),
                joined.keys,
                self.scenario.reclaim,
                lambda: one.landed,
                self,
            )
        self.trained.setdefault(joined.keys.run, Counter())
        self.progress = self.events
        if not self.loaders:
            one.claims = self.claiming(one, joined, **self.waiting)
            return
        self.loaders -= 1
        for part in range(2):
            owner = Owner(one.owner.learner, one.owner.instance, str(part))
            number = len(self.learners)
            worker = Trainer(number, owner, one.plan, one.random, one.book, one.opening, boss=one)
            waits = self.waiting if self.rules.waits else {}
            worker.claims = self.claiming(worker, joined, part=part, parts=2, **waits)
            worker.phase = "running"
            one.workers.append(worker)
            self.learners.append(worker)

    def begin_tail(self, one: Trainer) -> None:
        """The workers are through: the learner itself claims, and waits for others."""
        joined = one.opening.joined
        assert joined is not None
        one.claims = self.claiming(one, joined, **self.waiting)
        one.dirty = True
        self.progress = self.events

    # -- what may come next ------------------------------------------------------------------------------

    def next_wake(self) -> float | None:
        times, bounds = [self.out_until], []
        for one in self.everybody:
            if not one.here:
                continue
            if self.paused(one):
                times.append(one.head.paused_until)
                continue
            times += [time for time in (one.wake, one.log_due) if time is not None]
            times += [one.busy_until] if one.running is not None else []
            bounds += [flight.sent + ENDS for flight in one.flights]
            bounds += [one.turned + ENDS] if self.turns(one) else []
            if one.writing is not None:
                bounds.append(one.writing.sent + LANDS)
            elif one.log_due is not None:
                bounds.append(one.log_due + LANDS)
        later = min((time for time in times if time > self.now), default=None)
        return None if later is None or later > min(bounds, default=later) else later

    def actions(self) -> list[Action]:
        found = super().actions()
        if self.outages and not self.out and found and self.random.random() < 0.003:
            found.append(self.go_out)
        for one in self.gone if self.returns else ():
            if not found or self.random.random() < 0.01:
                found.append(partial(self.come_back, one))
        return found

    def turns(self, one: Learner) -> bool:
        assert isinstance(one, Trainer)
        waits_for_workers = one.workers and one.claims is None
        return super().turns(one) and not self.paused(one) and not waits_for_workers

    def flight_actions(self, found: list[Action], one: Learner, flight: Flight) -> None:
        assert isinstance(one, Trainer)
        paused = one.here and self.paused(one)
        if flight.done:
            if not paused:
                found.append(lambda: self.deliver(one, flight))
        elif not self.out:
            found.append(lambda: self.effect(one, flight))
        if one.here and not paused and (self.out or (self.faults and self.random.random() < 0.06)):
            found.append(lambda: self.lose(one, flight))

    def learner_actions(self, found: list[Action], one: Learner) -> None:
        assert isinstance(one, Trainer)
        if one.boss is None and one.writing is not None and not one.writing.landed and not self.out:
            found.append(lambda: self.land_page(one))
        if self.paused(one):
            return
        if self.turns(one):
            found.append(lambda: self.turn(one))
        if one.phase == "running" and one.to_load:
            found.append(lambda: self.load(one))
        if one.boss is None:
            self.head_actions(found, one)

    def head_actions(self, found: list[Action], one: Trainer) -> None:
        self.log_actions(found, one)
        if one.phase == "running" and one.running is None:
            source = self.upcoming(one)
            if source is not None and source.buffer and self.rules.hands(source.buffer[0][0]):
                found.append(lambda: self.hand_on(one, source))
        if one.running is not None and one.busy_until <= self.now:
            found.append(lambda: self.train(one))
        if one.workers and one.claims is None and all(w.over for w in one.workers) and one.running is None:
            found.append(lambda: self.begin_tail(one))
        if one.phase == "running" and self.leaves and not one.workers and self.random.random() < 0.03:
            found.append(lambda: self.leave(one))
        if self.crashes and self.random.random() < 0.01:
            found.append(lambda: self.crash(one))
        if self.pauses and self.random.random() < 0.01:
            found.append(lambda: self.pause(one))

    def log_actions(self, found: list[Action], one: Trainer) -> None:
        due = one.log_due is not None and one.log_due <= self.now
        if one.writing is None and (due or one.phase == "saying so"):
            found.append(lambda: self.write(one))
        if one.writing is not None and one.writing.landed:
            found.append(lambda: self.wrote(one))
        unclear = self.out or (self.torn > 0 and self.random.random() < 0.2)
        if one.writing is not None and unclear:
            found.append(lambda: self.fail_to_write(one))

    def upcoming(self, one: Trainer) -> Trainer | None:
        """Whose batch the loop takes next: with a loader, its workers' in turn."""
        if not one.workers or one.claims is not None:
            return one
        for _ in one.workers:
            worker = one.workers[one.following % len(one.workers)]
            if not worker.over:
                return worker
            one.following += 1
        return None

    # -- pauses and outages ------------------------------------------------------------------------------

    def pause(self, one: Trainer) -> None:
        self.pauses -= 1
        one.paused_until = self.now + TROUBLE * self.random.uniform(0.2, 3.0)
        self.progress = self.events

    def go_out(self) -> None:
        self.outages -= 1
        self.out_until = self.now + TROUBLE * self.random.uniform(0.2, 3.0)
        self.outs.append((self.now, self.out_until))
        self.progress = self.events

    def lose(self, one: Learner, flight: Flight) -> None:
        if not self.out:
            super().lose(one, flight)
            return
        self.fail(one, flight, MailboxUnavailableError("out"))

    def fail(self, one: Learner, flight: Flight, error: MailboxUnavailableError) -> None:
        insisted = isinstance(flight.call, PutIfAbsent) and flight.ask is None
        if insisted and self.scenario.reclaim is not None and self.random.random() < 0.3:
            one.flights.remove(flight)
            one.dirty = True
        else:
            super().fail(one, flight, error)

    # -- the log -----------------------------------------------------------------------------------------

    def write(self, one: Trainer) -> None:
        one.log_due = None
        if not self.rules.refreshes and one.logs and one.phase == "running":
            one.log_due = self.now + next(one.log_pauses)
            return
        one.writing = Writing(deque(one.book.pages(self.now, self.now, 0.0)), self.now, self.now)

    def land_page(self, one: Trainer) -> None:
        assert one.writing is not None
        page = one.writing.pages[0]
        self.put_page(one, page)
        one.writing.landed = True

    def put_page(self, one: Trainer, page: LogPage) -> None:
        assert one.opening.joined is not None
        key = one.opening.joined.keys.log(page.learner, page.instance, page.process, page.page)
        self.mailbox.put(key, page.encode())
        self.pages.setdefault(one.owner.instance, []).append((self.now, page))

    def wrote(self, one: Trainer) -> None:
        writing = one.writing
        assert writing is not None
        one.book.wrote(writing.pages.popleft(), clear=True)
        one.logs += 1
        if writing.pages:
            writing.landed, writing.sent = False, self.now
            return
        if one.guard is not None:
            one.guard.landed_after(writing.snapshot - one.landed, one.book.held)
        one.landed = writing.snapshot
        self.written(one, clear=True)

    def fail_to_write(self, one: Trainer) -> None:
        writing = one.writing
        assert writing is not None
        self.torn -= not self.out
        page = writing.pages[0]
        one.book.wrote(page, clear=False)
        if not writing.landed and self.random.random() < 0.5:
            self.strays.append(partial(self.put_page, one, page))
        self.written(one, clear=False)

    def written(self, one: Trainer, *, clear: bool) -> None:
        one.writing = None
        for seat in (one, *one.workers):
            seat.dirty = True
        if one.phase == "saying so":
            if clear or (one.leave_by is not None and self.now > one.leave_by):
                self.end(one)
            else:
                one.log_due = self.now + 0.5
                one.leave_by = one.leave_by or self.now + FAREWELL
        else:
            one.log_due = self.now + next(one.log_pauses)

    def end(self, one: Trainer) -> None:
        one.phase, one.log_due = "ended", None
        if one.book.left == "early":
            self.gone.append(one)
        self.progress = self.events

    # -- what a learner does -----------------------------------------------------------------------------

    def turn(self, one: Learner) -> None:
        assert isinstance(one, Trainer)
        if one.claims is not None:
            guard = one.head.guard
            one.claims.on_hold = guard is not None and guard.late
        super().turn(one)

    def proven(self, one: Learner, claim: Claim) -> None:
        super().proven(one, claim)
        assert isinstance(one, Trainer)
        if one.head.guard is not None:
            one.head.guard.claimed(("", claim.identifier, claim.attempt))
        self.settle(one, claim)

    def settle(self, one: Learner, claim: Claim) -> None:
        assert one.claims is not None
        if claim.finished:
            one.claims.settle(claim)
            self.release(one, claim, claim.begin + int(claim.size))

    def release(self, one: Learner, claim: Claim, whole_at: int | None = None) -> None:
        assert isinstance(one, Trainer)
        attempt = "", claim.identifier, claim.attempt
        one.book.release(attempt, whole_at, self.now)
        if one.head.guard is not None:
            one.head.guard.released(attempt)

    def finish(self, one: Learner) -> None:
        assert isinstance(one, Trainer)
        if one.boss is not None:
            one.phase = "ended"
        else:
            one.book.left, one.phase, one.log_due = "end", "saying so", self.now

    def load(self, one: Learner) -> None:
        claim = one.to_load[0]
        super().load(one)
        if claim.loaded:
            self.settle(one, claim)

    def effect(self, one: Learner, flight: Flight) -> None:
        super().effect(one, flight)
        assert isinstance(one, Trainer)
        if one.claims is not None and isinstance(flight.call, Get):
            log = one.claims.run.parse_log(flight.call.key)
            if log is not None:
                self.read_at[one, log[1]] = self.now

    def deliver(self, one: Learner, flight: Flight) -> None:
        super().deliver(one, flight)
        assert isinstance(one, Trainer)
        if one.here and one.boss is None and one.claims is not None:
            # Of what a worker claims its learner hears a little later.
            for claim in one.claims.take_proven():
                self.proven(one, claim)

    def still_ours(self, one: Trainer, claim: Claim, index: int) -> bool:
        """As the loop asks before it takes a batch; an attempt that others ended is forgotten."""
        if one.guard is None:
            return True
        try:
            ours = one.guard.owns(Step(0, claim.identifier, claim.attempt, index))
        except OutError:
            return False
        if not ours:
            self.revoke(one, claim)
        return ours

    def revoke(self, one: Trainer, claim: Claim) -> None:
        for seat in (one, *one.workers):
            if seat.claims is not None and claim in seat.claims.hand:
                seat.claims.revoke(claim)
                if seat.to_load and seat.to_load[0] is claim:
                    seat.given = 0
                seat.to_load = deque(other for other in seat.to_load if other is not claim)
                seat.buffer = deque(batch for batch in seat.buffer if batch[0] is not claim)
                seat.dirty = True
        self.release(one, claim)

    def hand_on(self, one: Trainer, source: Trainer) -> None:
        assert source.claims is not None
        claim, index = source.buffer[0]
        if not self.still_ours(one, claim, index):
            return
        self.check_handed(source.claims.keys.back(claim.identifier, claim.attempt), index)
        super().hand(source)
        one.running, source.running = source.running, None
        one.running = claim, index
        one.source = source
        one.following += 1
        slow = self.random.random() < self.scenario.slow
        one.busy_until = self.now + self.scenario.longest * self.random.random() if slow else self.now

    def train(self, one: Learner) -> None:
        assert isinstance(one, Trainer)
        assert one.running is not None
        source = one.source
        assert source is not None
        assert source.claims is not None
        (claim, index), one.running, one.source = one.running, None, None
        one.dirty = source.dirty = True
        run, unit, attempt = source.claims.run.run, claim.identifier, claim.attempt
        self.trained[run][unit, index] += 1
        others = self.trained_by.setdefault((run, unit, index), [])
        for other, _ in others:
            self.check_repeat(source.claims, unit, index, {other, attempt})
        others.append((attempt, one))
        self.ends[run, unit, attempt] = max(index + 1, self.ends.get((run, unit, attempt), 0))
        source.claims.pace.asked(self.now)
        claim.trained += 1
        one.book.train(1, self.now)
        self.settle(source, claim)
        self.progress = self.events

    def crash(self, one: Learner) -> None:
        assert isinstance(one, Trainer)
        super().crash(one)
        for worker in one.workers:
            worker.phase = "crashed"
            worker.flights = []
            worker.to_load.clear()
            worker.buffer.clear()
        if one.writing is not None and not one.writing.landed and self.random.random() < 0.5:
            self.strays.append(partial(self.put_page, one, one.writing.pages[0]))
        one.writing = None
        self.gone.append(one)

    def leave_further(self, one: Learner) -> None:
        super().leave_further(one)
        if one.phase == "saying so":
            assert isinstance(one, Trainer)
            assert one.claims is not None
            for claim in one.claims.returnable:
                self.release(one, claim)
            one.log_due = self.now

    # -- what must hold ----------------------------------------------------------------------------------

    def check_asked(self, one: Learner, call: Call) -> None:
        assert isinstance(one, Trainer)
        known = set(one.puts)
        super().check_asked(one, call)
        for key in one.puts.keys() - known:
            if "~" not in key and one.head.guard is not None and one.head.guard.late:
                raise ViolationError(f"{one.owner.learner} claims {key} though its log is late")
        if one.claims is not None and isinstance(call, PutIfAbsent):
            ended = one.claims.keys.parse_back(call.key)
            record = None if ended is None else BackRecord.decode(call.data, call.key)
            if ended is not None and record is not None and record.why in GIVEN_UP:
                self.check_reclaim(one, *ended, record)

    def check_reclaim(self, one: Trainer, unit: str, attempt: int, record: BackRecord) -> None:
        """Whoever is given up was silent, gone or had left, and goes on where its log says it came to."""
        assert one.claims is not None
        key = one.claims.keys.claim(unit, attempt)
        instance = ClaimRecord.decode(self.mailbox.get(key) or b"", key).instance
        owner = next(head for head in self.heads if head.owner.instance == instance)
        logged = [page for _, page in self.pages.get(instance, [])]
        named = any((held.unit, held.attempt) == (unit, attempt) for page in logged for held in page.held)
        self.reclaims.append(Reclaim(record.why, bool(logged), named))
        what = f"{one.owner.learner} ended {unit}~{attempt} of {owner.owner.learner} ({record.why})"
        run = one.claims.run.run
        before = self.mailbox.get(one.claims.keys.back(unit, attempt - 1)) if attempt else None
        begun = 0 if before is None else BackRecord.decode(before, key).begin
        if record.begin > max(begun, self.ends.get((run, unit, attempt), 0)):
            raise ViolationError(f"{what} at {record.begin}, beyond what was trained")
        read = self.read_at.get((one, instance), self.now)
        landed = [(at, page) for at, page in self.pages.get(instance, []) if at <= read - 2 * ENDS]
        spans = [span for _, page in landed for span in page.trained]
        shown = [span.end for span in spans if (span.unit, span.attempt) == (unit, attempt)]
        if record.begin < max(shown, default=0):
            raise ViolationError(f"{what} at {record.begin}, before what its log had shown")
        if record.why == "gone" and owner.here:
            raise ViolationError(f"{what}, and its process runs")
        if record.why == "left" and owner is not one and owner.here:
            raise ViolationError(f"{what}, and it has not left")
        if record.why == "silent":
            last = newest_at(landed)
            out = sum(max(0.0, min(end, self.now) - max(start, last)) for start, end in self.outs)
            if self.now - last - out < self.every * 1.5:
                raise ViolationError(
                    f"{what}, which could not write for {out:.1f} s and was silent for {self.now - last:.1f}"
                )

    def check_handed(self, back: str, index: int) -> None:
        data = self.mailbox.get(back)
        record = None if data is None else BackRecord.decode(data, back)
        if record is not None and record.why in GIVEN_UP and index >= record.begin:
            self.blind[back] = self.blind.get(back, 0) + 1
            if self.blind[back] > 1:
                raise ViolationError(f"{back} ended it at {record.begin}, and its owner went on to {index}")

    def check_repeat(self, claims: Claims, unit: str, index: int, attempts: set[int]) -> None:
        """Others had ended the first of two attempts before this batch."""
        key = claims.keys.back(unit, min(attempts))
        data = self.mailbox.get(key)
        record = None if data is None else BackRecord.decode(data, key)
        if len(attempts) == 1 or record is None or record.why not in GIVEN_UP or record.begin > index:
            raise ViolationError(f"{unit}[{index}] was trained twice, in attempts {attempts}")
        self.repeated += 1

    def judge(self) -> None:
        for one in self.heads:
            if one.error is not None and not isinstance(one.error, RunFinishedError):
                raise ViolationError(f"{one.owner.learner} ended by {type(one.error).__name__}: {one.error}")
            if one.here:
                raise ViolationError(f"{one.owner.learner} never ends: {one.phase}, wake {one.wake}")
        for run, trained in self.trained.items():
            there = [one for one in self.heads if one.opening.joined and one.opening.joined.keys.run == run]
            claiming = [one for one in self.learners if one.claims is not None and one.claims.run.run == run]
            if self.scenario.reclaim is None:
                self.judge_run(run, trained, claiming)
            elif any(one.book.left == "end" for one in there):
                self.judge_whole(run, there)

    def given_back(self, one: Trainer) -> dict[str, int]:
        """Up to which batch of each unit owners themselves said that it is trained, when they gave it back."""
        joined = one.opening.joined
        assert joined is not None
        keys = joined.keys.pass_keys()
        found: dict[str, int] = {}
        for key in self.mailbox.list(keys.backs):
            parsed, record = keys.parse_back(key), BackRecord.decode(self.mailbox.get(key) or b"", key)
            if parsed is not None and record.why not in GIVEN_UP:
                found[parsed[0]] = max(record.begin, found.get(parsed[0], 0))
        return found

    def judge_whole(self, run: str, there: list[Trainer]) -> None:
        """Whoever came to the end: each batch is trained by somebody who was not killed, or said so before."""
        plan = there[0].plan
        given_back = self.given_back(there[0])
        said = {
            (span.unit, index)
            for one in there
            for _, page in self.pages.get(one.owner.instance, [])
            for span in page.trained
            for index in range(span.begin, span.end)
        }
        for position in range(len(plan)):
            unit = plan.identifier(position)
            for index in range(batches_of(unit, plan.value(position))):
                by = [one for _, one in self.trained_by.get((run, unit, index), [])]
                known = (unit, index) in said or index < given_back.get(unit, 0)
                if not by or (all(one.phase == "crashed" for one in by) and not known):
                    raise ViolationError(f"run {run} ended, and {unit}[{index}] is not trained")


def newest_at(landed: list[tuple[float, LogPage]]) -> float:
    """When the last page landed that was newer than all before: an older one that lands late shows no life."""
    last, written = 0.0, -1
    for at, page in landed:
        if page.write > written:
            last, written = at, page.write
    return last


def endure(ordeal: Ordeal, rules: RecoveryRules | None = None) -> RecoveryWorld:
    world = RecoveryWorld(ordeal, rules or RecoveryRules())
    world.run()
    world.judge()
    return world
