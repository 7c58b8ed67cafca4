from __future__ import annotations

import json
import pickle
import socket
import subprocess
import sys
import threading
import uuid
from collections import Counter
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from mailbox_contract import Races, SharedContract, race
from servers import (
    FORKS_AFTER_USE,
    LEAVES_WHILE_CLAIMING,
    answering,
    chained,
    free_port,
    printed,
    self_signed,
)
from wire import Wire

from shardqueue.errors import (
    InvalidInputError,
    MailboxError,
    MailboxRefusedError,
    MailboxUnavailableError,
)
from shardqueue.mailbox import Mailbox, open_mailbox
from shardqueue.mailbox.objects import ObjectMailbox
from shardqueue.mailbox.places import hider
from shardqueue.mailbox.s3 import require_conditional_put
from shardqueue.mailbox.settling import Settler, unreachable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from conftest import S3Server

pytestmark = pytest.mark.s3


@pytest.fixture
def url() -> str:
    return f"s3://shardqueue/{uuid.uuid4().hex}"


@pytest.fixture(scope="module")
def opened(s3_server: S3Server) -> Mailbox:
    """One for all of the contract: a new client takes longer than most of it."""
    return ObjectMailbox(f"s3://shardqueue/{uuid.uuid4().hex}", **s3_server.options)


class TestS3(SharedContract):
    store = "SeaweedFS"
    rounds, learners = 2, 4  # SeaweedFS lets some losers of a true race wait whole seconds.

    @pytest.fixture
    def mailbox(self, opened: Mailbox) -> Iterator[Mailbox]:
        yield opened
        opened.delete(opened.list(""))


@pytest.mark.full
class TestLongRacesOnS3(Races):
    rounds = 8

    @pytest.fixture
    def mailbox(self, s3_server: S3Server, url: str) -> Mailbox:
        return ObjectMailbox(url, **s3_server.options)


def test_opening_proves_and_cleans_up(s3_server: S3Server, url: str) -> None:
    with Wire(s3_server.endpoint) as wire:
        mailbox = open_mailbox(url, **{**s3_server.options, "client_kwargs": {"endpoint_url": wire.endpoint}})
        assert Counter(wire.methods) == {"PUT": 2, "GET": 2, "POST": 1}
        assert mailbox.list("") == []


def test_looking_writes_nothing(s3_server: S3Server, url: str) -> None:
    with Wire(s3_server.endpoint) as wire:
        options = {**s3_server.options, "client_kwargs": {"endpoint_url": wire.endpoint}}
        assert open_mailbox(url, prove=False, **options).list("") == []
        assert wire.methods == ["GET"]


def test_requests_of_each_verb(s3_server: S3Server, url: str) -> None:
    with Wire(s3_server.endpoint) as wire:
        mailbox = ObjectMailbox(
            url, **{**s3_server.options, "client_kwargs": {"endpoint_url": wire.endpoint}}
        )

        cost = wire.cost
        assert cost(lambda: mailbox.put_if_absent("u/a", b"mine")) == ["PUT"]
        assert cost(lambda: mailbox.put_if_absent("u/a", b"yours")) == ["PUT", "GET"]
        assert cost(lambda: mailbox.get("u/a")) == ["GET"]
        assert cost(lambda: mailbox.get("u/b")) == ["GET"]
        assert cost(lambda: mailbox.list("u/", limit=5)) == ["GET"]
        assert cost(lambda: mailbox.list("u/", after="u/a", limit=5)) == ["GET"]
        assert cost(lambda: mailbox.list("u/", after="v", limit=5)) == []
        assert cost(lambda: mailbox.put("u/a", b"2")) == ["PUT"]
        assert cost(lambda: mailbox.delete([f"u/{number}" for number in range(1001)])) == ["POST", "POST"]


