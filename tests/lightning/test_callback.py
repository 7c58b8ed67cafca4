"""The callback: one learning rate on all ranks, what is trained, and what the user's loggers get."""

from __future__ import annotations

import csv
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, StochasticWeightAveraging, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from torch import distributed
from torch.utils.data import DataLoader, TensorDataset

from shardqueue import Session, shared_queue, unit_grid
from shardqueue.errors import ClosedError, InvalidInputError
from shardqueue.lightning.callback import SharedQueueCallback
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
from shardqueue.progress import Agreed, RankState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from ranks import Ranks

pytestmark = [
    # Lightning 2.6 uses what torch 2.13 deprecates.
    pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated"),
    # Runs of a few steps are shorter than any sensible interval.
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
]

ROWS = 8
"""Of a batch."""
AT_THE_END = ("units_claimed", "units_left", "repeated")


# -- what trains in these tests ------------------------------------------------------------------------------


class Noting(torch.optim.SGD):
    """Notes the groups' learning rates before its closure runs, where LBFGS reads them, and after, where SGD does."""

    def __init__(self, groups: Any, lr: Any = 7.0) -> None:
        super().__init__(groups, lr=lr)
        self.before: list[list[float]] = []
        self.after: list[list[float]] = []

    def step(self, closure: Any = None) -> Any:
        self.before.append([float(group["lr"]) for group in self.param_groups])
        result = closure() if closure is not None else None
        self.after.append([float(group["lr"]) for group in self.param_groups])
        super().step()
        return result


class Line(LightningModule):
    """One weight and one bias, each in a parameter group of its own."""

    def __init__(self, scheduled: bool = False, lr: Any = 7.0) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        groups = [
            {"params": [self.layer.weight], "name": "weight"},
            {"params": [self.layer.bias], "name": "bias"},
        ]
        self.optimizer = Noting(groups, lr=lr)
        self.scheduled = scheduled

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        if not self.scheduled:
            return self.optimizer
        return [self.optimizer], [torch.optim.lr_scheduler.StepLR(self.optimizer, 1)]


class Data(LightningDataModule):
    """Batches of which two ranks are said to have agreed: each has 16 samples a second and waits half of its time."""

    def __init__(
        self,
        batches: int = 6,
        repeats: Sequence[int] = (),
        drift: int = 0,
        source: Iterable[Any] | None = None,
    ) -> None:
        super().__init__()
        self.session: Session | None = None
        self.agreed: Agreed | None = None
        self.samples = 0
        self.batches, self.repeats, self.drift, self.source = batches, repeats, drift, source
        self.handed = 0

    def train_dataloader(self) -> Batches:
        return Batches(self)

    def agree(self, step: int) -> None:
        total = 2 * self.batches
        progress = 3 * self.handed + self.drift * self.handed
        ranks = tuple(RankState(rank, "node", *self.state(rank)) for rank in range(2))
        repeated = sum(one < self.handed for one in self.repeats)
        epoch = self.handed // self.batches
        self.agreed = Agreed(epoch, step, self.batches, 2 * step, total, progress, repeated, 10, ranks, 2)
        self.samples = 0 if self.handed in self.repeats else ROWS
        self.handed += 1

    def state(self, rank: int) -> tuple[int, int, float, float, int]:
        """Batches, samples, seconds waited and elapsed, units; rank 1 waits twice as long as rank 0."""
        return (
            self.handed,
            ROWS * self.handed,
            0.125 * (rank + 1) * self.handed,
            0.5 * self.handed,
            self.handed // 2,
        )


class Batches:
    def __init__(self, data: Data) -> None:
        self.data = data

    def __len__(self) -> int:
        return self.data.batches

    def __iter__(self) -> Iterator[torch.Tensor]:
        source = self.data.source or [torch.full((ROWS, 2), float(step + 1)) for step in range(len(self))]
        for step, batch in enumerate(source):
            self.data.agree(step)
            yield batch


def trainer(*callbacks: Callback, **options: Any) -> Trainer:
    quiet = dict.fromkeys(
        ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False
    )
    usual: dict[str, Any] = {"max_epochs": 1, "accelerator": "cpu", "devices": 1}
    return Trainer(callbacks=list(callbacks), **{**quiet, **usual, **options})


