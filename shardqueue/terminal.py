"""What the commands share: text that others wrote, made safe to print, and files that they are to write.

A server's answer, a key or a learner's name may hold escape sequences that rewrite the screen, or marks that reverse
the direction of writing. `visible` shows them as escapes; letters of any language stay as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardqueue.errors import InvalidInputError

if TYPE_CHECKING:
    from pathlib import Path


def visible(text: str) -> str:
    r"""Return `text` in one line, with whatever cannot be printed written as an escape such as `\x1b`."""
    return "".join(c if c.isprintable() else _escaped(c) for c in text)


def check_file(option: str, file: Path) -> None:
    """Raise `InvalidInputError` unless `file`, given as `--option`, can be written; it is left as it is."""
    try:
        new = not file.exists()
        file.open("a").close()
        if new:
            file.unlink()
    except OSError as error:
        bound = f"a file that can be written ({error.strerror})"
        raise InvalidInputError(option, str(file), bound, f"pass --{option} PATH") from None


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()
