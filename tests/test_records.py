"""The keys in the mailbox and what is stored under them."""

from __future__ import annotations

import json
import re
from itertools import product
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardqueue import records
from shardqueue.errors import RecordError
from shardqueue.mailbox.names import check_key
from shardqueue.plan import check_identifier
from shardqueue.records import (
    BackRecord,
    ClaimRecord,
    GradeRecord,
    HeldClaim,
    LogPage,
    Manifest,
    PassKeys,
    Process,
    RunKeys,
    Totals,
    TrainedSpan,
    WholeRecord,
)

RECORDS: dict[str, Any] = {
    kind.__name__: kind for kind in (Manifest, LogPage, GradeRecord, WholeRecord, ClaimRecord, BackRecord)
}
AN_ID, A_LEARNER, AN_INSTANCE, A_PROCESS, A_PAGE, AN_ATTEMPT = "000003-2.json", "node-a", "0011", "main", 7, 3
A_GRADE = -4


# -- the table ---------------------------------------------------------------------------------------------


def table() -> dict[str, str]:
    """Key pattern to record, as the docstring's table has them.

    A line that does not start at the table's edge continues the key above it up to its own column, or, if it is a
    record's name, says what is under that key.
    """
    found: dict[str, str] = {}
    above = pending = ""
    for line in (records.__doc__ or "").splitlines():
        match = re.match(r"    ( *)(\S+)(?: +(\w+))?(?:  .*)?$", line)
        if match is None:
            continue
        indent, key, record = match[1], match[2], match[3]
        if key in RECORDS:
            found[pending] = key
            continue
        above = pending = above[: len(indent)] + key
        if record:
            found[key if not indent else above] = record
    return found


def render(pattern: str, values: dict[str, str]) -> set[str]:
    """What a pattern may stand for: each [part] with and without, each {name} with its value."""
    parts = re.split(r"\[(.*?)\]", pattern)
    choices = [[part] if place % 2 == 0 else ["", part] for place, part in enumerate(parts)]
    return {"".join(chosen).format(**values) for chosen in product(*choices)}


def rendered() -> dict[str, str]:
    values = {
        "run": "2",
        "learner": A_LEARNER,
        "instance": AN_INSTANCE,
        "process": A_PROCESS,
        "page": f"{A_PAGE:06d}",
        "pass": "e1",
        "id": AN_ID,
        "n": str(AN_ATTEMPT),
        "grade": str(A_GRADE),
    }
    return {key: record for pattern, record in table().items() for key in render(pattern, values)}


def made() -> dict[str, str]:
    """The same from the key functions."""
    keys = {RunKeys("2").manifest: "Manifest"}
    for run in map(RunKeys, ("1", "2")):
        keys[run.log(A_LEARNER, AN_INSTANCE, A_PROCESS, A_PAGE)] = "LogPage"
        keys[run.grade(A_LEARNER, AN_INSTANCE, AN_ATTEMPT, A_GRADE)] = "GradeRecord"
        keys[run.whole(A_LEARNER, AN_INSTANCE, "e1")] = "WholeRecord"
        for passed in map(run.pass_keys, ("", "e1")):
            keys[passed.claim(AN_ID)] = keys[passed.claim(AN_ID, AN_ATTEMPT)] = "ClaimRecord"
            keys[passed.back(AN_ID, AN_ATTEMPT)] = "BackRecord"
    return keys


class TestTheTable:
    def test_lists_the_keys_that_the_functions_make(self) -> None:
        assert rendered() == made()

    def test_has_a_line_for_every_key_function(self) -> None:
        assert sorted(table()) == [
            "[run-{run}/][{pass}/]back/{id}~{n}",
            "[run-{run}/][{pass}/]units/{id}",
            "[run-{run}/][{pass}/]units/{id}~{n}",
            "[run-{run}/]learners/{learner}~{instance}/grade.{n}.{grade}",
            "[run-{run}/]learners/{learner}~{instance}/whole.{pass}",
            "[run-{run}/]learners/{learner}~{instance}/{process}.{page}",
            "runs/{run}.json",
        ]
        makers = {"manifest", "log", "grade", "whole", "claim", "back"}
        folders = {"folder", "learners", "pass_keys", "units", "backs"}
        public = {name for keys in (RunKeys, PassKeys) for name in vars(keys) if name[0] != "_"}
        assert {name for name in public if not name.startswith("parse_")} - {
            "run",
            "name",
        } == makers | folders

    def test_names_every_record(self) -> None:
        assert set(table().values()) == set(RECORDS)

    def test_every_key_fits_every_store(self) -> None:
        for key in made():
            check_key(key)


