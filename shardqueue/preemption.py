"""SIGTERM as a preemption notice: it ends a `with` block in order, so that what was claimed is given back."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType


class PreemptionNotice:
    """Catches SIGTERM in the main thread, where nobody else does."""

    def __init__(self) -> None:
        self._restore: Any = None

    def catch(self) -> None:
        """A preemption notice ends the `with` block in order, where nobody else has plans for the signal."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._restore = signal.signal(signal.SIGTERM, _leave)

    def release(self) -> None:
        """The block is left: the signal means again what it did."""
        here = threading.current_thread() is threading.main_thread()
        if here and self._restore is not None and signal.getsignal(signal.SIGTERM) in (_leave, _leaving):
            signal.signal(signal.SIGTERM, self._restore)
        self._restore = None


def _leave(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    """End the `with` block; a second notice must not cut short what the first began."""
    signal.signal(number, _leaving)
    raise SystemExit(128 + number)


def _leaving(number: int, frame: FrameType | None) -> None:
    """We are on our way."""
