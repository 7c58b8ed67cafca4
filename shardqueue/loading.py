"""One unit's batches, as the user's `load` yields them.

A `Reader` belongs to one claim and one thread. It skips the batches that an earlier attempt trained, does not even
count those that were trained before the run, checks that what comes are pairs whose first is an int, and gives each
batch its `Step`. An error of the loader passes through with a note that names the unit.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardqueue.errors import InvalidInputError, LoadError
from shardqueue.units import Step

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

    from shardqueue.claim import Claim
    from shardqueue.intervals import Intervals
    from shardqueue.plan import Plan

    Load = Callable[[Any], Iterable[tuple[Any, Any]]]


def check_load(load: object) -> None:
    """Refuse what cannot read a unit.

    Raises:
        InvalidInputError: it is not callable.
    """
    if not callable(load):
        raise InvalidInputError("load", load, "callable", "pass a function that yields (step, batch) pairs")


@dataclass(slots=True)
class Loaded:
    """A batch that waits to be handed out."""

    claim: Claim
    step: Step
    batch: Any


class Reader:
    """Reads one claimed unit, batch by batch, up to its own end or that of the claim.

    Attributes:
        claim: what is read.
    """

    def __init__(self, load: Load, plan: Plan, claim: Claim, pass_: str, worker: str) -> None:
        self.claim = claim
        self._from, self._index = (pass_, worker), 0
        pairs, skipped = _pairs(load, plan, claim), plan.skipped(claim.position)
        self._pairs = pairs if skipped is None else _without(pairs, skipped)

    def read(self) -> Loaded | None:
        """Return the next batch of this attempt, or None when there is no more.

        Raises:
            LoadError: `load` yields something else than `(int, batch)` pairs.
        """
        try:
            if self.claim.bound is not None and self._index >= self.claim.bound:
                self.close()
                return None
            for step, batch in self._pairs:
                index, self._index = self._index, self._index + 1
                if index >= self.claim.begin:
                    place = Step(step, self.claim.identifier, self.claim.attempt, index, *self._from)
                    return Loaded(self.claim, place, batch)
        except BaseException as error:
            error.add_note(f"raised by load for unit {self.claim.identifier!r}")
            raise
        return None

    def close(self) -> None:
        """Let the loader close what it has open."""
        self._pairs.close()


def _without(pairs: Generator[tuple[int, Any]], skipped: Intervals) -> Generator[tuple[int, Any]]:
    """Those of a unit's batches that were not trained before the run."""
    with closing(pairs):
        for index, pair in enumerate(pairs):
            if index not in skipped:
                yield pair


def _pairs(load: Load, plan: Plan, claim: Claim) -> Generator[tuple[int, Any]]:
    """What `load` yields, checked to be pairs whose first is an int."""
    identifier = claim.identifier
    loaded: object = load(plan.value(claim.position))
    try:
        items = iter(loaded)  # type: ignore[call-overload]
    except TypeError:
        raise LoadError(
            f"load gave {type(loaded).__name__} for unit {identifier}; it must yield (step, batch) pairs"
        ) from None
    try:
        for item in items:
            pair = isinstance(item, tuple) and len(item) == 2
            if not pair or not hasattr(item[0], "__index__"):
                what = (
                    f"the step {item[0]!r:.80}, which is no int,"
                    if pair
                    else f"{type(item).__name__} {item!r:.80}"
                )
                raise LoadError(
                    f"load yielded {what} for unit {identifier}; it must yield (step, batch) pairs, the step an int"
                )
            yield item[0].__index__(), item[1]
    finally:
        close = getattr(items, "close", None)
        if close is not None:
            close()
