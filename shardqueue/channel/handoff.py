"""The counted queue: what becomes of items, of waiting ends and of the end of the stream.

This is all of a channel's policy, and it does no I/O: every method is told what happened, and at what time, and
answers at once or leaves the end waiting; what others were waiting for goes to `wakes`. The ends of threads call it
under a mutex, the broker between processes from its one thread, the model tests in any order at all.

Ending is counted, never timed. A declared end counts from the start. The stream ends for a receiver when no sender
is open, the queue is empty, and nothing that was handed out can still come back. A sender's error ends it earlier:
after what was queued before the error. A sender that was killed does not stop the others: the stream goes on to its
end, which then is the error. When the last receiver leaves, senders are refused.

Invariants: while a receiver waits, the queue is empty; while a sender waits, the queue is full.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import TYPE_CHECKING, Generic, TypeVar

from shardqueue.channel.report import (
    STARVED_FRACTION,
    STARVED_SECONDS,
    ChannelReport,
    Depth,
    EndReport,
    Side,
    State,
)
from shardqueue.errors import ReceiversGoneError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

T = TypeVar("T")


class Answer(Enum):
    """What an end is told instead of an item."""

    WAIT = "wait"
    TAKEN = "taken"
    """To a sender: the item is in the queue, or in a receiver's hands."""
    REFUSED = "refused"
    """To a sender: `Handoff.refusal` says why."""
    END = "end"
    FAILED = "failed"
    """To a receiver: `Handoff.failure` says why."""


WAIT, TAKEN, REFUSED, END, FAILED = Answer
"""The members by name: looking them up in their class is not free."""


class End:
    """An end as the queue knows it; only a `Handoff` writes to it."""

    __slots__ = (
        *("name", "side", "number", "open", "state", "since", "warned"),
        *("items", "lost", "first", "last", "waited", "lead", "measured"),
    )

    def __init__(self, side: Side, number: int, name: str) -> None:
        self.side, self.number, self.name = side, number, name
        self.open = True
        self.state = State.OPEN
        self.items = 0
        self.lost = 0
        self.first: float | None = None
        self.last = 0.0
        self.since: float | None = None
        self.waited = 0.0
        self.measured = 0.0
        self.lead = 0.0
        self.warned = False

    def report(self, now: float) -> EndReport:
        """Return what it did up to now."""
        waiting = now - self.since if self.since is not None else 0.0
        seconds = (now if self.open else self.last) - self.first if self.first is not None else 0.0
        waited = max(self.waited, self.measured) + (waiting if self.first is not None else 0.0)
        return EndReport(
            name=self.name,
            side=self.side,
            number=self.number,
            state=self.state,
            items=self.items,
            seconds=seconds,
            waited=min(waited, seconds),
            lead=self.lead + (waiting if self.first is None else 0.0),
            lost=self.lost,
        )


