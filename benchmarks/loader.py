"""What a `DataLoader` over `SharedQueueDataset` costs beside a plain one that reads the same data (Linux only).

- `overhead`: microseconds a batch over an `IterableDataset` with the same memory-mapped `load` and a static list of
  units, batches of 2 MB and 4 KB. A trip over the plan is timed in three parts: from before the dataset is made to
  the first batch, from there to the last batch, from there until everything is left. "Over plain" is the middle
  one; processor time is that of all processes, and tells the same on a busy machine. The loop does nothing, so where
  the loader has no workers our threads share the interpreter with it; a loop that computes would hide some of that.
- `shuffled`: the same for `from_dataset(shuffle=True)` over `DataLoader(dataset, shuffle=True)`, rows of 4 KB.
- `billion_rows`, `many_units`: memory and seconds to the first batch, each in a fresh process that has imported
  torch and us before. Memory is the process's peak less what it held at first; a worker's is what it alone holds.
- `through_workers`: makespan over the limit as in `benchmarks.makespan`, by processes of unequal speed, each with a
  loader of two workers, over one folder, listed by pages as a bucket is, whose every call is slowed. Starting the
  workers counts, leaving does not. "Bare": plain loaders, each given its share of the units by its node's speed.

The sides of a comparison take turns, and the median of the differences counts. Each case checks by value, in the
training process, that every batch or row came exactly once; if not, the exit code is 1. A missed reach alone is
marked, and fails only with `--strict`.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from benchmarks.makespan import PATIENCE, RATIO, Case, Run, Stay, gather, in_virtual_time, load, train
from benchmarks.report import Report, Row, options
from shardqueue import Session, SharedQueueDataset, unit_grid, unit_ranges
from shardqueue.mailbox.faults import Delayed, Wrapper
from shardqueue.mailbox.files import FileMailbox

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

    from torch import Tensor

    from shardqueue.mailbox import Mailbox
    from shardqueue.units import Unit

    Pairs = Iterable[tuple[int, Tensor]]
    Look = Callable[[int, Tensor], list[Hashable]]

T = TypeVar("T")

WORKERS = (0, 2)
ROW_BYTES = 4096
ROW_TOKENS = ROW_BYTES // 2
FILE_BYTES = 64 * 2**20
MB = 2.0**20
BATCH_ROWS = 8
"""Rows of a shuffled batch."""
TASTE = 50
"""Batches read where memory is measured."""


def make_loader(dataset: Any, workers: int, **options: Any) -> DataLoader[Any]:
    context = "fork" if workers else None
    return DataLoader(dataset, num_workers=workers, multiprocessing_context=context, **options)


# -- the data ------------------------------------------------------------------------------------------------


def write_tokens(path: Path) -> None:
    """Write a file of 16-bit tokens; each row of it begins with its number."""
    tokens = (np.arange(FILE_BYTES // 2, dtype=np.uint64) * 40503 % 32749).astype(np.int16)
    tokens[::ROW_TOKENS] = np.arange(FILE_BYTES // ROW_BYTES)
    tokens.tofile(path)


class Tokens(Dataset["Tensor"]):
    """The file, memory-mapped: a map-style dataset of its first rows, and a `load` that reads it over and over."""

    def __init__(self, path: Path, rows: int = FILE_BYTES // ROW_BYTES, batch_bytes: int = ROW_BYTES) -> None:
        self._tokens = np.memmap(path, np.int16, "r")
        self._rows, self._batch = rows, batch_bytes // 2

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, row: int) -> Tensor:
        return self._read(row * ROW_TOKENS, ROW_TOKENS)

    def load(self, unit: Unit) -> Iterator[tuple[int, Tensor]]:
        """Yield a unit's batches."""
        for step in unit.steps:
            yield step, self._read(step * self._batch % len(self._tokens), self._batch)

    def _read(self, first: int, count: int) -> Tensor:
        return torch.from_numpy(np.array(self._tokens[first : first + count]))


class Split(IterableDataset[Any]):
    """A static list of units, shared out among the loader's workers."""

    def __init__(self, units: Sequence[Unit], load: Callable[[Unit], Iterable[Any]]) -> None:
        self._units, self._load = units, load

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        mine = self._units if info is None else self._units[info.id :: info.num_workers]
        for unit in mine:
            yield from self._load(unit)


