"""Exclusive creates under every order of requests: learners over one faulty store, one pending request at a time.

Below the claims, a create is several requests: create, read back, wait, repeat. Here each call is a thread that stops
before and after each of its requests (`Stepped`), exactly one runs at any time, and a seeded random choice says which
goes on. Requests fail before or after they land, are refused though they landed, are sent again by some layer below,
or arrive long after their sender gave up; readings fail or are old; learners are killed between any two requests.

The first half lets learners race for keys: over `Settler` and over `FileMailbox`, with and without hard links. The
second puts the claims of `test_claims_model` on top of `Settler`, and judges by what was trained.
"""

from __future__ import annotations

import errno
import hashlib
import multiprocessing
import os
import random
import shutil
import tempfile
import threading
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar, Protocol
from zlib import crc32

import numpy as np
import pytest
from claims_world import PLANS, Flight, Learner, Rules, Scenario, ViolationError, World
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_claims_model import MUTANTS as CLAIM_MUTANTS
from test_claims_model import Unread, scenarios, seeds

from shardqueue import shared_queue, unit_grid
from shardqueue.errors import MailboxError, MailboxUnavailableError
from shardqueue.mailbox import files
from shardqueue.mailbox.calls import PutIfAbsent
from shardqueue.mailbox.files import FileMailbox
from shardqueue.mailbox.memory import MemoryMailbox
from shardqueue.mailbox.settling import Settler
from shardqueue.records import ClaimRecord, RunKeys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from multiprocessing.connection import Connection

NET_SECONDS = 60.0
"""Real seconds after which a call that never comes to its next request fails the test."""
DEADLINE = 0.5
"""The clock of a `Settler` here advances by one for each sleep, so that it tries twice."""


class KilledError(BaseException):
    """Ends a call whose process was killed."""


class Stepped(threading.Thread):
    """A call that stops at each of its requests until it is told to go on.

    Attributes:
        over: it has ended, with `answer` or `error`.
        killed: its process is gone.
    """

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(name="model call", daemon=True)
        self._call = call
        self._mine, self._others = threading.Lock(), threading.Lock()
        self._mine.acquire()
        self._others.acquire()
        self.over = self.killed = False
        self.answer: Any = None
        self.error: Exception | None = None

    def go_on(self) -> None:
        """Run to the next stop, or to the end."""
        if self.ident is None:
            self.start()
        self._mine.release()
        assert self._others.acquire(timeout=NET_SECONDS), "a call waits for something unknown"
        if self.over:
            self.join()

    def kill(self) -> None:
        """End it where it stands."""
        self.killed = True
        if self.ident is not None and not self.over:
            self.go_on()

    def run(self) -> None:
        self._mine.acquire()
        try:
            if not self.killed:
                self.answer = self._call()
        except KilledError:
            pass
        except Exception as error:
            self.error = error
        finally:
            self.over = True
            self._others.release()

    def stop(self) -> None:
        """In the call: let others run."""
        self._others.release()
        self._mine.acquire()
        if self.killed:
            raise KilledError


def stop() -> None:
    """Others may run here, if this thread is a call."""
    call = threading.current_thread()
    if isinstance(call, Stepped):
        call.stop()


def is_killed() -> bool:
    call = threading.current_thread()
    return isinstance(call, Stepped) and call.killed


class Sleeps:
    """Time that passes by sleeping, a second each, however long."""

    def __init__(self) -> None:
        self.slept = 0.0

    def monotonic(self) -> float:
        return self.slept

    def wall(self) -> float:
        return self.slept

    def sleep(self, seconds: float) -> None:
        self.slept += 1.0
        stop()


