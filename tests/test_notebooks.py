"""The notebooks run whole, each in a fresh kernel and an empty folder, and leave nothing behind.

What a notebook claims it asserts, so running it is the test. Outputs are committed for those who only read. After
a change to a cell they are made anew by

    python tests/test_notebooks.py [PART OF A NAME ...]

which also takes out times and versions. Until then the normal suite fails: each notebook says which cells its outputs
are of.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import hashlib
import json
import os
import re
import signal
import socket
import sys
import tempfile
import uuid
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent.parent / "notebooks"
NAMES = ("01_drop_into_a_dataloader", "02_lightning_on_mixed_gpus", "03_imbalance_benchmark")
SECONDS = 180
"""For one cell."""
MOST_OF_A_PICTURE, MOST_OF_A_NOTEBOOK = 40_000, 200_000
PATHS = r"/(?:home|root|tmp|var|work|usr|opt|Users|builds?)/|\\Users\\"
MARK = "SHARDQUEUE_NOTEBOOK"
"""In the environment of a kernel and of all that it starts."""

Notebook = dict[str, Any]


# -- running one -----------------------------------------------------------------------------------------


def run(notebook: Any) -> None:
    """Execute a notebook's cells in order, in a fresh kernel and an empty folder.

    Raises:
        CellExecutionError: a cell failed.
        AssertionError: it left a file or a process behind.
    """
    # Not pytest's folder: sockets lie in what a notebook makes here, and the path of one has 107 characters at most.
    with tempfile.TemporaryDirectory() as folder:
        _run_in(Path(folder), notebook)


def _run_in(folder: Path, notebook: Any) -> None:
    _jupyter("ipykernel")
    places = {name: folder / name for name in ("empty", "tmp", "ipython", "jupyter")}
    for place in places.values():
        place.mkdir()
    mark = uuid.uuid4().hex
    environment = {
        **os.environ,
        MARK: mark,
        "TMPDIR": str(places["tmp"]),
        "IPYTHONDIR": str(places["ipython"]),
        "JUPYTER_RUNTIME_DIR": str(places["jupyter"]),
    }
    client = _jupyter("nbclient").NotebookClient(
        notebook,
        timeout=SECONDS,
        kernel_name="python3",
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": str(places["empty"])}},
    )
    try:
        client.execute(env=environment)
    finally:
        left = _end(mark)
    assert not left, f"processes are left: {left}"
    files = [*places["empty"].iterdir(), *places["tmp"].iterdir()]
    assert not files, f"files are left: {files}"


def _jupyter(name: str) -> Any:
    """A module of the extra `notebooks`; without it the test is skipped."""
    return pytest.importorskip(name, reason="needs the extra `notebooks`")


def _end(mark: str) -> list[str]:
    """End what has this mark in its environment; the command lines."""
    ended = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in (process / "environ").read_bytes().split(b"\0"):
                ended.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
                os.kill(int(process.name), signal.SIGKILL)
    return ended


# -- what is committed -----------------------------------------------------------------------------------


def digest(notebook: Notebook) -> str:
    """The same for the same cells, whatever their outputs."""
    cells = [[cell["cell_type"], "".join(cell["source"])] for cell in notebook["cells"]]
    return hashlib.sha256(json.dumps(cells).encode()).hexdigest()


def outputs_of(notebook: Notebook) -> list[Any]:
    """All outputs, in order."""
    return [output for cell in notebook["cells"] for output in cell.get("outputs", [])]


def texts_of(notebook: Notebook) -> list[str]:
    """What the outputs say in words."""
    texts = []
    for output in outputs_of(notebook):
        said = {"text/plain": output["text"]} if "text" in output else output.get("data", {})
        texts += ["".join(part) for kind, part in said.items() if not kind.startswith("image/")]
    return texts


def tidy(notebook: Any) -> None:
    """Take out what differs without a reason: times, versions, how the kernel cut its words into pieces."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        "shardqueue": {"outputs_of": digest(notebook)},
    }
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = _joined(cell.outputs)


def _joined(outputs: list[Any]) -> list[Any]:
    """Join the pieces of one stream; pictures follow the words of their cell."""
    words = [output for output in outputs if output.output_type == "stream"]
    joined = []
    for _, pieces in groupby(words, key=lambda output: output.name):
        first, *rest = pieces
        first.text = "".join([first.text, *(piece.text for piece in rest)])
        joined.append(first)
    return joined + [output for output in outputs if output.output_type != "stream"]


