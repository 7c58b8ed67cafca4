"""The shared queue under a Lightning Trainer: its data, a callback, and a strategy for elastic steps."""

from __future__ import annotations

from shardqueue.lightning.callback import SharedQueueCallback
from shardqueue.lightning.datamodule import SharedQueueDataModule
from shardqueue.lightning.strategy import ElasticStrategy

__all__ = ["ElasticStrategy", "SharedQueueDataModule", "SharedQueueCallback"]
