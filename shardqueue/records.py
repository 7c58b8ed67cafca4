"""Every key in the mailbox and what is stored under it.

    runs/{run}.json                           Manifest     created once, by whoever opens the run
    [run-{run}/]learners/{learner}~{instance}/{process}.{page}
                                              LogPage      overwritten by its owner alone
    [run-{run}/]learners/{learner}~{instance}/grade.{n}.{grade}
                                              GradeRecord  created once: the learner's n-th grade, a hint
    [run-{run}/]learners/{learner}~{instance}/whole.{pass}
                                              WholeRecord  created once: every unit of the pass is trained
    [run-{run}/][{pass}/]units/{id}           ClaimRecord  created once: attempt 0 of a unit
                         units/{id}~{n}       ClaimRecord  created once: attempt n, after back/{id}~{n-1}
                         back/{id}~{n}        BackRecord   created once: the end of attempt n

Run 1 and the first pass have no folder of their own. Records are JSON with a fixed schema; anything else
under these keys is a `RecordError`, never interpreted. Claims are never deleted and keys never reused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec

from shardqueue.errors import RecordError

PROTOCOL = 1
RUNS = "runs/"
GRADE = "grade"
WHOLE = "whole"
_FIRST_PASS = "e0"
LARGEST = 16 * 2**20
PASS_NAME = re.compile("([a-z]+[0-9]+)?")
"""What a pass can be called; whatever else a log says is none."""

Left = Literal["end", "early", "error"]


@dataclass(frozen=True, slots=True)
class RunKeys:
    """Keys of one run."""

    run: str

    @property
    def manifest(self) -> str:
        """The key that opens the run."""
        return f"{RUNS}{self.run}.json"

    @property
    def folder(self) -> str:
        """What every other key of the run starts with."""
        return "" if self.run == "1" else f"run-{self.run}/"

    @property
    def learners(self) -> str:
        """What the keys of all logs start with."""
        return f"{self.folder}learners/"

    def log(self, learner: str, instance: str, process: str, page: int) -> str:
        """The key of one page of a learner's log."""
        return f"{self.learners}{learner}~{instance}/{process}.{page:06d}"

    def parse_log(self, key: str) -> tuple[str, str, str, int] | None:
        """Return (learner, instance, process, page), or None when `key` is no log's."""
        learner, instance, name = self._of_learner(key)
        process, _, page = name.partition(".")
        written = page.isascii() and page.isdecimal() and page == f"{int(page):06d}"
        return (learner, instance, process, int(page)) if learner and process and written else None

    def grade(self, learner: str, instance: str, number: int, grade: int) -> str:
        """The key that says by its name alone what a learner's `number`-th grade (see `pace.Pace`) is."""
        return f"{self.learners}{learner}~{instance}/{GRADE}.{number}.{grade}"

    def parse_grade(self, key: str) -> tuple[str, str, int, int] | None:
        """Return (learner, instance, number, grade), or None when `key` is no grade's."""
        learner, instance, name = self._of_learner(key)
        kind, _, rest = name.partition(".")
        number, _, grade = rest.partition(".")
        counted, size = _number(number), _number(grade.removeprefix("-"))
        if not learner or kind != GRADE or counted is None or size is None or grade == "-0":
            return None
        return learner, instance, counted, int(grade)

    def whole(self, learner: str, instance: str, pass_: str) -> str:
        """The key by which a learner says that it saw every unit of a pass trained whole."""
        return f"{self.learners}{learner}~{instance}/{WHOLE}.{pass_ or _FIRST_PASS}"

    def parse_whole(self, key: str) -> tuple[str, str, str] | None:
        """Return (learner, instance, pass), or None when `key` says no such thing."""
        learner, instance, name = self._of_learner(key)
        kind, _, pass_ = name.partition(".")
        if not learner or kind != WHOLE or not pass_ or "/" in pass_:
            return None
        return learner, instance, "" if pass_ == _FIRST_PASS else pass_

    def _of_learner(self, key: str) -> tuple[str, str, str]:
        """Learner, instance and the rest of a key under `learners`; three times nothing if it is none."""
        owner, _, name = _behind(self.learners, key).partition("/")
        learner, _, instance = owner.partition("~")
        return (learner, instance, name) if learner and instance and "~" not in instance else ("", "", "")

    def pass_keys(self, name: str = "") -> PassKeys:
        """Keys of one pass; the first pass has no name."""
        return PassKeys(f"{self.folder}{name}/" if name else self.folder, name)


