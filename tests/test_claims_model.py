"""Claiming under every order of events: the world of `claims_world`, seeded, and what its judge must catch."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from claims_world import PLANS, Rules, Scenario, ViolationError, World, backwards, batches_of, grid, play
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardqueue.asks import Asks
from shardqueue.claim import Claim, Owner, State
from shardqueue.claims import Claims
from shardqueue.errors import MailboxRefusedError, MailboxUnavailableError
from shardqueue.mailbox.calls import PutIfAbsent
from shardqueue.mailbox.memory import MemoryMailbox
from shardqueue.plan import Plan
from shardqueue.records import BackRecord, PassKeys, RunKeys

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardqueue.asks import Ask
    from shardqueue.mailbox import Mailbox
    from shardqueue.mailbox.calls import Answer

scenarios = st.builds(
    Scenario,
    seed=st.integers(0, 2**32),
    shape=st.sampled_from(sorted(PLANS)),
    learners=st.integers(1, 5),
    late=st.integers(0, 2),
    faults=st.integers(0, 6),
    strays=st.integers(0, 3),
    crashes=st.integers(0, 2),
    leaves=st.integers(0, 3),
    scans=st.booleans(),
    remote=st.booleans(),
)


# -- the tests ---------------------------------------------------------------------------------------------


distinct: set[tuple[int, int, str]] = set()


@given(scenarios)
@settings(
    max_examples=800,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
def every_schedule_is_right(scenario: Scenario) -> None:
    world = play(scenario)
    distinct.add((world.trace, world.events, scenario.shape))


def test_no_schedule_trains_a_batch_twice_or_leaves_one_out() -> None:
    distinct.clear()
    every_schedule_is_right()
    assert len(distinct) >= 500


@pytest.mark.full
@pytest.mark.parametrize("part", range(12))
def test_many_more_schedules(part: int) -> None:
    random = Random(part)
    for _ in range(1500):
        counts = [random.randint(0, most) for most in (4, 2, 8, 4, 2, 3, 1)]
        learners, late, faults, strays, crashes, leaves, scans = counts
        shape = random.choice(sorted(PLANS))
        seed = random.randrange(2**32)
        play(Scenario(seed, shape, learners + 1, late, faults, strays, crashes, leaves, bool(scans)))


@pytest.mark.parametrize("learners", [2, 5])
def test_without_faults_and_crashes_every_batch_is_trained_once(learners: int) -> None:
    for shape in sorted(PLANS):
        for seed in range(5):
            world = play(Scenario(seed, shape, learners))
            plan = world.learners[0].plan
            values = ((name, plan.value(plan.position(name))) for name in plan.units)
            whole = {(name, index): 1 for name, value in values for index in range(batches_of(name, value))}
            assert world.trained["1"] == Counter(whole)


@pytest.mark.parametrize("scans", [False, True])
@pytest.mark.parametrize("shape", ["natural", "reversed"])
def test_joining_late_on_more_units_than_a_page(shape: str, scans: bool) -> None:
    units = grid(2600, 1, 1, False)
    if shape == "reversed":
        units = backwards(units)
    world = play(
        Scenario(3, shape, learners=3, late=1, faults=5, leaves=1, scans=scans, after=2000),
        plans=lambda me, learners: units,
    )
    late = world.learners[-1]
    assert late.claims is not None
    assert late.claims.window.careful == (shape == "natural" and not scans), (
        "the front was sought, the rest presumed"
    )
    assert late.book.left == "end"


# -- one learner, one call at a time ------------------------------------------------------------------------


def drain(
    units: Mapping[str, object], mailbox: MemoryMailbox, *, late: bool, scans: bool = False
) -> list[str]:
    """Let one learner claim all it can; return the claims in order."""
    plan, run = Plan(units), RunKeys("1")
    nonces = iter(range(10**6))
    claims = Claims(
        plan,
        run,
        run.pass_keys(),
        Owner("me", "0001"),
        nonce=lambda: str(next(nonces)),
        random=Random(0),
        joined_late=late,
        scans=scans,
    )
    keys, now = [], 0.0
    while not claims.exhausted:
        asks = claims.poll(now)
        assert asks or claims.hand, "stuck"
        for ask in asks:
            now += 0.001
            claims.asks.answered(ask, ask.call.perform(mailbox), now)
        claims.take_won()
        for claim in claims.take_proven():
            keys.append(claim.key)
            claims.loaded(claim, 1)
            claims.handed(claim, now)
            now += 1.0
            claims.pace.asked(now)
            claim.trained = 1
            claims.settle(claim)
    assert claims.asks.error is None
    return keys


def claimed_by_others(units: Mapping[str, object], positions: set[int]) -> MemoryMailbox:
    mailbox, keys, plan = MemoryMailbox(), RunKeys("1").pass_keys(), Plan(units)
    for position in positions:
        mailbox.put_if_absent(keys.claim(plan.identifier(position)), b"{}")
    return mailbox


@pytest.mark.parametrize("scans", [False, True])
def test_holes_far_behind_the_front_are_found_at_the_end(scans: bool) -> None:
    units = grid(2600, 1, 1, False)
    holes = {5, 300, 301, 999}
    mailbox = claimed_by_others(units, set(range(2300)) - holes)
    keys = drain(units, mailbox, late=True, scans=scans)
    assert sorted(keys) == [f"units/{n:06d}-0.json" for n in sorted(holes) + list(range(2300, 2600))]


@pytest.mark.parametrize("taken", [0, 1, 999, 1000, 1001, 1500, 1999, 2000])
def test_wherever_the_front_is_a_late_joiner_finds_it(taken: int) -> None:
    units = grid(2000, 1, 1, False)
    keys = drain(units, claimed_by_others(units, set(range(taken))), late=True)
    assert sorted(keys) == [f"units/{n:06d}-0.json" for n in range(taken, 2000)]


def test_foreign_keys_and_old_attempts_do_not_confuse_the_search() -> None:
    units = grid(1800, 1, 1, False)
    mailbox = claimed_by_others(units, set(range(1200)))
    for number in range(0, 1200, 3):
        mailbox.put_if_absent(f"back/{number:06d}-0.json~0", BackRecord.encode(given_back(number)))
        mailbox.put_if_absent(f"units/{number:06d}-0.json~1", b"{}")
    mailbox.put_if_absent("units/zzz", b"foreign")
    mailbox.put_if_absent("units/000000-0.json.part", b"foreign")
    keys = drain(units, mailbox, late=True)
    assert sorted(keys) == [f"units/{n:06d}-0.json" for n in range(1200, 1800)]


def given_back(begin: int) -> BackRecord:
    return BackRecord(begin=begin, learner="other", instance="0002", why="early")


def test_given_back_attempts_are_taken_last_and_in_turn() -> None:
    units = grid(4, 1, 1, False)
    mailbox = claimed_by_others(units, {0, 1})
    mailbox.put_if_absent("back/000000-0.json~0", given_back(0).encode())
    mailbox.put_if_absent("back/000001-0.json~0", given_back(0).encode())
    mailbox.put_if_absent("units/000001-0.json~1", b"{}")
    mailbox.put_if_absent("back/000001-0.json~1", given_back(0).encode())
    keys = drain(units, mailbox, late=True)
    assert sorted(keys[:2]) == ["units/000002-0.json", "units/000003-0.json"]
    assert sorted(keys[2:]) == ["units/000000-0.json~1", "units/000001-0.json~2"]


# -- mutants -----------------------------------------------------------------------------------------------


class RoundsToWon(Asks):
    """An unclear create counts as won."""

    __slots__ = ()
    rounded: Answer = True

    def failed(self, ask: Ask, error: Exception, now: float) -> None:
        if isinstance(ask.call, PutIfAbsent) and isinstance(error, MailboxUnavailableError):
            self.answered(ask, self.rounded, now)
        else:
            super().failed(ask, error, now)


class RoundsToLost(RoundsToWon):
    """An unclear create counts as lost."""

    __slots__ = ()
    rounded: Answer = False


class BeginsAgain(Claims):
    """Whatever is given back begins at its first batch."""

    def give_back(self, why: str) -> list[PutIfAbsent]:
        return [replace(call, data=zero_begin(call.data)) for call in super().give_back(why)]


def zero_begin(data: bytes) -> bytes:
    return json.dumps({**json.loads(data), "begin": 0}).encode()


class OneKey(PassKeys):
    """Every attempt is claimed under the unit's first key."""

    def claim(self, identifier: str, attempt: int = 0) -> str:
        return PassKeys.claim(self, identifier)


