"""A wire to a server that misbehaves exactly where a test wants it to: an HTTP proxy on loopback.

Each request is read whole, counted and passed on over a connection of its own, whatever the client keeps open. A
`Fault` is placed on the n-th request of a verb and key: it says whether that request lands (at once, never, or when
the test delivers it) and how it ends for the client. In between `meanwhile` is called, by which a test places a
rival, or watches, without sleeping. Listings may lie too: `hidden` and `frozen`.

Nothing here is timed: a request that hangs does so until its client hangs up or the wire is left.
"""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import threading
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import IO, TYPE_CHECKING, Self
from urllib.parse import parse_qs, unquote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

FOR_EVER = 10**9
UPSTREAM_SECONDS = 60.0
"""Seconds after which a server that says nothing is an error of the test's own."""


class Landing(Enum):
    """Whether the request reaches the server."""

    FIRST = "lands"
    NEVER = "never lands"
    LATE = "lands late"


class Ending(Enum):
    """What the client gets."""

    ANSWER = "the answer"
    BUSY = "503"
    CONFLICT = "409"
    CUT = "cut"
    RESET = "reset"
    HANG = "hang"
    SHORT = "half a body"


_MADE_UP = {
    Ending.BUSY: ("503 Service Unavailable", "SlowDown", "Please reduce your request rate."),
    Ending.CONFLICT: ("409 Conflict", "ConditionalRequestConflict", "A conflicting operation is under way."),
}


@dataclass(frozen=True)
class Message:
    """A request or an answer: its head up to the empty line, and its body, framed by Content-Length alone."""

    head: bytes
    body: bytes = b""

    @property
    def first_line(self) -> str:
        """The request line, or the status line."""
        return self.head.partition(b"\r\n")[0].decode("latin-1")

    @property
    def status(self) -> int:
        """The status of an answer."""
        return int(self.first_line.split()[1])

    def header(self, name: str) -> str:
        """The value of a header in lower case, "" when there is none."""
        found = re.search(rb"(?im)^%s:[ \t]*(.*?)[ \t]*\r$" % name.encode(), self.head)
        return found[1].decode("latin-1").lower() if found else ""

    def without(self, name: str) -> Message:
        """The same without a header."""
        return Message(re.sub(rb"(?im)^%s:.*\r\n" % name.encode(), b"", self.head), self.body)

    def holding(self, body: bytes) -> Message:
        """The same with another body."""
        bare = self.without("transfer-encoding").without("content-length").head
        return Message(b"%sContent-Length: %d\r\n\r\n" % (bare[:-2], len(body)), body)

    @cached_property
    def verb(self) -> str:
        """The method of a request; LIST for a listing."""
        method = self.first_line.split()[0]
        return "LIST" if method == "GET" and "list-type" in self._query else method

    @cached_property
    def key(self) -> str:
        """The key below the bucket that a request is about, or the prefix that a listing is about."""
        if self.verb == "LIST":
            return self._query.get("prefix", [""])[0]
        return unquote(self._target[0]).lstrip("/").partition("/")[2]

    @cached_property
    def _query(self) -> dict[str, list[str]]:
        return parse_qs(self._target[1], keep_blank_values=True)

    @property
    def _target(self) -> tuple[str, str]:
        path, _, query = self.first_line.split()[1].partition("?")
        return path, query


@dataclass(eq=False)
class Fault:
    """What happens to some of the requests whose verb is `verb` (a listing's is LIST) and whose key ends with `key`.

    Attributes:
        first, every, times: which of them: the `first`, then each `every`-th, `times` in all.
        meanwhile: called by the wire once the request has landed, if it does so at once, and before it ends.
        hits: how many requests it has met.
        held: requests that are to land late.
    """

    verb: str
    key: str = ""
    ending: Ending = Ending.ANSWER
    landing: Landing = Landing.FIRST
    first: int = 1
    times: int = 1
    every: int = 1
    meanwhile: Callable[[], object] = bool
    hits: int = 0
    held: list[Message] = field(default_factory=list)
    _seen: int = 0

    def meets(self, request: Message) -> bool:
        """Whether this request is one that it was placed on."""
        if request.verb != self.verb or not request.key.endswith(self.key):
            return False
        self._seen += 1
        past = self._seen - self.first
        if past < 0 or past % self.every or self.hits >= self.times:
            return False
        self.hits += 1
        return True


