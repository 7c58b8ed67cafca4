"""Evaluation by speed, beside the collectives of a strategy.

In validation, test and predict each rank runs as many steps as it claims batches. That is right as long as a step is
the rank's own affair. `collectives_in_forward` says why it is not: sharded parameters are gathered in every forward,
for one, and a rank that is done would leave the others waiting. There all ranks run as many steps, and those without
a batch run `discarded_step`, for its collectives alone.

Plain DDP is between the two. Only `fit` wraps the module, and then the first forward of an evaluation broadcasts the
buffers, which a rank without any batch never joins; it would broadcast in its next training step instead, when the
others do not. `quiet_buffers` does it beforehand and keeps DDP from it.

Not seen here: collectives that a step asks for itself (`self.all_gather`, `self.log(on_step=True, sync_dist=True)`).
"""

from __future__ import annotations

import random
import warnings
from collections import deque
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import torch
import torch.distributed
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.seed import isolate_rng
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import Metric

from shardqueue.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from lightning.pytorch import Trainer

_OF_DDP = ("setup", "configure_ddp", "validation_step", "test_step", "predict_step")
"""What a strategy that evaluates as `DDPStrategy` does inherits from it."""
_SWITCHES = ("broadcast_buffers", "require_forward_param_sync")
"""What tells torch's DDP whether the next forward broadcasts buffers; the second, a forward sets itself."""
_STEPS = {
    RunningStage.SANITY_CHECKING: "validation_step",
    RunningStage.VALIDATING: "validation_step",
    RunningStage.TESTING: "test_step",
    RunningStage.PREDICTING: "predict_step",
}
_OF_TORCH = vars(Module()).keys() - {"training", "_buffers", "_non_persistent_buffers_set", "_modules"}
"""Attributes of a module that a step does not change, or that FSDP swaps in it: parameters and hooks."""
_WRAPPERS = (DistributedDataParallel, FullyShardedDataParallel)
_PLAIN = (
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.Tensor,
    np.ndarray,
    np.generic,
    list,
    dict,
    set,
    deque,
    tuple,
)


def collectives_in_forward(trainer: Trainer) -> str | None:
    """Why all ranks must run as many evaluation steps.

    A strategy that is not known to leave evaluation to the ranks counts as a reason: even steps cost a few that are
    discarded, uneven ones may never end.

    Args:
        trainer: With its strategy set up. Before that, what the module itself brings may be missed.

    Returns:
        The name of the strategy, the wrapper or the module that communicates in forward; None for DDP, and where
        there is one process.
    """
    if trainer.world_size == 1:
        return None
    strategy, model = trainer.strategy, trainer.strategy.model
    if any(getattr(type(strategy), name) is not getattr(DDPStrategy, name, None) for name in _OF_DDP):
        return type(strategy).__name__
    if not isinstance(model, LightningModule | DistributedDataParallel):
        return type(model).__name__
    return next(filter(None, map(_collective, model.modules())), None)


@contextmanager
def quiet_buffers(trainer: Trainer) -> Iterator[None]:
    """Evaluate inside `fit` without a broadcast of buffers in forward.

    All ranks enter together, before the first step: buffers become those of rank 0, as DDP's first forward would make
    them. They leave on their own, after the last step; that is not when the loader ends, since Lightning fetches a
    batch ahead. Nothing to do where no DDP broadcasts buffers, or where `collectives_in_forward` names DDP.
    """
    model = trainer.strategy.model
    modules = model.modules() if model is not None else ()
    replicas = [module for module in modules if _broadcasts(module) and _has_switches(module)]
    before = [{name: getattr(replica, name) for name in _SWITCHES} for replica in replicas]
    for replica in replicas:
        _broadcast_buffers(replica)
    try:
        for replica in replicas:
            replica.broadcast_buffers = False
        yield
    finally:
        for replica, switches in zip(replicas, before, strict=True):
            for name, value in switches.items():
                setattr(replica, name, value)


