"""The benchmarks: what programs read of them, and the suite that runs them all."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.machine import commit, machine, versions
from benchmarks.markdown import summary, whole
from benchmarks.peers import sides
from benchmarks.peers.work import Stay, Work, gather, outcomes
from benchmarks.report import Report, Row
from benchmarks.suite import SUITE, Benchmark, Finding, document, read, run_to_end

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"


def test_claiming_costs_what_is_promised_at_any_scale() -> None:
    """In virtual time, so the same numbers on every machine: a reach that is missed fails."""
    command = [sys.executable, "-m", "benchmarks.scale", "--quick", "--strict", "--only", "virtual"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["benchmark"] == "scale"
    assert sum(row["reach"] is not None for row in found["rows"]) >= 4


# -- what came of a benchmark --------------------------------------------------------------------------------


def test_a_report_is_read_as_it_was_told() -> None:
    told = Report(
        "makespan", [Row("a", 1.5, "s", 2.0), Row("b", 1.5, "s", 2.0, "c", at_least=True)], [], ["d: e"]
    )
    again = Report.of(json.loads(told.as_json()))
    assert again == told
    assert [row.missed for row in again.rows] == [False, True]


def test_a_benchmark_that_misses_a_reach_is_measured() -> None:
    found = finding(Report("x", [Row("slow", 3.0, "s", 2.0)]).as_json())
    assert (found.outcome, found.failed) == ("measured", "")
    assert found.document()["rows"][0]["missed"]


@pytest.mark.parametrize(
    "last", ["", "no JSON", "3", "[]", "{}", '{"benchmark": "x", "rows": [{"case": 1}]}']
)
def test_a_benchmark_that_prints_no_report_failed(last: str) -> None:
    found = finding(f"a table\n{last}", said="one line\nand the last\n")
    assert found.outcome == "failed"
    assert found.failed == "its last line is not a report: and the last"


def test_a_benchmark_that_ends_badly_failed_and_its_rows_are_kept() -> None:
    found = finding(Report("x", [Row("a", 1.0, "s")]).as_json(), exit_code=3, said="Error: why")
    assert found.failed == "it ended with 3: Error: why"
    assert [row.case for row in found.report.rows] == ["a"]


def test_what_is_wrong_fails_even_where_the_exit_code_does_not() -> None:
    told = Report("x", wrong=["a batch came twice"])
    assert finding(told.as_json()).failed == "WRONG: a batch came twice"
    said_only = Report("x").as_json()
    assert finding(f"WRONG: one is missing\n{said_only}").failed == "WRONG: one is missing"


def test_a_benchmark_that_does_not_end_is_killed_with_what_it_started() -> None:
    child = """
