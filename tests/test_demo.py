"""The demo: its arithmetic on paper and on written documents, its pictures in text, and real processes."""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from rich.console import Console

from shardqueue.demo import arithmetic, command, live, node, picture, report
from shardqueue.demo.document import Document, Record, computed, encode, ratios, verdict
from shardqueue.demo.elastic import document as elastic
from shardqueue.demo.elastic import options as elastic_options
from shardqueue.demo.elastic import report as elastic_report
from shardqueue.demo.fleet import Fleet, NodeFailedError
from shardqueue.demo.model import Replica, learning_rate
from shardqueue.demo.node import Shared
from shardqueue.demo.options import FULL, QUICK, Options, labels, mixed, read_speeds, shown_speed
from shardqueue.demo.stage import run
from shardqueue.demo.text import HELD_OUT_EVERY, loader, read_corpus, rows_of, windows
from shardqueue.errors import InvalidInputError, MailboxError, ShardQueueError
from shardqueue.simulate import Node
from shardqueue.timeline import strips
from shardqueue.units import Unit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from conftest import S3Server

TINY = Options(steps=6, unit_steps=2, speeds=(1.0, 0.5), batch_seconds=0.01, sequences=2, context=16)


def record(node: str, unit: str, index: int, step: int, start: float, end: float) -> Record:
    pid = {"A": 11, "B": 12}[node]
    return {"pid": pid, "node": node, "unit": unit, "index": index, "step": step, "start": start, "end": end}


def document() -> Document:
    """Two nodes, A twice as fast as B; two units of two batches; one second a batch at speed 1."""
    fixed = [
        record("A", "u0", 0, 0, 0.0, 1.0),
        record("A", "u0", 1, 1, 1.0, 2.0),
        record("B", "u1", 0, 0, 0.0, 2.0),
        record("B", "u1", 1, 1, 2.0, 4.0),
    ]
    shared = [
        record("A", "u0", 0, 0, 0.0, 1.0),
        record("A", "u0", 1, 1, 1.0, 2.2),
        record("B", "u1", 0, 0, 0.0, 2.0),
        record("A", "u1", 1, 1, 2.2, 3.0),
    ]
    return {
        "format": "shardqueue-demo/1",
        "arguments": {},
        "machine": {},
        "batch_seconds": 1.0,
        "speeds": {"A": 1.0, "B": 0.5},
        "slowdown": None,
        "mailbox": None,
        "units": {
            "u0": {"first": 0, "count": 2, "lane": 0, "lanes": 2},
            "u1": {"first": 0, "count": 2, "lane": 1, "lanes": 2},
        },
        "loss_before": 5.5,
        "phases": [
            {"name": "fixed split", "loss": 3.0, "batches": fixed},
            {"name": "shared queue", "loss": 3.1, "batches": shared},
        ],
    }


def test_ratios_come_from_the_records() -> None:
    fixed, shared = ratios(document())
    assert (fixed.makespan, shared.makespan) == (4.0, 3.0)
    assert fixed.limit == shared.limit == pytest.approx(4 / 1.5)
    assert fixed.ratio == pytest.approx(1.5)
    assert [(s.node, s.units, s.batches, s.busy, s.idle) for s in fixed.shares] == [
        ("A", 1, 2, 2.0, 2.0),
        ("B", 1, 2, 4.0, 0.0),
    ]
    assert [(s.units, s.batches) for s in shared.shares] == [(2, 3), (1, 1)]
    assert (fixed.overran, shared.overran) == (0, 1)
    assert (fixed.above, fixed.below) == pytest.approx((1.5 * 0.85, 1.5 * 1.25))
    assert fixed.faults == shared.faults == ()


def test_a_missing_a_doubled_and_an_unknown_batch_are_found() -> None:
    written = document()
    batches = written["phases"][1]["batches"]
    batches[3] = batches[2]
    batches.append(record("B", "u9", 0, 0, 0.0, 1.0))
    _, shared = ratios(written)
    assert shared.faults == (
        "1 of 4 batches not trained, the first of them batch 1 of u1",
        "1 of 4 batches trained more than once, the first of them batch 0 of u1",
        "1 of 4 batches not in the plan, the first of them batch 0 of u9",
    )
    assert verdict(ratios(written))[0].startswith("shared queue: 1 of 4 batches not trained")


def test_a_batch_under_the_wrong_step_is_not_the_batch() -> None:
    written = document()
    written["phases"][0]["batches"][1]["step"] = 0
    fixed, _ = ratios(written)
    assert [fault.split(",")[0] for fault in fixed.faults] == [
        "1 of 4 batches not trained",
        "1 of 4 batches not in the plan",
    ]


def test_two_nodes_in_one_process_are_found() -> None:
    written = document()
    for entry in written["phases"][0]["batches"]:
        entry["pid"] = 11
    assert ratios(written)[0].faults == ("one process trained as two nodes",)


def test_a_phase_without_records_is_a_fault_and_no_crash() -> None:
    written = document()
    written["phases"][1]["batches"] = []
    _, shared = ratios(written)
    assert (shared.makespan, shared.ratio, len(shared.faults)) == (0.0, 0.0, 1)


def test_a_slowdown_changes_the_limit_the_paper_and_the_pace() -> None:
    written = document()
    written["slowdown"] = {"node": "A", "at": 1.5, "speed": 0.25}
    # 2.25 of the 4 batches are done by 1.5 s; the rest takes 1.75 / 0.75 s.
    paper = computed(written)
    assert paper.limit == pytest.approx(1.5 + 1.75 / 0.75)
    assert paper.equal_split == pytest.approx(
        4.0
    )  # B, while A has trained 1.5 of its 2 by 1.5 s and ends at 3.5 s
    assert paper.early_split == pytest.approx(1.5 + (8 / 3 - 1.5) / 0.25)
    fixed, shared = ratios(written)
    assert fixed.limit == shared.limit == paper.limit
    # In both phases A's batches after 1.5 s take less than 4 s: none overran, not even the one of 1.2 s.
    assert (fixed.overran, shared.overran) == (0, 0)


