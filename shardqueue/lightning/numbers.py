"""The arithmetic of `SharedQueueCallback`, without a Trainer: learning rates by group, rates of ranks, time left."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shardqueue.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardqueue.progress import Agreed, RankState

NAMED_RANKS = 16
"""Up to so many ranks each has metrics of its own; of more, least, median and most are logged."""

ParamGroup = dict[str, Any]


# -- the learning rate ---------------------------------------------------------------------------------------


def rate_at(schedule: Callable[[int], float], progress: int) -> float:
    """The schedule's learning rate at a dataset step.

    Raises:
        InvalidInputError: it is no number, infinite, or negative.
    """
    given = schedule(progress)
    try:
        rate = float(given)
    except (TypeError, ValueError):
        rate = math.nan
    if not 0 <= rate < math.inf:
        name = f"learning_rate({progress})"
        remedy = f"let the schedule return one for every dataset step, progress {progress} too"
        raise InvalidInputError(name, given, "a finite number of 0 or more", remedy)
    return rate


def group_factors(
    groups: Sequence[ParamGroup], factors: Sequence[float] | Mapping[str, float] | None
) -> list[float]:
    """What the learning rate is multiplied with in each parameter group; 1 where nothing is said.

    Raises:
        InvalidInputError: there are not as many factors as groups, or no group has one of the names.
    """
    if isinstance(factors, Mapping):
        names = [str(group["name"]) for group in groups if "name" in group]
        unknown = sorted(set(factors) - set(names))
        if unknown:
            bound = f"by name of parameter group, not {unknown[0]!r} (there is {', '.join(names) or 'none'})"
            remedy = 'name the groups in the optimizer: {"params": ..., "name": ...}'
            raise InvalidInputError("factors", factors, bound, remedy)
        return [factors.get(group.get("name", ""), 1.0) for group in groups]
    if factors is None:
        return [1.0] * len(groups)
    if len(factors) != len(groups):
        bound = f"one number for each of the {len(groups)} parameter groups of all optimizers, in their order"
        raise InvalidInputError("factors", factors, bound, f"pass {len(groups)}, or a mapping by group name")
    return list(factors)


def set_rates(groups: Sequence[ParamGroup], rate: float, factors: Sequence[float]) -> None:
    """Set each group's learning rate; one that is a tensor keeps its identity, which compiled steps rely on."""
    for group, factor in zip(groups, factors, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate * factor)
        else:
            group["lr"] = rate * factor


def separate_rates(groups: Sequence[ParamGroup]) -> None:
    """Give each group a tensor of its own where an optimizer made with a tensor put the same one into several."""
    seen: set[int] = set()
    for group in groups:
        if isinstance(group["lr"], Tensor) and id(group["lr"]) in seen:
            group["lr"] = group["lr"].clone()
        seen.add(id(group["lr"]))


# -- how the run goes ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankRate:
    """What one rank did between two agreements.

    Attributes:
        rank: which.
        samples: samples a second.
        batches: batches a second.
        data_wait: share of the time spent waiting for data, 0 to 1.
    """

    rank: int
    samples: float
    batches: float
    data_wait: float


def rank_rates(now: Sequence[RankState], before: Sequence[RankState] = ()) -> list[RankRate]:
    """How fast each rank was since `before`, or since it began; a rank with no time in between is left out."""
    earlier = {state.rank: state for state in before}
    found = []
    for state in now:
        past = earlier.get(state.rank)
        seconds = state.elapsed - (past.elapsed if past else 0.0)
        if seconds > 0:
            samples = state.samples - (past.samples if past else 0)
            batches = state.batches - (past.batches if past else 0)
            waited = state.waited - (past.waited if past else 0.0)
            found.append(RankRate(state.rank, samples / seconds, batches / seconds, waited / seconds))
    return found


def steps_left(step: int, steps: int, epochs_after: int | None, most: float) -> float:
    """Lightning batches that a rank has yet to train after batch `step`.

    Args:
        step: of this epoch, from 0.
        steps: batches of each epoch.
        epochs_after: epochs that follow this one; None where their number is not limited.
        most: what another limit leaves, infinite without one.
    """
    rest = steps - step - 1
    if epochs_after is None:
        return rest if math.isinf(most) else most
    return min(rest + epochs_after * steps, most)


def seconds_left(steps: float, each: int, rates: Sequence[RankRate]) -> float | None:
    """Seconds until so many steps of `each` batches are done, on all ranks together; None if no rate is known."""
    pace = sum(rate.batches for rate in rates)
    return steps * each / pace if pace > 0 else None


def metrics(
    agreed: Agreed, rates: Sequence[RankRate], eta: float | None, learning_rate: float | None
) -> dict[str, float]:
    """What is logged, by name; what is not known is left out."""
    claimed = sum(state.units for state in agreed.ranks)
    found: dict[str, float] = {
        "units_claimed": claimed,
        "units_left": max(0, agreed.units - claimed),
        "repeated": agreed.repeated,
    }
    if learning_rate is not None:
        found["learning_rate"] = learning_rate
    if eta is not None:
        found["eta_seconds"] = eta
    if rates:
        found["samples_per_second"] = sum(rate.samples for rate in rates)
        found["data_wait"] = max(rate.data_wait for rate in rates)
    return found | _by_rank(rates)


def _by_rank(rates: Sequence[RankRate]) -> dict[str, float]:
    if len(rates) <= NAMED_RANKS:
        samples = {f"rank_{rate.rank}/samples_per_second": rate.samples for rate in rates}
        return samples | {f"rank_{rate.rank}/data_wait": rate.data_wait for rate in rates}
    columns = {
        "samples_per_second": [rate.samples for rate in rates],
        "data_wait": [rate.data_wait for rate in rates],
    }
    found: dict[str, float] = {}
    for name, values in columns.items():
        picked = {"min": min(values), "median": median(values), "max": max(values)}
        found |= {f"ranks/{name}_{which}": value for which, value in picked.items()}
    return found
