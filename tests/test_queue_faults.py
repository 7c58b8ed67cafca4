"""What a queue does when something goes wrong: a clear error or a clean stop, nothing twice, nothing left behind."""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import tracemalloc
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from learners import (
    PATIENCE,
    Clock,
    CountingLoader,
    Gate,
    Task,
    Value,
    credited,
    dataset,
    given_back,
    last_page,
    load,
    pages,
    share,
    train,
    until,
)

from shardqueue import Mailbox, Session, Unit, open_mailbox, shared_queue, unit_grid
from shardqueue.errors import (
    ClosedError,
    InvalidInputError,
    LoadError,
    MailboxError,
    MailboxRefusedError,
    MailboxUnavailableError,
    ShardQueueError,
)
from shardqueue.mailbox.faults import LostResponse, Outage, Wrapper
from shardqueue.mailbox.memory import MemoryMailbox

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

UNITS = unit_grid(24, 3, taper=False)
ONE = "000000-0.json"
FAST = 1000.0
"""How fast a clock runs for which a mailbox is away for minutes."""


@pytest.fixture
def memory() -> Mailbox:
    return MemoryMailbox()


class Denied(Wrapper):
    """Calls for which `which(verb, key)` holds fail for good, once it was told to."""

    def __init__(
        self,
        mailbox: Mailbox,
        which: Callable[[str, str], bool],
        error: Callable[[str], Exception] = MailboxError,
    ) -> None:
        super().__init__(mailbox)
        self._which, self._error = which, error
        self.now = True

    def _around(self, verb: str, name: str, forward: Callable[[], Any]) -> Any:
        if self.now and self._which(verb, name):
            raise self._error(f"{verb} {name}: denied")
        return forward()


def said(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(r.getMessage() for r in caplog.records if r.name == "shardqueue")


def claimed_here(mailbox: Mailbox) -> set[str]:
    return {key.removeprefix("units/") for key in mailbox.list("units/")}


# -- bad input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [0, -1, 1.5, "8", None, True, 2**21])
def test_prefetch_out_of_range(memory: Mailbox, prefetch: Any) -> None:
    with pytest.raises(InvalidInputError, match=rf"prefetch={prefetch!r}.*from 1 to"):
        shared_queue(UNITS, memory, "a", load, prefetch=prefetch)


@pytest.mark.parametrize("units", [None, 3, [], ["a"], {"a", "b"}, "abc", {}])
def test_a_plan_that_is_none(memory: Mailbox, units: Any) -> None:
    with pytest.raises(InvalidInputError, match="units="):
        shared_queue(units, memory, "a", load)


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "a/../b",
        "/a",
        "a/",
        "a//b",
        ".hidden",
        "a/.b",
        "a~1",
        "a\\b",
        "a\nb",
        "\x7f",
        "x" * 181,
        3,
    ],
)
def test_identifiers_out_of_grammar(memory: Mailbox, name: Any) -> None:
    with pytest.raises(InvalidInputError, match="identifier="):
        shared_queue({"fine": 1, name: 2}, memory, "a", load)
    assert memory.list("") == []


def test_an_identifier_that_is_a_folder_of_another(memory: Mailbox) -> None:
    with pytest.raises(InvalidInputError, match="folder"):
        shared_queue({"a": 1, "a/b": 2}, memory, "a", load)


@pytest.mark.parametrize("learner", ["", "a/b", "..", ".", ".a", "a~b", "a\tb", "x" * 181, 7, b"a"])
def test_learner_ids_out_of_grammar(memory: Mailbox, learner: Any) -> None:
    with pytest.raises(InvalidInputError, match="learner_id="):
        shared_queue(UNITS, memory, learner, load)
    with pytest.raises(InvalidInputError, match="learner_id="):
        Session(memory, learner)


@pytest.mark.parametrize("lane", [-1, 4, 1.0, True])
def test_a_lane_out_of_range(lane: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"lane=.*from 0 to 3"):
        Unit(0, 1, lane, 4)


@pytest.mark.parametrize("loader", [None, 3, [], "load"])
def test_a_loader_that_cannot_be_called(memory: Mailbox, loader: Any) -> None:
    with pytest.raises(InvalidInputError, match="load="):
        shared_queue(UNITS, memory, "a", loader)


