"""The one error tree.

Every error raised on purpose is a `ShardQueueError`. Its message carries the value that was wrong, the bound
it broke and the remedy; what code may want to read is a field as well. A loader's own exception is never
wrapped: the consumer gets it as it was raised.
"""

from __future__ import annotations

import queue


class ShardQueueError(Exception):
    """Base of every error this package raises on purpose."""


class InvalidInputError(ShardQueueError, ValueError):
    """An argument is out of range or grammar.

    Attributes:
        name: the argument.
        value: what was given.
        bound: what it must satisfy.
        remedy: what to pass instead.

    Raised again in another process from its message alone (as a `DataLoader` does with what its workers raise), it
    keeps the message; the attributes are then empty.
    """

    name: str
    value: object
    bound: str
    remedy: str

    def __init__(self, name: str, value: object = None, bound: str = "", remedy: str = "") -> None:
        self.name, self.value, self.bound, self.remedy = name, value, bound, remedy
        if not bound:
            self.name = ""
            super().__init__(name)
            return
        shown = repr(value)
        if len(shown) > 120:
            shown = f"{shown[:117]}..."
        super().__init__(f"{name}={shown}: {name} must be {bound}; {remedy}")

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        if not self.bound:
            return type(self), self.args
        return type(self), (self.name, self.value, self.bound, self.remedy)


class LoadError(ShardQueueError, TypeError):
    """The user's `load` gave something that is not an iterable of `(step, batch)` pairs."""


class MailboxError(ShardQueueError, OSError):
    """A mailbox call failed in a way that trying again will not mend (credentials, a missing bucket, ...)."""


class MailboxRefusedError(MailboxError, ValueError):
    """This store cannot hold a queue: no create of ours on it is exclusive, or none was proven to be."""


class MailboxUnavailableError(MailboxError):
    """The store did not answer; the call may or may not have taken effect. Trying again is right."""


class IncompleteError(MailboxUnavailableError):
    """An object is there and is not whole: it is being written, or its writer died."""


class RecordError(ShardQueueError, ValueError):
    """An object in the mailbox is not a record of this protocol."""


class RunError(ShardQueueError, RuntimeError):
    """This run cannot be joined or opened."""


class RunFinishedError(RunError):
    """The newest run under the prefix is finished: every unit was handed out and somebody left at the end."""


class PlanMismatchError(RunError):
    """The run was opened with another plan."""


class StateMismatchError(RunError):
    """A state has nothing to do with the run that goes on, or with another state."""


class PassFinishedError(RunError):
    """This process has already iterated this pass to its end."""


class AgreementError(ShardQueueError):
    """The ranks that step together do not agree: settings, run, or counts that differ."""


class PeerGoneError(AgreementError):
    """A rank that steps together with this one is gone."""


class ClosedError(ShardQueueError, RuntimeError):
    """The object was left, or is used in a process or at a time it was not made for."""


class SenderError(ShardQueueError, RuntimeError):
    """A sender of a channel ended with an error that cannot be raised again as it was, or was killed.

    Attributes:
        sender: which, as in "sender 3".
        lost: items that were lost with it.
    """

    sender: str
    lost: int

    def __init__(self, message: str, sender: str = "", lost: int = 0) -> None:
        super().__init__(message)
        self.sender, self.lost = sender, lost

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (*self.args, self.sender, self.lost)


class ReceiversGoneError(ShardQueueError, BrokenPipeError):
    """No receiver of the channel is left, and senders still send."""


class BrokerGoneError(ShardQueueError, ConnectionError):
    """The process that made a channel between processes is gone, and with it the thread that moved its items."""


class ChannelEndedError(ShardQueueError, EOFError):
    """The stream of the channel is over: every sender is closed and every item was handed out."""


class ChannelFullError(ShardQueueError, queue.Full):
    """The channel had no room for the item in the time allowed; it was not sent."""


class ChannelEmptyError(ShardQueueError, queue.Empty):
    """The channel had no item in the time allowed, and has not ended."""


class ShardQueueWarning(UserWarning):
    """Something that works, but hardly as it was meant."""


class StarvedWarning(ShardQueueWarning):
    """A receiver of a channel waits much of its time, because the senders are slower."""
