"""The words of the command line, read and checked.

Whatever is wrong is told before anything runs, with the value, the bound and the remedy. Among it is what would only
seem to hang: more units, batches or writes of logs than this process can go through while somebody waits.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from shardqueue.errors import InvalidInputError
from shardqueue.simulate import Node
from shardqueue.simulate.courses import Courses
from shardqueue.simulate.grammar import LEAST_SPEED, MOST_SECONDS, MOST_SPEED, number, whole
from shardqueue.simulate.scenario import Scenario, gone
from shardqueue.units import unit_grid

if TYPE_CHECKING:
    import argparse

    from shardqueue.units import LazyUnits

MOST_NODES = 2_000
MOST_UNITS = 10**7
MOST_BATCHES = 2 * 10**7
MOST_LOGS = 10**6
MOST_SIZE = 10**12
LEAST_SECONDS = 1e-6
MOST_LATENCY = 60.0
"""Seconds; a store whose calls take longer is down."""
STEPS, UNIT_STEPS, LANES, TAPER = 400, 20, 4, 64
_NODES = "pass --nodes 1,0.5,0.5,0.25 or --nodes 16x1,32x0.5"
_GRID = "steps", "unit_steps", "lanes", "taper"


def read(given: argparse.Namespace) -> Scenario:
    """Read the words of `command.add_arguments`.

    Raises:
        InvalidInputError: one of them is outside its grammar or bounds, or all of it is too much to run.
    """
    speeds = _speeds(given.nodes)
    units = _units(given)
    scenario = Scenario(
        units=units,
        nodes=tuple(Node(speed) for speed in speeds),
        batch_seconds=number("batch_seconds", given.batch_seconds, LEAST_SECONDS, MOST_SECONDS, "pass 0.1"),
        latency=_latency(given.latency),
        log_every=number("log_every", given.log_every, LEAST_SECONDS, MOST_SECONDS, "pass 5"),
        seed=whole("seed", given.seed, 0, 2**53),
    )
    if scenario.batches > MOST_BATCHES:
        bound = f"at most {MOST_BATCHES:,} in all"
        remedy = "count ten batches as one that takes --batch-seconds ten times as long"
        raise InvalidInputError("batches", scenario.batches, bound, remedy)
    courses = Courses(speeds, undisturbed=scenario.limit(scenario.batches))
    for kind in ("slow", "pause", "die", "leave", "join"):
        for text in getattr(given, kind):
            courses.read(kind, text)
    scenario = replace(scenario, nodes=courses.nodes())
    _check_logs(scenario)
    return scenario


def _check_logs(scenario: Scenario) -> None:
    """Refuse what would write logs for ever: a node writes them until its last batch is done."""
    last = min(scenario.limit(scenario.batches), max(map(gone, scenario.nodes)))
    largest = scenario.units.batches(0) * scenario.batch_seconds
    seconds = 0.0
    for node in scenario.nodes:
        finish = node.finish(max(node.joins, last), largest)
        seconds += max(0.0, min(finish, gone(node)) - node.joins)
    logs = seconds / scenario.log_every
    if logs > MOST_LOGS:
        bound = f"so long that at most {MOST_LOGS:,} logs are written (it would be {logs:,.0f})"
        remedy = f"pass --log-every {math.ceil(seconds / MOST_LOGS)}, or simulate a part of the plan"
        raise InvalidInputError("log_every", scenario.log_every, bound, remedy)


def _latency(text: str) -> tuple[float, float]:
    remedy = "pass 0.03, or 0.02..0.2 to draw from between"
    low, dots, high = text.partition("..")
    least = number("latency", low, 0.0, MOST_LATENCY, remedy)
    most = number("latency", high, 0.0, MOST_LATENCY, remedy) if dots else least
    if most < least:
        raise InvalidInputError("latency", text, "the smaller number, then the larger", f"pass {high}..{low}")
    return least, most


def _speeds(text: str) -> list[float]:
    groups = []
    for part in text.split(","):
        several = re.fullmatch(r"([0-9]+)[xX*](.+)", part.strip())
        count = whole("nodes", several[1], 1, MOST_NODES) if several else 1
        speed = several[2] if several else part.strip()
        groups.append((count, number("nodes", speed, LEAST_SPEED, MOST_SPEED, _NODES)))
    nodes = sum(count for count, _ in groups)
    if nodes > MOST_NODES:
        raise InvalidInputError("nodes", nodes, f"at most {MOST_NODES:,}", "simulate a part of the fleet")
    return [speed for count, speed in groups for _ in range(count)]


def _units(given: argparse.Namespace) -> LazyUnits:
    if given.units is not None:
        mixed = [option for option in _GRID if getattr(given, option) is not None]
        if mixed:
            bound = "left out beside --units, which is a plan of another kind"
            raise InvalidInputError(mixed[0], getattr(given, mixed[0]), bound, "pass one of the two")
        count = whole("units", given.units, 1, MOST_UNITS)
        batches = "1" if given.unit_batches is None else given.unit_batches
        size = whole("unit_batches", batches, 1, MOST_BATCHES)
        return unit_grid(count * size, size, 1, taper=False)
    if given.unit_batches is not None:
        bound = "passed beside --units, whose batches it counts"
        raise InvalidInputError(
            "unit_batches", given.unit_batches, bound, "pass --units too, or --unit-steps"
        )
    sizes = {"steps": STEPS, "unit_steps": UNIT_STEPS, "lanes": LANES}
    for option in sizes:
        text = getattr(given, option)
        if text is not None:
            sizes[option] = whole(option, text, 1, MOST_SIZE)
    units = unit_grid(**sizes, taper=_taper(given.taper))
    if len(units) > MOST_UNITS:
        bound = f"at most {MOST_UNITS:,}"
        raise InvalidInputError("units", len(units), bound, "make them larger by --unit-steps")
    return units


def _taper(text: str | None) -> int | bool:
    if text is None:
        return TAPER
    if text == "no":
        return False
    try:
        return whole("taper", text, 1, MOST_SIZE)
    except InvalidInputError:
        bound = "the number of learners the tail is cut for, or no"
        raise InvalidInputError("taper", text, bound, f"pass --taper {TAPER} or --taper no") from None
