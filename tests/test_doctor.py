"""`shardqueue doctor`: yes to what can hold a queue, no to what cannot, and nothing left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from bad_servers import TinyS3
from learners import until

from shardqueue.cli import main
from shardqueue.doctor import permissions
from shardqueue.doctor.costs import MOST_NODES, Question, bill
from shardqueue.doctor.examination import examine
from shardqueue.doctor.findings import Findings, Latency, Row
from shardqueue.errors import InvalidInputError, MailboxUnavailableError
from shardqueue.mailbox import Mailbox, open_mailbox
from shardqueue.mailbox.faults import LostResponse, Wrapper
from shardqueue.mailbox.memory import MemoryMailbox
from shardqueue.prices import AZURE, GCS, R2, S3, price_at
from shardqueue.simulate import Node, simulate
from shardqueue.terminal import visible
from shardqueue.units import unit_grid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from bad_servers import Create, Verb
    from conftest import S3Server

pytestmark = pytest.mark.usefixtures("parsed_once")

T = TypeVar("T")
URL = "s3://bucket/a b/run"
RELIED_ON = [
    "creates exclusively",
    "stands a race of 8",
    "reads what was just written",
    "lists what was just written",
    "overwrites",
    "deletes",
]


def examined(connect: Callable[[], Mailbox], url: str = URL, rounds: int = 2, calls: int = 3) -> Findings:
    findings = Findings()
    examine(url, connect, findings, rounds=rounds, calls=calls)
    return findings


def at(server: TinyS3, url: str = URL) -> Callable[[], Mailbox]:
    return partial(open_mailbox, url, prove=False, deadline=5.0, **server.options)


def by_one_connection(server: TinyS3) -> Callable[[], Mailbox]:
    """Enough where no race matters, and quicker."""
    mailbox = at(server)()
    return lambda: mailbox


def verdicts(findings: Findings) -> dict[str, bool | None]:
    return {row.check: row.good for row in findings.rows}


def row(findings: Findings, check: str) -> Row:
    (found,) = [row for row in findings.rows if row.check == check]
    return found


def approves(findings: Findings) -> bool:
    """Whether everything was looked at, and good."""
    judged = {check: good for check, good in verdicts(findings).items() if "latency" not in check}
    assert findings.answer is all(judged.values())
    assert list(judged) == ["reaches it", "permissions", *RELIED_ON, "cleans up"]
    timed = [(latency.verb, len(latency.seconds)) for latency in findings.latencies]
    assert timed == [(verb, 3) for verb in permissions.VERBS]
    assert (findings.missing, findings.left) == ([], [])
    return findings.answer


@pytest.fixture(autouse=True)
def restored_handler() -> Iterator[None]:
    """The command sets one, to clean up when it is told to end."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Callable[[TinyS3], None]:
    """Has a server's address and credentials in the environment, as a user has."""

    def enter(server: TinyS3) -> None:
        for name, value in (("ACCESS_KEY_ID", "key"), ("SECRET_ACCESS_KEY", "secret-of-tests")):
            monkeypatch.setenv(f"AWS_{name}", value)
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)

    return enter


# -- yes -----------------------------------------------------------------------------------------------------


def test_yes_to_a_folder(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    assert approves(examined(partial(open_mailbox, tmp_path, prove=False), str(tmp_path)))
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_yes_to_memory() -> None:
    memory = MemoryMailbox()
    memory.put("mine", b"1")
    assert approves(examined(lambda: memory, "memory://x"))
    assert memory.list("") == ["mine"]


@pytest.mark.s3
@pytest.mark.parametrize("rounds", [1, pytest.param(8, marks=pytest.mark.full)])
def test_yes_to_seaweedfs(s3_server: S3Server, rounds: int) -> None:
    url = f"s3://shardqueue/{uuid.uuid4().hex}"
    connect = partial(open_mailbox, url, prove=False, deadline=15.0, **s3_server.writer)
    connect().put("mine", b"1")
    assert approves(examined(connect, url, rounds))
    assert connect().list("") == ["mine"]


def test_yes_to_a_server_that_does_as_it_should() -> None:
    with TinyS3() as server:
        server.objects["a b/runs"] = b"a neighbour's"
        assert approves(examined(at(server)))
        assert server.objects == {"a b/runs": b"a neighbour's"}


# -- no ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("create", "seen_by"),
    [
        ("ignores the condition", ["creates exclusively", "stands a race of 8"]),
        ("checks, then acts", ["stands a race of 8"]),
    ],
)
def test_no_to_a_server_whose_create_is_not_exclusive(create: Create, seen_by: list[str]) -> None:
    with TinyS3(create) as server:
        findings = examined(at(server) if "then" in create else by_one_connection(server), rounds=8)
        assert [check for check, good in verdicts(findings).items() if good is False] == seen_by
        assert server.objects == {}
    assert not findings.answer
    assert "use a local or NFS folder" in row(findings, "stands a race of 8").remedy


