"""What a rank of the imbalance benchmark computes on: the GPU of its LOCAL_RANK, or the CPU; and at what pace.

A pace has a micro-batch take longer than the device needs. On a CPU all ranks are paced, since they share its cores.
On a GPU a pace is relative to what that GPU takes itself.

Times are CUDA events on a GPU, which hold nothing up, and a clock's elsewhere.
"""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from benchmarks.imbalance.settings import paces
from shardqueue.demo.options import shown_speed

if TYPE_CHECKING:
    from benchmarks.imbalance.settings import Settings


class ComputeDevice:
    """This rank's device.

    Attributes:
        device: torch's name of it.
        cuda: whether it is a GPU.
        shared_by: ranks of this machine that use the same GPU, at most.
        pace: of its micro-batches.
    """

    def __init__(self, settings: Settings) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        gpus = 0 if settings.cpu else torch.cuda.device_count()
        self.cuda = gpus > 0
        self.shared_by = -(-int(os.environ["LOCAL_WORLD_SIZE"]) // max(1, gpus))
        if self.cuda:
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % gpus)
            torch.cuda.set_device(self.device)
        else:
            self.device = torch.device("cpu")
            torch.set_num_threads(1)
        given = settings.speeds or ((1.0,) * size if self.cuda else paces(size))
        self._speed, self._milliseconds = given[rank], settings.milliseconds
        self._half = self.cuda and torch.cuda.is_bf16_supported(including_emulation=False)
        self.pace = Pace(self.device)

    def autocast(self) -> torch.autocast:
        """Computing in bfloat16, where a GPU has it."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self._half)

    def slow_down(self, seconds: float) -> None:
        """Set the pace, where a micro-batch takes so many seconds without one."""
        if not self.cuda:
            self.pace.seconds = self._milliseconds / 1e3 / self._speed
        elif self._speed < 1:
            self.pace.seconds = seconds / self._speed

    def name(self) -> str:
        """What people call it, with its speed where it is paced."""
        name = torch.cuda.get_device_name(self.device) if self.cuda else _cpu_name()
        return f"{name} at {shown_speed(self._speed)}" if self.pace.seconds else name

    def memory(self) -> int:
        """Bytes of the GPU's memory that were in use at most since `forget_memory`; 0 on a CPU."""
        return torch.cuda.max_memory_allocated(self.device) if self.cuda else 0

    def memory_part(self) -> float:
        """The same as a part of what the GPU has for this rank."""
        if not self.cuda:
            return 0.0
        whole = torch.cuda.get_device_properties(self.device).total_memory
        return self.shared_by * self.memory() / whole

    def forget_memory(self) -> None:
        """Give back what is not used, and count anew."""
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)


class Pace:
    """When a rank computes, and how long a micro-batch takes at least.

    Attributes:
        seconds: of a micro-batch, at least; 0 for what it takes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self.seconds = device, 0.0
        self._spans: list[tuple[Any, Any]] = []
        self._begun: Any = None
        self._since = 0.0

    def forget(self) -> None:
        """Begin anew."""
        self._spans = []

    def begin(self) -> None:
        """Computing begins."""
        if self.seconds:
            self.wait()  # else the pause would be over by the time that the device comes to it
        self._since = time.perf_counter()
        self._begun = self._mark()

    def hold(self) -> None:
        """A micro-batch is computed; returns when it has taken its time."""
        if self.seconds:
            self.wait()
            time.sleep(max(0.0, self._since + self.seconds - time.perf_counter()))
        self.end()

    def end(self) -> None:
        """Computing ends."""
        self._spans.append((self._begun, self._mark()))

    def busy(self) -> float:
        """Seconds of computing; waits for the device."""
        self.wait()
        if self._device.type == "cuda":
            return float(sum(begun.elapsed_time(ended) for begun, ended in self._spans)) / 1e3
        return float(sum(ended - begun for begun, ended in self._spans))

    def wait(self) -> None:
        """Wait for what the device was given in this stream, and not for what travels between the ranks."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


def _cpu_name() -> str:
    """As the system calls it."""
    known = Path("/proc/cpuinfo")
    lines = known.read_text(encoding="utf-8").splitlines() if known.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, f"{platform.machine()} CPU").replace("(R)", "").replace("(TM)", "")