def others() -> DataLoader[tuple[torch.Tensor, ...]]:
    """A loader that is not ours."""
    return DataLoader(TensorDataset(torch.ones(1, 2)))


def schedule(progress: int) -> float:
    return 0.001 / (1 + progress)


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "lightning_logs" / "version_0" / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def column(folder: Path, name: str) -> dict[int, float]:
    return {int(row["step"]): float(row[name]) for row in rows_of(folder) if row[name]}


# -- the arithmetic ------------------------------------------------------------------------------------------


def state(
    rank: int, batches: int = 0, samples: int = 0, waited: float = 0.0, elapsed: float = 0.0, units: int = 0
) -> RankState:
    return RankState(rank, "node", batches, samples, waited, elapsed, units)


def agreed(ranks: Sequence[RankState], units: int = 100) -> Agreed:
    return Agreed(0, 5, 10, 10, 20, 5, 3, units, tuple(ranks), 2)


class TestRates:
    def test_are_since_the_start_at_first(self) -> None:
        (rate,) = rank_rates([state(1, batches=5, samples=40, waited=1.0, elapsed=4.0)])
        assert (rate.rank, rate.samples, rate.batches, rate.data_wait) == (1, 10.0, 1.25, 0.25)

    def test_are_since_the_last_time_then(self) -> None:
        before = [state(0, batches=5, samples=40, waited=1.0, elapsed=4.0)]
        (rate,) = rank_rates([state(0, batches=7, samples=100, waited=2.5, elapsed=6.0)], before)
        assert (rate.samples, rate.batches, rate.data_wait) == (30.0, 1.0, 0.75)

    def test_a_rank_without_time_in_between_has_none(self) -> None:
        ranks = [state(0, batches=5, samples=40, elapsed=4.0), state(1)]
        assert [rate.rank for rate in rank_rates(ranks)] == [0]
        assert rank_rates(ranks, ranks) == []


class TestTheEnd:
    @pytest.mark.parametrize(
        ("step", "epochs_after", "most", "left"),
        [
            (0, 0, math.inf, 9),
            (9, 0, math.inf, 0),
            (9, 2, math.inf, 20),
            (3, 2, math.inf, 26),
            (3, 2, 4, 4),
            (3, None, math.inf, 6),
            (3, None, 4, 4),
            (3, None, 400, 400),
        ],
    )
    def test_steps_left(self, step: int, epochs_after: int | None, most: float, left: float) -> None:
        assert steps_left(step, 10, epochs_after, most) == left

    def test_seconds_left_are_at_the_pace_of_the_step(self) -> None:
        rates = rank_rates([state(rank, batches=6, elapsed=3.0) for rank in range(2)])
        assert seconds_left(8, 2, rates) == 4.0
        assert seconds_left(8, 6, rates) == 12.0
        assert seconds_left(0, 2, rates) == 0.0

    def test_without_a_pace_nothing_is_said(self) -> None:
        assert seconds_left(8, 1, []) is None
        assert seconds_left(8, 1, rank_rates([state(0, elapsed=3.0)])) is None


class TestMetrics:
    def test_of_few_ranks_each_has_its_own(self) -> None:
        ranks = [
            state(rank, batches=6, samples=30 * rank, waited=rank, elapsed=30.0, units=4)
            for rank in range(16)
        ]
        found = metrics(agreed(ranks), rank_rates(ranks), 7.0, 0.5)
        of_ranks = {name: found.pop(name) for name in list(found) if name.startswith("rank_")}
        assert found == {
            "learning_rate": 0.5,
            "samples_per_second": sum(range(16)),
            "data_wait": 0.5,
            "units_claimed": 64,
            "units_left": 36,
            "repeated": 3,
            "eta_seconds": 7.0,
        }
        assert len(of_ranks) == 32
        assert of_ranks["rank_15/samples_per_second"] == 15.0
        assert of_ranks["rank_3/data_wait"] == 0.1

    def test_of_many_ranks_least_median_and_most(self) -> None:
        ranks = [state(rank, samples=rank, waited=rank / 64, elapsed=1.0) for rank in range(65)]
        found = metrics(agreed(ranks), rank_rates(ranks), None, None)
        names = {f"ranks/{name}_{which}" for name in ("samples_per_second", "data_wait") for which in WHICH}
        assert set(found) == {*AT_THE_END, "samples_per_second", "data_wait", *names}
        assert [found[f"ranks/samples_per_second_{which}"] for which in WHICH] == [0, 32, 64]
        assert [found[f"ranks/data_wait_{which}"] for which in WHICH] == [0, 0.5, 1]

    def test_what_is_not_known_is_left_out(self) -> None:
        assert set(metrics(agreed([state(0)]), [], None, None)) == set(AT_THE_END)


