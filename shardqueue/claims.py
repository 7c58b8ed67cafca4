"""What one learner asks the mailbox next: claims, their read-back, listings, attempts given back.

No I/O and no threads. The owner of a `Claims` reports what happened (a call ended, a batch was handed out, the
consumer came back, a loader ended) and polls; `poll` returns the calls to make now. The same code runs under
threads and a real mailbox, in virtual time, and in model tests.

Invariants:
- A claim is ours when the create said so *and* reading the key gave our bytes; until then nothing of it may be
  handed out. An unclear create is repeated with the same bytes, never rounded to won or lost.
- A key is asked for at most once by one learner. A unit's attempt n > 0 is asked for only after its
  `back/{id}~{n-1}` was read.
- It ends (`exhausted`) when every unit is known to be claimed and no given-back attempt is left to take; with
  `reclaim_after`, when every unit is known to be trained whole.
- After `stop`, no new claim is asked for; `give_back` returns the records that end what was not trained.
- An allowance (see `allowance`) is never exceeded: of a unit that is larger than what is left of it, the surplus is
  given back as soon as the claim is ours, and the loader is told where to end.

Which unit and when is preference: see `window` and `pace`.
"""

from __future__ import annotations

from functools import partial
from math import log2
from typing import TYPE_CHECKING

from shardqueue.allowance import UNLIMITED, Allowance
from shardqueue.asks import PATIENCE, Asks
from shardqueue.claim import Claim, State
from shardqueue.errors import MailboxRefusedError, RecordError
from shardqueue.mailbox.calls import Get, List, PutIfAbsent
from shardqueue.pace import Pace
from shardqueue.records import BackRecord, ClaimRecord, GradeRecord, LogPage
from shardqueue.recovery import Recovery
from shardqueue.window import Window, home_weights

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from shardqueue.asks import Ask
    from shardqueue.claim import Owner
    from shardqueue.mailbox.calls import Answer
    from shardqueue.plan import Plan
    from shardqueue.records import PassKeys, Process, RunKeys

PAGE = 1000
"""Keys a listing asks for at most: one request on every object store."""
FIRST = 16.0
"""Batches that the first few claims may come to, where one unit is not more."""
AT_ONCE = 16
"""Claims asked for at once, at most: more would wait for one another, and look like a slow store."""
HOARD = 64
"""Units in hand after which only one more is asked for at a time."""
LAST = 2
"""With fewer units left than this for each part of a learner's claiming, its first part does it alone."""
NEAR = 16.0
"""With fewer batches left than this for a learner, its loader's queue is not kept full."""
TAIL = 2
"""The tail begins when fewer than TAIL units a learner are left."""
LARGEST_FIRST = 10
"""With fewer units a learner left than this, the largest known free unit goes first,"""
LARGEST_SHARE = 1 / 3
"""and with less of the plan left than this: each such claim costs a listing."""
MEETING = 4
"""How much the claims of this learner grow until it looks again who takes part, where everybody's speed is known."""
MEETING_MOST = 64
"""Claims of this learner after which it looks in any case."""
FEW = 8
"""With fewer units a learner left than this, stealing is careful: one steal a listing."""
THEFTS = 8
"""Steals one listing may serve, at most; fewer when few units a learner are left."""
PLENTY = 1e6
"""Batches a unit is taken to have while nothing is known of its kind: one is enough to begin with."""
STALE = 4
"""Where a listing scans a folder: units not known to be claimed, for each that is likely free, before a new scan."""
LOOK_BACK_SOON, LOOK_BACK_EVERY = 0.02, 0.5
"""Seconds between two looks for what was given back, of who waits for it: at first, and at most."""
HELD_LOOKS = 40
"""Looks of who is to have a first batch, before more is allowed: then there is none for it."""
SURPLUS = "surplus"
"""Why a part of a unit is given back that goes beyond an allowance."""
SCAN_SHARE = 20.0
"""Where a listing scans a whole folder: seconds to let pass for each second a listing took beyond a quick call."""


