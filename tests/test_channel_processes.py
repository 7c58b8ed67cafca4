"""The channel between real processes, under fork and spawn: exactly once by value, whoever is killed, wherever.

Survivors must end, and end right; a hang is a failure. What was received is judged by what the receivers' own
processes say they got, never by the channel's report, which is then held against it.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from shardqueue import Channel
from shardqueue.errors import BrokerGoneError, ChannelFullError, ClosedError, SenderError, ShardQueueWarning

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection
    from multiprocessing.context import BaseContext
    from multiprocessing.process import BaseProcess

    from shardqueue.channel import Receiver, Sender

PATIENCE = 60.0
METHODS = ("fork", "spawn")


@pytest.fixture(params=METHODS)
def context(request: pytest.FixtureRequest) -> BaseContext:
    method: str = request.param
    return multiprocessing.get_context(method)


@pytest.fixture
def crew() -> Iterator[Crew]:
    made = Crew()
    yield made
    made.stop()


class Crew:
    """Processes, each with a pipe on which it says what it did."""

    def __init__(self) -> None:
        self.processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []

    def start(self, context: BaseContext, function: Callable[..., Any], *args: Any) -> Connection:
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=function, args=(there, *args))  # type: ignore[attr-defined]
        process.start()
        there.close()
        self.processes.append(process)
        self._pipes.append(here)
        return here

    def join(self) -> list[int | None]:
        for process in self.processes:
            process.join(PATIENCE)
            assert not process.is_alive(), f"{process.name} hangs"
        return [process.exitcode for process in self.processes]

    def forget(self) -> None:
        """Those that have ended."""
        self.processes.clear()
        for pipe in self._pipes:
            pipe.close()
        self._pipes.clear()

    def stop(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()


def said(pipe: Connection) -> list[Any]:
    """Everything a process said, up to its end or its death."""
    everything = []
    with suppress(EOFError):
        while True:
            assert pipe.poll(PATIENCE), "a process says nothing"
            everything.append(pipe.recv())
    return everything


def produce(pipe: Connection, sender: Sender[Any], first: int, count: int) -> None:
    """Send numbers, saying each once `send` has returned."""
    with sender:
        for number in range(first, first + count):
            sender.send(number)
            pipe.send(number)


def consume(pipe: Connection, receiver: Receiver[Any]) -> None:
    """Say each number as it is received, and how the stream ended."""
    try:
        with receiver:
            for number in receiver:
                pipe.send(number)
    except Exception as error:
        pipe.send(error)
    else:
        pipe.send("end")


FLOWS = [*product([1, 64], [(1, 1), (3, 2), (2, 3)])]
"""Capacity, senders and receivers."""
SPAWNED = [(1, (3, 2)), (64, (2, 3))]
"""The slowly started, of which the others are among the long forms."""


@pytest.mark.parametrize(
    ("method", "capacity", "ends"),
    [
        *(("fork", *flow) for flow in FLOWS),
        *(("spawn", *flow) for flow in SPAWNED),
        *(pytest.param("spawn", *flow, marks=pytest.mark.full) for flow in FLOWS if flow not in SPAWNED),
    ],
)
def test_every_item_is_received_once(crew: Crew, method: str, capacity: int, ends: tuple[int, int]) -> None:
    context, (senders, receivers) = multiprocessing.get_context(method), ends
    channel: Channel[int] = Channel(senders, receivers, capacity, context=context)
    for number in range(senders):
        crew.start(context, produce, channel.sender(), number * 1000, 100)
    pipes = [crew.start(context, consume, channel.receiver()) for _ in range(receivers)]
    got = [said(pipe) for pipe in pipes]
    assert crew.join() == [0] * (senders + receivers)
    assert [part.pop() for part in got] == ["end"] * receivers
    assert Counter(n for part in got for n in part) == Counter(
        k * 1000 + i for k in range(senders) for i in range(100)
    )


def test_the_process_that_made_the_channel_may_use_ends_too(context: BaseContext, crew: Crew) -> None:
    channel: Channel[int] = Channel(2, 1, 2, context=context)
    for number in range(2):
        crew.start(context, produce, channel.sender(), number * 100, 20)
    with channel.receiver() as receiver:
        assert sorted(receiver) == [*range(20), *range(100, 120)]
    assert crew.join() == [0, 0]


def pick(pipe: Connection, rank: int, senders: list[Sender[int]], receivers: list[Receiver[int]]) -> None:
    """What `torch.multiprocessing.spawn` does: everybody gets everything, and takes its own."""
    if rank < len(senders):
        produce(pipe, senders[rank], rank * 100, 30)
    else:
        consume(pipe, receivers[rank - len(senders)])


def test_all_processes_may_be_passed_all_ends(context: BaseContext, crew: Crew) -> None:
    channel: Channel[int] = Channel(3, 2, 2, context=context)
    senders = [channel.sender() for _ in range(3)]
    receivers = [channel.receiver() for _ in range(2)]
    pipes = [crew.start(context, pick, rank, senders, receivers) for rank in range(5)]
    got = [said(pipe) for pipe in pipes[3:]]
    assert crew.join() == [0] * 5
    assert [part.pop() for part in got] == ["end", "end"]
    assert sorted(n for part in got for n in part) == [k * 100 + i for k in range(3) for i in range(30)]


def pick_or_die(
    pipe: Connection, rank: int, senders: list[Sender[int]], receivers: list[Receiver[int]]
) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    pick(pipe, rank, senders, receivers)


def test_of_all_that_were_passed_all_ends_one_dies_before_it_uses_any(
    context: BaseContext, crew: Crew
) -> None:
    channel: Channel[int] = Channel(3, 2, 2, context=context)
    senders = [channel.sender() for _ in range(3)]
    receivers = [channel.receiver() for _ in range(2)]
    with pytest.warns(ShardQueueWarning, match="sender 1 .*dropped before it was used"):
        pipes = [crew.start(context, pick_or_die, rank, senders, receivers) for rank in range(5)]
        got = [said(pipe) for pipe in pipes[3:]]
        assert crew.join() == [0, -signal.SIGKILL, 0, 0, 0]
        _until_over(channel)
    assert [part.pop() for part in got] == ["end", "end"]
    assert sorted(n for part in got for n in part) == [k * 100 + i for k in (0, 2) for i in range(30)]


def die(pipe: Connection, _end: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave(pipe: Connection, _end: object) -> None:
    pass


@pytest.mark.parametrize(
    ("method", "ending", "is_kept"),
    [
        *product(["fork"], [die, leave], [True, False]),
        ("spawn", die, True),
        ("spawn", leave, False),
        pytest.param("spawn", die, False, marks=pytest.mark.full),
        pytest.param("spawn", leave, True, marks=pytest.mark.full),
    ],
)
def test_a_process_that_ends_before_it_uses_its_end(
    crew: Crew, method: str, ending: Callable[..., None], is_kept: bool
) -> None:
    context = multiprocessing.get_context(method)
    channel: Channel[int] = Channel(2, 2, 2, context=context)
    kept: list[object] = []
    with pytest.warns(ShardQueueWarning, match="0 .*dropped before it was used"):
        for make in (channel.sender, channel.receiver):
            end = make()
            kept.append(end)
            crew.start(context, ending, end)
        del end
        if not is_kept:
            kept.clear()
            gc.collect()
        crew.start(context, produce, channel.sender(), 0, 20)
        got = said(crew.start(context, consume, channel.receiver()))
        crew.join()
        _until_over(channel)
    assert got == [*range(20), "end"]


def use_the_first(pipe: Connection, first: Sender[int], second: Sender[int]) -> None:
    with first:
        first.send(os.getpid())


def test_a_process_that_leaves_before_it_uses_its_second_end(context: BaseContext, crew: Crew) -> None:
    channel: Channel[int] = Channel(2, 1, context=context)
    kept = [channel.sender(), channel.sender()]
    with pytest.warns(ShardQueueWarning, match="sender 1 was dropped before it was used"):
        crew.start(context, use_the_first, *kept)
        with channel.receiver() as receiver:
            assert list(receiver) == [crew.processes[0].pid]
        crew.join()
        _until_over(channel)


@pytest.mark.filterwarnings("ignore:sender 0 .*:shardqueue.errors.ShardQueueWarning")
def test_an_end_that_counts_as_dropped_may_be_passed_on_while_the_stream_lasts(crew: Crew) -> None:
    context = multiprocessing.get_context("fork")
    channel: Channel[int] = Channel(2, 1, context=context)
    sender, other, receiver = channel.sender(), channel.sender(), channel.receiver()
    crew.start(context, leave, sender)
    crew.join()
    while channel.report().senders[0].state != "dropped":
        pass
    crew.start(context, produce, sender, 0, 5)
    crew.join()
    other.close()
    with receiver:
        assert list(receiver) == [0, 1, 2, 3, 4]


class Sent:
    """An argument that kills the process which unpickles it: it dies while it starts."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (1,)