def test_no_to_a_listing_that_lags_behind() -> None:
    with TinyS3(stale_listing=True) as server:
        findings = examined(by_one_connection(server))
        assert server.objects == {}
    assert [check for check, good in verdicts(findings).items() if good is False] == [
        "lists what was just written"
    ]
    assert "shows 0" in row(findings, "lists what was just written").found


class WonByAll(MemoryMailbox):
    """Keeps the first bytes, and tells every caller that they are its own."""

    def put_if_absent(self, key: str, data: bytes) -> bool:
        return super().put_if_absent(key, data) or True


class WonByNobody(MemoryMailbox):
    def put_if_absent(self, key: str, data: bytes) -> bool:
        return super().put_if_absent(key, data) and "race" not in key


@pytest.mark.parametrize(("kind", "won"), [(WonByAll, 8), (WonByNobody, 0)])
def test_no_to_a_store_that_tells_the_wrong_caller(kind: type[MemoryMailbox], won: int) -> None:
    mailbox = kind()
    findings = examined(lambda: mailbox)
    assert not findings.answer
    assert row(findings, "stands a race of 8").found == f"round 1: {won} of 8 creates of one key succeeded"


class Stale(Wrapper):
    """Reads what was there first, always."""

    def __init__(self, mailbox: Mailbox) -> None:
        super().__init__(mailbox)
        self._first: dict[str, bytes | None] = {}

    def get(self, key: str) -> bytes | None:
        return self._first.setdefault(key, self._mailbox.get(key))


def test_no_to_a_cache() -> None:
    stale = Stale(MemoryMailbox())
    findings = examined(lambda: stale)
    wrong = [check for check, good in verdicts(findings).items() if good is False]
    assert wrong == ["overwrites"]


class Disordered(Wrapper):
    def list(self, prefix: str, after: str = "", limit: int | None = None) -> list[str]:
        return super().list(prefix)


class Undying(Wrapper):
    def delete(self, keys: Iterable[str]) -> None: ...


@pytest.mark.parametrize(
    ("kind", "checks"),
    [(Disordered, ["lists what was just written"]), (Undying, ["deletes", "cleans up"])],
)
def test_no_to_a_verb_that_does_something_else(kind: type[Wrapper], checks: list[str]) -> None:
    mailbox = kind(MemoryMailbox())
    findings = examined(lambda: mailbox)
    assert [name for name, good in verdicts(findings).items() if good is False] == checks


class Late(Wrapper):
    """Each create lands once more when it was removed."""

    def __init__(self, mailbox: Mailbox) -> None:
        super().__init__(mailbox)
        self._again: dict[str, bytes] = {}

    def put_if_absent(self, key: str, data: bytes) -> bool:
        won = super().put_if_absent(key, data)
        if "race" in key and won:
            self._again[key] = data
        return won

    def delete(self, keys: Iterable[str]) -> None:
        super().delete(keys)
        while self._again:
            self._mailbox.put(*self._again.popitem())


def test_what_lands_late_is_removed_too() -> None:
    memory = MemoryMailbox()
    mailbox = Late(memory)
    assert approves(examined(lambda: mailbox))
    assert memory.list("") == []


class Elsewhere(Wrapper):
    """In a race, what is read is not what was written; or nothing is."""

    def __init__(self, mailbox: Mailbox, body: bytes | None) -> None:
        super().__init__(mailbox)
        self._body = body

    def get(self, key: str) -> bytes | None:
        return self._body if "race/0" in key else super().get(key)


@pytest.mark.parametrize(
    ("body", "found", "remedy"),
    [
        (b"?", "not what the winner wrote", "train the same unit"),
        (None, "is not found", "miss what others wrote"),
    ],
)
def test_the_winner_of_a_race_must_be_stored(body: bytes | None, found: str, remedy: str) -> None:
    mailbox = Elsewhere(MemoryMailbox(), body)
    told = row(examined(lambda: mailbox), "stands a race of 8")
    assert told.good is False
    assert found in told.found
    assert remedy in told.remedy


