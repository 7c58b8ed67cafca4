"""Unequal devices in four regimes: samples a second, and how long each rank idles. `measure` is for programs.

`__main__` is the command, and starts the ranks. What each of them does is in `ranks`: on its `device`, with the
`model`, over the `mailbox`, as `settings` say. What was measured, and all that follows from it, is in `results`;
`picture` draws it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.imbalance.results import Measurement

ROOT = Path(__file__).parents[2]
"""Where Python finds `benchmarks`."""


def measure(ranks: int | None = None, *arguments: str) -> Measurement:
    """Run the benchmark in processes of its own, for a program or a notebook.

    Args:
        ranks: how many; None for one a GPU where there are several, else four on the CPU.
        arguments: as on the command line, but for `--json`.

    Raises:
        RuntimeError: it failed; with what it said last.
    """
    with tempfile.TemporaryDirectory(prefix="shardqueue-imbalance-") as folder:
        file = Path(folder) / "measured.json"
        line = [sys.executable, "-m", "benchmarks.imbalance", *arguments, "--json", str(file)]
        if ranks is not None:
            line += ["--ranks", str(ranks)]
        ended = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
        if not file.exists():
            raise RuntimeError(f"the benchmark failed ({ended.returncode}): {ended.stderr[-2000:]}")
        return Measurement.from_json(file.read_text(encoding="utf-8"))
