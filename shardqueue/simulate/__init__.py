"""The real claiming code in virtual time: see `driver`, which runs it, and `command`, which shows it."""

from shardqueue.simulate.driver import Node, Outcome, simulate

__all__ = ["Node", "Outcome", "simulate"]
