"""Workers of one loader share their learner's claiming, and leave the end to the first. Time is a number."""

from __future__ import annotations

from itertools import count
from random import Random
from typing import TYPE_CHECKING

import pytest

from shardqueue.claim import Claim, Owner
from shardqueue.claims import NEAR, Claims
from shardqueue.mailbox.calls import List
from shardqueue.mailbox.memory import MemoryMailbox
from shardqueue.pace import MARGIN, TRANSFER, Pace
from shardqueue.plan import Plan
from shardqueue.records import RunKeys
from shardqueue.units import unit_grid
from shardqueue.window import Window

if TYPE_CHECKING:
    from shardqueue.asks import Ask


class Part:
    """One worker: claims when it is told to, and trains what it has."""

    def __init__(
        self, mailbox: MemoryMailbox, plan: Plan, part: int, parts: int, name: str = "a", scans: bool = False
    ) -> None:
        numbers, run = count(), RunKeys("1")
        self.mailbox = mailbox
        self.seen: list[tuple[str, int]] = []
        self.lost = 0
        self.claims = Claims(
            *(plan, run, run.pass_keys(), Owner(name, "0001", str(part))),
            nonce=lambda: f"{name}{part}.{next(numbers)}",
            random=Random(part),
            scans=scans,
            part=part,
            parts=parts,
        )
        self.claims.met(set())

    def turn(self, now: float) -> None:
        """Make the calls that are due, then train one batch of what was won."""
        for ask in self.claims.poll(now):
            self.claims.asks.answered(ask, ask.call.perform(self.mailbox), now)
        self.train_next(now)

    def train_next(self, now: float) -> None:
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


def test_the_learners_are_looked_up_before_the_first_claim() -> None:
    mailbox, run = MemoryMailbox(), RunKeys("1")
    for name in "bcd":
        mailbox.put(run.log(name, "0002", "main", 0), b"{}")
    part = Part(mailbox, Plan(unit_grid(400, 1, taper=False)), 0, 1)
    assert [ask.call for ask in part.claims.asks.poll(0.0)] == []
    (first,) = part.claims.poll(0.0)
    assert first.call == List(run.learners)
    assert part.claims.poll(0.1) == []
    part.claims.asks.answered(first, first.call.perform(mailbox), 0.2)
    part.turn(0.3)
    part.turn(0.4)
    assert part.claims.window.learners == 4
    assert [name for name, _ in part.seen] == ["000000-0.json", "000004-0.json"], "the first of four homes"


def test_homes_follow_the_newest_grades_in_the_listing() -> None:
    mailbox, run = MemoryMailbox(), RunKeys("1")
    for number, grade in enumerate([9, -2, 4], 1):
        mailbox.put(run.grade("b", "0002", number, grade), b"{}")
    for key in (
        run.grade("c", "0003", 1, 0),
        *(run.log(*one, "main", 0) for one in (("b", "0002"), ("c", "0003"))),
    ):
        mailbox.put(key, b"{}")
    part = Part(mailbox, Plan(unit_grid(4000, 1, taper=False)), 0, 1)
    part.turn(0.0)
    assert part.claims.window.share == pytest.approx(1 / (1 + 4 + 1)), "of unknown speed: as the slowest"


def speeds(mailbox: MemoryMailbox) -> list[tuple[int, int]]:
    parsed = map(RunKeys("1").parse_grade, mailbox.list("learners/a~"))
    return [one[2:] for one in parsed if one is not None]


def paced(part: Part, seconds: float, now: float) -> None:
    """The loop takes `seconds` for each of a few batches."""
    for _ in range(12):
        part.claims.pace.handed(now)
        now += seconds
        part.claims.pace.asked(now)


