"""A chart from all that was read: its origin and its end, lanes in order, and what should be known of it. No I/O.

The chart begins when the first learner asked for its first batch, and ends with the last batch, or, where somebody
is still there, with what was heard of it last. A process is *away* before it began, after it was gone or left early,
and in passes that are not shown; who stays until nothing is left to do stands *idle* until the end.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from shardqueue.status.standing import AHEAD
from shardqueue.timeline.chart import Chart, Lane
from shardqueue.timeline.lanes import counted, named
from shardqueue.timeline.processes import tails

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from shardqueue.records import Manifest
    from shardqueue.timeline.chains import Chains
    from shardqueue.timeline.chart import Bar, Handover
    from shardqueue.timeline.lanes import Clocks
    from shardqueue.timeline.processes import Traced

NOTES = 5
"""Notes of one kind, at most."""
LATE = 1.0
"""Seconds by which a clock has to be behind to be worth a note."""


@dataclass(slots=True)
class Material:
    """What was read of a run. Times are wall-clock seconds.

    Attributes:
        url, run: where it lies, and its name.
        manifest: what it was opened with.
        now: when it was read.
        clocks: the times that can be.
        wanted: the passes that are meant, as keys call them; all where it is empty.
        processes: those that keep a log.
        chains: who owned which attempt.
        handovers: lanes in them count processes.
        whole: passes of which somebody noted that every unit is trained.
        unreadable: what is wrong with what could not be read.
        strangers: the learners under whose names logs of others lie.
        more_handovers: how many were read, if there are more.
        others: the other runs, newest first, where nobody said which one is meant.
    """

    url: str
    run: str
    manifest: Manifest
    now: float
    clocks: Clocks
    wanted: frozenset[str]
    chains: Chains
    processes: list[Traced] = field(default_factory=list)
    handovers: list[Handover] = field(default_factory=list)
    whole: set[str] = field(default_factory=set)
    unreadable: list[str] = field(default_factory=list)
    strangers: list[str] = field(default_factory=list)
    more_handovers: int | None = None
    others: list[str] = field(default_factory=list)


def make(read: Material) -> Chart:
    """Put it together."""
    origin, end = _bounds(read)
    order = _order(read.processes)
    place = {at: number for number, at in enumerate(order)}
    bars = sorted((bar for one in read.processes for bar in one.folded.bars), key=lambda bar: bar.start)
    return Chart(
        url=read.url,
        run=read.run,
        origin=origin,
        seconds=end - origin,
        lanes=tuple(_lane(read, at, origin, end) for at in order),
        passes=tuple(dict.fromkeys(bar.pass_ for bar in bars)),
        handovers=tuple(_moved(one, origin, place) for one in read.handovers),
        tails=tuple(
            replace(tail, start=tail.start - origin, stop=tail.stop - origin)
            for tail in tails(read.processes, read.whole, read.wanted)
        ),
        spans=sum(one.folded.spans for one in read.processes),
        notes=tuple(_notes(read)),
    )


def _bounds(read: Material) -> tuple[float, float]:
    """When the chart begins and ends."""
    processes = read.processes
    if not processes:
        return read.clocks.opened, read.clocks.opened
    starts = [bar.start for one in processes for bar in one.folded.bars[:1]]
    stops = [one.finished for one in processes if one.finished is not None]
    if read.wanted:
        return min(starts), max(stops)
    there = [one.last for one in processes if one.page.left is None and not one.gone]
    end = max([*stops, *there] or [one.last for one in processes])
    return min(one.folded.since for one in processes), end


def _order(processes: Sequence[Traced]) -> list[int]:
    """By the learner's name; of one that began several times, by when."""
    began: dict[tuple[str, str], float] = {}
    for one in processes:
        began[one.owner] = min(one.folded.since, began.get(one.owner, one.folded.since))

    def key(at: int) -> tuple[str, float, str, str]:
        one = processes[at]
        return one.page.learner, began[one.owner], one.page.instance, one.page.process

    return sorted(range(len(processes)), key=key)


