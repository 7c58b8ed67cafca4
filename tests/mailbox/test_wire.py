"""Who owns a key, and for how many requests, when the wire to an object store misbehaves.

A create that is answered costs one request, a refused one two: the create, and the read that shows whose the key is.
Of a create whose answer says nothing the key is read back: found, that was two requests; absent, the create is sent
again, which makes three. That holds where the connection itself is lost, too: there the HTTP client would send a PUT
once more by itself, before anybody is told, if it was let.
"""

from __future__ import annotations

import http.client
import socket
import uuid
from collections import Counter
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
from learners import Clock, CountingLoader, Task, dataset, together, train, until
from wire import FOR_EVER, Ending, Fault, Landing, Wire

from shardqueue import Session, shared_queue, unit_grid
from shardqueue.errors import MailboxUnavailableError
from shardqueue.mailbox.objects import ObjectMailbox
from shardqueue.records import RunKeys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from conftest import S3Server

pytestmark = pytest.mark.s3

READ_SECONDS = 1.0
"""Seconds after which a client gives a silent wire up."""
HASTE = 0.3
"""Deadline, in seconds, of a mailbox that gives up soon."""
MOST_TRIES = 4
"""Tries that fit into `HASTE`: the shortest pauses between them are 25, 50, 100 and 200 ms."""
MINE, RIVAL = b"mine", b"rival"
QUICK = (Ending.BUSY, Ending.CONFLICT, Ending.CUT, Ending.RESET)
RIVALS = ("nobody", "before", "meanwhile", "after")


@dataclass(frozen=True)
class Line:
    """One prefix of a store, seen by a learner over the wire and by its rival directly.

    Attributes:
        mine: over the wire.
        hasty: over the wire, giving up after `HASTE`.
        rival: at the server.
    """

    url: str
    wire: Wire
    mine: ObjectMailbox
    hasty: ObjectMailbox
    rival: ObjectMailbox


def over(wire: Wire, server: S3Server, **options: Any) -> dict[str, Any]:
    """Storage options that lead over the wire."""
    config = {"read_timeout": READ_SECONDS}
    endpoint = {"endpoint_url": wire.endpoint}
    return {**server.options, "client_kwargs": endpoint, "config_kwargs": config, **options}


@pytest.fixture
def url() -> str:
    return f"s3://shardqueue/{uuid.uuid4().hex}"


@pytest.fixture(scope="module")
def line(s3_server: S3Server) -> Iterator[Line]:
    url = f"s3://shardqueue/{uuid.uuid4().hex}"
    with Wire(s3_server.endpoint) as wire:
        mine = ObjectMailbox(url, **over(wire, s3_server))
        hasty = ObjectMailbox(url, **over(wire, s3_server, deadline=HASTE))
        yield Line(url, wire, mine, hasty, ObjectMailbox(url, **s3_server.options))


@pytest.fixture
def key() -> str:
    return new_key()


def new_key() -> str:
    return f"units/{uuid.uuid4().hex}"


def ids(value: object) -> str | None:
    return value.value if isinstance(value, Ending | Landing) else None


# -- the wire itself ---------------------------------------------------------------------------------------


class Echo(BaseHTTPRequestHandler):
    """Answers, in chunks, with the headers and the body it was sent."""

    protocol_version = "HTTP/1.1"

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        names = ",".join(sorted(name.lower() for name in self.headers))
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for part in (names.encode(), b"\r\n", body):
            self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, format: str, *args: object) -> None: ...  # noqa: A002


@pytest.fixture
def echo() -> Iterator[Wire]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        serving = Task(server.serve_forever)
        with Wire(f"http://127.0.0.1:{server.server_port}") as wire:
            yield wire
        server.shutdown()
        serving.result()


@pytest.mark.parametrize("framing", [b"Content-Length: 6\r\n", b"Transfer-Encoding: chunked\r\n"])
@pytest.mark.parametrize("expect", [b"", b"Expect: 100-continue\r\n"])
def test_requests_and_answers_pass_whole(echo: Wire, framing: bytes, expect: bytes) -> None:
    """However they are framed, several on one connection."""
    body = b"2\r\nab\r\n4;x=y\r\n\r\n\r\n\r\n0\r\n\r\n" if b"chunked" in framing else b"ab\r\n\r\n"
    address = urlsplit(echo.endpoint)
    with socket.create_connection((str(address.hostname), int(address.port or 0))) as end:
        stream = end.makefile("rb")
        for _ in range(3):
            end.sendall(b"PUT /bucket/a%20b?x=1 HTTP/1.1\r\nHost: here\r\n" + framing + expect + b"\r\n")
            if expect:
                assert [stream.readline(), stream.readline()] == [b"HTTP/1.1 100 Continue\r\n", b"\r\n"]
            end.sendall(body)
            assert stream.readline() == b"HTTP/1.1 200 OK\r\n"
            headers = http.client.parse_headers(stream)
            assert headers["Transfer-Encoding"] is None
            answer = stream.read(int(headers["Content-Length"]))
            assert answer == b"content-length,host\r\nab\r\n\r\n"
        stream.close()
    assert echo.asked("a b") == ["PUT"] * 3


