"""The timeline's page in a real browser: what a person sees there, and does."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from browser import Browser, Page, installed
from conftest import lasting
from timeline_charts import HOSTILE, bar, hostile, lane, many, two_learners

from shardqueue.terminal import visible
from shardqueue.timeline import page
from shardqueue.timeline.chart import Chart

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    path = installed()
    if path is None:
        pytest.skip("no Chromium is installed (Debian: apt-get install chromium)")
    browser = Browser(path, tmp_path_factory.mktemp("profile"))
    lasting.add(browser.pid)
    yield browser
    browser.close()
    lasting.discard(browser.pid)


@pytest.fixture
def shown(browser: Browser, tmp_path: Path) -> Iterator[Page]:
    with browser.page(written(tmp_path, two_learners())) as opened:
        yield opened


def written(folder: Path, chart: Chart) -> Path:
    file = folder / "run.html"
    file.write_text(page.document(chart), encoding="utf-8")
    return file


def box(opened: Page, selector: str) -> dict[str, float]:
    """Where an element is, in pixels of the window."""
    found: dict[str, float] = opened.evaluate(
        f"document.querySelector({selector!r}).getBoundingClientRect().toJSON()"
    )
    return found


def window(opened: Page) -> tuple[float, float]:
    """The seconds between which the lanes are shown."""
    begin, end = opened.evaluate("(({from, to}) => [from, to])(document.getElementById('chart').dataset)")
    return float(begin), float(end)


def pixel(opened: Page, lane: int, seconds: float) -> tuple[float, float]:
    """Where a moment is on a lane, once that is in sight; a pointer is on whole pixels."""
    row = f"#lanes li:nth-child({lane + 1})"
    opened.evaluate(f"document.querySelector({row!r}).scrollIntoView({{block: 'nearest'}})")
    opened.settle()
    plot, place = box(opened, "#plot"), box(opened, row)
    begin, end = window(opened)
    along = plot["x"] + (seconds - begin) / (end - begin) * plot["width"]
    return round(along), round(place["y"] + place["height"] / 2)


def seconds_at(opened: Page, x: float) -> float:
    plot = box(opened, "#plot")
    begin, end = window(opened)
    return begin + (x - plot["x"]) / plot["width"] * (end - begin)


def card(opened: Page) -> dict[str, str]:
    """What the card tells, by name; empty where there is none."""
    found: dict[str, str] = opened.evaluate("""(() => {
        const card = document.getElementById("card"), told = {};
        if (card.hidden) return told;
        told.title = card.querySelector("h2").textContent;
        for (const name of card.querySelectorAll("dt")) told[name.textContent] = name.nextSibling.textContent;
        return told;
    })()""")
    return found


def labels(opened: Page) -> list[str]:
    found: list[str] = opened.evaluate(
        "[...document.querySelectorAll('#lanes li b')].map((b) => b.firstChild.data)"
    )
    return found


def drawn(opened: Page) -> int:
    """How many colours there are on the lanes' canvas."""
    found: int = opened.evaluate("""(() => {
        const plot = document.getElementById("plot");
        const pixels = plot.getContext("2d").getImageData(0, 0, plot.width, plot.height).data;
        return new Set(new Uint32Array(pixels.buffer)).size;
    })()""")
    return found


def assert_quiet(opened: Page) -> None:
    assert [address.split("/")[0] for address in opened.requests()] == ["file:"]
    assert opened.complaints() == []
    assert opened.dialogs() == []


def test_the_page_asks_for_nothing_and_complains_of_nothing(browser: Browser, tmp_path: Path) -> None:
    for chart in (two_learners(), Chart("q", "1", 0.0, 0.0, (), ()), many(3, 0)):
        with browser.page(written(tmp_path, chart)) as opened:
            assert_quiet(opened)


def test_what_breaks_the_policy_would_be_seen(browser: Browser, tmp_path: Path) -> None:
    file = written(tmp_path, two_learners())
    inline = '<img src="https://shardqueue.invalid/x.png"><p style="color: red" onclick="ran = 1"></p>'
    file.write_text(file.read_text().replace("</main>", f"{inline}</main>"))
    with browser.page(file) as opened:
        assert len(opened.complaints()) >= 2


def test_names_run_nothing_in_the_browser(browser: Browser, tmp_path: Path) -> None:
    with browser.page(written(tmp_path, hostile()), height=1200) as opened:
        assert labels(opened)[0].startswith(HOSTILE[0])
        for place in range(len(HOSTILE)):
            x, y = pixel(opened, place, 4.0)
            opened.hover(x, y)
            told = card(opened)
            assert (
                told["title"].removesuffix("…")
                == visible(HOSTILE[place])[: len(told["title"]) - told["title"].endswith("…")]
            )
            assert told["title"] == told["pass"]
            opened.hover(box(opened, "#lanes li")["x"] + 20, y)
            assert card(opened)["instance"] == told["title"]
        opened.hover(*pixel(opened, 1, 9.5))
        assert card(opened)["why"] in HOSTILE
        opened.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
        assert opened.evaluate("window.ran === undefined && document.images.length === 0")
        assert opened.evaluate("document.querySelector('h1').textContent").startswith("Run <script>")
        assert_quiet(opened)


