"""`shardqueue status`: what it says of a run, what that costs, and what it does where there is none."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import uuid
from typing import TYPE_CHECKING, Any

import pytest
from learners import Clock, train, until
from rich.console import Console

from shardqueue import Mailbox, open_mailbox, shared_queue, unit_files, unit_grid, unit_ranges
from shardqueue.cli import main
from shardqueue.errors import InvalidInputError, MailboxUnavailableError, RecordError, RunError
from shardqueue.mailbox.faults import Counted, Outage, Wrapper
from shardqueue.mailbox.files import FileMailbox
from shardqueue.mailbox.memory import MemoryMailbox
from shardqueue.plan import Plan
from shardqueue.prices import S3
from shardqueue.records import Current, HeldClaim, LogPage, Manifest, Process, RunKeys, Totals, TrainedSpan
from shardqueue.run import new_manifest
from shardqueue.state import State as Taken
from shardqueue.status.command import code, look, looks
from shardqueue.status.observing import BACKS, OTHER_RUNS, Observer
from shardqueue.status.passes import progress
from shardqueue.status.report import Found, document, line, new_console, view
from shardqueue.status.spending import spending
from shardqueue.status.standing import IDLE, Life, Standing, State, standing
from shardqueue.trained import Trained

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from conftest import S3Server

    from shardqueue.records import Left

UNITS = unit_grid(100, 5, lanes=2, taper=False)
FAR = Process(host="far", boot="far", pid=1, started="1")


def opened(mailbox: Mailbox, units: Mapping[str, Any] = UNITS, run: str = "1", **changes: Any) -> Manifest:
    """Open a run."""
    made = new_manifest(Plan(units), "amy", 1000.0)
    fields = {name: getattr(made, name) for name in made.__struct_fields__}
    manifest = Manifest(**fields | changes)
    mailbox.put(RunKeys(run).manifest, manifest.encode())
    return manifest


def page(learner: str = "amy", **changes: Any) -> LogPage:
    """A page of a learner on another machine that trains on."""
    fields: dict[str, Any] = {
        "learner": learner,
        "instance": f"i-{learner}",
        "process": "main",
        "page": 0,
        "write": 1,
        "run_id": "r",
        "where": FAR,
        "wall": Clock().wall(),
        "totals": Totals(claimed=4, batches=20, samples=640, elapsed=10.0, waited=1.0),
        "rate": 64.0,
        "trained": [],
        "held": [],
        "current": Current(pass_="", batches=20, samples=640, step=30),
        "every": 5.0,
    }
    return LogPage(**fields | changes)


def logged(mailbox: Mailbox, *pages: LogPage, run: str = "1") -> None:
    for number, one in enumerate(pages):
        mailbox.put(RunKeys(run).log(f"l{number}", "i", one.process, one.page), one.encode())


def stand(mailbox: Mailbox, run: str | None = None, seen: bool | None = None) -> Standing:
    observation = Observer(mailbox, run, Clock(), lambda _: seen).look()
    assert observation is not None
    return standing(observation)


def span(stop: float, **changes: Any) -> TrainedSpan:
    fields: dict[str, Any] = {
        "pass_": "",
        "unit": "u",
        "attempt": 0,
        "begin": 0,
        "end": 1,
        "samples": 1,
        "waited": 0.0,
        "start": 0.0,
    }
    return TrainedSpan(**fields | {"stop": stop} | changes)


# -- what a run is ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left", "seen", "age", "state", "life"),
    [
        (None, None, 1.0, State.RUNNING, Life.ALIVE),
        (None, True, 1.0, State.RUNNING, Life.ALIVE),
        (None, None, -40.0, State.RUNNING, Life.ALIVE),
        (None, None, 60.0, State.BROKEN_OFF, Life.SILENT),
        (None, False, 1.0, State.BROKEN_OFF, Life.GONE),
        (None, True, 60.0, State.RUNNING, Life.SILENT),  # stopped, but there
        (None, True, 2 * IDLE, State.STALLED, Life.SILENT),
        ("end", None, 60.0, State.FINISHED, Life.ENDED),
        ("early", None, 1.0, State.BROKEN_OFF, Life.EARLY),
        ("error", True, 1.0, State.BROKEN_OFF, Life.FAILED),
    ],
)
def test_a_run_of_one(left: Left | None, seen: bool | None, age: float, state: State, life: Life) -> None:
    memory = MemoryMailbox()
    opened(memory)
    logged(memory, page(left=left, wall=Clock().wall() - age))
    found = stand(memory, seen=seen)
    (learner,) = found.learners
    assert (found.state, learner.life) == (state, life)
    assert learner.age == pytest.approx(age, abs=5.0)


def test_a_run_that_nobody_has_trained_in() -> None:
    memory = MemoryMailbox()
    opened(memory)
    assert stand(memory).state is State.OPENED
    logged(memory, page(totals=Totals(), rate=0.0, current=None))
    assert stand(memory).state is State.RUNNING
    logged(memory, page(totals=Totals(), rate=0.0, current=None, left="error"))
    assert stand(memory).state is State.OPENED


def test_a_run_that_is_being_removed() -> None:
    memory = MemoryMailbox()
    opened(memory, plans={})
    logged(memory, page(left="end"))
    assert stand(memory).state is State.REMOVED


def test_a_pass_noted_as_trained_whole_is_finished_and_one_before_it_is_not() -> None:
    memory = MemoryMailbox()
    opened(memory)
    logged(memory, page(left="early", current=Current(pass_="e1", batches=1, samples=1, step=1)))
    memory.put(RunKeys("1").whole("l0", "i", ""), b"{}")
    assert stand(memory).state is State.BROKEN_OFF
    memory.put(RunKeys("1").whole("l0", "i", "e1"), b"{}")
    assert stand(memory).state is State.FINISHED


def test_alive_and_training_nothing_is_stalled() -> None:
    memory, now = MemoryMailbox(), Clock().wall()
    opened(memory)
    logged(
        memory, page(rate=0.0, trained=[span(now - 2 * IDLE)]), page("bob", trained=[span(now - 3 * IDLE)])
    )
    found = stand(memory)
    assert found.state is State.STALLED
    assert found.idle == pytest.approx(2 * IDLE, abs=5.0)
    logged(memory, page(trained=[span(now - 1.0)]))
    assert stand(memory).state is State.RUNNING


def test_slow_batches_are_no_stall() -> None:
    memory, now = MemoryMailbox(), Clock().wall()
    opened(memory)
    slow = Totals(claimed=1, batches=10, samples=10, elapsed=3000.0)
    logged(memory, page(totals=slow, trained=[span(now - 2 * IDLE)]))
    assert stand(memory).state is State.RUNNING


def test_several_processes_of_one_learner_are_one_line() -> None:
    memory, now = MemoryMailbox(), Clock().wall()
    opened(memory)
    logged(
        memory,
        page(process="0"),
        page(process="1", wall=now - 500.0),
        page("bob"),
        page("bob", instance="again"),
    )
    found = stand(memory)
    assert [(one.name, one.processes, one.batches, one.life) for one in found.learners] == [
        ("amy", 2, 40, Life.ALIVE),
        ("bob", 1, 20, Life.ALIVE),
        ("bob", 1, 20, Life.ALIVE),
    ]
    amy = found.learners[0]
    assert (amy.share, amy.rate, amy.overall, amy.waiting) == (0.5, 64.0, 128.0, 0.1)
    assert "bob (agai)" in shown(memory)


def test_who_is_not_there_and_held_units_is_named() -> None:
    memory = MemoryMailbox()
    opened(memory, reclaim_after=60.0)
    logged(memory, page("bob", wall=0.0, held=[HeldClaim("", "u", 0)]), page())
    assert "bob is silent and held 1 unit, handed out again after 60 s of silence" in stand(memory).notes
    opened(memory)
    assert "bob is silent and held 1 unit, not handed out again" in stand(memory).notes


def test_what_a_dead_learner_held_is_no_matter_once_somebody_saw_all_of_it_trained() -> None:
    memory = MemoryMailbox()
    opened(memory, reclaim_after=60.0)
    logged(memory, page("bob", wall=0.0, held=[HeldClaim("", "u", 0)]), page(left="end"))
    assert not any("bob" in note for note in stand(memory).notes)
    opened(memory)
    assert "bob is silent and held 1 unit, not handed out again" in stand(memory).notes


# -- watching --------------------------------------------------------------------------------------------------


def test_a_log_that_changes_is_alive_whatever_its_clock_says() -> None:
    memory, clock = MemoryMailbox(), Clock()
    opened(memory)
    observer = Observer(memory, None, clock, lambda _: None)

    def life(write: int, wall: float, seconds: float = 2.0) -> Life:
        clock.forward(seconds)
        logged(memory, page(write=write, wall=wall))
        observation = observer.look()
        assert observation is not None
        return standing(observation).learners[0].life

    assert life(1, 0.0) is Life.SILENT
    assert life(2, 0.0) is Life.ALIVE
    ahead = clock.wall() + 1e6
    assert [life(3, ahead) for _ in range(10)] == [Life.ALIVE] * 8 + [Life.SILENT] * 2
    assert life(4, 0.0) is Life.ALIVE


def test_an_outage_is_nobodys_silence() -> None:
    memory, clock = MemoryMailbox(), Clock()
    opened(memory)
    logged(memory, page(wall=clock.wall() + 1e6))
    outage = Outage(memory)
    observer = Observer(outage, None, clock, lambda _: None)
    watched = looks(observer, "url", None, clock.forward)
    for _ in range(8):
        next(watched)
    outage.down()
    said = [next(watched) for _ in range(5)]
    outage.up()
    assert all(isinstance(one, str) and one.startswith("no answer: ") for one in said)
    after = next(watched)
    assert isinstance(after, Found)
    assert after.standing is not None
    assert after.standing.state is State.RUNNING


def test_watching_ends_when_the_run_is_finished_and_follows_a_new_one() -> None:
    memory = MemoryMailbox()
    opened(memory)
    logged(memory, page(left="early"))
    watched = looks(Observer(memory, None, Clock()), "url", None, bool)
    first = next(watched)
    assert isinstance(first, Found)
    assert code(first) == 1
    opened(memory, run="2", wall=2000.0)
    logged(memory, page(left="end"), run="2")
    (last,) = watched
    assert isinstance(last, Found)
    assert last.standing is not None
    assert (last.standing.observation.run, code(last)) == ("2", 0)


# -- progress --------------------------------------------------------------------------------------------------


def test_progress_of_a_grid() -> None:
    ranks = [page(current=Current(pass_="", batches=n, samples=1, step=10 * n)) for n in (20, 30)]
    made = progress(new_manifest(Plan(UNITS), "a", 0.0), ranks, ranks)
    assert made is not None
    assert (made.name, made.title, made.done, made.total, made.counted) == (
        "e0",
        "epoch 0",
        50,
        200,
        "batches",
    )
    assert made.rate == pytest.approx(4.0)
    assert made.left == pytest.approx(150 / 4.0)
    assert (made.drift, made.ahead, made.behind) == (100, "amy", "amy")


def test_the_latest_epoch_is_the_current_one_and_validation_is_not() -> None:
    names = ["", "e2", "e10", "val0"]
    pages = [page(current=Current(pass_=name, batches=7, samples=7, step=1)) for name in names]
    made = progress(new_manifest(Plan(UNITS), "a", 0.0), pages, pages)
    assert made is not None
    assert (made.title, made.done, made.total) == ("epoch 10", 7, 200)
    only = progress(new_manifest(Plan(UNITS), "a", 0.0), pages[3:], [])
    assert only is not None
    assert (only.title, only.total, only.left) == ("val0", None, None)


@pytest.mark.parametrize("units", [UNITS, unit_ranges(205, 10, batch_rows=2, taper=False)])
def test_what_a_state_holds_is_not_to_be_done_again(units: Any) -> None:
    plan, trained = Plan(units), Trained()
    sizes = [plan.batches(position) or 0 for position in range(len(plan))]
    for position in (0, 1, 2, len(plan) - 1):
        trained.finish(position, sizes[position])
    trained.add(5, 0, 2)
    state = Taken(plan.signature(), "1", "r", {"": trained}).as_dict()
    memory = MemoryMailbox()
    opened(memory, units, state=state)
    logged(memory, page())
    found = stand(memory)
    assert found.current is not None
    assert found.current.total == sum(sizes) - sum(sizes[:3]) - sizes[-1] - 2
    assert any("goes on from a state" in note for note in found.notes)


def test_of_listed_units_those_trained_whole_before_are_not_counted() -> None:
    plan, trained = Plan(unit_files([f"s3://b/{n}" for n in range(40)])), Trained()
    trained.finish(7, 1)
    manifest = new_manifest(plan, "a", 0.0, state=Taken(plan.signature(), "1", "r", {"": trained}))
    made = progress(manifest, [page()], [])
    assert made is not None
    assert (made.total, made.counted) == (39, "units")


def test_units_are_counted_where_the_plan_knows_no_batches() -> None:
    manifest = new_manifest(Plan(unit_files([f"s3://b/{n}" for n in range(40)])), "a", 0.0)
    made = progress(manifest, [page()], [page()])
    assert made is not None
    assert (made.done, made.total, made.counted, made.left) == (4, 40, "units", None)
    later = progress(manifest, [page(current=Current(pass_="e1", batches=9, samples=9, step=9))], [page()])
    assert later is not None
    assert (later.done, later.total) == (9, None)


def test_without_samples_the_rate_is_in_batches() -> None:
    memory = MemoryMailbox()
    opened(memory)
    logged(memory, page(rate=0.0, totals=Totals(claimed=4, batches=20, elapsed=10.0)))
    found = stand(memory)
    assert found.current is not None
    assert found.current.left == pytest.approx(180 / 2.0)
    out = shown(memory)
    assert "batches/s" in out
    assert "samples/s" not in out


def test_ranks_in_lockstep_are_as_far_as_each_other() -> None:
    memory, now = MemoryMailbox(), Clock().wall()
    opened(memory)
    for rank in range(2):
        own = span(now, end=20, ticks=[0, 1, 20])
        current = Current(pass_="", batches=20, samples=640, step=38 + rank)
        key = RunKeys("1").log(f"rank{rank}", "i", "main", 0)
        memory.put(key, page(f"rank{rank}", trained=[own], reached=("", 20), current=current).encode())
    found = stand(memory)
    assert found.current is not None
    assert (found.current.done, found.current.drift) == (40, 1)
    assert "1 step apart: rank1 is ahead, rank0 behind" in shown(memory)


# -- what it costs ---------------------------------------------------------------------------------------------


def test_a_run_of_a_million_units_costs_requests_by_learners() -> None:
    """64 learners with eight pages each: two listings and a manifest, a reading each, and a page of `back/`."""
    memory, keys = MemoryMailbox(), RunKeys("1")
    opened(memory, unit_grid(4_000_000, 4, taper=False))
    full = [span(1.0, unit=f"{number:07d}") for number in range(200)]
    for learner in range(64):
        for number in range(8):
            one = page(
                f"n{learner}", page=number, trained=full, totals=Totals(claimed=15_000, batches=60_000)
            )
            memory.put(keys.log(f"n{learner}", "i", "main", number), one.encode())
    for number in range(BACKS + 10):
        memory.put(keys.pass_keys().back(f"{number:07d}", 0), b"{}")
    counted = Counted(memory)
    found = stand(counted)
    assert counted.counts == {"list": 3, "get": 1 + 64}
    assert (found.claimed, len(found.learners)) == (960_000, 64)
    assert (found.observation.backs, found.observation.more_backs) == (BACKS, True)


def test_a_second_look_reads_no_manifest_again() -> None:
    memory = MemoryMailbox()
    opened(memory)
    logged(memory, page(), page("bob"))
    counted = Counted(memory)
    observer = Observer(counted, None, Clock())
    observer.look()
    first = counted.total
    observer.look()
    assert counted.total - first == first - 1


def test_dollars_only_where_there_is_a_price() -> None:
    memory = MemoryMailbox()
    opened(memory)
    logged(memory, page(totals=Totals(claimed=10_000, batches=40_000, samples=1, elapsed=100_000.0)))
    found = stand(memory)
    assert spending(found, None) is None
    spent = spending(found, S3)
    assert spent is not None
    assert 30_000 <= spent.requests <= 60_000, "a create, a reading and two writes of a log a unit of 10 s"
    assert 0.1 < spent.dollars < 0.3
    out = io.StringIO()
    console = Console(file=out, width=200)
    console.print(view(Found("s3://b/x", found, spent), console))
    assert "at prices of Amazon S3" in out.getvalue()


# -- what is not ours ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            ["readme", "a/b.bin", "runs/Nov30/events.1"],
            r"not ours \('a/b.bin', 'readme', 'runs/Nov30/events.1'\)",
        ),
        ([f"part-{n}" for n in range(9)], r"not ours \('part-0', 'part-1', 'part-2', \.\.\.\)"),
        (["exp/a/runs/1.json", "exp/a/units/x"], "a mailbox within it, at 'exp/a/'"),
        (["units/x", "learners/a~b/main.000000"], "without its manifest"),
    ],
)
def test_a_prefix_that_is_not_ours(keys: list[str], said: str) -> None:
    memory = MemoryMailbox()
    for key in keys:
        memory.put(key, b"x")
    with pytest.raises(RunError, match=said):
        Observer(memory, None, Clock()).look()


def test_a_run_that_is_opened_between_two_listings_is_not_foreign() -> None:
    class JustNow(Wrapper):
        def list(self, prefix: str, after: str = "", limit: int | None = None) -> list[str]:
            listed = super().list(prefix, after, limit)
            if not self._mailbox.list("learners/"):
                logged(self._mailbox, page())
                listed = super().list(prefix, after, limit)
            elif not prefix:
                opened(self._mailbox)
            return listed

    observer = Observer(JustNow(MemoryMailbox()), None, Clock())
    assert observer.look() is None
    assert observer.look() is not None


def test_a_manifest_that_is_none() -> None:
    memory = MemoryMailbox()
    memory.put("runs/config.json", b'{"lr": 1}')
    with pytest.raises(RecordError, match=r"runs/config.json: not a manifest"):
        Observer(memory, None, Clock()).look()
    opened(memory)
    observer = Observer(memory, None, Clock())
    found = look(observer, "url", None)
    assert document(found)["run"] == "1"
    assert [text.partition(":")[0] for text in document(found)["strange_runs"]] == ["runs/config.json"]
    opened(memory, run="2", protocol=99)
    with pytest.raises(RecordError, match="speaks protocol 99"):
        Observer(memory, "2", Clock()).look()


def test_a_log_that_cannot_be_read_is_said_and_the_others_are_shown() -> None:
    memory = MemoryMailbox()
    opened(memory)
    logged(memory, page("amy"), page("bob"))
    memory.put(RunKeys("1").log("l2", "i", "main", 0), b"\x1b[2J")
    found = stand(memory)
    assert [learner.name for learner in found.learners] == ["amy", "bob"]
    assert [note for note in found.notes if note.startswith("a log cannot be read: learners/l2~i/")]


def test_a_run_by_its_name() -> None:
    memory = MemoryMailbox()
    opened(memory)
    opened(memory, run="again", wall=500.0)
    assert stand(memory, "again").observation.run == "again"
    with pytest.raises(InvalidInputError, match=r"run='x'.*\(1, again\)"):
        stand(memory, "x")


def test_other_runs_have_a_line_each() -> None:
    memory = MemoryMailbox()
    for number in range(1, OTHER_RUNS + 4):
        opened(memory, run=str(number), wall=1000.0 + number)
        logged(memory, page(left="end"), run=str(number))
    found = look(Observer(memory, None, Clock()), "url", None)
    told = document(found)
    assert told["run"] == str(OTHER_RUNS + 3)
    assert [other["run"] for other in told["other_runs"]] == [str(n) for n in range(OTHER_RUNS + 2, 2, -1)]
    assert told["unread_runs"] == ["2", "1"]
    out = shown(memory)
    assert "run 6: finished; 1 learner, 20 batches; opened 1970-01-01" in out
    assert "2 older runs" in out


# -- how it is shown -------------------------------------------------------------------------------------------


def shown(mailbox: Mailbox, width: int = 200, terminal: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=terminal)
    console.print(view(look(Observer(mailbox, None, Clock()), "url", None), console))
    return out.getvalue()


def crowd() -> MemoryMailbox:
    memory = MemoryMailbox()
    opened(memory)
    logged(
        memory,
        page(),
        page("a-very-long-name-of-a-node-in-a-rack-with-a-number-0123456789"),
        page("学習者" * 9),
    )
    return memory


@pytest.mark.parametrize("width", [30, 44, 60, 80, 120])
def test_a_terminal_of_any_width_holds_the_table(width: int) -> None:
    lines = re.sub(r"\x1b\[[0-9;]*m", "", shown(crowd(), width, terminal=True)).splitlines()
    rows = [text for text in lines if "alive  " in text]
    assert len(rows) == 3
    assert all("s ago" in row for row in rows) or width < 44
    assert any("━" in text for text in lines)


def test_hostile_names_do_not_reach_the_terminal() -> None:
    memory = MemoryMailbox()
    opened(memory, opened_by="\x1b]0;owned\x07")
    current = [Current(pass_="", batches=1, samples=1, step=step) for step in (1, 99)]
    logged(
        memory,
        page("\x1b[2J[bold]x[/]", held=[HeldClaim("", "u", 0)], wall=0.0, current=current[0]),
        page("\x1b[31mred\u202e", current=current[1]),
        page("b\rc", wall=Clock().wall() + 99.0),
    )
    opened(memory, run="old", wall=0.0, opened_by="\x1b]0;owned\x07")
    for terminal in (False, True):
        out = shown(memory, terminal=terminal)
        assert set(re.findall(r"\x1b[^m]*m", out)) == set(re.findall(r"\x1b\[[0-9;]*m", out))
        assert not set("\r\x07\u202e") & set(out.replace("\r\n", "\n"))
        assert r"\x1b[2J[bold]x[/]" in out
    found = look(Observer(memory, None, Clock()), "url", None)
    assert "\x1b" not in line(found)
    assert "\x1b" not in json.dumps(document(found))


FORM = [
    *("format", "url", "run", "state", "at", "opened_by", "opened_at", "reclaim_after", "idle_seconds"),
    *("batches", "samples", "samples_per_second", "claimed", "repeated", "reclaimed", "given_back", "pass"),
    *("learners", "requests", "notes", "unreadable", "other_runs", "unread_runs", "strange_runs"),
]
LEARNERS_FORM = [
    *("learner", "instance", "life", "seen_seconds_ago", "batches", "samples", "share", "samples_per_second"),
    *("samples_per_second_overall", "batches_per_second_overall", "waiting", "step", "held", "processes"),
]


def test_the_json_document_keeps_its_form() -> None:
    memory = crowd()
    told = json.loads(json.dumps(document(look(Observer(memory, None, Clock()), "url", S3))))
    assert told["format"] == "shardqueue-status/1"
    assert list(told) == FORM
    assert list(told["learners"][0]) == LEARNERS_FORM
    assert list(told["pass"]) == [
        "name",
        "counted",
        "done",
        "total",
        "batches_per_second",
        "seconds_left",
        "drift_steps",
    ]
    assert list(told["requests"]) == ["about", "dollars", "prices"]
    nothing = document(look(Observer(MemoryMailbox(), None, Clock()), "url", None))
    assert nothing == {"format": told["format"], "url": "url", "run": None, "state": "nothing there yet"}


# -- the command -----------------------------------------------------------------------------------------------


def status(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shardqueue", "status", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, **options)


def test_nothing_there_yet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(tmp_path)]) == 3
    assert "no learner has been here" in capsys.readouterr().out
    assert main(["status", str(tmp_path), "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["run"] is None


def test_a_foreign_folder_is_one_line_and_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "weights.pt").write_bytes(b"x")
    assert main(["status", str(tmp_path)]) == 2
    assert main(["status", str(tmp_path / "absent")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    foreign, absent = err.splitlines()
    assert "not ours ('weights.pt')" in foreign
    assert "no such folder" in absent


@pytest.mark.s3
def test_a_run_in_a_bucket(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.options["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.options["secret"])
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.endpoint)
    url = f"s3://shardqueue/{uuid.uuid4().hex}/run"
    assert main(["status", url]) == 3
    mailbox = open_mailbox(url, prove=False, **s3_server.options)
    mailbox.put("model/weights", b"x")
    assert main(["status", url]) == 2
    opened(mailbox)
    logged(mailbox, page(), page("bob", left="early"))
    assert main(["status", url]) == 0
    out, err = capsys.readouterr()
    assert "running; 1 alive, 1 left early" in out
    assert "not ours ('model/weights')" in err


def test_a_mailbox_that_does_not_answer_is_an_error() -> None:
    outage = Outage(MemoryMailbox())
    outage.down()
    with pytest.raises(MailboxUnavailableError):
        Observer(outage, None, Clock()).look()


@pytest.mark.full
def test_a_server_that_is_not_there_is_one_line_and_2() -> None:
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_ENDPOINT_URL": "http://127.0.0.1:1"}
    ended = status("s3://bucket/run", env={**os.environ, **keys})
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr.startswith("shardqueue: ")
    assert ended.stderr.count("\n") == 1


def test_a_live_run_then_a_finished_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    units = unit_grid(20, 2, taper=False)
    mailbox = FileMailbox(tmp_path)
    with shared_queue(units, mailbox, "zoe", lambda unit: [(s, s) for s in unit.steps]) as queue:
        next(queue)
        before = mailbox.list("")
        assert main(["status", str(tmp_path)]) == 0
        out = capsys.readouterr().out
        assert "running; 1 alive" in out
        assert "\x1b" not in out
        assert set(mailbox.list("")) >= set(before)
    assert main(["status", str(tmp_path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["state"] == "broken off"
    train(units, mailbox, "amy", run="1")
    counted = Counted(mailbox)
    assert stand(counted).state is State.FINISHED
    assert set(counted.counts) == {"list", "get"}
    assert main(["status", str(tmp_path), "--watch"]) == 0
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d run 1 finished; 1 left early, 1 ended; epoch 0: 20 of 20 batches \(100.0%\)\n",
        capsys.readouterr().out,
    )


LEARNER = """
import sys, time
from shardqueue import shared_queue, unit_grid
units = unit_grid(4000, 20, taper=False)
with shared_queue(units, sys.argv[1], sys.argv[2], lambda unit: [(s, s) for s in unit.steps]) as queue:
    for _ in queue:
        time.sleep(0.01)