WHICH = ("min", "median", "max")


class TestLearningRates:
    def test_is_the_schedules(self) -> None:
        assert rate_at(schedule, 9) == 0.0001
        assert rate_at(lambda progress: 0, 9) == 0.0
        assert rate_at(torch.tensor, 9) == 9.0  # type: ignore[arg-type]

    @pytest.mark.parametrize("given", [-0.1, math.nan, math.inf, None, "fast"])
    def test_what_is_no_rate_is_refused_with_its_progress(self, given: Any) -> None:
        with pytest.raises(InvalidInputError, match=r"learning_rate\(1234\)=.*finite.*progress 1234"):
            rate_at(lambda progress: given, 1234)

    @pytest.mark.parametrize(
        ("factors", "found"),
        [
            (None, [1.0, 1.0]),
            ([0.5, 2], [0.5, 2]),
            ((0, 1), [0, 1]),
            ({"bias": 0.5}, [1.0, 0.5]),
            ({"weight": 3, "bias": 0.5}, [3, 0.5]),
        ],
    )
    def test_factors_of_groups(self, factors: Any, found: list[float]) -> None:
        assert group_factors([{"name": "weight"}, {"name": "bias"}], factors) == found

    @pytest.mark.parametrize(
        ("factors", "says"),
        [
            ([1.0], "each of the 2 parameter groups"),
            ([1.0, 1.0, 1.0], "pass 2"),
            ({"head": 1.0}, r"not 'head' \(there is weight\)"),
        ],
    )
    def test_factors_that_do_not_fit_are_refused(self, factors: Any, says: str) -> None:
        with pytest.raises(InvalidInputError, match=says):
            group_factors([{"name": "weight"}, {}], factors)

    def test_groups_without_names_are_said_to_have_none(self) -> None:
        with pytest.raises(InvalidInputError, match=r"there is none"):
            group_factors([{}, {}], {"head": 1.0})

    def test_a_rate_that_is_a_tensor_stays_the_same_tensor(self) -> None:
        rate = torch.tensor(7.0)
        groups: list[dict[str, Any]] = [{"lr": rate}, {"lr": 7.0}]
        set_rates(groups, 0.5, [1.0, 2.0])
        assert groups[0]["lr"] is rate
        assert groups == [{"lr": torch.tensor(0.5)}, {"lr": 1.0}]

    def test_one_tensor_of_several_groups_becomes_several(self) -> None:
        parameters = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
        optimizer = torch.optim.AdamW([{"params": [one]} for one in parameters], lr=torch.tensor(7.0))
        separate_rates(optimizer.param_groups)
        set_rates(optimizer.param_groups, 0.5, [1.0, 2.0])
        assert [float(group["lr"]) for group in optimizer.param_groups] == [0.5, 1.0]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"learning_rate": 0.1}, "learning_rate=0.1: .*a function from dataset step"),
        ({"learning_rate": schedule, "factors": [1.0, -1.0]}, "factors=.*finite"),
        ({"learning_rate": schedule, "factors": {"bias": math.nan}}, "factors=.*finite"),
        ({"learning_rate": schedule, "factors": "bias"}, "factors='bias'"),
        ({"learning_rate": schedule, "factors": 0.5}, "factors=0.5"),
        ({"learning_rate": schedule, "factors": iter([0.5, 1.0])}, "factors=<list_iterator"),
        ({"factors": [1.0]}, "no learning_rate"),
        ({"log_every_n_steps": -1}, "log_every_n_steps=-1"),
        ({"log_every_n_steps": 0.5}, "log_every_n_steps=0.5"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInputError, match=says):
        SharedQueueCallback(**options)