@dataclass
class Chances:
    """What goes wrong, and how often.

    Attributes:
        faults: how many requests fail, at most.
        strays: how many creates take effect later, perhaps once more, at most.
        met: what happened, in order.
    """

    random: Random
    faults: int
    strays: int
    met: list[str] = field(default_factory=list)

    def pick(self, *endings: str) -> str:
        """How a request ends: by one of these, or well."""
        ending = "well"
        if self.faults and self.random.random() < 0.4:
            self.faults -= 1
            ending = self.random.choice(endings)
        self.met.append(ending)
        return ending

    def stray(self) -> bool:
        """Whether a copy of the request stays behind."""
        if not self.strays or self.random.random() < 0.5:
            return False
        self.strays -= 1
        self.met.append("stray")
        return True


class AnswerError(OSError):
    """Some status other than success."""


# -- a bucket ------------------------------------------------------------------------------------------------


class Bucket:
    """Objects, and creates on their way to them that nobody waits for."""

    def __init__(self, chances: Chances, objects: MemoryMailbox | None = None) -> None:
        self.chances = chances
        self.objects = objects or MemoryMailbox()
        self.strays: list[Callable[[], object]] = []

    def create(self, key: str, data: bytes) -> bool:
        """As a server does: also one's own bytes are in the way."""
        absent = self.objects.get(key) is None
        if absent:
            self.objects.put(key, data)
        return absent

    def holds(self, key: str) -> bytes | None:
        return self.objects.get(key)


class Line:
    """A way to the bucket: `settling.Store`, each request stopped before and after its effect.

    `lags`: readings may be old.
    """

    page_size = 1000

    def __init__(self, bucket: Bucket, lags: bool = False) -> None:
        self._bucket, self._chances, self._lags = bucket, bucket.chances, lags

    def create(self, key: str, data: bytes) -> None:
        self._wait_for_arrival(key, data)
        ending = self._chances.pick("never arrives", "409", "answer lost", "5xx after landing", "sent twice")
        landed = ending not in ("never arrives", "409") and self._bucket.create(key, data)
        if ending == "sent twice":  # by the client's own retries: the second one is refused
            landed = False
        if ending != "well":
            self._leave_copy(key, data)
        stop()
        if not landed or ending != "well":
            raise AnswerError(ending if ending != "well" else "412")

    def read(self, key: str) -> bytes | None:
        stop()
        ending = self._chances.pick("unreadable", *["old"] * self._lags)
        held = self._bucket.objects.get(key)
        stop()
        if ending == "unreadable":
            raise AnswerError(ending)
        return None if ending == "old" else held

    def write(self, key: str, data: bytes) -> None:
        stop()
        self._bucket.objects.put(key, data)
        stop()

    def page(self, prefix: str, after: str, more: str | None, limit: int) -> tuple[list[str], str | None]:
        stop()
        ending = self._chances.pick("unreadable")
        keys = self._bucket.objects.list(prefix, more or after, limit)
        stop()
        if ending == "unreadable":
            raise AnswerError(ending)
        return keys, keys[-1] if len(keys) == limit else None

    def remove(self, keys: list[str]) -> None:
        stop()
        self._bucket.objects.delete(keys)
        stop()

    def remedy(self, error: Exception) -> str | None:
        return None if isinstance(error, AnswerError) else "mend the model"

    def _wait_for_arrival(self, key: str, data: bytes) -> None:
        try:
            stop()
        except KilledError:  # what was sent may arrive all the same
            self._leave_copy(key, data)
            raise

    def _leave_copy(self, key: str, data: bytes) -> None:
        if self._chances.stray():
            self._bucket.strays.append(lambda: self._bucket.create(key, data))


