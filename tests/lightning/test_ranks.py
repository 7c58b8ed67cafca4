"""The ranks of `ranks`: a fresh group for each call, and whatever goes wrong in one is told and does not last."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from ranks import PATIENCE, Ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    Up = Callable[[int], Ranks]

pytestmark = pytest.mark.torch


def summed(rank: int, values: list[float]) -> float:
    """All-reduce over gloo, with a group of the function's own making that it leaves to the harness."""
    import torch
    from torch import distributed

    distributed.init_process_group("gloo")
    mine = torch.tensor([values[rank]], dtype=torch.float64)
    distributed.all_reduce(mine)
    return float(mine)


def fitted(rank: int, size: int, strategy: str, workers: int = 0) -> list[float]:
    """Fit a tiny model in a real Trainer; return all its parameters."""
    import torch
    from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
    from lightning.pytorch import LightningModule, Trainer
    from torch.utils.data import DataLoader, TensorDataset

    class Line(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
            rows, targets = batch
            return torch.nn.functional.mse_loss(self.layer(rows), targets)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    rows = torch.arange(32.0).reshape(16, 2) / 32
    data = TensorDataset(rows, rows.sum(1, keepdim=True))
    line = Line()
    trainer = Trainer(
        accelerator="cpu",
        devices=size,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(line, DataLoader(data, batch_size=2, num_workers=workers))
    assert isinstance(trainer._accelerator_connector.cluster_environment, TorchElasticEnvironment)
    assert trainer.world_size == size
    assert trainer.global_rank == rank
    assert trainer.global_step == 8 // size + (8 % size > 0)
    return [float(value) for parameter in line.parameters() for value in parameter.detach().flatten()]


def refused(rank: int) -> None:
    """Rank 1 raises while the others wait for it in a collective."""
    from torch import distributed

    distributed.init_process_group("gloo")
    print(f"rank {rank} is there", flush=True)
    if rank == 1:
        raise LookupError("rank 1 finds no data")
    distributed.barrier()


def uneven(rank: int) -> None:
    """After a fit, whose end resets all signal handlers, rank 0 waits in a collective that rank 1 never joins."""
    from torch import distributed

    fitted(rank, 2, "ddp")
    if rank == 0:
        distributed.barrier()


def stopped(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


def surroundings(rank: int) -> tuple[str | None, str | None, str]:
    return os.environ.get("OF_THIS_TEST"), os.environ.get("HOME"), str(Path.cwd())


def killed(rank: int) -> int:
    if rank == 1:
        left = subprocess.Popen(["sleep", str(10 * PATIENCE)])
        print(left.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def pid(rank: int) -> int:
    return os.getpid()


def rank_by_lightning(rank: int) -> int:
    from lightning_utilities.core.rank_zero import rank_zero_only

    return int(vars(rank_zero_only)["rank"])


def drawn(rank: int) -> float:
    import torch

    return float(torch.rand(1))


def warned(rank: int) -> None:
    warnings.warn("mind the step", stacklevel=1)


def failing_unseen(rank: int) -> None:
    thread = threading.Thread(target=warned, args=(rank,))
    thread.start()
    thread.join()


def unable_to_leave(rank: int) -> None:
    """The group cannot be destroyed."""
    from torch import distributed

    distributed.init_process_group("gloo")
    distributed.destroy_process_group = None  # type: ignore[assignment]


def imported(rank: int) -> bool:
    return "lightning" in sys.modules


def await_end(process: int) -> None:
    try:
        handle = os.pidfd_open(process)
    except ProcessLookupError:
        return
    ended, _, _ = select.select([handle], [], [], PATIENCE)
    os.close(handle)
    assert ended


def threaded(rank: int) -> None:
    threading.Thread(target=threading.Event().wait, name="shardqueue-left", daemon=True).start()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_call_has_a_gloo_group_of_its_own(ranks: Up, size: int) -> None:
    for values in ([1.0, 2.0, 4.0], [8.0, 16.0, 32.0]):
        assert ranks(size).run(summed, values) == [sum(values[:size])] * size


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("size", "strategy"), [(1, "auto"), (1, "ddp"), (2, "ddp"), (3, "ddp")])
def test_a_trainer_fits_the_same_parameters_in_every_rank(
    ranks: Up, size: int, strategy: str, workers: int
) -> None:
    first, *others = ranks(size).run(fitted, size, strategy, workers)
    assert all(other == first for other in others)


def test_an_exception_arrives_with_its_traceback_and_ends_the_wait_of_the_others(ranks: Up) -> None:
    waiting, raised = ranks(2).outcomes(refused)
    assert (raised.kind, raised.error, raised.text) == ("raised", "LookupError", "rank 1 finds no data")
    assert "in refused" in raised.traceback
    assert waiting.kind == "raised"
    assert waiting.log == "rank 0 is there\n"


def test_an_exception_in_run_fails_the_case_with_every_rank_s_traceback_and_log(ranks: Up) -> None:
    with pytest.raises(
        AssertionError, match=r"(?s)rank 0 raised.*rank 0 is there.*rank 1 raised.*LookupError"
    ):
        ranks(2).run(refused)


def test_a_hang_is_told_with_the_traceback_of_each_rank_and_does_not_last(ranks: Up) -> None:
    group = ranks(2)
    waiting, returned = group.outcomes(uneven, patience=5)
    assert (waiting.kind, returned.kind) == ("hung", "value")
    assert "in barrier" in waiting.traceback
    assert "in uneven" in waiting.traceback
    assert group.run(summed, [1.0, 2.0]) == [3.0, 3.0]


def test_a_killed_rank_died_with_all_it_started_and_the_next_call_has_new_processes(ranks: Up) -> None:
    group = ranks(2)
    before = group.run(pid)
    assert group.pids == before
    survivor, victim = group.outcomes(killed)
    assert (survivor.kind, survivor.value, victim.kind) == ("value", 0, "died")
    await_end(int(victim.log))
    assert group.run(rank_by_lightning) == [0, 1]
    assert not set(group.pids) & set(before)


def test_a_rank_killed_between_calls_is_replaced(ranks: Up) -> None:
    group = ranks(2)
    before = group.run(pid)
    os.kill(before[0], signal.SIGKILL)
    await_end(before[0])
    assert not set(group.run(pid)) & set(before)


def test_a_stopped_rank_is_not_waited_for_where_the_test_says_so(ranks: Up) -> None:
    returned, hung = ranks(2).outcomes(stopped, but=[1])
    assert (returned.kind, hung.kind) == ("value", "hung")


def test_each_call_draws_the_same_numbers_others_in_each_rank(ranks: Up) -> None:
    first, second = ranks(2).run(drawn)
    assert first != second
    assert ranks(2).run(drawn) == [first, second]


def test_a_warning_is_an_error_in_a_rank(ranks: Up) -> None:
    (outcome,) = ranks(1).outcomes(warned)
    assert (outcome.error, outcome.text) == ("UserWarning", "mind the step")


def test_what_outlives_a_call_fails_it(ranks: Up) -> None:
    with pytest.raises(AssertionError, match="rank 0 left Thread shardqueue-left"):
        ranks(1).run(threaded)


def test_what_fails_in_a_thread_of_a_rank_fails_the_call(ranks: Up) -> None:
    with pytest.raises(AssertionError, match=r"rank 0 left UserWarning\('mind the step'\) in thread"):
        ranks(1).run(failing_unseen)


def test_a_group_that_cannot_be_destroyed_does_not_last(ranks: Up) -> None:
    group = ranks(2)
    before = group.run(pid)
    group.run(unable_to_leave)
    assert group.run(summed, [1.0, 2.0]) == [3.0, 3.0]
    assert not set(group.pids) & set(before)


def test_ranks_end_with_their_launcher() -> None:
    group = Ranks(2, lightning=False)
    try:
        assert group.run(imported) == [False, False]
        pids = group.pids
        os.kill(group.launcher_pid, signal.SIGKILL)
        for rank in pids:
            await_end(rank)
    finally:
        group.close()


def test_the_ranks_see_the_environment_and_the_directory_of_the_test(
    ranks: Up, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home = os.environ["HOME"]
    monkeypatch.setenv("OF_THIS_TEST", "alone")
    monkeypatch.delenv("HOME")
    monkeypatch.chdir(tmp_path)
    assert ranks(2).run(surroundings) == [("alone", None, str(tmp_path))] * 2
    monkeypatch.undo()
    assert ranks(2).run(surroundings) == [(None, home, str(Path.cwd()))] * 2
