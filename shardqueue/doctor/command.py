"""`shardqueue doctor URL`: arguments in, an exit code out."""

from __future__ import annotations

import argparse
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Any

from shardqueue.doctor.costs import Question, bill
from shardqueue.doctor.examination import examine
from shardqueue.doctor.findings import Findings, Row
from shardqueue.mailbox import open_mailbox
from shardqueue.mailbox.places import shown, store_at
from shardqueue.prices import price_at
from shardqueue.terminal import check_file

DEADLINE = 15.0
"""Seconds for which a call to a bucket may go on trying: SeaweedFS lets a loser of a race wait for whole seconds."""

_DESCRIPTION = """\
Can this store hold a queue? Looks at URL (a folder, s3://bucket/prefix, ...)
as the learners would use it: whether it answers, creates exclusively, alone and
in a race of 8, shows what was just written, and permits each call; and how long
calls take. With --units, also what a plan would cost in requests and dollars.

Everything is written under a new random prefix inside URL, and removed again. A
folder must exist. Credentials and AWS_ENDPOINT_URL come from the environment.

exit code: 0 for yes, 1 for no, 2 for a wrong argument."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    parser.description, parser.formatter_class = _DESCRIPTION, argparse.RawDescriptionHelpFormatter
    parser.add_argument("url", metavar="URL", help="the mailbox that the learners are to be given")
    parser.add_argument("--units", type=int, metavar="N", help="count the requests of a plan of N units")
    parser.add_argument("--nodes", type=int, default=8, metavar="N", help="learners (default: %(default)s)")
    parser.add_argument(
        "--epochs", type=int, default=1, metavar="E", help="trips over the plan (default: %(default)s)"
    )
    parser.add_argument(
        "--unit-seconds",
        type=float,
        default=10.0,
        metavar="S",
        help="seconds a learner trains a unit, since logs are written by the clock (default: %(default)g)",
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the findings to this file")


def run(given: argparse.Namespace) -> int:
    """Examine the store, print the table, and return 0 for yes, 1 for no.

    Raises:
        InvalidInputError: an argument is malformed.
    """
    from rich.console import Console

    from shardqueue.doctor.report import document, show

    units, nodes, epochs, seconds = given.units, given.nodes, given.epochs, given.unit_seconds
    question = None if units is None else Question(units, nodes, epochs, seconds)
    if given.json is not None:
        check_file("json", given.json)
    url = shown(given.url)
    findings = Findings()
    try:
        _examine(given.url, findings)
    except BaseException:
        if findings.left:
            print(f"shardqueue doctor: left behind under {url}: {len(findings.left)} keys", file=sys.stderr)
        raise
    if question is not None and findings.latencies:
        findings.bill = bill(question, findings.latencies, price_at(given.url))
    show(Console(), url, findings)
    if given.json is not None:
        given.json.write_text(document(url, findings), encoding="utf-8")
    return 0 if findings.answer else 1


def _examine(url: str, findings: Findings) -> None:
    scheme = url.partition("://")[0].lower() if "://" in url else "file"
    folder = Path(url.partition("://")[2] if "://" in url else url).expanduser()
    if scheme in ("file", "local") and url.strip() and not folder.exists():
        there = next(part for part in folder.absolute().parents if part.exists())
        remedy = f"mkdir -p {shlex.quote(str(folder))}"
        if not there.is_dir():
            remedy = f"{there} is a file; choose another folder"
        findings.rows.append(Row("can be opened", False, f"{folder}: no such folder", remedy))
        return
    options: dict[str, Any] = {"deadline": DEADLINE} if store_at(url) else {}
    examine(url, partial(open_mailbox, url, prove=False, **options), findings)