class Numbers(Dataset["Tensor"]):
    """Rows that hold their own number, however many."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, row: int) -> Tensor:
        return torch.tensor([row])


# -- one trip over the plan ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Match:
    """Two ways to read the same batches.

    Attributes:
        name: shown in the table.
        batches: how many.
        once: every batch once, without a loader.
        plain: given the number of workers, the peer's pairs of step and batch.
        queue: given a folder, our dataset.
        quick: what tells a batch, or its rows, from all others, cheap enough to be timed.
        whole: the same, of all bytes.
    """

    name: str
    batches: int
    once: Callable[[], Pairs]
    plain: Callable[[int], Pairs]
    queue: Callable[[str], SharedQueueDataset]
    quick: Look
    whole: Look


@dataclass(slots=True)
class Trip:
    """Seconds to the first batch, from there to the last one, and until all is left; and what came.

    `processor`: seconds of processor time from the first batch to the last, of all processes.
    """

    start: float = 0.0
    middle: float = 0.0
    end: float = 0.0
    processor: float = 0.0
    seen: list[Hashable] = field(default_factory=list)


def plainly(match: Match, workers: int, stack: ExitStack) -> Pairs:  # noqa: ARG001
    return match.plain(workers)


def alone(match: Match, workers: int, stack: ExitStack) -> Pairs:
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    return make_loader(match.queue(folder), workers, batch_size=None)


def tracked(match: Match, workers: int, stack: ExitStack) -> Pairs:
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    session = stack.enter_context(Session(folder))
    return stepping(session, make_loader(match.queue(folder), workers, batch_size=None))


def stepping(session: Session, loader: DataLoader[Any]) -> Iterator[Any]:
    """What the loader yields; each batch is trained when the next one is asked for."""
    for item in session.track(loader):
        yield item
        session.step(samples=1)


SIDES = {"plain": plainly, "queue": alone, "tracked": tracked}


def travel(match: Match, side: str, workers: int, look: Look) -> Trip:
    """Make one trip over the plan."""
    gc.collect()
    trip, batches = Trip(), 0
    with ExitStack() as stack:
        began = first = last = time.perf_counter()
        for step, batch in SIDES[side](match, workers, stack):
            trip.seen += look(step, batch)
            batches += 1
            if batches == 1:
                first, used = time.perf_counter(), _processor()
            elif batches == match.batches:
                last, trip.processor = time.perf_counter(), _processor() - used
    trip.start, trip.middle, trip.end = first - began, last - first, time.perf_counter() - last
    return trip


def _processor() -> float:
    """Seconds of processor time of this process and its children, whether they have ended or not."""
    pids = [os.getpid(), *(child.pid or 0 for child in multiprocessing.active_children())]
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended.ru_utime + ended.ru_stime + sum(time.clock_gettime(~pid << 3 | 2) for pid in pids)


# -- memory and the first batch, in a fresh process ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Taste:
    """What the first batches took: seconds to the first one, MB of the process and of its workers; and the rows."""

    seconds: float
    own: float
    workers: float
    seen: list[int]


def shuffled_plainly(rows: int, workers: int, folder: str) -> Iterable[Tensor]:  # noqa: ARG001
    return make_loader(Numbers(rows), workers, batch_size=BATCH_ROWS, shuffle=True)


def shuffled_queue(rows: int, workers: int, folder: str) -> Iterable[Tensor]:
    dataset = SharedQueueDataset.from_dataset(Numbers(rows), folder, BATCH_ROWS, shuffle=True)
    return make_loader(dataset, workers, batch_size=None)


def queue_of_units(units: int, workers: int, folder: str) -> Iterable[Tensor]:
    dataset = SharedQueueDataset(unit_grid(units // 4, 1, 4, taper=False), folder, load_number)
    return (batch for _, batch in make_loader(dataset, workers, batch_size=None))


def load_number(unit: Unit) -> Iterator[tuple[int, Tensor]]:
    for step in unit.steps:
        yield step, torch.tensor([step * unit.lanes + unit.lane])


def taste(open_loader: Callable[[int, int, str], Iterable[Tensor]], size: int, workers: int) -> Taste:
    """Read the first batches; to be called in a process that has done nothing else."""
    logging.getLogger("shardqueue").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        gc.collect()
        before = _held()
        began = time.perf_counter()
        batches = iter(open_loader(size, workers, folder))
        seen = next(batches).flatten().tolist()
        seconds = time.perf_counter() - began
        seen += chain.from_iterable(batch.flatten().tolist() for batch in islice(batches, TASTE - 1))
        children = [child.pid for child in multiprocessing.active_children()]
        own, others = _peak() - before, sum(map(_private, children))
        del batches
        gc.collect()
    return Taste(seconds, own / MB, others / MB, seen)


def _held() -> int:
    """Bytes of memory this process holds; its peak begins again."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _bytes("/proc/self/status", "VmRSS:")


