"""A `torch.distributed` world of forked or spawned processes on this machine, for a benchmark."""

from __future__ import annotations

import importlib
import logging
import os
import pickle
import tempfile
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE = timedelta(seconds=60)
"""Longest a rank waits for the others."""


def in_ranks(size: int, function: Callable[..., Any], *arguments: Any, start_method: str = "fork") -> Any:
    """What rank 0 of so many ranks returns from a call that all of them make."""
    importlib.import_module("torch._dynamo")  # which the first optimizer would do, in the middle of a turn
    with tempfile.TemporaryDirectory() as folder:
        given = size, folder, function, arguments
        start_processes(_rank, given, size, start_method=start_method)  # type: ignore[no-untyped-call]
        return pickle.loads((Path(folder) / "found").read_bytes())


def _rank(
    rank: int, size: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.environ.update(
        RANK=f"{rank}",
        LOCAL_RANK=f"{rank}",
        WORLD_SIZE=f"{size}",
        LOCAL_WORLD_SIZE=f"{size}",
        GROUP_RANK="0",
        TORCHELASTIC_RUN_ID="benchmark",  # for Lightning, that somebody else starts the ranks
    )
    warnings.simplefilter("ignore")
    for name in ("shardqueue", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    store = _store(rank == 0, Path(folder) / "port")
    dist.init_process_group("gloo", store=store, timeout=PATIENCE, world_size=size, rank=rank)
    found = function(*arguments)
    if rank == 0:
        (Path(folder) / "found").write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _store(serves: bool, port: Path) -> Any:
    """The ranks' TCPStore, which one of them serves; the parent would fork beside the server's threads."""
    if serves:
        store = dist.TCPStore("127.0.0.1", 0, None, True, PATIENCE, wait_for_workers=False)  # type: ignore[attr-defined]
        port.with_suffix(".new").write_text(f"{store.port}")
        port.with_suffix(".new").rename(port)
        return store
    while not port.exists():
        time.sleep(0.01)
    return dist.TCPStore("127.0.0.1", int(port.read_text()), None, False, PATIENCE)  # type: ignore[attr-defined]