def test_a_process_that_dies_while_it_starts() -> None:
    context = multiprocessing.get_context("spawn")
    channel: Channel[int] = Channel(1, 1, context=context)
    sender = channel.sender()
    process = context.Process(target=leave, args=(Sent(), sender))
    with pytest.warns(ShardQueueWarning, match="sender 0 was dropped before it was used"):
        process.start()
        with channel.receiver() as receiver:
            assert list(receiver) == []
        process.join()
        _until_over(channel)


def test_a_process_that_cannot_be_started_leaves_the_end_with_its_maker() -> None:
    context = multiprocessing.get_context("spawn")
    channel: Channel[int] = Channel(1, 1, context=context)
    sender = channel.sender()
    with pytest.raises((AttributeError, TypeError)):
        context.Process(target=leave, args=(sender, lambda: None)).start()
    with sender, channel.receiver() as receiver:
        sender.send(1)
        sender.close()
        assert list(receiver) == [1]


def _until_over(channel: Channel[Any]) -> None:
    thread = channel._hub._thread  # type: ignore[union-attr]
    thread.join(PATIENCE)
    assert not thread.is_alive(), f"the broker waits for an end: {channel.report()}"


def use_twice(pipe: Connection, sender: Sender[int]) -> None:
    try:
        with sender:
            sender.send(os.getpid())
            pipe.send("used")
    except ClosedError as error:
        pipe.send(error)


