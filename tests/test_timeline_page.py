"""The timeline's page as a file: its data, its policy, and the numbers that are there without its script."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
from timeline_charts import HOSTILE, hostile, many, two_learners

from shardqueue.timeline import page
from shardqueue.timeline.chart import Bar, Chart
from shardqueue.timeline.words import LONGEST_NAME


class Read(HTMLParser):
    """The elements of a document, and the text in each."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._within: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self.texts.setdefault(tag, []).append("")
        self._within.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._within and self._within.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self._within:
            self.texts[self._within[-1]][-1] += data

    def data(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.texts["script"][0])
        return found

    def policy(self) -> str:
        return next(a["content"] or "" for tag, a in self.found if tag == "meta" and "content" in a)


def test_the_data_in_the_page_are_the_chart() -> None:
    chart = two_learners()
    data = Read(page.document(chart)).data()
    assert (data["origin"], data["seconds"]) == (chart.origin, chart.seconds)
    for told, meant in zip(data["lanes"], chart.lanes, strict=True):
        assert {name: told[name] for name in meant.__slots__ if name != "bars"} == {
            name: getattr(meant, name) for name in meant.__slots__ if name != "bars"
        }
        bars = [dict(zip(data["columns"], row, strict=True)) for row in told["bars"]]
        for row in bars:
            row["unit"], row["pass_"] = data["units"][row["unit"]], data["passes"][row.pop("pass")]
        assert [Bar(**row) for row in bars] == list(meant.bars)
    (taken,) = data["handovers"]
    assert (data["units"][taken["unit"]], taken["owner"], taken["taker"]) == ("u3", 1, 0)
    assert data["tails"][0]["idle"] == 2.0


def test_no_name_is_more_than_text() -> None:
    text, plain = page.document(hostile()), page.document(two_learners())
    read, harmless = Read(text), Read(plain)
    assert {tag for tag, _ in read.found} - {tag for tag, _ in harmless.found} <= {"ul", "li"}
    assert len(read.texts["script"]) == 2
    assert not {name for _, attributes in read.found for name in attributes if name.startswith("on")}
    assert {a["src"] for _, a in read.found if "src" in a} == set()
    shown = [name for lane in read.data()["lanes"] for name in [lane["learner"]]]
    assert shown[:5] == list(HOSTILE[:5])
    assert shown[5:8] == [r"\x1b[2J\x1b[31mred", r"\u202egnp.exe", r"line\u2028window.ran=1"]
    assert len(shown[-1]) == LONGEST_NAME
    assert HOSTILE[0] in read.texts["h1"][0]
    assert all(name in read.texts["li"] for name in HOSTILE[:5])
    assert not set("\x1b\u202e\u2028") & set(text)
    assert text.encode()


def test_the_policy_allows_the_one_script_and_the_one_sheet_and_no_address() -> None:
    text = page.document(replace(two_learners(), url="./queue"))
    read = Read(text)
    policy = read.policy()
    for kind, content in (("script", read.texts["script"][1]), ("style", read.texts["style"][0])):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}';" in policy
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    assert not re.search(
        r"https?:|//[a-z]|url\(|@import|innerHTML|outerHTML|insertAdjacent|eval\(|Function\(", text
    )
    assert not {name for _, attributes in read.found for name in attributes if name == "style"}


def test_numbers_are_there_without_the_script() -> None:
    chart = two_learners()
    read = Read(page.document(chart))
    # There were 20 s of a and 6 s of b; a stood idle for 4 s and waited for 1 s, b stood idle for 1 s.
    shares = dict(zip(read.texts["dt"], read.texts["dd"], strict=False))
    assert (shares["busy"], shares["waiting"], shares["idle"]) == ("77%", "3.8%", "19%")
    cells = read.texts["td"]
    assert cells[:10] == ["node-a", "fast-box", "4711", "75%", "5.0%", "20%", "21", "1.4", "44.8", "end"]
    assert cells[10:15] == ["node-b", "box", "71", "83%", "0%"]
    assert cells[20:] == ["e0", "u3", "0", "node-b", "node-a", "1", "gone"]


def test_a_chart_without_lanes_says_so() -> None:
    read = Read(page.document(Chart("q", "1", 0.0, 0.0, (), ())))
    assert "No learner has recorded anything here yet." in read.texts["p"]
    assert "table" not in read.texts


def test_a_large_run_is_a_page_that_opens() -> None:
    assert len(page.document(many(500, 40))) < 3_000_000
    assert len(page.document(many(100, 40, "x" * 10_000))) < 3_000_000


def test_time_that_is_not_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        page.document(replace(two_learners(), seconds=math.nan))


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.0, "0 ms"),
        (0.05, "50 ms"),
        (0.9999, "1 s"),
        (8.607, "8.61 s"),
        (60.0, "1 min"),
        (125.0, "2 min 5 s"),
        (7_200.0, "2 h"),
        (2_592_000.0, "30 d"),
        (90_000.0, "1 d 1 h"),
    ],
)
def test_durations_are_told_in_two_units(seconds: float, shown: str) -> None:
    text = page.document(replace(two_learners(), seconds=seconds))
    assert shown in Read(text).texts["span"]
