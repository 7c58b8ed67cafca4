"""What a training step logs with `on_step=True, sync_dist=True`, for a step of many micro-batches.

Such a value is reduced over ranks as soon as it is logged; but ranks have different numbers of micro-batches, so no
reduction may happen inside one. Values are kept by name instead, told to all ranks with the step's gradients, and put
where Lightning looks for the step's value: the mean over all its samples, or the sum, the least or the greatest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from lightning.pytorch import Trainer

Reduced = tuple[torch.Tensor, float]
"""A value, and for how many samples it stands."""


class StepLogs:
    """The values of one rank's micro-batches, by name."""

    def __init__(self) -> None:
        self._values: dict[str, tuple[str, Reduced]] = {}

    def note(self, trainer: Trainer, samples: int) -> None:
        """A micro-batch of so many samples is over."""
        for name, metric in _synced(trainer):
            if metric._forward_cache is None:
                continue
            op = str(metric.meta.sync.op)
            one = metric._forward_cache.detach().clone(), float(samples)
            metric._forward_cache = None
            before = self._values.get(name)
            self._values[name] = op, one if before is None else _merged(op, before[1], one)

    def take(self) -> dict[str, list[Any]]:
        """What is to be told to the others; nothing is kept."""
        values, self._values = self._values, {}
        return {name: [op, value.item(), samples] for name, (op, (value, samples)) in values.items()}

    def spread(self, trainer: Trainer, said: Sequence[Mapping[str, Any]]) -> None:
        """Show Lightning the values of the step, from what all ranks said."""
        found: dict[str, Reduced] = {}
        for rank in said:
            for name, (op, value, samples) in rank.items():
                one = torch.tensor(value, dtype=torch.float64), samples
                found[name] = _merged(op, found[name], one) if name in found else one
        for name, metric in _synced(trainer):
            if name in found:
                value = found[name][0].to(metric.value)
                metric._forward_cache = value
                if not metric.meta.on_epoch:
                    metric.value = value


def _merged(op: str, a: Reduced, b: Reduced) -> Reduced:
    samples = a[1] + b[1]
    if op == "sum":
        return a[0] + b[0], samples
    if op in ("max", "min"):
        return getattr(torch, op + "imum")(a[0], b[0]), samples
    return (a[0] * a[1] + b[0] * b[1]) / samples, samples


def _synced(trainer: Any) -> Iterator[tuple[str, Any]]:
    for name, metric in trainer._results.items():
        if metric.is_tensor and metric.meta.on_step and metric.meta.sync.should:
            yield name, metric