def test_an_end_belongs_to_the_first_process_that_uses_it(context: BaseContext, crew: Crew) -> None:
    channel: Channel[int] = Channel(1, 1, context=context)
    sender = channel.sender()
    pipes = [crew.start(context, use_twice, sender) for _ in range(2)]
    words = [said(pipe)[0] for pipe in pipes]
    crew.join()
    assert "used" in words
    [error] = [word for word in words if word != "used"]
    assert isinstance(error, ClosedError)
    assert "sender 0" in str(error)
    with channel.receiver() as receiver:
        assert list(receiver) == [crew.processes[words.index("used")].pid]


GLOBAL: list[Any] = []


def use_global(pipe: Connection) -> None:
    try:
        GLOBAL[0].send(1)
    except ClosedError as error:
        pipe.send(error)


def test_a_forked_child_has_only_what_it_was_passed(crew: Crew) -> None:
    context = multiprocessing.get_context("fork")
    channel: Channel[int] = Channel(2, 1, context=context)
    used, unused = channel.sender(), channel.sender()
    used.send(0)
    for sender, message in ((unused, "was not passed to this process"), (used, "belongs to its parent")):
        GLOBAL[:] = [sender]
        [error] = said(crew.start(context, use_global))
        assert message in str(error)
    GLOBAL.clear()
    with channel.receiver() as receiver:
        for sender in (used, unused):
            sender.send(1)
            sender.close()
        assert list(receiver) == [0, 1, 1]


class Worker(multiprocessing.get_context("fork").Process):  # type: ignore[misc]
    """A process that keeps its end as an attribute, deep down."""

    def __init__(self, sender: Sender[int]) -> None:
        super().__init__()
        self.config = {"ends": [(sender,)]}

    def run(self) -> None:
        with self.config["ends"][0][0] as sender:
            sender.send(7)