@dataclass(frozen=True, slots=True)
class PassKeys:
    """Keys of one pass over a plan."""

    folder: str
    name: str

    @property
    def units(self) -> str:
        """What every claim's key starts with."""
        return f"{self.folder}units/"

    @property
    def backs(self) -> str:
        """What every give-back record's key starts with."""
        return f"{self.folder}back/"

    def claim(self, identifier: str, attempt: int = 0) -> str:
        """The key of the claim of one attempt at a unit."""
        return f"{self.folder}units/{identifier}~{attempt}" if attempt else f"{self.folder}units/{identifier}"

    def back(self, identifier: str, attempt: int) -> str:
        """The key of the record that ends one attempt at a unit."""
        return f"{self.folder}back/{identifier}~{attempt}"

    def parse_claim(self, key: str) -> tuple[str, int] | None:
        """Return (identifier, attempt), or None when `key` is no claim's."""
        identifier, mark, attempt = _behind(self.units, key).partition("~")
        number = (_number(attempt) or None) if mark else 0
        return None if not identifier or number is None else (identifier, number)

    def parse_back(self, key: str) -> tuple[str, int] | None:
        """Return (identifier, attempt), or None when `key` is no give-back record's."""
        identifier, _, attempt = _behind(self.backs, key).partition("~")
        number = _number(attempt)
        return None if not identifier or number is None else (identifier, number)


def pass_name(number: int, stage: str = "") -> str:
    """Return the name of a pass, which is its folder in the mailbox; the first one of training has none."""
    return f"{stage}{number}" if stage else f"e{number}" if number else ""


def pass_number(name: str) -> int | None:
    """Return the number of a training pass; None for one of another stage."""
    number = _number(name[1:]) if name.startswith("e") else None
    return number if name else 0


def _behind(prefix: str, key: str) -> str:
    """What follows `prefix`; nothing when the key does not start with it."""
    return key[len(prefix) :] if key.startswith(prefix) else ""


def _number(text: str) -> int | None:
    """The number that is written like this and in no other way, or None."""
    return int(text) if text.isascii() and text.isdecimal() and (text == "0" or text[0] != "0") else None


class _Record(msgspec.Struct, frozen=True, tag_field="kind", kw_only=True):
    """JSON with a fixed schema."""

    what: ClassVar[str]

    def encode(self) -> bytes:
        """The record's bytes."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes, key: str) -> Self:
        """Read a record back.

        Raises:
            RecordError: `data`, found under `key`, is not such a record.
        """
        if len(data) > LARGEST:
            raise RecordError(f"{key}: {len(data)} bytes; {cls.what} has at most {LARGEST}; this is not ours")
        try:
            return msgspec.json.decode(data, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RecordError(
                f"{key}: not {cls.what} of this protocol ({error}); point the mailbox at a prefix of its own"
            ) from None


class Manifest(_Record, frozen=True, tag="shardqueue.run", kw_only=True):
    """What opens a run: which plans it hands out, and a random id that tells it from any other run.

    `plans` maps a plan's name ("train", "val", ...) to its signature, `state` is what was trained before (see
    `state`), and after `reclaim_after` seconds of silence a learner's units are handed out again, None for never.
    """

    what: ClassVar[str] = "a manifest"
    protocol: int
    run_id: str
    plans: dict[str, dict[str, Any]]
    opened_by: str
    wall: float
    state: dict[str, Any] | None = None
    reclaim_after: float | None = None


class ClaimRecord(_Record, frozen=True, tag="shardqueue.claim", kw_only=True):
    """Who claimed; the nonce alone decides whose it is."""

    what: ClassVar[str] = "a claim"
    learner: str
    instance: str
    worker: str
    nonce: str
    sequence: int


class BackRecord(_Record, frozen=True, tag="shardqueue.back", kw_only=True):
    """The end of an attempt: the next one begins at batch `begin` of the unit (counted from 0)."""

    what: ClassVar[str] = "a give-back record"
    begin: Annotated[int, msgspec.Meta(ge=0)]
    learner: str
    instance: str
    why: str


class GradeRecord(_Record, frozen=True, tag="shardqueue.grade", kw_only=True):
    """How fast a learner is (see `pace.Pace`). Its key says it too, so that one listing tells everybody's."""

    what: ClassVar[str] = "a grade"
    grade: int


