"""The demo from beginning to end: everything is checked, the nodes are led through both phases, the result is shown.

What can be wrong with the arguments is found before the first process starts: files that cannot be written, a mailbox
that cannot hold a queue. In a mailbox of the visitor's the shared queue gets a prefix of its own, made anew, so that
the demo can run there any number of times; it stays, to be looked at. Without one, a temporary folder does.
"""

from __future__ import annotations

import os
import platform
import secrets
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, cast

import torch
from rich.console import Console

from shardqueue.demo import document as documents
from shardqueue.demo import picture, report
from shardqueue.demo.fleet import Fleet, NodeFailedError
from shardqueue.demo.live import progress
from shardqueue.demo.model import Replica
from shardqueue.demo.node import Shared
from shardqueue.demo.text import read_corpus, windows
from shardqueue.errors import InvalidInputError
from shardqueue.mailbox import open_mailbox
from shardqueue.terminal import check_file

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

    from shardqueue.demo.node import Phase
    from shardqueue.demo.options import Options

__all__ = ["run"]

_PHASES: tuple[Phase, ...] = ("fixed split", "shared queue")
_HELD_OUT_ROWS = 128


def run(
    options: Options,
    file: Path,
    console: Console | None = None,
    *,
    png: Path | None = None,
    mailbox: str | None = None,
) -> int:
    """Run the demo, print its result and write `file`.

    Args:
        options: what to train on which nodes.
        file: the JSON file to write.
        console: where to print; by default stdout.
        png: the picture to write; by default beside `file`, if matplotlib is installed.
        mailbox: URL under which the shared queue gets a prefix of its own; by default a temporary folder is used.

    Returns:
        0, or 1 when a node failed or the result is not what it should be.

    Raises:
        InvalidInputError: a file cannot be written, `png` is given without matplotlib, or the URL is malformed.
        MailboxError: the mailbox cannot hold a queue.
        ShardQueueError: this Python has no sources to train on.
    """
    check_file("json", file)
    png = _checked_picture(png, file)
    console = Console() if console is None else console
    try:
        with _place(mailbox) as (url, shown):
            document = measure(options, console, url, shown)
    except NodeFailedError as error:
        print(f"shardqueue demo: {error}", file=sys.stderr)
        return 1
    outcomes, paper = documents.ratios(document), documents.computed(document)
    wrong = documents.verdict(outcomes)
    results = [asdict(outcome) for outcome in outcomes]
    file.write_text(documents.encode(document, results, asdict(paper)), encoding="utf-8")
    report.show(console, document, outcomes, paper, wrong)
    report.written(console, "Every batch, with its process, start and end", file)
    if png is not None:
        picture.draw(document, outcomes, paper, png)
        report.written(console, "The timeline as a picture", png)
    if document["mailbox"] is not None:
        report.written(console, "The queue's records", document["mailbox"])
    return 1 if wrong else 0


def _checked_picture(png: Path | None, file: Path) -> Path | None:
    if not picture.can_draw():
        if png is not None:
            bound = "left out unless matplotlib is installed"
            raise InvalidInputError("png", str(png), bound, "pip install 'shardqueue[plots]'")
        return None
    png = file.with_suffix(".png") if png is None else png
    if png.absolute() == file.absolute():
        raise InvalidInputError("png", str(png), "another file than the JSON", "pass --png PATH")
    check_file("png", png)
    return png


@contextmanager
def _place(mailbox: str | None) -> Iterator[tuple[str, str | None]]:
    """Yield the URL of an empty mailbox, and the same for people if it is to stay."""
    if mailbox is None:
        with tempfile.TemporaryDirectory(prefix="shardqueue-demo-") as folder:
            yield folder, None
        return
    if not mailbox.strip() or mailbox.lower().startswith("memory:"):
        bound = "a folder or s3://bucket/prefix: the nodes are processes"
        raise InvalidInputError("mailbox", mailbox, bound, "pass --mailbox URL, or leave it out")
    own = f"demo-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"
    if mailbox.partition("://")[1] and not mailbox.partition("://")[2].strip("/"):
        bound = "a URL that names a bucket or a folder"
        raise InvalidInputError("mailbox", mailbox, bound, "pass --mailbox s3://bucket/prefix")
    url = f"{mailbox}{'' if mailbox.endswith('/') else '/'}{own}"
    open_mailbox(url)
    yield url, url


def measure(options: Options, console: Console, url: str, shown: str | None) -> documents.Document:
    """Run both phases and return what was measured.

    Args:
        options: what to train on which nodes.
        console: where to show progress.
        url: of the shared queue's mailbox, which is empty.
        shown: what the document is to say of it.

    Raises:
        NodeFailedError: a node's process ended early.
    """
    corpus = read_corpus()
    replica = Replica(options.context)
    held_out = windows(corpus.held_out, range(_HELD_OUT_ROWS), options.context + 1)
    document = _head(options, replica.loss(held_out), shown)
    initial = replica.values.clone()
    shared = _shared(options, initial, corpus.train)
    with Fleet(options, shared) as fleet, progress(console, options, shared.done) as seen:
        for phase in _PHASES:
            shared.parameters.copy_(initial)
            shared.done.zero_()
            seen.starts(phase)
            records = fleet.run(phase, url, seen.tick)
            seen.ends(max((record["end"] for record in records), default=0.0))
            replica.copy_in(shared.parameters)
            loss = replica.loss(held_out)
            document["phases"].append({"name": phase, "loss": loss, "batches": records})
    return document


def _shared(options: Options, initial: Tensor, text: Tensor) -> Shared:
    tensors = initial.clone(), text, torch.zeros(len(options.nodes), dtype=torch.int64)
    return Shared(*(tensor.share_memory_() for tensor in tensors))  # type: ignore[no-untyped-call]


def _head(options: Options, loss: float, mailbox: str | None) -> documents.Document:
    units = {name: asdict(unit) for name, unit in options.plan().items()}
    return {
        "format": "shardqueue-demo/2",
        "arguments": asdict(options),
        "machine": machine(),
        "batch_seconds": options.batch_seconds,
        "speeds": options.by_node,
        "slowdown": options.slowdown,
        "mailbox": mailbox,
        "units": cast("dict[str, documents.UnitEntry]", units),
        "loss_before": loss,
        "phases": [],
    }


def machine() -> dict[str, object]:
    """What a document says of the machine it was made on."""
    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }
