"""Makespan over the limit: how long unequal nodes take, beside total work over total speed.

The same nodes and plans run in virtual time (`shardqueue.simulate`, the real claiming code), as threads over a
memory mailbox, and as processes over a folder. Every mailbox call is slowed by a fixed latency. Training is
waiting, from the moment a batch is had until what the node's speed makes of its duration is over. Start-up counts,
from the common start of all nodes; leaving after the last batch does not.

Beside each value stand what it is compared with: the fixed split, the best a greedy scheduler can do, or "bare", the
same threads taking units from a counter in memory, which shows what the machine itself costs.

Every run counts, by value and where batches are trained, that each batch was trained exactly once; if not, the
exit code is 1. A missed reach alone is marked, and fails only with `--strict`.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import count
from multiprocessing import get_context
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.report import Report, Row, options
from shardqueue import shared_queue, unit_grid
from shardqueue.mailbox.faults import Counted, Delayed
from shardqueue.mailbox.files import FileMailbox
from shardqueue.mailbox.memory import MemoryMailbox
from shardqueue.simulate import Node, Outcome, simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from shardqueue.mailbox import Mailbox
    from shardqueue.units import LazyUnits, Unit

    Batch = tuple[int, int]
    Runner = Callable[["Case"], "Run"]

SPEEDS = (1.0, 0.5, 0.5, 0.25)
RATIO = "x limit"
LOG_EVERY = 100.0
"""Batches of the fastest node between two writes of a log: the 5 s of a real run, at 50 ms a batch."""
PATIENCE = 60.0
"""Seconds to wait for all nodes to be ready to start."""


@dataclass(frozen=True, slots=True)
class Case:
    """Nodes and their work.

    Attributes:
        name: shown in the table.
        units: the plan.
        seconds: what a batch takes a node of speed 1.
        latency: seconds every mailbox call takes.
        nodes: who trains.
        prefetch: loaded batches that may wait.
        log_every: in virtual time, seconds between two writes of a log, from which the others learn the speeds.
    """

    name: str
    units: LazyUnits
    seconds: float
    latency: float
    nodes: tuple[Node, ...] = tuple(Node(speed=speed) for speed in SPEEDS)
    prefetch: int = 8
    log_every: float = 0.6

    @property
    def batches(self) -> int:
        """How many there are."""
        return sum(self.units.batches(position) for position in range(len(self.units)))

    def limit(self) -> float:
        """Seconds in which the work is done if nobody ever idles."""
        whole = unit_grid(1, 1, 1, taper=False)
        return simulate(whole, self.nodes, batch_seconds=self.batches * self.seconds).limit

    def split(self, shares: Iterable[float]) -> float:
        """Makespan over the limit when each node gets its share of the work up front."""
        work = [share * self.batches * self.seconds for share in shares]
        ends = [node.finish(0.0, part) for node, part in zip(self.nodes, work, strict=True)]
        return max(ends) / self.limit()

    def greedy(self) -> float:
        """Makespan over the limit when each unit, in order, goes to the node that would end it first."""
        ends = [0.0] * len(self.nodes)
        for position in range(len(self.units)):
            work = self.units.batches(position) * self.seconds
            after = [node.finish(end, work) for node, end in zip(self.nodes, ends, strict=True)]
            first = min(range(len(after)), key=after.__getitem__)
            ends[first] = after[first]
        return max(ends) / self.limit()


@dataclass(frozen=True, slots=True)
class Run:
    """What came of a case.

    Attributes:
        ratio: makespan over the limit.
        claim_requests: mailbox calls a unit, but for the logs' writes.
        trained: how often each batch was trained, by value.
    """

    ratio: float
    claim_requests: float
    trained: Counter[Batch]


# -- one node, in a thread or a process ----------------------------------------------------------------------


@dataclass(slots=True)
class Stay:
    """What one node did: when it began and ended its last batch, what it trained, and its mailbox calls."""

    began: float
    ended: float
    trained: list[Batch] = field(default_factory=list)
    requests: int = 0


def load(unit: Unit) -> Iterator[tuple[int, Batch]]:
    for step in unit.steps:
        yield step, (step, unit.lane)


def train(case: Case, node: Node, batches: Iterable[tuple[int, Batch]], stay: Stay) -> None:
    for _, batch in batches:
        got = time.monotonic()
        deadline = stay.began + node.finish(got - stay.began, case.seconds)
        time.sleep(max(0.0, deadline - time.monotonic()))
        stay.trained.append(batch)
        stay.ended = time.monotonic()


def join(case: Case, index: int, mailbox: Mailbox, barrier: Any) -> Stay:
    """Take part in a run as node number `index`."""
    counted = Counted(Delayed(mailbox, case.latency))
    barrier.wait(PATIENCE)
    now = time.monotonic()
    stay = Stay(now, now)
    with shared_queue(case.units, counted, f"node-{index}", load, prefetch=case.prefetch) as queue:
        train(case, case.nodes[index], queue, stay)
    stay.requests = counted.total - counted.counts["put"]
    return stay


def gather(case: Case, stays: list[Stay]) -> Run:
    makespan = max(stay.ended for stay in stays) - min(stay.began for stay in stays)
    requests = sum(stay.requests for stay in stays) / len(case.units)
    trained = Counter(batch for stay in stays for batch in stay.trained)
    return Run(makespan / case.limit(), requests, trained)


def in_threads(case: Case) -> Run:
    """Run the case over one memory mailbox."""
    mailbox, barrier = MemoryMailbox(), threading.Barrier(len(case.nodes))
    with ThreadPoolExecutor(len(case.nodes)) as pool:
        nodes = [pool.submit(join, case, index, mailbox, barrier) for index in range(len(case.nodes))]
        return gather(case, [node.result() for node in nodes])


def in_processes(case: Case) -> Run:
    """Run the case over one folder; the processes are there before the common start."""
    context = get_context("spawn")
    barrier = context.Barrier(len(case.nodes))
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(len(case.nodes), context, _keep_barrier, (barrier,)) as pool,
    ):
        nodes = [pool.submit(_join_folder, case, index, folder) for index in range(len(case.nodes))]
        return gather(case, [node.result() for node in nodes])


_barrier: Any = None


def _keep_barrier(barrier: Any) -> None:
    global _barrier
    _barrier = barrier


def _join_folder(case: Case, index: int, folder: str) -> Stay:
    return join(case, index, FileMailbox(folder), _barrier)


def bare(case: Case) -> Run:
    """Run the case in threads that take units from a counter in memory: no mailbox, nothing ahead."""
    places, barrier = count(), threading.Barrier(len(case.nodes))

    def batches() -> Iterator[tuple[int, Batch]]:
        while (place := next(places)) < len(case.units):
            yield from load(case.units.value(place))

    def take(node: Node) -> Stay:
        barrier.wait(PATIENCE)
        now = time.monotonic()
        stay = Stay(now, now)
        train(case, node, batches(), stay)
        return stay

    with ThreadPoolExecutor(len(case.nodes)) as pool:
        return gather(case, list(pool.map(take, case.nodes)))


def in_virtual_time(case: Case, seed: int = 0) -> Run:
    outcome = simulate(
        case.units,
        case.nodes,
        batch_seconds=case.seconds,
        latency=case.latency,
        log_every=case.log_every,
        seed=seed,
    )
    return Run(outcome.ratio, outcome.claim_requests / len(case.units), _by_value(case, outcome))


def _by_value(case: Case, outcome: Outcome) -> Counter[Batch]:
    trained: Counter[Batch] = Counter()
    for (name, index), times in outcome.trained.items():
        unit = case.units[name]
        trained[unit.steps[index], unit.lane] += times
    return trained


# -- the rows ------------------------------------------------------------------------------------------------


class Makespan:
    """Runs cases and reports them."""

    def __init__(self, report: Report, quick: bool) -> None:
        self.report, self.quick = report, quick

    def runs(self, case: Case, how: str, runner: Runner, times: int) -> list[Run]:
        """Run a case `times` times and check what was trained."""
        wanted = Counter(batch for unit in case.units.values() for _, batch in load(unit))
        runs = []
        for _ in range(times):
            run = runner(case)
            if run.trained != wanted:
                twice, never = run.trained - wanted, wanted - run.trained
                what = f"{twice.total()} batches trained too often, {never.total()} not at all"
                self.report.wrong.append(f"{case.name}, {how}: {what}")
            runs.append(run)
        return runs

    def virtual(self, case: Case, seeds: int) -> list[Run]:
        """Run a case in virtual time, once a seed."""
        seed = count()
        return self.runs(case, "virtual", lambda case: in_virtual_time(case, next(seed)), seeds)

    def add(
        self, case: Case, how: str, runs: list[Run], reach: float | None, against: str, requests: bool = True
    ) -> None:
        """Report the median of some runs of a case."""
        spread = ""
        if len(runs) > 1:
            ratios = [run.ratio for run in runs]
            spread = f"{len(runs)} runs {min(ratios):.3f} to {max(ratios):.3f}"
        name = f"{case.name}, {how}"
        told = "; ".join(part for part in (against, spread) if part)
        self.report.add(Row(name, median(run.ratio for run in runs), RATIO, reach, told))
        if requests:
            a_unit = median(run.claim_requests for run in runs)
            self.report.add(Row(f"{name}: claim path", a_unit, "requests/unit", None, "informational: 2.4"))

    def virtual_and_real(
        self, case: Case, reach: float, times: int, processes: bool, virtual: float | None = None
    ) -> None:
        """A case in virtual time, in threads and perhaps in processes."""
        runs, times = self.virtual(case, 5), 1 if self.quick else times
        equal = case.split([1 / len(case.nodes)] * len(case.nodes))
        limits = f"greedy {case.greedy():.3f}, equal split {equal:.3f}"
        self.add(case, "virtual", runs, reach if virtual is None else virtual, limits)
        said = f"virtual {median(run.ratio for run in runs):.3f}"
        floor = self.runs(case, "bare", bare, times)
        said += f", bare {median(run.ratio for run in floor):.3f}"
        self.add(case, "threads", self.runs(case, "threads", in_threads, times), reach, said)
        if processes:
            self.add(case, "processes", self.runs(case, "processes", in_processes, times), reach, said)

    # -- the cases, in the order of the table of promises ----------------------------------------------------

    def few_units(self) -> None:
        """24 units: how close to the greedy optimum the very end is."""
        units = unit_grid(6, 1, 4, taper=False)
        case = Case("24 x 50 ms, 0.5 ms a call", units, 0.05, 0.0005)
        self.virtual_and_real(case, 1.17, 5, processes=True, virtual=1.13)

    def many_nodes(self) -> None:
        """Up to 512 nodes, in virtual time."""
        largest = (512, 4000, None, 1) if self.quick else (512, 16000, 1.03, 1)
        for nodes, steps, reach, seeds in ((4, 4000, 1.005, 3), (64, 4000, 1.01, 3), largest):
            for latency in (0.05, 1.0):
                self._many(nodes, steps, latency, reach if latency < 1 else None, seeds)

    def _many(self, nodes: int, steps: int, latency: float, reach: float | None, seeds: int) -> None:
        fleet = tuple(Node(speed=speed) for speed in SPEEDS * (nodes // len(SPEEDS)))
        name = f"{nodes} nodes, {4 * steps // 1000}k batches, latency {latency:g}"
        case = Case(name, unit_grid(steps, 20, 4, taper=nodes), 1.0, latency, fleet, log_every=LOG_EVERY)
        runs = self.virtual(case, 1 if self.quick else seeds)
        self.add(case, "virtual", runs, reach, f"equal split {case.split([1 / nodes] * nodes):.3f}")

    def one_batch_units(self) -> None:
        """Units of one short batch, calls longer than it."""
        case = Case("400 x 25 ms, 30 ms a call", unit_grid(100, 1, 4, taper=False), 0.025, 0.03)
        self.virtual_and_real(case, 1.10, 3, processes=False)
        if not self.quick:
            name, units = "1600 x 25 ms, 30 ms a call", unit_grid(400, 1, 4, taper=False)
            self.virtual_and_real(replace(case, name=name, units=units), 1.04, 1, processes=True)

    def four_batch_units(self) -> None:
        """Units of four batches, calls as long as eight of them."""
        name = "200 x (4 x 12.5 ms), 100 ms a call"
        case = Case(name, unit_grid(200, 4, 4, taper=False), 0.0125, 0.1)
        self.virtual_and_real(case, 1.25, 3, processes=False)
        if not self.quick:
            name, units = "800 x (4 x 12.5 ms), 100 ms a call", unit_grid(800, 4, 4, taper=False)
            self.virtual_and_real(replace(case, name=name, units=units), 1.10, 1, processes=False)

    def slower_from_half_way(self) -> None:
        """The fastest node becomes four times slower when half the work is done."""
        long = Case(
            "fastest 4x slower, 16k batches", unit_grid(4000, 20, 4, taper=4), 1.0, 0.05, log_every=LOG_EVERY
        )
        short = Case(
            "fastest 4x slower, 400 x 25 ms, 1.25 ms a call",
            unit_grid(100, 1, 4, taper=False),
            0.025,
            0.00125,
        )
        for case in map(_slowed, (long, short)):
            by_speed = case.split(speed / sum(SPEEDS) for speed in SPEEDS)
            against = f"split by first speeds {by_speed:.3f}"
            self.add(case, "virtual", self.virtual(case, 5), 1.05, against, requests=False)
            split = Row(
                f"{case.name}, split by first speeds", by_speed, RATIO, 1.5, "by arithmetic", at_least=True
            )
            self.report.add(split)
        runs = self.runs(case, "threads", in_threads, 1 if self.quick else 3)
        self.add(case, "threads", runs, 1.05, against, requests=False)

    def over_a_plain_loop(self) -> None:
        """What the queue costs a batch when neither loading nor training takes time."""
        units = unit_grid(1000 if self.quick else 5000, 20, 4, taper=False)
        began = time.perf_counter()
        plain = sum(1 for unit in units.values() for _ in load(unit))
        middle = time.perf_counter()
        with shared_queue(units, MemoryMailbox(), "node-0", load) as queue:
            batches = sum(1 for _ in queue)
        ended = time.perf_counter()
        if batches != plain:
            self.report.wrong.append(f"over a plain loop: {batches} batches instead of {plain}")
        cost = ((ended - middle) - (middle - began)) / plain * 1e6
        alone = f"{(middle - began) / plain * 1e6:.1f} us a batch in the plain loop"
        self.report.add(Row("over a plain loop of tuples, 20 a unit", cost, "us/batch", None, alone))


def _slowed(case: Case) -> Case:
    half = case.limit() / 2
    fastest = Node(speed=SPEEDS[0], changes=((half, SPEEDS[0] / 4),))
    return replace(case, nodes=(fastest, *case.nodes[1:]))


CASES = (
    "few_units",
    "many_nodes",
    "one_batch_units",
    "four_batch_units",
    "slower_from_half_way",
    "over_a_plain_loop",
)


def main(arguments: list[str] | None = None) -> int:
    given = options(
        "makespan", "Makespan over the limit.", "one run a case, and none of the long ones", CASES
    ).parse_args(arguments)
    report = Report("makespan")
    makespan = Makespan(report, given.quick)
    for name in given.only or CASES:
        getattr(makespan, name)()
    return report.finish(given.strict)


if __name__ == "__main__":
    sys.exit(main())
