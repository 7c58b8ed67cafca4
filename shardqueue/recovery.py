"""Out of units: is the pass trained whole, for whom must we wait, and who is silent for so long that others go on?

Only asked once nothing is left to claim. The logs say what is trained; a unit that none of them shows as trained
whole is somebody's. Its owner stands in a log or, if it was claimed after its owner's last one, in the claim. When
the owner left, when its process is gone from this machine, or when its log was silent for `after` seconds, its
attempt is ended where its own log says that training came to, and anybody may claim the next one.

Silence is added up over readings that follow one another closely; after a gap it begins anew. So neither an outage of
the store, which keeps everybody from writing, nor a pause of our own is held against anybody. An owner that was only
paused finds out before it hands out its next batch (`Session.still_ours`). What it trained since its last log is
trained twice, which the logs show.

Where many wait, a few of them read the logs, drawn by lot, and twice as many each time that `after` seconds have
passed; the others list the learners only. Who sees that all is trained leaves a note under a key that says so.

No I/O: the calls go through the asks of the claiming machine, like all others.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

from shardqueue.intervals import Intervals
from shardqueue.ledger import Ledger
from shardqueue.mailbox.calls import Get, List, PutIfAbsent
from shardqueue.records import BackRecord, ClaimRecord, LogPage, WholeRecord
from shardqueue.watching import Silence, Watched

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from shardqueue.asks import Asks
    from shardqueue.mailbox.calls import Answer, Call
    from shardqueue.plan import Plan
    from shardqueue.records import PassKeys, Process, RunKeys

    Attempt = tuple[str, int]
    """A unit and the number of an attempt at it."""
    Writer = tuple[str, str, str]
    """(learner, instance, process): whose log."""
    Question = tuple[Call, Callable[[Answer, float], None]]
    """A call, and what takes its answer."""

READERS, DOUBLINGS = 4, 16
"""Of many learners that wait, about so many read the logs at first; and how often that doubles until all do."""
ROUNDS = 6
"""Looks, at least, in the time after which a silent owner is given up."""
LOOK_SOON, LOOK_EVERY = 0.25, 2.0
"""Seconds between two looks: at first, and at most."""
QUIET = 2
"""A log that was not written for so many times as long as it should have may go on under another key."""
AT_ONCE = 256
"""Unfinished units that are looked into at once, at most."""
OWN_WRITES = 2
"""Writes of our own log after which what it does not name is not ours any more."""


class Recovery:
    """Finds out what is unfinished of one pass, and ends the attempts of those who are gone.

    Args:
        plan: the units.
        run, keys: of the run and of the pass.
        me: our learner and instance.
        asks: of the claiming machine.
        after: seconds of silence after which an owner is given up.
        holds: tells whether the claiming machine has an attempt in hand.
        seen: tells whether a process is seen on this machine.
        random: for the lot.

    Attributes:
        over: every unit is trained whole.
        asks_for_ends: it should be looked, before the next look, which attempts were ended: no log names the holder
            of some.
        waits_for: labels of those who hold what is not, and how many units each.
        began: when it first looked; None before.
        reclaimed: attempts ended so far, as (identifier, attempt, first batch to be handed out again, learner).
    """

    def __init__(
        self,
        plan: Plan,
        run: RunKeys,
        keys: PassKeys,
        me: tuple[str, str],
        asks: Asks,
        after: float,
        *,
        holds: Callable[[Attempt], bool],
        seen: Callable[[Process], bool | None],
        random: Random,
    ) -> None:
        self.over = False
        self.asks_for_ends = True
        self.waits_for: Counter[str] = Counter()
        self.reclaimed: list[tuple[str, int, int, str]] = []
        self._plan, self._run, self._keys, self._me = plan, run, keys, me
        self._asks, self._after = asks, after
        self._holds, self._seen = holds, seen
        self._lot = random.random()
        self.began: float | None = None
        self._pause = min(LOOK_SOON, after / ROUNDS)
        self._ledger = Ledger()
        self._whole = Intervals()
        self._pages: dict[Writer, list[str]] = {}
        self._final: set[str] = set()
        self._watched: dict[Writer, Watched] = {}
        self._owners: dict[Attempt, Writer] = {}
        self._named: set[Attempt] = set()
        self._disowned: dict[Attempt, int] = {}
        self._ended: dict[str, int] = {}
        self._begins: dict[Attempt, int] = {}
        self._given_up: set[Attempt] = set()
        self._unanswered = 0
        self._known: set[Attempt] = set()
        self._lists = True

    # -- one look ----------------------------------------------------------------------------------------

    def look(self, ended: dict[str, int], now: float, then: Callable[[float], None]) -> None:
        """Look once; `then` is called with the time once it is done.

        Args:
            ended: the last attempt that was ended of each unit of which any was. The next one is claimed.
            now: seconds by the monotonic clock.
            then: what to do after it.
        """
        self.began = now if self.began is None else self.began
        self._ended = ended
        self._done = then
        listing: list[Question] = [(List(self._run.learners), self._listed)]
        self._ask_if_any(listing if self._lists else [], self._begin, now)

    @property
    def pause(self) -> float:
        """Seconds until the next look is due."""
        pause, self._pause = self._pause, min(LOOK_EVERY, self._after / ROUNDS, 2 * self._pause)
        return pause

    def _ask(self, questions: list[Question], then: Callable[[float], None]) -> None:
        """Have all calls made, one or more; once all are answered, go on."""
        self._unanswered = len(questions)
        for call, take in questions:
            self._asks.ask(call, partial(self._answered, take, then))

    def _answered(
        self,
        take: Callable[[Answer, float], None],
        then: Callable[[float], None],
        answer: Answer,
        now: float,
    ) -> None:
        take(answer, now)
        self._unanswered -= 1
        if not self._unanswered:
            then(now)

    def _ask_if_any(self, questions: list[Question], then: Callable[[float], None], now: float) -> None:
        if questions:
            self._ask(questions, then)
        else:
            then(now)

    # -- what the logs say -------------------------------------------------------------------------------

    def _listed(self, answer: Answer, now: float) -> None:  # noqa: ARG002
        assert isinstance(answer, list)
        pages: dict[Writer, list[tuple[int, str]]] = {}
        for key in answer:
            note, log = self._run.parse_whole(key), self._run.parse_log(key)
            self.over = self.over or (note is not None and note[2] == self._keys.name)
            if log is not None:
                pages.setdefault(log[:3], []).append((log[3], key))
        self._pages = {writer: [key for _, key in sorted(keys)] for writer, keys in pages.items()}

    def _begin(self, now: float) -> None:
        if self.over or not self._drawn(now):
            self._done(now)
            return
        self._lists = False
        self._known = set(self._owners)
        busy = set(self._owners.values())
        questions: list[Question] = []
        for writer, (*before, last) in self._pages.items():
            final = [key for key in before if key not in self._final]
            questions += [(Get(key), partial(self._read_final, key)) for key in final]
            if writer in busy or writer not in self._watched:
                watched = self._watch(writer)
                watched.key = last
                questions.append((Get(last), partial(self._read, watched)))
        for writer in busy - self._pages.keys():
            self._watch(writer).read(None, now)  # it claimed, and has no log
        self._ask_if_any(questions, self._account, now)

    def _drawn(self, now: float) -> bool:
        """Whether it is on us to read the logs."""
        learners = len({writer[:2] for writer in self._pages})
        assert self.began is not None
        rounds = int((now - self.began) // self._after)
        return rounds > DOUBLINGS or self._lot * learners < READERS << rounds

    def _watch(self, writer: Writer) -> Watched:
        silence = Silence(longest=2 * self._after / ROUNDS, lapses=True)
        return self._watched.setdefault(writer, Watched(silence=silence))

    def _read_final(self, key: str, answer: Answer, now: float) -> None:  # noqa: ARG002
        self._final.add(key)
        if isinstance(answer, bytes):
            self._take_in(LogPage.decode(answer, key))

    def _read(self, watched: Watched, answer: Answer, now: float) -> None:
        watched.read(answer if isinstance(answer, bytes) else None, now)
        if watched.page is not None:
            self._take_in(watched.page)

    def _take_in(self, page: LogPage) -> None:
        self._ledger.read(page)
        for span in page.trained:
            position = self._plan.find(span.unit) if span.whole and span.pass_ == self._keys.name else None
            if position is not None:
                self._whole.add(position)

    # -- whose is what is left ---------------------------------------------------------------------------

    def _account(self, now: float) -> None:
        if len(self._whole) == len(self._plan):
            self.over = True
            note = WholeRecord(units=len(self._plan)).encode()
            self._ask(
                [(PutIfAbsent(self._run.whole(*self._me, self._keys.name), note), _nothing)], self._done
            )
            return
        named = {
            (held.unit, held.attempt): writer
            for writer, log in self._ledger.logs.items()
            for held in log.newest.held
            if held.pass_ == self._keys.name
        }
        unfinished = self._unfinished()
        self.asks_for_ends = any(a in self._given_up or a not in named for a in unfinished)
        unfinished = [attempt for attempt in unfinished if attempt not in self._given_up]
        found = {attempt: named.get(attempt) or self._owners.get(attempt) for attempt in unfinished}
        self._owners = {attempt: writer for attempt, writer in found.items() if writer is not None}
        self._named = named.keys() & self._owners.keys()
        questions: list[Question] = [
            (Get(self._keys.claim(*attempt)), partial(self._read_claim, attempt))
            for attempt, writer in found.items()
            if writer is None
        ]
        self._ask_if_any(questions, self._judge, now)

    def _unfinished(self) -> list[Attempt]:
        """The attempts that go on at the first units that are not whole."""
        found: list[Attempt] = []
        for start, stop in self._whole.gaps(0, len(self._plan)):
            for position in range(start, min(stop, start + AT_ONCE - len(found))):
                unit = self._plan.identifier(position)
                found.append((unit, self._ended.get(unit, -1) + 1))
            if len(found) == AT_ONCE:
                break
        return found

    def _read_claim(self, attempt: Attempt, answer: Answer, now: float) -> None:
        """Whose is an attempt that no log names?"""
        if not isinstance(answer, bytes):
            return
        record = ClaimRecord.decode(answer, self._keys.claim(*attempt))
        writer = record.learner, record.instance, "main"
        self._owners[attempt] = writer
        if writer not in self._pages:
            self._watch(writer).read(None, now)

    # -- who is gone -------------------------------------------------------------------------------------

    def _judge(self, now: float) -> None:
        others = [writer[0] for writer in self._owners.values() if writer[:2] != self._me]
        self.waits_for = Counter(others)
        # Of an owner found in this look the log was not read, or read before it may have claimed.
        known = {attempt: writer for attempt, writer in self._owners.items() if attempt in self._known}
        why = {attempt: self._why_gone(attempt, writer) for attempt, writer in known.items()}
        gone = {attempt: reason for attempt, reason in why.items() if reason}
        self._lists = any(map(self._may_have_moved, set(self._owners.values())))
        questions: list[Question] = [
            (Get(self._keys.back(unit, number - 1)), partial(self._read_begin, (unit, number)))
            for unit, number in gone
            if number and (unit, number) not in self._begins
        ]
        self._ask_if_any(questions, partial(self._give_up, gone), now)

    def _may_have_moved(self, writer: Writer) -> bool:
        """Whether a log may go on under a key that we do not know."""
        watched = self._watched.get(writer)
        if watched is None or watched.page is None or watched.unconfirmed:
            return True
        return watched.silence.seconds > QUIET * (watched.page.every or self._after / (2 * QUIET))

    def _why_gone(self, attempt: Attempt, writer: Writer) -> str:
        watched = self._watched.get(writer)
        if watched is None:
            return ""
        if writer[:2] == self._me:
            return "left" if self._is_disowned(attempt, watched) else ""
        page = watched.page
        if page is not None and page.left is not None and not page.rests and attempt in self._named:
            return "left"
        if watched.is_gone(self._seen):
            return "gone"
        return "silent" if watched.silence.seconds >= self._after else ""

    def _is_disowned(self, attempt: Attempt, watched: Watched) -> bool:
        """Whether a claim of ours is in nobody's hands: it was to be given back, and could not be."""
        if watched.page is None or attempt in self._named or self._holds(attempt):
            self._disowned.pop(attempt, None)
            return False
        since = self._disowned.setdefault(attempt, watched.page.write)
        return watched.page.write >= since + OWN_WRITES

    def _read_begin(self, attempt: Attempt, answer: Answer, now: float) -> None:  # noqa: ARG002
        unit, number = attempt
        key = self._keys.back(unit, number - 1)
        self._begins[attempt] = BackRecord.decode(answer, key).begin if isinstance(answer, bytes) else 0

    def _give_up(self, gone: dict[Attempt, str], now: float) -> None:
        questions: list[Question] = []
        for (unit, number), why in gone.items():
            writer = self._owners[unit, number]
            last = self._watched[writer].silence.last
            if last is None or now - last > 2 * self._after / ROUNDS:
                continue  # what its log said is old by now
            begin = max(self._begins.get((unit, number), 0), self._trained((unit, number), writer))
            record = BackRecord(begin=begin, learner=self._me[0], instance=self._me[1], why=why)
            call = PutIfAbsent(self._keys.back(unit, number), record.encode())
            questions.append((call, partial(self._gave_up, (unit, number), begin, writer)))
        self._ask_if_any(questions, self._done, now)

    def _trained(self, attempt: Attempt, writer: Writer) -> int:
        """Up to which batch the owner's logs say that it trained."""
        ends = (
            span.end
            for (learner, instance, _), log in self._ledger.logs.items()
            if (learner, instance) == writer[:2]
            for (pass_, unit, number, _), span in log.spans.items()
            if pass_ == self._keys.name and (unit, number) == attempt
        )
        return max(ends, default=0)

    def _gave_up(self, attempt: Attempt, begin: int, writer: Writer, answer: Answer, now: float) -> None:  # noqa: ARG002
        self._given_up.add(attempt)
        self._owners.pop(attempt, None)
        self._pause = min(LOOK_SOON, self._after / ROUNDS)
        if answer is True:
            self.reclaimed.append((*attempt, begin, writer[0]))


def _nothing(answer: Answer, now: float) -> None:
    """There is nothing to learn from it."""
