from __future__ import annotations

import json
import pickle
import socket
import subprocess
import sys
import uuid
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from mailbox_contract import SharedContract, race
from wire import Wire

from shardqueue.errors import (
    InvalidInputError,
    MailboxError,
    MailboxRefusedError,
    MailboxUnavailableError,
)
from shardqueue.mailbox import Mailbox, open_mailbox
from shardqueue.mailbox.objects import ObjectMailbox, Settler
from shardqueue.mailbox.s3 import require_conditional_put

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import S3Server

pytestmark = pytest.mark.s3


@pytest.fixture
def url() -> str:
    return f"s3://shardqueue/{uuid.uuid4().hex}"


class TestS3(SharedContract):
    rounds = 4  # SeaweedFS lets some losers of a true race wait whole seconds.

    @pytest.fixture
    def mailbox(self, s3_server: S3Server, url: str) -> Mailbox:
        return ObjectMailbox(url, **s3_server.options)


def chained(error: BaseException | None) -> str:
    """All that a traceback would print of an error."""
    texts = []
    while error is not None:
        texts.append(repr(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "\n".join(texts)


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

        def cost(call: Callable[[], object]) -> list[str]:
            before = len(wire.requests)
            call()
            return wire.methods[before:]

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


def test_a_pickle_holds_no_connection(s3_server: S3Server, url: str) -> None:
    mailbox = ObjectMailbox(url, deadline=7, **s3_server.options)
    fresh = pickle.loads(pickle.dumps(mailbox))
    assert fresh.__dict__ == {**mailbox.__dict__, "_settlers": {}}


def test_a_closed_port(url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
    options: dict[str, Any] = {"key": "k1234", "secret": "s1234", "endpoint_url": endpoint, "deadline": 0.5}
    with pytest.raises(MailboxUnavailableError, match=r"s3://shardqueue/.*deadline 0.5 s") as caught:
        open_mailbox(url, **options)
    assert "s1234" not in chained(caught.value)


@pytest.mark.parametrize(
    "bad",
    [
        "s3://",
        "s3:///prefix",
        "s3://B/x",
        "s3://bucket/a//b",
        "s3://bucket/../b",
        "s3://bucket/a\nb",
        f"s3://bucket/{'a' * 201}",
    ],
)
def test_bad_urls(bad: str) -> None:
    with pytest.raises(InvalidInputError):
        ObjectMailbox(bad)


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
