"""A wire to a server that can lose answers: a relay on loopback."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from types import TracebackType


class Wire:
    """Relays connections to `target`, counting requests by method.

    Attributes:
        endpoint: where to connect instead.
        lose: how many more successful answers to `PUT` to drop, cutting the connection.
        requests: the request lines seen so far.
    """

    def __init__(self, target: str) -> None:
        parts = urlsplit(target)
        self._target = (str(parts.hostname), int(parts.port or 80))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.lose = 0
        self.requests: list[str] = []
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for end in self._sockets:
            _cut(end)
        for thread in self._threads:
            thread.join()
        for end in self._sockets:
            end.close()

    @property
    def methods(self) -> list[str]:
        """The method of each request so far."""
        return [line.partition(" ")[0] for line in self.requests]

    def _start(self, run: object, *arguments: object) -> None:
        thread = threading.Thread(target=run, args=arguments, daemon=True, name="wire")  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                self._sockets += [near, far]
                self._start(self._requests, near, far)
                self._start(self._answers, near, far)

    def _requests(self, near: socket.socket, far: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := near.recv(1 << 16):
                line = data.partition(b"\r\n")[0].decode(errors="replace")
                if line.endswith(" HTTP/1.1"):
                    with self._lock:
                        self.requests.append(line)
                far.sendall(data)
        _cut(near)
        _cut(far)

    def _answers(self, near: socket.socket, far: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := far.recv(1 << 16):
                if data.startswith(b"HTTP/1.1 200") and self._loses():
                    break
                near.sendall(data)
        _cut(near)
        _cut(far)

    def _loses(self) -> bool:
        with self._lock:
            if self.lose and self.requests[-1].startswith("PUT "):
                self.lose -= 1
                return True
            return False


def _cut(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