def stretched(fixed: float, shared: float) -> Document:
    """Return a document of 80 batches whose two phases have these ratios; 1.5 is an equal split's."""
    written = document()
    written["units"] = {f"u{lane}": {"first": 0, "count": 40, "lane": lane, "lanes": 2} for lane in range(2)}
    for phase, ratio in zip(written["phases"], (fixed, shared), strict=True):
        phase["batches"] = [
            record(name, f"u{lane}", step, step, step, step + 1.0)
            for lane, name in enumerate("AB")
            for step in range(40)
        ]
        phase["batches"][-1]["end"] = ratio * 80 / 1.5
    return written


@pytest.mark.parametrize(
    ("fixed", "shared", "wrong"),
    [
        (1.5, 1.04, []),
        (1.28, 1.149, []),
        (1.27, 1.04, ["fixed split: 1.27 times the limit, not above 1.275."]),
        (1.88, 1.04, ["fixed split: 1.88 times the limit, not below 1.875."]),
        (1.5, 1.16, ["shared queue: 1.16 times the limit, not below 1.15."]),
        (1.2, 1.5, ["fixed split: 1.20", "shared queue: 1.50"]),
    ],
)
def test_verdict(fixed: float, shared: float, wrong: list[str]) -> None:
    found = verdict(ratios(stretched(fixed, shared)))
    assert len(found) == len(wrong)
    for reason, begins in zip(found, wrong, strict=True):
        assert reason.startswith(begins)
        assert "busy" in reason


def test_the_bounds_allow_for_one_long_batch_and_for_equal_speeds() -> None:
    written = document()
    _, shared = ratios(written)
    assert shared.below == pytest.approx(1.05 + 2 * 2 / (4 / 1.5))  # B's batch of 2 s
    written["slowdown"] = {"node": "B", "at": 100.0, "speed": 0.25}
    assert ratios(written)[1].below == pytest.approx(1.05 + 2 * 4 / (4 / 1.5))
    written = stretched(1.0, 1.0)
    written["speeds"] = {"A": 1.0, "B": 1.0}
    for phase in written["phases"]:
        phase["batches"][-1]["end"] = 40.0
    assert [outcome.ratio for outcome in ratios(written)] == [1.0, 1.0]
    assert verdict(ratios(written)) == []


def test_the_file_reads_back_and_has_one_batch_a_line() -> None:
    written = document()
    text = encode(written, [1], {"limit": 2})
    assert json.loads(text) == {**written, "results": [1], "computed": {"limit": 2}}
    assert sum('"pid"' in line for line in text.splitlines()) == 8


# -- speeds --------------------------------------------------------------------------------------------------


def test_limit_and_splits_of_speeds_that_change() -> None:
    nodes = [Node(2.0, changes=((3.0, 0.5),)), Node(1.0)]  # 9 of the work are done by 3 s
    assert arithmetic.limit(nodes, 6) == pytest.approx(2.0)
    assert arithmetic.limit(nodes, 9) == pytest.approx(3.0)
    assert arithmetic.limit(nodes, 12) == pytest.approx(3 + 3 / 1.5)
    assert arithmetic.equal_split(nodes, 12) == pytest.approx(6.0)  # the second: 6 at 1
    assert arithmetic.early_split(nodes, 12) == pytest.approx(3 + 2 / 0.5)  # the first: 8, of which 6 by 3 s
    assert arithmetic.slowest(nodes) == 0.5


@pytest.mark.parametrize("options", [FULL, QUICK])
def test_the_demos_own_mix_on_paper(options: Options) -> None:
    usual, slows = mixed(options, options.speeds), mixed(options, options.speeds, slows=True)
    assert usual == options
    assert usual.equal_split / usual.limit == pytest.approx(2.25)
    assert slows.slowdown == {"node": "A", "at": pytest.approx(usual.limit / 2), "speed": 0.25}
    assert slows.limit == pytest.approx(1.25 * usual.limit)
    assert slows.equal_split == pytest.approx(2.25 * usual.limit)
    early = arithmetic.early_split(slows.paces.values(), slows.work)
    assert early / slows.limit == pytest.approx(2.0)


def test_another_mix_takes_the_same_time_and_no_more_computing() -> None:
    three = mixed(QUICK, (4.0, 2.0, 2.0))
    assert three.nodes == ("A", "B", "C")
    assert three.batch_seconds == pytest.approx(4 * 0.0375), "the fastest is as fast as the usual one"
    assert three.steps == 66  # 8 / 0.15 batches a second, for the 3.73 s that QUICK takes
    assert three.limit == pytest.approx(QUICK.limit, rel=0.02)
    assert three.equal_split == pytest.approx(66 * 0.15 / 2)
    assert three.slowdown is None
    unequal = mixed(QUICK, (4.0, 4.0, 2.0, 2.0, 1.0, 1.0, 0.5, 0.5))
    assert unequal.unit_steps == 2, "a unit of 8 would take the slowest node longer than all it has"
    many = mixed(QUICK, (1.0,) * 26)
    assert many.batch_seconds == pytest.approx(26 / 60), "all together are as fast as the usual ones"
    assert many.steps == 224 // 26
    slows = mixed(QUICK, (0.5, 1.0, 1.0), slows=True).slowdown
    assert slows is not None
    assert (slows["node"], slows["speed"]) == ("B", 0.25), "the first of the fastest"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "nodes=''"),
        ("1,,1", "nodes=''"),
        ("1,x", "nodes='x'"),
        ("1/0", "nodes='1/0'"),
        ("1,0", "nodes=0.0"),
        ("1,-0.5", "nodes=-0.5"),
        ("nan", "nodes=nan"),
        ("1,inf", "nodes=inf"),
        ("1e300,1e300", "nodes=1e\\+300"),
        ("1,0.001", "none is over 100 times another"),
        (",".join(["1"] * 27), "1 to 26 speeds"),
    ],
)
def test_bad_speeds_are_refused_with_value_bound_and_remedy(text: str, said: str) -> None:
    with pytest.raises(InvalidInputError, match=said) as caught:
        mixed(QUICK, read_speeds(text))
    assert "must be" in str(caught.value)
    assert caught.value.remedy


