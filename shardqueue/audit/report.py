"""How an audit is shown: a table of passes, what was found with who and when, and a JSON document."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shardqueue.audit.accounts import Kind, Verdict
from shardqueue.audit.evidence import shown_pass
from shardqueue.terminal import visible

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from shardqueue.audit.accounts import Account, Finding, Part
    from shardqueue.audit.evidence import Case

_MEANING = {
    Verdict.ONCE: "every unit is trained whole, and no batch twice",
    Verdict.AT_MOST_ONCE: "no batch is trained twice; not all are trained",
    Verdict.REPEATED: "batches were trained more than once",
    Verdict.LOST: "no log says that all was trained, and nobody is left to train the rest",
    Verdict.CONTRADICTORY: "logs and records contradict each other, and prove nothing",
}
_TITLES = {
    Kind.CONTRADICTION: "contradictions",
    Kind.LOST: "lost",
    Kind.REPEATED: "trained more than once",
    Kind.LATE: "trained after the attempt had ended, by nobody else",
    Kind.LEFT: "not trained yet",
}
_STYLES = {Verdict.ONCE: "green", Verdict.AT_MOST_ONCE: "yellow"}
_VERDICTS = list(Verdict)


@dataclass(slots=True)
class Report:
    """The accounts of a run.

    Attributes:
        url: where it lies, as it may be shown.
        case: what was read of it.
        accounts: one a pass.
    """

    url: str
    case: Case
    accounts: list[Account] = field(default_factory=list)

    @property
    def verdict(self) -> Verdict:
        """The worst of all passes."""
        if self.case.strangers:
            return Verdict.CONTRADICTORY
        return max((account.verdict for account in self.accounts), key=_VERDICTS.index)

    @property
    def state(self) -> str:
        """Of the run: "running", "finished" (somebody left as nothing was left to claim), or "broken off"."""
        situation = self.case.situation
        return "running" if situation.running else "finished" if situation.ended else "broken off"

    @property
    def good(self) -> bool:
        """Whether nothing is broken: what is not trained yet may still be, or was left out on purpose."""
        open_ones = [one for one in self.accounts if one.verdict is Verdict.AT_MOST_ONCE and not one.left_out]
        if self.verdict not in (Verdict.ONCE, Verdict.AT_MOST_ONCE):
            return False
        return not open_ones or self.case.situation.running


def show(console: Console, report: Report) -> None:
    """Print the table of passes, what was found, and the verdict."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    def say(line: str, style: str = "") -> None:
        console.print(Text(visible(line), style=style), soft_wrap=True)

    case = report.case
    learners = _counted(len(case.learners), "learner")
    say(
        f"run {case.run} at {report.url}: {report.state}; {learners}, last seen {_clock(case.last) or 'never'}"
    )
    console.print()
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in ("pass", "units", "whole", "batches", "trained", "again", "left", "lost", "verdict"):
        table.add_column(name, justify="left" if name in ("pass", "verdict") else "right")
    for account in report.accounts:
        numbers = [account.units, account.whole, account.total, account.trained, account.repeated]
        cells = ["?" if number is None else f"{number:,}" for number in numbers]
        cells += [f"{account.left:,}", f"{account.lost:,}"]
        style = _STYLES.get(account.verdict, "bold red")
        table.add_row(visible(shown_pass(account.name)), *cells, Text(account.verdict.value, style=style))
    console.print(table)
    for account in report.accounts:
        for line, style in _findings(account):
            say(line, style)
    for line in _notes(report):
        console.print()
        say(line)
    console.print()
    say(f"{report.verdict.value}: {_MEANING[report.verdict]}.", "bold")


def document(report: Report) -> str:
    """The report as JSON."""
    case = report.case
    return json.dumps(
        {
            "format": "shardqueue-audit/1",
            "url": report.url,
            "run": case.run,
            "run_id": case.manifest.run_id,
            "state": report.state,
            "verdict": report.verdict.value,
            "good": report.good,
            "reclaim_after": case.manifest.reclaim_after,
            "learners": [f"{learner}~{instance}" for learner, instance in sorted(case.learners)],
            "untracked": [f"{learner}~{instance}" for learner, instance in sorted(case.untracked)],
            "strangers": [f"{learner}~{instance}" for learner, instance in sorted(case.strangers)],
            "passes": [_account(account) for account in report.accounts],
        },
        indent=1,
    )


def _account(account: Account) -> dict[str, Any]:
    return {
        "pass": shown_pass(account.name),
        "verdict": account.verdict.value,
        "units": account.units,
        "whole": account.whole,
        "batches": account.total,
        "trained": account.trained,
        "repeated": account.repeated,
        "left": account.left,
        "lost": account.lost,
        "unsized": account.unsized,
        "short": account.short,
        "reclaimed": account.reclaimed,
        "undone": account.undone,
        "left_out": account.left_out,
        "counts": {kind.value: account.counts[kind] for kind in Kind},
        "findings": [
            {
                "kind": found.kind.value,
                "unit": found.unit,
                "last": found.last,
                "units": found.units,
                "begin": found.begin,
                "end": found.end,
                "batches": found.batches,
                "what": found.what,
                "who": [_part(part) for part in found.parts],
            }
            for found in account.findings
        ],
    }