@pytest.mark.parametrize("mailbox", [None, 3, object(), {}, ""])
def test_a_mailbox_that_is_none(mailbox: Any) -> None:
    queue = None
    with pytest.raises(InvalidInputError, match=r"mailbox=|url="):
        queue = shared_queue(UNITS, mailbox, "a", load)
        queue.__enter__()


@pytest.mark.parametrize(
    "url", ["sftp://host/x", "hf://x/y", "ftp://x/y", "simplecache::s3://b/x", "nonsense://x"]
)
def test_a_store_whose_create_is_not_exclusive_is_refused(url: str) -> None:
    queue = shared_queue(UNITS, url, "a", load)
    with pytest.raises(MailboxRefusedError, match="refused"), queue:
        pass


def test_a_mailbox_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    queue = shared_queue(UNITS, tmp_path / "file", "a", load)
    with pytest.raises(MailboxError, match="file"), queue:
        pass


# -- the loader --------------------------------------------------------------------------------------------


class DiskError(Exception):
    pass


def test_a_loader_that_raises_at_once(memory: Mailbox) -> None:
    def failing(unit: Unit) -> Iterator[tuple[int, Value]]:
        raise DiskError(unit)

    queue = shared_queue(UNITS, memory, "a", failing)
    with pytest.raises(DiskError), queue:
        next(queue)
    assert {r.unit for r in queue.returned} == claimed_here(memory)
    assert all((r.begin, r.unclear, r.offered) == (0, 0, True) for r in queue.returned)
    assert last_page(memory, "a").left == "error"
    assert last_page(memory, "a").held == []


@pytest.mark.parametrize("at", [0, 1, 2, 5])
@pytest.mark.parametrize("prefetch", [1, 3, 100])
def test_an_error_comes_after_the_batches_loaded_before_it(memory: Mailbox, at: int, prefetch: int) -> None:
    error = DiskError("at", at)

    def failing(unit: Unit) -> Iterator[tuple[int, Value]]:
        for step, batch in load(unit):
            if step == at:
                raise error
            yield step, batch

    seen: list[Value] = []
    queue = shared_queue(unit_grid(6, 6, taper=False), memory, "a", failing, prefetch=prefetch)
    with pytest.raises(DiskError) as caught, queue:
        for _, batch in queue:
            seen.append(batch)
    assert caught.value is error
    assert seen == [(step, 0) for step in range(at)]
    assert credited(memory) == Counter({(ONE, index): 1 for index in range(at)})
    assert given_back(memory) == {(ONE, 0): at}


def test_an_error_stays(memory: Mailbox) -> None:
    def failing(unit: Unit) -> Iterator[tuple[int, Value]]:
        raise DiskError

    with shared_queue(UNITS, memory, "a", failing) as queue:
        for _ in range(3):
            with pytest.raises(DiskError):
                next(queue)


def test_what_a_failed_loader_left_is_trained_by_another(memory: Mailbox) -> None:
    def failing(unit: Unit) -> Iterator[tuple[int, Value]]:
        for count, pair in enumerate(load(unit)):
            if unit.first == 9 and count == 1:
                raise DiskError
            yield pair

    seen: list[Value] = []
    queue = shared_queue(UNITS, memory, "a", failing, run="x")
    with pytest.raises(DiskError), queue:
        for _, batch in queue:
            seen.append(batch)
    assert (10, 0) not in seen
    seen += train(UNITS, memory, "b", run="x")
    assert Counter(seen) == dataset(UNITS)


