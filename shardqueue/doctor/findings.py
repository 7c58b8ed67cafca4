"""What an examination came to, as values: for a table, for JSON, and for the answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardqueue.doctor.costs import Bill


@dataclass(frozen=True, slots=True)
class Row:
    """One check.

    Attributes:
        check: what was looked at.
        good: whether it is as it must be; None where it could not be tried, or where there is nothing to judge.
        found: what was seen.
        remedy: what to do about it, where something is wrong.
    """

    check: str
    good: bool | None
    found: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds that calls of one verb took, one after the other: in ascending order, at least one."""

    verb: str
    seconds: tuple[float, ...]

    def quantile(self, share: float) -> float:
        """The shortest time that this share of the calls did not exceed."""
        return self.seconds[max(0, -int(-share * len(self.seconds) // 1) - 1)]


@dataclass(slots=True)
class Findings:
    """All of it.

    Attributes:
        rows: one a check, in the order of the examination.
        latencies: one a verb that could be timed.
        missing: permissions that are missing, as the store's owner writes them.
        left: keys that were written and could not be removed.
        bill: requests and dollars of the plan that was asked about.
    """

    rows: list[Row] = field(default_factory=list)
    latencies: list[Latency] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    bill: Bill | None = None

    @property
    def answer(self) -> bool:
        """Whether the store can be used: something was looked at, and nothing was wrong."""
        return bool(self.rows) and all(row.good is not False for row in self.rows)
