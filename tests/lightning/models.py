"""What the Trainers of these tests train: tiny, and it remembers by value what it was given."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import Dataset


class Numbered(Dataset[torch.Tensor]):
    """Rows that are their own number."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> torch.Tensor:
        return torch.tensor([float(row), 1.0])


class Recorder(LightningModule):
    """A linear model; `seen` holds the rows of every batch, by stage and epoch."""

    def __init__(self, lr: float = 0.001, buffers: bool = False) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.norm = torch.nn.BatchNorm1d(1) if buffers else torch.nn.Identity()
        self.lr = lr
        self.seen: dict[str, list[list[int]]] = {}

    def _note(self, stage: str, batch: torch.Tensor) -> torch.Tensor:
        self.seen.setdefault(stage, []).append([int(row) for row in batch[:, 0]])
        scale = torch.tensor([0.001, 1.0], device=batch.device)
        output: torch.Tensor = self.norm(self.layer(batch * scale))
        return output

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = self._note(f"train{self.current_epoch}", batch).square().mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self._note("sanity" if self.trainer.sanity_checking else "val", batch)
        self.log("val_rows", batch[:, 0].mean(), sync_dist=True, batch_size=len(batch))

    def test_step(self, batch: torch.Tensor, index: int) -> None:
        self._note("test", batch)
        self.log("test_rows", batch[:, 0].mean(), sync_dist=True, batch_size=len(batch))

    def predict_step(self, batch: torch.Tensor, index: int) -> list[int]:
        self._note("predict", batch)
        return [int(row) for row in batch[:, 0]]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def quiet_trainer(size: int, **settings: Any) -> Trainer:
    """A Trainer on `size` CPU ranks that writes nothing."""
    given = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    strategy = "ddp" if size > 1 else "auto"
    return Trainer(
        accelerator="cpu", devices=size, **{"strategy": strategy, "max_epochs": 1, **given, **settings}
    )
