"""Where `--watch` shows what it sees: one view that is drawn over on a terminal, lines in a pipe, or JSON lines."""

from __future__ import annotations

import json
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Group
from rich.live import Live
from rich.text import Text

from shardqueue.status.report import Found, document, line, new_console, view
from shardqueue.terminal import visible

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console


@contextmanager
def screen(as_json: bool) -> Iterator[Callable[[Found | str], None]]:
    """What to tell each look to, until the block is left."""
    console = new_console()
    if as_json:
        yield _print_json
    elif console.is_interactive:
        with Live(console=console, auto_refresh=False) as live:
            yield _Drawn(live, console).show
    else:
        yield _Lines().show


class _Drawn:
    """One view, drawn over; when a look fails, the last one stays, and the reason comes below it."""

    def __init__(self, live: Live, console: Console) -> None:
        self._live, self._console = live, console
        self._last: Found | None = None

    def show(self, found: Found | str) -> None:
        if isinstance(found, Found):
            self._last = found
        parts = [] if self._last is None else [view(self._last, self._console)]
        if isinstance(found, str):
            parts.append(Text(visible(found), style="bold red"))
        self._live.update(Group(*parts), refresh=True)


class _Lines:
    """A line whenever it says something new."""

    def __init__(self) -> None:
        self._last = ""

    def show(self, found: Found | str) -> None:
        told = found if isinstance(found, str) else line(found)
        if told != self._last:
            self._last = told
            print(f"{time.strftime('%H:%M:%S')} {visible(told)}", flush=True)


def _print_json(found: Found | str) -> None:
    told = {"error": found} if isinstance(found, str) else document(found)
    print(json.dumps(told), flush=True)
