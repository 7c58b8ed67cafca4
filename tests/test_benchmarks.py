"""The benchmarks: what programs read of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def test_claiming_costs_what_is_promised_at_any_scale() -> None:
    """In virtual time, so the same numbers on every machine: a reach that is missed fails."""
    command = [sys.executable, "-m", "benchmarks.scale", "--quick", "--strict", "--only", "virtual"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["benchmark"] == "scale"
    assert sum(row["reach"] is not None for row in found["rows"]) >= 4


@pytest.mark.full
def test_the_loader_benchmark_ends_with_one_line_of_json() -> None:
    command = [sys.executable, "-m", "benchmarks.loader", "--quick", "--only", "many_units"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = ended.stdout.splitlines()
    found = json.loads(lines[-1])
    assert found["benchmark"] == "loader"
    assert [row["unit"] for row in found["rows"]] == ["MB", "s", "MB", "s"]
    assert all(row.keys() == {"case", "value", "unit", "reach", "against"} for row in found["rows"])
    assert len(lines) == len(found["rows"]) + 2  # a heading, a line a row, and the JSON: nothing was WRONG


@pytest.mark.full
def test_what_the_ranks_of_lockstep_tell_each_other_is_measured() -> None:
    rows = rows_of("lightning_overhead", "--only", "agreement")
    assert [row["case"].partition(",")[0] for row in rows] == 2 * ["agreement of 2 ranks"] + 2 * [
        "agreement of 4 ranks"
    ]


@pytest.mark.full
def test_lockstep_trains_every_row_that_plain_ddp_trains() -> None:
    rows = rows_of("lightning_overhead")
    assert sum(row["unit"] == "x plain" for row in rows) == 3


@pytest.mark.full
def test_to_lose_nothing_costs_what_is_promised() -> None:
    """In virtual time, so the same numbers on every machine."""
    rows = rows_of("recovery", "--only", "requests")
    long = {row["case"]: row["value"] for row in rows if "00 units" in row["case"]}
    assert len(long) == 4  # with 100 units a learner
    assert max(long.values()) <= 3.5
    (twice,) = (row for row in rows if row["unit"] == "batches")
    assert twice["value"] <= twice["reach"]


@pytest.mark.full
def test_what_status_reads_does_not_grow_with_the_units() -> None:
    rows = rows_of("recovery", "--only", "status")
    assert [row["value"] for row in rows if row["unit"] == "requests"] == [67, 67]


def rows_of(benchmark: str, *arguments: str) -> list[dict[str, Any]]:
    """Run it; return its rows if nothing was WRONG."""
    command = [sys.executable, "-m", f"benchmarks.{benchmark}", "--quick", *arguments]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = ended.stdout.splitlines()
    found = json.loads(lines[-1])
    assert found["benchmark"] == benchmark
    assert all(row.keys() == {"case", "value", "unit", "reach", "against"} for row in found["rows"])
    assert len(lines) == len(found["rows"]) + 2  # a heading, a line a row, and the JSON
    return list(found["rows"])