class Claims:
    """The claiming of one pass by one feed.

    Args:
        plan: the units.
        run: keys of the run; its learners tell whose home is what.
        keys: keys of the pass.
        owner: in whose name.
        nonce: draws the token that owns a claim; must differ between any two calls anywhere.
        random: private source for preferences.
        joined_late: others have claimed before us, so the front must be found.
        scans: a listing costs a scan of all claims, so names are tried instead where listings would add up.
        part, parts: of the learner's claiming this does part `part` of `parts`, from 0; towards the end of the plan
            part 0 does all of it, and the others are exhausted early (`yielded`).
        waits: where nothing is left to claim, it looks again for what is given back, instead of being exhausted.
        reclaim_after: where nothing is left to claim, it waits until every unit is trained whole, and ends the
            attempts of owners that are silent for so many seconds (see `recovery`); None to do neither.
        seen: tells whether a process is seen on this machine.
    """

    def __init__(
        self,
        plan: Plan,
        run: RunKeys,
        keys: PassKeys,
        owner: Owner,
        *,
        nonce: Callable[[], str],
        random: Random,
        joined_late: bool = False,
        scans: bool = False,
        patience: float = PATIENCE,
        part: int = 0,
        parts: int = 1,
        waits: bool = False,
        reclaim_after: float | None = None,
        seen: Callable[[Process], bool | None] = lambda where: None,  # noqa: ARG005
    ) -> None:
        self.plan, self.run, self.keys, self.owner = plan, run, keys, owner
        self.window = Window(plan, random)
        self.pace = Pace()
        self.hand: dict[Claim, None] = {}
        self.asks = Asks(random, patience)
        self.exhausted = not len(plan)
        self.yielded = False
        self.stopped = False
        self.promised = 0.0
        self.empty_looks = 0
        self.waits = waits
        self.on_hold = False
        self.recovery: Recovery | None = None
        if reclaim_after is not None:
            me = owner.learner, owner.instance
            self.recovery = Recovery(
                *(plan, run, keys, me, self.asks, reclaim_after),
                holds=self._holds,
                seen=seen,
                random=random,
            )
        self._part, self._parts = part, parts
        self._allowance = UNLIMITED
        self._done = 0.0
        self._surpluses = self._owed = 0
        self._cut: list[Claim] = []
        self._given: list[Claim] = []
        self._pause = LOOK_BACK_SOON
        self._next_look_back = 0.0
        self._handed = 0
        self._nonce, self._scans = nonce, scans
        self._won: list[Claim] = []
        self._proven: list[Claim] = []
        self._asked: list[Claim] = []
        self._lost: list[Claim] = []
        self._twins: list[LogPage] = []
        self._roster: set[str] = set()
        self._peers: set[tuple[str, str]] = set()
        self._grades: dict[tuple[str, str], tuple[int, int]] = {}
        self._weights = [1]
        self._told: int | None = None
        self._sequence = 0
        self._asking: dict[Claim, None] = {}
        self._looking = False
        self._wanting: float | None = None
        self._thefts = 0
        self._meeting_at = 0
        self._met = self._meeting = False
        self._next_scan = 0.0
        self._ended: dict[str, int] = {}
        self._backs: dict[str, int] = {}
        self._known_attempts: set[tuple[str, int]] = set()
        self._counted = 0.0
        self._expected = 0.0
        self._seek: tuple[int, int] | None = None
        self._may_seek = self._look_first = joined_late

    # -- what happened -----------------------------------------------------------------------------------

    def allow(self, allowance: Allowance) -> None:
        """From now on no more than this may be taken."""
        if allowance == self._allowance:
            return
        self._allowance = allowance
        for claim in self.hand:
            if allowance.cut:
                self._cut_open(claim)
            self._set_bound(claim)

    def met(self, instances: set[tuple[str, str]]) -> None:
        """These learners, as (learner, instance), have a log in the run."""
        self._peers |= instances
        everybody = sorted(self._peers | {self._me})
        weights = home_weights([self._grades.get(peer, (0, None))[1] for peer in everybody])
        if self._sequence and weights != self._weights:
            # Others claimed by another table; what they have of our new home is better looked up than tried.
            self._look_first = self._look_first or not self._scans
        self._weights = weights
        self.window.meet(weights, everybody.index(self._me), self._part, self._parts)

    def handed(self, claim: Claim, now: float) -> None:
        """One batch of `claim` went to the consumer."""
        claim.handed += 1
        self._handed += 1
        self._weigh(claim)
        self.pace.handed(now)

    def loaded(self, claim: Claim, batches: int) -> None:
        """The loader gave all of `claim`: `batches` in this attempt."""
        if claim.end is None and claim.begin + batches == claim.bound:
            self._cut_open(claim)  # there may be more of it, for others
        claim.loaded = True
        claim.size = batches
        self._promise(claim, batches)
        self._weigh(claim)
        self._counted += batches
        self._expected += claim.weight if claim.end is None else claim.take
        for other in self.hand:
            if not other.loaded:
                self._expect(other)
        self.settle(claim)

    def settle(self, claim: Claim) -> None:
        """Forget `claim` once it is trained whole."""
        if claim.finished and claim in self.hand:
            del self.hand[claim]
            self._done += claim.size

    def stop(self) -> None:
        """Ask for nothing new."""
        self.stopped = True
        never_sent = {call.key for call in self.asks.forget() if isinstance(call, PutIfAbsent)}
        self._asking = {claim: None for claim in self._asking if claim.key not in never_sent}
        for claim in self.hand:
            if self.keys.back(claim.identifier, claim.attempt) in never_sent:
                claim.end = None

    def revoke(self, claim: Claim) -> None:
        """`claim` is others': it never was ours, or we had been silent for too long."""
        claim.state = State.LOST
        self.hand.pop(claim, None)
        self._promise(claim, 0.0)
        self._weigh(claim)

    # -- what to do --------------------------------------------------------------------------------------

    def observe(self, handed: int, taken: int, started: float, batch: float) -> None:
        """Behind a loader: how many of our batches the training loop took, when the last of all, seconds a batch.

        A loader keeps its queue full. Far from the end that is what it is for; near the end, a slow learner's full
        queue is what all wait for. There, what waits in it counts as work in hand.
        """
        near = self.window.left * self._learner_share * self._mean_size <= NEAR
        self.pace.observe(max(0, handed - taken) if near else 0, started, batch * self._parts)

    def poll(self, now: float) -> list[Ask]:
        """Return the calls to make now."""
        if not (self.stopped or self.exhausted or self.on_hold) and self.asks.error is None:
            self._plan_ahead(now)
        return self.asks.poll(now)

    def wake(self, now: float) -> float | None:
        """When to poll again if nothing happens before."""
        again = self.asks.wake()
        if self.stopped or self.exhausted:
            return again
        low = self.pace.wake(now, self.tail)
        look = self._next_look_back if self._next_look_back > now else None
        return min((at for at in (again, low, look) if at is not None), default=None)

    def take_won(self) -> list[Claim]:
        """Claims won since the last call, to be loaded in this order."""
        won, self._won = self._won, []
        return won

    def take_asked(self) -> list[Claim]:
        """Claims whose creation was asked for since the last call."""
        asked, self._asked = self._asked, []
        return asked

    def take_lost(self) -> list[Claim]:
        """Claims found to be others' since the last call."""
        lost, self._lost = self._lost, []
        return lost

    def take_proven(self) -> list[Claim]:
        """Claims whose read-back agreed since the last call."""
        proven, self._proven = self._proven, []
        return proven

    def take_cut(self) -> list[Claim]:
        """Claims of ours that were found, since the last call, to end before their unit does."""
        cut, self._cut = self._cut, []
        return cut

    def take_given(self) -> list[Claim]:
        """Of those, the ones whose surplus others can take since the last call."""
        given, self._given = self._given, []
        return given

    def take_twins(self) -> list[LogPage]:
        """Logs, found since the last call, of other learners with our label."""
        twins, self._twins = self._twins, []
        return twins

    def give_back(self, why: str) -> list[PutIfAbsent]:
        """Return the records that end every attempt in hand where training stopped.

        To be called once stopped, when nothing is under way.
        """
        return [self._back(claim, claim.begin + claim.trained, why) for claim in self.returnable]

    @property
    def returnable(self) -> list[Claim]:
        """Claims of ours that are not trained whole, and whose end is not on record."""
        return [
            claim
            for claim in self.hand
            if claim.state is State.OURS and not claim.finished and claim.end is None
        ]

    def _back(self, claim: Claim, begin: int, why: str) -> PutIfAbsent:
        record = BackRecord(begin=begin, learner=self.owner.learner, instance=self.owner.instance, why=why)
        return PutIfAbsent(self.keys.back(claim.identifier, claim.attempt), record.encode())

    @property
    def committed(self) -> int:
        """Batches that are certainly ours: trained, in hand, or of claims whose size is known."""
        sure = (c for c in self.hand if c.state is State.OURS)
        return int(self._done + sum(c.take if self._is_sized(c) else c.handed for c in sure))

    @property
    def events(self) -> int:
        """Grows with every claim that is asked for, and every surplus given back."""
        return self._sequence + self._surpluses

    @property
    def owes(self) -> bool:
        """Whether a surplus has still to be given back."""
        return self._owed > 0

    @property
    def settled(self) -> bool:
        """Whether every claim that was asked for is decided, and every surplus can be taken by others."""
        return not (self._asking or self.owes) and all(c.state is State.OURS for c in self.hand)

    @property
    def ends_known(self) -> bool:
        """Whether it is known of every claim in hand where it ends, so that no surplus can come of it."""
        return all(self._is_sized(claim) or claim.end is not None for claim in self.hand)

    def _is_sized(self, claim: Claim) -> bool:
        return claim.loaded or self.plan.batches(claim.position) is not None

    @property
    def unclear(self) -> list[Claim]:
        """Claims that were asked for and never proven: ours or not, nobody knows."""
        return [*self._asking, *(claim for claim in self.hand if claim.state is State.WON)]

    def due(self, now: float) -> bool:
        """Whether polling now may lead to a call."""
        return not self.exhausted and not self.stopped and self._wanted(now) > 0.0

    @property
    def tail(self) -> bool:
        """Whether the plan is nearly used up."""
        return self.window.likely_left <= TAIL * self.window.learners

    @property
    def _learner_share(self) -> float:
        return self.window.share * self._parts

    @property
    def _mean_size(self) -> float:
        """Batches of a unit ahead, roughly."""
        if self.window.front >= len(self.plan):
            return 0.0
        position = self.plan.order(self.window.front)
        return min(self._size(float(self.plan.batches(position) or 1), position), NEAR)

    @property
    def _me(self) -> tuple[str, str]:
        return self.owner.learner, self.owner.instance

    # -- deciding ----------------------------------------------------------------------------------------

    def _plan_ahead(self, now: float) -> None:
        self._publish()
        if self._room <= 0.0:
            self.exhausted = self._allowance.final and self._certain
            self._wanting = None
            return
        wanted = self._wanted(now)
        if wanted <= 0.0:
            self._wanting = None
            return
        if self._wanting is None:
            self._wanting = now
        if not self._met:
            self._meet_when_due()
            return
        if self._parts > 1 and self.window.left * self.window.share < LAST:
            if self._part:
                self.exhausted = self.yielded = self._certain
                return
            self._take_over()
        if self.window.front >= len(self.plan):
            self._look_back(now)
            return
        if self._seek is not None and self._seek_front():
            return
        self._reserve(now)
        modest = int(
            self.window.left * self.window.share
        )  # near the end, no more than our share of what is left
        most = max(1, min(AT_ONCE, HOARD - len(self.hand), modest))
        while wanted > 0.0 and self._room > 0.0 and len(self._asking) < most:
            position = self._pick(now)
            if position is None:
                break
            wanted -= self._claim(position, now)
            self._wanting = None
        if wanted > 0.0 and len(self._asking) < most and not self._looking:
            self._look(now)

    def _take_over(self) -> None:
        """From here on this part claims for the whole learner."""
        self._parts = 1
        self.met(self._peers)

    def _reserve(self, now: float) -> None:
        """The window must hold what all learners claim ahead: ours is the low-water mark, in units."""
        batch = self.pace.batch(now)
        if batch is not None:
            position = self.plan.order(self.window.front)
            unit = batch * self._size(float(self.plan.batches(position) or 1), position)
            self.window.reserve(self.pace.low_water(now, tail=True) / max(1e-9, unit))

    @property
    def _certain(self) -> bool:
        """Whether what we have of an allowance will not change: a unit of unknown size may turn out to be smaller."""
        bounded = self._allowance.batches is not None
        return not (self._asking or (bounded and not all(map(self._is_sized, self.hand))))

    @property
    def _room(self) -> float:
        """Batches that may still be taken."""
        return self._allowance.limit - self.promised

    def _wanted(self, now: float) -> float:
        return min(self._room, self._wished(now))

    def _wished(self, now: float) -> float:
        wanted = self.pace.wanted(now, self.tail)
        if wanted and self.pace.batch(now) is None and self.pace.started is None:
            # Nothing timed yet: a few more units hide the first claims' latency where there are plenty.
            wanted = max(wanted, self._first - self.pace.ahead)
        if self.pace.inline and not self.pace.observed:
            # A loader first fills its own queue at full speed; that must not be taken for the speed of training.
            wanted = min(wanted, max(0.0, max(self._first, self._handed) - self.pace.ahead))
        return wanted

    @property
    def _first(self) -> float:
        """Batches to begin with."""
        few = min(3, len(self.plan) // 64) + 1.0
        size = float(self.plan.batches(self.plan.order(0)) or 1)
        return max(few, min(FIRST, few * size))

    def _pick(self, now: float) -> int | None:
        window = self.window
        if self._look_first:
            return None
        may_look = not self._scans or now >= self._next_scan
        late = min(LARGEST_FIRST * window.learners, LARGEST_SHARE * len(self.plan))
        if window.learners > 1 and window.likely_left <= late and window.uneven:
            position = self._stolen(window.largest)
            if position is not None or may_look:
                return position
        position = window.home()
        if position is not None and window.likely_left > FEW * window.learners:
            self._thefts = 0  # a listing is for thefts right after it; later it is old
        if position is None:
            position = self._stolen(window.largest if window.uneven else window.steal)
        if position is None and not may_look:
            position = window.home(presuming=True)
        if position is None and not may_look:
            # Names are tried, unless most of what is not known to be claimed must be by now.
            self._look_first = window.likely_left < window.left / STALE
            position = None if self._look_first else window.steal(unlisted=True)
        return position

    def _stolen(self, choose: Callable[[], int | None]) -> int | None:
        if self._thefts <= 0:
            return None
        self._thefts -= 1
        return choose()

    def _claim(self, position: int, now: float, attempt: int = 0, begin: int = 0) -> float:
        identifier = self.plan.identifier(position)
        self._sequence += 1
        record = ClaimRecord(
            learner=self.owner.learner,
            instance=self.owner.instance,
            worker=self.owner.worker,
            nonce=self._nonce(),
            sequence=self._sequence,
        )
        batches = self.plan.batches(position)
        weight = max(0.0, float(batches or 1) - begin)
        take = min(self._room, self._whole(weight, batches))
        claim = Claim(
            position=position,
            identifier=identifier,
            attempt=attempt,
            begin=begin,
            key=self.keys.claim(identifier, attempt),
            data=record.encode(),
            decided=now if self._wanting is None else self._wanting,
            size=0.0,
            weight=weight,
            end=begin + int(take) if batches is not None and take < weight else None,
        )
        self._promise(claim, take)
        self._set_bound(claim)
        self.window.claimed(position)
        self._expect(claim)
        self._asking[claim] = None
        self._asked.append(claim)
        self.asks.ask(PutIfAbsent(claim.key, claim.data), partial(self._created, claim))
        return claim.size

    def _size(self, weight: float, position: int) -> float:
        """Batches to expect of a unit: by what units of its kind have had, else by what the plan says."""
        if self._expected:
            return weight * self._counted / self._expected
        return weight if self.plan.batches(position) is not None else PLENTY

    def _whole(self, weight: float, batches: int | None) -> float:
        """What all of a unit counts for: of unknown size, as much as may be taken, if there is a bound to that."""
        if batches is not None:
            return weight
        return self._room if self._allowance.batches is not None else 0.0

    def _promise(self, claim: Claim, take: float) -> None:
        """Keep `promised` in step with what `claim` counts for."""
        self.promised += take - claim.take
        claim.take = take

    def _expect(self, claim: Claim) -> None:
        """Set how many batches the attempt is expected to have."""
        bounded = self._allowance.batches is not None or claim.end is not None
        size = self._size(claim.weight, claim.position)
        claim.size = min(size, claim.take) if bounded else size
        self._weigh(claim)

    def _weigh(self, claim: Claim) -> None:
        """Keep `pace.ahead` in step with what `claim` still has to hand out."""
        left = 0.0 if claim.state is State.LOST else claim.size - claim.handed
        left = max(left, 0.0 if claim.loaded or claim.state is State.LOST else 1.0)
        self.pace.ahead += left - claim.in_mind
        claim.in_mind = left

    # -- claiming ----------------------------------------------------------------------------------------

    def _created(self, claim: Claim, answer: Answer, now: float) -> None:
        del self._asking[claim]
        if answer is True:
            claim.state = State.WON
            self.hand[claim] = None
            self._won.append(claim)
            self.asks.ask(Get(claim.key), partial(self._confirmed, claim))
            self._meet_when_due()
            return
        self.revoke(claim)
        self._lost.append(claim)
        self._wanting = claim.decided if self._wanting is None else min(claim.decided, self._wanting)
        self._known_attempts.add((claim.identifier, claim.attempt))
        self._thefts = 0
        self._look_first = not (self._scans and now < self._next_scan)

    def _confirmed(self, claim: Claim, answer: Answer, now: float) -> None:
        if answer == claim.data:
            claim.state = State.OURS
            self._proven.append(claim)
            self.pace.claimed(now - claim.decided)
            self._bound(claim)
            return
        self.revoke(claim)
        found = "nothing" if answer is None else "another claim"
        said = "the store said we created it, then showed"
        self.asks.fail(MailboxRefusedError(f"{claim.key}: {said} {found}; it cannot hold a queue"))

    # -- what is beyond an allowance ---------------------------------------------------------------------

    def _bound(self, claim: Claim) -> None:
        """The claim is ours: settle where it ends."""
        unsized = self.plan.batches(claim.position) is None
        if not unsized and claim.end is not None and not claim.loaded:
            # What was asked for beside it may have been lost since.
            self._promise(claim, min(claim.weight, claim.take + max(0.0, self._room)))
            claim.end = claim.begin + int(claim.take) if claim.take < claim.weight else None
            self._set_bound(claim)
            self._expect(claim)
        if claim.end is not None:
            self._give_surplus(claim)
        elif self._allowance.cut:
            self._cut_open(claim)

    def _cut_open(self, claim: Claim) -> None:
        """Somebody waits for what we may not take of a unit whose size nobody knows."""
        unsized = self.plan.batches(claim.position) is None
        if unsized and claim.state is not State.LOST and claim.end is None and not claim.loaded:
            self._promise(claim, max(claim.take, claim.read))
            claim.end = claim.begin + int(claim.take)
            if claim.state is State.OURS:
                self._give_surplus(claim)

    def _set_bound(self, claim: Claim) -> None:
        """A loader reads no further than its claim may go."""
        allowance = self._allowance
        limited = allowance.final and allowance.batches is not None
        unsized = self.plan.batches(claim.position) is None
        claim.bound = claim.begin + int(claim.take) if limited and unsized else None
        claim.bound = claim.bound if claim.end is None else claim.end

    def _give_surplus(self, claim: Claim) -> None:
        assert claim.end is not None
        self._surpluses += 1
        self._owed += 1
        self._cut.append(claim)
        self.asks.ask(self._back(claim, claim.end, SURPLUS), partial(self._gave, claim))

    def _gave(self, claim: Claim, answer: Answer, now: float) -> None:  # noqa: ARG002
        claim.given = True
        self._owed -= 1
        self._given.append(claim)

    # -- looking -----------------------------------------------------------------------------------------

    def _look(self, now: float) -> None:
        if self._scans and now < self._next_scan and not self._look_first:
            return
        self._looking = True
        start = self.window.unknown_from()
        after = self.keys.claim(self.plan.identifier(start - 1)) if start else self.keys.units
        page = PAGE if self.plan.natural and not self._scans else None
        self.asks.ask(List(self.keys.units, after, page), partial(self._listed, start, page, now))

    def _listed(self, start: int, page: int | None, asked: float, answer: Answer, now: float) -> None:
        assert isinstance(answer, list)
        self._looking = self._look_first = False
        places = self._positions(answer)
        whole = page is None or len(answer) < page
        stop = len(self.plan) if whole or not places else places[-1] + 1
        self.window.saw(places, start, stop)
        self._thefts = max(1, min(THEFTS, self.window.left // (FEW * self.window.learners)))
        self._next_scan = now + SCAN_SHARE * max(0.0, now - asked - self.asks.quickest)
        if self._may_seek and not whole and start == 0:
            self._seek = (stop, len(self.plan))
        self._may_seek = False
        self._meet_when_due()

    def _positions(self, keys: list[str]) -> list[int]:
        """Positions of the attempt-0 claims among `keys`, ascending; keys of no unit of ours are passed over."""
        cut = len(self.keys.units)
        found = self.plan.find_all([key[cut:] for key in keys])
        strange = [key for key, place in zip(keys, found, strict=True) if place is None]
        for parsed in map(self.keys.parse_claim, strange):
            if parsed is not None and self.plan.find(parsed[0]) is not None:
                self._known_attempts.add(parsed)
        return [place for place in found if place is not None]

    def _meet_when_due(self) -> None:
        """List the learners before the first claim, and again as our claims grow."""
        if self._sequence >= self._meeting_at and not self._meeting:
            self._meeting = True
            self.asks.ask(List(self.run.learners), self._met_learners)

    def _met_learners(self, answer: Answer, now: float) -> None:  # noqa: ARG002
        assert isinstance(answer, list)
        self._met, self._meeting = True, False
        fresh = [key for key in answer if key not in self._roster]
        self._roster.update(fresh)
        logs = {key: parsed for key in fresh if (parsed := self.run.parse_log(key)) is not None}
        for key, (learner, instance, process, _) in logs.items():
            twin = (
                learner == self.owner.learner and instance != self.owner.instance and process in ("main", "0")
            )
            if twin and (learner, instance) not in self._peers:
                self.asks.ask(Get(key), partial(self._read_twin, key))
        for learner, instance, number, grade in filter(None, map(self.run.parse_grade, fresh)):
            if number >= self._grades.get((learner, instance), (0, 0))[0]:
                self._grades[learner, instance] = number, grade
        self.met({log[:2] for log in logs.values()})
        growth = MEETING if self._grades.keys() >= self._peers else 2
        self._meeting_at = min(growth * max(1, self._sequence), self._sequence + MEETING_MOST)

    def _publish(self) -> None:
        """Tell the others, if there are any, how fast we are: in a key's name, so that one listing tells all speeds.

        The n-th time takes 2^n claims of this pass, so that a speed that wavers leaves few keys in a long run.
        """
        own = self.pace.grade
        if own == self._told or own is None or self._part or self.window.learners == 1:
            return
        number, published = self._grades.get(self._me, (0, None))
        grade = own + round(2 * log2(self._parts))
        if grade == published:
            self._told = own
        elif self._sequence >= 2**number - 1:
            self._told = own
            self._grades[self._me] = number + 1, grade
            key = self.run.grade(*self._me, number + 1, grade)
            self.asks.ask(PutIfAbsent(key, GradeRecord(grade=grade).encode()), lambda answer, now: None)  # noqa: ARG005

    def _read_twin(self, key: str, answer: Answer, now: float) -> None:  # noqa: ARG002
        page = _page_of_another(answer, key)
        if page is not None:
            self._twins.append(page)

    def _seek_front(self) -> bool:
        """Joined late: find where the claims end by halving, one small listing at a time; False when found."""
        assert self._seek is not None
        low, high = self._seek
        if high - low <= PAGE // 2:
            self._seek = None
            self.window.start_at(max(0, low - PAGE // 4))
            return False
        if not self._looking:
            self._looking = True
            after = self.keys.claim(self.plan.identifier((low + high) // 2 - 1))
            self.asks.ask(List(self.keys.units, after, 1), self._sought)
        return True

    def _sought(self, answer: Answer, now: float) -> None:  # noqa: ARG002
        assert self._seek is not None
        assert isinstance(answer, list)
        self._looking = False
        low, high = self._seek
        middle = (low + high) // 2
        self._seek = (middle, high) if middle in self._positions(answer) else (low, middle)

    # -- attempts that were given back -------------------------------------------------------------------

    def _look_back(self, now: float) -> None:
        if self._asking or self._looking or now < self._next_look_back:
            return
        if not self._backs:
            self._looking = True
            if self.recovery is None or self.recovery.asks_for_ends:
                self.asks.ask(List(self.keys.backs), self._listed_backs)
            else:
                self.recovery.look(self._ended, now, self._looked_into)
            return
        self._looking = True
        identifier, attempt = self._backs.popitem()
        key = self.keys.back(identifier, attempt)
        self.asks.ask(Get(key), partial(self._read_back, identifier, attempt))

    def _listed_backs(self, answer: Answer, now: float) -> None:
        assert isinstance(answer, list)
        self._looking = False
        ended: dict[str, int] = {}
        for parsed in map(self.keys.parse_back, answer):
            if parsed is not None and self.plan.find(parsed[0]) is not None:
                ended[parsed[0]] = max(parsed[1], ended.get(parsed[0], 0))
        self._ended = ended
        self._backs = {
            identifier: attempt
            for identifier, attempt in ended.items()
            if (identifier, attempt + 1) not in self._known_attempts
        }
        if self._backs:
            self._pause = LOOK_BACK_SOON
            return
        self.empty_looks += 1
        if self.recovery is not None and not self.recovery.over:
            if self.empty_looks == 1 and self.window.learners > 1:
                self._next_look_back = now + self.recovery.pause  # they are about to end, too
                return
            self._looking = True
            self.recovery.look(ended, now, self._looked_into)
            return
        held = not self._allowance.final and self.empty_looks < HELD_LOOKS
        self.exhausted = self._certain and not (self.waits or held)
        self._next_look_back = now + self._pause
        self._pause = min(LOOK_BACK_EVERY, 2 * self._pause)

    def _looked_into(self, now: float) -> None:
        """What is unfinished was looked into."""
        assert self.recovery is not None
        self._looking = False
        self.exhausted = self.recovery.over and self._certain
        self._next_look_back = now + self.recovery.pause

    def _holds(self, attempt: tuple[str, int]) -> bool:
        return any((claim.identifier, claim.attempt) == attempt for claim in self.hand)

    def _read_back(self, identifier: str, attempt: int, answer: Answer, now: float) -> None:
        self._looking = False
        if not isinstance(answer, bytes) or self.on_hold:
            return  # listed, and gone: somebody cleans this prefix; or it is to be looked for later
        begin = BackRecord.decode(answer, self.keys.back(identifier, attempt)).begin
        self._known_attempts.add((identifier, attempt + 1))
        if not self.stopped and self._room > 0.0:
            self._claim(self.plan.position(identifier), now, attempt + 1, begin)


def _page_of_another(answer: Answer, key: str) -> LogPage | None:
    """A log that is read for its hints alone; None when it cannot be."""
    try:
        return LogPage.decode(answer, key) if isinstance(answer, bytes) else None
    except RecordError:
        return None