import subprocess, time
subprocess.Popen(["sleep", "60"])
subprocess.Popen(["sleep", "60"], process_group=0)
subprocess.Popen(["sleep", "60"], start_new_session=True)
print("begun", flush=True)
time.sleep(60)
"""
    began = time.monotonic()
    exit_code, printed, _ = run_to_end([sys.executable, "-c", child], 1.0)
    assert exit_code is None
    assert printed == "begun\n"
    assert time.monotonic() - began < 50  # what it started held its standard error open
    assert "did not end" in finding("", exit_code=None).failed


def test_the_end_of_standard_error_is_kept() -> None:
    exit_code, _, said = run_to_end([sys.executable, "-c", "print(1); raise SystemExit('no disk')"], 60.0)
    assert (exit_code, said) == (1, "no disk\n")


@pytest.mark.torch
def test_the_suite_goes_on_after_a_benchmark_that_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suite = [
        Benchmark("broken", ("--no-such-option",), "makespan"),
        Benchmark("silent", (), "seaweedfs"),
        Benchmark("good", ("--only", "over_a_plain_loop"), "makespan"),
        Benchmark("elsewhere", cuda=True),
    ]
    if machine()["gpus"]:
        del suite[3]
    assert main(["--out", str(tmp_path)], suite) == 1
    printed = capsys.readouterr().out.splitlines()
    told = json.loads(printed[-1])
    assert told == json.loads((tmp_path / "benchmarks.json").read_text())
    found = {each["name"]: each for each in told["benchmarks"]}
    assert [each["outcome"] for each in found.values()][:3] == ["failed", "failed", "measured"]
    assert "unrecognized arguments" in found["broken"]["reason"]
    assert found["good"]["rows"][0]["case"].startswith("over a plain loop")
    if "elsewhere" in found:
        assert found["elsewhere"]["reason"] == "there is no CUDA device here"
    for name in ("benchmarks.md", "summary.md"):
        assert "| broken | **failed** |" in (tmp_path / name).read_text()
    assert main(["--only", "good", "--out", str(tmp_path)], suite) == 0


# -- the document --------------------------------------------------------------------------------------------


@pytest.mark.torch
def test_tables_hold_every_row_and_no_cell_breaks_out() -> None:
    rows = [
        Row("a | b", 1.0, "s", 2.0, "`c`\nd"),
        Row("<e>", 12.0, "s", 13.0, at_least=True),
        Row("f", 0.5, "x"),
    ]
    report = Report("x", rows, skipped=["a peer: not | here"])
    told = document([Finding("x", ["-m", "x"], 1.0, 0, report)], "quick", "now", 2.0, machine(), versions())
    every, short = whole(told), summary(told)
    assert "| a \\| b | 1.0000 | s | <= 2 |  | \\`c\\` d |" in every
    assert "| \\<e> | 12.0 | s | >= 13 | MISSED |  |" in every
    assert "| f | 0.5000 | x | - |  |  |" in every
    assert "| x | measured | 1 | 3 | 1 | a peer: not \\| here |" in every
    assert "| x | \\<e> |" in short
    assert "| f |" not in short  # which nobody promised
    for line in every.splitlines() + short.splitlines():
        cells = re.split(r"(?<!\\)\|", line)
        assert not line.startswith("|") or len(cells) in (8, 9)


@pytest.mark.torch
def test_the_machine_and_the_versions_are_told_and_nothing_private() -> None:
    found = {**machine(), **versions()}
    assert found["cores"] >= 1
    assert found["memory_bytes"] > 2**28
    assert found["cpu"]
    assert all(found[name] for name in ("python", "torch", "lightning", "fsspec", "s3fs"))
    assert found["commit"] is None or re.fullmatch(r"[0-9a-f]{40}(-dirty)?", found["commit"])
    told = json.dumps(found)
    assert os.uname().nodename not in told
    assert str(Path.home()) not in told


def test_a_folder_inside_of_a_checkout_is_no_checkout(tmp_path: Path) -> None:
    assert commit(tmp_path) is None
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    inside = tmp_path / "inside"
    inside.mkdir()
    (tmp_path / "file").write_text("text")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    subprocess.run([*git, "add", "file"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "one"], check=True)
    assert commit(inside) is None
    assert re.fullmatch(r"[0-9a-f]{40}", commit(tmp_path) or "")
    (tmp_path / "file").write_text("other")
    assert str(commit(tmp_path)).endswith("-dirty")


# -- what there is -------------------------------------------------------------------------------------------


@pytest.mark.torch
def test_what_was_measured_before_an_interrupt_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(benchmark: Benchmark, form: str, has_cuda: bool) -> Finding:
        if benchmark.name == "second":
            raise KeyboardInterrupt
        return Finding(benchmark.name, benchmark.command(form), skipped="made up")

    monkeypatch.setattr("benchmarks.__main__.run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        main(["--out", str(tmp_path)], [Benchmark("first"), Benchmark("second")])
    told = json.loads((tmp_path / "benchmarks.json").read_text())
    assert [each["name"] for each in told["benchmarks"]] == ["first"]


def test_every_benchmark_is_in_the_suite() -> None:
    told = {each.module or each.name for each in SUITE}
    assert told == {name for name, text in modules().items() if '__name__ == "__main__"' in text}
    names = [each.name for each in SUITE]
    assert len(names) == len(set(names))


def test_the_suite_is_listed_without_being_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in listed] == [each.name for each in SUITE]
    assert all("--quick" in line for line in listed)
    assert main(["--list", "--full", "--only", "teacher_student_processes"]) == 0
    told = capsys.readouterr().out
    assert told == "teacher_student_processes: python -m benchmarks.teacher_student --processes\n"


def test_the_guide_describes_every_benchmark_and_every_command_of_it_exists() -> None:
    guide = (BENCHMARKS / "README.md").read_text()
    described = set(re.findall(r"^### `(\w+)`", guide, re.MULTILINE))
    assert described == {each.module or each.name for each in SUITE}
    commands = set(re.findall(r"-m benchmarks(?:\.(\w+))?", guide))
    assert commands - {""} <= modules().keys()
    assert described <= commands
    for module, options in re.findall(r"-m benchmarks\.(\w+)((?: --?[\w-]+(?: \w+)?)*)", guide):
        for case in re.findall(r"--only (\w+)", options):
            assert re.search(rf"\b{case}\b", modules()[module]), (module, case)


def test_what_was_measured_is_a_summary_that_the_suite_wrote() -> None:
    written = (BENCHMARKS / "measured.md").read_text()
    assert re.match(
        r"# All benchmarks, quick form\n\n- \d{4}-\d\d-\d\d \d\d:\d\d UTC, \d+ s in all, ", written
    )
    overview = re.findall(r"^\| (\w+) \| (measured|skipped|\*\*failed\*\*) \|", written, re.MULTILINE)
    assert [name for name, _ in overview] == [each.name for each in SUITE]
    assert all("failed" not in outcome for _, outcome in overview)


# -- peers ---------------------------------------------------------------------------------------------------

WORK = Work(4, 1.0, speeds=(1.0, 1.0))


def test_a_units_clock_starts_with_all_or_at_the_first_unit() -> None:
    stays = [Stay(10.0, 11.0, 13.0, [0, 1]), Stay(10.5, 12.0, 14.0, [3, 2])]
    found = gather(WORK, stays, 6)
    assert (found.ratio, found.start, found.shares, found.requests, found.faults) == (
        2.0,
        1.0,
        (2, 2),
        1.5,
        0,
    )
    assert gather(WORK, stays, from_first=True).ratio == 1.5


def test_units_that_come_twice_or_never_are_counted() -> None:
    stays = [Stay(0.0, 0.0, 1.0, [0, 1, 1]), Stay(0.0, 0.0, 1.0, [2])]
    assert gather(WORK, stays).faults == 2
    assert gather(WORK, [Stay(0.0, 0.0, 0.0)] * 2).faults == 4


@pytest.mark.parametrize(("faults", "ratio"), [(0, 3.0), (1, 9.0)])
def test_a_side_does_its_turns_and_the_better_way_counts_unless_one_loses_units(
    faults: int, ratio: float
) -> None:
    script = f"""
