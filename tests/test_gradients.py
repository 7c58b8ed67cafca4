"""Gradients and buffers summed over ranks are those of one process, whoever trained which micro-batch."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from gradient_cases import (
    MODELS,
    UNEVEN,
    Assorted,
    Case,
    Told,
    alone,
    broadcast,
    broken_off,
    buffered,
    copied,
    events,
    extremes,
    partly_frozen,
    train,
    trained,
)

from shardqueue.errors import InvalidInputError
from shardqueue.gradients import Gradients

if TYPE_CHECKING:
    from collections.abc import Callable

    from ranks import Ranks

    Up = Callable[[int], Ranks]

SOON = 40.0
"""Seconds in which a fault must have become an error on every rank."""
SHARED = "reentrant, shared"
"""The model whose parameters get several gradients in one backward."""


def check(case: Case, told: list[Told], rtol: float, atol: float) -> None:
    """All ranks have the same to the bit, and what one process has."""
    one = alone(case)
    for other in told:
        assert other.digests == told[0].digests, case
        assert other.without == one.without, case
        torch.testing.assert_close(other.parameters, one.parameters, rtol=rtol, atol=atol, msg=f"{case}: %s")


@pytest.mark.parametrize("size", [2, 3])
def test_the_gradients_are_those_of_one_process(ranks: Up, size: int) -> None:
    """Also where rank 2 never has a micro-batch; and the same to the bit, whether sums begin early or not."""
    early = [Case(model) for model in MODELS if model not in (SHARED, "complex")]
    early += [Case(zero="zeros"), Case("unused", zero="zeros"), Case(zero="late"), Case(bucket_bytes=1 << 20)]
    late = [replace(case, overlap=False) for case in early]
    more = [Case(SHARED, overlap=False)]
    cases = early + late + more
    told = ranks(size).run(trained, cases)
    for number, case in enumerate(cases):
        check(case, [rank[number] for rank in told], 1e-12, 1e-12)
    for number in range(len(early)):
        assert told[0][number].digests == told[0][len(early) + number].digests, early[number]


def test_types_of_parameters(ranks: Up) -> None:
    cases = [Case(dtype=torch.float32), Case(dtype=torch.bfloat16, overlap=False)]
    cases += [Case("complex", torch.float32), Case("complex", torch.float32, overlap=False)]
    told = ranks(2).run(trained, cases)
    for number, case in enumerate(cases):
        tolerance = 2e-2 if case.dtype is torch.bfloat16 else 1e-6
        check(case, [rank[number] for rank in told], 0.0, tolerance)


@pytest.mark.full
def test_many_steps_of_many_sizes(ranks: Up) -> None:
    generator = torch.Generator().manual_seed(0)

    def drawn(most: int, count: int) -> list[int]:
        return torch.randint(0, most, (count,), generator=generator).tolist()

    steps = [list(zip(drawn(3, n + 1), [1 + s for s in drawn(16, n + 1)], strict=True)) for n in drawn(9, 60)]
    cases = [
        Case(model, steps=steps, bucket_bytes=size, overlap=overlap)
        for model in MODELS
        for size in (1, 1000)
        for overlap in (True, False)
        if model != "complex" and not (overlap and model == SHARED)
    ]
    told = ranks(3).run(trained, cases)
    for number, case in enumerate(cases):
        check(case, [rank[number] for rank in told], 1e-10, 1e-12)


def test_a_process_on_its_own(tmp_path: Any) -> None:
    steps = [[(0, size) for _, size in step] for step in UNEVEN]
    for model in MODELS:
        case = Case(model, torch.float32 if model == "complex" else torch.float64, steps)
        check(case, [train(0, case, None)], 1e-6, 1e-6 if model == "complex" else 1e-12)


# -- when sums begin ----------------------------------------------------------------------------------------


def test_sums_begin_within_the_last_backward_alone(ranks: Up) -> None:
    """As soon as the gradients of a bucket are in, and the last with the last gradient."""
    case = Case(
        "plain"
    )  # a bucket for each layer's weight, then one for its bias and the next weight, and so on
    for seen in ranks(2).run(events, case):
        last = seen[seen.index("layers.0.weight") + 1 :]
        assert "sum" not in seen[: seen.index("layers.0.weight")], "a backward before the last"
        first = last.index("sum")
        assert first < last.index("layers.0.weight") < last.index("backward ended")
        assert last[last.index("backward ended") :] == ["backward ended", "launched"]
    for seen in ranks(2).run(events, replace(case, overlap=False)):
        assert "sum" not in seen[: seen.index("backward ended")]
        assert "sum" in seen[seen.index("backward ended") :]


def test_a_gradient_that_comes_after_its_sum_began_is_an_error(ranks: Up) -> None:
    case = Case(SHARED, steps=[[(0, 4), (1, 4)]] * 2)
    for outcome in ranks(2).outcomes(trained, [case], patience=SOON):
        assert outcome.error == "ClosedError"
        assert "parameter layers.0." in outcome.text
        assert "use_reentrant=False" in outcome.text


def test_a_step_that_was_not_finished(ranks: Up) -> None:
    told = ranks(2).run(broken_off)
    for said, hooks, mean in told:
        assert "call finish first, or close" in said
        assert hooks == 0
        assert mean == pytest.approx(alone(Case()).parameters[0].flatten().tolist(), abs=1e-12)


def test_a_module_can_be_copied_and_saved_meanwhile(ranks: Up) -> None:
    assert ranks(2).run(copied) == [True, True]


# -- values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 3.0)])
def test_infinity_and_nan_reach_every_rank(ranks: Up, weights: tuple[float, float]) -> None:
    """A GradScaler finds them after the sum; half precision overflows no earlier than the mean does."""
    mean = (3.0 * weights[0] + 5.0 * weights[1]) / sum(weights)
    for gradients in ranks(3).run(extremes, weights):
        infinite, none, large, plain = [float(gradient) for gradient in gradients]
        assert infinite == math.inf
        assert math.isnan(none)
        assert large == 40_000.0
        assert plain == mean


def test_buffers(ranks: Up) -> None:
    """Batch norm's statistics are means by micro-batches, counters count all of them; one rank has none at times."""
    counts = [[1, 3, 0], [2, 1, 1], [0, 1, 2], [1, 0, 0]]
    told = ranks(3).run(buffered, counts)
    left_alone = {"changed.mask", "grown.rows"}
    for step, count in enumerate(counts):
        before, after = told[0][step]["before"], told[0][step]["after"]
        made = [rank[step]["made"] for rank in told]
        for name in set(after) - left_alone:
            for rank in told:
                assert torch.equal(rank[step]["after"][name], after[name]), name
            if after[name].dtype in (torch.int64, torch.uint8):
                added = sum(int(one[name]) - int(before[name]) for one in made)
                assert int(after[name]) == int(before[name]) + added, name
            else:
                parts = [n * one[name].cdouble() for n, one in zip(count, made, strict=True) if n]
                mean = torch.stack(parts).sum(dim=0) / sum(count)
                torch.testing.assert_close(after[name].cdouble(), mean, rtol=1e-3, atol=1e-6, msg=name)
        for name in left_alone:
            for rank in told:
                assert torch.equal(rank[step]["after"][name], rank[step]["made"][name]), name
    assert int(told[0][-1]["after"]["norm.num_batches_tracked"]) == sum(map(sum, counts))
    assert not torch.equal(
        told[0][0]["before"]["norm.running_mean"], told[0][0]["after"]["norm.running_mean"]
    )


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_the_module_of_rank_0_becomes_everybodys(ranks: Up, bucket_bytes: int) -> None:
    wanted = Assorted(0).state_dict()
    for state in ranks(3).run(broadcast, bucket_bytes, False):
        assert state.keys() == wanted.keys()
        for name, value in wanted.items():
            assert torch.equal(state[name], value), name