def test_hovering_tells_unit_learner_attempt_and_rate(shown: Page) -> None:
    shown.hover(*pixel(shown, 0, 6.0))
    told = card(shown)
    assert told["title"] == "u2"
    assert (told["learner"], told["node"], told["pass"], told["attempt"]) == (
        "node-a",
        "fast-box · pid 4711",
        "e0",
        "0",
    )
    assert told["batches"] == "4 (batches 0 to 3 of the unit)"
    assert (told["took"], told["waited"]) == ("4.00 s", "1.00 s (25%)")
    assert told["rate"] == "1 batches/s, 32 samples/s"
    shown.hover(*pixel(shown, 0, 17.0))
    assert (card(shown)["title"], card(shown)["rate"]) == ("u4", "2 batches/s, 64 samples/s")
    shown.hover(*pixel(shown, 0, 10.0))
    assert card(shown) == {}


def test_what_was_taken_over_is_told_at_both_ends(shown: Page) -> None:
    shown.hover(*pixel(shown, 0, 13.0))
    told = card(shown)
    assert (told["title"], told["attempt"], told["had before"]) == ("u3", "1", "node-b, up to batch 1: gone")
    shown.hover(*pixel(shown, 1, 4.6))
    assert card(shown)["taken by"] == "node-a"
    shown.hover(*pixel(shown, 1, 5.0))
    told = card(shown)
    assert (told["title"], told["from"], told["to"]) == ("u3 taken over", "node-b", "node-a")
    assert (told["why"], told["written by"], told["between"]) == ("gone", "node-a", "7.00 s")


def test_the_shares_shown_are_the_charts(shown: Page) -> None:
    lane = box(shown, "#lanes li")
    shown.hover(lane["x"] + 20, lane["y"] + 20)
    told = card(shown)
    assert (told["title"], told["busy"], told["idle"]) == ("node-a", "15.0 s (75%)", "4.00 s (20%)")
    assert (
        shown.evaluate("[...document.querySelectorAll('#lanes .share.share')].map((s) => s.textContent)")[0]
        == "20% idle"
    )
    assert shown.evaluate("document.querySelector('.shares .idle dd').textContent") == "19%"


def test_the_wheel_zooms_at_the_pointer(shown: Page) -> None:
    x, y = pixel(shown, 0, 13.0)
    under = seconds_at(shown, x)
    for down in (-300, -300, 200):
        before = window(shown)
        shown.wheel(x, y, down)
        begin, end = window(shown)
        assert (end - begin < before[1] - before[0]) == (down < 0)
        assert seconds_at(shown, x) == pytest.approx(under)
    shown.hover(x, y)
    assert card(shown)["title"] == "u3"
    for _ in range(3):
        shown.wheel(x, y, 1_000)
    assert window(shown) == (0.0, 20.0)


def test_zooming_in_ends_and_stays_within_the_run(shown: Page) -> None:
    x, y = pixel(shown, 0, 20.0)
    for _ in range(12):
        shown.wheel(x - 1, y, -1_000)
    begin, end = window(shown)
    assert end - begin == pytest.approx(1e-3)
    assert end <= 20.0
    assert_quiet(shown)


def test_dragging_moves_and_a_double_click_shows_the_whole_run(shown: Page) -> None:
    x, y = pixel(shown, 0, 10.0)
    shown.wheel(x, y, -500)
    begin, end = window(shown)
    grabbed = seconds_at(shown, x)
    shown.drag((x, y), (x - 120, y))
    assert seconds_at(shown, x - 120) == pytest.approx(grabbed, abs=0.02)
    assert window(shown)[1] - window(shown)[0] == pytest.approx(end - begin)
    assert card(shown) == {}
    shown.click(x, y, times=2)
    assert window(shown) == (0.0, 20.0)


def test_a_click_pins_and_escape_lets_go(shown: Page) -> None:
    shown.click(*pixel(shown, 0, 2.0))
    shown.hover(*pixel(shown, 1, 2.0))
    assert card(shown)["title"] == "u0"
    shown.press("Escape")
    assert card(shown) == {}
    shown.hover(*pixel(shown, 1, 2.5))
    assert card(shown)["title"] == "u1"


