"""The real claiming code in virtual time: any nodes, speeds and latencies, in a fraction of the seconds.

A driver around `Opening`, `Claims` and `Book`, as `feed` is one with threads: it polls the machines, performs their
calls on a memory mailbox half-way through the call's latency, and reports the answers at its end. Loading takes
no time, training a batch takes what the node's speed says. Everything is drawn from one seed.

The driver knows nothing of the policy, so what it measures is what runs. What was trained is counted where it
is trained, not taken from any log.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from random import Random
from typing import TYPE_CHECKING

from msgspec.structs import replace

from shardqueue.claim import Owner, State
from shardqueue.claims import Claims
from shardqueue.errors import InvalidInputError, MailboxUnavailableError
from shardqueue.learner import LOG_EVERY, Book, log_pauses
from shardqueue.mailbox.memory import MemoryMailbox
from shardqueue.plan import Plan
from shardqueue.records import PROTOCOL, Manifest, Process
from shardqueue.run import TRAIN, Opening
from shardqueue.units import Step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from shardqueue.asks import Ask
    from shardqueue.claim import Claim
    from shardqueue.mailbox import Mailbox
    from shardqueue.records import LogPage
    from shardqueue.run import Joined


FAREWELL = 10.0
"""Seconds for which a node that leaves waits for an answer that does not come."""


@dataclass(frozen=True, slots=True)
class Node:
    """A learner to simulate.

    Attributes:
        speed: batches it trains while a node of speed 1 trains one.
        joins: when it starts, in seconds.
        changes: (second, speed) pairs, ascending: from then on it has that speed; 0 is a pause.
        dies: when it is killed, or None.
        leaves: when it leaves in order, giving back what it holds, or None.
    """

    speed: float = 1.0
    joins: float = 0.0
    changes: tuple[tuple[float, float], ...] = ()
    dies: float | None = None
    leaves: float | None = None

    def __post_init__(self) -> None:
        if not self.speed > 0:
            raise InvalidInputError("speed", self.speed, "more than 0", "leave a node out that does nothing")

    def done(self, until: float) -> float:
        """Seconds of work of a node of speed 1 that it can do from its start `until` then."""
        speed, at, work = self.speed, self.joins, 0.0
        for change, then in (*self.changes, (float("inf"), 0.0)):
            work += speed * max(0.0, min(change, until) - at)
            speed, at = then, max(at, min(change, until))
        return work

    def finish(self, start: float, work: float) -> float:
        """When `work` seconds of a node of speed 1, begun at `start`, are done; infinity if never."""
        speed, at = self.speed, start
        for change, then in self.changes:
            if change <= at:
                speed = then
                continue
            if speed * (change - at) >= work:
                break
            work -= speed * (change - at)
            speed, at = then, change
        return at + work / speed if speed > 0 else float("inf")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a simulated run came to.

    Attributes:
        makespan: when the last batch was trained, in seconds; start-up is counted.
        limit: total work over total speed: nobody ever idles, from its start on. Who dies or leaves is taken to stay.
        fixed: makespan of an equal split made up front, of nodes that stay.
        batches: trained, by node.
        units: claimed, by node.
        idle: seconds without a batch before the makespan, by node.
        requests: mailbox calls by verb, as a store counts them: a create that is lost reads the key, once more.
        claim_requests: of those, what claiming asked: neither finding the run nor writing logs.
        trained: how often each (unit, batch of the unit) was trained.
        drift: the largest distance between two learners' dataset steps at one time, as a share of the plan.
    """

    makespan: float
    limit: float
    fixed: float
    batches: tuple[int, ...]
    units: tuple[int, ...]
    idle: tuple[float, ...]
    requests: dict[str, int]
    claim_requests: int
    trained: Counter[tuple[str, int]]
    drift: float
    errors: tuple[Exception, ...] = ()

    @property
    def ratio(self) -> float:
        """Makespan over the limit."""
        return self.makespan / self.limit


