"""Whose an object is: a run's, or somebody else's that lies where a run's could.

A name alone decides for manifests and what lies under `learners/`, which nobody else writes. A file under `units/`
may be the user's, so a claim or a give-back record counts as the run's only if its identifier is in the plan the
manifest tells, or, where it cannot tell (the identifiers of a listed plan are not in it), if it reads as
such a record. What lies under the prefix of another mailbox, which a manifest of its own shows, is not of this one.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from shardqueue.errors import InvalidInputError, RecordError
from shardqueue.plan import check_identifier
from shardqueue.records import PROTOCOL, RUNS, BackRecord, ClaimRecord, Manifest, RunKeys
from shardqueue.units import rebuild

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from shardqueue.mailbox import Mailbox

READERS = 8
_PASS = re.compile(r"e[1-9][0-9]*|(val|test|predict)(0|[1-9][0-9]*)")
_ANOTHER = re.compile(rf"(.+/){RUNS}[^/]+\.json")
_RECORDS: dict[str, type[ClaimRecord] | type[BackRecord]] = {"claim": ClaimRecord, "back": BackRecord}


def read_manifest(body: bytes | None) -> Manifest | None:
    """A manifest of this version of the protocol, or None."""
    try:
        manifest = None if body is None else Manifest.decode(body, "manifest")
    except RecordError:
        return None
    return manifest if manifest is not None and manifest.protocol == PROTOCOL else None


def others(keys: Iterable[str]) -> tuple[str, ...]:
    """The prefixes, each with a slash at its end, of other mailboxes that lie within this one."""
    return tuple({found[1] for found in map(_ANOTHER.fullmatch, keys) if found is not None})


def place(key: str) -> tuple[str, str] | None:
    """The run a key may be of and its kind, or None if of none.

    Kinds are "manifest", "log", "grade", "whole", "claim" and "back".
    """
    if key.startswith(RUNS):
        name = key.removeprefix(RUNS).removesuffix(".json")
        return (name, "manifest") if key == RunKeys(name).manifest and _is_name(name) else None
    head = key.partition("/")[0]
    name = head.removeprefix("run-") if head.startswith("run-") else "1"
    keys = RunKeys(name)
    if not _is_name(name) or not key.startswith(keys.folder):
        return None
    log, grade, whole = keys.parse_log(key), keys.parse_grade(key), keys.parse_whole(key)
    if log is not None:
        return (name, "log") if all(map(_is_name, log[:3])) else None
    if grade is not None:
        return (name, "grade") if all(map(_is_name, grade[:2])) else None
    if whole is not None:
        return (name, "whole") if all(map(_is_name, whole[:2])) else None
    unit = _unit(keys, key)
    return None if unit is None else (name, unit[0])


class Ownership:
    """What is a run's, by its manifest and by what lies there.

    Args:
        mailbox: where it lies.
        run: its name.
        manifest: what its manifest holds, None when there is none.
        elsewhere: prefixes of other mailboxes within this one.
    """

    def __init__(
        self, mailbox: Mailbox, run: str, manifest: bytes | None, elsewhere: tuple[str, ...]
    ) -> None:
        self._mailbox, self._run, self._elsewhere = mailbox, run, elsewhere
        read = read_manifest(manifest)
        self._plans = [] if read is None else _plans(read)

    def of(self, keys: Iterable[str]) -> dict[str, str]:
        """Those of `keys` that are the run's, and the kind of each, in their order.

        Raises:
            MailboxError: what had to be read could not be.
        """
        kinds = {}
        for key in keys:
            found = None if key.startswith(self._elsewhere) else place(key)
            if found is not None and found[0] == self._run:
                kinds[key] = found[1]
        doubtful = [key for key, kind in kinds.items() if kind in _RECORDS and not self._is_planned(key)]
        with ThreadPoolExecutor(READERS, thread_name_prefix="shardqueue-clean") as readers:
            strange = list(readers.map(partial(self._is_strange, kinds), doubtful))
        foreign = {key for key, is_strange in zip(doubtful, strange, strict=True) if is_strange}
        return {key: kind for key, kind in kinds.items() if key not in foreign}

    def _is_planned(self, key: str) -> bool:
        unit = _unit(RunKeys(self._run), key)
        return unit is not None and any(unit[1] in plan for plan in self._plans)

    def _is_strange(self, kinds: dict[str, str], key: str) -> bool:
        body = self._mailbox.get(key)
        try:
            if body is not None:
                _RECORDS[kinds[key]].decode(body, key)
        except RecordError:
            return True
        return False


def _unit(keys: RunKeys, key: str) -> tuple[str, str] | None:
    """The kind and the identifier of a claim or a give-back record."""
    first = key.removeprefix(keys.folder).partition("/")[0]
    pass_ = keys.pass_keys(first if _PASS.fullmatch(first) else "")
    for kind, parsed in (("claim", pass_.parse_claim(key)), ("back", pass_.parse_back(key))):
        if parsed is not None and _is_name(parsed[0], folders=True):
            return kind, parsed[0]
    return None


def _plans(manifest: Manifest) -> list[Mapping[str, object]]:
    """The plans whose identifiers follow from their arguments."""
    found: list[Mapping[str, object]] = []
    for signature in manifest.plans.values():
        arguments = signature.get("arguments")
        try:
            if isinstance(arguments, dict):
                found.append(rebuild(arguments))
        except InvalidInputError:
            continue
    return found


def _is_name(text: str, folders: bool = False) -> bool:
    try:
        check_identifier(text, folders=folders)
    except InvalidInputError:
        return False
    return True
