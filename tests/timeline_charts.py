"""Charts made by hand, for tests that look at what is drawn of them."""

from __future__ import annotations

from typing import Any

from shardqueue.timeline.chart import Bar, Chart, Handover, Lane, Tail

HOSTILE = (
    "<script>window.ran=1</script>",
    '"><img src=x onerror="window.ran=1">',
    "</title></script><svg onload=window.ran=1>",
    "</script ",
    "<!--<script ",
    "\x1b[2J\x1b[31mred",
    "\u202egnp.exe",
    "line\u2028window.ran=1",
    "${window.ran=1}$data&lt;b&gt;",
    "\ud800 half",
    "x" * 10_000,
)


def bar(start: float, stop: float, unit: str, **more: Any) -> Bar:
    values = {"waited": 0.0, "pass_": "e0", "attempt": 0, "begin": 0, "end": 4, "batches": 4, "samples": 128}
    return Bar(start=start, stop=stop, unit=unit, **{**values, **more})


def lane(learner: str, bars: tuple[Bar, ...], seconds: float, **more: Any) -> Lane:
    covered, waited = sum(b.stop - b.start for b in bars), sum(b.waited for b in bars)
    values = {
        "instance": "0123456789ab",
        "process": "main",
        "host": "box",
        "pid": 71,
        "since": 0.0,
        "seen": seconds,
        "left": "end",
        "rows": 1 + max((b.row for b in bars), default=0),
        "busy": covered - waited,
        "waited": waited,
        "idle": seconds - covered,
        "batches": sum(b.batches for b in bars),
        "samples": sum(b.samples for b in bars),
        "finished": max((b.stop for b in bars), default=None),
    }
    return Lane(learner=learner, bars=bars, **{**values, **more})


def two_learners() -> Chart:
    """Twenty seconds: b is gone after five, and a goes on with its second unit at twelve."""
    first = (
        bar(0.0, 4.0, "u0"),
        bar(4.0, 8.0, "u2", waited=1.0),
        bar(12.0, 15.0, "u3", attempt=1, begin=1, batches=3, samples=96),
        bar(15.0, 20.0, "u4", batches=10, end=10, samples=320),
    )
    second = (bar(0.0, 4.0, "u1"), bar(4.0, 5.0, "u3", batches=1, end=1, samples=32))
    lanes = (
        lane("node-a", first, 20.0, host="fast-box", pid=4711),
        lane("node-b", second, 20.0, left=None, gone=True, parted=6.0, seen=6.0, idle=1.0, away=14.0),
    )
    taken = Handover("e0", "u3", 0, 1, owner=1, by="node-a", why="gone", at=12.0, taker=0, reclaimed=True)
    return Chart(
        url="s3://bucket/prefix",
        run="7",
        origin=1_700_000_000.0,
        seconds=20.0,
        lanes=lanes,
        passes=("e0",),
        handovers=(taken,),
        tails=(Tail("e0", 18.0, 20.0, 2.0),),
        spans=6,
    )


def hostile() -> Chart:
    """Every name is one that would like to be more than a name."""
    lanes = tuple(
        lane(
            name, (bar(0.0, 9.0, name, pass_=name),), 10.0, host=name, instance=name, process=name, left=name
        )
        for name in HOSTILE
    )
    handovers = tuple(Handover(name, name, 0, 1, 0, name, name, 9.5, 1, True) for name in HOSTILE)
    everything = "".join(HOSTILE[:-1])
    tails = tuple(Tail(name, 9.0, 10.0, 1.0) for name in HOSTILE)
    return Chart(everything, everything, 1e9, 10.0, lanes, HOSTILE, handovers, tails, len(lanes), HOSTILE)


def many(lanes: int, bars: int, name: str = "") -> Chart:
    rows = tuple(
        lane(
            f"rank-{place:03d}",
            tuple(bar(at + 0.05, at + 0.95, f"{place}-{at}{name}") for at in range(bars)),
            float(bars),
        )
        for place in range(lanes)
    )
    return Chart("q", "1", 1e9, float(bars), rows, ("e0",), spans=lanes * bars)
