"""What the imbalance benchmark measured, and everything that is computed from it; without torch.

A rank is *busy* while it computes: from the begin of a micro-batch until its backward pass has come to the first
layer, and in the optimizer's step, with the pauses that stand for a slower device. All other time is *idle*: waiting
for the gradients of others, for data, for a claim, or at the end for the ranks that are still at work. A regime lasts
from the first request for data, which all ranks make together, until the last rank has done its last step.

`gathered` makes a result of what the ranks say, and checks it: each sample was trained exactly once, counted by value
over all ranks, and the loss fell.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from itertools import chain
from statistics import fmean
from typing import TYPE_CHECKING, Any

from benchmarks.report import Row

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

FIXED, LOCKSTEP, ELASTIC, INDEPENDENT = REGIMES = ("fixed split", "lockstep", "elastic", "independent")
FELL_TO = 0.9
"""Of the loss before the first optimizer step, at most."""
LAST = 0.25
"""The part of a rank's steps whose loss is the last one."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank says of a regime.

    Attributes:
        seconds: from the common start to the end of its last step.
        busy: seconds of computing.
        trained: the numbers of its samples.
        losses: of its micro-batches, by optimizer step.
    """

    seconds: float
    busy: float
    trained: list[int]
    losses: list[list[float]]


@dataclass(frozen=True, slots=True)
class RankResult:
    """What one rank did in a regime: samples trained, and seconds of computing."""

    rank: int
    samples: int
    busy: float


@dataclass(frozen=True, slots=True)
class Result:
    """One regime.

    Attributes:
        regime: one of `REGIMES`.
        seconds: until the last rank was done.
        ranks: what each did.
        first_loss: mean over the micro-batches before the first optimizer step, of all ranks.
        last_loss: mean over those of the last quarter of each rank's steps.
        faults: what must never happen and did.
    """

    regime: str
    seconds: float
    ranks: tuple[RankResult, ...]
    first_loss: float
    last_loss: float
    faults: tuple[str, ...] = ()

    @property
    def samples_per_second(self) -> float:
        """Of all ranks together."""
        return sum(rank.samples for rank in self.ranks) / self.seconds

    @property
    def mean_idle(self) -> float:
        """The part of the time in which a rank did not compute, mean over the ranks."""
        return fmean(self.idle(rank.rank) for rank in self.ranks)

    def rate(self, rank: int) -> float:
        """Samples a second of one rank."""
        return self.ranks[rank].samples / self.seconds

    def idle(self, rank: int) -> float:
        """The part of the time in which one rank did not compute, from 0 to 1."""
        return max(0.0, 1.0 - self.ranks[rank].busy / self.seconds)


@dataclass(frozen=True, slots=True)
class Device:
    """What a rank computes on.

    Attributes:
        rank: of the process group.
        name: the GPU's, or the CPU's, with its pace where it is paused.
        host: the machine's name.
        speed: samples a second, alone: the same micro-batches and steps, with nothing exchanged.
        memory: bytes of a GPU's memory in use at most; 0 on a CPU.
    """

    rank: int
    name: str
    host: str
    speed: float
    memory: int = 0


@dataclass(frozen=True, slots=True)
class Measurement:
    """Everything: the devices, the regimes, and what was asked for."""

    devices: tuple[Device, ...]
    results: tuple[Result, ...]
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def best(self) -> float:
        """Samples a second if each rank did what it does alone: the most that is possible."""
        return sum(device.speed for device in self.devices)

    @property
    def fastest(self) -> int:
        """The rank that does most alone."""
        return max(self.devices, key=lambda device: device.speed).rank

    def result(self, regime: str) -> Result | None:
        """A regime, where it was measured."""
        return next((result for result in self.results if result.regime == regime), None)

    def as_json(self) -> str:
        """Everything, to be read by `from_json`."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Measurement:
        """Read what `as_json` wrote."""
        read = json.loads(text)
        results = [
            Result(
                **{
                    **result,
                    "ranks": tuple(RankResult(**rank) for rank in result["ranks"]),
                    "faults": tuple(result["faults"]),
                }
            )
            for result in read["results"]
        ]
        return cls(tuple(Device(**device) for device in read["devices"]), tuple(results), read["settings"])