def _peak() -> int:
    return _bytes("/proc/self/status", "VmHWM:")


def _private(pid: int | None) -> int:
    """Bytes no other process has."""
    rollup = f"/proc/{pid}/smaps_rollup"
    return _bytes(rollup, "Private_Clean:") + _bytes(rollup, "Private_Dirty:")


def _bytes(path: str, name: str) -> int:
    lines = (line.split() for line in Path(path).read_text().splitlines())
    return sum(1024 * int(words[1]) for words in lines if words[0] == name)


def in_fresh_process(work: Callable[..., T], *arguments: Any) -> T:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


# -- makespan through workers --------------------------------------------------------------------------------


@dataclass(slots=True)
class Visit(Stay):
    """What one node did. `first`, `waited`: seconds to its first batch, and waited for data in all."""

    first: float = 0.0
    waited: float = 0.0


class Bucket(FileMailbox):
    """A folder that may be listed as a bucket is: by pages, as often as anybody likes."""

    listing = "page"


class Tallied(Wrapper):
    """Counts the calls of this process and of those forked from it, but for the logs' writes."""

    def __init__(self, mailbox: Mailbox) -> None:
        super().__init__(mailbox)
        self.tally = multiprocessing.get_context("fork").Value("q", 0)

    def _around(self, verb: str, name: str, forward: Callable[[], T]) -> T:  # noqa: ARG002
        with self.tally.get_lock():
            self.tally.value += verb != "put"
        return forward()


def visit(case: Case, index: int, store: Mailbox) -> Visit:
    """Take part in a run as node number `index`, in its process."""
    mailbox, name = Tallied(Delayed(store, case.latency)), f"node-{index}"
    stay = _arrive()
    with Session(mailbox, name) as session:
        dataset = SharedQueueDataset(case.units, mailbox, load, name)
        _train(case, index, stepping(session, make_loader(dataset, 2, batch_size=None)), stay)
        stay.waited = session.rates.waited
    stay.requests = mailbox.tally.value
    return stay


def visit_bare(case: Case, index: int, store: Mailbox) -> Visit:  # noqa: ARG001
    """The same with units dealt out by the nodes' speeds, and a plain loader."""
    speeds = [node.speed for node in case.nodes]
    begin, end = (round(len(case.units) * sum(speeds[:stop]) / sum(speeds)) for stop in (index, index + 1))
    mine = list(islice(case.units.values(), begin, end))
    stay = _arrive()
    _train(case, index, make_loader(Split(mine, load), 2, batch_size=None), stay)
    return stay


def _arrive() -> Visit:
    torch.set_num_threads(1)
    _barrier.wait(PATIENCE)
    now = time.monotonic()
    return Visit(now, now)


def _train(case: Case, index: int, pairs: Iterable[Any], stay: Visit) -> None:
    def batches() -> Iterator[tuple[int, tuple[int, int]]]:
        for step, (of, lane) in pairs:
            stay.first = stay.first or time.monotonic() - stay.began
            yield step, (of, lane)

    train(case, case.nodes[index], batches(), stay)


_barrier: Any = None


def _keep_barrier(barrier: Any) -> None:
    global _barrier
    _barrier = barrier


