"""How a standing is shown: a table for people, one line for a log, and a JSON document for programs.

On a terminal the table leaves out columns until it fits; in a pipe nothing is cut.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shardqueue.prices import AS_OF
from shardqueue.simulate.show import seconds_shown
from shardqueue.status.standing import AHEAD, Life, State, standing
from shardqueue.terminal import visible

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import RenderableType

    from shardqueue.status.observing import Observation
    from shardqueue.status.spending import Spending
    from shardqueue.status.standing import Learner, Standing

FORMAT = "shardqueue-status/1"
WIDEST_BAR = 60
_WIDE = 10_000
"""Columns of a console that is no terminal: nothing is cut."""
_NAME, _LEAST_NAME = 0, 8
_GAP = 3
_STATES = {
    State.RUNNING: "green",
    State.FINISHED: "green",
    State.STALLED: "bold red",
    State.BROKEN_OFF: "bold red",
    State.OPENED: "yellow",
    State.REMOVED: "yellow",
}
_LIVES = {Life.ALIVE: "green", Life.SILENT: "bold red", Life.GONE: "bold red", Life.FAILED: "red"}


@dataclass(frozen=True, slots=True)
class Found:
    """All that one look came to.

    Attributes:
        url: of the mailbox, as a message may show it.
        standing: of the run, None where nothing is there yet.
        spending: what its requests cost, None where they have no price.
        others: other runs at the prefix.
        unread: names of other runs that were not looked at.
        strange: what is wrong with manifests that cannot be read.
    """

    url: str
    standing: Standing | None
    spending: Spending | None = None
    others: Sequence[Observation] = ()
    unread: Sequence[str] = ()
    strange: Sequence[str] = ()


def new_console() -> Console:
    """A console that cuts nothing unless it is a terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=_WIDE)


def view(found: Found, console: Console) -> RenderableType:
    """All of it, for people."""
    stands = found.standing
    if stands is None:
        return Text(visible(f"Nothing is at {found.url} yet: no learner has been here."))
    parts: list[RenderableType] = [_headline(found.url, stands), *_pass_lines(stands, console)]
    if stands.learners:
        parts += [Text(), _table(stands, console.width), Text()]
    parts += [Text(visible(line)) for line in _sums(stands, found.spending)]
    parts += [Text(visible(f"! {note}"), style="yellow") for note in stands.notes]
    parts += [Text(visible(line)) for line in _other_lines(found)]
    return Group(*parts)


def line(found: Found) -> str:
    """The state of the run in one line."""
    stands = found.standing
    if stands is None:
        return "nothing is there yet"
    parts = [f"run {stands.observation.run} {_in_words(stands)}", _census(stands)]
    parts += [text for text in (_so_far(stands),) if text]
    parts += [_rate(stands)] if stands.state is State.RUNNING else []
    parts += [f"{stands.repeated:,} repeated"] if stands.repeated else []
    return "; ".join(parts)


def document(found: Found) -> dict[str, Any]:
    """All of it, for programs. Times are in seconds, rates a second."""
    stands = found.standing
    told: dict[str, Any] = {"format": FORMAT, "url": found.url, "run": None, "state": "nothing there yet"}
    if stands is None:
        return told
    seen, current, spent = stands.observation, stands.current, found.spending
    return {
        **told,
        "run": seen.run,
        "state": stands.state.value,
        "at": seen.wall,
        "opened_by": seen.manifest.opened_by,
        "opened_at": seen.manifest.wall,
        "reclaim_after": seen.manifest.reclaim_after,
        "idle_seconds": stands.idle,
        "batches": stands.batches,
        "samples": stands.samples,
        "samples_per_second": stands.rate,
        "claimed": stands.claimed,
        "repeated": stands.repeated,
        "reclaimed": stands.reclaimed,
        "given_back": {"attempts": seen.backs, "or_more": seen.more_backs},
        "pass": None
        if current is None
        else {
            "name": current.name,
            "counted": current.counted,
            "done": current.done,
            "total": current.total,
            "batches_per_second": current.rate,
            "seconds_left": current.left,
            "drift_steps": current.drift,
        },
        "learners": [
            {
                "learner": learner.name,
                "instance": learner.instance,
                "life": learner.life.value,
                "seen_seconds_ago": learner.age,
                "batches": learner.batches,
                "samples": learner.samples,
                "share": learner.share,
                "samples_per_second": learner.rate,
                "samples_per_second_overall": learner.overall,
                "batches_per_second_overall": learner.pace,
                "waiting": learner.waiting,
                "step": learner.step,
                "held": learner.held,
                "processes": learner.processes,
            }
            for learner in stands.learners
        ],
        "requests": None
        if spent is None
        else {"about": spent.requests, "dollars": spent.dollars, "prices": spent.prices},
        "notes": list(stands.notes),
        "unreadable": list(seen.unreadable),
        "other_runs": [
            {
                "run": other.run,
                "state": standing(other).state.value,
                "learners": len(standing(other).learners),
                "batches": standing(other).batches,
                "opened_by": other.manifest.opened_by,
                "opened_at": other.manifest.wall,
            }
            for other in found.others
        ],
        "unread_runs": list(found.unread),
        "strange_runs": list(found.strange),
    }


