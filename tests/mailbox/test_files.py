from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mailbox_contract import SharedContract

from shardqueue.errors import MailboxError, MailboxUnavailableError
from shardqueue.mailbox import Mailbox, open_mailbox
from shardqueue.mailbox.files import FileMailbox
from shardqueue.mailbox.memory import MemoryMailbox

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection
    from pathlib import Path


class WithoutLinks(FileMailbox):
    """A folder whose file system has no hard links."""

    def _link(self, temporary: str, path: str) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")


class TestFiles(SharedContract):
    store = "a local disk"
    listing = "scan"

    @pytest.fixture
    def mailbox(self, tmp_path: Path) -> Iterator[Mailbox]:
        yield FileMailbox(tmp_path / "box")
        assert_no_temporary_files(tmp_path)


class TestFilesWithoutLinks(SharedContract):
    store = "a disk without hard links"
    listing = "scan"

    @pytest.fixture
    def mailbox(self, tmp_path: Path) -> Iterator[Mailbox]:
        yield WithoutLinks(tmp_path / "box")
        assert_no_temporary_files(tmp_path)


def assert_no_temporary_files(folder: Path) -> None:
    assert [path for path in folder.rglob("*") if path.name.startswith(".")] == []


def claim_all(kind: type[FileMailbox], folder: Path, learner: int, answer: Connection) -> None:
    mailbox = kind(folder)
    answer.send(None)
    answer.recv()
    body = bytes([65 + learner]) * 2000
    won = [unit for unit in range(100) if mailbox.put_if_absent(f"u/{unit:03d}", body)]
    answer.send((won, [mailbox.get(f"u/{unit:03d}") for unit in range(100)]))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("kinds", [[FileMailbox], [WithoutLinks], [FileMailbox, WithoutLinks]], ids=len)
def test_processes_race(tmp_path: Path, kinds: list[type[FileMailbox]]) -> None:
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(8)]
    children = [
        context.Process(target=claim_all, args=(kinds[learner % len(kinds)], tmp_path, learner, there))
        for learner, (_, there) in enumerate(pipes)
    ]
    for child in children:
        child.start()
    for here, _ in pipes:
        here.recv()
    for here, _ in pipes:
        here.send(None)
    answers: list[tuple[list[int], list[bytes]]] = [here.recv() for here, _ in pipes]
    for child, pipe in zip(children, pipes, strict=True):
        child.join()
        for end in pipe:
            end.close()
    assert sorted(unit for won, _ in answers for unit in won) == list(range(100))
    owner = {unit: bytes([65 + learner]) * 2000 for learner, (won, _) in enumerate(answers) for unit in won}
    for _, seen in answers:
        assert seen == [owner[unit] for unit in range(100)]
    assert_no_temporary_files(tmp_path)


def test_hidden_files_are_not_keys(tmp_path: Path) -> None:
    mailbox = FileMailbox(tmp_path)
    mailbox.put("units/a", b"1")
    for name in (".shardqueue-1-0123", ".nfs0001", ".DS_Store", "back\\slash", "new\nline"):
        (tmp_path / "units" / name).write_bytes(b"left behind")
    (tmp_path / ".snapshot").mkdir()
    (tmp_path / ".snapshot" / "a").write_bytes(b"1")
    (tmp_path / "link").symlink_to(tmp_path / "units")
    os.mkfifo(tmp_path / "pipe")
    assert mailbox.list("") == ["units/a"]


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"outside")
    mailbox = FileMailbox(tmp_path / "box")
    (tmp_path / "box" / "a").symlink_to(tmp_path / "secret")
    with pytest.raises(MailboxError, match="symbolic link"):
        mailbox.get("a")


def test_a_path_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(MailboxError, match=f"{path}.*choose another folder") as caught:
            FileMailbox(path)
        assert not isinstance(caught.value, MailboxUnavailableError)


def test_a_key_below_a_key(tmp_path: Path) -> None:
    mailbox = FileMailbox(tmp_path)
    mailbox.put("a", b"1")
    for write in (mailbox.put_if_absent, mailbox.put):
        with pytest.raises(MailboxError, match=f"{tmp_path}/a/b.*is a file") as caught:
            write("a/b", b"1")
        assert not isinstance(caught.value, MailboxUnavailableError)


