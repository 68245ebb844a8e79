r"""Makes a process independent of its standard streams and of its user's home; formats its log.

stdout, stderr closed           /dev/null takes their numbers, before a data file gets them
the reader has gone, disk full  what cannot be written is dropped, and the work goes on
a character that has no code    is written with its number, as \xe9
no HOME, no entry of the user   the private folder of its user, and the user's number
"""

from __future__ import annotations

import contextlib
import getpass
import io
import logging
import os
import select
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

_lost = False


def secure() -> None:
    """Makes the standard streams of this process exist and never raise, and names its user.

    Every program of hires begins with it; a program of a user's that imports hires does not.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    if sys.stdin is None:
        sys.stdin = io.TextIOWrapper(io.FileIO(0))
    sys.stdout = _stream(sys.stdout, 1)
    sys.stderr = _stream(sys.stderr, 2)
    _name_user()


def output_is_lost() -> bool:
    """Whether something could not be written: what only shows, as ``--follow``, then ends."""
    return _lost


class _Output(io.FileIO):
    """A standard output: what it cannot write is dropped."""

    def write(self, data: Any) -> int:
        """Writes all of some bytes; returns how many there are."""
        global _lost
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            try:
                count = super().write(view[done:])
                if count is None:  # the file is nonblocking, and its pipe is full
                    select.select([], [self], [], 1.0)
                done += count or 0
            except OSError:
                # Children, and libraries in C, write there too.
                _lost, nothing = True, os.open(os.devnull, os.O_WRONLY)
                os.dup2(nothing, self.fileno())
                os.close(nothing)
        return len(view)


def _stream(old: Any, number: int) -> Any:
    encoding = getattr(old, "encoding", None) or "utf-8"
    raw = _Output(number, "w", closefd=False)
    lines = number == 2 or os.isatty(number) or bool(getattr(old, "line_buffering", False))
    with contextlib.suppress(AttributeError, OSError, ValueError):
        old.flush()
    at_once = bool(getattr(old, "write_through", False))  # as with PYTHONUNBUFFERED
    return io.TextIOWrapper(
        raw if at_once else io.BufferedWriter(raw),
        encoding,
        errors="backslashreplace",
        line_buffering=lines,
        write_through=at_once,
    )


def _name_user() -> None:
    """Gives a user without a name, and one without a home, what libraries need of both."""
    try:
        getpass.getuser()
    except (KeyError, OSError):
        os.environ["LOGNAME"] = f"uid{os.getuid()}"
    try:
        Path.home()
    except RuntimeError:
        from hires.core.ranks.meeting import private_folder

        os.environ["HOME"] = str(private_folder())


class RankFormatter(logging.Formatter):
    """Puts time and rank before every line, as ``2026-01-31T12:03:04.518Z rank 1 warning: text``.

    The time is UTC, so that the logs of machines in several zones sort as text.
    """

    def __init__(self, rank: int | None = None) -> None:
        """Takes the rank, or None in a process that is no rank (front end, supervisor)."""
        super().__init__()
        self.name = "hires" if rank is None else f"rank {rank}"

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line, with a traceback below it if there is one."""
        level = "" if record.levelno == logging.INFO else f" {record.levelname.lower()}"
        now = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        now = now.replace("+00:00", "Z")
        line = f"{now} {self.name}{level}: {record.getMessage()}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def setup_log(rank: int | None = None, stream: TextIO | None = None) -> None:
    """Logs this process to ``stream`` (unset: stderr); ranks above 0 only warn."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(RankFormatter(rank))
    level = logging.INFO if rank in (None, 0) else logging.WARNING
    logging.basicConfig(handlers=[handler], level=level, force=True)