def faults(notebook: Notebook, size: int) -> list[str]:
    """What keeps a notebook from being committed."""
    found = [] if size <= MOST_OF_A_NOTEBOOK else [f"it has {size:,} bytes, more than {MOST_OF_A_NOTEBOOK:,}"]
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    if [cell["execution_count"] for cell in code] != list(range(1, len(code) + 1)):
        found.append("its cells were not executed once each, in order")
    if notebook["metadata"].get("shardqueue", {}).get("outputs_of") != digest(notebook):
        found.append("its outputs are of other cells: run `python tests/test_notebooks.py`")
    if any(cell["metadata"] for cell in notebook["cells"]):
        found.append("its cells have metadata")
    for output in outputs_of(notebook):
        if output["output_type"] == "error" or output.get("name") == "stderr":
            found.append(f"an output tells of an error or a warning: {str(output)[:500]}")
        picture = base64.b64decode("".join(output.get("data", {}).get("image/png", "")))
        if len(picture) > MOST_OF_A_PICTURE:
            found.append(f"a picture has {len(picture):,} bytes, more than {MOST_OF_A_PICTURE:,}")
    for text in texts_of(notebook):
        if "\x1b" in text:
            found.append(f"an output has escape sequences: {text[:200]!r}")
        if re.search(PATHS, text):
            found.append(f"an output names folders of a machine: {text[:500]!r}")
    return found


# -- tests -----------------------------------------------------------------------------------------------


def stored(name: str) -> tuple[Notebook, int]:
    """A committed notebook, as JSON, and its size in bytes."""
    text = (FOLDER / f"{name}.ipynb").read_bytes()
    notebook: Notebook = json.loads(text)
    return notebook, len(text)


def test_these_are_all() -> None:
    assert sorted(path.name for path in FOLDER.iterdir() if not path.name.startswith(".")) == [
        f"{name}.ipynb" for name in NAMES
    ]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_committed_is_small_in_order_and_of_these_cells(name: str) -> None:
    notebook, size = stored(name)
    assert (notebook["nbformat"], notebook["metadata"]["kernelspec"]["name"]) == (4, "python3")
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    assert faults(notebook, size) == []
    assert outputs_of(notebook), "the outputs are missing"


@pytest.mark.parametrize("name", NAMES)
def test_each_section_is_said_before_it_is_done_and_each_script_is_python(name: str) -> None:
    notebook, _ = stored(name)
    kinds = [cell["cell_type"] for cell in notebook["cells"]]
    assert kinds[0] == "markdown"
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            ast.parse(re.sub(r"\A%%writefile .*\n", "", "".join(cell["source"])))


def test_a_changed_cell_and_outputs_that_should_not_be_there_are_found() -> None:
    notebook, size = stored(NAMES[0])
    said = {"output_type": "stream", "name": "stdout", "text": ["wrote /tmp/x\n"]}
    notebook["cells"][-1]["outputs"] = [said, {**said, "name": "stderr", "text": "\x1b[31mred"}]
    notebook["cells"][-1]["source"] = ["pass"]
    found = faults(notebook, size * 100)
    assert [fault.split(":")[0] for fault in found] == [
        f"it has {size * 100:,} bytes, more than {MOST_OF_A_NOTEBOOK:,}",
        "its outputs are of other cells",
        "an output tells of an error or a warning",
        "an output names folders of a machine",
        "an output has escape sequences",
    ]


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_it_runs_whole(name: str) -> None:
    nbformat = _jupyter("nbformat")
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    run(notebook)
    tidy(notebook)
    nbformat.validate(notebook)
    assert faults(json.loads(nbformat.writes(notebook)), 0) == []


@pytest.mark.full
@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("assert 1 == 2, 'not so'", "not so"),
        ("import pathlib; pathlib.Path('left').touch()", "files are left"),
        (
            "import subprocess\nchild = subprocess.Popen(['sleep', '600'], start_new_session=True)",
            "processes are left",
        ),
    ],
)
def test_a_cell_that_fails_or_leaves_something_is_found(cell: str, said: str) -> None:
    notebook = _jupyter("nbformat").v4.new_notebook()
    notebook.cells = [_jupyter("nbformat").v4.new_code_cell(source) for source in ("pass", cell)]
    with pytest.raises(Exception, match=said):
        run(notebook)


# -- making the outputs anew -----------------------------------------------------------------------------


def main(parts: list[str]) -> int:
    """Execute the notebooks whose names hold one of the parts, all by default, and keep their outputs."""
    nbformat, bad = _jupyter("nbformat"), 0
    for name in NAMES:
        if parts and not any(part in name for part in parts):
            continue
        file = FOLDER / f"{name}.ipynb"
        notebook = nbformat.read(file, as_version=4)
        run(notebook)
        tidy(notebook)
        nbformat.write(notebook, file)
        found = faults(*stored(name))
        if any(socket.gethostname() in text for text in texts_of(notebook)):
            found.append("an output names this machine")
        print("\n".join([f"{name}: written, {file.stat().st_size:,} bytes", *found]))
        bad += len(found)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
