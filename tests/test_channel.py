"""The channel's interface: what its ends promise, between threads and over the lines between processes alike.

Each rule runs on both kinds; the ends for processes are used in threads here, and in processes of their own in
`test_channel_processes`.
"""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import queue
import signal
import threading
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from shardqueue import Channel
from shardqueue.channel.handoff import Handoff
from shardqueue.channel.threads import Hub
from shardqueue.channel.watch import Watch
from shardqueue.errors import (
    ChannelEmptyError,
    ChannelEndedError,
    ChannelFullError,
    ClosedError,
    InvalidInputError,
    ReceiversGoneError,
    SenderError,
    ShardQueueWarning,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.context import BaseContext

    from shardqueue.channel import ChannelReport, Receiver, Sender

T = TypeVar("T")
PATIENCE = 60.0


@pytest.fixture(params=["threads", "lines"])
def context(request: pytest.FixtureRequest) -> BaseContext | None:
    return None if request.param == "threads" else multiprocessing.get_context("spawn")


class Crew:
    """Threads whose results and errors are collected."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self.errors: list[BaseException] = []

    def start(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Run it in a thread; what it returns is put into the list."""
        result: list[Any] = []

        def run() -> None:
            try:
                result.append(function(*args))
            except BaseException as error:
                self.errors.append(error)

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()
        return result

    def join(self) -> None:
        for thread in self._threads:
            thread.join(PATIENCE)
            assert not thread.is_alive(), "a thread hangs"


def drain(receiver: Receiver[T]) -> list[T]:
    with receiver:
        return list(receiver)


def send_all(sender: Sender[T], items: list[T]) -> None:
    with sender:
        for item in items:
            sender.send(item)


@pytest.mark.parametrize(("senders", "receivers"), [(1, 1), (5, 3), (2, 6), (6, 1)])
@pytest.mark.parametrize("capacity", [1, 8, 300])
def test_every_item_is_received_once(
    context: BaseContext | None, senders: int, receivers: int, capacity: int
) -> None:
    channel: Channel[int] = Channel(senders, receivers, capacity, context=context)
    crew = Crew()
    got = [crew.start(drain, channel.receiver()) for _ in range(receivers)]
    for number in range(senders):
        items = list(range(number * 1000, number * 1000 + 50 * (number + 1)))
        crew.start(send_all, channel.sender(), items)
    crew.join()
    assert not crew.errors
    counts = Counter(item for part in got for item in part[0])
    assert counts == Counter(n * 1000 + k for n in range(senders) for k in range(50 * (n + 1)))
    report = channel.report()
    assert report.sent == report.received == counts.total()
    assert (report.depth, report.lost) == (0, 0)
    assert [end.items for end in report.senders] == [50 * (n + 1) for n in range(senders)]


def test_items_of_one_sender_arrive_in_order_at_one_receiver(context: BaseContext | None) -> None:
    channel: Channel[int] = Channel(1, 1, 3, context=context)
    crew = Crew()
    got = crew.start(drain, channel.receiver())
    send_all(channel.sender(), list(range(500)))
    crew.join()
    assert got == [list(range(500))]


def test_a_fast_senders_end_does_not_end_the_stream(context: BaseContext | None) -> None:
    channel: Channel[str] = Channel(2, 1, 4, context=context)
    fast, slow = channel.sender(), channel.sender()
    with channel.receiver() as receiver:
        send_all(fast, ["a"])
        assert receiver.receive() == "a"
        with pytest.raises(ChannelEmptyError):
            receiver.receive(timeout=0.01)
        with slow:
            slow.send("b")
        assert list(receiver) == ["b"]


def test_send_waits_at_capacity(context: BaseContext | None) -> None:
    channel: Channel[int] = Channel(1, 1, 3, context=context)
    with channel.sender() as sender, channel.receiver() as receiver:
        for item in range(3):
            sender.send(item, timeout=0)
        for timeout in (0, 0.01):
            with pytest.raises(ChannelFullError, match="not sent"):
                sender.send(99, timeout=timeout)
        with pytest.raises(queue.Full):
            sender.send_nowait(99)
        assert receiver.receive() == 0
        sender.send(3, timeout=PATIENCE)
        sender.close()
        assert list(receiver) == [1, 2, 3]


def test_a_waiting_sender_goes_on_when_there_is_room(context: BaseContext | None) -> None:
    channel: Channel[int] = Channel(1, 1, 1, context=context)
    crew = Crew()
    with channel.receiver() as receiver:
        crew.start(send_all, channel.sender(), [1, 2, 3])
        assert [receiver.receive(PATIENCE) for _ in range(3)] == [1, 2, 3]
        crew.join()
        assert list(receiver) == []


def test_receive_runs_out_of_time(context: BaseContext | None) -> None:
    channel: Channel[int] = Channel(1, 1, context=context)
    with channel.sender() as sender, channel.receiver() as receiver:
        for timeout in (0, 0.01):
            with pytest.raises(ChannelEmptyError, match="has not ended"):
                receiver.receive(timeout=timeout)
        with pytest.raises(queue.Empty):
            receiver.receive_nowait()
        sender.send(1)
        assert receiver.receive(PATIENCE) == 1
        sender.send(2)
        sender.close()
        assert list(receiver) == [2]


@pytest.mark.parametrize("timeout", [-1, float("nan"), "1", True])
def test_bad_time_outs_are_refused_and_lose_nothing(context: BaseContext | None, timeout: Any) -> None:
    channel: Channel[int] = Channel(1, 1, 1, context=context)
    with channel.sender() as sender, channel.receiver() as receiver:
        sender.send(1)
        with pytest.raises(InvalidInputError, match="timeout"):
            sender.send(2, timeout=timeout)
        with pytest.raises(InvalidInputError, match="timeout"):
            receiver.receive(timeout=timeout)
        sender.close()
        assert list(receiver) == [1]


def test_the_end_stays_the_end(context: BaseContext | None) -> None:
    channel: Channel[int] = Channel(1, 1, context=context)
    channel.sender().close()
    with channel.receiver() as receiver:
        for _ in range(3):
            with pytest.raises(ChannelEndedError):
                receiver.receive()
            with pytest.raises(EOFError):
                receiver.receive(timeout=0)
            assert list(receiver) == []


def test_an_error_comes_after_what_was_queued(context: BaseContext | None) -> None:
    channel: Channel[int] = Channel(2, 2, 8, context=context)
    failing, other = channel.sender(), channel.sender()
    first, second = channel.receiver(), channel.receiver()
    with pytest.raises(ZeroDivisionError), failing:
        failing.send(1)
        failing.send(2)
        raise ZeroDivisionError("teacher broke")
    with first, second, other:
        with pytest.raises(SenderError, match="teacher broke"):
            for _ in range(20):  # between processes it is told as soon as the broker says so
                other.send(3, timeout=PATIENCE)
        assert first.receive() == 1
        assert second.receive() == 2
        for receiver in (first, second, first):
            with pytest.raises(ZeroDivisionError, match="teacher broke") as caught:
                while True:
                    assert receiver.receive() == 3
            assert "sender 0" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    "error",
    [StopIteration(), ChannelEndedError("x"), ChannelEmptyError("x"), KeyboardInterrupt(), SystemExit(3)],
)
def test_what_a_receiver_could_misread_is_wrapped(context: BaseContext | None, error: BaseException) -> None:
    channel: Channel[int] = Channel(1, 1, context=context)
    channel.sender().close(error)
    with channel.receiver() as receiver, pytest.raises(SenderError, match=type(error).__name__) as caught:
        list(receiver)
    assert caught.value.sender == "sender 0"


