"""`shardqueue clean`: what it takes for a run, what it leaves, and that it may stop anywhere."""

from __future__ import annotations

import subprocess
import sys
import time
import uuid
from collections import Counter
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from learners import Clock, dataset, train

from shardqueue import Mailbox, open_mailbox, shared_queue, unit_grid
from shardqueue.clean import removal
from shardqueue.clean.ownership import place
from shardqueue.clean.removal import BATCH, remove
from shardqueue.clean.survey import State, survey
from shardqueue.cli import main
from shardqueue.errors import RunError
from shardqueue.learner import SILENCE
from shardqueue.mailbox.faults import Counted, Wrapper
from shardqueue.mailbox.files import FileMailbox
from shardqueue.mailbox.memory import MemoryMailbox
from shardqueue.plan import Plan
from shardqueue.records import ClaimRecord, LogPage, Process, RunKeys, Totals
from shardqueue.run import new_manifest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from conftest import S3Server

T = TypeVar("T")
UNITS = unit_grid(6, 2, taper=False)
FOREIGN = [
    "readme",
    "units/notes~old",
    "learners/note",
    "runs/a.txt",
    "run-1/units/x",
    "e0/units/x",
    "a/units/x",
]


def look(mailbox: Mailbox) -> dict[str, State]:
    return {run.name: run.state for run in survey(mailbox, Clock(), time.sleep).runs.values()}


def a_claim() -> bytes:
    return ClaimRecord(learner="a", instance="b", worker="main", nonce="c", sequence=1).encode()


def clean(mailbox: Mailbox, name: str = "1") -> int:
    return remove(mailbox, survey(mailbox, Clock(), time.sleep).runs[name])


def finished(mailbox: Mailbox, run: str | None = None) -> None:
    """A run that one learner left early and another at the end."""
    train(UNITS, mailbox, "zoe", most=1, run=run or "1")
    train(UNITS, mailbox, "amy", run=run or "1")


def copied(mailbox: Mailbox) -> MemoryMailbox:
    copy = MemoryMailbox()
    for key in mailbox.list(""):
        copy.put(key, mailbox.get(key) or b"")
    return copy


# -- whose key is it -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "where"),
    [
        ("runs/1.json", ("1", "manifest")),
        ("runs/again-2.json", ("again-2", "manifest")),
        ("units/000000-0.json", ("1", "claim")),
        ("units/a/b~2", ("1", "claim")),
        ("back/a/b~0", ("1", "back")),
        ("e3/units/a", ("1", "claim")),
        ("val0/back/a~1", ("1", "back")),
        ("run-2/units/a", ("2", "claim")),
        ("run-x/e1/back/a~0", ("x", "back")),
        ("learners/a~b/main.000000", ("1", "log")),
        ("run-2/learners/a~b/3.000012", ("2", "log")),
        ("learners/a~b/grade.1.-3", ("1", "grade")),
        *((key, None) for key in FOREIGN),
        ("units/a~0", None),
        ("back/a", None),
        ("runs/x.json.bak", None),
        ("runs/a/b.json", None),
        ("learners/a~b/main.12", None),
        ("learners/a~b/grade.1", None),
        ("learners/a~b/whole.e0", ("1", "whole")),
        ("learners/a~b/whole.e0/x", None),
        ("run-/units/a", None),
        ("run-2", None),
        ("run-2/runs/1.json", None),
        ("probe/0123", None),
        ("units/a\u2028b", None),
    ],
)
def test_whose_key_it_is(key: str, where: tuple[str, str] | None) -> None:
    assert place(key) == where


def test_every_key_that_learners_write_is_known() -> None:
    memory = MemoryMailbox()
    finished(memory)
    finished(memory, "x")
    assert {place(key) for key in memory.list("")} == {
        (run, kind) for run in "1x" for kind in ("manifest", "claim", "back", "log", "grade")
    }


# -- states --------------------------------------------------------------------------------------------------


def test_states_of_runs() -> None:
    memory = MemoryMailbox()
    finished(memory)
    train(UNITS, memory, "a", most=1, run="left")
    memory.put(RunKeys("fresh").manifest, new_manifest(Plan(UNITS), "a", 0.0).encode())
    memory.put(RunKeys("odd").log("a", "b", "main", 0), b"not a log")
    memory.put(RunKeys("odd").manifest, new_manifest(Plan(UNITS), "a", 0.0).encode())
    with shared_queue(UNITS, memory, "b", lambda unit: [(0, 0)], run="live") as queue:
        next(queue)
        assert look(memory) == {
            "1": State.FINISHED,
            "fresh": State.UNKNOWN,
            "left": State.BROKEN_OFF,
            "live": State.ALIVE,
            "odd": State.UNKNOWN,
        }