@pytest.mark.parametrize("nothing", [list, tuple, dict, lambda: iter(())])
def test_a_loader_that_yields_nothing(
    memory: Mailbox, nothing: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert train(UNITS, memory, "a", loader=lambda unit: nothing()) == []
    assert last_page(memory, "a").left == "end"
    assert claimed_here(memory) == set(UNITS)
    assert said(caplog).count("load gave no batch for unit") == 1


def test_some_units_without_a_batch(memory: Mailbox) -> None:
    def some(unit: Unit) -> Iterator[tuple[int, Value]]:
        return load(unit) if unit.first % 2 else iter(())

    units = unit_grid(60, 1, taper=False)
    shares = share(units, memory, "ab", loader=some, prefetch=1)
    assert sum(map(Counter, shares), Counter()) == Counter((step, 0) for step in range(1, 60, 2))
    assert all(page.held == [] for page in pages(memory))


@pytest.mark.parametrize("gives", [None, 3, DiskError, object()])
def test_a_loader_that_gives_nothing_to_iterate(memory: Mailbox, gives: Any) -> None:
    with pytest.raises(LoadError, match=rf"{type(gives).__name__}.*{ONE[:6]}.*\(step, batch\)"):
        train(unit_grid(1, 1), memory, "a", loader=lambda unit: gives)


@pytest.mark.parametrize("item", [3, None, "ab", (1,), (1, 2, 3), ("1", 2), (1.0, 2), [1, 2], {1: 2, 3: 4}])
def test_a_loader_that_yields_no_pairs(memory: Mailbox, item: Any) -> None:
    with pytest.raises(LoadError, match=r"\(step, batch\) pairs"):
        train(unit_grid(1, 1), memory, "a", loader=lambda unit: [item])


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError])
def test_a_loader_that_raises_something_unusual(memory: Mailbox, error: type[BaseException]) -> None:
    def failing(unit: Unit) -> Iterator[tuple[int, Value]]:
        yield from itertools.islice(load(unit), 1)
        raise error

    with pytest.raises(error):
        train(unit_grid(3, 3), memory, "a", loader=failing)


def test_a_loader_whose_cleanup_fails(memory: Mailbox) -> None:
    def failing(unit: Unit) -> Iterator[tuple[int, Value]]:
        try:
            yield from load(unit)
        finally:
            raise DiskError("in the cleanup")

    queue = shared_queue(unit_grid(30, 30, taper=False), memory, "a", failing, prefetch=2)
    with queue:
        next(queue)
    assert given_back(memory) == {(ONE, 0): 1}


# -- the mailbox -------------------------------------------------------------------------------------------


def test_a_mailbox_that_comes_back(memory: Mailbox) -> None:
    refused = threading.Event()

    class Noticed(Outage):
        def _around(self, verb: str, name: str, forward: Callable[[], Any]) -> Any:
            try:
                return super()._around(verb, name, forward)
            except MailboxUnavailableError:
                refused.set()
                raise

    outage = Noticed(memory)

    def mend() -> None:
        assert refused.wait(PATIENCE)
        outage.up()

    mending = Task(mend)
    seen = []
    with shared_queue(UNITS, outage, "a", load, prefetch=1) as queue:
        for _, batch in queue:
            seen.append(batch)
            if len(seen) == 3:
                outage.down()
    mending.result()
    assert Counter(seen) == dataset(UNITS)
    assert set(credited(memory).values()) == {1}


def test_a_mailbox_that_is_away_at_the_start(memory: Mailbox) -> None:
    outage = Outage(memory)
    outage.down()
    with shared_queue(UNITS, outage, "a", load) as queue:
        first = Task(lambda: next(queue))
        threading.Event().wait(0.1)
        assert first.is_alive()
        outage.up()
        first.result()


def test_a_mailbox_that_stays_away_is_an_error_after_what_was_loaded(memory: Mailbox) -> None:
    outage, loader = Outage(memory), CountingLoader()
    seen = []
    units = unit_grid(800, 40, taper=False)
    with pytest.raises(MailboxUnavailableError, match=r"not answered for \d+ s"):  # noqa: SIM117
        with Session(outage, "a", clock=Clock(speed=FAST)) as session:
            with shared_queue(units, outage, "a", loader, prefetch=4) as queue:
                for _, batch in queue:
                    seen.append(batch)
                    session.step(samples=1)
                    if len(seen) == 2:
                        loader.wait_for(6)
                        outage.down()
    assert len(set(seen)) == len(seen) >= 6
    assert all(not r.offered for r in queue.returned)
    left = {r.unit for r in queue.returned}
    whole = {name for name in claimed_here(memory) if set(units[name].steps) <= {step for step, _ in seen}}
    assert left >= claimed_here(memory) - whole  # and claims of which nobody knows whether they landed
    assert left.isdisjoint(whole)


