"""Makes all that the verbs print printable: names, paths, logs and records may hold anything.

A character that moves the cursor, begins an escape sequence, hides itself or turns the direction of
writing shows as a replacement character. What hires itself draws goes around that: :func:`behind`.
A state of a table may be in its colour.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

from hires.core import terminal
from hires.core.screen_table import painted_state
from hires.core.store.reading import printable

_PAINTED = re.compile(r"(\x1b\[\d+m([^\x1b\n]*)\x1b\[0m)")


class PrintableStream:
    """A stream of text that passes on only what is printable."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Writes a text; returns how many characters it has."""
        self.stream.write(_shown(text) if "\x1b" in text else printable(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _shown(text: str) -> str:
    """Returns a text of which only states in their own colours are no plain text."""
    plain, shown = 0, ""
    for found in _PAINTED.finditer(text) if terminal.paints() else ():
        if found[1] == painted_state(found[2]):  # else somebody else wrote it
            shown += printable(text[plain : found.start()])
            shown += painted_state(printable(found[2]))
            plain = found.end()
    return shown + printable(text[plain:])


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
