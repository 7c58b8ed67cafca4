"""The ledger: pages in any order and any number of times say what the process that wrote them trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardqueue import learner
from shardqueue.errors import RecordError
from shardqueue.learner import Book, this_process
from shardqueue.ledger import Ledger, index_at
from shardqueue.logreader import LogReader
from shardqueue.mailbox.faults import Counted
from shardqueue.mailbox.memory import MemoryMailbox
from shardqueue.records import LogPage, Process, RunKeys, Totals, TrainedSpan
from shardqueue.units import Step

if TYPE_CHECKING:
    from collections.abc import Iterable

WHERE = Process(host="h", boot="b", pid=1, started="1")
KEYS = RunKeys("1")
Batch = tuple[str, str, int, int]
"""Pass, unit, attempt, batch."""


def span(
    unit: str,
    begin: int,
    end: int,
    attempt: int = 0,
    whole: bool = False,
    ticks: Iterable[int] = (),
    pass_: str = "",
) -> TrainedSpan:
    return TrainedSpan(pass_, unit, attempt, begin, end, 0, 0.0, 1.0, 2.0, None, whole, list(ticks))


def a_page(spans: Iterable[TrainedSpan], page: int = 0, write: int = 1, process: str = "main") -> LogPage:
    return LogPage(
        learner="a",
        instance="i",
        process=process,
        page=page,
        write=write,
        run_id="r",
        where=WHERE,
        wall=1.0,
        totals=Totals(),
        rate=0.0,
        trained=list(spans),
        held=[],
    )


def batches(ledger: Ledger) -> set[Batch]:
    found: list[Batch] = [
        (one.pass_, one.unit, one.attempt, index)
        for _, one in ledger.spans()
        for index in range(one.begin, one.end)
    ]
    assert len(found) == len(set(found)), "a batch is counted twice"
    return set(found)


def wholes(ledger: Ledger) -> set[tuple[str, int, int]]:
    return {(one.unit, one.attempt, one.end) for _, one in ledger.spans() if one.whole}


# -- pages ---------------------------------------------------------------------------------------------------


def test_a_longer_span_and_a_whole_one_win_in_any_order() -> None:
    versions = [span("u", 0, 1), span("u", 0, 3), span("u", 0, 3, whole=True)]
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        ledger = Ledger()
        for number in order:
            ledger.read(a_page([versions[number]], write=number + 1))
        assert [one for _, one in ledger.spans()] == [versions[2]]


def test_attempts_and_passes_and_beginnings_are_spans_of_their_own() -> None:
    spans = [span("u", 0, 2), span("u", 0, 2, attempt=1), span("u", 2, 3), span("u", 0, 2, pass_="e1")]
    ledger = Ledger()
    ledger.read(a_page(spans))
    assert {(one.pass_, one.unit, one.attempt, one.begin) for _, one in ledger.spans()} == {
        ("", "u", 0, 0),
        ("", "u", 1, 0),
        ("", "u", 0, 2),
        ("e1", "u", 0, 0),
    }


def test_the_newest_page_is_the_last_one_and_of_it_the_last_write() -> None:
    pages = [a_page([], page, write) for page, write in ((0, 1), (1, 9), (2, 3), (2, 4))]
    for order in (pages, pages[::-1], [pages[3], pages[1], pages[2], pages[0]]):
        ledger = Ledger()
        for page in order:
            log = ledger.read(page)
        assert (log.newest.page, log.newest.write) == (2, 4)


def test_processes_are_kept_apart() -> None:
    ledger = Ledger()
    ledger.read(a_page([span("u", 0, 2)], process="0"))
    ledger.read(a_page([span("u", 0, 2)], process="1"))
    assert sorted(ledger.logs) == [("a", "i", "0"), ("a", "i", "1")]
    assert len(list(ledger.spans())) == 2
    assert {log.owner for log in ledger.logs.values()} == {("a", "i")}


# -- steps ---------------------------------------------------------------------------------------------------


@given(
    ticks=st.lists(st.integers(1, 5), min_size=1, max_size=30),
    begin=st.integers(0, 9),
    tick=st.integers(-1, 99),
)
def test_index_at_is_the_first_batch_after_a_step(ticks: list[int], begin: int, tick: int) -> None:
    """Against what the book writes for batches at steps that grow by `ticks`."""
    book = Book("a", "i", "main", WHERE)
    steps, now = [], 0
    for index, gap in enumerate(ticks):
        now += gap
        steps.append(now)
        book.hand(Step(0, "u", 0, begin + index), 0.0, 0.0, tick=now)
        book.train(1, 0.0)
    [one] = book.pages(0.0, 0.0, 0.0)[-1].trained
    expected = next((begin + at for at, step in enumerate(steps) if step > tick), begin + len(steps))
    assert index_at(one, tick) == expected


def test_batches_whose_step_is_not_known_count_as_before_it() -> None:
    assert index_at(span("u", 3, 7), tick=0) == 7
    assert index_at(span("u", 3, 7, ticks=[5, 1, 2]), tick=4) == 3
    assert index_at(span("u", 3, 7, ticks=[5, 1, 2]), tick=9) == 7


# -- from a book through pages to a ledger ---------------------------------------------------------------


@dataclass
class Writer:
    """A process that trains, writes pages of its book, and has some writes end unclear: they may land late."""

    book: Book = field(default_factory=lambda: Book("a", "i", "main", WHERE))
    store: dict[str, list[bytes]] = field(default_factory=dict)
    late: list[tuple[str, bytes]] = field(default_factory=list)
    trained: set[Batch] = field(default_factory=set)
    whole: set[tuple[str, int, int]] = field(default_factory=set)
    next_batch: dict[tuple[str, int], int] = field(default_factory=dict)

    def train(self, unit: str, attempt: int, count: int, skip: int) -> None:
        """`skip` batches of the attempt are passed over before: a span ends and another begins."""
        at = self.next_batch.get((unit, attempt), 0) + skip
        for index in range(at, at + count):
            self.book.hand(Step(0, unit, attempt, index), 0.0, 1.0)
            self.trained.add(("", unit, attempt, index))
        self.book.train(count, 2.0)
        self.next_batch[unit, attempt] = at + count

    def finish(self, unit: str, attempt: int) -> None:
        """Trained to its end; nothing of it follows."""
        end = self.next_batch.get((unit, attempt), 0)
        if (unit, attempt) not in {(done, number) for done, number, _ in self.whole}:
            self.book.release(("", unit, attempt), end, 2.0)
            self.whole.add((unit, attempt, end))
            self.next_batch[unit, attempt] = end

    def write(self, lands: bool, clear: bool) -> None:
        for page in self.book.pages(0.0, 0.0, 0.0):
            key = KEYS.log("a", "i", "main", page.page)
            if lands or clear:
                self.store.setdefault(key, []).append(page.encode())
            else:
                self.late.append((key, page.encode()))
            self.book.wrote(page, clear)

    def land(self) -> None:
        """Writes that were given up replace what is there."""
        for key, body in self.late:
            self.store.setdefault(key, []).append(body)


ACTIONS = st.one_of(
    st.tuples(
        st.just("train"), st.sampled_from("uvw"), st.integers(0, 1), st.integers(1, 3), st.integers(0, 1)
    ),
    st.tuples(st.just("finish"), st.sampled_from("uvw"), st.integers(0, 1)),
    st.tuples(st.just("write"), st.booleans(), st.booleans()),
)


@pytest.mark.parametrize("size", [2, 2000])
@settings(max_examples=150, deadline=None)
@given(actions=st.lists(ACTIONS, max_size=25), random=st.randoms(use_true_random=False))
def test_what_was_trained_can_be_read_in_any_order(
    size: int, actions: list[tuple[object, ...]], random: object
) -> None:
    """Units and attempts by turns, full pages, lost answers; read every version of every page, shuffled, twice."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learner, "PAGE_SPANS", size)
        writer = Writer()
        done: set[tuple[object, object]] = set()
        for name, *arguments in actions:
            if name == "write":
                writer.write(*arguments)  # type: ignore[arg-type]
            elif name == "finish":
                done.add((arguments[0], arguments[1]))
                writer.finish(*arguments)  # type: ignore[arg-type]
            elif (arguments[0], arguments[1]) not in done:
                writer.train(*arguments)  # type: ignore[arg-type]
        writer.write(lands=True, clear=True)
        writer.land()
    versions = [body for bodies in writer.store.values() for body in bodies] * 2
    random.shuffle(versions)  # type: ignore[attr-defined]
    ledger = Ledger()
    for body in versions:
        ledger.read(LogPage.decode(body, "key"))
    assert batches(ledger) == writer.trained
    assert wholes(ledger) == writer.whole
    last = Ledger()
    for bodies in writer.store.values():
        last.read(LogPage.decode(bodies[-1], "key"))
    assert batches(last) == writer.trained, "the last version of each page is enough"
    assert wholes(last) == writer.whole


