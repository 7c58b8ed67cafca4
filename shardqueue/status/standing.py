"""What an observation comes to: who is alive, what each learner did, and how the run stands.

No mailbox and no clock in here. Whether a process of another machine is alive is judged by whether its log changes,
once that was watched for long enough; before that, by the age of its last page, for which clocks must agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from shardqueue.learner import LOG_EVERY, SILENCE
from shardqueue.status.passes import progress

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shardqueue.records import LogPage
    from shardqueue.status.observing import Observation, Sighting
    from shardqueue.status.passes import PassProgress

MISSED = 3
"""Writes of a log that are due and did not come, before its owner is called silent."""
IDLE, IDLE_BATCHES = 120.0, 5.0
"""A run stalls when nothing was trained for so many seconds, and for so many times what a batch takes."""
AHEAD = -2.0
"""Seconds of age under which a page is from a clock that is ahead of ours."""


class Life(Enum):
    """How a process, or a learner, is."""

    ALIVE = "alive"
    SILENT = "silent"
    GONE = "gone"
    FAILED = "failed"
    EARLY = "left early"
    ENDED = "ended"


_LEFT = {"end": Life.ENDED, "early": Life.EARLY, "error": Life.FAILED}


class State(Enum):
    """How a run stands."""

    RUNNING = "running"
    STALLED = "stalled"
    FINISHED = "finished"
    BROKEN_OFF = "broken off"
    OPENED = "opened, nothing trained yet"
    REMOVED = "being removed"


@dataclass(frozen=True, slots=True)
class Learner:
    """One learner, all its processes together.

    Attributes:
        name: its label.
        instance: what tells it from others of that label.
        life: that of the process that is best off.
        age: seconds since it was last seen, by wall clocks; below 0 when its clock is ahead of ours.
        batches: trained.
        samples: trained.
        share: of the batches of all learners.
        rate: samples a second over the last minute, 0 unless it is alive.
        overall: samples a second since it began.
        pace: batches a second since it began.
        waiting: share of its time in which it waited for data.
        step: dataset step of its last batch, if that was in the current pass.
        held: units that it claimed and has not trained whole.
        processes: that keep a log for it.
    """

    name: str
    instance: str
    life: Life
    age: float
    batches: int
    samples: int
    share: float
    rate: float
    overall: float
    pace: float
    waiting: float
    step: int | None
    held: int
    processes: int


@dataclass(frozen=True, slots=True)
class Standing:
    """How a run stands.

    Attributes:
        observation: what it was made from.
        state: in a word.
        idle: seconds for which nobody trained anything, None where nobody is there.
        learners: those that are alive first.
        current: the pass in hand, None before the first batch.
        repeated: batches that were trained although others had ended the attempt.
        reclaimed: attempts of silent learners that others ended.
        claimed: units, in all passes.
        notes: what the user should know.
    """

    observation: Observation
    state: State
    idle: float | None
    learners: tuple[Learner, ...]
    current: PassProgress | None
    repeated: int
    reclaimed: int
    claimed: int
    notes: tuple[str, ...]

    @property
    def batches(self) -> int:
        """Trained in all passes."""
        return sum(learner.batches for learner in self.learners)

    @property
    def samples(self) -> int:
        """Trained in all passes."""
        return sum(learner.samples for learner in self.learners)

    @property
    def rate(self) -> float:
        """Samples a second, of all that are alive."""
        return sum(learner.rate for learner in self.learners)


def standing(observation: Observation) -> Standing:
    """Say how the run stands."""
    sightings = observation.sightings
    lives = [life(sighting, observation.wall) for sighting in sightings]
    pages = [sighting.page for sighting in sightings]
    alive = [page for page, how in zip(pages, lives, strict=True) if how is Life.ALIVE]
    there = [
        s
        for s, how in zip(sightings, lives, strict=True)
        if how is Life.ALIVE or (how is Life.SILENT and s.here)
    ]
    current = progress(observation.manifest, pages, alive)
    idle = min((_idle(sighting, observation.wall) for sighting in there), default=None)
    state = _state(observation, idle, lives, pages, current)
    learners = _learners(sightings, lives, observation.wall, current)
    return Standing(
        observation,
        state,
        idle,
        learners,
        current,
        repeated=sum(page.totals.repeated for page in pages),
        reclaimed=sum(page.totals.reclaimed for page in pages),
        claimed=sum(page.totals.claimed for page in pages),
        notes=(*_lost(state, current), *_notes(observation, sightings, lives, learners)),
    )


def life(sighting: Sighting, wall: float) -> Life:
    """How the process is."""
    page = sighting.page
    if page.left is not None:
        return _LEFT[page.left]
    if sighting.here is False:
        return Life.GONE
    patience = max(SILENCE, MISSED * (page.every or LOG_EVERY))
    late = wall - page.wall > patience
    if sighting.here:
        return Life.SILENT if late else Life.ALIVE
    if sighting.silent > patience:
        return Life.SILENT
    return Life.ALIVE if sighting.changed or not late else Life.SILENT


def _state(
    observation: Observation,
    idle: float | None,
    lives: Sequence[Life],
    pages: Sequence[LogPage],
    current: PassProgress | None,
) -> State:
    if not observation.manifest.plans:
        return State.REMOVED
    if idle is not None:
        a_batch = sum(page.totals.elapsed for page in pages) / max(
            1, sum(page.totals.batches for page in pages)
        )
        return State.STALLED if idle > max(IDLE, IDLE_BATCHES * a_batch) else State.RUNNING
    noted = current is not None and current.name in {name or "e0" for name in observation.whole}
    if Life.ENDED in lives or noted:
        return State.FINISHED
    begun = bool(observation.unreadable) or any(page.totals.claimed or page.totals.batches for page in pages)
    return State.BROKEN_OFF if begun else State.OPENED


def _idle(sighting: Sighting, wall: float) -> float:
    """Seconds for which a process trained nothing, by its own clock up to its last page, and as far as seen since."""
    page = sighting.page
    since = max(0.0, wall - page.wall) if sighting.here else sighting.silent
    if page.trained:
        return since + max(0.0, page.wall - max(span.stop for span in page.trained))
    return since + (0.0 if page.rate > 0 else page.totals.elapsed)


def _learners(
    sightings: Sequence[Sighting], lives: Sequence[Life], wall: float, current: PassProgress | None
) -> tuple[Learner, ...]:
    together: dict[tuple[str, str], list[tuple[LogPage, Life]]] = {}
    for sighting, how in zip(sightings, lives, strict=True):
        page = sighting.page
        together.setdefault((page.learner, page.instance), []).append((page, how))
    whole = sum(sighting.page.totals.batches for sighting in sightings)
    found = [_learner(processes, wall, whole, current) for processes in together.values()]
    order = list(Life)
    return tuple(sorted(found, key=lambda one: (order.index(one.life), one.name, one.instance)))


def _learner(
    processes: Sequence[tuple[LogPage, Life]], wall: float, whole: int, current: PassProgress | None
) -> Learner:
    pages = [page for page, _ in processes]
    batches, samples = sum(page.totals.batches for page in pages), sum(page.totals.samples for page in pages)
    elapsed = sum(page.totals.elapsed for page in pages)
    longest = max(page.totals.elapsed for page in pages)
    last = max(pages, key=lambda page: page.wall)
    inside = last.current is not None and current is not None and (last.current.pass_ or "e0") == current.name
    return Learner(
        name=last.learner,
        instance=last.instance,
        life=min((how for _, how in processes), key=list(Life).index),
        age=wall - last.wall,
        batches=batches,
        samples=samples,
        share=batches / whole if whole else 0.0,
        rate=sum(page.rate for page, how in processes if how is Life.ALIVE),
        overall=samples / longest if longest > 0 else 0.0,
        pace=batches / longest if longest > 0 else 0.0,
        waiting=min(1.0, sum(page.totals.waited for page in pages) / elapsed) if elapsed > 0 else 0.0,
        step=last.current.step if inside and last.current is not None else None,
        held=sum(len(page.held) for page in pages),
        processes=len(pages),
    )


def _lost(state: State, current: PassProgress | None) -> Iterable[str]:
    if (
        state is State.FINISHED
        and current is not None
        and current.counted == "batches"
        and current.total is not None
    ):
        missing = current.total - current.done
        if missing:
            yield f"{missing:,} batches of {current.title} are in no log; `shardqueue audit` says which"


def _notes(
    observation: Observation,
    sightings: Sequence[Sighting],
    lives: Sequence[Life],
    learners: Sequence[Learner],
) -> Iterable[str]:
    manifest = observation.manifest
    if manifest.plans and manifest.state is not None:
        yield "it goes on from a state: what was trained before it was opened is not counted here"
    after = manifest.reclaim_after
    alive = any(learner.life is Life.ALIVE for learner in learners)
    again = "not handed out again"
    over = after is not None and Life.ENDED in lives  # whoever ended has seen all of it trained
    if after is not None:
        again = (
            f"handed out again after {after:g} s of silence" if alive else "and nobody is there to take over"
        )
    for learner in learners:
        if learner.held and not over and learner.life not in (Life.ALIVE, Life.ENDED):
            held = f"{learner.held:,} unit{'' if learner.held == 1 else 's'}"
            yield f"{learner.name} is {_IS[learner.life]} and held {held}, {again}"
    if any(sighting.page.left == "end" and sighting.page.rests and sighting.here for sighting in sightings):
        yield "a process that ended is still there, and may come back for another pass"
    pairs = zip(sightings, lives, strict=True)
    if any(how is Life.SILENT and sighting.here is None and not sighting.silent for sighting, how in pairs):
        yield "silent is said by wall clocks, which may differ; --watch sees whether the log changes"
    ahead = min(learners, key=lambda learner: learner.age, default=None)
    if ahead is not None and ahead.age < AHEAD:
        yield f"the clock of {ahead.name} is {-ahead.age:,.0f} s ahead of this one"
    yield from (f"a log cannot be read: {error}" for error in observation.unreadable)


_IS = {Life.SILENT: "silent", Life.GONE: "gone", Life.FAILED: "gone after an error", Life.EARLY: "gone"}