def test_a_lost_answer_to_an_overwrite_is_no_no() -> None:
    """A `put` is sent once, and a learner's next log makes up for it."""
    lost: list[str] = []

    def loses(verb: str, key: str) -> bool:
        if verb == "put" and key not in lost:
            lost.append(key)
            return True
        return False

    mailbox = LostResponse(MemoryMailbox(), when=loses)
    assert approves(examined(lambda: mailbox))
    assert len(lost) > 3


class Dies(Wrapper):
    """Answers so many calls, then no more."""

    def __init__(self, mailbox: Mailbox, after: int) -> None:
        super().__init__(mailbox)
        self._left = after

    def _around(self, verb: str, name: str, forward: Callable[[], T]) -> T:
        self._left -= 1
        if self._left < 0:
            raise MailboxUnavailableError("no answer; trying again is right")
        return forward()


def test_a_store_that_goes_half_way_is_told_from_one_that_was_never_there() -> None:
    mailbox = Dies(MemoryMailbox(), 12)
    findings = examined(lambda: mailbox)
    assert not findings.answer
    wrong = [row for row in findings.rows if row.good is False and row.check != "cleans up"]
    assert wrong
    assert all("answered at first" in row.remedy for row in wrong)


# -- permissions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("denies", "missing", "untouched"),
    [
        (("read",), ["s3:GetObject"], ["lists what was just written"]),
        (("write",), ["s3:PutObject"], []),
        (("list",), ["s3:ListBucket"], [check for check in RELIED_ON if "lists" not in check]),
        (("delete",), ["s3:DeleteObject"], [check for check in RELIED_ON if check != "deletes"]),
        (("list", "delete"), ["s3:ListBucket", "s3:DeleteObject"], [*RELIED_ON[:3], "overwrites"]),
        (
            ("write", "read", "list", "delete"),
            ["s3:PutObject", "s3:GetObject", "s3:ListBucket", "s3:DeleteObject"],
            [],
        ),
    ],
)
def test_each_missing_permission_is_named_and_hides_no_other(
    denies: tuple[Verb, ...], missing: list[str], untouched: list[str]
) -> None:
    with TinyS3(denies=denies) as server:
        findings = examined(by_one_connection(server))
        assert findings.left == sorted(key.removeprefix("a b/run/") for key in server.objects)
    seen = verdicts(findings)
    assert findings.missing == missing
    assert (seen["reaches it"], seen["permissions"], findings.answer) == (True, False, False)
    assert [check for check in RELIED_ON if seen[check]] == untouched
    assert [check for check in RELIED_ON if seen[check] is False] == []
    remedy = row(findings, "permissions").remedy
    assert ("arn:aws:s3:::bucket/a b/run/*" in remedy) == (denies != ("list",))
    assert ("s3:ListBucket on arn:aws:s3:::bucket" in remedy) == ("list" in denies)
    assert ("check the credentials" in remedy) == (len(denies) == 4)


@pytest.mark.parametrize(
    ("url", "verbs", "missing", "remedy"),
    [
        ("gs://b/x", ["overwrite"], ["storage.objects.create", "storage.objects.delete"], "bucket b"),
        ("gcs://b/x", ["read", "list"], ["storage.objects.get", "storage.objects.list"], "Object User"),
        ("az://c/x", ["delete"], [f"{permissions._BLOBS}/delete"], "Storage Blob Data Contributor"),
        ("abfs://c/x", ["read", "list"], [f"{permissions._BLOBS}/read"], "Storage Blob Data Contributor"),
        ("/data/x", ["create", "delete"], ["write (w and x) on the folder"], "chmod"),
        ("s3://b", ["create"], ["s3:PutObject"], "s3:PutObject on arn:aws:s3:::b/*"),
    ],
)
def test_what_to_grant_on_each_store(url: str, verbs: list[str], missing: list[str], remedy: str) -> None:
    assert permissions.missing(url, verbs) == missing
    assert remedy in permissions.remedy(url, verbs)


def test_a_folder_that_this_user_may_not_write(tmp_path: Path) -> None:
    examined(lambda: open_mailbox(tmp_path, prove=False), str(tmp_path))  # imports all that it needs
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o555)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        findings = examined(partial(open_mailbox, folder, prove=False), str(folder))
    finally:
        if root:
            os.seteuid(0)
        shutil.rmtree(folder)
    assert not findings.answer
    assert "write (w and x) on the folder" in findings.missing
    assert "chmod" in row(findings, "permissions").remedy


# -- no answer, nothing there --------------------------------------------------------------------------------


def test_a_missing_bucket() -> None:
    with TinyS3() as server:
        findings = examined(at(server, "s3://other/x"))
    assert verdicts(findings) == {"reaches it": False}
    assert "create the bucket" in findings.rows[0].remedy


