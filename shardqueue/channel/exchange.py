"""The broker's side of all lines, without I/O: frames and deaths in, frames out.

It keeps what `handoff` does not know: whose memory an item is, what each receiver has in hand, and who is told what.

- *By reference*: an item some of whose memory is its sender's (CUDA, or shared memory that no descriptor goes with).
- *In hand*: what was given to a receiver, until it asks for the next or closes. A sender whose item was by reference
  keeps it until then, and lingers when it is closed; of other items the descriptors are kept here until then.
- *Killed*: a line that ends without CLOSE. A sender's items by reference that are still queued are lost; those that
  were copied are delivered, as are all the others'. What a receiver had in hand is lost, or delivered again: from the
  broker's copy, or by asking its sender once more, since what was read of shared memory cannot be read twice.
- *Ahead*: an end that comes back within `QUICK` seconds gets more at a time, receivers at most their share of the
  queue, senders at most their share of the room. So small items are not a round trip each, and at the pace of
  training nobody holds anything that another one could have.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from shardqueue.channel.forwarding import dump_error, error_line
from shardqueue.channel.handoff import END, FAILED, REFUSED, TAKEN, WAIT, Answer, End, Handoff
from shardqueue.channel.report import ChannelReport, Side, State
from shardqueue.channel.wire import (
    ANSWER,
    BY_REFERENCE,
    DROPPED,
    IN_FILE,
    RETURNED,
    Frame,
    Kind,
    decode_seconds,
    encode,
    encode_numbers,
)
from shardqueue.errors import SenderError

Out = tuple[bytes, tuple[int, ...]]
"""A frame, and the file descriptors that go with it."""
QUICK = 0.001
"""Seconds of work an end may have ahead."""
AHEAD = 64
"""Items an end may have ahead."""


@dataclass(eq=False, slots=True)
class Port:
    """An end in another process, or in this one.

    Attributes:
        end: as the queue knows it.
        pid: of the process that holds it; 0 while none does.
        is_attached: it is in use.
        is_over: a receiver was told the end; a sender may go, or is gone.
        is_told: a sender knows that nothing more is taken.
        out: frames to write to its line, with their file descriptors.
    """

    end: End
    pid: int = 0
    is_attached: bool = False
    is_over: bool = False
    is_told: bool = False
    out: list[Out] = field(default_factory=list)
    # a sender's
    waiting: Parcel | None = None
    accepted: int = 0
    limit: int = 0
    outstanding: int = 0
    ahead: int = 0
    # a receiver's
    given: deque[Parcel] = field(default_factory=deque)
    done: int = 0
    held: int = 0
    at: float = 0.0

    def say(
        self,
        kind: Kind,
        number: int = 0,
        body: bytes = b"",
        flags: int = 0,
        descriptors: tuple[int, ...] = (),
    ) -> None:
        """Put a frame on its line."""
        self.out.append((encode(kind, number, body, flags, len(descriptors)), descriptors))


@dataclass(eq=False, slots=True)
class Parcel:
    """An item on its way."""

    source: Port
    number: int
    body: bytes
    by_reference: bool
    descriptors: tuple[int, ...] = ()
    flags: int = 0
    is_lost: bool = False


class Exchange:
    """All lines of a channel.

    Args:
        senders, receivers, capacity: as declared.
        redeliver: what a killed receiver had in hand goes to another one.
        now: seconds.

    Attributes:
        queue: the counted queue.
        ports: of all ends that were made.
        news: what happened that somebody should be warned of; drained by the caller.
        free: file descriptors that nobody needs any more; drained by the caller, after what is in `out` was written.
    """

    def __init__(
        self, senders: int, receivers: int, capacity: int, redeliver: bool, now: float, name: str = ""
    ) -> None:
        self.queue: Handoff[Parcel] = Handoff(senders, receivers, capacity, now, name)
        self.ports: dict[End, Port] = {}
        self.news: list[str] = []
        self.free: list[int] = []
        self._redeliver = redeliver
        self._again: dict[tuple[Port, int], Parcel] = {}
        self._failure = b""

    # ends

    def take(self, side: Side) -> Port | None:
        """Return the port of the next declared end, or None when all are taken."""
        return self._port(self.queue.take(side))

    def clone(self, port: Port) -> Port | None:
        """Return the port of a new end beside an open one, or None when that is closed."""
        return self._port(self.queue.clone(port.end))

    def _port(self, end: End | None) -> Port | None:
        if end is None:
            return None
        self.ports[end] = Port(end)
        return self.ports[end]

    def reopen(self, port: Port) -> bool:
        """An end that counted as dropped is used after all; return whether that is still possible."""
        can = not port.is_attached and self.queue.reopen(port.end)
        if can:
            port.is_over = False
            self.news.append(f"{_who(port)} is used after all; it counts again")
        return can

    def forgo(self, now: float, error: Exception | None = None) -> dict[Side, int]:
        """Declared ends that nobody took count as closed."""
        gone = self.queue.forgo(now, error)
        self._settle(now)
        return gone

    @property
    def is_finished(self) -> bool:
        """Whether every end is closed and nothing is needed of any."""
        return self.queue.is_finished and not any(self._lingers(port) for port in self.ports.values())

    @staticmethod
    def _lingers(port: Port) -> bool:
        return port.end.side is Side.SENDER and not port.is_over

    def descriptors(self) -> list[int]:
        """Return all file descriptors of items here."""
        parcels = [*self.queue.queue, *self._again.values()]
        for port in self.ports.values():
            parcels += [*port.given, *([port.waiting] if port.waiting is not None else [])]
        return [*self.free, *(descriptor for parcel in parcels for descriptor in parcel.descriptors)]

    def report(self, now: float) -> ChannelReport:
        """Return what happened up to now."""
        return self.queue.report(now)

    # what comes over a line

    def told(self, port: Port, frame: Frame, now: float) -> None:
        """Take in a frame of an end."""
        port.is_attached = True
        if frame.kind == Kind.ITEM:
            self._item(port, frame, now)
        elif frame.kind == Kind.ASK:
            self._measure(port, frame)
            self._ask(port, frame.number, now)
        elif frame.kind == Kind.WITHDRAW:
            if self.queue.withdraw(port.end, now):
                self._forget_offer(port)
                port.say(Kind.REFUSED)
        elif frame.kind == Kind.CLOSE:
            self._close(port, frame, now)
        elif frame.kind == Kind.UNREADABLE:
            self._unreadable(port, frame.number)
        self._settle(now)

    def _item(self, port: Port, frame: Frame, now: float) -> None:
        if frame.flags & RETURNED:
            parcel = self._again.pop((port, frame.number), None)
            if parcel is None:
                self.free.extend(frame.descriptors)
                return
            self.free.extend(parcel.descriptors)
            parcel.body, parcel.descriptors, parcel.flags = frame.body, frame.descriptors, frame.flags
            self._deliver_again([parcel], now)
            self.queue.held -= 1
            return
        is_by_reference = bool(frame.flags & BY_REFERENCE)
        parcel = Parcel(port, frame.number, frame.body, is_by_reference, frame.descriptors, frame.flags)
        was_promised = frame.number < port.limit
        self.queue.reserved -= was_promised
        answer = self.queue.offer(port.end, parcel, now, promised=was_promised)
        if answer is TAKEN:
            self._accepted(port, parcel, now)
        elif answer is WAIT:
            port.waiting = parcel
        elif was_promised:
            # Sent on reserved room while the last receiver left, or another sender failed.
            port.accepted += 1
            self._lose(parcel)
        else:
            self.free.extend(parcel.descriptors)

    def _forget_offer(self, port: Port) -> None:
        """A sender's item that waits for room is not taken."""
        if port.waiting is not None:
            self.free.extend(port.waiting.descriptors)
            port.waiting = None

    def _accepted(self, port: Port, parcel: Parcel, now: float) -> None:
        port.accepted = parcel.number + 1
        if parcel.by_reference:
            port.outstanding += 1
        if port.limit - port.accepted <= port.ahead // 2 and port.end.open:
            port.ahead = self._share(port, now)
            more = port.accepted + port.ahead - max(port.limit, port.accepted)
            if more > 0 or port.limit < port.accepted:
                self.queue.reserved += max(0, more)
                port.limit = max(port.limit, port.accepted) + max(0, more)
                port.say(Kind.ROOM, port.limit)

    def _share(self, port: Port, now: float) -> int:
        """How many items a sender may send ahead: none unless it comes back at once."""
        is_quick = now - port.at < QUICK
        port.at = now
        if not is_quick:
            return 0
        queue = self.queue
        free = queue.capacity - len(queue.queue) - queue.reserved
        return max(0, min(AHEAD, free // max(1, queue.open[Side.SENDER])))

    def _ask(self, port: Port, done: int, now: float) -> None:
        self._done(port, done)
        if port.end.since is not None:
            return  # it asks again after an interruption
        elapsed = now - port.at
        if elapsed < QUICK:
            port.ahead = min(AHEAD, 2 * port.ahead + 1)
        else:
            port.ahead = int(port.ahead * QUICK / elapsed)
        answer = self.queue.ask(port.end, now)
        if isinstance(answer, Answer):
            if answer is not WAIT:
                self._answer(port, answer, now)
            return
        parcels = [answer]
        share = len(self.queue.queue) // max(1, self.queue.open[Side.RECEIVER])
        for _ in range(min(port.ahead, share)):
            more = self.queue.ask(port.end, now, wait=False)
            if isinstance(more, Answer):
                break
            parcels.append(more)
        for parcel in parcels[:-1]:
            self._give(port, parcel, now, flags=0)
        self._give(port, parcels[-1], now)

    def _measure(self, port: Port, frame: Frame) -> None:
        if frame.body:
            self.queue.measure(port.end, decode_seconds(frame.body))

    def _give(self, port: Port, parcel: Parcel, now: float, flags: int = ANSWER) -> None:
        port.at = now
        flags |= parcel.flags & (BY_REFERENCE | IN_FILE)
        port.say(Kind.ITEM, port.done + len(port.given), parcel.body, flags, parcel.descriptors)
        port.given.append(parcel)
        self._hold(port)

    def _done(self, port: Port, count: int) -> None:
        """A receiver is done with its first `count` items."""
        while port.done < count:
            port.done += 1
            self._release(port.given.popleft())
        self._hold(port)

    def _hold(self, port: Port) -> None:
        """What a receiver was given may come back: what it has ahead, or with redelivery also what it has in hand."""
        held = len(port.given) if self._redeliver else max(0, len(port.given) - 1)
        self.queue.held += held - port.held
        port.held = held

    def _release(self, parcel: Parcel) -> None:
        """Nobody needs the memory of an item any more."""
        self.free.extend(parcel.descriptors)
        source = parcel.source
        if parcel.by_reference and not source.is_over:
            source.outstanding -= 1
            source.say(Kind.DONE, body=encode_numbers([parcel.number]))
            self._let_go(source)

    def _let_go(self, source: Port) -> None:
        if not source.end.open and not source.outstanding and not source.is_over:
            source.is_over = True
            source.say(Kind.BYE)

    def _unreadable(self, port: Port, number: int) -> None:
        """An item was lost on its way, because its sender died or it cannot be unpickled."""
        parcel = port.given[number - port.done]
        parcel.is_lost = True
        self._lose_for_good(parcel)

    def _lose_for_good(self, parcel: Parcel) -> None:
        """An item is lost, so that the end of the stream is an error."""
        self._lose(parcel)
        who = _who(parcel.source)
        error = SenderError(f"an item of {who} could not be received and is lost", parcel.source.end.name, 1)
        self.news.append(str(error))
        self.queue.condemn(error)

    # closing

    def _close(self, port: Port, frame: Frame, now: float) -> None:
        is_dropped = bool(frame.flags & DROPPED)
        if is_dropped:
            self.news.append(f"{_who(port)} was dropped without close(); it counts as closed")
        if port.end.side is Side.RECEIVER:
            self._measure(port, frame)
            self._done(port, frame.number)
            self._put_back(port, now)
            port.is_over = True
        error = None
        if frame.body and port.end.side is Side.SENDER:
            error = SenderError(f"{_who(port)} ended with {error_line(frame.body)}", port.end.name)
            self._failure = self._failure or frame.body
        state = State.DROPPED if is_dropped else State.FAILED if error else State.CLOSED
        self._leave(port, now, state, error)
        if port.end.side is Side.SENDER:
            self._let_go(port)

    def _leave(self, port: Port, now: float, state: State, error: Exception | None = None) -> None:
        if port.end.side is Side.SENDER:
            self._forget_offer(port)
            self.queue.reserved -= max(0, port.limit - port.accepted)
            port.limit = port.accepted
        self.queue.close(port.end, now, state, error)
        self.queue.admit(now)

    def _put_back(self, port: Port, now: float) -> None:
        """What a receiver that leaves never used is next in line."""
        unused = list(port.given)
        port.given.clear()
        port.end.items -= len(unused)
        port.done += len(unused)
        self._hand_on(unused, now)
        self._hold(port)

    def _hand_on(self, parcels: list[Parcel], now: float) -> None:
        """Those who wait for them have them at once, so that they are held throughout."""
        self.queue.give_back(parcels, now)
        self._wake(now)

    def hung_up(self, port: Port, now: float) -> None:
        """The line of an end is cut: all that was written to it has been told."""
        end = port.end
        if end.side is Side.SENDER:
            self._sender_hung_up(port, now)
        elif end.open:
            self._receiver_hung_up(port, now)
        self._settle(now)

    def _sender_hung_up(self, port: Port, now: float) -> None:
        if port.is_over:
            return
        port.is_over = True
        self.queue.withdraw(port.end, now)
        self._forget_offer(port)
        lost = self._lose_memory_of(port, now)
        if port.end.open and not port.is_attached:
            self.news.append(f"{_who(port)} was dropped before it was used; it counts as closed")
            self._leave(port, now, State.DROPPED)
            return
        if not port.end.open and not lost:
            return
        error = SenderError(
            f"{_who(port)} was killed: {lost} items it had sent are lost, and what it had not sent is missing; "
            "everything else was delivered",
            port.end.name,
            lost,
        )
        self.news.append(str(error))
        self.queue.condemn(error)
        self._leave(port, now, State.KILLED)

    def _lose_memory_of(self, port: Port, now: float) -> int:
        """The memory of a sender is gone; return how many queued items go with it."""
        lost = self.queue.remove(lambda parcel: self._is_gone(parcel, port), now)
        pending = [key for key in self._again if key[0] is port]
        for key in pending:
            self.free.extend(self._again.pop(key).descriptors)
        self.queue.held -= len(pending)
        self.queue.lost += len(pending)
        port.end.lost += lost + len(pending)
        return lost + len(pending)

    def _is_gone(self, parcel: Parcel, source: Port) -> bool:
        if parcel.source is not source or not parcel.by_reference:
            return False
        self.free.extend(parcel.descriptors)
        return True

    def _receiver_hung_up(self, port: Port, now: float) -> None:
        if port.is_over or not port.is_attached:
            if not port.is_over:
                self.news.append(f"{_who(port)} was dropped before it was used; it counts as closed")
            self._leave(port, now, State.CLOSED if port.is_over else State.DROPPED)
            return
        in_hand = [parcel for parcel in port.given if not parcel.is_lost]
        what = f"{_who(port)} was killed; what it had in hand, {len(in_hand)} items, is"
        for parcel in port.given:
            if parcel.is_lost:
                self._release(parcel)
        self._leave(port, now, State.KILLED)
        if self._redeliver and self.queue.open[Side.RECEIVER]:
            self.news.append(f"{what} delivered again")
            self._redeliver_all(in_hand, now)
        else:
            self.news.append(f"{what} lost")
            port.end.lost += len(in_hand)
            self.queue.lost += len(in_hand)
            for parcel in in_hand:
                self._release(parcel)
        port.given.clear()
        self._hold(port)

    def _redeliver_all(self, parcels: list[Parcel], now: float) -> None:
        for parcel in parcels:
            if parcel.by_reference and parcel.source.is_over:
                self._lose_for_good(parcel)
            elif parcel.by_reference:
                self._again[parcel.source, parcel.number] = parcel
                self.queue.held += 1
                parcel.source.say(Kind.AGAIN, parcel.number)
        self._deliver_again([parcel for parcel in parcels if not parcel.by_reference], now)

    def _deliver_again(self, parcels: list[Parcel], now: float) -> None:
        self.queue.redelivered += len(parcels)
        self._hand_on(parcels, now)

    def _lose(self, parcel: Parcel) -> None:
        self.free.extend(parcel.descriptors)
        parcel.descriptors = ()
        self.queue.lost += 1
        parcel.source.end.lost += 1

    # who is told

    def _settle(self, now: float) -> None:
        """Tell everybody what they were waiting for, and what has become of their items."""
        queue = self.queue
        self._wake(now)
        queue.settle(now)
        self._wake(now)
        while queue.left:
            self._release(queue.left.pop())
        if queue.refusal is not None:
            self._refuse(queue.refusal)

    def _wake(self, now: float) -> None:
        wakes, self.queue.wakes = self.queue.wakes, []
        for end, answer in wakes:
            port = self.ports[end]
            if isinstance(answer, Answer):
                self._answer(port, answer, now)
            else:
                self._give(port, answer, now)

    def _answer(self, port: Port, answer: Answer, now: float) -> None:
        if answer is TAKEN:
            assert port.waiting is not None
            parcel, port.waiting = port.waiting, None
            self._accepted(port, parcel, now)
        elif answer is REFUSED:
            self._forget_offer(port)
        elif answer is END:
            port.is_over = True
            port.say(Kind.END)
        elif answer is FAILED:
            port.is_over = True
            failure = self.queue.failure
            assert failure is not None
            port.say(Kind.END, body=self._failure or dump_error(failure, "a sender"))

    def _refuse(self, why: Exception) -> None:
        """Tell every sender, once, that nothing more is taken."""
        body = b""
        for port in self.ports.values():
            if port.end.side is Side.SENDER and port.end.open and not port.is_told:
                port.is_told = True
                body = body or dump_error(why, "")
                port.say(Kind.GONE, body=body)


def _who(port: Port) -> str:
    return f"{port.end.name} (process {port.pid})" if port.pid else port.end.name
