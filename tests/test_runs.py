"""Which run a learner joins: fresh, running, broken off, finished, named; in one process and in several."""

from __future__ import annotations

import json
import logging
import os
import queue as queues
import signal
import subprocess
import sys
import threading
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from learners import (
    PATIENCE,
    Clock,
    Task,
    Value,
    credited,
    dataset,
    last_page,
    load,
    pages,
    share,
    together,
    train,
    until,
)

from shardqueue import Mailbox, Session, Unit, open_mailbox, shared_queue, unit_grid
from shardqueue.errors import (
    ClosedError,
    InvalidInputError,
    PlanMismatchError,
    RecordError,
    RunError,
    RunFinishedError,
    ShardQueueWarning,
)
from shardqueue.learner import this_process
from shardqueue.mailbox.memory import MemoryMailbox
from shardqueue.records import LogPage, Manifest, Process, Totals

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

UNITS = unit_grid(24, 3, taper=False)
PLENTY = unit_grid(600, 3, taper=False)
"""More units than a learner that trains at full speed takes in hand: when it is held, there are some for others."""


@pytest.fixture
def memory() -> Mailbox:
    return MemoryMailbox()


def broke_off(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "broke off" in r.getMessage()]


# -- states of a run ---------------------------------------------------------------------------------------


def test_the_first_run_lives_at_the_prefix_itself(memory: Mailbox) -> None:
    train(UNITS, memory, "a")
    kinds = Counter(key.split("/")[0] for key in memory.list(""))
    assert kinds == {"runs": 1, "units": len(UNITS), "learners": 1}
    manifest = Manifest.decode(memory.get("runs/1.json") or b"", "runs/1.json")
    assert (manifest.opened_by, manifest.state, list(manifest.plans)) == ("a", None, ["train"])


def test_a_finished_run_is_an_error_ready_to_paste(memory: Mailbox) -> None:
    train(UNITS, memory, "a")
    before = memory.list("")
    with pytest.raises(RunFinishedError, match=r'run="') as caught:
        train(UNITS, memory, "b")
    assert "another prefix" in str(caught.value)
    assert memory.list("") == before
    # What it says works as it stands.
    name = str(caught.value).split('run="')[1].split('"')[0]
    assert Counter(train(UNITS, memory, "b", run=name)) == dataset(UNITS)


def test_a_run_that_broke_off_is_followed_by_the_next_which_is_said(
    memory: Mailbox, caplog: pytest.LogCaptureFixture
) -> None:
    train(UNITS, memory, "a", most=5)
    assert Counter(train(UNITS, memory, "b")) == dataset(UNITS)
    assert len(broke_off(caplog)) == 1
    assert "run 1" in broke_off(caplog)[0]
    assert "run 2" in broke_off(caplog)[0]
    assert len(memory.list("run-2/units/")) == len(UNITS)
    with pytest.raises(RunFinishedError, match="run 2"):
        train(UNITS, memory, "c")


def test_a_first_try_that_failed_in_its_first_batch_is_started_again(
    memory: Mailbox, caplog: pytest.LogCaptureFixture
) -> None:
    for attempt in range(3):
        with pytest.raises(ZeroDivisionError), shared_queue(UNITS, memory, "a", load) as queue:
            for _ in queue:
                raise ZeroDivisionError
        assert len(broke_off(caplog)) == attempt
    assert Counter(train(UNITS, memory, "a")) == dataset(UNITS)
    assert memory.list("runs/") == [f"runs/{number}.json" for number in range(1, 5)]


def test_a_first_try_that_failed_before_it_claimed_leaves_the_run_as_it_is(
    memory: Mailbox, caplog: pytest.LogCaptureFixture
) -> None:
    with shared_queue(UNITS, memory, "a", load):
        pass
    claimed = bool(memory.list("units/"))
    assert Counter(train(UNITS, memory, "a")) == dataset(UNITS)
    assert len(broke_off(caplog)) == int(claimed)


def test_a_running_run_is_joined_in_the_middle(memory: Mailbox, caplog: pytest.LogCaptureFixture) -> None:
    with shared_queue(UNITS, memory, "a", load, prefetch=1) as queue:
        first = next(queue)[1]
        late = Task(lambda: train(UNITS, memory, "b")).result()
        rest = [batch for _, batch in queue]
    assert Counter([first, *late, *rest]) == dataset(UNITS)
    assert memory.list("runs/") == ["runs/1.json"]
    assert broke_off(caplog) == []


