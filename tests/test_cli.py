"""The command line: what it says, what it returns, and what it leaves unimported."""

from __future__ import annotations

import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from shardqueue.cli import main


@pytest.mark.parametrize(
    "arguments",
    [
        *([command, "--help"] for command in ("demo", "doctor", "clean", "status", "audit")),
        *(["--help"], ["--version"], []),
    ],
)
def test_help_imports_no_heavy_package(arguments: list[str]) -> None:
    code = f"""
import sys
from shardqueue.cli import main
try:
    code = main({arguments})
except SystemExit as exit:
    code = exit.code
print(code or 0, [name for name in ("torch", "lightning", "fsspec", "rich", "matplotlib") if name in sys.modules])
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "0 []"
    assert ended.stderr == ""


def test_without_a_command_it_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: shardqueue")
    for command in ("demo", "doctor", "simulate", "clean", "status", "audit"):
        assert f"\n    {command} " in out


def test_a_command_is_asked_for_its_arguments_only_when_it_is_named() -> None:
    code = """
import sys
from shardqueue.cli import main
main([])
packages = [f"shardqueue.{name}" for name in ("doctor", "clean", "simulate", "status", "audit")]
print([name for name in sys.modules if name.startswith(tuple(packages))])
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", ["doctor", "simulate", "clean", "status", "audit"])
def test_each_command_explains_its_exit_codes(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert not ended.value.code
    out = capsys.readouterr().out
    assert "exit code" in out
    assert max(map(len, out.splitlines())) <= 80


def test_the_demo_explains_its_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["demo", "--help"])
    out = capsys.readouterr().out
    assert "exit code" in out
    assert max(map(len, out.splitlines())) <= 80


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert not ended.value.code
    assert capsys.readouterr().out == f"shardqueue {version('shardqueue')}\n"


def test_a_wrong_argument_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["dmeo"])
    assert ended.value.code == 2
    assert "dmeo" in capsys.readouterr().err


@pytest.mark.torch
def test_an_error_is_one_line_on_stderr_and_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--json", str(tmp_path / "absent" / "demo.json")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("shardqueue: json=")
    assert captured.err.count("\n") == 1


def test_wrong_speeds_are_told_before_anything_heavy_is_imported() -> None:
    code = """
import sys
from shardqueue.cli import main
print(main(["demo", "--nodes", "1,fast"]), "torch" in sys.modules)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "2 False\n"
    assert ended.stderr.startswith(
        "shardqueue: nodes='fast': nodes must be numbers with commas between; pass "
    )
    assert ended.stderr.count("\n") == 1


@pytest.mark.torch
def test_every_option_of_the_demo_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardqueue.demo import stage
    from shardqueue.demo.options import FULL, QUICK, mixed

    calls: list[tuple[object, ...]] = []

    def run(options: object, file: object, *, png: object, mailbox: object) -> int:
        calls.append((options, file, png, mailbox))
        return 7

    monkeypatch.setattr(stage, "run", run)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert main(["demo"]) == 7
        files = ["--json", str(tmp_path / "a"), "--png", str(tmp_path / "b"), "--mailbox", "s3://c/d"]
        assert main(["demo", "--quick", "--nodes", "2,1", "--slowdown", *files]) == 7
    finally:
        signal.signal(signal.SIGTERM, before)
    assert calls == [
        (FULL, Path("shardqueue-demo.json"), None, None),
        (mixed(QUICK, (2.0, 1.0), slows=True), tmp_path / "a", tmp_path / "b", "s3://c/d"),
    ]


def test_it_runs_as_a_module() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "shardqueue", "--version"], capture_output=True, text=True, check=True
    )
    assert ended.stdout.startswith("shardqueue ")


def test_whoever_read_the_output_may_go() -> None:
    command = f"{sys.executable} -m shardqueue simulate --units 40 | true"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert ended.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_line_and_2() -> None:
    command = [sys.executable, "-m", "shardqueue", "simulate", "--units", "40", "--json", "/dev/full"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("shardqueue: ")
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["doctor", "clean", "status", "audit"])
@pytest.mark.parametrize(
    "url",
    ["s3://AKIAX:abc/defHUSH@bucket/x", "http://u:p/HUSH@host/x", "s3://b/x?sig=HUSH", "gs://t:HUSH@b/x"],
)
def test_no_secret_of_a_url_is_shown(command: str, url: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([command, url]) != 0
    out, err = capfd.readouterr()
    assert "HUSH" not in out + err