"""


@contextlib.contextmanager
def learner(folder: Path, name: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that trains until it is killed."""
    process = subprocess.Popen([sys.executable, "-c", LEARNER, str(folder), name])
    try:
        until(lambda: any(one.learner == name and one.totals.batches for one in _pages(folder)))
        yield process
    finally:
        process.kill()
        process.wait()


def _pages(folder: Path) -> list[LogPage]:
    return [] if not (folder / "runs").exists() else [s.page for s in _seen(folder)]


def _seen(folder: Path) -> Any:
    observation = Observer(FileMailbox(folder), None, Clock()).look()
    return () if observation is None else observation.sightings


def test_a_killed_process_is_gone_and_its_run_broken_off(tmp_path: Path) -> None:
    with learner(tmp_path, "amy"):
        with learner(tmp_path, "bob") as bob:
            until(lambda: Told(tmp_path).census == ["alive", "alive"])
            bob.kill()
            bob.wait()
        found = Told(tmp_path)
        assert (found.state, found.census) == ("running", ["alive", "gone"])
        assert any(note.startswith("bob is gone and held") for note in found.notes)
    assert Told(tmp_path).state == "broken off"
    ended = status(str(tmp_path))
    assert ended.returncode == 1
    assert "broken off; 2 gone" in ended.stdout