def test_a_run_in_which_nothing_was_claimed_is_joined(
    memory: Mailbox, caplog: pytest.LogCaptureFixture
) -> None:
    memory.put_if_absent("runs/1.json", a_manifest())
    assert Counter(train(UNITS, memory, "a")) == dataset(UNITS)
    assert memory.list("runs/") == ["runs/1.json"]
    assert broke_off(caplog) == []


def test_many_learners_open_the_next_run_together(memory: Mailbox) -> None:
    train(UNITS, memory, "z", most=2)
    shares = share(UNITS, memory, "abcdef", run="2")
    assert sum(map(Counter, shares), Counter()) == dataset(UNITS)
    assert memory.list("runs/") == ["runs/1.json", "runs/2.json"]
    assert len(memory.list("units/")) < len(UNITS)


def test_many_learners_start_at_once(memory: Mailbox) -> None:
    shares = share(UNITS, memory, "abcdefgh")
    assert sum(map(Counter, shares), Counter()) == dataset(UNITS)
    assert memory.list("runs/") == ["runs/1.json"]


# -- named runs --------------------------------------------------------------------------------------------


def test_a_named_run_is_joined_whatever_its_state(memory: Mailbox, caplog: pytest.LogCaptureFixture) -> None:
    first = train(UNITS, memory, "a", most=5, run="x")
    second = train(UNITS, memory, "b", run="x")
    assert Counter(first) + Counter(second) == dataset(UNITS)
    assert train(UNITS, memory, "c", run="x") == []
    assert broke_off(caplog) == []
    assert memory.list("runs/") == ["runs/x.json"]
    assert last_page(memory, "c", "x").left == "end"


def test_a_named_run_leaves_the_others_alone(memory: Mailbox) -> None:
    train(UNITS, memory, "a", run="x")
    assert Counter(train(UNITS, memory, "a")) == dataset(UNITS)
    assert Counter(train(UNITS, memory, "a", run="y")) == dataset(UNITS)
    with pytest.raises(RunFinishedError):
        train(UNITS, memory, "a")


@pytest.mark.parametrize("name", ["007", "2", "20261130", "0", "1", "٣"])
def test_a_name_of_digits_does_not_upset_the_numbered_runs(memory: Mailbox, name: str) -> None:
    """Either it is refused, or a run of that name and the numbered ones live side by side."""
    try:
        mine = train(UNITS, memory, "a", most=2, run=name)
    except InvalidInputError as error:
        assert name in str(error)
        assert memory.list("") == []
        return
    assert len(mine) == 2
    assert Counter(train(UNITS, memory, "b")) == dataset(UNITS)


def test_a_run_name_outside_the_grammar_is_refused(memory: Mailbox) -> None:
    for name in ["", "a/b", "..", ".x", "a~b", "a\nb", "x" * 181, 3]:
        with pytest.raises(InvalidInputError, match="run"):
            shared_queue(UNITS, memory, "a", load, run=name)  # type: ignore[arg-type]


def test_the_longest_names_fit(memory: Mailbox, tmp_path: Path) -> None:
    unit = "/".join(["u" * 180, "v" * 180, "w" * 150])
    for mailbox in (memory, open_mailbox(tmp_path / "box")):
        got = train({unit: 1}, mailbox, "l" * 180, run="r" * 180, loader=lambda value: [(0, value)])
        assert got == [1]
        assert last_page(mailbox, "l" * 180, "r" * 180).left == "end"


# -- other plans, other writers ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        unit_grid(25, 3, taper=False),
        unit_grid(24, 3, lanes=2, taper=False),
        unit_grid(24, 3),
        {"a": 1},
        {name: Unit(unit.first, unit.count, 0, 2) for name, unit in UNITS.items()},
    ],
)
@pytest.mark.parametrize("run", [None, "x"])
def test_two_nodes_with_different_plans(memory: Mailbox, other: Any, run: str | None) -> None:
    with shared_queue(UNITS, memory, "a", load, prefetch=1, run=run) as queue:
        first = next(queue)[1]
        with pytest.raises(PlanMismatchError, match=r"steps=24.*this learner has") as caught:
            train(other, memory, "b", run=run)
        assert "same plan" in str(caught.value)
        rest = [batch for _, batch in queue]
    assert Counter([first, *rest]) == dataset(UNITS)
    assert [page.learner for page in pages(memory, run or "1")] == ["a"]


