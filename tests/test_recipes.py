"""The README's recipes for data on disk: two learners together train every row of the samples exactly once, by value.

The text that runs is the README's own. Its sample is written once; then two processes run the rest at once, over the
same mailbox, each without loader workers and again with two. Each has a batch before either gets a second one.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import pytest
import torch
from conftest import lasting

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

    from conftest import S3Server

README = Path(__file__).parent.parent / "README.md"
HEADING = "### Data as it lies on disk\n"
MARKS = r"^# (?:a sample to try it on; you have yours|the recipe)\n"
NAMES = ("tokens", "parquet", "shards", "dataset")
PATIENCE = 120.0

IN_LOOP = "num_workers=0"
FORKED = 'num_workers=2, multiprocessing_context="fork"'
SPAWNED = 'num_workers=1, multiprocessing_context="spawn"'

Seen = tuple[int, Any]


def recipe(name: str) -> tuple[str, str]:
    """What writes a recipe's sample, and what trains on it."""
    section = README.read_text(encoding="utf-8").partition(HEADING)[2]
    blocks = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)[: len(NAMES)]
    head, sample, rest = re.split(MARKS, blocks[NAMES.index(name)], flags=re.MULTILINE)
    return head + sample, head + rest


def write_sample(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    exec(compile(recipe(name)[0], f"<sample of {name}>", "exec"), {"__name__": "readme"})


# -- two learners ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """What a learner runs: a recipe once for each kind of loader, in a folder."""

    text: str
    folder: Path
    loaders: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)