def together(
    case: Case, node: Callable[[Case, int, Mailbox], Visit], store: type[FileMailbox] = Bucket
) -> tuple[Run, list[Visit]]:
    """Run all nodes of a case, each in a process that is there before the common start."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(len(case.nodes))
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(len(case.nodes), context, _keep_barrier, (barrier,)) as pool,
    ):
        going = [pool.submit(node, case, index, store(folder)) for index in range(len(case.nodes))]
        visits = [each.result() for each in going]
    return gather(case, list[Stay](visits)), visits


# -- the rows ------------------------------------------------------------------------------------------------


class Loader:
    """Runs the cases and reports them."""

    def __init__(self, report: Report, quick: bool, folder: str) -> None:
        self.report, self.quick = report, quick
        self._path = Path(folder) / "tokens"

    def tokens(self, **given: int) -> Tokens:
        """The dataset; its file is written on first use."""
        if not self._path.exists():
            write_tokens(self._path)
        return Tokens(self._path, **given)

    def count(self, name: str, seen: Iterable[Hashable], wanted: Counter[Hashable]) -> None:
        """Report what was seen too often, or not at all."""
        found = Counter(seen)
        if found != wanted:
            twice, never = (found - wanted).total(), (wanted - found).total()
            what = f"of {wanted.total()} seen {twice} too often, {never} not at all"
            self.report.wrong.append(f"{name}: {what}")

    # -- over a plain loader -----------------------------------------------------------------------------

    def overhead(self) -> None:
        """What the queue costs a batch, where the units are read from a memory-mapped file."""
        for name, size, steps, reach in (("2 MB", 2 * 2**20, 512, 100.0), ("4 KB", 4096, 1024, None)):
            match = self._of_tokens(f"batches of {name}", size, steps // 4 if self.quick else steps)
            for workers in WORKERS:
                self.match(match, workers, 2 if self.quick else 5, None if self.quick else reach)

    def _of_tokens(self, name: str, size: int, steps: int) -> Match:
        tokens = self.tokens(batch_bytes=size)
        units = unit_grid(steps, 16, taper=False)
        split = Split(list(units.values()), tokens.load)
        return Match(
            f"{steps} {name}, 16 a unit",
            steps,
            once=lambda: iter(split),
            plain=lambda workers: make_loader(split, workers, batch_size=None),
            queue=lambda folder: SharedQueueDataset(units, folder, tokens.load),
            quick=lambda step, batch: [(int(step), batch[0].item())],
            whole=lambda step, batch: [(int(step), batch.sum().item())],
        )

    def shuffled(self) -> None:
        """What the queue costs a batch of shuffled rows."""
        rows = self.tokens(rows=FILE_BYTES // ROW_BYTES // (8 if self.quick else 2))

        def queue(folder: str) -> SharedQueueDataset:
            return SharedQueueDataset.from_dataset(rows, folder, BATCH_ROWS, shuffle=True, with_step=True)

        def plain(workers: int) -> Pairs:
            return enumerate(make_loader(rows, workers, batch_size=BATCH_ROWS, shuffle=True))

        batches = len(rows) // BATCH_ROWS
        units = len(unit_ranges(len(rows), 16 * BATCH_ROWS, BATCH_ROWS))
        match = Match(
            f"{batches} shuffled batches of {BATCH_ROWS} x 4 KB, {units} units",
            batches,
            once=lambda: ((row, rows[row][None]) for row in range(len(rows))),
            plain=plain,
            queue=queue,
            quick=lambda _, batch: batch[:, 0].tolist(),
            whole=lambda _, batch: [*zip(batch[:, 0].tolist(), batch.sum(1).tolist(), strict=True)],
        )
        for workers in WORKERS:
            self.match(match, workers, 2 if self.quick else 3, None)

    def match(self, match: Match, workers: int, times: int, reach: float | None) -> None:
        """All sides in turn, after one trip each that is not timed and looks at every byte."""
        name = f"{match.name}, {workers} workers"
        for look, runs in ((match.whole, 1), (match.quick, times)):
            wanted = Counter(chain.from_iterable(look(step, batch) for step, batch in match.once()))
            trips: dict[str, list[Trip]] = {side: [] for side in SIDES}
            for _ in range(runs):
                for side in SIDES:
                    trip = travel(match, side, workers, look)
                    self.count(f"{name}, {side}", trip.seen, wanted)
                    trip.seen = []
                    trips[side].append(trip)
        self._tell_match(name, match.batches - 1, trips, reach)

    def _tell_match(self, name: str, batches: int, trips: dict[str, list[Trip]], reach: float | None) -> None:
        for part, what in (("middle", "over plain"), ("processor", "processor time over plain")):
            micros = {
                side: [getattr(trip, part) / batches * 1e6 for trip in each] for side, each in trips.items()
            }
            for side in ("queue", "tracked"):
                more = [ours - theirs for ours, theirs in zip(micros[side], micros["plain"], strict=True)]
                against = f"plain {median(micros['plain']):.0f}; {len(more)} runs {min(more):.0f} to {max(more):.0f}"
                bound = reach if part == "middle" else None
                self.report.add(Row(f"{name}: {side}, {what}", median(more), "us/batch", bound, against))
        for part, what in (("start", "to the first batch"), ("end", "after the last batch")):
            seconds = {side: median(getattr(trip, part) for trip in each) for side, each in trips.items()}
            against = f"plain {seconds['plain']:.3f}, queue {seconds['queue']:.3f}"
            self.report.add(Row(f"{name}: tracked, {what}", seconds["tracked"], "s", None, against))

    # -- large ones --------------------------------------------------------------------------------------

    def billion_rows(self) -> None:
        """A shuffle of 10**9 rows, beside torch's of 10**7."""
        rows = 10**6 if self.quick else 10**7
        theirs = self.taste("", shuffled_plainly, rows, 0)
        against = f"DataLoader(shuffle=True), 10^{len(str(rows)) - 1} rows: "
        memory = f"{against}{theirs.own:.0f} MB, so by the row {theirs.own * 10**9 / rows / 1024:.0f} GB"
        seconds = f"{against}{theirs.seconds:.2f} s, so by the row {theirs.seconds * 10**9 / rows:.0f} s"
        for workers in WORKERS:
            name = f"shuffle of 10^9 rows, {workers} workers"
            ours = self.taste(name, shuffled_queue, 10**9, workers)
            self._tell_taste(name, ours, (100.0, 1.0), (memory, seconds))

    def many_units(self) -> None:
        """10**7 units, beside 100."""
        for workers in WORKERS:
            name = f"10^7 units, {workers} workers"
            few = self.taste("100 units", queue_of_units, 100, workers)
            many = self.taste(name, queue_of_units, 10**7, workers)
            against = f"100 units: {few.own:.1f} MB", f"100 units: {few.seconds:.3f} s"
            self._tell_taste(name, many, (100.0, 1.0), against)

    def taste(
        self, name: str, open_loader: Callable[[int, int, str], Iterable[Tensor]], size: int, workers: int
    ) -> Taste:
        """Read the first batches in a fresh process, and check that nothing came twice."""
        tasted = in_fresh_process(taste, open_loader, size, workers)
        self.count(name, tasted.seen, Counter({row for row in tasted.seen if 0 <= row < size}))
        return tasted

    def _tell_taste(
        self, name: str, tasted: Taste, reaches: tuple[float, float], against: tuple[str, str]
    ) -> None:
        held = f"; {tasted.workers:.0f} MB more in its workers" if tasted.workers else ""
        self.report.add(Row(f"{name}: memory", tasted.own, "MB", reaches[0], against[0] + held))
        self.report.add(Row(f"{name}: first batch", tasted.seconds, "s", reaches[1], against[1]))

    # -- unequal nodes -----------------------------------------------------------------------------------

    def through_workers(self) -> None:
        """Claims slower than batches, through loader workers."""
        few, reach = (4, None) if self.quick else (1, 1.15)
        one = Case("x 25 ms, 30 ms a call", unit_grid(400 // few, 1, 4, taper=False), 0.025, 0.03)
        four = Case("x (4 x 12.5 ms), 100 ms a call", unit_grid(800 // few, 4, 4, taper=False), 0.0125, 0.1)
        self._through_workers(one, Bucket, reach)
        self._through_workers(four, Bucket, reach, f"bare {together(four, visit_bare)[0].ratio:.3f}, ")
        if not self.quick:
            shorter = replace(four, units=unit_grid(400, 4, 4, taper=False))
            self._through_workers(shorter, FileMailbox, None)

    def _through_workers(
        self, case: Case, store: type[FileMailbox], reach: float | None, bare: str = ""
    ) -> None:
        name = f"{len(case.units)} {case.name}" + (", scanned folder" if store is FileMailbox else "")
        against = f"{bare}virtual without workers {in_virtual_time(case).ratio:.3f}"
        wanted: Counter[Hashable] = Counter(batch for unit in case.units.values() for _, batch in load(unit))
        run, visits = together(case, visit, store)
        self.count(name, run.trained.elements(), wanted)
        self.report.add(Row(name, run.ratio, RATIO, reach, against))
        last = max(each.ended for each in visits)
        self._tell_nodes(f"{name}: to the first batch", [each.first for each in visits])
        self._tell_nodes(f"{name}: waited for data in all", [each.waited for each in visits])
        self._tell_nodes(f"{name}: idle at the end", [last - each.ended for each in visits])
        self.report.add(Row(f"{name}: claim path", run.claim_requests, "requests/unit"))

    def _tell_nodes(self, name: str, seconds: list[float]) -> None:
        each = ", ".join(f"{each:.2f}" for each in seconds)
        self.report.add(Row(f"{name}, at most", max(seconds), "s", None, f"node by node {each}"))


CASES = ("overhead", "shuffled", "billion_rows", "many_units", "through_workers")


def main(arguments: list[str] | None = None) -> int:
    given = options(
        "loader",
        "The shared queue in a DataLoader, beside a plain one.",
        "smaller plans, fewer repetitions",
        CASES,
    ).parse_args(arguments)
    # A loop without a session, and one that ends after a taste, are what is measured here.
    logging.getLogger("shardqueue").setLevel(logging.ERROR)
    report = Report("loader")
    with tempfile.TemporaryDirectory() as folder:
        loader = Loader(report, given.quick, folder)
        for name in given.only or CASES:
            getattr(loader, name)()
    return report.finish(given.strict)


if __name__ == "__main__":
    sys.exit(main())