# -- one key -----------------------------------------------------------------------------------------------


def settle(line: Line, key: str, ending: Ending, landing: Landing, rival: str) -> None:
    """One create meets one fault; see who owns the key, who believes to own it, and what that took."""
    theirs: list[bool] = []

    def create() -> None:
        theirs.append(line.rival.put_if_absent(key, RIVAL))

    if rival == "before":
        create()
    meanwhile = create if rival == "meanwhile" else bool
    fault = line.wire.place(Fault("PUT", key, ending, landing, meanwhile=meanwhile))
    mine = line.mine.put_if_absent(key, MINE)
    requests = line.wire.asked(key)
    if rival == "after":
        create()
    late = line.wire.deliver(fault)

    rival_first = rival == "before" or (rival == "meanwhile" and landing is not Landing.FIRST)
    assert fault.hits == 1
    assert mine is not rival_first
    assert theirs == ([] if rival == "nobody" else [rival_first])
    assert line.rival.get(key) == (RIVAL if rival_first else MINE)
    assert late == ([412] if landing is Landing.LATE else [])
    assert line.mine.put_if_absent(key, MINE) is mine
    there = rival_first or landing is Landing.FIRST
    assert requests == (["PUT", "GET"] if there else ["PUT", "GET", "PUT"])


@pytest.mark.parametrize("ending", [*QUICK, Ending.HANG], ids=ids)
def test_one_fault_and_a_rival(line: Line, ending: Ending) -> None:
    """All at once, since each takes as long as the client pauses or has patience."""
    together(partial(settle, line, new_key(), ending, *case) for case in product(Landing, RIVALS))


@pytest.mark.parametrize(
    ("ending", "rival"),
    [*product((*QUICK, Ending.SHORT), ("nobody", "before")), (Ending.HANG, "nobody")],
    ids=ids,
)
def test_the_read_that_settles_fails_too(line: Line, key: str, ending: Ending, rival: str) -> None:
    """Half a body is no body: it is neither our claim nor another's."""
    if rival == "before":
        line.rival.put_if_absent(key, RIVAL)
    line.wire.place(Fault("PUT", key, Ending.BUSY))
    line.wire.place(Fault("GET", key, ending))
    assert line.mine.put_if_absent(key, MINE) is (rival == "nobody")
    assert line.rival.get(key) == (MINE if rival == "nobody" else RIVAL)
    assert line.wire.asked(key) == ["PUT", "GET", "PUT", "GET"]


def test_a_create_lands_just_after_it_was_looked_for(line: Line, key: str) -> None:
    """The read-back finds nothing, then the held create lands: the next one is refused, and the key is ours."""
    held = line.wire.place(Fault("PUT", key, Ending.BUSY, Landing.LATE))
    line.wire.place(Fault("GET", key, meanwhile=lambda: line.wire.deliver(held)))
    assert line.mine.put_if_absent(key, MINE) is True
    assert line.wire.asked(key) == ["PUT", "GET", "PUT", "GET"]
    assert line.rival.put_if_absent(key, RIVAL) is False
    assert line.rival.get(key) == MINE


def unknown(line: Line, key: str, ending: Ending, landing: Landing) -> Fault:
    """A create of which its learner never hears, until it gives up; its held copies."""
    creates = line.wire.place(Fault("PUT", key, ending, landing, times=FOR_EVER))
    reads = line.wire.place(Fault("GET", key, ending, times=FOR_EVER))
    with pytest.raises(MailboxUnavailableError) as caught:
        line.hasty.put_if_absent(key, MINE)
    line.wire.lift(creates)
    line.wire.lift(reads)
    last = {
        Ending.BUSY: "reduce your request rate",
        Ending.CUT: "connection was closed",
        Ending.RESET: "could not connect",
        Ending.HANG: "timeout",
    }
    said = str(caught.value)
    assert said.startswith(f"{line.url}: put_if_absent({key!r}) got no clear answer")
    assert last[ending] in said.lower()
    assert 2 <= len(line.wire.asked(key)) <= MOST_TRIES * 2
    return creates


