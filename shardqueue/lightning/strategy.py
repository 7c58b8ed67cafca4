"""`ElasticStrategy`: an unmodified LightningModule, trained in elastic steps (see `elastic`).

One Lightning batch is one optimizer step of `micro_batches` micro-batches. The loader of the `SharedQueueDataModule`
gives a rank its first one, if it can have one at once; `backward` goes through the others, after Lightning has zeroed
the gradients and before it clips them, and adds up. Each is moved to the device and run as Lightning does with the
batch of a loader. Only `backward` waits for other ranks: they may be in a hook that waits for this one, such as
`on_train_batch_start` with a value logged by `sync_dist`.

The module is not wrapped by DistributedDataParallel: there is one sum a step, over what the ranks have. What
`training_step` logs counts for each micro-batch; a value logged with `on_step=True, sync_dist=True` becomes that of
the whole step. A batch's hooks see a rank's first micro-batch of the step; where it had none when the step began,
its last batch before, and no loss.
"""

from __future__ import annotations

from contextlib import contextmanager
from datetime import timedelta  # noqa: TC003 - read by the command line
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.distributed.constants import default_pg_timeout
from torchmetrics import Metric

from shardqueue.agreement import world, world_size
from shardqueue.elastic import Elastic, check_function, check_micro_batches
from shardqueue.errors import ClosedError, InvalidInputError
from shardqueue.flat import broadcast_module
from shardqueue.lightning.steplogs import StepLogs
from shardqueue.replicas import refuse_model
from shardqueue.units import check_int

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator

    from lightning.pytorch import LightningModule, Trainer
    from torch import Tensor
    from torch.nn import Module

    from shardqueue.dataset import SharedQueueDataset
    from shardqueue.elastic import ElasticStep
    from shardqueue.lightning.stay import Stay

USE_DDP = 'or train in lockstep with strategy="ddp"'


