"""A run's chart from what the mailbox holds: the manifest, all pages of all logs, and give-back records.

Nothing is written. A claim is read only where an attempt was ended of which no log names the owner; who claimed and
never wrote what it trained has an empty lane. Each log is folded as soon as it is read, and a chart has `BARS` bars
at most, however long the run was. What cannot be read or cannot be true is left out and said in a note.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from shardqueue.callers import Callers
from shardqueue.clock import SystemClock
from shardqueue.errors import InvalidInputError
from shardqueue.learner import LOG_EVERY, SILENCE, seen_here
from shardqueue.logreader import READERS
from shardqueue.records import PASS_NAME, BackRecord, ClaimRecord, RunKeys
from shardqueue.status.runs import Runs
from shardqueue.status.standing import MISSED
from shardqueue.timeline.chains import Chains
from shardqueue.timeline.lanes import Clocks, fold, shown_pass
from shardqueue.timeline.logs import UNREADABLE, Logs
from shardqueue.timeline.making import Material, make
from shardqueue.timeline.processes import Traced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from shardqueue.clock import Clock
    from shardqueue.mailbox import Mailbox
    from shardqueue.records import LogPage, Process
    from shardqueue.timeline.chart import Chart
    from shardqueue.timeline.lanes import Key

    Decode = Callable[[bytes, str], "R"]

R = TypeVar("R")

BARS = 20_000
"""Bars of a chart, at most."""
HANDOVERS = 2_000
"""Ended attempts that are read, at most: each is a request or two."""


def read(
    mailbox: Mailbox,
    run: str | None = None,
    passes: Sequence[str] = (),
    *,
    url: str = "",
    clock: Clock | None = None,
    seen: Callable[[Process], bool | None] = seen_here,
    bars: int = BARS,
) -> Chart | None:
    """Read a run.

    Args:
        mailbox: where it lies.
        run: its name; the one that was opened last where it is None.
        passes: the passes that are meant, as in `("e0", "val0")`; all where it is empty.
        url: what the chart shall say of the mailbox's place.
        clock: tells what times cannot be yet.
        seen: tells whether a process is seen on this machine.
        bars: how many the chart may have; a process that trained has one at least.

    Returns:
        The chart; None for nothing at all.

    Raises:
        InvalidInputError: there is no such run, or nothing was trained in one of `passes`.
        RunError: there is something, and no run.
        RecordError: what should be the run's manifest is none.
        MailboxError: the mailbox cannot be read, or did not answer.
    """
    runs = Runs(mailbox)
    chosen = runs.choose(run)
    manifest = None if chosen is None else runs.manifests.get(chosen)
    if chosen is None or manifest is None:  # listed, and gone: somebody cleans this prefix
        return None
    now = (SystemClock() if clock is None else clock).wall()
    wanted = frozenset("" if name == "e0" else name for name in passes)
    clocks = Clocks.around(manifest.wall, now)
    found = Material(url, chosen, manifest, now, clocks, wanted, Chains())
    if run is None:
        found.others = [name for name in runs.newest_first if name != chosen]
    _read_logs(mailbox, found, bars)
    _check(found)
    _read_backs(mailbox, found)
    _see_who_is_gone(found, seen)
    return make(found)


def _read_logs(mailbox: Mailbox, found: Material, bars: int) -> None:
    logs = Logs(mailbox, RunKeys(found.run), found.manifest.run_id)
    most = max(1, bars // max(1, len(logs)))
    for log in logs:
        folded = fold(log, found.clocks, found.wanted, most)
        found.chains.add(len(found.processes), log.newest, folded)
        found.processes.append(Traced(log.newest, folded))
    found.whole, found.unreadable, found.strangers = logs.whole, logs.unreadable, logs.strangers


def _check(found: Material) -> None:
    known = {name for one in found.processes for name in one.folded.extents}
    for name in sorted(found.wanted - known):
        bound = f"a pass that the logs know ({', '.join(sorted(map(shown_pass, known))) or 'there is none'})"
        raise InvalidInputError("pass", name or "e0", bound, "name one of them, or none")


def _read_backs(mailbox: Mailbox, found: Material) -> None:
    """How attempts were ended, and whose they were."""
    names = {name: None for one in found.processes for name in one.folded.extents}
    names |= {claim.pass_: None for one in found.processes for claim in one.page.held}
    room = HANDOVERS
    for name in names:
        if (found.wanted and name not in found.wanted) or not PASS_NAME.fullmatch(name):
            continue
        of_pass = RunKeys(found.run).pass_keys(name)
        listed = mailbox.list(of_pass.backs, "", room + 1)
        if len(listed) > room:
            found.more_handovers = HANDOVERS
        parsed = {key: of_pass.parse_back(key) for key in listed[:room]}
        ended = {(name, *unit): key for key, unit in parsed.items() if unit is not None}
        room -= len(ended)
        backs = dict(_records(mailbox, ended, BackRecord.decode, found.unreadable))
        unknown = {key: of_pass.claim(*key[1:]) for key in backs if not found.chains.knows(key)}
        for key, claim in _records(mailbox, unknown, ClaimRecord.decode, found.unreadable):
            found.chains.claimed(key, claim)
        found.handovers += [found.chains.handover(key, backs) for key in backs]


def _records(
    mailbox: Mailbox, keys: Mapping[Key, str], decode: Decode[R], unreadable: list[str]
) -> Iterator[tuple[Key, R]]:
    """Read records; those that cannot be are left out, and what is wrong with them is added to a list."""
    with Callers(READERS, "shardqueue-timeline") as pool:
        readings = [(attempt, key, pool.submit(mailbox.get, key)) for attempt, key in keys.items()]
        for attempt, key, reading in readings:
            try:
                data = reading.result()
                if data is not None:  # else listed, and gone: somebody cleans this prefix
                    yield attempt, decode(data, key)
            except UNREADABLE as error:
                unreadable.append(str(error))


def _see_who_is_gone(found: Material, seen: Callable[[Process], bool | None]) -> None:
    """Who did not say so is gone if others took its units, its process is not there, or it was silent for long."""
    lost = {one.owner for one in found.handovers if one.reclaimed}
    newest = max((one.last for one in found.processes), default=0.0)
    for lane, one in enumerate(found.processes):
        here = seen(one.page.where)
        silent = here is None and newest - one.last > max(SILENCE, MISSED * _pause(one.page))
        one.gone = one.page.left is None and (lane in lost or here is False or silent)


def _pause(page: LogPage) -> float:
    """Seconds between two writes of a log, as far as that can be."""
    return page.every if page.every is not None and 0.0 < page.every < SILENCE * LOG_EVERY else LOG_EVERY