class Handoff(Generic[T]):
    """One bounded queue between senders and receivers.

    Args:
        senders: declared, 1 or more; each counts as open until it is closed.
        receivers: the same.
        capacity: items it holds, 1 or more.
        now: seconds, the beginning of the report's time.
        name: goes before the names of the ends.

    Attributes:
        wakes: who no longer waits, and what it is told; whoever calls a method drains it.
        left: items that nobody is left to receive; drained the same way.
        reserved: room promised to senders for their next items.
        held: items handed out that may yet come back, which the end of the stream waits for.
        is_told: some receiver knows that the stream is over.
        starved: a receiver was found to starve since this was last cleared.
    """

    def __init__(self, senders: int, receivers: int, capacity: int, now: float, name: str = "") -> None:
        self.name = name
        self.capacity = capacity
        self.queue: deque[T] = deque()
        self.ends: dict[Side, list[End]] = {Side.SENDER: [], Side.RECEIVER: []}
        self.untaken = {Side.SENDER: senders, Side.RECEIVER: receivers}
        self.open = {Side.SENDER: senders, Side.RECEIVER: receivers}
        self.wakes: list[tuple[End, T | Answer]] = []
        self.left: list[T] = []
        self.reserved = 0
        self.held = 0
        self.lost = 0
        self.redelivered = 0
        self.starved = self.is_told = False
        self.failure: Exception | None = None
        self.refusal: Exception | None = None
        self._verdict: Exception | None = None
        self._offers: deque[tuple[End, T]] = deque()
        self._asks: deque[End] = deque()
        self._depth = Depth()
        self._began = self._at = now
        self._area = 0.0
        self._count = 0
        self._received = 0

    # ends

    def take(self, side: Side) -> End | None:
        """Return the next declared end of this side, or None when all are taken."""
        if not self.untaken[side]:
            return None
        self.untaken[side] -= 1
        return self._add(side)

    def clone(self, end: End) -> End | None:
        """Return a new end beside an open one, or None when that one is closed."""
        if not end.open:
            return None
        self.open[end.side] += 1
        return self._add(end.side)

    def _add(self, side: Side) -> End:
        number = len(self.ends[side])
        end = End(side, number, f"{self.name} {side} {number}".lstrip())
        self.ends[side].append(end)
        return end

    def reopen(self, end: End) -> bool:
        """A dropped end that was never used is used after all; return whether that is still possible."""
        can = end.state is State.DROPPED and not self.is_told and self.refusal is None
        if can:
            end.open, end.state = True, State.OPEN
            self.open[end.side] += 1
        return can

    def forgo(self, now: float, error: Exception | None = None) -> dict[Side, int]:
        """Declared ends that nobody took count as closed, senders with the error; return how many those were."""
        gone = dict(self.untaken)
        if error is not None and gone[Side.SENDER]:
            self._fail(error, now)
        for side, count in gone.items():
            self.untaken[side] = 0
            self._fewer(side, count, now)
        return gone

    @property
    def is_finished(self) -> bool:
        """Whether every end is closed."""
        return not (self.open[Side.SENDER] or self.open[Side.RECEIVER])

    # the two verbs

    def offer(self, end: End, item: T, now: float, wait: bool = True, promised: bool = False) -> Answer:
        """A sender has an item: TAKEN, REFUSED, or WAIT (in line if `wait`, else forgotten).

        For a promised item there is room; it has been taken out of `reserved`.
        """
        if self.refusal is not None or not end.open:
            return REFUSED
        self._area += len(self.queue) * (now - self._at)
        self._at = now
        if now >= self._depth.due:
            self._depth.sample(now, len(self.queue))
        if self._asks:
            self._hand(self._asks.popleft(), item, now)
        elif promised or len(self.queue) + self.reserved < self.capacity:
            self.queue.append(item)
        else:
            if wait:
                end.since = now
                self._offers.append((end, item))
            return WAIT
        self._count += 1
        end.items += 1
        end.last = now
        if end.first is None:
            end.first = now
        return TAKEN

    def ask(self, end: End, now: float, wait: bool = True) -> T | Answer:
        """A receiver wants an item: the item, END, FAILED, WAIT (in line if `wait`, else forgotten) or REFUSED."""
        self._area += len(self.queue) * (now - self._at)
        self._at = now
        if now >= self._depth.due:
            self._depth.sample(now, len(self.queue))
        if not end.open:
            return REFUSED
        if self.queue:
            item = self.queue.popleft()
            self._received += 1
            end.items += 1
            end.last = now
            if end.first is None:
                end.first = now
            if self._offers:
                self._admit(now)
            return item
        if self.failure is not None:
            return FAILED
        if self._is_over():
            return self._over()
        if wait:
            end.since = now
            self._asks.append(end)
        return WAIT

    def withdraw(self, end: End, now: float) -> bool:
        """Return whether the end was still waiting; it no longer is."""
        if end.since is None:
            return False
        self._leave_line(end)
        self._waited(end, now)
        return True

    # closing

    def close(
        self, end: End, now: float, state: State = State.CLOSED, error: Exception | None = None
    ) -> None:
        """An end is finished; a sender may end with an error, which ends the stream after what is queued.

        Args:
            end: which; closing a second time does nothing.
            now: seconds.
            state: how it was left; not open.
            error: of a sender: with KILLED told at the very end of the stream, else after what is queued now.
        """
        if not end.open:
            return
        if end.since is not None:
            self._leave_line(end)
            self._wake(end, REFUSED, now)
        end.open, end.state = False, state
        if end.side is Side.SENDER and error is not None:
            if state is not State.KILLED:
                self._fail(error, now)
            else:
                self.condemn(error)
        self._fewer(end.side, 1, now)

    def condemn(self, error: Exception) -> None:
        """The end of the stream is this error, unless it is one already."""
        if self._verdict is None:
            self._verdict = error

    def _fail(self, error: Exception, now: float) -> None:
        if self.failure is None:
            self.failure = error
            self._refuse(error, now)
            if not self.queue:
                self._tell_all(FAILED, now)

    def _fewer(self, side: Side, count: int, now: float) -> None:
        if not count:
            return
        self.open[side] -= count
        if not self.open[Side.RECEIVER] and side is Side.RECEIVER:
            self._abandon(now)
        self.settle(now)

    def _abandon(self, now: float) -> None:
        """Nobody is left to receive: refuse the senders; what is queued is lost, and goes to `left`."""
        self._pass_time(now)
        self.lost += len(self.queue)
        self.left.extend(self.queue)
        self.queue.clear()
        self._refuse(
            ReceiversGoneError("every receiver of the channel is closed: nobody is left to send to"), now
        )

    def _refuse(self, error: Exception, now: float) -> None:
        if self.refusal is None:
            self.refusal = error
        while self._offers:
            self._wake(self._offers.popleft()[0], REFUSED, now)

    def settle(self, now: float) -> None:
        """Tell the receivers that wait when the stream is over."""
        if self._asks and self._is_over():
            self._tell_all(self._over(), now)

    def _is_over(self) -> bool:
        return not (self.open[Side.SENDER] or self.queue or self.held)

    def _over(self) -> Answer:
        self.is_told = True
        if self._verdict is None:
            return END
        self.failure = self._verdict
        return FAILED

    def _tell_all(self, answer: Answer, now: float) -> None:
        while self._asks:
            self._wake(self._asks.popleft(), answer, now)

    # items that come back or go for good

    def give_back(self, items: Iterable[T], now: float) -> None:
        """Items handed out and not used are next in line; the queue may hold more than its capacity for a while."""
        back = deque(items)
        self._received -= len(back)
        while back and self._asks:
            self._hand(self._asks.popleft(), back.popleft(), now)
        if self.open[Side.RECEIVER]:
            self._pass_time(now)
            self.queue.extendleft(reversed(back))
        else:
            self.lost += len(back)
            self.left.extend(back)

    def remove(self, is_gone: Callable[[T], bool], now: float) -> int:
        """Take the items that are gone out of the queue, as lost; return how many there were. Settle after it."""
        self._pass_time(now)
        kept = deque(item for item in self.queue if not is_gone(item))
        count = len(self.queue) - len(kept)
        self.queue = kept
        self.lost += count
        self.admit(now)
        return count

    @property
    def has_room(self) -> bool:
        """Whether an item offered now would be taken."""
        return len(self.queue) + self.reserved < self.capacity

    # moving and waking

    def _pass_time(self, now: float) -> None:
        """The queue has held what it holds until now."""
        self._area += len(self.queue) * (now - self._at)
        self._at = now

    def _admit(self, now: float) -> None:
        """The sender that waited longest puts its item into the queue."""
        if not self.has_room:
            return
        end, item = self._offers.popleft()
        self.queue.append(item)
        self._count += 1
        end.items += 1
        self._wake(end, TAKEN, now)

    def admit(self, now: float) -> None:
        """Let in the senders for whom there is room."""
        while self._offers and self.has_room:
            self._admit(now)

    def _hand(self, end: End, item: T, now: float) -> None:
        self._received += 1
        end.items += 1
        self._wake(end, item, now)

    def _wake(self, end: End, answer: T | Answer, now: float) -> None:
        if answer is END or answer is FAILED or answer is REFUSED:
            end.since = None
        else:
            self._waited(end, now)
            end.last = now
            if end.first is None:
                end.first = now
        self.wakes.append((end, answer))

    def _waited(self, end: End, now: float) -> None:
        """A wait is over, and counts."""
        assert end.since is not None
        seconds = max(0.0, now - end.since)  # times may be taken in another order than turns
        end.since = None
        if end.first is None:
            end.lead += seconds
            return
        end.waited += seconds
        if (
            end.side is Side.RECEIVER
            and not end.warned
            and now - end.first >= STARVED_SECONDS
            and end.waited > STARVED_FRACTION * (now - end.first)
        ):
            end.warned = self.starved = True

    def _leave_line(self, end: End) -> None:
        if end.side is Side.RECEIVER:
            self._asks.remove(end)
        else:
            self._offers = deque(offer for offer in self._offers if offer[0] is not end)

    # seen

    def _mean_depth(self, now: float, first: float) -> float:
        if now <= first:
            return float(len(self.queue))
        return (self._area + len(self.queue) * max(0.0, now - self._at)) / (now - first)

    def measure(self, end: End, seconds: float) -> None:
        """An end says how long it has waited, by its own clock, between its first item and its last."""
        end.measured = seconds

    def report(self, now: float) -> ChannelReport:
        """Return what happened up to now."""
        everyone = [*self.ends[Side.SENDER], *self.ends[Side.RECEIVER]]
        is_used = any(end.open for end in everyone) or any(self.untaken.values())
        until = now if is_used else max((end.last for end in everyone), default=now)
        firsts = [end.first for end in everyone if end.first is not None]
        return ChannelReport(
            capacity=self.capacity,
            depth=len(self.queue),
            mean_depth=self._mean_depth(max(until, self._at), min(firsts) if firsts else until),
            depths=tuple((round(when - self._began, 3), depth) for when, depth in self._depth.samples),
            sent=self._count,
            received=self._received,
            lost=self.lost,
            redelivered=self.redelivered,
            seconds=max(0.0, until - min(firsts)) if firsts else 0.0,
            senders=tuple(end.report(now) for end in self.ends[Side.SENDER]),
            receivers=tuple(end.report(now) for end in self.ends[Side.RECEIVER]),
        )
