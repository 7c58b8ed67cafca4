"""`shardqueue simulate`: real runs of the command, against arithmetic done by hand and the driver called directly."""

from __future__ import annotations

import argparse
import io
import json
import re
import shlex
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from shardqueue.cli import main
from shardqueue.errors import InvalidInputError
from shardqueue.mailbox.memory import MemoryMailbox
from shardqueue.simulate import Node, simulate
from shardqueue.simulate.command import add_arguments, run
from shardqueue.simulate.options import read
from shardqueue.simulate.progress import PATIENCE, STRIDE, watched
from shardqueue.simulate.show import course, seconds_shown
from shardqueue.units import unit_grid

if TYPE_CHECKING:
    from pathlib import Path

    from shardqueue.simulate.scenario import Scenario

EXAMPLE = "--units 24 --batch-seconds 1 --latency 0"
"""Section 1 of the design: 24 one-batch units over speeds 1, 1/2, 1/2, 1/4."""


def parsed(words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(shlex.split(words))


def scenario(words: str) -> Scenario:
    return read(parsed(words))


class Ran:
    """A run of the command: its exit code, the text it printed, and its JSON file."""

    def __init__(self, words: str, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
        capsys.readouterr()
        self.code = run(parsed(f"{words} --json {shlex.quote(str(file))}"))
        captured = capsys.readouterr()
        assert captured.err == ""
        self.text = captured.out
        self.document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        self.outcome: dict[str, Any] = self.document["outcome"]

    def row(self, begin: str) -> list[str]:
        """The cells of the first line of a table that begins with that cell."""
        for line in self.text.splitlines():
            cells = re.split(r"\s{2,}", line.strip())
            if cells[0] == begin:
                return cells[1:]
        raise AssertionError(f"no row {begin!r} in:\n{self.text}")


@pytest.fixture
def simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    return lambda words: Ran(words, tmp_path / "simulated.json", capsys)


class TestTheWorkedExample:
    def test_a_fixed_split_takes_24_and_the_shared_queue_12(self, simulated: Any) -> None:
        ran = simulated(EXAMPLE)
        assert ran.code == 0
        assert ran.outcome["makespan"] == 12.0
        assert ran.outcome["fixed_split"] == {"makespan": 24.0, "lost": 0.0}
        assert ran.outcome["limit"] == pytest.approx(24 / 2.25)
        assert ran.outcome["ratio"] == pytest.approx(1.125)
        assert [part["batches"] for part in ran.outcome["parts"]] == [11, 5, 5, 3]
        assert [part["busy"] for part in ran.outcome["parts"]] == pytest.approx([11, 10, 10, 12])
        assert [part["idle"] for part in ran.outcome["parts"]] == pytest.approx([1, 2, 2, 0])
        assert [part["at_limit"] for part in ran.outcome["parts"]] == pytest.approx(
            [24 / 2.25 * speed for speed in (1, 1 / 2, 1 / 2, 1 / 4)]
        )

    def test_and_says_so(self, simulated: Any) -> None:
        ran = simulated(EXAMPLE)
        assert ran.row("shared queue") == ["12.0 s", "1.125"]
        assert ran.row("fixed split") == ["24.0 s", "2.250"]
        assert ran.row("limit") == ["10.7 s", "1.000"]
        assert ran.row("A") == ["1", "11", "11", "11", "91.7%", "8.3%"]
        assert ran.row("D") == ["1/4", "3", "3", "3", "100.0%", "0.0%"]
        assert "The shared queue is 2.00 times as fast as the fixed split.\n" in ran.text
        assert "Every batch was trained exactly once.\n" in ran.text

    def test_requests_are_the_drivers_own(self, simulated: Any) -> None:
        ran = simulated(EXAMPLE)
        outcome = simulate(
            unit_grid(24, 1, 1, taper=False), [Node(speed) for speed in (1, 0.5, 0.5, 0.25)], log_every=5.0
        )
        assert ran.outcome["requests"] == outcome.requests
        assert ran.outcome["claim_requests"] == outcome.claim_requests
        assert ran.outcome["drift"] == outcome.drift
        assert ran.row("put_if_absent")[0] == str(outcome.requests["PutIfAbsent"])
        assert ran.row("to claim") == [
            str(outcome.claim_requests),
            f"{outcome.claim_requests / 24:.2f}",
        ]
        every = sum(outcome.requests.values())
        assert ran.row("with logs") == [str(every), f"{every / 24:.2f}"]

    def test_the_seed_is_the_drivers(self, simulated: Any) -> None:
        units, fleet = unit_grid(400, 20, 4), [Node(speed) for speed in (1, 0.5, 0.5, 0.25)]
        came_to = []
        for seed in (1, 2):
            outcome = simulate(units, fleet, batch_seconds=0.1, latency=0.03, seed=seed)
            came_to.append(simulated(f"--seed {seed}").outcome["requests"])
            assert came_to[-1] == outcome.requests
        assert came_to[0] != came_to[1]

    def test_as_a_grid(self, simulated: Any) -> None:
        grid = simulated(f"{EXAMPLE.replace('--units 24', '--steps 24 --lanes 1 --unit-steps 1 --taper no')}")
        assert grid.outcome == simulated(EXAMPLE).outcome


class TestPlans:
    def test_the_default_is_a_grid_of_the_library(self) -> None:
        assert scenario("").units == unit_grid(400, 20, 4)
        assert scenario("").batches == 1600

    def test_grids(self) -> None:
        assert scenario("--steps 90 --unit-steps 7 --lanes 2 --taper 3").units == unit_grid(90, 7, 2, taper=3)
        assert scenario("--steps 90 --taper no").units == unit_grid(90, 20, 4, taper=False)

    def test_equal_units(self) -> None:
        units = scenario("--units 30 --unit-batches 7").units
        assert [units.batches(position) for position in range(len(units))] == [7] * 30

    def test_ten_million_units_are_read_at_once(self) -> None:
        assert len(scenario("--units 10000000").units) == 10**7


class TestNodes:
    def test_speeds(self) -> None:
        assert [node.speed for node in scenario("--nodes 2x1,1/4,3x0.5").nodes] == [1, 1, 0.25, 0.5, 0.5, 0.5]

    def test_letters_while_they_suffice(self) -> None:
        assert scenario("--nodes 26x1").names[-1] == "Z"
        assert scenario("--nodes 27x1").names[::26] == ("1", "27")

    def test_what_happens_is_said_by_letter_number_or_several(self) -> None:
        nodes = scenario("--nodes 6x1 --die B@3 --die 3@4 --leave d-E@5 --join 6@7").nodes
        assert [node.dies for node in nodes] == [None, 3, 4, None, None, None]
        assert [node.leaves for node in nodes] == [None, None, None, 5, 5, None]
        assert nodes[5] == Node(joins=7.0)

    def test_times_in_per_cent_of_the_limit(self) -> None:
        nodes = scenario("--units 90 --batch-seconds 2 --nodes 1,0.5 --slow A@50%=1/4 --die B@150%").nodes
        assert list(nodes[0].changes[0]) == pytest.approx([60.0, 0.25])
        assert nodes[1].dies == pytest.approx(180.0)

    def test_slow_downs_and_pauses_together(self) -> None:
        words = "--nodes 1 --slow A@20=0.5 --slow A@5=2 --pause A@10..30 --pause A@25..40 --slow A@50=3"
        assert scenario(words).nodes[0].changes == (
            (5, 2),
            (10, 0),
            (20, 0),
            (25, 0),
            (30, 0),
            (40, 0.5),
            (50, 3),
        )

    def test_course(self) -> None:
        node = Node(1.0, joins=2.0, changes=((10.0, 0.25), (90.0, 1.0)), dies=60.0)
        assert course(node) == "1, joins at 2 s, from 10 s 1/4, dies at 60 s"


class TestOnPaper:
    """The fixed split and the limit, by hand."""

    def test_a_late_node_and_a_slower_one(self) -> None:
        """50 batches each: A has done 20 at 10, and the rest takes 60 s; B takes 50 s from 10 on."""
        split = scenario(
            "--nodes 2,1 --units 100 --batch-seconds 1 --join B@10 --slow A@10=0.5"
        ).fixed_split()
        assert [split.makespan, split.lost] == pytest.approx([70.0, 0.0])

    def test_a_split_loses_what_a_dead_node_had_left(self) -> None:
        """50 batches of 2 s each: A is done at 50, B dies at 60 with 30 done, after joining at 0."""
        split = scenario("--nodes 2,1 --units 100 --batch-seconds 2 --die B@60").fixed_split()
        assert [split.makespan, split.lost] == pytest.approx([60.0, 20.0])

    def test_who_ends_before_its_death_loses_nothing(self) -> None:
        split = scenario("--nodes 2,1 --units 100 --batch-seconds 1 --die A@25 --leave B@51").fixed_split()
        assert [split.makespan, split.lost] == pytest.approx([50.0, 0.0])

    @pytest.mark.parametrize(
        ("batches", "seconds"), [(10, 5), (20, 10), (30, 20), (31, 31), (40, 40), (60, 50), (160, 100)]
    )
    def test_the_limit(self, batches: int, seconds: float) -> None:
        """Two a second until A dies at 10, one until 20, none until 30, then one, and from 40 on two."""
        words = "--nodes 1,1 --units 9 --batch-seconds 1 --die A@10 --pause B@20..30 --slow B@40=2"
        assert scenario(words).limit(batches) == pytest.approx(seconds)

    def test_the_limit_of_what_nobody_lives_to_do(self) -> None:
        assert scenario("--nodes 1,1 --die A-B@10").limit(201) == float("inf")

    @pytest.mark.parametrize(
        "words", ["", "--slow A@50%=0.25 --pause B@9..20 --join D@30", "--nodes 3x1,0.3"]
    )
    def test_it_is_the_drivers_where_nobody_goes(self, words: str) -> None:
        given = scenario(words)
        outcome = simulate(given.units, given.nodes, batch_seconds=given.batch_seconds, latency=0.03)
        assert given.limit(given.batches) == pytest.approx(outcome.limit)
        assert given.fixed_split().makespan == pytest.approx(outcome.fixed)


class TestNodesThatGo:
    def test_what_one_node_held_when_it_died(self, simulated: Any) -> None:
        """Units of 10: at 15.5 s one whole unit and 5 batches of the next are trained, the 16th is cut short."""
        ran = simulated("--nodes 1 --units 4 --unit-batches 10 --batch-seconds 1 --latency 0 --die A@15.5")
        assert ran.code == 0
        assert ran.outcome["trained"] == 15
        assert [lost for lost in ran.outcome["lost"].values() if lost < 10] == [5]
        assert sum(ran.outcome["lost"].values()) + ran.outcome["left_over"] == 25
        assert ran.outcome["left_over"] % 10 == 0
        assert ran.outcome["makespan"] == ran.outcome["limit"] == 15.0
        assert "15 of 40 batches were trained.\n" in ran.text

    def test_the_others_train_all_but_what_the_dead_held(self, simulated: Any) -> None:
        words = "--steps 400 --unit-steps 10 --lanes 2 --batch-seconds 1 --latency 0.05"
        ran = simulated(f"--nodes 1,1,0.5 {words} --die B@100.3")
        units = unit_grid(400, 10, 2)
        outcome = simulate(units, [Node(), Node(dies=100.3), Node(0.5)], latency=0.05)
        held: dict[str, int] = {}
        for unit in units:
            for index in range(units[unit].count):
                if not outcome.trained[unit, index]:
                    held[unit] = held.get(unit, 0) + 1
        lost = sum(held.values())
        assert lost > 0
        assert ran.code == 0
        assert ran.outcome["lost"] == held
        assert ran.outcome["left_over"] == 0
        assert ran.outcome["trained"] == 800 - lost
        assert f"LOST: {lost} batches of unit" in ran.text
        assert "held by node B when killed: nobody else may claim them.\n" in ran.text
        assert "times as fast" not in ran.text

    def test_when_all_die_it_says_how_much_was_trained(self, simulated: Any) -> None:
        ran = simulated("--nodes 1,1 --die A@5 --die B@5")
        assert ran.code == 0
        left = 1600 - ran.outcome["trained"] - sum(ran.outcome["lost"].values())
        assert ran.outcome["left_over"] == left > 1000
        assert f"LEFT OVER: {left:,} batches that nobody claimed: all nodes were gone.\n" in ran.text

    def test_when_nothing_was_trained(self, simulated: Any) -> None:
        ran = simulated("--nodes 1,1 --die A-B@0")
        assert (ran.code, ran.outcome["trained"], ran.outcome["ratio"]) == (0, 0, None)
        assert ran.outcome["left_over"] == 1600
        assert ran.row("shared queue") == ["0.0 s", "-"]

    def test_who_leaves_in_order_loses_nothing(self, simulated: Any) -> None:
        ran = simulated("--leave A@20")
        assert (ran.code, ran.outcome["lost"], ran.outcome["trained"]) == (0, {}, 1600)
        assert ran.row("fixed split")[1] == "200 batches lost"

    def test_busy_idle_and_away_make_up_the_makespan(self, simulated: Any) -> None:
        ran = simulated("--die A@20 --join B@10 --leave C@30")
        for part in ran.outcome["parts"]:
            assert part["busy"] + part["idle"] + part["away"] == pytest.approx(ran.outcome["makespan"])
        away = [part["away"] for part in ran.outcome["parts"]]
        assert away[1] == 10.0
        assert away[0] == pytest.approx(ran.outcome["makespan"] - 20)
        assert away[3] == 0.0
        assert max(part["idle"] for part in ran.outcome["parts"]) < 10

    def test_a_run_that_broke_off_begins_again_and_is_not_fine(self, simulated: Any) -> None:
        """Nobody is left when B comes: as in real life, it opens run 2, which hands out the whole plan."""
        ran = simulated("--nodes 1,1 --die A@5 --join B@100")
        assert ran.code == 1
        assert ran.outcome["runs"] == 2
        assert ran.outcome["repeated"] == ran.outcome["parts"][0]["batches"] > 0
        assert "The first run had broken off, and a later one began again.\n" in ran.text

    def test_a_node_that_comes_after_the_end_is_an_error(self, simulated: Any) -> None:
        ran = simulated("--join D@500")
        assert ran.code == 1
        assert "ERROR: a node ended with RunFinishedError: run 1" in ran.text
        assert ran.outcome["trained"] == 1600


class TestManyNodes:
    words = "--nodes 12x1,12x0.5,4x0.25 --units 2000 --unit-batches 2 --die 28@10"

    def test_nodes_that_are_alike_share_a_row(self, simulated: Any) -> None:
        ran = simulated(self.words)
        kinds = [(0, 12, "12"), (12, 24, "12"), (24, 27, "3"), (27, 28, "1")]
        batches = [part["batches"] for part in ran.outcome["parts"]]
        rows = [re.split(r"\s{2,}", line.strip()) for line in ran.text.splitlines() if " least " in line]
        assert [cells[0] for cells in rows] == [count for _, _, count in kinds]
        least = [int(cells[cells.index("least") + 2]) for cells in rows]
        assert least == [min(batches[low:high]) for low, high, _ in kinds]
        assert rows[3][1].startswith("1/4, dies")

    def test_the_file_has_each_of_them(self, simulated: Any) -> None:
        ran = simulated(self.words)
        assert [part["name"] for part in ran.outcome["parts"]] == [str(number) for number in range(1, 29)]

    def test_of_very_many_kinds_the_rest_is_in_the_file(self, simulated: Any) -> None:
        speeds = ",".join(f"{1 + number / 100}" for number in range(45))
        ran = simulated(f"--nodes {speeds} --units 100")
        assert sum(" least " in line for line in ran.text.splitlines()) == 40
        assert "and 5 more kinds of nodes: see --json" in ran.text
        assert len(ran.outcome["parts"]) == 45


class TestTheFile:
    words = (
        "--nodes 2x1,0.5 --steps 60 --unit-steps 5 --lanes 3 --taper 4 --batch-seconds 0.5 --latency 0.02..0.2"
        " --slow A@25%=1/3 --pause C@3..9.5 --leave B@30 --seed 7 --log-every 2"
    )

    def test_it_can_be_repeated_from_its_own_command(self, simulated: Any) -> None:
        first = simulated(self.words).document
        program, command, *words = shlex.split(first["command"])
        assert (program, command) == ("shardqueue", "simulate")
        assert simulated(shlex.join(words)).document == first

    def test_it_has_every_option(self, simulated: Any) -> None:
        options = simulated(self.words).document["options"]
        assert options["plan"] == unit_grid(60, 5, 3, taper=4).arguments
        assert (options["batches"], options["units"]) == (180, len(unit_grid(60, 5, 3, taper=4)))
        assert (options["batch_seconds"], options["latency"]) == (0.5, [0.02, 0.2])
        assert (options["log_every"], options["seed"]) == (2.0, 7)
        assert [node["name"] for node in options["nodes"]] == ["A", "B", "C"]
        assert options["nodes"][1]["leaves"] == 30.0
        assert options["nodes"][2]["changes"] == [[3.0, 0.0], [9.5, 0.5]]

    def test_another_seed_is_another_run(self, simulated: Any) -> None:
        again = simulated(f"{self.words} --seed 8")
        assert again.outcome["makespan"] != simulated(self.words).outcome["makespan"]

    def test_latency_is_drawn_from_between(self, simulated: Any) -> None:
        """The first batch waits for start-up and claim: 4 to 8 calls one after another."""
        slow, quick, between = (
            simulated(f"--nodes 1 --units 1 --latency {latency}").outcome["makespan"] - 0.1
            for latency in ("1", "0.5", "0.5..1")
        )
        assert slow == pytest.approx(2 * quick)
        assert quick < between < slow


WRONG = [
    ("--nodes 1,fast", "nodes='fast'"),
    ("--nodes 1,,1", "nodes=''"),
    ("--nodes 1,0", "nodes='0'"),
    ("--nodes 1,-1", "nodes='-1'"),
    ("--nodes 1,nan", "nodes='nan'"),
    ("--nodes 1,inf", "nodes='inf'"),
    ("--nodes 1/0", "nodes='1/0'"),
    ("--nodes 0x1", "nodes='0'"),
    ("--nodes 10001x1", "nodes='10001'"),
    ("--nodes 1999x1,2x0.5", "nodes=2001: nodes must be at most 2,000"),
    ("--steps 0", "steps='0'"),
    ("--steps many", "steps='many'"),
    ("--unit-steps -3", "unit_steps='-3'"),
    ("--lanes 1.5", "lanes='1.5'"),
    ("--taper yes", "taper='yes': taper must be the number of learners the tail is cut for, or no"),
    ("--units 10000001", "units='10000001'"),
    ("--units 0", "units='0'"),
    ("--steps 10000001 --lanes 1 --unit-steps 1", "units=10000001: units must be at most 10,000,000"),
    ("--units 10 --unit-batches 0", "unit_batches='0'"),
    ("--unit-batches 5", "unit_batches='5': unit_batches must be passed beside --units"),
    ("--units 10 --lanes 2", "lanes='2': lanes must be left out beside --units"),
    ("--units 10 --taper no", "taper='no': taper must be left out beside --units"),
    ("--steps 100000000 --unit-steps 100000", "batches=400000000: batches must be at most 20,000,000"),
    ("--batch-seconds 0", "batch_seconds='0'"),
    ("--batch-seconds nan", "batch_seconds='nan'"),
    ("--latency -0.1", "latency='-0.1'"),
    ("--latency 0.1..", "latency=''"),
    (
        "--latency 0.2..0.1",
        "latency='0.2..0.1': latency must be the smaller number, then the larger; pass 0.1..0.2",
    ),
    ("--latency 61", "latency='61'"),
    ("--log-every 0", "log_every='0'"),
    ("--log-every 0.000001 --batch-seconds 100", "log_every=1e-06"),
    ("--pause A@1..900000000", "log_every=5.0"),
    ("--seed -1", "seed='-1'"),
    ("--seed one", "seed='one'"),
    ("--slow E@5=1", "slow='E@5=1': slow must be of a node from A to D"),
    ("--nodes 30x1 --slow 31@5=1", "slow='31@5=1': slow must be of a node from 1 to 30"),
    ("--slow 0@5=1", "slow='0@5=1'"),
    ("--slow C-A@5=1", "slow='C-A@5=1'"),
    ("--slow @5=1", "slow='@5=1'"),
    ("--slow A@5", "slow='A@5': slow must be written NODE@SECONDS=SPEED"),
    ("--slow A", "slow='A': slow must be written NODE@SECONDS=SPEED"),
    ("--slow A@5=0", "slow='0'"),
    ("--slow A@5=nan", "slow='nan'"),
    ("--slow A@-5=1", "slow='-5'"),
    ("--slow A@half=1", "slow='half'"),
    ("--slow A@x%=1", "slow='x'"),
    ("--pause A@5", "pause='A@5': pause must be written NODE@SECONDS..SECONDS"),
    ("--pause A@9..5", "pause='A@9..5': pause must be from an earlier time to a later one"),
    ("--pause A@5..inf", "pause='inf'"),
    ("--die A@-1", "die='-1'"),
    ("--die A@nan", "die='nan'"),
    ("--die A", "die='A': die must be written NODE@SECONDS"),
    ("--die A@1 --die A@2", "die='A@2': die must be said once for a node"),
    ("--die A@1 --leave A@2", "leave='A@2'"),
    ("--join A@5 --die A@5", "die='A@5': die must be after the node has joined, at 5 s"),
    ("--join A@5 --leave A@4", "leave='A@4': leave must be after the node has joined, at 5 s"),
]


class TestBadInput:
    @pytest.mark.parametrize(("words", "message"), WRONG, ids=[words for words, _ in WRONG])
    def test_value_bound_and_remedy(
        self, words: str, message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(InvalidInputError) as wrong:
            run(parsed(words))
        assert str(wrong.value).startswith(message)
        assert wrong.value.bound
        assert wrong.value.remedy
        assert capsys.readouterr().out == ""

    def test_the_remedy_for_too_many_logs_is_one(self) -> None:
        with pytest.raises(InvalidInputError) as wrong:
            scenario("--log-every 0.001 --units 1000 --batch-seconds 100")
        remedy = re.match(r"pass (--log-every \d+)", wrong.value.remedy)
        assert remedy is not None
        scenario(f"{remedy[1]} --units 1000 --batch-seconds 100")

    def test_a_file_that_cannot_be_written_is_told_before_anything_runs(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(InvalidInputError, match="json must be a file that can be written"):
            run(parsed(f"--json {shlex.quote(str(tmp_path / 'absent' / 'a.json'))}"))
        assert capsys.readouterr().out == ""


class TestProgress:
    def claim(self, mailbox: MemoryMailbox, first: int) -> None:
        for number in range(first, first + STRIDE):
            mailbox.put_if_absent(f"units/{number:06d}-0.json", b"{}")

    def test_it_begins_when_it_has_lasted_a_while(self) -> None:
        written, now = io.StringIO(), [0.0]
        console = Console(file=written, force_terminal=True, width=100)
        with watched(console, 1000, clock=lambda: now[0]) as mailbox:
            self.claim(mailbox, 0)
            assert written.getvalue() == ""
            now[0] = PATIENCE
            self.claim(mailbox, STRIDE)
        assert f"{2 * STRIDE}/1000 units" in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", written.getvalue())

    def test_logs_too_show_that_it_lives(self) -> None:
        written, now = io.StringIO(), [0.0]
        with watched(Console(file=written, force_terminal=True), 1000, clock=lambda: now[0]) as mailbox:
            now[0] = PATIENCE
            for _ in range(STRIDE):
                mailbox.put("learners/a~1/main.000000", b"{}")
        assert "simulating" in written.getvalue()

    def test_not_in_a_pipe(self) -> None:
        with watched(Console(file=io.StringIO()), 10) as mailbox:
            assert type(mailbox) is MemoryMailbox


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0 s"), (71.26, "71.3 s"), (1200, "20.0 min"), (18720, "5 h 12 min"), (615600, "7 d 3 h")],
)
def test_times_as_people_write_them(seconds: float, text: str) -> None:
    assert seconds_shown(seconds) == text


def test_as_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *EXAMPLE.split()]) == 0
    assert "exactly once" in capsys.readouterr().out
    assert main(["simulate", "--slow", "E@5=1"]) == 2
    assert capsys.readouterr().err.startswith("shardqueue: slow='E@5=1': slow must be of a node from A to D")


def test_it_explains_its_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "--help"])
    out = capsys.readouterr().out
    assert "exit code" in out
    assert max(map(len, out.splitlines())) <= 80


def test_in_a_pipe_it_is_plain_text_and_imports_no_torch() -> None:
    code = """
import argparse, sys
from shardqueue.simulate.command import add_arguments, run
before = {"rich", "fsspec", "torch", "lightning"} & set(sys.modules)
parser = argparse.ArgumentParser()
add_arguments(parser)
code = run(parser.parse_args(["--units", "24", "--batch-seconds", "1"]))
print(before, code, "torch" in sys.modules)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stderr == ""
    assert ended.stdout.splitlines()[-1] == "set() 0 False"
    assert "\x1b" not in ended.stdout
    assert "exactly once" in ended.stdout