def test_lost_answers_on_the_wire(s3_server: S3Server, url: str) -> None:
    with Wire(s3_server.endpoint) as wire:
        options = {**s3_server.options, "client_kwargs": {"endpoint_url": wire.endpoint}}
        mine, yours = ObjectMailbox(url, **options), ObjectMailbox(url, **s3_server.options)
        for number in range(8):
            wire.lose = 1 + number % 2
            assert mine.put_if_absent(f"u/{number}", b"mine") is True
            assert yours.put_if_absent(f"u/{number}", b"yours") is False
            wire.lose = 0
        wire.lose = 10**6
        with pytest.raises(MailboxUnavailableError, match="may have taken effect"):
            mine.put("page", b"1")
        wire.lose = 0
        assert mine.get("page") == b"1"


def test_lost_answers_and_a_rival(s3_server: S3Server, url: str) -> None:
    with Wire(s3_server.endpoint) as wire:
        options = {**s3_server.options, "client_kwargs": {"endpoint_url": wire.endpoint}}
        learners = [ObjectMailbox(url, **options) for _ in range(4)]
        creates = [learner.put_if_absent for learner in learners]
        for number in range(3):
            wire.lose = 2
            key, bodies = f"u/{number}", [f"learner {place}".encode() for place in range(4)]
            won = race([partial(create, key, body) for create, body in zip(creates, bodies, strict=True)])
            wire.lose = 0
            assert sum(won) == 1
            assert learners[0].get(key) == bodies[won.index(True)]


def test_a_missing_bucket(s3_server: S3Server) -> None:
    with pytest.raises(MailboxError) as caught:
        open_mailbox("s3://no-such-bucket/x", **s3_server.writer)
    assert not isinstance(caught.value, MailboxUnavailableError)
    looking = open_mailbox("s3://no-such-bucket/x", prove=False, **s3_server.writer)
    with pytest.raises(MailboxError, match=r"s3://no-such-bucket/x.*create the bucket"):
        looking.get("a")
    with pytest.raises(MailboxError, match=r"s3://no-such-bucket/x.*create the bucket"):
        looking.delete(["a"])


@pytest.mark.parametrize("wrong", [{"secret": "wrongsecret99"}, {"key": "nobodyskey99"}], ids=repr)
def test_wrong_credentials(s3_server: S3Server, url: str, wrong: dict[str, str]) -> None:
    options = {**s3_server.options, **wrong}
    with pytest.raises(MailboxError, match="check the credentials") as caught:
        open_mailbox(url, **options)
    assert not isinstance(caught.value, MailboxUnavailableError)
    for secret in (options["key"], options["secret"]):
        assert secret not in chained(caught.value)


def test_credentials_are_never_shown(s3_server: S3Server, url: str) -> None:
    mailbox = ObjectMailbox(url, **s3_server.options)
    mailbox.put("a", b"1")
    assert "testsecret" not in repr(mailbox) + str(mailbox)
    with pytest.raises(InvalidInputError) as caught:
        ObjectMailbox("s3://AKIAX:hush-hush@bucket/prefix")
    assert "hush" not in chained(caught.value)
    with pytest.raises(MailboxError) as failed:
        ObjectMailbox(url, key="k1234", secret="s1234", endpoint_url="http://user:hush-hush@:bad:port")
    assert "hush" not in chained(failed.value)
    with pytest.raises(MailboxError) as unknown:
        ObjectMailbox(url, secret="s1234", config_kwargs={"s1234": "s1234"})
    assert "s1234" not in chained(unknown.value)


def test_credentials_in_the_environment_are_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "hush-hush-token")
    monkeypatch.setenv("AWS_PROFILE", "default-profile")
    hide = hider({})
    assert hide("token hush-hush-token of default-profile") == "token *** of default-profile"


def test_a_pickle_holds_no_connection(s3_server: S3Server, url: str) -> None:
    mailbox = ObjectMailbox(url, deadline=7, **s3_server.options)
    fresh = pickle.loads(pickle.dumps(mailbox))
    assert fresh.__dict__ == {**mailbox.__dict__, "_settlers": {}}


