"""shardqueue: every training process claims the next piece of the dataset from a bucket or a folder.

    from shardqueue import Session, shared_queue, unit_grid

The names below are the public surface. Each is imported on first use, so that `import shardqueue` stays cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardqueue.channel import Channel, ChannelReport, Receiver, Sender
    from shardqueue.dataset import SharedQueueDataset
    from shardqueue.mailbox import Mailbox, open_mailbox
    from shardqueue.queues import SharedQueue, shared_queue
    from shardqueue.session import Session
    from shardqueue.throughput import Rates
    from shardqueue.units import Step, Unit, unit_files, unit_grid, unit_ranges

__version__ = "0.1.0"

__all__ = [
    "Channel",
    "ChannelReport",
    "Mailbox",
    "Rates",
    "Receiver",
    "Sender",
    "Session",
    "SharedQueue",
    "SharedQueueDataset",
    "Step",
    "Unit",
    "open_mailbox",
    "shared_queue",
    "unit_files",
    "unit_grid",
    "unit_ranges",
]

_HOMES = {
    "Channel": "channel",
    "ChannelReport": "channel",
    "Mailbox": "mailbox",
    "Rates": "throughput",
    "Receiver": "channel",
    "Sender": "channel",
    "Session": "session",
    "SharedQueue": "queues",
    "SharedQueueDataset": "dataset",
    "Step": "units",
    "Unit": "units",
    "open_mailbox": "mailbox",
    "shared_queue": "queues",
    "unit_files": "units",
    "unit_grid": "units",
    "unit_ranges": "units",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'shardqueue' has no attribute {name!r}")
    value = getattr(import_module(f"shardqueue.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
