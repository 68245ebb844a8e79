"""Identifies what made a number: code, versions, machine and process.

No package is imported to find its version, so the front end need not start torch. Process numbers
are reused, results lie on file servers, and containers count anew: a process is identified by its
machine since it was started, its name space of numbers, its number and the time it began.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import signal
import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import hires
from hires.core import programs
from hires.core.errors import RunError

PAGES = ":(exclude,glob)**/README.md"
"""What benchmarks write beside code: `make results` measures one code though it edits these."""
CPU_MODEL = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")
"""Of /proc/cpuinfo on x86 and ARM: with the flags, what a compiler for this very CPU looks at."""


def collect() -> dict[str, Any]:
    """Returns what later readers need to judge or repeat a measurement made now, here.

    ``git`` is the commit of this code (if edited, other than pages, with ``-dirty-`` and a digest
    of the edits), or None where it is no checkout; ``memory`` is in bytes; ``cores`` are those this
    process may use.
    """
    cores = len(os.sched_getaffinity(0))
    memory = torch = None
    from importlib import metadata  # takes as long as a verb's own start

    with contextlib.suppress(metadata.PackageNotFoundError):
        torch = metadata.version("torch")
    with contextlib.suppress(ValueError, OSError):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "git": _git_commit(Path(hires.__file__).resolve().parent),
        "hires": hires.__version__,
        "torch": torch,
        "python": platform.python_version(),
        "hardware": {"cpu": _cpu_name(), "cores": cores, "memory": memory},
        "host": platform.node(),
    }


def now() -> str:
    """Returns the time in UTC, as ``2031-02-03T04:05:06.789012+00:00``."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def myself() -> dict[str, Any]:
    """Returns what identifies this process, as plain values for an event."""
    return {**_machine(), "pid": os.getpid(), "birth": _birth(os.getpid())}


@functools.cache
def machine_tag() -> str:
    """Returns 8 digits that differ for processes that do not see each other by their numbers."""
    return hashlib.sha256(repr(_machine()).encode()).hexdigest()[:8]


def is_here(process: dict[str, Any]) -> bool:
    """Whether a process of :func:`myself` is, or was, one of this machine, as it runs now."""
    return {key: process.get(key) for key in _machine()} == _machine()


def lives(process: dict[str, Any]) -> bool | None:
    """Whether a process of :func:`myself` still runs; None if that cannot be seen from here.

    If a ``thread`` of it is named, too, by Linux's number, that has to run.
    """
    if not is_here(process):
        return None  # another machine, perhaps of the same name, or this one before a restart
    pid = process.get("pid")
    if isinstance(pid, int) and state_of(pid) not in (None, "Z", "X"):
        thread = Path(f"/proc/{pid}/task/{process.get('thread', pid)}")
        return _birth(pid) == process.get("birth") and thread.exists()
    # Where processes of other users are hidden, that of process 1 is: no answer then.
    return None if state_of(1) is None else False


def wake(process: dict[str, Any]) -> None:
    """Continues a process of :func:`myself` that a signal has stopped, so that it can end itself.

    One that is not there, or is another user's, is left as it is.
    """
    if lives(process):
        with contextlib.suppress(OSError):
            os.kill(process["pid"], signal.SIGCONT)


def state_of(pid: int) -> str | None:
    """Returns a process's state as in Linux, as ``T`` (stopped), ``Z`` (ended); None: not shown."""
    return next(iter(_stat(pid)), None)


@functools.cache
def cpu_flags() -> set[str]:
    """Returns the names of what this machine's cores can, as Linux lists them; none if unknown."""
    return {*_cpu_facts().get("flags", "").split()}


def cpu_kind() -> str:
    """Returns what machines share that run the same machine code: architecture, model and flags."""
    facts = _cpu_facts()
    flags = sorted(f"{facts.get('flags', '')} {facts.get('Features', '')}".split())
    return " ".join([platform.machine(), *(facts.get(name, "") for name in CPU_MODEL), *flags])


def clock_name() -> str:
    """Returns what differs between machines whose monotonic clocks differ."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return platform.node()


def _machine() -> dict[str, Any]:
    """Returns this machine, since it was started, and the name space of its process numbers."""
    space = ""
    with contextlib.suppress(OSError):
        space = os.readlink("/proc/self/ns/pid")  # noqa: PTH115 (it leads to no path)
    return {"host": socket.gethostname(), "boot": clock_name(), "space": space}


def _birth(pid: int) -> int | None:
    # In ticks since the machine started; None if it is not shown.
    facts = _stat(pid)
    return int(facts[19]) if facts else None


def _stat(pid: int) -> list[str]:
    # What /proc/PID/stat holds behind the name: state first, start time at 19.
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return text.rpartition(")")[2].split()
    return []


@functools.cache
def _git_commit(package: Path) -> str | None:
    """Returns the commit of the checkout that ``package`` is part of, if it is part of one."""
    # A virtual environment may lie inside another repository, whose commit is not that
    # of this code, so the package must lie directly under the repository's root.
    if _git(package, "rev-parse", "--show-toplevel") != str(package.parent):
        return None
    commit = _git(package, "rev-parse", "HEAD")
    edits = commit and _git(package.parent, "diff", "HEAD", "--", ".", PAGES)
    digest = hashlib.sha256((edits or "").encode()).hexdigest()[:8]
    return f"{commit}-dirty-{digest}" if edits else commit


def _git(folder: Path, *args: str) -> str | None:
    environ = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    command = ["git", "--no-optional-locks", "-C", str(folder), *args]
    try:
        done = programs.run(*command, most_s=10, environ=environ)
    except RunError:
        return None
    return None if done.returncode else done.stdout.strip()


@functools.cache
def _cpu_facts() -> dict[str, str]:
    # What Linux writes about the first core.
    with contextlib.suppress(OSError):
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
        lines = (line.partition(":") for line in first.splitlines())
        return {name.strip(): value.strip() for name, _, value in lines}
    return {}


def _cpu_name() -> str:
    return _cpu_facts().get("model name") or platform.processor() or platform.machine()
