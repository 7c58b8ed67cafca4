"""`shardqueue timeline`: who trained what and when, from logs and records alone, whatever those hold."""

from __future__ import annotations

import io
import json
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from xml.etree import ElementTree

import pytest
from learners import PATIENCE, credited, load, together, until
from rich.cells import cell_len
from rich.console import Console

from shardqueue import Session, open_mailbox, shared_queue, unit_grid
from shardqueue.cli import main
from shardqueue.errors import InvalidInputError, RecordError, RunError
from shardqueue.learner import SILENCE
from shardqueue.ledger import Log
from shardqueue.mailbox.faults import Wrapper
from shardqueue.mailbox.memory import MemoryMailbox
from shardqueue.plan import Plan
from shardqueue.records import (
    BackRecord,
    ClaimRecord,
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
from shardqueue.timeline import picture, terminal
from shardqueue.timeline.chart import Tail
from shardqueue.timeline.document import FORMAT, document
from shardqueue.timeline.lanes import DAY, LONGEST_NAME, ROWS, Clocks, fold
from shardqueue.timeline.making import NOTES
from shardqueue.timeline.reading import BARS, HANDOVERS, read

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from multiprocessing.connection import Connection
    from pathlib import Path

    from shardqueue import Unit
    from shardqueue.records import Left
    from shardqueue.timeline.chart import Chart, Lane

T = TypeVar("T")
UNITS = unit_grid(12, 4, lanes=2, taper=False)
FIRST, SECOND, THIRD, *_ = UNITS
OPENED = 1_764_500_000.0
EVIL = "</script><script>alert(1)</script>\x1b[2J\u202e$\\frac{"


class At:
    """A clock that stands still, so many seconds after the run was opened."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def monotonic(self) -> float:
        return self._seconds

    def wall(self) -> float:
        return OPENED + self._seconds


def far(host: str) -> Process:
    return Process(host=host, boot=f"{host}/1", pid=7, started="1")


def span(
    unit: str,
    start: float,
    stop: float,
    waited: float = 0.0,
    *,
    attempt: int = 0,
    begin: int = 0,
    end: int = 4,
    samples: int = 8,
    pass_: str = "",
    whole: bool = True,
) -> TrainedSpan:
    """Times are seconds after the run was opened."""
    return TrainedSpan(
        pass_, unit, attempt, begin, end, samples, waited, OPENED + start, OPENED + stop, None, whole
    )


@dataclass
class Story:
    """A run as its logs and records tell it, with times in seconds after it was opened."""

    mailbox: MemoryMailbox = field(default_factory=MemoryMailbox)
    keys: RunKeys = field(default_factory=lambda: RunKeys("1"))

    def __post_init__(self) -> None:
        self.opens()

    def opens(self, **changes: Any) -> Story:
        manifest = new_manifest(Plan(UNITS), "ann", OPENED)
        fields = {name: getattr(manifest, name) for name in manifest.__struct_fields__}
        self.mailbox.put(self.keys.manifest, Manifest(**fields | {"run_id": "r"} | changes).encode())
        return self

    def log(
        self,
        learner: str,
        *spans: TrainedSpan,
        since: float = 0.0,
        seen: float = 100.0,
        left: Left | None = "end",
        name: str = "",
        host: str = "",
        held: Iterable[HeldClaim] = (),
        number: int = 0,
        **changes: Any,
    ) -> Story:
        name = name or learner
        fields: dict[str, Any] = {
            "learner": learner,
            "instance": f"{name}1",
            "process": "main",
            "page": number,
            "write": 1,
            "run_id": "r",
            "where": far(host or name),
            "wall": OPENED + seen,
            "totals": Totals(claimed=len(spans), elapsed=seen - since),
            "rate": 0.0,
            "trained": list(spans),
            "held": list(held),
            "left": left,
            "every": 5.0,
        }
        page = LogPage(**fields | changes)
        self.mailbox.put(self.keys.log(name, page.instance, page.process, page.page), page.encode())
        return self

    def back(self, unit: str, attempt: int, begin: int, by: str, why: str, pass_: str = "") -> Story:
        record = BackRecord(begin=begin, learner=by, instance=f"{by}1", why=why)
        self.mailbox.put(self.keys.pass_keys(pass_).back(unit, attempt), record.encode())
        return self

    def chart(self, *passes: str, at: float = 1000.0, **options: Any) -> Chart:
        how: dict[str, Any] = {"clock": At(at), "seen": lambda _: None, "url": "memory://here"}
        chart = read(self.mailbox, None, passes, **how | options)
        assert chart is not None
        for lane in chart.lanes:
            parts = (lane.busy, lane.waited, lane.idle, lane.away)
            assert min(parts) >= 0.0
            assert math.fsum(parts) == pytest.approx(chart.seconds)
            assert all(0.0 <= bar.start <= bar.stop for bar in lane.bars)
            assert all(0.0 <= bar.waited <= bar.stop - bar.start + 1e-6 for bar in lane.bars)
        return chart


def lane_of(chart: Chart, learner: str) -> Lane:
    [lane] = [lane for lane in chart.lanes if lane.learner == learner]
    return lane


def shown(chart: Chart, width: int = 80, encoding: str = "utf-8", everybody: bool = False) -> list[str]:
    """The lines of a pipe of this encoding; what cannot be encoded raises."""
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict")
    terminal.show(Console(file=out, width=width), chart, everybody)
    out.seek(0)
    return [line.rstrip("\n") for line in out]


# -- what a log comes to -----------------------------------------------------------------------------------------


def test_busy_waited_idle_and_the_tail_are_exact() -> None:
    """Ann waits 10 s for her first batch and 5 s within her second unit; Bob is done 10 s before her."""
    story = Story()
    story.log("ann", span(FIRST, 10, 30, 10), span(SECOND, 30, 60, 5, samples=16))
    story.log("bob", span(THIRD, 0, 50), seen=61)
    chart = story.chart()
    assert (chart.run, chart.origin, chart.seconds, chart.spans) == ("1", OPENED, 60.0, 3)
    ann, bob = chart.lanes
    assert (ann.busy, ann.waited, ann.idle, ann.away) == (45.0, 15.0, 0.0, 0.0)
    assert (bob.busy, bob.waited, bob.idle, bob.away) == (50.0, 0.0, 10.0, 0.0)
    assert (ann.batches, ann.samples, ann.finished, ann.rows) == (8, 24, 60.0, 1)
    assert [(bar.start, bar.stop, bar.before, bar.waited) for bar in ann.bars] == [
        (10.0, 30.0, 10.0, 0.0),
        (30.0, 60.0, 0.0, 5.0),
    ]
    [tail] = chart.tails
    assert (tail.pass_, tail.start, tail.stop, tail.idle) == ("e0", 50.0, 60.0, 10.0)
    assert chart.passes == ("e0",)
    assert chart.notes == ()


def test_interleaved_units_count_once_and_lie_in_rows() -> None:
    story = Story().log("ann", span(FIRST, 0, 20, 4), span(SECOND, 10, 30, 4), span(THIRD, 20, 40, 0))
    [lane] = story.chart().lanes
    assert [bar.row for bar in lane.bars] == [0, 1, 0]
    assert (lane.rows, lane.busy, lane.waited) == (2, 32.0, 8.0)


def test_waiting_is_never_more_than_the_time_there_was() -> None:
    story = Story().log("ann", span(FIRST, 10, 20, 1e300), span(SECOND, 12, 20, 1e300))
    [lane] = story.chart().lanes
    assert (lane.busy, lane.waited) == (0.0, 20.0)


def test_pages_of_one_log_are_one_lane_and_the_mark_of_a_whole_unit_is_no_bar() -> None:
    story = Story().log("ann", span(FIRST, 0, 10, whole=False), number=0)
    story.log("ann", span(FIRST, 0, 10, whole=False), span(FIRST, 12, 12, begin=4, end=4), number=1)
    chart = story.chart()
    assert (len(chart.lanes), chart.spans, chart.seconds) == (1, 1, 10.0)


def test_a_lane_begins_when_its_learner_asked_for_a_batch_and_ends_when_it_left() -> None:
    story = Story().log("ann", span(FIRST, 0, 100))
    story.log("bob", span(SECOND, 30, 40), since=20, seen=45, left="early")
    story.log("cyd", since=10, seen=50, left="error")
    chart = story.chart()
    bob, cyd = lane_of(chart, "bob"), lane_of(chart, "cyd")
    assert (bob.since, bob.parted, bob.away, bob.idle, bob.gone) == (20.0, 45.0, 75.0, 15.0, False)
    assert (cyd.since, cyd.parted, cyd.away, cyd.idle, cyd.finished) == (10.0, 50.0, 60.0, 40.0, None)
    assert lane_of(chart, "ann").parted is None


def test_a_run_that_goes_on_ends_at_its_newest_log() -> None:
    story = Story().log("ann", span(FIRST, 0, 10), seen=14, left=None)
    story.log("bob", span(SECOND, 0, 9), seen=12, left=None)
    chart = story.chart(at=14)
    assert chart.seconds == 14.0
    assert [lane.gone for lane in chart.lanes] == [False, False]
    assert chart.tails == ()


def test_a_learner_that_came_back_has_two_lanes_side_by_side() -> None:
    story = Story().log("bob", span(THIRD, 0, 60))
    story.log("ann", span(SECOND, 40, 50), since=40, name="ann", instance="a2")
    story.log("ann", span(FIRST, 0, 10, whole=False), seen=12, left=None, instance="a3")
    chart = story.chart()
    assert [lane.instance for lane in chart.lanes] == ["a3", "a2", "bob1"]
    assert (chart.lanes[0].gone, chart.lanes[0].parted, chart.lanes[1].away) == (True, 12.0, 40.0)
    assert [line.split()[:2] for line in shown(chart)[3:5]] == [["ann", "(a3)"], ["ann", "(a2)"]]


@pytest.mark.parametrize(("seen", "gone"), [(lambda _: False, True), (lambda _: True, False)])
def test_whether_a_silent_process_is_gone_its_own_machine_knows(seen: Any, gone: bool) -> None:
    story = Story().log("ann", span(FIRST, 0, 9), seen=10, left=None).log("bob", span(SECOND, 0, 10), seen=11)
    assert lane_of(story.chart(seen=seen), "ann").gone is gone


def test_who_lost_units_to_others_is_gone_however_short_its_silence() -> None:
    story = Story().log("ann", span(FIRST, 0, 9, end=2, whole=False), seen=10, left=None)
    story.log("bob", span(SECOND, 0, 10), seen=11).back(FIRST, 0, 2, "bob", "gone")
    assert [lane.gone for lane in story.chart().lanes] == [True, False]


def test_on_another_machine_it_is_gone_after_long_silence() -> None:
    story = Story().log("ann", span(FIRST, 0, 9), seen=10, left=None)
    story.log("bob", span(SECOND, 0, 12 + 2 * SILENCE), left=None, seen=12 + 2 * SILENCE)
    assert [lane.gone for lane in story.chart().lanes] == [True, False]


# -- passes ------------------------------------------------------------------------------------------------------


def two_passes() -> Story:
    """Bob goes on with the second pass while Ann trains the rest of the first one."""
    story = Story()
    story.log("ann", span(FIRST, 0, 40), span(FIRST, 40, 60, pass_="e1"))
    story.log("bob", span(SECOND, 0, 30), span(SECOND, 35, 50, pass_="e1"))
    return story


def test_each_pass_has_a_tail_and_who_goes_on_with_the_next_is_not_idle() -> None:
    chart = two_passes().chart()
    assert chart.passes == ("e0", "e1")
    assert [(t.pass_, t.start, t.stop, t.idle) for t in chart.tails] == [
        ("e0", 30.0, 40.0, 5.0),
        ("e1", 50.0, 60.0, 10.0),
    ]


def test_one_pass_alone() -> None:
    chart = two_passes().chart("e1")
    assert (chart.origin, chart.seconds, chart.passes) == (OPENED + 35, 25.0, ("e1",))
    ann, bob = chart.lanes
    assert (ann.busy, ann.away, ann.idle) == (20.0, 5.0, 0.0)
    assert (bob.busy, bob.away, bob.idle) == (15.0, 0.0, 10.0)
    assert two_passes().chart("e0", "e1").spans == 4


@pytest.mark.parametrize("name", ["e2", "val0", "nonsense"])
def test_a_pass_of_which_nothing_is_known_is_an_error(name: str) -> None:
    with pytest.raises(InvalidInputError, match=rf"{name}.*\(e0, e1\)"):
        two_passes().chart("e1", name)


def test_no_tail_before_a_pass_is_over_but_where_that_is_noted() -> None:
    story = (
        Story().log("ann", span(FIRST, 0, 40), left=None, seen=41).log("bob", span(SECOND, 0, 30), seen=41)
    )
    assert story.chart(at=41).tails == ()
    story.mailbox.put(story.keys.whole("ann", "ann1", ""), WholeRecord(units=2).encode())
    [tail] = story.chart(at=41).tails
    assert (tail.start, tail.stop) == (30.0, 40.0)


def test_who_was_gone_has_no_part_in_the_tail() -> None:
    story = Story().log("ann", span(FIRST, 0, 40)).log("bob", span(SECOND, 0, 30))
    story.log("cyd", span(THIRD, 0, 5, whole=False), seen=6, left="early")
    [tail] = story.chart().tails
    assert (tail.start, tail.idle) == (30.0, 10.0)


# -- units that went on ------------------------------------------------------------------------------------------


def reclaimed() -> Story:
    """Bob fell silent after two batches of the first unit; Ann took it over, and the third, which no log has."""
    story = Story()
    story.log(
        "ann",
        span(SECOND, 0, 60),
        span(FIRST, 61, 70, attempt=1, begin=2),
        span(THIRD, 70, 80, attempt=1),
    )
    story.log("bob", span(FIRST, 0, 20, end=2, whole=False), seen=22, left=None)
    story.back(FIRST, 0, 2, "ann", "silent").back(THIRD, 0, 0, "ann", "gone")
    claim = ClaimRecord(learner="bob", instance="bob1", worker="main", nonce="n", sequence=1)
    story.mailbox.put(story.keys.pass_keys().claim(THIRD), claim.encode())
    return story


def test_a_unit_that_was_taken_over_is_told_from_one_lane_to_the_other() -> None:
    chart = reclaimed().chart()
    first, third = chart.handovers
    assert (first.unit, first.attempt, first.begin, first.by, first.why) == (FIRST, 0, 2, "ann", "silent")
    assert (first.owner, first.taker, first.at, first.reclaimed, first.again) == (1, 0, 61.0, True, 0)
    assert (third.unit, third.owner, third.taker, third.at) == (THIRD, 1, 0, 70.0)
    bob = chart.lanes[1]
    assert (bob.gone, bob.parted, bob.away) == (True, 22.0, 58.0)
    lines = shown(chart)
    assert f"{FIRST}: bob (silent) -> ann at batch 2" in lines
    assert "✗" in lines[4]
    assert "↪" in lines[3]


def test_no_claim_is_read_but_of_an_attempt_that_no_log_names() -> None:
    asked: list[str] = []

    class Noted(Wrapper):
        def _around(self, verb: str, name: str, forward: Callable[[], T]) -> T:
            asked.append(name)
            return forward()

    story = reclaimed()
    story.mailbox = Noted(story.mailbox)  # type: ignore[assignment]
    story.chart()
    assert [name for name in asked if name.startswith("units/")] == [f"units/{THIRD}"]


def test_batches_that_an_owner_trained_all_the_same_are_counted() -> None:
    story = Story().log("ann", span(FIRST, 30, 40, attempt=1, begin=1))
    story.log("bob", span(FIRST, 0, 20, end=3, whole=False), left="early")
    [one] = story.back(FIRST, 0, 1, "ann", "silent").chart().handovers
    assert one.again == 2
    assert any("2 batches from there on were trained twice" in line for line in shown(story.chart()))


def test_who_gave_it_back_untouched_did_not_go_on_with_it() -> None:
    story = Story().log("bob", span(FIRST, 0, 20, end=2, whole=False), left=None, seen=20)
    story.log("cyd", left="early").log("ann", span(FIRST, 50, 60, attempt=2, begin=2))
    story.back(FIRST, 0, 2, "cyd", "silent").back(FIRST, 1, 2, "cyd", "early")
    one, other = story.chart().handovers
    assert (one.owner, one.taker, one.at, one.reclaimed) == (1, 0, 50.0, True)
    assert (other.taker, other.at, other.reclaimed) == (0, 50.0, False)


def test_what_an_owner_gave_back_is_not_reclaimed_and_may_be_with_nobody() -> None:
    story = Story().log("bob", span(FIRST, 0, 20, end=2, whole=False), left="early")
    story.back(FIRST, 0, 2, "bob", "early").back(SECOND, 0, 0, "bob", "surplus")
    chart = story.chart()
    own = Story().log("bob", span(FIRST, 0, 20, end=2, whole=False)).back(FIRST, 0, 2, "bob", "left")
    assert own.chart().handovers[0].reclaimed is False, "it found its own claim in nobody's hands"
    assert [(one.owner, one.taker, one.at, one.reclaimed) for one in chart.handovers] == [
        (0, None, None, False),
        (None, None, None, False),
    ]
    assert "given back: 1 in leaving early, 1 as surplus" in shown(chart)


def test_a_taker_that_holds_it_and_has_not_begun_is_known() -> None:
    story = Story().log("bob", span(FIRST, 0, 20, end=2, whole=False), left="early")
    story.log("ann", span(SECOND, 0, 30), held=[HeldClaim("", FIRST, 1)], left=None, seen=30)
    [one] = story.back(FIRST, 0, 2, "ann", "left").chart(at=30).handovers
    assert (one.taker, one.at, one.reclaimed) == (0, None, True)


@pytest.mark.parametrize(("host", "noted"), [("elsewhere", True), ("bob", False)])
def test_clocks_of_two_machines_that_contradict_each_other_are_named(host: str, noted: bool) -> None:
    """The second attempt begins 3 s before what was on record of the first one was trained."""
    story = Story().log("bob", span(FIRST, 0, 20, end=2, whole=False), left="early")
    story.log("ann", span(FIRST, 17, 30, attempt=1, begin=2), host=host)
    notes = story.back(FIRST, 0, 2, "bob", "early").chart().notes
    assert [note for note in notes if note.startswith("the clocks of bob and elsewhere differ by 3 s")] == (
        list(notes) if noted else []
    )
    assert len(notes) == noted


def test_a_unit_cannot_be_taken_over_before_its_owner_had_begun() -> None:
    story = Story().log("bob", since=50.0, held=[HeldClaim("", FIRST, 0)], left="early")
    story.log("ann", span(FIRST, 17, 30, attempt=1), host="elsewhere")
    [note] = story.back(FIRST, 0, 0, "bob", "early").chart().notes
    assert note.startswith("the clocks of bob and elsewhere differ by 33 s or more")


def test_only_so_many_ended_attempts_are_read() -> None:
    story = Story().log("bob", span(FIRST, 0, 20), left="early")
    for number in range(HANDOVERS + 1):
        story.back(f"{number:06d}", 0, 0, "bob", "early")
    chart = story.chart()
    assert len(chart.handovers) == HANDOVERS
    assert any(f"more than {HANDOVERS:,} attempts" in note for note in chart.notes)


# -- what cannot be believed -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "odd",
    [
        span(SECOND, 9, 3),
        span(SECOND, -2 * DAY, 5),
        span(SECOND, 5, 3e11),
        span(SECOND, 1e300, 1e301),
        span(SECOND, -1e300, 5),
        span(SECOND, math.nan, 5),
        span(SECOND, 5, math.inf),
        span(SECOND, 5, 6, begin=4, end=2),
        span(SECOND, 5, 6, begin=-1),
        span(SECOND, 5, 6, attempt=-1),
    ],
)
def test_stretches_that_cannot_be_are_left_out(odd: TrainedSpan) -> None:
    [clean] = Story().log("ann", span(FIRST, 0, 10)).chart().lanes
    page = LogPage.decode(Story().log("ann").mailbox.get("learners/ann~ann1/main.000000") or b"", "")
    log = Log(page)
    for one in (span(FIRST, 0, 10), odd):
        log.spans[one.pass_, one.unit, one.attempt, one.begin] = one
    folded = fold(log, Clocks.around(OPENED, OPENED + 1000), frozenset(), BARS)
    assert (folded.odd, folded.spans, folded.busy, len(folded.bars)) == (1, 1, clean.busy, 1)
    if math.isfinite(odd.start + odd.stop):
        chart = Story().log("ann", span(FIRST, 0, 10), odd).chart()
        assert (chart.seconds, len(chart.lanes[0].bars)) == (10.0, 1)
        assert chart.notes[0].startswith("1 stretches in the log of ann")


@pytest.mark.parametrize("waited", [math.nan, math.inf, -math.inf, -5.0])
def test_waiting_that_cannot_be_is_none(waited: float) -> None:
    page = LogPage.decode(Story().log("ann").mailbox.get("learners/ann~ann1/main.000000") or b"", "")
    one = span(FIRST, 0, 10, waited, samples=-3)
    folded = fold(Log(page, {("", FIRST, 0, 0): one}), Clocks.around(OPENED, OPENED + 9), frozenset(), BARS)
    assert (folded.busy, folded.waited, folded.samples) == (10.0, 0.0, 0)


@pytest.mark.parametrize("wall", [0.0, -1e300, OPENED + 1e9, 1e300])
@pytest.mark.parametrize("elapsed", [0.0, -1e300, 1e300, 1e9])
def test_a_log_whose_clock_cannot_be_believed_changes_nothing_for_the_others(
    wall: float, elapsed: float
) -> None:
    story = Story().log("ann", span(FIRST, 0, 10), seen=10)
    story.log("bob", span(SECOND, 2, 8), wall=wall, totals=Totals(elapsed=elapsed), left=None)
    chart = story.chart()
    assert (chart.origin, chart.seconds) == (OPENED, 10.0)
    assert lane_of(chart, "bob").busy == 6.0
    assert any("bob was written at a time that cannot be" in note for note in chart.notes)
    json.dumps(document(chart), allow_nan=False)


@pytest.mark.parametrize("elapsed", [-1e300, 1e300, 1e9])
def test_a_beginning_that_cannot_be_is_the_first_batch(elapsed: float) -> None:
    story = Story().log("ann", span(FIRST, 3, 10), seen=11, totals=Totals(elapsed=elapsed))
    assert story.chart().origin == OPENED + 3


def test_numbers_beyond_all_counting_are_cut() -> None:
    huge = 10**400
    far_off = Process(host="h", boot="b", pid=huge, started="1")
    story = Story().log("ann", span(FIRST, 0, 10, samples=huge), span(SECOND, 0, 10, end=huge), where=far_off)
    story.log("bob", totals=Totals(claimed=huge)).back(FIRST, 0, huge, "ann", "silent")
    chart = story.chart()
    assert chart.spans == 1
    assert max(map(len, shown(chart, everybody=True))) < 200
    assert len(json.dumps(document(chart))) < 5_000


@pytest.mark.parametrize("opened", [0.0, -1.0, 1e300, OPENED + 1e9])
def test_a_run_that_was_opened_at_a_time_that_cannot_be_is_shown(opened: float) -> None:
    chart = Story().opens(wall=opened).log("ann", span(FIRST, 0, 10)).chart()
    assert chart.seconds == 10.0


def test_clocks_ahead_of_this_one_or_behind_the_run_are_named() -> None:
    story = Story().log("ann", span(FIRST, -30, -10), since=-30, host="early")
    story.log("bob", span(SECOND, 0, 10), seen=200, host="late")
    assert story.chart(at=100).notes == (
        "the clock of early is 30 s or more behind that of the machine of ann",
        "the clock of late is 100 s ahead of this one",
    )


def test_logs_that_cannot_be_read_and_those_of_strangers_are_named_and_left_out() -> None:
    story = Story().log("ann", span(FIRST, 0, 10), number=0).log("bob", span(SECOND, 0, 10))
    story.log("cyd", span(THIRD, 0, 10), name="another").log("dan", span(THIRD, 0, 10), run_id="other")
    story.mailbox.put(story.keys.log("ann", "ann1", "main", 1), b"garbage \x1b[2J")
    story.mailbox.put(story.keys.log("eve", "eve1", "main", 0), b"{}")
    story.back(FIRST, 0, 2, "bob", "early")
    story.mailbox.put(story.keys.pass_keys().back(SECOND, 0), b"no record")
    chart = story.chart()
    assert [lane.learner for lane in chart.lanes] == ["ann", "bob"]
    assert len(chart.handovers) == 1
    told = "\n".join(chart.notes)
    assert re.findall(r"cannot be read: (\S+):", told) == [
        "learners/ann~ann1/main.000001",
        "learners/eve~eve1/main.000000",
        f"back/{SECOND}~0",
    ]
    assert re.findall(r"under the name of (\w+)", told) == ["cyd", "dan"]


def test_keys_that_can_be_none_are_named_and_left_out() -> None:
    """A store may hold keys that this library never writes."""

    class Odd(Wrapper):
        def list(self, prefix: str, after: str = "", limit: int | None = None) -> list[str]:
            odd = {"learners/": "learners/\x1b~1/main.000000", "back/": "back/\x1b~0"}
            return [*super().list(prefix, after, limit), *([odd[prefix]] if prefix in odd else [])]

    story = Story().log("ann", span(FIRST, 0, 10))
    story.mailbox = Odd(story.mailbox)  # type: ignore[assignment]
    chart = story.chart()
    assert (chart.spans, chart.handovers) == (1, ())
    assert sum("cannot be read" in note for note in chart.notes) == 2


def test_standing_until_a_lost_unit_may_be_taken_over_is_idle_time() -> None:
    story = Story().log("bob", span(FIRST, 0, 10, end=2, whole=False), left=None, seen=10)
    story.log("ann", span(SECOND, 0, 40), span(FIRST, 90, 100, 50.0, attempt=1, begin=2))
    ann = lane_of(story.back(FIRST, 0, 2, "ann", "gone").chart(), "ann")
    assert (ann.busy, ann.waited, ann.idle) == (50.0, 0.0, 50.0)
    assert ann.bars[-1].before == 0.0


def test_waits_that_no_batch_has_are_no_idle_time() -> None:
    waits = Totals(elapsed=100.0, waited=30.0)
    story = Story().log("ann", span(FIRST, 10, 20), span(SECOND, 60, 100, 25.0), totals=waits)
    ann = lane_of(story.chart(), "ann")
    assert (ann.busy, ann.waited, ann.idle) == (50.0, 30.0, 20.0)


def test_a_log_whose_writer_died_in_it_is_left_out_and_said(tmp_path: Path) -> None:
    mailbox = open_mailbox(tmp_path)
    with shared_queue(UNITS, mailbox, "ann", load) as queue:
        count = sum(1 for _ in queue)
    (tmp_path / "learners" / "bob~b1").mkdir()
    (tmp_path / "learners" / "bob~b1" / "main.000000").touch()
    chart = read(mailbox)
    assert chart is not None
    assert [(lane.learner, lane.batches) for lane in chart.lanes] == [("ann", count)]
    assert any("its writer died" in note for note in chart.notes)
    assert main(["status", str(tmp_path)]) == 0


def test_a_loader_that_no_session_tracks_is_not_idle_but_unknown() -> None:
    story = Story()
    left: Left
    for worker, left in (("0", "end"), ("1", "early")):
        story.log("ann", since=1.0, left=left, process=worker, totals=Totals(claimed=3))
    chart = story.chart()
    assert [(lane.idle, lane.there) for lane in chart.lanes] == [(0.0, 0.0)] * 2
    assert "ann claimed 6 units, and its log has none of them as trained" in chart.notes


def test_other_runs_are_named_unless_one_is_asked_for() -> None:
    story = Story().log("ann", span(FIRST, 0, 10))
    for name in ("2", "again"):
        Story(mailbox=story.mailbox, keys=RunKeys(name)).opens(wall=OPENED + len(name))
    assert story.chart().run == "again"
    assert story.chart().notes == ("--run 2 shows another run that is here, and there are 1 more",)
    asked = read(story.mailbox, "1", clock=At(1000.0), seen=lambda _: None)
    assert asked is not None
    assert (len(asked.lanes), asked.notes) == (1, ())


def test_notes_of_one_kind_are_few() -> None:
    story = Story()
    for number in range(50):
        story.mailbox.put(story.keys.log(f"n{number:02d}", "i", "main", 0), b"x")
    notes = story.chart().notes
    assert len(notes) == NOTES + 1
    assert notes[-1] == f"and {50 - NOTES} more such notes"


def test_a_learner_that_recorded_nothing_has_an_empty_lane() -> None:
    chart = Story().log("ann", totals=Totals(claimed=7)).chart()
    assert (chart.lanes[0].bars, chart.spans) == ((), 0)
    assert chart.notes == ("ann claimed 7 units, and its log has none of them as trained",)
    assert "nothing trained yet" in shown(chart)[0]


def test_a_run_that_goes_on_from_a_state_and_one_that_is_removed_say_so() -> None:
    state = State(Plan(UNITS).signature(), "0", "q", {}).as_dict()
    resumed = Story().opens(state=state).log("ann", span(FIRST, 0, 10, begin=2))
    assert resumed.chart().notes[0].startswith("it goes on from a state")
    removed = Story().opens(plans={}).log("ann", span(FIRST, 0, 10))
    assert removed.chart().notes[0].startswith("the run is being removed")


# -- size --------------------------------------------------------------------------------------------------------


def many(count: int, workers: int = 1, passes: int = 1) -> Log:
    """A log of so many units of a second each, `workers` of them at once."""
    page = LogPage.decode(
        Story().log("ann", seen=count + 1).mailbox.get("learners/ann~ann1/main.000000") or b"", ""
    )
    spans = (
        span(f"u{n}", n, n + 0.9 * workers, 0.1 if n % 2 else 0.0, pass_=f"e{n * passes // count}")
        for n in range(count)
    )
    return Log(page, {(one.pass_, one.unit, 0, 0): one for one in spans})


@pytest.mark.parametrize("spans", [40_000, pytest.param(1_000_000, marks=pytest.mark.full)])
def test_a_long_log_becomes_few_bars_with_the_same_sums(spans: int) -> None:
    log, clocks = many(spans, workers=3, passes=4), Clocks.around(OPENED, OPENED + 2e6)
    folded = fold(log, clocks, frozenset(), 2_000)
    assert 500 < len(folded.bars) <= 2_000
    assert sum(bar.spans for bar in folded.bars) == folded.spans == spans
    assert sum(bar.batches for bar in folded.bars) == folded.batches == 4 * spans
    assert sum(bar.samples for bar in folded.bars) == folded.samples
    assert folded.rows == 3
    assert folded.waited == pytest.approx(0.1 * spans / 2)
    assert folded.busy == pytest.approx(spans - 1 + 2.7 - folded.waited)
    assert {bar.pass_ for bar in folded.bars} == {"e0", "e1", "e2", "e3"}
    lengths = [bar.stop - bar.start for bar in folded.bars]
    assert max(lengths) < 2 * folded.blurred + 3


def test_sums_do_not_depend_on_how_many_bars_there_are() -> None:
    log, clocks = many(3_000, workers=2), Clocks.around(OPENED, OPENED + 1e6)
    fine, coarse = (fold(log, clocks, frozenset(), most) for most in (10_000, 7))
    assert (len(fine.bars), fine.blurred) == (3_000, 0.0)
    assert len(coarse.bars) <= 7
    for what in ("busy", "waited", "batches", "samples", "spans", "extents"):
        assert getattr(fine, what) == getattr(coarse, what)


@pytest.mark.parametrize("passes", [1, 500, 1_000])
@pytest.mark.parametrize("workers", [1, 40])
def test_neither_passes_nor_rows_make_more_bars_than_were_asked_for(passes: int, workers: int) -> None:
    folded = fold(many(1_000, workers, passes), Clocks.around(OPENED, OPENED + 1e6), frozenset(), 20)
    assert 0 < len(folded.bars) <= 20
    assert folded.rows <= ROWS


def test_a_chart_has_so_many_bars_at_most_and_says_what_is_not_seen() -> None:
    story = Story()
    for learner in ("ann", "bob"):
        story.log(learner, *(span(f"{learner}{n}", n, n + 0.5) for n in range(300)), seen=301)
    chart = story.chart(bars=100)
    assert sum(len(lane.bars) for lane in chart.lanes) <= 100
    assert chart.spans == 600
    assert any(note.startswith("neighbouring stretches are drawn as one") for note in chart.notes)
    assert [lane.busy for lane in chart.lanes] == [150.0, 150.0]


def test_names_out_of_all_proportion_are_cut() -> None:
    story = Story().log("x" * 10_000, span("u" * 10_000, 0, 10, pass_="p" * 10_000), name="x")
    assert len(json.dumps(document(story.chart()))) < 5 * LONGEST_NAME + 1_000


# -- the terminal ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [40, 60, 72, 80, 119, 250])
def test_rows_fill_the_width_and_no_more(width: int) -> None:
    lines = shown(reclaimed().chart(), width)
    rows = [line for line in lines if line.startswith((" ann ", " bob "))]
    assert [cell_len(row) for row in rows] == [width, width]


def test_a_long_name_keeps_its_end() -> None:
    story = Story()
    for name in ("a-very-long-host-name-0-4711", "a-very-long-host-name-1-4712"):
        story.log(name, span(name, 0, 10))
    first, second = story.chart().lanes
    wide = replace(first, learner="\u6c34" * 30 + "xyz")
    rows = shown(replace(story.chart(), lanes=(first, second, wide)))[3:6]
    assert [cell_len(row) for row in rows] == [80, 80, 80]
    for row, end in zip(rows, ("4711", "4712", "\u6c34xyz"), strict=True):
        assert f"{end} " in row
    assert "~" in shown(story.chart(), encoding="ascii")[3]


def test_what_a_row_shows() -> None:
    story = Story().log("ann", span(FIRST, 25, 50, 25), span(SECOND, 50, 75, 12.5), span(THIRD, 90, 100))
    lines = shown(story.chart(), 80)
    row = lines[3].split("  ")[0].strip(" an")
    cells = len(row)
    assert set(row[: cells // 4 - 1]) == {"░"}, "waits"
    assert set(row[cells // 4 + 1 : cells // 2 - 1]) == {"█"}, "trains"
    assert set(row[cells // 2 + 1 : 3 * cells // 4 - 1]) <= {"▒", "▓"}, "waits half of the time"
    assert set(row[3 * cells // 4 + 1 : 9 * cells // 10 - 1]) == {"·"}, "idle"
    assert lines[3].split()[-5:] == ["48%", "38%", "15%", "12", "0.505"]
    assert "idle: 15.0 s of the 100.0 s of all learners (15%); 37.5 s more they waited for data" in lines


def test_the_tail_is_on_the_axis_and_crosses_the_rows() -> None:
    story = Story().log("ann", span(FIRST, 0, 100)).log("bob", span(SECOND, 0, 60))
    lines = shown(story.chart(), 80)
    assert lines[3].index("│") == lines[4].index("│") == lines[5].index("┘")
    assert "tail of e0 ┘" in lines[5]
    assert "tail of e0: 40.0 s from the first learner's last batch to the last one's; 40.0 s idle" in lines


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_an_encoding_without_blocks_gets_ascii(encoding: str) -> None:
    lines = shown(reclaimed().chart(), 80, encoding)
    assert "#" in lines[3]
    assert ">" in lines[3]
    assert "x" in lines[4]


def crowd(learners: int) -> Chart:
    story = Story()
    for number in range(learners):
        story.log(f"n{number:03d}", span(f"u{number}", 0, 10 + number % 90))
    return story.chart()


def test_of_many_learners_the_idlest_and_the_busiest_are_shown() -> None:
    chart = crowd(512)
    lines = shown(chart, 100)
    assert len([line for line in lines if line.startswith(" n")]) == 2 * terminal.EACH
    assert any(line.startswith(f" {512 - 2 * terminal.EACH} more, busy for ") for line in lines)
    assert len([line for line in shown(chart, 100, everybody=True) if line.startswith(" n")]) == 512
    few = shown(crowd(terminal.MANY))
    assert len([line for line in few if line.startswith(" n")]) == terminal.MANY


def test_of_many_units_that_were_taken_over_few_are_named() -> None:
    story = Story().log("ann", span("x", 0, 100)).log("bob", left=None, seen=1)
    for number in range(50):
        story.back(f"u{number:02d}", 0, 0, "ann", "silent")
    chart = story.chart()
    assert sum("(silent)" in line for line in shown(chart)) == terminal.LINES
    assert f"and {50 - terminal.LINES} more that were taken over; --all names them" in shown(chart)
    assert sum("(silent)" in line for line in shown(chart, everybody=True)) == 50


def evil() -> Chart:
    """Whatever others can name is named with a script, an escape sequence and half a formula."""
    unit, name = f"{EVIL}unit", "<script>alert(1)<\u202e$^{$"
    story = Story().opens(opened_by=EVIL)
    story.log(name, span(unit, -9, 10, end=2, whole=False, pass_=EVIL), host=EVIL, left="early")
    story.log("bob", span(SECOND, 0, 10), span(FIRST, 8, 20, attempt=1, begin=2))
    story.log(name, span(FIRST, 0, 9, end=2, whole=False), host=EVIL, process="0", left=None, seen=9)
    story.log(f"{name}2", run_id="another")
    story.mailbox.put(story.keys.log(name, "1", "main", 0), b"no log")
    story.back(FIRST, 0, 2, "bob", f"silent{EVIL}").back(THIRD, 0, 2, EVIL, EVIL)
    story.back(SECOND, 0, 0, "bob", "silent")
    chart = story.chart(url=f"memory://{EVIL}")
    assert {lane.learner for lane in chart.lanes} == {name, "bob"}
    assert EVIL in chart.passes
    assert len(chart.notes) == 4
    return chart


@pytest.mark.parametrize("everybody", [False, True])
def test_whatever_others_wrote_is_made_visible(everybody: bool) -> None:
    chart = replace(evil(), tails=(Tail(EVIL, 15.0, 20.0, 5.0),))
    told = "\n".join(shown(chart, 200, everybody=everybody))
    assert "\x1b" not in told
    assert "\u202e" not in told
    assert r"\x1b[2J\u202e" in told
    assert "<script>alert(1)<" in told, "a terminal has nothing against it"


# -- the picture -------------------------------------------------------------------------------------------------

needs_matplotlib = pytest.mark.skipif(
    not picture.can_draw(), reason="matplotlib is not installed (extra: plots)"
)


@needs_matplotlib
def test_the_picture_is_a_png_or_an_svg_by_its_name(tmp_path: Path) -> None:
    picture.draw(reclaimed().chart(), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    picture.draw(reclaimed().chart(), tmp_path / "a.SVG")
    root = ElementTree.fromstring((tmp_path / "a.SVG").read_text())
    assert root.tag == "{http://www.w3.org/2000/svg}svg"


@needs_matplotlib
def test_names_in_a_picture_are_neither_formulas_nor_active(tmp_path: Path) -> None:
    picture.draw(evil(), tmp_path / "a.svg")
    root = ElementTree.fromstring((tmp_path / "a.svg").read_text())
    tags = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert tags.isdisjoint({"script", "foreignObject", "image", "a", "animate", "set", "iframe", "text"})
    names = {name.rpartition("}")[2] for element in root.iter() for name in element.attrib}
    assert not {name for name in names if name.startswith("on")}
    links = [value for one in root.iter() for name, value in one.attrib.items() if name.endswith("href")]
    assert all(link.startswith("#") for link in links)
    picture.draw(evil(), tmp_path / "a.png")


@needs_matplotlib
@pytest.mark.parametrize("learners", [0, 60])
def test_a_picture_of_nobody_and_one_of_many(tmp_path: Path, learners: int) -> None:
    picture.draw(crowd(learners) if learners else Story().chart(), tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000


# -- the command -------------------------------------------------------------------------------------------------


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A folder in which a run was trained."""
    folder = tmp_path / "queue"
    with shared_queue(UNITS, folder, "ann", load) as queue:
        assert len(list(queue)) == 24
    return folder


def test_the_command_shows_a_run(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["timeline", str(trained), "--width", "90"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"run 1 at {trained}: 1 learner, ")
    assert lines[0].endswith("24 batches of e0")
    assert len(lines[3]) <= 90


def test_the_command_prints_one_document(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["timeline", str(trained), "--json", "--run", "1", "--pass", "e0"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["format"], told["run"], told["url"]) == (FORMAT, "1", str(trained))
    [lane] = told["lanes"]
    assert sum(bar["batches"] for bar in lane["bars"]) == lane["batches"] == 24
    assert {bar["unit"] for bar in lane["bars"]} == set(UNITS)
    assert {bar["pass"] for bar in lane["bars"]} == {"e0"}


@needs_matplotlib
def test_the_command_writes_page_and_picture(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, image = trained.parent / "a.html", trained.parent / "a.png"
    assert main(["timeline", str(trained), "--html", str(page), "--image", str(image)]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [f"written: {page}", f"written: {image}"]
    assert "<html" in page.read_text()
    assert image.stat().st_size > 1000


def test_where_nothing_is_the_command_says_what_status_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", str(tmp_path)]) == 3
    said = capsys.readouterr().out
    assert main(["timeline", str(tmp_path)]) == 3
    assert capsys.readouterr().out == said
    assert main(["timeline", str(tmp_path), "--json"]) == 3
    assert json.loads(capsys.readouterr().out) == {"format": FORMAT, "url": str(tmp_path), "run": None}


def test_what_is_not_ours_is_an_error(
    tmp_path: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_text("")
    for arguments, reason in (
        ([str(tmp_path / "photos")], "not ours"),
        ([str(tmp_path)], "a mailbox within it"),
        ([str(trained), "--run", "9"], "a run under this prefix (1)"),
        ([str(trained), "--pass", "e9"], "a pass that the logs know (e0)"),
        ([str(trained), "--width", "9"], "at least 40"),
    ):
        assert main(["timeline", *arguments]) == 2
        assert reason in capsys.readouterr().err
    mailbox = MemoryMailbox()
    mailbox.put("runs/1.json", b"{}")
    with pytest.raises(RecordError):
        read(mailbox)
    mailbox.put("a", b"x")
    mailbox.delete(["runs/1.json"])
    with pytest.raises(RunError):
        read(mailbox)


@pytest.mark.parametrize(
    ("option", "name", "reason"),
    [
        ("--html", "none/a.html", "a file that can be written"),
        ("--image", "none/a.png", "a file that can be written"),
        ("--image", "a.gif", "a file that ends in .png or .svg"),
    ],
)
def test_files_are_checked_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, name: str, reason: str
) -> None:
    """The mailbox is one that cannot be opened."""
    assert main(["timeline", "nosuch://bucket/prefix", option, str(tmp_path / name)]) == 2
    assert reason in capsys.readouterr().err


def test_without_matplotlib_the_error_names_the_extra_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["timeline", "nosuch://bucket/prefix", "--image", str(tmp_path / "a.png")]) == 2
    assert "shardqueue[plots]" in capsys.readouterr().err
    assert not (tmp_path / "a.png").exists()


def test_the_command_imports_nothing_heavy(trained: Path) -> None:
    script = (
        "import sys; from shardqueue.cli import main; code = main(sys.argv[1:]); "
        "heavy = {'torch', 'lightning', 'numpy', 'matplotlib', 's3fs'} & set(sys.modules); "
        "assert not heavy, heavy; raise SystemExit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "timeline", str(trained)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "24 batches of e0" in done.stdout


# -- real runs ---------------------------------------------------------------------------------------------------


def _train_until_killed(folder: str, units: Mapping[str, Unit], pipe: Connection) -> None:
    """Train five batches, and stand still with the sixth."""
    session = Session(folder, "killed", log_every=0.1)
    with session, shared_queue(units, folder, "killed", load, run="1", reclaim_after=2.0) as queue:
        for number, (step, _) in enumerate(queue):
            pipe.send((step.unit, step.index, time.time()))
            if number == 5:
                threading.Event().wait(600)
            session.step(samples=10)


def _train(
    folder: Path, learner: str, units: Mapping[str, Unit], most: int, pace: float, ready: threading.Barrier
) -> list[tuple[str, int, float]]:
    """Which batches came, and when."""
    came = []
    session = Session(folder, learner, log_every=0.5)
    with session, shared_queue(units, folder, learner, load, run="1", reclaim_after=2.0) as queue:
        for step, _ in queue:
            came.append((step.unit, step.index, time.time()))
            if len(came) == 1:
                ready.wait(PATIENCE)
            threading.Event().wait(pace)
            session.step(samples=10)
            if len(came) == most:
                break
    return came


def test_a_real_run_with_a_slow_learner_one_that_leaves_and_one_that_is_killed(tmp_path: Path) -> None:
    units, mailbox = unit_grid(20, 4, lanes=2, taper=False), open_mailbox(tmp_path)
    context: Any = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_train_until_killed, args=(str(tmp_path), units, there))
    process.start()
    there.close()
    try:
        told = {"killed": [here.recv() for _ in range(6)][:5]}
        until(lambda: sum(credited(mailbox).values()) >= 5)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        here.close()
    ready = threading.Barrier(3)
    paces = {"fast": (0, 0.002), "slow": (0, 0.03), "early": (3, 0.002)}
    trained = together(partial(_train, tmp_path, name, units, *how, ready) for name, how in paces.items())
    told |= dict(zip(paces, trained, strict=True))

    chart = read(mailbox)
    assert chart is not None
    lanes = {lane.learner: lane for lane in chart.lanes}
    assert {name: lane.left for name, lane in lanes.items()} == {
        "early": "early",
        "fast": "end",
        "killed": None,
        "slow": "end",
    }
    assert [name for name, lane in lanes.items() if lane.gone] == ["killed"]
    assert {name: lane.batches for name, lane in lanes.items()} == {
        name: len(came) for name, came in told.items()
    }
    assert sum(lane.batches for lane in chart.lanes) == 40
    for name, came in told.items():
        for unit, index, at in came:
            [bar] = [b for b in lanes[name].bars if b.unit == unit and b.begin <= index < b.end]
            assert bar.start <= at - chart.origin <= bar.stop, "it came and was trained within its bar"
    taken = [one for one in chart.handovers if one.reclaimed]
    assert {chart.lanes[one.owner].learner for one in taken if one.owner is not None} == {"killed"}
    assert {one.why for one in taken} == {"gone"}
    [fourth] = {unit for unit, index, _ in told["killed"] if index == 0} - {
        bar.unit for bar in lanes["killed"].bars if bar.end == 4
    }
    [one] = [one for one in taken if one.unit == fourth]
    assert one.begin == 1
    assert one.at is not None
    assert one.at > lanes["killed"].bars[-1].stop
    assert len(chart.tails) == 1
    assert chart.notes == ()
    rows = "\n".join(shown(chart, 120))
    assert "✗" in rows
    assert "↪" in rows
