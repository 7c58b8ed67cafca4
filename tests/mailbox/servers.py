"""Real servers on loopback for the mailbox tests, each a process that is stopped at the end."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from conftest import lasting
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from benchmarks.seaweedfs import running

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

READY_SECONDS = 60


def free_port() -> int:
    """A port on which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@contextmanager
def listening(command: list[str], port: int, folder: Path) -> Iterator[None]:
    """Run a server; it is ready when it takes connections on `port`."""
    with running(command, folder) as server:
        lasting.add(server.pid)
        _wait_until_it_listens(server, port, folder / "log")
        yield
    lasting.discard(server.pid)


def _wait_until_it_listens(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    end = time.monotonic() + READY_SECONDS
    while time.monotonic() < end and server.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise RuntimeError(f"{server.args!r} did not get ready:\n{log.read_text(errors='replace')[-2000:]}")


@contextmanager
def answering(
    status: int, body: str, headers: Mapping[str, str] | None = None, tls: ssl.SSLContext | None = None
) -> Iterator[str]:
    """A server that has one answer to everything, over TLS or not; gives its address, `127.0.0.1:port`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            content = b"" if self.command == "HEAD" else body.encode()
            self.send_response(status)
            for name, value in {"Content-Type": "application/xml", **(headers or {})}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _answer  # noqa: N815

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            pass

        def get_request(self) -> tuple[Any, Any]:
            near, address = super().get_request()
            return (tls.wrap_socket(near, server_side=True) if tls else near), address

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True, name="answering")
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def self_signed(folder: Path) -> ssl.SSLContext:
    """The context of a TLS server whose certificate nobody trusts."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.now(UTC)
    unsigned = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    unsigned = unsigned.serial_number(x509.random_serial_number()).not_valid_before(now)
    signed = unsigned.not_valid_after(now + timedelta(days=1)).sign(key, hashes.SHA256())
    text = signed.public_bytes(serialization.Encoding.PEM) + key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "server.pem").write_bytes(text)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem")
    return context


LEAVES_WHILE_CLAIMING = """
import json, sys, threading
from shardqueue.mailbox import open_mailbox

mailbox = open_mailbox(sys.argv[1], prove=False, **json.loads(sys.argv[2]))
under_way = threading.Semaphore(0)

def claim(learner):
    number = 0
    while True:
        mailbox.put_if_absent(f"{learner}/{number}", b"1")
        number += 1
        under_way.release()

for learner in range(4):
    threading.Thread(target=claim, args=(learner,), daemon=True).start()
for _ in range(8):
    under_way.acquire()
print("leaving")
"""
"""Ends while four daemon threads claim."""

FORKS_AFTER_USE = """
import gc, json, os, sys
from shardqueue.mailbox import open_mailbox

mailbox = open_mailbox(sys.argv[1], prove=False, **json.loads(sys.argv[2]))
mailbox.put("a", b"1")
for does in ("nothing", "puts", "drops"):
    child = os.fork()
    if not child:
        if does == "puts":
            mailbox.put("b", b"1")
        if does == "drops":
            del mailbox
            gc.collect()
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    mailbox.put("a", b"2")
print(mailbox.list(""))
"""
"""Forks children that end as programs do, and goes on: `put` is sent once, so none of its own may stall."""


def printed(program: str, url: str, options: Mapping[str, Any]) -> tuple[str, str]:
    """What a program given `url` and `options` prints, and what it prints as errors."""
    command = [sys.executable, "-W", "always", "-W", "ignore::DeprecationWarning", "-c", program]
    command += [url, json.dumps(options)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return ended.stdout, ended.stderr


def chained(error: BaseException | None) -> str:
    """All that a traceback would print of an error."""
    texts = []
    while error is not None:
        texts.append(repr(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "\n".join(texts)
