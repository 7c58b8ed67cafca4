"""Other systems beside shardqueue: four consumers at speeds 1, 1/2, 1/2 and 1/4, and units of one batch.

Makespan over the limit (all work over all speed), how many units each consumer trained, and calls to the store a
unit, logs included. GradientMail stands beside shardqueue's own loop, both in threads over a memory store; Ray Data
and a DataLoader with a `DistributedSampler` beside shardqueue in a DataLoader over a folder, all of them in
processes. A fixed equal split takes 2.25 times the limit.

Every side counts by value that each unit was trained exactly once; if not, the exit code is 1.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.peers.sides import (
    LOADERS,
    SIDES,
    THREADS,
    AbsentError,
    BrokenError,
    make_environment,
    run,
)
from benchmarks.peers.work import Work
from benchmarks.report import Report, Row, options

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from benchmarks.peers.sides import Side
    from benchmarks.peers.work import Outcome

FEW = Work(24, 0.05, 0.0005, turns=3)
QUICK = (FEW, Work(400, 0.025, 0.0005), Work(400, 0.025, 0.03))
FULL = (*QUICK, Work(400, 0.005, 0.0005), Work(400, 0.005, 0.03))
PROMISED = {FEW: 1.17, QUICK[2]: 1.10}
"""Of shardqueue in threads, makespan over the limit."""
BESIDE = {"gradientmail": THREADS, "ray_data": LOADERS, "distributed_sampler": LOADERS}
"""What of shardqueue a peer stands beside."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a side did with the works.

    Attributes:
        side: which.
        label: what rows call it.
        outcomes: by work.
    """

    side: Side
    label: str
    outcomes: dict[Work, Outcome]


def measure(report: Report, peers: Sequence[Side], works: Sequence[Work]) -> None:
    """Measure peers, and shardqueue beside them; then report work by work."""
    theirs = [each for peer in peers if (each := _run(report, peer, works))]
    beside = dict.fromkeys(BESIDE[each.side.module] for each in theirs)
    ours = [each for side in beside if (each := _run(report, side, works))]
    for work in dict.fromkeys(map(_without_store, works)):
        for each in theirs:
            if work in each.outcomes:
                _rows(report, each, work)
    for work in works:
        for each in theirs:
            if work in each.outcomes:
                _rows(report, each, work)
        for each in ours:
            promised = PROMISED.get(work) if each.side is THREADS else None
            peers_too = [peer for peer in theirs if BESIDE[peer.side.module] is each.side]
            _rows(report, each, work, promised, peers_too)


def _run(report: Report, side: Side, works: Sequence[Work]) -> Measured | None:
    asked = list(works if side.asks_store else dict.fromkeys(map(_without_store, works)))
    print(f"peers: {side.module}", file=sys.stderr, flush=True)
    try:
        label, found = run(side, asked)
    except AbsentError as reason:
        report.skipped.append(f"{side.module}: {reason}")
    except BrokenError as fault:
        report.wrong.append(str(fault))
    else:
        return Measured(side, label, dict(zip(asked, found, strict=True)))
    return None


def _without_store(work: Work) -> Work:
    """The work for those who ask no store, and of whom one turn tells all: their shares are equal."""
    return replace(work, latency=0.0, turns=1)


def _rows(
    report: Report,
    measured: Measured,
    work: Work,
    reach: float | None = None,
    peers: Sequence[Measured] = (),
) -> None:
    outcome, name = measured.outcomes[work], f"{work.name}: {measured.label}"
    told = [f"units {'/'.join(map(str, outcome.shares))}", f"first after {outcome.start:.2f} s"]
    for peer in peers:
        theirs = peer.outcomes.get(work) or peer.outcomes[_without_store(work)]
        told.append(f"{peer.side.module} {theirs.ratio:.3f}")
    report.add(Row(name, outcome.ratio, "x limit", reach, "; ".join(told)))
    if outcome.requests is not None:
        report.add(Row(f"{name}, calls", outcome.requests, "requests/unit"))


def parser() -> argparse.ArgumentParser:
    """What the command takes."""
    taken = options(
        "peers",
        "Other systems on the same work, beside shardqueue.",
        "without units of 5 ms",
        [side.module for side in SIDES],
    )
    taken.add_argument(
        "--make-environments",
        metavar="FOLDER",
        type=Path,
        help="measure nothing: install the peers into the folder, each into an environment of its own",
    )
    return taken


def main(arguments: list[str] | None = None) -> int:
    given = parser().parse_args(arguments)
    peers = [side for side in SIDES if not given.only or side.module in given.only]
    if given.make_environments:
        return make(peers, given.make_environments)
    report = Report("peers")
    measure(report, peers, QUICK if given.quick else FULL)
    return report.finish(given.strict)


def make(peers: Sequence[Side], folder: Path) -> int:
    """Make what environments can be made; 1 if one could not."""
    failed = 0
    for peer in peers:
        if peer.package:
            try:
                print(f"{peer.package}: {make_environment(peer, folder)}")
            except AbsentError as reason:
                print(f"{peer.package}: {reason}", file=sys.stderr)
                failed = 1
    print(f"export SHARDQUEUE_PEERS={folder.absolute()}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
