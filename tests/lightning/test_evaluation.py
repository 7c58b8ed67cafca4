"""Evaluation beside collectives: where steps must be even, steps without a trace, buffers that keep quiet."""

from __future__ import annotations

import random
import threading
from collections import defaultdict, deque
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torchmetrics import CatMetric, Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassPrecision, MulticlassRecall

from shardqueue.errors import InvalidInputError
from shardqueue.lightning.evaluation import collectives_in_forward, discarded_step, quiet_buffers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ranks import Ranks

    Up = Callable[[int], Ranks]

CLASSES, FEATURES, ROWS = 3, 4, 8
Batch = dict[str, Tensor]


def batches(count: int, seed: int = 0) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "rows": torch.randn(ROWS, FEATURES, generator=generator) + i,
            "labels": torch.randint(CLASSES, (ROWS,), generator=generator),
        }
        for i in range(count)
    ]


def loader(of: list[Batch]) -> DataLoader[Batch]:
    return DataLoader(cast("Dataset[Batch]", of), batch_size=None)


class Classifier(LightningModule):
    """A model with BatchNorm, whose validation logs a mean and a metric."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES)
        )
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return cross_entropy(self.layers(batch["rows"]), batch["labels"])

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        assert not self.training
        scores = self.layers(batch["rows"])
        self.accuracy.update(scores, batch["labels"])
        self.log("loss", cross_entropy(scores, batch["labels"]), sync_dist=True, batch_size=ROWS)
        self.log("accuracy", self.accuracy)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def judged(self, of: list[Batch]) -> tuple[float, float]:
        """Loss and accuracy over all these batches, in this process."""
        rows, labels = (torch.cat([batch[name] for batch in of]) for name in ("rows", "labels"))
        with torch.no_grad():
            scores = self.eval().layers(rows)
        return float(cross_entropy(scores, labels)), float((scores.argmax(1) == labels).float().mean())


class Share(Callback):
    """What one rank evaluates, as a loader and the end of its quiet: batches of its own, then steps to discard."""

    def __init__(self, own: list[Batch], discarded: int = 0) -> None:
        self.own, self.discarded = own, discarded
        self.quiet = ExitStack()
        self.trainer: Trainer | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.trainer = trainer

    def __iter__(self) -> Iterator[Batch]:
        assert self.trainer is not None
        self.quiet.enter_context(quiet_buffers(self.trainer))
        yield from self.own
        before = self._modes()
        for index in range(self.discarded):
            discarded_step(self.trainer, batches(1, seed=9)[0], len(self.own) + index)
        assert self._modes() == before

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.quiet.close()

    def _modes(self) -> list[bool]:
        assert self.trainer is not None
        assert self.trainer.strategy.model is not None
        return [module.training for module in self.trainer.strategy.model.modules()]


def trainer_of(world_size: int, strategy: Strategy | str = "ddp", **options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=strategy,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"logger": False, "num_sanity_val_steps": 0, **options},
    )


# -- buffers under DDP ---------------------------------------------------------------------------------------


def fitted(rank: int, counts: Sequence[int]) -> tuple[float, float, float, float]:
    """Fit two epochs, each with a validation of as many batches a rank; return what it logged, and what is right."""
    own = batches(sum(counts))[sum(counts[:rank]) : sum(counts[: rank + 1])]
    share = Share(own, discarded=not own)
    trainer, module = trainer_of(len(counts), max_epochs=2, callbacks=[share]), Classifier()
    trainer.fit(module, loader(batches(4, seed=1 + rank)), share)
    logged = trainer.callback_metrics
    # What all ranks should have evaluated: rank 0's model.
    judge = Classifier()
    judge.load_state_dict(trainer.strategy.broadcast(module.state_dict()))
    return float(logged["loss"]), float(logged["accuracy"]), *judge.judged(batches(sum(counts)))


@pytest.mark.parametrize("counts", [(0, 3), (3, 0), (1, 3)])
def test_ranks_validate_as_many_batches_as_they_have_within_fit(ranks: Up, counts: tuple[int, int]) -> None:
    for loss, accuracy, right_loss, right_accuracy in ranks(2).run(fitted, counts, patience=30):
        assert loss == pytest.approx(right_loss, rel=1e-5)
        assert accuracy == pytest.approx(right_accuracy)


class Silent(Classifier):
    """Asks for no collective of its own in validation."""

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.layers(batch["rows"])


def trained(rank: int) -> Any:
    """Fit two epochs, whose validations run no step at all on rank 0; return all that was trained."""
    share = Share(batches(2) if rank else [])
    module = Silent()
    trainer_of(2, max_epochs=2, callbacks=[share]).fit(module, loader(batches(4, seed=1 + rank)), share)
    return [plain(parameter) for parameter in module.parameters()]


def test_a_rank_may_have_no_step_at_all(ranks: Up) -> None:
    first, second = ranks(2).run(trained, patience=30)
    assert first == second


def quieted(rank: int) -> tuple[list[tuple[bool, bool]], list[float]]:
    """The switches of a DDP, inside and after a forward of rank 0 and an error; and what its buffers became."""
    torch.distributed.init_process_group("gloo")
    layers = Classifier().layers
    layers.register_buffer("turned", torch.zeros(2, 3).T)
    layers.register_buffer("ignored", torch.zeros(()))
    ignore = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    ignore(layers, ["ignored"])  # type: ignore[no-untyped-call]
    replica = DistributedDataParallel(layers)
    for buffer in (layers.turned, layers.ignored):
        cast("Tensor", buffer).fill_(rank)
    trainer = cast("Trainer", SimpleNamespace(strategy=SimpleNamespace(model=replica)))
    seen = []
    with pytest.raises(LookupError), quiet_buffers(trainer):
        seen.append((replica.broadcast_buffers, replica.require_forward_param_sync))
        with torch.no_grad():
            _ = rank == 0 and replica.eval()(batches(1)[0]["rows"])
        raise LookupError
    seen.append((replica.broadcast_buffers, replica.require_forward_param_sync))
    return seen, [float(buffer.sum()) for name, buffer in layers.named_buffers() if "." not in name]


def test_quiet_makes_buffers_those_of_rank_0_and_ends_whatever_happens(ranks: Up) -> None:
    switches = [(False, True), (True, True)]
    assert ranks(2).run(quieted) == [(switches, [0, 0]), (switches, [0, 1])]


# -- where steps must be even --------------------------------------------------------------------------------


class Named(DDPStrategy):
    """Evaluates as DDP does."""


class SetUpElsewise(DDPStrategy):
    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)


def reason(strategy: type[Strategy], model: nn.Module, world_size: int = 2) -> str | None:
    """What is said of a strategy that cannot be made here, for want of a GPU or of a package."""
    made = object.__new__(strategy)
    made._model = model
    return collectives_in_forward(cast("Trainer", SimpleNamespace(world_size=world_size, strategy=made)))


@pytest.mark.parametrize("strategy", [FSDPStrategy, ModelParallelStrategy, DeepSpeedStrategy, SetUpElsewise])
def test_a_strategy_not_known_to_evaluate_as_ddp_does_is_a_reason(strategy: type[Strategy]) -> None:
    assert reason(strategy, Classifier()) == strategy.__name__
    assert reason(strategy, Classifier(), world_size=1) is None


def test_ddp_and_a_single_device_are_none() -> None:
    assert reason(DDPStrategy, Classifier()) is None
    assert reason(Named, Classifier()) is None
    assert reason(SingleDeviceStrategy, Classifier(), world_size=1) is None


def test_what_wraps_the_module_or_is_in_it_is_a_reason() -> None:
    assert reason(DDPStrategy, nn.Sequential(Classifier())) == "Sequential"
    module = Classifier()
    module.accuracy = MulticlassAccuracy(CLASSES, dist_sync_on_step=True)
    assert reason(DDPStrategy, module) == "MulticlassAccuracy with dist_sync_on_step"


def reasons(rank: int) -> list[str | None]:
    """Of modules that are nothing without a process group."""
    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    replicated, sharded, wrapped, tensors = (Classifier() for _ in range(4))
    fully_shard(sharded.layers[0], mesh=mesh)
    wrapped.layers[0] = FullyShardedDataParallel(wrapped.layers[0], device_id=torch.device("cpu"))
    parallelize_module(tensors.layers[0], mesh, ColwiseParallel())
    switchless = DistributedDataParallel(Classifier())
    del switchless.require_forward_param_sync
    models = [DistributedDataParallel(replicated), sharded, wrapped, tensors, switchless]
    return [reason(DDPStrategy, model) for model in models]


def test_sharded_modules_are_a_reason_and_ddp_only_where_it_cannot_be_kept_quiet(ranks: Up) -> None:
    assert (
        ranks(2).run(reasons)
        == [
            [
                None,
                "FSDPLinear",
                "FullyShardedDataParallel",
                "Linear with DTensor parameters",
                "DistributedDataParallel with buffers",
            ]
        ]
        * 2
    )


# -- steps for their collectives alone -----------------------------------------------------------------------


class Sharded(DDPStrategy):
    """FSDP as `FSDPStrategy` applies it, which insists on CUDA."""

    def __init__(self, use_orig_params: bool) -> None:
        super().__init__()
        self.use_orig_params = use_orig_params

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        assert self.model is not None
        self.model = FullyShardedDataParallel(
            self.model, use_orig_params=self.use_orig_params, device_id=torch.device("cpu")
        )


class FullySharded(Classifier):
    """FSDP2, as `ModelParallelStrategy` has a module do it."""

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        for part in (self.layers[0], self.layers[3], self.layers):
            fully_shard(part, mesh=self.device_mesh["data_parallel"])


def validated(rank: int, sharding: str, counts: Sequence[int]) -> tuple[str | None, float, float]:
    """Validate as many batches a rank over sharded parameters, even by steps to discard."""
    made: dict[str, tuple[Strategy, LightningModule]] = {
        "fsdp": (Sharded(use_orig_params=True), Classifier()),
        "fsdp of flat parameters": (Sharded(use_orig_params=False), Classifier()),
        "fully_shard": (ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1), FullySharded()),
    }
    strategy, module = made[sharding]
    share = Share(
        batches(sum(counts))[sum(counts[:rank]) : sum(counts[: rank + 1])], max(counts) - counts[rank]
    )
    trainer = trainer_of(2, strategy, callbacks=[share])
    (logged,) = trainer.validate(module, share, verbose=False)
    return collectives_in_forward(trainer), logged["loss"], logged["accuracy"]


@pytest.mark.parametrize("counts", [(3, 1), (0, 2)])
@pytest.mark.parametrize("sharding", ["fsdp", "fsdp of flat parameters", "fully_shard"])
def test_discarded_steps_make_uneven_ranks_even(ranks: Up, sharding: str, counts: tuple[int, int]) -> None:
    right_loss, right_accuracy = Classifier().judged(batches(sum(counts)))
    for name, loss, accuracy in ranks(2).run(validated, sharding, counts, patience=30):
        assert name
        assert loss == pytest.approx(right_loss, rel=1e-5)
        assert accuracy == pytest.approx(right_accuracy)


class Meter:
    """What people average with: an object with plain attributes."""

    def __init__(self) -> None:
        self.total, self.by_class = 0.0, [0] * CLASSES

    def add(self, value: float, label: int) -> None:
        self.total += value
        self.by_class[label] += 1


class Corner(nn.Module):
    """A part of a model that keeps things of its own."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.kept = CatMetric()
        self.seen: list[list[Tensor]] = [[]]

    def forward(self, scores: Tensor) -> Tensor:
        self.calls += 1
        self.kept.update(scores)
        self.seen[0].append(scores)
        return scores


