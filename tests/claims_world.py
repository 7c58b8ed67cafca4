"""Claiming under every order of events: learners over one memory mailbox, one pending action at a time.

The world below is a scheduler of its own (not `shardqueue.simulate`). Each learner is an `Opening` and then a
`Claims`; whatever could happen next (a call takes effect, its answer arrives or is lost, a batch is loaded, handed
out or trained, a learner turns, writes its log, crashes, leaves or joins, time passes) is one action, and a seeded
random choice says which comes next. A create that failed may leave a stray copy behind, which takes effect at any
later time, also when its sender is gone. What happened is judged by what was trained, by value: never by logs.

Three things are taken for granted, as the library does: a log that is due lands within two seconds, a call ends
within a minute, and whether a process runs can be seen, if it is not `remote`. Runs are judged one by one: a run that
broke off is followed by one that hands out all again.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any
from zlib import crc32

from shardqueue.asks import Asks
from shardqueue.claim import Claim, Owner, State
from shardqueue.claims import Claims
from shardqueue.errors import MailboxUnavailableError, RunFinishedError
from shardqueue.learner import LOG_EVERY, Book
from shardqueue.mailbox.calls import Get, List, PutIfAbsent
from shardqueue.mailbox.memory import MemoryMailbox
from shardqueue.plan import Plan
from shardqueue.records import PROTOCOL, BackRecord, ClaimRecord, Manifest, PassKeys, Process
from shardqueue.run import TRAIN, Opening
from shardqueue.units import Step, Unit, unit_grid

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shardqueue.asks import Ask
    from shardqueue.mailbox import Mailbox
    from shardqueue.mailbox.calls import Answer, Call
    from shardqueue.run import Joined

LOG_LANDS = 2.0
"""Seconds within which a log lands that is due."""
CALL_ENDS = 60.0
"""Seconds within which a call ends, one way or another, and a learner does what it was woken for."""
STALLED = 4000
"""Events without any progress that are taken for a livelock."""


class ViolationError(AssertionError):
    """The protocol did what it must not."""


# -- scenarios ---------------------------------------------------------------------------------------------


def grid(steps: int, unit_steps: int, lanes: int, taper: int | bool) -> Mapping[str, object]:
    return unit_grid(steps, unit_steps, lanes, taper)


def backwards(units: Mapping[str, object]) -> dict[str, object]:
    return dict(reversed(list(units.items())))


def own_first(units: Mapping[str, object], me: int, learners: int) -> dict[str, object]:
    """The caller's own slice first, then the rest."""
    items = list(units.items())
    own = items[me::learners]
    return dict(own + [item for item in items if item not in own])


@dataclass(frozen=True)
class Scenario:
    """One schedule: everything follows from these values.

    Attributes:
        shape: which plan (see `PLANS`).
        learners: how many there are.
        late: of those, how many join at some time after the start.
        faults: how many calls fail before their effect or lose their answer, at most.
        strays: how many of the creates among them take effect later, perhaps for a second time, at most.
        crashes: how many learners are killed, at most.
        leaves: how many leave in order before the end, at most.
        after: how many batches are trained before the late ones join.
        remote: nobody can see another's process: only its log tells whether it is alive.
    """

    seed: int
    shape: str = "equal"
    learners: int = 3
    late: int = 0
    faults: int = 0
    strays: int = 0
    crashes: int = 0
    leaves: int = 0
    scans: bool = False
    after: int = 0
    remote: bool = False


PLANS: dict[str, Callable[[int, int], Mapping[str, object]]] = {
    "equal": lambda me, learners: grid(12, 2, 1, False),
    "lanes": lambda me, learners: grid(9, 3, 4, False),
    "tapered": lambda me, learners: grid(12, 4, 3, 2),
    "unknown sizes": lambda me, learners: {f"part-{n:02d}": n for n in range(14)},
    "reversed by odd": lambda me, learners: (
        backwards(grid(14, 1, 1, False)) if me % 2 else grid(14, 1, 1, False)
    ),
    "own slice first": lambda me, learners: own_first(grid(16, 1, 1, False), me, learners),
    "own slice first, mixed": lambda me, learners: own_first(
        {f"u{n}": Unit(n, 1 + n % 3, 0, 1) for n in range(9)}, me, learners
    ),
    "single": lambda me, learners: grid(3, 3, 1, False),
    "few": lambda me, learners: {"a": 0, "b/c": 1, "b/d": 2},
    "one-batch": lambda me, learners: grid(24, 1, 1, False),
}


