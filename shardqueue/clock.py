"""Time as an argument.

Everything that waits or measures takes a `Clock`; decisions take a number of seconds. Monotonic time orders
and measures; wall time is for display only.
"""

from __future__ import annotations

import time
from typing import Protocol

_BOOTTIME: int | None = getattr(time, "CLOCK_BOOTTIME", None)


class Clock(Protocol):
    """Where seconds come from."""

    def monotonic(self) -> float:
        """Seconds from an arbitrary start, never going back."""
        ...

    def wall(self) -> float:
        """Seconds since 1970, for display."""
        ...


class SystemClock:
    """The machine's clocks."""

    def monotonic(self) -> float:
        """See `time.monotonic`; where there is such a clock, one that also counts while the machine is suspended."""
        return time.monotonic() if _BOOTTIME is None else time.clock_gettime(_BOOTTIME)

    def wall(self) -> float:
        """See `time.time`."""
        return time.time()