def test_an_error_that_cannot_be_pickled_arrives_as_text() -> None:
    class LocalError(Exception):
        pass

    channel: Channel[int] = Channel(1, 1, context=multiprocessing.get_context("spawn"))
    channel.sender().close(LocalError("very local"))
    with channel.receiver() as receiver, pytest.raises(SenderError, match="LocalError: very local"):
        receiver.receive()


def test_a_closed_receiver_leaves_the_work_to_the_others(context: BaseContext | None) -> None:
    channel: Channel[int] = Channel(1, 2, 2, context=context)
    crew = Crew()
    early, late = channel.receiver(), channel.receiver()
    crew.start(send_all, channel.sender(), list(range(100)))
    with early:
        got = [early.receive() for _ in range(3)]
    got += drain(late)
    crew.join()
    assert sorted(got) == list(range(100))


def test_without_receivers_senders_get_an_error_at_once(context: BaseContext | None) -> None:
    channel: Channel[int] = Channel(2, 2, 1, context=context)
    crew = Crew()
    one, two = channel.receiver(), channel.receiver()
    waiting = crew.start(send_all, channel.sender(), [1, 2, 3])
    one.close()
    two.close()
    crew.join()
    assert waiting == []
    assert [type(error) for error in crew.errors] == [ReceiversGoneError]
    with channel.sender() as sender, pytest.raises(BrokenPipeError, match="nobody is left"):
        sender.send(1)
    assert channel.report().lost == channel.report().sent


