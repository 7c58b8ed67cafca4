"""Modules of every kind in elastic steps: precision, parameter groups, graphs with holes, buffers, compilation."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from elastic_cases import FEATURES, Rows
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import BackboneFinetuning
from strategy_cases import Case, Learner, Told, all_told, alone, rows_of, scaled, scaler_of, steps_of
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from jobs import Up

SLOW = (0.0, 0.004, 0.02)


class Wide(Learner):
    """Several parts: some share weights, some are frozen, some are used in every other step only, or never."""

    def build(self) -> torch.nn.Module:
        parts = {name: torch.nn.Linear(8, 8) for name in ("shared", "frozen", "sometimes", "never")}
        parts |= {
            "input": torch.nn.Linear(FEATURES, 8),
            "tied": torch.nn.Linear(8, 8),
            "output": torch.nn.Linear(8, 1),
        }
        body = torch.nn.ModuleDict(parts)
        body["tied"].weight = body["shared"].weight
        body["frozen"].requires_grad_(False)
        return body

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        body: Any = self.body
        hidden = body["input"](inputs).tanh()
        hidden = checkpoint(
            lambda x: body["tied"](body["shared"](x).tanh()).tanh(), hidden, use_reentrant=False
        )
        hidden = body["frozen"](hidden)
        if (inputs[:, 0] > 0.8).any():  # in some micro-batches, on some ranks
            hidden = hidden + body["sometimes"](hidden)
        return functional.mse_loss(body["output"](hidden), targets)

    def optimizer(self) -> torch.optim.Optimizer:
        named = dict(self.named_parameters())
        biases = [value for name, value in named.items() if name.endswith("bias")]
        others = [value for name, value in named.items() if not name.endswith("bias")]
        groups: list[dict[str, Any]] = [
            {"params": others},
            {"params": biases, "lr": 0.2, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)


class Compiled(Learner):
    def build(self) -> torch.nn.Module:
        return torch.compile(super().build(), backend="aot_eager")  # type: ignore[return-value]


class Normed(Learner):
    """With buffers that every forward changes."""

    def build(self) -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Linear(FEATURES, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
        )


class Thawing(Learner):
    """With a backbone for `BackboneFinetuning`."""

    def build(self) -> torch.nn.Module:
        self.backbone = torch.nn.Sequential(torch.nn.Linear(FEATURES, 8), torch.nn.Tanh())
        return torch.nn.Linear(8, 1)

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(self.body(self.backbone(inputs)), targets)

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([value for value in self.parameters() if value.requires_grad], lr=0.05)


class Overflowing(Learner):
    """Whose gradients overflow in some steps, while the GradScaler's scale is large."""

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return super().loss(inputs, targets) * 4

    def on_before_zero_grad(self, optimizer: Any) -> None:
        plugin: Any = self.trainer.precision_plugin
        self.notes.append(plugin.scaler.get_scale())


def mixed_alone(
    case: Case, every: list[Told], dtype: torch.dtype, scaler: torch.amp.GradScaler | None
) -> Any:
    """As `alone`, in mixed precision: micro-batches of one size."""
    rows, model = Rows(case.rows, torch.float32), case.made()
    optimizer, scales = model.optimizer(), []
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    for batches in steps_of(every):
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        for batch in batches:
            with torch.autocast("cpu", dtype):
                loss = model.loss(rows.inputs[batch], rows.targets[batch])
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= len(batches)
        scaler.step(optimizer)
        scaler.update()
    return scales, {name: value.detach() for name, value in model.named_parameters()}


DECAY = 0.5
AVERAGING: Any = getattr(callbacks, "EMAWeightAveraging", None)
"""Older versions of Lightning have no moving average of the weights."""
CASES: dict[str, Case] = {
    "wide": Case(rows=201, each=6, pauses=SLOW, model=Wide),
    "normed": Case(rows=98, pauses=SLOW, model=Normed),
    "bf16": Case(rows=120, dtype="float32", pauses=SLOW, trainer={"precision": "bf16-mixed"}),
    "fp16": Case(rows=240, dtype="float32", pauses=SLOW, plugins=(scaled,), model=Overflowing),
    "thawing": Case(
        rows=60,
        pauses=SLOW,
        epochs=3,
        model=Thawing,
        callbacks=(partial(BackboneFinetuning, unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.01),),
    ),
    "group": Case(rows=61, batch=3, pauses=SLOW, strategy={"group": 2}),
}