def test_all_of_it_goes_by_keys(shown: Page) -> None:
    for _ in range(10):
        shown.press("Tab")
        if shown.evaluate("document.activeElement.id") == "scroller":
            break
    shown.press("+")
    shown.press("+")
    begin, end = window(shown)
    assert end - begin == pytest.approx(20.0 * 0.49)
    shown.press("ArrowLeft")
    assert window(shown)[0] == pytest.approx(begin - (end - begin) / 8)
    shown.press("ArrowRight")
    assert window(shown) == pytest.approx((begin, end))
    shown.press("-")
    assert window(shown)[1] - window(shown)[0] == pytest.approx(20.0 * 0.7)
    shown.press("0")
    assert window(shown) == (0.0, 20.0)
    shown.press("ArrowRight", shift=True)
    shown.press("ArrowRight", shift=True)
    assert card(shown)["title"] == "u2"
    assert "node-a" in shown.evaluate("document.getElementById('said').textContent")
    shown.press("ArrowDown", shift=True)
    assert (card(shown)["title"], card(shown)["learner"]) == ("u3", "node-b")
    shown.press("Escape")
    assert card(shown) == {}


def test_the_filter_finds_learners_and_units(browser: Browser, tmp_path: Path) -> None:
    with browser.page(written(tmp_path, many(30, 5))) as opened:
        opened.evaluate("document.getElementById('filter').focus()")
        opened.type("RANK-01")
        assert labels(opened) == [f"rank-{place:03d}" for place in range(10, 20)]
        assert opened.evaluate("document.getElementById('found').textContent") == "10 of 30 lanes"
        opened.evaluate("document.getElementById('filter').select()")
        opened.type("7-3")
        assert labels(opened) == ["rank-007", "rank-017", "rank-027"]
        opened.hover(*pixel(opened, 1, 3.5))
        assert card(opened)["title"] == "17-3"
        opened.type("nowhere")
        assert labels(opened) == []
        assert_quiet(opened)


def test_the_idlest_come_first_when_asked(browser: Browser, tmp_path: Path) -> None:
    chart = two_learners()
    idle = lane("node-c", (bar(0.0, 2.0, "u9"),), 20.0)
    with browser.page(written(tmp_path, replace(chart, lanes=(*chart.lanes, idle)))) as opened:
        assert labels(opened) == ["node-a", "node-b", "node-c"]
        opened.evaluate("""(() => {
            const order = document.getElementById("order");
            order.value = "idle";
            order.dispatchEvent(new Event("change"));
        })()""")
        opened.settle()
        assert labels(opened) == ["node-c", "node-a", "node-b"]
        opened.hover(*pixel(opened, 0, 1.0))
        assert card(opened)["title"] == "u9"


def test_many_lanes_scroll_under_the_axis(browser: Browser, tmp_path: Path) -> None:
    with browser.page(written(tmp_path, many(512, 39))) as opened:
        head = box(opened, "#head")
        opened.evaluate("document.getElementById('scroller').scrollTop = 1e6")
        opened.settle()
        assert box(opened, "#head") == head
        opened.hover(*pixel(opened, 511, 20.5))
        assert card(opened)["title"] == "511-20"
        assert box(opened, "#lanes li:last-child")["bottom"] <= box(opened, "#scroller")["bottom"]
        assert drawn(opened) > 3
        assert_quiet(opened)


def test_workers_bars_lie_on_rows_of_their_own(browser: Browser, tmp_path: Path) -> None:
    bars = (bar(0.0, 6.0, "upper"), bar(2.0, 9.0, "lower", row=1))
    with browser.page(
        written(
            tmp_path,
            replace(two_learners(), lanes=(lane("w", bars, 20.0, busy=9.0, idle=11.0),), handovers=()),
        )
    ) as opened:
        x, y = pixel(opened, 0, 4.0)
        opened.hover(x, y - 8)
        assert card(opened)["title"] == "upper"
        opened.hover(x, y + 8)
        assert card(opened)["title"] == "lower"


def test_training_waiting_idle_and_not_there_look_different(browser: Browser, tmp_path: Path) -> None:
    bars = (bar(2.0, 6.0, "u0", waited=2.0), bar(10.0, 14.0, "u1", before=2.0))
    one = lane("a", bars, 20.0, since=1.0, parted=18.0, left="early")
    chart = replace(two_learners(), lanes=(one,), handovers=(), tails=())
    with browser.page(written(tmp_path, chart)) as opened:
        seen = opened.evaluate("""(() => {
            const context = plot.getContext("2d"), y = middle(lanes[0]);
            const at = ([seconds, off]) => [...context.getImageData(x(seconds), y + off, 1, 1).data];
            const hex = (data) => "#" + data.slice(0, 3).map((part) => part.toString(16).padStart(2, "0")).join("");
            const kind = (data) => data[3] === 0 ? "nothing"
                : { [colours.busy]: "training", [colours.waiting]: "waiting" }[hex(data)] ?? "idle";
            return [[0.5, 0], [4, -9], [4, 9], [7, 0], [9, 0], [12, 9], [16, 0], [19, 0]].map(at).map(kind);
        })()""")
        # From 8 s on it waited for its second unit; half of the first one's time it waited too.
        assert seen == ["nothing", "training", "waiting", "idle", "waiting", "training", "idle", "nothing"]


