"""Where each side runs, and how: a process in the environment of its system, which leaves nothing behind."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.peers.work import outcomes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.peers.work import Outcome, Work

ROOT = Path(__file__).parents[2]
VARIABLE = "SHARDQUEUE_PEERS"
"""Names the folder with the environments."""
LONGEST = 600.0
"""Seconds that a side may take for all works."""


class AbsentError(Exception):
    """A side cannot run here; the message is the reason."""


class BrokenError(Exception):
    """A side ran, and nothing that counts came of it."""


@dataclass(frozen=True, slots=True)
class Side:
    """A system, and what runs it.

    Attributes:
        module: in `benchmarks.peers`.
        label: what a row calls it; the version is put in for `{}`.
        package: what pip installs into an environment of its own; empty for what is installed with shardqueue.
        imports: the name by which its package is imported.
        python: the oldest version that it runs on.
        asks_store: whether it claims through a store, so that a call's latency matters.
    """

    module: str
    label: str
    package: str = ""
    imports: str = ""
    python: tuple[int, int] = (3, 11)
    asks_store: bool = True


THREADS = Side("ours_in_threads", "shardqueue {}, threads")
LOADERS = Side("ours_in_loaders", "shardqueue {}, DataLoader")
SIDES = (
    Side("gradientmail", "GradientMail {} SharedQueue", "gradientmail==0.0.2", "gradientmail", (3, 12)),
    Side("ray_data", "Ray Data {} streaming_split", "ray[data]==2.60.*", "ray", asks_store=False),
    Side("distributed_sampler", "DataLoader with DistributedSampler, torch {}", asks_store=False),
)
"""The peers."""


def run(side: Side, works: Sequence[Work]) -> tuple[str, list[Outcome]]:
    """Measure works on a side.

    Returns:
        What rows call it, with its version, and an outcome for each work.

    Raises:
        AbsentError: it cannot run here.
        BrokenError: it failed, took longer than `LONGEST`, or did not train every unit once.
    """
    command = [str(interpreter(side)), "-m", f"benchmarks.peers.{side.module}"]
    given = json.dumps([asdict(work) for work in works])
    with tempfile.TemporaryDirectory(prefix="peer") as folder:
        environment = {**os.environ, "TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"}
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            printed, _ = process.communicate(given, LONGEST)
        except subprocess.TimeoutExpired:
            raise BrokenError(f"{side.module} did not end within {LONGEST:g} s") from None
        finally:
            leave_nothing(process, folder)
    if process.returncode:
        raise BrokenError(f"{side.module} ended with {process.returncode}")
    try:
        told = json.loads(printed.splitlines()[-1])
        label, found = side.label.format(told["version"]), outcomes(told)
    except (IndexError, ValueError, KeyError, TypeError):
        raise BrokenError(f"{side.module} did not tell what came of it") from None
    for work, outcome in zip(works, found, strict=True):
        if outcome.faults:
            raise BrokenError(
                f"{side.module}, {work.name}: {outcome.faults} units were not trained exactly once"
            )
    return label, found


def leave_nothing(process: subprocess.Popen[str], folder: str) -> None:
    """Kill the process, and what it started, if any of it is left: all have the folder in their environment."""
    if process.poll() is None:
        process.kill()
        process.wait()
    for left in _with_in_environment(f"TMPDIR={folder}"):
        with suppress(ProcessLookupError):
            os.kill(left, signal.SIGKILL)


def _with_in_environment(setting: str) -> list[int]:
    wanted, found = setting.encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def interpreter(side: Side) -> Path:
    """The Python that runs a side.

    Raises:
        AbsentError: there is none.
    """
    if not side.package:
        return Path(sys.executable)
    folder = os.environ.get(VARIABLE)
    if folder:
        python = Path(folder).absolute() / side.module / "bin" / "python"
        if python.exists():
            return python
    if importlib.util.find_spec(side.imports):
        return Path(sys.executable)
    where = f"and {folder} has no environment for it" if folder else f"and {VARIABLE} names no folder"
    raise AbsentError(
        f"{side.package} is not installed here, {where}; "
        f"make one: python -m benchmarks.peers --make-environments {folder or 'FOLDER'}"
    )


def make_environment(side: Side, folder: Path) -> Path:
    """Install a side's package into an environment of its own in the folder, and nothing else.

    Raises:
        AbsentError: no Python here is new enough, or pip could not install the package.
    """
    place = folder.absolute() / side.module
    base = _python(side.python)
    for command in (
        [base, "-m", "venv", str(place)],
        [str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", side.package],
    ):
        ended = subprocess.run(command, capture_output=True, text=True)
        if ended.returncode:
            said = (ended.stderr or ended.stdout).strip().splitlines() or [""]
            raise AbsentError(f"{side.package}: `{' '.join(command)}` failed: {said[-1]}")
    return place


def _python(oldest: tuple[int, int]) -> str:
    if sys.version_info[:2] >= oldest:
        return sys.executable
    for minor in range(oldest[1], oldest[1] + 4):
        found = shutil.which(f"python{oldest[0]}.{minor}")
        if found and not subprocess.run([found, "-c", ""], capture_output=True).returncode:
            return found
    raise AbsentError(f"needs Python {oldest[0]}.{oldest[1]} or newer, and no `python3.x` on PATH is")
