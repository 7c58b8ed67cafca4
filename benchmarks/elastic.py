"""Elastic steps beside plain DistributedDataParallel (DDP): the gain on unequal ranks, and the cost on equal ones.

- `engine`: two ranks, 20 and 80 ms a micro-batch, 10 a step.
- `trainer`: the same inside Lightning, `ElasticStrategy` beside `DDPStrategy` with `accumulate_grad_batches`.
- `four`: four ranks of 40, 40, 80 and 160 ms, 18 and 36 a step; 18 is about as few as divide well among them. The
  limit is the best split into whole micro-batches, with everything known and nothing lost to anything else.
- `equal`: four ranks of 20 ms, 16 a step, where there is nothing to gain.
- `policy`: who takes the next micro-batch, in virtual time, with 5 % noise.
- `change`: a rank becomes four times as slow; how many steps are out of shape, for real and in virtual time.
- `compute`: two ranks that really compute, one core each, with tens of millions of parameters; what adding up takes,
  and how much of it is hidden behind the backward pass.

A micro-batch of the others sleeps in place of a GPU, so that two cores suffice. Ranks are gloo processes on one
machine, and both sides run in the same ranks in turns. DDP accumulates with `no_sync`, and each rank has as many
micro-batches; that is the same global batch. Of a turn the median step after the first three counts, in which the
speeds are not known yet; all steps are reported beside it. `engine` and `four` also report requests to the store a
step and a micro-batch, of the mailbox a unit, and what the sum over ranks takes whoever comes last to it.

Every turn checks that each row came exactly once, that the ranks' parameters are identical, and that they are those
of one process that went through the same micro-batches. If not, the exit code is 1. A missed reach alone is marked,
and fails only with `--strict`.
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from itertools import chain
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from benchmarks.elastic_ranks import (
    SINGLE,
    Turn,
    Work,
    compute_only,
    elastic,
    plain,
    take_turns,
    time_all_reduce,
    time_requests,
)
from benchmarks.gloo_ranks import in_ranks
from benchmarks.report import Report, Row, options
from shardqueue.flat import BUCKET_BYTES
from shardqueue.simulate.steps import Course, reached, simulate_steps
from shardqueue.turns import shares

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.elastic_ranks import Side

SIDES: tuple[Side, ...] = (("DDP", plain), ("elastic", elastic))
UNSETTLED = 3
"""Steps of a turn in which the speeds are not known yet."""
CLOSE, IN_A_ROW = 1.15, 3
"""A step is in shape again once so many in a row take at most so much of the best split's time."""
TWO, FOUR, EQUAL = (0.02, 0.08), (0.04, 0.04, 0.08, 0.16), (0.02,) * 4
BEFORE, AFTER = FOUR, (0.16, *FOUR[1:])
EIGHT = (10.0, 15.0, 15.0, 20.0, 20.0, 30.0, 40.0, 80.0)
NOISE = 0.05


def best(seconds: Sequence[float], micro_batches: int) -> float:
    """Seconds of the best split into whole micro-batches."""
    counts = shares(tuple(seconds), micro_batches)
    return max(count * one for count, one in zip(counts, seconds, strict=True))


def settled(turn: Turn) -> list[float]:
    """Seconds of the steps that count."""
    return turn.steps[UNSETTLED:]


