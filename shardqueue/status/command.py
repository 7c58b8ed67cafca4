"""`shardqueue status URL`: arguments in, an exit code out. It only reads."""

from __future__ import annotations

import argparse
import json
import time
from typing import TYPE_CHECKING, Any

from shardqueue.clock import SystemClock
from shardqueue.errors import MailboxUnavailableError
from shardqueue.mailbox import open_mailbox
from shardqueue.mailbox.places import shown, store_at
from shardqueue.prices import price_at
from shardqueue.status.observing import Observer
from shardqueue.status.spending import spending
from shardqueue.status.standing import State, standing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardqueue.prices import Price
    from shardqueue.status.report import Found

LOOK_EVERY = 3.0
"""Seconds between two looks."""
DEADLINE = 15.0
"""Seconds for which a call to a bucket may go on trying."""
NOTHING = 3
"""Exit code where nothing is there yet."""

_DESCRIPTION = """\
Who trains in the run at URL, how fast, and how far it is. Reads the newest page
of each learner's log, and no claims: a run of millions of units costs as few
requests as a small one. Writes nothing.

Shown is the run that was opened last, or --run NAME. On another machine's
learners one look can only compare clocks; --watch sees their logs change.

exit code: 0 when the run is finished, running or just opened; 1 when it is
stalled, broken off or being removed; 2 for an error, or when what is there is
not ours; 3 when nothing is there yet. --watch goes on until the run is
finished; Ctrl-C ends it with 130."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    parser.description, parser.formatter_class = _DESCRIPTION, argparse.RawDescriptionHelpFormatter
    parser.add_argument("url", metavar="URL", help="the mailbox: a folder or s3://bucket/prefix")
    parser.add_argument("--run", metavar="NAME", help="the run that is meant (default: the one opened last)")
    parser.add_argument("--watch", action="store_true", help=f"look again every {LOOK_EVERY:g} s")
    parser.add_argument("--json", action="store_true", help="a JSON document; with --watch one a line")


def run(given: argparse.Namespace) -> int:
    """Say how the run stands; with `--watch`, until it is finished.

    Raises:
        InvalidInputError: the URL is malformed, or there is no such run.
        RunError: what is there is no run.
        RecordError: what should be a manifest is none, or is one of another version.
        MailboxError: the store cannot be used, or did not answer.
    """
    options: dict[str, Any] = {"deadline": DEADLINE} if store_at(given.url) else {}
    mailbox = open_mailbox(given.url, prove=False, **options)
    observer = Observer(mailbox, given.run, SystemClock())
    url, price = shown(given.url), price_at(given.url)
    found = look(observer, url, price)
    if given.watch:
        found = _watch(found, looks(observer, url, price), as_json=given.json)
    elif given.json:
        from shardqueue.status.report import document

        print(json.dumps(document(found), indent=1))
    else:
        from shardqueue.status.report import new_console, view

        console = new_console()
        console.print(view(found, console))
    return code(found)


def look(observer: Observer, url: str, price: Price | None) -> Found:
    """Look once."""
    from shardqueue.status.report import Found

    seen = observer.look()
    stands = None if seen is None else standing(seen)
    spent = None if stands is None else spending(stands, price)
    return Found(url, stands, spent, observer.others, observer.unread, tuple(observer.strange.values()))


def code(found: Found) -> int:
    """The exit code that says how the run stands."""
    if found.standing is None:
        return NOTHING
    return int(found.standing.state in (State.STALLED, State.BROKEN_OFF, State.REMOVED))


def looks(
    observer: Observer, url: str, price: Price | None, sleep: Callable[[float], object] = time.sleep
) -> Iterator[Found | str]:
    """What is there, again and again, or why that is not known; it ends when the run is finished."""
    while True:
        sleep(LOOK_EVERY)
        try:
            found = look(observer, url, price)
        except MailboxUnavailableError as error:
            observer.lost_sight()
            yield f"no answer: {error}"
            continue
        yield found
        if _is_over(found):
            return


def _is_over(found: Found) -> bool:
    return found.standing is not None and found.standing.state is State.FINISHED


def _watch(found: Found, later: Iterator[Found | str], as_json: bool) -> Found:
    """Show each look as it comes, and return the last one."""
    from shardqueue.status.screens import screen

    with screen(as_json) as show:
        show(found)
        if _is_over(found):
            return found
        for one in later:
            show(one)
            found = found if isinstance(one, str) else one
    return found