def test_the_same_plan_as_a_dict_in_another_order_is_the_same(memory: Mailbox) -> None:
    listed = dict(reversed(list(UNITS.items())))
    shares = share([UNITS, listed], memory, "ab")
    assert sum(map(Counter, shares), Counter()) == dataset(UNITS)


def a_manifest(**changes: Any) -> bytes:
    from shardqueue.plan import Plan

    fields: dict[str, Any] = {
        "protocol": 1,
        "run_id": "0" * 16,
        "plans": {"train": Plan(UNITS).signature()},
        "opened_by": "x",
        "wall": 0.0,
    }
    return Manifest(**fields | changes).encode()


def test_another_protocol_is_an_error(memory: Mailbox) -> None:
    memory.put_if_absent("runs/1.json", a_manifest(protocol=99))
    with pytest.raises(RunError, match=r"99.*one version"):
        train(UNITS, memory, "a")
    assert memory.list("units/") == []


@pytest.mark.parametrize("body", [b"hello", b"{}", b"\xff\xfe", b"[1]", b'{"kind": "shardqueue.log"}'])
def test_a_manifest_that_is_none_is_an_error(memory: Mailbox, body: bytes) -> None:
    memory.put_if_absent("runs/1.json", body)
    with pytest.raises(RecordError, match=r"runs/1\.json.*prefix of its own"):
        train(UNITS, memory, "a")
    assert memory.list("units/") == []


def test_a_manifest_without_our_plan_is_an_error(memory: Mailbox) -> None:
    memory.put_if_absent("runs/1.json", a_manifest(plans={"val": {}}))
    with pytest.raises(PlanMismatchError, match="no training plan"):
        train(UNITS, memory, "a")


def test_a_run_that_is_being_removed_is_an_error(memory: Mailbox) -> None:
    memory.put_if_absent("runs/1.json", a_manifest(plans={}))
    with pytest.raises(RunError, match="being removed by `shardqueue clean`"):
        train(UNITS, memory, "a")


def test_foreign_objects_beside_ours_are_passed_over(memory: Mailbox) -> None:
    for key in [
        "units/zzz",
        "units/a~b",
        "back/zzz~0",
        "back/zzz",
        "learners/note",
        "readme",
        "runs/a b.txt",
    ]:
        memory.put(key, b"not ours")
    shares = together(
        [lambda: train(UNITS, memory, "a", run="x"), lambda: train(UNITS, memory, "b", run="x")]
    )
    assert sum(map(Counter, shares), Counter()) == dataset(UNITS)


@pytest.mark.parametrize("prefixes", [("x", "y"), ("", "x"), ("x", "x/units"), ("x", "xx"), ("", "run-2")])
def test_two_prefixes_in_one_bucket_do_not_mix(tmp_path: Path, prefixes: tuple[str, str]) -> None:
    first, second = (open_mailbox(tmp_path / "bucket" / prefix) for prefix in prefixes)
    shares = together(partial(share, UNITS, box, "ab") for box in (first, second))
    for share_ in shares:
        assert sum(map(Counter, share_), Counter()) == dataset(UNITS)
    for box in (first, second):
        with pytest.raises(RunFinishedError):
            train(UNITS, box, "c")


# -- the cell of a notebook --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["memory", "folder"])
def test_a_cell_run_again_while_its_queue_was_never_left(
    memory: Mailbox, tmp_path: Path, kind: str, recwarn: pytest.WarningsRecorder
) -> None:
    box: Any = memory if kind == "memory" else str(tmp_path / "box")
    first = shared_queue(UNITS, box, "a", load).__enter__()
    next(first)
    again = train(UNITS, box, "a")
    assert not [w for w in recwarn if "live twice" in str(w.message)]
    with pytest.raises(ClosedError):
        next(first)
    first.__exit__(None, None, None)
    # It is a new start, as after a break.
    assert Counter(again) == dataset(UNITS)
    assert [page.left for page in pages(open_mailbox(box))] == ["early"]


def test_a_cell_run_again_after_its_queue_was_left_early(
    memory: Mailbox, caplog: pytest.LogCaptureFixture
) -> None:
    train(UNITS, memory, "a", most=3)
    assert Counter(train(UNITS, memory, "a")) == dataset(UNITS)
    assert len(broke_off(caplog)) == 1


def test_a_cell_run_again_after_its_queue_finished(memory: Mailbox) -> None:
    train(UNITS, memory, "a")
    with pytest.raises(RunFinishedError, match="run="):
        train(UNITS, memory, "a")