def test_before_the_first_receiver_senders_wait(context: BaseContext | None) -> None:
    channel: Channel[int] = Channel(1, 1, 2, context=context)
    crew = Crew()
    crew.start(send_all, channel.sender(), list(range(5)))
    assert drain(channel.receiver()) == list(range(5))
    crew.join()


def test_closing_twice_and_using_a_closed_end(context: BaseContext | None) -> None:
    channel: Channel[int] = Channel(1, 1, context=context)
    sender, receiver = channel.sender(), channel.receiver()
    sender.close()
    sender.close()
    sender.close(ValueError("too late to matter"))
    for use in (lambda: sender.send(1), sender.clone):
        with pytest.raises(ClosedError, match="sender 0 is closed"):
            use()
    assert list(receiver) == []
    receiver.close()
    receiver.close()
    uses: tuple[Callable[[], object], ...] = (receiver.receive, receiver.clone, lambda: next(receiver))
    for take in uses:
        with pytest.raises(ClosedError, match="receiver 0 is closed"):
            take()


def test_more_senders_and_receivers_while_it_is_open(context: BaseContext | None) -> None:
    channel: Channel[int] = Channel(1, 1, 2, context=context)
    crew = Crew()
    sender, receiver = channel.sender(), channel.receiver()
    got = [crew.start(drain, receiver.clone()) for _ in range(2)]
    for number in range(3):
        crew.start(send_all, sender.clone(), list(range(number * 100, number * 100 + 40)))
    sender.close()
    got.append(crew.start(drain, receiver))
    crew.join()
    assert sorted(item for part in got for item in part[0]) == [
        n * 100 + k for n in range(3) for k in range(40)
    ]
    assert [end.name for end in channel.report().receivers] == ["receiver 0", "receiver 1", "receiver 2"]


def test_a_clone_keeps_the_stream_open(context: BaseContext | None) -> None:
    channel: Channel[int] = Channel(1, 1, context=context)
    with channel.receiver() as receiver:
        with channel.sender() as sender:
            clone = sender.clone()
        with pytest.raises(ChannelEmptyError):
            receiver.receive(timeout=0)
        clone.close()
        assert list(receiver) == []


def test_a_dropped_sender_counts_as_closed() -> None:
    channel: Channel[int] = Channel(2, 1)
    sender = channel.sender()
    sender.send(1)
    with pytest.warns(ShardQueueWarning, match="sender 0 .*dropped without close"):
        del sender
        gc.collect()
    channel.sender().close()
    assert drain(channel.receiver()) == [1]
    assert channel.report().senders[0].state == "dropped"


@pytest.mark.parametrize("is_used", [True, False])
def test_a_dropped_sender_counts_as_closed_between_processes(is_used: bool) -> None:
    channel: Channel[int] = Channel(2, 1, context=multiprocessing.get_context("spawn"))
    sender = channel.sender()
    if is_used:
        sender.send(1)
    channel.sender().close()
    with pytest.warns(ShardQueueWarning, match="sender 0 .*dropped"):
        del sender
        gc.collect()
        assert drain(channel.receiver()) == [1] * is_used
        _until_over(channel)


def _until_over(channel: Channel[Any]) -> None:
    """Wait for the thread of a channel between processes, which warns after it has answered."""
    for thread in threading.enumerate():
        if thread is getattr(channel._hub, "_thread", None):
            thread.join(PATIENCE)


def test_a_dropped_receiver_counts_as_closed(context: BaseContext | None) -> None:
    channel: Channel[int] = Channel(1, 1, 1, context=context)
    receiver = channel.receiver()
    with channel.sender() as sender, pytest.warns(ShardQueueWarning, match="receiver 0 .*dropped"):
        sender.send(1)
        del receiver
        gc.collect()
        with pytest.raises(ReceiversGoneError):
            while True:
                sender.send(2, timeout=PATIENCE)
        sender.close()
        _until_over(channel)


