"""Collects where a number comes from: code, versions and machine.

No package is imported to find its version, so the front end need not start torch.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import hires


def collect() -> dict[str, Any]:
    """Returns what later readers need to judge or repeat a measurement made now, here.

    ``git`` is the commit of this code (``-dirty`` if edited), or None where it is no checkout;
    ``memory`` is in bytes; ``cores`` are those this process may use.
    """
    return {
        "git": _git_commit(Path(hires.__file__).resolve().parent),
        "hires": hires.__version__,
        "torch": _version("torch"),
        "python": platform.python_version(),
        "hardware": {"cpu": _cpu_name(), "cores": _cores(), "memory": _memory_bytes()},
        "host": platform.node(),
    }


def now() -> str:
    """Returns the time in UTC, as ``2031-02-03T04:05:06.789012+00:00``."""
    return datetime.now(timezone.utc).isoformat(timespec="microseconds")


@functools.cache
def _git_commit(package: Path) -> str | None:
    """Returns the commit of the checkout that ``package`` is part of, if it is part of one."""
    # A virtual environment may lie inside somebody else's repository: that commit says nothing
    # about this code, so the package must lie directly under the repository's root.
    if _git(package, "rev-parse", "--show-toplevel") != str(package.parent):
        return None
    commit = _git(package, "rev-parse", "HEAD")
    if commit is None:
        return None
    edited = _git(package, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}-dirty" if edited else commit


def _git(folder: Path, *args: str) -> str | None:
    """Returns the output of git, or None if it fails or is not installed."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    command = ["git", "--no-optional-locks", "-C", str(folder), *args]
    try:
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


@functools.cache
def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def _cpu_name() -> str:
    """Returns the processor's name, or its architecture where the system does not show it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
