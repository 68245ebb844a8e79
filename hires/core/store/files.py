"""Writes files so that no reader ever sees half of one.

Whole files appear by writing a temporary sibling and renaming it; logs of JSON lines grow by one
``write`` per line. A full disk or a folder without permission becomes a :class:`RunError` that
names the path and the remedy, and no temporary file stays behind.
"""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from pathlib import Path

from hires.core.errors import ConfigError, HiresError, RunError
from hires.core.store.file_names import StrPath

OPTION = "results=FOLDER"
"""The option that chooses where runs are kept."""

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
    path: StrPath, text: str, *, executable: bool = False, option: str = OPTION
) -> None:
    """Writes a whole file that is either there with all of ``text`` or not there (or as before).

    Args:
        path: of the file.
        text: all of it.
        executable: whether it may be run.
        option: what a user changes to have it elsewhere.

    Raises:
        RunError: the file cannot be written; the message says why and what would work. With an
            ``option`` of its own: ConfigError.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")
    try:
        with temporary.open("x", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if executable:
            temporary.chmod(0o777 & ~_umask())
        temporary.replace(path)
    except (OSError, ValueError) as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise cannot_write(path, error, option) from error


def append_line(path: StrPath, line: str) -> None:
    """Appends one line with one ``write``, so that lines of several processes never mix.

    Raises:
        RunError: the line could not be written as a whole.
    """
    data = line.encode() + b"\n"
    try:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            written = os.write(fd, data)
        finally:
            os.close(fd)
    except OSError as error:
        raise cannot_write(path, error) from error
    if written < len(data):  # a second write could land behind another process's line
        raise cannot_write(path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))


def make_folder(path: StrPath, option: str = OPTION) -> None:
    """Makes a folder and its parents, if they are not there yet.

    Args:
        path: of the folder.
        option: what a user changes to have it elsewhere.

    Raises:
        RunError: it cannot be made. With an ``option`` of its own: ConfigError.
    """
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise cannot_write(path, error, option) from error


def cannot_write(path: StrPath, error: Exception, option: str = OPTION) -> HiresError:
    """Returns the error for a ``path`` that cannot be written: why, and what would work.

    It is a RunError, or a ConfigError if an option of the verb says what to write: no run failed.
    """
    kind = RunError if option == OPTION else ConfigError
    if not isinstance(error, OSError):
        return kind(f"cannot write {path}: {error}; use names in UTF-8")
    why = error.strerror or str(error)
    remedy = _REMEDIES.get(error.errno or 0, "choose another folder with {option}")
    advice = remedy.format(folder=Path(path).parent, option=option)
    return kind(f"cannot write {path}: {why}; {advice}")


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
