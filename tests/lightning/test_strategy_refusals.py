"""What an `ElasticStrategy` refuses: on all ranks, before or in the first step, saying what to use instead."""

from __future__ import annotations

import re
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from elastic_cases import FEATURES, Rows
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from models import quiet_trainer
from strategy_cases import Case, Learner, all_refused, all_told
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from shardqueue.errors import InvalidInputError
from shardqueue.lightning import ElasticStrategy

if TYPE_CHECKING:
    from pathlib import Path

    from jobs import Up


class Batched(Learner):
    def build(self) -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Linear(FEATURES, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)
        )


class Manual(Learner):
    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.automatic_optimization = False


class Synchronised(Learner):
    def build(self) -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Linear(FEATURES, 8), torch.nn.SyncBatchNorm(8), torch.nn.Linear(8, 1)
        )


class ConfiguredLate(Learner):
    """Whose module is there only when all ranks are."""

    def configure_model(self) -> None:
        self.late = torch.nn.SyncBatchNorm(8)


class Sharded(Learner):
    def configure_model(self) -> None:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (self.trainer.world_size,))
        fully_shard(self.body, mesh=mesh)


class Metered(Learner):
    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.mean = MeanMetric(dist_sync_on_step=True)


class Quasi(Learner):
    """With an optimizer that evaluates its closure several times."""

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)


class Silent(Learner):
    """Has no loss for a micro-batch: its first, or a later one."""

    first = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        had = len(self.steps[self.global_step])
        return None if (had == 1) == self.first else loss


class SilentLater(Silent):
    first = False


class Gathering(Learner):
    """Talks to the other ranks in a micro-batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.all_gather(loss)
        return loss


class Waiting(Learner):
    def on_after_backward(self) -> None:
        self.trainer.strategy.barrier()


class Iterating(Learner):
    def __init__(self, case: Case) -> None:
        super().__init__(case)
        warnings.filterwarnings("ignore", "You are using the `dataloader_iter`")

    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        return super().training_step(batch, 0)


ALL_RANKS: list[tuple[Case, str]] = [
    (Case(model=Manual), "automatic_optimization=False: automatic_optimization must be True"),
    (
        Case(trainer={"accumulate_grad_batches": 2}),
        "accumulate_grad_batches=2: .* multiply micro_batches instead",
    ),
    (
        Case(callbacks=(partial(GradientAccumulationScheduler, {0: 1, 1: 2}),)),
        "accumulate_grad_batches='a GradientAccumulationScheduler'",
    ),
    (Case(each=2), "micro_batches=2: micro_batches must be at least 3, one a rank; .* make batches smaller"),
    (Case(model=Synchronised), r"model='body.1 \(SyncBatchNorm\)': .* use BatchNorm"),
    (Case(model=ConfiguredLate), r"model='late \(SyncBatchNorm\)'"),
    (Case(model=Batched, trainer={"sync_batchnorm": True}), "sync_batchnorm=True: .* leave it out"),
    (Case(model=Sharded), r"whole on every rank: .* train it in lockstep"),
    (Case(model=Metered), "mean.dist_sync_on_step=True"),
    (Case(model=Iterating), "training_step='dataloader_iter': .* training_step"),
    (Case(model=Quasi), "optimizer='LBFGS': .*one that evaluates its closure once a step"),
    (Case(rows=4), "batches=2: batches must be at least .*3"),
]
ONE_RANK: list[tuple[Case, str]] = [
    (Case(model=Silent), "what training_step returned=None: .* return a loss of 0"),
    (Case(model=SilentLater), "what training_step returned=None: .* return a loss of 0"),
    (Case(model=Gathering), "all_gather was called for a micro-batch"),
    (Case(model=Waiting), "barrier was called for a micro-batch"),
]
"""Seen in a micro-batch, which only some ranks may have; the others hear that they are gone."""


def test_on_all_ranks(ranks: Up, tmp_path: Path) -> None:
    told = ranks(3).run(all_refused, 3, [case for case, _ in ALL_RANKS], str(tmp_path))
    for number, (case, message) in enumerate(ALL_RANKS):
        for errors in told:
            assert errors[number][0] == "InvalidInputError", (case, errors[number])
            assert re.search(message, errors[number][1]), (case, errors[number])


@pytest.mark.parametrize("number", range(len(ONE_RANK)))
def test_in_a_micro_batch(ranks: Up, tmp_path: Path, number: int) -> None:
    case, message = ONE_RANK[number]
    outcomes = ranks(2).outcomes(all_told, 2, [case], str(tmp_path))
    assert {outcome.kind for outcome in outcomes} == {"raised"}, outcomes
    assert any(re.search(message, outcome.text) for outcome in outcomes), outcomes
    others = [outcome for outcome in outcomes if not re.search(message, outcome.text)]
    assert {outcome.error for outcome in others} <= {"PeerGoneError"}, others


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"micro_batches": 0}, "micro_batches=0: micro_batches must be"),
        ({"micro_batches": 4, "group": 0}, "group=0: group must be"),
        ({"micro_batches": 4, "weight": 3}, "weight=3: weight must be a function of the batch, or None"),
        (
            {"micro_batches": 4, "find_unused_parameters": True},
            "settings='find_unused_parameters': .* leave it out",
        ),
        ({"micro_batches": 4, "ddp_comm_hook": print}, "settings='ddp_comm_hook'"),
        ({"micro_batches": 4, "static_graph": True}, "settings='static_graph'"),
    ],
)
def test_arguments(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        ElasticStrategy(**settings)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_another_loader() -> None:
    case = Case()
    trainer = quiet_trainer(1, strategy=ElasticStrategy(case.each), limit_val_batches=0)
    with pytest.raises(InvalidInputError, match=r"datamodule=None: .* pass trainer.fit\(model, datamodule="):
        trainer.fit(case.made(), DataLoader(Rows(8, torch.float64), batch_size=2))