@pytest.mark.parametrize(
    ("verb", "prefix"),
    [
        ("put_if_absent", "runs/"),
        ("get", "units/"),
        ("list", "runs/"),
        ("list", "learners/"),
        ("put_if_absent", "units/"),
        ("list", "units/"),
        ("list", "back/"),
    ],
)
def test_a_call_that_fails_for_good_is_an_error(memory: Mailbox, verb: str, prefix: str) -> None:
    denied = Denied(memory, lambda called, key: called == verb and key.startswith(prefix))
    queue = shared_queue(UNITS, denied, "a", load)
    seen = []
    with pytest.raises(MailboxError, match=f"{verb} {prefix}.*denied"), queue:
        for _, batch in queue:
            seen.append(batch)
    assert len(set(seen)) == len(seen)
    # Nothing was trained that is not ours, and all that was claimed and not trained is named.
    done = {name for name in UNITS if {(step, 0) for step in UNITS[name].steps} <= set(seen)}
    assert {r.unit for r in queue.returned} >= claimed_here(memory) - done
    # A unit whose loader was stopped before it said that this was all may be named, with nothing left to train.
    assert {r.unit for r in queue.returned if r.begin < UNITS[r.unit].count}.isdisjoint(done)


def test_a_mailbox_of_ones_own_may_raise_what_it_likes(memory: Mailbox) -> None:
    denied = Denied(
        memory,
        lambda verb, key: verb == "put_if_absent" and not key.startswith("runs/"),
        ConnectionResetError,
    )
    denied.now = False
    queue = shared_queue(unit_grid(400, 4, taper=False), denied, "a", load, prefetch=1)
    seen = []
    with pytest.raises(ConnectionResetError), queue:
        for _, batch in queue:
            seen.append(batch)
            denied.now = True
    assert len(set(seen)) == len(seen)
    assert not any(r.offered for r in queue.returned)


@pytest.mark.parametrize("error", [ConnectionResetError, KeyError, MailboxError])
def test_a_mailbox_that_refuses_what_is_given_back(memory: Mailbox, error: type[Exception]) -> None:
    denied = Denied(memory, lambda verb, key: key.startswith("back/") and verb == "put_if_absent", error)
    with shared_queue(unit_grid(9, 9, taper=False), denied, "a", load) as queue:
        next(queue)
    assert [(r.unit, r.begin, r.offered) for r in queue.returned] == [(ONE, 1, False)]
    assert last_page(memory, "a").left == "early"


def test_a_claim_that_the_store_shows_to_be_anothers(memory: Mailbox) -> None:
    """The store said yes to two: whoever reads the other's claim refuses, and ends nothing that is not its own."""

    class SaysYes(Wrapper):
        def _around(self, verb: str, name: str, forward: Callable[[], Any]) -> Any:
            answer = forward()
            return True if verb == "put_if_absent" and name.startswith("units/") else answer

    units = unit_grid(1, 1)
    memory.put_if_absent(f"units/{ONE}", b"another's claim")
    queue = shared_queue(units, SaysYes(memory), "a", load, run="1")
    with pytest.raises(MailboxRefusedError, match="another claim"), queue:
        next(queue)
    assert memory.list("back/") == []
    assert memory.get(f"units/{ONE}") == b"another's claim"
    assert last_page(memory, "a").trained == []


def test_a_claim_that_the_store_does_not_show(memory: Mailbox) -> None:
    class Forgets(Wrapper):
        def _around(self, verb: str, name: str, forward: Callable[[], Any]) -> Any:
            return True if verb == "put_if_absent" and name.startswith("units/") else forward()

    queue = shared_queue(UNITS, Forgets(memory), "a", load)
    with pytest.raises(MailboxRefusedError, match="nothing") as caught, queue:
        next(queue)
    unit = str(caught.value).split(":")[0].removeprefix("units/")
    assert (unit, 0) not in given_back(memory)


@pytest.mark.parametrize("every", [1, 2, 3])
def test_lost_answers_change_nothing(memory: Mailbox, every: int) -> None:
    """Each claim lands and its first answer is lost: it is neither trained twice nor left out."""
    lost: set[str] = set()
    numbers = itertools.count()
    lock = threading.Lock()

    def first_time(verb: str, key: str) -> bool:
        with lock:
            if key in lost or verb != "put_if_absent" or next(numbers) % every:
                return False
            lost.add(key)
            return True

    units = unit_grid(12, 3, taper=False)
    shares = share(units, LostResponse(memory, when=first_time), "ab")
    assert sum(map(Counter, shares), Counter()) == dataset(units)
    assert lost


