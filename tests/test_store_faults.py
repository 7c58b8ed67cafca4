"""What a store and a host do to an open queue: full and read-only folders, odd names, clocks, forks, threads, exits.

All through the public door, over real folders, a real S3 server and real processes. Nothing may hang, be trained
twice or be lost unnamed, and what is said carries its remedy.
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
import socket
import subprocess
import sys
import threading
import uuid
from collections import Counter
from contextlib import suppress
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, Any

import pytest
from learners import (
    PATIENCE,
    Clock,
    Value,
    credited,
    dataset,
    given_back,
    last_page,
    load,
    together,
    train,
    until,
)

from shardqueue import Mailbox, Session, Unit, open_mailbox, shared_queue, unit_grid
from shardqueue.errors import InvalidInputError, MailboxError, MailboxUnavailableError
from shardqueue.mailbox.faults import Outage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from conftest import S3Server

FOLDER_AND_BUCKET = ["folder", pytest.param("bucket", marks=pytest.mark.s3)]


@pytest.fixture(params=FOLDER_AND_BUCKET)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, Any]]:
    """A URL of its own and its options."""
    if request.param == "folder":
        return str(tmp_path / "box"), {}
    server: S3Server = request.getfixturevalue("s3_server")
    return f"s3://shardqueue/{uuid.uuid4().hex}", server.options


@pytest.fixture
def box(place: tuple[str, dict[str, Any]]) -> Mailbox:
    url, options = place
    return open_mailbox(url, **options)


# -- a folder that fails while a queue runs ------------------------------------------------------------------


class Disk:
    """A small file system of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self) -> None:
        with (self.path / ".ballast").open("ab", buffering=0) as ballast, suppress(OSError):
            while True:
                ballast.write(b"\0" * 4096)  # to the last page

    def free(self) -> None:
        (self.path / ".ballast").unlink()

    def forbid(self) -> None:
        """Make it read-only, once no file of it is open for writing."""
        until(lambda: self._remount("ro"))

    def allow(self) -> None:
        assert self._remount("rw")

    def _remount(self, how: str) -> bool:
        command = ["mount", "-o", f"remount,{how}", str(self.path)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    place = tmp_path / "disk"
    place.mkdir()
    mount = shutil.which("mount")
    command = [str(mount), "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(place)]
    if mount is None or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        yield Disk(place)
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("mended", ["before leaving", "after leaving"])
@pytest.mark.parametrize(
    ("harm", "mend", "remedy"),
    [(Disk.fill, Disk.free, "free some space"), (Disk.forbid, Disk.allow, "mount it writable")],
    ids=["full", "read-only"],
)
def test_a_folder_that_takes_no_more_claims(
    disk: Disk, harm: Callable[[Disk], None], mend: Callable[[Disk], None], remedy: str, mended: str
) -> None:
    """What was loaded is trained, then it is said; what was claimed is given back, or named when it cannot be."""
    units = unit_grid(1000, 2, taper=False)
    seen: list[Value] = []
    queue = shared_queue(units, disk.path / "box", "a", load, prefetch=2)
    with pytest.raises(MailboxError, match=f"{disk.path}/box.*{remedy}") as caught, queue:
        try:
            for _, batch in queue:
                seen.append(batch)
                if len(seen) == 3:
                    harm(disk)
        finally:
            if mended == "before leaving":
                mend(disk)
    assert not isinstance(caught.value, MailboxUnavailableError)
    assert len(seen) > 3
    if mended == "after leaving":
        mend(disk)
    mailbox = open_mailbox(disk.path / "box")
    named = {returned.unit: returned for returned in queue.returned}
    done = {name for name in units if {(step, 0) for step in units[name].steps} <= set(seen)}
    claimed = {key.removeprefix("units/") for key in mailbox.list("units/")}
    assert claimed - done <= named.keys()
    # A claim whose read-back was cut off by the error of another call is named, and not given back.
    ours = [returned for returned in named.values() if returned.ours]
    assert all(returned.offered == (mended == "before leaving") for returned in ours)
    lost = Counter(
        (step, 0)
        for returned in named.values()
        if returned.unit in claimed and not returned.offered
        for step in list(units[returned.unit].steps)[returned.begin :]
    )
    assert Counter(seen + train(units, mailbox, "b", run="1")) == dataset(units) - lost


# -- names ---------------------------------------------------------------------------------------------------

NAMES = [
    "a b",
    " leading and trailing ",
    "naïve/früh.bin",
    "数据/第一 部分",
    "e\u0301 is not \u00e9",
    "\u00e9 is not e\u0301",
    "🜁",
    "50%25+%2F&a=b;c?versionId=1#d",
    "'quoted' \"twice\" <and> $HOME `x` *",
    "x..y",
    "C:/drive",
    "ß" * 90,
]


def test_units_with_odd_names(box: Mailbox) -> None:
    units = {name: Unit(number, 2, 0, 1) for number, name in enumerate(NAMES)}
    some = train(units, box, "früh und spät", most=3, prefetch=1, run="1")
    rest = together(partial(train, units, box, name, prefetch=1, run="1") for name in ("ä", "b c"))
    assert sum(map(Counter, rest), Counter(some)) == dataset(units)
    assert {key.removeprefix("units/").partition("~")[0] for key in box.list("units/")} == set(NAMES)
    assert {unit for unit, _ in credited(box)} == set(NAMES)


@pytest.mark.parametrize(
    ("name", "bound", "remedy"),
    [
        ("../up", "start with '.'", "write it as 'a' or 'a/b'"),
        ("a/../../up", "start with '.'", "write it as 'a' or 'a/b'"),
        ("/etc/passwd", "'/' at either end", "write it as 'a' or 'a/b'"),
        ("//a", "empty segments", "write it as 'a' or 'a/b'"),
        ("x" * 1000, "at most 180 bytes", "shorten it, with a hash"),
        ("/".join(["x" * 99] * 10), "512 in all", "shorten it, with a hash"),
        ("数" * 61, "at most 180 bytes", "shorten it, with a hash"),
    ],
)
def test_names_that_are_refused_say_how_to_write_them(
    tmp_path: Path, name: str, bound: str, remedy: str
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        shared_queue({"fine": 1, name: 2}, tmp_path / "box", "a", load)
    said = str(caught.value)
    assert name[:100] in said
    assert bound in said
    assert remedy in said
    assert len(said) < 500
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folder", ["a b", "数据 früh", "x/../y", "-rf", "100%", "~not home"])
def test_folders_with_odd_names(tmp_path: Path, folder: str) -> None:
    units = unit_grid(4, 2, taper=False)
    assert Counter(train(units, f"{tmp_path}/{folder}", "a")) == dataset(units)
    assert (tmp_path / folder / "runs").is_dir()


def test_a_folder_whose_name_is_too_long_says_so(tmp_path: Path) -> None:
    with pytest.raises(MailboxError, match="choose a shorter folder or key"):
        train(unit_grid(4, 2), tmp_path / ("x" * 1000), "a")


# -- clocks --------------------------------------------------------------------------------------------------


class Jumping(Clock):
    """A clock whose wall time jumps by hours, forth and back, with every look."""

    def __init__(self) -> None:
        super().__init__()
        self._jumps = cycle([0.0, 7200.0, -10_800.0, 86_400.0, -3600.0, -1e9])

    def wall(self) -> float:
        return max(0.0, super().wall() + next(self._jumps))


def train_by(
    clock: Clock,
    units: Any,
    mailbox: Mailbox,
    name: str,
    between: Callable[[int], object] = bool,
    **more: Any,
) -> list[Value]:
    """Train with a session of that clock."""
    seen: list[Value] = []
    with (
        Session(mailbox, name, clock=clock) as session,
        shared_queue(units, mailbox, name, load, prefetch=1, **more) as queue,
    ):
        for _, batch in queue:
            seen.append(batch)
            session.step(samples=1)
            between(len(seen))
    return seen


def test_a_wall_clock_that_jumps_decides_nothing(tmp_path: Path) -> None:
    box, units = open_mailbox(tmp_path / "box"), unit_grid(60, 2, taper=False)
    names = ["a", "b", "c"]

    def meet(count: int) -> None:
        if count == 1:
            until(lambda: len({key.split("/")[1] for key in box.list("learners/")}) == len(names))

    shares = together(partial(train_by, Jumping(), units, box, name, meet, run="1") for name in names)
    assert sum(map(Counter, shares), Counter()) == dataset(units)
    assert set(credited(box).values()) == {1}
    assert [last_page(box, name).left for name in names] == ["end"] * 3
    assert given_back(box) == {}


class Nap(Outage):
    """An outage in whose middle the process is suspended for three hours; the third call in vain ends it."""

    def __init__(self, mailbox: Mailbox, clock: Clock) -> None:
        super().__init__(mailbox)
        self._clock, self._failed = clock, 0

    def _around(self, verb: str, name: str, forward: Callable[[], Any]) -> Any:
        try:
            return super()._around(verb, name, forward)
        except MailboxUnavailableError:
            self._failed += 1
            if self._failed % 3 == 2:
                self._clock.forward(3 * 3600)
            if self._failed % 3 == 0:
                self.up()
            raise


def test_a_suspended_process_goes_on_where_it_was(tmp_path: Path) -> None:
    """Its own absence is not the store's silence."""
    box, units, clock = open_mailbox(tmp_path / "box"), unit_grid(500, 2, taper=False), Clock()
    nap = Nap(box, clock)
    seen = train_by(clock, units, nap, "a", lambda count: nap.down() if count in (5, 10, 15) else None)
    assert Counter(seen) == dataset(units)
    assert last_page(box, "a").left == "end"


# -- forks ---------------------------------------------------------------------------------------------------

FORKS = 6


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_children_forked_while_a_queue_is_busy_use_its_mailbox(box: Mailbox) -> None:
    """The parent's calls are under way, its locks held and its connections open, when the children are made."""
    units = unit_grid(150, 1, taper=False)
    context = multiprocessing.get_context("fork")
    pipes, seen = [], []
    children: list[multiprocessing.process.BaseProcess] = []

    def child(name: str, pipe: Any) -> None:
        try:
            pipe.send(train(units, box, name, most=10, run="1"))
        except BaseException as error:
            pipe.send(error)
            raise

    with shared_queue(units, box, "parent", load, prefetch=1) as queue:
        for _, batch in queue:
            seen.append(batch)
            if len(children) < FORKS:
                here, there = context.Pipe(duplex=False)
                pipes.append(here)
                children.append(context.Process(target=child, args=(f"child-{len(children)}", there)))
                children[-1].start()
                there.close()
    for pipe, process in zip(pipes, children, strict=True):
        assert pipe.poll(PATIENCE), "a child hangs"
        answer = pipe.recv()
        assert isinstance(answer, list), answer
        seen += answer
        process.join(PATIENCE)
        assert process.exitcode == 0
        pipe.close()
    assert Counter(seen + train(units, box, "rest", run="1")) == dataset(units)
    assert box.list("learners/parent~")


# -- threads -------------------------------------------------------------------------------------------------


def test_many_threads_with_two_runs_on_one_mailbox(box: Mailbox) -> None:
    units = unit_grid(24, 1, lanes=2, taper=False)
    names = [f"{run}{number}" for run in "xy" for number in range(4)]
    shares = together(partial(train, units, box, name, run=name[0], prefetch=2) for name in names)
    for run in "xy":
        its = [share for name, share in zip(names, shares, strict=True) if name[0] == run]
        assert sum(map(Counter, its), Counter()) == dataset(units)
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("shardqueue")] == []


# -- the end of the interpreter ------------------------------------------------------------------------------

EXITS = """
import json, os, sys, threading
from shardqueue import open_mailbox, shared_queue, unit_grid
from shardqueue.mailbox.faults import Delayed

url, options, how = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]

def load(unit):
    for step in unit.steps:
        yield step, step

mailbox = Delayed(open_mailbox(url, **options), 0.05)
queue = shared_queue(unit_grid(24, 2, taper=False), mailbox, "a", load)

def consume():
    for step, batch in queue:
        os.write(1, f"{batch}\\n".encode())
        reached.set()
        if how == "leaving thread":
            threading.main_thread().join()
        if how not in ("thread", "daemon thread"):
            break

def enter_and_consume():
    with queue:
        consume()

reached = threading.Event()
if how == "left":
    with queue:
        consume()
        sys.exit(3)
if how == "raises":
    with queue:
        consume()
        raise ValueError("of the user")
if how == "leaving thread":
    threading.Thread(target=enter_and_consume).start()
    reached.wait()
    sys.exit()
queue.__enter__()
if "thread" in how:
    threading.Thread(target=consume, daemon="daemon" in how).start()
    reached.wait()
else:
    consume()
if how == "sys.exit":
    sys.exit(3)
if how == "os._exit":
    os._exit(3)
if how == "error":
    raise ValueError("of the user")
"""
ENDINGS = {
    **{"left": 3, "daemon thread": 0, "thread": 0, "os._exit": 3},
    **{"leaving thread": 0, "sys.exit": 3, "error": 1, "raises": 1, "falls off": 0},
}
"""How the program above ends, and its exit status."""


def test_an_interpreter_that_exits_while_claiming(place: tuple[str, dict[str, Any]]) -> None:
    """It ends by itself and says nothing but the user's own error; the others go on with what it left."""
    url, options = place
    # What a bucket adds, connections that are open at the end, the first four show.
    endings = list(ENDINGS)[: 4 if options else None]
    started = {
        how: subprocess.Popen(
            [sys.executable, "-W", "always", "-c", EXITS, f"{url}/{number}", json.dumps(options), how],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number, how in enumerate(endings)
    }
    try:
        ended = {how: process.communicate(timeout=PATIENCE) for how, process in started.items()}
    finally:
        for process in started.values():
            process.kill()
            process.wait()
    for number, how in enumerate(endings):
        out, err = ended[how]
        assert started[how].returncode == ENDINGS[how], (how, err)
        assert err.count("Traceback") == (how in ("raises", "error")), (how, err)
        assert not any(noise in err for noise in ("Fatal", "Exception ignored", "unclosed", "never ")), (
            how,
            err,
        )
        units, mailbox = unit_grid(24, 2, taper=False), open_mailbox(f"{url}/{number}", **options)
        seen = Counter((int(step), 0) for step in out.split())
        rest = Counter(train(units, mailbox, "b", run="1")) if how != "thread" else Counter()
        assert not seen & rest, how
        assert {key.removeprefix("units/").partition("~")[0] for key in mailbox.list("units/")} == set(units)
        if how == "thread":  # it trains on when the main thread has ended
            assert seen == dataset(units)
        if how in ("left", "raises", "leaving thread"):
            assert seen + rest == dataset(units), how


HANGS = """
import sys
from shardqueue import open_mailbox, shared_queue, unit_grid

mailbox = open_mailbox("s3://bucket/x", prove=False, key="k1234", secret="s1234", endpoint_url=sys.argv[1])
shared_queue(unit_grid(4, 2), mailbox, "a", lambda unit: []).__enter__()
sys.stdin.readline()
"""


@pytest.mark.full
def test_an_interpreter_that_exits_while_a_store_hangs() -> None:
    """Its calls would take a minute to give up; their threads hold nothing that must not be dropped."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        command = [sys.executable, "-W", "always", "-c", HANGS, f"http://127.0.0.1:{silent.getsockname()[1]}"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            connection, _ = silent.accept()
            _, err = process.communicate("\n", timeout=30)
        finally:
            process.kill()
            process.wait()
        connection.close()
    assert (process.returncode, err) == (0, "")