def give_up_and_look_again(line: Line, key: str, ending: Ending, landing: Landing) -> None:
    creates = unknown(line, key, ending, landing)
    assert line.rival.get(key) == (MINE if landing is Landing.FIRST else None)
    line.wire.deliver(creates)
    landed = landing is not Landing.NEVER
    assert line.rival.put_if_absent(key, RIVAL) is not landed
    assert line.mine.put_if_absent(key, MINE) is landed
    assert line.rival.get(key) == (MINE if landed else RIVAL)


@pytest.mark.parametrize("ending", [Ending.BUSY, Ending.CUT, Ending.RESET, Ending.HANG], ids=ids)
def test_an_unknown_outcome_is_what_the_store_comes_to_hold(line: Line, ending: Ending) -> None:
    """Whoever gave up takes a claim that is found later, and holds its own bytes, for its own."""
    together(partial(give_up_and_look_again, line, new_key(), ending, landing) for landing in Landing)


@pytest.mark.parametrize("ending", [Ending.BUSY, Ending.RESET], ids=ids)
def test_a_rival_creates_while_the_outcome_is_unknown(line: Line, ending: Ending) -> None:
    together(partial(overtake, line, new_key(), ending, landing) for landing in Landing)


def overtake(line: Line, key: str, ending: Ending, landing: Landing) -> None:
    creates = unknown(line, key, ending, landing)
    rival_first = landing is not Landing.FIRST
    assert line.rival.put_if_absent(key, RIVAL) is rival_first
    assert set(line.wire.deliver(creates)) <= {412}
    assert line.mine.put_if_absent(key, MINE) is not rival_first
    assert line.rival.get(key) == (RIVAL if rival_first else MINE)


@pytest.mark.parametrize("ending", [*QUICK, Ending.SHORT], ids=ids)
@pytest.mark.parametrize("verb", ["GET", "LIST", "POST"])
def test_reads_listings_and_removals_are_tried_again(line: Line, verb: str, ending: Ending) -> None:
    folder = uuid.uuid4().hex
    key = f"{folder}/a"
    line.rival.put(key, MINE)
    calls: dict[str, tuple[Callable[[], object], object]] = {
        "GET": (lambda: line.mine.get(key), MINE),
        "LIST": (lambda: line.mine.list(f"{folder}/"), [key]),
        "POST": (lambda: line.mine.delete([key]), None),
    }
    call, answer = calls[verb]
    fault = line.wire.place(Fault(verb, "", ending))
    before = len(line.wire.requests)
    assert call() == answer
    assert fault.hits == 1
    assert len(line.wire.requests) == before + 2
    assert line.rival.get(key) == (None if verb == "POST" else MINE)


@pytest.mark.parametrize(
    ("ending", "landing"),
    [*product(QUICK, Landing), (Ending.HANG, Landing.LATE)],
    ids=ids,
)
def test_an_overwrite_is_sent_once(line: Line, ending: Ending, landing: Landing) -> None:
    """Sent twice, an older write could land after a newer one that was answered."""
    page = f"learners/{uuid.uuid4().hex}"
    fault = line.wire.place(Fault("PUT", page, ending, landing))
    with pytest.raises(MailboxUnavailableError, match="may have taken effect"):
        line.mine.put(page, b"1")
    assert line.wire.asked(page) == ["PUT"]
    line.wire.deliver(fault)
    assert line.rival.get(page) == (None if landing is Landing.NEVER else b"1")


def test_a_wire_that_goes_and_comes_back(line: Line, key: str) -> None:
    line.wire.down()
    with pytest.raises(MailboxUnavailableError, match=r"s3://shardqueue/\w+: put_if_absent.*onnect"):
        line.hasty.put_if_absent(key, MINE)
    line.wire.up()
    assert line.wire.asked(key) == []
    assert line.mine.put_if_absent(key, MINE) is True


# -- queues ------------------------------------------------------------------------------------------------


def share_over(wire: Wire, server: S3Server, url: str, units: Any) -> tuple[list[list[Any]], ObjectMailbox]:
    """Two learners with mailboxes of their own, over the wire; neither is done before both have joined."""
    direct = ObjectMailbox(url, **server.options)

    def both_joined() -> None:
        until(lambda: len(direct.list(RunKeys("1").learners)) >= 2)

    shares = together(
        partial(train, units, ObjectMailbox(url, **over(wire, server)), name, hold=both_joined, prefetch=2)
        for name in "ab"
    )
    return shares, direct


def freeze(wire: Wire) -> None:
    """Every listing shows what it showed when it was first asked for."""
    wire.frozen = True


def lag(wire: Wire) -> None:
    """The eight keys that were created last are in no listing."""
    wire.hidden = lambda key: key in list(wire.created)[-8:]


