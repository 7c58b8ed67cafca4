"""Elastic steps on CUDA: two gloo ranks on one device, which take micro-batches as fast as the device is done."""

from __future__ import annotations

import logging
import os
from itertools import chain
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import distributed

from benchmarks.elastic_ranks import Turn, Work, elastic, take_turns
from shardqueue import Session
from shardqueue.elastic import Elastic

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ranks import Ranks

    Up = Callable[[int], Ranks]

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]
BUSY = 50_000_000
"""Cycles, some hundredths of a second."""


def train(rank: int, work: Work, folder: str) -> tuple[Turn, list[str]]:
    os.environ.setdefault("LOCAL_RANK", f"{rank}")
    logging.getLogger("shardqueue").setLevel(logging.ERROR)
    distributed.init_process_group("gloo")
    found, wrong = take_turns((("elastic", elastic),), work, 1, folder)
    return found["elastic"][0], wrong


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_parameters_are_those_of_one_process(ranks: Up, tmp_path: Path, device: str, autocast: bool) -> None:
    """And every row came once, and the replicas are identical: `take_turns` compares."""
    work = Work(
        *(6, 4),
        extra=(0, 4),
        layers=2,
        width=64,
        device=device,
        autocast=autocast,
        tolerance=1e-5,
    )
    (turn, wrong), _ = ranks(2).run(train, work, str(tmp_path))
    assert wrong == []
    assert turn.far <= 1e-5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_slower_rank_takes_fewer(ranks: Up, tmp_path: Path) -> None:
    """Launching takes both as long; only a rank that waits for its device is seen to be slow."""
    work = Work(
        *(12, 8),
        extra=(0, 21),
        batch=4,
        repeat=512,
        layers=4,
        width=1024,
        device="cuda",
        tolerance=None,
    )
    (turn, wrong), _ = ranks(2).run(train, work, str(tmp_path))
    assert wrong == []
    fast, slow = (sum(counts) for counts in zip(*turn.counts[3:], strict=True))
    assert fast > 1.5 * slow, turn.counts


def wait_for_device(rank: int, folder: str) -> tuple[bool, bool]:
    """Whether the device was done before and after the engine waited for it."""
    model = torch.nn.Linear(2, 1, device="cuda")
    with Session(folder, "alone") as session:
        engine = Elastic(session, model, 1)
        torch.cuda.synchronize()
        torch.cuda._sleep(BUSY)  # type: ignore[no-untyped-call]
        before = torch.cuda.current_stream().query()
        engine.ready()
        after = torch.cuda.current_stream().query()
        engine.close()
    return before, after


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_token_waits_for_the_device(ranks: Up, tmp_path: Path) -> None:
    said: list[Any] = [ranks(1).run(wait_for_device, str(tmp_path))[0]]
    assert list(chain(*said)) == [False, True]
