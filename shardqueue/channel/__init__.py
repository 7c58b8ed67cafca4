"""A hand-off channel: N producers, M consumers, one bounded queue, and an exact end.

Every producer puts, every consumer takes, so nobody starves while there is work, for any N and M. The stream ends for
a consumer exactly when every producer has finished and every item was handed out.

`handoff` is the counted queue, without I/O, and all of the policy. Around it, for threads: `threads`. For processes:
`exchange` (the broker without I/O), `broker` (its thread and sockets), `links` (an end without I/O), `line` and
`processes` (its socket, and the end itself), `wire` and `packing` (frames, items as bytes), `forks`. `report` and
`watch` are what is seen of it.
"""

from __future__ import annotations

import socket
import time
import weakref
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, cast

from shardqueue.channel.broker import Broker
from shardqueue.channel.ends import Receiver, Sender, checked_seconds
from shardqueue.channel.exchange import Exchange
from shardqueue.channel.forwarding import forwardable
from shardqueue.channel.handoff import Handoff
from shardqueue.channel.report import ChannelReport, EndReport, Side
from shardqueue.channel.threads import Hub
from shardqueue.channel.watch import Watch, warn
from shardqueue.errors import ClosedError, InvalidInputError
from shardqueue.units import check_int

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

__all__ = ["Channel", "ChannelReport", "EndReport", "Receiver", "Sender"]

T = TypeVar("T")


class Channel(Generic[T]):
    """Hands items from N senders to M receivers through one bounded queue.

        channel = Channel(senders=5, receivers=3)

        def produce():                              # in five threads
            with channel.sender() as sender:
                for batch in mine:
                    sender.send(teacher(batch))

        def consume():                              # in three
            with channel.receiver() as receiver:
                for hidden in receiver:
                    train(hidden)

    Between processes the ends are made where the channel was made and passed to the processes as arguments; a thread
    there moves the items, and its process must outlive the others. Each end is for one thread of one process.

    Args:
        senders: producers, 1 or more. Each counts from the start, whenever its end is made.
        receivers: consumers, 1 or more.
        capacity: items the queue holds before senders wait, 1 or more; those in receivers' hands do not count.
        context: None between threads; between processes `torch.multiprocessing.get_context("spawn")` or "fork",
            "forkserver".
        redeliver: between processes, give what a killed receiver had in hand to another one (at least once), instead
            of reporting it lost (at most once). An item is in hand until its receiver asks for the next or closes;
            the stream then ends when nothing is in hand.
        on_report: called with a `ChannelReport` every `report_every` seconds while items move, and at the end; in the
            thread of an end, or between processes in the thread that moves the items.
        report_every: seconds.
        name: what reports and warnings call it, where a program has several channels.

    Raises:
        InvalidInputError: an argument is out of range.
    """

    def __init__(
        self,
        senders: int,
        receivers: int,
        capacity: int = 8,
        *,
        context: BaseContext | None = None,
        redeliver: bool = False,
        on_report: Callable[[ChannelReport], object] | None = None,
        report_every: float = 30.0,
        name: str = "",
    ) -> None:
        for what, count in (("senders", senders), ("receivers", receivers), ("capacity", capacity)):
            check_int(what, count, 1)
        if checked_seconds("report_every", report_every) == 0:
            raise InvalidInputError("report_every", report_every, "more than 0 seconds", "pass 30")
        if on_report is not None and not callable(on_report):
            raise InvalidInputError(
                "on_report", on_report, "a function of a report", "pass a function, or None"
            )
        if not isinstance(name, str):
            raise InvalidInputError("name", name, "a str", "name the channel with a short string")
        if redeliver and context is None:
            raise InvalidInputError(
                "redeliver",
                redeliver,
                "False between threads, which are not killed",
                "pass context= for processes",
            )
        self._watch = Watch(on_report, report_every)
        self._hub: Hub[Any] | Broker
        if context is None:
            self._hub = Hub(Handoff(senders, receivers, capacity, time.monotonic(), name), self._watch)
        else:
            self._hub = _between_processes(
                senders, receivers, capacity, context, redeliver, name, self._watch
            )
        self._declared = {Side.SENDER: senders, Side.RECEIVER: receivers}
        self._dropped = weakref.finalize(self, _forget, self._hub)
        self._dropped.atexit = False

    def sender(self) -> Sender[T]:
        """Return a sender, one of those declared.

        Raises:
            ClosedError: all are taken, or the channel is closed, or another process made it.
        """
        return cast("Sender[T]", self._taken(self._hub.sender, Side.SENDER))

    def receiver(self) -> Receiver[T]:
        """Return a receiver, one of those declared.

        Raises:
            ClosedError: all are taken, or the channel is closed, or another process made it.
        """
        return cast("Receiver[T]", self._taken(self._hub.receiver, Side.RECEIVER))

    def _taken(self, take: Callable[[], object], side: Side) -> object:
        if not self._hub.is_ours:
            raise ClosedError(
                "another process made this channel; make its ends there, and pass them to processes"
            )
        end = take()
        if end is None:
            if not self._dropped.alive:
                raise ClosedError(
                    f"the channel is closed; make its {side}s before, or clone() one that is open"
                )
            raise ClosedError(
                f"the channel has {self._declared[side]} {side} ends, and all are taken; declare more, or clone() "
                "an open one"
            )
        return end

    def report(self) -> ChannelReport:
        """Return what happened so far: depth over time, items a second, what every end waited."""
        return self._hub.report()

    def close(self, error: BaseException | None = None) -> None:
        """Make no more ends: those declared and not made count as closed, with a warning. The others go on.

        Args:
            error: what the senders that were not made ended with; it goes to the receivers.
        """
        if self._dropped.detach() is None:
            return
        failure = None if error is None else forwardable(error, "a channel's own block")
        _say(self._hub.forgo(failure))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _where: TracebackType | None
    ) -> None:
        self.close(error)

    def __reduce__(self) -> tuple[Any, ...]:
        raise ClosedError(
            "a channel stays in the process that made it; make its ends there, with sender() and receiver(), and "
            "pass those to the processes"
        )

    def __repr__(self) -> str:
        senders, receivers = self._declared[Side.SENDER], self._declared[Side.RECEIVER]
        return f"Channel(senders={senders}, receivers={receivers}, capacity={self._hub.queue.capacity})"


def _between_processes(
    senders: int,
    receivers: int,
    capacity: int,
    context: BaseContext,
    redeliver: bool,
    name: str,
    watch: Watch,
) -> Broker:
    if not isinstance(context, BaseContext):
        raise InvalidInputError(
            "context",
            context,
            "None or a context of multiprocessing",
            'pass torch.multiprocessing.get_context("spawn")',
        )
    if not hasattr(socket, "AF_UNIX") or not hasattr(socket, "recv_fds"):
        raise InvalidInputError(
            "context",
            context,
            "None on this system, which cannot pass sockets between processes",
            "use threads",
        )
    return Broker(Exchange(senders, receivers, capacity, redeliver, time.monotonic(), name), watch)


def _forget(hub: Hub[Any] | Broker) -> None:
    """The garbage collector found a channel: nobody can make the ends that are missing."""
    if hub.is_ours and any(hub.queue.untaken.values()):
        missing = dict(hub.queue.untaken)
        hub.forget()
        _say(missing)


def _say(missing: dict[Side, int]) -> None:
    named = " and ".join(f"{count} {side}{'s' * (count > 1)}" for side, count in missing.items() if count)
    if named:
        warn(f"{named} of a channel: declared and never made, so they count as closed")