class WholeRecord(_Record, frozen=True, tag="shardqueue.whole", kw_only=True):
    """Every unit of a pass is trained, `units` in all. Its key says so by its name alone."""

    what: ClassVar[str] = "a note that a pass is trained"
    units: int


class TrainedSpan(msgspec.Struct, frozen=True, array_like=True):
    """Batches `[begin, end)` of one attempt, trained by one process. Batches count from 0 in the unit, or (in a run
    that goes on from a state) in what was left of it. A page written later may hold the same span with more in it.

    `waited` are the seconds this span's consumer waited for data; `start` and `stop` are wall-clock seconds.
    `global_step` is the optimizer's at its last batch. `whole`: the unit is trained to its end. `ticks`: where ranks
    step together, at which step of the pass each batch was: `(first, stride, count)` after one another.
    """

    pass_: str
    unit: str
    attempt: int
    begin: int
    end: int
    samples: int
    waited: float
    start: float
    stop: float
    global_step: int | None = None
    whole: bool = False
    ticks: list[int] = []


class HeldClaim(msgspec.Struct, frozen=True, array_like=True):
    """A claim whose unit is not trained whole yet."""

    pass_: str
    unit: str
    attempt: int


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """What a process did so far; seconds by the monotonic clock.

    `repeated`: batches it trained of attempts that others had ended, as far as it noticed. `reclaimed`: attempts of
    silent learners that it ended.
    """

    claimed: int = 0
    batches: int = 0
    samples: int = 0
    elapsed: float = 0.0
    waited: float = 0.0
    repeated: int = 0
    reclaimed: int = 0


class Current(msgspec.Struct, frozen=True, kw_only=True):
    """The pass of which a process trained its last batch: what it did of it, and the dataset step of that batch."""

    pass_: str
    batches: int
    samples: int
    step: int


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """Which process on which machine. `boot` names the boot and process namespace in which `pid` counts."""

    host: str
    boot: str
    pid: int
    started: str


class LogPage(_Record, frozen=True, tag="shardqueue.log", kw_only=True):
    """One page of a process's log; a reader takes the union of all its pages.

    `write` counts writes, so that two readings tell whether the owner is alive; they are at most `every` seconds
    apart. `rate` is samples a second over the last minute. `rests`: who left may come back for another pass as long
    as the process `where` lives. `reached`: where ranks step together, the pass and the step of it up to which all
    is trained.
    """

    what: ClassVar[str] = "a learner's log"
    learner: str
    instance: str
    process: str
    page: int
    write: int
    run_id: str
    where: Process
    wall: float
    totals: Totals
    rate: float
    trained: list[TrainedSpan]
    held: list[HeldClaim]
    current: Current | None = None
    reached: tuple[str, int] | None = None
    every: float | None = None
    left: Left | None = None
    rests: bool = False
