"""A sender's error on its way to the receivers: as it was raised, where that is possible."""

from __future__ import annotations

import queue
from contextlib import suppress

from shardqueue.errors import ChannelEndedError, SenderError

_SAYS_SOMETHING = (StopIteration, StopAsyncIteration, ChannelEndedError, queue.Empty, queue.Full)
"""What a receiver would take for an answer of the channel's own."""


def forwardable(error: object, sender: str) -> Exception:
    """Return what receivers are to raise for a sender's error: itself, with a note, or a `SenderError` around it.

    It never fails, whatever the error is: an error that got lost would pass for the end of the stream.
    """
    if isinstance(error, SenderError):
        return error
    if isinstance(error, Exception) and not isinstance(error, _SAYS_SOMETHING):
        with suppress(Exception):  # a frozen dataclass takes no notes
            error.add_note(f"raised in {sender} of a channel; what was queued before it was received")
        return error
    wrapped = SenderError(f"{sender} ended with {raised_by(error)}", sender)
    if isinstance(error, BaseException):
        wrapped.__cause__ = error
    return wrapped


def raised_by(error: object) -> str:
    """Return an error in one line: its type and message, or what else was given as one."""
    try:
        shown = str(error) if isinstance(error, BaseException) else repr(error)
    except Exception:  # the program's own code
        shown = "(its message cannot be shown)"
    if not isinstance(error, BaseException):
        return shown
    return f"{type(error).__name__}: {shown}" if shown else type(error).__name__