# -- the reader ----------------------------------------------------------------------------------------------


def put(mailbox: MemoryMailbox, page: LogPage) -> None:
    mailbox.put(KEYS.log(page.learner, page.instance, page.process, page.page), page.encode())


def test_a_reader_gets_each_final_page_once_and_last_ones_again() -> None:
    memory = MemoryMailbox()
    for number in range(3):
        put(memory, a_page([span(f"u{number}", 0, 2)], number, number + 1))
    put(memory, a_page([span("v", 0, 2)], process="0"))
    counted = Counted(memory)
    reader = LogReader(counted, KEYS)
    assert len(batches(reader.read())) == 8
    assert counted.counts == {"list": 1, "get": 4}
    put(memory, a_page([span("u2", 0, 3)], 2, 9))
    put(memory, a_page([span("u3", 0, 1)], 3, 10))
    assert len(batches(reader.read())) == 10
    assert counted.counts == {"list": 2, "get": 4 + 3}, "pages 2 and 3 of one, page 0 of the other"
    assert reader.ledger.logs["a", "i", "main"].newest.page == 3


def test_a_reader_of_the_newest_pages_only_may_read_the_rest_later() -> None:
    memory = MemoryMailbox()
    for number in range(3):
        put(memory, a_page([span(f"u{number}", 0, 2)], number, number + 1))
    reader = LogReader(memory, KEYS)
    assert len(batches(reader.read(newest_only=True))) == 2
    assert len(batches(reader.read())) == 6


