"""What the hand-off channel costs and what it gives, beside round robin and the queues it replaces (Linux only).

- `virtual`: 5 producers and 3 consumers, the producers' total rate 1.05 times the consumers', 20 % noise, in virtual
  time around the real counted queue. The share of its time that a consumer waits between its first item and its
  last, through the channel and by round robin with the same capacity in all.
- `threads`: items a second of the channel over `queue.Queue`, for ints.
- `processes`: the same over `torch.multiprocessing.Queue`, for ints between spawned and forked processes.
- `tensors`: the same for fresh float32 tensors, in shared memory on both sides; and the bytes that moved.
- `idle`: how often the broker, a waiting process and a waiting thread wake up while nothing moves: context switches.

The sides of a comparison take turns between threads or processes that are up and attached, and the best run of each
counts: on a busy machine the ratio of the best holds where the seconds do not. A run is timed from the first
producer's start to the last consumer's end. A consumer adds up what it gets, of a tensor the first element, if the
middle and the last are the same; if a sum or a count is wrong, the exit code is 1. A missed reach alone is marked,
and fails only with `--strict`.
"""

from __future__ import annotations

import multiprocessing
import queue
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.multiprocessing

from benchmarks.report import Report, Row, options
from shardqueue.channel import Channel
from shardqueue.pipeline import Outcome, Pipeline, noisy, round_robin, through_channel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

PATIENCE = 120.0
"""Seconds after which a run is given up: something hangs."""
MB = 2**20
FLOAT_BYTES = 4
QUIET = 0.25
"""Seconds without a context switch after which everybody is taken to wait."""


# -- one run -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Flow:
    """What is to be moved.

    Attributes:
        producers, consumers, capacity: of the channel or the queue.
        items: how many, numbered from 0.
        size: bytes of a tensor; 0: the items are ints.
        reach: our items a second over the peer's, at least; None: reported only.
    """

    producers: int
    consumers: int
    capacity: int
    items: int
    size: int = 0
    reach: float | None = None

    @property
    def name(self) -> str:
        """What moves, from how many to how many."""
        what = f"tensors of {self.size // MB} MB" if self.size else "ints"
        return f"{what}, {self.producers} -> {self.consumers}, capacity {self.capacity}"

    def numbers(self, producer: int) -> range:
        """The items of one producer."""
        return range(producer, self.items, self.producers)


@dataclass(slots=True)
class Stay:
    """When an end began and ended, and what a consumer got."""

    began: float = 0.0
    ended: float = 0.0
    count: int = 0
    total: int = 0
    torn: int = 0