# -- the learning rate in a Trainer --------------------------------------------------------------------------


@pytest.mark.parametrize("factors", [None, [1.0, 0.5], {"bias": 0.5}])
@pytest.mark.parametrize("lr", [7.0, torch.tensor(7.0, dtype=torch.float64)])
def test_each_step_has_the_learning_rate_of_agreed_progress(factors: Any, lr: Any) -> None:
    model = Line(lr=lr)
    trainer(SharedQueueCallback(schedule, factors=factors), max_epochs=2).fit(model, datamodule=Data(3))
    bias = 0.5 if factors else 1.0
    expected = [[schedule(3 * step), schedule(3 * step) * bias] for step in range(6)]
    assert model.optimizer.after == expected
    assert model.optimizer.before == expected


class Meddling(Line):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = 9.0


def test_nothing_in_between_wins() -> None:
    model = Meddling()
    trainer(SharedQueueCallback(schedule)).fit(model, datamodule=Data())
    assert [rates[0] for rates in model.optimizer.after] == [schedule(3 * step) for step in range(6)]


def test_without_a_schedule_the_learning_rate_is_left_alone() -> None:
    model = Line(scheduled=True)
    trainer(SharedQueueCallback(), max_epochs=3).fit(model, datamodule=Data(1))
    assert [rates[0] for rates in model.optimizer.after] == pytest.approx([7.0, 0.7, 0.07])


def test_accumulated_batches_have_the_learning_rate_of_the_first() -> None:
    model = Line()
    callback = SharedQueueCallback(schedule)
    trainer(callback, accumulate_grad_batches=4).fit(model, datamodule=Data(10))
    assert [rates[0] for rates in model.optimizer.after] == [schedule(0), schedule(12), schedule(24)]


class Skipping(Line):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 1 else None


def test_a_batch_that_the_module_skips_begins_no_step() -> None:
    model = Skipping()
    trainer(SharedQueueCallback(schedule), max_epochs=2).fit(model, datamodule=Data(4))
    assert [rates[0] for rates in model.optimizer.after] == [schedule(0), schedule(6)]


def test_a_schedule_that_gives_no_rate_is_refused_at_its_step() -> None:
    callback = SharedQueueCallback(lambda progress: 0.1 - progress / 100)
    run = trainer(callback)
    with pytest.raises(InvalidInputError, match=r"learning_rate\(12\)=-0.0"):
        run.fit(Line(), datamodule=Data())
    assert run.global_step == 4


# -- what is refused -----------------------------------------------------------------------------------------


class Untrained(Line):
    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        raise AssertionError("this should have been refused before")


def test_a_lightning_scheduler_beside_is_refused() -> None:
    data = Data()
    with pytest.raises(InvalidInputError, match=r"StepLR.*return only the optimizer from configure_opt"):
        trainer(SharedQueueCallback(schedule)).fit(Untrained(scheduled=True), datamodule=data)
    assert data.handed == 0


def test_a_scheduler_that_comes_later_is_refused_then() -> None:
    averaging = StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=2)
    model = Line()
    with pytest.raises(InvalidInputError, match=r"SWALR.*StochasticWeightAveraging"):
        trainer(averaging, SharedQueueCallback(schedule), max_epochs=4).fit(model, datamodule=Data(2))
    assert len(model.optimizer.after) == 2


def test_factors_that_do_not_fit_are_refused_before_training() -> None:
    callback, data = SharedQueueCallback(schedule, factors=[1.0]), Data()
    with pytest.raises(InvalidInputError, match=r"factors=\[1.0\].*each of the 2 parameter groups"):
        trainer(callback).fit(Untrained(), datamodule=data)
    assert data.handed == 0


