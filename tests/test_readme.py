"""Every Python block of the README runs, from an empty folder; the two commands are where they should be."""

from __future__ import annotations

import re
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from torch import distributed

if TYPE_CHECKING:
    from collections.abc import Iterator

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
YAML = re.findall(r"^```yaml\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
LOOP = next(block for block in BLOCKS if "session.step" in block)
LIGHTNING = next(block for block in BLOCKS if "SharedQueueDataModule" in block)

pytestmark = [
    # Lightning 2.6 uses what torch 2.13 deprecates.
    pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated"),
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What torchrun tells the only rank of a job; a process group that a Trainer has made is left behind it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    yield
    if distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_block_runs(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(BLOCKS[number], f"README.md, block {number + 1}", "exec"), {"__name__": "__main__"})


def test_command_line_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jsonargparse")
    from lightning.pytorch.cli import LightningCLI

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "train.py").write_text(LIGHTNING)
    (tmp_path / "train.yaml").write_text(YAML[0])
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # set by the command
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning's use of it
    monkeypatch.setattr(sys, "argv", ["cli.py", "fit", "--config", "train.yaml"])
    try:
        cli = LightningCLI()
    finally:
        sys.modules.pop("train", None)
    assert cli.trainer.global_step == 2 * 113
    assert cli.trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.05 * 0.99**225)


def _run_loop(prefix: str) -> dict[str, object]:
    """Run the loop, counting by value what was trained."""
    names: dict[str, object] = {"__name__": "readme", "trained": []}
    counting = LOOP.replace("optimizer.step()", "trained.append(batch)\n        optimizer.step()")
    exec(compile(counting, prefix, "exec"), names)
    return names


def _check_loop(names: dict[str, object]) -> None:
    torch = pytest.importorskip("torch")
    trained, inputs = names["trained"], names["inputs"]
    assert isinstance(trained, list)
    got = sorted(tuple(row.tolist()) for batch in trained for row in batch[:, :16])
    assert got == sorted(tuple(row.tolist()) for row in inputs.reshape(-1, 16))  # type: ignore[attr-defined]
    session, model = names["session"], names["model"]
    assert session.rates.samples == len(got)  # type: ignore[attr-defined]
    weight = model.weight.detach().cpu()  # type: ignore[attr-defined]
    assert torch.allclose(weight, torch.ones_like(weight), atol=0.2), "the model has learnt the sum"


def test_loop_trains_every_sample_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _check_loop(_run_loop("cpu"))


@pytest.mark.gpu
def test_loop_on_cuda_with_autocast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    monkeypatch.chdir(tmp_path)
    names = _run_loop("cuda")
    assert names["device"] == "cuda"
    _check_loop(names)


def test_first_python_is_near_the_top() -> None:
    first = README[: README.index("```python")].count("\n") + 1
    last = first + BLOCKS[0].count("\n") + 1
    assert last < 25


def test_the_two_commands_stand_alone_on_their_lines() -> None:
    commands = re.findall(r"^pip install .* && (\S+.*)$", README, re.MULTILINE)
    assert commands == ["shardqueue demo", "pytest"]
