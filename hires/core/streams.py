r"""Makes a process independent of its streams and its user's home; formats logs and output.

stdout, stderr closed           /dev/null takes their numbers, before a data file gets them
the reader has gone, disk full  what cannot be written is dropped, and the work goes on
a character that has no code    is written with its number, as \xe9
no HOME, no entry of the user   the private folder of its user, and the user's number

``COLUMNS``, ``NO_COLOR``, ``FORCE_COLOR`` and ``TERM=dumb`` count in terminals, pipes and files.
What the verbs print is made printable: names, paths, logs and records may hold anything, and a
character that moves the cursor, begins an escape sequence, hides itself or turns the direction of
writing shows as a replacement character. What hires itself draws goes around that: :func:`behind`.

Source:
    https://no-color.org and https://force-color.org
"""

from __future__ import annotations

import contextlib
import getpass
import io
import logging
import os
import re
import select
import shutil
import sys
import textwrap
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO, cast

from hires.core.store.reading import printable

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


NARROWEST = 20
"""Characters a line; a smaller width is ignored."""


def columns(stream: TextIO | None = None) -> int | None:
    """Returns the characters that fit on a line; None: any number, as in a pipe or file."""
    wanted = os.environ.get("COLUMNS", "")
    if wanted.isascii() and wanted.isdigit() and int(wanted[:6]) > 0:
        return max(NARROWEST, int(wanted[:6]))
    if not (stream or sys.stdout).isatty():
        return None
    return max(NARROWEST, shutil.get_terminal_size().columns)


def moves(stream: TextIO | None = None) -> bool:
    """Whether the cursor of a stream can be moved, for bars and lines that are overwritten."""
    return (stream or sys.stdout).isatty() and os.environ.get("TERM") != "dumb"


def paints() -> bool:
    """Whether standard output shows colours; NO_COLOR decides before FORCE_COLOR."""
    if os.environ.get("NO_COLOR"):
        return False
    return os.environ.get("FORCE_COLOR", "0") not in ("", "0") or moves()


def folded(text: str, width: int) -> str:
    """Returns the paragraphs of a help text wrapped to a width, in characters.

    A paragraph with indented lines keeps its lines; a line that is too long is continued under its
    text. Examples stay as they are typed.
    """

    def fold(line: str) -> str:
        name = re.match(r" +\S+ {2,}|", line)
        return textwrap.fill(line, width, subsequent_indent=" " * len(name[0] if name else ""))

    return "\n\n".join(
        block
        if block.startswith("examples:")
        else "\n".join(map(fold, block.split("\n")))
        if "\n " in block
        else textwrap.fill(block, width)
        for block in text.split("\n\n")
    )


class PrintableStream:
    """A stream of text that passes on only what is printable."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Writes a text; returns how many characters it has."""
        self.stream.write(printable(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def printable_output() -> Iterator[None]:
    """Makes what is printed within the block printable, on both outputs."""
    outputs = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, PrintableStream(behind(one))) for one in outputs)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = outputs


def behind(stream: TextIO) -> TextIO:
    """Returns the stream that takes escape sequences, for what hires itself draws."""
    return stream.stream if isinstance(stream, PrintableStream) else stream
