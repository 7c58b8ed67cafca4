"""A run as a chart: a lane for each learner, a bar for each stretch of a unit, and what handed a unit on.

Values only. Times are seconds from the chart's origin, by the wall clocks of the machines that wrote them; those may
differ by some seconds from one machine to another, so bars of two machines are compared with care.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Bar:
    """Batches `[begin, end)` of one attempt at a unit, trained by one learner; or several such, drawn as one.

    Attributes:
        start: when its first batch was begun.
        stop: when its last one was trained.
        waited: seconds between the two in which the learner waited for data.
        pass_: the pass, as it is called on the command line; of several, the first one's.
        unit: the unit's identifier; of several, the first one's.
        attempt: 0 where nobody had the unit before.
        begin: its first batch, counted in the unit; of several, the first one's.
        end: one past its last batch; of several, the first one's.
        batches: trained.
        samples: trained; 0 where the loop does not tell.
        row: on which of the lane's rows it lies: loader workers interleave units, whose bars then overlap.
        spans: how many stretches it stands for; more than 1 where a large run was made coarser.
        before: seconds just before `start` in which the learner waited for the first batch.
    """

    start: float
    stop: float
    waited: float
    pass_: str
    unit: str
    attempt: int
    begin: int
    end: int
    batches: int
    samples: int
    row: int = 0
    spans: int = 1
    before: float = 0.0


@dataclass(frozen=True, slots=True)
class Handover:
    """The end of an attempt that was not trained whole: what follows begins at batch `begin`.

    Attributes:
        pass_: the pass, as it is called on the command line.
        unit: the unit.
        attempt: the attempt that was ended.
        begin: where the next one begins, counted in the unit.
        owner: the lane of whoever had it, None where no log says.
        by: the learner that wrote the record: the owner itself, or another one who reclaimed it.
        why: as the record says.
        at: when the unit's next batch was begun; None while nobody has gone on with it.
        taker: the lane of whoever went on with it or has it in hand; not of who gave it back as it was.
        reclaimed: whether others took it from a learner that was gone or silent, or left without a word of it.
        again: batches from `begin` on that the owner trained all the same: they were trained twice, or undone.
    """

    pass_: str
    unit: str
    attempt: int
    begin: int
    owner: int | None
    by: str
    why: str
    at: float | None = None
    taker: int | None = None
    reclaimed: bool = False
    again: int = 0


@dataclass(frozen=True, slots=True)
class Lane:
    """One process of a learner.

    Attributes:
        learner: its label.
        instance: tells it from another one of the same label.
        process: `main`, or the number of a loader worker that logs by itself.
        host: the machine.
        pid: its process.
        since: when it began.
        seen: when it wrote its log last.
        left: `end`, `early` or `error`; None where it did not say.
        bars: in the order of their starts.
        rows: how many rows its bars need.
        busy: seconds in which it trained: covered by bars, less what it waited for data.
        waited: seconds in which it waited for data, before its bars and within them.
        idle: seconds of the chart in which it was there and did neither.
        batches: trained.
        samples: trained; 0 where the loop does not tell.
        finished: when its last batch was trained; None for none.
        away: seconds of the chart before it began and after it was gone, or in passes that are not shown. Together
            with `busy`, `waited` and `idle` they are all of the chart.
        gone: it is there no more, and did not say that it left.
        parted: when it was gone, or left early or by an error; None where it is there, or nothing was left to do.
    """

    learner: str
    instance: str
    process: str
    host: str
    pid: int
    since: float
    seen: float
    left: str | None
    bars: tuple[Bar, ...]
    rows: int
    busy: float
    waited: float
    idle: float
    batches: int
    samples: int
    finished: float | None
    away: float = 0.0
    gone: bool = False
    parted: float | None = None

    @property
    def there(self) -> float:
        """Seconds of the chart in which it was there; its shares are of these."""
        return self.busy + self.waited + self.idle


@dataclass(frozen=True, slots=True)
class Tail:
    """The end of a pass, from when the first learner had nothing left to do until the last batch was trained.

    Attributes:
        pass_: the pass, as it is called on the command line.
        start: when the first learner of those that were not gone trained its last batch.
        stop: when the last batch of all was trained.
        idle: seconds that all learners together stood idle in between.
    """

    pass_: str
    start: float
    stop: float
    idle: float


@dataclass(frozen=True, slots=True)
class Chart:
    """A run as it was read.

    Attributes:
        url: the mailbox, without credentials.
        run: its name.
        origin: wall-clock seconds at which the chart begins.
        seconds: how long it is.
        lanes: in the order of their learners' names.
        passes: those that have bars, in the order in which they began.
        handovers: in the order of the units' attempts.
        tails: one of each pass that came to its end.
        spans: stretches in the logs; there may be fewer bars.
        notes: what a reader should know before believing it (clocks that differ, logs that cannot be read).
    """

    url: str
    run: str
    origin: float
    seconds: float
    lanes: tuple[Lane, ...]
    passes: tuple[str, ...]
    handovers: tuple[Handover, ...] = ()
    tails: tuple[Tail, ...] = ()
    spans: int = 0
    notes: tuple[str, ...] = field(default=())
