"""SIGTERM as a preemption notice: it ends a `with` block in order, so that what was claimed is given back.

A signal may come anywhere, also between an optimizer's step and the word that it is done. So while a batch is with
the loop the notice is held until the loop comes back, and the batch is trained whole and known to be; for a few
seconds at most, since whoever sent it waits no longer than that.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType

HOLD = 3.0
"""Seconds for which a loop may finish its batch."""


class PreemptionNotice:
    """Catches SIGTERM in the main thread, where nobody else does.

    Attributes:
        away: a batch is with the loop.
        noticed: the signal came meanwhile; the block is to be left as soon as the loop comes back.
    """

    def __init__(self) -> None:
        self.away = self.noticed = False
        self._pid = os.getpid()
        self._restore: Any = None
        self._caught: Any = None
        self._timer: threading.Timer | None = None

    def catch(self) -> None:
        """A preemption notice ends the `with` block in order, where nobody else has plans for the signal."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._caught = self._leave
            self._restore = signal.signal(signal.SIGTERM, self._caught)

    def release(self) -> None:
        """The block is left: the signal means again what it did."""
        if self._timer is not None:
            self._timer.cancel()
        here = threading.current_thread() is threading.main_thread()
        if (
            here
            and self._restore is not None
            and signal.getsignal(signal.SIGTERM) in (self._caught, _leaving)
        ):
            signal.signal(signal.SIGTERM, self._restore)
        self._restore = None

    def leave_if_noticed(self) -> None:
        """The loop came back, or is over: leave now, if that is due."""
        if self.noticed:
            self._go(signal.SIGTERM)

    def _leave(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if not self.away or self.noticed or self._pid != os.getpid():
            self._go(number)
        self.noticed = True
        self._timer = threading.Timer(HOLD, self._remind)
        self._timer.daemon = True
        self._timer.start()

    def _remind(self) -> None:
        main = threading.main_thread().ident
        if self._restore is not None and main is not None:
            signal.pthread_kill(main, signal.SIGTERM)

    def _go(self, number: int) -> None:
        """End the `with` block; a second notice must not cut short what the first began."""
        if self._restore is not None and threading.current_thread() is threading.main_thread():
            signal.signal(number, _leaving)
        raise SystemExit(128 + number)


def _leaving(number: int, frame: FrameType | None) -> None:
    """We are on our way."""