def at(endpoint: str, deadline: float = 0.3) -> dict[str, Any]:
    """Storage options for whatever is at `endpoint`."""
    return {"key": "k1234", "secret": "s1234", "endpoint_url": endpoint, "deadline": deadline}


def test_a_closed_port_is_said_before_the_deadline(url: str) -> None:
    options = at(f"http://127.0.0.1:{free_port()}", deadline=60)
    with pytest.raises(
        MailboxUnavailableError, match=r"s3://shardqueue/.*deadline 5 s.*nothing listens"
    ) as caught:
        open_mailbox(url, **options)
    assert "nothing has answered there yet: check the URL, endpoint_url" in str(caught.value)
    assert "s1234" not in chained(caught.value)


def test_an_unknown_host(url: str) -> None:
    with pytest.raises(MailboxUnavailableError, match="no host of that name is known"):
        open_mailbox(url, **at("http://no-such-host.invalid"))


def test_http_and_https_mixed_up(url: str, tmp_path: Path) -> None:
    with answering(200, "", tls=self_signed(tmp_path)) as address:
        with pytest.raises(MailboxUnavailableError, match="write https:// for http://"):
            open_mailbox(url, **at(f"http://{address}"))
        with pytest.raises(MailboxUnavailableError, match="certificate is not trusted"):
            open_mailbox(url, **at(f"https://{address}"))
    with (
        answering(200, "") as address,
        pytest.raises(MailboxUnavailableError, match="write http:// for https://"),
    ):
        open_mailbox(url, **at(f"https://{address}"))


@pytest.mark.parametrize(
    "body",
    [
        "Client sent an HTTP request to an HTTPS server.\n",
        "<html><title>400 The plain HTTP request was sent to HTTPS port</title></html>",
    ],
)
def test_a_server_that_wants_tls_and_says_so(url: str, body: str) -> None:
    with answering(400, body) as address, pytest.raises(MailboxError, match="https:// for http://"):
        open_mailbox(url, **at(f"http://{address}"))


@pytest.mark.parametrize(
    ("status", "code", "remedy"),
    [
        (301, "PermanentRedirect", "region"),
        (400, "AuthorizationHeaderMalformed", "region"),
        (400, "IllegalLocationConstraintException", "region"),
        (400, "ExpiredToken", "renew the credentials"),
        (403, "ExpiredTokenException", "renew the credentials"),
        (403, "AccessDenied", "allow Get, Put, Delete and List"),
        (403, "InvalidAccessKeyId", "check the credentials"),
        (403, "SignatureDoesNotMatch", "check the credentials"),
        (403, "RequestTimeTooSkewed", "clock"),
        (404, "NoSuchBucket", "create the bucket"),
        (405, "MethodNotAllowed", "no answer of S3"),
        (501, "NotImplemented", "use another store"),
    ],
)
def test_an_answer_that_no_retry_mends(url: str, status: int, code: str, remedy: str) -> None:
    body = f"<Error><Code>{code}</Code><Message>s1234 is wrong</Message></Error>"
    with answering(status, body, {"x-amz-bucket-region": "eu-west-1"}) as address:
        looking = open_mailbox(url, prove=False, **at(f"http://{address}"))
        for call in (lambda: looking.put_if_absent("a", b"1"), lambda: looking.list("")):
            with pytest.raises(MailboxError, match=remedy) as caught:
                call()
            assert not isinstance(caught.value, MailboxUnavailableError)
            assert "s1234" not in chained(caught.value)


def test_a_busy_server_is_tried_again(url: str) -> None:
    with answering(503, "<Error><Code>SlowDown</Code><Message>slower</Message></Error>") as address:
        looking = open_mailbox(url, prove=False, **at(f"http://{address}"))
        with pytest.raises(MailboxUnavailableError, match=r"in \d+ tries .*slower.*same bytes"):
            looking.put_if_absent("a", b"1")


