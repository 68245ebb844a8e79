"""Writes files so that no reader ever sees half of one, and locks folders by a file.

Whole files appear by writing a temporary sibling and renaming it; logs of JSON lines grow by one
``write`` per line. A full disk or a folder without permission becomes a :class:`RunError` that
names the path and the remedy, and no temporary file stays behind.

A lock file names the process that holds it:

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
import errno
import fcntl
import json
import os
import random
import re
import shutil
import stat
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hires.core.errors import ConfigError, HiresError, RunError
from hires.core.store import provenance, trust
from hires.core.store.file_names import METRICS, StrPath, rank_lines
from hires.core.store.reading import Note, Values, read_json

OPTION = "results=FOLDER"
"""The option that chooses where runs are kept."""

PROBE_MIB = 32  # size of the file that :func:`write_rate` writes
_POLL_S = 0.05
_LEFT_S = 86400  # after which what another machine builds was left
_HIDDEN = re.compile(r"\..+\.(?P<pid>\d{1,9})-(?P<tag>[0-9a-f]+)\.tmp", re.DOTALL)

_REMEDIES = {
    errno.ENOENT: "there is no folder {folder}: choose another folder with {option}, or make it",
    errno.ENOSPC: "free some space, or choose a folder on another disk with {option}",
    errno.EDQUOT: "free some of your quota, or choose a folder on another disk with {option}",
    errno.EACCES: "choose a folder that you may write to with {option}",
    errno.EPERM: "choose a folder that you may write to with {option}",
    errno.EROFS: "choose a folder that you may write to with {option}",
    errno.ENOTDIR: "a file is where a folder should be: move it, or choose {option}",
    errno.EEXIST: "a file is where a folder should be: move it, or choose {option}",
    errno.ENAMETOOLONG: "choose a shorter campaign=NAME (of a run) or {option}",
}


def write_atomically(
    path: StrPath, data: str | bytes, *, executable: bool = False, option: str = OPTION
) -> None:
    """Writes a whole file that is either there with all of ``data`` or not there (or as before).

    Raises:
        RunError: the file cannot be written; the message has reason and remedy. With an
            ``option`` of its own, which a user changes to have it elsewhere: ConfigError.
    """
    path = Path(path)
    temporary = hidden(path)
    if option != OPTION:  # a folder of the user's, which no start of a campaign looks through
        remove_leftovers(path.parent)
    try:
        content = data.encode() if isinstance(data, str) else data
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if executable:
            mask = os.umask(0o077)
            os.umask(mask)
            temporary.chmod(0o777 & ~mask)
        temporary.replace(path)
    except (OSError, ValueError) as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise cannot_write(path, error, option) from error


def hidden(path: Path) -> Path:
    """Returns the name under which this process builds a file or folder beside its place."""
    tag = f"{provenance.machine_tag()}{uuid.uuid4().hex[:8]}"
    return path.with_name(f".{path.name}.{os.getpid()}-{tag}.tmp")


def remove_leftovers(folder: Path, *, below: bool = False) -> None:
    """Removes what killed commands left in a folder, and ``below`` it, by names of :func:`hidden`.

    Another machine's processes are not seen: what they build is theirs for a day.
    """
    with contextlib.suppress(OSError):
        for left in [*folder.glob(".*.tmp"), *(folder.glob("*/.*.tmp") if below else ())]:
            name = _HIDDEN.fullmatch(left.name)
            if name is None or _may_be_built(left, int(name["pid"]), name["tag"]):
                continue
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    left.unlink()


def _may_be_built(path: Path, pid: int, tag: str) -> bool:
    if not tag.startswith(provenance.machine_tag()):
        with contextlib.suppress(OSError):
            return time.time() - path.lstat().st_mtime < _LEFT_S
        return True
    try:
        os.kill(pid, 0)  # asks only
    except ProcessLookupError:
        return False
    except OSError:
        return True  # another user's
    return True


def append_line(path: StrPath, values: Values) -> None:
    """Appends one JSON object as a line to a file of this process; raises RunError if it cannot."""
    # A loss may be NaN: these files are read by Python. One write, for threads write, too.
    data = json.dumps(values).encode() + b"\n"
    try:
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            # A full disk has left half a line, without a line break.
            size = os.fstat(fd).st_size
            if size > 0 and os.pread(fd, 1, size - 1) != b"\n":
                data = b"\n" + data
            written = os.write(fd, data)
        finally:
            os.close(fd)
        if written < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise cannot_write(path, error) from error


def append_metric(attempt: StrPath, rank: int, kind: str, /, **values: Any) -> None:
    """Appends what a rank has measured, ``kind`` says of what, to the rank's file of an attempt."""
    path = rank_lines(attempt, METRICS, rank)
    append_line(path, {"kind": kind, "rank": rank, **values})


def make_folder(path: StrPath, option: str = OPTION) -> None:
    """Makes a folder and its parents, if they are not there yet.

    Errors are those of :func:`write_atomically`.
    """
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise cannot_write(path, error, option) from error


