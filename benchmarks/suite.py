"""All benchmarks, one after another, each as a process of its own, and what came of them in one document.

A benchmark *failed* when it did not end with 0, did not end at all, printed no report, or said WRONG; the others run
all the same. A missed reach is marked and fails nothing: see `report`. What cannot run here is *skipped*, with the
reason.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.report import Report

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[1]
SCHEMA = 1
"""Of the document; it changes when a key changes its meaning or goes."""
LONGEST = {"quick": 600.0, "full": 3600.0}
"""Seconds that one benchmark may take."""
LEAVING = 20.0
"""Seconds that one has to stop what it started, when the suite is interrupted."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One run of a benchmark in the suite.

    Attributes:
        name: in the suite.
        arguments: besides `--quick`.
        module: of `benchmarks`; the name if empty.
        cuda: it needs a CUDA device.
    """

    name: str
    arguments: tuple[str, ...] = ()
    module: str = ""
    cuda: bool = False

    def command(self, form: str) -> list[str]:
        """What runs it, without the interpreter."""
        quick = ["--quick"] if form == "quick" else []
        return ["-m", f"benchmarks.{self.module or self.name}", *quick, *self.arguments]


SUITE = (
    Benchmark("makespan"),
    Benchmark("peers"),
    Benchmark("scale"),
    Benchmark("loader"),
    Benchmark("recovery"),
    Benchmark("lightning_overhead"),
    Benchmark("elastic"),
    Benchmark("imbalance"),
    Benchmark("channel"),
    Benchmark("teacher_student"),
    Benchmark("teacher_student_processes", ("--processes",), "teacher_student"),
    Benchmark("gpu_elastic", cuda=True),
)


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of one benchmark.

    Attributes:
        name: in the suite.
        command: that ran it, without the interpreter.
        seconds: it took.
        exit_code: None if it was skipped or did not end.
        report: its rows, and what was wrong and skipped within it.
        skipped: why it did not run; empty if it did.
        failed: why nothing else of this counts; empty if it does.
    """

    name: str
    command: list[str]
    seconds: float = 0.0
    exit_code: int | None = None
    report: Report = field(default_factory=lambda: Report(""))
    skipped: str = ""
    failed: str = ""

    @property
    def outcome(self) -> str:
        """In a word: measured, failed or skipped."""
        return "skipped" if self.skipped else "failed" if self.failed else "measured"

    def document(self) -> dict[str, Any]:
        """For programs."""
        keys = ("case", "value", "unit", "reach", "at_least", "missed", "against")
        return {
            "name": self.name,
            "command": ["python", *self.command],
            "outcome": self.outcome,
            "reason": self.skipped or self.failed,
            "seconds": round(self.seconds, 1),
            "exit_code": self.exit_code,
            "rows": [{key: getattr(row, key) for key in keys} for row in self.report.rows],
            "wrong": self.report.wrong,
            "skipped": self.report.skipped,
        }


def run(benchmark: Benchmark, form: str, has_cuda: bool) -> Finding:
    """Run one benchmark to its end; its standard error is passed on."""
    command = benchmark.command(form)
    if benchmark.cuda and not has_cuda:
        return Finding(benchmark.name, command, skipped="there is no CUDA device here")
    began = time.monotonic()
    exit_code, printed, said = run_to_end([sys.executable, *command], LONGEST[form])
    return read(benchmark.name, command, time.monotonic() - began, exit_code, printed, said)


def read(
    name: str, command: list[str], seconds: float, exit_code: int | None, printed: str, said: str
) -> Finding:
    """Make out what came of a benchmark by how it ended and what it printed to standard output and error."""
    lines = printed.splitlines() or [""]
    report, failed = Report(name), ""
    try:
        report = Report.of(json.loads(lines[-1]))
    except (ValueError, TypeError, KeyError, AttributeError):
        failed = "its last line is not a report"
    report.wrong += [
        what
        for line in lines[:-1]
        if line.startswith("WRONG: ") and (what := line.removeprefix("WRONG: ")) not in report.wrong
    ]
    if exit_code is None:
        failed = f"it did not end within {seconds:.0f} s"
    elif exit_code:
        failed = f"it ended with {exit_code}"
    if report.wrong:
        failed = f"WRONG: {report.wrong[0]}"
    elif failed and said.strip():
        failed += f": {said.strip().splitlines()[-1][:200]}"
    return Finding(name, command, seconds, exit_code, report, failed=failed)


def document(
    findings: Sequence[Finding],
    form: str,
    started: str,
    seconds: float,
    machine: dict[str, Any],
    versions: dict[str, str | None],
) -> dict[str, Any]:
    """Everything, for programs."""
    return {
        "benchmark": "suite",
        "schema": SCHEMA,
        "form": form,
        "started": started,
        "seconds": round(seconds, 1),
        "machine": machine,
        "versions": versions,
        "benchmarks": [finding.document() for finding in findings],
    }


def run_to_end(command: list[str], longest: float) -> tuple[int | None, str, str]:
    """Run a command, and pass on what it says on standard error.

    Returns:
        The exit code, or None if it took too long and was killed with all that it started; its standard output; the
        last lines of its standard error.
    """
    too_long, said = threading.Event(), deque[str](maxlen=20)
    with (
        tempfile.TemporaryFile("w+") as printed,
        subprocess.Popen(
            command, cwd=ROOT, text=True, stdout=printed, stderr=subprocess.PIPE, start_new_session=True
        ) as process,
    ):

        def stop() -> None:
            too_long.set()
            _kill(process)

        killer = threading.Timer(longest, stop)
        killer.start()
        try:
            for line in process.stderr or ():
                sys.stderr.write(line)
                sys.stderr.flush()
                said.append(line)
            exit_code = process.wait()
        except BaseException:
            _end(process)
            raise
        finally:
            killer.cancel()
        printed.seek(0)
        return (None if too_long.is_set() else exit_code), printed.read(), "".join(said)


def _end(process: subprocess.Popen[str]) -> None:
    """Interrupt it, as Ctrl-C in its own terminal does, so that it stops what it started; then kill what is left."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(LEAVING)
    _kill(process)


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill what leads a session, all processes of that session, and those below it that made one of their own."""
    below = _below(process.pid)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int(entry.name) in below or os.getsid(int(entry.name)) == process.pid:
                os.kill(int(entry.name), signal.SIGKILL)


def _below(leader: int) -> set[int]:
    """The processes that a process started, and those that these did, as long as their parents live."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            _, _, rest = entry.read_text().rpartition(")")
            children.setdefault(int(rest.split()[1]), []).append(int(entry.parent.name))
    found, wanted = set[int](), [leader]
    while wanted:
        wanted = [child for one in wanted for child in children.get(one, ()) if child not in found]
        found.update(wanted)
    return found