class Hoarder(LightningModule):
    """A model whose steps leave something in whatever a module may hold."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm, self.corner = nn.Linear(FEATURES, CLASSES), nn.BatchNorm1d(CLASSES), Corner()
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.scores = MetricCollection([MulticlassPrecision(CLASSES), MulticlassRecall(CLASSES)])
        self.outputs: list[Tensor] = []
        self.by_label: defaultdict[int, list[int]] = defaultdict(list)
        self.labels: set[int] = set()
        self.recent: deque[int] = deque(maxlen=2)
        self.pair = ([0], {"steps": 0})
        self.steps, self.sum, self.name = 0, torch.zeros(()), ""
        self.histogram, self.meter = np.zeros(CLASSES), Meter()
        self.noises = (torch.Generator(), random.Random(0), np.random.default_rng(0))

    def forward(self, batch: Batch, batch_idx: int) -> Tensor:
        batch["rows"].add_(1)
        drawn = torch.rand(()) + random.random() + np.random.rand()
        ours = torch.rand((), generator=self.noises[0]) + self.noises[1].random() + self.noises[2].random()
        scores: Tensor = self.corner(self.norm(self.layer(batch["rows"]))) + drawn + ours
        label, loss = int(batch["labels"][0]), cross_entropy(scores, batch["labels"])
        self.accuracy(scores, batch["labels"])
        self.scores.update(scores, batch["labels"])
        self.outputs.append(scores)
        self.outputs[0] += 1
        self.by_label[label].append(batch_idx)
        self.labels.add(batch_idx)
        self.recent.append(batch_idx)
        self.pair[0][0] += 1
        self.pair[1]["steps"] += 1
        self.steps += 1
        self.sum += loss
        self.name += str(batch_idx)
        self.latest = loss
        self.histogram[label] += 1
        self.meter.add(float(loss), label)
        if not hasattr(self, "late"):
            self.late = MulticlassAccuracy(CLASSES)
        return loss

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return cross_entropy(self.layer(batch["rows"]), batch["labels"]) + 0 * torch.rand(())

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        loss = self(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(batch["rows"]))
        self.log("last", loss, on_step=True, on_epoch=False)
        self.log("most", loss, reduce_fx="max")
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log_dict(self.scores)
        assert self.logger is not None
        self.logger.log_metrics({"directly": float(loss)})

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Batch) -> Tensor:
        return self.forward(batch, 0)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def left(self) -> Any:
        """All that it holds, as plain values."""
        metrics = [module for module in self.modules() if isinstance(module, Metric)]
        states = [(type(metric).__name__, metric.update_count, metric.metric_state) for metric in metrics]
        random_states = (
            self.noises[0].get_state(),
            self.noises[1].getstate(),
            self.noises[2].bit_generator.state,
        )
        own = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        names = [name for name, _ in self.named_modules()]
        modes = [module.training for module in self.modules()]
        deeper = vars(self.meter), self.corner.seen, self.state_dict(), states, random_states, names, modes
        return plain([own, *deeper])


def plain(value: Any) -> Any:
    """A value as what can be compared and pickled; what holds more goes by its type."""
    if isinstance(value, Tensor | np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | deque):
        return [plain(item) for item in value]
    return value if isinstance(value, int | float | str | set) else type(value).__name__


class Interrupted:
    """Batches with a step to discard before each of them, and after the last; or without."""

    def __init__(self, discards: bool) -> None:
        self.discards, self.discarded = discards, 0
        self.batch = batches(1, seed=9)[0]
        self.trainer: Trainer | None = None

    def __iter__(self) -> Iterator[Batch]:
        for batch in batches(3):
            self._discard()
            yield batch
        self._discard()

    def _discard(self) -> None:
        if self.discards:
            assert self.trainer is not None
            discarded_step(self.trainer, self.batch, 99)
            self.discarded += 1


def left_by(rank: int, method: str, discards: bool, folder: Path) -> tuple[int, Any, Any, str]:
    """Steps discarded, and whatever else a run leaves: results and draws, what the module holds, the log."""
    logger = CSVLogger(folder, name=f"{discards}")
    trainer = trainer_of(1, "auto", logger=logger, max_epochs=2, num_sanity_val_steps=2, log_every_n_steps=1)
    module, interrupted = Hoarder(), Interrupted(discards)
    interrupted.trainer = trainer
    returned: Any = None
    with isolate_rng():
        seed_everything(1, verbose=False)
        if method == "fit":
            trainer.fit(module, loader(batches(2)), interrupted)
        elif method == "predict":
            returned = trainer.predict(module, interrupted)
        else:
            returned = getattr(trainer, method)(module, interrupted, verbose=False)
        drawn = [torch.rand(()), random.random(), np.random.rand()]
    assert plain(interrupted.batch) == plain(batches(1, seed=9)[0])
    written = Path(logger.log_dir, "metrics.csv")
    text = written.read_text() if written.exists() else ""
    return interrupted.discarded, plain([returned, drawn, trainer.callback_metrics]), module.left(), text


@pytest.mark.parametrize(
    ("method", "steps"), [("validate", 4), ("test", 4), ("predict", 4), ("fit", 2 + 4 + 4)]
)
def test_a_discarded_step_leaves_no_trace(ranks: Up, tmp_path: Path, method: str, steps: int) -> None:
    (without,) = ranks(1).run(left_by, method, False, tmp_path)
    (beside,) = ranks(1).run(left_by, method, True, tmp_path)
    assert beside == (steps, *without[1:])
    assert without[0] == 0
    assert ("directly" in without[3]) == (method != "predict")


class Custodian(LightningModule):
    """Holds what is not its own to change back, and fails after it has changed the rest."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.gathered = torch.zeros(3)
        self.gathered.untyped_storage().resize_(0)
        self.mapped = np.memmap(folder / "map", mode="w+", shape=(1,))
        self.service = SimpleNamespace(calls=0, lock=threading.Lock())
        self.parameters_of_others = [nn.Parameter(torch.zeros(1))]
        self.steps = 0

    @torch.no_grad()
    def validation_step(self, batch: Batch) -> None:
        self.steps += 1
        self.latest, self.late = batch, nn.Linear(1, 1)
        self.parameters_of_others[0].add_(1)
        self.gathered = torch.ones(3)
        self.mapped += 1
        self.service.calls += 1
        raise LookupError


def kept(rank: int, folder: Path) -> list[object]:
    """What is left of a discarded step that fails."""
    logger = CSVLogger(folder)
    trainer, module = trainer_of(1, "auto", logger=logger), Custodian(folder)
    with pytest.raises(InvalidInputError, match="discard steps only while"):
        discarded_step(trainer, None, 0)

    class Failing:
        def __iter__(self) -> Iterator[Batch]:
            with pytest.raises(LookupError):
                discarded_step(trainer, batches(1)[0], 0)
            assert trainer.loggers == [logger]
            yield from ()

    trainer.validate(module, Failing(), verbose=False)
    assert not hasattr(module, "latest")
    assert not hasattr(module, "late")
    others = [module.gathered, module.mapped, module.parameters_of_others[0], module.service.calls]
    return [module.steps, *map(plain, others)]


def test_what_is_not_the_module_s_own_is_left_alone_and_a_step_may_fail(ranks: Up, tmp_path: Path) -> None:
    assert ranks(1).run(kept, tmp_path) == [[0, [1.0] * 3, [1], [1.0], 1]]
