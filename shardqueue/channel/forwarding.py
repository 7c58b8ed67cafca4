"""A sender's error on its way to the receivers: as it was raised, where that is possible."""

from __future__ import annotations

import pickle
import queue
import traceback
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


class _Remote(Exception):  # noqa: N818 - shown as the cause of an error, never raised by itself
    """Where an error was raised in another process: its traceback as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def dump_error(error: Exception, sender: str) -> bytes:
    """Return an error as bytes: in one line, itself where it can be pickled, and its traceback as text."""
    line = raised_by(error)
    where = "".join(traceback.format_exception(error)) if error.__traceback__ else ""
    try:
        itself = pickle.dumps(error)
        pickle.loads(itself)
    except Exception:  # it has no way through a pipe, so its text goes
        itself = pickle.dumps(SenderError(f"{sender} ended with {line}", sender))
    return pickle.dumps((line, itself, where))


def error_line(body: bytes) -> str:
    """Return an error's type and message, without making the error."""
    line, _, _ = pickle.loads(body)
    return str(line)


def load_error(body: bytes) -> Exception:
    """Return an error from its bytes; its cause tells the traceback in the other process."""
    line, itself, where = pickle.loads(body)
    try:
        error = pickle.loads(itself)
    except Exception:  # a class this process cannot import
        error = SenderError(f"a sender ended with {line}")
    assert isinstance(error, Exception)
    if where:
        error.__cause__ = _Remote(where)
    return error
