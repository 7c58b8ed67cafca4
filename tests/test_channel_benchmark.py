"""The channel's benchmark: what programs read of it, where it is exact on any machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.torch
def test_nobody_starves_and_nothing_wakes_up() -> None:
    command = [sys.executable, "-m", "benchmarks.channel", "--quick", "--strict"]
    command += ["--only", "virtual", "--only", "idle"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = ended.stdout.splitlines()
    found = json.loads(lines[-1])
    assert found["benchmark"] == "channel"
    rows = found["rows"]
    assert [row["unit"] for row in rows] == [
        *["of its time", "of its time", "x the makespan"] * 3,
        *["switches"] * 6,
    ]
    assert all(row.keys() == {"case", "value", "unit", "reach", "against"} for row in rows)
    assert len(lines) == len(rows) + 2  # a heading, a line a row, and the JSON: nothing was WRONG
    assert all(row["value"] <= 0.02 for row in rows if row["case"].endswith("waits most"))
    assert all(row["value"] >= 0.25 for row in rows if row["case"].endswith("by round robin"))
    assert all(row["value"] == 0 for row in rows if row["unit"] == "switches")
