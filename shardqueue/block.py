"""What a training process and its loader workers share: a few words of memory, and a pipe.

Words go both ways. They are 64 bits each, written whole by one process and read by the others, without a lock: a
worker may be killed at any moment and must leave none behind. Whatever two processes might write at once, they
compute from the same values and so write alike.

An *iteration* is one trip of one loader over the dataset, named by a word: the number of the pass and a key that all
workers of the iteration know and no other iteration has. A new iteration takes over by becoming the current one.

The pipe goes from the workers to the training process. A message is shorter than what a pipe takes whole, so several
workers write to one pipe without a lock. Nothing here ever waits.
"""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from dataclasses import astuple, dataclass
from enum import IntEnum
from hashlib import blake2b
from typing import TYPE_CHECKING

from shardqueue.allowance import UNLIMITED, Allowance

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

WORKERS = 256
"""Workers a loader may have."""
_KEY_BITS = 40
_RING = 64
_HEAD = 14
_BEGUN = _HEAD
_FINISHED = _BEGUN + _RING
_SLOTS = _FINISHED + _RING
_SLOT = 6
WORDS = _SLOTS + _SLOT * WORKERS
"""Words of a block."""
(
    *(_OWNER, _INSTANCE, _EPOCH, _RUN, _TRACKED, _LEFT, _CURRENT, _BEGINS, _FINISHES, _SINCE, _EACH, _FRESH),
    _ALLOWED,
    _LANDED,
) = range(_HEAD)
_MESSAGE = struct.Struct("<6q")


class Doing(IntEnum):
    """What a worker does in the iteration it last took part in."""

    NOTHING = 0
    CLAIMING = 1
    ENDED = 2
    """Nothing was left to claim."""
    YIELDED = 3
    """The first worker claims the last units."""
    STOPPED = 4
    DONE = 5
    """It has handed out everything it claimed, and ended."""


