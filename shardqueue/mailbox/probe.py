"""Prove that a store's create is exclusive before anything is claimed on it.

The probe creates a key, creates it again with other bytes, and reads it: the second create must fail and the
first bytes must stand. That catches a client that drops the condition and a server that ignores it, whatever
they promise. It cannot catch a store that checks and then acts: only knowing the store can, so `open_mailbox`
also goes by a list of stores. Five requests on an object store, under a random key that is removed again.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import TYPE_CHECKING

from shardqueue.errors import MailboxError, MailboxRefusedError

if TYPE_CHECKING:
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


def _refusal(mailbox: Mailbox, saw: str) -> MailboxRefusedError:
    return MailboxRefusedError(f"{mailbox!r} {saw}: it is a store whose create is not exclusive; {_REMEDY}")
