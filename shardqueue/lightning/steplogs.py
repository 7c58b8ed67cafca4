"""What a training step logs, where a step has many micro-batches and each rank another number of them.

Lightning reduces a value logged with `on_step=True, sync_dist=True` over ranks as soon as it is logged. No reduction
may happen inside a micro-batch, which the other ranks may not have; such values are kept instead, told to all ranks
with the step's gradients, and put where Lightning looks for the step's value: the mean over all its samples, or the
sum, the least or the greatest. A value logged without `sync_dist` becomes that of this rank's samples in the step.

At the end of an epoch Lightning reduces what was logged, one name after the other, so all ranks must have the same
names in the same order. A rank that never had a micro-batch in which something is logged would leave the others
waiting. So ranks also tell which names are new, and those who lack one enter it with nothing in it. A mean that each
rank has of its own is entered as that of another rank, with no weight: not finite, it would end training where it is
watched.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync

from shardqueue.lightning.evaluation import emptied

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from lightning.pytorch import Trainer

Reduced = tuple[torch.Tensor, float]
"""A value, and for how many samples it stands."""
BUILTIN: dict[str, Callable[..., Any]] = {"max": max, "min": min, "sum": sum}
NOTHING = 1e-20
"""Samples that do not count beside any."""
SAID = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx")
"""What Lightning knows of a logged name, and another rank can be told as it is."""


class StepLogs:
    """The values of one rank's micro-batches, and the names that all ranks have logged in an epoch."""

    def __init__(self) -> None:
        self._values: dict[str, tuple[str, Reduced]] = {}
        self._names: list[str] = []
        self._epoch = -1

    @contextmanager
    def micro_batch(self, trainer: Trainer, samples: int) -> Iterator[None]:
        """In a micro-batch of so many samples: what is logged meanwhile is noted."""
        before = {name: metric._forward_cache for name, metric in _by_step(trainer)}
        yield
        for name, metric in _by_step(trainer):
            value = metric._forward_cache
            if value is None or value is before.get(name):
                continue
            op, one = metric.meta.reduce_fx.__name__, (value.detach().clone(), float(samples))
            noted = self._values.get(name)
            self._values[name] = op, one if noted is None else _merged(op, noted[1], one)

    def take(self, trainer: Any) -> dict[str, Any]:
        """What is to be told to the others: the values that they reduce, and names that not all know yet."""
        if self._epoch != trainer.current_epoch:
            self._names, self._epoch = [], trainer.current_epoch
        metrics = dict(_logged(trainer))
        values = {
            name: [op, value.item(), samples]
            for name, (op, (value, samples)) in self._values.items()
            if metrics[name].meta.sync.should
        }
        names = {name: _said(metric) for name, metric in metrics.items() if name not in self._names}
        return {**({"values": values} if values else {}), **({"names": names} if names else {})}

    def spread(self, trainer: Any, said: Sequence[Mapping[str, Any]]) -> None:
        """Show Lightning the values of the step, and the names of all ranks, from what all ranks said."""
        found, self._values = dict(self._values), {}
        together: dict[str, tuple[str, Reduced]] = {}
        for rank in said:
            for name, (op, value, samples) in rank.get("values", {}).items():
                one = torch.tensor(value, dtype=torch.float64), samples
                together[name] = op, _merged(op, together[name][1], one) if name in together else one
        self._enter(trainer, {name: told for rank in said for name, told in rank.get("names", {}).items()})
        found |= together
        for name, metric in _by_step(trainer):
            if name in found:
                value = found[name][1][0].to(metric.value)
                metric._forward_cache = value
                if not metric.meta.on_epoch:
                    metric.value = value

    def _enter(self, trainer: Any, told: Mapping[str, Mapping[str, Any]]) -> None:
        """Know the names that some rank has logged, in the order in which all know them."""
        results = trainer._results
        known = dict(_logged(trainer))
        for name in told:
            if name not in known:
                results[name] = _entered(trainer, told[name])
        self._names += told
        if told:
            for name in self._names:
                results[name] = results.pop(name)


def _merged(op: str, a: Reduced, b: Reduced) -> Reduced:
    samples = a[1] + b[1]
    if op == "sum":
        return a[0] + b[0], samples
    if op in ("max", "min"):
        return getattr(torch, op + "imum")(a[0], b[0]), samples
    return (a[0] * a[1] + b[0] * b[1]) / samples, samples


def _logged(trainer: Any) -> Iterator[tuple[str, Any]]:
    """What was logged in this epoch and is not one rank's own affair."""
    for name, metric in trainer._results.valid_items():
        sync = metric.meta.sync
        if not sync.rank_zero_only and sync.group is None:
            yield name, metric


def _by_step(trainer: Any) -> Iterator[tuple[str, Any]]:
    for name, metric in _logged(trainer):
        if metric.is_tensor and metric.meta.on_step:
            yield name, metric


def _said(metric: Any) -> dict[str, Any]:
    """A logged name, as JSON."""
    meta, reduce_fx = metric.meta, metric.meta.reduce_fx
    own = metric.is_tensor and meta.on_epoch and meta.is_mean_reduction and not meta.sync.should
    return {
        "meta": {name: getattr(meta, name) for name in SAID},
        "op": [reduce_fx.__name__, reduce_fx in BUILTIN.values()],
        "together": meta.sync.should,
        "dtype": str(metric.value.dtype).removeprefix("torch.") if metric.is_tensor else None,
        "metric": meta.metric_attribute,
        "mean": (metric.value / metric.cumulated_batch_size).item() if own else None,
    }


def _entered(trainer: Any, told: Mapping[str, Any]) -> Any:
    """The same, of no micro-batch."""
    name, builtin = told["op"]
    reduce_fx: Callable[..., Any] = BUILTIN[name] if builtin else getattr(torch, name)
    meta = _Metadata(**told["meta"], reduce_fx=reduce_fx, metric_attribute=told["metric"])
    meta.sync = _Sync(_should=told["together"], fn=trainer.strategy.reduce)
    metric = _ResultMetric(meta, told["dtype"] is not None).to(trainer.strategy.root_device)
    if told["dtype"] is None:
        metric.value = trainer.lightning_module.get_submodule(told["metric"])
    else:
        metric.value = metric.value.to(getattr(torch, told["dtype"]))
    emptied(metric)
    if told["mean"] is not None:
        metric.cumulated_batch_size = metric.cumulated_batch_size + NOTHING
        metric.value = metric.value + NOTHING * told["mean"]
    return metric