def batches_of(identifier: str, value: object) -> int:
    """How many batches the loader gives of a unit; of those whose size no plan knows, some are empty."""
    return value.count if isinstance(value, Unit) else crc32(identifier.encode()) % 4


# -- the world ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rules:
    """What a mutant replaces.

    Attributes:
        nonce: given the learner's number and a count, the claim's nonce.
        owner: given the learner's number, whose name is on its claims.
        claims: the class of the machine.
        asks: the class of its calls.
        keys: the class of its pass's keys.
        store: the class of the mailbox.
        book: the class of what is logged.
        hands: whether a claim's batches may be handed out.
        two_steps: the store first looks whether a key is absent, then writes it.
        once: a learner may not ask for one key with two bodies; a mutant that does shows what comes of it.
    """

    nonce: Callable[[int, int], str] = lambda me, count: f"{me}-{count}"
    owner: Callable[[int], Owner] = lambda me: Owner(f"learner-{me}", f"{me:04x}")
    claims: type[Claims] = Claims
    asks: type[Asks] = Asks
    keys: type[PassKeys] = PassKeys
    store: type[MemoryMailbox] = MemoryMailbox
    book: type[Book] = Book
    hands: Callable[[Claim], bool] = lambda claim: claim.state is State.OURS
    two_steps: bool = False
    once: bool = True


@dataclass(eq=False)
class Flight:
    """A call under way: sent, then (for a store that checks before it acts) checked, then done."""

    call: Call
    ask: Ask | None
    machine: Opening | Claims | None
    sent: float
    absent: bool | None = None
    done: bool = False
    answer: Answer = None


@dataclass(eq=False)
class Learner:
    """One learner: its machines, its loader, its consumer, and its log."""

    number: int
    owner: Owner
    plan: Plan
    random: Random
    book: Book
    opening: Opening
    claims: Claims | None = None
    phase: str = "opening"
    dirty: bool = True
    wake: float | None = None
    turned: float = 0.0
    flights: list[Flight] = field(default_factory=list)
    to_load: deque[Claim] = field(default_factory=deque)
    given: int = 0
    buffer: deque[tuple[Claim, int]] = field(default_factory=deque)
    running: tuple[Claim, int] | None = None
    log_due: float | None = None
    logs: int = 0
    backs: list[PutIfAbsent] = field(default_factory=list)
    error: Exception | None = None
    puts: dict[str, bytes] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)
    proven: set[str] = field(default_factory=set)
    nonces: int = 0
    came: int = 0
    logged: int | None = None

    @property
    def machine(self) -> Opening | Claims:
        return self.claims or self.opening

    @property
    def here(self) -> bool:
        return self.phase in ("opening", "running", "leaving", "saying so")