def test_ends_in_attributes_closures_and_partials_are_passed_under_fork(crew: Crew) -> None:
    context = multiprocessing.get_context("fork")
    channel: Channel[int] = Channel(2, 1, context=context)
    inner = channel.sender()

    def closure() -> None:
        with inner:
            inner.send(8)

    crew.processes += [Worker(channel.sender()), context.Process(target=closure)]
    for process in crew.processes:
        process.start()
    with channel.receiver() as receiver:
        assert sorted(receiver) == [7, 8]
    assert crew.join() == [0, 0]


def test_a_channel_between_threads_says_so_in_a_forked_child(crew: Crew) -> None:
    context = multiprocessing.get_context("fork")
    channel: Channel[int] = Channel(2, 1)
    sender, receiver = channel.sender(), channel.receiver()
    [error] = said(crew.start(context, use_twice, sender))
    assert "make it with context=" in str(error)
    with receiver:
        sender.close()
        channel.sender().close()
        assert list(receiver) == []


def raise_in_sender(pipe: Connection, sender: Sender[int]) -> None:
    with suppress(ZeroDivisionError), sender:
        sender.send(1)
        raise ZeroDivisionError("in the teacher")


def test_an_error_arrives_with_its_traceback(context: BaseContext, crew: Crew) -> None:
    channel: Channel[int] = Channel(1, 1, context=context)
    crew.start(context, raise_in_sender, channel.sender())
    with channel.receiver() as receiver:
        assert receiver.receive() == 1
        with pytest.raises(ZeroDivisionError, match="in the teacher") as caught:
            receiver.receive()
    assert "raise_in_sender" in str(caught.value.__cause__)
    crew.join()


def produce_tensors(pipe: Connection, sender: Sender[Any], first: int, count: int, strategy: str) -> None:
    import torch

    torch.multiprocessing.set_sharing_strategy(strategy)  # type: ignore[no-untyped-call]
    with sender:
        for number in range(first, first + count):
            sender.send({"number": number, "hidden": torch.full((1000,), number)})
            pipe.send(number)


def consume_tensors(pipe: Connection, receiver: Receiver[Any]) -> None:
    import torch

    torch.set_num_threads(1)
    try:
        with receiver:
            for item in receiver:
                hidden = item["hidden"]
                assert bool((hidden == item["number"]).all())
                pipe.send(int(hidden[0]))
                del item, hidden
    except Exception as error:
        pipe.send(error)
    else:
        pipe.send("end")


@pytest.mark.torch
@pytest.mark.parametrize(
    ("method", "strategy", "capacity"),
    [
        ("fork", "file_descriptor", 4),
        ("fork", "file_descriptor", 129),  # too many for descriptors: their sender lingers
        ("fork", "file_system", 4),  # names: their sender lingers
        pytest.param("spawn", "file_descriptor", 4, marks=pytest.mark.full),
    ],
)
def test_tensors_travel_in_shared_memory(crew: Crew, method: str, strategy: str, capacity: int) -> None:
    context = multiprocessing.get_context(method)
    channel: Channel[Any] = Channel(2, 2, capacity, context=context)
    for number in range(2):
        crew.start(context, produce_tensors, channel.sender(), number * 100, 20, strategy)
    pipes = [crew.start(context, consume_tensors, channel.receiver()) for _ in range(2)]
    got = [said(pipe) for pipe in pipes]
    assert crew.join() == [0] * 4
    assert [part.pop() for part in got] == ["end", "end"]
    assert sorted(n for part in got for n in part) == [*range(20), *range(100, 120)]


def send_and_drop(pipe: Connection, sender: Sender[Any]) -> None:
    import torch

    sender.send(torch.arange(3))
    sender.send(4)


@pytest.mark.torch
def test_a_process_that_ends_without_closing_still_lingers(context: BaseContext, crew: Crew) -> None:
    channel: Channel[Any] = Channel(1, 1, context=context)
    with pytest.warns(ShardQueueWarning, match=r"sender 0 \(process \d+\) was dropped without close"):
        crew.start(context, send_and_drop, channel.sender())
        with channel.receiver() as receiver:
            got = list(receiver)
        crew.join()
        _until_over(channel)
    assert [got[0].tolist(), got[1]] == [[0, 1, 2], 4]


