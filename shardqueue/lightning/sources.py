"""What a data module's stages are read from: a map-style dataset, or units and `load`; checked as early as can be."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from lightning.fabric.utilities.seed import pl_worker_init_function
from torch.utils.data import DataLoader, Dataset, Subset

from shardqueue.dataset import SharedQueueDataset
from shardqueue.errors import InvalidInputError
from shardqueue.learner import learner_label
from shardqueue.loading import check_load
from shardqueue.lockstep import check_uneven, shares
from shardqueue.mailbox import open_mailbox
from shardqueue.rows import check_rows
from shardqueue.shuffle import LARGEST_SEED
from shardqueue.units import Unit, check_flag, check_int

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from shardqueue.mailbox import Mailbox

T = TypeVar("T")

Stage = Literal["train", "val", "test", "predict"]
STAGES: tuple[Stage, ...] = ("train", "val", "test", "predict")


@dataclass(frozen=True, slots=True)
class StageFeed:
    """What all loaders of a stage have in common.

    `whole`: steps of the source, where a fraction of them is overfitted; the Trainer takes that fraction itself.
    """

    source: Any
    overfit: float
    dataset: SharedQueueDataset
    loader: DataLoader[Any]
    whole: int | None


class Sources:
    """The settings of a data module, from which it makes what its loaders read.

    Args:
        mailbox, load, batches, batch_size, learner_id, uneven: as for `SharedQueueDataModule`.
        rows: further arguments of `SharedQueueDataset.from_dataset`.
        settings: arguments of `DataLoader`.

    Raises:
        InvalidInputError: an argument is out of range, or does not go with another.
    """

    def __init__(
        self,
        mailbox: str | os.PathLike[str] | Mailbox,
        load: Callable[[Any], Any] | None,
        batches: int | Mapping[str, int] | None,
        batch_size: int | None,
        learner_id: str | None,
        uneven: str,
        rows: Mapping[str, Any],
        settings: Mapping[str, Any],
    ) -> None:
        if load is not None:
            check_load(load)
        if not mailbox:
            raise InvalidInputError(
                "mailbox", mailbox, "a path, a URL or a Mailbox", "name a folder or a bucket"
            )
        self.uneven = check_uneven(uneven)
        self._given, self._load, self._learner_id = mailbox, load, learner_id
        self._batches = (
            dict(batches) if isinstance(batches, Mapping) else {} if batches is None else {"train": batches}
        )
        for stage, count in self._batches.items():
            if stage not in STAGES:
                raise InvalidInputError(
                    "batches", stage, f"by the names {', '.join(STAGES)}", "name the stage"
                )
            check_int(f"batches of {stage}", count, 1)
        self._batch_size = None if batch_size is None else check_int("batch_size", batch_size, 1)
        check_int("unit_batches", rows["unit_batches"], 1)
        check_int("seed", rows["seed"], 0, LARGEST_SEED)
        for name in ("shuffle", "drop_last"):
            check_flag(name, rows[name])
        if learner_id is not None:
            learner_label(learner_id)
        anything: Any = [0]
        DataLoader(anything, **settings)  # says what is wrong with them
        self._rows, self._settings = dict(rows), dict(settings)
        self._mailbox: Mailbox | None = None

    @property
    def mailbox(self) -> Mailbox:
        """Opened in the process that uses it, at the first use."""
        if self._mailbox is None:
            self._mailbox = open_mailbox(self._given)
        return self._mailbox

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mailbox": None}

    def check(self, stage: Stage, source: Any) -> None:
        """Refuse a source that cannot be read.

        Raises:
            InvalidInputError: see there.
        """
        parts: Any = source.values() if isinstance(source, Mapping) else source
        if isinstance(source, Mapping | list | tuple) and isinstance(next(iter(parts), None), Dataset):
            remedy = "join them by torch.utils.data.ConcatDataset"
            raise InvalidInputError(stage, f"{len(source)} datasets", "one dataset a stage", remedy)
        if isinstance(source, Mapping):
            if self._load is None:
                remedy = "pass load=, a function that yields (step, batch) pairs"
                raise InvalidInputError("load", None, "given with units", remedy)
            if self._batch_size is not None:
                bound = "None with units, whose load yields whole batches"
                raise InvalidInputError("batch_size", self._batch_size, bound, "leave it out")
            return
        if self._batch_size is None:
            raise InvalidInputError("batch_size", None, "given with a dataset", "pass batch_size=")
        if stage in self._batches:
            bound = "left out with a dataset, which has a length"
            raise InvalidInputError("batches", self._batches[stage], bound, "leave it out")
        if isinstance(source, str | bytes):
            raise InvalidInputError(
                stage, source, "a dataset or a mapping of units, not its name", "make it first"
            )
        check_rows(source)

    def feed(self, stage: Stage, source: Any, overfit: float, each: int, trainer: Trainer) -> StageFeed:
        """Make what the loaders of a stage read.

        Args:
            stage, source: of which.
            overfit: the Trainer's `overfit_batches`.
            each: batches of a training step, on all ranks.
            trainer: whose loaders they are.

        Raises:
            InvalidInputError: the source cannot be read.
            MailboxError: the mailbox cannot be opened.
        """
        self.check(stage, source)
        dataset, whole = self._dataset(stage, source), None
        if overfit:
            steps = shares(dataset, each, self.uneven)[1]
            whole = None if isinstance(overfit, int) else steps
            few = int(overfit if whole is None else overfit * whole)
            dataset = self._dataset(stage, source, max(1, few) * each)
        dataset.stage = "" if stage == "train" else stage
        loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=None,
            collate_fn=_as_it_is,
            worker_init_fn=_seeds(trainer.global_rank),
            **self._settings,
        )
        return StageFeed(source, overfit, dataset, loader, whole)

    def _dataset(self, stage: Stage, source: Any, first: int = 0) -> SharedQueueDataset:
        """The source's batches: all, or the first few, always the same."""
        if isinstance(source, Mapping):
            units = first_batches(source, first) if first else source
            batches = None if first else self._batches.get(stage)
            load: Any = self._load
            return SharedQueueDataset(units, self.mailbox, load, self._learner_id, batches=batches)
        assert self._batch_size is not None
        if first:
            source = Subset(source, range(min(len(source), first * self._batch_size)))
        varies = stage == "train" and not first
        varying = {name: self._rows[name] and varies for name in ("shuffle", "drop_last")}
        return SharedQueueDataset.from_dataset(
            source,
            self.mailbox,
            self._batch_size,
            with_step=True,
            learner_id=self._learner_id,
            **{**self._rows, **varying},
        )


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


def _seeds(rank: int) -> Callable[[int], None] | None:
    """What seeds loader workers, where `seed_everything(workers=True)` asked for it, as for any loader."""
    asked = int(os.environ.get("PL_SEED_WORKERS", "0"))
    return partial(pl_worker_init_function, rank=rank) if asked else None


def _as_it_is(item: T) -> T:
    return item
