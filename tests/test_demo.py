"""The demo: its arithmetic on written documents, its text, its model, and real processes."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from rich.console import Console

from shardqueue.demo import FULL, QUICK, Options, report, run
from shardqueue.demo.document import Document, Record, encode, ratios, verdict
from shardqueue.demo.fleet import Fleet, NodeFailedError
from shardqueue.demo.model import Replica, learning_rate
from shardqueue.demo.node import Shared
from shardqueue.demo.text import HELD_OUT_EVERY, loader, read_corpus, windows
from shardqueue.errors import InvalidInputError, ShardQueueError
from shardqueue.units import Unit

TINY = Options(steps=6, unit_steps=2, speeds=(1.0, 0.5), batch_seconds=0.01, sequences=2, context=16)


def record(node: str, unit: str, index: int, step: int, start: float, end: float) -> Record:
    pid = {"A": 11, "B": 12}[node]
    return {"pid": pid, "node": node, "unit": unit, "index": index, "step": step, "start": start, "end": end}


def document() -> Document:
    """Two nodes, A twice as fast as B; two units of two batches; one second a batch at speed 1."""
    fixed = [
        record("A", "u0", 0, 0, 0.0, 1.0),
        record("A", "u0", 1, 1, 1.0, 2.0),
        record("B", "u1", 0, 0, 0.0, 2.0),
        record("B", "u1", 1, 1, 2.0, 4.0),
    ]
    shared = [
        record("A", "u0", 0, 0, 0.0, 1.0),
        record("A", "u0", 1, 1, 1.0, 2.2),
        record("B", "u1", 0, 0, 0.0, 2.0),
        record("A", "u1", 1, 1, 2.2, 3.0),
    ]
    return {
        "format": "shardqueue-demo/1",
        "arguments": {},
        "machine": {},
        "batch_seconds": 1.0,
        "speeds": {"A": 1.0, "B": 0.5},
        "units": {
            "u0": {"first": 0, "count": 2, "lane": 0, "lanes": 2},
            "u1": {"first": 0, "count": 2, "lane": 1, "lanes": 2},
        },
        "loss_before": 5.5,
        "phases": [
            {"name": "fixed split", "loss": 3.0, "batches": fixed},
            {"name": "shared queue", "loss": 3.1, "batches": shared},
        ],
    }


def test_ratios_come_from_the_records() -> None:
    fixed, shared = ratios(document())
    assert (fixed.makespan, shared.makespan) == (4.0, 3.0)
    assert fixed.limit == shared.limit == pytest.approx(4 / 1.5)
    assert fixed.ratio == pytest.approx(1.5)
    assert [(s.node, s.units, s.batches, s.busy, s.idle) for s in fixed.shares] == [
        ("A", 1, 2, 2.0, 2.0),
        ("B", 1, 2, 4.0, 0.0),
    ]
    assert [(s.units, s.batches) for s in shared.shares] == [(2, 3), (1, 1)]
    assert (fixed.overran, shared.overran) == (0, 1)
    assert fixed.faults == shared.faults == ()


def test_a_missing_a_doubled_and_an_unknown_batch_are_found() -> None:
    written = document()
    batches = written["phases"][1]["batches"]
    batches[3] = batches[2]
    batches.append(record("B", "u9", 0, 0, 0.0, 1.0))
    _, shared = ratios(written)
    assert shared.faults == (
        "1 of 4 batches not trained, the first of them batch 1 of u1",
        "1 of 4 batches trained more than once, the first of them batch 0 of u1",
        "1 of 4 batches not in the plan, the first of them batch 0 of u9",
    )
    assert verdict(ratios(written))[0].startswith("shared queue: 1 of 4 batches not trained")


def test_a_batch_under_the_wrong_step_is_not_the_batch() -> None:
    written = document()
    written["phases"][0]["batches"][1]["step"] = 0
    fixed, _ = ratios(written)
    assert [fault.split(",")[0] for fault in fixed.faults] == [
        "1 of 4 batches not trained",
        "1 of 4 batches not in the plan",
    ]


def test_two_nodes_in_one_process_are_found() -> None:
    written = document()
    for entry in written["phases"][0]["batches"]:
        entry["pid"] = 11
    assert ratios(written)[0].faults == ("one process trained as two nodes",)


def test_a_phase_without_records_is_a_fault_and_no_crash() -> None:
    written = document()
    written["phases"][1]["batches"] = []
    _, shared = ratios(written)
    assert (shared.makespan, shared.ratio, len(shared.faults)) == (0.0, 0.0, 1)


def stretched(fixed: float, shared: float) -> Document:
    """Return the document with its last batches moved so that the two ratios are these."""
    written = document()
    limit = 4 / 1.5
    written["phases"][0]["batches"][3]["end"] = fixed * limit
    written["phases"][1]["batches"][3]["end"] = shared * limit
    return written


@pytest.mark.parametrize(
    ("fixed", "shared", "wrong"),
    [
        (2.25, 1.04, []),
        (1.91, 1.149, []),
        (1.9, 1.04, ["fixed split: 1.90 times the limit, not above 1.9."]),
        (2.25, 1.16, ["shared queue: 1.16 times the limit, not below 1.15."]),
        (1.5, 1.5, ["fixed split: 1.50", "shared queue: 1.50"]),
    ],
)
def test_verdict(fixed: float, shared: float, wrong: list[str]) -> None:
    found = verdict(ratios(stretched(fixed, shared)))
    assert len(found) == len(wrong)
    for reason, begins in zip(found, wrong, strict=True):
        assert reason.startswith(begins)
        assert "busy" in reason


def test_the_file_reads_back_and_has_one_batch_a_line() -> None:
    written = document()
    text = encode(written, [1])
    assert json.loads(text) == {**written, "results": [1]}
    assert sum('"pid"' in line for line in text.splitlines()) == 8


def test_the_table_fits_80_columns_and_is_plain_in_a_pipe(tmp_path: Path) -> None:
    written = stretched(1.5, 1.04)
    out = io.StringIO()
    outcomes = ratios(written)
    report.show(Console(file=out, width=80), written, outcomes, verdict(outcomes), tmp_path / "x.json")
    text = out.getvalue()
    assert "\x1b" not in text
    assert max(len(line) for line in text.splitlines() if str(tmp_path) not in line) <= 80
    assert "1.50 times the limit" in text
    assert "Not as it should be: fixed split" in text
    assert str(tmp_path / "x.json") in text


def test_the_real_plans_have_equal_slices() -> None:
    for options in (FULL, QUICK):
        units = options.plan()
        nodes = len(options.speeds)
        slices = [sum(units[name].count for name in list(units)[node::nodes]) for node in range(nodes)]
        assert slices == [options.steps] * nodes


def test_the_corpus_is_the_sources_of_a_folder_with_every_sixteenth_held_out(tmp_path: Path) -> None:
    for number in range(2 * HELD_OUT_EVERY):
        (tmp_path / f"m{number:02}.py").write_bytes(b"%02d" % number)
    (tmp_path / "notes.txt").write_bytes(b"xx")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "m.py").write_bytes(b"yy")
    corpus = read_corpus(tmp_path, least=4)
    assert bytes(corpus.held_out.tolist()) == b"1531"
    assert bytes(corpus.train.tolist()).startswith(b"000102")
    assert len(corpus.train) == 60


def test_a_folder_without_sources_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(ShardQueueError, match="hold 0 bytes"):
        read_corpus(tmp_path)


def test_the_standard_library_is_enough() -> None:
    corpus = read_corpus()
    assert len(corpus.train) > 1_000_000
    assert len(corpus.held_out) > 50_000


def test_a_unit_loads_the_same_batches_wherever_and_however_it_is_cut() -> None:
    text = torch.arange(5000).remainder(256).to(torch.uint8)
    load = loader(text, sequences=2, context=8)
    whole = dict(load(Unit(first=3, count=4, lane=1, lanes=4)))
    assert list(whole) == [3, 4, 5, 6]
    (step, batch), *_ = load(Unit(first=5, count=1, lane=1, lanes=4))
    assert batch.shape == (2, 9)
    assert batch.dtype == torch.int64
    assert torch.equal(batch, whole[step])
    assert torch.equal(batch, windows(text, [42, 43], 9))
    other = dict(load(Unit(first=5, count=1, lane=2, lanes=4)))
    assert not torch.equal(batch, other[5])


def test_windows_stay_inside_the_text() -> None:
    text = torch.arange(20).to(torch.uint8)
    drawn = windows(text, range(100), 16)
    assert {tuple(row.tolist()) for row in drawn} == {tuple(range(at, at + 16)) for at in range(5)}


def test_the_learning_rate_rises_then_falls() -> None:
    rates = [learning_rate(step, 100) for step in range(100)]
    peak = rates.index(max(rates))
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert 0 < rates[-1] < rates[0] < rates[peak]


def test_updates_through_shared_parameters_lower_the_loss_and_spare_the_random_state() -> None:
    before = torch.random.get_rng_state()
    nodes = [Replica(16), Replica(16)]
    assert torch.equal(before, torch.random.get_rng_state())
    batch = windows(read_corpus().train, range(8), 17)
    shared = nodes[0].values.clone()
    first = nodes[0].loss(batch)
    for turn in range(20):
        replica = nodes[turn % 2]
        replica.copy_in(shared)
        replica.compute(batch)
        replica.add_out(shared, 0.2)
    nodes[0].copy_in(shared)
    assert nodes[0].loss(batch) < first - 1


def shared_tensors(options: Options) -> Shared:
    tensors = (
        Replica(options.context).values,
        torch.zeros(500, dtype=torch.uint8),
        torch.zeros(len(options.speeds), dtype=torch.int64),
    )
    return Shared(*(tensor.share_memory_() for tensor in tensors))  # type: ignore[no-untyped-call]


def test_two_real_processes_train_each_batch_once_in_both_phases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    out = io.StringIO()
    run(TINY, tmp_path / "demo.json", Console(file=out, width=80))
    assert capsys.readouterr().err == ""
    assert [path.name for path in tmp_path.iterdir()] == ["demo.json"]

    written = json.loads((tmp_path / "demo.json").read_text())
    results = written.pop("results")
    for phase, outcome in zip(written["phases"], ratios(written), strict=True):
        assert outcome.faults == ()
        assert sum(share.batches for share in outcome.shares) == 12
        assert os.getpid() not in {entry["pid"] for entry in phase["batches"]}
        assert all(0 <= entry["start"] < entry["end"] for entry in phase["batches"])
        assert phase["loss"] < written["loss_before"]
        assert outcome.ratio == results.pop(0)["ratio"]
    assert "fixed split" in out.getvalue()


def test_a_node_that_fails_ends_the_demo_with_its_traceback(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    impossible = Options(steps=2, unit_steps=1, speeds=(1.0, 0.0))
    out = io.StringIO()
    assert run(impossible, tmp_path / "demo.json", Console(file=out)) == 1
    errors = capfd.readouterr().err
    assert "node B failed" in errors
    assert errors.count("Traceback") == 1
    assert "ZeroDivisionError" in errors
    assert list(tmp_path.iterdir()) == []


def test_a_killed_node_ends_the_phase_and_no_process_stays() -> None:
    slow = Options(steps=1000, unit_steps=1, speeds=(1.0, 1.0), batch_seconds=1.0)
    shared = shared_tensors(slow)

    def kill_one() -> None:
        if shared.done.sum():
            next(process for process in multiprocessing.active_children()).kill()

    with (
        pytest.raises(NodeFailedError, match=r"node [AB] ended with exit code -9"),
        Fleet(slow, shared) as fleet,
    ):
        fleet.run("fixed split", "", kill_one)
    assert multiprocessing.active_children() == []


ORPHANS = """
import os, signal
from shardqueue.demo.fleet import Fleet
from shardqueue.demo.options import Options
from test_demo import shared_tensors

slow = Options(steps=1000, unit_steps=1, speeds=(1.0,), batch_seconds=1.0)
shared = shared_tensors(slow)

def die():
    if shared.done.sum():
        os.kill(os.getpid(), signal.SIGKILL)

with Fleet(slow, shared) as fleet:
    fleet.run("fixed split", "", die)
"""


def test_nodes_go_when_the_process_that_started_them_is_killed() -> None:
    # The nodes hold the ends of these pipes too: `run` returns once they are gone.
    command, here = [sys.executable, "-c", ORPHANS], Path(__file__).parent
    ended = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGKILL, "", "")


def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path) -> None:
    for file in (tmp_path, tmp_path / "absent" / "demo.json"):
        with pytest.raises(InvalidInputError, match="can be written"):
            run(TINY, file)
