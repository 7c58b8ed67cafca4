from __future__ import annotations

import asyncio
import os
import shutil
import uuid
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from mailbox_contract import SharedContract
from servers import FORKS_AFTER_USE, LEAVES_WHILE_CLAIMING, answering, chained, free_port, listening, printed
from wire import Wire

from shardqueue.errors import MailboxError, MailboxRefusedError, MailboxUnavailableError
from shardqueue.mailbox import Mailbox, open_mailbox
from shardqueue.mailbox.objects import ObjectMailbox
from shardqueue.mailbox.places import secrets_in

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("adlfs", reason="pip install 'shardqueue[azure]'")

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The account and key that Azurite's documentation publishes; they open nothing else."""


def connection(endpoint: str, key: str = KEY) -> dict[str, Any]:
    """Storage options for the account at `endpoint`."""
    fields = {"AccountName": ACCOUNT, "AccountKey": key, "BlobEndpoint": f"{endpoint}/{ACCOUNT}"}
    return {"connection_string": "".join(f"{name}={value};" for name, value in fields.items())}


async def make_container(options: dict[str, Any]) -> None:
    from azure.storage.blob.aio import BlobServiceClient

    async with BlobServiceClient.from_connection_string(options["connection_string"]) as client:
        await client.create_container("shardqueue")


async def make_empty_blob(options: dict[str, Any], name: str) -> None:
    from azure.storage.blob.aio import BlobServiceClient

    async with BlobServiceClient.from_connection_string(options["connection_string"]) as client:
        await client.get_blob_client("shardqueue", name).upload_blob(b"")


