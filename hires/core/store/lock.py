"""Who works on a folder now? One process at a time, which a file names.

The file says which process, on which host, holds the lock. Making it is one ``link``, which is
atomic on network file systems too. A lock whose process is gone stays behind only if that was
killed; on the same host this is seen, and the lock is taken over.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hires.core.errors import RunError
from hires.core.store import provenance
from hires.core.store.files import cannot_write, make_folder, write_atomically

_TRIES = 3
_LOOK_S = 0.05
"""How often a lock is asked for that is waited for."""
_STATE, _STARTED = 0, 19
"""Places of state and start time behind the name of a process in ``/proc/PID/stat``."""


class HeldError(RunError):
    """Another process holds the lock."""


@contextlib.contextmanager
def held(path: Path, what: str) -> Iterator[str | None]:
    """Holds a lock until the end; yields a note if it was taken over from a dead process.

    Args:
        path: the lock file; its folder is made if it is not there.
        what: what only one process may do, as ``the sweep of campaign 'sizes'``.

    Raises:
        HeldError: another process holds it, which is named.
        RunError: it cannot be written.
    """
    make_folder(path.parent)
    mine = _myself()
    note = _take(path, mine, what)
    try:
        yield note
    finally:
        if _holder(path) == mine:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def waited(path: Path, what: str, patience_s: float) -> Iterator[None]:
    """Holds a lock until the end, after those who hold it now; for what takes moments only.

    Args:
        path: the lock file; its folder is made if it is not there.
        what: what only one process may do.
        patience_s: how long others are waited for.

    Raises:
        HeldError: another process held it all that time, which is named.
        RunError: it cannot be written.
    """
    until = time.monotonic() + patience_s
    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(held(path, what))
                break
            except HeldError:
                if time.monotonic() >= until:
                    raise
            time.sleep(_LOOK_S)
        yield


def is_held(path: Path) -> bool:
    """Whether a process holds a lock, as far as that can be seen from here.

    Args:
        path: the lock file.
    """
    holder = _holder(path)
    return holder is not None and not _is_dead(holder)


def _take(path: Path, mine: dict[str, Any], what: str) -> str | None:
    """Makes the lock file; returns what is to be said if a dead process had left one."""
    made = path.with_name(f"{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")
    note = None
    with _alone(path):
        write_atomically(made, json.dumps(mine) + "\n")
        try:
            for _ in range(_TRIES):
                try:
                    os.link(made, path)
                    return note
                except FileExistsError:
                    holder = _holder(path)
                if holder is not None and not _is_dead(holder):
                    raise HeldError(_refusal(path, holder, what))
                if holder is not None:
                    path.unlink(missing_ok=True)
                    note = f"{path} was left by process {holder['pid']}, which is gone; taken over"
        except OSError as error:
            raise cannot_write(path, error) from error
        finally:
            made.unlink(missing_ok=True)
    raise HeldError(f"{path} comes and goes: other processes want it too; try again")


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Lets one process of this host at a time look at a lock and replace it.

    Without it two could find the same lock stale, and the second would remove the first one's new
    lock. Where a file system has no such locks, ``link`` alone decides.
    """
    guard = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(guard, fcntl.LOCK_EX)
        yield
    finally:
        os.close(guard)


def _myself() -> dict[str, Any]:
    """Returns what the lock file of this process says."""
    pid = os.getpid()
    return {
        "pid": pid,
        "host": platform.node(),
        "process_started": _started(pid),
        "time": provenance.now(),
    }


def _holder(path: Path) -> dict[str, Any] | None:
    """Returns what a lock file says; None if it is gone, and nobody if it is damaged."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError):
        text = ""
    with contextlib.suppress(ValueError):
        holder = json.loads(text)
        if isinstance(holder, dict) and isinstance(holder.get("pid"), int):
            return holder
    return {"pid": 0, "host": "an unknown host"}


def _is_dead(holder: dict[str, Any]) -> bool:
    """Whether the process is of this host and gone; a new one of the same number is another."""
    if holder["host"] != platform.node():
        return False
    started = _started(holder["pid"])
    if started is not None:
        return started != holder.get("process_started")
    try:
        os.kill(holder["pid"], 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return Path("/proc/self/stat").exists()  # it ended just now


def _started(pid: int) -> int | None:
    """Returns when a process started, in ticks since the host did; None if it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    facts = text.rpartition(")")[2].split()
    return None if facts[_STATE] in "ZX" else int(facts[_STARTED])


def _refusal(path: Path, holder: dict[str, Any], what: str) -> str:
    """Returns why the lock cannot be had, and what would help."""
    return (
        f"{what} is under way already: process {holder['pid']} on {holder['host']} since "
        f"{holder.get('time', 'an unknown time')}; wait for it, stop it, or choose another "
        f"campaign=NAME (if it is gone for sure, remove {path})"
    )
