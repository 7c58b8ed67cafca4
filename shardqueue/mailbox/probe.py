"""Prove that a store's create is exclusive before anything is claimed on it.

The probe creates a key, creates it again with other bytes, and reads it: the second create must fail and the
first bytes must stand. That catches a client that drops the condition and a server that ignores it, whatever
they promise. It cannot catch a store that checks and then acts: only knowing the store can, so `open_mailbox`
also goes by a list of stores. Five requests on an object store, under a random key that is removed again.

For a store that is in no list, and that somebody wants all the same, there are races: threads create one key at
once, and exactly one may win. They find a gap of milliseconds between check and write. A narrow one can get by:
fsspec's own way on a local folder lets two win in a third of the races on a quiet machine, and on a busy one thirty
races now and then find nothing. That is why passing them only allows a store with a warning.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from shardqueue.errors import MailboxError, MailboxRefusedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardqueue.mailbox import Mailbox

_REMEDY = (
    "two learners would train the same unit; use a local or NFS folder, or an S3 server that honours "
    "If-None-Match on PUT (AWS, SeaweedFS >= 4.48, a current MinIO or Ceph)"
)


def prove_exclusive(mailbox: Mailbox, key_prefix: str = "probe/") -> None:
    """Create one key twice and see that the first bytes stand.

    Raises:
        MailboxRefusedError: the store's create is not exclusive.
        MailboxError: the store could not be used or reached.
    """
    key = f"{key_prefix}{os.urandom(12).hex()}"
    first, second = (json.dumps({"probe": os.urandom(12).hex()}).encode() for _ in range(2))
    created = mailbox.put_if_absent(key, first)
    try:
        if not created:
            raise _refusal(mailbox, "said that a key nobody had created existed")
        if mailbox.put_if_absent(key, second):
            raise _refusal(mailbox, "created one key twice")
        if mailbox.get(key) != first:
            raise _refusal(mailbox, "did not keep the bytes of the first create")
    finally:
        with contextlib.suppress(MailboxError):
            mailbox.delete([key])


def prove_races(
    mailbox: Mailbox, key_prefix: str = "probe/", *, races: int = 30, contenders: int = 8
) -> None:
    """Let `contenders` threads create one key at once, `races` times, and see that one wins and its bytes stand.

    Raises:
        MailboxRefusedError: a race had another number of winners, or the store kept other bytes than the winner's.
        MailboxError: the store could not be used or reached.
    """
    keys = [f"{key_prefix}{os.urandom(12).hex()}" for _ in range(races)]
    try:
        with ThreadPoolExecutor(contenders, thread_name_prefix="shardqueue-probe") as threads:
            for key in keys:
                winners, kept = race([mailbox] * contenders, key, threads)
                if winners != 1:
                    raise _refusal(mailbox, f"let {winners} of {contenders} threads create one key")
                if not kept:
                    raise _refusal(mailbox, "did not keep the bytes of the one that created a key")
    finally:
        with contextlib.suppress(MailboxError):
            mailbox.delete(keys)


def race(contenders: Sequence[Mailbox], key: str, threads: ThreadPoolExecutor) -> tuple[int, bool | None]:
    """Let all contenders create `key` at once, each in a thread of `threads`, which has as many.

    Returns:
        How many were told that they won; and where it is one, whether the store keeps the bytes of that one (None:
        it shows nothing).
    """
    bodies = [json.dumps({"probe": os.urandom(12).hex()}).encode() for _ in contenders]
    together = threading.Barrier(len(contenders))

    def create(mailbox: Mailbox, body: bytes) -> bool:
        together.wait()
        return mailbox.put_if_absent(key, body)

    try:
        won = list(threads.map(create, contenders, bodies))
    except BaseException:
        together.abort()  # interrupted before all were at the line: those that wait would wait for ever
        raise
    if sum(won) != 1:
        return sum(won), False
    held = contenders[0].get(key)
    return 1, None if held is None else held == bodies[won.index(True)]


def _refusal(mailbox: Mailbox, saw: str) -> MailboxRefusedError:
    return MailboxRefusedError(f"{mailbox!r} {saw}: it is a store whose create is not exclusive; {_REMEDY}")
