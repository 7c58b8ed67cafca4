"""Which permission a refused call lacks, in the words in which the store's owner grants it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from shardqueue.mailbox.places import store_at

if TYPE_CHECKING:
    from collections.abc import Iterable

VERBS = ("create", "overwrite", "read", "list", "delete")
"""What a mailbox does, as a person would call it."""

_Actions = dict[str, tuple[str, ...]]

_S3: _Actions = {
    "create": ("s3:PutObject",),
    "overwrite": ("s3:PutObject",),
    "read": ("s3:GetObject",),
    "list": ("s3:ListBucket",),
    "delete": ("s3:DeleteObject",),
}
_GCS: _Actions = {
    "create": ("storage.objects.create",),
    "overwrite": ("storage.objects.create", "storage.objects.delete"),
    "read": ("storage.objects.get",),
    "list": ("storage.objects.list",),
    "delete": ("storage.objects.delete",),
}
_BLOBS = "Microsoft.Storage/storageAccounts/blobServices/containers/blobs"
_AZURE: _Actions = {
    "create": (f"{_BLOBS}/write", f"{_BLOBS}/add/action"),
    "overwrite": (f"{_BLOBS}/write",),
    "read": (f"{_BLOBS}/read",),
    "list": (f"{_BLOBS}/read",),
    "delete": (f"{_BLOBS}/delete",),
}
_FOLDER: _Actions = {
    "create": ("write (w and x) on the folder",),
    "overwrite": ("write (w and x) on the folder",),
    "read": ("read (r) on the files",),
    "list": ("read (r and x) on the folder",),
    "delete": ("write (w and x) on the folder",),
}
_ACTIONS = {"s3": _S3, "gs": _GCS, "az": _AZURE}
_DENIED = re.compile(
    r"\bPermissionError\b|Permission denied|Operation not permitted|Access ?Denied|Forbidden|\b403\b"
    r"|Authorization(Permission|Failure)"
)


def is_denial(message: str) -> bool:
    """Whether an error's message says that the call is not permitted."""
    return bool(_DENIED.search(message))


def missing(url: str, verbs: Iterable[str]) -> list[str]:
    """What has to be granted so that these verbs are permitted at `url`."""
    actions = _ACTIONS.get(store_at(url), _FOLDER)
    return list(dict.fromkeys(action for verb in verbs for action in actions[verb]))


def remedy(url: str, verbs: list[str]) -> str:
    """How to grant what these verbs lack."""
    store = store_at(url)
    bucket, _, prefix = url.partition("://")[2].partition("/")
    if store == "s3":
        objects = f"arn:aws:s3:::{bucket}/{prefix.strip('/')}".rstrip("/") + "/*"
        listing = [f"s3:ListBucket on arn:aws:s3:::{bucket}"] if "list" in verbs else []
        others = [action for action in missing(url, verbs) if action != "s3:ListBucket"]
        granted = [*listing, *([f"{', '.join(others)} on {objects}"] if others else [])]
        return f"{_credentials(verbs)}allow {'; '.join(granted)}"
    if store == "gs":
        return f"{_credentials(verbs)}grant the role Storage Object User on the bucket {bucket}"
    if store == "az":
        return f"{_credentials(verbs)}grant the role Storage Blob Data Contributor on the container"
    return "let this user write there (chown, chmod), or choose another folder"


def _credentials(verbs: list[str]) -> str:
    return "check the credentials; if they are right, " if len(verbs) == len(VERBS) else ""