def test_a_cell_run_again_while_a_node_elsewhere_goes_on(memory: Mailbox) -> None:
    with shared_queue(UNITS, memory, "other", load, prefetch=1) as other:
        seen = [next(other)[1]]
        first = shared_queue(UNITS, memory, "a", load, prefetch=1).__enter__()
        seen.append(next(first)[1])
        seen += train(UNITS, memory, "a")
        seen += [batch for _, batch in other]
    assert Counter(seen) == dataset(UNITS)
    assert set(credited(memory).values()) == {1}


# -- one label, two learners -------------------------------------------------------------------------------


def a_page(where: Process, learner: str = "a", write: int = 1, left: Any = None) -> tuple[str, bytes]:
    page = LogPage(
        learner=learner,
        instance="0123456789ab",
        process="main",
        page=0,
        write=write,
        run_id="0" * 16,
        where=where,
        wall=0.0,
        totals=Totals(claimed=1),
        rate=0.0,
        trained=[],
        held=[],
        left=left,
    )
    return f"learners/{learner}~0123456789ab/main.000000", page.encode()


@pytest.mark.parametrize("run", [None, "1"])
def test_a_label_that_is_live_already_gets_a_warning(memory: Mailbox, run: str | None) -> None:
    """The other's log is that of a live process: this one, under another instance."""
    memory.put_if_absent("runs/1.json", a_manifest())
    memory.put_if_absent("units/000000-0.json", b"claimed")
    memory.put(*a_page(this_process()))
    with pytest.warns(ShardQueueWarning, match=r"'a' is live twice.*learner_id") as caught:
        got = train(UNITS, memory, "a")
    assert len(caught) == 1
    assert Counter(got) == dataset(UNITS) - Counter([(0, 0), (1, 0), (2, 0)])


def test_a_label_that_is_live_in_a_named_run_gets_a_warning(memory: Mailbox) -> None:
    memory.put_if_absent("runs/x.json", a_manifest())
    key, body = a_page(this_process())
    memory.put(f"run-x/{key}", body)
    with pytest.warns(ShardQueueWarning, match="live twice") as caught:
        train(UNITS, memory, "a", run="x")
    assert len(caught) == 1


def test_a_label_that_comes_later_is_noticed_by_the_first(memory: Mailbox) -> None:
    with pytest.warns(ShardQueueWarning, match="live twice") as caught:  # noqa: SIM117
        with shared_queue(unit_grid(400, 1, taper=False), memory, "a", load, prefetch=1) as queue:
            next(queue)
            memory.put(*a_page(this_process()))
            assert len(list(queue)) == 399
    assert len(caught) == 1


@pytest.mark.parametrize("left", ["end", "early", "error"])
def test_a_label_whose_owner_left_is_free(memory: Mailbox, left: str) -> None:
    memory.put_if_absent("runs/1.json", a_manifest())
    memory.put(*a_page(this_process(), left=left))
    train(UNITS, memory, "a", run="1")  # warnings are errors here


# -- who is alive ------------------------------------------------------------------------------------------


def test_a_pid_used_again_is_not_taken_for_alive(memory: Mailbox, caplog: pytest.LogCaptureFixture) -> None:
    here = this_process()
    memory.put_if_absent("runs/1.json", a_manifest())
    memory.put_if_absent("units/000000-0.json", b"claimed")
    memory.put(*a_page(Process(host=here.host, boot=here.boot, pid=here.pid, started="1"), "gone"))
    assert Counter(train(UNITS, memory, "a")) == dataset(UNITS)
    assert len(broke_off(caplog)) == 1


ELSEWHERE = Process(host="elsewhere", boot="elsewhere/1", pid=1, started="1")


def test_a_silent_log_from_elsewhere_is_waited_for_before_the_next_run(
    memory: Mailbox, caplog: pytest.LogCaptureFixture
) -> None:
    memory.put_if_absent("runs/1.json", a_manifest())
    memory.put_if_absent("units/000000-0.json", b"claimed")
    memory.put(*a_page(ELSEWHERE, "far"))
    clock = Clock()
    with Session(memory, "a", clock=clock) as session, shared_queue(UNITS, memory, "a", load) as queue:
        first = Task(lambda: next(queue))
        threading.Event().wait(0.1)
        assert first.is_alive()
        assert memory.list("runs/") == ["runs/1.json"]
        clock.hurry(100)
        first.result()
        assert session.run == "2"
        session.step(samples=1)
    assert len(broke_off(caplog)) == 1


