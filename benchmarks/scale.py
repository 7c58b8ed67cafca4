"""What claiming costs in requests, from 10^3 to 10^6 units and from 4 to 512 learners.

In virtual time (`shardqueue.simulate`, the real claiming code) every call is counted as a store counts it: a create
that is lost reads the key too. The claim path is what claiming asks for: listings, creates, read-backs. The limit is
2, a create and its read-back for each unit. "All" adds finding the run and the logs, which are written by time: one
every 5 s a learner, with batches of 50 ms on the fastest node.

Then the same for real, in processes over a folder and over SeaweedFS on loopback. There each learner's calls are
counted at the mailbox, with how often and how long it listed: on a folder a listing scans all claims, and a claim
must not wait for one. What the store can take is measured first: the same processes create and read keys of their
own, without any policy. Then they train, by waiting, at half that rate.

Every run counts, by value and where batches are trained, that each batch was trained exactly once; if not, the exit
code is 1. A missed reach alone is marked, and fails only with `--strict`.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.report import Report, Row, options
from benchmarks.seaweedfs import BUCKET, seaweedfs
from shardqueue import open_mailbox, shared_queue, unit_grid
from shardqueue.mailbox.faults import Wrapper
from shardqueue.simulate import Node, simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardqueue.mailbox import Mailbox
    from shardqueue.units import LazyUnits, Unit

SPEEDS = (1.0, 0.5, 0.5, 0.25)
BATCH_SECONDS = 0.05
LATENCY = 0.05
"""Seconds of a call, in batches of the fastest node."""
LEARNERS = 4
FLAT_FROM = 100_000
"""Units from which a real run must cost what many units cost."""
SHORTEST = 0.004
"""Seconds a batch takes at least: shorter ones cannot be waited for exactly."""
REQUESTS = "requests/unit"
LIMIT = "2: a create and its read-back"


# -- in virtual time -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """Learners, a plan, and the requests a unit that are promised."""

    learners: int
    units: LazyUnits
    reach: float | None
    reach_all: float | None = None

    @property
    def name(self) -> str:
        """Shown in the table."""
        sizes = {self.units.batches(place) for place in (0, len(self.units) - 1)}
        lanes = self.units.value(0).lanes
        shape = f"of {max(sizes)} batches" if len(sizes) == 1 else f"of {max(sizes)} batches, tapered"
        shared = f" over {lanes} lanes" if lanes > 1 else ""
        return f"{self.learners} learners, {len(self.units):,} units {shape}{shared}"


def even(learners: int, units: int, reach: float | None, lanes: int = 1) -> Case:
    """Units of one batch."""
    return Case(learners, unit_grid(units // lanes, 1, lanes, taper=False), reach, 3.5)


def tapered(learners: int, units: int, reach: float | None, lanes: int = 1) -> Case:
    """Units of 20 batches, cut finer near the end."""
    return Case(learners, unit_grid(20 * units // lanes, 20, lanes, taper=learners), reach)


QUICK = (
    tapered(4, 80, 3.2),
    tapered(64, 1_000, 3.2),
    even(4, 1_000, None),
    even(4, 10_000, 2.4),
    even(64, 10_000, 2.4),
)
FULL = (
    *QUICK,
    tapered(512, 7_680, None),
    even(4, 100_000, 2.4),
    even(64, 100_000, 2.4),
    even(64, 100_000, 2.4, lanes=4),
    even(4, 1_000_000, 2.4),
    even(64, 1_000_000, 2.4),
)


def in_virtual_time(report: Report, case: Case) -> None:
    """Count the requests of one case."""
    nodes = [Node(speed=speed) for speed in islice(cycle(SPEEDS), case.learners)]
    began = time.perf_counter()
    outcome = simulate(
        case.units, nodes, batch_seconds=BATCH_SECONDS, latency=LATENCY * BATCH_SECONDS, log_every=5.0
    )
    took = time.perf_counter() - began
    units = len(case.units)
    batches = sum(case.units.batches(place) for place in range(units))
    if len(outcome.trained) != batches or set(outcome.trained.values()) != {1}:
        report.wrong.append(f"{case.name}: not every batch was trained exactly once")
    report.add(Row(f"{case.name}: claim path", outcome.claim_requests / units, REQUESTS, case.reach, LIMIT))
    whole = sum(outcome.requests.values()) / units
    against = f"makespan {outcome.ratio:.4f} x limit, drift {outcome.drift:.1%}, simulated in {took:.0f} s"
    report.add(Row(f"{case.name}: all", whole, REQUESTS, case.reach_all, against))


# -- for real ------------------------------------------------------------------------------------------------


class Timed(Wrapper):
    """Counts calls by verb and the seconds spent in them."""

    def __init__(self, mailbox: Mailbox) -> None:
        super().__init__(mailbox)
        self.calls: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()

    def _around(self, verb: str, name: str, forward: Callable[[], Any]) -> Any:  # noqa: ARG002
        began = time.perf_counter()
        try:
            answer = forward()
        finally:
            self.seconds[verb] += time.perf_counter() - began  # type: ignore[assignment]
        self.calls[verb] += 1
        self.calls["read back"] += verb == "put_if_absent" and answer is False
        return answer


@dataclass(frozen=True, slots=True)
class Stay:
    """What one learner did."""

    began: float
    ended: float
    trained: list[int]
    calls: Counter[str]
    seconds: Counter[str]


_barrier: Any = None


def _keep_barrier(barrier: Any) -> None:
    global _barrier
    _barrier = barrier


def load(unit: Unit) -> Iterator[tuple[int, int]]:
    """The unit's steps, as batches."""
    for step in unit.steps:
        yield step, step