def test_a_reader_reads_whom_it_is_told_and_passes_over_other_keys() -> None:
    memory = MemoryMailbox()
    put(memory, a_page([span("u", 0, 2)], process="0"))
    put(memory, a_page([span("v", 0, 2)], process="1"))
    memory.put(KEYS.grade("a", "i", 1, 3), b"x")
    memory.put(KEYS.whole("a", "i", ""), b"x")
    memory.put("learners/note", b"x")
    reader = LogReader(memory, KEYS)
    assert batches(reader.read(which=lambda process: process[2] == "1")) == {("", "v", 0, 0), ("", "v", 0, 1)}
    assert batches(LogReader(memory, KEYS).read(listed=[])) == set()


def test_a_page_that_is_gone_is_passed_over_and_one_that_is_none_is_an_error() -> None:
    memory = MemoryMailbox()
    key = KEYS.log("a", "i", "main", 0)
    assert LogReader(memory, KEYS).read(listed=[key]).logs == {}
    memory.put(key, b'{"kind":"shardqueue.log"}')
    with pytest.raises(RecordError, match=key):
        LogReader(memory, KEYS).read()


def test_a_page_as_it_is_written_can_be_read() -> None:
    page = msgspec.structs.replace(
        a_page([span("u", 0, 2, whole=True, ticks=[1, 2, 2])]), where=this_process()
    )
    memory = MemoryMailbox()
    put(memory, page)
    assert LogReader(memory, KEYS).read().logs["a", "i", "main"].newest == page