def _headline(url: str, stands: Standing) -> Text:
    text = Text(visible(f"run {stands.observation.run} at {url}: "))
    text.append(_in_words(stands), style=_STATES[stands.state])
    text.append(f"; {_census(stands)}")
    return text


def _in_words(stands: Standing) -> str:
    if stands.state is State.STALLED and stands.idle is not None:
        return f"stalled, nothing trained for {seconds_shown(stands.idle)}"
    return stands.state.value


def _census(stands: Standing) -> str:
    if not stands.learners:
        return "no learner yet"
    counts = {life: sum(learner.life is life for learner in stands.learners) for life in Life}
    return ", ".join(f"{count:,} {life.value}" for life, count in counts.items() if count)


def _pass_lines(stands: Standing, console: Console) -> list[RenderableType]:
    lines: list[RenderableType] = []
    told = _so_far(stands)
    if told:
        lines.append(Text(told))
    current = stands.current
    if current is not None and current.share is not None and console.is_terminal:
        bar = Table.grid()
        width = min(WIDEST_BAR, console.width)
        bar.add_row(ProgressBar(1.0, current.share, width, complete_style="green", finished_style="green"))
        lines.append(bar)
    if stands.state is State.RUNNING:
        lines.append(Text(_rate(stands)))
    return lines


def _so_far(stands: Standing) -> str:
    current = stands.current
    if current is None:
        return ""
    title, claimed = visible(current.title), " claimed" if current.counted == "units" else ""
    if current.total is None:
        return f"{title}: {current.done:,} batches"
    share = "" if current.share is None else f" ({_percent(current.share)})"
    text = f"{title}: {current.done:,} of {current.total:,} {current.counted}{claimed}{share}"
    if current.left and stands.state is State.RUNNING:
        text += f", about {seconds_shown(current.left)} left"
    return text


def _rate(stands: Standing) -> str:
    rates = [f"{_number(stands.rate)} samples/s"] if stands.samples else []
    rates += [f"{_number(stands.current.rate)} batches/s"] if stands.current is not None else []
    return ", ".join(rates) or "nothing trained yet"


def _table(stands: Standing, width: int) -> Table:
    rows = [[cell(learner) for _, _, cell in _COLUMNS] for learner in stands.learners]
    names = [learner.name for learner in stands.learners]
    for row, learner in zip(rows, stands.learners, strict=True):
        again = f" ({learner.instance[:4]})" if names.count(learner.name) > 1 else ""
        row[_NAME] = visible(learner.name + again)
    kept, room = _fitting(stands, rows, width)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for number in kept:
        title = _COLUMNS[number][0]
        left = number <= _LIFE
        most = room if number == _NAME else None
        table.add_column(title, justify="left" if left else "right", no_wrap=True, max_width=most)
    for row, learner in zip(rows, stands.learners, strict=True):
        cells = [Text(row[number]) for number in kept]
        cells[_LIFE].stylize(_LIVES.get(learner.life, "dim"))
        table.add_row(*cells)
    return table