# -- keys --------------------------------------------------------------------------------------------------

segments = st.text("abc019._- é", min_size=1, max_size=12).filter(
    lambda text: text[0] != "." and text.strip() == text
)
identifiers = st.lists(segments, min_size=1, max_size=3).map("/".join)
runs = st.sampled_from(["1", "2", "17", "again"]).map(RunKeys)
passes = st.sampled_from(["", "e1", "val0"])


class TestKeys:
    @given(runs, passes, identifiers, st.integers(0, 10**6))
    def test_of_units_are_read_back(self, run: RunKeys, name: str, identifier: str, attempt: int) -> None:
        keys = run.pass_keys(name)
        check_identifier(identifier)
        assert keys.parse_claim(keys.claim(identifier, attempt)) == (identifier, attempt)
        assert keys.parse_back(keys.back(identifier, attempt)) == (identifier, attempt)
        assert keys.claim(identifier, attempt).startswith(keys.units)
        assert keys.back(identifier, attempt).startswith(keys.backs)
        check_key(keys.claim(identifier, attempt))
        check_key(keys.back(identifier, attempt))

    @given(runs, segments, st.sampled_from(["main", "0", "12"]), st.integers(0, 10**7))
    def test_of_logs_are_read_back(self, run: RunKeys, learner: str, process: str, page: int) -> None:
        key = run.log(learner, "0a1b", process, page)
        assert run.parse_log(key) == (learner, "0a1b", process, page)
        assert key.startswith(run.learners)
        check_key(key)

    @given(runs, segments, st.integers(0, 10**6), st.integers(-60, 60))
    def test_of_grades_are_read_back(self, run: RunKeys, learner: str, number: int, grade: int) -> None:
        key = run.grade(learner, "0a1b", number, grade)
        assert run.parse_grade(key) == (learner, "0a1b", number, grade)
        assert run.parse_log(key) is None
        check_key(key)

    @given(runs, segments, passes)
    def test_of_notes_that_a_pass_is_whole_are_read_back(self, run: RunKeys, learner: str, name: str) -> None:
        key = run.whole(learner, "0a1b", name)
        assert run.parse_whole(key) == (learner, "0a1b", name)
        assert run.parse_log(key) is None
        check_key(key)

    @pytest.mark.parametrize(
        "key", ["learners/a~b/whole", "learners/a~b/whole.", "learners/a~b/whole.e1/x", "learners/a/whole.e1"]
    )
    def test_of_no_such_note(self, key: str) -> None:
        assert RunKeys("1").parse_whole(key) is None

    @pytest.mark.parametrize(
        "key",
        [
            "learners/a~b/main.000000",
            "learners/a~b/grade.1",
            "learners/a~b/grade.1.x",
            "learners/a~b/grade.01.1",
            "learners/a~b/grade.1.-0",
            "learners/a~b/grade.1.--1",
            "learners/a~b/grade.1.1.1",
            "learners/a~b~c/grade.1.1",
            "learners/a/grade.1.1",
            "run-2/learners/a~b/grade.1.1",
            "a~b/grade.1.1",
        ],
    )
    def test_of_no_grade(self, key: str) -> None:
        assert RunKeys("1").parse_grade(key) is None

    def test_pages_sort_as_they_count(self) -> None:
        pages = [RunKeys("1").log("a", "b", "main", page) for page in range(1200)]
        assert pages == sorted(pages)

    def test_attempt_0_has_no_number(self) -> None:
        assert RunKeys("1").pass_keys().claim("a", 0) == "units/a"
        assert RunKeys("1").pass_keys().back("a", 0) == "back/a~0"

    def test_no_two_runs_or_passes_share_a_key(self) -> None:
        folders = [RunKeys(run).pass_keys(name) for run in ("1", "2", "3") for name in ("", "e1", "val0")]
        assert len({keys.claim("a") for keys in folders}) == len(folders)
        assert len({RunKeys(run).manifest for run in ("1", "2", "3")}) == 3

    @pytest.mark.parametrize(
        "key", ["units/a~", "units/a~x", "units/a~1~2", "units/a~-1", "units/a~1.5", "units/a~²"]
    )
    def test_of_no_claim(self, key: str) -> None:
        assert RunKeys("1").pass_keys().parse_claim(key) is None

    @pytest.mark.parametrize(
        "key",
        [
            "units/",
            "back/a~1",
            "foreign",
            "run-2/units/a",
            "e1/units/a",
            "units/a~0",
            "units/a~01",
            "units/a~٣",
        ],
    )
    def test_of_no_claim_though_it_looks_like_one(self, key: str) -> None:
        assert RunKeys("1").pass_keys().parse_claim(key) is None

    @pytest.mark.parametrize("key", ["back/a", "back/a~", "back/a~x", "back/a~0~1", "back/a~-1"])
    def test_of_no_give_back_record(self, key: str) -> None:
        assert RunKeys("1").pass_keys().parse_back(key) is None

    @pytest.mark.parametrize("key", ["back/~1", "units/a~1", "run-2/back/a~1", "back/a~01", "back/a~٣"])
    def test_of_no_give_back_record_though_it_looks_like_one(self, key: str) -> None:
        assert RunKeys("1").pass_keys().parse_back(key) is None

    @pytest.mark.parametrize(
        "key",
        [
            "learners/",
            "learners/a~b",
            "learners/a/main.000000",
            "learners/a~b/main",
            "learners/a~b/main.x",
            "learners/a~b~c/main.000000",
            "learners/a~b/x.y.000000",
            "run-2/learners/a~b/main.000000",
        ],
    )
    def test_of_no_log(self, key: str) -> None:
        assert RunKeys("1").parse_log(key) is None

    @pytest.mark.parametrize(
        "key", ["a~b/main.000000", "learners/a~b/main.-1", "learners/a~b/main. 1", "learners/a~b/main.1_0"]
    )
    def test_of_no_log_though_it_looks_like_one(self, key: str) -> None:
        assert RunKeys("1").parse_log(key) is None


