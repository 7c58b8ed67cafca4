"""The machine and the versions that a measurement was made with; no names of hosts, users or folders."""

from __future__ import annotations

import os
import platform
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "lightning", "fsspec", "s3fs", "numpy", "shardqueue")


def machine() -> dict[str, Any]:
    """CPU, cores that this process may use, memory in bytes, GPUs, operating system, and how busy it was just now."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": gpus(),
        "os": platform.platform(),
        "load_average": os.getloadavg()[0],
    }


def versions() -> dict[str, str | None]:
    """Of Python and of what counts, None for what is not installed; and the commit, where this is a git checkout."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        found[package] = None
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return {**found, "commit": commit(ROOT)}


def gpus() -> list[str]:
    """The CUDA devices, by name."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.cuda.get_device_name(device) for device in range(count)]


def commit(folder: Path) -> str | None:
    """The commit of a checkout, with `-dirty` after it where files differ from it; None for any other folder."""
    top = _git(folder, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != folder.resolve():
        return None
    return _git(folder, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        ended = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True)
    except OSError:
        return None
    return ended.stdout.strip() if ended.returncode == 0 else None


def _cpu() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
