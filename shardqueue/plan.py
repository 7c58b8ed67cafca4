"""A plan as its learners see it: identifiers by position, weights, and what makes two plans the same.

`Plan` wraps any mapping with string keys. A *position* is the place of an identifier among the sorted
identifiers, the order on which all nodes agree; `order` gives the caller's own order, which is a preference.
A lazy grid stays lazy: only arithmetic, no list. Of any other mapping the identifiers are checked and sorted
once; values are looked up when they are asked for.

Two plans are the same when they have the same identifiers with the same content, in any order. The content of
a value is, for a `Unit`, its four numbers under a tag of its own (so it differs from a dict that looks like
it); for JSON (tuples count as lists), its canonical text; of anything else nothing, its identifier alone
counts. The fingerprint is the sum, modulo 2**256, of one hash a unit. Lazy plans are compared by their runs
or their arguments instead, which costs nothing at 10**7 units.
"""

from __future__ import annotations

import json
import re
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

from shardqueue.errors import InvalidInputError
from shardqueue.units import LazyUnits, Unit, UnitFiles, rebuild

if TYPE_CHECKING:
    from shardqueue.intervals import Intervals

REMEMBERED = 2**17
"""Identifiers whose positions a plan remembers at most: a folder's scan shows the same ones each time."""
_SEGMENT_BYTES = 180
_TOTAL_BYTES = 512
_REFUSED = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff~\\\\]")


def check_identifier(name: object, what: str = "identifier", folders: bool = True) -> str:
    """Return `name` if it may become part of a key in the mailbox.

    Grammar: a non-empty str of segments separated by "/", none of them empty or starting with "."; no "~", backslash,
    control character, line separator or lone surrogate; at most 180 bytes of UTF-8 a segment, 512 in all.

    Args:
        name: what to check.
        what: what to call it in the error.
        folders: whether "/" is allowed.

    Raises:
        InvalidInputError: it is outside the grammar.
    """
    if not isinstance(name, str) or not name:
        raise InvalidInputError(what, name, "a non-empty str", "name it with a short string")
    refused = _REFUSED.search(name)
    if refused is not None:
        bound = f"free of '~', backslashes, control characters and surrogates (has {refused[0]!a})"
        raise InvalidInputError(what, name, bound, "use letters, digits, '.', '_' and '-'")
    segments = name.split("/")
    if len(segments) > 1 and not folders:
        raise InvalidInputError(what, name, "free of '/'", "use '-' instead")
    if any(segment[:1] in ("", ".") for segment in segments):
        bound = "free of empty segments, of segments that start with '.', and of a '/' at either end"
        raise InvalidInputError(
            what, name, bound, "write it as 'a' or 'a/b'" if folders else "write it as 'a-b'"
        )
    longest = max(len(segment.encode()) for segment in segments)
    if longest > _SEGMENT_BYTES or len(name.encode()) > _TOTAL_BYTES:
        bound = f"at most {_SEGMENT_BYTES} bytes in each segment and {_TOTAL_BYTES} in all"
        raise InvalidInputError(what, name, bound, "shorten it, with a hash for what is cut off")
    return name


def _mapping(units: object) -> Mapping[str, object]:
    if isinstance(units, Mapping):
        return units
    remedy = "pass unit_grid(...), unit_ranges(...), unit_files(...) or a dict"
    raise InvalidInputError("units", units, "a mapping from identifier to value", remedy)


def _checked(units: Mapping[Any, object]) -> list[str]:
    names = [check_identifier(name) for name in units]
    if not names:
        raise InvalidInputError("units", units, "a plan of at least one unit", "check what it was made from")
    known = set(names) if any("/" in name for name in names) else set()
    for name in known and names:
        parts = name.split("/")
        for depth in range(1, len(parts)):
            folder = "/".join(parts[:depth])
            if folder in known:
                bound = f"no folder of another (it is one of {name!r})"
                raise InvalidInputError("identifier", folder, bound, "rename one of the two")
    return names


class _Lookup(Protocol):
    """What a plan looks up by position, where it is not lazy."""

    @property
    def natural(self) -> bool: ...
    @property
    def steps(self) -> float: ...
    @property
    def total(self) -> int | None: ...
    def order(self, place: int) -> int: ...
    def identifier(self, position: int) -> str: ...
    def position(self, identifier: object) -> int: ...
    def value(self, position: int) -> object: ...
    def batches(self, position: int) -> int | None: ...
    def weight(self, position: int) -> float: ...
    def span(self, place: int) -> float: ...
    def __len__(self) -> int: ...