def test_a_log_from_elsewhere_that_changes_is_alive(
    memory: Mailbox, caplog: pytest.LogCaptureFixture
) -> None:
    memory.put_if_absent("runs/1.json", a_manifest())
    memory.put_if_absent("units/000000-0.json", b"claimed")
    memory.put(*a_page(ELSEWHERE, "far"))
    with Session(memory, "a") as session, shared_queue(UNITS, memory, "a", load) as queue:
        first = Task(lambda: next(queue))
        threading.Event().wait(0.1)
        assert first.is_alive()
        memory.put(*a_page(ELSEWHERE, "far", write=2))
        first.result()
        assert session.run == "1"
        session.step(samples=1)
    assert broke_off(caplog) == []


def test_waiting_for_a_silent_log_can_be_left(memory: Mailbox) -> None:
    memory.put_if_absent("runs/1.json", a_manifest())
    memory.put_if_absent("units/000000-0.json", b"claimed")
    memory.put(*a_page(ELSEWHERE, "far"))
    with shared_queue(UNITS, memory, "a", load) as queue:
        first = Task(lambda: next(queue))
        threading.Event().wait(0.05)
        assert first.is_alive()
    with pytest.raises(ClosedError):
        first.result()


# -- processes ---------------------------------------------------------------------------------------------

SCRIPT = """
import sys
from shardqueue import shared_queue, unit_grid

mailbox, learner, prefetch = sys.argv[1:]

def load(unit):
    for step in unit.steps:
        yield step, (step, unit.lane)

with shared_queue(unit_grid(600, 3, taper=False), mailbox, learner, load, prefetch=int(prefetch)) as queue:
    for step, batch in queue:
        print("batch", *batch, flush=True)
        order = sys.stdin.readline().strip()
        if order == "fail":
            raise ValueError("as told")
        if order == "leave":
            break
        print("trained", *batch, flush=True)
print("left", flush=True)
"""