def gathered(regime: str, parts: Sequence[Part], samples: int) -> Result:
    """Make the result of a regime of what its ranks say; `samples` is how many there are to train."""
    first = [*chain(*(part.losses[0] for part in parts if part.losses))]
    last = [*chain(*(_last(part.losses) for part in parts))]
    first_loss, last_loss = fmean(first), fmean(last)
    faults = _sample_faults(samples, chain(*(part.trained for part in parts)))
    if not last_loss <= FELL_TO * first_loss:
        faults.append(f"the loss was {first_loss:.3f} at first and {last_loss:.3f} at last: it did not fall")
    ranks = tuple(RankResult(rank, len(part.trained), part.busy) for rank, part in enumerate(parts))
    return Result(
        regime, max(part.seconds for part in parts), ranks, first_loss, last_loss, faults=tuple(faults)
    )


def _last(steps: list[list[float]]) -> Iterable[float]:
    return chain(*steps[len(steps) - max(1, round(LAST * len(steps))) :])


def _sample_faults(samples: int, trained: Iterable[int]) -> list[str]:
    seen, wanted = Counter(trained), Counter(range(samples))
    if seen == wanted:
        return []
    twice, never = (seen - wanted).total(), (wanted - seen).total()
    return [f"of {samples} samples {twice} were trained too often, {never} never"]


def rows(measured: Measurement) -> list[Row]:
    """The numbers for programs; none of them has a reach, because they depend on the devices."""
    found, fixed = [], measured.result(FIXED)
    for result in measured.results:
        rate, regime = result.samples_per_second, result.regime
        best = f"best possible {measured.best:.1f}, the sum of the ranks alone"
        found.append(Row(f"{regime}: all ranks", rate, "samples/s", None, best))
        found.append(Row(f"{regime}: of the best possible", rate / measured.best, "of it", None, best))
        if fixed is not None and result is not fixed:
            against = f"fixed split {fixed.samples_per_second:.1f} samples/s"
            over = rate / fixed.samples_per_second
            found.append(Row(f"{regime} over fixed split", over, "x fixed split", None, against))
        rank = measured.fastest
        told = f"{measured.devices[rank].name}; mean over ranks {result.mean_idle:.3f}"
        case = f"{regime}: idle, fastest rank ({rank})"
        found.append(Row(case, result.idle(rank), "of the time", None, told))
    return found


def table(measured: Measurement) -> str:
    """A line for each rank and regime, then what the regime came to."""
    hosts = {device.host for device in measured.devices}
    cells = [("regime", "rank", "device", "alone/s", "samples/s", "idle", "")]
    fixed = measured.result(FIXED)
    for result in measured.results:
        for device in measured.devices:
            name = device.name if len(hosts) == 1 else f"{device.name}, {device.host}"
            if device.memory:
                name += f", {device.memory / 2**30:.1f} GiB"
            rate, idle = f"{result.rate(device.rank):.1f}", f"{result.idle(device.rank):.0%}"
            cells.append((result.regime, f"{device.rank}", name, f"{device.speed:.1f}", rate, idle, ""))
        total = result.samples_per_second
        told = f"{total / measured.best:.0%} of the best possible"
        if fixed is not None and result is not fixed:
            told = f"{total / fixed.samples_per_second:.2f} x fixed split, {told}"
        summed = f"{measured.best:.1f}", f"{total:.1f}", f"{result.mean_idle:.0%}"
        cells.append((result.regime, "all", "", *summed, told))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    right = (False, False, False, True, True, True, False)
    lines = []
    for line in cells:
        parts = [
            text.rjust(width) if flush else text.ljust(width)
            for text, width, flush in zip(line, widths, right, strict=True)
        ]
        lines.append("  ".join(parts).rstrip())
        if line[1] == "all":
            lines.append("")
    return "\n".join(lines).rstrip()
