"""The command line: arguments in, an exit code out.

Each command imports what it needs when it runs, so that `shardqueue --help` costs nothing, and is asked for its
arguments only when it is named. An error of this package is one line on stderr and exit code 2, as a wrong argument
is; Ctrl-C is 130. What a command's own codes mean is said in its help.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from typing import TYPE_CHECKING, Protocol

from shardqueue import __version__
from shardqueue.errors import ShardQueueError
from shardqueue.terminal import visible

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


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
    """The parser, with the arguments of the command `named`."""
    parser = argparse.ArgumentParser(
        prog="shardqueue",
        description="Unequal GPUs claim the next piece of one dataset from a bucket or a folder; nobody idles.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, (summary, module) in _COMMANDS.items():
        added = commands.add_parser(name, help=summary)
        if name == named:
            command = module()
            command.add_arguments(added)
            added.set_defaults(command=command.run)
    return parser


def _demo() -> _Command:
    from shardqueue.demo import command

    return command


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


def _timeline() -> _Command:
    from shardqueue.timeline import command

    return command


def _audit() -> _Command:
    from shardqueue.audit import command

    return command


_COMMANDS: dict[str, tuple[str, Callable[[], _Command]]] = {
    "demo": ("see the difference: unequal processes, equal shares and shares by speed", _demo),
    "doctor": ("can this store hold a queue? what is wrong, and what does a plan cost?", _doctor),
    "status": ("who trains in the run at URL, how fast, and how far is it?", _status),
    "timeline": ("who worked on what and when? in the terminal, as a picture or a page", _timeline),
    "audit": ("was each batch trained once? who broke it, and when?", _audit),
    "simulate": ("how would a plan go on these nodes? in virtual time", _simulate),
    "clean": ("remove the records of finished runs; says what would go, first", _clean),
}


def _leave(number: int, frame: object) -> None:  # noqa: ARG001
    """End in order, so that nothing is left behind."""
    raise SystemExit(128 + number)