def test_an_end_dropped_inside_the_mutex_is_counted_by_whoever_leaves_it() -> None:
    channel: Channel[int] = Channel(2, 1)
    sender, receiver = channel.sender(), channel.receiver()
    dropped = channel.sender()
    hub: Any = channel._hub
    with pytest.warns(ShardQueueWarning, match="sender 1"), hub.mutex:
        del dropped
        gc.collect()
    assert channel.report().senders[1].state == "open"
    sender.send(1)
    assert channel.report().senders[1].state == "dropped"
    sender.close()
    assert drain(receiver) == [1]


def test_ends_that_are_never_made_count_as_closed(context: BaseContext | None) -> None:
    channel: Channel[int] = Channel(3, 2, context=context)
    receiver = channel.receiver()
    with pytest.warns(ShardQueueWarning, match="2 senders and 1 receiver .*never made"), channel:
        send_all(channel.sender(), [1])
    assert drain(receiver) == [1]
    with pytest.raises(ClosedError, match="the channel is closed"):
        channel.sender()


def test_a_forgotten_channel_ends(context: BaseContext | None) -> None:
    channel: Channel[int] = Channel(2, 1, context=context)
    receiver = channel.receiver()
    send_all(channel.sender(), [1])
    with pytest.warns(ShardQueueWarning, match="1 sender of a channel: declared and never made"):
        del channel
        gc.collect()
    assert drain(receiver) == [1]


def test_a_forgotten_channel_ends_for_a_receiver_that_waits(context: BaseContext | None) -> None:
    channel: Channel[int] = Channel(2, 1, context=context)
    crew = Crew()
    got = crew.start(drain, channel.receiver())
    send_all(channel.sender(), [1])
    while channel.report().receivers[0].items == 0:
        pass
    with pytest.warns(ShardQueueWarning, match="declared and never made"):
        del channel
        gc.collect()
    crew.join()
    assert got == [[1]]


def test_an_error_in_the_channels_block_reaches_the_receivers(context: BaseContext | None) -> None:
    channel: Channel[int] = Channel(1, 1, context=context)
    receiver = channel.receiver()
    with (
        pytest.warns(ShardQueueWarning, match="1 sender"),
        pytest.raises(ValueError, match="no teacher"),
        channel,
    ):
        raise ValueError("no teacher")
    with receiver, pytest.raises(ValueError, match="no teacher"):
        receiver.receive()


def test_no_more_ends_than_declared(context: BaseContext | None) -> None:
    channel: Channel[int] = Channel(1, 1, context=context)
    with channel.sender(), channel.receiver():
        for make in (channel.sender, channel.receiver):
            with pytest.raises(ClosedError, match=r"has 1 \w+ ends, and all are taken.*clone"):
                make()


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"senders": 0}, "senders"),
        ({"receivers": -1}, "receivers"),
        ({"capacity": 0}, "capacity"),
        ({"capacity": 2.0}, "capacity"),
        ({"senders": True}, "senders"),
        ({"senders": "5"}, "senders"),
        ({"redeliver": True}, "redeliver"),
        ({"report_every": 0}, "report_every"),
        ({"report_every": "x"}, "report_every"),
        ({"on_report": 3}, "on_report"),
        ({"name": 3}, "name"),
        ({"context": "spawn"}, "context"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidInputError, match=f"{name}="):
        Channel(**{"senders": 1, "receivers": 1, **arguments})


def test_none_is_an_item_like_any_other(context: BaseContext | None) -> None:
    channel: Channel[Any] = Channel(1, 1, context=context)
    items = [None, False, 0, "", (), {"a": None}, StopIteration]
    send_all(channel.sender(), items)
    assert drain(channel.receiver()) == items


def test_an_item_that_cannot_be_pickled_is_refused_and_nothing_is_lost() -> None:
    channel: Channel[Any] = Channel(1, 1, context=multiprocessing.get_context("spawn"))
    with channel.sender() as sender, channel.receiver() as receiver:
        sender.send(1)
        with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
            sender.send(lambda: None)
        sender.send(2)
        sender.close()
        assert list(receiver) == [1, 2]


