"""What unequal devices do in four regimes, on whatever is here: samples a second, and how long each rank idles.

    python -m benchmarks.imbalance --quick
    torchrun --nproc-per-node=8 -m benchmarks.imbalance --plot imbalance.png

The first starts the ranks itself: one for each GPU where there are several, else four on the CPU.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import tempfile
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.imbalance import ROOT, picture
from benchmarks.imbalance.results import REGIMES, Measurement, rows, table
from benchmarks.imbalance.settings import Settings, check_speeds
from benchmarks.report import Report, options
from shardqueue.errors import InvalidInputError, MailboxError, ShardQueueError
from shardqueue.simulate.grammar import number, whole
from shardqueue.terminal import check_file

if TYPE_CHECKING:
    from collections.abc import Sequence

RANKS = 4
"""Without several GPUs."""
STEPS, QUICK_STEPS, LEAST_STEPS = 24, 8, 3
"""Of a regime; with fewer than that the loss does not fall."""
HEADS = 12
"""Of attention, at most; a whole number of features for each."""

DESCRIPTION = """\
Trains one small decoder on made-up tokens four times, in the same ranks:

  fixed split   DistributedSampler and DistributedDataParallel (DDP)
  lockstep      the shared queue in the same DDP loop; as many batches a rank
  elastic       elastic steps: a step's micro-batches go to who is ready
  independent   each rank claims and steps for itself, nothing is exchanged

Under torchrun it uses the ranks that there are; started by python it starts
them: one a GPU where there are several, else four on the CPU. A rank takes the
GPU of its LOCAL_RANK. CPU ranks are paced: a sleep in each micro-batch stands
for a slower GPU.

what the numbers mean:
  alone/s    samples a second of this rank, at its pace, with nothing exchanged:
             the fastest of a second's steps before the regimes, measured on all
             ranks at once. The sum of the ranks is the best possible.
  samples/s  of this rank, or of all, from the first request for data until the
             last rank has done its last optimizer step.
  idle       the part of that time in which the rank did not compute. It computes
             from the begin of a micro-batch until its backward pass has come to
             the first layer, and in the optimizer's step; pauses count. The wait
             in DDP's all-reduce comes after that, so it is idle. On GPUs CUDA
             events take the times, and nothing waits for them. The gradient of
             the embedding is the one part of computing that is left out.
  x fixed    samples/s of all ranks, over those of the fixed split.

