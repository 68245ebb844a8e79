"""Makes all that the verbs print printable: names, paths, logs and records may hold anything.

A character that moves the cursor, begins an escape sequence, hides itself or turns the direction of
writing shows as a replacement character. What hires itself draws goes around that: :func:`behind`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

from hires.core.store.reading import printable


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