def test_a_claim_whose_answer_never_comes_is_named(memory: Mailbox, caplog: pytest.LogCaptureFixture) -> None:
    lost = LostResponse(memory, when=lambda verb, key: key.startswith("units/"))
    with Session(lost, "a", clock=Clock(speed=FAST)), shared_queue(UNITS, lost, "a", load) as queue:
        until(lambda: bool(memory.list("units/")))
    assert {r.unit for r in queue.returned} >= claimed_here(memory)
    assert not any(r.offered for r in queue.returned)
    for name in claimed_here(memory):
        assert name in said(caplog) or len(claimed_here(memory)) > 8


def test_what_cannot_be_given_back_is_named_as_such(
    memory: Mailbox, caplog: pytest.LogCaptureFixture
) -> None:
    denied = Denied(memory, lambda verb, key: key.startswith("back/") and verb == "put_if_absent")
    with shared_queue(unit_grid(3, 3, taper=False), denied, "a", load) as queue:
        next(queue)
    assert [(r.unit, r.begin, r.offered) for r in queue.returned] == [(ONE, 1, False)]
    assert re.search(rf"{ONE}.*could not be given back", said(caplog))


def test_a_folder_that_is_removed_while_in_use(tmp_path: Path) -> None:
    box = open_mailbox(tmp_path / "box")
    seen = []
    with pytest.raises(MailboxUnavailableError, match="box") as caught:  # noqa: SIM117
        with Session(box, "a", clock=Clock(speed=FAST)) as session:
            with shared_queue(unit_grid(400, 2, taper=False), box, "a", load, prefetch=1) as queue:
                for _, batch in queue:
                    seen.append(batch)
                    session.step(samples=1)
                    if len(seen) == 3:
                        (tmp_path / "box").rename(tmp_path / "elsewhere")
    assert "removed" in str(caught.value)
    assert len(seen) == len(set(seen)) >= 3
    assert not (tmp_path / "box").exists()


# -- leaving -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [0, 1, 5])
def test_leaving_early_names_what_was_claimed_and_not_trained(
    memory: Mailbox, most: int, caplog: pytest.LogCaptureFixture
) -> None:
    with shared_queue(UNITS, memory, "a", load) as queue:
        seen = [next(queue)[1] for _ in range(most)]
    done = {name for name in UNITS if {(step, 0) for step in UNITS[name].steps} <= set(seen)}
    left = claimed_here(memory) - done
    assert {r.unit for r in queue.returned} == left
    assert {unit for unit, _ in given_back(memory)} == left
    if left:
        (record,) = [r for r in caplog.records if "left early" in r.getMessage()]
        assert (record.name, record.levelno) == ("shardqueue", logging.WARNING)
        assert all(name in record.getMessage() for name in left) or len(left) > 8
        assert str(len(left)) in record.getMessage() or len(left) <= 8


def test_a_last_batch_that_may_not_have_been_trained_is_named(
    memory: Mailbox, caplog: pytest.LogCaptureFixture
) -> None:
    """A unit of one batch fails in it: handed out whole, trained or not, and nobody else will get it."""
    queue = shared_queue(unit_grid(5, 1, taper=False), memory, "a", load, prefetch=1)
    with pytest.raises(DiskError), queue:
        step, _ = next(queue)
        raise DiskError
    (mine,) = [r for r in queue.returned if r.unit == step.unit]
    assert (mine.begin, mine.unclear) == (1, 1)
    assert step.unit in said(caplog)
    assert credited(memory) == Counter()
    assert last_page(memory, "a").held == []


def test_leaving_waits_for_the_load_in_progress(memory: Mailbox) -> None:
    began, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def slow(unit: Unit) -> Iterator[tuple[int, Value]]:
        began.set()
        assert go_on.wait(PATIENCE)
        ended.set()
        yield from load(unit)

    def enter_and_leave() -> None:
        with shared_queue(UNITS, memory, "a", slow):
            assert began.wait(PATIENCE)
        assert ended.is_set()

    task = Task(enter_and_leave)
    assert began.wait(PATIENCE)
    threading.Event().wait(0.05)
    assert task.is_alive()
    go_on.set()
    task.result()


