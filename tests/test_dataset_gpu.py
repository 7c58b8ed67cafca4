"""The dataset beside a GPU: pinned batches keep their step, and nothing of ours makes the CPU wait for the GPU."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from shardqueue import Session, SharedQueueDataset, Step, Unit, unit_grid

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
UNITS = unit_grid(40, 4, 2)
WAITS = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "aten::_local_scalar_dense",
)


@dataclass
class Pair:
    inputs: torch.Tensor
    name: str

    def pin_memory(self) -> Pair:
        return Pair(self.inputs.pin_memory(), self.name)


def load(unit: Unit) -> Iterator[tuple[int, Any]]:
    for step in unit.steps:
        yield (
            step,
            {"pair": Pair(torch.full((64,), float(step)), f"s{step}"), "lane": torch.tensor(unit.lane)},
        )


class Plain(IterableDataset[Any]):
    """The same batches without a queue."""

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        assert worker is not None
        for unit in list(UNITS.values())[worker.id :: worker.num_workers]:
            yield from load(unit)


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_pinned_batches_keep_their_step(tmp_path: Path, context: str) -> None:
    dataset = SharedQueueDataset(UNITS, tmp_path, load)
    loader: Any = DataLoader(
        dataset, batch_size=None, num_workers=2, pin_memory=True, multiprocessing_context=context
    )
    seen: Counter[tuple[int, int]] = Counter()
    with Session(tmp_path) as session:
        for step, batch in session.track(loader):
            assert isinstance(step, Step)
            assert step == UNITS[step.unit].first + step.index
            assert batch["pair"].inputs.is_pinned()
            assert batch["lane"].is_pinned()
            seen[int(batch["pair"].inputs[0]), int(batch["lane"])] += 1
            session.step()
        assert session.rates.batches == 80
    assert seen == Counter((step, lane) for step in range(40) for lane in range(2))


def waits(items: Any, session: Session | None) -> Counter[str]:
    """Train a little on the GPU; how often the CPU waited for it, by call."""
    weight = torch.zeros(64, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            for _, batch in items:
                weight += batch["pair"].inputs.to("cuda", non_blocking=True)
                if session:
                    session.step(samples=1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    counts = {event.key: event.count for event in profiler.key_averages()}
    assert any("emcpy" in name for name in counts), "the profiler saw the copies"
    return Counter({name: counts.get(name, 0) for name in WAITS})


def test_no_batch_makes_the_cpu_wait(tmp_path: Path) -> None:
    options: dict[str, Any] = {"batch_size": None, "num_workers": 2, "pin_memory": True}
    plain = waits(([index, batch] for index, batch in DataLoader(Plain(), **options)), None)
    dataset = SharedQueueDataset(UNITS, tmp_path, load)
    with Session(tmp_path) as session:
        ours = waits(session.track(DataLoader(dataset, **options)), session)
    assert ours["aten::_local_scalar_dense"] == plain["aten::_local_scalar_dense"] == 0
    assert ours.total() <= plain.total(), (ours, plain)
