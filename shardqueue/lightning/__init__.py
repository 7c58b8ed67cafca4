"""The shared queue under a Lightning Trainer: its data and a callback."""

from __future__ import annotations

from shardqueue.lightning.callback import SharedQueueCallback
from shardqueue.lightning.datamodule import SharedQueueDataModule

__all__ = ["SharedQueueDataModule", "SharedQueueCallback"]
