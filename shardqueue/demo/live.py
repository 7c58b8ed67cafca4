"""What the visitor sees while it runs: a bar a node on a terminal, a line every few seconds elsewhere.

Counts come from memory that the nodes share; `view` and `line` turn them into text, and the two kinds of `Progress`
show it. On a terminal nothing of it stays, since the timeline that follows says more; in a pipe every line does,
so that a log shows life.
"""

from __future__ import annotations

import math
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from rich.live import Live
from rich.text import Text

from shardqueue.demo.options import labels
from shardqueue.timeline.strips import glyphs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import Console
    from torch import Tensor

    from shardqueue.demo.arithmetic import Slowdown
    from shardqueue.timeline.strips import Glyphs

LINE_EVERY = 3.0
"""Seconds between two lines where there is no terminal."""
WIDEST = 80


class Course(Protocol):
    """What is known of the phases beforehand."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """Their names."""

    @property
    def by_node(self) -> dict[str, float]:
        """Each node's speed at the start."""

    @property
    def slowdown(self) -> Slowdown | None:
        """Who slows down."""

    @property
    def batches(self) -> int:
        """Batches of a phase."""

    def room(self, phase: str) -> int:
        """Batches of the node that trains most of a phase."""

    def seconds(self, phase: str) -> float:
        """Seconds that a phase takes."""


class Progress(Protocol):
    """Told what goes on."""

    def starts(self, phase: str) -> None:
        """The nodes are made ready for a phase."""

    def tick(self) -> None:
        """Time has passed; called a few times a second."""

    def ends(self, seconds: float) -> None:
        """The phase is over, with this makespan."""


@contextmanager
def progress(console: Console, course: Course, done: Tensor) -> Iterator[Progress]:
    """Show who has trained how much (`done`: batches by node) until the block is left."""
    if not console.is_interactive:
        yield Lines(console, course, done)
        return
    with Live(console=console, transient=True, auto_refresh=False) as live:
        yield Bars(live, course, done)


class Bars:
    """A bar a node, drawn over and over."""

    def __init__(self, live: Live, course: Course, done: Tensor) -> None:
        self._live, self._course, self._done, self._phase = live, course, done, ""
        self._glyphs = glyphs(live.console.encoding)

    def starts(self, phase: str) -> None:
        """See `Progress.starts`."""
        self._phase = phase
        self.tick()

    def tick(self) -> None:
        """See `Progress.tick`."""
        width = min(WIDEST, self._live.console.width)
        text = view(self._course, self._phase, self._done.tolist(), width, self._glyphs)
        self._live.update(text, refresh=True)

    def ends(self, seconds: float) -> None:  # noqa: ARG002
        """See `Progress.ends`."""
        self.tick()


class Lines:
    """A line now and then."""

    def __init__(
        self,
        console: Console,
        course: Course,
        done: Tensor,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console, self._course, self._done, self._phase = console, course, done, ""
        self._clock, self._next = clock, 0.0

    def starts(self, phase: str) -> None:
        """See `Progress.starts`."""
        self._phase, self._next = phase, self._clock() + LINE_EVERY
        self._print(f"{phase}: {self._course.batches} batches, {_about(self._course, phase)}")

    def tick(self) -> None:
        """See `Progress.tick`."""
        counts = self._done.tolist()
        if self._clock() >= self._next:
            self._next = self._clock() + LINE_EVERY
            ready = line(self._course, self._phase, counts)
            self._print(ready if any(counts) else f"{self._phase}: getting ready")

    def ends(self, seconds: float) -> None:
        """See `Progress.ends`."""
        self._print(f"{self._phase}: done in {seconds:.2f} s")

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def line(course: Course, phase: str, counts: Sequence[int]) -> str:
    """Return `fixed split: 96 of 320 batches, A 40 B 24 C 22 D 10`."""
    by_node = " ".join(f"{node} {count}" for node, count in zip(course.nodes, counts, strict=True))
    return f"{phase}: {sum(counts)} of {course.batches} batches, {by_node}"


def view(course: Course, phase: str, counts: Sequence[int], width: int, shades: Glyphs) -> Text:
    """Return a headline and a bar a node, in lines of at most `width`.

    A bar is a node's batches. In equal shares it has room for one; where nobody knows who will train how many, for
    what the fastest would train if nobody idled.
    """
    named = labels(course.by_node, course.slowdown)
    fixed, room = phase in EQUAL, course.room(phase)
    bar = max(5, width - len(named["A"]) - len(f" {room}  {room} of {room}, waits"))
    done = f"{sum(counts)} of" if any(counts) else "getting ready,"
    text = Text(f"{phase}: {done} {course.batches} batches, {_about(course, phase)}")
    text.stylize("bold", 0, len(phase))
    for label, count in zip(named.values(), counts, strict=True):
        full = min(bar, count * bar // room)
        text.append(f"\n{label} ")
        text.append(shades.shades[-1] * full, style=PHASE_STYLES[phase])
        text.append(shades.shades[0] * (bar - full), style="dim")
        text.append(f" {count}{f' of {room}' if fixed else ''}{', waits' if fixed and count == room else ''}")
    return text


EQUAL = ("fixed split", "DDP")
"""Phases in which all nodes train as many batches."""
PHASE_STYLES = {"fixed split": "yellow", "shared queue": "green", "DDP": "yellow", "elastic steps": "green"}


def _about(course: Course, phase: str) -> str:
    return f"about {math.ceil(course.seconds(phase))} s"