def send_then_die(pipe: Connection, sender: Sender[Any], strategy: str) -> None:
    import torch

    torch.multiprocessing.set_sharing_strategy(strategy)  # type: ignore[no-untyped-call]
    with sender:
        sender.send(1)
        sender.send(torch.arange(1000))
        sender.send([torch.arange(2000)] * 17 if strategy == "file_descriptor" else torch.arange(2000))
        sender.send(2)
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("method", "strategy"),
    [("fork", "file_descriptor"), ("fork", "file_system"), ("spawn", "file_descriptor")],
)
def test_a_killed_senders_memory_is_lost_and_all_else_arrives(crew: Crew, method: str, strategy: str) -> None:
    context = multiprocessing.get_context(method)
    lost = 2 if strategy == "file_system" else 0  # a descriptor travels with its item, a name does not
    channel: Channel[Any] = Channel(2, 1, 16, context=context)
    with (
        pytest.warns(ShardQueueWarning, match=rf"sender 0 \(process \d+\) was killed: {lost} items"),
        channel.receiver() as receiver,
    ):
        crew.start(context, send_then_die, channel.sender(), strategy)
        crew.join()
        with channel.sender() as other:
            other.send(3)
        got = [receiver.receive() for _ in range(5 - lost)]
        with pytest.raises(SenderError, match=f"was killed: {lost} items") as caught:
            receiver.receive()
        assert caught.value.lost == channel.report().lost == lost
        receiver.close()
        _until_over(channel)
    assert sorted(item for item in got if isinstance(item, int)) == [1, 2, 3]
    assert [len(item) for item in got if not isinstance(item, int)] == [1000, 17][lost:]


def take_then_die(pipe: Connection, receiver: Receiver[Any]) -> None:
    receiver.receive()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def strategy() -> Iterator[Callable[[str], None]]:
    """Sets torch's way to share memory, for this test."""
    from torch import multiprocessing

    before = multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    yield multiprocessing.set_sharing_strategy
    multiprocessing.set_sharing_strategy(before)  # type: ignore[no-untyped-call]


@pytest.mark.torch
@pytest.mark.parametrize("redeliver", [False, True])
@pytest.mark.parametrize(
    ("method", "memory"), [("fork", "none"), ("fork", "copied"), ("fork", "named"), ("spawn", "copied")]
)
def test_what_a_killed_receiver_had_in_hand(
    crew: Crew, strategy: Callable[[str], None], method: str, memory: str, redeliver: bool
) -> None:
    import torch

    strategy("file_system" if memory == "named" else "file_descriptor")
    context = multiprocessing.get_context(method)
    channel: Channel[Any] = Channel(1, 2, 4, context=context, redeliver=redeliver)
    with (
        pytest.warns(ShardQueueWarning, match="receiver 0 .*was killed; what it had in hand, 1 items, is"),
        channel.sender() as sender,
    ):
        crew.start(context, take_then_die, channel.receiver())
        sender.send(1 if memory == "none" else torch.full((1000,), 1))
        crew.join()
        with channel.receiver() as receiver:
            for number in (2, 3):
                sender.send(number)
                if number == 2:
                    got = [receiver.receive()]
            threading.Thread(target=sender.close).start()
            got += list(receiver)
        _until_over(channel)
    assert sorted(int(torch.as_tensor(item).flatten()[-1]) for item in got) == (
        [1, 2, 3] if redeliver else [2, 3]
    )
    report = channel.report()
    assert (report.lost, report.redelivered) == ((0, 1) if redeliver else (1, 0))


@pytest.mark.torch
def test_a_tensor_is_copied_unless_it_is_in_shared_memory_already() -> None:
    import torch

    channel: Channel[Any] = Channel(1, 1, context=multiprocessing.get_context("spawn"))
    private, shared = torch.zeros(3000), torch.zeros(3000).share_memory_()  # type: ignore[no-untyped-call]
    halves = torch.zeros(3000)
    with channel.sender() as sender, channel.receiver() as receiver:
        sender.send((private, shared, halves[:1500], halves[1500:]))
        assert not private.is_shared()  # type: ignore[no-untyped-call]
        for tensor in (private, shared, halves):
            tensor.fill_(7)
        copy, same, first, second = receiver.receive()
        assert float(copy.sum()) == float(first.sum()) == float(second.sum()) == 0.0
        assert float(same.sum()) == 3000 * 7.0
        first.untyped_storage().fill_(0)
        second.fill_(1)
        assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr(), "views stay views"


