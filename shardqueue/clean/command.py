"""`shardqueue clean URL`: arguments in, an exit code out. Without `--yes` it only says what it would do."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from shardqueue.clean.removal import remove
from shardqueue.clean.survey import State, survey
from shardqueue.clock import SystemClock
from shardqueue.errors import InvalidInputError
from shardqueue.mailbox import open_mailbox
from shardqueue.terminal import visible

if TYPE_CHECKING:
    from shardqueue.clean.survey import Run, Survey

FREE = (State.FINISHED, State.HALF_REMOVED)
"""States in which a run is of no use to any learner."""

_DESCRIPTION = """\
Removes the records of finished runs under URL. Without --yes it removes
nothing, and says what is there and what would go: each run, its state, its
keys, who was seen there last. Logs of other machines that may be alive are
watched for ten seconds at most.

A run that is alive, broke off or is not understood is left, unless --force says
otherwise. Removing one that is alive hands its units out again. Keys that are
not this library's are never touched, nor is anything outside URL.

exit code: 0 when all that was meant is gone (or would go), or nothing is there;
1 when a run was left because of its state; 2 for an error."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    parser.description, parser.formatter_class = _DESCRIPTION, argparse.RawDescriptionHelpFormatter
    parser.add_argument("url", metavar="URL", help="the mailbox: a folder or s3://bucket/prefix")
    parser.add_argument(
        "--run", default="all", metavar="NAME", help="the run that is meant, or all (default: %(default)s)"
    )
    parser.add_argument("--yes", action="store_true", help="remove it")
    parser.add_argument("--force", action="store_true", help="also runs that are not finished")


def run(given: argparse.Namespace) -> int:
    """Say what is there; with `--yes`, remove what is meant.

    Raises:
        InvalidInputError: the URL is malformed, or there is no such run.
        RunError: a run changed while it was removed.
        MailboxError: the store cannot be used, or did not answer.
    """
    mailbox = open_mailbox(given.url, prove=False)
    found = survey(mailbox, SystemClock(), time.sleep)
    meant = _meant(found, given.run)
    going = [one for one in meant if given.force or one.state in FREE]
    _show(found, going)
    for one in going if given.yes else []:
        print(f"run {visible(one.name)}: {remove(mailbox, one):,} keys removed")
    left = [visible(one.name) for one in meant if one not in going]
    if left:
        print(f"left, because not finished: run {', '.join(left)}; --force removes them all the same")
    if going and not given.yes:
        print("Nothing was removed; --yes does it.")
    return 1 if left else 0


def _meant(found: Survey, wanted: str) -> list[Run]:
    if wanted == "all":
        return list(found.runs.values())
    if wanted not in found.runs:
        bound = f"'all' or a run under this prefix ({', '.join(found.runs) or 'there is none'})"
        raise InvalidInputError("run", wanted, bound, "name one of them")
    return [found.runs[wanted]]


def _show(found: Survey, going: list[Run]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if found.runs:
        table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for name in ("run", "state", "keys", "claims", "learners", "last seen", "goes"):
            table.add_column(name, justify="right" if name in ("keys", "claims", "learners") else "left")
        for run in found.runs.values():
            numbers = [run.keys.total(), run.keys["claim"], len(run.learners)]
            cells = [run.name, run.state.value, *(f"{number:,}" for number in numbers), _last(run)]
            table.add_row(*(Text(visible(cell)) for cell in cells), "yes" if run in going else "no")
        console.print(table)
    else:
        print("No run is here.")
    if found.foreign:
        print(f"{found.foreign:,} keys are of no run, and stay.")


def _last(run: Run) -> str:
    if run.last is None:
        return ""
    wall, who = run.last
    return f"{who}, {time.strftime('%Y-%m-%d %H:%M', time.localtime(max(0.0, min(wall, 4e9))))}"
