from __future__ import annotations

import os
import time
import uuid
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from mailbox_contract import MailboxContract

from shardqueue.errors import InvalidInputError, MailboxError, MailboxRefusedError, ShardQueueWarning
from shardqueue.mailbox import Mailbox, open_mailbox
from shardqueue.mailbox.probe import prove_exclusive
from shardqueue.mailbox.unproven import UnprovenMailbox


class LinkedFiles(LocalFileSystem):  # type: ignore[misc]
    """Local files that appear whole: a filesystem that is better than fsspec asks it to be."""

    protocol = "linked"

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        target = Path(self._strip_protocol(path))
        own = target.with_name(f".{uuid.uuid4().hex}")
        own.write_bytes(value)
        try:
            own.replace(target) if mode == "overwrite" else os.link(own, target)
        finally:
            own.unlink(missing_ok=True)


fsspec.register_implementation("linked", LinkedFiles, clobber=True)


@pytest.mark.filterwarnings("ignore:.*no exclusive create is known:UserWarning")
class TestUnproven(MailboxContract):
    store = "local files through fsspec"
    listing = "scan"

    @pytest.fixture
    def mailbox(self, tmp_path: Path) -> Mailbox:
        return open_mailbox(f"linked://{tmp_path}/box", allow_unproven=True, prove=False)


def test_it_warns(tmp_path: Path) -> None:
    with pytest.warns(ShardQueueWarning, match=r"UnprovenMailbox\('linked://.*checks and then acts"):
        mailbox = open_mailbox(f"linked://{tmp_path}/box", allow_unproven=True)
    assert mailbox.list("") == [], "the proof cleans up"
    assert mailbox.listing == "scan"  # type: ignore[attr-defined]


def test_looking_writes_nothing(tmp_path: Path) -> None:
    with pytest.warns(ShardQueueWarning):
        assert open_mailbox(f"linked://{tmp_path}/box", allow_unproven=True, prove=False).list("") == []
    assert list(tmp_path.iterdir()) == []


def test_without_the_flag_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MailboxRefusedError, match="allow_unproven=True puts it to the proof"):
        open_mailbox(f"linked://{tmp_path}/box")
    assert list(tmp_path.iterdir()) == []


class Hasty(LocalFileSystem):  # type: ignore[misc]
    """Looks, and writes 5 ms later."""

    protocol = "hasty"

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        if mode == "create" and self.exists(path):
            raise FileExistsError(path)
        time.sleep(0.005)
        super().pipe_file(path, value)


def test_check_then_act_is_found_by_a_race(tmp_path: Path) -> None:
    fsspec.register_implementation("hasty", Hasty, clobber=True)
    prove_exclusive(UnprovenMailbox(f"hasty://{tmp_path}"))
    with pytest.raises(MailboxRefusedError, match=r"(let \d of 8 threads create one key|keep the bytes)"):
        open_mailbox(f"hasty://{tmp_path}", allow_unproven=True)


@pytest.mark.parametrize("cache", ["simplecache", "filecache", "blockcache", "dir::simplecache"])
def test_caches_are_refused_whatever_is_insisted_on(tmp_path: Path, cache: str) -> None:
    with pytest.raises(MailboxRefusedError, match="a cache would answer in place of the store") as caught:
        open_mailbox(f"{cache}::file://{tmp_path}", allow_unproven=True)
    assert "allow_unproven" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_the_proof_finds_a_cache_too(tmp_path: Path) -> None:
    with pytest.raises(MailboxRefusedError, match="created one key twice"):
        prove_exclusive(UnprovenMailbox(f"simplecache::file://{tmp_path}"))


def test_our_own_stores_stay_ours(tmp_path: Path) -> None:
    assert repr(open_mailbox(tmp_path, allow_unproven=True)).startswith("FileMailbox")
    assert repr(open_mailbox("memory://ours", allow_unproven=True)).startswith("MemoryMailbox")


def test_an_unknown_scheme() -> None:
    with pytest.raises(MailboxError, match="Protocol not known: made-up"):
        open_mailbox("made-up://x", allow_unproven=True)


def test_a_chain_without_an_end() -> None:
    with pytest.raises(InvalidInputError, match="last link"):
        open_mailbox("dir::x", allow_unproven=True)


def test_what_it_may_not_do(tmp_path: Path) -> None:
    class Locked(LinkedFiles):
        protocol = "locked"

        def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
            raise PermissionError(path)

    fsspec.register_implementation("locked", Locked, clobber=True)
    with pytest.raises(MailboxError, match="check the credentials"):
        open_mailbox(f"locked://{tmp_path}", allow_unproven=True)


def test_a_password_in_the_url_is_not_shown() -> None:
    with pytest.raises(MailboxError) as caught:
        open_mailbox("sftp://me:hush@no-such-host.invalid/x", allow_unproven=True, deadline=0.1)
    assert "hush" not in str(caught.value)