def test_speeds_are_read_and_shown_as_people_write_them() -> None:
    assert read_speeds("1, 0.5,1/4") == (1.0, 0.5, 0.25)
    shown = [shown_speed(speed) for speed in (1, 2.0, 0.5, 1 / 3, 0.75, 0.01, 1.5)]
    assert shown == ["1", "2", "1/2", "1/3", "0.75", "0.01", "1.5"]
    slowdown: arithmetic.Slowdown = {"node": "A", "at": 1.0, "speed": 0.25}
    assert labels({"A": 1.0, "B": 0.5}, slowdown) == {"A": "A 1 -> 1/4", "B": "B 1/2     "}


# -- what is seen --------------------------------------------------------------------------------------------


def test_a_cell_is_the_fraction_of_its_time_that_was_busy() -> None:
    scale = strips.Scale(seconds=8.0, cells=4)
    assert strips.busy([], scale) == [0.0] * 4
    assert strips.busy([(0.0, 2.0), (3.0, 4.5)], scale) == [1.0, 0.5, 0.25, 0.0]
    assert strips.busy([(1.5, 2.5), (2.5, 8.0)], scale) == [0.25, 1.0, 1.0, 1.0]
    assert strips.busy([(7.0, 9.0)], scale) == [0.0, 0.0, 0.0, 0.5], "what is past the scale is not seen"


def test_a_row_ends_with_its_phase_and_shades_its_cells() -> None:
    scale = strips.Scale(seconds=8.0, cells=4)
    spans = [(0.0, 2.0), (3.0, 4.5)]
    assert strips.row(spans, 8.0, scale, strips.BLOCKS) == "█▒░·"
    assert strips.row(spans, 4.5, scale, strips.BLOCKS) == "█▒░"
    assert strips.row(spans, 8.0, scale, strips.ASCII) == "#+-."
    shades = [strips.ASCII.shade(fraction) for fraction in (0.0, 0.12, 0.13, 0.5, 0.87, 0.88, 1.0)]
    assert "".join(shades) == "..-+*##"


def test_a_line_across_the_rows_takes_no_cell_away() -> None:
    scale = strips.Scale(seconds=8.0, cells=4)
    assert [scale.border(moment) for moment in (0.0, 0.9, 1.1, 3.1, 8.0, 99.0)] == [0, 0, 1, 2, 4, 4]
    assert strips.crossed("█▒░·", 2, "│") == "█▒│░·"
    assert strips.crossed("█", 3, "│") == "█  │"


def test_labels_end_at_their_columns_or_begin_there_or_are_left_out() -> None:
    limit, start = strips.Label(9, "limit ┘", "└ limit"), strips.Label(0, "0", "0")
    assert strips.axis([limit, start, strips.Label(19, "8 s", "")], 20) == "0  limit ┘       8 s"
    early = strips.Label(3, "limit ┘", "└ limit")
    assert strips.axis([early, start, strips.Label(11, "8 s", "")], 12) == "0  └ limit"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "no-such-encoding"])
def test_an_encoding_without_blocks_gets_ascii(encoding: str) -> None:
    assert strips.glyphs(encoding) is strips.ASCII
    assert strips.glyphs("utf-8") is strips.BLOCKS


def shown(written: Document, encoding: str = "utf-8", width: int = 80) -> str:
    """Return the report in a pipe of this encoding; what cannot be encoded raises."""
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict")
    outcomes = ratios(written)
    report.show(Console(file=out, width=width), written, outcomes, computed(written), verdict(outcomes))
    out.flush()
    assert isinstance(out.buffer, io.BytesIO)
    return out.buffer.getvalue().decode(encoding)


def test_the_result_is_one_screen_of_80_columns_and_plain_in_a_pipe() -> None:
    text = shown(stretched(1.5, 1.04))
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert len(text.splitlines()) <= 24
    assert "Not as it should be" not in text
    assert "Not as it should be: fixed split: 1.20" in shown(stretched(1.2, 1.04))


def test_the_timeline_shows_both_phases_on_one_scale_with_the_limit() -> None:
    lines = shown(document(), width=48).splitlines()  # 7 for the names, 1 for the limit: 40 cells for 4 s
    fixed = lines.index("fixed split: 4.00 s, 1.50 times the limit")
    assert lines[fixed + 1 : fixed + 3] == [
        " A 1   " + "█" * 20 + "·" * 7 + "│" + "·" * 13,
        " B 1/2 " + "█" * 27 + "│" + "█" * 13,
    ]
    assert lines[fixed + 3] == "shared queue: 3.00 s, 1.12 times the limit"
    assert lines[fixed + 4 : fixed + 6] == [
        " A 1   " + "█" * 27 + "│" + "█" * 3,
        " B 1/2 " + "█" * 20 + "·" * 7 + "│" + "·" * 3,
    ]
    assert lines[fixed + 6] == "       0             limit 2.67 s ┘       4.00 s"


def test_the_result_can_be_written_in_ascii() -> None:
    text = shown(document(), encoding="ascii")
    assert " A 1   ####" in text
    assert "limit 2.67 s '" in text


