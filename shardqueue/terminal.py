"""Text that others wrote, made safe to print.

A server's answer, a key or a learner's name may hold escape sequences that rewrite the screen, or marks that reverse
the direction of writing. `visible` shows them as escapes; letters of any language stay as they are.
"""

from __future__ import annotations


def visible(text: str) -> str:
    r"""Return `text` in one line, with whatever cannot be printed written as an escape such as `\x1b`."""
    return "".join(c if c.isprintable() else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()
