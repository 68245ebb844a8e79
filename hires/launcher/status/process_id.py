"""Does the process that a run folder names still live, and is it that process?

Numbers of processes are given out again, results lie on file servers, and containers count anew:
a process is known by its machine, its name space of numbers, its number and when it began.
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


def is_here(told: dict[str, Any]) -> bool:
    """Whether a process of :func:`myself` is, or was, one of this machine, as it runs now."""
    return {key: told.get(key) for key in _machine()} == _machine()


def lives(told: dict[str, Any]) -> bool | None:
    """Whether a process of :func:`myself` still runs; None if that cannot be seen from here."""
    if not is_here(told):
        return (
            None  # another machine, perhaps of the same name, or this one before it was restarted
        )
    if state_of(1) is None:
        return None  # processes of other users are hidden here
    pid = told.get("pid")
    if not isinstance(pid, int) or state_of(pid) in (None, "Z"):
        return False
    return _birth(pid) == told.get("birth")


def state_of(pid: int) -> str | None:
    """Returns a process's state as Linux has it, ``R``, ``S``, ``T`` (stopped), ``Z`` (ended), ...

    None: there is no such process, or the system does not tell.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()[0]


def _machine() -> dict[str, Any]:
    """Returns this machine, since it was started, and the name space of its numbers."""
    try:
        space = os.readlink("/proc/self/ns/pid")  # noqa: PTH115 (it leads to no path)
    except OSError:
        space = ""
    return {"host": socket.gethostname(), "boot": clock_name(), "space": space}


def _birth(pid: int) -> int | None:
    """Returns when a process began, in ticks since the machine did; None if nobody tells."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[19])
