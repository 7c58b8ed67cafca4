"""A small S3 server on loopback that can be told to misbehave: what `shardqueue doctor` must see through.

Objects live in memory, under one bucket. It speaks what the library asks for: PUT, GET and DELETE of an object, POST
?delete, ListObjectsV2. Signatures are not checked.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Literal, Self
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from types import TracebackType

Create = Literal["honest", "ignores the condition", "checks, then acts"]
Verb = Literal["read", "write", "list", "delete"]

BUCKET = "bucket"
BETWEEN_SECONDS = 0.005


class TinyS3:
    """The server.

    Args:
        create: how it treats `If-None-Match: *`; one that checks and then acts does so 5 ms apart.
        denies: verbs that it answers with 403.
        stale_listing: whether each listing shows what was there at the listing before.
        says: what it says with a 403.

    Attributes:
        endpoint: its URL.
        objects: what it holds, by key.
    """

    def __init__(
        self,
        create: Create = "honest",
        *,
        denies: tuple[Verb, ...] = (),
        stale_listing: bool = False,
        says: str = "Access Denied",
    ) -> None:
        self.objects: dict[str, bytes] = {}
        self.create, self.denies, self.says = create, denies, says
        self._stale, self._seen_before = stale_listing, list[str]()
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.tiny = self
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), name="tiny-s3")

    @property
    def options(self) -> dict[str, Any]:
        """Storage options that lead here."""
        return {"key": "key", "secret": "secret-of-tests", "client_kwargs": {"endpoint_url": self.endpoint}}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def put(self, key: str, body: bytes, only_if_absent: bool) -> bool:
        """Store an object; say whether the condition held."""
        if not only_if_absent or self.create == "ignores the condition":
            self.objects[key] = body
            return True
        if self.create == "checks, then acts":
            if key in self.objects:
                return False
            time.sleep(BETWEEN_SECONDS)
            self.objects[key] = body
            return True
        with self._lock:
            return key not in self.objects and self.objects.setdefault(key, body) is body

    def listing(self) -> list[str]:
        """All keys, sorted, as a listing shows them."""
        with self._lock:
            now = sorted(self.objects)
            shown, self._seen_before = (self._seen_before if self._stale else now), now
            return shown


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64
    tiny: TinyS3


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one packet
    server: _Server

    def log_message(self, *args: object) -> None:
        pass

    def handle_expect_100(self) -> bool:
        going_on = super().handle_expect_100()
        self.wfile.flush()
        return going_on

    def do_PUT(self) -> None:
        body = self._body()
        if self._refused("write"):
            return
        if self.server.tiny.put(self._key, body, self.headers.get("If-None-Match") == "*"):
            self._answer(200, b"", {"ETag": '"0"'})
        else:
            self._error(
                412, "PreconditionFailed", "At least one of the pre-conditions you specified did not hold"
            )

    def do_GET(self) -> None:
        if not self._key:
            if not self._refused("list"):
                self._list()
            return
        if self._refused("read"):
            return
        held = self.server.tiny.objects.get(self._key)
        if held is None:
            self._error(404, "NoSuchKey", "The specified key does not exist.")
        else:
            self._answer(200, held, {"ETag": '"0"'})

    def do_DELETE(self) -> None:
        if not self._refused("delete"):
            self.server.tiny.objects.pop(self._key, None)
            self._answer(204, b"")

    def do_POST(self) -> None:
        body = self._body()
        if self._refused("delete"):
            return
        for entry in ElementTree.fromstring(body).iter():
            if entry.tag.endswith("Key"):
                self.server.tiny.objects.pop(entry.text or "", None)
        self._answer(200, b"<DeleteResult/>")

    def _list(self) -> None:
        asked = parse_qs(urlsplit(self.path).query, keep_blank_values=True)
        prefix = asked.get("prefix", [""])[0]
        after = asked.get("continuation-token", asked.get("start-after", [""]))[0]
        limit = int(asked.get("max-keys", ["1000"])[0])
        keys = [key for key in self.server.tiny.listing() if key.startswith(prefix)]
        page = keys[bisect_right(keys, after) :]
        more = len(page) > limit
        page = page[:limit]
        text = f"<IsTruncated>{str(more).lower()}</IsTruncated><KeyCount>{len(page)}</KeyCount>"
        if more:
            text += f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>"
        text += "".join(f"<Contents><Key>{escape(key)}</Key><Size>1</Size></Contents>" for key in page)
        self._answer(200, f"<ListBucketResult>{text}</ListBucketResult>".encode())

    @property
    def _key(self) -> str:
        return unquote(urlsplit(self.path).path).removeprefix(f"/{BUCKET}").removeprefix("/")

    def _refused(self, verb: Verb) -> bool:
        """Whether it is, for want of permission or of a bucket; then that was said."""
        if unquote(urlsplit(self.path).path).split("/")[1] != BUCKET:
            self._error(404, "NoSuchBucket", "The specified bucket does not exist")
        elif verb in self.server.tiny.denies:
            self._error(403, "AccessDenied", self.server.tiny.says)
        else:
            return False
        return True

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", "0")))

    def _error(self, status: int, code: str, said: str) -> None:
        text = f"<Error><Code>{code}</Code><Message>{escape(said)}</Message></Error>"
        self._answer(status, text.encode())

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
