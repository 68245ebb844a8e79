"""Determines what a stream can show: how wide, in colours or not, and whether its cursor moves.

``COLUMNS``, ``NO_COLOR``, ``FORCE_COLOR`` and ``TERM=dumb`` count in terminals, pipes and files.

What the verbs print is made printable: names, paths, logs and records may hold anything, and a
character that moves the cursor, begins an escape sequence, hides itself or turns the direction of
writing shows as a replacement character. What hires itself draws goes around that: :func:`behind`.

Source:
    https://no-color.org and https://force-color.org
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from typing import Any, TextIO, cast

from hires.core.store.reading import printable

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


def paints(stream: TextIO | None = None) -> bool:
    """Whether a stream shows colours; NO_COLOR decides before FORCE_COLOR."""
    if os.environ.get("NO_COLOR"):
        return False
    return os.environ.get("FORCE_COLOR", "0") not in ("", "0") or moves(stream)


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
