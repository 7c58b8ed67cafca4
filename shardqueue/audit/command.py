"""`shardqueue audit URL`: arguments in, an exit code out. It reads, and writes nothing."""

from __future__ import annotations

import argparse
import time

from shardqueue.audit.accounts import account
from shardqueue.audit.evidence import gather
from shardqueue.audit.report import Report, document, show
from shardqueue.clock import SystemClock
from shardqueue.errors import InvalidInputError
from shardqueue.mailbox import open_mailbox
from shardqueue.mailbox.places import shown

_DESCRIPTION = """\
Proves that a run trained each batch once, or lists what broke it: who trained
which batches, when, and on which attempt. It goes by the learners' logs and the
records of what was given back alone, and writes nothing.

  exactly once   every unit is trained whole, and no batch twice
  at most once   no batch twice; some are not trained yet
  repeated       batches were trained more than once
  lost           no log says that all was trained, and nobody will do so
  contradictory  logs and records cannot be true together

Validation, test and prediction are left out unless --pass names one, since
their records may be removed. Learners of other machines that did not say how
they left are watched for ten seconds at most.

exit code: 0 for exactly once, for at most once while the run goes on, and where
uneven="drop" left out the rest; 1 for anything else; 2 for an error."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    parser.description, parser.formatter_class = _DESCRIPTION, argparse.RawDescriptionHelpFormatter
    parser.add_argument("url", metavar="URL", help="the mailbox: a folder or s3://bucket/prefix")
    parser.add_argument("--run", metavar="NAME", help="the run that is meant (default: the one opened last)")
    parser.add_argument(
        "--pass", dest="pass_", metavar="NAME", help="one pass: e0, e1, val0 (default: all that train)"
    )
    parser.add_argument(
        "--most",
        type=int,
        default=20,
        metavar="N",
        help="findings of each kind to list (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")


def run(given: argparse.Namespace) -> int:
    """Audit the run, and say what is proven.

    Raises:
        InvalidInputError: the URL is malformed, or there is no such run or pass.
        RunError: no run is here, or it cannot be judged.
        RecordError: what lies under a key of this library is not its record.
        MailboxError: the store cannot be used, or did not answer.
    """
    if given.most < 1:
        raise InvalidInputError("most", given.most, "at least 1", "pass --most 20")
    mailbox = open_mailbox(given.url, prove=False)
    case = gather(mailbox, SystemClock(), time.sleep, given.run, given.pass_)
    accounts = [account(evidence, expected, case.situation, given.most) for evidence, expected in case.passes]
    report = Report(shown(given.url), case, accounts)
    if given.json:
        print(document(report))
    else:
        from rich.console import Console

        show(Console(), report)
    return 0 if report.good else 1