def discarded_step(trainer: Trainer, batch: Any, batch_idx: int) -> None:
    """Run the evaluation step of the current stage for its collectives alone.

    The step is called as Lightning calls it, in evaluation mode: a rank without any batch finds out while Lightning
    fetches ahead, before the module is set to it. What the step logs is dropped, and what it changed is put back:
    random states, the batch, and on the module and in all it holds buffers, attributes, metrics, containers, arrays,
    random generators, and objects with nothing but plain attributes, such as an average meter. Parameters, memory
    maps and other objects are left alone. All else is copied for the step, what metrics have gathered included.

    A rank that had no batch at all must still compute what the others do at the end. So names that this evaluation
    has not logged on this rank are entered with nothing in them.

    Args:
        trainer: Inside an evaluation loop; batch hooks and callbacks are not called.
        batch: As a loader yields it; it can be discarded again.
        batch_idx: What the step is told; a `dataloader_idx` it is not.

    Raises:
        InvalidInputError: No evaluation is going on.
    """
    stage, module = trainer.state.stage, trainer.lightning_module
    if stage not in _STEPS:
        raise InvalidInputError(
            "stage", stage, f"one of {', '.join(_STEPS)}", "discard steps only while the Trainer evaluates"
        )
    name = _STEPS[stage]
    takes_index = is_param_in_hook_signature(getattr(module, name), "batch_idx", min_args=2)
    with isolate_rng(), _unlogged(trainer), _put_back(trainer.strategy.model, batch):
        call._call_lightning_module_hook(trainer, f"on_{name.removesuffix('step')}model_eval")
        batch = trainer.precision_plugin.convert_input(batch)
        batch = module._on_before_batch_transfer(batch)
        batch = call._call_strategy_hook(trainer, "batch_to_device", batch)
        call._call_strategy_hook(trainer, name, *((batch, batch_idx) if takes_index else (batch,)))


# -- collectives ---------------------------------------------------------------------------------------------


def _collective(module: Module) -> str | None:
    """What in a module communicates in forward, its submodules aside."""
    name = type(module).__name__
    if isinstance(module, FullyShardedDataParallel | FSDPModule):
        return name
    if any(isinstance(parameter, DTensor) for parameter in module.parameters(recurse=False)):
        return f"{name} with DTensor parameters"
    if isinstance(module, Metric) and module.dist_sync_on_step:
        return f"{name} with dist_sync_on_step"
    if _broadcasts(module) and not _has_switches(module):
        return f"{name} with buffers"
    return None


def _broadcasts(module: Module) -> TypeGuard[DistributedDataParallel]:
    if not isinstance(module, DistributedDataParallel) or not getattr(module, "broadcast_buffers", True):
        return False
    return any(True for _ in module.buffers())


def _has_switches(module: Module) -> bool:
    return all(hasattr(module, name) for name in _SWITCHES)


@torch.no_grad()
def _broadcast_buffers(replica: DistributedDataParallel) -> None:
    group = replica.process_group
    source = torch.distributed.get_global_rank(group, 0)
    for name, buffer in replica.module.named_buffers():
        if name not in replica.parameters_to_ignore:
            whole = buffer.contiguous()
            torch.distributed.broadcast(whole, source, group)
            if whole is not buffer:
                buffer.copy_(whole)


# -- without a trace -----------------------------------------------------------------------------------------


@contextmanager
def _unlogged(trainer: Trainer) -> Iterator[None]:
    """Let a step log into results and loggers that are thrown away."""
    loop: Any = trainer._active_loop
    results, loggers = loop._results, trainer.loggers
    aside = _ResultCollection(training=False)
    trainer.loggers = [DummyLogger() for _ in loggers]
    if results is not None:
        loop._results = aside
    try:
        yield
    finally:
        trainer.loggers, loop._results = loggers, results
    for key, metric in aside.items():
        if key not in results or results[key].has_reset:
            results[key] = emptied(metric)


def emptied(metric: _ResultMetric) -> _ResultMetric:
    """A logged value as if of no batch; where it is a metric of the module, that one counts."""
    for name, default in metric._defaults.items():
        setattr(metric, name, torch.as_tensor(default).to(getattr(metric, name), copy=True))
    metric._forward_cache = None
    metric.compute = partial(_compute, metric.compute)  # type: ignore[method-assign]
    return metric


