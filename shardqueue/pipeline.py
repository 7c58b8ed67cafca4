"""Producers and consumers around the real counted queue, in virtual time: one channel for all, or round robin.

A driver around `Handoff`, as the ends of threads and processes are: it offers, asks, closes and passes on what
`wakes` says, and knows nothing of who gets what, so what it measures is what runs. Moving an item takes no time,
making one and working on one take what their end says. Waits and depths are the queue's own report.

The items come from one supply, as from a shared queue: a producer that is ready makes the next one, whatever its
number. So nothing is dealt out before but, in round robin, who hands to whom: producer i to consumer i mod M.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from random import Random

from shardqueue.channel.handoff import END, TAKEN, WAIT, Answer, End, Handoff
from shardqueue.channel.report import Side
from shardqueue.errors import InvalidInputError
from shardqueue.units import check_int

Seconds = float | Callable[[int], float]
"""What an item takes an end; or a function of the item's number, for noise and for what changes on the way."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Who makes the items and who works on them.

    Attributes:
        producers: what an item takes each, in seconds.
        consumers: the same.
        items: how many there are, numbered from 0.
        capacity: items the queue holds; in round robin of all queues together, shared out evenly, at least 1 each.
    """

    producers: Sequence[Seconds]
    consumers: Sequence[Seconds]
    items: int
    capacity: int = 8

    def __post_init__(self) -> None:
        for name, ends in (("producers", self.producers), ("consumers", self.consumers)):
            if not ends:
                raise InvalidInputError(name, ends, "at least one of them", f"pass {name}=[1.0]")
        check_int("items", self.items, 0)
        check_int("capacity", self.capacity, 1)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a pipeline came to.

    Attributes:
        makespan: seconds until the last item was worked on.
        consumed: numbers of the items each consumer got, in order.
        idle: share of the time between its first item and its last that each consumer waited, 0 to 1.
        depths: mean depth of each queue over time; of a channel there is one.
    """

    makespan: float
    consumed: tuple[tuple[int, ...], ...]
    idle: tuple[float, ...]
    depths: tuple[float, ...]

    @property
    def items(self) -> tuple[int, ...]:
        """Items each consumer got."""
        return tuple(map(len, self.consumed))


def through_channel(pipeline: Pipeline) -> Outcome:
    """Let every producer hand to every consumer, through one queue."""
    producers, consumers = range(len(pipeline.producers)), range(len(pipeline.consumers))
    return _simulate(pipeline, [_Queue(producers, consumers, pipeline.capacity)])


def round_robin(pipeline: Pipeline) -> Outcome:
    """Let producer i hand to consumer i mod M, each consumer with a queue of its own."""
    producers, consumers = len(pipeline.producers), len(pipeline.consumers)
    share, rest = divmod(pipeline.capacity, consumers)
    queues = [
        _Queue(range(mine, producers, consumers), range(mine, mine + 1), max(1, share + (mine < rest)))
        for mine in range(min(producers, consumers))
    ]
    return _simulate(pipeline, queues)


def noisy(seconds: float, spread: float, seed: int) -> Callable[[int], float]:
    """Return a time that differs from item to item, evenly spread: 0.2 is 20 % less to 20 % more."""
    return lambda number: seconds * (1.0 + spread * Random(seed * 1_000_003 + number).uniform(-1.0, 1.0))


@dataclass(frozen=True, slots=True)
class _Queue:
    """Which producers and consumers have an end of it, and what it holds."""

    producers: range
    consumers: range
    capacity: int


@dataclass(slots=True)
class _World:
    """The clock, what is to happen, the items that nobody has begun, and what each consumer got."""

    supply: Iterator[int]
    consumed: list[list[int]]
    now: float = 0.0
    worked: float = 0.0
    events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    tick: count[int] = field(default_factory=count)

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        """Do it when so much time has passed."""
        heapq.heappush(self.events, (self.now + seconds, next(self.tick), do))


class _Driver:
    """One queue and its ends, driven by events."""

    def __init__(self, world: _World, pipeline: Pipeline, queue: _Queue) -> None:
        self._world = world
        self.handoff: Handoff[int] = Handoff(
            len(queue.producers), len(queue.consumers), queue.capacity, world.now
        )
        self._seconds: dict[End, Seconds] = {}
        self._places: dict[End, int] = {}
        self._seat(Side.SENDER, queue.producers, pipeline.producers, self._make)
        self._seat(Side.RECEIVER, queue.consumers, pipeline.consumers, self._ask)

    def _seat(
        self, side: Side, places: range, seconds: Sequence[Seconds], begin: Callable[[End], None]
    ) -> None:
        for place in places:
            end = self.handoff.take(side)
            assert end is not None
            self._places[end], self._seconds[end] = place, seconds[place]
            self._world.after(0.0, partial(begin, end))

    def _make(self, producer: End) -> None:
        """Begin the next item, if there is one."""
        number = next(self._world.supply, None)
        if number is not None:
            self._world.after(self._takes(producer, number), partial(self._offer, producer, number))
            return
        self.handoff.close(producer, self._world.now)
        self._answered(producer, WAIT)

    def _offer(self, producer: End, number: int) -> None:
        self._answered(producer, self.handoff.offer(producer, number, self._world.now))

    def _ask(self, consumer: End) -> None:
        """Its work on an item, if it had one, is over."""
        self._world.worked = self._world.now
        self._answered(consumer, self.handoff.ask(consumer, self._world.now))

    def _answered(self, end: End, answer: int | Answer) -> None:
        """Tell those whose wait is over, and then the end itself."""
        told = [*self.handoff.wakes, (end, answer)]
        self.handoff.wakes.clear()
        for who, what in told:
            self._told(who, what)

    def _told(self, end: End, answer: int | Answer) -> None:
        if answer is TAKEN:
            self._make(end)
        elif answer is END:
            self.handoff.close(end, self._world.now)
        elif answer is not WAIT:
            assert isinstance(answer, int)
            self._world.consumed[self._places[end]].append(answer)
            self._world.after(self._takes(end, answer), partial(self._ask, end))

    def _takes(self, end: End, number: int) -> float:
        seconds = self._seconds[end]
        return seconds(number) if callable(seconds) else seconds


def _simulate(pipeline: Pipeline, queues: list[_Queue]) -> Outcome:
    world = _World(iter(range(pipeline.items)), [[] for _ in pipeline.consumers])
    drivers = [_Driver(world, pipeline, queue) for queue in queues]
    while world.events:
        world.now, _, do = heapq.heappop(world.events)
        do()
    assert all(driver.handoff.is_finished for driver in drivers)
    reports = [driver.handoff.report(world.now) for driver in drivers]
    idle = [0.0] * len(pipeline.consumers)
    for queue, report in zip(queues, reports, strict=True):
        for place, end in zip(queue.consumers, report.receivers, strict=True):
            idle[place] = end.wait_fraction
    depths = tuple(report.mean_depth for report in reports)
    return Outcome(world.worked, tuple(map(tuple, world.consumed)), tuple(idle), depths)
