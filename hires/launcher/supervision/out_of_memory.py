"""Finds out whether a rank was killed because memory was exhausted, by the kernel's own count.

SIGKILL alone is no evidence: a person, a scheduler or a container can send it, too.
"""

from __future__ import annotations

from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


class OomCount:
    """Counts the processes that the kernel has killed for lack of memory since it was made."""

    def __init__(self) -> None:
        self._counter = _find_counter()
        self._before = self._read()

    def rose(self) -> str | None:
        """Returns where a kill was counted since, in words; None if none was."""
        before, now = self._before, self._read()
        if self._counter is None or before is None or now is None or now <= before:
            return None
        return f"oom_kill in {self._counter} rose from {before} to {now}"

    def _read(self) -> int | None:
        return None if self._counter is None else _count(self._counter)


def _find_counter() -> Path | None:
    """Returns the file that counts for this process's own limits, or else for the machine."""
    for file in (*_own_files(), Path("/proc/vmstat")):
        if _count(file) is not None:
            return file
    return None


def _own_files() -> list[Path]:
    """Returns the files of this process's control groups, of both versions, that may count."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        inside = path.lstrip("/")
        if not controllers:
            found += [_CGROUPS / inside / "memory.events", _CGROUPS / "memory.events"]
        elif "memory" in controllers.split(","):
            folder = _CGROUPS / "memory"
            found += [folder / inside / "memory.oom_control", folder / "memory.oom_control"]
    return found


def _count(file: Path) -> int | None:
    """Returns the number behind ``oom_kill`` in a file; None if it has none."""
    try:
        for line in file.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    except (OSError, ValueError):
        return None
    return None
