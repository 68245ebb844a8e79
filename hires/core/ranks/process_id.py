"""Identifies a process across machines and restarts, and tells whether it still runs.

Process numbers are reused, results lie on file servers, and containers count anew: a process is
identified by its machine since it was started, its name space of numbers, its number and the time
it began.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from hires.core.ranks.timeline import clock_name


def myself() -> dict[str, Any]:
    """Returns what tells this process from all others, as plain values for an event."""
    return {**_machine(), "pid": os.getpid(), "birth": _birth(os.getpid())}


def is_here(process: dict[str, Any]) -> bool:
    """Whether a process of :func:`myself` is, or was, one of this machine, as it runs now."""
    return {key: process.get(key) for key in _machine()} == _machine()


def lives(process: dict[str, Any]) -> bool | None:
    """Whether a process of :func:`myself` still runs; None if that cannot be seen from here."""
    if not is_here(process):
        return None  # another machine, perhaps of the same name, or this one before a restart
    pid = process.get("pid")
    if isinstance(pid, int) and state_of(pid) not in (None, "Z", "X"):
        return _birth(pid) == process.get("birth")
    # Where processes of other users are hidden, that of process 1 is: no answer then.
    return None if state_of(1) is None else False


def state_of(pid: int) -> str | None:
    """Returns a process's state as Linux has it: ``R``, ``S``, ``T`` (stopped), ``Z`` (ended), ...

    None: there is no such process, or the system does not show it.
    """
    facts = _facts(pid)
    return facts[0] if facts else None


def _machine() -> dict[str, Any]:
    """Returns this machine, since it was started, and the name space of its process numbers."""
    try:
        space = os.readlink("/proc/self/ns/pid")  # noqa: PTH115 (it leads to no path)
    except OSError:
        space = ""
    return {"host": socket.gethostname(), "boot": clock_name(), "space": space}


def _birth(pid: int) -> int | None:
    """Returns when a process began, in ticks since the machine did; None if it is not shown."""
    facts = _facts(pid)
    return int(facts[19]) if facts else None


def _facts(pid: int) -> list[str]:
    """Returns what /proc/PID/stat holds behind the name: state first, start time at 19."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()
