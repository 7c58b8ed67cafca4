"""`shardqueue audit`: it proves what is so, and names who broke what is not, by logs and give-back records alone."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from learners import Clock, credited, dataset, given_back, load, together, train, until

from shardqueue import Unit, open_mailbox, shared_queue, unit_files, unit_grid, unit_ranges
from shardqueue.audit.accounts import Account, Evidence, Kind, Situation, Verdict, account
from shardqueue.audit.evidence import gather
from shardqueue.audit.expectation import Expectation
from shardqueue.audit.report import Report, document, show
from shardqueue.cli import main
from shardqueue.errors import InvalidInputError, RecordError, RunError
from shardqueue.learner import seen_here, this_process
from shardqueue.ledger import Ledger
from shardqueue.mailbox.faults import Counted
from shardqueue.mailbox.memory import MemoryMailbox
from shardqueue.plan import Plan
from shardqueue.records import (
    BackRecord,
    HeldClaim,
    LogPage,
    Manifest,
    Process,
    RunKeys,
    Totals,
    TrainedSpan,
    WholeRecord,
)
from shardqueue.run import new_manifest
from shardqueue.state import State
from shardqueue.trained import Trained

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from multiprocessing.connection import Connection
    from pathlib import Path

    from ranks import Ranks

    from shardqueue import Mailbox
    from shardqueue.records import Left

UNITS = unit_grid(12, 4, lanes=2, taper=False)
"""Six units of four batches: 000000-0.json .. 000002-1.json."""
FIRST, SECOND, *_ = UNITS
ELSEWHERE = Process(host="far", boot="another/1", pid=1, started="1")
GONE = Process(host="here", boot=this_process().boot, pid=this_process().pid, started="0")
EVIL = "\x1b[2J\u202eevil"


# -- a run that is made up -----------------------------------------------------------------------------------


def span(
    unit: str,
    begin: int,
    end: int,
    attempt: int = 0,
    whole: bool = False,
    pass_: str = "",
    at: float = 1_764_500_000.0,
    ticks: Iterable[int] = (),
) -> TrainedSpan:
    return TrainedSpan(
        pass_, unit, attempt, begin, end, 8, 0.0, at + begin, at + end, None, whole, list(ticks)
    )


@dataclass
class Story:
    """A run as its logs and records tell it.

    `whole` is what ann trained besides, unit by unit, so that a story is about the rest alone.
    """

    units: Mapping[str, Any] = field(default_factory=lambda: UNITS)
    state: dict[str, Any] | None = None
    reclaim_after: float | None = None
    mailbox: MemoryMailbox = field(default_factory=MemoryMailbox)
    keys: RunKeys = field(default_factory=lambda: RunKeys("1"))
    run_id: str = "r"

    def __post_init__(self) -> None:
        manifest = new_manifest(Plan(self.units), "ann", 0.0)
        fields = {name: getattr(manifest, name) for name in manifest.__struct_fields__}
        fields |= {"run_id": self.run_id, "state": self.state, "reclaim_after": self.reclaim_after}
        self.mailbox.put(self.keys.manifest, Manifest(**fields).encode())

    def opened(self, run: str, **changes: Any) -> None:
        """Something else stands in the manifest of a run."""
        key = RunKeys(run).manifest
        self.mailbox.put(key, json.dumps(json.loads(self.mailbox.get(key) or b"") | changes).encode())

    def log(
        self,
        learner: str,
        *spans: TrainedSpan,
        held: Iterable[HeldClaim] = (),
        left: Left | None = "end",
        where: Process = GONE,
        process: str = "main",
        instance: str = "",
        run_id: str = "r",
        reached: tuple[str, int] | None = None,
    ) -> Story:
        page = LogPage(
            learner=learner,
            instance=instance or f"{learner}1",
            process=process,
            page=0,
            write=1,
            run_id=run_id,
            where=where,
            wall=1_764_500_100.0,
            totals=Totals(),
            rate=0.0,
            trained=list(spans),
            held=list(held),
            left=left,
            reached=reached,
        )
        key_of = "".join(c if c.isalnum() else "-" for c in learner)
        self.mailbox.put(self.keys.log(key_of, instance or f"{key_of}1", process, 0), page.encode())
        return self

    def back(self, unit: str, attempt: int, begin: int, who: str = "bob", why: str = "early") -> Story:
        record = BackRecord(begin=begin, learner=who, instance=f"{who}1", why=why)
        self.mailbox.put(self.keys.pass_keys().back(unit, attempt), record.encode())
        return self

    def whole(self, *but: str) -> Story:
        """Ann trained all the others."""
        spans = (span(unit, 0, 4, whole=True) for unit in self.units if unit not in but)
        return self.log("ann", *spans)

    def report(self, run: str | None = None, pass_: str | None = None, most: int = 20) -> Report:
        clock = Clock()
        case = gather(self.mailbox, clock, clock.forward, run, pass_)
        accounts = [account(evidence, expected, case.situation, most) for evidence, expected in case.passes]
        return Report("memory://x", case, accounts)

    def account(self, pass_: str | None = None) -> Account:
        [only] = self.report(pass_=pass_).accounts
        return only


def held(unit: str, attempt: int = 0) -> HeldClaim:
    return HeldClaim("", unit, attempt)


def lines(report: Report, width: int = 200) -> str:
    from rich.console import Console

    console = Console(width=width, no_color=True)
    with console.capture() as capture:
        show(console, report)
    return capture.get()


def said(account: Account, kind: Kind) -> list[tuple[str, int, int | None, str]]:
    found = [one for one in account.findings if one.kind is kind]
    assert account.counts[kind] == len(found)
    return [(one.unit, one.begin, one.end, one.what) for one in found]


# -- exactly once, and what does not break it ----------------------------------------------------------------


def test_a_whole_run_is_exactly_once() -> None:
    report = Story().whole().report()
    [account] = report.accounts
    assert (account.verdict, report.state, report.good) == (Verdict.ONCE, "finished", True)
    assert (account.units, account.whole, account.total, account.trained) == (6, 6, 24, 24)
    assert account.findings == []


def test_a_chain_of_attempts_is_exactly_once() -> None:
    story = Story().whole(FIRST).log("bob", span(FIRST, 0, 1)).back(FIRST, 0, 1)
    story.log("eve", span(FIRST, 1, 3, 1)).back(FIRST, 1, 3, "eve", "error").log(
        "zoe", span(FIRST, 3, 4, 2, whole=True)
    )
    assert story.account().verdict is Verdict.ONCE
    assert story.account().trained == 24


def test_an_end_that_nobody_had_left_to_train_is_whole() -> None:
    """The owner trained all and did not say so; the next one found nothing."""
    story = Story().whole(FIRST).log("bob", span(FIRST, 0, 4)).back(FIRST, 0, 4, "eve", "gone")
    story.log("eve", span(FIRST, 4, 4, 1, whole=True))
    assert story.account().verdict is Verdict.ONCE


def test_a_surplus_that_is_given_back_at_once_is_nothing_special() -> None:
    story = Story().whole(FIRST).back(FIRST, 0, 2, "bob", "surplus")
    story.log("bob", span(FIRST, 0, 2, ticks=[1, 1, 2])).log(
        "eve", span(FIRST, 2, 4, 1, whole=True, ticks=[1, 1, 2])
    )
    assert story.account().verdict is Verdict.ONCE


def test_training_after_the_end_on_record_is_told_and_harms_nobody() -> None:
    story = Story(reclaim_after=5.0).whole(FIRST).log("bob", span(FIRST, 0, 4, whole=True))
    story.back(FIRST, 0, 2, "eve", "silent").log("eve", span(FIRST, 4, 4, 1, whole=True), held=[])
    account = story.account()
    assert [kind for kind in account.counts if account.counts[kind]] == [Kind.LATE]
    assert said(account, Kind.LATE)[0][:3] == (FIRST, 2, 4)
    assert account.verdict is Verdict.ONCE


def test_load_decides_how_many_batches_a_unit_has() -> None:
    report = Story().whole(FIRST).log("bob", span(FIRST, 0, 3, whole=True)).report()
    [account] = report.accounts
    assert (account.verdict, account.short, account.trained) == (Verdict.ONCE, 1, 23)
    assert "another number of batches" in lines(report)


def test_an_empty_unit_is_whole() -> None:
    assert Story().whole(FIRST).log("bob", span(FIRST, 0, 0, whole=True)).account().verdict is Verdict.ONCE


# -- trained more than once ----------------------------------------------------------------------------------


def test_a_pause_that_turned_into_a_duplicate_names_both_and_why() -> None:
    story = Story(reclaim_after=5.0).whole(FIRST).log("bob", span(FIRST, 0, 3))
    story.back(FIRST, 0, 1, "eve", "silent").log("eve", span(FIRST, 1, 4, 1, whole=True, at=1_764_500_050.0))
    report = story.report()
    [account] = report.accounts
    assert (account.verdict, account.repeated, account.trained, report.good) == (
        Verdict.REPEATED,
        2,
        24,
        False,
    )
    [found] = account.findings
    assert (found.unit, found.begin, found.end) == (FIRST, 1, 3)
    bob, eve = found.parts
    assert (bob.learner, bob.instance, bob.process, bob.attempt) == ("bob", "bob1", "main", 0)
    assert (bob.begin, bob.end, bob.start, bob.stop) == (0, 3, 1_764_500_000.0, 1_764_500_003.0)
    assert bob.ended is not None
    assert (bob.ended.why, bob.ended.learner, bob.ended.begin) == ("silent", "eve", 1)
    assert (eve.learner, eve.attempt, eve.ended) == ("eve", 1, None)
    text = lines(report)
    assert "bob~bob1 (main) trained batches 0 to 2" in text
    assert "ended at 1 by eve (silent)" in text
    assert "reclaim_after=5" in text
    assert account.reclaimed == 1
    assert "1 attempt ended by others, because the owner was gone or silent" in text


def test_two_learners_on_one_attempt() -> None:
    account = Story().whole().log("bob", span(FIRST, 1, 3)).account()
    assert said(account, Kind.REPEATED) == [(FIRST, 1, 3, "trained 2 times, on one attempt")]
    assert account.verdict is Verdict.REPEATED


def test_two_processes_of_one_learner_are_two() -> None:
    account = Story().whole().log("ann", span(FIRST, 0, 4), process="0").account()
    assert (account.repeated, account.trained) == (4, 24)


def test_one_process_that_trains_a_batch_again() -> None:
    account = Story().whole(FIRST).log("bob", span(FIRST, 0, 3), span(FIRST, 2, 4, whole=True)).account()
    assert said(account, Kind.REPEATED) == [(FIRST, 2, 3, "trained 2 times, by one process, on one attempt")]


def test_three_times_counts_twice() -> None:
    story = Story().whole().log("bob", span(FIRST, 0, 4)).log("eve", span(FIRST, 2, 3))
    account = story.account()
    assert account.repeated == 5
    assert [found[1:3] for found in said(account, Kind.REPEATED)] == [(0, 2), (2, 3), (3, 4)]


# -- not trained ---------------------------------------------------------------------------------------------


def test_what_a_dead_learner_held_is_lost_and_it_is_named() -> None:
    story = Story().whole(FIRST, SECOND)
    story.log("bob", span(FIRST, 0, 1), held=[held(FIRST), held(SECOND)], left=None)
    report = story.report()
    [account] = report.accounts
    assert said(account, Kind.LOST) == [
        (FIRST, 1, 4, "held by bob, which is gone"),
        (SECOND, 0, 4, "held by bob, which is gone"),
    ]
    assert (account.verdict, account.lost, account.left, report.good) == (Verdict.LOST, 7, 0, False)
    assert account.findings[0].parts[0].learner == "bob"
    assert account.findings[1].parts[0].start is None, "it held it, and trained nothing of it"


def test_what_it_held_will_be_handed_out_again_while_somebody_is_there_to_do_so() -> None:
    def told(alive: bool) -> Report:
        story = Story(reclaim_after=9.0).whole(FIRST).log("bob", held=[held(FIRST)], left=None)
        return story.log("eve", left=None, where=this_process() if alive else GONE).report()

    assert (told(True).verdict, told(True).good, told(True).state) == (Verdict.AT_MOST_ONCE, True, "running")
    assert "will be handed out again" in lines(told(True))
    assert (told(False).verdict, told(False).good) == (Verdict.LOST, False)


def test_a_running_run_has_only_not_trained_it_yet() -> None:
    story = Story().whole(FIRST, SECOND).log("bob", held=[held(FIRST)], left=None, where=this_process())
    report = story.report()
    [account] = report.accounts
    assert said(account, Kind.LEFT) == [(FIRST, 0, 4, "held by bob"), (SECOND, 0, 4, "in no log")]
    assert (report.verdict, report.good, account.left) == (Verdict.AT_MOST_ONCE, True, 8)


def test_what_is_on_offer_is_left_and_a_run_that_is_over_is_not_good_with_it() -> None:
    report = Story().whole(FIRST).log("bob", span(FIRST, 0, 1), left="early").back(FIRST, 0, 1).report()
    [account] = report.accounts
    assert said(account, Kind.LEFT) == [(FIRST, 1, 4, "on offer since bob ended the attempt before (early)")]
    assert (report.verdict, report.good, account.left, account.lost) == (Verdict.AT_MOST_ONCE, False, 3, 0)


def test_what_was_in_hand_when_it_was_given_back_is_lost() -> None:
    story = Story().whole(FIRST).log("bob", span(FIRST, 0, 1), left="error").back(FIRST, 0, 3, why="error")
    account = story.log("eve", span(FIRST, 3, 4, 1, whole=True)).account()
    [(unit, begin, end, what)] = said(account, Kind.LOST)
    assert (unit, begin, end) == (FIRST, 1, 3)
    assert "not known to be trained when bob ended the attempt at batch 3 (error)" in what


def test_it_is_not_lost_while_its_owner_may_still_say_so() -> None:
    story = Story().whole(FIRST).log("bob", span(FIRST, 0, 1), left=None, where=this_process())
    account = story.back(FIRST, 0, 3, why="surplus").log("eve", span(FIRST, 3, 4, 1, whole=True)).account()
    assert [found[:3] for found in said(account, Kind.LEFT)] == [(FIRST, 1, 3)]
    assert account.lost == 0


def test_a_gap_over_two_attempts_is_told_apart() -> None:
    story = Story().whole(FIRST).log("bob", left="error").back(FIRST, 0, 1, why="error")
    account = story.log("eve", held=[held(FIRST, 1)], left=None).account()
    assert [found[1:3] for found in said(account, Kind.LOST)] == [(0, 1), (1, 4)]
    assert [part.learner for found in account.findings for part in found.parts] == ["eve"]


def test_units_in_no_log_are_told_together() -> None:
    account = Story().whole(*list(UNITS)[1:4]).account()
    [found] = account.findings
    assert (found.unit, found.last, found.units, found.batches) == ("000000-1.json", "000001-1.json", 3, 12)
    assert (account.verdict, account.lost) == (Verdict.LOST, 12)
    assert "3 units of 000000-1.json .. 000001-1.json, 12 batches: in no log" in lines(
        Story().whole(*list(UNITS)[1:4]).report()
    )


def test_a_run_that_nobody_ended_has_lost_nothing_by_that() -> None:
    story = Story().log("bob", span(FIRST, 0, 4, whole=True), left="early")
    report = story.report()
    assert (report.state, report.verdict, report.good) == ("broken off", Verdict.AT_MOST_ONCE, False)
    assert report.accounts[0].left == 20


def test_a_run_that_was_only_opened() -> None:
    report = Story().report()
    assert (report.state, report.verdict, report.good) == ("broken off", Verdict.AT_MOST_ONCE, False)
    assert (report.accounts[0].units, report.accounts[0].left) == (6, 24)
    assert "never" in lines(report)


def test_ranks_in_step_may_leave_out_fewer_than_they_are() -> None:
    def told(left_over: int) -> Report:
        story = Story().whole(FIRST).back(FIRST, 0, 4 - left_over, "bob", "surplus")
        story.log("bob", span(FIRST, 0, 4 - left_over, ticks=[1, 1, 2]), reached=("", 9))
        return story.report()

    assert (told(1).good, told(1).verdict) == (True, Verdict.AT_MOST_ONCE)
    assert 'uneven="drop"' in lines(told(1))
    assert not told(2).good
    story = Story().whole(FIRST).log("bob", span(FIRST, 0, 3), held=[held(FIRST)], left=None)
    assert not story.log("eve", reached=("", 9)).account().left_out, "bob died with it"


def test_ends_of_unknown_units_that_ranks_in_step_leave_are_told_and_harm_nobody() -> None:
    units = unit_files([f"s3://b/{name}" for name in "ab"])
    a, b = units
    story = (
        Story(units)
        .log("ann", span(a, 0, 5, whole=True))
        .log("bob", span(b, 0, 2))
        .back(b, 0, 2, "bob", "surplus")
    )
    report = story.report()
    assert (report.verdict, report.good, report.accounts[0].unsized) == (Verdict.AT_MOST_ONCE, True, 1)
    assert "1 unit of unknown size may have had more" in lines(report)
    story.back(b, 0, 2, "bob", "early")
    assert not story.report().good, "they did not step together"
    story = Story(units).log("ann", span(a, 0, 5, whole=True), reached=("", 5))
    assert not story.report().good, "a unit is not known at all"


def test_of_many_units_that_nobody_has_the_number_is_told() -> None:
    story = Story().log("bob", left="early")
    for unit in list(UNITS)[::2]:
        story.back(unit, 0, 0)
    one, other = sorted(story.account().findings, key=lambda found: found.unit)
    assert (one.unit, one.last, one.units, one.batches) == ("000000-0.json", "000002-0.json", 3, 12)
    assert (other.unit, other.last, other.units, other.batches) == ("000000-1.json", "000002-1.json", 3, 12)
    assert "3 units of 000000-0.json .. 000002-0.json, 12 batches: on offer" in lines(story.report())


def test_a_plan_that_was_listed_is_known_by_its_number_of_units() -> None:
    units = unit_files([f"s3://b/{name}" for name in "abc"])
    a, b, c = units
    story = Story(units).log("ann", span(a, 0, 5, whole=True))
    story.log("bob", span(b, 0, 2), held=[held(b)], left=None)
    report = story.report()
    [account] = report.accounts
    assert (account.units, account.total, account.whole, account.trained) == (3, None, 1, 7)
    assert (account.verdict, account.unsized, account.lost) == (Verdict.LOST, 2, 0)
    assert [(found.unit, found.begin, found.end) for found in account.findings] == [
        ("", 0, None),
        (b, 2, None),
    ]
    assert f"{b} from batch 2 on: held by bob" in lines(report)
    story.log("bob", span(b, 0, 2, whole=True)).log("eve", span(c, 0, 1, whole=True))
    assert story.account().verdict is Verdict.ONCE


# -- what cannot be true together ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spans", "backs", "expected"),
    [
        ([span(FIRST, 0, 2, whole=True), span(FIRST, 2, 4)], [], "whole at 2, but was trained beyond"),
        ([span(FIRST, 0, 4, whole=True), span(FIRST, 2, 3, 1, whole=True)], [(0, 2)], "whole at 3 and at 4"),
        ([span(FIRST, 0, 4, whole=True)], [(0, 5)], "attempt 0 is put on record as ended at 5"),
        ([span(FIRST, 0, 2), span(FIRST, 2, 4, 1, whole=True)], [], "no record ends attempt 0"),
        ([span(FIRST, 0, 4, 1, whole=True)], [], "no record ends attempt 0"),
        ([span(FIRST, 0, 2), span(FIRST, 2, 4, 2, whole=True)], [(1, 2)], "that of attempt 0 is not"),
        (
            [span(FIRST, 0, 3), span(FIRST, 2, 4, 1, whole=True)],
            [(0, 3)],
            "begins at batch 3, but was trained before",
        ),
        ([span(FIRST, 0, 4, whole=True)], [(0, 3), (1, 1)], "begins at batch 3, and its end is put at 1"),
        (
            [span(FIRST, 0, 4, whole=True), span(FIRST, 3, 1)],
            [],
            "batches 3 to 1 of attempt 0, which cannot be",
        ),
        ([span(FIRST, 0, 4, whole=True), span("x", 0, 1)], [], "it is not in the plan"),
    ],
)
def test_contradictions(spans: list[TrainedSpan], backs: list[tuple[int, int]], expected: str) -> None:
    story = Story().whole(FIRST).log("bob", *spans)
    for attempt, begin in backs:
        story.back(FIRST, attempt, begin)
    report = story.report()
    assert (report.verdict, report.good) == (Verdict.CONTRADICTORY, False)
    assert any(expected in what for *_, what in said(report.accounts[0], Kind.CONTRADICTION))


def test_a_note_that_all_is_trained_is_held_against_the_logs() -> None:
    def noted(story: Story) -> Report:
        story.mailbox.put(story.keys.whole("bob", "bob1", ""), WholeRecord(units=6).encode())
        return story.report()

    assert noted(Story().whole()).verdict is Verdict.ONCE
    report = noted(Story().whole(FIRST))
    assert report.verdict is Verdict.CONTRADICTORY
    assert "bob~bob1" in lines(report)


def test_a_log_of_another_run_proves_nothing() -> None:
    report = Story().whole().log("bob", run_id="other").report()
    assert (report.verdict, report.good) == (Verdict.CONTRADICTORY, False)
    assert "The log of bob~bob1 is not of this run" in lines(report)


# -- a run that goes on from a state -------------------------------------------------------------------------


def before(whole: Iterable[int], parts: Mapping[int, Iterable[int]]) -> Trained:
    """Units trained whole, by position, and batches of others."""
    trained = Trained()
    for position in whole:
        trained.finish(position, 4)
    for position, batches in parts.items():
        for batch in batches:
            trained.add(position, batch, batch + 1)
    return trained


STATE = State(Plan(UNITS).signature(), "1", "r", {"": before([0, 1, 5], {2: [0, 3]})}).as_dict()


def test_what_was_trained_before_is_not_expected_again() -> None:
    def told(last: int) -> Account:
        spans = [span("000001-0.json", 0, 2, whole=True), span("000001-1.json", 0, last, whole=last == 4)]
        return Story(state=STATE).log("ann", *spans, span("000002-0.json", 0, 4, whole=True)).account()

    assert (told(4).verdict, told(4).units, told(4).total, told(4).trained) == (Verdict.ONCE, 3, 10, 10)
    assert (told(3).verdict, told(3).lost, told(3).short) == (Verdict.LOST, 1, 0)


def test_a_unit_that_the_state_has_whole_is_not_to_be_trained() -> None:
    story = Story(state=STATE).log("ann", span(FIRST, 0, 4, whole=True))
    assert "the state that the run began with" in said(story.account(), Kind.CONTRADICTION)[0][3]


def test_what_was_trained_after_the_state_one_came_back_from_does_not_count() -> None:
    story = (
        Story().whole(FIRST, SECOND).back(FIRST, 0, 1, "bob", "resumed").back(SECOND, 0, 0, "bob", "resumed")
    )
    story.log("bob", span(FIRST, 0, 4, whole=True), span(SECOND, 0, 2), instance="bob0", left=None)
    report = story.log("bob", span(FIRST, 1, 4, 1, whole=True), left="end").report()
    [account] = report.accounts
    assert (account.trained, account.undone, account.repeated, account.left) == (20, 5, 0, 4)
    assert "5 batches trained after the state" in lines(report)
    story.log("bob", span(FIRST, 1, 4, 1, whole=True), span(SECOND, 0, 4, 1, whole=True))
    assert story.account().verdict is Verdict.ONCE
    again = story.back(FIRST, 0, 1, "eve", "silent").account()
    assert (again.verdict, again.repeated) == (Verdict.REPEATED, 3), (
        "who was only silent goes on with its model"
    )


def test_units_of_a_state_in_no_log() -> None:
    [found] = Story(state=STATE).log("ann", left="end").account().findings
    assert (found.unit, found.last, found.units, found.batches) == ("000001-0.json", "000002-0.json", 3, 10)


def test_nothing_is_expected_of_a_pass_that_was_over() -> None:
    trained = before([0], {})
    trained.over = True
    expected = Expectation(Plan(UNITS).signature(), trained)
    assert (expected.units, expected.total, list(expected.absent([]))) == (0, 0, [])


@pytest.mark.parametrize("state", [{}, {"version": 9}, STATE | {"passes": {"": {"whole": 3}}}])
def test_a_state_of_another_kind_is_said(state: dict[str, Any]) -> None:
    with pytest.raises(RecordError, match="state"):
        Story(state=state).report()


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_absent_units_against_counting(data: st.DataObject) -> None:
    steps, size, lanes = (data.draw(st.integers(1, most)) for most in (40, 5, 3))
    units = data.draw(
        st.sampled_from(
            [unit_grid(steps, size, lanes, taper=2), unit_ranges(steps * 2 + 1, size * 2, 2, taper=2)]
        )
    )
    plan = Plan(units)
    names = list(units)
    done = data.draw(st.sets(st.sampled_from(range(len(names)))))
    known = data.draw(st.sets(st.sampled_from(names)))
    part = data.draw(st.sampled_from([at for at in range(len(names)) if at not in done] or [-1]))
    trained = before(done, {part: [0]} if part >= 0 else {})
    expected = Expectation(plan.signature(), trained)
    left = {name: (plan.batches(at) or 0) - (at == part) for at, name in enumerate(names) if at not in done}
    sizes = {name: count for name, count in left.items() if count}
    assert expected.total == sum(sizes.values())
    assert expected.units == len(sizes)
    assert all(expected.batches(name) == count for name, count in sizes.items())
    missing = [name for name in sizes if name not in known]
    told = [
        names[at]
        for stretch in expected.absent(known)
        for at in range(names.index(stretch.first), names.index(stretch.last) + 1)
    ]
    assert told == missing
    assert sum(one.units for one in expected.absent(known)) == len(missing)
    assert sum(one.batches for one in expected.absent(known)) == sum(sizes[name] for name in missing)


# -- against counting batch by batch -------------------------------------------------------------------------


@given(
    spans=st.lists(
        st.tuples(
            st.sampled_from(list(UNITS)[:3]),
            st.integers(0, 2),
            st.integers(0, 4),
            st.integers(0, 4),
            st.booleans(),
            st.sampled_from("abc"),
        ),
        max_size=8,
    ),
    ends=st.dictionaries(st.sampled_from(list(UNITS)[:3]), st.lists(st.integers(0, 4), max_size=2)),
)
@settings(max_examples=300, deadline=None)
def test_numbers_against_counting(
    spans: list[tuple[str, int, int, int, bool, str]], ends: dict[str, list[int]]
) -> None:
    """Whatever logs say, even nonsense: each batch is trained, or left, or lost."""
    story = Story()
    for unit, begins in ends.items():
        for attempt, begin in enumerate(begins):
            story.back(unit, attempt, begin)
    by_learner: dict[str, list[TrainedSpan]] = {name: [] for name in "abc"}
    taken = set()
    counted: Counter[tuple[str, int]] = Counter()
    for unit, attempt, one, other, whole, learner in spans:
        begin, end = sorted((one, other))
        if (learner, unit, attempt, begin) not in taken:
            taken.add((learner, unit, attempt, begin))
            by_learner[learner].append(span(unit, begin, end, attempt, whole and end == 4))
            counted.update((unit, index) for index in range(begin, end))
    for learner, own in by_learner.items():
        story.log(learner, *own)
    account = story.account()
    assert account.trained == len(counted)
    assert account.repeated == counted.total() - len(counted)
    assert account.left + account.lost == 24 - len(counted)
    assert account.whole == sum(all(counted[unit, at] for at in range(4)) for unit in UNITS)
    assert (account.verdict is Verdict.ONCE) == (
        account.counts[Kind.CONTRADICTION] == 0 and len(counted) == 24 == counted.total()
    )


# -- which run, which pass -----------------------------------------------------------------------------------


def test_the_newest_run_is_meant_unless_one_is_named() -> None:
    story = Story().whole()
    for name in ("2", "10", "again-3"):
        Story(mailbox=story.mailbox, keys=RunKeys(name))
    assert story.report().case.run == "10"
    story.opened("2", wall=2e9)  # by a clock that is ahead: the tenth still follows the second
    assert story.report().case.run == "10"
    story.opened("again-3", wall=3e9)
    assert story.report().case.run == "again-3"
    assert story.report("1").verdict is Verdict.ONCE
    assert story.report("again-3").case.run == "again-3"
    with pytest.raises(InvalidInputError, match="again-3"):
        story.report("3")


def test_no_older_run_is_judged_where_the_last_cannot_be_read() -> None:
    story = Story().whole()
    story.mailbox.put("runs/notes.json", b"mine")
    assert story.report().verdict is Verdict.ONCE
    story.mailbox.put("runs/2.json", b"torn")
    with pytest.raises(RecordError, match=r"runs/2.json: not a manifest.*name the run"):
        story.report()
    assert story.report("1").verdict is Verdict.ONCE
    with pytest.raises(RecordError, match=r"runs/2.json: not a manifest"):
        story.report("2")


def test_each_training_pass_is_judged_and_others_only_when_named() -> None:
    spans = [span(unit, 0, 4, whole=True, pass_=name) for unit in UNITS for name in ("e10", "", "e2", "val0")]
    story = Story().log(
        "ann", *(one for one in spans if (one.pass_, one.unit) not in (("e2", FIRST), ("val0", FIRST)))
    )
    report = story.report()
    assert [account.name for account in report.accounts] == ["", "e2", "e10"]
    assert [account.verdict for account in report.accounts] == [
        Verdict.ONCE,
        Verdict.AT_MOST_ONCE,
        Verdict.ONCE,
    ]
    assert (report.verdict, report.good) == (Verdict.AT_MOST_ONCE, False)
    assert story.account("e0").name == ""
    assert story.account("e10").verdict is Verdict.ONCE
    assert (story.account("val0").units, story.account("val0").whole) == (None, 5)
    for name in ("e1", ""):
        with pytest.raises(InvalidInputError, match="e0, e10, e2, val0"):
            story.report(pass_=name)


def test_of_a_run_without_training_the_other_passes_are_judged() -> None:
    spans = [span(unit, 0, 4, whole=True, pass_="predict0") for unit in UNITS]
    story = Story()
    manifest = Manifest.decode(story.mailbox.get(story.keys.manifest) or b"", "key")
    plans = {"predict": manifest.plans["train"]}
    story.mailbox.put(story.keys.manifest, msgspec.structs.replace(manifest, plans=plans).encode())
    report = story.log("ann", *spans[1:], left="end").report()
    assert [(account.name, account.verdict) for account in report.accounts] == [
        ("predict0", Verdict.AT_MOST_ONCE)
    ]
    report = story.log("bob", spans[0], left="end").report()
    assert [(account.name, account.verdict) for account in report.accounts] == [("predict0", Verdict.ONCE)]


def test_nothing_here_is_said() -> None:
    with pytest.raises(RunError, match="no run was ever opened here"):
        gather(MemoryMailbox(), Clock(), time.sleep)


def test_another_protocol_and_a_run_that_is_being_removed_are_said() -> None:
    for change, error, message in (
        ({"protocol": 99}, RecordError, "protocol 99"),
        ({"plans": {}}, RunError, "being removed"),
    ):
        story = Story()
        story.opened("1", **change)
        with pytest.raises(error, match=message):
            story.report()


def test_what_lies_under_back_and_is_no_units_is_somebody_elses() -> None:
    story = Story().whole()
    for key in ("back/notes~0", "back/readme", f"back/{FIRST}"):
        story.mailbox.put(key, b"mine")
    assert story.account().verdict is Verdict.ONCE
    story.mailbox.put(f"back/{FIRST}~0", b"mine")
    with pytest.raises(RecordError, match="not a give-back record"):
        story.report()


# -- who is there --------------------------------------------------------------------------------------------


class Beating(Counted):
    """Somebody elsewhere goes on writing its log."""

    beats = 0

    def get(self, key: str) -> bytes | None:
        body = super().get(key)
        if body is None or "/bob" not in key:
            return body
        self.beats += 1
        return json.dumps(json.loads(body) | {"write": self.beats}).encode()


def test_a_learner_of_another_machine_is_watched_before_its_units_are_lost() -> None:
    story = Story().whole(FIRST).log("bob", held=[held(FIRST)], left=None, where=ELSEWHERE)
    assert story.account().verdict is Verdict.LOST
    clock = Clock()
    case = gather(Beating(story.mailbox), clock, clock.forward)
    assert case.situation.running
    [(evidence, expected)] = case.passes
    assert account(evidence, expected, case.situation, 9).verdict is Verdict.AT_MOST_ONCE


def test_a_log_under_anothers_name_proves_nothing() -> None:
    story = Story().whole(FIRST).log("bob", span(FIRST, 0, 4, whole=True))
    body = story.mailbox.get("learners/bob~bob1/main.000000") or b""
    story.mailbox.delete(["learners/bob~bob1/main.000000"])
    story.mailbox.put("learners/eve~eve1/main.000000", body.replace(b'"end"', b"null"))
    assert story.report().verdict is Verdict.CONTRADICTORY


def test_the_log_of_a_learner_that_was_looked_for_is_read_once_more() -> None:
    story = Story().whole(FIRST).log("bob", held=[held(FIRST)], left=None)
    before = story.mailbox.get("learners/bob~bob1/main.000000")
    story.log("bob", span(FIRST, 0, 4, whole=True))

    class Leaving(Counted):
        readings = 0

        def get(self, key: str) -> bytes | None:
            self.readings += "/bob" in key
            return before if "/bob" in key and self.readings == 1 else super().get(key)

    clock = Clock()
    case = gather(Leaving(story.mailbox), clock, clock.forward)
    [(evidence, expected)] = case.passes
    assert account(evidence, expected, case.situation, 9).verdict is Verdict.ONCE


def test_it_asks_for_logs_and_give_back_records_and_for_no_claim() -> None:
    story = Story().whole(FIRST, SECOND).back(FIRST, 0, 0).back(SECOND, 0, 0)
    story.mailbox.put(f"units/{FIRST}", b"a claim")
    asked: list[tuple[str, str]] = []

    class Recording(Counted):
        def _around(self, verb: str, name: str, forward: Any) -> Any:
            asked.append((verb, name))
            return super()._around(verb, name, forward)

    gather(Recording(story.mailbox), Clock(), time.sleep)
    assert sorted(asked) == [
        ("get", f"back/{FIRST}~0"),
        ("get", f"back/{SECOND}~0"),
        ("get", "learners/ann~ann1/main.000000"),
        ("get", "runs/1.json"),
        ("list", "back/"),
        ("list", "learners/"),
        ("list", "runs/"),
    ]


# -- how it is shown -----------------------------------------------------------------------------------------


def test_no_more_findings_than_asked_for_are_kept_and_all_are_counted() -> None:
    story = Story().whole(*UNITS).log("bob", held=[held(unit) for unit in UNITS], left=None)
    report = story.report(most=2)
    [account] = report.accounts
    assert (len(account.findings), account.counts[Kind.LOST], account.lost) == (2, 6, 24)
    assert "and 4 more; --most 6 shows them" in lines(report)


def test_hostile_names_and_numbers_stay_text() -> None:
    evil = TrainedSpan("", EVIL, 0, 0, 10**18, 0, 0.0, 1e300, -1e300, None, True, [])
    story = (
        Story().whole(FIRST).log(EVIL, evil, span(FIRST, 0, 1), instance="x", held=[held(FIRST)], left=None)
    )
    story.back(FIRST, 0, 1, EVIL, EVIL)
    report = story.report()
    text = lines(report)
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "\\x1b[2J\\u202eevil" in text
    found = json.loads(document(report))["passes"][0]["findings"]
    assert any(part["learner"] == EVIL for one in found for part in one["who"])


def test_the_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mailbox = open_mailbox(tmp_path)
    train(UNITS, mailbox, "ann")
    assert main(["audit", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == [
        "format",
        "url",
        "run",
        "run_id",
        "state",
        "verdict",
        "good",
        "reclaim_after",
        "learners",
        "untracked",
        "strangers",
        "passes",
    ]
    assert (found["format"], found["run"], found["verdict"]) == ("shardqueue-audit/1", "1", "exactly once")
    [only] = found["passes"]
    assert list(only) == [
        *("pass", "verdict", "units", "whole", "batches", "trained", "repeated", "left", "lost", "unsized"),
        *("short", "reclaimed", "undone", "left_out", "counts", "findings"),
    ]
    assert only["counts"] == {"contradiction": 0, "lost": 0, "repeated": 0, "late": 0, "left": 0}


def test_the_command_writes_nothing_and_imports_nothing_heavy(tmp_path: Path) -> None:
    train(UNITS, open_mailbox(tmp_path), "ann")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    code = f"""
