"""The learning rate by agreed progress, what is trained, and how the run goes in the user's loggers.

A rank's own dataset step must not set its learning rate: ranks drift apart, and replicas that take the same gradients
at different rates drift with them, with no error. So the rate is a function of the progress all ranks agreed on. What
is trained is known after an optimizer step, and told to the session then: accumulated gradients make several batches
trained at once.

The numbers come from what the ranks agreed on anyway. They go to the loggers and to the progress bar as plain
floats, past `LightningModule.log`: logging costs no collective, no tensor and no synchronisation with a GPU, and may
keep an interval of its own. The arithmetic is in `numbers`; the hooks connect it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from lightning.pytorch import Callback

from shardqueue.errors import ClosedError, InvalidInputError
from shardqueue.lightning.numbers import (
    group_factors,
    metrics,
    rank_rates,
    rate_at,
    seconds_left,
    separate_rates,
    set_rates,
    steps_left,
)
from shardqueue.units import check_count

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning.pytorch import LightningModule, Trainer
    from torch.optim import Optimizer

    from shardqueue.lightning.numbers import ParamGroup
    from shardqueue.progress import Agreed, RankState
    from shardqueue.session import Session

PROGRESS_BAR = {"lr": "learning_rate", "samples/s": "samples_per_second", "eta_s": "eta_seconds"}
"""What the progress bar shows, by its name there."""


@runtime_checkable
class AgreeingData(Protocol):
    """What the callback reads of `SharedQueueDataModule`."""

    session: Session | None
    agreed: Agreed | None
    samples: int


class SharedQueueCallback(Callback):
    """Sets the learning rate from agreed progress, tells the session what is trained, and logs how the run goes.

        Trainer(callbacks=[SharedQueueCallback(lambda progress: 0.1 * 0.999**progress)], ...)

    The learning rate is that of the dataset steps done before an optimizer step began. With gradient accumulation it
    is set for its first batch and kept: one rank that accumulates four batches then trains as four ranks do.

    The callback moves itself to the front, so that others find the step's learning rate set and its batches trained.
    `LearningRateMonitor` then logs the right rate in any order; with `logging_interval="step"`, since at the start of
    an epoch the rate is still that of the step before.

    Logged on the same steps and the same axis as `self.log` in a training step (by default), each after `prefix`:

    - `learning_rate`: the schedule's, before factors, where there is one.
    - `samples_per_second`, `rank_N/samples_per_second`: since the last time, of the run and of every rank.
    - `data_wait`, `rank_N/data_wait`: share of the time spent waiting for data, 0 to 1; the run's is the greatest.
      Beyond 16 ranks `ranks/..._min`, `_median` and `_max` stand for the ranks'.
    - `units_claimed`, `units_left`: of this epoch, by all ranks.
    - `repeated`: batches trained twice, to keep the ranks in step at the end of epochs.
    - `eta_seconds`: to the end of training as limited by `max_epochs` and `max_steps`; without limits, of the epoch.

    The progress bar shows `lr`, `samples/s` of the run and `eta_s`.

    In manual optimization a batch is trained once an optimizer that Lightning wraps (`self.optimizers()`) steps.

    Args:
        learning_rate: from dataset step to learning rate, the same function on every rank; the dataset step goes on
            over epochs, whatever the number of ranks. None leaves the learning rate alone.
        factors: what the learning rate is multiplied with in each parameter group: one number a group (of several
            optimizers, in their order), or by the groups' `name`, where groups not named have factor 1.
        log_every_n_steps: by default the Trainer's; 0 logs nothing.
        prefix: of each logged name.

    Raises:
        InvalidInputError: an argument is of another kind or out of range. From `Trainer.fit`: there is no
            `SharedQueueDataModule`; a Lightning scheduler sets the learning rate too; `factors` does not fit the
            optimizers; the schedule gave no learning rate.
    """

    def __init__(
        self,
        learning_rate: Callable[[int], float] | None = None,
        *,
        factors: Sequence[float] | Mapping[str, float] | None = None,
        log_every_n_steps: int | None = None,
        prefix: str = "shardqueue/",
    ) -> None:
        given: object = learning_rate
        if given is not None and not callable(given):
            bound = "a function from dataset step to learning rate, or None"
            remedy = "give a constant rate to the optimizer, and leave this out"
            raise InvalidInputError("learning_rate", given, bound, remedy)
        named: object = prefix
        if not isinstance(named, str):
            raise InvalidInputError("prefix", prefix, "a string", 'pass "" for none')
        if log_every_n_steps is not None:
            check_count("log_every_n_steps", log_every_n_steps)
        self.learning_rate = learning_rate
        self.factors: Sequence[float] | Mapping[str, float] | None = _checked(
            factors, learning_rate is not None
        )
        self.log_every_n_steps = log_every_n_steps
        self.prefix = prefix
        self._data: AgreeingData | None = None
        self._begin(0)

    def _begin(self, global_step: int) -> None:
        self._global_step = global_step
        self._rate: float | None = None
        self._accumulating = False
        self._samples = 0
        self._logged: tuple[RankState, ...] = ()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:  # noqa: ARG002
        """Refuse to fit without the data module this needs."""
        if stage != "fit":
            return
        data = getattr(trainer, "datamodule", None)
        if not isinstance(data, AgreeingData):
            remedy = "pass trainer.fit(model, datamodule=...) one, or leave SharedQueueCallback out"
            raise InvalidInputError("datamodule", data, "a SharedQueueDataModule", remedy)
        self._data = data
        others = [callback for callback in trainer.callbacks if callback is not self]  # type: ignore[attr-defined]
        trainer.callbacks = [self, *others]  # type: ignore[attr-defined]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Refuse what would set the learning rate too, and factors that do not fit."""
        if self.learning_rate is not None:
            self._refuse_schedulers(trainer)
            group_factors(_groups(trainer), self.factors)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Begin, where the restored state says."""
        self._begin(trainer.global_step)
        if self.learning_rate is not None:
            separate_rates(_groups(trainer))

    def on_train_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,  # noqa: ARG002
        batch: Any,  # noqa: ARG002
        batch_idx: int,  # noqa: ARG002
    ) -> None:
        """Set the learning rate of the optimizer step that begins or goes on with this batch."""
        if self.learning_rate is not None and not self._accumulating:
            self._refuse_schedulers(trainer)
            self._rate = rate_at(self.learning_rate, self._agreed().progress)
        self._set_rates(trainer)

    def on_before_optimizer_step(
        self,
        trainer: Trainer,
        pl_module: LightningModule,  # noqa: ARG002
        optimizer: Optimizer,  # noqa: ARG002
    ) -> None:
        """Set it again, against whatever set it in between."""
        self._set_rates(trainer)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,  # noqa: ARG002
        batch: Any,  # noqa: ARG002
        batch_idx: int,  # noqa: ARG002
    ) -> None:
        """Count the batch, and if an optimizer has stepped say that it and those before it are trained."""
        if self._data is not None:
            self._samples += self._data.samples
        self._accumulating = trainer.global_step == self._global_step
        if not self._accumulating:
            self._trained(trainer.global_step)
        if not self._accumulating or not pl_module.automatic_optimization:
            self._log(trainer)

    def _trained(self, global_step: int) -> None:
        if self._data is not None and self._data.session is not None:
            self._data.session.step(self._samples, global_step=global_step)
        self._global_step, self._samples = global_step, 0

    def _log(self, trainer: Trainer) -> None:
        step = trainer.fit_loop.epoch_loop._batches_that_stepped  # where Lightning puts what is logged now
        every = self.log_every_n_steps
        if every is None:
            every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if not every or (step + 1) % every:
            return
        agreed = self._agreed()
        rates, self._logged = rank_rates(agreed.ranks, self._logged), agreed.ranks
        eta = seconds_left(_steps_left(trainer, agreed), agreed.each, rates)
        found = metrics(agreed, rates, eta, self._rate)
        for logger in trainer.loggers:
            logger.log_metrics({f"{self.prefix}{name}": value for name, value in found.items()}, step=step)
        shown = {short: found[name] for short, name in PROGRESS_BAR.items() if name in found}
        trainer.progress_bar_metrics.update(shown)

    def _agreed(self) -> Agreed:
        if self._data is None or self._data.agreed is None:
            raise ClosedError(
                "the ranks did not agree on this training step: its batch is not from the SharedQueueDataModule's "
                "own train_dataloader(); do not replace that loader, or leave SharedQueueCallback out"
            )
        return self._data.agreed

    def _set_rates(self, trainer: Trainer) -> None:
        if self._rate is not None:
            groups = _groups(trainer)
            set_rates(groups, self._rate, group_factors(groups, self.factors))

    def _refuse_schedulers(self, trainer: Trainer) -> None:
        names = sorted({type(config.scheduler).__name__ for config in trainer.lr_scheduler_configs})
        if names:
            bound = f"the only schedule ({' and '.join(names)} would set the rate, too)"
            remedy = (
                "return only the optimizer from configure_optimizers (and leave out callbacks that make a scheduler, "
                "such as StochasticWeightAveraging), or pass learning_rate=None"
            )
            raise InvalidInputError("learning_rate", self.learning_rate, bound, remedy)


def _checked(
    factors: Sequence[float] | Mapping[str, float] | None, scheduled: bool
) -> Sequence[float] | Mapping[str, float] | None:
    if factors is None:
        return None
    if not scheduled:
        raise InvalidInputError("factors", factors, "left out where there is no learning_rate", "pass both")
    given: object = list(factors.values()) if isinstance(factors, Mapping) else factors
    if not isinstance(given, Sequence) or not all(_is_factor(value) for value in given):
        bound = "finite numbers of 0 or more, one for each parameter group or by their names"
        raise InvalidInputError("factors", factors, bound, "1 is the schedule's own rate, 0 trains nothing")
    return factors


def _is_factor(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value < math.inf


def _groups(trainer: Trainer) -> list[ParamGroup]:
    return [group for optimizer in trainer.optimizers for group in optimizer.param_groups]


def _steps_left(trainer: Trainer, agreed: Agreed) -> float:
    """By the Trainer's limits; `max_steps` counts optimizer steps, as many a batch as there were so far."""
    most = math.inf
    if trainer.max_steps >= 0 and trainer.global_step:
        batches = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        most = (trainer.max_steps - trainer.global_step) * batches / trainer.global_step
    epochs = -1 if trainer.max_epochs is None else trainer.max_epochs
    epochs_after = None if epochs < 0 else epochs - trainer.current_epoch - 1
    steps = min(agreed.steps, trainer.num_training_batches)
    return steps_left(agreed.step, int(steps), epochs_after, most)
