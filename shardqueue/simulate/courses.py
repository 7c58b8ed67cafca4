"""What happens to the nodes: `A@30=0.25` and the like, read and made into `Node`s.

Slow-downs and pauses of one node may overlap: while it pauses its speed is 0, afterwards the last one said.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

from shardqueue.errors import InvalidInputError
from shardqueue.simulate import Node
from shardqueue.simulate.grammar import LEAST_SPEED, MOST_SECONDS, MOST_SPEED, number
from shardqueue.simulate.scenario import gone, node_name

if TYPE_CHECKING:
    from collections.abc import Sequence

_FORMS = {
    "slow": "NODE@SECONDS=SPEED",
    "pause": "NODE@SECONDS..SECONDS",
    "die": "NODE@SECONDS",
    "leave": "NODE@SECONDS",
    "join": "NODE@SECONDS",
}
_EXAMPLES = {"slow": "A@30=0.25", "pause": "A@30..60", "die": "A@30", "leave": "A@50%", "join": "A@30"}


@dataclass(slots=True)
class _Course:
    """What happens to one node."""

    speed: float
    slows: list[tuple[float, float]] = field(default_factory=list)
    pauses: list[tuple[float, float]] = field(default_factory=list)
    once: dict[str, float] = field(default_factory=dict)

    def node(self) -> Node:
        turns = sorted({*(at for at, _ in self.slows), *(turn for pause in self.pauses for turn in pause)})
        return Node(
            self.speed,
            joins=self.once.get("join", 0.0),
            changes=tuple((at, self._at(at)) for at in turns),
            dies=self.once.get("die"),
            leaves=self.once.get("leave"),
        )

    def _at(self, time: float) -> float:
        if any(begin <= time < end for begin, end in self.pauses):
            return 0.0
        return max(((at, speed) for at, speed in self.slows if at <= time), default=(0.0, self.speed))[1]


class Courses:
    """The nodes, and what is said of them.

    Args:
        speeds: of the nodes.
        undisturbed: seconds of which times in per cent are a part.
    """

    def __init__(self, speeds: Sequence[float], undisturbed: float) -> None:
        self._courses = [_Course(speed) for speed in speeds]
        self._undisturbed = undisturbed

    def read(self, kind: str, text: str) -> None:
        """Take in one event: `--slow A@30=0.25` is `read("slow", "A@30=0.25")`."""
        who, at, what = text.partition("@")
        if not at:
            _misread(kind, text)
        for place in self._selected(kind, text, who.strip()):
            self._happens(kind, text, self._courses[place], what)

    def nodes(self) -> tuple[Node, ...]:
        """Return the nodes as they come, change and go.

        Raises:
            InvalidInputError: one goes before it comes.
        """
        nodes = tuple(course.node() for course in self._courses)
        for place, node in enumerate(nodes):
            if node.joins and gone(node) <= node.joins:
                shown = f"{node_name(place, len(nodes))}@{gone(node):g}"
                bound = f"after the node has joined, at {node.joins:g} s"
                raise InvalidInputError(
                    "leave" if node.dies is None else "die", shown, bound, "pass a later time"
                )
        return nodes

    def _happens(self, kind: str, text: str, course: _Course, what: str) -> None:
        if kind == "slow":
            when, equals, speed = what.partition("=")
            if not equals:
                _misread(kind, text)
            remedy = "pass --slow A@30=0.25; what stops for a while is --pause A@30..60"
            course.slows.append(
                (self._time(kind, when), number(kind, speed, LEAST_SPEED, MOST_SPEED, remedy))
            )
        elif kind == "pause":
            begin, dots, end = what.partition("..")
            if not dots:
                _misread(kind, text)
            stretch = self._time(kind, begin), self._time(kind, end)
            if not stretch[0] < stretch[1]:
                raise InvalidInputError(kind, text, "from an earlier time to a later one", "pass A@30..60")
            course.pauses.append(stretch)
        elif kind in course.once or {kind, *course.once} >= {"die", "leave"}:
            raise InvalidInputError(
                kind, text, "said once for a node, and not with its other end", "keep one"
            )
        else:
            course.once[kind] = self._time(kind, what)

    def _selected(self, kind: str, text: str, who: str) -> range:
        first, dash, last = who.partition("-")
        begin, end = self._place(first), self._place(last if dash else first)
        if begin is None or end is None or begin > end:
            nodes = len(self._courses)
            least, most = node_name(0, nodes), node_name(nodes - 1, nodes)
            bound = f"of a node from {least} to {most}, or of several such as A-C or 1-3"
            raise InvalidInputError(kind, text, bound, f"pass --{kind} {_EXAMPLES[kind]}")
        return range(begin, end + 1)

    def _place(self, text: str) -> int | None:
        letter = re.fullmatch(r"[A-Za-z]", text)
        digits = re.fullmatch(r"[0-9]{1,9}", text)
        place = ord(text.upper()) - ord("A") if letter else int(text) - 1 if digits else -1
        return place if 0 <= place < len(self._courses) else None

    def _time(self, kind: str, text: str) -> float:
        part = text.strip().removesuffix("%")
        remedy = f"pass seconds or per cent of the limit, as in --{kind} {_EXAMPLES[kind]}"
        value = number(kind, part, 0.0, MOST_SECONDS, remedy)
        return value / 100 * self._undisturbed if part != text.strip() else value


def _misread(kind: str, text: str) -> NoReturn:
    raise InvalidInputError(kind, text, f"written {_FORMS[kind]}", f"pass --{kind} {_EXAMPLES[kind]}")