@pytest.fixture(scope="module")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an Azurite that has the container `shardqueue`."""
    program = os.environ.get("AZURITE_BLOB") or shutil.which("azurite-blob")
    if program is None:
        pytest.skip("npm install azurite, and put node_modules/.bin on PATH")
    port = free_port()
    command = [program, "--blobHost", "127.0.0.1", "--blobPort", str(port), "--inMemoryPersistence"]
    command += ["--silent", "--skipApiVersionCheck", "--disableTelemetry"]
    with listening(command, port, tmp_path_factory.mktemp("azurite")):
        endpoint = f"http://127.0.0.1:{port}"
        asyncio.run(make_container(connection(endpoint)))
        yield endpoint


@pytest.fixture
def url() -> str:
    return f"az://shardqueue/{uuid.uuid4().hex}"


class TestAzure(SharedContract):
    store = "Azurite"
    listing = "scan"
    rounds = 4

    @pytest.fixture
    def mailbox(self, azurite: str, url: str) -> Mailbox:
        return open_mailbox(url, prove=False, **connection(azurite))


@pytest.mark.parametrize(
    ("program", "output"),
    [(LEAVES_WHILE_CLAIMING, "leaving\n"), (FORKS_AFTER_USE, "0\n0\n0\n['a', 'b']\n")],
    ids=["leaves while claiming", "forks after use"],
)
def test_programs_end_quietly(azurite: str, url: str, program: str, output: str) -> None:
    assert printed(program, url, connection(azurite)) == (output, "")


def test_requests_of_each_verb(azurite: str, url: str) -> None:
    with Wire(azurite) as wire:
        mailbox = open_mailbox(url, **connection(wire.endpoint))
        assert Counter(wire.methods) == {"PUT": 2, "GET": 2, "DELETE": 1}

        cost = wire.cost
        assert cost(lambda: mailbox.put_if_absent("u/a", b"mine")) == ["PUT"]
        assert cost(lambda: mailbox.put_if_absent("u/a", b"yours")) == ["PUT", "GET"]
        assert cost(lambda: mailbox.get("u/b")) == ["GET"]
        assert cost(lambda: mailbox.list("u/", after="u/a", limit=5)) == ["GET"]
        assert cost(lambda: mailbox.put("u/a", b"2")) == ["PUT"]
        assert cost(lambda: mailbox.delete(["u/a", "u/b"])) == ["DELETE", "DELETE"]


def test_a_listing_reads_the_prefix_from_its_beginning(azurite: str, url: str) -> None:
    mailbox = open_mailbox(url, prove=False, **connection(azurite))
    assert mailbox.listing == "scan"  # type: ignore[attr-defined]


def test_lost_answers_on_the_wire(azurite: str, url: str) -> None:
    with Wire(azurite) as wire:
        mine = open_mailbox(url, prove=False, **connection(wire.endpoint))
        yours = open_mailbox(url, prove=False, **connection(azurite))
        for number in range(4):
            wire.lose = 1 + number % 2
            assert mine.put_if_absent(f"u/{number}", b"mine") is True
            assert yours.put_if_absent(f"u/{number}", b"yours") is False


def test_an_empty_blob_is_no_key(azurite: str, url: str) -> None:
    """With a hierarchical namespace, folders are listed as empty blobs."""
    mailbox = open_mailbox(url, prove=False, **connection(azurite))
    mailbox.put("a/b", b"1")
    asyncio.run(make_empty_blob(connection(azurite), f"{url.rpartition('/')[2]}/a"))
    assert mailbox.list("") == ["a/b"]
    assert mailbox.get("a") is None


def test_a_missing_container(azurite: str) -> None:
    with pytest.raises(MailboxError, match=r"az://no-such-container/x.*create the container") as caught:
        open_mailbox("abfs://no-such-container/x", **connection(azurite))
    assert not isinstance(caught.value, MailboxUnavailableError)
    looking = open_mailbox("az://no-such-container/x", prove=False, **connection(azurite))
    for call in (lambda: looking.get("a"), lambda: looking.delete(["a"]), lambda: looking.list("")):
        with pytest.raises(MailboxError, match="create the container"):
            call()


def test_wrong_credentials(azurite: str, url: str) -> None:
    wrong = "A" * 86 + "=="
    with pytest.raises(MailboxError, match="check the credentials") as caught:
        open_mailbox(url, **connection(azurite, wrong))
    assert not isinstance(caught.value, MailboxUnavailableError)
    assert wrong not in chained(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"connection_string": "AccountName=a;AccountKey=hush-hush;BlobEndpoint=nowhere"},
        {"account_name": "a", "account_key": "hush-hush", "account_host": "no-such-host.invalid"},
        {"account_name": "a", "sas_token": "?sv=1&sig=hush-hush", "account_host": "no-such-host.invalid"},
        {"account_name": "a", "credential": "hush-hush", "account_host": "no-such-host.invalid"},
        {},
    ],
    ids=lambda options: next(iter(set(options) - {"account_name", "account_host"}), "none"),
)
def test_wrong_options_show_no_secret(url: str, options: dict[str, Any]) -> None:
    with pytest.raises(MailboxError) as caught:
        open_mailbox(url, deadline=0.3, **options)
    assert "hush" not in chained(caught.value)


def test_the_secrets_in_options_are_known(url: str) -> None:
    options = {"connection_string": "AccountName=a;AccountKey=hush-1==;SharedAccessSignature=sv=1&sig=hush-2"}
    assert {"hush-1==", "hush-2"} <= set(secrets_in(options))


@pytest.mark.parametrize(
    ("status", "code", "remedy"),
    [
        (403, "AuthorizationPermissionMismatch", "check the credentials"),
        (403, "AuthenticationFailed", "check the credentials"),
        (409, "PublicAccessNotPermitted", "check the credentials"),
        (400, "InvalidResourceName", "create the container or correct the URL"),
        (403, "AccountIsDisabled", "enable the account"),
        (400, "InvalidQueryParameterValue", "correct the options"),
    ],
)
def test_an_answer_that_no_retry_mends(url: str, status: int, code: str, remedy: str) -> None:
    body = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>no</Message></Error>'
    with answering(status, body, {"x-ms-error-code": code}) as address:
        looking = open_mailbox(url, prove=False, **connection(f"http://{address}"))
        with pytest.raises(MailboxError, match=remedy) as caught:
            looking.put_if_absent("a", b"1")
    assert not isinstance(caught.value, MailboxUnavailableError)


def test_a_closed_port(url: str) -> None:
    with pytest.raises(MailboxUnavailableError, match="nothing listens there"):
        open_mailbox(url, deadline=0.3, **connection(f"http://127.0.0.1:{free_port()}"))


def test_the_account_may_be_in_the_url() -> None:
    options: dict[str, Any] = {"account_key": KEY}
    long = ObjectMailbox(f"abfss://box@{ACCOUNT}.dfs.core.windows.net/run", **options)
    assert repr(long) == "ObjectMailbox('az://box/run')"
    assert long == ObjectMailbox("az://box/run", account_name=ACCOUNT, **options)


def test_an_old_client_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adlfs.__version__", "2024.7.0")
    with pytest.raises(MailboxRefusedError, match=r"adlfs 2024\.7\.0.*pip install 'shardqueue\[azure\]'"):
        open_mailbox(url, account_name="a", account_key=KEY)