@pytest.mark.parametrize(
    ("verb", "prefix"),
    [("put_if_absent", "units/"), ("get", "units/"), ("put_if_absent", "runs/"), ("put", "")],
)
def test_leaving_waits_for_the_mailbox_call_in_progress(memory: Mailbox, verb: str, prefix: str) -> None:
    gate = Gate(memory, lambda called, key: called == verb and key.startswith(prefix))
    queue = shared_queue(UNITS, gate, "a", load)

    def enter_and_leave() -> None:
        with queue:
            assert gate.reached.wait(PATIENCE)

    task = Task(enter_and_leave)
    assert gate.reached.wait(PATIENCE)
    threading.Event().wait(0.05)
    assert task.is_alive()
    gate.open()
    task.result()
    # Whatever landed meanwhile is given back.
    assert {unit for unit, _ in given_back(memory)} == claimed_here(memory)
    assert {r.unit for r in queue.returned} == claimed_here(memory)


@pytest.mark.parametrize("prefetch", [1, 3])
def test_leaving_while_the_loader_waits_on_a_full_buffer(memory: Mailbox, prefetch: int) -> None:
    loader = CountingLoader()
    with shared_queue(unit_grid(50, 50, taper=False), memory, "a", loader, prefetch=prefetch) as queue:
        next(queue)
        loader.wait_for(1 + prefetch)
    assert loader.given == 1 + prefetch
    assert given_back(memory) == {(ONE, 0): 1}


def test_leaving_from_another_thread_ends_a_consumer_that_waits(memory: Mailbox) -> None:
    gate = Gate(memory, lambda verb, key: verb == "get" and key.startswith("units/"))
    queue = shared_queue(UNITS, gate, "a", load).__enter__()
    waiting = Task(lambda: next(queue))
    assert gate.reached.wait(PATIENCE)
    leaving = Task(lambda: queue.__exit__(None, None, None))
    with pytest.raises(ClosedError, match="left"):
        waiting.result()
    gate.open()
    try:
        leaving.result()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_a_generator_around_the_loop_that_is_dropped(memory: Mailbox) -> None:
    def batches() -> Iterator[Value]:
        with shared_queue(UNITS, memory, "a", load) as queue:
            for _, batch in queue:
                yield batch

    generator = batches()
    next(generator)
    next(generator)
    del generator
    page = last_page(memory, "a")
    assert page.left == "early"
    assert sum(credited(memory).values()) == 1
    # The second may have been trained: it is not offered again.
    assert sum(given_back(memory).values()) in (2, 3)


def test_random_leaving_and_failing_trains_everything_once() -> None:
    """A dozen learners leave in every way there is; the last one picks up exactly what is left."""
    ways = ["break", "raise", "load", "stay"]
    for seed in range(12):
        mailbox, units = MemoryMailbox(), unit_grid(40, 3, lanes=2, taper=False)
        trained: list[Value] = []
        unclear: list[Value] = []
        for number in range(8):
            way, most = ways[(seed + number) % 4], (seed * 7 + number * 5) % 11

            def loader(unit: Unit, way: str = way, most: int = most) -> Iterator[tuple[int, Value]]:
                for count, pair in enumerate(load(unit)):
                    if way == "load" and count == most % 3:
                        raise DiskError
                    yield pair

            queue = shared_queue(units, mailbox, f"n{number}", loader, prefetch=1 + seed % 4, run="x")
            try:
                with queue:
                    for count, (_, batch) in enumerate(queue, 1):
                        if count >= most and way == "raise":
                            unclear.append(batch)
                            raise DiskError
                        trained.append(batch)
                        if count >= most and way == "break":
                            break
            except DiskError:
                pass
        trained += train(units, mailbox, "last", run="x")
        assert Counter(trained) + Counter(unclear) == dataset(units), seed


# -- processes ---------------------------------------------------------------------------------------------

SCRIPT = """
import os, sys, threading, time
from shardqueue import Session, shared_queue, unit_grid

mailbox, mode = sys.argv[1:]

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def load(unit):
    if mode == "waiting":
        say("loading")
        sys.stdin.readline()
    for step in unit.steps:
        yield step, (step, unit.lane)

units = unit_grid(24, 3, taper=False)
queue = shared_queue(units, mailbox, "a", load, prefetch=2)
try:
    with queue:
        for step, batch in queue:
            say("batch", *batch)
            while mode == "training":
                time.sleep(0.01)
            say("trained", *batch)
finally:
    say("returned", *(r.unit for r in queue.returned))
    left = [t.name for t in threading.enumerate() if t.name.startswith("shardqueue")]
    say("threads", *left)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Start the script above in a mode; what still runs at the end of the test is killed."""
    started: list[subprocess.Popen[str]] = []

    def start_one(mode: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", SCRIPT, str(tmp_path / "box"), mode]
        started.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True))
        return started[-1]

    yield start_one
    for process in started:
        if process.poll() is None:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("mode", ["training", "waiting"])
