"""The mailbox that all ranks of the imbalance benchmark share, and what they tell each other."""

from __future__ import annotations

import shutil
import socket
import sys
import tempfile
import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from shardqueue import open_mailbox
from shardqueue.errors import InvalidInputError, MailboxError

if TYPE_CHECKING:
    from collections.abc import Iterator


def to_all(value: Any) -> list[Any]:
    """What each rank gives, to all of them."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def say(text: str) -> None:
    """Tell how far it is, once."""
    if dist.get_rank() == 0:
        print(f"imbalance: {text}", file=sys.stderr, flush=True)


@contextmanager
def mailbox_for_all(given: str) -> Iterator[str]:
    """A new prefix that all ranks reach, checked; a temporary folder is removed again, unless a rank fails.

    Raises:
        InvalidInputError: there are several machines, and no mailbox was named.
        MailboxError: a rank does not see what rank 0 wrote; it is named.
    """
    hosts = sorted(set(to_all(socket.gethostname())))
    if not given and len(hosts) > 1:
        bound = f"a folder or a bucket that all of {', '.join(hosts)} reach"
        raise InvalidInputError(
            "mailbox", given, bound, "pass --mailbox s3://bucket/prefix, or a shared folder"
        )
    made = tempfile.mkdtemp(prefix="shardqueue-imbalance-") if dist.get_rank() == 0 and not given else ""
    own, nonce = made or f"{given.rstrip('/')}/imbalance-{uuid.uuid4().hex[:8]}", uuid.uuid4().hex
    url, nonce = to_all((own, nonce))[0]
    check_shared(url, nonce)
    yield url
    dist.barrier()
    if made:
        shutil.rmtree(made, ignore_errors=True)


def check_shared(url: str, nonce: str) -> None:
    """Refuse a mailbox in which a rank does not find what rank 0 put there.

    Raises:
        MailboxError: in all ranks, naming those that do not.
    """
    key, failed = "shared-by-all-ranks", ""
    for first in (True, False):
        if first == (dist.get_rank() == 0):
            try:
                mailbox = open_mailbox(url)
                if first:
                    mailbox.put(key, nonce.encode())
                elif mailbox.get(key) != nonce.encode():
                    failed = "does not see what rank 0 wrote there"
            except MailboxError as error:
                failed = f"{error}"
        dist.barrier()
    told = [f"rank {rank} {why}" for rank, why in enumerate(to_all(failed)) if why]
    if told:
        raise MailboxError(f"mailbox {url}: {'; '.join(told)}; pass one that all ranks reach")
