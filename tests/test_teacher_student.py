"""Producers and consumers as programs join them: Lightning trains on a channel, and the benchmark of both systems."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from shardqueue import Channel, shared_queue, unit_grid

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardqueue import Sender
    from shardqueue.units import Unit


ROOT = Path(__file__).parents[1]
STEPS = 40


def load(unit: Unit) -> Iterator[tuple[int, Tensor]]:
    for step in unit.steps:
        yield step, torch.full((2, 4), float(step))


def produce(sender: Sender[tuple[int, Tensor]], mailbox: Path, name: str) -> None:
    units = unit_grid(STEPS, 4, 1)
    with sender, shared_queue(units, mailbox, name, load, run="once") as queue:
        for step, batch in queue:
            sender.send((int(step), batch * 2))


class Student(LightningModule):
    """Learns half of what it is given, and notes what that was."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.trained: list[tuple[int, float]] = []

    def training_step(self, item: tuple[int, Tensor], _: int) -> Tensor:
        step, hidden = item
        self.trained.append((step, hidden.mean().item()))
        loss: Tensor = (self.layer(hidden / STEPS) - hidden.mean() / 2).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-5)


# Lightning asks torch's pytree in a way that torch has deprecated.
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_lightning_trains_every_item_of_a_receiver_once(tmp_path: Path) -> None:
    channel = Channel[tuple[int, Tensor]](senders=2, receivers=1, capacity=4)
    producers = [
        threading.Thread(target=produce, args=(channel.sender(), tmp_path, name)) for name in ("a", "b")
    ]
    for producer in producers:
        producer.start()
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    student = Student()
    before = student.layer.weight.detach().clone()
    with channel.receiver() as loader:
        trainer.fit(student, train_dataloaders=loader)
    for producer in producers:
        producer.join()
    assert sorted(student.trained) == [(step, 2.0 * step) for step in range(STEPS)]
    assert trainer.global_step == STEPS
    assert not torch.equal(student.layer.weight, before)
    assert channel.report().received == STEPS


@pytest.mark.full
def test_the_benchmark_trains_every_item_once_and_ends_with_one_line_of_json() -> None:
    command = [sys.executable, "-m", "benchmarks.teacher_student", "--quick"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = ended.stdout.splitlines()
    found = json.loads(lines[-1])
    assert found["benchmark"] == "teacher_student"
    assert all(row.keys() == {"case", "value", "unit", "reach", "against"} for row in found["rows"])
    assert len(lines) == len(found["rows"]) + 2  # a heading, a line a row, and the JSON: nothing was WRONG
    for form in ("round robin", "channel"):
        rows = [row for row in found["rows"] if row["case"].startswith(f"{form}: student")]
        assert sorted(row["unit"] for row in rows) == ["items"] * 3 + ["of its time"] * 3
        assert sum(row["value"] for row in rows if row["unit"] == "items") == 240
