"""The command line: arguments in, an exit code out.

Each command imports what it needs when it runs, so that `shardqueue --help` costs nothing; one with a module of its
own for the command line is asked for its arguments only when it is named. An error of this package is one line on
stderr and exit code 2, as a wrong argument is; Ctrl-C is 130. What a command's own codes mean is said in its help.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from shardqueue import __version__
from shardqueue.errors import ShardQueueError
from shardqueue.terminal import visible

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_DEMO = """\
Four processes at speeds 1, 1/2, 1/2 and 1/4 train one small byte-level model on
the sources of Python's standard library, twice: first with a fixed split of the
units, then with the shared queue. It takes about a minute (--quick: 20 s) and
two cores; no GPU, no network.

The result is a timeline of every node, a table, and a JSON file with the
process, start and end of every batch, from which all of it is computed; where
matplotlib is installed, also a picture.

exit code: 0; 1 when a batch was not trained exactly once, when the fixed
split's ratio is far from what the speeds come to on paper (2.25 for the four
above: it must be over 1.9) or the shared queue's is not below 1.15 (more where
one batch is a large part of the work), or when a process failed; 2 for a wrong
argument."""

_MAILBOX = """\
run the shared queue in a new prefix under this folder or s3://bucket/prefix; credentials and
AWS_ENDPOINT_URL come from the environment (default: a temporary folder)"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that `arguments` (default: the process's own) name and return its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = _parser(next((word for word in arguments if not word.startswith("-")), None))
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 0
    signal.signal(signal.SIGTERM, _leave)
    try:
        code: int = options.command(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read the output has gone; Python would say so once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (ShardQueueError, OSError) as error:
        print(f"shardqueue: {visible(' '.join(str(error).split()))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("shardqueue: interrupted", file=sys.stderr)
        return 130
    return code


class _Command(Protocol):
    """A module that has a command's arguments and runs it."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, given: argparse.Namespace) -> int: ...


def _parser(named: str | None) -> argparse.ArgumentParser:
    """The parser, with the arguments of `named` where that is a command with a module of its own."""
    parser = argparse.ArgumentParser(
        prog="shardqueue",
        description="Unequal GPUs claim the next piece of one dataset from a bucket or a folder; nobody idles.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_demo(commands)
    for name, (summary, module) in _COMMANDS.items():
        added = commands.add_parser(name, help=summary)
        if name == named:
            command = module()
            command.add_arguments(added)
            added.set_defaults(command=command.run)
    return parser


def _doctor() -> _Command:
    from shardqueue.doctor import command

    return command


def _simulate() -> _Command:
    from shardqueue.simulate import command

    return command


def _clean() -> _Command:
    from shardqueue.clean import command

    return command


def _status() -> _Command:
    from shardqueue.status import command

    return command


def _audit() -> _Command:
    from shardqueue.audit import command

    return command


_COMMANDS: dict[str, tuple[str, Callable[[], _Command]]] = {
    "doctor": ("can this store hold a queue? what is wrong, and what does a plan cost?", _doctor),
    "status": ("who trains in the run at URL, how fast, and how far is it?", _status),
    "audit": ("was each batch trained once? who broke it, and when?", _audit),
    "simulate": ("how would a plan go on these nodes? in virtual time", _simulate),
    "clean": ("remove the records of finished runs; says what would go, first", _clean),
}


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    demo = commands.add_parser(
        "demo",
        help="see the difference: unequal processes, a fixed split and a shared queue",
        description=_DEMO,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    demo.add_argument("--quick", action="store_true", help="fewer batches, about 20 s")
    demo.add_argument(
        "--nodes", metavar="SPEEDS", help="speeds of the nodes, 1 to 26 of them (default: 1,0.5,0.5,0.25)"
    )
    demo.add_argument(
        "--slowdown", action="store_true", help="the fastest node becomes four times slower half-way"
    )
    demo.add_argument("--mailbox", metavar="URL", help=_MAILBOX)
    demo.add_argument(
        "--json",
        type=Path,
        default=Path("shardqueue-demo.json"),
        metavar="PATH",
        help="the file to write (default: %(default)s)",
    )
    demo.add_argument(
        "--png", type=Path, metavar="PATH", help="the picture to write (default: beside the JSON file)"
    )
    demo.set_defaults(command=_demo)


def _demo(given: argparse.Namespace) -> int:
    from shardqueue.demo.options import FULL, QUICK, mixed, read_speeds

    options = QUICK if given.quick else FULL
    speeds = options.speeds if given.nodes is None else read_speeds(given.nodes)
    options = mixed(options, speeds, given.slowdown)

    from shardqueue.demo.stage import run  # brings torch, and by now the arguments are right

    return run(options, given.json, png=given.png, mailbox=given.mailbox)


def _leave(number: int, frame: object) -> None:  # noqa: ARG001
    """End in order, so that nothing is left behind."""
    raise SystemExit(128 + number)
