"""Real processes over real stores: each batch is trained exactly once, judged by what the processes say they trained.

Each process reports the values it got (unit, batch of the unit) through its own pipe, after the fact; no log and no
record in the mailbox is believed.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import time
import warnings
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from shardqueue import Session, Unit, open_mailbox, shared_queue, unit_grid
from shardqueue.errors import ClosedError
from shardqueue.mailbox.faults import LostResponse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from multiprocessing.connection import Connection
    from pathlib import Path

    from conftest import S3Server

    from shardqueue.queues import SharedQueue

SPEEDS = (1.0, 1.0, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25)
PATIENCE = 120.0

Batch = tuple[str, int]

forks = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def load(unit: Unit) -> Iterator[tuple[int, Batch]]:
    for index, step in enumerate(unit.steps):
        yield step, (f"{unit.first}-{unit.lane}", index)


def whole(units: Mapping[str, Unit]) -> Counter[Batch]:
    return Counter(batch for unit in units.values() for _, batch in load(unit))


@dataclass(frozen=True)
class Work:
    """What one process does.

    Attributes:
        learner_id: its label.
        seconds: how long it takes for a batch.
        seed: seeds every generator there is, where given.
        heavy: also torch's.
        lost: of the writes, each so many-th loses its answer.
        tamper: makes `os.urandom` repeatable: the guard that must not be missing.
    """

    units: Mapping[str, Unit]
    url: str
    options: dict[str, Any] = field(default_factory=dict)
    learner_id: str | None = None
    seconds: float = 0.0
    seed: int | None = None
    heavy: bool = False
    lost: int = 0
    tamper: bool = False


def train(work: Work, pipe: Connection) -> None:
    """In a process of its own: say "ready", wait for the start, train, say what was trained."""
    try:
        if work.seed is not None:
            seed_all(work.seed, work.heavy)
        if work.tamper:
            os.urandom = random.Random(work.seed).randbytes
        mailbox = open_mailbox(work.url, prove="s3:" not in work.url, **work.options)
        if work.lost:
            mailbox = LostResponse(mailbox, every=work.lost)
        warnings.simplefilter("ignore")  # twins are live twice
        trained = []
        pipe.send("ready")
        pipe.recv()
        with shared_queue(work.units, mailbox, work.learner_id, load, prefetch=2) as queue:
            for _, batch in queue:
                time.sleep(work.seconds)
                trained.append(batch)
        pipe.send(trained)
    except BaseException as error:
        pipe.send(error)
        raise


def seed_all(seed: int, heavy: bool) -> None:
    random.seed(seed)
    np.random.seed(seed)
    if heavy:
        import torch

        torch.manual_seed(seed)


def race(works: list[Work], method: str = "spawn", do: Callable[..., None] = train) -> list[list[Batch]]:
    """Let processes start at once; return what each trained."""
    context: Any = multiprocessing.get_context(method)
    ends, children = [], []
    for work in works:
        here, there = context.Pipe()
        child = context.Process(target=do, args=(work, there), daemon=True)
        child.start()
        there.close()
        ends.append(here)
        children.append(child)
    try:
        for end in ends:
            assert receive(end) == "ready"
        for end in ends:
            end.send("go")
        return [receive(end) for end in ends]
    finally:
        for child, end in zip(children, ends, strict=True):
            end.close()
            child.join(30)
            if child.is_alive():
                child.kill()
                child.join()


def receive(end: Any) -> Any:
    assert end.poll(PATIENCE), "a process says nothing"
    said = end.recv()
    if isinstance(said, BaseException):
        raise said
    return said


def together(trained: list[list[Batch]]) -> Counter[Batch]:
    return Counter(batch for one in trained for batch in one)


def contenders(units: Mapping[str, Unit], url: str, seconds: float, **more: Any) -> list[Work]:
    return [
        Work(units, url, learner_id=f"node-{rank}", seconds=seconds / speed, **more)
        for rank, speed in enumerate(SPEEDS)
    ]


def by_speed(trained: list[list[Batch]], speed: float) -> float:
    """Batches a node of that speed trained, on average."""
    counts = [len(one) for one, its in zip(trained, SPEEDS, strict=True) if its == speed]
    return sum(counts) / len(counts)


# -- processes of unequal speed ------------------------------------------------------------------------------


def test_in_a_folder(tmp_path: Path) -> None:
    units = unit_grid(60, 2, 4, taper=False)
    trained = race(contenders(units, str(tmp_path / "box"), 0.02))
    assert together(trained) == whole(units)
    assert by_speed(trained, 1.0) > by_speed(trained, 0.25)


@forks
@pytest.mark.s3
def test_in_a_bucket(s3_server: S3Server) -> None:
    units = unit_grid(40, 2, 3, taper=False)
    url = f"s3://shardqueue/exactly-once-{os.urandom(4).hex()}"
    trained = race(contenders(units, url, 0.04, options=s3_server.options), "fork")
    assert together(trained) == whole(units)
    assert by_speed(trained, 1.0) > by_speed(trained, 0.25)


@pytest.mark.full
@pytest.mark.parametrize("attempt", range(5))
def test_in_a_folder_for_longer(tmp_path: Path, attempt: int) -> None:
    units = unit_grid(2000, 4, 2, taper=8)
    trained = race(contenders(units, str(tmp_path / "box"), 0.002))
    assert together(trained) == whole(units)


@pytest.mark.full
@pytest.mark.s3
def test_in_a_bucket_for_longer(s3_server: S3Server) -> None:
    units = unit_grid(200, 2, 4, taper=8)
    url = f"s3://shardqueue/exactly-once-{os.urandom(4).hex()}"
    trained = race(contenders(units, url, 0.01, options=s3_server.options, lost=5))
    assert together(trained) == whole(units)


# -- equal seeds ---------------------------------------------------------------------------------------------


def twins(folder: Path, **more: Any) -> tuple[Mapping[str, Unit], list[Work]]:
    """Three processes that cannot be told apart by label, speed or seed, and lose answers."""
    units = unit_grid(20, 1, 1, taper=False)
    return units, [
        Work(units, str(folder / "box"), learner_id="twin", seconds=0.005, seed=7, lost=3, **more)
        for _ in range(3)
    ]


def test_with_all_generators_seeded_equally(tmp_path: Path) -> None:
    units, works = twins(tmp_path)
    assert together(race(works)) == whole(units)


@pytest.mark.full
def test_with_all_generators_seeded_equally_torch_too(tmp_path: Path) -> None:
    units, works = twins(tmp_path, heavy=True)
    assert together(race(works)) == whole(units)


@forks
def test_the_judge_catches_nonces_from_a_seeded_generator(tmp_path: Path) -> None:
    """The mutant: were identity and nonce drawn from a generator that can be seeded, both would own one claim."""
    units, works = twins(tmp_path, tamper=True)
    trained = together(race(works, "fork"))
    assert trained.keys() == whole(units).keys()
    assert trained != whole(units)


def test_the_users_random_state_is_untouched(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    seed_all(3, heavy=True)
    before = random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()
    with (
        Session(str(tmp_path / "box"), "node") as session,
        shared_queue(unit_grid(30, 2), str(tmp_path / "box"), "node", load) as queue,
    ):
        for _ in queue:
            session.step(samples=1)
    assert (random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()) == before


# -- objects made before a fork ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Heirloom:
    """What a forked process finds in its memory."""

    work: Work
    queue: SharedQueue | None = None
    session: Session | None = None
    mailbox: Any = None


def inherit(heirloom: Heirloom, pipe: Connection) -> None:
    """Use what was made before the fork; say what was trained, or where it was refused."""
    warnings.simplefilter("ignore")
    work, trained = heirloom.work, []
    pipe.send("ready")
    pipe.recv()
    queue = heirloom.queue or shared_queue(work.units, heirloom.mailbox or work.url, work.learner_id, load)
    inside = False
    try:
        with heirloom.session or nullcontext(), queue:
            inside = True
            for _, batch in queue:
                time.sleep(work.seconds)
                trained.append(batch)
                if heirloom.session is not None:
                    heirloom.session.step()
    except ClosedError:
        pipe.send("refused inside" if inside else "refused at the door")
    else:
        pipe.send(trained)


@forks
@pytest.mark.parametrize("made", ["plan", "mailbox"])
def test_plans_and_mailboxes_may_be_made_before_a_fork(tmp_path: Path, made: str) -> None:
    units, url = unit_grid(60, 1, 1, taper=False), str(tmp_path / "box")
    mailbox = open_mailbox(url) if made == "mailbox" else None
    heirlooms: list[Any] = [
        Heirloom(Work(units, url, learner_id=f"node-{rank}", seconds=0.005), mailbox=mailbox)
        for rank in range(4)
    ]
    assert together(race(heirlooms, "fork", inherit)) == whole(units)


@forks
def test_a_queue_made_before_a_fork_works_or_is_refused_before_it_claims(tmp_path: Path) -> None:
    units, url = unit_grid(60, 1, 1, taper=False), str(tmp_path / "box")
    queue = shared_queue(units, url, "node", load)
    heirlooms: list[Any] = [Heirloom(Work(units, url, seconds=0.005), queue=queue) for _ in range(4)]
    said: list[Any] = race(heirlooms, "fork", inherit)
    assert said == ["refused at the door"] * 4 or together(said) == whole(units)


@forks
def test_a_session_made_before_a_fork_is_refused_before_it_claims(tmp_path: Path) -> None:
    units, url = unit_grid(20, 1, 1, taper=False), str(tmp_path / "box")
    session = Session(url, "node")
    heirlooms: list[Any] = [Heirloom(Work(units, url, learner_id="node"), session=session) for _ in range(4)]
    said: list[Any] = race(heirlooms, "fork", inherit)
    assert said == ["refused at the door"] * 4
