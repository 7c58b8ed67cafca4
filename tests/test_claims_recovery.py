"""Recovery under every order of events: the world of `recovery_world`, seeded, and what its judge must catch."""

from __future__ import annotations

import re
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from claims_world import PLANS, ViolationError, batches_of
from recovery_world import Ordeal, RecoveryRules, endure

from shardqueue.claims import Claims
from shardqueue.guard import Guard
from shardqueue.learner import Book
from shardqueue.recovery import Recovery

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardqueue.asks import Ask
    from shardqueue.records import LogPage
    from shardqueue.units import Step
    from shardqueue.watching import Watched


def ordeal(seed: int, **fixed: Any) -> Ordeal:
    """A schedule in which anything may happen, but for what is fixed."""
    random = Random(seed)
    drawn = Ordeal(
        seed=random.randrange(2**32),
        shape=random.choice(sorted(PLANS)),
        learners=random.randint(1, 4),
        late=random.randint(0, 1),
        faults=random.randint(0, 6),
        strays=random.randint(0, 3),
        crashes=random.randint(0, 2),
        leaves=random.randint(0, 2),
        scans=random.random() < 0.3,
        remote=random.random() < 0.6,
        pauses=random.randint(0, 3),
        outages=random.randint(0, 1),
        torn=random.choice((0, 0, 3, 10)),
        loaders=random.randint(0, 1),
        returns=random.randint(0, 1),
        named=random.random() < 0.8,
    )
    return replace(drawn, **fixed)


def peaceful(seed: int, **fixed: Any) -> Ordeal:
    """A schedule in which nobody falls silent, but for what is fixed."""
    quiet: dict[str, Any] = {"faults": 0, "strays": 0, "crashes": 0, "leaves": 0, "pauses": 0, "outages": 0}
    return ordeal(seed, **(quiet | {"torn": 0, "returns": 0, "slow": 0.4} | fixed))


def test_what_the_silent_left_is_trained_and_nothing_twice_without_a_reason() -> None:
    worlds = [endure(ordeal(seed)) for seed in range(500)]
    kinds = {(reclaim.why, reclaim.logged, reclaim.named) for world in worlds for reclaim in world.reclaims}
    for why in ("silent", "gone"):
        assert {(why, True, True), (why, True, False)} <= kinds, (
            "claimed before, and after, its owner's last log"
        )
    assert ("silent", False, False) in kinds, "by an owner without any log"
    assert sum(world.repeated for world in worlds) > 50
    assert len({(world.trace, world.events) for world in worlds}) > 400


@pytest.mark.full
@pytest.mark.parametrize("part", range(5))
def test_many_more_ordeals(part: int) -> None:
    for seed in range(1000 * (part + 1), 1000 * (part + 2)):
        endure(ordeal(seed))


def test_nobody_is_given_up_because_the_store_was_out() -> None:
    worlds = [endure(peaceful(seed, outages=2)) for seed in range(150)]
    assert sum(end - start > 15.0 for world in worlds for start, end in world.outs) > 50
    assert [world.reclaims for world in worlds] == [[]] * 150


def test_where_nobody_falls_silent_all_is_trained_once() -> None:
    for seed in range(60):
        world = endure(peaceful(seed, late=0))
        plan = world.heads[0].plan
        values = ((name, plan.value(plan.position(name))) for name in plan.units)
        whole = {(name, index): 1 for name, value in values for index in range(batches_of(name, value))}
        assert world.reclaims == []
        assert world.trained["1"] == whole


def test_without_recovery_every_batch_is_trained_at_most_once() -> None:
    for seed in range(150):
        world = endure(ordeal(seed, reclaim=None))
        assert world.repeated == 0


# -- mutants -----------------------------------------------------------------------------------------------


class HandedIsTrained(Book):
    """What is handed out is logged as trained."""

    __slots__ = ()

    def hand(self, step: Step, waited: float, wall: float, tick: int | None = None) -> None:
        super().hand(step, waited, wall, tick)
        super().train(1, wall)

    def train(self, samples: int, wall: float, global_step: int | None = None) -> list[Step]:
        return []


class Rewrites(Book):
    """A page is written again though an older write of it may still be under way."""

    __slots__ = ()

    def wrote(self, page: LogPage, clear: bool) -> None:
        super().wrote(page, True)


class CountsOn(Recovery):
    """Silence is counted as long as nothing was heard."""

    def _watch(self, writer: tuple[str, str, str]) -> Watched:
        watched = super()._watch(writer)
        watched.silence.longest, watched.silence.lapses = float("inf"), False
        return watched


class BeginsBehindHanded(Recovery):
    """The batch in the owner's hands counts as trained."""

    def _trained(self, attempt: tuple[str, int], writer: tuple[str, str, str]) -> int:
        return super()._trained(attempt, writer) + 1


class Unasked(Guard):
    """A batch is ours if it was ours once."""

    def owns(self, step: Step) -> bool:
        return True


class Forgetful(Guard):
    """Once the log is in the mailbox again, its having been late is forgotten."""

    def landed_after(self, gap: float, held: Iterable[tuple[str, str, int]]) -> None:
        pass


class RemembersBriefly(Guard):
    """After a lapse, what is in hand is asked about for a while only."""

    def landed_after(self, gap: float, held: Iterable[tuple[str, str, int]]) -> None:
        super().landed_after(gap, ())


class NeverOnHold(Claims):
    """Claims on, though its log is late."""

    def poll(self, now: float) -> list[Ask]:
        self.on_hold = False
        return super().poll(now)


MUTANTS: dict[str, tuple[RecoveryRules, dict[str, Any], str]] = {
    "logged as trained when handed out": (RecoveryRules(book=HandedIsTrained), {}, "beyond what was trained"),
    "the learner's own log stands still": (RecoveryRules(refreshes=False), {}, "livelock"),
    "silence counts through an outage": (
        RecoveryRules(recovery=CountsOn),
        {"outages": 2, "crashes": 0, "pauses": 0, "leaves": 0, "slow": 0.5},
        "could not write",
    ),
    "a worker waits": (RecoveryRules(waits=True), {"loaders": 1}, "livelock"),
    "a page goes back in time": (
        RecoveryRules(book=Rewrites),
        {"learners": 2, "late": 0, "torn": 12, "crashes": 1, "slow": 0.4, "remote": False, "loaders": 0},
        "before what its log had shown",
    ),
    "nobody asks whose a batch is": (RecoveryRules(guard=Unasked), {}, "its owner went on"),
    "a lapse is forgotten": (RecoveryRules(guard=Forgetful), {}, "its owner went on"),
    "a lapse is soon forgotten": (
        RecoveryRules(guard=RemembersBriefly),
        {"shape": "lanes", "learners": 2, "late": 0, "loaders": 0, "pauses": 3, "slow": 0.5, "longest": 90.0}
        | {"crashes": 0, "outages": 0, "leaves": 0},
        "its owner went on",
    ),
    "claims are made while the log is late": (RecoveryRules(claims=NeverOnHold), {}, "its log is late"),
    "begins behind what is handed out": (
        RecoveryRules(recovery=BeginsBehindHanded),
        {},
        "beyond what was trained",
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_judge_catches(mutant: str) -> None:
    rules, fixed, expected = MUTANTS[mutant]
    found = []
    for seed in range(300):
        try:
            endure(ordeal(seed, **fixed), rules)
        except ViolationError as violation:
            found.append(str(violation))
            if re.search(expected, found[-1]):
                return
    pytest.fail(f"what was found instead: {found[:3]}")