def test_a_speed_is_published_once_and_again_the_more_rarely_the_more_often_it_changed() -> None:
    mailbox, run = MemoryMailbox(), RunKeys("1")
    mailbox.put(run.log("b", "0002", "main", 0), b"{}")
    part = Part(mailbox, Plan(unit_grid(4000, 1, taper=False)), 0, 1)
    for turn in range(300):
        paced(part, (1.0, 0.25)[turn % 2], float(turn))
        part.claims.pace.ahead = 0.0
        part.turn(float(turn))
    found = speeds(mailbox)
    assert [number for number, _ in found] == list(range(1, len(found) + 1))
    assert {grade for _, grade in found} == {0, 4}
    assert 4 <= len(found) <= part.claims._sequence.bit_length() + 1


def test_a_learner_alone_publishes_nothing() -> None:
    mailbox = MemoryMailbox()
    part = Part(mailbox, Plan(unit_grid(400, 1, taper=False)), 0, 1)
    for turn in range(20):
        paced(part, 1.0, float(turn))
        part.turn(float(turn))
    assert mailbox.list("learners/") == []


def test_the_first_part_publishes_the_speed_of_all() -> None:
    mailbox, run = MemoryMailbox(), RunKeys("1")
    mailbox.put(run.log("b", "0002", "main", 0), b"{}")
    parts = [Part(mailbox, Plan(unit_grid(4000, 1, taper=False)), part, 4) for part in range(4)]
    for turn in range(20):
        for part in parts:
            paced(part, 1.0, float(turn))
            part.turn(float(turn))
    assert speeds(mailbox) == [(1, 4)], "four batches a second"
    for part in parts:
        part.claims.observe(handed=0, taken=0, started=20.0, batch=1.0)
        part.claims.pace.ahead = 0.0
        part.turn(21.0)
    assert speeds(mailbox) == [(1, 4), (2, 0)], "of the loop, once that is seen"


def test_where_a_listing_scans_a_folder_claims_do_not_wait_for_one() -> None:
    """A scan takes as long as 30 batches, anything else no time: names are tried, and few of them in vain."""
    mailbox, run = MemoryMailbox(), RunKeys("1")
    plan = Plan(unit_grid(4000, 1, taper=False))
    for name in "abcd":
        mailbox.put(run.log(name, "0001", "main", 0), b"{}")
        mailbox.put(run.grade(name, "0001", 1, 0), b"{}")
    learners = [Part(mailbox, plan, 0, 1, name=name, scans=True) for name in "abcd"]
    scans: list[tuple[float, Part, Ask]] = []
    now, scanned = 0.0, 0
    while not all(learner.claims.exhausted for learner in learners):
        for learner in learners:
            for ask in learner.claims.poll(now):
                if ask.call == List(
                    run.pass_keys().units, ask.call.after if isinstance(ask.call, List) else ""
                ):
                    scans.append((now + 30.0, learner, ask))
                    scanned += 1
                else:
                    learner.claims.asks.answered(ask, ask.call.perform(mailbox), now)
            learner.train_next(now)
        for due in [scan for scan in scans if scan[0] <= now]:
            scans.remove(due)
            due[1].claims.asks.answered(due[2], due[2].call.perform(mailbox), now)
        now += 1.0
        assert now < 3000
    assert sorted(name for learner in learners for name, _ in learner.seen) == sorted(plan.units)
    assert now < 1200, "1,000 is the limit"
    assert sum(learner.lost for learner in learners) < 400
    assert scanned < 40


def test_a_new_table_of_homes_is_looked_up_before_it_is_used() -> None:
    """Who claimed by the old one has units of the new home."""
    mailbox, run = MemoryMailbox(), RunKeys("1")
    plan = Plan(unit_grid(4000, 1, taper=False))
    part = Part(mailbox, plan, 0, 1)
    part.turn(0.0)
    part.turn(0.1)
    part.claims.met({("b", "0002")})
    for position in range(1, 40):
        mailbox.put_if_absent(run.pass_keys().claim(plan.identifier(position)), b"{}")
    for turn in range(2, 8):
        part.claims.pace.ahead = 0.0
        part.turn(float(turn))
    assert part.lost == 0
    assert "000040-0.json" in dict(part.seen)


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
