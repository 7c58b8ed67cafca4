"""Ranks that stay up: a `torch.distributed` world of real processes, with a fresh process group for each case.

Importing torch and Lightning costs seconds a process. So one launcher imports them once and forks every rank, in
well under a second a group. What holds for each call:

* The ranks find the environment torchrun would give them, over the test's own, and the test's working directory.
  The function makes the process group itself, or lets a Trainer do it; the harness destroys it afterwards.
* A rank that raises leaves the group at once, as if its process had ended. One that returns stays in it until all
  have answered, so an uneven end is a hang, which ends after `patience` with the traceback of every rank.
* Warnings are errors. What the ranks print is shown only when a case fails.
* After a death, a hang, or a group that could not be destroyed, the next call starts new processes.

None of a rank's threads and processes may outlive the call, as in the census of `conftest`, and nothing may go wrong
where nobody catches it: in a thread, or while an object is collected.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.reduction
import os
import pickle
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from multiprocessing.process import BaseProcess

PATIENCE = 90.0
"""Seconds a call may take in its slowest rank."""
GRACE_SECONDS = 15.0
"""For what should take no time: to leave the group, to write a traceback, to end."""
ENDING_SECONDS = 3.0
"""For threads and processes of a call to end after it."""
LOG_CHARACTERS = 4000

BENIGN = (
    # Lightning 2.6 uses what torch 2.13 deprecates.
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    # Tests load tiny data in the rank itself, on purpose.
    r"The '\w+' does not have many workers",
    # The same for more workers than cores.
    r"This DataLoader will create",
    # Epochs of a few batches are shorter than any sensible interval.
    r"The number of training batches .* is smaller than the logging interval",
    # Python 3.12 and newer, forked workers: gloo and autograd keep threads in every rank.
    r"This process .* is multi-threaded, use of fork",
)
"""Warnings that are no errors in a rank, as regular expressions at the start of the message."""


@dataclass(frozen=True)
class Outcome:
    """How one rank's call ended, with what the rank printed meanwhile."""

    kind: Literal["value", "raised", "died", "hung"]
    value: Any = None
    error: str = ""
    """Name of the exception's type."""
    text: str = ""
    """Message of the exception."""
    traceback: str = ""
    """Of the exception; of all threads for a rank that hung, or that a fault such as SIGSEGV ended."""
    log: str = ""

    def __str__(self) -> str:
        head = "returned" if self.kind == "value" else self.kind
        printed = f"\n--- printed ---\n{self.log[-LOG_CHARACTERS:]}" if self.log else ""
        return f"{head}\n{self.traceback}{printed}"


