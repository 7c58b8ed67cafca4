"""`SharedQueueDataModule`: a Lightning Trainer's data, shared out through a queue.

Training goes in lockstep (see `lockstep`): the ranks of any strategy get as many batches. Validation, test and
prediction go by speed: every sample once, on one rank, and nobody waits for the slowest before the end; where the
strategy has collectives in forward, the ranks take as many steps and the surplus ones are discarded.

A run opens at the first batch that is asked for, when Lightning has restored its state and all ranks are there. The
loops that are only tried out (`fast_dev_run`, the sanity check, `overfit_batches`) have a run of their own, which is
deleted after them, and so are the claims of past validations.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from math import ceil, inf
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch.distributed as dist
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.combined_loader import _shutdown_workers_and_reset_iterator
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from shardqueue.agreement import Ranks, batch_samples
from shardqueue.dataset import SharedQueueDataset
from shardqueue.errors import InvalidInputError
from shardqueue.lightning.callback import SharedQueueCallback
from shardqueue.lightning.evaluation import collectives_in_forward, discarded_step, quiet_buffers
from shardqueue.lightning.leftovers import Leftovers
from shardqueue.lockstep import Lockstep, shares
from shardqueue.mailbox import open_mailbox
from shardqueue.session import Session
from shardqueue.units import Unit, check_int

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lightning.pytorch import Trainer

    from shardqueue.mailbox import Mailbox
    from shardqueue.progress import Agreed
    from shardqueue.units import Step

T = TypeVar("T")

Stage = Literal["train", "val", "test", "predict"]
STAGES: tuple[Stage, ...] = ("train", "val", "test", "predict")


class SharedQueueDataModule(LightningDataModule):
    """The data of a Trainer, from datasets or from units, through one mailbox.

        data = SharedQueueDataModule("s3://bucket/prefix", train=dataset, val=held_out, batch_size=32, num_workers=4)
        trainer.fit(model, datamodule=data)

    The module gets the batch alone. `train_dataloader` and the others have a length that Lightning can trust: steps a
    rank for training, the same on all; for the others the most a rank may get.

    Each of `train`, `val`, `test`, `predict` is a map-style dataset, read in batches of `batch_size`, or a plan of
    units, which `load` reads. They may also be set later, in `prepare_data` or `setup` of a subclass.

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

    Raises:
        InvalidInputError: an argument is out of range, or does not go with another.
    """

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
        self._given_mailbox = mailbox
        self._load = load
        self._batches = {"train": batches} if isinstance(batches, int) else dict(batches or {})
        self._batch_size = None if batch_size is None else check_int("batch_size", batch_size, 1)
        self._rows = {
            "unit_batches": check_int("unit_batches", unit_batches, 1),
            "seed": seed,
            "collate_fn": collate_fn,
            "taper": taper,
        }
        self._shuffle, self._drop_last = shuffle, drop_last
        self._uneven, self._even_evaluation, self._learner_id = uneven, even_evaluation, learner_id
        self._loader_settings = {
            "num_workers": num_workers,
            "prefetch_factor": prefetch_factor,
            "pin_memory": pin_memory,
            "persistent_workers": persistent_workers,
            "multiprocessing_context": multiprocessing_context,
            "in_order": in_order,
        }
        if uneven not in ("repeat", "drop"):
            raise InvalidInputError("uneven", uneven, '"repeat" or "drop"', 'pass uneven="repeat"')
        for stage in self._batches.keys() - set(STAGES):
            raise InvalidInputError("batches", stage, f"by the names {', '.join(STAGES)}", "name the stage")
        for stage in STAGES:
            if getattr(self, stage) is not None:
                self._check_source(getattr(self, stage))
        self.session: Session | None = None
        self.agreed: Agreed | None = None
        self.repeating = False
        self.step: Step | None = None
        self.steps: list[Step] = []
        self._stay: _Stay | None = None
        self._mailbox: Mailbox | None = None
        self._feeds: dict[Stage, _Feed] = {}
        self._passes: Counter[Stage] = Counter()

    def _check_source(self, source: object) -> None:
        """Refuse what cannot be read, before anything is."""
        if isinstance(source, Mapping):
            if self._load is None:
                remedy = "pass load=, a function that yields (step, batch) pairs"
                raise InvalidInputError("load", None, "given with units", remedy)
            if self._batch_size is not None:
                raise InvalidInputError(
                    "batch_size",
                    self._batch_size,
                    "None with units, whose load yields whole batches",
                    "leave it out",
                )
        elif self._batch_size is None:
            raise InvalidInputError("batch_size", None, "given with a dataset", "pass batch_size=")

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

    def teardown(self, stage: str) -> None:  # noqa: ARG002
        """Leave the run."""
        self._leave(None)

    def on_exception(self, exception: BaseException) -> None:
        """Leave the run, and say who is gone if that is why."""
        self._leave(exception)

    def in_order(self, outputs: Sequence[T]) -> list[T]:
        """What all ranks made of the last evaluation, in the order of the dataset: on every rank, each batch once.

        Every rank must call it.

        Args:
            outputs: one for each batch this rank had, as `Trainer.predict` returns them.

        Raises:
            InvalidInputError: there are not as many as this rank had batches.
        """
        if len(outputs) != len(self.steps):
            bound = f"{len(self.steps)}, one for each batch this rank had"
            raise InvalidInputError("outputs", len(outputs), bound, "pass what trainer.predict returned")
        own = [((int(step), step.unit), output) for step, output in zip(self.steps, outputs, strict=True)]
        parts: list[Any] = [own]
        if dist.is_available() and dist.is_initialized():
            parts = [None] * dist.get_world_size()
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
        _average_counts_exactly(self._trainer.strategy)
        if stage == "train":
            shares(self._feed(stage).dataset, self._trainer.world_size, self._uneven)
        self._feed(stage)
        return StageLoader(self, stage)

    @property
    def _trainer(self) -> Trainer:
        trainer = self.trainer
        if trainer is None:
            bound = "there when batches are asked for"
            raise InvalidInputError("trainer", None, bound, "pass this to trainer.fit(model, datamodule=...)")
        return trainer

    def _feed(self, stage: Stage) -> _Feed:
        """The stage's dataset and loader; made anew when the user has set another source."""
        source = getattr(self, stage)
        trainer: Any = self._trainer
        overfit = trainer.overfit_batches if stage == "train" else 0
        feed = self._feeds.get(stage)
        if feed is None or feed.source is not source or feed.overfit != overfit:
            feed = self._feeds[stage] = self._make_feed(stage, source, overfit)
        return feed

    def _make_feed(self, stage: Stage, source: Any, overfit: float) -> _Feed:
        self._check_source(source)
        if self._mailbox is None:
            self._mailbox = open_mailbox(self._given_mailbox)
        dataset, whole = self._dataset_of(stage, source, self._mailbox), None
        if overfit:
            steps = shares(dataset, self._trainer.world_size, self._uneven)[1]
            whole = None if isinstance(overfit, int) else steps
            few = int(overfit if whole is None else overfit * whole)
            first = max(1, few) * self._trainer.world_size
            dataset = self._dataset_of(stage, source, self._mailbox, first)
        dataset.stage = "" if stage == "train" else stage
        loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=None,
            collate_fn=_as_it_is,
            worker_init_fn=_seeds(self._trainer.global_rank),
            **self._loader_settings,  # type: ignore[arg-type]
        )
        return _Feed(source, overfit, dataset, loader, whole)

    def _dataset_of(self, stage: Stage, source: Any, mailbox: Mailbox, first: int = 0) -> SharedQueueDataset:
        """The source's batches: all, or the first few, always the same."""
        if isinstance(source, Mapping):
            units = first_batches(source, first) if first else source
            batches = None if first else self._batches.get(stage)
            load: Any = self._load
            return SharedQueueDataset(units, mailbox, load, self._learner_id, batches=batches)
        assert self._batch_size is not None
        if first:
            source = Subset(source, range(min(len(source), first * self._batch_size)))
        varies = stage == "train" and not first
        return SharedQueueDataset.from_dataset(
            source,
            mailbox,
            self._batch_size,
            shuffle=self._shuffle and varies,
            drop_last=self._drop_last and varies,
            with_step=True,
            learner_id=self._learner_id,
            **self._rows,  # type: ignore[arg-type]
        )

    def _enter(self, stage: Stage) -> _Stay:
        """Our stay in the run that the loop belongs to; a loop that is only tried out has a run of its own."""
        trainer: Any = self._trainer
        tried = trainer.fast_dev_run or trainer.overfit_batches or trainer.state.fn == "validate"
        trial = "sanity" if trainer.sanity_checking else "tried" if tried else ""
        if self._stay is not None and self._stay.trial != trial:
            self._leave(None)
        if self._stay is None:
            learner = self._feed(stage).dataset.learner_id
            assert self._mailbox is not None
            marks = not any(isinstance(one, SharedQueueCallback) for one in trainer.callbacks)
            self._stay = _Stay(self._mailbox, learner, trial, marks)
            self.session = self._stay.session
        return self._stay

    def _leave(self, error: BaseException | None) -> None:
        stay, self._stay, self.session = self._stay, None, None
        self.agreed = self.step = None
        loaders = [feed.loader for feed in self._feeds.values()]
        self._feeds = {}
        self._passes.clear()
        try:
            if stay is not None:
                stay.leave(error)
        finally:
            for (
                loader
            ) in loaders:  # collected later in a cycle, persistent workers would be waited for in vain
                _shutdown_workers_and_reset_iterator(loader)

    def _even(self, dataset: SharedQueueDataset) -> bool:
        """Whether all ranks take as many evaluation steps: where they must, or some would have none."""
        ranks = self._trainer.world_size
        few = dataset.batches is not None and min(dataset.batches, len(dataset.plan)) < ranks
        if few or self._even_evaluation is not None:
            return few or bool(self._even_evaluation)
        return collectives_in_forward(self._trainer) is not None

    def _train(self) -> Iterator[Any]:
        stay, dataset = self._enter("train"), self._feed("train").dataset
        stay.settle()
        dataset.set_epoch(self._trainer.current_epoch)
        loop = stay.lockstep.train(
            dataset,
            self._feed("train").loader,
            uneven=self._uneven,
            limit=self._steps_allowed(),
            run=stay.name,
        )
        with closing(loop):
            for step, batch in loop:
                self.step, self.agreed, self.repeating = step, stay.lockstep.agreed, stay.lockstep.repeating
                if stay.marks:
                    stay.pending = 0 if self.repeating else batch_samples(batch)
                yield batch
                stay.calm.close()
                stay.settle()

    def _evaluate(self, stage: Stage) -> Iterator[Any]:
        stay, feed = self._enter(stage), self._feed(stage)
        stay.calm.close()
        stay.settle()
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
            feed.dataset, feed.loader, even=even, limit=limit if known else None, run=stay.name
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
                    stay.pending = batch_samples(batch)
                yield batch
                stay.settle()

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
            return shares(dataset, ranks, self._uneven)[1]
        if dataset.batches is None:
            raise TypeError("nobody knows how many batches there are; pass batches= to the data module")
        return -(-dataset.batches // ranks) if self._even(dataset) else dataset.batches

    def __getstate__(self) -> dict[str, Any]:
        """For strategies that spawn their ranks: what belongs to this process stays here."""
        return {**self.__dict__, "_feeds": {}, "_mailbox": None, "_stay": None, "session": None}


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


@dataclass(frozen=True, slots=True)
class _Feed:
    """What all loaders of a stage have in common.

    `whole`: steps of the source, where a fraction of them is overfitted; the Trainer takes that fraction itself.
    """

    source: Any
    overfit: float
    dataset: SharedQueueDataset
    loader: DataLoader[Any]
    whole: int | None


class _Stay:
    """A training process's stay in one run: from the first batch to the Trainer's end, or its error.

    Attributes:
        trial: why the run is deleted afterwards, so that it has a name of its own; "" for one that stays.
        marks: coming back for the next batch makes the last one trained, for want of a callback that says so.
        pending: samples of the batch that coming back would make trained.
        calm: what is switched off in the model until an evaluation is over. That is when training goes on: Lightning
            may fetch a batch ahead, so the last step comes after the loader's end.
    """

    def __init__(self, mailbox: Mailbox, learner_id: str, trial: str, marks: bool) -> None:
        self.trial, self.marks = trial, marks
        self.name = f"{trial}-{os.urandom(6).hex()}" if trial else None
        self.pending: int | None = None
        self.calm = ExitStack()
        self.session = Session(mailbox, learner_id)
        self._ranks = Ranks(dist.group.WORLD if dist.is_available() and dist.is_initialized() else None)
        self.lockstep = self.session.lockstep = Lockstep(self.session, self._ranks)
        self._leftovers = Leftovers(mailbox)
        self._validated: list[str] = []
        self.session.__enter__()

    def settle(self) -> None:
        """The Trainer asks for another batch: it is done with the last one."""
        if self.pending is not None:
            samples, self.pending = self.pending, None
            self.session.step(samples=samples)

    def validate(self, pass_: str) -> None:
        """A validation begins; what is left over of those before, whose loops all ranks have left, is deleted."""
        self.session.unbook(pass_)
        self._remove_validated()
        self._validated.append(pass_)

    def _remove_validated(self) -> None:
        if self._ranks.rank == 0 and self.session.joined is not None:
            for pass_ in self._validated:
                self._leftovers.remove(self.session.joined.keys.pass_keys(pass_).folder)
        self._validated = []

    def leave(self, error: BaseException | None) -> None:
        """Give back what was not trained, and delete what nobody needs."""
        self.calm.close()
        if error is None:
            self.settle()
            self.session.__exit__(None, None, None)
            self._ranks.gather({})  # so that nobody writes any more
            if self.trial and self._ranks.rank == 0 and self.session.joined is not None:
                self._leftovers.remove_run(self.session.joined.keys)
            self._remove_validated()
            self._ranks.close()
        else:
            self.session.__exit__(type(error), error, error.__traceback__)
        self._leftovers.close()


def first_batches(units: Mapping[str, Any], batches: int) -> dict[str, Unit]:
    """The first units of a plan, with so many batches in all, or with all there are.

    Raises:
        InvalidInputError: the units do not say how many batches they have.
    """
    found: dict[str, Unit] = {}
    for identifier, unit in units.items():
        if not isinstance(unit, Unit):
            bound = "0 with units that do not say how many batches they have"
            raise InvalidInputError(
                "overfit_batches", batches, bound, "pass a few units, or limit_train_batches"
            )
        found[identifier] = replace(unit, count=min(unit.count, batches))
        batches -= unit.count
        if batches <= 0:
            break
    return found


def _refuse_shared_replicas(trainer: Trainer) -> None:
    """Ranks that hold parts of one replica need the same batches."""
    replicas = (trainer.distributed_sampler_kwargs or {}).get("num_replicas", trainer.world_size)
    if replicas != trainer.world_size:
        bound = f"{trainer.world_size}, one replica of the model a rank"
        remedy = "use a strategy without tensor or pipeline parallelism"
        raise InvalidInputError("replicas", replicas, bound, remedy)


def _average_counts_exactly(strategy: Any) -> None:
    """Lightning divides a synchronised mean by the mean count of samples, and that it would truncate."""
    reduce = strategy.reduce

    def reduce_exactly(tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        counts = isinstance(tensor, Tensor) and not tensor.is_floating_point() and dist.is_initialized()
        return reduce(tensor.double() if counts and reduce_op == "mean" else tensor, group, reduce_op)

    if "reduce" not in vars(strategy):
        strategy.reduce = reduce_exactly  # no partial: Lightning copies what one holds at every `self.log`


def _seeds(rank: int) -> Callable[[int], None] | None:
    """What seeds loader workers, where `seed_everything(workers=True)` asked for it, as for any loader."""
    asked = int(os.environ.get("PL_SEED_WORKERS", "0"))
    return partial(pl_worker_init_function, rank=rank) if asked else None


def _as_it_is(item: T) -> T:
    return item
