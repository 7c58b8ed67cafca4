"""`shardqueue demo`: four processes of unequal speed, one small model, and the units handed out in two ways.

The nodes train the same units from the same parameters twice: first with a fixed split, each node its equal
slice, then with the shared queue over a mailbox in a temporary folder. The result is a table and a JSON file with
every batch.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from rich.console import Console

from shardqueue.demo import document as documents
from shardqueue.demo import report
from shardqueue.demo.fleet import Fleet, NodeFailedError
from shardqueue.demo.model import Replica
from shardqueue.demo.node import Shared
from shardqueue.demo.options import FULL, QUICK, Options
from shardqueue.demo.text import read_corpus, windows
from shardqueue.errors import InvalidInputError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from shardqueue.demo.node import Phase

__all__ = ["FULL", "QUICK", "Options", "run"]

_PHASES: tuple[Phase, ...] = ("fixed split", "shared queue")
_HELD_OUT_ROWS = 128


def run(options: Options, file: Path, console: Console | None = None) -> int:
    """Run the demo, print its result and write `file`.

    Returns:
        0, or 1 when a node failed or the result is not what it should be.

    Raises:
        InvalidInputError: `file` cannot be written.
        ShardQueueError: this Python has no sources to train on.
    """
    try:
        new = not file.exists()
        file.open("a").close()
        if new:
            file.unlink()
    except OSError as error:
        bound = f"a file that can be written ({error.strerror})"
        raise InvalidInputError("json", str(file), bound, "pass --json PATH") from None
    console = Console() if console is None else console
    try:
        document = measure(options, console)
    except NodeFailedError as error:
        print(f"shardqueue demo: {error}", file=sys.stderr)
        return 1
    outcomes = documents.ratios(document)
    wrong = documents.verdict(outcomes)
    file.write_text(documents.encode(document, [asdict(outcome) for outcome in outcomes]), encoding="utf-8")
    report.show(console, document, outcomes, wrong, file)
    return 1 if wrong else 0


def measure(options: Options, console: Console) -> documents.Document:
    """Run both phases and return what was measured.

    Raises:
        NodeFailedError: a node's process ended early.
    """
    corpus = read_corpus()
    replica = Replica(options.context)
    held_out = windows(corpus.held_out, range(_HELD_OUT_ROWS), options.context + 1)
    document = _head(options, replica.loss(held_out))
    initial = replica.values.clone()
    shared = _shared(options, initial, corpus.train)
    with (
        tempfile.TemporaryDirectory(prefix="shardqueue-demo-") as mailbox,
        Fleet(options, shared) as fleet,
        report.progress(console, options, shared.done) as tick,
    ):
        for phase in _PHASES:
            shared.parameters.copy_(initial)
            records = fleet.run(phase, mailbox, partial(tick, phase))
            replica.copy_in(shared.parameters)
            loss = replica.loss(held_out)
            document["phases"].append({"name": phase, "loss": loss, "batches": records})
    return document


def _shared(options: Options, initial: Tensor, text: Tensor) -> Shared:
    tensors = initial.clone(), text, torch.zeros(len(options.nodes), dtype=torch.int64)
    return Shared(*(tensor.share_memory_() for tensor in tensors))  # type: ignore[no-untyped-call]


def _head(options: Options, loss: float) -> documents.Document:
    units = {name: asdict(unit) for name, unit in options.plan().items()}
    return {
        "format": "shardqueue-demo/1",
        "arguments": asdict(options),
        "machine": {
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "system": f"{platform.system()} {platform.machine()}",
            "python": platform.python_version(),
            "torch": str(torch.__version__),
        },
        "batch_seconds": options.batch_seconds,
        "speeds": dict(zip(options.nodes, options.speeds, strict=True)),
        "units": cast("dict[str, documents.UnitEntry]", units),
        "loss_before": loss,
        "phases": [],
    }