class Elasticity:
    """Runs the cases and reports them."""

    def __init__(self, report: Report, quick: bool, folder: str) -> None:
        self.report, self.quick, self._folder = report, quick, folder

    # -- beside DDP --------------------------------------------------------------------------------------

    def engine(self) -> None:
        """Two ranks, one of them four times as fast."""
        work = Work(10, 8 if self.quick else 16, TWO)
        name = "engine, 2 ranks 20/80 ms, M = 10"
        found, request = self._turns(name, SIDES, work, 1 if self.quick else 3)
        self._compare(name, work, found, 2.3)
        self._traffic(name, work, found["elastic"], request)

    def trainer(self) -> None:
        """The same inside Lightning."""
        from benchmarks.elastic_lightning import SIDES  # Lightning takes seconds to import

        work = Work(10, 8 if self.quick else 16, TWO)
        name = "Trainer, 2 ranks 20/80 ms, M = 10"
        found, _ = self._turns(name, SIDES, work, 1 if self.quick else 3)
        self._compare(name, work, found, 2.25)

    def four(self) -> None:
        """Four ranks, against the best that can be done."""
        forms = ((18, 10, 1),) if self.quick else ((18, 10, 3), (36, 8, 2))
        for micro_batches, steps, turns in forms:
            work = Work(micro_batches, steps, FOUR)
            name = f"4 ranks 40/40/80/160 ms, M = {micro_batches}"
            found, request = self._turns(name, SIDES, work, turns)
            limit = best(FOUR, micro_batches)
            reach = [limit / median(settled(turn)) for turn in found["elastic"]]
            every = limit / fmean(chain(*(turn.steps for turn in found["elastic"])))
            against = f"best split {1e3 * limit:.0f} ms; turns {spread(reach)}; all steps {every:.3f}"
            case = f"{name}: best split over elastic, median step"
            self.report.add(Row(case, median(reach), "of it", 0.92, against, at_least=True))
            self._compare(name, work, found, None)
            self._traffic(name, work, found["elastic"], request)

    def equal(self) -> None:
        """Equal ranks: as many as cores, and twice as many, which wait for a core as well."""
        for ranks, reach in ((2, 0.97), (4, None)):
            work = Work(4 * ranks, 12, EQUAL[:ranks])
            name = f"{ranks} equal ranks of 20 ms, M = {4 * ranks}"
            found, request = self._turns(name, SIDES, work, 2 if self.quick else 6)
            self._compare(name, work, found, reach)
            self._traffic(name, work, found["elastic"], request)

    # -- who takes the next one --------------------------------------------------------------------------

    def policy(self) -> None:
        """Virtual time."""
        seeds, steps = (5 if self.quick else 20), 290
        found = [
            reached(simulate_steps(lambda _: Course(EIGHT), 24, steps, noise=NOISE, seed=seed))
            for seed in range(seeds)
        ]
        case = (
            "policy, virtual time, 8 ranks 10/15/15/20/20/30/40/80, M = 24, 5 % noise: best split over steps"
        )
        against = f"best split with all known; {seeds} x {steps} steps {spread(found)}"
        self.report.add(Row(case, fmean(found), "of it", 0.97, against, at_least=True))

    def change(self) -> None:
        """A rank becomes four times as slow in the middle."""
        micro_batches, steps = 16, 16 if self.quick else 24
        limit = best(AFTER, micro_batches)
        name = "40/40/80/160 ms, M = 16, the first becomes 160 ms"
        seeds = 5 if self.quick else 20
        virtual = []
        for seed in range(seeds):
            taken = simulate_steps(
                lambda step: Course(AFTER if step >= steps // 2 else BEFORE),
                *(micro_batches, steps),
                noise=NOISE,
                seed=seed,
            )
            virtual.append([step.seconds for step in taken])
        work = Work(micro_batches, steps, BEFORE, AFTER)
        found, _ = self._turns(name, SIDES[1:], work, 1 if self.quick else 2)
        real = [turn.steps for turn in found["elastic"]]
        for how, turns in ((f"virtual time, {seeds} seeds", virtual), (f"real, {len(real)} turns", real)):
            late = [steps_until_close(turn[steps // 2 :], limit) for turn in turns]
            times = [median(each) / limit for each in zip(*turns, strict=True)]
            after = ", ".join(f"{one:.2f}" for one in times[steps // 2 :][:6])
            against = f"most {max(late)}; steps over the new best split: {after}, ..."
            case = f"{name}: steps until within {CLOSE} of the best, {how}"
            self.report.add(Row(case, median(late), "steps", None, against))

    # -- real work ---------------------------------------------------------------------------------------

    def compute(self) -> None:
        """Two ranks that compute."""
        layers, batch, steps, turns = (3, 4, 3, 1) if self.quick else (5, 8, 4, 2)
        work = Work(8, steps, batch=batch, layers=layers, width=2048, tolerance=SINGLE)
        sides = (*SIDES, ("no overlap", partial(elastic, overlap=False)), ("compute alone", compute_only))
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            (found, wrong), adding = in_ranks(2, compute_and_add, sides, work, turns, folder)
        millions = layers * 2048 * 2048 / 1e6
        name = f"real compute, {millions:.0f} million parameters, 2 ranks, M = 8"
        self.report.wrong += [f"{name}: {what}" for what in wrong]
        step = {side: median(chain(*(turn.steps[1:] for turn in each))) for side, each in found.items()}
        against = f"DDP {step['DDP']:.3f} s, elastic {step['elastic']:.3f} s a step"
        self.report.add(
            Row(
                f"{name}: elastic over DDP, median step",
                step["elastic"] / step["DDP"],
                "x DDP",
                None,
                against,
            )
        )
        more = f"a step that adds up nothing takes {step['compute alone']:.3f} s"
        case = f"{name}: adding up, nothing beside it"
        self.report.add(Row(case, adding, "s/step", None, more))
        left = {
            side: median(chain(*(turn.reduces[1:] for turn in each)))
            for side, each in found.items()
            if each[0].reduces
        }
        hidden = 1.0 - left["elastic"] / left["no overlap"]
        against = (
            f"once the last rank has come {left['elastic']:.3f} s, without overlap {left['no overlap']:.3f}"
        )
        self.report.add(Row(f"{name}: of that hidden in backward", hidden, "of it", None, against))

    # -- inside ------------------------------------------------------------------------------------------

    def _turns(
        self, name: str, sides: tuple[Side, ...], work: Work, turns: int
    ) -> tuple[dict[str, list[Turn]], float]:
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            (found, wrong), request = in_ranks(
                len(work.pauses), turns_and_requests, sides, work, turns, folder
            )
        self.report.wrong += [f"{name}: {what}" for what in wrong]
        return found, request

    def _compare(self, name: str, work: Work, found: dict[str, list[Turn]], reach: float | None) -> None:
        pairs = list(zip(found["DDP"], found["elastic"], strict=True))
        ratios = [median(settled(ddp)) / median(settled(ours)) for ddp, ours in pairs]
        every = sum(sum(ddp.steps) for ddp, _ in pairs) / sum(sum(ours.steps) for _, ours in pairs)
        ddp, ours = (1e3 * median(chain(*map(settled, found[side]))) for side in ("DDP", "elastic"))
        size = len(work.pauses)
        slowest = max(work.share(rank, size) * pause for rank, pause in enumerate(work.pauses))
        limit = slowest / best(work.pauses, work.micro_batches)
        against = f"limit {limit:.2f}; DDP {ddp:.1f} ms, elastic {ours:.1f} ms; turns {spread(ratios)}"
        case = f"{name}: speed over DDP, median step"
        self.report.add(Row(case, median(ratios), "x DDP", reach, against, at_least=True))
        self.report.add(Row(f"{name}: speed over DDP, all steps", every, "x DDP", None, f"limit {limit:.2f}"))

    def _traffic(self, name: str, work: Work, turns: list[Turn], request: float) -> None:
        steps = work.steps * len(turns)
        store, mailbox, units = (
            sum(turn.requests[what] for turn in turns) for what in ("store", "mailbox", "units")
        )
        against = f"{store / steps / work.micro_batches:.1f} a micro-batch, {1e6 * request:.0f} us each"
        self.report.add(Row(f"{name}: requests to the store", store / steps, "requests/step", None, against))
        against = f"{units / len(turns):.0f} units, logs included"
        self.report.add(Row(f"{name}: mailbox", mailbox / units, "requests/unit", None, against))
        reduces = [*chain(*(turn.reduces for turn in turns))]
        against = f"of a step of {1e3 * median(chain(*map(settled, turns))):.0f} ms"
        case = f"{name}: header and sum, once the last rank has come"
        self.report.add(Row(case, 1e3 * median(reduces), "ms/step", None, against))


def turns_and_requests(*given: Any) -> tuple[Any, float]:
    """In ranks: all turns, and seconds of a request to the store."""
    return take_turns(*given), time_requests(300)


def compute_and_add(sides: tuple[Side, ...], work: Work, turns: int, folder: str) -> tuple[Any, float]:
    """In ranks: all turns, and seconds of adding up with nothing beside it."""
    return take_turns(sides, work, turns, folder), time_all_reduce(work, BUCKET_BYTES, 5)


def steps_until_close(steps: Sequence[float], limit: float) -> int:
    """How many pass until some in a row are close to the limit; all, if they never are."""
    close = [step <= CLOSE * limit for step in steps]
    starts = range(len(steps) - IN_A_ROW + 1)
    return next((start for start in starts if all(close[start : start + IN_A_ROW])), len(steps))


def spread(values: Sequence[float]) -> str:
    """From where to where they go."""
    return f"{min(values):.3f} to {max(values):.3f}"


CASES = ("policy", "engine", "trainer", "four", "equal", "change", "compute")


def main(arguments: list[str] | None = None) -> int:
    given = options(
        "elastic",
        "Elastic steps beside plain DistributedDataParallel, on ranks of unequal and equal speed.",
        "fewer steps and turns, and a smaller model",
        CASES,
    ).parse_args(arguments)
    report = Report("elastic")
    with tempfile.TemporaryDirectory() as folder:
        elasticity = Elasticity(report, given.quick, folder)
        for name in given.only or CASES:
            getattr(elasticity, name)()
    return report.finish(given.strict)


if __name__ == "__main__":
    sys.exit(main())