class _ListedUnits:
    """What `LazyUnits` offers by position, for a mapping whose identifiers have to be listed."""

    __slots__ = ("_counted", "_names", "_order", "_spans", "_total", "_units", "_whole")

    def __init__(self, units: Mapping[str, object]) -> None:
        own = _checked(units)
        self._units, self._names = units, sorted(own)
        self._order = None if own == self._names else array("q", map(self.position, own))
        self._whole: float | None = None
        self._total: int | None = None
        self._counted = False
        self._spans: array[float] | None = None

    @property
    def natural(self) -> bool:
        return self._order is None

    @property
    def steps(self) -> float:
        if self._whole is None:
            batches: Counter[int] = Counter()
            for value in map(self.value, range(len(self))):
                lanes, count = (value.lanes, value.count) if isinstance(value, Unit) else (1, 1)
                batches[lanes] += count
            self._whole = float(sum(count / lanes for lanes, count in batches.items()))
        return self._whole

    @property
    def total(self) -> int | None:
        if not self._counted:
            counts = [self.batches(position) for position in range(len(self))]
            self._total = None if None in counts else sum(count for count in counts if count is not None)
            self._counted = True
        return self._total

    def order(self, place: int) -> int:
        return self._at(place) if self._order is None else self._order[self._at(place)]

    def identifier(self, position: int) -> str:
        return self._names[self._at(position)]

    def position(self, identifier: object) -> int:
        if isinstance(identifier, str):
            position = bisect_left(self._names, identifier)
            if position < len(self._names) and self._names[position] == identifier:
                return position
        raise KeyError(identifier)

    def value(self, position: int) -> object:
        return self._units[self.identifier(position)]

    def batches(self, position: int) -> int | None:
        value = self.value(position)
        return value.count if isinstance(value, Unit) else None

    def weight(self, position: int) -> float:
        value = self.value(position)
        return value.count / value.lanes if isinstance(value, Unit) else 1.0

    def span(self, place: int) -> float:
        if self._spans is None:
            weights = (self.weight(self.order(before)) for before in range(len(self)))
            self._spans = array("d", accumulate(weights, initial=0.0))
        if not 0 <= place <= len(self):
            raise IndexError(f"place {place} is outside 0 .. {len(self)}")
        return self._spans[place]

    def _at(self, position: int) -> int:
        if not 0 <= position < len(self._names):
            raise IndexError(f"position {position} is outside 0 .. {len(self._names) - 1}")
        return position

    def __len__(self) -> int:
        return len(self._names)


