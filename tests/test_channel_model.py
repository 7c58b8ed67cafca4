"""The hand-off channel under every order of events.

Two worlds. In the first, the real ends of threads run on locks whose every turn a seeded choice decides. In the
second, the broker's exchange and the links of the ends are joined by lines of bytes that arrive in pieces, whenever a
seeded choice says so, between processes that are only programs here and may be killed. What happened is judged by
value: which items were sent, which were received, and by whom.
"""

from __future__ import annotations

import gc
import pickle
import warnings
import weakref
from collections import Counter, deque
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from scheduler import ControlledLock, InterruptedWaitError, Scheduler, StuckError

from shardqueue.channel.exchange import Exchange, Port
from shardqueue.channel.forwarding import dump_error, forwardable, load_error
from shardqueue.channel.handoff import END, FAILED, REFUSED, TAKEN, WAIT, Answer, End, Handoff
from shardqueue.channel.links import ReceiverLink, SenderLink
from shardqueue.channel.report import ChannelReport, EndReport, Side, State, starving
from shardqueue.channel.threads import Hub
from shardqueue.channel.watch import Watch
from shardqueue.channel.wire import BY_REFERENCE, Frame, Frames, Kind, encode
from shardqueue.errors import (
    ChannelEmptyError,
    ChannelEndedError,
    ChannelFullError,
    ReceiversGoneError,
    SenderError,
    ShardQueueWarning,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator

    from shardqueue.channel.ends import Receiver, Sender
    from shardqueue.channel.threads import ThreadReceiver, ThreadSender

    Program = Generator["Needs", bool, None]


class ViolationError(AssertionError):
    """The channel did what it must not."""


class BrokenError(Exception):
    """What a program raises."""


def demand(is_so: bool, what: str) -> None:
    if not is_so:
        raise ViolationError(what)


class Item(NamedTuple):
    """An item: the sender's name, and its place among what that one sends."""

    sender: str
    place: int


class Queue(Handoff[Any]):
    """The queue, and whether items ever came back to it."""

    came_back = False

    def give_back(self, items: Iterable[Any], now: float) -> None:
        items = list(items)
        self.came_back = self.came_back or bool(items)
        super().give_back(items, now)


class EndsWithTheFirstSender(Queue):
    """A queue whose end is not counted."""

    def _is_over(self) -> bool:
        is_one_closed = any(not end.open for end in self.ends[Side.SENDER])
        return (is_one_closed or not self.open[Side.SENDER]) and not self.queue


class ForgetsWhatIsInHand(Queue):
    """A queue that ends while items may yet come back."""

    def _is_over(self) -> bool:
        return not (self.open[Side.SENDER] or self.queue)


# -- threads -----------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Threads:
    """One run of senders and receivers in threads; everything follows from the seed.

    Args:
        seed: of all choices.
        kind: of queue.
        drops: ends are dropped, in whatever thread, and others look at the channel meanwhile.
        interrupts: some waits are interrupted.
        late: they may be at the moment when they are over.
    """

    seed: int
    kind: type[Queue] = Queue
    drops: bool = False
    interrupts: bool = False
    late: bool = False
    sent: list[Item] = field(default_factory=list)
    unsure: set[Item] = field(default_factory=set)
    """Whose send was interrupted."""
    received: dict[str, list[Item]] = field(default_factory=dict)
    stayed: dict[str, BaseException] = field(default_factory=dict)
    """The receivers that went on to the end, and what that was."""
    ended_at: list[int] = field(default_factory=list)
    """Items accepted when a receiver was told the end."""
    raised: list[BaseException] = field(default_factory=list)
    """What senders ended with."""
    litter: list[Sender[Item] | Receiver[Item]] = field(default_factory=list)
    """Ends that are about to be dropped, by whatever thread comes by."""

    def run(self) -> None:
        self.random = random = Random(self.seed)
        self.scheduler = scheduler = Scheduler(random, interrupts_late=self.late)
        scheduler.between = self._collect
        locks = self._locks()
        senders, receivers = random.randint(1, 6), random.randint(1, 6)
        self.queue = self.kind(senders, receivers, random.randint(1, 3), scheduler.now())
        self.hub: Hub[Item] = Hub(
            self.queue, Watch(None, 1, scheduler.now), locks=lambda: next(locks), now=scheduler.now
        )
        unmade = 0
        for _ in range(senders):
            if random.random() < 0.05:
                unmade += 1
            else:
                self._start_sender(self.hub.sender())
        for _ in range(receivers):
            if random.random() < 0.05:
                unmade += 1
            else:
                self._start_receiver(self.hub.receiver())
        if unmade:
            scheduler.spawn("owner", self._forgo)
        if self.drops:
            scheduler.spawn("onlooker", self._look_on)
        gc.disable()
        try:
            scheduler.run()
            self.litter.clear()
        finally:
            gc.enable()
        self._judge()

    def _locks(self) -> Iterator[ControlledLock]:
        yield self.scheduler.lock(may_interrupt=False)
        while True:
            yield self.scheduler.lock()

    def _collect(self) -> None:
        if self.litter and self.random.random() < 0.1:
            self.litter.pop()

    def _drop(self, end: Sender[Item] | Receiver[Item]) -> None:
        """Whoever comes by drops the end, at the latest a thread that does nothing else."""
        self.litter.append(end)
        self.scheduler.spawn("collector", self._sweep)

    def _sweep(self) -> None:
        if self.litter:
            self.litter.pop()

    def _forgo(self) -> None:
        error = BrokenError("never made") if self.random.random() < 0.2 else None
        if error is not None and self.queue.untaken[Side.SENDER]:
            self.raised.append(error)
        self.hub.forgo(error)

    def _look_on(self) -> None:
        for _ in range(self.random.randrange(6)):
            report = self.hub.report()
            demand(report.sent == report.received + report.lost + report.depth, "a report does not add up")

    # programs

    def _start_sender(self, end: ThreadSender[Item] | None, first: int = 0) -> None:
        assert end is not None
        box = [end]
        task = self.scheduler.spawn(end.name, lambda: self._send_all(box, first))
        task.interrupts = self.random.randrange(3) if self.interrupts else 0

    def _send_all(self, box: list[ThreadSender[Item]], first: int) -> None:
        """Send some items; `box` has the end so that nobody but this frame holds it."""
        random, end = self.random, box.pop()
        ways = ["close", "error", "raise", "clone", "drop"]
        way = random.choices(ways, [6, 0.4, 0.4, 1, int(self.drops)])[0]
        try:
            last = first + random.randrange(8)
            if way == "close":
                with end:
                    self._send_some(end, first, last)
            elif way == "raise":
                with end:
                    self._send_some(end, first, last)
                    self._break()
            else:
                self._send_some(end, first, last)
                if way == "clone":
                    self._start_sender(end.clone(), 100)
                    self._send_some(end, last, last + random.randrange(4))
                elif way == "drop":
                    self._drop(end)
                    return
                error = BrokenError(end.name) if way == "error" else None
                if error is not None:
                    self.raised.append(error)
                end.close(error)
        except BrokenError:
            pass
        except ReceiversGoneError:
            demand(not self.queue.open[Side.RECEIVER], "senders are refused while there are receivers")
            end.close()
        except SenderError as error:
            demand(error.__cause__ in self.raised, f"{end.name} is refused for no sender's error")
            end.close()

    def _break(self) -> None:
        error = BrokenError("in a block")
        self.raised.append(error)
        raise error

    def _send_some(self, end: Sender[Item], first: int, last: int) -> None:
        for place in range(first, last):
            item = Item(end.name, place)
            timeouts = [self.random.choice((0, 0.5, 2.0)) for _ in range(self.random.choice((0, 0, 0, 1, 3)))]
            for timeout in [*timeouts, None]:
                try:
                    end.send(item, timeout)
                except ChannelFullError:
                    demand(timeout is not None, "full, without a time-out")
                    continue
                except InterruptedWaitError:
                    self.unsure.add(item)
                    break
                self.sent.append(item)
                break

    def _start_receiver(self, end: ThreadReceiver[Item] | None) -> None:
        assert end is not None
        self.received[end.name] = []
        box = [end]
        task = self.scheduler.spawn(end.name, lambda: self._receive_all(box))
        task.interrupts = self.random.randrange(3) if self.interrupts else 0

    def _receive_all(self, box: list[ThreadReceiver[Item]]) -> None:
        random, end = self.random, box.pop()
        mine = self.received[end.name]
        way = random.choices(["stay", "iterate", "leave", "clone", "drop"], [4, 4, 1, 1, int(self.drops)])[0]
        if way == "iterate":
            with end:
                try:
                    while True:
                        try:
                            mine.extend(end)  # what came before an interruption stays
                            self._ended(end, ChannelEndedError())
                            return
                        except InterruptedWaitError:
                            pass
                except (BrokenError, SenderError) as error:
                    self._ended(end, error)
            return
        items = random.randrange(6) if way != "stay" else 1000
        if not self._receive_some(end, items):
            end.close()
            return
        if way == "clone":
            self._start_receiver(end.clone())
        elif way == "drop":
            self._drop(end)
            return
        end.close()

    def _receive_some(self, end: Receiver[Item], most: int) -> bool:
        """Return whether the stream goes on after so many items."""
        for _ in range(most):
            timeout = self.random.choice((None, None, None, 0, 0.5))
            try:
                self.received[end.name].append(end.receive(timeout))
            except ChannelEmptyError:
                demand(timeout is not None, "empty, without a time-out")
            except InterruptedWaitError:
                pass
            except (ChannelEndedError, BrokenError) as error:
                self._ended(end, error)
                return False
        return True

    def _ended(self, end: Receiver[Item], told: Exception) -> None:
        report = self.queue.report(self.scheduler.time)
        if isinstance(told, ChannelEndedError):
            demand(not self.queue.open[Side.SENDER], f"{end.name} was told the end while there are senders")
            self.ended_at.append(report.sent)
        else:
            demand(told in self.raised, f"{end.name} was told what no sender raised")
        self.stayed[end.name] = told
        if self.interrupts:
            return  # what an interrupted wait got comes back, perhaps after the end
        demand(not report.depth, f"{end.name} was told the end while items were queued")
        with pytest.raises(type(told)):
            end.receive(0)

    # judgement

    def _judge(self) -> None:
        queue, report = self.queue, self.hub.report()
        received = Counter(item for items in self.received.values() for item in items)
        demand(max(received.values(), default=1) == 1, f"twice: {received.most_common(3)}")
        sent = set(self.sent)
        demand(len(sent) == len(self.sent), "the model sent something twice")
        demand(set(received) <= sent | self.unsure, "received what nobody sent")
        missing = sent - set(received)
        demand(
            len(sent) <= report.sent <= len(sent) + len(self.unsure), "the report counts other items as sent"
        )
        demand(report.received == len(received), "the report counts other items as received")
        demand(report.sent == report.received + report.lost, "the report does not add up")
        if self.stayed and not self.interrupts:
            demand(not missing and not report.lost, f"lost while receivers were left: {missing}")
        demand(len(missing) <= report.lost <= len(missing) + len(self.unsure), "the lost are miscounted")
        demand(all(count == report.sent for count in self.ended_at), "an item came after the end")
        if not queue.came_back:
            in_order(self.received)
        told = {id(error) if isinstance(error, BrokenError) else None for error in self.stayed.values()}
        demand(len(told) <= 1, "receivers were told different ends")
        demand(not self.raised or not told or None not in told, "a sender's error was not told")
        demand(queue.is_finished, f"not all ends count as closed: {queue.open}")
        demand(
            not (report.depth or queue.left or queue.wakes or queue.reserved or queue.held),
            "something is left",
        )


def in_order(received: dict[str, list[Item]]) -> None:
    """What a sender sent, every receiver receives in that order."""
    for name, items in received.items():
        places: dict[str, int] = {}
        for item in items:
            demand(places.get(item.sender, -1) < item.place, f"{name} received out of order: {items}")
            places[item.sender] = item.place


# -- processes ---------------------------------------------------------------------------------------------


class Needs(Enum):
    """What a program waits for."""

    TURN = "its turn"
    NEWS = "news from the broker"
    NEWS_IN_TIME = "news from the broker, or a time-out"


class Memory(NamedTuple):
    """An item as it is pickled. One by reference has a number of the transmission, whose memory is read once."""

    item: Item
    is_unpicklable: bool
    transmission: int | None = None


class Client:
    """A process with one end: what `processes` does around a link, as a program that is let go on step by step.

    Attributes:
        port: what the exchange calls it; None: the broker has not heard of it yet.
        up, down: bytes on their way to the broker and from it.
        descriptors: on their way to the broker, each with the byte it goes with.
        is_gone: its process has ended; nothing more comes.
        is_killed: it did so by force.
        has_hung_up: the broker knows.
        was_heard: the broker has got a frame of it.
    """

    def __init__(self, world: World, name: str, port: Port | None, link: SenderLink | ReceiverLink) -> None:
        self.world, self.name, self.port, self._link = world, name, port, link
        self.up, self.down = bytearray(), bytearray()
        self.written = 0
        self.descriptors: deque[tuple[int, int]] = deque()
        self._come: list[int] = []
        self.at_broker, self._here, self._said = Frames(), Frames(), Frames()
        self.clones: deque[Client] = deque()
        self.is_gone = self.is_killed = self.has_hung_up = self.was_heard = self.has_closed = False
        self.program: Generator[Needs, bool, None] = iter(())  # type: ignore[assignment]
        self.needs = Needs.TURN
        self.is_slow = False
        self.change_pace()
        self.interrupts = world.random.randrange(3) if world.interrupts else 0
        self.is_in_call = False
        self.last_write = 0

    def go_on(self, has_news: bool) -> None:
        """Let the program do what it does next."""
        try:
            self.needs = self.program.send(has_news) if self._is_begun else next(self.program)
            self._is_begun = True
        except StopIteration:
            self.is_gone = True

    _is_begun = False

    def change_pace(self) -> None:
        """From now on it is slow, or it is not."""
        side = Side.SENDER if isinstance(self, SenderClient) else Side.RECEIVER
        self.is_slow = self.world.random.random() < self.world.slow[side]

    def interrupt(self) -> None:
        """Interrupt the program, which waits."""
        self.interrupts -= 1
        try:
            self.needs = self.program.throw(InterruptedWaitError())
        except StopIteration:
            self.is_gone = True

    def write(self, data: bytes, descriptors: tuple[int, ...] = ()) -> None:
        self.descriptors.extend((self.written, descriptor) for descriptor in descriptors)
        self.up += data
        self.written += len(data)
        self.last_write = len(data)

    def hear(self) -> None:
        """Some of the bytes that came are read."""
        size = self.world.random.choice((len(self.down), self.world.random.randint(1, len(self.down))))
        data = bytes(self.down[:size])
        del self.down[:size]
        come, self._come = self._come, []
        for frame in self._here.feed(data, come):
            self._link.told(frame)
        self.after_news()

    def after_news(self) -> None: ...

    def said(self, data: bytes, descriptors: list[int]) -> list[Frame]:
        """The broker writes; return the frames."""
        if not self.is_gone:
            self.down += data
            self._come += descriptors
        return list(self._said.feed(data, descriptors))


class SenderClient(Client):
    """See `processes.ProcessSender`."""

    def __init__(self, world: World, name: str, port: Port | None) -> None:
        self.link = SenderLink()
        self._is_waiting = False
        self.offered: Item | None = None
        super().__init__(world, name, port, self.link)

    def after_news(self) -> None:
        numbers, self.link.again = self.link.again, []
        for number in numbers:
            if number in self.link.kept:
                self.write(self.link.repeated(number, self.world.dumps(self, number, self.link.kept[number])))

    def send(self, memory: Memory, by_reference: bool, is_timed: bool) -> Program:
        link = self.link
        if self._is_waiting:
            yield from self._take_back()
        if link.kept and self.down:
            self.hear()
        if link.gone is not None:
            raise load_error(link.gone)
        self.offered = memory.item
        body = self.world.dumps(self, link.next if by_reference else None, memory)
        descriptors = self.world.descriptors()
        self.write(link.item(body, by_reference, len(descriptors)), descriptors)
        link.count(memory, by_reference)
        if link.is_taken:
            return
        self._is_waiting = is_in_time = True
        while is_in_time and not link.is_answered:
            is_in_time = yield Needs.NEWS_IN_TIME if is_timed else Needs.NEWS
        if is_in_time:
            self._is_waiting = False
            is_taken = link.settle()
        else:
            is_taken = yield from self._take_back()
        if is_taken:
            return
        if link.gone is not None:
            raise load_error(link.gone)
        raise ChannelFullError

    def _take_back(self) -> Generator[Needs, bool, bool]:
        self.write(self.link.withdraw())
        while not (self.link.is_refused or self.link.is_answered):
            yield Needs.NEWS
        self._is_waiting = False
        return self.link.settle()

    def close(self, error: Exception | None, is_dropped: bool = False) -> Program:
        body = b"" if error is None else dump_error(forwardable(error, self.name), self.name)
        self.write(self.link.close(body, is_dropped))
        if is_dropped:
            yield Needs.TURN  # until its process ends
        while self.link.kept and not self.link.is_released:
            yield Needs.NEWS


class ReceiverClient(Client):
    """See `processes.ProcessReceiver`.

    Attributes:
        handed: items the broker wrote to its line.
        read: those the program got, and their numbers.
        done: how many of those handed are done with, as far as the broker has heard.
        told: what the end of the stream was.
    """

    def __init__(self, world: World, name: str, port: Port | None) -> None:
        self.link = ReceiverLink()
        self.handed: list[Item] = []
        self.read: list[tuple[int, Item]] = []
        self.done = 0
        self.told: Exception | None = None
        super().__init__(world, name, port, self.link)

    def receive(self, is_timed: bool) -> Generator[Needs, bool, None]:
        link = self.link
        while link.ready or link.over is not None or (yield from self._await(is_timed)):
            if not link.ready:
                self.told = load_error(link.over) if link.over else ChannelEndedError()
                return
            frame = link.take()
            try:
                item = self.world.loads(frame)
            except (ConnectionError, ValueError) as error:
                self.write(encode(Kind.UNREADABLE, frame.number))
                if isinstance(error, ValueError):
                    return
            else:
                self.read.append((frame.number, item))
                return
        demand(is_timed, f"{self.name} hears that there is nothing, without a time-out")

    def _await(self, is_timed: bool) -> Generator[Needs, bool, bool]:
        link = self.link
        while True:
            if not link.is_asked:
                self.write(link.ask())
            is_in_time = True
            while link.is_asked:
                heard = yield Needs.NEWS_IN_TIME if is_timed and is_in_time else Needs.NEWS
                if not heard:
                    is_in_time = False
                    self.write(link.withdraw())
            if not (link.is_refused and is_in_time):
                return not link.is_refused


@dataclass(eq=False)
class World:
    """One run of a broker's exchange and the programs around it; everything follows from the seed.

    Args:
        seed: of all choices.
        kind: of queue.
        redeliver: what a killed receiver had in hand goes to another one.
        senders_die: some of them are killed.
        receivers_die: the same.
        interrupts: some waits are interrupted.
        ahead: few ends, fast at first and stalled then, so that they have items ahead while the queue is full.
        quirks: some items cannot be unpickled, and some senders end with an error.
    """

    seed: int
    kind: type[Queue] = Queue
    redeliver: bool = False
    senders_die: bool = False
    receivers_die: bool = False
    interrupts: bool = False
    quirks: bool = False
    ahead: bool = False
    senders: list[SenderClient] = field(default_factory=list)
    receivers: list[ReceiverClient] = field(default_factory=list)
    sent: dict[Item, SenderClient] = field(default_factory=dict)
    """What was sent: its send returned."""
    unsure: set[Item] = field(default_factory=set)
    """What was being sent when its sender was killed or interrupted."""
    by_reference: set[Item] = field(default_factory=set)
    unpicklable: set[Item] = field(default_factory=set)
    unreadable: int = 0
    has_failed: bool = False
    """A sender ended with an error."""
    is_condemned: bool = False
    """A sender was killed before it had closed."""
    is_over: bool = False
    """A receiver was told the end of the stream."""

    # set-up

    def __post_init__(self) -> None:
        self.random = random = Random(self.seed)
        self.now = 0.0
        if self.ahead:
            senders, receivers, capacity = (
                random.randint(1, 3),
                random.randint(1, 3),
                random.choice((6, 8, 16)),
            )
            self.most, self.pace, self.haste = 40, [1e-6], 0.99
            self.slow = {Side.SENDER: 0.5, Side.RECEIVER: 1.0}
        else:
            senders, receivers = random.randint(1, 6), random.randint(1, 6)
            capacity = random.choice((1, 2, 3, 8))
            self.most = random.choice((6, 12))
            self.pace = random.choice(([1e-6], [1e-6, 1e-6, 1e-6, 1.0], [1e-4, 1.0], [1.0]))
            self.haste = 0.9
            self.slow = {side: random.choice((0.0, 0.3, 1.0)) for side in Side}
        self.threat = random.choice((0.003, 0.01, 0.05))
        self.kills = random.randint(1, 4) if self.senders_die or self.receivers_die else 0
        self.exchange = Exchange(senders, receivers, capacity, self.redeliver, self.now)
        self.queue = self.exchange.queue = self.kind(senders, receivers, capacity, self.now)
        self.clients: dict[End, Client] = {}
        self.numbers = count()
        self.open: set[int] = set()
        self.transmissions: dict[int, tuple[SenderClient, int]] = {}

    def run(self) -> None:
        random = self.random
        unmade = 0
        for _ in range(self.queue.untaken[Side.SENDER]):
            if random.random() < 0.05:
                unmade += 1
            else:
                self._start_sender(self.exchange.take(Side.SENDER))
        for _ in range(self.queue.untaken[Side.RECEIVER]):
            if random.random() < 0.05:
                unmade += 1
            else:
                self._start_receiver(self.exchange.take(Side.RECEIVER))
        self.is_forgone = not unmade
        while choices := self._choices():
            random.choice(choices)()
        self._judge()

    def _start_sender(self, port: Port | None, parent: str = "") -> SenderClient:
        name = f"clone of {parent}" if parent else f"sender {len(self.senders)}"
        client = SenderClient(self, name, port)
        client.program = self._send_all(client)
        self.senders.append(client)
        if port is not None:
            self.clients[port.end] = client
        return client

    def _start_receiver(self, port: Port | None, parent: str = "") -> ReceiverClient:
        name = f"clone of {parent}" if parent else f"receiver {len(self.receivers)}"
        client = ReceiverClient(self, name, port)
        client.program = self._receive_all(client)
        self.receivers.append(client)
        if port is not None:
            self.clients[port.end] = client
        return client

    # memory

    def dumps(self, owner: SenderClient, number: int | None, memory: Memory) -> bytes:
        if number is None:
            return pickle.dumps(memory)
        transmission = len(self.transmissions)
        self.transmissions[transmission] = (owner, number)
        return pickle.dumps(memory._replace(transmission=transmission))

    def loads(self, frame: Frame) -> Item:
        memory: Memory = pickle.loads(frame.body)
        demand((memory.transmission is not None) == bool(frame.flags & BY_REFERENCE), "a flag was lost")
        if memory.transmission is not None:
            owner, number = self.transmissions[memory.transmission]
            if owner.is_killed:
                self.unreadable += 1
                raise ConnectionError
            demand(number >= 0, f"{memory.item} is read twice from one transmission")
            demand(number in owner.link.kept, f"the memory of {memory.item} was let go before it was read")
            self.transmissions[memory.transmission] = (owner, -1)
        if memory.is_unpicklable:
            self.unreadable += 1
            raise ValueError
        return memory.item

    # programs

    def _send_all(self, me: SenderClient) -> Program:
        random = self.random
        if random.random() < 0.05:
            return  # it never uses the end
        yield Needs.TURN
        me.write(encode(Kind.ATTACH))
        way = random.choices(["close", "error", "clone", "drop"], [6, int(self.quirks), 1, 1])[0]
        error: Exception | None = None
        try:
            for place in range(random.randrange(self.most)):
                if random.random() < 0.3:
                    me.change_pace()
                    yield Needs.TURN
                yield from self._send_one(me, Item(me.name, place))
                if way == "clone" and random.random() < 0.2:
                    way = "close"
                    me.clones.append(self._start_sender(None, me.name))
                    me.write(encode(Kind.CLONE))
            if way == "error":
                error = BrokenError(me.name)
        except (ReceiversGoneError, SenderError, BrokenError) as refusal:
            receivers_left = self.queue.open[Side.RECEIVER]
            demand(not receivers_left or self.has_failed, f"{me.name} was refused for nothing")
            error = refusal if random.random() < 0.5 else None
        yield Needs.TURN
        yield from me.close(error, is_dropped=way == "drop")

    def _send_one(self, me: SenderClient, item: Item) -> Program:
        random = self.random
        is_by_reference = random.random() < 0.5
        memory = Memory(item, self.quirks and random.random() < 0.1)
        if is_by_reference:
            self.by_reference.add(item)
        if memory.is_unpicklable:
            self.unpicklable.add(item)
        for is_timed in [*([True] * random.choice((0, 0, 0, 1, 3))), False]:
            me.is_in_call = True
            try:
                yield from me.send(memory, is_by_reference, is_timed)
            except ChannelFullError:
                demand(is_timed, "full, without a time-out")
            except InterruptedWaitError:
                self.unsure.add(item)
                break
            else:
                self.sent[item] = me
                break
            finally:
                me.is_in_call, me.offered = False, None

    def _receive_all(self, me: ReceiverClient) -> Generator[Needs, bool, None]:
        random = self.random
        if random.random() < 0.05:
            return
        yield Needs.TURN
        me.write(encode(Kind.ATTACH))
        way = random.choices(["stay", "leave", "clone", "drop"], [6, 1, 1, 1])[0]
        for _ in range(1000 if way in ("stay", "clone") else random.randrange(6)):
            if random.random() < 0.3:
                me.change_pace()
                yield Needs.TURN
            me.is_in_call = True
            try:
                yield from me.receive(random.random() < 0.2)
            except InterruptedWaitError:
                continue
            finally:
                me.is_in_call = False
            if me.told is not None:
                break
            if way == "clone" and random.random() < 0.3:
                way = "stay"
                me.clones.append(self._start_receiver(None, me.name))
                me.write(encode(Kind.CLONE))
        yield Needs.TURN
        me.write(me.link.close(is_dropped=way == "drop"))

    # events

    def _choices(self) -> list[Callable[[], None]]:
        """All that could happen next."""
        if self.random.random() < self.haste:
            swift = [client for client in self._everyone() if not client.is_slow]
            if choices := self._choices_of(swift):
                return choices
        choices = self._choices_of(self._everyone())
        if not self.is_forgone and (not choices or self.random.random() < 0.1):
            choices.append(self._forgo)
        return choices

    def _everyone(self) -> list[Client]:
        return [*self.senders, *self.receivers]

    def _choices_of(self, clients: list[Client]) -> list[Callable[[], None]]:
        choices: list[Callable[[], None]] = []
        for client in clients:
            if client.port is not None and not client.has_hung_up:
                if client.up:
                    choices.append(lambda client=client: self._arrive(client))  # type: ignore[misc]
                elif client.is_gone:
                    choices.append(lambda client=client: self._hang_up(client))  # type: ignore[misc]
            if client.is_gone:
                continue
            if client.needs is Needs.TURN:
                choices.append(lambda client=client: client.go_on(False))  # type: ignore[misc]
            elif client.down:
                choices.append(lambda client=client: self._hear(client))  # type: ignore[misc]
            if client.needs is Needs.NEWS_IN_TIME and self.random.random() < 0.1:
                choices.append(lambda client=client: client.go_on(False))  # type: ignore[misc]
            if (
                client.needs is not Needs.TURN
                and client.interrupts
                and client.is_in_call
                and self.random.random() < 0.05
            ):
                choices.append(client.interrupt)
            if self.kills and self.random.random() < self.threat and self._may_die(client):
                choices = [lambda client=client: self._kill(client)]  # type: ignore[misc]
                break
        return choices

    def _may_die(self, client: Client) -> bool:
        return self.senders_die if isinstance(client, SenderClient) else self.receivers_die

    def _kill(self, client: Client) -> None:
        """What it had written arrives, but for the rest of what it may have been writing."""
        self.kills -= 1
        client.is_gone = client.is_killed = True
        if client.is_in_call:
            cut = self.random.randint(0, min(client.last_write, len(client.up)))
            del client.up[len(client.up) - cut :]
            client.written -= cut
        if isinstance(client, SenderClient) and client.offered is not None:
            self.unsure.add(client.offered)

    def _hear(self, client: Client) -> None:
        client.hear()
        client.go_on(True)

    def _arrive(self, client: Client) -> None:
        """Some bytes arrive at the broker."""
        size = self.random.choice((len(client.up), self.random.randint(1, len(client.up))))
        data = bytes(client.up[:size])
        del client.up[:size]
        descriptors = []
        while client.descriptors and client.descriptors[0][0] < client.written - len(client.up):
            descriptors.append(client.descriptors.popleft()[1])
        self.open.update(descriptors)
        for frame in client.at_broker.feed(data, descriptors):
            self._told(client, frame)

    def _told(self, client: Client, frame: Frame) -> None:
        port = client.port
        assert port is not None
        client.was_heard = True
        if frame.kind == Kind.CLONE:
            clone = client.clones.popleft()
            clone.port = self.exchange.clone(port)
            demand(clone.port is not None, "an open end was not cloned")
            assert clone.port is not None
            self.clients[clone.port.end] = clone
            return
        if frame.kind == Kind.CLOSE:
            client.has_closed = True
            if isinstance(client, SenderClient) and frame.body and not self.is_over:
                self.has_failed = True
        if isinstance(client, ReceiverClient) and frame.kind in (Kind.ASK, Kind.CLOSE):
            client.done = frame.number
        self._pass_time()
        self.exchange.told(port, frame, self.now)
        self._flush()

    def _hang_up(self, client: Client) -> None:
        assert client.port is not None
        client.has_hung_up = True
        if isinstance(client, SenderClient) and client.was_heard and not client.has_closed:
            self.is_condemned = True
        for clone in client.clones:  # the broker never hears of them
            clone.is_gone = clone.is_killed = True
        self._close_descriptors(client.at_broker.rest())
        self._pass_time()
        lost = self.queue.lost
        self.exchange.hung_up(client.port, self.now)
        if isinstance(client, SenderClient) and self.queue.lost > lost and not self.is_over:
            self.is_condemned = True
        self._flush()

    def _forgo(self) -> None:
        self.is_forgone = True
        error = None
        if self.quirks and self.random.random() < 0.3:
            error = BrokenError("never made")
            self.has_failed = self.has_failed or bool(self.queue.untaken[Side.SENDER])
        self._pass_time()
        self.exchange.forgo(self.now, error)
        self._flush()

    def descriptors(self) -> tuple[int, ...]:
        """Some file descriptors that go with an item."""
        return tuple(next(self.numbers) for _ in range(self.random.choice((0, 0, 1, 2))))

    def _pass_time(self) -> None:
        self.now += self.random.choice(self.pace)

    def _flush(self) -> None:
        """What the broker says goes onto the lines, as far as there are any."""
        ended = False
        for port in self.exchange.ports.values():
            client = self.clients[port.end]
            if not port.out or not client.was_heard:
                continue
            data = b"".join(frame for frame, _ in port.out)
            with_it = [descriptor for _, descriptors in port.out for descriptor in descriptors]
            demand(set(with_it) <= self.open, "a file descriptor was closed before it was passed on")
            port.out.clear()
            for frame in client.said(data, with_it):
                if frame.kind == Kind.END:
                    ended = True
                    self._is_told_the_end(client)
                elif frame.kind == Kind.ITEM:
                    self._handed(client, frame)
        self._close_descriptors(self.exchange.free)
        self.exchange.free.clear()
        self.is_over = self.is_over or ended
        queue = self.queue
        demand(queue.reserved >= 0 and queue.held >= 0, "more came back than was handed out")
        demand(
            queue.came_back or len(queue.queue) + queue.reserved <= queue.capacity,
            "more than the capacity is queued",
        )

    def _close_descriptors(self, descriptors: list[int]) -> None:
        for descriptor in descriptors:
            demand(descriptor in self.open, "a file descriptor is closed twice")
            self.open.remove(descriptor)

    def _is_told_the_end(self, client: Client) -> None:
        if self.has_failed or not self.redeliver:
            return
        for other in self.receivers:
            in_hand = other.handed[other.done :]
            demand(
                other.has_hung_up or other.has_closed or not in_hand,
                f"{client.name} was told the end while {other.name} had {in_hand} in hand",
            )

    def _handed(self, client: Client, frame: Frame) -> None:
        item = pickle.loads(frame.body).item
        assert isinstance(client, ReceiverClient)
        demand(frame.number == len(client.handed), "an item has another one's number")
        is_new = not any(item in receiver.handed for receiver in self.receivers)
        client.handed.append(item)
        # What an interrupted wait got may come back after the end.
        demand(
            not self.is_over or self.has_failed or self.interrupts,
            f"{item} is handed out after a receiver was told the end",
        )
        if frame.flags & BY_REFERENCE:
            owner, _ = self.transmissions[pickle.loads(frame.body).transmission]
            is_known_gone = owner.is_killed and owner.has_hung_up
            demand(not (is_new and is_known_gone), f"{item} is handed out, whose memory is known to be gone")

    # judgement

    def _judge(self) -> None:
        hanging = [
            f"{client.name} for {client.needs.value}" for client in self._everyone() if not client.is_gone
        ]
        demand(not hanging, f"they wait for ever: {'; '.join(hanging)}")
        queue, report = self.queue, self.exchange.report(self.now)
        stayed = [
            receiver for receiver in self.receivers if receiver.told is not None and not receiver.is_killed
        ]
        safe, in_dead_hands = self._safe()
        read = Counter(item for receiver in self.receivers for _, item in receiver.read)
        demand(set(read) <= set(self.sent) | self.unsure, "received what was not sent")
        for item, times in read.items():
            demand(
                times == 1 or (self.redeliver and item in in_dead_hands), f"{item} was received {times} times"
            )
        for item in set(self.sent) - set(read):
            demand(self._may_miss(item, bool(stayed), in_dead_hands), f"{item} was not received")
        lost = set(self.sent) - safe
        demand(
            len(lost) <= report.lost <= len(lost) + len(self.unsure - safe),
            f"{report.lost} lost, but it is {len(lost)}: {sorted(lost)}",
        )
        if not queue.came_back:
            in_order({receiver.name: [item for _, item in receiver.read] for receiver in self.receivers})
        self._judge_ends(stayed)
        demand(not self.open, "file descriptors are left open")
        demand(self.exchange.is_finished, f"not all ends count as closed: {queue.open}")
        demand(
            not (queue.reserved or queue.held or report.depth or queue.left or queue.wakes),
            "something is left",
        )

    def _safe(self) -> tuple[set[Item], set[Item]]:
        """Return what was received for good, and what killed receivers had in hand."""
        safe: set[Item] = set()
        in_dead_hands: set[Item] = set()
        for receiver in self.receivers:
            hands = len(receiver.handed)
            if receiver.is_killed and not receiver.has_closed:
                hands = receiver.done
                in_dead_hands.update(receiver.handed[hands:])
            safe.update(item for number, item in receiver.read if number < hands)
        return safe, in_dead_hands

    def _may_miss(self, item: Item, has_stayed: bool, in_dead_hands: set[Item]) -> bool:
        return (
            (self.sent[item].is_killed and item in self.by_reference)
            or item in self.unpicklable
            or not has_stayed
            or self.has_failed
            or (self.interrupts and self.is_over)
            or (not self.redeliver and item in in_dead_hands)
        )

    def _judge_ends(self, stayed: list[ReceiverClient]) -> None:
        for receiver in stayed:
            told = receiver.told
            if isinstance(told, ChannelEndedError):
                demand(not (self.has_failed or self.is_condemned), f"{receiver.name} was not told the error")
            elif self.has_failed:
                demand(
                    isinstance(told, BrokenError | SenderError | ReceiversGoneError),
                    f"{receiver.name}: {told!r}",
                )
            else:
                demand(isinstance(told, SenderError), f"{receiver.name}: {told!r}")
                demand(
                    self.is_condemned or self.unreadable > 0 or (self.redeliver and self.queue.lost > 0),
                    f"{receiver.name} was told {told!r} for nothing",
                )


# -- every order of events ---------------------------------------------------------------------------------

THREADS: dict[str, dict[str, bool]] = {
    "plain": {},
    "drops": {"drops": True},
    "interrupts": {"interrupts": True},
    "late interrupts": {"interrupts": True, "late": True},
    "drops and interrupts": {"drops": True, "interrupts": True},
}
PROCESSES: dict[str, dict[str, bool]] = {
    "plain": {},
    "quirks": {"quirks": True},
    "interrupts": {"interrupts": True},
    "ahead": {"ahead": True},
    "senders die": {"senders_die": True},
    "receivers die": {"receivers_die": True},
    "receivers die ahead": {"receivers_die": True, "ahead": True},
    "all die": {"senders_die": True, "receivers_die": True, "quirks": True},
    "redeliver": {"receivers_die": True, "redeliver": True},
    "redeliver ahead": {"receivers_die": True, "redeliver": True, "ahead": True},
    "redeliver, all die": {"senders_die": True, "receivers_die": True, "redeliver": True, "quirks": True},
}


def violation(run: Callable[[], None]) -> str:
    """Return what a run did wrong, or nothing."""
    what = ""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*dropped without close", ShardQueueWarning)
        try:
            run()
        except Exception as error:  # the channel's own assertions are violations, too
            what = f"{type(error).__name__}: {error}"
        if what:
            gc.collect()  # the ends that are left
    return what


def violations(kind: type[Threads] | type[World], seeds: range, flags: dict[str, bool]) -> str:
    """Return the first violation and its seed, and how many there are."""
    found = {seed: what for seed in seeds if (what := violation(kind(seed, **flags).run))}  # type: ignore[arg-type]
    return "".join(f"{len(found)} of {len(seeds)}; seed {seed}: {found[seed]}" for seed in sorted(found)[:1])


@pytest.mark.parametrize("case", THREADS)
def test_threads_receive_every_item_once_and_end_in_every_order(case: str) -> None:
    assert not violations(Threads, range(75), THREADS[case])


@pytest.mark.parametrize("case", PROCESSES)
def test_processes_receive_every_item_and_end_in_every_order(case: str) -> None:
    assert not violations(World, range(125), PROCESSES[case])


@pytest.mark.full
@pytest.mark.parametrize("case", THREADS)
def test_threads_receive_every_item_once_and_end_in_many_more_orders(case: str) -> None:
    assert not violations(Threads, range(75, 2000), THREADS[case])


@pytest.mark.full
@pytest.mark.parametrize("case", PROCESSES)
def test_processes_receive_every_item_and_end_in_many_more_orders(case: str) -> None:
    assert not violations(World, range(125, 3000), PROCESSES[case])


@pytest.mark.filterwarnings("ignore:.*dropped without close:shardqueue.errors.ShardQueueWarning")
def test_the_same_seed_gives_the_same_run() -> None:
    for seed in range(5):
        first, second = (Threads(seed, drops=True, interrupts=True) for _ in range(2))
        first.run()
        second.run()
        assert (first.sent, first.received) == (second.sent, second.received)


def test_threads_that_wait_for_ever_are_found() -> None:
    scheduler = Scheduler(Random(0))
    lock = scheduler.lock()
    for name in ("first", "second"):
        scheduler.spawn(name, lambda: demand(lock.acquire(), "it is not taken"))
    with pytest.raises(StuckError, match=r"everybody waits: (first|second) for lock 0"):
        scheduler.run()


# -- without the count -------------------------------------------------------------------------------------


def is_found(run: Callable[[int, type[Queue]], Callable[[], None]], kind: type[Queue], seeds: range) -> bool:
    """Whether a run goes wrong with this kind of queue that goes well with the real one."""
    return any(violation(run(seed, kind)) and not violation(run(seed, Queue)) for seed in seeds)


def test_without_the_counted_end_threads_lose_items() -> None:
    assert is_found(lambda seed, kind: Threads(seed, kind).run, EndsWithTheFirstSender, range(20))


def test_without_the_counted_end_processes_lose_items() -> None:
    assert is_found(lambda seed, kind: World(seed, kind).run, EndsWithTheFirstSender, range(20))


def test_an_end_that_forgets_what_is_in_hand_is_found() -> None:
    def redelivering(seed: int, kind: type[Queue]) -> Callable[[], None]:
        return World(seed, kind, redeliver=True, receivers_die=True).run

    assert is_found(redelivering, ForgetsWhatIsInHand, range(100))


# -- the counted queue's rules -----------------------------------------------------------------------------


def queue_of(senders: int, receivers: int, capacity: int = 4) -> tuple[Handoff[str], list[End], list[End]]:
    queue: Handoff[str] = Handoff(senders, receivers, capacity, 0.0)
    made = {side: [queue.take(side) for _ in range(queue.untaken[side])] for side in Side}
    everyone = {side: [end for end in ends if end is not None] for side, ends in made.items()}
    return queue, everyone[Side.SENDER], everyone[Side.RECEIVER]


def woken(queue: Handoff[str]) -> list[tuple[str, str | Answer]]:
    wakes = [(end.name, answer) for end, answer in queue.wakes]
    queue.wakes.clear()
    return wakes


def test_no_more_ends_are_taken_than_were_declared() -> None:
    queue, senders, _ = queue_of(2, 1)
    assert [end.name for end in senders] == ["sender 0", "sender 1"]
    assert queue.take(Side.SENDER) is None


def test_a_senders_error_comes_after_what_was_queued_and_refuses_the_others() -> None:
    queue, (first, second), (receiver, other) = queue_of(2, 2, capacity=2)
    error = BrokenError()
    queue.offer(first, "a", 1.0)
    queue.offer(second, "b", 1.0)
    assert queue.offer(second, "c", 1.0) is WAIT
    queue.close(first, 2.0, State.FAILED, error)
    assert woken(queue) == [("sender 1", REFUSED)]
    assert queue.offer(second, "d", 3.0) is REFUSED
    assert queue.refusal is error
    assert [queue.ask(receiver, 4.0) for _ in range(4)] == ["a", "b", FAILED, FAILED]
    assert queue.ask(other, 5.0) is FAILED
    assert queue.failure is error


def test_a_senders_error_reaches_receivers_that_wait() -> None:
    queue, (first, _), (receiver,) = queue_of(2, 1)
    assert queue.ask(receiver, 1.0) is WAIT
    queue.close(first, 2.0, State.FAILED, BrokenError())
    assert woken(queue) == [("receiver 0", FAILED)]


def test_the_first_of_two_errors_is_told() -> None:
    queue, (first, second), (receiver,) = queue_of(2, 1)
    errors = BrokenError("first"), BrokenError("second")
    queue.close(first, 1.0, State.FAILED, errors[0])
    queue.close(second, 1.0, State.FAILED, errors[1])
    assert queue.ask(receiver, 2.0) is FAILED
    assert queue.failure is errors[0]


def test_a_killed_senders_error_is_told_at_the_very_end() -> None:
    queue, (killed, other), (receiver,) = queue_of(2, 1)
    error = SenderError("killed")
    queue.offer(killed, "a", 1.0)
    queue.close(killed, 2.0, State.KILLED, error)
    assert queue.offer(other, "b", 3.0) is TAKEN
    assert [queue.ask(receiver, 4.0) for _ in range(3)] == ["a", "b", WAIT]
    assert queue.offer(other, "c", 5.0) is TAKEN
    assert woken(queue) == [("receiver 0", "c")]
    assert queue.ask(receiver, 6.0) is WAIT
    queue.close(other, 7.0)
    assert woken(queue) == [("receiver 0", FAILED)]
    assert queue.failure is error


def test_the_stream_ends_for_all_with_the_last_sender() -> None:
    queue, (first, second), (receiver, other) = queue_of(2, 2)
    assert queue.ask(receiver, 1.0) is WAIT
    queue.close(first, 2.0)
    queue.close(first, 2.0)
    assert not woken(queue)
    clone = queue.clone(second)
    assert clone is not None
    queue.close(second, 3.0)
    assert not woken(queue)
    assert queue.clone(second) is None
    queue.close(clone, 4.0)
    assert woken(queue) == [("receiver 0", END)]
    assert queue.ask(other, 5.0) is END


def test_a_sender_that_withdraws_has_not_sent_and_loses_its_place() -> None:
    queue, (first, second), (receiver,) = queue_of(2, 1, capacity=1)
    queue.offer(first, "a", 1.0)
    assert queue.offer(first, "b", 1.0) is WAIT
    assert queue.offer(second, "c", 1.0) is WAIT
    assert queue.offer(second, "d", 1.0, wait=False) is WAIT
    assert queue.withdraw(first, 2.0)
    assert not queue.withdraw(first, 2.0)
    assert queue.ask(receiver, 3.0) == "a"
    assert woken(queue) == [("sender 1", TAKEN)]
    assert not queue.withdraw(second, 4.0)
    assert queue.ask(receiver, 5.0) == "c"
    assert queue.report(6.0).sent == 2


def test_a_receiver_that_withdraws_gets_nothing() -> None:
    queue, (sender,), (first, second) = queue_of(1, 2)
    assert queue.ask(first, 1.0) is WAIT
    assert queue.ask(second, 1.0) is WAIT
    assert queue.withdraw(first, 2.0)
    queue.offer(sender, "a", 3.0)
    assert woken(queue) == [("receiver 1", "a")]


def test_items_given_back_are_next_in_line_in_their_order() -> None:
    queue, (sender,), (receiver, other) = queue_of(1, 2)
    for item in "abcd":
        queue.offer(sender, item, 1.0)
    taken = [queue.ask(receiver, 2.0) for _ in range(2)]
    queue.give_back([str(item) for item in taken], 3.0)
    assert [queue.ask(other, 4.0) for _ in range(4)] == ["a", "b", "c", "d"]
    report = queue.report(5.0)
    assert (report.sent, report.received, report.lost) == (4, 4, 0)


def test_items_given_back_go_to_those_who_wait_in_their_order() -> None:
    queue, (sender,), (receiver, *others) = queue_of(1, 3)
    for item in "abc":
        queue.offer(sender, item, 1.0)
    taken = [queue.ask(receiver, 2.0) for _ in range(3)]
    for other in others:
        assert queue.ask(other, 3.0) is WAIT
    queue.give_back([str(item) for item in taken], 4.0)
    assert woken(queue) == [("receiver 1", "a"), ("receiver 2", "b")]
    assert queue.ask(others[0], 5.0) == "c"


def test_items_given_back_to_nobody_are_lost() -> None:
    queue, (sender,), (receiver,) = queue_of(1, 1)
    queue.offer(sender, "a", 1.0)
    assert queue.ask(receiver, 2.0) == "a"
    queue.close(receiver, 3.0)
    queue.give_back(["a"], 4.0)
    report = queue.report(5.0)
    assert (report.sent, report.received, report.lost, queue.left) == (1, 0, 1, ["a"])


def test_when_the_last_receiver_leaves_what_is_queued_is_lost_and_senders_are_refused() -> None:
    queue, (sender, other), (receiver,) = queue_of(2, 1, capacity=2)
    for item in "ab":
        queue.offer(sender, item, 1.0)
    assert queue.offer(other, "c", 1.0) is WAIT
    queue.close(receiver, 2.0)
    assert woken(queue) == [("sender 1", REFUSED)]
    assert isinstance(queue.refusal, ReceiversGoneError)
    assert (queue.left, queue.lost, len(queue.queue)) == (["a", "b"], 2, 0)
    assert queue.offer(sender, "d", 3.0) is REFUSED


def test_ends_nobody_took_count_as_closed_when_they_are_forgone() -> None:
    queue: Handoff[str] = Handoff(3, 2, 4, 0.0)
    sender, receiver = queue.take(Side.SENDER), queue.take(Side.RECEIVER)
    assert sender is not None
    assert receiver is not None
    queue.offer(sender, "a", 1.0)
    queue.close(sender, 2.0)
    assert [queue.ask(receiver, 3.0) for _ in range(2)] == ["a", WAIT]
    assert queue.forgo(4.0) == {Side.SENDER: 2, Side.RECEIVER: 1}
    assert woken(queue) == [("receiver 0", END)]
    assert queue.forgo(5.0) == {Side.SENDER: 0, Side.RECEIVER: 0}
    assert not queue.is_finished
    queue.close(receiver, 6.0)
    assert queue.is_finished


def test_the_error_of_forgone_senders_is_told_and_that_of_none_is_not() -> None:
    error = BrokenError()
    queue: Handoff[str] = Handoff(1, 1, 4, 0.0)
    receiver = queue.take(Side.RECEIVER)
    assert receiver is not None
    assert queue.ask(receiver, 1.0) is WAIT
    queue.forgo(2.0, error)
    assert woken(queue) == [("receiver 0", FAILED)]
    assert queue.failure is error
    queue, (sender,), (receiver,) = queue_of(1, 1)
    queue.forgo(1.0, error)
    assert queue.offer(sender, "a", 2.0) is TAKEN


def test_the_end_waits_for_what_is_in_hand() -> None:
    queue, (sender,), (first, second) = queue_of(1, 2)
    queue.offer(sender, "a", 1.0)
    assert queue.ask(first, 2.0) == "a"
    queue.held += 1
    queue.close(sender, 3.0)
    assert queue.ask(second, 4.0) is WAIT
    queue.close(first, 5.0, State.KILLED)
    queue.held -= 1
    queue.give_back(["a"], 6.0)
    queue.settle(6.0)
    assert woken(queue) == [("receiver 1", "a")]
    assert queue.ask(second, 7.0) is END


def test_items_that_are_removed_are_lost_and_make_room() -> None:
    queue, (first, second), (receiver,) = queue_of(2, 1, capacity=3)
    for item in ("a1", "b1", "a2"):
        queue.offer(first, item, 1.0)
    assert queue.offer(second, "b2", 1.0) is WAIT
    assert queue.remove(lambda item: item.startswith("a"), 2.0) == 2
    assert woken(queue) == [("sender 1", TAKEN)]
    assert [queue.ask(receiver, 3.0) for _ in range(3)] == ["b1", "b2", WAIT]
    report = queue.report(4.0)
    assert (report.sent, report.received, report.lost) == (4, 2, 2)


# -- reports -----------------------------------------------------------------------------------------------


def ends_of(report: ChannelReport) -> dict[str, EndReport]:
    return {end.name: end for end in (*report.senders, *report.receivers)}


def test_waits_before_the_first_item_between_items_and_at_the_end_are_kept_apart() -> None:
    queue, (sender,), (receiver,) = queue_of(1, 1)
    assert queue.ask(receiver, 1.0) is WAIT
    queue.offer(sender, "a", 3.0)
    assert queue.ask(receiver, 4.0) is WAIT
    queue.offer(sender, "b", 9.0)
    assert queue.ask(receiver, 10.0) is WAIT
    queue.close(sender, 13.0)
    queue.close(receiver, 14.0)
    report = queue.report(99.0)
    end = ends_of(report)["receiver 0"]
    assert (end.items, end.lead, end.waited, end.seconds) == (2, 2.0, 5.0, 6.0)
    assert end.wait_fraction == pytest.approx(5 / 6)
    assert end.state is State.CLOSED
    assert report.seconds == 6.0
    assert report.items_per_second == pytest.approx(2 / 6)


def test_a_wait_that_goes_on_is_counted_in_a_report() -> None:
    queue, (sender,), (receiver,) = queue_of(1, 1, capacity=1)
    assert queue.ask(receiver, 1.0) is WAIT
    assert ends_of(queue.report(4.0))["receiver 0"].lead == 3.0
    for item in "abc":
        queue.offer(sender, item, 5.0)
    end = ends_of(queue.report(8.0))["sender 0"]
    assert (end.items, end.waited, end.seconds, end.lead) == (2, 3.0, 3.0, 0.0)
    assert ends_of(queue.report(8.0))["receiver 0"].waited == 0.0


def test_a_withdrawn_wait_counts() -> None:
    queue, (sender,), _ = queue_of(1, 1, capacity=1)
    queue.offer(sender, "a", 0.0)
    assert queue.offer(sender, "b", 2.0) is WAIT
    queue.withdraw(sender, 5.0)
    assert ends_of(queue.report(6.0))["sender 0"].waited == 3.0


def test_the_mean_depth_is_over_time() -> None:
    queue, (sender,), (receiver,) = queue_of(1, 1)
    queue.offer(sender, "a", 10.0)
    queue.offer(sender, "b", 11.0)
    assert queue.ask(receiver, 14.0) == "a"
    report = queue.report(20.0)
    assert report.mean_depth == pytest.approx((1 * 1 + 2 * 3 + 1 * 6) / 10)
    assert report.depths == ((10.0, 0), (11.0, 1), (14.0, 2))
    assert report.depth == 1


def test_depths_are_thinned_and_their_mean_stays() -> None:
    queue, (sender,), (receiver,) = queue_of(1, 1)
    for turn in range(2000):
        queue.offer(sender, "a", turn)
        queue.ask(receiver, turn + 0.5)
    report = queue.report(2000.0)
    assert len(report.depths) <= 512
    assert report.mean_depth == pytest.approx(0.5, abs=0.1)


def test_the_numbers_of_a_report_add_up_in_words() -> None:
    queue, (sender,), (receiver,) = queue_of(1, 1)
    for item in "abc":
        queue.offer(sender, item, 0.0)
    assert queue.ask(receiver, 1.0) == "a"
    queue.close(receiver, 1.0)
    queue.close(sender, 1.0)
    queue.redelivered = 1
    report = queue.report(9.0)
    assert (report.sent, report.received, report.lost, report.seconds) == (3, 1, 2, 1.0)
    assert report.summary() == (
        "1 items, 1.0/s; depth 3.0 of 4 on average; consumers waited 0.0 %; producers waited 0.0 %; 2 LOST; "
        "1 delivered again"
    )
    metrics = report.metrics("it/")
    assert (metrics["it/lost"], metrics["it/sender0/items"], metrics["it/receiver0/items"]) == (2.0, 3.0, 1.0)


def test_a_receiver_that_starves_is_named_with_numbers_once() -> None:
    queue, (sender,), (receiver, other) = queue_of(1, 2)
    for end in (other, receiver):
        assert queue.ask(end, 0.0) is WAIT
        queue.offer(sender, "a", 0.0)
    for since, until in ((0.0, 1.0), (9.0, 9.5), (10.0, 12.0)):
        assert not queue.starved
        assert queue.ask(receiver, since) is WAIT
        queue.offer(sender, "b", until)
    assert queue.starved
    assert starving(queue.report(12.0)) == (
        "receiver 0 waited 29 % of 12 s: all receivers waited 29.2 %, 0.0 %, all senders 0.0 %, and the queue held "
        "0.0 of 4 items on average. The senders are slower than the receivers: more or faster senders, or fewer "
        "receivers, would keep all of them busy"
    )
    queue.starved = False
    assert queue.ask(receiver, 12.0) is WAIT
    queue.offer(sender, "c", 20.0)
    assert not queue.starved


def test_a_receiver_does_not_starve_early_or_at_the_end() -> None:
    queue, (sender,), (receiver,) = queue_of(1, 1)
    assert queue.ask(receiver, 0.0) is WAIT
    queue.offer(sender, "a", 50.0)
    assert queue.ask(receiver, 50.0) is WAIT
    queue.offer(sender, "b", 59.0)
    assert queue.ask(receiver, 59.0) is WAIT
    queue.close(sender, 99.0)
    assert not queue.starved


# -- threads, one order ------------------------------------------------------------------------------------


def hub_of(scheduler: Scheduler, senders: int, receivers: int, capacity: int = 4) -> Hub[Any]:
    queue: Handoff[Any] = Handoff(senders, receivers, capacity, 0.0)
    return Hub(queue, Watch(None, 1, scheduler.now), locks=scheduler.lock, now=scheduler.now)


@pytest.mark.parametrize("way", ["report", "clone", "time-out"])
@pytest.mark.filterwarnings("ignore:.*dropped without close:shardqueue.errors.ShardQueueWarning")
def test_an_end_dropped_while_somebody_is_in_the_queue_is_noticed(way: str) -> None:
    def run(seed: int) -> Callable[[], None]:
        scheduler = Scheduler(Random(seed))
        hub = hub_of(scheduler, 1, 2)
        box, receiver, other = [hub.sender()], hub.receiver(), hub.receiver()
        assert receiver is not None
        assert other is not None

        def look() -> None:
            if way == "report":
                hub.report()
            elif way == "clone":
                other.clone().close()
            else:
                with pytest.raises((ChannelEmptyError, ChannelEndedError)):
                    other.receive(1)

        scheduler.spawn("dropper", box.clear)
        scheduler.spawn("onlooker", look)
        scheduler.spawn("receiver", lambda: demand(not list(receiver), "an item from nowhere"))

        def close() -> None:
            scheduler.run()
            receiver.close()
            other.close()

        return close

    found = {seed: what for seed in range(150) if (what := violation(run(seed)))}
    assert not found


@pytest.mark.filterwarnings("ignore:.*dropped without close:shardqueue.errors.ShardQueueWarning")
def test_what_was_queued_is_let_go_when_the_last_receiver_is_dropped() -> None:
    class Batch:
        """Something big."""

    hub = hub_of(Scheduler(Random(0)), 1, 1)
    sender, box = hub.sender(), [hub.receiver()]
    assert sender is not None
    batch = Batch()
    kept = weakref.ref(batch)
    sender.send(batch)
    del batch
    box.clear()
    assert kept() is None
    sender.close()


@pytest.mark.filterwarnings("ignore:.*dropped without close:shardqueue.errors.ShardQueueWarning")
@pytest.mark.parametrize("way", ["closed", "dropped"])
def test_nothing_waits_for_an_end_that_is_gone(way: str) -> None:
    scheduler = Scheduler(Random(0))
    bells: list[weakref.ref[ControlledLock]] = []

    def lock() -> ControlledLock:
        made = scheduler.lock()
        bells.append(weakref.ref(made))
        return made

    queue: Handoff[Any] = Handoff(1, 1, 1, 0.0)
    hub: Hub[Any] = Hub(queue, Watch(None, 1, scheduler.now), locks=lock, now=scheduler.now)
    box = [hub.sender()]
    if way == "closed" and box[0] is not None:
        box[0].close()
    box.clear()
    mutex, bell = bells
    assert mutex() is not None
    assert bell() is None


# -- processes, one order ----------------------------------------------------------------------------------


class Line:
    """A port, told and heard in one order."""

    def __init__(self, exchange: Exchange, side: Side) -> None:
        port = exchange.take(side)
        assert port is not None
        self._exchange, self.port, self._frames = exchange, port, Frames()

    def tell(self, kind: Kind, number: int = 0, flags: int = 0, now: float = 0.0, body: bytes = b"") -> None:
        self._exchange.told(self.port, Frame(kind, flags, number, body), now)

    def hang_up(self, now: float = 0.0) -> None:
        self._exchange.hung_up(self.port, now)

    def hear(self) -> list[tuple[Kind, int]]:
        """Return what was said."""
        frames = self._frames.feed(b"".join(data for data, _ in self.port.out))
        heard = [(Kind(frame.kind), frame.number) for frame in frames]
        self.port.out.clear()
        return heard


def lines_of(
    senders: int, receivers: int, capacity: int = 4, redeliver: bool = False
) -> tuple[Exchange, list[Line], list[Line]]:
    exchange = Exchange(senders, receivers, capacity, redeliver, 0.0)
    return (
        exchange,
        [Line(exchange, Side.SENDER) for _ in range(senders)],
        [Line(exchange, Side.RECEIVER) for _ in range(receivers)],
    )


def test_a_sender_may_let_an_items_memory_go_when_its_receiver_asks_for_the_next() -> None:
    _, (sender,), (receiver,) = lines_of(1, 1)
    sender.tell(Kind.ITEM, flags=BY_REFERENCE, now=1.0)
    receiver.tell(Kind.ASK, now=2.0)
    assert sender.hear() == [(Kind.ROOM, 1)]
    receiver.tell(Kind.ASK, 1, now=3.0)
    assert sender.hear() == [(Kind.DONE, 0)]


def test_a_closed_sender_lingers_until_its_memory_was_received() -> None:
    exchange, (sender,), (receiver,) = lines_of(1, 1)
    sender.tell(Kind.ITEM, flags=BY_REFERENCE, now=1.0)
    sender.tell(Kind.CLOSE, 1, now=2.0)
    receiver.tell(Kind.ASK, now=3.0)
    assert sender.hear() == [(Kind.ROOM, 1)]
    receiver.tell(Kind.CLOSE, 1, now=4.0)
    assert sender.hear() == [(Kind.DONE, 0), (Kind.BYE, 0)]
    assert exchange.is_finished


def test_room_that_was_promised_is_there_although_items_come_back() -> None:
    exchange, (quick, slow), (receiver, _) = lines_of(2, 2, capacity=6, redeliver=True)
    quick.tell(Kind.ITEM)
    assert exchange.queue.reserved > 0
    for number in range(9):
        slow.tell(Kind.ITEM, number, now=10.0 + number)
        if not exchange.queue.has_room:
            break
    receiver.tell(Kind.ASK, now=20.0)
    slow.tell(Kind.ITEM, number + 1, now=21.0)
    assert not exchange.queue.has_room
    receiver.hang_up(now=22.0)
    quick.tell(Kind.ITEM, 1, now=23.0)
    assert exchange.report(24.0).sent == number + 4


def test_nobody_is_told_the_end_while_another_one_may_hand_back_what_it_has_ahead() -> None:
    exchange, (sender,), (first, second) = lines_of(1, 2)
    for number in range(4):
        sender.tell(Kind.ITEM, number, now=1.0 + number)
    first.port.at = 5.0
    first.tell(Kind.ASK, now=5.0)
    assert first.hear() == [(Kind.ITEM, 0), (Kind.ITEM, 1)]
    sender.tell(Kind.CLOSE, 4, now=6.0)
    for done in range(2):
        second.tell(Kind.ASK, done, now=7.0 + done)
        assert second.hear() == [(Kind.ITEM, done)]
    second.tell(Kind.ASK, 2, now=9.0)
    assert not second.hear()
    first.tell(Kind.CLOSE, 1, now=10.0)
    assert second.hear() == [(Kind.ITEM, 2)]
    second.tell(Kind.ASK, 3, now=11.0)
    assert second.hear() == [(Kind.END, 0)]
    assert exchange.report(12.0).lost == 0


@pytest.mark.parametrize("way", ["closed", "killed"])
def test_the_end_waits_for_what_is_handed_on_from_one_receiver_to_the_next(way: str) -> None:
    exchange, (sender,), (first, *others) = lines_of(1, 3, redeliver=True)
    sender.tell(Kind.ITEM, now=1.0)
    sender.tell(Kind.CLOSE, 1, now=2.0)
    first.tell(Kind.ASK, now=3.0)
    for other in others:
        other.tell(Kind.ASK, now=4.0)
    if way == "killed":
        first.hang_up(now=5.0)
    else:
        first.tell(Kind.CLOSE, 0, now=5.0)
    assert [other.hear() for other in others] == [[(Kind.ITEM, 0)], []]
    others[0].hang_up(now=6.0)
    assert others[1].hear() == [(Kind.ITEM, 0)]
    others[1].tell(Kind.ASK, 1, now=7.0)
    assert others[1].hear() == [(Kind.END, 0)]
    assert exchange.report(8.0).lost == 0


def test_a_sender_is_let_go_although_the_receiver_of_an_unreadable_item_was_killed() -> None:
    exchange, (sender,), (receiver, _) = lines_of(1, 2)
    sender.tell(Kind.ITEM, flags=BY_REFERENCE, now=1.0)
    sender.tell(Kind.CLOSE, 1, now=2.0)
    receiver.tell(Kind.ASK, now=3.0)
    receiver.tell(Kind.UNREADABLE, 0, now=4.0)
    receiver.hang_up(now=5.0)
    assert (Kind.BYE, 0) in sender.hear()
    assert exchange.report(6.0).lost == 1


@pytest.mark.parametrize("flags", [0, BY_REFERENCE])
def test_what_a_killed_sender_was_still_offering_is_not_taken(flags: int) -> None:
    exchange, (sender,), (receiver,) = lines_of(1, 1, capacity=1)
    sender.tell(Kind.ITEM, 0, BY_REFERENCE, now=1.0)
    sender.tell(Kind.ITEM, 1, flags, now=2.0)
    sender.hang_up(now=3.0)
    receiver.tell(Kind.ASK, now=4.0)
    assert receiver.hear() == [(Kind.END, 0)]
    report = exchange.report(5.0)
    assert (report.sent, report.lost, report.senders[0].lost) == (1, 1, 1)
    assert exchange.queue.failure is not None
    assert "1 items it had sent are lost" in str(exchange.queue.failure)


def test_what_was_ahead_of_a_receiver_is_received_before_it_waits_again() -> None:
    exchange, (sender,), (receiver, _) = lines_of(1, 2, redeliver=True)
    for number in range(4):
        sender.tell(Kind.ITEM, number, now=1.0 + number)
    receiver.port.at = 5.0
    link = ReceiverLink()
    frames = Frames()
    exchange.told(receiver.port, next(iter(Frames().feed(link.ask()))), 5.0)
    first, second = (data for data, _ in receiver.port.out)
    receiver.port.out.clear()
    for frame in frames.feed(first):
        link.told(frame)
    assert link.take().number == 0
    # The second is still on its way.
    exchange.told(receiver.port, next(iter(Frames().feed(link.ask()))), 6.0)
    for frame in frames.feed(second):
        link.told(frame)
    assert link.take().number == 1
    exchange.told(receiver.port, next(iter(Frames().feed(link.close()))), 7.0)
    assert not receiver.port.given
    assert exchange.queue.held == 0
    assert len(exchange.queue.queue) == 2


def test_a_closing_receivers_last_wish_takes_no_item_with_it() -> None:
    exchange, (sender,), (receiver, other) = lines_of(1, 2)
    receiver.tell(Kind.ASK, now=1.0)
    sender.tell(Kind.ITEM, now=2.0)
    receiver.tell(Kind.CLOSE, 0, now=3.0)
    other.tell(Kind.ASK, now=4.0)
    assert other.hear() == [(Kind.ITEM, 0)]
    assert exchange.report(5.0).lost == 0


def test_what_an_interrupted_receiver_hands_back_after_the_end_is_counted_as_lost() -> None:
    exchange, (sender,), (first, second) = lines_of(1, 2)
    first.tell(Kind.ASK, now=1.0)
    sender.tell(Kind.ITEM, now=2.0)
    sender.tell(Kind.CLOSE, 1, now=3.0)
    assert first.hear() == [(Kind.ITEM, 0)]
    second.tell(Kind.ASK, now=4.0)
    assert second.hear() == [(Kind.END, 0)]
    # The first was interrupted before it took the item, and leaves.
    first.tell(Kind.CLOSE, 0, now=5.0)
    second.tell(Kind.CLOSE, 0, now=6.0)
    assert exchange.report(7.0).lost == 1