if AVERAGING is not None:
    CASES["average"] = Case(rows=60, pauses=SLOW, callbacks=(partial(AVERAGING, decay=DECAY),))
COMPILED = Case(rows=60, pauses=SLOW, model=Compiled)


@pytest.mark.full
def test_compiled(ranks: Up, tmp_path: Path) -> None:
    every = [rank[0] for rank in ranks(3).run(all_told, 3, [COMPILED], str(tmp_path))]
    assert rows_of(every) == Counter(range(60))
    for key, value in alone(COMPILED, every).items():
        torch.testing.assert_close(every[0].parameters[key], value, rtol=0, atol=1e-12)


def test_modules(ranks: Up, tmp_path: Path) -> None:
    told = ranks(3).run(all_told, 3, list(CASES.values()), str(tmp_path))
    of = {name: [rank[number] for rank in told] for number, name in enumerate(CASES)}
    for name, every in of.items():
        assert len({one.digest for one in every}) == 1, name
        assert rows_of(every) == Counter(CASES[name].epochs * list(range(CASES[name].rows))), name
    for name in ("wide", "group"):
        for key, value in alone(CASES[name], of[name]).items():
            torch.testing.assert_close(
                of[name][0].parameters[key], value, rtol=0, atol=1e-12, msg=f"{name} {key}"
            )
    assert len(of["fp16"][2].steps) < CASES["fp16"].steps, "a rank was to have steps without a micro-batch"
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        scales, parameters = mixed_alone(
            CASES[name], of[name], dtype, scaler_of() if name == "fp16" else None
        )
        for one in of[name]:
            assert one.notes == (scales if name == "fp16" else [])
            for key, value in parameters.items():
                torch.testing.assert_close(one.parameters[key], value, rtol=0, atol=1e-5)
    assert of["fp16"][0].notes[:2] == [2.0**20, 2.0**19], "the first step was to overflow"
    assert of["normed"][0].buffers["body.1.num_batches_tracked"] == 49
    check_thawed(of["thawing"])
    if "average" in of:
        check_averaged(CASES["average"], of["average"])


def check_thawed(every: list[Told]) -> None:
    """The backbone takes part from the second epoch on, at its own rate."""
    case = CASES["thawing"]
    rows, model = Rows(case.rows, torch.float64), case.made()
    assert isinstance(model, Thawing)
    optimizer = torch.optim.SGD(model.body.parameters(), lr=0.05)
    for number, batches in enumerate(steps_of(every)):
        if number == case.steps:
            optimizer.add_param_group({"params": list(model.backbone.parameters()), "lr": 0.01})
        if number == 2 * case.steps:
            optimizer.param_groups[1]["lr"] = 0.02  # doubled each epoch by default
        optimizer.zero_grad()
        losses = [model.loss(rows.inputs[batch], rows.targets[batch]) for batch in batches]
        torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    for name, value in model.named_parameters():
        torch.testing.assert_close(every[0].parameters[name], value.detach(), rtol=0, atol=1e-12)


def check_averaged(case: Case, every: list[Told]) -> None:
    """What is left in the end is the moving average of the parameters after each step."""
    averages: dict[str, torch.Tensor] = {}

    def follow(model: Learner, optimizer: torch.optim.Optimizer, number: int) -> None:
        for name, value in model.named_parameters():
            now = value.detach().clone()
            averages[name] = DECAY * averages[name] + (1 - DECAY) * now if number > 1 else now

    last = alone(case, every, follow)
    for name, value in every[0].parameters.items():
        expected = DECAY * averages[name] + (1 - DECAY) * last[name]
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-12)
