"""Runs the README's scripts as processes of their own, unaltered, and makes them die at an exact step.

Importing torch costs seconds, so processes are forked from one that has. `Restarts.ranks` gives them the environment
that torchrun would; where torchrun itself is the matter, it runs this file with the script as its argument. What is
to happen to a process stands in its environment (`Fate`) and happens in `Session.step`, before the step counts.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import re
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import time
import warnings
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PATIENCE = 120.0
FATE = "SHARDQUEUE_TEST_FATE"
QUICK = "join_timeout=60,last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=2"
"""So that a test does not wait for as long as a cluster does."""


def section() -> str:
    """The README's text about restarts."""
    text = README.read_text(encoding="utf-8")
    found = re.search(r"^### A job that restarts\n.*?(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[0]


def script(name: str) -> str:
    """The Python block that the README calls by this file name."""
    after = section().partition(f"This is `{name}`")[2]
    found = re.search(r"^```python\n(.*?)^```$", after, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def command(heading: str) -> list[str]:
    """The torchrun line under a heading, with a free port and this file around the script."""
    found = re.search(rf"^#+ {heading}\n.*?^```bash\n(.*?)\n```$", section(), re.MULTILINE | re.DOTALL)
    assert found is not None
    line = found[1].replace("29400", str(free_port()))
    program, *options, name = shlex.split(line)
    assert (program, name) == ("torchrun", "train.py")
    return [sys.executable, "-m", "torch.distributed.run", *options, __file__, name]


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


@dataclass(frozen=True)
class Fate:
    """What happens to a process, if anything, at which of its steps.

    Attributes:
        dies: it is killed, with its loader workers, after its log was written.
        node: torchrun is killed with it.
        rank: whom that concerns where the environment is torchrun's; None for all.
        preempted: it gets SIGTERM.
        tells: it makes the file `told`.
        waits: until there is the file `awaited`.
    """

    dies: int = 0
    node: bool = False
    rank: int | None = None
    preempted: int = 0
    tells: int = 0
    told: str = "told"
    waits: int = 0
    awaited: str = "awaited"

    def as_environment(self) -> dict[str, str]:
        """How it is told to a process."""
        return {FATE: json.dumps(asdict(self))}

    def befall(self, session: Any, step: int) -> None:
        """Let happen what must at this step."""
        if self.rank not in (None, int(os.environ.get("RANK", "0"))):
            return
        if step == self.tells:
            Path(self.told).touch()
        if step == self.waits:
            until(Path(self.awaited).exists)
        if step == self.preempted:
            os.kill(os.getpid(), signal.SIGTERM)
        if step == self.dies:
            session.flush_log()
            if self.node:
                os.kill(os.getppid(), signal.SIGKILL)
            os.killpg(os.getpgrp(), signal.SIGKILL)


def until(holds: Any) -> None:
    """Wait for it."""
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def run(name: str) -> None:
    """Be the process that runs a script, in its first life with a fate."""
    from shardqueue import Session

    fate = Fate(**json.loads(os.environ.get(FATE, "{}")))
    step, steps = Session.step, 0

    def counted(self: Session, *args: Any, **options: Any) -> None:
        nonlocal steps
        steps += 1
        fate.befall(self, steps)
        step(self, *args, **options)

    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        Session.step = counted  # type: ignore[method-assign]
    warnings.simplefilter("error")
    faulthandler.dump_traceback_later(PATIENCE * 0.8)
    runpy.run_path(name, run_name="__main__")


def _run_forked(name: str, folder: str, environment: dict[str, str], log: str) -> None:
    import torch

    multiprocessing.set_start_method("fork", force=True)  # for its loader's workers, as in any process
    os.setsid()
    os.chdir(folder)
    os.environ.update(environment)
    with Path(log).open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    run(name)


@contextmanager
def imported_once() -> Iterator[None]:
    """Processes are forked from one that has imported what the scripts do."""
    server: Any = forkserver._forkserver
    server._stop()  # an earlier test's has imported nothing
    multiprocessing.set_forkserver_preload(["torch.nn.parallel", "torch.utils.data", "shardqueue.dataset"])
    yield
    server._stop()
    multiprocessing.set_forkserver_preload(["__main__"])  # as it was


class Process:
    """One process of a job."""

    def __init__(self, name: str, folder: Path, environment: dict[str, str], log: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        self._log = log
        arguments = name, str(folder), environment, str(log)
        self._process = context.Process(target=_run_forked, args=arguments)
        self._process.start()

    @property
    def log(self) -> str:
        """What it printed."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def end(self) -> int:
        """Wait until it has ended; return its exit status, the negative signal if one killed it."""
        self._process.join(PATIENCE)
        assert self._process.exitcode is not None, f"hangs\n{self.log}"
        return self._process.exitcode

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """End it and what it started."""
        assert self._process.pid is not None
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.join()
        self._process.close()


class Agent:
    """One `torchrun`."""

    def __init__(self, line: list[str], folder: Path, environment: dict[str, str], log: Path) -> None:
        self._log = log
        variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # as the README says
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                line,
                cwd=folder,
                env={**os.environ, **variables, **environment},
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        """What it and its ranks printed."""
        return self._log.read_text(errors="replace")

    def end(self) -> int:
        """Wait until it has ended; return its exit status."""
        try:
            return self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"hangs\n{self.log}") from None

    def kill(self) -> None:
        """End it; its ranks end with it, on SIGTERM."""
        if self._process.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
            self._process.kill()
        self._process.wait()


class Restarts:
    """The jobs of one test, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("train.py", "task.py"):
            (folder / name).write_text(script(name))
        self._all: list[Process | Agent] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._all:
            process.kill()

    def ranks(self, size: int, fates: dict[int, Fate] | None = None) -> list[Process]:
        """Start `train.py` as so many ranks, as torchrun does."""
        port = str(free_port())
        return [
            self._start(
                "train.py",
                {
                    **{"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)},
                    **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"},
                    **(fates or {}).get(rank, Fate()).as_environment(),
                },
            )
            for rank in range(size)
        ]

    def task(self, number: int, fate: Fate | None = None) -> Process:
        """Start `task.py` as this task of a job array, each with a job id of its own."""
        ids = {
            "SLURM_ARRAY_JOB_ID": "100",
            "SLURM_ARRAY_TASK_ID": str(number),
            "SLURM_JOB_ID": str(101 + number),
        }
        return self._start("task.py", {**ids, **(fate or Fate()).as_environment()})

    def node(self, line: list[str], first: bool, fate: Fate | None = None) -> Agent:
        """Type a line on one of two nodes; here, unlike there, their names do not tell which holds the rendezvous."""
        configuration = f"--rdzv-conf=is_host={int(first)},{QUICK}"
        return self.torchrun([*line[:3], configuration, *line[3:]], fate)

    def torchrun(self, line: list[str], fate: Fate | None = None) -> Agent:
        """Type a line."""
        agent = Agent(line, self.folder, (fate or Fate()).as_environment(), self._new_log())
        self._all.append(agent)
        return agent

    def _start(self, name: str, environment: dict[str, str]) -> Process:
        process = Process(name, self.folder, environment, self._new_log())
        self._all.append(process)
        return process

    def _new_log(self) -> Path:
        return self.folder / f"{len(self._all)}.log"


if __name__ == "__main__":
    run(sys.argv[1])
