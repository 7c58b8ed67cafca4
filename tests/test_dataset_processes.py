"""Training processes with loaders of all kinds share the epochs of one dataset: every row once an epoch, by value."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import conftest
import pytest
import torch
from fleet import Fleet
from learners import until
from test_dataset import Killable
from torch.utils.data import DataLoader, TensorDataset

from shardqueue import Session, SharedQueueDataset, Unit, open_mailbox, unit_grid

if TYPE_CHECKING:
    from collections.abc import Iterator

STEPS, LANES, NODES = 60, 2, 3


@dataclass(frozen=True)
class Case:
    """How the loaders of a run are made."""

    name: str
    workers: int = 0
    context: str | None = None
    persistent: bool = False
    in_order: bool = True
    prefetch_factor: int = 2
    track: bool = True
    rows: bool = False
    set_epoch: bool = False
    epochs: int = 3


def load(unit: Unit) -> Iterator[tuple[int, torch.Tensor]]:
    for step in unit.steps:
        yield step, torch.tensor([step, unit.lane])


def make(case: Case, mailbox: str, rank: int) -> SharedQueueDataset:
    if not case.rows:
        return SharedQueueDataset(unit_grid(STEPS, 4, LANES, taper=8), mailbox, load, f"node-{rank}")
    rows = TensorDataset(torch.arange(STEPS * LANES), torch.arange(STEPS * LANES) * 10)
    return SharedQueueDataset.from_dataset(
        rows, mailbox, 7, 2, shuffle=True, seed=3, with_step=True, learner_id=f"node-{rank}"
    )


def values(case: Case, batch: Any) -> list[tuple[int, ...]]:
    if not case.rows:
        return [tuple(batch.tolist())]
    return list(zip(*(part.tolist() for part in batch), strict=True))


def train(rank: int, case: Case, mailbox: str) -> list[list[tuple[int, ...]]]:
    """Train all epochs; what was trained in each."""
    dataset = make(case, mailbox, rank)
    options: dict[str, Any] = {}
    if case.workers:
        options = {
            "multiprocessing_context": case.context,
            "persistent_workers": case.persistent,
            "prefetch_factor": case.prefetch_factor,
            "in_order": case.in_order,
        }
    loader: Any = DataLoader(dataset, batch_size=None, num_workers=case.workers, **options)
    epochs: list[list[tuple[int, ...]]] = []
    session = Session(mailbox, f"node-{rank}") if case.track else None
    with session or nullcontext():
        for epoch in range(case.epochs):
            if case.set_epoch:
                dataset.set_epoch(epoch)
            seen: list[tuple[int, ...]] = []
            for step, batch in session.track(loader) if session else loader:
                if not (seen or epochs):
                    until(lambda: joined(mailbox) == NODES)
                assert step.pass_ == (f"e{epoch}" if epoch else "")
                seen += values(case, batch)
                if session:
                    session.step(samples=1)
            epochs.append(seen)
    del loader
    gc.collect()
    return epochs


def joined(mailbox: str) -> int:
    """Learners that have a log; none goes on to its second batch before all have."""
    return len({key.split("/")[1] for key in open_mailbox(mailbox, prove=False).list("learners/")})


def whole(case: Case) -> Counter[tuple[int, ...]]:
    if case.rows:
        return Counter((row, row * 10) for row in range(STEPS * LANES))
    return Counter((step, lane) for step in range(STEPS) for lane in range(LANES))


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    fleet = Fleet(NODES)
    conftest.lasting |= fleet.pids
    yield fleet
    fleet.close()
    conftest.lasting -= fleet.pids


CASES = [
    Case("no workers, plain", track=False),
    Case("no workers, rows", rows=True, set_epoch=True),
    Case("fork", 2, "fork"),
    Case("fork, plain, set_epoch", 2, "fork", track=False, set_epoch=True),
    Case("fork, persistent, plain, rows", 2, "fork", persistent=True, track=False, rows=True),
    Case("fork, out of order", 3, "fork", in_order=False, prefetch_factor=4),
    Case("spawn, persistent", 1, "spawn", persistent=True),
]
LONG = [
    Case("no workers"),
    Case("fork, plain", 2, "fork", track=False),
    Case("fork, persistent", 2, "fork", persistent=True),
    Case("fork, rows, set_epoch", 2, "fork", rows=True, set_epoch=True),
    Case("spawn, persistent, plain, rows", 2, "spawn", persistent=True, track=False, rows=True),
    Case("spawn", 2, "spawn"),
    Case("spawn, two persistent", 2, "spawn", persistent=True),
    Case("spawn, plain, rows", 2, "spawn", track=False, rows=True),
    Case("forkserver", 2, "forkserver"),
    Case("forkserver, persistent, plain", 2, "forkserver", persistent=True, track=False),
]


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name) for case in CASES]
    + [pytest.param(case, id=case.name, marks=pytest.mark.full) for case in LONG],
)
def test_every_row_once_an_epoch(case: Case, fleet: Fleet, tmp_path: Path) -> None:
    trained = fleet.run(train, case, str(tmp_path / "queue"))
    for epoch in range(case.epochs):
        together = Counter(row for node in trained for row in node[epoch])
        assert together == whole(case), f"epoch {epoch}"


def train_in_sessions(rank: int, mailbox: str, rounds: int) -> list[list[tuple[int, int]]]:
    """Train epochs over one loader, each in a session of its own."""
    dataset = SharedQueueDataset(unit_grid(16, 1, taper=False), mailbox, load, f"node-{rank}")
    loader: Any = DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="fork")
    trained = []
    for number in range(rounds):
        seen = []
        with Session(mailbox, f"node-{rank}") as session:
            for _, batch in session.track(loader):
                threading.Event().wait(0.01 * (1 + 3 * rank))
                seen.append((int(batch[0]), int(batch[1])))
                session.step(samples=1)
        trained.append(seen)
        Path(f"{mailbox}-{number}-{rank}").touch()
        until(lambda: all(Path(f"{mailbox}-{number}-{node}").exists() for node in range(NODES)))  # noqa: B023
    del loader
    gc.collect()
    return trained


def test_a_session_after_another_over_one_loader(fleet: Fleet, tmp_path: Path) -> None:
    """A worker knows how fast the last session's loop was, and must not wait for word of this one's."""
    trained = fleet.run(train_in_sessions, str(tmp_path / "queue"), 6)
    for number in range(6):
        assert Counter(row for node in trained for row in node[number]) == Counter((n, 0) for n in range(16))


def load_with_pid(unit: Unit) -> Iterator[tuple[int, tuple[int, int, int]]]:
    for step in unit.steps:
        yield step, (step, unit.lane, os.getpid())


def train_with_accidents(rank: int, mailbox: str, seed: int, accidents: int) -> list[tuple[int, int]]:
    """Come back after each killed worker, until nothing is left; what was trained."""
    chance = random.Random(seed * 10 + rank)
    trained: list[tuple[int, int]] = []
    for accident in range(accidents + 1):
        dataset = SharedQueueDataset(
            unit_grid(100, 4, LANES, taper=8), mailbox, load_with_pid, f"n{rank}", "1"
        )
        loader: Any = Killable(dataset, batch_size=None, num_workers=2, multiprocessing_context="fork")
        left = chance.randrange(1, 20) if accident < accidents else -1
        with suppress(RuntimeError), Session(mailbox, f"n{rank}") as session:
            for _, (step, lane, worker) in session.track(loader):
                trained.append((step, lane))
                session.step()
                left -= 1
                if not left:
                    loader.kill(worker)
        del loader
        gc.collect()
    return trained


@pytest.mark.parametrize("seed", [1] + [pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 12)])
def test_killed_workers_lose_and_repeat_nothing(seed: int, fleet: Fleet, tmp_path: Path) -> None:
    trained = fleet.run(train_with_accidents, str(tmp_path / "queue"), seed, 2)
    together = Counter(row for node in trained for row in node)
    assert together == Counter((step, lane) for step in range(100) for lane in range(LANES))


def train_until_told(mailbox: str, out: str) -> None:
    """Train slowly, writing down what was stepped; SIGTERM leaves in order."""
    dataset = SharedQueueDataset(unit_grid(100, 4, LANES, taper=8), mailbox, load, "a")
    loader: Any = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="fork")
    with Path(out).open("w", buffering=1) as file, Session(mailbox, "a") as session:
        for _, batch in session.track(loader):
            threading.Event().wait(0.01)
            previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD})
            file.write(f"{int(batch[0])} {int(batch[1])}\n")
            session.step()
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)


@pytest.mark.parametrize(
    "after", [3] + [pytest.param(n, marks=pytest.mark.full) for n in (7, 12, 20, 31, 45)]
)
def test_a_terminated_process_group_gives_everything_back(after: int, tmp_path: Path) -> None:
    """A launcher signals the workers too: torch then raises in the middle of leaving."""
    mailbox, out = str(tmp_path / "queue"), tmp_path / "trained"
    code = f"import test_dataset_processes as t; t.train_until_told({mailbox!r}, {str(out)!r})"
    path = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    process = subprocess.Popen(
        [sys.executable, "-c", code], start_new_session=True, env=path, stderr=subprocess.DEVNULL
    )
    until(lambda: out.exists() and len(out.read_text().splitlines()) >= after)
    os.killpg(process.pid, signal.SIGTERM)
    process.wait(60)
    trained = [tuple(map(int, line.split())) for line in out.read_text().splitlines()]
    dataset = SharedQueueDataset(unit_grid(100, 4, LANES, taper=8), mailbox, load, "b", run="1")
    rest = [tuple(batch.tolist()) for _, batch in DataLoader(dataset, batch_size=None)]
    assert Counter(trained + rest) == Counter((step, lane) for step in range(100) for lane in range(LANES))
