"""The account of one pass: which batches were trained once, twice, or by nobody, and what follows. No I/O.

The attempts at a unit form a chain. Attempt 0 begins at batch 0, attempt n + 1 where the record says that attempt n
ended, and the last one goes to the unit's end: where a log says `whole`, or else where the plan has it. Then:

- a batch that two spans cover was trained twice, whoever they are of;
- a batch that none covers is *left* while somebody may still train it, and *lost* when nobody will;
- a span beyond its attempt's recorded end is *late*: the owner did not know. It repeats what the next attempt trained
  too, and is harmless where nobody else did;
- what a learner trained after the state from which it came back is *undone*: it went with the model of then, and
  does not count;
- what cannot be true together is a contradiction: logs and records then prove nothing.

Time and memory go by spans and give-back records, never by batches, and a unit with one span costs next to nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import pairwise
from typing import TYPE_CHECKING

from msgspec import structs

from shardqueue.claims import SURPLUS
from shardqueue.intervals import Intervals
from shardqueue.rollback import RESUMED

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from shardqueue.audit.expectation import Expectation
    from shardqueue.ledger import Ledger, Log
    from shardqueue.records import BackRecord, TrainedSpan

Owned = tuple["Log", "TrainedSpan"]


class Kind(Enum):
    """What is wrong with some batches, or open about them."""

    CONTRADICTION = "contradiction"
    LOST = "lost"
    REPEATED = "repeated"
    LATE = "late"
    LEFT = "left"


class Verdict(Enum):
    """What is proven of a pass, the worst last."""

    ONCE = "exactly once"
    AT_MOST_ONCE = "at most once"
    REPEATED = "repeated"
    LOST = "lost"
    CONTRADICTORY = "contradictory"


@dataclass(frozen=True, slots=True)
class Part:
    """What one process had to do with a finding.

    Attributes:
        learner, instance, process: who.
        attempt: at which attempt of the unit.
        begin, end: the batches of that attempt that it trained; the same number for none.
        start, stop: when, in wall-clock seconds by its own clock; None when it only held the attempt.
        ended: who ended the attempt, at which batch and why, if that is on record.
    """

    learner: str
    instance: str
    process: str
    attempt: int
    begin: int = 0
    end: int = 0
    start: float | None = None
    stop: float | None = None
    ended: BackRecord | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """Something to be said of some batches.

    Attributes:
        kind: what it is.
        pass_: name of the pass.
        unit: the unit, or the first of several in a row.
        last: the last of those, None for one. Of units that are left, not all between need be meant.
        units: how many units.
        begin, end: the batches of the unit; `end` is None when the unit's end is not known.
        batches: how many in all, None when that is not known.
        what: why, in a few words.
        parts: who had to do with it.
    """

    kind: Kind
    pass_: str
    unit: str
    what: str
    begin: int = 0
    end: int | None = None
    batches: int | None = None
    last: str | None = None
    units: int = 1
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True, slots=True)
class Situation:
    """What is known of the run as a whole.

    Attributes:
        alive: (learner, instance, process) of those that may go on training.
        ended: somebody left because nothing was left to claim.
        reclaims: attempts of silent learners are handed out again.
    """

    alive: frozenset[tuple[str, str, str]] = frozenset()
    ended: bool = False
    reclaims: bool = False

    @property
    def running(self) -> bool:
        """Whether anybody is there to train what is left."""
        return bool(self.alive)


@dataclass(slots=True)
class Evidence:
    """What logs and records say of one pass.

    Attributes:
        name: of the pass.
        trained: by unit, what was trained of it and by whom.
        held: by unit and attempt, who said last that it holds it.
        backs: by unit and attempt, how it was ended.
        noted: (learner, instance) of those who noted that every unit is trained whole.
        learners: (learner, instance) of those who trained in it.
        lockstep: its learners stepped together.
        final: it is the last pass of the run. Of those before it, nobody says whether they came to their end.
    """

    name: str
    trained: dict[str, list[Owned]] = field(default_factory=dict)
    held: dict[str, dict[int, Log]] = field(default_factory=dict)
    backs: dict[str, dict[int, BackRecord]] = field(default_factory=dict)
    noted: set[tuple[str, str]] = field(default_factory=set)
    learners: set[tuple[str, str]] = field(default_factory=set)
    lockstep: bool = False
    final: bool = True


def sort_by_pass(ledger: Ledger) -> dict[str, Evidence]:
    """What the logs say of each pass."""
    found: dict[str, Evidence] = {}

    def of(name: str) -> Evidence:
        return found.setdefault(name, Evidence(name))

    for log in ledger.logs.values():
        newest = log.newest
        for span in log.spans.values():
            evidence = of(span.pass_)
            evidence.trained.setdefault(span.unit, []).append((log, span))
            evidence.learners.add(log.owner)
            evidence.lockstep |= bool(span.ticks)
        for claim in newest.held:
            of(claim.pass_).held.setdefault(claim.unit, {})[claim.attempt] = log
        if newest.reached is not None:
            of(newest.reached[0]).lockstep = True
    return found


@dataclass(slots=True)
class Account:
    """What is proven of one pass.

    Attributes:
        name: of the pass.
        units: how many it has, None when nobody can know.
        total: batches it has, None when nobody can know.
        whole: units trained to their end.
        trained: batches trained, each counted once.
        repeated: how often a batch was trained again.
        left: batches that are not trained, and may still be.
        lost: batches that nobody will train any more.
        unsized: units of which nobody knows how many batches are left or lost.
        short: units that `load` ended before the plan does, or after it.
        learners: how many trained in it.
        reclaimed: attempts that others ended because their owner was gone or silent. What it trained after its last
            log, and never wrote, is in no log.
        undone: batches that a learner trained after the state from which it came back.
        left_out: what is left is what ranks leave that step together: fewer batches than there were ranks, which
            uneven="drop" does, and the ends of units whose size no plan knows. Nobody holds any of it.
        counts: findings by kind.
        findings: the first of each kind.
    """

    name: str
    units: int | None
    total: int | None
    whole: int = 0
    trained: int = 0
    repeated: int = 0
    left: int = 0
    lost: int = 0
    unsized: int = 0
    short: int = 0
    learners: int = 0
    reclaimed: int = 0
    undone: int = 0
    left_out: bool = False
    counts: Counter[Kind] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)

    @property
    def verdict(self) -> Verdict:
        """What is proven; the worst of what was found."""
        for kind, verdict in _VERDICTS.items():
            if self.counts[kind]:
                return verdict
        return Verdict.ONCE


_VERDICTS = {
    Kind.CONTRADICTION: Verdict.CONTRADICTORY,
    Kind.LOST: Verdict.LOST,
    Kind.REPEATED: Verdict.REPEATED,
    Kind.LEFT: Verdict.AT_MOST_ONCE,
}


def account(evidence: Evidence, expected: Expectation, situation: Situation, most: int) -> Account:
    """Judge one pass.

    Args:
        evidence: what logs and records say of it.
        expected: what it has to hand out.
        situation: what is known of the run.
        most: findings of each kind to keep; all are counted.
    """
    judge = _Judge(evidence, expected, situation, most)
    judge.judge()
    return judge.account


class _Judge:
    def __init__(self, evidence: Evidence, expected: Expectation, situation: Situation, most: int) -> None:
        self._evidence, self._expected, self._situation = evidence, expected, situation
        self._most = most
        self._unnamed = False
        self._open: dict[str, Finding] = {}
        self.account = Account(evidence.name, expected.units, expected.total, learners=len(evidence.learners))

    def judge(self) -> None:
        evidence, account = self._evidence, self.account
        odd = evidence.backs.keys() | evidence.held.keys()
        for unit, spans in evidence.trained.items():
            if unit in odd or len(spans) > 1 or not self._is_plain(unit, spans[0][1]):
                self._unit(unit, spans)
        for unit in odd - evidence.trained.keys():
            self._unit(unit, [])
        self._absent(evidence.trained.keys() | odd)
        for finding in self._open.values():
            self._keep(finding)
        why = Counter(back.why for one in evidence.backs.values() for back in one.values())
        account.reclaimed = why["gone"] + why["silent"]
        in_step = evidence.lockstep or why[SURPLUS] > 0
        finished = self._situation.ended and not self._situation.running
        known = not account.lost and not self._unnamed
        account.left_out = in_step and finished and known and account.left < account.learners
        if evidence.noted and account.counts[Kind.LEFT] + account.counts[Kind.LOST]:
            who = tuple(Part(learner, instance, "", 0) for learner, instance in sorted(evidence.noted))
            what = "it is noted that every unit of the pass is trained whole, which is not so"
            self._find(Kind.CONTRADICTION, "", what, parts=who)
        account.findings.sort(key=lambda found: (_ORDER[found.kind], found.unit, found.begin))

    def _is_plain(self, unit: str, span: TrainedSpan) -> bool:
        """Take in a unit that one span covers from its beginning to its end; False when it is none."""
        plain = span.whole and not span.attempt and not span.begin and span.end >= 0
        if not plain or self._expected.refusal(unit) is not None:
            return False
        self.account.trained += span.end
        self.account.whole += 1
        self.account.short += self._expected.batches(unit) not in (None, span.end)
        return True

    def _unit(self, unit: str, spans: list[Owned]) -> None:
        backs = self._evidence.backs.get(unit, {})
        sound = self._sound(unit, spans)
        begins = self._chain(unit, sound, backs)
        size = self._size(unit, sound, backs)
        sound = list(self._kept(sound, backs))
        covered = Intervals((span.begin, span.end) for _, span in sound)
        self.account.trained += len(covered)
        for begin, end, owned in _stretches(sound):
            self._covered(unit, begin, end, owned, backs)
        known = size
        if known is None:
            known = max([span.end for _, span in sound] + [back.begin for back in backs.values()], default=0)
        gaps = list(covered.gaps(0, known))
        for begin, end in gaps:
            for first, stop in _cut(begin, end, begins):
                self._gap(unit, first, stop, begins, sound)
        if size is None:
            self._gap(unit, known, None, begins, sound)
        elif not gaps:
            self.account.whole += 1

    # -- the chain of attempts ---------------------------------------------------------------------------

    def _sound(self, unit: str, spans: list[Owned]) -> list[Owned]:
        """The spans that can be: batches are counted upwards from 0."""
        refusal = self._expected.refusal(unit)
        if refusal is not None and spans:
            self._contradiction(unit, f"it was trained, but {refusal}", spans)
        sound = []
        for log, span in spans:
            if 0 <= span.begin <= span.end and span.attempt >= 0:
                sound.append((log, span))
            else:
                what = (
                    f"a log has batches {span.begin} to {span.end} of attempt {span.attempt}, which cannot be"
                )
                self._contradiction(unit, what, [(log, span)])
        return sound

    def _kept(self, spans: Iterable[Owned], backs: Mapping[int, BackRecord]) -> Iterator[Owned]:
        """Without what was undone."""
        for log, span in spans:
            back = backs.get(span.attempt)
            if back is None or back.why != RESUMED or span.end <= back.begin:
                yield log, span
                continue
            self.account.undone += span.end - max(span.begin, back.begin)
            if span.begin < back.begin:
                yield log, structs.replace(span, end=back.begin, whole=False)

    def _chain(self, unit: str, spans: list[Owned], backs: Mapping[int, BackRecord]) -> list[int]:
        """Where each attempt begins, as far as that is on record."""
        begins = [0]
        while (back := backs.get(len(begins) - 1)) is not None:
            if back.begin < begins[-1]:
                what = f"attempt {len(begins) - 1} begins at batch {begins[-1]}, and its end is put at {back.begin}"
                self._contradiction(unit, what, _of(spans, len(begins) - 1))
            begins.append(back.begin)
        for attempt in sorted(backs):
            if attempt >= len(begins):
                what = f"the end of attempt {attempt} is on record, that of attempt {attempt - 1} is not"
                self._contradiction(unit, what, _of(spans, attempt))
        for log, span in spans:
            if span.attempt >= len(begins):
                what = f"attempt {span.attempt} was trained, but no record ends attempt {span.attempt - 1}"
                self._contradiction(unit, what, [(log, span)])
            elif span.begin < begins[span.attempt]:
                what = f"attempt {span.attempt} begins at batch {begins[span.attempt]}, but was trained before it"
                self._contradiction(unit, what, [(log, span)])
        return begins

    def _size(self, unit: str, spans: list[Owned], backs: Mapping[int, BackRecord]) -> int | None:
        """Where the unit ends: where a log says so, else by the plan; None when nobody can know."""
        planned = self._expected.batches(unit)
        wholes = [owned for owned in spans if owned[1].whole]
        if not wholes:
            return planned
        size = max(span.end for _, span in wholes)
        self.account.short += planned not in (None, size)
        ends = sorted({span.end for _, span in wholes})
        if len(ends) > 1:
            self._contradiction(unit, f"the logs have it whole at {' and at '.join(map(str, ends))}", wholes)
        beyond = [owned for owned in spans if owned[1].end > size]
        if beyond:
            self._contradiction(unit, f"it is whole at {size}, but was trained beyond", [*wholes, *beyond])
        for attempt, back in sorted(backs.items()):
            if back.begin > size:
                what = (
                    f"it is whole at {size}, but attempt {attempt} is put on record as ended at {back.begin}"
                )
                self._contradiction(unit, what, wholes)
        return size

    # -- batches that were trained -----------------------------------------------------------------------

    def _covered(
        self, unit: str, begin: int, end: int, owned: list[Owned], backs: Mapping[int, BackRecord]
    ) -> None:
        if len(owned) > 1:
            again = (len(owned) - 1) * (end - begin)
            self.account.repeated += again
            processes = {_process(log) for log, _ in owned}
            what = f"trained {len(owned)} times"
            if len(processes) == 1:
                what += ", by one process"
            if len({span.attempt for _, span in owned}) < len(owned):
                what += ", on one attempt"
            self._find(Kind.REPEATED, unit, what, begin, end, again, self._parts(unit, owned))
            return
        _, span = owned[0]
        back = backs.get(span.attempt)
        if back is not None and end > back.begin:
            begin = max(begin, back.begin)
            what = f"trained after attempt {span.attempt} was put on record as ended at {back.begin}; by nobody else"
            self._find(Kind.LATE, unit, what, begin, end, end - begin, self._parts(unit, owned))

    # -- batches that were not ---------------------------------------------------------------------------

    def _gap(self, unit: str, begin: int, end: int | None, begins: list[int], spans: list[Owned]) -> None:
        """Nobody trained these: say whose they were."""
        attempt = max(number for number, first in enumerate(begins) if first <= begin)
        back = self._evidence.backs.get(unit, {}).get(attempt)
        holder = self._evidence.held.get(unit, {}).get(attempt)
        trainers = _of(spans, attempt)
        if holder is None and trainers:
            holder = trainers[-1][0]
        if back is not None:
            kind, what = self._before_its_end(back, holder)
        elif holder is not None:
            kind, what = self._in_hand(holder)
        elif attempt:
            ended = self._evidence.backs[unit][attempt - 1]
            self._is_open(
                f"on offer since {ended.learner} ended the attempt before ({ended.why})", unit, begin, end
            )
            return
        else:
            kind, what = self._in_no_log()
        parts = self._parts(unit, trainers) if trainers else ()
        if holder is not None and not any(_process(log) == _process(holder) for log, _ in trainers):
            parts += (Part(*_process(holder), attempt, begin, begin, ended=back),)
        self._add(kind, None if end is None else end - begin)
        self._find(kind, unit, what, begin, end, None if end is None else end - begin, parts)

    def _is_open(self, what: str, unit: str, begin: int, end: int | None) -> None:
        """Nobody has these: of many such units it is enough to say how many, and which is the first and the last."""
        batches = None if end is None else end - begin
        self._add(Kind.LEFT, batches)
        self._merge(Finding(Kind.LEFT, self.account.name, unit, what, begin, end, batches))

    def _merge(self, new: Finding) -> None:
        known = self._open.get(new.what)
        self._open[new.what] = new if known is None else _merged(known, new)

    def _before_its_end(self, back: BackRecord, holder: Log | None) -> tuple[Kind, str]:
        if holder is not None and self._lives(holder):
            return (
                Kind.LEFT,
                f"held by {holder.newest.learner}, whose log does not say yet that it is trained",
            )
        what = f"not known to be trained when {back.learner} ended the attempt at batch {back.begin} ({back.why})"
        return Kind.LOST, what

    def _in_hand(self, holder: Log) -> tuple[Kind, str]:
        who = holder.newest.learner
        if self._lives(holder):
            return Kind.LEFT, f"held by {who}"
        how = "is gone" if holder.newest.left is None else f"left ({holder.newest.left})"
        if self._situation.reclaims and self._situation.running:
            return Kind.LEFT, f"held by {who}, which {how}; it will be handed out again"
        return Kind.LOST, f"held by {who}, which {how}"

    def _in_no_log(self) -> tuple[Kind, str]:
        over = self._situation.ended and not self._situation.running
        if over and self._evidence.final and not self._evidence.lockstep:
            return Kind.LOST, "in no log: whoever claimed it never wrote so"
        return Kind.LEFT, "in no log"

    def _absent(self, known: Collection[str]) -> None:
        kind, what = self._in_no_log()
        units = self._expected.units
        if units is None or units <= len(known):
            return
        stretches = list(self._expected.absent(known))
        for stretch in stretches:
            self._add(kind, stretch.batches)
            last = stretch.last if stretch.units > 1 else None
            end = stretch.batches if last is None else None
            found = Finding(
                *(kind, self.account.name, stretch.first, what),
                end=end,
                batches=stretch.batches,
                last=last,
                units=stretch.units,
            )
            if kind is Kind.LEFT:
                self._merge(found)
            else:
                self._keep(found)
        if not stretches:
            missing = units - len(known)
            self.account.unsized += missing
            self._unnamed = True
            self._keep(
                Finding(kind, self.account.name, "", f"{what}; a listed plan cannot name them", units=missing)
            )

    def _add(self, kind: Kind, batches: int | None) -> None:
        if batches is None:
            self.account.unsized += 1
        elif kind is Kind.LOST:
            self.account.lost += batches
        else:
            self.account.left += batches

    # -- saying so ---------------------------------------------------------------------------------------

    def _lives(self, log: Log) -> bool:
        return _process(log) in self._situation.alive

    def _parts(self, unit: str, owned: Iterable[Owned]) -> tuple[Part, ...]:
        backs = self._evidence.backs.get(unit, {})
        parts = [
            Part(
                *_process(log),
                span.attempt,
                span.begin,
                span.end,
                span.start,
                span.stop,
                backs.get(span.attempt),
            )
            for log, span in owned
        ]
        return tuple(sorted(parts, key=lambda part: (part.attempt, part.begin, part.learner, part.instance)))

    def _contradiction(self, unit: str, what: str, owned: Iterable[Owned]) -> None:
        self._find(Kind.CONTRADICTION, unit, what, parts=self._parts(unit, owned))

    def _find(
        self,
        kind: Kind,
        unit: str,
        what: str,
        begin: int = 0,
        end: int | None = None,
        batches: int | None = None,
        parts: tuple[Part, ...] = (),
    ) -> None:
        self._keep(Finding(kind, self.account.name, unit, what, begin, end, batches, parts=parts))

    def _keep(self, finding: Finding) -> None:
        self.account.counts[finding.kind] += 1
        if self.account.counts[finding.kind] <= self._most:
            self.account.findings.append(finding)


_ORDER = {kind: number for number, kind in enumerate(Kind)}


def _merged(one: Finding, other: Finding) -> Finding:
    """Two findings of which the same is to be said, as one; not every unit between its first and last is meant."""
    known = one.batches is not None and other.batches is not None
    return replace(
        one,
        unit=min(one.unit, other.unit),
        last=max(one.last or one.unit, other.last or other.unit),
        units=one.units + other.units,
        begin=0,
        end=None,
        batches=(one.batches or 0) + (other.batches or 0) if known else None,
    )


def _process(log: Log) -> tuple[str, str, str]:
    return log.newest.learner, log.newest.instance, log.newest.process


def _of(spans: Iterable[Owned], attempt: int) -> list[Owned]:
    return [owned for owned in spans if owned[1].attempt == attempt]


def _cut(begin: int, end: int, at: Iterable[int]) -> Iterator[tuple[int, int]]:
    """`[begin, end)` in pieces, cut at these batches."""
    return pairwise([begin, *sorted({place for place in at if begin < place < end}), end])


def _stretches(spans: Iterable[Owned]) -> Iterator[tuple[int, int, list[Owned]]]:
    """The batches that are covered, in stretches that the same spans cover, in order."""
    opening: dict[int, list[Owned]] = {}
    for owned in spans:
        if owned[1].begin < owned[1].end:
            opening.setdefault(owned[1].begin, []).append(owned)
    edges = sorted(
        {edge for starts in opening.values() for _, span in starts for edge in (span.begin, span.end)}
    )
    covering: list[Owned] = []
    for begin, end in pairwise(edges):
        covering = [owned for owned in covering if owned[1].end > begin] + opening.get(begin, [])
        if covering:
            yield begin, end, covering
