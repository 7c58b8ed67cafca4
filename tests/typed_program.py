"""A program as a user writes it, checked by `mypy --strict` against the installed package; it also runs."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch
from torch.utils.data import DataLoader, TensorDataset

from shardqueue import (
    Channel,
    Mailbox,
    Rates,
    Receiver,
    Sender,
    Session,
    SharedQueue,
    SharedQueueDataset,
    Step,
    Unit,
    open_mailbox,
    shared_queue,
    unit_grid,
)
from shardqueue.errors import InvalidInputError, ShardQueueError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardqueue.channel import ChannelReport


def load(unit: Unit) -> Iterator[tuple[int, list[int]]]:
    """Read a unit."""
    for step in unit.steps:
        yield step, [step * unit.lanes + unit.lane]


def plain(mailbox: Mailbox) -> int:
    """Train on a queue; count the batches."""
    units: Mapping[str, object] = unit_grid(steps=8, unit_steps=2, lanes=2)
    queue: SharedQueue
    with shared_queue(units, mailbox, None, load) as queue:
        count = sum(1 for _step, _batch in queue)
    assert not queue.returned
    return count


def through_a_loader(prefix: str) -> Rates:
    """Train through a DataLoader."""
    rows = TensorDataset(torch.arange(64.0).unsqueeze(1))
    dataset = SharedQueueDataset.from_dataset(rows, prefix, batch_size=8, shuffle=True, with_step=True)
    with Session(prefix) as session:
        step: Step
        for step, (inputs,) in session.track(DataLoader(dataset, batch_size=None)):
            assert step.unit
            session.step(samples=len(inputs))
        return session.rates


def through_a_channel() -> ChannelReport:
    """Hand items over."""
    channel: Channel[int] = Channel(senders=1, receivers=1)
    sender: Sender[int] = channel.sender()
    receiver: Receiver[int] = channel.receiver()
    with sender:
        sender.send(1, timeout=1.0)
    with receiver:
        assert [item + 1 for item in receiver] == [2]
    return channel.report()


def main(folder: str) -> None:
    """Do all of it."""
    assert plain(open_mailbox(f"{folder}/plain")) == 16
    assert through_a_loader(f"{folder}/loader").samples == 64
    assert through_a_channel().received == 1
    try:
        unit_grid(steps=0, unit_steps=1)
    except InvalidInputError as error:
        known: ShardQueueError = error
        print(f"{error.name} must be {error.bound}", known.args)


if __name__ == "__main__":
    main(sys.argv[1])