def _lane(read: Material, at: int, origin: float, end: float) -> Lane:
    one, wanted = read.processes[at], read.wanted
    page, folded, seconds = one.page, one.folded, end - origin
    bars, stood = _without_standing(
        folded.bars, {h.at for h in read.handovers if h.reclaimed and h.taker == at}
    )
    begin = min(end, max(origin, folded.since))
    leave = end if one.parted is None else max(begin, min(end, one.parted))
    if one.untracked:
        leave = begin
    others = [extent for name, extent in folded.extents.items() if wanted and name not in wanted]
    elsewhere = sum(max(0.0, min(extent.stop, leave) - max(extent.start, begin)) for extent in others)
    busy = min(folded.busy, seconds)
    waited = min(folded.waited - stood, seconds - busy)
    away = min(begin - origin + end - leave + elsewhere, seconds - busy - waited)
    waited += min(folded.unplaced, seconds - busy - waited - away)
    return Lane(
        learner=named(page.learner),
        instance=named(page.instance),
        process=named(page.process),
        host=named(page.where.host),
        pid=counted(page.where.pid),
        since=folded.since - origin,
        seen=(folded.since if folded.seen is None else folded.seen) - origin,
        left=page.left,
        bars=tuple(replace(bar, start=bar.start - origin, stop=bar.stop - origin) for bar in bars),
        rows=folded.rows,
        busy=busy,
        waited=waited,
        idle=max(0.0, seconds - busy - waited - away),
        batches=folded.batches,
        samples=folded.samples,
        finished=None if one.finished is None else one.finished - origin,
        away=away,
        gone=one.gone,
        parted=None if one.parted is None else leave - origin,
    )


def _without_standing(bars: Sequence[Bar], taken: set[float | None]) -> tuple[list[Bar], float]:
    """Bars, and the seconds before some of them in which there was only a lost learner's unit to wait for."""
    stood = sum(bar.before for bar in bars if bar.start in taken)
    return [replace(bar, before=0.0) if bar.start in taken else bar for bar in bars], stood


def _moved(one: Handover, origin: float, place: dict[int, int]) -> Handover:
    """With times from the chart's origin, and lanes by their place in it."""
    at = None if one.at is None else one.at - origin
    owner = None if one.owner is None else place[one.owner]
    return replace(one, at=at, owner=owner, taker=None if one.taker is None else place[one.taker])


# -- what should be known ----------------------------------------------------------------------------------------


def _notes(read: Material) -> Iterator[str]:
    if not read.manifest.plans:
        yield "the run is being removed by `shardqueue clean`: logs may be gone"
    elif read.manifest.state is not None:
        yield "it goes on from a state: what was trained before it was opened is not here"
    yield from _few(f"a record cannot be read: {named(error)}" for error in read.unreadable)
    yield from _few(
        f"a log under the name of {named(name)} is of another run or learner: left out"
        for name in read.strangers
    )
    yield from _few(note for one in read.processes for note in _notes_of(one, read))
    yield from _few(_unrecorded(read.processes))
    yield from _few(
        f"the clocks of {named(first)} and {named(second)} differ by {seconds:.2g} s or more: attempt {attempt + 1} "
        f"of {named(unit)} began before attempt {attempt} had ended; compare their bars with care"
        for (first, second), (seconds, (_, unit, attempt)) in sorted(read.chains.apart.items())
    )
    if read.others:
        first, more = named(read.others[0]), len(read.others) - 1
        yield f"--run {first} shows another run that is here" + (
            f", and there are {more:,} more" if more else ""
        )
    if read.more_handovers is not None:
        yield f"more than {read.more_handovers:,} attempts were ended before their units were: the rest is not shown"
    blurred = max((one.folded.blurred for one in read.processes), default=0.0)
    if blurred:
        yield f"neighbouring stretches are drawn as one: gaps of less than {blurred:.2g} s are not all seen"


def _notes_of(one: Traced, read: Material) -> Iterator[str]:
    page, folded = one.page, one.folded
    name, host = named(page.learner), named(page.where.host)
    if folded.odd:
        yield f"{folded.odd:,} stretches in the log of {name} have times or batches that cannot be: left out"
    if folded.seen is None:
        yield f"the log of {name} was written at a time that cannot be, by the clock of {host}"
    elif folded.seen - read.now > -AHEAD:
        yield f"the clock of {host} is {folded.seen - read.now:,.0f} s ahead of this one"
    late = read.clocks.opened - min((bar.start for bar in folded.bars), default=read.clocks.opened)
    if late > LATE:
        opener = named(read.manifest.opened_by)
        yield f"the clock of {host} is {late:,.0f} s or more behind that of the machine of {opener}"


def _unrecorded(processes: Sequence[Traced]) -> Iterator[str]:
    """Who claimed, and trained nothing that a log knows of."""
    claimed: Counter[str] = Counter()
    for one in processes:
        ended = one.page.left == "end" or one.untracked
        if ended and not one.folded.extents and not one.folded.odd:
            claimed[named(one.page.learner)] += counted(one.page.totals.claimed)
    for name, units in claimed.items():
        if units:
            yield f"{name} claimed {units:,} units, and its log has none of them as trained"


def _few(notes: Iterable[str]) -> Iterator[str]:
    """The first few, each once, and how many more there are."""
    counted = Counter(notes)
    yield from list(counted)[:NOTES]
    if len(counted) > NOTES:
        yield f"and {len(counted) - NOTES:,} more such notes"
