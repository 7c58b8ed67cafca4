"""Clients of stores are left alone by forked children, and when the program ends.

The connections of a client are shared with every child forked after their making, and so is the poll object that the
parent's event loop waits on. A child that closes one at its exit (by a finaliser, or because Python takes everything
down) unregisters it for the parent too, whose next request then waits in vain for its answer; on TLS it even says
goodbye in the parent's name. And a program that ends while daemon threads still claim closes the connections under
them, which prints tracebacks.

So in both cases the finalisers of these clients are dropped, and each gets a reference that nobody takes back. The
system closes its sockets when the process is gone.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import weakref
from typing import Any

_clients: weakref.WeakSet[Any] = weakref.WeakSet()


def leave_open(client: object) -> None:
    """See that `client` is never closed by a process forked from this one, nor by the end of the program."""
    _clients.add(client)


def _forsake() -> None:
    registered: Any = getattr(weakref.finalize, "_registry", {})
    for client in list(_clients):
        for finalizer in list(registered):
            watched = finalizer.peek()
            if watched and watched[0] is client:
                finalizer.detach()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))
    _clients.clear()


os.register_at_fork(after_in_child=_forsake)
# The first finaliser of a process registers the hook that runs them all; what is registered later runs earlier.
weakref.finalize(_forsake, bool)
atexit.register(_forsake)
