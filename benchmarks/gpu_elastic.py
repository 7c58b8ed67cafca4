"""Elastic steps on one CUDA device, by two and four gloo ranks that share it.

- `wait`: a rank takes a token only when its device is done with the micro-batch before. With and without that wait:
  samples a second of two equal ranks, where it must cost under 1 %, and of a rank beside one that does four times the
  work, with their shares of the micro-batches. Without the wait the CPU takes tokens at the speed of launching.
- `bf16`: autocast in bfloat16; the parameters beside those of one process on the same device.
- `mixed`: DDP and elastic steps, two and four ranks of unequal speed: by streaming multiprocessors, where
  `torch.cuda.green_contexts` works, otherwise by forward passes that the slow ones add.

Processes on one device take turns on it, and a rank that waits leaves it to the others. So speeds do not add up as
those of several devices would, and what elastic steps gain here is less than there; the table says so.

It takes under five minutes. `--device cpu` runs the same code without a GPU, to see that it works; nothing it then
measures means anything. Without `--device cpu` and without a GPU the exit code is 2.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import contextmanager
from functools import cache, partial
from itertools import chain
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from benchmarks.elastic_ranks import Work, elastic, plain, take_turns
from benchmarks.gloo_ranks import in_ranks
from benchmarks.report import Report, Row, options
from shardqueue.elastic import Elastic

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchmarks.elastic_ranks import Run, Side, Turn

UNSETTLED = 3
"""Steps of a turn in which the speeds are not known yet, and kernels are chosen."""
TWICE = 3
"""Forward passes that make a micro-batch take twice as long: its backward pass takes about two."""
TOLERANCE = 1e-5
"""How far parameters may be: the same kernels compute a micro-batch's gradient, and float32 adds them up."""
PARTS = (1.0, 0.25, 0.5, 0.25)
"""Of the device's multiprocessors, by rank."""


class Unwaiting(Elastic):
    """An engine that takes a token as soon as the CPU has launched the micro-batch before."""

    def ready(self) -> None:
        """Wait for nothing."""


def unwaiting(work: Work, run: Run, folder: str) -> Any:
    """Elastic steps by that engine."""
    return elastic(work, run, folder, Unwaiting)


WAITS: tuple[Side, ...] = (("without", unwaiting), ("with", elastic))
SIDES: tuple[Side, ...] = (("DDP", plain), ("elastic", elastic))


# -- a part of the device ------------------------------------------------------------------------------------


@cache
def stream_of(part: float) -> tuple[Any, Any]:
    """A context with so many of the device's multiprocessors, and its stream; they stay until the process ends."""
    from torch.cuda.green_contexts import GreenContext

    whole = torch.cuda.get_device_properties(0).multi_processor_count
    context: Any = GreenContext.create(num_sms=max(8, int(whole * part) // 8 * 8), device_id=0)
    return context, context.Stream()


@contextmanager
def part_of_device(part: float) -> Iterator[None]:
    """Compute on so many of the device's multiprocessors."""
    _, stream = stream_of(part)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        yield
        torch.cuda.synchronize()


def parts_work() -> str:
    """Why the device cannot be shared out in parts; "" if it can. In ranks, which all say the same."""
    why = ""
    try:
        torch.zeros(1, device="cuda")
        with part_of_device(0.25):
            side = torch.ones(512, 512, device="cuda", requires_grad=True)
            (side @ side).sum().backward()  # type: ignore[no-untyped-call]
    except Exception as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0][:80]
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, why)
    return next(filter(None, told), "")


def on_part(side: Any, work: Work, run: Run, folder: str) -> Any:
    """A side's turn, by a rank that has its part of the device."""
    part = PARTS[dist.get_rank()]
    if part == 1.0:
        return side(work, run, folder)
    with part_of_device(part):
        return side(work, run, folder)


def take_mixed_turns(work: Work, extra: Work, turns: int, folder: str) -> tuple[str, Any]:
    """In ranks: turns on parts of the device, or with extra work; and why not on parts."""
    why = parts_work() if work.device == "cuda" else "no GPU"
    if why:
        return why, take_turns(SIDES, extra, turns, folder)
    sides = tuple((name, partial(on_part, side)) for name, side in SIDES)
    return why, take_turns(sides, work, turns, folder)


# -- the rows ------------------------------------------------------------------------------------------------


