"""What a forked child does with the channel sockets it inherits: it closes all but those that were passed to it.

A copy in a process that does not use it would hide the death of the one that does. Under fork nothing says which ends
a child was meant to have, so the rule is that of spawn: an end belongs to the processes it was passed to, in the
arguments of `Process` or in its attributes.
"""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.util
import os
import threading
import types
import weakref
from typing import Any, Protocol

_LOOKED_AT = 200_000
"""Objects among a process's arguments that are searched for ends; beyond, it keeps what it has not looked at."""
_OPAQUE = (type, types.ModuleType, types.FrameType, types.CodeType, str, bytes, int, float)


class Inherited(Protocol):
    """Something that only one process may use."""

    def forked(self) -> None:
        """This is the child of a fork: close what only the parent may use."""
        ...


class Passable(Inherited, Protocol):
    """An end of a channel."""

    def passed(self) -> None:
        """It was passed to this process."""
        ...

    def not_passed(self) -> None:
        """It was not."""
        ...


class Making(Inherited, Protocol):
    """What made ends, and follows where they go."""

    def expect(self, child: int) -> None:
        """A child is being forked; this descriptor, now the callee's, is at its end when it has its ends."""
        ...


ends: weakref.WeakSet[Any] = weakref.WeakSet()
"""Every end of this process, each `Passable`."""
brokers: weakref.WeakSet[Any] = weakref.WeakSet()
"""Every broker of this process, each `Making`."""
hubs: weakref.WeakSet[Any] = weakref.WeakSet()
"""Whatever else is of no use in a child, each `Inherited`."""


class _Fork:
    """A fork, and the making of sockets: one at a time, so that no child has a socket that is in nobody's list.

    Between a fork and the moment the child has taken its ends nobody can say whose they are. A pipe tells: its other
    side is the child's alone, which closes it then, or dies.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._theirs: int | None = None

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def before(self) -> None:
        """Tell the brokers, before anything can come from the child."""
        self._lock.acquire()
        self._theirs = None
        if brokers:
            ours, self._theirs = os.pipe()
            for broker in list(brokers):
                broker.expect(os.dup(ours))
            os.close(ours)

    def in_parent(self) -> None:
        """The other side of the pipe is the child's alone."""
        self.is_over()
        self._lock.release()

    def in_child(self) -> None:
        """Close what is the parent's."""
        self._lock = threading.RLock()
        for thing in (*brokers, *ends, *hubs):
            thing.forked()

    def is_over(self) -> None:
        """Let go of this process's copy of the pipe's other side: in the child, it has its ends."""
        if self._theirs is not None:
            os.close(self._theirs)
            self._theirs = None


making = _Fork()


class _Anchor:
    """`multiprocessing` keeps its hooks as long as their object lives."""


_anchor = _Anchor()


def _bootstrapped(_: object) -> None:
    """A child of `multiprocessing` begins: its arguments are known."""
    mine = _reachable(multiprocessing.current_process().__dict__)
    for end in list(ends):
        if mine is None or id(end) in mine:
            end.passed()
        else:
            end.not_passed()
    making.is_over()


def _reachable(start: object) -> set[int] | None:
    """Return the identities of the ends among an object's parts; None when there are too many parts to look at."""
    wanted = {id(end) for end in ends}
    found: set[int] = set()
    seen = {id(start)}
    now: list[Any] = [start]
    while now and wanted - found:
        parts: list[Any] = []
        for thing in now:
            parts.extend(_parts(thing))
        now = []
        for part in parts:
            if id(part) in seen or isinstance(part, _OPAQUE):
                continue
            seen.add(id(part))
            if id(part) in wanted:
                found.add(id(part))
            else:
                now.append(part)
        if len(seen) > _LOOKED_AT:
            return None
    return found


def _parts(thing: Any) -> list[Any]:
    if isinstance(thing, types.FunctionType):
        # Not its globals: what a module holds was not passed to anybody.
        cells = [cell.cell_contents for cell in thing.__closure__ or () if _is_filled(cell)]
        return [*cells, thing.__defaults__, thing.__kwdefaults__]
    if isinstance(thing, dict):
        # From Python 3.13 on the values of an object's attributes are the object's referents, not its dict's.
        return [*dict.values(thing), *gc.get_referents(thing)]
    return gc.get_referents(thing)


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - an empty cell raises
    except ValueError:
        return False
    return True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=making.before, after_in_parent=making.in_parent, after_in_child=making.in_child
    )
multiprocessing.util.register_after_fork(_anchor, _bootstrapped)