class Plan:
    """Any mapping from identifier to value, as claiming needs it.

    The mapping is kept, not copied: it must not change while the plan is in use.

    Args:
        units: identifier to value.
        agreed: what else all learners must have alike for the units to mean the same to them; JSON.

    Raises:
        InvalidInputError: `units` is not a mapping, is empty, has an identifier outside the grammar of
            `check_identifier`, or one that is a folder of another ("a" beside "a/b").
    """

    __slots__ = ("_agreed", "_fingerprint", "_found", "_index", "_units")

    def __init__(self, units: Mapping[str, object], agreed: Mapping[str, Any] | None = None) -> None:
        self._agreed = dict(agreed or {})
        self._units = _mapping(units)
        self._index: LazyUnits | _Lookup = units if isinstance(units, LazyUnits) else _ListedUnits(units)
        self._fingerprint: str | None = None
        self._found: dict[str, int] = {}

    @property
    def units(self) -> Mapping[str, object]:
        """The mapping that was given."""
        return self._units

    @property
    def origin(self) -> Plan:
        """The plan of which this is what is left (see `remaining`); itself where nothing is trained."""
        return self

    def skipped(self, position: int) -> Intervals | None:  # noqa: ARG002
        """The batches of the unit that are trained already, and do not count; None if there are none."""
        return None

    @property
    def natural(self) -> bool:
        """Whether the mapping's own order is the sorted order."""
        return isinstance(self._index, LazyUnits) or self._index.natural

    @property
    def steps(self) -> float:
        """The sum of all weights: dataset steps, or the number of units where the values are not `Unit`s."""
        return float(self._index.steps)

    @property
    def total(self) -> int | None:
        """How many batches all units have, or None where the plan cannot know; of a listed plan counted once."""
        return self._index.total

    @property
    def arguments(self) -> dict[str, Any] | None:
        """What `shardqueue.units.rebuild` makes an equal plan from; None for a plan that was listed."""
        return self._index.arguments if isinstance(self._index, LazyUnits) else None

    def __len__(self) -> int:
        return len(self._index)

    def identifier(self, position: int) -> str:
        """The identifier at a position among the sorted identifiers.

        Raises:
            IndexError: the position is outside `0 .. len - 1`.
        """
        return self._index.identifier(position)

    def position(self, identifier: str) -> int:
        """The position of an identifier.

        Raises:
            KeyError: it is not in the plan.
        """
        return self._index.position(identifier)

    def find(self, identifier: str) -> int | None:
        """The position of an identifier, or None where it is not in the plan."""
        try:
            return self._index.position(identifier)
        except KeyError:
            return None

    def find_all(self, identifiers: Sequence[str]) -> list[int | None]:
        """`find` of each; what was found before is remembered, since listings show the same ones again."""
        found = list(map(self._found.get, identifiers))
        if None in found:
            if len(self._found) > REMEMBERED:
                self._found.clear()
            for place, identifier in enumerate(identifiers):
                if found[place] is None:
                    position = found[place] = self.find(identifier)
                    if position is not None:
                        self._found[identifier] = position
        return found

    def order(self, place: int) -> int:
        """The position of the unit that is at `place` in the caller's own order.

        Raises:
            IndexError: the place is outside `0 .. len - 1`.
        """
        if not isinstance(self._index, LazyUnits):
            return self._index.order(place)
        if not 0 <= place < len(self):
            raise IndexError(f"place {place} is outside 0 .. {len(self) - 1}")
        return place

    def value(self, position: int) -> object:
        """The value at a position: what the loader is given.

        Raises:
            IndexError: the position is outside `0 .. len - 1`.
        """
        return self._index.value(position)

    def weight(self, position: int) -> float:
        """The unit's work in dataset steps, a lane counting as its share of one; 1.0 if it is not a `Unit`.

        Raises:
            IndexError: the position is outside `0 .. len - 1`.
        """
        return self._index.weight(position)

    def span(self, place: int) -> float:
        """The weight of the units before `place` in the caller's own order, which may be the end.

        0.0 at 0 and `steps` (within rounding) at `len`. Found by arithmetic in a lazy plan; of any other the
        sums are made at the first call and kept, eight bytes a unit.

        Raises:
            IndexError: the place is outside `0 .. len`.
        """
        return self._index.span(place)

    def batches(self, position: int) -> int | None:
        """How many batches the unit has, or None where the plan cannot know.

        A `Unit` has `count`; one of `unit_ranges` has its rows over `batch_rows`, rounded up.

        Raises:
            IndexError: the position is outside `0 .. len - 1`.
        """
        return self._index.batches(position)

    def fingerprint(self) -> str:
        """Hash of identifiers and content, whatever the order: 64 hexadecimal digits, "-", number of units.

        Takes time in proportion to the number of units, once, and constant memory.
        """
        if self._fingerprint is None:
            whole = 0
            for name, value in self._units.items():
                whole += int.from_bytes(blake2b(_content(name, value), digest_size=32).digest())
            self._fingerprint = f"{whole % 2**256:064x}-{len(self)}"
        return self._fingerprint

    def signature(self) -> dict[str, Any]:
        """What a manifest says about this plan; JSON.

        `units`: how many; `arguments`: what a lazy plan can be rebuilt from, else None; `fingerprint`: of a
        plan that was listed, else None; `agreed`: as given, if anything was.
        """
        arguments = self.arguments
        fingerprint = self.fingerprint() if arguments is None else None
        signature = {"units": len(self), "arguments": arguments, "fingerprint": fingerprint}
        return {**signature, "agreed": self._agreed} if self._agreed else signature

    def matches(self, signature: Mapping[str, Any]) -> bool:
        """Whether the plan with this signature is the same as this one, in any order.

        Cheap when the counts or the arguments decide; otherwise every unit is looked at, up to the first that
        differs where one side is lazy.

        Raises:
            InvalidInputError: the signature has neither usable arguments nor a fingerprint.
        """
        arguments, fingerprint = signature.get("arguments"), signature.get("fingerprint")
        if signature.get("units") != len(self) or signature.get("agreed", {}) != self._agreed:
            return False
        if isinstance(arguments, Mapping):
            return arguments == self.arguments or rebuild(arguments) == self._units
        if isinstance(fingerprint, str):
            return fingerprint == self.fingerprint()
        bound = "a signature with arguments or a fingerprint"
        raise InvalidInputError("signature", dict(signature), bound, "pass what Plan.signature() gave")

    def describe(self) -> str:
        """One short line for messages."""
        known = isinstance(self._units, (LazyUnits, UnitFiles))
        made = repr(self._units) if known else type(self._units).__name__
        return f"{made}: {len(self)} unit{'' if len(self) == 1 else 's'}"

    def __repr__(self) -> str:
        return f"<Plan {self.describe()}>"


def _content(name: str, value: object) -> bytes:
    tag, plain = b"json", value
    if isinstance(value, Unit):
        tag, plain = b"unit", [value.first, value.count, value.lane, value.lanes]
    try:
        text = json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return name.encode() + b"\0"
    return name.encode() + b"\0" + tag + text.encode()
