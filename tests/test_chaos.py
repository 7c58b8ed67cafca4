"""Nothing is lost when processes die, stop, lose the store or come late; what is repeated is what no log had shown.

Real processes on a folder and on an S3 server, by seed. The judge is what the processes wrote down themselves: it is
held against the logs, the records and the audit.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import pytest
from chaos import KINDS, UNIT_STEPS, Batch, Course, Learner, Line, Stage
from learners import Clock

from shardqueue.audit.accounts import Kind, Verdict, account
from shardqueue.audit.evidence import gather

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from benchmarks.seaweedfs import S3Server
    from shardqueue.records import BackRecord

Courses = Callable[..., Course]

MOST_FINDINGS = 10_000
TAKEN = ("silent", "gone", "left")
"""Why an attempt is ended by others."""


def courses(folder: Path) -> Courses:
    """Makes a course on a folder."""
    folder.mkdir(exist_ok=True)
    return lambda **options: Course(str(folder), str(folder / "queue"), **options)


@pytest.fixture
def folder(tmp_path: Path) -> Courses:
    return courses(tmp_path)


def bucket_courses(folder: Path, server: S3Server) -> Courses:
    """Makes a course on the S3 server."""
    folder.mkdir(exist_ok=True)
    url = f"s3://shardqueue/{folder.name}"
    return lambda **options: Course(str(folder), url, server.options, **options)


@pytest.fixture
def bucket(tmp_path: Path, s3_server: S3Server) -> Courses:
    return bucket_courses(tmp_path, s3_server)


# -- the judge -------------------------------------------------------------------------------------------


def check(stage: Stage) -> None:
    """Everything is trained; what was trained twice had to be; logs, records and audit agree with that."""
    assert set(stage.values()) == set(range(stage.course.batches)), stage.tell_all()
    for learner in stage.learners:
        told = {0, 128 + signal.SIGTERM, -signal.SIGTERM}  # the last: before or after its block
        expected = {-signal.SIGKILL} if learner.killed else told if learner.told else {0}
        assert learner.process.returncode in expected, learner.said.read_text()
    check_repeats(stage)
    check_credits(stage)
    check_audit(stage)


def check_repeats(stage: Stage) -> None:
    """Who was left alone trained nothing that others had taken over, and who was hurt as little as can be."""
    ended = stage.ended()
    shown = {(pid, attempt, batch) for pid, attempt, batch in credits_of(stage)}
    for learner in stage.learners:
        beyond = [line for line in learner.lines() if is_beyond(line, ended)]
        if learner.killed and not learner.known:
            unseen = [line for line in beyond if (line.pid, line.attempt, line.batch) not in shown]
            assert beyond == unseen, f"{learner.name} had logged what others trained again"
        elif learner.known:
            late = {
                line
                for when, known in learner.known
                for line in beyond
                if line.when > when and is_beyond(line, known)
            }
            assert len(late) <= len(learner.known), f"{learner.name} trained on what it had lost: {late}"
        else:
            assert len(beyond) <= learner.told, f"{learner.name} lost {beyond}"
    for learner in stage.learners:
        if not learner.killed or learner.known:  # who went on after a pause logged more
            continue
        for (unit, attempt), record in ended.items():
            logged = [
                batch[1] + 1
                for pid, at, batch in shown
                if (pid, at, batch[0]) == (learner.pid, attempt, unit)
            ]
            if logged and record.why in TAKEN:
                assert record.begin == max(logged), f"{unit}~{attempt} goes on at {record.begin}"


def is_beyond(line: Line, ended: dict[tuple[str, int], BackRecord]) -> bool:
    """Whether a batch is handed out again, for all that its line says."""
    unit, index = line.batch
    record = ended.get((unit, line.attempt))
    return record is not None and index >= record.begin


def credits_of(stage: Stage) -> Iterator[tuple[int, int, Batch]]:
    """What the logs say was trained: by which process, at which attempt, which batch."""
    for log, span in stage.ledger().spans():
        for index in range(span.begin, span.end):
            yield log.newest.where.pid, span.attempt, (span.unit, index)


def check_credits(stage: Stage) -> None:
    """What is logged was trained by who says so, and each batch is credited once by the attempt whose it is."""
    wrote = {(line.pid, line.attempt, line.batch) for line in stage.lines()}
    logged = Counter(credits_of(stage))
    assert set(logged) <= wrote
    ended = stage.ended()
    counts = Counter((attempt, batch) for _, attempt, batch in logged)
    for unit in stage.course.units:
        attempt, begin = 0, 0
        while begin is not None:
            record = ended.get((unit, attempt))
            end = UNIT_STEPS if record is None else record.begin
            credited = [counts[attempt, (unit, index)] for index in range(begin, end)]
            assert credited == [1] * (end - begin), f"{unit}~{attempt}: {credited} from batch {begin} on"
            if record is None:
                break
            attempt, begin = attempt + 1, record.begin


def check_audit(stage: Stage) -> None:
    """What the audit lists was trained twice; it lists all of which two logs tell."""
    fast = 40.0
    case = gather(stage.mailbox, Clock(fast), lambda seconds: threading.Event().wait(seconds / fast))
    ((evidence, expected),) = case.passes
    found = account(evidence, expected, case.situation, MOST_FINDINGS)
    listed = {
        (finding.unit, index)
        for finding in found.findings
        if finding.kind is Kind.REPEATED
        for index in range(finding.begin, finding.end or UNIT_STEPS)
    }
    twice = {
        batch for batch, number in Counter(batch for _, _, batch in credits_of(stage)).items() if number > 1
    }
    assert listed == twice
    assert listed <= set(stage.repeated())
    assert found.verdict is (Verdict.REPEATED if twice else Verdict.ONCE), found


# -- placed ----------------------------------------------------------------------------------------------


def until_in_a_unit(stage: Stage, learner: Learner, deep: int) -> None:
    """Wait until a learner has trained so many batches of a unit that it goes on with."""
    stage.until(
        lambda: any(line.batch[1] == deep for line in learner.lines()),
        f"{learner.name} is in the middle of a unit",
    )


def killed_in_the_middle_of_a_unit(folder: Courses, machines: bool, kind: str) -> None:
    """Its label comes back, and another one comes late."""
    with Stage(folder(machines=machines)) as stage:
        lost = stage.start("lost", kind)
        stage.start("kept", "queue")
        stage.go()
        until_in_a_unit(stage, lost, 11)
        stage.kill(lost)
        stage.start("late", "stepped")
        stage.start("lost", "queue")
        stage.until_over()
        check(stage)
        assert stage.ended()


def loader_goes_on_with_what_a_dead_one_held(folder: Courses) -> None:
    """The workers of the living had ended long before; those of the dead end by themselves."""
    with Stage(folder(machines=True, batches=120)) as stage:
        lost = stage.start("lost", "forked", seconds=0.1)
        stage.start("kept", "forked")
        stage.go()
        until_in_a_unit(stage, lost, 5)
        stage.until_trained(60)
        stage.kill(lost)
        stage.until_over()
        check(stage)
        assert any(record.why == "silent" for record in stage.ended().values())


def paused_until_all_is_over(folder: Courses, kind: str) -> None:
    """It finds that what it holds is trained by others, and trains no more than what it had in hand.

    A batch takes it so long that its log is written anew before it comes back for the next one.
    """
    with Stage(folder(machines=True, batches=200)) as stage:
        paused = stage.start("paused", kind, seconds=0.2)
        other = stage.start("other", "stepped", seconds=0.01)
        stage.go()
        until_in_a_unit(stage, paused, 4)
        stage.stop(paused, all_of_it=True)
        stage.until(lambda: not other.runs, "the other one had trained all")
        stage.go_on(paused)
        stage.until_over()
        check(stage)
        assert any(record.why == "silent" for record in stage.ended().values())


def outage_takes_nothing_from_anybody(folder: Courses) -> None:
    """Those who are done wait for a slow one, when the store is away for longer than a silent one is waited for."""
    with Stage(folder(machines=True)) as stage:
        until_two_wait_for_a_third(stage)
        away(stage, 2.5 * stage.course.reclaim_after)
        stage.until_over()
        check(stage)
        assert set(stage.values().values()) == {1}
        assert not stage.ended()


@pytest.mark.full
@pytest.mark.parametrize(("machines", "kind"), [(True, "forked"), (False, "stepped"), (False, "forked")])
def test_killed_in_other_ways(folder: Courses, machines: bool, kind: str) -> None:
    killed_in_the_middle_of_a_unit(folder, machines, kind)


@pytest.mark.full
def test_a_loader_is_paused_until_all_is_over(folder: Courses) -> None:
    paused_until_all_is_over(folder, "forked")


@pytest.mark.full
@pytest.mark.s3
def test_server_that_hangs_takes_nothing_from_anybody(bucket: Courses, s3_server: S3Server) -> None:
    """The same where calls under way get no answer, and some of them have taken effect."""
    with Stage(bucket(machines=True)) as stage:
        until_two_wait_for_a_third(stage)
        os.kill(s3_server.pid, signal.SIGSTOP)
        try:
            time.sleep(2.5 * stage.course.reclaim_after)
        finally:
            os.kill(s3_server.pid, signal.SIGCONT)
        stage.until_over()
        check(stage)
        assert set(stage.values().values()) == {1}
        assert not stage.ended()


def until_two_wait_for_a_third(stage: Stage) -> None:
    """All is claimed, a slow one has some of it in hand, and two that are done watch its log."""
    stage.start("slow", seconds=0.2)
    fast = {stage.start("fast", seconds=0.01).pid, stage.start("too", "stepped", seconds=0.01).pid}
    stage.go()
    stage.until(lambda: are_waiting(stage, fast), "two were done")
    time.sleep(0.5 * stage.course.reclaim_after)


def are_waiting(stage: Stage, pids: set[int]) -> bool:
    """Whether all is claimed, and nothing of it in the hands of these processes."""
    if len(stage.claims()) < len(stage.course.units):
        return False
    newest = [log.newest for log in stage.ledger().logs.values()]
    return pids <= {page.where.pid for page in newest if page.totals.batches and not page.held}


def away(stage: Stage, seconds: float) -> None:
    """The store cannot be reached for so long."""
    stage.cut_off()
    time.sleep(seconds)
    stage.restore()


# -- by seed ---------------------------------------------------------------------------------------------


def play(stage: Stage, seed: int, kinds: tuple[str, ...] = KINDS) -> None:
    """Hurt learners at random points of progress; one of them is left alone."""
    draw = random.Random(seed)
    after = stage.course.reclaim_after
    stage.start("safe", draw.choice(kinds), seconds=draw.choice((0.02, 0.05)))
    for name in ("one", "two"):
        stage.start(name, draw.choice(kinds), seconds=draw.choice((0.01, 0.02, 0.05)))
    stage.go()
    pauses: list[tuple[float, Learner]] = []
    for batches in sorted(draw.sample(range(stage.course.batches), draw.randint(3, 5))):
        stage.until_trained(batches)
        for learner in [learner for until, learner in pauses if until < time.monotonic()]:
            stage.go_on(learner)
        pauses = [(until, learner) for until, learner in pauses if learner.paused]
        victims = [one for one in stage.learners[1:] if one.runs and not one.paused]
        event = draw.choice(("kill", "kill", "stop", "stop", "tell", "join", "rejoin", "away"))
        whole = draw.random() < 0.5
        if event == "join":
            stage.start(f"late{batches}", draw.choice(kinds))
        elif event == "away":
            away(stage, draw.uniform(0.5, 2.0) * after)
        elif victims:
            victim = draw.choice(victims)
            if event in ("kill", "rejoin"):
                stage.kill(victim, whole)
            if event == "rejoin":
                stage.start(victim.name, draw.choice(kinds))
            if event == "tell":
                stage.tell(victim)
            if event == "stop":
                stage.stop(victim, whole)
                pauses.append((time.monotonic() + draw.uniform(0.2, 3.0) * after, victim))
    for until, learner in sorted(pauses, key=lambda pause: pause[0]):
        time.sleep(max(0.0, until - time.monotonic()))
        stage.go_on(learner)
    stage.until_over()


def chaos(anywhere: Courses) -> None:
    """One seed of many, see below."""
    with Stage(anywhere(machines=True, batches=200)) as stage:
        play(stage, 7, ("queue", "stepped"))
        check(stage)


@pytest.mark.torch
@pytest.mark.s3
def test_one_of_each(tmp_path: Path, s3_server: S3Server) -> None:
    """The processes of a scene mostly wait, so all scenes are played at once, each in a place of its own."""
    scenes: list[Callable[[Courses], None]] = [
        partial(killed_in_the_middle_of_a_unit, machines=True, kind="stepped"),
        loader_goes_on_with_what_a_dead_one_held,
        partial(paused_until_all_is_over, kind="queue"),
        outage_takes_nothing_from_anybody,
    ]
    with ThreadPoolExecutor(max_workers=len(scenes) + 1) as pool:
        played = [pool.submit(scene, courses(tmp_path / str(number))) for number, scene in enumerate(scenes)]
        played.append(pool.submit(chaos, bucket_courses(tmp_path / "one-of-each", s3_server)))
    for scene in played:
        scene.result()


@pytest.mark.full
@pytest.mark.parametrize("seed", range(10))
def test_chaos_on_a_folder_by_seed(folder: Courses, seed: int) -> None:
    """Half of them see one another's processes."""
    with Stage(folder(machines=seed % 2 == 0)) as stage:
        play(stage, seed)
        check(stage)


@pytest.mark.full
@pytest.mark.s3
@pytest.mark.parametrize("seed", range(100, 105))
def test_chaos_on_a_bucket_by_seed(bucket: Courses, seed: int) -> None:
    """The same over the network."""
    with Stage(bucket(machines=seed % 2 == 0)) as stage:
        play(stage, seed)
        check(stage)