@pytest.mark.parametrize("kind", [FileMailbox, WithoutLinks])
def test_a_key_that_is_a_folder(tmp_path: Path, kind: type[FileMailbox]) -> None:
    mailbox = kind(tmp_path)
    mailbox.put("a/b", b"1")
    for write in (mailbox.put_if_absent, mailbox.put):
        with pytest.raises(MailboxError, match="choose another key") as caught:
            write("a", b"1")
        assert not isinstance(caught.value, MailboxUnavailableError)
    mailbox.delete(["a"])
    assert mailbox.list("") == ["a/b"]
    assert_no_temporary_files(tmp_path)


def vanish(folder: Path) -> None:
    shutil.rmtree(folder)


def replace(folder: Path) -> None:
    folder.rename(folder.with_name("moved"))
    folder.mkdir()


@pytest.mark.parametrize("harm", [vanish, replace])
def test_a_folder_that_goes_is_never_made_again(tmp_path: Path, harm: Any) -> None:
    folder = tmp_path / "box"
    mailbox = FileMailbox(folder)
    assert mailbox.put_if_absent("units/a", b"1") is True
    harm(folder)
    for call in (
        lambda: mailbox.put_if_absent("units/a", b"2"),
        lambda: mailbox.put("units/a", b"2"),
        lambda: mailbox.get("units/a") or mailbox.get("units/b"),
        lambda: mailbox.list("units/"),
        lambda: mailbox.delete(["units/a"]),
    ):
        if harm is replace:
            shutil.rmtree(folder / "units", ignore_errors=True)
        with pytest.raises(MailboxUnavailableError, match=str(folder)):
            call()
    assert folder.exists() == (harm is replace)


def test_looking_makes_no_folder(tmp_path: Path) -> None:
    with pytest.raises(MailboxError, match="no such folder"):
        open_mailbox(tmp_path / "typo", prove=False)
    assert not (tmp_path / "typo").exists()
    FileMailbox(tmp_path / "box").put("a", b"1")
    assert open_mailbox(tmp_path / "box", prove=False).list("") == ["a"]


def test_an_unpickled_mailbox_makes_no_folder(tmp_path: Path) -> None:
    mailbox = FileMailbox(tmp_path / "box")
    again = mailbox.__class__.__new__(mailbox.__class__)
    again.__setstate__({"_root": str(tmp_path / "box")})
    vanish(tmp_path / "box")
    with pytest.raises(MailboxUnavailableError):
        again.get("a")
    assert not (tmp_path / "box").exists()


def test_stays_where_it_was_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mailbox = FileMailbox("box")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    mailbox.put("a", b"1")
    assert (tmp_path / "box" / "a").read_bytes() == b"1"


def test_emptied_folders_go(tmp_path: Path) -> None:
    mailbox = FileMailbox(tmp_path / "box")
    for key in ("dry/e1/units/a", "dry/e1/units/b", "kept/a"):
        mailbox.put(key, b"1")
    mailbox.delete(["dry/e1/units/a", "dry/e1/units/b"])
    assert sorted(path.name for path in (tmp_path / "box").iterdir()) == ["kept"]
    mailbox.delete(["kept/a"])
    assert (tmp_path / "box").exists()


class Impatient(WithoutLinks):
    """Does not wait, and notes that it would have."""

    pauses = 0

    def _sleep(self, seconds: float) -> None:
        self.pauses += 1


@pytest.mark.parametrize("body", [b"", b"\0", b"\0sq1\0\0\0", b"\0sq1" + (5).to_bytes(8, "big") + b"1234"])
def test_a_body_that_is_being_written_is_not_an_answer(tmp_path: Path, body: bytes) -> None:
    mailbox = Impatient(tmp_path)
    (tmp_path / "a").write_bytes(body)
    for call in (lambda: mailbox.get("a"), lambda: mailbox.put_if_absent("a", b"12345")):
        with pytest.raises(MailboxUnavailableError, match="being written"):
            call()
    assert mailbox.pauses > 0
    assert mailbox.list("") == ["a"]