def take_change_then_die(pipe: Connection, receiver: Receiver[Any]) -> None:
    receiver.receive().fill_(99)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:receiver 0 .* was killed")
def test_what_a_killed_receiver_wrote_is_not_delivered_again(crew: Crew) -> None:
    import torch

    context = multiprocessing.get_context("fork")
    channel: Channel[Any] = Channel(1, 2, context=context, redeliver=True)
    with channel.sender() as sender:
        crew.start(context, take_change_then_die, channel.receiver())
        sender.send(torch.ones(3000))
        crew.join()
    with channel.receiver() as receiver:
        assert [float(item.sum()) for item in receiver] == [3000.0]


@pytest.mark.torch
def test_a_small_part_of_a_large_tensor_goes_alone() -> None:
    import torch

    channel: Channel[Any] = Channel(1, 1, context=multiprocessing.get_context("spawn"))
    text = torch.arange(1_000_000).view(1000, 1000)
    with channel.sender() as sender, channel.receiver() as receiver:
        sender.send((text[7], text[:, 3], torch.tensor([1j]).conj()))
        row, column, conjugate = receiver.receive()
        assert row.tolist() == text[7].tolist()
        assert column.tolist() == text[:, 3].tolist()
        assert conjugate.tolist() == [-1j]
        assert row.untyped_storage().nbytes() == 8000


def test_a_function_in_an_item_does_not_make_its_sender_linger() -> None:
    channel: Channel[Any] = Channel(1, 1, context=multiprocessing.get_context("spawn"))
    with channel.receiver() as receiver:
        with channel.sender() as sender:
            sender.send((partial(int, "7"), "a text".upper, [1].append))
        seven, upper, _ = receiver.receive()
        assert (seven(), upper()) == (7, "A TEXT")


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:receiver 0 .*dropped")
@pytest.mark.parametrize("way", ["closed", "dropped"])
def test_a_receiver_that_goes_lets_go_of_what_it_had_ahead(way: str) -> None:
    import torch

    context = multiprocessing.get_context("spawn")
    channel: Channel[Any] = Channel(1, 1, 64, context=context)
    before = _open_files()
    with channel.sender() as sender:
        receiver: Any = channel.receiver()
        for _ in range(60):
            sender.send(torch.zeros(2000))
        while len(receiver._link.ready) < 6:  # it gets several at a time once it has come back at once
            receiver.receive()
        if way == "closed":
            receiver.close()
        del receiver
    _until_over(channel)
    gc.collect()
    assert _open_files() <= before + 3


def test_a_channel_that_is_over_costs_a_fork_nothing(crew: Crew) -> None:
    context = multiprocessing.get_context("fork")
    channel: Channel[int] = Channel(1, 1, context=context)
    with channel.receiver() as receiver:
        channel.sender().close()
        assert list(receiver) == []
    _until_over(channel)
    before = _open_files()
    for _ in range(10):
        said(crew.start(context, leave, None))
        crew.join()
        crew.forget()
    gc.collect()
    assert _open_files() <= before + 3


def wait_for_a_word(pipe: Connection, word: Connection) -> None:
    pipe.send(_open_files())
    word.recv()


@pytest.mark.torch
def test_a_forked_child_holds_nothing_that_is_queued(crew: Crew) -> None:
    import torch

    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    channel: Channel[Any] = Channel(1, 1, 32, context=context)
    before = said_one(crew.start(context, wait_for_a_word, theirs))
    with channel.sender() as sender, channel.receiver() as receiver:
        for _ in range(20):
            sender.send(torch.zeros(3000))
        receiver.receive()
        assert said_one(crew.start(context, wait_for_a_word, theirs)) <= before + 12
        for _ in range(2):
            ours.send("go")
    crew.join()