import sys
from shardqueue.cli import main
code = main(["audit", {str(tmp_path)!r}])
print(code, [name for name in ("torch", "lightning", "s3fs", "numpy") if name in sys.modules])
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stderr == ""
    assert ended.stdout.splitlines()[-1] == "0 []"
    assert "exactly once: every unit is trained whole, and no batch twice." in ended.stdout
    assert "\x1b" not in ended.stdout
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_the_help_explains_verdicts_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["audit", "--help"])
    out = capsys.readouterr().out
    assert all(f"\n  {verdict.value} " in out for verdict in Verdict)
    assert "exit code" in out
    assert max(map(len, out.splitlines())) <= 80


def test_a_narrow_terminal_and_a_colourful_one(tmp_path: Path) -> None:
    report = Story().whole(FIRST).log("bob", held=[held(FIRST)], left=None).report()
    text = lines(report, width=60)
    assert "held by bob, which is gone" in text
    assert "lost: no log says" in text


def test_errors_of_the_command_are_one_line_and_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "readme").write_text("mine")
    assert main(["audit", str(tmp_path)]) == 2
    assert "what is here is not ours" in capsys.readouterr().err
    train(UNITS, open_mailbox(tmp_path), "ann")
    for arguments in (["--most", "0"], ["--run", "9"], ["--pass", "e9"], ["--run", EVIL]):
        assert main(["audit", str(tmp_path), *arguments]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
        assert "\x1b" not in captured.err
    for page in tmp_path.glob("learners/*/main.*"):
        page.write_bytes(b"not a log")
    assert main(["audit", str(tmp_path)]) == 2
    assert "not a learner's log" in capsys.readouterr().err


# -- real runs -----------------------------------------------------------------------------------------------


def audited(mailbox: Mailbox) -> Report:
    case = gather(mailbox, Clock(), time.sleep)
    accounts = [account(evidence, expected, case.situation, 99) for evidence, expected in case.passes]
    return Report("x", case, accounts)


def test_repeats_of_ranks_that_step_together_are_in_no_log_and_that_is_said() -> None:
    stepped = Story().whole(SECOND).log("bob", span(SECOND, 0, 4, whole=True), reached=("", 3))
    assert "uneven='repeat'" not in lines(stepped.report())
    stepped.log("cyd", reached=("", 3))
    assert "uneven='repeat'" in lines(stepped.report())


@pytest.mark.parametrize("left", ["end", "early"])
def test_a_loader_that_nobody_tracks_is_named(left: Left) -> None:
    story = Story()
    page = LogPage.decode(
        story.log("bob", process="0", left=left).mailbox.get("learners/bob~bob1/0.000000") or b"", "key"
    )
    story.mailbox.put(
        "learners/bob~bob1/0.000000", msgspec.structs.replace(page, totals=Totals(claimed=6)).encode()
    )
    report = story.report()
    assert (report.verdict, report.good) == (Verdict.LOST if left == "end" else Verdict.AT_MOST_ONCE, False)
    assert "bob~bob1 claimed units and recorded nothing as trained" in lines(report)


def test_learners_that_come_and_go_train_exactly_once(tmp_path: Path) -> None:
    units = unit_grid(30, 4, lanes=3, taper=False)
    mailbox = open_mailbox(tmp_path)
    values = train(units, mailbox, "ann", most=5, run="1")
    values += train(units, mailbox, "bob", most=3, run="1")
    for some in together(partial(train, units, mailbox, name, run="1", prefetch=2) for name in "cde"):
        values += some
    assert Counter(values) == dataset(units)
    assert given_back(mailbox)
    report = audited(mailbox)
    [account] = report.accounts
    assert (report.verdict, account.trained, account.whole) == (Verdict.ONCE, len(values), len(units))
    assert (report.state, report.good) == ("finished", True)


def test_an_interrupted_run_says_what_is_on_offer(tmp_path: Path) -> None:
    mailbox = open_mailbox(tmp_path)
    values = train(UNITS, mailbox, "ann", most=5)
    report = audited(mailbox)
    [account] = report.accounts
    assert (report.verdict, report.state, report.good) == (Verdict.AT_MOST_ONCE, "broken off", False)
    assert (account.trained, account.left, account.lost) == (len(values), 24 - len(values), 0)


def _train_until_killed(folder: str, units: Mapping[str, Unit], pipe: Connection) -> None:
    def slowly(unit: Unit) -> Iterator[tuple[int, tuple[int, int]]]:
        yield from load(unit)

    with shared_queue(units, folder, "killed", slowly, run="1") as queue:
        for number, (_, value) in enumerate(queue):
            pipe.send(value)
            if number == 5:
                time.sleep(600)


def test_what_a_killed_learner_held_is_lost_and_named(tmp_path: Path) -> None:
    """It stands still with units in hand until its log shows them, and is killed."""
    mailbox = open_mailbox(tmp_path)
    units = unit_grid(40, 4, lanes=2, taper=False)
    context: Any = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_train_until_killed, args=(str(tmp_path), units, there))
    process.start()
    there.close()
    try:
        got = [here.recv() for _ in range(6)]
        until(lambda: sum(credited(mailbox).values()) >= 5)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        here.close()
    values = train(units, mailbox, "other", run="1")
    report = audited(mailbox)
    [account] = report.accounts
    logged = sum(credited(mailbox).values())
    assert (report.verdict, report.state, report.good) == (Verdict.LOST, "finished", False)
    assert account.trained == logged == len(values) + 5
    assert account.lost == 80 - logged
    assert account.repeated == 0
    lost = [found for found in account.findings if found.kind is Kind.LOST]
    assert {part.learner for found in lost for part in found.parts} == {"killed"}
    assert len(set(values) | set(got)) == len(values) + 6, (
        "what it trained last is not in its log, and nobody's"
    )


