"""What the processes of `test_resume` do: train up to a checkpoint, and tell by value what is in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from lockstep_cases import joined, load, plan
from torch import distributed
from torch.utils.data import DataLoader

from shardqueue import Session, SharedQueueDataset, unit_grid

if TYPE_CHECKING:
    from collections.abc import Mapping

Value = tuple[int, int]


@dataclass(frozen=True)
class Stint:
    """One job, from its start or a state to a checkpoint.

    Attributes:
        shape, total: of the plan, see `lockstep_cases.plan`; "units of 20" are 3 lanes in units of 20 batches.
        steps: after which the checkpoint is taken and the job ends; None for the end of the pass.
        when: in the last step, where in the loop's body the state is taken: "before" or "after" `session.step`.
        alone: only rank 0 takes the state.
        done: as for `Lockstep.train`.
    """

    shape: str = "units of 20"
    total: int = 240
    uneven: str = "repeat"
    steps: int | None = None
    workers: int = 0
    when: str = "after"
    alone: bool = False
    context: str = "fork"
    persistent: bool = False
    epochs: int = 1
    accumulate: int = 1


@dataclass
class Told:
    """What one process tells: the values that are in its checkpoint, that state, the progress before each step."""

    values: list[Value]
    state: dict[str, Any]
    progress: list[int]
    passes: list[str]


def units_of(stint: Stint) -> tuple[Mapping[str, object], int | None]:
    if stint.shape == "units of 20":
        return unit_grid(stint.total // 3, 20, 3, taper=False), None
    return plan(stint.shape, stint.total)


def loader_of(stint: Stint, mailbox: str, learner: str, independent: bool = False) -> Any:
    units, batches = units_of(stint)
    dataset = SharedQueueDataset(units, mailbox, load, learner, batches=batches, independent=independent)
    options: dict[str, Any] = {}
    if stint.workers:
        options = {"multiprocessing_context": stint.context, "persistent_workers": stint.persistent}
    return DataLoader(dataset, batch_size=None, num_workers=stint.workers, **options)


def in_step(rank: int, stint: Stint, mailbox: str, states: list[dict[str, Any]]) -> Told:
    """Be a rank that steps together with the others."""
    joined(rank)
    told = Told([], {}, [], [])
    with Session(mailbox, f"rank-{rank}") as session:
        if states:
            session.load_state_dict(*states)
        loader = loader_of(stint, mailbox, f"rank-{rank}")
        for _ in range(stint.epochs):
            steps = 0
            for step, batch in session.track(loader, group=distributed.group.WORLD, uneven=stint.uneven):  # type: ignore[arg-type]
                steps += 1
                last = steps == stint.steps
                fresh = not session.lockstep.repeating  # type: ignore[union-attr]
                told.progress.append(session.agreed.progress)  # type: ignore[union-attr]
                if last and stint.when == "before":
                    told.state = take(rank, stint, session)
                    break
                if fresh:
                    told.values.append((int(batch[0]), int(batch[1])))
                    told.passes.append(step.pass_)
                distributed.all_reduce(torch.zeros(1))  # as a synchronous job does: nobody is a step ahead
                session.step(samples=1)
                if last:
                    told.state = take(rank, stint, session)
                    break
        told.state = told.state or take(rank, stint, session)
        distributed.barrier()
    return told


def take(rank: int, stint: Stint, session: Session) -> dict[str, Any]:
    if stint.alone and rank:
        return {}
    return session.state_dict()