class Removal(PutIfAbsent):
    """Removes the key instead of creating it."""

    __slots__ = ()

    def perform(self, mailbox: Mailbox) -> bool:
        mailbox.delete([self.key])
        return True


class Removes(Claims):
    """Whoever gives a unit back removes its claim, so that the next one may create the same key."""

    def give_back(self, why: str) -> list[PutIfAbsent]:
        given = super().give_back(why)
        claims = [claim for claim in self.hand if claim.state is State.OURS and not claim.finished]
        return given + [Removal(claim.key, claim.data) for claim in claims]


class Liar(MemoryMailbox):
    """Says of a claim now and then that it was created, though another holds the key."""

    calls = 0

    def put_if_absent(self, key: str, data: bytes) -> bool:
        created = super().put_if_absent(key, data)
        self.calls += 1
        return created or ("units/" in key and self.calls % 3 == 0)


class Unread(Claims):
    """Takes the store's word for it."""

    def _created(self, claim: Claim, answer: Answer, now: float) -> None:
        super()._created(claim, answer, now)
        if claim.state is State.WON:
            claim.state = State.OURS

    def _confirmed(self, claim: Claim, answer: Answer, now: float) -> None:
        super()._confirmed(claim, claim.data, now)


def seeds(count: int, **fixed: Any) -> list[Scenario]:
    """Schedules with much of what the mutants need: rivals, faults, leaves."""
    shapes = sorted(PLANS)
    return [
        replace(
            Scenario(seed, shapes[seed % len(shapes)], 2 + seed % 4, faults=6, strays=3, leaves=1),
            **fixed,
        )
        for seed in range(count)
    ]