class Settled:
    """A mailbox: `Settler` over a bucket, a new one for each call, since its clock is the call's.

    What a create reads back may be old; what is read otherwise is not, as everybody is promised.
    """

    def __init__(self, bucket: Bucket, kind: type[Settler]) -> None:
        self._bucket, self._kind = bucket, kind

    def _new(self, lags: bool = False) -> Settler:
        clock = Sleeps()
        return self._kind(Line(self._bucket, lags), "the bucket", DEADLINE, str, clock, clock.sleep)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        return self._new(lags=True).put_if_absent(key, data)

    def get(self, key: str) -> bytes | None:
        return self._new().get(key)

    def list(self, prefix: str, after: str = "", limit: int | None = None) -> list[str]:
        return self._new().list_keys(prefix, after, limit)

    def put(self, key: str, data: bytes) -> None:
        self._new().put(key, data)

    def delete(self, keys: Iterable[str]) -> None:
        self._new().delete(list(keys))


# -- a folder ------------------------------------------------------------------------------------------------


class FaultyFolder(FileMailbox):
    """A folder on a network file system, each of its calls stopped before and after its effect.

    `links`: whether it has hard links.
    """

    links: ClassVar[bool] = True
    chances: ClassVar[Chances]
    strays: ClassVar[list[Callable[[], object]]]

    def _link(self, temporary: str, path: str) -> None:
        stop()
        if not self.links:
            raise OSError(errno.EPERM, "no links here")
        ending = self.chances.pick("never arrives", "answer lost", "sent twice")
        error: OSError | None = OSError(errno.EIO, ending)
        if ending != "never arrives":
            try:
                super()._link(temporary, path)
                error = None if ending == "well" else error
            except FileExistsError as exists:
                error = exists
            if ending == "sent twice":
                error = FileExistsError(errno.EEXIST, ending)
        if ending != "well" and self.chances.stray():
            self.strays.append(partial(super()._link, temporary, path))
        stop()
        if error is not None:
            raise error

    def _read(self, path: str) -> bytes | None:
        stop()
        if self.chances.pick("unreadable") == "unreadable":
            raise OSError(errno.ESTALE, "unreadable")
        return super()._read(path)

    def _create_alone(self, path: str, data: bytes) -> bool:
        stop()
        return super()._create_alone(path, data)

    def _sleep(self, seconds: float) -> None:
        stop()


class LinklessFolder(FaultyFolder):
    links = False


