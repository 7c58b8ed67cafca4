"""Lockstep beside a GPU: over NCCL, by two ranks on one device, and without making the CPU wait for it.

What agrees touches nothing of a batch and makes its tensors on the CPU. That needs no GPU to be seen: batches on the
device `meta` raise when anybody reads them, and so does a collective over them.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from models import Numbered
from torch import distributed
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from shardqueue import Session, SharedQueueDataset, Unit, unit_grid
from shardqueue.agreement import Ranks as Agreeing
from shardqueue.agreement import Row
from shardqueue.lightning import SharedQueueCallback, SharedQueueDataModule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ranks import Ranks

    Up = Callable[[int], Ranks]

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
ROWS, BATCH = 22, 2
WAITS = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "aten::_local_scalar_dense",
)


# -- a Trainer -----------------------------------------------------------------------------------------------


class Line(LightningModule):
    """Keeps its batches where they are until the end."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.batches: list[torch.Tensor] = []

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        self.batches.append(batch)
        loss: torch.Tensor = self.layer(batch * 0.001).square().mean()
        return loss

    def validation_step(self, batch: torch.Tensor) -> None:
        self.log("loss", self.layer(batch).sum(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Watched(SharedQueueDataModule):
    """On CUDA, asking for a batch may not make the CPU wait."""

    def train_dataloader(self) -> Any:
        return _Watching(super().train_dataloader())


class _Watching:
    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        items = iter(self.loader)
        while True:
            with no_waits():
                item = next(items, None)
            if item is None:
                return
            yield item


class no_waits:  # noqa: N801
    """Where CUDA is in use, whatever makes the CPU wait for it raises."""

    def __enter__(self) -> None:
        self._set("error")

    def __exit__(self, *exc: object) -> None:
        self._set("default")

    def _set(self, mode: str) -> None:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.set_sync_debug_mode(mode)


@dataclass(frozen=True)
class Fitted:
    """What a rank saw: rows of each batch, and where they and the parameters were."""

    rows: list[list[int]]
    devices: set[str]
    backend: str
    parameters: list[float]


def fit(rank: int, folder: str, size: int, accelerator: str, backend: str) -> Fitted:
    """Ranks of one device each, which is the same one for all."""
    os.environ.update(LOCAL_RANK="0", GROUP_RANK=str(rank))
    data = Watched(
        folder,
        train=Numbered(ROWS),
        val=Numbered(ROWS),
        batch_size=BATCH,
        unit_batches=2,
        num_workers=2,
        multiprocessing_context="fork",
        pin_memory=accelerator == "gpu",
    )
    line = Line()
    trainer = Trainer(
        accelerator=accelerator,
        devices=1,
        num_nodes=size,
        strategy=DDPStrategy(process_group_backend=backend),
        max_epochs=1,
        callbacks=[SharedQueueCallback(lambda progress: 0.1 / (1 + progress))],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(line, datamodule=data)
    tensors = [*line.batches, *(parameter.detach() for parameter in line.parameters())]
    return Fitted(
        [[int(row) for row in batch[:, 0]] for batch in line.batches],
        {tensor.device.type for tensor in line.batches},
        distributed.get_backend(),
        [float(value) for tensor in tensors[len(line.batches) :] for value in tensor.flatten()],
    )


@pytest.mark.parametrize(
    ("size", "accelerator", "backend"),
    [
        (2, "cpu", "gloo"),
        pytest.param(1, "gpu", "nccl", marks=gpu),
        pytest.param(2, "gpu", "gloo", marks=gpu),
    ],
)
def test_a_fit(ranks: Up, tmp_path: Path, size: int, accelerator: str, backend: str) -> None:
    every = ranks(size).run(fit, str(tmp_path), size, accelerator, backend)
    steps = -(-ROWS // BATCH // size)
    assert [len(one.rows) for one in every] == [steps] * size
    rows = Counter(row for one in every for batch in one.rows for row in batch)
    assert set(rows) == set(range(ROWS))
    assert rows.total() == steps * size * BATCH
    assert all(one.parameters == every[0].parameters for one in every)
    assert all(one.backend == backend for one in every)
    assert all(one.devices == {"cuda" if accelerator == "gpu" else "cpu"} for one in every)


# -- what the agreement touches ------------------------------------------------------------------------------

UNITS = unit_grid(24, 4, taper=False)


def load_unreadable(unit: Unit) -> Iterator[tuple[int, torch.Tensor]]:
    for step in unit.steps:
        yield step, torch.empty(4, 2, device="meta")


class Devices(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes on which devices the tensors are that anything is done with."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in torch.utils._pytree.tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                self.seen[str(func), tensor.device.type] += 1
        return func(*args, **(kwargs or {}))


def train_unreadable(rank: int, folder: str) -> tuple[int, Counter[tuple[str, str]]]:
    distributed.init_process_group("gloo")
    with torch.device("meta"):
        dataset = SharedQueueDataset(UNITS, folder, load_unreadable)
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=None)
    steps = 0
    with Session(folder) as session, Devices() as devices:
        for _, batch in session.track(loader, group=distributed.group.WORLD):
            assert batch.device.type == "meta"
            session.step(samples=len(batch))
            steps += 1
    return steps, devices.seen


def test_nothing_of_a_batch_is_read(ranks: Up, tmp_path: Path) -> None:
    for steps, seen in ranks(2).run(train_unreadable, str(tmp_path)):
        assert steps == 12
        assert seen.total() >= steps, "the collectives were seen"
        assert {device for _, device in seen} == {"cpu"}, seen


def agree_beside(rank: int, device: str) -> tuple[list[dict[str, Any]], list[float]]:
    distributed.init_process_group("gloo")
    agreeing = Agreeing(distributed.group.WORLD)
    with torch.device(device):
        said = agreeing.gather({"rank": rank})
        rows = agreeing.begin(Row(batches=rank + 1.0)).rows()
    agreeing.close()
    return said, [row.batches for row in rows]


@pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=gpu)])
def test_ranks_agree_on_the_cpu_whatever_the_default_device(ranks: Up, device: str) -> None:
    told = ranks(2).run(agree_beside, device)
    assert told == [([{"rank": 0}, {"rank": 1}], [1.0, 2.0])] * 2


# -- what the CPU waits for ----------------------------------------------------------------------------------


def load(unit: Unit) -> Iterator[tuple[int, torch.Tensor]]:
    for step in unit.steps:
        yield step, torch.full((64,), float(step))


def count_waits(rank: int, folder: str, together: bool) -> Counter[str]:
    """Train a little on the one GPU; how often the CPU waited for it, by call."""
    distributed.init_process_group("gloo")
    dataset = SharedQueueDataset(UNITS, folder, load, independent=not together)
    loader: DataLoader[Any] = DataLoader(
        dataset, batch_size=None, num_workers=2, pin_memory=True, multiprocessing_context="fork"
    )
    weight = torch.zeros(64, device="cuda")
    torch.cuda.synchronize()
    with Session(folder) as session:
        items = session.track(loader, group=distributed.group.WORLD if together else None)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler, no_waits():
            for _, batch in items:
                weight += batch.to("cuda", non_blocking=True)
                session.step(samples=1)
    counts = {event.key: event.count for event in profiler.key_averages()}
    assert any("emcpy" in name for name in counts), "the profiler saw the copies"
    return Counter({name: counts.get(name, 0) for name in WAITS})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_agreement_makes_no_cpu_wait(ranks: Up, tmp_path: Path) -> None:
    """Beside the same ranks that do not step together, and take the same number of batches in all."""
    apart = ranks(2).run(count_waits, str(tmp_path / "apart"), False)
    together = ranks(2).run(count_waits, str(tmp_path / "together"), True)
    assert not any(waits["aten::_local_scalar_dense"] for waits in together), together
    assert sum(map(Counter.total, together)) <= sum(map(Counter.total, apart)), (together, apart)
