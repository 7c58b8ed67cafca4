"""Calls that are to be made, are under way, or wait to be repeated.

The protocol's machines say what they want to know (`ask`) and what to do with the answer; whoever runs them
takes the calls from `poll`, makes them, and reports `answered` or `failed`. A call whose outcome is unknown is
repeated unchanged, after a pause with jitter, until the mailbox has been silent for `patience` seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardqueue.errors import MailboxUnavailableError, ShardQueueError
from shardqueue.mailbox.calls import Get

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from shardqueue.mailbox.calls import Answer, Call

PATIENCE = 300.0
"""Seconds without any answer from the mailbox before a machine gives up."""
PAUSE, LONGEST_PAUSE = 0.2, 5.0
SLOWLY = 1.02
"""How fast a past minimum is forgotten, per call."""
LONGEST_SILENCE = 90.0
"""Seconds between two failed calls that count as the mailbox's silence, at most."""


@dataclass(slots=True, eq=False)
class Ask:
    """A call to make, and what to do with its answer: `then(answer, now)`.

    `asked` is when it was last handed to be made.
    """

    call: Call
    then: Callable[[Answer, float], None]
    asked: float = 0.0
    failures: int = 0


class Asks:
    """The calls of one machine. `error` is set when it cannot go on; then nothing more is handed out.

    `quickest`: seconds of the quickest call of late, which is what the way to the mailbox costs any of them.
    """

    __slots__ = (
        "_last_failure",
        "_later",
        "_patience",
        "_random",
        "_ready",
        "_silent",
        "error",
        "in_flight",
        "last_error",
        "quickest",
    )

    def __init__(self, random: Random, patience: float = PATIENCE) -> None:
        self.error: Exception | None = None
        self.in_flight = 0
        self.last_error: Exception | None = None
        self.quickest = float("inf")
        self._random, self._patience = random, patience
        self._ready: list[Ask] = []
        self._later: list[tuple[float, Ask]] = []
        self._last_failure: float | None = None
        self._silent = 0.0

    @property
    def idle(self) -> bool:
        """Whether nothing is under way, waiting to be repeated or about to be made."""
        return not (self.in_flight or self._ready or self._later)

    @property
    def patience(self) -> float:
        """Seconds of silence after which `error` is set."""
        return self._patience

    @property
    def silent(self) -> float:
        """Seconds for which no call was answered; 0 once one was."""
        return self._silent

    def ask(self, call: Call, then: Callable[[Answer, float], None]) -> None:
        """Have `call` made."""
        self._ready.append(Ask(call, then))

    def ask_at(self, when: float, call: Call, then: Callable[[Answer, float], None]) -> None:
        """Have `call` made once `when` has come."""
        self._later.append((when, Ask(call, then)))

    def forget(self) -> list[Call]:
        """Drop, and return, what has not been handed out yet; readings, and what is repeated, are still made."""
        dropped: list[Call] = [ask.call for ask in self._ready if not isinstance(ask.call, Get)]
        self._ready = [ask for ask in self._ready if isinstance(ask.call, Get)]
        return dropped

    def poll(self, now: float) -> list[Ask]:
        """Return the calls to make now."""
        if self.error is not None:
            return []
        asks, self._ready = self._ready, []
        if self._later:
            asks += [ask for at, ask in self._later if at <= now]
            self._later = [(at, ask) for at, ask in self._later if at > now]
        for ask in asks:
            ask.asked = now
        self.in_flight += len(asks)
        return asks

    def wake(self) -> float | None:
        """When a repeated call is due."""
        return min((at for at, _ in self._later), default=None) if self._later else None

    def answered(self, ask: Ask, answer: Answer, now: float) -> None:
        """The call returned `answer`."""
        self.in_flight -= 1
        self._last_failure, self._silent = None, 0.0
        self.quickest = min(now - ask.asked, SLOWLY * self.quickest)
        try:
            ask.then(answer, now)
        except ShardQueueError as error:
            self.fail(error)

    def failed(self, ask: Ask, error: Exception, now: float) -> None:
        """The call raised `error`."""
        self.in_flight -= 1
        if not isinstance(error, MailboxUnavailableError):
            self.fail(error)
            return
        if self._last_failure is not None:
            # A suspended process must not take its own absence for the mailbox's.
            self._silent += min(now - self._last_failure, LONGEST_SILENCE)
        self._last_failure = now
        self.last_error = error
        if self._silent > self._patience:
            bound = f"the mailbox has not answered for {self._silent:.0f} s (at most {self._patience:.0f} s)"
            self.fail(MailboxUnavailableError(f"{bound}; last: {error}"))
            return
        ask.failures += 1
        pause = min(LONGEST_PAUSE, PAUSE * 2.0 ** (ask.failures - 1)) * (0.5 + self._random.random())
        self._later.append((now + pause, ask))

    def fail(self, error: Exception) -> None:
        """Stop here; the first error is kept."""
        self.error = self.error or error
