"""The demo's JSON file, and everything that is computed from it.

The file holds what was measured (who trained which rows in which step, from when to when, and with what loss) and
what was asked for. `outcomes` derives every number of the table from those two, and checks them: in each phase, each
row must have been trained exactly once, counted by value, each step must have as many micro-batches as were asked
for, and the parameters of all ranks must end alike to the last bit. `verdict` says what keeps the demo from passing.

Times are in seconds from the common start of the phase, when each rank holds its first batch. A rank is busy while
it computes a micro-batch, and idle for the rest of the phase, which ends with the last optimizer step. The limit is
the best split of a step into whole micro-batches, with the speeds known; nothing is sent between the ranks in it.

The losses of the two phases must end alike. Their means over the last third of the steps may differ by `APART`
standard errors, which follow from how much the micro-batches of a step differ. A wrongly scaled gradient shows there,
as long as the loss is still falling.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from statistics import fmean, median, variance
from typing import TYPE_CHECKING, TypedDict

from shardqueue.demo.document import BUSY
from shardqueue.demo.elastic.options import DDP, ELASTIC, best_split, step_seconds
from shardqueue.demo.lines import Lines

if TYPE_CHECKING:
    from collections.abc import Iterable

DDP_WITHIN = 0.9, 1.25
"""Of what DDP takes on paper."""
LEAST_OF_LIMIT = 0.8
"""Of the speed-up that is possible."""
FELL_TO = 0.8
"""Of the first step's loss."""
APART = 4.0
"""Standard errors."""


class MicroBatch(TypedDict):
    """One trained micro-batch: its rows by their own numbers, in optimizer step `step`."""

    pid: int
    node: str
    step: int
    rows: list[int]
    loss: float
    start: float
    end: float


class Part(TypedDict):
    """What one rank trained of a phase, when its optimizer steps ended, and the digest of its parameters then."""

    ends: list[float]
    digest: str
    batches: list[MicroBatch]


class PhaseEntry(TypedDict):
    """One way of training, by rank."""

    name: str
    ranks: dict[str, Part]


class Document(TypedDict):
    """The whole file, but for `results` and `computed`, which follow from the rest."""

    format: str
    arguments: dict[str, object]
    machine: dict[str, object]
    batch_seconds: float
    speeds: dict[str, float]
    steps: int
    micro_batches: int
    rows: int
    phases: list[PhaseEntry]


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank did in a phase: micro-batches a step on average; `busy` and `idle` are seconds."""

    node: str
    a_step: float
    busy: float
    idle: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """One phase, from its records.

    Attributes:
        name: of the phase.
        seconds: until the last optimizer step ended on all ranks.
        step: seconds of an optimizer step, the median.
        samples_per_second: of all ranks together.
        shares: what each rank did.
        losses: by step, mean over its rows.
        loss: mean of `losses` over the last third of the steps.
        error: standard error of `loss`, by the micro-batches of each step.
        faults: what is wrong with the records.
    """

    name: str
    seconds: float
    step: float
    samples_per_second: float
    shares: tuple[Share, ...]
    losses: tuple[float, ...]
    loss: float
    error: float
    faults: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Computed:
    """What the speeds come to on paper: not run.

    Attributes:
        equal: seconds of a step in equal parts, as in DDP.
        best: seconds of the best split.
        split: that split, micro-batches by rank.
        limit: how many times faster it is.
    """

    equal: float
    best: float
    split: tuple[int, ...]
    limit: float


def computed(document: Document) -> Computed:
    """Compute what the speeds come to on paper."""
    speeds, each = list(document["speeds"].values()), document["micro_batches"]
    split = best_split(speeds, each)
    equal = step_seconds(speeds, [each // len(speeds)] * len(speeds), document["batch_seconds"])
    best = step_seconds(speeds, split, document["batch_seconds"])
    return Computed(equal, best, split, equal / best)


def outcomes(document: Document) -> list[Outcome]:
    """Compute each phase's outcome from its records."""
    return [_outcome(document, phase) for phase in document["phases"]]


def speed_up(found: list[Outcome]) -> float:
    """How many times less the elastic steps took than DDP's, all of them."""
    by_name = {outcome.name: outcome for outcome in found}
    return by_name[DDP].seconds / max(by_name[ELASTIC].seconds, 1e-9)


def spans(phase: PhaseEntry, node: str, first: int) -> list[tuple[float, float]]:
    """When a rank was busy from step `first` on: (start, end) of each micro-batch."""
    batches = phase["ranks"][node]["batches"]
    return [(batch["start"], batch["end"]) for batch in batches if batch["step"] >= first]


def ends(phase: PhaseEntry) -> list[float]:
    """When each optimizer step ended on all ranks."""
    return [max(times) for times in zip(*(part["ends"] for part in phase["ranks"].values()), strict=False)]


def _outcome(document: Document, phase: PhaseEntry) -> Outcome:
    ended = ends(phase)
    seconds = ended[-1] if ended else 0.0
    losses = _losses(document["steps"], _batches(phase))
    last = _last(document["steps"])
    return Outcome(
        name=phase["name"],
        seconds=seconds,
        step=median(end - start for start, end in zip([0.0, *ended], ended, strict=False)) if ended else 0.0,
        samples_per_second=sum(len(batch["rows"]) for batch in _batches(phase)) / max(seconds, 1e-9),
        shares=tuple(_share(node, part, seconds, document["steps"]) for node, part in phase["ranks"].items()),
        losses=losses,
        loss=fmean(losses[last.start :]),
        error=_error(_batches(phase), last),
        faults=tuple(_faults(document, phase)),
    )


