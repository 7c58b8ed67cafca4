"""CUDA tensors through a channel between processes: CUDA IPC, no copy, and the sender keeps them alive."""

from __future__ import annotations

import multiprocessing
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardqueue import Channel
from shardqueue.errors import SenderError

if TYPE_CHECKING:
    from shardqueue.channel import Receiver, Sender

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
PATIENCE = 60.0


def produce(sender: Sender[Any], first: int, count: int) -> None:
    with sender:
        for number in range(first, first + count):
            sender.send({"number": number, "hidden": torch.full((1 << 18,), float(number), device="cuda")})


def consume(pipe: Any, receiver: Receiver[Any]) -> None:
    got = []
    with receiver:
        for item in receiver:
            assert item["hidden"].is_cuda
            assert bool((item["hidden"] == item["number"]).all())
            got.append(item["number"])
            del item  # CUDA memory goes back to its producer as soon as nobody holds it
    pipe.send(got)


def test_cuda_tensors_are_received_once_and_whole() -> None:
    context = multiprocessing.get_context("spawn")
    channel: Channel[Any] = Channel(2, 2, 4, context=context)
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    processes = [context.Process(target=produce, args=(channel.sender(), k * 100, 20)) for k in range(2)]
    processes += [context.Process(target=consume, args=(there, channel.receiver())) for _, there in pipes]
    for process in processes:
        process.start()
    got = []
    for here, _ in pipes:
        assert here.poll(PATIENCE)
        got += here.recv()
    for process in processes:
        process.join(PATIENCE)
        assert process.exitcode == 0
    assert sorted(got) == [*range(20), *range(100, 120)]


def send_then_die(sender: Sender[Any]) -> None:
    with sender:
        sender.send(1)
        sender.send(torch.ones(4, device="cuda"))
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.filterwarnings("ignore:sender 0 .* was killed")
def test_a_killed_producers_cuda_tensors_are_counted_as_lost() -> None:
    context = multiprocessing.get_context("spawn")
    channel: Channel[Any] = Channel(1, 1, 4, context=context)
    process = context.Process(target=send_then_die, args=(channel.sender(),))
    process.start()
    process.join(PATIENCE)
    with channel.receiver() as receiver:
        assert receiver.receive() == 1
        with pytest.raises(SenderError, match="1 items it had sent are lost"):
            receiver.receive()
    assert channel.report().lost == 1