def test_another_data_module_is_refused() -> None:
    callback = SharedQueueCallback(schedule)
    with pytest.raises(InvalidInputError, match=r"SharedQueueDataModule.*trainer.fit\(model, datamodule="):
        trainer(callback).fit(Untrained(), others())
    other = LightningDataModule.from_datasets(TensorDataset(torch.ones(1, 2)))
    with pytest.raises(InvalidInputError, match=r"datamodule=<.*LightningDataModule"):
        trainer(callback).fit(Untrained(), datamodule=other)


class Checked(Line):
    def validation_step(self, batch: list[torch.Tensor]) -> None:
        self.log("loss", self.layer(batch[0]).mean())


@pytest.mark.filterwarnings("ignore:The 'val_dataloader' does not have many workers")
def test_validation_of_other_data_is_not_its_business() -> None:
    assert trainer(SharedQueueCallback(schedule)).validate(Checked(), others(), verbose=False)


class Unagreed(Data):
    def agree(self, step: int) -> None:
        pass


def test_a_step_that_was_not_agreed_on_is_refused() -> None:
    with pytest.raises(ClosedError, match=r"train_dataloader\(\)"):
        trainer(SharedQueueCallback(schedule)).fit(Untrained(), datamodule=Unagreed())


# -- what is trained -----------------------------------------------------------------------------------------


class Told(Session):
    """Notes what it is told."""

    def __init__(self, url: Path) -> None:
        super().__init__(url, "node")
        self.told: list[tuple[int, int | None]] = []
        self.trained: list[int] = []

    def step(self, samples: int = 0, *, global_step: int | None = None) -> None:
        super().step(samples, global_step=global_step)
        self.told.append((samples, global_step))
        self.trained.append(self.rates.batches)