def _batches(phase: PhaseEntry) -> list[MicroBatch]:
    return [batch for part in phase["ranks"].values() for batch in part["batches"]]


def _losses(steps: int, batches: Iterable[MicroBatch]) -> tuple[float, ...]:
    sums, rows = [0.0] * steps, [0] * steps
    for batch in batches:
        if batch["step"] < steps:
            sums[batch["step"]] += batch["loss"] * len(batch["rows"])
            rows[batch["step"]] += len(batch["rows"])
    return tuple(total / count if count else math.nan for total, count in zip(sums, rows, strict=True))


def _last(steps: int) -> range:
    return range(steps - max(1, steps // 3), steps)


def _error(batches: list[MicroBatch], steps: range) -> float:
    """Standard error of the mean loss over these steps, each of which has a loss of its own."""
    by_step = [[batch["loss"] for batch in batches if batch["step"] == step] for step in steps]
    variances = [variance(losses) for losses in by_step if len(losses) > 1]
    return math.sqrt(fmean(variances) / sum(map(len, by_step))) if variances else 0.0


def _share(node: str, part: Part, seconds: float, steps: int) -> Share:
    busy = sum(batch["end"] - batch["start"] for batch in part["batches"])
    return Share(node, len(part["batches"]) / steps, busy=round(busy, 6), idle=round(seconds - busy, 6))


def _faults(document: Document, phase: PhaseEntry) -> list[str]:
    found = _row_faults(document["rows"], _batches(phase))
    counts = Counter(batch["step"] for batch in _batches(phase))
    each, steps = document["micro_batches"], document["steps"]
    wrong = [step for step in sorted({*range(steps), *counts}) if step >= steps or counts[step] != each]
    if wrong:
        found.append(f"step {wrong[0]} has {counts[wrong[0]]} micro-batches instead of {each}")
    ended = {node: len(part["ends"]) for node, part in phase["ranks"].items()}
    if set(ended.values()) != {steps}:
        found.append(f"optimizer steps by rank: {ended} instead of {steps} each")
    digests = {node: part["digest"] for node, part in phase["ranks"].items()}
    if len(set(digests.values())) > 1:
        found.append(f"the ranks ended with different parameters: {digests}")
    pids = [{batch["pid"] for batch in part["batches"]} for part in phase["ranks"].values()]
    if len(set().union(*pids)) != sum(map(len, pids)):
        found.append("one process trained as two ranks")
    return found


def _row_faults(rows: int, batches: Iterable[MicroBatch]) -> list[str]:
    trained = Counter(row for batch in batches for row in batch["rows"])
    kinds = {
        "not trained": [row for row in range(rows) if not trained[row]],
        "trained more than once": sorted(row for row, times in trained.items() if times > 1),
        "not in the data": sorted(row for row in trained if not 0 <= row < rows),
    }
    return [
        f"{len(found)} of {rows} rows {kind}, the first of them row {found[0]}"
        for kind, found in kinds.items()
        if found
    ]


def verdict(found: list[Outcome], paper: Computed) -> list[str]:
    """Return why the demo did not show what it should; nothing when it did."""
    wrong = [f"{outcome.name}: {fault}" for outcome in found for fault in outcome.faults]
    plain, elastic = found
    for outcome in found:
        if not outcome.loss <= FELL_TO * outcome.losses[0]:
            came_to = f"{outcome.losses[0]:.3f} in the first step, {outcome.loss:.3f} in the last"
            wrong.append(f"{outcome.name}: the loss did not fall below {FELL_TO:g} of its start: {came_to}")
    apart, most = abs(plain.loss - elastic.loss), noise(found)
    if not apart <= most:
        wrong.append(f"the losses end {apart:.4f} apart, and noise explains {most:.4f}")
    took, (least, most) = plain.seconds / (len(plain.losses) * paper.equal), DDP_WITHIN
    if not least < took < most:
        wrong.append(
            f"{plain.name}: {took:.2f} times what it takes on paper, not within {least:g} and {most:g}. {BUSY}"
        )
    if not speed_up(found) >= LEAST_OF_LIMIT * paper.limit:
        wrong.append(
            f"{elastic.name}: {speed_up(found):.2f} times as fast, not at least {LEAST_OF_LIMIT:g} of the limit, "
            f"{LEAST_OF_LIMIT * paper.limit:.2f}. {BUSY}"
        )
    return wrong


def noise(found: list[Outcome]) -> float:
    """How far apart the losses of two phases may be."""
    return APART * math.hypot(*(outcome.error for outcome in found))


def encode(document: Document, results: object, paper: object) -> str:
    """Return the file's text: indented, but for micro-batches and lists of times, one a line."""
    lines = Lines()
    phases = [
        {
            "name": phase["name"],
            "ranks": {
                node: {
                    "ends": lines.line(part["ends"]),
                    "digest": part["digest"],
                    "batches": [lines.line(batch) for batch in part["batches"]],
                }
                for node, part in phase["ranks"].items()
            },
        }
        for phase in document["phases"]
    ]
    return lines.text({**document, "phases": phases, "results": results, "computed": paper})
