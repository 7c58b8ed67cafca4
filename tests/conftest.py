"""A census after each test, and one S3 server for all that ask for it."""

from __future__ import annotations

import contextlib
import functools
import gc
import multiprocessing
import os
import select
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from ranks import Launcher, Ranks
from torchless import pytest_collection_modifyitems, pytest_configure, pytest_pycollect_makemodule

from benchmarks.seaweedfs import S3Server, seaweedfs

__all__ = [
    "S3Server",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_pycollect_makemodule",
]

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytest.register_assert_rewrite("mailbox_contract")

GRACE_SECONDS = 5.0
lasting: set[int] = set()
"""Child processes that outlive a test by design."""


@pytest.fixture(autouse=True, scope="module")
def settled() -> None:
    """What earlier modules left alive is not searched again at each `gc.collect()` of this one."""
    gc.collect()
    gc.freeze()


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
    """Child processes that still run. Asked twice a test, so not by way of `Path`, which takes twice as long."""
    found, ours = [], str(os.getpid())
    for pid in filter(str.isdecimal, os.listdir("/proc")):  # noqa: PTH208
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as stat:  # noqa: PTH123
            state, parent = stat.read().rpartition(")")[2].split(None, 2)[:2]
            if parent == ours and state not in "ZX":
                found.append(int(pid))
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
def parsed_once() -> Iterator[None]:
    """Each new S3 client parses botocore's description of the service, most of its cost; here all share one."""
    from botocore.loaders import JSONFileLoader

    load = JSONFileLoader.load_file
    parsed = functools.cache(lambda path: load(JSONFileLoader(), path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JSONFileLoader, "load_file", lambda self, path: parsed(path))
        yield


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory, parsed_once: None) -> Iterator[S3Server]:
    """One SeaweedFS server, with the bucket `shardqueue`."""
    with seaweedfs(tmp_path_factory.mktemp("weed")) as server:
        lasting.add(server.pid)
        yield server
        os.kill(server.pid, signal.SIGKILL)  # its files go too, so nothing is worth an orderly end of seconds
    lasting.discard(server.pid)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """`ranks(size)`: ranks that stay up to the end, of one launcher that has imported Lightning."""
    launcher = Launcher()
    lasting.add(launcher.pid)
    groups: dict[int, Ranks] = {}

    def up(size: int) -> Ranks:
        return groups.setdefault(size, Ranks(size, launcher=launcher))

    yield up
    for group in groups.values():
        group.close()
    launcher.close()
    lasting.discard(launcher.pid)