class Learner:
    """A learner in a process of its own, told on its stdin when to go on."""

    def __init__(self, folder: Path, name: str, prefetch: int = 1) -> None:
        self.trained: list[Value] = []
        self.in_hand: Value | None = None
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(folder), name, str(prefetch)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self._lines: queues.Queue[str] = queues.Queue()
        self._errors: list[str] = []
        self._readers = [Task(self._read), Task(self._read_errors)]
        learners.append(self)

    def __repr__(self) -> str:
        """What it said, for the message of an assertion on it."""
        return self.errors or "a learner without a message"

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.strip())
        self._lines.put("eof")

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self._errors += self.process.stderr

    def next_batch(self) -> bool:
        """Wait until it holds a batch; False when it ends before."""
        while True:
            word, *numbers = self._lines.get(timeout=PATIENCE).split()
            if word == "batch":
                self.in_hand = (int(numbers[0]), int(numbers[1]))
                return True
            if word == "trained":
                self.trained.append((int(numbers[0]), int(numbers[1])))
            if word == "eof":
                self._lines.put(word)  # it stays at its end
                return False

    def tell(self, order: str = "go") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{order}\n")

    def go(self, batches: int) -> None:
        """Train so many, and hold the next."""
        for _ in range(batches):
            self.tell()
            assert self.next_batch()

    def run_on(self) -> None:
        """Train to the end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        while self.next_batch():
            pass
        assert self.wait() == 0, self.errors

    def kill(self) -> None:
        self.process.kill()
        self.wait()

    def wait(self) -> int:
        code = self.process.wait(PATIENCE)
        while self.next_batch():
            pass
        for reader in self._readers:
            reader.result()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()
        return code

    @property
    def errors(self) -> str:
        return "".join(self._errors)


learners: list[Learner] = []
"""Those started by the test under way."""


@pytest.fixture(autouse=True)
def no_learner_stays() -> Iterator[None]:
    """Kill what a test that failed has left running, and close its pipes."""
    yield
    for learner in learners:
        learner.kill()
    learners.clear()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "box"
    left = [path for path in (tmp_path / "box").rglob("*") if path.name.startswith(".")]
    assert left == [], "temporary files were left behind"


def test_four_terminals_one_after_another_in_any_state(folder: Path) -> None:
    """One busy, one just begun, one that failed, one left early, one killed: the run goes on in one."""
    busy = Learner(folder, "busy")
    assert busy.next_batch()
    busy.go(2)

    failed = Learner(folder, "failed")
    assert failed.next_batch()
    failed.tell("fail")
    assert failed.wait() == 1
    assert "ValueError: as told" in failed.errors

    left = Learner(folder, "left")
    assert left.next_batch()
    left.go(1)
    left.tell("leave")
    assert left.wait() == 0
    left_with = [*left.trained, left.in_hand]  # leaving in order: the last one is trained

    last = Learner(folder, "last")
    assert last.next_batch()
    last.run_on()
    busy.run_on()

    mailbox = open_mailbox(folder)
    seen = Counter([*busy.trained, *failed.trained, *left_with, *last.trained])
    assert seen + Counter([failed.in_hand]) == dataset(PLENTY)
    assert mailbox.list("runs/") == ["runs/1.json"]
    assert {page.learner: page.left for page in pages(mailbox)} == {
        "busy": "end",
        "failed": "error",
        "left": "early",
        "last": "end",
    }
    assert set(credited(mailbox).values()) == {1}


def test_four_terminals_at_once(folder: Path) -> None:
    four = [Learner(folder, f"n{number}") for number in range(4)]
    for learner in four:
        assert learner.next_batch()
    together(learner.run_on for learner in four)
    assert sum((Counter(learner.trained) for learner in four), Counter()) == dataset(PLENTY)
    assert open_mailbox(folder).list("runs/") == ["runs/1.json"]
    late = Learner(folder, "late")
    assert late.wait() == 1
    assert "RunFinishedError" in late.errors
    assert late.in_hand is None


def test_a_killed_process_is_seen_as_dead_at_once(tmp_path: Path) -> None:
    """No ten seconds of silence are waited for: the next run is opened, and that is said."""
    folder = tmp_path / "box"
    first = Learner(folder, "a")
    assert first.next_batch()
    first.go(2)
    first.kill()
    again = Learner(folder, "a")
    again.run_on()
    assert Counter(again.trained) == dataset(PLENTY)
    assert "broke off" in again.errors
    assert "live twice" not in again.errors
    mailbox = open_mailbox(folder)
    assert mailbox.list("runs/") == ["runs/1.json", "runs/2.json"]
    assert {page.left for page in pages(mailbox)} == {None}


def test_a_killed_process_does_not_break_a_run_that_others_are_in(tmp_path: Path) -> None:
    folder = tmp_path / "box"
    stays, dies = Learner(folder, "stays"), Learner(folder, "dies")
    assert stays.next_batch()
    assert dies.next_batch()
    dies.go(1)
    dies.kill()
    joins = Learner(folder, "joins")
    assert joins.next_batch()
    together([joins.run_on, stays.run_on])
    seen = Counter([*stays.trained, *joins.trained, *dies.trained])
    assert set(seen.values()) == {1}
    # What the dead one had claimed stays claimed; nothing of it is trained by others.
    mailbox = open_mailbox(folder)
    assert mailbox.list("runs/") == ["runs/1.json"]
    dead = {json.loads(mailbox.get(key) or b"")["learner"] == "dies" for key in mailbox.list("units/")}
    assert dead == {True, False}
    claimed = [
        step
        for key in mailbox.list("units/")
        if json.loads(mailbox.get(key) or b"")["learner"] == "dies"
        for step in PLENTY[key.removeprefix("units/")].steps
    ]
    assert sum(seen.values()) == 600 - len(claimed) + len(dies.trained)


def test_a_stopped_process_on_this_host_is_alive(folder: Path) -> None:
    first = Learner(folder, "a")
    assert first.next_batch()
    until(lambda: bool(open_mailbox(folder).list("learners/")))
    os.kill(first.process.pid, signal.SIGSTOP)
    try:
        second = Learner(folder, "b")
        second.run_on()
    finally:
        os.kill(first.process.pid, signal.SIGCONT)
    first.run_on()
    assert Counter(first.trained) + Counter(second.trained) == dataset(PLENTY)
    assert open_mailbox(folder).list("runs/") == ["runs/1.json"]


def test_one_label_in_two_processes(folder: Path) -> None:
    first = Learner(folder, "same")
    assert first.next_batch()
    second = Learner(folder, "same")
    assert second.next_batch()
    together([second.run_on, first.run_on])
    assert Counter(first.trained) + Counter(second.trained) == dataset(PLENTY)
    assert "'same' is live twice" in second.errors
    assert len(pages(open_mailbox(folder))) == 2


def test_what_is_said_goes_to_the_logger_of_the_package(
    memory: Mailbox, caplog: pytest.LogCaptureFixture
) -> None:
    train(UNITS, memory, "a", most=1)
    train(UNITS, memory, "b")
    assert {(record.name, record.levelno) for record in caplog.records} == {("shardqueue", logging.WARNING)}
