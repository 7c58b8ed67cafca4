"""Waking a consumer that waits for its next batch, which a signal may interrupt at any moment."""

from __future__ import annotations

import threading
from contextlib import suppress

TURN = 1.0
"""Seconds after which a waiting consumer looks whether a signal has come."""


class Bell:
    """Wakes one waiting thread, at least once a ring.

    A signal may end `wait` by an exception at any moment. In `Condition.wait` that can leave the lock released that
    its caller believes to hold; here there is none.
    """

    def __init__(self) -> None:
        self._silent = threading.Lock()
        self._silent.acquire()

    def ring(self) -> None:
        """Wake who waits, or who will next."""
        with suppress(RuntimeError):  # it is ringing already
            self._silent.release()

    def wait(self) -> None:
        """Wait for a ring."""
        # In turns, because a signal that comes just before a call into the lock is only seen after it.
        while not self._silent.acquire(timeout=TURN):
            pass

    def wait_for(self, seconds: float) -> bool:
        """Wait for a ring, at most so long; return whether it rang."""
        return self._silent.acquire(timeout=seconds)