WRONG is said, and the exit code is 1, where a sample was not trained exactly
once, counted by value over all ranks, or the loss did not fall to 0.9 of what
it was. The last line of the output is all of it as JSON. On several machines
every rank needs --mailbox, and it is checked that all of them see the same."""


def parser() -> argparse.ArgumentParser:
    made = options("imbalance", DESCRIPTION, "8 steps instead of 24: under 40 s on two cores", REGIMES)
    made.formatter_class = argparse.RawDescriptionHelpFormatter
    add = made.add_argument
    add(
        "--speeds",
        metavar="S,S,...",
        help="one a rank, 1/2 to take twice as long (CPUs: 1,1/2,...,1/4; GPUs: 1)",
    )
    add(
        "--milliseconds",
        metavar="MS",
        default="20",
        help="of a micro-batch on a CPU of speed 1 (%(default)s)",
    )
    add("--ranks", metavar="N", default="0", help="how many to start, where torchrun has not (see above)")
    add(
        "--steps",
        metavar="N",
        help=f"optimizer steps of a regime, at least {LEAST_STEPS} ({STEPS}; --quick {QUICK_STEPS})",
    )
    add("--per-rank", metavar="N", default="9", help="micro-batches of a step, for each rank (%(default)s)")
    add(
        "--batch-size", metavar="N", default="0", help="samples of a micro-batch (CPU: 8; GPU: 20 ms of them)"
    )
    for name, of in (
        ("length", "tokens of a sample"),
        ("width", "features of a token"),
        ("layers", "blocks"),
    ):
        add(f"--{name}", metavar="N", default="0", help=f"{of} (small on CPUs, large on GPUs)")
    add(
        "--mailbox", metavar="URL", default="", help="the queue's, in a new prefix there, which is left there"
    )
    add("--cpu", action="store_true", help="leave GPUs alone")
    add(
        "--plot",
        type=Path,
        metavar="FILE",
        help=f"the picture to draw ({', '.join(picture.ENDINGS)})",
    )
    add("--json", type=Path, metavar="FILE", help="where to write all of it, with every rank's numbers")
    return made


def settings_of(given: argparse.Namespace) -> Settings:
    """What the arguments ask for.

    Raises:
        InvalidInputError: one is out of range.
    """
    if os.environ.get("RANK", "0") == "0":
        check_files(given)
    given.steps = given.steps or str(QUICK_STEPS if given.quick else STEPS)
    least = {"steps": LEAST_STEPS, "per_rank": 1, "batch_size": 0, "length": 0, "width": 0, "layers": 0}
    counts = {name: whole(name, getattr(given, name), low, 10**6) for name, low in least.items()}
    if counts["width"] % HEADS:
        raise InvalidInputError("width", counts["width"], f"a multiple of {HEADS}", f"pass {8 * HEADS}")
    return Settings(
        regimes=tuple(name for name in REGIMES if name in (given.only or REGIMES)),
        speeds=speeds_of(given.speeds) if given.speeds is not None else (),
        milliseconds=number("milliseconds", given.milliseconds, 1, 60_000, "pass 20"),
        mailbox=given.mailbox,
        cpu=given.cpu,
        **counts,
    )


def check_files(given: argparse.Namespace) -> None:
    """Refuse files that cannot be written, before anything is measured.

    Raises:
        InvalidInputError: one cannot be.
    """
    for option in ("plot", "json"):
        if (file := getattr(given, option)) is not None:
            check_file(option, file)
    if given.plot is None:
        return
    if not picture.can_draw():
        remedy = "pip install 'shardqueue[plots]', or leave it out"
        raise InvalidInputError("plot", str(given.plot), "left out where matplotlib is not installed", remedy)
    if given.plot.suffix not in picture.ENDINGS:
        bound = f"a file that ends in one of {', '.join(picture.ENDINGS)}"
        raise InvalidInputError("plot", str(given.plot), bound, "pass --plot imbalance.png")


def speeds_of(text: str) -> tuple[float, ...]:
    """Read "1,1/2,0.25".

    Raises:
        InvalidInputError: a part is not a number from 0.01 to 1.
    """
    remedy = "pass 1 for a rank as fast as its device is, and 1/2 for one that takes twice as long"
    return tuple(number("speeds", part.strip(), 0.01, 1, remedy) for part in text.split(","))


def take_part(settings: Settings, given: argparse.Namespace) -> int:
    """Be one of the ranks; rank 0 reports.

    A rank that fails leaves at once, so that nothing it shares with others can hold it; torchrun then ends those.
    """
    from benchmarks.imbalance.ranks import run  # brings torch

    try:
        measured = run(settings)
    except Exception as error:
        if not isinstance(error, InvalidInputError | MailboxError):
            traceback.print_exc()
        rank, host = os.environ["RANK"], socket.gethostname()
        print(
            f"imbalance: rank {rank} on {host} failed: {type(error).__name__}: {error}",
            file=sys.stderr,
            flush=True,
        )
        os._exit(2 if isinstance(error, InvalidInputError) else 1)
    return 0 if measured is None else tell(measured, given)


def tell(measured: Measurement, given: argparse.Namespace) -> int:
    """Print, draw and write a measurement; the exit code."""
    report = Report("imbalance", rows(measured))
    report.wrong += [f"{result.regime}: {fault}" for result in measured.results for fault in result.faults]
    print(f"{table(measured)}\n")
    if given.plot is not None:
        picture.save(measured, given.plot)
        print(f"picture: {given.plot}\n")
    else:
        needs = "" if picture.can_draw() else ", once matplotlib is there: pip install 'shardqueue[plots]'"
        print(f"--plot FILE draws it{needs}\n")
    if given.json is not None:
        given.json.write_text(measured.as_json(), encoding="utf-8")
    return report.finish(given.strict)


def start(ranks: int, arguments: Sequence[str]) -> int:
    """Start so many ranks by torchrun, in this process; the exit code of the first that failed."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    module = "-m", "benchmarks.imbalance"
    try:
        with tempfile.TemporaryDirectory(
            prefix="shardqueue-imbalance-"
        ) as logs:  # which torchrun would leave
            how = "--standalone", f"--nproc-per-node={ranks}", f"--log-dir={logs}"
            torchrun.main([*how, *module, *arguments])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(f"imbalance: rank {rank} ended first, with exit code {failure.exitcode}", file=sys.stderr)
        return failure.exitcode
    return 0


def ranks_of(given: argparse.Namespace, settings: Settings) -> int:
    """How many ranks to start.

    Raises:
        InvalidInputError: there are speeds for another number.
    """
    if asked := whole("ranks", given.ranks, 0, 1024):
        check_speeds(settings.speeds, asked)
        return asked
    import torch

    gpus = 0 if given.cpu else torch.cuda.device_count()
    return len(settings.speeds) or (gpus if gpus > 1 else RANKS)


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    given = parser().parse_args(arguments)
    try:
        settings, started = settings_of(given), "LOCAL_RANK" in os.environ
        ranks = 0 if started else ranks_of(given, settings)
    except ShardQueueError as error:
        print(f"imbalance: {error}", file=sys.stderr)
        return 2
    return take_part(settings, given) if started else start(ranks, arguments)


if __name__ == "__main__":
    sys.exit(main())