def one_for_all(me: int) -> Owner:
    return Owner("learner", "0000")


def forked(me: int) -> Owner:
    """One label in two processes, and what tells them apart drawn from generators of one seed."""
    return Owner("learner", seeded(me, 0))


def seeded(me: int, count: int) -> str:
    """The draw of that number from a generator that everybody seeds with 7."""
    generator = Random(7)
    return [generator.randbytes(12).hex() for _ in range(count + 1)][-1]


MUTANTS: dict[str, tuple[Rules, str]] = {
    "no nonce": (Rules(owner=one_for_all, nonce=lambda me, count: ""), "trained twice"),
    "a nonce from a seeded generator": (Rules(owner=forked, nonce=seeded), "trained twice"),
    "unclear is won": (Rules(asks=RoundsToWon), "the store said we created it|trained twice"),
    "unclear is won, unread": (Rules(asks=RoundsToWon, claims=Unread), "before its read-back agreed"),
    "unclear is lost": (Rules(asks=RoundsToLost), "gave nothing back"),
    "begins again": (Rules(claims=BeginsAgain), "trained twice"),
    "one key for all attempts": (Rules(keys=OneKey), "two different bodies|was passed over"),
    "a key is removed and used again": (Rules(keys=OneKey, claims=Removes, once=False), "trained twice"),
    "check, then act": (Rules(two_steps=True), "trained twice|the store said we created it"),
    "check, then act, unread": (Rules(two_steps=True, claims=Unread), "before its read-back agreed"),
    "a store that lies": (Rules(store=Liar), "the store said we created it|trained twice"),
    "a store that lies, unread": (
        Rules(store=Liar, hands=lambda claim: claim.state is not State.LOST),
        "before its read-back agreed",
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_judge_catches(mutant: str) -> None:
    rules, expected = MUTANTS[mutant]
    found = []
    for scenario in seeds(60):
        try:
            play(scenario, rules)
        except (
            ViolationError,
            ValueError,
        ) as violation:  # one identity in two places confuses more than claims
            found.append(str(violation))
            if re.search(expected, found[-1]):
                return
    pytest.fail(f"what was found instead: {found[:3]}")


def test_a_run_that_ends_while_it_is_looked_at_is_not_taken_for_broken_off() -> None:
    for seed in range(250):
        world = play(Scenario(seed, "one-batch", learners=3, late=2, after=20))
        assert world.redone == []


def test_a_mailbox_that_answers_slowly_kills_nobody() -> None:
    for seed in range(250):
        world = play(Scenario(seed, "lanes", learners=4, late=2, faults=3, remote=True))
        assert world.redone == []


def test_a_store_that_lies_is_refused_before_anything_is_trained_twice() -> None:
    refused = 0
    for scenario in seeds(60):
        world = World(scenario, Rules(store=Liar), PLANS[scenario.shape]).run()
        errors = [one.error for one in world.learners if one.error is not None]
        refused += any(isinstance(error, MailboxRefusedError) for error in errors)
    assert refused > 20