def test_a_run_that_goes_on_is_at_most_once_meanwhile(tmp_path: Path) -> None:
    mailbox = open_mailbox(tmp_path)
    with shared_queue(UNITS, mailbox, "ann", load) as queue:
        next(queue)
        until(lambda: bool(mailbox.list("learners/")))
        report = audited(mailbox)
        assert (report.state, report.verdict, report.good) == ("running", Verdict.AT_MOST_ONCE, True)
        for _ in queue:
            pass
    assert audited(mailbox).verdict is Verdict.ONCE


def _train_and_tell(folder: str, learner: str, units: Mapping[str, Unit], pipe: Connection) -> None:
    with pipe, shared_queue(units, folder, learner, load, run="1", reclaim_after=2.0) as queue:
        for _, value in queue:
            pipe.send(value)
            time.sleep(0.01)


@pytest.mark.full
@pytest.mark.parametrize("what", [signal.SIGKILL, signal.SIGSTOP])
def test_what_was_trained_twice_is_what_the_audit_counts(what: signal.Signals, tmp_path: Path) -> None:
    """Held against values. What a killed learner trained after its last log went with its model, and is in no log."""
    units = unit_grid(120, 20, lanes=2, taper=False)
    context: Any = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for learner in ("ann", "bob"):
        here, there = context.Pipe()
        process = context.Process(target=_train_and_tell, args=(str(tmp_path), learner, units, there))
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    bob = processes[1].pid
    values = [pipes[1].recv() for _ in range(25)]
    os.kill(bob, what)
    try:
        values += _all_of(pipes[0])
    finally:
        if what is signal.SIGSTOP:
            os.kill(bob, signal.SIGCONT)
    values += _all_of(pipes[1])
    for process in processes:
        process.join()
    twice = Counter(values) - dataset(units)
    assert Counter(values) - twice == dataset(units)
    report = audited(open_mailbox(tmp_path))
    [account] = report.accounts
    assert account.trained == 240
    assert account.reclaimed > 0
    if what is signal.SIGSTOP:
        assert (report.verdict, account.repeated) == (Verdict.REPEATED, twice.total())
    else:
        assert (report.verdict, account.repeated) == (Verdict.ONCE, 0)