# -- records -----------------------------------------------------------------------------------------------

whole = st.integers(0, 2**53)
numbers = st.floats(0, 1e12)
texts = st.text(max_size=20)
json_values = st.recursive(
    st.none() | st.booleans() | whole | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
spans = st.builds(
    TrainedSpan, texts, texts, whole, whole, whole, whole, numbers, numbers, numbers, st.none() | whole
)
totals = st.builds(Totals, claimed=whole, batches=whole, samples=whole, elapsed=numbers, waited=numbers)
places = st.builds(Process, host=texts, boot=texts, pid=whole, started=texts)
examples = st.one_of(
    st.builds(
        Manifest,
        protocol=whole,
        run_id=texts,
        plans=st.dictionaries(texts, st.dictionaries(texts, json_values, max_size=3), max_size=2),
        opened_by=texts,
        wall=numbers,
        state=st.none() | st.dictionaries(texts, json_values, max_size=2),
    ),
    st.builds(ClaimRecord, learner=texts, instance=texts, worker=texts, nonce=texts, sequence=whole),
    st.builds(BackRecord, begin=whole, learner=texts, instance=texts, why=texts),
    st.builds(GradeRecord, grade=st.integers(-60, 60)),
    st.builds(WholeRecord, units=whole),
    st.builds(
        LogPage,
        learner=texts,
        instance=texts,
        process=texts,
        page=whole,
        write=whole,
        run_id=texts,
        where=places,
        wall=numbers,
        totals=totals,
        rate=numbers,
        trained=st.lists(spans, max_size=3),
        held=st.lists(st.builds(HeldClaim, texts, texts, whole), max_size=3),
        left=st.sampled_from([None, "end", "early", "error"]),
    ),
)

A_BACK = BackRecord(begin=3, learner="a", instance="b", why="early")
A_PAGE_OF_A_LOG = LogPage(
    learner="a",
    instance="b",
    process="main",
    page=0,
    write=1,
    run_id="r",
    where=Process(host="h", boot="b", pid=1, started="0"),
    wall=0.0,
    totals=Totals(),
    rate=0.0,
    trained=[TrainedSpan("", "u", 0, 0, 1, 1, 0.0, 0.0, 0.0)],
    held=[HeldClaim("", "u", 0)],
)


def changed(record: Any, **values: object) -> bytes:
    return json.dumps({**json.loads(record.encode()), **values}).encode()


class TestRecords:
    @given(examples)
    def test_are_read_back_as_they_were(self, record: Any) -> None:
        assert type(record).decode(record.encode(), "a/key") == record

    @given(examples)
    def test_are_json_that_says_its_kind(self, record: Any) -> None:
        read = json.loads(record.encode())
        assert read["kind"].startswith("shardqueue.")
        assert read["kind"] == msgspec.inspect.type_info(type(record)).tag  # type: ignore[attr-defined]

    def test_have_kinds_of_their_own(self) -> None:
        kinds = {msgspec.inspect.type_info(kind).tag for kind in RECORDS.values()}  # type: ignore[attr-defined]
        assert len(kinds) == len(RECORDS)

    @given(st.binary(max_size=40), st.sampled_from(sorted(RECORDS)))
    def test_garbage_is_refused_by_its_key(self, data: bytes, kind: str) -> None:
        with pytest.raises(RecordError, match="under/this-key"):
            RECORDS[kind].decode(data, "under/this-key")

    @given(json_values, st.sampled_from(sorted(RECORDS)))
    def test_so_is_any_other_json(self, value: object, kind: str) -> None:
        with pytest.raises(RecordError, match="under/this-key"):
            RECORDS[kind].decode(json.dumps(value).encode(), "under/this-key")

    @given(examples, st.sampled_from(sorted(RECORDS)))
    def test_so_is_another_kind(self, record: Any, kind: str) -> None:
        if kind != type(record).__name__:
            with pytest.raises(RecordError, match="under/this-key"):
                RECORDS[kind].decode(record.encode(), "under/this-key")

    @pytest.mark.parametrize(
        "data",
        [
            changed(A_BACK, begin="3"),
            changed(A_BACK, begin=3.5),
            changed(A_BACK, begin=None),
            changed(A_BACK, begin=True),
            changed(A_BACK, begin=[3]),
            changed(A_BACK, why=3),
            A_BACK.encode()[:-1],
            A_BACK.encode() + b"}",
            A_BACK.encode().replace(b'"early"', b'"\xff\xfe"'),
            A_BACK.encode().replace(b'"early"', b'"\\ud800"'),
            b"\xef\xbb\xbf" + A_BACK.encode(),
            b"",
            b"NaN",
        ],
    )
    def test_wrong_types_and_broken_text_are_refused(self, data: bytes) -> None:
        with pytest.raises(RecordError, match=r"back/a~0: not a give-back record.*prefix of its own"):
            BackRecord.decode(data, "back/a~0")

    @pytest.mark.parametrize(
        "values",
        [
            {"left": "late"},
            {"trained": [["", "u", 0, 0]]},
            {"trained": [["", "u", 0, "0", 1, 1, 0.0, 0.0, 0.0, None]]},
            {"held": [["", 3, 0]]},
            {"totals": {"claimed": "many"}},
            {"where": None},
        ],
    )
    def test_wrong_types_inside_a_log_are_refused(self, values: dict[str, object]) -> None:
        with pytest.raises(RecordError, match="learners/k: not a learner's log"):
            LogPage.decode(changed(A_PAGE_OF_A_LOG, **values), "learners/k")

    def test_a_negative_beginning_is_refused(self) -> None:
        with pytest.raises(RecordError):
            BackRecord.decode(changed(A_BACK, begin=-1), "back/a~0")

    def test_deep_nesting_is_refused(self) -> None:
        deep = b"[" * 200_000 + b"]" * 200_000
        data = b'{"kind":"shardqueue.run","protocol":1,"run_id":"","opened_by":"","wall":0,"plans":{"a":{"b":%b}}}'
        with pytest.raises(RecordError, match=r"runs/1\.json"):
            Manifest.decode(data % deep, "runs/1.json")

    def test_what_is_too_large_is_refused_unread(self) -> None:
        with pytest.raises(RecordError, match=f"units/a: {records.LARGEST + 1} bytes; a claim has at most"):
            ClaimRecord.decode(b" " * (records.LARGEST + 1), "units/a")

    def test_fields_of_a_later_version_are_passed_over(self) -> None:
        assert BackRecord.decode(changed(A_BACK, more=1), "k") == A_BACK