@dataclass(slots=True)
class _World:
    """The clock, what is to happen, and what did."""

    mailbox: Mailbox
    latency: Callable[[], float]
    now: float = 0.0
    events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    tick: count[int] = field(default_factory=count)
    requests: Counter[str] = field(default_factory=Counter)
    claim_requests: int = 0
    trained: Counter[tuple[str, int]] = field(default_factory=Counter)
    places: dict[int, float] = field(default_factory=dict)
    drift: float = 0.0
    idle: int = 0

    def at(self, when: float, do: Callable[[], None]) -> None:
        """Do it then."""
        heapq.heappush(self.events, (when, next(self.tick), do))

    def later(self, when: float, do: Callable[[], None]) -> None:
        """Do it then, unless by then nothing else happens any more."""
        self.idle += 1
        self.at(when, partial(self._leave_idle, do))

    def _leave_idle(self, do: Callable[[], None]) -> None:
        self.idle -= 1
        do()

    def run(self) -> None:
        while len(self.events) > self.idle:
            self.now, _, do = heapq.heappop(self.events)
            do()

    def moved(self, who: int, place: float) -> None:
        self.places[who] = place
        if next(self.tick) % 64 == 0:
            self.drift = max(self.drift, max(self.places.values()) - min(self.places.values()))