from benchmarks.peers.work import Outcome, serve
def way(ratios, faults):
    return lambda work: Outcome(next(ratios), 0.0, (1,), None, faults)
serve("1", way(iter([9.0, 3.0, 2.0]), 0), way(iter([4.0, 4.0, 1.0]), 0), way(iter([9.0] * 3), {faults}))
"""
    given = '[{"units": 1, "seconds": 1.0, "turns": 3, "speeds": [1.0]}]'
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, cwd=ROOT, input=given, capture_output=True, text=True, check=True)
    (found,) = outcomes(json.loads(ended.stdout))
    assert (found.ratio, found.faults) == (ratio, faults)


def test_a_side_without_its_package_is_absent_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    side = replace(sides.SIDES[0], imports="no_such_package")
    monkeypatch.delenv(sides.VARIABLE, raising=False)
    with pytest.raises(
        sides.AbsentError, match=r"gradientmail==0.0.2 is not installed here.*--make-environments"
    ):
        sides.run(side, [WORK])
    monkeypatch.setenv(sides.VARIABLE, "/nowhere")
    with pytest.raises(sides.AbsentError, match="/nowhere has no environment for it"):
        sides.run(side, [WORK])


def test_a_side_that_fails_is_not_taken_for_one_that_is_absent() -> None:
    with pytest.raises(sides.BrokenError, match="no_such_side ended with 1"):
        sides.run(sides.Side("no_such_side", ""), [WORK])
    with pytest.raises(sides.BrokenError, match="processes did not tell what came of it"):
        sides.run(sides.Side("processes", ""), [WORK])  # which is not a side


def test_nothing_that_a_side_started_is_left(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    ended = subprocess.Popen(["true"], text=True)
    ended.wait()
    left = subprocess.Popen(["sleep", "60"], env=environment, start_new_session=True)
    other = subprocess.Popen(["sleep", "60"], start_new_session=True)
    sides.leave_nothing(ended, str(tmp_path))
    assert left.wait(30) == -9
    assert other.poll() is None
    other.kill()
    other.wait()


@pytest.mark.full
@pytest.mark.parametrize("side", [*sides.SIDES, sides.THREADS, sides.LOADERS], ids=lambda side: side.module)
def test_a_side_trains_every_unit_once(side: sides.Side) -> None:
    try:
        label, (found,) = sides.run(side, [Work(24, 0.05, 0.0005)])
    except sides.AbsentError as reason:
        pytest.skip(str(reason))
    assert found.faults == 0
    assert sum(found.shares) == 24
    assert re.search(r"\d+\.\d+", label)
    assert (found.requests is not None) == side.asks_store
    if side.module == "distributed_sampler":
        assert found.shares == (6, 6, 6, 6)
    if side in (sides.THREADS, sides.LOADERS):
        assert found.shares[0] > found.shares[3]


@pytest.mark.full
def test_the_suite_measures_what_it_is_asked_for(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "--only", "teacher_student", "gpu_elastic"]
    ended = subprocess.run(
        [*command, "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=400
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    told = json.loads(ended.stdout.splitlines()[-1])
    found = {each["name"]: each for each in told["benchmarks"]}
    assert set(found) == {"teacher_student", "gpu_elastic"}
    assert found["teacher_student"]["outcome"] == "measured"
    assert len(found["teacher_student"]["rows"]) > 10
    assert "teacher_student: channel: total time" in ended.stderr  # which goes by as it comes


# -- the benchmarks -----------------------------------------------------------------------------------------


@pytest.mark.full
def test_the_loader_benchmark_ends_with_one_line_of_json() -> None:
    command = [sys.executable, "-m", "benchmarks.loader", "--quick", "--only", "many_units"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = ended.stdout.splitlines()
    found = json.loads(lines[-1])
    assert found["benchmark"] == "loader"
    assert [row["unit"] for row in found["rows"]] == ["MB", "s", "MB", "s"]
    assert all(row.keys() == {"case", "value", "unit", "reach", "against"} for row in found["rows"])
    assert len(lines) == len(found["rows"]) + 2  # a heading, a line a row, and the JSON: nothing was WRONG


@pytest.mark.full
def test_what_the_ranks_of_lockstep_tell_each_other_is_measured() -> None:
    rows = rows_of("lightning_overhead", "--only", "agreement")
    assert [row["case"].partition(",")[0] for row in rows] == 2 * ["agreement of 2 ranks"] + 2 * [
        "agreement of 4 ranks"
    ]


@pytest.mark.full
def test_lockstep_trains_every_row_that_plain_ddp_trains() -> None:
    rows = rows_of("lightning_overhead")
    assert sum(row["unit"] == "x plain" for row in rows) == 3


@pytest.mark.full
def test_to_lose_nothing_costs_what_is_promised() -> None:
    """In virtual time, so the same numbers on every machine."""
    rows = rows_of("recovery", "--only", "requests")
    long = {row["case"]: row["value"] for row in rows if "00 units" in row["case"]}
    assert len(long) == 4  # with 100 units a learner
    assert max(long.values()) <= 3.5
    (twice,) = (row for row in rows if row["unit"] == "batches")
    assert twice["value"] <= twice["reach"]


@pytest.mark.full
def test_what_status_reads_does_not_grow_with_the_units() -> None:
    rows = rows_of("recovery", "--only", "status")
    assert [row["value"] for row in rows if row["unit"] == "requests"] == [67, 67]


def rows_of(benchmark: str, *arguments: str) -> list[dict[str, Any]]:
    """Run it; return its rows if nothing was WRONG."""
    command = [sys.executable, "-m", f"benchmarks.{benchmark}", "--quick", *arguments]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = ended.stdout.splitlines()
    found = json.loads(lines[-1])
    assert found["benchmark"] == benchmark
    assert all(row.keys() == {"case", "value", "unit", "reach", "against"} for row in found["rows"])
    assert len(lines) == len(found["rows"]) + 2  # a heading, a line a row, and the JSON
    return list(found["rows"])


def finding(printed: str, exit_code: int | None = 0, said: str = "") -> Finding:
    return read("x", ["-m", "benchmarks.x"], 1.0, exit_code, printed, said)


def modules() -> dict[str, str]:
    """The text of every benchmark's file, by name; a package is what runs it."""
    files = {path.stem: path for path in BENCHMARKS.glob("*.py") if path.stem != "__main__"}
    files |= {path.parent.name: path for path in BENCHMARKS.glob("*/__main__.py")}
    return {name: path.read_text() for name, path in files.items()}