def produce(flow: Flow, index: int, put: Callable[[Any], object], stay: Stay) -> None:
    """Put a producer's items."""
    stay.began = time.monotonic()
    if flow.size:
        for number in flow.numbers(index):
            put(torch.full((flow.size // FLOAT_BYTES,), float(number)))
    else:
        for number in flow.numbers(index):
            put(number)


def consume(flow: Flow, items: Iterator[Any], stay: Stay) -> None:
    """Take items until the end."""
    count = total = 0
    if flow.size:
        for item in items:
            first, middle, last = item[0].item(), item[len(item) // 2].item(), item[-1].item()
            stay.torn += not first == middle == last
            count, total = count + 1, total + int(first)
    else:
        for item in items:
            count, total = count + 1, total + item
    stay.count, stay.total, stay.ended = count, total, time.monotonic()


def until_the_end(flow: Flow, items: Any, ends: Any) -> Iterator[Any]:
    """What a peer's queue gives until every producer is done.

    Every producer puts None after its items. Whoever gets the last of these has the others stop.
    """
    while True:
        item = items.get()
        if item is not None:
            yield item
            continue
        with ends.get_lock():
            ends.value += 1
            seen = ends.value
        if seen == flow.producers:
            for _ in range(flow.consumers - 1):
                items.put(None)
        if seen >= flow.producers:
            return


def best(runs: Sequence[float]) -> str:
    """Items a second of all runs, as a person reads them."""
    return f"{max(runs):,.0f}/s ({min(runs):,.0f} at worst)"


# -- between threads -----------------------------------------------------------------------------------------


def in_threads(flow: Flow, is_ours: bool) -> list[Stay]:
    """Run a flow through a channel, or a `queue.Queue`."""
    ends: list[Any] = [None] * (flow.producers + flow.consumers)
    if is_ours:
        channel: Channel[Any] = Channel(flow.producers, flow.consumers, flow.capacity)
        ends = [channel.sender() for _ in range(flow.producers)]
        ends += [channel.receiver() for _ in range(flow.consumers)]
    shared: Any = queue.Queue(flow.capacity), multiprocessing.Value("i", 0)
    barrier = threading.Barrier(len(ends))
    stays = [Stay() for _ in ends]
    threads = [
        threading.Thread(target=take_part, args=(flow, index, ends[index], shared, barrier, stays[index]))
        for index in range(len(ends))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return stays


def take_part(flow: Flow, index: int, end: Any, shared: Any, barrier: Any, stay: Stay) -> None:
    """Be one end of a flow: of a channel, or, where `end` is None, of the peer's queue and its count of ends."""
    items, ends = cast("tuple[Any, Any]", shared or (None, None))
    with end or nullcontext():
        barrier.wait(PATIENCE)
        if index >= flow.producers:
            consume(flow, end or until_the_end(flow, items, ends), stay)
        elif end:
            produce(flow, index, end.send, stay)
        else:
            produce(flow, index, items.put, stay)
            items.put(None)


# -- between processes ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Task:
    """One process's part in one run: an end of a channel, or the peer's queue; or None, and it looks on."""

    flow: Flow
    index: int = 0
    end: Any = None
    shared: Any = None


class Crew:
    """Processes that run one flow after the other, so that starting them costs once and is never timed.

    Args:
        context: of the processes.
        size: producers, and consumers, at most.

    Attributes:
        tasks: of each process, producers first.
        channels: kept until the end.
    """

    def __init__(self, context: Any, size: int) -> None:
        self.context, self.size = context, size
        self.tasks: list[list[Task]] = [[] for _ in range(2 * size)]
        self.channels: list[Channel[Any]] = []

    def plan(self, flow: Flow, shared: Any, is_ours: bool) -> None:
        """Add a run of a flow."""
        producers, consumers = self.tasks[: flow.producers], self.tasks[self.size :][: flow.consumers]
        ends: list[Any] = [None] * (flow.producers + flow.consumers)
        peer = None if is_ours else (shared, self.context.Value("i", 0))
        if is_ours:
            channel: Channel[Any] = Channel(
                flow.producers, flow.consumers, flow.capacity, context=self.context
            )
            self.channels.append(channel)
            ends = [channel.sender() for _ in producers] + [channel.receiver() for _ in consumers]
        for index, (tasks, end) in enumerate(zip([*producers, *consumers], ends, strict=True)):
            tasks.append(Task(flow, index, end, peer))
        runs = max(map(len, self.tasks))
        for tasks in self.tasks:
            tasks.extend(Task(flow) for _ in range(runs - len(tasks)))

    def run(self) -> list[list[Stay]]:
        """Run everything; return the stays of those who took part, run by run."""
        barrier = self.context.Barrier(len(self.tasks))
        pipes = [self.context.Pipe(duplex=False) for _ in self.tasks]
        processes = [
            self.context.Process(target=work, args=(tasks, barrier, there), daemon=True)
            for tasks, (_, there) in zip(self.tasks, pipes, strict=True)
        ]
        for process, (_, there) in zip(processes, pipes, strict=True):
            process.start()
            there.close()
        stays = [here.recv() for here, _ in pipes]
        for process in processes:
            process.join()
        return [[stay for stay in run if stay] for run in zip(*stays, strict=True)]


def work(tasks: list[Task], barrier: Any, results: Any) -> None:
    """Do the tasks one after the other, each when everybody is ready; in a process of a crew."""
    torch.set_num_threads(1)
    stays: list[Stay | None] = []
    try:
        for task in tasks:
            stay = None
            if task.end is None and task.shared is None:
                barrier.wait(PATIENCE)
            else:
                stay = Stay()
                take_part(task.flow, task.index, task.end, task.shared, barrier, stay)
            stays.append(stay)
            # The memory of a peer's tensors is its producer's, which may go on only now.
            barrier.wait(PATIENCE)
    except BaseException:
        barrier.abort()
        raise
    results.send(stays)


# -- while nothing moves -------------------------------------------------------------------------------------


@dataclass(slots=True)
class Waiting:
    """Somebody who waits.

    Attributes:
        name: shown in the table.
        status: the kernel's file about it.
        finish: lets it go, and checks what it got.
    """

    name: str
    status: str
    finish: Callable[[], object]

    def seen(self) -> tuple[bool, int]:
        """Return whether it sleeps, and its context switches so far, voluntary or not."""
        lines = dict(line.split(":", 1) for line in Path(self.status).read_text().splitlines())
        switches = int(lines["voluntary_ctxt_switches"]) + int(lines["nonvoluntary_ctxt_switches"])
        return lines["State"].split()[0] == "S", switches


def receive_one(receiver: Any, mine: Any) -> None:
    with receiver:
        mine.send("ready")
        mine.send(receiver.receive())


def send_two(sender: Any, mine: Any) -> None:
    """Send one item, and wait for room for another."""
    with sender:
        sender.send(1)
        mine.send("ready")
        sender.send(2)
        mine.send("sent")


def task_status(thread: threading.Thread) -> str:
    return f"/proc/self/task/{thread.native_id}/status"


def settle(waiting: list[Waiting]) -> list[int]:
    """Return everybody's context switches once all sleep and nobody has moved for a while."""
    deadline = time.monotonic() + PATIENCE
    before: list[tuple[bool, int]] = []
    while time.monotonic() < deadline:
        now = [each.seen() for each in waiting]
        if now == before and all(sleeps for sleeps, _ in now):
            break
        before = now
        time.sleep(QUIET)
    return [switches for _, switches in before]


# -- the rows ------------------------------------------------------------------------------------------------


class Bench:
    """Runs the cases and reports them."""

    def __init__(self, report: Report, quick: bool) -> None:
        self.report, self.quick = report, quick

    def check(self, name: str, found: object, wanted: object) -> None:
        """Report what is not as it must be."""
        if found != wanted:
            self.report.wrong.append(f"{name}: {found}, not {wanted}")

    # -- who starves -------------------------------------------------------------------------------------

    def virtual(self) -> None:
        """5 producers, 3 consumers, in virtual time."""
        seeds, items = (2, 600) if self.quick else (10, 2000)
        for capacity in (4, 8, 16):
            name = f"5 -> 3 in virtual time, capacity {capacity}"
            pairs = [self._starve(name, items, capacity, seed) for seed in range(seeds)]
            ours, robin = max(max(one.idle) for one, _ in pairs), min(other.idle[2] for _, other in pairs)
            drawn = f"worst of {seeds} draws"
            against = f"round robin {', '.join(f'{share:.3f}' for share in pairs[0][1].idle)}"
            self.report.add(
                Row(f"{name}: consumer that waits most", ours, "of its time", 0.02, f"{against}; {drawn}")
            )
            against = f"mean depths {', '.join(f'{depth:.1f}' for depth in pairs[0][1].depths)}; {drawn}"
            self.report.add(
                Row(f"{name}: third by round robin", robin, "of its time", 0.25, against, at_least=True)
            )
            slower = min(other.makespan / one.makespan for one, other in pairs)
            self.report.add(Row(f"{name}: round robin takes", slower, "x the makespan", None, drawn))

    def _starve(self, name: str, items: int, capacity: int, seed: int) -> tuple[Outcome, Outcome]:
        draw = [partial(noisy, spread=0.2, seed=10 * seed + number) for number in range(8)]
        pipeline = Pipeline(
            [noise(5 / (1.05 * 3)) for noise in draw[:5]],
            [noise(1.0) for noise in draw[5:]],
            items,
            capacity,
        )
        outcomes = through_channel(pipeline), round_robin(pipeline)
        for outcome in outcomes:
            self.check(name, sorted(sum(outcome.consumed, ())), list(range(items)))
        return outcomes

    # -- items a second ----------------------------------------------------------------------------------

    def threads(self) -> None:
        """Beside `queue.Queue`."""
        items, times = (5_000, 3) if self.quick else (50_000, 7)
        for producers, consumers in ((1, 1), (5, 3)):
            for capacity in (8, 1024):
                flow = Flow(producers, consumers, capacity, items, reach=0.8)
                runs = [
                    (is_ours, in_threads(flow, is_ours)) for _ in range(times) for is_ours in (False, True)
                ]
                self.compare(f"threads, {flow.name}", flow, runs, "queue.Queue")

    def processes(self) -> None:
        """Beside `torch.multiprocessing.Queue`, small items."""
        few, many = (2_000, 8_000) if self.quick else (6_000, 60_000)
        small = [Flow(ends, ends, 8, few) for ends in (1, 3)]
        large = [Flow(ends, ends, 1024, many, reach=0.5) for ends in (1, 3)]
        self.in_crews([*small, *large], times=5)

    def tensors(self) -> None:
        """The same, large items."""
        moved = 50 * MB if self.quick else 400 * MB
        sizes, ends = (MB, 8 * MB), ((1, 1), (3, 2))
        flows = [Flow(*each, 8, moved // size, size, 0.9) for size in sizes for each in ends]
        self.in_crews(flows, times=9)

    def in_crews(self, flows: list[Flow], times: int) -> None:
        """Run all flows between forked processes and between spawned ones; if quick, few of the slowly started."""
        self.in_crew("fork", flows, 2 if self.quick else times)
        few = [flow for flow in flows if flow.producers == 1]
        self.in_crew("spawn", few if self.quick else flows, 2 if self.quick else times)

    def in_crew(self, method: str, flows: list[Flow], times: int) -> None:
        """Run every flow so many times on each side, in turn."""
        context = torch.multiprocessing.get_context(method)
        crew = Crew(context, max(max(flow.producers, flow.consumers) for flow in flows))
        plan = [(flow, is_ours) for flow in flows for _ in range(times) for is_ours in (False, True)]
        shared = {flow: context.Queue(flow.capacity) for flow in flows}
        for flow, is_ours in plan:
            crew.plan(flow, shared[flow], is_ours)
        stays = crew.run()
        for flow in flows:
            runs = [
                (is_ours, run) for (other, is_ours), run in zip(plan, stays, strict=True) if other == flow
            ]
            self.compare(f"{method}, {flow.name}", flow, runs, "torch's queue")

    def compare(self, name: str, flow: Flow, runs: list[tuple[bool, list[Stay]]], peer: str) -> None:
        """Check what came, and report our items a second over the peer's."""
        rates: dict[bool, list[float]] = {True: [], False: []}
        for is_ours, stays in runs:
            side = "channel" if is_ours else peer
            came = sum(stay.count for stay in stays), sum(stay.total for stay in stays)
            self.check(f"{name}, {side}: count and sum", came, (flow.items, sum(range(flow.items))))
            self.check(f"{name}, {side}: torn tensors", sum(stay.torn for stay in stays), 0)
            began = min(stay.began for stay in stays[: flow.producers])
            seconds = max(stay.ended for stay in stays[flow.producers :]) - began
            rates[is_ours].append(flow.items / seconds)
        ours, theirs = rates[True], rates[False]
        against = f"{peer} {best(theirs)}, channel {best(ours)}; {len(ours)} runs each"
        reach = None if self.quick else flow.reach
        self.report.add(Row(name, max(ours) / max(theirs), f"x {peer}", reach, against, at_least=True))
        if flow.size:
            moved = [max(each) * flow.size / 1e9 for each in (ours, theirs)]
            self.report.add(Row(f"{name}: moved", moved[0], "GB/s", None, f"{peer} {moved[1]:.2f} GB/s"))

    # -- while nothing moves -----------------------------------------------------------------------------

    def idle(self) -> None:
        """Who wakes up while nothing moves."""
        waiting = [*self._waiting_processes(), *self._waiting_threads()]
        before = settle(waiting)
        seconds = 1.0 if self.quick else 2.0
        time.sleep(seconds)
        for each, first in zip(waiting, before, strict=True):
            _, last = each.seen()
            against = f"in {seconds:g} s; {first} until it waited"
            self.report.add(Row(f"idle, {each.name}", last - first, "switches", 0.0, against))
        for each in waiting:
            each.finish()

    def _waiting_processes(self) -> list[Waiting]:
        """Of an empty channel and a full one, the broker and a process that waits."""
        context = torch.multiprocessing.get_context("fork")
        found = []
        for is_full in (False, True):
            others = set(threading.enumerate())
            channel: Channel[int] = Channel(1, 1, 1, context=context)
            broker = next(each for each in threading.enumerate() if each not in others)
            sender, receiver = channel.sender(), channel.receiver()
            here, there = context.Pipe()
            target, end = (send_two, sender) if is_full else (receive_one, receiver)
            process = context.Process(target=target, args=(end, there), daemon=True)
            process.start()
            there.close()
            self.check("idle, process", here.recv(), "ready")
            if is_full:
                receiver.__enter__()
                finish = partial(self._drain, process, here, receiver)
            else:
                sender.__enter__()
                finish = partial(self._feed, process, here, sender)
            name = f"{'full' if is_full else 'empty'} channel of processes"
            found += [
                Waiting(f"{name}: {end.name}", f"/proc/{process.pid}/status", finish),
                Waiting(f"{name}: broker", task_status(broker), broker.join),
            ]
        return found

    def _feed(self, process: Any, here: Any, sender: Any) -> None:
        with sender:
            sender.send(7)
        self.check("idle, process that received", here.recv(), 7)
        process.join()

    def _drain(self, process: Any, here: Any, receiver: Any) -> None:
        with receiver:
            self.check("idle, from a process that sent", list(receiver), [1, 2])
        self.check("idle, process that sent", here.recv(), "sent")
        process.join()

    def _waiting_threads(self) -> list[Waiting]:
        """The same between threads: one that waits for an item, and one that waits for room."""
        got: list[int] = []
        empty: Channel[int] = Channel(1, 1, 1)
        full: Channel[int] = Channel(1, 1, 1)
        receiver, sender = empty.receiver(), full.sender()

        def receive() -> None:
            with receiver:
                got.append(receiver.receive())

        def send() -> None:
            with sender:
                sender.send(1)
                sender.send(2)

        def feed() -> None:
            with empty.sender() as other:
                other.send(7)
            threads[0].join()
            self.check("idle, thread that received", got, [7])

        def drain() -> None:
            with full.receiver() as other:
                self.check("idle, from a thread that sent", list(other), [1, 2])
            threads[1].join()

        threads = [threading.Thread(target=target) for target in (receive, send)]
        for thread in threads:
            thread.start()
        names = f"empty channel of threads: {receiver.name}", f"full channel of threads: {sender.name}"
        return [
            Waiting(name, task_status(thread), finish)
            for name, thread, finish in zip(names, threads, (feed, drain), strict=True)
        ]


CASES = ("virtual", "threads", "processes", "tensors", "idle")


def main(arguments: list[str] | None = None) -> int:
    given = options(
        "channel",
        "The hand-off channel, beside round robin and the queues it replaces.",
        "fewer items, fewer repetitions",
        CASES,
    ).parse_args(arguments)
    report = Report("channel")
    bench = Bench(report, given.quick)
    for name in given.only or CASES:
        getattr(bench, name)()
    return report.finish(given.strict)


if __name__ == "__main__":
    sys.exit(main())