def _part(part: Part) -> dict[str, Any]:
    ended = part.ended
    return {
        "learner": part.learner,
        "instance": part.instance,
        "process": part.process,
        "attempt": part.attempt,
        "begin": part.begin,
        "end": part.end,
        "start": part.start,
        "stop": part.stop,
        "ended": None
        if ended is None
        else {"at": ended.begin, "by": f"{ended.learner}~{ended.instance}", "why": ended.why},
    }


def _findings(account: Account) -> Iterator[tuple[str, str]]:
    """Lines, and the style of each."""
    for kind, title in _TITLES.items():
        of_kind = [found for found in account.findings if found.kind is kind]
        if not of_kind:
            continue
        yield "", ""
        yield f"pass {shown_pass(account.name)}, {title}: {_counted(account.counts[kind], 'place')}", "bold"
        for found in of_kind:
            yield f"  {_where(found)}: {found.what}", ""
            for part in found.parts:
                yield f"      {_who(part)}", "dim"
        more = account.counts[kind] - len(of_kind)
        if more > 0:
            yield f"  and {more:,} more; --most {account.counts[kind]} shows them", ""


def _notes(report: Report) -> Iterator[str]:
    case = report.case
    for learner, instance in sorted(case.strangers):
        yield f"The log of {learner}~{instance} is not of this run, or lies under another name; remove it."
    for learner, instance in sorted(case.untracked):
        yield (
            f"{learner}~{instance} claimed units and recorded nothing as trained, so what it trained is in no log: "
            "iterate session.track(loader) in an entered Session."
        )
    if case.in_step and not any(account.left_out and account.left for account in report.accounts):
        yield (
            "Ranks stepped together. In lockstep with uneven='repeat', a last step for which there are fewer batches "
            "than ranks has some of them a second time, up to W - 1 on W ranks. No log has these."
        )
    for account in report.accounts:
        name = shown_pass(account.name)
        if account.short:
            units = _counted(account.short, "unit")
            yield f"pass {name}: of {units} load gave another number of batches than the plan has; load decides."
        if account.undone:
            undone = _counted(account.undone, "batch", "batches")
            yield (
                f"pass {name}: {undone} trained after the state from which the learner came back. They went with "
                "its model of then, and do not count."
            )
        if account.reclaimed:
            ended = _counted(account.reclaimed, "attempt")
            yield (
                f"pass {name}: {ended} ended by others, because the owner was gone or silent. What it trained after "
                "its last log, and never wrote, is in no log."
            )
        if account.left_out and account.left:
            left = _counted(account.left, "batch", "batches")
            yield f'pass {name}: {left} for {account.learners} ranks in step: what uneven="drop" leaves out.'
        if account.left_out and account.unsized:
            units = _counted(account.unsized, "unit")
            yield f"pass {name}: {units} of unknown size may have had more than a rank's share, which nobody took."
    if report.verdict is Verdict.REPEATED and case.manifest.reclaim_after is not None:
        seconds = f"{case.manifest.reclaim_after:g}"
        yield f"With reclaim_after={seconds} a batch is trained at least once: a learner that was silent may go on."


def _where(found: Finding) -> str:
    if found.last is not None:
        batches = "" if found.batches is None else f", {_counted(found.batches, 'batch', 'batches')}"
        return f"{_counted(found.units, 'unit')} of {found.unit} .. {found.last}{batches}"
    if not found.unit:
        return "all units" if found.kind is Kind.CONTRADICTION else _counted(found.units, "unit")
    if found.kind is Kind.CONTRADICTION:
        return found.unit
    if found.end is None:
        return f"{found.unit} from batch {found.begin} on"
    return f"{found.unit} {_batches(found.begin, found.end)}"


def _who(part: Part) -> str:
    who = f"{part.learner}~{part.instance}" + (f" ({part.process})" if part.process else "")
    said = f"attempt {part.attempt}: {who}"
    if not part.process:
        return who
    if part.start is None:
        said += " held it"
    elif part.begin < part.end:
        said += f" trained {_batches(part.begin, part.end)}, {_clock(part.start)} to {_clock(part.stop)}"
    if part.ended is not None:
        by = part.ended.learner
        said += f"; ended at {part.ended.begin} by {by} ({part.ended.why})"
    return said


def _batches(begin: int, end: int) -> str:
    return f"batch {begin}" if end == begin + 1 else f"batches {begin} to {end - 1}"


def _clock(wall: float | None) -> str:
    if wall is None:
        return ""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(max(0.0, min(wall, 4e9))))


def _counted(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"
