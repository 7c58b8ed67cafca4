"""`python -m benchmarks`: all benchmarks in one go, into one JSON and Markdown tables; see `benchmarks/README.md`."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.machine import machine, versions
from benchmarks.markdown import summary, whole
from benchmarks.suite import SUITE, document, run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.suite import Benchmark, Finding


def parser(suite: Sequence[Benchmark]) -> argparse.ArgumentParser:
    """What the command takes."""
    taken = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Run all benchmarks, one after another, each in its quick form, and write benchmarks.json, "
        "benchmarks.md (every row) and summary.md (what is promised, and the peers). Exits with 1 when a benchmark "
        "failed or found something WRONG; a missed reach is marked.",
    )
    taken.add_argument("--full", action="store_true", help="their full forms, which take much longer")
    names = [each.name for each in suite]
    taken.add_argument("--only", nargs="+", choices=names, metavar="NAME", help="these benchmarks")
    taken.add_argument(
        "--out",
        type=Path,
        default=Path("benchmark-results"),
        metavar="DIR",
        help="where to write (%(default)s)",
    )
    taken.add_argument("--list", action="store_true", help="print their names and commands, and run nothing")
    return taken


def main(arguments: Sequence[str] | None = None, suite: Sequence[Benchmark] = SUITE) -> int:
    given = parser(suite).parse_args(arguments)
    form = "full" if given.full else "quick"
    chosen = [each for each in suite if not given.only or each.name in given.only]
    if given.list:
        for each in chosen:
            print(f"{each.name}: python {' '.join(each.command(form))}")
        return 0
    given.out.mkdir(parents=True, exist_ok=True)
    started, began = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", time.monotonic()
    where, made_with = machine(), versions()
    findings: list[Finding] = []
    told = document(findings, form, started, 0.0, where, made_with)
    for place, each in enumerate(chosen, 1):
        print(f"== {place}/{len(chosen)} {each.name}", file=sys.stderr, flush=True)
        findings.append(run(each, form, bool(where["gpus"])))
        last = findings[-1]
        reason = f": {why}" if (why := last.skipped or last.failed) else ""
        print(f"== {each.name} {last.outcome}, {last.seconds:.0f} s{reason}", file=sys.stderr, flush=True)
        told = document(findings, form, started, time.monotonic() - began, where, made_with)
        write(told, given.out)  # whoever ends the suite early has what was measured
    print(whole(told))
    print(json.dumps(told), flush=True)
    return 1 if any(finding.failed for finding in findings) else 0


def write(told: dict[str, Any], folder: Path) -> None:
    """Write a document in its three forms."""
    (folder / "benchmarks.json").write_text(json.dumps(told, indent=1) + "\n")
    (folder / "benchmarks.md").write_text(whole(told))
    (folder / "summary.md").write_text(summary(told))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
