"""Prints what stands beside a result: notes, counts, and the step that takes a while."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hires.core.store.reading import Note

_MOST_NOTES = 5


def print_notes(notes: Sequence[Note]) -> None:
    """Prints the first few notes to standard error, each once."""
    lines = list(dict.fromkeys(f"note: {note.where}: {note.text}" for note in notes))
    for line in lines[:_MOST_NOTES]:
        print(line, file=sys.stderr)
    if len(lines) > _MOST_NOTES:
        print(f"note: and {len(lines) - _MOST_NOTES} more", file=sys.stderr)


def plural(count: int, noun: str) -> str:
    """Returns a count with its noun.

    >>> plural(1, "run"), plural(2, "run")
    ('1 run', '2 runs')
    """
    return f"{count} {noun}{'' if count == 1 else 's'}"


def print_activity(text: str) -> None:
    """Shows what is under way in the current line of a terminal; the next text overwrites it."""
    if sys.stderr.isatty():
        print(f"{text:<40}", end="\r", file=sys.stderr, flush=True)
