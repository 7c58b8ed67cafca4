"""The restart stories end to end, with the README's own scripts: every row counts once, by value.

The models are counters, so that a checkpoint holds exactly what was trained into it, and a finished one must show
every row once an epoch: two times.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest
import torch
from restarts import Fate, Restarts, command, imported_once, until

from shardqueue.logreader import LogReader
from shardqueue.mailbox import open_mailbox
from shardqueue.records import RunKeys

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from restarts import Agent, Process

EPOCHS = 2
A_NODE_DIES = "A node dies, and the job goes on with fewer"
TYPED_TWICE = "The same line typed twice"
NEXT_WEEK = "Next week, on other GPUs"


@pytest.fixture(autouse=True, scope="module")
def quick_start() -> Iterator[None]:
    with imported_once():
        yield


@dataclass(frozen=True)
class TwoNodes:
    """A job on two nodes, the second of which dies."""

    restarts: Restarts
    first: Agent
    second: Agent


@pytest.fixture(autouse=True, scope="module")
def two_nodes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TwoNodes | None]:
    """What mostly waits is started before all tests, and the last of them looks at it."""
    last = test_a_node_dies_and_the_other_goes_on
    if last.__name__ not in (item.name for item in request.session.items):
        yield None
        return
    line = command(A_NODE_DIES)
    with Restarts(tmp_path_factory.mktemp("nodes")) as restarts:
        first = restarts.node(line, first=True)
        second = restarts.node(line, first=False, fate=Fate(dies=35, node=True))
        yield TwoNodes(restarts, first, second)


@pytest.fixture
def restarts(tmp_path: Path) -> Iterator[Restarts]:
    with Restarts(tmp_path) as restarts:
        yield restarts


def counts(*files: Path) -> torch.Tensor:
    """How often the models in these checkpoints were trained on each row, all together."""
    weights: list[torch.Tensor] = [torch.load(file)["model"]["weight"] for file in files]
    return torch.stack(weights).sum(dim=0)


def trained(restarts: Restarts) -> list[float]:
    """How often the model of `train.py` was trained on the rows: all values that there are."""
    return values(counts(restarts.folder / "checkpoint.pt"))


def trained_by_all(restarts: Restarts) -> list[float]:
    """The same of the models of `task.py`, all together."""
    return values(counts(*restarts.folder.glob("task-*.pt")))


def values(tensor: torch.Tensor) -> list[float]:
    """All values that there are in it."""
    return sorted(set(tensor.flatten().tolist()))


def finish(processes: list[Process]) -> None:
    """They end as they should."""
    for process in processes:
        assert process.end() == 0, process.log


def crash(restarts: Restarts, size: int, step: int) -> None:
    """The last of so many ranks dies at this step, and the job with it."""
    processes = restarts.ranks(size, {size - 1: Fate(dies=step)})
    assert [process.end() for process in processes] == [1] * (size - 1) + [-signal.SIGKILL]


# -- a rank dies -----------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_rank_dies_and_is_replaced(restarts: Restarts) -> None:
    line = command(TYPED_TWICE)
    job = restarts.torchrun([*line[:-2], "--max-restarts=3", *line[-2:]], Fate(dies=35, rank=1))
    assert job.end() == 0, job.log
    assert trained(restarts) == [EPOCHS]


# -- the same line typed twice ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(7, id="no checkpoint"),
        pytest.param(35, id="a checkpoint", marks=pytest.mark.full),
        pytest.param(60 + 35, id="in the second epoch", marks=pytest.mark.full),
    ],
)
def test_the_same_job_twice(restarts: Restarts, step: int) -> None:
    crash(restarts, 2, step)
    assert (restarts.folder / "checkpoint.pt").exists() == (step > 10)
    finish(restarts.ranks(2))
    assert trained(restarts) == [EPOCHS]


@pytest.mark.full
def test_a_third_time_when_all_is_done(restarts: Restarts) -> None:
    for _ in range(2):
        finish(restarts.ranks(2))
    assert trained(restarts) == [EPOCHS]


@pytest.mark.full
@pytest.mark.parametrize("step", [7, 35])
def test_the_same_line_twice(restarts: Restarts, step: int) -> None:
    """By torchrun itself."""
    line = command(TYPED_TWICE)
    job = restarts.torchrun(line, Fate(dies=step, rank=1))
    assert job.end() == 1
    again = restarts.torchrun(line)
    assert again.end() == 0, again.log
    assert trained(restarts) == [EPOCHS]


# -- next week, on other GPUs ----------------------------------------------------------------------------


@pytest.mark.full
def test_two_ranks_then_one_then_three(restarts: Restarts) -> None:
    """30 steps of two are in the first checkpoint, 30 of one beside them in the second; three share 30 batches."""
    crash(restarts, 2, 35)
    assert counts(restarts.folder / "checkpoint.pt").sum() == 2 * 30 * 4
    crash(restarts, 1, 35)
    assert counts(restarts.folder / "checkpoint.pt").sum() == (2 * 30 + 30) * 4
    finish(restarts.ranks(3))
    assert trained(restarts) == [EPOCHS]


# -- four learners in a SLURM array ----------------------------------------------------------------------


def start(restarts: Restarts, *numbers: int, fate: Fate) -> list[Process]:
    """Start these tasks, and wait until each of them trains."""
    fates = {number: replace(fate, tells=1, told=f"here-{number}") for number in numbers}
    tasks = [restarts.task(number, fate) for number, fate in fates.items()]
    for fate in fates.values():
        until((restarts.folder / fate.told).exists)
    return tasks


def others(restarts: Restarts) -> list[Process]:
    """Tasks 0, 1 and 3, which stop at their first step until there is the file `awaited`.

    As long as they do not know how fast they are, they claim little, and leave the rest to task 2.
    """
    return start(restarts, 0, 1, 3, fate=Fate(waits=1))


def is_out_of_work(restarts: Restarts) -> bool:
    """Whether task 2 says that it has trained all that it held."""
    reader = LogReader(open_mailbox(restarts.folder / "tasks"), RunKeys("1"))
    logs = reader.read(lambda process: process[0] == "task-2").logs.values()
    return any(log.newest.totals.batches and not log.newest.held for log in logs)


@pytest.mark.full
def test_a_task_is_preempted_and_comes_back(restarts: Restarts) -> None:
    """In the middle of its 14th step, with a checkpoint of ten; the others have work when it is back."""
    tasks = others(restarts)
    preempted = restarts.task(2, Fate(preempted=14))
    assert preempted.end() == 128 + signal.SIGTERM, preempted.log
    assert counts(restarts.folder / "task-2.pt").sum() == 14 * 4
    finish([restarts.task(2, Fate(tells=1, told="awaited")), *tasks])
    assert trained_by_all(restarts) == [EPOCHS]


def test_a_task_is_killed_and_comes_back(restarts: Restarts) -> None:
    """Its log says 16 steps, its checkpoint ten: what is between is trained again."""
    tasks = others(restarts)
    assert restarts.task(2, Fate(dies=17)).end() == -signal.SIGKILL
    assert counts(restarts.folder / "task-2.pt").sum() == 10 * 4
    finish([restarts.task(2, Fate(tells=1, told="awaited")), *tasks])
    assert trained_by_all(restarts) == [EPOCHS]


@pytest.mark.full
def test_a_task_that_waits_for_the_others_is_preempted(restarts: Restarts) -> None:
    """It has trained all that it could get, and asks for more."""
    tasks = others(restarts)
    preempted = restarts.task(2)
    until(lambda: is_out_of_work(restarts))
    preempted.send(signal.SIGTERM)
    assert preempted.end() == 128 + signal.SIGTERM, preempted.log
    (restarts.folder / "awaited").touch()
    finish([restarts.task(2), *tasks])
    assert trained_by_all(restarts) == [EPOCHS]


@pytest.mark.full
def test_a_killed_task_comes_back_when_the_others_are_done(restarts: Restarts) -> None:
    """They have trained what its log lacked; what its model lost since its checkpoint is left for it."""
    tasks = others(restarts)
    assert restarts.task(2, Fate(dies=17)).end() == -signal.SIGKILL
    (restarts.folder / "awaited").touch()
    finish(tasks)
    assert counts(*restarts.folder.glob("task-*.pt")).sum() == EPOCHS * 960 - 6 * 4
    finish([restarts.task(2)])
    assert trained_by_all(restarts) == [EPOCHS]


@pytest.mark.full
def test_the_whole_array_again(restarts: Restarts) -> None:
    """Time is up for all of them; one is back and saves before the others read."""
    tasks = start(restarts, 0, 1, 2, 3, fate=Fate(waits=1, awaited="all are here", preempted=13))
    (restarts.folder / "all are here").touch()
    assert [task.end() for task in tasks] == [128 + signal.SIGTERM] * 4
    first = restarts.task(0, Fate(tells=15, told="saved", waits=15))
    until((restarts.folder / "saved").exists)
    rest = [restarts.task(number) for number in (1, 2, 3)]
    (restarts.folder / "awaited").touch()
    finish([*rest, first])
    assert trained_by_all(restarts) == [EPOCHS]


# -- a node dies -----------------------------------------------------------------------------------------


def test_a_node_dies_and_the_other_goes_on(two_nodes: TwoNodes) -> None:
    """Its torchrun dies with it, five steps after a checkpoint and in the middle of a unit."""
    second, first = two_nodes.second, two_nodes.first
    assert second.end() == -signal.SIGKILL, second.log
    assert first.end() == 0, first.log
    assert "every row was trained so many times: [2.0]" in first.log
    assert trained(two_nodes.restarts) == [EPOCHS]