def _compute(compute: Callable[[], Any]) -> Any:
    """Compute what may be of no batch on this rank: other ranks have some."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The ``compute`` method of metric")
        return compute()


@contextmanager
def _put_back(*roots: Any) -> Iterator[None]:
    """Undo, in place, what changes meanwhile in these and in all they hold."""
    seen: dict[int, object] = {}
    undo: list[Callable[[], object]] = []
    left = list(roots)
    while left:
        value = left.pop()
        if id(value) not in seen:
            seen[id(value)] = value
            undo.extend(_undo(value))
            left.extend(_held(value))
    try:
        yield
    finally:
        for restore in undo:
            restore()


def _held(value: Any) -> Iterable[Any]:
    """What a value holds that can change while the value itself does not."""
    if isinstance(value, Module):
        return _attributes(value).values()
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, list | tuple | set | deque):
        return value
    return _record(value).values()


def _undo(value: Any) -> Iterator[Callable[[], object]]:
    """What puts a value back as it is now, what it holds aside."""
    if isinstance(value, torch.Tensor):
        if not isinstance(value, Parameter):
            yield partial(value.data.copy_, value.detach().clone())
    elif isinstance(value, np.ndarray):
        if value.flags.writeable and not isinstance(value, np.memmap):
            yield partial(np.copyto, value, value.copy())
    elif isinstance(value, torch.Generator):
        yield partial(value.set_state, value.get_state())
    elif isinstance(value, random.Random):
        yield partial(value.setstate, value.getstate())
    elif isinstance(value, np.random.Generator):
        yield partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    elif isinstance(value, list | deque):
        yield from (value.clear, partial(value.extend, list(value)))
    elif isinstance(value, dict):
        yield from (value.clear, partial(value.update, dict(value)))
    elif isinstance(value, set):
        yield from (value.clear, partial(value.update, set(value)))
    elif isinstance(value, _WRAPPERS):
        yield partial(vars(value).update, _attributes(value))
    elif isinstance(value, Module):
        yield partial(_reset, vars(value), frozenset(vars(value)), _attributes(value))
    elif fields := _record(value):
        yield partial(_reset, vars(value), frozenset(fields), fields)


def _reset(fields: dict[str, Any], names: frozenset[str], before: dict[str, Any]) -> None:
    for name in fields.keys() - names:
        del fields[name]
    fields.update(before)


def _attributes(module: Module) -> dict[str, Any]:
    """A module's own attributes; few of a wrapper, whose state is that of its collectives."""
    if isinstance(module, _WRAPPERS):
        return {"_modules": module._modules, "training": module.training}
    own = {name: value for name, value in vars(module).items() if name not in _OF_TORCH}
    return {name: value for name, value in own.items() if not _is_freed(value)}


def _record(value: Any) -> dict[str, Any]:
    """The attributes of an object that has none but plain ones."""
    fields = getattr(value, "__dict__", None)
    if not isinstance(fields, dict) or not all(isinstance(field, _PLAIN) for field in fields.values()):
        return {}
    return dict(fields)


def _is_freed(value: Any) -> bool:
    """Whether this is an FSDP's view of parameters that it has not gathered: its memory is given back."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return False
    return value.numel() > 0 and value.untyped_storage().nbytes() == 0


def average_counts_exactly(strategy: Any) -> None:
    """Lightning divides a synchronised mean by the mean count of samples, and that it would truncate."""
    reduce = strategy.reduce

    def reduce_exactly(tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        counts = (
            isinstance(tensor, torch.Tensor)
            and not tensor.is_floating_point()
            and torch.distributed.is_initialized()
        )
        return reduce(tensor.double() if counts and reduce_op == "mean" else tensor, group, reduce_op)

    if "reduce" not in vars(strategy):
        strategy.reduce = reduce_exactly  # no partial: Lightning copies what one holds at every `self.log`
