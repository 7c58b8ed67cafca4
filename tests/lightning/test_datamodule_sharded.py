"""`SharedQueueDataModule` where forward and backward have collectives of their own: sharded models, on the CPU."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING, Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from models import Numbered, Recorder, quiet_trainer
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from shardqueue.lightning import SharedQueueDataModule

if TYPE_CHECKING:
    from pathlib import Path

    from jobs import Up
    from lightning.pytorch import Trainer

ROWS, BATCH = 22, 2


class Sharded(DDPStrategy):
    """FSDP as `FSDPStrategy` applies it, which insists on CUDA."""

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        assert self.lightning_module is not None
        self.model = FullyShardedDataParallel(
            self.lightning_module, use_orig_params=True, device_id=torch.device("cpu")
        )

    def configure_ddp(self) -> None:
        """FSDP takes its place."""


class FullySharded(Recorder):
    """FSDP2, as `ModelParallelStrategy` has a module do it."""

    def configure_model(self) -> None:
        mesh: Any = self.device_mesh
        if not hasattr(self.layer, "set_reshard_after_forward"):
            fully_shard(self.layer, mesh=mesh["data_parallel"])


def fitted(rank: int, size: int, folder: str, sharding: str) -> tuple[dict[str, list[list[int]]], float, int]:
    """Fit with validation; rows seen by stage, the metric, and optimizer steps."""
    parallel = ModelParallelStrategy(data_parallel_size=size, tensor_parallel_size=1)
    strategy: Any = parallel if sharding == "fully_shard" else Sharded()
    model = FullySharded() if sharding == "fully_shard" else Recorder()
    data = SharedQueueDataModule(
        folder, train=Numbered(ROWS), val=Numbered(ROWS + 2 * BATCH), batch_size=BATCH, unit_batches=4
    )
    trainer = quiet_trainer(size, strategy=strategy, num_sanity_val_steps=0)
    trainer.fit(model, datamodule=data)
    return model.seen, float(trainer.callback_metrics["val_rows"]), trainer.global_step


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("sharding", ["fsdp", "fully_shard"])
def test_sharded_ranks_train_in_step_and_evaluate_evenly(
    ranks: Up, tmp_path: Path, size: int, sharding: str
) -> None:
    every = ranks(size).run(fitted, size, str(tmp_path), sharding)
    trained = Counter(chain.from_iterable(row for seen, *_ in every for row in seen["train0"]))
    assert set(trained) == set(range(ROWS))
    assert [steps for *_, steps in every] == [-(-11 // size)] * size
    mean = (ROWS + 2 * BATCH - 1) / 2
    assert [metric for _, metric, _ in every] == pytest.approx([mean] * size)
