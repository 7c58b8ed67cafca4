"""Takes one run away, in an order that does no harm wherever it stops.

No claim may be granted a second time to a learner that comes meanwhile. While claims go, what guards them is the
manifest, so it goes last; and since a learner that names the run joins whatever its state, the manifest is first
*closed*: overwritten by one without plans, which agrees with no learner's. From then on whoever comes gets an
error. Removing the manifest first would instead let the next learner open the run again amid the old claims, and
the removal would go on under its hands and take its new claims too. Then go claims and give-back records, then the
logs with what lies beside them, and last the pages that say "end": as long as something is there, the run reads as
finished, and nobody takes it for one that broke off and opens the next.

A learner that read the manifest just before it was closed shows by its log, which goes before its first claim:
before every batch the logs are listed, and a newcomer stops the removal. One that is held up between its reading
and its log, for as long as the removal takes, is not seen; so start none under the name of a run that is being
removed.

A removal that was stopped leaves a closed manifest, by which the next one knows that it may go on. Keys are listed
again until none is found, so a store that sorts folder by folder hides none.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from shardqueue.clean.survey import is_closed
from shardqueue.errors import RunError
from shardqueue.records import PROTOCOL, Manifest, RunKeys

if TYPE_CHECKING:
    from collections.abc import Container

    from shardqueue.clean.survey import Run
    from shardqueue.mailbox import Mailbox

BATCH = 1_000
"""Keys removed in one call: one request on every object store."""
_CLAIMS, _LEARNERS = {"claim", "back"}, {"log", "grade", "whole"}
_TURNS = 20
"""Times that everything is listed, at most."""


def remove(mailbox: Mailbox, run: Run) -> int:
    """Remove a run that was surveyed; return how many keys went.

    Raises:
        RunError: the run is not as it was seen: somebody opened or joined it, or goes on writing.
        MailboxError: the mailbox did not do as asked; clean again.
    """
    return _Removal(mailbox, run).run()


class _Removal:
    def __init__(self, mailbox: Mailbox, run: Run) -> None:
        self._mailbox, self._run, self._keys = mailbox, run, RunKeys(run.name)
        self._removed = 0

    def run(self) -> int:
        self._close()
        for _ in range(_TURNS):
            before = self._removed
            self._remove(_CLAIMS)
            self._remove(_LEARNERS, spared=self._run.ends)
            self._remove(_LEARNERS)
            if self._removed == before:
                self._mailbox.delete([self._keys.manifest])
                return self._removed + 1
        raise RunError(
            f"run {self._run.name}: {self._removed} keys were removed, and others keep appearing; end who still "
            "writes there, and clean again"
        )

    def _close(self) -> None:
        """Have no learner join any more."""
        closed = Manifest(
            protocol=PROTOCOL, run_id="closed", plans={}, opened_by="shardqueue clean", wall=0.0
        ).encode()
        if self._run.manifest is None:
            unchanged = self._mailbox.put_if_absent(self._keys.manifest, closed)
        else:
            unchanged = self._mailbox.get(self._keys.manifest) == self._run.manifest
        if not unchanged:
            raise RunError(
                f"run {self._run.name} was opened or removed while it was looked at; nothing was removed here; "
                "clean again"
            )
        if self._run.manifest is not None and not is_closed(self._run.manifest):
            self._mailbox.put(self._keys.manifest, closed)

    def _remove(self, kinds: set[str], spared: Container[str] = ()) -> None:
        prefix = self._keys.learners if kinds is _LEARNERS else self._keys.folder
        keys = iter(self._mailbox.list(prefix))
        while some := list(islice(keys, BATCH)):
            owned = self._run.ownership.of(some)
            batch = [key for key, kind in owned.items() if kind in kinds and key not in spared]
            if batch:
                self._check_newcomers()
                self._mailbox.delete(batch)
                self._removed += len(batch)

    def _check_newcomers(self) -> None:
        logs = map(self._keys.parse_log, self._mailbox.list(self._keys.learners))
        newcomers = {log[:2] for log in logs if log is not None} - self._run.learners
        if not newcomers:
            return
        who = f"run {self._run.name}: {min(newcomers)[0]!r} joined it while it was being removed"
        if not self._removed and self._run.manifest is not None:
            self._mailbox.put(self._keys.manifest, self._run.manifest)
            raise RunError(f"{who}; nothing was removed; end it, and clean again")
        raise RunError(f"{who}, and {self._removed} keys are gone; end it, and clean again")
