"""The imbalance benchmark: what is computed of a measurement, and what it finds with two unequal CPU ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from benchmarks import imbalance
from benchmarks.imbalance import __main__ as command
from benchmarks.imbalance import picture
from benchmarks.imbalance.device import Pace
from benchmarks.imbalance.model import SYMBOLS, Decoder, Sequences
from benchmarks.imbalance.results import (
    ELASTIC,
    FIXED,
    INDEPENDENT,
    REGIMES,
    Device,
    Measurement,
    Part,
    RankResult,
    Result,
    gathered,
    rows,
    table,
)
from benchmarks.imbalance.settings import MOST_SAMPLES, SMALL, check_speeds, fitting_batch_size, paces
from shardqueue.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[1]
DEVICES = Device(0, "fast", "here", 300.0), Device(1, "slow at 1/2", "here", 100.0)


def measurement(*results: Result) -> Measurement:
    return Measurement(DEVICES, results, {"steps": 8})


def result(regime: str, seconds: float, busy: tuple[float, float]) -> Result:
    ranks = RankResult(0, 600, busy[0]), RankResult(1, 200, busy[1])
    return Result(regime, seconds, ranks, first_loss=5.0, last_loss=2.0)


# -- what is computed ----------------------------------------------------------------------------------------


def part(trained: list[int], losses: list[list[float]], seconds: float = 2.0) -> Part:
    return Part(seconds, 1.0, trained, losses)


def test_a_regime_lasts_until_its_last_rank_is_done() -> None:
    made = gathered(FIXED, [part([0, 3], [[4.0]], 1.5), part([2, 1], [[6.0], [1.0]], 4.0)], 4)
    assert made.faults == ()
    assert (made.seconds, made.samples_per_second, made.rate(1)) == (4.0, 1.0, 0.5)
    assert (made.idle(0), made.mean_idle) == (0.75, 0.75)


def test_losses_are_those_before_the_first_step_and_of_the_last_quarter() -> None:
    eight = [[8.0, 6.0], *([[5.0]] * 5), [2.0], [1.0]]
    made = gathered(INDEPENDENT, [part([0], eight), part([1], [[7.0], [3.0]]), part([], [])], 2)
    assert (made.first_loss, made.last_loss) == (7.0, 2.0)


@pytest.mark.parametrize(
    ("trained", "last", "said"),
    [
        ([0, 1, 1], 1.0, "of 4 samples 1 were trained too often, 1 never"),
        ([0, 1, 4], 1.0, "of 4 samples 1 were trained too often, 1 never"),
        ([0, 1], 1.0, "of 4 samples 0 were trained too often, 1 never"),
        ([0, 1, 2], 4.6, "the loss was 5.000 at first and 4.600 at last: it did not fall"),
        ([0, 1, 2], float("nan"), "the loss was 5.000 at first and nan at last: it did not fall"),
    ],
)
def test_what_must_not_happen_is_a_fault(trained: list[int], last: float, said: str) -> None:
    parts = [part(trained, [[5.0], [last]]), part([3], [[5.0], [last]])]
    assert gathered(FIXED, parts, 4).faults == (said,)


def test_a_fault_is_wrong_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    bad = gathered(FIXED, [part([0], [[5.0], [1.0]]), part([0], [[5.0], [1.0]])], 2)
    given = command.parser().parse_args([])
    assert command.tell(measurement(bad), given) == 1
    assert "WRONG: fixed split: of 2 samples 1 were trained too often, 1 never" in capsys.readouterr().out
    assert command.tell(measurement(result(FIXED, 8.0, (2.0, 8.0))), given) == 0


def test_rows_compare_with_the_fixed_split_and_the_best_possible() -> None:
    measured = measurement(result(FIXED, 8.0, (2.0, 8.0)), result(ELASTIC, 2.5, (2.0, 2.0)))
    assert (measured.best, measured.fastest) == (400.0, 0)
    found = {row.case: row for row in rows(measured)}
    assert found["elastic: all ranks"].value == 320.0
    assert found["elastic: of the best possible"].value == 0.8
    assert found["elastic over fixed split"].value == 3.2
    assert found["elastic over fixed split"].against == "fixed split 100.0 samples/s"
    assert found["fixed split: idle, fastest rank (0)"].value == 0.75
    assert all(row.reach is None for row in found.values())
    assert "fixed split over fixed split" not in found
    assert not any("over fixed split" in row.case for row in rows(measurement(measured.results[1])))


def test_the_table_has_a_line_for_each_rank_and_regime() -> None:
    measured = measurement(result(FIXED, 8.0, (2.0, 8.0)), result(ELASTIC, 2.5, (2.0, 2.0)))
    lines = [line.split() for line in table(measured).splitlines() if line]
    assert lines[1] == ["fixed", "split", "0", "fast", "300.0", "75.0", "75%"]
    assert lines[2] == ["fixed", "split", "1", "slow", "at", "1/2", "100.0", "25.0", "0%"]
    assert lines[6][:5] == ["elastic", "all", "400.0", "320.0", "20%"]
    assert table(measured).endswith("3.20 x fixed split, 80% of the best possible")
    far = Measurement((DEVICES[0], Device(1, "GPU", "there", 100.0, 3 * 2**30)), measured.results)
    assert "GPU, there, 3.0 GiB" in table(far)


def test_a_measurement_is_read_as_it_was_written() -> None:
    measured = measurement(result(FIXED, 8.0, (2.0, 8.0)), result(ELASTIC, 2.5, (2.0, 2.0)))
    assert Measurement.from_json(measured.as_json()) == measured
    assert measured.result(ELASTIC) == measured.results[1]
    assert measured.result(INDEPENDENT) is None


def test_it_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    measured = measurement(result(FIXED, 8.0, (2.0, 8.0)), result(ELASTIC, 2.5, (2.0, 2.0)))
    rates, idle = picture.plot(measured).axes
    heights = [[bar.get_height() for bar in axes.patches] for axes in (rates, idle)]  # type: ignore[attr-defined]
    assert heights == [pytest.approx([100.0, 320.0]), pytest.approx([75.0, 20.0, 0.0, 20.0])]
    picture.save(measured, tmp_path / "drawn.svg")
    assert "<svg" in (tmp_path / "drawn.svg").read_text()


# -- what it is asked ----------------------------------------------------------------------------------------


def test_cpu_ranks_are_unequal() -> None:
    assert [paces(ranks) for ranks in (1, 2, 4)] == [(1.0,), (1.0, 0.25), (1.0, 0.5, 0.5, 0.25)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--speeds", "1,2"], "speeds='2': speeds must be a number from 0.01 to 1"),
        (["--speeds", "1,1/0"], "speeds='1/0'"),
        (["--speeds", "1,1/2", "--ranks", "3"], "speeds='1,1/2': speeds must be 3 numbers, one a rank"),
        (["--per-rank", "0"], "per_rank='0'"),
        (["--steps", "2"], "steps='2': steps must be a whole number from 3 "),
        (["--width", "100"], "width=100: width must be a multiple of 12"),
        (["--json", "/nowhere/file"], "json='/nowhere/file'"),
        (
            ["--plot", "drawn.txt"],
            "plot='drawn.txt': plot must be a file that ends in one of .png, .svg, .pdf",
        ),
    ],
)
def test_what_cannot_be_is_said_before_ranks_start(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert command.main(arguments) == 2
    assert said in capsys.readouterr().err


def test_speeds_are_one_a_rank() -> None:
    check_speeds((), 3)
    check_speeds((1.0, 0.5), 2)
    with pytest.raises(InvalidInputError, match="must be 3 numbers"):
        check_speeds((1.0, 0.5), 3)


def told_by(
    *seconds_and_parts: Callable[[int], tuple[float, float]],
) -> Callable[[int], list[tuple[float, float]]]:
    return lambda size: [rank(size) for rank in seconds_and_parts]


def test_batches_keep_the_fastest_gpu_busy() -> None:
    fast, slow = (lambda size: (size * 1e-3, 0.0)), (lambda size: (size * 9e-3, 0.0))
    assert fitting_batch_size(told_by(fast, slow)) == 32
    assert fitting_batch_size(told_by(slow, slow)) == 4
    assert fitting_batch_size(told_by(lambda _: (0.0, 0.0))) == MOST_SAMPLES


def test_batches_fit_into_the_smallest_gpu() -> None:
    large, small = (lambda size: (size * 1e-5, size / 10**6)), (lambda size: (size * 1e-5, size / 20))
    assert fitting_batch_size(told_by(large, small)) == 16  # 0.8 of it; 8 are 0.4 of it
    full = lambda size: (size * 1e-5, 2.0 if size > 8 else 0.1)  # noqa: E731
    assert fitting_batch_size(told_by(large, full)) == 8
    with pytest.raises(InvalidInputError, match="smaller --width"):
        fitting_batch_size(told_by(large, lambda _: (0.0, 2.0)))


# -- what is trained -----------------------------------------------------------------------------------------


def test_samples_are_numbered_and_can_be_learnt() -> None:
    data = Sequences(5000, SMALL)
    number, tokens = data[4999]
    assert (number, len(data), len(tokens)) == (4999, 5000, SMALL.length + 1)
    follow = sum(
        int((row[1:] == (7 * row[:-1] + 3) % SYMBOLS).sum()) for _, row in (data[n] for n in range(200))
    )
    assert 0.85 < follow / (200 * SMALL.length) < 0.95


def test_computing_ends_where_the_backward_pass_comes_to_the_first_layer() -> None:
    """In DDP the wait for the others' gradients comes after it, when backward is over for the embedding as well."""
    held: list[set[str]] = []
    model = Decoder(
        SMALL, lambda: held.append({name for name, one in model.named_parameters() if one.grad is None})
    )
    model(Sequences(8, SMALL)[3][1].unsqueeze(0)).backward()
    assert held == [{"embedding.weight"}]


