"""What an end in another process knows, without I/O: frames in, frames out.

The ends in `processes` put sockets around it, the model tests any order of delivery.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from shardqueue.channel.wire import (
    ANSWER,
    BY_REFERENCE,
    DROPPED,
    RETURNED,
    Frame,
    Kind,
    decode_numbers,
    encode,
    encode_seconds,
)


class _Link:
    """What both sides have: a wish that may be taken back, and perhaps an end that is another process's.

    Attributes:
        is_withdrawn: the wish (a sender's last item, a receiver's ask) was taken back, and the answer is on its way.
        is_refused: the answer to WITHDRAW, or the end is another process's.
        refusal: in the latter case, whose.
    """

    def __init__(self) -> None:
        self.is_withdrawn = self.is_refused = False
        self.refusal = ""

    def withdraw(self) -> bytes:
        """Return the frame that takes the wish back, once."""
        if self.is_withdrawn:
            return b""
        self.is_withdrawn = True
        return encode(Kind.WITHDRAW)

    def wished(self) -> None:
        """There is a new wish."""
        self.is_withdrawn = self.is_refused = False

    def refused(self, frame: Frame) -> None:
        """The broker refuses."""
        self.is_refused = True
        self.refusal = frame.body.decode()


class SenderLink(_Link):
    """A sender's side of its line.

    Attributes:
        next: number of the next item.
        limit: the first number for which there is no room yet.
        kept: items whose memory a receiver may still need, by number.
        gone: the pickled reason why nothing more is taken, or None.
        again: numbers of items that are asked for again.
        is_released: nothing more is needed of this end.
    """

    def __init__(self) -> None:
        super().__init__()
        self.next = self.limit = 0
        self.kept: dict[int, Any] = {}
        self.gone: bytes | None = None
        self.again: list[int] = []
        self.is_released = False

    def item(self, body: bytes, is_by_reference: bool, count: int = 0, flags: int = 0) -> bytes:
        """Return the frame of the next item, with which `count` file descriptors go; `count` the item then."""
        flags |= BY_REFERENCE if is_by_reference else 0
        return encode(Kind.ITEM, self.next, body, flags, count)

    def count(self, item: object, is_by_reference: bool) -> None:
        """The next item is on its way."""
        if is_by_reference:
            self.kept[self.next] = item
        self.wished()
        self.next += 1

    @property
    def is_taken(self) -> bool:
        """Whether the last item is in the queue."""
        return self.next <= self.limit

    @property
    def is_answered(self) -> bool:
        """Whether it is known what becomes of the last item, which was offered."""
        return self.is_taken or self.gone is not None

    def settle(self) -> bool:
        """Return whether the last item was taken; if not, its number is the next item's."""
        if self.is_taken:
            return True
        self.next -= 1
        self.kept.pop(self.next, None)
        return False

    def repeated(self, number: int, body: bytes, flags: int = 0) -> bytes:
        """Return the answer to AGAIN."""
        return encode(Kind.ITEM, number, body, flags | BY_REFERENCE | RETURNED)

    def told(self, frame: Frame) -> None:
        """Take in what the broker says."""
        match frame.kind:
            case Kind.ROOM:
                self.limit = max(self.limit, frame.number)
            case Kind.DONE:
                for number in decode_numbers(frame.body):
                    self.kept.pop(number, None)
            case Kind.AGAIN:
                self.again.append(frame.number)
            case Kind.GONE:
                self.gone = frame.body
            case Kind.REFUSED:
                self.refused(frame)
            case Kind.BYE:
                self.is_released = True
                self.kept.clear()

    def close(self, error: bytes = b"", is_dropped: bool = False) -> bytes:
        """Return the frame that says nothing more comes."""
        return encode(Kind.CLOSE, self.next, error, DROPPED if is_dropped else 0)


class ReceiverLink(_Link):
    """A receiver's side of its line.

    Attributes:
        ready: items that came and were not handed to the program.
        handed: items handed to the program; it is done with all but the last.
        waited: seconds between its first item and its last in which it waited.
        is_asked: the broker owes an answer.
        over: the pickled error that ends the stream, empty for the plain end; None while it goes on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ready: deque[Frame] = deque()
        self.handed = 0
        self.waited = 0.0
        self.is_asked = False
        self.over: bytes | None = None

    def ask(self) -> bytes:
        """Return the frame that asks for an item, and says that all before are done with."""
        self.is_asked = True
        self.wished()
        return encode(Kind.ASK, self.handed, encode_seconds(self.waited))

    def take(self) -> Frame:
        """Return the next item that came; the program has it."""
        frame = self.ready[0]
        self.handed = frame.number + 1
        self.ready.popleft()
        return frame

    def told(self, frame: Frame) -> None:
        """Take in what the broker says."""
        match frame.kind:
            case Kind.ITEM:
                self.ready.append(frame)
                self.is_asked = self.is_asked and not frame.flags & ANSWER
            case Kind.END:
                self.over = frame.body
                self.is_asked = False
            case Kind.REFUSED:
                self.refused(frame)
                self.is_asked = False

    def close(self, is_dropped: bool = False) -> bytes:
        """Return the frame that says this end takes no more; what it did not hand out goes to the others."""
        return encode(
            Kind.CLOSE, self.handed, encode_seconds(self.waited), flags=DROPPED if is_dropped else 0
        )