class Launcher:
    """One process that has imported torch, and Lightning if asked, and forks ranks."""

    def __init__(self, lightning: bool = True) -> None:
        # An optimizer imports dynamo, which costs each rank a second and more.
        modules = ["torch", "torch._dynamo", *(["lightning.pytorch"] if lightning else [])]
        self._pipe, there = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        with _environment(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1"):
            self._process = context.Process(target=_launch, args=(there, modules))
            self._process.start()
        there.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def fork(self, folder: Path, pipes: list[Connection]) -> list[int]:
        """Fork a rank for each pipe; return their pids."""
        self._pipe.send((folder, len(pipes)))
        for pipe in pipes:
            multiprocessing.reduction.send_handle(self._pipe, pipe.fileno(), self.pid)
        assert self._pipe.poll(PATIENCE), "the launcher of the ranks hangs"
        pids: list[int] = self._pipe.recv()
        return pids

    def close(self) -> None:
        """End the launcher, and with it any rank that is left."""
        self._pipe.close()
        self._process.join(GRACE_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


class Ranks:
    """`size` ranks that call what they are told to, all at once, each call in a world of its own.

    Args:
        size: The world size.
        lightning: Whether to import Lightning too, for a launcher of its own.
        launcher: What forks the ranks; without one, these ranks start their own, and close it.
    """

    def __init__(self, size: int, lightning: bool = True, launcher: Launcher | None = None) -> None:
        self.size = size
        self._launcher = launcher or Launcher(lightning)
        self._owns_launcher = launcher is None
        self._folder = Path()
        self._links: list[_Link] = []

    @property
    def pids(self) -> list[int]:
        """The processes by rank; empty before the first call, and after one that broke the group."""
        return [link.pid for link in self._links]

    @property
    def launcher_pid(self) -> int:
        """The only child process of the test's own; the ranks are the launcher's."""
        return self._launcher.pid

    def run(self, function: Callable[..., Any], *args: Any, patience: float = PATIENCE) -> list[Any]:
        """Call `function(rank, *args)` in each rank; return the results by rank.

        Raises:
            AssertionError: In some rank the call did not return. The text holds every rank's traceback and log.
        """
        __tracebackhide__ = True
        outcomes = self.outcomes(function, *args, patience=patience)
        if any(outcome.kind != "value" for outcome in outcomes):
            raise AssertionError(f"{function.__name__} failed" + _told(outcomes))
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self, function: Callable[..., Any], *args: Any, patience: float = PATIENCE, but: Collection[int] = ()
    ) -> list[Outcome]:
        """Call `function(rank, *args)` in each rank; return how each call ended, by rank.

        Args:
            function: Anything that pickles by its name; so do `args` and the result, tensors by value.
            args: What each rank is given after its rank.
            patience: Seconds until a rank that has not answered counts as hung.
            but: Ranks not waited for once the others have answered, such as one that the test stops.

        Raises:
            AssertionError: Something that a rank started outlived the call, or failed unseen.
        """
        work = pickle.dumps((function, args))
        if not self._are_up():
            self._start()
        try:
            starts = [link.log.stat().st_size for link in self._links]
            for rank, case in enumerate(self._cases(work, patience)):
                with contextlib.suppress(OSError):  # died meanwhile: said by what it answers
                    self._links[rank].pipe.send_bytes(pickle.dumps(case))
            outcomes = self._gather(patience, but)
            answered = all(outcome.kind in ("value", "raised") for outcome in outcomes)
            settled = self._settle() if answered else None
            outcomes = [
                replace(outcome, log=link.log.read_bytes()[start:].decode(errors="replace"))
                for outcome, link, start in zip(outcomes, self._links, starts, strict=True)
            ]
        except BaseException:
            self._kill()
            raise
        if settled is None or any(settled):
            self._kill()
        left = [f"rank {rank} left {what}" for rank, what in enumerate(settled or ()) if what]
        assert not left, f"{function.__name__}: " + "; ".join(left) + _told(outcomes)
        return outcomes

    def close(self) -> None:
        self._kill()
        if self._owns_launcher:
            self._launcher.close()

    def _are_up(self) -> bool:
        return bool(self._links) and not any(link.is_dead() for link in self._links)

    def _start(self) -> None:
        self._kill()
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        files = [(self._folder / f"{rank}.log", self._folder / f"{rank}.stacks") for rank in range(self.size)]
        for log, stacks in files:
            log.touch()
            stacks.touch()
        pipes = [multiprocessing.Pipe() for _ in files]
        pids = self._launcher.fork(self._folder, [there for _, there in pipes])
        for pid, (here, there), (log, stacks) in zip(pids, pipes, files, strict=True):
            there.close()
            self._links.append(_Link(pid, os.pidfd_open(pid), here, log, stacks))

    def _cases(self, work: bytes, patience: float) -> Iterator[_Case]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        for rank in range(self.size):
            environment = {
                **os.environ,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.size),
                "LOCAL_WORLD_SIZE": str(self.size),
                "NODE_RANK": "0",
                "GROUP_RANK": "0",
                # Makes it torchrun's for Lightning, which then launches nothing itself.
                "TORCHELASTIC_RUN_ID": "ranks",
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
            }
            yield _Case(environment, Path.cwd(), patience, work)

    def _gather(self, patience: float, but: Collection[int]) -> list[Outcome]:
        end = time.monotonic() + patience + 1.0
        outcomes: dict[int, Outcome] = {}
        waiting = dict(enumerate(self._links))
        while waiting.keys() - set(but):
            awaited = [thing for link in waiting.values() for thing in (link.pipe, link.handle)]
            if not multiprocessing.connection.wait(awaited, end - time.monotonic()):
                break
            for rank, link in list(waiting.items()):
                if (outcome := link.outcome()) is not None:
                    outcomes[rank] = outcome
                    del waiting[rank]
        for rank, link in waiting.items():
            stacks = link.await_stacks() if rank not in but else ""
            outcomes[rank] = Outcome("hung", traceback=stacks or "no traceback: stopped, or not waited for\n")
        return [outcomes[rank] for rank in range(self.size)]

    def _settle(self) -> list[str] | None:
        """Let the ranks leave the group; return what each has left running, or None if one cannot leave."""
        found = []
        for link in self._links:
            with contextlib.suppress(OSError):
                link.pipe.send_bytes(b"")
        for link in self._links:
            multiprocessing.connection.wait([link.pipe, link.handle], GRACE_SECONDS)
            try:
                if not link.pipe.poll():
                    return None
                found.append(str(link.pipe.recv()))
            except (EOFError, OSError):
                return None
        return found

    def _kill(self) -> None:
        for link in self._links:
            link.kill()
        if self._links:
            shutil.rmtree(self._folder)
        self._links = []


class _Case(NamedTuple):
    """One rank's share of a call."""

    environment: dict[str, str]
    directory: Path
    patience: float
    work: bytes


