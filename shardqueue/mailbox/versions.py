"""How old a client may be."""

from __future__ import annotations

import re

from shardqueue.errors import MailboxRefusedError


def require_version(package: str, installed: str, floor: str, extra: str) -> None:
    """Raise `MailboxRefusedError` if `installed` is an older year and month than `floor`."""
    found = re.match(r"(\d+)\.(\d+)", installed)
    year, month = floor.split(".")[:2]
    if found and (int(found[1]), int(found[2])) < (int(year), int(month)):
        raise MailboxRefusedError(
            f"{package} {installed} is older than any whose create is known to be exclusive; "
            f"pip install 'shardqueue[{extra}]', which asks for {package}>={floor}"
        )