def said_one(pipe: Connection) -> Any:
    assert pipe.poll(PATIENCE)
    return pipe.recv()


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # torch's, about its own default
@pytest.mark.parametrize("capacity", [8, 4096])
def test_all_kinds_of_tensors(capacity: int) -> None:
    import torch

    channel: Channel[Any] = Channel(1, 1, capacity, context=multiprocessing.get_context("spawn"))
    items: list[Any] = [
        torch.empty(0),
        torch.tensor(3.5),
        torch.arange(5000, dtype=torch.bfloat16).view(50, 100).t(),
        torch.eye(60).to_sparse(),
        torch.nn.Parameter(torch.ones(2000)),
        torch.zeros(3000, dtype=torch.complex64)[::7],
        torch.ones(1).expand(5000),
        torch.zeros(2000, dtype=torch.bool),
        {"many": [torch.full((2000,), n) for n in range(40)]},
    ]
    with channel.sender() as sender, channel.receiver() as receiver:
        for item in items:
            crew = threading.Thread(target=sender.send, args=(item,))
            crew.start()
            got = receiver.receive(PATIENCE)
            crew.join()
            if isinstance(item, dict):
                assert [int(each[-1]) for each in got["many"]] == list(range(40))
            else:
                assert type(got) is type(item)
                assert (got.dtype, got.shape, got.requires_grad) == (
                    item.dtype,
                    item.shape,
                    item.requires_grad,
                )
                assert torch.equal(got.to_dense(), item.to_dense())
        closing = threading.Thread(target=sender.close)
        closing.start()
        assert list(receiver) == []
        closing.join()


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.torch
def test_no_descriptors_are_left_open() -> None:
    import torch

    context = multiprocessing.get_context("spawn")
    before = _open_files()
    for turn in range(40):
        channel: Channel[Any] = Channel(1, 2, 2, context=context, redeliver=bool(turn % 2))
        with channel.sender() as sender, channel.receiver() as receiver, channel.receiver() as other:
            sender.send(torch.zeros(2000))
            sender.send((torch.zeros(2000), torch.ones(3000)))
            for _ in range(5):
                shared = torch.zeros(2000).share_memory_()  # type: ignore[no-untyped-call]
                with suppress(ChannelFullError):
                    sender.send([torch.zeros(2000), shared], timeout=0)
            assert len(receiver.receive()) == 2000
            other.close()
        _until_over(channel)
        gc.collect()
    assert _open_files() <= before + 3


def _raw_fork(child: Callable[[], None]) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            child()
        os._exit(0)
    return pid


def test_when_the_maker_dies_every_end_gets_an_error(crew: Crew) -> None:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)

    def maker() -> None:
        channel: Channel[int] = Channel(1, 1, 1, context=context)
        mine = Crew()
        mine.start(context, wait_in_send, channel.sender(), there)
        mine.start(context, wait_in_receive, channel.receiver(), there)
        signal.pause()

    process = _raw_fork(maker)
    there.close()
    ready = {here.recv() for _ in range(2)}
    assert ready == {"sending", "receiving"}
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    assert sorted(said(here)) == ["receiver: BrokerGoneError", "sender: BrokerGoneError"]


def wait_in_send(_: Connection, sender: Sender[int], pipe: Connection) -> None:
    pipe.send("sending")
    try:
        with sender:
            while True:
                sender.send(1)
    except BrokerGoneError as error:
        pipe.send(f"sender: {type(error).__name__}")


def test_when_the_maker_dies_a_sender_with_promised_room_gets_an_error(crew: Crew) -> None:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)

    def maker() -> None:
        channel: Channel[int] = Channel(1, 1, 1000, context=context)
        receiver = channel.receiver()
        Crew().start(context, send_after, channel.sender(), there, os.getpid())
        receiver.receive()
        signal.pause()

    process = _raw_fork(maker)
    there.close()
    assert said(here) == ["BrokerGoneError"]
    os.waitpid(process, 0)


def send_after(_: Connection, sender: Sender[int], pipe: Connection, maker: int) -> None:
    try:
        with sender:
            for number in range(200):
                sender.send(number)
            os.kill(maker, signal.SIGKILL)
            while os.getppid() == maker:
                pass
            sender.send(200)
    except BrokerGoneError as error:
        pipe.send(type(error).__name__)


def wait_in_receive(_: Connection, receiver: Receiver[int], pipe: Connection) -> None:
    pipe.send("receiving")
    try:
        with receiver:
            while receiver.receive():
                pass
    except BrokerGoneError as error:
        pipe.send(f"receiver: {type(error).__name__}")


