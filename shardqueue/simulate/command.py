"""`shardqueue simulate`: what a queue would make of these nodes, before anybody pays for them.

The claiming code itself runs in virtual time (`driver`), so an hour of eight nodes takes seconds. `options` reads the
words, `scenario` has what is known on paper, `findings` what came out, `show` prints it.
"""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardqueue.simulate.findings import Findings
    from shardqueue.simulate.scenario import Scenario

_FORMAT = "shardqueue simulate 1"

_DESCRIPTION = """\
Unequal nodes train through one plan in virtual time: the claiming code is the
real one, the seconds are not. Shows how long they take, beside the limit (all
work over all speeds) and a fixed split (an equal slice each, made up front),
how many requests the store gets, and who waits how long.

Loading is taken to take no time, training a batch as long as the node's speed
says. Start-up counts. NODE is A, B, C, ... in the order of --nodes (a number
from 1 where there are more than 26), or several, as in A-C or 1-64. SECONDS
count from the start; 50% is half of the time that all work takes if nobody
idles and nothing happens.

exit code: 0, also when batches were lost with a node that died; 1 when a batch
was trained twice or a node ended with an error; 2 for a wrong argument."""

_OPTIONS = {
    "nodes": ("SPEEDS", "speeds of the nodes; 16x1 is sixteen of speed 1 (default: 1,0.5,0.5,0.25)"),
    "steps": ("N", "dataset steps, for unit_grid (default: 400)"),
    "unit_steps": ("N", "the most steps a unit has (default: 20)"),
    "lanes": ("N", "local batches each step is made of (default: 4)"),
    "taper": ("N|no", "the number of learners the tail is cut for, or no for equal units (default: 64)"),
    "units": ("N", "instead of such a grid: so many equal units"),
    "unit_batches": ("N", "batches in each of --units (default: 1)"),
    "batch_seconds": ("SECONDS", "what a batch takes a node of speed 1 (default: 0.1)"),
    "latency": ("SECONDS", "what a call to the store takes; 0.02..0.2 draws from between (default: 0.03)"),
    "log_every": ("SECONDS", "time between two writes of a node's log (default: 5)"),
    "seed": ("N", "of everything that is drawn (default: 0)"),
}
_DEFAULTS = {
    "nodes": "1,0.5,0.5,0.25",
    "batch_seconds": "0.1",
    "latency": "0.03",
    "log_every": "5",
    "seed": "0",
}
_EVENTS = {
    "slow": ("NODE@SECONDS=SPEED", "from then on the node has that speed; may be repeated, as those below"),
    "pause": ("NODE@SECONDS..SECONDS", "the node stands still"),
    "die": ("NODE@SECONDS", "the node is killed, and what it holds is lost"),
    "leave": ("NODE@SECONDS", "the node leaves in order, and gives back what it holds"),
    "join": ("NODE@SECONDS", "the node comes only then"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    parser.description, parser.formatter_class = _DESCRIPTION, argparse.RawDescriptionHelpFormatter
    for option, (form, meaning) in _OPTIONS.items():
        parser.add_argument(_flag(option), default=_DEFAULTS.get(option), metavar=form, help=meaning)
    for option, (form, meaning) in _EVENTS.items():
        parser.add_argument(_flag(option), action="append", default=[], metavar=form, help=meaning)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write options and outcome to this file")


def run(given: argparse.Namespace) -> int:
    """Simulate and show it.

    Args:
        given: what a parser with `add_arguments` read.

    Returns:
        0, or 1 when a batch was trained twice or a node ended with an error.

    Raises:
        InvalidInputError: an option is outside its grammar or bounds, or the JSON file cannot be written.
    """
    from random import Random

    from rich.console import Console

    from shardqueue.simulate import simulate
    from shardqueue.simulate.findings import find
    from shardqueue.simulate.options import read
    from shardqueue.simulate.progress import watched
    from shardqueue.simulate.show import show
    from shardqueue.terminal import check_file

    scenario = read(given)
    if given.json is not None:
        check_file("json", given.json)
    low, high = scenario.latency
    random = Random(f"latency {scenario.seed}")
    with watched(Console(stderr=True), len(scenario.units)) as mailbox:
        outcome = simulate(
            scenario.units,
            scenario.nodes,
            batch_seconds=scenario.batch_seconds,
            latency=low if low == high else lambda: random.uniform(low, high),
            log_every=scenario.log_every,
            seed=scenario.seed,
            mailbox=mailbox,
        )
    findings = find(scenario, outcome, mailbox)
    show(Console(), scenario, findings)
    if given.json is not None:
        given.json.write_text(_encode(given, scenario, findings), encoding="utf-8")
    return 1 if findings.faulty else 0


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def _encode(given: argparse.Namespace, scenario: Scenario, findings: Findings) -> str:
    from dataclasses import asdict

    words = ["shardqueue", "simulate"]
    for option in (*_OPTIONS, *_EVENTS):
        value = getattr(given, option)
        for text in value if isinstance(value, list) else [value]:
            words += [] if text is None else [_flag(option), text]
    document = {
        "format": _FORMAT,
        "command": shlex.join(words),
        "options": {
            "plan": scenario.units.arguments,
            "units": len(scenario.units),
            "batches": scenario.batches,
            "nodes": [
                {"name": name, **asdict(node)}
                for name, node in zip(scenario.names, scenario.nodes, strict=True)
            ],
            "batch_seconds": scenario.batch_seconds,
            "latency": scenario.latency,
            "log_every": scenario.log_every,
            "seed": scenario.seed,
        },
        "outcome": findings.as_json(),
    }
    return json.dumps(document, indent=1, allow_nan=False) + "\n"
