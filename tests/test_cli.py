"""The command line: what it says, what it returns, and what it leaves unimported."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING

import pytest

from shardqueue.cli import main

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"], ["--version"], []])
def test_help_imports_no_heavy_package(arguments: list[str]) -> None:
    code = f"""
import sys
from shardqueue.cli import main
try:
    code = main({arguments})
except SystemExit as exit:
    code = exit.code
print(code or 0, [name for name in ("torch", "lightning", "fsspec", "rich") if name in sys.modules])
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "0 []"
    assert ended.stderr == ""


def test_without_a_command_it_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: shardqueue")
    assert "demo" in out


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


def test_an_error_is_one_line_on_stderr_and_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--json", str(tmp_path / "absent" / "demo.json")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("shardqueue: json=")
    assert captured.err.count("\n") == 1


def test_it_runs_as_a_module() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "shardqueue", "--version"], capture_output=True, text=True, check=True
    )
    assert ended.stdout.startswith("shardqueue ")
