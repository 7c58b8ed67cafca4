"""The floors of the library: imports go to the same floor or a lower one, and to no module in a circle.

`FLOORS` is the one table; a module that is not in it fails the test. What is imported inside a function, or under
TYPE_CHECKING, counts for the floors like any other import, since it is knowledge all the same: a lower floor must not
know a higher one, not even its types. It does not count for circles: those matter only while modules are imported.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from importlib.util import find_spec
from pathlib import Path

import pytest

import shardqueue

OF_EXTRAS = {"mailbox.gcs": "gcsfs", "mailbox.azure": "adlfs"}
"""Modules that cannot be imported without an extra, and what it installs."""

ROOT = Path(shardqueue.__file__).parent

FLOORS = {
    # 0 words
    "errors": 0,
    "clock": 0,
    "units": 0,
    "plan": 0,
    "remaining": 0,
    "trained": 0,
    "progress": 0,
    "intervals": 0,
    "throughput": 0,
    "shuffle": 0,
    # 1 store
    "mailbox": 1,
    "mailbox.azure": 1,
    "mailbox.calls": 1,
    "mailbox.faults": 1,
    "mailbox.files": 1,
    "mailbox.gcs": 1,
    "mailbox.inherited": 1,
    "mailbox.memory": 1,
    "mailbox.names": 1,
    "mailbox.objects": 1,
    "mailbox.places": 1,
    "mailbox.probe": 1,
    "mailbox.s3": 1,
    "mailbox.settling": 1,
    "mailbox.versions": 1,
    "mailbox.unproven": 1,
    # 2 protocol
    "account": 2,
    "allowance": 2,
    "records": 2,
    "asks": 2,
    "pace": 2,
    "window": 2,
    "run": 2,
    "state": 2,
    "turns": 2,
    "learner": 2,
    "history": 2,
    "ledger": 2,
    "recovery": 2,
    "claim": 2,
    "claims": 2,
    "watching": 2,
    "channel.report": 2,
    "channel.forwarding": 2,
    "channel.handoff": 2,
    "channel.packing": 2,
    "channel.wire": 2,
    "channel.links": 2,
    "channel.exchange": 2,
    # 3 movement
    "block": 3,
    "callers": 3,
    "channel": 3,
    "channel.broker": 3,
    "channel.ends": 3,
    "channel.forks": 3,
    "channel.line": 3,
    "channel.processes": 3,
    "channel.threads": 3,
    "channel.watch": 3,
    "crew": 3,
    "farewell": 3,
    "bell": 3,
    "feed": 3,
    "gathering": 3,
    "guard": 3,
    "host": 3,
    "loading": 3,
    "logreader": 3,
    "logwriter": 3,
    "opening": 3,
    "peers": 3,
    "queues": 3,
    "rollback": 3,
    "session": 3,
    "source": 3,
    "entered": 3,
    "preemption": 3,
    "tracking": 3,
    "workers": 3,
    # 4 training
    "agreement": 4,
    "gradients": 4,
    "assembly": 4,
    "ahead": 4,
    "flags": 4,
    "replicas": 4,
    "batches": 4,
    "buffers": 4,
    "flat": 4,
    "stock": 4,
    "elastic": 4,
    "tokens": 4,
    "lockstep": 4,
    "supply": 4,
    "dataset": 4,
    "lightning": 4,
    "lightning.callback": 4,
    "lightning.datamodule": 4,
    "lightning.evaluation": 4,
    "lightning.leftovers": 4,
    "lightning.restart": 4,
    "lightning.numbers": 4,
    "lightning.sources": 4,
    "lightning.stay": 4,
    "lightning.steplogs": 4,
    "lightning.strategy": 4,
    "rows": 4,
    # 5 windows
    "audit": 5,
    "audit.accounts": 5,
    "audit.command": 5,
    "audit.evidence": 5,
    "audit.expectation": 5,
    "audit.report": 5,
    "clean": 5,
    "clean.command": 5,
    "clean.ownership": 5,
    "clean.removal": 5,
    "clean.survey": 5,
    "status": 5,
    "status.command": 5,
    "status.observing": 5,
    "status.passes": 5,
    "status.report": 5,
    "status.runs": 5,
    "status.screens": 5,
    "status.spending": 5,
    "status.standing": 5,
    "demo": 5,
    "demo.arithmetic": 5,
    "demo.command": 5,
    "demo.document": 5,
    "demo.elastic": 5,
    "demo.elastic.document": 5,
    "demo.elastic.options": 5,
    "demo.elastic.rank": 5,
    "demo.elastic.report": 5,
    "demo.elastic.stage": 5,
    "demo.elastic.training": 5,
    "demo.fleet": 5,
    "demo.lines": 5,
    "demo.live": 5,
    "demo.model": 5,
    "demo.node": 5,
    "demo.options": 5,
    "demo.picture": 5,
    "demo.report": 5,
    "demo.service": 5,
    "demo.stage": 5,
    "demo.text": 5,
    "doctor": 5,
    "doctor.belongings": 5,
    "doctor.command": 5,
    "doctor.costs": 5,
    "doctor.examination": 5,
    "doctor.findings": 5,
    "doctor.permissions": 5,
    "doctor.report": 5,
    "pipeline": 5,
    "prices": 5,
    "simulate": 5,
    "simulate.command": 5,
    "simulate.courses": 5,
    "simulate.driver": 5,
    "simulate.findings": 5,
    "simulate.grammar": 5,
    "simulate.options": 5,
    "simulate.progress": 5,
    "simulate.scenario": 5,
    "simulate.show": 5,
    "simulate.steps": 5,
    "terminal": 5,
    "timeline": 5,
    "timeline.chains": 5,
    "timeline.chart": 5,
    "timeline.command": 5,
    "timeline.document": 5,
    "timeline.lanes": 5,
    "timeline.logs": 5,
    "timeline.making": 5,
    "timeline.page": 5,
    "timeline.panels": 5,
    "timeline.picture": 5,
    "timeline.processes": 5,
    "timeline.reading": 5,
    "timeline.strips": 5,
    "timeline.terminal": 5,
    "timeline.words": 5,
    # 6 doors
    "": 6,
    "cli": 6,
    "__main__": 6,
}
"""Module, without the package's name, to floor."""
HEAVY = ("torch", "lightning")
"""What floors 0 to 3 do without."""
OF_TORCH = {"SharedQueueDataset"}
"""Public names that are nothing without torch."""