class Alternating(Line):
    """Two optimizers by hand: one steps every second batch, the other with it every fourth."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = Noting([self.layer.weight])

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:  # type: ignore[override]
        first, second = self.optimizers()  # type: ignore[attr-defined]
        self.manual_backward(self.layer(batch).square().mean())
        if batch_idx % 2:
            first.step()
            first.zero_grad()
        if batch_idx % 4 == 3:
            second.step()

    def configure_optimizers(self) -> Any:
        return [self.optimizer, self.other]


def fit_over_queue(
    url: Path,
    batches: int,
    model: LightningModule,
    repeats: Sequence[int] = (),
    ckpt_path: Path | None = None,
    **options: Any,
) -> Told:
    """Fit over a real queue of `batches` units of one batch."""

    def load(unit: Any) -> Iterator[tuple[int, torch.Tensor]]:
        for step in unit.steps:
            yield step, torch.full((ROWS, 2), float(step + 1))

    units = unit_grid(batches, 1, 1, taper=False)
    with Told(url) as session, shared_queue(units, url, "node", load) as queue:
        data = Data(batches, repeats, source=(batch for _, batch in queue))
        data.session = session
        trainer(SharedQueueCallback(schedule), **options).fit(model, datamodule=data, ckpt_path=ckpt_path)
    return session


def test_a_batch_is_trained_after_its_optimizer_step(tmp_path: Path) -> None:
    session = fit_over_queue(tmp_path, 3, Line())
    assert session.told == [(ROWS, 1), (ROWS, 2), (ROWS, 3)]
    assert session.trained == [1, 2, 3]


def test_accumulated_batches_are_trained_at_once_and_so_is_the_rest_of_an_epoch(tmp_path: Path) -> None:
    session = fit_over_queue(tmp_path, 10, Line(), accumulate_grad_batches=4)
    assert session.told == [(4 * ROWS, 1), (4 * ROWS, 2), (2 * ROWS, 3)]
    assert session.trained == [4, 8, 10]


def test_a_repeated_batch_has_no_samples(tmp_path: Path) -> None:
    session = fit_over_queue(tmp_path, 4, Line(), repeats=[3], accumulate_grad_batches=2)
    assert session.told == [(2 * ROWS, 1), (ROWS, 2)]


def test_in_manual_optimization_a_step_of_any_optimizer_counts(tmp_path: Path) -> None:
    model = Alternating()
    session = fit_over_queue(tmp_path, 8, model)
    assert session.told == [(2 * ROWS, 1), (2 * ROWS, 3), (2 * ROWS, 4), (2 * ROWS, 6)]
    assert session.trained == [2, 4, 6, 8]
    assert [rates[0] for rates in model.optimizer.after] == [schedule(3 * step) for step in (0, 2, 4, 6)]
    assert [rates[0] for rates in model.other.after] == [schedule(3 * step) for step in (2, 6)]


def test_a_resumed_fit_goes_on_from_its_global_step(tmp_path: Path) -> None:
    model, state = Line(), tmp_path / "state.ckpt"
    run = trainer(accumulate_grad_batches=2)
    run.fit(model, datamodule=Data(4))
    run.save_checkpoint(state)
    session = fit_over_queue(
        tmp_path / "queue", 4, model, ckpt_path=state, accumulate_grad_batches=2, max_epochs=2
    )
    assert session.told == [(2 * ROWS, 3), (2 * ROWS, 4)]


def test_max_steps_leaves_the_rest_untrained(tmp_path: Path) -> None:
    session = fit_over_queue(tmp_path, 6, Line(), max_steps=2)
    assert session.trained == [1, 2]


# -- what is logged ------------------------------------------------------------------------------------------


def test_a_csv_logger_gets_every_metric_beside_the_users(tmp_path: Path) -> None:
    run = trainer(
        SharedQueueCallback(schedule), logger=CSVLogger(tmp_path), log_every_n_steps=2, max_epochs=2
    )
    run.fit(Line(), datamodule=Data(6, repeats=[3]))
    steps = [1, 3, 5, 7, 9, 11]
    assert sorted(column(tmp_path, "loss")) == steps
    found = {name: column(tmp_path, f"shardqueue/{name}") for name in rows_of_ours(tmp_path)}
    assert {name: sorted(values) for name, values in found.items()} == dict.fromkeys(found, steps)
    assert found["learning_rate"] == {step: schedule(3 * step) for step in steps}
    assert set(found["samples_per_second"].values()) == {32.0}
    assert set(found["rank_0/samples_per_second"].values()) == {16.0}
    assert set(found["rank_1/samples_per_second"].values()) == {16.0}
    assert set(found["rank_0/data_wait"].values()) == {0.25}
    assert set(found["rank_1/data_wait"].values()) == {0.5}
    assert set(found["data_wait"].values()) == {0.5}
    assert list(found["units_claimed"].values()) == [0, 2, 4, 6, 8, 10]
    assert list(found["units_left"].values()) == [10, 8, 6, 4, 2, 0]
    assert list(found["repeated"].values()) == [0, 0, 1, 1, 1, 1]
    assert list(found["eta_seconds"].values()) == [5.0, 4.0, 3.0, 2.0, 1.0, 0.0]
    assert len(found) == 11


def rows_of_ours(folder: Path) -> list[str]:
    return [name.removeprefix("shardqueue/") for name in rows_of(folder)[0] if name.startswith("shardqueue/")]


class Slowing(Data):
    """From the fourth batch on each takes twice as long."""

    def state(self, rank: int) -> tuple[int, int, float, float, int]:
        batches, samples, waited, elapsed, units = super().state(rank)
        return batches, samples, waited, elapsed + 0.5 * max(0, self.handed - 3), units


def test_rates_are_those_since_the_last_time(tmp_path: Path) -> None:
    callback = SharedQueueCallback(log_every_n_steps=1)
    trainer(callback, logger=CSVLogger(tmp_path)).fit(Line(), datamodule=Slowing())
    found = column(tmp_path, "shardqueue/samples_per_second")
    assert found == {1: 32.0, 2: 32.0, 3: 32.0, 4: 16.0, 5: 16.0}
    assert column(tmp_path, "shardqueue/data_wait") == {1: 0.5, 2: 0.5, 3: 0.5, 4: 0.25, 5: 0.25}


def test_an_interval_and_a_prefix_of_its_own(tmp_path: Path) -> None:
    callback = SharedQueueCallback(schedule, log_every_n_steps=3, prefix="queue/")
    run = trainer(callback, logger=CSVLogger(tmp_path), log_every_n_steps=2)
    run.fit(Line(), datamodule=Data(7))
    assert sorted(column(tmp_path, "loss")) == [1, 3, 5]
    assert column(tmp_path, "queue/learning_rate") == {2: schedule(6), 5: schedule(15)}
    assert rows_of_ours(tmp_path) == []


def test_with_accumulation_it_logs_once_a_step(tmp_path: Path) -> None:
    run = trainer(
        SharedQueueCallback(schedule),
        logger=CSVLogger(tmp_path),
        log_every_n_steps=2,
        accumulate_grad_batches=3,
    )
    run.fit(Line(), datamodule=Data(12))
    ours = [row for row in rows_of(tmp_path) if row["shardqueue/learning_rate"]]
    assert [int(row["step"]) for row in ours] == [1, 3]
    assert column(tmp_path, "shardqueue/learning_rate") == {1: schedule(9), 3: schedule(27)}


def test_in_manual_optimization_it_logs_by_batches(tmp_path: Path) -> None:
    run = trainer(SharedQueueCallback(schedule), logger=CSVLogger(tmp_path), log_every_n_steps=3)
    run.fit(Alternating(), datamodule=Data(9))
    assert column(tmp_path, "shardqueue/learning_rate") == {
        2: schedule(6),
        5: schedule(12),
        8: schedule(24),
    }


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        ({"max_epochs": 2}, 4.0),
        ({"max_epochs": -1, "max_steps": 20}, 8.0),
        ({"max_epochs": 2, "max_steps": 6}, 1.0),
        ({"max_epochs": 2, "max_steps": 3, "accumulate_grad_batches": 2}, 1.0),
        ({"max_epochs": 2, "limit_train_batches": 4}, 2.0),
        ({"max_epochs": -1}, 1.0),
    ],
)
def test_eta_knows_the_trainers_limits(options: dict[str, Any], seconds: float) -> None:
    found: list[float] = []

    class Reader(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            if trainer.fit_loop.epoch_loop.total_batch_idx == 3:
                found.append(trainer.progress_bar_metrics["eta_s"])
                trainer.should_stop = True

    run = trainer(Reader(), SharedQueueCallback(schedule, log_every_n_steps=1), **options)
    run.fit(Line(), datamodule=Data(6))
    assert found == [seconds]


def test_the_progress_bar_shows_a_short_set() -> None:
    bar = TQDMProgressBar()
    run = trainer(SharedQueueCallback(schedule), bar, log_every_n_steps=2, enable_progress_bar=True)
    run.fit(Line(), datamodule=Data())
    expected = {"lr": schedule(15), "samples/s": 32.0, "eta_s": 0.0}
    assert run.progress_bar_metrics == expected
    assert bar.get_metrics(run, run.lightning_module) == expected


def test_nothing_is_logged_when_told_so() -> None:
    run = trainer(SharedQueueCallback(schedule, log_every_n_steps=0))
    run.fit(Line(), datamodule=Data())
    assert run.progress_bar_metrics == {}


def test_without_a_schedule_no_learning_rate_is_logged(tmp_path: Path) -> None:
    run = trainer(SharedQueueCallback(), logger=CSVLogger(tmp_path), log_every_n_steps=2)
    run.fit(Line(), datamodule=Data())
    assert "samples_per_second" in rows_of_ours(tmp_path)
    assert "learning_rate" not in rows_of_ours(tmp_path)


@pytest.mark.parametrize("first", [True, False])
def test_a_learning_rate_monitor_logs_the_rate_of_the_step_in_either_order(
    tmp_path: Path, first: bool
) -> None:
    both = [LearningRateMonitor("step"), SharedQueueCallback(schedule)]
    run = trainer(*(both if first else reversed(both)), logger=CSVLogger(tmp_path), log_every_n_steps=2)
    run.fit(Line(), datamodule=Data())
    expected = {step: schedule(3 * step) for step in (1, 3, 5)}
    assert column(tmp_path, "lr-Noting/weight") == expected
    assert column(tmp_path, "shardqueue/learning_rate") == expected


def test_tensorboard_gets_the_same(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    from lightning.pytorch.loggers import TensorBoardLogger

    run = trainer(SharedQueueCallback(schedule), logger=TensorBoardLogger(tmp_path), log_every_n_steps=2)
    run.fit(Line(), datamodule=Data())
    (file,) = tmp_path.rglob("events.out.tfevents.*")
    found = {
        (value.tag, event.step): value.tensor.float_val[0]
        for event in events.EventFileLoader(str(file)).Load()
        for value in event.summary.value
        if value.tag.startswith("shardqueue/")
    }
    assert len(found) == 3 * 11
    assert found["shardqueue/rank_1/data_wait", 3] == 0.5
    assert found["shardqueue/learning_rate", 3] == pytest.approx(schedule(9))


# -- from a configuration file -------------------------------------------------------------------------------


class Decay:
    """A schedule with a setting."""

    def __init__(self, peak: float) -> None:
        self.peak = peak

    def __call__(self, progress: int) -> float:
        return self.peak / (1 + progress)


FUNCTION = "learning_rate: test_callback.schedule"
INSTANCE = "learning_rate: {class_path: test_callback.Decay, init_args: {peak: 0.001}}"


@pytest.mark.parametrize(
    "settings",
    [FUNCTION, INSTANCE, f"{FUNCTION}, factors: [1.0, 0.5]", f"{INSTANCE}, factors: {{bias: 0.5}}"],
)
def test_a_configuration_file_names_the_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: str
) -> None:
    pytest.importorskip("jsonargparse")
    from lightning.pytorch.cli import LightningCLI

    name = "shardqueue.lightning.callback.SharedQueueCallback"
    callback = f"{{class_path: {name}, init_args: {{{settings}, log_every_n_steps: 5}}}}"
    config = tmp_path / "config.yaml"
    config.write_text(f"trainer: {{logger: false, max_epochs: 1, callbacks: [{callback}]}}")
    monkeypatch.setattr("sys.argv", ["train"])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning 2.6 uses what 4.5x deprecates
    options: dict[str, Any] = {"run": False, "save_config_callback": None, "seed_everything_default": False}
    cli: Any = LightningCLI(Line, Data, args=["--config", str(config)], **options)
    found = next(one for one in cli.trainer.callbacks if isinstance(one, SharedQueueCallback))
    assert found.learning_rate is not None
    assert found.learning_rate(1) == 0.0005
    assert group_factors([{"name": "weight"}, {"name": "bias"}], found.factors)[0] == 1.0


# -- more than one rank --------------------------------------------------------------------------------------


def drifted(rank: int, agreement: bool) -> list[float]:
    """Train on two ranks, whose own dataset steps differ; return the parameters."""
    data = Data(20, drift=0 if agreement else rank)
    data.source = [torch.full((ROWS, 2), 1.0 + rank + step / 10) for step in range(20)]
    model = Line()
    trainer(SharedQueueCallback(Decay(0.1)), devices=2, strategy="ddp").fit(model, datamodule=data)
    return [float(value) for parameter in model.parameters() for value in parameter.detach().flatten()]


def test_ranks_that_drifted_apart_keep_identical_parameters_by_agreement_alone(
    ranks: Callable[[int], Ranks],
) -> None:
    one, other = ranks(2).run(drifted, True)
    assert one == other
    one, other = ranks(2).run(drifted, False)
    assert max(abs(a - b) for a, b in zip(one, other, strict=True)) > 0.01


def collectives(rank: int, logs: Path, called_back: bool) -> int:
    """Fit with a logger on two ranks; return how many collectives the fit took."""
    callbacks = [SharedQueueCallback(schedule, log_every_n_steps=2)] if called_back else []
    model, run = Line(), trainer(*callbacks, devices=2, strategy="ddp", logger=CSVLogger(logs))
    run.fit(model, datamodule=Data(20))
    group: Any = distributed.distributed_c10d._get_default_group()
    return int(group._get_sequence_number_for_group())


def test_setting_and_logging_take_no_collective(tmp_path: Path, ranks: Callable[[int], Ranks]) -> None:
    with_it = ranks(2).run(collectives, tmp_path / "with", True)
    without = ranks(2).run(collectives, tmp_path / "without", False)
    assert with_it == without
    assert without[0] > 20
    assert "shardqueue/samples_per_second" in rows_of(tmp_path / "with")[0]
