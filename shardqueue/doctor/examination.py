"""The checks, one after the other, on a store that may refuse any of them.

First each verb is tried by itself, so that one refusal hides no other. Then comes what the library relies on: an
exclusive create, alone and in a race, and readings and listings that show what was just written. A check that needs
a verb which does not work is not tried, and says so. At last each verb is timed.

The race is what tells a server that checks and then writes: its contenders, each with a connection of its own,
create one key at once, round after round. Exactly one may win, and what is stored must be the winner's. Rounds that
go well are no proof: the list of stores that are known to be exclusive stays the first line of defence.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from shardqueue.doctor import permissions
from shardqueue.doctor.belongings import Belongings
from shardqueue.doctor.findings import Findings, Latency, Row
from shardqueue.errors import MailboxError, MailboxRefusedError, MailboxUnavailableError
from shardqueue.mailbox.probe import prove_exclusive, race

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardqueue.mailbox import Mailbox

CONTENDERS = 8
ROUNDS = 8
CALLS = 20
"""Calls of each verb that are timed, at most."""
TIMING = 3.0
"""Seconds after which no further call of a verb is timed."""
_PUTS = 3
"""Times that one overwrite is sent."""
LISTED = 5
"""Keys that are written for a listing."""

_GONE = "it answered at first, and then no more: look at the server and the network"
_EXCLUSIVE = (
    "two learners would train the same unit; use a local or NFS folder, or a store that honours If-None-Match "
    "(AWS, R2, SeaweedFS >= 4.48, a current MinIO or Ceph)"
)
_CACHED = "learners would miss what others wrote; take caches, gateways and replicas out of the way"


def examine(
    url: str,
    connect: Callable[[], Mailbox],
    findings: Findings,
    *,
    rounds: int = ROUNDS,
    calls: int = CALLS,
) -> None:
    """Look at a store, and take away what was written there, also when interrupted.

    Args:
        url: what the store is called, for permissions.
        connect: opens the mailbox without proving it, each time by a connection of its own where there is one.
        findings: gets the result.
        rounds: of the race.
        calls: how many of each verb are timed, at most.

    Raises:
        InvalidInputError: the URL is malformed.
    """
    try:
        bare = connect()
    except MailboxError as error:
        findings.rows.append(_failed("can be opened", error))
        return
    belongings = Belongings()
    mailbox, again = belongings.of(bare), lambda: belongings.of(connect())
    examination = _Examination(url, mailbox, again, belongings.prefix, findings)
    try:
        # In a thread, which no signal interrupts in a write: one that is abandoned could land after the removal.
        from shardqueue.doctor.report import watch  # brings rich

        with ThreadPoolExecutor(1, thread_name_prefix="shardqueue-doctor") as thread:
            try:
                examining = thread.submit(examination.run, rounds, calls)
                watch(examining, findings)
                examining.result()
            except BaseException:
                belongings.stop()
                raise
    finally:
        findings.left = belongings.remove(bare)
    if len(findings.rows) > 1:
        findings.rows.append(_tidied(findings.left))


class _Examination:
    def __init__(
        self, url: str, mailbox: Mailbox, connect: Callable[[], Mailbox], prefix: str, findings: Findings
    ) -> None:
        self._url, self._mailbox, self._connect = url, mailbox, connect
        self._prefix, self._findings = prefix, findings
        self._useless: dict[str, str] = {}

    def run(self, rounds: int, calls: int) -> None:
        """All checks; only the first if the store does not answer."""
        if not self._reaches():
            return
        self._tries_each_verb()
        self._check("creates exclusively", ("create", "read"), self._creates)
        name = f"stands a race of {CONTENDERS}"
        self._check(name, ("create", "read"), partial(self._races, rounds))
        self._check("reads what was just written", ("create", "read"), self._reads)
        self._check("lists what was just written", ("create", "list"), self._lists)
        self._check("overwrites", ("overwrite", "read"), self._overwrites)
        self._check("deletes", ("create", "read", "delete"), self._deletes)
        self._time_each_verb(calls)

    # -- verbs by themselves -----------------------------------------------------------------------------------

    def _reaches(self) -> bool:
        """Whether there is a store that answers; a refusal is an answer."""
        started = time.monotonic()
        try:
            self._mailbox.list(self._prefix, limit=1)
        except MailboxUnavailableError as error:
            self._add(Row("reaches it", False, *_parts(error)))
            return False
        except MailboxError as error:
            if not permissions.is_denial(str(error)):
                self._add(_failed("reaches it", error))
                return False
        self._add(Row("reaches it", True, f"it answered in {_milliseconds(time.monotonic() - started)}"))
        return True

    def _tries_each_verb(self) -> None:
        denied = []
        tries: dict[str, Callable[[], object]] = {
            "create": lambda: self._mailbox.put_if_absent(self._key("verbs/create"), b"1"),
            "overwrite": lambda: self._put(self._key("verbs/overwrite"), b"1"),
            "read": self._read_whatever_is_there,
            "list": lambda: self._mailbox.list(self._prefix, limit=1),
            "delete": lambda: self._mailbox.delete([self._key("verbs/create")]),
        }
        for verb in permissions.VERBS:
            try:
                tries[verb]()
            except MailboxError as error:
                if permissions.is_denial(str(error)):
                    denied.append(verb)
                    self._useless[verb] = "denied"
                else:
                    self._useless[verb] = "failed"
                    self._add(_failed(f"can {verb}", error))
        self._findings.missing = permissions.missing(self._url, denied)
        if denied:
            found = f"denied: {', '.join(denied)}; missing: {', '.join(self._findings.missing)}"
            self._add(Row("permissions", False, found, permissions.remedy(self._url, denied)))
        else:
            self._add(
                Row("permissions", True, ", ".join(v for v in permissions.VERBS if v not in self._useless))
            )

    def _read_whatever_is_there(self) -> None:
        """Not an absent key, if possible: who may not list is denied those on S3."""
        for key in ("verbs/create", "verbs/overwrite"):
            if key.partition("/")[2] not in self._useless:
                self._mailbox.get(self._key(key))
                return
        self._mailbox.get(self._key("verbs/absent"))

    # -- what the library relies on ----------------------------------------------------------------------------

    def _check(self, name: str, verbs: tuple[str, ...], look: Callable[[], Row]) -> None:
        lacking = [f"{verb} ({self._useless[verb]})" for verb in verbs if verb in self._useless]
        if lacking:
            self._add(Row(name, None, f"not tried, for want of {', '.join(lacking)}"))
            return
        try:
            row = look()
        except MailboxError as error:
            row = _failed(name, error)
        self._add(Row(name, row.good, row.found, row.remedy))

    def _creates(self) -> Row:
        try:
            prove_exclusive(self._mailbox, f"{self._prefix}probe/")
        except MailboxRefusedError as error:
            return Row("", False, str(error).partition("; ")[0], _EXCLUSIVE)
        return Row("", True, "the second create of one key was refused, and the first bytes stand")

    def _races(self, rounds: int) -> Row:
        contenders = [self._connect() for _ in range(CONTENDERS)]
        with ThreadPoolExecutor(CONTENDERS, thread_name_prefix="shardqueue-doctor") as threads:
            list(threads.map(lambda mailbox: mailbox.get(self._key("race/nothing")), contenders))
            for number in range(rounds):
                winners, kept = race(contenders, self._key(f"race/{number}"), threads)
                found, remedy = f"{winners} of {CONTENDERS} creates of one key succeeded", _EXCLUSIVE
                if winners == 1:
                    found = "what is stored is not what the winner wrote"
                if kept is None:
                    found, remedy = "a key that was created is not found", _CACHED
                if not kept:
                    return Row("", False, f"round {number + 1}: {found}", remedy)
        return Row("", True, f"one winner in each of {rounds} rounds, and its bytes stand")

    def _reads(self) -> Row:
        for number in range(LISTED):
            key, body = self._key(f"read/{number}"), os.urandom(16)
            self._mailbox.put_if_absent(key, body)
            if self._mailbox.get(key) != body:
                return Row("", False, f"key {number + 1} of {LISTED} was created, and not read back", _CACHED)
        return Row("", True, f"{LISTED} of {LISTED} keys")

    def _lists(self) -> Row:
        prefix = self._key("list/")
        keys = [f"{prefix}{number}" for number in range(LISTED)]
        for number, key in enumerate(keys):
            self._mailbox.put_if_absent(key, b"1")
            seen = self._mailbox.list(prefix)
            if seen != keys[: number + 1]:
                found = f"of the {number + 1} keys written so far a listing shows {len(seen)}"
                return Row("", False, found, _CACHED)
        if self._mailbox.list(prefix, after=keys[1], limit=2) != keys[2:4]:
            found = "a listing after a key, of two keys, gives others"
            return Row("", False, found, "use a server that honours StartAfter and MaxKeys")
        return Row("", True, f"{LISTED} of {LISTED} keys, sorted; a part of them when asked for")

    def _overwrites(self) -> Row:
        key = self._key("overwrite")
        for _ in range(LISTED):
            body = os.urandom(16)
            self._put(key, body)
            if self._mailbox.get(key) != body:
                return Row("", False, "something else was read than had just been written over it", _CACHED)
        return Row("", True, f"{LISTED} times, and the newest is read")

    def _deletes(self) -> Row:
        key = self._key("delete")
        self._mailbox.put_if_absent(key, b"1")
        self._mailbox.delete([key, self._key("absent")])
        if self._mailbox.get(key) is not None:
            return Row("", False, "a deleted key is still read", _CACHED)
        return Row("", True, "a deleted key is gone")

    # -- latency -----------------------------------------------------------------------------------------------

    def _time_each_verb(self, calls: int) -> None:
        keys = [self._key(f"time/{number}") for number in range(calls)]
        verbs: dict[str, Callable[[str], object]] = {
            "create": lambda key: self._mailbox.put_if_absent(key, b"1"),
            "overwrite": lambda key: self._put(key, b"2"),
            "read": self._mailbox.get,
            "list": lambda key: self._mailbox.list(key, limit=1),
            "delete": lambda key: self._mailbox.delete([key]),
        }
        for verb, call in verbs.items():
            if verb in self._useless:
                continue
            seconds: list[float] = []
            with suppress(MailboxError):
                for key in keys:
                    started = time.monotonic()
                    call(key)
                    seconds.append(time.monotonic() - started)
                    if sum(seconds) > TIMING:
                        break
            if seconds:
                latency = Latency(verb, tuple(sorted(seconds)))
                self._findings.latencies.append(latency)
                self._add(Row(f"latency: {verb}", None, _shown(latency)))

    def _put(self, key: str, body: bytes) -> None:
        """Overwrite, and again where the answer was lost: a `put` is sent once, and a learner writes its next log."""
        for _ in range(_PUTS - 1):
            with suppress(MailboxUnavailableError):
                return self._mailbox.put(key, body)
        return self._mailbox.put(key, body)

    def _key(self, name: str) -> str:
        return f"{self._prefix}{name}"

    def _add(self, row: Row) -> None:
        self._findings.rows.append(row)


def _tidied(left: list[str]) -> Row:
    if not left:
        return Row("cleans up", True, "nothing of this examination is left")
    found = f"{len(left)} keys could not be removed; they start with {left[0].partition('/')[0]}/"
    return Row("cleans up", False, found, "remove them by other means")


def _failed(check: str, error: MailboxError) -> Row:
    found, remedy = _parts(error)
    return Row(check, False, found, _GONE if isinstance(error, MailboxUnavailableError) else remedy)


def _parts(error: MailboxError) -> tuple[str, str]:
    """What happened and what to do; an error's message ends with the latter."""
    said, _, remedy = str(error).rpartition("; ")
    return (said, remedy) if said else (remedy, "")


def _shown(latency: Latency) -> str:
    p50, p99 = (_milliseconds(latency.quantile(share)) for share in (0.5, 0.99))
    return f"p50 {p50}, p99 {p99} ({len(latency.seconds)} calls)"


def _milliseconds(seconds: float) -> str:
    if seconds < 1e-4:
        return "under 0.1 ms"
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"
