"""The two ends a program holds: what it may do with them, whatever carries the items.

An end belongs to one thread at a time; `clone` makes another one. Leaving a `with` block closes the end, with the
error if there is one. Between threads an item is the object itself. Between processes it travels pickled, and the
memory of tensors beside it: on the CPU as a copy, made by `send`, unless it is shared memory already; on the GPU by
CUDA IPC, without a copy: do not write to such a tensor after sending it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, cast

from shardqueue.errors import ChannelEndedError, ClosedError, InvalidInputError

if TYPE_CHECKING:
    from types import TracebackType

T = TypeVar("T")


def checked_seconds(name: str, value: object) -> float:
    """Return a number of seconds, 0 or more.

    Raises:
        InvalidInputError: it is not one.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not cast("float", value) >= 0:
        raise InvalidInputError(name, value, "a number of seconds, 0 or more", "pass seconds, as in 2.5")
    return cast("float", value)


_OF_THREADS = (
    "this end is for the threads of one process; make the channel with context= to pass its ends to processes"
)


class Sender(ABC, Generic[T]):
    """The sending end of a channel.

    Attributes:
        name: as reports call it, "sender 2".
    """

    name: str

    @abstractmethod
    def send(self, item: T, timeout: float | None = None) -> None:
        """Hand an item over; wait while the channel is full.

        Args:
            item: anything, None included; between processes anything that can be pickled.
            timeout: seconds to wait for room; None: as long as it takes, 0: not at all.

        Raises:
            ChannelFullError: there was no room in time; the item was not sent.
            ReceiversGoneError: every receiver is closed.
            SenderError: another sender ended with an error, which ended the stream.
            ClosedError: this end is closed.
        """

    def send_nowait(self, item: T) -> None:
        """Hand `item` over without waiting: `send` with a timeout of 0."""
        self.send(item, 0)

    @abstractmethod
    def clone(self) -> Sender[T]:
        """Return another sender of the same channel: the stream ends when that one is closed, too.

        Raises:
            ClosedError: this end is closed.
        """

    @abstractmethod
    def close(self, error: BaseException | None = None) -> None:
        """Say that nothing more comes from this end; a second time does nothing.

        Between processes it returns when nobody needs this process's memory any more: when each receiver has come
        back for its next item, of CUDA tensors and of memory that torch shares under names.

        Args:
            error: ends the stream for everybody: receivers get what is queued, then this error.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _where: TracebackType | None
    ) -> None:
        # A producer that is a generator, and is closed early, ends in order.
        self.close(None if isinstance(error, GeneratorExit) else error)

    def __reduce__(self) -> tuple[Any, ...]:
        raise ClosedError(_OF_THREADS)

    def __repr__(self) -> str:
        return f"<{self.name}>"


class Receiver(ABC, Generic[T]):
    """The receiving end of a channel; iterating over it gives items until the stream ends.

    Attributes:
        name: as reports call it, "receiver 0".
    """

    name: str

    @abstractmethod
    def receive(self, timeout: float | None = None) -> T:
        """Return the next item; wait while there is none.

        Args:
            timeout: seconds to wait for an item; None: as long as it takes, 0: not at all.

        Raises:
            ChannelEndedError: every sender is closed, and every item was handed out. So it stays.
            ChannelEmptyError: there was no item in time.
            SenderError: a sender was killed (told at the end), or ended with what cannot be raised again.
            ClosedError: this end is closed.
            Exception: the error with which a sender ended, after what was queued before it.
        """

    def receive_nowait(self) -> T:
        """Do the same without waiting."""
        return self.receive(0)

    @abstractmethod
    def clone(self) -> Receiver[T]:
        """Return another receiver of the same channel.

        Raises:
            ClosedError: this end is closed.
        """

    @abstractmethod
    def close(self) -> None:
        """Say that this end takes no more; a second time does nothing. The others go on."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        try:
            return self.receive()
        except ChannelEndedError:
            raise StopIteration from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _where: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        raise ClosedError(_OF_THREADS)

    def __repr__(self) -> str:
        return f"<{self.name}>"
