"""A census after each test, and one S3 server for all that ask for it."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import select
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks.seaweedfs import S3Server, seaweedfs

__all__ = ["S3Server"]

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.register_assert_rewrite("mailbox_contract")

GRACE_SECONDS = 5.0
lasting: set[int] = set()
"""Child processes that outlive a test by design."""


@pytest.fixture(autouse=True)
def census() -> Iterator[None]:
    """No thread of ours, no foreground thread and no child process may outlive the test that made it."""
    threads, children = set(threading.enumerate()), set(_children())
    yield
    end = time.monotonic() + GRACE_SECONDS
    left = [_describe(thread) for thread in threading.enumerate() if _outlived(thread, threads, end)]
    multiprocessing.active_children()
    if set(_children()) - children - lasting:
        gc.collect()  # an error holds its traceback, that a loader, and that its workers
    left += [
        f"process {pid}: {_command(pid)}"
        for pid in _children()
        if pid not in children | lasting and not _is_pythons_own(pid) and not _ends(pid, end)
    ]
    if left:
        pytest.fail("outlived the test: " + "; ".join(left))


def _outlived(thread: threading.Thread, before: set[threading.Thread], end: float) -> bool:
    if thread in before or (thread.daemon and not thread.name.startswith("shardqueue")):
        return False
    thread.join(max(0.0, end - time.monotonic()))
    return thread.is_alive()


def _describe(thread: threading.Thread) -> str:
    return f"thread {thread.name}{' (daemon)' if thread.daemon else ''}"


def _children() -> list[int]:
    """Child processes that still run."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = entry.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == os.getpid() and state not in "ZX":
                found.append(int(entry.parent.name))
    return found


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


def _is_pythons_own(pid: int) -> bool:
    names = ("resource_tracker", "multiprocessing.forkserver", "torch_shm_manager")
    return any(name in _command(pid) for name in names)


def _ends(pid: int, end: float) -> bool:
    """Whether a process ends in the time left."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], max(0.0, end - time.monotonic()))[0])
    finally:
        os.close(handle)


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One SeaweedFS server, with the bucket `shardqueue`."""
    with seaweedfs(tmp_path_factory.mktemp("weed")) as server:
        lasting.add(server.pid)
        yield server
    lasting.discard(server.pid)
