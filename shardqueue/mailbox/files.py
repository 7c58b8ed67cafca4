"""A mailbox in a folder that every learner reaches: local disk, NFS, or another shared file system.

A body is written to a temporary file beside its key and then linked to it: `link` is the one call of a file
system that refuses an existing name atomically, and readers see the body whole. A failed `link` says nothing (NFS
can lose the answer), so the key is read back. Without hard links the key itself is created with O_EXCL; its body
then starts with a header that holds its length, so a reader tells "being written" from "written" whatever the
body is. Temporary names start with a dot, which no key may: those a killed process leaves are invisible and
harmless.

The folder is made when the mailbox is opened, never again: an empty one in its place would grant every claim a
second time. A folder that is gone, or no longer the one that was opened (device and inode are compared after
every create and absence), is `MailboxUnavailableError`; so is what may pass (EIO, ESTALE, a time-out).
Everything else (no space, no permission, a prefix that is a file) is `MailboxError`. Nothing is synced to disk:
a claim survives its process, not its host's power cut.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from shardqueue.errors import IncompleteError, MailboxError, MailboxUnavailableError
from shardqueue.mailbox.names import (
    MAX_SEGMENT,
    check_body,
    check_key,
    check_keys,
    check_listing,
    is_segment,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# What a network file system says while its server is away, and what a folder that vanishes looks like.
_PASSING = {
    errno.ENOENT,
    errno.ESTALE,
    errno.EIO,
    errno.EAGAIN,
    errno.EBUSY,
    errno.ETIMEDOUT,
    errno.ENOTCONN,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.EHOSTUNREACH,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
}
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS}
_NO_PERMISSION = "let this user write there, or choose another folder"
_REMEDIES = {
    errno.ENOSPC: "free some space, or choose a folder on another disk",
    errno.EDQUOT: "raise the quota, or choose a folder on another disk",
    errno.EROFS: "mount it writable, or choose another folder",
    errno.EACCES: _NO_PERMISSION,
    errno.EPERM: _NO_PERMISSION,
    errno.ENOTDIR: "a part of this path is a file; choose another folder or prefix",
    errno.EISDIR: "a folder of other keys has this name; choose another key",
    errno.ENAMETOOLONG: "choose a shorter folder or key",
    errno.ELOOP: "replace the symbolic link by what it points to",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}

# The first byte of a framed body; then come a mark, the length and the body.
_FRAMED = b"\0"
_MARK = b"\0sq1"
_HEADER = len(_MARK) + 8
_PAUSES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 0.5, 1.0)


class FileMailbox:
    """A mailbox in the folder `path`.

    Args:
        path: the folder; made with its parents when absent, unless `create` is False.
        create: False looks at a folder that must exist, and writes nothing until a verb does.
    """

    listing = "scan"

    def __init__(self, path: str | os.PathLike[str], *, create: bool = True) -> None:
        self._root = str(Path(path).absolute())
        self._identity: tuple[int, int] | None = None
        try:
            if create:
                Path(self._root).mkdir(parents=True, exist_ok=True)
            self._identity = _identity_of(self._root)
        except FileExistsError:
            raise self._failure(NotADirectoryError(errno.ENOTDIR, "not a folder"), self._root) from None
        except OSError as error:
            raise self._failure(error, self._root) from error
        if self._identity is None:
            raise MailboxError(f"{self._root}: no such folder; give the one that the learners were given")

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """See `Mailbox.put_if_absent`."""
        check_key(key)
        check_body(data)
        path = f"{self._root}/{key}"
        try:
            temporary = self._write_beside(path, data)
            try:
                created = self._publish(temporary, path, data)
            finally:
                _discard(temporary)
            self._check_root()
        except OSError as error:
            raise self._failure(error, path) from error
        return created

    def get(self, key: str) -> bytes | None:
        """See `Mailbox.get`."""
        check_key(key)
        path = f"{self._root}/{key}"
        try:
            body = self._read(path)
            if body is None:
                self._check_root()
        except OSError as error:
            raise self._failure(error, path) from error
        return body

    def list(self, prefix: str, after: str = "", limit: int | None = None) -> list[str]:
        """See `Mailbox.list`; costs a scan of each folder that can hold such keys, whatever `limit` is."""
        check_listing(prefix, after, limit)
        head, slash, stem = prefix.rpartition("/")
        try:
            found = list(islice(self._walk(head + slash, stem, after), limit))
            self._check_root()
        except OSError as error:
            raise self._failure(error, f"{self._root}/{prefix}") from error
        return found

    def put(self, key: str, data: bytes) -> None:
        """See `Mailbox.put`."""
        check_key(key)
        check_body(data)
        path = f"{self._root}/{key}"
        try:
            temporary = self._write_beside(path, data)
            try:
                Path(temporary).replace(path)
            except OSError:
                _discard(temporary)
                raise
            self._check_root()
        except OSError as error:
            raise self._failure(error, path) from error

    def delete(self, keys: Iterable[str]) -> None:
        """See `Mailbox.delete`; folders left empty go too."""
        listed = check_keys(keys)
        try:
            for key in listed:
                _remove(f"{self._root}/{key}")
            for folder in {key.rpartition("/")[0] for key in listed}:
                self._prune(folder)
            self._check_root()
        except OSError as error:
            raise self._failure(error, self._root) from error

    def __repr__(self) -> str:
        return f"FileMailbox({self._root!r})"

    def __eq__(self, other: object) -> bool:
        """Whether both lead to the same folder."""
        if not isinstance(other, FileMailbox):
            return NotImplemented
        return Path(self._root).resolve() == Path(other._root).resolve()

    def __hash__(self) -> int:
        return hash(Path(self._root).resolve())

    def __getstate__(self) -> dict[str, object]:
        return {"_root": self._root}

    def __setstate__(self, state: dict[str, str]) -> None:
        # The device number of a shared folder differs between hosts, so this process looks for itself.
        self._root, self._identity = state["_root"], None

    def _link(self, temporary: str, path: str) -> None:
        os.link(temporary, path)

    def _write_beside(self, path: str, data: bytes) -> str:
        folder = path.rpartition("/")[0]
        temporary = f"{folder}/.shardqueue-{os.getpid()}-{os.urandom(8).hex()}"
        try:
            handle = os.open(temporary, _CREATE, 0o666)
        except FileNotFoundError:
            self._make_folders(folder)
            handle = os.open(temporary, _CREATE, 0o666)
        try:
            # Closed before it is linked: NFS reports a full disk, and sends the bytes, when a file is closed.
            _fill(handle, _framed(data) if data.startswith(_FRAMED) else data)
        except OSError:
            _discard(temporary)
            raise
        return temporary

    def _publish(self, temporary: str, path: str, data: bytes) -> bool:
        try:
            self._link(temporary, path)
        except OSError as error:
            if error.errno in _NO_LINKS:
                return self._create_alone(path, data)
            return self._settle(path, data, error)
        return True

    def _create_alone(self, path: str, data: bytes) -> bool:
        try:
            handle = os.open(path, _CREATE, 0o666)
        except FileExistsError as error:
            return self._settle(path, data, error)
        try:
            _fill(handle, _framed(data))
        except OSError:
            _discard(path)
            raise
        return True

    def _settle(self, path: str, data: bytes, error: OSError) -> bool:
        """Whether the key holds our bytes after a create that ended with `error`."""
        held = self._read(path)
        if held is not None:
            return held == data
        if not isinstance(error, FileExistsError):
            raise error
        if Path(path).is_dir():
            raise IsADirectoryError(errno.EISDIR, "Is a directory")
        raise OSError(errno.EAGAIN, "it was there and is gone")

    def _read(self, path: str) -> bytes | None:
        for pause in (*_PAUSES, None):
            try:
                body = _unframed(_contents(path))
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                return None
            if body is not None:
                return body
            if pause is not None:
                self._sleep(pause)
        raise IncompleteError(
            f"{path}: it is being written, or its writer died; try again, and if it stays so, remove this file"
        )

    def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def _walk(self, folder: str, stem: str, after: str) -> Iterator[str]:
        """Keys under `folder` whose next segment starts with `stem`: those after `after`, in order."""
        if after.startswith(folder):
            rest = after[len(folder) :]
        elif after > folder:
            return
        else:
            rest = ""
        for name in sorted(_names(f"{self._root}/{folder}", stem, rest)):
            if name.endswith("/"):
                yield from self._walk(folder + name, "", after)
            else:
                yield folder + name

    def _make_folders(self, folder: str) -> None:
        made = self._root
        for segment in folder[len(self._root) + 1 :].split("/"):
            made = f"{made}/{segment}"
            with contextlib.suppress(FileExistsError):
                Path(made).mkdir()

    def _prune(self, folder: str) -> None:
        with contextlib.suppress(OSError):
            while folder:
                Path(f"{self._root}/{folder}").rmdir()
                folder = folder.rpartition("/")[0]

    def _check_root(self) -> None:
        seen = _identity_of(self._root)
        if self._identity is None:
            self._identity = seen
        if seen is None or seen != self._identity:
            raise MailboxUnavailableError(
                f"{self._root}: this folder was {'removed' if seen is None else 'replaced'} while in use, and "
                "what was claimed is not in it; put it back, or start again with another folder"
            )

    def _failure(self, error: OSError, path: str) -> MailboxError:
        if isinstance(error, MailboxError):
            return error
        said = f"{path}: {error.strerror or error}"
        if error.errno in _PASSING:
            return MailboxUnavailableError(
                f"{said}; the call may have taken effect, and trying again is right"
            )
        return MailboxError(f"{said}; {_REMEDIES.get(error.errno or 0, 'choose another folder')}")


_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


def _identity_of(root: str) -> tuple[int, int] | None:
    try:
        # A trailing slash makes a file an error.
        seen = os.stat(f"{root}/")  # noqa: PTH116 - called for every create
    except FileNotFoundError:
        return None
    return seen.st_dev, seen.st_ino


def _names(path: str, stem: str, rest: str) -> list[str]:
    """Segments in a folder that start with `stem` and can lead beyond `rest`; folders end with a slash."""
    names: list[str] = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(path) as entries:
        for entry in entries:
            name = entry.name
            if not name.startswith(stem) or not _is_key(name):
                continue
            if entry.is_file(follow_symlinks=False):
                if name > rest:
                    names.append(name)
            elif entry.is_dir(follow_symlinks=False) and (f"{name}/" > rest or rest.startswith(f"{name}/")):
                names.append(f"{name}/")
    return names


def _is_key(name: str) -> bool:
    if len(name) * 4 <= MAX_SEGMENT and name.isprintable():
        return name[0] != "." and "\\" not in name
    return is_segment(name)


def _contents(path: str) -> bytes:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        parts = []
        while part := os.read(handle, 1 << 16):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(handle)


def _fill(handle: int, data: bytes) -> None:
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(handle, left) :]
    except OSError:
        with contextlib.suppress(OSError):
            os.close(handle)
        raise
    os.close(handle)


def _framed(data: bytes) -> bytes:
    return _MARK + len(data).to_bytes(8, "big") + data


def _unframed(raw: bytes) -> bytes | None:
    """The body in a file, or None while it is being written."""
    if not raw.startswith(_FRAMED):
        return raw or None
    if len(raw) < _HEADER or len(raw) - _HEADER < int.from_bytes(raw[len(_MARK) : _HEADER], "big"):
        return None
    return raw[_HEADER:]


def _discard(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)  # noqa: PTH108 - called for every create


def _remove(path: str) -> None:
    try:
        os.unlink(path)  # noqa: PTH108 - called for every key
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return
    except PermissionError:
        # What unlink says of a folder on macOS.
        if not Path(path).is_dir():
            raise