def test_a_slowdown_is_shown_and_what_early_speeds_would_have_cost_is_called_computed() -> None:
    written = document()
    written["slowdown"] = {"node": "A", "at": 1.5, "speed": 0.25}
    text = " ".join(shown(written).split())
    assert "A 1 -> 1/4" in text
    assert "A slows ^" in text
    # 1.5 + 3.5 / 1.5 * 2, over 1.5 + 1.75 / 0.75
    assert "A split by the early speeds would have cost 1.61 times the limit (computed, not run)" in text


def test_long_batches_are_told() -> None:
    # B's batch of 2 s is three quarters of the limit.
    assert "the queue may come to 2.55 times the limit" in shown(document())
    assert "long here" not in shown(stretched(1.5, 1.04))


def test_the_live_view_fits_80_columns_and_says_who_waits() -> None:
    slows = mixed(QUICK, QUICK.speeds, slows=True)
    text = live.view(slows, "fixed split", [56, 28, 0, 5], 80, strips.BLOCKS).plain.splitlines()
    assert text[0] == "fixed split: 89 of 224 batches, about 9 s"
    assert all(len(line) <= 80 for line in text)
    assert text[1].startswith("A 1 -> 1/4 ██████")
    assert text[1].endswith("█ 56 of 56, waits")
    assert text[2].count("█") == text[2].count("·")
    assert text[3].endswith("· 0 of 56")
    text = live.view(slows, "shared queue", [56, 28, 28, 999], 80, strips.ASCII).plain.splitlines()
    assert text[0] == "shared queue: 1111 of 224 batches, about 5 s"
    assert all(len(line) <= 80 for line in text)
    assert text[2].count("#") == text[3].count("#") > 0
    assert "waits" not in "".join(text)


def test_elsewhere_a_line_comes_every_few_seconds() -> None:
    now, out = [100.0], io.StringIO()
    done = torch.zeros(4, dtype=torch.int64)
    lines = live.Lines(Console(file=out, width=20), QUICK, done, clock=lambda: now[0])
    lines.starts("fixed split")
    lines.tick()
    now[0] += live.LINE_EVERY
    lines.tick()
    done += torch.tensor([40, 24, 22, 10])
    lines.tick()
    now[0] += live.LINE_EVERY
    lines.tick()
    lines.tick()
    lines.ends(8.126)
    assert out.getvalue().splitlines() == [
        "fixed split: 224 batches, about 9 s",
        "fixed split: getting ready",
        "fixed split: 96 of 224 batches, A 40 B 24 C 22 D 10",
        "fixed split: done in 8.13 s",
    ]


def test_bars_are_for_terminals_and_leave_nothing_behind() -> None:
    out, done = io.StringIO(), torch.tensor([3, 2])
    terminal = Console(file=out, width=80, force_terminal=True, force_interactive=True, color_system=None)
    with live.progress(terminal, TINY, done) as seen:
        seen.starts("fixed split")
        seen.tick()
    assert "5 of 12 batches" in out.getvalue()
    assert out.getvalue().endswith("\x1b[2K"), "the last line is erased"
    piped = io.StringIO()
    with live.progress(Console(file=piped), TINY, done) as seen:
        seen.starts("fixed split")
    assert piped.getvalue() == "fixed split: 12 batches, about 1 s\n"


def test_the_picture_has_both_phases(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    written = document()
    written["slowdown"] = {"node": "A", "at": 1.5, "speed": 0.25}
    picture.draw(written, ratios(written), computed(written), tmp_path / "demo.png")
    pixels = torch.tensor(imread(tmp_path / "demo.png"))[..., :3]
    area = {}
    for phase, tints in picture.TINTS.items():
        near = [(pixels - torch.tensor(to_rgb(tint))).abs().amax(dim=-1) < 0.01 for tint in tints]
        area[phase] = sum(int(found.sum()) for found in near)
    # 6 s were trained in the fixed split, 5 s in the shared queue.
    assert area["shared queue"] / area["fixed split"] == pytest.approx(5 / 6, abs=0.02)


def test_without_matplotlib_a_picture_that_was_asked_for_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(picture, "can_draw", lambda: False)
    with pytest.raises(InvalidInputError, match=r"shardqueue\[plots\]"):
        run(TINY, tmp_path / "demo.json", png=tmp_path / "demo.png")
    assert list(tmp_path.iterdir()) == []


# -- what is trained -----------------------------------------------------------------------------------------


def test_the_real_plans_have_equal_slices() -> None:
    for options in (FULL, QUICK):
        units = options.plan()
        nodes = len(options.speeds)
        slices = [sum(units[name].count for name in list(units)[node::nodes]) for node in range(nodes)]
        assert slices == [options.steps] * nodes


def test_the_corpus_is_the_sources_of_a_folder_with_every_sixteenth_held_out(tmp_path: Path) -> None:
    for number in range(2 * HELD_OUT_EVERY):
        (tmp_path / f"m{number:02}.py").write_bytes(b"%02d" % number)
    (tmp_path / "notes.txt").write_bytes(b"xx")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "m.py").write_bytes(b"yy")
    corpus = read_corpus(tmp_path, least=4)
    assert bytes(corpus.held_out.tolist()) == b"1531"
    assert bytes(corpus.train.tolist()).startswith(b"000102")
    assert len(corpus.train) == 60


def test_a_folder_without_sources_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(ShardQueueError, match="hold 0 bytes"):
        read_corpus(tmp_path)


def test_the_standard_library_is_enough() -> None:
    corpus = read_corpus()
    assert len(corpus.train) > 1_000_000
    assert len(corpus.held_out) > 50_000


