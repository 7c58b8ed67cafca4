"""What is in the mailbox that bears witness: manifest, logs and give-back records. It writes nothing, reads no claim.

Logs are read before give-back records: what a log says of an attempt rests on records that were there before it.
A learner that did not say how it left is looked for, which takes `SILENCE` seconds where it was on another machine;
then its log is read once more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardqueue.audit.accounts import Evidence, Situation, sort_by_pass
from shardqueue.audit.expectation import Expectation
from shardqueue.callers import Callers
from shardqueue.errors import InvalidInputError, RecordError, RunError
from shardqueue.learner import Life, seen_here
from shardqueue.logreader import READERS, LogReader
from shardqueue.records import BackRecord, Manifest, RunKeys, pass_number
from shardqueue.run import LOOK_EVERY, LOOK_SOON, TRAIN
from shardqueue.state import State
from shardqueue.status.runs import Runs
from shardqueue.watching import Watched

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardqueue.clock import Clock
    from shardqueue.ledger import Ledger
    from shardqueue.mailbox import Mailbox

_Process = tuple[str, str, str]


@dataclass(slots=True)
class Case:
    """A run, and all that is known of it.

    Attributes:
        run: its name.
        manifest: what it was opened with.
        situation: who is there, and whether it came to its end.
        passes: what is known of each, and what it has to hand out.
        learners: (learner, instance) of everybody who has a log.
        untracked: (learner, instance) of those who claimed and recorded nothing as trained: to the end, or in workers
            of a loader, which log by themselves only where no session tracks it.
        strangers: (learner, instance) of logs that were written in another run, or lie under another's name.
        last: when a log was written last, in wall-clock seconds; None for never.
        in_step: several ranks stepped together.
    """

    run: str
    manifest: Manifest
    situation: Situation
    passes: list[tuple[Evidence, Expectation]] = field(default_factory=list)
    learners: set[tuple[str, str]] = field(default_factory=set)
    untracked: set[tuple[str, str]] = field(default_factory=set)
    strangers: set[tuple[str, str]] = field(default_factory=set)
    last: float | None = None
    in_step: bool = False


def gather(
    mailbox: Mailbox,
    clock: Clock,
    sleep: Callable[[float], object],
    run: str | None = None,
    pass_: str | None = None,
) -> Case:
    """Read all that is known of a run.

    Args:
        mailbox: where it lies.
        clock: measures how long a log was watched.
        sleep: waits for some seconds.
        run: its name; the one opened last where it is None.
        pass_: the one pass that is meant. Where it is None, all training passes, since others may have been removed;
            of a run that has none (a test, a prediction), all there are.

    Raises:
        RunError: no run is here, or it cannot be judged.
        RecordError: what lies under a key of this library is not its record, or is that of another version.
        InvalidInputError: there is no such run, or nothing is known of `pass_`.
        MailboxError: the mailbox did not answer.
    """
    keys, manifest = _opened(mailbox, run)
    listed = mailbox.list(keys.learners)
    reader = LogReader(mailbox, keys)
    ledger = reader.read(listed=listed)
    named = {parsed[:3] for parsed in map(keys.parse_log, listed) if parsed is not None}
    unsettled = {process for process, log in ledger.logs.items() if log.newest.left is None} & named
    if unsettled:
        alive = _watch(mailbox, keys, unsettled, clock, sleep)
        reader.read(which=unsettled.__contains__)
        alive = {process for process in alive if ledger.logs[process].newest.left is None}
    else:
        alive = set()
    situation = Situation(
        alive=frozenset(alive),
        ended=any(log.newest.left == "end" for log in ledger.logs.values()),
        reclaims=manifest.reclaim_after is not None,
    )
    case = Case(keys.run, manifest, situation)
    case.learners = {log.owner for log in ledger.logs.values()}
    busy = {
        log.owner
        for (_, _, process), log in ledger.logs.items()
        if log.newest.totals.batches or (process == "main" and log.newest.left != "end")
    }
    claiming = {log.owner for log in ledger.logs.values() if log.newest.totals.claimed}
    case.untracked = claiming - busy
    case.strangers = {
        log.owner
        for process, log in ledger.logs.items()
        if process not in named or log.newest.run_id not in ("", manifest.run_id)
    }
    case.last = max((log.newest.wall for log in ledger.logs.values()), default=None)
    stepped = {log.owner for log in ledger.logs.values() if log.newest.reached is not None}
    case.in_step = len(stepped) > 1
    found = _by_pass(ledger, keys, listed, trains=TRAIN in manifest.plans)
    for name in _meant(found, pass_):
        evidence = found[name]
        expected = _expected(manifest, name)
        evidence.backs = _backs(mailbox, keys, name, expected)
        case.passes.append((evidence, expected))
    return case


def shown_pass(name: str) -> str:
    """What a pass is called on the command line: the first one has no name in keys."""
    return name or "e0"


def _opened(mailbox: Mailbox, run: str | None) -> tuple[RunKeys, Manifest]:
    runs = Runs(mailbox)
    name = runs.choose(run)
    if name is None:
        raise RunError("nothing is here: no run was ever opened here; check the URL, prefix and all")
    if run is None and runs.cut_off:  # an older one is not what was meant
        raise RecordError(f"{runs.cut_off}; or name the run that is meant")
    keys = RunKeys(name)
    if name not in runs.manifests:
        raise RunError(f"{keys.manifest} was removed just now; call it again")
    manifest = runs.manifests[name]
    if not manifest.plans:
        raise RunError(
            f"run {name} is being removed by `shardqueue clean`; there is nothing to prove any more"
        )
    return keys, manifest


def _watch(
    mailbox: Mailbox,
    keys: RunKeys,
    processes: set[_Process],
    clock: Clock,
    sleep: Callable[[float], object],
) -> set[_Process]:
    """Those of the processes that are alive."""
    watched = {process: Watched() for process in processes}
    pause = LOOK_SOON
    while True:
        for key in mailbox.list(keys.learners):
            parsed = keys.parse_log(key)
            if parsed is not None and parsed[:3] in watched:
                watched[parsed[:3]].key = key
        with Callers(READERS, "shardqueue-audit") as pool:
            readings = [(one, pool.submit(mailbox.get, one.key)) for one in watched.values()]
            for one, reading in readings:
                one.read(reading.result(), clock.monotonic())
        lives = {process: one.life(seen_here) for process, one in watched.items()}
        if Life.UNSURE not in lives.values():
            return {process for process, life in lives.items() if life is Life.ALIVE}
        sleep(pause)
        pause = min(LOOK_EVERY, 2 * pause)


def _by_pass(ledger: Ledger, keys: RunKeys, listed: list[str], trains: bool) -> dict[str, Evidence]:
    found = sort_by_pass(ledger)
    for learner, instance, name in filter(None, map(keys.parse_whole, listed)):
        found.setdefault(name, Evidence(name)).noted.add((learner, instance))
    numbers = [number for name in found if (number := pass_number(name)) is not None]
    if not numbers and (trains or not found):
        found[""] = Evidence("")
    for name, evidence in found.items():
        evidence.final = pass_number(name) == max(numbers, default=0)
    return found


def _meant(found: dict[str, Evidence], pass_: str | None) -> list[str]:
    if pass_ is None:
        training = {name: number for name in found if (number := pass_number(name)) is not None}
        return sorted(training, key=training.__getitem__) or sorted(found)
    name = "" if pass_ == "e0" else pass_
    if name not in found or not pass_:
        bound = f"a pass that the logs know ({', '.join(sorted(map(shown_pass, found)))})"
        raise InvalidInputError("pass", pass_, bound, "name one of them")
    return [name]


def _expected(manifest: Manifest, name: str) -> Expectation:
    if pass_number(name) is None:
        return Expectation(manifest.plans.get(name.rstrip("0123456789")))
    try:
        before = None if manifest.state is None else State.of(manifest.state).passes.get(name)
    except InvalidInputError as error:
        raise RecordError(f"the state in the manifest is not one of this version: {error}") from None
    return Expectation(manifest.plans.get(TRAIN), before)


def _backs(
    mailbox: Mailbox, keys: RunKeys, name: str, expected: Expectation
) -> dict[str, dict[int, BackRecord]]:
    """The give-back records of a pass; a key of no unit of it is somebody else's."""
    of_pass = keys.pass_keys(name)
    parsed = {key: of_pass.parse_back(key) for key in mailbox.list(of_pass.backs)}
    found: dict[str, dict[int, BackRecord]] = {}
    with Callers(READERS, "shardqueue-audit") as pool:
        readings = [
            (key, unit, pool.submit(mailbox.get, key))
            for key, unit in parsed.items()
            if unit is not None and expected.refusal(unit[0]) is None
        ]
        for key, (identifier, attempt), reading in readings:
            data = reading.result()
            if data is not None:
                found.setdefault(identifier, {})[attempt] = BackRecord.decode(data, key)
    return found
