"""`shardqueue demo`: arguments in, an exit code out."""

from __future__ import annotations

import argparse
from pathlib import Path

from shardqueue.errors import InvalidInputError

INDEPENDENT, ELASTIC = "independent", "elastic"

_DESCRIPTION = """\
Four processes at speeds 1, 1/2, 1/2 and 1/4 train one small model twice. It
takes about a minute (--quick: 20 s) and two cores; no GPU, no network.

--regime independent: a byte-level model on the sources of Python's standard
library, each process for itself: first with a fixed split of the units, then
with the shared queue. The result is a timeline of every node, a table, and a
JSON file with the process, start and end of every batch, from which all of it
is computed; where matplotlib is installed, also a picture.

--regime elastic: a LightningModule, in synchronous steps: first with plain DDP,
then with ElasticStrategy, where the ranks share out each step by their speed.
The result is step times, the speed-up and the most that is possible, what each
rank did, both losses, and a JSON file with every micro-batch.

exit code: 0; 1 when a batch was not trained exactly once or a process failed;
with "independent" when the fixed split's ratio is far from what the speeds come
to on paper (2.25 for the four above: it must be over 1.9) or the shared queue's
is not below 1.15 (more where one batch is a large part of the work); with
"elastic" when the ranks' parameters differ in a bit, the losses end further
apart than noise explains, DDP is far from its pace, or the speed-up is below
0.8 of what is possible; 2 for a wrong argument."""

_MAILBOX = """\
run the shared queue in a new prefix under this folder or s3://bucket/prefix; credentials and
AWS_ENDPOINT_URL come from the environment (default: a temporary folder)"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    parser.description, parser.formatter_class = _DESCRIPTION, argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--regime",
        choices=(INDEPENDENT, ELASTIC),
        default=INDEPENDENT,
        help="each process for itself, or all in one step (default: %(default)s)",
    )
    parser.add_argument("--quick", action="store_true", help="fewer batches, about 20 s")
    parser.add_argument(
        "--json",
        type=Path,
        default=Path("shardqueue-demo.json"),
        metavar="PATH",
        help="the file to write (default: %(default)s)",
    )
    only = parser.add_argument_group(f"with --regime {INDEPENDENT} only")
    only.add_argument(
        "--nodes", metavar="SPEEDS", help="speeds of the nodes, 1 to 26 of them (default: 1,0.5,0.5,0.25)"
    )
    only.add_argument(
        "--slowdown", action="store_true", help="the fastest node becomes four times slower half-way"
    )
    only.add_argument("--mailbox", metavar="URL", help=_MAILBOX)
    only.add_argument(
        "--png", type=Path, metavar="PATH", help="the picture to write (default: beside the JSON file)"
    )


def run(given: argparse.Namespace) -> int:
    """Run the demo and return 0, or 1 where it did not show what it should.

    Raises:
        InvalidInputError: an argument is malformed, or does not go with the regime.
    """
    return _elastic(given) if given.regime == ELASTIC else _independent(given)


def _independent(given: argparse.Namespace) -> int:
    from shardqueue.demo.options import FULL, QUICK, mixed, read_speeds

    options = QUICK if given.quick else FULL
    speeds = options.speeds if given.nodes is None else read_speeds(given.nodes)
    options = mixed(options, speeds, given.slowdown)

    from shardqueue.demo.stage import run  # brings torch, and by now the arguments are right

    return run(options, given.json, png=given.png, mailbox=given.mailbox)


def _elastic(given: argparse.Namespace) -> int:
    for name in ("nodes", "slowdown", "mailbox", "png"):
        value = getattr(given, name)
        if value not in (None, False):
            bound = f"left out with --regime {ELASTIC}"
            raise InvalidInputError(name, str(value), bound, f"leave it out, or pass --regime {INDEPENDENT}")

    from shardqueue.demo.elastic.options import FULL, QUICK
    from shardqueue.demo.elastic.stage import run

    return run(QUICK if given.quick else FULL, given.json)