class Device:
    """Runs the cases and reports them."""

    def __init__(self, report: Report, quick: bool, device: str, folder: str) -> None:
        self.report, self._folder = report, folder
        self._turns = 1 if quick else 2
        small = device == "cpu"
        self._steps = 5 if small else 10
        self._settings: dict[str, Any] = {
            "device": device,
            "layers": 2 if small else 4,
            "width": 64 if small else 2048,
            "repeat": 4 if small else 1024,
            "batch": 4,
            "tolerance": None,
        }

    def wait(self) -> None:
        """With and without the wait for the device."""
        for extra in ((0, 0), (0, 3 * TWICE)):
            work = Work(16, self._steps, extra=extra, **self._settings)
            name = "two equal ranks" if not any(extra) else f"two ranks, one adds {extra[1]} forward passes"
            turns = self._turns * (1 if any(extra) else 3)
            found = self._taken(f"wait: {name}", self._in_ranks(2, take_turns, WAITS, work, turns=turns))
            pairs = zip(found["with"], found["without"], strict=True)
            ratios = [median(bare.steps[UNSETTLED:]) / median(ours.steps[UNSETTLED:]) for ours, bare in pairs]
            samples = work.micro_batches * work.batch * work.repeat
            rate = {side: samples / step_of(each) for side, each in found.items()}
            shares = {side: shares_of(each) for side, each in found.items()}
            against = (
                f"with {rate['with']:.0f}/s, shares {shares['with']}; without {rate['without']:.0f}/s, shares "
                f"{shares['without']}; turns {min(ratios):.3f} to {max(ratios):.3f}"
            )
            reach = None if any(extra) else 0.99
            case = f"{name}: samples a second with the wait over without"
            self.report.add(Row(case, median(ratios), "x", reach, against, at_least=True))

    def bf16(self) -> None:
        """Parameters beside those of one process."""
        settings = {**self._settings, "tolerance": TOLERANCE, "autocast": True}
        for size in (2, 4):
            work = Work(16, 6, extra=(0, TWICE, 0, TWICE)[:size], **settings)
            found = self._taken(
                f"bf16, {size} ranks", self._in_ranks(size, take_turns, SIDES[1:], work, turns=1)
            )
            case = f"bf16, {size} ranks: parameters after {work.steps} steps beside one process, greatest difference"
            against = f"shares {shares_of(found['elastic'])}"
            self.report.add(Row(case, 1e6 * found["elastic"][0].far, "1e-6", 1e6 * TOLERANCE, against))

    def mixed(self) -> None:
        """DDP and elastic steps on unequal ranks."""
        for size, micro_batches in ((2, 12), (4, 24)):
            work = Work(micro_batches, self._steps, **self._settings)
            slow = (0, 3 * TWICE, TWICE, 3 * TWICE)[:size]
            extra = Work(micro_batches, self._steps, extra=slow, **self._settings)
            why, taken = self._in_ranks(size, take_mixed_turns, work, extra)
            found = self._taken(f"mixed, {size} ranks", taken)
            how = f"extra forward passes {slow} ({why})" if why else f"parts {PARTS[:size]} of the device"
            ratios = [
                median(ddp.steps[UNSETTLED:]) / median(ours.steps[UNSETTLED:])
                for ddp, ours in zip(found["DDP"], found["elastic"], strict=True)
            ]
            ddp, ours = (1e3 * step_of(found[side]) for side in ("DDP", "elastic"))
            against = (
                f"DDP {ddp:.1f} ms, elastic {ours:.1f} ms, shares {shares_of(found['elastic'])}; {how}; the ranks "
                "take turns on one device"
            )
            case = f"mixed, {size} ranks, M = {micro_batches}: speed over DDP, median step"
            self.report.add(Row(case, median(ratios), "x DDP", None, against))

    def _in_ranks(self, size: int, function: Any, *given: Any, turns: int | None = None) -> Any:
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            what = *given, self._turns if turns is None else turns, folder
            return in_ranks(size, function, *what, start_method="spawn")

    def _taken(self, name: str, taken: tuple[dict[str, list[Turn]], list[str]]) -> dict[str, list[Turn]]:
        found, wrong = taken
        self.report.wrong += [f"{name}: {what}" for what in wrong]
        return found


def step_of(turns: Sequence[Turn]) -> float:
    """Seconds of the median step."""
    return median(chain(*(turn.steps[UNSETTLED:] for turn in turns)))


def shares_of(turns: Sequence[Turn]) -> str:
    """Mean micro-batches a step, by rank."""
    counts = [*chain(*(turn.counts[UNSETTLED:] for turn in turns))]
    return "/".join(f"{fmean(each):.1f}" for each in zip(*counts, strict=True))


CASES = ("wait", "bf16", "mixed")


def main(arguments: list[str] | None = None) -> int:
    parser = options("gpu_elastic", "Elastic steps on one CUDA device.", "one turn of each side", CASES)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to see that it works")
    given = parser.parse_args(arguments)
    if given.device == "cuda" and not torch.cuda.is_available():
        print(
            "there is no CUDA device here; --device cpu runs the same code, to see that it works",
            file=sys.stderr,
        )
        return 2
    report = Report("gpu_elastic")
    with tempfile.TemporaryDirectory() as folder:
        device = Device(report, given.quick, given.device, folder)
        for name in given.only or CASES:
            getattr(device, name)()
    return report.finish(given.strict)


if __name__ == "__main__":
    sys.exit(main())
