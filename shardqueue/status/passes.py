"""How far a pass is: batches trained of those the plan has, what is left of it in time, and who is ahead of whom."""

from __future__ import annotations

from dataclasses import dataclass, replace
from string import digits
from typing import TYPE_CHECKING

from shardqueue.errors import InvalidInputError
from shardqueue.plan import Plan
from shardqueue.records import pass_number
from shardqueue.remaining import remaining
from shardqueue.run import TRAIN
from shardqueue.state import State
from shardqueue.units import rebuild

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardqueue.records import LogPage, Manifest
    from shardqueue.trained import Trained


@dataclass(frozen=True, slots=True)
class PassProgress:
    """How far the current pass is.

    Attributes:
        name: of the pass, "e0" for the first.
        done: batches that were trained, or units that were claimed.
        total: how many there are, less what was trained before the run was opened; None where nobody can know.
        counted: "batches", or "units" where the plan does not say how many batches it has.
        rate: of the learners that are alive, in batches a second.
        left: seconds until it is done at this rate, None where that cannot be said.
        drift: dataset steps between the learner that is furthest and the one that is least far.
        ahead: who is furthest.
        behind: who is least far.
    """

    name: str
    done: int
    total: int | None
    counted: str
    rate: float
    left: float | None
    drift: int | None = None
    ahead: str = ""
    behind: str = ""

    @property
    def share(self) -> float | None:
        """Of the total that is done."""
        return self.done / self.total if self.total else None

    @property
    def title(self) -> str:
        """The name as people say it."""
        number = pass_number(self.name)
        return self.name if number is None else f"epoch {number}"


def progress(manifest: Manifest, pages: Iterable[LogPage], alive: Iterable[LogPage]) -> PassProgress | None:
    """How far the latest pass that anybody is in is; None before the first batch.

    Args:
        manifest: of the run.
        pages: the newest of each process.
        alive: those of them whose processes train on.
    """
    pages, alive = list(pages), list(alive)
    names = {page.current.pass_ for page in pages if page.current is not None}
    if not names:
        return None
    name = max(names, key=_order)
    inside = [
        (page.current, page) for page in pages if page.current is not None and page.current.pass_ == name
    ]
    done, total, counted = sum(current.batches for current, _ in inside), _total(manifest, name), "batches"
    units = manifest.plans.get(_plan_of(name), {}).get("units")
    if total is None and names == {""} and isinstance(units, int):
        total, counted = units - _whole_before(manifest, name), "units"
        done = sum(page.totals.claimed for page in pages)
    done = done if total is None else min(done, total)
    rate = sum(map(_batches_a_second, alive))
    left = _seconds(total - done, rate) if total is not None and counted == "batches" else None
    at = sorted((current.step, page.learner) for current, page in inside if page in alive)
    made = PassProgress(name or "e0", done, total, counted, rate, left)
    if len(at) < 2:
        return made
    (least, behind), (most, ahead) = at[0], at[-1]
    return replace(made, drift=most - least, ahead=ahead, behind=behind)


def _seconds(batches: int, rate: float) -> float | None:
    """What so many batches take at this rate."""
    if not batches:
        return 0.0
    return batches / rate if rate > 0 else None


def _order(name: str) -> tuple[bool, int, str]:
    """Training before anything else, later epochs before earlier ones."""
    number = pass_number(name)
    return (False, 0, name) if number is None else (True, number, "")


def _plan_of(name: str) -> str:
    """The name in the manifest of the plan that a pass is over."""
    return name.rstrip(digits) if pass_number(name) is None else TRAIN


def _total(manifest: Manifest, name: str) -> int | None:
    """Batches that the run hands out in a pass, where the manifest says enough to make the plan again."""
    arguments = manifest.plans.get(_plan_of(name), {}).get("arguments")
    try:
        plan = Plan(rebuild(arguments)) if isinstance(arguments, dict) else None
    except InvalidInputError:
        return None
    return None if plan is None else remaining(plan, _trained_before(manifest, name)).total


def _whole_before(manifest: Manifest, name: str) -> int:
    """Units that were trained whole before the run was opened."""
    trained = _trained_before(manifest, name)
    return 0 if trained is None else len(trained.whole)


def _trained_before(manifest: Manifest, name: str) -> Trained | None:
    """What a run that goes on from a state says was trained of a pass before."""
    return None if manifest.state is None else State.of(manifest.state).passes.get(name)


def _batches_a_second(page: LogPage) -> float:
    """Logs tell samples a second; what a batch holds is known from what was trained so far."""
    totals = page.totals
    if totals.samples:
        return page.rate * totals.batches / totals.samples
    return totals.batches / totals.elapsed if totals.elapsed > 0 else 0.0