def _fitting(stands: Standing, rows: Sequence[Sequence[str]], width: int) -> tuple[list[int], int]:
    """The columns that say something, less the least important ones where room is short; and room for a name."""
    useless = {"samples/s", "overall"} if not stands.samples else {"batches/s"}
    if all(learner.step is None for learner in stands.learners):
        useless.add("step")
    titles = [title for title, _, _ in _COLUMNS]
    kept = [number for number, title in enumerate(titles) if title not in useless]
    widths = [_GAP + max(map(cell_len, column)) for column in zip(titles, *rows, strict=True)]
    name = min(widths[_NAME], _LEAST_NAME + _GAP)

    def others() -> int:
        return sum(widths[number] for number in kept if number != _NAME)

    while name + others() > width and len(kept) > _LIFE + 1:
        kept.remove(max(kept, key=lambda number: _COLUMNS[number][1]))
    return kept, max(_LEAST_NAME, width - others() - _GAP)


def _sums(stands: Standing, spent: Spending | None) -> list[str]:
    lines = []
    current, seen = stands.current, stands.observation
    if current is not None and current.drift:
        apart = f"{current.drift:,} step{'' if current.drift == 1 else 's'} apart"
        lines.append(f"{apart}: {current.ahead} is ahead, {current.behind} behind")
    counts = []
    if stands.repeated:
        counts.append(f"{stands.repeated:,} batches trained again")
    if stands.reclaimed:
        counts.append(f"{stands.reclaimed:,} units taken back from silent learners")
    if seen.backs:
        counts.append(f"{seen.backs:,}{' or more' if seen.more_backs else ''} given back")
    if counts:
        lines.append("; ".join(counts))
    if spent is not None:
        prices = f"at prices of {spent.prices}, {AS_OF}"
        lines.append(f"about {_about(spent.requests)} requests so far, ${spent.dollars:,.2f} {prices}")
    return lines


def _other_lines(found: Found) -> list[str]:
    lines = []
    for other in found.others:
        stands = standing(other)
        people = f"{len(stands.learners):,} learner{'' if len(stands.learners) == 1 else 's'}"
        opened = f"opened {_date(other.manifest.wall)} by {other.manifest.opened_by}"
        lines.append(f"run {other.run}: {stands.state.value}; {people}, {stands.batches:,} batches; {opened}")
    if found.unread:
        lines.append(f"{len(found.unread):,} older runs: --run {found.unread[0]} shows the first of them")
    return [*lines, *(f"! {strange}" for strange in found.strange)]


def _about(number: int) -> str:
    """Two digits of it."""
    return f"{float(f'{number:.1e}'):,.0f}"


def _seen(age: float) -> str:
    return f"{-age:,.0f} s ahead" if age < AHEAD else f"{_short(max(0.0, age))} ago"


def _short(seconds: float) -> str:
    for size, unit in ((172_800, "d"), (7_200, "h"), (120, "min")):
        if seconds >= size:
            return f"{seconds / _SECONDS[unit]:,.0f} {unit}"
    return f"{seconds:.0f} s"


_SECONDS = {"d": 86_400, "h": 3_600, "min": 60}


def _date(wall: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(max(0.0, min(wall, 4e9))))


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def _number(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _now(learner: Learner) -> str:
    return _number(learner.rate) if learner.life is Life.ALIVE else "-"


_Column = tuple[str, int, "Callable[[Learner], str]"]
_COLUMNS: tuple[_Column, ...] = (
    ("learner", 0, lambda one: one.name),
    ("", 1, lambda one: one.life.value),
    ("seen", 2, lambda one: _seen(one.age)),
    ("batches", 3, lambda one: f"{one.batches:,}"),
    ("share", 6, lambda one: _percent(one.share)),
    ("samples/s", 4, _now),
    ("overall", 7, lambda one: _number(one.overall)),
    ("batches/s", 4, lambda one: _number(one.pace)),
    ("waits", 5, lambda one: _percent(one.waiting)),
    ("step", 8, lambda one: "-" if one.step is None else f"{one.step:,}"),
)
"""Title, how easily it is left out where room is short, and what it says."""
_LIFE = 1