@dataclass(frozen=True)
class Import:
    """One import of a module of ours: from where, of what, and whether it happens when the importer is imported."""

    importer: str
    imported: str
    line: int
    at_once: bool


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


def imports(name: str, path: Path) -> list[Import]:
    found: list[Import] = []

    def walk(node: ast.AST, at_once: bool) -> None:
        for child in ast.iter_child_nodes(node):
            line = getattr(child, "lineno", 0)
            found.extend(Import(name, imported, line, at_once) for imported in names(child))
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                for part in child.body:
                    walk(ast.Module([part], []), False)
                for part in child.orelse:
                    walk(ast.Module([part], []), at_once)
            else:
                later = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                walk(child, at_once and not later)

    walk(ast.parse(path.read_text()), True)
    return found


def names(node: ast.AST) -> list[str]:
    """The modules of ours that a statement imports; a package's own name is ""."""
    if isinstance(node, ast.Import):
        wanted = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "relative imports are not read here"
        wanted = [node.module or ""]
        submodules = [f"{node.module}.{alias.name}" for alias in node.names]
        ours = [name for name in submodules if name.removeprefix("shardqueue.") in KNOWN]
        wanted = ours if len(ours) == len(submodules) else wanted + ours
    else:
        return []
    inside = [name for name in wanted if name == "shardqueue" or name.startswith("shardqueue.")]
    return [name.removeprefix("shardqueue").removeprefix(".") for name in inside]


KNOWN = modules()
IMPORTS = [one for name, path in KNOWN.items() for one in imports(name, path)]


def wrong(found: list[Import]) -> list[str]:
    return [
        f"{one.importer or '__init__'}:{one.line} imports {one.imported or '__init__'}"
        for one in found
        if FLOORS.get(one.imported, 0) > FLOORS.get(one.importer, 6)
    ]


def circle(found: list[Import]) -> list[str]:
    graph: dict[str, set[str]] = {}
    for one in found:
        if one.at_once:
            graph.setdefault(one.importer, set()).add(one.imported)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_every_module_has_a_floor() -> None:
    assert sorted(set(KNOWN) - set(FLOORS)) == [], "give the new module a floor in FLOORS"
    assert sorted(set(FLOORS) - set(KNOWN)) == [], "take what is gone out of FLOORS"