def elsewhere(write: int, **changes: Any) -> bytes:
    """A page of a learner on another machine that has not left."""
    fields: dict[str, Any] = {
        "learner": "far",
        "instance": "i",
        "process": "main",
        "page": 0,
        "write": write,
        "run_id": "r",
        "where": Process(host="far", boot="far", pid=1, started="1"),
        "wall": 0.0,
        "totals": Totals(claimed=1),
        "rate": 0.0,
        "trained": [],
        "held": [],
    }
    return LogPage(**fields | changes).encode()


def ended_elsewhere(mailbox: Mailbox, **changes: Any) -> None:
    """A run that a learner on another machine ended."""
    mailbox.put(RunKeys("1").manifest, new_manifest(Plan(UNITS), "a", 0.0).encode())
    mailbox.put(RunKeys("1").log("far", "i", "main", 0), elsewhere(1, left="end", **changes))


@pytest.mark.parametrize("writes", [True, False])
def test_a_log_of_another_machine_is_watched(writes: bool) -> None:
    memory, clock, slept = MemoryMailbox(), Clock(), list[float]()
    keys = RunKeys("1")
    memory.put(keys.manifest, new_manifest(Plan(UNITS), "far", 0.0).encode())
    memory.put(keys.log("far", "i", "main", 0), elsewhere(1))

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock.forward(seconds)
        if writes and len(slept) == 3:
            memory.put(keys.log("far", "i", "main", 0), elsewhere(2))

    (run,) = survey(memory, clock, sleep).runs.values()
    assert run.state is (State.ALIVE if writes else State.BROKEN_OFF)
    assert run.last == (0.0, "far")
    assert sum(slept) <= SILENCE + 1


def test_claims_without_logs_or_manifest_are_not_taken_for_a_run_of_ours() -> None:
    """They may be another mailbox, whose prefix lies within this one."""
    memory, clock = MemoryMailbox(), Clock()
    memory.put("run-2/units/a", a_claim())
    (run,) = survey(memory, clock, clock.forward).runs.values()
    assert run.state is State.UNKNOWN


@pytest.mark.parametrize(
    "body", [b"garbage", new_manifest(Plan(UNITS), "a", 0.0).encode().replace(b":1,", b":2,", 1)]
)
def test_a_manifest_that_is_not_understood_is_no_finished_run(body: bytes) -> None:
    memory = MemoryMailbox()
    finished(memory)
    memory.put("runs/1.json", body)
    assert look(memory) == {"1": State.UNKNOWN}


def test_a_slow_store_is_nobodys_silence() -> None:
    """Each look at the logs takes as long as a learner may be silent: it still gets several."""
    memory, clock = MemoryMailbox(), Clock()
    memory.put(RunKeys("1").manifest, new_manifest(Plan(UNITS), "far", 0.0).encode())
    memory.put(RunKeys("1").log("far", "i", "main", 0), elsewhere(1))

    class Slow(Wrapper):
        looks = 0

        def _around(self, verb: str, name: str, forward: Callable[[], T]) -> T:
            if verb == "list" and name:
                Slow.looks += 1
                clock.forward(SILENCE)
            return forward()

    assert {run.state for run in survey(Slow(memory), clock, clock.forward).runs.values()} == {
        State.BROKEN_OFF
    }
    assert Slow.looks > 3


# -- removing ------------------------------------------------------------------------------------------------


@pytest.fixture(params=["memory", "folder", pytest.param("s3", marks=pytest.mark.s3)])
def bucket(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Mailbox]:
    """Opens mailboxes at prefixes of one store."""
    if request.param == "memory":
        whole = MemoryMailbox()
        return lambda prefix: _Below(whole, prefix)
    if request.param == "folder":
        return lambda prefix: FileMailbox(tmp_path / prefix)
    server: S3Server = request.getfixturevalue("s3_server")
    base = uuid.uuid4().hex
    return lambda prefix: open_mailbox(f"s3://shardqueue/{base}/{prefix}", prove=False, **server.options)


class _Below:
    """A prefix of a memory mailbox, as a bucket has them."""

    listing = "page"

    def __init__(self, mailbox: Mailbox, prefix: str) -> None:
        self._mailbox, self._prefix = mailbox, f"{prefix}/"

    def put_if_absent(self, key: str, data: bytes) -> bool:
        return self._mailbox.put_if_absent(self._prefix + key, data)

    def get(self, key: str) -> bytes | None:
        return self._mailbox.get(self._prefix + key)

    def list(self, prefix: str, after: str = "", limit: int | None = None) -> list[str]:
        keys = self._mailbox.list(self._prefix + prefix, after and self._prefix + after, limit)
        return [key.removeprefix(self._prefix) for key in keys]

    def put(self, key: str, data: bytes) -> None:
        self._mailbox.put(self._prefix + key, data)

    def delete(self, keys: Iterable[str]) -> None:
        self._mailbox.delete([self._prefix + key for key in keys])