class _Link(NamedTuple):
    """The test's side of one rank."""

    pid: int
    handle: int
    pipe: Connection
    log: Path
    stacks: Path

    def is_dead(self) -> bool:
        return bool(select.select([self.handle], [], [], 0)[0])

    def outcome(self) -> Outcome | None:
        """What the rank answered, or that it died; None while it does neither."""
        dead = self.is_dead()
        try:
            if self.pipe.poll():
                outcome: Outcome = pickle.loads(self.pipe.recv_bytes())
                return outcome
        except (EOFError, OSError):
            dead = True
        return Outcome("died", traceback=self.stacks.read_text()) if dead else None

    def await_stacks(self) -> str:
        """The tracebacks that the rank writes on its own when its patience ends; empty if it is stopped."""
        end = time.monotonic() + GRACE_SECONDS
        while not self.stacks.stat().st_size and time.monotonic() < end and not self._is_stopped():
            time.sleep(0.05)
        time.sleep(0.05)  # written in pieces
        return self.stacks.read_text()

    def kill(self) -> None:
        """End the rank and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        select.select([self.handle], [], [], GRACE_SECONDS)
        os.close(self.handle)
        self.pipe.close()

    def _is_stopped(self) -> bool:
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def _told(outcomes: list[Outcome]) -> str:
    return "".join(f"\n\n=== rank {rank} {outcome}" for rank, outcome in enumerate(outcomes))


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _launch(pipe: Connection, modules: Sequence[str]) -> None:
    _end_with_parent()
    for name in modules:
        importlib.import_module(name)
    gc.freeze()  # what is imported stays: the ranks share it, and need not look through it
    context = multiprocessing.get_context("fork")
    while True:
        try:
            folder, size = pipe.recv()
        except EOFError:
            os._exit(0)  # not by way of multiprocessing, which would wait for the ranks
        pids = []
        for rank in range(size):
            with Connection(multiprocessing.reduction.recv_handle(pipe)) as link:
                process = context.Process(target=_serve, args=(rank, link, folder))
                process.start()
            assert process.pid is not None
            os.setpgid(process.pid, process.pid)  # so that it is killed with its loader workers
            pids.append(process.pid)
        pipe.send(pids)


def _serve(rank: int, pipe: Connection, folder: Path) -> None:
    _end_with_parent()
    with (folder / f"{rank}.log").open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    unseen: list[str] = []
    threading.excepthook = lambda hook: unseen.append(f"{hook.exc_value!r} in thread {hook.thread}")
    sys.unraisablehook = lambda hook: unseen.append(f"{hook.exc_value!r} in {hook.object!r}")
    with (folder / f"{rank}.stacks").open("wb") as stacks:
        faulthandler.enable(stacks)
        while True:
            case = pickle.loads(pipe.recv_bytes())
            faulthandler.dump_traceback_later(case.patience, file=stacks)
            with warnings.catch_warnings(), _environment():
                _enter(rank, case)
                raised, outcome = _call(rank, case.work)
                faulthandler.cancel_dump_traceback_later()
                pipe.send_bytes(outcome)
                if raised:
                    _leave_group()
                pipe.recv_bytes()
                _leave_group()
                gc.collect()  # loaders hold their workers, and reference cycles hold loaders
                pipe.send("; ".join([*_outliving(), *unseen]))
                unseen.clear()


def _enter(rank: int, case: _Case) -> None:
    import torch

    os.environ.clear()
    os.environ.update(case.environment)
    os.chdir(case.directory)
    torch.manual_seed(rank)
    if utilities := sys.modules.get("lightning_utilities.core.rank_zero"):
        utilities.rank_zero_only.rank = rank  # what Lightning reads from RANK when it is imported
    warnings.simplefilter("error")
    for message in BENIGN:
        warnings.filterwarnings("ignore", message)


def _call(rank: int, work: bytes) -> tuple[bool, bytes]:
    """Whether the call raised, and its outcome, pickled."""
    try:
        function, args = pickle.loads(work)
        return False, pickle.dumps(Outcome("value", function(rank, *args)))
    except BaseException as error:
        trace = traceback.format_exc()
        return True, pickle.dumps(Outcome("raised", None, type(error).__name__, str(error), trace))


def _leave_group() -> None:
    from torch import distributed

    if distributed.is_initialized():
        distributed.destroy_process_group()


def _outliving() -> list[str]:
    """What runs on after the call, and does not end in a while."""
    end = time.monotonic() + ENDING_SECONDS
    for task in _tasks():
        task.join(max(0.0, end - time.monotonic()))
    return [f"{type(task).__name__} {task.name}" for task in _tasks()]


def _tasks() -> list[threading.Thread | BaseProcess]:
    """The rank's child processes, and its threads that are the library's own or in the foreground."""
    others = (thread for thread in threading.enumerate() if thread is not threading.main_thread())
    threads = [thread for thread in others if not thread.daemon or thread.name.startswith("shardqueue")]
    return [*threads, *multiprocessing.active_children()]


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