def iteration_key(*parts: object) -> int:
    """Return the key of an iteration: the same for the same parts."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=5).digest())


def iteration_word(pass_: int, key: int) -> int:
    """Return the word that names an iteration."""
    return (pass_ + 1) << _KEY_BITS | key


def pass_of(word: int) -> int:
    """Return the number of the pass of an iteration, from 0; -1 for no iteration."""
    return (word >> _KEY_BITS) - 1


def key_of(word: int) -> int:
    """Return the key of an iteration."""
    return word & ((1 << _KEY_BITS) - 1)


class Block:
    """The shared words.

    Args:
        words: shared memory of `WORDS` 64-bit integers, all zero at first.
    """

    def __init__(self, words: memoryview) -> None:
        self._words = words

    def own(self, instance: str) -> None:
        """This process is the training process; `instance` is the learner's."""
        self._words[_OWNER] = os.getpid()
        self._words[_EPOCH] = -1
        self.name(instance)

    def name(self, instance: str) -> None:
        """The learner's instance from now on."""
        self._words[_INSTANCE] = int(instance, 16)

    @property
    def owner(self) -> int:
        """Process id of the training process; 0 while there is none."""
        return self._words[_OWNER]

    @property
    def instance(self) -> str:
        """The learner's instance."""
        return f"{self._words[_INSTANCE]:012x}"

    @property
    def epoch(self) -> int | None:
        """The epoch that was set, None if none ever was."""
        epoch = self._words[_EPOCH]
        return None if epoch < 0 else epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._words[_EPOCH] = epoch

    @property
    def run(self) -> str | None:
        """The run by number that this learner is in, None while that is not known."""
        return str(self._words[_RUN]) if self._words[_RUN] else None

    @run.setter
    def run(self, run: str) -> None:
        if run.isdecimal():
            self._words[_RUN] = int(run)

    # -- iterations --------------------------------------------------------------------------------------

    @property
    def current(self) -> int:
        """The iteration that goes on, or went on last."""
        return self._words[_CURRENT]

    def next_word(self, key: int) -> int:
        """The word of the iteration that would begin now."""
        return self._after(self._words[_CURRENT], key)

    def _after(self, current: int, key: int) -> int:
        epoch = self.epoch
        return iteration_word(pass_of(current) + 1 if epoch is None else epoch, key)

    def expect(self, word: int, fresh: bool) -> None:
        """The workers that begin next take part in this iteration, which `Session.track` makes.

        `fresh`: nothing was claimed when the training process looked.
        """
        self._words[_FRESH] = fresh
        self._words[_TRACKED] = word

    @property
    def fresh(self) -> bool:
        """Whether nothing was claimed when the tracked iteration was made."""
        return bool(self._words[_FRESH])

    def start_at(self, pass_: int) -> None:
        """Passes are counted anew, from this one; those before are forgotten, and the run they were in."""
        self._words[_CURRENT] = iteration_word(pass_ - 1, 0) if pass_ else 0
        self._words[_FINISHES] = self._words[_RUN] = 0

    def leave(self, word: int) -> None:
        """The loop of a tracked iteration was left: its workers are to stop, late ones not to begin."""
        self._words[_LEFT] = word

    def is_over(self, word: int) -> bool:
        """Whether an iteration was left, or another one took over."""
        return self._words[_LEFT] == word or self._words[_CURRENT] != word

    def was_left(self, word: int) -> bool:
        """Whether the loop of this tracked iteration was left."""
        return self._words[_LEFT] == word

    def begin(self, word: int) -> None:
        """This iteration goes on from now, and no other."""
        if self._words[_CURRENT] != word:
            self._keep(_BEGUN, _BEGINS, word)
            self._words[_CURRENT] = word

    def join(self, worker: int, key: int) -> tuple[int, bool]:
        """A worker takes part in an iteration; return the word and whether it is tracked.

        `key` is the same for all workers of the iteration. The first of them finds another iteration's word, or that
        it took part in this one before, and makes the next; the others find its key. A worker that comes when its
        iteration is over already (it was slow to start) gets the word of that one, and takes nothing over.
        """
        slot = self._slot(worker)
        tracked, current, mine = self._words[_TRACKED], self._words[_CURRENT], self._words[slot]
        followed = bool(tracked) and mine != tracked
        missed = 0 if followed else self._missed(key, mine)
        if missed:
            return missed, False
        shared = key_of(current) == key and mine != current
        # From `current` as it was read once: read again, it may be what a sibling has just made of it.
        word = tracked if followed else current if shared else self._after(current, key)
        self._words[slot + 1] = os.getpid()
        self._words[slot + 2] = Doing.CLAIMING
        self._words[slot + 4] = 0
        self._words[slot] = word
        self.begin(word)
        return word, followed

    def _missed(self, key: int, mine: int) -> int:
        """The iteration of this key, if another has taken over since, and the worker took part in none of the two."""
        begun = self._kept(_BEGUN, _BEGINS)
        for word in reversed(begun[:-1]):
            if word == mine:
                break
            if key_of(word) == key and begun[-1] not in (mine, word):
                return word
        return 0

    def finish(self, word: int) -> None:
        """This iteration came to the end of its pass."""
        if word not in self._kept(_FINISHED, _FINISHES):
            self._keep(_FINISHED, _FINISHES, word)

    def finished_before(self, word: int) -> bool:
        """Whether another iteration has come to the end of the same pass; of the last 64 finished ones."""
        return any(
            pass_of(other) == pass_of(word) and other != word for other in self._kept(_FINISHED, _FINISHES)
        )

    def _keep(self, ring: int, counter: int, word: int) -> None:
        number = self._words[counter]
        self._words[ring + number % _RING] = word
        self._words[counter] = number + 1

    def _kept(self, ring: int, counter: int) -> list[int]:
        """The latest words of a ring, oldest first."""
        number = self._words[counter]
        return [self._words[ring + at % _RING] for at in range(max(0, number - _RING), number)]

    # -- workers -----------------------------------------------------------------------------------------

    def note(self, worker: int, word: int, doing: Doing) -> None:
        """Say what a worker does in an iteration, unless its place was taken by one of another iteration."""
        if self._words[self._slot(worker)] == word:
            self._words[self._slot(worker) + 2] = doing

    def workers(self, word: int) -> list[tuple[int, int, Doing]]:
        """(worker, process id, what it does) of all that took part in an iteration last."""
        found = []
        for worker in range(WORKERS):
            slot = self._slot(worker)
            if self._words[slot] == word:
                found.append((worker, self._words[slot + 1], Doing(self._words[slot + 2])))
        return found

    # -- how fast the loop is ----------------------------------------------------------------------------

    def took(self, worker: int, now: float, each: float | None) -> None:
        """The loop took a batch of this worker; it needs `each` seconds for one, None while that is not known.

        What was known of an earlier loop counts until then: a worker that was told how far ahead it is, and then
        nothing more, would wait for the loop for ever.
        """
        self._words[self._slot(worker) + 4] += 1
        self._words[_SINCE] = int(now * 1e9)
        if each is not None:
            self._words[_EACH] = max(1, int(each * 1e9))

    def taken(self, worker: int) -> tuple[int, float, float] | None:
        """(batches of this worker the loop took, when it took its last of all, seconds a batch), None at first."""
        each = self._words[_EACH]
        taken = self._words[self._slot(worker) + 4]
        return (taken, self._words[_SINCE] / 1e9, each / 1e9) if each else None

    # -- how much may be taken ---------------------------------------------------------------------------

    @property
    def allowance(self) -> Allowance:
        """What all workers together may take of the pass."""
        word = self._words[_ALLOWED]
        return Allowance((word >> 2) - 1, bool(word & 2), bool(word & 1)) if word else UNLIMITED

    @allowance.setter
    def allowance(self, allowance: Allowance) -> None:
        batches = allowance.batches
        word = 0 if batches is None else (batches + 1) << 2 | allowance.final << 1 | allowance.cut
        self._words[_ALLOWED] = word

    def promise(self, worker: int, batches: int) -> None:
        """A worker that claims no more says how many batches it took."""
        self._words[self._slot(worker) + 5] = batches

    def allowed(self, word: int, worker: int, workers: int) -> Allowance:
        """What a worker may take of an iteration: its share; the first one also what others left of theirs."""
        allowance = self.allowance
        if allowance.batches is None:
            return allowance
        if not allowance.final:  # one is enough to begin with, and the loader asks the first one first
            return Allowance(0, final=self._is_quiet(word, 0)) if worker else allowance
        own = allowance.part(worker, workers)
        if worker:
            return own
        taken = sum(
            self._taken_of(word, other, allowance.part(other, workers)) for other in range(1, workers)
        )
        return Allowance(allowance.batches - taken, allowance.final, allowance.cut)

    def _taken_of(self, word: int, worker: int, share: Allowance) -> int:
        """What another worker took, or may still take."""
        assert share.batches is not None
        return self._words[self._slot(worker) + 5] if self._is_quiet(word, worker) else share.batches

    def _is_quiet(self, word: int, worker: int) -> bool:
        """Whether a worker took part in an iteration, and claims no more."""
        slot = self._slot(worker)
        return self._words[slot] == word and self._words[slot + 2] != Doing.CLAIMING

    # -- logs --------------------------------------------------------------------------------------------

    @property
    def landed(self) -> float | None:
        """Until when, by the machine's clock, the learner's log is known to be in the mailbox; None: unasked."""
        return self._words[_LANDED] / 1e9 or None

    @landed.setter
    def landed(self, seconds: float | None) -> None:
        self._words[_LANDED] = 0 if seconds is None else max(1, int(seconds * 1e9))

    def page(self, worker: int) -> int:
        """The page on which the log of the next process with this worker's number begins."""
        return self._words[self._slot(worker) + 3]

    def turn_to(self, worker: int, page: int) -> None:
        """Pages before `page` of this worker's log are written."""
        self._words[self._slot(worker) + 3] = page

    @staticmethod
    def _slot(worker: int) -> int:
        return _SLOTS + _SLOT * worker


