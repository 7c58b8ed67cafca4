"""A mailbox on any other filesystem of fsspec, for those who insist.

No create that is known to be exclusive stands behind it: fsspec's own `pipe_file(mode="create")` asks whether the
file exists and then writes it, and what a filesystem does instead is its own affair. So `open_mailbox` puts it to the
proof first (see `probe`) and warns. What the proof cannot see: a narrow gap between check and write, a reader that
finds a file half written, and a call that never comes back, since only tries are bounded here, not each of them.

Listings are off the cache and read everything under the prefix.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from fsspec.core import url_to_fs

from shardqueue.errors import InvalidInputError
from shardqueue.mailbox.objects import ObjectMailbox
from shardqueue.mailbox.places import Place, shown

if TYPE_CHECKING:
    from collections.abc import Mapping

_NO_FILE = (FileNotFoundError, IsADirectoryError, NotADirectoryError)


class UnprovenMailbox(ObjectMailbox):
    """A mailbox at a URL of fsspec.

    Args:
        url: `scheme://...`, or a chain of them.
        deadline: seconds after which one call is not tried again.
        storage_options: what the filesystem takes.
    """

    @property
    def listing(self) -> str:
        """What a listing costs (see `Mailbox`)."""
        return "scan"

    @staticmethod
    def _parsed(url: str) -> tuple[Place, dict[str, Any]]:
        scheme, separator, rest = url.partition("://")
        if not separator:
            raise InvalidInputError(
                "url", shown(url), "scheme://...", "write the chain's last link with its scheme"
            )
        return Place(scheme, rest.rstrip("/"), ""), {}

    def _store(self) -> UnprovenStore:
        return UnprovenStore(f"{self._place.scheme}://{self._place.bucket}", self._options)


class UnprovenStore:
    """See `settling.Store`.

    Args:
        url: `scheme://...`, or a chain of them.
        options: what the filesystem takes.
    """

    page_size = 10**9

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        forced = {"use_listings_cache": False, "skip_instance_cache": True}
        found = url_to_fs(url, **{**options, **forced})
        self._fs: Any = found[0]
        self._root: str = found[1].rstrip("/")

    def create(self, key: str, data: bytes) -> None:
        """See `settling.Store.create`."""
        self._pipe(key, data, "create")

    def read(self, key: str) -> bytes | None:
        """See `settling.Store.read`."""
        try:
            return bytes(self._fs.cat_file(self._path(key)))
        except _NO_FILE:
            return None

    def write(self, key: str, data: bytes) -> None:
        """See `settling.Store.write`."""
        self._pipe(key, data, "overwrite")

    def page(self, prefix: str, after: str, more: str | None, limit: int) -> tuple[list[str], str | None]:  # noqa: ARG002
        """See `settling.Store.page`."""
        folder = prefix.rpartition("/")[0]
        within = f"{self._root}/{folder}" if folder else self._root
        try:
            paths: list[str] = self._fs.find(within, detail=False)
        except _NO_FILE:
            return [], None
        keys = (path[len(self._root) :].lstrip("/") for path in paths)
        return sorted(key for key in keys if key.startswith(prefix) and key > after)[:limit], None

    def remove(self, keys: list[str]) -> None:
        """See `settling.Store.remove`."""
        for key in keys:
            with contextlib.suppress(*_NO_FILE):
                self._fs.rm_file(self._path(key))

    def remedy(self, error: Exception) -> str | None:
        """See `settling.Store.remedy`."""
        if isinstance(error, PermissionError):
            return "check the credentials and what they allow"
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            return "create the folder or bucket, or correct the URL"
        if isinstance(error, OSError | EOFError):
            return None
        return "use another store, or correct the options given to open_mailbox"

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _pipe(self, key: str, data: bytes, mode: str) -> None:
        path = self._path(key)
        try:
            self._fs.pipe_file(path, data, mode=mode)
        except FileNotFoundError:
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._fs.pipe_file(path, data, mode=mode)