def test_a_reader_waits_for_the_rest(tmp_path: Path) -> None:
    whole = b"\0sq1" + (5).to_bytes(8, "big") + b"12345"

    class Finishing(FileMailbox):
        def _sleep(self, seconds: float) -> None:
            (tmp_path / "a").write_bytes(whole)

    (tmp_path / "a").write_bytes(whole[:-2])
    mailbox = Finishing(tmp_path)
    assert mailbox.put_if_absent("a", b"other") is False
    assert mailbox.get("a") == b"12345"


class LosesReplies(FileMailbox):
    """NFS: the link is made, the answer is lost."""

    def _link(self, temporary: str, path: str) -> None:
        super()._link(temporary, path)
        raise OSError(errno.EIO, "Input/output error")


class NeverLinks(FileMailbox):
    def _link(self, temporary: str, path: str) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")


def test_a_lost_reply_is_settled_by_reading_back(tmp_path: Path) -> None:
    assert LosesReplies(tmp_path).put_if_absent("a", b"mine") is True
    assert NeverLinks(tmp_path).put_if_absent("a", b"yours") is False
    with pytest.raises(MailboxUnavailableError, match="trying again"):
        NeverLinks(tmp_path).put_if_absent("b", b"mine")
    assert FileMailbox(tmp_path).list("") == ["a"]
    assert_no_temporary_files(tmp_path)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mount = shutil.which("mount")
    place = tmp_path / "disk"
    place.mkdir()
    command = [str(mount), "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    if mount is None or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("kind", [FileMailbox, WithoutLinks])
def test_a_full_disk(small_disk: Path, kind: type[FileMailbox]) -> None:
    mailbox = kind(small_disk)
    mailbox.put("kept", b"1")
    for write in (mailbox.put_if_absent, mailbox.put):
        with pytest.raises(MailboxError, match="free some space") as caught:
            write("large", b"x" * 200_000)
        assert not isinstance(caught.value, MailboxUnavailableError)
    assert mailbox.list("") == ["kept"]
    assert_no_temporary_files(small_disk)


def test_a_read_only_disk(small_disk: Path) -> None:
    mailbox = FileMailbox(small_disk)
    mailbox.put("kept", b"1")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for write in (mailbox.put_if_absent, mailbox.put):
        with pytest.raises(MailboxError, match="mount it writable"):
            write("a", b"1")
    with pytest.raises(MailboxError, match="mount it writable"):
        mailbox.delete(["kept"])
    assert open_mailbox(small_disk, prove=False).get("kept") == b"1"


KEYS = st.sampled_from(["a", "a-b", "ab", "b/a", "b/a~1", "b/c/d", "b-1", "c.d/e", "c/e", "ü"])
PREFIXES = st.sampled_from(["", "a", "b", "b/", "b/a", "b/c", "c", "c/", "z"])
BODIES = st.sampled_from([b"1", b"2", b"\0", b"\0sq1"])
STEPS = st.one_of(
    st.tuples(st.just("put_if_absent"), KEYS, BODIES),
    st.tuples(st.just("put"), KEYS, BODIES),
    st.tuples(st.just("get"), KEYS),
    st.tuples(st.just("delete"), st.lists(KEYS, max_size=3)),
    st.tuples(st.just("list"), PREFIXES, st.one_of(KEYS, PREFIXES), st.none() | st.integers(0, 4)),
)


@pytest.mark.parametrize("kind", [FileMailbox, WithoutLinks])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(STEPS, min_size=5, max_size=30))
def test_answers_as_the_model_does(
    tmp_path: Path, kind: type[FileMailbox], steps: list[tuple[Any, ...]]
) -> None:
    folder = tmp_path / "box"
    shutil.rmtree(folder, ignore_errors=True)
    mailbox, model = kind(folder), MemoryMailbox()
    for verb, *arguments in steps:
        assert getattr(mailbox, verb)(*arguments) == getattr(model, verb)(*arguments), (verb, arguments)
    assert mailbox.list("") == model.list("")