def test_what_tells_that_nobody_is_there() -> None:
    def below(*errors: Exception) -> Exception:
        for error, cause in pairwise(errors):
            error.__cause__ = cause
        return errors[0]

    assert unreachable(below(OSError("failed"), ConnectionRefusedError(111, "refused")))
    assert unreachable(below(OSError("failed"), ValueError(), socket.gaierror(-2, "unknown")))
    assert unreachable(OSError("503")) is None
    assert unreachable(TimeoutError()) is None
    try:
        raise ConnectionRefusedError("somebody else's")
    except ConnectionRefusedError:
        try:
            raise OSError("503")
        except OSError as error:
            assert unreachable(error) is None, "what the caller was handling tells nothing"


@pytest.mark.parametrize(
    "bad",
    [
        "s3://",
        "s3:///prefix",
        "s3://B/x",
        "s3://bucket/a//b",
        "s3://bucket/../b",
        "s3://bucket/a\nb",
        "s3://bucket//a",
        "s3://bucket/a\\b",
        "s3://bucket/a/..",
        f"s3://bucket/{'a' * 201}",
        f"s3://bucket/{'a' * 1000}",
        f"s3://bucket/{'ü' * 101}",
        "gs://B/x",
        "gs://bucket/a//b",
        "az://bucket/../b",
        "abfss://container@elsewhere.net/x",
    ],
)
def test_bad_urls(bad: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        ObjectMailbox(bad)
    assert caught.value.remedy


@pytest.mark.parametrize(
    "prefix", ["with space", "日本/ü", "a?versionId=3", "a#b", "100%25", "a+b&c", "ü" * 80, "~"]
)
def test_any_other_prefix(s3_server: S3Server, prefix: str) -> None:
    unique = uuid.uuid4().hex
    mailbox = open_mailbox(f"s3://shardqueue/{unique}/{prefix}", **s3_server.options)
    assert mailbox.put_if_absent("a b", b"1") is True
    assert mailbox.list("") == ["a b"]
    assert ObjectMailbox(f"s3://shardqueue/{unique}", **s3_server.options).list("") == [f"{prefix}/a b"]


def test_bad_deadline(url: str) -> None:
    with pytest.raises(InvalidInputError):
        ObjectMailbox(url, deadline=0)


def test_a_prefix_is_a_folder(s3_server: S3Server, url: str) -> None:
    near, far = ObjectMailbox(url, **s3_server.options), ObjectMailbox(f"{url}2/", **s3_server.options)
    near.put("a", b"1")
    far.put("b", b"1")
    assert near.list("") == ["a"]
    assert far.list("") == ["b"]
    assert ObjectMailbox("s3://shardqueue", **s3_server.options).get(f"{url.rpartition('/')[2]}/a") == b"1"


def test_an_old_client_is_refused() -> None:
    shape = SimpleNamespace(input_shape=SimpleNamespace(members={"Bucket": 1, "Key": 1}))
    with pytest.raises(MailboxRefusedError, match=r"s3fs>=2026\.2\.0"):
        require_conditional_put(SimpleNamespace(operation_model=lambda name: shape))


def test_a_process_that_used_it_exits_quietly(s3_server: S3Server, url: str) -> None:
    program = (
        "import json, sys\n"
        "from shardqueue.mailbox import open_mailbox\n"
        "mailbox = open_mailbox(sys.argv[1], **json.loads(sys.argv[2]))\n"
        "print(mailbox.put_if_absent('a', b'1'))\n"
    )
    command = [sys.executable, "-W", "always", "-c", program, url, json.dumps(s3_server.options)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert (ended.stdout, ended.stderr) == ("True\n", "")


def test_a_process_that_leaves_while_it_claims_ends_quietly(s3_server: S3Server, url: str) -> None:
    assert printed(LEAVES_WHILE_CLAIMING, url, s3_server.options) == ("leaving\n", "")


def test_children_leave_the_connections_of_their_parent_alone(s3_server: S3Server, url: str) -> None:
    assert printed(FORKS_AFTER_USE, url, s3_server.options) == ("0\n0\n0\n['a', 'b']\n", "")


class Script:
    """A store whose creates end as scripted, and whose objects are in a dictionary."""

    page_size = 3

    def __init__(self, *endings: str) -> None:
        self.endings = list(endings)
        self.objects: dict[str, bytes] = {}
        self.tree = False
        self.asked: list[str] = []

    def create(self, key: str, data: bytes) -> None:
        ending = self._next("create")
        if ending in ("lands", "landed, then lost"):
            if key in self.objects:
                raise OSError("412")
            self.objects[key] = data
        if ending == "rival lands first":
            self.objects[key] = b"rival"
        if ending == "refused":
            raise ConnectionRefusedError(ending)
        if ending != "lands":
            raise OSError(ending)

    def read(self, key: str) -> bytes | None:
        self._next("read", "answers")
        return self.objects.get(key)

    def write(self, key: str, data: bytes) -> None:
        self._next("write", "answers")
        self.objects[key] = data

    def page(self, prefix: str, after: str, more: str | None, limit: int) -> tuple[list[str], str | None]:
        self._next("page", "answers")
        keys = sorted(self.objects, key=lambda key: key.split("/") if self.tree else [key])
        start = more or after
        if start:
            order = [*keys, start] if start not in keys else keys
            order.sort(key=lambda key: key.split("/") if self.tree else [key])
            keys = order[order.index(start) + 1 :]
        found = [key for key in keys if key.startswith(prefix)]
        return found[:limit], found[limit - 1] if len(found) > limit else None

    def remove(self, keys: list[str]) -> None:
        self._next("remove", "answers")
        for key in keys:
            self.objects.pop(key, None)

    def remedy(self, error: Exception) -> str | None:
        return "log in" if str(error) == "denied" else None

    def _next(self, what: str, otherwise: str = "") -> str:
        self.asked.append(what)
        ending = (
            self.endings.pop(0)
            if self.endings and (not otherwise or self.endings[0] in ("fails", "denied"))
            else otherwise
        )
        if ending in ("fails", "denied"):
            raise OSError(ending)
        return ending or "lands"


class Clock:
    """Time passes by sleeping."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def settler(store: Script, deadline: float = 60.0) -> tuple[Settler, Clock]:
    clock = Clock()
    return Settler(store, "s3://b/p", deadline, str, clock, clock.sleep), clock


@pytest.mark.parametrize(
    ("endings", "won", "asked"),
    [
        (["lands"], True, ["create"]),
        (["landed, then lost"], True, ["create", "read"]),
        (["rival lands first"], False, ["create", "read"]),
        (["never arrives", "lands"], True, ["create", "read", "create"]),
        (["never arrives", "rival lands first"], False, ["create", "read", "create", "read"]),
        (["landed, then lost", "fails", "lands"], True, ["create", "read", "create", "read"]),
        (["rival lands first", "fails", "lands"], False, ["create", "read", "create", "read"]),
    ],
)
def test_a_create_is_settled(endings: list[str], won: bool, asked: list[str]) -> None:
    store = Script(*endings)
    mine, _ = settler(store)
    assert mine.put_if_absent("k", b"mine") is won
    assert store.asked == asked
    assert (store.objects["k"] == b"mine") is won


def test_an_unsettled_create_is_unknown() -> None:
    store = Script(*["never arrives"] * 1000)
    mine, clock = settler(store, deadline=60.0)
    with pytest.raises(
        MailboxUnavailableError, match=r"s3://b/p: put_if_absent\('k'\).*never arrives.*same bytes"
    ):
        mine.put_if_absent("k", b"mine")
    assert 40 < clock.now <= 60
    assert 10 < store.asked.count("create") < 40


def test_a_server_that_never_answered_is_given_less_time() -> None:
    store = Script(*["refused"] * 1000)
    mine, clock = settler(store, deadline=60.0)
    mine.expect_answer(5.0)
    with pytest.raises(MailboxUnavailableError, match=r"deadline 5 s.*nothing listens there"):
        mine.put_if_absent("k", b"mine")
    assert 0 < clock.now <= 5


@pytest.mark.parametrize("sign", ["answers", "fails"])
def test_a_server_that_gave_a_sign_has_the_whole_deadline(sign: str) -> None:
    store = Script()
    mine, clock = settler(store, deadline=60.0)
    mine.expect_answer(5.0)
    if sign == "answers":
        mine.get("k")
    store.endings = [*(["fails"] if sign == "fails" else []), *["refused"] * 1000]
    with pytest.raises(MailboxUnavailableError, match=r"deadline 60 s.*same bytes"):
        mine.put_if_absent("k", b"mine")
    assert 40 < clock.now <= 60


def test_one_who_did_not_ask_for_haste_has_the_whole_deadline() -> None:
    mine, clock = settler(Script(*["refused"] * 1000), deadline=60.0)
    with pytest.raises(MailboxUnavailableError, match=r"deadline 60 s"):
        mine.put_if_absent("k", b"mine")
    assert 40 < clock.now <= 60


class ProgramEnds(Script):
    """Its executors are gone for the first two creates."""

    def create(self, key: str, data: bytes) -> None:
        if self.asked.count("create") < 2:
            self.asked.append("create")
            raise RuntimeError("cannot schedule new futures after shutdown")
        super().create(key, data)

    def remedy(self, error: Exception) -> str | None:
        return "correct the options"


def test_when_the_program_ends_a_daemon_pauses_and_others_hear_of_it() -> None:
    with pytest.raises(MailboxError, match="leave the queue before the program ends"):
        settler(ProgramEnds())[0].put_if_absent("k", b"mine")
    won = []
    mine, _ = settler(ProgramEnds())
    thread = threading.Thread(target=lambda: won.append(mine.put_if_absent("k", b"mine")), daemon=True)
    thread.start()
    thread.join()
    assert won == [True]


@pytest.mark.parametrize("verb", ["put_if_absent", "put", "get", "list_keys", "delete"])
def test_the_useless_is_not_tried_again(verb: str) -> None:
    arguments: dict[str, tuple[Any, ...]] = {
        "put_if_absent": ("k", b"1"),
        "put": ("k", b"1"),
        "get": ("k",),
        "list_keys": ("", "", None),
        "delete": (["k"],),
    }
    store = Script("denied")
    with pytest.raises(MailboxError, match="log in") as caught:
        getattr(settler(store)[0], verb)(*arguments[verb])
    assert not isinstance(caught.value, MailboxUnavailableError)
    assert len(store.asked) == 1


def test_reads_are_tried_again_and_overwrites_are_not() -> None:
    store = Script()
    mine, _ = settler(store)
    for call in (lambda: mine.get("k"), lambda: mine.list_keys("", "", None), lambda: mine.delete(["k"])):
        store.endings, store.asked = ["fails", "fails"], []
        call()
        assert len(store.asked) == 3
    store.endings, store.asked = ["fails"], []
    with pytest.raises(MailboxUnavailableError):
        mine.put("k", b"1")
    assert store.asked == ["write"]


@pytest.mark.parametrize("tree", [False, True])
def test_listings_are_sorted_by_whole_keys(tree: bool) -> None:
    store = Script()
    store.tree = tree
    store.objects = dict.fromkeys(["a b", "a-b", "a/x", "a/y", "a.json", "b", "c/d"], b"1")
    mine, _ = settler(store)
    ordered = sorted(store.objects)
    assert mine.list_keys("", "", None) == ordered
    assert mine.list_keys("a", "", None) == ordered[:5]
    assert mine.list_keys("", "", 4) == ordered[:4]
    assert mine.list_keys("a/", "a/x", None) == ["a/y"]
    assert mine.list_keys("", "b", None) == ["c/d"]