def switches(thread: int | None) -> int:
    """How often a thread of this machine was put to sleep or aside so far."""
    lines = Path(f"/proc/{thread}/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)


def wait_for_one(pipe: Connection, receiver: Receiver[int]) -> None:
    with receiver:
        pipe.send("up")
        assert list(receiver) == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.full)])
def test_an_idle_channel_wakes_nobody(crew: Crew, method: str) -> None:
    context = multiprocessing.get_context(method)
    channel: Channel[int] = Channel(2, 2, context=context)
    threads: Channel[int] = Channel(1, 1)
    end, sender = channel.sender(), threads.sender()
    pipes = [crew.start(context, wait_for_one, channel.receiver()) for _ in range(2)]
    receiver = threads.receiver()
    waiting = threading.Thread(target=lambda: list(receiver))
    waiting.start()
    assert [pipe.recv() for pipe in pipes] == ["up", "up"]
    broker = channel._hub._thread  # type: ignore[union-attr]
    watched = [broker.native_id, waiting.native_id, *(process.pid for process in crew.processes)]
    time.sleep(0.5)  # from up to asleep
    before = [switches(thread) for thread in watched]
    time.sleep(2.0)
    assert [switches(thread) for thread in watched] == before
    end.close()
    channel.sender().close()
    sender.close()
    waiting.join()
    receiver.close()
    assert crew.join() == [0, 0]


def kill_round(
    context: BaseContext, crew: Crew, chooser: random.Random, victim: str, redeliver: bool
) -> None:
    """Two senders and two receivers; one of them is killed at a random moment."""
    channel: Channel[int] = Channel(2, 2, chooser.choice([1, 2, 16]), context=context, redeliver=redeliver)
    count = 400
    sending = [crew.start(context, produce, channel.sender(), k * 10_000, count) for k in range(2)]
    receiving = [crew.start(context, consume, channel.receiver()) for _ in range(2)]
    processes = crew.processes[-4:]
    target = processes[0 if victim == "sender" else 2]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShardQueueWarning)
        time.sleep(chooser.uniform(0, 0.06 if context.get_start_method() == "fork" else 0.4))
        os.kill(target.pid or 0, signal.SIGKILL)
        got, sent = [said(pipe) for pipe in receiving], [said(pipe) for pipe in sending]
        crew.join()
        _until_over(channel)
    report = channel.report()
    ends = [part.pop() for part in got if part and not isinstance(part[-1], int)]
    counts = Counter(n for part in got for n in part)
    if victim == "sender":
        assert len(ends) == 2
        assert set(counts.values()) <= {1}
        assert counts.keys() >= {*sent[1], *sent[0][:-1]}, (
            "all that was sent arrived; they were copied, not shared"
        )
        assert len(counts) - len(sent[1]) - len(sent[0]) in (0, 1), (
            "and the one on whose send it died, or not"
        )
        assert len(sent[1]) == count
        died_at_work = report.senders[0].state == "killed"
        assert [type(end) for end in ends] == [SenderError if died_at_work else str] * 2
    else:
        assert ends[-1:] == ["end"]
        assert all(len(part) == count for part in sent)
        everything = {n for part in sent for n in part}
        assert counts.keys() <= everything
        if redeliver:
            assert counts.keys() == everything
            assert report.lost == 0
            assert counts.total() - len(everything) <= report.redelivered
        else:
            assert set(counts.values()) <= {1}
            assert len(everything) - len(counts) <= report.lost


@pytest.mark.parametrize("victim", ["sender", "receiver", "receiver again"])
@pytest.mark.parametrize(
    ("method", "rounds"),
    [
        ("fork", 4),
        ("spawn", 1),
        pytest.param("fork", 60, marks=pytest.mark.full),
        pytest.param("spawn", 60, marks=pytest.mark.full),
    ],
)
def test_killed_at_random_moments(crew: Crew, victim: str, method: str, rounds: int) -> None:
    chooser = random.Random(f"{victim} {method} {rounds}")
    for _ in range(rounds):
        kill_round(multiprocessing.get_context(method), crew, chooser, victim.split()[0], "again" in victim)
        crew.forget()
