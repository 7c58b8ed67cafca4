"""Single requests to an S3 bucket over s3fs.

Every layer below is told not to try again, for `Settler` does: s3fs, botocore and aiohttp; time-outs bound each
call. Caches are off, and keys go to the API as they are: s3fs's path functions cut a key at "?versionId=".
A client whose PUT has no If-None-Match drops the condition silently, so it is refused before the first request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import s3fs
from aiobotocore.httpsession import AIOHTTPSession
from botocore.exceptions import (
    BotoCoreError,
    DataNotFoundError,
    NoCredentialsError,
    NoRegionError,
    ParamValidationError,
    PartialCredentialsError,
    ProfileNotFound,
    UnknownEndpointError,
)
from fsspec.asyn import sync

from shardqueue.errors import MailboxRefusedError
from shardqueue.mailbox.inherited import leave_open

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

_CALL_SECONDS = 45.0


class _SendsOnce(AIOHTTPSession):  # type: ignore[misc]
    """aiohttp sends a PUT whose connection was lost once more, unasked: an older log could follow a newer one."""

    async def _get_session(self, proxy_url: str | None) -> Any:
        session = await super()._get_session(proxy_url)
        session._retry_connection = False
        return session


_CONFIG = {
    "http_session_cls": _SendsOnce,
    "connect_timeout": 10,
    "read_timeout": 20,
    "retries": {"max_attempts": 0},
    "max_pool_connections": 32,
}

_CREDENTIALS = (
    "check the credentials, and that they allow Get, Put, Delete and List on this bucket and prefix"
)
_BUCKET = "create the bucket or correct the URL (and endpoint_url, when it is not AWS)"
_REGION = "set AWS_DEFAULT_REGION to the bucket's region, or pass client_kwargs={'region_name': ...}"
_RENEW = "renew the credentials"
_NO_S3 = "this is no answer of S3: correct endpoint_url (https:// for http://, if that port speaks TLS)"
_REMEDIES = {
    "NoSuchBucket": _BUCKET,
    "InvalidBucketName": _BUCKET,
    "PermanentRedirect": _REGION,
    "AuthorizationHeaderMalformed": _REGION,
    "IllegalLocationConstraintException": _REGION,
    "301": _REGION,
    "ExpiredToken": _RENEW,
    "ExpiredTokenException": _RENEW,
    "TokenRefreshRequired": _RENEW,
    "InvalidToken": _CREDENTIALS,
    "MethodNotAllowed": _NO_S3,
    "400": _NO_S3,
    "RequestTimeTooSkewed": "set this machine's clock",
    "NotImplemented": "this server cannot create objects exclusively; use another store",
}
_OPTIONS = "correct the options given to open_mailbox"
_USELESS = (
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
    NoRegionError,
    ParamValidationError,
    UnknownEndpointError,
    DataNotFoundError,
)
# Of the 4xx, those after which the same request may succeed.
_PASSING_STATUS = {404, 408, 409, 412, 425, 429}
_PASSING_CODES = {"RequestTimeout", "IncompleteBody", "BadDigest", "XAmzContentSHA256Mismatch", "SlowDown"}


class S3Store:
    """See `settling.Store`.

    Args:
        bucket: the bucket.
        base: "" or a prefix that ends with "/".
        options: what `s3fs.S3FileSystem` takes.

    Raises:
        MailboxRefusedError: the installed client cannot create exclusively.
    """

    page_size = 1000

    def __init__(self, bucket: str, base: str, options: Mapping[str, Any]) -> None:
        self._bucket, self._base = bucket, base
        forced = {
            "use_listings_cache": False,
            "skip_instance_cache": True,
            "max_concurrency": 1,
            "asynchronous": False,
            "config_kwargs": {**_CONFIG, **(options.get("config_kwargs") or {})},
        }
        self._fs: Any = s3fs.S3FileSystem(**{**options, **forced})
        leave_open(self._fs)
        self._fs.retries = 1
        self._fs.connect()
        require_conditional_put(self._fs.s3.meta.service_model)

    def create(self, key: str, data: bytes) -> None:
        """See `settling.Store.create`."""
        self._call("put_object", Key=self._base + key, Body=data, IfNoneMatch="*")

    def read(self, key: str) -> bytes | None:
        """See `settling.Store.read`."""
        try:
            body: bytes = self._run(self._read, self._base + key)
        except FileNotFoundError as error:
            if _answer(error)[0] == "NoSuchBucket":
                raise
            return None
        return body

    def write(self, key: str, data: bytes) -> None:
        """See `settling.Store.write`."""
        self._call("put_object", Key=self._base + key, Body=data)

    def page(self, prefix: str, after: str, more: str | None, limit: int) -> tuple[list[str], str | None]:
        """See `settling.Store.page`."""
        start = {"ContinuationToken": more} if more else {"StartAfter": self._base + after} if after else {}
        answer = self._call("list_objects_v2", Prefix=self._base + prefix, MaxKeys=limit, **start)
        keys = [entry["Key"][len(self._base) :] for entry in answer.get("Contents", ())]
        return keys, answer.get("NextContinuationToken") if answer.get("IsTruncated") else None

    def remove(self, keys: list[str]) -> None:
        """See `settling.Store.remove`."""
        doomed = [{"Key": self._base + key} for key in keys]
        answer = self._call("delete_objects", Delete={"Objects": doomed, "Quiet": True})
        for failed in answer.get("Errors", ()):
            kind = PermissionError if failed.get("Code") == "AccessDenied" else OSError
            raise kind(f"{failed.get('Code')}: {failed.get('Message')} ({failed.get('Key')})")

    def remedy(self, error: Exception) -> str | None:
        """See `settling.Store.remedy`."""
        code, status = _answer(error)
        if code in _REMEDIES:
            return _REMEDIES[code]
        if isinstance(error, RecursionError):
            return _REGION  # botocore follows a redirect that names no region for ever
        if isinstance(error, PermissionError | NoCredentialsError | PartialCredentialsError):
            return _CREDENTIALS
        if isinstance(error, _USELESS):
            return _OPTIONS
        if status == 400 and not code:
            return _NO_S3
        if 400 <= status < 500 and status not in _PASSING_STATUS and code not in _PASSING_CODES:
            return _OPTIONS
        if status or isinstance(error, OSError | EOFError | BotoCoreError) or _is_transport(error):
            return None
        return _OPTIONS

    async def _read(self, key: str) -> bytes:
        answer = await self._fs._call_s3("get_object", Bucket=self._bucket, Key=key)
        async with answer["Body"] as body:
            return bytes(await body.read())

    def _call(self, method: str, **arguments: Any) -> Any:
        return self._run(self._fs._call_s3, method, Bucket=self._bucket, **arguments)

    def _run(self, function: Callable[..., Coroutine[Any, Any, Any]], *args: Any, **kwargs: Any) -> Any:
        return sync(self._fs.loop, function, *args, timeout=_CALL_SECONDS, **kwargs)


def require_conditional_put(service_model: Any) -> None:
    """Raise `MailboxRefusedError` unless this client's PUT can carry If-None-Match."""
    if "IfNoneMatch" not in service_model.operation_model("PutObject").input_shape.members:
        import botocore

        raise MailboxRefusedError(
            f"botocore {botocore.__version__} drops the condition of an exclusive create, and would overwrite; "
            "install 's3fs>=2026.2.0'"
        )


def _answer(error: Exception) -> tuple[str, int]:
    """The error code and HTTP status that the server gave, if it gave any."""
    response = getattr(error, "response", None) or getattr(error.__cause__, "response", None)
    if not isinstance(response, dict):
        return "", 0
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return str(response.get("Error", {}).get("Code", "")), int(status)


def _is_transport(error: Exception) -> bool:
    return type(error).__module__.partition(".")[0] in (
        "aiohttp",
        "asyncio",
        "botocore",
        "aiobotocore",
        "fsspec",
    )
