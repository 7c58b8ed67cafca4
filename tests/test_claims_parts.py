"""Workers of one loader share their learner's claiming, and leave the end to the first. Time is a number."""

from __future__ import annotations

from itertools import count
from random import Random

import pytest

from shardqueue.claims import NEAR, Claim, Claims, Owner
from shardqueue.mailbox.memory import MemoryMailbox
from shardqueue.pace import MARGIN, TRANSFER, Pace
from shardqueue.plan import Plan
from shardqueue.records import RunKeys
from shardqueue.units import unit_grid
from shardqueue.window import Window


class Part:
    """One worker: claims when it is told to, and trains what it has."""

    def __init__(self, mailbox: MemoryMailbox, plan: Plan, part: int, parts: int) -> None:
        numbers, run = count(), RunKeys("1")
        self.mailbox = mailbox
        self.seen: list[tuple[str, int]] = []
        self.lost = 0
        self.claims = Claims(
            *(plan, run, run.pass_keys(), Owner("a", "0001", str(part))),
            nonce=lambda: f"{part}.{next(numbers)}",
            random=Random(part),
            part=part,
            parts=parts,
        )
        self.claims.met(set())

    def turn(self, now: float) -> None:
        """Make the calls that are due, then train one batch of what was won."""
        for ask in self.claims.poll(now):
            self.claims.asks.answered(ask, ask.call.perform(self.mailbox), now)
        self.lost += len(self.claims.take_lost())
        claim = next((claim for claim in self.claims.hand if claim.handed < claim.size), None)
        if claim is not None:
            self.train(claim, now)

    def train(self, claim: Claim, now: float) -> None:
        self.claims.handed(claim, now)
        self.seen.append((claim.identifier, claim.handed))
        claim.trained = claim.handed
        if claim.handed == claim.size:
            self.claims.loaded(claim, int(claim.size))
        self.claims.pace.asked(now + 1.0)


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_parts_claim_everything_once_and_the_first_ends_last(parts: int) -> None:
    plan = Plan(unit_grid(400, 1, taper=False))
    mailbox = MemoryMailbox()
    workers = [Part(mailbox, plan, part, parts) for part in range(parts)]
    now = 0.0
    while not all(worker.claims.exhausted and not worker.claims.hand for worker in workers):
        for worker in workers:
            worker.turn(now)
        now += 1.0
        assert now < 2000
    assert sorted(name for worker in workers for name, _ in worker.seen) == sorted(plan.units)
    assert [worker.claims.yielded for worker in workers] == [False] + [True] * (parts - 1)
    shares = [len(worker.seen) for worker in workers]
    assert min(shares) > 400 / parts / 2, "all of them work"
    assert sum(worker.lost for worker in workers) <= 40, "siblings do not race for one home"


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_parts_of_a_home_are_all_of_it(parts: int) -> None:
    plan = Plan(unit_grid(60, 1, taper=False))
    homes = []
    for part in range(parts):
        window = Window(plan, Random(0))
        window.meet([1, 2], 1, part, parts)
        homes.append(set(window._home))
        assert window.share == pytest.approx(2 / 3 / parts)
    whole = Window(plan, Random(0))
    whole.meet([1, 2], 1)
    cycle = whole._cycle
    assert len(set.union(*homes)) == sum(map(len, homes)) == 2 * parts
    assert {place % cycle for place in set.union(*homes)} == set(whole._home)


def test_a_loader_that_fills_its_queue_is_not_taken_for_a_fast_one() -> None:
    """Batches asked for at once, claims that take a second: as many as were handed out, or the first few."""
    plan = Plan(unit_grid(10_000, 1, taper=False))
    part = Part(MemoryMailbox(), plan, 0, 1)
    part.claims.pace.inline = True
    part.claims.pace.claimed(1.0)
    for now in range(1, 6):
        for _ in range(8):
            part.turn(now * 1e-3)
            part.claims.pace.started = now * 1e-3
            part.claims.pace.asked(now * 1e-3)
        assert part.claims.pace.ahead <= max(4, len(part.seen))


def test_far_from_the_end_the_loaders_queue_does_not_count() -> None:
    plan = Plan(unit_grid(400, 1, taper=False))
    part = Part(MemoryMailbox(), plan, 0, 1)
    part.claims.observe(handed=10, taken=6, started=0.0, batch=1.0)
    assert part.claims.pace.queue == 0
    part.claims.window.claimed(0, 400 - int(NEAR))
    part.claims.observe(handed=10, taken=6, started=0.0, batch=1.0)
    assert part.claims.pace.queue == 4


def test_work_behind_a_loader() -> None:
    pace = Pace()
    pace.inline = True
    pace.ahead = 1.0
    pace.observe(queue=2, started=10.0, batch=4.0)
    assert pace.work(11.0) == 3 * 4.0 + 3.0
    assert pace.low_water(11.0, tail=True) == pytest.approx(TRANSFER)
    assert pace.wanted(11.0, tail=True) == 0.0
    assert pace.wake(11.0, tail=True) == pytest.approx(26.0 - TRANSFER)
    pace.claimed(2.0)
    assert pace.low_water(11.0, tail=True) == pytest.approx(MARGIN * 2.0 + TRANSFER)
    pace.ahead = 0.0
    pace.observe(queue=0, started=10.0, batch=4.0)
    assert pace.wanted(13.9, tail=True) == 1.0
    assert pace.wake(13.9, tail=True) is None


def test_what_the_loader_asks_for_says_nothing_once_the_loop_is_seen() -> None:
    pace = Pace()
    pace.observe(queue=1, started=0.0, batch=4.0)
    pace.handed(1.0)
    pace.asked(1.1)
    assert (pace.started, pace.batch(50.0)) == (0.0, 4.0)