def hide_claims(wire: Wire) -> None:
    """No listing shows any claim."""
    wire.hidden = lambda key: "/units/" in key


@pytest.mark.parametrize("stale", [freeze, lag, hide_claims])
def test_stale_listings_never_give_a_unit_twice(
    s3_server: S3Server, url: str, stale: Callable[[Wire], None]
) -> None:
    """A learner tries what no listing shows to be claimed, once; the create alone decides."""
    units = unit_grid(40, 2, taper=False)
    with Wire(s3_server.endpoint) as wire:
        stale(wire)
        shares, direct = share_over(wire, s3_server, url, units)
        tries = Counter(wire.asked(f"/units/{unit}").count("PUT") for unit in units)
    assert sum(map(Counter, shares), Counter()) == dataset(units)
    assert direct.list("units/") == [f"units/{unit}" for unit in units]
    assert set(tries) <= {1, 2}
    if stale is hide_claims:
        assert set(tries) == {2}


def test_one_answer_in_twenty_is_lost(s3_server: S3Server, url: str) -> None:
    """Of all creates and overwrites, one in forty ends in a cut connection, one in forty in a 503."""
    units = unit_grid(90, 1, taper=False)
    with Wire(s3_server.endpoint) as wire:
        faults = [
            wire.place(Fault("PUT", "", ending, first=first, every=40, times=FOR_EVER))
            for ending, first in ((Ending.CUT, 5), (Ending.BUSY, 25))
        ]
        shares, direct = share_over(wire, s3_server, url, units)
    assert sum(map(Counter, shares), Counter()) == dataset(units)
    assert all(fault.hits >= 2 for fault in faults)
    assert len(direct.list("units/")) == len(units)


def test_a_store_that_is_gone_for_a_while_stops_nobody(s3_server: S3Server, url: str) -> None:
    """What is in hand is trained while connections are refused; claiming goes on when they are taken again."""
    units, loader = unit_grid(200, 20, taper=False), CountingLoader()
    seen: list[Any] = []
    with Wire(s3_server.endpoint) as wire:
        mailbox = ObjectMailbox(url, **over(wire, s3_server, deadline=HASTE))
        with shared_queue(units, mailbox, "a", loader, prefetch=4) as queue:
            seen += [next(queue)[1] for _ in range(2)]
            loader.wait_for(6)
            wire.down()
            seen += [next(queue)[1] for _ in range(18)]  # the rest of the unit in hand
            rest = Task(lambda: [batch for _, batch in queue])
            rest.join(3 * HASTE)
            assert rest.is_alive()
            wire.up()
            seen += rest.result()
        assert queue.returned == ()
    assert Counter(seen) == dataset(units)


def test_a_store_that_stays_gone_is_an_error_after_what_was_loaded(s3_server: S3Server, url: str) -> None:
    units, loader = unit_grid(800, 40, taper=False), CountingLoader()
    seen: list[Any] = []
    said = rf"mailbox has not answered for \d+ s.*last: {url}.*Could not connect to the endpoint URL"
    with Wire(s3_server.endpoint) as wire:
        mailbox = ObjectMailbox(url, **over(wire, s3_server, deadline=HASTE))
        queue = shared_queue(units, mailbox, "a", loader, prefetch=4)
        with (
            pytest.raises(MailboxUnavailableError, match=said),
            Session(mailbox, "a", clock=Clock(speed=300)) as session,
            queue,
        ):
            for _, batch in queue:
                seen.append(batch)
                session.step(samples=1)
                if len(seen) == 2:
                    loader.wait_for(6)
                    wire.down()
    assert len(seen) == len(set(seen)) >= 6
    assert not any(returned.offered for returned in queue.returned)


def test_a_claim_that_lands_after_its_learner_gave_up_is_its_own(s3_server: S3Server, url: str) -> None:
    """The mailbox gives up on the first claim, whose create lands later; asked again, it is known by its token."""
    units = unit_grid(12, 4, taper=False)
    with Wire(s3_server.endpoint) as wire:
        mailbox = ObjectMailbox(url, **over(wire, s3_server, deadline=HASTE))
        rival = ObjectMailbox(url, **s3_server.options)
        fault = wire.place(Fault("PUT", "units/000000-0.json", Ending.BUSY, Landing.LATE, times=FOR_EVER))
        learner = Task(lambda: train(units, mailbox, "a", prefetch=1))
        until(lambda: fault.hits > MOST_TRIES)  # so at least the second call of the verb
        landed = wire.deliver(fault)
        wire.lift(fault)
        assert landed[0] == 200
        assert set(landed[1:]) == {412}
        assert Counter(learner.result()) == dataset(units)
        assert train(units, rival, "b", run="1") == []
