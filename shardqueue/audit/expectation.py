"""What a pass has to hand out: its units and their batches, less what the run's start says was trained before.

It is read from the manifest. A lazy plan is made again from its arguments; of a listed one only the number of units
is known, and the end of each from the logs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from shardqueue.errors import InvalidInputError, RecordError
from shardqueue.intervals import Intervals
from shardqueue.trained import Trained
from shardqueue.units import rebuild

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from shardqueue.units import LazyUnits


class Stretch(NamedTuple):
    """Units that follow one another in the plan, `units` of them, with `batches` in all."""

    first: str
    last: str
    units: int
    batches: int


class Expectation:
    """The units of one pass, and what is left of each.

    Args:
        signature: of the plan, as the manifest has it; None when the run says nothing of it.
        before: what the run's start says of this pass; None for nothing.

    Raises:
        RecordError: the manifest says what this version does not understand.
    """

    def __init__(self, signature: Mapping[str, Any] | None, before: Trained | None = None) -> None:
        before = before or Trained()
        self._plan = _plan(signature)
        units = None if signature is None else signature.get("units")
        counted = units if isinstance(units, int) else None
        self._gone = Intervals([(0, counted)] if before.over and counted else before.whole.spans())
        self._parts: dict[int, int] = {}
        for position, part in before.parts.items():
            if self._plan is not None and position not in self._gone:
                if part.gap(0) >= self._plan.batches(position):
                    self._gone.add(position)
                else:
                    self._parts[position] = len(part)
        self.units = None if counted is None else counted - len(self._gone)

    @property
    def total(self) -> int | None:
        """Batches of all units, None when nobody can know."""
        if self._plan is None:
            return None
        done = sum(self._count(start, stop) for start, stop in self._gone.spans())
        return self._plan.total - done - sum(self._parts.values())

    def batches(self, unit: str) -> int | None:
        """How many batches of the unit are left by the plan, None when it cannot tell."""
        if self._plan is None:
            return None
        try:
            position = self._plan.position(unit)
        except KeyError:
            return None
        return self._plan.batches(position) - self._parts.get(position, 0)

    def refusal(self, unit: str) -> str | None:
        """Why nothing of this unit should be handed out in the pass, None when it should."""
        if self._plan is None:
            return None
        try:
            position = self._plan.position(unit)
        except KeyError:
            return "it is not in the plan"
        return "the state that the run began with has it as trained whole" if position in self._gone else None

    def absent(self, known: Collection[str]) -> Iterator[Stretch]:
        """The units that are none of `known`; nothing when the plan cannot name its units."""
        plan = self._plan
        if plan is None:
            return
        seen = Intervals(self._gone.spans())
        for position in sorted(plan.position(unit) for unit in known if unit in plan):
            seen.add(position)
        for start, stop in seen.gaps(0, len(plan)):
            done = sum(count for position, count in self._parts.items() if start <= position < stop)
            batches = self._count(start, stop) - done
            yield Stretch(plan.identifier(start), plan.identifier(stop - 1), stop - start, batches)

    def _count(self, start: int, stop: int) -> int:
        plan = self._plan
        assert plan is not None
        return round((plan.span(stop) - plan.span(start)) * (plan.total // plan.steps))


def _plan(signature: Mapping[str, Any] | None) -> LazyUnits | None:
    arguments = None if signature is None else signature.get("arguments")
    try:
        return rebuild(arguments) if isinstance(arguments, dict) else None
    except InvalidInputError as error:
        raise RecordError(f"the manifest's plan cannot be made again: {error}") from None
