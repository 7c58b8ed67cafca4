"""Single requests to a Google Cloud Storage bucket over gcsfs.

gcsfs gives what it is good at: credentials, their renewal, and a session on fsspec's loop. The requests are written
here, against the JSON API, because every function of gcsfs that makes one tries again by itself (six times, up to a
minute) and turns statuses into errors that no longer tell a missing bucket from a missing object. So the condition of
a create, `ifGenerationMatch=0`, does not depend on the version of the client, and an upload is one POST, which no
layer below sends twice.

An upload has two parts, the object's name and its bytes; the emulator in common use honours the condition in this
form only. A page starts at `after` and a space: keys hold no character below it,
so that is the first one after `after`.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import aiohttp
import gcsfs
from fsspec.asyn import sync
from gcsfs.core import GCSFileSystem
from gcsfs.retry import HttpError
from google.auth.exceptions import GoogleAuthError, TransportError
from yarl import URL

from shardqueue.mailbox.inherited import leave_open
from shardqueue.mailbox.versions import require_version

if TYPE_CHECKING:
    from collections.abc import Mapping

_CALL_SECONDS = 45.0
_TIMEOUT = aiohttp.ClientTimeout(total=40, sock_connect=10, sock_read=20)
_REMOVALS_AT_ONCE = 32

_CREDENTIALS = (
    "check the credentials (token=), and that they allow storage.objects create, delete, get and list on this "
    "bucket and prefix"
)
_BUCKET = "create the bucket or correct the URL (and endpoint_url, when it is not Google's)"
_NO_GCS = "this is no answer of GCS: correct endpoint_url (https:// for http://, if that port speaks TLS)"
_OPTIONS = "correct the options given to open_mailbox"
# Of the 4xx, those after which the same request may succeed.
_PASSING = {408, 409, 412, 425, 429}
_PASSING_REASONS = {"rateLimitExceeded", "userRateLimitExceeded"}


class GcsError(OSError):
    """An answer that is no success.

    Attributes:
        status: of HTTP.
        reason: the API's word for it, or "".
        of_bucket: whether what was not found is the bucket.
    """

    def __init__(self, status: int, body: bytes, asks_bucket: bool) -> None:
        self.reason, message = _reason_and_message(body)
        self.status = status
        missing = status == HTTPStatus.NOT_FOUND
        self.of_bucket = missing and (asks_bucket or "bucket does not exist" in message)
        super().__init__(f"{status}: {message}")


class GcsStore:
    """See `settling.Store`.

    Args:
        bucket: the bucket.
        base: "" or a prefix that ends with "/".
        options: what `gcsfs.GCSFileSystem` takes.

    Raises:
        MailboxRefusedError: the installed client is too old.
    """

    page_size = 1000

    def __init__(self, bucket: str, base: str, options: Mapping[str, Any]) -> None:
        require_version("gcsfs", gcsfs.__version__, "2026.2.0", "gcs")
        self._base = base
        forced = {"use_listings_cache": False, "skip_instance_cache": True, "asynchronous": False}
        # Its successor in newer versions asks Google what kind of bucket this is, whatever the endpoint.
        self._fs: Any = GCSFileSystem(**{**options, **forced})
        leave_open(self._fs)
        self._objects = f"/b/{quote(bucket, safe='')}/o"

    def create(self, key: str, data: bytes) -> None:
        """See `settling.Store.create`."""
        self._upload(key, data, ifGenerationMatch="0")

    def read(self, key: str) -> bytes | None:
        """See `settling.Store.read`."""
        try:
            return self._request("GET", self._path(key), {"alt": "media"})
        except GcsError as error:
            if error.status == HTTPStatus.NOT_FOUND and not error.of_bucket:
                return None
            raise

    def write(self, key: str, data: bytes) -> None:
        """See `settling.Store.write`."""
        self._upload(key, data)

    def page(self, prefix: str, after: str, more: str | None, limit: int) -> tuple[list[str], str | None]:
        """See `settling.Store.page`."""
        query = {
            "prefix": self._base + prefix,
            "maxResults": str(limit),
            "fields": "items(name),nextPageToken",
        }
        if after:
            query["startOffset"] = f"{self._base}{after} "
        if more:
            query["pageToken"] = more
        answer = json.loads(self._request("GET", f"/storage/v1{self._objects}", query))
        keys = [entry["name"][len(self._base) :] for entry in answer.get("items", ())]
        return keys, answer.get("nextPageToken") or None

    def remove(self, keys: list[str]) -> None:
        """See `settling.Store.remove`."""
        headers = self._headers()
        sync(self._fs.loop, self._remove_all, keys, headers, timeout=_CALL_SECONDS)

    def remedy(self, error: Exception) -> str | None:
        """See `settling.Store.remedy`."""
        if isinstance(error, GcsError):
            return _remedy_of(error)
        if isinstance(error, TransportError):
            return None
        if isinstance(error, GoogleAuthError | HttpError):
            return _CREDENTIALS
        if isinstance(error, aiohttp.InvalidURL):
            return _OPTIONS
        if isinstance(error, OSError | EOFError | asyncio.TimeoutError | aiohttp.ClientError | ValueError):
            return None
        return _OPTIONS

    def _path(self, key: str) -> str:
        return f"/storage/v1{self._objects}/{quote(self._base + key, safe='')}"

    def _upload(self, key: str, data: bytes, **condition: str) -> None:
        boundary = os.urandom(16).hex()
        kind = "application/octet-stream"
        body = b"".join(
            [
                f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n".encode(),
                json.dumps({"name": self._base + key, "contentType": kind}).encode(),
                f"\r\n--{boundary}\r\nContent-Type: {kind}\r\n\r\n".encode(),
                data,
                f"\r\n--{boundary}--\r\n".encode(),
            ]
        )
        headers = {"Content-Type": f"multipart/related; boundary={boundary}"}
        path = f"/upload/storage/v1{self._objects}"
        self._request("POST", path, {"uploadType": "multipart", **condition}, body, headers)

    def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        sent = {**self._headers(), **(headers or {})}
        answer: bytes = sync(
            self._fs.loop, self._send, method, path, query, body, sent, timeout=_CALL_SECONDS
        )
        return answer

    def _headers(self) -> dict[str, str]:
        # Renews an expired token, which blocks: so here, in the caller's thread, and not on fsspec's loop.
        headers: dict[str, str] = self._fs._get_headers(None)
        return headers

    async def _remove_all(self, keys: list[str], headers: Mapping[str, str]) -> None:
        gate = asyncio.Semaphore(_REMOVALS_AT_ONCE)

        async def remove(key: str) -> None:
            async with gate:
                try:
                    await self._send("DELETE", self._path(key), {}, None, headers)
                except GcsError as error:
                    if error.status != HTTPStatus.NOT_FOUND or error.of_bucket:
                        raise

        await asyncio.gather(*map(remove, keys))

    async def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: bytes | None,
        headers: Mapping[str, str],
    ) -> bytes:
        session = await self._fs._set_session()
        url = URL(f"{self._fs._location}{path}", encoded=True).update_query(self._fs._get_params(query))
        stream = None if body is None else io.BytesIO(body)
        async with session.request(
            method, url, data=stream, headers=headers, timeout=_TIMEOUT, allow_redirects=False
        ) as answer:
            content = await answer.read()
            if not 200 <= answer.status < 300:
                raise GcsError(answer.status, content, asks_bucket=path.endswith(self._objects))
            return bytes(content)


def _reason_and_message(body: bytes) -> tuple[str, str]:
    """The API's reason and message; its answers for an object's bytes are bare text."""
    text = body.decode(errors="replace").strip()
    try:
        error = json.loads(text)["error"]
        return str(error["errors"][0]["reason"]), str(error["message"])
    except (ValueError, KeyError, TypeError, IndexError):
        return "", text


def _remedy_of(error: GcsError) -> str | None:
    if error.of_bucket:
        return _BUCKET
    if error.status == HTTPStatus.NOT_IMPLEMENTED:
        return "this server cannot create objects exclusively; use another store"
    if error.status >= 500 or error.status in _PASSING or error.reason in _PASSING_REASONS:
        return None
    if error.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return _CREDENTIALS
    return _OPTIONS if error.reason else _NO_GCS