@pytest.mark.parametrize("dark", [False, True])
def test_text_can_be_read_by_day_and_by_night(browser: Browser, tmp_path: Path, dark: bool) -> None:
    with browser.page(written(tmp_path, two_learners()), dark=dark) as opened:
        colours = opened.evaluate("""(() => {
            const style = getComputedStyle(document.documentElement);
            const grounds = (text) => [[text, "--paper"], [text, "--panel"]];
            const pairs = ["--ink", "--muted", "--idle-text"].flatMap(grounds);
            return pairs.map((pair) => pair.map((name) => style.getPropertyValue(name)));
        })()""")
        for text, ground in colours:
            assert contrast(text, ground) >= 4.5, (text, ground)
        assert (luminance(colours[0][1]) < 0.1) == dark
        assert drawn(opened) > 3


def luminance(colour: str) -> float:
    channels = [int(colour.strip()[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """The ratio of WCAG 2."""
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def test_a_narrow_window_shows_all_of_it(browser: Browser, tmp_path: Path) -> None:
    with browser.page(written(tmp_path, two_learners()), width=400) as opened:
        assert opened.evaluate("document.documentElement.scrollWidth") <= 400
        x, _ = pixel(opened, 0, 6.0)
        row = box(opened, "#lanes li")
        opened.hover(x, row["y"] + 24 + (row["height"] - 24) / 2)
        assert card(opened)["title"] == "u2"
        place = box(opened, "#card")
        assert place["left"] >= 0
        assert place["right"] <= 400


def test_an_edge_stays_where_it_is_at_the_closest_look(browser: Browser, tmp_path: Path) -> None:
    month = 2_592_000.0
    one = lane("a", (bar(0.0, month / 2, "u"),), month)
    chart = replace(two_learners(), seconds=month, lanes=(one,), handovers=(), tails=())
    with browser.page(written(tmp_path, chart)) as opened:
        opened.evaluate(f"look({month / 2} - 0.0005, {month / 2} + 0.0005)")
        opened.settle()
        colours = opened.evaluate("""(() => {
            const at = (x) => plot.getContext("2d").getImageData(x, middle(shown[0]), 1, 1).data.join();
            return [-60, -4, 4, 60].map((off) => at(width() / 2 + off));
        })()""")
        assert colours[0] == colours[1]
        assert colours[1] not in colours[2:]


def test_a_thousand_bars_in_a_pixel_are_as_busy_as_they_were(browser: Browser, tmp_path: Path) -> None:
    bars = tuple(bar(at / 20, at / 20 + 0.025, "u") for at in range(20_000))  # half of the time
    chart = replace(
        two_learners(), seconds=1_000.0, lanes=(lane("a", bars, 1_000.0),), handovers=(), tails=()
    )
    with browser.page(written(tmp_path, chart)) as opened:
        covered, train, idle = opened.evaluate("""(() => {
            const context = plot.getContext("2d"), green = (data) => data.filter((_, place) => place % 4 === 1);
            const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
            const row = () => mean(green([...context.getImageData(50, 24, 600, 24).data]));
            const found = [row()];
            for (const colour of [colours.busy, hatch]) {
                context.fillStyle = colour;
                context.fillRect(0, 0, width(), 60);
                found.push(row());
            }
            return found;
        })()""")
        assert (covered - idle) / (train - idle) == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("seconds", [0.05, 2_592_000.0])
def test_the_axis_has_ticks_from_milliseconds_to_days(
    browser: Browser, tmp_path: Path, seconds: float
) -> None:
    one = lane("a", (bar(0.0, seconds / 2, "u"),), seconds)
    with browser.page(
        written(tmp_path, replace(two_learners(), seconds=seconds, lanes=(one,), handovers=(), tails=()))
    ) as opened:
        ticks = opened.evaluate("""(() => {
            const { step, places } = marks(document.createElement("canvas").getContext("2d"));
            return places.map((at) => moment(at, step));
        })()""")
        assert 4 <= len(ticks) <= 24
        assert ticks[0] == ("0.000 s" if seconds < 1 else "0 s")
        assert ticks[-1] in ("0.050 s", "30 d")
        assert len(set(ticks)) == len(ticks)