def test_a_pace_is_kept_and_counts_as_computing() -> None:
    pace = Pace(torch.device("cpu"))
    pace.seconds = 0.02
    for _ in range(3):
        pace.begin()
        pace.hold()
    assert pace.busy() > 0.05
    pace.forget()
    assert pace.busy() == 0.0


# -- all of it -----------------------------------------------------------------------------------------------


def torchrun(*line: str, ranks: int, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        *line,
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(cwd)}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.full
def test_two_unequal_ranks(tmp_path: Path) -> None:
    """All numbers are of one run; the ranks' paces, 4 to 1, make the ratios what they are."""
    options = "--quick", "--speeds", "1,1/4", "--json", "all.json", "--plot", "all.png"
    ended = torchrun("-m", "benchmarks.imbalance", *options, ranks=2, cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "WRONG" not in ended.stdout
    lines = ended.stdout.splitlines()
    found = json.loads(lines[-1])
    assert found["benchmark"] == "imbalance"
    value = {row["case"]: row["value"] for row in found["rows"]}
    assert value["elastic over fixed split"] > 1.4  # 2.5 is possible
    assert value["independent over fixed split"] > 1.4
    assert value["fixed split: idle, fastest rank (0)"] > 1.5 * value["elastic: idle, fastest rank (0)"]

    measured = Measurement.from_json((tmp_path / "all.json").read_text())
    assert tuple(result.regime for result in measured.results) == REGIMES
    assert table(measured) in ended.stdout
    for result in measured.results:
        assert sum(rank.samples for rank in result.ranks) == measured.settings["samples"]
        assert result.faults == ()
    even, elastic = measured.result(FIXED), measured.result(ELASTIC)
    assert even is not None and elastic is not None
    assert even.ranks[0].samples == even.ranks[1].samples
    assert elastic.ranks[0].samples > 2 * elastic.ranks[1].samples
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_ranks_on_gpus(tmp_path: Path) -> None:
    """Two ranks, on one GPU or two; a small model, for which the batch size is found."""
    options = "--quick", "--width", "96", "--layers", "2", "--length", "64", "--speeds", "1,1/2"
    ended = torchrun("-m", "benchmarks.imbalance", *options, "--json", "all.json", ranks=2, cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    measured = Measurement.from_json((tmp_path / "all.json").read_text())
    assert all(device.memory > 0 for device in measured.devices)
    assert torch.cuda.get_device_name(0) in measured.devices[0].name
    for result in measured.results:
        assert 0 < result.ranks[0].busy <= result.seconds


@pytest.mark.full
def test_a_program_measures_without_torchrun() -> None:
    measured = imbalance.measure(2, "--quick", "--steps", "3", "--only", INDEPENDENT)
    assert [device.rank for device in measured.devices] == [0, 1]
    assert [(result.regime, result.faults) for result in measured.results] == [(INDEPENDENT, ())]
    with pytest.raises(RuntimeError, match="speeds must be 3 numbers"):
        imbalance.measure(3, "--speeds", "1,1")


FAILING = """
import os, sys
from benchmarks.imbalance import __main__ as command, ranks

compute = ranks.Work.micro_batch


def fail(self, *given):
    if os.environ["RANK"] == "1" and self._started:
        raise RuntimeError("no more of that")
    return compute(self, *given)


ranks.Work.micro_batch = fail
sys.exit(command.main())
"""


@pytest.mark.full
@pytest.mark.parametrize("regime", [FIXED, ELASTIC])
def test_a_rank_that_fails_ends_the_others_and_is_named(regime: str, tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    ended = torchrun("failing.py", "--quick", "--only", regime, ranks=2, cwd=tmp_path)
    assert ended.returncode != 0
    assert "imbalance: rank 1 on " in ended.stderr
    assert "RuntimeError: no more of that" in ended.stderr
    assert not ended.stdout


@pytest.mark.full
def test_a_mailbox_that_a_rank_does_not_see_is_refused(tmp_path: Path) -> None:
    """Each rank goes into a folder of its own, where a relative path leads elsewhere."""
    script = "import os, sys\nos.makedirs(os.environ['RANK'])\nos.chdir(os.environ['RANK'])\n"
    script += "from benchmarks.imbalance import __main__ as command\nsys.exit(command.main())\n"
    (tmp_path / "apart.py").write_text(script)
    ended = torchrun("apart.py", "--quick", "--mailbox", "queue", ranks=2, cwd=tmp_path)
    assert ended.returncode != 0
    assert "rank 1 does not see what rank 0 wrote there; pass one that all ranks reach" in ended.stderr