def test_a_unit_loads_the_same_batches_wherever_and_however_it_is_cut() -> None:
    text = torch.arange(5000).remainder(256).to(torch.uint8)
    load = loader(text, sequences=2, context=8)
    whole = {step: rows_of(batch, 8) for step, batch in load(Unit(first=3, count=4, lane=1, lanes=4))}
    assert list(whole) == [3, 4, 5, 6]
    (step, packed), *_ = load(Unit(first=5, count=1, lane=1, lanes=4))
    batch = rows_of(packed, 8)
    assert batch.shape == (2, 9)
    assert batch.dtype == torch.int64
    assert torch.equal(batch, whole[step])
    assert torch.equal(batch, windows(text, [42, 43], 9))
    other = dict(load(Unit(first=5, count=1, lane=2, lanes=4)))
    assert packed != other[5]


def test_windows_stay_inside_the_text() -> None:
    text = torch.arange(20).to(torch.uint8)
    drawn = windows(text, range(100), 16)
    assert {tuple(row.tolist()) for row in drawn} == {tuple(range(at, at + 16)) for at in range(5)}


def test_the_learning_rate_rises_then_falls() -> None:
    rates = [learning_rate(step, 100) for step in range(100)]
    peak = rates.index(max(rates))
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert 0 < rates[-1] < rates[0] < rates[peak]


def test_updates_through_shared_parameters_lower_the_loss_and_spare_the_random_state() -> None:
    before = torch.random.get_rng_state()
    nodes = [Replica(16), Replica(16)]
    assert torch.equal(before, torch.random.get_rng_state())
    batch = windows(read_corpus().train, range(8), 17)
    shared = nodes[0].values.clone()
    first = nodes[0].loss(batch)
    for turn in range(20):
        replica = nodes[turn % 2]
        replica.copy_in(shared)
        replica.compute(batch)
        replica.add_out(shared, 0.2)
    nodes[0].copy_in(shared)
    assert nodes[0].loss(batch) < first - 1


def shared_tensors(options: Options) -> Shared:
    tensors = (
        Replica(options.context).values,
        torch.zeros(500, dtype=torch.uint8),
        torch.zeros(len(options.speeds), dtype=torch.int64),
    )
    return Shared(*(tensor.share_memory_() for tensor in tensors))  # type: ignore[no-untyped-call]


def check(written: Document) -> None:
    """Each phase of TINY trained each batch once, in processes of their own, no faster than paced."""
    nodes = arithmetic.paces(written["speeds"], written["slowdown"])
    for phase, outcome in zip(written["phases"], ratios(written), strict=True):
        assert outcome.faults == ()
        assert sum(share.batches for share in outcome.shares) == 12
        assert os.getpid() not in {entry["pid"] for entry in phase["batches"]}
        for entry in phase["batches"]:
            paced = nodes[entry["node"]].finish(entry["start"], written["batch_seconds"])
            assert 0 <= entry["start"] < paced <= entry["end"] + 1e-5
        assert phase["loss"] < written["loss_before"]


def test_two_real_processes_train_each_batch_once_in_both_phases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    out = io.StringIO()
    run(TINY, tmp_path / "demo.json", Console(file=out, width=80))
    assert capsys.readouterr().err == ""
    pictures = ["demo.png"] if picture.can_draw() else []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo.json", *pictures]

    written = json.loads((tmp_path / "demo.json").read_text())
    check(written)
    assert written["slowdown"] is written["mailbox"] is None
    assert [result["ratio"] for result in written["results"]] == [
        outcome.ratio for outcome in ratios(written)
    ]
    assert written["computed"]["limit"] == pytest.approx(12 * 0.01 / 1.5)
    assert "fixed split: done in" in out.getvalue()


@pytest.mark.full
def test_a_node_slows_down_and_a_folder_serves_any_number_of_demos(tmp_path: Path) -> None:
    slows = replace(TINY, slows=True, batch_seconds=0.02)
    for number in (1, 2):
        out = io.StringIO()
        run(slows, tmp_path / "demo.json", Console(file=out, width=80), mailbox=str(tmp_path / "box"))
        written = json.loads((tmp_path / "demo.json").read_text())
        check(written)
        assert written["slowdown"] == {"node": "A", "at": pytest.approx(0.08), "speed": 0.25}
        prefixes = list((tmp_path / "box").iterdir())
        assert len(prefixes) == number
        assert Path(written["mailbox"]) in prefixes
        assert written["mailbox"] in out.getvalue()
        assert any(path.is_file() for path in Path(written["mailbox"]).rglob("*"))