class _Learner:
    """One node: the machines of a learner and its consumer, driven by events."""

    def __init__(
        self,
        world: _World,
        plan: Plan,
        node: Node,
        index: int,
        seconds: float,
        log_every: float,
        reclaim_after: float | None,
        seed: int,
    ) -> None:
        self.node, self.index = node, index
        self.busy = self.ended = 0.0
        self.batches = 0
        self.done = self.dead = False
        self._world, self._plan, self._seconds, self._log_every = world, plan, seconds, log_every
        self._reclaim_after, self._waits = reclaim_after, False
        self._owner = Owner(f"node-{index:04d}", f"{index:06x}")
        where = Process(host=f"node-{index}", boot="virtual", pid=index, started="0")
        self.book = Book(self._owner.learner, self._owner.instance, "main", where)
        self._random = Random(seed * 1_000_003 + index)
        self._nonces = count()
        self._queue: deque[Claim] = deque()
        self._running = False
        self._wake: float | None = None
        self._left_at: float | None = None
        self.claims: Claims | None = None
        self._opening = Opening(
            plan, self._manifest(), self._owner, None, seen=lambda _: None, random=self._random
        )
        world.at(node.joins, self.turn)
        if node.dies is not None:
            world.at(node.dies, self._die)
        if node.leaves is not None:
            world.at(node.leaves, self._leave)

    @property
    def error(self) -> Exception | None:
        return self._machine.asks.error

    @property
    def _machine(self) -> Opening | Claims:
        return self.claims or self._opening

    def _manifest(self) -> Manifest:
        return Manifest(
            protocol=PROTOCOL,
            run_id=f"virtual-{self.index}",
            plans={TRAIN: self._plan.signature()},
            opened_by=self._owner.learner,
            wall=0.0,
            reclaim_after=self._reclaim_after,
        )

    def turn(self) -> None:
        """As the feed's driving thread: calls out, won claims in, sleep until the next wake."""
        if self.dead:
            return
        world = self._world
        machine = self._machine
        for ask in machine.poll(world.now):
            self._send(machine, ask)
        if self.claims is None and self._opening.joined is not None:
            self._begin(self._opening.joined)
            return
        if self.claims is not None:
            for claim in self.claims.take_won():
                self._load(claim)
            for claim in self.claims.take_proven():
                self.book.claim((self.claims.keys.name, claim.identifier, claim.attempt))
            if not self._running:
                self._take()
            recovery = self.claims.recovery
            if recovery is not None and recovery.began is not None and not self._waits:
                self._waits = True
                self._tell_those_who_wait()
            if self.claims.exhausted and self.claims.asks.idle and not self._running and not self.done:
                self._leave_at_the_end()
        wake = machine.wake(world.now)
        if wake != self._wake:
            self._wake = wake
            if wake is not None:
                world.at(max(wake, world.now), partial(self._woken, wake))

    def _woken(self, wake: float) -> None:
        if wake == self._wake:  # else something happened since, and another time was agreed on
            self._wake = None
            self.turn()

    def _begin(self, joined: Joined) -> None:
        self.claims = Claims(
            self._plan,
            joined.keys,
            joined.keys.pass_keys(),
            self._owner,
            nonce=lambda: f"{self.index}-{next(self._nonces)}",
            random=self._random,
            joined_late=joined.late,
            scans=getattr(self._world.mailbox, "listing", "page") == "scan",
            reclaim_after=self._reclaim_after,
        )
        self.claims.met(set(joined.peers))
        self.book.run_id = joined.manifest.run_id
        # As in a feed, the log goes first.
        self._log_on(log_pauses(self._log_every))
        self._world.at(self._world.now + self._world.latency(), self.turn)

    def _send(self, machine: Opening | Claims, ask: Ask) -> None:
        world = self._world
        latency = world.latency()
        answer: list[object] = []

        def effect() -> None:
            verbs = [type(ask.call).__name__]
            try:
                answer.append(ask.call.perform(world.mailbox))
                if answer[0] is False:
                    verbs.append("Get")
            except MailboxUnavailableError as error:
                answer.append(error)
            world.requests.update(verbs)
            world.claim_requests += len(verbs) if machine is self.claims else 0

        def hear() -> None:
            if isinstance(answer[0], Exception):
                machine.asks.failed(ask, answer[0], world.now)
            else:
                machine.asks.answered(ask, answer[0], world.now)  # type: ignore[arg-type]
            self.turn()

        world.at(world.now + latency / 2, effect)
        world.at(world.now + latency, hear)

    def write_log(self) -> None:
        """Write the log half a call from now."""
        assert self.claims is not None
        for page in self.book.pages(self._world.now, self._world.now, 0.0):
            self._world.at(self._world.now + self._world.latency() / 2, partial(self._put, page))

    def _put(self, page: LogPage) -> None:
        assert self.claims is not None
        self._world.requests["Put"] += 1
        key = self.claims.run.log(page.learner, page.instance, page.process, page.page)
        try:
            if self._reclaim_after is None:
                page = replace(
                    page, trained=[]
                )  # nobody reads it, and writing it out again and again takes long
            self._world.mailbox.put(key, page.encode())
        except MailboxUnavailableError:
            self.book.wrote(page, clear=False)
        else:
            self.book.wrote(page, clear=True)

    def _log_on(self, pauses: Iterator[float]) -> None:
        if not self.dead and not self.done:
            self.write_log()
            self._world.later(self._world.now + next(pauses), partial(self._log_on, pauses))

    def _tell_those_who_wait(self) -> None:
        if self._waits and not self.book.held:
            self.write_log()

    def _leave_at_the_end(self) -> None:
        self.done = True
        self.book.left = "end"
        self.write_log()

    def _load(self, claim: Claim) -> None:
        assert self.claims is not None
        size = (self._plan.batches(claim.position) or 1) - claim.begin
        self._queue.append(claim)
        self.claims.loaded(claim, size)

    def _take(self) -> None:
        claims, world = self.claims, self._world
        assert claims is not None
        while self._queue and self._queue[0].handed >= self._queue[0].size:
            self._queue.popleft()
        if not self._queue or self._queue[0].state is not State.OURS or claims.stopped:
            return
        claim = self._queue[0]
        index = claim.begin + claim.handed
        claims.handed(claim, world.now)
        self.book.hand(Step(0, claim.identifier, claim.attempt, index), 0.0, world.now)
        world.moved(self.index, self._plan.span(claim.position) if self._plan.natural else 0.0)
        end = self.node.finish(world.now, self._seconds)
        self._running = True
        began = world.now
        if end != float("inf"):
            world.at(end, lambda: self._trained(claim, index, began))

    def _trained(self, claim: Claim, index: int, began: float) -> None:
        if self.dead:
            return
        claims, world = self.claims, self._world
        assert claims is not None
        world.trained[claim.identifier, index] += 1
        self.busy += world.now - began
        self.batches += 1
        self.ended = world.now
        claims.pace.asked(world.now)
        claim.trained += 1
        self.book.train(1, world.now)
        if claim.finished:
            claims.settle(claim)
            whole_at = claim.begin + int(claim.size)
            self.book.release(("", claim.identifier, claim.attempt), whole_at, world.now)
            self._tell_those_who_wait()
        self._running = False
        self._take()
        self.turn()

    def _die(self) -> None:
        self.dead = True
        self._world.places.pop(self.index, None)

    def _leave(self) -> None:
        """Leave in order: nothing new, then give back what is not trained, the running batch included."""
        claims, world = self.claims, self._world
        if claims is None or self.done:
            self._die()
            return
        claims.stop()
        self._left_at = world.now if self._left_at is None else self._left_at
        if claims.asks.in_flight or (not claims.asks.idle and world.now - self._left_at < FAREWELL):
            world.at(world.now + max(world.latency(), 1e-3), self._leave)
            self.turn()
            return
        for call in claims.give_back("early"):
            world.requests["PutIfAbsent"] += 1
            with suppress(MailboxUnavailableError):  # written or not, nobody will know
                call.perform(world.mailbox)
        self.book.left = "early"
        self.write_log()
        self._die()


