"""The sessions that are entered in this process, so that a queue or dataset finds the one of its learner."""

from __future__ import annotations

import os
import threading
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING

from shardqueue.errors import ShardQueueWarning

if TYPE_CHECKING:
    from shardqueue.session import Session


class Entered:
    """The sessions entered in this process, by label."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: list[Session] = []

    def add(self, session: Session) -> None:
        """A session is entered."""
        with self._lock:
            self._sessions.append(session)

    def remove(self, session: Session) -> None:
        """It is left."""
        with self._lock, suppress(ValueError):
            self._sessions.remove(session)

    def find(self, learner_id: str, own: bool) -> Session | None:
        """The latest session of that label: the user's, or (`own`) one a feed made for itself."""
        with self._lock:
            for session in reversed(self._sessions):
                mine = session.pid == os.getpid() and session.learner_id == learner_id
                if mine and session.own is own:
                    return session
        return None

    def here(self) -> Session | None:
        """The latest session that the user entered in this thread."""
        with self._lock:
            for session in reversed(self._sessions):
                mine = session.pid == os.getpid() and session.thread == threading.get_ident()
                if mine and not session.own:
                    return session
        return None


ENTERED = Entered()
find_session = ENTERED.find


def warn_of_another_session(learner: str) -> None:
    """Say that the session entered in this thread is not the one of the queue that begins."""
    other = ENTERED.here()
    if other is not None and other.learner_id != learner:
        warnings.warn(
            f"the entered session is of learner id {other.learner_id!r}, the queue of {learner!r}: the session will "
            "know nothing of its batches, step() and a state it loaded decide nothing; give both one learner_id",
            ShardQueueWarning,
            stacklevel=5,
        )