def write_rate(folder: Path) -> float:
    """Returns how many bytes per second reach the disk of a folder; OSError: it is not writable."""
    probe, data = folder / f".probe-{uuid.uuid4().hex[:8]}", os.urandom(2**20)  # zeros compress
    began_s = time.perf_counter()
    try:
        with probe.open("xb") as file:
            for _ in range(PROBE_MIB):
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return PROBE_MIB * len(data) / (time.perf_counter() - began_s)
    finally:
        probe.unlink(missing_ok=True)


def cannot_write(path: StrPath, error: Exception, option: str = OPTION) -> HiresError:
    """Returns the error for a ``path`` that cannot be written: why, and what would work.

    It is a RunError, or a ConfigError if an option of the verb names what to write: no run failed.
    """
    kind = RunError if option == OPTION else ConfigError
    if not isinstance(error, OSError):
        return kind(f"cannot write {path}: {error}; use names in UTF-8")
    why = error.strerror or str(error)
    remedy = _REMEDIES.get(error.errno or 0, "choose another folder with {option}")
    advice = remedy.format(folder=Path(path).parent, option=option)
    return kind(f"cannot write {path}: {why}; {advice}")


class HeldError(RunError):
    """Another process holds the lock."""


@contextlib.contextmanager
def lock(path: Path, what: str, patience_s: float = 0.0) -> Iterator[str | None]:
    """Holds a lock until the end; yields a note if it was taken over from a dead process.

    Args:
        path: the lock file.
        what: only one process may do, for the error: ``the sweep of campaign 'sizes'``.
        patience_s: how long to wait for a process that holds it. Those who wait for the same lock
            may go first; each of them may take as long.

    Raises:
        HeldError: another process holds it, which is named.
        RunError: it cannot be written, or is no file.
    """
    make_folder(path.parent)
    mine = {**provenance.myself(), "time": provenance.now()}
    holder, until = None, time.monotonic() + patience_s
    while True:
        try:
            note = _take(path, mine, what)
            break
        except HeldError:
            if (current := holder_of(path)) != holder:
                holder, until = current, time.monotonic() + patience_s
            if time.monotonic() >= until:
                raise
        time.sleep(random.uniform(1, 5) * _POLL_S)  # hundreds that wait do not look in step
    try:
        yield note
    finally:
        if holder_of(path) == mine:
            path.unlink(missing_ok=True)


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock file at a path, as far as that can be seen from here."""
    holder = holder_of(path) if path.is_file() else None
    return holder is not None and provenance.lives(holder) is not False


def _take(path: Path, mine: Values, what: str) -> str | None:
    """Makes the lock file; returns a note if a dead process had left one."""
    made, note = hidden(path), None
    # One process of this host at a time looks at the lock and replaces it: otherwise two could find
    # it stale, and the second would remove the new lock of the first. Where a file system has no
    # such locks, ``link`` alone decides.
    guard = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(guard, fcntl.LOCK_EX)
        _refuse_no_file(path)
        holder = holder_of(path)
        if holder is not None and provenance.lives(holder) is False:
            path.unlink(missing_ok=True)
            note = f"{path} was left by process {holder['pid']}, which is gone; taken over"
        write_atomically(made, json.dumps(mine) + "\n")
        with contextlib.suppress(FileExistsError):
            os.link(made, path)
            return note
    except OSError as error:
        raise cannot_write(path, error) from error
    finally:
        made.unlink(missing_ok=True)
        os.close(guard)
    holder = holder_of(path) or {"pid": 0}
    raise HeldError(
        f"{what} is under way already: process {holder['pid']} on {holder.get('host')} since "
        f"{holder.get('time', 'an unknown time')}; wait for it, stop it, or choose another "
        f"campaign=NAME (if it is gone for sure, remove {path})"
    )


def _refuse_no_file(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(path.lstat().st_mode):
            raise RunError(f"{path} is no plain file; remove it")


def cache_dir() -> Path:
    """Returns the folder of this user for what can be made again, made if it can be.

    ConfigError: another user may write there.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME") or "")
    # The standard says to ignore a relative path.
    base = base if base.is_absolute() else Path.home() / ".cache"
    folder = base / "hires"
    with contextlib.suppress(OSError):  # of a home that can only be read
        for path in (base, folder):
            path.mkdir(0o700, parents=True, exist_ok=True)
    for path, why in ((base, trust.distrust_parent(base)), (folder, trust.distrust(folder))):
        if why:
            raise ConfigError(
                f"{path} {why}: let it be yours with `chmod go-w {path}`, or name a folder of your "
                f"own with XDG_CACHE_HOME"
            )
    return folder


def holder_of(path: Path) -> Values | None:
    """Returns the process that a lock file names; None if it is gone, process 0 if damaged."""
    notes: list[Note] = []
    holder = read_json(path, notes)
    if not holder and not notes:
        return None
    return holder if isinstance(holder.get("pid"), int) else {"pid": 0, "host": "an unknown host"}
