"""What every mailbox must do. A backend registers only how to make one."""

from __future__ import annotations

import multiprocessing
import pickle
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from shardqueue.errors import InvalidInputError
from shardqueue.mailbox import Mailbox, open_mailbox
from shardqueue.mailbox.probe import prove_exclusive

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection


def race(calls: list[Callable[[], Any]]) -> list[Any]:
    """Make all calls at once, each in a thread; answer what each gave."""
    start = threading.Barrier(len(calls))

    def run(call: Callable[[], Any]) -> Any:
        start.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(run, calls))


def use_in_child(mailbox: Mailbox, answer: Connection) -> None:
    """Use a mailbox in another process, and send what it said or raised."""
    try:
        answer.send([mailbox.get("seen"), mailbox.put_if_absent("made", b"child"), mailbox.list("")])
    except Exception as error:
        answer.send(error)


def in_child(method: str, mailbox: Mailbox) -> Any:
    """What `use_in_child` sends from a process started by `method`."""
    context: Any = multiprocessing.get_context(method)
    here, there = context.Pipe()
    child = context.Process(target=use_in_child, args=(mailbox, there))
    child.start()
    try:
        assert here.poll(120), "the child did not answer"
        return here.recv()
    finally:
        child.join(30)
        assert child.exitcode == 0
        here.close()
        there.close()


BAD_KEYS = [
    "",
    "/",
    "/a",
    "a/",
    "a//b",
    ".",
    "..",
    "a/../b",
    "a/./b",
    ".hidden",
    "a/.shardqueue-1-2",
    "a\nb",
    "a\0b",
    "a\x7f",
    "a\\b",
    "\ud800",
    "a" * 201,
    "é" * 101,
    "/".join(["a" * 100] * 8),
    None,
    b"a",
]
STRANGE_KEYS = [
    "~a~1",
    "a b",
    "ü/ö",
    "日本語",
    "a+b",
    "a%2Fb",
    "a?versionId=3",
    "a#b",
    "a&b=c",
    "a'\"b",
    "a" * 200,
]


class Races:
    """Who wins a key that many want at once. Subclasses give `mailbox`, a fresh one on the store under test.

    Attributes:
        rounds: races, each for a key of its own.
        learners: how many want it.
    """

    rounds = 20
    learners = 8

    @pytest.fixture
    def mailbox(self) -> Mailbox:
        raise NotImplementedError

    def test_one_winner(self, mailbox: Mailbox) -> None:
        for number in range(self.rounds):
            bodies = [f"{learner}-{uuid.uuid4()}".encode() * 50 for learner in range(self.learners)]
            key = f"units/{number}"
            won = race([lambda body=body, key=key: mailbox.put_if_absent(key, body) for body in bodies])  # type: ignore[misc]
            assert sum(won) == 1
            assert mailbox.get(key) == bodies[won.index(True)]

    def test_losers_read_the_winner_whole(self, mailbox: Mailbox) -> None:
        for number in range(self.rounds):
            key = f"units/{number}"
            bodies = [bytes([65 + learner]) * 5000 for learner in range(4)]

            def create_and_read(body: bytes, key: str = key) -> tuple[bool, bytes | None]:
                return mailbox.put_if_absent(key, body), mailbox.get(key)

            answers = race([lambda body=body: create_and_read(body) for body in bodies])  # type: ignore[misc]
            (winner,) = {read for _, read in answers}
            assert winner == bodies[[won for won, _ in answers].index(True)]