def learn(pipe: Connection) -> None:
    """In a process of its own: do the work that comes, say what was trained; None is the end."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork.*")
    for work in iter(pipe.recv, None):
        try:
            os.chdir(work.folder)
            os.environ.update(work.environment)
            pipe.send([_run(work, loader, pipe) for loader in work.loaders])
        except BaseException:
            pipe.send(traceback.format_exc())


def _run(work: Work, loader: str, pipe: Connection) -> list[Seen]:
    trained: list[Seen] = []

    def watch(items: Iterable[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
        for step, batch in items:
            if not trained:
                pipe.send("here")
                pipe.recv()
            trained.append((int(step), plain(batch)))
            yield step, batch

    text = work.text.replace('"./queue"', f'"./queue-{work.loaders.index(loader)}"')
    for old, new in (("num_workers=2", loader), ("session.track(loader)", "watch(session.track(loader))")):
        assert old in text
        text = text.replace(old, new)
    exec(compile(text, "<recipe>", "exec"), {"__name__": "readme", "watch": watch})
    return trained


def plain(batch: Any) -> Any:
    """A batch of tensors as lists and dicts of numbers."""
    if isinstance(batch, dict):
        return {name: plain(column) for name, column in batch.items()}
    if isinstance(batch, (list, tuple)):
        return [plain(column) for column in batch]
    assert isinstance(batch, torch.Tensor)
    return batch.tolist()


class Pair:
    """Two processes that learn together; started when first needed, and anew after a failure."""

    def __init__(self) -> None:
        self._learners: list[tuple[SpawnProcess, Connection]] = []

    def train(self, work: Work) -> list[list[Seen]]:
        """Let both do the work at once; return what both trained, for each kind of loader."""
        if not self._learners:
            self._learners = [_start(), _start()]
        try:
            said = self._hear(work)
            while said == ["here", "here"]:
                said = self._hear("go")
            assert "here" not in said, "one learner is through before the other has begun"
        except BaseException:
            self.stop(kill=True)
            raise
        return [list(chain(*both)) for both in zip(*said, strict=True)]

    def _hear(self, say: object) -> list[Any]:
        for _, pipe in self._learners:
            pipe.send(say)
        return [_receive(pipe) for _, pipe in self._learners]

    def stop(self, kill: bool = False) -> None:
        for child, pipe in self._learners:
            if kill:
                child.kill()
            else:
                pipe.send(None)
            child.join()
            pipe.close()
            lasting.discard(child.pid or 0)
        self._learners = []


def _start() -> tuple[SpawnProcess, Connection]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=learn, args=(there,))
    child.start()
    there.close()
    lasting.add(child.pid or 0)
    return child, here


def _receive(pipe: Connection) -> Any:
    assert pipe.poll(PATIENCE), "a learner says nothing"
    said = pipe.recv()
    if isinstance(said, str) and said != "here":
        pytest.fail(said)
    return said


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.stop(kill=True)  # an orderly end of what they have imported takes seconds


# -- what the samples hold -------------------------------------------------------------------------------


def tokens() -> list[Seen]:
    rows = [list(range(first, first + 33)) for first in range(0, 10_000 - 32, 32)]
    return [(step, rows[step * 4 : step * 4 + 4]) for step in range(-(-len(rows) // 4))]


def parquet() -> list[Seen]:
    groups = [
        range(first, min(first + 40, number * 400 + 390))
        for number in range(4)
        for first in range(number * 400, number * 400 + 390, 40)
    ]
    batches = [group[first : first + 8] for group in groups for first in range(0, len(group), 8)]
    columns = [{"x": [row / 2 for row in rows], "label": list(rows)} for rows in batches]
    return list(enumerate(columns))


def shards() -> list[Seen]:
    cuts = [
        (step, range(first + low, first + high))
        for first in range(0, 400, 10)
        for step, low, high in ((0, 0, 4), (1, 4, 8), (2, 8, 10))
    ]
    return [(step, [[[row] * 3 for row in rows], list(rows)]) for step, rows in cuts]


EXPECTED = {"tokens": tokens, "parquet": parquet, "shards": shards}


def in_order(seen: list[Seen]) -> list[str]:
    return sorted(map(repr, seen))


# -- the tests -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXPECTED)
def test_recipe_trains_every_row_once(
    name: str, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_sample(name, tmp_path, monkeypatch)
    runs = pair.train(Work(recipe(name)[1], tmp_path, (IN_LOOP, FORKED)))
    for trained in runs:
        assert in_order(trained) == in_order(EXPECTED[name]())


def test_hugging_face_dataset_trains_every_row_once(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_sample("dataset", tmp_path, monkeypatch)
    runs = pair.train(Work(recipe("dataset")[1], tmp_path, (IN_LOOP, FORKED, SPAWNED), _offline(tmp_path)))
    for trained in runs:
        rows = [
            (tuple(x), label)
            for _, batch in trained
            for x, label in zip(batch["x"], batch["label"], strict=True)
        ]
        assert Counter(rows) == Counter(((row / 2, row / 4), row) for row in range(600))
        assert {len(batch["label"]) for _, batch in trained} == {8}
        assert sorted(step for step, _ in trained) == list(range(75))
        assert in_order(trained) == in_order(runs[0]), "the seed decides the batches"
    labels = [label for _, batch in sorted(runs[0], key=lambda seen: seen[0]) for label in batch["label"]]
    assert labels != sorted(labels), "shuffled"


def _offline(folder: Path) -> dict[str, str]:
    return {"HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1"}


@pytest.mark.s3
@pytest.mark.parametrize("name", ["parquet", "shards"])
def test_recipe_over_s3(
    name: str, pair: Pair, s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_sample(name, tmp_path, monkeypatch)
    bucket = fsspec.filesystem("s3", **s3_server.options)
    for path in tmp_path.iterdir():
        bucket.pipe_file(f"shardqueue/recipes/{path.name}", path.read_bytes())
        path.unlink()
    text = recipe(name)[1].replace('f"./', 'f"s3://shardqueue/recipes/')
    environment = {
        "AWS_ACCESS_KEY_ID": s3_server.writer["key"],
        "AWS_SECRET_ACCESS_KEY": s3_server.writer["secret"],
        "AWS_ENDPOINT_URL": s3_server.endpoint,
    }
    [trained] = pair.train(Work(text, tmp_path, (FORKED,), environment))
    assert in_order(trained) == in_order(EXPECTED[name]())
