"""Going on from a checkpoint: the Trainer's counters, where they do not fit an epoch that goes on.

A Trainer decides once how many batches an epoch has. Where a state was loaded, the epoch that goes on has as many as
were done and as are left, which may be another number than that of the epochs after it: the number of ranks may have
changed. So the Trainer looks at its data again when it has restored its counters, and after that epoch. Else it would
pass over the batches at an epoch's end, or over its validation.

Of a checkpoint at the end of an epoch the Trainer may take the counters over into the next one (where `max_steps` is
set, or where the last batch was not yet counted); an epoch that begins is begun from its first batch. Where training
was stopped in the middle of an epoch, the Trainer took it for over; it goes on.

Batches whose gradients were accumulated and lost count as not done: they come again, in a window that begins anew, so
that the epoch has as many batches and optimizer steps as without the stop.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from lightning.pytorch import Callback

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


@dataclass(frozen=True, slots=True)
class Place:
    """Where the Trainer goes on: after `done` steps of an epoch."""

    epoch: int
    done: int


class GoingOn(Protocol):
    """What has to know where the Trainer goes on."""

    place: Place | None


class Restart(Callback):
    """Tells `data` where the Trainer goes on, and has the Trainer look at its data again, then and an epoch later."""

    def __init__(self, data: GoingOn) -> None:
        self._data = data

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """The counters are restored."""
        fit_loop = trainer.fit_loop
        if _is_cut(trainer):
            _go_back(trainer)
        elif fit_loop.restarted_on_epoch_end:  # `max_steps` is set: else that epoch would be counted twice
            fit_loop.epoch_progress.increment_completed()
            fit_loop.reset_restart_stage()
        place = place_of(trainer)
        place = self._data.place = replace(place, done=place.done - _begin_window(trainer, place.done))
        if not place.done:
            _begin_epoch(trainer)
        _look_again(trainer)
        fit_loop.setup_data()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """The epoch that went on is over."""
        if self._data.place is not None:
            self._data.place = None
            _look_again(trainer)


def place_of(trainer: Trainer) -> Place:
    """Where a Trainer goes on that has restored its counters and not begun."""
    epochs: Any = trainer.fit_loop.epoch_progress.current
    batches = trainer.fit_loop.epoch_loop.batch_progress
    total: Any = batches.total
    uncounted = total.ready == total.started == total.processed == total.completed + 1
    done = batches.current.completed + uncounted if epochs.processed < epochs.ready else 0
    return Place(trainer.current_epoch, done)


def _begin_window(trainer: Trainer, done: int) -> int:
    """Take back the batches since the last optimizer step; return how many."""
    if not trainer.lightning_module.automatic_optimization:
        return 0
    back = done % trainer.accumulate_grad_batches
    batches = trainer.fit_loop.epoch_loop.batch_progress
    for progress in (batches.total, batches.current):
        for name in ("ready", "started", "processed", "completed"):
            setattr(progress, name, max(0, getattr(progress, name) - back))
    return back


def _is_cut(trainer: Trainer) -> bool:
    """Whether training was stopped in the middle of an epoch, which the Trainer has then taken for over."""
    epochs: Any = trainer.fit_loop.epoch_progress.current
    batches = trainer.fit_loop.epoch_loop.batch_progress
    between = epochs.processed == epochs.started == epochs.ready
    return between and batches.current.completed > 0 and not batches.is_last_batch


def _go_back(trainer: Trainer) -> None:
    """Go on in the middle of the last epoch."""
    fit_loop = trainer.fit_loop
    epochs: Any = fit_loop.epoch_progress
    for progress in (epochs.total, epochs.current):
        progress.processed = progress.completed = progress.ready - 1
    fit_loop.restarting = True
    fit_loop.update_restart_stage()


def _begin_epoch(trainer: Trainer) -> None:
    """Nothing of the epoch is done, whatever the counters were restored to."""
    loop = trainer.fit_loop.epoch_loop
    if loop.restarted_on_train_batch_end:
        loop.batch_progress.increment_completed()
    loop.reset_restart_stage()
    loop.batch_progress.reset_on_run()
    loop.scheduler_progress.reset_on_run()
    loop.automatic_optimization.optim_progress.reset_on_run()
    loop.val_loop.batch_progress.total.reset()


def _look_again(trainer: Trainer) -> None:
    """Have the Trainer ask for its data, and for its length, when it needs them next."""
    trainer.fit_loop._combined_loader = None