def fill_in_steps(handle: int, data: bytes) -> None:
    """Instead of `files._fill`: others may look at a body that is half there, and the disk may be full."""
    try:
        stop()
        os.write(handle, data[: len(data) // 2])
        stop()
        if FaultyFolder.chances.pick("disk full") == "disk full":
            raise OSError(errno.ENOSPC, "disk full")
        os.write(handle, data[len(data) // 2 :])
        stop()
    finally:
        os.close(handle)


def discard_unless_killed(path: str) -> None:
    """Instead of `files._discard`: a killed process cleans up nothing."""
    if not is_killed():
        with suppress(OSError):
            Path(path).unlink()


# -- learners that race for keys ------------------------------------------------------------------------------


class Place(Protocol):
    """Where keys are created, seen by everybody as it is.

    Attributes:
        strays: requests that take effect when they are called.
    """

    strays: list[Callable[[], object]]

    def holds(self, key: str) -> bytes | None:
        """What the key holds; b"" when nobody can tell yet."""
        ...

    def door(self) -> Callable[[str, bytes], bool]:
        """A new learner's way to create."""
        ...


class BucketPlace:
    def __init__(self, chances: Chances, kind: type[Settler]) -> None:
        self._bucket, self._kind = Bucket(chances), kind
        self.strays, self.holds = self._bucket.strays, self._bucket.holds

    def door(self) -> Callable[[str, bytes], bool]:
        return Settled(self._bucket, self._kind).put_if_absent


class FolderPlace:
    def __init__(self, chances: Chances, kind: type[FaultyFolder], path: Path) -> None:
        self._path, self._kind = path, kind
        self.strays = kind.strays = []
        FaultyFolder.chances = chances

    def holds(self, key: str) -> bytes | None:
        try:
            return files._unframed((self._path / key).read_bytes()) or b""
        except FileNotFoundError:
            return None

    def door(self) -> Callable[[str, bytes], bool]:
        return self._kind(self._path).put_if_absent


@dataclass(frozen=True)
class Race:
    """One schedule: everything follows from these values."""

    seed: int
    learners: int = 2
    keys: int = 2
    faults: int = 4
    strays: int = 2
    crashes: int = 0


races = st.builds(
    Race,
    seed=st.integers(0, 2**32),
    learners=st.integers(2, 4),
    keys=st.integers(1, 3),
    faults=st.integers(0, 8),
    strays=st.integers(0, 3),
    crashes=st.integers(0, 2),
)


@dataclass(eq=False)
class Racer:
    """Asks for all keys, and again for those whose outcome is unknown, a few times.

    Attributes:
        to_ask: keys, and how often each may still be asked for.
        heard: what the last call for a key said; None when it raised.
    """

    name: str
    door: Callable[[str, bytes], bool]
    to_ask: list[tuple[str, int]]
    heard: dict[str, bool | None] = field(default_factory=dict)
    key: str = ""
    tries: int = 0
    call: Stepped | None = None
    crashed: bool = False


def own_body(name: str, key: str) -> bytes:
    return f"{name} claims {key}".encode()


class Track:
    """All racers, the place they race for, and what must hold."""

    def __init__(self, race: Race, place: Place, random: Random, body: Callable[[str, str], bytes]) -> None:
        self.place, self.random, self.body = place, random, body
        self.keys = [f"unit-{number}" for number in range(race.keys)]
        self.seen: dict[str, set[bytes]] = {key: set() for key in self.keys}
        self.crashes = race.crashes
        self.trace: list[str] = []
        self.racers = []
        for number in range(race.learners):
            order = random.sample(self.keys, len(self.keys))
            self.racers.append(Racer(f"learner {number}", place.door(), [(key, 3) for key in order]))

    def run(self) -> None:
        try:
            while actions := self.actions():
                name, action = self.random.choice(actions)
                self.trace.append(name)
                action()
                for key in self.keys:
                    self.seen[key].add(self.place.holds(key) or b"")
        finally:
            for racer in self.racers:
                if racer.call is not None:
                    racer.call.kill()

    def actions(self) -> list[tuple[str, Callable[[], object]]]:
        found: list[tuple[str, Callable[[], object]]] = []
        for racer in self.racers:
            if not racer.crashed and (racer.call is not None or racer.to_ask):
                found.append((f"{racer.name} goes on", partial(self.go_on, racer)))
                if self.crashes and self.random.random() < 0.05:
                    found.append((f"{racer.name} is killed", partial(self.crash, racer)))
        for at, _ in enumerate(self.place.strays):
            if not found or self.random.random() < 0.1:
                found.append((f"stray {at} arrives", partial(self.arrive, at)))
        return found

    def arrive(self, at: int) -> None:
        with suppress(OSError):  # a folder: it is there, or what was to be linked is gone
            self.place.strays.pop(at)()

    def crash(self, racer: Racer) -> None:
        self.crashes -= 1
        racer.crashed = True
        if racer.call is not None:
            racer.heard[racer.key] = None
            racer.call.kill()

    def go_on(self, racer: Racer) -> None:
        if racer.call is None:
            racer.key, racer.tries = racer.to_ask.pop(0)
            racer.call = Stepped(partial(racer.door, racer.key, self.body(racer.name, racer.key)))
        racer.call.go_on()
        if racer.call.over:
            self.hear(racer, racer.call)

    def hear(self, racer: Racer, call: Stepped) -> None:
        racer.call, key = None, racer.key
        if call.error is not None:
            if not isinstance(call.error, MailboxError):
                raise call.error
            racer.heard[key] = None
            if racer.tries > 1:
                racer.to_ask.insert(self.random.randint(0, len(racer.to_ask)), (key, racer.tries - 1))
            return
        racer.heard[key] = call.answer
        mine, held = self.body(racer.name, key), self.place.holds(key)
        if call.answer and held != mine:
            raise ViolationError(f"{racer.name} was told it won {key}, which holds {held!r}")
        if not call.answer and not self.seen[key] - {b"", mine}:
            raise ViolationError(f"{racer.name} was told it lost {key}, which held no other bytes: {held!r}")

    def judge(self) -> None:
        """At the end of everything."""
        for key in self.keys:
            winners = [racer for racer in self.racers if racer.heard.get(key)]
            if len(winners) > 1:
                raise ViolationError(f"{key} has two owners: {[racer.name for racer in winners]}")
            held = self.place.holds(key)
            if winners and held != self.body(winners[0].name, key):
                raise ViolationError(f"{winners[0].name} won {key}, which holds {held!r} at the end")
            owners = [racer for racer in self.racers if self.body(racer.name, key) == held] or self.racers
            if not winners and all(racer.heard.get(key) is False for racer in owners):
                raise ViolationError(f"nobody owns {key}, which holds {held!r}, and nobody was told so")

    def ask_again(self) -> None:
        """Without further faults, whoever knew nothing learns the truth by asking with the same bytes."""
        for racer in self.racers:
            for key in self.keys:
                held, mine = self.place.holds(key), self.body(racer.name, key)
                if racer.crashed or held == b"":
                    continue
                told = racer.door(key, mine)
                if told is not (held in (None, mine)):
                    raise ViolationError(f"{racer.name} asked again for {key} and was told {told}: {held!r}")


def run_race(
    race: Race, make: Callable[[Chances], Place], body: Callable[[str, str], bytes] = own_body
) -> tuple[Track, Chances]:
    random = Random(repr(race))  # hypothesis draws few different seeds
    chances = Chances(random, race.faults, race.strays)
    track = Track(race, make(chances), random, body)
    track.run()
    track.judge()
    chances.faults = chances.strays = 0
    track.ask_again()
    return track, chances


@dataclass
class Coverage:
    """What all schedules together met."""

    distinct: set[bytes] = field(default_factory=set)
    met: Counter[str] = field(default_factory=Counter)
    heard: Counter[bool | None] = field(default_factory=Counter)

    def add(self, track: Track, chances: Chances) -> None:
        self.distinct.add(hashlib.blake2b(repr((track.trace, chances.met)).encode()).digest())
        self.met.update(chances.met)
        for racer in track.racers:
            self.heard.update(racer.heard.values())

    def race(self, make: Callable[[Chances], Place], examples: int) -> None:
        """Race by so many schedules."""

        @given(races)
        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        )
        def every_schedule_is_right(race: Race) -> None:
            self.add(*run_race(race, make))

        every_schedule_is_right()


@contextmanager
def folders(kind: type[FaultyFolder]) -> Iterator[Callable[[Chances], Place]]:
    """Make places in folders, in memory where that is possible; all are removed at the end."""
    memory = Path("/dev/shm")
    base = Path(tempfile.mkdtemp(dir=memory if os.access(memory, os.W_OK) else None))
    numbers = count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_fill", fill_in_steps)
        patch.setattr(files, "_discard", discard_unless_killed)
        try:
            yield lambda chances: FolderPlace(chances, kind, base / str(next(numbers)))
        finally:
            shutil.rmtree(base)


def test_no_schedule_gives_a_key_of_a_bucket_twice_or_to_nobody() -> None:
    coverage = Coverage()
    coverage.race(lambda chances: BucketPlace(chances, Settler), 550)
    assert len(coverage.distinct) >= 500
    assert coverage.met.keys() == {
        *("well", "never arrives", "409", "answer lost", "5xx after landing", "sent twice"),
        *("unreadable", "old", "stray"),
    }
    assert all(coverage.heard[told] > 100 for told in (True, False, None)), coverage.heard


@pytest.mark.parametrize("kind", [FaultyFolder, LinklessFolder])
def test_no_schedule_gives_a_key_of_a_folder_twice_or_to_nobody(kind: type[FaultyFolder]) -> None:
    coverage = Coverage()
    with folders(kind) as make:
        coverage.race(make, 220)
    assert len(coverage.distinct) >= 190
    links = {"never arrives", "answer lost", "sent twice", "stray"} if kind.links else set()
    assert coverage.met.keys() == {"well", "unreadable", "disk full"} | links
    assert all(coverage.heard[told] > 50 for told in (True, False, None)), coverage.heard


@pytest.mark.full
@pytest.mark.parametrize("part", range(5))
def test_many_more_races(part: int) -> None:
    random = Random(part)
    with folders(FaultyFolder) as linked, folders(LinklessFolder) as linkless:
        for _ in range(1000):
            counts = [random.randint(0, most) for most in (3, 2, 10, 4, 3)]
            race = Race(random.randrange(2**32), 1 + counts[0], 1 + counts[1], *counts[2:])
            for make in (lambda chances: BucketPlace(chances, Settler), linked, linkless):
                run_race(race, make)


# -- mutants of the create -----------------------------------------------------------------------------------


class Rounds(Settler):
    """What failed is not read back."""

    to: ClassVar[bool]

    def _create(self, key: str, data: bytes) -> bool:
        try:
            self._store.create(key, data)
        except OSError:
            return self.to
        return True


class RoundsToWon(Rounds):
    to = True


class RoundsToLost(Rounds):
    to = False


class ListsThenPuts(Settler):
    """Absent from a listing, then written."""

    def _create(self, key: str, data: bytes) -> bool:
        if self._store.page(key, "", None, 1)[0]:
            return self._store.read(key) == data
        self._store.write(key, data)
        return True


class FolderRounds(FaultyFolder):
    """What failed is not read back."""

    to: ClassVar[bool]

    def _settle(self, path: str, data: bytes, error: OSError) -> bool:
        return self.to


class FolderRoundsToWon(FolderRounds):
    to = True


class FolderRoundsToLost(FolderRounds):
    to = False


class FolderLooksThenMoves(FaultyFolder):
    """Absent, then moved into place, over whatever is there by then."""

    def _publish(self, temporary: str, path: str, data: bytes) -> bool:
        if (held := self._read(path)) is not None:
            return held == data
        stop()
        Path(temporary).replace(path)
        return True


def without_nonce(name: str, key: str) -> bytes:
    return own_body("a learner", key)


def with_seeded_nonce(name: str, key: str) -> bytes:
    """Each learner has a generator of its own, and all have one seed."""
    return Random(f"7 {key}").randbytes(12)


def some_races(number: int) -> list[Race]:
    return [Race(seed, learners=2 + seed % 2, keys=1 + seed % 2) for seed in range(number)]


BUCKET_MUTANTS: dict[str, tuple[type[Settler], Callable[[str, str], bytes], str]] = {
    "no nonce": (Settler, without_nonce, "two owners"),
    "a nonce from a seeded generator": (Settler, with_seeded_nonce, "two owners"),
    "unclear is won": (RoundsToWon, own_body, "was told it won"),
    "unclear is lost": (RoundsToLost, own_body, "was told it lost|nobody owns"),
    "listed, then put": (ListsThenPuts, own_body, "two owners|which holds"),
}
FOLDER_MUTANTS: dict[str, tuple[type[FaultyFolder], Callable[[str, str], bytes], str]] = {
    "no nonce": (FaultyFolder, without_nonce, "two owners"),
    "no nonce, no links": (LinklessFolder, without_nonce, "two owners"),
    "unclear is won": (FolderRoundsToWon, own_body, "was told it won"),
    "unclear is lost": (FolderRoundsToLost, own_body, "was told it lost|nobody owns"),
    "looked for, then moved": (FolderLooksThenMoves, own_body, "two owners|which holds"),
}


ENOUGH = 6


def caught(make: Callable[[Chances], Place], body: Callable[[str, str], bytes], expected: str) -> int:
    """How many of a hundred schedules show the mutant by what it is expected to do; `ENOUGH` are."""
    found = 0
    for race in some_races(100):
        if found == ENOUGH:
            break
        try:
            run_race(race, make, body)
        except ViolationError as violation:
            found += any(part in str(violation) for part in expected.split("|"))
    return found


def test_the_judge_catches_nothing_where_nothing_is_wrong() -> None:
    assert caught(lambda chances: BucketPlace(chances, Settler), own_body, "") == 0


@pytest.mark.parametrize("mutant", BUCKET_MUTANTS)
def test_the_judge_catches_in_a_bucket(mutant: str) -> None:
    kind, body, expected = BUCKET_MUTANTS[mutant]
    assert caught(lambda chances: BucketPlace(chances, kind), body, expected) == ENOUGH


@pytest.mark.parametrize("mutant", FOLDER_MUTANTS)
def test_the_judge_catches_in_a_folder(mutant: str) -> None:
    kind, body, expected = FOLDER_MUTANTS[mutant]
    with folders(kind) as make:
        assert caught(make, body, expected) == ENOUGH


# -- claims over such a bucket ---------------------------------------------------------------------------------


class Noting(MemoryMailbox):
    """Notes when each key was first written."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def put(self, key: str, data: bytes) -> None:
        super().put(key, data)
        self._world.landed.setdefault(key, self._world.events)


class BucketWorld(World):
    """The learners of `World`, whose calls are made by a `Settler` over a faulty bucket, request by request."""

    def __init__(self, scenario: Scenario, rules: Rules, kind: type[Settler]) -> None:
        super().__init__(scenario, rules, PLANS[scenario.shape])
        self.mailbox = Noting(self)
        self.chances = Chances(self.random, scenario.faults, scenario.strays)
        self.bucket = Bucket(self.chances, self.mailbox)
        self.strays = self.bucket.strays
        self.faults = 0  # requests fail, not calls
        self.box = Settled(self.bucket, kind)
        self.calls: dict[Flight, Stepped] = {}

    def run(self) -> World:
        try:
            return super().run()
        finally:
            for call in self.calls.values():
                call.kill()

    def effect(self, one: Learner, flight: Flight) -> None:
        try:
            if isinstance(flight.call, PutIfAbsent):
                self.step(flight)
            else:  # one reading takes effect; when, `World` decides
                super().effect(one, flight)
        except MailboxUnavailableError as error:
            self.chances.met.append("unknown")
            self.fail(one, flight, error)

    def step(self, flight: Flight) -> None:
        """The create comes to its next request, or to its end."""
        if flight not in self.calls:
            self.calls[flight] = Stepped(partial(flight.call.perform, self.box))
        call = self.calls[flight]
        call.go_on()
        if call.over:
            del self.calls[flight]
            if call.error is not None:
                raise call.error
            flight.answer, flight.done = call.answer, True

    def crash(self, one: Learner) -> None:
        for flight in one.flights:
            if flight in self.calls:
                self.calls.pop(flight).kill()
        super().crash(one)
        one.flights.clear()


def play_over_a_bucket(
    scenario: Scenario, rules: Rules | None = None, kind: type[Settler] = Settler
) -> BucketWorld:
    world = BucketWorld(scenario, rules or Rules(), kind)
    world.run()
    world.judge()
    return world


def test_no_schedule_trains_a_batch_twice_or_loses_a_unit() -> None:
    distinct: set[tuple[int, int, str]] = set()
    met: Counter[str] = Counter()

    @given(scenarios)
    @settings(
        max_examples=450,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    def every_schedule_is_right(scenario: Scenario) -> None:
        scenario = replace(scenario, seed=crc32(repr(scenario).encode()))
        world = play_over_a_bucket(scenario)
        distinct.add((world.trace, world.events, scenario.shape))
        met.update(world.chances.met)

    every_schedule_is_right()
    assert len(distinct) >= 400
    assert all(met[ending] > 10 for ending in ("never arrives", "answer lost", "old", "stray", "unknown"))


WORLD_MUTANTS: dict[str, tuple[Rules, type[Settler], str]] = {
    "no nonce": (CLAIM_MUTANTS["no nonce"][0], Settler, "trained twice"),
    "a nonce from a seeded generator": (
        CLAIM_MUTANTS["a nonce from a seeded generator"][0],
        Settler,
        "trained twice",
    ),
    "unclear is won": (Rules(), RoundsToWon, "the store said we created it"),
    "unclear is won, unread": (Rules(claims=Unread), RoundsToWon, "before its read-back agreed"),
    "unclear is lost": (Rules(), RoundsToLost, "gave nothing back"),
    "a key is removed and used again": (
        CLAIM_MUTANTS["a key is removed and used again"][0],
        Settler,
        "trained twice|was passed over",
    ),
    "listed, then put": (Rules(), ListsThenPuts, "trained twice|the store said we created it"),
    "listed, then put, unread": (Rules(claims=Unread), ListsThenPuts, "before its read-back agreed"),
}


@pytest.mark.parametrize("mutant", WORLD_MUTANTS)
def test_the_judge_of_what_was_trained_catches(mutant: str) -> None:
    rules, kind, expected = WORLD_MUTANTS[mutant]
    found = []
    for scenario in seeds(40):
        try:
            play_over_a_bucket(scenario, rules, kind)
        except (ViolationError, ValueError) as violation:
            found.append(str(violation))
            if any(part in found[-1] for part in expected.split("|")):
                return
    pytest.fail(f"what was found instead: {found[:3]}")


@pytest.mark.full
@pytest.mark.parametrize("part", range(10))
def test_many_more_schedules_over_a_bucket(part: int) -> None:
    for scenario in seeds(400, crashes=part % 3, late=part % 2, faults=4 + 2 * part):
        play_over_a_bucket(replace(scenario, seed=scenario.seed + 1000 * part))


# -- where real nonces come from -------------------------------------------------------------------------------


def claim_all(repeatable: bool, pipe: Connection) -> None:
    """In a forked process: claim a plan in memory of its own; send the claims, and whether generators moved."""
    if repeatable:
        os.urandom = lambda size: Random(7).randbytes(size)
    before = random.getstate(), repr(np.random.get_state())
    mailbox, units = MemoryMailbox(), unit_grid(12, 1, taper=False)
    with shared_queue(units, mailbox, "twin", lambda unit: [(step, None) for step in unit.steps]) as queue:
        batches = sum(1 for _ in queue)
    keys = [RunKeys("1").pass_keys().claim(name) for name in units]
    bodies = [mailbox.get(key) for key in keys]
    pipe.send((batches, bodies, (random.getstate(), repr(np.random.get_state())) == before))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("repeatable", [False, True], ids=["urandom", "a seeded generator in its place"])
def test_forks_with_equal_seeds_claim_with_different_nonces(repeatable: bool) -> None:
    random.seed(7)
    np.random.seed(7)
    context = multiprocessing.get_context("fork")
    claims: list[list[ClaimRecord]] = []
    for _ in range(2):
        here, there = context.Pipe(duplex=False)
        child = context.Process(target=claim_all, args=(repeatable, there))
        child.start()
        assert here.poll(NET_SECONDS)
        batches, bodies, unmoved = here.recv()
        child.join()
        here.close()
        there.close()
        assert batches == 12
        assert unmoved
        claims.append([ClaimRecord.decode(body, "a claim") for body in bodies])
    instances = {claim.instance for one in claims for claim in one}
    nonces = [claim.nonce for one in claims for claim in one]
    assert len(instances) == (1 if repeatable else 2)
    assert len(set(nonces)) == (1 if repeatable else 24)