def test_it_removes_the_run_and_nothing_else(bucket: Callable[[str], Mailbox]) -> None:
    here, neighbour = bucket("run1"), bucket("run10")
    for mailbox in (here, neighbour):
        finished(mailbox)
        finished(mailbox, "2")
    for key in FOREIGN:
        here.put(key, b"foreign")
    beside, second = neighbour.list(""), here.list("run-2/")
    seen = survey(here, Clock(), time.sleep)
    assert seen.foreign == len(FOREIGN)
    assert {name: run.state for name, run in seen.runs.items()} == {"1": State.FINISHED, "2": State.FINISHED}
    assert remove(here, seen.runs["1"]) == seen.runs["1"].keys.total()
    assert here.list("") == sorted([*FOREIGN, "runs/2.json", *second])
    assert clean(here, "2") > 0
    assert here.list("") == sorted(FOREIGN)
    assert neighbour.list("") == beside


class Stops(Wrapper):
    """Removes key by key, and dies after so many writes and removals."""

    def __init__(self, mailbox: Mailbox, after: int) -> None:
        super().__init__(mailbox)
        self._left = after

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._step()
            self._mailbox.delete([key])

    def _around(self, verb: str, name: str, forward: Callable[[], T]) -> T:
        if verb in ("put", "put_if_absent"):
            self._step()
        return forward()

    def _step(self) -> None:
        if not self._left:
            raise KeyboardInterrupt
        self._left -= 1


@pytest.mark.parametrize("named", [None, "1"])
def test_it_may_stop_between_any_two_deletions(named: str | None) -> None:
    """Nobody joins what is left, nobody claims anything in it, and a second removal finishes the job."""
    whole = MemoryMailbox()
    finished(whole)
    whole.put("readme", b"foreign")
    steps = len(whole.list(""))  # the closing, and all keys but the foreign one
    for after in range(1, steps):
        memory = copied(whole)
        with pytest.raises(KeyboardInterrupt):
            clean(Stops(memory, after))
        left = memory.list("")
        with pytest.raises(RunError):
            train(UNITS, memory, "late", run=named)
        assert memory.list("") == left
        assert look(memory) == {"1": State.HALF_REMOVED}
        clean(memory)
        assert memory.list("") == ["readme"]
        assert Counter(train(UNITS, memory, "next", run=named)) == dataset(UNITS)
    memory = copied(whole)
    clean(Stops(memory, steps))
    assert memory.list("") == ["readme"]


class Joined(Wrapper):
    """A learner's log appears right after a call that `when` holds for."""

    def __init__(self, mailbox: Mailbox, when: str) -> None:
        super().__init__(mailbox)
        self._when = when

    def _around(self, verb: str, name: str, forward: Callable[[], T]) -> T:
        answer = forward()
        if verb == self._when:
            self._mailbox.put(RunKeys("1").log("far", "i", "main", 0), elsewhere(1))
        return answer


def test_who_joined_just_before_it_was_closed_stops_the_removal() -> None:
    memory = MemoryMailbox()
    finished(memory)
    before = [(key, memory.get(key)) for key in memory.list("")]
    with pytest.raises(RunError, match=r"'far' joined it.*nothing was removed"):
        clean(Joined(memory, "put"))
    memory.delete([RunKeys("1").log("far", "i", "main", 0)])
    assert [(key, memory.get(key)) for key in memory.list("")] == before


def test_who_is_seen_only_half_way_stops_the_removal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removal, "BATCH", 2)
    memory = MemoryMailbox()
    finished(memory)
    claims = memory.list("units/")
    with pytest.raises(RunError, match=r"'far' joined it.*[12] keys are gone"):
        clean(Joined(memory, "delete"))
    assert len(memory.list("units/")) >= len(claims) - 2
    with pytest.raises(RunError):
        train(UNITS, memory, "late", run="1")


def test_a_run_that_was_opened_meanwhile_is_left() -> None:
    memory = MemoryMailbox()
    finished(memory)
    (run,) = survey(memory, Clock(), time.sleep).runs.values()
    memory.put("runs/1.json", new_manifest(Plan(UNITS), "new", 0.0).encode())
    left = memory.list("")
    with pytest.raises(RunError, match="clean again"):
        remove(memory, run)
    assert memory.list("") == left