class Told(IntEnum):
    """What a message tells of a claim."""

    ASKED = 1
    """It is about to be asked for; `value` is the batch at which it would begin."""
    LOST = 2
    """It is somebody else's."""
    CLAIMED = 3
    """It is proven; `value` is the batch at which it begins."""
    SIZED = 4
    """`value` is the number of its batches."""
    CUT = 5
    """It ends before its unit does, at batch `value`."""
    GIVEN = 6
    """What is behind that end can be taken by others."""


@dataclass(frozen=True, slots=True)
class Message:
    """One event of a claim, from the worker that made it."""

    worker: int
    word: int
    told: Told
    position: int
    attempt: int
    value: int


class Pipe:
    """Many write, one reads, nobody waits.

    Args:
        reader, writer: the two ends of a one-way pipe.
    """

    def __init__(self, reader: Connection, writer: Connection) -> None:
        self._reader, self._writer = reader, writer
        for end in (reader, writer):
            os.set_blocking(end.fileno(), False)

    def send(self, message: Message) -> bool:
        """Send a message; False when there is no room now."""
        data = _MESSAGE.pack(*astuple(message))
        with suppress(BrokenPipeError):
            try:
                os.write(self._writer.fileno(), data)
            except BlockingIOError:
                return False
        return True

    def receive(self) -> list[Message]:
        """Take all messages that are there."""
        found: list[Message] = []
        with suppress(BlockingIOError):
            while data := os.read(self._reader.fileno(), 1000 * _MESSAGE.size):
                for worker, word, told, *rest in _MESSAGE.iter_unpack(data):
                    found.append(Message(worker, word, Told(told), *rest))
        return found