def test_nothing_listens_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
    options: dict[str, Any] = {
        "key": "k",
        "secret": "secret-of-tests",
        "client_kwargs": {"endpoint_url": endpoint},
    }
    findings = examined(partial(open_mailbox, URL, prove=False, deadline=0.3, **options))
    assert verdicts(findings) == {"reaches it": False}
    assert "nothing listens there" in findings.rows[0].remedy


@pytest.mark.parametrize("url", ["http://name:hush@host/x", "sftp://host/x", "simplecache::s3://b/x"])
def test_a_store_that_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", url]) == 1
    captured = capsys.readouterr()
    assert "No: " in captured.out
    assert "hush" not in captured.out + captured.err


def test_a_missing_folder_is_not_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tmp_path / "not here")]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "no such folder" in out
    assert "mkdir -p '" in out
    assert list(tmp_path.iterdir()) == []


def test_a_prefix_that_is_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("x")
    for url in (tmp_path / "file", tmp_path / "file" / "below"):
        assert main(["doctor", str(url)]) == 1
    assert "->" in capsys.readouterr().out


# -- what it leaves ------------------------------------------------------------------------------------------


class Interrupted(Wrapper):
    """Ctrl-C at the n-th write."""

    def __init__(self, mailbox: Mailbox, after: int) -> None:
        super().__init__(mailbox)
        self._after = after

    def _around(self, verb: str, name: str, forward: Callable[[], T]) -> T:
        answer = forward()
        if verb in ("put", "put_if_absent"):
            self._after -= 1
            if self._after == 0:
                raise KeyboardInterrupt
        return answer


@pytest.mark.parametrize("after", [1, 2, 3, 5, 9, 20, 25, 30])
def test_an_interruption_leaves_nothing(after: int) -> None:
    memory = MemoryMailbox()
    interrupted = Interrupted(memory, after)
    with pytest.raises(KeyboardInterrupt):
        examined(lambda: interrupted)
    assert memory.list("") == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_a_process_told_to_end_cleans_up(
    environment: Callable[[TinyS3], None], number: signal.Signals, code: int
) -> None:
    with TinyS3() as server:
        environment(server)
        process = subprocess.Popen(
            [sys.executable, "-m", "shardqueue", "doctor", URL], stdout=subprocess.PIPE
        )
        with process:
            until(lambda: bool(server.objects) or process.poll() is not None)
            process.send_signal(number)
            assert process.wait(60) == code
        assert server.objects == {}


def test_a_write_whose_answer_is_lost_is_removed_too() -> None:
    memory = MemoryMailbox()
    lossy = LostResponse(memory, every=1)
    findings = examined(lambda: lossy)
    assert not findings.answer
    assert memory.list("") == []


def test_what_cannot_be_removed_is_told() -> None:
    with TinyS3(denies=("delete",)) as server:
        findings = examined(by_one_connection(server))
        assert len(server.objects) == len(findings.left) > 0
    told = row(findings, "cleans up")
    assert told.good is False
    assert findings.left[0].partition("/")[0] in told.found


# -- costs ---------------------------------------------------------------------------------------------------


LATENCIES = [Latency("create", (0.01, 0.02, 0.05)), Latency("read", (0.005,))]


def test_requests_are_those_of_the_driver() -> None:
    found = bill(Question(units=600, nodes=4, unit_seconds=2.0), [Latency("read", (0.03,))], S3)
    outcome = simulate(
        unit_grid(2400, 4, taper=False), [Node()] * 4, batch_seconds=0.5, latency=0.03
    ).requests
    assert found.writes == outcome["PutIfAbsent"] + 600 * 2 / 5 + 4 * 2, (
        "a log every 5 s, a first and a last one"
    )
    assert found.listings == outcome["List"]
    assert found.reads == outcome["Get"]
    assert found.simulated == 600
    spent = found.writes * 5e-6 + found.reads * 4e-7 + found.listings * 5e-6
    assert found.dollars == pytest.approx(spent)
    assert "600 units of 2 s, 4 nodes, 1 epoch)" in found.shown()


def test_a_large_plan_is_scaled_and_that_is_said() -> None:
    whole, twice = (bill(Question(units=1_000_000, epochs=epochs), LATENCIES, R2) for epochs in (1, 2))
    assert whole.simulated < 10_000
    assert 2.0 < whole.requests / 1_000_000 < 6.0
    assert twice.requests == pytest.approx(2 * whole.requests, rel=1e-4)
    assert f"counted on {whole.simulated:,} units" in whole.shown()
    assert "Cloudflare R2" in whole.shown()


