"""The contract on moto's server: a second implementation of S3, which answers as AWS does."""

from __future__ import annotations

import sys
import urllib.request
import uuid
from typing import TYPE_CHECKING, Any

import pytest
from mailbox_contract import SharedContract
from servers import free_port, listening

from shardqueue.mailbox import Mailbox, open_mailbox

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def moto_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Storage options for a server that has the bucket `shardqueue`."""
    pytest.importorskip("moto.server", reason="pip install 'shardqueue[test]'")
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with listening(command, port, tmp_path_factory.mktemp("moto")):
        endpoint = f"http://127.0.0.1:{port}"
        made = urllib.request.Request(f"{endpoint}/shardqueue", method="PUT")
        with urllib.request.urlopen(made, timeout=30):
            yield {"key": "testkey", "secret": "testsecret", "endpoint_url": endpoint}


@pytest.fixture(scope="module")
def opened(moto_server: dict[str, Any]) -> Mailbox:
    """One for all tests: a new client takes longer than most of them."""
    return open_mailbox(f"s3://shardqueue/{uuid.uuid4().hex}", prove=False, **moto_server)


@pytest.mark.full
class TestMoto(SharedContract):
    store = "moto"
    rounds = 4

    @pytest.fixture
    def mailbox(self, opened: Mailbox) -> Iterator[Mailbox]:
        yield opened
        opened.delete(opened.list(""))