class Told:
    """What the JSON says of the run in a folder."""

    def __init__(self, folder: Path) -> None:
        told = document(look(Observer(FileMailbox(folder), None, Clock()), "url", None))
        self.state, self.notes = told["state"], told["notes"]
        self.census = [one["life"] for one in told["learners"]]


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_ctrl_c_ends_watching_with_130(tmp_path: Path, options: list[str]) -> None:
    mailbox = FileMailbox(tmp_path)
    opened(mailbox)
    logged(mailbox, page())
    command = [sys.executable, "-m", "shardqueue", "status", str(tmp_path), "--watch", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        first = watching.stdout.readline()
        watching.send_signal(signal.SIGINT)
        _, err = watching.communicate(timeout=60)
    assert watching.returncode == 130
    assert err == "shardqueue: interrupted\n"
    assert "running" in first
    assert not options or json.loads(first)["run"] == "1"


def test_on_a_terminal_the_view_is_drawn_over(tmp_path: Path) -> None:
    mailbox = FileMailbox(tmp_path)
    opened(mailbox)
    logged(mailbox, page(left="end"))
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "60", "LINES": "40"}
    command = [sys.executable, "-m", "shardqueue", "status", str(tmp_path), "--watch"]
    with subprocess.Popen(command, stdout=theirs, env=environment) as watching:
        os.close(theirs)
        drawn = b""
        with contextlib.suppress(OSError):  # EIO: the terminal is closed
            while piece := os.read(ours, 65536):
                drawn += piece
    os.close(ours)
    assert watching.returncode == 0
    text = drawn.decode()
    assert "\x1b[?25l" in text, "the cursor is hidden while it draws"
    assert text.endswith("\x1b[?25h")
    assert "finished" in text