def test_a_folder_costs_nothing() -> None:
    found = bill(Question(units=100), LATENCIES, None)
    assert found.dollars is None
    assert "$" not in found.shown()


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"units": 0}, "units"),
        ({"units": 5, "nodes": -1}, "nodes"),
        ({"units": 5, "nodes": MOST_NODES + 1}, "nodes"),
        ({"units": 5, "epochs": 0}, "epochs"),
        ({"units": 5, "unit_seconds": float("nan")}, "unit_seconds"),
        ({"units": 5, "unit_seconds": 1e300}, "unit_seconds"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(given: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidInputError, match=name):
        Question(**given)


@pytest.mark.parametrize(
    ("url", "endpoint", "price"),
    [
        ("s3://b/x", "", S3),
        ("s3://b/x", "https://s3.eu-central-1.amazonaws.com", S3),
        ("S3://b/x", "https://0123.r2.cloudflarestorage.com", R2),
        ("s3://b/x", "https://notamazonaws.com", None),
        ("s3://b/x", "http://127.0.0.1:8333", None),
        ("gs://b/x", None, GCS),
        ("abfs://b/x", None, AZURE),
        ("/data/x", None, None),
        ("memory://x", None, None),
    ],
)
def test_whose_price_it_is(url: str, endpoint: str | None, price: object) -> None:
    assert price_at(url, endpoint) is price


def test_the_endpoint_in_the_environment_says_whose_price(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    assert price_at("s3://b/x") is None
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://0123.r2.cloudflarestorage.com")
    assert price_at("s3://b/x") is R2


@pytest.mark.parametrize(
    ("share", "second"), [(0.0, 1.0), (0.25, 1.0), (0.5, 2.0), (0.51, 3.0), (0.99, 4.0), (1.0, 4.0)]
)
def test_quantiles(share: float, second: float) -> None:
    assert Latency("read", (1.0, 2.0, 3.0, 4.0)).quantile(share) == second


# -- the command ---------------------------------------------------------------------------------------------


def test_the_command_says_yes_with_0(
    tmp_path: Path, environment: Callable[[TinyS3], None], capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.json"
    with TinyS3() as server:
        environment(server)
        arguments = ["doctor", URL, "--units", "500", "--nodes", "2", "--epochs", "3", "--json", str(file)]
        assert main(arguments) == 0
        assert server.objects == {}
    out = " ".join(capsys.readouterr().out.split())
    assert "Yes: s3://bucket/a b/run can hold a queue." in out
    assert "requests are free here, or their price is not known" in out
    found = json.loads(file.read_text())
    assert found["answer"] == "yes"
    assert found["plan"]["units"] == 500
    assert found["latency_seconds"]["read"]["calls"] > 1
    assert all(entry["good"] is not False for entry in found["checks"])
    assert "secret-of-tests" not in file.read_text() + out


def test_the_command_says_no_with_1_and_what_to_do(
    environment: Callable[[TinyS3], None], capsys: pytest.CaptureFixture[str]
) -> None:
    with TinyS3(denies=("list", "read")) as server:
        environment(server)
        assert main(["doctor", URL]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "missing: s3:GetObject, s3:ListBucket" in out
    assert "-> allow s3:ListBucket on arn:aws:s3:::bucket; s3:GetObject on" in out


def test_what_a_server_says_is_shown_escaped(
    environment: Callable[[TinyS3], None], capsys: pytest.CaptureFixture[str]
) -> None:
    said = "[red]no\x1b[2J é \u202eevil"
    findings = Findings()
    from rich.console import Console

    from shardqueue.doctor.report import show

    findings.rows.append(Row("reaches it", False, said, said))
    show(Console(width=200), said, findings)
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\u202e" not in out
    assert out.count(r"[red]no\x1b[2J é \u202eevil") == 3
    assert visible("a\tb\nc") == r"a\tb\nc"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([""], "url="),
        (["s3://name:hush@bucket/x"], "url="),
        (["memory://x", "--units", "0"], "units=0"),
        (["memory://x", "--json", "/no/such/folder/x"], "json="),
    ],
)
def test_a_wrong_argument_is_one_line_and_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(["doctor", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"shardqueue: {said}")
    assert captured.err.count("\n") == 1
    assert "hush" not in captured.err


def test_it_imports_no_torch(tmp_path: Path) -> None:
    code = f"""
import sys
from shardqueue.cli import main
code = main(["doctor", {str(tmp_path)!r}, "--units", "50"])
print(code, [name for name in ("torch", "lightning", "numpy", "s3fs") if name in sys.modules])
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "0 []"
    assert ended.stderr == ""
