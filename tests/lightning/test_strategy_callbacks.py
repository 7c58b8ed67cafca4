"""Callbacks and schedules under elastic steps see whole steps, and all samples."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from strategy_cases import Case, Learner, Told, all_told, alone, rows_of

from shardqueue.lightning import SharedQueueCallback, SharedQueueDataModule

if TYPE_CHECKING:
    from pathlib import Path

    from jobs import Up

SLOW = (0.0, 0.004, 0.02)
ROWS, EACH = 100, 6
STEPS = 9


def rate(progress: int) -> float:
    return 0.1 * 0.99**progress


class Probe(Callback):
    """Notes what our session and callback say, step by step."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        data = trainer.datamodule
        assert isinstance(data, SharedQueueDataModule)
        assert data.agreed is not None
        rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
        ranks = [(one.batches, one.samples) for one in data.agreed.ranks]
        pl_module.notes.append((data.agreed.progress, data.samples, rates, ranks))


class Grouped(Learner):
    """With two parameter groups."""

    def optimizer(self) -> torch.optim.Optimizer:
        first, second = list(self.parameters())[:2], list(self.parameters())[2:]
        groups: list[dict[str, Any]] = [{"params": first}, {"params": second, "name": "late"}]
        return torch.optim.SGD(groups, lr=1.0)


class OneCycle(Learner):
    """With a schedule over as many steps as the Trainer estimates."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        steps = int(self.trainer.estimated_stepping_batches)
        self.notes.append(steps)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Watched(Learner):
    """Logs an epoch metric that gets worse."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("worse", float(self.current_epoch), on_step=False, on_epoch=True, sync_dist=True)
        return loss


def best(folder: str) -> ModelCheckpoint:
    return ModelCheckpoint(folder, "{epoch}", monitor="worse", mode="min", auto_insert_metric_name=False)


def test_callbacks(ranks: Up, tmp_path: Path) -> None:
    folder = str(tmp_path / "best")
    monitored = (partial(LearningRateMonitor, "step"),)
    ours = partial(SharedQueueCallback, rate, factors={"late": 2.0})
    cases = [
        Case(ROWS, each=EACH, epochs=2, pauses=SLOW, model=Grouped, callbacks=(*monitored, ours, Probe)),
        Case(ROWS, each=EACH, epochs=2, model=OneCycle, callbacks=monitored),
        Case(
            rows=24,
            epochs=9,
            model=Watched,
            trainer={"enable_checkpointing": True},
            callbacks=(partial(EarlyStopping, "worse", patience=2), partial(best, folder)),
        ),
    ]
    told = ranks(3).run(all_told, 3, cases, str(tmp_path / "queue"))
    shared, one_cycle, watched = ([rank[number] for rank in told] for number in range(3))
    for every in (shared, one_cycle, watched):
        assert len({one.digest for one in every}) == 1
    check_shared(shared, cases[0])

    assert {tuple(one.notes) for one in one_cycle} == {(2 * STEPS,)}
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=2 * STEPS)
    expected = []
    for number in range(2 * STEPS):
        expected.append((number, pytest.approx(scheduler.get_last_lr()[0])))
        optimizer.step()
        if number < 2 * STEPS - 1:
            scheduler.step()
    assert one_cycle[0].values("lr-SGD") == expected

    assert {one.global_step for one in watched} == {3 * 2}
    assert {one.metrics["worse"] for one in watched} == {2.0}
    assert [path.name for path in (tmp_path / "best").iterdir()] == ["0.ckpt"]


def check_shared(every: list[Told], case: Case) -> None:
    """The rate follows the agreed progress on all ranks; every sample is counted once, where it was trained."""
    assert rows_of(every) == Counter(2 * list(range(ROWS)))
    progress = [EACH * number for number in range(STEPS)]
    progress += [ROWS // 2 + done for done in progress]
    for one in every:
        assert [noted[0] for noted in one.notes] == progress
        trained = [sum(map(len, one.steps.get(number, []))) for number in range(2 * STEPS)]
        assert [noted[1] for noted in one.notes] == trained
        assert [noted[2] for noted in one.notes] == [
            pytest.approx([rate(done), 2 * rate(done)]) for done in progress
        ]
    for number in range(1, 2 * STEPS):
        over = number - (number != STEPS)  # when they last agreed: before a pass, or in the step before
        before = [sum(len(b) for n, bs in one.steps.items() if n < over for b in bs) for one in every]
        counted = [samples for _, samples in every[0].notes[number][3]]
        assert counted == before, number
    logged = every[0]
    assert logged.values("shardqueue/learning_rate") == [
        (number, pytest.approx(rate(done))) for number, done in enumerate(progress)
    ]
    assert logged.values("lr-SGD/late") == [
        (number, pytest.approx(2 * rate(done))) for number, done in enumerate(progress)
    ]
    assert [value for _, value in logged.values("shardqueue/repeated")] == [0] * (2 * STEPS)
    for number, speed in logged.values("shardqueue/samples_per_second"):
        parts = [
            dict(logged.values(f"shardqueue/rank_{rank}/samples_per_second"))[number] for rank in range(3)
        ]
        assert speed == pytest.approx(sum(parts))
        if speed:
            eta = dict(logged.values("shardqueue/eta_seconds"))[number]
            assert eta == pytest.approx((2 * STEPS - number - 1) * EACH / (speed / case.batch))

    def scheduled(model: Learner, optimizer: torch.optim.Optimizer, number: int) -> None:
        for group, factor in zip(optimizer.param_groups, (1.0, 2.0), strict=True):
            group["lr"] = factor * rate(progress[number])

    for name, value in alone(case, every, scheduled).items():
        torch.testing.assert_close(every[0].parameters[name], value, rtol=0, atol=1e-12)