class Wire:
    """A proxy to `target`.

    Attributes:
        endpoint: where to connect instead.
        lose: how many more successful answers to `PUT` to drop, cutting the connection.
        requests: the request lines seen so far.
        created: keys whose `PUT` succeeded, in the order of their first.
        hidden: keys for which it holds are left out of listings.
        frozen: listings are answered as they were when they were first asked for.
    """

    def __init__(self, target: str) -> None:
        parts = urlsplit(target)
        self._target = (str(parts.hostname), int(parts.port or 80))
        self._listener = _bound(0)
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.lose = 0
        self.requests: list[str] = []
        self.created: dict[str, None] = {}
        self.hidden: Callable[[str], bool] = lambda key: False
        self.frozen = False
        self._asked: list[tuple[str, str]] = []
        self._listings: dict[str, Message] = {}
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._accepting = threading.Thread()

    def __enter__(self) -> Self:
        self.up()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()
        self._listener.close()

    @property
    def methods(self) -> list[str]:
        """The method of each request so far."""
        return [line.partition(" ")[0] for line in self.requests]

    def cost(self, call: Callable[[], object]) -> list[str]:
        """The method of each request that `call` makes."""
        before = len(self.requests)
        call()
        return self.methods[before:]

    def asked(self, key: str) -> list[str]:
        """The verbs of the requests so far for keys that end with `key`."""
        with self._lock:
            return [verb for verb, name in self._asked if name.endswith(key)]

    def place(self, fault: Fault) -> Fault:
        """Have `fault` happen; a request that several are placed on is the oldest one's."""
        with self._lock:
            self._faults.append(fault)
        return fault

    def lift(self, fault: Fault) -> None:
        """Have `fault` happen no more."""
        with self._lock:
            self._faults.remove(fault)

    def deliver(self, fault: Fault) -> list[int]:
        """Have what `fault` holds land now, and return what the server says to it."""
        with self._lock:
            held, fault.held = fault.held, []
        return [self._forward(request).status for request in held]

    def up(self) -> None:
        """Take connections."""
        self._listener.listen()
        self._accepting = _started(self._accept)

    def down(self) -> None:
        """Refuse connections, and end those there are; the port stays ours."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        port = self._listener.getsockname()[1]
        self._listener.close()
        self._listener = _bound(port)
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in self._ends:
            end.close()
        self._ends, self._threads = [], []

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self._ends.append(near)
                self._threads.append(_started(self._serve, near))

    def _serve(self, near: socket.socket) -> None:
        with near, near.makefile("rb") as stream:
            while (request := _read_request(stream, near)) is not None and self._answer(
                request, near, stream
            ):
                pass

    def _answer(self, request: Message, near: socket.socket, stream: IO[bytes]) -> bool:
        """Serve one request, and return whether the connection is kept."""
        fault = self._met(request)
        answer = None
        if fault.landing is Landing.FIRST:
            answer = self._listed(request, self._forward(request))
        elif fault.landing is Landing.LATE:
            with self._lock:
                fault.held.append(request)
        fault.meanwhile()
        if fault.ending in _MADE_UP:
            answer = _made_up(fault.ending)
        if (
            answer is None
            or fault.ending in (Ending.CUT, Ending.RESET, Ending.HANG)
            or self._loses(request, answer)
        ):
            _end(fault.ending, near, stream)
            return False
        if fault.ending is Ending.SHORT:
            answer = Message(answer.head, answer.body[: len(answer.body) // 2])
        return _send(near, answer) and fault.ending is not Ending.SHORT

    def _met(self, request: Message) -> Fault:
        """Count a request, and say what happens to it."""
        with self._lock:
            self.requests.append(request.first_line)
            self._asked.append((request.verb, request.key))
            return next((fault for fault in self._faults if fault.meets(request)), Fault(request.verb))

    def _listed(self, request: Message, answer: Message) -> Message:
        """What a listing shows."""
        if request.verb != "LIST" or answer.status != 200:
            return answer
        with self._lock:
            if self.frozen:
                answer = self._listings.setdefault(request.first_line, answer)
            return _leaving_out(answer, self.hidden)

    def _loses(self, request: Message, answer: Message) -> bool:
        with self._lock:
            if self.lose and request.verb == "PUT" and answer.status == 200:
                self.lose -= 1
                return True
            return False

    def _forward(self, request: Message) -> Message:
        with socket.create_connection(self._target, UPSTREAM_SECONDS) as far, far.makefile("rb") as stream:
            far.sendall(request.head + request.body)
            answer = _read_answer(stream, request.verb)
        if request.verb == "PUT" and answer.status == 200:
            with self._lock:
                self.created.setdefault(request.key)
        return answer


def _bound(port: int) -> socket.socket:
    """A socket that refuses connections until it listens."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    return listener


