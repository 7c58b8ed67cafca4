from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from shardqueue.errors import InvalidInputError, MailboxRefusedError
from shardqueue.mailbox import open_mailbox
from shardqueue.mailbox.memory import MemoryMailbox


@pytest.mark.parametrize("form", ["{}", "file://{}", "local://{}", "FILE://{}"])
def test_paths(tmp_path: Path, form: str) -> None:
    mailbox = open_mailbox(form.format(tmp_path / "a b" / "c%20d"))
    mailbox.put("k", b"1")
    assert (tmp_path / "a b" / "c%20d" / "k").read_bytes() == b"1"


def test_path_objects(tmp_path: Path) -> None:
    assert repr(open_mailbox(tmp_path / "a::b")) == f"FileMailbox({str(tmp_path / 'a::b')!r})"


def test_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    open_mailbox("run/1")
    open_mailbox("./run/2")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["1", "2"]


@pytest.mark.parametrize("form", ["~/run", Path("~/run")], ids=repr)
def test_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: Any) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    open_mailbox(form)
    assert (tmp_path / "run").is_dir()


def test_a_mailbox_is_itself() -> None:
    class Own:
        held: ClassVar[dict[str, bytes]] = {}

        def put_if_absent(self, key: str, data: bytes) -> bool:
            return self.held.setdefault(key, data) == data

        def get(self, key: str) -> bytes | None:
            return self.held.get(key)

        def list(self, prefix: str, after: str = "", limit: int | None = None) -> list[str]:
            return []

        def put(self, key: str, data: bytes) -> None: ...

        def delete(self, keys: Any) -> None:
            for key in keys:
                del self.held[key]

    own = Own()
    assert open_mailbox(own) is own
    assert own.held == {}, "the proof cleans up"


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("simplecache::s3://bucket/x", "simplecache:: is refused: a cache"),
        ("filecache::memory://x", "a cache"),
        ("simplecache:///x", "a cache"),
        ("zip://x::s3://bucket/x", "zip:: is refused: no exclusive create is known"),
        ("dir::file:///x", "no exclusive create is known"),
        ("::x", "no exclusive create is known"),
        ("adl://bucket/x", "retired"),
        ("sftp://host/x", "check-then-act"),
        ("http://host/x", "cannot create"),
        ("https://host/x", "cannot create"),
        ("hf://datasets/x", "cannot create"),
        ("smb://host/x", "mount it"),
        ("hdfs://host/x", "mount it"),
        ("webhdfs://host/x", "mount it"),
        ("github://x", "no exclusive create is known"),
        ("made-up+scheme://x", "no exclusive create is known"),
    ],
)
def test_refused(url: str, reason: str) -> None:
    with pytest.raises(MailboxRefusedError, match=reason) as caught:
        open_mailbox(url)
    assert "s3://bucket/prefix" in str(caught.value)
    assert ("allow_unproven=True" in str(caught.value)) is reason.endswith("is known")


@pytest.mark.parametrize(
    ("url", "client", "extra"),
    [
        ("gs://bucket/x", "gcsfs", "gcs"),
        ("gcs://bucket/x", "gcsfs", "gcs"),
        ("az://bucket/x", "adlfs", "azure"),
        ("abfs://bucket/x", "adlfs", "azure"),
        ("abfss://bucket@account.dfs.core.windows.net/x", "adlfs", "azure"),
    ],
)
def test_a_missing_extra_is_named(url: str, client: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, client, None)
    monkeypatch.delitem(sys.modules, "shardqueue.mailbox.gcs", raising=False)
    monkeypatch.delitem(sys.modules, "shardqueue.mailbox.azure", raising=False)
    with pytest.raises(MailboxRefusedError, match=rf"pip install 'shardqueue\[{extra}\]'"):
        open_mailbox(url)


@pytest.mark.parametrize(
    "url", ["", "  ", "s3:/bucket/x", "file://host/x", "file://", None, 3, ["/x"]], ids=repr
)
def test_malformed(url: Any) -> None:
    with pytest.raises(InvalidInputError):
        open_mailbox(url)


def test_options_belong_to_buckets(tmp_path: Path) -> None:
    for url in (tmp_path, "memory://x", MemoryMailbox()):
        with pytest.raises(InvalidInputError, match=r"storage_options=\['secret'\]"):
            open_mailbox(url, secret="hush")


def test_importing_is_light() -> None:
    program = (
        "import sys, shardqueue.mailbox as m, shardqueue.mailbox.objects, shardqueue.mailbox.files\n"
        "import shardqueue.mailbox.faults, shardqueue.mailbox.probe\n"
        "m.open_mailbox('memory://x')\n"
        "print(sorted({'fsspec', 's3fs', 'torch', 'lightning', 'asyncio', 'numpy'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[]\n"
