"""Which runs are at a prefix, which of them is meant, and what is there where there is none.

Whatever is under the prefix and is not ours is an error that says what it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardqueue.callers import Callers
from shardqueue.clean.ownership import others, place
from shardqueue.errors import InvalidInputError, RecordError, RunError
from shardqueue.logreader import READERS
from shardqueue.records import PROTOCOL, RUNS, Manifest, RunKeys
from shardqueue.run import is_number

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from shardqueue.mailbox import Mailbox

_STRANGERS, _NAMED = 1000, 3


class Runs:
    """The runs at a prefix, looked at again and again.

    Args:
        mailbox: where they lie.

    Attributes:
        manifests: those that can be read, by the run's name.
        strange: what is wrong with each manifest that cannot be read.
    """

    def __init__(self, mailbox: Mailbox) -> None:
        self.manifests: dict[str, Manifest] = {}
        self.strange: dict[str, str] = {}
        self._mailbox = mailbox

    @property
    def newest_first(self) -> list[str]:
        """The names of those that can be read, by when they were opened.

        Numbered runs follow one another, whatever the clocks of those who opened them said.
        """
        number = {name: int(name) if is_number(name) else 0 for name in self.manifests}
        opened, latest = {}, 0.0
        for name in sorted(self.manifests, key=number.__getitem__):
            wall = self.manifests[name].wall
            latest = max(latest, wall) if number[name] else latest
            opened[name] = latest if number[name] else wall
        return sorted(opened, key=lambda name: (opened[name], number[name], name), reverse=True)

    @property
    def cut_off(self) -> str:
        """What is wrong with the last numbered run, where that cannot be read; else empty."""
        numbered = [name for name in (*self.manifests, *self.strange) if is_number(name)]
        return self.strange.get(max(numbered, key=int, default=""), "")

    def choose(self, wanted: str | None) -> str | None:
        """Look, and return the run that is `wanted`, or the one opened last; None for nothing at all.

        Raises:
            InvalidInputError: there is no run of the name that was asked for.
            RunError: there is something, and no run.
            RecordError: what should be a manifest is none, or is one of another version of the protocol.
            MailboxError: the mailbox cannot be read, or did not answer.
        """
        names = [name for key in self._mailbox.list(RUNS) if (name := _run(key)) is not None]
        self._read_manifests(names)
        if wanted is not None and wanted not in names:
            bound = f"a run under this prefix ({', '.join(sorted(names)) or 'there is none'})"
            raise InvalidInputError("run", wanted, bound, "name one of them, or none")
        if not names:
            self._say_what_is_there()
            return None
        chosen = wanted or next(iter(self.newest_first), names[0])
        if chosen in self.strange:
            raise RecordError(self.strange[chosen])
        return chosen

    def _read_manifests(self, names: Collection[str]) -> None:
        """Those that are not known yet; a manifest does not change."""
        for gone in self.manifests.keys() - names:
            del self.manifests[gone]
        new = [name for name in names if name not in self.manifests]
        with Callers(READERS, "shardqueue-status") as pool:
            readings = [pool.submit(self._mailbox.get, RunKeys(name).manifest) for name in new]
            bodies = [reading.result() for reading in readings]
        self.strange = {}
        for name, body in zip(new, bodies, strict=True):
            if body is None:  # listed, and gone: somebody cleans this prefix
                continue
            key = RunKeys(name).manifest
            try:
                manifest = Manifest.decode(body, key)
            except RecordError as error:
                self.strange[name] = str(error)
                continue
            if manifest.protocol == PROTOCOL:
                self.manifests[name] = manifest
            else:
                self.strange[name] = (
                    f"{key} speaks protocol {manifest.protocol}, this version {PROTOCOL}; look at it with the "
                    "version of shardqueue that opened it"
                )

    def _say_what_is_there(self) -> None:
        """Raise if anything is."""
        keys = self._mailbox.list("", "", _STRANGERS)
        if not keys:
            return
        within = sorted(others(keys))
        if within:
            raise RunError(
                f"no run is here, but a mailbox within it, at {_few(within)}; add that to the URL after a slash"
            )
        ours = [key for key in keys if place(key) is not None]
        if not ours:
            raise RunError(
                f"no run is here, and what is here is not ours ({_few(keys)}); give the prefix that the learners have"
            )
        if not any(map(_run, self._mailbox.list(RUNS))):  # else it was opened just now
            raise RunError(
                f"no run is here, but what reads like one without its manifest ({_few(ours)}): that was removed, or "
                "this is not ours; `shardqueue clean` says more"
            )


def _run(key: str) -> str | None:
    """The run whose manifest a key is, or None."""
    found = place(key)
    return found[0] if found is not None and found[1] == "manifest" else None


def _few(keys: Iterable[str]) -> str:
    first, *rest = list(keys)[: _NAMED + 1]
    more = ", ..." if len(rest) == _NAMED else ""
    return f"{', '.join(repr(key) for key in (first, *rest[: _NAMED - 1]))}{more}"