class World:
    """All learners, the mailbox, the time, and what was trained."""

    learner: type[Learner] = Learner
    wanted: str | None = None
    stalled = STALLED

    def __init__(self, scenario: Scenario, rules: Rules, plans: Callable[[int, int], Mapping[str, object]]):
        self.scenario, self.rules = scenario, rules
        self.random = Random(scenario.seed)
        self.mailbox = rules.store()
        self.box: Mailbox = self.mailbox
        self.now = 0.0
        self.plans = plans
        self.learners: list[Learner] = []
        self.to_join = min(scenario.late, scenario.learners - 1)
        self.faults, self.crashes, self.leaves = scenario.faults, scenario.crashes, scenario.leaves
        self.to_stray = scenario.strays
        self.strays: list[Callable[[], object]] = []
        self.killed: set[str] = set()
        self.trained: dict[str, Counter[tuple[str, int]]] = {}
        self.events = self.progress = 0
        self.trace = 0
        self.redone: list[str] = []
        self.listed: dict[Learner, int] = {}
        self.landed: dict[str, int] = {}
        for _ in range(scenario.learners - self.to_join):
            self.join()

    # -- one event after another -------------------------------------------------------------------------

    def run(self) -> World:
        while True:
            actions = self.actions()
            later = self.next_wake()
            if not actions and later is None:
                return self
            self.events += 1
            if self.events - self.progress > self.stalled:
                raise ViolationError(f"livelock: {self.stalled} events without progress at {self.now:.3f}")
            at = self.random.randrange(len(actions) + (1 if later is not None else 0))
            self.trace = crc32(bytes([at & 255]), self.trace)
            if at < len(actions):
                self.now += self.random.choice((0.0, 0.0005, 0.02))
                actions[at]()
            else:
                assert later is not None
                self.now = later

    def next_wake(self) -> float | None:
        """When time alone makes something happen, if it may pass that far."""
        times = [one.wake for one in self.learners if one.here and one.wake is not None]
        times += [one.log_due for one in self.learners if one.log_due is not None]
        later = min((time for time in times if time > self.now), default=None)
        bounds = [one.log_due + LOG_LANDS for one in self.learners if one.log_due is not None]
        bounds += [flight.sent + CALL_ENDS for one in self.learners if one.here for flight in one.flights]
        bounds += [one.turned + CALL_ENDS for one in self.learners if self.turns(one)]
        return None if later is None or later > min(bounds, default=later) else later

    def actions(self) -> list[Callable[[], object]]:
        """Everything that may come next."""
        found: list[Callable[[], object]] = []
        for one in self.learners:
            for flight in one.flights:
                self.flight_actions(found, one, flight)
            if one.here:
                self.learner_actions(found, one)
        due = self.to_join and sum(map(len, self.trained.values())) >= self.scenario.after
        if (due and self.random.random() < 0.05) or (self.to_join and not found):
            found.append(partial(self.join, late=True))
        for stray in self.strays:
            if not found or self.random.random() < 0.02:
                found.append(partial(self.arrive, stray))
        return found

    def turns(self, one: Learner) -> bool:
        return one.here and (one.dirty or (one.wake is not None and one.wake <= self.now))

    def flight_actions(self, found: list[Callable[[], object]], one: Learner, flight: Flight) -> None:
        found.append(lambda: self.deliver(one, flight) if flight.done else self.effect(one, flight))
        half_way = flight.absent is not None and not flight.done
        if self.faults and one.here and not half_way and self.random.random() < 0.06:
            found.append(lambda: self.lose(one, flight))

    def learner_actions(self, found: list[Callable[[], object]], one: Learner) -> None:
        if self.turns(one):
            found.append(lambda: self.turn(one))
        due = one.log_due is not None and one.log_due <= self.now
        now_and_then = one.claims is not None and one.logs < 4 and self.random.random() < 0.05
        if due or now_and_then:
            found.append(lambda: self.log(one))
        if one.phase == "running":
            if one.to_load:
                found.append(lambda: self.load(one))
            if one.running is None and one.buffer and self.rules.hands(one.buffer[0][0]):
                found.append(lambda: self.hand(one))
            if self.leaves and self.random.random() < 0.03:
                found.append(lambda: self.leave(one))
        if one.running is not None:
            found.append(lambda: self.train(one))
        if self.crashes and self.random.random() < 0.02:
            found.append(lambda: self.crash(one))
        if one.phase == "saying so":
            found.append(lambda: self.say(one))

    # -- what can happen ---------------------------------------------------------------------------------

    def join(self, late: bool = False) -> None:
        number = len(self.learners)
        self.to_join -= late
        plan, random = Plan(self.plans(number, self.scenario.learners)), Random(self.random.random())
        owner = self.name(number)
        where = Process(host=f"host-{number}", boot=f"boot-{number}", pid=1, started="0")
        manifest = Manifest(
            protocol=PROTOCOL,
            run_id=f"run of {number}",
            plans={TRAIN: plan.signature()},
            opened_by=owner.learner,
            wall=0.0,
        )
        opening = Opening(plan, manifest, owner, self.wanted, seen=self.seen, random=random)
        book = self.rules.book(owner.learner, owner.instance, "main", where)
        self.learners.append(self.learner(number, owner, plan, random, book, opening, came=self.events))
        self.progress = self.events

    def name(self, number: int) -> Owner:
        return self.rules.owner(number)

    def seen(self, where: Process) -> bool | None:
        if self.scenario.remote:
            return None
        return self.learners[int(where.host.removeprefix("host-"))].here

    def turn(self, one: Learner) -> None:
        """As the feed's driving thread."""
        one.dirty, one.turned = False, self.now
        machine = one.machine
        for ask in machine.poll(self.now):
            self.check_asked(one, ask.call)
            self.check_opened(one, ask.call)
            one.flights.append(Flight(ask.call, ask, machine, self.now))
        if machine.asks.error is not None and one.phase != "leaving":
            self.ends_by(one, machine.asks.error)
            return
        if one.claims is None:
            if one.opening.joined is not None:
                self.begin(one)
            else:
                one.wake = machine.wake(self.now)
            return
        claims = one.claims
        for claim in claims.take_won():
            one.to_load.append(claim)
            self.progress = self.events
        for claim in claims.take_proven():
            self.proven(one, claim)
        one.wake = claims.wake(self.now)
        if one.phase == "running":
            idle = not (one.to_load or one.buffer or one.running)
            if claims.exhausted and claims.asks.idle and idle:
                self.finish(one)
                self.progress = self.events
        elif one.phase == "leaving":
            self.leave_further(one)

    def proven(self, one: Learner, claim: Claim) -> None:
        one.book.claim(("", claim.identifier, claim.attempt))

    def finish(self, one: Learner) -> None:
        """Nothing is left to claim, and all is trained."""
        one.book.left, one.phase = "end", "saying so"

    def begin(self, one: Learner) -> None:
        joined = one.opening.joined
        assert joined is not None
        one.claims = self.claiming(one, joined)
        one.book.run_id = joined.manifest.run_id
        one.phase, one.dirty, one.log_due = "running", True, self.now
        self.trained.setdefault(joined.keys.run, Counter())
        self.progress = self.events

    def claiming(self, one: Learner, joined: Joined, **further: Any) -> Claims:
        """What claims for a learner."""
        keys = joined.keys.pass_keys()

        def nonce() -> str:
            one.nonces += 1
            return self.rules.nonce(one.number, one.nonces)

        claims = self.rules.claims(
            one.plan,
            joined.keys,
            self.rules.keys(keys.folder, keys.name),
            one.owner,
            nonce=nonce,
            random=one.random,
            joined_late=joined.late,
            scans=self.scenario.scans,
            **further,
        )
        if self.rules.asks is not Asks:
            claims.asks = self.rules.asks(one.random)
        claims.met(set(joined.peers))
        return claims

    def effect(self, one: Learner, flight: Flight) -> None:
        call = flight.call
        if self.rules.two_steps and isinstance(call, PutIfAbsent):
            if flight.absent is None:
                flight.absent = self.mailbox.get(call.key) in (None, call.data)
                return
            if flight.absent:
                self.mailbox.put(call.key, call.data)
            flight.answer = flight.absent
        else:
            flight.answer = call.perform(self.box)
        flight.done = True
        if isinstance(call, List) and call.prefix.endswith("back/"):
            self.listed[one] = self.events
        if isinstance(call, PutIfAbsent):
            self.landed.setdefault(call.key, self.events)
        if not one.here:
            one.flights.remove(flight)

    def deliver(self, one: Learner, flight: Flight) -> None:
        one.flights.remove(flight)
        if not one.here:
            return
        call, answer = flight.call, flight.answer
        if isinstance(call, Get) and isinstance(answer, bytes):
            one.read.add(call.key)
            if one.puts.get(call.key) == answer:
                one.proven.add(call.key)
        if flight.ask is not None and flight.machine is not None:
            flight.machine.asks.answered(flight.ask, answer, self.now)
        one.dirty = True

    def lose(self, one: Learner, flight: Flight) -> None:
        """The call failed before its effect, or its answer was lost after it."""
        self.faults -= 1
        if self.to_stray and isinstance(flight.call, PutIfAbsent) and self.random.random() < 0.5:
            self.to_stray -= 1
            self.strays.append(partial(self.land, flight.call))
        self.fail(one, flight, MailboxUnavailableError("made up by the scheduler"))

    def arrive(self, stray: Callable[[], object]) -> None:
        """A copy that nobody waits for takes effect."""
        self.strays.remove(stray)
        stray()

    def land(self, call: PutIfAbsent) -> None:
        call.perform(self.mailbox)
        self.landed.setdefault(call.key, self.events)

    def fail(self, one: Learner, flight: Flight, error: MailboxUnavailableError) -> None:
        """The learner hears that the outcome is unknown."""
        one.flights.remove(flight)
        if flight.ask is not None and flight.machine is not None:
            flight.machine.asks.failed(flight.ask, error, self.now)
        else:  # a record that ends an attempt: insisted on
            assert isinstance(flight.call, PutIfAbsent)
            one.flights.append(Flight(flight.call, None, None, self.now))
        one.dirty = True

    def log(self, one: Learner) -> None:
        assert one.claims is not None
        for page in one.book.pages(self.now, self.now, 0.0):
            key = one.claims.run.log(page.learner, page.instance, page.process, page.page)
            self.mailbox.put(key, page.encode())
            one.book.wrote(page, clear=True)
        one.log_due = self.now + LOG_EVERY if self.scenario.remote else None
        one.logs += 1
        one.logged = self.events if one.logged is None else one.logged

    def load(self, one: Learner) -> None:
        """The loader gives one more batch, or its end."""
        assert one.claims is not None
        claim = one.to_load[0]
        index = claim.begin + one.given
        if index < batches_of(claim.identifier, one.plan.value(claim.position)):
            one.given += 1
            one.buffer.append((claim, index))
        else:
            one.to_load.popleft()
            one.claims.loaded(claim, one.given)
            one.given = 0
        one.dirty = True

    def hand(self, one: Learner) -> None:
        assert one.claims is not None
        claim, index = one.running = one.buffer.popleft()
        if claim.key not in one.proven:
            raise ViolationError(f"{claim.key}: handed out before its read-back agreed")
        one.claims.handed(claim, self.now)
        one.book.hand(Step(0, claim.identifier, claim.attempt, index), 0.0, self.now)
        one.dirty = True

    def train(self, one: Learner) -> None:
        """The consumer comes back."""
        assert one.claims is not None
        assert one.running is not None
        claim, index = one.running
        one.running, one.dirty = None, True
        trained = self.trained[one.claims.run.run]
        trained[claim.identifier, index] += 1
        if trained[claim.identifier, index] > 1:
            raise ViolationError(
                f"{claim.identifier}[{index}] was trained twice, last by {one.owner.learner}"
            )
        one.claims.pace.asked(self.now)
        claim.trained += 1
        one.book.train(1, self.now)
        one.claims.settle(claim)
        self.progress = self.events

    def crash(self, one: Learner) -> None:
        """Killed: what was sent may still take effect, nothing else does."""
        self.crashes -= 1
        one.phase, one.log_due = "crashed", None
        self.killed.add(one.owner.learner)
        one.flights = [flight for flight in one.flights if not flight.done and self.random.random() < 0.5]
        self.progress = self.events

    def leave(self, one: Learner) -> None:
        assert one.claims is not None
        self.leaves -= 1
        one.phase, one.dirty = "leaving", True
        one.claims.stop()
        self.progress = self.events

    def leave_further(self, one: Learner) -> None:
        assert one.claims is not None
        one.dirty = one.running is not None
        if one.running is not None or one.flights:
            return
        asks = one.claims.asks
        if not asks.idle and asks.error is None:
            return
        if not one.backs:
            one.backs = one.claims.give_back("early")
            one.flights = [Flight(call, None, None, self.now) for call in one.backs]
            if one.backs:
                return
        one.book.left = "error" if one.error else "early"
        one.phase = "saying so"

    def ends_by(self, one: Learner, error: Exception) -> None:
        """The machine cannot go on: leave as after an exception."""
        one.error = error
        self.progress = self.events
        if one.claims is None:
            one.phase, one.log_due = "failed", None
            return
        one.claims.stop()
        one.phase, one.dirty = "leaving", True

    def say(self, one: Learner) -> None:
        """The last log; then the process is gone."""
        self.log(one)
        one.phase, one.log_due = "ended", None
        self.progress = self.events

    # -- what must hold ----------------------------------------------------------------------------------

    def check_asked(self, one: Learner, call: Call) -> None:
        if not isinstance(call, PutIfAbsent) or "units/" not in call.key:
            return
        if self.rules.once and one.puts.get(call.key, call.data) != call.data:
            raise ViolationError(f"{one.owner.learner} asked for {call.key} with two different bodies")
        one.puts[call.key] = call.data
        assert one.claims is not None
        parsed = one.claims.keys.parse_claim(call.key)
        assert parsed is not None
        identifier, attempt = parsed
        if attempt and one.claims.keys.back(identifier, attempt - 1) not in one.read:
            raise ViolationError(f"{call.key} was asked for before the end of attempt {attempt - 1} was read")

    def check_opened(self, one: Learner, call: Call) -> None:
        """Whoever opens the next run has seen that the one before broke off."""
        if not isinstance(call, PutIfAbsent) or not call.key.startswith("runs/"):
            return
        run = int(call.key.removeprefix("runs/").removesuffix(".json"))
        for other in self.learners:
            there = other.claims is not None and other.claims.run.run == str(run - 1)
            if there and other.logged is not None and other.logged < one.came:
                if other.here:
                    self.redone.append(
                        f"run {run} was opened while {other.owner.learner} works in the one before"
                    )
                elif other.book.left == "end":
                    self.redone.append(
                        f"run {run} was opened though {other.owner.learner} ended the one before"
                    )

    def judge(self) -> None:
        """At the end of everything."""
        for one in self.learners:
            if one.error is not None and not isinstance(one.error, RunFinishedError):
                raise ViolationError(f"{one.owner.learner} ended by {type(one.error).__name__}: {one.error}")
            if one.here:
                raise ViolationError(f"{one.owner.learner} never ends: {one.phase}, wake {one.wake}")
        for run, trained in self.trained.items():
            there = [one for one in self.learners if one.claims is not None and one.claims.run.run == run]
            self.judge_run(run, trained, there)

    def judge_run(self, run: str, trained: Counter[tuple[str, int]], there: list[Learner]) -> None:
        """Each batch was trained, but for what a killed learner held and what nobody was left to take."""
        plan, claims = there[0].plan, there[0].claims
        assert claims is not None
        keys = PassKeys(claims.keys.folder, claims.keys.name)
        ended = [one for one in there if one.book.left == "end"]
        for position in range(len(plan)):
            identifier = plan.identifier(position)
            whole = batches_of(identifier, plan.value(position))
            done = [index for index in range(whole) if trained[identifier, index]]
            attempt = self.last_attempt(keys, identifier)
            what = f"run {run}: {identifier}: {done} of {whole} trained"
            if done == list(range(whole)) or (attempt is None and not ended):
                continue
            if attempt is None:
                raise ViolationError(f"{what}, never claimed")
            claim, back = keys.claim(identifier, attempt), keys.back(identifier, attempt)
            data = self.mailbox.get(back)
            if data is None:
                owner = ClaimRecord.decode(self.mailbox.get(claim) or b"", claim).learner
                if owner not in self.killed:
                    raise ViolationError(f"{what}, {owner} lives and gave nothing back")
                continue
            begin = BackRecord.decode(data, back).begin
            if done != list(range(begin)):
                raise ViolationError(f"{what}, but {back} says {begin}")
            could = [one.owner.learner for one in ended if self.listed.get(one, 0) > self.landed[back]]
            if could:
                raise ViolationError(f"{what}; {back} was passed over by {could}")

    def last_attempt(self, keys: PassKeys, identifier: str) -> int | None:
        attempt = -1
        while self.mailbox.get(keys.claim(identifier, attempt + 1)) is not None:
            attempt += 1
        return None if attempt < 0 else attempt


def play(scenario: Scenario, rules: Rules | None = None, plans: Any = None) -> World:
    world = World(scenario, rules or Rules(), plans or PLANS[scenario.shape]).run()
    world.judge()
    return world