def simulate(
    units: Mapping[str, object],
    nodes: Sequence[Node],
    *,
    batch_seconds: float = 1.0,
    latency: float | Callable[[], float] = 0.0,
    log_every: float = LOG_EVERY,
    reclaim_after: float | None = None,
    seed: int = 0,
    mailbox: Mailbox | None = None,
) -> Outcome:
    """Run one pass of `units` over `nodes` in virtual time.

    Args:
        units: the plan.
        nodes: who trains.
        batch_seconds: what a batch takes a node of speed 1.
        latency: seconds a mailbox call takes, or a function that draws them.
        log_every: seconds between two writes of a log.
        reclaim_after: seconds of silence after which a node's units are handed out again; None for never.
        seed: of everything that is drawn.
        mailbox: instead of an empty one in memory; wrap one to inject faults.

    Raises:
        InvalidInputError: there is no node, or a number of seconds is not positive.
    """
    if not nodes:
        raise InvalidInputError("nodes", nodes, "at least one node", "pass [Node()]")
    for name, seconds in (("batch_seconds", batch_seconds), ("log_every", log_every)):
        if not seconds > 0:
            raise InvalidInputError(name, seconds, "more than 0", "pass 1.0")
    if reclaim_after is not None and any(node.finish(node.joins, 1e300) == float("inf") for node in nodes):
        bound = "None with a node that pauses for ever: all others would wait for it"
        raise InvalidInputError("reclaim_after", reclaim_after, bound, "let it die instead")
    plan = Plan(units)
    draw = latency if callable(latency) else lambda: latency
    world = _World(MemoryMailbox() if mailbox is None else mailbox, draw)
    learners = [
        _Learner(world, plan, node, index, batch_seconds, log_every, reclaim_after, seed)
        for index, node in enumerate(nodes)
    ]
    world.run()
    return _outcome(world, plan, nodes, learners, batch_seconds)


def limit(nodes: Sequence[Node], work: float) -> float:
    """Return when `work` seconds of a node of speed 1 are done if nobody ever idles; infinity if never."""

    def done(until: float) -> float:
        return sum(node.done(until) for node in nodes)

    turns = sorted({0.0, *(turn for node in nodes for turn in (node.joins, *(at for at, _ in node.changes)))})
    after = bisect_left(turns, work, key=done)
    if after == 0:
        return turns[0]
    before = turns[after - 1]
    later = turns[after] if after < len(turns) else before + max(1.0, before)
    rate = (done(later) - done(before)) / (later - before)
    return before + (work - done(before)) / rate if rate > 0 else float("inf")


def _outcome(
    world: _World, plan: Plan, nodes: Sequence[Node], learners: list[_Learner], seconds: float
) -> Outcome:
    batches = sum(plan.batches(position) or 1 for position in range(len(plan)))
    makespan = max(learner.ended for learner in learners)
    share = batches * seconds / len(nodes)
    return Outcome(
        makespan=makespan,
        limit=limit(nodes, batches * seconds),
        fixed=max(node.finish(node.joins, share) for node in nodes),
        batches=tuple(learner.batches for learner in learners),
        units=tuple(learner.book.claimed for learner in learners),
        idle=tuple(makespan - learner.busy for learner in learners),
        requests=dict(world.requests),
        claim_requests=world.claim_requests,
        trained=world.trained,
        drift=world.drift / plan.steps,
        errors=tuple(learner.error for learner in learners if learner.error is not None),
    )
