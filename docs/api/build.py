"""Builds the API reference from the docstrings, by pdoc: `python docs/api/build.py`, then open build/api/index.html.

Everything under a public name is shown, but for the classes in `MEMBERS`: the library's own parts meet in them, and
only what a program uses is for people. Warnings, as of a type that cannot be found, are errors.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pdoc

if TYPE_CHECKING:
    from pdoc.doc import Doc

ROOT = Path(__file__).resolve().parents[2]

MODULES = (
    "shardqueue",
    "shardqueue.lightning",
    "shardqueue.elastic",
    "shardqueue.simulate",
    "shardqueue.mailbox.faults",
    "shardqueue.errors",
)
MEMBERS = {
    "Elastic": {"steps", "close"},
    "ElasticStep": {"first", "reduce", "number", "micro_batches", "samples", "seconds", "waited", "idle"},
    "ElasticStrategy": {"samples"},
    "Session": {"step", "track", "state_dict", "load_state_dict", "flush_log", "rates", "agreed", "run"},
    "SharedQueueCallback": set(),
    "SharedQueueDataModule": {"in_order", "samples"},
    "SharedQueueDataset": {"from_dataset", "set_epoch", "steps", "batches"},
}
"""Class to what is shown of it."""


def is_shown(doc: Doc[Any]) -> bool:
    """Whether people are shown this; what begins with an underscore is left out anyway."""
    owner, _, name = doc.qualname.rpartition(".")
    return not name or name == "__init__" or name in MEMBERS.get(owner, {name})


def build(folder: Path) -> None:
    """Write the pages into `folder`.

    Raises:
        UserWarning: something cannot be documented.
    """
    for name in MODULES:
        import_module(name)
    pdoc.render.configure(docformat="google", template_directory=Path(__file__).parent, show_source=False)
    pdoc.render.env.globals["shown"] = is_shown
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pdoc.pdoc(*MODULES, output_directory=folder)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # this checkout's, whichever is installed
    build(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "api")