class MailboxContract(Races):
    """The contract of one store.

    Attributes:
        store: what the README's table of stores calls it; "" when it is in no table.
        listing: what a listing costs there, by that table.
    """

    store = ""
    listing = "page"
    many = 1100

    def test_has_the_verbs(self, mailbox: Mailbox) -> None:
        assert isinstance(mailbox, Mailbox)
        assert open_mailbox(mailbox) is mailbox
        assert getattr(mailbox, "listing", "page") == self.listing

    def test_creates_then_reads(self, mailbox: Mailbox) -> None:
        assert mailbox.put_if_absent("units/a.json", b"{}") is True
        assert mailbox.get("units/a.json") == b"{}"

    def test_the_same_bytes_again_are_still_ours(self, mailbox: Mailbox) -> None:
        assert mailbox.put_if_absent("a", b"mine") is True
        assert mailbox.put_if_absent("a", b"mine") is True

    def test_other_bytes_lose(self, mailbox: Mailbox) -> None:
        mailbox.put_if_absent("a", b"mine")
        assert mailbox.put_if_absent("a", b"yours") is False
        assert mailbox.get("a") == b"mine"

    def test_a_put_blocks_a_create(self, mailbox: Mailbox) -> None:
        mailbox.put("a", b"1")
        assert mailbox.put_if_absent("a", b"2") is False

    def test_absent_is_none(self, mailbox: Mailbox) -> None:
        mailbox.put("a", b"1")
        assert mailbox.get("b") is None
        assert mailbox.get("folder/b") is None

    def test_a_folder_of_keys_is_no_key(self, mailbox: Mailbox) -> None:
        mailbox.put("a/b", b"1")
        assert mailbox.get("a") is None
        assert mailbox.list("a") == ["a/b"]

    def test_below_a_key_is_nothing(self, mailbox: Mailbox) -> None:
        mailbox.put("a", b"1")
        assert mailbox.get("a/b") is None
        assert mailbox.list("a/") == []
        mailbox.delete(["a/b"])
        assert mailbox.get("a") == b"1"

    def test_put_overwrites(self, mailbox: Mailbox) -> None:
        mailbox.put("a", b"a long first body")
        mailbox.put("a", b"2")
        assert mailbox.get("a") == b"2"
        assert mailbox.list("") == ["a"]

    def test_any_bytes_come_back(self, mailbox: Mailbox) -> None:
        for number, body in enumerate(
            [bytes(range(256)), b"\0", b"\0sq", b"\0sq1" + bytes(8), b" ", b"x" * 300_000]
        ):
            assert mailbox.put_if_absent(f"c{number}", body) is True
            assert mailbox.put_if_absent(f"c{number}", body) is True
            assert mailbox.put_if_absent(f"c{number}", body + b"!") is False
            mailbox.put(f"p{number}", body)
            assert mailbox.get(f"c{number}") == mailbox.get(f"p{number}") == body

    def test_delete(self, mailbox: Mailbox) -> None:
        for key in ("a/1", "a/2", "b"):
            mailbox.put(key, b"1")
        mailbox.delete(key for key in ("a/1", "b", "never/was"))
        assert mailbox.list("") == ["a/2"]
        assert mailbox.get("b") is None

    def test_delete_absent_and_nothing(self, mailbox: Mailbox) -> None:
        mailbox.delete([])
        mailbox.delete(["never", "never/was"])
        mailbox.delete({"never"})

    def test_a_deleted_key_can_be_made_again(self, mailbox: Mailbox) -> None:
        mailbox.put("a/b", b"1")
        mailbox.delete(["a/b"])
        mailbox.put("a/b", b"2")
        assert mailbox.get("a/b") == b"2"

    def test_lists_in_the_order_of_whole_keys(self, mailbox: Mailbox) -> None:
        keys = ["a b", "a!/z", "a-b", "a.json", "a.json~1", "a/x", "a/y/z", "a0", "b", "ü"]
        for key in reversed(keys):
            mailbox.put(key, b"1")
        assert mailbox.list("") == keys
        assert mailbox.list("a/") == ["a/x", "a/y/z"]

    def test_lists_from_nothing(self, mailbox: Mailbox) -> None:
        assert mailbox.list("") == []
        assert mailbox.list("units/") == []
        assert mailbox.list("units/0", after="units/01", limit=3) == []

    @pytest.mark.parametrize(
        ("prefix", "after", "limit", "expected"),
        [
            ("u/", "", None, ["u/00", "u/01", "u/01~1", "u/02", "u/10"]),
            ("u/", "", 2, ["u/00", "u/01"]),
            ("u/", "", 0, []),
            ("u/", "", 99, ["u/00", "u/01", "u/01~1", "u/02", "u/10"]),
            ("u/", "u/", 1, ["u/00"]),
            ("u/", "u/01", None, ["u/01~1", "u/02", "u/10"]),
            ("u/", "u/01", 1, ["u/01~1"]),
            ("u/", "u/015", 2, ["u/01~1", "u/02"]),
            ("u/", "u/10", None, []),
            ("u/", "a", 1, ["u/00"]),
            ("u/", "z", 1, []),
            ("u/", "u", 1, ["u/00"]),
            ("u/0", "u/01", 9, ["u/01~1", "u/02"]),
            ("u/01", "u/01", None, ["u/01~1"]),
            ("u/01", "", None, ["u/01", "u/01~1"]),
            ("u/1", "u/01", None, ["u/10"]),
            ("u/9", "", None, []),
            ("", "u/02", None, ["u/10", "v", "w/x"]),
            ("", "u/02", 2, ["u/10", "v"]),
            ("v", "", None, ["v"]),
            ("w", "", None, ["w/x"]),
            ("u/01/", "", None, []),
        ],
    )
    def test_lists_pages(
        self, mailbox: Mailbox, prefix: str, after: str, limit: int | None, expected: list[str]
    ) -> None:
        for key in ("u/10", "u/02", "u/01~1", "u/01", "u/00", "v", "w/x", "t"):
            mailbox.put(key, b"1")
        assert mailbox.list(prefix, after, limit) == expected

    def test_lists_more_than_a_page(self, mailbox: Mailbox) -> None:
        keys = [f"u/{number:06d}-0.json" for number in range(self.many)]
        with ThreadPoolExecutor(8) as threads:
            assert all(threads.map(lambda key: mailbox.put_if_absent(key, b"1"), reversed(keys)))
        assert mailbox.list("u/") == keys
        assert mailbox.list("", limit=self.many - 1) == keys[:-1]
        assert mailbox.list("u/", after=keys[20], limit=1050) == keys[21:1071]
        mailbox.delete(keys)
        assert mailbox.list("") == []

    def test_strange_keys(self, mailbox: Mailbox) -> None:
        for key in STRANGE_KEYS:
            assert mailbox.put_if_absent(key, key.encode()) is True
        assert mailbox.list("") == sorted(STRANGE_KEYS)
        for key in STRANGE_KEYS:
            assert mailbox.get(key) == key.encode()
            assert mailbox.list(key) == [key]
        mailbox.delete(STRANGE_KEYS)
        assert mailbox.list("") == []

    def test_the_longest_key(self, mailbox: Mailbox) -> None:
        key = "/".join(["a" * 199, "b" * 200, "ü" * 100, "d" * 198])
        assert len(key.encode()) == 800
        assert mailbox.put_if_absent(key, b"1") is True
        assert mailbox.list("") == [key]

    @pytest.mark.parametrize("key", BAD_KEYS, ids=lambda key: repr(key)[:20])
    def test_bad_keys(self, mailbox: Mailbox, key: Any) -> None:
        for call in (
            lambda: mailbox.put_if_absent(key, b"1"),
            lambda: mailbox.put(key, b"1"),
            lambda: mailbox.get(key),
            lambda: mailbox.delete([key]),
        ):
            with pytest.raises(InvalidInputError) as caught:
                call()
            assert caught.value.remedy
        assert mailbox.list("") == []

    @pytest.mark.parametrize(
        "arguments",
        [("/a",), ("a//",), ("a/../b",), ("a\n",), ("a", "a\0"), ("a", "", -1), (None,), ("../",), ("/",)],
        ids=repr,
    )
    def test_bad_listings(self, mailbox: Mailbox, arguments: Any) -> None:
        with pytest.raises(InvalidInputError):
            mailbox.list(*arguments)

    @pytest.mark.parametrize("body", [b"", "text", None, bytearray(b"1")], ids=repr)
    def test_bad_bodies(self, mailbox: Mailbox, body: Any) -> None:
        for verb in (mailbox.put_if_absent, mailbox.put):
            with pytest.raises(InvalidInputError):
                verb("a", body)
        assert mailbox.get("a") is None

    def test_one_key_for_keys(self, mailbox: Mailbox) -> None:
        with pytest.raises(InvalidInputError):
            mailbox.delete("abc")

    def test_readers_see_old_or_new(self, mailbox: Mailbox) -> None:
        old, new = b"o" * 20_000, b"n" * 30_000
        mailbox.put("page", old)

        def write() -> None:
            for number in range(20):
                mailbox.put("page", (new, old)[number % 2])

        def read() -> set[bytes | None]:
            return {mailbox.get("page") for _ in range(20)}

        answers = race([write, read, read])
        assert answers[1] | answers[2] <= {old, new}

    def test_many_threads(self, mailbox: Mailbox) -> None:
        def learner(number: int) -> int:
            body = f"learner {number}".encode()
            won = sum(mailbox.put_if_absent(f"u/{unit:03d}", body) for unit in range(40))
            mailbox.put(f"log/{number}", body)
            assert mailbox.get(f"log/{number}") == body
            return won

        won = race([lambda number=number: learner(number) for number in range(6)])  # type: ignore[misc]
        assert sum(won) == 40
        assert len(mailbox.list("u/")) == 40
        assert mailbox.list("log/") == [f"log/{number}" for number in range(6)]

    def test_proves_exclusive_and_leaves_nothing(self, mailbox: Mailbox) -> None:
        prove_exclusive(mailbox)
        assert mailbox.list("") == []

    def test_shows_itself(self, mailbox: Mailbox) -> None:
        assert "Mailbox(" in repr(mailbox)
        assert "testsecret" not in repr(mailbox)


class SharedContract(MailboxContract):
    """The rest of the contract, for stores that other processes reach."""

    def test_pickles(self, mailbox: Mailbox) -> None:
        mailbox.put("a", b"1")
        again = pickle.loads(pickle.dumps(mailbox))
        assert repr(again) == repr(mailbox)
        assert again.get("a") == b"1"
        assert again.put_if_absent("a", b"2") is False
        assert again.put_if_absent("b", b"2") is True
        assert mailbox.get("b") == b"2"

    @pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
    @pytest.mark.parametrize("method", ["fork", "spawn"])
    def test_usable_in_a_child(self, mailbox: Mailbox, method: str) -> None:
        mailbox.put("seen", b"parent")
        assert in_child(method, mailbox) == [b"parent", True, ["made", "seen"]]
        assert mailbox.get("made") == b"child"
        assert mailbox.put_if_absent("made", b"parent") is False