def test_a_signal_ends_the_block_in_order(
    tmp_path: Path, start: Callable[[str], subprocess.Popen[str]], number: signal.Signals, mode: str
) -> None:
    process = start(mode)
    assert process.stdout is not None
    first = process.stdout.readline().split()
    assert first[0] == ("batch" if mode == "training" else "loading")
    process.send_signal(number)
    out, err = process.communicate("\n" * 30, timeout=PATIENCE)
    assert process.returncode == (-signal.SIGINT if number == signal.SIGINT else 128 + signal.SIGTERM), err
    lines = {words[0]: words[1:] for words in map(str.split, out.splitlines())}
    assert lines["threads"] == []
    mailbox = open_mailbox(tmp_path / "box")
    page = last_page(mailbox, "a")
    assert page.left in ("early", "error")
    assert page.held == []
    assert set(lines["returned"]) == claimed_here(mailbox)
    assert {unit for unit, _ in given_back(mailbox)} == claimed_here(mailbox)
    if mode == "training":  # that batch may have been trained
        assert sorted(given_back(mailbox).values())[-1] == 1
    assert [path for path in (tmp_path / "box").rglob("*") if path.name.startswith(".")] == []
    # The run can go on.
    rest = train(UNITS, mailbox, "b", run="1")
    assert Counter(rest) == dataset(UNITS) - Counter([(int(first[1]), 0)] if mode == "training" else [])


def test_a_second_signal_while_leaving_still_gives_back(
    tmp_path: Path, start: Callable[[str], subprocess.Popen[str]]
) -> None:
    """A scheduler sends SIGTERM to a process that is already leaving by it; the loader is in the middle of a unit."""
    process = start("waiting")
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "loading"
    process.send_signal(signal.SIGTERM)
    threading.Event().wait(0.2)
    process.send_signal(signal.SIGTERM)
    threading.Event().wait(0.2)
    process.communicate("\n" * 30, timeout=PATIENCE)
    mailbox = open_mailbox(tmp_path / "box")
    assert {unit for unit, _ in given_back(mailbox)} == claimed_here(mailbox)
    assert last_page(mailbox, "a").left in ("early", "error")


NEVER_LEFT = """
import sys
from shardqueue import Session, shared_queue, unit_grid

def load(unit):
    yield from ((step, step) for step in unit.steps)

queue = shared_queue(unit_grid(400, 1, taper=False), sys.argv[1], "a", load).__enter__()
for _ in range(3):
    next(queue)
"""