def test_in_a_pipe_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    console = new_console()
    console.print(view(look(Observer(crowd(), None, Clock()), "url", None), console))
    assert "a-very-long-name-of-a-node-in-a-rack-with-a-number-0123456789" in out.getvalue()
    assert "\x1b" not in out.getvalue()


def test_it_imports_neither_torch_nor_a_store_client(tmp_path: Path) -> None:
    mailbox = FileMailbox(tmp_path)
    opened(mailbox)
    logged(mailbox, page())
    code = f"""
import sys
import shardqueue.status.command
assert "rich" not in sys.modules
from shardqueue.cli import main
print(main(["status", {str(tmp_path)!r}]), {{"torch", "lightning", "numpy", "fsspec", "s3fs"}} & set(sys.modules))
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "0 set()"


def test_a_hostile_pass_does_not_reach_the_terminal_either() -> None:
    memory = MemoryMailbox()
    opened(memory)
    logged(memory, page(current=Current(pass_="\x1b[2J", batches=1, samples=1, step=1)))
    assert r"\x1b[2J: 1 batches" in shown(memory)
    assert r"\x1b[2J: 1 batches" in line(look(Observer(memory, None, Clock()), "url", None))


def test_the_help_tells_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["status", "--help"])
    out = capsys.readouterr().out
    assert "exit code" in out
    assert max(map(len, out.splitlines())) <= 80
