"""Units that went from one learner to another: whose the ended attempt was, who went on, and when. No I/O.

A log names the attempts that it trained in part or not from the first on, and those that it holds; a learner that was
gone before it wrote so is named by its claim. The give-back records say where an attempt ends and why. By both, an
attempt that began before the one it follows had ended shows that two machines' clocks differ.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardqueue.timeline.chart import Handover
from shardqueue.timeline.lanes import counted, named, shown_pass

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardqueue.records import BackRecord, ClaimRecord, LogPage
    from shardqueue.timeline.lanes import Folded, Key, Part

TAKEN = ("gone", "silent", "left")
"""Why an attempt is ended by another learner than its owner."""


@dataclass(frozen=True, slots=True)
class _Owned:
    """Whose an attempt is, and what that process trained of it, if it did."""

    lane: int
    page: LogPage
    since: float
    part: Part | None

    @property
    def by_then(self) -> float:
        """When it had the attempt at the earliest: it had trained of it, or at least begun itself."""
        return self.since if self.part is None else self.part.stop


@dataclass(slots=True)
class Chains:
    """Attempts by their owners, as the logs tell.

    Attributes:
        apart: by two hosts, the most by which their clocks contradict each other: seconds, and at which attempt.
    """

    apart: dict[tuple[str, str], tuple[float, Key]] = field(default_factory=dict)
    _owned: dict[Key, _Owned] = field(default_factory=dict)
    _lanes: dict[tuple[str, str], tuple[int, LogPage, float]] = field(default_factory=dict)

    def add(self, lane: int, page: LogPage, folded: Folded) -> None:
        """Take in a log: its newest page, and what it came to."""
        owner = page.learner, page.instance
        if page.process == "main" or owner not in self._lanes:
            self._lanes[owner] = lane, page, folded.since
        for key, part in folded.parts.items():
            known = self._owned.get(key)
            if known is None or known.part is None:
                self._owned[key] = _Owned(lane, page, folded.since, part)
        for held in page.held:
            self._owned.setdefault(
                (held.pass_, held.unit, held.attempt), _Owned(lane, page, folded.since, None)
            )

    def knows(self, key: Key) -> bool:
        """Whether a log names the owner of an attempt."""
        return key in self._owned

    def claimed(self, key: Key, claim: ClaimRecord) -> None:
        """Take in a claim of which no log knows."""
        owner = self._lanes.get((claim.learner, claim.instance))
        if owner is not None:
            self._owned[key] = _Owned(*owner, None)

    def handover(self, key: Key, backs: Mapping[Key, BackRecord]) -> Handover:
        """What the end of an attempt led to, of all that are on record; times are wall-clock seconds."""
        pass_, unit, attempt = key
        back, owner, taker = backs[key], self._owned.get(key), self._taker(key, backs)
        of_another = owner is None or (back.learner, back.instance) != (
            owner.page.learner,
            owner.page.instance,
        )
        self._compare(owner, taker, key, back.begin)
        trained = owner.part.end if owner is not None and owner.part is not None else 0
        return Handover(
            pass_=shown_pass(pass_),
            unit=named(unit),
            attempt=attempt,
            begin=counted(back.begin),
            owner=None if owner is None else owner.lane,
            by=named(back.learner),
            why=named(back.why),
            at=None if taker is None or taker.part is None else taker.part.start,
            taker=None if taker is None else taker.lane,
            reclaimed=back.why in TAKEN and of_another,
            again=max(0, trained - back.begin),
        )

    def _taker(self, key: Key, backs: Mapping[Key, BackRecord]) -> _Owned | None:
        """Who went on; whoever took it in between and gave it back as it was did not."""
        pass_, unit, attempt = key
        begin = backs[key].begin
        while True:
            attempt += 1
            following = pass_, unit, attempt
            taker, back = self._owned.get(following), backs.get(following)
            if back is None or back.begin != begin or (taker is not None and taker.part is not None):
                return taker

    def _compare(self, owner: _Owned | None, taker: _Owned | None, key: Key, begin: int) -> None:
        """What was on record as trained before an attempt was ended came before the next one, whatever clocks say."""
        if owner is None or taker is None or taker.part is None:
            return
        early = owner.by_then - taker.part.start
        one, other = owner.page.where, taker.page.where
        late = owner.part is not None and owner.part.end > begin  # it went on after the attempt was ended
        if early <= 0.0 or late or one.boot == other.boot:
            return
        hosts = one.host, other.host
        self.apart[hosts] = max(self.apart.get(hosts, (0.0, key)), (early, key))