class Unreadable:
    """Pickles well, and raises when it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _raise, ("cannot be read",)


def _raise(message: str) -> None:
    raise LookupError(message)


def test_an_item_that_cannot_be_unpickled_is_an_error_and_the_rest_arrives() -> None:
    channel: Channel[Any] = Channel(1, 1, context=multiprocessing.get_context("spawn"))
    with pytest.warns(ShardQueueWarning, match="could not be received"):
        send_all(channel.sender(), [1, Unreadable(), 2])
        with channel.receiver() as receiver:
            assert receiver.receive() == 1
            with pytest.raises(LookupError, match="cannot be read"):
                receiver.receive()
            assert receiver.receive() == 2
            with pytest.raises(SenderError, match="is lost"):
                receiver.receive()
        _until_over(channel)
    assert channel.report().lost == 1


class Alarm(Exception):  # noqa: N818 - it is raised by a signal
    pass


def _interrupt(waiting: Callable[[], bool], call: Callable[[], Any]) -> None:
    """Call it, and interrupt it with a signal once it waits."""

    def ring(*_: object) -> None:
        if waiting():
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise Alarm

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
    try:
        with pytest.raises(Alarm):
            call()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_an_interrupted_receive_loses_nothing(context: BaseContext | None) -> None:
    channel: Channel[int] = Channel(1, 2, context=context)
    with channel.receiver() as receiver, channel.receiver() as other:
        _interrupt(lambda: True, receiver.receive)
        send_all(channel.sender(), [1, 2])
        got = [receiver.receive(), other.receive()]
        assert sorted(got) == [1, 2]


class OddLock:
    """A lock; what is odd about it is when it can be taken."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        raise NotImplementedError

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Bell(OddLock):
    """A lock that is rung, and then interrupted, just as somebody waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.before: Callable[[], None] | None = None

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self.before is not None and self._lock.locked():
            ring, self.before = self.before, None
            ring()
            raise Alarm
        return self._lock.acquire(blocking, timeout)


def test_an_item_that_comes_in_the_moment_of_an_interruption_goes_back() -> None:
    bells: list[Bell] = []

    def make() -> Bell:
        bells.append(Bell())
        return bells[-1]

    hub: Hub[int] = Hub(Handoff(1, 2, 1, 0.0), Watch(None, 1.0), locks=make)
    sender, receiver, other = hub.sender(), hub.receiver(), hub.receiver()
    assert sender is not None and receiver is not None and other is not None
    bells[2].before = lambda: sender.send(1)
    with sender, receiver, other:
        with pytest.raises(Alarm):
            receiver.receive()
        assert other.receive(timeout=0) == 1
        sender.close()
        assert hub.report().received == 1


class Mutex(OddLock):
    """A lock that is interrupted when it is taken for the last time of a few."""

    def __init__(self) -> None:
        super().__init__()
        self.times = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        self.times -= 1
        if self.times == 0:
            raise Alarm
        return self._lock.acquire(blocking, timeout)


@pytest.mark.parametrize("item", [1, None])
def test_an_interruption_while_giving_up_is_mended_by_the_next_call(item: object) -> None:
    mutex = Mutex()
    locks: Iterator[Any] = iter([mutex, threading.Lock(), threading.Lock()])
    hub: Hub[object] = Hub(Handoff(1, 1, 1, 0.0), Watch(None, 1.0), locks=lambda: next(locks))
    sender, receiver = hub.sender(), hub.receiver()
    assert sender is not None and receiver is not None
    with sender, receiver:
        mutex.times = 2
        with pytest.raises(Alarm):
            receiver.receive(timeout=0.001)
        sender.send(item)
        assert receiver.receive(timeout=0) is item
        sender.send(2)
        mutex.times = 2
        with pytest.raises(Alarm):
            sender.send(3, timeout=0.001)
        assert receiver.receive(timeout=0) == 2
        assert receiver.receive(timeout=0) == 3
        sender.send(4)
        with pytest.raises(ChannelFullError):
            sender.send(5, timeout=0.001)
        sender.close()
        assert list(receiver) == [4]
        assert hub.report().sent == hub.report().received == 4


def test_an_interrupted_send_is_taken_back_and_the_end_goes_on(context: BaseContext | None) -> None:
    channel: Channel[int] = Channel(1, 1, 1, context=context)
    with channel.sender() as sender, channel.receiver() as receiver:
        sender.send(1)
        _interrupt(lambda: True, lambda: sender.send(2))
        assert receiver.receive() == 1
        crew = Crew()
        crew.start(sender.send, 3)
        rest = [receiver.receive(PATIENCE)]
        crew.join()
        sender.close()
        rest += list(receiver)
        assert rest in ([3], [2, 3]), "what was interrupted was sent or not, and nothing else is missing"


def _is_waiting(channel: Channel[Any], side: str) -> bool:
    report = channel.report()
    end = report.receivers[0] if side == "receiver" else report.senders[0]
    return end.lead > 0 or end.waited > 0


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_closing_an_end_in_another_thread_ends_its_wait(context: BaseContext | None, side: str) -> None:
    channel: Channel[int] = Channel(1, 1, 1, context=context)
    crew = Crew()
    sender, receiver = channel.sender(), channel.receiver()
    if side == "sender":
        sender.send(1)
    crew.start(receiver.receive if side == "receiver" else lambda: sender.send(2))
    while not _is_waiting(channel, side):
        pass
    (receiver if side == "receiver" else sender).close()
    crew.join()
    assert [type(error) for error in crew.errors] == [ClosedError]
    sender.close()
    if side == "sender":
        assert drain(receiver) == [1]


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_a_signals_handler_may_close_the_end_that_waits(context: BaseContext | None, side: str) -> None:
    channel: Channel[int] = Channel(1, 1, 1, context=context)
    sender, receiver = channel.sender(), channel.receiver()
    if side == "sender":
        sender.send(1)
    before = signal.signal(signal.SIGALRM, lambda *_: (receiver if side == "receiver" else sender).close())
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(ClosedError):
            if side == "receiver":
                receiver.receive()
            else:
                sender.send(2)
    finally:
        signal.signal(signal.SIGALRM, before)
    sender.close()
    receiver.close()


@dataclass(frozen=True)
class Frozen(Exception):  # noqa: N818 - what is tested is its odd kind
    """Takes no notes, and cannot be unpickled."""

    code: int


class Speechless(Exception):  # noqa: N818
    def __str__(self) -> str:
        raise RuntimeError("no message for you")


@pytest.mark.parametrize("error", [Frozen(3), Speechless("x"), "a text", ValueError])
def test_no_error_is_too_odd_to_be_told(context: BaseContext | None, error: Any) -> None:
    channel: Channel[int] = Channel(1, 1, context=context)
    with channel.sender() as sender, channel.receiver() as receiver:
        sender.send(1)
        sender.close(error)
        assert receiver.receive() == 1
        with pytest.raises((Frozen, Speechless, SenderError)) as caught:
            receiver.receive()
        assert isinstance(caught.value, SenderError | type(error))
    assert channel.report().senders[0].state == "failed"


def test_a_generator_that_is_closed_early_ends_in_order(context: BaseContext | None) -> None:
    channel: Channel[int] = Channel(1, 1, context=context)

    def produce() -> Iterator[int]:
        with channel.sender() as sender:
            for number in range(100):
                sender.send(number)
                yield number

    producer = produce()
    assert next(producer) == 0
    producer.close()  # type: ignore[attr-defined]
    assert drain(channel.receiver()) == [0]


def test_an_end_that_was_interrupted_in_the_middle_of_a_write_says_so() -> None:
    channel: Channel[int] = Channel(1, 1, context=multiprocessing.get_context("spawn"))
    sender: Any = channel.sender()
    sender.send(1)
    sender._seat.line.is_in_doubt = True  # as an interruption between a write and its count leaves it
    with pytest.warns(ShardQueueWarning, match="sender 0 .*was killed"):
        for _ in range(2):
            with pytest.raises(ClosedError, match="interrupted in the middle of reading or writing"):
                sender.send(2)
        sender.close()
        with channel.receiver() as receiver:
            assert receiver.receive() == 1
            with pytest.raises(SenderError, match="was killed"):
                receiver.receive()
        _until_over(channel)


class Unpicklable:
    """Fails after a tensor before it was packed."""

    def __reduce__(self) -> tuple[Any, ...]:
        raise RuntimeError("will not be pickled")


@pytest.mark.torch
def test_a_send_that_fails_takes_no_room() -> None:
    import torch

    channel: Channel[Any] = Channel(1, 1, 2, context=multiprocessing.get_context("spawn"))
    with channel.sender() as sender, channel.receiver() as receiver:
        for _ in range(50):
            with pytest.raises(RuntimeError, match="will not be pickled"):
                sender.send([torch.zeros(3000), Unpicklable()])
            sender.send(torch.ones(3000), timeout=PATIENCE)
            assert float(receiver.receive().sum()) == 3000.0


class Temporary:
    """Pickles a tensor that lives only while it is pickled, in shared memory."""

    def __reduce__(self) -> tuple[Any, ...]:
        import torch

        return list, ([torch.full((3000,), 5.0).share_memory_()],)  # type: ignore[no-untyped-call]


@pytest.mark.torch
def test_a_tensor_that_lives_only_while_it_is_pickled_arrives() -> None:
    channel: Channel[Any] = Channel(1, 1, context=multiprocessing.get_context("spawn"))
    with channel.sender() as sender, channel.receiver() as receiver:
        for _ in range(20):
            sender.send(Temporary())
            assert float(receiver.receive()[0].sum()) == 15000.0


@pytest.mark.parametrize("capacity", [8, 200])
def test_large_items_arrive_whole(capacity: int) -> None:
    channel: Channel[bytes] = Channel(1, 1, capacity, context=multiprocessing.get_context("spawn"))
    items = [bytes([n]) * size for n, size in enumerate((65_536, 65_537, 300_000, 5_000_000, 1))]
    crew = Crew()
    got = crew.start(drain, channel.receiver())
    send_all(channel.sender(), items)
    crew.join()
    assert got == [items]


def test_reports_are_called_for_and_come_at_the_end(context: BaseContext | None) -> None:
    reports: list[ChannelReport] = []
    channel: Channel[int] = Channel(1, 1, context=context, on_report=reports.append, report_every=1e-9)
    crew = Crew()
    got = crew.start(drain, channel.receiver())
    send_all(channel.sender(), list(range(100)))
    crew.join()
    _until_over(channel)
    assert got == [list(range(100))]
    assert len(reports) > 1
    assert reports[-1].received == 100
    assert [end.state for end in (*reports[-1].senders, *reports[-1].receivers)] == ["closed", "closed"]
    assert all(0 <= end.waited <= end.seconds for end in (*reports[-1].senders, *reports[-1].receivers))
    metrics = reports[-1].metrics()
    assert metrics["channel/received"] == metrics["channel/sender0/items"] == 100.0
    assert "consumers waited " in reports[-1].summary()


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_a_report_hook_that_raises_loses_no_item(
    context: BaseContext | None, error: type[BaseException]
) -> None:
    def broken(_: ChannelReport) -> None:
        raise error("logger is full")

    channel: Channel[int] = Channel(1, 1, context=context, on_report=broken, report_every=1e-9)
    crew = Crew()
    with pytest.warns(ShardQueueWarning, match=f"on_report raised {error.__name__}: logger is full"):
        got = crew.start(drain, channel.receiver())
        send_all(channel.sender(), list(range(100)))
        crew.join()
        _until_over(channel)
    assert got == [list(range(100))]


def test_channels_and_ends_say_where_they_belong() -> None:
    threads: Channel[int] = Channel(1, 1)
    lines: Channel[int] = Channel(1, 1, context=multiprocessing.get_context("spawn"))
    for thing in (threads, lines):
        with pytest.raises(ClosedError, match="make its ends there"):
            pickle.dumps(thing)
    with threads.sender() as sender, threads.receiver(), pytest.raises(ClosedError, match="with context="):
        pickle.dumps(sender)
    with lines.sender() as sender, lines.receiver() as receiver:
        for end in (sender, receiver):
            with pytest.raises(ClosedError, match="arguments of a process"):
                pickle.dumps(end)
    assert repr(threads) == "Channel(senders=1, receivers=1, capacity=8)"


def test_a_channels_name_goes_before_its_ends(context: BaseContext | None) -> None:
    channel: Channel[int] = Channel(1, 1, context=context, name="hidden states")
    with channel.sender() as sender, channel.receiver() as receiver:
        assert (sender.name, receiver.name) == ("hidden states sender 0", "hidden states receiver 0")
    assert channel.report().receivers[0].name == "hidden states receiver 0"