def _started(run: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=run, args=arguments, daemon=True, name="wire")
    thread.start()
    return thread


def _read_request(stream: IO[bytes], near: socket.socket) -> Message | None:
    """The next request, or None when the client has hung up."""
    with contextlib.suppress(OSError):
        request = Message(_read_head(stream))
        if request.header("expect") == "100-continue":
            near.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            request = request.without("expect")
        if request.header("transfer-encoding") == "chunked":
            return request.holding(_read_chunks(stream))
        if request.head:
            return Message(request.head, _exactly(stream, int(request.header("content-length") or 0)))
    return None


def _read_answer(stream: IO[bytes], verb: str) -> Message:
    answer = Message(_read_head(stream))
    while 100 <= answer.status < 200:
        answer = Message(_read_head(stream))
    if verb == "HEAD" or answer.status in (204, 304):
        return answer
    if answer.header("transfer-encoding") == "chunked":
        return answer.holding(_read_chunks(stream))
    length = answer.header("content-length")
    return Message(answer.head, _exactly(stream, int(length))) if length else answer.holding(stream.read())


def _read_head(stream: IO[bytes]) -> bytes:
    """Lines up to the empty one; nothing when the connection ended before it."""
    lines = []
    while (line := stream.readline()) != b"\r\n":
        if not line.endswith(b"\n"):
            return b""
        lines.append(line)
    return b"".join([*lines, line])


def _read_chunks(stream: IO[bytes]) -> bytes:
    body = b""
    while size := int(stream.readline().partition(b";")[0], 16):
        body += _exactly(stream, size + 2)[:-2]
    _read_head(stream)  # the trailer
    return body


def _exactly(stream: IO[bytes], size: int) -> bytes:
    body = stream.read(size)
    if len(body) < size:
        raise ConnectionError(f"a body of {size} bytes ended after {len(body)}")
    return body


def _send(near: socket.socket, answer: Message) -> bool:
    """Whether the client could be sent the answer and keeps the connection."""
    with contextlib.suppress(OSError):
        near.sendall(answer.head + answer.body)
        return answer.header("connection") != "close"
    return False


def _end(ending: Ending, near: socket.socket, stream: IO[bytes]) -> None:
    """See that closing the connection, which comes next, ends it as it should."""
    with contextlib.suppress(OSError):
        if ending is Ending.HANG:
            stream.read(1)  # until the client hangs up
        elif ending is Ending.RESET:
            near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _made_up(ending: Ending) -> Message:
    status, code, said = _MADE_UP[ending]
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/xml\r\n\r\n".encode()
    return Message(head).holding(f"<Error><Code>{code}</Code><Message>{said}</Message></Error>".encode())


def _leaving_out(answer: Message, hidden: Callable[[str], bool]) -> Message:
    """A listing without the keys that are hidden."""

    def shown(entry: re.Match[bytes]) -> bytes:
        return b"" if hidden(unquote(entry[1].decode())) else entry[0]

    entries = rb"(?s)<Contents><Key>(.*?)</Key>.*?</Contents>"
    return answer.holding(re.sub(entries, shown, answer.body))