def learn(url: str, storage: dict[str, Any], units: int, seconds: float, learner: int) -> Stay:
    """Train a share of the plan; a batch takes a learner of speed 1 so many seconds."""
    mailbox = Timed(open_mailbox(url, **storage))
    node = Node(speed=SPEEDS[learner])
    trained = []
    _barrier.wait(60)
    began = time.time()
    plan = unit_grid(units, 1, taper=False)
    with shared_queue(plan, mailbox, f"learner-{learner}", load) as queue:
        for _, batch in queue:
            time.sleep(node.finish(0.0, seconds))
            trained.append(batch)
    return Stay(began, time.time(), trained, mailbox.calls, mailbox.seconds)


def create(url: str, storage: dict[str, Any], units: int, learner: int) -> Stay:
    """Create and read back as many keys as a share of the plan, without racing anybody: what the machine can do."""
    mailbox = Timed(open_mailbox(url, **storage))
    _barrier.wait(60)
    began = time.time()
    for number in range(learner, units, LEARNERS):
        mailbox.put_if_absent(f"bare/{number:06d}", b"{}")
        mailbox.get(f"bare/{number:06d}")
    return Stay(began, time.time(), [], mailbox.calls, mailbox.seconds)


def together(what: Callable[..., Stay], url: str, storage: dict[str, Any], *arguments: float) -> list[Stay]:
    """Run it in a process a learner, from a common start."""
    context = get_context("spawn")
    barrier = context.Barrier(LEARNERS)
    with ProcessPoolExecutor(LEARNERS, context, _keep_barrier, (barrier,)) as pool:
        stays = [pool.submit(what, url, storage, *arguments, learner) for learner in range(LEARNERS)]
        return [stay.result() for stay in stays]


def span(stays: list[Stay]) -> float:
    """Seconds from the first start to the last end."""
    return max(stay.ended for stay in stays) - min(stay.began for stay in stays)


def for_real(report: Report, store: str, url: str, storage: dict[str, Any], units: int) -> None:
    """Let processes claim and train a whole plan, at half the rate that the store can take."""
    some = min(units, 10_000)
    most = some / span(together(create, f"{url}/bare", storage, some))
    seconds = max(SHORTEST, sum(SPEEDS) / (most / 2))
    stays = together(learn, f"{url}/run", storage, units, seconds)
    trained = Counter(step for stay in stays for step in stay.trained)
    if trained != Counter(range(units)):
        report.wrong.append(f"{store}: not every batch was trained exactly once")
    calls = sum((stay.calls for stay in stays), Counter[str]())
    name = f"{store}, {LEARNERS} processes, {units:,} units"
    claiming = (calls.total() - calls["put"]) / units
    reach = 2.4 if units >= FLAT_FROM else None
    report.add(Row(f"{name}: claim path and opening", claiming, REQUESTS, reach, LIMIT))
    report.add(Row(f"{name}: listings", calls["list"] / units, REQUESTS))
    listing = sum(stay.seconds["list"] for stay in stays) / (LEARNERS * span(stays))
    reach = 10.0 if store == "folder" else None
    report.add(Row(f"{name}: time in listings", 100 * listing, "%", reach, "a scan a claim: all of it"))
    limit = units * seconds / sum(SPEEDS)
    against = f"the store can take {most:,.0f} units/s; a batch takes {1000 * seconds:.1f} ms"
    report.add(Row(f"{name}: makespan", span(stays) / limit, "x limit", None, against))


@contextmanager
def stores() -> Iterator[dict[str, tuple[str, dict[str, Any]]]]:
    """A folder and a bucket, by name, as URL and storage options."""
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory() as served,
        seaweedfs(Path(served)) as server,
    ):
        yield {"folder": (folder, {}), "SeaweedFS": (f"s3://{BUCKET}/scale", server.options)}


def main(arguments: list[str] | None = None) -> int:
    given = options(
        "scale", "What claiming costs in requests.", "up to 10^4 units, for real 2,000", ("virtual", "real")
    ).parse_args(arguments)
    report = Report("scale")
    cases = given.only or ("virtual", "real")
    if "virtual" in cases:
        for case in QUICK if given.quick else FULL:
            in_virtual_time(report, case)
    if "real" in cases:
        with stores() as found:
            for store, (url, storage) in found.items():
                for_real(report, store, url, storage, 2_000 if given.quick else 100_000)
    return report.finish(given.strict)


if __name__ == "__main__":
    sys.exit(main())
