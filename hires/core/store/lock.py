"""Locks a folder for one process at a time, by a file that names the process.

    process A                      process B, same host           process C, another host
    link(tmp, .sweep.lock)  ok
    ... killed ...                 link: the file exists          link: the file exists
                                   A is gone: unlink, link  ok    A cannot be seen: HeldError

``link`` is atomic on network file systems too. ``filelock`` cannot replace this: on NFS it leaves
the lock of a dead process in place, it takes a damaged lock file for a stale one, and it does not
say since when a lock is held.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hires.core.errors import RunError
from hires.core.ranks import process_id
from hires.core.store import provenance
from hires.core.store.files import cannot_write, make_folder, write_atomically

_TRIES = 3
_POLL_S = 0.05


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
    mine = {**process_id.myself(), "time": provenance.now()}
    note = _take(path, mine, what)
    try:
        yield note
    finally:
        if _holder(path) == mine:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def waited(path: Path, what: str, patience_s: float) -> Iterator[None]:
    """Holds a lock until the end, and waits for its present holder; for what takes moments only.

    Args:
        path: the lock file; its folder is made if it is not there.
        what: what only one process may do.
        patience_s: how long it waits at most, in seconds.

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
            time.sleep(_POLL_S)
        yield


def is_held(path: Path) -> bool:
    """Whether a process holds the lock file at a path, as far as that can be seen from here."""
    holder = _holder(path)
    return holder is not None and process_id.lives(holder) is not False


def _take(path: Path, mine: dict[str, Any], what: str) -> str | None:
    """Makes the lock file; returns a note if a dead process had left one."""
    made = path.with_name(f"{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")
    note = None
    # One process of this host at a time looks at the lock and replaces it: otherwise two could find
    # it stale, and the second would remove the new lock of the first. Where a file system has no
    # such locks, ``link`` alone decides.
    guard = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(guard, fcntl.LOCK_EX)
        write_atomically(made, json.dumps(mine) + "\n")
        for _ in range(_TRIES):
            try:
                os.link(made, path)
                return note
            except FileExistsError:
                holder = _holder(path)
            if holder is None:
                continue
            if process_id.lives(holder) is not False:
                raise HeldError(_refusal(path, holder, what))
            path.unlink(missing_ok=True)
            note = f"{path} was left by process {holder['pid']}, which is gone; taken over"
    except OSError as error:
        raise cannot_write(path, error) from error
    finally:
        made.unlink(missing_ok=True)
        os.close(guard)
    raise HeldError(f"{path} comes and goes: other processes want it too; try again")


def _holder(path: Path) -> dict[str, Any] | None:
    """Returns the process that a lock file names; None if it is gone, process 0 if damaged."""
    try:
        holder = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        holder = None
    if isinstance(holder, dict) and isinstance(holder.get("pid"), int):
        return holder
    return {"pid": 0, "host": "an unknown host"}


def _refusal(path: Path, holder: dict[str, Any], what: str) -> str:
    since = holder.get("time", "an unknown time")
    return (
        f"{what} is under way already: process {holder['pid']} on {holder.get('host')} since "
        f"{since}; wait for it, stop it, or choose another campaign=NAME (if it is gone for sure, "
        f"remove {path})"
    )