# -- refusals -----------------------------------------------------------------------------------------------


def test_modules_that_differ_are_refused_on_every_rank(ranks: Up) -> None:
    for outcome in ranks(3).outcomes(broadcast, 1 << 20, True, patience=SOON):
        assert (outcome.error, "build the same module on all ranks" in outcome.text) == (
            "AgreementError",
            True,
        )


@pytest.mark.parametrize("at", [0, 4])
def test_freezing_on_one_rank_alone_is_refused_on_every_rank(ranks: Up, at: int) -> None:
    """Before sums of different sizes meet, of which a process can die."""
    for outcome in ranks(2).outcomes(partly_frozen, at, patience=SOON):
        assert (outcome.error, "freeze and unfreeze the same" in outcome.text) == ("AgreementError", True)


@pytest.mark.parametrize("weight", [0, -1.0, math.inf, math.nan])
def test_weights_that_weigh_nothing(weight: float) -> None:
    gradients = Gradients(torch.nn.Linear(1, 1), None)
    gradients.begin()
    with pytest.raises(InvalidInputError, match=r"weight=.* must be a finite number above 0"):
        gradients.weigh(weight)
    gradients.close()


def test_sparse_gradients_are_refused() -> None:
    module = torch.nn.Embedding(4, 2, sparse=True)
    gradients = Gradients(module, None)
    gradients.begin()
    gradients.weigh(1.0)
    with pytest.raises(InvalidInputError, match=r"weight\.grad.*sparse=False"):
        module(torch.tensor([1, 2])).sum().backward()
    gradients.close()


def test_gradients_outside_a_step_are_left_alone() -> None:
    module: Any = torch.nn.Linear(2, 1)
    gradients = Gradients(module, None)
    gradients.last = lambda: pytest.fail("asked outside a step")
    gradients.begin()
    module(torch.ones(1, 2)).sum().backward()
    gradients.close()
    gradients.close()
    assert torch.equal(module.weight.grad, torch.ones(1, 2))
