"""What it costs to lose nothing: requests and step time with `reclaim_after` off and on, and what `status` reads.

Requests are counted in virtual time (`shardqueue.simulate`, the real claiming code), with 100 units a learner and
with 20, where the start and the end of the pass, at which learners look after one another, weigh most. All requests
count: finding the run, claims, and the logs, which are written by the clock. Then a node dies, and what it held is
trained all the same.

Step time is measured for real: two learners in threads train by waiting, in one process and over one folder, off and
on in turns. And once with a loader and a loop that do nothing, which shows what the guard costs a batch.

`status` is asked about a run of 1,000,000 units by 64 learners whose log pages are full, on a folder and on SeaweedFS
over loopback: its requests are counted, and its seconds are those of the command from start to end.

Every run counts, by value and where batches are trained, that none is missing, and with `reclaim_after` off or nobody
dead none twice; if not, the exit code is 1.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.report import Report, Row, options
from benchmarks.seaweedfs import BUCKET, seaweedfs
from shardqueue import Session, open_mailbox, shared_queue, unit_grid
from shardqueue.clock import SystemClock
from shardqueue.mailbox.faults import Counted
from shardqueue.plan import Plan
from shardqueue.records import LogPage, Manifest, Process, RunKeys, Totals, TrainedSpan
from shardqueue.run import new_manifest
from shardqueue.simulate import Node, simulate
from shardqueue.status.observing import Observer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardqueue.mailbox import Mailbox
    from shardqueue.units import Unit

SPEEDS = (1.0, 0.5, 0.5, 0.25)
BATCHES, BATCH_SECONDS = 20, 0.05
"""Batches of a unit, and what one takes the fastest learner."""
RECLAIM_AFTER = 60.0
LEARNERS, UNITS, PAGE = 64, 1_000_000, 2000
"""Of the run that `status` looks at; spans of a full page."""
LIMIT = "2: a create and its read-back, without logs"


# -- requests ----------------------------------------------------------------------------------------------


def requests(report: Report, learners: int, each: int) -> None:
    """All requests a unit, off and on; `each`: units a learner."""
    units = each * learners
    nodes = [Node(SPEEDS[index % len(SPEEDS)]) for index in range(learners)]
    for after in (None, RECLAIM_AFTER):
        found = simulate(
            unit_grid(units * BATCHES, BATCHES, 1, taper=False),
            nodes,
            batch_seconds=BATCH_SECONDS,
            latency=0.03,
            reclaim_after=after,
        )
        case = f"{learners} learners, {units} units of {BATCHES}, reclaim_after {_name(after)}"
        report.add(Row(case, sum(found.requests.values()) / units, "requests/unit", 3.5, LIMIT))
        _judge(report, case, found.trained, units * BATCHES, twice=0)


def a_death(report: Report) -> None:
    """One of four dies half-way; nobody sees its process."""
    steps, after = 200 * BATCHES, 10.0
    units = unit_grid(steps, BATCHES, 1)
    nodes = [Node(speed) for speed in SPEEDS]
    whole = simulate(units, nodes, batch_seconds=BATCH_SECONDS, latency=0.03)
    dying = [nodes[0], Node(SPEEDS[1], dies=whole.makespan / 2), *nodes[2:]]
    found = simulate(
        units,
        dying,
        batch_seconds=BATCH_SECONDS,
        latency=0.03,
        reclaim_after=after,
        log_every=after / 3,
    )
    case = f"one of 4 nodes dies half-way, reclaim_after {_name(after)}"
    twice = sum(found.trained.values()) - len(found.trained)
    most = (after / 3 + 0.1) * SPEEDS[1] / BATCH_SECONDS
    against = f"{most:.0f}: what it trained since its last log, at most"
    report.add(Row(f"{case}: batches trained twice", twice, "batches", most, against))
    _judge(report, case, found.trained, steps, twice=int(most))


# -- step time ---------------------------------------------------------------------------------------------


def step_time(report: Report, seconds: float, steps: int, turns: int) -> None:
    """Seconds a step of two learners, off and on in turns."""
    times: dict[float | None, list[float]] = {None: [], RECLAIM_AFTER: []}
    for _ in range(turns):
        for after, found in times.items():
            found.append(_train(report, after, seconds, steps))
    off, on = median(times[None]), median(times[RECLAIM_AFTER])
    if seconds:
        case = f"a step of {1000 * seconds:g} ms, 2 learners on a folder, on against off"
        report.add(Row(case, on / off, "x off", 1.01, f"off: {1000 * off:.3f} ms"))
        return
    case = "a batch, loader and loop do nothing, on less off"
    report.add(Row(case, 1e6 * (on - off), "us", 10.0, f"off: {1e6 * off:.1f} us"))


def _train(report: Report, after: float | None, seconds: float, steps: int) -> float:
    """Median seconds between two batches."""
    units = unit_grid(steps, BATCHES, 1, taper=False)
    trained: list[int] = []
    gaps: list[float] = []

    def learn(name: str) -> None:
        last = None
        with (
            Session(mailbox, name) as session,
            shared_queue(units, mailbox, name, load, reclaim_after=after) as queue,
        ):
            for _, batch in queue:
                now = time.perf_counter()
                if last is not None:
                    gaps.append(now - last)
                last = now
                if seconds:
                    time.sleep(seconds)
                trained.append(batch)
                session.step(samples=1)

    with tempfile.TemporaryDirectory() as folder:
        mailbox = open_mailbox(folder)
        names = ("a", "b") if seconds else ("a",)
        threads = [threading.Thread(target=learn, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    _judge(report, f"step time, reclaim_after {_name(after)}", Counter(trained), steps, twice=0)
    return median(gaps) if seconds else sum(gaps) / len(gaps)


def load(unit: Unit) -> Iterator[tuple[int, int]]:
    for step in unit.steps:
        yield step, step


# -- status ------------------------------------------------------------------------------------------------


def status(report: Report, store: str, url: str, environment: dict[str, str], **storage: Any) -> None:
    """Requests and seconds of `shardqueue status`."""
    mailbox = open_mailbox(url, **storage)
    pages = _write_logs(mailbox)
    counted = Counted(mailbox)
    Observer(counted, None, SystemClock()).look()
    case = f"status on {store}, {LEARNERS} learners, {UNITS:,} units, {pages} full pages"
    report.add(
        Row(f"{case}: requests", counted.total, "requests", LEARNERS + 6, f"{LEARNERS}: a page a learner")
    )
    command = [
        sys.executable,
        "-c",
        "from shardqueue.cli import main; raise SystemExit(main())",
        "status",
        url,
    ]
    began = time.perf_counter()
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    report.add(Row(f"{case}: seconds", time.perf_counter() - began, "s", None, "the whole command"))
    if done.returncode not in (0, 1):  # 1: nobody is alive
        report.wrong.append(f"status on {store} ended with {done.returncode}: {done.stdout}{done.stderr}")


def _write_logs(mailbox: Mailbox) -> int:
    """The logs of a run that is nearly over, without its claims; return how many pages they have."""
    units = unit_grid(UNITS * BATCHES, BATCHES, 1, taper=False)
    manifest: Manifest = new_manifest(Plan(units), "learner-00", time.time())
    keys = RunKeys("1")
    mailbox.put_if_absent(keys.manifest, manifest.encode())
    each, pages = UNITS // LEARNERS, 0
    for learner in range(LEARNERS):
        own = range(learner * each, (learner + 1) * each)
        name = f"learner-{learner:02d}"
        where = Process(host=f"host-{learner}", boot=f"boot-{learner}", pid=1, started="1")
        for page, first in enumerate(range(0, len(own), PAGE)):
            spans = [
                TrainedSpan("", units.identifier(unit), 0, 0, BATCHES, 640, 0.1, 0.0, 0.0, None, True)
                for unit in own[first : first + PAGE]
            ]
            done = min(each, first + PAGE) * BATCHES
            log = LogPage(
                learner=name, instance=f"{learner:012x}", process="main", page=page, write=page + 1,
                run_id=manifest.run_id, where=where, wall=time.time(), rate=100.0, trained=spans, held=[],
                totals=Totals(claimed=each, batches=done, samples=32 * done, elapsed=3600.0, waited=1.0),
            )  # fmt: skip
            mailbox.put(keys.log(name, log.instance, "main", page), log.encode())
            pages += 1
    return pages


def _name(after: float | None) -> str:
    return "off" if after is None else f"{after:g} s"


def _judge(report: Report, case: str, trained: Counter[Any], batches: int, twice: int) -> None:
    if len(trained) != batches:
        report.wrong.append(f"{case}: {batches - len(trained)} of {batches} batches were never trained")
    if sum(trained.values()) - len(trained) > twice:
        report.wrong.append(f"{case}: {sum(trained.values()) - len(trained)} batches were trained twice")


def main(arguments: list[str] | None = None) -> int:
    given = options(
        "recovery",
        "What it costs to lose nothing.",
        "fewer learners and turns",
        ("requests", "steps", "status"),
    ).parse_args(arguments)
    report = Report("recovery")
    cases = given.only or ("requests", "steps", "status")
    if "requests" in cases:
        for learners in (4, 16 if given.quick else 64):
            for each in (20, 100):
                requests(report, learners, each)
        a_death(report)
    if "steps" in cases:
        step_time(report, 0.005, 400 if given.quick else 1200, 3)
        step_time(report, 0.0, 4_000 if given.quick else 20_000, 3)
    if "status" in cases:
        with tempfile.TemporaryDirectory() as folder:
            status(report, "a folder", folder, {})
            place = Path(folder) / "server"
            place.mkdir()
            with seaweedfs(place) as server:
                environment = {
                    "AWS_ENDPOINT_URL": server.endpoint,
                    "AWS_ACCESS_KEY_ID": server.options["key"],
                    "AWS_SECRET_ACCESS_KEY": server.options["secret"],
                }
                url = f"s3://{BUCKET}/status"
                status(report, "SeaweedFS", url, environment, **server.options)
    return report.finish(given.strict)


if __name__ == "__main__":
    sys.exit(main())
