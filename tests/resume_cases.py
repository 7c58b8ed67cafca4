"""What the processes of `test_resume` do: train up to a checkpoint, and tell by value what is in it."""

from __future__ import annotations

import json
import os
import signal
import warnings
from contextlib import ExitStack, suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from learners import load as pairs
from learners import until
from lockstep_cases import joined, load, plan
from torch import distributed
from torch.utils.data import DataLoader

from shardqueue import Session, SharedQueueDataset, shared_queue, unit_grid
from shardqueue.errors import PeerGoneError
from shardqueue.records import RunKeys

if TYPE_CHECKING:
    from collections.abc import Mapping

Value = tuple[int, int]


@dataclass(frozen=True)
class Stint:
    """One job, from its start or a state to a checkpoint.

    Attributes:
        shape, total: of the plan, see `lockstep_cases.plan`; "units of 20" are 3 lanes in units of 20 batches.
        steps: after which the checkpoint is taken and the job ends; None for the end of the pass.
        when: in the last step, where in the loop's body the state is taken: "before" or "after" `session.step`; or
            "ahead": by rank 0, before it, when the other ranks are past it and have logged so.
        alone: only rank 0 takes the state.
        workers, context, persistent: of the loader.
        epochs: passes to be trained; the checkpoint is taken in the first, or after the last.
        queue: through `shared_queue`, without a loader; of independent learners only.
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
    queue: bool = False


@dataclass
class Told:
    """What one process tells: the values that are in its checkpoint, that state, the progress before each step."""

    values: list[Value]
    state: dict[str, Any]
    progress: list[int]
    passes: list[str]

    def add(self, step: Any, batch: Any) -> None:
        """This batch is trained."""
        self.values.append((int(batch[0]), int(batch[1])))
        self.passes.append(step.pass_)


def units_of(stint: Stint) -> tuple[Mapping[str, object], int | None]:
    if stint.shape == "units of 20":
        return unit_grid(stint.total // 3, 20, 3, taper=False), None
    return plan(stint.shape, stint.total)


def loader_of(stint: Stint, mailbox: str, learner: str) -> Any:
    units, batches = units_of(stint)
    dataset = SharedQueueDataset(units, mailbox, load, learner, batches=batches)
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
            loop = session.track(loader, group=distributed.group.WORLD, uneven=stint.uneven)  # type: ignore[arg-type]
            for number, (step, batch) in enumerate(loop, 1):
                last = number == stint.steps
                fresh = not session.lockstep.repeating  # type: ignore[union-attr]
                told.progress.append(session.agreed.progress)  # type: ignore[union-attr]
                if last and stint.when == "before":
                    told.state = take(rank, stint, session)
                    break
                if last and stint.when == "ahead":
                    if rank:
                        session.step(samples=1)
                        session.flush_log()
                    distributed.barrier()
                    told.state = {} if rank else session.state_dict()
                    distributed.barrier()
                    break
                if fresh:
                    told.add(step, batch)
                distributed.all_reduce(torch.zeros(1))  # as a synchronous job does: nobody is a step ahead
                session.step(samples=1)
                if last:
                    told.state = take(rank, stint, session)
                    break
        told.state = told.state or ({} if stint.when == "ahead" else take(rank, stint, session))
        distributed.barrier()
    end_workers(loader)
    return told


def end_workers(loader: Any) -> None:
    """Collected in a cycle, a loader waits 5 s for each worker that persists."""
    if getattr(loader, "persistent_workers", False):
        loader._iterator._shutdown_workers()


def on_its_own(rank: int, stint: Stint, size: int, mailbox: str, states: list[dict[str, Any]]) -> Told:
    """Be one of `size` independent learners; nobody ends before all are there."""
    told = Told([], {}, [], [])
    name = f"node-{rank}"
    with ExitStack() as stack:
        session = stack.enter_context(Session(mailbox, name))
        session.load_state_dict(*states)
        loader: Any = None
        if not stint.queue:
            loader = loader_of(stint, mailbox, name)
        for _ in range(stint.epochs):
            if stint.queue:
                loop: Any = stack.enter_context(shared_queue(units_of(stint)[0], mailbox, name, load))
            else:
                loop = session.track(loader)
            for number, (step, batch) in enumerate(loop, 1):
                until(lambda: len(learners(session)) >= size)
                if number == stint.steps and stint.when == "before":
                    told.state = session.state_dict()
                    break
                told.add(step, batch)
                session.step(samples=1)
                if number == stint.steps:
                    told.state = session.state_dict()
                    break
        told.state = told.state or session.state_dict()
    end_workers(loader)
    return told


def learners(session: Session) -> set[str]:
    """Who has a log in the run."""
    keys = RunKeys(session.run or "1")
    logs = map(keys.parse_log, session.mailbox.list(keys.learners))
    return {log[0] for log in logs if log is not None}


def take(rank: int, stint: Stint, session: Session) -> dict[str, Any]:
    if stint.alone and rank:
        return {}
    return session.state_dict()


def killed_later(rank: int, folder: str, batches: int, more: int) -> None:
    """Learner "a" takes its state after so many batches, trains and logs some more, and is killed."""
    units, values = unit_grid(40, 4, 3, taper=False), []
    session = Session(f"{folder}/queue", "a", log_every=1.0)
    with session, shared_queue(units, f"{folder}/queue", "a", pairs, 2, reclaim_after=6.0) as queue:
        for number, (_, value) in enumerate(queue, 1):
            session.step(samples=1)
            if number <= batches:
                values.append(value)
            if number == batches:
                Path(folder, "told.json").write_text(
                    json.dumps({"state": session.state_dict(), "values": values})
                )
            if number == batches + more:
                session.flush_log()
                os.kill(os.getpid(), signal.SIGKILL)


def with_a_death(rank: int, mailbox: str, steps: int) -> tuple[Told, str]:
    """Rank 1 is killed after so many steps, without a last log; rank 0 then takes its state."""
    joined(rank)
    told = Told([], {}, [], [])
    stint = Stint("equal", 40)
    with suppress(PeerGoneError), Session(mailbox, f"rank-{rank}") as session:
        loop = session.track(loader_of(stint, mailbox, f"rank-{rank}"), group=distributed.group.WORLD)
        for number, (step, batch) in enumerate(loop, 1):
            told.add(step, batch)
            distributed.all_reduce(torch.zeros(1))
            session.step(samples=1)
            if number == steps - 3:
                session.flush_log()
                session._writer = None  # of what comes now nothing is logged
            if number == steps and rank:
                os.kill(os.getpid(), signal.SIGKILL)
            if number == steps:
                break
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            told.state = session.state_dict()
    return told, " ".join(str(warning.message) for warning in caught)


def with_another_state(rank: int, stint: Stint, mailbox: str, state: dict[str, Any]) -> None:
    """Rank 1 loads another checkpoint than rank 0."""
    changed = deepcopy(state)
    changed["passes"][""]["over"] = bool(rank)
    in_step(rank, stint, mailbox, [changed])