def test_somebody_who_goes_on_writing_is_told_of() -> None:
    class Writes(Wrapper):
        def _around(self, verb: str, name: str, forward: Callable[[], T]) -> T:
            answer = forward()
            if verb == "delete":
                self._mailbox.put("units/again", a_claim())
            return answer

    memory = MemoryMailbox()
    finished(memory)
    with pytest.raises(RunError, match="keep appearing"):
        clean(Writes(memory))


def many(keys: int) -> MemoryMailbox:
    memory = MemoryMailbox()
    finished(memory)
    for number in range(keys):
        memory.put(f"units/{number:08d}", a_claim())
    return memory


class Short(Counted):
    """No removal is of more keys than one request takes."""

    def delete(self, keys: Iterable[str]) -> None:
        listed = list(keys)
        assert len(listed) <= BATCH
        super().delete(listed)


@pytest.mark.parametrize("keys", [3_500, pytest.param(100_000, marks=pytest.mark.full)])
def test_a_large_run_goes_in_batches(keys: int) -> None:
    memory = many(keys)
    counted = Short(memory)
    clean(counted)
    assert memory.list("") == []
    assert counted.counts["delete"] <= keys / BATCH + 4
    assert counted.counts["list"] <= keys / BATCH + 16
    assert counted.counts["get"] <= 2 * keys + 16, "its plan does not know these units, so each is read"


def test_what_the_plan_knows_is_not_read() -> None:
    memory = MemoryMailbox()
    finished(memory)
    counted = Counted(memory)
    clean(counted)
    assert memory.list("") == []
    assert counted.counts["get"] <= 6


def test_files_of_the_user_where_claims_could_be_stay() -> None:
    memory = MemoryMailbox()
    finished(memory)
    files = ["back/x~1", "e1/units/w.pt", "units/mydata/a.bin", "units/part-001.parquet"]
    for key in files:
        memory.put(key, b"PAR1")
    assert survey(memory, Clock(), time.sleep).foreign == len(files)
    clean(memory)
    assert memory.list("") == files


@pytest.mark.parametrize("within", ["e1", "val0", "run-7", "deep/er"])
def test_another_mailbox_within_this_one_stays(within: str) -> None:
    memory = MemoryMailbox()
    finished(memory)
    inner = _Below(memory, within)
    train(UNITS, inner, "in", most=3)
    before = inner.list("")
    clean(memory)
    assert inner.list("") == before
    assert memory.list("") == [f"{within}/{key}" for key in before]


# -- the command ---------------------------------------------------------------------------------------------


def test_without_yes_it_only_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mailbox = FileMailbox(tmp_path)
    finished(mailbox)
    mailbox.put("readme", b"foreign")
    before = mailbox.list("")
    assert main(["clean", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "finished" in out
    assert "amy, 20" in out
    assert "1 keys are of no run" in out
    assert "Nothing was removed" in out
    assert mailbox.list("") == before
    assert main(["clean", str(tmp_path), "--yes"]) == 0
    assert mailbox.list("") == ["readme"]
    assert "keys removed" in capsys.readouterr().out
    assert main(["clean", str(tmp_path), "--yes"]) == 0
    assert "No run" in capsys.readouterr().out


def test_a_run_that_is_not_finished_needs_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mailbox = FileMailbox(tmp_path)
    finished(mailbox)
    train(UNITS, mailbox, "a", most=1, run="left")
    train(UNITS, mailbox, "a", run="x")
    assert main(["clean", str(tmp_path), "--run", "x", "--yes"]) == 0
    assert mailbox.list("runs/") == ["runs/1.json", "runs/left.json"]
    assert main(["clean", str(tmp_path), "--yes"]) == 1
    assert "--force" in capsys.readouterr().out
    assert mailbox.list("runs/") == ["runs/left.json"]
    assert main(["clean", str(tmp_path), "--yes", "--force"]) == 0
    assert mailbox.list("") == []


@pytest.mark.parametrize(
    ("arguments", "said"), [(["--run", "y"], "run='y'"), (["/no/such/folder"], "no such folder")]
)
def test_errors_are_one_line_and_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    url = [] if arguments[0].startswith("/") else [str(tmp_path)]
    assert main(["clean", *url, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("shardqueue: ")
    assert said in captured.err
    assert captured.err.count("\n") == 1


def test_names_that_others_wrote_are_shown_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended_elsewhere(FileMailbox(tmp_path), learner="\x1b[2J")
    assert main(["clean", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert r"\x1b[2J" in out


def test_it_imports_no_torch(tmp_path: Path) -> None:
    ended_elsewhere(FileMailbox(tmp_path))
    code = f"""
import sys
from shardqueue.cli import main
print(main(["clean", {str(tmp_path)!r}, "--yes"]), [name for name in ("torch", "lightning") if name in sys.modules])
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "0 []"