@pytest.mark.s3
def test_the_queue_runs_on_a_bucket_with_credentials_from_the_environment_and_without_matplotlib(
    tmp_path: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(picture, "can_draw", lambda: False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "writerkey")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testsecret")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.endpoint)
    out = io.StringIO()
    run(TINY, tmp_path / "demo.json", Console(file=out, width=80), mailbox="s3://shardqueue/demos/")
    text = (tmp_path / "demo.json").read_text()
    check(json.loads(text))
    assert "s3://shardqueue/demos/demo-" in out.getvalue()
    assert "picture" not in out.getvalue()
    assert [path.name for path in tmp_path.iterdir()] == ["demo.json"]
    for secret in ("writerkey", "testsecret"):
        assert secret not in out.getvalue() + text


@pytest.mark.parametrize("mailbox", ["memory://demo", "Memory:x", " ", ""])
def test_a_mailbox_that_processes_cannot_share_is_refused(tmp_path: Path, mailbox: str) -> None:
    with pytest.raises(InvalidInputError, match="the nodes are processes"):
        run(TINY, tmp_path / "demo.json", mailbox=mailbox)


def test_a_mailbox_is_tried_before_anything_runs_and_credentials_in_it_are_not_repeated(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MailboxError, match="file"):
        run(TINY, tmp_path / "demo.json", mailbox=str(tmp_path / "file"))
    with pytest.raises(InvalidInputError, match="names a bucket"):
        run(TINY, tmp_path / "demo.json", mailbox="s3://")
    with pytest.raises(InvalidInputError, match="free of credentials") as caught:
        run(TINY, tmp_path / "demo.json", mailbox="s3://key:hidden@bucket/demos")
    assert "hidden" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_a_slice_is_read_in_another_process() -> None:
    def load(unit: Unit) -> Iterator[tuple[int, bytes]]:
        for step in range(unit.first, unit.first + unit.count):
            yield step, f"{os.getpid()} {unit.lane}".encode()

    units = TINY.plan()
    names = list(units)[1::2]
    read = list(node.reader(node.Slice(units, names, load)))
    assert [name for name, index, *_ in read if index == 0] == names
    assert [step for _, _, step, _ in read] == list(range(6))
    said = {tuple(map(int, batch.split())) for *_, batch in read}
    assert {lane for _, lane in said} == {1}
    assert {pid for pid, _ in said}.isdisjoint({os.getpid()})


def test_a_node_that_fails_ends_the_demo_with_its_traceback(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    impossible = Options(steps=2, unit_steps=1, speeds=(1.0, 0.5), sequences=-1)
    out = io.StringIO()
    assert run(impossible, tmp_path / "demo.json", Console(file=out)) == 1
    errors = capfd.readouterr().err
    assert re.search("node [AB] failed", errors)
    assert errors.count("Traceback") == 1
    assert "RuntimeError" in errors
    assert list(tmp_path.iterdir()) == []


def test_a_killed_node_ends_the_phase_and_no_process_stays() -> None:
    slow = Options(steps=10_000, unit_steps=1, speeds=(1.0, 1.0), batch_seconds=0.1)
    shared = shared_tensors(slow)

    workers: set[int] = set()
    others = set(multiprocessing.active_children())

    def kill_one() -> None:
        if shared.done.sum():
            nodes = [child for child in multiprocessing.active_children() if child not in others]
            workers.update(*(children(process.pid) for process in nodes))
            nodes[0].kill()

    with (
        pytest.raises(NodeFailedError, match=r"node [AB] ended with exit code -9"),
        Fleet(slow, shared) as fleet,
    ):
        fleet.run("fixed split", "", kill_one)
    assert set(multiprocessing.active_children()) <= others
    assert len(workers) == 2
    for _ in range(600):
        if not any(runs(worker) for worker in workers):
            return
        time.sleep(0.1)
    pytest.fail("a worker outlived its node")


def runs(pid: int) -> bool:
    try:
        return state_and_parent(Path(f"/proc/{pid}/stat"))[0] not in "ZX"
    except OSError:
        return False


def children(pid: int | None) -> set[int]:
    """Return the pids of a process's children."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if state_and_parent(entry)[1] == pid:
                found.add(int(entry.parent.name))
    return found


def state_and_parent(stat: Path) -> tuple[str, int]:
    state, parent = stat.read_text().rpartition(")")[2].split()[:2]
    return state, int(parent)


ORPHANS = """
import os, signal
from shardqueue.demo.fleet import Fleet
from shardqueue.demo.options import Options
from test_demo import shared_tensors

slow = Options(steps=10_000, unit_steps=1, speeds=(1.0,), batch_seconds=0.1)
shared = shared_tensors(slow)

def die():
    if shared.done.sum():
        os.kill(os.getpid(), signal.SIGKILL)

with Fleet(slow, shared) as fleet:
    fleet.run("fixed split", "", die)
"""


def test_nodes_go_when_the_process_that_started_them_is_killed() -> None:
    # The nodes hold the ends of these pipes too: `run` returns once they are gone.
    command, here = [sys.executable, "-c", ORPHANS], Path(__file__).parent
    ended = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGKILL, "", "")


def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path) -> None:
    for file in (tmp_path, tmp_path / "absent" / "demo.json"):
        with pytest.raises(InvalidInputError, match=r"json.*can be written"):
            run(TINY, file)


def test_a_picture_that_cannot_be_written_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(picture, "can_draw", lambda: True)
    with pytest.raises(InvalidInputError, match=r"png.*can be written"):
        run(TINY, tmp_path / "demo.json", png=tmp_path)
    with pytest.raises(InvalidInputError, match="another file than the JSON"):
        run(TINY, tmp_path / "demo.png")


# -- elastic steps -------------------------------------------------------------------------------------------


def micro_batch(node: str, step: int, row: int, loss: float, start: float, end: float) -> elastic.MicroBatch:
    pid = {"A": 11, "B": 12}[node]
    rows = [2 * row, 2 * row + 1]
    return {
        "pid": pid,
        "node": node,
        "step": step,
        "rows": rows,
        "loss": loss,
        "start": start,
        "end": end,
    }


def elastic_document() -> elastic.Document:
    """Two ranks, A three times as fast as B; three steps of four micro-batches of two rows; 1 s each at speed 1.

    In DDP each rank has two of a step, which takes 6 s; in elastic steps A has three and B one, in 3 s.
    """
    phases: list[elastic.PhaseEntry] = []
    for name, split, seconds in (("DDP", (2, 2), 6.0), ("elastic steps", (3, 1), 3.0)):
        ranks: dict[str, elastic.Part] = {}
        rows = iter(range(12))
        for rank, count, each in zip("AB", split, (1.0, 3.0), strict=True):
            batches = [
                micro_batch(
                    *(rank, step, next(rows), 2.0 - 0.5 * step + (0.1 if index else -0.1)),
                    *(seconds * step + each * index, seconds * step + each * (index + 1)),
                )
                for step in range(3)
                for index in range(count)
            ]
            ends = [seconds * (step + 1) for step in range(3)]
            ranks[rank] = {"ends": ends, "digest": "d1", "batches": batches}
        phases.append({"name": name, "ranks": ranks})
    return {
        "format": "shardqueue-demo-elastic/1",
        "arguments": {},
        "machine": {},
        "batch_seconds": 1.0,
        "speeds": {"A": 1.0, "B": 1 / 3},
        "steps": 3,
        "micro_batches": 4,
        "rows": 24,
        "phases": phases,
    }


def wrong_with(document: elastic.Document) -> list[str]:
    return elastic.verdict(elastic.outcomes(document), elastic.computed(document))


def test_what_elastic_steps_come_to_on_paper() -> None:
    for options in (elastic_options.FULL, elastic_options.QUICK):
        assert options.split("DDP") == (9, 9, 9, 9)
        assert options.split("elastic steps") == (16, 8, 8, 4)
        assert options.seconds("DDP") / options.seconds("elastic steps") == pytest.approx(2.25)
        assert options.rows == options.steps * 36 * options.batch_size
    paper = elastic.computed(elastic_document())
    assert paper.split == (3, 1)
    assert (paper.equal, paper.best, paper.limit) == pytest.approx((6.0, 3.0, 2.0))


def test_outcomes_of_elastic_steps_come_from_the_records() -> None:
    written = elastic_document()
    plain, shared = elastic.outcomes(written)
    assert (plain.seconds, shared.seconds) == (18.0, 9.0)
    assert (plain.step, shared.step) == (6.0, 3.0)
    assert (plain.samples_per_second, shared.samples_per_second) == pytest.approx((24 / 18, 24 / 9))
    assert elastic.speed_up([plain, shared]) == 2.0
    assert [(share.node, share.a_step, share.busy, share.idle) for share in plain.shares] == [
        ("A", 2.0, 6.0, 12.0),
        ("B", 2.0, 18.0, 0.0),
    ]
    assert [(share.a_step, share.idle) for share in shared.shares] == [(3.0, 0.0), (1.0, 0.0)]
    assert plain.losses == pytest.approx([2.0, 1.5, 1.0])
    assert plain.loss == pytest.approx(1.0)
    assert plain.error == pytest.approx((0.04 / 3 / 4) ** 0.5), "four losses, 0.1 from their mean"
    assert plain.faults == shared.faults == ()
    assert wrong_with(written) == []


def part(document: elastic.Document) -> elastic.Part:
    """What A did in elastic steps."""
    return document["phases"][1]["ranks"]["A"]


def spoil_rows(document: elastic.Document) -> None:
    part(document)["batches"][0]["rows"] = [2, 99]


def spoil_steps(document: elastic.Document) -> None:
    part(document)["batches"][0]["step"] = 1


def spoil_step_numbers(document: elastic.Document) -> None:
    part(document)["batches"][0]["step"] = 3


def spoil_ends(document: elastic.Document) -> None:
    part(document)["ends"].pop()


def spoil_replicas(document: elastic.Document) -> None:
    part(document)["digest"] = "d2"


def spoil_processes(document: elastic.Document) -> None:
    for batch in part(document)["batches"]:
        batch["pid"] = 12


def spoil_loss(document: elastic.Document) -> None:
    for own in document["phases"][1]["ranks"].values():
        for batch in own["batches"]:
            batch["loss"] += 0.5 * (batch["step"] == 2)


def spoil_both_losses(document: elastic.Document) -> None:
    for phase in document["phases"]:
        for own in phase["ranks"].values():
            for batch in own["batches"]:
                batch["loss"] = 1.0


def spoil_learning(document: elastic.Document) -> None:
    for own in document["phases"][1]["ranks"].values():
        for batch in own["batches"]:
            batch["loss"] = float("nan")


def spoil_pace(document: elastic.Document) -> None:
    for own in document["phases"][0]["ranks"].values():
        own["ends"] = [end * 1.3 for end in own["ends"]]


def spoil_speed(document: elastic.Document) -> None:
    part(document)["ends"][-1] = 11.5


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            spoil_rows,
            [
                "elastic steps: 2 of 24 rows not trained, the first of them row 0",
                "elastic steps: 1 of 24 rows trained more than once, the first of them row 2",
                "elastic steps: 1 of 24 rows not in the data, the first of them row 99",
            ],
        ),
        (spoil_steps, ["elastic steps: step 0 has 3 micro-batches instead of 4"]),
        (spoil_step_numbers, ["elastic steps: step 0 has 3 micro-batches instead of 4"]),
        (spoil_ends, ["elastic steps: optimizer steps by rank: {'A': 2, 'B': 3} instead of 3 each"]),
        (spoil_replicas, ["elastic steps: the ranks ended with different parameters"]),
        (spoil_processes, ["elastic steps: one process trained as two ranks"]),
        (spoil_loss, ["the losses end 0.5000 apart, and noise explains 0.32"]),
        (spoil_both_losses, ["DDP: the loss did not fall", "elastic steps: the loss did not fall"]),
        (spoil_learning, ["elastic steps: the loss did not fall", "the losses end nan apart"]),
        (spoil_pace, ["DDP: 1.30 times what it takes on paper, not within 0.9 and 1.25. A machine busy"]),
        (spoil_speed, ["elastic steps: 1.57 times as fast, not at least 0.8 of the limit, 1.60. A machine"]),
    ],
)
def test_each_check_of_elastic_steps_can_fail(
    spoil: Callable[[elastic.Document], None], said: list[str]
) -> None:
    written = elastic_document()
    spoil(written)
    found = wrong_with(written)
    assert len(found) == len(said)
    for reason, begins in zip(found, said, strict=True):
        assert reason.startswith(begins)
    text = shown_elastic(written)
    assert text.count("Not as it should be: ") == len(said)


def shown_elastic(written: elastic.Document, encoding: str = "utf-8") -> str:
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict")
    found, paper = elastic.outcomes(written), elastic.computed(written)
    wrong = elastic.verdict(found, paper)
    elastic_report.show(Console(file=out, width=80), written, found, paper, wrong)
    out.flush()
    assert isinstance(out.buffer, io.BytesIO)
    return out.buffer.getvalue().decode(encoding)


def test_the_result_of_elastic_steps_shows_the_last_steps_the_shares_and_both_losses() -> None:
    lines = [line.rstrip() for line in shown_elastic(elastic_document()).splitlines()]
    assert max(map(len, lines)) <= 80
    at = lines.index("DDP, the last 2 steps: 12.00 s")
    assert 20 <= lines[at + 1].count("█") <= 26, "A is busy a third of its 73 cells"
    assert "·" not in lines[at + 2]
    assert lines[at + 3] == "elastic steps, the last 2 steps: 6.00 s"
    assert "·" not in lines[at + 4]
    cells = [line.split() for line in lines]
    assert ["A", "1", "2.00", "67%", "3.00", "0%", "3"] in cells
    assert ["B", "1/3", "2.00", "0%", "1.00", "0%", "1"] in cells
    assert ["speed-up", "1", "2.00", "2.00"] in cells
    assert ["loss", "elastic", "steps", "2.00", "1.50", "1.00"] in cells
    assert "last third: 1.000 and 1.000, 0.000 apart; noise explains 0.327" in lines
    assert "elastic steps: each of the 24 samples trained once; replicas bit-identical." in lines
    assert " A 1   ####" in shown_elastic(elastic_document(), encoding="ascii")


def test_the_file_of_elastic_steps_reads_back_and_has_one_micro_batch_a_line() -> None:
    written = elastic_document()
    text = elastic.encode(written, [1], {"limit": 2})
    assert json.loads(text) == {**written, "results": [1], "computed": {"limit": 2}}
    assert sum('"pid"' in line for line in text.splitlines()) == 24


def test_the_live_view_has_the_regimes_own_phases() -> None:
    quick = elastic_options.QUICK
    text = live.view(quick, "DDP", [72, 36, 36, 9], 80, strips.BLOCKS).plain.splitlines()
    assert text[0] == "DDP: 153 of 288 batches, about 6 s"
    assert text[1].endswith("█ 72 of 72, waits")
    text = live.view(quick, "elastic steps", [64, 32, 32, 16], 80, strips.BLOCKS).plain.splitlines()
    assert text[0] == "elastic steps: 144 of 288 batches, about 3 s"
    assert text[2].count("█") == text[3].count("█") == pytest.approx(text[1].count("█") / 2, abs=1)


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--nodes", "1,1"), "nodes='1,1'"),
        (("--slowdown",), "slowdown='True'"),
        (("--mailbox", "s3://a/b"), "mailbox='s3://a/b'"),
        (("--png", "a.png"), "png='a.png'"),
    ],
)
def test_what_does_not_go_with_elastic_steps_is_refused(arguments: tuple[str, ...], said: str) -> None:
    with pytest.raises(InvalidInputError, match=said) as caught:
        command.run(parsed("--regime", "elastic", *arguments))
    assert "left out with --regime elastic" in str(caught.value)


def test_an_unknown_regime_is_refused_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed("--regime", "diloco")
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "'diloco' (choose from 'independent', 'elastic')" in said.replace(
        "choose from i", "choose from 'i"
    )


def elastic_demo(folder: Path, *arguments: str) -> list[str]:
    file = str(folder / "demo.json")
    return [sys.executable, "-m", "shardqueue", "demo", "--regime", "elastic", *arguments, "--json", file]


@pytest.mark.full
def test_the_quick_elastic_demo(tmp_path: Path) -> None:
    """Four real ranks; how fast they are here is not judged, and what they trained is."""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command_line = elastic_demo(tmp_path, "--quick")
    ended = subprocess.run(command_line, env=environment, capture_output=True, text=True, timeout=200)
    assert ended.stderr == ""
    assert list(tmp_path.glob("shardqueue-demo-*")) == []
    written = json.loads((tmp_path / "demo.json").read_text())
    found = elastic.outcomes(written)
    assert [outcome.faults for outcome in found] == [(), ()]
    for outcome, result in zip(found, written["results"], strict=True):
        assert result["losses"] == list(outcome.losses)
        assert f"{outcome.name}: each of the {written['rows']} samples trained once; replicas" in ended.stdout
    plain, shared = found
    assert abs(plain.loss - shared.loss) <= elastic.noise(found)
    assert [share.a_step for share in plain.shares] == [9.0] * 4
    first = [phase["ranks"]["A"]["batches"][0] for phase in written["phases"]]
    assert first[0]["pid"] == first[1]["pid"], "both phases in the same ranks"
    wrong = elastic.verdict(found, elastic.computed(written))
    assert all("A machine busy with other work" in reason for reason in wrong)
    assert ended.returncode == (1 if wrong else 0)


@pytest.mark.full
@pytest.mark.parametrize("phase", ["DDP", "elastic steps"])
def test_ctrl_c_leaves_no_process_and_no_file(tmp_path: Path, phase: str) -> None:
    started = subprocess.Popen(
        elastic_demo(tmp_path),
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert started.stdout is not None
    for line in started.stdout:
        if re.match(rf"{phase}: \d+ of .* A [1-9]", line):
            break
    os.killpg(started.pid, signal.SIGINT)
    # All of them hold the ends of these pipes: this returns once they are gone.
    _, errors = started.communicate(timeout=60)
    assert (started.returncode, errors) == (130, "shardqueue: interrupted\n")
    assert list(tmp_path.glob("*demo*")) == []
