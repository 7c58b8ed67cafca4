"""Units, and the plans that cut a dataset into them.

A `Unit` is a claimable piece of the dataset; a plan maps identifiers to units. The plans made here are cut
coarse at first and fine towards the end (`taper`), so that the last units to finish are short whatever the
speeds of the learners.

`unit_grid` and `unit_ranges` are arithmetic. Groups of equal size form a run, a plan stores its runs, and
every lookup is a bisection: memory grows with the number of distinct sizes (of the order of the logarithm of
`unit_steps`), never with the number of units. Identifiers have one width, so their sorted order is the order
of the plan.

`unit_files` keeps its list. An identifier there depends on its URL alone, so nodes that list a folder in
different orders agree; of a URL only the base name of its path can be read off an identifier.

Plans never change and hold no open resources; they pickle, the arithmetic ones as their arguments.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, SupportsIndex

from shardqueue.errors import InvalidInputError

Arguments = dict[str, int | bool | str]

_LARGEST = 2**53  # the integers that JSON readers agree on
_HASH_BYTES = 8
_NAME_CHARS = 80


def check_flag(name: str, value: object) -> bool:
    """Check that an argument is a bool.

    Raises:
        InvalidInputError: it is something else.
    """
    if not isinstance(value, bool):
        raise InvalidInputError(name, value, "True or False", "pass a bool")
    return value


def check_int(name: str, value: object, low: int, high: int = _LARGEST) -> int:
    """Return `value` if it is an int from `low` to `high`.

    Raises:
        InvalidInputError: it is not.
    """
    remedy = "pass a plain int, int(...) makes one"
    if isinstance(value, int) and not isinstance(value, bool):
        if low <= value <= high:
            return int(value)
        remedy = f"pass at least {low}" if value < low else f"pass at most {high}"
    raise InvalidInputError(name, value, f"an int from {low} to {high}", remedy)


def check_count(name: str, value: SupportsIndex) -> int:
    """Return `value`, any kind of integer, as an int of 0 or more.

    Raises:
        InvalidInputError: it is not one.
    """
    try:
        count = -1 if isinstance(value, bool) else value.__index__()
    except (AttributeError, TypeError):
        count = -1
    if not 0 <= count <= _LARGEST:
        raise InvalidInputError(name, value, f"a whole number from 0 to {_LARGEST}", "pass an int")
    return int(count)


def _check_taper(taper: object) -> int | bool:
    if taper is False:
        return False
    if taper is True:
        bound = "the number of learners the tail is cut for, or False"
        raise InvalidInputError("taper", taper, bound, "pass a number such as taper=64, not a switch")
    return check_int("taper", taper, 1)


@dataclass(frozen=True, slots=True)
class Unit:
    """Lane `lane` of `lanes` of the dataset steps `first .. first + count - 1`.

    The lane names the data (which slice of each global batch), never a machine. In a plan of row ranges the
    "steps" are rows and there is one lane.

    Attributes:
        first: the first dataset step, from 0.
        count: how many steps, at least 1.
        lane: from 0 to `lanes - 1`.
        lanes: how many lanes each step has, at least 1.

    Raises:
        InvalidInputError: an attribute is not an int, or out of range.
    """

    first: int
    count: int
    lane: int
    lanes: int

    def __post_init__(self) -> None:
        check_int("first", self.first, 0)
        check_int("count", self.count, 1)
        check_int("lanes", self.lanes, 1)
        check_int("lane", self.lane, 0, self.lanes - 1)

    @property
    def steps(self) -> range:
        """The dataset steps, in order."""
        return range(self.first, self.first + self.count)


class Step(int):
    """A dataset step that still knows where it came from.

    It is an int in every respect (equality, hash, repr, formatting); arithmetic gives plain ints. Pickling
    and copying keep the attributes.

    Attributes:
        unit: identifier of the unit the batch belongs to.
        attempt: which claim of that unit handed it out, from 0.
        index: place of the batch in the unit, from 0.
        pass_: name of the pass, "" for the first.
        worker: "main", or the number of the loader worker that loaded it.
    """

    unit: str
    attempt: int
    index: int
    pass_: str
    worker: str

    def __new__(
        cls,
        value: int,
        unit: str,
        attempt: int = 0,
        index: int = 0,
        pass_: str = "",
        worker: str = "main",
    ) -> Step:
        """See the class."""
        step = super().__new__(cls, value)
        step.unit, step.attempt, step.index, step.pass_, step.worker = unit, attempt, index, pass_, worker
        return step

    def __reduce__(self) -> tuple[type[Step], tuple[int, str, int, int, str, str]]:
        return type(self), (int(self), self.unit, self.attempt, self.index, self.pass_, self.worker)


def _runs(steps: int, unit_steps: int, lanes: int, taper: int | bool) -> Iterator[tuple[int, int]]:
    """Yield `(size, groups)` runs that cover `steps`, each of smaller size than the one before.

    Factoring (Hummel, Schonberg, Flynn 1992): one size for a whole round of `taper` units, a share of what is
    left at its start. A round has at least `-(-taper // lanes)` groups and begins with `needed` steps left.
    """
    left, a_round = steps, -(-taper // lanes) if taper else 1
    while left:
        size = min(unit_steps, left)
        needed = size
        if taper:
            size = min(size, max(1, left * lanes // (3 * taper)))
            needed = max(size, -(-3 * taper * size // lanes)) if size > 1 else 1
        rounds = (left - needed) // (size * a_round) + 1
        groups = min(rounds * a_round, left // size)
        yield size, groups
        left -= size * groups


def _row_runs(runs: Iterable[tuple[int, int]], rows: int, batch_rows: int) -> Iterator[tuple[int, int]]:
    """Scale runs of batches to runs of rows; the last unit ends at `rows`."""
    left = rows
    for size, groups in runs:
        whole = min(groups, left // (size * batch_rows))
        if whole:
            yield size * batch_rows, whole
        left -= whole * size * batch_rows
        if whole < groups:
            yield left, 1


class LazyUnits(Mapping[str, Unit]):
    """An ordered mapping from identifier to `Unit` that is computed, not stored.

    Made by `unit_grid` and `unit_ranges`. Order: by group, then by lane, which is the sorted order of the
    identifiers. A *position* is a place in that order, from 0.
    """

    __slots__ = (
        "_arguments",
        "_batch_rows",
        "_firsts",
        "_lanes",
        "_length",
        "_pattern",
        "_sizes",
        "_starts",
        "_widths",
    )

    def __init__(
        self, runs: Iterable[tuple[int, int]], lanes: int, batch_rows: int, arguments: Arguments
    ) -> None:
        self._starts, self._firsts, self._sizes = array("q", [0]), array("q", [0]), array("q")
        for size, groups in runs:
            self._sizes.append(size)
            self._starts.append(self._starts[-1] + groups)
            self._firsts.append(self._firsts[-1] + size * groups)
        self._lanes, self._batch_rows, self._arguments = lanes, batch_rows, arguments
        self._length = self._starts[-1] * lanes
        self._widths = max(6, len(str(self._starts[-1] - 1))), len(str(lanes - 1))
        group, lane = self._widths
        self._pattern = re.compile(rf"([0-9]{{{group}}})-([0-9]{{{lane}}})\.json")

    @property
    def arguments(self) -> Arguments:
        """What `rebuild` makes an equal plan from; JSON."""
        return dict(self._arguments)

    @property
    def steps(self) -> int:
        """Dataset steps in the plan; for row ranges, batches of `batch_rows` rows."""
        return -(-self._firsts[-1] // self._batch_rows)

    @property
    def total(self) -> int:
        """Batches in the plan: those of all its lanes."""
        return self.steps * self._lanes

    def identifier(self, position: int) -> str:
        """The identifier at a position.

        Raises:
            IndexError: the position is outside `0 .. len - 1`.
        """
        group, lane = self._place(position)
        return self._name(group, lane)

    def position(self, identifier: object) -> int:
        """The position of an identifier.

        Raises:
            KeyError: it is not in the plan.
        """
        match = self._pattern.fullmatch(identifier) if isinstance(identifier, str) else None
        if match is None:
            raise KeyError(identifier)
        group, lane = int(match[1]), int(match[2])
        if group >= self._starts[-1] or lane >= self._lanes:
            raise KeyError(identifier)
        return group * self._lanes + lane

    def value(self, position: int) -> Unit:
        """The unit at a position.

        Raises:
            IndexError: the position is outside `0 .. len - 1`.
        """
        group, lane = self._place(position)
        run = bisect_right(self._starts, group) - 1
        size = self._sizes[run]
        return Unit(self._firsts[run] + (group - self._starts[run]) * size, size, lane, self._lanes)

    def batches(self, position: int) -> int:
        """How many batches the unit at a position has: its steps, or its rows over `batch_rows`.

        Raises:
            IndexError: the position is outside `0 .. len - 1`.
        """
        group, _ = self._place(position)
        return -(-self._sizes[bisect_right(self._starts, group) - 1] // self._batch_rows)

    def weight(self, position: int) -> float:
        """The unit's share of `steps`: its batches over the number of lanes.

        Raises:
            IndexError: the position is outside `0 .. len - 1`.
        """
        return self.batches(position) / self._lanes

    def span(self, place: int) -> float:
        """The weight of all units before a place, which may be the end: 0.0 at 0, `steps` at `len`.

        Raises:
            IndexError: the place is outside `0 .. len`.
        """
        if place == self._length:
            return float(self.steps)
        group, lane = self._place(place)
        run = bisect_right(self._starts, group) - 1
        first = self._firsts[run] + (group - self._starts[run]) * self._sizes[run]
        return first / self._batch_rows + lane * self.weight(place)

    def _place(self, position: int) -> tuple[int, int]:
        if not 0 <= position < self._length:
            raise IndexError(f"position {position} is outside 0 .. {self._length - 1}")
        return divmod(position, self._lanes)

    def _name(self, group: int, lane: int) -> str:
        return f"{group:0{self._widths[0]}d}-{lane:0{self._widths[1]}d}.json"

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[str]:
        for group in range(self._starts[-1]):
            for lane in range(self._lanes):
                yield self._name(group, lane)

    def __getitem__(self, identifier: str) -> Unit:
        return self.value(self.position(identifier))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, LazyUnits):
            mine = self._lanes, self._starts, self._firsts
            return mine == (other._lanes, other._starts, other._firsts)
        if not isinstance(other, Mapping):
            return NotImplemented
        return len(self) == len(other) and all(
            name in other and isinstance(other[name], Unit) and other[name] == unit
            for name, unit in self.items()
        )

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value}" for name, value in self._arguments.items() if name != "kind")
        return f"{self._arguments['kind']}({given})"

    def __reduce__(self) -> tuple[object, tuple[Arguments]]:
        return rebuild, (self._arguments,)


def unit_grid(steps: int, unit_steps: int, lanes: int = 1, taper: int | bool = 64) -> LazyUnits:
    """Cut `steps` dataset steps of `lanes` lanes each into units of at most `unit_steps` steps.

    Identifiers are `"000003-2.json"`: group, lane. Together the units hold every (step, lane) exactly once.

    Args:
        steps: dataset steps (global batches), at least 1.
        unit_steps: the most steps a unit may have.
        lanes: local batches each dataset step is made of.
        taper: the number of learners the tail is cut for. Each round of `taper` units takes about a third of
            the local batches that are left: a unit of it has at most a third of (local batches left at the
            round's start / `taper`) steps, and at least one. `False`: equal units, the last may be shorter.

    Raises:
        InvalidInputError: an argument is not an int, or out of range.
    """
    lanes = check_int("lanes", lanes, 1)
    steps = check_int("steps", steps, 1, _LARGEST // lanes)
    unit_steps, taper = check_int("unit_steps", unit_steps, 1), _check_taper(taper)
    arguments: Arguments = {
        "kind": "unit_grid",
        "steps": steps,
        "unit_steps": unit_steps,
        "lanes": lanes,
        "taper": taper,
    }
    return LazyUnits(_runs(steps, unit_steps, lanes, taper), lanes, 1, arguments)


def unit_ranges(rows: int, rows_per_unit: int, batch_rows: int = 1, taper: int | bool = 64) -> LazyUnits:
    """Cut `rows` rows into ranges: `Unit(first=row, count=rows, lane=0, lanes=1)`.

    Identifiers are those of a grid of one lane. Ranges begin at a multiple of `batch_rows`; the last may
    end in the middle of a batch.

    Args:
        rows: rows in the dataset, at least 1.
        rows_per_unit: the most rows a unit may have, a multiple of `batch_rows`.
        batch_rows: rows the loader puts in one batch: units are cut, and their work counted, in these.
        taper: as for `unit_grid`, in batches.

    Raises:
        InvalidInputError: an argument is not an int, out of range, or `rows_per_unit` is no multiple.
    """
    rows, batch_rows = check_int("rows", rows, 1), check_int("batch_rows", batch_rows, 1)
    rows_per_unit, taper = check_int("rows_per_unit", rows_per_unit, 1), _check_taper(taper)
    if rows_per_unit % batch_rows:
        nearest = max(1, round(rows_per_unit / batch_rows)) * batch_rows
        bound = f"a multiple of batch_rows={batch_rows}"
        raise InvalidInputError("rows_per_unit", rows_per_unit, bound, f"pass {nearest}")
    arguments: Arguments = {
        "kind": "unit_ranges",
        "rows": rows,
        "rows_per_unit": rows_per_unit,
        "batch_rows": batch_rows,
        "taper": taper,
    }
    runs = _runs(-(-rows // batch_rows), rows_per_unit // batch_rows, 1, taper)
    return LazyUnits(_row_runs(runs, rows, batch_rows), 1, batch_rows, arguments)


def rebuild(arguments: Mapping[str, Any]) -> LazyUnits:
    """Make the plan whose `arguments` these are; they may come from JSON that somebody else wrote.

    Raises:
        InvalidInputError: another kind, other names, or a value out of range.
    """
    given = {name: value for name, value in arguments.items() if name != "kind"}
    if arguments.get("kind") == "unit_grid" and given.keys() == {"steps", "unit_steps", "lanes", "taper"}:
        return unit_grid(**given)
    names = {"rows", "rows_per_unit", "batch_rows", "taper"}
    if arguments.get("kind") == "unit_ranges" and given.keys() == names:
        return unit_ranges(**given)
    bound = "the arguments of unit_grid or unit_ranges"
    raise InvalidInputError("arguments", dict(arguments), bound, "use the version that wrote them")


class UnitFiles(Mapping[str, str]):
    """An ordered mapping from identifier to URL. Made by `unit_files`."""

    __slots__ = ("_urls",)

    def __init__(self, urls: dict[str, str]) -> None:
        self._urls = urls

    @property
    def arguments(self) -> None:
        """None: a list of files cannot be made again from a few arguments."""
        return

    def __len__(self) -> int:
        return len(self._urls)

    def __iter__(self) -> Iterator[str]:
        return iter(self._urls)

    def __getitem__(self, identifier: str) -> str:
        return self._urls[identifier]

    def __repr__(self) -> str:
        return f"unit_files(<{len(self)} urls>)"


def unit_files(urls: Iterable[str]) -> UnitFiles:
    """Make each file a unit: identifier to URL, in the order given.

    An identifier is the base name of the URL's path, made safe and cut to 80 characters, and a short hash of
    the whole URL: `"part_7.parquet-1f0a2b3c4d"`. It depends on the URL alone, so nodes may give the same
    URLs in any order.

    Args:
        urls: of the files; `load` gets one of them.

    Raises:
        InvalidInputError: no URL, one given twice, or one that is not a non-empty string.
    """
    if isinstance(urls, str):
        raise InvalidInputError("urls", "<a single str>", "an iterable of str", "put the URL in a list")
    named: dict[str, str] = {}
    for place, url in enumerate(urls):
        name = _file_identifier(place, url)
        if name in named:
            bound = "distinct URLs" if named[name] == url else "URLs whose identifiers differ"
            remedy = "pass each URL once" if named[name] == url else "rename one of the two files"
            raise InvalidInputError("urls", name, bound, remedy)
        named[name] = url
    if not named:
        raise InvalidInputError("urls", [], "at least one URL", "check the pattern they were listed with")
    return UnitFiles(named)


def _file_identifier(place: int, url: object) -> str:
    if not isinstance(url, str) or not url:
        shown = type(url).__name__ if not isinstance(url, str) else url
        raise InvalidInputError(f"urls[{place}]", shown, "a non-empty str", "pass str(...) of each path")
    path = url
    if "://" in url:
        path = re.split("[?#]", url.partition("://")[2])[0].partition("/")[2]
    base = re.sub(r"[^A-Za-z0-9._-]+", "_", path.rstrip("/").rpartition("/")[2])[:_NAME_CHARS] or "file"
    digest = blake2b(url.encode("utf-8", "surrogatepass"), digest_size=_HASH_BYTES)
    return f"{base}-{digest.hexdigest()}"