def test_imports_go_to_the_same_floor_or_a_lower_one() -> None:
    assert len(IMPORTS) > 50
    assert wrong(IMPORTS) == []


def test_nothing_is_imported_in_a_circle() -> None:
    assert circle(IMPORTS) == []


def test_the_package_itself_is_for_doors() -> None:
    """Its lazy names are imports too."""
    homes: dict[str, str] = shardqueue._HOMES
    assert set(homes.values()) <= set(FLOORS)
    lower = [one.importer for one in IMPORTS if one.imported == "" and FLOORS[one.importer] < 6]
    assert lower == []


class TestTheReader:
    """What the checks above would have to catch."""

    def read(self, tmp_path: Path, text: str, name: str = "pace") -> list[Import]:
        path = tmp_path / "module.py"
        path.write_text(text)
        return imports(name, path)

    @pytest.mark.parametrize(
        "text",
        [
            "from shardqueue.feed import Feed",
            "import shardqueue.feed",
            "from shardqueue import feed",
            "def later():\n    from shardqueue.feed import Feed",
            "if TYPE_CHECKING:\n    from shardqueue.feed import Feed",
            "import typing\nif typing.TYPE_CHECKING:\n    import shardqueue.feed",
            "try:\n    import shardqueue.feed\nexcept ImportError:\n    pass",
            "from shardqueue import __version__",
        ],
    )
    def test_an_import_of_a_higher_floor_is_seen_wherever_it_is(self, tmp_path: Path, text: str) -> None:
        assert len(wrong(self.read(tmp_path, text))) == 1

    def test_lower_floors_and_others_packages_are_fine(self, tmp_path: Path) -> None:
        text = "import json\nfrom shardqueue.errors import ClosedError\nfrom shardqueue.mailbox import calls"
        assert wrong(self.read(tmp_path, text)) == []

    def test_a_circle_is_seen_unless_it_is_made_later(self, tmp_path: Path) -> None:
        there = self.read(tmp_path, "from shardqueue.window import Window")
        back = "from shardqueue.pace import Pace"
        assert circle(there + self.read(tmp_path, back, "window")) != []
        assert circle(there + self.read(tmp_path, f"def later():\n    {back}", "window")) == []
        assert circle(there + self.read(tmp_path, f"if TYPE_CHECKING:\n    {back}", "window")) == []


# -- what comes with an import -------------------------------------------------------------------------------


def loaded_by(statements: str) -> set[str]:
    """Top-level packages in `sys.modules` of a fresh interpreter after these statements."""
    ask = "import json, sys; print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    script = f"{statements}\n{ask}"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    return set(json.loads(done.stdout))


def test_floors_0_to_3_import_neither_torch_nor_lightning() -> None:
    lower = [
        name for name, floor in FLOORS.items() if floor <= 3 and find_spec(OF_EXTRAS.get(name, "shardqueue"))
    ]
    loaded = loaded_by("\n".join(f"import shardqueue.{name}" for name in lower))
    assert "shardqueue" in loaded
    assert loaded.isdisjoint(HEAVY)


def test_the_package_imports_nothing_heavy_before_it_is_used() -> None:
    assert loaded_by("import shardqueue").isdisjoint({*HEAVY, "fsspec", "numpy", "msgspec", "s3fs", "rich"})


def test_the_public_names_on_folders_import_no_store_client() -> None:
    names = sorted(set(shardqueue.__all__) - OF_TORCH)
    loaded = loaded_by(f"from shardqueue import {', '.join(names)}")
    assert loaded.isdisjoint({*HEAVY, "s3fs", "botocore", "numpy"})


@pytest.mark.torch
def test_the_public_surface_is_what_can_be_imported() -> None:
    script = "import shardqueue\nfrom shardqueue import *\nassert set(shardqueue.__all__) <= set(globals())"
    assert "shardqueue" in loaded_by(script)
    homes: dict[str, str] = shardqueue._HOMES
    assert sorted(shardqueue.__all__) == sorted(homes)
    assert set(shardqueue.__all__) <= set(dir(shardqueue))
    tree = ast.parse((ROOT / "__init__.py").read_text())
    typed = {
        alias.name: (node.module or "").removeprefix("shardqueue.")
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == homes


def test_any_other_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"shardqueue.*no_such_name"):
        _ = shardqueue.no_such_name
