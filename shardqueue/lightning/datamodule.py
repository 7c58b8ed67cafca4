"""`SharedQueueDataModule`: a Lightning Trainer's data, shared out through a queue.

Training goes in lockstep (see `lockstep`): the ranks of any strategy get as many batches; under an `ElasticStrategy`
they share out each step's batches by their speed. Validation, test and prediction go by speed: every sample once, on
one rank, and nobody waits for the slowest before the end; where the strategy has collectives in forward, the ranks
take as many steps and the surplus ones are discarded.

A run opens at the first batch that is asked for, when Lightning has restored its state and all ranks are there. The
loops that are only tried out (`fast_dev_run`, the sanity check, `overfit_batches`) have a run of their own, which is
deleted after them, and so are the claims of past validations.

What is trained is part of each checkpoint. A rank that saves asks nobody for it: it is what this rank was given and
trained, and what the others have logged. Where a Trainer goes on from a checkpoint, the run that opens hands out what
is left (see `restart` for the Trainer's part in it).
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from contextlib import closing, contextmanager
from functools import partial
from itertools import islice
from math import ceil, inf
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch.distributed as dist
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.combined_loader import _shutdown_workers_and_reset_iterator

from shardqueue.agreement import world_size
from shardqueue.assembly import check_alike
from shardqueue.batches import batch_samples
from shardqueue.errors import ClosedError, InvalidInputError, ShardQueueWarning
from shardqueue.lightning.callback import SharedQueueCallback
from shardqueue.lightning.evaluation import (
    average_counts_exactly,
    collectives_in_forward,
    discarded_step,
    quiet_buffers,
)
from shardqueue.lightning.restart import Restart
from shardqueue.lightning.sources import STAGES, Sources, Stage, StageFeed
from shardqueue.lightning.stay import Stay
from shardqueue.lightning.strategy import ElasticStrategy
from shardqueue.lockstep import shares
from shardqueue.state import State

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from lightning.pytorch import Trainer

    from shardqueue.dataset import SharedQueueDataset
    from shardqueue.lightning.restart import Place
    from shardqueue.mailbox import Mailbox
    from shardqueue.progress import Agreed
    from shardqueue.session import Session
    from shardqueue.units import Step

T = TypeVar("T")

ALIKE = (
    *(
        "max_epochs",
        "max_steps",
        "min_epochs",
        "min_steps",
        "accumulate_grad_batches",
        "num_sanity_val_steps",
    ),
    *(
        "val_check_interval",
        "check_val_every_n_epoch",
        "reload_dataloaders_every_n_epochs",
        "overfit_batches",
    ),
    *("limit_train_batches", "limit_val_batches", "fast_dev_run"),
)
"""Settings of a Trainer that decide how often which loader is iterated."""


class SharedQueueDataModule(LightningDataModule):
    """The data of a Trainer, from datasets or from units, through one mailbox.

        data = SharedQueueDataModule("s3://bucket/prefix", train=dataset, val=held_out, batch_size=32, num_workers=4)
        trainer.fit(model, datamodule=data)

    The module gets the batch alone. `train_dataloader` and the others have a length that Lightning can trust: steps a
    rank for training, the same on all; for the others the most a rank may get.

    Each of `train`, `val`, `test`, `predict` is a map-style dataset, read in batches of `batch_size`, or a plan of
    units, which `load` reads. They may also be set later, in `prepare_data` or `setup` of a subclass.

    Checkpoints hold what is trained: `trainer.fit(model, datamodule=data, ckpt_path="last")` goes on with what is
    left of the epoch, on any number of ranks and workers.

    Args:
        mailbox: a path, a URL, a `Mailbox` or any object with its verbs, the same for all ranks.
        train, val, test, predict: a dataset with a length, or a mapping from identifier to unit.
        load: reads a unit: yields `(step, batch)`.
        batches: how many batches a plan has whose units do not say: of `train`, or of each stage by name.
        batch_size: rows of a batch, for datasets; on each rank.
        unit_batches: batches of a dataset that are claimed at once, at most.
        shuffle: whether each epoch of training has an order of its own.
        seed: of that order, from 0 to 2**63 - 1.
        collate_fn: makes a batch of a list of rows; None for torch's `default_collate`.
        drop_last: leave out the last batch of training if it is short.
        taper: the number of learners that the end of an epoch is cut for; False for units of one size.
        uneven: what to do at the end of an epoch about the N mod W batches that are left for W ranks: "repeat" gives
            the other ranks their last batch again, "drop" leaves them out.
        num_workers, prefetch_factor, pin_memory, persistent_workers, multiprocessing_context, in_order: as for
            `torch.utils.data.DataLoader`.
        even_evaluation: whether ranks take as many steps in evaluation, the surplus ones discarded; None to find out.
        learner_id: a label for this training process; None for host, rank and pid.

    Attributes:
        session: of this training process, from the first batch to the end; None before and after.
        agreed: what the ranks agreed on for the training step whose batch was handed out last.
        repeating: whether that batch is one this rank had before.
        step: dataset step of the batch that was handed out last.
        steps: dataset steps of the batches of the last evaluation on this rank, in order.
        place: where the Trainer goes on, in the epoch that a checkpoint was saved in.

    Raises:
        InvalidInputError: an argument is out of range, or does not go with another.
    """

    train: Any
    val: Any
    test: Any
    predict: Any

    def __init__(
        self,
        mailbox: str | os.PathLike[str] | Mailbox,
        train: Any = None,
        val: Any = None,
        test: Any = None,
        predict: Any = None,
        *,
        load: Callable[[Any], Any] | None = None,
        batches: int | dict[str, int] | None = None,
        batch_size: int | None = None,
        unit_batches: int = 16,
        shuffle: bool = True,
        seed: int = 0,
        collate_fn: Callable[[Any], Any] | None = None,
        drop_last: bool = False,
        taper: int | bool = 64,
        uneven: Literal["repeat", "drop"] = "repeat",
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        pin_memory: bool = False,
        persistent_workers: bool = False,
        multiprocessing_context: str | None = None,
        in_order: bool = True,
        even_evaluation: bool | None = None,
        learner_id: str | None = None,
    ) -> None:
        super().__init__()
        self.train, self.val, self.test, self.predict = train, val, test, predict
        self._sources = Sources(
            mailbox,
            load,
            batches,
            batch_size,
            learner_id,
            uneven,
            rows={
                "unit_batches": unit_batches,
                "shuffle": shuffle,
                "seed": seed,
                "collate_fn": collate_fn,
                "drop_last": drop_last,
                "taper": taper,
            },
            settings={
                "num_workers": num_workers,
                "prefetch_factor": prefetch_factor,
                "pin_memory": pin_memory,
                "persistent_workers": persistent_workers,
                "multiprocessing_context": multiprocessing_context,
                "in_order": in_order,
            },
        )
        if even_evaluation not in (None, True, False):
            raise InvalidInputError("even_evaluation", even_evaluation, "True, False or None", "leave it out")
        self._even_evaluation = even_evaluation
        for stage in STAGES:
            if getattr(self, stage) is not None:
                self._sources.check(stage, getattr(self, stage))
        self.session: Session | None = None
        self.agreed: Agreed | None = None
        self.repeating: bool = False
        self._samples = 0
        self.step: Step | None = None
        self.steps: list[Step] = []
        self.place: Place | None = None
        self._start: dict[str, Any] = {}
        self._spent = False
        self._trained: Session | None = None
        self._stay: Stay | None = None
        self._feeds: dict[Stage, StageFeed] = {}
        self._passes: Counter[Stage] = Counter()
        self._going: dict[Stage, object] = {}
        self._epochs: set[int] = set()

    # -- for Lightning -----------------------------------------------------------------------------------

    def train_dataloader(self) -> StageLoader:
        """Steps of training, as many on every rank."""
        return self._loader("train")

    def val_dataloader(self) -> StageLoader | list[Any]:
        """Batches of a validation."""
        return self._loader("val") if self.val is not None else []

    def test_dataloader(self) -> StageLoader:
        """Batches of a test."""
        return self._loader("test")

    def predict_dataloader(self) -> StageLoader:
        """Batches to predict from."""
        return self._loader("predict")

    def setup(self, stage: str) -> None:
        """Refuse ranks whose Trainers differ, which would leave one waiting for another."""
        if self.trainer is not None:
            _warn_of_trainers_apart(self.trainer)
        if stage == "fit":
            self._start, self._spent, self._trained = {} if self._spent else self._start, False, None
            self._follow_restart()
        if world_size() > 1:
            said: list[Any] = [None] * world_size()
            dist.all_gather_object(said, {**self._alike(), "even_evaluation": self._even_evaluation})
            check_alike(said)

    def teardown(self, stage: str) -> None:  # noqa: ARG002
        """Leave the run."""
        self._end(None)

    def on_exception(self, exception: BaseException) -> None:
        """Leave the run, and say who is gone if that is why."""
        self._end(exception)

    def state_dict(self) -> dict[str, Any]:
        """What is trained, for a checkpoint; only that of rank 0 counts, which must hear of no other rank for it.

        Batches whose gradients are still accumulated are not in the model, and count as not trained.
        """
        if self._trained is None:
            return self._start
        if self.session is self._trained:
            self._settle()
        if self._trainer.is_global_zero:
            return self._trained.state_dict()
        self._trained.flush_log()
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what is trained in a checkpoint, once the Trainer fits.

        Raises:
            InvalidInputError: it is not what `state_dict` gave.
        """
        if self.trainer is not None and self.trainer.state.fn != "fit":
            return
        State.of(dict(state_dict))
        self._start, self._spent, self._trained = dict(state_dict), False, None
        self._follow_restart()

    def _follow_restart(self) -> None:
        """Be told where the Trainer goes on, if it does."""
        trainer: Any = self.trainer
        if trainer is not None:
            others = [callback for callback in trainer.callbacks if not isinstance(callback, Restart)]
            trainer.callbacks = [Restart(self), *others] if self._start else others

    def _end(self, error: BaseException | None) -> None:
        self._spent |= self.trainer is not None and self.trainer.state.fn == "fit"
        self.place = None
        self._going.clear()
        self._epochs.clear()
        self._leave(error)

    def in_order(self, outputs: Sequence[T]) -> list[T]:
        """What all ranks made of the last evaluation, in the order of the dataset: on every rank, each batch once.

        Every rank must call it.

        Args:
            outputs: one for each batch this rank had, as `Trainer.predict` returns them.

        Raises:
            InvalidInputError: there are not as many as this rank had batches.
        """
        given: object = outputs
        if given is None:
            bound = "what trainer.predict returned"
            remedy = 'use strategy="ddp", not one that spawns its ranks, and return_predictions=True'
            raise InvalidInputError("outputs", None, bound, remedy)
        if len(outputs) != len(self.steps):
            bound = f"{len(self.steps)}, one for each batch this rank had"
            raise InvalidInputError("outputs", len(outputs), bound, "pass what trainer.predict returned")
        own = [((int(step), step.unit), output) for step, output in zip(self.steps, outputs, strict=True)]
        parts: list[Any] = [own]
        if world_size() > 1:
            parts = [None] * world_size()
            dist.all_gather_object(parts, own)
        return [
            output
            for _, output in sorted((pair for part in parts for pair in part), key=lambda pair: pair[0])
        ]

    # -- inside ------------------------------------------------------------------------------------------

    def _loader(self, stage: Stage) -> StageLoader:
        if getattr(self, stage) is None:
            bound = f"given, or set in setup(), where a Trainer asks for {stage}_dataloader"
            raise InvalidInputError(stage, None, bound, f"pass {stage}=")
        _refuse_shared_replicas(self._trainer)
        average_counts_exactly(self._trainer.strategy)
        if stage == "train":
            shares(self._feed(stage).dataset, self._each, self._sources.uneven)
        self._feed(stage)
        return TrainLoader(self, stage) if stage == "train" else StageLoader(self, stage)

    @property
    def samples(self) -> int:
        """Samples that this rank trained in the training step, or will."""
        return self._elastic.samples if self._elastic else self._samples

    @property
    def _elastic(self) -> ElasticStrategy | None:
        strategy = None if self.trainer is None else self.trainer.strategy
        return strategy if isinstance(strategy, ElasticStrategy) else None

    @property
    def _each(self) -> int:
        """Batches of a training step, on all ranks."""
        return self._elastic.micro_batches if self._elastic else self._trainer.world_size

    @property
    def _trainer(self) -> Trainer:
        trainer = self.trainer
        if trainer is None:
            bound = "there when batches are asked for"
            raise InvalidInputError("trainer", None, bound, "pass this to trainer.fit(model, datamodule=...)")
        return trainer

    def _feed(self, stage: Stage) -> StageFeed:
        """The stage's dataset and loader; made anew when the user has set another source."""
        source = getattr(self, stage)
        trainer: Any = self._trainer
        overfit = trainer.overfit_batches if stage == "train" else 0
        feed = self._feeds.get(stage)
        if feed is None or feed.source is not source or feed.overfit != overfit:
            feed = self._feeds[stage] = self._sources.feed(stage, source, overfit, self._each, trainer)
        return feed

    def _enter(self, stage: Stage) -> Stay:
        """Our stay in the run that the loop belongs to; a loop that is only tried out has a run of its own."""
        trainer: Any = self._trainer
        tried = trainer.fast_dev_run or trainer.overfit_batches or trainer.state.fn == "validate"
        trial = "sanity" if trainer.sanity_checking else "tried" if tried else ""
        if self._stay is not None and self._stay.trial != trial:
            self._leave(None)
        if self._stay is None:
            learner = self._feed(stage).dataset.learner_id
            marks = not any(isinstance(one, SharedQueueCallback) for one in trainer.callbacks)
            start = self._start if trainer.state.fn == "fit" and not trial else {}
            self._stay = Stay(self._sources.mailbox, learner, trial, marks, start)
            self.session = self._stay.session
        return self._stay

    def _settle(self) -> None:
        """The Trainer is done with the batches it has, of training those that an optimizer step has used."""
        stay, trainer = self._stay, self._trainer
        if stay is None:
            return
        model = trainer.lightning_module
        steps = trainer.state.fn == "fit" and (model.automatic_optimization or not stay.marks)
        stay.settle(trainer.global_step if steps else None)

    def _leave(self, error: BaseException | None) -> None:
        if error is None:
            self._settle()
        if self._elastic:
            self._elastic.leave()
        stay, self._stay, self.session = self._stay, None, None
        self.agreed = self.step = None
        loaders = [feed.loader for feed in self._feeds.values()]
        self._feeds = {}
        self._passes.clear()
        try:
            if stay is not None:
                stay.leave(error)
        finally:
            # Collected later, in a cycle, persistent workers would be waited for in vain.
            for loader in loaders:
                _shutdown_workers_and_reset_iterator(loader)

    def _even(self, dataset: SharedQueueDataset) -> bool:
        """Whether all ranks take as many evaluation steps: where they must, or some would have none."""
        ranks = self._trainer.world_size
        few = dataset.batches is not None and min(dataset.batches, len(dataset.plan)) < ranks
        if few or self._even_evaluation is not None:
            return few or bool(self._even_evaluation)
        return collectives_in_forward(self._trainer) is not None

    @contextmanager
    def _alone(self, stage: Stage) -> Iterator[None]:
        """Refuse a second loop over a stage while one goes on."""
        ended = self._stay is not None and self._stay.lockstep.is_at_end("" if stage == "train" else stage)
        if stage in self._going and not ended:
            raise ClosedError(
                f"a loop over {stage} batches of this data module goes on; iterate one loader of a stage at a time, "
                "and to look at samples take them from the dataset"
            )
        mark = self._going[stage] = object()
        try:
            yield
        finally:
            if self._going.get(stage) is mark:
                del self._going[stage]

    def _train(self) -> Iterator[Any]:
        with self._alone("train"):
            yield from self._epoch()

    def _evaluate(self, stage: Stage) -> Iterator[Any]:
        with self._alone(stage):
            yield from self._evaluation(stage)

    def _epoch(self) -> Iterator[Any]:
        epoch = self._trainer.current_epoch
        again = epoch in self._epochs
        if again:  # somebody only looked: what that loop had is not known to be trained
            self._leave(None)
        self._epochs.add(epoch)
        stay = self._enter("train")
        dataset = self._feed("train").dataset
        self._settle()
        if not stay.trial:
            self._trained = stay.session
        dataset.set_epoch(epoch)
        elastic = self._elastic
        loop = (partial(elastic.train, stay) if elastic else stay.lockstep.train)(
            dataset,
            self._feed("train").loader,
            uneven=self._sources.uneven,
            limit=self._steps_allowed(),
            done=self.place.done if self.place else 0 if again else self._steps_done(),
            run=stay.name,
        )
        with closing(loop):
            for step, batch in loop:
                self.step, self.agreed, self.repeating = step, stay.lockstep.agreed, stay.lockstep.repeating
                self._samples = 0 if self.repeating else batch_samples(batch)
                stay.hand(self._samples if stay.marks and not elastic else 0)
                yield batch
                stay.calm.close()
                self._settle()

    def _evaluation(self, stage: Stage) -> Iterator[Any]:
        stay, feed = self._enter(stage), self._feed(stage)
        stay.calm.close()
        self._settle()
        number, trainer = self._passes[stage], self._trainer
        self._passes[stage] += 1
        feed.dataset.set_epoch(number)
        even, limit = self._even(feed.dataset), self._batches_allowed(stage, feed.dataset)
        if stage == "val":
            stay.validate(feed.dataset.pass_name(number))
        if trainer.state.fn == "fit" and not even:
            stay.calm.enter_context(quiet_buffers(trainer))
        known = feed.dataset.batches is not None
        loop = stay.lockstep.evaluate(
            feed.dataset,
            feed.loader,
            even=even,
            limit=limit if known else None,
            run=stay.name,
            settings={"even": even},
        )
        self.steps = []
        with closing(loop):
            for number, (step, batch) in enumerate(loop if known else islice(loop, limit)):
                if stay.lockstep.repeating:
                    discarded_step(trainer, batch, number)
                    continue
                self.step = step
                self.steps.append(step)
                if stage != "val":
                    stay.hand(batch_samples(batch))
                yield batch
                self._settle()

    def _alike(self) -> dict[str, object]:
        """What all Trainers of a job must have alike, or one would leave the others waiting."""
        trainer = self._trainer
        return {name: str(getattr(trainer, name)) for name in ALIKE}

    def _steps(self, dataset: SharedQueueDataset) -> int:
        """Steps of an epoch; of one that goes on, those that are done and those that are left."""
        before, done = 0, 0
        if self.place is not None:
            done = self.place.done
            trained = State.of(self._start).passes.get(dataset.pass_name(self.place.epoch))
            before = 0 if trained is None else trained.batches
        return done + shares(dataset, self._each, self._sources.uneven, None, before)[1]

    def _steps_done(self) -> int:
        """Steps of the epoch that a checkpoint has behind it, where the Trainer goes on in its middle."""
        done = self._trainer.fit_loop.epoch_loop.batch_progress.current.ready
        if done:
            warnings.warn(
                f"the checkpoint was saved after {done} steps of epoch {self._trainer.current_epoch}, and does not "
                "say which batches they had: the epoch goes on for the steps that are left, with some batches again "
                "and others never; resume from a checkpoint of an epoch's end",
                ShardQueueWarning,
                stacklevel=3,
            )
        return done

    def _steps_allowed(self) -> int | None:
        """Steps of an epoch of training, at most."""
        limit: float = self._trainer.limit_train_batches
        return (
            limit if isinstance(limit, int) else None if limit == 1.0 else int(limit * self._length("train"))
        )

    def _batches_allowed(self, stage: Stage, dataset: SharedQueueDataset) -> int | None:
        """Batches a rank may have of an evaluation, where the Trainer limits them."""
        trainer: Any = self._trainer
        limit, total = getattr(trainer, f"limit_{stage}_batches"), dataset.batches
        if not isinstance(limit, int):
            if limit != 1.0 and total is None:
                bound = "a whole number, or 1.0 where nobody knows how many batches there are"
                raise InvalidInputError(
                    f"limit_{stage}_batches", limit, bound, "pass batches= to the data module"
                )
            limit = inf if limit == 1.0 else ceil(int(limit * total) / trainer.world_size)
        if trainer.sanity_checking:
            limit = min(limit, trainer.num_sanity_val_steps)
        return None if limit >= (inf if total is None else total) else int(limit)

    def _length(self, stage: Stage) -> int:
        feed, ranks = self._feed(stage), self._trainer.world_size
        dataset = feed.dataset
        if feed.whole is not None:
            return feed.whole
        if stage == "train":
            return self._steps(dataset)
        if dataset.batches is None:
            raise TypeError("nobody knows how many batches there are; pass batches= to the data module")
        return -(-dataset.batches // ranks) if self._even(dataset) else dataset.batches

    def __getstate__(self) -> dict[str, Any]:
        """For strategies that spawn their ranks: what belongs to this process stays here."""
        gone = {"_stay": None, "session": None, "_trained": None}
        return {**self.__dict__, "_feeds": {}, "_going": {}, **gone}


class StageLoader:
    """What a Trainer iterates: the batches of one stage that this rank gets, anew at each iteration.

    Nothing is claimed before the first batch is asked for.
    """

    def __init__(self, data: SharedQueueDataModule, stage: Stage) -> None:
        self._data, self._stage = data, stage

    def __len__(self) -> int:
        """Batches this rank gets in training; in evaluation, the most it may get.

        Raises:
            TypeError: nobody knows.
        """
        return self._data._length(self._stage)

    def __iter__(self) -> Iterator[Any]:
        return self._data._train() if self._stage == "train" else self._data._evaluate(self._stage)


class TrainLoader(StageLoader):
    """The loader of training, which can go on: what it needs for it is in the state of its data module."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the Trainer keeps, and loads, a loader's state too late."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing."""


def _warn_of_trainers_apart(trainer: Trainer) -> None:
    """On a machine without a GPU `devices="auto"` is one, also where torchrun has started more processes."""
    started = int(os.environ.get("WORLD_SIZE", "1")) if dist.is_torchelastic_launched() else 1
    if trainer.world_size == 1 < started:
        warnings.warn(
            f"torchrun started {started} processes, and the Trainer of each has one device: each trains on all of "
            f"the data, by itself; make them ranks of one job by Trainer(devices={started}, ...) on one machine",
            ShardQueueWarning,
            stacklevel=3,
        )


def _refuse_shared_replicas(trainer: Trainer) -> None:
    """Ranks that hold parts of one replica need the same batches."""
    replicas = (trainer.distributed_sampler_kwargs or {}).get("num_replicas", trainer.world_size)
    if replicas != trainer.world_size:
        bound = f"{trainer.world_size}, one replica of the model a rank"
        remedy = "use a strategy without tensor or pipeline parallelism"
        raise InvalidInputError("replicas", replicas, bound, remedy)
