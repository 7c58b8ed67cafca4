"""Single requests to an Azure Blob Storage container, over adlfs.

adlfs reads the options and makes Azure's own client; the requests go to that client, one each, with its retries off.
A create carries `If-None-Match: *`, and every body goes up in a single PUT.

Azure lists from the beginning of a prefix or from a mark it gave, not from a name (newer versions of its API do, on
one level and on some accounts). So keys up to `after` are read and dropped here, and `ObjectMailbox.listing` says
"scan". An account with a hierarchical namespace keeps folders as empty blobs; a body is never empty, so an empty
blob is no key.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import adlfs
from azure.core.exceptions import (
    AzureError,
    ClientAuthenticationError,
    HttpResponseError,
    ResourceNotFoundError,
)
from fsspec.asyn import sync

from shardqueue.mailbox.inherited import leave_open
from shardqueue.mailbox.versions import require_version

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

_CALL_SECONDS = 45.0
_ONCE = {"retry_total": 0, "connection_timeout": 10, "read_timeout": 20}
_REMOVALS_AT_ONCE = 32

_CREDENTIALS = (
    "check the credentials (account_key=, sas_token=, connection_string=), and that they allow to create, read, "
    "write, list and delete blobs in this container (role Storage Blob Data Contributor)"
)
_CONTAINER = "create the container or correct the URL and account_name"
_NO_AZURE = "this is no answer of Azure: correct the endpoint (https:// for http://, if that port speaks TLS)"
_OPTIONS = "correct the options given to open_mailbox"
_REMEDIES = {
    "ContainerNotFound": _CONTAINER,
    "ContainerDisabled": _CONTAINER,
    "InvalidResourceName": _CONTAINER,
    "OutOfRangeInput": _CONTAINER,
    "PublicAccessNotPermitted": _CREDENTIALS,
    "NoAuthenticationInformation": _CREDENTIALS,
    "InvalidAuthenticationInfo": _CREDENTIALS,
    "AccountIsDisabled": "enable the account, or use another",
}
# Of the 4xx, those after which the same request may succeed.
_PASSING = {404, 408, 409, 412, 416, 425, 429}


class AzureStore:
    """See `settling.Store`.

    Args:
        container: the container.
        base: "" or a prefix that ends with "/".
        options: what `adlfs.AzureBlobFileSystem` takes.

    Raises:
        MailboxRefusedError: the installed client is too old.
    """

    page_size = 5000

    def __init__(self, container: str, base: str, options: Mapping[str, Any]) -> None:
        require_version("adlfs", adlfs.__version__, "2024.12.0", "azure")
        forced = {"use_listings_cache": False, "skip_instance_cache": True, "asynchronous": False}
        self._fs: Any = adlfs.AzureBlobFileSystem(**{**options, **forced})
        leave_open(self._fs)
        self._base = base
        self._container: Any = self._fs.service_client.get_container_client(container)

    def create(self, key: str, data: bytes) -> None:
        """See `settling.Store.create`."""
        self._run(self._blob(key).upload_blob, data, length=len(data), overwrite=False)

    def read(self, key: str) -> bytes | None:
        """See `settling.Store.read`."""
        try:
            body: bytes = self._run(self._read, self._blob(key))
        except ResourceNotFoundError as error:
            if _code(error) == "ContainerNotFound":
                raise
            return None
        return body or None

    def write(self, key: str, data: bytes) -> None:
        """See `settling.Store.write`."""
        self._run(self._blob(key).upload_blob, data, length=len(data), overwrite=True)

    def page(self, prefix: str, after: str, more: str | None, limit: int) -> tuple[list[str], str | None]:
        """See `settling.Store.page`."""
        size = self.page_size if after else limit
        blobs, token = self._run(self._page, self._base + prefix, more, size)
        keys = [blob.name[len(self._base) :] for blob in blobs if blob.size]
        return [key for key in keys if key > after][:limit], token

    def remove(self, keys: list[str]) -> None:
        """See `settling.Store.remove`."""
        self._run(self._remove_all, keys)

    def remedy(self, error: Exception) -> str | None:
        """See `settling.Store.remedy`."""
        code = _code(error)
        if code in _REMEDIES:
            return _REMEDIES[code]
        if isinstance(error, ClientAuthenticationError):
            return _CREDENTIALS
        status = error.status_code if isinstance(error, HttpResponseError) else None
        if status in (401, 403):
            return _CREDENTIALS
        if status is not None and 400 <= status < 500 and status not in _PASSING:
            return _OPTIONS if code else _NO_AZURE
        if isinstance(error, AzureError | OSError | EOFError | asyncio.TimeoutError):
            return None
        return _OPTIONS

    def _blob(self, key: str) -> Any:
        return self._container.get_blob_client(self._base + key)

    async def _read(self, blob: Any, **once: Any) -> bytes:
        download = await blob.download_blob(**once)
        return bytes(await download.readall())

    async def _page(
        self, prefix: str, more: str | None, size: int, **once: Any
    ) -> tuple[list[Any], str | None]:
        blobs = self._container.list_blobs(name_starts_with=prefix, results_per_page=size, **once)
        pages = blobs.by_page(continuation_token=more)
        async for page in pages:
            return [blob async for blob in page], pages.continuation_token or None
        return [], None

    async def _remove_all(self, keys: list[str], **once: Any) -> None:
        gate = asyncio.Semaphore(_REMOVALS_AT_ONCE)

        async def remove(key: str) -> None:
            async with gate:
                try:
                    await self._blob(key).delete_blob(**once)
                except ResourceNotFoundError as error:
                    if _code(error) == "ContainerNotFound":
                        raise

        await asyncio.gather(*map(remove, keys))

    def _run(self, function: Callable[..., Coroutine[Any, Any, Any]], *args: Any, **kwargs: Any) -> Any:
        return sync(self._fs.loop, function, *args, timeout=_CALL_SECONDS, **_ONCE, **kwargs)


def _code(error: Exception) -> str:
    """The service's word for what went wrong, or ""."""
    code = getattr(error, "error_code", None)
    return str(getattr(code, "value", code) or "")
