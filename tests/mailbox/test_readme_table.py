"""The README's table of stores says what the contract shows: where it runs, and what a listing costs there."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
from mailbox_contract import MailboxContract

from shardqueue.errors import MailboxRefusedError
from shardqueue.mailbox import open_mailbox

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
SECTION = README.split("## Which stores can hold a queue\n")[1].split("\n## ")[0]
TABLE = SECTION[SECTION.index("| store |") :].partition("\n\n")[0].splitlines()[2:]
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TABLE]
REFUSED = re.findall(r"`([a-z0-9_]+(?:::|://))`", SECTION.split("Refused")[1].split("\n\n")[0])


def contracts(kind: type[MailboxContract] = MailboxContract) -> set[type[MailboxContract]]:
    below = set(kind.__subclasses__())
    return below | {deeper for each in below for deeper in contracts(each)}


def test_every_store_of_the_table_passes_the_contract_and_no_other() -> None:
    names = [path.stem for path in Path(__file__).parent.glob("test_*.py")]
    for name in sorted(names):
        try:
            importlib.import_module(name)
        except pytest.skip.Exception:  # its client is an extra: read what it says instead
            continue
    shown = {one.store: one.listing for one in contracts() if one.store}
    for name in ("gcs", "azure"):
        text = (Path(__file__).parent / f"test_{name}.py").read_text(encoding="utf-8")
        store = re.search(r'^    store = "(.+)"$', text, re.MULTILINE)
        listing = re.search(r'^    listing = "(.+)"$', text, re.MULTILINE)
        assert store is not None
        shown[store[1]] = listing[1] if listing else "page"
    said = {store: row[3] for row in ROWS for store in row[4].split(", ")}
    assert said == shown


@pytest.mark.parametrize("scheme", REFUSED)
def test_what_is_called_refused_is(scheme: str) -> None:
    url = f"{scheme}file:///x" if scheme.endswith("::") else f"{scheme}host/x"
    with pytest.raises(MailboxRefusedError, match="is refused: "):
        open_mailbox(url)


def test_some_are_refused() -> None:
    assert {"simplecache::", "sftp://", "https://", "hf://"} <= set(REFUSED)