def _all_of(pipe: Connection) -> list[Any]:
    told = []
    try:
        while True:
            told.append(pipe.recv())
    except EOFError:
        return told


@pytest.mark.full
@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_that_step_together_repeat_nothing_by_their_logs(
    ranks: Callable[[int], Ranks], workers: int, tmp_path: Path
) -> None:
    """Who has no batch left gets its last one again, which is no repetition; surpluses go back all the time."""
    from lockstep_cases import Case, all_trained

    cases = [
        Case(shape, 22, workers=workers, epochs=2) for shape in ("equal", "tapered", "listed", "unknown")
    ]
    ranks(3).run(all_trained, cases, str(tmp_path))
    for number, case in enumerate(cases):
        report = audited(open_mailbox(tmp_path / str(number)))
        assert report.good, lines(report)
        assert [(account.trained, account.repeated) for account in report.accounts] == [(22, 0), (22, 0)]
        assert case.shape == "unknown" or report.verdict is Verdict.ONCE


# -- large ---------------------------------------------------------------------------------------------------


def _large(units: Mapping[str, Unit], learners: int, page_spans: int) -> MemoryMailbox:
    """All trained whole, except what the last learner held."""
    story = Story(units)
    names = list(units)
    for learner in range(learners):
        mine = names[learner::learners]
        label = f"n{learner}"
        *kept, last = mine
        for page, at in enumerate(range(0, len(kept), page_spans)):
            spans = [span(unit, 0, 20, whole=True) for unit in kept[at : at + page_spans]]
            body = LogPage(
                learner=label,
                instance="i",
                process="main",
                page=page,
                write=page,
                run_id="r",
                where=GONE,
                wall=1.0,
                totals=Totals(),
                rate=0.0,
                trained=spans,
                held=[held(last)],
                left=None,
            )
            story.mailbox.put(story.keys.log(label, "i", "main", page), body.encode())
    return story.mailbox