class ElasticStrategy(DDPStrategy):
    """Data parallel training in which the ranks of a step share out its micro-batches by their speed.

        trainer = Trainer(strategy=ElasticStrategy(micro_batches=32), ...)
        trainer.fit(model, datamodule=SharedQueueDataModule(...))

    A micro-batch is one batch of the data module's loader; `micro_batches` of them make an optimizer step, whatever
    the number of ranks, so the global batch is `micro_batches * batch_size`. The gradients are those of the mean over
    the step's samples. Several micro-batches a rank are needed for shares that match unequal speeds: with four ranks
    of speeds 1, 1/2, 1/2, 1/4, from 9 on.

    Args:
        micro_batches: of a step, on all ranks together; at least one a rank.
        group: micro-batches that this rank takes at once, joined into one batch, where it has the memory.
        weight: from a batch to what it counts; its number of samples by default. For token-level losses: its tokens.
        join: from a list of batches to one, for `group`; by default tensors are joined along their first dimension.
        process_group_backend, timeout, start_method: as for Lightning's `DDPStrategy`.
        settings: nothing else; arguments of `DistributedDataParallel`, which does not wrap the module, are refused.

    Raises:
        InvalidInputError: an argument is out of range. From `Trainer.fit`: the module, the Trainer or the data do not
            allow elastic steps; the message says what to use instead.
    """

    weight: Callable[[Any], float] | None
    join: Callable[[list[Any]], Any] | None

    def __init__(
        self,
        micro_batches: int,
        *,
        group: int = 1,
        weight: Callable[[Any], float] | None = None,
        join: Callable[[list[Any]], Any] | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **settings: object,
    ) -> None:
        self.micro_batches: int = check_int("micro_batches", micro_batches, 1)
        self.group: int = check_int("group", group, 1)
        check_function("weight", weight)
        check_function("join", join)
        self.weight, self.join = weight, join
        if settings:
            bound = "left out: no DistributedDataParallel wraps the module"
            remedy = "leave it out (unused parameters are no problem); plugins go to Trainer(plugins=...)"
            raise InvalidInputError("settings", min(settings), bound, remedy)
        super().__init__(
            process_group_backend=process_group_backend, timeout=timeout, start_method=start_method
        )
        self.step: ElasticStep | None = None
        self._stay: Stay | None = None
        self._engine: Elastic | None = None
        self._logs = StepLogs()
        self._more: tuple[Any, ...] = ()
        self._inside = False
        self._before = 0

    # -- for the data module -----------------------------------------------------------------------------

    @property
    def samples(self) -> int:
        """Samples that this rank trained in the step."""
        return 0 if self.step is None else self.step.samples

    def train(
        self, stay: Stay, dataset: SharedQueueDataset, loader: Iterable[Any], **how: Any
    ) -> Generator[tuple[Any, Any]]:
        """(dataset step, batch) of this rank's first micro-batch of each step; its last one where it has none yet.

        Args:
            stay: in the run.
            dataset, loader: as for `Elastic.train`.
            how: likewise.
        """
        if self._stay is not stay or self._engine is None:
            self.leave()
            self._stay = stay
            self._engine = Elastic(
                *(stay.session, self._module, self.micro_batches),
                process_group=world(),
                group=self.group,
                weight=self.weight,
                join=self.join,
            )
        last: Any = None
        for step in self._engine.train(dataset, loader, **how):
            self.step, self._before = step, 0
            item = step.first()
            last = item or last or step.stock.sample()
            yield last

    def leave(self) -> None:
        """Take the hooks off the module."""
        engine, self._engine, self._stay, self.step = self._engine, None, None, None
        self._logs = StepLogs()
        if engine is not None:
            engine.close()

    # -- for Lightning -----------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Refuse what cannot be shared out, before anything is set up."""
        if self._trainer.state.fn == TrainerFn.FITTING:
            self._refuse()
        super().setup_environment()

    def _setup_model(self, model: Module) -> Any:
        """All ranks begin with the parameters and buffers of rank 0."""
        refuse_model(model)
        if world_size() > 1:
            broadcast_module(model, world())
        return model

    def _register_ddp_hooks(self) -> None:
        """There is nothing to register them on."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The training step of a micro-batch; nothing where this rank has none yet."""
        step = self._current
        self._more = args[1:]
        if not step.micro_batches:
            return torch.zeros((), device=self.root_device, requires_grad=True)
        with self._alone():
            output = super().training_step(*args, **kwargs)
        if output is None:
            bound = "a loss for every micro-batch, since all ranks count on its gradients"
            remedy = (
                "return a loss of 0 that depends on the parameters, or leave such batches out of the data"
            )
            raise InvalidInputError("what training_step returned", None, bound, remedy)
        return output

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Backward of this rank's micro-batches of the step; then every rank has the gradients of all."""
        step, trainer = self._current, self._trainer
        if step.counts:
            bound = "one that evaluates its closure once a step"
            raise InvalidInputError(
                "optimizer", _name(optimizer), bound, f"use SGD, AdamW or the like, {USE_DDP}"
            )
        if step.micro_batches:
            with self._alone():
                closure_loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        else:
            self._scale(closure_loss)
        self._before = step.samples
        with self._further():
            for _, batch in step:
                loss = ClosureResult.from_training_step_output(self._run(batch)).closure_loss
                assert loss is not None
                with self._alone():
                    super().backward(loss, optimizer, *args, **kwargs)
                self._before = step.samples
        step.reduce(self._logs.take(trainer))
        self._logs.spread(trainer, step.said)
        assert self._stay is not None
        if self._stay.marks:
            self._stay.hand(step.samples)
        return closure_loss

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """As in DDP; but in a micro-batch, which the other ranks may not have, nothing is reduced."""
        return tensor if self._inside else super().reduce(tensor, group, reduce_op)

    def all_gather(self, *args: Any, **kwargs: Any) -> Any:
        """As in DDP, but refused in a micro-batch."""
        self._refuse_inside("all_gather")
        return super().all_gather(*args, **kwargs)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """As in DDP, but refused in a micro-batch."""
        self._refuse_inside("barrier")
        super().barrier(*args, **kwargs)

    def broadcast(self, *args: Any, **kwargs: Any) -> Any:
        """As in DDP, but refused in a micro-batch."""
        self._refuse_inside("broadcast")
        return super().broadcast(*args, **kwargs)

    def teardown(self) -> None:
        """Leave the module as it was."""
        self.leave()
        super().teardown()

    # -- inside ------------------------------------------------------------------------------------------

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _trainer(self) -> Trainer:
        return self._module.trainer

    @property
    def _current(self) -> ElasticStep:
        if self.step is None:
            raise ClosedError(
                "this batch is not from the SharedQueueDataModule's own train_dataloader(), which shares out the "
                "steps; do not replace that loader"
            )
        return self.step

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """In the newest micro-batch, which the other ranks may not have."""
        self._inside = True
        try:
            with self._logs.micro_batch(self._trainer, self._current.samples - self._before):
                yield
        finally:
            self._inside = False

    def _refuse_inside(self, name: str) -> None:
        if self._inside:
            raise ClosedError(
                f"{name} was called for a micro-batch, which the other ranks may not have, so that it would wait for "
                "ever; call it once a step, in on_train_batch_end, or log with sync_dist=True"
            )

    @contextmanager
    def _further(self) -> Iterator[None]:
        """In the micro-batches after the first, which for Lightning are one batch with it: logs begin but once."""
        trainer: Any = self._trainer
        results, connector = trainer._results, trainer._logger_connector
        before = results.batch, results.batch_size, connector._first_loop_iter
        connector._first_loop_iter = False
        try:
            yield
        finally:
            results.batch, results.batch_size, connector._first_loop_iter = before

    def _run(self, batch: Any) -> Any:
        """The training step of one more micro-batch, prepared as Lightning prepares the batch of a loader."""
        trainer: Any = self._trainer
        batch = self.precision_plugin.convert_input(batch)
        batch = self._module._on_before_batch_transfer(batch, dataloader_idx=0)
        batch = call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)
        trainer._results.batch, trainer._results.batch_size = batch, None
        return call._call_strategy_hook(trainer, "training_step", batch, *self._more)

    def _scale(self, loss: Tensor) -> None:
        """A GradScaler must have scaled something before it unscales."""
        scaler = getattr(self.precision_plugin, "scaler", None)
        if scaler is not None:
            scaler.scale(loss)

    def _refuse(self) -> None:
        """Refuse what cannot be shared out.

        Raises:
            InvalidInputError: naming it, and what to use instead.
        """
        from shardqueue.lightning.datamodule import SharedQueueDataModule  # which knows this module

        trainer: Any = self._trainer
        if not self._module.automatic_optimization:
            bound = (
                "True: in manual optimization the module itself runs backward, for the one batch it is given"
            )
            remedy = f"use automatic optimization with ElasticStrategy, {USE_DDP}"
            raise InvalidInputError("automatic_optimization", False, bound, remedy)
        schedules = any(isinstance(one, GradientAccumulationScheduler) for one in trainer.callbacks)
        if trainer.accumulate_grad_batches != 1 or schedules:
            bound = "1: an elastic step accumulates its micro-batches already"
            remedy = "leave it out, and multiply micro_batches instead"
            value = "a GradientAccumulationScheduler" if schedules else trainer.accumulate_grad_batches
            raise InvalidInputError("accumulate_grad_batches", value, bound, remedy)
        if not isinstance(getattr(trainer, "datamodule", None), SharedQueueDataModule):
            bound = "a SharedQueueDataModule, whose micro-batches the ranks take by their speed"
            remedy = "pass trainer.fit(model, datamodule=SharedQueueDataModule(...))"
            raise InvalidInputError("datamodule", getattr(trainer, "datamodule", None), bound, remedy)
        if self._layer_sync is not None:
            bound = "False: SyncBatchNorm waits for all ranks in each forward, and they run unequal numbers"
            remedy = "leave it out (BatchNorm's buffers are averaged over the micro-batches)"
            raise InvalidInputError("sync_batchnorm", True, bound, remedy)
        if is_param_in_hook_signature(self._module.training_step, "dataloader_iter", explicit=True):
            bound = "one that is given a batch: an iterator gives one a step, and a rank may have several"
            remedy = "write training_step(batch, batch_idx)"
            raise InvalidInputError("training_step", "dataloader_iter", bound, remedy)
        check_micro_batches(self.micro_batches, trainer.world_size)
        refuse_model(self._module)
        for name, module in self._module.named_modules():
            if isinstance(module, Metric) and module.dist_sync_on_step:
                bound = "False: ranks run unequal numbers of training steps"
                raise InvalidInputError(f"{name}.dist_sync_on_step", True, bound, "leave it out")


def _name(optimizer: Any) -> str:
    """Of the class that the user has made, which Lightning wraps."""
    return type(getattr(optimizer, "optimizer", optimizer)).__name__
