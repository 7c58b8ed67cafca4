"""The demo from beginning to end: the ranks are led through both phases, the result is checked, shown and written."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from rich.console import Console

from shardqueue.demo.elastic import document as documents
from shardqueue.demo.elastic import rank, report
from shardqueue.demo.elastic.options import PHASES
from shardqueue.demo.fleet import Fleet, NodeFailedError
from shardqueue.demo.live import progress
from shardqueue.demo.report import written
from shardqueue.demo.stage import machine
from shardqueue.terminal import check_file

if TYPE_CHECKING:
    from pathlib import Path

    from shardqueue.demo.elastic.options import ElasticOptions

__all__ = ["run"]


def run(options: ElasticOptions, file: Path, console: Console | None = None) -> int:
    """Run the demo, print its result and write `file`.

    Args:
        options: what to train on which ranks.
        file: the JSON file to write.
        console: where to print; by default stdout.

    Returns:
        0, or 1 when a rank failed or the result is not what it should be.

    Raises:
        InvalidInputError: the file cannot be written.
    """
    check_file("json", file)
    console = Console() if console is None else console
    try:
        document = measure(options, console)
    except NodeFailedError as error:
        print(f"shardqueue demo: {error}", file=sys.stderr)
        return 1
    found, paper = documents.outcomes(document), documents.computed(document)
    wrong = documents.verdict(found, paper)
    results = [asdict(outcome) for outcome in found]
    file.write_text(documents.encode(document, results, asdict(paper)), encoding="utf-8")
    report.show(console, document, found, paper, wrong)
    written(console, "Every micro-batch, with its process, rows, loss, start and end", file)
    return 1 if wrong else 0


def measure(options: ElasticOptions, console: Console) -> documents.Document:
    """Run both phases and return what was measured.

    Raises:
        NodeFailedError: a rank's process ended early.
    """
    document = _head(options)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    done = torch.zeros(len(options.nodes), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
    fleet = Fleet(options, rank.Shared(done, store.port), rank.main, rank.PRELOADED)
    with (
        tempfile.TemporaryDirectory(prefix="shardqueue-demo-") as folder,
        progress(console, options, done) as seen,
        fleet,
    ):
        for phase in PHASES:
            done.zero_()
            seen.starts(phase)
            parts = fleet.run(phase, folder, seen.tick)
            ranks = dict(zip(options.nodes, parts, strict=True))
            document["phases"].append({"name": phase, "ranks": ranks})
            seen.ends(max((end for part in parts for end in part["ends"]), default=0.0))
    return document


def _head(options: ElasticOptions) -> documents.Document:
    return {
        "format": "shardqueue-demo-elastic/1",
        "arguments": asdict(options),
        "machine": machine(),
        "batch_seconds": options.batch_seconds,
        "speeds": options.by_node,
        "steps": options.steps,
        "micro_batches": options.micro_batches,
        "rows": options.rows,
        "phases": [],
    }