@pytest.mark.parametrize(
    ("count", "learners"), [(20_000, 8), pytest.param(10**6, 64, marks=pytest.mark.full)]
)
def test_a_large_run_costs_requests_by_pages_of_logs(count: int, learners: int) -> None:
    units = unit_grid(count // 4 * 20, 20, lanes=4, taper=False)
    mailbox = Counted(_large(units, learners, 2000))
    clock = Clock()
    case = gather(mailbox, clock, clock.forward)
    [(evidence, expected)] = case.passes
    found = account(evidence, expected, case.situation, 20)
    assert (found.verdict, found.units, found.whole) == (Verdict.LOST, count, count - learners)
    assert (found.lost, found.counts[Kind.LOST]) == (20 * learners, learners)
    assert found.trained == 20 * (count - learners)
    pages = sum(1 for key in mailbox.list("learners/"))
    assert mailbox.counts["get"] <= pages + 4 * learners + 1
    assert mailbox.counts["list"] <= 8


def test_one_unit_cut_into_many_spans_is_judged_in_one_sweep() -> None:
    batches = 20_000
    expected = Expectation(Plan(unit_grid(batches, batches, taper=False)).signature())
    ledger = Ledger()
    page = LogPage.decode(Story().log("ann").mailbox.get("learners/ann~ann1/main.000000") or b"", "key")
    log = ledger.read(page)
    spans = [(log, span("000000-0.json", at, at + 1, whole=at == batches - 1)) for at in range(batches)]
    found = account(Evidence("", {"000000-0.json": spans}), expected, Situation(ended=True), 9)
    assert (found.verdict, found.trained, found.whole) == (Verdict.ONCE, batches, 1)


def test_the_process_that_is_gone_is_seen_as_gone() -> None:
    assert seen_here(GONE) is False
    assert seen_here(ELSEWHERE) is None
