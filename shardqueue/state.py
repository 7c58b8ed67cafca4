"""The state of a training run: what is trained, to be kept with a checkpoint of the model, and gone on from later.

A state belongs to one run of one plan. It is small, plain JSON, and says nothing of how many processes there were;
so any number of them may go on from it. Two states are the same if the same is trained in them (`identity`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Self

from shardqueue.errors import InvalidInputError, PlanMismatchError, StateMismatchError
from shardqueue.records import pass_name
from shardqueue.remaining import remaining
from shardqueue.trained import Trained
from shardqueue.units import check_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardqueue.plan import Plan

VERSION = 1
_FIELDS = {
    "version",
    "plan",
    "run",
    "run_id",
    "passes",
    "global_step",
    "samples",
    "missing",
    "writers",
    "origins",
}
_REMEDY = "pass what Session.state_dict() gave, unchanged"


@dataclass(slots=True)
class State:
    """What was trained in a run, and in those that it went on from.

    Attributes:
        plan: signature of the training plan; None where nothing was begun.
        run: name of the run.
        run_id: the random id that tells it from any other.
        passes: what is trained of each training pass, by name.
        global_step: the optimizer's, if the loop counts it.
        samples: trained in all, as far as they were counted.
        missing: learners of which the last batches are not known, and how many those are at most, None for unknown.
        writers: (learner, instance) of those whose model has all of this.
        origins: ids of the runs before that one, of which each went on from the one before.
    """

    plan: dict[str, Any] | None = None
    run: str = ""
    run_id: str = ""
    passes: dict[str, Trained] = field(default_factory=dict)
    global_step: int | None = None
    samples: int = 0
    missing: dict[str, int | None] = field(default_factory=dict)
    writers: list[tuple[str, str]] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """Whether it was taken before any run."""
        return self.plan is None

    @property
    def identity(self) -> str:
        """What is the same for two states in which the same is trained."""
        told = {name: trained.as_json() for name, trained in self.passes.items()}
        for trained in told.values():
            del trained["batches"], trained["before"]
        text = json.dumps([self.run_id, self.plan, told], sort_keys=True)
        return blake2b(text.encode(), digest_size=8).hexdigest()

    def first_pass(self, plan: Plan) -> int:
        """The number of the first pass of which something is left."""
        number = 0
        while (name := pass_name(number)) in self.passes and not len(remaining(plan, self.passes[name])):
            number += 1
        return number

    def went_on_from(self, other: State) -> bool:
        """Whether this was taken in a run after that of `other`, and all that is trained there is trained here."""
        return other.run_id in self.origins and all(
            name in self.passes and self.passes[name].holds(trained) for name, trained in other.passes.items()
        )

    def describe(self) -> str:
        """One short line for messages."""
        batches = sum(trained.batches for trained in self.passes.values())
        return f"state {self.identity}, taken in run {self.run} ({self.run_id}) after {batches} batches"

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "version": VERSION,
            "plan": self.plan,
            "run": self.run,
            "run_id": self.run_id,
            "passes": {name: trained.as_json() for name, trained in self.passes.items()},
            "global_step": self.global_step,
            "samples": self.samples,
            "missing": dict(self.missing),
            "writers": [list(writer) for writer in self.writers],
            "origins": list(self.origins),
        }

    @classmethod
    def of(cls, data: object) -> Self:
        """Read what `as_dict` gave.

        Raises:
            InvalidInputError: it is something else, or of another version.
        """
        if not isinstance(data, dict) or "version" not in data:
            raise InvalidInputError("state", data, "the state of a shared queue", _REMEDY)
        if data["version"] != VERSION:
            remedy = "load it with the version of shardqueue that wrote it"
            raise InvalidInputError("state.version", data["version"], f"{VERSION}", remedy)
        if data.keys() != _FIELDS:
            raise InvalidInputError("state", sorted(map(str, data)), f"a dict of {sorted(_FIELDS)}", _REMEDY)
        for name, kind in (("run", str), ("run_id", str), ("passes", dict), ("missing", dict)):
            if not isinstance(data[name], kind):
                raise InvalidInputError(f"state.{name}", data[name], f"a {kind.__name__}", _REMEDY)
        plan, step = data["plan"], data["global_step"]
        if plan is not None and not isinstance(plan, dict):
            raise InvalidInputError("state.plan", plan, "a plan's signature", _REMEDY)
        units = 0 if plan is None else check_count("state.plan.units", plan.get("units", -1))
        return cls(
            plan=plan,
            run=data["run"],
            run_id=data["run_id"],
            passes={
                name: Trained.of(told, f"state.passes[{name!r}]", units)
                for name, told in data["passes"].items()
            },
            global_step=None if step is None else check_count("state.global_step", step),
            samples=check_count("state.samples", data["samples"]),
            missing=_missing(data["missing"]),
            writers=_writers(data["writers"]),
            origins=_origins(data["origins"]),
        )

    @classmethod
    def union(cls, states: Sequence[State]) -> Self:
        """What is trained in any of these states, which are of one run; those taken before any run do not count.

        Nor does one of an earlier run that another of them went on from, and holds: of learners that start together
        one may save again before the others have read.

        Raises:
            PlanMismatchError: they are of different plans.
            StateMismatchError: they were taken in different runs.
        """
        begun = [state for state in states if not state.empty]
        begun = [state for state in begun if not any(other.went_on_from(state) for other in begun)]
        if not begun:
            return cls()
        first = begun[0]
        whole = cls(first.plan, first.run, first.run_id, origins=list(first.origins))
        for state in begun:
            if state.plan != first.plan:
                raise PlanMismatchError(
                    f"the states are of different plans: {state.plan} and {first.plan}; load states of one run"
                )
            if state.run_id != first.run_id:
                raise StateMismatchError(
                    f"the states were taken in different runs: {state.describe()}, and {first.describe()}; load "
                    "the states that all learners saved in one run"
                )
            for name, trained in state.passes.items():
                if name in whole.passes:
                    whole.passes[name].update(trained)
                else:
                    whole.passes[name] = trained.copy()
            steps = [step for step in (whole.global_step, state.global_step) if step is not None]
            whole.global_step = max(steps, default=None)
            whole.samples = max(whole.samples, state.samples)
            whole.missing |= state.missing
            whole.writers = sorted({*whole.writers, *state.writers})
        return whole


def _missing(data: dict[Any, Any]) -> dict[str, int | None]:
    return {
        str(learner): None if batches is None else check_count("state.missing", batches)
        for learner, batches in data.items()
    }


def _origins(data: object) -> list[str]:
    if not isinstance(data, list | tuple) or not all(isinstance(run, str) for run in data):
        raise InvalidInputError("state.origins", data, "a list of ids of runs", _REMEDY)
    return list(data)


def _writers(data: object) -> list[tuple[str, str]]:
    writers = []
    for writer in data if isinstance(data, list | tuple) else [None]:
        match writer:
            case [str(learner), str(instance)]:
                writers.append((learner, instance))
            case _:
                raise InvalidInputError("state.writers", data, "a list of (learner, instance)", _REMEDY)
    return writers
