"""The README is true: its blocks run or say why not, its outputs look like that, its links lead somewhere.

A Python block runs by itself in an empty folder. Any other block runs too, or has a comment directly above:
`<!-- not run: reason -->`, or `<!-- captured: command -->` over an output, whose headings are compared with those of
today. Two commands stand where `.ci/run` finds them.
"""

from __future__ import annotations

import json
import re
import shlex
import socket
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from torch import distributed

from shardqueue.doctor.permissions import missing

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
REASON = re.compile(r"<!-- not run: (.{8,}) -->")
CAPTURED = re.compile(r"<!-- captured: (.+) -->")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, the line it begins at, and the line above it."""

    language: str
    text: str
    line: int
    above: str

    @property
    def command(self) -> list[str] | None:
        """What is typed after the prompt in the first line."""
        first = self.text.partition("\n")[0]
        return shlex.split(first[2:]) if first.startswith("$ ") else None


def blocks_in(text: str) -> list[Block]:
    found, lines, opened = [], text.splitlines(), 0
    for number, line in enumerate(lines, 1):
        if not line.startswith("```"):
            continue
        if opened:
            body = "".join(f"{one}\n" for one in lines[opened : number - 1])
            found.append(Block(lines[opened - 1][3:], body, opened, lines[opened - 2]))
        opened = 0 if opened else number
    assert not opened, f"the block of line {opened} has no end"
    return found


ALL = blocks_in(README)
YAML = [block.text for block in ALL if block.language == "yaml"]
BLOCKS = [block.text for block in ALL if block.language == "python"]
PROSE = re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL)
LOOP = next(block for block in BLOCKS if "autocast" in block)
DROPPED_IN = next(block for block in BLOCKS if "SharedQueueDataset.from_dataset" in block)
LIGHTNING = next(block for block in BLOCKS if "class Regression" in block)

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


@pytest.fixture
def beside_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The current folder is empty but for `train.py` of the section on Lightning."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "train.py").write_text(LIGHTNING)
    yield
    sys.modules.pop("train", None)


def run(text: str, name: str) -> None:
    exec(compile(text, name, "exec"), {"__name__": "__main__"})


# -- blocks ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("alone", "beside_train")
@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_block_runs(number: int) -> None:
    run(BLOCKS[number], f"README.md, block {number + 1}")


def test_every_other_block_runs_or_says_why_not() -> None:
    silent = [
        f"line {block.line}: {block.language}"
        for block in ALL
        if block.language not in ("python", "yaml", "json")  # which run below
        and not REASON.fullmatch(block.above)
        and not CAPTURED.fullmatch(block.above)
        and block.command is None
    ]
    assert silent == []
    excused = [block.line for block in ALL if block.language == "python" and block.above.startswith("<!--")]
    assert excused == []
    assert len(YAML) == 1


def test_a_block_without_a_reason_is_noticed() -> None:
    silent, excused = blocks_in("```bash\nrm x\n```\n<!-- not run: no such file -->\n```bash\nrm x\n```\n")
    assert (REASON.fullmatch(silent.above), silent.line) == (None, 1)
    assert REASON.fullmatch(excused.above)
    with pytest.raises(AssertionError, match="has no end"):
        blocks_in("```python\n")


@pytest.mark.usefixtures("beside_train")
def test_command_line_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jsonargparse")
    from lightning.pytorch.cli import LightningCLI

    Path("train.yaml").write_text(YAML[0])
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # set by the command
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning's use of it
    monkeypatch.setattr(sys, "argv", ["cli.py", "fit", "--config", "train.yaml"])
    cli = LightningCLI()
    assert cli.trainer.global_step == 2 * 113
    assert cli.trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.05 * 0.99**225)


def test_the_policy_allows_what_the_doctor_asks_for() -> None:
    (policy,) = (json.loads(block.text) for block in ALL if block.language == "json")
    allowed = {
        action
        for statement in policy["Statement"]
        for action in [statement["Action"]]
        if isinstance(action, str)
    }
    allowed.update(
        *(statement["Action"] for statement in policy["Statement"] if isinstance(statement["Action"], list))
    )
    verbs = ["create", "overwrite", "read", "list", "delete"]
    assert allowed == set(missing("s3://bucket/prefix", verbs))


# -- commands and their outputs ------------------------------------------------------------------------------


def typed(command: list[str]) -> str:
    """What a `shardqueue` command prints here."""
    program, *arguments = command
    assert program == "shardqueue"
    done = subprocess.run(
        [sys.executable, "-m", "shardqueue", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


def rows(text: str) -> list[list[str]]:
    """The words of each line, without frames."""
    return [line.split() for line in text.splitlines() if line.strip(" ─")]


def headings(text: str) -> list[list[str]]:
    """The words of each line over a rule, and of a legend."""
    legends = [line.split() for line in text.splitlines() if line.lstrip().startswith("█ busy")]
    return legends + [
        line.split() for line, below in pairwise(text.splitlines()) if below.strip() and not below.strip(" ─")
    ]


def are_most_of(words: list[str], heading: list[str]) -> bool:
    """Whether a heading is this one, but for columns that some runs have and others have not."""
    rest = iter(heading)
    return all(word in rest for word in words) and 2 * len(words) > len(heading)


EXACT = [block for block in ALL if block.command and not block.above.startswith("<!--")]
LIKE = [
    block for block in ALL if block.command and CAPTURED.fullmatch(block.above) and "./queue" in block.command
]


@pytest.mark.parametrize("block", EXACT, ids=lambda block: block.command[1])
def test_output_is_to_the_letter(block: Block) -> None:
    """Each line of it is printed, in this order; `...` leaves some out."""
    assert block.command is not None
    printed = iter(rows(typed(block.command)))
    for row in rows(block.text)[1:]:
        assert row == ["..."] or row in printed, " ".join(row)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a DataLoader's loop was run."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run(DROPPED_IN, "README.md")
    return folder


@pytest.mark.parametrize("block", LIKE, ids=lambda block: block.command[1])
def test_captured_output_has_the_headings_of_today(
    block: Block, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trained)
    assert block.command is not None
    assert block.above == f"<!-- captured: {shlex.join(block.command)} -->"
    printed = typed(block.command)
    assert headings(block.text) != []
    today = headings(printed)
    for heading in headings(block.text):
        assert any(are_most_of(words, heading) for words in today), printed
    assert rows(printed)[0][:4] == rows(block.text)[1][:4], "run 1 at ./queue: ..."


@pytest.mark.full
def test_the_demos_output_has_the_headings_of_today(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    captured = next(b for b in ALL if b.above == "<!-- captured: shardqueue demo --quick -->")
    assert {*map(tuple, headings(captured.text))} <= {
        *map(tuple, headings(typed(["shardqueue", "demo", "--quick"])))
    }


# -- the loop --------------------------------------------------------------------------------------------------


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


# -- where things are --------------------------------------------------------------------------------------------


def test_peers_are_as_they_were_measured() -> None:
    """The table of other systems has the numbers of the run that `benchmarks/measured.md` holds."""
    measured = (ROOT / "benchmarks" / "measured.md").read_text(encoding="utf-8")
    cases = "400 x 25 ms, 0.5 ms a call", "400 x 25 ms, 30 ms a call", "24 x 50 ms, 0.5 ms a call"
    names = {
        "shardqueue, in threads": "shardqueue .*, threads",
        "shardqueue, through a `DataLoader`": "shardqueue .*, DataLoader",
        "GradientMail": "GradientMail .*",
        "Ray Data": "Ray Data .*",
        "`DataLoader` with": "DataLoader with DistributedSampler.*",
    }
    seen = 0
    for name, of in names.items():
        [row] = re.findall(rf"^\| {re.escape(name)}.*\| [12]\..*$", README, re.MULTILINE)
        for case, cell in zip(cases, row.strip("| ").split("|")[1:], strict=True):
            if not cell.strip():
                continue
            where = re.escape(case.partition(",")[0] if "no store" in row else case)
            [value] = re.findall(rf"^\| {where}: {of} \| ([0-9.]+) \| x limit", measured, re.MULTILINE)
            assert cell.split()[0] == f"{float(value):.2f}", (name, case)
            seen += 1
    assert seen == 13


def test_first_python_is_near_the_top() -> None:
    first = README[: README.index("```python")].count("\n") + 1
    last = first + BLOCKS[0].count("\n") + 1
    assert last < 25


def test_the_two_commands_stand_alone_on_their_lines() -> None:
    commands = re.findall(r"^pip install .* && (\S+.*)$", README, re.MULTILINE)
    assert commands == ["shardqueue demo", "pytest"]


def slug(heading: str) -> str:
    """The anchor that a heading gets."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_links_lead_somewhere() -> None:
    anchors = [slug(heading) for heading in re.findall(r"^#+ (.+)$", PROSE, re.MULTILINE)]
    assert len(anchors) == len(set(anchors))
    links = re.findall(r"\]\(([^)\s]+)\)", PROSE)
    assert len(links) > 20
    for link in links:
        assert link.removeprefix("#") in anchors if link.startswith("#") else (ROOT / link).exists(), link


def test_every_section_is_in_the_contents() -> None:
    contents = PROSE[PROSE.index("**Contents.**") :].partition("\n\n")[0]
    linked = re.findall(r"\]\(#([^)]+)\)", contents)
    assert linked == [slug(heading) for heading in re.findall(r"^## (.+)$", PROSE, re.MULTILINE)]


def test_files_and_modules_that_are_named_exist() -> None:
    for path in re.findall(r"\b((?:tests|docs|benchmarks|notebooks|shardqueue)/[\w./-]+\.\w+)", README):
        assert (ROOT / path).exists(), path
    for script in re.findall(r"`(\.ci/\w+)`", README):
        assert (ROOT / script).exists(), script
    for module in re.findall(r"-m (benchmarks[\w.]*)", README):
        file = ROOT / module.replace(".", "/")
        assert file.with_suffix(".py").exists() or (file / "__main__.py").exists(), module
    guarantees = README.partition("\n## What is guaranteed\n")[2].partition("\n## ")[0]
    named = re.findall(r"`((?:lightning/)?test_\w+)`", guarantees)
    assert len(named) > 8
    for name in named:
        assert (ROOT / "tests" / f"{name}.py").exists(), name
