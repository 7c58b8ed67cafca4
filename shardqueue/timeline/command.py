"""`shardqueue timeline URL`: arguments in, an exit code out. It only reads."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardqueue.errors import InvalidInputError
from shardqueue.mailbox import open_mailbox
from shardqueue.mailbox.places import shown, store_at
from shardqueue.terminal import check_file, visible
from shardqueue.timeline.reading import read

if TYPE_CHECKING:
    from shardqueue.timeline.chart import Chart

DEADLINE = 15.0
"""Seconds for which a call to a bucket may go on trying."""
NOTHING = 3
"""Exit code where nothing is there yet."""
NARROWEST = 40

_DESCRIPTION = """\
Who worked on what in the run at URL, and when: a lane for each learner, with
what it trained and waited for, where units were taken over, and who stood idle
at the end. Goes by the learners' logs and the records of what was given back;
claims are read only of units that were taken over and that no log names. It
writes nothing to the mailbox.

Shown is the run that was opened last, or --run NAME. Times are by the clocks of
the machines that trained; where those contradict each other, a note says so.

exit code: 0; 2 for an error, or when what is there is not ours; 3 when nothing
is there yet."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    parser.description, parser.formatter_class = _DESCRIPTION, argparse.RawDescriptionHelpFormatter
    parser.add_argument("url", metavar="URL", help="the mailbox: a folder or s3://bucket/prefix")
    parser.add_argument("--run", metavar="NAME", help="the run that is meant (default: the one opened last)")
    parser.add_argument(
        "--pass",
        dest="passes",
        metavar="NAME",
        nargs="+",
        default=[],
        action="extend",
        help="only these passes: e0, e1, val0 (default: all)",
    )
    parser.add_argument("--html", metavar="FILE", type=Path, help="write a page that opens without a network")
    parser.add_argument(
        "--image", metavar="FILE", type=Path, help="write a picture, .png or .svg (matplotlib)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")
    parser.add_argument("--all", action="store_true", help="every learner, however many there are")
    parser.add_argument("--width", type=int, metavar="N", help="columns (default: the terminal's)")


def run(given: argparse.Namespace) -> int:
    """Show the run.

    Raises:
        InvalidInputError: the URL is malformed, there is no such run or pass, or a file cannot be written.
        RunError: what is there is no run, or one of another version.
        RecordError: what should be a manifest is none.
        MailboxError: the store cannot be used, or did not answer.
    """
    _check(given)
    options: dict[str, Any] = {"deadline": DEADLINE} if store_at(given.url) else {}
    mailbox = open_mailbox(given.url, prove=False, **options)
    chart = read(mailbox, given.run, given.passes, url=shown(given.url))
    if chart is None:
        _say_nothing_is_there(given)
        return NOTHING
    _write(chart, given.html, given.image)
    if given.json:
        from shardqueue.timeline.document import document

        print(json.dumps(document(chart), indent=1, allow_nan=False))
    else:
        from shardqueue.timeline.terminal import new_console, show

        console = new_console(given.width)
        show(console, chart, everybody=given.all)
        for file in (given.html, given.image):
            if file is not None:
                console.print(f"written: {visible(str(file))}", highlight=False, markup=False, soft_wrap=True)
    return 0


def _check(given: argparse.Namespace) -> None:
    """Raise `InvalidInputError` for what cannot be done, before anything is read."""
    if given.width is not None and given.width < NARROWEST:
        raise InvalidInputError("width", given.width, f"at least {NARROWEST}", "pass --width 80")
    if given.image is not None:
        from shardqueue.timeline.picture import check

        check(given.image)
        check_file("image", given.image)
    if given.html is not None:
        check_file("html", given.html)


def _write(chart: Chart, html: Path | None, image: Path | None) -> None:
    if html is not None:
        from shardqueue.timeline import page

        html.write_text(page.document(chart), encoding="utf-8")
    if image is not None:
        from shardqueue.timeline import picture

        picture.draw(chart, image)


def _say_nothing_is_there(given: argparse.Namespace) -> None:
    url = shown(given.url)
    if given.json:
        from shardqueue.timeline.document import FORMAT

        print(json.dumps({"format": FORMAT, "url": url, "run": None}, indent=1))
    else:
        print(visible(f"Nothing is at {url} yet: no learner has been here."))
