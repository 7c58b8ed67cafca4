"""A mailbox in an object store.

`ObjectMailbox` keeps URL and options (see `places`), and in each process that uses it makes a store, whose single
requests are settled into verbs (see `settling`). A pickle carries just URL and options; neither its `repr` nor any
message holds a credential.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from shardqueue.errors import InvalidInputError, MailboxError, MailboxRefusedError
from shardqueue.mailbox.names import check_body, check_key, check_keys, check_listing
from shardqueue.mailbox.places import hider, parse
from shardqueue.mailbox.settling import Settler, said

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardqueue.mailbox.places import Place
    from shardqueue.mailbox.settling import Store

_CLIENTS = {"s3": "'s3fs>=2026.2.0'", "gs": "'shardqueue[gcs]'", "az": "'shardqueue[azure]'"}


class ObjectMailbox:
    """A mailbox under `scheme://bucket/prefix`.

    Args:
        url: `s3://`, `gs://` or `az://`, a bucket (a container), and a prefix or none. `s3a`, `gcs`, `abfs` and
            `abfss` are other names of the three; Azure's may be `abfss://container@account.dfs.core.windows.net/prefix`.
        deadline: seconds after which one call is not tried again.
        storage_options: what the scheme's fsspec filesystem takes.
    """

    def __init__(self, url: str, *, deadline: float = 60.0, **storage_options: Any) -> None:
        if not deadline > 0:
            raise InvalidInputError("deadline", deadline, "more than 0 seconds", "pass 60")
        self._place, implied = self._parsed(url)
        self._deadline, self._options = deadline, {**implied, **storage_options}
        self._settlers: dict[int, Settler] = {}
        self._settler()

    @property
    def listing(self) -> str:
        """What a listing costs: "page", or on Azure "scan" (see `Mailbox`)."""
        return "scan" if self._place.scheme == "az" else "page"

    def expect_answer(self, seconds: float) -> None:
        """Until this process had a first answer, give up after `seconds` on a server that seems not to be there."""
        self._settler().expect_answer(seconds)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """See `Mailbox.put_if_absent`."""
        check_key(key)
        check_body(data)
        return self._settler().put_if_absent(key, data)

    def get(self, key: str) -> bytes | None:
        """See `Mailbox.get`."""
        check_key(key)
        return self._settler().get(key)

    def list(self, prefix: str, after: str = "", limit: int | None = None) -> list[str]:
        """See `Mailbox.list`; one request for each 1,000 keys returned (on Azure, 5,000 keys under `prefix`).

        On a store that sorts folder by folder (SeaweedFS does, AWS does not), `after` is exact among keys of
        one folder, and so are whole listings. Across folders it may leave out keys of a folder whose name is the
        beginning of one in `after`.
        """
        check_listing(prefix, after, limit)
        return self._settler().list_keys(prefix, after, limit)

    def put(self, key: str, data: bytes) -> None:
        """See `Mailbox.put`."""
        check_key(key)
        check_body(data)
        self._settler().put(key, data)

    def delete(self, keys: Iterable[str]) -> None:
        """See `Mailbox.delete`."""
        self._settler().delete(check_keys(keys))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._shown!r})"

    def __eq__(self, other: object) -> bool:
        """Whether both lead to the same prefix with the same options."""
        if not isinstance(other, ObjectMailbox):
            return NotImplemented
        mine, theirs = ((type(m), m._place, m._options) for m in (self, other))
        return mine == theirs

    def __hash__(self) -> int:
        return hash(self._place)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_settlers": {}}

    @property
    def _shown(self) -> str:
        return self._place.shown

    @staticmethod
    def _parsed(url: str) -> tuple[Place, dict[str, Any]]:
        return parse(url)

    def _store(self) -> Store:
        place = self._place
        base = f"{place.prefix}/" if place.prefix else ""
        if place.scheme == "gs":
            from shardqueue.mailbox.gcs import GcsStore

            return GcsStore(place.bucket, base, self._options)
        if place.scheme == "az":
            from shardqueue.mailbox.azure import AzureStore

            return AzureStore(place.bucket, base, self._options)
        from shardqueue.mailbox.s3 import S3Store

        return S3Store(place.bucket, base, self._options)

    def _settler(self) -> Settler:
        # A store made before a fork must not be used, nor finalised, after it: each process has its own entry.
        found = self._settlers.get(os.getpid())
        return found or self._settlers.setdefault(os.getpid(), self._connected())

    def _connected(self) -> Settler:
        hide = hider(self._options)
        try:
            store = self._store()
        except MailboxError:
            raise
        except ImportError as error:
            client = _CLIENTS.get(self._place.scheme, "what is missing")
            raise MailboxRefusedError(f"{self._shown}: {hide(str(error))}; pip install {client}") from error
        except Exception as error:
            remedy = "correct the URL and the options given to open_mailbox"
            raise MailboxError(f"{self._shown} cannot be opened: {said(error, hide)}; {remedy}") from None
        return Settler(store, self._shown, self._deadline, hide)
