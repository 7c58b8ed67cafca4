"""JSON for people: indented, but for chosen values, each of which is one line."""

from __future__ import annotations

import json
import re


class Lines:
    """The chosen values of one text."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def line(self, value: object) -> str:
        """Return what stands for a value that is to be one line."""
        self._lines.append(json.dumps(value))
        return f"<{len(self._lines) - 1}>"

    def text(self, whole: object) -> str:
        """Return the text of all, with each line in its place."""
        text = json.dumps(whole, indent=1)
        return re.sub(r'"<(\d+)>"', lambda match: self._lines[int(match[1])], text) + "\n"