def test_a_process_that_ends_without_leaving_ends_quietly(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", NEVER_LEFT, str(tmp_path / "box")],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert "Traceback" not in done.stderr
    assert "Fatal" not in done.stderr


def test_sigterm_is_given_back_to_its_owner(memory: Mailbox) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with shared_queue(UNITS, memory, "a", load) as queue:
        next(queue)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    def mine(number: int, frame: object) -> None: ...

    signal.signal(signal.SIGTERM, mine)
    try:
        with shared_queue(UNITS, memory, "a", load) as queue:
            next(queue)
            assert signal.getsignal(signal.SIGTERM) is mine
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def in_fork(function: Callable[[], object]) -> Any:
    """What `function` gave or raised in a forked child."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)

    def work() -> None:
        try:
            there.send(function())
        except BaseException as error:
            there.send(error)

    child = context.Process(target=work)
    child.start()
    try:
        assert here.poll(PATIENCE)
        return here.recv()
    finally:
        child.join(PATIENCE)
        here.close()
        there.close()
        assert child.exitcode == 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_use_after_a_fork(tmp_path: Path) -> None:
    box = open_mailbox(tmp_path / "box")
    with Session(box, "a") as session, shared_queue(UNITS, box, "a", load) as queue:
        first = next(queue)[1]
        session.step(samples=1)
        for use in (
            lambda: next(queue),
            lambda: session.step(samples=1),
            lambda: next(iter(session.track(queue))),
        ):
            error = in_fork(use)
            assert isinstance(error, ClosedError), error
            assert str(os.getpid()) in str(error)
        assert in_fork(lambda: queue.__exit__(None, None, None)) is None
        assert in_fork(lambda: session.__exit__(None, None, None)) is None
        rest = []
        for _, batch in queue:
            rest.append(batch)
            session.step(samples=1)
    assert Counter([first, *rest]) == dataset(UNITS)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_queue_made_before_a_fork_and_entered_after(tmp_path: Path) -> None:
    """Either it works in the child, or entering it says why not; no thread is left running there."""
    box = str(tmp_path / "box")
    queue = shared_queue(UNITS, box, "a", load)

    def enter() -> Any:
        try:
            with queue:
                got = [batch for _, batch in queue]
        except ClosedError:
            got = []
        return got, [t.name for t in threading.enumerate() if t.name.startswith("shardqueue")]

    answer = in_fork(enter)
    assert not isinstance(answer, BaseException), answer
    got, threads = answer
    assert threads == []
    assert Counter(got) in (dataset(UNITS), Counter())


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_forked_inside_the_block_may_have_its_own_queue(tmp_path: Path) -> None:
    box = str(tmp_path / "box")
    with shared_queue(UNITS, box, "a", load, prefetch=1) as queue:
        first = next(queue)[1]
        theirs = in_fork(lambda: train(UNITS, box, "child"))
        assert not isinstance(theirs, BaseException), theirs
        rest = [batch for _, batch in queue]
    assert Counter([first, *theirs, *rest]) == dataset(UNITS)


def test_no_temporary_file_is_left_however_a_queue_ends(tmp_path: Path) -> None:
    box = open_mailbox(tmp_path / "box")

    def failing(unit: Unit) -> Iterator[tuple[int, Value]]:
        yield from load(unit)
        raise DiskError

    train(UNITS, box, "a", most=3, run="x")
    with pytest.raises(DiskError):
        train(UNITS, box, "b", loader=failing, run="x")
    train(UNITS, box, "c", run="x")
    assert [path for path in (tmp_path / "box").rglob("*") if path.name.startswith(".")] == []


def test_every_error_is_of_one_tree() -> None:
    for error in (LoadError, MailboxError, ClosedError, InvalidInputError):
        assert issubclass(error, ShardQueueError)


# -- what sceptical users met ------------------------------------------------------------------------------


class Overwriting(dict[str, bytes]):
    """A mailbox of the user's own whose create is not exclusive."""

    def put_if_absent(self, key: str, data: bytes) -> bool:
        self[key] = data
        return True

    def put(self, key: str, data: bytes) -> None:
        self[key] = data

    def get(self, key: str) -> bytes | None:  # type: ignore[override]
        return super().get(key)

    def list(self, prefix: str, after: str = "", limit: int | None = None) -> list[str]:
        return sorted(key for key in self if key.startswith(prefix) and key > after)[:limit]

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.pop(key, None)


def test_a_mailbox_of_ones_own_that_overwrites_is_refused_before_anything_is_claimed() -> None:
    box = Overwriting()
    with pytest.raises(MailboxRefusedError, match=r"not exclusive"):
        train(UNITS, box, "a")
    assert list(box) == []


def test_an_error_of_the_loader_names_the_unit(memory: Mailbox) -> None:
    def failing(unit: Unit) -> Iterator[tuple[int, Value]]:
        raise DiskError

    with pytest.raises(DiskError) as caught:
        train(unit_grid(1, 1), memory, "a", loader=failing)
    assert caught.value.__notes__ == ["raised by load for unit '000000-0.json'"]


def test_a_queue_that_a_later_one_closed_says_so(memory: Mailbox) -> None:
    first = shared_queue(UNITS, memory, "a", load).__enter__()
    next(first)
    with shared_queue(UNITS, memory, "a", load) as second:
        with pytest.raises(ClosedError, match="later queue of learner id 'a'"):
            next(first)
        next(second)


def test_a_huge_plan_starts_at_once_and_small(memory: Mailbox) -> None:
    units = unit_grid(10**9, 10, taper=False)
    tracemalloc.start()
    try:
        assert len(train(units, memory, "a", most=3)) == 3
        assert tracemalloc.get_traced_memory()[1] < 2 * 2**20
    finally:
        tracemalloc.stop()
